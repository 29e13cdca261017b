"""How the cost of a random batch grows with rows, columns, the width of a row, and the size of the batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks import bounds, machine, peers
from benchmarks.data import Columns, slices
from benchmarks.results import Section
from benchmarks.scales import Setup
from benchmarks.store import live
from benchmarks.timing import Case, interleave

__all__ = ["AXES", "run"]

SIZE = 256
#: What grows, in the order of `Scale.growth`; figures have it as their case.
AXES = ("rows", "columns", "bytes a row", "batch size")
# Points are many, and curves need less than ratios.
_ROUNDS = 3


def run(setup: Setup) -> Section:
    """Draws with replacement of float32 vectors; all but one of four quantities stay the same."""
    section = Section("growth", f"How a random batch's cost grows; {SIZE} rows where the batch does not grow")
    rows, columns, widths, sizes = setup.scale.growth
    held = setup.scale.growth_bytes
    for number in rows:
        _point(section, setup, AXES[0], number, rows=number, columns=4, width=64, sizes=(SIZE,))
    for number in columns:
        _point(section, setup, AXES[1], number, rows=held // 256, columns=number, width=256, sizes=(SIZE,))
    for number in widths:
        _point(section, setup, AXES[2], number, rows=held // number, columns=4, width=number, sizes=(SIZE,))
    _point(section, setup, AXES[3], None, rows=held // 192, columns=8, width=192, sizes=sizes)
    return section


def _point(
    section: Section,
    setup: Setup,
    axis: str,
    at: int | None,
    *,
    rows: int,
    columns: int,
    width: int,
    sizes: tuple[int, ...],
) -> None:
    """One store a contender; each batch size is a point of its own where ``at`` is None."""
    # The columns themselves, packed rows, and three contenders with slack.
    needed = 8 * rows * width
    if needed > machine.available_memory() > 0:
        section.absent[f"{axis} {at:,}"] = f"needs {needed >> 20:,} MiB of memory"
        return
    values = _columns(rows, columns, width)
    batches = slices(values, max(1, min(rows, (16 << 20) // width)))
    makers: dict[str, Callable[[], Any]] = {
        "rlio": lambda: live(batches, capacity=rows),
        "cpprb": lambda: peers.cpprb_uniform(batches, rows=rows),
        "TorchRL, RAM": lambda: peers.torchrl_uniform(batches, rows=rows),
    }
    contenders = peers.gathered(makers, section.absent)
    packed = bounds.packed_rows(values)
    for size in sizes:
        cases = [_case(name, contender, size) for name, contender in contenders.items()]
        cases.append(Case("bound: NumPy, packed rows", bounds.Packed(packed, size).sample, size))
        taken = interleave(cases, rounds=min(setup.scale.rounds, _ROUNDS), seconds=setup.scale.seconds / 2)
        section.add_taken(axis, taken, at=size if at is None else at)
    if "rlio" in contenders:
        contenders["rlio"].close()


def _case(name: str, contender: Any, size: int) -> Case:
    if name == "rlio":
        return Case(name, contender.uniform(size).sample, size)
    case = Case(name, partial(contender.sample, size), size)
    # Of its two the steadier: what would grow otherwise is the noise.
    return peers.torchrl_cases(case)[-1] if name.startswith("TorchRL") else case


def _columns(rows: int, columns: int, width: int) -> Columns:
    """Float32 vectors of equal length, ``width`` bytes a row in all."""
    random = np.random.default_rng(0)
    length = width // columns // 4
    return {f"c{number}": random.random((rows, length), np.float32) for number in range(columns)}
