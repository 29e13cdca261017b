"""Files of other libraries read and converted, statistics, and data in memory for other trainers.

A memory copy is one of every array that is handed over, so a bridge that shares them all may be faster.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

import rlio
from benchmarks import peers
from benchmarks.data import Columns, half_cheetah, slices, write_dataset
from benchmarks.first_light import RLlib
from benchmarks.results import Section
from benchmarks.scales import Setup
from benchmarks.timing import Case, interleave

__all__ = ["run"]

_ROWS = 1000
_STATS = ["obs", "actions"]


def run(setup: Setup) -> Section:
    """Read RLlib's JSON and Minari's HDF5, convert D4RL's, take statistics, and hand over arrays."""
    scale = setup.scale
    columns = half_cheetah(setup.data, scale.rows)
    part = {name: values[: scale.recorded_rows] for name, values in columns.items()}
    section = Section("formats", f"Formats: {len(part['t']):,} and {scale.rows:,} rows of HalfCheetah-v5")
    section.facts["load average at the start"] = os.getloadavg()[0]
    _rllib_json(section, part, setup)
    _minari(section, part, setup)
    _d4rl(section, columns, setup)
    _statistics(section, columns, setup)
    _bridges(section, columns, setup)
    return section


def _whole(src: Path, rows: int) -> None:
    with rlio.read(src, epochs=1) as reader:
        _check(sum(map(len, reader)), rows)


def _check(found: int, rows: int) -> None:
    if found != rows:
        raise ValueError(f"read {found} rows of {rows}")


# ---- readers ----


def _rllib_json(section: Section, columns: Columns, setup: Setup) -> None:
    def rllib(name: str, **options: Any) -> RLlib:
        try:
            made = RLlib(setup.scratch / name, slices(columns, _ROWS))
        except ImportError as error:
            raise peers.not_installed(error) from error
        made.clear()
        made.write(**options)
        return made

    rows = len(columns["t"])
    for case, options in (
        ("read RLlib's JSON, packed", {}),
        ("read RLlib's JSON, lists", {"compress_columns": []}),
    ):
        made = peers.gathered({"RLlib": partial(rllib, case, **options)}, section.absent)
        if made:
            theirs = made["RLlib"]
            cases = [
                Case("rlio", partial(_whole, theirs.folder, rows), rows, once=True),
                Case("RLlib", lambda theirs=theirs: _check(theirs.read(), rows), rows, once=True),
            ]
            section.add_taken(case, interleave(cases, rounds=setup.scale.rounds, seconds=0))
            theirs.clear()
        _compare(section, case, "RLlib", at_least=2)


def _minari(section: Section, columns: Columns, setup: Setup) -> None:
    rows, case = len(columns["t"]), "read Minari's HDF5"
    folder = setup.scratch / "minari-formats"

    def minari() -> Any:
        return peers.minari_dataset("formats", peers.minari_buffers(columns), folder)

    for dataset in peers.gathered({"Minari": minari}, section.absent).values():
        root = next(path.parent.parent for path in folder.rglob("main_data.hdf5"))
        cases = [
            Case("rlio", partial(_whole, root, rows), rows, once=True),
            Case("Minari", lambda dataset=dataset: _check(dataset.read(), rows), rows, once=True),
        ]
        section.add_taken(case, interleave(cases, rounds=setup.scale.rounds, seconds=0))
        shutil.rmtree(folder)
    _compare(section, case, "Minari", at_least=1)


def _compare(section: Section, case: str, peer: str, *, at_least: float) -> None:
    """Beside a peer, whose files are not there without it."""
    if peer in section.absent:
        section.missing(case, beside=peer, at_least=at_least, names=[peer])
    else:
        section.compare(case, case=case, ours="rlio", beside=peer, at_least=at_least)


def _d4rl(section: Section, columns: Columns, setup: Setup) -> None:
    """Written as the files of D4RL are: no final observations, chunks of HDF5's own choice, gzip."""
    rows, case = len(columns["t"]), "convert D4RL's HDF5"
    try:
        import h5py
    except ImportError as error:
        section.absent["h5py"] = str(peers.not_installed(error))
        section.missing(case, beside="seconds", at_least=None, names=["h5py"])
        return
    source, target = setup.scratch / "d4rl.hdf5", setup.scratch / "d4rl"
    names = {"observations": "obs", "actions": "actions", "rewards": "rewards", "terminals": "terminateds"}
    with h5py.File(source, "w") as file:
        for theirs, ours in (names | {"timeouts": "truncateds"}).items():
            file.create_dataset(theirs, data=columns[ours], compression="gzip")

    def convert() -> None:
        _check(rlio.convert(source, target, to="rlio").written, rows)

    def read() -> None:
        with h5py.File(source) as file:
            for name in file:
                file[name][()]

    clear = partial(shutil.rmtree, target, ignore_errors=True)
    cases = [
        Case("rlio", convert, rows, before=clear, once=True),
        Case("bound: h5py reads", read, rows, once=True),
    ]
    taken = interleave(cases, rounds=setup.scale.rounds, seconds=0)
    section.add_taken(case, taken)
    _seconds(section, case, taken["rlio"].seconds, rows, at_most=15)
    clear()
    source.unlink()


def _statistics(section: Section, columns: Columns, setup: Setup) -> None:
    rows, case = len(columns["t"]), "statistics of obs and actions"
    data = rlio.open_dataset(write_dataset(setup.scratch / "stats", slices(columns, _ROWS * 10)))
    cache = setup.scratch / "stats-cache"

    def stats() -> None:
        _check(data.stats(_STATS, cache_folder=cache).rows, rows)

    def decode() -> None:
        for file in data.files():
            stored = pq.ParquetFile(file)
            wanted = [name for name in stored.schema_arrow.names if name.split("/")[0] in _STATS]
            stored.read(wanted, use_threads=False)

    def forget() -> None:
        shutil.rmtree(cache, ignore_errors=True)

    def numpy() -> None:
        for name in _STATS:
            values = columns[name]
            values.mean(axis=0, dtype=np.float64), values.std(axis=0, dtype=np.float64)
            values.min(axis=0), values.max(axis=0)

    cases = [
        Case("rlio", stats, rows, before=forget, once=True),
        Case("bound: pyarrow decodes", decode, rows, once=True),
        Case("NumPy, in memory, no quantiles", numpy, rows, once=True),
    ]
    taken = interleave(cases, rounds=setup.scale.rounds, seconds=0)
    section.add_taken(case, taken)
    _seconds(section, case, taken["rlio"].seconds, rows, at_most=1)
    forget()
    shutil.rmtree(setup.scratch / "stats")


def _seconds(section: Section, case: str, values: list[float], rows: int, *, at_most: float) -> None:
    median = float(np.median(values)) * rows
    section.quantity(f"{case}, {rows:,} rows", "seconds", median, "s", at_most=at_most)
    section.facts[f"{case}: seconds of the fastest round"] = min(values) * rows


# ---- bridges ----


def _bridges(section: Section, columns: Columns, setup: Setup) -> None:
    rows, scale, batch = len(columns["t"]), setup.scale, rlio.SampleBatch(columns)
    used = {name: columns[name] for name in ("obs", "actions", "rewards", "terminateds")}
    tasks: list[tuple[str, str, Callable[[], Callable[[], object]], Mapping[str, Any]]] = [
        ("to_d3rlpy", "d3rlpy.dataset", lambda: partial(_to_d3rlpy, batch), used),
        ("to_tensordict", "tensordict", lambda: partial(rlio.torch.to_tensordict, batch), columns),
        (
            "to_tensordict, TorchRL's layout",
            "tensordict",
            lambda: partial(rlio.torch.to_tensordict, batch, layout="torchrl"),
            columns,
        ),
    ]
    for case, module, make, copied in tasks:
        arrays = list(copied.values())
        copy = Case("bound: memory copy", lambda arrays=arrays: [each.copy() for each in arrays], rows)
        cases = [Case("rlio", call, rows) for call in _made(section, module, make)]
        taken = interleave([*cases, copy], rounds=scale.rounds, seconds=scale.seconds)
        section.add_taken(case, taken)
        if not cases:
            section.missing(case, beside="memory copy", at_least=0.5, names=[module.split(".")[0]])
            continue
        section.compare_best(
            case, case=case, ours="rlio", besides=["bound: memory copy"], label="memory copy", at_least=0.5
        )


def _to_d3rlpy(batch: rlio.SampleBatch) -> None:
    from rlio.bridges import to_d3rlpy

    logging.getLogger("rlio").setLevel(logging.ERROR)  # It warns of the last steps of truncated episodes.
    to_d3rlpy(batch)


def _made(
    section: Section, module: str, make: Callable[[], Callable[[], object]]
) -> list[Callable[[], object]]:
    """What is called, if the library is there."""
    try:
        __import__(module)
    except ImportError as error:
        section.absent[module.split(".")[0]] = str(peers.not_installed(error))
        return []
    return [make()]
