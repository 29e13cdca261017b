"""Conversions of pictures: PNG and JPEG files stay so, byte for byte (docs/design/pictures.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from further import further
from test_picture_columns import all_rows, batch_of, frames_of, jpegs_of, stored_files
from test_rlds import an_episode, example
from test_rlds import write as write_rlds

import rlio
from rlio.batch import picture_codecs
from rlio.batch.encoded_picture import EncodedPicture
from rlio.batch.picture_codecs import encode_column, encoded_column
from rlio.errors import CorruptData, MissingColumn, OptionError
from rlio.formats.lerobot import sink as lerobot_sink

LEROBOT = Path(__file__).with_name("golden") / "formats/lerobot/v3.0-image"


def lerobot_files(root: Path, name: str) -> list[bytes]:
    return [
        row["bytes"]
        for file in sorted(root.glob("data/**/*.parquet"))
        for row in pq.read_table(file, columns=[name])[name].to_pylist()
    ]


def own_data(root: Path, pictures: Any, *, valid: Any = None) -> Path:
    with rlio.ParquetWriter(root) as writer:
        writer.write(batch_of(pictures, valid=valid))
    return root


def rlds_data(root: Path, files: list[bytes]) -> Path:
    image = {"observation": {"image": {"dtype": "uint8", "shape": {"dimensions": ["-1", "-1", "3"]}}}}
    return write_rlds(root, example(an_episode(len(files), observation=files)), features=image)


@pytest.mark.further
def test_lerobots_pictures_are_the_same_files_in_rlio_and_back(tmp_path: Path) -> None:
    name = "observation.images.top"
    assert rlio.convert(LEROBOT, tmp_path / "a", prove=True).proved
    assert rlio.convert(tmp_path / "a", tmp_path / "b", to="lerobot", prove=True).proved
    files = lerobot_files(LEROBOT, name)
    assert stored_files(tmp_path / "a", "obs/images.top") == files
    assert lerobot_files(tmp_path / "b", name) == files
    with rlio.read(LEROBOT, epochs=1) as reader:
        assert all_rows(tmp_path / "a")["obs"]["images.top"].tolist() == (
            rlio.concat_samples(list(reader))["obs"]["images.top"].tolist()
        )


@pytest.mark.parametrize("codec", ["jpeg", "png"])
def test_rldss_pictures_are_the_same_files_in_rlio(tmp_path: Path, codec: str) -> None:
    column = encoded_column(jpegs_of(9)) if codec == "jpeg" else encode_column(frames_of(9))
    files = [picture.data for picture in column]
    rlds_data(tmp_path / "a", files)
    assert rlio.convert(tmp_path / "a", tmp_path / "b", prove=True).proved
    assert [*stored_files(tmp_path / "b", "obs"), *stored_files(tmp_path / "b", "_new_obs")] == files
    (schema,) = rlio.open_dataset(tmp_path / "b").schemas.values()
    assert schema.columns["obs"].codec == codec


def test_episodes_of_several_codecs_keep_their_files(tmp_path: Path) -> None:
    pngs = [picture.data for picture in encode_column(frames_of(5))]
    jpegs = jpegs_of(5)
    image = {"observation": {"image": {"dtype": "uint8", "shape": {"dimensions": ["-1", "-1", "3"]}}}}
    records = [example(an_episode(5, observation=files)) for files in (pngs, jpegs, pngs)]
    write_rlds(tmp_path / "a", *records, features=image)
    assert rlio.convert(tmp_path / "a", tmp_path / "b", prove=True).proved
    stored = [*stored_files(tmp_path / "b", "obs"), *stored_files(tmp_path / "b", "_new_obs")]
    assert sorted(stored) == sorted([*pngs, *jpegs, *pngs])
    with rlio.read(tmp_path / "a", epochs=1) as reader:
        assert rlio.concat_samples(list(reader))["obs"].tolist() == all_rows(tmp_path / "b")["obs"].tolist()


@pytest.mark.parametrize("valid", [None, *further(False)])
def test_jpeg_files_are_the_same_in_lerobot_also_final_ones(tmp_path: Path, valid: Any) -> None:
    files = jpegs_of(17)
    own_data(tmp_path / "a", encoded_column(files), valid=valid)
    for source, target, to in (("a", "b", None), ("b", "c", "lerobot"), ("c", "d", None)):
        assert rlio.convert(tmp_path / source, tmp_path / target, to=to, prove=True).proved
    assert lerobot_files(tmp_path / "c", "observation.camera") == files[:-1]
    if valid is None:
        final = lerobot_files(tmp_path / "c", "next.observation.final.camera")
        assert (final[7], final[15]) == (files[8], files[16])
    assert stored_files(tmp_path / "d") == files[:-1]


@pytest.mark.parametrize("to", ["npz", *further("minari", "parquet", "rllib-episodes", "robomimic")])
def test_formats_without_pictures_get_their_frames(tmp_path: Path, to: str) -> None:
    own_data(tmp_path / "a", encode_column(frames_of(17)))
    assert rlio.convert(tmp_path / "a", tmp_path / "b", to=to, prove=True).proved
    with rlio.read(tmp_path / "b", epochs=1) as reader:
        rows = rlio.concat_samples(list(reader))
    assert np.array_equal(rows["obs"]["camera"], frames_of(17)[:-1])


@pytest.mark.parametrize("data", [b"", b"\x89PNG damaged"])
def test_a_conversion_and_its_proof_find_damaged_pictures(tmp_path: Path, data: bytes) -> None:
    column = encode_column(frames_of(9))
    column[2] = EncodedPicture(column[2].data[:60] + data, "png", column[2].shape)
    own_data(tmp_path / "a", column)
    with pytest.raises(CorruptData, match="is not a PNG"):
        rlio.convert(tmp_path / "a", tmp_path / "b", prove=True)
    with pytest.raises(CorruptData, match="is not a PNG"):
        rlio.convert(tmp_path / "a", tmp_path / "c", to="lerobot")


@pytest.mark.parametrize("codec", ["png", *further("jpeg")])
@pytest.mark.parametrize("cut", [False, True])
def test_a_damaged_file_of_the_source_is_not_copied(tmp_path: Path, codec: str, cut: bool) -> None:
    """Files are copied and not decoded, so nothing but their own checksums tells."""
    files = [picture.data for picture in encode_column(frames_of(5))] if codec == "png" else jpegs_of(5)
    damaged = files[2][:-60] if cut or codec == "jpeg" else files[2][:70] + b"!!!" + files[2][73:]
    image = {"observation": {"image": {"dtype": "uint8", "shape": {"dimensions": ["-1", "-1", "3"]}}}}
    episodes = (files, [*files[:2], damaged, *files[3:]], files)
    records = [example(an_episode(5, observation=each)) for each in episodes]
    write_rlds(tmp_path / "a", *records, features=image)
    with pytest.raises(CorruptData, match=f"picture 2 is not a {codec.upper()}") as raised:
        rlio.convert(tmp_path / "a", tmp_path / "b")
    assert raised.value.record == 1
    report = rlio.convert(tmp_path / "a", tmp_path / "c", read_options={"on_error": "skip"})
    assert report.episodes == 2


def test_a_proof_finds_files_that_were_encoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_data(tmp_path / "a", encode_column(frames_of(9)))

    def again(picture: EncodedPicture) -> bytes:
        (data,) = picture_codecs.encode_png(
            picture_codecs.decode_column(np.array([picture], object)), level=9
        )
        return data

    monkeypatch.setattr(lerobot_sink, "file_of", again)
    with pytest.raises(CorruptData, match=r"the column differs.*column obs"):
        rlio.convert(tmp_path / "a", tmp_path / "b", to="lerobot", prove=True)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("chosen", "keeps"),
    [("actions != 3", True), ("episode_return > 0", False)],
)
def test_a_filter_of_other_columns_keeps_pictures_encoded(tmp_path: Path, chosen: str, keeps: bool) -> None:
    """A filter of whole episodes reads a store, which holds frames."""
    own_data(tmp_path / "a", encode_column(frames_of(9)))
    rlio.convert(tmp_path / "a", tmp_path / "b", read_options={"filter": chosen}, prove=True)
    rows = all_rows(tmp_path / "b")
    assert np.array_equal(rows["obs"]["camera"], frames_of(9)[rows["actions"]])
    (schema,) = rlio.open_dataset(tmp_path / "b").schemas.values()
    assert schema.has_pictures is keeps


def test_a_conversion_stores_frames_or_png_if_it_is_asked_to(tmp_path: Path) -> None:
    own_data(tmp_path / "a", encoded_column(jpegs_of(9)))
    rlio.convert(tmp_path / "a", tmp_path / "b", options={"pictures": "frames"}, prove=True)
    rlio.convert(tmp_path / "b", tmp_path / "c", options={"pictures": {"obs/camera": "png"}}, prove=True)
    kinds = [
        next(iter(rlio.open_dataset(tmp_path / name).schemas.values())).columns["obs/camera"].codec
        for name in "abc"
    ]
    assert kinds == ["jpeg", None, "png"]
    assert all_rows(tmp_path / "c").equals(all_rows(tmp_path / "a"))
    for pictures, error in (("all", OptionError), ({"obs": "png"}, MissingColumn), (3, OptionError)):
        with pytest.raises(error, match="pictures"):
            rlio.convert(tmp_path / "b", tmp_path / "d", options={"pictures": pictures})


@pytest.mark.further
def test_frames_of_a_video_are_stored_as_png_if_that_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("av")
    video = LEROBOT.with_name("v3.0-video")
    report = rlio.convert(video, tmp_path / "a", prove=True)
    (note,) = [finding.text for finding in report.findings if "video" in finding.text]
    assert "options={'pictures': {'obs/images.top': 'png'}}" in note
    png = rlio.convert(video, tmp_path / "b", options={"pictures": {"obs/images.top": "png"}}, prove=True)
    assert png.proved
    assert all_rows(tmp_path / "a").equals(all_rows(tmp_path / "b"))
