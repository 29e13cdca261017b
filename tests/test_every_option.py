"""Every option of readers works on the files of other libraries, with the rows of rlio's own data."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from further import first, further, some
from kinds import WHOLE, episodes_of, made, with_final

import rlio.torch
from rlio.errors import CorruptData, OptionError, StateError
from rlio.formats.tables.mapping import MappedSource
from rlio.readers import stored_pass
from rlio.source.episodes import EpisodeFiles

LENGTHS = [3, 1, 7, 5, 4, 6, 2, 9, 8, 5]
ROWS = sum(LENGTHS)
SUFFIXES = {"minari": "", "d3rlpy": ".h5", "npz": "", "rllib-json": "", "d4rl": ".hdf5", "parquet": ""}
#: Kinds that rlio only reads, made by hand, and HDF5 whose groups are episodes.
MADE = (*WHOLE, "groups")
FORMATS = (*SUFFIXES, "mapped.csv", *MADE)
#: Of the HDF5.
GROUPS = rlio.Mapping(
    {"obs": "obs", "actions": "actions", "rewards": "rewards"},
    episode="data/demo_*",
    terminated="end",
    truncated="stop",
    next_obs="derive",
    final_row=True,
)
#: Of the CSV.
MAPPING = rlio.Mapping(
    {"obs": ["x", "y"], "actions": "act", "rewards": "rew"},
    episode="trip",
    terminated="end",
    truncated="stop",
    next_obs=["x2", "y2"],
    dtypes={"obs": "float32", "rewards": "float32"},
)
OPTIONS: dict[str, dict[str, Any]] = {
    "in order": {},
    "columns": {"columns": ["rewards", "actions"]},
    "shuffled in memory": {"shuffle": True, "seed": 3},
    "filter": {"filter": "rewards > 20", "shuffle": True, "seed": 3},
    "filter without a store": {"filter": "rewards > 20", "cache": "none"},
    "quantile of episodes": {"filter": "episode_return >= quantile(0.5)"},
    "n_step": {"draw": rlio.NStep(3, gamma=0.9)},
    "sequences": {"draw": rlio.Sequences(4, burn_in=1, overlap=1), "shuffle": True, "seed": 1},
    "layout": {"draw": rlio.Sequences(4, starts="all", padding="left", layout="time")},
    "episodes": {"draw": rlio.WholeEpisodes(), "batch_size": 3},
    "derive": {"derive": ["returns_to_go", "mc_return(0.5)", "episode_length"]},
    "normalise": {"normalise": "mean_std"},
    "ranks": {"shuffle": True, "seed": 5, "shard": (1, 3)},
    "drop_last": {"drop_last": True},
    "indexes": {"indexes": True, "shuffle": True, "seed": 2},
}


#: Ways to read, and where "auto" keeps the rows: if they fit into memory, if on disk, and if nowhere.
KEPT: dict[str, tuple[dict[str, Any], list[str]]] = {
    "recorded order": ({}, ["none", "none", "none"]),
    "fewer columns": ({"columns": ["rewards"]}, ["none", "none", "none"]),
    "shuffled": ({"shuffle": True, "seed": 3}, ["memory", "disk", "none"]),
    "filtered": ({"filter": "rewards > 20"}, ["memory", "disk", "none"]),
    "one side": ({"split": ("train", 0.5)}, ["memory", "disk", "none"]),
    "n steps": ({"draw": rlio.NStep(2)}, ["memory", "disk", "disk"]),
    "sequences": ({"draw": rlio.Sequences(3)}, ["memory", "disk", "disk"]),
    "episodes": ({"draw": rlio.WholeEpisodes()}, ["memory", "disk", "disk"]),
    "derived": ({"derive": ["returns_to_go"]}, ["memory", "disk", "disk"]),
    "by episode": ({"filter": "episode_return > 9"}, ["memory", "disk", "disk"]),
    "numbered": ({"indexes": True}, ["memory", "disk", "disk"]),
}
#: Those that `make test` shows: of each rule, and where rows are chosen, drawn and derived.
SHOWN = ("recorded order", "shuffled", "filtered", "n steps", "derived", "by episode")


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same episodes as a data set of rlio, and in other formats."""
    folder = tmp_path_factory.mktemp("every-option")
    ids = np.arange(ROWS)
    starts = np.repeat(np.cumsum(LENGTHS) - LENGTHS, LENGTHS)
    last = np.isin(ids, np.cumsum(LENGTHS) - 1)
    with rlio.ParquetWriter(folder / "rlio") as writer:
        writer.write(
            rlio.SampleBatch(
                obs=np.stack([ids, ids % 7], 1).astype(np.float32),
                new_obs=np.stack([ids + 1, (ids + 1) % 7], 1).astype(np.float32),
                actions=ids % 5,
                rewards=ids.astype(np.float32),
                terminateds=last & (ids % 2 == 0),
                truncateds=last & (ids % 2 == 1),
                eps_id=np.repeat(np.arange(len(LENGTHS)), LENGTHS),
                t=ids - starts,
            )
        )
    found = {"rlio": folder / "rlio"}
    own = rlio.open_dataset(folder / "rlio").to_pandas()
    own[["x", "y"]], own[["x2", "y2"]] = np.stack(own.pop("obs")), np.stack(own.pop("new_obs"))
    names = {"actions": "act", "rewards": "rew", "terminateds": "end", "truncateds": "stop", "eps_id": "trip"}
    own.rename(columns=names).to_csv(folder / "mapped.csv", index=False)
    found["mapped.csv"] = folder / "mapped.csv"
    with rlio.read(folder / "rlio", epochs=1, batch_size=ROWS) as reader:
        rows = reader.sample()
    for name in WHOLE:
        found[name] = made(name, rows, folder)
    found["groups"] = groups(rows, folder / "groups.hdf5")
    for name in SUFFIXES:
        target = folder / f"{name}{SUFFIXES[name]}"
        rlio.convert(folder / "rlio", target, to=name)
        found[name] = target
    return found


def groups(rows: rlio.SampleBatch, path: Path) -> Path:
    """HDF5 with a group an episode."""
    with h5py.File(path, "w") as file:
        for number, episode in enumerate(episodes_of(rows)):
            group = file.create_group(f"data/demo_{number}")
            group["obs"], group["actions"] = with_final(episode), episode["actions"]
            group["rewards"] = episode["rewards"]
            group["end"], group["stop"] = episode["terminateds"], episode["truncateds"]
    return path


def meaning(root: Path) -> dict[str, Any]:
    """What its columns mean, where it is a table."""
    if root.name == "groups.hdf5":
        return {"mapping": GROUPS}
    return {"mapping": MAPPING} if root.suffix == ".csv" else {}


def batches(root: Any, **options: Any) -> list[rlio.SampleBatch]:
    with rlio.read(root, **{"batch_size": 5, "epochs": 1, **meaning(root), **options}) as reader:
        return list(reader)


def same(found: list[rlio.SampleBatch], expected: list[rlio.SampleBatch]) -> None:
    assert [len(batch) for batch in found] == [len(batch) for batch in expected]
    for ours, theirs in zip(found, expected, strict=True):
        # A format that does not store the last observations says so: they are zeros, and give no bootstrap.
        lost = {"new_obs", "bootstrap_mask"} if "new_obs_valid" in ours else set()
        for name in theirs.keys() - lost:
            values = ours[name].reshape(theirs[name].shape)  # d3rlpy has actions of shape (n, 1).
            np.testing.assert_allclose(values, theirs[name], rtol=1e-6, err_msg=name)


@pytest.mark.few(3)
@pytest.mark.each_value_once
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("name", FORMATS)
def test_an_option_gives_the_rows_that_it_gives_on_own_data(
    roots: dict[str, Path], name: str, options: dict[str, Any]
) -> None:
    same(batches(roots[name], **options), batches(roots["rlio"], **options))


@pytest.mark.few(2)
@pytest.mark.each_value_once
@pytest.mark.parametrize("cache", ["none", "memory", "disk"])
@pytest.mark.parametrize("name", some(2, FORMATS, start=1))
def test_ranks_get_every_row_once_and_a_state_continues(
    roots: dict[str, Path], name: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLIO_CACHE", str(tmp_path))
    options: Any = {"batch_size": 4, "epochs": 2, "shuffle": True, "seed": 7, "cache": cache}
    options |= meaning(roots[name])
    rows: list[float] = []
    for rank in range(3):
        with rlio.read(roots[name], shard=(rank, 3), **options) as reader:
            rows += [value for batch in reader for value in batch["rewards"].tolist()]
    assert sorted(rows) == sorted([*range(ROWS)] * 2)
    with rlio.read(roots[name], **options) as reader:
        reader.sample(3)
        state = reader.state_dict()
        rest = [batch["rewards"].tolist() for batch in reader]
    with rlio.read(roots[name], **options) as reader:
        reader.load_state_dict(state)
        assert [batch["rewards"].tolist() for batch in reader] == rest
    with rlio.read(roots[name], **{**options, "columns": ["rewards"]}) as reader, pytest.raises(StateError):
        reader.load_state_dict(state)


@pytest.mark.few(2)
@pytest.mark.each_value_once
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", some(2, FORMATS))
def test_a_loader_of_torch_gives_each_rank_the_batches_of_a_reader(
    roots: dict[str, Path], name: str, workers: int
) -> None:
    root: Any = roots[name]
    options: Any = {"batch_size": 4, "epochs": 2, "shuffle": True, "seed": 7}
    with rlio.read(root, shard=(1, 3), **options, **meaning(root)) as reader:
        expected = [batch["rewards"].tolist() for batch in reader]
    if meaning(root):
        root = rlio.open_dataset(root, **meaning(root))
    dataset = rlio.torch.ReplayDataset(root, rank=1, world=3, transform=rewards_of, **options)
    with dataset.loader(num_workers=workers) as loader:
        found = [next(loader) for _ in range(3)]
        state = loader.state_dict()
    again = pickle.loads(pickle.dumps(dataset))
    with again.loader(num_workers=2 - workers) as loader:
        loader.load_state_dict(state)
        assert found + list(loader) == expected


def rewards_of(batch: Any) -> list[float]:
    found: list[float] = batch["rewards"].tolist()
    return found


def test_a_loader_of_torch_reads_a_table_in_memory_and_refuses_a_mixture(roots: dict[str, Path]) -> None:
    table = pd.DataFrame({"x": np.arange(6.0), "a": np.arange(6), "end": np.arange(6) % 3 == 2})
    mapping = rlio.Mapping({"obs": ["x"], "actions": "a"}, terminated="end", next_obs="derive")
    data = rlio.open_dataset(table, mapping=mapping)
    with rlio.torch.ReplayDataset(data, batch_size=4, epochs=1).loader(num_workers=2) as loader:
        assert [batch["actions"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5]]
    with pytest.raises(OptionError, match=r"MixedInput.*stored.*prefetch"):
        rlio.torch.ReplayDataset({str(roots["rlio"]): 0.5, str(roots["minari"]): 0.5}, batch_size=4)


@pytest.mark.parametrize("cache", ["disk", *further("none", "memory")])
def test_damaged_episodes_are_lost_alone(
    roots: dict[str, Path], cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLIO_CACHE", str(tmp_path / "cache"))
    rlio.convert(roots["rlio"], tmp_path / "damaged", to="minari")
    with h5py.File(tmp_path / "damaged/data/main_data.hdf5", "r+") as file:
        for name in ("episode_4/observations", "episode_1/actions"):
            short = file[name][:-1]
            del file[name]
            file[name] = short
    options: Any = {"batch_size": 5, "epochs": 1, "cache": cache}
    with pytest.raises(CorruptData, match="episode 1 of 1 steps has 0 actions"):
        batches(tmp_path / "damaged", **options)
    good = [number for number in range(ROWS) if number != 3 and not 16 <= number < 20]
    for more in ({}, {"shuffle": True, "seed": 1}, {"filter": "rewards >= 0"}):
        for _ in range(2):  # The second time, a store on disk is there already.
            with rlio.read(tmp_path / "damaged", **options, **more, on_error="skip") as reader:
                rows = [value for batch in reader for value in batch["rewards"].tolist()]
                assert sorted(rows) == good
                assert reader.skipped == 2
                assert sorted(error.record for error in reader.errors) == [1, 4]


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, {"shuffle": True, "seed": 1}, {"cache": "memory"}], ids=str)
def test_a_damaged_episode_of_a_run_is_lost_alone(
    roots: dict[str, Path], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short episodes are read up to 4,096 rows at once, and all of them were lost."""
    bad, calls = {3, 8}, []
    real = MappedSource.load_run

    def damaged(self: MappedSource, first: int, stop: int, columns: Any) -> rlio.SampleBatch:
        calls.append(stop - first)
        if bad.intersection(range(first, stop)):
            raise CorruptData("damaged")
        return real(self, first, stop, columns)

    monkeypatch.setattr(MappedSource, "load_run", damaged)
    with pytest.raises(CorruptData, match="damaged"):
        batches(roots["npz"], **options)
    starts = np.cumsum(LENGTHS) - LENGTHS
    good = np.concatenate([np.arange(LENGTHS[n]) + starts[n] for n in range(len(LENGTHS)) if n not in bad])
    with rlio.read(roots["npz"], epochs=1, on_error="skip", **{"cache": "none", **options}) as reader:
        rows = [value for batch in reader for value in batch["rewards"].tolist()]
        assert sorted(rows) == good.tolist()
        assert {error.record for error in reader.errors} == bad
        assert reader.skipped == len(bad)
    with rlio.ReplayStore.open(roots["npz"], on_error="skip") as store:
        assert len(store) == len(good)
    bad.clear()
    calls.clear()
    with rlio.read(roots["npz"], epochs=1, on_error="skip", cache="none") as reader:
        assert sum(map(len, reader)) == ROWS
    assert max(calls) > 5  # Undamaged ones are read in runs.
    assert len(calls) <= 4


@pytest.mark.few(2)
@pytest.mark.each_value_once
@pytest.mark.parametrize("cache", ["memory", "disk"])
@pytest.mark.parametrize("name", some(2, FORMATS, start=1))
def test_a_store_of_files_draws_the_rows_of_own_data(
    roots: dict[str, Path], name: str, cache: Any, tmp_path: Path
) -> None:
    folder = {"cache_folder": tmp_path} if cache == "disk" else {}
    with rlio.ReplayStore.open(roots["rlio"]) as own:
        for _ in range(2):
            with rlio.ReplayStore.open(roots[name], cache=cache, **folder, **meaning(roots[name])) as store:
                assert len(store) == ROWS
                for draw in ({}, {"draw": rlio.NStep(2)}, {"filter": "rewards > 9"}):
                    same(
                        [store.uniform(batch_size=8, seed=1, **draw).sample()],
                        [own.uniform(batch_size=8, seed=1, **draw).sample()],
                    )
    with pytest.raises(OptionError, match="snapshot of a data set of rlio"):
        rlio.ReplayStore.open(roots[name], at={}, **meaning(roots[name]))


def test_a_store_takes_the_options_of_a_format_that_a_reader_takes(roots: dict[str, Path]) -> None:
    spaces = (gym.spaces.Box(-1e6, 1e6, (2,)), gym.spaces.Discrete(5))
    frame = pd.read_csv(roots["mapped.csv"])
    options: dict[str, Any]
    for source, options in (
        (roots["rllib-json"], {"spaces": spaces}),
        (roots["rllib-json"], {"format_options": {"infos": "obs"}}),
        ([*(roots["rllib-json"]).rglob("*.json")], {"spaces": spaces}),
        (roots["npz"], {"format": "npz"}),
        ([*roots["npz"].rglob("*.npz")], {}),
        (frame, {"mapping": MAPPING}),
        ([roots["mapped.csv"]], {"mapping": MAPPING, "format_options": {"delimiter": ","}}),
    ):
        with (
            rlio.ReplayStore.open(source, **options) as store,
            rlio.read(
                source, cache="memory", batch_size=8, epochs=1, seed=1, shuffle=True, **options
            ) as reader,
        ):
            found, expected = store.epochs(batch_size=8, epochs=1, seed=1).sample(), reader.sample()
            assert {n: c.dtype for n, c in found.items()} == {n: c.dtype for n, c in expected.items()}
            same([found], [expected])
    for name, options in (
        ("minari", {"spaces": spaces}),
        ("minari", {"mapping": MAPPING}),
        ("rllib-json", {"format_options": {"delimiter": ","}}),
        ("npz", {"format_options": {"delimiter": ","}}),
        ("rlio", {"format_options": {"infos": "obs"}}),
        ("rlio", {"format": "minari"}),
    ):
        with pytest.raises(rlio.RlioError, match=r"spaces|option|format|kind"):
            rlio.ReplayStore.open(roots[name], **options)


@pytest.mark.further
def test_sides_of_a_split_have_whole_episodes_and_all_rows_together(roots: dict[str, Path]) -> None:
    for name in FORMATS:
        sides = {side: batches(roots[name], split=(side, 0.5)) for side in ("train", "test")}
        ids = {side: {e for b in found for e in b["eps_id"].tolist()} for side, found in sides.items()}
        assert not ids["train"] & ids["test"]
        assert len(ids["train"] | ids["test"]) == len(LENGTHS)
        assert sum(len(batch) for found in sides.values() for batch in found) == ROWS


@pytest.mark.further
def test_a_long_episode_is_read_in_parts(roots: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from rlio.formats.minari.source import MinariSource

    expected = batches(roots["minari"])
    read: list[int] = []
    real = MinariSource._load

    def counted(self: MinariSource, episode: int, part: range | None, columns: Any) -> rlio.SampleBatch:
        found = real(self, episode, part, columns)
        read.append(len(found))
        return found

    monkeypatch.setattr("rlio.source.episodes._GROUP_ROWS", 4)
    monkeypatch.setattr(MinariSource, "_load", counted)
    for cache in ("none", "memory"):
        same(batches(roots["minari"], cache=cache), expected)
    same(batches(roots["minari"], draw=rlio.NStep(3)), batches(roots["rlio"], draw=rlio.NStep(3)))
    assert max(read) <= 9
    with rlio.read(roots["minari"], epochs=1, cache="none") as reader:
        read.clear()
        list(reader)
        assert max(read) <= 4


@pytest.mark.parametrize("name", ["json", "parquet"])
def test_a_column_whose_name_has_a_slash_is_read_by_its_name(name: str, tmp_path: Path) -> None:
    """It was taken for a part of a nested column (NPZ and CSV have such parts), and gave nothing."""
    rows = {"obs": [0.5, 1.5], "actions": [0, 1], "rewards": [1.0, 2.0], "terminateds": [False, True]}
    columns: dict[str, Any] = {**rows, "eps_id": [0, 0], "t": [0, 1], "infos/speed": [3.0, 4.0]}
    path = tmp_path / f"a.{name}"
    if name == "json":
        path.write_text(json.dumps({"type": "SampleBatch", **columns}))
    else:
        pq.write_table(pa.table(columns), path)
    for more in ({"cache": "none"}, {"cache": "memory", "filter": "rewards > 0"}):
        (batch,) = batches(path, columns=["infos/speed"], **more)
        assert batch["infos/speed"].tolist() == [3.0, 4.0]
        assert set(batch) == {"infos/speed"}


def test_content_has_another_identity_after_a_change_of_equal_size(
    roots: dict[str, Path], tmp_path: Path
) -> None:
    rlio.convert(roots["rlio"], tmp_path / "a", to="minari")
    path = tmp_path / "a/data/main_data.hdf5"

    def identities() -> tuple[str, str]:
        with rlio.read(tmp_path / "a", epochs=1) as reader:
            files = EpisodeFiles(reader.source, about={})  # type: ignore[attr-defined]  # An EpisodeReader.
            return files.state_identity, files.content_identity

    before = identities()
    assert identities() == before
    with h5py.File(path, "r+") as file:
        file["episode_0/actions"][0] = 4
    after = identities()
    assert after[0] == before[0]
    assert after[1] != before[1]


@pytest.mark.few(6)
@pytest.mark.parametrize("name", FORMATS)
def test_a_state_of_a_reader_of_records_or_of_earlier_versions_is_refused(
    name: str, roots: dict[str, Path]
) -> None:
    with rlio.read(roots["rllib-json"]) as records:
        records.sample()
        position = records.state_dict()["position"]
    with rlio.read(roots[name], batch_size=4, **meaning(roots[name])) as reader:
        state = {**reader.state_dict(), "position": position}
        with pytest.raises(StateError, match="whole records"):
            reader.load_state_dict(state)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", first(2, [*SHOWN, *(name for name in KEPT if name not in SHOWN)]))
def test_where_rows_are_kept_follows_one_rule_for_every_source(
    roots: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The rule of docs/reading.md, at sizes below, between and above its two bounds."""
    monkeypatch.setenv("RLIO_CACHE", str(tmp_path))
    options, expected = KEPT[name]
    with rlio.read(roots["rlio"], batch_size=ROWS, epochs=1) as reader:
        columns = dict(reader.sample())  # type: ignore[call-overload]  # One policy.
    opens: dict[str, Callable[..., Any]] = {
        source: partial(rlio.read, root, batch_size=4, **meaning(root), **options)
        for source, root in roots.items()
    }
    if set(options) <= {"shuffle", "seed"}:
        opens["arrays"] = partial(rlio.from_arrays, columns, batch_size=4, **options)
    for source, opened in opens.items():
        found = []
        for memory, disk in ((1 << 20, 1 << 20), (0, 1 << 20), (0, 0)):
            monkeypatch.setattr(stored_pass, "_MEMORY_BYTES", memory)
            monkeypatch.setattr(stored_pass, "_DISK_BYTES", disk)
            with opened() as reader:
                found.append(reader.cache)
        assert found == expected, source


def test_records_as_they_were_written_are_kept_nowhere(roots: dict[str, Path]) -> None:
    with rlio.JsonReader(roots["rllib-json"]) as reader:
        assert reader.cache == "none"
        assert reader.seed is None
        with pytest.raises(OptionError, match="batch_size"):
            reader.skip(1)


# ---- as a data set ----


def opened(root: Path) -> rlio.Dataset:
    return rlio.open_dataset(root, **meaning(root))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", some(2, FORMATS))
def test_files_open_as_a_data_set_with_the_rows_episodes_statistics_and_exports_of_own_data(
    roots: dict[str, Path], name: str, tmp_path: Path
) -> None:
    own, data = rlio.open_dataset(roots["rlio"]), opened(roots[name])
    again = pickle.loads(pickle.dumps(data))
    assert isinstance(data, rlio.Dataset)
    assert (len(data), data.episode_count) == (len(again), again.episode_count) == (ROWS, len(LENGTHS))
    for number in (0, 3, 7, -1):
        ours, theirs = data.episode(number), own.episode(number)
        assert np.asarray(ours.actions).ravel().tolist() == np.asarray(theirs.actions).ravel().tolist()
        assert np.asarray(ours.rewards).tolist() == np.asarray(theirs.rewards).tolist()
        steps = LENGTHS[number]
        assert (
            np.asarray(ours.observations)[:steps].tolist() == np.asarray(theirs.observations)[:steps].tolist()
        )
        assert (ours.terminated, ours.truncated) == (theirs.terminated, theirs.truncated)
    for index in (len(LENGTHS), -len(LENGTHS) - 1):
        with pytest.raises(IndexError):
            data.episode(index)
    numbers = [41, 0, 7, 7, 49]
    same([data.take(numbers)], [own.take(numbers)])
    assert data[3]["rewards"] == own[3]["rewards"]
    columns = ["obs", "rewards", "t", "eps_id"]
    assert data.to_arrow(columns=columns).to_pydict() == own.to_arrow(columns=columns).to_pydict()
    some = {"columns": ["rewards"], "filter": "rewards > 20"}
    assert data.to_pandas(**some)["rewards"].tolist() == own.to_pandas(**some)["rewards"].tolist()
    ours_stats, theirs_stats = (one.stats(["obs"], cache_folder=tmp_path / "stats") for one in (data, own))
    np.testing.assert_allclose(ours_stats["obs"].mean, theirs_stats["obs"].mean)
    counted = [(e.rows, e.end, e.t0, e.reward) for e in data.episode_parts()]
    assert len(data.episode(2)) == LENGTHS[2]  # Also after the episodes were listed again.
    assert counted == [(e.rows, e.end, e.t0, e.reward) for e in own.episode_parts()]
    for column in ("episode", "length", "return", "terminated", "truncated", "finished", "start_time"):
        np.testing.assert_array_equal(data.episodes[column], own.episodes[column])
    assert data.returns().tolist() == [float(data.episode(n).total_reward) for n in range(len(LENGTHS))]
    assert data.lengths().tolist() == list(LENGTHS)
    assert set(data.columns["default_policy"]) >= {"obs", "actions", "rewards"}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", ["d4rl", "npz", "mapped.csv", *further("minari", "d3rlpy", "rllib-json", "parquet")]
)
def test_a_data_set_of_files_is_read_stored_and_converted_as_the_files_are(
    roots: dict[str, Path], name: str, tmp_path: Path
) -> None:
    data = opened(roots[name])
    options: dict[str, Any] = {"batch_size": 5, "epochs": 1, "shuffle": True, "seed": 2}
    with rlio.read(data, **options) as reader:
        same(list(reader), batches(roots[name], **options))
    with rlio.ReplayStore.open(data) as store, rlio.ReplayStore.open(roots["rlio"]) as own:
        draws = [one.uniform(batch_size=8, seed=1).sample() for one in (store, own)]
        same(draws[:1], draws[1:])
    assert rlio.convert(data, tmp_path / "out", prove=True).rows == ROWS
    with pytest.raises(OptionError, match=r"rlio\.read"):
        rlio.DatasetReader(data)


def test_methods_that_need_shards_raise_and_name_the_conversion(roots: dict[str, Path]) -> None:
    data = opened(roots["minari"])
    needs: tuple[Any, ...] = (
        data.snapshot,
        data.refresh,
        lambda: data.part({}),
        data.files,
        data.cut_files,
        data.bytes,
        data.missing_shards,
        lambda: data.open_shard(data.segments[0]),
        lambda: data.digest,
        lambda: data.storage,
        lambda: data.to_arrow(writers=True),
        lambda: rlio.FollowReader(data),
    )
    for each in needs:
        with pytest.raises(OptionError, match="rlio convert"):
            each()
    with pytest.raises(OptionError, match="snapshot of a data set of rlio"):
        rlio.open_dataset(roots["minari"], at={})
    with pytest.raises(OptionError, match="format_options"):
        rlio.open_dataset(roots["rlio"], format_options={"infos": "obs"})
    with pytest.raises(OptionError, match=r"mapping=rlio\.Mapping"):
        rlio.open_dataset(roots["mapped.csv"], episode="trip")


def test_episodes_and_exports_of_a_large_file_are_read_group_by_group(
    roots: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlio.formats.minari.source import MinariSource

    expected = opened(roots["minari"]).to_arrow().to_pydict()
    read: list[tuple[int, Any]] = []
    real = MinariSource._load

    def counted(self: MinariSource, episode: int, part: range | None, columns: Any) -> rlio.SampleBatch:
        found = real(self, episode, part, columns)
        read.append((len(found), columns))
        return found

    monkeypatch.setattr("rlio.source.episodes._GROUP_ROWS", 4)
    monkeypatch.setattr(MinariSource, "_load", counted)
    monkeypatch.setattr("rlio.look.episode_table.read_kept", lambda _: None)
    data = opened(roots["minari"])
    assert data.episode_count == len(LENGTHS)
    assert data.episode(7).rewards[0] == sum(LENGTHS[:7])  # Nine steps, in three groups.
    read.clear()
    data.episode(2)
    assert [rows for rows, _ in read] == [4, 3]
    read.clear()
    list(data.episode_parts())
    assert data.lengths().tolist() == list(LENGTHS)
    assert sum(rows for rows, _ in read) == ROWS
    assert max(rows for rows, _ in read) <= 4
    assert all(columns is not None and "obs" not in columns for _, columns in read)
    stream = data.to_arrow_batches()
    read.clear()
    assert stream.read_all().to_pydict() == expected
    assert max(rows for rows, _ in read) <= 4


def test_a_damaged_episode_is_missing_from_an_export_alone_if_it_is_skipped(
    roots: dict[str, Path], tmp_path: Path
) -> None:
    rlio.convert(roots["rlio"], tmp_path / "damaged", to="minari")
    with h5py.File(tmp_path / "damaged/data/main_data.hdf5", "r+") as file:
        short = file["episode_4/observations"][:-1]
        del file["episode_4/observations"]
        file["episode_4/observations"] = short
    data = opened(tmp_path / "damaged")
    with pytest.raises(CorruptData):
        data.to_arrow()
    rows = data.to_arrow(columns=["rewards", "obs"], on_error="skip")["rewards"].to_pylist()
    assert rows == [float(number) for number in range(ROWS) if not 16 <= number < 20]


#: Format -> the file below its path, and the rewards of an episode in it.
REWARDS = {
    "minari": ("data/main_data.hdf5", "episode_{}/rewards"),
    "d3rlpy": ("", "rewards_{}"),
    "robomimic": ("", "data/demo_{}/rewards"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("episode", [0, *further(7, 4)])  # The first, and the longest.
@pytest.mark.parametrize("name", REWARDS)
def test_a_damaged_episode_is_left_out_alone_wherever_it_is(
    roots: dict[str, Path], name: str, episode: int, tmp_path: Path
) -> None:
    root = tmp_path / f"damaged{SUFFIXES.get(name, '.hdf5')}"
    rlio.convert(roots["rlio"], root, to=name)
    below, path = REWARDS[name]
    with h5py.File(root / below, "r+") as file:
        short = file[path.format(episode)][:-1]
        del file[path.format(episode)]
        file[path.format(episode)] = short
    first = sum(LENGTHS[:episode])
    good = [float(row) for row in range(ROWS) if not first <= row < first + LENGTHS[episode]]
    with pytest.raises(CorruptData):
        batches(root)
    options: dict[str, Any]
    for options in ({}, {"cache": "memory", "shuffle": True, "seed": 1}, {"draw": rlio.WholeEpisodes()}):
        with rlio.read(root, epochs=1, batch_size=5, on_error="skip", **options) as reader:
            assert sorted(row for batch in reader for row in batch["rewards"].ravel().tolist()) == good
            assert reader.skipped == 1


def test_statistics_leave_out_the_rows_that_are_skipped(roots: dict[str, Path], tmp_path: Path) -> None:
    rlio.convert(roots["rlio"], tmp_path / "damaged", to="minari")
    with h5py.File(tmp_path / "damaged/data/main_data.hdf5", "r+") as file:
        short = file["episode_9/rewards"][:-1]
        del file["episode_9/rewards"]
        file["episode_9/rewards"] = short
    options: dict[str, Any] = {"normalise": "mean_std", "epochs": 1, "batch_size": ROWS}
    with pytest.raises(CorruptData):
        rlio.read(tmp_path / "damaged", **options)
    with rlio.read(tmp_path / "damaged", on_error="skip", **options) as reader:
        obs = reader.sample()["obs"]
    rows = np.arange(ROWS - LENGTHS[9])
    expected = np.stack([rows, rows % 7], 1).astype(np.float64)
    np.testing.assert_allclose(obs, (expected - expected.mean(0)) / expected.std(0), atol=1e-5)


def test_episodes_of_several_agents_in_files_are_separate(tmp_path: Path) -> None:
    def rows(agent: int, episode: int) -> dict[str, Any]:
        t = [0, 1, 2]
        return {
            "obs": [[100.0 * agent + 10 * episode + step] for step in t], "actions": t, "rewards": t,
            "terminateds": [False, False, True], "eps_id": [episode] * 3, "t": t, "agent_index": [agent] * 3,
        }  # fmt: skip

    lines = [
        {
            "type": "MultiAgentBatch",
            "count": 3,
            "policy_batches": {"a": rows(0, number), "b": rows(1, number)},
        }
        for number in range(2)
    ]
    (tmp_path / "output.json").write_text("\n".join(map(json.dumps, lines)))
    data = rlio.open_dataset(tmp_path)
    assert (len(data), data.episode_count) == (12, 4)
    assert [(e.policy, e.eps_id, e.rows) for e in data.episode_parts()] == [
        ("a", 0, 3), ("b", 0, 3), ("a", 1, 3), ("b", 1, 3),
    ]  # fmt: skip
    assert [data.episode(number).observations[0].item() for number in range(4)] == [0, 100, 10, 110]
    assert len(data.to_arrow(columns=["rewards"], policy="b")) == 6
    table = data.episodes
    assert list(zip(table["policy"], table["agent"], table["eps_id"], table["return"], strict=True)) == [
        ("a", 0, 0, 3.0), ("b", 1, 0, 3.0), ("a", 0, 1, 3.0), ("b", 1, 1, 3.0),
    ]  # fmt: skip
