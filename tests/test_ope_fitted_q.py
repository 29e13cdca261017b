"""Fitted Q evaluation on 20 seeds of problems whose values are known exactly: its error is the one stated."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from further import further
from gymnasium.spaces import Box
from tabular_problems import PROBLEMS

from rlio.batch import SampleBatch
from rlio.evaluation import FittedQ, IntervalOptions, Target, evaluate_offline

SEEDS = [2, *further(5, 20)]
QUICK = IntervalOptions(resamples=100)  # They are not looked at here.


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small networks are slower with threads, and much slower where other processes are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["chain", *further(*(name for name in PROBLEMS if name != "chain"))])
@pytest.mark.parametrize("seeds", SEEDS)
def test_discrete_actions_within_a_tenth_of_what_returns_vary_by(name: str, seeds: int) -> None:
    """Rows DM, DR and FQETorchModel of 2.7: of each seed; and on average within a third of that."""
    problem, errors = PROBLEMS[name], []
    for seed in range(seeds):
        batch = problem.simulate(800, seed=seed)
        found = evaluate_offline(
            batch,
            problem.target,
            gamma=problem.gamma,
            estimators=["dm", "dr", "wdr"],
            folds=2 if seed == 0 else 1,
            bandit=name == "bandit",
            intervals=QUICK,
            q_model=FittedQ(hidden=(), iterations=150, batch_size=512, learning_rate=0.2, tau=0.3, seed=seed),
        )
        spread = problem.steps(batch).returns.std()
        errors.append([(found[kind].v_target.value - problem.truth) / spread for kind in ("dm", "dr", "wdr")])
        assert np.abs(errors[-1]).max() < 0.1, (seed, errors[-1])
        assert found["dm"].overlap is None
    assert np.abs(np.mean(errors, axis=0)).max() < 0.033


class Regulator:
    """A number goes to 0.6 of itself, plus half the action, plus noise; both cost their squares.

    The acting policy is N(0, 0.5), the judged one N(-0.6 s, 0.3). Episodes are cut after five steps, and
    begin at N(1, 0.3): what the judged policy earns from there on for ever has a closed form.
    """

    gain, judged, acting, noise, gamma = -0.6, 0.3, 0.5, 0.1, 0.8

    @property
    def truth(self) -> float:
        """V(s) = -(p s^2 + c)."""
        closed = 0.6 + 0.5 * self.gain
        p = (1 + 0.5 * self.gain**2) / (1 - self.gamma * closed**2)
        variance = (0.5 * self.judged) ** 2 + self.noise**2
        c = (0.5 * self.judged**2 + self.gamma * p * variance) / (1 - self.gamma)
        return -(p * (1 + 0.3**2) + c)

    def simulate(self, episodes: int, seed: int, steps: int = 5) -> SampleBatch:
        rng = np.random.default_rng(seed)
        actions = rng.normal(0.0, self.acting, (episodes, steps))
        states = np.empty((episodes, steps + 1))
        states[:, 0] = rng.normal(1.0, 0.3, episodes)
        for t in range(steps):
            states[:, t + 1] = (
                0.6 * states[:, t] + 0.5 * actions[:, t] + rng.normal(0.0, self.noise, episodes)
            )
        rows = episodes * steps
        return SampleBatch(
            obs=states[:, :-1].reshape(rows, 1).astype(np.float32),
            new_obs=states[:, 1:].reshape(rows, 1).astype(np.float32),
            actions=actions.reshape(rows, 1).astype(np.float32),
            rewards=-(states[:, :-1] ** 2 + 0.5 * actions**2).ravel(),
            terminateds=np.zeros(rows, bool),
            truncateds=np.tile(np.arange(steps) == steps - 1, episodes),
            eps_id=np.repeat(np.arange(episodes), steps),
            t=np.tile(np.arange(steps), episodes),
        )

    @property
    def target(self) -> Target:
        numbers = Box(-np.inf, np.inf, (1,))
        return Target(
            lambda obs, a: -0.5 * ((a[:, 0] - self.gain * obs[:, 0]) / self.judged) ** 2,
            observation_space=numbers,
            action_space=numbers,
            draw=lambda obs, rng: (self.gain * obs + rng.normal(0, self.judged, obs.shape)).astype(
                np.float32
            ),
        )


@pytest.mark.further
@pytest.mark.parametrize("seeds", SEEDS)
def test_continuous_actions_within_a_tenth_of_the_value(seeds: int) -> None:
    """What RLlib's model cannot do: of each seed; and on average within 4 %."""
    problem, found = Regulator(), []
    for seed in range(seeds):
        fit = FittedQ(hidden=(64,), iterations=300, learning_rate=0.03, tau=0.2, action_samples=4, seed=seed)
        estimates = evaluate_offline(
            problem.simulate(400, seed),
            problem.target,
            gamma=0.8,
            estimators=["dm"],
            folds=1,
            q_model=fit,
            intervals=QUICK,
        )
        found.append(estimates["dm"].v_target.value)
    # As recorded, for five steps, it earned a quarter less than the judged policy does for ever.
    assert estimates["dm"].v_behavior.value < 1.2 * problem.truth
    np.testing.assert_allclose(found, problem.truth, rtol=0.1)
    assert np.mean(found) == pytest.approx(problem.truth, rel=0.04)
