"""Infos: what recording and reading them takes, as ratios to the same rows without.

HalfCheetah-v5 with `RecordEpisodeStatistics`, whose infos are numbers alone: one long recording, and many of
one episode each, whose last step brings new keys. Goals are of processor time.
"""

from __future__ import annotations

import shutil
import statistics
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym

import rlio
from benchmarks.results import Section
from benchmarks.scales import Setup
from benchmarks.timing import Case, interleave

__all__ = ["run"]

_KEYS = [f"infos/{key}" for key in ("x_position", "x_velocity", "reward_forward", "reward_ctrl")]
_OTHERS = ["obs", "new_obs", "actions", "rewards", "terminateds", "truncateds", "eps_id", "t"]
_WITHOUT = "without infos"
#: What is read: whether the rows have infos, the columns, and whether objects are made.
_READINGS: dict[str, tuple[bool, list[str] | None, bool]] = {
    _WITHOUT: (False, None, False),
    "as objects": (True, None, True),
    "not looked at": (True, None, False),
    "four keys": (True, [*_OTHERS, *_KEYS], False),
    "not asked for": (True, _OTHERS, False),
}
#: Goals of a first batch, and of each batch.
_GOALS = {
    "first batch": {"as objects": 3.0, "not asked for": 1.5},
    "each batch": {"as objects": 4.0, "four keys": 1.5, "not asked for": 1.5},
    "epoch": {"as objects": 4.0, "not looked at": 1.5, "four keys": 1.5, "not asked for": 1.5},
}
_ORDERS: dict[str, dict[str, Any]] = {
    "in order": {"cache": "none", "shuffle": False},
    "shuffled": {"cache": "none", "shuffle": True},
    "shuffled, from memory": {"cache": "memory", "shuffle": True},
}
_FIRST, _BATCH, _BATCHES = 256, 1024, 30
_RECORDINGS = 20


@dataclass
class _Reading:
    """A way to read the rows."""

    roots: dict[bool, Path]
    name: str
    options: dict[str, Any]
    _reader: Any = field(default=None, init=False)

    def open(self, size: int = _BATCH, **options: Any) -> None:
        has_infos, columns, _ = _READINGS[self.name]
        root, options = self.roots[has_infos], {**self.options, **options}
        self._reader = rlio.read(root, columns=columns, batch_size=size, seed=0, **options)

    def sample(self) -> None:
        self._look(self._reader.sample())

    def _look(self, batch: Any) -> None:
        if _READINGS[self.name][2]:
            batch["infos"]

    def first(self) -> None:
        self.open(_FIRST)
        self.sample()

    def warm(self) -> None:
        self.open()
        self.sample()

    def each(self) -> None:
        for _ in range(_BATCHES):
            self.sample()

    def epoch(self) -> None:
        self.open(_FIRST, epochs=1)
        for batch in self._reader:
            self._look(batch)

    def close(self) -> None:
        self._reader.close()


def run(setup: Setup) -> Section:
    """Record the same steps with infos and without, and read them in several ways."""
    rows = max(setup.scale.recorded_rows // 10, 2 * _BATCH)
    section = Section("infos", f"Infos: {rows:,} rows of HalfCheetah-v5 with `RecordEpisodeStatistics`")
    roots = {has: setup.scratch / f"infos-{has}" for has in (False, True)}
    names = {False: _WITHOUT, True: "with infos"}
    recordings = [
        Case(
            names[has], partial(_record, root, rows, infos=has), rows, before=partial(_clear, root), once=True
        )
        for has, root in roots.items()
    ]
    section.add_taken("record", interleave(recordings, rounds=setup.scale.rounds, seconds=0))
    _compare(section, "record", "with infos", at_most=1.5)
    for order, options in _ORDERS.items():
        readings = [_Reading(roots, name, options) for name in _READINGS]
        for what, cases in (
            ("first batch", [Case(r.name, r.first, _FIRST, after=r.close, once=True) for r in readings]),
            (
                "each batch",
                [
                    Case(r.name, r.each, _BATCH * _BATCHES, before=r.warm, after=r.close, once=True)
                    for r in readings
                ],
            ),
        ):
            case = f"{what}, {order}"
            section.add_taken(case, interleave(cases, rounds=setup.scale.rounds, seconds=0))
            for name in list(_READINGS)[1:]:
                _compare(section, case, name, at_most=_GOALS[what].get(name))
    _short(setup, section, rows)
    for root in roots.values():
        _clear(root)
    return section


def _short(setup: Setup, section: Section, rows: int) -> None:
    """Record an episode at a time, and read an epoch over all recordings."""
    roots = {has: setup.scratch / f"infos-short-{has}" for has in (False, True)}
    for has, root in roots.items():
        _clear(root)
        for number in range(_RECORDINGS):
            _record(root, rows // _RECORDINGS, infos=has, seed=number, episode=rows // _RECORDINGS)
    shards = len(list(roots[True].glob("data/*/*.parquet"))) / _RECORDINGS
    section.quantity(f"{_RECORDINGS} recordings of an episode", "shards of each", shards, "", at_most=1)
    for order in ("in order", "shuffled"):
        readings = [_Reading(roots, name, _ORDERS[order]) for name in _READINGS]
        case = f"epoch over {_RECORDINGS} recordings of an episode, {order}"
        cases = [Case(r.name, r.epoch, rows, after=r.close, once=True) for r in readings]
        section.add_taken(case, interleave(cases, rounds=setup.scale.rounds, seconds=0))
        for name in list(_READINGS)[1:]:
            _compare(section, case, name, at_most=_GOALS["epoch"].get(name))
    for root in roots.values():
        _clear(root)


def _compare(section: Section, case: str, name: str, *, at_most: float | None) -> None:
    """Add a line: how many times the processor time of the rows without infos."""
    ours, base = section.find(case, name), section.find(case, _WITHOUT)
    assert ours is not None
    assert base is not None
    value = statistics.median(ours.cpu) / max(statistics.median(base.cpu), 1e-12)
    section.quantity(f"{case}: {name}", _WITHOUT, value, "x", at_most=at_most)


def _record(root: Path, rows: int, *, infos: bool, seed: int = 0, episode: int = 1000) -> None:
    """Record random steps, of episodes of so many."""
    env: Any = gym.wrappers.RecordEpisodeStatistics(gym.make("HalfCheetah-v5", max_episode_steps=episode))
    env.action_space.seed(seed)
    with rlio.RecordExperience(env, root, infos=infos) as recorder:
        recorder.reset(seed=seed)
        for _ in range(rows):
            _, _, terminated, truncated, _ = recorder.step(env.action_space.sample())
            if terminated or truncated:  # A reset after the last one records nothing.
                recorder.reset()


def _clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
