"""Pictures in the files of other libraries, decoded and encoded by Pillow (extra ``images``)."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch.pictures import encode_png, pillow
from rlio.errors import CorruptData, RlioError, excerpt
from rlio.formats.files.allowance import Allowance

__all__ = ["decode_images", "encode_png"]

# Channels of the modes of pictures whose bytes are their values.
_CHANNELS: Final = {"L": None, "RGB": 3, "RGBA": 4}
# Bytes of a pixel of the picture that is decoded: Pillow has four, and makes two copies of the bytes.
_COPIES: Final = 12


def decode_images(
    pictures: Sequence[bytes],
    shape: tuple[int, ...] | None,
    *,
    format: str | None = None,
    allowance: Allowance,
) -> NDArray[np.uint8]:
    """Decode pictures of one shape.

    Args:
        pictures: The bytes of one file each.
        shape: Of each picture: (height, width) or (height, width, channels); None: that of the first one.
        format: ``"JPEG"`` or ``"PNG"``; no other is decoded. None: the one of them that the first one is.
        allowance: What all of them may take in memory, with the copies of one that Pillow makes.

    Returns:
        Fresh array of shape (pictures, *shape).

    Raises:
        MissingExtra: Pillow is not installed.
        CorruptData: One is not such a picture, or has another shape. (UnsafeData: they are too large.)
    """
    image = pillow()
    if format is None:
        format = "PNG" if pictures and pictures[0].startswith(b"\x89PNG") else "JPEG"
    found: NDArray[np.uint8] | None = None
    for number, picture in enumerate(pictures):
        try:
            with image.open(io.BytesIO(picture), formats=(format,)) as opened:
                # The header says the size: what is too large is refused before it is decoded.
                size = _shape_of(opened)
                shape = size if shape is None else shape
                if size != (shape[:2] if shape[2:] == (1,) else shape):
                    raise CorruptData(f"picture {number} has the shape {size}, expected {shape}")
                if found is None:
                    pixels = opened.height * opened.width
                    allowance.spend(len(pictures) * math.prod(shape) + _COPIES * pixels)
                    found = np.empty((len(pictures), *shape), np.uint8)
                found[number] = np.asarray(opened).reshape(shape)
        except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as error:
            if isinstance(error, RlioError):
                raise
            raise CorruptData(f"picture {number} is not a {format}: {excerpt(str(error))}") from error
    return np.empty((0, *(shape or ())), np.uint8) if found is None else found


def _shape_of(opened: Any) -> tuple[int, ...]:
    if opened.mode not in _CHANNELS:
        raise CorruptData(f"found a picture of mode {opened.mode}, expected one of {', '.join(_CHANNELS)}")
    channels = _CHANNELS[opened.mode]
    size = (opened.height, opened.width)
    return size if channels is None else (*size, channels)
