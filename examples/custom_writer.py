"""A custom writer: a worker writes to it as to a data set.

Run:  python examples/custom_writer.py
"""

import sys

import rlio


class ReturnsWriter(rlio.OutputWriter):
    """Collects the returns of the episodes that it sees, and writes them as lines of text."""

    def __init__(self, stream) -> None:
        super().__init__()
        self.stream = stream
        self.running: dict[int, float] = {}
        self.lines: list[str] = []

    def _write(self, batch: rlio.SampleBatch) -> None:
        for rows in batch.split_by_episode():
            episode = int(rows["eps_id"][0])
            total = self.running.pop(episode, 0.0) + float(rows["rewards"].sum())
            if rows.is_terminated_or_truncated():
                self.lines.append(f"episode return {total:.0f}")
            else:
                self.running[episode] = total

    def _flush(self) -> None:
        for line in self.lines:
            print(line, file=self.stream)
        self.lines.clear()


def main() -> None:
    """Sample 300 steps, and write them as returns and as a data set."""
    writer = rlio.TeeWriter(ReturnsWriter(sys.stdout), rlio.ParquetWriter("memory://custom-writer"))
    config = rlio.RolloutConfig(rollout_fragment_length=100)
    with rlio.RolloutWorker(
        "CartPole-v1", rlio.RandomPolicy(), output=writer, rollout=config, seed=0
    ) as worker:
        for _ in range(3):
            worker.sample()
    print(len(rlio.open_dataset("memory://custom-writer")), "steps are stored")


if __name__ == "__main__":
    main()
