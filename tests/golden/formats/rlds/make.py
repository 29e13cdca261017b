"""Writes the fixtures of RLDS: `python make.py` with tensorflow-cpu 2.21.0 and tensorflow-datasets 4.9.10.

Step t of episode e holds 100 e + t, and its action and reward 100 e + t + 0.5. The last step of an episode
has an observation and, as RLDS has it, an action and a reward that mean nothing: zeros.
"""

import shutil
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds

FOLDER = Path(__file__).parent
F = tfds.features


class _Builder(tfds.core.GeneratorBasedBuilder):
    """Its splits."""

    def _split_generators(self, dl_manager):
        return {name: self._generate_examples(episodes) for name, episodes in self.episodes}

    def _generate_examples(self, episodes):
        for number in episodes:
            yield f"{number:03d}", self.episode(number)


class Counts(_Builder):
    """Every kind of feature that rlio reads; episode 1 is cut, the others terminate."""

    VERSION = tfds.core.Version("1.0.0")
    episodes = (("train", (0, 1, 2)), ("test", (3, 4)))

    def _info(self):
        step = {
            "observation": {
                "state": F.Tensor(shape=(2,), dtype=np.float32),
                "grid": F.Tensor(shape=(2, 3), dtype=np.uint8, encoding="zlib"),
                "far": F.Tensor(shape=(), dtype=np.int64),
                "camera": F.Image(shape=(16, 12, 3), encoding_format="png"),
                "wrist": F.Image(shape=(8, 8, 3), encoding_format="jpeg"),
            },
            "action": F.Tensor(shape=(2,), dtype=np.float64, encoding="bytes"),
            "reward": F.Scalar(dtype=np.float32),
            "discount": F.Scalar(dtype=np.float32),
            "is_first": F.Scalar(dtype=np.bool_),
            "is_last": F.Scalar(dtype=np.bool_),
            "is_terminal": F.Scalar(dtype=np.bool_),
            "language_instruction": F.Text(),
        }
        features = {
            "steps": F.Dataset(step),
            "episode_metadata": {"file_path": F.Text(), "number": F.Scalar(dtype=np.int32)},
        }
        return tfds.core.DatasetInfo(builder=self, features=F.FeaturesDict(features))

    def episode(self, number):
        steps = (4, 3, 5, 2, 3)[number]
        values = range(100 * number, 100 * number + steps)
        return {
            "steps": [self.step(number, t, value, t == steps - 1) for t, value in enumerate(values)],
            "episode_metadata": {"file_path": f"/data/{number}", "number": number},
        }

    def step(self, number, t, value, last):
        return {
            "observation": {
                "state": np.array([value, -value], np.float32),
                "grid": np.full((2, 3), value % 256, np.uint8),
                "far": -(2**40) - value,
                "camera": np.full((16, 12, 3), value % 256, np.uint8),
                "wrist": np.full((8, 8, 3), value % 256, np.uint8),
            },
            "action": np.array([0.0, 0.0] if last else [value + 0.5, 1 / 3]),
            "reward": 0.0 if last else value + 0.5,
            "discount": 0.0 if last and number != 1 else 1.0,
            "is_first": t == 0,
            "is_last": last,
            "is_terminal": last and number != 1,
            "language_instruction": f"count {value}",
        }


class Parts(_Builder):
    """No is_terminal and no rewards: 0 ends, 1 is its last observation alone, 2 has not ended."""

    VERSION = tfds.core.Version("0.1.0")
    episodes = (("train", (0, 1, 2)),)

    def _info(self):
        step = {
            "observation": F.Tensor(shape=(1,), dtype=np.float32),
            "action": F.Scalar(dtype=np.int32),
            "is_first": F.Scalar(dtype=np.bool_),
            "is_last": F.Scalar(dtype=np.bool_),
            "picture": F.Image(shape=(None, None, 3)),
        }
        return tfds.core.DatasetInfo(builder=self, features=F.FeaturesDict({"steps": F.Dataset(step)}))

    def episode(self, number):
        steps = (3, 1, 2)[number]
        return {
            "steps": [
                {
                    "observation": np.array([100 * number + t], np.float32),
                    "action": 100 * number + t,
                    "is_first": t == 0,
                    "is_last": t == steps - 1 and number != 2,
                    "picture": np.full((2, 3, 3), 100 * number + t, np.uint8),
                }
                for t in range(steps)
            ]
        }


class Lists(_Builder):
    """Sequences in steps: step t of episode e has t objects and (e + t) % 3 tokens; episode 2 has none."""

    VERSION = tfds.core.Version("1.0.0")
    episodes = (("train", (0, 1, 2)),)

    def _info(self):
        objects = {"box": F.Tensor(shape=(2,), dtype=np.float32), "kind": F.Scalar(dtype=np.uint8)}
        step = {
            "observation": {"objects": F.Sequence(objects)},
            "action": F.Scalar(dtype=np.int32),
            "tokens": F.Sequence(np.int64),
            "is_last": F.Scalar(dtype=np.bool_),
            "is_terminal": F.Scalar(dtype=np.bool_),
        }
        return tfds.core.DatasetInfo(builder=self, features=F.FeaturesDict({"steps": F.Dataset(step)}))

    def episode(self, number):
        steps = (4, 3, 2)[number]
        return {
            "steps": [
                {
                    "observation": {
                        "objects": {
                            "box": [[100 * number + t, k] for k in range(t if number < 2 else 0)],
                            "kind": [*range(t if number < 2 else 0)],
                        }
                    },
                    "action": 100 * number + t,
                    "tokens": [100 * number + t] * ((number + t) % 3 if number < 2 else 0),
                    "is_last": t == steps - 1,
                    "is_terminal": t == steps - 1,
                }
                for t in range(steps)
            ]
        }


for builder in (Counts, Parts, Lists):
    made = builder(data_dir=FOLDER / "work")
    made.download_and_prepare(
        download_config=tfds.download.DownloadConfig(num_shards=2 if builder is Counts else 1)
    )
    target = FOLDER / made.name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(made.data_dir, target / made.data_path.name)
shutil.rmtree(FOLDER / "work")
