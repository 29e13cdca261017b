"""Stop training in the middle of an epoch and go on where it stopped, in another process.

Run:  python examples/resume.py
"""

import json
import tempfile
from pathlib import Path

import numpy as np

import rlio


def open_input(folder: str) -> rlio.InputReader:
    """The same arguments each time: a state holds positions, not options."""
    return rlio.read(
        {f"{folder}/expert": 0.75, f"{folder}/random": 0.25}, batch_size=64, shuffle=True, seed=0
    )


def main(folder: str) -> None:
    """Record two data sets, read some of a shuffled mix of them, and resume."""
    for name, reward in (("expert", 1.0), ("random", 0.0)):
        with rlio.ParquetWriter(f"{folder}/{name}") as writer:
            writer.write(rlio.SampleBatch(t=np.arange(1000), rewards=np.full(1000, reward)))
    with open_input(folder) as reader:
        for _ in range(10):
            reader.sample()
        Path(folder, "state.json").write_text(json.dumps(reader.state_dict()))
        expected = reader.sample()
    with open_input(folder) as resumed:
        resumed.load_state_dict(json.loads(Path(folder, "state.json").read_text()))
        assert resumed.sample().equals(expected)
    print("the resumed reader gave the same batch:", expected)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(temporary)
