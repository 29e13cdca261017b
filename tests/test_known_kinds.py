"""Kinds of files that rlio knows without a mapping, and only reads: rows, ends, refusals, hostile names."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import zipfile
import zlib
from pathlib import Path
from typing import Any

import google_crc32c
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
import zstandard
from further import first, further
from kinds import KINDS, episodes_of, made, ogbench, zarr_buffer

import rlio
from rlio.errors import (
    CorruptData,
    EndOfData,
    HoleError,
    MissingColumn,
    OptionError,
    RlioError,
    SchemaError,
    UnknownLayout,
    UnsafeData,
)
from rlio.formats.format import BY_ENDING, recognise
from rlio.limits import DEFAULT_LIMITS
from rlio.opening import open_files
from rlio.source import episodes as episode_sources
from rlio.storage import InputFiles
from rlio.testing import SourceTests

GOLDEN = Path(__file__).with_name("golden") / "formats"
LENGTHS = (3, 1, 7, 5, 4, 2, 1, 2, 3, 1, 2, 4)


def rows_of(lengths: tuple[int, ...] = LENGTHS) -> rlio.SampleBatch:
    """Episodes whose observations say where they belong; the even ones are terminated."""
    episode = np.repeat(np.arange(len(lengths)), lengths)
    t = np.concatenate([np.arange(steps) for steps in lengths])
    last = np.append(np.diff(episode) > 0, True)
    obs = np.stack([100 * episode + t, t], 1).astype(np.float32)
    return rlio.SampleBatch(
        obs=obs, new_obs=obs + 1, actions=(t / 8).astype(np.float32), rewards=1000.0 * episode + t + 0.5,
        terminateds=last & (episode % 2 == 0), truncateds=last & (episode % 2 == 1), eps_id=episode, t=t,
    )  # fmt: skip


def read(path: Any, **options: Any) -> rlio.SampleBatch:
    with rlio.read(path, epochs=1, **options) as reader:
        return rlio.concat_samples(list(reader))


def check(name: str, found: rlio.SampleBatch) -> None:
    """Compare what was read with `rows_of`, as far as the kind keeps it."""
    rows = rows_of()
    expected: dict[str, Any] = {name: rows[name] for name in ("obs", "new_obs", "eps_id", "t", "actions")}
    last = rows["terminateds"] | rows["truncateds"]
    unknown = np.where(last[:, None], 0, 1).astype(np.float32)  # Final observations that are not stored.
    if name in ("ogbench", "aloha", "zarr"):  # No end is stored as a termination.
        expected |= {"terminateds": np.zeros(len(last), np.bool_), "truncateds": last}
    else:
        expected |= {name: rows[name] for name in ("terminateds", "truncateds")}
    if name not in ("ogbench", "aloha"):
        expected["rewards"] = rows["rewards"]
    if name == "ogbench":
        expected |= {"qpos": rows["obs"] + 1, "qvel": rows["obs"] + 2}
    if name == "maniskill":
        expected |= {"env_states": {"actors": {"cube": rows["obs"] + 7}}, "success": rows["terminateds"]}
    if name == "aloha":
        pictures = np.zeros((len(last), 4, 5, 3), np.uint8) + rows["t"].astype(np.uint8)[:, None, None, None]
        expected["obs"] = {"qpos": rows["obs"], "qvel": rows["obs"] + 1, "images": {"top": pictures}}
        after = {"qpos": rows["new_obs"] * unknown, "qvel": (rows["new_obs"] + 1) * unknown}
        next_pictures = (pictures + 1) * unknown[:, :, None, None].astype(np.uint8)
        expected["new_obs"] = {**after, "images": {"top": next_pictures}}
        expected["new_obs_valid"] = ~last
        expected["actions"] = rows["actions"][:, None] + np.zeros((1, 14), np.float32)
    if name == "imitation":
        infos = [{"TimeLimit.truncated": True} if cut else {} for cut in rows["truncateds"].tolist()]
        expected["infos"] = np.array(infos, object)
        expected["actions"] = rows["actions"].astype(np.float64)
    if name == "zarr":
        expected |= {"obs": {"state": rows["obs"]}, "new_obs": {"state": rows["new_obs"] * unknown}}
        expected["new_obs_valid"] = ~last
    assert set(found) == set(expected)
    compare(found, expected)


def compare(found: Any, expected: Any) -> None:
    for key, values in expected.items():
        if isinstance(values, dict):
            assert set(found[key]) == set(values)
            compare(found[key], values)
        else:
            np.testing.assert_array_equal(found[key], values, err_msg=key)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("kinds")
    return {name: made(name, rows_of(), folder) for name in KINDS}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", KINDS)
def test_rows_are_those_that_were_written(files: dict[str, Path], name: str) -> None:
    found = recognise(files[name])
    assert found is not None
    assert (found.format.name, found.confidence > BY_ENDING) == (name, True)
    check(name, read(files[name]))
    check(name, read(files[name], format=name))
    with rlio.ReplayStore.open(files[name]) as store:
        assert len(store) == sum(LENGTHS)


@pytest.mark.parametrize("name", ["maniskill", *further("d4rl-npz", "ogbench", "aloha", "zarr", "imitation")])
def test_long_episodes_of_known_kinds_are_read_in_parts(
    files: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_sources, "_GROUP_ROWS", 3)
    check(name, read(files[name], cache="none"))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["ogbench", "zarr", *further("d4rl-npz", "maniskill", "aloha", "imitation")])
def test_known_kinds_are_converted_and_proved(files: dict[str, Path], name: str, tmp_path: Path) -> None:
    report = rlio.convert(files[name], tmp_path / "own", prove=True)
    assert (report.episodes, report.rows, report.proved) == (len(LENGTHS), sum(LENGTHS), True)
    check(name, read(tmp_path / "own"))


class OfKind(SourceTests):
    """A kind as the engine sees it, long episodes in parts."""

    name: str

    @pytest.fixture(autouse=True)
    def _files(self, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(episode_sources, "_GROUP_ROWS", 4)
        self.path = files[self.name]

    def make_source(self) -> Any:
        shared: Any = {"storage_options": None, "limits": DEFAULT_LIMITS, "on_error": "raise"}
        return open_files(str(self.path), **shared)

    def expected_rows(self) -> Any:
        return None


@pytest.mark.further
class TestOgbench(OfKind):
    name = "ogbench"


@pytest.mark.further
class TestD4rlNpz(OfKind):
    name = "d4rl-npz"


@pytest.mark.further
class TestManiSkill(OfKind):
    name = "maniskill"


@pytest.mark.further
class TestAloha(OfKind):
    name = "aloha"


class TestZarr(OfKind):
    name = "zarr"


@pytest.mark.further
class TestImitation(OfKind):
    name = "imitation"


# ---- OGBench, and NPZ with D4RL's names ----


def test_rows_of_ogbench_are_those_of_its_own_loader(tmp_path: Path) -> None:
    ogbench(rows_of(), tmp_path / "a.npz", button_states=np.zeros((sum(LENGTHS) + len(LENGTHS), 2), np.int64))
    found, file = read(tmp_path / "a.npz"), np.load(tmp_path / "a.npz")
    ends = file["terminals"].astype(bool)
    after = np.append(False, ~ends[:-1])  # As the page of OGBench's loader draws it.
    np.testing.assert_array_equal(found["obs"], file["observations"][~ends])
    np.testing.assert_array_equal(found["new_obs"], file["observations"][after])
    np.testing.assert_array_equal(found["actions"], file["actions"][~ends])
    np.testing.assert_array_equal(found["truncateds"], np.append(ends[1:], True)[~ends])
    assert not found["terminateds"].any()
    assert found["button_states"].shape == (sum(LENGTHS), 2)
    assert "new_obs_valid" not in found


def test_names_of_ogbench_without_an_end_in_the_last_row_are_refused(tmp_path: Path) -> None:
    rows = 6
    np.savez(
        tmp_path / "a.npz", observations=np.zeros((rows, 2)), actions=np.zeros(rows), terminals=np.zeros(rows)
    )
    with pytest.raises(
        UnknownLayout, match=r"OGBench's names.*mapping=rlio.Mapping\(columns={'obs': 'observations'"
    ):
        read(tmp_path / "a.npz", on_error="skip")


def test_files_of_ogbench_for_validation_beside_others_are_warned_of(tmp_path: Path, caplog: Any) -> None:
    rows = rows_of()
    ogbench(rows, tmp_path / "cube.npz")
    assert len(read(tmp_path)) == len(rows)
    assert not caplog.records
    ogbench(rows, tmp_path / "cube-val.npz")
    assert len(read(tmp_path)) == 2 * len(rows)
    assert "cube-val.npz holds trajectories for validation" in caplog.text
    caplog.clear()
    for alone in ("cube.npz", "cube-val.npz"):
        assert len(read(tmp_path / alone)) == len(rows)
    assert not caplog.records


@pytest.mark.parametrize("name", first(1, ["masks", "dones", "obs", "eps_id", "episode_ends", "valids"]))
def test_npz_that_may_have_another_meaning_is_refused_with_the_mapping(name: str, tmp_path: Path) -> None:
    for rewards in ({}, {"rewards": np.zeros(4)}):
        arrays = {"observations": np.zeros((4, 2)), "actions": np.zeros(4), "terminals": np.arange(4) == 3}
        np.savez(tmp_path / "a.npz", **arrays, **rewards, **{name: np.arange(4)})
        with pytest.raises(UnknownLayout, match=r"mapping=rlio.Mapping\(columns=.*terminals \(bool"):
            read(tmp_path / "a.npz")


def test_npz_without_timeouts_says_that_time_limits_cannot_be_seen(tmp_path: Path) -> None:
    arrays = {"observations": np.arange(8.0).reshape(4, 2), "actions": np.zeros(4), "rewards": np.ones(4)}
    np.savez(tmp_path / "a.npz", **arrays, terminals=np.array([0, 1, 0, 0]))
    found = read(tmp_path / "a.npz")
    assert found["terminateds"].tolist() == [False, True, False, False]
    assert not found["truncateds"].any()  # The last episode has not ended.
    assert found["new_obs_valid"].tolist() == [True, False, True, False]
    report = rlio.convert(tmp_path / "a.npz", tmp_path / "own", prove=True)
    assert any("has no timeouts" in finding.text for finding in report.findings)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", ["a/b", "..", "", "é", "file", "seq_lens", "infos/x", "next_obs", "state", "a.b"]
)
def test_hostile_names_in_npz_are_columns_or_named_in_the_report(name: str, tmp_path: Path) -> None:
    rows = sum(LENGTHS) + len(LENGTHS)
    ogbench(rows_of(), tmp_path / "a.npz", more=np.arange(rows))
    data = (tmp_path / "a.npz").read_bytes()
    assert data.count(b"more.npy") == 2
    with zipfile.ZipFile(tmp_path / "a.npz") as old, zipfile.ZipFile(tmp_path / "b.npz", "w") as new:
        for info in old.infolist():
            new.writestr(f"{name}.npy" if info.filename == "more.npy" else info.filename, old.read(info))
    found = read(tmp_path / "b.npz")
    report = rlio.convert(tmp_path / "b.npz", tmp_path / "own", prove=True)
    left_out = [finding.column for finding in report.findings if finding.kind == "left_out"]
    assert (name in found) != (name in left_out)
    np.testing.assert_array_equal(found["obs"], rows_of()["obs"])


# ---- ManiSkill ----


def test_an_end_of_maniskill_before_the_last_step_ends_nothing(tmp_path: Path) -> None:
    path = made("maniskill", rows_of(), tmp_path)
    with h5py.File(path, "r+") as file:
        file["traj_2/terminated"][3:] = True
        file["traj_3/truncated"][1] = True
    rows = rows_of()
    found = read(path)
    np.testing.assert_array_equal(found["terminateds"], rows["terminateds"])
    np.testing.assert_array_equal(found["truncateds"], rows["truncateds"])
    report = rlio.convert(path, tmp_path / "own", prove=True)
    assert any("marked as ends in 2 trajectories" in finding.text for finding in report.findings)


def test_the_environment_of_maniskill_is_that_of_the_json_file(tmp_path: Path) -> None:
    path = made("maniskill", rows_of(), tmp_path)
    assert rlio.open_dataset(path).info().environments == ("PickCube-v1",)
    about = json.loads(path.with_suffix(".json").read_text())
    about["episodes"][4]["elapsed_steps"] = 9
    path.with_suffix(".json").write_text(json.dumps(about))
    with pytest.raises(CorruptData, match="traj_4 has 4 steps, expected the 9"):
        read(path)
    path.with_suffix(".json").unlink()
    assert len(read(path)) == sum(LENGTHS)


@pytest.mark.parametrize("has_group", [False, True])
def test_maniskill_without_observations_is_refused_with_the_way_out(has_group: bool, tmp_path: Path) -> None:
    path = made("maniskill", rows_of(), tmp_path)
    with h5py.File(path, "r+") as file:
        for number in range(len(LENGTHS)):
            del file[f"traj_{number}/obs"]
            if has_group:
                file.create_group(f"traj_{number}/obs")
    with pytest.raises(MissingColumn, match="replay_trajectory"):
        read(path)


def test_groups_of_maniskill_that_are_empty_have_no_column(tmp_path: Path) -> None:
    path = made("maniskill", rows_of(), tmp_path)
    with h5py.File(path, "r+") as file:
        for number, episode in enumerate(episodes_of(rows_of())):
            del file[f"traj_{number}/obs"]
            state = np.concatenate([episode["obs"], episode["new_obs"][-1:]])
            file[f"traj_{number}/obs/agent/qpos"] = state
            file.create_group(f"traj_{number}/obs/extra")
    found = read(path)
    np.testing.assert_array_equal(found["obs"]["agent"]["qpos"], rows_of()["obs"])
    np.testing.assert_array_equal(found["new_obs"]["agent"]["qpos"], rows_of()["new_obs"])


# ---- ALOHA ----


def test_images_of_aloha_may_be_skipped_and_compressed_ones_are_refused(tmp_path: Path) -> None:
    path = made("aloha", rows_of(), tmp_path)
    assert set(read(path, format_options={"images": "skip"})["obs"]) == {"qpos", "qvel"}
    assert set(read(path / "episode_2.hdf5")["obs"]) == {"qpos", "qvel", "images"}
    for file in path.iterdir():
        with h5py.File(file, "r+") as opened:
            opened.attrs["compress"] = True
    with pytest.raises(UnknownLayout, match=r"format_options={'images': 'skip'}.*cv2.imdecode"):
        read(path)
    assert len(read(path, format_options={"images": "skip"})) == sum(LENGTHS)


def test_further_arrays_of_aloha_are_columns(tmp_path: Path) -> None:
    path = made("aloha", rows_of(), tmp_path)
    for number, steps in enumerate(LENGTHS):
        with h5py.File(path / f"episode_{number}.hdf5", "r+") as file:
            file["base_action"] = np.full((steps, 2), number, np.float32)
            file["compress_len"], file["language_raw"] = np.zeros((4, steps + 1)), b"put it there"
    assert read(path)["base_action"][:, 0].tolist() == rows_of()["eps_id"].tolist()
    report = rlio.convert(path, tmp_path / "own", prove=True)
    left_out = {finding.column for finding in report.findings if finding.kind == "left_out"}
    assert left_out == {"compress_len", "language_raw"}


# ---- zarr ----


@pytest.mark.few(1)
@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_of_zarr_are_read_from_folders_and_zip_files(version: int, tmp_path: Path) -> None:
    zarr_buffer(rows_of(), tmp_path / "a.zarr", version=version)
    check("zarr", read(tmp_path / "a.zarr"))
    shutil.make_archive(str(tmp_path / "a.zarr"), "zip", tmp_path / "a.zarr")
    check("zarr", read(tmp_path / "a.zarr.zip"))
    mapping = rlio.Mapping(
        {"obs/state": "state", "actions": "action", "rewards": "reward"}, next_obs="derive"
    )
    check("zarr", read(tmp_path / "a.zarr", mapping=mapping))


def test_parts_of_the_observation_of_zarr_may_be_named(tmp_path: Path) -> None:
    rows = rows_of()
    zarr_buffer(rows, tmp_path / "a.zarr", stage=rows["t"], done=rows["terminateds"])
    shutil.copytree(tmp_path / "a.zarr/meta/episode_ends", tmp_path / "a.zarr/meta/task")
    with pytest.raises(UnknownLayout, match=r"'done', whose meaning.*mapping=rlio.Mapping.*observations"):
        read(tmp_path / "a.zarr")
    found = read(tmp_path / "a.zarr", format_options={"observations": ["state"]})
    assert set(found["obs"]) == {"state"}
    with pytest.raises(OptionError, match="expected some of"):
        read(tmp_path / "a.zarr", format_options={"observations": ["action"]})
    report = rlio.convert(
        tmp_path / "a.zarr",
        tmp_path / "own",
        prove=True,
        read_options={"format_options": {"observations": ["state"]}},
    )
    left_out = {f.column for f in report.findings if f.kind == "left_out"}
    assert left_out == {"done", "stage", "meta/task"}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "fields",
    [{"compressor": {"id": "imagecodecs_jpegxl"}}, {"dtype": "|O", "filters": [{"id": "vlen-utf8"}]}],
)
def test_an_array_of_zarr_that_cannot_be_read_may_be_left_out(fields: dict[str, Any], tmp_path: Path) -> None:
    """UMI's pictures are JPEG XL, its other observations are not."""
    path, rows = tmp_path / "a.zarr", rows_of()
    zarr_buffer(rows, path, position=rows["obs"][:, :1])
    changed(path, **fields)
    with pytest.raises(
        (UnknownLayout, SchemaError), match=r"format_options={'observations': \['position'\]}"
    ):
        read(path)
    for options in ({"observations": ["position", "state"]}, {"observations": ["state"]}):
        with pytest.raises(UnknownLayout, match="data/state"):
            read(path, format_options=options)
    found = read(path, format_options={"observations": ["position"]})
    np.testing.assert_array_equal(found["obs"]["position"], rows["obs"][:, :1])
    mapping = {"obs/position": "position", "actions": "action"}
    found = read(path, mapping=rlio.Mapping(mapping, next_obs="derive"))
    np.testing.assert_array_equal(found["obs"]["position"], rows["obs"][:, :1])
    with pytest.raises(UnknownLayout, match="data/state"):
        read(path, mapping=rlio.Mapping({**mapping, "obs/state": "state"}, next_obs="derive"))
    report = rlio.convert(
        path, tmp_path / "own", read_options={"format_options": {"observations": ["position"]}}
    )
    assert {found.column for found in report.findings if found.kind == "left_out"} == {"state"}


def test_a_replay_buffer_without_actions_is_refused_with_the_mapping(tmp_path: Path) -> None:
    zarr_buffer(rows_of(), tmp_path / "a.zarr")
    shutil.rmtree(tmp_path / "a.zarr/data/action")
    with pytest.raises(UnknownLayout, match=r"not certain.*mapping=rlio.Mapping\(columns={'obs': 'state'"):
        read(tmp_path / "a.zarr")


def changed(path: Path, **fields: Any) -> None:
    """Change the description of the array `state` of version 2."""
    about = json.loads((path / "data/state/.zarray").read_text())
    (path / "data/state/.zarray").write_text(json.dumps({**about, **fields}))


HOSTILE_ZARR: dict[str, tuple[dict[str, Any], type[RlioError], str]] = {
    "pickled": ({"dtype": "|O", "filters": [{"id": "pickle"}]}, UnknownLayout, "pickle"),
    "objects": ({"dtype": "|O"}, SchemaError, "expected numbers"),
    "structs": ({"dtype": [["a", "<f4"]]}, SchemaError, "expected numbers"),
    "rows that are not stored": ({"shape": [10**12, 2]}, UnsafeData, "inflate"),
    "a large chunk": ({"chunks": [10**10, 2]}, UnsafeData, "too large"),
    "packed twice": ({"filters": [{"id": "zlib"}]}, UnsafeData, "compressed twice"),
    "another codec": (
        {"compressor": {"id": "imagecodecs_jpegxl"}},
        UnknownLayout,
        r"from_arrays.*data/state/\.zarray",
    ),
    "no shape": ({"shape": [-1, 2]}, CorruptData, "whole numbers"),
    "a dtype that NumPy parses": ({"dtype": ","}, CorruptData, "not readable as zarr"),
    "fewer rows": ({"shape": [7, 2]}, CorruptData, "expected 35 rows"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("fields", "kind", "text"), first(4, HOSTILE_ZARR.values()))
def test_arrays_of_zarr_that_ask_for_too_much_are_refused(
    fields: dict[str, Any], kind: type[RlioError], text: str, tmp_path: Path
) -> None:
    zarr_buffer(rows_of(), tmp_path / "a.zarr")
    changed(tmp_path / "a.zarr", **fields)
    with pytest.raises(kind, match=text):
        read(tmp_path / "a.zarr")


def bomb(packer: str) -> bytes:
    """Bytes that unpack to 4 MiB."""
    plain = bytes(4 << 20)
    if packer == "zstd":
        return zstandard.compress(plain)
    if packer == "blosc":
        return bytes((2, 1, 0x21, 1)) + (4 << 20).to_bytes(4, "little") + bytes(100)
    if packer == "lz4":
        return (4 << 20).to_bytes(4, "little") + bytes(100)
    return gzip.compress(plain) if packer == "gzip" else zlib.compress(plain)


@pytest.mark.parametrize("packer", first(1, ["zstd", "gzip", "zlib", "lz4", "blosc"]))
def test_chunks_of_zarr_that_unpack_to_more_than_they_hold_are_refused(packer: str, tmp_path: Path) -> None:
    zarr_buffer(rows_of(), tmp_path / "a.zarr")
    known = {"id": packer, **({"cname": "lz4", "clevel": 5, "shuffle": 1} if packer == "blosc" else {})}
    changed(tmp_path / "a.zarr", compressor=known)
    for chunk in (tmp_path / "a.zarr/data/state").glob("*.0"):
        chunk.write_bytes(bomb(packer))
    with pytest.raises(UnsafeData, match="would inflate"):
        read(tmp_path / "a.zarr")


def test_shards_of_zarr_that_unpack_to_more_than_they_hold_are_refused(tmp_path: Path) -> None:
    zarr_buffer(rows_of(), tmp_path / "a.zarr", version=3)
    shard = next(one for one in (tmp_path / "a.zarr/data/state/c").rglob("0") if one.is_file())
    data = bomb("zstd")
    index = np.array([[0, len(data)], [0, len(data)]], "<u8").tobytes()
    shard.write_bytes(data + index + google_crc32c.value(index).to_bytes(4, "little"))
    with pytest.raises(UnsafeData, match="would inflate"):
        read(tmp_path / "a.zarr")


def test_chunks_of_zarr_behind_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    zarr_buffer(rows_of(), tmp_path / "a.zarr")
    (tmp_path / "a.zarr/data/state/0.0").rename(tmp_path / "secret")
    (tmp_path / "a.zarr/data/state/0.0").symlink_to(tmp_path / "secret")
    with pytest.raises(UnsafeData, match="link"):
        read(tmp_path / "a.zarr")


@pytest.mark.parametrize("version", [2, *further(3)])
def test_a_chunk_of_zarr_that_is_gone_since_it_was_listed_is_no_fill_value(
    version: int, tmp_path: Path
) -> None:
    zarr_buffer(rows_of(), tmp_path / "a.zarr", version=version)
    with rlio.read(tmp_path / "a.zarr", epochs=1, cache="none", shuffle=False) as reader:
        for name in ("5.0", "c/3/0"):
            (tmp_path / "a.zarr/data/state" / name).unlink(missing_ok=True)
        with pytest.raises(HoleError, match="is not there"):
            list(reader)


def test_a_shard_of_zarr_that_was_damaged_on_its_way_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_sources, "_GROUP_ROWS", 3)  # Half a shard.
    zarr_buffer(rows_of(), tmp_path / "a.zarr", version=3)
    found, errors, own = list[rlio.SampleBatch](), 0, InputFiles.open

    def damaged(self: InputFiles, number: int, **more: Any) -> Any:
        with own(self, number, **more) as stream:
            data = stream.read()
        return io.BytesIO(b"????" + data[4:])

    with rlio.read(tmp_path / "a.zarr", epochs=1, cache="none", shuffle=False) as reader:
        monkeypatch.setattr(InputFiles, "open", damaged)
        for _ in range(100):
            try:
                found.append(reader.sample())
            except CorruptData:
                errors += 1
                monkeypatch.setattr(InputFiles, "open", own)
            except EndOfData:
                break
    assert errors == 1
    check("zarr", rlio.concat_samples(found))


@pytest.mark.few(1)
@pytest.mark.parametrize("version", [2, 3])
def test_zarr_reads_an_array_by_the_description_that_was_checked(version: int, tmp_path: Path) -> None:
    """zarr itself prefers version 3 where both are."""
    zarr_buffer(rows_of(), tmp_path / "a.zarr", version=version)
    zarr_buffer(rows_of(), tmp_path / "b.zarr", version=5 - version)
    (about,) = (tmp_path / "b.zarr/data/state").glob("zarr.json" if version == 2 else ".zarray")
    about.write_text(about.read_text().replace("float32", "int64").replace("<f4", "<i8"))
    shutil.copy(about, tmp_path / "a.zarr/data/state")
    check("zarr", read(tmp_path / "a.zarr"))


# ---- imitation ----


def test_trajectories_of_imitation_are_read() -> None:
    found = read(GOLDEN / "imitation/saved")
    assert found["eps_id"].tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2]
    assert found["obs"].tolist() == [[100.0 * e + t, t] for e, n in enumerate((3, 1, 5)) for t in range(n)]
    np.testing.assert_array_equal(found["new_obs"], found["obs"] + 1)
    assert np.flatnonzero(found["terminateds"]).tolist() == [2]
    assert np.flatnonzero(found["truncateds"]).tolist() == [3]
    assert found["rewards"].tolist() == [0, 1, 2, 1000, 2000, 2001, 2002, 2003, 2004]
    assert found["infos"][1]["speed"] == 0.5
    assert set(found["infos"][1]["position"]) == {
        "py/reduce"
    }  # JSON of jsonpickle, of which no object is made.


@pytest.mark.parametrize(
    ("column", "values", "text"),
    [
        ("infos", ["{}", "{"], "no JSON"),
        ("infos", ["{}"], "has 1 rows"),
        ("obs", [[0.0, 0.0]] * 2, "has 2 rows"),
    ],
)
def test_trajectories_of_imitation_that_do_not_fit_are_damage(
    column: str, values: Any, text: str, tmp_path: Path
) -> None:
    rows = {
        "obs": [[0.0, 0.0]] * 3,
        "acts": [0, 1],
        "infos": ["{}", '{"a": 1}'],
        "terminal": True,
        column: values,
    }
    made("imitation", rows_of(), tmp_path)
    for file in (tmp_path / "imitation").glob("*.arrow"):
        file.unlink()
    table = pa.table({name: [value] for name, value in rows.items()})
    for number in range(2):
        with pa.ipc.new_stream(tmp_path / f"imitation/data-{number:05}-of-00002.arrow", table.schema) as file:
            file.write_table(table)
    with pytest.raises(CorruptData, match=text):
        read(tmp_path / "imitation")


def test_a_hugging_face_data_set_with_other_columns_is_no_imitation(tmp_path: Path) -> None:
    made("imitation", rows_of(), tmp_path)
    about = json.loads((tmp_path / "imitation/dataset_info.json").read_text())
    del about["features"]["acts"]
    (tmp_path / "imitation/dataset_info.json").write_text(json.dumps(about))
    found = recognise(tmp_path / "imitation")
    assert found is not None
    assert found.format.name == "huggingface"


# ---- what is not certain ----


def test_a_mapping_reads_a_known_kind_as_it_says(files: dict[str, Path]) -> None:
    mapping = rlio.Mapping({"obs": "observations/qpos", "actions": "action"}, per_file=True)
    assert read(files["aloha"], mapping=mapping)["obs"].shape == (sum(LENGTHS), 2)
    groups = rlio.Mapping({"obs": "env_states/actors/cube", "actions": "actions"}, episode="traj_*")
    assert len(read(files["maniskill"], mapping=groups)) == sum(LENGTHS)


@pytest.mark.parametrize("name", first(3, KINDS))
def test_a_cut_file_is_an_error_of_rlio(files: dict[str, Path], name: str, tmp_path: Path) -> None:
    path = files[name]
    if name == "zarr":  # Each of its chunks is a file.
        shutil.copytree(path, tmp_path / "a.zarr")
        chunk = tmp_path / "a.zarr/data/state/0.0"
        chunk.write_bytes(chunk.read_bytes()[:20])
        with pytest.raises(RlioError):
            read(tmp_path / "a.zarr")
        return
    file = sorted(path.iterdir())[0] if path.is_dir() else path
    data = file.read_bytes()
    (tmp_path / file.name).write_bytes(data[: len(data) // 2])
    with pytest.raises(RlioError):
        read(tmp_path / file.name)
