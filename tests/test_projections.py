"""``columns=`` and ``normalise=``: parts of nested columns, the flag of missing observations, no more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_batches import assert_identical

import rlio
from rlio import SampleBatch
from rlio.batch.concat import concat_samples
from rlio.errors import MissingColumn, OptionError
from rlio.replay.store import ReplayStore
from rlio.schemas import json_values
from rlio.torch import ReplayDataset

WRITERS: dict[str, Any] = {"parquet": rlio.ParquetWriter, "json": rlio.JsonWriter}
ROWS = 24


def recorded(*, missing: bool = True) -> SampleBatch:
    """Four episodes of six rows; the final observation of every other one is missing."""
    t = np.tile(np.arange(6), 4)
    pos = np.arange(ROWS * 2, dtype=np.float32).reshape(ROWS, 2)
    camera = np.arange(ROWS * 4, dtype=np.uint8).reshape(ROWS, 2, 2)
    gear = np.arange(ROWS) % 3
    ends = t == 5
    valid = ~(ends & (np.arange(ROWS) < 12)) if missing else np.ones(ROWS, bool)

    def after(leaf: np.ndarray) -> np.ndarray:
        """The next row's, own values at an end, and zeros where nobody knows."""
        found = np.concatenate([leaf[1:], leaf[:1]]).copy()
        found[ends] = leaf[ends] + leaf.dtype.type(1)
        found[~valid] = 0
        return found

    obs: dict[str, Any] = {"pos": pos, "camera": camera, "gear": gear, "pair": (pos[:, 0], pos[:, 1])}
    following = {name: after(obs[name]) for name in ("pos", "camera", "gear")}
    columns: dict[str, Any] = {
        "obs": obs, "new_obs": {**following, "pair": tuple(map(after, obs["pair"]))},
        "actions": gear, "rewards": np.ones(ROWS, np.float32), "terminateds": ends & (np.arange(ROWS) >= 6),
        "truncateds": ends & (np.arange(ROWS) < 6), "eps_id": np.repeat(np.arange(4), 6), "t": t,
        "infos": np.array([{"success": bool(i % 2), "n": i} for i in range(ROWS)], object),
    }  # fmt: skip
    if missing:
        columns["new_obs_valid"] = valid
    return SampleBatch(columns)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Format -> data set, which tests only read."""
    roots = {name: str(tmp_path_factory.mktemp(name)) for name in WRITERS}
    for name, root in roots.items():
        with WRITERS[name](root, roll=rlio.Roll(max_rows=8)) as writer:
            for part in recorded().timeslices(6):
                writer.write(part)
    return roots


@pytest.fixture(params=WRITERS)
def root(request: pytest.FixtureRequest, written: dict[str, str]) -> str:
    return written[request.param]


@pytest.fixture
def parquet(written: dict[str, str]) -> str:
    return written["parquet"]


def in_order(batch: SampleBatch) -> SampleBatch:
    found = batch[np.lexsort((batch["t"], batch["eps_id"]))]
    assert isinstance(found, SampleBatch)
    return found


def stored(root: str, columns: list[str], cache: Any) -> SampleBatch:
    with rlio.DatasetReader(root, columns=columns, cache=cache, epochs=1, shuffle=True, seed=0) as reader:
        found = concat_samples(list(reader))
    assert isinstance(found, SampleBatch)
    return in_order(found)


def of_sampler(make: Callable[[ReplayStore, list[str]], Any]) -> Callable[[str, list[str]], SampleBatch]:
    def read(root: str, columns: list[str]) -> SampleBatch:
        with ReplayStore.open(root) as store:
            sampler = make(store, columns)
            batch = concat_samples([sampler.sample(64) for _ in range(8)])
        assert isinstance(batch, SampleBatch)
        for name in ("weights", "batch_indexes"):  # Those of draws by priority.
            batch.pop(name, None)
        rows = np.unique(batch["eps_id"] * 100 + batch["t"], return_index=True)[1]
        found = batch[rows]
        assert isinstance(found, SampleBatch)
        return found

    return read


def kept(root: str, columns: list[str]) -> SampleBatch:
    with ReplayStore.open(root, columns=columns) as store:
        found = concat_samples(list(store.epochs(epochs=1, shuffle=False)))
    assert isinstance(found, SampleBatch)
    return found


def followed(root: str, columns: list[str]) -> SampleBatch:
    with rlio.FollowReader(root, columns=columns, idle_timeout=0) as reader:
        found = concat_samples(list(reader))
    assert isinstance(found, SampleBatch)
    return found


def of_torch(root: str, columns: list[str]) -> SampleBatch:
    rows = ReplayDataset(root, columns=columns, epochs=1, batch_size=5, shuffle=False)
    found = concat_samples([SampleBatch(batch) for batch in rows])
    assert isinstance(found, SampleBatch)
    return SampleBatch({name: _numpy(column) for name, column in found.items()})


def _numpy(column: Any) -> Any:
    if isinstance(column, dict):
        return {key: _numpy(part) for key, part in column.items()}
    return tuple(map(_numpy, column)) if isinstance(column, tuple) else np.asarray(column)


def taken(root: str, columns: list[str]) -> SampleBatch:
    return rlio.open_dataset(root).take(np.arange(ROWS), columns=columns)


def of_live(root: str, columns: list[str]) -> SampleBatch:
    store = ReplayStore(100)
    store.append(recorded())
    return of_sampler(lambda _, names: store.uniform(columns=names, seed=0))(root, columns)


#: Name -> what reads rows of a data set with some of its columns, in recorded order.
READS: dict[str, Callable[[str, list[str]], SampleBatch]] = {
    "cold": lambda root, columns: stored(root, columns, "none"),
    "memory": lambda root, columns: stored(root, columns, "memory"),
    "disk": lambda root, columns: stored(root, columns, "disk"),
    "follow": followed,
    "store": kept,
    "uniform": of_sampler(lambda store, columns: store.uniform(columns=columns, seed=0)),
    "prioritised": of_sampler(lambda store, columns: store.prioritised(columns=columns, seed=0)),
    "live": of_live,
    "torch": of_torch,
    "take": taken,
}
KEYS = ["eps_id", "t"]


# ---- the flag of missing final observations ----


@pytest.mark.few(2)
@pytest.mark.each_value_once
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_columns_with_new_obs_bring_the_flag_of_missing_ones(
    root: str, read: Callable[[str, list[str]], SampleBatch]
) -> None:
    """Zeros that nobody observed passed for observations: a learner bootstraps from them."""
    whole = recorded()
    found = read(root, ["obs", "new_obs", "rewards", *KEYS])
    np.testing.assert_array_equal(found["new_obs_valid"], whole["new_obs_valid"])
    assert set(found) == {"obs", "new_obs", "rewards", *KEYS, "new_obs_valid"}
    part = read(root, ["new_obs/pos", *KEYS])
    np.testing.assert_array_equal(part["new_obs_valid"], whole["new_obs_valid"])
    assert "new_obs_valid" not in read(root, ["obs", *KEYS])
    assert list(read(root, [*KEYS, "new_obs_valid"])) in ([*KEYS, "new_obs_valid"], ["new_obs_valid", *KEYS])


def test_data_without_missing_observations_brings_no_flag(tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path) as writer:
        writer.write(recorded(missing=False))
    for name, read in READS.items():
        if name != "live":
            assert set(read(str(tmp_path), ["new_obs", *KEYS])) == {"new_obs", *KEYS}, name


def test_a_writer_without_missing_observations_beside_one_with_them_has_the_flag_too(tmp_path: Path) -> None:
    for missing in (False, True):
        with rlio.ParquetWriter(tmp_path, writer_id=f"w{missing:d}") as writer:
            writer.write(recorded(missing=missing))
    expected = np.concatenate([np.ones(ROWS, bool), recorded()["new_obs_valid"]])
    for cache in ("none", "memory"):
        with rlio.DatasetReader(tmp_path, columns=["new_obs"], epochs=1, cache=cache) as reader:
            for batch in reader:
                np.testing.assert_array_equal(batch["new_obs_valid"], expected)


@pytest.mark.few(3)
@pytest.mark.parametrize("method", ["to_arrow", "to_pandas", "to_polars"])
def test_tables_with_new_obs_have_the_flag(root: str, method: str) -> None:
    table = getattr(rlio.open_dataset(root), method)(columns=["new_obs"])
    assert np.asarray(table["new_obs_valid"]).tolist() == recorded()["new_obs_valid"].tolist()
    part = getattr(rlio.open_dataset(root), method)(columns=["new_obs/pos"])
    names = part.column_names if method == "to_arrow" else list(part.columns)
    assert names == ["new_obs/pos", "new_obs_valid"]


def test_a_table_of_several_agents_has_the_flag_of_those_that_lack_it(tmp_path: Path) -> None:
    """Only one of them misses an observation; the export was refused for it, or lost the flag."""
    ids = {"eps_id": [1, 1], "t": [0, 1]}
    obs = np.arange(2.0)
    parts = {
        "a": SampleBatch(obs=obs, new_obs=[1.0, 0.0], new_obs_valid=[True, False], **ids),
        "b": SampleBatch(obs=obs, new_obs=obs + 1, **ids),
    }
    with rlio.ParquetWriter(tmp_path) as writer:
        writer.write(rlio.MultiAgentBatch(parts, 2))
    data = rlio.open_dataset(tmp_path)
    for columns in (None, ["new_obs"]):
        frame = data.to_pandas(columns=columns)
        flags = frame.groupby("policy_id")["new_obs_valid"].apply(list).to_dict()
        assert flags == {"a": [True, False], "b": [True, True]}


@pytest.mark.few(1)
@pytest.mark.parametrize("columns", ["error", "intersect", "fill"])
def test_a_mixture_keeps_the_flag_in_every_batch(tmp_path: Path, columns: Any) -> None:
    """One source tells of missing observations, the other has none, and no flag."""
    for name, missing in (("with", True), ("without", False)):
        with rlio.ParquetWriter(tmp_path / name) as writer:
            writer.write(recorded(missing=missing))
    wanted = ["obs", "new_obs", *KEYS]
    sources = {
        name: rlio.DatasetReader(tmp_path / name, columns=wanted, shuffle=True, seed=1)
        for name in ("with", "without")
    }
    mixed = rlio.MixedInput(sources, weights={"with": 1, "without": 3}, batch_size=4, columns=columns, seed=0)
    lost = 0
    for _ in range(40):
        batch = mixed.sample()
        assert isinstance(batch, SampleBatch)
        zeros = ~np.any(batch["new_obs"]["pos"], axis=1)
        np.testing.assert_array_equal(batch["new_obs_valid"], ~zeros)
        lost += int(zeros.sum())
    assert lost


def test_a_mixture_without_new_obs_has_no_flag_either(tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path / "with") as writer:
        writer.write(recorded())
    with rlio.ParquetWriter(tmp_path / "without") as writer:
        writer.write(SampleBatch({n: c for n, c in recorded().items() if not n.startswith("new_obs")}))
    sources = {name: rlio.DatasetReader(tmp_path / name) for name in ("with", "without")}
    mixed = rlio.MixedInput(sources, batch_size=4, columns="intersect", seed=0)
    for _ in range(12):
        assert not {"new_obs", "new_obs_valid"} & set(mixed.sample())


def test_arrays_and_episodes_in_memory_bring_the_flag() -> None:
    batch = recorded()
    reader = rlio.from_arrays(
        {"x": batch["obs"]["pos"], "a": batch["actions"], "r": batch["rewards"], "e": batch["eps_id"]},
        mapping=rlio.Mapping({"obs": "x", "actions": "a", "rewards": "r"}, episode="e", next_obs="derive"),
        epochs=1,
    )
    assert "new_obs_valid" in reader.sample()


# ---- parts of nested columns ----


@pytest.mark.few(5)
@pytest.mark.each_value_once
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_columns_name_parts_of_nested_columns(
    root: str, read: Callable[[str, list[str]], SampleBatch]
) -> None:
    whole = recorded()
    found = read(root, ["obs/pos", "new_obs/pos", "actions", *KEYS])
    expected = SampleBatch(
        obs={"pos": whole["obs"]["pos"]},
        actions=whole["actions"],
        new_obs={"pos": whole["new_obs"]["pos"]},
        **{name: whole[name] for name in (*KEYS, "new_obs_valid")},
    )
    assert_identical(SampleBatch({name: found[name] for name in expected}), expected)
    assert set(found) == set(expected)
    two = read(root, ["obs/gear", "obs/pair", *KEYS])["obs"]
    assert set(two) == {"gear", "pair"}
    np.testing.assert_array_equal(two["pair"][1], whole["obs"]["pair"][1])
    with pytest.raises(MissingColumn, match="obs/speed"):
        read(root, ["obs/speed", *KEYS])
    with pytest.raises(OptionError, match="'obs/pair' is a tuple"):
        read(root, ["obs/pair/1", *KEYS])


def test_a_part_is_read_without_the_bytes_of_the_others(
    parquet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlio.schemas import shard_file

    seen: set[str] = set()
    real = shard_file.from_arrow

    def from_arrow(array: Any, spec: Any) -> Any:
        seen.add(str(spec.shape))
        return real(array, spec)

    monkeypatch.setattr(shard_file, "from_arrow", from_arrow)
    for cache in ("none", "memory"):
        stored(parquet, ["obs/pos", *KEYS], cache)
    assert str((2, 2)) not in seen
    stored(parquet, ["obs/camera", *KEYS], "none")
    assert str((2, 2)) in seen


def test_parts_of_nested_columns_are_one_name_in_tables_statistics_filters_and_readers(parquet: str) -> None:
    data, whole = rlio.open_dataset(parquet), recorded()
    assert data.to_arrow(columns=["obs/pos", "t"]).column_names == ["obs/pos", "t"]
    assert list(data.stats(["obs/pos"])) == ["obs/pos"]
    chosen = data.to_arrow(columns=["t", "obs/gear"], filter='obs["pos"][0] > 30 and obs["gear"] == 1')
    assert chosen["obs/gear"].to_pylist() == [1] * int(
        ((whole["obs"]["pos"][:, 0] > 30) & (whole["obs"]["gear"] == 1)).sum()
    )
    with rlio.DatasetReader(parquet, columns=["obs/pos"], epochs=1) as reader:
        assert reader.sample().keys() == {"obs"}


def test_a_column_whose_name_has_a_slash_is_still_a_column(tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path) as writer:
        writer.write(SampleBatch({"a/b": np.arange(3), "c": {"d/e": np.arange(3)}, "t": np.arange(3)}))
    for names, expected in ((["a/b"], {"a/b"}), (["c/d~1e"], {"c"}), (["a~1b"], None)):
        if expected is None:
            with pytest.raises(MissingColumn):
                rlio.DatasetReader(tmp_path, columns=names)
        else:
            with rlio.DatasetReader(tmp_path, columns=names, epochs=1) as reader:
                assert set(reader.sample()) == expected


def test_a_column_that_a_store_does_not_keep_cannot_be_drawn(parquet: str) -> None:
    """It was left out of the batches, in silence."""
    with ReplayStore.open(parquet, columns=["obs/pos", "rewards"]) as store:
        assert set(store.uniform(seed=0).sample(3)) == {"obs", "rewards"}
        for columns in (["actions"], ["obs/gear"], ["eps_id"]):
            with pytest.raises(MissingColumn, match=columns[0]):
                store.uniform(columns=columns, seed=0).sample(3)


def test_mappings_name_parts_of_nested_columns_as_readers_do() -> None:
    batch = recorded()
    table = {"x": batch["obs"]["pos"][:, 0], "y": batch["obs"]["pos"][:, 1], "g": batch["obs"]["gear"]}
    fields: Any = {"episode": "e", "dtypes": {"obs/pos": "float64"}}
    more = {"a": batch["actions"], "r": batch["rewards"], "e": batch["eps_id"]}
    rest = {"actions": "a", "rewards": "r"}
    flat, nested = (
        rlio.from_arrays(
            {**table, **more}, mapping=rlio.Mapping({**obs, **rest}, **fields), epochs=1
        ).sample()
        for obs in ({"obs/pos": ["x", "y"], "obs/gear": "g"}, {"obs": {"pos": ["x", "y"], "gear": "g"}})
    )
    assert_identical(flat, nested)
    assert flat["obs"]["pos"].dtype == np.float64
    with pytest.raises(OptionError, match="obs/pos"):
        rlio.Mapping({"obs": "x", "obs/pos": "y", **rest}, **fields)


# ---- normalising ----


@pytest.mark.few(1)
@pytest.mark.parametrize("cache", ["none", "memory"])
def test_normalise_leaves_choices_and_pictures_alone_and_takes_one_part_by_name(
    root: str, cache: Any
) -> None:
    whole = recorded()["obs"]

    def read(normalise: Any, **options: Any) -> Any:
        with rlio.DatasetReader(root, epochs=1, cache=cache, normalise=normalise, **options) as reader:
            found = concat_samples(list(reader))
        return found["obs"], found.get("new_obs")

    obs, new_obs = read("mean_std")
    for name in ("camera", "gear"):
        assert obs[name].dtype == whole[name].dtype
        np.testing.assert_array_equal(obs[name], whole[name])
    for leaf in (obs["pos"], *obs["pair"]):
        assert leaf.dtype == np.float32
        np.testing.assert_allclose(leaf.mean(axis=0), 0, atol=1e-5)
    assert new_obs["pos"].dtype == np.float32
    assert new_obs["camera"].dtype == np.uint8

    obs, new_obs = read({"obs/pos": "min_max"})
    assert (obs["pos"].min(), obs["pos"].max()) == (-1, 1)
    np.testing.assert_array_equal(obs["pair"][0], whole["pair"][0])
    obs, _ = read({"obs/gear": "min_max", "obs/camera": "mean_std"})
    assert sorted(set(obs["gear"].tolist())) == [-1, 0, 1]
    assert obs["camera"].dtype == np.float32
    np.testing.assert_array_equal(obs["pos"], whole["pos"])
    obs, _ = read("min_max", columns=["obs/pos"])
    assert (list(obs), obs["pos"].min()) == (["pos"], -1)
    with pytest.raises(MissingColumn, match="leaves out"):
        read({"obs/gear": "min_max"}, columns=["obs/pos"])
    for wrong in ({"obs/speed": "min_max"}, {"obs/gear/0": "min_max"}):
        with pytest.raises(MissingColumn):
            read(wrong)
    for wrong in ({"new_obs/pos": "min_max"}, {"new_obs": "min_max"}):
        with pytest.raises(OptionError, match="new_obs follows obs"):
            read(wrong)


def test_statistics_normalise_the_same_parts_as_the_option(parquet: str) -> None:
    data = rlio.open_dataset(parquet)
    rows = rlio.DatasetReader(parquet, epochs=1, columns=["obs", "t"]).sample()
    expected = rlio.DatasetReader(parquet, epochs=1, columns=["obs", "t"], normalise="mean_std").sample()
    for stats in (data.stats(), type(data.stats()).from_json(data.stats().to_json())):
        assert_identical(stats.normaliser()(rows), expected)
        assert_identical(
            rlio.DatasetReader(parquet, epochs=1, columns=["obs", "t"], normalise=stats).sample(), expected
        )
    one = data.stats().normaliser("mean_std", columns=["obs/pos"])
    made = one(rows)
    assert_identical(SampleBatch(x=made["obs"]["pos"]), SampleBatch(x=expected["obs"]["pos"]))
    np.testing.assert_array_equal(made["obs"]["pair"][0], rows["obs"]["pair"][0])
    np.testing.assert_allclose(one.undo("obs", made["obs"])["pos"], rows["obs"]["pos"], rtol=1e-4, atol=1e-4)
    with pytest.raises(MissingColumn, match="obs/pos"):  # Another structure is no reason for silence.
        one(SampleBatch(obs={"place": np.zeros((2, 2), np.float32)}))


def test_a_picture_as_the_whole_observation_is_normalised_only_by_name(tmp_path: Path) -> None:
    frames = np.arange(16, dtype=np.uint8).reshape(4, 2, 2)
    with rlio.ParquetWriter(tmp_path) as writer:
        writer.write(SampleBatch(obs=frames, t=np.arange(4)))
    with pytest.raises(OptionError, match="name each"):
        rlio.DatasetReader(tmp_path, normalise="mean_std")
    found = rlio.DatasetReader(tmp_path, normalise={"obs": "min_max"}, epochs=1).sample()
    assert (found["obs"].min(), found["obs"].max()) == (-1, 1)


# ---- nothing else is decoded ----


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "options",
    [
        {"cache": "memory", "shuffle": True, "seed": 0},
        {"cache": "memory", "draw": rlio.NStep(3)},
        {"cache": "memory", "draw": rlio.Sequences(4)},
        {"cache": "memory", "draw": rlio.WholeEpisodes()},
        {"cache": "memory", "filter": "rewards > 0"},
        {"cache": "memory", "split": ("train", 0.9), "derive": ["mc_return", "episode_return"]},
        {"cache": "none", "filter": "rewards > 0"},
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_columns_without_infos_decode_none_also_while_a_store_is_built(
    parquet: str, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first batch took 4 s, of which 3.9 s were for infos."""
    wanted = ["obs", "rewards", "new_obs", *options.get("derive", ())]
    with rlio.DatasetReader(parquet, epochs=1, batch_size=4, **options) as reader:
        expected = list(reader)
    for name in ("load_value", "value_from_json"):
        for module in (json_values, *_importers(name)):
            monkeypatch.setattr(module, name, lambda *_: pytest.fail("an info was decoded"), raising=False)
    with rlio.DatasetReader(parquet, epochs=1, batch_size=4, columns=wanted, **options) as reader:
        found = list(reader)
    more = {"new_obs_valid", "n_step_discount", "bootstrap_mask", "seq_lens"} & set(expected[0])
    assert set(found[0]) == {*wanted, *more}
    for one, other in zip(found, expected, strict=True):
        assert_identical(one, SampleBatch({name: other[name] for name in one}, **_layout(other)))


def _importers(name: str) -> list[Any]:
    import sys

    return [m for key, m in sys.modules.items() if key.startswith("rlio.") and hasattr(m, name)]


def _layout(batch: SampleBatch) -> dict[str, Any]:
    return {"zero_padded": batch.zero_padded, "max_seq_len": batch.max_seq_len}
