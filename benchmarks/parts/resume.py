"""Coming back: to the middle of an epoch of a large data set, and to a data set of very many shards."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

import rlio
from benchmarks.data import Columns, write_dataset
from benchmarks.results import Section
from benchmarks.scales import Setup
from benchmarks.timing import Case, interleave

__all__ = ["run"]

SIZE = 256
# Openings take seconds: their median needs no more.
_ROUNDS = 3
# Names that one file may have, on every filesystem.
_LINKS = 30_000


def run(setup: Setup) -> Section:
    """Seconds to the first batch after a restart, bytes of the state, seconds to open."""
    scale = setup.scale
    section = Section(
        "resume",
        f"Resuming within {scale.resumed_rows:,} synthetic rows; opening {scale.shards:,} shards",
        unit="call",
    )
    root = write_dataset(setup.scratch / "resumed", _zeros(scale.resumed_rows))
    kinds: list[tuple[str, Literal["none", "disk"]]] = [("files", "none"), ("store on disk", "disk")]
    for kind, cache in kinds:
        _resume(section, kind, partial(_reader, root, cache), scale.resumed_rows)
    shutil.rmtree(root)
    _open(section, setup)
    return section


def _reader(root: Path, cache: Literal["none", "disk"]) -> rlio.DatasetReader:
    return rlio.DatasetReader(root, batch_size=SIZE, shuffle=True, seed=0, cache=cache)


def _resume(section: Section, kind: str, make: Callable[[], rlio.DatasetReader], rows: int) -> None:
    work = f"resume from {kind} at {rows:,} rows"
    reader = make()
    reader.sample()
    reader.skip(rows // 2 // SIZE)
    state = json.dumps(reader.state_dict())
    expected: Any = reader.sample()
    reader.close()

    def resume() -> None:
        with make() as fresh:
            fresh.load_state_dict(json.loads(state))
            found: Any = fresh.sample()
        if not all(np.array_equal(found[name], expected[name]) for name in expected):
            raise ValueError("the resumed reader gave another batch")

    section.add_taken(kind, interleave([Case("rlio", resume, 1, once=True)], rounds=_ROUNDS, seconds=0))
    figure = section.find(kind, "rlio")
    assert figure is not None
    section.quantity(work, "seconds to the first batch", figure.median, "s", at_most=1)
    section.quantity(work, "bytes of the state", float(len(state)), "bytes", at_most=1023)


def _zeros(rows: int) -> list[Columns]:
    """Batches of one number a row, of which no file needs much room."""
    size = min(rows, 10**6)
    numbers = np.arange(size, dtype=np.float32) // 1024
    return [{"rewards": numbers[: min(size, rows - start)]} for start in range(0, rows, size)]


def _open(section: Section, setup: Setup) -> None:
    """One shard under as many names: names are all that a listing reads."""
    shards = setup.scale.shards
    root = write_dataset(setup.scratch / "shards", [{"rewards": np.zeros(10, np.float32)}])
    _multiply(root, shards)

    def open_it() -> None:
        if (rows := len(rlio.open_dataset(root))) != 10 * shards:
            raise ValueError(f"the data set has {rows} rows, not {10 * shards}")

    section.add_taken("open", interleave([Case("rlio", open_it, 1, once=True)], rounds=_ROUNDS, seconds=0))
    figure = section.find("open", "rlio")
    assert figure is not None
    section.quantity(f"open {shards:,} shards", "seconds", figure.median, "s", at_most=2)
    shutil.rmtree(root)


def _multiply(root: Path, shards: int) -> None:
    (shard,) = root.glob("data/*/*.parquet")
    _, rows, rest = shard.name.split("-", 2)
    for number in range(1, shards):
        name = shard.with_name(f"{number * int(rows):012d}-{rows}-{rest}")
        if number % _LINKS:
            os.link(shard, name)
        else:
            shutil.copyfile(shard, name)
            shard = name
    (sealed,) = shard.parent.glob("_sealed-*")
    sealed.rename(sealed.with_name(f"_sealed-{shards * int(rows)}"))
