"""GRPO on a tiny language model: its rollouts are recorded, bounded in age, and mixed with logged ones.

The model learns to repeat a word: "cab=" is answered by "cab.". Each prompt is answered eight times, which is
a group. The run is killed and resumed. docs/llm_rollouts.md explains the columns and the draws.
Shao et al., "DeepSeekMath", 2024.

Run:  python examples/llm_rollouts.py [FOLDER]
"""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import rlio

LETTERS = ".=abcd"  # the end of an answer, the end of a prompt, and what words are made of
END, LONGEST = 0, 8  # tokens of a prompt and its answer
GROUPS, ANSWERS, UPDATES, CLIP = 32, 8, 4, 0.2
VERSIONS, OLDEST = 30, 2  # versions of the policy; how many of them a rollout may be behind


class Model(nn.Module):
    """Logits of the next token (B, T, letters), and the state after the tokens (B, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(len(LETTERS), 32), nn.GRU(32, 128, batch_first=True)
        self.head = nn.Linear(128, len(LETTERS))

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden, state = self.gru(self.embed(tokens), state)
        return self.head(hidden), state


class Scripted:
    """Answers as the model does, by a rule: the next letter is right with probability 0.7 or more."""

    def __call__(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        state = tokens if state is None else torch.cat([state, tokens], 1)
        right = torch.zeros(len(tokens), 1, len(LETTERS))
        for row, seen in enumerate(state.tolist()):
            word = seen[: seen.index(1)] if 1 in seen else []
            right[row, 0, [*word, END, END][min(len(seen) - len(word) - 1, len(word))]] = 1.0
        return (0.7 * right + 0.3 / len(LETTERS)).log(), state


def tokens_of(text: str) -> np.ndarray:
    """The number of each letter."""
    return np.array([LETTERS.index(letter) for letter in text], np.int32)


def reward(prompt: str, tokens: np.ndarray) -> float:
    """The share of letters that are right, of the answer or of the word, whichever is longer."""
    answer, right = tokens[len(prompt) :], tokens_of(prompt[:-1] + ".")
    shorter = min(len(answer), len(right))
    return float((answer[:shorter] == right[:shorter]).sum() / max(len(answer), len(right)))


@torch.no_grad()
def rollouts(model, version: int, rng: np.random.Generator) -> Iterator[rlio.SampleBatch]:
    """Answer random prompts; yields one batch a group."""
    words = ["".join(rng.choice(list(LETTERS[2:]), rng.integers(1, 4))) + "=" for _ in range(GROUPS)]
    prompts = [word for word in words for _ in range(ANSWERS)]
    given_tokens = rlio.batch.object_column([tokens_of(prompt) for prompt in prompts])
    tokens, given = rlio.Ragged.of(given_tokens).to_padded(length=LONGEST)
    logps, there = np.zeros(tokens.shape, np.float32), given.copy()
    ended, state = np.zeros(len(prompts), bool), None
    for at in range(1, LONGEST):
        logits, state = model(torch.from_numpy(tokens[:, at - 1 : at]), state)
        choice = Categorical(logits=logits[:, 0])
        drawn = choice.sample()
        there[:, at] |= ~given[:, at] & ~ended
        answered = there[:, at] & ~given[:, at]
        tokens[answered, at] = drawn[answered]
        logps[answered, at] = choice.log_prob(drawn)[answered]
        ended |= answered & (tokens[:, at] == END)
    for start in range(0, len(prompts), ANSWERS):
        rows = slice(start, start + ANSWERS)
        columns = {"tokens": tokens[rows], "logps": logps[rows], "loss_mask": ~given[rows]}
        ragged = {name: rlio.Ragged.from_padded(values, there[rows]) for name, values in columns.items()}
        prompt = prompts[start]
        yield rlio.SampleBatch(
            ragged,
            prompt=[prompt] * ANSWERS,
            rewards=np.array([reward(prompt, answer) for answer in ragged["tokens"]], np.float32),
            eps_id=np.full(ANSWERS, rng.integers(2**32, 2**63)),  # the group
            t=np.arange(ANSWERS),
            terminateds=np.arange(ANSWERS) == ANSWERS - 1,
            weights_seq_no=np.full(ANSWERS, version),
        )


def grpo_loss(model: Model, batch: rlio.SampleBatch) -> Tensor:
    """The clipped loss of whole groups, over the tokens of answers."""
    sizes = batch["seq_lens"]
    group, scores = np.repeat(np.arange(len(sizes)), sizes), batch["rewards"]
    mean = np.bincount(group, scores) / sizes
    deviation = np.sqrt(np.bincount(group, (scores - mean[group]) ** 2) / sizes)
    advantages = torch.from_numpy((scores - mean[group]) / (deviation[group] + 1e-4)).float()[:, None]

    padded = {name: rlio.Ragged.of(batch[name]).to_padded()[0] for name in ("tokens", "logps", "loss_mask")}
    tokens, old, answers = map(torch.from_numpy, padded.values())
    logits, _ = model(tokens[:, :-1])
    ratio = (Categorical(logits=logits).log_prob(tokens[:, 1:]) - old[:, 1:]).exp()
    gains = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -gains[answers[:, 1:]].mean()


def draws(folder: str, version: int) -> rlio.InputReader:
    """Whole groups: three of four are of the newest versions of the policy, one is logged."""
    options = {"draw": rlio.WholeEpisodes(), "batch_size": GROUPS, "shuffle": True, "seed": version}
    age = f"weights_seq_no >= {version - OLDEST}"
    sources = {
        "rollouts": rlio.read(f"{folder}/rollouts", filter=age, **options),
        "logged": rlio.read(f"{folder}/logged", **options),
    }
    return rlio.MixedInput(sources, weights={"rollouts": 3, "logged": 1}, batch_size=GROUPS)


def run(folder: str) -> None:
    """Answer, record and learn, from the checkpoint if there is one; prints each group that is recorded."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = np.random.default_rng()
    model, version = Model(), 0
    parts = {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=3e-3)}
    with contextlib.suppress(rlio.errors.DataNotFound):  # The first start.
        version = rlio.load_checkpoint(f"{folder}/checkpoint", **parts)["version"]
    with rlio.ParquetWriter(f"{folder}/rollouts") as writer:
        while version < VERSIONS:
            for group in rollouts(model, version, rng):
                writer.write(group)  # When it returns, no kill loses the group.
                print("recorded", group["eps_id"][0], flush=True)
            writer.flush()  # Readers see the rows.
            with draws(folder, version) as reader:
                for _ in range(UPDATES):
                    loss = grpo_loss(model, reader.sample())
                    parts["optimizer"].zero_grad()
                    loss.backward()
                    parts["optimizer"].step()
            version += 1
            rlio.save_checkpoint(f"{folder}/checkpoint", version=version, **parts)


def killed_and_resumed(folder: str) -> set[int]:
    """Kill the run among the groups of a version, and start it again; returns the groups that it reported."""
    recorded: list[int] = []
    for kill_after in (GROUPS * VERSIONS // 2 + GROUPS // 2, None):
        command = [sys.executable, __file__, folder, "--run"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for line in process.stdout:
            recorded.append(int(line.split()[1]))
            if len(recorded) == kill_after:
                process.kill()
        print(f"{len(recorded)} groups are recorded; exit status {process.wait()}")
    return set(recorded)


def main(folder: str) -> None:
    """Show that no reported group is lost, and how the reward rises."""
    with rlio.ParquetWriter(f"{folder}/logged") as writer:
        for group in rollouts(Scripted(), 0, np.random.default_rng(0)):
            writer.write(group)
    recorded = killed_and_resumed(folder)
    groups = rlio.open_dataset(f"{folder}/rollouts").episodes
    assert recorded <= set(groups["eps_id"].tolist())
    assert set(groups["length"]) == {ANSWERS}
    reached = [groups["return"][groups["policy_version"] == v].mean() / ANSWERS for v in range(VERSIONS)]
    print(f"mean reward: {reached[0]:.2f} at first, {reached[-1]:.2f} at last; no group was lost")


if __name__ == "__main__":
    if sys.argv[2:] == ["--run"]:
        run(sys.argv[1])
    elif len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
