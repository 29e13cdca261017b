"""A long recording of frames, written beside RLlib, and the opening of a store of such frames."""

from __future__ import annotations

import rlio
from benchmarks import machine, peers
from benchmarks.data import Columns, pong
from benchmarks.first_light import Rlio, RLlib
from benchmarks.results import Line, Section
from benchmarks.scales import Setup
from benchmarks.timing import Case, interleave

__all__ = ["run"]

_BATCH, _SAMPLE = 200, 256


def run(setup: Setup) -> Section:
    """Write, with the frames as first and as last axis; then open a store, until it gave its first batch."""
    rows, opened = setup.scale.long_image_rows, setup.scale.opened_image_rows
    section = Section("frames", f"Frames: {rows:,} rows of Pong written, and {opened:,} opened as a store")
    recording = pong(setup.data, rows)
    for kind, last_axis in (("(84, 84, 4)", True), ("(4, 84, 84)", False)):
        _write(section, setup, kind, list(recording.batches(rows, _BATCH, last_axis=last_axis)), rows)
    _open(section, setup, list(recording.batches(opened, _BATCH)), opened)
    return section


def _write(section: Section, setup: Setup, kind: str, batches: list[Columns], rows: int) -> None:
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
