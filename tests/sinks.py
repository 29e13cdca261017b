"""Writes episodes in a format without `rlio.convert`: fitted to what it holds, then by its sink."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlio.batch.episode import Episode
from rlio.conversion.prepare import Preparer, origin_for
from rlio.conversion.report import Inspector
from rlio.formats.format import by_name, load
from rlio.formats.sink import Origin
from rlio.storage import Storage


def write_episodes(
    to: str, root: Path, episodes: Iterable[Episode], origin: Origin | None = None, **options: Any
) -> Path:
    """Write episodes below ``root``."""
    format = by_name(to)
    assert format is not None
    assert format.writer is not None
    found, note = origin or Origin(uri="x"), Inspector().note
    sink = load(format.writer)(Storage.open(root), origin_for(format.holds, found, note), **options)
    holds = getattr(sink, "holds", format.holds)
    preparer = Preparer(format.name, holds, spaces=found.spaces, takes=getattr(sink, "takes", None))
    for number, episode in enumerate(episodes):
        ready = preparer.prepare(episode.to_batch(), number, f"episode {number}", note)
        assert ready is not None
        sink.write(ready)
    sink.close()
    return root
