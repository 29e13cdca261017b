"""Files, written and read in order: vectors in batches of 1,000 rows, stacks of frames in batches of 200."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as pq

import rlio
from benchmarks import machine, peers
from benchmarks.data import Columns, half_cheetah, pong, slices
from benchmarks.first_light import Rlio, RLlib
from benchmarks.results import Section
from benchmarks.scales import Setup
from benchmarks.timing import Case, interleave

__all__ = ["run"]

_VECTORS, _IMAGES = 1000, 200


class _Files(Protocol):
    """A contender: writes the batches it was given, reads what it wrote."""

    folder: Path

    def clear(self) -> None: ...

    def write(self) -> None: ...

    def read(self) -> int: ...


class _Minari:
    """Minari's HDF5 of whole episodes; it is given vectors only: frames it would store as JPEG, with loss."""

    def __init__(self, folder: Path, columns: Columns) -> None:
        self.folder = folder / "minari"
        self._buffers = peers.minari_buffers(columns)

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self) -> None:
        self._dataset = peers.minari_dataset("files", self._buffers, self.folder)

    def read(self) -> int:
        return self._dataset.read()


def run(setup: Setup) -> Section:
    """Write and read, vectors and images."""
    scale = setup.scale
    section = Section(
        "files",
        f"Files: {scale.recorded_rows:,} rows of HalfCheetah-v5, {scale.recorded_image_rows:,} of Pong",
    )
    columns = half_cheetah(setup.data, scale.rows)
    part = {name: values[: scale.recorded_rows] for name, values in columns.items()}
    vectors = slices(part, _VECTORS)
    contenders = _contenders(setup.scratch / "vectors", vectors, section)
    contenders |= peers.gathered({"Minari": lambda: _minari(setup.scratch, part)}, section.absent)
    _measure(section, "vectors", contenders, len(part["t"]), setup)
    images = list(
        pong(setup.data, scale.image_rows).batches(scale.recorded_image_rows, _IMAGES, last_axis=True)
    )
    contenders = _contenders(setup.scratch / "images", images, section)
    _measure(section, "images", contenders, scale.recorded_image_rows, setup)
    _compare(section)
    return section


def _contenders(folder: Path, batches: list[Columns], section: Section) -> dict[str, _Files]:
    def rllib() -> _Files:
        try:
            return RLlib(folder, batches)
        except ImportError as error:
            raise peers.not_installed(error) from error

    return {"rlio": Rlio(folder, batches)} | peers.gathered({"RLlib": rllib}, section.absent)


def _minari(folder: Path, columns: Columns) -> _Files:
    contender = _Minari(folder, columns)
    contender.write()  # Whatever it needs and lacks shows here.
    return contender


def _measure(section: Section, kind: str, contenders: dict[str, _Files], rows: int, setup: Setup) -> None:
    scale = setup.scale
    writes = [
        Case(name, contender.write, rows, before=contender.clear, once=True)
        for name, contender in contenders.items()
    ]
    section.add_taken(f"write, {kind}", interleave(writes, rounds=scale.rounds, seconds=0))
    for name, contender in contenders.items():
        section.facts[f"{name}: bytes a row, {kind}"] = machine.folder_bytes(contender.folder) / rows
    reads = [
        Case(name, partial(_read, contender, rows), rows, once=True) for name, contender in contenders.items()
    ]
    files = rlio.open_dataset(contenders["rlio"].folder).files()
    reads.append(Case("bound: pyarrow decodes", partial(_decode, files), rows, once=True))
    section.add_taken(f"read, {kind}", interleave(reads, rounds=scale.rounds, seconds=0))
    for contender in contenders.values():
        contender.clear()


def _read(contender: _Files, rows: int) -> None:
    if (found := contender.read()) != rows:
        raise ValueError(f"{type(contender).__name__} read {found} rows of {rows}")


def _decode(files: list[Any]) -> None:
    for file in files:
        pq.ParquetFile(file).read(use_threads=False)


def _compare(section: Section) -> None:
    for work, kind, goal in (
        ("write", "vectors", 8.0),
        ("write", "images", 2.0),
        ("read", "vectors", 10.0),
        ("read", "images", 3.0),
    ):
        section.compare(f"{work} {kind}", case=f"{work}, {kind}", ours="rlio", beside="RLlib", at_least=goal)
    for work in ("write", "read"):
        section.compare(f"{work} vectors", case=f"{work}, vectors", ours="rlio", beside="Minari")
    ours = section.facts["rlio: bytes a row, vectors"]
    section.quantity("write vectors", "bytes a row", ours, "bytes", at_most=90)
    theirs = section.facts.get("RLlib: bytes a row, images")
    section.quantity(
        "write images",
        "part of RLlib's bytes",
        None if theirs is None else section.facts["rlio: bytes a row, images"] / theirs,
        "x",
        at_most=0.25,
        why=section.absent.get("RLlib", ""),
    )
