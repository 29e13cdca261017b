"""10^6 samples of an environment whose observation says where it was seen: not one is wrong.

Whatever is drawn (transitions, n-step, sequences, episodes), in whichever order, from memory, disk or cold:
`new_obs` follows `obs` within one episode, no window crosses an end or a gap, and stacks are those that
gymnasium's wrapper shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from counter_world import ENVS, WRITERS, World, record_world
from further import further
from gymnasium.wrappers import FrameStackObservation

import rlio
from rlio import (
    DatasetReader,
    EnvRunner,
    ParquetWriter,
    RandomPolicy,
    ReplayStore,
    RolloutConfig,
    SampleBatch,
)

pytestmark = pytest.mark.xdist_group("replay_proofs")  # The worlds are recorded once.

# (where, what is drawn and how, samples). A sample is a unit: a transition, a sequence, an episode.
VECTORS: list[tuple[str, dict[str, Any], int]] = [
    ("memory", {}, 150_000),
    ("disk", {}, 100_000),
    ("memory", {"uniform": True}, 150_000),
    ("disk", {"uniform": True}, 100_000),
    ("cold", {}, 60_000),
    ("cold", {"shuffle": False}, 20_000),
    ("memory", {"draw": rlio.NStep(3, gamma=0.9)}, 100_000),
    ("disk", {"draw": rlio.NStep(7, gamma=0.5), "shard": (1, 3)}, 50_000),
    ("memory", {"draw": rlio.NStep(100, gamma=1.0), "uniform": True}, 30_000),
    ("memory", {"draw": rlio.Sequences(8)}, 20_000),
    ("disk", {"draw": rlio.Sequences(6, burn_in=4, overlap=2)}, 20_000),
    ("memory", {"draw": rlio.Sequences(5, burn_in=7, overlap=4), "uniform": True}, 20_000),
    ("memory", {"draw": rlio.WholeEpisodes()}, 2_000),
    ("disk", {"draw": rlio.WholeEpisodes(), "shard": (0, 2)}, 1_000),
]
STACKS: list[tuple[str, dict[str, Any], int]] = [
    ("memory", {}, 40_000),
    ("disk", {"shard": (3, 4)}, 20_000),
    ("disk", {"uniform": True}, 30_000),
    ("memory", {"views": True}, 40_000),
    ("memory", {"uniform": True, "views": True}, 30_000),
    ("cold", {}, 10_000),
    ("disk", {"draw": rlio.NStep(3, gamma=0.9)}, 20_000),
    ("memory", {"draw": rlio.Sequences(4, burn_in=2, overlap=1)}, 4_000),
]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    folder = tmp_path_factory.mktemp("worlds")
    return {kind: record_world(folder / kind, kind=kind) for kind in ("vector", "stack")}


def batches(world: World, where: Any, uniform: bool = False, **options: Any) -> Iterator[SampleBatch]:
    """Batches without end; drawn in one of the ways that there are."""
    shape = options.get("draw")
    few = 250 if isinstance(shape, rlio.WholeEpisodes) else 1000  # A rank has 534 episodes.
    size = options.setdefault("batch_size", 512 if isinstance(shape, rlio.Sequences) else few)
    if uniform:
        with ReplayStore.open(world.root, cache=where) as store:
            yield from store.uniform(seed=1, **options)
    options = {"shuffle": True, **options}
    options |= {"seed": 1} if options["shuffle"] else {}
    with DatasetReader(world.root, cache="none" if where == "cold" else where, **options) as reader:
        assert size == reader.options.batch_size
        yield from reader  # type: ignore[misc]  # One policy.


def check(world: World, batch: SampleBatch, options: dict[str, Any]) -> int:
    """Raise where a unit is wrong; gives how many there are."""
    match options.get("draw"):
        case rlio.Sequences(length=length, burn_in=burn_in, overlap=overlap):
            world.check_sequences(batch, length=length, burn_in=burn_in, overlap=overlap)
        case rlio.WholeEpisodes():
            world.check_episodes(batch)
        case rlio.NStep(n=n, gamma=gamma):
            world.check(batch, n_step=n, gamma=gamma)
        case _:
            world.check(batch)
    return len(batch["seq_lens"]) if "seq_lens" in batch else len(batch)


def _part(part: int) -> str:
    return "all of them" if part == 1 else f"one in {part}"


def test_the_samples_are_a_million() -> None:
    assert sum(samples for _, _, samples in VECTORS + STACKS) >= 1_000_000


@pytest.mark.few(3)
@pytest.mark.parametrize("part", [12, *further(1)], ids=_part)
@pytest.mark.parametrize(("where", "options", "samples"), VECTORS, ids=str)
def test_no_sample_is_wrong(
    worlds: dict[str, World], where: str, options: dict[str, Any], samples: int, part: int
) -> None:
    world, seen = worlds["vector"], 0
    for batch in batches(world, where, **options):
        seen += check(world, batch, options)
        if seen >= samples // part:
            return
    raise AssertionError(f"only {seen} samples")


@pytest.mark.further
@pytest.mark.parametrize("part", [12, *further(1)], ids=_part)
@pytest.mark.parametrize(("where", "options", "samples"), STACKS, ids=str)
def test_no_stack_of_frames_is_wrong(
    worlds: dict[str, World], where: str, options: dict[str, Any], samples: int, part: int
) -> None:
    world, seen = worlds["stack"], 0
    for batch in batches(world, where, **options):
        if "views" in options:
            assert np.shares_memory(batch["obs"], batch["new_obs"])
        seen += check(world, batch, options)
        if seen >= samples // part:
            return
    raise AssertionError(f"only {seen} samples")


# ---- nothing is left out ----


def keys_of(found: list[np.ndarray]) -> np.ndarray:
    keys = np.concatenate(found)
    return keys[np.lexsort(keys.T[::-1])]


@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["memory", "disk", "cold"])
@pytest.mark.parametrize("kind", ["vector", "stack"])
@pytest.mark.each_value_once
def test_an_epoch_has_every_row_once(worlds: dict[str, World], where: str, kind: str) -> None:
    world = worlds[kind]
    found = [world.check(batch) for batch in batches(world, where, epochs=1, batch_size=777)]
    np.testing.assert_array_equal(keys_of(found), world.keys)


@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("burn_in", [0, 1, 3, 9])
@pytest.mark.each_value_once
def test_sequences_train_every_row_once(worlds: dict[str, World], where: str, burn_in: int) -> None:
    world, cut = worlds["vector"], {"draw": rlio.Sequences(4, burn_in=burn_in)}
    found = batches(world, where, epochs=1, batch_size=100, **cut)
    trained = [world.check_sequences(batch, length=4, burn_in=burn_in) for batch in found]
    np.testing.assert_array_equal(keys_of(trained), world.keys)


@pytest.mark.few(1)
@pytest.mark.parametrize(("overlap", "burn_in"), [(1, 0), (3, 0), (3, 2), (5, 11)])
def test_overlapping_sequences_train_every_row_and_begin_where_they_should(
    worlds: dict[str, World], overlap: int, burn_in: int
) -> None:
    world, length = worlds["vector"], 6
    cut = {"draw": rlio.Sequences(length, burn_in=burn_in, overlap=overlap)}
    trained = keys_of([
        world.check_sequences(batch, length=length, burn_in=burn_in, overlap=overlap)
        for batch in batches(world, "memory", epochs=1, batch_size=64, **cut)
    ])  # fmt: skip
    unique, times = np.unique(trained, axis=0, return_counts=True)
    np.testing.assert_array_equal(unique, world.keys)
    # Row i of a chain of n rows is in those sequences that begin at multiples of the step, at most a length
    # before it, and that have a row which the one before has not.
    since = world.since[tuple(world.keys.T)]
    at, rows = world.keys[:, 2] - since, world.until[tuple(world.keys.T)] - since
    step = length - overlap
    begins = np.arange(0, 60, step)[:, None]
    there = (begins <= at) & (at < begins + length) & ((begins == 0) | (begins + overlap < rows))
    np.testing.assert_array_equal(times, there.sum(axis=0))


@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_episodes_have_every_row_once(worlds: dict[str, World], where: str) -> None:
    world = worlds["vector"]
    found = [
        world.check_episodes(b)
        for b in batches(world, where, epochs=1, batch_size=9, draw=rlio.WholeEpisodes())
    ]
    np.testing.assert_array_equal(keys_of(found), world.keys)


@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("kind", ["vector", "stack"])
@pytest.mark.each_value_once
def test_n_step_drops_no_row(worlds: dict[str, World], where: str, kind: str) -> None:
    world = worlds[kind]
    found = [
        world.check(batch, n_step=5, gamma=0.8)
        for batch in batches(world, where, epochs=1, draw=rlio.NStep(5, gamma=0.8))
    ]
    np.testing.assert_array_equal(keys_of(found), world.keys)


# ---- live rows ----


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["vector", "stack"])
def test_a_live_store_is_right_while_rows_come_and_go(worlds: dict[str, World], kind: str) -> None:
    """One writer's rows, as its vector environment gave them: no window leads behind the newest row."""
    world = worlds[kind]
    reader = DatasetReader(world.root, cache="none", epochs=1, batch_size=97)
    recorded = list(islice(reader, world.rows // WRITERS // 97))
    store = ReplayStore(capacity=600)
    drawn = 0
    options: list[dict[str, Any]] = [{}, {"draw": rlio.NStep(4, gamma=0.5)}]
    samplers = [store.uniform(batch_size=60, seed=0, indexes=True, **drawn_so) for drawn_so in options]
    order = np.empty((0, 3), np.int64)
    newest = np.full(world.until.shape[:2], -1)
    for rows in recorded:
        assert isinstance(rows, SampleBatch)
        store.append(rows)
        there = world.check(rows)
        order = np.concatenate([order, there])
        newest[there[:, 0], there[:, 1]] = np.maximum(newest[there[:, 0], there[:, 1]], there[:, 2])
        # What has come so far: the rest is as if it had never been recorded.
        known = np.minimum(world.until, newest[:, :, None] + 1) * (
            np.arange(world.until.shape[2]) <= newest[:, :, None]
        )
        so_far = World(world.root, kind, world.length, world.truncated, known, world.since)
        so_far.__dict__["_observations"] = world._observations
        for sampler, drawn_so in zip(samplers, options, strict=True):
            for _ in range(4):
                batch = sampler.sample()
                assert isinstance(batch, SampleBatch)
                drawn += check(so_far, batch, drawn_so)
                step = drawn_so.get("draw")
                steps = {"n_step": step.n, "gamma": step.gamma} if step else {}
                np.testing.assert_array_equal(so_far.check(batch, **steps), order[batch["batch_indexes"]])
                assert (batch["batch_indexes"] >= len(order) - 600).all()
    assert drawn > 10_000


# ---- stacks of a real wrapper ----


class Pictures(gymnasium.Env[np.ndarray, int]):
    """Pictures that say which episode and step they show; an episode ends, in one way or the other."""

    observation_space = gymnasium.spaces.Box(0, 255, (20, 24), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self) -> None:
        self.episode = -1
        self.t = 0

    def _picture(self) -> np.ndarray:
        shown = np.full((20, 24), (self.episode * 37 + self.t * 11) % 251, np.uint8)
        shown[0, :2] = self.episode, self.t
        return shown

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._picture(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.t += 1
        over = self.t >= 3 + (self.episode * 7) % 19
        late = bool(self.episode % 2)
        return self._picture(), float(self.t), over and not late, over and late, {}


def shown_live(episodes: int) -> dict[tuple[int, int], np.ndarray]:
    """(episode, t) -> the stack that gymnasium's wrapper shows there."""
    env = FrameStackObservation(Pictures(), 4)
    seen = {}
    for number in range(episodes):
        obs, _ = env.reset()
        seen[number, 0] = np.array(obs)
        over, t = False, 0
        while not over:
            obs, _, terminated, truncated, _ = env.step(0)
            over, t = terminated or truncated, t + 1
            seen[number, t] = np.array(obs)
    return seen


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Recorded by stepping the wrapper, two environments beside each other, in fragments of 33 steps."""
    root = str(tmp_path_factory.mktemp("pictures"))
    config = RolloutConfig(num_envs=2, rollout_fragment_length=33)
    runner = EnvRunner(lambda: FrameStackObservation(Pictures(), 4), RandomPolicy(), config=config, seed=0)
    with ParquetWriter(root) as writer:
        for _ in range(12):
            writer.write(runner.run())
    runner.stop()
    return root


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("none", {}),
        *((where, options) for where in ("memory", "disk")
          for options in ({}, {"draw": rlio.NStep(3, gamma=1.0)}, {"views": True})),
    ],
    ids=str,
)  # fmt: skip
def test_stacks_are_those_that_a_live_wrapper_shows(
    pictures: str, where: Any, options: dict[str, Any]
) -> None:
    live = shown_live(60)
    rows = 0
    with DatasetReader(
        pictures, cache=where, shuffle=True, seed=0, epochs=1, batch_size=50, **options
    ) as reader:
        for batch in reader:
            assert isinstance(batch, SampleBatch)
            for obs, new_obs, t in zip(batch["obs"], batch["new_obs"], batch["t"].tolist(), strict=True):
                number, later = int(obs[-1, 0, 0]), int(new_obs[-1, 0, 1])
                np.testing.assert_array_equal(obs, live[number, t])
                np.testing.assert_array_equal(new_obs, live[number, later])
                assert t < later <= t + (options["draw"].n if "draw" in options else 1)
            rows += len(batch)
    assert rows == 12 * 33 * 2


@pytest.mark.few(1)
@pytest.mark.parametrize("axis", [1, 3])
@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.each_value_once
def test_stacks_that_jump_or_do_not_follow_each_other_come_back_as_they_were(
    tmp_path: Path, where: Any, axis: int
) -> None:
    """Most steps add one frame to a stack; here, some bring a whole new one, or show the next row another."""
    rng = np.random.default_rng(axis)

    def stacks(rows: int) -> np.ndarray:
        return rng.integers(0, 256, (rows, 4, 20, 20), np.uint8)

    obs = stacks(301)
    for t in range(300):
        if rng.random() < 0.8:
            obs[t + 1, :-1] = obs[t, 1:]
    new_obs = obs[1:].copy()
    elsewhere = rng.random(300) < 0.1
    new_obs[elsewhere] = stacks(int(elsewhere.sum()))
    rows = SampleBatch(
        obs=np.moveaxis(obs[:-1], 1, axis), new_obs=np.moveaxis(new_obs, 1, axis), eps_id=np.zeros(300, int),
        t=np.arange(300), rewards=np.zeros(300), terminateds=np.zeros(300, bool),
    )  # fmt: skip
    with ParquetWriter(tmp_path) as writer:
        for start in range(0, 300, 70):
            writer.write(rows[start : start + 70])
    with ReplayStore.open(tmp_path, cache=where) as store:
        (table,) = store.tables.values()
        (pool,) = table._pools.values()
        assert pool.depth == 4
        for options in ({}, {"views": True}):
            for batch in store.epochs(batch_size=7, epochs=3, seed=0, **options):  # type: ignore[arg-type]
                assert isinstance(batch, SampleBatch)
                for name in ("obs", "new_obs"):
                    np.testing.assert_array_equal(batch[name], rows[name][batch["t"]])


@pytest.mark.parametrize("with_times", [False, True])
def test_without_ids_an_end_ends_an_episode(tmp_path: Path, with_times: bool) -> None:
    """Rows that say only where episodes end; and times that go on over an end do not join what it parts."""
    rng = np.random.default_rng(0)
    ends, kinds = rng.random(500) < 0.2, rng.random(500) < 0.5
    rows = SampleBatch(
        obs=np.arange(500.0), new_obs=np.arange(1, 501.0), rewards=np.ones(500),
        terminateds=ends & kinds, truncateds=ends & ~kinds,
    )  # fmt: skip
    if with_times:
        rows["t"] = np.arange(500)
    with ParquetWriter(tmp_path) as writer:
        for start in range(0, 500, 70):
            writer.write(rows[start : start + 70])
    stop = np.minimum.accumulate(np.where(ends, np.arange(1, 501), 500)[::-1])[::-1]
    with ReplayStore.open(tmp_path) as store:
        (batch,) = store.epochs(batch_size=500, epochs=1, shuffle=False, draw=rlio.NStep(4, gamma=1.0))
    steps = np.minimum(4, stop - np.arange(500))
    np.testing.assert_array_equal(batch["new_obs"], np.arange(500) + steps)
    np.testing.assert_array_equal(batch["rewards"], steps)


def test_the_world_is_as_awkward_as_it_says(worlds: dict[str, World]) -> None:
    """Ends of both kinds, gaps, episodes without an end, the same ids in all writers; stacks on and off."""
    world = worlds["vector"]
    ended = np.take_along_axis(world.until, world.length[:, :, None] - 1, 2)[:, :, 0] == world.length
    assert 0 < ended.sum() < ended.size
    assert 0 < (ended & world.truncated).sum() < ended.sum()
    assert ((world.since > 0) & (world.until > 0)).any()
    with ReplayStore.open(world.root) as store:
        assert len(store) == world.rows
    assert world.until.shape[0] == WRITERS * ENVS
