"""A run that was recorded twice is told; ids that two writers may both use for other episodes are not."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest
from stored_batches import fresh_root, numbered, store

import rlio
from rlio import RandomPolicy, RolloutConfig, RolloutWorker
from rlio.maintenance.findings import Finding


def record(root: str, seed: int, state: Any = None) -> Any:
    """A run of 40 steps; gives its state at the end."""
    config = RolloutConfig(rollout_fragment_length=40)
    with RolloutWorker("CartPole-v1", RandomPolicy(), rollout=config, output=root, seed=seed) as worker:
        if state is not None:
            worker.load_state_dict(state)
        worker.sample()
        return worker.state_dict()


def told(root: str) -> list[Finding]:
    report = rlio.verify(root)
    assert report.ok
    return [finding for finding in report.findings if finding.code == "recorded-twice"]


def test_a_run_that_is_started_again_with_its_seed_is_told_with_both_writers() -> None:
    root = fresh_root()
    record(root, seed=0)
    record(root, seed=1)
    assert told(root) == []
    record(root, seed=0)
    (finding,) = told(root)
    assert finding.severity == "warning"
    first, second = (
        entry.writer for entry in rlio.verify(root).ledger if repr(entry.writer) in finding.message
    )
    assert f"--before {second}=ROW" in finding.message
    assert first < second


def test_a_run_that_goes_on_from_a_saved_state_repeats_nothing() -> None:
    root = fresh_root()
    state = record(root, seed=0)
    record(root, seed=0, state=state)
    assert told(root) == []


@pytest.mark.parametrize("name", [7, "episode 7"])
def test_counters_and_names_may_be_those_of_other_episodes(name: Any) -> None:
    root = fresh_root()
    for _ in range(2):
        store(numbered(5, eps_id=np.array([name] * 5)), root=root)
    assert told(root) == []


def test_uuids_are_as_good_as_our_own_ids() -> None:
    root, name = fresh_root(), str(uuid.UUID(int=7))
    for _ in range(2):
        store(numbered(5, eps_id=np.array([name] * 5, object)), root=root)
    assert len(told(root)) == 1


def test_several_shards_and_agents_of_one_writer_are_no_repetition() -> None:
    root = fresh_root()
    eps_id = np.full(40, 1 << 40)
    store(numbered(40, eps_id=eps_id), root=root, roll=rlio.Roll(max_rows=10, max_seconds=None))
    assert told(root) == []
