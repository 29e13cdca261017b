"""Cutting a group by the numbers of its stored rows: each policy's own rows of the range, and no others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored_batches import fresh_root, group_bytes, store

from rlio import JsonWriter, MultiAgentBatch, SampleBatch, open_dataset
from rlio.catalog.rows import cut_rows
from rlio.errors import CorruptData


def both(rows: int, first: int) -> MultiAgentBatch:
    t = np.arange(first, first + rows)
    part = SampleBatch(t=t, eps_id=t * 0)
    return MultiAgentBatch({"a": part, "b": part[1:]}, rows)


@given(st.lists(st.integers(2, 6), min_size=1, max_size=5), st.data())
def test_a_range_of_written_batches_is_those_batches(sizes: list[int], data: st.DataObject) -> None:
    parts, first = [], 0
    for size in sizes:
        parts.append(both(size, first))
        first += size
    start = data.draw(st.integers(0, len(parts) - 1))
    stop = data.draw(st.integers(start + 1, len(parts)))
    ends = np.cumsum([0, *(part.agent_steps() for part in parts)]).tolist()
    with group_bytes(1 << 20):
        opened = open_dataset(store(*parts))
    found = opened.open_shard(opened.segments[0]).read(0, rows=range(ends[start], ends[stop]))
    assert isinstance(found, MultiAgentBatch)
    steps = [t for part in parts[start:stop] for t in part["a"]["t"].tolist()]
    assert found["a"]["t"].tolist() == steps
    assert found["b"]["t"].tolist() == [t for part in parts[start:stop] for t in part["b"]["t"].tolist()]
    assert found.env_steps() == len(steps)


def test_a_policy_without_rows_in_the_range_is_left_out() -> None:
    batch = both(3, 0)
    cut = cut_rows(batch, range(3), None, uri="shard")
    assert isinstance(cut, MultiAgentBatch)
    assert list(cut) == ["a"]


def test_a_cut_within_a_sequence_is_refused_by_name() -> None:
    batch = SampleBatch(t=np.arange(6), seq_lens=[3, 3])
    assert cut_rows(batch, range(3, 6), None, uri="shard")["t"].tolist() == [3, 4, 5]
    with pytest.raises(CorruptData, match=r"rows 2 to 5 of a group are live.*in shard"):
        cut_rows(batch, range(2, 6), None, uri="shard")


def test_lines_are_cut_policy_by_policy() -> None:
    root = fresh_root()
    with JsonWriter(root) as writer:
        writer.write(both(3, 0))
    data = open_dataset(root)
    found = data.open_shard(data.segments[0]).read(0, rows=range(3, 5))
    assert isinstance(found, MultiAgentBatch)
    assert {pid: part["t"].tolist() for pid, part in found.items()} == {"b": [1, 2]}
