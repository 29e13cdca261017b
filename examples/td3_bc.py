"""TD3+BC in plain torch: record a poor swing-up of a pendulum, and train a better one from the log alone.

Fujimoto and Gu, "A Minimalist Approach to Offline Reinforcement Learning", 2021.

Run:  python examples/td3_bc.py [FOLDER]
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

#: The paper has ALPHA = 2.5, which keeps closer to the log; most actions of this one are noise.
GAMMA, TAU, ALPHA, MAX_TORQUE = 0.98, 0.02, 10.0, 2.0


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
    """Return the actor, of normalised observations to actions in [-1, 1]."""
    actor, critics = mlp(3, nn.Tanh()), nn.ModuleList([mlp(4), mlp(4)])
    target_actor, target_critics = copy.deepcopy(actor), copy.deepcopy(critics)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_optimizer = torch.optim.Adam(critics.parameters(), lr=1e-3)
    for update in range(updates):
        batch = reader.sample().to_torch()
        obs, actions = batch["obs"], batch["actions"] / MAX_TORQUE
        with torch.no_grad():
            noise = (0.2 * torch.randn_like(actions)).clamp(-0.5, 0.5)
            after = torch.cat([batch["new_obs"], (target_actor(batch["new_obs"]) + noise).clamp(-1, 1)], 1)
            value = torch.min(target_critics[0](after), target_critics[1](after))[:, 0]
            # A time limit ended these episodes: the value after the last step counts.
            target = batch["rewards"] / 10 + GAMMA * torch.where(batch["terminateds"], 0.0, value)
        pairs = torch.cat([obs, actions], 1)
        critic_loss = sum(mse_loss(critic(pairs)[:, 0], target) for critic in critics)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()
        if update % 2 == 0:
            chosen = actor(obs)
            q = critics[0](torch.cat([obs, chosen], 1))
            actor_loss = -ALPHA * (q / q.abs().mean().detach()).mean() + mse_loss(chosen, actions)
            actor_optimizer.zero_grad()
            actor_loss.backward()
            actor_optimizer.step()
            for net, target_net in ((actor, target_actor), (critics, target_critics)):
                for new, old in zip(net.parameters(), target_net.parameters(), strict=True):
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
        actor = train(reader, updates=3_000)
    trained = evaluate(Trained(actor, normaliser), "Pendulum-v1", episodes=20, seed=1)
    print(f"mean return: {recorded:.0f} in the data, {trained.mean:.0f} after TD3+BC")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
