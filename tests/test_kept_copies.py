"""Law: what is stored is what was given or chosen at that step, whatever the environment does to it later.

One adversarial world, in each interface: it returns the same arrays, dicts and lists at every step, changes
everything that it returned before, and changes the actions that it gets. Its observations say where they
belong, so every stored value can be computed from the row's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Graph, GraphInstance, Sequence, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from pettingzoo import AECEnv, ParallelEnv

import rlio
from rlio.envs.multi_agent import MultiAgentEnv
from rlio.policies.policy import Policy
from rlio.recording.batch_builder import BatchBuilder
from rlio.writer import OutputWriter

LENGTH = 3
OBS = Dict(
    at=Box(-1e6, 1e6, (3,), np.float32),
    more=Tuple((Box(-1e6, 1e6, (1,), np.float64), Discrete(1000))),
    graph=Graph(Box(-1e6, 1e6, (1,), np.float32), None),
    seen=Sequence(Box(-1e6, 1e6, (2,), np.float32)),
)
ACTION = Box(-1e6, 1e6, (2,), np.float32)
SPOILT = -77.0


class World:
    """One agent's values, always in the same objects, or in two sets of objects that episodes use by turns.

    ``number`` says whose they are.
    """

    # Of the class: all worlds share them.
    info: dict[str, Any] = {}  # noqa: RUF012 - that is the point

    def __init__(self, number: int = 0, *, sets: int = 1) -> None:
        self.number, self.episode, self.t = number, -1, 0
        self.sets = [self.make() for _ in range(sets)]
        self.use(0)

    def make(self) -> tuple[Any, ...]:
        return np.zeros(3, np.float32), np.zeros(1), np.zeros((2, 1), np.float32), np.zeros(2, np.float32), {}

    def use(self, number: int) -> None:
        self.at, self.pair, self.nodes, self.seen, self.obs = self.sets[number]
        self.reward = np.zeros((), np.float64)
        self.obs |= {"at": self.at, "more": (self.pair, 0), "seen": (self.seen,)}

    def begin(self) -> tuple[Any, dict[str, Any]]:
        self.use((self.episode + 1) % len(self.sets))
        self.spoil()
        self.episode, self.t = self.episode + 1, 0
        return self.look(), self.tell()

    def move(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.spoil()
        self.t += 1
        self.reward[...] = 10 * self.episode + self.t
        action[:] = SPOILT
        return self.look(), self.reward, self.t == LENGTH and self.episode % 2 == 0, (
            self.t == LENGTH and self.episode % 2 == 1
        ), self.tell()  # fmt: skip

    def look(self) -> Any:
        self.at[:] = self.number, self.episode, self.t
        self.pair[:] = self.t
        self.nodes[:] = self.t
        self.seen[:] = self.episode, self.t
        self.obs["more"] = (self.pair, self.t)
        self.obs["graph"] = GraphInstance(self.nodes, None, None)
        return self.obs

    def tell(self) -> dict[str, Any]:
        self.info["at"] = self.at
        self.info["deep"] = {"list": [self.pair, {"t": self.t}], "nodes": self.nodes}
        return self.info

    def spoil(self) -> None:
        for array in (self.at, self.pair, self.nodes, self.seen, self.reward):
            array[...] = SPOILT
        if "deep" in self.info:
            self.info["deep"]["list"].clear()
            self.info["deep"].clear()
        self.info["at"] = "spoilt"


def action_of(place: Any) -> np.ndarray:
    """The action of a row, from its ``at``: (N, 3) -> (N, 2)."""
    place = np.asarray(place, np.float32).reshape(-1, 3)
    return np.stack([place[:, 1], place[:, 0] + place[:, 2]], 1)


class Chooses(Policy):
    """Chooses `action_of`, in an array that it reuses."""

    kept: np.ndarray | None = None

    def compute_actions(
        self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
    ) -> Any:
        chosen = action_of(obs["at"])
        if self.kept is None or self.kept.shape != chosen.shape:
            self.kept = chosen
        self.kept[:] = chosen
        return self.kept, state, {}


class Kept(OutputWriter):
    """Keeps copies of batches, made at once."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[rlio.SampleBatch] = []

    def _write(self, batch: Any) -> None:
        for part in batch.policy_batches.values() if isinstance(batch, rlio.MultiAgentBatch) else [batch]:
            self.batches.append(part.copy())


def check(batches: list[rlio.SampleBatch], *, rows: int, infos: bool = True) -> None:
    found = 0
    for batch in batches:
        for row in batch.rows():
            number, episode, t = row["obs"]["at"].tolist()
            assert [number >= 0, episode >= 0, 0 <= t < LENGTH] == [True] * 3, row["obs"]["at"]
            after = t + 1
            np.testing.assert_array_equal(row["new_obs"]["at"], [number, episode, after])
            for name, now in (("obs", t), ("new_obs", after)):
                seen = row[name]
                assert [seen["more"][0].item(), int(seen["more"][1])] == [now, now]
                assert isinstance(seen["graph"], GraphInstance), type(seen["graph"])
                np.testing.assert_array_equal(seen["graph"].nodes, [[now], [now]])
                np.testing.assert_array_equal(seen["seen"][0], [episode, now])
            np.testing.assert_array_equal(row["actions"], action_of([[number, episode, t]])[0])
            assert row["rewards"] == 10 * episode + after
            assert row["terminateds"] == (after == LENGTH and episode % 2 == 0)
            assert row["truncateds"] == (after == LENGTH and episode % 2 == 1)
            if infos:
                info = row["infos"]
                np.testing.assert_array_equal(info["at"], [number, episode, after])
                deep = info["deep"]
                assert [deep["list"][0].item(), deep["list"][1]["t"]] == [after, after]
                np.testing.assert_array_equal(deep["nodes"], [[after], [after]])
            found += 1
    assert found >= rows


# ---- interfaces ----


class Env(gym.Env[Any, Any]):
    observation_space, action_space = OBS, ACTION

    def __init__(self, number: int = 0, sets: int = 1) -> None:
        self.world = World(number, sets=sets)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.world.begin()

    def step(self, action: Any) -> Any:
        return self.world.move(action)


class Vector(VectorEnv[Any, Any, Any]):
    """N worlds in batches that it reuses, in any autoreset mode."""

    def __init__(self, mode: AutoresetMode, num_envs: int = 2) -> None:
        self.num_envs, self.mode = num_envs, mode
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space, self.single_action_space = OBS, ACTION
        self.observation_space = batch_space(OBS, num_envs)
        self.action_space = batch_space(ACTION, num_envs)
        self.worlds = [World(number) for number in range(num_envs)]
        self.at = np.zeros((num_envs, 3), np.float32)
        self.pair, self.count = np.zeros((num_envs, 1)), np.zeros(num_envs, np.int64)
        self.rewards = np.zeros(num_envs)
        self.flags = np.zeros((2, num_envs), bool)
        self.final = np.full(num_envs, None, object)
        self.ended = np.zeros(num_envs, bool)
        self.infos: dict[str, Any] = {}

    def _look(self) -> Any:
        seen = [world.look() for world in self.worlds]
        self.at[:] = [obs["at"] for obs in seen]
        self.pair[:] = [obs["more"][0] for obs in seen]
        self.count[:] = [obs["more"][1] for obs in seen]
        graphs, pasts = tuple(obs["graph"] for obs in seen), tuple(obs["seen"] for obs in seen)
        return {"at": self.at, "more": (self.pair, self.count), "graph": graphs, "seen": pasts}

    def _tell(self) -> dict[str, Any]:
        everywhere = np.ones(self.num_envs, bool)
        objects = np.full(self.num_envs, None, object)
        for number, world in enumerate(self.worlds):
            objects[number] = [world.pair, {"t": world.t}]
        nodes = np.stack([world.nodes for world in self.worlds])
        deep = {"list": objects, "_list": everywhere, "nodes": nodes, "_nodes": everywhere}
        self.infos.clear()
        self.infos.update(at=self.at, _at=everywhere, deep=deep, _deep=everywhere)
        return self.infos

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        for world in np.array(self.worlds, object)[mask]:
            world.begin()
        self.ended[mask] = False
        obs = self._look()
        self.rewards[:], self.flags[:], mask[:] = SPOILT, True, False
        return obs, self._tell()

    def step(self, actions: Any) -> Any:
        resets = self.ended.copy() if self.mode is AutoresetMode.NEXT_STEP else np.zeros(self.num_envs, bool)
        for number, world in enumerate(self.worlds):
            if resets[number]:
                world.begin()
                self.rewards[number], self.flags[:, number] = 0.0, False
            else:
                _, reward, *flags, _ = world.move(actions[number])
                self.rewards[number], self.flags[:, number] = reward, flags
        actions[:] = SPOILT
        self.ended = self.flags.any(0)
        if self.mode is not AutoresetMode.SAME_STEP or not self.ended.any():
            return self._look(), self.rewards, *self.flags, self._tell()
        finals = {}
        for number in np.flatnonzero(self.ended).tolist():
            # Kept until the next end of an episode, which overwrites them.
            self.final[number] = world_copy(self.worlds[number])
            finals[number] = self.final[number]
        final_infos = dict(self._tell())
        final_infos["at"] = np.array([world.at for world in self.worlds])
        final_infos["deep"] = {
            "list": np.array([None] * self.num_envs, object),
            "nodes": final_infos["deep"]["nodes"].copy(),
        }
        for number, world in enumerate(self.worlds):
            final_infos["deep"]["list"][number] = [world.pair.copy(), {"t": world.t}]
        for number in finals:
            self.worlds[number].begin()
        obs = self._look()
        infos = self._tell()
        infos["final_obs"], infos["_final_obs"] = self.final, self.ended
        infos["final_info"], infos["_final_info"] = final_infos, self.ended
        return obs, self.rewards, *self.flags, infos


_FINALS: dict[int, Any] = {}


def world_copy(world: World) -> Any:
    """The observation of a world, in objects that the world's next final observation reuses."""
    kept = _FINALS.setdefault(id(world), World(world.number))
    kept.episode, kept.t = world.episode, world.t
    return kept.look()


def recorded() -> Iterator[rlio.SampleBatch]:
    writer = Kept()
    with rlio.RecordExperience(Env(), writer, infos=True) as env:
        for _ in range(4):
            obs, _ = env.reset()
            ended = False
            while not ended:
                obs, _, terminated, truncated, _ = env.step(action_of(obs["at"])[0])
                ended = terminated or truncated
    yield from writer.batches


def recorded_vector(make: Callable[[], Any], *, infos: bool = True) -> Iterator[rlio.SampleBatch]:
    writer, envs = Kept(), make()
    with rlio.RecordVectorExperience(envs, writer, infos=infos) as recorder:
        obs, _ = recorder.reset()
        for _ in range(14):
            obs, _, terminations, truncations, _ = recorder.step(action_of(obs["at"]))
            ended = terminations | truncations
            if ended.any() and recorder._stepper.is_reset_by_caller:
                obs, _ = recorder.reset(options={"reset_mask": ended.copy()})
    yield from writer.batches


def sync(mode: AutoresetMode) -> SyncVectorEnv:
    # With SAME_STEP, gymnasium resets an environment before anybody can copy its final observation.
    sets = 2 if mode is AutoresetMode.SAME_STEP else 1
    makers = [partial(Env, number, sets) for number in range(2)]
    return SyncVectorEnv(makers, copy=False, autoreset_mode=mode)


def sampled(env: Any, **config: Any) -> Iterator[rlio.SampleBatch]:
    options = rlio.RolloutConfig(rollout_fragment_length=7, record_infos=True, **config)
    runner = rlio.EnvRunner(env, Chooses(), config=options, seed=0)
    for _ in range(3):
        yield runner.run()
    runner.stop()


class Agents(MultiAgentEnv):
    """Three agents, which act all at once. All environments share their infos."""

    told: dict[str, Any] = {agent: {} for agent in "abc"}  # noqa: RUF012 - that is the point

    def __init__(self) -> None:
        self.possible_agents = ["a", "b", "c"]
        self.observation_spaces = dict.fromkeys(self.possible_agents, OBS)
        self.action_spaces = dict.fromkeys(self.possible_agents, ACTION)
        self.worlds = {agent: World(number) for number, agent in enumerate(self.possible_agents)}
        for agent, world in self.worlds.items():
            world.info = self.told[agent]
        self.given: dict[Any, Any] = {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.given.clear()
        for agent, world in self.worlds.items():
            self.given[agent], _ = world.begin()
        return self.given, {}

    def step(self, actions: dict[Any, Any]) -> Any:
        self.given.clear()
        rewards, ends, cuts, infos = {}, {}, {}, {}
        for agent, action in actions.items():
            self.given[agent], rewards[agent], ends[agent], cuts[agent], infos[agent] = self.worlds[
                agent
            ].move(action)
        actions.clear()
        ends["__all__"], cuts["__all__"] = ends["a"], cuts["a"]
        return self.given, rewards, ends, cuts, infos


def sampled_agents() -> Iterator[rlio.SampleBatch]:
    config = rlio.RolloutConfig(rollout_fragment_length=7, record_infos=True, num_envs=2)
    runner = rlio.MultiAgentEnvRunner(
        lambda context=None: Agents(), {"default_policy": Chooses()}, config=config, seed=0
    )
    for _ in range(3):
        yield from runner.run().policy_batches.values()
    runner.stop()


class Parallel(ParallelEnv):  # type: ignore[misc,type-arg]
    """The agents act all at once; each call returns the same dicts."""

    metadata = {"name": "worlds_v0"}  # noqa: RUF012
    possible_agents = ["a", "b", "c"]  # noqa: RUF012

    def __init__(self) -> None:
        self.inner = Agents()
        self.parts: tuple[dict[str, Any], ...] = ({}, {}, {}, {}, {})

    def observation_space(self, agent: str) -> Any:
        return OBS

    def action_space(self, agent: str) -> Any:
        return ACTION

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        return self.inner.reset()

    def step(self, actions: dict[str, Any]) -> Any:
        for kept, part in zip(self.parts, self.inner.step(actions), strict=True):
            kept.clear()
            kept.update({agent: value for agent, value in part.items() if agent != "__all__"})
        if self.parts[2]["a"] or self.parts[3]["a"]:
            self.agents = []
        return self.parts


class Turns(AECEnv):  # type: ignore[misc,type-arg]
    """The agents act in turns. All of them observe the same objects."""

    metadata = {"name": "turns_v0"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = ["a", "b", "c"]
        self.worlds = {agent: World(number) for number, agent in enumerate(self.possible_agents)}
        self.shown = World()

    def observation_space(self, agent: str) -> Any:
        return OBS

    def action_space(self, agent: str) -> Any:
        return ACTION

    def observe(self, agent: str) -> Any:
        self.shown.spoil()
        world = self.worlds[agent]
        self.shown.number, self.shown.episode, self.shown.t = world.number, world.episode, world.t
        self.infos[agent] = self.shown.tell()
        return self.shown.look()

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = list(self.possible_agents)
        for world in self.worlds.values():
            world.begin()
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards: dict[str, Any] = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}
        self.agent_selection = "a"

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        _, self._cumulative_rewards[agent], ends, cuts, _ = self.worlds[agent].move(action)
        self.terminations[agent], self.truncations[agent] = ends, cuts
        self.agent_selection = self.agents[(self.agents.index(agent) + 1) % len(self.agents)]


def recorded_parallel() -> Iterator[rlio.SampleBatch]:
    writer = Kept()
    with rlio.RecordParallelEnv(Parallel(), writer, infos=True) as env:
        for _ in range(3):
            obs, _ = env.reset()
            while env.agents:
                obs, *_ = env.step({agent: action_of(seen["at"])[0] for agent, seen in obs.items()})
    yield from writer.batches


def recorded_turns() -> Iterator[rlio.SampleBatch]:
    writer = Kept()
    with rlio.RecordAECEnv(Turns(), writer, infos=True) as env:
        for _ in range(3):
            env.reset()
            for _ in env.agent_iter():
                obs, _, terminated, truncated, _ = env.last()
                env.step(None if terminated or truncated else action_of(obs["at"])[0])
    yield from writer.batches


class Loop(rlio.ExternalEnv):
    """A loop outside. It changes what it passed as soon as each call has returned."""

    def run(self) -> None:
        world = World()
        while True:
            obs, _ = world.begin()
            episode = self.start_episode()
            ended = (False, False)
            while not any(ended):
                action = self.get_action(episode, obs)
                obs, reward, *ended, info = world.move(action)
                self.log_returns(episode, float(reward), info)
            self.end_episode(episode, obs, truncated=ended[1])


def sampled_outside() -> Iterator[rlio.SampleBatch]:
    config = rlio.RolloutConfig(rollout_fragment_length=7, record_infos=True)
    runner = rlio.sampling.ExternalRunner(Loop(OBS, ACTION), Chooses(), config=config, seed=0)
    for _ in range(3):
        yield runner.run()
    runner.stop()


def built() -> Iterator[rlio.SampleBatch]:
    builder, world = BatchBuilder(), World()
    for _ in range(3):
        obs, _ = world.begin()
        ended = False
        while not ended:
            before = {"at": obs["at"].copy(), "more": (obs["more"][0].copy(), obs["more"][1])}
            action = action_of(obs["at"])[0]
            chosen = action.copy()
            obs, reward, terminated, truncated, info = world.move(action)
            builder.add_values(
                obs=before, actions=chosen, rewards=reward, terminateds=terminated, truncateds=truncated,
                new_obs={"at": obs["at"], "more": obs["more"]}, infos=info,
            )  # fmt: skip
            ended = terminated or truncated
    world.spoil()
    batch = builder.build_and_reset()
    # (The builder makes columns of tuples; graphs and sequences are not its subject.)
    for name in ("obs", "new_obs"):
        t = batch[name]["more"][1]
        objects = np.full((2, len(batch)), None, object)
        for row, (now, place) in enumerate(zip(t.tolist(), batch[name]["at"].tolist(), strict=True)):
            objects[0, row] = GraphInstance(np.full((2, 1), now, np.float32), None, None)
            objects[1, row] = (np.array([place[1], now], np.float32),)
        batch[name] = {**batch[name], "graph": objects[0], "seen": objects[1]}
    yield batch


MODES = list(AutoresetMode)
WAYS: dict[str, Callable[[], Iterator[rlio.SampleBatch]]] = {
    "RecordExperience": recorded,
    **{f"RecordVectorExperience-{m.name}": partial(recorded_vector, partial(Vector, m)) for m in MODES},
    # gymnasium joins the infos of its environments, which share theirs here.
    **{
        f"RecordVectorExperience-sync-{m.name}": partial(recorded_vector, partial(sync, m), infos=False)
        for m in MODES
    },
    **{f"EnvRunner-{m.name}": partial(sampled, Vector(m)) for m in MODES},
    "EnvRunner-local": partial(sampled, lambda context=None: Env(context.vector_index), num_envs=2),
    "EnvRunner-processes": partial(sampled, lambda context=None: Env(), vectorize_mode="async"),
    "MultiAgentEnvRunner": sampled_agents,
    "RecordParallelEnv": recorded_parallel,
    "RecordAECEnv": recorded_turns,
    "ExternalRunner": sampled_outside,
    "BatchBuilder": built,
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_the_environment_is_kept_by_reference(way: str) -> None:
    check(list(WAYS[way]()), rows=9, infos="sync" not in way)
