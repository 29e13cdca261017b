"""TorchPolicy: any module, any action space, its own random numbers, weights and checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.envs.leaves import leaf_of, leaves_of
from rlio.errors import CorruptData, DataNotFound, MissingColumn, OptionError, SchemaError, StateError
from rlio.evaluation import evaluate_offline
from rlio.policies.actor_critic import ActorCritic
from rlio.policies.behaviour_cloning import BehaviourCloning
from rlio.policies.checkpoint import load_state, save_state
from rlio.policies.distributions import distribution_for
from rlio.policies.dqn import DQN
from rlio.policies.fitting import Fit
from rlio.policies.networks import mlp
from rlio.policies.torch_policy import TorchPolicy

OBS = Box(-1.0, 1.0, (3,), np.float32)
NESTED = Dict(
    here=Box(-1.0, 1.0, (2,), np.float64),
    there=Tuple([Discrete(4, start=1), MultiDiscrete([2, 3]), MultiBinary(2), Box(0, 255, (2, 2), np.uint8)]),
)
ACTIONS = [
    Discrete(5, start=-1),
    MultiDiscrete([2, 4]),
    MultiDiscrete(np.array([[3, 5], [2, 2]])),
    MultiBinary((2, 2)),
    Box(-1.0, 1.0, (2, 3), np.float32),
    Dict(a=Discrete(2), b=Tuple([Box(-1.0, 1.0, (), np.float32), Discrete(3)])),
]


def bound(action_space: Any, obs: Any = OBS, seed: int = 0, **options: Any) -> TorchPolicy:
    policy = TorchPolicy(**options)
    policy.bind(obs, action_space, seed)
    return policy


def observations(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (n, 3)).astype(np.float32)


def logged(width: int, action: int = 0) -> SampleBatch:
    obs = np.zeros((20, width), np.float32)
    return SampleBatch(
        obs=obs,
        new_obs=obs,
        actions=np.full(20, action),
        rewards=np.ones(20, np.float32),
        terminateds=np.arange(20) % 10 == 9,
        truncateds=np.zeros(20, bool),
        eps_id=np.arange(20) // 10,
        t=np.arange(20) % 10,
        action_logp=np.full(20, -0.69, np.float32),
        action_prob=np.full(20, 0.5, np.float32),
        advantages=np.zeros(20, np.float32),
        value_targets=np.zeros(20, np.float32),
        vf_preds=np.zeros(20, np.float32),
    )


@pytest.mark.parametrize("make", [DQN, ActorCritic, BehaviourCloning])
def test_rows_of_another_width_are_refused_by_name_before_torch_sees_them(make: Any) -> None:
    policy = make()
    policy.bind(OBS, Discrete(2, start=1), seed=0)
    batch = logged(width=5, action=1)
    uses = [
        lambda: policy.learn_on_batch(batch),
        lambda: policy.compute_gradients(batch),
        lambda: policy.compute_actions(batch["obs"]),
        lambda: policy.compute_actions(batch["obs"], explore=False),
        lambda: policy.compute_log_likelihoods(batch["actions"], batch["obs"]),
        lambda: evaluate_offline(batch, policy, gamma=0.9),
    ]
    for use in uses:
        with pytest.raises(SchemaError) as found:
            use()
        assert found.value.column == "obs"
        assert "(5,)" in str(found.value)
        assert "(3,)" in str(found.value)
    assert policy.learn_on_batch(logged(width=3, action=1))


@pytest.mark.parametrize("make", [DQN, ActorCritic, BehaviourCloning])
def test_actions_beyond_the_space_are_refused_by_name_before_torch_sees_them(make: Any) -> None:
    policy = make()
    policy.bind(OBS, Discrete(2, start=1), seed=0)
    for action in (0, 3, -1):
        batch = logged(width=3, action=action)
        for use in (
            lambda batch=batch: policy.learn_on_batch(batch),
            lambda batch=batch: policy.compute_log_likelihoods(batch["actions"], batch["obs"]),
        ):
            with pytest.raises(SchemaError) as found:
                use()
            assert found.value.column == "actions"


def test_nested_rows_and_numbers_of_several_kinds_are_checked_part_by_part() -> None:
    policy = bound(MultiDiscrete([2, 4]), NESTED)
    rows = {leaf.path: leaf for leaf in leaves_of(NESTED)}
    assert len(rows) == 5
    fit = Fit("obs", NESTED)
    whole = {
        "here": np.zeros((3, 2)),
        "there": (
            np.ones(3, np.int64),
            np.zeros((3, 2), np.int64),
            np.zeros((3, 2), np.int8),
            np.zeros((3, 2, 2), np.uint8),
        ),
    }
    fit.check(whole, numbers=True)
    policy.compute_actions(whole)
    for place, wrong in ((0, np.full(3, 5)), (1, np.full((3, 2), 3)), (3, np.zeros((3, 2), np.uint8))):
        parts = list(whole["there"])
        parts[place] = wrong
        for tensors in (False, True):
            given = tuple(map(torch.as_tensor, parts)) if tensors else tuple(parts)
            with pytest.raises(SchemaError):
                fit.check(whole | {"there": given}, numbers=True)


@pytest.mark.parametrize("space", ACTIONS, ids=str)
def test_actions_are_drawn_in_every_space_with_their_probability(space: Any) -> None:
    policy = bound(space)
    actions, state, extras = policy.compute_actions(observations(60))
    assert state == ()
    assert extras["action_dist_inputs"].shape == (60, distribution_for(space).size)
    assert extras["action_dist_inputs"].dtype == extras["action_logp"].dtype == np.float32
    for leaf in leaves_of(space):
        values = leaf_of(actions, leaf.path)
        assert values.shape == (60, *leaf.shape)
        assert np.can_cast(values.dtype, leaf.dtype, "same_kind")
        if leaf.dtype.kind != "f":
            assert all(leaf.space.contains(value.astype(leaf.dtype)) for value in values)


@pytest.mark.few(1)
@pytest.mark.parametrize("space", ACTIONS[:4], ids=str)
def test_probabilities_of_all_choices_add_up_to_one_and_draws_follow_them(space: Any) -> None:
    distribution = distribution_for(space)
    outputs = torch.linspace(-1.5, 1.0, distribution.size).expand(1, -1)
    generator = torch.Generator().manual_seed(0)
    drawn = distribution.sample(outputs.expand(40_000, -1), generator).reshape(40_000, -1)
    choices, counts = drawn.unique(dim=0, return_counts=True)
    total = 1
    for leaf in np.ravel(getattr(space, "nvec", getattr(space, "n", 2))):
        total *= int(leaf)
    total = 2**4 if isinstance(space, MultiBinary) else total
    assert len(choices) == total
    logp = distribution.logp(outputs.expand(total, -1), choices.reshape(total, *space.shape))
    assert torch.isclose(logp.exp().sum(), torch.tensor(1.0), atol=1e-5)
    assert torch.allclose(counts / 40_000, logp.exp(), atol=0.012)
    entropy = -(logp.exp() * logp).sum()
    assert torch.isclose(distribution.entropy(outputs)[0], entropy, atol=1e-4)
    best = distribution.sample(outputs, None).reshape(-1)
    assert torch.equal(best.long(), choices[logp.argmax()].long())


def test_gaussian_actions_have_the_density_of_torchs_own_normal() -> None:
    distribution = distribution_for(Box(-1.0, 1.0, (3,), np.float32))
    outputs = torch.randn(10, 6, generator=torch.Generator().manual_seed(1))
    actions = distribution.sample(outputs, torch.Generator().manual_seed(2))
    normal = torch.distributions.Normal(outputs[:, :3], outputs[:, 3:].exp())
    assert torch.allclose(distribution.logp(outputs, actions), normal.log_prob(actions).sum(-1), atol=1e-5)
    assert torch.allclose(distribution.entropy(outputs), normal.entropy().sum(-1), atol=1e-5)
    assert torch.equal(distribution.sample(outputs, None), outputs[:, :3])


def test_what_it_does_depends_on_its_seed_and_on_nothing_else_that_uses_torch() -> None:
    torch.manual_seed(1)
    one = bound(Discrete(4))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    two = bound(Discrete(4))
    first, _, extras = one.compute_actions(observations(100))
    torch.rand(3)
    second, _, same = two.compute_actions(observations(100))
    assert np.array_equal(first, second)
    assert np.array_equal(extras["action_logp"], same["action_logp"])
    assert not np.array_equal(first, bound(Discrete(4), seed=1).compute_actions(observations(100))[0])
    torch.set_rng_state(before)
    bound(Discrete(4)).compute_actions(observations(2))
    assert torch.equal(torch.get_rng_state(), before), "torch's global generator is left alone"


def test_without_exploration_it_takes_the_most_likely_action_and_draws_nothing() -> None:
    policy, other = bound(Discrete(4)), bound(Discrete(4))
    actions, _, extras = policy.compute_actions(observations(20), explore=False)
    assert np.array_equal(actions, extras["action_dist_inputs"].argmax(1))
    obs = observations(50)
    assert np.array_equal(policy.compute_actions(obs)[0], other.compute_actions(obs)[0])


def test_the_default_network_reads_nested_observations_of_every_kind() -> None:
    policy = bound(Discrete(2), NESTED)
    rows = [NESTED.sample() for _ in range(4)]
    batched = {
        "here": np.stack([row["here"] for row in rows]),
        "there": tuple(np.stack([np.asarray(row["there"][i]) for row in rows]) for i in range(4)),
    }
    together = policy.forward(batched)
    assert together.shape == (4, 2)
    alone = {"here": batched["here"][:1], "there": tuple(part[:1] for part in batched["there"])}
    assert torch.allclose(policy.forward(alone), together[:1], atol=1e-6)


def test_a_given_module_is_used_and_shared() -> None:
    module = torch.nn.Linear(3, 2)
    policy = bound(Discrete(2), module=module)
    obs = observations(5)
    _, _, extras = policy.compute_actions(obs)
    assert np.allclose(extras["action_dist_inputs"], module(torch.as_tensor(obs)).detach().numpy())
    with torch.no_grad():
        module.bias += 1
    assert np.allclose(policy.get_weights()["bias"], module.bias.detach().numpy())


def test_a_function_makes_the_module_from_space_outputs_and_generator() -> None:
    asked = []

    def make(space: Any, outputs: int, generator: torch.Generator) -> torch.nn.Module:
        asked.append((space, outputs, generator.initial_seed()))
        return torch.nn.Linear(3, outputs)

    bound(Box(-1.0, 1.0, (2,), np.float32), module=make)
    assert asked[0][:2] == (OBS, 4)


def brings_down(policy: Any, outputs: torch.Tensor, tensors: dict[str, Any]) -> Any:
    loss = ((outputs - 1) ** 2).mean()
    return loss, {"rows": float(len(outputs)), "kinds": float(tensors["rewards"].dtype == torch.float32)}


def batch(n: int = 16) -> SampleBatch:
    return SampleBatch(obs=observations(n), actions=np.zeros(n, np.int64), rewards=np.ones(n), infos=[{}] * n)


def test_it_learns_by_any_loss_and_counts_its_versions() -> None:
    policy = bound(Discrete(2), loss=brings_down, learning_rate=0.05, max_grad_norm=100.0)
    stats = [policy.learn_on_batch(batch()) for _ in range(30)]
    assert stats[-1]["loss"] < stats[0]["loss"] / 2
    assert set(stats[0]) == {"loss", "rows", "kinds", "grad_norm"}
    assert stats[0]["kinds"] == 1.0
    assert policy.updates == policy.weights_seq_no == 30


def test_it_learns_from_compressed_and_read_only_rows_too() -> None:
    policy, other = (bound(Discrete(2), loss=brings_down) for _ in range(2))
    rows = batch()
    rows["obs"].flags.writeable = False
    one = policy.learn_on_batch(rows.compress())
    assert one == other.learn_on_batch(MultiAgentBatch({"default_policy": rows}, 16))


def test_an_optimizer_of_ones_own_is_used() -> None:
    policy = bound(Discrete(2), loss=brings_down, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    before = policy.get_weights()
    policy.learn_on_batch(batch())
    assert all(np.array_equal(before[name], value) for name, value in policy.get_weights().items())


@pytest.mark.parametrize("place", ["state", "file"])
def test_a_restored_policy_acts_and_learns_on_as_the_first(place: str, tmp_path: Path) -> None:
    policy, other = (bound(Discrete(2), seed=seed, loss=brings_down) for seed in (0, 1))
    policy.learn_on_batch(batch())
    policy.compute_actions(observations(3))
    if place == "state":
        other.set_state(policy.get_state())
    else:
        policy.save(tmp_path / "policy")
        other.load(tmp_path / "policy")
    for _ in range(3):
        assert policy.learn_on_batch(batch()) == other.learn_on_batch(batch())
        obs = observations(20)
        assert np.array_equal(policy.compute_actions(obs)[0], other.compute_actions(obs)[0])
    assert other.updates == other.weights_seq_no == 4


def test_weights_travel_as_arrays_and_are_copies() -> None:
    policy, other = bound(Discrete(2)), bound(Discrete(2), seed=1)
    weights = policy.get_weights()
    assert all(type(value) is np.ndarray for value in weights.values())
    other.set_weights(weights)
    assert torch.equal(other.forward(observations(4)), policy.forward(observations(4)))
    for value in weights.values():
        value[...] = 0
    assert torch.equal(other.forward(observations(4)), policy.forward(observations(4)))


def test_weights_of_another_module_are_refused_and_nothing_is_changed() -> None:
    policy = bound(Discrete(2))
    before = policy.get_weights()
    with pytest.raises(StateError, match="another module"):
        policy.set_weights({"w": np.zeros(3)})
    with pytest.raises(StateError, match="shape"):
        policy.set_weights({name: np.zeros(7) for name in before})
    assert all(np.array_equal(before[name], value) for name, value in policy.get_weights().items())


def test_weights_may_have_any_name(tmp_path: Path) -> None:
    """`numpy.savez` takes the names of arrays as keywords, beside its own: file, allow_pickle."""

    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.file = torch.nn.Parameter(torch.rand(3, 2))
            self.allow_pickle = torch.nn.Parameter(torch.rand(2))

        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            return obs @ self.file + self.allow_pickle

    policy, other = (bound(Discrete(2), module=Odd()) for _ in range(2))
    policy.export_model(tmp_path / "model.npz")
    other.import_model(tmp_path / "model.npz")
    expected, found = policy.get_weights(), other.get_weights()
    assert found.keys() == {"file", "allow_pickle"}
    assert all(np.array_equal(value, expected[name]) for name, value in found.items())
    assert os.listdir(tmp_path) == ["model.npz"]


def test_an_export_that_fails_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that died while torch wrote left half a module."""

    def fails(module: Any, path: str) -> None:
        Path(path).write_bytes(b"half")
        raise RuntimeError("the disk is full")

    policy = bound(Discrete(2))
    policy.export_model(tmp_path / "model.pt", format="torchscript")
    before = (tmp_path / "model.pt").read_bytes()
    monkeypatch.setattr(torch.jit, "save", fails)
    with pytest.raises(OptionError):
        policy.export_model(tmp_path / "model.pt", format="torchscript")
    assert (tmp_path / "model.pt").read_bytes() == before
    assert os.listdir(tmp_path) == ["model.pt"]


def test_checkpoints_hold_no_pickle_and_damage_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with pytest.raises(DataNotFound):
        load_state(folder)
    save_state(folder, {"a": np.arange(3), "b": [1, 2.5, None, "x", {"c": np.zeros((2, 0))}]})
    loaded = load_state(folder)
    assert loaded["a"].tolist() == [0, 1, 2]
    assert loaded["b"][4]["c"].shape == (2, 0)
    data = bytearray((folder / "arrays.npz").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "arrays.npz").write_bytes(data)
    with pytest.raises(CorruptData, match=r"not those that state\.json"):
        load_state(folder)
    (folder / "state.json").write_text(json.dumps({"format": 7, "state": {}, "arrays_crc32": 0}))
    with pytest.raises(CorruptData, match="format"):
        load_state(folder)
    for wrong in ({"a": object()}, {"a": np.array([{}])}, {(1, 2): 2}):
        with pytest.raises(StateError):
            save_state(folder, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TorchPolicy(optimizer=torch.optim.Adam, learning_rate=1.0), "learning_rate"),
        (lambda: TorchPolicy(torch.nn.Linear(1, 1), hidden=[3]), "hidden"),
        (lambda: TorchPolicy("mlp"), "expected a torch module"),
        (lambda: TorchPolicy(learning_rate=0.0), "above 0"),
        (lambda: TorchPolicy(max_grad_norm=-1.0), "above 0"),
        (lambda: bound(Text(3)), "no distribution"),
        (lambda: bound(Discrete(2), Text(3)), "default network cannot read"),
        (lambda: bound(Discrete(2), module=lambda *a: 3), "expected a torch module"),
        (lambda: TorchPolicy().module, "no spaces yet"),
        (lambda: bound(Discrete(2)).learn_on_batch(batch()), "does not learn"),
        (
            lambda: bound(Discrete(2), module=torch.nn.Linear(3, 7)).compute_actions(observations(2)),
            r"expected \(N, 2\)",
        ),
        (
            lambda: bound(Discrete(2), loss=brings_down, module=torch.nn.Flatten()).learn_on_batch(batch()),
            "no parameters",
        ),
        (
            lambda: bound(Discrete(2), loss=brings_down).learn_on_batch(MultiAgentBatch({"a": batch()}, 1)),
            "one policy's rows",
        ),
        (lambda: bound(Discrete(2), loss=brings_down).learn_on_batch(batch()[:0]), "no rows"),
    ],
)
def test_misuse_is_answered_with_what_to_do(make: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


def test_a_column_that_the_loss_needs_is_named() -> None:
    with pytest.raises(MissingColumn, match="column actions"):
        bound(Discrete(2), loss=brings_down).learn_on_batch(SampleBatch(obs=observations(2)))


# ---- acting quickly ----


@pytest.mark.parametrize("choices", [2, 5, 18])
def test_choices_are_drawn_as_torch_draws_them(choices: int) -> None:
    """`multinomial` of the same generator: a draw costs less, and nothing else is different."""
    distribution = distribution_for(Discrete(choices, start=3))
    outputs = 3 * torch.randn(500, choices, generator=torch.Generator().manual_seed(1))
    outputs[::7, 0] = -torch.inf  # Actions that are masked.
    ours, theirs = (torch.Generator().manual_seed(choices) for _ in range(2))
    actions, logp = distribution.draw(outputs, ours)
    assert torch.equal(actions, 3 + torch.multinomial(outputs.softmax(-1), 1, generator=theirs)[:, 0])
    assert torch.equal(logp, distribution.logp(outputs, actions))
    assert torch.equal(ours.get_state(), theirs.get_state())


@pytest.mark.parametrize("space", [Discrete(2), Box(-1.0, 1.0, (2,)), MultiBinary(3)], ids=str)
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_outputs_that_are_no_numbers_are_refused(space: Any, wrong: float) -> None:
    policy = TorchPolicy(lambda obs, outputs, generator: torch.nn.Linear(1, outputs))
    policy.bind(Box(-np.inf, np.inf, (1,)), space, seed=0)
    obs = np.zeros((5, 1), np.float32)
    policy.compute_actions(obs)
    obs[3] = wrong
    with pytest.raises(SchemaError, match="for 1 of 5 observations"):
        policy.compute_actions(obs)


def test_a_perceptron_is_its_layers_and_their_hooks() -> None:
    """Without gradients it calls functions in the place of modules: nobody is to notice."""
    made = mlp(Box(-1.0, 1.0, (2, 3)), outputs=2, hidden=[8, 8], generator=torch.Generator().manual_seed(0))
    plain, obs = torch.nn.Sequential(*made), torch.randn(5, 2, 3)
    with torch.inference_mode():
        assert torch.equal(made(obs), plain(obs))
        seen: list[Any] = []
        for hook in (made[2].register_forward_hook, made[3].register_forward_pre_hook):
            hook(lambda module, *_: seen.append(type(module).__name__))
        assert torch.equal(made(obs), plain(obs))
        assert seen == ["Tanh", "Linear"] * 2
        made[4] = plain[4] = torch.nn.ReLU()
        assert torch.equal(made(obs), plain(obs))
    made(obs).sum().backward()
    assert made[1].weight.grad is not None
    assert made.state_dict().keys() == plain.state_dict().keys()
