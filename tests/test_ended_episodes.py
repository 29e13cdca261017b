"""An eps_id names one episode of a writer: rows of an ended one are refused, in any order, of any agent."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stored_batches import assert_identical, fresh_root, load

import rlio
import rlio.writers.ended_episodes as ended_episodes
from rlio import JsonWriter, MultiAgentBatch, ParquetWriter, RecordingInput, SampleBatch, TeeWriter
from rlio.batch import Batch, concat_samples
from rlio.batch.arrays import object_column
from rlio.errors import SchemaError
from rlio.writer import OutputWriter
from rlio.writers.recovery import recover

WRITERS = [ParquetWriter, JsonWriter]


def episode(eps_id: Any, length: int = 5, *, first: int = 0, ends: bool = True, **more: Any) -> SampleBatch:
    """Rows of an episode, in order; the last one ends it."""
    t = np.arange(first, first + length)
    return SampleBatch(
        {
            "obs": t.astype(np.float32),
            "actions": np.zeros(length, np.int64),
            "rewards": np.ones(length, np.float32),
            "eps_id": np.full(length, eps_id),
            "t": t,
            "terminateds": (t == t[-1]) & ends,
            "truncateds": np.zeros(length, bool),
            **{name: np.full(length, value) for name, value in more.items()},
        }
    )


def joined(*batches: SampleBatch) -> SampleBatch:
    return concat_samples(list(batches))  # type: ignore[return-value]  # SampleBatches give one.


def without(batch: SampleBatch, *names: str) -> SampleBatch:
    return SampleBatch({name: batch[name] for name in batch if name not in names})


def cut_off(eps_id: int) -> SampleBatch:
    """An episode that a limit of steps ended."""
    return SampleBatch(episode(eps_id, ends=False), truncateds=np.arange(5) == 4)


def objects(eps_id: str) -> SampleBatch:
    """An episode whose id is a text in a column of objects."""
    return SampleBatch(episode(0), eps_id=object_column([eps_id] * 5))


def in_turn(*batches: SampleBatch) -> SampleBatch:
    """Episodes of one length, step by step."""
    rows = np.arange(sum(map(len, batches)))
    return joined(*batches)[rows.reshape(len(batches), -1).T.reshape(-1)]


def several(**parts: SampleBatch) -> MultiAgentBatch:
    return MultiAgentBatch(parts, 0)


SHUFFLED = np.random.default_rng(0).permutation(10)

#: Batches of which the last one is refused, and the other ones taken; and what the error names.
REFUSED: dict[str, tuple[list[Batch], str]] = {
    "the episode again": ([episode(7), episode(7)], "row 0 .*eps_id 7 comes again .* at t=4, .* t=0"),
    "its first rows": ([episode(7), episode(7, 2, ends=False)], "eps_id 7"),
    "a single row of it": ([episode(7), episode(7, 1, ends=False)], "eps_id 7"),
    "a later row of it": ([episode(7), episode(7, 1, first=3, ends=False)], "eps_id 7 .* t=3"),
    "another episode with a counter for all steps": (
        [episode(7), episode(7, first=100)],
        "eps_id 7 .* t=100",
    ),
    "twice within a batch": ([joined(episode(3), episode(7), episode(7))], "row 10 .*eps_id 7"),
    "twice, apart from each other": ([joined(episode(7), episode(3), episode(7))], "row 10 .*eps_id 7"),
    "row by row": ([*(episode(7)[i : i + 1] for i in range(5)), episode(7)[:1]], "eps_id 7"),
    "after many others": ([episode(7), *(episode(i) for i in range(100, 120)), episode(7)], "eps_id 7"),
    "in a large batch": ([episode(7), joined(*(episode(i) for i in (1, 2, 7, 3)))], "row 10 .*eps_id 7"),
    "split over batches": ([episode(7, 3, ends=False), episode(7, 3, first=3), episode(7, 3)], "eps_id 7"),
    "shuffled": ([episode(7, 10)[SHUFFLED], episode(7, 10)[SHUFFLED]], "eps_id 7"),
    "a row that came between the first and the last of another order": (
        [episode(7, 10)[[0, 5, 2]], episode(7, 10)[[9, 3]], episode(7, 10)[[5]]],
        "row 0 .*eps_id 7 .* t=5",
    ),
    "with steps below 0": ([episode(7, 3), episode(7, 3, first=-3), episode(7, 3)], "eps_id 7"),
    "several with steps below 0": (
        [joined(*(episode(i, 3, first=first) for i in (7, 8))) for first in (0, -3)] + [episode(7, 3)],
        "eps_id 7",
    ),
    "with steps from 1": (
        [episode(7, 3, first=1, ends=False), episode(7, 3, first=4), episode(7, 3, first=1)],
        "eps_id 7 .* at t=6, .* t=1",
    ),
    "ended by a limit": ([cut_off(7), cut_off(7)], "eps_id 7"),
    "without t": (
        [without(episode(7), "t"), without(episode(7), "t")],
        "eps_id 7 comes again after it has ended;",
    ),
    "without t, row by row": ([without(episode(7), "t")[i : i + 1] for i in (3, 4, 0)], "eps_id 7"),
    "without t, within a batch": ([without(joined(episode(7), episode(7)), "t")], "row 5 .*eps_id 7"),
    "texts as ids": ([episode("a"), episode("b"), episode("a")], "eps_id 'a'"),
    "objects as ids": ([objects("a"), objects("b"), objects("a")], "eps_id 'a'"),
    "the same agent": (
        [episode(7, agent_index=0), episode(7, agent_index=1), episode(7, agent_index=0)],
        "eps_id 7, agent_index 0 .* eps_id and agent_index name one",
    ),
    "the same environment": ([episode(7, env_id=0), episode(7, env_id=1), episode(7, env_id=1)], "env_id 1"),
    "the same original writer": (
        [episode(7, _writer="w1"), episode(7, _writer="w2"), episode(7, _writer="w2")],
        "_writer 'w2'",
    ),
    "one of many that came at once": (
        [joined(*(episode(i) for i in range(50))), joined(episode(60), episode(30), episode(61))],
        "row 5 .*eps_id 30 .* at t=4, .* t=0",
    ),
    "one of many that came at once, behind a gap": (
        [joined(*(episode(i) for i in range(50))), episode(30, 2, first=6)],
        "row 0 .*eps_id 30 .* at t=4, .* t=6",
    ),
    "one of many, twice within a batch": (
        [joined(*(episode(i, 1) for i in range(100)), episode(30, 1))],
        "row 100 .*eps_id 30",
    ),
    "environments that take turns": (
        [in_turn(*(episode(i, 100) for i in range(8))), in_turn(episode(20, 100), episode(5, 100))],
        "row 1 .*eps_id 5",
    ),
    "several policies": (
        [
            several(a=episode(7, agent_index=0), b=episode(7, agent_index=1)),
            several(b=episode(7, agent_index=1)),
        ],
        "policy 'b'.*eps_id 7",
    ),
    "policies of one agent": (
        [several(a=episode(7), b=episode(7)), several(a=episode(8)), several(b=episode(7))],
        "'b'",
    ),
    "tensors": ([SampleBatch(episode(7), t=torch.arange(5), eps_id=torch.full((5,), 7))] * 2, "eps_id 7"),
    "sequences with padding": (
        [
            SampleBatch(episode(7, 6), seq_lens=[4, 2], zero_padded=False),
            SampleBatch(
                {
                    name: np.append(column, np.zeros(2, column.dtype))
                    for name, column in episode(7, 6).items()
                },
                seq_lens=[4, 2],
                zero_padded=True,
                max_seq_len=4,
            ),
        ],
        "eps_id 7",
    ),
}

TAKEN: dict[str, list[Batch]] = {
    "fragments of an episode without an end": [episode(7, 3, first=3 * i, ends=False) for i in range(4)],
    "fragments in another order": [episode(7, 3, first=3 * i, ends=i == 3) for i in (2, 3, 0, 1)],
    "the end first, then the other rows": [episode(7)[4:], episode(7)[:2], episode(7)[2:4]],
    "rows in any order, over batches": [episode(7, 10)[SHUFFLED[:6]], episode(7, 10)[SHUFFLED[6:]]],
    "rows in an order whose first and last look like a run": [
        episode(7, 10)[rows] for rows in ([0, 5, 2], [9, 3], [1, 4])
    ],
    "other environments between the first row and the last": [
        joined(*(episode(7, 1, first=t, ends=False, env_id=env) for t, env in ((0, 0), (0, 1), (2, 0)))),
        episode(7, 1, first=3, env_id=0),
        episode(7, 1, first=1, ends=False, env_id=0),
    ],
    "rows one by one, in any order": [episode(7, 10)[[i]] for i in SHUFFLED],
    "two episodes in turn": [episode(i % 2, 1, first=i // 2, ends=i > 7) for i in range(10)],
    "steps twice without an end": [episode(7, ends=False), episode(7, ends=False)],
    "an episode that goes on after a done flag": [episode(7), episode(7, 3, first=5)],
    "without t, without an end": [without(episode(7, ends=False), "t")] * 2,
    "without eps_id": [without(episode(7), "eps_id")] * 2,
    "other agents": [episode(7, agent_index=i) for i in range(3)],
    "an agent that goes on when another has ended": [
        several(a=episode(7, 5, agent_index=0), b=episode(7, 5, agent_index=1, ends=False)),
        several(b=episode(7, 5, first=5, agent_index=1)),
    ],
    "agents that nothing tells apart": [
        several(a=joined(episode(7, 3), episode(7, 9, ends=False))),
        several(a=joined(episode(7, 3, first=9), episode(8, 3), episode(8, 4))),
    ],
    "other policies": [several(a=episode(7), b=episode(7))],
    "other environments": [episode(7, env_id=i) for i in range(3)],
    "merged writers": [episode(7, _writer=name) for name in ("w1", "w2")],
    "steps that are no integers": [SampleBatch(episode(7), t=np.linspace(0, 1, 5))] * 2,
    "one of many that came at once goes on": [
        joined(*(episode(i) for i in range(50))),
        episode(30, 3, first=5),
    ],
    "the ends of several, then their first rows": [
        joined(*(episode(i, 3, first=2) for i in (7, 8))),
        joined(*(episode(i, 2, ends=False) for i in (7, 8))),
    ],
    "many episodes at once": [joined(*(episode(100 * i + j) for j in range(50))) for i in range(3)],
}


@pytest.mark.few(15)
@pytest.mark.parametrize("make", WRITERS)
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.each_value_once
def test_rows_of_an_ended_episode_are_refused_as_a_whole(name: str, make: Any) -> None:
    (*good, bad), message = REFUSED[name]
    root = fresh_root()
    with make(root) as writer:
        for batch in good:
            writer.write(batch)
        for _ in range(2):
            with pytest.raises(SchemaError, match=rf"{message}.*\[column eps_id\]"):
                writer.write(bad)
        assert writer.rows_received == sum(batch.agent_steps() for batch in good)
    assert not good or rlio.verify(root).ok


@pytest.mark.few(10)
@pytest.mark.parametrize("make", WRITERS)
@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.each_value_once
def test_rows_that_belong_to_one_episode_are_taken(name: str, make: Any) -> None:
    root, batches = fresh_root(), TAKEN[name]
    with make(root) as writer:
        for batch in batches:
            writer.write(batch)
    assert "episode-again" not in {found.code for found in rlio.verify(root).findings}


@pytest.mark.parametrize("make", WRITERS)
def test_two_data_sets_in_one_writer_are_refused_and_in_two_writers_stay_apart(make: Any) -> None:
    """In one writer, 20 and 15 episodes counted as 20, converted as 35, and episode(0) was an error."""
    one, other = (joined(*(episode(i, 4 + i % 3) for i in range(n))) for n in (20, 15))
    root = fresh_root()
    with make(root) as writer:
        writer.write(one)
        with pytest.raises(SchemaError, match=r"eps_id 0 .*another writer of the same root"):
            writer.write(other)
    with make(root) as writer:
        writer.write(other)
    data = rlio.open_dataset(root)
    assert data.episode_count == 35
    assert sum(len(data.episode(i)) for i in range(35)) == len(one) + len(other)


def test_a_batch_that_was_refused_or_could_not_be_stored_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ParquetWriter(fresh_root()) as writer:
        with pytest.raises(SchemaError, match="eps_id 3"):
            writer.write(joined(episode(7), episode(3), episode(3)))
        with monkeypatch.context() as patch:
            patch.setattr(writer, "_take", lambda parts, schema: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                writer.write(episode(8))
        writer._interrupted = False
        writer.write(joined(episode(7), episode(3), episode(8)))


def test_only_the_newest_episodes_are_remembered_and_verify_finds_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ended_episodes, "_MOST_EPISODES", 10)
    for drop in ((), ("t",)):
        root = fresh_root()
        with ParquetWriter(root) as writer:
            for number in range(30):
                writer.write(without(episode(number), *drop))
            assert len(writer._episodes._known) <= 10
            writer.write(without(episode(0), *drop))
            with pytest.raises(SchemaError, match="eps_id 29"):
                writer.write(without(episode(29), *drop))
        report = rlio.verify(root)
        (found,) = [finding for finding in report.findings if finding.severity != "note"]
        assert (found.code, found.severity, found.column, found.rows) == (
            "episode-again",
            "error",
            "eps_id",
            5,
        )
        assert "episode 0 " in found.message
        assert not report.ok


def test_an_episode_in_too_many_parts_is_left_to_verify() -> None:
    """Its memory is bounded, and no row is refused that may be the first of its step."""
    rows = episode(7, 500)
    order = np.random.default_rng(1).permutation(500)
    with ParquetWriter(fresh_root()) as writer:
        for i in range(0, 500, 20):
            writer.write(rows[order[i : i + 20]])
        (known,) = writer._episodes._known.values()
        assert known is None
        for later in (0, 3):
            writer.write(joined(episode(8 + later), episode(7, 2, first=later)))


@pytest.mark.parametrize("make", WRITERS)
def test_recovery_stores_what_a_writer_had_taken(make: Any, tmp_path: Path) -> None:
    batches = [episode(7, 10)[SHUFFLED[:6]], episode(7, 10)[SHUFFLED[6:]], episode(8)]
    with make(tmp_path / "root") as writer:
        for batch in batches:
            writer.write(batch)
        shutil.copytree(tmp_path / "root", tmp_path / "copy", ignore=shutil.ignore_patterns("*.tmp"))
    assert [log.rows for log in recover(tmp_path / "copy", all_hosts=True).logs] == [15]
    assert_identical(load(str(tmp_path / "copy")), joined(*batches))


def test_writers_that_pass_batches_on_refuse_what_theirs_refuse() -> None:
    wrapped: list[Callable[[OutputWriter], OutputWriter]] = [
        TeeWriter, lambda writer: TeeWriter(writer, rlio.NoopOutput()),
        lambda writer: rlio.PacedWriter(writer, pace=rlio.Pace(stale_seconds=0)),
    ]  # fmt: skip
    for wrap in wrapped:
        with wrap(ParquetWriter(fresh_root())) as writer:
            writer.write(episode(7))
            with pytest.raises(SchemaError, match="eps_id 7"):
                writer.write(episode(7))
            writer.write(episode(8))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_replay_is_recorded_once_and_its_second_epoch_refused_or_written_by_another_writer(
    shuffle: bool,
) -> None:
    source, copy = fresh_root(), fresh_root()
    with ParquetWriter(source) as writer:
        writer.write(joined(*(episode(i) for i in range(8))))

    def replay(epochs: int | None) -> rlio.DatasetReader:
        return rlio.DatasetReader(
            source, epochs=epochs, batch_size=10, shuffle=shuffle, seed=1 if shuffle else None
        )

    with RecordingInput(replay(None), ParquetWriter(copy)) as recording:
        for _ in range(4):
            recording.sample()
        with pytest.raises(SchemaError, match=r"eps_id .* comes again") as caught:
            recording.sample()
        assert "epochs=1" in "".join(caught.value.__notes__)
    with RecordingInput(replay(1), ParquetWriter(copy)) as recording:
        assert sum(map(len, recording)) == 40
    data = rlio.open_dataset(copy)
    assert (len(data), data.episode_count, rlio.verify(copy).ok) == (80, 16, True)


def test_rows_without_ids_of_episodes_are_recorded_as_often_as_they_are_served() -> None:
    source, copy = fresh_root(), fresh_root()
    with ParquetWriter(source) as writer:
        writer.write(joined(*(episode(i) for i in range(8))))
    columns = ["obs", "actions", "rewards"]
    with RecordingInput(
        rlio.DatasetReader(source, epochs=3, columns=columns), ParquetWriter(copy)
    ) as recording:
        assert sum(map(len, recording)) == 120
    assert len(rlio.open_dataset(copy)) == 120
