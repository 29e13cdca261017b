"""A state that does not fit changes nothing: of a runner, and of the policies and counts of a worker."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from linear_policy import even_odd

from rlio.batch import SampleBatch
from rlio.connectors.mean_std import MeanStdFilter
from rlio.envs.multi_agent import make_multi_agent
from rlio.errors import RlioError, StateError
from rlio.policies.torch_policy import TorchPolicy
from rlio.sampling.config import RolloutConfig
from rlio.sampling.env_runner import EnvRunner
from rlio.sampling.multi_agent_runner import MultiAgentEnvRunner
from rlio.sampling.policy_setup import PolicySetup
from rlio.worker import RolloutWorker

CONFIG = RolloutConfig(rollout_fragment_length=20, observation_connectors=[MeanStdFilter()])


def one_agent(seed: int) -> EnvRunner:
    runner = EnvRunner("CartPole-v1", TorchPolicy(hidden=[4]), config=CONFIG, seed=seed)
    runner.run()
    return runner


def two_agents(seed: int) -> MultiAgentEnvRunner:
    policies = {name: TorchPolicy(hidden=[4]) for name in ("even", "odd")}
    make = make_multi_agent("CartPole-v1")
    runner = MultiAgentEnvRunner(lambda: make(num_agents=2), policies, even_odd, config=CONFIG, seed=seed)
    runner.run()
    return runner


def worker(seed: int) -> RolloutWorker:
    policies = {name: TorchPolicy(hidden=[4]) for name in ("even", "odd")}
    make = make_multi_agent("CartPole-v1")
    made = RolloutWorker(
        lambda: make(num_agents=2),
        policies,
        policy_setup=PolicySetup(policy_mapping_fn=even_odd),
        rollout=CONFIG,
        seed=seed,
    )
    made.sample()
    return made


def broken(state: dict[str, Any], path: str) -> dict[str, Any]:
    """``state`` with what no reader can take at ``path``."""
    made = copy.deepcopy(state)
    *way, last = path.split("/")
    at = made
    for name in way:
        at = at[name]
    at[last] = {"no": "such thing"} if isinstance(at[last], dict) else "nothing"
    return made


ONE = ["policy/generator", "policy/optimizer", "policy/weights", "observation_connectors/0"]
ONE += ["runner/timesteps", "metrics/episodes"]
TWO = ["policies/odd/generator", "policies/odd/weights", "connectors/odd/observation/0", "runner/timesteps"]
TWO += ["metrics/episodes"]
ALL = ["policies/odd/state/generator", "policies/odd/state/weights", "policy_mapping_fn"]
ALL += ["global_vars/timestep", "position/reader", "metrics/episodes"]


@pytest.mark.parametrize(
    ("make", "path"),
    [
        *((one_agent, path) for path in ONE),
        *((two_agents, path) for path in TWO),
        *((worker, path) for path in ALL),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_state_that_does_not_fit_changes_nothing(make: Any, path: str) -> None:
    """Half of it was applied: what came before the part that did not fit."""
    ours, other = make(1), make(2)
    before, state = ours.get_state(), other.get_state()
    kept = held(ours)
    with pytest.raises(RlioError):
        ours.set_state(broken(state, path))
    assert held(ours) == kept
    if isinstance(ours, RolloutWorker):  # Where its readers stand is not known any more.
        with pytest.raises(StateError):
            ours.get_state()
    else:
        assert flat(ours.get_state()) == flat(before)
    ours.set_state(state)
    assert flat(ours.get_state()) != flat(before)
    ours.stop()
    other.stop()


@pytest.mark.parametrize("make", [one_agent, two_agents])
def test_rows_after_the_save_and_rows_after_the_restore_share_no_unroll_id(make: Any) -> None:
    """A run that crashes after its last save goes on from there: both kinds of rows are in its data set."""
    ours, restored = make(1), make(1)
    state = ours.state_dict()
    after_the_save = unrolls(ours.run())
    restored.load_state_dict(state)
    assert after_the_save.isdisjoint(unrolls(restored.run()))
    ours.stop()
    restored.stop()


def unrolls(batch: Any) -> set[int]:
    parts = [batch] if isinstance(batch, SampleBatch) else list(batch.values())
    return {number for part in parts for number in part["unroll_id"].tolist()}


def held(of: Any) -> dict[str, Any]:
    """The state of what does not move: policies, filters and counts."""
    if isinstance(of, RolloutWorker):
        runner = of.runner
        assert isinstance(runner, MultiAgentEnvRunner)
        return flat(of.group.get_state()) | flat(runner.get_state())
    return flat(of.get_state())


def flat(state: Any, at: str = "") -> dict[str, Any]:
    """What a state holds, by its place."""
    if isinstance(state, dict):
        return {key: value for name in state for key, value in flat(state[name], f"{at}/{name}").items()}
    return {at: state.tolist() if isinstance(state, np.ndarray) else state}
