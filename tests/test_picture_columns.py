"""Columns of pictures that are stored as PNG and JPEG files (docs/design/pictures.md)."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from further import further
from numpy.typing import NDArray
from PIL import Image

import rlio
from rlio.batch import picture_codecs
from rlio.batch.arrays import object_column
from rlio.batch.encoded_picture import EncodedPicture
from rlio.batch.picture_codecs import decode_column, encode_column, encoded_column
from rlio.errors import CorruptData, MissingColumn, MissingExtra, OptionError, SchemaError, UnsafeData
from rlio.formats.files.allowance import Allowance
from rlio.limits import Limits
from rlio.maintenance import verify
from rlio.maintenance.repair import repair
from rlio.schemas.column import ColumnSpec
from rlio.schemas.schema import Schema
from rlio.writers.recovery import recover

ROWS = 24
SHAPE = (9, 8, 3)


def frames_of(rows: int, shape: tuple[int, ...] = SHAPE) -> NDArray[np.uint8]:
    """Noise, which shows each lost bit."""
    return np.random.default_rng(0).integers(0, 256, (rows, *shape), np.uint8)


def batch_of(pictures: Any, *, valid: Any = None, episode: int = 8) -> rlio.SampleBatch:
    """Rows of episodes of 8 steps whose N+1 pictures are ``pictures``; ``valid``: of the final ones."""
    rows = len(pictures) - 1
    t = np.arange(rows)
    batch = rlio.SampleBatch(
        obs={"camera": pictures[:-1], "t": t},
        new_obs={"camera": pictures[1:].copy(), "t": t + 1},
        actions=t,
        rewards=np.ones(rows),
        terminateds=t % episode == episode - 1,
        eps_id=t // episode,
        t=t % episode,
    )
    if valid is not None:
        batch["new_obs_valid"] = np.where(batch["terminateds"], valid, True)
        none = pictures[0].none() if isinstance(pictures[0], EncodedPicture) else 0
        batch["new_obs"]["camera"][~batch["new_obs_valid"]] = none
    return batch


def jpegs_of(rows: int, shape: tuple[int, ...] = SHAPE) -> list[bytes]:
    files = []
    for frame in frames_of(rows, shape):
        stream = io.BytesIO()
        Image.fromarray(frame).save(stream, format="JPEG")
        files.append(stream.getvalue())
    return files


def stored_files(root: Path, column: str = "obs/camera") -> list[bytes]:
    """The files in the shards of a root, read without rlio."""
    return [
        data
        for shard in sorted(root.glob("data/*/*.parquet"))
        for data in pq.read_table(shard, columns=[column])[column].to_pylist()
        if data is not None
    ]


def all_rows(root: Any, **options: Any) -> Any:
    with rlio.DatasetReader(root, epochs=1, **options) as reader:
        return rlio.concat_samples(list(reader))


@pytest.mark.parametrize("kind", [rlio.ParquetWriter, rlio.JsonWriter])
@pytest.mark.parametrize("shape", [SHAPE, *further(((9, 8),), ((9, 8, 1),), ((9, 8, 4),))])
def test_frames_that_are_recorded_as_png_come_back_equal(
    tmp_path: Path, kind: Any, shape: tuple[int, ...]
) -> None:
    frames = frames_of(ROWS + 1, shape)
    with kind(tmp_path, pictures={"obs/camera": "png"}) as writer:
        writer.write(batch_of(frames))
    rows = all_rows(tmp_path)
    assert rows["obs"]["camera"].dtype == np.uint8
    assert np.array_equal(rows["obs"]["camera"], frames[:-1])
    assert np.array_equal(rows["new_obs"]["camera"], frames[1:])
    assert rows["obs"]["camera"].flags.writeable


def test_a_picture_is_stored_once_as_a_file_that_other_tools_open(tmp_path: Path) -> None:
    frames = frames_of(ROWS + 1)
    with rlio.ParquetWriter(tmp_path, pictures={"obs/camera": "png"}) as writer:
        writer.write(batch_of(frames))
    files = stored_files(tmp_path)
    assert len(files) == ROWS
    assert all(
        np.array_equal(np.asarray(Image.open(io.BytesIO(file))), frame)
        for file, frame in zip(files, frames, strict=False)
    )
    assert len(stored_files(tmp_path, "_new_obs/camera")) == ROWS // 8  # The final ones.


def test_frames_of_a_batch_that_are_equal_are_encoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, real = list[int](), picture_codecs.encode_png

    def counted(frames: Any, **options: Any) -> Any:
        encoded.append(len(frames))
        return real(frames, **options)

    monkeypatch.setattr(picture_codecs, "encode_png", counted)
    with rlio.ParquetWriter(tmp_path, pictures={"obs/camera": "png"}) as writer:
        writer.write(batch_of(frames_of(ROWS + 1)))
    assert sum(encoded) == ROWS + 1  # `new_obs` has the `obs` of the next row.


@pytest.mark.parametrize(
    ("pictures", "error"),
    [
        ({"obs/camra": "png"}, MissingColumn),
        ({"obs/t": "png"}, SchemaError),
        ({"obs/camera": "jpeg"}, OptionError),
        ({"obs/camera": None}, OptionError),
        (["obs/camera"], OptionError),
        ("png", OptionError),
    ],
)
def test_pictures_that_are_none_or_are_spelled_wrong_are_refused(
    tmp_path: Path, pictures: Any, error: type[Exception]
) -> None:
    with pytest.raises(error) as raised, rlio.ParquetWriter(tmp_path, pictures=pictures) as writer:
        writer.write(batch_of(frames_of(9)))
    assert "obs/camera" in str(raised.value) or "uint8" in str(raised.value)


def test_a_writer_of_pictures_needs_pillow_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"rlio\[images\]"):
        rlio.ParquetWriter(tmp_path, pictures={"obs": "png"})


def test_without_pillow_pictures_are_not_verified_and_no_shard_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rlio.ParquetWriter(tmp_path, pictures={"obs/camera": "png"}) as writer:
        writer.write(batch_of(frames_of(9)))
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setitem(sys.modules, "PIL", None)
    for check in (verify, repair):
        with pytest.raises(MissingExtra, match=r"rlio\[images\]"):
            check(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_frames_of_another_shape_are_refused_before_they_are_stored(tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path, pictures={"obs/camera": "png"}) as writer:
        writer.write(batch_of(frames_of(9)))
        with pytest.raises(SchemaError, match="column obs/camera"):
            writer.write(batch_of(frames_of(9, (9, 7, 3))))
    assert len(all_rows(tmp_path)) == 8


@pytest.mark.parametrize("kind", [rlio.ParquetWriter, *further(rlio.JsonWriter)])
def test_a_final_picture_that_is_missing_reads_as_zeros(tmp_path: Path, kind: Any) -> None:
    frames = frames_of(ROWS + 1)
    with kind(tmp_path, pictures={"obs/camera": "png"}) as writer:
        writer.write(batch_of(frames, valid=False))
    rows = all_rows(tmp_path)
    expected = np.where(rows["new_obs_valid"][:, None, None, None], frames[1:], 0)
    assert np.array_equal(rows["new_obs"]["camera"], expected)
    assert not rows["new_obs_valid"].all()


def test_agents_of_which_one_has_a_camera_keep_their_pictures(tmp_path: Path) -> None:
    frames = frames_of(9)
    with_camera, without = batch_of(frames, valid=False), batch_of(np.zeros((9, 2), np.float32))
    with rlio.ParquetWriter(tmp_path, pictures={"obs/camera": "png"}) as writer:
        for rows in (with_camera, without):
            rows["eps_id"] = np.zeros(8, np.int64)
        with pytest.raises(SchemaError, match="expected pictures"):
            writer.write(rlio.MultiAgentBatch({"a": with_camera, "b": without}, 8))
        del without["obs"]["camera"], without["new_obs"]["camera"]
        writer.write(rlio.MultiAgentBatch({"a": with_camera, "b": without}, 8))
    found = all_rows(tmp_path)
    assert np.array_equal(found["a"]["obs"]["camera"], frames[:-1])
    assert np.array_equal(found["a"]["new_obs"]["camera"][:-1], frames[1:-1])
    assert not found["a"]["new_obs"]["camera"][-1].any()


@pytest.mark.parametrize("cache", ["memory", "none", *further("disk")])
def test_stores_and_draws_give_decoded_pictures(tmp_path: Path, cache: Any) -> None:
    frames = frames_of(ROWS + 1)
    with rlio.ParquetWriter(tmp_path, pictures={"obs/camera": "png"}) as writer:
        writer.write(batch_of(frames))
    for row in all_rows(tmp_path, cache=cache, shuffle=True, seed=0, batch_size=5).rows():
        assert np.array_equal(row["obs"]["camera"], frames[row["actions"]])
        assert np.array_equal(row["new_obs"]["camera"], frames[row["actions"] + 1])
    draws = all_rows(tmp_path, cache="memory", draw=rlio.NStep(3, gamma=0.9))
    ends = np.minimum(draws["actions"] + 3, draws["actions"] // 8 * 8 + 8)
    assert np.array_equal(draws["new_obs"]["camera"], frames[ends])


def test_a_data_set_of_pictures_shows_frames_and_exports_values(tmp_path: Path) -> None:
    frames = frames_of(ROWS + 1, (12, 10, 3))
    with rlio.ParquetWriter(tmp_path, pictures={"obs/camera": "png"}) as writer:
        writer.write(batch_of(frames))
    data = rlio.open_dataset(tmp_path)
    assert np.array_equal(data.episode(1).observations["camera"], frames[8:17])
    assert np.array_equal(data[9:12]["obs"]["camera"], frames[9:12])
    assert data.to_arrow()["obs/camera"].to_pylist()[3] == frames[3].tolist()
    (column,) = [column for column in data.info().columns if column.name == "obs/camera"]
    assert (column.dtype, tuple(column.shape)) == ("uint8", (12, 10, 3))


@pytest.mark.parametrize("kind", [rlio.ParquetWriter, *further(rlio.JsonWriter)])
def test_rows_by_number_decode_their_own_pictures_alone(
    tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = frames_of(ROWS + 1)
    with kind(tmp_path, pictures={"obs/camera": "png"}) as writer:
        writer.write(batch_of(frames))
    decoded, real = list[int](), picture_codecs._opened

    def counted(*args: Any) -> Any:
        decoded.append(args[0])
        return real(*args)

    monkeypatch.setattr(picture_codecs, "_opened", counted)
    data = rlio.open_dataset(tmp_path)
    rows = data.take([20, 3])
    assert np.array_equal(rows["new_obs"]["camera"], frames[[21, 4]])
    assert len(decoded) == 4
    decoded.clear()
    assert np.array_equal(data.episode(1).observations["camera"], frames[8:17])
    assert len(decoded) == (9 if kind is rlio.ParquetWriter else 16)


def test_a_store_in_memory_refuses_encoded_pictures_and_says_what_to_append() -> None:
    batch = batch_of(encode_column(frames_of(9)))
    store = rlio.ReplayStore(capacity=20)
    with pytest.raises(SchemaError, match="decode_batch"):
        store.append(batch)
    store.append(picture_codecs.decode_batch(batch))
    with pytest.raises(SchemaError, match="encoded pictures"):
        store.append(batch)
    store.close()


def test_a_column_of_an_unknown_kind_is_refused_with_what_to_do() -> None:
    with pytest.raises(CorruptData, match=r"unknown kind 'film'.*upgrade rlio"):
        ColumnSpec.from_json({"dtype": "|u1", "shape": [9, 8], "kind": "film"}, column="x")


def test_encoded_and_raw_frames_are_one_column_of_a_root(tmp_path: Path) -> None:
    frames = frames_of(9)
    for name, pictures in (("a", {"obs/camera": "png"}), ("b", None)):
        with rlio.ParquetWriter(tmp_path, writer_id=name, pictures=pictures) as writer:  # type: ignore[arg-type]
            writer.write(batch_of(frames))
    rows = all_rows(tmp_path)
    assert np.array_equal(rows["obs"]["camera"], np.concatenate([frames[:-1], frames[:-1]]))


def test_files_that_are_written_are_stored_as_they_are(tmp_path: Path) -> None:
    files = jpegs_of(ROWS + 1)
    column = encoded_column(files)
    with rlio.ParquetWriter(tmp_path) as writer:
        writer.write(batch_of(column))
    assert stored_files(tmp_path) == files[:-1]
    (schema,) = rlio.open_dataset(tmp_path).schemas.values()
    assert schema.columns["obs/camera"].to_json()["picture"] == {"codec": "jpeg", "lossless": False}
    assert np.array_equal(all_rows(tmp_path)["obs"]["camera"], decode_column(column[:-1]))


def test_a_row_without_a_picture_is_refused_unless_it_is_a_missing_new_obs(tmp_path: Path) -> None:
    column = encode_column(frames_of(9))
    column[3] = column[3].none()
    with pytest.raises(SchemaError, match="row 3: found no picture"), rlio.ParquetWriter(tmp_path) as writer:
        writer.write(batch_of(column))


@pytest.mark.parametrize("kind", [rlio.ParquetWriter, *further(rlio.JsonWriter)])
def test_a_row_whose_picture_was_lost_is_damaged(
    tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    column = encode_column(frames_of(9))
    column[3] = column[3].none()
    monkeypatch.setattr("rlio.schemas.policy_schema._Rows.check_pictures", lambda *_: None)
    with kind(tmp_path) as writer:
        writer.write(batch_of(column))
    with pytest.raises(CorruptData, match="a row has no picture"):
        all_rows(tmp_path)


def test_pictures_of_another_codec_or_objects_are_refused(tmp_path: Path) -> None:
    pngs, jpegs = encode_column(frames_of(9)), encoded_column(jpegs_of(9))
    with rlio.ParquetWriter(tmp_path) as writer:
        writer.write(batch_of(jpegs))
        for other in (pngs, object_column([b""] * 9), frames_of(9)):
            with pytest.raises(SchemaError, match="but the column has"):
                writer.write(batch_of(other))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [rlio.ParquetWriter, rlio.JsonWriter])
def test_a_damaged_picture_is_lost_with_its_group_alone(tmp_path: Path, kind: Any) -> None:
    """Its bytes are as they were written, so no CRC tells."""
    for name, cut in (("a", 0), ("b", 40)):
        column = encode_column(frames_of(9))
        column[3] = EncodedPicture(column[3].data[: len(column[3].data) - cut], "png", SHAPE)
        with kind(tmp_path, writer_id=name) as writer:
            writer.write(batch_of(column))
    with pytest.raises(CorruptData, match="is not a PNG") as raised:
        all_rows(tmp_path)
    assert "/data/b/" in str(raised.value.uri)
    assert raised.value.record is not None
    with rlio.DatasetReader(tmp_path, epochs=1, on_error="skip") as reader:
        assert sum(map(len, reader)) == 8
        assert reader.skipped == 8
    report = rlio.verify(tmp_path)
    assert [finding.code for finding in report.findings if finding.severity == "error"] == [
        "group-malformed" if kind is rlio.ParquetWriter else "line-malformed"
    ]
    assert len(all_rows(tmp_path, columns=["actions"])) == 16  # Nothing else is lost.


def test_a_picture_that_is_larger_than_its_column_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (3000, 3000)).save(stream, format="PNG")
    bomb = object_column([EncodedPicture(stream.getvalue(), "png", SHAPE)] * 9)
    with rlio.ParquetWriter(tmp_path) as writer:
        writer.write(batch_of(bomb))
    with pytest.raises(CorruptData, match=r"\(3000, 3000, 3\), expected \(9, 8, 3\)"):
        all_rows(tmp_path)
    with pytest.raises(UnsafeData, match="group_bytes"):
        encoded_column([stream.getvalue()] * 9, spend=Allowance(Limits(group_bytes=1 << 20)).spend)


@pytest.mark.parametrize(
    "changed",
    [
        {"picture": {"codec": "gif"}},
        {"picture": {}},
        {"picture": None},
        {"dtype": "<f4"},
        {"shape": [9]},
        {"shape": [9, 8, 2]},
        {"shape": [0, 8]},
        {"shape": [1 << 20, 1 << 20]},
        {"stack": {"axis": 2, "depth": 3}},
        {"kind": "bytes"},
    ],
)
def test_descriptions_of_pictures_that_are_illegal_are_refused(changed: dict[str, Any]) -> None:
    """Rule 2.11 of docs/format.md."""
    legal = ColumnSpec.of(frames_of(2), codec="png").to_json()
    assert ColumnSpec.from_json(legal, column="x") == ColumnSpec.of(encode_column(frames_of(2)))
    with pytest.raises(CorruptData):
        ColumnSpec.from_json({**legal, **changed}, column="x")


@pytest.mark.further
def test_a_group_has_few_bytes_of_files_although_their_pictures_are_small() -> None:
    """Rows are counted by the size of their values, and files may be larger."""
    noise = os.urandom(8 << 20)
    files = object_column(EncodedPicture(noise, "jpeg", SHAPE) for _ in range(12))
    with rlio.ParquetWriter("memory://large-files", spool=None) as writer:
        writer.write(rlio.SampleBatch(obs=files, actions=np.arange(12)))
    data = rlio.open_dataset("memory://large-files")
    assert max(max(data.open_shard(segment).rows) for segment in data.segments) <= 8


@pytest.mark.parametrize(("height", "width", "rows"), [(480, 640, 32), (84, 84, 1024), (1080, 1920, 4)])
def test_groups_have_enough_rows_to_store_few_pictures_twice(height: int, width: int, rows: int) -> None:
    frames = np.zeros((2, height, width, 3), np.uint8)
    schema = Schema.of(rlio.SampleBatch(obs=frames, new_obs=frames), pictures={"obs": "png"})
    assert schema.group_rows == rows


def _write_and_die(root: Path) -> None:
    """Ends the process with rows in the log."""
    child = os.fork()
    if not child:
        writer = rlio.ParquetWriter(root, pictures={"obs/camera": "png"}, sync="always")
        writer.write(batch_of(frames_of(ROWS + 1), valid=False))
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_pictures_in_the_log_of_a_dead_writer_are_recovered(tmp_path: Path) -> None:
    _write_and_die(tmp_path)
    assert not list(tmp_path.glob("data/*/*.parquet"))
    recover(tmp_path)
    rows = all_rows(tmp_path)
    assert np.array_equal(rows["obs"]["camera"], frames_of(ROWS + 1)[:-1])
    assert not rows["new_obs"]["camera"][~rows["new_obs_valid"]].any()


def test_compaction_and_merging_keep_the_files(tmp_path: Path) -> None:
    files = jpegs_of(ROWS + 1)
    batch = batch_of(encoded_column(files))
    with rlio.ParquetWriter(tmp_path / "a") as writer:
        for start in range(0, ROWS, 8):
            writer.write(batch[start : start + 8])
            writer.flush()
    expected = all_rows(tmp_path / "a")
    rlio.maintenance.compact(tmp_path / "a", into=tmp_path / "b")
    rlio.maintenance.compact(tmp_path / "a")
    assert stored_files(tmp_path / "b") == files[:-1]
    assert rlio.open_dataset(tmp_path / "a").files() != []
    assert all_rows(tmp_path / "a").equals(expected)
    assert rlio.verify(tmp_path / "a").ok


def test_a_schema_without_rows_of_pictures_is_that_of_frames() -> None:
    frames = frames_of(3)
    schema = Schema.of(rlio.SampleBatch(obs=frames), pictures={"obs": "png"})
    again = Schema.from_text(schema.text)
    assert again.columns["obs"].numpy == np.uint8
    assert again.columns["obs"].shape == SHAPE
    assert again.row_bytes == frames[0].nbytes


@pytest.mark.parametrize("encoded", [False, True])
def test_a_first_row_whose_final_picture_is_missing_decides_the_kind(tmp_path: Path, encoded: bool) -> None:
    frames = frames_of(9)
    column = encode_column(frames) if encoded else frames
    pictures: Any = None if encoded else {"obs/camera": "png"}
    with rlio.ParquetWriter(tmp_path, pictures=pictures) as writer:
        writer.write(batch_of(column[:2], valid=False, episode=1))
        later = batch_of(column, valid=False)
        later["eps_id"] = later["eps_id"] + 1
        writer.write(later)
    rows = all_rows(tmp_path)
    assert np.array_equal(rows["obs"]["camera"], frames[[0, *range(8)]])
    assert not rows["new_obs"]["camera"][[0, 8]].any()
    assert stored_files(tmp_path, "_new_obs/camera") == []
