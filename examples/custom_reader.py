"""A custom reader: it mixes, shuffles, resumes and records like the library's readers.

Run:  python examples/custom_reader.py
"""

import json

import numpy as np

import rlio


class CsvReader(rlio.InputReader):
    """Returns the lines of CSV text, ten at a time, each once."""

    # It can seek, so mixtures and shuffles of it resume exactly.
    replayable = True

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.at = 0

    def _next(self) -> rlio.SampleBatch:
        if self.at == len(self.lines):
            raise rlio.EndOfData("all lines have been read")
        lines = self.lines[self.at : self.at + 10]
        self.at += len(lines)
        numbers = np.array([[float(number) for number in line.split(",")] for line in lines])
        return rlio.SampleBatch(obs=numbers[:, :2].astype(np.float32), rewards=numbers[:, 2])

    def _position(self) -> dict[str, int]:
        return {"line": self.at}

    def _seek(self, position: dict[str, int]) -> None:
        self.at = position["line"]


def main() -> None:
    """Read by name, in a mixture, and resume."""
    text = "\n".join(f"{number},{number / 10},{number % 2}" for number in range(100))
    rlio.register_input("csv", lambda context: CsvReader(text))
    rlio.register_input("zeros", lambda context: CsvReader("\n".join(["0,0,0"] * 100)))

    def open_input() -> rlio.InputReader:
        return rlio.read({"csv": 0.75, "zeros": 0.25}, batch_size=16)

    with open_input() as reader:
        reader.sample()
        state = json.dumps(reader.state_dict())
        expected = reader.sample()
    with open_input() as resumed:
        resumed.load_state_dict(json.loads(state))
        assert resumed.sample().equals(expected)
    print("12 of 16 rows are from the file:", expected["obs"][:, 0].tolist())


if __name__ == "__main__":
    main()
