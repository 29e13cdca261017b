"""Decision Transformer: learn actions given the return that follows, then ask for a high return.

Chen et al., "Decision Transformer: Reinforcement Learning via Sequence Modeling", 2021.

Run:  python examples/decision_transformer.py [FOLDER]
"""

import sys
import tempfile

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import rlio

LENGTH, WIDTH, HEADS, SCALE = 10, 64, 2, 100.0  # steps of a context; returns are divided by the scale


class Player(rlio.Policy):
    """Balances the pole by its angle and angular velocity; a share of its moves is wrong."""

    def __init__(self, wrong: float, seed: int) -> None:
        self.wrong, self.rng = wrong, np.random.default_rng(seed)

    def compute_actions(self, obs, state=(), *, explore=True, inputs=None, timestep=0):
        right = obs[:, 2] + 0.5 * obs[:, 3] > 0
        wrong = self.rng.random(len(obs)) < self.wrong
        return (right ^ wrong).astype("int64"), state, {}


class Block(nn.Module):
    """Attention and a perceptron, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        heads = self.qkv(self.before[0](x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        found = scaled_dot_product_attention(*heads, attn_mask=visible)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before[1](x))


class DecisionTransformer(nn.Module):
    """Logits of the actions (B, T, 2), from the returns to go, observations and earlier actions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_return, self.embed_obs = nn.Linear(1, WIDTH), nn.Linear(4, WIDTH)
        self.embed_action, self.embed_time = nn.Embedding(2, WIDTH), nn.Embedding(500, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2))

    def forward(self, returns_to_go: Tensor, obs: Tensor, actions: Tensor, t: Tensor, mask: Tensor) -> Tensor:
        wanted = self.embed_return(returns_to_go[..., None] / SCALE)
        parts = (wanted, self.embed_obs(obs), self.embed_action(actions))
        x = (torch.stack(parts, 2) + self.embed_time(t)[:, :, None]).flatten(1, 2)  # (B, 3T, WIDTH)
        # Each token sees the earlier ones that are no padding, and itself.
        size = x.shape[1]
        earlier = torch.ones(size, size, dtype=torch.bool).tril(-1)
        visible = earlier & mask.repeat_interleave(3, 1)[:, None, None, :] | torch.eye(size, dtype=torch.bool)
        for block in self.blocks:
            x = block(x, visible)
        return self.head(x[:, 1::3])  # an action follows its observation


def play(model: DecisionTransformer, wanted: float, episodes: int) -> float:
    """The mean return when the model is asked for a return."""
    env, returns = gym.make("CartPole-v1"), []
    for seed in range(episodes):
        obs, ended = env.reset(seed=seed)[0], False
        rows = {"returns_to_go": [wanted], "obs": [obs], "actions": [0], "t": [0]}
        while not ended:
            context = {name: torch.as_tensor(np.array(row[-LENGTH:]))[None] for name, row in rows.items()}
            context["returns_to_go"] = context["returns_to_go"].float()
            with torch.no_grad():
                logits = model(**context, mask=torch.ones_like(context["t"], dtype=torch.bool))
            rows["actions"][-1] = int(logits[0, -1].argmax())
            obs, reward, terminated, truncated, _ = env.step(rows["actions"][-1])
            ended = terminated or truncated
            row = (rows["returns_to_go"][-1] - reward, obs, 0, len(rows["t"]))
            for column, value in zip(rows.values(), row, strict=True):
                column.append(value)
        returns.append(wanted - rows["returns_to_go"][-1])
    return float(np.mean(returns))


def main(folder: str) -> None:
    """Record ten players, from sure to hopeless; train; ask for two returns."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rollout = rlio.RolloutConfig(batch_mode="complete_episodes", rollout_fragment_length=1_000)
    for number in range(10):
        player = Player(wrong=number / 10, seed=number)
        # A fixed writer id: the order of the rows, and so the training, is the same in each run.
        options = {"output_options": {"writer_id": f"player{number}"}, "rollout": rollout, "seed": number}
        with rlio.RolloutWorker("CartPole-v1", player, output=folder, **options) as worker:
            worker.sample()
    data = rlio.open_dataset(folder)
    recorded = np.mean([data.episode(i).total_reward for i in range(data.episode_count)])

    model = DecisionTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    columns = ["returns_to_go", "obs", "actions", "t"]
    with rlio.DatasetReader(
        data, columns=columns, derive=["returns_to_go"], batch_size=64, shuffle=True, seed=0,
        draw=rlio.Sequences(LENGTH, starts="all", padding="left", layout="time"),
    ) as reader:  # fmt: skip
        for _ in range(300):
            batch = reader.sample().to_torch()
            logits = model(**{name: batch[name] for name in (*columns, "mask")})
            loss = cross_entropy(logits[batch["mask"]], batch["actions"][batch["mask"]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    low, high = play(model, 20, episodes=5), play(model, 200, episodes=5)
    print(f"mean return: {recorded:.0f} in the data, {low:.0f} if asked for 20, {high:.0f} if asked for 200")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
