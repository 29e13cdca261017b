"""Unpacks one untrusted zstd frame: checks its header before it inflates a byte.

Libraries allocate the size that a frame's header states, even above the caller's limit, and a frame may ask
for a window of gigabytes. So size, window and ratio are checked first.

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
    """Return the content of one frame.

    Args:
        packed: The frame, without bytes behind it.
        most: Largest allowed size.
        exactly: The expected size; None if unknown.
        limits: Limits of window and ratio.

    Raises:
        CorruptData: It is not such a frame, or does not state its size, or states another one.
        UnsafeData: It would take more than allowed.
    """
    try:
        found = zstandard.get_frame_parameters(packed)
        size = zstandard.frame_content_size(packed)
        if size < 0 or (exactly is not None and size != exactly):
            wanted = "" if exactly is None else f", expected {exactly}"
            raise CorruptData(f"a zstd frame of {size if size >= 0 else 'unknown'} bytes{wanted}")
        if size > most:
            raise UnsafeData(f"a zstd frame of {size} bytes: at most {most} are allowed")
        _check_window(found.window_size, limits)
        limits.check_inflation(len(packed), size, "a zstd frame")
        if size == 0:
            # For size 0, the library would return as many bytes as the frame has.
            return _beginning(packed, 1, limits)[:0]
        data = zstandard.ZstdDecompressor(max_window_size=limits.zstd_window).decompress(
            packed, max_output_size=size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise CorruptData(f"a damaged zstd frame: {error}") from error
    if len(data) != size:
        raise CorruptData(f"a zstd frame of {len(data)} bytes that states {size}")
    return data


def begin(packed: bytes, size: int, *, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Return up to ``size`` first bytes of a frame; none if it is damaged or asks for too much."""
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
