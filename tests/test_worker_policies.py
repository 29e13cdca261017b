"""RolloutWorker: its policies come, go, learn and are stored. Rows are those of RLlib's tables 2.1, 2.2."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from linear_policy import LinearPolicy, even_odd, only_even, worker_options

import rlio
from rlio.batch import MultiAgentBatch, SampleBatch, concat_samples
from rlio.errors import CorruptData, DataNotFound, OptionError, StateError
from rlio.policies.policy_spec import PolicySpec
from rlio.policies.random_policy import RandomPolicy
from rlio.policies.weights import GlobalVars
from rlio.reader import InputReader
from rlio.readers.recording_input import RecordingInput
from rlio.sampling.callbacks import Callbacks
from rlio.sampling.config import RolloutConfig
from rlio.sampling.policy_setup import PolicySetup
from rlio.sampling.worker_input import FirstBatchForever, NoInput, Simulated
from rlio.testing import assert_same
from rlio.worker import RolloutWorker
from rlio.writers.noop_output import NoopOutput

SMALL = RolloutConfig(rollout_fragment_length=10, num_envs=2)
SPACES = (Box(-1.0, 1.0, (2,), np.float32), Discrete(2))


def live(policy: Any = None, **options: Any) -> RolloutWorker:
    given = {"rollout": SMALL, "seed": 0} | options
    return RolloutWorker(
        "CartPole-v1", LinearPolicy() if policy is None else policy, **worker_options(**given)
    )


def learner(**options: Any) -> RolloutWorker:
    """A worker of two policies that only learns."""
    setup = PolicySetup(spaces={"even": SPACES, "odd": SPACES})
    given: dict[str, Any] = {"input": None, "policy_setup": setup}
    policies = {"even": LinearPolicy, "odd": LinearPolicy}
    return RolloutWorker(None, policies, **worker_options(**given | options))


def weight(worker: RolloutWorker, policy_id: str = "default_policy") -> float:
    policy = worker.get_policy(policy_id)
    assert isinstance(policy, LinearPolicy)
    return float(policy.w[0])


def rewarded(reward: float, rows: int = 4) -> SampleBatch:
    return SampleBatch(eps_id=np.zeros(rows, np.int64), t=np.arange(rows), rewards=np.full(rows, reward))


BOTH = MultiAgentBatch({"even": rewarded(2.0), "odd": rewarded(5.0)}, 4)


# ---- how policies are given ----


@pytest.mark.parametrize(
    "policy",
    [
        LinearPolicy(),
        LinearPolicy,
        "linear_policy:LinearPolicy",
        PolicySpec(LinearPolicy),
        {"default_policy": LinearPolicy()},
        {"default_policy": (LinearPolicy, None, None, {"rate": 0.5})},
    ],
    ids=["object", "class", "name", "spec", "mapping", "tuple"],
)
def test_a_policy_is_given_in_any_form_and_takes_the_environments_spaces(policy: Any) -> None:
    """Row "policy spec" of 2.1."""
    with live(policy) as worker:
        batch = worker.sample()
        assert isinstance(worker.policy, LinearPolicy)
        assert isinstance(batch, SampleBatch)
        assert len(batch) == 20
        assert worker.runner is not None
        assert worker.get_spaces() == dict.fromkeys(
            ("default_policy", "__env__"), (worker.runner.observation_space, worker.runner.action_space)
        )


def test_a_worker_without_an_environment_learns_and_has_nothing_to_sample() -> None:
    """Rows "local worker env" and "create_env_on_driver": `sample()` raises."""
    with learner() as worker:
        assert isinstance(worker.reader, NoInput)
        with pytest.raises(OptionError, match="nothing to sample"):
            worker.sample()
        assert worker.learn_on_batch(BOTH)["odd"]["loss"] == 25.0
        assert worker.get_spaces() == {"even": SPACES, "odd": SPACES}


def test_the_setup_gives_class_and_spaces_to_those_without() -> None:
    setup = PolicySetup(spaces={"a": SPACES}, default_policy_class=LinearPolicy, capacity=1)
    worker = RolloutWorker(None, {"a": None}, input=None, policy_setup=setup)
    assert isinstance(worker.get_policy("a"), LinearPolicy)
    assert worker.group.policies.capacity == 1
    with pytest.raises(OptionError, match="unknown policy 'default_policy'"):
        _ = worker.policy
    with pytest.raises(OptionError, match=r"spaces are given for the unknown policies \['b'\]"):
        RolloutWorker(None, {"a": LinearPolicy}, input=None, policy_setup=PolicySetup(spaces={"b": SPACES}))
    with pytest.raises(OptionError, match="no spaces yet"):
        RolloutWorker(None, {"a": LinearPolicy}, input=None)


def test_a_worker_says_what_it_was_made_with() -> None:
    """Row "creation_args, get_host, get_node_ip, find_free_port"."""
    policy = LinearPolicy()
    with live(policy, seed=3) as worker:
        args = worker.creation_args
        assert (args["env"], args["policy"], args["seed"], args["place"]) == (
            "CartPole-v1",
            policy,
            3,
            None,
        )
        with RolloutWorker(**args) as again:
            assert_same(again.sample(), worker.sample())
        assert worker.get_host()
        assert worker.get_node_ip().count(".") == 3
        assert 0 < worker.find_free_port() < 65536


# ---- sampling ----


def test_a_batch_comes_with_its_count() -> None:
    """Row "sample_with_count()"."""
    with live() as worker:
        batch, count = worker.sample_with_count()
        assert count == len(batch) == 20


def test_callbacks_have_samples_before_they_are_written_and_cut() -> None:
    """Rows "sample()" and "on_sample_end": what they change is written and served."""
    lengths = []

    class Marks(Callbacks):
        def on_sample_end(self, *, runner: Any, samples: Any, **kwargs: Any) -> None:
            assert runner is worker
            samples["mark"] = np.full(len(samples), len(lengths))
            lengths.append(len(samples))

    written = []

    class Keeps(NoopOutput):
        def _write(self, batch: Any) -> None:
            written.append(batch.copy())

    worker = live(callbacks=Marks, output=Keeps())
    served = [worker.sample(15), worker.sample(15), worker.sample()]
    worker.close()
    assert lengths == [20, 20]
    assert_same(concat_samples(written), concat_samples(served))
    assert concat_samples(served)["mark"].tolist() == [0] * 20 + [1] * 20


class Logged(InputReader):
    """The same logged rows again and again."""

    def _next(self) -> SampleBatch:
        return SampleBatch(t=np.arange(8), rewards=np.ones(8, np.float32), eps_id=np.full(8, -1))


def test_callbacks_have_what_is_read_too() -> None:
    seen = []

    class Tells(Callbacks):
        def on_sample_end(self, *, samples: Any, **kwargs: Any) -> None:
            seen.append(len(samples))

    with live(input=Logged(), callbacks=[Tells(), Callbacks]) as worker:
        worker.sample(20)
    assert seen == [8, 8, 8]


def test_a_fake_sampler_gives_its_first_batch_forever_and_writes_it_once() -> None:
    """Row "fake_sampler"; error 42 of 5.3: RLlib writes it each time."""
    config = RolloutConfig(rollout_fragment_length=10, fake_sampler=True)
    writer = NoopOutput()
    with live(rollout=config, output=writer) as worker:
        first, second = worker.sample(), worker.sample()
        assert_same(first, second)
        assert writer.rows_received == 10
        first["rewards"][:] = 9
        assert worker.sample()["rewards"].max() == 1.0
        assert isinstance(worker.reader, FirstBatchForever)
        assert isinstance(worker.reader.child, RecordingInput)
    with pytest.raises(OptionError, match="fake_sampler=True, but the input"):
        live(input=Logged(), rollout=config)


def test_a_simulation_runs_beside_what_is_read_and_is_served_to_nobody() -> None:
    """``input_evaluation="simulation"``."""
    config = RolloutConfig(rollout_fragment_length=10, num_envs=2, input_evaluation="simulation")
    with live(input=Logged(), rollout=config) as worker:
        assert isinstance(worker.reader, Simulated)
        batches = [worker.sample(), worker.sample(12)]
        assert all((batch["eps_id"] == -1).all() for batch in batches)
        assert worker.runner is not None
        assert worker.runner.timesteps == 40
        state = json.loads(json.dumps(worker.state_dict()))
        with live(input=Logged(), rollout=config) as restored:
            restored.load_state_dict(state)
            assert restored.runner is not None
            assert restored.runner.timesteps == 40
            assert_same(restored.sample(5), worker.sample(5))
    for options in ({"input": "sampler"}, {"input": [("sampler", 1), (Logged(), 1)]}):
        with pytest.raises(OptionError, match="beside an input from files"):
            live(rollout=config, **options)
    with pytest.raises(OptionError, match="needs an environment"):
        learner(input=Logged(), rollout=config)


def test_a_worker_is_an_iterator_of_its_batches() -> None:
    """Row "ParallelIteratorWorker": `gen_rollouts` is plain iteration."""
    with live() as worker:
        assert [len(batch) for batch, _ in zip(worker, range(3), strict=False)] == [20] * 3


# ---- learning ----


def test_it_learns_by_policy_and_by_gradients() -> None:
    """Rows "learn_on_batch", "compute_gradients / apply_gradients", "num_grad_updates"."""
    with learner() as worker, learner() as other:
        gradients, stats = worker.compute_gradients(BOTH)
        assert stats["even"]["batch_count"] == 4
        other.apply_gradients(gradients)
        worker.learn_on_batch(BOTH)
        assert worker.get_weights() == other.get_weights() == {"even": {"w": [2.0]}, "odd": {"w": [5.0]}}
        assert worker.get_global_vars().num_grad_updates_per_policy == {"even": 1, "odd": 1}


def test_sample_and_learn_takes_exactly_so_many_steps_in_shuffled_parts() -> None:
    """Row "sample_and_learn(expected_batch_size, num_sgd_iter, sgd_minibatch_size, standardize_fields)"."""
    with live() as worker:
        policy = worker.policy
        assert isinstance(policy, LinearPolicy)
        stats, count = worker.sample_and_learn(
            30, num_sgd_iter=2, sgd_minibatch_size=8, standardize_fields=["rewards"]
        )
        assert count == 30
        assert [len(part) for part in policy.seen] == [8, 8, 8, 6] * 2
        assert stats["num_grad_updates_lifetime"] == 8
        passes = [concat_samples(policy.seen[i : i + 4]) for i in (0, 4)]
        rows = [sorted(zip(part["eps_id"], part["t"], strict=True)) for part in passes]
        assert rows[0] == rows[1]
        assert not np.array_equal(passes[0]["t"], passes[1]["t"])
        assert abs(float(passes[0]["rewards"].mean())) < 1e-3
        assert worker.sample_and_learn()[1] == 10
    with live() as again:
        again.sample_and_learn(30, num_sgd_iter=2, sgd_minibatch_size=8)
        assert isinstance(again.policy, LinearPolicy)
        for one, other in zip(policy.seen, again.policy.seen, strict=False):
            assert np.array_equal(one["t"], other["t"]), "the order is the seed's"


def test_weights_and_global_vars_arrive_together() -> None:
    """Row "set_weights(weights, global_vars, weights_seq_no)"."""
    with live() as worker:
        worker.set_weights({"w": np.array([3.0])}, GlobalVars(99, {"default_policy": 7}), 4)
        worker.set_weights({"w": np.array([1.0])}, None, 3)
        assert weight(worker) == 3.0
        assert set(worker.sample()["weights_seq_no"]) == {4}
        assert worker.get_global_vars() == GlobalVars(99, {"default_policy": 7})


def test_rllibs_own_calls_of_weights_and_global_vars_work() -> None:
    """The docstrings of RLlib's RolloutWorker: `worker.set_weights(weights, {"timestep": 42})` and others."""
    with live() as worker:
        worker.set_weights(worker.get_weights(), {"timestep": 42})
        assert worker.get_global_vars() == GlobalVars(42, {"default_policy": 0})
        worker.set_weights(worker.get_weights(None, True), {"timestep": 43}, 7)
        assert set(worker.sample()["weights_seq_no"]) == {7}
        worker.set_global_vars({"timestep": 4242, "num_grad_updates_per_policy": {"default_policy": 3}})
        assert worker.get_global_vars() == GlobalVars(4242, {"default_policy": 3})
        worker.set_global_vars({"timestep": 4243}, ["default_policy"])
        assert worker.get_global_vars() == GlobalVars(4243, {"default_policy": 3})
        assert worker.get_filters(True) == {"default_policy": []}


@pytest.mark.parametrize(
    "given",
    [{}, {"timestep": "42"}, {"timestep": -1}, {"timestep": 1, "timesteps": 2}, 42, {"timestep": 1.5}],
)
def test_global_vars_that_are_not_understood_are_refused(given: Any) -> None:
    with live() as worker:
        with pytest.raises(OptionError, match="global_vars="):
            worker.set_weights({"w": np.array([3.0])}, given)
        assert weight(worker) == 0.0, "nothing was set"
        with pytest.raises(OptionError, match="global_vars="):
            worker.set_global_vars(given)


def test_sample_and_learn_takes_rllibs_arguments_by_position() -> None:
    with live() as worker:
        stats, steps = worker.sample_and_learn(12, 1, 5, [])
        assert (steps, stats["num_grad_updates_lifetime"]) == (12, 3)
        assert worker.sample_and_learn(20, 2, 0, ["rewards"])[0]["num_grad_updates_lifetime"] == 5
        with pytest.raises(OptionError, match=r"expected a list of columns, such as \['rewards'\]"):
            worker.sample_and_learn(20, 1, 5, "rewards")


def test_a_component_may_be_given_as_text(tmp_path: Path) -> None:
    """RLlib: ``components: Optional[Union[str, Collection[str]]]``."""
    with live(RandomPolicy()) as worker:
        every = list(worker.get_state())
        assert list(worker.get_state("policies")) == ["policies"]
        assert list(worker.get_state(not_components="policies")) == [
            name for name in every if name != "policies"
        ]
        assert list(worker.get_state(not_components=None)) == every
        assert worker.runner is not None
        assert list(worker.runner.get_state("policy")) == ["policy"]
        assert "policy" not in worker.runner.get_state(not_components="policy")
        worker.save(tmp_path / "worker", components="policies")
        worker.restore(tmp_path / "worker", components="policies")
        worker.policy.save(tmp_path / "policy", not_components="rng")
        worker.policy.load(tmp_path / "policy", components="weights")
        with pytest.raises(OptionError, match="has no components"):
            worker.get_state("policie")


def test_a_policy_that_was_added_as_an_object_is_stored_with_its_class_and_arguments(tmp_path: Path) -> None:
    with live() as worker:
        worker.add_policy("positional", LinearPolicy(0.25))
        worker.add_policy("copied", copy.deepcopy(LinearPolicy(rate=0.125)))
        worker.set_weights({"positional": {"w": np.array([7.0])}})
        worker.save(tmp_path)
    with live() as again:
        again.restore(tmp_path)
        for policy_id, rate in {"positional": 0.25, "copied": 0.125}.items():
            policy = again.get_policy(policy_id)
            assert isinstance(policy, LinearPolicy)
            assert policy.rate == rate
        assert weight(again, "positional") == 7.0


class Options(LinearPolicy):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)


class Positional(LinearPolicy):
    def __init__(self, *rates: float) -> None:
        super().__init__(*rates)


def test_a_policy_with_any_keywords_is_stored_with_those_that_it_was_given(tmp_path: Path) -> None:
    with live() as worker:
        worker.add_policy("options", Options(rate=0.5))
        worker.save(tmp_path)
    with live() as again:
        again.restore(tmp_path)
        assert again.get_policy("options").rate == 0.5  # type: ignore[union-attr]


def local_class() -> LinearPolicy:
    class Local(LinearPolicy):
        pass

    return Local()


@pytest.mark.parametrize(
    ("added", "why"),
    [
        (local_class(), "cannot be imported by a name"),
        (Options(rate=object()), r"config\['rate'\] is"),
        (Positional(0.5), "1 arguments by position"),
        (PolicySpec(lambda: LinearPolicy()), "cannot be imported by a name"),
    ],
    ids=["local class", "argument", "position", "lambda"],
)
def test_saving_refuses_an_added_policy_that_restoring_could_not_make(
    added: Any, why: str, tmp_path: Path
) -> None:
    with live() as worker:
        worker.save(tmp_path / "before")
        worker.add_policy("added", added)
        with pytest.raises(StateError, match=rf"the policy 'added' was added.*{why}"):
            worker.save(tmp_path / "after")
        with pytest.raises(StateError, match="the policy 'added' was added"):
            rlio.save_checkpoint(tmp_path / "after", worker=worker)
        assert not (tmp_path / "after").exists()
        worker.save(tmp_path / "after", not_components="policies")
        worker.remove_policy("added")
        worker.save(tmp_path / "after")


def test_a_worker_that_was_made_with_such_a_policy_is_stored_and_restored(tmp_path: Path) -> None:
    with live(local_class()) as worker:
        worker.set_weights({"w": np.array([5.0])})
        worker.save(tmp_path)
    with live(local_class()) as again:
        again.restore(tmp_path)
        assert weight(again) == 5.0


def test_a_policy_class_without_arguments_refuses_them() -> None:
    with pytest.raises(TypeError, match=r"RandomPolicy\(\) takes no arguments"):
        RandomPolicy(3)  # type: ignore[call-arg]


def test_policies_to_train_and_mapping_change_on_the_fly() -> None:
    """Rows "set_policy_mapping_fn / set_is_policy_to_train / get_policies_to_train(batch)"."""
    with learner() as worker:
        worker.set_is_policy_to_train(only_even)
        assert worker.get_policies_to_train(BOTH) == {"even"}
        assert worker.foreach_policy_to_train(lambda policy, policy_id: policy_id) == ["even"]
        worker.set_is_policy_to_train(["odd"])
        assert list(worker.learn_on_batch(BOTH)) == ["odd"]
        worker.set_policy_mapping_fn(even_odd)
        assert worker.group.policy_mapping_fn is even_odd
        assert worker.foreach_policy(lambda policy, policy_id, x: policy_id * x, x=2) == [
            "eveneven",
            "oddodd",
        ]
        assert worker.for_policy(lambda policy: policy.rate, "odd") == 1.0


def test_policies_are_added_and_removed() -> None:
    """Row "get_policy / add_policy / remove_policy"."""
    created = []

    class Tells(Callbacks):
        def on_create_policy(self, *, policy_id: str, policy: Any, **kwargs: Any) -> None:
            created.append((policy_id, policy.is_bound))

    with live(callbacks=Tells) as worker:
        added = worker.add_policy(
            "second",
            LinearPolicy,
            state={"weights": {"w": np.array([8.0])}, "weights_seq_no": 1},
            policies_to_train=["second"],
        )
        assert worker.get_policy("second") is added
        assert created == [("default_policy", True), ("second", True)]
        assert worker.get_weights() == {"second": {"w": [8.0]}}
        with pytest.raises(OptionError, match="already"):
            worker.add_policy("second", LinearPolicy)
        with pytest.raises(OptionError, match="acts in the worker's environment"):
            worker.remove_policy()
        worker.remove_policy("second")
        assert worker.get_policy("second") is None
        assert worker.get_policies_to_train() == set()
        assert list(worker.get_spaces()) == ["default_policy", "__env__"]
        worker.sample()
    with learner(policy_mapping_fn=even_odd) as worker:
        worker.add_policy("third", (LinearPolicy, *SPACES))
        worker.remove_policy(
            "odd", policy_mapping_fn=lambda agent_id, episode: "third", policies_to_train=["third"]
        )
        assert worker.group.policy_mapping_fn is not even_odd
        with pytest.raises(OptionError, match="unknown policy 'odd'"):
            worker.learn_on_batch(BOTH)


# ---- state ----


@pytest.mark.parametrize("folder", ["checkpoint", "memory://worker-checkpoint"])
def test_a_saved_worker_is_restored_with_its_policies_functions_and_counts(
    folder: str, tmp_path: Path
) -> None:
    """Rows "get_state / set_state" and "save / restore": JSON and .npz, no pickle."""
    place = folder if "://" in folder else str(tmp_path / folder)
    loaded = []

    class Tells(Callbacks):
        def on_checkpoint_loaded(self, *, worker: Any, path: Any, **kwargs: Any) -> None:
            loaded.append((worker, path))

    with learner(policy_mapping_fn=even_odd, policies_to_train=["even"]) as worker:
        worker.learn_on_batch(BOTH)
        worker.save(place)
    if place != folder:
        assert sorted(file.name for file in Path(place).glob("*.*")) == ["arrays.npz", "state.json"]
        assert "linear_policy:LinearPolicy" in (Path(place) / "state.json").read_text()
    bare = RolloutWorker(
        None,
        {"even": LinearPolicy},
        input=None,
        policy_setup=PolicySetup(spaces={"even": SPACES}),
        callbacks=Tells,
    )
    bare.restore(place)
    assert (weight(bare, "even"), weight(bare, "odd")) == (2.0, 0.0)
    assert bare.group.policy_mapping_fn is even_odd
    assert bare.get_policies_to_train() == {"even"}
    assert bare.get_global_vars().num_grad_updates_per_policy == {"even": 1, "odd": 0}
    assert loaded == [(bare, place)]


def test_a_live_worker_goes_on_counting_after_a_restore(tmp_path: Path) -> None:
    with live() as worker:
        worker.sample_and_learn()
        worker.save(tmp_path)
        follows = worker.sample_and_learn
        with live() as other:
            other.restore(tmp_path)
            assert other.runner is not None
            assert other.runner.timesteps == 20
            assert weight(other) == weight(worker) == 1.0
            assert other.sample_and_learn()[0]["num_grad_updates_lifetime"] == 2
            assert follows()[0]["num_grad_updates_lifetime"] == 2


def test_a_checkpoint_is_two_files(tmp_path: Path) -> None:
    """The folder for unfinished files stayed behind."""
    with RolloutWorker("CartPole-v1", LinearPolicy(), seed=0) as worker:
        for _ in range(2):
            worker.save(tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["arrays.npz", "state.json"]


def test_components_are_saved_and_restored_by_name(tmp_path: Path) -> None:
    with learner() as worker, learner() as other:
        worker.learn_on_batch(BOTH)
        assert list(worker.get_state(["policies"])) == ["policies"]
        assert set(worker.get_state(not_components=["policies"])) == {
            "policy_mapping_fn",
            "policies_to_train",
            "global_vars",
            "position",
        }
        worker.save(tmp_path / "whole")
        other.restore(tmp_path / "whole", components=["global_vars"])
        assert other.get_global_vars().num_grad_updates_per_policy == {"even": 1, "odd": 1}
        assert weight(other, "odd") == 0.0
        other.restore(tmp_path / "whole", not_components=["position"])
        assert weight(other, "odd") == 5.0
        with pytest.raises(OptionError, match="no components"):
            worker.get_state(["weights"])
        worker.save(tmp_path / "part", components=["global_vars"])
        with pytest.raises(OptionError, match="no components"):
            other.restore(tmp_path / "part", components=["policies"])


def test_a_worker_without_the_output_of_another_is_told_how_to_restore(tmp_path: Path) -> None:
    """The state of a worker that recorded, in one that does not: to evaluate, or to go on elsewhere."""

    def worker(**options: Any) -> RolloutWorker:
        return RolloutWorker("CartPole-v1", rlio.policies.DQN(hidden=[4]), seed=0, **options)

    with worker(output=tmp_path / "out") as recorded:
        recorded.sample()
        recorded.save(tmp_path / "state")
        weights = recorded.get_weights()
    message = r"another input or output.*not_components='position'"
    with worker() as other, pytest.raises(StateError, match=message):
        other.restore(tmp_path / "state")
    with worker() as other:
        other.restore(tmp_path / "state", not_components="position")
        for name, value in weights.items():
            np.testing.assert_array_equal(other.get_weights()[name], value)
        assert len(other.sample(30)) == 30


def test_only_policies_that_learn_are_saved_if_asked_for(tmp_path: Path) -> None:
    """Row "trainable-only checkpoints"."""
    with learner(policies_to_train=["odd"]) as worker, learner() as other:
        worker.set_weights({"even": {"w": np.array([1.0])}, "odd": {"w": np.array([2.0])}})
        worker.save(tmp_path, trainable_only=True)
        other.restore(tmp_path)
        assert (weight(other, "even"), weight(other, "odd")) == (0.0, 2.0)


def test_what_is_no_workers_state_is_refused(tmp_path: Path) -> None:
    with learner() as worker:
        with pytest.raises(DataNotFound):
            worker.restore(tmp_path / "nowhere")
        worker.export_policy_checkpoint(tmp_path / "policy", "odd")
        with pytest.raises(StateError, match="not a state of a RolloutWorker"):
            worker.restore(tmp_path / "policy")
        with pytest.raises(StateError, match="not a state of a RolloutWorker"):
            worker.sample()
    with learner() as worker:
        worker.save(tmp_path / "torn")
        (tmp_path / "torn" / "arrays.npz").write_bytes(b"")
        with pytest.raises(CorruptData):
            worker.restore(tmp_path / "torn")
        with pytest.raises(StateError):
            worker.sample()


def test_policies_are_exported_and_imported(tmp_path: Path) -> None:
    """Row "export_policy_model, import_policy_model_from_h5, export_policy_checkpoint"."""
    with learner() as worker:
        worker.learn_on_batch(BOTH)
        worker.export_policy_model(tmp_path / "odd.npz", "odd")
        worker.import_policy_model(tmp_path / "odd.npz", "even")
        assert weight(worker, "even") == 5.0
        worker.export_policy_checkpoint(tmp_path / "odd", "odd")
        policy = LinearPolicy()
        policy.bind(*SPACES)
        policy.load(tmp_path / "odd")
        assert policy.w[0] == 5.0


# ---- utilities ----


def test_a_function_is_applied_to_the_worker() -> None:
    """Row "compute_apply / apply"."""
    with live() as worker:
        assert worker.apply(lambda given, x, *, y: (given, x, y), 1, y=2) == (worker, 1, 2)


def test_the_lock_keeps_other_threads_out() -> None:
    """Row "lock/unlock, stop"."""
    with live() as worker:
        worker.lock()
        entered = threading.Event()

        def enter() -> None:
            worker.lock()
            entered.set()
            worker.unlock()

        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.05)
        worker.unlock()
        thread.join()
        assert entered.is_set()
        with pytest.raises(RuntimeError):
            worker.unlock()


def test_provenance_names_every_policy(tmp_path: Path) -> None:
    with live({"default_policy": RandomPolicy(), "other": LinearPolicy}, output=tmp_path / "out") as worker:
        worker.sample()
    data = rlio.open_dataset(tmp_path / "out")
    provenance = data.open_shard(data.segments[0]).provenance
    assert provenance["policy"] == "default_policy: RandomPolicy, other: LinearPolicy"


def test_policies_that_learn_join_other_processes() -> None:
    """Row "setup_torch_data_parallel(url, rank, world, backend)"; two processes are tested with policies."""
    import torch.distributed as dist

    policies = {"default_policy": rlio.policies.DQN(), "frozen": LinearPolicy}
    with live(policies, policies_to_train=["default_policy"]) as worker:
        port = worker.find_free_port()
        try:
            worker.setup_torch_data_parallel(f"tcp://127.0.0.1:{port}", 0, 1)
            assert dist.get_world_size() == 1
            assert isinstance(worker.policy, rlio.policies.DQN)
            assert worker.policy.distributed_world_size == 1
        finally:
            dist.destroy_process_group()
    with live() as worker, pytest.raises(OptionError, match="expected a TorchPolicy"):
        worker.setup_torch_data_parallel("tcp://127.0.0.1:1", 0, 1)


def test_each_pass_has_another_order_and_a_restored_worker_the_ones_that_would_have_come(
    tmp_path: Path,
) -> None:
    def order(worker: RolloutWorker) -> list[int]:
        policy = worker.policy
        assert isinstance(policy, LinearPolicy)
        policy.seen.clear()
        worker.sample_and_learn(sgd_minibatch_size=2)
        return [int(t) for part in policy.seen for t in part["t"]]

    with live(input=Logged()) as worker, live(input=Logged()) as restored:
        first = order(worker)
        worker.save(tmp_path)
        second = order(worker)
        assert sorted(first) == sorted(second) == list(range(8))
        assert first != second
        restored.restore(tmp_path)
        assert order(restored) == second
