"""Writes the fixture of Hugging Face: `python make.py` with datasets 5.2.0 installed.

Row t of episode e has the state [100 e + t, e], the action t % 3 and the reward 1000 e + t. The episodes of
the split train have 3, 1 and 5 steps, and lie in two files: the third one goes on in the second file.
"""

from pathlib import Path

from datasets import Array2D, Dataset, DatasetDict, Features, List, Value

FOLDER = Path(__file__).parent
FEATURES = Features(
    {
        "observation.state": List(Value("float32"), length=2),
        "action": Value("int32"),
        "next": {"reward": Value("float64"), "done": Value("bool")},
        "episode_index": Value("int64"),
        "image": Array2D((2, 2), "uint8"),
    }
)


def split(lengths: tuple[int, ...]) -> Dataset:
    rows = [(e, t, t == steps - 1) for e, steps in enumerate(lengths, 1) for t in range(steps)]
    return Dataset.from_dict(
        {
            "observation.state": [[100 * e + t, e] for e, t, _ in rows],
            "action": [t % 3 for _, t, _ in rows],
            "next": [{"reward": 1000 * e + t, "done": last and e == 2} for e, t, last in rows],
            "episode_index": [e for e, _, _ in rows],
            "image": [[[e, t], [t, e]] for e, t, _ in rows],
        },
        features=FEATURES,
    )


if __name__ == "__main__":
    splits = DatasetDict({"train": split((3, 1, 5)), "test": split((2,))})
    splits.save_to_disk(FOLDER / "saved", num_shards={"train": 2, "test": 1})
