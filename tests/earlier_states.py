"""States, checkpoints, indexes and marks, and the script that wrote those of an earlier version.

`python tests/earlier_states.py FOLDER` writes them into FOLDER. Those in tests/golden/states were written at
commit 4d4987e, with copies of tests/counter_env.py and of this file as it was before `rlio.NStep` and the
like replaced keywords:

    git worktree add ../then 4d4987e
    git show 8c9070c:tests/earlier_states.py > ../then/tests/earlier_states.py
    cd ../then && python tests/earlier_states.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from counter_env import episode
from gymnasium.spaces import Box, Discrete

import rlio
from rlio.readers.async_input import AsyncInput

#: Where all data lie: states of readers of files, and indexes, count only at the place where they were made.
ROOT = "memory://earlier-states"
INDEXED = f"{ROOT}/indexed"
#: Rows that each reader has served when its state is taken, and those that it serves then.
BEFORE, AFTER = 3, 4


# ---- data ----


def write_data(folder: Path) -> None:
    """Recordings of every kind that a reader with a state reads."""
    for name, kind in (("parquet", rlio.ParquetWriter), ("json", rlio.JsonWriter)):
        for env in range(3):
            roll = rlio.Roll(max_rows=10, max_seconds=None)
            with kind(folder / name, writer_id=f"w{env}", roll=roll, spool=None) as writer:
                for number in range(2):
                    writer.write(episode(env, number, 9))
    rows = rlio.concat_samples([episode(5, number, 12) for number in range(3)])
    lines = []
    for number in range(3):
        part = rows[12 * number : 12 * number + 12]
        columns = {name: values.tolist() for name, values in part.items() if name != "truncateds"}
        columns["dones"] = columns.pop("terminateds")
        lines.append(json.dumps({"type": "SampleBatch", **columns}))
    (folder / "rllib.json").write_text("\n".join(lines) + "\n")
    columns = {name: values.tolist() for name, values in rows.items() if name not in ("obs", "new_obs")}
    table = pa.table({"obs": rows["t"].astype(np.float32), **columns})
    pq.write_table(table, folder / "foreign.parquet", row_group_size=9)
    with h5py.File(folder / "d4rl.hdf5", "w") as file:
        file["observations"] = rows["obs"]
        file["actions"] = np.arange(36, dtype=np.float32)[:, None]
        file["rewards"] = np.arange(36, dtype=np.float32)
        file["terminals"] = rows["terminateds"]
        file["timeouts"] = rows["truncateds"]


def put_data(folder: Path) -> None:
    """Put what `write_data` wrote to where it is read."""
    fsspec.filesystem("memory").put(f"{folder}/", f"{ROOT}/", recursive=True)


# ---- readers ----


def _of_data(**options: Any) -> Callable[[], Any]:
    return lambda: rlio.DatasetReader(f"{ROOT}/parquet", **options)


def _drawn(kind: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(rlio.ReplayStore.open(f"{ROOT}/parquet"), kind)(seed=1, **options)


def _mixture() -> Any:
    sources = [(_of_data(shuffle=True, seed=1)(), 2.0), (_of_data(cache="memory")(), 1.0)]
    return rlio.MixedInput(sources, batch_size=5, seed=3)


def _following() -> Any:
    return rlio.FollowingReplay(f"{ROOT}/parquet", capacity=200, batch_size=4, seed=1)


#: Name -> how to make a reader that has a state.
READERS: dict[str, Callable[[], Any]] = {
    "recorded order": _of_data(epochs=2),
    "recorded order of JSON": lambda: rlio.DatasetReader(f"{ROOT}/json", epochs=2),
    "windows": _of_data(epochs=2, shuffle=True, seed=1, cache="none"),
    "windows of a rank": _of_data(shuffle=True, seed=1, cache="none", shard=(1, 2)),
    "windows with a filter": _of_data(shuffle=True, seed=1, cache="none", filter="t > 3"),
    "permutation": _of_data(epochs=2, shuffle=True, seed=1, cache="memory"),
    "permutation of a rank": _of_data(shuffle=True, seed=1, cache="memory", shard=(0, 2)),
    "permutation of a filter": _of_data(shuffle=True, seed=1, cache="memory", filter="t > 3"),
    "n-step": _of_data(shuffle=True, seed=1, cache="memory", draw=rlio.NStep(3, gamma=0.9)),
    "sequences": _of_data(shuffle=True, seed=1, cache="memory", draw=rlio.Sequences(4), batch_size=8),
    "episodes": _of_data(shuffle=True, seed=1, cache="memory", draw=rlio.WholeEpisodes()),
    "growing": _of_data(grow=True),
    "following": _of_data(follow=True, idle_timeout=0),
    "uniform draws": _drawn("uniform", batch_size=4),
    "prioritised draws": _drawn("prioritised", batch_size=4),
    "following replay": _following,
    "mixture": _mixture,
    "shuffled": lambda: rlio.ShuffledInput(_of_data()(), 20, seed=2),
    "mapped": lambda: rlio.MappedInput(_of_data()(), lambda batch: batch),
    "asynchronous": lambda: AsyncInput(_of_data()()),
    "RLlib's JSON": lambda: rlio.JsonReader(f"{ROOT}/rllib.json", shuffle=True, seed=1),
    "others' Parquet": lambda: rlio.ForeignParquetReader(f"{ROOT}/foreign.parquet", shuffle=True, seed=1),
    "D4RL": lambda: rlio.D4RLReader(f"{ROOT}/d4rl.hdf5", shuffle=True, seed=1),
}


def served(reader: Any) -> list[Any]:
    """What a few calls give: the column by which rows are told apart, and the rewards."""
    found = []
    for _ in range(AFTER):
        batch = reader.sample() if "batch_size" in reader.__dict__ else reader.sample(5)
        name = "t" if "t" in batch else "actions"
        found.append([batch[name].ravel().tolist(), batch["rewards"].ravel().tolist()])
    return found


def write_states(folder: Path) -> None:
    """``states.json``: reader -> its state in the middle, and what it served then."""
    found = {}
    for name, make in READERS.items():
        with make() as reader:
            for _ in range(BEFORE):
                reader.sample(5)
            state = json.loads(json.dumps(reader.state_dict()))
            found[name] = {"state": state, "served": served(reader)}
    (folder / "states.json").write_text(json.dumps(found, separators=(",", ":")))


# ---- workers ----


def _worker(env: Any, policy: Any, **options: Any) -> rlio.RolloutWorker:
    rollout = options.pop("rollout", None) or rlio.RolloutConfig(
        num_envs=2, rollout_fragment_length=8, observation_connectors=[rlio.connectors.MeanStdFilter()]
    )
    return rlio.RolloutWorker(env, policy, rollout=rollout, seed=4, **options)


def _actor() -> rlio.policies.ActorCritic:
    return rlio.policies.ActorCritic(hidden=(4,))


#: Name -> how to make a worker.
WORKERS: dict[str, Callable[[], rlio.RolloutWorker]] = {
    "sampler": lambda: _worker("CartPole-v1", _actor()),
    "agents": lambda: _worker(
        rlio.envs.make_multi_agent("CartPole-v1"),
        {"a": rlio.PolicySpec(_actor), "b": rlio.PolicySpec(rlio.RandomPolicy)},
        rollout=rlio.RolloutConfig(rollout_fragment_length=8),
        policy_setup=rlio.sampling.PolicySetup(policy_mapping_fn=_policy_of),
    ),
    "data": lambda: _worker(None, _bound(), input=f"{ROOT}/parquet", rollout=rlio.RolloutConfig()),
}


def _bound() -> rlio.RandomPolicy:
    policy = rlio.RandomPolicy()
    policy.bind(Box(-1e6, 1e6, (3,)), Discrete(3), seed=0)
    return policy


def _policy_of(agent: Any, *_: Any, **__: Any) -> str:
    return "ab"[int(agent) % 2]


def write_workers(folder: Path) -> None:
    policy = _actor()
    policy.bind(Box(-1.0, 1.0, (3,)), Discrete(2), seed=0)
    policy.save(folder / "policy")
    for name, make in WORKERS.items():
        with make() as worker:
            for _ in range(BEFORE):
                worker.sample()
            worker.save(folder / "workers" / name)


# ---- stores, indexes, marks ----


def write_priorities(folder: Path) -> None:
    """Priorities of the rows of a data set."""
    with (
        rlio.ReplayStore.open(f"{ROOT}/parquet") as store,
        store.prioritised(batch_size=4, seed=1) as sampler,
    ):
        sampler.update_priorities(np.arange(20), np.arange(20) + 1.0)
        sampler.save(folder / "priorities.npz")


def write_index(folder: Path) -> None:
    """A data set of three sealed writers with an index of them, as files, and its store in a cache folder."""
    for env in range(3):
        with rlio.JsonWriter(
            INDEXED, writer_id=f"w{env}", roll=rlio.Roll(max_rows=3, max_seconds=None)
        ) as writer:
            writer.write(episode(env, 0, 6))
    from rlio.maintenance import indexing
    from rlio.storage import sealed_index
    from rlio.storage.filesystem import Storage

    with mock.patch.object(sealed_index, "PAGE", 2), mock.patch.object(indexing, "PAGE", 2):
        assert indexing.refresh_index(Storage.open(INDEXED), begin=True) is not None
    with rlio.ReplayStore.open(INDEXED, cache="disk", cache_folder=folder / "cache"):
        pass
    fsspec.filesystem("memory").get(INDEXED, str(folder / "indexed"), recursive=True)


def write_marks(folder: Path) -> None:
    """A data set whose writer is not closed, and a follower that has left marks."""
    writer = rlio.ParquetWriter(
        folder / "followed", writer_id="w0", roll=rlio.Roll(max_seconds=None), spool=None
    )
    writer.write(episode(0, 0, 9))
    writer.flush()
    markers = rlio.Markers("learner", every_seconds=0.0)
    with rlio.FollowingReplay(
        folder / "followed", capacity=100, batch_size=4, markers=markers, seed=1
    ) as replay:
        for _ in range(BEFORE):
            replay.sample(4)
    assert list((folder / "followed" / "_progress" / "w0").iterdir())


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    write_data(folder)
    put_data(folder)
    for write in (write_states, write_workers, write_priorities, write_index, write_marks):
        write(folder)
    os._exit(0)  # The writer of `write_marks` is not closed.


if __name__ == "__main__":
    import earlier_states  # States have names of functions that can be imported.

    earlier_states.main(Path(sys.argv[1]))
