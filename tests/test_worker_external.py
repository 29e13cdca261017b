"""RolloutWorker with loops that are not its own, and with a sampler that runs ahead in a thread."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from linear_policy import LinearPolicy

from rlio.envs.context import EnvContext
from rlio.envs.external import ExternalEnv
from rlio.errors import EndOfData, EnvError, OptionError
from rlio.policies.dqn import DQN
from rlio.policies.weights import GlobalVars
from rlio.readers.async_input import AsyncInput
from rlio.sampling.callbacks import Callbacks
from rlio.sampling.config import RolloutConfig
from rlio.sampling.env_runner import EnvRunner
from rlio.sampling.external_runner import ExternalRunner
from rlio.sampling.runners import WorkerPlace
from rlio.worker import RolloutWorker
from rlio.writers.noop_output import NoopOutput


class Loop(ExternalEnv):
    """Plays so many episodes of three steps."""

    def __init__(self, episodes: int = 2) -> None:
        super().__init__(Box(0.0, 9.0, (1,), np.float32), Discrete(2))
        self.episodes = episodes

    def run(self) -> None:
        for _ in range(self.episodes):
            episode = self.start_episode()
            for t in range(3):
                self.get_action(episode, np.full(1, t, np.float32))
                self.log_returns(episode, 1.0)
            self.end_episode(episode, np.full(1, 3, np.float32))


def test_an_external_environment_is_sampled_like_any_other() -> None:
    """Row "env kinds accepted" of 2.1; row "ExternalEnv" of 2.4."""
    config = RolloutConfig(rollout_fragment_length=3, batch_mode="complete_episodes")
    env, writer = Loop(), NoopOutput()
    worker = RolloutWorker(env, LinearPolicy(), rollout=config, output=writer, seed=0)
    batches = [worker.sample(), worker.sample()]
    assert [batch["t"].tolist() for batch in batches] == [[0, 1, 2], [0, 1, 2]]
    assert writer.rows_received == 6
    with pytest.raises(EndOfData):
        worker.sample()
    assert worker.get_metrics().counts.episodes == 2
    assert worker.foreach_env(lambda given: given) == [env]
    assert worker.get_spaces()["default_policy"] == (env.observation_space, env.action_space)
    assert worker.get_filters() == {"default_policy": []}
    worker.sync_filters({"default_policy": []})
    assert worker.add_policy("second", LinearPolicy).action_space == env.action_space
    with pytest.raises(OptionError, match="cannot be removed"):
        worker.remove_policy()
    worker.close()


def test_a_function_may_make_it() -> None:
    """Row "env kinds accepted" of 2.1: it was refused, and once made, nobody stopped it."""
    made: list[Loop] = []

    def make(context: EnvContext) -> Loop:
        assert (context["size"], context.worker_index) == (3, 2)
        made.append(Loop())
        return made[0]

    config = RolloutConfig(rollout_fragment_length=3, env_config={"size": 3})
    with RolloutWorker(make, LinearPolicy(), rollout=config, seed=0, place=WorkerPlace(2)) as worker:
        assert worker.sample()["t"].tolist() == [0, 1, 2]
        assert worker.foreach_env(lambda env: env) == made
    with RolloutWorker(Loop, LinearPolicy(), seed=0) as worker:  # a class is one
        assert isinstance(worker.runner, ExternalRunner)
    with pytest.raises(OptionError, match="use ExternalRunner"):
        EnvRunner(Loop, LinearPolicy())


@pytest.mark.parametrize(
    "option",
    [
        {"clip_rewards": 1},
        {"normalize_actions": True},
        {"observation_connectors": [np.tanh]},
        {"horizon": 2},
        {"num_envs": 4, "env_config": {"size": 3}},
    ],
    ids=lambda option: next(iter(option)),
)
def test_what_a_loop_elsewhere_does_not_heed_is_refused(option: dict[str, Any]) -> None:
    """Error 30 of section 5.3: nothing is accepted and ignored."""
    for name in option:
        with pytest.raises(OptionError, match=f"{name}=.*ExternalEnv"):
            RolloutWorker(Loop(), LinearPolicy(), rollout=RolloutConfig(**option))


AHEAD = RolloutConfig(rollout_fragment_length=10, sample_async=True)


def test_a_sampler_that_runs_ahead_gives_and_records_the_same_rows() -> None:
    """Row "sample_async" of 2.1."""
    writer = NoopOutput()
    plain = RolloutConfig(rollout_fragment_length=10)
    with (
        RolloutWorker("CartPole-v1", LinearPolicy(), rollout=AHEAD, output=writer, seed=0) as ahead,
        RolloutWorker("CartPole-v1", LinearPolicy(), rollout=plain, seed=0) as worker,
    ):
        assert isinstance(ahead._inputs.ahead, AsyncInput)
        for _ in range(5):
            assert np.array_equal(ahead.sample()["obs"], worker.sample()["obs"])
        assert writer.rows_received == 50
    with pytest.raises(OptionError, match="sample_async=True, but the input"):
        RolloutWorker(None, {"a": LinearPolicy()}, input=None, rollout=AHEAD, policy_setup=_setup())


def _setup() -> Any:
    from rlio.sampling.policy_setup import PolicySetup

    return PolicySetup(spaces={"a": (Box(0.0, 1.0, (1,)), Discrete(2))})


class Alone(LinearPolicy):
    """Notices when it is asked for actions while somebody changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.acted = threading.Event()
        self.clashes: list[str] = []

    def compute_actions(self, *args: Any, **kwargs: Any) -> Any:
        self.acted.set()
        return super().compute_actions(*args, **kwargs)

    def _changed(self, name: str) -> None:
        self.acted.clear()
        # The sampler has room for more batches, and would act at once.
        if self.acted.wait(0.05):
            self.clashes.append(name)

    def learn_on_batch(self, batch: Any) -> Any:
        self._changed("learn_on_batch")
        return super().learn_on_batch(batch)

    def set_weights(self, weights: Any) -> None:
        self._changed("set_weights")
        super().set_weights(weights)

    def compute_gradients(self, batch: Any) -> Any:
        self._changed("compute_gradients")
        return super().compute_gradients(batch)

    def apply_gradients(self, gradients: Any) -> None:
        self._changed("apply_gradients")
        super().apply_gradients(gradients)


def test_policies_do_not_act_while_they_learn_or_change() -> None:
    policy = Alone()
    with RolloutWorker("CartPole-v1", policy, rollout=AHEAD, seed=0) as worker:
        worker.learn_on_batch(worker.sample())
        worker.set_weights(worker.get_weights())
        gradients, _ = worker.compute_gradients(worker.sample())
        worker.sample()
        worker.apply_gradients(gradients)
        worker.sample_and_learn()
        worker.set_state(worker.get_state(["policies"]))
        batch = worker.sample()  # Not under the lock: the sampler may need it to fill the queue.
        worker.for_policy(lambda policy: policy.learn_on_batch(batch))
        worker.foreach_policy(lambda policy, _: policy.learn_on_batch(batch))
        worker.foreach_policy_to_train(lambda policy, _: policy.learn_on_batch(batch))
        with policy.lock:
            policy.learn_on_batch(batch)
        worker.set_global_vars(GlobalVars(1000))
    assert policy.clashes == []


class Watched(DQN):
    """Notices when it is asked for actions in the middle of a change."""

    def __init__(self) -> None:
        super().__init__(hidden=(4,), initial_epsilon=0.0, final_epsilon=0.0, target_update_every=1)
        self.acted = threading.Event()
        self.clashes: list[str] = []
        self.changes = 0

    def forward(self, obs: Any) -> Any:
        self.acted.set()
        return super().forward(obs)

    def _changed(self, name: str) -> None:
        self.changes += 1
        self.acted.clear()
        if self.acted.wait(0.05):
            self.clashes.append(name)

    def _compute_loss(self, outputs: Any, tensors: Any) -> Any:
        self._changed("learning")
        return super()._compute_loss(outputs, tensors)

    def _after_update(self) -> None:
        self._changed("updating")
        super()._after_update()

    def _non_inference(self) -> Any:
        self._changed("weights")
        return super()._non_inference()


def test_learning_on_the_policy_itself_does_not_overlap_its_acting_in_a_thread() -> None:
    """``policy.learn_on_batch(worker.sample())``, as in README: it overlapped acting 10 times of 10."""
    policy = Watched()
    with RolloutWorker("CartPole-v1", policy, rollout=AHEAD, seed=0) as worker:
        for _ in range(3):
            policy.learn_on_batch(worker.sample())
        gradients, _ = policy.compute_gradients(worker.sample())
        policy.apply_gradients(gradients)
        policy.set_weights(policy.get_weights())
        policy.set_state(policy.get_state())
        changes = policy.changes
        policy.acted.clear()
        worker.sample(60)
        assert policy.acted.wait(60), "it goes on acting afterwards"
    assert changes == 10
    assert policy.clashes == []


class Slow(LinearPolicy):
    """Has chosen some time before it says so."""

    def compute_actions(self, *args: Any, **kwargs: Any) -> Any:
        chosen = super().compute_actions(*args, **kwargs)
        time.sleep(0.001)
        return chosen


def test_each_row_has_the_version_of_the_weights_that_acted() -> None:
    """Where a policy learns while others of its rows are sampled."""
    policy, weights = Slow(), {0: 0.0}
    with RolloutWorker("CartPole-v1", policy, rollout=AHEAD, seed=0) as worker:
        rows = 0
        for version in range(1, 30):
            with policy.lock:
                policy.apply_gradients({"w": np.array([-1.0])})
                weights[policy.weights_seq_no] = float(policy.w[0])
            assert policy.weights_seq_no == version
            batch = worker.sample()
            expected = [weights[number] for number in batch["weights_seq_no"].tolist()]
            assert batch["w_then"].tolist() == expected
            rows += len(batch)
    assert rows == 290


def test_a_policy_travels_without_its_lock() -> None:
    policy = LinearPolicy()
    with policy.lock:
        pass
    made = pickle.loads(pickle.dumps(policy))
    assert made.lock is not policy.lock
    assert copy.deepcopy(policy).lock is not policy.lock
    assert policy.lock is policy.lock


def test_errors_of_a_sampler_that_runs_ahead_surface_in_sample() -> None:
    class Fails(Callbacks):
        def on_episode_end(self, **kwargs: Any) -> None:
            raise EnvError("mine")

    worker = RolloutWorker("CartPole-v1", LinearPolicy(), rollout=AHEAD, callbacks=Fails, seed=0)
    with worker, pytest.raises(EnvError, match="mine"):
        worker.sample(50)
