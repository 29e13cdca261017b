"""Encodes and decodes columns of pictures, with Pillow (extra ``images``). Videos decode their own frames.

Example:
    >>> frames = np.zeros((2, 8, 9, 3), np.uint8)
    >>> files = encode_column(frames)
    >>> files[0].codec, files[0].shape
    ('png', (8, 9, 3))
    >>> np.array_equal(decode_column(files), frames)
    True
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import object_column
from rlio.batch.columns import Columns
from rlio.batch.encoded_picture import Codec, EncodedPicture, FrameStream, VideoFrame, is_encoded
from rlio.batch.multi_agent import MultiAgentBatch
from rlio.batch.nested import leaves, map_structure
from rlio.batch.pictures import encode_png, pillow
from rlio.batch.sample_batch import SampleBatch
from rlio.errors import CorruptData, RlioError, excerpt

__all__ = ["decode_batch", "decode_column", "encode_column", "encoded_column", "file_of"]

# Channels of the modes of pictures whose bytes are their values.
_CHANNELS: Final = {"L": None, "RGB": 3, "RGBA": 4}
# Bytes of a pixel of the picture that is decoded: Pillow has four, and makes two copies of the bytes.
_COPIES: Final = 12
_PNG_START: Final = b"\x89PNG\r\n\x1a\n"
# Half of the time of zlib's default, for files that are a seventh larger.
_LEVEL: Final = 1


def encoded_column(
    files: Sequence[bytes],
    shape: tuple[int, ...] | None = None,
    *,
    codec: Codec | None = None,
    spend: Callable[[int], object] | None = None,
) -> NDArray[Any]:
    """Return the bytes of files as a column.

    Their headers are checked, and that they are whole: by the CRCs of PNG and the end marker of JPEG. Only a
    file that these do not show to be whole is decoded.

    Args:
        files: The bytes of one file each.
        shape: Of each picture: (height, width) or (height, width, channels); None: that of the first one.
        codec: The only one that is accepted; None: that of the first file.
        spend: Called with the bytes that all of them take in memory when they are decoded, and the copies of
            one that Pillow makes; raises if they are too many. None: any number.

    Raises:
        MissingExtra: Pillow is not installed.
        CorruptData: One is not such a picture, or has another shape. (UnsafeData: they are too large.)
    """
    if not files:
        return np.empty(0, object)
    codec = codec or ("png" if files[0].startswith(_PNG_START[:4]) else "jpeg")
    shape = shape or _opened(0, files[0], codec, None, _shape_of)
    wanted = EncodedPicture(b"", codec, shape)
    if spend is not None:
        spend(len(files) * wanted.nbytes + _COPIES * shape[0] * shape[1])
    for number, data in enumerate(files):
        _opened(number, data, codec, shape, _shape_of if _is_whole(data, codec) else np.asarray)
    return object_column(EncodedPicture(data, codec, shape) for data in files)


def encode_column(
    frames: NDArray[np.uint8], *, known: dict[bytes, EncodedPicture] | None = None
) -> NDArray[Any]:
    """Return frames as a column of PNG files. Equal frames are encoded once.

    Args:
        frames: Shape (rows, height, width) or (rows, height, width, 1, 3 or 4).
        known: Frames that are encoded already, by their bytes; gets the others.

    Raises:
        MissingExtra: Pillow is not installed.
        SchemaError: They are not such an array.
    """
    found = {} if known is None else known
    shape = frames.shape[1:]
    column = []
    for frame in frames:
        key = frame.tobytes()
        if key not in found:
            (data,) = encode_png([frame], level=_LEVEL)
            found[key] = EncodedPicture(data, "png", shape)
        column.append(found[key])
    return object_column(column)


def file_of(picture: EncodedPicture) -> bytes:
    """Return the bytes of a picture; where there is none, those of one that is black."""
    return picture.data or _black(picture.codec, picture.shape)


@lru_cache(maxsize=32)
def _black(codec: Codec, shape: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    black = np.zeros(shape[:2] if shape[2:] == (1,) else shape, np.uint8)
    pillow().fromarray(black).save(stream, format=codec.upper())
    return stream.getvalue()


def decode_column(column: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the values of encoded pictures: fresh array of shape (rows, *shape).

    Raises:
        MissingExtra: Pillow is not installed.
        CorruptData: One is damaged, or not of the shape of the first one.
    """
    return _decoded([column])[0]


def decode_batch(
    batch: SampleBatch | MultiAgentBatch, *, keep: Callable[[EncodedPicture], bool] | None = None
) -> SampleBatch | MultiAgentBatch:
    """Return a batch with its encoded pictures decoded; itself if it has none.

    A picture that is in several places, such as the ``obs`` of a row that is the ``new_obs`` of another, is
    decoded once.

    Args:
        batch: The batch. What its pictures take in memory must be known, by the schema of a shard or by
            `encoded_column`.
        keep: Whether the pictures of a column stay encoded, by one of them; None: none do.

    Raises:
        MissingExtra: Pillow is not installed.
        CorruptData: One is damaged.
    """
    if isinstance(batch, MultiAgentBatch):
        parts = {pid: decode_batch(rows, keep=keep) for pid, rows in batch.items()}
        if all(parts[pid] is rows for pid, rows in batch.items()):
            return batch
        return MultiAgentBatch(
            {pid: rows for pid, rows in parts.items() if isinstance(rows, SampleBatch)}, batch.env_steps()
        )
    columns = []
    for name, column in batch.items():
        for _, leaf in leaves(column):
            if is_encoded(leaf) and not (keep is not None and keep(leaf[0])):
                if name != Columns.NEXT_OBS and any(picture.is_none for picture in leaf.tolist()):
                    raise CorruptData("a row has no picture, and only new_obs may be missing", column=name)
                columns.append(leaf)
    if not columns:
        return batch
    made = dict(zip(map(id, columns), _decoded(columns), strict=True))
    return batch._like(
        {name: map_structure(lambda leaf: made.get(id(leaf), leaf), column) for name, column in batch.items()}
    )


def _decoded(columns: Sequence[NDArray[Any]]) -> list[NDArray[np.uint8]]:
    """The values of columns; each distinct picture is decoded once."""
    made = [
        np.zeros((len(column), *(column[0].shape if len(column) else ())), np.uint8) for column in columns
    ]
    first: dict[int, tuple[NDArray[np.uint8], int]] = {}
    frames: dict[FrameStream, dict[int, list[tuple[NDArray[np.uint8], int]]]] = {}
    for values, column in zip(made, columns, strict=True):
        for row, picture in enumerate(column.tolist()):
            if picture.shape != values.shape[1:]:
                raise CorruptData(f"picture {row} has the shape {picture.shape}, expected {values.shape[1:]}")
            if isinstance(picture, VideoFrame):
                frames.setdefault(picture.stream, {}).setdefault(picture.time, []).append((values, row))
                continue
            if id(picture) in first:
                other, place = first[id(picture)]
                values[row] = other[place]
                continue
            if picture.data:
                values[row] = _opened(row, picture.data, picture.codec, picture.shape, np.asarray).reshape(
                    picture.shape
                )
            first[id(picture)] = values, row
    for stream, places in frames.items():
        times = sorted(places)  # A video is decoded in its own order.
        shape = places[times[0]][0][0].shape[1:]
        for time, frame in zip(times, stream.frames(times, shape), strict=True):
            for values, row in places[time]:
                values[row] = frame
    return made


def _opened(
    number: int, data: bytes, codec: Codec, shape: tuple[int, ...] | None, use: Callable[[Any], Any]
) -> Any:
    """What ``use`` makes of an opened picture, whose header has the shape."""
    image, format = pillow(), codec.upper()
    if codec == "video":
        raise CorruptData(f"picture {number} is a frame of a video that is not known here")
    try:
        with image.open(io.BytesIO(data), formats=(format,)) as opened:
            # The header says the size: what is too large is refused before it is decoded.
            size = _shape_of(opened)
            if shape is not None and size != (shape[:2] if shape[2:] == (1,) else shape):
                raise CorruptData(f"picture {number} has the shape {size}, expected {shape}")
            return use(opened)
    except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as error:
        if isinstance(error, RlioError):
            raise
        raise CorruptData(f"picture {number} is not a {format}: {excerpt(str(error))}") from error


def _is_whole(data: bytes, codec: Codec) -> bool:
    """Whether a file is surely as it was written, and not cut off."""
    if codec == "jpeg":
        return data.rstrip(b"\0").endswith(b"\xff\xd9")  # Minari pads files to one length.
    view, at = memoryview(data), len(_PNG_START)
    while at + 12 <= len(view):  # A chunk: its length, type, data and CRC.
        length = int.from_bytes(view[at : at + 4], "big")
        stop = at + 8 + length
        if zlib.crc32(view[at + 4 : stop]) != int.from_bytes(view[stop : stop + 4], "big"):
            return False
        if data[at + 4 : at + 8] == b"IEND":
            return True
        at = stop + 4
    return False


def _shape_of(opened: Any) -> tuple[int, ...]:
    if opened.mode not in _CHANNELS:
        raise CorruptData(f"found a picture of mode {opened.mode}, expected one of {', '.join(_CHANNELS)}")
    channels = _CHANNELS[opened.mode]
    size = (opened.height, opened.width)
    return size if channels is None else (*size, channels)
