"""The code of docs/distributed.md runs: in folders of this machine, for a few rounds, with one worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from further import further
from group_envs import make_known
from linear_policy import LinearPolicy
from pages import blocks

import rlio
from rlio.distributed.group.worker_spec import WorkerId, WorkerSpec
from rlio.sampling.config import RolloutConfig


def block_with(checkout: Path, words: str, folder: Path) -> str:
    (code,) = [each for each in blocks(checkout / "docs" / "distributed.md", "python") if words in each]
    assert '"s3://bucket' in code
    return code.replace('"s3://bucket', f'"{folder.as_posix()}')


@pytest.mark.further
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("policy", ["LinearPolicy", *further("rlio.policies.DQN")])
def test_a_group_samples_learns_and_records(
    policy: str,
    checkout: Path,
    tmp_path: Path,
    ray_cluster: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import ray

    monkeypatch.setattr(ray, "init", lambda: None)  # Ray runs.
    code = block_with(checkout, "import FaultTolerance, WorkerGroup", tmp_path)
    for said, done in (
        ("range(1000)", "range(3)"),
        ("num_workers=4", "num_workers=1"),
        ("rlio.policies.DQN", policy),  # A worker would need two seconds to import torch.
    ):
        assert said in code
        code = code.replace(said, done)
    exec(compile(code, "distributed.md", "exec"), {"LinearPolicy": LinearPolicy})
    assert float(capsys.readouterr().out) > 0
    # Fragments of 100 steps of 8 environments.
    assert len(rlio.open_dataset(tmp_path / "cartpole")) == 3 * 800


@pytest.mark.further
@pytest.mark.xdist_group("ray")
def test_ray_data_reads_writes_and_judges(
    checkout: Path, tmp_path: Path, ray_cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout = RolloutConfig(rollout_fragment_length=500)
    with rlio.RolloutWorker(
        "CartPole-v1", rlio.RandomPolicy(), rollout=rollout, output=tmp_path / "cartpole", seed=0
    ) as worker:
        worker.sample()
    scope: dict[str, Any] = {"rlio": rlio, "relabel": lambda batch: batch, "policy": even}
    for words in ("import read_dataset, write_dataset", "distributed.evaluate_offline("):
        exec(compile(block_with(checkout, words, tmp_path), "distributed.md", "exec"), scope)
    assert len(rlio.open_dataset(tmp_path / "relabelled")) == 500
    assert "v_behavior" in capsys.readouterr().out


def even(obs: Any, actions: Any) -> Any:
    return np.full(len(actions), np.log(0.5))


def test_an_output_that_is_a_function_passes_on_where_the_rows_come_from(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rlio.Pace, "__init__", lambda self: vars(self).update(NOBODY_FOLLOWS))
    code = block_with(checkout, "def paced", tmp_path)
    scope: dict[str, Any] = {"rlio": rlio}
    exec(compile(code[: code.index("group = WorkerGroup")], "distributed.md", "exec"), scope)
    keywords = {"output": scope["paced"], "rollout": RolloutConfig(rollout_fragment_length=10)}
    recipe = WorkerSpec(make_known, LinearPolicy, keywords, num_workers=4, seed=7)
    with recipe.make(WorkerId(2)) as worker:
        worker.sample()
    dataset = rlio.open_dataset(tmp_path / "cartpole")
    (segment,) = dataset.segments
    made_by = dataset.open_shard(segment).provenance
    assert made_by["seed"] == recipe.seed_of(WorkerId(2))
    assert made_by["extra"]["worker_group"]["seed"] == 7
    assert segment.ref.writer.startswith("w00002-")


#: Fields of a `rlio.Pace` that waits for nobody.
NOBODY_FOLLOWS = {"stale_seconds": 60.0, "poll_seconds": 0.5, "ahead": 1_000}
