"""Workers of a group side by side: as quick as they are many, and followed by a learner as they write."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from group_envs import check_nothing_missing, make_known
from linear_policy import LinearPolicy

import rlio
from rlio.distributed import WorkerGroup
from rlio.replay.draws import Draw
from rlio.sampling.config import RolloutConfig
from rlio.schemas.provenance import Provenance
from rlio.worker import RolloutWorker

pytest.importorskip("ray")
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_cluster")]

STEPS = 20
NAMES = ("obs", "new_obs", "rewards", "terminateds", "eps_id")
LIMITS = rlio.SamplesPerInsert(min=2, max=4, error_buffer=400, min_size=100)


def paced(root: str, context: Any) -> rlio.OutputWriter:
    """In each worker: a writer that waits for who follows."""
    made_by = Provenance(**context.made_by)
    writer = rlio.ParquetWriter(root, worker_index=context.worker_index, provenance=made_by)
    return rlio.PacedWriter(writer, pace=rlio.Pace(poll_seconds=0.01, stale_seconds=600))


def waits(worker: RolloutWorker) -> tuple[int, int]:
    assert isinstance(worker.writer, rlio.PacedWriter)
    return worker.writer.waits, worker.writer.unheeded


@pytest.mark.further
def test_a_learner_follows_what_a_group_writes_within_limits_and_across_a_kill(tmp_path: Path) -> None:
    root, failed = str(tmp_path / "rows"), []
    replay = rlio.FollowingReplay(
        root,
        capacity=100_000,
        batch_size=32,
        seed=0,
        ratio=LIMITS,
        markers=rlio.Markers("learner", every_seconds=0.01),
        poll_seconds=0.01,
        timeout=600,
    )

    def learn() -> None:
        try:
            for _ in replay:
                counters = replay.counters
                # Other rows may be put in between; what was drawn, only here.
                assert counters.drawn <= LIMITS.most_drawn(replay.counters.inserted)
                assert counters.inserted <= LIMITS.most_inserted(replay.counters.drawn)
                time.sleep(0.02)  # Slower than the group: it has to wait.
        except BaseException as error:
            failed.append(error)

    learner = threading.Thread(target=learn)
    with WorkerGroup(
        make_known,
        LinearPolicy,
        num_workers=2,
        seed=8,
        output=partial(paced, root),
        rollout=RolloutConfig(rollout_fragment_length=STEPS),
    ) as group:
        learner.start()  # First: writers wait for who follows.
        served = [group.sample()]
        for number in range(20):
            if number == 8:
                pid = group.status()[0].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            served.append(group.sample())
        felt: Any = group.foreach_worker(waits)
        losses = group.losses
    learner.join(600)
    with replay:
        assert not learner.is_alive()
        assert not failed
        with replay._feed.changed:
            seen = replay.store.units(Draw()).batch(np.arange(len(replay.store)))
        counters = replay.counters
    columns = {name: np.asarray(seen[name]) for name in NAMES}
    check_nothing_missing(columns)
    assert counters.inserted == len(seen) == len(rlio.open_dataset(root))
    assert counters.drawn == LIMITS.most_drawn(counters.inserted)
    assert [loss.worker_index for loss in losses] == [1]
    # Every row that was served was put in; those behind are of the fragment that was lost.
    acknowledged = np.asarray(rlio.concat_samples(served)["obs"])
    assert len(np.unique(np.concatenate([acknowledged, columns["obs"]]), axis=0)) == len(seen)
    assert 0 <= len(seen) - len(acknowledged) <= losses[0].requests * STEPS
    assert sum(waited for waited, _ in felt) > 0, "the limits were felt"
    assert [unheeded for _, unheeded in felt] == [0, 0]
    assert rlio.verify(root).ok
