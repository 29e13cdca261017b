"""SampleBatch, one fact at a time; the laws are in test_batch_laws.py."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest

from rlio.batch import (
    MultiAgentBatch,
    SampleBatch,
    concat_samples,
    copy_into,
    count_units,
    object_column,
    split_units,
)
from rlio.batch.compressed_rows import CompressedRow
from rlio.errors import CorruptData, MissingColumn, OptionError, SchemaError


def sequence_batch(**layout: Any) -> SampleBatch:
    """Three sequences of 2, 3 and 1 steps."""
    return SampleBatch(
        obs=np.arange(12.0).reshape(6, 2),
        t=np.arange(6),
        infos=[{"i": i} for i in range(6)],
        state_in_0=np.arange(3.0)[:, None],
        seq_lens=[2, 3, 1],
        **layout,
    )


class TestConstruction:
    def test_lists_and_numbers_become_arrays_as_numpy_makes_them(self) -> None:
        batch = SampleBatch({"a": [1, 2], "b": [0.5, 1.5]}, c=[True, False], d=["x", "yy"])
        assert [batch[name].dtype for name in "abcd"] == [np.int64, np.float64, bool, object]
        assert SampleBatch(a=3)["a"].tolist() == [3]

    def test_pairs_and_keywords_are_taken_together(self) -> None:
        assert list(SampleBatch([("a", [1]), ("b", [2])], c=[3])) == ["a", "b", "c"]

    def test_arrays_are_kept_not_copied(self) -> None:
        array = np.zeros(3, np.float32)
        assert SampleBatch(a=array)["a"] is array

    def test_infos_and_lists_of_dicts_become_object_arrays(self) -> None:
        batch = SampleBatch(infos=[[1], [2]], obs=[{"a": 1}, {"a": 2}])
        assert batch["infos"].shape == batch["obs"].shape == (2,)
        assert batch["infos"][1] == [2]

    def test_length_mismatch_names_both_columns_and_lengths(self) -> None:
        with pytest.raises(SchemaError, match=r"'b' has 5 rows but column 'a' has 3"):
            SampleBatch(a=np.zeros(3), b=np.zeros(5))

    def test_length_mismatch_inside_of_a_nested_column_names_the_leaf(self) -> None:
        with pytest.raises(SchemaError, match=r"'obs/cam/1' has 2 rows but column 'obs/pos' has 3"):
            SampleBatch(obs={"pos": np.zeros(3), "cam": (np.zeros(3), np.zeros(2))})

    def test_ragged_lists_are_refused_with_what_to_do(self) -> None:
        with pytest.raises(SchemaError, match=r"object_column.*column a"):
            SampleBatch(a=[[1], [1, 2]])
        assert len(SampleBatch(a=object_column([[1], [1, 2]]))) == 2

    @pytest.mark.parametrize("value", [None, "text", b"bytes", object()])
    def test_what_is_no_column_is_refused(self, value: object) -> None:
        with pytest.raises(SchemaError, match="is not a column"):
            SampleBatch(a=value)

    def test_names_must_be_str(self) -> None:
        with pytest.raises(SchemaError, match="name is a str"):
            SampleBatch({1: [1]})  # type: ignore[dict-item]  # the error is the point

    def test_an_empty_batch_has_no_steps(self) -> None:
        assert len(SampleBatch()) == SampleBatch().count == 0
        assert list(SampleBatch()) == []

    def test_seq_lens_none_or_empty_list_is_left_out(self) -> None:
        assert "seq_lens" not in SampleBatch(a=[1], seq_lens=None)
        assert "seq_lens" not in SampleBatch(a=[1], seq_lens=[])

    def test_seq_lens_list_is_int32_and_an_array_keeps_its_dtype(self) -> None:
        assert sequence_batch()["seq_lens"].dtype == np.int32
        assert SampleBatch(a=[1], seq_lens=np.array([1], np.int64))["seq_lens"].dtype == np.int64

    def test_repr_shows_dtypes_and_shapes_but_never_data(self) -> None:
        batch = SampleBatch(obs={"x": np.full((2, 3), 77, np.uint8)}, infos=["secret", "secret"])
        assert repr(batch) == "SampleBatch(2 steps: obs {x: uint8 (2, 3)}, infos object (2,))"
        assert "2, 3 sequences" not in repr(sequence_batch())
        assert "6 steps, 3 sequences" in repr(sequence_batch())


class TestSequencesOfALayout:
    def test_seq_lens_must_sum_to_the_rows(self) -> None:
        with pytest.raises(SchemaError, match=r"'obs' has 5 rows, expected 6: the sum of column 'seq_lens'"):
            SampleBatch(obs=np.zeros(5), seq_lens=[2, 4])

    def test_states_have_one_row_a_sequence(self) -> None:
        with pytest.raises(SchemaError, match=r"'state_in_0' has 6 rows, expected 2"):
            SampleBatch(obs=np.zeros(6), seq_lens=[2, 4], state_in_0=np.zeros(6))

    def test_states_without_seq_lens_are_refused_unless_there_is_one_a_row(self) -> None:
        with pytest.raises(SchemaError, match="beside seq_lens"):
            SampleBatch(obs=np.zeros(6), state_in_0=np.zeros(2))
        assert len(SampleBatch(obs=np.zeros(2), state_in_0=np.zeros(2))[1:]["state_in_0"]) == 1

    def test_padded_rows_are_sequences_times_max_seq_len(self) -> None:
        batch = SampleBatch(obs=np.zeros(8), seq_lens=[2, 4], zero_padded=True)
        assert (len(batch), batch.max_seq_len) == (6, 4)
        with pytest.raises(SchemaError, match=r"'obs' has 6 rows, expected 8"):
            SampleBatch(obs=np.zeros(6), seq_lens=[2, 4], zero_padded=True)

    def test_padding_needs_seq_lens(self) -> None:
        with pytest.raises(SchemaError, match="needs seq_lens"):
            SampleBatch(obs=np.zeros(6), zero_padded=True)

    @pytest.mark.parametrize("lens", [[2, 0, 4], [-1, 7], [0.5], [[6]]])
    def test_impossible_lengths_are_refused(self, lens: list[Any]) -> None:
        with pytest.raises(SchemaError):
            SampleBatch(obs=np.zeros(6), seq_lens=np.array(lens))

    def test_max_seq_len_is_the_longest_sequence_and_never_stale(self) -> None:
        batch = sequence_batch()
        assert batch.max_seq_len == 3
        assert batch[:2].max_seq_len == 2
        with pytest.raises(SchemaError, match="max_seq_len is 2"):
            sequence_batch(max_seq_len=2)

    def test_count_comes_from_seq_lens(self) -> None:
        padded = sequence_batch().right_zero_pad(4)
        assert (len(padded), len(padded["obs"]), padded.agent_steps(), padded.env_steps()) == (6, 12, 6, 6)

    def test_seq_lens_cannot_be_deleted_from_under_the_states(self) -> None:
        batch = sequence_batch()
        with pytest.raises(SchemaError):
            del batch["seq_lens"]
        assert "seq_lens" in batch
        del batch["state_in_0"], batch["seq_lens"]
        assert len(batch[1:2]) == 1


class TestMapping:
    def test_a_missing_column_is_a_key_error_that_lists_the_others(self) -> None:
        with pytest.raises(MissingColumn, match="'rewards'; the batch has 'obs'"):
            SampleBatch(obs=[1])["rewards"]
        with pytest.raises(KeyError):
            SampleBatch(obs=[1])["rewards"]

    def test_keys_values_and_items_count_columns_not_rows(self) -> None:
        batch = SampleBatch(a=[1, 2, 3])
        assert (len(batch.keys()), len(batch.items()), len(batch.values())) == (1, 1, 1)
        assert dict(batch).keys() == {"a"}

    def test_get_pop_and_update_work(self) -> None:
        batch = SampleBatch(a=[1, 2])
        batch.update(b=[3, 4])
        assert batch.pop("b").tolist() == [3, 4]
        assert (batch.get("b"), batch.pop("b", 5)) == (None, 5)
        batch.clear()
        assert not batch.keys()

    def test_setting_a_column_of_another_length_leaves_the_batch_as_it_was(self) -> None:
        batch = SampleBatch(a=[1, 2], b=[1, 2])
        with pytest.raises(SchemaError, match="'a' has 2"):
            batch["b"] = [1, 2, 3]
        assert batch["b"].tolist() == [1, 2]

    def test_len_follows_the_columns(self) -> None:
        batch = SampleBatch()
        batch["a"] = [1, 2]
        assert len(batch) == 2
        batch["a"] = [1, 2, 3]
        assert len(batch) == batch.count == 3
        del batch["a"]
        assert len(batch) == 0

    def test_an_int_is_refused_with_what_to_write_instead(self) -> None:
        with pytest.raises(OptionError, match=r"batch\[1:2\]"):
            SampleBatch(a=[1, 2])[1]

    def test_equality_is_identity(self) -> None:
        batch = SampleBatch(a=[1])
        assert batch == batch
        assert batch != batch.copy()
        assert len({batch, batch.copy()}) == 2

    def test_the_interceptor_is_applied_once_and_again_after_a_change(self) -> None:
        batch, calls = SampleBatch(a=[1]), []

        def intercept(column: Any) -> Any:
            calls.append(column)
            return column * 10

        batch.set_get_interceptor(intercept)
        assert [batch["a"].tolist(), batch["a"].tolist(), len(calls)] == [[10], [10], 1]
        batch["a"] = [2]
        assert batch["a"].tolist() == [20]
        assert batch.copy()["a"].tolist() == [20]
        assert batch.shuffle(0)["a"].tolist() == [2]
        batch.set_get_interceptor(None)
        assert batch["a"].tolist() == [2]

    def test_training_flag_travels(self) -> None:
        batch = SampleBatch(a=[1, 2])
        batch.set_training()
        assert batch[:1].is_training
        assert batch.copy().is_training
        assert pickle.loads(pickle.dumps(batch)).is_training


class TestDones:
    def test_reading_gives_terminated_or_truncated(self) -> None:
        batch = SampleBatch(terminateds=[True, False, False], truncateds=[False, True, False])
        assert batch["dones"].tolist() == [True, True, False]
        assert "dones" in batch
        assert "dones" not in batch.keys()  # noqa: SIM118  # keys() is another claim than `in`
        assert batch.get("dones") is not None

    @pytest.mark.parametrize("name", ["terminateds", "truncateds"])
    def test_one_flag_is_enough_and_the_result_is_no_alias(self, name: str) -> None:
        batch = SampleBatch({name: [True, False]})
        batch["dones"][:] = True
        assert batch["dones"].tolist() == [True, False]

    def test_without_flags_there_are_none(self) -> None:
        assert "dones" not in SampleBatch(a=[1])
        with pytest.raises(MissingColumn):
            SampleBatch(a=[1])["dones"]

    def test_writing_says_why_not(self) -> None:
        batch = SampleBatch(a=[1])
        with pytest.raises(SchemaError, match="terminateds OR truncateds"):
            batch["dones"] = [True]
        with pytest.raises(SchemaError):
            SampleBatch(dones=[True])
        with pytest.raises(SchemaError):
            SampleBatch({"dones": np.array([True])})

    def test_an_intercepted_dones_follows_its_flags(self) -> None:
        batch = SampleBatch(terminateds=[False])
        batch.set_get_interceptor(lambda column: column)
        assert batch["dones"].tolist() == [False]
        batch["terminateds"] = [True]
        assert batch["dones"].tolist() == [True]

    def test_ends_and_trajectories(self) -> None:
        batch = SampleBatch(
            terminateds=[False, True, False], truncateds=[False, False, True], eps_id=[1, 1, 2]
        )
        assert batch.is_terminated_or_truncated()
        assert not batch[:1].is_terminated_or_truncated()
        assert not batch[0:0].is_terminated_or_truncated()
        assert batch[:2].is_single_trajectory()
        assert not batch.is_single_trajectory()
        assert not SampleBatch(terminateds=[False] * 2, eps_id=[1, 2]).is_single_trajectory()


class TestSlicing:
    def test_an_empty_slice_is_empty(self) -> None:
        assert len(SampleBatch(a=[1, 2])[0:0]) == 0

    def test_the_step_is_honoured(self) -> None:
        assert SampleBatch(a=[0, 1, 2, 3, 4])[::2]["a"].tolist() == [0, 2, 4]
        with pytest.raises(OptionError, match="step"):
            SampleBatch(a=[1])[::0]

    def test_slices_are_views(self) -> None:
        batch = SampleBatch(a=np.zeros(4), obs={"x": np.zeros((4, 2))})
        part = batch[1:3]
        part["a"][0], part["obs"]["x"][0] = 5, 6
        assert batch["a"][1] == 5
        assert batch["obs"]["x"][1, 0] == 6

    def test_a_slice_of_sequences_falls_on_boundaries(self) -> None:
        part = sequence_batch()[2:6]
        assert part["seq_lens"].tolist() == [3, 1]
        assert part["state_in_0"].ravel().tolist() == [1, 2]
        assert [info["i"] for info in part["infos"]] == [2, 3, 4, 5]

    def test_a_slice_that_cuts_a_sequence_names_the_nearest_boundaries(self) -> None:
        with pytest.raises(SchemaError, match="at step 4: the nearest boundaries are 2 and 5"):
            sequence_batch()[2:4]
        with pytest.raises(SchemaError, match="step 2"):
            sequence_batch()[::2]

    @pytest.mark.parametrize("layout", ["ragged", "padded", "time-major"])
    def test_sequences_slices_by_sequence_in_every_layout(self, layout: str) -> None:
        batch = sequence_batch()
        if layout != "ragged":
            batch = batch.right_zero_pad(4, time_major=layout == "time-major")
        part = batch.sequences(1)
        assert part["seq_lens"].tolist() == [3, 1]
        assert part.unpad().equals(sequence_batch()[2:])
        assert np.shares_memory(part["obs"], batch["obs"])
        assert part.equals(batch[2:])
        assert len(batch.sequences(-1)) == 1
        assert len(batch.sequences(2, 1)) == 0

    def test_sequences_of_plain_rows_are_refused(self) -> None:
        with pytest.raises(MissingColumn, match="seq_lens"):
            SampleBatch(a=[1]).sequences()

    def test_index_arrays_and_masks_take_rows(self) -> None:
        batch = SampleBatch(a=[10, 11, 12], obs=({"x": np.arange(3)},))
        taken = batch[np.array([2, 0, -1])]
        assert taken["a"].tolist() == [12, 10, 12]
        assert taken["obs"][0]["x"].tolist() == [2, 0, 2]
        assert batch[np.array([True, False, True])]["a"].tolist() == [10, 12]
        assert len(batch[[]]) == 0
        taken["a"][:] = 0
        assert batch["a"].tolist() == [10, 11, 12]

    @pytest.mark.parametrize(
        ("key", "error"),
        [
            (np.array([3]), OptionError),
            (np.array([True]), SchemaError),
            (np.array([0.5]), OptionError),
            (np.zeros((1, 1), int), OptionError),
        ],
    )
    def test_impossible_indices_are_refused(self, key: np.ndarray, error: type[Exception]) -> None:
        with pytest.raises(error):
            SampleBatch(a=[1, 2, 3])[key]

    def test_rows_of_sequences_are_not_picked(self) -> None:
        with pytest.raises(SchemaError, match="cut its sequences"):
            sequence_batch()[np.array([0])]


class TestCut:
    def test_without_sequences_it_is_a_slice(self) -> None:
        assert SampleBatch(a=[0, 1, 2, 3]).slice(1, 3)["a"].tolist() == [1, 2]

    def test_a_negative_start_left_pads_with_zeros(self) -> None:
        part = SampleBatch(a=np.array([5, 6, 7], np.int16), infos=[1, 2, 3]).slice(-2, 2)
        assert part["a"].tolist() == [0, 0, 5, 6]
        assert part["a"].dtype == np.int16
        assert part["infos"].tolist() == [None, None, 1, 2]

    def test_sequences_are_shortened_at_both_ends(self) -> None:
        part = sequence_batch().slice(1, 4)
        assert part["t"].tolist() == [1, 2, 3]
        assert part["seq_lens"].tolist() == [1, 2]
        assert part["state_in_0"].ravel().tolist() == [0, 1]

    def test_left_padding_joins_the_first_sequence(self) -> None:
        part = sequence_batch().slice(-2, 3)
        assert part["t"].tolist() == [0, 0, 0, 1, 2]
        assert part["seq_lens"].tolist() == [4, 1]

    @pytest.mark.parametrize("start", range(-2, 8))
    def test_every_cut_is_a_legal_batch(self, start: int) -> None:
        for end in range(8):
            part = sequence_batch().slice(start, end)
            rows = max(0, min(end, 6) - start if start < 6 else 0)
            assert part["seq_lens"].sum() == len(part["t"]) == rows, end
            SampleBatch(dict(part))

    def test_states_may_be_chosen(self) -> None:
        part = sequence_batch().slice(2, 4, 1, 2)
        assert (part["seq_lens"].tolist(), part["state_in_0"].ravel().tolist()) == ([2], [1])
        with pytest.raises(SchemaError, match="chosen rows are 4"):
            sequence_batch().slice(2, 6, 1, 2)
        with pytest.raises(OptionError):
            sequence_batch().slice(2, 6, 1)
        with pytest.raises(SchemaError, match="unpad"):
            sequence_batch().right_zero_pad(3).slice(0, 1)


class TestSplitting:
    def test_a_size_that_does_not_divide_ends_with_a_shorter_part(self) -> None:
        assert [len(p) for p in SampleBatch(a=np.arange(10)).timeslices(4)] == [4, 4, 2]

    def test_more_slices_than_rows_gives_empty_ones(self) -> None:
        assert [len(p) for p in SampleBatch(a=np.arange(2)).timeslices(num_slices=4)] == [0, 1, 0, 1]

    def test_an_empty_batch_has_no_timeslices(self) -> None:
        assert SampleBatch(a=np.zeros(0)).timeslices(3) == []

    def test_sequences_are_never_cut(self) -> None:
        parts = sequence_batch().timeslices(2)
        assert [p["seq_lens"].tolist() for p in parts] == [[2], [3], [1]]
        assert [p["seq_lens"].tolist() for p in sequence_batch().timeslices(5)] == [[2, 3], [1]]

    @pytest.mark.parametrize(("size", "num"), [(None, None), (1, 1), (0, None), (None, 0), (-1, None)])
    def test_nonsense_is_refused(self, size: int | None, num: int | None) -> None:
        with pytest.raises(OptionError):
            SampleBatch(a=[1]).timeslices(size, num)

    def test_episodes_are_runs_of_ids(self) -> None:
        batch = SampleBatch(eps_id=[1, 1, 2, 1])
        assert [p["eps_id"].tolist() for p in batch.split_by_episode()] == [[1, 1], [2], [1]]

    def test_episodes_end_at_either_flag_and_the_rest_is_kept(self) -> None:
        batch = SampleBatch(terminateds=[0, 1, 0, 0], truncateds=[False, False, True, False])
        assert [len(p) for p in batch.split_by_episode()] == [2, 1, 1]

    def test_the_key_may_be_chosen(self) -> None:
        batch = SampleBatch(eps_id=["a", "a", "b"], terminateds=[True, False, False])
        assert [len(p) for p in batch.split_by_episode()] == [2, 1]
        assert [len(p) for p in batch.split_by_episode("dones")] == [1, 2]
        with pytest.raises(OptionError):
            batch.split_by_episode("t")

    def test_nothing_to_tell_episodes_apart_is_an_error(self) -> None:
        with pytest.raises(MissingColumn, match="eps_id"):
            SampleBatch(a=[1]).split_by_episode()
        with pytest.raises(MissingColumn):
            SampleBatch(terminateds=[True]).split_by_episode("eps_id")

    def test_an_empty_batch_has_no_episodes(self) -> None:
        assert SampleBatch(eps_id=np.zeros(0)).split_by_episode() == []

    def test_rows_are_dicts_with_nested_values(self) -> None:
        rows = list(SampleBatch(obs={"x": np.array([[1], [2]])}, infos=[{"a": 1}, {}]).rows())
        assert rows[1]["obs"]["x"].tolist() == [2]
        assert rows[0]["infos"] == {"a": 1}

    def test_rows_of_sequences_leave_padding_out(self) -> None:
        rows = list(sequence_batch().right_zero_pad(4).rows())
        assert [row["t"] for row in rows] == list(range(6))
        assert {row["seq_lens"] for row in rows} == {1}
        assert [row["state_in_0"] is None for row in rows] == [False, True, False, True, True, False]

    def test_columns_come_in_the_order_asked_for(self) -> None:
        assert [c.tolist() for c in SampleBatch(a=[1], b=[2]).columns(["b", "a"])] == [[2], [1]]


class TestPadding:
    def test_rows_after_a_sequence_are_zero(self) -> None:
        padded = sequence_batch().right_zero_pad(3)
        assert padded["t"].tolist() == [0, 1, 0, 2, 3, 4, 5, 0, 0]
        assert padded["infos"][2] is None
        assert (padded.zero_padded, padded.max_seq_len) == (True, 3)
        assert padded["state_in_0"].shape == (3, 1)

    def test_time_major_swaps_the_first_two_axes(self) -> None:
        padded = sequence_batch().right_zero_pad(3, time_major=True)
        assert padded["obs"].shape == (3, 3, 2)
        assert padded["t"][:, 1].tolist() == [2, 3, 4]
        assert padded.time_major

    def test_padding_a_padded_batch_pads_again(self) -> None:
        batch = sequence_batch()
        assert batch.right_zero_pad(3).right_zero_pad(5).equals(batch.right_zero_pad(5))

    def test_a_sequence_too_long_is_named(self) -> None:
        with pytest.raises(SchemaError, match="sequence 1 has 3 steps but max_seq_len=2"):
            sequence_batch().right_zero_pad(2)

    def test_padding_needs_sequences(self) -> None:
        with pytest.raises(MissingColumn, match="seq_lens"):
            SampleBatch(a=[1]).right_zero_pad(2)


class TestConcat:
    def test_nested_columns_join_leaf_by_leaf(self) -> None:
        parts = [SampleBatch(obs={"a": [i], "b": (np.array([[i]]),)}) for i in range(3)]
        joined = concat_samples(parts)
        assert joined["obs"]["a"].tolist() == [0, 1, 2]
        assert joined["obs"]["b"][0].shape == (3, 1)

    def test_nothing_gives_an_empty_batch(self) -> None:
        assert list(concat_samples([])) == []

    def test_empty_batches_are_passed_over(self) -> None:
        joined = concat_samples([SampleBatch(), SampleBatch(x=np.zeros(0)), SampleBatch(a=[1])])
        assert dict(joined.items()).keys() == {"a"}

    def test_all_empty_keeps_columns_and_dtypes(self) -> None:
        joined = concat_samples([SampleBatch(), SampleBatch(a=np.zeros((0, 3), np.float32))])
        assert joined["a"].dtype == np.float32
        assert joined["a"].shape == (0, 3)

    @pytest.mark.parametrize(
        ("first", "second", "joint"),
        [
            ("f4", "f4", "f4"),
            ("f4", "f8", "f8"),
            ("i4", "i8", "i8"),
            ("u1", "u2", "u2"),
            (">f4", ">f4", ">f4"),
        ],
    )
    def test_dtypes_are_kept_or_widened_within_their_kind(self, first: str, second: str, joint: str) -> None:
        batch = concat_samples([SampleBatch(a=np.zeros(1, first)), SampleBatch(a=np.zeros(1, second))])
        assert batch["a"].dtype == joint

    @pytest.mark.parametrize(
        ("first", "second"), [("f4", "i8"), ("i8", "u8"), ("O", "i8"), ("?", "i8"), ("U1", "O")]
    )
    def test_dtypes_that_would_lose_are_refused_with_the_column(self, first: str, second: str) -> None:
        with pytest.raises(SchemaError, match="column a"):
            concat_samples([SampleBatch(a=np.zeros(1, first)), SampleBatch(a=np.zeros(1, second))])

    def test_unlike_row_shapes_and_nesting_are_refused(self) -> None:
        with pytest.raises(SchemaError, match=r"\(2,\).*\(3,\).*column a"):
            concat_samples([SampleBatch(a=np.zeros((1, 2))), SampleBatch(a=np.zeros((1, 3)))])
        with pytest.raises(SchemaError, match="column a"):
            concat_samples([SampleBatch(a={"x": [1]}), SampleBatch(a={"y": [1]})])

    def test_a_missing_column_is_an_error_whichever_batch_lacks_it(self) -> None:
        one, two = SampleBatch(a=[1]), SampleBatch(a=[2], b=[2])
        for parts in ([one, two], [two, one]):
            with pytest.raises(MissingColumn, match="no column 'b'"):
                concat_samples(parts)

    def test_intersect_drops_it(self) -> None:
        joined = concat_samples([SampleBatch(a=[1]), SampleBatch(a=[2], b=[2])], columns="intersect")
        assert list(joined) == ["a"]

    def test_fill_puts_zeros(self) -> None:
        joined = concat_samples(
            [SampleBatch(a=[1]), SampleBatch(a=[2], b=np.ones((1, 2), np.uint8), infos=[{"x": 1}])],
            columns="fill",
        )
        assert joined["b"].tolist() == [[0, 0], [1, 1]]
        assert joined["b"].dtype == np.uint8
        assert joined["infos"].tolist() == [None, {"x": 1}]

    def test_a_filled_new_obs_is_marked_invalid(self) -> None:
        joined = concat_samples(
            [SampleBatch(obs=[1.0]), SampleBatch(obs=[2.0], new_obs=[3.0])], columns="fill"
        )
        assert joined["new_obs"].tolist() == [0, 3]
        assert joined["new_obs_valid"].tolist() == [False, True]

    @pytest.mark.parametrize("columns", ["error", "intersect", "fill"])
    def test_a_batch_without_new_obs_valid_has_only_valid_ones(self, columns: Any) -> None:
        parts = [SampleBatch(new_obs=[1.0, 0.0], new_obs_valid=[True, False]), SampleBatch(new_obs=[2.0])]
        assert concat_samples(parts, columns=columns)["new_obs_valid"].tolist() == [True, False, True]

    def test_intersect_drops_the_validity_with_the_new_obs(self) -> None:
        parts = [SampleBatch(a=[1], new_obs=[1.0], new_obs_valid=[False]), SampleBatch(a=[2])]
        assert list(concat_samples(parts, columns="intersect")) == ["a"]

    def test_fill_in_every_layout(self) -> None:
        for layout in ({}, {"max_seq_len": 4}, {"max_seq_len": 4, "time_major": True}):
            one = sequence_batch()
            two = sequence_batch()
            two["extra"], two["state_in_1"] = np.ones((6, 2)), np.ones((3, 5))
            if layout:
                one, two = one.right_zero_pad(**layout), two.right_zero_pad(**layout)
            joined = concat_samples([one, two], columns="fill").unpad()
            assert joined["extra"].tolist() == [[0, 0]] * 6 + [[1, 1]] * 6
            assert joined["state_in_1"].shape == (6, 5)
            SampleBatch(dict(joined))

    def test_updates_are_averaged_over_steps_that_know_them(self) -> None:
        def part(rows: int, updates: float | None) -> SampleBatch:
            return SampleBatch(a=np.zeros(rows), num_grad_updates=updates)

        assert concat_samples([part(1, 10), part(3, 2), part(5, None)]).num_grad_updates == 4
        assert concat_samples([part(1, None), part(2, None)]).num_grad_updates is None

    def test_unlike_layouts_are_refused(self) -> None:
        plain, ragged = SampleBatch(a=[1]), SampleBatch(a=[1], seq_lens=[1])
        padded, wider = ragged.right_zero_pad(2), ragged.right_zero_pad(3)
        wide = ragged.right_zero_pad(2, time_major=True)
        for pair in ([plain, ragged], [ragged, padded], [padded, wider], [padded, wide]):
            with pytest.raises(SchemaError):
                concat_samples(pair)
        with pytest.raises(SchemaError, match="max_seq_len"):
            concat_samples([SampleBatch(a=[1], max_seq_len=3), plain])

    def test_max_seq_len_is_the_larger(self) -> None:
        joined = concat_samples([sequence_batch(max_seq_len=9), sequence_batch()])
        assert joined.max_seq_len == 9

    def test_what_is_no_batch_is_refused(self) -> None:
        with pytest.raises(SchemaError, match="batch 1 is a dict"):
            concat_samples([SampleBatch(a=[1]), {"a": [1]}])  # type: ignore[list-item]  # the point
        with pytest.raises(OptionError, match="columns"):
            concat_samples([], columns="outer")  # type: ignore[arg-type]  # the point

    def test_the_method_joins_two(self) -> None:
        assert SampleBatch(a=[1]).concat(SampleBatch(a=[2]))["a"].tolist() == [1, 2]


class TestUnits:
    def test_steps_sequences_and_episodes_are_counted(self) -> None:
        batch = sequence_batch()
        batch["eps_id"] = [0, 0, 0, 0, 0, 1]
        assert [count_units(batch, unit) for unit in ("steps", "sequences", "episodes")] == [6, 3, 2]

    @pytest.mark.parametrize(
        ("unit", "sizes"), [("steps", (2, 4)), ("sequences", (5, 1)), ("episodes", (6, 0))]
    )
    def test_splitting_gives_exactly_n_units_as_views(self, unit: str, sizes: tuple[int, int]) -> None:
        batch = sequence_batch()
        batch["eps_id"] = [0, 0, 0, 0, 0, 1]
        head, tail = split_units(batch, 2, unit)
        assert (len(head), len(tail)) == sizes
        assert np.shares_memory(head["obs"], batch["obs"])

    def test_too_many_are_refused(self) -> None:
        with pytest.raises(OptionError, match="2 steps"):
            split_units(SampleBatch(a=[1, 2]), 3, "steps")
        with pytest.raises(OptionError, match="unit"):
            count_units(SampleBatch(a=[1, 2]), "rows")
        with pytest.raises(MissingColumn):
            count_units(SampleBatch(a=[1, 2]), "sequences")


class TestCopyInto:
    def test_arrays_are_overwritten_in_place(self) -> None:
        out = SampleBatch(a=np.zeros(2), obs={"x": np.zeros(2, np.uint8)}, infos=[None, None])
        arrays = [out["a"], out["obs"]["x"]]
        source = SampleBatch(a=[1.0, 2.0], obs={"x": np.ones(2, np.uint8)}, infos=[1, 2], num_grad_updates=3)
        assert copy_into(out, source) is out
        assert out.equals(source)
        assert out["a"] is arrays[0]
        assert out["obs"]["x"] is arrays[1]
        assert out.num_grad_updates == 3

    @pytest.mark.parametrize(
        "bad",
        [
            SampleBatch(b=[1.0, 2.0], a=[1.0, 2.0]),
            SampleBatch(b=[1.0, 2.0], a=[1, 2]),
            SampleBatch(b=[1.0]),
            SampleBatch(b={"x": [1.0, 2.0]}),
        ],
    )
    def test_what_does_not_fit_is_refused_before_anything_is_written(self, bad: SampleBatch) -> None:
        out = SampleBatch(b=np.zeros(2))
        with pytest.raises(SchemaError):
            copy_into(out, bad)
        assert out["b"].tolist() == [0, 0]

    def test_subclasses_of_batches_are_batches(self) -> None:
        class Mine(SampleBatch):
            pass

        class Ours(MultiAgentBatch):
            pass

        source = SampleBatch(b=[1.0, 2.0])
        out = Mine(b=np.zeros(2))
        assert copy_into(out, source)["b"].tolist() == [1, 2]
        assert copy_into(SampleBatch(b=np.zeros(2)), out)["b"].tolist() == [1, 2]
        ours = Ours({"p": SampleBatch(b=np.zeros(2))}, 2)
        assert copy_into(ours, MultiAgentBatch({"p": source}, 2))["p"]["b"].tolist() == [1, 2]

    @pytest.mark.parametrize("bad", [None, 3, {"b": np.zeros(2)}])
    def test_what_is_no_batch_is_refused(self, bad: Any) -> None:
        with pytest.raises(SchemaError, match="must be alike"):
            copy_into(bad, SampleBatch(b=[1.0, 2.0]))
        with pytest.raises(SchemaError, match="must be alike"):
            copy_into(bad, bad)

    def test_a_read_only_array_is_refused(self) -> None:
        array = np.zeros(1)
        array.flags.writeable = False
        with pytest.raises(SchemaError, match="read-only"):
            copy_into(SampleBatch(a=np.zeros(1), b=array), SampleBatch(a=[1.0], b=[1.0]))


class TestCompression:
    @pytest.mark.parametrize("bulk", [False, True])
    @pytest.mark.parametrize(
        "dtype",
        ["u1", "f4", ">f8", "i8", "?", "f2", "c16", "U3", "M8[s]"],
        ids=lambda d: d.replace(">", "be"),
    )
    def test_dtype_shape_and_values_come_back(self, bulk: bool, dtype: str) -> None:
        values = np.arange(6).astype("i8").astype(dtype).reshape(3, 2)
        batch = SampleBatch(obs={"a": (values,), "b": values[:, 0]}, t=[0, 1, 2])
        packed = batch.compress(bulk, ["obs"])
        assert isinstance(packed["obs"]["a"][0][0], CompressedRow)
        assert packed.decompress_if_needed().equals(batch)
        assert packed[::-1].decompress_if_needed(["obs"]).equals(batch[::-1])
        assert pickle.loads(pickle.dumps(packed)).decompress_if_needed().equals(batch)

    def test_joined_and_shuffled_rows_decompress(self) -> None:
        parts = [SampleBatch(obs=np.full((3, 4), i)) for i in range(3)]
        joined = concat_samples([part.compress(bulk=i > 0) for i, part in enumerate(parts)])
        assert joined.shuffle(1).decompress_if_needed().equals(concat_samples(parts).shuffle(1))

    def test_one_block_at_a_time_is_in_memory(self) -> None:
        parts = [SampleBatch(obs=np.full((50, 4000), i)).compress(bulk=True)[:1] for i in range(10)]
        joined = concat_samples(parts)
        tracemalloc.start()
        try:
            joined.decompress_if_needed()
            assert tracemalloc.get_traced_memory()[1] < 4 * 50 * 4000 * 8
        finally:
            tracemalloc.stop()

    def test_text_and_objects_are_never_mistaken(self) -> None:
        batch = SampleBatch(
            obs=["KLUv/QBY", "x"], new_obs=np.array(["a", "b"]), infos=[b"\x28\xb5\x2f\xfd", {}]
        )
        assert batch.decompress_if_needed().equals(batch)
        assert batch.compress(columns=["infos", "obs"]).equals(batch)
        assert batch.compress().decompress_if_needed().equals(batch)

    def test_an_empty_column_round_trips(self) -> None:
        batch = SampleBatch(obs=np.zeros((0, 4), np.float32))
        assert batch.compress().decompress_if_needed().equals(batch)

    def test_bulk_is_smaller_than_the_frames(self) -> None:
        batch = SampleBatch(obs=np.zeros((100, 84, 84), np.uint8))
        assert batch.compress(bulk=True).size_bytes() < batch.size_bytes() / 20

    def test_rows_of_unlike_blocks_are_refused(self) -> None:
        parts = [SampleBatch(obs=np.zeros((1, 2), d)).compress() for d in ("f4", "f8")]
        with pytest.raises(CorruptData, match="float32"):
            concat_samples(parts).decompress_if_needed()

    def test_damaged_blocks_are_refused(self) -> None:
        from dataclasses import replace

        batch = SampleBatch(obs=np.arange(100.0)).compress(bulk=True)
        block = batch["obs"][0].block
        for bad in (
            replace(block, data=block.data[:-9]),
            replace(block, data=b"junk"),
            replace(block, shape=(900,)),
            replace(block, dtype="<f4"),
        ):
            rows = object_column([CompressedRow(bad, i) for i in range(100)])
            with pytest.raises(CorruptData):
                SampleBatch(obs=rows).decompress_if_needed()

    def test_a_single_name_is_refused(self) -> None:
        with pytest.raises(OptionError, match="a list of names"):
            SampleBatch(obs=[1]).compress(columns="obs")


class TestCopies:
    def test_a_deep_copy_shares_nothing_not_even_infos(self) -> None:
        batch = SampleBatch(a=[1], infos=[{"x": [1]}], obs={"y": np.zeros(1)})
        copy = batch.copy()
        copy["a"][0], copy["obs"]["y"][0] = 9, 9
        copy["infos"][0]["x"].append(2)
        assert (batch["a"][0], batch["obs"]["y"][0], batch["infos"][0]) == (1, 0, {"x": [1]})

    def test_a_shallow_copy_shares_arrays_but_not_the_mapping(self) -> None:
        batch = SampleBatch(a=[1], obs={"y": np.zeros(1)})
        copy = batch.copy(shallow=True)
        copy["b"] = [2]
        copy["obs"]["z"] = np.ones(1)
        assert "b" not in batch
        assert "z" not in batch["obs"]
        assert copy["a"] is batch["a"]

    def test_fortran_order_survives_a_copy(self) -> None:
        assert SampleBatch(a=np.zeros((3, 4), order="F")).copy()["a"].flags.f_contiguous

    def test_equals_is_exact(self) -> None:
        base = SampleBatch(a=np.array([1.0, np.nan]), infos=[{"x": np.array([np.nan])}, 1])
        assert base.equals(base.copy())
        assert not base.equals(SampleBatch(a=np.array([1.0, np.nan], np.float32), infos=base["infos"]))
        assert not base.equals(SampleBatch(a=base["a"], infos=[{"x": np.array([0.0])}, 1]))
        assert not base.equals(SampleBatch(a=base["a"], infos=[base["infos"][0], True]))
        assert not base.equals(SampleBatch(a=base["a"]))
        assert not base.equals({"a": base["a"]})
        assert SampleBatch(a=np.array(["NaT"], "M8[s]")).equals(SampleBatch(a=np.array(["NaT"], "M8[s]")))

    def test_size_counts_leaves(self) -> None:
        assert SampleBatch(a=np.zeros(4), obs={"x": np.zeros((4, 2), np.uint8)}).size_bytes() == 40

    def test_as_multi_agent_wraps(self) -> None:
        batch = SampleBatch(a=[1, 2])
        wrapped = batch.as_multi_agent()
        assert wrapped["default_policy"] is batch
        assert wrapped.env_steps() == 2

    def test_an_os_seed_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level("INFO", "rlio"):
            SampleBatch(a=[1]).shuffle()
        assert "drawn from the OS" in caplog.text


class TestSingleStepInputs:
    def test_the_last_step_sees_the_last_new_obs(self) -> None:
        batch = SampleBatch(
            obs=[[1.0], [2.0]], new_obs=[[2.0], [3.0]], actions=[7, 8], state_out_0=[[0.1], [0.2]]
        )
        inputs = batch.get_single_step_input_dict(
            {
                "obs": ("obs", 0),
                "prev_actions": ("actions", -1),
                "stack": ("obs", (-3, -1, 0)),
                "state_in_0": ("state_out_0", -1),
            }
        )
        assert inputs["obs"].tolist() == [[3]]
        assert inputs["prev_actions"].tolist() == [8]
        assert inputs["stack"].tolist() == [[[0], [2], [3]]]
        assert inputs["state_in_0"].tolist() == [[0.2]]
        assert inputs["seq_lens"].tolist() == [1]

    def test_steps_before_the_first_are_zeros(self) -> None:
        batch = SampleBatch(obs=[[1.0], [2.0]], actions=[7, 8])
        assert batch.get_single_step_input_dict({"p": ("actions", -1)}, 0)["p"].tolist() == [0]

    def test_an_unknown_last_observation_is_an_error(self) -> None:
        need = {"obs": ("obs", 0)}
        for batch in (
            SampleBatch(obs=[1.0]),
            SampleBatch(obs=[1.0], new_obs=[0.0], new_obs_valid=[False]),
        ):
            with pytest.raises(MissingColumn, match="new_obs"):
                batch.get_single_step_input_dict(need)

    def test_steps_that_lie_ahead_are_refused(self) -> None:
        with pytest.raises(OptionError, match="lies ahead"):
            SampleBatch(actions=[1]).get_single_step_input_dict({"a": ("actions", 0)})
        with pytest.raises(OptionError, match="index"):
            SampleBatch(actions=[1]).get_single_step_input_dict({"a": ("actions", 0)}, 5)


class TestTensors:
    def test_importing_batches_does_not_import_torch(self) -> None:
        code = "import sys, rlio.batch, rlio.batch.episode; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    def test_numbers_become_tensors_and_the_rest_stays(self) -> None:
        torch = pytest.importorskip("torch")
        batch = SampleBatch(
            obs={"x": np.zeros((2, 3), np.float32), "text": ["a", "b"]},
            when=np.zeros(2, "M8[s]"),
            infos=[{}, {}],
        )
        tensors = batch.to_torch()
        assert tensors["obs"]["x"].dtype == torch.float32
        assert isinstance(tensors["obs"]["text"], np.ndarray)
        assert isinstance(tensors["when"], np.ndarray)
        assert isinstance(tensors["infos"], np.ndarray)

    def test_memory_is_shared_only_where_writing_is_safe(self) -> None:
        pytest.importorskip("torch")
        locked = np.zeros(3)
        locked.flags.writeable = False
        batch = SampleBatch(
            a=np.zeros(3), locked=locked, back=np.arange(3)[::-1], big=np.arange(3, dtype=">i4")
        )
        tensors = batch.to_torch()
        tensors["a"][0] = 5
        tensors["locked"][0] = 5
        assert batch["a"][0] == 5
        assert locked[0] == 0
        assert tensors["back"].tolist() == [2, 1, 0]
        assert tensors["big"].tolist() == [0, 1, 2]

    def test_a_dtype_is_that_of_all_floats(self) -> None:
        torch = pytest.importorskip("torch")
        batch = SampleBatch(
            obs={"x": np.ones((2, 3)), "pixels": np.zeros((2, 4), np.uint8)},
            rewards=np.array([0.5, 1.5], np.float32),
            actions=np.arange(2),
            truncateds=np.zeros(2, bool),
            infos=[{}, {}],
        )
        for dtype in (torch.float32, torch.float16, torch.bfloat16, "float64"):
            tensors = batch.to_torch(dtype=dtype)
            wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
            assert tensors["obs"]["x"].dtype == tensors["rewards"].dtype == wanted
            assert tensors["rewards"].tolist() == [0.5, 1.5]
            assert tensors["obs"]["pixels"].dtype == torch.uint8
            assert tensors["actions"].dtype == torch.int64
            assert tensors["truncateds"].dtype == torch.bool
            assert isinstance(tensors["infos"], np.ndarray)
            assert batch.to_device("cpu", dtype=dtype)["rewards"].dtype == wanted
            again = batch.to_device("cpu").to_torch(dtype=dtype)
            assert again["rewards"].dtype == wanted
            assert again["actions"].dtype == torch.int64
        assert batch["obs"]["x"].dtype == np.float64

    def test_a_dtype_by_column_is_of_any_kind(self) -> None:
        torch = pytest.importorskip("torch")
        pair = {"x": np.ones((2, 3)), "pixels": np.zeros((2, 4), np.uint8)}
        batch = SampleBatch(obs=pair, new_obs=pair, actions=np.arange(2), infos=[{}, {}])
        tensors = batch.to_torch(
            dtype={"actions": torch.int32, "obs/pixels": "float32", "obs": torch.float16}
        )
        assert tensors["actions"].dtype == torch.int32
        for name in ("obs", "new_obs"):
            assert tensors[name]["pixels"].dtype == torch.float32
            assert tensors[name]["x"].dtype == torch.float16
        only = batch.to_torch(dtype={"obs/x": "float32", "new_obs/x": "float16"})
        assert (only["obs"]["x"].dtype, only["new_obs"]["x"].dtype) == (torch.float32, torch.float16)

    def test_a_dtype_that_cannot_be_is_refused(self) -> None:
        torch = pytest.importorskip("torch")
        batch = SampleBatch(actions=np.arange(2), infos=[{}, {}])
        with pytest.raises(OptionError, match="a floating dtype"):
            batch.to_torch(dtype=torch.int32)
        with pytest.raises(OptionError, match="expected a dtype of torch"):
            batch.to_torch(dtype="float33")
        with pytest.raises(MissingColumn, match="did you mean 'actions'"):
            batch.to_torch(dtype={"action": torch.int32})
        with pytest.raises(OptionError, match="infos"):
            batch.to_torch(dtype={"infos": torch.int32})

    def test_a_batch_of_tensors_slices_pads_joins_and_pickles(self) -> None:
        pytest.importorskip("torch")
        batch = sequence_batch()
        tensors = batch.to_device("cpu")
        assert tensors[2:]["obs"].tolist() == batch[2:]["obs"].tolist()
        for time_major in (False, True):
            padded = tensors.right_zero_pad(4, time_major=time_major)
            assert padded["obs"].tolist() == batch.right_zero_pad(4, time_major=time_major)["obs"].tolist()
            assert padded.unpad().equals(tensors)
            assert padded.shuffle(3).unpad()["t"].tolist() == batch.shuffle(3)["t"].tolist()
        assert tensors.concat(tensors)["t"].tolist() == batch.concat(batch)["t"].tolist()
        assert pickle.loads(pickle.dumps(tensors)).equals(tensors)
        assert tensors.copy().equals(tensors)
        assert not tensors.equals(batch)

    def test_tensors_slice_with_any_step_and_take_rows(self) -> None:
        torch = pytest.importorskip("torch")
        batch = SampleBatch(a=torch.arange(5), terminateds=torch.tensor([False] * 4 + [True]))
        assert batch[::-2]["a"].tolist() == [4, 2, 0]
        assert batch[torch.tensor([3, 0])]["a"].tolist() == [3, 0]
        assert batch["dones"].tolist() == [False] * 4 + [True]
        assert SampleBatch(a=[torch.ones(2), torch.zeros(2)])["a"].shape == (2, 2)
        assert batch.size_bytes() == 45

    def test_tensors_beside_arrays_do_not_join(self) -> None:
        torch = pytest.importorskip("torch")
        with pytest.raises(SchemaError, match="tensor"):
            concat_samples([SampleBatch(a=torch.zeros(1)), SampleBatch(a=np.zeros(1))])
        with pytest.raises(OptionError, match="framework"):
            SampleBatch(a=[1]).to_device("cpu", "tf")  # type: ignore[arg-type]  # the point


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["u1", ">i2", "f8", "M8[s]", "U3"])
@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 3, 1, 2)])
@pytest.mark.each_value_once
def test_large_arrays_are_joined_into_memory_of_their_own(dtype: str, axes: tuple[int, ...]) -> None:
    numbers = np.arange(300 * 4 * 30 * 40) % 97
    values = numbers.astype(dtype).reshape(300, 4, 30, 40).transpose(axes)
    parts = [SampleBatch(obs=values[:130]), SampleBatch(obs=values[130:131]), SampleBatch(obs=values[131:])]
    joined = concat_samples(parts)["obs"]
    assert joined.dtype == values.dtype
    assert joined.strides == values.strides
    assert np.array_equal(joined, values)
    assert joined.flags.writeable
    assert not np.shares_memory(joined, values)
