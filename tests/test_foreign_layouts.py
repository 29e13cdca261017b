"""What other libraries stored is recognised and named, and nothing of it is read as something else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from foreign_files import (
    GOLDEN_MINARI,
    UNREAD,
    d3rlpy_1,
    lerobot_2,
    lerobot_3,
    minari_arrow,
    minari_hdf5,
    minari_parquet,
)
from fsspec.implementations.memory import MemoryFileSystem

import rlio
from rlio.errors import DataNotFound, UnknownLayout
from rlio.formats.files import step_columns
from rlio.formats.files.step_columns import check_step_columns
from rlio.formats.format import BY_ENDING, recognise
from rlio.readers.d4rl_reader import D4RLReader
from rlio.readers.foreign_parquet import ForeignParquetReader
from rlio.readers.json_reader import JsonReader

MAKERS = [(name, make) for name, makers in UNREAD.items() for make in makers]


def made(root: Path, make: Callable[[Path], None]) -> Path:
    root.mkdir()
    make(root)
    return root


def served(reader: Any) -> list[Any]:
    with reader:
        return list(reader)


# ---- the symptoms ----


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_the_padding_rows_of_minari_are_not_served_as_steps(on_error: Any, tmp_path: Path) -> None:
    files = [*GOLDEN_MINARI.glob("data/*/*.parquet")]
    assert sum(pq.read_metadata(file).num_rows for file in files) == 28  # of 26 steps
    with pytest.raises(UnknownLayout, match="Minari"):
        served(rlio.read(str(GOLDEN_MINARI / "data/*/*.parquet"), epochs=1, on_error=on_error))


def test_two_episodes_of_d3rlpy_are_not_joined_where_the_first_was_cut(tmp_path: Path) -> None:
    d3rlpy_1(tmp_path)
    with pytest.raises(UnknownLayout, match="d3rlpy 1"):
        served(D4RLReader(str(tmp_path / "dataset.h5"), epochs=1))
    rows = rlio.concat_samples(served(rlio.read(str(tmp_path / "dataset.h5"), epochs=1)))
    assert rows["eps_id"].tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("columns", [None, ["action", "next.reward"]])
def test_two_episodes_of_lerobot_are_not_one_that_is_open(columns: Any, tmp_path: Path) -> None:
    lerobot_3(tmp_path)
    with pytest.raises(UnknownLayout, match="LeRobot"):
        served(rlio.read(str(tmp_path / "data/*/*.parquet"), epochs=1, columns=columns))


# ---- every layout, by every door ----


@pytest.mark.parametrize(("name", "make"), MAKERS, ids=lambda value: getattr(value, "__name__", None))
def test_a_layout_is_named_by_whatever_is_pointed_at_its_folder(
    name: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    root = made(tmp_path / "them", make)
    folders = [root, *(Path(folder) for folder, _, _ in os.walk(root) if _holds_data(Path(folder)))]
    for folder in folders:
        found = recognise(folder)
        assert found is not None
        assert (found.format.title, found.format.is_read) == (name, False), folder
        with pytest.raises(UnknownLayout, match=name):
            rlio.read(folder, epochs=1).sample()
        for reader in (JsonReader, ForeignParquetReader, D4RLReader):
            with pytest.raises(UnknownLayout, match=name):
                reader(folder, epochs=1, on_error="skip").sample()
        with pytest.raises(UnknownLayout, match=name):
            rlio.open_dataset(folder)
        with pytest.raises(DataNotFound, match=name):
            rlio.DatasetReader(folder)


def _holds_data(folder: Path) -> bool:
    return any(file.suffix in (".parquet", ".hdf5", ".h5", ".json", ".memmap") for file in folder.iterdir())


def test_layouts_are_named_on_other_filesystems_too(tmp_path: Path) -> None:
    minari_parquet(tmp_path)
    fsspec.filesystem("memory").put(f"{tmp_path}/", "/foreign-layouts/", recursive=True)
    for place in ("", "/data", "/data/0", "/data/0/part-0.parquet"):
        found = recognise(f"memory://foreign-layouts{place}")
        assert found is not None
        assert found.format.title == "Minari", place
    with pytest.raises(UnknownLayout, match="Minari"):
        rlio.read("memory://foreign-layouts/data/*/*.parquet", epochs=1).sample()


def test_what_rlio_reads_is_named_with_its_reader(tmp_path: Path) -> None:
    record = {"type": "SampleBatch", "obs": [[0.0]], "actions": [0], "rewards": [1.0], "dones": [True]}
    (tmp_path / "json").mkdir()
    (tmp_path / "json/output-2024-01-01_00-00-00_worker-0_0.json").write_text(json.dumps(record) + "\n")
    (tmp_path / "parquet/cartpole-v1/run-000000-00001").mkdir(parents=True)
    table = pa.table({"eps_id": ["a"], "obs": [[0.0]], "actions": [0], "rewards": [1.0]})
    pq.write_table(table, tmp_path / "parquet/cartpole-v1/run-000000-00001/a.parquet")
    with h5py.File(tmp_path / "hopper.hdf5", "w") as file:
        for name in ("observations", "actions", "rewards", "terminals"):
            file[name] = np.zeros(3)
    readers = {
        place: str(found.format.reader).partition(":")[2] if (found := recognise(tmp_path / place)) else ""
        for place in ("json", "parquet", "hopper.hdf5")
    }
    assert readers == {
        "json": "JsonReader",
        "parquet": "ForeignParquetReader",
        "hopper.hdf5": "D4RLReader",
    }
    assert all(hasattr(rlio, reader) for reader in readers.values())


def test_nothing_is_recognised_where_nothing_of_the_kind_is(tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path / "ours") as writer:
        writer.write(rlio.SampleBatch(obs=[[0.0]], actions=[0], rewards=[1.0]))
    (tmp_path / "config").mkdir()
    for name, text in {
        "metadata.json": "{",
        "state.json": "[" * 100_000,
        "a.json": '{"name": "x"}',
        "c.parquet": "PAR1",
        "dataset_info.json": "\x00",
    }.items():
        (tmp_path / "config" / name).write_text(text)
    (tmp_path / "config/folder.json").mkdir()
    for place in ("ours", "ours/data", "config", "config/folder.json", "nowhere"):
        assert recognise(tmp_path / place) is None, place
    for file in (tmp_path / "config").iterdir():
        assert recognise(file) is None, file
    (tmp_path / "b.hdf5").write_text("no HDF5")
    found = recognise(tmp_path / "b.hdf5")
    assert found is not None
    assert (found.format.name, found.confidence) == ("hdf5", BY_ENDING)  # Its name says it, and nothing else.


def test_an_hdf5_link_that_leaves_the_file_is_not_followed(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "secret.hdf5", "w") as file:
        file.create_group("demo_0")
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["data"] = h5py.ExternalLink("secret.hdf5", "/")
        file["episode_0"] = h5py.ExternalLink("secret.hdf5", "/")
    found = recognise(tmp_path / "a.hdf5")
    assert found is not None
    assert (found.format.name, found.confidence) == ("hdf5", BY_ENDING)


# ---- tables that are nobody's ----

DOUBTFUL = [
    ("obs", "actions", "rewards", "episode_index"),
    ("obs", "actions", "rewards", "dones", "episode_id"),
    ("obs", "actions", "rewards", "terminateds", "timeouts"),
    ("obs", "actions", "rewards", "done"),
    ("obs", "actions", "rewards", "terminateds", "done"),
    ("observations", "actions", "rewards"),
    ("obs", "action", "reward"),
    ("obs", "actions", "rewards", "next_observation"),
    ("obs", "actions", "rewards", "is_first", "is_last"),
    ("speed", "angle"),
    (),
]
KNOWN = [
    ("obs",),
    ("rewards", "speed"),
    ("obs", "actions", "rewards", "dones", "new_obs", "eps_id", "prev_actions", "value_targets"),
    ("obs", "new_obs", "actions", "rewards", "terminateds", "truncateds", "eps_id", "done", "episode_id"),
]


def test_columns_that_may_be_those_that_are_absent_are_doubtful_and_others_are_not() -> None:
    for names in DOUBTFUL:
        with pytest.raises(UnknownLayout):
            check_step_columns(names)
    for names in KNOWN:
        check_step_columns(names)


def _values(name: str) -> list[Any]:
    flags = ("dones", "done", "terminateds", "timeouts", "is_first", "is_last", "truncateds")
    return [False, True] if name in flags else [0, 1]


@pytest.mark.few(1)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_doubtful_table_is_refused_by_its_column_and_served_where_the_columns_are_named(
    on_error: Any, tmp_path: Path
) -> None:
    for number, names in enumerate(DOUBTFUL[:-1]):
        columns = {name: _values(name) for name in names}
        pq.write_table(pa.table(columns), tmp_path / f"{number}.parquet")
        (tmp_path / f"{number}.json").write_text(json.dumps(columns) + "\n")
        for file, reader in ((f"{number}.parquet", ForeignParquetReader), (f"{number}.json", JsonReader)):
            if reader is JsonReader and "speed" in names:
                continue  # One such line among others is damage.
            with pytest.raises(UnknownLayout) as caught:
                reader(tmp_path / file, epochs=1, on_error=on_error).sample()
            assert caught.value.uri == str(tmp_path / file)
            assert caught.value.column is None or caught.value.column in names
            (batch,) = served(reader(tmp_path / file, epochs=1, columns=list(names[:2])))
            assert set(batch) == set(names[:2])


def test_a_doubtful_dataset_of_a_file_like_d4rls_is_refused_by_its_name(tmp_path: Path) -> None:
    for name in ("episode_ends", "done", "truncations", "next_states", "episode_id"):
        with h5py.File(tmp_path / f"{name}.hdf5", "w") as file:
            for column in ("observations", "actions", "rewards", "terminals", name):
                file[column] = np.zeros(3)
        with pytest.raises(UnknownLayout) as caught:
            D4RLReader(tmp_path / f"{name}.hdf5", on_error="skip")
        assert caught.value.column == name


def test_the_page_has_every_layout_and_every_doubtful_column(checkout: Path) -> None:
    page = (checkout / "docs/foreign.md").read_text(encoding="utf-8")
    assert [name for name in UNREAD if name not in page] == []
    assert [name for name in step_columns._MEANT if f"`{name}`" not in page] == []


# ---- what a look costs ----


@pytest.fixture
def names_seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every name that `os.scandir` gives from now on."""
    seen: list[str] = []
    real = os.scandir

    class Counted:
        def __init__(self, *args: Any) -> None:
            self.found = real(*args)

        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            child = next(self.found)
            seen.append(child.name)
            return child

        def __enter__(self) -> Counted:
            return self

        def __exit__(self, *exc_info: object) -> None:
            self.found.close()

        def close(self) -> None:
            self.found.close()

    monkeypatch.setattr(os, "scandir", Counted)
    return seen


def test_opening_a_large_folder_that_is_no_data_set_looks_at_a_few_names(
    names_seen: list[str], tmp_path: Path
) -> None:
    for folder in range(60):
        (tmp_path / f"{folder:02}").mkdir()
        for number in range(50):
            (tmp_path / f"{folder:02}/{number}.txt").touch()
    del names_seen[:]
    with pytest.raises(DataNotFound):
        rlio.open_dataset(tmp_path)
    assert len(names_seen) < 1000


def test_a_flat_folder_of_many_files_is_not_read_to_its_end_to_word_an_error(
    names_seen: list[str], tmp_path: Path
) -> None:
    for number in range(3000):
        (tmp_path / f"{number}.txt").touch()
    del names_seen[:]
    with pytest.raises(DataNotFound):
        rlio.open_dataset(tmp_path)
    assert len(names_seen) < 1500


# ---- parts of data sets, and data sets by their names ----


def lerobot(root: Path) -> None:
    """LeRobot 3, written by rlio."""
    steps = np.arange(6.0)[:, None]
    with rlio.ParquetWriter(root / "own") as writer:
        writer.write(
            rlio.SampleBatch(
                obs=steps, new_obs=steps + 1, actions=steps, rewards=np.ones(6), eps_id=np.zeros(6, np.int64)
            )
        )
    rlio.convert(root / "own", root / "made", to="lerobot")
    shutil.rmtree(root / "own")
    for part in (root / "made").iterdir():
        part.rename(root / part.name)
    (root / "made").rmdir()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("make", "part"),
    [
        (minari_hdf5, "data/main_data.hdf5"),
        (minari_hdf5, "data/metadata.json"),
        (minari_arrow, "data/metadata.json"),
        (lerobot, "meta/info.json"),
    ],
)
def test_a_file_that_holds_or_describes_the_whole_opens_it(
    make: Callable[[Path], None], part: str, tmp_path: Path
) -> None:
    make(tmp_path)
    assert len(rlio.open_dataset(tmp_path / part)) == 6
    with rlio.read(tmp_path / part, epochs=1) as reader:
        assert sum(map(len, reader)) == 6


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (minari_arrow, "data/1/part-0.arrow"),
        (minari_arrow, "data/1/metadata.json"),
        (lerobot_3, "data/chunk-000/file-000.parquet"),
        (lerobot_3, "meta/episodes/chunk-000/file-000.parquet"),
        (lerobot_2, "videos/chunk-000/camera/episode_000000.mp4"),
    ],
)
def test_a_part_of_a_data_set_is_refused_with_the_folder_of_the_whole(
    make: Callable[[Path], None], part: str, tmp_path: Path
) -> None:
    make(tmp_path / "set")
    path = tmp_path / "set" / part
    if not path.exists():
        path.parent.mkdir(parents=True)
        path.write_bytes(b"frames")
    for opens in (rlio.open_dataset, rlio.read):
        with pytest.raises(UnknownLayout) as caught:
            opens(path)
        assert f"pass its folder {tmp_path / 'set'}" in str(caught.value)


def test_files_beside_those_of_others_are_no_parts(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text('{"mine": 1}')
    (tmp_path / "state.json").write_text("{}")
    row = {"obs": [0.0], "actions": 0, "rewards": 1.0, "terminateds": True}
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/run.jsonl").write_text(json.dumps(row))
    with rlio.read(tmp_path / "logs/run.jsonl", epochs=1) as reader:
        assert len(reader.sample()) == 1


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hugging Face as fsspec shows it, in memory."""

    class Hub(MemoryFileSystem):
        protocol = "hf"
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return str(MemoryFileSystem._strip_protocol(path.removeprefix("hf://")))

    monkeypatch.setitem(import_module("fsspec.registry")._registry, "hf", Hub)
    return Hub()


@pytest.mark.few(2)
@pytest.mark.parametrize("make", [minari_hdf5, minari_arrow, lerobot])
def test_data_sets_on_hugging_face_are_read_by_their_uris(
    make: Callable[[Path], None], hub: Any, tmp_path: Path
) -> None:
    make(tmp_path)
    hub.put(f"{tmp_path}/", "/datasets/somebody/set/", recursive=True)
    assert len(rlio.open_dataset("hf://datasets/somebody/set")) == 6
    with rlio.read("hf://datasets/somebody/set", epochs=1) as reader:
        assert sum(map(len, reader)) == 6


def test_a_remote_data_set_of_minari_is_read_by_its_id(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "none"))
    minari_hdf5(tmp_path / "set")
    hub.put(f"{tmp_path}/set/", "/datasets/farama-minari/D4RL/pen/human-v2/", recursive=True)
    assert len(rlio.open_dataset("D4RL/pen/human-v2")) == 6
    with rlio.read("D4RL/pen/human-v2", epochs=1) as reader:
        assert sum(map(len, reader)) == 6
    with pytest.raises(DataNotFound, match="has no data set 'D4RL/pen/human-v3'"):
        rlio.read("D4RL/pen/human-v3")
    hub.mv("/datasets/farama-minari", "/datasets/mine", recursive=True)
    monkeypatch.setenv("MINARI_REMOTE", "hf://mine")
    assert len(rlio.open_dataset("D4RL/pen/human-v2")) == 6
    hub.store.clear()
    hub.pseudo_dirs[:] = [""]
    # A path in a folder that exists is no id, however much it looks like one: nothing is asked for it.
    (tmp_path / "D4RL").mkdir()
    monkeypatch.setattr(type(hub), "info", None)
    with pytest.raises(DataNotFound, match="nothing is there"):
        rlio.read("D4RL/pen/human-v2")


def test_an_id_of_minari_whose_store_cannot_be_reached_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_REMOTE", "nothing://somewhere")
    with pytest.raises(DataNotFound, match="minari download D4RL/pen/human-v2"):
        rlio.read("D4RL/pen/human-v2")
