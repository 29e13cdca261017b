"""`Dataset.stats` and `normalise=`: NumPy's numbers, kept per content; a resumed run uses the same ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlio
from rlio.errors import CorruptData, MissingColumn, OptionError, SchemaConflict, StateError
from rlio.look import moments
from rlio.look import stats as stats_module
from rlio.look.moments import QUANTILES
from rlio.look.stats import Stats


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rlio" / "stats"


def rows(n: int, seed: int = 0, **more: Any) -> rlio.SampleBatch:
    rng = np.random.default_rng(seed)
    ends = np.arange(n) % 10 == 9
    return rlio.SampleBatch(
        obs=(rng.standard_normal((n, 3)) * [1, 100, 0] + [0, 1e6, 7]).astype(np.float32),
        actions=rng.integers(0, 5, n),
        rewards=rng.standard_normal(n),
        terminateds=ends,
        eps_id=np.arange(n) // 10 + (1 << 40),
        t=np.arange(n) % 10,
        **more,
    )


def written(root: Path, *batches: rlio.SampleBatch) -> rlio.Dataset:
    for batch in batches:
        with rlio.ParquetWriter(root) as writer:
            writer.write(batch)
    return rlio.open_dataset(root)


def everything(data: rlio.Dataset) -> rlio.SampleBatch:
    reader = rlio.DatasetReader(data, epochs=1, batch_size=10**6, cache="none")
    batch = reader.sample()
    assert isinstance(batch, rlio.SampleBatch)
    return batch


def test_statistics_are_those_of_numpy_over_all_shards(tmp_path: Path) -> None:
    data = written(tmp_path / "data", rows(700, 1), rows(555, 2))
    stats, batch = data.stats(), everything(data)
    assert list(stats) == ["obs", "actions", "rewards", "terminateds", "t"]
    for name, leaf in stats.items():
        values = np.asarray(batch[name], np.float64)
        np.testing.assert_allclose(leaf.mean, values.mean(axis=0), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(leaf.std, values.std(axis=0), rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(leaf.min, values.min(axis=0))
        np.testing.assert_array_equal(leaf.max, values.max(axis=0))
        np.testing.assert_array_equal(leaf.count, np.full(values.shape[1:], 1255))
        for quantile, share in QUANTILES.items():
            np.testing.assert_allclose(getattr(leaf, quantile), np.quantile(values, share, axis=0))


def test_quantiles_of_a_sample_err_as_little_as_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "SAMPLE_ROWS", 4096)
    # Periodic data, on which a sample of every k-th row would be wrong.
    values = np.tile(np.arange(64.0), 1000)
    data = written(tmp_path / "data", rlio.SampleBatch(rewards=values))
    stats = data.stats()
    assert stats.quantile_rows == 4096
    for quantile, share in QUANTILES.items():
        rank = (values <= float(getattr(stats["rewards"], quantile))).mean()
        assert abs(rank - share) < 5 * 0.5 / np.sqrt(4096) + 1 / 64
    assert stats["rewards"].mean == values.mean()


def test_values_that_are_not_finite_are_left_out_and_counted_per_place(tmp_path: Path) -> None:
    batch = rows(100)
    batch["obs"][3:5, 0], batch["obs"][7, 1], batch["obs"][:, 2] = np.nan, np.inf, np.nan
    leaf = written(tmp_path / "data", batch).stats(["obs"])["obs"]
    assert leaf.count.tolist() == [98, 99, 0]
    kept = np.delete(batch["obs"][:, 0].astype(np.float64), [3, 4])
    np.testing.assert_allclose(
        [leaf.mean[0], leaf.std[0], leaf.q90[0]], [kept.mean(), kept.std(), np.quantile(kept, 0.9)]
    )
    assert np.isfinite(leaf.max[1])
    assert np.isnan([leaf.mean[2], leaf.std[2], leaf.min[2], leaf.q50[2]]).all()


def test_new_obs_is_counted_on_request_and_without_missing_final_observations(tmp_path: Path) -> None:
    obs = np.arange(1.0, 11.0)
    valid = np.arange(10) < 9
    batch = rlio.SampleBatch(
        obs=obs, new_obs=np.append(obs[1:], 0.0), new_obs_valid=valid, eps_id=np.full(10, 1), t=np.arange(10)
    )
    data = written(tmp_path / "data", batch)
    assert "new_obs" not in data.stats()
    leaf = data.stats(["new_obs"])["new_obs"]
    assert (int(leaf.count), float(leaf.min), float(leaf.mean)) == (9, 2.0, 6.0)


def test_nested_columns_have_statistics_by_leaf_and_are_normalised_by_them(tmp_path: Path) -> None:
    obs = {"position": np.arange(8.0).reshape(4, 2), "speed": np.array([1.0, 3.0, 1.0, 3.0])}
    data = written(tmp_path / "data", rlio.SampleBatch(obs=obs, rewards=np.zeros(4)))
    stats = data.stats(["obs"])
    assert list(stats) == ["obs/position", "obs/speed"]
    batch = rlio.DatasetReader(data, epochs=1, normalise="min_max").sample()
    np.testing.assert_allclose(batch["obs"]["speed"], [-1, 1, -1, 1])
    assert (batch["obs"]["position"].min(), batch["obs"]["position"].max()) == (-1, 1)


def test_statistics_are_kept_per_content_and_computed_again_when_the_data_grows(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = written(tmp_path / "data", rows(100))
    first = data.stats()
    assert len(list(own_cache.iterdir())) == 1
    monkeypatch.setattr(stats_module, "_computed", lambda *_, **__: pytest.fail("computed again"))
    again = rlio.open_dataset(tmp_path / "data").stats()
    assert again.to_json() == first.to_json()
    np.testing.assert_array_equal(again["obs"].q99, first["obs"].q99)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache.parent.parent))
    grown = written(tmp_path / "data", rows(50, 3)).stats()
    assert (first.rows, grown.rows) == (100, 150)
    assert rlio.open_dataset(tmp_path / "data", at=data.snapshot()).stats().to_json() == first.to_json()


def test_a_damaged_file_of_statistics_is_replaced(tmp_path: Path, own_cache: Path) -> None:
    data = written(tmp_path / "data", rows(100))
    first = data.stats(["rewards"]).to_json()
    (file,) = own_cache.iterdir()
    for text in ("", "[]", '{"rows": 1}', json.dumps(first)[:-20]):
        file.write_text(text)
        assert data.stats(["rewards"]).to_json() == first
        assert json.loads(file.read_text()) == first


def test_statistics_are_returned_where_they_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    data = written(tmp_path / "data", rows(100))
    assert data.stats(["rewards"], cache_folder=tmp_path / "file").rows == 100


def test_what_has_no_statistics_is_refused(tmp_path: Path) -> None:
    data = written(tmp_path / "data", rows(10, infos=np.array([{}] * 10, object)))
    assert "infos" not in data.stats()
    for columns, kind in ((["infos"], OptionError), (["none"], MissingColumn), ("obs", OptionError)):
        with pytest.raises(kind):
            data.stats(columns)  # type: ignore[arg-type]
    with pytest.raises(OptionError):
        data.stats(policy="other")


def test_statistics_of_damaged_data_are_refused_or_leave_out_the_rows_and_are_not_kept(
    tmp_path: Path, own_cache: Path
) -> None:
    data = written(tmp_path / "data", rows(100), rows(100, 2))
    shard = Path(data.files()[0].removeprefix("file://"))
    content = bytearray(shard.read_bytes())
    content[20:200] = bytes(180)
    shard.write_bytes(content)
    with pytest.raises(CorruptData):
        data.stats()
    assert data.stats(on_error="skip").rows == 100
    Path(data.files()[1].removeprefix("file://")).write_bytes(content)
    with pytest.raises(OptionError, match="all were skipped"):
        data.stats(on_error="skip")
    assert not own_cache.exists()


def test_statistics_of_several_agents_are_of_one_policy(tmp_path: Path) -> None:
    parts = {
        pid: rlio.SampleBatch(obs=[[value], [value]], eps_id=[1, 1], t=[0, 1])
        for pid, value in (("a", 1.0), ("b", 5.0))
    }
    with rlio.ParquetWriter(tmp_path / "data") as writer:
        writer.write(rlio.MultiAgentBatch(parts, 2))
    data = rlio.open_dataset(tmp_path / "data")
    with pytest.raises(OptionError):
        data.stats()
    assert data.stats(policy="b")["obs"].mean.tolist() == [5.0]
    with pytest.raises(OptionError):
        rlio.DatasetReader(data, normalise="mean_std")
    batch = rlio.DatasetReader(data, normalise="min_max", policy="b", epochs=1).sample()
    assert batch["obs"].tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("cache", ["none", "memory"])
def test_normalised_rows_are_the_same_numbers_in_every_reader(tmp_path: Path, cache: Any) -> None:
    data = written(tmp_path / "data", rows(200))
    plain = everything(data)
    stats = data.stats(["obs", "rewards"])
    expected = (plain["obs"] - stats["obs"].mean) / np.where(stats["obs"].std > 0, stats["obs"].std, 1)
    low, high = plain["rewards"].min(), plain["rewards"].max()
    for normalise, columns in (
        ("mean_std", {"obs"}),
        (stats, {"obs"}),
        ({"obs": "mean_std", "rewards": "min_max"}, {"obs", "rewards"}),
    ):
        reader = rlio.DatasetReader(data, epochs=1, batch_size=64, cache=cache, normalise=normalise)
        batch = rlio.concat_samples(list(reader))
        assert batch["obs"].dtype == np.float32
        np.testing.assert_allclose(batch["obs"], expected, rtol=1e-4, atol=1e-4)
        rewards = (
            2 * (plain["rewards"] - low) / (high - low) - 1 if "rewards" in columns else plain["rewards"]
        )
        np.testing.assert_allclose(batch["rewards"], rewards, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(batch["actions"], plain["actions"])
    assert rlio.DatasetReader(data, epochs=1, normalize="mean_std").sample().keys() == plain.keys()


def test_normalised_values_can_be_undone_and_constants_become_zero(tmp_path: Path) -> None:
    data = written(tmp_path / "data", rows(100))
    normaliser = data.stats().normaliser("min_max", columns=["obs", "actions"])
    batch = everything(data)
    made = normaliser(batch)
    assert (made["obs"][:, 2] == 0).all()
    np.testing.assert_allclose(normaliser.undo("obs", made["obs"]), batch["obs"], rtol=1e-5)
    assert np.abs(made["actions"]).max() == 1


def test_padded_rows_stay_zero(tmp_path: Path) -> None:
    data = written(tmp_path / "data", rows(20))
    reader = rlio.DatasetReader(data, epochs=1, draw=rlio.Sequences(8), normalise="mean_std")
    batch = reader.sample()
    padding = np.arange(8)[None] >= np.asarray(batch["seq_lens"])[:, None]
    assert padding.any()
    assert (batch["obs"][padding.reshape(-1)] == 0).all()


def test_a_mixture_gets_the_normalised_rows(tmp_path: Path) -> None:
    data = written(tmp_path / "data", rows(200))
    reader = rlio.DatasetReader(data, shuffle=True, seed=0, cache="memory", normalise="mean_std")
    other = rlio.DatasetReader(data, shuffle=True, seed=1, cache="memory", normalise="mean_std")
    batch = rlio.MixedInput([(reader, 1), (other, 1)], batch_size=64).sample()
    assert np.abs(batch["obs"]).max() < 10


def test_a_state_loads_only_with_the_statistics_that_it_was_saved_with(tmp_path: Path) -> None:
    data = written(tmp_path / "data", rows(200))
    other = written(tmp_path / "other", rows(200, 9)).stats()
    options: Any = {"batch_size": 16, "shuffle": True, "seed": 1}
    reader = rlio.DatasetReader(data, normalise="mean_std", **options)
    reader.sample()
    state = json.loads(json.dumps(reader.state_dict()))
    following = reader.sample()
    for wrong in (None, "min_max", other, {"obs": "mean_std", "rewards": "mean_std"}):
        with pytest.raises(StateError):
            rlio.DatasetReader(data, normalise=wrong, **options).load_state_dict(state)
    for same in ("mean_std", data.stats(), data.stats().normaliser()):
        again = rlio.DatasetReader(data, normalise=same, **options)
        again.load_state_dict(state)
        assert again.sample().equals(following)
    plain = rlio.DatasetReader(data, **options)
    with pytest.raises(StateError):
        rlio.DatasetReader(data, normalise="mean_std", **options).load_state_dict(plain.state_dict())


def test_what_cannot_be_normalised_is_refused(tmp_path: Path) -> None:
    data = written(tmp_path / "data", rows(20))
    for wrong in ("z", {"obs": "z"}, {}, 3, {"new_obs": "mean_std"}):
        with pytest.raises((OptionError, MissingColumn)):
            rlio.DatasetReader(data, normalise=wrong)  # type: ignore[arg-type]
    with pytest.raises(MissingColumn):
        rlio.DatasetReader(data, normalise="mean_std", columns=["rewards"])
    with pytest.raises(OptionError):
        rlio.FollowReader(tmp_path / "data", normalise="mean_std")  # type: ignore[arg-type]
    reader = rlio.FollowReader(tmp_path / "data", normalise=data.stats())
    assert np.abs(reader.sample(20)["obs"]).max() < 10


def test_the_json_of_statistics_is_json_without_nan(tmp_path: Path) -> None:
    stats = written(tmp_path / "data", rlio.SampleBatch(rewards=np.full(4, np.nan))).stats()
    text = json.dumps(stats.to_json(), allow_nan=False)
    again = Stats.from_json(json.loads(text))
    assert np.isnan(again["rewards"].mean)
    assert int(again["rewards"].count) == 0
    with pytest.raises(OptionError):
        stats.normaliser(columns=["rewards"])


def test_columns_of_some_writers_count_as_the_option_says(tmp_path: Path) -> None:
    rows = rlio.SampleBatch(obs=np.arange(8.0), actions=np.zeros(8, np.int64))
    for name in ("w00000-00000000", "w00001-00000000"):
        with rlio.ParquetWriter(tmp_path / "run", writer_id=name) as writer:
            writer.write(rows)
        rows["speed"] = np.full(8, 4.0)
    data = rlio.open_dataset(tmp_path / "run")
    with pytest.raises(SchemaConflict, match="missing='drop' or missing='fill'"):
        data.stats()
    filled, dropped = data.stats(missing="fill"), data.stats(missing="drop")
    assert (filled["speed"].mean, filled["speed"].std, filled.rows) == (2.0, 2.0, 16)
    assert "speed" not in dropped
    assert dropped["obs"].mean == filled["obs"].mean == 3.5
    with pytest.raises(OptionError, match="leaves no column"):
        data.stats(["speed"], missing="drop")
    scaled = {"speed": "mean_std"}
    with rlio.read(data, missing="fill", normalise=scaled, batch_size=16, epochs=1) as reader:
        assert reader.sample()["speed"].tolist() == [-1.0] * 8 + [1.0] * 8
    with pytest.raises(OptionError, match="leaves no column"):
        rlio.read(data, missing="drop", normalise=scaled)
