"""`EncodedPicture`: a picture that stays the bytes of a PNG or JPEG file, as a row of a column.

Sources give pictures as they are stored. The engine decodes them when a group is read; a conversion does not,
so that it writes the same bytes. Like compressed columns (`rlio.batch.compressed_rows`), encoded ones are
object arrays, which are sliced, shuffled, joined and pickled like any other.

`rlio.batch.picture_codecs` encodes and decodes them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np

__all__ = ["CODECS", "Codec", "EncodedPicture", "is_encoded", "row_type"]

#: How a picture is encoded.
Codec: TypeAlias = Literal["png", "jpeg"]
#: All codecs -> whether decoding gives back the frames that were encoded.
CODECS: Final[Mapping[str, bool]] = {"png": True, "jpeg": False}


@dataclass(frozen=True, slots=True)
class EncodedPicture:
    """A picture as the bytes of a file.

    Attributes:
        data: The bytes; b"": there is no picture, as where ``new_obs`` is missing, and its values are zeros.
        codec: How it is encoded.
        shape: (height, width) or (height, width, channels) of its values, which are uint8.
    """

    data: bytes
    codec: Codec
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape)

    def none(self) -> EncodedPicture:
        """No picture, in a column that has this one."""
        return EncodedPicture(b"", self.codec, self.shape)

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + sys.getsizeof(self.data)

    def __repr__(self) -> str:
        return f"EncodedPicture({self.codec}, {self.shape}, {len(self.data)} bytes)"


def is_encoded(leaf: object) -> bool:
    """Whether ``leaf`` is an array of encoded pictures."""
    return (
        isinstance(leaf, np.ndarray)
        and leaf.dtype == object
        and leaf.ndim == 1
        and len(leaf) > 0
        and isinstance(leaf[0], EncodedPicture)
    )


def row_type(leaf: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Dtype of an array, and shape of a row: of encoded pictures, those of their values."""
    return (np.dtype(np.uint8), leaf[0].shape) if is_encoded(leaf) else (leaf.dtype, leaf.shape[1:])
