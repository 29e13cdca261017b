"""A state that does not fit changes nothing: of a runner, and of the policies and counts of a worker."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import earlier_states
import fsspec
import numpy as np
import pytest
from further import some
from gymnasium.spaces import Box, Discrete
from linear_policy import even_odd

from rlio.batch import SampleBatch
from rlio.connectors.mean_std import MeanStdFilter
from rlio.distributed.group.joint import JointFilters, JointMetrics
from rlio.envs.multi_agent import make_multi_agent
from rlio.errors import RlioError, StateError
from rlio.policies.dqn import DQN
from rlio.policies.random_policy import RandomPolicy
from rlio.policies.torch_policy import TorchPolicy
from rlio.policies.weights import GlobalVars
from rlio.sampling.config import RolloutConfig
from rlio.sampling.env_runner import EnvRunner
from rlio.sampling.metrics import MetricsCollector
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


@pytest.mark.few(3)
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


@pytest.mark.few(1)
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


# ---- values of another type ----

#: What no value of a type can be exchanged for, unless it is equal.
WRONG: dict[type, tuple[Any, ...]] = {
    int: (1.5, "x", None, True, -1, []),
    float: ("x", None, True, []),
    str: (1, None, []),
    bool: (1.5, "x", None),
    list: ("x", 1.5, {}, None),
    dict: ("x", 1.5, [], None),
    np.ndarray: ("x", None, np.zeros(7, "U2")),
}


def places(state: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value in a state, with its place."""
    if at:
        yield at, state
    for key, value in (
        state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    ):
        yield from places(value, (*at, key))


def exchanged(state: Any, at: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(state)
    inner = made
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return made


def wrong_states(state: Any, *, but: Collection[str] = ()) -> Iterator[Any]:
    """The state with each value in turn exchanged; ``but``: parts of places that may hold something else."""
    for at, value in places(state):
        if any(part in f"/{'/'.join(map(str, at))}/" for part in but):
            continue
        for wrong in WRONG.get(type(value), ()):
            if not isinstance(value, np.ndarray) and not isinstance(wrong, np.ndarray) and wrong == value:
                continue
            yield exchanged(state, at, wrong)


@pytest.fixture(scope="module")
def data() -> Iterator[None]:
    """What the readers of `earlier_states` read."""
    earlier_states.put_data(Path(__file__).with_name("golden") / "states")
    yield
    fsspec.filesystem("memory").rm(earlier_states.ROOT, recursive=True)


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("name", some(2, earlier_states.READERS, start=1))
def test_a_reader_refuses_a_state_with_a_value_of_another_type(name: str) -> None:
    """`epoch: 1.5` was read as 1, and a `seed` of "x" was kept."""
    # Whole numbers or null; of either sign.
    but = [*(f"/writers/w{env}/2/" for env in range(3)), "/seed/", "/credits/", "/options/epochs/"]
    tried = 0
    with earlier_states.READERS[name]() as reader:
        for _ in range(3):
            reader.sample(5)
        state = json.loads(json.dumps(reader.state_dict()))
        for wrong in wrong_states(state, but=but):
            with pytest.raises(StateError):
                reader.load_state_dict(wrong)
            tried += 1
        for at, value in places(state):
            if at[-1] == "seed":
                for seed in (1.5, "x", [], *(() if value is None else (None,))):
                    with pytest.raises(StateError):
                        reader.load_state_dict(exchanged(state, at, seed))
        reader.load_state_dict(state)
        reader.sample(5)
    assert tried > 20


def one_policy(kind: Any, **options: Any) -> Any:
    policy = kind(**options)
    policy.bind(Box(-1.0, 1.0, (3,)), Discrete(2), seed=0)
    return policy


def learned() -> DQN:
    """A policy whose optimizer has a state."""
    policy: DQN = one_policy(DQN, hidden=(3,))
    ends, obs = np.zeros(4, bool), np.ones((4, 3), np.float32)
    columns = {"obs": obs, "new_obs": obs, "actions": np.zeros(4, np.int64), "terminateds": ends}
    policy.learn_on_batch(SampleBatch(columns, rewards=np.ones(4, np.float32), truncateds=ends))
    return policy


def filtered() -> MeanStdFilter:
    made = MeanStdFilter()
    made.bind(Box(-1.0, 1.0, (2,)))
    made(np.ones((3, 2), np.float32))
    return made


def joint_filters() -> JointFilters:
    made = JointFilters()
    made.add([{"default_policy": [filtered()]}])
    return made


#: What is no reader, with the names of the methods that give and take its state.
OTHERS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "random policy": (lambda: one_policy(RandomPolicy), "get_state", "set_state"),
    "torch policy": (lambda: one_policy(TorchPolicy, hidden=(3,)), "get_state", "set_state"),
    "DQN": (learned, "get_state", "set_state"),
    "runner": (lambda: one_agent(1), "state_dict", "load_state_dict"),
    "components of a runner": (lambda: one_agent(1), "get_state", "set_state"),
    "runner of agents": (lambda: two_agents(1), "state_dict", "load_state_dict"),
    "worker": (lambda: worker(1), "get_state", "set_state"),
    "filter": (filtered, "state_dict", "load_state_dict"),
    "metrics": (MetricsCollector, "state_dict", "load_state_dict"),
    "metrics of a group": (JointMetrics, "state_dict", "load_state_dict"),
    "global vars": (lambda: GlobalVars(3, {"a": 1}), "to_json", "from_json"),
}


#: Of an optimizer: flags that may be None, and a number.
OPTIONS = (
    "amsgrad",
    "capturable",
    "decoupled_weight_decay",
    "differentiable",
    "foreach",
    "fused",
    "maximize",
)
OPTIONS += ("weight_decay",)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_reader_refuses_a_state_with_a_value_of_another_type(name: str) -> None:
    """Text in a filter's mean became a number, and a generator without its name ended in a KeyError."""
    make, save, load = OTHERS[name]
    made = make()
    state = getattr(made, save)()
    # A spec is for policies that do not exist yet; connectors stand in a runner's state twice; torch numbers
    # parameters as it likes; None is a function that has no name, and [] trains no policy.
    but = ["/spec/", "runner/connectors/", "/params/", "/policy_mapping_fn/", "/policies_to_train/"]
    but += [f"/{name}/" for name in OPTIONS]
    for wrong in islice(wrong_states(state, but=but), 0, None, 5 if name == "worker" else 1):
        with pytest.raises(RlioError):
            getattr(made, load)(wrong)
    getattr(made, load)(state)
    for value in (None, 1.5, "x", [], [1]):
        with pytest.raises(RlioError):
            getattr(made, load)(value)
    if hasattr(made, "stop"):
        made.stop()


def test_filters_of_a_group_refuse_a_state_with_a_value_of_another_type() -> None:
    made = joint_filters()
    for wrong in (*wrong_states(made.state_dict()), None, 1.5, [1]):
        with pytest.raises(StateError):
            made.load_state_dict(wrong, {"default_policy": [filtered()]})
