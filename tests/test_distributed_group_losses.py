"""Workers of a group die and hang: what they had written stays, others take their place, and go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from further import further
from group_envs import (
    Counting,
    check_nothing_missing,
    check_rows,
    kill,
    make_known,
    settle,
    stream,
    until_answered,
)
from linear_policy import LinearPolicy

import rlio
from rlio.connectors.mean_std import MeanStdFilter, RunningStat
from rlio.distributed import FaultTolerance, WorkerGroup
from rlio.distributed.group import worker_group as module
from rlio.distributed.group.worker_spec import WorkerId, WorkerSpec
from rlio.errors import ClosedError, WorkerError, WorkerLost
from rlio.sampling.config import RolloutConfig
from rlio.worker import RolloutWorker

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_cluster")]

STEPS = 50
NAMES = ("obs", "new_obs", "rewards", "terminateds", "eps_id")


def columns_of(batches: list[Any]) -> dict[str, Any]:
    joined = rlio.concat_samples(batches)
    return {name: np.asarray(joined[name]) for name in NAMES}


def by_writer(root: str) -> dict[str, dict[str, Any]]:
    """The columns of each writer's rows, in their order."""
    dataset = rlio.open_dataset(root)
    snapshot = dataset.snapshot()
    rows = columns_of(list(rlio.DatasetReader(root, epochs=1, batch_size=1000)))
    found, start = {}, 0
    for writer in sorted(snapshot):
        count = snapshot[writer]
        assert isinstance(count, int)
        found[writer] = {name: column[start : start + count] for name, column in rows.items()}
        start += count
    assert start == len(rows["obs"])
    return found


def config_of(folder: Path, **others: Any) -> RolloutConfig:
    return RolloutConfig(rollout_fragment_length=STEPS, env_config={"folder": str(folder)}, **others)


@pytest.mark.parametrize(("num_workers", "rounds"), [(2, 10), *further((2, 20), (4, 40))])
def test_killed_workers_lose_no_row_that_was_acknowledged_and_what_is_lost_is_told(
    tmp_path: Path, num_workers: int, rounds: int
) -> None:
    """Two workers are killed with SIGKILL on the way: the second, and then the first."""
    root, orders = str(tmp_path / "rows"), tmp_path / "orders"
    orders.mkdir()
    group = WorkerGroup(
        make_known, LinearPolicy, num_workers=num_workers, seed=3, rollout=config_of(orders), output=root
    )
    served = []
    with group:
        for fragments in range(rounds):
            if fragments == rounds * 3 // 10:
                # In flight and served or not, and on its way to be written: wherever it is.
                group.submit(2)
                kill(group, 2)
            if fragments == rounds * 6 // 10:
                (orders / "die-1").touch()  # In the middle of a fragment.
            if fragments == rounds // 2:
                group.set_weights({"w": np.array([7.0])})
            served.append(group.sample())
            assert len(served[-1]) == num_workers * STEPS
        rest = [fragment.batch for fragment in group.ready(timeout_s=0)]
        metrics = group.get_metrics()
        status = group.status()
    assert [s.incarnation for s in status] == [1, 1, 0, 0][:num_workers]
    assert [(loss.worker_index, loss.restarted) for loss in group.losses] == [(2, True), (1, True)]
    assert 0 < sum(loss.requests for loss in group.losses) <= 3

    acknowledged = columns_of(served + rest)
    check_rows(acknowledged)
    stored = by_writer(root)
    everything = {name: np.concatenate([rows[name] for rows in stored.values()]) for name in NAMES}
    check_nothing_missing(everything)
    # Of each writer the first rows were acknowledged, those behind were told as lost.
    counts = {s.writer_id: (s.rows, 0) for s in status}
    counts |= {loss.writer_id: (loss.rows, loss.requests) for loss in group.losses}
    assert stored.keys() == counts.keys()
    kept = []
    for writer, rows in stored.items():
        came, lost = counts[writer]
        assert came <= len(rows["obs"]) <= came + lost * STEPS
        kept.append({name: column[:came] for name, column in rows.items()})
    obs = np.concatenate([rows["obs"] for rows in kept])
    np.testing.assert_array_equal(np.unique(obs, axis=0), np.unique(acknowledged["obs"], axis=0))
    assert (
        len(obs)
        == len(acknowledged["obs"])
        == sum(s.rows for s in status) + sum(x.rows for x in group.losses)
    )
    # Metrics are those of the rows that came; episodes of the others are in the data set, and told as lost.
    ends = sum(int(rows["terminateds"].sum()) for rows in kept)
    assert metrics.counts.episodes == metrics.lifetime.episodes == ends
    assert metrics.counts.env_steps == len(obs)
    # Who came later began with the newest weights.
    assert set(np.asarray(served[-1]["w_then"])) == {7.0}
    assert not list(Path(root).glob("_wal/*/*.wal"))
    assert rlio.verify(root).ok
    # With nobody dead, it is what these workers sample anywhere.
    spec = WorkerSpec(
        make_known, LinearPolicy, {"rollout": config_of(orders)}, num_workers=num_workers, seed=3
    )
    for index in range(1, num_workers + 1):
        with spec.make(WorkerId(index)) as worker:
            alone = worker.sample()
        for name in alone:
            part = served[0][name][(index - 1) * STEPS : index * STEPS]
            np.testing.assert_array_equal(part, alone[name], err_msg=name)


def has_filters(worker: RolloutWorker) -> tuple[int, int, bool]:
    (mine,) = worker.get_filters()["default_policy"]
    return mine.running_stats.n, mine.buffer.n, bool(worker.creation_args["place"].recreated_worker)


@pytest.fixture(scope="module")
def group(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerGroup, Path]]:
    """Two workers, which may die for ever."""
    folder = tmp_path_factory.mktemp("orders")
    config = config_of(folder, observation_connectors=[Counting(), MeanStdFilter()])
    # Longer than a test may take: who is late is told by the tests, and not by the clock.
    tolerance = FaultTolerance(request_timeout_s=1800.0, probe_timeout_s=1800.0)
    root = str(tmp_path_factory.mktemp("group") / "rows")
    with WorkerGroup(
        make_known,
        LinearPolicy,
        num_workers=2,
        seed=4,
        rollout=config,
        fault_tolerance=tolerance,
        output=root,
    ) as made:
        yield made, folder


def seen(worker: RolloutWorker) -> int:
    return Counting.seen


def observations(worker: RolloutWorker) -> int:
    return int(worker.get_filters()["default_policy"][0].running_stats.n)


def buffers(worker: RolloutWorker) -> RunningStat:
    stat = worker.get_filters()["default_policy"][0].buffer
    assert isinstance(stat, RunningStat)
    return stat


@pytest.mark.further
def test_statistics_of_all_workers_are_put_together_each_observation_once(
    group: tuple[WorkerGroup, Path],
) -> None:
    """The first of those with this group: all observations of its workers are counted."""
    workers, _ = group
    workers.sample()
    expected = RunningStat((3,))
    for part in workers.foreach_worker(buffers):
        assert isinstance(part, RunningStat)
        expected.update(part)
    joint = workers.sync_filters()["default_policy"][0].running_stats
    assert joint.n == expected.n > 0
    np.testing.assert_allclose(joint.mean, expected.mean)
    np.testing.assert_allclose(joint.std, expected.std)
    for _ in range(3):
        # Workers go on between the moment that they tell what they saw and the moment that they are told.
        workers.submit(2)
        workers.sync_filters()
        workers.ready()
    while any(status.in_flight for status in workers.status()):
        workers.ready()
    joint = workers.sync_filters()["default_policy"][0].running_stats
    assert joint.n == sum(n for n in workers.foreach_worker(seen) if isinstance(n, int))
    assert workers.foreach_worker(observations) == [joint.n] * 2
    state = workers.state_dict()
    workers.load_state_dict(state)
    assert workers.foreach_worker(observations) == [joint.n] * 2


@pytest.mark.further
def test_who_takes_anothers_place_begins_with_weights_and_filters_and_others_go_on_meanwhile(
    group: tuple[WorkerGroup, Path],
) -> None:
    workers, folder = group
    workers.sample()
    joint = workers.sync_filters()["default_policy"][0].running_stats.n
    newest = workers.set_weights({"w": np.array([5.0])})
    before = workers.status()[0].incarnation
    kill(workers, 1)
    (folder / "wait-1").touch()
    others = 0
    for fragment in stream(workers, 1):
        assert set(np.asarray(fragment.batch["w_then"])) == {5.0}
        assert set(np.asarray(fragment.batch["weights_seq_no"])) == {newest}
        if fragment.worker_index == 1:
            assert fragment.incarnation == before + 1
            break
        others += 1
        if others == 3:
            (folder / "wait-1").unlink()
    assert others >= 3
    running, buffer, recreated = workers.foreach_worker(has_filters)[0]  # type: ignore[misc]  # no error
    assert recreated
    assert running == joint + buffer
    assert buffer >= STEPS


def test_what_had_come_is_served_though_its_worker_died_since(group: tuple[WorkerGroup, Path]) -> None:
    workers, _ = group
    settle(workers)
    before = [status.incarnation for status in workers.status()]
    workers.get_metrics()
    workers.submit()
    until_answered(workers)
    kill(workers, 1)
    assert [status.incarnation for status in workers.probe()] == [before[0] + 1, before[1]]
    fragments = workers.ready()
    # In the order in which they came, which is any.
    came_from = sorted((each.worker_index, each.incarnation) for each in fragments)
    assert came_from == list(zip((1, 2), before, strict=True))
    assert workers.get_metrics().counts.env_steps == 2 * STEPS
    assert workers.losses[-1].requests == 0


@pytest.mark.further
def test_a_worker_that_hangs_is_replaced(group: tuple[WorkerGroup, Path]) -> None:
    workers, folder = group
    settle(workers)
    restarts = workers.restarts
    (folder / "hang-2").touch()
    workers.submit()
    while (folder / "hang-2").exists():
        time.sleep(0.01)
    workers._pool.workers[1].heard -= 3600.0
    assert len(workers.sample()) == 2 * STEPS
    assert workers.restarts == restarts + 1
    loss = workers.losses[-1]
    assert (loss.worker_index, loss.requests, loss.restarted) == (2, 1, True)


@pytest.mark.further
def test_a_probe_finds_idle_workers_that_died(group: tuple[WorkerGroup, Path]) -> None:
    workers, _ = group
    settle(workers)
    before = workers.probe()
    assert all(status.alive for status in before)
    kill(workers, 2)
    after = workers.probe()
    assert [s.incarnation for s in after] == [before[0].incarnation, before[1].incarnation + 1]
    assert workers.losses[-1].requests == 0
    assert len(workers.sample()) == 2 * STEPS


class PatientRay:
    """Ray, for a clock that stands still until the first answer is there."""

    def __getattr__(self, name: str) -> Any:
        return getattr(ray, name)

    def wait(self, references: list[Any], *, num_returns: int, timeout: float) -> Any:
        return ray.wait(references, num_returns=1)


@pytest.mark.further
def test_a_probe_replaces_idle_workers_that_hang_and_tells_of_those_that_cannot_sample(
    group: tuple[WorkerGroup, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, _ = group
    settle(workers)
    before = [status.incarnation for status in workers.status()]
    late = workers.foreach_worker(hang_in_second, timeout_s=0.1, errors="return")[1]
    assert isinstance(late, WorkerError)
    with monkeypatch.context() as patched:
        patched.setattr(workers._pool, "_ray", PatientRay())
        after = workers.probe(timeout_s=1.0)
    assert [s.incarnation for s in after] == [before[0], before[1] + 1]
    settle(workers)
    workers.foreach_worker(stop_second)
    with pytest.raises(WorkerError, match="worker 2 raised ClosedError"):
        workers.probe()
    kill(workers, 2)
    assert [s.incarnation for s in workers.probe()] == [before[0], before[1] + 2]
    assert len(workers.sample()) == 2 * STEPS


def hang_in_second(worker: RolloutWorker) -> None:
    if worker.creation_args["place"].worker_index == 2:
        time.sleep(600)


def stop_second(worker: RolloutWorker) -> None:
    if worker.creation_args["place"].worker_index == 2:
        assert worker.runner is not None
        worker.runner.stop()


@pytest.mark.further
def test_a_call_that_a_worker_dies_in_is_an_error_and_another_takes_its_place(
    group: tuple[WorkerGroup, Path],
) -> None:
    workers, _ = group
    settle(workers)
    before = workers.status()[1].incarnation
    workers.get_metrics()
    workers.submit()
    until_answered(workers)
    answers = workers.foreach_worker(die_in_second, errors="return")
    assert answers[0] == 1
    assert isinstance(answers[1], WorkerLost)
    assert answers[1].worker_index == 2
    # What it had sampled before it died had come, though nobody had looked.
    assert workers.losses[-1].requests == 0
    found = workers.ready()
    while len(found) < 2:
        found += workers.ready()
    assert {(each.worker_index, each.incarnation) for each in found} >= {(2, before)}
    assert workers.get_metrics().counts.env_steps == 2 * STEPS
    assert len(workers.sample()) == 2 * STEPS


def die_in_second(worker: RolloutWorker) -> int:
    index = int(worker.creation_args["place"].worker_index)
    if index == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return index


def test_a_group_that_nobody_closed_is_closed_at_exit_and_waiters_can_be_let_go(
    group: tuple[WorkerGroup, Path],
) -> None:
    """The last of those with this group."""
    workers, folder = group
    for _ in range(5):
        assert len(workers.sample()) == 2 * STEPS
    (folder / "wait-1").touch()
    workers.interrupt()
    with pytest.raises(ClosedError, match="interrupted"):
        workers.sample()
    (folder / "wait-1").unlink()
    module._close_open_groups()
    with pytest.raises(ClosedError):
        workers.sample()
    root = workers._arguments["output"]
    rows = columns_of(list(rlio.DatasetReader(root, epochs=1, batch_size=1000)))
    assert len(rows["obs"]) >= 10 * STEPS


@pytest.mark.parametrize("lost_workers", ["raise", *further("drop")])
@pytest.mark.further
def test_a_worker_that_always_dies_is_given_up_and_what_it_had_written_is_stored(
    tmp_path: Path, lost_workers: Any
) -> None:
    root, drops = str(tmp_path / "rows"), lost_workers == "drop"
    with WorkerGroup(
        make_known,
        LinearPolicy,
        num_workers=2,
        seed=0,
        rollout=config_of(tmp_path),
        fault_tolerance=FaultTolerance(max_restarts_in_a_row=int(drops), lost_workers=lost_workers),
        output=root,
    ) as workers:
        served = [workers.sample()]
        (tmp_path / "always-die-1").touch()
        if drops:
            served += [workers.sample(), workers.sample()]
        else:
            for _ in range(2):  # Nor does it go on as if it were whole.
                with pytest.raises(WorkerLost, match=r"1 of 2 workers|worker 1 is lost"):
                    workers.sample()
            served += [fragment.batch for fragment in workers.ready(timeout_s=0)]
        assert len(served[0]) == 2 * STEPS
        assert all(len(batch) == STEPS for batch in served[1:])
        assert [status.alive for status in workers.status()] == [False, True]
        assert [loss.restarted for loss in workers.losses] == ([True, False] if drops else [False])
        assert workers.foreach_worker(lambda worker: worker.creation_args["place"].worker_index) == [2]
    # Nobody has opened a writer here since the last one died.
    rows = columns_of(list(rlio.DatasetReader(root, epochs=1, batch_size=1000)))
    check_nothing_missing(rows)
    acknowledged = columns_of(served)["obs"]
    both = np.concatenate([rows["obs"], acknowledged])
    assert len(np.unique(both, axis=0)) == len(rows["obs"]), "a row that came is not stored"
    assert not list(Path(root).glob("_wal/*/*.wal"))
