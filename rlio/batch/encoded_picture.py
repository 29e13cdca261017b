"""`EncodedPicture`: a picture that stays the bytes of a PNG or JPEG file, or a frame of a video, as a row.

Sources give pictures as they are stored. The engine decodes them when a group is read; a conversion does not,
so that it writes the same bytes. Like compressed columns (`rlio.batch.compressed_rows`), encoded ones are
object arrays, which are sliced, shuffled, joined and pickled like any other.

`rlio.batch.picture_codecs` encodes and decodes them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["CODECS", "Codec", "EncodedPicture", "FrameStream", "VideoFrame", "is_encoded", "row_type"]

#: How a picture is encoded; ``video``: it is a frame of a video, which is stored once for all of its rows.
Codec: TypeAlias = Literal["png", "jpeg", "video"]
#: All codecs -> whether decoding gives back the frames that were encoded.
CODECS: Final[Mapping[str, bool]] = {"png": True, "jpeg": False, "video": False}


@dataclass(frozen=True, slots=True)
class EncodedPicture:
    """A picture as the bytes of a file.

    Attributes:
        data: The bytes; b"": there is no picture, as where ``new_obs`` is missing, and its values are zeros.
            Of a frame of a video: the digest of the video, 16 bytes, and the frame's time, 8 bytes.
        codec: How it is encoded.
        shape: (height, width) or (height, width, channels) of its values, which are uint8.
    """

    data: bytes
    codec: Codec
    shape: tuple[int, ...]

    @property
    def is_none(self) -> bool:
        """Whether there is no picture."""
        return not self.data

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


class FrameStream(Protocol):
    """The stream of a video, which can be read; see `rlio.source.videos.VideoStream`."""

    @property
    def digest(self) -> bytes:
        """16 bytes that identify the bytes of the video."""

    def content(self) -> bytes:
        """The bytes of the file."""

    def seconds(self, times: Sequence[int]) -> list[float]:
        """When frames are shown, in seconds after the first frame of the video."""

    def about(self) -> dict[str, Any]:
        """Facts of the stream: ``codec``, ``pix_fmt``."""

    def frames(self, times: Sequence[int], shape: tuple[int, ...]) -> Iterator[NDArray[np.uint8]]:
        """The frames at ascending times, each of ``shape``; the caller does not change them."""


class VideoFrame(EncodedPicture):
    """A frame of a video that can be read.

    Args:
        stream: The video.
        time: The frame's presentation time, in units of the stream.
        shape: (height, width, 3) of its values.
    """

    __slots__ = ("stream", "time")
    stream: FrameStream
    time: int

    def __init__(self, stream: FrameStream, time: int, shape: tuple[int, ...]) -> None:
        for name, value in (("codec", "video"), ("shape", shape), ("stream", stream), ("time", time)):
            object.__setattr__(self, name, value)

    @property
    def data(self) -> bytes:
        """See `EncodedPicture`; the digest is made when it is asked for."""
        return self.stream.digest + self.time.to_bytes(8, "little", signed=True)

    @property
    def is_none(self) -> bool:
        """See `EncodedPicture`."""
        return False

    def __sizeof__(self) -> int:
        return object.__sizeof__(self)

    def __repr__(self) -> str:
        return f"VideoFrame({self.stream!r}, {self.time}, {self.shape})"

    def __reduce__(self) -> tuple[Any, ...]:
        return VideoFrame, (self.stream, self.time, self.shape)


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
