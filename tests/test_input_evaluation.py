"""RolloutConfig(input_evaluation=...): policies that learn from what is read are judged by it.

Row input_evaluation of 2.7: "is", "wis" and "simulation", one or several; per decision and by episode too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gymnasium.spaces import Box, Discrete
from tabular_problems import PROBLEMS

import rlio
from rlio.errors import MissingColumn, OptionError
from rlio.evaluation import Target, evaluate_offline
from rlio.policies.policy import Policy
from rlio.sampling.metrics import RolloutMetrics

#: Name here -> estimator of `rlio.evaluation`: RLlib's names mean RLlib's estimators.
MEANS = {
    "is": "pdis",
    "wis": "stepwise_wis",
    "pdis": "pdis",
    "wpdis": "wpdis",
    "trajectory_is": "is",
    "trajectory_wis": "wis",
}
ALL = list(MEANS)
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
        expected = evaluate_offline(
            root, worker.policy, gamma=CHAIN.gamma, estimators=list(set(MEANS.values()))
        )
    assert list(found) == ALL
    for name, meant in MEANS.items():
        estimate = expected[meant]
        assert found[name]["estimator"] == meant
        assert found[name]["v_target"] == estimate.v_target.value
        assert found[name]["v_delta"] == estimate.v_gain.value
        assert found[name]["v_gain"] == estimate.v_gain_ratio
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
            estimators = ["stepwise_wis"]
            expected = evaluate_offline(root, policy, gamma=CHAIN.gamma, estimators=estimators)
            assert found["v_delta"] == pytest.approx(expected["stepwise_wis"].v_gain.value, abs=0.05)


@pytest.mark.further
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
    assert summary["off_policy_estimator"]["wis"]["v_delta"] == pytest.approx(0.0, abs=1e-4)
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
    estimators = list(set(MEANS.values()))
    expected = evaluate_offline(batches, Target(mostly_second), gamma=CHAIN.gamma, estimators=estimators)
    for name in ALL:
        assert merged[name]["v_target"] == pytest.approx(expected[MEANS[name]].v_target.value)
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
    with worker_of(Joint(), policies, evaluation="trajectory_wis") as worker:
        worker.sample()
        found = summary_of(worker)
        episodes = [found[policy_id]["trajectory_wis"]["episodes"] for policy_id in ("a", "b")]
        assert episodes == [50, 20]
        expected = evaluate_offline(
            joint, policies["b"], gamma=CHAIN.gamma, policy_id="b", estimators=["wis"]
        )
        assert found["b"]["trajectory_wis"]["v_target"] == expected["wis"].v_target.value
        # Another policy of the same name is judged as itself.
        worker.remove_policy("b")
        worker.add_policy("b", policies["a"])
        worker.sample()
        same = {"gamma": CHAIN.gamma, "policy_id": "b", "estimators": ["wis"]}
        expected = evaluate_offline(joint, policies["a"], **same)
        assert summary_of(worker)["b"]["trajectory_wis"]["v_target"] == expected["wis"].v_target.value


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
    assert list(found) == ["is", "pdis", "trajectory_is"]
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
    with pytest.raises(OptionError, match="rows are shuffled"):
        worker_of(root, input_options={"shuffle": True, "seed": 0})
    with pytest.raises(OptionError, match="divided among 2 workers"):
        worker_of(root, place=rlio.sampling.WorkerPlace(1, 2))
    rows = CHAIN.simulate(30, seed=0)
    pq.write_table(pa.table(dict(rows)), tmp_path / "rows.parquet")
    foreign = rlio.ForeignParquetReader(tmp_path / "rows.parquet", shuffle=True, seed=0)
    with pytest.raises(OptionError, match="rows are shuffled"):
        worker_of(foreign)
    rollout = config(input_evaluation="is", input_evaluation_gamma=1.0)
    with pytest.raises(OptionError, match="only the sampler"):
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


# ---- RLlib's names ----


def leans(obs: Any, actions: Any) -> Any:
    return np.log(np.where(np.asarray(actions) == (np.asarray(obs)[:, 2] > 0), 0.6, 0.4))


class Leans(Policy):
    """Judged only."""

    def compute_actions(self, obs: Any, state: Any = (), **_: Any) -> Any:
        raise NotImplementedError

    def compute_log_likelihoods(self, actions: Any, obs: Any, **_: Any) -> Any:
        return leans(obs, actions)


GAMMA = 0.99
#: What RLlib 2.60 says of its cartpole/large.json with rewards + obs[:, 0]: by `ImportanceSampling` and
#: `WeightedImportanceSampling`, as the test below finds where RLlib can be imported.
RLLIB_SAYS = {"is": 12.011688820171008, "wis": 77.94853589184048, "v_behavior": 79.24770892180267}
RLLIB_SPREADS = {
    "is": {"v_behavior_std": 10.412271590435518, "v_target_std": 24.405372176436792},
    "wis": {"v_behavior_std": 10.412271590435518, "v_target_std": 90.68837066172179},
}


def cartpole(recordings: Path) -> rlio.SampleBatch:
    """RLlib's recording, which has no ``t``, with rewards that are not all 1."""
    reader = rlio.JsonReader(recordings / "cartpole" / "large.json", epochs=1)
    rows = rlio.concat_samples(list(reader))
    assert isinstance(rows, rlio.SampleBatch)
    rows["rewards"] = rows["rewards"] + rows["obs"][:, 0]
    del rows["action_logp"]  # RLlib goes by action_prob, which is rounded otherwise.
    return rows


def judged_by_a_worker(rows: rlio.SampleBatch, folder: Path) -> dict[str, Any]:
    with rlio.ParquetWriter(folder) as writer:
        writer.write(rows)
    return judged_input(folder)


def judged_input(source: Any) -> dict[str, Any]:
    policy = Leans()
    policy.bind(Box(-np.inf, np.inf, (4,), np.float64), Discrete(2))
    rollout = rlio.RolloutConfig(input_evaluation=ALL, input_evaluation_gamma=GAMMA)
    options = {} if isinstance(source, rlio.InputReader) else {"epochs": 1, "batch_size": 150}
    with rlio.RolloutWorker(None, policy, input=source, rollout=rollout, input_options=options) as worker:
        for _ in worker:
            pass
        return summary_of(worker)


def test_is_and_wis_are_step_wise_as_in_rllib(recordings: Path, tmp_path: Path) -> None:
    """``is`` weighed whole episodes: 1.8e-5 of 12.0 on RLlib's own recording."""
    found = judged_by_a_worker(cartpole(recordings), tmp_path)
    for name in ("is", "wis"):
        assert found[name]["episodes"] == 21
        assert found[name]["v_target"] == pytest.approx(RLLIB_SAYS[name])
        assert found[name]["v_behavior"] == pytest.approx(RLLIB_SAYS["v_behavior"])
        assert found[name]["v_gain"] == pytest.approx(RLLIB_SAYS[name] / RLLIB_SAYS["v_behavior"])
    assert found["trajectory_is"]["v_target"] == pytest.approx(1.7978738e-05, rel=1e-4)
    assert found["pdis"]["v_target"] == found["is"]["v_target"]
    assert found["wpdis"]["v_target"] != pytest.approx(found["wis"]["v_target"], rel=0.01)


def test_the_spread_over_episodes_has_rllibs_names(recordings: Path, tmp_path: Path) -> None:
    """``v_behavior_std`` and ``v_target_std`` of RLlib's estimators, as the test below finds them."""
    found = judged_by_a_worker(cartpole(recordings), tmp_path)
    for name in ("is", "wis"):
        said = {key: found[name][key] for key in ("v_behavior_std", "v_target_std")}
        assert said == pytest.approx(RLLIB_SPREADS[name], rel=1e-6)
    for name in ALL:
        assert found[name]["v_target_std"] > 0.0


def test_rllibs_own_files_are_judged_as_they_are(recordings: Path, tmp_path: Path) -> None:
    """They have no ``t``, and only data sets of rlio were judged without."""
    file = recordings / "cartpole" / "large.json"
    rows = rlio.concat_samples(list(rlio.JsonReader(file, epochs=1)))
    assert isinstance(rows, rlio.SampleBatch)
    found, expected = judged_input(file), judged_by_a_worker(rows, tmp_path)
    assert found["wis"]["episodes"] == 21
    assert {name: found[name]["v_target"] for name in ALL} == pytest.approx(
        {name: expected[name]["v_target"] for name in ALL}
    )
    # Records in another order, or not all of them: rows are numbered nowhere.
    for options in ({"shuffle": True, "seed": 0}, {"shard": (0, 2)}, {"on_error": "skip"}):
        with pytest.raises(MissingColumn, match="column t"):
            judged_input(rlio.JsonReader(file, epochs=1, **options))
    # With ``t``, whole episodes in records of any order are judged.
    rows["t"] = np.concatenate([np.arange(len(part)) for part in rows.split_by_episode()])
    columns = ("obs", "actions", "rewards", "terminateds", "eps_id", "t", "action_prob")
    with open(tmp_path / "with_t.json", "w", encoding="utf-8") as lines:
        for episode in rows.split_by_episode():
            record = {name: np.asarray(episode[name]).tolist() for name in columns if name in episode}
            lines.write(json.dumps({"type": "SampleBatch", **record}) + "\n")
    again = rlio.JsonReader(tmp_path / "with_t.json", epochs=1, shuffle=True, seed=0)
    assert judged_input(again)["wis"]["episodes"] == 21


def test_is_wis_and_gains_are_those_of_rllibs_classes(recordings: Path, tmp_path: Path) -> None:
    """`v_gain_mean` of RLlib is the ratio, and so is its `v_gain`; `v_delta` is the difference."""
    estimators = pytest.importorskip(
        "ray.rllib.offline.estimators", reason="RLlib is not installed: pip install 'ray[rllib]'"
    )
    from ray.rllib.policy.sample_batch import SampleBatch as RllibBatch

    class Judged:
        config: Any = {}  # noqa: RUF012 - read by RLlib

        def compute_log_likelihoods(self, actions: Any, obs_batch: Any, **_: Any) -> Any:
            return leans(obs_batch, actions)

    rows = cartpole(recordings)
    found = judged_by_a_worker(rows, tmp_path)
    theirs = RllibBatch({name: np.asarray(rows[name]) for name in rows})
    for name, kind in (("is", "ImportanceSampling"), ("wis", "WeightedImportanceSampling")):
        said = getattr(estimators, kind)(Judged(), gamma=GAMMA).estimate(theirs)
        for key in ("v_target", "v_target_std", "v_behavior", "v_behavior_std", "v_gain", "v_delta"):
            assert found[name][key] == pytest.approx(said[key]), (name, key)
        assert said["v_target"] == pytest.approx(RLLIB_SAYS[name])


def test_a_step_that_no_weighted_episode_reaches_counts_nothing() -> None:
    """RLlib divides 0 by 0 there."""
    batch = rlio.SampleBatch(
        obs=np.zeros(5),
        actions=np.zeros(5, np.int64),
        rewards=np.ones(5),
        action_prob=np.full(5, 0.5),
        eps_id=np.array([1, 1, 2, 2, 2]),
        t=np.array([0, 1, 0, 1, 2]),
        terminateds=np.array([False, True, False, False, True]),
    )

    def estimate(*probabilities: float) -> Any:
        with np.errstate(divide="ignore"):
            logs = np.log(probabilities)
        estimators = ["stepwise_wis"]
        return evaluate_offline(batch, lambda *_: logs, gamma=1.0, estimators=estimators)["stepwise_wis"]

    found = estimate(0.5, 0.5, 0.5, 0.5, 0.0)
    assert found.v_target.value == 2.0
    assert np.isfinite(found.v_target.interval).all()
    with pytest.raises(OptionError):
        estimate(0.5, 0.0, 0.5, 0.0, 0.0)
