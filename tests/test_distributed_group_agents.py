"""A WorkerGroup whose environments have several agents: joined, counted, killed, recorded, each row once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from counter_agents import AgentCounter, Chosen, check_stream, map_agent

import rlio
from rlio.batch import MultiAgentBatch, concat_samples
from rlio.distributed import FaultTolerance, Fragment, WorkerGroup
from rlio.sampling.config import RolloutConfig
from rlio.sampling.policy_setup import PolicySetup

pytest.importorskip("ray")
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_cluster")]

STEPS = 30


class Weighed(Chosen):
    """Records the weight that it acted with."""

    def __init__(self) -> None:
        self.w = np.zeros(1)

    def compute_actions(self, obs: Any, *args: Any, **options: Any) -> Any:
        actions, state, _ = super().compute_actions(obs, *args, **options)
        return actions, state, {"w_then": np.full(len(obs), self.w[0])}

    def get_weights(self, *, inference_only: bool = False) -> Any:
        return {"w": self.w.copy()}

    def set_weights(self, weights: Any) -> None:
        self.w = np.array(weights["w"])


def ma(batch: Any) -> MultiAgentBatch:
    assert isinstance(batch, MultiAgentBatch)
    return batch


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("group") / "rows")


@pytest.fixture(scope="module")
def pair(ray_cluster: None, output: str) -> Iterator[WorkerGroup]:
    with WorkerGroup(
        AgentCounter,
        {"even": Weighed(), "odd": Weighed()},
        policy_setup=PolicySetup(policy_mapping_fn=map_agent),
        num_workers=2,
        seed=6,
        rollout=RolloutConfig(rollout_fragment_length=STEPS),
        output=output,
        local_worker=True,
        fault_tolerance=FaultTolerance(max_restarts=3),
    ) as group:
        yield group


#: What the tests with one group were served.
SERVED: list[MultiAgentBatch] = []


def served(batch: Any) -> MultiAgentBatch:
    SERVED.append(ma(batch))
    return SERVED[-1]


@pytest.mark.further
def test_a_batch_joins_the_rows_of_each_policy_and_counts_steps_of_environments(pair: WorkerGroup) -> None:
    batch = served(pair.sample())
    assert sorted(batch) == ["even", "odd"]
    assert batch.env_steps() == 2 * STEPS < batch.agent_steps() == sum(map(len, batch.values()))
    assert all(rows[name].flags.writeable for rows in batch.values() for name in rows)
    pair.submit()
    fragments: list[Fragment] = []
    while len(fragments) < 2:
        fragments += pair.ready()
    assert {fragment.worker_index for fragment in fragments} == {1, 2}
    assert [fragment.batch.env_steps() for fragment in fragments] == [STEPS, STEPS]
    for fragment in fragments:
        served(fragment.batch.copy())
    assert [served(pair.sample(n)).env_steps() for n in (7, 2 * STEPS)] == [7, 2 * STEPS]
    # What is cut counts the steps in which it has an agent that acted. Each of the two fragments may begin
    # with the row of an agent that waited for its turn in the fragment before.
    assert 1 <= served(pair.sample()).env_steps() <= 2 * STEPS - 7 + 2
    check_stream(SERVED)


def test_policies_have_weights_of_their_own(pair: WorkerGroup) -> None:
    newest = pair.set_weights({"odd": {"w": np.array([3.0])}})
    # Who acts in turns may have acted before, and its row be over only now.
    rows = served(pair.sample())["odd"]
    assert ((rows["w_then"] == 3.0) == (rows["weights_seq_no"] == newest)).all()
    batch = served(pair.sample())
    assert set(batch["odd"]["w_then"]) == {3.0}
    assert set(batch["odd"]["weights_seq_no"]) == {newest}
    assert set(batch["even"]["w_then"]) == {0.0}
    assert (
        pair.foreach_policy(lambda policy, policy_id: (policy_id, float(policy.w[0])))
        == [[("even", 0.0), ("odd", 3.0)]] * 2
    )
    assert pair.local_worker is not None
    assert sorted(pair.local_worker.group.policies) == ["even", "odd"]
    pair.sync_weights()
    served(pair.sample())
    assert set(served(pair.sample())["odd"]["w_then"]) == {0.0}


@pytest.mark.further
def test_what_a_killed_worker_had_sampled_stays_and_another_goes_on(pair: WorkerGroup) -> None:
    pid = pair.status()[1].pid
    assert pid is not None
    pair.submit()
    os.kill(pid, signal.SIGKILL)
    for _ in range(3):
        assert served(pair.sample()).env_steps() == 2 * STEPS
    assert [loss.worker_index for loss in pair.losses] == [2]


def test_the_data_set_has_every_row_that_was_served_once(pair: WorkerGroup, output: str) -> None:
    """The last of those with this group: it closes it."""
    metrics = pair.get_metrics()
    assert metrics.counts.env_steps % STEPS == 0
    # Exactly, unlike env_steps: a step whose agents' rows lie in two batches counts in both.
    assert metrics.counts.agent_steps == sum(batch.agent_steps() for batch in SERVED)
    check_stream(SERVED)
    replaced = len(pair.losses)
    pair.close()
    with rlio.DatasetReader(output, epochs=1) as reader:
        stored = ma(concat_samples(list(reader)))
    check_stream([stored])
    joined = ma(concat_samples(SERVED))
    for policy_id, rows in joined.items():
        there, here = keys(stored[policy_id]), keys(rows)
        assert len(np.unique(there, axis=0)) == len(there) >= len(here)
        assert len(np.unique(np.concatenate([there, here]), axis=0)) == len(there), "a row is not stored"
    assert len(rlio.open_dataset(output).snapshot()) == 2 + replaced
    assert rlio.verify(output).ok


def keys(rows: Any) -> Any:
    """Which rows they are."""
    return np.stack([rows["eps_id"], rows["agent_index"], rows["t"]], axis=1)


@pytest.mark.further
def test_the_batch_of_a_single_worker_belongs_to_the_caller_too(ray_cluster: None) -> None:
    """Of several policies, and of one that acts for all agents."""
    config = RolloutConfig(rollout_fragment_length=STEPS)
    for policies, options in (
        ({"even": Chosen, "odd": Chosen}, {"policy_setup": PolicySetup(policy_mapping_fn=map_agent)}),
        (Chosen, {}),
    ):
        with WorkerGroup(AgentCounter, policies, num_workers=1, seed=0, rollout=config, **options) as group:
            batch = ma(group.sample())
            assert all(rows[name].flags.writeable for rows in batch.values() for name in rows)
            assert batch.env_steps() == STEPS
