"""Picks, cuts, shuffles and pads the rows of a batch. The methods of `SampleBatch` call these functions.

They take a batch and return new ones; none changes the batch that it gets.

Sequences (``seq_lens``) have one of three layouts. *Ragged*: concatenated (``sum(seq_lens)`` rows). *Padded*:
each in ``max_seq_len`` rows, of which the last are padding (``B * T`` rows). *Time-major*: padded, with time
first (shape ``(T, B, ...)``).

Example:
    >>> from rlio.batch import SampleBatch
    >>> batch = SampleBatch(obs=[1, 2, 3], seq_lens=[1, 2])
    >>> pad(batch, 2)["obs"]
    array([1, 0, 2, 3])
    >>> import numpy as np
    >>> padded_rows(np.array([2, 3, 1]), 3)
    array([0, 1, 3, 4, 5, 6])
    >>> ragged_rows(np.array([2, 3, 1]), np.array([1, 0]))
    array([2, 3, 4, 0, 1])
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from rlio.batch.arrays import (
    Column,
    concat_leaves,
    copy_leaf,
    is_tensor,
    row_count,
    take_leaf,
    to_numpy,
    zero_leaf,
)
from rlio.batch.columns import STATE_IN_PREFIX, STATE_OUT_PREFIX, Columns, is_per_sequence
from rlio.batch.nested import map_structure
from rlio.errors import MissingColumn, OptionError, SchemaError, excerpt

if TYPE_CHECKING:
    from rlio.batch.sample_batch import SampleBatch

__all__ = [
    "boundaries",
    "cut",
    "cuts",
    "episode_bounds",
    "generator",
    "iterate",
    "pad",
    "padded_rows",
    "ragged_rows",
    "sequence_range",
    "shuffle",
    "sort_by_part",
    "split_by_episode",
    "step_inputs",
    "steps",
    "take",
    "timeslices",
    "unpad",
]

logger: logging.Logger = logging.getLogger("rlio")

BatchT = TypeVar("BatchT", bound="SampleBatch")

_SEQ_LENS = Columns.SEQ_LENS


def generator(seed: int | np.random.Generator | None) -> np.random.Generator:
    """A generator from ``seed``, or ``seed`` itself; None draws a seed from the OS and logs it."""
    if isinstance(seed, np.random.Generator):
        return seed
    if seed is None:
        sequence = np.random.SeedSequence()
        logger.info("shuffle: seed %s, drawn from the OS", sequence.entropy)
        return np.random.default_rng(sequence)
    return np.random.default_rng(seed)


def steps(batch: SampleBatch, column: Any) -> np.ndarray:
    """The array or tensor ``column`` of ``batch`` with one row a step: without padding, batch-major."""
    array = to_numpy(column)
    if batch.time_major:
        array = _batch_major(array)
    return array[padded_rows(batch._lens(), batch.max_seq_len or 0)] if batch.zero_padded else array


def _batch_major(leaf: Any) -> Any:
    """Reshape (T, B, ...) to (B * T, ...), the layout of padded sequences."""
    # Not reshape(-1, ...), which cannot infer the number of rows if a row has no elements.
    return leaf.swapaxes(0, 1).reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])


def take(batch: BatchT, key: Any) -> BatchT:
    """Copy the rows that an index array or a bool mask selects; see `SampleBatch.__getitem__`."""
    index = to_numpy(key) if is_tensor(key) else np.asarray(key)
    if index.size == 0 and not isinstance(key, np.ndarray):
        index = index.astype(np.int64)  # NumPy reads [] as float64
    if index.ndim != 1 or index.dtype.kind not in "iub":
        raise OptionError(
            f"batch[...]: found {excerpt(key)} ({index.dtype} of shape {index.shape}), expected a name, a "
            "slice, or 1-D integers or bools"
        )
    if _SEQ_LENS in batch._columns:
        raise SchemaError(
            "rows cannot be picked from a batch with seq_lens, because that would cut its sequences: slice "
            "it by sequence (batch.sequences(i, j)), or delete seq_lens and state_in_* first",
            column=_SEQ_LENS,
        )
    if index.dtype.kind == "b":
        if len(index) != batch.count:
            raise SchemaError(f"a mask of {len(index)} bools does not fit a batch of {batch.count} rows")
        index = np.flatnonzero(index)
    try:
        return batch._like(batch._map(lambda leaf: take_leaf(leaf, index)))
    except IndexError as error:
        raise OptionError(f"an index lies outside of the batch's {batch.count} rows: {error}") from error


def iterate(batch: SampleBatch) -> Iterator[dict[str, Any]]:
    """Each step as a dict; see `SampleBatch.rows`."""
    batch = batch.unpad()
    firsts: dict[int, int] = {}
    if _SEQ_LENS in batch._columns:
        firsts = {int(step): i for i, step in enumerate(boundaries(batch._lens())[:-1])}
    for step in range(batch.count):
        row: dict[str, Any] = {}
        for name, column in batch._made.items():
            at: int | None = step
            if name == _SEQ_LENS:
                row[name] = 1
                continue
            if firsts and is_per_sequence(name):
                at = firsts.get(step)
            row[name] = None if at is None else _row(column, at)
        yield row


def _row(column: Any, at: int) -> Any:
    return map_structure(lambda leaf: leaf[at], column)


def timeslices(batch: BatchT, size: int | None, num_slices: int | None) -> list[BatchT]:
    """Cut ``batch`` into parts; see `SampleBatch.timeslices`."""
    if (size is None) == (num_slices is None) or (size or num_slices or 0) < 1:
        raise OptionError(
            f"timeslices(size={size}, num_slices={num_slices}): give one of them, and at least 1"
        )
    bounds = boundaries(batch._lens()) if _SEQ_LENS in batch._columns else None
    if size is not None:
        return _slices(batch, cuts(batch.count, bounds, size))
    assert num_slices is not None  # checked above
    at = np.arange(num_slices + 1) * batch.count // num_slices
    if bounds is not None:
        at = bounds[np.searchsorted(bounds, at, side="right") - 1]
    return _slices(batch, at.tolist())


def _slices(batch: BatchT, at: list[int]) -> list[BatchT]:
    return [batch[a:b] for a, b in pairwise(at)]


def split_by_episode(batch: BatchT, key: str | None) -> list[BatchT]:
    """Cut ``batch`` into episodes; see `SampleBatch.split_by_episode`."""
    return _slices(batch, episode_bounds(batch, key))


def episode_bounds(batch: SampleBatch, key: str | None = None) -> list[int]:
    """The steps at which the episodes of a batch begin, and its number of steps; [] without rows."""
    if key not in (None, Columns.EPS_ID, Columns.DONES):
        raise OptionError(f"split_by_episode(key={excerpt(key)}): expected 'eps_id', 'dones' or None")
    if key is None:
        key = Columns.EPS_ID if Columns.EPS_ID in batch else Columns.DONES
    if key not in batch:
        known = ", ".join(map(excerpt, batch)) or "no columns"
        raise MissingColumn(
            f"episodes are told apart by eps_id, or by terminateds or truncateds; the batch has {known}",
            column=key,
        )
    values = steps(batch, batch[key])
    change = values[1:] != values[:-1] if key == Columns.EPS_ID else values[:-1]
    if len(values) == 0:
        return []
    if change.ndim > 1:
        change = change.any(axis=tuple(range(1, change.ndim)))
    ends = np.flatnonzero(change) + 1
    return [0, *ends.tolist(), len(values)]


def shuffle(batch: BatchT, seed: int | np.random.Generator | None) -> BatchT:
    """Permute the rows or sequences of ``batch``; see `SampleBatch.shuffle`."""
    rng = generator(seed)
    if _SEQ_LENS not in batch._columns:
        order = rng.permutation(batch.count)
        return batch._like(batch._map(lambda leaf: take_leaf(leaf, order)))
    lens = batch._lens()
    order = rng.permutation(len(lens))
    length = batch.max_seq_len or 0
    if batch.zero_padded:
        rows = (order[:, None] * length + np.arange(length)).ravel()
    else:
        rows = ragged_rows(lens, order)

    def pick(leaf: Any) -> Any:
        if batch.time_major:
            return take_leaf(leaf.swapaxes(0, 1), order).swapaxes(0, 1)
        return take_leaf(leaf, rows)

    return batch._like(batch._map_rows(pick, lambda leaf: take_leaf(leaf, order)))


def pad(batch: BatchT, max_seq_len: int, *, time_major: bool = False) -> BatchT:
    """Lay out sequences in ``max_seq_len`` rows each; see `SampleBatch.right_zero_pad`."""
    if _SEQ_LENS not in batch._columns:
        raise MissingColumn("padding needs seq_lens, the lengths of the sequences to pad", column=_SEQ_LENS)
    if max_seq_len < 1:
        raise OptionError(f"max_seq_len={max_seq_len}: expected a number of rows, at least 1")
    ragged = batch.unpad()
    _ = ragged._made  # Padding is None, not an info without keys.
    lens = ragged._lens()
    if len(lens) and int(lens.max()) > max_seq_len:
        raise SchemaError(
            f"sequence {int(lens.argmax())} has {int(lens.max())} steps but max_seq_len={max_seq_len}: "
            "pad to more rows, or cut the sequence first",
            column=_SEQ_LENS,
        )
    at = padded_rows(lens, max_seq_len)

    def spread(leaf: Any) -> Any:
        out = zero_leaf(leaf, len(lens) * max_seq_len)
        if is_tensor(out):
            import torch

            out[torch.as_tensor(at, device=out.device)] = leaf
        else:
            out[at] = leaf
        if not time_major:
            return out
        return out.reshape(len(lens), max_seq_len, *out.shape[1:]).swapaxes(0, 1)

    padded = ragged._like(ragged._map_rows(spread, copy_leaf))
    padded._time_major, padded._zero_padded, padded._max_seq_len = time_major, True, max_seq_len
    return padded


def unpad(batch: BatchT) -> BatchT:
    """Concatenate the sequences of a padded ``batch``; see `SampleBatch.unpad`."""
    rows = padded_rows(batch._lens(), batch.max_seq_len or 0)

    def gather(leaf: Any) -> Any:
        if batch.time_major:
            leaf = _batch_major(leaf)
        return take_leaf(leaf, rows)

    ragged = batch._like(batch._map_rows(gather, copy_leaf))
    ragged._time_major, ragged._zero_padded, ragged._max_seq_len = False, False, None
    return ragged


def cut(batch: BatchT, start: int, end: int, state_start: int | None, state_end: int | None) -> BatchT:
    """Steps ``start`` to ``end`` of ``batch``; see `SampleBatch.slice`."""
    if batch.zero_padded:
        raise SchemaError("slice(start, end) counts steps without padding: unpad() the batch first")
    if (state_start is None) != (state_end is None):
        raise OptionError(f"state_start={state_start}, state_end={state_end}: give both or neither")
    first, last = max(start, 0), min(max(end, start, 0), batch.count)
    first, lead = min(first, last), max(-start, 0)
    if lead:
        _ = batch._made  # Inserted rows have None, not an info without keys.

    def rows(leaf: Any) -> Any:
        part = leaf[first:last]
        return concat_leaves([zero_leaf(leaf, lead), part]) if lead else part

    if _SEQ_LENS not in batch._columns:
        if state_start is not None:
            raise MissingColumn(
                "state_start and state_end choose sequences, but the batch has none", column=_SEQ_LENS
            )
        return batch._like(batch._map(rows))
    bounds = boundaries(batch._lens())
    if state_start is None or state_end is None:
        state_start = int(np.searchsorted(bounds, first, side="right")) - 1
        state_end = max(int(np.searchsorted(bounds, last)), state_start) if last > first else state_start
        if lead and state_end == state_start:
            state_end = min(state_start + 1, len(bounds) - 1)
        lens = np.minimum(bounds[state_start + 1 : state_end + 1], last) - np.maximum(
            bounds[state_start:state_end], first
        )
        if len(lens):
            lens[0] += lead
    else:
        lens = _shortened(np.diff(bounds)[state_start:state_end], last - first + lead)
    per_sequence = slice(state_start, state_end)
    columns = batch._map_rows(rows, lambda leaf: leaf[per_sequence])
    columns[_SEQ_LENS] = lens.astype(batch._lens().dtype)
    return batch._like(columns)


def sort_by_part(batch: BatchT, part: np.ndarray) -> tuple[BatchT, np.ndarray]:
    """Sort the rows of a ``batch`` of sequences by ``part``, (rows,) int; cuts sequences with several parts.

    A piece that begins within a sequence gets the state after the row before it, that row's ``state_out_k``.

    Returns:
        The batch, and the old row number of each of its rows.

    Raises:
        SchemaError: A sequence must be cut, and the batch has no ``state_out_k``.
    """
    lens = batch._lens()
    sequence = np.repeat(np.arange(len(lens)), lens)
    new = np.ones(len(part), bool)
    new[1:] = (sequence[1:] != sequence[:-1]) | (part[1:] != part[:-1])
    first = np.flatnonzero(new)
    within = first != boundaries(lens)[sequence[first]]
    piece_lens = np.diff(first, append=len(part))
    order = np.argsort(part[first], kind="stable")
    taken = ragged_rows(piece_lens, order)
    if not within.any() and np.all(order[1:] > order[:-1]):
        return batch, taken
    columns = batch._map_rows(lambda leaf: take_leaf(leaf, taken), lambda leaf: leaf)
    for name in [name for name in columns if name.startswith(STATE_IN_PREFIX)]:
        states = take_leaf(batch._columns[name], sequence[first])
        if within.any():
            after = batch._columns.get(STATE_OUT_PREFIX + name.removeprefix(STATE_IN_PREFIX))
            if after is None:
                raise SchemaError(
                    f"a sequence must be cut at step {first[within][0]}, but the batch does not have the "
                    "state there: record the policy's rows with state_out_k",
                    column=name,
                )
            states[within] = take_leaf(after, first[within] - 1)
        columns[name] = take_leaf(states, order)
    columns[_SEQ_LENS] = piece_lens[order].astype(lens.dtype)
    return batch._like(columns), taken


def _shortened(lens: np.ndarray, total: int) -> np.ndarray:
    """``lens`` with the last ones shortened or removed, such that they sum to ``total``."""
    surplus = int(lens.sum()) - total
    if surplus < 0 or (len(lens) and surplus >= lens[-1] and total):
        raise SchemaError(
            f"the chosen sequences have {int(lens.sum())} steps, but the chosen rows are {total}: expected "
            "sequences that contain the rows, and rows in the last sequence",
            column=_SEQ_LENS,
        )
    lens = lens.copy()
    if len(lens):
        lens[-1] -= surplus
    return lens


def boundaries(seq_lens: np.ndarray) -> np.ndarray:
    """First step of each of B sequences, and the end of the last: (B + 1,) int64."""
    bounds = np.zeros(len(seq_lens) + 1, np.int64)
    np.cumsum(seq_lens, out=bounds[1:])
    return bounds


def ragged_rows(seq_lens: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Row numbers of the sequences ``order``, concatenated, in the ragged layout."""
    starts = boundaries(seq_lens)[:-1][order]
    lens = seq_lens[order].astype(np.int64)
    ends = np.cumsum(lens)
    rows: np.ndarray = np.arange(lens.sum()) + np.repeat(starts - (ends - lens), lens)
    return rows


def padded_rows(seq_lens: np.ndarray, max_seq_len: int) -> np.ndarray:
    """Row numbers of the steps among the ``B * max_seq_len`` rows of the padded layout."""
    lens = seq_lens.astype(np.int64)
    gaps = np.arange(len(lens)) * max_seq_len - boundaries(lens)[:-1]
    rows: np.ndarray = np.arange(lens.sum()) + np.repeat(gaps, lens)
    return rows


def sequence_range(seq_lens: np.ndarray, rows: slice) -> tuple[int, int]:
    """The sequences (first, end) that the slice ``rows`` of steps covers.

    Raises:
        SchemaError: The slice has a step, or cuts a sequence; the message names the nearest boundaries.
    """
    bounds = boundaries(seq_lens)
    start, stop, step = rows.indices(int(bounds[-1]))
    if step != 1:
        raise SchemaError(
            f"a slice with step {step} would cut sequences: slice a batch with seq_lens with step 1, or by "
            "sequence (batch.sequences(i, j))"
        )
    stop = max(start, stop)
    found = []
    for position in (start, stop):
        i = int(np.searchsorted(bounds, position))
        if bounds[i] != position:
            raise SchemaError(
                f"a slice [{start}:{stop}] cuts a sequence at step {position}: the nearest boundaries are "
                f"{bounds[i - 1]} and {bounds[i]}; slice there, by sequence (batch.sequences(i, j)), or cut "
                "on purpose with batch.slice(start, end)"
            )
        found.append(i)
    return found[0], found[1]


def cuts(count: int, bounds: np.ndarray | None, size: int) -> list[int]:
    """Where to cut ``count`` steps into parts of ``size`` steps; at most ``size`` with ``bounds``.

    Returns:
        The ends of the parts, 0 first; a sequence longer than ``size`` is a part alone.
    """
    if bounds is None:
        return [*range(0, count, size), count] if count else [0]
    at = [0]
    while at[-1] < count:
        i = int(np.searchsorted(bounds, at[-1] + size, side="right")) - 1
        if bounds[i] <= at[-1]:
            i = int(np.searchsorted(bounds, at[-1], side="right"))
        at.append(int(bounds[i]))
    return at


def step_inputs(
    batch: SampleBatch,
    view_requirements: Mapping[str, tuple[str, int | Sequence[int]]],
    index: int | Literal["last"],
) -> dict[str, Column]:
    """The input of a policy for one step; see `SampleBatch.get_single_step_input_dict`."""
    if _SEQ_LENS in batch:
        raise SchemaError(
            "inputs for a step need a batch of steps, but this batch has seq_lens: select its rows first"
        )
    steps = len(batch)
    step = steps if index == "last" else index
    if not 0 <= step <= steps:
        raise OptionError(
            f"index={index!r}: expected 'last', or a step from 0 to {steps}, the number of steps"
        )
    inputs: dict[str, Column] = {}
    for name, (column, shift) in view_requirements.items():
        shifts = [shift] if isinstance(shift, int) else list(shift)
        parts = [_step_or_zeros(batch, column, step + by) for by in shifts]
        if isinstance(shift, int):
            inputs[name] = parts[0]
        else:
            inputs[name] = map_structure(
                lambda *rows: concat_leaves([row[None] for row in rows], axis=1), *parts
            )
    if any(is_per_sequence(name) for name in inputs):
        inputs[_SEQ_LENS] = np.ones(1, np.int32)
    return inputs


def _step_or_zeros(batch: SampleBatch, column: str, position: int) -> Column:
    """Row ``position`` of ``column``: zeros before the first row; for obs, one row past the last step too."""
    values = batch[column]
    steps = len(batch)
    if position == steps and column == Columns.OBS:
        valid = batch.get(Columns.NEXT_OBS_VALID)
        if not steps or Columns.NEXT_OBS not in batch or (valid is not None and not valid[-1]):
            raise MissingColumn(
                f"the observation after the last of {steps} steps is not known: it would end new_obs",
                column=Columns.NEXT_OBS,
            )
        values, position = batch[Columns.NEXT_OBS], steps - 1
    elif position >= steps:
        raise OptionError(f"step {position} of column {column!r} lies ahead: the batch has {steps} steps")

    def select(leaf: Any) -> Any:
        return zero_leaf(leaf, 1) if position < 0 else take_leaf(leaf, np.array([position]))

    return map_structure(select, values) if row_count(values) is not None else values
