"""Live stores made by arithmetic alone, and the script that wrote those of earlier versions.

`python tests/saved_stores.py FOLDER` saves each of `STORES` into FOLDER. The folders under
tests/golden/saved-stores were written at commit 4d4987e: their files do not say which rows follow each other.
Those under tests/golden/saved-stores-2 were written at commit dd0ca8f, as was tests/golden/checkpoint-1, by
`save_checkpoint`, here: their arrays lie beside ``store.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from counter_env import episode

import rlio
from rlio import MultiAgentBatch, ReplayStore, SampleBatch
from rlio.replay.samplers import PrioritisedSampler

__all__ = ["STORES", "numbered", "sampler_of", "with_infos"]


def numbered(eps_id: int, rewards: list[float], *, first: int = 0, ends: bool = True) -> SampleBatch:
    """Rows of one episode with the given rewards; ``t`` counts from ``first``."""
    count = len(rewards)
    t = np.arange(first, first + count)
    return SampleBatch(
        obs=np.array(rewards, np.float32)[:, None],
        new_obs=np.array(rewards, np.float32)[:, None] + 0.5,
        rewards=np.array(rewards, np.float32),
        terminateds=(t == first + count - 1) & ends,
        truncateds=np.zeros(count, bool),
        eps_id=np.full(count, eps_id),
        t=t,
    )


def with_infos(batch: SampleBatch) -> SampleBatch:
    """The batch with an object a row."""
    infos = np.empty(len(batch), object)
    infos[:] = [{"at": [int(e), int(t)]} for e, t in zip(batch["eps_id"], batch["t"], strict=True)]
    batch["infos"] = infos
    return batch


def whole_episodes() -> ReplayStore:
    """Six episodes and the beginning of a seventh, of which the oldest two were forgotten."""
    store = ReplayStore(44)
    for number in range(6):
        store.append(with_infos(episode(0, number, 10, kind="stack")))
    store.append(with_infos(episode(0, 6, 10, stop=4, kind="stack")))
    return store


def half_an_episode() -> ReplayStore:
    """The oldest episode has lost its first rows."""
    store = ReplayStore(14)
    for number in range(3):
        store.append(episode(0, number, 10))
    return store


def two_writers() -> ReplayStore:
    """Two writers with one eps_id, whose rows alternate."""
    store = ReplayStore(100)
    for t in range(3):
        for writer, rewards in (("a", [1.0, 2.0, 3.0]), ("b", [10.0, 20.0, 30.0])):
            store.append(numbered(0, rewards[t : t + 1], first=t, ends=t == 2), writer=writer)
    return store


def one_writer() -> ReplayStore:
    """The beginning of an episode of a writer that has a name."""
    store = ReplayStore(100)
    store.append(numbered(0, [1.0, 2.0], ends=False), writer="a")
    return store


def rows_twice() -> ReplayStore:
    """An episode in the middle of another writer's: linked without writers, all rows seem to fit."""
    store = ReplayStore(100)
    store.append(numbered(0, [1.0], ends=False), writer="a")
    store.append(numbered(0, [20.0, 30.0], first=1), writer="b")
    store.append(numbered(0, [2.0, 3.0], first=1), writer="a")
    return store


def a_gap() -> ReplayStore:
    """A row that another writer's would fill the gap before."""
    store = ReplayStore(100)
    store.append(numbered(0, [1.0], ends=False), writer="a")
    store.append(numbered(0, [20.0], first=1), writer="b")
    store.append(numbered(0, [3.0], first=2), writer="a")
    return store


def without_time() -> ReplayStore:
    """Rows without ``t``: whether two of them follow each other is not in them."""
    store = ReplayStore(100)
    for number in range(3):
        rows = numbered(number, [1.0, 2.0, 3.0])
        del rows["t"]
        store.append(rows)
    return store


def agents() -> ReplayStore:
    """Joint steps of two agents, of which one joins late."""
    store = ReplayStore(100)
    for number in range(4):
        late = episode(1, number, 6, start=2)
        late["eps_id"] = np.full(len(late), number)
        store.append(MultiAgentBatch({"a": episode(0, number, 6), "b": late}, 6))
    return store


STORES: dict[str, Callable[[], ReplayStore]] = {
    made.__name__: made
    for made in (
        whole_episodes,
        agents,
        half_an_episode,
        two_writers,
        one_writer,
        rows_twice,
        a_gap,
        without_time,
    )
}


def sampler_of(store: ReplayStore) -> PrioritisedSampler:
    """A sampler that has drawn once, and learned the priorities of what it drew."""
    sampler = store.prioritised(batch_size=8, seed=0)
    batch = sampler.sample()
    assert isinstance(batch, SampleBatch)
    sampler.update_priorities(batch["batch_indexes"], batch["rewards"])
    return sampler


def save_checkpoint(folder: Path) -> None:
    """A part of every kind that this module can make."""
    store = whole_episodes()
    values: dict[str, Any] = {"step": 7, "array": np.arange(4.0), "tensor": torch.arange(2)}
    rng = np.random.default_rng(3)
    rlio.save_checkpoint(folder, buffer=store, sampler=sampler_of(store), rng=rng, **values)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in STORES.items():
        store = make()
        sampler = sampler_of(store) if name == "whole_episodes" else None
        store.save(folder / name, priorities=sampler)
    save_checkpoint(folder / "checkpoint")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
