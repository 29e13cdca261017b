"""Ranks that shuffle read parts of one order: each row once, or an error that asks for a common seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from further import further

import rlio
from rlio.distributed.group.worker_spec import WorkerId, WorkerSpec
from rlio.errors import OptionError
from rlio.readers.table_reader import from_arrays, from_episodes, read_table
from rlio.resolve import IOContext, resolve_input
from rlio.sampling import PolicySetup, WorkerPlace

LENGTH, EPISODES = 10, 12
ROWS = LENGTH * EPISODES
WORLD = 3
#: Formats whose files are read by `rlio.read`, with the suffix of the file that `rlio.convert` writes.
FORMATS = {"minari": "", "lerobot": "", "d4rl": ".hdf5", "d3rlpy": ".h5", "rllib-json": "", "npz": ""}
COLUMNS = {"obs": "obs", "actions": "actions", "rewards": "rewards"}
MAPPING: Any = {
    "mapping": rlio.Mapping(COLUMNS, episode="eps_id", terminated="done", next_obs="derive"),
}
#: Of episodes, each of which terminated.
WHOLE = rlio.Mapping(COLUMNS, terminated=True)
SPACES = {"default_policy": (gym.spaces.Box(-1e9, 1e9, (1,)), gym.spaces.Discrete(ROWS))}


def table() -> dict[str, np.ndarray[Any, Any]]:
    ids = np.arange(ROWS)
    obs, done = ids.astype(np.float32), ids % LENGTH == LENGTH - 1
    return {"obs": obs, "actions": ids % 3, "rewards": obs, "done": done, "eps_id": ids // LENGTH}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same rows in every format."""
    folder = tmp_path_factory.mktemp("ranks")
    ids = np.arange(ROWS)
    with rlio.ParquetWriter(folder / "rlio", roll=rlio.Roll(max_rows=33, max_seconds=None)) as writer:
        writer.write(
            rlio.SampleBatch(
                obs=ids[:, None].astype(np.float32),
                new_obs=(ids[:, None] + 1).astype(np.float32),
                actions=ids % 3,
                rewards=ids.astype(np.float32),
                terminateds=ids % LENGTH == LENGTH - 1,
                truncateds=np.zeros(ROWS, bool),
                eps_id=ids // LENGTH,
                t=ids % LENGTH,
            )
        )
    found = {"rlio": str(folder / "rlio")}
    for name, suffix in FORMATS.items():
        found[name] = str(folder / f"{name}{suffix}")
        rlio.convert(folder / "rlio", found[name], to=name)
    import pyarrow as pa
    import pyarrow.csv as pa_csv
    import pyarrow.parquet as pq

    pa_csv.write_csv(pa.table(table()), folder / "table.csv")
    own = {"obs": table()["obs"], "actions": table()["actions"], "rewards": table()["rewards"]}
    pq.write_table(pa.table(own), folder / "foreign.parquet", row_group_size=25)
    return {**found, "csv": str(folder / "table.csv"), "parquet": str(folder / "foreign.parquet")}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLIO_CACHE", str(tmp_path / "cache"))


def rows(reader: rlio.InputReader) -> list[int]:
    """All rows that a reader serves."""
    found: list[int] = []
    with reader:
        for batch in reader:
            assert isinstance(batch, rlio.SampleBatch)
            real = batch["mask"] if "mask" in batch else slice(None)
            found += batch["rewards"][real].astype(int).tolist()
    return found


def episodes() -> list[dict[str, Any]]:
    columns = {name: column for name, column in table().items() if name not in ("done", "eps_id")}
    return [
        {name: column[LENGTH * i : LENGTH * i + LENGTH] for name, column in columns.items()}
        for i in range(EPISODES)
    ]


def mixture(roots: dict[str, str], **options: Any) -> rlio.InputReader:
    return rlio.read(
        {roots["minari"]: 1, roots["rlio"]: 2}, end="renormalise", columns="intersect", **options
    )


Make = Callable[..., rlio.InputReader]


def reading(name: str, **fixed: Any) -> Callable[[dict[str, str]], Make]:
    """What `rlio.read` makes of one of the roots."""
    return lambda roots: lambda **options: rlio.read(roots[name], **fixed, **options)


def epochs(roots: dict[str, str]) -> Make:
    return lambda **options: rlio.ReplayStore.open(roots["rlio"]).epochs(**options)


def listed(**options: Any) -> rlio.InputReader:
    return from_episodes(episodes(), mapping=WHOLE, **options)


def shuffled(roots: dict[str, str]) -> Make:
    return lambda **options: rlio.ShuffledInput(
        rlio.read(roots["rlio"], **options), 5, seed=options["shard"][0]
    )


#: Every reader that takes ``shard``.
READERS: dict[str, Callable[[dict[str, str]], Make]] = {
    "own, in memory": reading("rlio", cache="memory"),
    "own, on disk": reading("rlio", cache="disk"),
    "own, as it is read": reading("rlio", cache="none"),
    "n-step": reading("rlio", draw=rlio.NStep(1, gamma=0.9)),
    "an open data set": lambda roots: (
        lambda **options: rlio.read(rlio.open_dataset(roots["rlio"]), **options)
    ),
    "epochs of a store": epochs,
    "a mapped table": lambda roots: lambda **options: read_table(roots["csv"], **MAPPING, **options),
    "arrays": lambda _: lambda **options: from_arrays(table(), **MAPPING, **options),
    "episodes in memory": lambda _: listed,
    "others' Parquet": reading("parquet"),
    "others' Parquet, as it is read": reading("parquet", cache="none"),
    "D4RL, as it is read": reading("d4rl", cache="none"),
    "a shuffle": shuffled,
    **{name: reading(name) for name in FORMATS},
}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "name", [further(name)[0] if name in FORMATS and name != "lerobot" else name for name in READERS]
)
def test_ranks_with_one_seed_serve_every_row_once(roots: dict[str, str], name: str) -> None:
    make = READERS[name](roots)
    options: dict[str, Any] = {"batch_size": 7, "epochs": 1, "shuffle": True, "seed": 4}
    served = [row for rank in range(WORLD) for row in rows(make(shard=(rank, WORLD), **options))]
    assert sorted(served) == list(range(ROWS))
    assert served != sorted(served)


@pytest.mark.few(10)
@pytest.mark.parametrize("name", READERS)
def test_ranks_that_shuffle_without_a_seed_are_refused(roots: dict[str, str], name: str) -> None:
    """Each drew its own: a third of the rows was never served, and others twice."""
    make = READERS[name](roots)
    with pytest.raises(OptionError, match="pass the same seed"):
        make(batch_size=7, epochs=1, shuffle=True, shard=(0, WORLD))
    with make(batch_size=7, epochs=1, shuffle=True, shard=(0, 1)) as alone:  # It shares with no one.
        assert len(alone.sample())


def test_ranks_of_a_mixture_serve_every_row_of_its_sources_once(roots: dict[str, str]) -> None:
    options: dict[str, Any] = {"batch_size": 7, "epochs": 1, "shuffle": True, "seed": 4}
    served = [row for rank in range(WORLD) for row in rows(mixture(roots, shard=(rank, WORLD), **options))]
    assert sorted(served) == sorted([*range(ROWS)] * 2)
    with pytest.raises(OptionError, match="pass the same seed"):
        mixture(roots, batch_size=7, epochs=1, shuffle=True, shard=(0, WORLD))


# ---- workers ----


def worker(rank: int, input: Any, own_seed: int | None, order_seed: int | None = None, **options: Any) -> Any:
    place = WorkerPlace(worker_index=rank + 1, num_workers=WORLD, order_seed=order_seed)
    return rlio.RolloutWorker(
        None,
        rlio.RandomPolicy(),
        place=place,
        seed=own_seed,
        policy_setup=PolicySetup(spaces=SPACES),
        input=input,
        input_options={"batch_size": 7, "epochs": 1, "shuffle": True, **options},
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("source", ["rlio", "minari", "rllib-json", "a mixture"])
@pytest.mark.parametrize("seed", ["one for each", "none"])
@pytest.mark.each_value_once
def test_workers_with_seeds_of_their_own_share_one_order(
    roots: dict[str, str], source: str, seed: str
) -> None:
    """Each worker gave its own seed to the order of its share."""
    names = ("rlio", "minari") if source == "a mixture" else (source,)
    mixed: Any = {roots[name]: 1 for name in names} if len(names) > 1 else roots[source]
    options = {"end": "renormalise"} if len(names) > 1 else {}
    served: list[int] = []
    for rank in range(WORLD):
        served += rows(worker(rank, mixed, rank if seed == "one for each" else None, **options))
    assert sorted(served) == sorted([*range(ROWS)] * len(names))


def test_the_order_of_workers_depends_on_the_seed_that_they_share(roots: dict[str, str]) -> None:
    orders = [
        rows(worker(0, roots["rlio"], 5, order_seed, **options))
        for order_seed, options in ((None, {}), (0, {}), (1, {}), (None, {"seed": 1}), (2, {"seed": 1}))
    ]
    assert orders[0] == orders[1] != orders[2]
    assert orders[2] == orders[3] == orders[4]
    alone = rlio.RolloutWorker(
        None, rlio.RandomPolicy(), seed=5, policy_setup=PolicySetup(spaces=SPACES),
        input=roots["rlio"], input_options={"batch_size": 7, "epochs": 1, "shuffle": True},
    )  # fmt: skip
    assert rows(alone) == rows(rlio.read(roots["rlio"], batch_size=7, epochs=1, shuffle=True, seed=5))


def test_a_worker_whose_share_is_chosen_by_hand_needs_a_seed_for_it(roots: dict[str, str]) -> None:
    """A worker that is alone in its process does not know whether the others have its seed."""
    context = IOContext(seed=3, options={"shuffle": True, "shard": (1, WORLD), "epochs": 1})
    with pytest.raises(OptionError, match="pass the same seed"):
        resolve_input(roots["rlio"], context)
    with resolve_input(roots["rlio"], replace(context, options={"shuffle": True, "shard": (0, 1)})) as reader:
        assert reader.seed == 3  # type: ignore[attr-defined]


def test_a_creator_learns_the_seed_that_workers_share(roots: dict[str, str]) -> None:
    seen: list[IOContext] = []

    def create(context: IOContext) -> rlio.InputReader:
        seen.append(context)
        return rlio.read(roots["rlio"])

    for rank in range(2):
        worker_of = rlio.RolloutWorker(
            None, rlio.RandomPolicy(), seed=rank, policy_setup=PolicySetup(spaces=SPACES), input=create,
            place=WorkerPlace(worker_index=rank + 1, num_workers=2, order_seed=9),
        )  # fmt: skip
        worker_of.close()
    assert [(context.seed, context.order_seed) for context in seen] == [(0, 9), (1, 9)]
    assert IOContext(seed=4).order_seed == 4


# ---- groups ----


def spec_of(root: str, seed: int) -> WorkerSpec:
    keywords = {
        "policy_setup": PolicySetup(spaces=SPACES),
        "input": root,
        "input_options": {"batch_size": 7, "epochs": 1, "shuffle": True},
    }
    return WorkerSpec(None, rlio.RandomPolicy, keywords, num_workers=WORLD, seed=seed)


def test_workers_of_a_group_share_the_order_of_its_seed(roots: dict[str, str]) -> None:
    orders = []
    for seed in (0, 1):
        parts = [rows(spec_of(roots["rlio"], seed).make(WorkerId(rank + 1))) for rank in range(WORLD)]
        assert sorted(row for part in parts for row in part) == list(range(ROWS))
        orders.append(parts)
    assert orders[0] != orders[1]


def test_a_replaced_worker_goes_on_in_the_order_of_its_group(roots: dict[str, str]) -> None:
    """It had another seed, so the position of the lost worker was refused."""
    spec = spec_of(roots["rlio"], 0)
    served: list[int] = []
    with spec.make(WorkerId(1)) as lost:
        served += lost.sample()["rewards"].astype(int).tolist()  # type: ignore[index]
        position = lost.state_dict()
    # The group has since loaded a state, with the seed of an earlier run.
    replaced = replace(spec, seed=77).make(WorkerId(1, incarnation=1))
    replaced.load_state_dict(position)
    served += rows(replaced)
    for rank in (1, 2):
        served += rows(spec.make(WorkerId(rank + 1)))
    assert sorted(served) == list(range(ROWS))


def test_ranks_that_follow_need_no_seed(roots: dict[str, str]) -> None:
    parts = [
        rows(rlio.FollowReader(roots["rlio"], idle_timeout=0, shard=(rank, WORLD))) for rank in range(WORLD)
    ]
    assert sorted(row for part in parts for row in part) == list(range(ROWS))
