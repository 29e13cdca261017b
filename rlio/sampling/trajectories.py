"""Final steps before a runner's rows are served: unroll ids, and sequences of recurrent policies.

Example:
    >>> import numpy as np
    >>> from rlio.batch import SampleBatch
    >>> batch = SampleBatch(eps_id=[7, 7, 7, 8], rewards=[0.0, 1.0, 2.0, 3.0])
    >>> batch[f"{STATE_BEFORE_PREFIX}0"] = np.array([[0.0], [0.1], [0.2], [0.0]])
    >>> cut = with_sequences(batch, max_seq_len=2)
    >>> cut["seq_lens"].tolist(), cut["state_in_0"].ravel().tolist()
    ([2, 1, 1], [0.0, 0.2, 0.0])
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.columns import STATE_IN_PREFIX, Columns
from rlio.sampling.actor import STATE_BEFORE_PREFIX

__all__ = ["piece_starts", "with_sequences", "without_states"]


def piece_starts(ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mask of the rows that begin a run of equal ``ids``, such as a piece of an episode."""
    starts = np.ones(len(ids), bool)
    starts[1:] = ids[1:] != ids[:-1]
    return starts


def with_sequences(batch: SampleBatch, *, max_seq_len: int, pieces: str = Columns.EPS_ID) -> SampleBatch:
    """Add ``seq_lens`` and ``state_in_k`` of its sequences to ``batch``, if its policy is recurrent.

    Args:
        batch: Contiguous pieces of episodes; do not use it afterwards.
        max_seq_len: Maximum steps in a sequence.
        pieces: Column with another value in each piece than in the one before; sequences end with a piece.
    """
    states = _state_names(batch)
    if not states:
        return batch
    starts = np.flatnonzero(piece_starts(np.asarray(batch[pieces])))
    lengths = np.diff(np.append(starts, len(batch)))
    sequences = -(-lengths // max_seq_len)
    # Number of each sequence within its piece.
    number = np.arange(sequences.sum()) - np.repeat(np.cumsum(sequences) - sequences, sequences)
    first = np.repeat(starts, sequences) + number * max_seq_len
    columns = {name: column for name, column in batch.items() if name not in states}
    for name in states:
        columns[f"{STATE_IN_PREFIX}{name.removeprefix(STATE_BEFORE_PREFIX)}"] = batch[name][first]
    columns[Columns.SEQ_LENS] = np.diff(np.append(first, len(batch))).astype(np.int32)
    return SampleBatch(columns)


def without_states(batch: SampleBatch) -> SampleBatch:
    """Remove the state before each step from ``batch``: in an episode, each follows from the last."""
    for name in _state_names(batch):
        del batch[name]
    return batch


def _state_names(batch: SampleBatch) -> list[str]:
    return [name for name in batch if name.startswith(STATE_BEFORE_PREFIX)]
