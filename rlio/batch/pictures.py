"""Pictures in columns: which columns have them, as frames of one form, and as PNG files (extra ``images``).

Example:
    >>> stacks = np.arange(7, dtype=np.uint8)[np.arange(4)[:, None] + np.arange(4)]
    >>> stacks = np.broadcast_to(stacks[:, :, None, None], (4, 4, 9, 8))
    >>> frames = frames_of_rows(stacks)
    >>> frames.shape, frames[:, 0, 0, 0].tolist()
    ((4, 9, 8, 1), [3, 4, 5, 6])
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import to_numpy
from rlio.batch.nested import leaves, path_text
from rlio.errors import SchemaError
from rlio.support.extras import needs

__all__ = ["encode_png", "evenly", "frames_of_rows", "leaf_texts", "pictures_in", "pillow", "thumbnail"]

_PNG_CHANNELS: Final = ((), (1,), (3,), (4,))
# A row of two axes is a picture from this size on: smaller ones are tables of whole numbers.
_LEAST_SIDE: Final = 8
# Channels of a picture, or frames of a stack, are at most this many.
_MOST_CHANNELS: Final = 16
# Rows in which a stack of frames is looked for.
_STACK_ROWS: Final = 32
_THUMBNAIL: Final = 128


def frames_of_rows(values: Any) -> NDArray[np.uint8] | None:
    """The rows as frames: views of uint8, shape (rows, height, width, 1, 3 or 4); None: they are no pictures.

    Channels may be first or last. Of a stack of frames, the newest is taken: the last of the stack. Three
    channels are a stack if they move on by one from row to row, four are RGBA if the last one is 255
    throughout, and other numbers of channels are a stack.

    Args:
        values: Shape (rows, *row). Rows of other dtypes than uint8 are no pictures.
    """
    rows = to_numpy(values)
    if rows.dtype != np.uint8 or not 3 <= rows.ndim <= 5 or 0 in rows.shape[1:]:
        return None
    if rows.ndim == 3:
        return rows[..., None] if min(rows.shape[1:]) >= _LEAST_SIDE else None
    if rows.ndim == 5:  # A stack of pictures with channels: its frames are first or last.
        is_first = rows.shape[1] <= _MOST_CHANNELS and (
            rows.shape[-1] in (1, 3) or rows.shape[1] < rows.shape[-1]
        )
        return frames_of_rows(rows[:, -1] if is_first else rows[..., -1])
    channels_last = rows if rows.shape[3] <= rows.shape[1] else np.moveaxis(rows, 1, -1)
    depth = channels_last.shape[-1]
    if depth > _MOST_CHANNELS:
        return None
    if depth == 1 or (depth == 3 and not _is_stack(channels_last)):
        return channels_last
    if depth == 4 and (channels_last[..., 3] == 255).all():
        return channels_last
    return channels_last[..., -1:]


def _is_stack(rows: NDArray[np.uint8]) -> bool:
    """Whether each row has the channels of the row before, moved on by one. Rows that are all equal do not
    say so.
    """
    before, after = rows[:_STACK_ROWS][:-1], rows[:_STACK_ROWS][1:]
    return bool((before != after).any() and (before[..., 1:] == after[..., :-1]).all())


def pictures_in(columns: Mapping[str, Any]) -> dict[str, NDArray[np.uint8]]:
    """Name of each array in the columns that has pictures (``obs``, ``obs/camera``) -> its frames."""
    found = ((name, frames_of_rows(leaf)) for name, leaf in _named(columns))
    return {name: frames for name, frames in found if frames is not None}


def leaf_texts(columns: Mapping[str, Any]) -> list[str]:
    """Name, dtype and shape of each array in the columns."""
    return [f"{name} {leaf.dtype} {tuple(leaf.shape[1:])}" for name, leaf in _named(columns)]


def _named(columns: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, column in columns.items():
        for path, leaf in leaves(column):
            yield (f"{name}/{path_text(path)}" if path else name), leaf


def encode_png(pictures: Iterable[NDArray[Any]], *, level: int = 6) -> list[bytes]:
    """Each picture, uint8 of shape (height, width) or (height, width, 1, 3 or 4), as the bytes of a PNG file.

    Args:
        pictures: The pictures.
        level: Of zlib: 1 (fast) to 9 (small).

    Raises:
        MissingExtra: Pillow is not installed.
        SchemaError: One is not such an array.
    """
    image = pillow()
    files = []
    for picture in pictures:
        if picture.dtype != np.uint8 or picture.ndim < 2 or picture.shape[2:] not in _PNG_CHANNELS:
            raise SchemaError(f"{picture.dtype} of shape {picture.shape} is not a picture")
        stream = io.BytesIO()
        plain = picture[..., 0] if picture.shape[2:] == (1,) else picture
        image.fromarray(plain).save(stream, format="PNG", compress_level=level)
        files.append(stream.getvalue())
    return files


def evenly(rows: int, count: int | None) -> list[int]:
    """``count`` numbers of rows from the first to the last, evenly spread; None: all."""
    if count is None or count >= rows:
        return list(range(rows))
    return sorted(set(np.linspace(0, rows - 1, count).round().astype(int).tolist()))


def thumbnail(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Every n-th pixel of a picture, so that no side is above 128."""
    step = -(-max(picture.shape[:2]) // _THUMBNAIL)
    return np.ascontiguousarray(picture[::step, ::step])


def pillow() -> Any:
    """Pillow's ``Image``.

    Raises:
        MissingExtra: It is not installed.
    """
    with needs("Pillow", "images"):
        from PIL import Image
    return Image
