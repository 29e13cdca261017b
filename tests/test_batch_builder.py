"""`BatchBuilder`, `MultiAgentBatchBuilder`: the rows that came, in the order in which they came."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from rlio import BatchBuilder, DatasetReader, MultiAgentBatchBuilder, ParquetWriter, SampleBatch
from rlio.errors import OptionError, SchemaError


def test_numbers_without_a_dtype_are_what_policies_compute_in() -> None:
    builder = BatchBuilder()
    builder.add_values(a=1, b=1.5, c=True, d=[1.0, 2.0], e=np.float64(1), f=np.uint8(3), g=np.zeros(2), h="x")
    builder.add_values(a=2, b=2, c=False, d=[3.0, 4.0], e=np.float64(2), f=np.uint8(4), g=np.ones(2), h=None)
    batch = builder.build_and_reset()
    dtypes = {name: values.dtype.name for name, values in batch.items()}
    assert dtypes == {
        "a": "int64", "b": "float32", "c": "bool", "d": "float32", "e": "float64", "f": "uint8",
        "g": "float64", "h": "object", "unroll_id": "int64",
    }  # fmt: skip
    assert_array_equal(batch["d"], [[1, 2], [3, 4]])
    assert batch["h"].tolist() == ["x", None]


def test_rows_and_batches_keep_their_order() -> None:
    builder = BatchBuilder()
    builder.add_values(t=0)
    builder.add_batch(SampleBatch(t=[1, 2]))
    builder.add_values(t=3)
    builder.add_values(t=4)
    assert len(builder) == builder.count == 5
    assert_array_equal(builder.build_and_reset()["t"], range(5))
    assert len(builder) == len(builder.build_and_reset()) == 0


def test_counting_rows_does_not_visit_the_batches() -> None:
    visits = 0

    class Visited(SampleBatch):
        def __len__(self) -> int:
            nonlocal visits
            visits += 1
            return super().__len__()

    builder = BatchBuilder()
    for _ in range(3):
        builder.add_batch(Visited(t=[0, 1]))
    builder.add_values(t=2)
    visits = 0
    assert len(builder) == builder.count == 7
    assert visits == 0
    builder.build_and_reset()
    assert len(builder) == 0


def test_a_row_is_copied() -> None:
    obs = np.zeros(2)
    builder = BatchBuilder()
    for number in range(3):
        obs[:] = number
        builder.add_values(obs={"where": obs})
    assert_array_equal(builder.build_and_reset()["obs"]["where"], [[0, 0], [1, 1], [2, 2]])


def test_lists_and_tensors_are_copied_too() -> None:
    import torch

    obs, tensor, infos = [0.0, 0.0], torch.zeros(2, requires_grad=True), {"seen": [0]}
    builder = BatchBuilder()
    for number in range(3):
        obs[:] = [float(number)] * 2
        infos["seen"][0] = number
        with torch.no_grad():
            tensor += number
        builder.add_values(obs=obs, logits=tensor, infos=infos)
    batch = builder.build_and_reset()
    assert_array_equal(batch["obs"], [[0, 0], [1, 1], [2, 2]])
    assert_array_equal(batch["logits"], [[0, 0], [1, 1], [3, 3]])
    assert batch["logits"].dtype == np.float32
    assert [info["seen"] for info in batch["infos"]] == [[0], [1], [2]]


@pytest.mark.parametrize("ids", [[2**63], [1, 2**63], [-1, 2**64], [2**200, 3]])
def test_whole_numbers_beyond_int64_are_not_made_floats_in_silence(ids: list[int]) -> None:
    builder = BatchBuilder()
    for eps_id in ids:
        builder.add_values(eps_id=eps_id)
    with pytest.raises(SchemaError, match="beyond int64"):
        builder.build_and_reset()


def test_a_row_that_cannot_be_copied_leaves_the_others_whole() -> None:
    class Odd:
        """A tensor that has no memory."""

        __array__ = np.zeros(1).__array__

        def detach(self) -> Any:
            raise RuntimeError("no")

    builder = BatchBuilder()
    builder.add_values(a=1, b=1)
    with pytest.raises(RuntimeError):
        builder.add_values(a=2, b=Odd())
    builder.add_values(a=3, b=3)
    assert_array_equal(builder.build_and_reset()["a"], [1, 3])


def test_unroll_ids_tell_episodes_and_batches_apart() -> None:
    builder = BatchBuilder()
    found = []
    for eps_ids in ([5, 5, 6], [6, 7]):
        for eps_id in eps_ids:
            builder.add_values(eps_id=eps_id)
        found += builder.build_and_reset()["unroll_id"].tolist()
    assert found == [0, 0, 1, 2, 3]
    builder.add_values(unroll_id=9)
    assert builder.build_and_reset()["unroll_id"].tolist() == [9]
    assert "unroll_id" not in _one(BatchBuilder(unroll_ids=False))


def _one(builder: BatchBuilder) -> SampleBatch:
    builder.add_values(t=0)
    return builder.build_and_reset()


def test_nested_values_are_nested_columns() -> None:
    builder = BatchBuilder()
    for number in range(2):
        builder.add_values(obs={"a": number, "b": (np.full(2, number, np.float32), 1.0)}, infos={"n": number})
    batch = builder.build_and_reset()
    assert_array_equal(batch["obs"]["b"][0], [[0, 0], [1, 1]])
    assert batch["infos"].tolist() == [{"n": 0}, {"n": 1}]


def test_rows_that_do_not_go_together_are_refused_and_stay() -> None:
    builder = BatchBuilder()
    builder.add_values(obs=[1.0], t=0)
    with pytest.raises(SchemaError, match=r"\['obs'\].*\['obs', 't'\]"):
        builder.add_values(obs=[1.0])
    builder.add_values(obs=[1.0, 2.0], t=1)
    with pytest.raises(SchemaError, match="different shapes"):
        builder.build_and_reset()
    assert len(builder) == 2
    other = BatchBuilder()
    other.add_values(obs={"a": 1})
    other.add_values(obs={"b": 1})
    with pytest.raises(SchemaError, match="nested") as caught:
        other.build_and_reset()
    assert caught.value.column == "obs"


def test_what_it_builds_can_be_written(tmp_path: Path) -> None:
    builder = BatchBuilder()
    with ParquetWriter(tmp_path) as writer:
        for number in range(6):
            builder.add_values(obs=[number, 0.5], rewards=1.0, eps_id=0, t=number)
            if number % 3 == 2:
                writer.write(builder.build_and_reset())
    batch = DatasetReader(tmp_path, epochs=1, batch_size=6).sample()
    assert_array_equal(batch["obs"][:, 0], range(6))


# ---- several agents ----


def filled(builder: MultiAgentBatchBuilder, steps: int = 3) -> MultiAgentBatchBuilder:
    for t in range(steps):
        for agent, policy in (("a", "x"), ("b", "y"), ("c", "x")):
            builder.add_values(agent, policy, t=t, rewards=float(ord(agent)), terminateds=t == steps - 1)
        builder.count_step()
    return builder


def test_rows_go_to_the_policies_of_their_agents() -> None:
    builder = filled(MultiAgentBatchBuilder())
    assert (builder.total, builder.env_steps, builder.has_pending_agent_data) == (9, 3, True)
    batch = builder.build_and_reset()
    assert (batch.env_steps(), batch.agent_steps()) == (3, 9)
    assert_array_equal(batch["x"]["t"], [0, 1, 2, 0, 1, 2])
    assert_array_equal(batch["x"]["rewards"], [97] * 3 + [99] * 3)
    ids = [batch["x"]["unroll_id"].tolist(), batch["y"]["unroll_id"].tolist()]
    assert ids == [[0, 0, 0, 2, 2, 2], [1, 1, 1]]
    assert (builder.total, builder.env_steps, builder.has_pending_agent_data) == (0, 0, False)


def test_trajectories_are_postprocessed_with_those_of_the_others() -> None:
    seen: list[Any] = []

    def postprocess(rows: SampleBatch, others: dict[Any, tuple[str, SampleBatch]]) -> SampleBatch:
        seen.append({agent: (policy, len(part)) for agent, (policy, part) in others.items()})
        rows["others"] = np.full(len(rows), sum(part["rewards"][0] for _, part in others.values()))
        return rows

    builder = filled(MultiAgentBatchBuilder(postprocess))
    builder.postprocess_batch_so_far()
    assert not builder.has_pending_agent_data
    assert builder.total == 9
    batch = builder.build_and_reset()
    assert seen[0] == {"b": ("y", 3), "c": ("x", 3)}
    assert_array_equal(batch["x"]["others"], [98 + 99] * 3 + [97 + 98] * 3)


def test_others_are_seen_as_they_were_recorded() -> None:
    """Whatever was done in place to the trajectories before."""
    seen: list[Any] = []

    def postprocess(rows: SampleBatch, others: dict[Any, tuple[str, SampleBatch]]) -> SampleBatch:
        seen.append({agent: part["rewards"].tolist() for agent, (_, part) in others.items()})
        assert all("more" not in part for _, part in others.values())
        rows["rewards"] *= 0
        rows["more"] = np.ones(len(rows))
        return rows

    batch = filled(MultiAgentBatchBuilder(postprocess), 1).build_and_reset()
    assert seen == [{"b": [98.0], "c": [99.0]}, {"a": [97.0], "c": [99.0]}, {"a": [97.0], "b": [98.0]}]
    assert not batch["x"]["rewards"].any()


def test_rows_stay_where_postprocessing_fails() -> None:
    fails = [True]

    def postprocess(rows: SampleBatch, others: dict[Any, tuple[str, SampleBatch]]) -> SampleBatch:
        rows["rewards"] += 1
        if fails and len(others) and rows["rewards"][0] == 99:
            fails.pop()
            raise ZeroDivisionError
        return rows

    builder = filled(MultiAgentBatchBuilder(postprocess))
    with pytest.raises(ZeroDivisionError):
        builder.build_and_reset()
    assert builder.total == 9
    assert_array_equal(builder.build_and_reset()["x"]["rewards"], [98] * 3 + [100] * 3)


def test_rows_stay_where_trajectories_do_not_go_together() -> None:
    def postprocess(rows: SampleBatch, others: dict[Any, tuple[str, SampleBatch]]) -> SampleBatch:
        if rows["rewards"][0] == ord("c"):
            rows["odd"] = np.ones(len(rows))
        return rows

    builder = filled(MultiAgentBatchBuilder(postprocess))
    for _ in range(2):
        with pytest.raises(SchemaError, match="odd"):
            builder.build_and_reset()
        assert builder.total == 9


def test_an_episode_that_is_over_is_over_for_all() -> None:
    builder = filled(MultiAgentBatchBuilder())
    builder.check_missing_dones()
    builder.add_values("b", "y", t=3, rewards=0.0, terminateds=False)
    with pytest.raises(SchemaError, match="agent 'b'"):
        builder.check_missing_dones()
    assert builder.total == 10


def test_an_agents_policy_changes_between_episodes_only() -> None:
    builder = filled(MultiAgentBatchBuilder())
    with pytest.raises(OptionError, match="between episodes"):
        builder.add_values("a", "y", t=3, rewards=0.0, terminateds=False)
    builder.postprocess_batch_so_far()
    builder.add_values("a", "y", t=0, rewards=0.0, terminateds=True)
    assert len(builder.build_and_reset()["y"]) == 4


def test_steps_of_the_environment_are_counted_by_the_caller() -> None:
    builder = MultiAgentBatchBuilder()
    assert builder.build_and_reset().env_steps() == 0
    builder.add_values("a", "x", t=0)
    with pytest.raises(OptionError, match=r"count_step\(\)"):
        builder.build_and_reset()
