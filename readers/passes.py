"""`Pass` and `SnapshotPass`: what a `DatasetReader` reads with, and what a pass that grows is made of."""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

from rlio.dataset import Dataset
from rlio.interfaces import Batch, JsonState, ReadLedger, ReadOptions, Unit

__all__ = ["Kept", "Pass", "SnapshotPass"]

#: Where a pass keeps its rows.
Kept: TypeAlias = Literal["memory", "disk", "none"]


class Pass(Protocol):
    """What reads: epochs over what was listed, or one pass over what grows."""

    @property
    def cache(self) -> Kept: ...

    @property
    def dataset(self) -> Dataset: ...

    @property
    def unit(self) -> Unit: ...

    @property
    def total(self) -> int: ...

    @property
    def skipped(self) -> int: ...

    @property
    def ledger(self) -> ReadLedger: ...

    @property
    def epoch(self) -> int: ...

    @property
    def seed(self) -> int | None: ...

    def take(self, n: int | None) -> Batch: ...

    def skip(self, n: int) -> None: ...

    def position(self) -> JsonState: ...

    def seek(self, position: JsonState) -> None: ...

    def close(self) -> None: ...


class SnapshotPass(Pass, Protocol):
    """Reads epochs of one snapshot."""

    options: ReadOptions

    @property
    def offset(self) -> int:
        """Units of this epoch that all ranks together have been dealt."""

    @property
    def batch_size(self) -> int:
        """Units of a batch, where no number is asked for."""

    def skip(self, n: int, size: int | None = None) -> None:
        """Step over ``n`` batches of ``size`` units; None: of `batch_size`."""

    def serves(self, dataset: Dataset) -> bool:
        """Whether another listing of the data set has the same rows, in the same places if these matter."""

    def extend(self, epochs: int) -> None:
        """Read so many epochs in all."""

    def check_whole_epochs(self) -> None:
        """Raise `LedgerError` where rows got lost or doubled."""
