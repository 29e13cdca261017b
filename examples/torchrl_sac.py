"""SAC of TorchRL on a mix: half of each batch is recorded by rlio, half is live.

Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", 2018; half of each batch: Ball et al.,
"Efficient Online Reinforcement Learning with Offline Data", 2023.

Run:  pip install 'rlio[torchrl]' && python examples/torchrl_sac.py [FOLDER]
"""

import sys
import tempfile

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import (
    Bounded,
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
)
from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

import rlio
from rlio.sampling.evaluate import evaluate

COLUMNS = ["obs", "new_obs", "actions", "rewards", "terminateds", "truncateds"]


class NoisySwingUp(rlio.Policy):
    """Pumps energy into the pendulum and holds it at the top, but 7 of 10 actions are random."""

    rng = np.random.default_rng(0)

    def compute_actions(self, obs, state=(), *, explore=True, inputs=None, timestep=0):
        cos, sin, speed = obs.T
        pump = 2 * np.sign(speed) * np.sign(5 - 5 * cos - speed**2 / 6)
        torque = np.where(cos > 0.95, -10 * np.arctan2(sin, cos) - 3 * speed, pump)
        noise = self.rng.uniform(-2, 2, len(obs))
        torque = np.where(self.rng.random(len(obs)) < 0.7, noise, torque)
        return torque.clip(-2, 2).astype("float32")[:, None], state, {}


class Actor(rlio.Policy):
    """The actor of TorchRL as a policy: it explores by drawing from its distribution."""

    def __init__(self, actor: ProbabilisticActor) -> None:
        self.actor = actor

    @torch.no_grad()
    def compute_actions(self, obs, state=(), *, explore=True, inputs=None, timestep=0):
        chosen = self.actor.get_dist(TensorDict({"observation": torch.as_tensor(obs)}, len(obs)))
        return (chosen.sample() if explore else chosen.deterministic_sample).numpy(), state, {}


def make_loss() -> SACLoss:
    """SAC for the pendulum."""
    net = torch.nn.Sequential(MLP(in_features=3, out_features=2, num_cells=[64, 64]), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
    )
    q_net = MLP(in_features=4, out_features=1, num_cells=[64, 64])
    critic = ValueOperator(q_net, in_keys=["observation", "action"])
    loss = SACLoss(actor, critic, action_spec=Bounded(-2.0, 2.0, shape=(1,)))
    loss.make_value_estimator(gamma=0.98)
    return loss


def main(folder: str) -> None:
    """Record 80 episodes, then take 1,500 live steps with an update each."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rollout = rlio.RolloutConfig(num_envs=8, rollout_fragment_length=2_000)
    with rlio.RolloutWorker("Pendulum-v1", NoisySwingUp(), output=folder, rollout=rollout, seed=0) as worker:
        worker.sample()
    data = rlio.open_dataset(folder)
    recorded = np.mean([data.episode(i).total_reward for i in range(data.episode_count)])

    logged = ReplayBuffer(
        storage=rlio.bridges.torchrl_storage(rlio.ReplayStore.open(data), columns=COLUMNS),
        writer=ImmutableDatasetWriter(),
        collate_fn=lambda rows: rows,
        batch_size=64,
    )
    live = ReplayBuffer(storage=LazyTensorStorage(10_000), collate_fn=lambda rows: rows, batch_size=64)
    mixed = ReplayBufferEnsemble(logged, live, batch_size=128)
    loss = make_loss()
    optimizer, target = torch.optim.Adam(loss.parameters(), lr=2e-3), SoftUpdate(loss, tau=0.02)
    actor = Actor(loss.actor_network)
    rollout = rlio.RolloutConfig(rollout_fragment_length=10)
    with rlio.RolloutWorker("Pendulum-v1", actor, rollout=rollout, seed=1) as worker:
        for _ in range(150):
            rows = worker.sample()
            rows = rlio.SampleBatch({name: rows[name] for name in COLUMNS})
            live.extend(rlio.torch.to_tensordict(rows, layout="torchrl"))
            for _ in range(len(rows)):
                losses = loss(mixed.sample().reshape(-1))
                optimizer.zero_grad()
                sum(losses[name] for name in ("loss_actor", "loss_qvalue", "loss_alpha")).backward()
                optimizer.step()
                target.step()
    trained = evaluate(actor, "Pendulum-v1", episodes=20, seed=1)
    print(f"SAC was trained on {len(logged)} recorded and {len(live)} live rows")
    print(f"mean return: {recorded:.0f} in the data, {trained.mean:.0f} after SAC")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
