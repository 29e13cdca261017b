"""A long recording of frames, written beside RLlib, and the opening of a store of such frames.

Writers are timed in one process, and each in a process of its own, as a training has one. What they take
depends on that: whether the C library keeps the memory of a record for the next one is decided by what else
the process allocated, and fresh memory costs more than RLlib's compression.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import rlio
from benchmarks import machine, peers
from benchmarks.data import Columns, pong
from benchmarks.first_light import Rlio, RLlib
from benchmarks.results import Line, Section
from benchmarks.scales import Setup
from benchmarks.timing import Case, interleave

__all__ = ["run"]

_BATCH, _SAMPLE = 200, 256
_WRITERS: dict[str, type[Rlio | RLlib]] = {"rlio": Rlio, "RLlib": RLlib}


def run(setup: Setup) -> Section:
    """Write, with the frames as first and as last axis; then open a store, until it gave its first batch."""
    rows, opened = setup.scale.long_image_rows, setup.scale.opened_image_rows
    section = Section("frames", f"Frames: {rows:,} rows of Pong written, and {opened:,} opened as a store")
    recording = pong(setup.data, rows)
    for kind, last_axis in (("(84, 84, 4)", True), ("(4, 84, 84)", False)):
        _write(section, setup, kind, list(recording.batches(rows, _BATCH, last_axis=last_axis)), rows)
        _write_apart(section, setup, kind, rows, last_axis=last_axis)
    _open(section, setup, list(recording.batches(opened, _BATCH)), opened)
    return section


def _write(section: Section, setup: Setup, kind: str, batches: list[Columns], rows: int) -> None:
    """Both writers in one process."""
    folder = setup.scratch / "written"

    def rllib() -> RLlib:
        try:
            return RLlib(folder, batches)
        except ImportError as error:
            raise peers.not_installed(error) from error

    contenders: dict[str, Rlio | RLlib] = {"rlio": Rlio(folder, batches)}
    contenders |= peers.gathered({"RLlib": rllib}, section.absent)
    case = f"write, {kind}"
    cases = [Case(name, each.write, rows, before=each.clear, once=True) for name, each in contenders.items()]
    section.add_taken(case, interleave(cases, rounds=setup.scale.rounds, seconds=0))
    bytes_of = {name: machine.folder_bytes(each.folder) / rows for name, each in contenders.items()}
    for name, each in contenders.items():
        section.facts[f"{name}: bytes a row, {kind}"] = bytes_of[name]
        each.clear()
    section.compare(case, case=case, ours="rlio", beside="RLlib", at_least=1)
    part = bytes_of["rlio"] / bytes_of["RLlib"] if "RLlib" in bytes_of else None
    why = section.absent.get("RLlib", "")
    section.quantity(case, "part of RLlib's bytes", part, "x", at_most=1 / 20, why=why)


def _write_apart(section: Section, setup: Setup, kind: str, rows: int, *, last_axis: bool) -> None:
    """Each writer in a process of its own, in turns."""
    case = f"write, {kind}, a process each"
    with ExitStack() as stack:
        apart = {
            name: stack.enter_context(_apart(name, setup, rows, last_axis))
            for name in _WRITERS
            if name not in section.absent
        }
        cases = [Case(name, each.write, rows, once=True) for name, each in apart.items()]
        taken = interleave(cases, rounds=setup.scale.rounds, seconds=0)
    for name, each in apart.items():
        # This process waits: its own processor time says nothing. The first call warmed up.
        taken[name].cpu[:] = [seconds / rows for seconds in each.cpu[1:]]
        section.facts[f"{name}: processor ns a row, {case.removeprefix('write, ')}"] = (
            1e9 * statistics.median(taken[name].cpu)
        )
    section.add_taken(case, taken)
    section.compare(case, case=case, ours="rlio", beside="RLlib", at_least=1)


class _Apart:
    """A process that has the rows, and writes them when it is asked.

    Attributes:
        cpu: Processor seconds of each call.
    """

    def __init__(self, asked: Connection) -> None:
        self._asked = asked
        self.cpu: list[float] = []

    def write(self) -> None:
        """Write all rows into an empty folder."""
        self._asked.send("write")
        self.cpu.append(self._asked.recv())


@contextmanager
def _apart(name: str, setup: Setup, rows: int, last_axis: bool) -> Iterator[_Apart]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (theirs, name, setup.data, setup.scratch / "apart", rows, last_axis)
    child = context.Process(target=_write_when_asked, args=arguments)
    child.start()
    theirs.close()
    try:
        with ours:  # Closing it ends the process.
            ours.recv()  # It has the rows.
            yield _Apart(ours)
    finally:
        child.join()


def _write_when_asked(
    asked: Connection, name: str, data: Path, folder: Path, rows: int, last_axis: bool
) -> None:
    writer = _WRITERS[name](folder, list(pong(data, rows).batches(rows, _BATCH, last_axis=last_axis)))
    asked.send(None)
    with suppress(EOFError):
        while asked.recv():
            begun = time.process_time()
            writer.write()
            taken = time.process_time() - begun
            asked.send(taken)
            writer.clear()


def _open(section: Section, setup: Setup, batches: list[Columns], rows: int) -> None:
    """A store in memory, from opening to the first random batch, beside the bare reading of the rows."""
    contender = Rlio(setup.scratch / "opened", batches)
    contender.write()

    def open_store() -> None:
        with rlio.ReplayStore.open(contender.folder, cache="memory") as store:
            store.uniform(batch_size=_SAMPLE, seed=0).sample()

    cases = [Case("rlio, a store", open_store, rows, once=True), Case("rlio, in order", contender.read, rows)]
    section.add_taken("open", interleave(cases, rounds=setup.scale.rounds, seconds=0))
    contender.clear()
    found = section.find("open", "rlio, a store")
    assert found is not None
    section.lines.append(Line("open a store of frames", "rows a second", found.rate, "rows", goal=20_000))
