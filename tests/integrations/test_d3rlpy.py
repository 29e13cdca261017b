"""What d3rlpy says of the file that rlio writes, and rlio of d3rlpy's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import rlio

d3rlpy = pytest.importorskip("d3rlpy", reason="d3rlpy is not installed")

GOLDEN = Path(__file__).parents[1] / "golden/formats/d3rlpy/buffer.h5"


def record(root: Path, *, discrete: bool) -> list[rlio.SampleBatch]:
    random = np.random.default_rng(0)
    made = []
    with rlio.ParquetWriter(root, spool=None) as writer:
        for number, steps in enumerate((5, 30, 12)):
            obs = random.standard_normal((steps + 1, 3)).astype(np.float32)
            actions = random.integers(0, 4, steps) if discrete else random.uniform(-1, 1, (steps, 2))
            last = np.arange(steps) == steps - 1
            rows = rlio.SampleBatch(
                obs=obs[:-1], new_obs=obs[1:], actions=actions, rewards=random.standard_normal(steps),
                terminateds=last & (number != 1), truncateds=last & (number == 1),
                eps_id=np.full(steps, number), t=np.arange(steps),
            )  # fmt: skip
            made.append(rows)
            writer.write(rows)
    return made


@pytest.mark.parametrize("discrete", [True, False])
def test_d3rlpy_loads_what_rlio_writes(discrete: bool, tmp_path: Path) -> None:
    made = record(tmp_path / "a", discrete=discrete)
    rlio.convert(tmp_path / "a", tmp_path / "a.h5", to="d3rlpy", prove=True)
    with open(tmp_path / "a.h5", "rb") as file:
        buffer = d3rlpy.dataset.ReplayBuffer.load(file, d3rlpy.dataset.InfiniteBuffer())
    assert len(buffer.episodes) == len(made)
    for found, rows in zip(buffer.episodes, made, strict=True):
        np.testing.assert_array_equal(found.observations, rows["obs"])
        np.testing.assert_array_equal(found.actions.reshape(rows["actions"].shape), rows["actions"])
        np.testing.assert_array_equal(found.rewards[:, 0], rows["rewards"])
        assert found.terminated == rows["terminateds"][-1]
    expected = d3rlpy.constants.ActionSpace.DISCRETE if discrete else d3rlpy.constants.ActionSpace.CONTINUOUS
    assert buffer.dataset_info.action_space == expected
    assert buffer.sample_transition_batch(8).observations.shape == (8, 3)


def test_what_d3rlpy_dumps_again_is_equal(tmp_path: Path) -> None:
    record(tmp_path / "a", discrete=False)
    rlio.convert(tmp_path / "a", tmp_path / "a.h5", to="d3rlpy")
    with open(tmp_path / "a.h5", "rb") as file:
        buffer = d3rlpy.dataset.ReplayBuffer.load(file, d3rlpy.dataset.InfiniteBuffer())
    with open(tmp_path / "b.h5", "w+b") as file:
        buffer.dump(file)
    with rlio.read(tmp_path / "a.h5", epochs=1) as ours, rlio.read(tmp_path / "b.h5", epochs=1) as theirs:
        assert rlio.concat_samples(list(ours)).equals(rlio.concat_samples(list(theirs)))


def test_what_d3rlpy_wrote_is_equal_after_a_data_set_of_rlio(tmp_path: Path) -> None:
    rlio.convert(GOLDEN, tmp_path / "rlio", prove=True)
    rlio.convert(tmp_path / "rlio", tmp_path / "a.h5", to="d3rlpy", prove=True)
    before, after = (load(path) for path in (GOLDEN, tmp_path / "a.h5"))
    assert len(before.episodes) == len(after.episodes)
    for one, other in zip(before.episodes, after.episodes, strict=True):
        for name in ("observations", "actions", "rewards"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
        assert one.terminated == other.terminated
    assert before.dataset_info.action_space == after.dataset_info.action_space
    assert before.dataset_info.action_size == after.dataset_info.action_size


def load(path: Path) -> d3rlpy.dataset.ReplayBuffer:
    with open(path, "rb") as file:
        return d3rlpy.dataset.ReplayBuffer.load(file, d3rlpy.dataset.InfiniteBuffer())
