"""RolloutWorker: records, reads and mixes; what is live is written, what is read is adapted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box
from linear_policy import worker_options

import rlio
from rlio.batch import Batch, MultiAgentBatch, SampleBatch, concat_samples
from rlio.errors import ClosedError, DataNotFound, OptionError, StateError
from rlio.policies.dqn import DQN
from rlio.policies.policy import Policy
from rlio.policies.random_policy import RandomPolicy
from rlio.reader import InputReader
from rlio.readers.mixed_input import MixedInput
from rlio.resolve import IOContext
from rlio.sampling.config import RolloutConfig
from rlio.testing import ReaderTests, assert_same
from rlio.worker import RolloutWorker
from rlio.writer import OutputWriter

SMALL = RolloutConfig(rollout_fragment_length=10, num_envs=2)


class Keeps(OutputWriter):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []
        self.closings = 0

    def _write(self, batch: Batch) -> None:
        self.batches.append(batch.copy())

    def _close(self) -> None:
        self.closings += 1

    @property
    def rows(self) -> SampleBatch:
        joined = concat_samples(self.batches)
        assert isinstance(joined, SampleBatch)
        return joined


class Logged(InputReader):
    """Logged rows, marked by eps_id -1 and counted in t."""

    def __init__(self, columns: dict[str, Any] | None = None) -> None:
        self.number = 0
        self.columns = columns
        self.closed = 0

    def _next(self) -> SampleBatch:
        self.number += 1
        rows = 8
        t = np.arange(rows * (self.number - 1), rows * self.number)
        batch = {"t": t, "eps_id": np.full(rows, -1), "obs": np.zeros((rows, 4), np.float32)}
        return SampleBatch(batch | {"actions": np.zeros(rows, np.int64)} | (self.columns or {}))

    def _position(self) -> Any:
        return {"number": self.number}

    def _seek(self, position: Any) -> None:
        self.number = position["number"]

    def _close(self) -> None:
        self.closed += 1


def worker_of(**options: Any) -> RolloutWorker:
    given = {"rollout": SMALL, "seed": 0} | options
    return RolloutWorker("CartPole-v1", RandomPolicy(), **worker_options(**given))


class TestRolloutWorker(ReaderTests):
    finite = False

    def make_reader(self) -> RolloutWorker:
        return worker_of()

    def expected_rows(self) -> SampleBatch:
        runner = worker_of().runner
        assert runner is not None
        return concat_samples([runner.run() for _ in range(12)])


def test_exactly_what_is_served_is_written_whatever_sizes_are_asked_for() -> None:
    writer = Keeps()
    with worker_of(output=writer) as worker:
        served = [worker.sample(n) for n in (None, 7, 1, None, 33)]
    assert_same(writer.rows, concat_samples(served))
    assert writer.closings == 1


def test_a_recorded_data_set_reads_back_as_it_was_served(tmp_path: Path) -> None:
    with worker_of(output=str(tmp_path / "set")) as worker:
        served = concat_samples([worker.sample() for _ in range(5)])
        assert isinstance(served, SampleBatch)
    with rlio.read(str(tmp_path / "set"), batch_size=100, epochs=1) as reader:
        rows = reader.sample()
    assert isinstance(rows, SampleBatch)
    assert set(served) <= set(rows)
    for name in served:
        assert np.array_equal(rows[name], served[name]), name
        assert rows[name].dtype == served[name].dtype, name


def mixed(**options: Any) -> RolloutWorker:
    given = {"input_options": {"batch_size": 16, "columns": "intersect"}} | options
    return worker_of(input=[("sampler", 0.5), (Logged(), 0.5)], **given)


def test_of_a_mixture_only_live_rows_are_written() -> None:
    writer = Keeps()
    with mixed(output=writer) as worker:
        batches = [worker.sample(n) for n in (None, 5, None, 11)]
    assert isinstance(worker.reader, MixedInput)
    served = concat_samples(batches)
    assert isinstance(served, SampleBatch)
    live = served[served["eps_id"] != -1]
    assert len(live) == 24
    # whole fragments, those rows included that no batch had room for
    assert len(writer.rows) == 40
    assert np.array_equal(writer.rows["obs"][:24], live["obs"])
    assert (writer.rows["eps_id"] != -1).all()
    assert np.array_equal(served["t"][served["eps_id"] == -1], np.arange(24))


def test_record_all_writes_every_row_that_is_served() -> None:
    writer = Keeps()
    with mixed(output=writer, record="all") as worker:
        batches = [worker.sample(n) for n in (None, 5, 11)]
    assert_same(writer.rows, concat_samples(batches))


def test_nothing_is_written_without_an_output() -> None:
    with worker_of() as worker:
        worker.sample()
        assert worker.writer.rows_received == 0


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("set", "set"),
        ("set/data/*.parquet", "set"),
        (["a.json", "set"], "set/"),
        ({"sampler": 1, "./set": 1}, "set"),
        ("set", "set/inner"),
        (Path("set"), "set"),
        ("logs", "logdir"),
    ],
)
def test_recording_all_into_what_is_read_is_refused(
    source: Any, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("set", "logs"):
        with worker_of(output=folder) as worker:
            worker.sample()
    (tmp_path / "a.json").write_text("")
    opened = []

    def open_nothing(value: Any, context: Any, *, wrap: Any = None) -> InputReader:
        opened.append(Logged())
        return opened[0]

    monkeypatch.setattr("rlio.sampling.worker_input.resolve_input", open_nothing)
    with pytest.raises(OptionError, match="record='all' writes the data read from"):
        worker_of(input=source, output=output, record="all", log_dir="logs")
    assert opened[0].closed == 1, "what was opened is closed again"


def test_recording_all_elsewhere_is_fine(tmp_path: Path) -> None:
    with worker_of(output=str(tmp_path / "set")) as worker:
        worker.sample()
    copy = str(tmp_path / "set2")
    with worker_of(
        input=str(tmp_path / "set"), input_options={"epochs": 1}, output=copy, record="all"
    ) as worker:
        rows = sum(len(batch) for batch in worker)
    with rlio.read(copy, epochs=1) as reader:
        assert sum(len(batch) for batch in reader) == rows == 20


def test_an_output_that_would_stay_empty_is_refused() -> None:
    source = Logged()
    with pytest.raises(OptionError, match="would stay empty"):
        worker_of(input=source, output=Keeps())
    assert source.closed == 1


def test_the_sampler_cannot_be_in_a_mixture_twice() -> None:
    def again(context: IOContext) -> InputReader:
        assert context.default_sampler_input is not None
        return context.default_sampler_input()

    with pytest.raises(OptionError, match="twice"):
        worker_of(input=[("sampler", 1), (again, 1)])


def test_an_input_creator_gets_the_workers_place_spaces_and_options() -> None:
    seen: list[IOContext] = []

    def create(context: IOContext) -> InputReader:
        seen.append(context)
        return Logged()

    worker = worker_of(
        input=create, worker_index=2, num_workers=3, log_dir="logs", input_options={"x": 1}, seed=7
    )
    (context,) = seen
    assert (context.rank, context.world, context.log_dir, context.seed) == (1, 3, "logs", 7)
    assert dict(context.options) == {"x": 1}
    assert worker.runner is not None
    assert context.spaces["default_policy"] == (worker.runner.observation_space, worker.runner.action_space)
    assert context.default_sampler_input is not None


# ---- what is done to logged rows ----


class Pushes(gym.Env):
    observation_space = Box(-1.0, 1.0, (4,), np.float32)
    action_space = Box(-2.0, 2.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        return np.zeros(4, np.float32), 0.0, False, False, {}


class Marks(RandomPolicy):
    def postprocess_trajectory(self, batch: SampleBatch, *_: Any) -> SampleBatch:
        batch["first"] = np.full(len(batch), batch["t"][0])
        return batch


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 3.0),
        ({"clip_actions": True}, 2.0),
        ({"normalize_actions": True}, 1.5),
        ({"clip_actions": True, "normalize_actions": True}, 1.0),
        ({"normalize_actions": True, "actions_in_input_normalized": True}, 3.0),
    ],
)
def test_logged_actions_are_clipped_and_scaled_as_configured_and_live_ones_are_not(
    options: dict[str, Any], expected: float
) -> None:
    logged = Logged({"actions": np.full((8, 1), 3.0, np.float32)})
    worker = RolloutWorker(
        Pushes,
        RandomPolicy(),
        input=[("sampler", 0.5), (logged, 0.5)],
        input_options={"batch_size": 16, "columns": "intersect"},
        rollout=RolloutConfig(**options),
        seed=0,
    )
    batch = worker.sample()
    is_logged = batch["eps_id"] == -1
    assert (batch["actions"][is_logged] == expected).all()
    assert np.abs(batch["actions"][~is_logged]).max() > 1.0
    worker.close()
    assert logged.closed == 1


def test_logged_trajectories_are_postprocessed_if_asked_for() -> None:
    for asked in (False, True):
        worker = RolloutWorker(
            Pushes, Marks(), input=Logged(), rollout=RolloutConfig(postprocess_inputs=asked), seed=0
        )
        batch = worker.sample()
        assert ("first" in batch) == asked
        assert len(batch) == 8

    class Several(Logged):
        def _next(self) -> Any:
            return MultiAgentBatch({"a": super()._next()}, 8)

    worker = RolloutWorker(Pushes, Marks(), input=Several(), rollout=RolloutConfig(postprocess_inputs=True))
    with pytest.raises(OptionError, match="rows of the unknown policy 'a'"):
        worker.sample()


def test_batches_are_shuffled_in_windows() -> None:
    worker = worker_of(input=Logged(), rollout=RolloutConfig(shuffle_buffer_size=5))
    firsts = [int(worker.sample()["t"][0]) for _ in range(10)]
    assert sorted(firsts) == list(range(0, 80, 8))
    assert firsts != sorted(firsts)
    assert sorted(firsts[:5]) == list(range(0, 40, 8))


@pytest.mark.parametrize("how", [True, "bulk"])
def test_observations_are_compressed_after_they_were_written(how: Any) -> None:
    writer = Keeps()
    config = RolloutConfig(rollout_fragment_length=10, compress_observations=how)
    with worker_of(rollout=config, output=writer) as worker:
        batch = worker.sample()
    assert not isinstance(batch["obs"], np.ndarray) or batch["obs"].dtype == object
    assert_same(batch.decompress_if_needed(), writer.rows)
    assert writer.rows["obs"].dtype == np.float32


# ---- a worker without an environment ----


def test_logged_experience_needs_no_environment() -> None:
    policy = RandomPolicy()
    with pytest.raises(OptionError, match="no spaces yet"):
        RolloutWorker(None, policy, input=Logged())
    policy.bind(Pushes.observation_space, Pushes.action_space, 0)
    worker = RolloutWorker(None, policy, input=Logged())
    assert worker.runner is None
    assert len(worker.sample(20)) == 20
    with pytest.raises(OptionError, match="sampler"):
        RolloutWorker(None, policy)


# ---- policy, weights, state ----


def learner(**options: Any) -> RolloutWorker:
    return RolloutWorker("CartPole-v1", DQN(), rollout=SMALL, **({"seed": 0} | options))


def test_it_learns_and_its_steps_carry_the_version_of_the_weights() -> None:
    worker = learner()
    first = worker.sample()
    stats = worker.learn_on_batch(first)
    assert np.isfinite(stats["loss"])
    assert set(first["weights_seq_no"]) == {0}
    assert set(worker.sample()["weights_seq_no"]) == {1}


def test_weights_travel_between_workers_and_the_same_version_is_not_set_again() -> None:
    trained, other = learner(), learner(seed=1)
    trained.learn_on_batch(trained.sample())
    other.set_weights(trained.get_weights(), weights_seq_no=5)
    for name, value in trained.get_weights().items():
        assert np.array_equal(other.get_weights()[name], value)
    assert set(other.sample()["weights_seq_no"]) == {5}
    zeros = {name: np.zeros_like(value) for name, value in trained.get_weights().items()}
    other.set_weights(zeros, weights_seq_no=5)
    assert any(value.any() for value in other.get_weights().values())
    other.set_weights(zeros)
    assert not any(value.any() for value in other.get_weights().values())


def test_workers_with_one_seed_sample_differently_and_the_same_each_time() -> None:
    batches = [worker_of(worker_index=i, num_workers=3).sample() for i in (1, 2, 3)]
    again = worker_of(worker_index=2, num_workers=3).sample()
    assert_same(batches[1], again)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not np.array_equal(batches[a]["obs"], batches[b]["obs"])
        assert not set(batches[a]["unroll_id"]) & set(batches[b]["unroll_id"])
        assert not set(batches[a]["eps_id"]) & set(batches[b]["eps_id"])


def test_a_restored_mixture_goes_on_with_its_logged_rows_and_counts() -> None:
    worker = mixed()
    for n in (None, 5):
        worker.sample(n)
    state = json.loads(json.dumps(worker.state_dict()))
    rest = worker.sample(40)
    restored = mixed()
    restored.load_state_dict(state)
    again = restored.sample(40)
    logged = rest["eps_id"] == -1
    assert np.array_equal(rest["t"][logged], again["t"][again["eps_id"] == -1])
    assert restored.runner is not None
    assert restored.runner.timesteps >= 20
    with pytest.raises(StateError):
        worker_of().load_state_dict(state)


def test_the_mix_of_the_readme_is_restored_in_its_middle(tmp_path: Path) -> None:
    """`save` sorts the keys of a state, and "sampler" comes before "runs/cartpole" in the mix."""
    root = str(tmp_path / "runs" / "cartpole")
    with worker_of(output=root, seed=1) as worker:
        for _ in range(4):
            worker.sample()

    def make() -> RolloutWorker:
        return worker_of(
            input={"sampler": 0.5, root: 0.5}, input_options={"batch_size": 16, "columns": "intersect"}
        )

    with make() as worker, make() as restored, make() as other:
        for n in (None, 5):
            worker.sample(n)
        worker.save(tmp_path / "saved")
        state = json.loads(json.dumps(worker.state_dict(), sort_keys=True))
        rest = worker.sample(40)
        restored.restore(tmp_path / "saved")
        other.load_state_dict(state)
        for again in (restored.sample(40), other.sample(40)):
            assert np.array_equal(rest["t"][20:], again["t"][20:])
            assert np.array_equal(rest["obs"][20:], again["obs"][20:])


def test_a_worker_that_was_not_restored_samples_nothing_until_it_is(tmp_path: Path) -> None:
    """It went on as if it were fresh."""
    with mixed() as worker, worker_of() as wrong, mixed() as restored:
        worker.sample()
        worker.save(tmp_path / "saved")
        wrong.sample()
        wrong.save(tmp_path / "wrong")
        loads: list[Any] = [
            lambda: restored.restore(tmp_path / "wrong"),
            lambda: restored.set_state(wrong.get_state()),
            lambda: restored.load_state_dict(wrong.state_dict()),
            lambda: restored.set_state(worker.get_state() | {"policies": {"default_policy": None}}),
        ]
        for load in loads:
            with pytest.raises(StateError):
                load()
            for call in (restored.sample, restored.state_dict, restored.get_state, restored.assert_healthy):
                with pytest.raises(StateError):
                    call()
            restored.restore(tmp_path / "saved")
            expected, found = worker.sample(20), restored.sample(20)
            worker.restore(tmp_path / "saved")
            assert np.array_equal(expected["t"][10:], found["t"][10:])
            restored.restore(tmp_path / "saved")
    with worker_of() as fresh:
        with pytest.raises(DataNotFound):
            fresh.restore(tmp_path / "nothing")
        fresh.sample()  # The first run of a program that restores where there is something.


def test_a_worker_of_logged_rows_is_replayable_and_one_that_samples_is_not() -> None:
    assert worker_of(input=Logged()).replayable
    assert not worker_of().replayable
    assert not mixed().replayable


# ---- ends and errors ----


def test_stopping_closes_all_parts_once() -> None:
    closed = []

    class Tells(Pushes):
        def close(self) -> None:
            closed.append(self)

    writer, logged = Keeps(), Logged({"actions": np.zeros((8, 1), np.float32)})
    worker = RolloutWorker(
        Tells,
        RandomPolicy(),
        input=[("sampler", 1), (logged, 1)],
        input_options={"batch_size": 4, "columns": "intersect"},
        output=writer,
    )
    worker.sample()
    worker.stop()
    worker.stop()
    assert (len(closed), writer.closings, logged.closed) == (1, 1, 1)
    with pytest.raises(ClosedError):
        worker.sample()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"input": "nowhere/*.json"}, DataNotFound, "nowhere"),
        ({"input": 3}, OptionError, "the input is 3"),
        ({"output": 3}, OptionError, "the output is 3"),
        ({"output": "logdir"}, OptionError, "log_dir"),
        ({"record": "some"}, OptionError, "record='some'"),
        ({"input_options": {"x": 1}}, OptionError, "'x'"),
        ({"worker_index": 4, "num_workers": 2}, OptionError, "worker_index=4"),
    ],
)
def test_what_cannot_be_opened_is_an_error_and_leaves_nothing_open(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    closed = []

    class Tells(Pushes):
        def close(self) -> None:
            closed.append(self)

    with pytest.raises(error, match=message):
        RolloutWorker(Tells, RandomPolicy(), **worker_options(**options))
    assert closed or "record" in options


@pytest.mark.parametrize(
    ("env", "policy", "message"),
    [
        ("NoSuchEnv-v0", RandomPolicy(), "NoSuchEnv"),
        (Pushes, DQN(), "Discrete spaces"),
        ("CartPole-v1", "dqn", "expected 'module:name'"),
        ("CartPole-v1", 3, "expected a Policy or a PolicySpec"),
    ],
)
def test_an_environment_or_policy_that_does_not_fit_is_an_option_error(
    env: Any, policy: Any, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        RolloutWorker(env, policy)


def test_a_policy_of_other_spaces_is_refused() -> None:
    policy: Policy = RandomPolicy()
    policy.bind(Pushes.observation_space, Pushes.action_space, 0)
    with pytest.raises(OptionError, match="make another policy"):
        RolloutWorker("CartPole-v1", policy)


def test_the_data_set_says_what_made_it(tmp_path: Path) -> None:
    with RolloutWorker("CartPole-v1", RandomPolicy(), output=tmp_path / "out", seed=7) as worker:
        worker.sample()
    data = rlio.open_dataset(tmp_path / "out")
    provenance = data.open_shard(data.segments[0]).provenance
    assert {key: provenance[key] for key in ("env", "policy", "seed", "actions", "observations")} == {
        "env": "CartPole-v1",
        "policy": "RandomPolicy",
        "seed": 7,
        "actions": "raw",
        "observations": "raw",
    }
