# ruff: noqa: UP032 (Python 3.7)
"""Writes the fixtures of RLlib of 2019, which packed columns with `pyarrow.serialize`.

`python make.py` with Python 3.7, ray 0.7.6, lz4 4.3.2, numpy 1.17.5 and gym 0.12.1; and
`python make.py packed` with each of ray 0.6.0, 0.6.3, 0.6.6 and 0.8.0, which have other builds of pyarrow.

Observation, action and reward of a row say its number.
"""

import base64
import os
import sys

import lz4.frame
import numpy as np
import ray

import pyarrow  # isort: skip # ray's own, which it puts on the path.

FOLDER = os.path.dirname(os.path.abspath(__file__))


def pack(value):
    """As ray.rllib.utils.compression of these versions."""
    data = pyarrow.serialize(value).to_buffer().to_pybytes()
    return base64.b64encode(lz4.frame.compress(data)).decode("ascii")


def write(values):
    with open(os.path.join(FOLDER, "packed-{}.txt".format(ray.__version__)), "w") as file:
        for name, value in sorted(values.items()):
            file.write("{} {}\n".format(name, pack(value)))


def batch(first, rows, **more):
    values = np.arange(first, first + rows)
    columns = {
        "obs": np.stack([values, -values, values / 3], 1).astype(np.float32),
        "new_obs": np.stack([values + 1, -values - 1, (values + 1) / 3], 1).astype(np.float32),
        "actions": values % 5,
        "rewards": values + 0.5,
        "dones": values == first + rows - 1,
        "eps_id": np.full(rows, first),
        "t": np.arange(rows),
    }
    columns.update(more)
    return SampleBatch(columns)


if "packed" in sys.argv:
    write(
        {
            "big": np.random.RandomState(0).rand(50, 7),
            "uint8": np.arange(6, dtype="u1").reshape(2, 3),
            "dict": {"a": np.arange(3)},
        }
    )
    sys.exit()

from ray.rllib.evaluation import SampleBatch  # noqa: E402
from ray.rllib.offline import JsonWriter  # noqa: E402

for name in os.listdir(FOLDER):
    if name.endswith(".json"):
        os.remove(os.path.join(FOLDER, name))
writer = JsonWriter(FOLDER, compress_columns=["obs", "new_obs", "actions"])
writer.write(batch(0, 4))
writer.write(batch(10, 3))
for name in os.listdir(FOLDER):
    if name.endswith(".json"):
        os.rename(
            os.path.join(FOLDER, name), os.path.join(FOLDER, "output-2019-10-28_00-00-00_worker-0_0.json")
        )

# Packed values, beside what they hold: every dtype and order of arrays, and what is no array.
arrays = {
    name: np.arange(6).reshape(2, 3).astype(name)
    for name in (
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "float32",
        "float64",
    )
}
arrays["empty"] = np.zeros((0, 3), np.float32)
arrays["scalar"] = np.array(7.5)
arrays["fortran"] = np.asfortranarray(np.arange(6.0).reshape(2, 3))
arrays["strided"] = np.arange(24.0).reshape(4, 6)[::2, ::2]
arrays["big"] = np.random.RandomState(0).rand(50, 7)
others = {
    "bool": np.array([True, False]),
    "objects": np.array([{"a": 1}, {"b": 2}]),
    "text": np.array(["a", "bc"]),
    "dict": {"a": np.arange(3)},
    "list": [np.arange(3), np.arange(2)],
    "number": 5,
}
write(dict(arrays, **others))
