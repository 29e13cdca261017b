"""`rlio.testing.SourceTests` on rlio's own data, on formats of other libraries, and on sources that lie."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import rlio
from rlio.batch import Batch, SampleBatch, concat_samples
from rlio.dataset.file_dataset import FileDataset
from rlio.limits import DEFAULT_LIMITS
from rlio.maintenance.trim import trim
from rlio.opening import open_files
from rlio.source.snapshot import DatasetSnapshot
from rlio.source.source import Source
from rlio.testing import SourceTests

LENGTHS = (3, 1, 7, 5, 4)


def rows_of(first: int = 0) -> SampleBatch:
    """Five episodes with all columns that formats have."""
    count = sum(LENGTHS)
    ids = first + np.arange(count)
    last = np.isin(np.arange(count), np.cumsum(LENGTHS) - 1)
    return SampleBatch(
        obs=np.stack([ids, ids % 7], 1).astype(np.float32), actions=ids % 5,
        rewards=ids.astype(np.float32), new_obs=np.stack([ids + 1, (ids + 1) % 7], 1).astype(np.float32),
        terminateds=last, truncateds=np.zeros(count, bool),
        eps_id=np.repeat(np.arange(len(LENGTHS)), LENGTHS),
        t=np.concatenate([np.arange(length) for length in LENGTHS]),
    )  # fmt: skip


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two writers, in shards of eight rows with groups of four."""
    root = tmp_path_factory.mktemp("sources") / "own"
    for first in (0, 100):
        with rlio.ParquetWriter(root, roll=rlio.Roll(max_rows=8)) as writer:
            writer.write(rows_of(first))
    return root


class OfOwnData(SourceTests):
    root: Path

    @pytest.fixture(autouse=True)
    def _root(self, stored: Path) -> None:
        self.root = stored

    def make_source(self) -> Source:
        return rlio.open_dataset(self.root)

    def expected_rows(self) -> Batch | None:
        both = [rows_of(0), rows_of(100)]
        with rlio.read(self.root, epochs=1) as reader:  # Writers come in the order of their ids.
            swapped = reader.sample()["obs"][0, 0] == 100
        rows: Batch = concat_samples(both[::-1] if swapped else both)
        return rows


class TestOwnData(OfOwnData):
    """Parquet shards."""


class TestTrimmed(OfOwnData):
    """Segments that begin in the middle of their first shard."""

    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path / "own"
        with rlio.ParquetWriter(self.root, roll=rlio.Roll(max_rows=8)) as writer:
            writer.write(rows_of())
        trim(self.root, keep_rows=13)

    def expected_rows(self) -> Batch | None:
        kept = len(rlio.open_dataset(self.root))
        assert kept == 13
        return rows_of()[-kept:]


class TestJsonShards(OfOwnData):
    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path / "own"
        with rlio.JsonWriter(self.root) as writer:
            writer.write(rows_of()[:9])
            writer.write(rows_of()[9:])

    def expected_rows(self) -> Batch | None:
        return rows_of()


class TestFrameStacks(OfOwnData):
    """Observations that share frames, which groups give back in full."""

    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path / "own"
        env = gym.wrappers.FrameStackObservation(gym.make("CartPole-v1"), 4)
        recorder = rlio.RecordExperience(env, self.root)
        for seed in range(3):
            recorder.reset(seed=seed)
            ended = False
            while not ended:
                _, _, terminated, truncated, _ = recorder.step(seed % 2)
                ended = terminated or truncated
        recorder.close()

    def expected_rows(self) -> Batch | None:
        return None


def picture_rows() -> SampleBatch:
    rows = rows_of()
    frames = np.arange(len(rows) + 1, dtype=np.uint8)[:, None, None].repeat(9, 1).repeat(8, 2)
    rows["obs"], rows["new_obs"] = frames[:-1], frames[1:].copy()
    return rows


class TestPictures(OfOwnData):
    """Pictures that are stored as files, of which some rows were trimmed."""

    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path / "own"
        with rlio.ParquetWriter(self.root, roll=rlio.Roll(max_rows=8), pictures={"obs": "png"}) as writer:
            writer.write(picture_rows())
        trim(self.root, keep_rows=13)

    def expected_rows(self) -> Batch | None:
        return picture_rows()[-len(rlio.open_dataset(self.root)) :]


class TestSeveralAgents(OfOwnData):
    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path / "own"
        with rlio.ParquetWriter(self.root) as writer:
            for step in range(3):
                own = rows_of()[step : step + 1]
                writer.write(rlio.MultiAgentBatch({"a": own, "b": rows_of(50)[step : step + 1]}, 1))

    def expected_rows(self) -> Batch | None:
        return None


class OfFiles(SourceTests):
    """The data set in the format of another library."""

    format: str

    @pytest.fixture(autouse=True)
    def _files(self, tmp_path: Path) -> None:
        with rlio.ParquetWriter(tmp_path / "own") as writer:
            writer.write(rows_of())
        self.target = tmp_path / ("rows.h5" if self.format in ("d3rlpy", "d4rl") else "rows")
        rlio.convert(tmp_path / "own", self.target, to=self.format)

    def make_source(self) -> Source:
        found = open_files(str(self.target), storage_options=None, limits=DEFAULT_LIMITS, on_error="raise")
        assert found is not None
        return found

    def expected_rows(self) -> Batch | None:
        return None

    def test_rewards_are_those_that_were_written(self) -> None:
        with rlio.read(self.target, epochs=1, columns=["rewards"]) as reader:
            found = np.concatenate([batch["rewards"] for batch in reader])
        np.testing.assert_array_equal(found, rows_of()["rewards"])


class TestMinari(OfFiles):
    format = "minari"


class TestNpz(OfFiles):
    format = "npz"


class TestD3rlpy(OfFiles):
    format = "d3rlpy"


class TestRllibJson(OfFiles):
    format = "rllib-json"


class TestD4rl(OfFiles):
    format = "d4rl"


class TestParquet(OfFiles):
    format = "parquet"


class TestPartsOfRowGroups(TestParquet):
    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("rlio.formats.tables.parquet_source._GROUP_BYTES", 1)
        monkeypatch.setattr("rlio.formats.tables.parquet_source._GROUP_ROWS", 2)


class TestEpisodesApart(TestNpz):
    """As they are read where damage is skipped."""

    def make_source(self) -> Source:
        found = open_files(str(self.target), storage_options=None, limits=DEFAULT_LIMITS, on_error="skip")
        assert found is not None
        return found


# ---- sources that lie ----


class Lying:
    """Another object, with some attributes of its own."""

    def __init__(self, truth: Any, **lies: Any) -> None:
        self._truth, self._lies = truth, lies

    def __getattr__(self, name: str) -> Any:
        return self._lies[name] if name in self._lies else getattr(self._truth, name)

    def __len__(self) -> int:
        return len(self._truth)


def kept(opened: Any) -> Any:
    batches: dict[str, Any] = {}

    def read(index: int, **options: Any) -> Any:
        return batches.setdefault(f"{index} {options}", opened.read_folded(index, **options))

    return read


def other_columns(opened: Any) -> Any:
    return lambda index, *, columns=None, rows=None: opened.read_folded(
        index, rows=rows, columns=None if columns is None else ["t"]
    )


def whole_groups(opened: Any) -> Any:
    return lambda index, *, columns=None, rows=None: opened.read_folded(index, columns=columns)


def other_values(opened: Any) -> Any:
    def read(index: int, **options: Any) -> Any:
        found = opened.read_folded(index, **options)
        found.batch["rewards"] = found.batch["rewards"] + 1
        return found

    return read


LIES: dict[str, dict[str, Any]] = {
    "test_schemas_and_segments_are_known_without_rows": {"schemas": "not its hash"},
    "test_two_sources_of_the_same_data_have_the_same_identities": {"state_identity": object()},
    "test_all_groups_in_order_are_the_rows": {"read_folded": other_values},
    "test_a_group_may_be_read_at_any_time_and_is_the_callers_own": {"read_folded": kept},
    "test_columns_are_chosen_and_have_the_same_values": {"read_folded": other_columns},
    "test_the_live_rows_of_a_group_may_be_read_alone": {"read_folded": whole_groups},
    "test_groups_are_the_rows_of_their_segments": {"rows": [2]},
    "test_bounds_hold": {"bounds": lambda index: {"rewards": (np.float32(0), np.float32(1))}},
    "test_episodes_that_are_known_are_those_of_the_rows": {"episode_parts": lambda: iter(())},
    "test_segments_number_the_rows_of_each_writer": {},
}


def test_every_requirement_has_a_source_that_breaks_it() -> None:
    assert LIES.keys() == {name for name in vars(SourceTests) if name.startswith("test_")}


@pytest.mark.parametrize("test", LIES)
def test_the_suite_finds_a_source_that_lies(test: str, stored: Path, tmp_path: Path) -> None:
    lies, root = LIES[test], stored
    if "live_rows" in test:
        root = tmp_path / "trimmed"
        shutil.copytree(stored, root)
        trim(root, keep_rows=13)

    def open_lying(source: Any, segment: Any) -> Any:
        opened = source.open_segment(segment)
        told: dict[str, Any] = {name: lies[name] for name in ("rows", "bounds") if name in lies}
        if "read_folded" in lies:
            told["read_folded"] = lies["read_folded"](opened)
        return Lying(opened, **told)

    class Mine(OfOwnData):
        lies = True

        def make_source(self) -> Any:
            source: Any = rlio.open_dataset(root)
            told: dict[str, Any] = {
                name: lies[name] for name in ("schemas", "state_identity", "episode_parts") if name in lies
            }
            if "schemas" in told:
                told["schemas"] = {told["schemas"]: next(iter(source.schemas.values()))}
            if not lies:
                told["segments"] = [*source.segments][::-1]
            told["open_segment"] = lambda segment: open_lying(source, segment)
            return Lying(source, **told) if self.lies else source

    suite = Mine()
    suite.root = root
    with pytest.raises((AssertionError, TypeError, KeyError)):
        getattr(suite, test)()
    suite.lies = False
    getattr(suite, test)()


def test_a_data_set_of_files_takes_all_of_the_contract_from_its_source() -> None:
    """What it leaves to its base would look for the shards of a data set of rlio."""
    contract = {name for name in vars(Source) if not name.startswith("__")}
    assert contract & vars(DatasetSnapshot).keys() <= vars(FileDataset).keys()
