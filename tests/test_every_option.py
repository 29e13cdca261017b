"""Every option of readers works on the files of other libraries, with the rows of rlio's own data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from further import further

import rlio
from rlio.errors import CorruptData, OptionError, StateError
from rlio.readers import stored_pass
from rlio.source.episodes import EpisodeFiles

LENGTHS = [3, 1, 7, 5, 4, 6, 2, 9, 8, 5]
ROWS = sum(LENGTHS)
FORMATS = ("minari", "d3rlpy", "npz", "rllib-json")
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
    for name in FORMATS:
        target = folder / (f"{name}.h5" if name == "d3rlpy" else name)
        rlio.convert(folder / "rlio", target, to=name)
        found[name] = target
    return found


def batches(root: Any, **options: Any) -> list[rlio.SampleBatch]:
    with rlio.read(root, **{"batch_size": 5, "epochs": 1, **options}) as reader:
        return list(reader)


def same(found: list[rlio.SampleBatch], expected: list[rlio.SampleBatch]) -> None:
    assert [len(batch) for batch in found] == [len(batch) for batch in expected]
    for ours, theirs in zip(found, expected, strict=True):
        # A format that does not store the last observations says so: they are zeros, and give no bootstrap.
        lost = {"new_obs", "bootstrap_mask"} if "new_obs_valid" in ours else set()
        for name in theirs.keys() - lost:
            values = ours[name].reshape(theirs[name].shape)  # d3rlpy has actions of shape (n, 1).
            np.testing.assert_allclose(values, theirs[name], rtol=1e-6, err_msg=name)


@pytest.mark.each_value_once
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("name", FORMATS)
def test_an_option_gives_the_rows_that_it_gives_on_own_data(
    roots: dict[str, Path], name: str, options: dict[str, Any]
) -> None:
    same(batches(roots[name], **options), batches(roots["rlio"], **options))


@pytest.mark.each_value_once
@pytest.mark.parametrize("cache", ["none", "memory", "disk"])
@pytest.mark.parametrize("name", FORMATS)
def test_ranks_get_every_row_once_and_a_state_continues(
    roots: dict[str, Path], name: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLIO_CACHE", str(tmp_path))
    options: Any = {"batch_size": 4, "epochs": 2, "shuffle": True, "seed": 7, "cache": cache}
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


@pytest.mark.each_value_once
@pytest.mark.parametrize("cache", ["memory", "disk"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_store_of_files_draws_the_rows_of_own_data(
    roots: dict[str, Path], name: str, cache: Any, tmp_path: Path
) -> None:
    folder = {"cache_folder": tmp_path} if cache == "disk" else {}
    with rlio.ReplayStore.open(roots["rlio"]) as own:
        for _ in range(2):
            with rlio.ReplayStore.open(roots[name], cache=cache, **folder) as store:
                assert len(store) == ROWS
                for draw in ({}, {"draw": rlio.NStep(2)}, {"filter": "rewards > 9"}):
                    same(
                        [store.uniform(batch_size=8, seed=1, **draw).sample()],
                        [own.uniform(batch_size=8, seed=1, **draw).sample()],
                    )
    with pytest.raises(OptionError, match="snapshot of a data set of rlio"):
        rlio.ReplayStore.open(roots[name], at={})


def test_sides_of_a_split_have_whole_episodes_and_all_rows_together(roots: dict[str, Path]) -> None:
    for name in FORMATS:
        sides = {side: batches(roots[name], split=(side, 0.5)) for side in ("train", "test")}
        ids = {side: {e for b in found for e in b["eps_id"].tolist()} for side, found in sides.items()}
        assert not ids["train"] & ids["test"]
        assert len(ids["train"] | ids["test"]) == len(LENGTHS)
        assert sum(len(batch) for found in sides.values() for batch in found) == ROWS


def test_a_long_episode_is_read_in_parts(roots: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from rlio.formats.minari import MinariSource

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
    assert max(read[1:]) <= 9  # The longest is measured once, at opening.
    with rlio.read(roots["minari"], epochs=1, cache="none") as reader:
        read.clear()
        list(reader)
        assert max(read) <= 4


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


@pytest.mark.parametrize("name", FORMATS)
def test_a_state_of_a_reader_of_records_or_of_earlier_versions_is_refused(
    name: str, roots: dict[str, Path]
) -> None:
    with rlio.read(roots["rllib-json"]) as records:
        records.sample()
        position = records.state_dict()["position"]
    with rlio.read(roots[name], batch_size=4) as reader:
        state = {**reader.state_dict(), "position": position}
        with pytest.raises(StateError, match="whole records"):
            reader.load_state_dict(state)


@pytest.mark.parametrize("name", KEPT)
def test_where_rows_are_kept_follows_one_rule_for_every_source(
    roots: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The rule of docs/reading.md, at sizes below, between and above its two bounds."""
    monkeypatch.setenv("RLIO_CACHE", str(tmp_path))
    options, expected = KEPT[name]
    with rlio.read(roots["rlio"], batch_size=ROWS, epochs=1) as reader:
        columns = dict(reader.sample())  # type: ignore[call-overload]  # One policy.
    opens: dict[str, Callable[..., Any]] = {
        source: partial(rlio.read, root, batch_size=4, **options) for source, root in roots.items()
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
