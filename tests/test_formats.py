"""The registry of formats, and what `EpisodeReader` adds to a source of episodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from foreign_files import d3rlpy_1, d3rlpy_2, minari_arrow, minari_hdf5, minari_parquet, robomimic

import rlio
from rlio.errors import CorruptData, DataNotFound, OptionError, UnknownLayout, UnsafeData
from rlio.formats.format import LOSSES, by_name, formats, load, recognise
from rlio.formats.place import locate_format
from rlio.readers.episode_reader import EpisodeReader
from rlio.testing import ReaderTests


def test_every_format_is_named_once_and_what_it_names_is_there() -> None:
    names = [format.name for format in formats()]
    assert len(set(names)) == len(names) >= 14
    for format in formats():
        assert by_name(format.name) is format
        assert format.is_read or format.advice
        for place in (format.reader, format.source, format.writer):
            assert place is None or callable(load(place)), place
        assert format.loses <= LOSSES.keys()


def write_episodes(path: Path, lengths: list[int], *, ends: list[bool] | None = None) -> None:
    """A file of d3rlpy 2 whose observations number all steps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        columns = ["observations", "actions", "rewards", "terminated"]
        file["columns"], file["num_episodes"], file["version"] = columns, len(lengths), "2.1"
        first = 0
        for episode, steps in enumerate(lengths):
            rows = np.arange(first, first + steps, dtype=np.float32)
            file[f"observations_{episode}"], file[f"actions_{episode}"] = rows[:, None], rows[:, None]
            file[f"rewards_{episode}"] = rows[:, None]
            file[f"terminated_{episode}"] = ends is None or ends[episode]
            first += steps


class TestEpisodeReader(ReaderTests):
    finite = True
    batches = 5

    @pytest.fixture(autouse=True)
    def _files(self, tmp_path: Path) -> None:
        self.path = tmp_path / "buffer.h5"
        write_episodes(self.path, [3, 1, 5000, 2, 4])

    def make_reader(self) -> EpisodeReader:
        return EpisodeReader(self.path, epochs=1, batch_size=700, shuffle=True, seed=3)

    def expected_rows(self) -> Any:
        return None


def all_rows(reader: Any) -> rlio.SampleBatch:
    with reader:
        return rlio.concat_samples(list(reader))


def test_every_row_of_every_episode_is_served_once_and_ends_are_those_of_the_file(tmp_path: Path) -> None:
    lengths = [3, 1, 4097, 2]
    write_episodes(tmp_path / "a.h5", lengths, ends=[True, False, False, True])
    rows = all_rows(rlio.read(tmp_path / "a.h5", epochs=1))
    assert rows["obs"][:, 0].tolist() == list(range(sum(lengths)))
    assert rows["eps_id"].tolist() == np.repeat(range(4), lengths).tolist()
    assert rows["t"].tolist() == [t for steps in lengths for t in range(steps)]
    last = np.cumsum(lengths) - 1
    assert np.flatnonzero(rows["terminateds"]).tolist() == [last[0], last[3]]
    assert np.flatnonzero(rows["truncateds"]).tolist() == [last[1], last[2]]
    assert np.flatnonzero(~rows["new_obs_valid"]).tolist() == last.tolist()
    valid = rows["new_obs_valid"]
    assert (rows["new_obs"][valid] == rows["obs"][valid] + 1).all()
    assert not rows["new_obs"][~valid].any()


def test_ranks_share_the_rows_and_columns_are_chosen(tmp_path: Path) -> None:
    write_episodes(tmp_path / "a.h5", [2000] * 7)
    parts = [
        all_rows(
            rlio.read(
                tmp_path / "a.h5", epochs=1, shuffle=True, seed=1, shard=(rank, 3), columns=["obs", "t"]
            )
        )
        for rank in range(3)
    ]
    assert all(set(part) == {"obs", "t"} for part in parts)
    found = np.concatenate([part["obs"][:, 0] for part in parts])
    assert sorted(found.tolist()) == list(range(14_000))


def test_a_damaged_episode_is_raised_with_its_place_or_skipped_and_counted(tmp_path: Path) -> None:
    write_episodes(tmp_path / "a.h5", [5000, 5000, 5000])
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        del file["observations_1"]
    with pytest.raises(CorruptData, match="observations_1"):
        all_rows(EpisodeReader(tmp_path / "a.h5", epochs=1))
    reader = EpisodeReader(tmp_path / "a.h5", epochs=1, on_error="skip")
    assert len(all_rows(reader)) == 10_000
    assert reader.skipped == 1


def test_a_format_is_chosen_by_name_and_unknown_names_and_options_raise(tmp_path: Path) -> None:
    write_episodes(tmp_path / "a.h5", [3])
    assert len(all_rows(EpisodeReader(tmp_path / "a.h5", format="d3rlpy", epochs=1))) == 3
    with pytest.raises(OptionError, match="no such format"):
        EpisodeReader(tmp_path / "a.h5", format="nothing")
    with pytest.raises(OptionError, match="frames"):
        EpisodeReader(tmp_path / "a.h5", format_options={"frames": 1})
    with pytest.raises(DataNotFound):
        EpisodeReader(tmp_path / "b.h5")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UnknownLayout):
        locate_format(tmp_path / "notes.txt")


def test_links_out_of_a_file_and_other_versions_are_refused(tmp_path: Path) -> None:
    write_episodes(tmp_path / "a.h5", [3])
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        del file["observations_0"]
        file["observations_0"] = h5py.ExternalLink("secret.h5", "/x")
    with pytest.raises(UnsafeData):
        all_rows(EpisodeReader(tmp_path / "a.h5", epochs=1))
    write_episodes(tmp_path / "b.h5", [3])
    with h5py.File(tmp_path / "b.h5", "r+") as file:
        del file["version"]
        file["version"] = "3.0"
    with pytest.raises(UnknownLayout, match=r"3\.0"):
        EpisodeReader(tmp_path / "b.h5")


def test_files_in_folders_of_runs_are_found(tmp_path: Path) -> None:
    for run in range(3):
        write_episodes(tmp_path / f"run-{run}/buffer.h5", [3])
    found = recognise(tmp_path)
    assert found is not None
    assert (found.format.name, found.folder) == ("d3rlpy", "run-0")
    assert len(all_rows(rlio.read(tmp_path, epochs=1))) == 9


@pytest.mark.parametrize("make", [d3rlpy_1, d3rlpy_2, minari_arrow, minari_hdf5, minari_parquet, robomimic])
def test_what_is_read_says_so_and_opens_by_its_path(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path)
    found = recognise(tmp_path)
    assert found is not None
    assert found.format.is_read
    assert len(all_rows(rlio.read(tmp_path, epochs=1))) == 6
