"""Laws of SampleBatch, over batches that hypothesis draws: plain, ragged, padded and time-major."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlio.batch import SampleBatch, concat_samples, count_units, split_units
from rlio.batch.nested import leaves, map_structure

EXAMPLES = settings(max_examples=25, deadline=None)

DTYPES = ["u1", "i4", "i8", "f2", "f4", "f8", ">f4", "?", "c8", "U3", "M8[s]"]


def column(rows: int, dtype: str, row_shape: tuple[int, ...], salt: int) -> np.ndarray:
    """Values that tell rows apart, NaN among them."""
    size = rows * int(np.prod(row_shape))
    values = (np.arange(size, dtype=np.int64) * 7 + salt) % 113
    array = values.astype(dtype).reshape(rows, *row_shape)
    if array.dtype.kind == "f" and size:
        array.reshape(-1)[salt % size] = np.nan
    return array


@st.composite
def plain_batches(draw: st.DrawFn, rows: int | None = None) -> SampleBatch:
    if rows is None:
        rows = draw(st.integers(0, 9))
    columns: dict[str, Any] = {"row": np.arange(rows)}
    for i in range(draw(st.integers(0, 3))):
        shape = draw(st.sampled_from([(), (1,), (2, 3), (0,)]))
        columns[f"c{i}"] = column(rows, draw(st.sampled_from(DTYPES)), shape, i)
    if draw(st.booleans()):
        columns["obs"] = {
            "pos": column(rows, "f4", (2,), 3),
            "cam": (column(rows, "u1", (2, 2), 4), {"x": columns["row"]}),
        }
    if draw(st.booleans()):
        infos = np.empty(rows, object)
        infos[:] = [{"row": i, "deep": {"a": np.full(2, i)}} for i in range(rows)]
        columns["infos"] = infos
    if draw(st.booleans()):
        columns["terminateds"] = np.array(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), bool)
        columns["truncateds"] = np.array(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), bool)
        columns["eps_id"] = np.array(
            draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)), np.int64
        )
    return SampleBatch(columns, num_grad_updates=draw(st.sampled_from([None, 3.0])))


@st.composite
def ragged_batches(draw: st.DrawFn) -> SampleBatch:
    lens = draw(st.lists(st.integers(1, 4), max_size=5))
    batch = draw(plain_batches(sum(lens)))
    columns = dict(batch.items())
    columns["state_in_0"] = column(len(lens), "f4", (2,), 1)
    columns["state_in_1"] = (np.arange(len(lens)), {"h": column(len(lens), "f8", (1,), 2)})
    columns["seq_lens"] = np.array(lens, np.int32)
    return SampleBatch(columns, num_grad_updates=batch.num_grad_updates)


@st.composite
def sequence_batches(draw: st.DrawFn) -> SampleBatch:
    """In any of the three layouts."""
    batch = draw(ragged_batches())
    layout = draw(st.sampled_from(["ragged", "padded", "time-major"]))
    if layout == "ragged":
        return batch
    return batch.right_zero_pad(draw(st.integers(4, 6)), time_major=layout == "time-major")


any_batches = plain_batches() | sequence_batches()
bounds = st.none() | st.integers(-12, 12)


def leaf_list(batch: SampleBatch) -> list[tuple[Any, Any]]:
    return [((name, *path), leaf) for name, col in batch.items() for path, leaf in leaves(col)]


def same(a: Any, b: Any) -> bool:
    return SampleBatch(x=a).equals(SampleBatch(x=b))


@given(plain_batches(), bounds, bounds, st.none() | st.integers(-4, 4).filter(bool))
@EXAMPLES
def test_slicing_is_numpy_slicing_column_by_column(
    batch: SampleBatch, start: int | None, stop: int | None, step: int | None
) -> None:
    part = batch[start:stop:step]
    assert list(part) == list(batch)
    assert len(part) == len(range(*slice(start, stop, step).indices(len(batch))))
    for (path, leaf), (part_path, part_leaf) in zip(leaf_list(batch), leaf_list(part), strict=True):
        assert part_path == path
        assert same(part_leaf, leaf[start:stop:step])
        assert part_leaf.size == 0 or np.shares_memory(part_leaf, leaf)


@given(sequence_batches(), st.data())
@EXAMPLES
def test_a_slice_on_boundaries_is_the_slice_of_the_unpadded_rows(
    batch: SampleBatch, data: st.DataObject
) -> None:
    edges = [0, *np.cumsum(batch["seq_lens"]).tolist()]
    i, j = sorted((data.draw(st.integers(0, len(edges) - 1)), data.draw(st.integers(0, len(edges) - 1))))
    part, rows = batch[edges[i] : edges[j]].unpad(), batch.unpad()
    for name in rows:
        cut = slice(i, j) if name == "seq_lens" or name.startswith("state_in_") else slice(edges[i], edges[j])
        assert same(part[name], map_structure(lambda leaf, cut=cut: leaf[cut], rows[name]))
    assert batch.sequences(i, j).equals(batch[edges[i] : edges[j]])


@given(any_batches, st.integers(1, 6), st.booleans())
@EXAMPLES
def test_timeslices_then_concat_is_the_identity(batch: SampleBatch, number: int, by_size: bool) -> None:
    parts = batch.timeslices(number) if by_size else batch.timeslices(num_slices=number)
    if not by_size:
        assert len(parts) == number
    elif "seq_lens" not in batch:
        assert [len(part) for part in parts[:-1]] == [number] * (len(parts) - 1)
    joined = concat_samples(parts or [batch])
    assert joined.equals(batch)
    assert joined.num_grad_updates == batch.num_grad_updates


@given(plain_batches().filter(lambda b: "eps_id" in b), st.sampled_from(["eps_id", "dones", None]))
@EXAMPLES
def test_split_by_episode_then_concat_is_the_identity(batch: SampleBatch, key: str | None) -> None:
    parts = batch.split_by_episode(key)
    assert concat_samples(parts or [batch]).equals(batch)
    for part in parts:
        assert not part["dones"][:-1].any() if key == "dones" else len(set(part["eps_id"].tolist())) == 1
    assert count_units(batch, "episodes") == len(batch.split_by_episode())


@given(plain_batches(), st.integers(0, 2**32))
@EXAMPLES
def test_shuffle_is_one_permutation_for_every_column(batch: SampleBatch, seed: int) -> None:
    shuffled = batch.shuffle(seed)
    order = shuffled["row"]
    assert sorted(order.tolist()) == list(range(len(batch)))
    for (_, leaf), (_, mixed) in zip(leaf_list(batch), leaf_list(shuffled), strict=True):
        assert same(mixed, leaf[order])
    assert shuffled.equals(batch.shuffle(np.random.default_rng(seed)))
    assert shuffled.equals(batch[order])


@given(sequence_batches(), st.integers(0, 2**32))
@EXAMPLES
def test_shuffling_sequences_moves_them_whole_with_their_states(batch: SampleBatch, seed: int) -> None:
    shuffled = batch.shuffle(seed)
    order = shuffled["state_in_1"][0]
    assert sorted(order.tolist()) == list(range(len(batch["seq_lens"])))
    expected = concat_samples([batch.sequences(i, i + 1) for i in order.tolist()] or [batch])
    assert shuffled.equals(expected)


@given(ragged_batches(), st.integers(4, 7), st.booleans())
@EXAMPLES
def test_padding_round_trips_and_counts_no_padding(batch: SampleBatch, length: int, time_major: bool) -> None:
    padded = batch.right_zero_pad(length, time_major=time_major)
    assert padded.unpad().equals(batch)
    assert len(padded) == len(batch)
    lens = batch["seq_lens"]
    rows = padded["row"].T if time_major else padded["row"].reshape(len(lens), length)
    assert rows.shape == (len(lens), length)
    assert not rows[np.arange(length) >= lens[:, None]].any()
    SampleBatch(dict(padded.items()), zero_padded=True, time_major=time_major, max_seq_len=length)


@given(sequence_batches(), st.data())
@EXAMPLES
def test_splitting_units_then_concat_is_the_identity(batch: SampleBatch, data: st.DataObject) -> None:
    n = data.draw(st.integers(0, count_units(batch, "sequences")))
    head, tail = split_units(batch, n, "sequences")
    assert count_units(head, "sequences") == n
    assert concat_samples([head, tail]).equals(batch)


@given(any_batches)
@EXAMPLES
def test_pickling_round_trips(batch: SampleBatch) -> None:
    loaded = pickle.loads(pickle.dumps(batch[:]))
    assert loaded.equals(batch)
    assert list(loaded) == list(batch)
    assert loaded.num_grad_updates == batch.num_grad_updates


@given(any_batches, st.booleans())
@EXAMPLES
def test_compression_round_trips(batch: SampleBatch, bulk: bool) -> None:
    assert batch.compress(bulk, list(batch)).decompress_if_needed().equals(batch)


@given(plain_batches(), plain_batches())
@EXAMPLES
def test_fill_keeps_every_row_and_every_column(first: SampleBatch, second: SampleBatch) -> None:
    if any(a in second and not _joinable(first[a], second[a]) for a in first):
        return
    joined = concat_samples([first, second], columns="fill")
    assert len(joined) == len(first) + len(second)
    if len(first) and len(second):
        assert set(joined) == set(first) | set(second)
        for name in first:
            assert same(map_structure(lambda leaf: leaf[: len(first)], joined[name]), first[name])


def _joinable(a: Any, b: Any) -> bool:
    specs = [[(path, leaf.dtype, leaf.shape[1:]) for path, leaf in leaves(col)] for col in (a, b)]
    return specs[0] == specs[1]


OPERATIONS: dict[str, Callable[[SampleBatch], Any]] = {
    "slice": lambda b: b[:1] if "seq_lens" not in b else b.sequences(0, 1),
    "reversed": lambda b: b[::-1] if "seq_lens" not in b else None,
    "take": lambda b: b[np.arange(len(b))] if "seq_lens" not in b else None,
    "cut": lambda b: (b.slice(-1, 2), b.slice(1, 3)) if not b.zero_padded else None,
    "timeslices": lambda b: b.timeslices(2),
    "num_slices": lambda b: b.timeslices(num_slices=3),
    "split": lambda b: b.split_by_episode() if "eps_id" in b and "seq_lens" not in b else None,
    "rows": lambda b: list(b.rows()),
    "columns": lambda b: b.columns(list(b)),
    "shuffle": lambda b: b.shuffle(0),
    "pad": lambda b: b.right_zero_pad(9) if "seq_lens" in b else None,
    "pad time-major": lambda b: b.right_zero_pad(9, time_major=True) if "seq_lens" in b else None,
    "unpad": lambda b: b.unpad(),
    "concat": lambda b: b.concat(b),
    "intersect": lambda b: concat_samples([b, b], columns="intersect"),
    "copy": lambda b: (b.copy(), b.copy(shallow=True)),
    "to_torch": lambda b: (b.to_torch(), b.to_device("cpu")),
    "compress": lambda b: b.compress(columns=list(b)).decompress_if_needed(),
    "compress in bulk": lambda b: b.compress(bulk=True, columns=list(b)),
    "as_multi_agent": lambda b: b.as_multi_agent().shuffle(1),
    "single step": lambda b: (
        b.get_single_step_input_dict({"r": ("row", -1)}) if "seq_lens" not in b else None
    ),
    "flags": lambda b: (b.is_terminated_or_truncated(), b.is_single_trajectory()) if "dones" in b else None,
    "sizes": lambda b: (
        len(b),
        b.count,
        b.size_bytes(),
        b.max_seq_len,
        repr(b),
        b.agent_steps(),
        b.env_steps(),
    ),
    "equals": lambda b: b.equals(b.copy()),
    "units": lambda b: split_units(b, count_units(b, "steps"), "steps"),
    "pickle": pickle.dumps,
    "dones": lambda b: b.get("dones"),
    "interceptor": lambda b: (b.set_get_interceptor(lambda c: None), b.columns(list(b))),
}


@pytest.mark.few(14)
@pytest.mark.parametrize("name", list(OPERATIONS))
@given(batch=any_batches)
@settings(max_examples=6, deadline=None)
def test_no_operation_mutates_its_operand(name: str, batch: SampleBatch) -> None:
    before, names, arrays = batch.copy(), list(batch), [id(leaf) for _, leaf in leaf_list(batch)]
    OPERATIONS[name](batch)
    batch.set_get_interceptor(None)
    assert batch.equals(before)
    assert (list(batch), [id(leaf) for _, leaf in leaf_list(batch)]) == (names, arrays)
    assert (batch.num_grad_updates, batch.is_training) == (before.num_grad_updates, before.is_training)
