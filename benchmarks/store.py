"""rlio's hot store as a contender: the one place that says how it is opened and drawn from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import rlio
from benchmarks.data import Columns
from rlio.reader import InputReader

__all__ = ["HotStore", "PrioritisedDraws", "live", "stored"]


class HotStore:
    """A `rlio.ReplayStore`."""

    def __init__(self, store: rlio.ReplayStore) -> None:
        self.store = store

    def epochs(self, batch_size: int, *, views: bool = False) -> InputReader:
        """A reader of shuffled epochs, endless, every row once in each."""
        return self.store.epochs(batch_size=batch_size, seed=0, views=views)

    def uniform(self, batch_size: int) -> InputReader:
        """A reader that draws with replacement, as replay buffers do."""
        return self.store.uniform(batch_size=batch_size, seed=0)

    def prioritised(self, batch_size: int) -> PrioritisedDraws:
        """Draws by priority; an alpha of 0.6 and a beta of 0.4."""
        return PrioritisedDraws(self.store.prioritised(batch_size=batch_size, alpha=0.6, beta=0.4, seed=0))

    def close(self) -> None:
        """Let go of its memory and files."""
        self.store.close()


class PrioritisedDraws:
    """As `benchmarks.peers.Prioritised`; the batch size is the reader's."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader
        self._drawn: Any = None

    def sample(self, batch_size: int) -> object:
        batch = self.reader.sample()
        if len(batch) != batch_size:
            raise ValueError(f"the reader gave {len(batch)} rows, not {batch_size}")
        self._drawn = batch["batch_indexes"]
        return batch

    def update(self, errors: NDArray[np.float32]) -> None:
        self.reader.update_priorities(self._drawn, errors)


def stored(root: Path, *, cache: Literal["memory", "disk"]) -> HotStore:
    """The store of a data set, built."""
    return HotStore(rlio.ReplayStore.open(root, cache=cache))


def live(batches: Iterable[Columns], *, capacity: int) -> HotStore:
    """A store that is appended to, holding the batches."""
    store = rlio.ReplayStore(capacity=capacity)
    for batch in batches:
        store.append(rlio.SampleBatch(batch))
    return HotStore(store)
