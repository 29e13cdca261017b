"""What notebooks show of batches and episodes: columns and first rows. The other rows are not read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import to_numpy
from rlio.batch.nested import leaves, path_text
from rlio.batch.pictures import encode_png, evenly, pictures_in, thumbnail
from rlio.errors import MissingExtra, excerpt
from rlio.support.html import Html, facts, lines, panel, pictures, shown, table

if TYPE_CHECKING:
    from rlio.batch.episode import Episode

__all__ = ["column_table", "episode_panel"]

# Rows, values of a row, and columns that are shown.
_ROWS: Final = 3
_VALUES: Final = 6
_COLUMNS: Final = 60
_FRAMES: Final = 6


def column_table(columns: Mapping[str, Any]) -> Html:
    """Name, dtype, shape of a row and first values of each column, or of each array in it."""
    return table(("column", "dtype", "shape", "first values"), _rows(columns.items()))


def _rows(columns: Iterable[tuple[str, Any]]) -> Iterator[tuple[object, ...]]:
    for number, (name, column) in enumerate(columns):
        for path, leaf in leaves(column):
            full = f"{name}/{path_text(path)}" if path else name
            values = "..." if number >= _COLUMNS else _first_values(leaf)
            yield full, leaf.dtype, tuple(leaf.shape[1:]), values


def _first_values(leaf: Any) -> Html:
    """The first rows of an array or tensor, of each its first values."""
    texts = [_row(row) for row in to_numpy(leaf[:_ROWS])]
    return shown(", ".join(texts) + (", ..." if len(leaf) > _ROWS else ""))


def _row(row: Any) -> str:
    if not isinstance(row, np.ndarray):
        return f"{row:.4g}" if isinstance(row, (float, np.floating)) else excerpt(_plain(row), 40)
    flat = row.reshape(-1)
    inner = " ".join(_row(value) for value in flat[:_VALUES])
    return f"[{inner}{' ...' if len(flat) > _VALUES else ''}]"


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def episode_panel(episode: Episode) -> str:
    """An episode: what it is, some frames of each column with pictures, and its columns."""
    columns = episode._columns()
    ends = [name for name in ("terminated", "truncated") if getattr(episode, name)]
    found: list[tuple[object, object]] = [
        ("steps", f"{len(episode):,}, from step {episode.t_started:,} on"),
        ("return", f"{episode.total_reward:.6g}"),
        ("end", " and ".join(ends) or "not ended"),
    ]
    if episode.agent_id is not None:
        found.append(("agent", episode.agent_id))
    if episode.start_time is not None:
        found.append(("began", f"{episode.start_time:%Y-%m-%d %H:%M:%S} UTC"))
    rows = [_thumbnails(name, frames, episode.t_started) for name, frames in pictures_in(columns).items()]
    return panel(f"Episode {episode.id_}", facts(found), *rows, column_table(columns))


def _thumbnails(name: str, frames: NDArray[np.uint8], start: int) -> Html:
    chosen = evenly(len(frames), _FRAMES)
    try:
        files = encode_png(thumbnail(frames[number]) for number in chosen)
    except MissingExtra as error:
        return lines([f"{name}: pictures are not shown: {error}"])
    texts = [f"{name}, step {start + number}" for number in chosen]
    return pictures(zip(files, texts, strict=True))
