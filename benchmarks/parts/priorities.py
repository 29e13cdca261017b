"""Prioritised draws of 256 rows, each followed by an update of their priorities."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks import peers
from benchmarks.data import Columns, half_cheetah, slices
from benchmarks.results import Section
from benchmarks.scales import Setup
from benchmarks.store import live
from benchmarks.timing import Case, interleave

__all__ = ["run"]

SIZE = 256
# Draws before the measurement, so that priorities differ.
_DRAWS = 200


def run(setup: Setup) -> Section:
    """Sample and update, alpha 0.6, beta 0.4, in a store whose priorities differ."""
    scale = setup.scale
    section = Section(
        "priorities", f"Prioritised batches of {SIZE} from {scale.rows:,} rows, and their update"
    )
    columns = half_cheetah(setup.data, scale.rows)
    contenders = peers.gathered(_makers(setup, columns), section.absent)
    errors = itertools.cycle(list(np.random.default_rng(0).random((1024, SIZE), np.float32)))

    def step(contender: peers.Prioritised) -> None:
        contender.sample(SIZE)
        contender.update(next(errors))

    for contender in contenders.values():
        for _ in range(min(_DRAWS, scale.rows // SIZE)):
            step(contender)
    cases: list[Case] = []
    for name, contender in contenders.items():
        case = Case(name, partial(step, contender), SIZE)
        cases += peers.torchrl_cases(case) if name.startswith("TorchRL") else [case]
    section.add_taken("256", interleave(cases, rounds=scale.rounds, seconds=scale.seconds))
    section.compare_best(
        "prioritised sample and update, 256",
        case="256",
        ours="rlio",
        besides=["cpprb", *peers.threadings("TorchRL, RAM")],
        label="cpprb or TorchRL, RAM",
        at_least=2.0,
    )
    for beside in ("cpprb", "TorchRL, RAM", "TorchRL, memmap"):
        section.compare_best(
            "prioritised sample and update, 256",
            case="256",
            ours="rlio",
            besides=peers.threadings(beside),
            label=beside,
        )
    return section


def _makers(setup: Setup, columns: Columns) -> dict[str, Callable[[], peers.Prioritised]]:
    memmap = setup.scratch / "torchrl-priorities"
    shutil.rmtree(memmap, ignore_errors=True)
    rows = setup.scale.rows
    return {
        "rlio": lambda: live(slices(columns, 10_000), capacity=rows).prioritised(SIZE),
        "cpprb": lambda: peers.cpprb_prioritised(columns),
        "TorchRL, RAM": lambda: peers.torchrl_prioritised(columns),
        "TorchRL, memmap": lambda: peers.torchrl_prioritised(columns, folder=memmap),
    }
