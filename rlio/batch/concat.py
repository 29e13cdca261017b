"""Joining, measuring and splitting batches of either kind. Users import these from `rlio.batch`.

Example:
    >>> from rlio.batch import SampleBatch
    >>> joined = concat_samples([SampleBatch(obs=[1.0], t=[0]), SampleBatch(obs=[2.0], t=[1])])
    >>> head, tail = split_units(joined, 1, "steps")
    >>> head["obs"], tail["obs"]
    (array([1.]), array([2.]))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Final, Literal, TypeAlias, TypeVar, cast, overload

import numpy as np

from rlio.batch.arrays import Column, concat_leaves, zero_leaf
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns, is_per_sequence
from rlio.batch.multi_agent import MultiAgentBatch, episode_numbers, step_numbers
from rlio.batch.nested import leaves, map_structure, path_text
from rlio.batch.sample_batch import SampleBatch
from rlio.batch.sequences import boundaries
from rlio.errors import MissingColumn, OptionError, SchemaError, excerpt

__all__ = [
    "UNLIKE",
    "Unlike",
    "concat_sample_batches",
    "concat_samples",
    "concat_samples_into_ma_batch",
    "convert_ma_batch_to_sample_batch",
    "copy_into",
    "count_units",
    "joined_plainly",
    "split_units",
]

#: What is done with columns that only some batches, files or sources have.
Unlike: TypeAlias = Literal["error", "intersect", "fill"]
UNLIKE: Final = ("error", "intersect", "fill")
BatchT = TypeVar("BatchT", bound=SampleBatch | MultiAgentBatch)

# From so many bytes on, joined columns get memory that was used before.
_LARGE: Final = 1 << 20


@overload
def concat_samples(samples: Sequence[SampleBatch], *, columns: Unlike = ...) -> SampleBatch: ...


@overload
def concat_samples(
    samples: Sequence[SampleBatch | MultiAgentBatch], *, columns: Unlike = ...
) -> SampleBatch | MultiAgentBatch: ...


def concat_samples(
    samples: Sequence[SampleBatch | MultiAgentBatch], *, columns: Unlike = "error"
) -> SampleBatch | MultiAgentBatch:
    """Join batches, one after the other, in fresh memory.

    Batches without steps are passed over; if all are, the result is empty and has the columns of the first
    that has any. Columns come in the order of the first batch. Equal dtypes are kept; of two dtypes of the
    same kind the wider is taken where it holds both without loss (float32 with float64; int32 with int64);
    any other pair is an error, as is an array beside a tensor. A batch that lacks ``new_obs_valid`` has only
    valid ones.

    Args:
        samples: Batches; a SampleBatch beside a MultiAgentBatch is taken for ``default_policy``.
        columns: What to do with a column that some batches lack: ``"error"``, ``"intersect"`` (leave it out)
            or ``"fill"`` (zeros, None in object arrays; rows with a filled ``new_obs`` have
            ``new_obs_valid`` False).

    Returns:
        A SampleBatch, or, if there is a MultiAgentBatch, a MultiAgentBatch.
        ``num_grad_updates`` is the average over steps of those that have one, None if none has.

    Raises:
        MissingColumn: A batch lacks a column of another; the message names both.
        SchemaError: Dtypes, row shapes, nesting or layouts differ; the message names the column.
    """
    if any(isinstance(sample, MultiAgentBatch) for sample in samples):
        return concat_samples_into_ma_batch(samples, columns=columns)
    return concat_sample_batches(cast("Sequence[SampleBatch]", samples), columns=columns)


def concat_samples_into_ma_batch(
    samples: Sequence[SampleBatch | MultiAgentBatch], *, columns: Unlike = "error"
) -> MultiAgentBatch:
    """Join batches policy by policy; env steps are summed.

    A SampleBatch is taken for ``default_policy``. See `concat_samples` for columns, dtypes and errors.
    """
    parts: dict[str, list[SampleBatch]] = {}
    env_steps = 0
    for i, sample in enumerate(samples):
        if not isinstance(sample, SampleBatch | MultiAgentBatch):
            raise _no_batch(i, sample)
        env_steps += sample.env_steps()
        for policy_id, batch in sample.policies().items():
            parts.setdefault(policy_id, []).append(batch)
    return MultiAgentBatch(
        {policy_id: concat_sample_batches(own, columns=columns) for policy_id, own in parts.items()},
        env_steps,
    )


def convert_ma_batch_to_sample_batch(batch: SampleBatch | MultiAgentBatch) -> SampleBatch:
    """The SampleBatch of a MultiAgentBatch whose only policy is ``default_policy``; a SampleBatch as it is.

    Raises:
        SchemaError: There are other policies.
    """
    if isinstance(batch, SampleBatch):
        return batch
    if list(batch) != [DEFAULT_POLICY_ID]:
        raise SchemaError(
            f"only a MultiAgentBatch of {DEFAULT_POLICY_ID!r} alone is also a SampleBatch; this one has "
            f"{', '.join(map(excerpt, batch)) or 'no policies'}"
        )
    return batch[DEFAULT_POLICY_ID]


# ---- joining ----


def concat_sample_batches(samples: Sequence[SampleBatch], *, columns: Unlike = "error") -> SampleBatch:
    """`concat_samples` for SampleBatches alone."""
    if columns not in UNLIKE:
        raise OptionError(f"columns={columns!r}: one of {', '.join(map(repr, UNLIKE))}")
    for i, sample in enumerate(samples):
        if not isinstance(sample, SampleBatch):
            raise _no_batch(i, sample)
    plain = joined_plainly(samples)
    if plain is not None:
        return type(samples[0])._trusted(
            plain, num_grad_updates=_mean_updates(samples), is_training=samples[0].is_training
        )
    filled = {i: sample for i, sample in enumerate(samples) if sample.count}
    if not filled:
        first = next((sample for sample in samples if sample._columns), None)
        return SampleBatch() if first is None else first.copy()
    max_seq_len = _joint_max_seq_len(filled)
    parts = _aligned(filled, columns)
    head, *_ = filled.values()
    joined: dict[str, Column] = {}
    for name in parts[0]:
        axis = 1 if head.time_major and not is_per_sequence(name) else 0
        joined[name] = _join(name, [part[name] for part in parts], axis)
    return type(head)._trusted(
        joined,
        time_major=head.time_major,
        zero_padded=head.zero_padded,
        max_seq_len=max_seq_len,
        num_grad_updates=_mean_updates(filled.values()),
        is_training=head.is_training,
    )


def joined_plainly(samples: Sequence[SampleBatch]) -> dict[str, Column] | None:
    """The columns of batches without sequences whose columns are alike arrays; None of others.

    This is what readers and mixtures join all the time: it takes a third of the time of all the checks.
    """
    if not samples or not samples[0].count:
        return None
    columns = [sample._columns for sample in samples]
    head = columns[0]
    if Columns.SEQ_LENS in head or any(other.keys() != head.keys() for other in columns):
        return None
    if any(sample._max_seq_len is not None or sample._zero_padded for sample in samples):
        return None
    joined: dict[str, Column] = {}
    for name, first in head.items():
        if type(first) is not np.ndarray:
            return None
        parts = [other[name] for other in columns]
        for part in parts:
            if type(part) is not np.ndarray or part.dtype != first.dtype or part.shape[1:] != first.shape[1:]:
                return None
        out = _recycled(first, sum(map(len, parts)))
        joined[name] = (
            np.concatenate(parts, dtype=first.dtype) if out is None else np.concatenate(parts, out=out)
        )
    return joined


def _recycled(like: np.ndarray, rows: int) -> np.ndarray | None:
    """Room for rows that lie in memory as those of ``like`` do; None where NumPy's own memory is as good.

    Arrow's allocator keeps what was freed. The C library gives large arrays back to the system, and each page
    of the next one then costs a fault: for images, six times as much as the copy.
    """
    if like.dtype.hasobject or rows * like[:1].nbytes < _LARGE:
        return None
    import pyarrow as pa

    axes = (0, *sorted(range(1, like.ndim), key=lambda axis: -like.strides[axis]))
    shape = (rows, *(like.shape[axis] for axis in axes[1:]))
    flat = np.frombuffer(pa.allocate_buffer(rows * like[:1].nbytes), like.dtype)
    return flat.reshape(shape).transpose(np.argsort(axes))


def _no_batch(i: int, sample: object) -> SchemaError:
    return SchemaError(
        f"batch {i} is a {type(sample).__name__}, expected a SampleBatch or a MultiAgentBatch: "
        f"{excerpt(sample)}"
    )


def _join(name: str, parts: list[Column], axis: int) -> Column:
    try:
        if type(parts[0]) is np.ndarray:
            return concat_leaves(parts, axis=axis)
        return map_structure(lambda *leaf: concat_leaves(leaf, axis=axis), *parts)
    except SchemaError as error:
        raise SchemaError(str(error), column=name) from error


def _mean_updates(samples: Iterable[SampleBatch]) -> float | None:
    known = [(s.num_grad_updates, s.count) for s in samples if s.num_grad_updates is not None]
    total = sum(count for _, count in known)
    return sum(updates * count for updates, count in known) / total if total else None


def _joint_max_seq_len(filled: dict[int, SampleBatch]) -> int | None:
    """Check that all batches have one layout, and give the ``max_seq_len`` of the joined one."""
    (first, head), *others = filled.items()
    for i, sample in others:
        for what, one, other in (
            ("time_major", head.time_major, sample.time_major),
            ("zero_padded", head.zero_padded, sample.zero_padded),
            ("seq_lens", Columns.SEQ_LENS in head, Columns.SEQ_LENS in sample),
            ("max_seq_len", head.max_seq_len is not None, sample.max_seq_len is not None),
        ):
            if one != other:
                raise SchemaError(
                    f"batch {first} is {'with' if one else 'without'} {what} but batch {i} is "
                    f"{'with' if other else 'without'}: bring them into one layout (right_zero_pad, unpad)"
                )
        if head.zero_padded and head.max_seq_len != sample.max_seq_len:
            raise SchemaError(
                f"batch {first} is padded to {head.max_seq_len} rows a sequence but batch {i} to "
                f"{sample.max_seq_len}: right_zero_pad both to the same"
            )
    if all(sample._max_seq_len is None for sample in filled.values()):
        return None
    return max(sample.max_seq_len or 0 for sample in filled.values())


def _aligned(filled: dict[int, SampleBatch], columns: Unlike) -> list[dict[str, Column]]:
    """The columns of each batch such that all have the same names, in the order of the first."""
    parts = {i: sample._columns for i, sample in filled.items()}
    head, *_ = parts.values()
    if all(part.keys() == head.keys() for part in parts.values()):
        return list(parts.values())
    parts = _with_validity(filled, columns)
    names = list(dict.fromkeys(name for part in parts.values() for name in part))
    if columns == "intersect":
        names = [name for name in names if all(name in part for part in parts.values())]
    owners = {name: next(i for i, part in parts.items() if name in part) for name in names}
    aligned = []
    for i, part in parts.items():
        for name in names:
            if name not in part and columns == "error":
                raise MissingColumn(
                    f"batch {i} has no column {excerpt(name)} but batch {owners[name]} has: give it, or join "
                    "with columns='intersect' or columns='fill'",
                    column=name,
                )
        aligned.append(
            {
                name: part[name] if name in part else _zeros(name, parts[owners[name]][name], filled[i])
                for name in names
            }
        )
    return aligned


def _with_validity(filled: dict[int, SampleBatch], columns: Unlike) -> dict[int, dict[str, Column]]:
    """The columns of each batch, with ``new_obs_valid`` in all of them if the joined batch needs it.

    A batch without it has only valid ``new_obs``; one that gets a filled ``new_obs`` has none.
    """
    valid, new_obs = Columns.NEXT_OBS_VALID, Columns.NEXT_OBS
    parts = {i: dict(sample._columns) for i, sample in filled.items()}
    having = [new_obs in part for part in parts.values()]
    gap = any(having) and not all(having)
    if gap and columns == "intersect":
        return parts  # new_obs is left out, and its validity with it
    if gap or any(valid in part for part in parts.values()):
        like = next((part[valid] for part in parts.values() if valid in part), None)
        for i, part in parts.items():
            if valid in part or (new_obs not in part and columns != "fill"):
                continue
            wide = like is None and filled[i].time_major
            empty = _zeros(valid, np.zeros((1, 1) if wide else 1, bool) if like is None else like, filled[i])
            part[valid] = ~empty if new_obs in part else empty
    return parts


def _zeros(name: str, like: Column, sample: SampleBatch) -> Column:
    """Zeros like column ``name`` of another batch, in the rows and layout of ``sample``."""
    if is_per_sequence(name):
        number = len(sample._lens())
        return map_structure(lambda leaf: zero_leaf(leaf, number), like)
    if sample.time_major:
        length, number = sample.max_seq_len or 0, len(sample._lens())

        def wide(leaf: Any) -> Any:
            return zero_leaf(leaf[0], length * number).reshape(length, number, *leaf.shape[2:])

        return map_structure(wide, like)
    rows = len(sample._lens()) * (sample.max_seq_len or 0) if sample.zero_padded else sample.count
    return map_structure(lambda leaf: zero_leaf(leaf, rows), like)


# ---- writing into a batch ----


def copy_into(out: BatchT, batch: SampleBatch | MultiAgentBatch) -> BatchT:
    """Overwrite the arrays of ``out`` with the values of ``batch`` and return ``out``.

    Args:
        out: A batch with the columns, dtypes, shapes and layout of ``batch``, and writable arrays.
        batch: Where values come from; a single ``default_policy`` is not unwrapped.

    Raises:
        SchemaError: ``out`` does not fit; the message names the column. Nothing is written then.
    """
    if isinstance(out, MultiAgentBatch):
        if not isinstance(batch, MultiAgentBatch) or out.keys() != batch.keys():
            raise SchemaError(f"out is {_policies(out)}, the batch {_policies(batch)}: they must be alike")
        pairs = [(out[key], batch[key]) for key in out]
    elif isinstance(batch, SampleBatch) and isinstance(out, SampleBatch):
        pairs = [(out, batch)]
    else:
        raise SchemaError(f"out is {_policies(out)}, the batch {_policies(batch)}: they must be alike")
    copies = [copy for target, source in pairs for copy in _copies(target, source)]
    for target_leaf, source_leaf in copies:
        target_leaf[...] = source_leaf
    for target, source in pairs:
        target.num_grad_updates = source.num_grad_updates
        target._intercepted.clear()
    if isinstance(out, MultiAgentBatch):
        out._env_steps = batch.env_steps()
    return out


def _policies(batch: SampleBatch | MultiAgentBatch) -> str:
    if isinstance(batch, SampleBatch):
        return "a SampleBatch"
    return f"a MultiAgentBatch of {', '.join(map(excerpt, batch)) or 'no policies'}"


def _copies(out: SampleBatch, batch: SampleBatch) -> list[tuple[Any, Any]]:
    """The pairs of leaves to copy, checked."""
    if out._columns.keys() != batch._columns.keys():
        odd = excerpt(min(map(str, out._columns.keys() ^ batch._columns.keys())))
        raise SchemaError(f"out and the batch have unlike columns: only one of them has {odd}")
    if (out.time_major, out.zero_padded) != (batch.time_major, batch.zero_padded):
        raise SchemaError("out and the batch have unlike layouts (time_major, zero_padded)")
    pairs = []
    for name, column in out._columns.items():
        mine, theirs = leaves(column), leaves(batch._columns[name])
        if [path for path, _ in mine] != [path for path, _ in theirs]:
            raise SchemaError("out's column is nested in another way than the batch's", column=name)
        for (path, target), (_, source) in zip(mine, theirs, strict=True):
            full = f"{name}/{path_text(path)}" if path else name
            if (
                type(target) is not type(source)
                or target.dtype != source.dtype
                or target.shape != source.shape
            ):
                raise SchemaError(
                    f"out has {target.dtype} {tuple(target.shape)}, the batch {source.dtype} "
                    f"{tuple(source.shape)}: make out with the columns, dtypes and shapes of the result",
                    column=full,
                )
            if isinstance(target, np.ndarray) and not target.flags.writeable:
                raise SchemaError("out's array is read-only: give one that can be overwritten", column=full)
            pairs.append((target, source))
    return pairs


# ---- measuring and splitting ----


def count_units(batch: SampleBatch | MultiAgentBatch, unit: str) -> int:
    """How many ``unit`` the batch has.

    Args:
        batch: Either kind. Steps of a MultiAgentBatch are its distinct (eps_id, t), whatever its
            ``env_steps``; it has no sequences of its own.
        unit: ``"steps"``, ``"sequences"`` or ``"episodes"`` (parts of episodes count as episodes).

    Raises:
        MissingColumn: What tells the units apart is absent: ``seq_lens``, ``eps_id`` or ``t``, done flags.
    """
    _check_unit(unit)
    if isinstance(batch, MultiAgentBatch):
        return _numbers(batch, unit)[1]
    return batch.count if unit == "steps" else len(_ends(batch, unit)) - 1


def split_units(batch: BatchT, n: int, unit: str) -> tuple[BatchT, BatchT]:
    """Split off the first ``n`` units; see `count_units`.

    Returns:
        The first ``n`` and the rest: views, or, for a MultiAgentBatch whose rows are not in the order of the
        steps (see `MultiAgentBatch.timeslices`), copies.

    Raises:
        OptionError: There are fewer than ``n``.
        SchemaError: Steps are to be split inside of a sequence.
    """
    _check_unit(unit)
    if isinstance(batch, MultiAgentBatch):
        numbers, total = _numbers(batch, unit)
        _check_enough(n, total, unit)
        head, tail = batch._cut(numbers, [0, n, total], unit)
        if unit == "episodes":
            for part in (head, tail):  # It was cut by episodes, and counts steps.
                part._env_steps = step_numbers(part)[1]
        return head, tail
    if unit == "steps":
        _check_enough(n, batch.count, unit)
        return batch[:n], batch[n:]
    ends = _ends(batch, unit)
    _check_enough(n, len(ends) - 1, unit)
    return batch[: ends[n]], batch[ends[n] :]


def _check_unit(unit: str) -> None:
    if unit not in ("steps", "sequences", "episodes"):
        raise OptionError(f"unit={unit!r}: 'steps', 'sequences' or 'episodes'")


def _check_enough(n: int, total: int, unit: str) -> None:
    if not 0 <= n <= total:
        raise OptionError(f"split_units(n={n}): the batch has {total} {unit}")


def _ends(batch: SampleBatch, unit: str) -> list[int]:
    """The steps at which sequences or episodes end, 0 first."""
    if unit == "episodes":
        return [0, *accumulate(part.count for part in batch.split_by_episode())]
    if Columns.SEQ_LENS not in batch:
        raise MissingColumn("a batch without seq_lens has no sequences to count", column=Columns.SEQ_LENS)
    bounds: list[int] = boundaries(batch._lens()).tolist()
    return bounds


def _numbers(batch: MultiAgentBatch, unit: str) -> tuple[dict[str, np.ndarray], int]:
    """The number of the unit of each row, by policy; and how many units there are."""
    if unit == "sequences":
        raise SchemaError("a MultiAgentBatch has no common sequences: count or split by steps or episodes")
    remembered = batch._remembered_order(unit)
    if remembered is not None:
        return remembered
    return step_numbers(batch) if unit == "steps" else episode_numbers(batch)
