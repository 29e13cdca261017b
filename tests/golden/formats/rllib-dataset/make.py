"""Writes the files beside it: `python make.py`, with ray[rllib]==2.60.0.

`DatasetWriter` of RLlib with ``format="parquet"`` (``output="dataset"``) writes two batches. Infos are as its
sampler leaves them: the first of an episode is nested under the number of its environment and the name of its
agent, for which Arrow has no type. Ray Data then stores the column, or all policies, as pickled objects.
"""

from __future__ import annotations

import shutil
import types
from pathlib import Path

import numpy as np
import ray
from ray.rllib.offline.dataset_writer import DatasetWriter
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch

HERE = Path(__file__).resolve().parent


def batch(rows: int, first: int) -> SampleBatch:
    t = np.arange(rows)
    return SampleBatch(
        obs=np.arange(4 * rows, dtype=np.float32).reshape(rows, 4) + first, actions=np.zeros(rows, np.int64),
        rewards=np.ones(rows, np.float32), terminateds=t == rows - 1, truncateds=np.zeros(rows, bool),
        eps_id=np.full(rows, 7 + first), new_obs=np.ones((rows, 4), np.float32), t=t,
        agent_index=np.zeros(rows, np.int64), unroll_id=np.zeros(rows, np.int64),
        action_dist_inputs=np.ones((rows, 2), np.float32),
        infos=np.array([{0: {"agent0": {"x": 1}}}] + [{"a": i} for i in range(1, rows)], object),
    )  # fmt: skip


def main() -> None:
    ray.init(num_cpus=1, include_dashboard=False)
    several = MultiAgentBatch({"p0": batch(3, 0), "p1": batch(2, 1)}, 3)
    for name, batches in {
        "one-agent": [batch(3, 0), batch(2, 1)],
        "two-policies": [several, several],
    }.items():
        folder = HERE / "written"
        config = {"format": "parquet", "path": str(folder), "max_num_samples_per_file": 2}
        writer = DatasetWriter(types.SimpleNamespace(output_config=config))
        for one in batches:
            writer.write(one)
        (file,) = folder.glob("*.parquet")
        file.rename(HERE / f"{name}.parquet")
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
