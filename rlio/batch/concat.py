"""Joins, measures and splits batches of either kind. Import these functions from `rlio.batch`.

Example:
    >>> from rlio.batch import SampleBatch
    >>> joined = concat_samples([SampleBatch(obs=[1.0], t=[0]), SampleBatch(obs=[2.0], t=[1])])
    >>> head, tail = split_units(joined, 1, "steps")
    >>> head["obs"], tail["obs"]
    (array([1.]), array([2.]))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

import numpy as np

from rlio.batch.columns import DEFAULT_POLICY_ID, Columns
from rlio.batch.join import Unlike
from rlio.batch.multi_agent import (
    MultiAgentBatch,
    concat_samples_into_ma_batch,
    episode_numbers,
    step_numbers,
)
from rlio.batch.nested import leaves, path_text
from rlio.batch.rows import boundaries, episode_bounds
from rlio.batch.sample_batch import SampleBatch
from rlio.errors import MissingColumn, OptionError, SchemaError, excerpt
from rlio.support.options import check_choice

__all__ = [
    "concat_samples",
    "concat_samples_into_ma_batch",
    "convert_ma_batch_to_sample_batch",
    "copy_into",
    "count_units",
    "split_units",
]

BatchT = TypeVar("BatchT", bound=SampleBatch | MultiAgentBatch)


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

    Batches without steps are ignored. If all batches are empty, the result is empty, with the columns of the
    first batch that has any. Columns are in the order of the first batch. Equal dtypes are kept. Two dtypes
    of the same kind become the wider one if it holds both without loss (float32 with float64; int32 with
    int64). Any other pair is an error, as is an array with a tensor. In a batch without ``new_obs_valid``,
    every ``new_obs`` is valid.

    Args:
        samples: Batches; a SampleBatch among MultiAgentBatches counts as ``default_policy``.
        columns: What to do with a column that some batches lack: ``"error"``, ``"intersect"`` (leave it out)
            or ``"fill"`` (zeros, None in object arrays; rows with a filled ``new_obs`` have ``new_obs_valid``
            False).

    Returns:
        A MultiAgentBatch if any batch is one, else a SampleBatch. ``num_grad_updates`` is the average over
        the steps of batches that have one; None if none has.

    Raises:
        MissingColumn: A batch lacks a column of another; the message names both.
        SchemaError: Dtypes, row shapes, nesting or layouts differ; the message names the column.
    """
    return SampleBatch.concat_samples(samples, columns=columns)


def convert_ma_batch_to_sample_batch(batch: SampleBatch | MultiAgentBatch) -> SampleBatch:
    """The SampleBatch of a MultiAgentBatch with ``default_policy`` alone; a SampleBatch is returned as it is.

    Raises:
        SchemaError: The batch has other policies.
    """
    if isinstance(batch, SampleBatch):
        return batch
    if list(batch) != [DEFAULT_POLICY_ID]:
        raise SchemaError(
            f"only a MultiAgentBatch of {DEFAULT_POLICY_ID!r} alone is also a SampleBatch; this one has "
            f"{', '.join(map(excerpt, batch)) or 'no policies'}"
        )
    return batch[DEFAULT_POLICY_ID]


# ---- writing into a batch ----


def copy_into(out: BatchT, batch: SampleBatch | MultiAgentBatch) -> BatchT:
    """Overwrite the arrays of ``out`` with the values of ``batch`` and return ``out``.

    Args:
        out: A batch with the columns, dtypes, shapes and layout of ``batch``, and writable arrays.
        batch: The source of the values; a single ``default_policy`` is not unwrapped.

    Raises:
        SchemaError: ``out`` does not fit; the message names the column. Nothing is written then.
    """
    alike = any(isinstance(out, kind) and isinstance(batch, kind) for kind in (SampleBatch, MultiAgentBatch))
    if not alike or out.policies().keys() != batch.policies().keys():
        raise SchemaError(f"out is {_policies(out)}, the batch {_policies(batch)}: they must be alike")
    pairs = [(target, batch.policies()[key]) for key, target in out.policies().items()]
    copies = [copy for target, source in pairs for copy in _copies(target, source)]
    for target_leaf, source_leaf in copies:
        target_leaf[...] = source_leaf
    for target, source in pairs:
        target.num_grad_updates = source.num_grad_updates
        target.episode_starts = source.episode_starts
        target._intercepted.clear()
    if isinstance(out, MultiAgentBatch):
        out._env_steps = batch.env_steps()
    return out


def _policies(batch: SampleBatch | MultiAgentBatch) -> str:
    if isinstance(batch, MultiAgentBatch):
        return f"a MultiAgentBatch of {', '.join(map(excerpt, batch)) or 'no policies'}"
    return f"a {type(batch).__name__}"


def _copies(out: SampleBatch, batch: SampleBatch) -> list[tuple[Any, Any]]:
    """The pairs of leaves to copy, after checks."""
    if out._columns.keys() != batch._columns.keys():
        odd = excerpt(min(map(str, out._columns.keys() ^ batch._columns.keys())))
        raise SchemaError(f"out and the batch have different columns: only one of them has {odd}")
    if (out.time_major, out.zero_padded) != (batch.time_major, batch.zero_padded):
        raise SchemaError("out and the batch have different layouts (time_major, zero_padded)")
    pairs = []
    for name, column in out._made.items():
        mine, theirs = leaves(column), leaves(batch._made[name])
        if [path for path, _ in mine] != [path for path, _ in theirs]:
            raise SchemaError("out's column has another nesting than the batch's", column=name)
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
                raise SchemaError("out's array is read-only: pass a writable array", column=full)
            pairs.append((target, source))
    return pairs


# ---- measuring and splitting ----


def count_units(batch: SampleBatch | MultiAgentBatch, unit: str) -> int:
    """Count the steps, sequences or episodes of a batch.

    Args:
        batch: Either kind. Steps of a MultiAgentBatch are its distinct (eps_id, t), regardless of its
            ``env_steps``; it has no sequences.
        unit: ``"steps"``, ``"sequences"`` or ``"episodes"`` (parts of episodes count as episodes).

    Raises:
        MissingColumn: The columns that identify units are absent: ``seq_lens``, ``eps_id`` or ``t``, done
            flags.
    """
    _check_unit(unit)
    if isinstance(batch, MultiAgentBatch):
        return _numbers(batch, unit)[1]
    return batch.count if unit == "steps" else len(_ends(batch, unit)) - 1


def split_units(batch: BatchT, n: int, unit: str) -> tuple[BatchT, BatchT]:
    """Split off the first ``n`` units; see `count_units`.

    Returns:
        The first ``n`` units and the rest: views; copies for a MultiAgentBatch whose rows are not in step
        order (see `MultiAgentBatch.timeslices`).

    Raises:
        OptionError: The batch has fewer than ``n``.
        SchemaError: A step split falls inside a sequence.
    """
    _check_unit(unit)
    if isinstance(batch, MultiAgentBatch):
        numbers, total = _numbers(batch, unit)
        _check_enough(n, total, unit)
        head, tail = batch._cut(numbers, [0, n, total], unit)
        if unit == "episodes":
            for part in (head, tail):  # A cut by episodes counts episodes; set the number of steps.
                part._env_steps = step_numbers(part)[1]
        return head, tail
    if unit == "steps":
        _check_enough(n, batch.count, unit)
        return batch[:n], batch[n:]
    ends = _ends(batch, unit)
    _check_enough(n, len(ends) - 1, unit)
    return batch[: ends[n]], batch[ends[n] :]


def _check_unit(unit: str) -> None:
    check_choice("unit", unit, ("steps", "sequences", "episodes"))


def _check_enough(n: int, total: int, unit: str) -> None:
    if not 0 <= n <= total:
        raise OptionError(f"split_units(n={n}): the batch has {total} {unit}")


def _ends(batch: SampleBatch, unit: str) -> list[int]:
    """The steps at which sequences or episodes end, 0 first."""
    if unit == "episodes":
        return episode_bounds(batch) or [0]
    if Columns.SEQ_LENS not in batch:
        raise MissingColumn("a batch without seq_lens has no sequences to count", column=Columns.SEQ_LENS)
    bounds: list[int] = boundaries(batch._lens()).tolist()
    return bounds


def _numbers(batch: MultiAgentBatch, unit: str) -> tuple[dict[str, np.ndarray], int]:
    """The unit number of each row, by policy; and the number of units."""
    if unit == "sequences":
        raise SchemaError("a MultiAgentBatch has no common sequences: count or split by steps or episodes")
    remembered = batch._remembered_order(unit)
    if remembered is not None:
        return remembered
    return step_numbers(batch) if unit == "steps" else episode_numbers(batch)
