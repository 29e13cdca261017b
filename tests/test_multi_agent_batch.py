"""MultiAgentBatch: env steps, lockstep slices, joining, and its counting of units."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlio.batch import (
    MultiAgentBatch,
    SampleBatch,
    concat_samples,
    concat_samples_into_ma_batch,
    convert_ma_batch_to_sample_batch,
    copy_into,
    count_units,
    split_units,
)
from rlio.errors import MissingColumn, OptionError, SchemaError


def rows(pairs: list[tuple[int, int]], offset: int = 0) -> SampleBatch:
    """Rows with the given (eps_id, t); ``row`` numbers them."""
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return SampleBatch(eps_id=table[:, 0], t=table[:, 1], row=np.arange(len(table)) + offset)


def keys(batch: MultiAgentBatch) -> set[tuple[int, int]]:
    return {(int(e), int(t)) for b in batch.values() for e, t in zip(b["eps_id"], b["t"], strict=True)}


@pytest.fixture
def two() -> MultiAgentBatch:
    """Policy b joins late and leaves early; in episode 7, b has two agents."""
    return MultiAgentBatch(
        {"a": rows([(7, 0), (7, 1), (7, 2), (3, 0), (3, 1)]), "b": rows([(7, 1), (7, 1), (3, 0)], 100)}, 5
    )


class TestMapping:
    def test_policies_are_read_like_a_mapping(self, two: MultiAgentBatch) -> None:
        assert list(two) == list(two.keys()) == ["a", "b"]
        assert "a" in two
        assert two.get("c") is None
        assert dict(two.items())["b"] is two["b"] is two.policy_batches["b"]
        with pytest.raises(MissingColumn, match="'c'; the batch has 'a', 'b'"):
            two["c"]

    def test_both_kinds_of_batch_give_their_rows_by_policy(self, two: MultiAgentBatch) -> None:
        assert dict(two.policies()) == {policy_id: two[policy_id] for policy_id in two}
        rows = next(iter(two.values()))
        assert list(rows.policies()) == ["default_policy"]
        assert rows.policies()["default_policy"] is rows

    def test_steps_are_counted(self, two: MultiAgentBatch) -> None:
        assert (two.count, len(two), two.env_steps(), two.agent_steps()) == (5, 5, 5, 8)
        assert two.size_bytes() == 8 * 3 * 8

    @pytest.mark.parametrize(
        ("policies", "steps"), [({"a": {"x": [1]}}, 1), ({1: SampleBatch()}, 1), ({"a": SampleBatch()}, -1)]
    )
    def test_nonsense_is_refused(self, policies: Any, steps: int) -> None:
        with pytest.raises(SchemaError):
            MultiAgentBatch(policies, steps)

    def test_repr_shows_no_data(self, two: MultiAgentBatch) -> None:
        assert repr(two).startswith(
            "MultiAgentBatch(5 env steps: {'a': SampleBatch(5 steps: eps_id int64 (5,)"
        )


class TestTimeslices:
    def test_rows_of_one_step_stay_together_in_lockstep(self, two: MultiAgentBatch) -> None:
        parts = two.timeslices(2)
        assert [part.env_steps() for part in parts] == [2, 2, 1]
        assert [{k: b["row"].tolist() for k, b in part.items()} for part in parts] == [
            {"a": [0, 1], "b": [100, 101]},
            {"a": [2, 3], "b": [102]},
            {"a": [4]},
        ]

    def test_parts_are_views_where_rows_are_in_order(self, two: MultiAgentBatch) -> None:
        for part in two.timeslices(2):
            for policy, batch in part.items():
                assert np.shares_memory(batch["row"], two[policy]["row"])

    def test_the_values_of_ids_do_not_matter_for_the_order(self) -> None:
        batch = MultiAgentBatch({"a": rows([(9, 0), (9, 1), (1, 0)]), "b": rows([(9, 1), (1, 0)])}, 3)
        assert [sorted(keys(part)) for part in batch.timeslices(1)] == [[(9, 0)], [(9, 1)], [(1, 0)]]

    def test_interleaved_episodes_keep_the_order_of_the_policy_that_has_all_steps(self) -> None:
        pairs = [(1, 0), (2, 0), (1, 1), (2, 1)]
        batch = MultiAgentBatch({"b": rows([(2, 1)]), "a": rows(pairs)}, 4)
        assert [keys(part) for part in batch.timeslices(1)] == [{pair} for pair in pairs]

    def test_rows_that_come_agent_by_agent_are_cut_by_time(self) -> None:
        # The second agent of "a" acted before the first one, and in a step of its own.
        pairs = [(1, 2), (1, 3), (1, 4), (1, 1)]
        batch = MultiAgentBatch({"a": rows(pairs), "b": rows([(1, 3)])}, 4)
        assert [keys(part) for part in batch.timeslices(1)] == [{(1, t)} for t in (1, 2, 3, 4)]

    def test_no_policy_has_all_steps(self) -> None:
        batch = MultiAgentBatch({"a": rows([(1, 0), (1, 2)]), "b": rows([(1, 1), (1, 3)])}, 4)
        assert [keys(part) for part in batch.timeslices(2)] == [{(1, 0), (1, 1)}, {(1, 2), (1, 3)}]

    def test_rows_out_of_order_are_gathered(self) -> None:
        batch = MultiAgentBatch({"a": rows([(1, 0), (1, 1), (1, 2)]), "b": rows([(1, 2), (1, 0)])}, 3)
        parts = batch.timeslices(1)
        assert [part["b"]["row"].tolist() for part in parts if "b" in part] == [[1], [0]]

    def test_an_empty_batch_has_none(self) -> None:
        assert MultiAgentBatch({}, 0).timeslices(2) == []
        assert MultiAgentBatch({"a": rows([])}, 0).timeslices(2) == []

    def test_text_ids_work_and_mixed_ids_are_refused(self) -> None:
        text = SampleBatch(eps_id=["x", "x", "y"], t=[0, 1, 0])
        batch = MultiAgentBatch({"a": text, "b": text[:1]}, 3)
        assert [part.agent_steps() for part in batch.timeslices(1)] == [2, 1, 1]
        with pytest.raises(SchemaError, match="one dtype"):
            MultiAgentBatch({"a": text, "b": rows([(1, 0)])}, 3).timeslices(1)

    def test_a_policy_without_times_is_named(self) -> None:
        batch = MultiAgentBatch({"a": rows([(1, 0)]), "b": SampleBatch(eps_id=[1])}, 1)
        with pytest.raises(MissingColumn, match=r"policy 'b'.*column t"):
            batch.timeslices(1)

    def test_a_sole_policy_without_times_has_a_step_a_row(self) -> None:
        assert [len(p) for p in SampleBatch(a=[1, 2, 3]).as_multi_agent().timeslices(2)] == [2, 1]

    def test_a_size_below_one_is_refused(self, two: MultiAgentBatch) -> None:
        with pytest.raises(OptionError):
            two.timeslices(0)

    @given(
        st.lists(
            st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=12), min_size=1, max_size=3
        ),
        st.integers(1, 5),
    )
    @settings(max_examples=60, deadline=None)
    def test_every_row_is_in_one_part_and_every_step_too(
        self, tables: list[list[tuple[int, int]]], k: int
    ) -> None:
        batch = MultiAgentBatch({f"p{i}": rows(table, 100 * i) for i, table in enumerate(tables)}, 3)
        steps = keys(batch)
        parts = batch.timeslices(k)
        assert [part.env_steps() for part in parts] == [len(keys(part)) for part in parts]
        assert sum(len(keys(part)) for part in parts) == len(steps) == count_units(batch, "steps")
        assert all(part.env_steps() == k for part in parts[:-1])
        for policy, own in batch.items():
            found = [row for part in parts if policy in part for row in part[policy]["row"].tolist()]
            assert sorted(found) == own["row"].tolist()


class TestUnits:
    def test_a_step_is_all_rows_of_one_eps_id_and_t(self, two: MultiAgentBatch) -> None:
        assert count_units(two, "steps") == 5
        head, tail = split_units(two, 2, "steps")
        assert (head.env_steps(), head.agent_steps(), tail.env_steps(), tail.agent_steps()) == (2, 4, 3, 4)
        assert np.shares_memory(head["a"]["row"], two["a"]["row"])

    def test_an_episode_is_all_rows_of_one_eps_id(self, two: MultiAgentBatch) -> None:
        assert count_units(two, "episodes") == 2
        head, tail = split_units(two, 1, "episodes")
        assert {e for e, _ in keys(head)} == {7}
        assert {e for e, _ in keys(tail)} == {3}
        assert (head.env_steps(), tail.env_steps()) == (3, 2)

    @pytest.mark.parametrize("n", [0, 5])
    def test_splitting_at_an_end_leaves_an_empty_part(self, two: MultiAgentBatch, n: int) -> None:
        parts = split_units(two, n, "steps")
        assert [part.env_steps() for part in parts] == [n, 5 - n]
        assert concat_samples(list(parts)).equals(two)

    def test_sequences_are_refused(self, two: MultiAgentBatch) -> None:
        with pytest.raises(SchemaError, match="sequences"):
            count_units(two, "sequences")
        with pytest.raises(OptionError, match="5 steps"):
            split_units(two, 6, "steps")


class TestJoining:
    def test_timeslices_then_concat_is_the_identity(self, two: MultiAgentBatch) -> None:
        assert concat_samples(two.timeslices(1)).equals(two)

    def test_a_sample_batch_beside_is_the_default_policy(self, two: MultiAgentBatch) -> None:
        joined = concat_samples([SampleBatch(a=[1, 2]), two])
        assert isinstance(joined, MultiAgentBatch)
        assert list(joined) == ["default_policy", "a", "b"]
        assert joined.env_steps() == 7

    def test_sample_batches_alone_may_be_joined_into_one(self) -> None:
        joined = concat_samples_into_ma_batch([SampleBatch(a=[1]), SampleBatch(a=[2])])
        assert joined["default_policy"]["a"].tolist() == [1, 2]
        with pytest.raises(SchemaError, match="batch 0"):
            concat_samples_into_ma_batch([3])  # type: ignore[list-item]  # the error is the point

    def test_columns_are_aligned_per_policy(self, two: MultiAgentBatch) -> None:
        other = MultiAgentBatch({"a": SampleBatch(eps_id=[1], t=[0])}, 1)
        with pytest.raises(MissingColumn, match="row"):
            two.concat(other)
        assert concat_samples([two, other], columns="fill")["a"]["row"].tolist() == [0, 1, 2, 3, 4, 0]

    def test_only_the_default_policy_alone_converts(self, two: MultiAgentBatch) -> None:
        batch = SampleBatch(a=[1])
        assert convert_ma_batch_to_sample_batch(batch.as_multi_agent()) is batch
        assert convert_ma_batch_to_sample_batch(batch) is batch
        with pytest.raises(SchemaError, match="'a', 'b'"):
            convert_ma_batch_to_sample_batch(two)

    def test_wrap_as_needed_unwraps_only_the_default_policy(self) -> None:
        batch = SampleBatch(a=[1])
        assert MultiAgentBatch.wrap_as_needed({"default_policy": batch}, 1) is batch
        assert isinstance(MultiAgentBatch.wrap_as_needed({"a": batch}, 1), MultiAgentBatch)

    def test_copy_into_fills_every_policy(self, two: MultiAgentBatch) -> None:
        out = two.copy()
        for batch in out.values():
            batch["row"][:] = -1
        assert copy_into(out, two) is out
        assert out.equals(two)
        with pytest.raises(SchemaError):
            copy_into(out, two["a"])
        with pytest.raises(SchemaError):
            copy_into(two["a"].copy(), two)


class TestTransformations:
    def test_shuffle_keeps_each_policys_rows(self, two: MultiAgentBatch) -> None:
        shuffled = two.shuffle(0)
        assert shuffled.equals(two.shuffle(0))
        for policy in two:
            assert sorted(shuffled[policy]["row"]) == two[policy]["row"].tolist()

    def test_copy_compress_pickle_round_trip(self, two: MultiAgentBatch) -> None:
        assert two.copy().equals(two)
        assert not np.shares_memory(two.copy()["a"]["row"], two["a"]["row"])
        assert two.copy(shallow=True)["a"]["row"] is two["a"]["row"]
        names = (name for name in ["row", "t"])
        packed = two.compress(columns=names)
        assert packed["b"]["row"].dtype == packed["a"]["t"].dtype == object
        assert packed.decompress_if_needed().equals(two)
        assert pickle.loads(pickle.dumps(two)).equals(two)
        assert two.as_multi_agent() is two

    def test_tensors_by_policy(self, two: MultiAgentBatch) -> None:
        pytest.importorskip("torch")
        assert two.to_torch()["b"]["row"].tolist() == [100, 101, 102]
        tensors = two.to_torch(dtype={"row": "int32"}), two.to_device("cpu", dtype={"row": "int32"})
        assert {str(one[name]["row"].dtype) for one in tensors for name in one} == {"torch.int32"}
        assert two.to_device("cpu").timeslices(2)[0]["a"]["row"].tolist() == [0, 1]

    def test_nothing_mutates_the_batch(self, two: MultiAgentBatch) -> None:
        before = two.copy()
        two.timeslices(2), two.shuffle(1), two.compress(), two.concat(two), split_units(two, 3, "steps")
        two.wrap_as_needed(two.policy_batches, 5)
        assert two.equals(before)
        assert not two.equals(MultiAgentBatch(before.policy_batches, 4))


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=6, unique=True),
        min_size=1,
        max_size=3,
    ),
    st.data(),
)
def test_cutting_twice_is_cutting_once_further_on(
    policies: list[list[tuple[int, int]]], data: st.DataObject
) -> None:
    """Whatever order the steps come in: the rest of a cut goes on in the order of the whole."""
    total = len({step for steps in policies for step in steps})
    batch = MultiAgentBatch({f"p{i}": rows(steps) for i, steps in enumerate(policies)}, total)
    first = data.draw(st.integers(0, total))
    second = data.draw(st.integers(0, total - first))
    twice = split_units(split_units(batch, first, "steps")[1], second, "steps")[1]
    once = split_units(batch, first + second, "steps")[1]
    found = [{pid: part["row"].tolist() for pid, part in x.policy_batches.items()} for x in (twice, once)]
    assert found[0] == found[1]
