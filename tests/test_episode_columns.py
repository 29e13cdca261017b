"""Columns derived from episodes, filters on them, splits, and sequences as (B, T, ...)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlio
from rlio.errors import MissingColumn, OptionError, RlioError, StateError
from rlio.query.filters import RowFilter
from rlio.query.splits import Split
from rlio.replay.draw_options import draw_of
from rlio.writers.roll import Roll

DRAWN = 1 << 40
KEEPS: Any = pytest.mark.parametrize("cache", ["memory", "disk"])


def rows(eps_id: int, first: int, stop: int, *, end: str = "", seed: int | None = None) -> rlio.SampleBatch:
    t = np.arange(first, stop)
    rng = np.random.default_rng(eps_id if seed is None else seed)
    last = t == stop - 1
    return rlio.SampleBatch(
        obs=(eps_id % 1000 * 100.0 + t).astype(np.float32)[:, None],
        actions=t,
        rewards=rng.standard_normal(1000)[t].astype(np.float32),
        terminateds=last & (end == "terminated"),
        truncateds=last & (end == "truncated"),
        eps_id=np.full(len(t), eps_id),
        t=t,
    )


def written(root: Path, *batches: Any, rows_a_shard: int = 7) -> rlio.Dataset:
    with rlio.ParquetWriter(root, roll=Roll(max_rows=rows_a_shard)) as writer:
        for batch in batches:
            writer.write(batch)
    return rlio.open_dataset(root)


def recorded(root: Path) -> rlio.Dataset:
    """Episode 1 in fragments and shards among others; 3 unfinished; 4 without its first rows."""
    return written(
        root,
        rows(1, 0, 5),
        rows(2, 0, 3, end="truncated"),
        rows(1, 5, 9),
        rows(3, 0, 4),
        rows(1, 9, 12, end="terminated"),
        rows(4, 2, 6, end="terminated"),
    )


def read(data: rlio.Dataset, **options: Any) -> rlio.SampleBatch:
    batch = rlio.DatasetReader(data, epochs=1, batch_size=10_000, **options).sample()
    assert isinstance(batch, rlio.SampleBatch)
    return batch


ALL = ["returns_to_go", "mc_return", "episode_return", "episode_length"]


@KEEPS
def test_derived_columns_are_of_whole_episodes_across_fragments_and_shards(
    tmp_path: Path, cache: Any
) -> None:
    data = recorded(tmp_path)
    assert len(data.files()) > 2
    batch = read(data, cache=cache, derive=["mc_return(0.9)", *(name for name in ALL if name != "mc_return")])
    for eps_id, length in ((1, 12), (2, 3)):
        rewards = rows(eps_id, 0, length)["rewards"].astype(np.float64)
        own = batch[batch["eps_id"] == eps_id]
        own = own[np.argsort(own["t"])]
        togo = [rewards[t:].sum() for t in range(length)]
        discounted = [(rewards[t:] * 0.9 ** np.arange(length - t)).sum() for t in range(length)]
        np.testing.assert_allclose(own["returns_to_go"], togo, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(own["mc_return"], discounted, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(own["episode_return"], rewards.sum(), rtol=1e-5)
        assert (own["episode_length"] == length).all()
    unfinished, headless = (batch[batch["eps_id"] == eps_id] for eps_id in (3, 4))
    assert all(np.isnan(unfinished[name]).all() for name in ALL)
    assert np.isfinite(headless["returns_to_go"]).all()
    assert np.isfinite(headless["mc_return"]).all()
    assert np.isnan(headless["episode_return"]).all()
    assert np.isnan(headless["episode_length"]).all()
    assert {batch[name].dtype for name in ALL} == {np.dtype(np.float32)}


def test_derived_columns_do_not_depend_on_compaction_and_see_only_the_snapshot(tmp_path: Path) -> None:
    data = recorded(tmp_path)
    before = read(data, cache="memory", derive=ALL)
    (writer,) = data.snapshot()
    part = rlio.open_dataset(tmp_path, at={writer: 12})  # Episode 1 up to row 9.
    for cache in ("memory", "disk"):
        found = read(part, cache=cache, derive=ALL)
        assert np.isnan(found["returns_to_go"][found["eps_id"] == 1]).all()
        assert (found["episode_length"][found["eps_id"] == 2] == 3).all()
        read(data, cache=cache)  # The store on disk then also has the later rows.
    rlio.maintenance.compact(tmp_path)
    assert read(data.refresh(), cache="memory", derive=ALL).equals(before)


@pytest.mark.few(1)
@KEEPS
def test_without_t_returns_and_lengths_after_a_trim_are_unknown(tmp_path: Path, cache: Any) -> None:
    """Any episode of the writer may lack its first rows, as episodes may alternate."""
    batches = rows(1, 0, 8, end="terminated"), rows(2, 0, 4, end="terminated")
    for batch in batches:
        del batch["t"]
    data = written(tmp_path, *batches, rows_a_shard=4)
    assert read(data, cache=cache, derive=ALL)["episode_length"].tolist() == [8] * 8 + [4] * 4
    with rlio.ParquetWriter(tmp_path) as other:
        other.write(batches[1])
    rlio.maintenance.trim(tmp_path, before={next(iter(data.snapshot())): 4})
    found = read(rlio.open_dataset(tmp_path), cache=cache, derive=ALL)
    known = np.isfinite(found["episode_length"])
    assert (int(known.sum()), len(found)) == (4, 12)
    assert np.array_equal(np.isfinite(found["episode_return"]), known)
    assert np.isfinite(found["returns_to_go"]).all()


def test_derived_columns_come_in_every_kind_of_unit_and_reader(tmp_path: Path) -> None:
    data = recorded(tmp_path)
    plain = read(data, cache="memory", derive=["returns_to_go"])
    togo = {
        (e, t): g
        for e, t, g in zip(*(plain[n].tolist() for n in ("eps_id", "t", "returns_to_go")), strict=True)
    }
    store = rlio.ReplayStore.open(data)
    draws: list[tuple[Any, dict[str, Any]]] = [
        (store.uniform, {"draw": rlio.NStep(2)}),
        (store.uniform, {"indexes": True, "views": True}),
        (store.prioritised, {}),
        (store.uniform, {"draw": rlio.Sequences(4)}),
        (store.uniform, {"draw": rlio.WholeEpisodes()}),
        (store.epochs, {"columns": ["t", "eps_id"]}),
    ]
    for make, options in draws:
        batch = make(batch_size=8, seed=0, derive=["returns_to_go"], **options).sample()
        keys = zip(batch["eps_id"].tolist(), batch["t"].tolist(), strict=True)
        expected = [togo.get(key, 0.0) for key in keys]
        np.testing.assert_array_equal(
            batch["returns_to_go"], np.array(expected, np.float32), err_msg=str(options)
        )
    mixed = rlio.MixedInput([(store.uniform(batch_size=4, seed=0, derive=["mc_return"]), 1)], batch_size=8)
    assert "mc_return" in mixed.sample()


def test_columns_may_name_derived_columns_and_the_batch_has_these_alone(tmp_path: Path) -> None:
    data = recorded(tmp_path)
    names = ["t", "returns_to_go"]
    for cache in ("memory", "disk"):
        assert list(read(data, cache=cache, columns=names, derive=["returns_to_go"])) == names
    store = rlio.ReplayStore.open(data)
    drawn = store.uniform(batch_size=4, seed=0, columns=names, derive=["returns_to_go"]).sample()
    assert list(drawn) == names
    with pytest.raises(MissingColumn):
        read(data, cache="memory", columns=["t", "mc_return"], derive=["returns_to_go"])


def test_derived_columns_of_agents_are_of_each_agent(tmp_path: Path) -> None:
    parts = {pid: rows(1, 0, 3, end="terminated", seed=seed) for pid, seed in (("a", 1), ("b", 2))}
    data = written(tmp_path, rlio.MultiAgentBatch(parts, 3))
    batch = rlio.DatasetReader(data, epochs=1, derive=["episode_return"]).sample()
    for pid, own in parts.items():
        np.testing.assert_allclose(batch[pid]["episode_return"], own["rewards"].sum(), rtol=1e-5)


def test_deriving_is_refused_where_it_cannot_be_right(tmp_path: Path) -> None:
    data = recorded(tmp_path / "data")
    reader = rlio.DatasetReader
    for options in (
        {"derive": ["returns"]},
        {"derive": "mc_return"},
        {"derive": [3]},
        {"derive": ["mc_return()"]},
        {"derive": ["mc_return(much)"]},
        {"derive": ["mc_return(nan)"]},
        {"derive": ["returns_to_go(0.9)"]},
        {"derive": ["mc_return(0.9)", "mc_return(0.8)"]},
        {"derive": ["mc_return"], "filter": "mc_return(0.9) > 0"},
        {"filter": "mc_return(0.9) > 0 or mc_return(0.8) > 0"},
        {"filter": "mc_return(1.5) > 0"},
        {"filter": "mc_return(t) > 0"},
        {"filter": "episode_return(0.9) > 0"},
        {"derive": ["mc_return"], "cache": "none"},
        {"derive": ["mc_return(1.5)"]},
        {"filter": "episode_return > 0", "cache": "none"},
    ):
        with pytest.raises(OptionError):
            reader(data, **options)  # type: ignore[arg-type]
    with pytest.raises(MissingColumn):
        data.to_arrow(filter="episode_return > 0")
    live = rlio.ReplayStore(capacity=10)
    live.append(rows(1, 0, 3))
    for option in ({"derive": ["mc_return"]}, {"split": ("train", 0.5)}, {"filter": "episode_return > 0"}):
        with pytest.raises(OptionError):
            live.uniform(**option)  # type: ignore[arg-type]
        with pytest.raises(OptionError):
            rlio.FollowingReplay(tmp_path / "data", capacity=10, **option)  # type: ignore[arg-type]
    own = written(tmp_path / "own", rlio.SampleBatch(mc_return=[1.0], rewards=[1.0], terminateds=[True]))
    with pytest.raises(OptionError):
        reader(own, derive=["mc_return"], cache="memory", epochs=1).sample()
    assert reader(own, filter="mc_return > 0", cache="none", epochs=1).sample()["mc_return"].tolist() == [1.0]
    for cache in ("memory", "none"):
        with pytest.raises(OptionError, match="mc_return"):  # The discount would mean nothing.
            reader(own, filter="mc_return(0.5) > 0", cache=cache, epochs=1).sample()  # type: ignore[arg-type]
    bare = written(tmp_path / "bare", rlio.SampleBatch(rewards=[1.0]))
    with pytest.raises(MissingColumn):
        reader(bare, derive=["mc_return"], epochs=1).sample()


@pytest.mark.few(1)
@KEEPS
def test_filters_read_episode_columns_and_their_quantiles(tmp_path: Path, cache: Any) -> None:
    lengths = [3, 5, 4, 6, 8, 7, 9, 10, 12, 11]
    data = written(tmp_path, *(rows(DRAWN + n, 0, n, end="terminated") for n in lengths), rows(DRAWN, 0, 2))

    def chosen(text: str, **options: Any) -> list[int]:
        return sorted(
            {eps_id - DRAWN for eps_id in read(data, cache=cache, filter=text, **options)["eps_id"].tolist()}
        )

    assert chosen("episode_length > 8") == [9, 10, 11, 12]
    assert chosen("episode_length > 8 and t < 1") == [9, 10, 11, 12]
    assert chosen("episode_length >= quantile(0.9)") == [12]
    assert chosen("quantile(0.2) <= episode_length < quantile(0.5)") == [5, 6, 7]
    assert chosen("not episode_length > 3") == [0, 3]  # A NaN fails every comparison.
    returns = {n: float(rows(DRAWN + n, 0, n)["rewards"].astype(np.float64).sum()) for n in lengths}
    assert chosen("episode_return > 1.5") == sorted(n for n in lengths if returns[n] > 1.5)
    firsts = sorted(n for n in lengths if rows(DRAWN + n, 0, 1)["rewards"][0] > 0.5)
    assert chosen("mc_return(0.0) > 0.5 and t == 0") == firsts
    assert chosen("mc_return > 0.5 and t == 0", derive=["mc_return(0)"]) == firsts
    side = {eps_id - DRAWN for eps_id in read(data, cache=cache, split=("train", 0.5))["eps_id"].tolist()} - {
        0
    }
    median = np.quantile(sorted(side), 0.5)
    assert chosen("episode_length >= quantile(0.5)", split=("train", 0.5)) == sorted(
        n for n in side if n >= median
    )


def test_quantiles_are_refused_beside_anything_but_an_episode_column() -> None:
    parse = RowFilter.parse
    for text in (
        "quantile(0.5)", "rewards > quantile(0.5)", "episode_return > quantile(1.5)",
        "episode_return > quantile()",
        "episode_return > quantile(t)", "episode_return in (quantile(0.5),)", "quantile(0.1) < quantile(0.2)",
        "episode_return + 1 > quantile(0.5)", "quantile(0.5) > 1", "episode_return[0] > quantile(0.5)",
        "episode_return > -quantile(0.5)",
    ):  # fmt: skip
        with pytest.raises(OptionError):
            parse(text)
    assert parse("episode_return>=quantile(.9)").text == "episode_return >= quantile(0.9)"
    assert parse("quantile > 3").columns == ("quantile",)


def sides(data: rlio.Dataset, share: float, **options: Any) -> tuple[set[Any], set[Any]]:
    train, test = (read(data, split=(side, share), **options) for side in ("train", "test"))
    return set(train["eps_id"].tolist()), set(test["eps_id"].tolist())


def test_a_split_is_disjoint_and_equal_in_every_reader_and_stays_when_data_is_added_and_compacted(
    tmp_path: Path,
) -> None:
    ids = [DRAWN + 7 * n for n in range(60)]
    data = written(tmp_path, *(rows(eps_id, 0, 2, end="terminated") for eps_id in ids[:40]))
    train, test = sides(data, 0.7, cache="memory")
    assert not train & test
    assert train | test == set(ids[:40])
    assert 20 <= len(train) <= 36
    for options in ({"cache": "none"}, {"cache": "disk"}, {"cache": "none", "shuffle": True, "seed": 0}):
        assert sides(data, 0.7, **options) == (train, test)
    batch = read(data, split=("train", 0.7), cache="none", filter="t == 0")
    assert set(batch["eps_id"].tolist()) == train
    assert set(batch["t"].tolist()) == {0}
    grown = written(tmp_path, *(rows(eps_id, 0, 2, end="terminated") for eps_id in ids[40:]))
    rlio.maintenance.compact(tmp_path)
    more_train, more_test = sides(grown.refresh(), 0.7, cache="none")
    assert more_train & set(ids[:40]) == train
    assert more_test & set(ids[:40]) == test
    assert train <= sides(data, 0.9, cache="none")[0]


@pytest.mark.further
def test_small_ids_are_split_by_writer_also_after_a_merge(tmp_path: Path) -> None:
    for seed in range(2):
        written(tmp_path / "data", *(rows(n, 0, 2, end="terminated", seed=seed) for n in range(30)))
    data = rlio.open_dataset(tmp_path / "data")

    def kept(root: rlio.Dataset, cache: str) -> set[tuple[int, float]]:
        batch = read(root, split=("train", 0.5), cache=cache)
        return set(zip(batch["eps_id"].tolist(), batch["rewards"].tolist(), strict=True))

    streamed = kept(data, "none")
    assert kept(data, "memory") == kept(data, "disk") == streamed
    ids = [eps_id for eps_id, _ in streamed]
    assert any(ids.count(eps_id) == 2 for eps_id in ids)  # One writer's side says nothing of another's.
    rlio.maintenance.compact(tmp_path / "data", into=tmp_path / "merged")
    merged = rlio.open_dataset(tmp_path / "merged")
    assert len(merged.snapshot()) == 1
    assert kept(merged, "none") == kept(merged, "memory") == streamed
    # Rows of a writer beside merged ones name no original writer.
    written(tmp_path / "merged", *(rows(n, 0, 2, end="terminated", seed=2) for n in range(30)))
    both = merged.refresh()
    for cache in ("none", "memory"):
        batch = read(both, split=("train", 0.5), cache=cache, missing="fill")
        pairs = set(zip(batch["eps_id"].tolist(), batch["rewards"].tolist(), strict=True))
        assert streamed < pairs
        with pytest.raises(OptionError):
            read(both, split=("train", 0.5), cache=cache, missing="drop")


def test_drawn_ids_are_on_one_side_whoever_wrote_them() -> None:
    train = Split.of(["train", 0.5])
    drawn = np.arange(DRAWN, DRAWN + 200)
    assert (train.holds(drawn, "w00000-00000000") == train.holds(drawn, "w00001-00000000")).all()
    small = np.arange(200)
    assert (train.holds(small, "w00000-00000000") != train.holds(small, "w00001-00000000")).any()
    # These sides are promised for ever.
    assert np.flatnonzero(train.holds(drawn[:16], "")).tolist() == PROMISED_DRAWN
    assert np.flatnonzero(train.holds(small[:16], "w00000-00000000")).tolist() == PROMISED_SMALL
    names = np.array([f"episode-of-a-robot-{n}" for n in range(16)], object)
    assert np.flatnonzero(train.holds(names, "any")).tolist() == PROMISED_NAMES


PROMISED_DRAWN = [0, 1, 2, 8, 12]
PROMISED_SMALL = [0, 3, 4, 12, 13, 14, 15]
PROMISED_NAMES = [1, 3, 5, 7, 9, 10, 11, 12]


def test_agents_of_an_episode_are_on_one_side(tmp_path: Path) -> None:
    joint = [
        rlio.MultiAgentBatch({pid: rows(n, 0, 2, end="terminated") for pid in ("a", "b")}, 2)
        for n in range(20)
    ]
    data = written(tmp_path, *joint)
    batch = rlio.DatasetReader(data, epochs=1, batch_size=1000, split=("train", 0.5)).sample()
    assert set(batch["a"]["eps_id"].tolist()) == set(batch["b"]["eps_id"].tolist())
    assert 0 < len(set(batch["a"]["eps_id"].tolist())) < 20


def test_splits_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    data = recorded(tmp_path / "data")
    for wrong in (
        "train",
        ("train",),
        ("train", 1),
        ("train", 0.0),
        ("train", 1.0),
        ("valid", 0.5),
        ("train", "a"),
    ):
        with pytest.raises(OptionError):
            rlio.DatasetReader(data, split=wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError):
        rlio.FollowReader(tmp_path / "data", split=("train", 0.5))  # type: ignore[call-arg]
    nameless = written(tmp_path / "nameless", rlio.SampleBatch(rewards=[1.0, 2.0]))
    for cache in ("none", "memory"):
        with pytest.raises(MissingColumn):
            rlio.DatasetReader(nameless, split=("train", 0.5), cache=cache, epochs=1).sample()  # type: ignore[arg-type]


def test_a_draw_is_named_in_states_as_it_was_before_it_was_a_value() -> None:
    """Then n_step=3, gamma=0.5 and the like were keywords, and states of then must load."""
    plain = {"n_step": None, "sequences": None, "episodes": False, "policy": None, "filter": None}
    discounted = {**plain, "filter": "mc_return > 1 and t == 0", "gamma": 0.5}
    both = {"derive": ["mc_return"], **discounted}
    saved: list[tuple[Any, dict[str, Any]]] = [
        ({}, plain),
        ({"draw": rlio.NStep(3, gamma=0.5)}, {**plain, "n_step": [3, 0.5]}),
        ({"draw": rlio.Sequences(4)}, {**plain, "sequences": [4, 0, 0]}),
        ({"draw": rlio.Sequences(4, burn_in=2, overlap=1)}, {**plain, "sequences": [4, 2, 1]}),
        (
            {"draw": rlio.Sequences(4, starts="all", padding="left", layout="time")},
            {**plain, "sequences": [4, 0, 0, "all", "left", "time"]},
        ),
        ({"draw": rlio.WholeEpisodes()}, {**plain, "episodes": True}),
        ({"derive": ["mc_return"]}, {**plain, "derive": ["mc_return"], "gamma": 0.99}),
        ({"derive": ["mc_return(0.5)"]}, {**plain, "derive": ["mc_return"], "gamma": 0.5}),
        ({"filter": "(mc_return(0.5) > 1) & (t == 0)"}, discounted),
        ({"filter": "mc_return > 1 and t == 0", "derive": ["mc_return(0.5)"]}, both),
        ({"filter": "mc_return(0.5) > 1 and t == 0", "derive": ["mc_return (.5)"]}, both),
    ]
    for given, expected in saved:
        assert draw_of(given).to_json() == expected, given


def test_a_state_loads_only_with_the_same_split_derived_columns_and_layout(tmp_path: Path) -> None:
    data = recorded(tmp_path)
    options: Any = {"batch_size": 2, "shuffle": True, "seed": 0, "cache": "memory"}
    given: Any = {"split": ("train", 0.9), "derive": ["mc_return(0.9)"], "draw": rlio.Sequences(2)}
    reader = rlio.DatasetReader(data, **given, **options)
    reader.sample()
    state = json.loads(json.dumps(reader.state_dict()))
    for change in (
        {"split": ("test", 0.9)}, {"split": ("train", 0.8)}, {"split": None}, {"derive": ["mc_return"]},
        {"derive": ["mc_return(0.9)", "episode_return"]}, {"draw": rlio.Sequences(2, starts="all")},
        {"draw": rlio.Sequences(2, layout="time")}, {"draw": None},
        {"draw": rlio.Sequences(2, layout="time", padding="left")},
    ):  # fmt: skip
        with pytest.raises((StateError, RlioError)):
            rlio.DatasetReader(data, **{**given, **change}, **options).load_state_dict(state)
    again = rlio.DatasetReader(data, **given, **options)
    again.load_state_dict(state)
    assert again.sample().equals(reader.sample())
    assert "derive" not in json.dumps(rlio.DatasetReader(data, **options).state_dict())


# ---- sequences ----


def test_sequences_as_batch_and_time_hold_the_rows_of_padded_sequences(tmp_path: Path) -> None:
    data = recorded(tmp_path)
    cuts: tuple[dict[str, int], ...] = ({}, {"burn_in": 2}, {"overlap": 2}, {"overlap": 2, "burn_in": 1})
    for cut in cuts:
        flat = read(data, cache="memory", draw=rlio.Sequences(4, **cut))  # type: ignore[arg-type]
        time = read(data, cache="memory", draw=rlio.Sequences(4, layout="time", **cut))  # type: ignore[arg-type]
        length = 4 + cut.get("burn_in", 0)
        sizes = flat["seq_lens"]
        assert time["mask"].shape == (len(sizes), length)
        assert (time["mask"] == (np.arange(length) < sizes[:, None])).all()
        for name in flat:
            if name != "seq_lens":
                assert time[name].shape == (len(sizes), length, *flat[name].shape[1:])
                np.testing.assert_array_equal(time[name].reshape(flat[name].shape), flat[name])
        assert "seq_lens" not in time


def test_left_padding_puts_the_rows_at_the_end(tmp_path: Path) -> None:
    data = written(tmp_path, rows(1, 0, 6, end="terminated"))
    batch = read(data, cache="memory", draw=rlio.Sequences(4, padding="left", layout="time"))
    assert batch["t"].tolist() == [[0, 1, 2, 3], [0, 0, 4, 5]]
    assert batch["mask"].tolist() == [[True] * 4, [False, False, True, True]]


def test_a_sequence_begins_at_each_row_if_all_starts_are_drawn(tmp_path: Path) -> None:
    data = written(tmp_path, rows(1, 0, 5, end="terminated"), rows(2, 0, 2, end="terminated"))
    batch = read(data, cache="memory", draw=rlio.Sequences(3, starts="all", layout="time"))
    found = [t[m].tolist() for t, m in zip(batch["t"], batch["mask"], strict=True)]
    assert found == [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4], [4], [0, 1], [1]]
    warm = read(data, cache="memory", draw=rlio.Sequences(2, burn_in=2, starts="all", layout="time"))
    assert warm["t"][3].tolist() == [1, 2, 3, 4]
    assert warm["burn_in"][3].tolist() == [True, True, False, False]


def test_priorities_of_sequences_in_time_layout_are_one_a_sequence(tmp_path: Path) -> None:
    store = rlio.ReplayStore.open(recorded(tmp_path))
    sampler = store.prioritised(batch_size=6, seed=0, draw=rlio.Sequences(4, layout="time"))
    batch = sampler.sample()
    assert batch["weights"].shape == batch["batch_indexes"].shape == (6,)
    sampler.update_priorities(batch["batch_indexes"], np.ones(6))
    assert len(batch) == 6


def test_recurrent_states_have_one_row_a_sequence_in_time_layout(tmp_path: Path) -> None:
    batch = rows(1, 0, 6, end="terminated")
    batch["state_out_0"] = np.arange(6.0)[:, None]
    data = written(tmp_path, batch)
    found = read(data, cache="memory", draw=rlio.Sequences(3, layout="time"))
    assert found["state_in_0"].tolist() == [[0.0], [2.0]]


def test_normalised_padding_stays_zero_in_time_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = recorded(tmp_path / "data")
    batch = read(
        data, cache="memory", draw=rlio.Sequences(5, padding="left", layout="time"), normalise="mean_std"
    )
    assert (~batch["mask"]).any()
    assert (batch["obs"][~batch["mask"]] == 0).all()
    assert (batch["obs"][batch["mask"]] != 0).any()


def test_sequences_in_time_layout_are_mixed_as_rows(tmp_path: Path) -> None:
    data = recorded(tmp_path)
    store = rlio.ReplayStore.open(data)
    readers = [store.uniform(batch_size=4, seed=n, draw=rlio.Sequences(4, layout="time")) for n in range(2)]
    batch = rlio.MixedInput([(reader, 1) for reader in readers], batch_size=6).sample()
    assert batch["obs"].shape == (6, 4, 1)


def test_a_loader_of_torch_gives_derived_split_and_normalised_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = recorded(tmp_path / "data")
    options: Any = {
        "draw": rlio.Sequences(3, layout="time"), "derive": ["returns_to_go"], "split": ("train", 0.9),
        "normalise": "mean_std", "cache": "memory", "shuffle": True, "seed": 0,
    }  # fmt: skip
    expected = rlio.DatasetReader(data, batch_size=2, **options).sample()
    dataset = rlio.torch.ReplayDataset(tmp_path / "data", batch_size=2, **options)
    with dataset.loader(num_workers=0) as loader:
        batch = next(loader)
    assert torch.is_tensor(batch["returns_to_go"])
    for name, values in expected.items():
        np.testing.assert_array_equal(batch[name].numpy(), values)


def test_layouts_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    data = recorded(tmp_path / "data")
    wrong: tuple[dict[str, Any], ...] = (
        {"padding": "left"}, {"overlap": 1, "starts": "all"}, {"layout": "batch"}, {"starts": "some"},
        {"padding": "middle", "layout": "time"}, {"overlap": 3}, {"burn_in": -1},
    )  # fmt: skip
    for cut in wrong:
        with pytest.raises(OptionError, match=r"^Sequences[.:]"):
            rlio.Sequences(3, **cut)
    with pytest.raises(OptionError):
        rlio.DatasetReader(data, draw=rlio.Sequences(3, layout="time"), cache="none")
    batch = rows(1, 0, 3)
    batch["mask"] = np.ones(3)
    own = written(tmp_path / "own", batch)
    with pytest.raises(OptionError):
        rlio.DatasetReader(own, draw=rlio.Sequences(2, layout="time"), epochs=1).sample()
