"""IQL in plain torch: record a poor swing-up of a pendulum, and train a better one from the log alone.

Kostrikov, Nair and Levine, "Offline Reinforcement Learning with Implicit Q-Learning", 2022.

Run:  python examples/iql.py [FOLDER]
"""

import copy
import sys
import tempfile

import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss

import rlio
from rlio.sampling.evaluate import evaluate

GAMMA, TAU, EXPECTILE, TEMPERATURE, MAX_TORQUE = 0.98, 0.01, 0.9, 10.0, 2.0


class NoisySwingUp(rlio.Policy):
    """Pumps energy into the pendulum and holds it at the top, but 7 of 10 actions are random."""

    rng = np.random.default_rng(0)

    def compute_actions(self, obs, state=(), *, explore=True, inputs=None, timestep=0):
        cos, sin, speed = obs.T
        pump = MAX_TORQUE * np.sign(speed) * np.sign(5 - 5 * cos - speed**2 / 6)
        torque = np.where(cos > 0.95, -10 * np.arctan2(sin, cos) - 3 * speed, pump)
        noise = self.rng.uniform(-MAX_TORQUE, MAX_TORQUE, len(obs))
        torque = np.where(self.rng.random(len(obs)) < 0.7, noise, torque)
        return torque.clip(-MAX_TORQUE, MAX_TORQUE).astype("float32")[:, None], state, {}


class Trained(rlio.Policy):
    """The actor as a policy, for environments. It normalises observations as the reader does."""

    def __init__(self, actor, normaliser):
        self.actor, self.normaliser = actor, normaliser

    @torch.no_grad()
    def compute_actions(self, obs, state=(), *, explore=True, inputs=None, timestep=0):
        rows = self.normaliser(rlio.SampleBatch(obs=obs)).to_torch()
        return MAX_TORQUE * self.actor(rows["obs"]).numpy(), state, {}


def mlp(inputs: int, *end: nn.Module) -> nn.Sequential:
    """A perceptron with one output."""
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), *end
    )


def train(reader: rlio.DatasetReader, updates: int) -> nn.Module:
    """Return the actor, of normalised observations to actions in [-1, 1]. No loss asks for unseen actions."""
    actor, value, critics = mlp(3, nn.Tanh()), mlp(3), nn.ModuleList([mlp(4), mlp(4)])
    target_critics = copy.deepcopy(critics)
    optimizer = torch.optim.Adam([*actor.parameters(), *value.parameters(), *critics.parameters()], lr=1e-3)
    for _ in range(updates):
        batch = reader.sample().to_torch()
        obs, actions = batch["obs"], batch["actions"] / MAX_TORQUE
        pairs = torch.cat([obs, actions], 1)
        with torch.no_grad():
            q = torch.min(target_critics[0](pairs), target_critics[1](pairs))[:, 0]
            # A time limit ended these episodes: the value after the last step counts.
            after = torch.where(batch["terminateds"], 0.0, value(batch["new_obs"])[:, 0])
            target = batch["rewards"] / 10 + GAMMA * after
        # The value: an expectile of Q over the actions of the log.
        advantage = q - value(obs)[:, 0]
        weight = torch.where(advantage > 0, EXPECTILE, 1 - EXPECTILE)
        value_loss = (weight * advantage**2).mean()
        critic_loss = sum(mse_loss(critic(pairs)[:, 0], target) for critic in critics)
        # The actor: behaviour cloning, weighted by the advantage.
        weight = (TEMPERATURE * advantage.detach()).exp().clamp(max=100)
        actor_loss = (weight * (actor(obs) - actions)[:, 0] ** 2).mean()
        optimizer.zero_grad()
        (value_loss + critic_loss + actor_loss).backward()
        optimizer.step()
        for new, old in zip(critics.parameters(), target_critics.parameters(), strict=True):
            old.data.lerp_(new.data, TAU)
    return actor


def main(folder: str) -> None:
    """Record 80 episodes, train, and compare."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rollout = rlio.RolloutConfig(num_envs=8, rollout_fragment_length=2_000)
    with rlio.RolloutWorker("Pendulum-v1", NoisySwingUp(), output=folder, rollout=rollout, seed=0) as worker:
        worker.sample()
    data = rlio.open_dataset(folder)
    recorded = np.mean([data.episode(i).total_reward for i in range(data.episode_count)])

    normaliser = data.stats(["obs"]).normaliser("mean_std")
    with rlio.DatasetReader(data, batch_size=256, shuffle=True, seed=0, normalise=normaliser) as reader:
        actor = train(reader, updates=2_500)
    trained = evaluate(Trained(actor, normaliser), "Pendulum-v1", episodes=20, seed=1)
    print(f"mean return: {recorded:.0f} in the data, {trained.mean:.0f} after IQL")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
