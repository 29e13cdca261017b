"""Stop training in the middle of an epoch and continue from there in another process.

One folder holds the module, its optimizer, the reader and the number of steps.

Run:  python examples/resume.py
"""

import tempfile

import numpy as np
import torch

import rlio


def open_input(folder: str) -> rlio.InputReader:
    """Open the input with the same arguments each time, because a state holds positions, not options."""
    return rlio.read(
        {f"{folder}/expert": 0.75, f"{folder}/random": 0.25}, batch_size=64, shuffle=True, seed=0
    )


def train(folder: str, *, steps: int) -> float:
    """Learn to predict rewards for some steps, from the checkpoint if it exists; returns the last loss."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())
    step, loss = 0, torch.zeros(())
    with open_input(folder) as reader:
        try:
            parts = {"model": model, "optimizer": optimizer, "reader": reader}
            step = rlio.load_checkpoint(f"{folder}/checkpoint", **parts)["step"]
        except rlio.errors.DataNotFound:
            torch.nn.init.zeros_(model.weight)
            torch.nn.init.zeros_(model.bias)
        for _ in range(steps):
            batch = reader.sample().to_torch()
            loss = (model(batch["t"][:, None] / 1000) - batch["rewards"][:, None]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        rlio.save_checkpoint(f"{folder}/checkpoint", step=step, **parts)
    print(f"step {step}: loss {loss.item():.6f}")
    return loss.item()


def main() -> None:
    """Record two data sets, and train on a mix of them: in one run, and with a stop in the middle."""
    losses = []
    for parts in ((20,), (10, 10)):
        with tempfile.TemporaryDirectory() as folder:
            for name, reward in (("expert", 1.0), ("random", 0.0)):
                with rlio.ParquetWriter(f"{folder}/{name}") as writer:
                    t = np.arange(1000, dtype=np.float32)
                    writer.write(rlio.SampleBatch(t=t, rewards=np.full(1000, reward, np.float32)))
            losses.append([train(folder, steps=steps) for steps in parts][-1])
    assert losses[0] == losses[1]
    print("the run that was stopped ended where the other did")


if __name__ == "__main__":
    main()
