"""Files, written and read in order: vectors in batches of 1,000 rows, stacks of frames in batches of 200.

Lists of tokens, whose rows differ in length, are beside pyarrow's own lists of arrays.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

import rlio
from benchmarks import machine, peers
from benchmarks.data import Columns, half_cheetah, pong, slices
from benchmarks.first_light import Rlio, RLlib
from benchmarks.results import Section
from benchmarks.scales import Setup
from benchmarks.timing import Case, interleave
from rlio.batch.arrays import object_column

__all__ = ["run"]

_VECTORS, _IMAGES, _LISTS = 1000, 200, 4000


class _Files(Protocol):
    """A contender: writes the batches it was given, reads what it wrote."""

    folder: Path

    def clear(self) -> None: ...

    def write(self) -> None: ...

    def read(self) -> int: ...


class _RlioLists:
    """Lists of tokens as columns of arrays."""

    def __init__(self, folder: Path, batches: list[NDArray[Any]]) -> None:
        self.folder = folder / "rlio"
        self._batches = batches

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self) -> None:
        with rlio.ParquetWriter(self.folder, spool=None) as writer:
            for tokens in self._batches:
                writer.write(rlio.SampleBatch(tokens=tokens))

    def read(self) -> int:
        with rlio.read(self.folder, epochs=1, shuffle=False, batch_size=_LISTS) as reader:
            return sum(len(batch["tokens"]) for batch in reader)


class _PyarrowLists:
    """The same lists by pyarrow, as it writes them by default, but with rlio's codec."""

    def __init__(self, folder: Path, batches: list[NDArray[Any]]) -> None:
        self.folder = folder / "pyarrow"
        self._batches = batches

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self) -> None:
        self.folder.mkdir(parents=True)
        fields = pa.schema([("tokens", pa.list_(pa.int32()))])
        with pq.ParquetWriter(
            self.folder / "a.parquet", fields, compression="zstd", compression_level=1
        ) as writer:
            for tokens in self._batches:
                writer.write_table(pa.table({"tokens": pa.array(tokens.tolist(), pa.list_(pa.int32()))}))

    def read(self) -> int:
        batches = pq.ParquetFile(self.folder / "a.parquet").iter_batches(_LISTS)
        return sum(len(batch.column("tokens").to_numpy(zero_copy_only=False)) for batch in batches)


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
    lists = _tokens(scale.recorded_rows)
    folder = setup.scratch / "lists"
    both: dict[str, _Files] = {"rlio": _RlioLists(folder, lists), "pyarrow": _PyarrowLists(folder, lists)}
    _measure(section, "lists", both, scale.recorded_rows, setup)
    _compare(section)
    return section


def _tokens(rows: int) -> list[NDArray[Any]]:
    """Batches of rows of 0 to 400 int32, few of them frequent, as the words of a language are."""
    rng = np.random.default_rng(0)
    ends = np.cumsum(rng.integers(0, 400, rows))
    every = np.minimum(rng.zipf(1.3, ends[-1]), 50_000).astype(np.int32)
    column = object_column(np.split(every, ends[:-1]))
    return [column[start : start + _LISTS] for start in range(0, rows, _LISTS)]


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
        section.compare(f"{work} lists", case=f"{work}, lists", ours="rlio", beside="pyarrow", at_least=0.4)
    bytes_of = {name: section.facts[f"{name}: bytes a row, lists"] for name in ("rlio", "pyarrow")}
    part = bytes_of["rlio"] / bytes_of["pyarrow"]
    section.quantity("write lists", "part of pyarrow's bytes", part, "x", at_most=1.15)
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
