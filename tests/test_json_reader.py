"""RLlib's JSON: every form of record, wherever its files lie, and what happens to bad ones."""

import base64
import functools
import io
import json
import pickle
import sys
import zipfile
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import gymnasium as gym
import lz4.frame
import numpy as np
import pytest
from further import further
from hypothesis import given, settings
from hypothesis import strategies as st

import rlio
from rlio import JsonWriter
from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.errors import (
    CorruptData,
    DataNotFound,
    EndOfData,
    MissingColumn,
    OptionError,
    SchemaError,
    StateError,
    StoreError,
    UnknownName,
    UnsafeData,
)
from rlio.formats.files.line_files import open_line_files
from rlio.formats.rllib.decoder import RllibDecoder
from rlio.formats.rllib.json_records import JsonRecords
from rlio.limits import Limits
from rlio.readers.json_reader import JsonReader
from rlio.storage import InputFiles, expand_inputs
from rlio.testing.readers import ReaderTests, assert_resumes

Box, Discrete = gym.spaces.Box, gym.spaces.Discrete


def pack(value: Any) -> str:
    return base64.b64encode(lz4.frame.compress(pickle.dumps(value, 5))).decode("ascii")


def record(first: int, rows: int, **more: Any) -> dict[str, Any]:
    """A record whose rows are numbered from ``first``."""
    numbers = np.arange(first, first + rows)
    return {
        "type": "SampleBatch",
        "obs": pack(np.stack([numbers, -numbers], 1).astype(np.float32)),
        "t": numbers.tolist(),
        "rewards": (numbers / 2).tolist(),
        "dones": (numbers % 5 == 4).tolist(),
        "infos": [{"n": int(n)} for n in numbers],
        **more,
    }


def lines(*records: Any) -> bytes:
    return b"".join(
        (item if isinstance(item, bytes) else json.dumps(item).encode()) + b"\n" for item in records
    )


def decode(columns: dict[str, Any], **options: Any) -> Any:
    return RllibDecoder(**options).decode(json.dumps(columns).encode())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files with seven records, of 1 to 7 rows."""
    sizes = [[1, 2, 3], [4, 5], [6, 7]]
    first = 0
    for number, group in enumerate(sizes):
        records = []
        for rows in group:
            records.append(record(first, rows))
            first += rows
        (tmp_path / f"output-2024_worker-0_{number}.json").write_bytes(lines(*records))
    return tmp_path


def steps(reader: JsonReader) -> list[int]:
    return [int(t) for batch in reader for t in batch["t"]]


# ---- forms of records ----


def test_lists_become_arrays_as_numpy_makes_them() -> None:
    batch = decode(
        {
            "type": "SampleBatch",
            "obs": [[0.5, 1.5], [2.5, 3.5]],
            "actions": [1, 0],
            "rewards": [1, 2],
            "terminateds": [False, True],
            "infos": [{"a": [1]}, {}],
            "task": ["left", "NaN"],
            "eps_id": [2**63 + 5, 7],
        },
        format_options={"infos": "new_obs"},
    )
    assert {name: str(batch[name].dtype) for name in batch} == {
        "obs": "float64",
        "actions": "int64",
        "rewards": "float64",
        "terminateds": "bool",
        "infos": "object",
        "task": "object",
        "eps_id": "uint64",
    }
    assert batch["infos"].tolist() == [{"a": [1]}, {}]
    assert batch["task"].tolist() == ["left", "NaN"]
    assert batch["eps_id"].tolist() == [2**63 + 5, 7]


def test_the_place_of_type_in_the_line_does_not_matter() -> None:
    assert len(decode({"obs": [[1.0]], "rewards": [1.0], "type": "SampleBatch"})) == 1


def test_packed_columns_come_back_with_their_dtypes() -> None:
    image = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    nested = {"image": image, "parts": (np.float32([1, 2]), np.array([True, False]))}
    batch = decode({"type": "SampleBatch", "obs": pack(nested), "actions": pack(np.int8([1, 2]))})
    assert batch["actions"].dtype == np.int8
    np.testing.assert_array_equal(batch["obs"]["image"], image)
    assert batch["obs"]["parts"][1].dtype == bool


def test_rows_that_were_packed_one_by_one_are_stacked() -> None:
    rows = [np.float32([1, 2]), np.float32([3, 4])]
    batch = decode({"type": "SampleBatch", "obs": [pack(row) for row in rows], "rewards": [1.0, 2.0]})
    np.testing.assert_array_equal(batch["obs"], np.stack(rows))
    with pytest.raises(SchemaError, match=r"different dtype.*column obs"):
        decode({"type": "SampleBatch", "obs": [pack(rows[0]), pack(np.zeros(3))], "rewards": [1.0, 2.0]})


def test_a_line_of_one_step_without_type_is_a_batch_of_one_row() -> None:
    step = {
        "weights": 1.0,
        "eps_id": 241561760,
        "dones": False,
        "infos": {},
        "t": 0,
        "obs": [0.1, 0.2],
        "new_obs": pack(np.float32([0.3, 0.4])),
        "extra": {"x": [1, 2], "y": 3},
        "agent": "left",
    }
    batch = decode(step)
    assert len(batch) == 1
    assert batch["obs"].shape == batch["new_obs"].shape == (1, 2)
    assert batch["new_obs"].dtype == np.float32
    assert batch["infos"].tolist() == [{}]
    assert batch["extra"]["x"].shape == (1, 2)
    assert batch["extra"]["y"].tolist() == [3]
    assert batch["agent"].tolist() == ["left"]
    assert batch["terminateds"].tolist() == [False]


def test_a_record_wrapped_in_value_is_unwrapped() -> None:
    assert len(decode({"value": {"type": "SampleBatch", "obs": [[1.0], [2.0]], "rewards": [1.0, 1.0]}})) == 2


def test_a_multi_agent_record_keeps_policies_and_environment_steps() -> None:
    batch = decode(
        {
            "type": "MultiAgentBatch",
            "count": 4,
            "policy_batches": {
                "p0": {"obs": pack(np.zeros((4, 2))), "dones": [False] * 3 + [True]},
                "p1": {"obs": [[1.0], [2.0]], "actions": [0, 1]},
                "p2": None,
            },
        }
    )
    assert isinstance(batch, MultiAgentBatch)
    assert batch.env_steps() == 4
    assert {policy: len(rows) for policy, rows in batch.policy_batches.items()} == {"p0": 4, "p1": 2}
    assert batch.policy_batches["p0"]["terminateds"].tolist() == [False, False, False, True]


@pytest.mark.parametrize("count", [None, -1, 1.5, True, "4", 2**60])
def test_a_multi_agent_record_without_a_count_is_damaged(count: Any) -> None:
    with pytest.raises(CorruptData, match="count"):
        decode({"type": "MultiAgentBatch", "count": count, "policy_batches": {}})


def test_dones_become_terminateds_and_truncateds_stay_apart() -> None:
    def flags(**columns: Any) -> dict[str, Any]:
        batch = decode({"type": "SampleBatch", "obs": [[0.0]] * 3, **columns})
        return {name: batch[name].tolist() for name in batch if name != "obs"}

    assert flags(dones=[0, 0, 1]) == {"terminateds": [False, False, True]}
    assert flags(dones=[False, True, True], truncateds=[False, True, False]) == {
        "truncateds": [False, True, False],
        "terminateds": [False, False, True],
    }
    assert flags(dones=[False, True, True], terminateds=[False, False, True]) == {
        "terminateds": [False, False, True],
        "truncateds": [False, True, False],
    }
    assert "truncateds" not in flags(dones=[False, False, True], terminateds=[False, False, True])
    for name in ("dones", "terminateds", "truncateds"):
        with pytest.raises(SchemaError, match="expected a flag a row"):
            flags(**{name: {"part": [False, False, True]}})
    with pytest.raises(SchemaError, match="dones"):
        flags(dones=[False] * 3, terminateds=[True] * 3)
    with pytest.raises(SchemaError, match="true and false"):
        flags(dones=[0, 2, 1])


def test_recurrent_states_have_a_row_a_sequence() -> None:
    batch = decode(
        {
            "type": "SampleBatch",
            "obs": [[1.0], [2.0], [3.0]],
            "state_in_0": [[0.0, 0.0], [1.0, 1.0]],
            "seq_lens": [1, 2],
            "rewards": [1.0, 2.0, 3.0],
        }
    )
    assert len(batch) == 3
    assert batch["state_in_0"].shape == (2, 2)


def test_padded_sequences_are_known_by_their_rows() -> None:
    batch = decode({"type": "SampleBatch", "obs": [[1.0], [0.0], [2.0], [3.0]], "seq_lens": [1, 2]})
    assert batch.zero_padded
    assert batch.max_seq_len == 2
    assert len(batch) == 3


def test_columns_that_are_null_are_left_out() -> None:
    assert list(decode({"type": "SampleBatch", "obs": [[1.0]], "agent_id": None})) == ["obs"]


def test_numbers_that_json_lacks_are_read_in_both_spellings() -> None:
    line = (
        b'{"rewards": [NaN, Infinity, -Infinity, 1.5], "obs": [["NaN"], [1.0], ["-Infinity"], ["Infinity"]]}'
    )
    batch = RllibDecoder().decode(line)
    np.testing.assert_array_equal(batch["rewards"], [np.nan, np.inf, -np.inf, 1.5])
    np.testing.assert_array_equal(batch["obs"][:, 0], [np.nan, 1.0, -np.inf, np.inf])
    assert decode({"rewards": ["NaN"], "obs": [[1.0]]})["rewards"].dtype == np.float64


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=8))
def test_floats_come_back_exactly(values: list[float]) -> None:
    found = decode({"obs": [[value] for value in values], "rewards": values})
    np.testing.assert_array_equal(found["rewards"], np.array(values, float))
    np.testing.assert_array_equal(found["obs"][:, 0], np.array(values, float))


# ---- spaces ----


SPACE = gym.spaces.Dict(
    image=Box(0, 255, (2, 2), np.uint8),
    parts=gym.spaces.Tuple((Box(-1, 1, (2,)), Discrete(3, start=5))),
    mode=gym.spaces.MultiDiscrete([2, 3]),
    bits=gym.spaces.MultiBinary(2),
)


def columns_of(space: gym.Space[Any], rows: int) -> Any:
    space.seed(0)
    samples = [space.sample() for _ in range(rows)]
    return samples, _stacked(space, samples)


def _stacked(space: gym.Space[Any], samples: list[Any]) -> Any:
    if isinstance(space, gym.spaces.Dict):
        return {key: _stacked(part, [s[key] for s in samples]) for key, part in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_stacked(part, [s[i] for s in samples]) for i, part in enumerate(space.spaces))
    return np.array(samples, space.dtype)


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, tuple) else value.tolist()


def assert_equal_structure(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
        return
    keys = expected if isinstance(expected, dict) else range(len(expected))
    for key in keys:
        assert_equal_structure(found[key], expected[key])


@pytest.mark.parametrize(
    "space", [SPACE, SPACE["parts"], SPACE["image"], SPACE["mode"], SPACE["bits"]], ids=str
)
@pytest.mark.parametrize("form", ["listed", "packed", "flat"])
def test_spaces_give_structure_and_dtypes_back(space: gym.Space[Any], form: str) -> None:
    samples, expected = columns_of(space, 4)
    if form == "flat":
        written = [gym.spaces.flatten(space, sample).tolist() for sample in samples]
    else:
        written = pack(expected) if form == "packed" else _listed(expected)
    batch = decode({"obs": written, "rewards": [0.0] * 4}, spaces=(space, Discrete(2)))
    assert_equal_structure(batch["obs"], expected)


def test_spaces_of_policies_apply_to_their_batches() -> None:
    spaces = {
        "p0": (Box(0, 1, (1,), np.float32), Discrete(2)),
        "p1": (Box(0, 9, (1,), np.uint8), Discrete(2)),
    }
    policies = {policy: {"obs": [[1]], "actions": [1], "prev_actions": [0]} for policy in spaces}
    batch = decode({"type": "MultiAgentBatch", "count": 1, "policy_batches": policies}, spaces=spaces)
    assert batch.policy_batches["p0"]["obs"].dtype == np.float32
    assert batch.policy_batches["p1"]["obs"].dtype == np.uint8
    assert batch.policy_batches["p1"]["prev_actions"].dtype == np.int64


@pytest.mark.parametrize(
    ("obs", "match"),
    [
        ([[0.5, 0.5]], "do not fit"),
        ([[256]], "cannot hold"),
        ([[0.5]], "cannot hold"),
        ([["a"]], "text"),
        ({"x": [[1]]}, "list"),
    ],
)
def test_values_that_do_not_fit_the_space_name_the_column(obs: Any, match: str) -> None:
    with pytest.raises(SchemaError, match=rf"(?s){match}.*column obs"):
        decode({"obs": obs, "rewards": [0.0]}, spaces=(Box(0, 255, (1,), np.uint8), Discrete(2)))


def test_spaces_that_are_none_are_refused() -> None:
    with pytest.raises(OptionError, match="observation_space"):
        RllibDecoder(spaces=(Discrete(2), 3))  # type: ignore[arg-type]


# ---- bad records ----


BAD_LINES = {
    "cut": (b'{"type": "SampleBatch", "t": [1, 2', CorruptData),
    "list": (b"[1, 2]", CorruptData),
    "number": (b"3", CorruptData),
    "utf-8": (b'{"t": [1], "x": ["\xff"]}', CorruptData),
    "nul": (b'{"t": [1]}\x00', CorruptData),
    "trailing comma": (b'{"t": [1],}', CorruptData),
    "key twice": (b'{"t": [1], "t": [2]}', CorruptData),
    "key twice within": (b'{"t": [1], "infos": [{"a": 1, "a": 2}]}', CorruptData),
    "half a character": (b'{"t": [1], "x": ["\\ud800"]}', CorruptData),
    "1e999": (b'{"t": [1], "rewards": [1e999]}', CorruptData),
    "digits": (b'{"t": [' + b"9" * 5000 + b"]}", CorruptData),
    "65 bits": (b'{"t": [18446744073709551616, 1]}', SchemaError),
    "mixed 64 bits": (b'{"t": [9223372036854775808, -1]}', SchemaError),
    "nesting": (b'{"t": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", UnsafeData),
    "empty lists": (b'{"t": [' + b"[]," * 4_100_000 + b"[]]}", UnsafeData),
    "type": (b'{"type": "Other", "t": [1]}', CorruptData),
    "no columns": (b"{}", CorruptData),
    "format": (b'{"format": 0}', CorruptData),
    "lengths": (b'{"t": [1, 2], "rewards": [1.0]}', SchemaError),
    "lists of several ranks": (b'{"t": [1, 2], "obs": [[1.0], [[1.0, 2.0]]]}', SchemaError),
    "lists of lists of different lengths": (b'{"t": [1, 2], "obs": [[[1.0], [1.0, 2.0]], []]}', SchemaError),
    "lists beside numbers": (b'{"t": [1, 2], "obs": [[1.0], 2.0]}', SchemaError),
    "lists of texts": (b'{"t": [1, 2], "obs": [["a"], []]}', SchemaError),
    "rewards of different lengths": (b'{"t": [1, 2], "rewards": [[1.0], [1.0, 2.0]]}', SchemaError),
    "null": (b'{"t": [1, 2], "rewards": [1.0, null]}', SchemaError),
    "text": (b'{"t": [1, 2], "rewards": [1.0, "x"]}', SchemaError),
    "scalar": (b'{"type": "SampleBatch", "obs": [[1.0]], "x": 3}', SchemaError),
    "plain text": (b'{"type": "SampleBatch", "obs": "BCJNxx"}', SchemaError),
    "packed scrap": (b'{"type": "SampleBatch", "t": [1], "obs": "BCJNGGhA!!"}', CorruptData),
    "seq_lens": (b'{"obs": [[1.0], [2.0], [3.0]], "seq_lens": [1, 1]}', SchemaError),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_raises_the_typed_error_with_file_and_record(name: str, tmp_path: Path) -> None:
    line, kind = BAD_LINES[name]
    path = tmp_path / "a.json"
    path.write_bytes(line + b"\n")
    with JsonReader(path) as reader, pytest.raises(kind) as caught:
        reader.sample()
    assert caught.value.uri == str(path)
    assert caught.value.record == 0
    assert len(str(caught.value)) < 1000


@pytest.mark.few(15)
@pytest.mark.parametrize("name", BAD_LINES)
def test_skip_leaves_out_the_bad_line_and_serves_the_rest(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    good = [record(0, 2), record(2, 3), record(5, 1)]
    path.write_bytes(lines(BAD_LINES[name][0], good[0], b"", good[1], BAD_LINES[name][0], good[2]))
    # 12 MB of text are tried once.
    for shuffle in (False,) if name == "empty lists" else (False, True):
        with JsonReader(path, on_error="skip", epochs=2, shuffle=shuffle, seed=3) as reader:
            assert sorted(steps(reader)) == sorted([0, 1, 2, 3, 4, 5] * 2)
            assert reader.skipped == 2, "each bad record counts once"
            assert [(error.uri, error.record) for error in sorted(reader.errors)] == [
                (str(path), 0),
                (str(path), 4),
            ]


def test_an_error_stays_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(lines(record(0, 2), b"{broken!", record(2, 2)))
    with JsonReader(path, epochs=1) as reader:
        for _ in range(2):
            with pytest.raises(CorruptData, match="record 1"):
                reader.sample(3)
        state = reader.state_dict()
    path.write_bytes(lines(record(0, 2), b"        ", record(2, 2)))
    with JsonReader(path, epochs=1) as reader:
        reader.load_state_dict(state)
        assert steps(reader) == [0, 1, 2, 3]


def test_by_rows_a_record_that_cannot_be_parsed_is_found_at_opening(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(lines(record(0, 2), b"{broken!", record(2, 2)))
    with pytest.raises(CorruptData, match="record 1"):
        JsonReader(path, epochs=1, batch_size=3)
    with JsonReader(path, epochs=1, batch_size=3, on_error="skip") as reader:
        assert steps(reader) == [0, 1, 2, 3]
        assert reader.skipped == 1


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        ({"rewards": None}, MissingColumn, "column rewards"),
        ({"extra": [1.0, 2.0]}, SchemaError, "column extra"),
        ({"obs": [[1.0], [2.0]]}, SchemaError, r"shape \(1,\).*column obs"),
        ({"obs": pack(np.zeros((2, 2), np.float64))}, SchemaError, r"dtype float64.*float32.*column obs"),
        ({"t": [0.5, 1.5]}, SchemaError, r"dtype float64.*int64.*column t"),
        ({"obs": {"x": [[1.0, 2.0]] * 2}}, MissingColumn, "column obs"),
    ],
)
def test_a_record_unlike_the_first_names_the_column(
    change: dict[str, Any], kind: type[Exception], match: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(lines(record(0, 3), record(3, 2, **change), record(5, 1)))
    with JsonReader(path) as reader:
        reader.sample()
        with pytest.raises(kind, match=rf"{match}.*" if "column" not in match else match) as caught:
            reader.sample()
        assert (caught.value.uri, caught.value.record) == (str(path), 1)
    for shuffle in (False, True):
        with JsonReader(path, epochs=1, on_error="skip", shuffle=shuffle, seed=0) as reader:
            assert sorted(steps(reader)) == [0, 1, 2, 5]
            assert reader.skipped == 1


def test_whole_numbers_become_the_floats_of_the_first_record(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(lines({"t": [0], "q": [0.5]}, {"t": [1], "q": [2]}))
    with JsonReader(path, epochs=1, batch_size=2) as reader:
        assert reader.sample()["q"].tolist() == [0.5, 2.0]


def test_a_packed_column_that_imports_os_runs_nothing_and_names_the_place(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            import os

            return (os.mkdir, (str(tmp_path / "proof"),))

    path = tmp_path / "a.json"
    path.write_bytes(lines(record(0, 2), record(2, 2, obs=pack(Attack())), record(4, 1)))
    with JsonReader(path) as reader:
        reader.sample()
        with pytest.raises(UnsafeData, match=r"mkdir.*a\.json, record 1, column obs"):
            reader.sample()
    with JsonReader(path, columns=["t"], epochs=1) as reader:
        assert steps(reader) == [0, 1, 2, 3, 4], "a column that is not asked for is not unpacked"
    with JsonReader(path, on_error="skip", epochs=1) as reader:
        assert steps(reader) == [0, 1, 4]
        assert reader.skipped == 1
    assert not (tmp_path / "proof").exists()


def test_a_packed_column_that_inflates_memory_is_refused(tmp_path: Path) -> None:
    bomb = base64.b64encode(lz4.frame.compress(bytes(600 << 20))).decode()
    path = tmp_path / "a.json"
    path.write_bytes(lines(record(0, 2), record(2, 2, obs=bomb)))
    with JsonReader(path, on_error="skip", epochs=1, limits=Limits(group_bytes=512 << 20)) as reader:
        assert steps(reader) == [0, 1]
        assert "inflates" in reader.errors[0].message


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_line_longer_than_the_limit_is_refused_before_it_is_parsed(shuffle: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(lines(record(0, 1), record(1, 3000), record(3001, 1)))
    options: Any = {"limits": Limits(line_bytes=2000), "shuffle": shuffle, "seed": 0}
    with JsonReader(path, on_error="skip", epochs=1, **options) as reader:
        assert sorted(steps(reader)) == [0, 3001]
        assert "line_bytes" in reader.errors[0].message


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_limit_of_a_line_may_be_any_number(shuffle: bool, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(lines(record(0, 1)))
    limits = Limits(line_bytes=sys.maxsize)
    with JsonReader(tmp_path, limits=limits, shuffle=shuffle, seed=0, epochs=1) as reader:
        assert steps(reader) == [0]


def test_endless_reading_of_nothing_but_bad_records_raises(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(lines(b"{", b"["))
    for shuffle in (False, True):
        reader = JsonReader(path, on_error="skip", shuffle=shuffle, seed=0)
        with reader, pytest.raises(CorruptData, match="none of the last"):
            reader.sample()
    with JsonReader(path, on_error="skip", epochs=1) as reader:
        with pytest.raises(EndOfData):
            reader.sample()
        assert reader.skipped == 2


@pytest.mark.parametrize("content", [b"", b"\n\n  \r\n"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_files_without_a_record_raise(content: bytes, shuffle: bool, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with JsonReader(tmp_path, shuffle=shuffle, seed=0) as reader, pytest.raises(DataNotFound):
        reader.sample()


def test_line_ends_byte_order_marks_and_missing_newlines_do_not_matter(tmp_path: Path) -> None:
    body = json.dumps(record(0, 2)).encode() + b"\r\n\r\n" + json.dumps(record(2, 1)).encode()
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + body)
    for shuffle in (False, True):
        with JsonReader(tmp_path, epochs=1, shuffle=shuffle, seed=0) as reader:
            assert sorted(steps(reader)) == [0, 1, 2]


# ---- where the files are ----


def test_folders_globs_lists_and_uris_name_the_same_records(folder: Path) -> None:
    paths = sorted(folder.iterdir())
    inputs: list[Any] = [
        folder,
        str(folder),
        str(folder / "*.json"),
        [str(path) for path in paths],
        [paths[0], str(folder / "*_[12].json")],
        f"file://{folder}",
        f"file://{folder}/*.json",
    ]
    for value in inputs:
        with JsonReader(value, epochs=1) as reader:
            assert steps(reader) == list(range(28)), value


def test_files_in_memory_and_behind_wrappers_are_read(folder: Path) -> None:
    fs = fsspec.filesystem("memory")
    for path in folder.iterdir():
        fs.pipe_file(f"/json-reader/{path.name}", path.read_bytes())
    for value in ("memory://json-reader", "memory://json-reader/*.json", "memory:///json-reader/"):
        for shuffle in (False, True):
            with JsonReader(value, epochs=1, shuffle=shuffle, seed=0) as reader:
                assert sorted(steps(reader)) == list(range(28))


@pytest.mark.parametrize(
    ("value", "kind"),
    [("{}/no-*.json", DataNotFound), ("{}/nowhere", DataNotFound), ("nosuch://x/*.json", UnknownName)],
)
def test_inputs_that_name_nothing_raise(value: str, kind: type[Exception], folder: Path) -> None:
    with pytest.raises(kind):
        JsonReader(value.format(folder))
    (folder / "sub").mkdir()
    (folder / "sub" / "notes.txt").write_text("x")
    with pytest.raises(DataNotFound, match=r"notes\.txt"):
        JsonReader(folder / "sub")


def test_a_path_with_d4rl_in_it_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "d4rl_cartpole").mkdir()
    (tmp_path / "d4rl_cartpole" / "a.json").write_bytes(lines(record(0, 2)))
    with JsonReader(tmp_path / "d4rl_cartpole", epochs=1) as reader:
        assert steps(reader) == [0, 1]


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(OptionError, match="no option 'train_batch_size'"):
        JsonReader("x.json", train_batch_size=3)  # type: ignore[call-arg]


# ---- zip files ----


def zipped(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize("shuffle", [False, True])
def test_zip_files_are_read_where_they_lie_and_never_extracted(shuffle: bool, tmp_path: Path) -> None:
    zipped(
        tmp_path / "old.zip",
        {
            "sub/b.json": lines(record(3, 2)),
            "../../evil.json": lines(record(0, 1)),
            "a.jsonl": lines(record(1, 2)),
            "__MACOSX/._a.json": b"\x00\x05",
            "notes.txt": b"hello",
        },
    )
    before = sorted(path.name for path in tmp_path.parent.rglob("*"))
    for value in (tmp_path, tmp_path / "old.zip"):
        with JsonReader(value, epochs=1, shuffle=shuffle, seed=0) as reader:
            assert sorted(steps(reader)) == [0, 1, 2, 3, 4]
    assert sorted(path.name for path in tmp_path.parent.rglob("*")) == before


def test_a_zip_member_without_a_name_is_damage(tmp_path: Path) -> None:
    zipped(tmp_path / "a.zip", {"?": b"", "a.json": lines(record(0, 2))}, zipfile.ZIP_STORED)
    data = (tmp_path / "a.zip").read_bytes()
    directory = data.rindex(b"?")
    forged = bytearray(data[:directory] + data[directory + 1 :])
    forged[directory - 18 : directory - 16] = b"\0\0"  # The length of the name.
    forged[-10:-6] = (int.from_bytes(data[-10:-6], "little") - 1).to_bytes(4, "little")
    (tmp_path / "a.zip").write_bytes(forged)
    for read in (JsonReader, rlio.read, rlio.open_dataset):
        with pytest.raises(CorruptData, match="a member without a name"):
            read(tmp_path / "a.zip")


def test_a_zip_file_beside_what_it_holds_is_warned_of(tmp_path: Path, caplog: Any) -> None:
    data = lines(record(0, 2))
    (tmp_path / "a.json").write_bytes(data)
    zipped(tmp_path / "a.zip", {"a.json": data})
    with JsonReader(tmp_path, epochs=1):
        assert "both are read" in caplog.text


def test_a_zip_file_that_inflates_memory_is_refused(tmp_path: Path) -> None:
    path = zipped(tmp_path / "bomb.zip", {"a.json": b" " * (80 << 20)})
    data = bytearray(path.read_bytes())
    # Real deflate stays just below the limit; a directory that lies about it does not.
    at = data.rfind(b"PK\x01\x02") + 20
    data[at : at + 4] = (100).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(UnsafeData, match="inflation"):
        JsonReader(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compression_methods_are_refused(method: int, tmp_path: Path) -> None:
    with pytest.raises(UnsafeData, match="compression method"):
        JsonReader(zipped(tmp_path / "a.zip", {"a.json": lines(record(0, 1))}, method))


def test_a_damaged_zip_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"PK not at all")
    with pytest.raises(CorruptData, match=r"a\.zip"):
        JsonReader(tmp_path)
    with pytest.raises(DataNotFound, match=r"notes\.txt"):
        JsonReader(zipped(tmp_path / "a.zip", {"notes.txt": b"x"}))


@pytest.mark.further
@pytest.mark.parametrize("shuffle", [False, *further(True)])
def test_what_comes_before_the_damage_in_a_zip_member_is_served(shuffle: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    records = [record(i, 1, noise=[pack(rng.bytes(3000))]) for i in range(1000)]
    path = zipped(tmp_path / "a.zip", {"a.json": lines(*records), "b.json": lines(records[-1])})
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 50] = bytes(50)
    path.write_bytes(data)
    with JsonReader(path, columns=["t"]) as reader, pytest.raises(CorruptData, match=r"a\.zip!a\.json"):
        steps(reader)
    with JsonReader(path, columns=["t"], on_error="skip", epochs=1, shuffle=shuffle, seed=0) as reader:
        found = sorted(steps(reader))
        assert found[: len(found) - 1] == list(range(len(found) - 1))
        assert found[-1] == 999, "the other member is served"
        assert reader.skipped >= 1


# ---- order, epochs, sizes, ranks, states ----


def expected_rows(folder: Path) -> SampleBatch:
    numbers = np.arange(28)
    return SampleBatch(
        obs=np.stack([numbers, -numbers], 1).astype(np.float32),
        t=numbers,
        rewards=numbers / 2,
        infos=[{"n": n} for n in range(28)],
        terminateds=numbers % 5 == 4,
        truncateds=np.zeros(28, bool),
    )


class JsonReaderSuite(ReaderTests):
    options: ClassVar[dict[str, Any]] = {"epochs": 1}

    @pytest.fixture(autouse=True)
    def _files(self, folder: Path) -> None:
        self.folder = folder

    def make_reader(self) -> JsonReader:
        return JsonReader(self.folder, **self.options)

    def expected_rows(self) -> SampleBatch:
        rows = expected_rows(self.folder)
        return SampleBatch({name: rows[name] for name in self.options.get("columns", rows)})


class TestRecords(JsonReaderSuite):
    pass


@pytest.mark.further
class TestBatches(JsonReaderSuite):
    options: ClassVar[dict[str, Any]] = {"epochs": 1, "batch_size": 5}


class TestEndless(JsonReaderSuite):
    finite = False
    options: ClassVar[dict[str, Any]] = {}


class TestShuffled(JsonReaderSuite):
    ordered = False
    options: ClassVar[dict[str, Any]] = {"epochs": 1, "shuffle": True, "seed": 5, "columns": ["obs", "t"]}


@pytest.mark.further  # The engine shuffles any source: test_dataset_reader, test_every_option.
class TestShuffledBatches(JsonReaderSuite):
    ordered = False
    options: ClassVar[dict[str, Any]] = {
        "epochs": 1,
        "shuffle": True,
        "seed": 5,
        "columns": ["obs", "t"],
        "batch_size": 4,
    }


class TestZipped(JsonReaderSuite):
    @pytest.fixture(autouse=True)
    def _files(self, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.folder = tmp_path_factory.mktemp("zipped")
        zipped(self.folder / "a.zip", {path.name: path.read_bytes() for path in sorted(folder.iterdir())})


def test_records_are_served_as_they_were_written(folder: Path) -> None:
    with JsonReader(folder, epochs=1) as reader:
        assert [len(batch) for batch in reader] == [1, 2, 3, 4, 5, 6, 7]


def test_batches_have_exactly_the_size_asked_for_across_records_and_epochs(folder: Path) -> None:
    with JsonReader(folder, epochs=2, batch_size=10) as reader:
        sizes = [len(batch) for batch in reader]
    assert sizes == [10] * 5 + [6]
    with JsonReader(folder, epochs=2, batch_size=10, drop_last=True) as reader:
        assert [len(batch) for batch in reader] == [10] * 5


def test_every_epoch_is_another_permutation_that_the_seed_decides(folder: Path) -> None:
    def order(seed: int, epochs: int = 3) -> list[int]:
        with JsonReader(folder, epochs=epochs, shuffle=True, seed=seed) as reader:
            return [len(batch) for batch in reader]

    found = order(0)
    parts = [found[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(part) == [1, 2, 3, 4, 5, 6, 7] for part in parts)
    assert parts[0] != parts[1] != parts[2]
    assert order(0) == found != order(1)


def test_a_seed_from_the_system_is_kept_in_the_state(folder: Path) -> None:
    with JsonReader(folder, epochs=3, shuffle=True) as reader:
        reader.sample()
        state = json.loads(json.dumps(reader.state_dict()))
        rest = steps(reader)
    with JsonReader(folder, epochs=3, shuffle=True) as fresh:
        fresh.load_state_dict(state)
        assert steps(fresh) == rest


@pytest.mark.few(4)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.each_value_once
def test_ranks_get_each_record_once_whatever_their_number(world: int, shuffle: bool, folder: Path) -> None:
    found: list[list[int]] = []
    for rank in range(world):
        with JsonReader(folder, epochs=2, shard=(rank, world), shuffle=shuffle, seed=0) as reader:
            found.append([len(batch) for batch in reader])
    with JsonReader(folder, epochs=2, shuffle=shuffle, seed=0) as reader:
        everything = [len(batch) for batch in reader]
    assert found == [everything[rank::world] for rank in range(world)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_another_number_of_ranks_may_go_on_in_the_middle_of_an_epoch(shuffle: bool, folder: Path) -> None:
    options: Any = {"epochs": 3, "shuffle": shuffle, "seed": 0}
    with JsonReader(folder, **options) as reader:
        everything = [len(batch) for batch in reader]
    served, states = [], []
    for rank in range(2):
        with JsonReader(folder, shard=(rank, 2), **options) as reader:
            served += [len(reader.sample()) for _ in range(4)]
            states.append(reader.state_dict())
    if shuffle:
        assert states[0]["position"]["at"] == states[1]["position"]["at"]
    for rank in range(3):
        with JsonReader(folder, shard=(rank, 3), **options) as reader:
            reader.load_state_dict(states[rank % 2])
            served += [len(batch) for batch in reader]
    assert sorted(served) == sorted(everything)


def test_a_state_from_inside_a_batch_needs_the_same_number_of_ranks(folder: Path) -> None:
    with JsonReader(folder, shard=(0, 2)) as reader:
        reader.sample(2)
        state = reader.state_dict()
    with JsonReader(folder, shard=(0, 3)) as other, pytest.raises(StateError, match="ranks"):
        other.load_state_dict(state)


@pytest.mark.few(1)
@pytest.mark.each_value_once
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("n", [None, 1, 4, 9])
@pytest.mark.parametrize("shard", [(0, 1), (1, 2)])
def test_it_resumes_across_epochs(n: int | None, shuffle: bool, shard: tuple[int, int], folder: Path) -> None:
    make = functools.partial(JsonReader, folder, shuffle=shuffle, seed=1, shard=shard)
    assert_resumes(make, n=n, batches=16)


def test_it_resumes_over_bad_records_as_if_they_were_not_there(folder: Path) -> None:
    path = folder / "output-2024_worker-0_1.json"
    path.write_bytes(b"{scrap\n" + path.read_bytes() + lines(record(90, 2, obs=[[1.0]] * 2)))
    for shuffle in (False, True):
        make = functools.partial(JsonReader, folder, on_error="skip", shuffle=shuffle, seed=2)
        assert_resumes(make, batches=10)
        assert_resumes(make, n=5, batches=10)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"columns": ["t"]}, "columns"),
        ({"batch_size": 3}, "batch_size"),
        ({"on_error": "skip"}, "on_error"),
        ({"spaces": (Box(-99, 99, (2,)), Discrete(2))}, "spaces"),
        ({"seed": 2}, "seed"),
        ({"shuffle": False}, "shuffle"),
    ],
)
def test_a_state_of_other_options_names_what_differs(
    change: dict[str, Any], match: str, folder: Path
) -> None:
    options: Any = {"shuffle": True, "seed": 1}
    with JsonReader(folder, **options) as reader:
        state = reader.state_dict()
    with JsonReader(folder, **(options | change)) as other, pytest.raises(StateError, match=match):
        other.load_state_dict(state)


def test_a_state_of_another_order_needs_the_version_that_saved_it(folder: Path) -> None:
    with JsonReader(folder, shuffle=True, seed=0) as reader:
        state = reader.state_dict()
        state["position"]["order"] = 99
        with pytest.raises(StateError, match="version of rlio that began it"):
            reader.load_state_dict(state)


def test_unknown_options_in_a_state_are_shown_escaped(folder: Path) -> None:
    with JsonReader(folder, shuffle=True, seed=0) as reader:
        state = json.loads(json.dumps(reader.state_dict()))
        state["position"]["options"]["x\n"] = "y"
        with pytest.raises(StateError, match=r"options 'x\\n'"):
            reader.load_state_dict(state)


def test_dtypes_are_those_of_the_first_record_also_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [record(0, 1, x=[0.5]), *(record(n, 1, x=[n]) for n in range(1, 9))]
    (tmp_path / "a.json").write_bytes(lines(*records))
    opened, calls = InputFiles.open, iter(range(99))

    def fails_once(files: InputFiles, number: int, **options: Any) -> Any:
        if next(calls) == 2:  # When the first record is read to decide dtypes.
            raise StoreError("unreachable")
        return opened(files, number, **options)

    with JsonReader(tmp_path, shuffle=True, seed=1, epochs=1) as reader:
        monkeypatch.setattr(InputFiles, "open", fails_once)
        with pytest.raises(StoreError):
            reader.sample()
        assert {batch["x"].dtype for batch in reader} == {np.dtype(float)}


def test_a_state_of_other_files_is_refused(folder: Path) -> None:
    with JsonReader(folder) as reader:
        state = reader.state_dict()
    (folder / "more.json").write_bytes(lines(record(0, 1)))
    with JsonReader(folder) as other, pytest.raises(StateError, match="files"):
        other.load_state_dict(state)


def test_a_damaged_state_is_refused_with_the_key(folder: Path) -> None:
    for shuffle in (False, True):
        with JsonReader(folder, shuffle=shuffle, seed=0) as reader:
            good = reader.state_dict()
            for key in good["position"]["at"]:
                for value in (-1, 1.5, None, "x", True):
                    state = json.loads(json.dumps(good))
                    state["position"]["at"][key] = value
                    with pytest.raises(StateError, match=key):
                        reader.load_state_dict(state)


def test_the_state_stays_small(folder: Path) -> None:
    with JsonReader(folder, shuffle=True, batch_size=3, columns=["obs", "t"]) as reader:
        for _ in range(20):
            reader.sample()
        assert len(json.dumps(reader.state_dict())) < 1024


def test_columns_chooses_what_is_served(folder: Path) -> None:
    with JsonReader(folder, columns=["t", "dones"]) as reader:
        batch = reader.sample()
        assert list(batch) == ["t", "terminateds", "truncateds"]
        assert batch["dones"].tolist() == [False]
    reader = JsonReader(folder, columns=["t", "advantages"])
    with reader, pytest.raises(MissingColumn, match=r"record 0, column advantages"):
        reader.sample()


def test_a_reader_of_rows_has_a_length_and_an_epoch_and_one_of_whole_records_is_true(folder: Path) -> None:
    with JsonReader(folder, epochs=1) as whole, JsonReader(folder, epochs=2, batch_size=3) as rows:
        total = sum(map(len, whole))
        assert len(rows) == total
        assert rows.epoch == 0
        list(rows)
        assert rows.epoch == 2
        assert whole
        with pytest.raises(TypeError, match="pass batch_size="):
            len(whole)


def test_a_closed_reader_leaves_no_file_open(folder: Path) -> None:
    reader = JsonReader(folder, shuffle=True, seed=0)
    reader.sample()
    streams = list(reader._pass._records._streams)
    assert streams
    reader.close()
    assert all(stream.closed for stream in streams)


def test_text_streams_of_any_kind_work_for_members(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.json", lines(record(0, 3)))
    fsspec.filesystem("memory").pipe_file("/json-zip/a.zip", buffer.getvalue())
    for shuffle in (False, True):
        with JsonReader("memory://json-zip", epochs=1, shuffle=shuffle, seed=0) as reader:
            assert steps(reader) == [0, 1, 2]


# ---- data sets of rlio ----


def test_a_data_set_of_rlio_is_refused_with_the_reader_that_reads_it(tmp_path: Path) -> None:
    root = tmp_path / "ours"
    with JsonWriter(root, writer_id="w0") as writer:
        writer.write(SampleBatch(t=np.arange(3)))
    (shard,) = (root / "data" / "w0").glob("*.jsonl*")
    old = tmp_path / "old.json"
    old.write_text('{"type": "SampleBatch", "t": [1]}\n')
    for inputs in (root, root / "data" / "w0", shard, f"{root}/data/*/*.jsonl*", [old, root]):
        with pytest.raises(OptionError, match="DatasetReader"):
            JsonReader(inputs, epochs=1)
    renamed = tmp_path / "renamed.jsonl"
    renamed.write_bytes(shard.read_bytes())
    with pytest.raises(OptionError, match="DatasetReader"), JsonReader(renamed, epochs=1) as reader:
        reader.sample()
    with rlio.DatasetReader(root, epochs=1) as ours, JsonReader(old, epochs=1) as theirs:
        mixed = rlio.MixedInput(
            [(theirs, 1), (ours, 3)],
            batch_size=4,
        )
        assert sorted(mixed.sample()["t"].tolist()) == [0, 1, 1, 2]


@pytest.mark.parametrize(
    "columns",
    [
        {"rewards": [1.0, 2.0], "note": ["a", "b"]},
        {"note": "rewards", "rewards": [1.0, 2.0]},
        {"note": "a{b", "rewards": [1.0, 2.0]},
        {"note": 'a"rewards": [1]', "rewards": [1.0, 2.0]},
        {"rewards": [[1.0], [2.0]], "t": [0, 1]},
        {"infos": [{"rewards": [1]}, {}], "obs": [[1.0], [2.0]]},
        {"obs": [[1.0], [2.0]], "t": [0, 1], "eps_id": [7, 7], "terminateds": [False, True]},
    ],
    ids=["texts", "a text with its name", "a brace", "a quote", "nested", "in infos", "several"],
)
def test_records_are_counted_as_they_are_decoded(columns: dict[str, Any], tmp_path: Path) -> None:
    first = {"type": "SampleBatch", "rewards": [0.0], "obs": [[0.0]], "t": [0]}
    path = tmp_path / "a.json"
    path.write_text("\n".join(json.dumps(each) for each in (first, {"type": "SampleBatch", **columns})))
    records = JsonRecords(open_line_files(expand_inputs(path)), 1 << 20)
    assert records.has(1)
    assert records.rows_of(0) == 1
    assert records.rows_of(1) in (2, None)


@pytest.mark.parametrize(
    "text", ['{"type": "SampleBatch", "rewards": []}', '{"type": "X", "rewards": [1]}', "{"]
)
def test_what_is_no_plain_record_is_decoded_to_count_its_rows(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    records = JsonRecords(open_line_files(expand_inputs(path)), 1 << 20)
    assert records.has(0)
    assert not records.rows_of(0)


# ---- rows of different lengths ----


def test_lists_of_different_lengths_are_rows_of_a_ragged_column(tmp_path: Path) -> None:
    """A later record may have lists of one length, whole numbers among floats, or no item."""
    tokens = [[[1], [2, 3], []], [[4, 5], [6, 7], [8, 9]], [[], [], []]]
    points = [[[[0.5, 1.0]], [], []], [[[1, 2]], [[3, 4]], [[5, 6]]], [[], [], []]]
    lines = [
        {"type": "SampleBatch", "t": [3 * n, 3 * n + 1, 3 * n + 2], "tokens": ids, "obs": {"points": pairs}}
        for n, (ids, pairs) in enumerate(zip(tokens, points, strict=True))
    ]
    source = tmp_path / "a.json"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for options in ({"shuffle": False}, {"seed": 1, "cache": "memory", "shuffle": True, "batch_size": 2}):
        with rlio.read(source, epochs=1, **options) as reader:
            found: Any = rlio.concat_samples(list(reader))
        found = found[np.argsort(found["t"])]
        assert [row.tolist() for row in found["tokens"]] == [*chain(*tokens)]
        assert {row.dtype for row in found["tokens"]} == {np.dtype(np.int64)}
        assert [row.tolist() for row in found["obs"]["points"]] == [*chain(*points)]
        assert {(row.dtype.str, row.shape[1:]) for row in found["obs"]["points"]} == {("<f8", (2,))}
    with rlio.read(source, epochs=1, filter="len(tokens) > 1", shuffle=False) as reader:
        assert rlio.Ragged.of(rlio.concat_samples(list(reader))["tokens"]).lengths.tolist() == [2] * 4


def test_lists_that_begin_with_one_length_are_named_in_format_options(tmp_path: Path) -> None:
    lines = [
        {"type": "SampleBatch", "t": [0, 1], "obs": {"tokens": [[1, 2], [3, 4]], "x": [[0.5], [1.5]]}},
        {"type": "SampleBatch", "t": [2, 3], "obs": {"tokens": [[5], [6, 7]], "x": [[2.5], [3.5]]}},
    ]
    (tmp_path / "a.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SchemaError, match=r"any length at 'tokens'.*format_options=\{'lists'"):
        list(rlio.read(tmp_path, epochs=1))
    with rlio.read(tmp_path, epochs=1, format_options={"lists": ["obs/tokens"]}, shuffle=False) as reader:
        found: Any = rlio.concat_samples(list(reader))
    assert [row.tolist() for row in found["obs"]["tokens"]] == [[1, 2], [3, 4], [5], [6, 7]]
    assert found["obs"]["x"].shape == (4, 1)
    for names, error in (("obs", OptionError), (["t"], SchemaError)):
        with pytest.raises(error, match="lists"):
            list(rlio.read(tmp_path, epochs=1, format_options={"lists": names}))
