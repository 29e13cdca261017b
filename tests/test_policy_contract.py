"""What every policy can be asked for: single actions, hooks, versions of weights, parts of a checkpoint."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Text, Tuple
from hypothesis import given
from hypothesis import strategies as st

from rlio.batch import SampleBatch
from rlio.errors import CorruptData, DataNotFound, OptionError, StateError
from rlio.policies.checkpoint import save_state
from rlio.policies.dqn import DQN
from rlio.policies.networks import gru
from rlio.policies.policy import Policy
from rlio.policies.postprocessing import GAE
from rlio.policies.random_policy import RandomPolicy
from rlio.policies.torch_policy import TorchPolicy
from rlio.policies.weights import GlobalVars, accepts_weights, update_weights
from rlio.worker import RolloutWorker

OBS = Box(-1.0, 1.0, (3,), np.float32)


class Plain(Policy):
    """Acts by the sign of the last number."""

    def compute_actions(
        self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
    ) -> Any:
        return (obs[:, 2] > 0).astype(np.int64), state, {"twice": obs * 2}


def bound(policy: Any, observations: Any = OBS, actions: Any = None) -> Any:
    policy.bind(observations, Discrete(2) if actions is None else actions, 0)
    return policy


# ---- one action at a time ----


def test_a_single_action_is_a_row_of_many() -> None:
    """Row "compute_actions / compute_single_action", as in test_policy_map of 6.2."""
    policy = bound(Plain())
    obs = np.array([0.5, 1.0, -1.0], np.float32)
    action, state, extras = policy.compute_single_action(obs)
    assert (action, state) == (0, ())
    assert np.array_equal(extras["twice"], obs * 2)
    torch_policy = bound(TorchPolicy())
    many = torch_policy.compute_actions(obs[None], explore=False)
    one = torch_policy.compute_single_action(obs, explore=False)
    assert one[0] == many[0][0]
    assert np.array_equal(one[2]["action_dist_inputs"], many[2]["action_dist_inputs"][0])
    with pytest.raises(OptionError, match="no spaces yet"):
        TorchPolicy().compute_single_action(obs)


def test_a_single_action_of_nested_spaces_and_of_objects() -> None:
    space = Dict(a=OBS, b=Tuple([Discrete(3), Box(0, 255, (2, 2), np.uint8)]))
    actions = Dict(x=Discrete(2), y=Box(-1.0, 1.0, (2,), np.float32))
    action, _, extras = bound(TorchPolicy(), space, actions).compute_single_action(space.sample())
    assert action["x"].shape == ()
    assert action["y"].shape == (2,)
    assert extras["action_logp"].shape == ()

    class Reader(Plain):
        def compute_actions(self, obs: Any, state: Any = (), **more: Any) -> Any:
            return np.array([len(text) for text in obs]), state, {}

    assert bound(Reader(), Text(10)).compute_single_action("four")[0] == 4


def test_the_state_of_a_recurrent_policy_goes_from_action_to_action() -> None:
    policy = bound(TorchPolicy(gru))
    assert policy.is_recurrent
    assert not bound(TorchPolicy()).is_recurrent
    obs = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    many: Any = policy.initial_state(1)
    one: Any = ()
    for row in obs:
        _, many, extras = policy.compute_actions(row[None], many, explore=False)
        _, one, same = policy.compute_single_action(row, one, explore=False)
        assert one[0].shape == (64,)
        assert np.allclose(one[0], many[0][0])
        assert np.allclose(same["action_dist_inputs"], extras["action_dist_inputs"][0])
    fresh = policy.compute_single_action(obs[-1], explore=False)[2]
    assert not np.allclose(fresh["action_dist_inputs"], same["action_dist_inputs"]), "it does remember"


# ---- what runners tell it ----


def test_an_override_gets_the_batches_of_other_agents_and_the_episode() -> None:
    """Row "postprocess_episode" (2.3)."""

    class Below(Plain):
        def postprocess_trajectory(self, batch: SampleBatch, others: Any = None, episode: Any = None) -> Any:
            batch = super().postprocess_trajectory(batch)
            batch["others"] = np.full(len(batch), -1 if others is None else len(others))
            return batch

    class Plenty(Plain):
        def postprocess_trajectory(self, *args: Any) -> SampleBatch:
            args[0]["args"] = np.full(len(args[0]), len(args))
            return args[0]  # type: ignore[no-any-return]

    others = {"agent": ("policy", SampleBatch(obs=[1]))}
    made = Below().postprocess_trajectory(SampleBatch(obs=[1]), others, None)
    assert made["others"].tolist() == [1]
    assert Below().postprocess_trajectory(SampleBatch(obs=[1]))["others"].tolist() == [-1]
    assert Plenty().postprocess_trajectory(SampleBatch(obs=[1]), others, None)["args"].tolist() == [3]
    assert Below().postprocesses
    assert not Plain().postprocesses


def test_a_batch_of_trajectories_is_postprocessed_one_by_one_where_the_policy_knows_no_better() -> None:
    class Counts(Plain):
        def postprocess_trajectory(self, batch: SampleBatch, *_: Any) -> SampleBatch:
            batch = batch.copy(shallow=True)
            batch["length"] = np.full(len(batch), len(batch))
            return batch

    batch = SampleBatch(obs=np.zeros(5), eps_id=[1, 1, 2, 2, 2])
    assert Counts().postprocess_batch(batch)["length"].tolist() == [2, 2, 3, 3, 3]
    assert Plain().postprocess_batch(batch) is batch
    assert len(Counts().postprocess_batch(batch[:0])) == 0


def test_exploration_that_lasts_an_episode_is_told_of_its_start_and_end() -> None:
    """Row "exploration hooks" (2.3): on_episode_start and on_episode_end; nobody is told who does not ask."""

    class Noisy(Plain):
        heard: list[Any]

        def on_episode_start(self, env_ids: Any) -> None:
            self.heard = [*getattr(self, "heard", []), ("start", env_ids.tolist())]

        def on_episode_end(self, env_ids: Any) -> None:
            self.heard.append(("end", env_ids.tolist()))

    policy = Noisy()
    assert policy.has_episode_hooks
    assert not Plain().has_episode_hooks
    policy.on_episode_start(np.array([0, 2]))
    policy.on_episode_end(np.array([2]))
    assert policy.heard == [("start", [0, 2]), ("end", [2])]
    Plain().on_episode_start(np.array([0]))
    Plain().on_episode_end(np.array([0]))


def test_schedules_follow_what_all_workers_sampled() -> None:
    """Row "get/set_global_vars" (2.2): timestep, updates of each policy, on_global_var_update."""
    policy = bound(DQN(initial_epsilon=1.0, final_epsilon=0.0, epsilon_timesteps=100))
    obs = np.zeros((400, 3), np.float32)
    greedy = policy.compute_actions(obs, explore=False)[0][0]
    assert (policy.compute_actions(obs)[0] != greedy).any()
    policy.on_global_var_update(GlobalVars(100, {"default_policy": 3}))
    assert (policy.compute_actions(obs, timestep=5)[0] == greedy).all()
    other = bound(DQN(epsilon_timesteps=100))
    other.set_state(policy.get_state())
    assert other.global_vars == GlobalVars(100, {"default_policy": 3})
    old = policy.get_state()
    del old["global_vars"]
    other.set_state(old)
    for wrong in ({}, {"timestep": "x", "num_grad_updates_per_policy": {}}):
        with pytest.raises(StateError, match="global vars"):
            GlobalVars.from_json(wrong)


# ---- versions of weights ----


@given(st.integers(0, 20), st.one_of(st.none(), st.integers(0, 20)))
def test_weights_are_taken_over_if_they_are_newer_or_have_no_version(current: int, given_no: Any) -> None:
    """Row "weights_seq_no" (2.6), of the new stack: apply only if newer, 0 forces."""
    expected = given_no is None or given_no == 0 or given_no > current
    assert accepts_weights(current, given_no) is expected
    policy = bound(TorchPolicy(torch.nn.Linear(3, 2)))
    policy.weights_seq_no = current
    zeros = {name: np.zeros_like(value) for name, value in policy.get_weights().items()}
    assert update_weights(policy, zeros, given_no) is expected
    assert any(value.any() for value in policy.get_weights().values()) is not expected
    assert policy.weights_seq_no == (given_no if expected and given_no else current)


def test_versions_that_arrive_out_of_order_end_with_the_newest() -> None:
    policy = bound(TorchPolicy(torch.nn.Linear(3, 2)))
    for version in (3, 1, 5, 4, 5):
        update_weights(policy, {"weight": np.full((2, 3), version), "bias": np.zeros(2)}, version)
    assert policy.get_weights()["weight"][0, 0] == policy.weights_seq_no == 5
    with pytest.raises(OptionError, match="weights_seq_no=-1"):
        update_weights(policy, {}, -1)
    with pytest.raises(StateError):
        update_weights(policy, {}, 9)
    assert policy.weights_seq_no == 5


def test_weights_for_acting_alone_leave_the_critic_out_and_are_taken_over_as_they_are() -> None:
    """Row "get_weights(policies, inference_only)" (2.2)."""
    policy = bound(TorchPolicy(postprocessing=GAE(), hidden=(4,)))
    every, fewer = policy.get_weights(), policy.get_weights(inference_only=True)
    assert fewer.keys() < every.keys()
    assert {name.split(".")[0] for name in every} == {"actor", "critic"}
    assert {name.split(".")[0] for name in fewer} == {"actor"}
    other = TorchPolicy(postprocessing=GAE(), hidden=(4,))
    other.bind(OBS, Discrete(2), 1)
    other.set_weights(fewer)
    obs = np.zeros((2, 3), np.float32) + 0.3
    same, different = (each.compute_actions(obs, explore=False)[2] for each in (policy, other))
    assert np.array_equal(same["action_dist_inputs"], different["action_dist_inputs"])
    assert not np.array_equal(same["vf_preds"], different["vf_preds"])
    with pytest.raises(StateError, match="another module"):
        other.set_weights({name: value for name, value in every.items() if "critic" in name})
    plain = bound(TorchPolicy())
    assert plain.get_weights(inference_only=True).keys() == plain.get_weights().keys()


# ---- checkpoints ----


def test_checkpoints_are_stored_and_loaded_by_components(tmp_path: Path) -> None:
    """Rows "save / restore" (2.2) and "state" by components (2.5): JSON and .npz, no pickle."""
    policy, other = bound(DQN()), bound(DQN())
    policy.updates, policy.weights_seq_no = 7, 9
    other.compute_actions(np.zeros((5, 3), np.float32))
    policy.save(tmp_path / "weights", components=["weights", "weights_seq_no"])
    zeros = {name: np.zeros_like(value) for name, value in policy.get_weights().items()}
    other.set_weights(zeros)
    other.load(tmp_path / "weights")
    assert (other.weights_seq_no, other.updates) == (9, 0)
    assert all(np.array_equal(value, policy.get_weights()[n]) for n, value in other.get_weights().items())
    policy.save(tmp_path / "rest", not_components=["weights", "optimizer"])
    other.load(tmp_path / "rest", components=["updates"])
    assert other.updates == 7
    files = {file.name for file in (tmp_path / "rest").rglob("*") if file.is_file()}
    assert files == {"state.json", "arrays.npz"}
    for options, message in (
        ({"components": ["nothing"]}, "has no components"),
        ({"components": "weight"}, "has no components"),
        ({"components": ["weights"], "not_components": ["weights"]}, "both requested and excluded"),
    ):
        with pytest.raises(OptionError, match=message):
            policy.save(tmp_path / "x", **options)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="has no components"):
        other.load(tmp_path / "rest", components=["weights"])
    random_policy = bound(RandomPolicy())
    random_policy.save(tmp_path / "random")
    bound(RandomPolicy()).load(tmp_path / "random")


def test_a_checkpoint_of_something_else_does_not_load_as_one_without_any_part(tmp_path: Path) -> None:
    policy = bound(DQN())
    save_state(tmp_path / "learner", {"policy": policy.get_state(), "reader": {"position": 3}})
    with RolloutWorker("CartPole-v1", DQN(), seed=0) as worker:
        worker.save(tmp_path / "worker")
    for name, parts in (("learner", "'policy', 'reader'"), ("worker", "'components', 'version'")):
        with pytest.raises(StateError, match=f"not a state of a DQN: it has .{parts}.*worker.*{name}"):
            policy.load(tmp_path / name)
    policy.save(tmp_path / "dqn")
    other = bound(TorchPolicy(hidden=(64, 64)))
    with pytest.raises(StateError, match=r"not a state of a TorchPolicy: it has .'target'"):
        other.load(tmp_path / "dqn")
    policy.load(tmp_path / "dqn", not_components=["optimizer"])


def test_weights_are_exported_and_imported_as_arrays(tmp_path: Path) -> None:
    """Rows "export_policy_model, import_policy_model_from_h5" (2.2): .npz in place of HDF5."""
    policy, other = bound(TorchPolicy()), bound(TorchPolicy())
    other.set_weights({name: np.zeros_like(value) for name, value in other.get_weights().items()})
    policy.export_model(tmp_path / "m.npz")
    other.import_model(tmp_path / "m.npz")
    assert all(np.array_equal(value, policy.get_weights()[n]) for n, value in other.get_weights().items())
    assert [file.name for file in tmp_path.iterdir()] == ["m.npz"]
    with pytest.raises(DataNotFound):
        other.import_model(tmp_path / "nowhere.npz")
    (tmp_path / "torn.npz").write_bytes((tmp_path / "m.npz").read_bytes()[:200])
    (tmp_path / "pickle.npz").write_bytes(pickle.dumps({"w": 1}))
    np.save(tmp_path / "one.npy", np.zeros(3))
    for name in ("torn.npz", "pickle.npz", "one.npy"):
        with pytest.raises(CorruptData):
            other.import_model(tmp_path / name)
    with pytest.raises(OptionError, match="no weights"):
        bound(RandomPolicy()).export_model(tmp_path / "r.npz")
    with pytest.raises(OptionError, match="exported as 'npz'"):
        bound(RandomPolicy()).export_model(tmp_path / "r.pt", format="torchscript")


@pytest.mark.few(1)
@pytest.mark.parametrize("space", [OBS, Dict(a=OBS, b=Discrete(3))], ids=str)
def test_a_module_is_exported_for_where_there_is_no_rlio(space: Any, tmp_path: Path) -> None:
    policy = bound(TorchPolicy(), space)
    policy.export_model(tmp_path / "m.pt", format="torchscript")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        loaded = torch.jit.load(tmp_path / "m.pt")
    rows = [space.sample() for _ in range(5)]
    obs = (
        {key: torch.as_tensor(np.stack([row[key] for row in rows])) for key in rows[0]}
        if isinstance(space, Dict)
        else torch.as_tensor(np.stack(rows))
    )
    assert torch.allclose(loaded(obs), policy.forward(obs))
    with pytest.raises(OptionError, match="recurrent"):
        bound(TorchPolicy(gru)).export_model(tmp_path / "g.pt", format="torchscript")


def test_the_modules_device_is_known() -> None:
    """Row "module device" of the issue."""
    assert TorchPolicy().device == torch.device("cpu")
    policy = bound(TorchPolicy(device="cpu"))
    assert all(parameter.device == policy.device for parameter in policy.module.parameters())


def test_a_policy_without_gradients_says_so() -> None:
    with pytest.raises(OptionError, match="has no gradients"):
        Plain().compute_gradients(SampleBatch(obs=[1]))
    with pytest.raises(OptionError, match="has no gradients"):
        Plain().apply_gradients({})
