"""Random batches of 256 stacks of frames of ALE/Pong-v5, and the memory that holds them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import rlio
from benchmarks import bounds, machine, peers
from benchmarks.data import Columns, Pong, pong, write_dataset
from benchmarks.results import Section
from benchmarks.scales import Setup
from benchmarks.store import HotStore, stored
from benchmarks.timing import Case, interleave
from rlio.reader import InputReader

__all__ = ["run"]

SIZE = 256
CASE = "256"
_CHUNK = 1000


def run(setup: Setup) -> Section:
    """Each contender is built alone, so that what it holds can be told; then all draw in turns."""
    scale = setup.scale
    section = Section(
        "images", f"Random batches of {SIZE} from {scale.image_rows:,} stacks of 4 frames of ALE/Pong-v5"
    )
    recording = pong(setup.data, scale.image_rows)
    section.facts["bytes of a row"] = sum(values.nbytes for values in recording.rows(0, 1).values())
    makers = _makers(setup, recording)
    # Their imports are not data.
    peers.import_all()
    contenders: dict[str, Any] = {}
    for name, make in makers.items():
        before = machine.resident()
        contenders |= peers.gathered({name: make}, section.absent)
        after = machine.resident()
        if name in contenders and before is not None and after is not None:
            section.facts[f"{name}: bytes held"] = after - before
    cases = [case for name, contender in contenders.items() for case in _cases(name, contender)]
    section.add_taken(CASE, interleave(cases, rounds=scale.rounds, seconds=scale.seconds))
    _compare(section)
    for contender in contenders.values():
        if isinstance(contender, HotStore):
            contender.close()
    return section


def _makers(setup: Setup, recording: Pong) -> dict[str, Callable[[], Any]]:
    rows = len(recording)
    first_axis, last_axis = (_dataset(setup, recording, last_axis=last) for last in (False, True))
    batches = partial(recording.batches, rows, _CHUNK)
    memmap = setup.scratch / "torchrl-images"
    shutil.rmtree(memmap, ignore_errors=True)
    return {
        "rlio": lambda: stored(first_axis, cache="memory"),
        "rlio, (84, 84, 4)": lambda: stored(last_axis, cache="memory"),
        "cpprb": lambda: peers.cpprb_uniform(batches(), rows=rows),
        "cpprb, frames shared": lambda: peers.cpprb_uniform(
            batches(last_axis=True), rows=rows, share_frames=True
        ),
        "TorchRL, memmap": lambda: peers.torchrl_uniform(batches(), rows=rows, folder=memmap),
        "TorchRL, RAM": lambda: peers.torchrl_uniform(batches(), rows=rows),
        "bound: NumPy": lambda: recording.rows(0, rows),
    }


def _dataset(setup: Setup, recording: Pong, *, last_axis: bool) -> Path:
    root = setup.scratch / ("pong-last-axis" if last_axis else "pong")
    return write_dataset(root, recording.batches(len(recording), _CHUNK, last_axis=last_axis))


def _cases(name: str, contender: Any) -> list[Case]:
    if isinstance(contender, HotStore):
        cases = [Case(name, contender.epochs(SIZE).sample, SIZE)]
        if name == "rlio":
            cases.append(Case("rlio, views", contender.epochs(SIZE, views=True).sample, SIZE))
        else:
            in_c_order = partial(_in_c_order, contender.epochs(SIZE))
            cases.append(Case(f"{name}, in C order", in_c_order, SIZE))
        return cases
    if isinstance(contender, dict):
        columns: Columns = contender
        return [
            Case("bound: NumPy, fresh arrays", bounds.Taken(columns, SIZE, reuse=False).sample, SIZE),
            Case("bound: NumPy, reused arrays", bounds.Taken(columns, SIZE, reuse=True).sample, SIZE),
        ]
    case = Case(name, partial(contender.sample, SIZE), SIZE)
    return peers.torchrl_cases(case) if name.startswith("TorchRL") else [case]


def _in_c_order(reader: InputReader) -> list[Any]:
    """A batch whose stacks lie as NumPy orders arrays by default, not frame by frame."""
    batch: Any = reader.sample()
    return [rlio.batch.in_c_order(batch[name]) for name in ("obs", "new_obs")]


def _compare(section: Section) -> None:
    work = "random image batches of 256"
    goals: list[tuple[str, str, str, float | None]] = [
        (f"{work}, contiguous", "rlio", "cpprb", 1.5),
        (f"{work}, (84, 84, 4), frame by frame", "rlio, (84, 84, 4)", "cpprb", None),
        (f"{work}, (84, 84, 4), in C order", "rlio, (84, 84, 4), in C order", "cpprb", 1.5),
        (f"{work}, contiguous", "rlio", "cpprb, frames shared", None),
        (f"{work}, contiguous", "rlio", "TorchRL, memmap", None),
        (f"{work}, contiguous", "rlio", "TorchRL, RAM", None),
        (f"{work}, contiguous", "rlio", "bound: NumPy, reused arrays", None),
        (f"{work}, as views", "rlio, views", "cpprb", None),
    ]
    for what, ours, beside, goal in goals:
        section.compare_best(
            what, case=CASE, ours=ours, besides=peers.threadings(beside), label=beside, at_least=goal
        )
    for beside, goal in (("cpprb", 1 / 6), ("cpprb, frames shared", None), ("TorchRL, RAM", None)):
        held = [section.facts.get(f"{name}: bytes held") for name in ("rlio", beside)]
        value = held[0] / held[1] if held[0] is not None and held[1] else None
        why = (
            ""
            if value is not None
            else section.absent.get("rlio", section.absent.get(beside, "unknown here"))
        )
        section.quantity(
            "memory that holds the images", f"part of {beside}'s", value, "x", at_most=goal, why=why
        )
