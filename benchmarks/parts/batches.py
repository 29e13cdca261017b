"""Random batches of vectors from memory: 256 and 4,096 rows of HalfCheetah-v5."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import bounds, peers
from benchmarks.data import Columns, episode_slices, half_cheetah, slices, write_dataset
from benchmarks.results import Section
from benchmarks.scales import Setup
from benchmarks.store import HotStore, stored
from benchmarks.timing import Case, interleave

__all__ = ["run"]

SIZES = (256, 4096)
# Episodes of 1,000 steps that Minari is given: its HDF5 takes 4 ms an episode to write.
_MINARI_EPISODES = 50


def run(setup: Setup) -> Section:
    """Every contender at both sizes."""
    scale = setup.scale
    section = Section("batches", f"Random batches from {scale.rows:,} rows of HalfCheetah-v5, 182 bytes each")
    columns = half_cheetah(setup.data, scale.rows)
    stores = _stores(setup, columns, section)
    others = _peers(setup, columns, section)
    minari = peers.gathered({"Minari, whole episodes": partial(_minari, setup, columns)}, section.absent)
    packed = bounds.packed_rows(columns)
    for size in SIZES:
        cases = _rlio_cases(stores, size)
        for name, other in others.items():
            case = Case(name, partial(other.sample, size), size)
            cases += peers.torchrl_cases(case) if name.startswith("TorchRL") else [case]
        for name, dataset in minari.items():
            rows = dataset.rows / dataset.dataset.total_episodes
            cases.append(Case(name, partial(dataset.sample, 1), rows))
        cases += [Case(name, call, size) for name, call in _bounds(columns, packed, size).items()]
        section.add_taken(str(size), interleave(cases, rounds=scale.rounds, seconds=scale.seconds))
    _compare(section)
    for store in stores.values():
        store.close()
    return section


def _stores(setup: Setup, columns: Columns, section: Section) -> dict[str, HotStore]:
    root = write_dataset(setup.scratch / "halfcheetah", slices(columns, 10_000))
    return peers.gathered(
        {"rlio": partial(stored, root, cache="memory"), "rlio, on disk": partial(stored, root, cache="disk")},
        section.absent,
    )


def _rlio_cases(stores: dict[str, HotStore], size: int) -> list[Case]:
    readers = {name: store.epochs(size) for name, store in stores.items()}
    if "rlio" in stores:
        readers["rlio, with replacement"] = stores["rlio"].uniform(size)
        readers["rlio, views"] = stores["rlio"].epochs(size, views=True)
    cases = [Case(name, reader.sample, size) for name, reader in readers.items()]
    if "rlio" in stores:
        cases.append(Case("rlio, for batch in reader", _Loop(stores["rlio"].epochs(size)).step, size))
    return cases


class _Loop:
    """Draws as ``for batch in reader`` does: the last batch is alive while the next one is made."""

    def __init__(self, reader: Any) -> None:
        self._batches = iter(reader)
        self._batch: Any = None

    def step(self) -> None:
        self._batch = next(self._batches)


def _peers(setup: Setup, columns: Columns, section: Section) -> dict[str, peers.Sampler]:
    rows = setup.scale.rows
    memmap = setup.scratch / "torchrl"
    shutil.rmtree(memmap, ignore_errors=True)
    made: dict[str, Callable[[], peers.Sampler]] = {
        "cpprb": lambda: peers.cpprb_uniform([columns], rows=rows),
        "TorchRL, memmap": lambda: peers.torchrl_uniform([columns], rows=rows, folder=memmap),
        "TorchRL, RAM": lambda: peers.torchrl_uniform([columns], rows=rows),
        "TorchRL, RAM, epochs": lambda: peers.torchrl_uniform([columns], rows=rows, replacement=False),
        "d3rlpy": lambda: peers.d3rlpy_uniform(columns),
    }
    return peers.gathered(made, section.absent)


def _minari(setup: Setup, columns: Columns) -> Any:
    whole = episode_slices(columns["eps_id"])
    part = slice(0, whole[min(_MINARI_EPISODES, len(whole)) - 1].stop)
    few = {name: values[part] for name, values in columns.items()}
    return peers.minari_dataset("batches", peers.minari_buffers(few), setup.scratch)


def _bounds(columns: Columns, packed: Any, size: int) -> dict[str, Callable[[], object]]:
    return {
        "bound: NumPy, fresh arrays": bounds.Taken(columns, size, reuse=False).sample,
        "bound: NumPy, reused arrays": bounds.Taken(columns, size, reuse=True).sample,
        "bound: NumPy, packed rows": bounds.Packed(packed, size).sample,
        "bound: memory copy": bounds.Copied(packed, size).sample,
    }


def _compare(section: Section) -> None:
    for size in SIZES:
        work = f"random batches of {size:,}"
        goals: list[tuple[str, str, str, float | None]] = [
            (f"{work}, contiguous", "rlio", "cpprb", 3.0),
            (f"{work}, contiguous", "rlio, on disk", "TorchRL, memmap", 8.0),
            (f"{work}, contiguous", "rlio", "TorchRL, RAM", None),
            (f"{work}, contiguous", "rlio", "d3rlpy", None),
            (f"{work}, contiguous", "rlio", "Minari, whole episodes", None),
            (f"{work}, contiguous", "rlio", "bound: NumPy, fresh arrays", None),
            (f"{work}, as views", "rlio, views", "cpprb", 6.0 if size == 4096 else None),
            (f"{work}, as views", "rlio, views", "bound: NumPy, packed rows", None),
        ]
        for what, ours, beside, goal in goals:
            section.compare_best(
                what,
                case=str(size),
                ours=ours,
                besides=peers.threadings(beside),
                label=beside,
                at_least=goal,
            )
