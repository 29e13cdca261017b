"""`WriterTests`: the requirements of every `OutputWriter`.

Example:
    >>> from rlio.batch import concat_samples
    >>> from rlio.writer import OutputWriter
    >>> stored = {}
    >>> class Memory(OutputWriter):
    ...     def __init__(self, root):
    ...         super().__init__()
    ...         self.batches = stored.setdefault(root, [])
    ...     def _write(self, batch):
    ...         self.batches.append(batch.copy())
    >>> class TestMemory(WriterTests):
    ...     def make_writer(self, root):
    ...         return Memory(root)
    ...     def read_back(self, root):
    ...         return concat_samples(stored.get(root, []))
    >>> from pathlib import Path
    >>> TestMemory().test_what_goes_in_comes_out(Path("somewhere"))
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rlio.batch import Batch, SampleBatch, concat_samples
from rlio.errors import ClosedError, SchemaError
from rlio.testing.readers import assert_raises, assert_same
from rlio.writer import OutputWriter

__all__ = ["WriterTests"]

_THREADS = 4
_WRITES = 50


class WriterTests:
    """Conformance suite of writers. Subclass it and implement the two accessors; pytest finds the tests.

    Attributes:
        checks_schema: Whether the writer refuses batches that do not fit the earlier ones.
    """

    checks_schema: ClassVar[bool] = True

    # ---- the two accessors, and the rows ----

    def make_writer(self, root: Path) -> OutputWriter:
        """Return a new writer into ``root``, a folder that may be absent."""
        raise NotImplementedError(f"{type(self).__name__}.make_writer() must give a writer")

    def read_back(self, root: Path) -> Batch:
        """Return all rows under ``root``, read without the writer; rows of one writer are in their order."""
        raise NotImplementedError(f"{type(self).__name__}.read_back() must give the rows")

    def make_batch(self, rows: int, first: int = 0) -> SampleBatch:
        """Return ``rows`` rows, numbered from ``first`` in the column ``t``; all batches fit together."""
        t = np.arange(first, first + rows, dtype=np.int64)
        return SampleBatch(
            obs=(t[:, None] + np.arange(3)).astype(np.float32),
            new_obs=(t[:, None] + np.arange(1, 4)).astype(np.float32),
            actions=t % 4,
            rewards=(t / 3).astype(np.float32),
            terminateds=t % 10 == 9,
            truncateds=np.zeros(rows, bool),
            eps_id=t // 10,
            t=t,
            one_number=(t[:, None] / 7).astype(np.float64),
            bytes=(t[:, None, None] + np.arange(4).reshape(2, 2)).astype(np.uint8),
            small=(t % 100).astype(np.int16),
        )

    # ---- round trips ----

    def test_what_goes_in_comes_out(self, tmp_path: Path) -> None:
        batches = [self.make_batch(5), self.make_batch(1, 5), self.make_batch(14, 6)]
        with self.make_writer(tmp_path) as writer:
            for batch in batches:
                writer.write(batch)
            assert writer.rows_received == 20, f"rows_received is {writer.rows_received} after 20 rows"
        assert_same(self.read_back(tmp_path), concat_samples(batches), "what was read back")

    def test_flushed_rows_are_visible_before_close(self, tmp_path: Path) -> None:
        with self.make_writer(tmp_path) as writer:
            writer.write(self.make_batch(5))
            writer.flush()
            assert_same(self.read_back(tmp_path), self.make_batch(5), "after flush()")
            writer.flush()
            writer.write(self.make_batch(3, 5))
        assert_same(self.read_back(tmp_path), self.make_batch(8), "after close()")

    def test_a_batch_without_rows_adds_none(self, tmp_path: Path) -> None:
        with self.make_writer(tmp_path) as writer:
            writer.write(self.make_batch(0))
            writer.write(self.make_batch(4))
            writer.write(self.make_batch(0))
        assert_same(self.read_back(tmp_path), self.make_batch(4), "what was read back")

    def test_a_writer_that_was_given_nothing_closes(self, tmp_path: Path) -> None:
        writer = self.make_writer(tmp_path)
        writer.flush()
        writer.close()

    def test_two_writers_into_one_place_lose_nothing(self, tmp_path: Path) -> None:
        with self.make_writer(tmp_path) as one, self.make_writer(tmp_path) as other:
            one.write(self.make_batch(3))
            other.write(self.make_batch(3, 100))
            one.write(self.make_batch(3, 3))
        self._assert_numbers(tmp_path, [*range(6), *range(100, 103)])

    def test_the_caller_may_reuse_its_arrays(self, tmp_path: Path) -> None:
        batch = self.make_batch(6)
        with self.make_writer(tmp_path) as writer:
            writer.write(batch)
            for name in batch:
                batch[name][...] = 0
            writer.write(self.make_batch(2, 6))
        assert_same(self.read_back(tmp_path), self.make_batch(8), "what was read back")

    def test_read_only_arrays_and_views_are_written(self, tmp_path: Path) -> None:
        whole = self.make_batch(20)
        for name in whole:
            whole[name].flags.writeable = False
        with self.make_writer(tmp_path) as writer:
            writer.write(whole[::2])
            writer.write(whole[10:13])
        expected = concat_samples([self.make_batch(20)[::2], self.make_batch(3, 10)])
        assert_same(self.read_back(tmp_path), expected, "what was read back")

    # ---- refusals ----

    def test_a_batch_that_does_not_fit_is_refused_and_nothing_is_lost(self, tmp_path: Path) -> None:
        if not self.checks_schema:
            return
        good = self.make_batch(4)
        misfits: dict[str, Callable[[Any], Any]] = {
            "another dtype": lambda obs: obs.astype(np.float64 if obs.dtype != np.float64 else np.float32),
            "another shape": lambda obs: np.stack([obs, obs], -1),
        }
        with self.make_writer(tmp_path) as writer:
            writer.write(good)
            for what, change in misfits.items():
                bad = self.make_batch(3, 50)
                bad["obs"] = change(bad["obs"])
                assert_raises(SchemaError, writer.write, bad, what=f"write() of {what}")
                assert writer.rows_received == 4, f"{what} was counted as received"
            writer.write(self.make_batch(4, 4))
        assert_same(self.read_back(tmp_path), self.make_batch(8), "what was read back")

    def test_a_closed_writer_raises_and_may_be_closed_again(self, tmp_path: Path) -> None:
        writer = self.make_writer(tmp_path)
        writer.write(self.make_batch(2))
        writer.close()
        writer.close()
        writer.flush()
        assert_raises(ClosedError, writer.write, self.make_batch(1), what="write() after close()")
        assert_same(self.read_back(tmp_path), self.make_batch(2), "what was read back")

    def test_an_error_in_the_with_block_publishes_and_is_not_replaced(self, tmp_path: Path) -> None:
        mine = KeyError("mine")
        caught: Exception | None = None
        try:
            with self.make_writer(tmp_path) as writer:
                writer.write(self.make_batch(5))
                raise mine
        except Exception as error:
            caught = error
        assert caught is mine, f"the block's exception was replaced by {caught!r}"
        assert_same(self.read_back(tmp_path), self.make_batch(5), "what was accepted before the error")

    # ---- threads ----

    def test_threads_may_write_at_once(self, tmp_path: Path) -> None:
        failures: list[BaseException] = []

        def write(number: int) -> None:
            try:
                for i in range(_WRITES):
                    writer.write(self.make_batch(3, 3 * (number * _WRITES + i)))
            except BaseException as failure:
                failures.append(failure)
                raise

        with self.make_writer(tmp_path) as writer:
            threads = [threading.Thread(target=write, args=(number,)) for number in range(_THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not failures, f"write() failed in a thread: {failures[0]!r}"
        self._assert_numbers(tmp_path, list(range(3 * _THREADS * _WRITES)))

    def _assert_numbers(self, root: Path, expected: list[int]) -> None:
        """Check that exactly the rows numbered ``expected`` are under ``root``, each unchanged."""
        rows = self.read_back(root)
        assert isinstance(rows, SampleBatch), f"read_back() gave a {type(rows).__name__}"
        numbers = rows["t"]
        assert sorted(numbers.tolist()) == expected, f"{len(numbers)} rows, expected {len(expected)}"
        whole = self.make_batch(expected[-1] + 1)
        assert_same(rows, whole[numbers], "rows, each compared with the one of its number")
