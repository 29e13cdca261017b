"""A zip file of a data set opens by its path, as a folder that is read only."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest

import rlio
import rlio.torch
from rlio.errors import CorruptData, DataNotFound, OptionError, RlioError, UnsafeData
from rlio.storage.filesystem import Storage

FORMATS = Path(__file__).parent / "golden/formats"


def steps(rows: int, seed: int = 0) -> rlio.SampleBatch:
    t = np.arange(rows) % 10
    return rlio.SampleBatch(
        obs=np.random.default_rng(seed).random((rows, 3)).astype(np.float32),
        actions=np.arange(rows) % 2,
        rewards=np.ones(rows, np.float32),
        terminateds=t == 9,
        eps_id=np.arange(rows) // 10,
        t=t,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plain") / "cartpole"
    for number in range(2):
        roll = rlio.Roll(max_rows=20)
        with rlio.ParquetWriter(root, roll=roll, writer_id=f"w0000{number}-00000000") as writer:
            writer.write(steps(60, seed=number))
    return root


def zipped(folder: Path, target: Path, *, whole: bool = False, how: int = zipfile.ZIP_DEFLATED) -> str:
    """A zip file of what is in a folder; ``whole``: of the folder."""
    with zipfile.ZipFile(target, "w", how) as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, file.relative_to(folder.parent if whole else folder))
    return str(target)


@pytest.fixture(params=["inside", "folder", "stored"])
def path(folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    how = zipfile.ZIP_STORED if request.param == "stored" else zipfile.ZIP_DEFLATED
    return zipped(folder, tmp_path / "data.zip", whole=request.param == "folder", how=how)


def rows_of(reader: rlio.InputReader) -> rlio.SampleBatch:
    with reader:
        batches = [batch for batch in reader if isinstance(batch, rlio.SampleBatch)]
        return rlio.concat_samples(batches)  # type: ignore[return-value]


WAYS: dict[str, Callable[[Any], Any]] = {
    "read": lambda root: rows_of(rlio.read(root, epochs=1)),
    "shuffled": lambda root: rows_of(rlio.read(root, epochs=1, shuffle=True, seed=3, cache="none")),
    "stored": lambda root: rows_of(rlio.read(root, epochs=1, cache="memory")),
    "class": lambda root: rows_of(rlio.DatasetReader(root, epochs=1)),
    "take": lambda root: rlio.open_dataset(root).take(np.arange(120)),
    "pickled": lambda root: pickle.loads(pickle.dumps(rlio.open_dataset(root))).take(np.arange(120)),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.each_value_once
def test_a_zip_of_a_data_set_opens_by_its_path(folder: Path, path: str, way: str) -> None:
    assert WAYS[way](path).equals(WAYS[way](folder))


def test_a_zip_of_folders_in_each_other_opens_by_its_path(folder: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, Path("home/runs") / file.relative_to(folder.parent))
        archive.writestr("__MACOSX/._home", b"")
    assert WAYS["read"](tmp_path / "data.zip").equals(WAYS["read"](folder))


def test_a_zip_of_two_folders_names_them(folder: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for name in ("a", "b"):
            archive.write(folder / "_rlio.json", f"{name}/_rlio.json")
    with pytest.raises(DataNotFound, match=r"found '?a'?, '?b'?"):
        rlio.open_dataset(tmp_path / "data.zip")


def test_a_zip_on_another_filesystem_opens_by_its_uri(folder: Path, tmp_path: Path) -> None:
    path = zipped(folder, tmp_path / "data.zip", whole=True)
    fsspec.filesystem("memory").pipe_file("/zips/data.zip", Path(path).read_bytes())
    assert WAYS["read"]("memory://zips/data.zip").equals(WAYS["read"](folder))
    assert len(rlio.ReplayStore.open("memory://zips/data.zip")) == 120


@pytest.mark.few(1)
def test_threads_and_forks_read_a_zip_at_once(folder: Path, path: str) -> None:
    data, wanted = rlio.open_dataset(path), WAYS["read"](folder)

    def part(number: int) -> bool:
        return bool(WAYS["read"](data).equals(wanted))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(part, range(8)))
    dataset = rlio.torch.ReplayDataset(data, batch_size=30, epochs=1)
    with dataset.loader(num_workers=2, multiprocessing_context="fork") as loader:
        found = np.concatenate([batch["obs"].numpy() for batch in loader])
    np.testing.assert_array_equal(found, wanted["obs"])


@pytest.mark.few(1)
def test_a_zip_is_read_only(path: str) -> None:
    before = Path(path).read_bytes()
    with pytest.raises(OptionError, match="read only"):
        rlio.ParquetWriter(path)
    storage = Storage.open(path)
    for change in (lambda: storage.put("data/x", b"x"), lambda: storage.remove("_rlio.json")):
        with pytest.raises(RlioError, match="read only"):
            change()
    assert Path(path).read_bytes() == before


@pytest.mark.few(1)
def test_a_zip_is_verified_and_converted(folder: Path, path: str, tmp_path: Path) -> None:
    assert rlio.verify(path).ok
    rlio.convert(path, tmp_path / "to")
    assert WAYS["read"](tmp_path / "to")["obs"].shape == (120, 3)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "source", ["minari/cart/collected-v0", "minari/cart", "lerobot/v3.0", "lerobot/v2.1", "rlds/counts"]
)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.each_value_once
def test_a_zip_of_another_librarys_folder_opens_by_its_path(source: str, whole: bool, tmp_path: Path) -> None:
    path = zipped(FORMATS / source, tmp_path / "data.zip", whole=whole)
    wanted = rlio.open_dataset(str(FORMATS / source))
    found = rlio.open_dataset(path)
    assert found.take(np.arange(len(found))).equals(wanted.take(np.arange(len(wanted))))
    assert len(rows_of(rlio.read(path, epochs=1))) == len(wanted)


def test_a_zip_of_rllibs_json_is_read_as_before(tmp_path: Path) -> None:
    record = FORMATS / "rllib-2019/output-2019-10-28_00-00-00_worker-0_0.json"
    with zipfile.ZipFile(tmp_path / "log.zip", "w") as archive:
        archive.write(record, "inside/log.json")
    found = rows_of(rlio.read(str(tmp_path / "log.zip"), epochs=1))
    assert found.equals(rows_of(rlio.read(str(record), epochs=1)))


def test_a_zip_of_rllibs_json_in_folders_is_read_as_before(tmp_path: Path) -> None:
    record = FORMATS / "rllib-2019/output-2019-10-28_00-00-00_worker-0_0.json"
    with zipfile.ZipFile(tmp_path / "log.zip", "w") as archive:
        archive.write(record, "a/log.json")
        archive.write(record, "b/log.json")
    alone = len(rows_of(rlio.read(str(record), epochs=1)))
    assert len(rows_of(rlio.read(str(tmp_path / "log.zip"), epochs=1))) == 2 * alone
    assert len(rlio.open_dataset(str(tmp_path / "log.zip"))) == 2 * alone


@pytest.mark.few(2)
@pytest.mark.parametrize("inside", ["", "deep/er/"])
@pytest.mark.parametrize(
    "file",
    [
        "d3rlpy/buffer.h5",
        "tianshou/ring.hdf5",
        "d4rl.hdf5",
        "rows.parquet",
        "rllib-dataset/one-agent.parquet",
    ],
)
@pytest.mark.each_value_once
def test_a_zip_of_another_librarys_file_opens_by_its_path(
    folder: Path, file: str, inside: str, tmp_path: Path
) -> None:
    source = FORMATS / file
    if file == "d4rl.hdf5":
        source = tmp_path / file
        rlio.convert(folder, source, to="d4rl", options={"next_observations": False})
    elif file == "rows.parquet":
        source = tmp_path / file
        pq.write_table(
            rlio.open_dataset(folder).to_arrow(columns=["actions", "rewards", "t", "eps_id"]), source
        )
    with zipfile.ZipFile(tmp_path / "data.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(source, f"{inside}{source.name}")
    path = str(tmp_path / "data.zip")
    wanted = rows_of(rlio.read(str(source), epochs=1))
    assert rows_of(rlio.read(path, epochs=1)).equals(wanted)
    if file != "rows.parquet":  # Which is no format that is known by its content.
        data = rlio.open_dataset(path)
        assert data.take(np.arange(len(data)))["rewards"].tolist() == wanted["rewards"].tolist()


def test_a_zip_of_a_table_is_read_by_a_mapping(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "log.csv.zip", "w") as archive:
        archive.writestr("log.csv", "x,a,r,over\n1,0,1,0\n2,1,1,1\n")
        archive.writestr("notes.txt", "no rows")
    mapping = rlio.Mapping({"obs": ["x"], "actions": "a", "rewards": "r"}, terminated="over")
    for source in (
        str(tmp_path / "log.csv.zip"),
        rlio.open_dataset(tmp_path / "log.csv.zip", mapping=mapping),
    ):
        options = {"mapping": mapping} if isinstance(source, str) else {}
        assert rows_of(rlio.read(source, epochs=1, **options))["rewards"].tolist() == [1.0, 1.0]


def test_a_zip_without_data_says_what_it_holds(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("notes.txt", "no rows")
    for opens in (lambda path: rlio.read(path), lambda path: rlio.D4RLReader(path)):
        with pytest.raises(DataNotFound, match=r"notes\.txt"):
            opens(str(tmp_path / "x.zip"))


def test_a_folder_and_nothing_of_that_name_are_no_zip(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "folder.zip")
    assert len(rlio.open_dataset(tmp_path / "folder.zip")) == 120
    with rlio.ParquetWriter(tmp_path / "new.zip") as writer:
        writer.write(steps(10))
    assert (tmp_path / "new.zip").is_dir()
    with pytest.raises(DataNotFound):
        rlio.open_dataset(tmp_path / "nothing.zip")


# ---- damage ----


def test_a_damaged_zip_is_damage(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.zip").write_bytes(b"no zip" * 100)
    path = Path(zipped(folder, tmp_path / "cut.zip"))
    path.write_bytes(path.read_bytes()[:-30])
    for name in ("text.zip", "cut.zip"):
        with pytest.raises(CorruptData, match="damaged zip file"):
            rlio.open_dataset(tmp_path / name)


def test_a_flipped_byte_in_a_zip_is_damage(folder: Path, tmp_path: Path) -> None:
    path = Path(zipped(folder, tmp_path / "data.zip", how=zipfile.ZIP_STORED))
    with zipfile.ZipFile(path) as archive:
        info = max(archive.infolist(), key=lambda info: info.file_size)
    data = bytearray(path.read_bytes())
    data[info.header_offset + 300] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(CorruptData):
        WAYS["read"](path)
    with rlio.read(path, epochs=1, on_error="skip") as reader:
        list(reader)
        assert reader.skipped == 20


def test_a_zip_bomb_and_an_encrypted_member_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("_rlio.json", b"0" * (100 << 20))
    limits = rlio.Limits(free_bytes=1 << 20)
    with pytest.raises(UnsafeData, match="zip member"):
        rlio.open_dataset(tmp_path / "bomb.zip", limits=limits)
    with zipfile.ZipFile(tmp_path / "locked.zip", "w") as archive:
        archive.writestr("_rlio.json", b'{"format": 0}\n')
    data = bytearray((tmp_path / "locked.zip").read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "locked.zip").write_bytes(data)
    with pytest.raises(UnsafeData, match="encrypted"):
        rlio.open_dataset(tmp_path / "locked.zip")
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as archive:
        for number in range(30):
            archive.writestr(f"{number}", b"")
    with pytest.raises(UnsafeData, match="30 members"):
        rlio.open_dataset(tmp_path / "many.zip", limits=rlio.Limits(listed_names=20))


def test_no_member_leaves_the_zip(folder: Path, tmp_path: Path) -> None:
    path = zipped(folder, tmp_path / "data.zip")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../outside.txt", b"x")
        archive.writestr("/absolute.txt", b"x")
    assert len(WAYS["read"](path)) == 120
    assert not (tmp_path.parent / "outside.txt").exists()


@pytest.mark.further
def test_a_path_that_is_no_zip_imports_no_fsspec(folder: Path) -> None:
    code = (
        f"import rlio, sys; rlio.open_dataset({str(folder)!r}); "
        "sys.exit('fsspec.implementations.zip' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0
