"""Files of other libraries on a store whose requests are late: how many, and how often a reader stands still.

Each layout is opened and read, in order, and tables also shuffled without a store; beside it with the same
requests one after the other. docs/design/requests.md says what stands behind the figures.
"""

from __future__ import annotations

import gc
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

from fsspec.implementations.memory import MemoryFileSystem

import rlio
from benchmarks import peers
from benchmarks.far_store import Traffic, one_at_a_time
from benchmarks.layouts import LAYOUTS, LONE, Files, Shape, rows_in
from benchmarks.results import Section
from benchmarks.scales import Scale, Setup
from rlio.formats.tables import table
from rlio.storage import far_file

__all__ = ["WHAT", "run"]

_EPISODE, _WIDTH, _BATCH = 200, 96, 256
# Bytes of a number in texts, about; others have four.
_TEXT_BYTES = {"csv": 10, "jsonl": 20, "rllib-json": 20}
# Of layouts in which each episode is a file.
_EPISODE_FILES = 40
_OURS, _BESIDE = "rlio", "one by one"
_OPENING, _IN_ORDER, _SHUFFLED = "opening", "an epoch in order", "a shuffled epoch without a store"


@dataclass(frozen=True)
class _What:
    """A layout, as it is read.

    Attributes:
        title: Its name in the tables.
        kind: In `LAYOUTS`.
        is_table: Whether it is also shuffled.
        read: Options of `rlio.read`.
    """

    title: str
    kind: str
    is_table: bool = False
    read: dict[str, Any] = field(default_factory=dict)


_COLUMNS = {"obs": "obs", "actions": "actions", "rewards": "rewards"}
_FLAT = {name: [f"{name}_{at}" for at in range(size)] for name, size in (("obs", _WIDTH), ("actions", 4))}


def _mapped(columns: dict[str, Any] = _COLUMNS, **more: Any) -> dict[str, Any]:
    by_step: dict[str, Any] = {} if "per_row" in more else {"episode": "eps_id", "terminated": "terminateds"}
    return {"mapping": rlio.Mapping(columns, next_obs="derive", **by_step, **more)}


WHAT = (
    _What("Arrow", "arrow", True),
    _What("CSV, by a mapping", "csv", True, _mapped({**_FLAT, "rewards": "rewards"})),
    _What("JSON lines, by a mapping", "jsonl", True, _mapped()),
    _What("NPZ", "npz", True),
    _What("HDF5, contiguous", "hdf5", True),
    _What("HDF5, chunks", "hdf5-chunks", True),
    _What("Parquet", "parquet", True),
    _What("Parquet, by a mapping", "parquet", True, _mapped()),
    _What("Parquet that a mapping sorts", "parquet-unsorted", True, _mapped(sort="t")),
    _What("Parquet whose rows are episodes", "parquet-episodes", True, _mapped(per_row=True)),
    _What("rlio's Parquet", "rlio", True),
    _What("RLlib's JSON", "rllib-json", read={"unnormalise_actions": False}),
    _What("D4RL, contiguous", "d4rl-contiguous"),
    _What("D4RL, chunks", "d4rl"),
    _What("Robomimic", "robomimic"),
    _What("ManiSkill", "maniskill"),
    _What("ALOHA, pictures", "aloha"),
    _What("d3rlpy 1", "d3rlpy-1"),
    _What("d3rlpy 2", "d3rlpy-2"),
    _What("Tianshou", "tianshou"),
    _What("Minari, HDF5", "minari"),
    _What("Minari, Parquet", "minari-parquet"),
    _What("Minari, Arrow", "minari-arrow"),
    _What("imitation", "imitation"),
    _What("LeRobot", "lerobot"),
    _What("RLDS", "rlds"),
    _What("TorchRL", "torchrl"),
    _What("Zarr 2, chunks", "zarr"),
    _What("Zarr 3, shards", "zarr-shards"),
)


class _Found(NamedTuple):
    """What one read found: requests, seconds of each wait, bytes, seconds on the clock."""

    requests: int
    waits: int
    waited: float
    bytes: int
    seconds: float


#: (work, who) -> what each round found.
_Rounds = dict[tuple[str, str], list[_Found]]


def run(setup: Setup) -> Section:
    """Every layout whose file format's library is installed."""
    scale = setup.scale
    delay = f"{1000 * scale.far_seconds:.0f} ms a request"
    about = f"{scale.far_files} files of about {scale.far_bytes / 1e6:.3g} MB a layout, {delay}"
    title = f"Far files (a store in memory): {about}, medians of {_rounds_of(scale)} rounds"
    section = Section("far", title)
    # What was made so far is there for good: a collection need not look at it before each reading.
    gc.collect()
    gc.freeze()
    try:
        for what in WHAT:
            _layout(section, what, setup)
    finally:
        gc.unfreeze()
    _compare(section)
    return section


def _layout(section: Section, what: _What, setup: Setup) -> None:
    """Add the rows of a layout to the tables."""
    try:
        files, rows = _made(what.kind, setup.scale.far_bytes, setup.scale.far_files)
    except ImportError as error:
        section.absent[what.title] = str(peers.not_installed(error))
        return
    for (work, who), found in _rounds(what, files, rows, setup).items():
        _add(section, what.title, work, who, found, sum(map(len, files.values())))


def _rounds_of(scale: Scale) -> int:
    return min(scale.rounds, scale.far_rounds)


def _compare(section: Section) -> None:
    """A line for each table: how long readers of all layouts stood still, beside those without a pool."""
    for work, rows in section.tables.items():
        ours, theirs = (
            [sum(row[f"{who}waited, s"] for row in rows.values())] for who in ("", f"{_BESIDE}: ")
        )
        if ours > [0]:  # Of tiny files, all may be known from opening.
            title = f"{work}, all layouts: seconds waited"
            section.ratio(title, beside=_BESIDE, ours=ours, theirs=theirs, at_least=None)


def _made(kind: str, size: int, count: int) -> tuple[Files, int]:
    """The files of a layout, so many of about so many bytes, and their rows."""
    row_bytes = _TEXT_BYTES.get(kind, 4) * (_WIDTH + 10)
    rows = max(1, round(size / row_bytes / _EPISODE)) * _EPISODE
    rows *= count if kind in LONE else 1
    episode = _EPISODE
    if kind == "aloha":
        episode = rows
    elif kind in ("minari-parquet", "minari-arrow"):
        episode = rows // _EPISODE_FILES
        rows = episode * _EPISODE_FILES
    shape = Shape(rows=rows, episode=episode, width=_WIDTH)
    return LAYOUTS[kind](shape, count), rows_in(kind, shape, count)


def _rounds(what: _What, files: Files, rows: int, setup: Setup) -> _Rounds:
    """Read it in turns with the pool and without, and every other round the other way about."""
    turns = [(who, shuffle) for shuffle in (False, True)[: 1 + what.is_table] for who in (_OURS, _BESIDE)]
    found = _Rounds()
    for number in range(_rounds_of(setup.scale)):
        for who, shuffle in turns if number % 2 == 0 else reversed(turns):
            with one_at_a_time() if who == _BESIDE else nullcontext():
                opening, epoch = _read(files, rows, setup.scale.far_seconds, shuffle=shuffle, **what.read)
            if not shuffle:
                found.setdefault((_OPENING, who), []).append(opening)
            found.setdefault((_SHUFFLED if shuffle else _IN_ORDER, who), []).append(epoch)
    return found


def _read(files: Files, rows: int, delay: float, *, shuffle: bool, **how: Any) -> tuple[_Found, _Found]:
    """Open and read once: what each took."""
    traffic, path, store = Traffic(), f"/{uuid.uuid4().hex}/data", MemoryFileSystem()
    # rlio knows from files of a folder how others are, and files that are open share what is kept.
    for name, data in files.items():
        store.pipe_file(f"{path}/{name}", data)
    gc.collect()
    given = {"traffic": traffic, "seconds": delay}
    how |= {"shuffle": shuffle, "seed": 0 if shuffle else None, "epochs": 1, "batch_size": _BATCH}
    with _keeping_little(), traffic.watched():
        reader, opening = _watched(
            traffic, lambda: rlio.read(f"far://{path}", cache="none", storage_options=given, **how)
        )
        with reader:
            read, epoch = _watched(traffic, lambda: sum(map(len, reader)))
    store.rm(path, recursive=True)
    if read != rows:
        raise RuntimeError(f"{sorted(files)[0]} and others: read {read} rows, expected {rows}")
    return opening, epoch


def _watched(traffic: Traffic, call: Callable[[], Any]) -> tuple[Any, _Found]:
    traffic.clear()
    begun = time.perf_counter()
    result = call()
    seconds, waits = time.perf_counter() - begun, traffic.waits
    return result, _Found(traffic.requests, len(waits), sum(waits), traffic.bytes, seconds)


@contextmanager
def _keeping_little() -> Iterator[None]:
    """Files and tables keep a sixteenth, as of larger data: an epoch would find all from opening."""
    with ExitStack() as stack:
        for module, name in ((far_file, "_KEPT_BYTES"), (table, "KEPT_BYTES")):
            stack.enter_context(mock.patch.object(module, name, getattr(module, name) // 16))
        yield


def _add(section: Section, title: str, work: str, who: str, found: list[_Found], size: int) -> None:
    """Add the medians of the rounds to the row of a layout."""
    medians = _Found(*(statistics.median(values) for values in zip(*found, strict=True)))
    row = section.tables.setdefault(work, {}).setdefault(title, {})
    columns = {"waits": medians.waits, "waited, s": round(medians.waited, 2), "s": round(medians.seconds, 2)}
    if who == _OURS:
        more = round(medians.bytes / size, 2)
        row |= {"MB": round(size / 1e6, 1), "requests": medians.requests, "bytes / files": more, **columns}
    else:
        row |= {f"{who}: {name}": value for name, value in columns.items()}
