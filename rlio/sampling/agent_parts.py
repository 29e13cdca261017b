"""`AgentPart`: the rows of one agent in one episode. `cut` makes parts of rows, `joined` a batch of parts.

Example:
    >>> import numpy as np
    >>> columns = {EPISODE: [0, 0, 0, 1], "agent_index": [0, 0, 2, 0], "eps_id": [5, 5, 5, 9]}
    >>> parts = cut("main", {name: np.array(values) for name, values in columns.items()})
    >>> [(part.number, part.agent_index, len(part.rows)) for part in parts]
    [(0, 0, 2), (0, 2, 1), (1, 0, 1)]
    >>> joined(parts, unrolls=100)["unroll_id"].tolist()
    [100, 100, 101, 102]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch, concat_samples
from rlio.batch.arrays import Column
from rlio.batch.columns import Columns
from rlio.batch.episode import Episode
from rlio.envs.multi_agent import AgentId
from rlio.sampling.agent_rows import AGENT_T, EPISODE, NEXT_T
from rlio.sampling.trajectories import piece_starts, with_sequences, without_states

__all__ = ["AgentPart", "cut", "joined"]


@dataclass(slots=True, eq=False)
class AgentPart:
    """Rows of one agent in one episode, in order.

    Attributes:
        policy_id: Id of the policy that acted.
        number: Number of the episode in its runner.
        agent_index: The agent's index.
        rows: The rows; may be replaced.
        whole: The batch of all parts of one `cut`, whose view ``rows`` is; None once ``rows`` was replaced.
        steps: The agent's own step of each row, counting only steps in which it acted.
        seen_t: The environment step at which each row's ``new_obs`` was observed.
    """

    policy_id: str
    number: int
    agent_index: int
    rows: SampleBatch
    whole: SampleBatch | None
    steps: NDArray[np.int64]
    seen_t: NDArray[np.int64]

    def env_ts(self) -> NDArray[np.int64]:
        """The environment step of each observation, including the final one if it is known."""
        ts: NDArray[np.int64] = np.asarray(self.rows[Columns.T])
        valid = self.rows.get(Columns.NEXT_OBS_VALID)
        return ts if valid is not None and not valid[-1] else np.append(ts, self.seen_t[-1:])

    def to_episode(self, agent_id: AgentId) -> Episode:
        """The rows as a trajectory that counts only the steps in which the agent acted."""
        rows = without_states(self.rows.copy(shallow=True))
        rows[Columns.T] = self.steps
        episode = Episode.from_batch(rows)
        episode.agent_id = agent_id
        return episode


def cut(
    policy_id: str, columns: Mapping[str, Column], began: Mapping[int | str, int] | None = None
) -> list[AgentPart]:
    """The parts of a policy's rows, which `AgentRows.take` returned; views of ``columns``.

    Args:
        policy_id: The policy.
        columns: Its rows.
        began: When their episodes began; see `SampleBatch.episode_starts`.
    """
    numbers, steps, seen = (_integers(columns, name) for name in (EPISODE, AGENT_T, NEXT_T))
    batch = SampleBatch(
        {name: column for name, column in columns.items() if name not in (EPISODE, AGENT_T, NEXT_T)},
        episode_starts=began,
    )
    agents = _integers(columns, Columns.AGENT_INDEX)
    starts = piece_starts(agents) | piece_starts(numbers)
    bounds = [*np.flatnonzero(starts).tolist(), len(agents)]
    return [
        AgentPart(
            policy_id,
            int(numbers[start]),
            int(agents[start]),
            batch[start:stop],
            batch,
            steps[start:stop],
            seen[start:stop],
        )
        for start, stop in pairwise(bounds)
    ]


def _integers(columns: Mapping[str, Any], name: str) -> NDArray[np.int64]:
    return np.asarray(columns.get(name, ()), np.int64)


def joined(parts: Sequence[AgentPart], *, unrolls: int, max_seq_len: int = 1) -> SampleBatch:
    """Join the parts of one `cut` into one batch.

    Args:
        parts: All its parts, at least one.
        unrolls: The ``unroll_id`` of the first part; the others follow it.
        max_seq_len: Maximum length of a recurrent policy's sequences.
    """
    whole = parts[0].whole if all(part.whole is not None for part in parts) else None
    batch = concat_samples([part.rows for part in parts]) if whole is None else whole
    lengths = [len(part.rows) for part in parts]
    batch[Columns.UNROLL_ID] = np.repeat(np.arange(unrolls, unrolls + len(parts)), lengths)
    # Sequences end with their part, as they end with the episode if there is one agent.
    return with_sequences(batch, max_seq_len=max_seq_len, pieces=Columns.UNROLL_ID)
