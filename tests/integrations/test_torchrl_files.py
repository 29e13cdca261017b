"""What rlio reads of a buffer that TorchRL dumps is what the buffer itself gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlio

torchrl: Any = pytest.importorskip("torchrl.data", reason="TorchRL is not installed")
tensordict: Any = pytest.importorskip("tensordict", reason="tensordict is not installed")


@pytest.mark.parametrize("steps", [5, 16, 41])
def test_rows_are_those_of_the_buffer_in_its_order(steps: int, tmp_path: Path) -> None:
    import torch

    torch.manual_seed(0)
    buffer = torchrl.ReplayBuffer(storage=torchrl.LazyMemmapStorage(16), batch_size=4)
    flag = {name: torch.zeros(1, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
    for t in range(steps):
        ends = {"terminated": torch.tensor([t % 7 == 6]), "truncated": torch.tensor([t % 5 == 4])}
        after = {"observation": torch.randn(3), "reward": torch.randn(1), **ends}
        after["done"] = ends["terminated"] | ends["truncated"]
        row = {"observation": torch.randn(3), "action": torch.randint(4, ()), "next": after, **flag}
        buffer.add(tensordict.TensorDict(row, []))
    buffer.dumps(tmp_path / "buffer")
    again = torchrl.ReplayBuffer(storage=torchrl.LazyMemmapStorage(16))
    again.extend(buffer[:])
    again.loads(tmp_path / "buffer")
    expected = again[:]
    begin = steps % 16 if steps >= 16 else 0
    with rlio.read(tmp_path / "buffer", epochs=1) as reader:
        found: Any = rlio.concat_samples(list(reader))
    pairs = {"observation": "obs", "action": "actions", ("next", "observation"): "new_obs"}
    pairs |= {("next", "reward"): "rewards", ("next", "terminated"): "terminateds"}
    for theirs, ours in pairs.items():
        values = np.roll(expected[theirs].numpy(), -begin, axis=0)
        np.testing.assert_array_equal(values.reshape(found[ours].shape), found[ours])
