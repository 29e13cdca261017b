"""RLDS data sets. TensorFlow Datasets wrote the fixtures: tests/golden/formats/rlds/make.py.

Step t of episode e holds 100 e + t, and its action and reward 100 e + t + 0.5.
"""

from __future__ import annotations

import json
import pickle
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from further import first
from hypothesis import given, settings
from hypothesis import strategies as st

import rlio
from rlio.batch.pictures import encode_png
from rlio.errors import (
    CorruptData,
    DataNotFound,
    MissingColumn,
    MissingExtra,
    OptionError,
    SchemaError,
    UnknownLayout,
    UnsafeData,
)
from rlio.formats import rlds
from rlio.formats.files.tf_records import Example, RecordFile
from rlio.formats.format import recognise
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.readers.episode_reader import EpisodeReader

crc32c = pytest.importorskip(
    "google_crc32c", reason="google-crc32c is not installed: pip install 'rlio[rlds]'"
)

GOLDEN = Path(__file__).with_name("golden") / "formats/rlds"
COUNTS, PARTS, LISTS = GOLDEN / "counts/1.0.0", GOLDEN / "parts/0.1.0", GOLDEN / "lists/1.0.0"
#: Rows of each episode of `COUNTS`, one less than its steps.
ROWS = (3, 2, 4, 1, 2)


def all_rows(root: Any, **options: Any) -> Any:
    with EpisodeReader(root, epochs=1, **options) as reader:
        return rlio.concat_samples(list(reader))


# ---- what TensorFlow Datasets wrote ----


def test_every_value_is_in_the_row_of_its_step_and_the_last_step_is_the_final_observation() -> None:
    with rlio.read(COUNTS, epochs=1) as reader:
        rows: Any = rlio.concat_samples(list(reader))
        assert reader.format.name == "rlds"
        assert reader.source.origin.extra == {"name": "counts", "version": "1.0.0"}
    episode = rows["episode_metadata/number"]
    assert sorted(episode.tolist()) == np.repeat(range(5), ROWS).tolist()
    assert rows["episode_metadata/file_path"].tolist() == [f"/data/{number}" for number in episode]
    value = 100 * episode + rows["t"]
    for column, at in (("obs", value), ("new_obs", value + 1)):
        assert rows[column]["state"].tolist() == np.stack([at, -at], 1).tolist()
        assert rows[column]["far"].tolist() == (-(2**40) - at).tolist()
        assert (rows[column]["grid"] == at.astype(np.uint8)[:, None, None]).all()
        assert rows[column]["grid"].shape == (12, 2, 3)
        assert (rows[column]["camera"] == at.astype(np.uint8)[:, None, None, None]).all()
        assert rows[column]["camera"].shape == (12, 16, 12, 3)
        wrist = rows[column]["wrist"].astype(int) - at.astype(np.uint8)[:, None, None, None]
        assert np.abs(wrist).max() <= 2  # JPEG.
    assert rows["actions"].tolist() == np.stack([value + 0.5, np.full(12, 1 / 3)], 1).tolist()
    assert rows["rewards"].tolist() == (value + 0.5).tolist()
    assert rows["discount"].tolist() == [1.0] * 12  # The zeros are those of the last steps.
    assert rows["language_instruction"].tolist() == [f"count {number}" for number in value]
    last = rows["t"] == np.array(ROWS)[episode] - 1
    assert (rows["terminateds"] == (last & (episode != 1))).all()
    assert (rows["truncateds"] == (last & (episode == 1))).all()
    assert "new_obs_valid" not in rows


def test_an_episode_that_has_not_ended_keeps_its_last_action_and_a_lone_observation_gives_no_row() -> None:
    with EpisodeReader(PARTS, epochs=1) as reader:
        rows: Any = rlio.concat_samples(list(reader))
        assert len(reader.source.notes) == 2  # type: ignore[attr-defined]
    order = np.argsort(rows["actions"], kind="stable")
    assert rows["actions"][order].tolist() == [0, 1, 200, 201]
    assert rows["obs"][order, 0].tolist() == [0, 1, 200, 201]
    assert rows["picture"].shape == (4, 2, 3, 3)
    assert (rows["picture"][order] == np.array([0, 1, 200, 201])[:, None, None, None]).all()
    assert rows["new_obs"][order, 0].tolist() == [1, 2, 201, 0]
    assert rows["new_obs_valid"][order].tolist() == [True, True, True, False]
    assert not rows["terminateds"].any()
    assert rows["truncateds"][order].tolist() == [False, True, False, False]


def test_a_split_is_read_alone_and_others_are_named() -> None:
    rows = all_rows(COUNTS, format_options={"split": "test"})
    assert sorted(set(rows["episode_metadata/number"].tolist())) == [3, 4]
    with pytest.raises(OptionError, match="train"):
        all_rows(COUNTS, format_options={"split": "val"})


def test_actions_of_last_steps_are_read_if_they_count() -> None:
    rows = all_rows(COUNTS, format_options={"last_step": "action", "leave_out": ["observation/camera"]})
    assert len(rows) == sum(ROWS) + 5
    last = rows["t"] == np.array(ROWS)[rows["episode_metadata/number"]]
    assert (rows["new_obs_valid"] == ~last).all()
    assert ((rows["terminateds"] | rows["truncateds"]) == last).all()
    assert not rows["rewards"][last].any()
    assert "camera" not in rows["obs"]
    with pytest.raises(OptionError):
        all_rows(COUNTS, format_options={"last_step": "reward"})
    with pytest.raises(OptionError, match="camcorder"):
        all_rows(COUNTS, format_options={"leave_out": ["observation/camcorder"]})


def test_chosen_columns_alone_are_decoded_and_the_rest_is_read_without_pillow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert set(all_rows(COUNTS, columns=["rewards", "is_first"])) == {"rewards", "is_first"}
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"leave_out.*observation/camera"):
        all_rows(COUNTS)
    pictures = ["observation/camera", "observation/wrist"]
    rows = all_rows(COUNTS, format_options={"leave_out": pictures})
    assert set(rows["obs"]) == {"state", "grid", "far"}
    assert set(all_rows(COUNTS, format_options={"leave_out": ["observation"]})) >= {"actions", "rewards"}


def test_without_the_checksum_library_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(MissingExtra, match=r"rlio\[rlds\]"):
        all_rows(PARTS)


def test_a_data_set_is_found_above_and_at_its_root_and_converted(tmp_path: Path) -> None:
    for place in (GOLDEN / "counts", COUNTS):
        found = recognise(place)
        assert found is not None
        assert (found.format.name, found.format.is_read) == ("rlds", True)
        assert len(all_rows(place)) == 12
    assert len(rlio.open_dataset(COUNTS)) == 12
    with pytest.raises(UnknownLayout, match=r"found a part of a data set of RLDS.*pass its folder"):
        rlio.read(next(COUNTS.glob("*.tfrecord*")), epochs=1)
    assert len(all_rows(next(PARTS.glob("*.tfrecord*")))) == len(all_rows(PARTS))  # The only file.
    report = rlio.convert(COUNTS, tmp_path / "a", prove=True)
    assert (report.episodes, report.rows, report.proved) == (5, 12, True)
    assert [finding.kind for finding in report.findings] == ["note"]


# ---- files of our own ----

_FLAG = {"tensor": {"dtype": "bool", "encoding": "none", "shape": {}}}
_REAL = {"tensor": {"dtype": "float32", "encoding": "none", "shape": {}}}
FEATURES: dict[str, Any] = {
    "observation": {"tensor": {"dtype": "float32", "encoding": "none", "shape": {"dimensions": ["2"]}}},
    "action": {"tensor": {"dtype": "uint8", "encoding": "none", "shape": {}}},
    "reward": _REAL,
    "is_first": _FLAG,
    "is_last": _FLAG,
    "is_terminal": _FLAG,
}


def varint(value: int) -> bytes:
    value %= 1 << 64
    found = b""
    while value > 0x7F:
        found, value = found + bytes([value & 0x7F | 0x80]), value >> 7
    return found + bytes([value])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def a_list(values: Any) -> bytes:
    """A Feature: bytes of a list of bytes, floats or whole numbers."""
    if isinstance(values, list):
        return field(1, b"".join(field(1, value) for value in values))
    if values.dtype.kind == "f":
        return field(2, field(1, values.astype("<f4").tobytes()))
    return field(3, field(1, b"".join(map(varint, values.ravel().tolist()))))


def example(features: dict[str, Any]) -> bytes:
    entries = (field(1, name.encode()) + field(2, a_list(values)) for name, values in features.items())
    return field(1, b"".join(field(1, entry) for entry in entries))


def masked(data: bytes) -> bytes:
    crc = crc32c.value(data)
    return int.to_bytes(((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF, 4, "little")


def framed(record: bytes) -> bytes:
    size = len(record).to_bytes(8, "little")
    return size + masked(size) + record + masked(record)


def an_episode(steps: int = 3, **changed: Any) -> dict[str, Any]:
    """Features of an episode of ``steps`` steps, the last of which is terminal."""
    last = np.arange(steps) == steps - 1
    found: dict[str, Any] = {
        "observation": np.arange(2.0 * steps),
        "action": np.arange(steps) % 200,
        "reward": np.where(last, 0, np.arange(steps) + 0.5),
        "is_first": np.arange(steps) == 0,
        "is_last": last,
        "is_terminal": last,
        **changed,
    }
    return {f"steps/{name}": values for name, values in found.items() if values is not None}


def write(root: Path, *records: bytes, features: Any = None, info: Any = None, top: Any = None) -> Path:
    """A data set of one file."""
    root.mkdir(parents=True, exist_ok=True)
    steps = {"sequence": {"feature": {"featuresDict": {"features": FEATURES | (features or {})}}}}
    described = {
        "pythonClassName": "os.system",
        "featuresDict": {"features": {"steps": steps, **(top or {})}},
    }
    about = {"name": "x", "fileFormat": "tfrecord", "moduleName": "os", "version": "1.0.0"}
    splits = [{"name": "train", "shardLengths": [str(len(records))]}]
    (root / "features.json").write_text(json.dumps(described))
    (root / "dataset_info.json").write_text(json.dumps({**about, "splits": splits, **(info or {})}))
    (root / "x-train.tfrecord-00000-of-00001").write_bytes(b"".join(map(framed, records)))
    return root


def test_what_the_tests_write_is_what_is_read(tmp_path: Path) -> None:
    rows = all_rows(write(tmp_path, example(an_episode(3)), example(an_episode(300))))
    assert len(rows) == 2 + 299
    assert rows["actions"].tolist() == [0, 1, *(np.arange(299) % 200)]
    assert rows["actions"].dtype == np.uint8
    assert rows["new_obs"][-1].tolist() == [598.0, 599.0]


def parts_of(source: Any, number: int, size: int) -> rlio.SampleBatch:
    steps = source.lengths[number]
    parts = [source.load_part(number, at, min(at + size, steps), None) for at in range(0, steps, size)]
    return rlio.concat_samples(parts)


@pytest.mark.few(2)
@pytest.mark.parametrize("root", [COUNTS, PARTS])
@pytest.mark.parametrize("last_step", ["observation", "action"])
def test_parts_of_an_episode_are_the_rows_of_the_whole(root: Path, last_step: str) -> None:
    """A long episode was read as a whole."""
    with rlio.read(root, epochs=1, format_options={"last_step": last_step}) as reader:
        source: Any = reader.source  # type: ignore[attr-defined]  # An EpisodeReader.
        assert source.reads_parts
        for number in range(len(source.lengths)):
            whole = source.load(number, None)
            for size in (1, 2):
                assert parts_of(source, number, size).equals(whole)


def test_parts_of_whole_numbers_and_of_lists_in_pieces_are_cut_where_a_step_ends(tmp_path: Path) -> None:
    numbers = np.array([0, 127, 128, -1, 2**40, 300, 5, -(2**63)] * 3)  # From one to ten bytes.
    features = {
        "action": {"tensor": {"dtype": "int64", "encoding": "none", "shape": {"dimensions": [2]}}},
        "note": {"text": {}},
        "split": {"tensor": {"dtype": "float32", "encoding": "none", "shape": {}}},
    }
    texts = [str(n).encode() * (n % 5) for n in range(12)]
    split = np.arange(12, dtype=np.float32)
    in_two = field(2, field(1, split[:5].tobytes()) + field(1, split[5:].tobytes()))
    record = example(an_episode(12, action=numbers, note=texts))
    record += field(1, field(1, field(1, b"steps/split") + field(2, in_two)))
    root = write(tmp_path, record, features=features)
    with rlio.read(root, epochs=1) as reader:
        source: Any = reader.source  # type: ignore[attr-defined]  # An EpisodeReader.
        whole = source.load(0, None)
        assert whole["actions"].tolist() == numbers.reshape(12, 2)[:-1].tolist()
        assert whole["split"].tolist() == list(range(11))
        for size in (1, 4, 10):
            assert parts_of(source, 0, size).equals(whole)


def test_a_part_of_a_long_episode_reads_and_decodes_its_own_steps_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pictures of a long episode were decoded at once."""
    steps, decoded, read = 40, list[int](), list[int]()
    shape = {"dimensions": ["-1", "-1", "3"]}
    features = {"observation": {"image": {"dtype": "uint8", "shape": shape}}}
    pictures = encode_png(
        np.arange(steps, dtype=np.uint8)[:, None, None, None].repeat(20, 1).repeat(10, 2).repeat(3, 3)
    )
    noise = np.random.default_rng(0).standard_normal(steps * 100)
    features["noise"] = {"tensor": {"dtype": "float32", "encoding": "none", "shape": {"dimensions": [100]}}}
    root = write(tmp_path, example(an_episode(steps, observation=pictures, noise=noise)), features=features)
    expected = all_rows(root)
    real, real_read = rlds.encoded_column, RecordFile._read

    def counted(pictures: Any, *args: Any, **options: Any) -> Any:
        decoded.append(len(pictures))
        return real(pictures, *args, **options)

    def counted_read(self: Any, start: int, size: int) -> bytes:
        read.append(size)
        return real_read(self, start, size)

    monkeypatch.setattr(rlds, "encoded_column", counted)
    monkeypatch.setattr(RecordFile, "_read", counted_read)
    monkeypatch.setattr("rlio.formats.files.tf_records._BLOCK", 512)
    # The size of the pictures is not described: that of the first one is measured.
    monkeypatch.setattr("rlio.source.episodes._GROUP_BYTES", 10 * (2 * 600 + 413))
    rows = all_rows(root, cache="none", shuffle=False)
    assert rows.equals(expected)
    assert max(decoded) == 11  # The steps of a part, and the observation after them.
    assert max(read) == 11 * 400
    decoded.clear()
    all_rows(root, cache="none", columns=["actions"])
    assert decoded == [1, 11]  # As it is measured, and for the schema.


def test_a_long_episode_whose_sum_is_wrong_gives_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(tmp_path, example(an_episode(30)), example(an_episode(3)))
    (file,) = root.glob("*.tfrecord*")
    data = bytearray(file.read_bytes())
    data[data.index(b"steps/reward") + 30] ^= 1
    file.write_bytes(data)
    monkeypatch.setattr("rlio.source.episodes._GROUP_ROWS", 4)
    monkeypatch.setattr("rlio.formats.files.tf_records._BLOCK", 16)
    assert len(all_rows(root, on_error="skip")) == 2
    with pytest.raises(CorruptData, match="checksum"):
        all_rows(root)


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64"])
def test_whole_numbers_come_back_at_the_bounds_of_their_dtype_and_not_beyond(
    dtype: str, tmp_path: Path
) -> None:
    bounds = np.iinfo(dtype)
    feature = {"action": {"tensor": {"dtype": dtype, "shape": {}}}}
    values = np.array([bounds.min, bounds.max, 1, 0], dtype)
    rows = all_rows(write(tmp_path / "a", example(an_episode(4, action=values)), features=feature))
    assert rows["actions"].tolist() == [bounds.min, bounds.max, 1]
    if bounds.max < 2**62:
        for value in (bounds.max + 1, bounds.min - 1):
            record = example(an_episode(2, action=np.array([value, 0])))
            with pytest.raises(CorruptData, match=dtype):
                all_rows(write(tmp_path / "b", record, features=feature))


def test_numbers_in_any_blocks_are_those_that_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(0).integers(-(2**62), 2**62, 50) >> np.arange(50)
    feature = {"action": {"tensor": {"dtype": "int64", "shape": {}}}}
    for block in (10, 11, 64):
        monkeypatch.setattr("rlio.formats.files.tf_records._BLOCK", block)
        rows = all_rows(write(tmp_path, example(an_episode(50, action=values)), features=feature))
        assert rows["actions"].tolist() == values[:-1].tolist()


def test_a_reward_in_the_last_step_is_noted_and_so_is_a_first_step_that_is_none(tmp_path: Path) -> None:
    episodes = [an_episode(3), an_episode(3, reward=np.ones(3)), an_episode(3, is_first=np.zeros(3, bool))]
    with EpisodeReader(write(tmp_path, *map(example, episodes)), epochs=1) as reader:
        assert [len(rows) for rows in reader] == [6]
        assert [note.split()[0] for note in reader.source.notes] == ["The", "1"]  # type: ignore[attr-defined]


# ---- damage ----


@pytest.mark.parametrize("remainder", first(1, range(24)))
def test_every_flipped_bit_and_every_cut_is_an_error_that_names_the_file(
    remainder: int, tmp_path: Path
) -> None:
    shutil.copytree(PARTS, tmp_path / "x")
    (file,) = (tmp_path / "x").glob("*.tfrecord*")
    good = file.read_bytes()
    for place in range(remainder, len(good), 24):
        file.write_bytes(good[:place] + bytes([good[place] ^ 1 << place % 7]) + good[place + 1 :])
        with pytest.raises(CorruptData) as caught:
            all_rows(tmp_path / "x")
        assert caught.value.uri == str(file), place
        file.write_bytes(good[:place])
        with pytest.raises(CorruptData) as caught:
            all_rows(tmp_path / "x")
        assert caught.value.uri == str(file), place


def test_a_damaged_episode_is_skipped_and_counted(tmp_path: Path) -> None:
    records = [example(an_episode(5001)) for _ in range(3)]
    root = write(tmp_path, *records)
    (file,) = root.glob("*.tfrecord*")
    data = bytearray(file.read_bytes())
    for place in (len(data) // 2, len(records[0]) + 30):  # A value; a name, so that its steps are not known.
        data[place] ^= 1
        file.write_bytes(data)
        with pytest.raises(CorruptData):
            all_rows(root)
        with EpisodeReader(root, epochs=1, on_error="skip") as reader:
            assert len(rlio.concat_samples(list(reader))) == 10_000
            assert reader.skipped == 1
            assert reader.errors[0].record == 1
        data[place] ^= 1


def wrong(**changed: Any) -> bytes:
    return example(an_episode(3, **changed))


_LONG = b"\x80" * 11 + b"\x01"
DAMAGED: dict[str, bytes] = {
    "an end before the last step": wrong(is_last=np.array([0, 1, 1])),
    "terminal before the last step": wrong(is_terminal=np.array([1, 0, 1])),
    "terminal, and not last": wrong(is_last=np.zeros(3, int)),
    "two first steps": wrong(is_first=np.array([1, 1, 0])),
    "fewer rewards": wrong(reward=np.zeros(2)),
    "observations of another shape": wrong(observation=np.zeros(7)),
    "observations of more steps": wrong(observation=np.zeros(8)),
    "another kind of list": wrong(reward=np.zeros(3, int)),
    "a flag that is 2": wrong(is_last=np.array([0, 0, 2])),
    "no actions": wrong(action=None),
    "no list": field(1, field(1, field(1, b"steps/is_last"))),
    "nothing": b"",
    "no protobuf": b"\xff" * 40,
    "another message": field(7, b"abc"),
    "a fixed number": b"\x0d\x00\x00\x00\x00",
    "a name that is no text": field(1, field(1, field(1, b"\xff") + field(2, a_list([b"x"])))),
    "a length beyond its field": field(1, b"\x0a\xff\x01abc"),
    "a length of 2**62": field(1, b"\x0a" + varint(2**62) + b"abc"),
    "a length that is cut": field(1, b"\x0a\x80"),
    "a length without end": field(1, b"\x0a" + _LONG),
    "a feature twice": example(an_episode(3)) + example(an_episode(3)),
    "a whole number that is cut": field(
        1,
        example(an_episode(3))[3:]
        + field(1, field(1, b"steps/is_last") + field(2, field(3, field(1, b"\x80")))),
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_inconsistent_or_forged_is_refused_although_its_sums_are_right(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(CorruptData) as caught:
        all_rows(write(tmp_path, DAMAGED[name]))
    assert str(tmp_path) in (caught.value.uri or "")


def test_forged_sizes_are_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    root = write(tmp_path, example(an_episode(3)))
    (file,) = root.glob("*.tfrecord*")
    for size in (2**63, 2**40, 10**6):
        head = size.to_bytes(8, "little")
        file.write_bytes(head + masked(head) + b"x" * 1000)
        with pytest.raises(CorruptData):
            all_rows(root)
    with pytest.raises(UnsafeData):
        all_rows(write(tmp_path, example(an_episode(3000))), limits=Limits(group_bytes=10_000))
    huge = {
        "observation": {"tensor": {"dtype": "uint8", "encoding": "zlib", "shape": {"dimensions": [2**30]}}}
    }
    bomb = [zlib.compress(bytes(1 << 20))] * 3
    with pytest.raises(UnsafeData):
        all_rows(write(tmp_path, example(an_episode(3, observation=bomb)), features=huge))
    small = {"observation": {"tensor": {"dtype": "uint8", "encoding": "zlib", "shape": {"dimensions": [8]}}}}
    with pytest.raises(CorruptData):  # It inflates to more than the shape says, and no further.
        all_rows(write(tmp_path, example(an_episode(3, observation=bomb)), features=small))
    text = {"observation": {"text": {}}}
    texts = [b"x" * 100_000, b"", b""]
    with pytest.raises(UnsafeData):
        all_rows(
            write(tmp_path, example(an_episode(3, observation=texts)), features=text),
            limits=Limits(group_bytes=1_000_000),
        )
    many = field(1, b"".join(field(1, field(1, str(n).encode())) for n in range(50)))
    with pytest.raises(UnsafeData, match="features"):
        Example.of(many, Limits(columns=49))
    assert Example.of(many, DEFAULT_LIMITS).features == {}


@pytest.mark.further
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_records_that_are_changed_anywhere_raise_the_one_error_or_read_as_data(data: st.DataObject) -> None:
    record = bytearray(example(an_episode(3)))
    for _ in range(data.draw(st.integers(1, 3))):
        record[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = Example.of(bytes(record), DEFAULT_LIMITS)
        for values in found.features.values():
            found.pieces(values)
    except (CorruptData, UnicodeDecodeError):
        pass


DESCRIPTIONS: list[tuple[Callable[[Path], object], type[Exception]]] = [
    (lambda root: write(root, info={"fileFormat": "array_record"}), UnknownLayout),
    (lambda root: write(root, info={"splits": None}), CorruptData),
    (lambda root: write(root, info={"splits": [{"name": "../../x", "shardLengths": ["1"]}]}), CorruptData),
    (lambda root: write(root, info={"splits": [{"name": "train", "shardLengths": ["x"]}]}), CorruptData),
    (lambda root: write(root, info={"splits": [{"name": "train", "shardLengths": ["2"]}]}), CorruptData),
    (lambda root: write(root, features={"is_last": _REAL}), UnknownLayout),
    (lambda root: write(root, features={"weights": _REAL}), UnknownLayout),
    (lambda root: write(root, features={"video": {"video": {}}}), UnknownLayout),
    (lambda root: write(root, features={"action": {"sequence": {"feature": _REAL}}}), UnknownLayout),
    (
        lambda root: write(root, features={"action": {"tensor": {"dtype": "object", "shape": {}}}}),
        UnknownLayout,
    ),
    (
        lambda root: (write(root) / "features.json").write_text('{"featuresDict": {"features": []}}'),
        CorruptData,
    ),
    (
        lambda root: (write(root) / "features.json").write_text('{"featuresDict": {"features": {}}}'),
        UnknownLayout,
    ),
    (lambda root: (write(root) / "features.json").write_text("[" * 100_000), CorruptData),
    (lambda root: (write(root) / "dataset_info.json").unlink(), DataNotFound),
]


@pytest.mark.parametrize("number", range(len(DESCRIPTIONS)))
def test_descriptions_that_are_damaged_or_not_read_are_refused_by_name(number: int, tmp_path: Path) -> None:
    make, error = DESCRIPTIONS[number]
    make(tmp_path / "x")
    with pytest.raises(error):
        rlio.read(tmp_path / "x", format="rlds", epochs=1)


def test_steps_without_is_last_are_refused_and_those_without_rewards_are_read(tmp_path: Path) -> None:
    root = write(tmp_path, example(an_episode(3)))
    described = json.loads((root / "features.json").read_text())
    steps = described["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]["features"]
    del steps["reward"]
    (root / "features.json").write_text(json.dumps(described))
    assert "rewards" not in all_rows(root)
    del steps["is_last"]
    (root / "features.json").write_text(json.dumps(described))
    with pytest.raises(MissingColumn):
        all_rows(root)


class Harm:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self._path,))


def test_pickles_and_names_of_classes_run_nothing(tmp_path: Path) -> None:
    harm = pickle.dumps(Harm(tmp_path / "harm"), protocol=0)
    text = {"instruction": {"pythonClassName": "os.system", "text": {}}}
    raw = {
        "observation": {
            "tensor": {"dtype": "uint8", "encoding": "bytes", "shape": {"dimensions": [len(harm)]}}
        }
    }
    top = {"note": {"pythonClassName": "builtins.exec", "text": {}}}
    features = an_episode(2, instruction=[harm, harm], observation=[harm, harm]) | {"note": [harm]}
    rows = all_rows(write(tmp_path / "x", example(features), features=text | raw, top=top))
    assert rows["instruction"].tolist() == rows["note"].tolist() == [harm.decode()]
    assert rows["obs"].tobytes() == harm
    assert not (tmp_path / "harm").exists()


def test_text_and_pictures_that_are_none_are_refused(tmp_path: Path) -> None:
    for feature, error in (
        ({"text": {}}, CorruptData),
        (
            {"image": {"dtype": "uint8", "encodingFormat": "png", "shape": {"dimensions": [2, 2, 3]}}},
            CorruptData,
        ),
    ):
        record = example(an_episode(2, observation=[b"\xff", b"\xfe"]))
        with pytest.raises((error, SchemaError)):
            all_rows(write(tmp_path, record, features={"observation": feature}))


def test_other_folders_are_not_taken_for_it(tmp_path: Path) -> None:
    def others() -> Iterator[tuple[str, Any]]:
        yield "features.json", {"features": ["a", "b"]}
        yield "dataset_info.json", {"splits": {"train": {}}, "features": {}}
        yield "tfrecord.json", {"a": 1}

    for name, content in others():
        (tmp_path / name).write_text(json.dumps(content))
        found = recognise(tmp_path)
        assert found is None or found.format.name != "rlds", name


def test_a_data_set_that_was_never_ended_is_refused_unless_its_last_steps_are_said_to_be_rows(
    tmp_path: Path,
) -> None:
    open_ended = {"is_last": np.zeros(3, int), "is_terminal": np.zeros(3, int)}
    root = write(tmp_path / "never", *[wrong(**open_ended)] * 2)
    with pytest.raises(UnknownLayout, match=r"2 episodes of which none ends.*'last_step': 'action'"):
        all_rows(root)
    rows = all_rows(root, format_options={"last_step": "action"})
    assert rows["actions"].tolist() == [0, 1, 2] * 2
    assert not rows["terminateds"].any()
    assert not rows["truncateds"].any()
    assert rows["new_obs_valid"].tolist() == [True, True, False] * 2
    # One episode of a data set may go on.
    rows = all_rows(write(tmp_path / "some", wrong(**open_ended), wrong()))
    assert rows["actions"].tolist() == [0, 1, 2, 0, 1]
    assert rows["terminateds"].tolist() == [False] * 4 + [True]


# ---- sequences in steps ----


def test_sequences_that_tensorflow_datasets_wrote_are_those_of_their_steps() -> None:
    rows: Any = all_rows(LISTS, cache="none", shuffle=False)
    value, has = rows["actions"], rows["actions"] < 200
    number, t = np.divmod(value, 100)
    assert rows["actions"].dtype == np.int32
    assert [row.tolist() for row in rows["tokens"]] == [
        [v] * ((e + s) % 3 * h) for v, e, s, h in zip(value, number, t, has, strict=True)
    ]
    for name, more in (("obs", 0), ("new_obs", 1)):
        boxes, kinds = rows[name]["objects"]["box"], rows[name]["objects"]["kind"]
        counts = [(s + more) * h for s, h in zip(t, has, strict=True)]
        assert [row.tolist() for row in kinds] == [[*range(count)] for count in counts]
        assert [row.tolist() for row in boxes] == [
            [[v + more, k] for k in range(count)] for v, count in zip(value, counts, strict=True)
        ]
        assert {(row.dtype.str, row.shape[1:]) for row in boxes} == {("<f4", (2,))}
        assert {row.dtype.str for row in kinds} == {"|u1"}


def a_sequence(dtype: str = "int32", shape: tuple[int, ...] = (), **changed: Any) -> dict[str, Any]:
    """A feature: `tfds.features.Sequence`, as TFDS 4.9 describes it."""
    tensor = {"dtype": dtype, "encoding": "none", "shape": {"dimensions": [str(n) for n in shape]}}
    return {"sequence": {"feature": {"tensor": tensor}, "length": "-1", **changed}}


def sequences(name: str, rows: list[Any], dtype: str = "int64") -> dict[str, Any]:
    """The lists of a sequence in steps, as TFDS 4.9 writes them."""
    return {
        f"{name}/ragged_flat_values": np.array([item for row in rows for item in row], dtype).ravel(),
        f"{name}/ragged_row_lengths_0": np.array([len(row) for row in rows]),
    }


def test_a_sequence_in_steps_is_rows_of_any_number_of_items(tmp_path: Path) -> None:
    tokens = [[1, 300, -3], [], [4], [5, 6]]
    points = [[[0.5, 1.0]], [], [[1.5, 2.0], [2.5, 3.0]], []]
    none = [[], [], []]
    features = {
        "tokens": a_sequence(),
        "observation": {
            "featuresDict": {
                "features": {
                    "objects": {  # TFDS has a sequence of a dict as a dict of sequences.
                        "sequence": {
                            "feature": {
                                "featuresDict": {
                                    "features": {"points": a_sequence("float32", (2,))["sequence"]["feature"]}
                                }
                            },
                            "length": "-1",
                        }
                    }
                }
            }
        },
    }
    records = [
        example(
            an_episode(
                steps,
                observation=None,
                **sequences("tokens", rows),
                **sequences("observation/objects/points", pairs, "float32"),
            )
        )
        for steps, rows, pairs in ((4, tokens, points), (3, none, none))
    ]
    root = write(tmp_path / "own", *records, features=features)
    rows = all_rows(root, cache="none", shuffle=False)
    assert [row.tolist() for row in rows["tokens"]] == [*tokens[:-1], [], []]
    assert {row.dtype for row in rows["tokens"]} == {np.dtype(np.int32)}
    pairs = rows["obs"]["objects"]["points"], rows["new_obs"]["objects"]["points"]
    assert [row.tolist() for row in pairs[0]] == [*points[:-1], [], []]
    assert [row.tolist() for row in pairs[1]] == [*points[1:], [], []]
    assert {(row.shape[1:], row.dtype.str) for each in pairs for row in each} == {((2,), "<f4")}
    with rlio.read(root, epochs=1) as reader:
        source: Any = reader.source  # type: ignore[attr-defined]  # An EpisodeReader.
        for size in (1, 2):
            assert parts_of(source, 0, size).equals(source.load(0, None))
    assert all_rows(root, columns=["tokens"]).keys() == {"tokens"}
    assert rlio.convert(root, tmp_path / "rlio", prove=True).proved


@pytest.mark.parametrize("lengths", [[1, 0, 2], [1, 1], [4, -1, 0], [2**40, 0, 0]])
def test_lengths_of_sequences_that_lie_are_damage(lengths: list[int], tmp_path: Path) -> None:
    lists = sequences("tokens", [[1], [1], [1], [1]])
    lists["tokens/ragged_flat_values"] = np.array([1, 2, 3, 4])
    lists["tokens/ragged_row_lengths_0"] = np.array(lengths)
    root = write(tmp_path, example(an_episode(3, **lists)), features={"tokens": a_sequence()})
    with pytest.raises(CorruptData, match="tokens"):
        all_rows(root)


@pytest.mark.parametrize(
    "feature",
    [
        a_sequence(length="3"),
        {"sequence": {"feature": a_sequence(), "length": "-1"}},
        {"sequence": {"feature": {"text": {}}, "length": "-1"}},
    ],
    ids=["of a fixed length", "of sequences", "of texts"],
)
def test_other_sequences_in_steps_are_refused_and_all_else_is_read(feature: Any, tmp_path: Path) -> None:
    root = write(tmp_path, example(an_episode(3)), features={"x": feature})
    with pytest.raises(UnknownLayout, match=r"leave_out.*\['x'\]"):
        all_rows(root)
    assert len(all_rows(root, format_options={"leave_out": ["x"]})) == 2
