"""`RowDigest`: detects whether the same rows come again, however they are cut into batches.

Example:
    >>> from rlio.batch import SampleBatch
    >>> one, other = RowDigest(), RowDigest()
    >>> one.add(SampleBatch(t=[1, 2, 3]))
    >>> other.add(SampleBatch(t=[1, 2])); other.add(SampleBatch(t=[3]))
    >>> one == other
    True
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch
from rlio.batch.arrays import to_numpy
from rlio.batch.nested import leaves, path_text
from rlio.schemas.json_values import dump_value

__all__ = ["RowDigest"]


@dataclass
class RowDigest:
    """Number, types and CRC-32 of the values of each column, for each policy. Equal for equal rows.

    It finds accidents, not forgeries.
    """

    _found: dict[tuple[str, str], tuple[str, int, int]] = field(default_factory=dict)

    def add(self, batch: Batch) -> None:
        """Add the next rows."""
        for pid, rows in batch.policies().items():
            for column in rows if rows.count else ():
                for path, leaf in leaves(rows[column]):
                    self._add((pid, path_text((column, *path))), to_numpy(leaf))

    def _add(self, key: tuple[str, str], values: NDArray[Any]) -> None:
        kind, rows, crc = self._found.get(key, ("", 0, 0))
        if values.dtype.kind in "OUS":
            kind = "text"
            texts = [_text(value) for value in values.tolist()]
            data: Any = b"".join(b"%d:" % len(text) + text for text in texts)
        else:
            kind = f"{values.dtype.str} {values.shape[1:]}"
            data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self._found[key] = kind, rows + len(values), zlib.crc32(data, crc)

    def unlike(self, other: RowDigest) -> list[str]:
        """Return the columns that differ."""
        keys = self._found.keys() | other._found.keys()
        return sorted({key[1] for key in keys if self._found.get(key) != other._found.get(key)})


def _text(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    text = value if isinstance(value, str) else dump_value(value)
    return text.encode("utf-8", "surrogatepass")
