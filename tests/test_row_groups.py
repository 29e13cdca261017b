"""Cutting batches into row groups, and the buffers in which rows wait."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import repeat
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_batches import assert_same_bits, group_bytes, numbered

from rlio import MultiAgentBatch, SampleBatch
from rlio.batch.arrays import object_column
from rlio.batch.multi_agent import step_numbers
from rlio.errors import SchemaError
from rlio.schemas.row_groups import GroupBuffer, pieces_of
from rlio.schemas.schema import Schema
from rlio.schemas.streams import Times


@given(st.integers(1, 200), st.lists(st.integers(1, 50), min_size=1, max_size=5))
def test_plain_rows_are_cut_to_the_room_there_is(rows: int, rooms: list[int]) -> None:
    batch = numbered(rows)
    parts = pieces_of(batch, Schema.of(batch), rooms=(r for _ in repeat(None) for r in rooms), limit=7)
    sizes = [piece.rows for (piece,) in parts]
    assert sum(sizes) == rows
    expected = (r for _ in repeat(None) for r in rooms)
    assert all(size == next(expected) for size in sizes[:-1])
    assert np.concatenate([piece.arrays["t"] for (piece,) in parts]).tolist() == list(range(rows))
    assert [piece.attributes for (piece,) in parts] == ["{}"] + [None] * (len(parts) - 1)
    assert sum(piece.env_steps for (piece,) in parts) == rows


@given(st.lists(st.integers(1, 20), min_size=1, max_size=20), st.integers(1, 30))
def test_sequences_are_put_together_and_never_cut(lengths: list[int], limit: int) -> None:
    batch = numbered(sum(lengths), seq_lens=lengths)
    parts = pieces_of(batch, Schema.of(batch), rooms=repeat(1), limit=limit)
    found = [piece.arrays["seq_lens"].tolist() for (piece,) in parts]
    assert [n for part in found for n in part] == lengths
    for part, following in zip(found, [*found[1:], None], strict=True):
        assert sum(part) <= limit or len(part) == 1
        assert following is None or sum(part) + following[0] > limit


def test_stacks_that_share_no_frames_take_no_more_memory_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Schema.group_rows` counts a frame a row: a group ends where there are many more."""
    monkeypatch.setattr("rlio.schemas.row_groups._GROUP_FRAMES", 64 * 1000)
    monkeypatch.setattr("rlio.schemas.row_groups._PIECE_STACKS", 8 * 64 * 100)
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (24, 8, 8), np.uint8)
    stacks = np.stack([frames[i : i + 4] for i in range(21)])
    schema = Schema.of(SampleBatch(obs=stacks[:-1], new_obs=stacks[1:]))
    assert schema.stacked
    assert schema.group_rows == 1 << 16
    assert schema.batch_rows == 1 << 14
    random = SampleBatch(
        {name: rng.integers(0, 256, (700, 4, 8, 8), np.uint8) for name in ("obs", "new_obs")}
    )
    parts = pieces_of(random, schema, rooms=repeat(schema.group_rows), limit=schema.group_rows)
    assert [piece.rows for (piece,) in parts] == [100] * 7
    buffer, groups = GroupBuffer(schema), []
    for (piece,) in parts:
        buffer.append(piece)
        if buffer.is_full:
            groups.append(buffer.take().rows)
    assert groups == [200, 200, 200]  # Of 1600 frames each.


def test_cutting_copies_nothing() -> None:
    batch = numbered(100)
    parts = pieces_of(batch, Schema.of(batch), rooms=repeat(9), limit=9)
    assert all(np.shares_memory(piece.arrays["obs"], batch["obs"]) for (piece,) in parts)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30),
    st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_joint_steps_are_counted_as_readers_count_them(rows: list[tuple[int, int, int]], texts: bool) -> None:
    """Distinct (eps_id, t) over the policies, whose ids may be of unlike widths."""
    parts = {}
    for number in range(3):
        own = [(e, t) for pid, e, t in rows if pid == number]
        ids = (
            np.array([f"e{e}" for e, _ in own], object)
            if texts
            else np.array([e for e, _ in own], "i4i8i2"[2 * number :][:2])
        )
        if own:
            parts[f"p{number}"] = SampleBatch(eps_id=ids, t=np.array([t for _, t in own], np.int64))
    batch = MultiAgentBatch(parts, 1)
    schema = Schema.of(batch)
    buffer = GroupBuffer(schema)
    for piece in pieces_of(batch, schema, rooms=repeat(1), limit=1)[0]:
        buffer.append(piece)
    group = buffer.take()
    assert group.units == step_numbers(batch)[1] == len({(e, t) for _, e, t in rows})
    assert (group.rows, group.env_steps) == (len(rows), 1)


def test_a_buffer_keeps_nothing_of_the_group_before() -> None:
    valid = np.array([False, True, True])
    with group_bytes(1000):
        batch = SampleBatch(obs=np.zeros(3), new_obs=np.zeros(3), new_obs_valid=valid, seq_lens=[1, 2])
        schema = Schema.of(batch)
    buffer = GroupBuffer(schema)
    for flags in (valid, np.ones(3, bool)):
        batch["new_obs_valid"] = flags
        for (piece,) in pieces_of(batch, schema, rooms=repeat(9), limit=9):
            buffer.append(piece)
        group = buffer.take()
        assert group.missing is not None
        assert group.missing.tolist() == (~flags).tolist()
        values, has = group.columns["seq_lens"]
        assert values.tolist() == [1, 2]
        assert has is not None
        assert has.tolist() == [True, True, False]
        assert buffer.rows == 0


_NO_TIMES = Times()
_INFOS = [{"x": np.float64(n), "e": {"r": n}} for n in range(4)]
_FRAMES = np.random.default_rng(0).integers(0, 256, (20, 3, 8, 8), np.uint8)


def _written(infos: Any, **columns: Any) -> SampleBatch:
    return numbered(len(infos), infos=object_column(infos), **columns)


def _of_agents(one: Any, two: Any) -> MultiAgentBatch:
    ids = {"eps_id": np.zeros(4, np.int64)}
    return MultiAgentBatch({"one": _written(one, **ids), "two": _written(two, **ids)}, 4)


_VALID = np.array([True, False, True, True])
_STACKS = {
    name: np.stack([_FRAMES[i : i + 3, 0] for i in range(at, at + 4)])
    for at, name in enumerate(("obs", "new_obs"))
}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (_written([{}] * 4), _written(_INFOS)),
        (_written([{"x": 1.0}] * 4), _written([{"x": 1.0, "name": "text"}] * 4)),
        (
            _written([{"x": 1.0}] * 4, new_obs=np.ones((4, 2)), seq_lens=[1, 3]),
            _written([{"x": 1.0, "a": np.arange(3)}] * 4, new_obs=np.ones((4, 2)), seq_lens=[2, 2]),
        ),
        (
            _written([None] * 4, new_obs=np.ones((4, 2))),
            _written([None] * 4, new_obs=np.ones((4, 2)), new_obs_valid=_VALID),
        ),
        (_written([{}] * 4, **_STACKS), _written(_INFOS, **_STACKS)),
        (
            _written([{}] * 4, tokens=object_column([np.arange(n) for n in range(4)])),
            _written(_INFOS, tokens=object_column([np.arange(n) for n in range(4)])),
        ),
        (_of_agents([{}] * 4, [{"x": np.float64(2)}] * 4), _of_agents(_INFOS, _INFOS)),
    ],
)
def test_a_buffer_of_an_extended_schema_has_the_rows_as_if_written_under_it(before: Any, after: Any) -> None:
    earlier = Schema.of(before, info_keys=True)
    schema = earlier.extended(after, info_keys=True)
    assert schema != earlier
    assert schema.holds(earlier)
    assert not earlier.holds(schema)

    def put(buffer: GroupBuffer, batch: Any) -> GroupBuffer:
        for piece in pieces_of(batch, buffer.schema, rooms=repeat(99), limit=99)[0]:
            buffer.append(replace(piece, times=_NO_TIMES))
        return buffer

    extended = put(put(GroupBuffer(earlier), before).extended(schema), after)
    assert extended.room == put(put(GroupBuffer(schema), before), after).room
    found = extended.take()
    expected = put(put(GroupBuffer(schema), before), after).take()
    assert found.earlier == ((earlier, before.agent_steps()),)
    for each in fields(found):
        if each.name not in ("columns", "stacks", "earlier"):
            one, other = (getattr(group, each.name) for group in (found, expected))
            assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other, each.name
    assert found.columns.keys() == expected.columns.keys()
    for name, (values, has) in expected.columns.items():
        assert_same_bits(found.columns[name][0], values, name)
        assert np.array_equal(found.columns[name][1], has), name
    for name, pool in expected.stacks.items():
        assert np.array_equal(found.stacks[name].new_obs, pool.new_obs)
        assert np.array_equal(found.stacks[name].frames.values, pool.frames.values)
    assert extended.take().earlier == ()


@pytest.mark.parametrize(
    "batch",
    [
        numbered(4, obs=np.ones((4, 9), np.float64), infos=object_column([{}] * 4)),
        numbered(4, more=np.ones(4), infos=object_column([{}] * 4)),
        numbered(4, infos=object_column([{"x": 1.0}] * 4)),
        numbered(4),
        MultiAgentBatch({"default_policy": _written([{"x": np.float64(1)}] * 4)}, 4),
        _of_agents(_INFOS, _INFOS),
    ],
)
def test_a_schema_holds_only_rows_that_lack_keys_of_infos(batch: Any) -> None:
    one, other = (Schema.of(each, info_keys=True) for each in (_written([{"x": np.float64(1)}] * 4), batch))
    assert one.holds(one)
    assert other.holds(other)
    assert not other.holds(one)
    assert not one.holds(other)


def test_batches_of_the_wrong_layout_are_refused() -> None:
    batch = numbered(4, seq_lens=[2, 2])
    with pytest.raises(SchemaError, match="time-major"):
        pieces_of(batch.right_zero_pad(3, time_major=True), Schema.of(batch), rooms=repeat(9), limit=9)
