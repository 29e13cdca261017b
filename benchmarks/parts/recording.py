"""What recording adds to a step of your own loop, and whether that stays so over very many episodes."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np

import rlio
from benchmarks import peers
from benchmarks.results import Section
from benchmarks.scales import Setup
from benchmarks.timing import Case, interleave

__all__ = ["run"]

Env: TypeAlias = "gym.Env[Any, Any]"
#: Puts a recorder around an environment; what it writes goes into the named folder.
_Wrap: TypeAlias = Callable[[Env, str], Env]

# Steps of CartPole in a timed call, and episodes of two steps in a timed piece of a long recording.
_STEPS = 500
_PIECE = 100


def run(setup: Setup) -> Section:
    """Recorders around CartPole-v1 beside CartPole-v1, then around episodes of two steps, many of them."""
    scale = setup.scale
    section = Section(
        "recording", f"Recording a loop of one's own: CartPole-v1, and {scale.episodes:,} episodes"
    )
    makers = _makers(setup)
    recorders = peers.gathered(
        {name: partial(_cart_pole, make) for name, make in makers.items()},
        section.absent,
    )
    loops = {"no recorder": _Loop(gym.make("CartPole-v1"))} | {
        name: _Loop(env) for name, env in recorders.items()
    }
    cases = [Case(name, loop.run, _STEPS) for name, loop in loops.items()]
    section.add_taken("steps", interleave(cases, rounds=scale.rounds, seconds=scale.seconds))
    for loop in loops.values():
        _close(loop.env)
    for name in makers:
        _overhead(section, name, at_most=10 if name == "rlio" else None)
    for name in recorders:
        _follow(section, name, makers[name], scale.episodes if name == "rlio" else scale.episodes // 100)
    if "rlio" not in recorders:
        section.quantity(
            "recorder's overhead, rlio",
            f"after {scale.episodes:,} episodes / after 100",
            None,
            "x",
            at_most=1.25,
            why=section.absent["rlio"],
        )
    return section


def _cart_pole(make: _Wrap) -> Env:
    return make(gym.make("CartPole-v1"), "cartpole")


def _makers(setup: Setup) -> dict[str, _Wrap]:
    """Name -> what wraps an environment in a recorder."""

    def ours(env: Env, folder: str) -> Env:
        wrapper = getattr(rlio, "RecordExperience", None)
        if wrapper is None:
            raise peers.Absent(f"rlio {rlio.__version__} has no RecordExperience yet")
        wrapped: Env = wrapper(env, rlio.ParquetWriter(setup.scratch / f"recorded-{folder}"))
        return wrapped

    return {"rlio": ours, "Minari": lambda env, folder: _minari(env, setup.scratch / f"minari-{folder}")}


def _minari(env: Env, folder: Path) -> Env:
    os.environ["MINARI_DATASETS_PATH"] = str(folder)
    try:
        import jax.tree_util  # noqa: F401  # What its buffers need and only ask for at the first step.
        import minari

        collector: Env = minari.DataCollector(env)
    except ImportError as error:
        raise peers.not_installed(error) from error
    return collector


class _Loop:
    """Random actions, drawn beforehand."""

    def __init__(self, env: Env) -> None:
        self.env = env
        self._actions: Iterator[Any] = itertools.cycle(np.random.default_rng(0).integers(0, 2, 4096))
        env.reset(seed=0)

    def run(self) -> None:
        env, actions = self.env, self._actions
        for _ in range(_STEPS):
            _, _, terminated, truncated, _ = env.step(next(actions))
            if terminated or truncated:
                env.reset()


class _TwoSteps(gym.Env[Any, Any]):
    """Episodes of two steps that cost nothing."""

    observation_space = gym.spaces.Box(0, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self._t = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        return np.zeros(4, np.float32), 1.0, self._t == 2, False, {}


def _overhead(section: Section, name: str, *, at_most: float | None) -> None:
    """The line of microseconds that a recorder adds to a step."""
    bare, recorded = section.find("steps", "no recorder"), section.find("steps", name)
    value = None
    if bare is not None and recorded is not None:
        value = 1e6 * float(np.median(np.subtract(recorded.values, bare.values)))
    section.quantity(
        f"recorder's overhead, {name}",
        "us a step",
        value,
        "us",
        at_most=at_most,
        why=section.absent.get(name, ""),
    )


def _follow(section: Section, name: str, make: _Wrap, episodes: int) -> None:
    """What a step costs after ever more episodes in one recording."""
    env = make(_TwoSteps(), "episodes")
    done, at = 0, 100
    while at <= max(episodes, 100):
        while done < at - _PIECE:
            _episode(env)
            done += 1
        pieces = []
        for _ in range(5):
            begun = time.perf_counter()
            for _ in range(_PIECE // 5):
                _episode(env)
            pieces.append((time.perf_counter() - begun) / (_PIECE // 5 * 2))
        done += _PIECE
        section.add("episodes", name, pieces, at=at)
        at *= 10
    _close(env)
    grown = [figure.median for figure in section.figures if (figure.case, figure.name) == ("episodes", name)]
    section.quantity(
        f"recorder's overhead, {name}",
        f"after {at // 10:,} episodes / after 100",
        grown[-1] / grown[0],
        "x",
        at_most=1.25 if name == "rlio" else None,
    )


def _close(env: Env) -> None:
    env.close()
    # Minari's close() removes its folder without telling the object that stands for it, which would warn.
    folder = getattr(env, "_tmp_dir", None)
    if isinstance(folder, tempfile.TemporaryDirectory):
        folder.cleanup()


def _episode(env: Env) -> None:
    env.reset()
    env.step(0)
    env.step(0)
