"""What rlio reads of a buffer that Tianshou saves is what the buffer itself gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import rlio

tianshou = pytest.importorskip("tianshou", reason="Tianshou is not installed")


@pytest.mark.parametrize("steps", [5, 16, 23])
def test_rows_are_those_of_the_buffer_in_its_order(steps: int, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    buffer = tianshou.data.ReplayBuffer(16)
    for t in range(steps):
        buffer.add(
            tianshou.data.Batch(
                obs=random.standard_normal(3), act=random.integers(4), rew=random.standard_normal(),
                terminated=t % 7 == 6, truncated=t % 7 == 3, obs_next=random.standard_normal(3), info={},
            )
        )  # fmt: skip
    buffer.save_hdf5(str(tmp_path / "a.hdf5"))
    expected, _ = buffer.sample(0)  # All rows, oldest first.
    with rlio.read(tmp_path / "a.hdf5", epochs=1) as reader:
        found = rlio.concat_samples(list(reader))
    names = {"obs": "obs", "act": "actions", "rew": "rewards", "obs_next": "new_obs"}
    names |= {"terminated": "terminateds", "truncated": "truncateds"}
    for theirs, ours in names.items():
        np.testing.assert_array_equal(expected[theirs], found[ours])
