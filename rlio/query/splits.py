"""Splits of the episodes of a data set, by a stable hash: in it, an episode always stays on the same side.

Added rows and compaction do not move an episode. The hash is of ``eps_id`` alone if the id was drawn at
random (a number from 2^32 on, a text of 16 characters or more), so that runs repeated with one seed are on
one side. Otherwise it is also of the writer, because other writers use small numbers for other episodes. All
agents of an episode are on one side. A conversion changes the writer, so an episode with a small id may
change sides.

Example:
    >>> train, test = Split.of(("train", 0.8)), Split.of(("test", 0.8))
    >>> ids = np.arange(1000) // 10
    >>> here = train.holds(ids, "w00000-00000000")
    >>> int(here.sum()) // 10, bool((here ^ test.holds(ids, "w00000-00000000")).all())
    (77, True)
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray

from rlio.errors import OptionError, excerpt

__all__ = ["Split", "is_drawn_id"]

# Smaller ids and shorter texts are counters and names, which two writers may use for different episodes.
_LEAST_NUMBER: Final = 1 << 32
_LEAST_LETTERS: Final = 16


def is_drawn_id(name: object) -> bool:
    """Whether an episode's id was drawn at random (by rlio or as a UUID), and so names no other episode."""
    if isinstance(name, str):
        return len(name) >= _LEAST_LETTERS
    return isinstance(name, int) and abs(name) >= _LEAST_NUMBER


@dataclass(frozen=True)
class Split:
    """One side of a split.

    Attributes:
        side: "train": episodes whose hash is below ``share``; "test": the others.
        share: Share of the episodes in "train", above 0 and below 1.
    """

    side: Literal["train", "test"]
    share: float

    @classmethod
    def of(cls, value: Any) -> Self:
        """Read the option ``split``: ``("train", 0.9)`` or ``("test", 0.9)``.

        Raises:
            OptionError: It is neither.
        """
        match value:
            case ("train" | "test" as side, float() as share) if 0.0 < share < 1.0:
                return cls(side, share)
        raise OptionError(
            f"split={excerpt(value)}: expected ('train', share) or ('test', share), with the share of the "
            "episodes that are for training, between 0 and 1"
        )

    @property
    def text(self) -> str:
        """Names the side in saved states."""
        return f"{self.side} of {self.share!r}"

    def holds(self, ids: NDArray[Any], writers: str | NDArray[Any]) -> NDArray[np.bool_]:
        """Whether rows are on this side.

        Args:
            ids: ``eps_id`` of the rows, shape (n,).
            writers: Writer of all rows, or of each.
        """
        names = ids.tolist()
        owners = [writers] * len(names) if isinstance(writers, str) else writers.tolist()
        known: dict[tuple[Any, str], bool] = {}
        before, side = None, False
        found = np.empty(len(names), bool)
        for row, key in enumerate(zip(names, owners, strict=True)):
            if key != before:
                before = key
                if key not in known:
                    known[key] = self._holds(*key)
                side = known[key]
            found[row] = side
        return found

    def _holds(self, eps_id: Any, writer: str) -> bool:
        # Texts are taken as they are: how Python escapes them depends on its version.
        name = f"text {eps_id}" if isinstance(eps_id, str) else repr(eps_id)
        text = name if is_drawn_id(eps_id) else f"{writer}/{name}"
        hashed = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
        return (int.from_bytes(hashed, "big") / 2**64 < self.share) == (self.side == "train")
