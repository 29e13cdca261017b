"""What a group promises of rows when workers, logs and services are lost: counts, recovery, restarts."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from group_envs import KnownEnv, check_nothing_missing, kill, make_known, stream
from linear_policy import LinearPolicy

import rlio
from rlio.connectors.mean_std import MeanStdFilter
from rlio.distributed import FaultTolerance, WorkerGroup
from rlio.errors import PublishError, WorkerError, WorkerLost
from rlio.sampling.config import RolloutConfig
from rlio.worker import RolloutWorker

pytest.importorskip("ray")
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_cluster")]

STEPS = 20
NAMES = ("obs", "new_obs", "rewards", "terminateds", "eps_id")
#: Nobody takes a lost worker's place: what it left in its log is recovered by the group, or not at all.
NO_RESTARTS = FaultTolerance(max_restarts=0, lost_workers="drop")


def config_of(folder: Path, **others: Any) -> RolloutConfig:
    return RolloutConfig(rollout_fragment_length=STEPS, env_config={"folder": str(folder)}, **others)


def columns_of(batches: list[Any]) -> dict[str, Any]:
    joined = rlio.concat_samples(batches)
    return {name: np.asarray(joined[name]) for name in NAMES}


def rows_of(root: str) -> dict[str, Any]:
    return columns_of(list(rlio.DatasetReader(root, epochs=1, batch_size=1000)))


def check_has(root: str, batches: list[Any]) -> None:
    """Raise unless the rows of ``batches`` are in the data set now, each once."""
    stored, returned = rows_of(root), columns_of(batches)
    assert len(np.unique(np.concatenate([stored["obs"], returned["obs"]]), axis=0)) == len(stored["obs"])


def lose(group: WorkerGroup, index: int) -> None:
    """Kill an idle worker, and let the group see it."""
    losses = len(group.losses)
    kill(group, index)
    while len(group.losses) == losses:
        group.probe()


def until_recovered(group: WorkerGroup) -> None:
    deadline = time.monotonic() + 60
    while group.losses[-1].rows_unpublished:
        assert time.monotonic() < deadline, "the log was not recovered in a minute"
        group.probe()


def flush(worker: RolloutWorker) -> None:
    worker.writer.flush()


@pytest.mark.further
def test_rows_not_in_the_data_set_are_counted_and_a_lost_log_is_recovered_before_the_group_is_closed(
    tmp_path: Path,
) -> None:
    """Also where a function opens the output, of which the group knows what its writer says."""
    root = str(tmp_path / "rows")

    def opened(context: Any) -> rlio.OutputWriter:
        writer = rlio.ParquetWriter(root, worker_index=context.worker_index)
        return rlio.PacedWriter(writer, pace=rlio.Pace(stale_seconds=0))

    with WorkerGroup(
        make_known,
        LinearPolicy,
        num_workers=2,
        seed=0,
        rollout=config_of(tmp_path),
        output=opened,
        fault_tolerance=NO_RESTARTS,
    ) as group:
        served = [group.sample()]
        group.foreach_worker(flush)
        served += [group.sample(), group.sample()]
        # A shard is stored after 30 s, or 64 MiB: what came since the flush is in the logs alone.
        assert [status.rows_unpublished for status in group.status()] == [2 * STEPS, 2 * STEPS]
        assert group.rows_unpublished == 4 * STEPS
        # Of a node that is gone: its log is recovered by another node of this machine.
        place = group._pool.workers[0]
        place.opened = replace(place.opened, node_id="gone")
        before = group.status()[0]
        lose(group, 1)
        (loss,) = group.losses
        assert (loss.writer_id, loss.host, loss.node_id) == (before.writer_id, before.host, before.node_id)
        assert loss.host
        assert loss.logs == (str(Path(root) / "_wal" / str(before.writer_id)),)
        assert loss.rows == 3 * STEPS
        assert loss.rows_unpublished in (0, 2 * STEPS)
        until_recovered(group)
        assert not Path(loss.logs[0]).exists()
        assert rlio.open_dataset(root).snapshot()[str(loss.writer_id)] == 3 * STEPS
        assert group.rows_unpublished == 2 * STEPS, "those of the worker that lives"
    assert group.rows_unpublished == 0
    check_has(root, served)
    check_nothing_missing(rows_of(root))


@pytest.mark.further
def test_rows_of_fragments_that_were_not_taken_are_published_when_the_group_is_closed(tmp_path: Path) -> None:
    root = str(tmp_path / "rows")
    with WorkerGroup(
        make_known, LinearPolicy, num_workers=2, seed=0, rollout=config_of(tmp_path), output=root
    ) as group:
        group.submit(2)
        group.ready()
        group.submit(2)
        group.foreach_worker(flush)  # Now all answers are there, and the group has not taken them.
        group.submit(2)
    assert group.rows_unpublished == 0
    assert sum(status.rows for status in group.status()) == len(rlio.open_dataset(root))


@pytest.mark.further
def test_rows_that_are_lost_with_a_disk_or_out_of_reach_stay_counted_and_machine_and_folder_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log of the first worker is gone; that of the second lies on a machine without a node."""
    root = str(tmp_path / "rows")
    with WorkerGroup(
        make_known,
        LinearPolicy,
        num_workers=2,
        seed=0,
        rollout=config_of(tmp_path),
        output=root,
        fault_tolerance=NO_RESTARTS,
    ) as group:
        served = [group.sample()]
        shutil.rmtree(Path(root) / "_wal" / str(group.status()[0].writer_id))
        lose(group, 1)
        place = group._pool.workers[1]
        place.opened = replace(place.opened, node_id="gone", host="elsewhere")
        with pytest.raises(WorkerLost):  # No worker is left.
            lose(group, 2)
        assert group.rows_unpublished == 2 * STEPS
        caplog.clear()
    first, second = group.losses
    assert [first.rows_unpublished, second.rows_unpublished] == [STEPS, STEPS]
    assert (second.node_id, second.host) == ("gone", "elsewhere")
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 2
    for loss, record in zip((first, second), told, strict=True):
        assert {loss.host, root, loss.logs[0], STEPS} <= set(record.args or ())
    assert len(rlio.open_dataset(root)) == 0
    rlio.maintenance.recover(root)
    found = rows_of(root)
    np.testing.assert_array_equal(found["obs"], columns_of(served)["obs"][STEPS:])
    assert rlio.verify(root).ok


@pytest.mark.further
def test_logs_on_this_machine_are_recovered_where_ray_was_shut_down_before_the_group_was_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(tmp_path / "rows")
    group = WorkerGroup(
        make_known, LinearPolicy, num_workers=2, seed=0, rollout=config_of(tmp_path), output=root
    )
    served = [group.sample()]
    for index in (1, 2):
        kill(group, index)
    with monkeypatch.context() as without:
        without.setattr("ray.is_initialized", lambda: False)
        without.setattr("ray.nodes", None)
        group.close()
    assert [loss.rows_unpublished for loss in group.losses] == [0, 0]
    check_has(root, served)


class Down(rlio.ParquetWriter):
    """Cannot publish anything while the file ``down`` is beside the data set."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.down = root.parent / "down"

    def _flush(self) -> None:
        if self.down.exists():
            raise PublishError("the store is down")
        super()._flush()


@pytest.fixture(scope="module")
def published(
    ray_cluster: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[WorkerGroup, Path, list[Any]]]:
    """One worker whose rows are returned once they are in the data set, the folder, and what was returned."""
    folder = tmp_path_factory.mktemp("published")
    with WorkerGroup(
        make_known,
        LinearPolicy,
        num_workers=1,
        seed=0,
        rollout=config_of(folder),
        output=lambda context: Down(folder / "rows"),
        acknowledge="published",
        fault_tolerance=NO_RESTARTS,
    ) as group:
        yield group, folder, []


@pytest.mark.further
def test_a_batch_that_could_not_be_published_is_an_error_and_comes_once_it_is(
    published: tuple[WorkerGroup, Path, list[Any]],
) -> None:
    group, folder, served = published
    served.append(group.sample())
    (folder / "down").touch()
    for _ in range(2):
        with pytest.raises(WorkerError) as caught:
            group.sample()
        assert isinstance(caught.value.__cause__, PublishError)
    check_has(str(folder / "rows"), served)
    (folder / "down").unlink()
    served += [group.sample(), group.sample()]
    check_nothing_missing(columns_of(served))
    assert group.get_metrics().counts.env_steps == 3 * STEPS
    assert not group.losses


def test_a_row_that_is_acknowledged_as_published_is_in_the_data_set_whatever_is_lost(
    published: tuple[WorkerGroup, Path, list[Any]],
) -> None:
    """The last of those with this group: its worker is lost."""
    group, folder, served = published
    root = str(folder / "rows")
    for fragment in stream(group, 2):
        served.append(fragment.batch)
        check_has(root, served)
        if len(served) >= 6:
            break
    while any(status.in_flight or status.waiting for status in group.status()):
        served += [fragment.batch for fragment in group.ready()]
    assert group.rows_unpublished == 0
    shutil.rmtree(folder / "rows" / "_wal" / str(group.status()[0].writer_id))
    with pytest.raises(WorkerLost):  # No worker is left.
        lose(group, 1)
    assert group.losses[0].rows_unpublished == 0
    check_has(root, served)


@pytest.mark.further
def test_a_loss_is_one_line_and_its_trace_is_for_debugging(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "rlio")
    with WorkerGroup(
        make_known,
        LinearPolicy,
        num_workers=2,
        seed=0,
        rollout=config_of(tmp_path),
        fault_tolerance=NO_RESTARTS,
    ) as group:
        group.sample()
        lose(group, 1)
        group.sample()
    told = [record for record in caplog.records if record.levelno >= logging.INFO]
    assert len(told) == 1, [record.getMessage() for record in told]
    assert len(told[0].getMessage()) < 400
    assert "\n" not in told[0].getMessage() + group.losses[0].reason
    traces = [record for record in caplog.records if record.levelno == logging.DEBUG and record.exc_info]
    assert len(traces) == 1


def make_in_an_outage(context: Any) -> KnownEnv:
    """Three workers that take another's place cannot be made: processes die, a service does not answer."""
    if context.recreated_worker:
        attempts = Path(context["folder"]) / f"attempts-{context.worker_index}"
        attempts.mkdir(exist_ok=True)
        number = len(list(attempts.iterdir()))
        (attempts / str(number)).touch()
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if number < 3:
            raise ConnectionError("no connection\nto the simulator")
    return KnownEnv(context)


@pytest.mark.further
def test_an_outage_does_not_use_up_all_restarts_and_raises_nothing(tmp_path: Path) -> None:
    root = str(tmp_path / "rows")
    with WorkerGroup(
        make_in_an_outage,
        LinearPolicy,
        num_workers=1,
        seed=0,
        rollout=config_of(tmp_path),
        output=root,
        fault_tolerance=FaultTolerance(restart_pause_s=0.01),
    ) as group:
        served = [group.sample()]
        group.submit(2)
        kill(group, 1)
        served += [fragment.batch for fragment in group.ready(timeout_s=0)]
        served += [group.sample(), group.sample()]
        assert [loss.incarnation for loss in group.losses] == [0, 1, 2, 3]
        assert all(loss.restarted for loss in group.losses)
        assert group.restarts == 4
    check_has(root, served)
    assert rlio.verify(root).ok


@pytest.mark.further
def test_restarts_wait_with_growing_pauses_and_the_others_go_on(tmp_path: Path) -> None:
    hour = FaultTolerance(restart_pause_s=3600.0, max_restart_pause_s=3600.0)
    config = config_of(tmp_path, observation_connectors=[MeanStdFilter()])
    with WorkerGroup(
        make_known, LinearPolicy, num_workers=2, seed=0, rollout=config, fault_tolerance=hour
    ) as group:
        group.sample()
        lose(group, 1)  # Another starts at once.
        while not group.status()[0].started:
            group.probe()
        lose(group, 1)  # It gave no batch.
        waiting = group._pool.workers[0]
        assert waiting.restart_at is not None
        assert 0.4 * 3600 < waiting.restart_at - time.monotonic() <= 3600
        status = group.status()[0]
        assert (status.alive, status.started, status.incarnation, status.pid) == (True, False, 2, None)
        found = [fragment for fragment, _ in zip(stream(group, 2), range(5), strict=False)]
        assert {fragment.worker_index for fragment in found} == {2}
        group.sync_filters()
        late, there = group.foreach_worker(lambda worker: 7, timeout_s=0.1, errors="return")
        assert isinstance(late, WorkerLost)
        assert there == 7 or isinstance(there, WorkerError)
        assert all(status.alive for status in group.probe())
        assert group.restarts == 2
        # The end of the block does not wait for an hour.
    assert not any(status.alive for status in group.status())
