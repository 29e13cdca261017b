"""synchronize_filters: the statistics of all workers are those of one that saw everything."""

from __future__ import annotations

import numpy as np
import pytest
from linear_policy import LinearPolicy

from rlio.connectors.connector import Streams
from rlio.connectors.mean_std import MeanStdFilter
from rlio.errors import StateError
from rlio.sampling.config import RolloutConfig
from rlio.sampling.filters import synchronize_filters
from rlio.sampling.runners import WorkerPlace
from rlio.worker import RolloutWorker


class Spied(MeanStdFilter):
    """Remembers what went through."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[np.ndarray] = []

    def __call__(self, values: np.ndarray, streams: Streams | None = None) -> np.ndarray:
        self.seen.append(values.copy())
        filtered: np.ndarray = super().__call__(values, streams)
        return filtered


def worker_of(index: int, filters: int = 1) -> RolloutWorker:
    config = RolloutConfig(rollout_fragment_length=20, observation_connectors=[Spied()] * filters)
    return RolloutWorker("CartPole-v1", LinearPolicy(), rollout=config, place=WorkerPlace(index, 3), seed=0)


def filter_of(worker: RolloutWorker) -> Spied:
    (found,) = worker.get_filters()["default_policy"]
    assert isinstance(found, Spied)
    return found


def test_each_observation_counts_once_however_often_workers_synchronise() -> None:
    """Row "FilterManager.synchronize"; row "MeanStdFilter" of 2.6."""
    workers = [worker_of(index) for index in (1, 2, 3)]
    for _ in range(3):
        for worker in workers:
            worker.sample()
        synchronize_filters(workers)
    seen = np.concatenate([np.concatenate(filter_of(worker).seen) for worker in workers]).astype(np.float64)
    for worker in workers:
        stat = filter_of(worker).running_stats
        assert stat.n == len(seen)
        assert np.allclose(stat.mean, seen.mean(axis=0))
        assert np.allclose(stat.std, seen.std(axis=0, ddof=1))
        assert filter_of(worker).buffer.n == 0
        worker.close()


def test_workers_that_are_not_alike_are_refused() -> None:
    with worker_of(1) as one, worker_of(2, filters=2) as other, pytest.raises(StateError, match="made alike"):
        synchronize_filters([one, other])
    synchronize_filters([])
