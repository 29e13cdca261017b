"""Rows come out of a frame of the log as they went in, whatever their columns are."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlio import Columns, MultiAgentBatch, SampleBatch
from rlio.errors import CorruptData
from rlio.schemas import log_frames
from rlio.schemas.log_frames import LogFrames
from rlio.schemas.row_groups import Piece, pieces_of
from rlio.schemas.schema import Schema
from rlio.schemas.streams import Times

_ROWS = 5
_NUMBERS = np.arange(_ROWS)


def _texts(*texts: Any) -> Any:
    values = np.empty(len(texts), object)
    values[:] = texts
    return values


_COLUMNS: dict[str, Any] = {
    **{kind: _NUMBERS.astype(kind) for kind in ("int8", "uint64", "float16", "float32", "float64", "bool")},
    "vectors": np.array([[0.0, -0.0], [np.nan, np.inf], [1, 2], [3, 4], [5, 6]], np.float32),
    "images": np.random.default_rng(0).integers(0, 255, (_ROWS, 24, 24, 3), np.uint8),
    "tensors": np.random.default_rng(0).normal(size=(_ROWS, 2, 3, 4)).astype(np.float16),
    "nothing": np.zeros((_ROWS, 0), np.float32),
    "dates": _NUMBERS.astype("M8[s]"),
    "turned": np.asfortranarray(np.arange(3.0 * _ROWS).reshape(_ROWS, 3)).astype(">f8", order="K"),
    "text": np.array(["", "a", "ü", "x" * 300, "\0"]),
    "infos": _texts({}, {"a": 1}, {"b": [1.5, None]}, {"c": "ü"}, {}),
}


def _check(batch: SampleBatch | MultiAgentBatch) -> LogFrames:
    schema = Schema.of(batch)
    frames = LogFrames(schema)
    for pieces in pieces_of(batch, schema, rooms=iter([3, 1000]), limit=3):
        found = frames.decode(b"".join(frames.encode(pieces)))
        assert len(found) == len(pieces)
        for one, other in zip(found, pieces, strict=True):
            assert (one.policy, one.rows, one.attributes, one.env_steps) == (
                other.policy,
                other.rows,
                other.attributes,
                other.env_steps,
            )
            assert one.arrays.keys() == other.arrays.keys()
            for name, values in other.arrays.items():
                assert one.arrays[name].shape == values.shape, name
                if values.dtype != object:
                    assert one.arrays[name].tobytes() == np.asarray(values, one.arrays[name].dtype).tobytes()
                else:
                    assert list(one.arrays[name]) == list(values)
    return frames


@pytest.mark.parametrize("name", list(_COLUMNS))
def test_a_column_of_any_kind_comes_back(name: str) -> None:
    _check(SampleBatch({Columns.T: _NUMBERS, name: _COLUMNS[name]}))


def test_sequences_and_their_states_come_back() -> None:
    _check(
        SampleBatch(
            t=_NUMBERS,
            seq_lens=np.array([2, 1, 2], np.int32),
            state_in_0=np.arange(6, dtype=np.float32).reshape(3, 2),
        )
    )


def test_final_observations_that_are_missing_stay_so() -> None:
    obs = np.arange(10, dtype=np.float32).reshape(_ROWS, 2)
    valid = np.array([True, True, False, True, False])
    _check(SampleBatch({Columns.OBS: obs, Columns.NEXT_OBS: obs + 1, Columns.NEXT_OBS_VALID: valid}))


def test_several_policies_with_columns_of_their_own_come_back() -> None:
    ids = {"eps_id": np.full(_ROWS, 7), "t": _NUMBERS}
    one = SampleBatch({**ids, "obs": _COLUMNS["vectors"]})
    two = SampleBatch({**ids, "obs": _COLUMNS["images"], "infos": _COLUMNS["infos"]})
    _check(MultiAgentBatch({"one": one, "two": two}, _ROWS))


def _stacks(rows: int = 12) -> SampleBatch:
    frames = np.random.default_rng(0).integers(0, 255, (rows + 4, 9, 8), np.uint8)
    stacks = np.stack([frames[i : i + 4] for i in range(rows + 1)])
    return SampleBatch(t=np.arange(rows), obs=stacks[:-1], new_obs=stacks[1:])


def test_frame_stacks_are_logged_as_frames_and_come_back() -> None:
    batch = _stacks()
    schema = Schema.of(batch)
    frames = LogFrames(schema)
    (pieces,) = pieces_of(batch, schema, rooms=iter([100]), limit=100)
    payload = b"".join(frames.encode(pieces))
    assert len(payload) < 17 * 9 * 8 + 1000  # Of 2 x 4 x 12 frames.
    (found,) = frames.decode(payload)
    (pool,) = found.stacks.values()
    assert pool.frames.at(pool.obs).tobytes() == batch["obs"].tobytes()
    assert pool.frames.at(pool.new_obs).tobytes() == batch["new_obs"].tobytes()
    assert found.arrays.keys() == {"t"}


def test_a_stack_of_frames_that_are_not_there_is_damage() -> None:
    batch = _stacks()
    frames = LogFrames(Schema.of(batch))
    (pieces,) = pieces_of(batch, frames.schema, rooms=iter([100]), limit=100)
    payload = bytearray(b"".join(frames.encode(pieces)))
    payload[-4:] = (16).to_bytes(4, "little")  # The last place: there are 16 frames.
    with pytest.raises(CorruptData, match="none of the 16 frames"):
        frames.decode(bytes(payload))


def test_what_a_caller_changes_later_is_not_logged() -> None:
    batch = SampleBatch(t=_NUMBERS.copy(), obs=_COLUMNS["vectors"].copy())
    frames = LogFrames(Schema.of(batch))
    (pieces,) = pieces_of(batch, frames.schema, rooms=iter([100]), limit=100)
    payload = frames.encode(pieces)
    batch["t"][:] = -1
    assert frames.decode(b"".join(payload))[0].arrays["t"].tolist() == _NUMBERS.tolist()


STARTS: dict[str, dict[Any, int]] = {
    "numbers": {0: 1_764_320_000_123, 2**63 - 1: 0, -5: 2**62},
    "beyond int64": {2**64 - 1: 1_764_320_000_123},
    "texts": {"a": 1_764_320_000_123, "ü": 5},
    "none": {},
}


def _with_times(times: Times) -> tuple[LogFrames, list[Piece]]:
    batch = SampleBatch(t=_NUMBERS)
    frames = LogFrames(Schema.of(batch))
    (pieces,) = pieces_of(batch, frames.schema, rooms=iter([100]), limit=100)
    return frames, [replace(piece, times=times) for piece in pieces]


@pytest.mark.parametrize("name", STARTS)
def test_the_starts_of_episodes_come_back(name: str) -> None:
    frames, pieces = _with_times(Times(1_764_320_000_999, STARTS[name]))
    (found,) = frames.decode(b"".join(frames.encode(pieces)))
    assert (found.times.written, found.times.began) == (1_764_320_000_999, STARTS[name])


def test_starts_in_the_json_of_earlier_versions_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    frames, pieces = _with_times(Times(7, STARTS["numbers"]))
    as_json = json.dumps(list(STARTS["numbers"].items())).encode()
    monkeypatch.setattr(log_frames, "_starts_bytes", lambda began: as_json)
    payload = b"".join(frames.encode(pieces))
    assert as_json in payload
    assert frames.decode(payload)[0].times.began == STARTS["numbers"]


def test_starts_of_which_a_time_is_missing_are_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    frames, pieces = _with_times(Times(7, STARTS["numbers"]))
    monkeypatch.setattr(log_frames, "_starts_bytes", lambda began: bytes(1 + 8 * 5))
    payload = b"".join(frames.encode(pieces))
    with pytest.raises(CorruptData):
        frames.decode(payload)


def test_bytes_behind_the_columns_are_damage() -> None:
    for columns in ({"t": _NUMBERS}, {"t": _NUMBERS, "text": _COLUMNS["text"]}):
        batch = SampleBatch(columns)
        frames = LogFrames(Schema.of(batch))
        (pieces,) = pieces_of(batch, frames.schema, rooms=iter([100]), limit=100)
        payload = b"".join(frames.encode(pieces))
        assert len(frames.decode(payload)) == 1
        with pytest.raises(CorruptData, match="of which"):
            frames.decode(payload + b"x")


def test_a_payload_of_another_schema_or_cut_short_is_damage() -> None:
    batch = SampleBatch(t=_NUMBERS, obs=_COLUMNS["vectors"])
    schema = Schema.of(batch)
    (pieces,) = pieces_of(batch, schema, rooms=iter([100]), limit=100)
    payload = b"".join(LogFrames(schema).encode(pieces))
    other = LogFrames(Schema.of(SampleBatch(t=_NUMBERS, obs=_COLUMNS["images"])))
    with pytest.raises(CorruptData):
        other.decode(payload)
    for size in (0, 3, 4, 20, len(payload) - 100):
        with pytest.raises(CorruptData):
            LogFrames(schema).decode(payload[:size])
