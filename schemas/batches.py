"""Turns decoded row groups into batches, whose pictures may still be encoded."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.batch.nested import Path
from rlio.batch.picture_codecs import decode_batch
from rlio.errors import CorruptData, SchemaError, raise_at
from rlio.schemas.folded import Folded, unfold
from rlio.schemas.frame_pools import Frames
from rlio.schemas.leaves import is_named, rebuild
from rlio.schemas.policy_schema import PolicySchema
from rlio.schemas.shard_file import DecodedGroup

__all__ = ["pictures_decoded", "to_batch", "to_folded"]


def to_batch(group: DecodedGroup, *, columns: Collection[str] | None = None) -> SampleBatch | MultiAgentBatch:
    """Return the rows of a group as the kind of batch that was written.

    Args:
        group: The group; the batch takes over its arrays.
        columns: Logical columns, or parts of them, in any order; None: all. The batch has them in the order
            of the schema.
    """
    return unfold([to_folded(group, columns=columns)])


def to_folded(group: DecodedGroup, *, columns: Collection[str] | None = None) -> Folded:
    """Convert like `to_batch`, but without looking up frame stacks yet."""
    parts = {
        pid: _policy_batch(group, group.schema.policies[pid], rows, columns)
        for pid, rows in group.policies().items()
    }
    if group.schema.multi_agent:
        whole = [(pid, unfold([part])) for pid, part in parts.items()]
        found = {pid: batch for pid, batch in whole if isinstance(batch, SampleBatch)}
        return Folded(MultiAgentBatch(found, group.info.env_steps))
    if len(parts) != 1:
        raise CorruptData(f"rows of {len(parts)} policies in a shard of one")
    return next(iter(parts.values()))


def _policy_batch(
    group: DecodedGroup,
    policy: PolicySchema,
    rows: NDArray[np.int64] | None,
    columns: Collection[str] | None,
) -> Folded:
    """Return the rows of one policy."""
    made: dict[str, Any] = {}
    frames: dict[tuple[str, Path], Frames] = {}
    for column, every in policy.columns.items():
        leaves = [leaf for leaf in every if is_named(leaf, columns)]
        if leaves:
            made[column] = rebuild([(leaf.path, group.values(leaf, rows)) for leaf in leaves])
            frames |= {
                (column, leaf.path): group.frames[leaf.physical]
                for leaf in leaves
                if leaf.physical in group.frames
            }
    attributes = _attributes(group) if not group.schema.multi_agent else {}
    # The constructor checks lengths, at about 10 us per group: only a forged file can fail here.
    try:
        batch = SampleBatch(made)
        longest = batch.max_seq_len
        # A batch that began in the previous group may have left longer sequences here.
        if longest is not None and attributes.get("max_seq_len", 0) < longest:
            attributes.pop("max_seq_len", None)
        return Folded(SampleBatch(made, **attributes) if attributes else batch, frames)
    except SchemaError as error:
        raise CorruptData(f"the columns of a row group do not fit each other: {error}") from error


def _attributes(group: DecodedGroup) -> dict[str, Any]:
    """Return ``max_seq_len`` and the mean ``num_grad_updates`` of the written batches that begin here."""
    texts = set(group.batches)
    if texts <= {"{}"}:
        return {}
    try:
        written = [dict(json.loads(text)) for text in texts]
        longest = [int(entry["max_seq_len"]) for entry in written if "max_seq_len" in entry]
        updates = [float(entry["num_grad_updates"]) for entry in written if "num_grad_updates" in entry]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptData(f"the attributes of a written batch are damaged: {error}") from error
    found: dict[str, Any] = {}
    if longest:
        found["max_seq_len"] = max(longest)
    if updates:
        found["num_grad_updates"] = sum(updates) / len(updates)
    return found


def pictures_decoded(
    batch: SampleBatch | MultiAgentBatch, uri: str, record: int
) -> SampleBatch | MultiAgentBatch:
    """Return rows of a shard with their pictures decoded.

    Raises:
        CorruptData: One of them is damaged.
    """
    try:
        return decode_batch(batch)
    except CorruptData as error:
        raise_at(error, uri=uri, record=record)
