"""RolloutConfig(input_evaluation=...): policies that learn from what is read are judged by it.

Row input_evaluation of 2.7: "is", "wis" and "simulation", one or several; per decision too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from tabular_problems import PROBLEMS

import rlio
from rlio.errors import MissingColumn, OptionError
from rlio.evaluation import Target, evaluate_offline
from rlio.policies.policy import Policy
from rlio.rollout.metrics import RolloutMetrics

ALL = ["is", "pdis", "wis", "wpdis"]
CHAIN = PROBLEMS["chain"]


class Chooses(Policy):
    """Two actions; the second with a probability that its weights say."""

    def __init__(self, probability: float = 0.5) -> None:
        super().__init__()
        self.probability = probability

    def compute_actions(self, obs: Any, state: Any = (), **_: Any) -> Any:
        return np.ones(len(obs), np.int64), state, {}

    def compute_log_likelihoods(self, actions: Any, obs: Any, **_: Any) -> Any:
        return np.log(np.where(actions == 1, self.probability, 1 - self.probability))


def worker_of(
    source: Any, policy: Any = None, *, evaluation: Any = ALL, **options: Any
) -> rlio.RolloutWorker:
    policy = Chooses(0.7) if policy is None else policy
    rollout = rlio.RolloutConfig(
        input_evaluation=evaluation, input_evaluation_gamma=CHAIN.gamma, **options.pop("rollout", {})
    )
    if not isinstance(policy, dict) and not policy.is_bound:
        policy.bind(Discrete(3), Discrete(2), seed=0)
    return rlio.RolloutWorker(None, policy, input=source, rollout=rollout, **options)


def root_of(folder: Path, seed: int = 0) -> Path:
    with rlio.ParquetWriter(folder, roll=rlio.Roll(max_rows=100)) as writer:
        writer.write(CHAIN.simulate(200, seed=seed))
    return folder


def summary_of(worker: rlio.RolloutWorker) -> dict[str, Any]:
    found: dict[str, Any] = worker.get_metrics().summarise()["off_policy_estimator"]
    return found


def test_estimates_of_what_was_read_are_those_of_evaluate_offline(tmp_path: Path) -> None:
    """Episodes are put together across batches, whatever their size."""
    root = root_of(tmp_path)
    with worker_of(root, input_options={"epochs": 1, "batch_size": 17}) as worker:
        rows = sum(len(batch) for batch in worker)
        found = summary_of(worker)
        assert rows == len(rlio.open_dataset(root))
        assert summary_of(worker) == {}  # Nothing was read since.
        expected = evaluate_offline(root, worker.policy, gamma=CHAIN.gamma, estimators=ALL)
    assert list(found) == ALL
    for name, estimate in expected.items():
        assert found[name]["v_target"] == estimate.v_target.value
        assert found[name]["v_behavior"] == estimate.v_behavior.value
        assert found[name]["v_target_interval"] == list(estimate.v_target.interval)
        assert found[name]["episodes"] == 200
        assert estimate.overlap is not None
        assert found[name]["effective_sample_size"] == estimate.overlap.effective_sample_size


def test_each_call_of_get_metrics_tells_of_the_policy_as_it_was_since_the_last_one(tmp_path: Path) -> None:
    """A policy that changes meanwhile; the data stays the same, epoch after epoch."""
    root, policy = root_of(tmp_path), Chooses(0.5)
    rows = len(rlio.open_dataset(root))
    with worker_of(root, policy, evaluation="wis", input_options={"batch_size": 50}) as worker:
        for probability in (0.3, 0.9):
            policy.probability = probability
            for _ in range(2 * rows // 50):
                worker.sample()
            found = summary_of(worker)["wis"]
            assert found["episodes"] == pytest.approx(400, abs=40)
            expected = evaluate_offline(root, policy, gamma=CHAIN.gamma, estimators=["wis"])["wis"]
            assert found["v_gain"] == pytest.approx(expected.v_gain.value, abs=0.05)


def test_a_mixture_shuffled_batches_and_a_simulation_beside_them(tmp_path: Path) -> None:
    """Sources are told apart, though both have the episodes 0 to 199; a list of several evaluations."""
    one, other = root_of(tmp_path / "a", seed=1), root_of(tmp_path / "b", seed=2)
    policy = rlio.RandomPolicy()
    mixture = [(rlio.DatasetReader(root, epochs=1, batch_size=7), 0.5) for root in (one, other)]
    rollout = {"shuffle_buffer_size": 3}
    with worker_of(mixture, Chooses(0.6), evaluation=["wis", "is"], rollout=rollout) as worker:
        for _ in worker:
            pass
        assert summary_of(worker)["is"]["episodes"] == 400
    with rlio.RolloutWorker("CartPole-v1", policy, output=tmp_path / "c", seed=0) as recorder:
        recorder.sample()
    rollout = rlio.RolloutConfig(
        rollout_fragment_length=150, input_evaluation=["wis", "simulation"], input_evaluation_gamma=1.0
    )
    judged = rlio.RandomPolicy()
    one_epoch: dict[str, Any] = {"input_options": {"epochs": 1}, "seed": 1}
    with rlio.RolloutWorker(
        "CartPole-v1", judged, input=tmp_path / "c", rollout=rollout, **one_epoch
    ) as worker:
        worker.sample()
        summary = worker.get_metrics().summarise()
    assert summary["off_policy_estimator"]["wis"]["v_gain"] == pytest.approx(0.0, abs=1e-4)
    assert summary["off_policy_estimator"]["wis"]["episodes"] > 3
    assert 5 < summary["episode_return_mean"] < 80


def test_metrics_of_several_workers_are_one_estimate_of_all_their_episodes(tmp_path: Path) -> None:
    roots = [root_of(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    parts, batches = [], []
    for root in roots:
        with worker_of(root, input_options={"epochs": 1}) as worker:
            batches += list(worker)
            parts.append(worker.get_metrics())
    merged = RolloutMetrics.merge(parts).summarise()["off_policy_estimator"]
    batches[1]["eps_id"] += 200
    expected = evaluate_offline(batches, Target(mostly_second), gamma=CHAIN.gamma, estimators=ALL)
    for name in ALL:
        assert merged[name]["v_target"] == pytest.approx(expected[name].v_target.value)
        assert merged[name]["episodes"] == 400
    assert parts[0].off_policy["default_policy"].evidence.episodes == 200  # Merging changed no part.


def mostly_second(obs: Any, actions: Any) -> Any:
    return np.log(np.where(actions == 1, 0.7, 0.3))


def test_policies_are_judged_by_their_own_rows(tmp_path: Path) -> None:
    rows = CHAIN.simulate(50, seed=0)
    joint = rlio.MultiAgentBatch({"a": rows, "b": rows[rows["eps_id"] < 20]}, len(rows))

    class Joint(rlio.InputReader):
        def _next(self) -> Any:
            return joint

    policies: dict[str, Any] = {"a": Chooses(0.7), "b": Chooses(0.2)}
    for policy in policies.values():
        policy.bind(Discrete(3), Discrete(2), seed=0)
    with worker_of(Joint(), policies, evaluation="wis") as worker:
        worker.sample()
        found = summary_of(worker)
        assert (found["a"]["wis"]["episodes"], found["b"]["wis"]["episodes"]) == (50, 20)
        expected = evaluate_offline(
            joint, policies["b"], gamma=CHAIN.gamma, policy_id="b", estimators=["wis"]
        )
        assert found["b"]["wis"]["v_target"] == expected["wis"].v_target.value
        # Another policy of the same name is judged as itself.
        worker.remove_policy("b")
        worker.add_policy("b", policies["a"])
        worker.sample()
        same = {"gamma": CHAIN.gamma, "policy_id": "b", "estimators": ["wis"]}
        expected = evaluate_offline(joint, policies["a"], **same)
        assert summary_of(worker)["b"]["wis"]["v_target"] == expected["wis"].v_target.value


def test_a_worker_that_goes_on_in_the_middle_of_an_episode_judges_the_whole_ones(tmp_path: Path) -> None:
    root = root_of(tmp_path)
    options = {"batch_size": 45}
    with worker_of(root, evaluation="is", input_options=options) as worker:
        worker.sample()
        state = worker.state_dict()
    with worker_of(root, evaluation="is", input_options=options) as worker:
        worker.load_state_dict(state)
        for _ in range(40):  # More than two epochs: the cut episode comes again in other cuts.
            worker.sample()
        assert summary_of(worker)["is"]["episodes"] > 400


def test_episodes_of_weight_zero_are_no_error_in_the_metrics(tmp_path: Path) -> None:
    impossible = Chooses(0.5)
    impossible.compute_log_likelihoods = lambda actions, obs, **_: np.full(len(actions), -np.inf)  # type: ignore[method-assign] # for the test
    with worker_of(root_of(tmp_path), impossible, input_options={"epochs": 1}) as worker:
        worker.sample()
        found = summary_of(worker)
    assert list(found) == ["is", "pdis"]
    assert found["is"]["v_target"] == 0.0


def test_what_cannot_be_judged_is_refused_with_the_reason(tmp_path: Path) -> None:
    root = root_of(tmp_path / "chain")
    config = rlio.RolloutConfig
    for options, message in (
        ({"input_evaluation": "magic"}, "one or several of simulation, is"),
        ({"input_evaluation": ["is", "dm"]}, "one or several of simulation, is"),
        ({"input_evaluation": []}, "one or several"),
        ({"input_evaluation": "is"}, "a discount from 0 to 1"),
        ({"input_evaluation": "is", "input_evaluation_gamma": 1.5}, "a discount from 0 to 1"),
        ({"input_evaluation": "simulation", "input_evaluation_gamma": 0.9}, "with nothing else"),
        ({"input_evaluation_gamma": 0.9}, "with nothing else"),
    ):
        with pytest.raises(OptionError, match=message):
            config(**options)
    with pytest.raises(OptionError, match="rows come shuffled"):
        worker_of(root, input_options={"shuffle": True, "seed": 0})
    with pytest.raises(OptionError, match="shared out among 2 workers"):
        worker_of(root, worker_index=1, num_workers=2)
    rollout = config(input_evaluation="is", input_evaluation_gamma=1.0)
    with pytest.raises(OptionError, match="the sampler alone"):
        rlio.RolloutWorker("CartPole-v1", rlio.RandomPolicy(), rollout=rollout)
    with rlio.ParquetWriter(tmp_path / "bare") as writer:
        writer.write(rlio.SampleBatch(obs=[0, 1], actions=[0, 1], rewards=[1.0, 2.0]))
    with worker_of(tmp_path / "bare") as worker, pytest.raises(MissingColumn, match="how likely"):
        worker.sample()


def test_clipped_actions_do_not_have_the_density_that_was_recorded(tmp_path: Path) -> None:
    rows = rlio.SampleBatch(
        obs=np.zeros((4, 1), np.float32),
        actions=np.full((4, 1), 1.5, np.float32),
        rewards=np.ones(4),
        action_logp=np.zeros(4),
        eps_id=np.arange(4),
        t=np.zeros(4, np.int64),
        terminateds=np.ones(4, bool),
    )
    with rlio.ParquetWriter(tmp_path) as writer:
        writer.write(rows)
    policy = rlio.RandomPolicy()
    policy.bind(Box(-1.0, 1.0, (1,)), Box(-1.0, 1.0, (1,)), seed=0)
    for rollout in ({"clip_actions": True}, {"normalize_actions": True}):
        with (
            worker_of(tmp_path, policy, evaluation="is", rollout=rollout) as worker,
            pytest.raises(OptionError, match="clipped or scaled"),
        ):
            worker.sample()
