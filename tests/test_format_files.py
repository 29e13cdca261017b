"""Formats of files: NPZ, D4RL, d3rlpy, Robomimic, Tianshou, Parquet with a row a step. Both directions."""

from __future__ import annotations

import gc
import json
import pickle
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow.parquet as pq
import pytest
from further import further
from test_convert import episode, record, rows_of

import rlio
from rlio.errors import (
    CorruptData,
    MissingColumn,
    OptionError,
    RlioError,
    SchemaError,
    UnknownLayout,
    UnsafeData,
)
from rlio.formats.files.hdf5_files import Hdf5Files
from rlio.formats.format import formats, recognise
from rlio.limits import Limits
from rlio.storage import expand_inputs

GOLDEN = Path(__file__).with_name("golden") / "formats"


def read(path: Path, **options: Any) -> rlio.SampleBatch:
    with rlio.read(path, epochs=1, **options) as reader:
        return rlio.concat_samples(list(reader))


def nested(number: int, steps: int) -> rlio.SampleBatch:
    rows = episode(number, steps)
    for name in ("obs", "new_obs"):
        rows[name] = {"position": rows[name], "image": rows[name][:, :1].astype(np.uint8)}
    return rows


ROUND_TRIPS = [
    ("d4rl", "x.hdf5"),
    ("d3rlpy", "x.h5"),
    ("robomimic", "x.hdf5"),
    ("npz", "x"),
    ("parquet", "x"),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("to", "name"), ROUND_TRIPS)
def test_what_is_written_is_proved_and_comes_back(to: str, name: str, tmp_path: Path) -> None:
    made = rlio.concat_samples(record(tmp_path / "a", [3, 1, 40, 2, 5, 6]))
    report = rlio.convert(tmp_path / "a", tmp_path / name, to=to, prove=True)
    assert report.rows == 57
    rlio.convert(tmp_path / name, tmp_path / "back", prove=True)
    found = rows_of(tmp_path / "back")
    for column in ("obs", "rewards", "terminateds"):
        assert found[column].dtype == made[column].dtype
        assert found[column].tolist() == made[column].tolist(), column
    assert found["actions"].ravel().tolist() == made["actions"].tolist()
    lost = next(format.loses for format in formats() if format.name == to)
    if "truncated" not in lost:
        assert found["truncateds"].tolist() == made["truncateds"].tolist()
    if "final_obs" not in lost:
        assert found["new_obs"].tolist() == made["new_obs"].tolist()


@pytest.mark.few(1)
@pytest.mark.parametrize("to", ["npz", "parquet", "robomimic"])
def test_nested_observations_come_back(to: str, tmp_path: Path) -> None:
    made = [nested(number, 4) for number in (1, 2)]
    with rlio.ParquetWriter(tmp_path / "a", spool=None) as writer:
        for rows in made:
            writer.write(rows)
    dst = tmp_path / ("x.hdf5" if to == "robomimic" else "x")
    rlio.convert(tmp_path / "a", dst, to=to, prove=True)
    found = read(dst)
    assert found["obs"]["position"].tolist() == rlio.concat_samples(made)["obs"]["position"].tolist()
    with pytest.raises(SchemaError):
        rlio.convert(tmp_path / "a", tmp_path / "y.hdf5", to="d4rl")


@pytest.mark.few(1)
@pytest.mark.parametrize("to", ["npz", "parquet"])
def test_a_folder_of_files_goes_on_where_it_was_interrupted(to: str, tmp_path: Path) -> None:
    made = record(tmp_path / "a", [4] * 7)
    options = {"episodes_per_file": 2}
    seen = 0

    def stop(rows: int, episodes: int) -> None:
        nonlocal seen
        seen = episodes
        if episodes == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rlio.convert(tmp_path / "a", tmp_path / "x", to=to, options=options, progress=stop)
    assert seen == 5
    with pytest.raises(OptionError):
        rlio.convert(tmp_path / "a", tmp_path / "x", to=to, options={"episodes_per_file": 3})
    report = rlio.convert(tmp_path / "a", tmp_path / "x", to=to, options=options, prove=True)
    assert report.written == 12
    assert read(tmp_path / "x")["obs"].tolist() == rlio.concat_samples(made)["obs"].tolist()
    names = sorted(path.name for path in (tmp_path / "x").iterdir() if path.is_file())
    assert [name.split(".")[0] for name in names] == [
        f"episodes-{first:09d}-{count}" for first, count in ((0, 2), (2, 2), (4, 2), (6, 1))
    ]
    with pytest.raises(OptionError):
        rlio.convert(tmp_path / "a", tmp_path / "x", to=to, options=options)


def test_an_episode_that_has_not_ended_does_not_run_into_the_next_one_in_d4rl(tmp_path: Path) -> None:
    rows = [episode(number, 3) for number in range(3)]
    rows[0]["truncateds"][:] = False
    with rlio.ParquetWriter(tmp_path / "a", spool=None) as writer:
        for part in rows:
            writer.write(part)
    rlio.convert(tmp_path / "a", tmp_path / "x.hdf5", to="d4rl", prove=True)
    assert sorted(read(tmp_path / "x.hdf5")["eps_id"].tolist()) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_d4rl_takes_episodes_without_final_observation_only_without_next_observations(tmp_path: Path) -> None:
    rows = episode(1, 4)
    rows["new_obs"][-1] = 0
    rows["new_obs_valid"] = np.arange(4) < 3
    with rlio.ParquetWriter(tmp_path / "a", spool=None) as writer:
        writer.write(rows)
    with pytest.raises(SchemaError):
        rlio.convert(tmp_path / "a", tmp_path / "x.hdf5", to="d4rl")
    rlio.convert(
        tmp_path / "a", tmp_path / "x.hdf5", to="d4rl", options={"next_observations": False}, prove=True
    )
    with h5py.File(tmp_path / "x.hdf5") as file:
        assert "next_observations" not in file


def test_parquet_has_new_obs_in_full_and_vectors_as_lists_of_fixed_size(tmp_path: Path) -> None:
    made = rlio.concat_samples(record(tmp_path / "a", [3, 4]))
    rlio.convert(tmp_path / "a", tmp_path / "x", to="parquet")
    table = pq.read_table(tmp_path / "x")
    assert str(table.schema.field("obs").type) == "fixed_size_list<element: float>[2]"
    assert table["new_obs"].to_pylist() == made["new_obs"].tolist()
    assert table["new_obs_valid"].to_pylist() == [True] * 7


# ---- d3rlpy ----


def test_what_d3rlpy_wrote_is_read() -> None:
    rows = read(GOLDEN / "d3rlpy/buffer.h5")
    assert rows["obs"].tolist() == [[float(n), -float(n)] for n in range(10)]
    assert rows["eps_id"].tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2, 2]
    assert np.flatnonzero(rows["terminateds"]).tolist() == [2, 9]
    assert np.flatnonzero(rows["truncateds"]).tolist() == [4]
    assert np.flatnonzero(~rows["new_obs_valid"]).tolist() == [2, 4, 9]


def write_d3rlpy_1(path: Path, terminals: list[int], ends: list[int]) -> None:
    rows = len(terminals)
    with h5py.File(path, "w") as file:
        file["observations"] = np.arange(rows, dtype=np.float32)[:, None]
        file["actions"], file["rewards"] = np.zeros((rows, 1)), np.arange(rows, dtype=np.float32)[:, None]
        file["terminals"], file["episode_terminals"] = terminals, ends
        file["discrete_action"], file["version"] = False, "1.0"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name",
    ["d3rlpy", "d3rlpy-1", "robomimic without next_obs", "ring", "without_next", *further("robomimic")],
)
def test_parts_of_an_episode_of_hdf5_are_the_rows_of_the_whole(name: str, tmp_path: Path) -> None:
    """A long episode was read as a whole."""
    path = tmp_path / "x.h5"
    if name == "d3rlpy":
        record(tmp_path / "a", [7, 1, 5])
        rlio.convert(tmp_path / "a", path, to="d3rlpy")
    elif name == "d3rlpy-1":
        write_d3rlpy_1(path, terminals=[0, 0, 1, 0, 0, 0, 0], ends=[0, 0, 1, 0, 0, 1, 0])
    elif name.startswith("robomimic"):
        write_robomimic(path, has_next=name == "robomimic")
    else:
        path = GOLDEN / f"tianshou/{name}.hdf5"
    with rlio.read(path, epochs=1) as reader:
        source: Any = reader.source  # type: ignore[attr-defined]  # An EpisodeReader.
        assert source.reads_parts
        for number, steps in enumerate(source.lengths):
            whole = source.load(number, None)
            for size in (1, 2):
                parts = [
                    source.load_part(number, at, min(at + size, steps), None) for at in range(0, steps, size)
                ]
                joined = rlio.concat_samples(parts)
                assert joined.equals(whole)


def test_ends_of_d3rlpy_1_that_are_no_terminals_are_truncations(tmp_path: Path) -> None:
    write_d3rlpy_1(tmp_path / "a.h5", [0, 0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 1, 0, 0])
    rows = read(tmp_path / "a.h5")
    assert rows["eps_id"].tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert rows["rewards"].tolist() == list(range(7))
    assert np.flatnonzero(rows["terminateds"]).tolist() == [2]
    assert np.flatnonzero(rows["truncateds"]).tolist() == [4]
    write_d3rlpy_1(tmp_path / "b.h5", [0, 1, 0], [0, 0, 1])
    with pytest.raises(CorruptData):
        read(tmp_path / "b.h5")


# ---- Tianshou ----


def numbers(name: str) -> tuple[rlio.SampleBatch, list[float]]:
    rows = read(GOLDEN / f"tianshou/{name}.hdf5")
    return rows, rows["rewards"].tolist()


@pytest.mark.parametrize("name", ["ring", "prioritized", "without_next"])
def test_valid_rows_of_a_ring_are_read_in_the_order_in_which_they_were_added(name: str) -> None:
    rows, found = numbers(name)
    assert found == [4, 5, 6, 7, 8, 9, 10, 11]
    assert rows["obs"][:, 0].tolist() == found
    assert (rows["actions"][:, 0] * 10).round().tolist() == found
    assert rows["eps_id"].tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert np.flatnonzero(rows["truncateds"]).tolist() == [4]
    assert np.flatnonzero(rows["terminateds"]).tolist() == [7]
    if name == "without_next":
        assert np.flatnonzero(~rows["new_obs_valid"]).tolist() == [4, 7]
    else:
        assert rows["new_obs"][:, 0].tolist() == [number + 0.5 for number in found]


def test_each_environment_of_a_vector_buffer_has_its_ring() -> None:
    rows, found = numbers("vector")
    assert found == [2, 3, 4, 5, 100, 101, 102]
    assert rows["eps_id"].tolist() == [0, 1, 1, 1, 2, 2, 2]
    assert rows["infos/speed"].tolist() == [2, 3, 4, 5, 0, 1, 2]
    assert np.flatnonzero(rows["terminateds"] | rows["truncateds"]).tolist() == [0]


class Harm:
    def __reduce__(self) -> Any:
        return (Path("harm").touch, ())


def test_pickled_arrays_of_tianshou_are_left_out_or_refused_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = rlio.convert(GOLDEN / "tianshou/pickled.hdf5", tmp_path / "a")
    assert [f.text for f in report.findings if f.kind == "note"] == [
        "The pickled array _meta/info/tag is not read."
    ]
    assert "infos/tag" not in rows_of(tmp_path / "a")
    bad = tmp_path / "bad.hdf5"
    bad.write_bytes((GOLDEN / "tianshou/ring.hdf5").read_bytes())
    with h5py.File(bad, "r+") as file:
        del file["_meta/obs"]
        file["_meta/obs"] = np.frombuffer(pickle.dumps(Harm()), np.int8)
        file["_meta/obs"].attrs["__data_type__"] = "pickled_ndarray"
    with pytest.raises(UnsafeData):
        read(bad)
    assert not Path("harm").exists()


def changed_ring(path: Path, change: Callable[[h5py.File], None]) -> Path:
    path.write_bytes((GOLDEN / "tianshou/ring.hdf5").read_bytes())
    with h5py.File(path, "r+") as file:
        change(file)
    return path


def test_a_buffer_of_single_frames_is_refused_and_one_that_stacks_observations_is_noted(
    tmp_path: Path,
) -> None:
    stacked = changed_ring(tmp_path / "a.hdf5", lambda file: file.attrs.update(stack_num=4))
    report = rlio.convert(stacked, tmp_path / "a")
    assert [f.text for f in report.findings if f.kind == "note"] == [
        "The buffer stacks 4 observations when it is sampled; a row has one."
    ]
    frames = changed_ring(tmp_path / "b.hdf5", lambda file: file.attrs.update(_save_only_last_obs=True))
    with pytest.raises(UnknownLayout, match=r"save_only_last_obs.*b\.hdf5"):
        read(frames)


def test_members_of_tianshou_that_are_not_read_are_named(tmp_path: Path) -> None:
    def add(file: h5py.File) -> None:
        file["_meta/policy/hidden"] = np.zeros(8)

    report = rlio.convert(changed_ring(tmp_path / "a.hdf5", add), tmp_path / "a")
    assert ["policy" in f.text for f in report.findings if f.kind == "note"] == [True]


def test_the_ring_of_tianshou_2_begins_at_its_insertion_idx(tmp_path: Path) -> None:
    def rename(file: h5py.File) -> None:
        file.attrs["_insertion_idx"] = file.attrs.pop("_index")

    rows = read(changed_ring(tmp_path / "a.hdf5", rename))
    assert rows["rewards"].tolist() == [4, 5, 6, 7, 8, 9, 10, 11]


def test_flags_of_several_agents_are_refused(tmp_path: Path) -> None:
    def widen(file: h5py.File) -> None:
        for name in ("terminated", "truncated"):
            values = file[f"_meta/{name}"][()]
            del file[f"_meta/{name}"]
            file[f"_meta/{name}"] = np.stack([values, values], 1)

    with pytest.raises(UnknownLayout, match="flags"):
        read(changed_ring(tmp_path / "a.hdf5", widen))


def test_a_ring_that_does_not_fit_is_damage(tmp_path: Path) -> None:
    bad = tmp_path / "bad.hdf5"
    bad.write_bytes((GOLDEN / "tianshou/ring.hdf5").read_bytes())
    with h5py.File(bad, "r+") as file:
        file.attrs["_size"] = 100
    with pytest.raises(CorruptData):
        read(bad)


# ---- Robomimic ----


def write_robomimic(path: Path, *, samples: int = 4, has_next: bool = True) -> None:
    """Twelve demonstrations of four steps by the documented layout; the observation says which."""
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs.update(total=48, env_args=json.dumps({"env_name": "Lift", "type": 1, "env_kwargs": {}}))
        for demo in range(12):
            group = data.create_group(f"demo_{demo}")
            group.attrs["num_samples"] = samples
            obs = np.stack([np.full(5, demo), np.arange(5)], 1).astype(np.float64)
            group["obs/eef"], group["obs/grip"] = obs[:4], obs[:4, :1]
            if has_next:
                group["next_obs/eef"], group["next_obs/grip"] = obs[1:], obs[1:, :1]
            group["actions"], group["states"] = np.zeros((4, 7)), np.zeros((4, 32))
            group["rewards"], group["dones"] = np.arange(1.0, 5), [0, 0, int(demo == 1), int(demo < 6)]
        file["mask/train"] = np.array([b"demo_1", b"demo_10"])


def test_demonstrations_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    write_robomimic(tmp_path / "a.hdf5")
    rows = read(tmp_path / "a.hdf5")
    assert rows["obs"]["eef"][:, 0].tolist() == np.repeat(np.arange(12.0), 4).tolist()
    assert rows["new_obs"]["eef"][:, 1].tolist() == [1, 2, 3, 4] * 12
    assert rows["rewards"].tolist() == [1, 2, 3, 4] * 12
    assert np.flatnonzero(rows["terminateds"]).tolist() == [3, 7, 11, 15, 19, 23]
    assert rows["states"].shape == (48, 32)
    report = rlio.convert(tmp_path / "a.hdf5", tmp_path / "b", prove=True)
    found = {finding.kind: finding for finding in report.findings}
    assert set(found) == {"unfinished", "no_timeouts", "note"}
    assert "1 demonstrations" in found["note"].text
    stored = rlio.open_dataset(tmp_path / "b")
    assert json.loads(stored.open_shard(stored.segments[0]).provenance["env"])["env_name"] == "Lift"
    rlio.convert(tmp_path / "b", tmp_path / "c.hdf5", to="robomimic", prove=True)
    with h5py.File(tmp_path / "c.hdf5") as file:
        assert json.loads(file["data"].attrs["env_args"])["env_name"] == "Lift"
        assert file["data"].attrs["total"] == 48


def test_a_demonstration_without_next_observations_is_read_beside_others(tmp_path: Path) -> None:
    write_robomimic(tmp_path / "a.hdf5")
    with h5py.File(tmp_path / "a.hdf5", "r+") as file:
        del file["data/demo_3/next_obs"]
    rows = read(tmp_path / "a.hdf5")
    assert np.flatnonzero(~rows["new_obs_valid"]).tolist() == [15]
    assert rows["new_obs"]["eef"][12:16, 1].tolist() == [1, 2, 3, 0]


@pytest.mark.few(1)
@pytest.mark.parametrize("demo", [0, 3])
def test_a_demonstration_without_rewards_is_lost_alone_wherever_it_is(demo: int, tmp_path: Path) -> None:
    path = tmp_path / "a.hdf5"
    write_robomimic(path)
    with h5py.File(path, "r+") as file:
        del file[f"data/demo_{demo}/rewards"]
    with pytest.raises(MissingColumn, match=f"demo_{demo} has no rewards, and 11 demonstrations have some"):
        read(path)
    with rlio.read(path, epochs=1, on_error="skip") as reader:
        rows = rlio.concat_samples(list(reader))
        assert reader.skipped == 1
    assert rows["rewards"].tolist() == [1, 2, 3, 4] * 11
    assert demo not in rows["obs"]["eef"][:, 0]
    assert len(read(path, columns=["obs", "actions"])) == 48


def test_a_mask_of_robomimic_chooses_demonstrations(tmp_path: Path) -> None:
    write_robomimic(tmp_path / "a.hdf5", has_next=False)
    rows = read(tmp_path / "a.hdf5", format_options={"mask": "train"})
    assert rows["obs"]["eef"][::4, 0].tolist() == [1, 10]
    assert np.flatnonzero(~rows["new_obs_valid"]).tolist() == [3, 7]
    with pytest.raises(OptionError):
        read(tmp_path / "a.hdf5", format_options={"mask": "valid"})


def test_a_mask_of_robomimic_that_names_absent_demonstrations_is_refused(tmp_path: Path) -> None:
    write_robomimic(tmp_path / "a.hdf5")
    with h5py.File(tmp_path / "a.hdf5", "r+") as file:
        file["mask/more"] = np.array([b"demo_1", b"demo_12", b"other"])
    with pytest.raises(CorruptData, match=r"mask/more.*\['demo_12', 'other'\]"):
        read(tmp_path / "a.hdf5", format_options={"mask": "more"})


def test_the_report_says_that_done_at_each_last_row_may_be_no_termination(tmp_path: Path) -> None:
    def notes(name: str) -> list[str]:
        report = rlio.convert(tmp_path / "a.hdf5", tmp_path / name)
        return [finding.text for finding in report.findings if "done_mode" in finding.text]

    write_robomimic(tmp_path / "a.hdf5")  # Half of its last rows are done: these are successes.
    assert notes("b") == []
    with h5py.File(tmp_path / "a.hdf5", "r+") as file:
        for demo in range(6, 12):
            file[f"data/demo_{demo}/dones"][3] = 1
    found = notes("c")
    assert len(found) == 1
    assert "12 demonstrations" in found[0]
    assert read(tmp_path / "c")["terminateds"].sum() == 12


def test_demonstrations_of_another_length_or_without_observations_are_refused(tmp_path: Path) -> None:
    write_robomimic(tmp_path / "a.hdf5", samples=5)
    with pytest.raises(CorruptData):
        read(tmp_path / "a.hdf5")
    write_robomimic(tmp_path / "b.hdf5")
    with h5py.File(tmp_path / "b.hdf5", "r+") as file:
        del file["data/demo_3/obs"]
    with pytest.raises(MissingColumn):
        read(tmp_path / "b.hdf5")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("part", "demo"), [("actions", 0), ("actions", 3), ("obs", 0), ("obs", 3), ("rewards", 3)]
)
def test_a_demonstration_without_a_part_is_skipped_alone(part: str, demo: int, tmp_path: Path) -> None:
    """It raised at opening."""
    write_robomimic(tmp_path / "a.hdf5")
    with h5py.File(tmp_path / "a.hdf5", "r+") as file:
        del file[f"data/demo_{demo}/{part}"]
    with rlio.read(tmp_path / "a.hdf5", epochs=1, on_error="skip", batch_size=100) as reader:
        rows = rlio.concat_samples(list(reader))
        assert reader.skipped == 1
        assert [error.record for error in reader.errors] == [demo]
        assert part in reader.errors[0].message
    left = [float(number) for number in range(12) if number != demo]
    assert rows["obs"]["eef"][:, 0].tolist() == np.repeat(left, 4).tolist()
    with pytest.raises(SchemaError, match=part):
        read(tmp_path / "a.hdf5")


def test_if_no_demonstration_has_actions_the_error_says_so_at_opening(tmp_path: Path) -> None:
    write_robomimic(tmp_path / "a.hdf5")
    with h5py.File(tmp_path / "a.hdf5", "r+") as file:
        for demo in range(12):
            del file[f"data/demo_{demo}/actions"]
    with pytest.raises(MissingColumn, match="demo_0 has no actions"):
        rlio.read(tmp_path / "a.hdf5", epochs=1, on_error="skip")


def write_isaac(path: Path, *, is_flat: bool = False) -> dict[str, np.ndarray]:
    """Twelve demonstrations as Isaac Lab's recorder writes them; the columns by path."""
    columns: dict[str, list[np.ndarray]] = {}
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs.update(total=0, env_args=json.dumps({"env_name": "Isaac-Stack-Cube-v0", "type": 2}))
        for demo in range(12):
            group, steps = data.create_group(f"demo_{demo}"), 3 + demo % 2
            group.attrs.update(num_samples=steps, seed=demo, success=True)
            at = 100 * demo + np.arange(steps, dtype=np.float32)[:, None]
            obs = (
                {"obs": at}
                if is_flat
                else {"obs/eef_pos": at + 1, "obs/datagen_info/object_pose/cube": at + 2}
            )
            found = {
                **obs,
                "actions": at + 3,
                "processed_actions": at + 4,
                "states/articulation/robot/joint_position": at + 5,
            }
            for name, values in found.items():
                group.create_dataset(name, data=values, compression="gzip")
                columns.setdefault(name, []).append(values)
            group["initial_state/articulation/robot/joint_position"] = at[:1]
    return {name: np.concatenate(values) for name, values in columns.items()}


@pytest.mark.parametrize("is_flat", [False, *further(True)])
def test_groups_in_groups_of_isaac_lab_are_parts_of_columns(is_flat: bool, tmp_path: Path) -> None:
    columns = write_isaac(tmp_path / "a.hdf5", is_flat=is_flat)
    rows = read(tmp_path / "a.hdf5")
    for name, values in columns.items():
        found: Any = rows
        for key in name.split("/"):
            found = found[key]
        np.testing.assert_array_equal(found, values, err_msg=name)
    assert len(set(rows["eps_id"].tolist())) == 12
    last = np.append(np.diff(rows["eps_id"]) > 0, True)
    np.testing.assert_array_equal(rows["new_obs_valid"], ~last)
    after = rows["new_obs"] if is_flat else rows["new_obs"]["datagen_info"]["object_pose"]["cube"]
    np.testing.assert_array_equal(after[:2, 0], [1.0, 2.0] if is_flat else [3.0, 4.0])
    assert not rows["terminateds"].any()
    report = rlio.convert(tmp_path / "a.hdf5", tmp_path / "b", prove=True)
    assert report.proved
    text = str(report.findings)
    assert "initial_state" in text
    assert "success (an attribute)" in text
    with rlio.ReplayStore.open(tmp_path / "a.hdf5") as store:
        assert len(store) == len(last)


def test_groups_of_isaac_lab_in_a_circle_are_refused(tmp_path: Path) -> None:
    write_isaac(tmp_path / "a.hdf5")
    with h5py.File(tmp_path / "a.hdf5", "r+") as file:
        file["data/demo_3/obs/again"] = file["data/demo_3"]
    with pytest.raises(UnsafeData, match="levels"):
        read(tmp_path / "a.hdf5")


def test_actions_of_isaac_lab_may_be_a_group(tmp_path: Path) -> None:
    write_isaac(tmp_path / "a.hdf5")
    with h5py.File(tmp_path / "a.hdf5", "r+") as file:
        for demo in file["data"].values():
            values = demo["actions"][:]
            del demo["actions"]
            demo["actions/pose"], demo["actions/joints"] = values, values + 1
    rows = read(tmp_path / "a.hdf5")
    np.testing.assert_array_equal(rows["actions"]["joints"], rows["actions"]["pose"] + 1)


# ---- NPZ ----


def save(path: Path, **arrays: Any) -> None:
    steps = {"obs": np.zeros((4, 2)), "actions": np.zeros(4), "rewards": np.zeros(4)}
    np.savez(path, **{**steps, "lengths": np.array([3, 1]), **arrays})


def test_damaged_and_pickled_npz_is_refused_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "a.npz")
    assert read(tmp_path / "a.npz")["eps_id"].tolist() == [0, 0, 0, 1]
    for error, arrays in (
        (UnknownLayout, {"lengths": np.array([3, 3])}),
        (UnknownLayout, {"lengths": np.array([5, -1])}),
        (SchemaError, {"obs": np.zeros((3, 2))}),
        (UnsafeData, {"infos": np.array([Harm()] * 4, object)}),
    ):
        save(tmp_path / "b.npz", **arrays)
        with pytest.raises(error):
            read(tmp_path / "b.npz")
    assert not Path("harm").exists()
    with np.load(tmp_path / "a.npz") as found:
        rest = {name: found[name] for name in found if name not in ("lengths", "rewards")}
    for missing in ({"rewards": np.zeros(4)}, {"lengths": np.array([4])}):
        np.savez(tmp_path / "c.npz", **rest, **missing)
        with pytest.raises(UnknownLayout):
            read(tmp_path / "c.npz")
    (tmp_path / "d.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:-30])
    with pytest.raises(CorruptData):
        read(tmp_path / "d.npz")
    large = rlio.Limits(group_bytes=100)
    with pytest.raises(UnsafeData):
        read(tmp_path / "a.npz", limits=large)


def test_formats_of_files_are_recognised(tmp_path: Path) -> None:
    save(tmp_path / "a.npz")
    write_robomimic(tmp_path / "a.hdf5")
    write_d3rlpy_1(tmp_path / "a.h5", [1], [1])
    found = [recognise(tmp_path / name) for name in ("a.npz", "a.hdf5", "a.h5")]
    assert [one and one.format.name for one in found] == ["npz", "robomimic", "d3rlpy-1"]
    tianshou = recognise(GOLDEN / "tianshou")
    assert tianshou is not None
    assert tianshou.format.name == "tianshou"


@pytest.mark.few(1)
@pytest.mark.parametrize("to", ["minari", "rllib-json", *further("d4rl", "d3rlpy")])
@pytest.mark.parametrize("options", [{}, {"batch_size": 4}], ids=["as it is", "by rows"])
def test_a_reader_that_is_dropped_in_a_loop_leaves_no_open_file(
    to: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """pytest makes an error of what the garbage collector says of open files."""
    numbers = np.arange(20)
    batch = rlio.SampleBatch(
        obs=numbers[:, None] * 1.0,
        new_obs=numbers[:, None] + 1.0,
        actions=numbers,
        rewards=numbers * 1.0,
        terminateds=numbers % 5 == 4,
        eps_id=numbers // 5,
        t=numbers % 5,
    )
    with rlio.ParquetWriter(tmp_path / "own") as writer:
        writer.write(batch)
    rlio.convert(tmp_path / "own", tmp_path / "other", to=to)
    for _ in rlio.read(tmp_path / "other", epochs=1, **options):
        break
    for _ in rlio.read(tmp_path / "other", epochs=1, **options):
        pass
    gc.collect()


def stored_in_ways(path: Path) -> list[str]:
    """Datasets ``group/x``, each stored in another way; returns their paths."""
    never = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    never.set_chunk((4, 3))
    never.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    twice = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    twice.set_chunk((4, 3))
    twice.set_filter(h5py.h5z.FILTER_DEFLATE, 0, (1,))
    twice.set_filter(h5py.h5z.FILTER_DEFLATE, 0, (1,))
    (path.parent / "x.bin").write_bytes(bytes(8 * 4 * 4))
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "chunks": {"chunks": (4, 3)},
        "chunks of one number": {"chunks": (4, 1)},
        "chunks of other rows": {"chunks": (2, 3)},
        "zipped": {"chunks": (4, 3), "compression": "gzip"},
        "shuffled": {"chunks": (4, 3), "shuffle": True},
        "other numbers": {"chunks": (4, 3), "dtype": np.float64},
        "other order": {"chunks": (4, 3), "dtype": ">f4"},
        "longer": {"chunks": (4, 3), "shape": (9, 4)},
        "one number a row": {"shape": (8,)},
        "external": {"external": [(str(path.parent / "x.bin"), 0, 8 * 4 * 4)]},
        "not stored, no fill": {"dcpl": never},
        "deflated twice": {"dcpl": twice},
    }
    with h5py.File(path, "w") as file:
        for way, how in ways.items():
            options = {"shape": (8, 4), "dtype": np.float32, **how}
            if "dcpl" in how:
                space = h5py.h5s.create_simple(options["shape"])
                group = file.create_group(way)
                h5py.h5d.create(group.id, b"x", h5py.h5t.IEEE_F32LE, space, how["dcpl"])
            else:
                found = file.create_dataset(f"{way}/x", **options)
                if "external" not in how:
                    found[...] = 1
        file.create_group("virtual")
        layout = h5py.VirtualLayout((8, 4), np.float32)
        layout[:] = h5py.VirtualSource(str(path), "plain/x", (8, 4))
        file.create_virtual_dataset("virtual/x", layout)
        file["committed"] = np.dtype(np.float32)
        file.create_dataset("of a named type/x", (8, 4), file["committed"], chunks=(4, 3))
        part = file.create_dataset("partly stored/x", (8, 4), np.float32, chunks=(4, 3))
        part[:4] = 1
    return [f"{way}/x" for way in (*ways, "virtual", "of a named type", "partly stored")]


def test_a_dataset_is_checked_alike_after_any_other_of_its_name(tmp_path: Path) -> None:
    paths = stored_in_ways(tmp_path / "a.h5")
    files = expand_inputs(tmp_path / "a.h5")

    def checked(of: Hdf5Files, path: str) -> Any:
        try:
            shape, stored = of.check(of.file(0)[path], path, "a.h5")
        except RlioError as error:
            return type(error), str(error)
        return shape, stored[3:]

    with closing(Hdf5Files(files, Limits())) as alone:
        expected = {}
        for path in paths:
            alone._layouts.clear()
            expected[path] = checked(alone, path)
    refused = {path for path, found in expected.items() if isinstance(found[0], type)}
    assert refused == {"external/x", "virtual/x", "not stored, no fill/x", "deflated twice/x"}
    with closing(Hdf5Files(files, Limits())) as together:
        for first in paths:
            for second in paths:
                checked(together, first)
                assert checked(together, second) == expected[second], (first, second)


def test_a_named_type_of_a_file_that_was_closed_is_not_asked_again(tmp_path: Path) -> None:
    for number in range(6):  # More than stay open.
        stored_in_ways(tmp_path / f"{number}.h5")
    with closing(Hdf5Files(expand_inputs(tmp_path / "*.h5"), Limits())) as files:
        for number in range(6):
            path = "of a named type/x"
            shape, stored = files.check(files.file(number)[path], path, f"{number}.h5")
            assert (shape, stored.dtype) == ((8, 4), np.float32)
