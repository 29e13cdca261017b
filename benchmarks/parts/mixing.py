"""A mixture of three sources beside what its sources would give alone, in the shares of the mixture."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import rlio
from benchmarks import peers
from benchmarks.data import Columns, half_cheetah, slices, write_dataset
from benchmarks.results import Section
from benchmarks.scales import Setup
from benchmarks.store import HotStore, stored
from benchmarks.timing import Case, interleave
from rlio.reader import InputReader

__all__ = ["run"]

WEIGHTS = (0.7, 0.2, 0.1)
SIZE = 256
# Batches of an epoch of files: few, so that a round has whole epochs of each, with all their decoding.
_EPOCH = 80


def run(setup: Setup) -> Section:
    """Mixtures of hot stores and of files, both shuffled."""
    scale = setup.scale
    section = Section(
        "mixing",
        f"Three sources of HalfCheetah-v5, mixed {WEIGHTS}, batches of {SIZE}; "
        f"hot stores of {scale.rows // 5:,} rows each, files of {min(_EPOCH * SIZE, scale.rows // 5):,}",
    )
    columns = half_cheetah(setup.data, scale.rows)
    roots = _written(setup, "hot", columns, scale.rows // 5)
    _measure(section, "hot stores", partial(_hot, roots), setup, epoch=1)
    rows = min(_EPOCH * SIZE, scale.rows // 5 // SIZE * SIZE)
    roots = _written(setup, "file", columns, rows)
    _measure(section, "files", partial(_files, roots), setup, epoch=rows // SIZE)
    return section


def _written(setup: Setup, kind: str, columns: Columns, rows: int) -> list[Path]:
    roots = []
    for number in range(len(WEIGHTS)):
        part = {name: values[number * rows : (number + 1) * rows] for name, values in columns.items()}
        roots.append(write_dataset(setup.scratch / f"{kind}-{number}", slices(part, 10_000)))
    return roots


def _measure(
    section: Section, kind: str, make: Callable[[], list[InputReader]], setup: Setup, *, epoch: int
) -> None:
    """One line: the mixture of the readers that ``make`` gives, beside such readers alone.

    A source alone is called ``epoch`` times, and the mixture until its rarest source has given as much.
    """
    work = f"mixing three sources, {kind}"
    readers = peers.gathered({f"rlio, {kind}": make}, section.absent)
    if not readers:
        section.missing(work, beside="its sources", at_least=0.9, names=[f"rlio, {kind}"])
        return
    (alone,) = readers.values()
    mixed = rlio.MixedInput(list(zip(make(), WEIGHTS, strict=True)), batch_size=SIZE, seed=0)
    cases = [_case("mixture", mixed, round(epoch / min(WEIGHTS)))]
    cases += [_case(f"source {weight}", each, epoch) for each, weight in zip(alone, WEIGHTS, strict=True)]
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


def _case(name: str, reader: InputReader, batches: int) -> Case:
    def read() -> None:
        for _ in range(batches):
            reader.sample()

    return Case(name, read, batches * SIZE)


def _hot(roots: list[Path]) -> list[InputReader]:
    stores: list[HotStore] = [stored(root, cache="memory") for root in roots]
    return [store.epochs(SIZE) for store in stores]


def _files(roots: list[Path]) -> list[InputReader]:
    return [rlio.DatasetReader(root, batch_size=SIZE, shuffle=True, seed=0, cache="none") for root in roots]
