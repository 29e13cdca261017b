"""Data-parallel learning: two processes on this machine learn as one."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from rlio.batch import SampleBatch, concat_samples
from rlio.errors import OptionError
from rlio.policies.data_parallel import setup_torch_data_parallel
from rlio.policies.dqn import DQN
from rlio.policies.gradients import average_gradients
from rlio.policies.random_policy import RandomPolicy
from rlio.policies.torch_policy import TorchPolicy


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def bound(policy: Any, seed: int = 0) -> Any:
    policy.bind(Box(-1.0, 1.0, (3,), np.float32), Discrete(2), seed)
    return policy


def learn_together(rank: int, port: int) -> list[dict[str, list[Any]]]:
    """One of two processes: with a seed and rows of its own, and every second time gradients by hand.

    Returns:
        The weights at first and after each update, as plain lists.
    """
    torch.set_num_threads(1)
    policy = bound(DQN(hidden=(8,), target_update_every=3, max_grad_norm=0.5), seed=rank)
    url = f"tcp://127.0.0.1:{port}"
    setup_torch_data_parallel([policy], url, rank, 2, timeout=240)
    # A second time, as for a policy that was added later.
    setup_torch_data_parallel([policy], url, rank, 2)
    with pytest.raises(OptionError, match=f"rank {rank} of 2 already"):
        setup_torch_data_parallel([policy], url, 0, 1)
    found = [policy.get_weights()]
    for i in range(6):
        batch = dqn_rows(seed=10 * i + rank)
        if i % 2:
            gradients, _ = policy.compute_gradients(batch)
            policy.apply_gradients(gradients)
        else:
            policy.learn_on_batch(batch)
        found.append(policy.get_weights())
    torch.distributed.destroy_process_group()
    return [{name: value.tolist() for name, value in weights.items()} for weights in found]


def dqn_rows(seed: int, n: int = 8) -> SampleBatch:
    rng = np.random.default_rng(seed)
    return SampleBatch(
        obs=rng.normal(size=(n, 3)).astype(np.float32),
        new_obs=rng.normal(size=(n, 3)).astype(np.float32),
        actions=rng.integers(0, 2, n),
        rewards=rng.normal(size=n).astype(np.float32),
        terminateds=np.zeros(n, bool),
    )


@pytest.mark.further
def test_two_processes_learn_as_one_on_the_rows_of_both() -> None:
    """Row "setup_torch_data_parallel(url, rank, world, backend)" (2.2): gloo on 127.0.0.1."""
    port = free_port()
    command = [sys.executable, __file__, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parent) as child:
        found = [learn_together(0, port)]
        said, _ = child.communicate(timeout=240)
    assert child.returncode == 0
    found.append(json.loads(said))
    alone = bound(DQN(hidden=(8,), target_update_every=3, max_grad_norm=0.5), seed=0)
    for step in range(7):
        if step:
            parts = [dqn_rows(seed=10 * (step - 1) + rank) for rank in (0, 1)]
            alone.learn_on_batch(concat_samples(parts))
        assert found[0][step] == found[1][step], "weights are equal after every update"
        assert all(
            np.allclose(value, found[0][step][name], atol=1e-5) for name, value in alone.get_weights().items()
        ), "and those of one process that has the rows of both"


def test_learning_together_is_refused_where_it_cannot_be() -> None:
    policy = bound(TorchPolicy())
    for options, message in (
        (([RandomPolicy()], "tcp://127.0.0.1:1", 0, 2), "expected a TorchPolicy"),
        (([policy], "tcp://127.0.0.1:1", 2, 2), "world_rank=2"),
        (([policy], "tcp://127.0.0.1:1", 0, 2, "carrier pigeon"), "backend="),
    ):
        with pytest.raises(OptionError, match=message):
            setup_torch_data_parallel(*options)  # type: ignore[arg-type]
    assert policy.distributed_world_size == 1


if __name__ == "__main__":
    json.dump(learn_together(1, int(sys.argv[1])), sys.stdout)


def test_gradients_on_two_devices_are_averaged_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.device] = []
    monkeypatch.setattr("torch.distributed.all_reduce", lambda flat: sent.append(flat.device))
    here = torch.nn.Parameter(torch.ones(2))
    here.grad = torch.full((2,), 3.0)
    average_gradients([here, torch.nn.Parameter(torch.ones(2, device="meta"))], rows=2)
    assert [device.type for device in sent] == ["cpu", "meta"]
    assert here.grad.tolist() == [3.0, 3.0]
    average_gradients([], rows=2)
    assert len(sent) == 2
