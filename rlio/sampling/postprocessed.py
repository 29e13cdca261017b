"""`Postprocessed`: rows that were postprocessed when their episode ended or was cut, and not handed out yet.

Example:
    >>> import numpy as np
    >>> rows = Postprocessed()
    >>> rows.add("episode", 3, SampleBatch(eps_id=np.zeros(3, int), t=np.arange(3), rewards=np.ones(3)))
    >>> rows.count("episode")
    3
    >>> rows.take("episode", 2)["t"].tolist(), rows.take("episode", 1)["t"].tolist(), rows.take("episode", 1)
    ([0, 1], [2], None)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from rlio.batch import SampleBatch, concat_samples

__all__ = ["Postprocessed"]


class Postprocessed:
    """Postprocessed rows by trajectory, in order. The rows as recorded stay in their store meanwhile."""

    def __init__(self) -> None:
        #: Trajectory -> its pieces: (number of recorded rows, the rows after postprocessing).
        self._pieces: dict[Hashable, list[tuple[int, SampleBatch]]] = {}

    def count(self, key: Hashable) -> int:
        """Number of recorded rows of the trajectory ``key`` that were postprocessed and not handed out."""
        return sum(rows for rows, _ in self._pieces.get(key, ()))

    def add(self, key: Hashable, rows: int, made: SampleBatch) -> None:
        """Keep ``made``, which the next ``rows`` recorded rows of the trajectory became."""
        self._pieces.setdefault(key, []).append((rows, made))

    def take(self, key: Hashable, rows: int) -> SampleBatch | None:
        """Hand out what the first ``rows`` recorded rows became; None if they were not postprocessed."""
        pieces, taken = self._pieces.pop(key, []), []
        while pieces and rows > 0:
            size, made = pieces.pop(0)
            if size > rows:
                # Its last rows are surplus of the fragment. Postprocessing keeps the number of rows.
                pieces.insert(0, (size - rows, made[rows:]))
                size, made = rows, made[:rows]
            taken.append(made)
            rows -= size
        if pieces:
            self._pieces[key] = pieces
        return concat_samples(taken) if len(taken) > 1 else taken[0] if taken else None

    def keep(self, wanted: Callable[[Any], bool]) -> None:
        """Forget the rows of all trajectories except those that are ``wanted``."""
        self._pieces = {key: pieces for key, pieces in self._pieces.items() if wanted(key)}

    def clear(self) -> None:
        """Forget all rows."""
        self._pieces.clear()
