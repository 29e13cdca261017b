"""Unpacking one zstd frame of a stranger's: its header is looked at before a byte is inflated.

Libraries take the size in a frame's header for the size of the answer, whatever bound the caller gave, and a
frame may ask for gigabytes of window. So size, window and ratio are checked first.

Example:
    >>> inflate(zstandard.ZstdCompressor().compress(b"rows"), most=1024)
    b'rows'
"""

from __future__ import annotations

import zstandard

from rlio.errors import CorruptData, UnsafeData
from rlio.limits import DEFAULT_LIMITS, Limits

__all__ = ["begin", "inflate"]


def inflate(
    packed: bytes, *, most: int, exactly: int | None = None, limits: Limits = DEFAULT_LIMITS
) -> bytes:
    """The content of the one frame that ``packed`` is.

    Args:
        packed: The frame, with nothing behind it.
        most: Bytes that it may have.
        exactly: Bytes that it must have; None if that is not known.
        limits: Of window and ratio.

    Raises:
        CorruptData: It is no such frame, does not say its size, or another one.
        UnsafeData: It would take more than it may.
    """
    try:
        found = zstandard.get_frame_parameters(packed)
        size = zstandard.frame_content_size(packed)
        if size < 0 or (exactly is not None and size != exactly):
            wanted = "" if exactly is None else f" where there should be {exactly}"
            raise CorruptData(f"a zstd frame of {size if size >= 0 else 'unknown'} bytes{wanted}")
        if size > most:
            raise UnsafeData(f"a zstd frame of {size} bytes: at most {most} are allowed")
        _check_window(found.window_size, limits)
        limits.check_inflation(len(packed), size, "a zstd frame")
        if size == 0:
            # Of none, the library would make as many as there are.
            return _beginning(packed, 1, limits)[:0]
        data = zstandard.ZstdDecompressor(max_window_size=limits.zstd_window).decompress(
            packed, max_output_size=size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise CorruptData(f"a damaged zstd frame: {error}") from error
    if len(data) != size:
        raise CorruptData(f"a zstd frame of {len(data)} bytes that says {size}")
    return data


def begin(packed: bytes, size: int, *, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """The first ``size`` bytes, or fewer, of a frame; none of one that is damaged or asks for too much."""
    try:
        _check_window(zstandard.get_frame_parameters(packed).window_size, limits)
        return _beginning(packed, size, limits)
    except (zstandard.ZstdError, UnsafeData):
        return b""


def _beginning(packed: bytes, size: int, limits: Limits) -> bytes:
    unpacker = zstandard.ZstdDecompressor(max_window_size=limits.zstd_window)
    with unpacker.stream_reader(packed) as reader:
        return reader.read(size)


def _check_window(window: int, limits: Limits) -> None:
    if window > limits.zstd_window:
        raise UnsafeData(f"a zstd frame with a window of {window} bytes: at most {limits.zstd_window}")
