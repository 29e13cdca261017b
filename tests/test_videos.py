"""Videos of which frames are rows are kept as they are (docs/design/videos.md)."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import shutil
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from further import further
from numpy.typing import NDArray

import rlio
from rlio.batch.arrays import object_column
from rlio.batch.encoded_picture import EncodedPicture, VideoFrame
from rlio.conversion import convert
from rlio.errors import CorruptData, MissingExtra, SchemaError
from rlio.formats.lerobot import sink as lerobot_sink
from rlio.formats.lerobot.source import LeRobotSource
from rlio.maintenance import compact, trim, verify
from rlio.maintenance.repair import repair
from rlio.schemas.column import ColumnSpec
from rlio.source import videos
from rlio.source.videos import Videos, VideoStream
from rlio.storage import Storage
from rlio.storage.local import PendingFile
from rlio.writers.parquet_writer import ParquetWriter
from rlio.writers.recovery import recover

pytest.importorskip("av", reason="PyAV is not installed: pip install 'rlio[video]'")

from video_sets import CAMERAS, FPS, SHAPE, decoded, encode, frame_of, video_set

LENGTHS = (5, 3, 7)
VERSIONS = ["v3.0", "v2.1"]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A LeRobot data set of each version, and each in a data set of rlio."""
    root = tmp_path_factory.mktemp("sets")
    found = {}
    for version in VERSIONS:
        found[version] = video_set(root / version, version)
        found[f"{version} in rlio"] = root / f"{version}-rlio"
        assert rlio.convert(root / version, root / f"{version}-rlio", prove=True).proved
    return found


def files_of(root: Path, folder: str = "") -> dict[str, bytes]:
    return {
        str(path.relative_to(root / folder)): path.read_bytes() for path in (root / folder).rglob("*.mp4")
    }


def frames_of(root: Path, camera: str) -> NDArray[np.uint8]:
    """All frames of a camera of a LeRobot data set, decoded without rlio."""
    return np.concatenate([decoded(path) for path in sorted((root / "videos").rglob(f"*{camera}/**/*.mp4"))])


def all_rows(root: Path, **options: Any) -> Any:
    with rlio.read(root, epochs=1, **options) as reader:
        return rlio.concat_samples(list(reader))


def references(root: Path) -> set[str]:
    """Digests of the videos that rows name, read without rlio."""
    return {
        data[:16].hex()
        for shard in root.glob("data/*/*.parquet")
        for camera in CAMERAS
        for column in (f"obs/{camera}", f"_new_obs/{camera}")
        for data in pq.read_table(shard, columns=[column])[column].to_pylist()
        if data
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("version", VERSIONS)
def test_videos_of_lerobot_are_the_same_files_in_rlio_and_back(
    version: str, sets: dict[str, Path], tmp_path: Path
) -> None:
    source, root = sets[version], sets[f"{version} in rlio"]
    files = files_of(source, "videos")
    assert sorted(files_of(root, "_videos").values()) == sorted(files.values())
    assert {f"{name}.mp4" for name in references(root)} == set(files_of(root, "_videos"))
    (schema,) = rlio.open_dataset(root).schemas.values()
    spec = schema.columns["obs/left"]
    assert (spec.codec, spec.shape, spec.dtype) == ("video", SHAPE, "|u1")
    assert spec.to_json()["picture"] == {"codec": "video", "lossless": False}
    assert rlio.convert(root, tmp_path / "back", to="lerobot", prove=True).proved
    back = files_of(tmp_path / "back", "videos")
    assert sorted(back.values()) == sorted(files.values())
    if version == "v3.0":
        assert back == files


@pytest.mark.few(1)
@pytest.mark.parametrize("version", VERSIONS)
def test_frames_of_kept_videos_are_those_of_their_rows(version: str, sets: dict[str, Path]) -> None:
    source, root = sets[version], sets[f"{version} in rlio"]
    found = all_rows(root, shuffle=False)
    state = found["obs"]["state"].astype(int)
    for camera in CAMERAS:
        frames = frames_of(source, camera)
        assert np.array_equal(found["obs"][camera], frames)
        following = np.concatenate([frames[1:], frames[:1]])
        following[np.cumsum(LENGTHS) - 1] = 0  # No observation after the last step is known.
        assert np.array_equal(found["new_obs"][camera], following)
        made = np.stack([frame_of(episode, t, camera) for episode, t in state]).astype(int)
        assert abs(found["obs"][camera] - made).mean() < 12  # Lossy, but no other frame.
    assert all_rows(source, shuffle=False)["obs"]["left"].tolist() == found["obs"]["left"].tolist()


@pytest.mark.few(1)
@pytest.mark.parametrize("version", VERSIONS)
def test_rows_in_any_order_have_their_frames(version: str, sets: dict[str, Path]) -> None:
    root = sets[f"{version} in rlio"]
    frames = frames_of(sets[version], "right")
    numbers = {(episode, t): row for row, (episode, t) in enumerate(places())}

    def check(rows: Any) -> None:
        expected = [numbers[tuple(state)] for state in rows["obs"]["state"].astype(int).tolist()]
        assert np.array_equal(rows["obs"]["right"], frames[expected])

    for options in ({"cache": "none"}, {"cache": "memory"}, {"cache": "disk"}):
        rows = all_rows(root, shuffle=True, seed=3, batch_size=4, **options)
        assert len(rows) == sum(LENGTHS)
        check(rows)
    data = rlio.open_dataset(root)
    order = np.random.default_rng(0).permutation(sum(LENGTHS))
    check(data.take(order))
    for row in order[:6]:
        assert np.array_equal(data[int(row)]["obs"]["right"].squeeze(), frames[row])
    assert np.array_equal(data.episode(1).frames_of("obs/right"), frames[5:8])


def places() -> list[tuple[int, int]]:
    return [(episode, t) for episode, steps in enumerate(LENGTHS) for t in range(steps)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("libx264", {"g": "12", "bf": "3"}),
        # What is sought is a keyframe that is decoded before the frame, and shown after it.
        ("mpeg4", {"g": "12", "bf": "2"}),
        *further(
            ("libx264", {"g": "8", "bf": "3", "x264-params": "open-gop=1"}),
            ("libx264", {"g": "250"}),
            ("libx265", {"x265-params": "open-gop=1:keyint=8:log-level=none"}),
            ("libsvtav1", {"g": "2", "crf": "30"}),
        ),
    ],
)
def test_a_frame_that_is_sought_is_the_one_that_decoding_in_order_gives(
    codec: str, options: dict[str, str], tmp_path: Path
) -> None:
    path, count = tmp_path / "a.mp4", 90
    frames = [np.roll(frame_of(n % 4, n % 16, "left", (64, 64, 3)), n, 1) for n in range(count)]
    encode(path, frames, codec=codec, options=options)
    expected = decoded(path)
    stream = VideoStream(Storage.open(tmp_path), "a.mp4")
    times, shape = stream.times(0.0, count, FPS)
    rng = np.random.default_rng(0)
    for length in (1, 1, 1, 2, 5, 40) * 4:
        chosen = np.sort(rng.choice(count, length, replace=False))
        found = np.stack(list(stream.frames([times[n] for n in chosen], shape)))
        assert np.array_equal(found, expected[chosen])
    for begin in range(0, count - 5, 3):
        assert stream.times(begin / FPS, 5, FPS)[0] == times[begin : begin + 5]


def test_frames_in_order_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    video_set(tmp_path / "a", lengths=(60,), cameras=["left"], options={"g": "250"})
    rlio.convert(tmp_path / "a", tmp_path / "b")
    sought = []
    packets = videos._packets
    monkeypatch.setattr(videos, "_packets", lambda *given: sought.append(given) or packets(*given))
    data = rlio.open_dataset(tmp_path / "b")
    for row in range(60):
        data.take(np.array([row]))
    assert len(sought) == 1


def test_some_episodes_go_back_with_their_whole_videos(sets: dict[str, Path], tmp_path: Path) -> None:
    chosen = {"filter": "eps_id == 1"}
    root = sets["v3.0 in rlio"]
    assert rlio.convert(root, tmp_path / "a", to="lerobot", prove=True, read_options=chosen).proved
    assert files_of(tmp_path / "a", "videos") == files_of(sets["v3.0"], "videos")
    assert np.array_equal(all_rows(tmp_path / "a")["obs"]["left"], frames_of(sets["v3.0"], "left")[5:8])


@pytest.mark.parametrize("to", ["npz", *further("minari")])
def test_formats_without_videos_get_their_frames(to: str, sets: dict[str, Path], tmp_path: Path) -> None:
    root = sets["v2.1 in rlio"]
    assert rlio.convert(root, tmp_path / "a", to=to, prove=True, final_obs="repeat").proved
    rows = all_rows(tmp_path / "a", shuffle=False)
    assert np.array_equal(rows["obs"]["left"], frames_of(sets["v2.1"], "left"))


def test_lerobot_gets_png_if_that_is_asked_for(sets: dict[str, Path], tmp_path: Path) -> None:
    root = sets["v2.1 in rlio"]
    options = {"videos": "decode"}
    assert rlio.convert(root, tmp_path / "a", to="lerobot", prove=True, options=options).proved
    assert not files_of(tmp_path / "a")
    assert np.array_equal(all_rows(tmp_path / "a")["obs"]["left"], frames_of(sets["v2.1"], "left"))


def test_frames_that_are_not_consecutive_are_png_in_lerobot_or_refused(
    sets: dict[str, Path], tmp_path: Path
) -> None:
    source = LeRobotSource(place_of(sets["v3.0"]), limits=rlio.limits.Limits())
    rows = [source.load(episode, None) for episode in range(3)]
    for batch in rows:
        batch["obs"] = {"left": batch["obs"]["left"]}
        batch["new_obs"] = {"left": batch["new_obs"]["left"]}
    mixed = rows[0].copy()
    mixed["obs"] = {"left": rows[0]["obs"]["left"][[0, 2, 1, 3, 4]]}
    mixed["new_obs"] = {"left": rows[0]["new_obs"]["left"][[1, 0, 2, 3, 4]]}
    with rlio.ParquetWriter(tmp_path / "a") as writer:
        for number, batch in enumerate((rows[0], mixed)):
            batch["eps_id"] = np.full(5, number)
            writer.write(batch)
    with pytest.raises(SchemaError, match=r"not consecutive frames of one video.*decode"):
        rlio.convert(tmp_path / "a", tmp_path / "b", to="lerobot", options={"fps": FPS})
    given = {"options": {"fps": FPS}, "read_options": {"filter": "eps_id == 1"}, "prove": True}
    assert rlio.convert(tmp_path / "a", tmp_path / "c", to="lerobot", **given).proved
    expected = frames_of(sets["v3.0"], "left")[[0, 2, 1, 3, 4]]
    assert np.array_equal(all_rows(tmp_path / "c")["obs"]["left"], expected)
    assert not files_of(tmp_path / "c")
    source.close()


def place_of(root: Path) -> Any:
    from rlio.formats.place import locate_format

    return locate_format(root)[1]


def test_videos_in_remote_stores_and_zip_files_are_kept(sets: dict[str, Path], tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "a"), "zip", sets["v3.0"])
    uri = f"memory://{tmp_path.name}"
    assert rlio.convert(archive, uri, prove=True).proved
    assert rlio.convert(uri, tmp_path / "b", to="lerobot", prove=True).proved
    assert files_of(tmp_path / "b", "videos") == files_of(sets["v3.0"], "videos")
    with rlio.read(uri, epochs=1, shuffle=False, cache="none") as reader:
        rows = rlio.concat_samples(list(reader))
    assert np.array_equal(rows["obs"]["left"], frames_of(sets["v3.0"], "left"))


# ---- what is stored ----


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [rlio.ParquetWriter, rlio.JsonWriter])
def test_a_writer_stores_videos_before_the_rows_that_name_them(
    kind: Any, sets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    puts: list[str] = []
    put = Storage.put
    monkeypatch.setattr(
        Storage, "put", lambda self, path, data: (puts.append(path), put(self, path, data))[1]
    )
    source = LeRobotSource(place_of(sets["v2.1"]), limits=rlio.limits.Limits())
    with kind(tmp_path / "a") as writer:
        for episode in range(3):
            batch = source.load(episode, None)
            batch["eps_id"] = np.full(len(batch), episode)
            writer.write(batch)
            assert sum(path.startswith("_videos/") for path in puts) == 2 * (episode + 1)
    source.close()
    rows = all_rows(tmp_path / "a", shuffle=False)
    assert np.array_equal(rows["obs"]["left"], frames_of(sets["v2.1"], "left"))
    assert verify(tmp_path / "a").findings == ()


def test_rows_in_the_log_of_a_dead_writer_have_their_videos(sets: dict[str, Path], tmp_path: Path) -> None:
    def die() -> None:
        source = LeRobotSource(place_of(sets["v3.0"]), limits=rlio.limits.Limits())
        writer = rlio.ParquetWriter(tmp_path / "a")
        writer.write(source.load(0, None))
        os._exit(3)

    in_child(die, expected=3)
    assert not list((tmp_path / "a").glob("data/*/*.parquet"))
    recover(tmp_path / "a")
    assert np.array_equal(all_rows(tmp_path / "a")["obs"]["left"], frames_of(sets["v3.0"], "left")[:5])


def in_child(action: Callable[[], None], *, expected: int) -> None:
    process = multiprocessing.get_context("fork").Process(target=action)
    process.start()
    process.join(60)
    if process.exitcode is None:
        process.kill()
        process.join(10)
    assert process.exitcode == expected


@pytest.mark.few(1)
@pytest.mark.parametrize("version", VERSIONS)
def test_each_shard_appears_after_its_videos(
    version: str, sets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "_SHARD_BYTES", 1)  # A shard an episode.
    commit = PendingFile.commit
    named = []

    def checked(self: PendingFile, path: str) -> None:
        commit(self, path)
        if path.endswith(".parquet"):
            named.append(len(references(tmp_path)))
            assert references(tmp_path) <= {path.stem for path in tmp_path.glob("_videos/*.mp4")}

    monkeypatch.setattr(PendingFile, "commit", checked)
    rlio.convert(sets[version], tmp_path)
    assert named == ([2, 2, 2] if version == "v3.0" else [2, 4, 6])


@pytest.mark.further
@pytest.mark.parametrize("version", VERSIONS)
def test_a_conversion_that_is_killed_leaves_no_reference_without_its_video(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = video_set(tmp_path / "source", version, lengths=(2, 1))
    monkeypatch.setattr(convert, "_SHARD_BYTES", 1)  # A shard an episode.
    commit = PendingFile.commit

    def kill_at(number: int) -> None:
        count = 0

        def counted(self: PendingFile, path: str) -> None:
            nonlocal count
            count += 1
            if count == number:
                os._exit(9)
            commit(self, path)

        PendingFile.commit = counted  # type: ignore[method-assign]
        rlio.convert(source, tmp_path / f"{number}")
        os._exit(0)

    named = []
    for number in range(2, 40):
        root = tmp_path / f"{number}"
        process = multiprocessing.get_context("fork").Process(target=kill_at, args=(number,))
        process.start()
        process.join(60)
        assert process.exitcode in (0, 9)
        named.append(len(references(root)))
        assert references(root) <= {path.stem for path in root.glob("_videos/*.mp4")}
        if process.exitcode == 0:
            break
        if number == 6:
            assert rlio.convert(source, root, prove=True).proved
    assert process.exitcode == 0
    assert len(set(named)) == (
        3 if version == "v2.1" else 2
    )  # It was killed before, between and after shards.


def test_compaction_into_another_root_takes_the_videos_along(sets: dict[str, Path], tmp_path: Path) -> None:
    root = sets["v2.1 in rlio"]
    compact(root, into=tmp_path / "a")
    assert files_of(tmp_path / "a", "_videos") == files_of(root, "_videos")
    assert np.array_equal(all_rows(tmp_path / "a")["obs"]["left"], all_rows(root)["obs"]["left"])
    assert verify(tmp_path / "a").findings == ()


def test_shards_that_are_compacted_or_trimmed_keep_their_frames(
    sets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "_SHARD_BYTES", 1)
    rlio.convert(sets["v2.1"], tmp_path / "a")
    before = all_rows(tmp_path / "a", shuffle=False)
    (writer, *_) = rlio.open_dataset(tmp_path / "a").snapshot()
    compact(tmp_path / "a")
    assert all_rows(tmp_path / "a", shuffle=False).equals(before)
    trim(tmp_path / "a", before={writer: 2})
    assert np.array_equal(all_rows(tmp_path / "a", shuffle=False)["obs"]["left"], before["obs"]["left"][2:])


def test_a_conversion_of_rlio_into_rlio_copies_the_videos(sets: dict[str, Path], tmp_path: Path) -> None:
    assert rlio.convert(sets["v2.1 in rlio"], tmp_path / "a", prove=True).proved
    assert files_of(tmp_path / "a", "_videos") == files_of(sets["v2.1"], "_videos") | files_of(
        sets["v2.1 in rlio"], "_videos"
    )


def test_a_large_conversion_ends_its_shards_where_episodes_end(sets: dict[str, Path]) -> None:
    (source,) = [LeRobotSource(place_of(sets["v3.0"]), limits=rlio.limits.Limits())]
    rows = source.load(0, None)
    source.close()
    shown = [(name, count * first.nbytes) for name, first, count in convert._videos_of(rows)]
    assert shown == [(f"obs/{camera}", 5 * 32 * 48 * 3) for camera in CAMERAS] * 2


def test_the_info_of_a_root_counts_its_videos(sets: dict[str, Path]) -> None:
    root = sets["v2.1 in rlio"]
    found = rlio.open_dataset(root).info()
    stored = [*(root / "_videos").iterdir(), *root.glob("data/*/*.parquet")]
    assert (found.files, found.bytes) == (len(stored), sum(path.stat().st_size for path in stored))


# ---- faults ----


def off_by_one(monkeypatch: pytest.MonkeyPatch, sets: dict[str, Path]) -> None:
    frame = Videos._frame

    def broken(self: Videos, picture: EncodedPicture) -> EncodedPicture:
        found = frame(self, picture)
        if isinstance(found, VideoFrame) and found.time:
            return VideoFrame(found.stream, found.time - unit, found.shape)
        return found

    stream = VideoStream(Storage.open(sets["v2.1"]), "videos/chunk-000/observation.left/episode_000000.mp4")
    unit = np.diff(stream.times(0.0, 2, FPS)[0]).item()
    monkeypatch.setattr(Videos, "_frame", broken)


def wrong_camera(monkeypatch: pytest.MonkeyPatch, sets: dict[str, Path]) -> None:
    write = ParquetWriter.write

    def broken(self: ParquetWriter, batch: Any) -> Any:
        obs = batch["obs"]
        return write(self, batch._like({**batch, "obs": {**obs, "left": obs["right"]}}))

    monkeypatch.setattr(ParquetWriter, "write", broken)


def last_frame_missing(monkeypatch: pytest.MonkeyPatch, sets: dict[str, Path]) -> None:
    write = ParquetWriter.write

    def broken(self: ParquetWriter, batch: Any) -> Any:
        left = batch["obs"]["left"].copy()
        left[-1] = left[-2]
        return write(self, batch._like({**batch, "obs": {**batch["obs"], "left": left}}))

    monkeypatch.setattr(ParquetWriter, "write", broken)


def replaced(monkeypatch: pytest.MonkeyPatch, sets: dict[str, Path]) -> None:
    put = Storage.put
    others = (sets["v2.1"] / "videos/chunk-000/observation.right/episode_000002.mp4").read_bytes()

    def broken(self: Storage, path: str, data: Any) -> None:
        put(self, path, others if path.startswith("_videos/") else data)

    monkeypatch.setattr(Storage, "put", broken)


def replaced_and_renamed(monkeypatch: pytest.MonkeyPatch, sets: dict[str, Path]) -> None:
    """No check of digests notices, because the rows name the other video."""
    write = ParquetWriter.write
    other = VideoStream(Storage.open(sets["v2.1"]), "videos/chunk-000/observation.right/episode_000002.mp4")

    def broken(self: ParquetWriter, batch: Any) -> Any:
        left = object_column(VideoFrame(other, frame.time, frame.shape) for frame in batch["obs"]["left"])
        return write(self, batch._like({**batch, "obs": {**batch["obs"], "left": left}}))

    monkeypatch.setattr(ParquetWriter, "write", broken)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "plant", [off_by_one, wrong_camera, last_frame_missing, replaced, replaced_and_renamed]
)
def test_a_proof_finds_wrong_frames(
    plant: Callable[..., None],
    sets: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch, sets)
    with pytest.raises(CorruptData, match=r"the proof failed|video"):
        rlio.convert(sets["v2.1"], tmp_path / "a", prove=True)


def test_a_proof_of_lerobot_finds_frames_that_are_one_too_late(
    sets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = lerobot_sink._begin_in_video
    monkeypatch.setattr(lerobot_sink, "_begin_in_video", lambda *given: (begin(*given) or 0.0) + 1 / FPS)
    with pytest.raises(CorruptData, match=r"the proof failed|video"):
        rlio.convert(sets["v3.0 in rlio"], tmp_path / "a", to="lerobot", prove=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("skip", [1, 4, *further(0, 14)])
def test_a_video_that_lacks_a_frame_is_refused(version: str, skip: int, tmp_path: Path) -> None:
    # Frames after the one that is missing were read as those of the rows before.
    lengths = (15,) if version == "v2.1" else (5, 3, 7)
    if version == "v2.1" and skip == 0:
        return  # Its first frame is where the video begins.
    video_set(tmp_path / "a", version, lengths=lengths, cameras=["left"], skip=[skip])
    with pytest.raises(CorruptData, match="video"):
        rlio.convert(tmp_path / "a", tmp_path / "b")


@pytest.mark.few(1)
@pytest.mark.parametrize("damage", ["missing", "changed", "other"])
def test_a_damaged_video_loses_the_groups_that_show_it_alone(
    damage: str, sets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "_SHARD_BYTES", 1)
    rlio.convert(sets["v2.1"], tmp_path / "a")
    lost = sets["v2.1"] / "videos/chunk-000/observation.right/episode_000001.mp4"
    (path,) = [path for path in (tmp_path / "a/_videos").iterdir() if path.read_bytes() == lost.read_bytes()]
    if damage == "missing":
        path.unlink()
    elif damage == "changed":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        shutil.copy(lost.with_name("episode_000000.mp4"), path)
    with pytest.raises(CorruptData, match="restore it"):
        all_rows(tmp_path / "a")
    rows = all_rows(tmp_path / "a", on_error="skip", shuffle=False)
    assert rows["obs"]["state"][:, 0].tolist() == [0] * 5 + [2] * 7
    assert len(all_rows(tmp_path / "a", columns=["obs/left", "actions"])) == sum(LENGTHS)
    (finding,) = verify(tmp_path / "a").findings
    assert (finding.code, finding.rows) == ("video-damaged", 3)
    before = sorted((tmp_path / "a").rglob("*"))
    repair(tmp_path / "a")
    assert sorted((tmp_path / "a").rglob("*")) == before
    with pytest.raises(CorruptData, match="restore it"):
        rlio.convert(tmp_path / "a", tmp_path / "b")
    path.write_bytes(lost.read_bytes())
    assert len(all_rows(tmp_path / "a")) == sum(LENGTHS)


def test_a_source_whose_video_changes_meanwhile_is_not_stored(tmp_path: Path) -> None:
    source = video_set(tmp_path / "a", "v2.1", cameras=["left"])
    path = "videos/chunk-000/observation.left/episode_000000.mp4"
    stream = VideoStream(Storage.open(source), path)
    assert stream.digest
    (source / path).write_bytes((source / path).read_bytes() + b"more")
    with pytest.raises(CorruptData, match="other bytes"):
        stream.content()


def test_frames_without_a_video_are_refused(tmp_path: Path) -> None:
    column = object_column(EncodedPicture(bytes(24), "video", SHAPE) for _ in range(2))
    with (
        rlio.ParquetWriter(tmp_path) as writer,
        pytest.raises(SchemaError, match=r"not in _videos"),
    ):
        writer.write(rlio.SampleBatch(obs=column, actions=np.zeros(2)))
    assert not list(tmp_path.glob("data/*/*.parquet"))
    for shape in ((32, 48), (32, 48, 1)):
        spec = ColumnSpec("|u1", shape, "picture", codec="video")
        with pytest.raises(CorruptData):
            ColumnSpec.from_json(spec.to_json(), column="obs")


def test_a_video_of_another_size_than_its_column_is_refused(sets: dict[str, Path]) -> None:
    stream = VideoStream(Storage.open(sets["v2.1"]), "videos/chunk-000/observation.left/episode_000000.mp4")
    times, _ = stream.times(0.0, 1, FPS)
    for wrong, shape in ((times, (32, 32, 3)), ([times[0] + 1], SHAPE), ([10**9], SHAPE)):
        with pytest.raises(CorruptData, match="video"):
            list(stream.frames(wrong, shape))
    assert len(list(stream.frames(times, SHAPE))) == 1  # An error does not end it.


def test_without_the_library_videos_are_refused_and_no_shard_is_moved(
    sets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(sets["v2.1 in rlio"], tmp_path / "a")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtra, match="video"):
        all_rows(tmp_path / "a")
    assert set(all_rows(tmp_path / "a", columns=["obs/state"])["obs"]) == {"state"}
    for check in (verify, repair):
        with pytest.raises(MissingExtra, match="video"):
            check(tmp_path / "a")
    assert not (tmp_path / "a/_quarantine").exists()


# ---- processes and threads ----


def test_a_fork_goes_on_with_videos_that_are_open(sets: dict[str, Path]) -> None:
    stream = VideoStream(Storage.open(sets["v3.0"]), "videos/observation.left/chunk-000/file-000.mp4")
    times, shape = stream.times(0.0, 15, FPS)
    expected = frames_of(sets["v3.0"], "left")
    first = list(stream.frames(times[:7], shape))
    again = pickle.loads(pickle.dumps(VideoFrame(stream, times[9], shape)))

    def child() -> None:
        found = list(stream.frames(times[7:], shape))
        os._exit(7 if np.array_equal(np.stack(found), expected[7:]) else 1)

    in_child(child, expected=7)
    found = np.stack([*first, *stream.frames(times[7:], shape)])
    assert np.array_equal(found, expected)
    assert again.data == VideoFrame(stream, times[9], shape).data
    assert np.array_equal(next(again.stream.frames([again.time], shape)), expected[9])


@pytest.mark.further
def test_decoders_are_freed_without_a_collection_of_garbage(
    sets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a fork, which has none of their threads, a collection would wait for these, or crash."""
    monkeypatch.setattr(videos, "_OPEN", 1)
    gc.collect()
    monkeypatch.setattr(videos, "_recent", OrderedDict())
    before = open_decoders()
    gc.disable()
    try:
        assert rlio.convert(sets["v3.0"], tmp_path / "a", prove=True).proved
        path = "videos/observation.left/chunk-000/file-000.mp4"
        stream = VideoStream(Storage.open(sets["v3.0"]), path)
        with pytest.raises(CorruptData, match="pixels"):
            next(stream.frames([0], (1, 1, 3)))
        assert open_decoders() - before <= 2  # Each is in use: one to look, and one to decode.
    finally:
        gc.enable()


def open_decoders() -> int:
    """Those that have threads. PyAV 12 keeps the others until a collection."""
    return sum(type(one).__name__ == "VideoCodecContext" and one.is_open for one in gc.get_objects())


def test_few_videos_stay_open(tmp_path: Path) -> None:
    video_set(tmp_path / "a", "v2.1", lengths=(2,) * 12, cameras=["left"])
    source = LeRobotSource(place_of(tmp_path / "a"), limits=rlio.limits.Limits())
    for _ in range(2):
        streams = []
        for episode in range(12):
            (frame, _) = source.load(episode, None)["obs"]["left"].tolist()
            streams.append(frame.stream)
            assert next(frame.stream.frames([frame.time], frame.shape))[0, 0, 0] > 0 or episode == 0
        assert sum(stream._decoder is not None for stream in streams) <= videos._OPEN
    source.close()
