"""TorchRL's memory-mapped TensorDicts. TorchRL wrote the fixtures: tests/golden/formats/torchrl/make.py.

Step number n holds n in its observation, n / 10 in its action, n + 0.5 in its reward, and n + 0.25 in its
next observation.
"""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlio
from rlio.errors import CorruptData, MissingColumn, OptionError, UnknownLayout, UnsafeData
from rlio.formats.format import recognise
from rlio.limits import Limits
from rlio.readers.episode_reader import EpisodeReader

GOLDEN = Path(__file__).with_name("golden") / "formats/torchrl"


def all_rows(root: Any, **options: Any) -> Any:
    with EpisodeReader(root, epochs=1, **options) as reader:
        return rlio.concat_samples(list(reader))


def check(rows: Any, numbers: list[int], lengths: list[int]) -> None:
    """Every value is in the row of its step, and the rows are those of episodes of ``lengths``."""
    values = np.array(numbers, np.float32)
    obs, after = (
        column["observation"] if isinstance(column, dict) else column
        for column in (rows["obs"], rows["new_obs"])
    )
    assert obs.tolist() == np.stack([values, -values], 1).tolist()
    assert after.tolist() == np.stack([values + 0.25, -values], 1).tolist()
    assert rows["actions"].tolist() == (values / np.float32(10))[:, None].tolist()
    assert rows["rewards"].tolist() == (values + 0.5).tolist()
    assert rows["eps_id"].tolist() == np.repeat(range(len(lengths)), lengths).tolist()
    assert rows["t"].tolist() == [t for steps in lengths for t in range(steps)]


def test_a_ring_is_read_from_its_oldest_row_to_its_newest() -> None:
    with rlio.read(GOLDEN / "ring", epochs=1) as reader:
        rows: Any = rlio.concat_samples(list(reader))
        assert reader.format.name == "torchrl"
    check(rows, list(range(4, 14)), [3, 3, 4])
    assert np.flatnonzero(rows["terminateds"]).tolist() == [5]
    assert np.flatnonzero(rows["truncateds"]).tolist() == [2]


def test_trajectories_that_alternate_are_put_together_and_rows_never_written_are_not_read() -> None:
    rows = all_rows(GOLDEN / "woven")
    check(rows, [0, 1, 2, 3, 100, 101, 102, 103], [4, 4])
    assert rows["obs"]["pixels"].shape == (8, 3, 2)
    assert (rows["new_obs"]["pixels"] == rows["obs"]["pixels"] + 1).all()
    assert rows["sample_log_prob"].tolist() == [0, 1, 2, 3, 100, 101, 102, 103]
    assert np.flatnonzero(rows["terminateds"]).tolist() == [3]
    assert np.flatnonzero(rows["truncateds"]).tolist() == [7]
    rows = all_rows(GOLDEN / "woven", format_options={"observations": ["pixels"]}, columns=["obs"])
    assert rows["obs"].shape == (8, 3, 2)
    with pytest.raises(OptionError, match="pixel"):
        all_rows(GOLDEN / "woven", format_options={"observations": ["image"]})


def test_the_last_dimension_of_a_tensordict_is_time_and_texts_are_named() -> None:
    with EpisodeReader(GOLDEN / "tensors", epochs=1) as reader:
        rows = rlio.concat_samples(list(reader))
        assert "note" in reader.source.notes[0]  # type: ignore[attr-defined]
    check(rows, list(range(6)), [3, 3])


def test_a_row_of_time_ends_an_episode_that_has_not_ended(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "tensors", tmp_path / "x")
    for name in ("done", "terminated", "truncated"):
        (tmp_path / f"x/next/{name}.memmap").write_bytes(bytes(6))
    check(all_rows(tmp_path / "x"), list(range(6)), [3, 3])


def test_the_storage_of_a_full_ring_alone_is_refused_and_that_of_another_buffer_is_read() -> None:
    assert len(all_rows(GOLDEN / "woven/storage")) == 8
    with pytest.raises(UnknownLayout, match="cursor"):
        all_rows(GOLDEN / "ring/storage")
    with pytest.raises(UnknownLayout, match="TED"):
        all_rows(GOLDEN / "ring/storage/next")


def test_a_full_buffer_without_its_cursor_is_refused_and_another_is_read(tmp_path: Path) -> None:
    for name in ("ring", "woven"):
        shutil.copytree(GOLDEN / name, tmp_path / name)
        shutil.rmtree(tmp_path / name / "writer")
    with pytest.raises(UnknownLayout, match=r"writer/metadata\.json"):
        all_rows(tmp_path / "ring")
    assert len(all_rows(tmp_path / "woven")) == 8


def test_writers_that_keep_no_order_or_are_unknown_are_refused_by_name(tmp_path: Path) -> None:
    top: dict[str, Any] = {"rank_key": ["next", "reward"], "dtype": "torch.float32", "shape": [8, 2]}
    generations = {"generation_shape": [10], "generation_dtype": "torch.int64"}
    for number, (fields, named) in enumerate(
        ((top, "TensorDictMaxValueWriter"), ({"rank": 1}, r"\['rank'\]"))
    ):
        for name in ("ring", "woven"):
            root = tmp_path / f"{name}{number}"
            shutil.copytree(GOLDEN / name, root)
            change(root / "writer/metadata.json", **fields)
            with pytest.raises(UnknownLayout, match=named):
                all_rows(root)
    shutil.copytree(GOLDEN / "ring", tmp_path / "x")
    change(tmp_path / "x/writer/metadata.json", **generations)
    check(all_rows(tmp_path / "x"), list(range(4, 14)), [3, 3, 4])


def test_a_buffer_of_several_dimensions_is_refused_also_if_its_ring_begins_at_0(tmp_path: Path) -> None:
    root = tmp_path / "x"
    shutil.copytree(GOLDEN / "ring", root)
    for path in (root / "storage/meta.json", root / "storage/next/meta.json"):
        meta = json.loads(path.read_text())
        for about in meta.values():
            if isinstance(about, dict) and "shape" in about:
                about["shape"] = [5, 2, *about["shape"][1:]]
        path.write_text(json.dumps(meta | {"shape": [5, 2]}))
    change(root / "writer/metadata.json", cursor=0)
    with pytest.raises(UnknownLayout, match="dimension"):
        all_rows(root)


def test_a_dump_is_recognised_and_converted(tmp_path: Path) -> None:
    for place in ("ring", "ring/storage", "woven", "tensors", "tensors/next"):
        found = recognise(GOLDEN / place)
        assert found is not None
        assert (found.format.name, found.format.is_read) == ("torchrl", True), place
    assert len(rlio.open_dataset(GOLDEN / "woven")) == 8
    report = rlio.convert(GOLDEN / "woven", tmp_path / "a", prove=True)
    assert (report.episodes, report.rows, report.proved) == (2, 8, True)
    for content in ({"shape": [6], "dtype": "torch.float32"}, {"_type": "Box"}, {"type": "TensorDict"}):
        (tmp_path / "meta.json").write_text(json.dumps(content))
        found = recognise(tmp_path / "meta.json")
        assert found is None or found.format.name != "torchrl"


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.further
def test_every_file_that_is_cut_or_absent_is_an_error_that_names_it(tmp_path: Path) -> None:
    for name in ("ring", "woven", "tensors"):
        for file in sorted((GOLDEN / name).rglob("*")):
            is_read = file.suffix == ".memmap" or file.name in ("meta.json", "storage_metadata.json")
            if not is_read and file.relative_to(GOLDEN / name).as_posix() != "writer/metadata.json":
                continue
            shutil.rmtree(tmp_path / "x", ignore_errors=True)
            shutil.copytree(GOLDEN / name, tmp_path / "x")
            copy = tmp_path / "x" / file.relative_to(GOLDEN / name)
            data = copy.read_bytes()
            for content in (data[:-1], data + b"\0", b""):
                copy.write_bytes(content)
                with pytest.raises(CorruptData) as caught:
                    all_rows(tmp_path / "x", format="torchrl")
                assert caught.value.uri == str(copy), (file, content)
            copy.unlink()
            if file.suffix == ".memmap" or copy.parent.name == "next":
                with pytest.raises(CorruptData, match=copy.name):
                    all_rows(tmp_path / "x", format="torchrl")


WRONG: list[tuple[str, dict[str, Any], type[Exception]]] = [
    ("storage/meta.json", {"shape": [11]}, CorruptData),
    ("storage/meta.json", {"shape": "x"}, CorruptData),
    ("storage/meta.json", {"shape": [-1]}, CorruptData),
    ("storage/meta.json", {"_type": "<class 'os.system'>"}, UnknownLayout),
    ("storage/meta.json", {"_type": "<class 'tensordict._lazy.LazyStackedTensorDict'>"}, UnknownLayout),
    ("storage/meta.json", {"action": {"dtype": "torch.float32", "shape": [10, 2**40]}}, CorruptData),
    ("storage/meta.json", {"action": {"dtype": "torch.bfloat16", "shape": [10, 1]}}, UnknownLayout),
    ("storage/meta.json", {"../../secret": {"dtype": "torch.uint8", "shape": [10]}}, CorruptData),
    ("storage/meta.json", {"../../secret": {"type": "TensorDict"}}, CorruptData),
    ("storage/meta.json", {"next": {"type": "NonTensorData", "dtype": "object"}}, UnknownLayout),
    ("storage/next/meta.json", {"shape": [10], "_type": "<class 'tensordict.NonTensorData'>"}, UnknownLayout),
    ("storage/next/meta.json", {"reward": {"dtype": "torch.float32", "shape": [9, 1]}}, CorruptData),
    ("storage/next/meta.json", {"terminated": {"dtype": "torch.uint8", "shape": [10, 1]}}, UnknownLayout),
    ("storage/next/meta.json", {"terminated": None}, MissingColumn),
    ("storage/storage_metadata.json", {"len": 11}, CorruptData),
    ("storage/storage_metadata.json", {"len": "10"}, CorruptData),
    ("writer/metadata.json", {"cursor": 11}, CorruptData),
    ("writer/metadata.json", {"cursor": -1}, CorruptData),
]


@pytest.mark.few(9)
@pytest.mark.parametrize("number", range(len(WRONG)))
def test_forged_descriptions_are_refused(number: int, tmp_path: Path) -> None:
    path, fields, error = WRONG[number]
    (tmp_path / "secret.memmap").write_bytes(bytes(10))
    shutil.copytree(GOLDEN / "ring/storage", tmp_path / "secret")
    shutil.copytree(GOLDEN / "ring", tmp_path / "x")
    change(tmp_path / "x" / path, **fields)
    with pytest.raises(error):
        all_rows(tmp_path / "x", format="torchrl")


def test_flags_other_than_0_and_1_and_too_much_memory_are_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "ring", tmp_path / "x")
    with pytest.raises(UnsafeData):
        all_rows(tmp_path / "x", limits=Limits(group_bytes=50))
    (tmp_path / "x/storage/next/terminated.memmap").write_bytes(bytes([0, 2] * 5))
    with pytest.raises(CorruptData, match="bools"):
        all_rows(tmp_path / "x")


class Harm:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self._path,))


def test_pickles_in_a_dump_are_never_loaded(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "tensors", tmp_path / "x")
    harm = pickle.dumps(Harm(tmp_path / "harm"))
    for name in ("prefetch.pkl", "note/other.pickle", "transform.t"):
        (tmp_path / "x" / name).write_bytes(harm)
    change(tmp_path / "x/note/meta.json", _type="<class 'tensordict.tensorclass.NonTensorData'>", data=None)
    assert len(all_rows(tmp_path / "x")) == 6
    assert not (tmp_path / "harm").exists()


# ---- rows without the ids of trajectories ----


def dump(root: Path, rows: list[tuple[int, int, bool]]) -> Path:
    """A TensorDict of rows (environment, step, terminated) without ids; row t of environment e observes
    100 e + t.
    """

    def write(folder: Path, tensors: dict[str, np.ndarray]) -> None:
        folder.mkdir(parents=True)
        about: dict[str, Any] = {
            "shape": [len(rows)],
            "device": "cpu",
            "_type": "<class 'tensordict._td.TensorDict'>",
        }
        for name, values in tensors.items():
            (folder / f"{name}.memmap").write_bytes(values.tobytes())
            about[name] = {"device": "cpu", "shape": list(values.shape), "dtype": f"torch.{values.dtype}"}
        (folder / "meta.json").write_text(json.dumps(about))

    obs = np.array([[100.0 * env + step] for env, step, _ in rows], np.float32)
    ends = np.array([[end] for _, _, end in rows])
    write(root, {"observation": obs, "action": obs * 10})
    after = {"observation": obs + 1, "reward": obs, "terminated": ends, "done": ends}
    write(root / "next", after)
    meta = json.loads((root / "meta.json").read_text())
    (root / "meta.json").write_text(json.dumps({**meta, "next": {"type": "TensorDict"}}))
    return root


def pieces(root: Path) -> list[list[float]]:
    """The observations of each episode."""
    rows = all_rows(root)
    found: dict[int, list[float]] = {}
    for id_, value in zip(rows["eps_id"].tolist(), rows["obs"][:, 0].tolist(), strict=True):
        found.setdefault(id_, []).append(value)
    return list(found.values())


@pytest.mark.parametrize("environments", [1, 2, 3])
def test_rows_of_environments_that_take_turns_are_put_together_without_ids(
    environments: int, tmp_path: Path
) -> None:
    rows = [(env, step, step == 3 + env) for step in range(6) for env in range(environments)]
    rows = [(env + 10 * (step > 3 + env), step % (4 + env), end) for env, step, end in rows]
    found = pieces(dump(tmp_path / "dump", rows))
    expected = []
    for env in range(environments):
        mine = [100.0 * e + step for e, step, _ in rows if e % 10 == env]
        expected += [one for one in (mine[: 4 + env], mine[4 + env :]) if one]
    assert found == expected


def test_an_episode_is_cut_where_next_is_not_followed_by_its_row(tmp_path: Path) -> None:
    rows = [(0, 0, False), (0, 1, False), (1, 0, False), (1, 1, True), (2, 0, False), (2, 7, False)]
    root = dump(tmp_path / "dump", rows)
    assert pieces(root) == [[0, 1], [100, 101], [200], [207]]
    with EpisodeReader(root, epochs=1) as reader:
        (note,) = reader.source.notes  # type: ignore[attr-defined]
        assert "2 rows without a flag are the last of their episode" in note
    flags = all_rows(root)
    assert flags["terminateds"].tolist() == [False, False, False, True, False, False]
    assert not flags["truncateds"].any()


def test_steps_of_one_environment_alone_sum_up_to_its_return(tmp_path: Path) -> None:
    rows = [(env, step, step == 3) for step in range(4) for env in range(2)]
    report = rlio.convert(dump(tmp_path / "dump", rows), tmp_path / "run")
    assert report.episodes == 2
    with rlio.ReplayStore.open(tmp_path / "run") as store:
        draw = rlio.NStep(3, gamma=1.0)
        draws = store.epochs(batch_size=100, seed=0, draw=draw, epochs=1).sample()
    (row,) = np.flatnonzero(draws["obs"][:, 0] == 0)
    assert draws["new_obs"][row, 0] == 3
    assert draws["rewards"][row] == 0 + 1 + 2
