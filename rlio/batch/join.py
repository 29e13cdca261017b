"""Joins several `SampleBatch`es into one. Users call `rlio.batch.concat_samples`.

Example:
    >>> from rlio.batch import SampleBatch
    >>> join([SampleBatch(obs=[1.0], t=[0]), SampleBatch(obs=[2.0], t=[1])])["obs"]
    array([1., 2.])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from rlio.batch.arrays import Column, join_columns, zero_leaf
from rlio.batch.columns import Columns, is_per_sequence
from rlio.batch.frames import empty_array
from rlio.batch.infos import info_objects, is_typed
from rlio.batch.nested import leaves, map_structure
from rlio.errors import MissingColumn, SchemaError, excerpt
from rlio.support.options import check_choice

if TYPE_CHECKING:
    from rlio.batch.sample_batch import SampleBatch

__all__ = ["UNLIKE", "Unlike", "join", "joined_plainly"]

#: What to do with columns that only some batches, files or sources have.
Unlike: TypeAlias = Literal["error", "intersect", "fill"]
UNLIKE: Final = ("error", "intersect", "fill")

# Joined columns of at least this many bytes get reused memory.
_LARGE: Final = 1 << 20


def join(samples: Sequence[SampleBatch], *, columns: Unlike = "error") -> SampleBatch:
    """`rlio.batch.concat_samples` for one or more SampleBatches."""
    check_choice("columns", columns, UNLIKE)
    plain = joined_plainly(samples)
    if plain is not None:
        made = samples[0]._like(plain)
        made.num_grad_updates, made.episode_starts = _mean_updates(samples), _all_starts(samples)
        return made
    filled = {i: sample for i, sample in enumerate(samples) if sample.count}
    if not filled:
        return next((sample for sample in samples if sample._columns), samples[0]).copy()
    max_seq_len = _joint_max_seq_len(filled)
    parts = _aligned(filled, columns)
    head, *_ = filled.values()
    joined: dict[str, Column] = {}
    for name in parts[0]:
        axis = 1 if head.time_major and not is_per_sequence(name) else 0
        joined[name] = _join(name, [part[name] for part in parts], axis)
    made = head._like(joined)
    made._max_seq_len = max_seq_len
    made.num_grad_updates = _mean_updates(filled.values())
    made.episode_starts = _all_starts(filled.values())
    return made


def joined_plainly(samples: Sequence[SampleBatch]) -> dict[str, Column] | None:
    """The joined columns of batches without sequences, if their columns are similar arrays; else None.

    A fast path for readers and mixtures, which join such batches all the time: it takes a third of the time
    of all checks.
    """
    if not samples or not samples[0].count:
        return None
    columns = [sample._columns for sample in samples]
    head = columns[0]
    if Columns.SEQ_LENS in head or any(other.keys() != head.keys() for other in columns):
        return None
    if any(sample._max_seq_len is not None or sample._zero_padded for sample in samples):
        return None
    return _joined_dicts(columns)


def _joined_dicts(parts: Sequence[Mapping[str, Column]]) -> dict[str, Column] | None:
    """Dicts of the same keys, joined if each of their columns is similar; else None."""
    joined: dict[str, Column] = {}
    for name, first in parts[0].items():
        made = _joined_alike(first, [part[name] for part in parts])
        if made is None:
            return None
        joined[name] = made
    return joined


def _joined_alike(first: Column, parts: Sequence[Column]) -> Column | None:
    """Arrays, or dicts of arrays, joined if they are similar; else None."""
    if type(first) is dict:
        if any(type(part) is not dict or list(part) != list(first) for part in parts):
            return None
        return _joined_dicts(parts)
    if type(first) is not np.ndarray:
        return None
    for part in parts:
        if type(part) is not np.ndarray or part.dtype != first.dtype or part.shape[1:] != first.shape[1:]:
            return None
    out = _recycled(first, sum(map(len, parts)))
    return np.concatenate(parts, dtype=first.dtype) if out is None else np.concatenate(parts, out=out)


def _recycled(like: np.ndarray, rows: int) -> np.ndarray | None:
    """Memory for rows in the memory order of ``like``; None if NumPy's own memory is as good.

    Arrow's allocator keeps freed memory. The C library returns large arrays to the system, and each page of
    the next array then costs a page fault: for images, six times as much as the copy.
    """
    if like.dtype.hasobject or rows * like[:1].nbytes < _LARGE:
        return None
    axes = (0, *sorted(range(1, like.ndim), key=lambda axis: -like.strides[axis]))
    shape = (rows, *(like.shape[axis] for axis in axes[1:]))
    return empty_array(shape, like.dtype).transpose(np.argsort(axes))


def _join(name: str, parts: list[Column], axis: int) -> Column:
    if name == Columns.INFOS and any(map(is_typed, parts)):
        return _join_infos(parts)
    try:
        return join_columns(parts, axis=axis)
    except SchemaError as error:
        raise SchemaError(str(error), column=name) from error


def _join_infos(parts: list[Column]) -> Column:
    """Infos of which some are in the typed form: in that form if they have the same keys, else as objects."""
    forms = [[(path, leaf.dtype, leaf.shape[1:]) for path, leaf in leaves(part)] for part in parts]
    if all(map(is_typed, parts)) and all(form == forms[0] for form in forms):
        return join_columns(parts)
    return _join(Columns.INFOS, [info_objects(part) if is_typed(part) else part for part in parts], 0)


def _mean_updates(samples: Iterable[SampleBatch]) -> float | None:
    known = [(s.num_grad_updates, s.count) for s in samples if s.num_grad_updates is not None]
    total = sum(count for _, count in known)
    return sum(updates * count for updates, count in known) / total if total else None


def _all_starts(samples: Iterable[SampleBatch]) -> Mapping[int | str, int] | None:
    known = [sample.episode_starts for sample in samples if sample.episode_starts]
    return {key: start for starts in known for key, start in starts.items()} if known else None


def _joint_max_seq_len(filled: dict[int, SampleBatch]) -> int | None:
    """Check that all batches have one layout, and return the ``max_seq_len`` of the joined batch."""
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
                f"{sample.max_seq_len}: right_zero_pad both to the same length"
            )
    if all(sample._max_seq_len is None for sample in filled.values()):
        return None
    return max(sample.max_seq_len or 0 for sample in filled.values())


def _aligned(filled: dict[int, SampleBatch], columns: Unlike) -> list[dict[str, Column]]:
    """The columns of each batch, aligned to the same names, in the order of the first batch."""
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
                    f"batch {i} has no column {excerpt(name)} but batch {owners[name]} has: add it, or join "
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
    """The columns of each batch; all get ``new_obs_valid`` if the joined batch needs it.

    A batch without ``new_obs_valid`` has only valid ``new_obs``; in a batch with a filled ``new_obs``, none
    is valid.
    """
    valid, new_obs = Columns.NEXT_OBS_VALID, Columns.NEXT_OBS
    parts = {i: dict(sample._columns) for i, sample in filled.items()}
    having = [new_obs in part for part in parts.values()]
    gap = any(having) and not all(having)
    if gap and columns == "intersect":
        return parts  # new_obs is left out, and so is its validity.
    if gap or any(valid in part for part in parts.values()):
        like = next((part[valid] for part in parts.values() if valid in part), np.zeros(1, bool))
        for i, part in parts.items():
            if valid in part or (new_obs not in part and columns != "fill"):
                continue
            empty = _zeros(valid, like, filled[i])
            part[valid] = ~empty if new_obs in part else empty
    return parts


def _zeros(name: str, like: Column, sample: SampleBatch) -> Column:
    """Zeros like column ``name`` of another batch, with the rows and layout of ``sample``."""
    rows: tuple[int, ...] = (sample.count,)
    if is_per_sequence(name):
        rows = (len(sample._lens()),)
    elif sample.time_major:
        rows = (sample.max_seq_len or 0, len(sample._lens()))
    elif sample.zero_padded:
        rows = (len(sample._lens()) * (sample.max_seq_len or 0),)
    if name == Columns.INFOS and is_typed(like):
        like = np.empty(0, object)
    return map_structure(lambda leaf: zero_leaf(leaf, *rows), like)
