"""A group on two nodes of Ray: logs are recovered where they lie, and a node may go."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray_cluster
from group_envs import make_known
from linear_policy import LinearPolicy

import rlio
from rlio.distributed import FaultTolerance, WorkerGroup
from rlio.distributed.group.log_recovery import recover_logs
from rlio.sampling.config import RolloutConfig

ray = pytest.importorskip("ray")
# In `make test`, test_distributed_group_outages.py says of one node that it is gone.
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_cluster"), pytest.mark.further]

STEPS = 20


def group_on_both(root: str) -> WorkerGroup:
    """Two workers, each of which takes the only seat of a node; nobody takes a lost one's place."""
    return WorkerGroup(
        make_known,
        LinearPolicy,
        num_workers=2,
        seed=0,
        rollout=RolloutConfig(rollout_fragment_length=STEPS),
        output=root,
        fault_tolerance=FaultTolerance(max_restarts=0, lost_workers="drop"),
        actor_options={"resources": {"seat": 1}},
    )


def until_recovered(group: WorkerGroup) -> None:
    while not group.losses or group.losses[-1].rows_unpublished:
        group.probe()


def obs_of(batches: list[Any]) -> Any:
    return np.asarray(rlio.concat_samples(batches)["obs"])


def check_has(root: str, served: list[Any]) -> None:
    """Raise unless each row of ``served`` is in the data set now."""
    stored = obs_of(list(rlio.DatasetReader(root, epochs=1, batch_size=1000)))
    assert len(np.unique(np.concatenate([stored, obs_of(served)]), axis=0)) == len(stored)


def recover_and_tell(logs: Sequence[Any]) -> int:
    """As `recover_logs`; the folder beside the data set says on which node."""
    told = Path(logs[0].storage.root).parent / "recovered-on"
    told.write_text(ray.get_runtime_context().get_node_id())
    return recover_logs(logs)


def test_a_log_is_recovered_on_its_node_or_on_another_one_of_its_machine_once_that_node_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ray_cluster.second_node() as node:
        root = str(tmp_path / "lives" / "rows")
        with group_on_both(root) as group:
            group._pool._recovery._task = ray.remote(recover_and_tell)
            served = [group.sample()]
            (there,) = [status for status in group.status() if status.node_id == node.node_id]
            assert there.pid is not None
            os.kill(there.pid, signal.SIGKILL)
            until_recovered(group)
            assert (tmp_path / "lives" / "recovered-on").read_text() == node.node_id
            assert rlio.open_dataset(root).snapshot()[str(there.writer_id)] == STEPS
        check_has(root, served)

        root = str(tmp_path / "gone" / "rows")
        with group_on_both(root) as group:
            served = [group.sample()]
            (there,) = [status for status in group.status() if status.node_id == node.node_id]
            ray_cluster.stop_node(node)
            until_recovered(group)
            (loss,) = group.losses
            assert (loss.worker_index, loss.node_id, loss.host) == (
                there.worker_index,
                node.node_id,
                there.host,
            )
            assert rlio.open_dataset(root).snapshot()[str(loss.writer_id)] == STEPS
            assert len(group.sample()) == STEPS, "the other one goes on"
        check_has(root, served)
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


def test_a_log_on_a_machine_without_a_node_is_named_when_the_group_is_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = str(tmp_path / "rows")
    with ray_cluster.second_node() as node, group_on_both(root) as group:
        group.sample()
        (place,) = [each for each in group._pool.workers if each.opened.node_id == node.node_id]
        place.opened = replace(place.opened, host="elsewhere")
        ray_cluster.stop_node(node)
        while not group.losses:
            group.probe()
        assert group.rows_unpublished == 2 * STEPS
        caplog.clear()
    (loss,) = group.losses
    assert (loss.host, loss.rows_unpublished) == ("elsewhere", STEPS)
    (told,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert {"elsewhere", root, loss.logs[0], STEPS} <= set(told.args or ())
    while len(rlio.open_dataset(root)) < 2 * STEPS:  # Its process, of a node that is gone, dies soon.
        rlio.maintenance.recover(root)
    assert rlio.verify(root).ok
