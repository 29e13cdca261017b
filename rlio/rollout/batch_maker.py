"""`BatchMaker`: what becomes of recorded steps on their way into a batch.

They get the columns ``env_id``, ``agent_index`` and ``unroll_id``; those of episodes that callbacks do not
want are left out; and the policy and callbacks see them as trajectories.

Example:
    >>> from gymnasium.spaces import Box, Discrete
    >>> from rlio.envs.stepping import VectorStep
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> recorder = StepRecorder(Box(0, 9, (), np.float32), Discrete(2), num_envs=2, capacity=8)
    >>> recorder.start(np.array([0, 5]))
    >>> no = np.zeros(2, bool)
    >>> step = VectorStep(np.array([1, 6]), np.ones(2), no, no, None, no, [], {})
    >>> recorder.add(step, actions=np.array([0, 1]), extras={}, scalars={"eps_id": np.array([70, 80])})
    >>> maker = BatchMaker(recorder, RandomPolicy(), metrics=MetricsCollector(), progress=Progress(unrolls=5))
    >>> batch = maker.make()
    >>> batch["eps_id"].tolist(), batch["env_id"].tolist(), batch["unroll_id"].tolist()
    ([70, 80], [0, 1], [5, 6])
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch, concat_samples
from rlio.columns import Columns
from rlio.policies.policy import Policy
from rlio.rollout.episode_hooks import EpisodeHooks
from rlio.rollout.metrics import MetricsCollector
from rlio.rollout.progress import Progress
from rlio.rollout.recorder import StepRecorder
from rlio.rollout.trajectories import piece_starts

__all__ = ["BatchMaker"]


class BatchMaker:
    """Makes batches of a recorder's steps.

    Args:
        recorder: Has the steps.
        policy: Postprocesses them.
        metrics: Count rows that are left out.
        progress: Counts them too, and unroll ids.
        hooks: The episodes as callbacks know them; None where nobody looks at them.
    """

    def __init__(
        self,
        recorder: StepRecorder,
        policy: Policy,
        *,
        metrics: MetricsCollector,
        progress: Progress,
        hooks: EpisodeHooks | None = None,
    ) -> None:
        self._recorder = recorder
        self._policy = policy
        self._metrics = metrics
        self._progress = progress
        self._hooks = hooks

    def make(self, chosen: NDArray[np.bool_] | None = None, *, postprocess: bool = True) -> SampleBatch:
        """Take rows out of the recorder.

        Args:
            chosen: Which of its `valid` rows, shape (steps, N); None: all.
            postprocess: Whether they are the policy's: what it computes needs its own extra columns.
        """
        batch = self._wanted(self._numbered(chosen))
        if postprocess and len(batch):
            batch = self._postprocessed(batch)
        if self._hooks is not None:
            self._hooks.keep(np.unique(self._recorder.scalar(Columns.EPS_ID)).tolist())
        return batch

    def _numbered(self, chosen: NDArray[np.bool_] | None) -> SampleBatch:
        columns, counts = self._recorder.take(chosen)
        # Any: the recorder's columns may be nested, but this one is not.
        eps_id: Any = columns[Columns.EPS_ID]
        columns[Columns.ENV_ID] = np.repeat(np.arange(len(counts)), counts)
        columns[Columns.AGENT_INDEX] = np.zeros(len(eps_id), np.int64)
        starts = piece_starts(eps_id)
        columns[Columns.UNROLL_ID] = self._progress.unrolls + np.cumsum(starts) - 1
        self._progress.unrolls += int(starts.sum())
        return SampleBatch(columns)

    def _wanted(self, batch: SampleBatch) -> SampleBatch:
        """``batch`` without the episodes that callbacks do not want in it."""
        unwanted = () if self._hooks is None else self._hooks.not_for_training
        if not unwanted:
            return batch
        kept = np.flatnonzero(~np.isin(batch[Columns.EPS_ID], unwanted))
        self._progress.dropped += len(batch) - len(kept)
        self._metrics.rows_dropped(len(batch) - len(kept))
        kept_rows: SampleBatch = batch[kept]
        return kept_rows

    def _postprocessed(self, batch: SampleBatch) -> SampleBatch:
        hooks, policy = self._hooks, self._policy
        if hooks is None:
            return policy.postprocess_batch(batch)
        if policy.postprocesses or hooks.wants_trajectories:
            return concat_samples([hooks.postprocessed(part, policy) for part in batch.split_by_episode()])
        return batch
