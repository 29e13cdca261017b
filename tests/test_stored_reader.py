"""`DatasetReader` over a store: the same order from memory and disk, resumable from one to the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counter_env import check_transitions, decode
from further import further
from test_replay_store import LENGTHS, record

import rlio
from rlio import DatasetReader, MixedInput, ParquetWriter, SampleBatch
from rlio.errors import EndOfData, MissingColumn, OptionError, StateError
from rlio.readers import stored_pass
from rlio.testing import assert_resumes

TOTAL = sum(LENGTHS.values())


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("RLIO_CACHE", str(tmp_path / "cache"))
    return record(tmp_path / "data")


def drained(reader: DatasetReader) -> list[SampleBatch]:
    with reader:
        return [batch for batch in reader if isinstance(batch, SampleBatch)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"draw": rlio.Sequences(5)},
        *further({"draw": rlio.NStep(3, gamma=0.9)}, {"draw": rlio.WholeEpisodes()}, {"filter": "t > 2"}),
        *further({"columns": ["t", "obs"]}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.each_value_once
def test_memory_and_disk_give_the_same_batches_and_resume_each_other(
    root: str, options: dict[str, Any], shuffle: bool
) -> None:
    options = options | {"batch_size": 4, "epochs": 2, "shuffle": shuffle, "seed": 5 if shuffle else None}
    memory = drained(DatasetReader(root, cache="memory", **options))
    disk = drained(DatasetReader(root, cache="disk", **options))
    assert len(memory) == len(disk)
    assert all(a.equals(b) for a, b in zip(memory, disk, strict=True))
    with DatasetReader(root, cache="memory", **options) as reader:
        for _ in range(len(memory) // 2):
            reader.sample()
        state = reader.state_dict()
    with DatasetReader(root, cache="disk", **options) as reader:
        reader.load_state_dict(state)
        rest = list(reader)
    assert all(a.equals(b) for a, b in zip(memory[len(memory) // 2 :], rest, strict=True))
    assert_resumes(lambda: DatasetReader(root, cache="memory", **options), batches=5)


def test_recorded_order_from_a_store_is_that_of_the_shards(root: str) -> None:
    stored = drained(DatasetReader(root, cache="memory", batch_size=16, epochs=1))
    plain = drained(DatasetReader(root, cache="none", batch_size=16, epochs=1))
    assert all(a.equals(b) for a, b in zip(stored, plain, strict=True))


@pytest.mark.few(1)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.each_value_once
def test_ranks_share_an_epoch_and_their_states_are_equal(root: str, world: int, drop_last: bool) -> None:
    options: dict[str, Any] = {
        "batch_size": 7,
        "epochs": 2,
        "shuffle": True,
        "seed": 1,
        "drop_last": drop_last,
    }
    readers = [DatasetReader(root, cache="memory", shard=(rank, world), **options) for rank in range(world)]
    seen = []
    while True:
        try:
            batches = [reader.sample() for reader in readers]
        except EndOfData:
            break
        assert len({str(reader.state_dict()) for reader in readers}) == 1
        seen += [tuple(key) for batch in batches for key in decode(batch["obs"]).tolist()]
    rest = [
        key for reader in readers for batch in reader for key in map(tuple, decode(batch["obs"]).tolist())
    ]
    seen += rest
    if not drop_last:
        assert sorted(seen[:TOTAL]) == sorted(seen[TOTAL:])
        assert len(set(seen)) == TOTAL


def test_sizes_may_change_from_call_to_call(root: str) -> None:
    whole = drained(DatasetReader(root, cache="memory", batch_size=TOTAL, epochs=1, shuffle=True, seed=3))[0]
    for sizes in ((1, 2, 3, 50), (7,), (100, 5)):
        with DatasetReader(root, cache="memory", batch_size=5, epochs=1, shuffle=True, seed=3) as reader:
            parts = [reader.sample(n) for n in sizes] + list(reader)
        np.testing.assert_array_equal(np.concatenate([part["obs"] for part in parts]), whole["obs"])


def test_auto_goes_by_what_is_asked_for_and_by_size(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(**options: Any) -> str:
        with DatasetReader(root, batch_size=4, **options) as reader:
            return reader.cache

    assert chosen() == "none"
    assert chosen(shuffle=True) == "memory"
    assert chosen(draw=rlio.NStep(2)) == "memory"
    monkeypatch.setattr(stored_pass, "_MEMORY_BYTES", 100)
    assert chosen(shuffle=True) == "disk"
    monkeypatch.setattr(stored_pass, "_DISK_BYTES", 200)
    assert chosen(shuffle=True) == "none"
    assert chosen(draw=rlio.Sequences(3)) == "disk"


def test_a_state_fits_only_the_same_draws(root: str) -> None:
    with DatasetReader(root, cache="memory", shuffle=True, seed=0, draw=rlio.NStep(2)) as reader:
        state = reader.state_dict()
    for options in (
        {"draw": rlio.NStep(3)},
        {},
        {"draw": rlio.NStep(2, gamma=0.5)},
        {"draw": rlio.NStep(2), "filter": "t > 1"},
    ):
        with (
            DatasetReader(root, cache="memory", shuffle=True, seed=0, **options) as reader,
            pytest.raises(StateError, match=r"'n_step' \(draw=\)|filter"),
        ):
            reader.load_state_dict(state)
    with DatasetReader(root, cache="none", shuffle=True) as reader, pytest.raises(StateError, match="order"):
        reader.load_state_dict(state)


def test_what_a_store_cannot_give_is_refused_at_once(root: str, tmp_path: Path) -> None:
    for options in (
        {"cache": "none", "draw": rlio.NStep(2)}, {"cache": "maybe"}, {"draw": 2},
    ):  # fmt: skip
        with pytest.raises(OptionError):
            DatasetReader(root, **options)
    with pytest.raises(MissingColumn, match="speed"):
        DatasetReader(root, cache="memory", columns=["speed"])
    with ParquetWriter(tmp_path / "sequences") as writer:
        writer.write(SampleBatch(obs=np.zeros((6, 2)), seq_lens=[2, 4], state_in_0=np.zeros((2, 3))))
    with DatasetReader(tmp_path / "sequences", shuffle=True, epochs=1) as reader:
        assert reader.cache == "none"
        assert reader.unit == "sequences"
    for options in ({"cache": "memory"}, {"draw": rlio.Sequences(2)}):
        with pytest.raises(OptionError, match="seq_lens"):
            DatasetReader(tmp_path / "sequences", **options)


def test_skip_steps_over_batches(root: str) -> None:
    options: dict[str, Any] = {"batch_size": 9, "epochs": 2, "shuffle": True, "seed": 2, "cache": "memory"}
    whole = drained(DatasetReader(root, **options))
    for skipped in (0, 1, 13, len(whole) - 1):
        with DatasetReader(root, **options) as reader:
            reader.skip(skipped)
            assert all(a.equals(b) for a, b in zip(whole[skipped:], reader, strict=True))
    with DatasetReader(root, **options) as reader, pytest.raises(EndOfData):
        reader.skip(len(whole) + 1)


def test_sequences_and_steps_are_mixed_each_with_its_own(root: str) -> None:
    mix = MixedInput(
        [
            (DatasetReader(root, cache="memory", shuffle=True, seed=0), 0.5),
            (DatasetReader(root, cache="memory", shuffle=True, seed=1, filter="obs[0] == 1"), 0.5),
        ],
        batch_size=20,
    )
    for _ in range(50):
        batch = mix.sample()
        assert (decode(batch["obs"])[10:, 0] == 1).all()
        check_transitions(batch, lengths=LENGTHS)


@pytest.mark.few(1)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("turns", [(3, 3, 3), (1, 1, 4, 1), (2, 5, 2, 2, 2), (1,)])
@pytest.mark.each_value_once
def test_readers_that_skip_in_any_rhythm_get_what_is_due(
    root: str, world: int, turns: tuple[int, ...]
) -> None:
    """Batches are gathered ahead as they were skipped before: a change of rhythm costs no rows."""
    options: dict[str, Any] = {"batch_size": 3, "epochs": 3, "shuffle": True, "seed": 2, "cache": "memory"}
    whole = drained(DatasetReader(root, shard=(0, world), **options))
    with DatasetReader(root, shard=(0, world), **options) as reader:
        at = turn = 0
        while True:
            step = turns[turn % len(turns)]
            turn += 1
            if at + step > len(whole):
                break
            reader.skip(step - 1)
            assert reader.sample().equals(whole[at + step - 1])
            at += step
