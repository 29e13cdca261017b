"""Small readers and writers that the tests of compositions are made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlio.batch import Batch, MultiAgentBatch, SampleBatch, concat_samples
from rlio.errors import EndOfData
from rlio.reader import InputReader, JsonState
from rlio.writer import OutputWriter


def rows_of(first: int, stop: int, label: int = 0) -> SampleBatch:
    """Rows numbered ``first`` to ``stop - 1``."""
    t = np.arange(first, stop, dtype=np.int64)
    return SampleBatch(
        t=t, label=np.full(len(t), label, np.int8), obs=(t[:, None] * [1, 2]).astype(np.float32)
    )


class Counting(InputReader):
    """Rows 0 to ``total - 1`` (None: without end) in batches whose sizes are taken in turn."""

    def __init__(self, total: int | None, sizes: Sequence[int] = (3,), *, label: int = 0) -> None:
        self.total = total
        self.sizes = list(sizes)
        self.label = label
        self.number = 0
        self.row = 0
        self.closed = 0

    def _next(self) -> Batch:
        if self.total is not None and self.row >= self.total:
            raise EndOfData(f"row {self.total}")
        stop = self.row + self.sizes[self.number % len(self.sizes)]
        if self.total is not None:
            stop = min(stop, self.total)
        batch = rows_of(self.row, stop, self.label)
        self.number, self.row = self.number + 1, stop
        return batch

    def _position(self) -> JsonState:
        return {"number": self.number, "row": self.row}

    def _seek(self, position: JsonState) -> None:
        self.number, self.row = position["number"], position["row"]

    def _close(self) -> None:
        self.closed += 1


class Live(Counting):
    """A source that cannot be read again: restored, it goes on behind what it gave, if to nobody."""

    replayable = False


class Agents(Counting):
    """The same rows as the steps of two agents, policies ``even`` and ``odd`` by turns of ten."""

    def _next(self) -> Batch:
        batch = super()._next()
        assert isinstance(batch, SampleBatch)
        batch["eps_id"] = batch["t"] // 10
        return MultiAgentBatch({"even": batch, "odd": batch.copy()}, len(batch))


class Keeping(OutputWriter):
    """Keeps copies of what it is given; raises ``fail`` instead, once, if it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []
        self.fail: Exception | None = None
        self.flushes = 0
        self.closes = 0

    def _write(self, batch: Batch) -> None:
        self._maybe_fail()
        self.batches.append(batch.copy())

    def _flush(self) -> None:
        self.flushes += 1
        self._maybe_fail()

    def _close(self) -> None:
        self.closes += 1

    def _maybe_fail(self) -> None:
        if self.fail is not None:
            failure, self.fail = self.fail, None
            raise failure

    @property
    def rows(self) -> Batch:
        """All rows, in the order in which they came."""
        return concat_samples(self.batches)


def numbers(batches: Sequence[Batch]) -> list[int]:
    """Row numbers of ``batches``, in order."""
    joined = concat_samples(list(batches))
    assert isinstance(joined, SampleBatch)
    return joined["t"].tolist() if "t" in joined else []
