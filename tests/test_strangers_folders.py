"""Folders of other libraries as people have them: litter, glob characters in names, links, Git LFS."""

import functools
import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from further import some

import rlio
from rlio.errors import CorruptData, DataNotFound, UnknownLayout, UnsafeData
from rlio.formats.format import formats

GOLDEN = Path(__file__).with_name("golden") / "formats"
#: Formats that rlio writes.
WRITTEN = (
    *("d3rlpy", "d4rl", "lerobot", "minari", "npz", "parquet", "rllib-episodes", "rllib-json", "robomimic"),
)
#: Files that the libraries wrote themselves.
KEPT = {
    "d3rlpy-1": "d3rlpy/1",
    "rlds": "rlds",
    "tianshou": "tianshou",
    "torchrl": "torchrl/ring",
    "minari-arrow": "minari/nested/arrow-v0",
    "minari-parquet": "minari/nested/parquet-v0",
}
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
ROWS = 20


def _batch() -> rlio.SampleBatch:
    ids = np.arange(ROWS)
    return rlio.SampleBatch(
        obs=ids[:, None].astype(np.float32),
        new_obs=(ids[:, None] + 1).astype(np.float32),
        actions=ids % 3,
        rewards=np.ones(ROWS, np.float32),
        terminateds=ids % 10 == 9,
        truncateds=np.zeros(ROWS, bool),
        eps_id=ids // 10,
        t=ids % 10,
    )


def _as_arrow(folder: Path, batch: rlio.SampleBatch) -> None:
    table = pa.table({name: np.asarray(column).tolist() for name, column in batch.items()})
    with pa.ipc.new_file(folder / "run.arrow", table.schema) as file:
        file.write_table(table)


def _as_csv(folder: Path, batch: rlio.SampleBatch) -> None:
    columns = {name: np.asarray(column).reshape(ROWS) for name, column in batch.items()}
    pa.csv.write_csv(pa.table(columns), folder / "run.csv")


def _as_json_lines(folder: Path, batch: rlio.SampleBatch) -> None:
    rows = [{name: np.asarray(batch[name])[i].tolist() for name in batch} for i in range(ROWS)]
    (folder / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


TABLES = {"arrow": _as_arrow, "csv": _as_csv, "jsonl": _as_json_lines}
MAPPING = rlio.Mapping(
    columns={name: name for name in ("obs", "actions", "rewards")},
    next_obs="new_obs",
    episode="eps_id",
    terminated="terminateds",
    truncated="truncateds",
)
#: Opened by a mapping; all others are known by their looks.
MAPPED = {"jsonl": MAPPING, "csv-mapped": MAPPING, "parquet-mapped": MAPPING, "npz-mapped": MAPPING}
MAPPED["huggingface"] = rlio.Mapping(
    columns={"obs": "observation.state", "actions": "action", "rewards": "next.reward"},
    next_obs="derive",
    episode="episode_index",
    terminated="next.done",
)
KINDS = tuple(dict.fromkeys((*WRITTEN, *KEPT, *TABLES, "huggingface", *MAPPED)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with data of each kind."""
    top = tmp_path_factory.mktemp("kinds")
    batch = _batch()
    with rlio.ParquetWriter(top / "own") as writer:
        writer.write(batch)
    found: dict[str, Path] = {}
    for kind in WRITTEN:
        found[kind] = top / kind
        rlio.convert(top / "own", found[kind], to=kind, prove=False)
    for kind, write in TABLES.items():
        found[kind] = top / kind
        found[kind].mkdir()
        write(found[kind], batch)
    for kind, place in KEPT.items():
        if kind == "d3rlpy-1":
            from foreign_files import d3rlpy_1

            found[kind] = top / kind
            found[kind].mkdir()
            d3rlpy_1(found[kind])
        elif kind == "tianshou":
            found[kind] = top / kind
            found[kind].mkdir()
            shutil.copy(GOLDEN / "tianshou" / "ring.hdf5", found[kind])
        else:
            found[kind] = GOLDEN / place
    found["huggingface"] = GOLDEN / "huggingface" / "saved"
    for kind in ("csv", "parquet", "npz"):
        found[f"{kind}-mapped"] = found[kind]
    return found


def _copied(folders: dict[str, Path], kind: str, to: Path) -> Path:
    shutil.copytree(folders[kind], to)
    return to


def _rows(place: object, kind: str, **options: object) -> int:
    total = 0
    if kind == "huggingface":
        options["format_options"] = {"split": "train"}
    options = {"mapping": MAPPED.get(kind), **options}
    with rlio.read(place, epochs=1, batch_size=1000, shuffle=False, **options) as reader:
        for batch in reader:
            total += len(batch)
    assert total
    return total


def _put(root: Path, to: str) -> None:
    memory = fsspec.filesystem("memory")
    for path in root.rglob("*"):
        if path.is_file():
            memory.pipe(f"/{to}/{path.relative_to(root).as_posix()}", path.read_bytes())


def _strew(root: Path) -> None:
    """Litter in every folder: of macOS, of notebooks and editors, and copies in hidden folders."""
    for folder, _, names in list(os.walk(root)):
        here = Path(folder)
        (here / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
        (here / ".ipynb_checkpoints").mkdir()
        for name in names:
            (here / f"._{name}").write_bytes(b"\0\5\x16\7" + b"\0" * 60)
            stem, dot, ending = name.rpartition(".")
            shutil.copy(here / name, here / ".ipynb_checkpoints" / f"{stem}-checkpoint{dot}{ending}")
            shutil.copy(here / name, here / ".ipynb_checkpoints" / name)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", some(2, KINDS))
def test_litter_in_every_folder_is_ignored(folders: dict[str, Path], kind: str, tmp_path: Path) -> None:
    expected = _rows(folders[kind], kind)
    root = _copied(folders, kind, tmp_path / "data")
    _strew(root)
    assert _rows(root, kind) == expected
    memory = fsspec.filesystem("memory")
    place = f"memory://{tmp_path.name}"
    _put(root, tmp_path.name)
    assert _rows(place, kind) == expected
    memory.rm(tmp_path.name, recursive=True)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", some(2, KINDS, start=1))
def test_a_folder_whose_name_has_glob_characters_is_read(
    folders: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    expected = _rows(folders[kind], kind)
    root = _copied(folders, kind, tmp_path / "lr=[0.1]" / "what?*" / "run[a-c]")
    assert _rows(root, kind) == expected
    assert _rows(str(root), kind) == expected
    assert _rows(f"file://{root}", kind) == expected
    memory = fsspec.filesystem("memory")
    _put(root, f"{tmp_path.name}/lr=[0.1]/run")
    assert _rows(f"memory://{tmp_path.name}/lr=[0.1]/run", kind) == expected
    memory.rm(tmp_path.name, recursive=True)


def test_a_glob_below_a_folder_whose_name_has_glob_characters_is_a_glob(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    root = _copied(folders, "npz", tmp_path / "lr=[0.1]" / "run")
    for place in (
        root / "*.npz",
        tmp_path / "lr=[0.1]" / "r*" / "*.npz",
        tmp_path / "lr=[0.1]" / "**" / "*.npz",
    ):
        assert _rows(str(place), "npz") == ROWS
    memory = fsspec.filesystem("memory")
    _put(root, f"{tmp_path.name}/lr=[0.1]/run")
    assert _rows(f"memory://{tmp_path.name}/lr=[0.1]/run/*.npz", "npz") == ROWS
    memory.rm(tmp_path.name, recursive=True)


def _linked(root: Path, store: Path) -> None:
    """Move every file to ``store``, and leave links, as caches do."""
    store.mkdir()
    files = [path for path in root.rglob("*") if path.is_file() and store not in path.parents]
    for number, path in enumerate(files):
        shutil.move(path, store / str(number))
        path.symlink_to(os.path.relpath(store / str(number), path.parent))


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", some(2, KINDS))
def test_links_within_a_root_are_followed(folders: dict[str, Path], kind: str, tmp_path: Path) -> None:
    expected = _rows(folders[kind], kind)
    root = _copied(folders, kind, tmp_path / "data")
    _linked(root, root / "blobs")
    assert _rows(root, kind) == expected


def _in_hub(folder: Path, cache: Path, repository: str = "datasets--owner--name") -> Path:
    """The folder as the hub's cache keeps it: a snapshot of links to files named by their content."""
    root = cache / repository / "snapshots" / ("0123456789" * 4)
    shutil.copytree(folder, root)
    blobs = cache / repository / "blobs"
    blobs.mkdir()
    for path in [path for path in root.rglob("*") if path.is_file()]:
        blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
        path.replace(blob)
        path.symlink_to(os.path.relpath(blob, path.parent))
    return root


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", some(2, KINDS, start=1))
def test_a_snapshot_of_the_hubs_cache_is_read_through_its_links(
    folders: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    root = _in_hub(folders[kind], tmp_path / "hub")
    expected = _rows(folders[kind], kind)
    assert _rows(root, kind) == expected
    if kind in ("npz", "csv", "parquet", "jsonl"):
        assert _rows(f"{root}/*", kind) == expected
        assert _rows(f"{root.parent}/*/*", kind) == expected
        assert _rows(root.parent / root.name / ".." / root.name, kind) == expected


def test_equal_files_of_the_hubs_cache_are_one_blob_and_two_files(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    twice = tmp_path / "twice"
    shutil.copytree(folders["npz"], twice)
    for path in list(twice.iterdir()):
        shutil.copy(path, path.with_name(f"again-{path.name}"))
    root = _in_hub(twice, tmp_path / "hub")
    assert _rows(root, "npz") == 2 * _rows(folders["npz"], "npz")
    assert _rows(f"{root}/*.npz", "npz") == 2 * _rows(folders["npz"], "npz")


@pytest.mark.parametrize("kind", ["npz", "lerobot"])
def test_other_links_out_of_a_snapshot_are_named_and_refused(
    folders: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    blobs = tmp_path / "hub" / "datasets--owner--name" / "blobs"
    moved = {
        "another repository": tmp_path / "hub" / "datasets--owner--other" / "blobs",
        "below the blobs": blobs / "below",
        "beside the blobs": blobs.with_name("refs"),
        "through a link among the blobs": tmp_path / "elsewhere",
    }
    for where, folder in moved.items():
        shutil.rmtree(tmp_path / "hub", ignore_errors=True)
        root = _in_hub(folders[kind], tmp_path / "hub")
        path = next(path for path in sorted(root.rglob("*"), reverse=True) if path.is_symlink())
        folder.mkdir(parents=True, exist_ok=True)
        blob = path.resolve()
        target = Path(shutil.move(blob, folder / blob.name))
        if where == "through a link among the blobs":
            blob.symlink_to(target)
        else:
            path.unlink()
            path.symlink_to(os.path.relpath(target, path.parent))
        with pytest.raises(UnsafeData, match=r"symbolic link '.*' leads out of the folder"):
            _rows(root, kind)


def test_a_folder_of_blobs_that_is_a_link_itself_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    root = _in_hub(folders["npz"], tmp_path / "hub")
    blobs = root.parents[1] / "blobs"
    shutil.move(blobs, tmp_path / "private")
    blobs.symlink_to(tmp_path / "private")
    with pytest.raises(UnsafeData, match="leads out of the folder"):
        _rows(root, "npz")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_error", ["skip", "raise"])
@pytest.mark.each_value_once
def test_links_out_of_a_root_are_named_and_refused(
    folders: dict[str, Path], kind: str, on_error: str, tmp_path: Path
) -> None:
    root = _copied(folders, kind, tmp_path / "data")
    _linked(root, tmp_path / "blobs")
    with pytest.raises(UnsafeData, match=r"symbolic link '.*' leads out of the folder.*cp -rL"):
        _rows(root, kind, on_error=on_error)


@pytest.mark.few(11)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_error", ["skip", "raise"])
@pytest.mark.each_value_once
def test_pointers_of_git_lfs_are_named_and_never_skipped(
    folders: dict[str, Path], kind: str, on_error: str, tmp_path: Path
) -> None:
    root = _copied(folders, kind, tmp_path / "data")
    files = [path for path in root.rglob("*") if path.is_file()]
    # All files; and the data alone, beside a description that is no pointer.
    data = [
        path for path in files if path.suffix not in (".json", ".md") or kind.startswith(("rllib", "json"))
    ]
    data = [path for path in data if path.suffix not in (".pkl", ".py") and "label" not in path.name]
    for pointers in (data, files):
        for path in pointers:
            path.write_bytes(POINTER)
        with pytest.raises(UnknownLayout, match=r"pointer of Git LFS.*git lfs pull"):
            _rows(root, kind, on_error=on_error)


def test_a_zip_file_that_is_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.zip").write_bytes(POINTER)
    with pytest.raises(UnknownLayout, match="git lfs pull"):
        rlio.read(tmp_path / "run.zip", epochs=1)


def test_litter_in_a_zip_file_is_ignored(folders: dict[str, Path], tmp_path: Path) -> None:
    root = _copied(folders, "lerobot", tmp_path / "data")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for path in root.rglob("*"):
            if path.is_file():
                name = path.relative_to(tmp_path)
                archive.write(path, name)
                archive.writestr(f"__MACOSX/{name.parent}/._{name.name}", b"\0\5\x16\7")
    assert _rows(tmp_path / "data.zip", "lerobot") == ROWS


def test_tasks_of_lerobot_are_numbered_from_anywhere(folders: dict[str, Path], tmp_path: Path) -> None:
    root = _copied(folders, "lerobot", tmp_path / "data")
    (data,) = root.glob("data/*/*.parquet")
    table = pq.read_table(data)
    numbers = np.where(np.arange(ROWS) < 10, 7, 3)
    place = table.schema.get_field_index("task_index")
    pq.write_table(table.set_column(place, "task_index", pa.array(numbers)), data)
    pq.write_table(
        pa.table({"task_index": [7, 3], "task": ["lift", "push"]}), root / "meta" / "tasks.parquet"
    )
    with rlio.read(root, epochs=1, batch_size=ROWS, shuffle=False) as reader:
        assert reader.sample()["task_index"].tolist() == numbers.tolist()
    rlio.convert(root, tmp_path / "again", to="lerobot", prove=True)
    again = pq.read_table(tmp_path / "again" / "meta" / "tasks.parquet").to_pydict()
    assert dict(zip(again["task_index"], again["__index_level_0__"], strict=True)) == {3: "push", 7: "lift"}
    with rlio.read(tmp_path / "again", epochs=1, batch_size=ROWS, shuffle=False) as reader:
        assert reader.sample()["task_index"].tolist() == numbers.tolist()


def test_a_single_task_of_lerobot_may_have_any_number(folders: dict[str, Path], tmp_path: Path) -> None:
    root = _copied(folders, "lerobot", tmp_path / "data")
    (data,) = root.glob("data/*/*.parquet")
    table = pq.read_table(data)
    place = table.schema.get_field_index("task_index")
    pq.write_table(table.set_column(place, "task_index", pa.array([1] * ROWS)), data)
    pq.write_table(pa.table({"task_index": [1], "task": ["lift"]}), root / "meta" / "tasks.parquet")
    assert _rows(root, "lerobot") == ROWS
    rlio.convert(root, tmp_path / "again", to="lerobot", prove=True)
    again = pq.read_table(tmp_path / "again" / "meta" / "tasks.parquet").to_pydict()
    assert again == {"task_index": [1], "__index_level_0__": ["lift"]}


# ---- refusals ----

#: Ending of a name -> what the refusal has.
REFUSED = {
    ".pkl": "a pickle.*from_arrays.*from_episodes",
    ".pickle": "a pickle",
    ".joblib": "a pickle",
    ".npy": "NumPy's .npy.*from_arrays",
    ".pt": "torch.save.*weights_only.*from_arrays",
    ".pth": "torch.save",
    ".gz": "compressed.*gunzip",
    ".pkl.gz": "compressed",
    ".mcap": "ROS.*mcap.*from_arrays",
    ".bag": "ROS",
    ".demo": "ML-Agents.*from_episodes",
    ".mat": "MATLAB.*loadmat.*from_arrays",
    ".lance": "Lance.*to_table",
    ".xlsx": "spreadsheet.*read_excel",
}


@pytest.mark.parametrize("ending", REFUSED)
@pytest.mark.parametrize("is_folder", [False, True])
@pytest.mark.parametrize("mapping", [None, MAPPING])
@pytest.mark.each_value_once
def test_a_kind_of_file_that_is_not_read_is_refused_by_name(
    ending: str, is_folder: bool, mapping: rlio.Mapping | None, tmp_path: Path
) -> None:
    (tmp_path / f"run{ending}").write_bytes(b"\x80\4data")
    place = tmp_path if is_folder else tmp_path / f"run{ending}"
    for opens in (rlio.read, rlio.open_dataset):
        with pytest.raises(UnknownLayout, match=REFUSED[ending]):
            opens(place, mapping=mapping, on_error="skip", **({"epochs": 1} if opens is rlio.read else {}))


def test_files_that_are_not_read_beside_those_that_are_change_nothing(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    for kind in ("npz", "csv", "minari", "lerobot", "d3rlpy", "rllib-json", "jsonl", "csv-mapped"):
        root = _copied(folders, kind, tmp_path / kind)
        for name in ("model.pkl", "a.npy", "weights.pt", "log.gz"):
            (root / name).write_bytes(b"other")
        assert _rows(root, kind) == ROWS


@pytest.mark.parametrize("mapping", [None, MAPPING])
def test_the_csv_of_a_monitor_is_refused_by_name(mapping: rlio.Mapping | None, tmp_path: Path) -> None:
    text = '#{"t_start": 1.0, "env_id": "CartPole-v1"}\nr,l,t\n1.0,5,0.1\n'
    (tmp_path / "0.monitor.csv").write_text(text)
    with pytest.raises(UnknownLayout, match=r"Monitor.*no steps"):
        rlio.read(tmp_path / "0.monitor.csv", epochs=1, mapping=mapping, on_error="skip")


def test_hdf5_of_an_unknown_layout_shows_the_tree_of_its_names(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "run.hdf5", "w") as file:
        file["traj_0/obs/state"], file["traj_0/actions"] = np.zeros((3, 2)), np.zeros((3, 1), np.float32)
        file["traj_0/circle"] = file["traj_0"]
    for on_error in ("raise", "skip"):
        with pytest.raises(UnknownLayout) as caught:
            rlio.read(tmp_path / "run.hdf5", epochs=1, on_error=on_error)
        text = str(caught.value)
        assert "traj_0/obs/state (float64 (3, 2))" in text
        assert "traj_0/actions (float32 (3, 1))" in text
        assert "Robomimic" in text  # One of the layouts of HDF5 that are known.
        assert "rlio.from_arrays" in text


def _spread(records: list[Any]) -> str:
    """A list over several lines, one record a line."""
    return "\n\n[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n"


@pytest.mark.parametrize("mapping", [None, MAPPING], ids=["names", "mapping"])
@pytest.mark.parametrize(
    "text", [json.dumps, functools.partial(json.dumps, indent=2), _spread], ids=["line", "lines", "spread"]
)
@pytest.mark.each_value_once
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_list_of_records_in_json_is_refused_with_the_way_out(
    text: Callable[[Any], str], mapping: Any, mark: str, tmp_path: Path
) -> None:
    records = [{"state": [1.0], "act": 0, "rew": 1.0, "traj": 0}] * 2
    (tmp_path / "run.json").write_text(mark + text(records), encoding="utf-8")
    for on_error in ("raise", "skip"):
        with pytest.raises(UnknownLayout, match=r"list of records.*jq.*'obs': 'state'.*episode='traj'"):
            _rows(tmp_path / "run.json", "", mapping=mapping, on_error=on_error)


def test_a_line_of_json_that_is_null_is_damage(tmp_path: Path) -> None:
    """pyarrow crashes if the first line is null; of a later one it makes a row."""
    line = json.dumps({"state": [1.0], "act": 0, "rew": 1.0, "traj": 0}) + "\n"
    for text in ("null\n" + line, " \n\tnull", line + "null\n" + line):
        (tmp_path / "run.jsonl").write_text(text)
        with pytest.raises(rlio.errors.RlioError):
            _rows(tmp_path / "run.jsonl", "", mapping=MAPPING, on_error="raise")


def test_an_object_over_several_lines_of_json_is_refused_with_the_way_out(tmp_path: Path) -> None:
    for value in ({"state": [[1.0]], "act": [0]}, {"episodes": [{"state": [[1.0]], "act": [0]}]}):
        (tmp_path / "run.json").write_text(json.dumps(value, indent=1))
        with pytest.raises(UnknownLayout, match=r"over several lines.*from_episodes.*'obs': 'state'"):
            _rows(tmp_path / "run.json", "", mapping=None, on_error="skip")


@pytest.mark.parametrize(
    "first", [b'{"type": "SampleBatch", "obs": [1.0,', b'["type": "SampleBatch", "t": [0]}', b"[1,"]
)
def test_a_damaged_line_of_a_file_of_records_is_no_list(first: bytes, tmp_path: Path) -> None:
    line = (
        b'{"type": "SampleBatch", "t": [0], "obs": [1.0], "actions": [0], "rewards": [1.0], "eps_id": [3]}\n'
    )
    texts = (
        [line + first + b"\n" + line]
        if first == b"[1,"
        else [first + b"\n" + line, line + first + b"\n" + line]
    )
    for text in texts:
        (tmp_path / "run.json").write_bytes(text)
        with pytest.raises(CorruptData):
            _rows(tmp_path / "run.json", "", mapping=None, on_error="raise")
        assert _rows(tmp_path / "run.json", "", mapping=None, on_error="skip") == text.count(line)


def test_a_lerobot_data_set_without_a_version_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    root = _copied(folders, "lerobot", tmp_path / "data")
    path = root / "meta" / "info.json"
    about = json.loads(path.read_text())
    del about["codebase_version"]
    path.write_text(json.dumps(about))
    with pytest.raises(UnknownLayout, match=r"codebase_version is missing.*v3\.0.*meta/info.json"):
        rlio.read(root, epochs=1)


def _frames(path: Path) -> None:
    path.parent.mkdir(parents=True)
    episode = [0, 0, 0, 1, 1, 1]
    frames = {
        "observation.state": [[0.1, 0.2]] * 6,
        "action": [[0.0]] * 6,
        "episode_index": episode,
        "frame_index": [0, 1, 2] * 2,
    }
    pq.write_table(pa.table({**frames, "timestamp": [0.0, 0.1, 0.2] * 2, "index": list(range(6))}), path)


def _described_lerobot(root: Path, folder: str, about: dict[str, Any] | None) -> Path:
    _frames(root / "data" / "train-00000-of-00001.parquet")
    if about is not None:
        (root / folder).mkdir()
        (root / folder / "info.json").write_text(json.dumps(about))
    return root


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("folder", "about", "found"),
    [
        ("meta_data", {"codebase_version": "v1.6", "fps": 10, "video": False}, "v1 have meta_data/info.json"),
        ("meta_data", {"fps": 10, "video": False}, "v1 have meta_data/info.json"),
        (
            "meta",
            {"codebase_version": "v1.6", "fps": 10, "features": {}, "total_episodes": 2},
            "found version 'v1.6'",
        ),
        (
            "meta",
            {"codebase_version": "v4.0", "fps": 10, "features": {}, "total_episodes": 2},
            "found version 'v4.0'",
        ),
        ("meta", {"fps": 10, "features": {}, "total_episodes": 2}, "codebase_version is missing"),
        ("meta", None, "meta/info.json is not there"),
    ],
)
def test_lerobot_of_an_unknown_version_says_what_is_missing_and_its_frames_are_a_table(
    folder: str, about: dict[str, Any] | None, found: str, tmp_path: Path
) -> None:
    root = _described_lerobot(tmp_path / "data set", folder, about)
    with pytest.raises((UnknownLayout, DataNotFound)) as caught:
        rlio.read(root, epochs=1)
    assert found in str(caught.value)
    way = re.search(r"rlio\.read\('FOLDER(.*?)', mapping=(.*)\) \[in", str(caught.value))
    assert way or found == "codebase_version is missing"
    given = rlio.Mapping({"obs": "observation.state", "actions": "action"}, episode="episode_index")
    if way:
        assert eval(way[2], {"rlio": rlio}) == given
        assert (
            rlio.read(f"{root}{way[1]}", mapping=given, epochs=1, batch_size=9).sample()["eps_id"].tolist()
            == [0] * 3 + [1] * 3
        )
    with pytest.raises(
        DataNotFound, match=r"no file of a table in the folder itself, but 1 \.parquet below"
    ) as caught:
        rlio.read(root, mapping=given, epochs=1)
    assert repr(f"{root}/**/*.parquet") in str(caught.value)
    assert len(rlio.read(f"{root}/**/*.parquet", mapping=given, batch_size=9, epochs=1).sample()) == 6


def test_an_unknown_kind_of_file_lists_the_kinds_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "run.nothing").write_bytes(b"x")
    with pytest.raises(UnknownLayout) as caught:
        rlio.read(tmp_path / "run.nothing", epochs=1)
    assert all(one.title in str(caught.value) for one in formats() if one.is_read)
    assert "mapping=rlio.Mapping(columns=" in str(caught.value)


@pytest.mark.parametrize("kind", ["csv", "npz", "jsonl", "parquet", "arrow"])
def test_a_table_that_needs_a_mapping_shows_it_with_its_own_names(kind: str, tmp_path: Path) -> None:
    columns = {"state": [1.0, 2.0], "act": [0, 1], "rew": [1.0, 1.0], "traj": [0, 0]}
    table, path = pa.table(columns), tmp_path / f"run.{kind}"
    if kind == "csv":
        pa.csv.write_csv(table, path)
    elif kind == "npz":
        np.savez(path, **columns)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    elif kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    shown = "rlio.Mapping(columns={'obs': 'state', 'actions': 'act', 'rewards': 'rew'}, episode='traj')"
    with pytest.raises(UnknownLayout) as caught:
        _rows(path, "")
    assert f"mapping={shown}" in str(caught.value)
    assert _rows(path, "", mapping=eval(shown, {"rlio": rlio})) == 2  # What it shows is right.
