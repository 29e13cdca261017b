"""Work beside other work gives its result or its error, also where no thread can be had."""

import threading

import pytest

from rlio.replay.beside import beside


def test_the_work_is_done_in_another_thread() -> None:
    seen = beside(threading.current_thread)()
    assert seen is not threading.current_thread()
    seen.join(60)
    assert not seen.is_alive()


def test_an_error_is_raised_where_the_result_is_wanted() -> None:
    result = beside(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        result()


def test_without_threads_the_work_is_done_by_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert beside(threading.current_thread)() is threading.current_thread()
