"""Small problems whose values are known exactly, for the tests of off-policy evaluation.

States and actions are numbered. Episodes begin in state 0 and end in the state after the last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.evaluation.target import Target
from rlio.evaluation.weighting import WeightedSteps
from rlio.support.forks import cached_property

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Problem:
    """Transitions (S, A, S + 1), the last being the end; mean rewards (S, A); and two policies, (S, A)."""

    transitions: Floats
    rewards: Floats
    behavior: Floats
    judged: Floats
    gamma: float
    noise: float = 0.5

    def action_values(self, policy: Floats) -> Floats:
        """Q of ``policy``, (S, A), by linear solve."""
        states, actions = self.rewards.shape
        # From (s, a) to (s', a').
        step = (self.transitions[:, :, :states, None] * policy).reshape(states * actions, -1)
        solved = np.linalg.solve(np.eye(states * actions) - self.gamma * step, self.rewards.ravel())
        return np.asarray(solved).reshape(states, actions)

    def value(self, policy: Floats) -> float:
        return float((self.action_values(policy) * policy).sum(-1)[0])

    @property
    def truth(self) -> float:
        """What the judged policy earns from state 0."""
        return self.value(self.judged)

    def further(self, strength: float) -> Problem:
        """The same with a judged policy that is ``strength`` times as far from the one that acts, in logs."""
        judged = self.behavior ** (1.0 - strength) * self.judged**strength
        return replace(self, judged=judged / judged.sum(-1, keepdims=True))

    def log_probabilities(self, obs: Any, actions: Any) -> Floats:
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.judged[obs, actions]))

    @cached_property
    def target(self) -> Target:
        states, actions = self.rewards.shape
        return Target(
            self.log_probabilities, observation_space=Discrete(states + 1), action_space=Discrete(actions)
        )

    def simulate(self, episodes: int, seed: int) -> SampleBatch:
        """Whole episodes of the behaviour policy, one after the other; all run side by side."""
        rng = np.random.default_rng(seed)
        states = len(self.rewards)
        state, running = np.zeros(episodes, np.int64), np.arange(episodes)
        columns: dict[str, list[Any]] = {}
        for t in range(10_000):
            if not len(running):
                break
            here = state[running]
            action = _drawn(self.behavior[here], rng)
            after = _drawn(self.transitions[here, action], rng)
            found = {
                "obs": here,
                "actions": action,
                "rewards": self.rewards[here, action] + self.noise * rng.standard_normal(len(here)),
                "new_obs": after,
                "action_prob": self.behavior[here, action],
                "terminateds": after == states,
                "eps_id": running,
                "t": np.full(len(here), t),
            }
            for name, values in found.items():
                columns.setdefault(name, []).append(values)
            state[running] = after
            running = running[after != states]
        rows = {name: np.concatenate(parts) for name, parts in columns.items()}
        order = np.lexsort((rows["t"], rows["eps_id"]))
        return SampleBatch({name: values[order] for name, values in rows.items()})

    def steps(self, batch: SampleBatch, *, values: Floats | None = None) -> WeightedSteps:
        """The steps of `simulate`, with a model's action values (S, A) if there is one."""
        obs, actions = batch["obs"], batch["actions"]
        ratios = self.log_probabilities(obs, actions) - np.log(batch["action_prob"])
        lengths = np.bincount(batch["eps_id"])
        if values is None:
            return WeightedSteps(ratios, batch["rewards"], lengths, self.gamma)
        found = (values * self.judged).sum(-1)[obs], values[obs, actions], np.zeros(len(lengths))
        return WeightedSteps(ratios, batch["rewards"], lengths, self.gamma, *found)


def _drawn(probabilities: Floats, rng: np.random.Generator) -> NDArray[np.int64]:
    """A choice for each row of probabilities."""
    draws = rng.random(len(probabilities))[:, None]
    return np.minimum((probabilities.cumsum(-1) <= draws).sum(-1), probabilities.shape[-1] - 1)


def bandit() -> Problem:
    """One state, three actions, one step; returns may be negative."""
    return Problem(
        transitions=np.concatenate([np.zeros((1, 3, 1)), np.ones((1, 3, 1))], axis=-1),
        rewards=np.array([[-2.0, 1.0, 3.0]]),
        behavior=np.array([[0.5, 0.3, 0.2]]),
        judged=np.array([[0.2, 0.2, 0.6]]),
        gamma=1.0,
    )


def chain() -> Problem:
    """Two states: one action stays, the other goes on; episodes end by chance, and rewards are below 0."""
    return Problem(
        transitions=np.array([[[0.6, 0.2, 0.2], [0.1, 0.6, 0.3]], [[0.3, 0.3, 0.4], [0.1, 0.2, 0.7]]]),
        rewards=np.array([[-1.0, -3.0], [-2.0, -0.5]]),
        behavior=np.array([[0.5, 0.5], [0.6, 0.4]]),
        judged=np.array([[0.35, 0.65], [0.45, 0.55]]),
        gamma=0.9,
    )


def gridworld(size: int = 3) -> Problem:
    """A square of ``size``: -0.1 a step, 1 on reaching the far corner; one step in five goes anywhere."""
    cells = size * size
    transitions = np.zeros((cells, 4, cells + 1))
    rewards = np.full((cells, 4), -0.1)
    for cell in range(cells):
        row, column = divmod(cell, size)
        moved = [
            min(max(row + down, 0), size - 1) * size + min(max(column + right, 0), size - 1)
            for down, right in ((1, 0), (0, 1), (-1, 0), (0, -1))
        ]
        for action in range(4):
            for reached, chance in [(moved[action], 0.8), *((other, 0.05) for other in moved)]:
                goal = reached == cells - 1
                transitions[cell, action, cells if goal else reached] += chance
                rewards[cell, action] += chance * goal
    behavior = np.tile([0.35, 0.35, 0.15, 0.15], (cells, 1))
    judged = np.tile([0.42, 0.38, 0.1, 0.1], (cells, 1))
    return Problem(transitions, rewards, behavior, judged, gamma=0.95, noise=0.1)


def survivor() -> Problem:
    """As CartPole: each step earns 1 and may be the last, less often with one action; about 33 steps."""
    return Problem(
        transitions=np.array([[[0.99, 0.01], [0.95, 0.05]]]),
        rewards=np.ones((1, 2)),
        behavior=np.array([[0.5, 0.5]]),
        judged=np.array([[0.7, 0.3]]),
        gamma=1.0,
        noise=0.0,
    )


PROBLEMS = {"bandit": bandit(), "chain": chain(), "gridworld": gridworld()}


def judged_in_the_chain(obs: Any, actions: Any) -> Floats:
    """The chain's judged policy, as a command names it."""
    return PROBLEMS["chain"].log_probabilities(obs, actions)
