"""Savers and loaders of one folder at once: whatever comes between two calls, one whole save is there."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from crash_shim import DIED, Call, dying_at, failing, impatient, intercepted
from fsspec.implementations.memory import MemoryFileSystem
from further import further, on_servers
from servers import Server

import rlio
from rlio.errors import CorruptData, DataNotFound, RlioError
from rlio.policies.checkpoint import load_components, load_state, save_components, save_state
from rlio.storage import Storage, generations
from rlio.storage.remote import RemoteFolder

#: Every how many calls something happens. `make test-all` begins with each of the first calls.
STRIDES = {"checkpoint": 24, "store": 12, "state": 6}
POINTS_OF_ALL = [(kind, start) for kind, stride in STRIDES.items() for start in range(stride)]
POINTS = [point if point[1] == 0 else further(point)[0] for point in POINTS_OF_ALL]


class Saved(NamedTuple):
    """What can be saved.

    Attributes:
        save: Saves something with a number in all its parts.
        load: Loads it, and gives the number if all parts have the same.
    """

    save: Callable[[Any, int], None]
    load: Callable[[Any], int]


def store_of(number: int) -> rlio.ReplayStore:
    store = rlio.ReplayStore(30)
    store.append(rlio.SampleBatch(t=np.arange(20), obs=np.full((20, 2), number, np.float32)))
    return store


def number_in(store: rlio.ReplayStore) -> int:
    (number,) = set(store.uniform(batch_size=99, seed=0).sample()["obs"].ravel().tolist())
    return int(number)


def save_all(folder: Any, number: int) -> None:
    rlio.save_checkpoint(folder, number=number, array=np.full(50, number), store=store_of(number))


def load_all(folder: Any) -> int:
    found = rlio.load_checkpoint(folder, store=rlio.ReplayStore)
    (number,) = {found["number"], *found["array"].tolist(), number_in(found["store"])}
    return int(number)


def save_values(folder: Any, number: int) -> None:
    rlio.save_checkpoint(folder, number=number, array=np.full(50, number))


def load_values(folder: Any) -> int:
    found = rlio.load_checkpoint(folder)
    (number,) = {found["number"], *found["array"].tolist()}
    return int(number)


def load_a_state(folder: Any) -> int:
    found = load_state(folder)
    (number,) = {found["number"], *found["array"].tolist()}
    return int(number)


def save_worker(folder: Any, number: int) -> None:
    save_components(folder, {"metrics": {"episodes": number}, "policies": {"w": np.full(9, number)}})


def load_worker(folder: Any) -> int:
    found = load_components(folder)
    (number,) = {found["metrics"]["episodes"], *found["policies"]["w"].tolist()}
    return int(number)


STATE = Saved(
    lambda folder, number: save_state(folder, {"number": number, "array": np.full(9, number)}), load_a_state
)
#: On a local disk.
LOCAL = {
    "checkpoint": Saved(save_all, load_all),
    "store": Saved(
        lambda folder, number: store_of(number).save(folder), lambda f: number_in(rlio.ReplayStore.load(f))
    ),
    "state": STATE,
    "worker": Saved(save_worker, load_worker),
}
#: On a store.
REMOTE = {"checkpoint": Saved(save_values, load_values), "state": STATE}


@contextmanager
def coming_between(act: Callable[[], object], point: int) -> Iterator[list[int]]:
    """Do something before the ``point``-th call of the operating system; gives the number of calls."""
    seen, busy = [0], [False]

    def handle(call: Call) -> Any:
        if not busy[0]:
            seen[0] += 1
            if seen[0] == point:
                busy[0] = True
                act()
                busy[0] = False
        return call.go()

    with intercepted(handle):
        yield seen


@contextmanager
def coming_between_requests(act: Callable[[], object], point: int) -> Iterator[list[int]]:
    """The same for the requests to a store."""
    seen, busy = [0], [False]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not busy[0]:
                seen[0] += 1
                if seen[0] == point:
                    busy[0] = True
                    act()
                    busy[0] = False
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("read", "put", "entries", "children", "remove", "modified", "exists"):
            patch.setattr(RemoteFolder, name, counted(getattr(RemoteFolder, name)))
        yield seen


def files_of(folder: Path) -> list[str]:
    """The names in a folder, with an X for the digits of a generation."""
    return sorted("X" if len(path.name) >= 32 else path.name for path in folder.iterdir())


def tidy(folder: Path) -> None:
    """Check that nothing remains of earlier saves."""
    assert files_of(folder) in (["X", "checkpoint.json"], ["X", "store.json"], ["arrays.npz", "state.json"])


# ---- what comes between two calls ----


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "start"), POINTS)
def test_a_save_between_any_two_calls_of_another_leaves_one_whole_save(
    tmp_path: Path, kind: str, start: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Both savers returned, and nothing could be loaded."""
    save, load = LOCAL[kind]
    for point in itertools.count(1 + start, STRIDES[kind]):
        folder = tmp_path / str(point)
        save(folder, 0)

        def other(folder: Path = folder) -> None:
            save(folder, 1)
            assert load(folder) in (1, 2)

        with coming_between(other, point) as calls:
            save(folder, 2)
        assert load(folder) in (1, 2)
        save(folder, 3)
        assert load(folder) == 3
        tidy(folder)
        shutil.rmtree(folder)
        if calls[0] < point:
            break
    assert point > 20
    # No file was taken from its saver, and stored again. Writers that other tests left are not of this one.
    assert not [one for one in caplog.records if "rows wait" not in one.msg]


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "start"), POINTS)
def test_a_load_between_any_two_calls_of_a_save_finds_one_whole_save(
    tmp_path: Path, kind: str, start: int
) -> None:
    save, load = LOCAL[kind]
    found: list[int] = []
    for number in itertools.count(1):
        point = 1 + start + STRIDES[kind] * (number - 1)
        save(tmp_path, 2 * number)
        with coming_between(lambda: found.append(load(tmp_path)), point) as calls:
            save(tmp_path, 2 * number + 1)
        if calls[0] < point:
            break
        assert found[-1] in (2 * number, 2 * number + 1)
    assert {each % 2 for each in found} == {0, 1}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", STRIDES)
def test_saves_between_any_two_calls_of_a_load_do_not_break_it(tmp_path: Path, kind: str) -> None:
    save, load = LOCAL[kind]
    for point in itertools.count(1):
        save(tmp_path, point)

        def others(number: int = -point) -> None:
            save(tmp_path, number)
            save(tmp_path, number)

        with coming_between(others, point) as calls:
            found = load(tmp_path)
        if calls[0] < point:
            break
        assert abs(found) == point
    assert point > 5


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", REMOTE)
@pytest.mark.parametrize("what", ["save", "load"])
def test_what_comes_between_two_requests_of_a_save_leaves_one_whole_save(kind: str, what: str) -> None:
    save, load = REMOTE[kind]
    uri = f"memory://two-savers/{kind}-{what}"
    for point in itertools.count(1):
        save(uri, 0)
        with coming_between_requests(
            partial(save, uri, 1) if what == "save" else partial(load, uri), point
        ) as calls:
            save(uri, 2)
        assert load(uri) in (1, 2)
        save(uri, 3)
        assert load(uri) == 3
        if calls[0] < point:
            break
    assert point > 2
    MemoryFileSystem.store.clear()


@pytest.mark.parametrize("kind", REMOTE)
def test_saves_between_any_two_requests_of_a_load_do_not_break_it(kind: str) -> None:
    save, load = REMOTE[kind]
    uri = f"memory://two-savers/{kind}"
    for point in itertools.count(1):
        save(uri, point)

        def others(number: int = -point) -> None:
            save(uri, number)
            save(uri, number)

        with coming_between_requests(others, point) as calls:
            found = load(uri)
        if calls[0] < point:
            break
        assert abs(found) == point
    MemoryFileSystem.store.clear()


def test_a_store_keeps_what_is_being_saved_and_removes_what_a_dead_saver_left_a_day_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store has no locks: what was put less than a day ago may belong to a save that is not done."""
    uri = "memory://two-savers/dead"

    def folders() -> int:
        return len(
            {path.split("/")[3] for path in MemoryFileSystem.store if "/dead/" in path} - {"checkpoint.json"}
        )

    def dies(self: Any, path: str, data: Any) -> None:
        if path == "checkpoint.json":
            raise KeyboardInterrupt
        put(self, path, data)

    put = RemoteFolder.put
    save_values(uri, 1)
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "put", dies)
        with pytest.raises(KeyboardInterrupt):
            save_values(uri, 2)
    assert load_values(uri) == 1
    save_values(uri, 3)
    assert folders() == 2
    monkeypatch.setattr(generations, "_GRACE", -1.0)
    save_values(uri, 4)
    assert folders() == 1
    assert load_values(uri) == 4
    MemoryFileSystem.store.clear()


def test_what_a_store_lost_is_damage_and_not_a_first_run() -> None:
    """A program that begins where nothing was saved began again at 0, since it was DataNotFound."""
    uri = "memory://two-savers/lost"
    save_values(uri, 1)
    for path in [path for path in MemoryFileSystem.store if path.endswith(".npz")]:
        del MemoryFileSystem.store[path]
    with pytest.raises(CorruptData):
        load_values(uri)
    MemoryFileSystem.store.clear()


def test_different_objects_share_a_folder(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for number in range(1, 4):
        for other in LOCAL:
            if other != "state":  # The same files as those of a worker.
                LOCAL[other].save(tmp_path, number)
    for other in LOCAL:
        assert other == "state" or LOCAL[other].load(tmp_path) == 3
    expected = ["X", "X", "arrays.npz", "checkpoint.json", "notes.txt", "state.json", "store.json"]
    assert files_of(tmp_path) == expected


def test_a_store_is_saved_into_a_folder_with_other_files(tmp_path: Path) -> None:
    """The folder was renamed and removed, with all that was in it."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    for number in (1, 2):
        store_of(number).save(tmp_path)
    assert (tmp_path / "notes" / "a.txt").read_text() == "mine"
    assert files_of(tmp_path) == ["X", "notes", "store.json"]


# ---- processes ----


@pytest.mark.further
@pytest.mark.parametrize("kind", ["checkpoint", *further("worker")])
def test_processes_that_save_and_load_at_once_leave_and_find_whole_saves(tmp_path: Path, kind: str) -> None:
    save, load = LOCAL[kind]
    save(tmp_path, 1)
    end = time.monotonic() + 0.7

    def run(act: Callable[[], object]) -> int:
        child = os.fork()
        if not child:
            code = 1
            try:
                while True:  # At least once, however late the child begins.
                    act()
                    if time.monotonic() > end:
                        break
                code = 0
            finally:
                os._exit(code)
        return child

    children = [run(partial(save, tmp_path, number)) for number in (2, 3)] + [run(partial(load, tmp_path))]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert load(tmp_path) in (2, 3)
    save(tmp_path, 4)
    tidy(tmp_path)


@pytest.mark.parametrize(
    ("kind", "start"), [point if point == ("checkpoint", 0) else further(point)[0] for point in POINTS_OF_ALL]
)
def test_what_a_killed_saver_left_is_removed_by_the_next_save(tmp_path: Path, kind: str, start: int) -> None:
    save, load = LOCAL[kind]

    def dies(folder: Path, point: int) -> bool:
        child = os.fork()
        if not child:
            with intercepted(dying_at(point)):
                save(folder, 2)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == DIED

    found = set()
    for number in itertools.count():
        folder = tmp_path / str(number)
        save(folder, 1)
        if not dies(folder, 1 + start + STRIDES[kind] * number):
            break
        found.add(load(folder))
        save(folder, 3)
        assert load(folder) == 3
        tidy(folder)
    assert found
    assert found <= {1, 2}


# ---- calls that fail ----


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "start"), POINTS)
def test_a_save_that_fails_leaves_the_earlier_one(tmp_path: Path, kind: str, start: int) -> None:
    save, load = LOCAL[kind]
    with impatient():
        for point in itertools.count(1 + start, STRIDES[kind]):
            save(tmp_path, 1)

            def fails(name: str, number: int) -> bool:
                return number == point or (number > point and name == "write")  # noqa: B023

            with intercepted(failing(fails, errno.ENOSPC)) as calls:
                try:
                    save(tmp_path, 2)
                    expected = {2}
                except (RlioError, OSError):
                    expected = {1, 2}  # 2: only the call that makes it durable failed.
            assert load(tmp_path) in expected
            if calls[point - 1 : point] == ["write"]:
                # What was written before is removed.
                assert files_of(tmp_path).count("X") <= 1
                assert not list(tmp_path.rglob("*.tmp"))
            if len(calls) < point:
                break
            save(tmp_path, 3)
            assert load(tmp_path) == 3
            tidy(tmp_path)


def test_an_interrupt_right_after_the_commit_does_not_remove_what_was_saved(tmp_path: Path) -> None:
    """The new checkpoint was named, and then removed as that of a save that failed."""
    save_all(tmp_path, 1)

    def handle(call: Call) -> Any:
        result = call.go()
        if call.name == "replace" and call.args[1] == "checkpoint.json":
            raise KeyboardInterrupt
        return result

    with intercepted(handle), pytest.raises(KeyboardInterrupt):
        save_all(tmp_path, 2)
    assert load_all(tmp_path) == 2


@pytest.mark.parametrize("scheme", on_servers("ftp", "s3", "azure", "sftp"))
def test_savers_and_loaders_of_a_real_store_find_one_whole_save(
    scheme: str, serve: Callable[[str], Server]
) -> None:
    server = serve(scheme)
    uri, options = server.fresh_root(), {"storage_options": server.options}
    rlio.save_checkpoint(uri, number=0, array=np.zeros(9), **options)

    def save(number: int) -> None:
        rlio.save_checkpoint(uri, number=number, array=np.full(9, number), **options)

    def load() -> set[int]:
        found = rlio.load_checkpoint(uri, **options)
        return {found["number"], *found["array"].tolist()}

    with ThreadPoolExecutor(2) as pool:
        savers = [pool.submit(save, number) for number in (1, 2)]
        while not all(saver.done() for saver in savers):
            assert len(load()) == 1
        for saver in savers:
            saver.result()
    assert load() in ({1}, {2})
    rlio.save_checkpoint(uri, number=3, array=np.full(9, 3), **options)
    assert load() == {3}
    folders = Storage.open(uri, storage_options=server.options).folders("")
    assert len([name for name in folders if name != "_tmp"]) == 1


# ---- names ----


@pytest.mark.few(8)
@pytest.mark.parametrize(
    "name",
    [
        "states",
        "state",
        "store-0",
        "checkpoint.json",
        "folder",
        "parts",
        "a/b",
        "../x",
        "..",
        "",
        "$array",
        "con",
        "é\n",
        "\ud800",
        "x" * 300,
    ],
)
def test_a_part_may_have_any_name(tmp_path: Path, name: str) -> None:
    """A store with the name "states" overwrote the states of the other parts."""
    folder = tmp_path / "checkpoint"
    values = {"other": np.arange(3), "Store": 1}
    rlio.save_checkpoint(folder, **{name: store_of(7)}, **values)
    found = rlio.load_checkpoint(folder, **{name: rlio.ReplayStore})
    assert number_in(found.pop(name)) == 7
    np.testing.assert_equal(found, values)
    rlio.save_checkpoint(folder, **{name: 8}, **values)
    np.testing.assert_equal(rlio.load_checkpoint(folder), {name: 8, **values})
    rng = np.random.default_rng(1)
    rlio.save_checkpoint(folder, **{name: rng})
    assert rlio.load_checkpoint(folder, **{name: rng}) == {}
    assert files_of(tmp_path) == ["checkpoint"]


def test_the_one_name_that_no_part_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RlioError, match="storage_options"):
        rlio.save_checkpoint(tmp_path / "c", storage_options=store_of(1), step=1)
    with pytest.raises(RlioError, match="storage_options"):
        rlio.save_checkpoint(tmp_path / "c", storage_options={"lr": 0.1}, step=1)
    with pytest.raises(DataNotFound):
        rlio.load_checkpoint(tmp_path / "c")
