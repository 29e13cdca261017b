"""Writes the rows of a batch that have a stored form, where others of them have none.

A batch of a rollout has the rows of many steps; an info with a set in one of them must not cost the others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch, MultiAgentBatch, SampleBatch
from rlio.batch.columns import Columns
from rlio.batch.nested import leaves, path_text
from rlio.errors import SchemaError
from rlio.schemas.json_values import check_text, check_value
from rlio.writer import OutputWriter

__all__ = ["write_storable"]


def write_storable(writer: OutputWriter, batch: Batch) -> None:
    """Write a batch; if some of its rows have no stored form, write the others before raising.

    Raises:
        SchemaError: Some rows have no stored form, which a note counts; or the writer refuses the batch, of
            which no row is then written.
        ClosedError, PublishError: See `rlio.OutputWriter.write`.
    """
    try:
        writer.write(batch)
    except SchemaError as error:
        storable = _storable(batch)
        lost = batch.agent_steps() - storable.agent_steps()
        if lost and storable.agent_steps():
            writer.write(storable)
            error.add_note(f"{lost} of {batch.agent_steps()} rows cannot be stored; the others are written")
        raise


def _storable(batch: Batch) -> Batch:
    """The rows whose objects have a stored form; all of them if the batch has sequences."""
    if isinstance(batch, MultiAgentBatch):
        parts = {policy: _rows_of(part) for policy, part in batch.policies().items()}
        parts = {policy: part for policy, part in parts.items() if len(part)}
        return MultiAgentBatch(parts, batch.env_steps())
    return _rows_of(batch)


def _rows_of(batch: SampleBatch) -> SampleBatch:
    if Columns.SEQ_LENS in batch:
        return batch
    kept: SampleBatch = batch[_mask(batch)]
    return kept


def _mask(batch: SampleBatch) -> NDArray[np.bool_]:
    found = np.ones(len(batch), bool)
    for name in batch:
        for path, values in leaves(batch[name]):
            if not (isinstance(values, np.ndarray) and values.dtype.kind == "O"):
                continue
            place = "/".join(filter(None, (name, path_text(path))))
            # A column of texts is stored as text, which JSON is not.
            check = check_text if all(isinstance(value, str) for value in values) else check_value
            for row, value in enumerate(values):
                try:
                    check(value, place)
                except SchemaError:
                    found[row] = False
    return found
