"""A mixture of three sources beside what its sources would give alone, in the shares of the mixture."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import rlio
from benchmarks import peers
from benchmarks.data import half_cheetah, slices, write_dataset
from benchmarks.results import Section
from benchmarks.scales import Setup
from benchmarks.store import HotStore, stored
from benchmarks.timing import Case, interleave

__all__ = ["run"]

WEIGHTS = (0.7, 0.2, 0.1)
SIZE = 256


def run(setup: Setup) -> Section:
    """Mixtures of hot stores and of files, both shuffled."""
    scale = setup.scale
    rows = scale.rows // 5
    section = Section(
        "mixing", f"Three sources of {rows:,} rows of HalfCheetah-v5, mixed {WEIGHTS}, batches of {SIZE}"
    )
    columns = half_cheetah(setup.data, scale.rows)
    roots = []
    for number in range(len(WEIGHTS)):
        part = {name: values[number * rows : (number + 1) * rows] for name, values in columns.items()}
        roots.append(write_dataset(setup.scratch / f"source-{number}", slices(part, 10_000)))
    _measure(section, "hot stores", partial(_hot, roots), setup)
    _measure(section, "files", partial(_files, roots), setup)
    return section


def _measure(section: Section, kind: str, make: Callable[[], list[Any]], setup: Setup) -> None:
    """One line: the mixture of the readers that ``make`` gives, beside such readers alone."""
    work = f"mixing three sources, {kind}"
    readers = peers.gathered({f"rlio, {kind}": make}, section.absent)
    if not readers:
        section.missing(work, beside="its sources", at_least=0.9, names=[f"rlio, {kind}"])
        return
    (alone,) = readers.values()
    mixed = rlio.MixedInput(list(zip(make(), WEIGHTS, strict=True)), batch_size=SIZE, seed=0)
    cases = [Case("mixture", mixed.sample, SIZE)]
    cases += [
        Case(f"source {weight}", each.sample, SIZE) for each, weight in zip(alone, WEIGHTS, strict=True)
    ]
    taken = interleave(cases, rounds=setup.scale.rounds, seconds=setup.scale.seconds)
    section.add_taken(kind, taken)
    sources = [taken[f"source {weight}"].seconds for weight in WEIGHTS]
    weighted = [
        sum(weight * each for weight, each in zip(WEIGHTS, seconds, strict=True))
        for seconds in zip(*sources, strict=True)
    ]
    section.ratio(work, beside="its sources", ours=taken["mixture"].seconds, theirs=weighted, at_least=0.9)
    for reader in (mixed, *alone):
        reader.close()


def _hot(roots: list[Path]) -> list[Any]:
    stores: list[HotStore] = [stored(root, cache="memory") for root in roots]
    return [store.epochs(SIZE) for store in stores]


def _files(roots: list[Path]) -> list[Any]:
    return [rlio.DatasetReader(root, batch_size=SIZE, shuffle=True, seed=0, cache="none") for root in roots]
