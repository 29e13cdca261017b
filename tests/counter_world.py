"""A recorded world of the counter environment, awkward in every way, and what is true of each of its rows.

Three writers record four environments each, step by step as a vector environment does, in fragments and
shards that are cut without regard to episodes. Episodes of different writers and environments have the same
``eps_id``; some end, some are truncated, some were not recorded to their end, and some have gaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from counter_env import decode, episode, interleaved, observations
from numpy.typing import NDArray

from rlio import ParquetWriter, Roll, SampleBatch, concat_samples
from rlio.support.forks import cached_property

__all__ = ["World", "record_world"]

WRITERS, ENVS = 3, 4
_LONGEST = 45


@dataclass(frozen=True)
class World:
    """What was recorded. ``[env, episode]`` or ``[env, episode, t]`` index what is known.

    Attributes:
        root: Of the data set.
        kind: Of observations: "vector", "image" or "stack".
        length: Steps that the episode had.
        truncated: Whether it was truncated rather than terminated, if it ended.
        until: One past the last row that follows this one without a gap; 0 of what was not recorded.
        since: The first row from which this one is reached without a gap.
    """

    root: str
    kind: str
    length: NDArray[np.int64]
    truncated: NDArray[np.bool_]
    until: NDArray[np.int64]
    since: NDArray[np.int64]

    @property
    def rows(self) -> int:
        """Rows that were recorded."""
        return int((self.until > 0).sum())

    @property
    def keys(self) -> NDArray[np.int64]:
        """(env, episode, t) of every row, shape (rows, 3)."""
        return np.argwhere(self.until > 0)

    # ---- checks ----

    def check(self, batch: SampleBatch, *, n_step: int = 1, gamma: float = 1.0) -> NDArray[np.int64]:
        """Raise unless every row is a transition of up to ``n_step`` steps as it happened; gives keys."""
        here = decode(batch["obs"])
        env, number, t = here.T
        until, length = self.until[env, number, t], self.length[env, number]
        assert (until > 0).all(), "a row that was never recorded"
        stop = np.minimum(t + n_step, until)
        for name, shown in (("obs", t), ("new_obs", stop)):
            np.testing.assert_array_equal(batch[name], self._seen(env, number, shown))
        np.testing.assert_array_equal(batch["t"], t)
        np.testing.assert_array_equal(batch["env_id"], env % ENVS)
        np.testing.assert_array_equal(batch["eps_id"], number)
        over, truncated = stop == length, self.truncated[env, number]
        np.testing.assert_array_equal(batch["terminateds"], over & ~truncated)
        np.testing.assert_array_equal(batch["truncateds"], over & truncated)
        rewards = sum(gamma**k * (t + k + 1) * (t + k < stop) for k in range(n_step))
        np.testing.assert_allclose(batch["rewards"], rewards, rtol=1e-5)
        if n_step > 1 or "n_step_discount" in batch:
            np.testing.assert_allclose(batch["n_step_discount"], gamma ** (stop - t), rtol=1e-5)
            np.testing.assert_array_equal(batch["bootstrap_mask"], ~(over & ~truncated))
        return here

    def check_sequences(self, batch: SampleBatch, *, length: int, burn_in: int = 0, overlap: int = 0) -> Any:
        """Raise unless every sequence is one without a gap; gives the keys of the rows that are trained."""
        sizes, span = np.asarray(batch["seq_lens"]), length + burn_in
        assert batch.zero_padded
        assert len(batch["obs"]) == len(sizes) * span
        place = np.arange(span)
        inside = (place < sizes[:, None]).reshape(-1)
        rows = batch[inside] if not batch.zero_padded else _rows(batch, inside)
        here = self.check(rows)
        first = np.repeat(np.cumsum(sizes) - sizes, sizes)
        within = np.arange(len(here)) - first
        np.testing.assert_array_equal(here[:, :2], here[first, :2])
        np.testing.assert_array_equal(here[:, 2], here[first, 2] + within)
        np.testing.assert_array_equal(self.until[tuple(here.T)], self.until[tuple(here[first].T)])
        for name in ("obs", "new_obs", "rewards", "t", "terminateds"):
            assert not batch[name][~inside].any(), f"{name} is not padded with zeros"
        warm = np.zeros(len(here), bool)
        if burn_in:
            warm = np.asarray(rows["burn_in"])
            assert not batch["burn_in"][~inside].any()
        # Where the first row that is trained lies in its chain decides how many come before and after it.
        since = self.since[tuple(here.T)]
        begins = np.flatnonzero(within == 0)
        start = here[begins, 2] + np.add.reduceat(warm.astype(np.int64), begins) - since[begins]
        assert not (start % (length - overlap)).any()
        expected = np.minimum(start, burn_in)
        np.testing.assert_array_equal(warm, within < np.repeat(expected, sizes))
        left = self.until[tuple(here[begins].T)] - since[begins] - start
        np.testing.assert_array_equal(sizes, expected + np.minimum(left, length))
        return here[~warm]

    def check_episodes(self, batch: SampleBatch) -> NDArray[np.int64]:
        """Raise unless every episode is all that was recorded of it without a gap; gives the keys."""
        here = self.check(batch)
        sizes = np.asarray(batch["seq_lens"], np.int64)
        begins = np.cumsum(sizes) - sizes
        assert sizes.sum() == len(here)
        first = np.repeat(begins, sizes)
        np.testing.assert_array_equal(here[:, :2], here[first, :2])
        np.testing.assert_array_equal(here[:, 2], here[first, 2] + np.arange(len(here)) - first)
        np.testing.assert_array_equal(self.since[tuple(here[begins].T)], here[begins, 2])
        np.testing.assert_array_equal(self.until[tuple(here[begins].T)], here[begins, 2] + sizes)
        return here

    def _seen(self, env: Any, number: Any, t: Any) -> NDArray[Any]:
        return self._observations[env, number, t]

    @cached_property
    def _observations(self) -> NDArray[Any]:
        """What is seen at every time of every episode, those that were not reached included."""
        envs, numbers, times = self.until.shape
        made = [
            observations(env, number, np.arange(times), kind=self.kind)
            for env in range(envs)
            for number in range(numbers)
        ]
        return np.stack(made).reshape(envs, numbers, times, *made[0].shape[1:])


def _rows(batch: SampleBatch, inside: NDArray[np.bool_]) -> SampleBatch:
    """The rows of a padded batch that are no padding."""
    return SampleBatch({
        name: np.asarray(values)[inside] for name, values in batch.items() if len(values) == len(inside)
    })  # fmt: skip


def record_world(root: Path, *, kind: str = "vector", episodes: int = 40, seed: int = 0) -> World:
    """Record it."""
    rng = np.random.default_rng(seed)
    shape = WRITERS * ENVS, episodes
    length = rng.integers(1, _LONGEST, shape)
    until, since = np.zeros((2, *shape, _LONGEST + 1), np.int64)
    world = World(str(root), kind, length, rng.random(shape) < 0.4, until, since)
    for writer in range(WRITERS):
        rows = interleaved([
            concat_samples([_play(world, writer * ENVS + env, number, rng) for number in range(episodes)])
            for env in range(ENVS)
        ])  # fmt: skip
        with ParquetWriter(root, roll=Roll(max_rows=450), writer_id=f"w{writer:05}-00000000") as out:
            start = 0
            while start < len(rows):
                stop = start + int(rng.integers(1, 200))
                out.write(rows[start:stop])
                start = stop
    return world


def _play(world: World, env: int, number: int, rng: np.random.Generator) -> SampleBatch:
    """The rows of an episode that are recorded: all, or not its end, or not some in the middle."""
    length = int(world.length[env, number])
    spans = [(0, length)]
    luck = rng.random()
    # Of some, two writers each have what the other lacks, under the same ids: they are not one episode.
    if number % 10 == 9 and length > 6:
        spans = [(0, 4)] if env < ENVS else [(4, length)] if env < 2 * ENVS else spans
    elif luck < 0.15 and length > 1:
        spans = [(0, int(rng.integers(1, length)))]
    elif luck < 0.3 and length > 3:
        first, last = sorted(rng.integers(1, length, 2).tolist())
        spans = [(0, first), (last + 1, length)] if last + 1 < length else [(0, first)]
    for start, stop in spans:
        world.until[env, number, start:stop] = stop
        world.since[env, number, start:stop] = start
    rows = concat_samples([
        episode(env, number, length, start=start, stop=stop, truncated=bool(world.truncated[env, number]),
                kind=world.kind)
        for start, stop in spans
    ])  # fmt: skip
    # The same ids in every writer, and of every environment: neither alone tells an episode.
    rows["eps_id"] = np.full(len(rows), number)
    rows["env_id"] = np.full(len(rows), env % ENVS)
    return rows
