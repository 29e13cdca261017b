"""Learning of torch policies: gradients as arrays, values and advantages, n-step, recurrent modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from rlio.batch import SampleBatch, concat_samples
from rlio.errors import MissingColumn, OptionError, SchemaError, StateError
from rlio.policies.actor_critic import ActorCritic
from rlio.policies.behaviour_cloning import BehaviourCloning
from rlio.policies.dqn import DQN
from rlio.policies.networks import GRUNetwork, gru
from rlio.policies.postprocessing import GAE, NStep, adjust_nstep, compute_gae
from rlio.policies.sgd import do_minibatch_sgd
from rlio.policies.torch_policy import TorchPolicy
from rlio.sampling.config import RolloutConfig
from rlio.sampling.env_runner import EnvRunner
from rlio.sampling.evaluate import evaluate

OBS = Box(-1.0, 1.0, (3,), np.float32)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Networks this small only wait for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def bound(policy: Any, seed: int = 0, actions: Any = None) -> Any:
    policy.bind(OBS, Discrete(2) if actions is None else actions, seed)
    return policy


def observations(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (n, 3)).astype(np.float32)


def rows(n: int = 16, seed: int = 0) -> SampleBatch:
    return SampleBatch(obs=observations(n, seed), actions=np.arange(n) % 2)


def equal(one: Any, other: Any) -> bool:
    return all(np.allclose(value, other[name], atol=1e-6) for name, value in one.items())


# ---- gradients ----


def test_gradients_travel_as_arrays_and_do_what_learning_does() -> None:
    """Rows "compute_gradients / apply_gradients" (2.2): computed in one place, applied in another."""
    here, there, alone = (bound(BehaviourCloning(max_grad_norm=0.1)) for _ in range(3))
    for i in range(5):
        before = here.get_weights()
        gradients, stats = here.compute_gradients(rows(seed=i))
        assert stats["batch_count"] == 16
        assert equal(before, here.get_weights()), "computing them changes nothing"
        assert gradients.keys() == before.keys()
        assert all(value.dtype == np.float32 for value in gradients.values())
        learned = alone.learn_on_batch(rows(seed=i))
        assert stats["loss"] == learned["loss"]
        here.apply_gradients(gradients)
        there.apply_gradients(gradients)
    assert equal(here.get_weights(), alone.get_weights())
    assert equal(there.get_weights(), alone.get_weights())
    assert there.updates == there.weights_seq_no == 5
    assert here.updates == 5


def test_gradients_of_another_module_are_refused_and_nothing_is_changed() -> None:
    policy = bound(BehaviourCloning())
    before = policy.get_weights()
    gradients, _ = policy.compute_gradients(rows())
    with pytest.raises(StateError, match="another module"):
        policy.apply_gradients({"w": np.zeros(3)})
    with pytest.raises(StateError, match="shape"):
        policy.apply_gradients({name: np.zeros(7) for name in gradients})
    assert equal(before, policy.get_weights())
    assert policy.updates == 0
    with pytest.raises(OptionError, match="no parameters"):
        bound(BehaviourCloning(torch.nn.Flatten())).apply_gradients({})


def test_a_frozen_part_has_no_gradient_and_stays() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    module[0].requires_grad_(False)
    policy = bound(BehaviourCloning(module))
    gradients, _ = policy.compute_gradients(rows())
    assert set(gradients) == {"1.weight", "1.bias"}


# ---- values and advantages ----


def test_values_are_recorded_and_advantages_follow_from_them() -> None:
    """Rows "postprocessing" (2.3) and "extra outputs" (2.5): vf_preds, values_bootstrapped, advantages,
    value_targets of every row, in both batch modes; each episode by itself gives the same.
    """
    for batch_mode in ("truncate_episodes", "complete_episodes"):
        policy = ActorCritic(gae=GAE(gamma=0.9, lambda_=0.8))
        config = RolloutConfig(num_envs=3, rollout_fragment_length=60, batch_mode=batch_mode)  # type: ignore[arg-type]
        runner = EnvRunner("CartPole-v1", policy, config=config, seed=0)
        batch = runner.run()
        outputs = policy.forward(batch["obs"]).detach().numpy()
        assert np.allclose(batch["vf_preds"], outputs[:, -1], atol=1e-5)
        assert np.allclose(batch["action_dist_inputs"], outputs[:, :-1], atol=1e-5)
        after = policy.forward(batch["new_obs"]).detach().numpy()[:, -1]
        expected = np.where(batch["terminateds"], 0.0, after)
        assert np.allclose(batch["values_bootstrapped"], expected, atol=1e-4)
        one_by_one = concat_samples([policy.postprocess_trajectory(p) for p in batch.split_by_episode()])
        for name in ("values_bootstrapped", "advantages", "value_targets"):
            assert np.allclose(one_by_one[name], batch[name], atol=1e-5)
        assert np.allclose(batch["value_targets"], batch["advantages"] + batch["vf_preds"], atol=1e-5)
        assert batch["terminateds"].any()


def test_rows_of_somebody_else_are_judged_by_the_values_known_here() -> None:
    """test_io of 6.2: postprocessing recomputes advantages."""
    policy = ActorCritic()
    batch = EnvRunner("CartPole-v1", policy, config=RolloutConfig(num_envs=2), seed=0).run()
    names = ("vf_preds", "values_bootstrapped", "advantages", "value_targets")
    before = {name: batch[name] for name in names}
    for name in names:
        del batch[name]
    made = policy.postprocess_batch(batch)
    assert all(np.allclose(made[name], before[name], atol=1e-5) for name in names)
    assert "vf_preds" not in batch


def test_a_policy_that_overrides_its_postprocessing_gets_each_trajectory() -> None:
    class Mine(ActorCritic):
        def postprocess_trajectory(self, batch: SampleBatch, *_: Any) -> SampleBatch:
            assert batch.is_single_trajectory()
            batch = super().postprocess_trajectory(batch)
            batch["mine"] = np.full(len(batch), len(batch))
            return batch

    runner = EnvRunner("CartPole-v1", Mine(), config=RolloutConfig(num_envs=2), seed=0)
    batch = runner.run()
    assert "advantages" in batch
    assert len(set(batch["mine"])) > 1
    assert Mine().postprocesses
    assert not TorchPolicy().postprocesses
    assert not DQN().postprocesses


def test_the_loss_of_an_actor_critic_is_that_of_ppo_and_of_a2c() -> None:
    batch = rows()
    n = len(batch)
    rng = np.random.default_rng(0)
    batch["action_logp"] = np.log(rng.uniform(0.3, 0.7, n)).astype(np.float32)
    batch["advantages"] = rng.normal(size=n).astype(np.float32)
    batch["value_targets"] = rng.normal(size=n).astype(np.float32)
    for clip in (0.1, None):
        policy = bound(ActorCritic(clip_param=clip, vf_loss_coeff=0.7, entropy_coeff=0.01))
        outputs = policy.forward(batch["obs"]).detach().numpy().astype(float)
        logs = outputs[:, :2] - np.log(np.exp(outputs[:, :2]).sum(1, keepdims=True))
        logp = logs[np.arange(n), batch["actions"]]
        ratio = np.exp(logp - batch["action_logp"])
        if clip is None:
            policy_loss = -(logp * batch["advantages"]).mean()
        else:
            both = ratio * batch["advantages"], np.clip(ratio, 1 - clip, 1 + clip) * batch["advantages"]
            policy_loss = -np.minimum(*both).mean()
        vf_loss = 0.5 * ((outputs[:, 2] - batch["value_targets"]) ** 2).mean()
        entropy = -(np.exp(logs) * logs).sum(1).mean()
        stats = policy.learn_on_batch(batch)
        for name, value in {
            "policy_loss": policy_loss,
            "vf_loss": vf_loss,
            "entropy": entropy,
            "loss": policy_loss + 0.7 * vf_loss - 0.01 * entropy,
            "kl": (ratio - 1 - np.log(ratio)).mean(),
        }.items():
            assert np.isclose(stats[name], value, atol=1e-5), name


@pytest.mark.parametrize("unknown", [np.nan, -np.inf, np.inf])
def test_ppo_refuses_a_row_whose_logp_is_unknown_and_keeps_its_weights(unknown: float) -> None:
    """NaN is what an `ExternalRunner` records for actions that the loop chose; all weights became NaN."""
    rng, logp = np.random.default_rng(0), np.log(np.full(6, 0.5, np.float32))
    rows = {
        "obs": rng.normal(size=(6, 3)).astype(np.float32),
        "actions": rng.integers(0, 2, 6),
        "action_logp": np.where(np.arange(6) == 4, np.float32(unknown), logp),
        "advantages": rng.normal(size=6).astype(np.float32),
        "value_targets": np.zeros(6, np.float32),
    }
    policy = bound(ActorCritic(hidden=(4,)))
    before = policy.get_weights()
    with pytest.raises(SchemaError, match=r"row 4 of 6.*action_logp"):
        policy.learn_on_batch(SampleBatch(rows))
    for name, array in policy.get_weights().items():
        np.testing.assert_array_equal(array, before[name])
    bound(ActorCritic(hidden=(4,), clip_param=None)).learn_on_batch(SampleBatch(rows))  # A2C has no ratio.


def test_rows_of_an_actor_critic_count_by_their_weights() -> None:
    batch = rows(4)
    for name in ("action_logp", "advantages", "value_targets"):
        batch[name] = np.array([-0.5, -0.7, -0.9, -0.2], np.float32)
    weighted = batch.copy()
    weighted["weights"] = np.array([0.0, 2.0, 1.0, 0.0])
    one = bound(ActorCritic()).learn_on_batch(weighted)
    other = bound(ActorCritic()).learn_on_batch(batch[np.array([1, 1, 2])])
    assert all(np.isclose(one[name], other[name], atol=1e-5) for name in one)


def train(policy: ActorCritic, iterations: int, **options: Any) -> float:
    config = RolloutConfig(num_envs=8, rollout_fragment_length=64)
    runner = EnvRunner("CartPole-v1", policy, config=config, seed=1)
    for i in range(iterations):
        do_minibatch_sgd(
            policy.learn_on_batch, runner.run(), standardize_fields=["advantages"], seed=i, **options
        )
    return evaluate(policy, "CartPole-v1", episodes=5, seed=9).mean


@pytest.mark.further
def test_an_actor_critic_learns_cartpole_by_minibatches() -> None:
    policy = ActorCritic(learning_rate=3e-3, entropy_coeff=0.01)
    # A random policy earns 20; this one 400 and more.
    assert train(policy, 10, num_sgd_iter=6, sgd_minibatch_size=128) > 150
    assert policy.updates == 10 * 6 * 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ActorCritic(gae=GAE(use_critic=False)), "has a critic"),
        (lambda: ActorCritic(clip_param=0.0), "clip_param"),
        (lambda: ActorCritic(vf_loss_coeff=-1), "vf_loss_coeff"),
        (lambda: TorchPolicy(postprocessing="gae"), "postprocessing"),  # type: ignore[arg-type]
        (lambda: TorchPolicy(max_seq_len=0), "max_seq_len"),
        (
            lambda: bound(ActorCritic(torch.nn.Linear(3, 2))).forward(observations(2)),
            r"expected \(N, 3\).*with a value",
        ),
    ],
)
def test_misuse_is_answered_with_what_to_do(make: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


def test_without_advantages_there_is_nothing_to_learn_from() -> None:
    batch = rows()
    batch["action_logp"] = np.zeros(16, np.float32)
    with pytest.raises(MissingColumn, match="advantages"):
        bound(ActorCritic()).learn_on_batch(batch)


# ---- n-step ----


def test_sampled_transitions_look_n_steps_ahead_and_dqn_discounts_them_so() -> None:
    """Row "postprocessing" (2.3): adjust_nstep, as an option of DQN."""
    one, three = DQN(gamma=0.9), DQN(gamma=0.9, n_step=3)
    config = RolloutConfig(num_envs=2, rollout_fragment_length=40)
    plain, ahead = (EnvRunner("CartPole-v1", p, config=config, seed=0).run() for p in (one, three))
    expected = adjust_nstep(plain, NStep(3, 0.9))
    for name in ("obs", "new_obs", "rewards", "terminateds", "n_step_discount", "bootstrap_mask"):
        assert np.array_equal(ahead[name], expected[name])
    batch = ahead[np.flatnonzero(ahead["n_step_discount"] < 0.8)]
    values = three.forward(batch["obs"]).detach().numpy()
    after = three.forward(batch["new_obs"]).detach().numpy().max(1)
    target = batch["rewards"] + batch["n_step_discount"] * np.where(batch["terminateds"], 0, after)
    error = np.abs(values[np.arange(len(batch)), batch["actions"]] - target)
    huber = np.where(error < 1, 0.5 * error**2, error - 0.5)
    assert np.isclose(three.learn_on_batch(batch)["loss"], huber.mean(), atol=1e-5)
    with pytest.raises(OptionError, match="n_step=0"):
        DQN(n_step=0)


# ---- recurrent ----


def sequences(policy: Any, episodes: int, steps: int) -> SampleBatch:
    """Episodes acted out by ``policy``, cut into sequences by hand."""
    size = policy.max_seq_len
    parts = []
    for i in range(episodes):
        state, states, found = policy.initial_state(1), [], []
        for t, obs in enumerate(observations(steps, seed=i)):
            states.append(state[0][0])
            actions, state, extras = policy.compute_actions(obs[None], state)
            found.append({"obs": obs, "actions": actions[0], "state_out_0": state[0][0], "t": t})
            found[-1] |= {name: value[0] for name, value in extras.items()}
        columns = {name: np.stack([np.asarray(row[name]) for row in found]) for name in found[0]}
        columns |= {"state_in_0": np.stack(states[::size]), "eps_id": np.full(steps, i)}
        lens = [min(size, steps - start) for start in range(0, steps, size)]
        parts.append(SampleBatch(columns, seq_lens=np.array(lens, np.int32)))
    return concat_samples(parts)


def test_a_recurrent_module_learns_from_what_it_did_when_it_acted() -> None:
    """Row "AgentCollector" (2.3): state_in, seq_lens; sequences of unlike lengths give each row's outputs."""
    policy = bound(BehaviourCloning(gru, max_seq_len=4))
    batch = sequences(policy, episodes=3, steps=10)
    assert batch["seq_lens"].tolist() == [4, 4, 2] * 3
    tensors = policy._columns_as_tensors(batch)
    outputs = policy._outputs_for(policy.module, tensors).detach().numpy()
    assert np.allclose(outputs, batch["action_dist_inputs"], atol=1e-5)
    padded = policy._columns_as_tensors(batch.right_zero_pad(5))
    assert np.allclose(policy._outputs_for(policy.module, padded).detach().numpy(), outputs, atol=1e-6)
    losses = [policy.learn_on_batch(batch)["loss"] for _ in range(10)]
    assert losses[-1] < losses[0]
    del batch["state_in_0"], batch["seq_lens"]
    with pytest.raises(MissingColumn, match="learns from sequences"):
        policy.learn_on_batch(batch)


def test_the_last_value_of_a_recurrent_policy_depends_on_what_it_remembers() -> None:
    """Row "postprocessing" (2.3): compute_bootstrap_value with recurrent policies."""
    policy = bound(ActorCritic(gru, max_seq_len=100, gae=GAE(gamma=0.9, lambda_=0.9)))
    batch = sequences(policy, episodes=2, steps=8)
    # The first 5 steps of each: what follows is known.
    first = concat_samples([part.slice(0, 5) for part in batch.split_by_episode()])
    first["rewards"] = np.ones(10, np.float32)
    first["terminateds"] = np.zeros(10, bool)
    first["new_obs"] = batch["obs"][np.array([1, 2, 3, 4, 5, 9, 10, 11, 12, 13])]
    made = policy.postprocess_batch(first)
    assert np.allclose(made["values_bootstrapped"][[4, 9]], batch["vf_preds"][[5, 13]], atol=1e-5)
    forgetful = first.copy()
    forgetful["state_out_0"] = np.zeros_like(first["state_out_0"])
    other = policy.postprocess_batch(forgetful)
    assert not np.allclose(other["values_bootstrapped"][[4, 9]], batch["vf_preds"][[5, 13]], atol=1e-5)
    del forgetful["state_out_0"]
    with pytest.raises(MissingColumn, match="state_out_0"):
        policy.postprocess_batch(forgetful)
    del first["vf_preds"]
    assert np.allclose(policy.postprocess_batch(first)["advantages"], made["advantages"], atol=1e-5)


def test_dqn_says_that_it_remembers_nothing() -> None:
    with pytest.raises(OptionError, match="not be recurrent"):
        bound(DQN(gru))


def test_a_recurrent_network_depends_on_its_generator_alone() -> None:
    before = torch.get_rng_state()
    one, two = (gru(OBS, 2, torch.Generator().manual_seed(seed)) for seed in (3, 3))
    assert isinstance(one, GRUNetwork)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_a_recurrent_actor_critic_learns_from_what_a_runner_samples() -> None:
    """Rows "AgentCollector" (2.3) and "extra outputs" (2.5): state in and out, seq_lens, max_seq_len."""
    policy = ActorCritic(gru, max_seq_len=7)
    config = RolloutConfig(num_envs=3, rollout_fragment_length=20)
    runner = EnvRunner("CartPole-v1", policy, config=config, seed=0)
    for _ in range(2):
        batch = runner.run()
        assert batch["seq_lens"].sum() == len(batch) == 60
        assert batch["seq_lens"].max() <= 7
        outputs = policy._outputs_for(policy.module, policy._columns_as_tensors(batch)).detach().numpy()
        assert np.allclose(outputs[:, -1], batch["vf_preds"], atol=1e-4)
        stats = do_minibatch_sgd(policy.learn_on_batch, batch, num_sgd_iter=2, sgd_minibatch_size=20, seed=0)
        assert np.isfinite(stats["loss"])


def test_gae_by_hand_is_the_policys() -> None:
    policy = ActorCritic(gae=GAE(gamma=0.8, lambda_=0.5))
    batch = EnvRunner("CartPole-v1", policy, config=RolloutConfig(num_envs=1), seed=0).run()
    values = policy.forward(batch["new_obs"]).detach().numpy()[:, -1]
    made = compute_gae(batch, GAE(gamma=0.8, lambda_=0.5), lambda at: values[at])
    assert np.allclose(made["advantages"], batch["advantages"], atol=1e-5)
