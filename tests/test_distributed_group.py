"""WorkerGroup: workers in processes of their own, as one reader; for deaths see the file beside this one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from group_envs import Weighed, check_rows, make_known
from gymnasium.spaces import Box, Discrete
from linear_policy import LinearPolicy

import rlio
from rlio.distributed import Fragment, WorkerGroup
from rlio.errors import EndOfData, EnvError, OptionError, StateError, WorkerError, WorkerLost
from rlio.policies.policy_spec import PolicySpec
from rlio.policies.weights import GlobalVars
from rlio.sampling.config import RolloutConfig
from rlio.worker import RolloutWorker

pytest.importorskip("ray")
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_cluster")]

STEPS = 20


def columns_of(batches: list[Any]) -> dict[str, Any]:
    joined = rlio.concat_samples(batches)
    return {name: np.asarray(joined[name]) for name in ("obs", "new_obs", "rewards", "terminateds", "eps_id")}


@dataclass
class Pair:
    """Two workers that several tests use, one after the other."""

    group: WorkerGroup
    folder: Path
    output: str

    def order(self, what: str) -> Path:
        """Tell the environments to do something."""
        file = self.folder / what
        file.touch()
        return file


@pytest.fixture(scope="module")
def pair(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("orders")
    output = str(tmp_path_factory.mktemp("group") / "rows")
    config = RolloutConfig(rollout_fragment_length=STEPS, env_config={"folder": str(folder)})
    with WorkerGroup(
        make_known, Weighed(), num_workers=2, seed=5, local_worker=True, rollout=config, output=output
    ) as group:
        yield Pair(group, folder, output)


def test_a_batch_has_a_fragment_of_each_worker_in_their_order_and_belongs_to_the_caller(pair: Pair) -> None:
    batches = [pair.group.sample() for _ in range(3)]
    for batch in batches:
        assert len(batch) == 2 * STEPS
        whose = batch["obs"][:, 0]
        assert len(set(whose[:STEPS])) == len(set(whose[STEPS:])) == 1
        assert whose[0] == batches[0]["obs"][0, 0] != whose[-1]
        assert all(batch[name].flags.writeable for name in batch)
    check_rows(columns_of(batches))


def test_exactly_so_many_steps_are_given_and_what_is_left_over_comes_next(pair: Pair) -> None:
    group = pair.group
    parts = [group.sample(7), group.sample(2 * STEPS), group.sample()]
    assert [len(part) for part in parts] == [7, 2 * STEPS, 2 * STEPS - 7]
    parts += [group.sample(5 * STEPS), group.sample()]
    assert [len(part) for part in parts[3:]] == [5 * STEPS, STEPS]
    check_rows(columns_of(parts))


def test_who_is_late_is_served_by_the_next_call_and_nothing_is_lost(pair: Pair) -> None:
    group = pair.group
    batches = [group.sample()]
    wait = pair.order("wait-2")
    try:
        for _ in range(2):
            group.submit()
            early = group.ready()
            assert [fragment.worker_index for fragment in early] == [1]
            batches += [fragment.batch for fragment in early]
        assert group.ready(timeout_s=0) == []
    finally:
        wait.unlink()
    batches.append(group.sample())
    assert len(set(batches[-1]["obs"][:, 0])) == 2
    rows = columns_of(batches)
    check_rows(rows)
    for whose in np.unique(rows["obs"][:, 0]):
        mine = rows["obs"][rows["obs"][:, 0] == whose]
        same = mine[1:, 1] == mine[:-1, 1]
        # One after the other: the next step, or the next episode's first.
        np.testing.assert_array_equal(mine[1:, 2] - mine[:-1, 2] == 1, same)
        np.testing.assert_array_equal(mine[1:, 1] - mine[:-1, 1] == 1, ~same)
    assert len(group.sample()) == 2 * STEPS


def test_there_is_nothing_where_nobody_is_ready_in_time(pair: Pair) -> None:
    waits = [pair.order("wait-1"), pair.order("wait-2")]
    try:
        pair.group.submit()
        for timeout_s in (0.1, 0):
            assert pair.group.ready(timeout_s=timeout_s) == []
    finally:
        for wait in waits:
            wait.unlink()
    assert len(pair.group.sample()) == 2 * STEPS


def test_no_worker_is_asked_for_more_than_may_be_in_flight(pair: Pair) -> None:
    group = pair.group
    waits = [pair.order("wait-1"), pair.order("wait-2")]
    try:
        assert group.submit(3) == 6
        assert group.submit(3) == 0
        assert [status.in_flight for status in group.status()] == [3, 3]
    finally:
        for wait in waits:
            wait.unlink()
    found: list[Fragment] = []
    while len(found) < 6:
        # What waits counts too: else memory would fill where nobody takes anything.
        assert all(status.in_flight + status.waiting <= 3 for status in group.status())
        found += group.ready()
    assert group.ready() == []
    assert [fragment.order for fragment in found] == sorted(fragment.order for fragment in found)
    assert not found[0].batch["obs"].flags.writeable
    check_rows(columns_of([fragment.batch for fragment in found]))


def test_all_fragments_that_have_arrived_come_in_one_call_and_in_the_order_of_each_worker(pair: Pair) -> None:
    assert pair.group.submit(3) == 6
    pair.group.foreach_worker(RolloutWorker.assert_healthy)  # After their requests.
    found = pair.group.ready()
    assert [fragment.order for fragment in found] == list(range(found[0].order, found[0].order + 6))
    for index in (1, 2):
        own = [fragment.batch for fragment in found if fragment.worker_index == index]
        obs = np.concatenate([batch["obs"] for batch in own])
        assert len(own) == 3
        assert (np.diff(np.lexsort((obs[:, 2], obs[:, 1]))) == 1).all(), "out of order, or with a gap"
    assert pair.group.ready() == []


def test_what_is_in_flight_is_served_by_the_next_call_of_any_kind(pair: Pair) -> None:
    group = pair.group
    batches = [group.sample()]
    while len(batches) < 10:
        group.submit(2)
        batches += [fragment.batch for fragment in group.ready()]
        assert all(status.in_flight + status.waiting <= 2 for status in group.status())
    group.submit(2)
    while any(status.waiting < 2 for status in group.status()):
        group.probe()
    batches += [group.sample() for _ in range(4)]
    batches += [fragment.batch for fragment in group.ready(timeout_s=0)]
    rows = columns_of(batches)
    check_rows(rows)
    for whose in np.unique(rows["obs"][:, 0]):
        mine = rows["obs"][rows["obs"][:, 0] == whose]
        assert (np.diff(np.lexsort((mine[:, 2], mine[:, 1]))) == 1).all(), "out of order, or with a gap"


def test_an_error_of_an_environment_says_whose_it_is_and_the_others_rows_stay(pair: Pair) -> None:
    group = pair.group
    restarts = group.restarts
    group.sample()
    pair.order("raise-1")
    with pytest.raises(WorkerError, match=r"worker 1 raised EnvError.*worker 1 was told to") as caught:
        group.sample()
    assert caught.value.worker_index == 1
    assert isinstance(caught.value.__cause__, EnvError)
    assert "_obey" in "\n".join(caught.value.__notes__)
    assert group.restarts == restarts
    assert not group.losses
    # The second worker had its fragment: it is in the next batch, and not sampled again.
    (second,) = [s for s in group.status() if s.worker_index == 2]
    assert second.in_flight + second.waiting == 1
    assert len(group.sample()) == 2 * STEPS


def raises(worker: RolloutWorker) -> int:
    index = worker.creation_args["place"].worker_index
    if index == 2:
        raise KeyError("no such thing")
    return int(index)


def test_a_function_is_called_in_each_worker_and_its_errors_are_raised_or_returned(pair: Pair) -> None:
    group = pair.group
    pids = group.foreach_worker(lambda worker: os.getpid(), local_worker=True)
    assert pids[0] == os.getpid()
    assert pids[1:] == [status.pid for status in group.status()]
    with pytest.raises(WorkerError, match="worker 2 raised KeyError") as caught:
        group.foreach_worker(raises)
    assert isinstance(caught.value.__cause__, KeyError)
    first, second = group.foreach_worker(raises, errors="return")
    assert first == 1
    assert isinstance(second, WorkerError)
    assert group.foreach_policy(lambda policy, policy_id: policy_id) == [["default_policy"]] * 2
    wait = pair.order("wait-1")
    try:
        group.submit()
        there: Any = None
        while there != 7:  # It may be late too, and does it all the same.
            late, there = group.foreach_worker(lambda worker: 7, timeout_s=0.1, errors="return")
            assert isinstance(late, WorkerError)
    finally:
        wait.unlink()
    group.sample()


def test_policies_are_added_and_removed_in_each_worker(pair: Pair) -> None:
    group = pair.group

    def add(worker: RolloutWorker) -> list[str]:
        worker.add_policy("second", LinearPolicy)
        return list(worker.group.policies)

    def remove(worker: RolloutWorker) -> list[str]:
        worker.remove_policy("second")
        return list(worker.group.policies)

    assert group.foreach_worker(add) == [["default_policy", "second"]] * 2
    assert len(group.sample()) == 2 * STEPS
    assert group.foreach_worker(remove) == [["default_policy"]] * 2


def test_what_several_rounds_had_sampled_stays_where_one_fails(pair: Pair) -> None:
    group = pair.group
    group.get_metrics()
    batches = [group.sample(STEPS // 2)]  # The rest is left over.
    group.submit()
    group.foreach_worker(lambda worker: None)  # The fragments of the first round are there.
    pair.order("raise-1")
    with pytest.raises(WorkerError, match="worker 1 was told to"):
        group.sample(8 * STEPS)
    batches.append(group.sample())
    assert len(batches[-1]) == 2 * STEPS - STEPS // 2
    batches.append(group.sample(8 * STEPS))
    while any(status.in_flight or status.waiting for status in group.status()):
        batches += [fragment.batch for fragment in group.ready()]
    # Every row that came was served, once.
    assert group.get_metrics().counts.env_steps == sum(map(len, batches))
    check_rows(columns_of(batches))


class Unmade(Exception):
    """Cannot be made from what an exception keeps."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second} do not fit")


class Unread:
    """Travels, and cannot be unpacked."""

    def __reduce__(self) -> Any:
        return Unmade, (1,)


def unmade(worker: RolloutWorker) -> None:
    raise Unmade(1, 2)


def test_an_error_or_answer_that_cannot_be_made_here_is_told_and_no_death(pair: Pair) -> None:
    group = pair.group
    pids = [status.pid for status in group.status()]
    with pytest.raises(WorkerError, match=r"worker 1 raised RuntimeError: .*Unmade: 1 and 2 do not fit"):
        group.foreach_worker(unmade)
    for answer in group.foreach_worker(lambda worker: Unread(), errors="return"):
        assert "cannot be read here" in str(answer)
    assert [status.pid for status in group.probe()] == pids


def weight_of(worker: RolloutWorker) -> float:
    return float(worker.get_weights()["w"][0])


def test_weights_reach_all_workers_before_their_next_fragment_and_older_ones_none(pair: Pair) -> None:
    group = pair.group
    assert group.local_worker is not None
    # A policy that is made at random is made once: all act with the local worker's weights.
    assert set(group.foreach_worker(weight_of, local_worker=True)) == {weight_of(group.local_worker)}
    newest = group.set_weights({"w": np.array([3.0])})
    batch = group.sample()
    assert set(batch["w_then"]) == {3.0}
    assert set(batch["weights_seq_no"]) == {newest}
    group.set_weights({"w": np.array([9.0])}, weights_seq_no=newest)
    assert set(group.sample()["w_then"]) == {3.0}
    group.set_weights({"w": np.array([4.0])}, weights_seq_no=newest + 5)
    assert set(group.foreach_worker(weight_of)) == {4.0}
    group.local_worker.learn_on_batch(group.sample())
    lock = threading.Lock()
    with pytest.raises(TypeError, match="serialize"):
        group.foreach_worker(lambda worker: lock)  # Weights do not get lost with what cannot be sent.
    assert group.sync_weights() == newest + 6
    with pytest.raises(TypeError, match="serialize"):
        group.foreach_worker(lambda worker: lock)
    assert set(group.foreach_worker(weight_of, local_worker=True)) == {weight_of(group.local_worker)}


def test_weights_that_do_not_fit_are_an_error_until_others_come(pair: Pair) -> None:
    group = pair.group
    before = weight_of_first(group)
    group.set_weights({"nonsense": np.zeros(1)})
    for _ in range(4):  # Each worker says so twice.
        with pytest.raises(WorkerError, match="KeyError"):
            group.ready() if any(status.in_flight for status in group.status()) else group.sample()
    while any(status.in_flight for status in group.status()):
        with contextlib.suppress(WorkerError):
            group.ready()
    group.set_weights({"w": np.array([before])})
    assert set(group.sample()["w_then"]) == {before}


def weight_of_first(group: WorkerGroup) -> float:
    answer = group.foreach_worker(weight_of)[0]
    assert isinstance(answer, float)
    return answer


def test_counts_of_all_workers_add_up(pair: Pair) -> None:
    group = pair.group
    group.get_metrics()
    lifetime = group.get_metrics().lifetime
    batches = [group.sample() for _ in range(4)]
    found = group.get_metrics()
    assert found.counts.env_steps == sum(len(batch) for batch in batches)
    assert found.counts.episodes == sum(int(batch["terminateds"].sum()) for batch in batches)
    assert found.counts.episodes == len(found.episodes)
    assert found.lifetime.env_steps == lifetime.env_steps + found.counts.env_steps
    assert group.get_metrics().counts.env_steps == 0


def test_it_is_a_live_reader_for_mixtures_and_recordings(pair: Pair, tmp_path: Path) -> None:
    group = pair.group
    assert not group.replayable
    with rlio.ParquetWriter(tmp_path / "logged") as writer:
        writer.write(group.sample())
    logged = rlio.DatasetReader(tmp_path / "logged", epochs=None)
    sources = {"live": group, "log": logged}
    mixed = rlio.MixedInput(sources, batch_size=10, seed=0, weights={"live": 4, "log": 1})
    try:
        for _ in range(12):
            batch = mixed.sample()
            assert len(batch) == 10
        found = rlio.concat_samples([mixed.sample() for _ in range(10)])
        assert len(found) == 100
    finally:
        logged.close()
    writer = rlio.ParquetWriter(tmp_path / "copy")
    recording = rlio.RecordingInput(group, writer)
    rows = sum(len(recording.sample(n)) for n in (5, 50, 3))
    writer.close()
    assert len(rlio.open_dataset(tmp_path / "copy")) == rows == 58


def batches_learned(worker: RolloutWorker) -> int:
    assert isinstance(worker.policy, Weighed)
    return len(worker.policy.seen)


def test_a_state_goes_on_with_other_episodes_in_the_processes_that_are_there(pair: Pair) -> None:
    group = pair.group
    before = rlio.concat_samples([group.sample() for _ in range(3)])
    group.sample(STEPS)  # As much is left over.
    group.set_weights({"w": np.array([2.0])})
    state = json.loads(json.dumps(group.state_dict()))
    lifetime = group.get_metrics().lifetime.env_steps
    assert group.local_worker is not None
    group.local_worker.learn_on_batch(before)
    pids = [status.pid for status in group.status()]
    writers = {status.writer_id for status in group.status()}
    incarnations = [status.incarnation for status in group.status()]
    group.load_state_dict(state)
    after = group.sample()
    assert group.dropped == STEPS
    assert not set(before["eps_id"]) & set(after["eps_id"])
    assert not set(before["obs"][:, 0]) & set(after["obs"][:, 0])
    assert [status.pid for status in group.status()] == pids
    assert not writers & {status.writer_id for status in group.status()}
    assert [status.incarnation for status in group.status()] == [n + 1 for n in incarnations]
    assert group.get_metrics().lifetime.env_steps == lifetime + len(after)
    assert set(after["w_then"]) == {2.0}
    # They are made of the policy as it was given, not of the local worker's: nor do they draw its numbers.
    assert group.foreach_worker(batches_learned) == [0, 0]
    with pytest.raises(StateError):
        group.load_state_dict({**state, "position": {}})
    with pytest.raises(StateError):
        group.sample()  # Nothing is given until a state could be loaded.
    group.load_state_dict(state)


def test_every_worker_writes_one_data_set_and_says_there_how_it_was_seeded(pair: Pair) -> None:
    """The last of those with this group: it closes it."""
    group = pair.group
    group.sample()
    # Fragments that are not asked for any more are stored and counted when the group is closed.
    stored = [status.rows for status in group.status()]
    group.get_metrics()
    assert group.submit(3) == 6
    group.close()
    assert [status.rows for status in group.status()] == [rows + 3 * STEPS for rows in stored]
    assert group.get_metrics().counts.env_steps == 6 * STEPS
    dataset = rlio.open_dataset(pair.output)
    assert dataset.snapshot().items() >= {(status.writer_id, status.rows) for status in group.status()}
    told = set()
    for segment in dataset.segments:
        made_by = dataset.open_shard(segment).provenance
        about = made_by["extra"]["worker_group"]
        assert about["seed"] == 5
        assert about["num_workers"] == 2
        assert segment.ref.writer.startswith(f"w{about['worker_index']:05d}-")
        told.add((about["worker_index"], about["incarnation"], made_by["seed"]))
    assert {index for index, _, _ in told} == {1, 2}
    assert len({seed for _, _, seed in told}) == len(told), "two workers had one seed"
    rows = rlio.concat_samples(list(rlio.DatasetReader(pair.output, epochs=1, batch_size=1000)))
    check_rows(columns_of([rows]))
    group.close()
    with pytest.raises(rlio.errors.ClosedError):
        group.sample()


@pytest.mark.further
def test_epsilon_in_a_group_falls_with_the_steps_of_all_workers(ray_cluster: None) -> None:
    """Each worker explored by its own steps: two workers took twice as many steps as were asked for."""
    policy = rlio.policies.DQN(hidden=[4], initial_epsilon=1.0, final_epsilon=0.0, epsilon_timesteps=100)
    config = RolloutConfig(rollout_fragment_length=STEPS)
    with WorkerGroup(make_known, policy, num_workers=2, seed=5, local_worker=True, rollout=config) as group:
        assert epsilons(group.sample())[0] == 1.0
        group.sync_weights()
        assert group.local_worker is not None
        assert group.local_worker.get_global_vars().timestep == 2 * STEPS
        rows = group.sample()
        for whose in np.unique(rows["obs"][:, 0]):
            assert epsilons(rows[rows["obs"][:, 0] == whose])[0] == pytest.approx(1 - 2 * STEPS / 100)
        group.set_weights(policy.get_weights())  # Without a word of steps: the group counts them.
        rows = group.sample()
        assert epsilons(rows) == pytest.approx(1 - 4 * STEPS / 100)
        state = json.loads(json.dumps(group.state_dict()))
        group.set_weights(policy.get_weights(), global_vars=GlobalVars(95))
        assert epsilons(group.sample()) == pytest.approx(0.05)
        group.load_state_dict(state)
        group.sync_weights()
        assert group.local_worker.get_global_vars().timestep == 6 * STEPS
        assert not epsilons(group.sample()).any()


@pytest.mark.further
def test_workers_have_the_resources_that_are_asked_for(ray_cluster: None) -> None:
    options = {"num_cpus": 0.5, "num_gpus": 0}
    with WorkerGroup(make_known, LinearPolicy, num_workers=1, seed=5, actor_options=options) as group:
        assert group.foreach_worker(assigned) == [{"CPU": 0.5}]


def assigned(worker: RolloutWorker) -> dict[str, float]:
    import ray

    return dict(ray.get_runtime_context().get_assigned_resources())


def epsilons(rows: Any) -> Any:
    """What `rlio.policies.DQN` explored with in each row, of 2 actions."""
    greedy = rows["q_values"].argmax(1) == rows["actions"]
    probability = np.exp(rows["action_logp"].astype(np.float64))
    return np.round(2 * np.where(greedy, 1 - probability, probability), 6)


def test_workers_share_stored_rows_and_end_with_them(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # Paths mean the same in every process.
    with RolloutWorker("CartPole-v1", rlio.RandomPolicy(), output="logged", seed=0) as worker:
        logged = rlio.concat_samples([worker.sample() for _ in range(5)])
        spaces = worker.policy.spaces
    spec = PolicySpec(rlio.RandomPolicy, *spaces)
    options = {"epochs": 1, "batch_size": 64}
    with WorkerGroup(None, spec, num_workers=2, seed=1, input="logged", input_options=options) as group:
        served = [group.sample()]
        pid = group.status()[0].pid
        assert pid is not None
        group.submit(2)
        os.kill(pid, signal.SIGKILL)
        # Who takes its place goes on behind what came: stored rows can be read again.
        served += list(group)
        assert group.restarts == 1
        with pytest.raises(EndOfData):
            group.sample()
        with pytest.raises(EndOfData):
            group.submit()
        # The last rows are served, whatever number of them was asked for.
        group.load_state_dict(group.state_dict())
        whole = [group.sample(10 * len(logged))]
        with pytest.raises(EndOfData):
            group.sample(1)
        group.load_state_dict(group.state_dict())
        parts = [group.sample(7), group.sample(10 * len(logged))]
        with monkeypatch.context() as without:
            without.setattr("ray.is_initialized", lambda: False)
            with pytest.raises(WorkerLost, match="Ray was shut down"):
                group.sample()  # It would start another Ray.
        assert [status.alive for status in group.status()] == [False, False]
    assert len(rlio.concat_samples(whole)) == len(rlio.concat_samples(parts)) == len(logged)
    found = rlio.concat_samples(served)
    assert sorted(zip(found["eps_id"], found["t"], strict=True)) == sorted(
        zip(logged["eps_id"], logged["t"], strict=True)
    )


def test_a_worker_that_cannot_be_made_is_an_error_that_says_why(ray_cluster: None) -> None:
    with pytest.raises(OptionError, match="NoSuchEnv") as caught:
        WorkerGroup("NoSuchEnv-v0", rlio.RandomPolicy, num_workers=1)
    assert "worker 1" in "\n".join(caught.value.__notes__)


@pytest.mark.further
def test_workers_of_a_group_read_shares_of_one_shuffled_order(ray_cluster: None, tmp_path: Path) -> None:
    """Each worker shuffled with its own seed: a third of the rows was never served."""
    ids = np.arange(100)
    with rlio.ParquetWriter(tmp_path / "data") as writer:
        writer.write(rlio.SampleBatch(obs=ids[:, None].astype(np.float32), actions=ids, rewards=ids * 1.0))
    spaces = {"default_policy": (Box(-1e9, 1e9, (1,)), Discrete(100))}
    with WorkerGroup(
        None,
        rlio.RandomPolicy,
        num_workers=2,
        policy_setup=rlio.sampling.PolicySetup(spaces=spaces),
        input=str(tmp_path / "data"),
        input_options={"shuffle": True, "epochs": 1, "batch_size": 10},
    ) as group:
        served = [row for batch in group for row in np.asarray(batch["actions"]).tolist()]  # type: ignore[index]
    assert sorted(served) == ids.tolist()
