"""Rows of each way to sample, from fixed seeds, and one hash for each: columns, dtypes, values and order.

``python tests/sampled_rows.py`` prints the hashes as JSON; ``--write`` puts them into
``tests/golden/sampled_rows.json``, with which `test_sampled_rows` compares.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from counter_agents import AgentCounter, map_agent
from counting_env import CountingVectorEnv
from gymnasium.spaces import Box, Dict, Discrete, Text, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import rlio
from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.batch.nested import leaves, path_text
from rlio.connectors.frame_stack import FrameStack
from rlio.connectors.mean_std import MeanStdFilter
from rlio.envs.external import ExternalEnv
from rlio.envs.multi_agent import make_multi_agent
from rlio.policies.policy import Policy
from rlio.policies.random_policy import RandomPolicy
from rlio.recording import RecordExperience, RecordVectorExperience
from rlio.sampling.config import RolloutConfig
from rlio.sampling.env_runner import EnvRunner
from rlio.sampling.external_episodes import ExternalEpisodes
from rlio.sampling.external_runner import ExternalRunner
from rlio.sampling.multi_agent_runner import MultiAgentEnvRunner

GOLDEN = Path(__file__).with_name("golden") / "sampled_rows.json"


# ---- environments and policies ----


class Walk(gym.Env[Any, Any]):
    """Episodes of lengths and observations drawn from the seed; all numbers are exact in float32."""

    observation_space: Any = Box(-99.0, 99.0, (2,), np.float32)
    action_space: Any = Discrete(4)

    def __init__(self, **options: Any) -> None:
        self._options = options

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._t, self._end = 0, int(self.np_random.integers(1, 14))
        self._truncates = bool(self.np_random.integers(2))
        return self._seen(), {"length": self._end}

    def step(self, action: Any) -> Any:
        self._t += 1
        self.last = action
        over = self._t == self._end
        return self._seen(), self._reward(action), over and not self._truncates, over and self._truncates, {
            "t": self._t
        }  # fmt: skip

    def _reward(self, action: Any) -> float:
        return self._t + 0.25 * float(np.sum(action)) - 3.0

    def _seen(self) -> Any:
        return np.array([self._t, self.np_random.integers(8) / 8], np.float32)


class Nested(Walk):
    """Observations and actions of several parts, one of which is an object."""

    observation_space = Dict({"at": Box(-99.0, 99.0, (2,), np.float32), "word": Text(3), "n": Discrete(99)})
    action_space = Tuple((Discrete(4), Box(-1.0, 1.0, (2,), np.float32)))

    def _seen(self) -> Any:
        return {"at": super()._seen(), "word": "abc"[: 1 + self._t % 3], "n": self._t}

    def _reward(self, action: Any) -> float:
        return float(action[0])


class Bounded(Walk):
    """Continuous actions within bounds."""

    action_space = Box(-2.0, 4.0, (2,), np.float32)

    def _reward(self, action: Any) -> float:
        return float(np.round(np.sum(action), 3))


class Fails(Walk):
    """Fails in some steps."""

    def step(self, action: Any) -> Any:
        if self._t == 7:
            raise RuntimeError("a planned failure")
        return super().step(action)


class Remembers(Policy):
    """Recurrent, and acts by all that it can be told."""

    input_columns: Any = ("prev_actions", "prev_rewards", "t", "eps_id", "env_id")
    max_seq_len = 4

    def initial_state(self, batch_size: int) -> Any:
        return np.full((batch_size, 2), 3.0, np.float32), np.zeros(batch_size, np.int64)

    def compute_actions(
        self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
    ) -> Any:
        sums, count = state
        first = obs["at"] if isinstance(obs, dict) else obs
        first = first.reshape(len(first), -1)[:, :2]
        # Before its first steps ended, runners gave the rewards of 4d4987e as float32, and then as float64.
        rewards = np.asarray(inputs["prev_rewards"], np.float32)
        seen = {f"saw_{name}": np.array(inputs[name]) for name in self.input_columns} | {
            "saw_prev_rewards": rewards
        }
        seen["explored"] = np.full(len(first), explore)
        told = inputs["t"] + inputs["env_id"] + inputs["eps_id"] % 5
        actions = (count + told + first[:, 0].astype(np.int64) + inputs["prev_actions"]) % 4
        return actions, (sums * 0.5 + first.astype(np.float32) + rewards[:, None], count + 1), seen

    def postprocess_trajectory(self, batch: Any, *others: Any) -> Any:
        batch["returns"] = np.cumsum(batch["rewards"][::-1])[::-1].astype(np.float32)
        return batch


class RemembersAgents(Remembers):
    input_columns = (*Remembers.input_columns, "agent_index")


class Counter(AgentCounter):
    """Takes any action."""

    def step(self, actions: Any) -> Any:
        return super().step(dict.fromkeys(actions, 0) | self._moments[self._t].actions)


class Loop(ExternalEnv):
    """One loop with a simulator of its own: some actions are its own, and some ends are not seen."""

    def __init__(self) -> None:
        super().__init__(Walk.observation_space, Walk.action_space)

    def run(self) -> None:
        env = Walk()
        for number in range(40):
            obs, _ = env.reset(seed=number)
            name = self.start_episode(f"e{number}", training_enabled=number % 7 != 3)
            over = truncated = False
            while not over:
                if env._t % 4 == 3:
                    action = 1
                    self.log_action(name, obs, action)
                else:
                    action = self.get_action(name, obs)
                obs, reward, terminated, truncated, info = env.step(int(action))
                self.log_returns(name, reward, info)
                over = terminated or truncated
            self.end_episode(name, None if number % 5 == 2 else obs, truncated=truncated)


def vector(mode: AutoresetMode, num_envs: int = 3, env: type[gym.Env[Any, Any]] = Walk) -> SyncVectorEnv:
    return SyncVectorEnv([env] * num_envs, autoreset_mode=mode)


# ---- ways to sample ----


def single(env: Any, policy: Policy | None = None, how: str = "run", **options: Any) -> Iterator[Any]:
    """Fragments of an `EnvRunner`; ``how``: "run", or keywords of ``sample``."""
    config = RolloutConfig(**{"rollout_fragment_length": 20, "num_envs": 3} | options)
    runner = EnvRunner(env, policy if policy is not None else RandomPolicy(), config=config, seed=5)
    yield from _fragments(runner, how)


def vectorised(mode: AutoresetMode, policy: Callable[[], Policy] = RandomPolicy) -> Iterator[Any]:
    """Fragments of an `EnvRunner` with environments in an autoreset mode."""
    return single(vector(mode), policy())


def counted(mode: AutoresetMode) -> Iterator[Any]:
    """Fragments of an `EnvRunner` with a native vector environment."""
    return single(CountingVectorEnv(3, mode, truncates=True))


def several(env: Any, policies: Any, mapping: Any = None, how: str = "run", **options: Any) -> Iterator[Any]:
    """Fragments of a `MultiAgentEnvRunner`."""
    config = RolloutConfig(**{"rollout_fragment_length": 20, "num_envs": 3} | options)
    runner = MultiAgentEnvRunner(env, policies, mapping, config=config, seed=5)
    yield from _fragments(runner, how)


def _fragments(runner: Any, how: str) -> Iterator[Any]:
    for number in range(3):
        if how == "run":
            yield runner.run()
        elif how == "steps":
            yield runner.sample(num_timesteps=30, explore=number != 1)
        elif how == "episodes":
            yield runner.sample(num_episodes=4)
        elif how == "random":
            yield runner.sample(num_timesteps=30, random_actions=number == 1)
        else:
            yield runner.sample(num_timesteps=30, force_reset=number == 1)
    state = json.loads(json.dumps(runner.state_dict()))
    yield {
        name: state[name] for name in ("timesteps", "unrolls", "steps_dropped", "connectors") if name in state
    }
    runner.load_state_dict(state)
    yield runner.run()
    metrics = runner.get_metrics()
    ends = sorted((round(each.total_reward, 3), each.length) for each in metrics.episodes)
    counts = metrics.counts
    numbers = (f"{name}={value}" for name, value in counts.state_dict().items() if isinstance(value, int))
    yield [f"Counts({', '.join(numbers)})", counts.policy_steps, ends]
    runner.stop()


def external(policy: Policy | None = None, how: str = "run", **options: Any) -> Iterator[Any]:
    """Fragments of an `ExternalRunner`."""
    config = RolloutConfig(**{"rollout_fragment_length": 20} | options)
    runner = ExternalRunner(Loop(), policy if policy is not None else RandomPolicy(), config=config, seed=5)
    for _ in range(4):
        yield runner.run() if how == "run" else runner.sample(num_timesteps=25)
    runner.stop()


def side_by_side(policy: Policy) -> Iterator[Any]:
    """Episodes of several loops that take turns."""
    policy.bind(Walk.observation_space, Walk.action_space, 5)
    episodes = ExternalEpisodes(policy, immediate=True, infos=True, seed=5)
    envs = [Walk() for _ in range(4)]
    seen = [env.reset(seed=i)[0] for i, env in enumerate(envs)]
    for i in range(len(envs)):
        episodes.start(f"e{i}")
    for step in range(60):
        i = step * 3 % len(envs) if step % 5 else step % len(envs)
        action = episodes.get_action(f"e{i}", seen[i])
        seen[i], reward, terminated, truncated, info = envs[i].step(int(action))
        episodes.log_returns(f"e{i}", reward, info)
        if terminated or truncated:
            episodes.end(f"e{i}", seen[i], truncated=truncated)
            seen[i] = envs[i].reset(seed=100 + step)[0]
            episodes.start(f"e{i}")
        if step % 20 == 19:
            yield episodes.take(whole=step == 39)
    episodes.abandon("e0")
    episodes.abandon("e1", keep_rows=False)
    yield episodes.take()


def recorded(env: Callable[[], gym.Env[Any, Any]], steps: int = 300) -> Iterator[Any]:
    """What `RecordExperience` writes."""
    with tempfile.TemporaryDirectory() as folder:
        wrapped = RecordExperience(env(), folder, infos=True, seeds=True, seed=5)
        wrapped.reset(seed=5)
        for step in range(steps):
            wrapped.record(action_logp=-0.5, step=np.int32(step))
            action = step * 7 % 4
            both = action, np.full(2, step % 5 / 8, np.float32)
            _, _, terminated, truncated, _ = wrapped.step(both if env is Nested else action)
            if terminated or truncated or step == 130:
                wrapped.reset(seed=step if step % 2 else None)
        wrapped.close()
        yield from _stored(folder)


def recorded_vector(mode: AutoresetMode, steps: int = 200) -> Iterator[Any]:
    """What `RecordVectorExperience` writes."""
    with tempfile.TemporaryDirectory() as folder:
        wrapped = RecordVectorExperience(vector(mode), folder, infos=True, seeds=True, seed=5)
        wrapped.reset(seed=5)
        for step in range(steps):
            wrapped.record(step=np.full(3, step))
            _, _, terminated, truncated, _ = wrapped.step((step * 7 + np.arange(3)) % 4)
            over = terminated | truncated
            if mode is AutoresetMode.DISABLED and over.any():
                wrapped.reset(seed=[step] * 3, options={"reset_mask": over})
        wrapped.close()
        # When rows are written is a matter of time, and those of one writing lie environment by environment.
        (rows,) = _stored(folder)
        yield rows[np.argsort(rows["env_id"], kind="stable")]


def stored(env: Any, policy: Policy, **options: Any) -> Iterator[Any]:
    """What a worker writes to disk."""
    with tempfile.TemporaryDirectory() as folder:
        worker = rlio.RolloutWorker(
            env, policy, output=folder, rollout=RolloutConfig(rollout_fragment_length=20, **options), seed=5
        )
        for _ in range(4):
            worker.sample()
        worker.stop()
        yield from _stored(folder)


def _stored(folder: str) -> Iterator[Any]:
    with rlio.DatasetReader(folder, epochs=1, shuffle=False) as reader:
        rows = []
        while True:
            try:
                rows.append(reader.sample())
            except rlio.EndOfData:
                break
    yield rlio.concat_samples(rows)


BOTH: Any = {"even": RandomPolicy, "odd": RemembersAgents}
WALKS = make_multi_agent(Walk)
TWO: Any = {"num_envs": 2, "env_config": {"num_agents": 3}}


def by_number(agent_id: Any, episode: Any) -> str:
    return ("even", "odd")[int(agent_id) % 2]


def made(policies: Any) -> Any:
    return {name: make() for name, make in policies.items()}


MODES = {mode.name.lower(): mode for mode in AutoresetMode}
WAYS: dict[str, Callable[[], Iterator[Any]]] = {
    **{f"single/{name}": partial(vectorised, mode) for name, mode in MODES.items()},
    **{
        f"single/{name}/recurrent": partial(vectorised, mode, Remembers)
        for name, mode in MODES.items()
    },
    **{
        f"single/{name}/native": partial(counted, mode)
        for name, mode in MODES.items()
    },
    "single/sync": lambda: single(Walk),
    "single/complete": lambda: single(Walk, Remembers(), batch_mode="complete_episodes"),
    "single/complete/next_step": lambda: single(
        vector(AutoresetMode.NEXT_STEP), batch_mode="complete_episodes"
    ),
    "single/nested": lambda: single(Nested),
    "single/nested/complete": lambda: single(Nested, batch_mode="complete_episodes", record_infos=True),
    "single/infos and seeds": lambda: single(Walk, record_infos=True, record_env_seeds=True),
    "single/filter": lambda: single(Walk, Remembers(), observation_connectors=[MeanStdFilter()]),
    "single/stack": lambda: single(Walk, Remembers(), observation_connectors=[FrameStack(3)]),
    "single/actions": lambda: single(Bounded, normalize_actions=True, clip_actions=True),
    "single/horizon": lambda: single(Walk, horizon=5, clip_rewards=True),
    "single/soft horizon": lambda: single(
        Walk, Remembers(), horizon=4, soft_horizon=True, no_done_at_end=True, clip_rewards=2.0
    ),
    "single/failures": lambda: single(
        Fails, Remembers(), restart_failed_sub_environments=True, record_env_seeds=True
    ),
    "single/async": lambda: single(Walk, vectorize_mode="async", num_envs=2),
    "single/chunks": lambda: single(Walk, Remembers(), "steps", episode_lookback_horizon=3),
    "single/episodes": lambda: single(Walk, Remembers(), "episodes"),
    "single/random": lambda: single(Walk, Remembers(), "random"),
    "single/reset": lambda: single(Walk, None, "reset"),
    "multi/random": lambda: several(WALKS, {"main": RandomPolicy()}, lambda *_: "main", **TWO),
    "multi/two": lambda: several(WALKS, made(BOTH), by_number, **TWO),
    "multi/two/complete": lambda: several(
        WALKS, made(BOTH), by_number, batch_mode="complete_episodes", record_infos=True, **TWO
    ),
    "multi/agent_steps": lambda: several(WALKS, made(BOTH), by_number, count_steps_by="agent_steps", **TWO),
    "multi/counter": lambda: several(Counter, made(BOTH), map_agent, record_env_seeds=True),
    "multi/counter/infos": lambda: several(
        partial(Counter, late=True), made(BOTH), map_agent, record_infos=True, clip_rewards=True
    ),
    "multi/counter/soft": lambda: several(
        Counter, made(BOTH), map_agent, horizon=5, soft_horizon=True, no_done_at_end=True
    ),
    "multi/counter/horizon": lambda: several(Counter, made(BOTH), map_agent, horizon=7),
    "multi/filter": lambda: several(
        Counter, made(BOTH), map_agent, observation_connectors=[MeanStdFilter(), FrameStack(2)]
    ),
    "multi/nested": lambda: several(
        make_multi_agent(Nested), {"main": RandomPolicy()}, lambda *_: "main", record_infos=True, **TWO
    ),
    "multi/actions": lambda: several(
        make_multi_agent(Bounded), {"main": RandomPolicy()}, lambda *_: "main", normalize_actions=True,
        clip_actions=True, **TWO,
    ),
    "multi/chunks": lambda: several(
        Counter, made(BOTH), map_agent, "steps", episode_lookback_horizon=3
    ),
    "multi/episodes": lambda: several(Counter, made(BOTH), map_agent, "episodes"),
    "multi/at random": lambda: several(Counter, made(BOTH), map_agent, "random"),
    "multi/failures": lambda: several(
        make_multi_agent(Fails), made(BOTH), by_number, restart_failed_sub_environments=True, **TWO
    ),
    "external/run": external,
    "external/infos": lambda: external(record_infos=True, explore=False),
    "external/recurrent": lambda: external(Remembers()),
    "external/complete": lambda: external(Remembers(), batch_mode="complete_episodes"),
    "external/chunks": lambda: external(Remembers(), "chunks"),
    "external/side by side": lambda: side_by_side(RandomPolicy()),
    "external/side by side/recurrent": lambda: side_by_side(Remembers()),
    "record/env": lambda: recorded(Walk),
    "record/env/nested": lambda: recorded(Nested),
    **{f"record/{name}": partial(recorded_vector, mode) for name, mode in MODES.items()},
    "stored/single": lambda: stored(Walk, RandomPolicy(), num_envs=3),
    "stored/recurrent": lambda: stored(Walk, Remembers(), num_envs=2),
}  # fmt: skip


# ---- hashes ----


def described(value: Any) -> Any:
    """``value`` as JSON: rows with columns, dtypes, values and their order."""
    if isinstance(value, MultiAgentBatch):
        return [
            "agents",
            value.env_steps(),
            [[name, described(rows)] for name, rows in sorted(value.items())],
        ]
    if isinstance(value, SampleBatch):
        columns = [
            [name, path_text(path), described(array)]
            for name in sorted(value)
            for path, array in leaves(value[name])
        ]
        return ["rows", len(value), columns]
    if isinstance(value, np.ndarray):
        # Logarithms differ between builds of NumPy in the last bit.
        exact = np.round(value.astype(np.float64), 4) + 0.0 if value.dtype.kind == "f" else value
        return [str(value.dtype), value.shape, [str(each) for each in exact.ravel().tolist()]]
    if isinstance(value, list):
        return [described(each) for each in value]
    if isinstance(value, dict):
        return [[str(name), described(each)] for name, each in sorted(value.items(), key=str)]
    if hasattr(value, "to_batch"):
        lookback = None if value.lookback is None else described(value.lookback.to_batch())
        return [type(value).__name__, described(value.to_batch()), lookback]
    return str(round(value, 4) if isinstance(value, float) else value)


def digest(way: str) -> str:
    """The hash of the rows of a way to sample."""
    text = json.dumps([described(each) for each in WAYS[way]()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    found = {way: digest(way) for way in WAYS}
    if "--write" in sys.argv:
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    else:
        json.dump(found, sys.stdout, indent=1)
