"""Work beside other work gives its result or its error, also where no thread can be had."""

import threading

import numpy as np
import pytest

import rlio
from rlio.schemas.beside import beside


def test_the_work_is_done_in_another_thread() -> None:
    seen = beside(threading.current_thread)()
    assert seen is not threading.current_thread()
    seen.join(10)
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


def test_a_column_that_is_damaged_beside_the_others_is_an_error() -> None:
    """The obs of a group are its largest column, decoded in another thread, where it fails."""
    from rlio.schemas import shard_file

    obs = np.random.default_rng(0).normal(size=(40_000, 8)).astype(np.float32)
    with rlio.ParquetWriter("memory://beside") as writer:
        writer.write(rlio.SampleBatch(obs=obs, t=np.arange(len(obs))))
    assert obs.nbytes > shard_file._BESIDE_BYTES
    with rlio.DatasetReader("memory://beside", epochs=1, batch_size=len(obs)) as reader:
        (batch,) = reader
    assert batch["obs"].tobytes() == obs.tobytes()
    dataset = rlio.open_dataset("memory://beside")
    shard = dataset.open_shard(dataset.segments[0])
    with pytest.MonkeyPatch.context() as patch:

        def fail(*arguments: object) -> None:
            if threading.current_thread().name == "rlio-beside":
                raise OSError("ZSTD decompression failed")

        patch.setattr(shard_file, "_fixed", fail)
        with pytest.raises(rlio.CorruptData, match="damaged: 'ZSTD"):
            shard.read(0)
