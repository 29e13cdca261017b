"""Rows are served or counted as skipped: none is lost on the way, whatever is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from growing_data import A, B, encode, follow, grow, publish, seal, trim
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_batches import files, fresh_root, group_bytes, numbered, put, remove, store

from rlio import (
    DatasetReader,
    InputReader,
    JsonReader,
    MappedInput,
    MixedInput,
    MultiAgentBatch,
    NoopOutput,
    RecordingInput,
    Roll,
    SampleBatch,
    ShuffledInput,
)
from rlio.catalog import listing
from rlio.catalog.listing import HoleCheck
from rlio.errors import CorruptData, EndOfData
from rlio.formats.d4rl.source import D4rlSource
from rlio.readers.d4rl_reader import D4RLReader
from rlio.schemas import batches
from rlio.schemas.folded import Folded


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "HOLE_CHECK", HoleCheck(seconds=0))


def sequences() -> SampleBatch:
    return numbered(55, seq_lens=np.arange(1, 11, dtype=np.int32), state_in_0=np.arange(10.0)[:, None])


def joint() -> MultiAgentBatch:
    t = np.arange(30)
    a = SampleBatch(t=t, eps_id=t * 0)
    return MultiAgentBatch({"a": a, "b": a[10:]}, 30)


KINDS = {
    "rows": lambda: [numbered(60)],
    "sequences": lambda: [sequences()],
    "steps": lambda: joint().timeslices(3),
}


@pytest.fixture(scope="module", params=KINDS)
def stored(request: pytest.FixtureRequest) -> str:
    with group_bytes(150):
        return store(*KINDS[request.param](), roll=Roll(max_rows=20, max_seconds=None), writer_id=A)


def drained(reader: InputReader, n: int | None = None) -> tuple[int, int]:
    """Rows that were served, and that were skipped."""
    served = 0
    with reader:
        while True:
            try:
                served += reader.sample(n).agent_steps()
            except EndOfData:
                return served, reader.skipped


@settings(max_examples=12)
@given(
    shuffle=st.booleans(),
    epochs=st.integers(1, 3),
    size=st.integers(1, 25),
    drop_last=st.booleans(),
    damage=st.lists(st.integers(0, 10**6), max_size=2),
    gone=st.booleans(),
    cache=st.sampled_from(["none", "memory"]),
    kind=st.sampled_from(sorted(KINDS)),
)
def test_served_and_skipped_rows_are_those_that_the_names_promise(
    shuffle: bool,
    epochs: int,
    size: int,
    drop_last: bool,
    damage: list[int],
    gone: bool,
    cache: str,
    kind: str,
) -> None:
    with group_bytes(150):
        root = store(*KINDS[kind](), roll=Roll(max_rows=20, max_seconds=None), writer_id=A)
    promised = 60 if kind == "rows" else 55 if kind == "sequences" else 50
    for at in damage:
        paths = list(files(root))
        path = paths[at % len(paths)]
        data = bytearray(files(root)[path])
        data[at % len(data)] ^= 1
        put(path, bytes(data))
    if gone:
        remove(next(iter(files(root))))
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 1 if shuffle else None, "on_error": "skip"}
    options["cache"] = "none" if kind == "sequences" else cache
    try:
        served, skipped = drained(
            DatasetReader(root, epochs=epochs, batch_size=size, drop_last=drop_last, **options)
        )
    except CorruptData as error:  # Nothing at all is left of an epoch.
        assert "every row of an epoch is damaged" in str(error)  # noqa: PT017
        return
    if not damage and not gone:
        assert skipped == 0
    left = epochs * (promised - skipped) - served  # Of each epoch the same rows are damaged.
    assert 0 <= left <= (10 if kind == "sequences" else 2) * size if drop_last else left == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.each_value_once
def test_the_rows_of_ranks_add_up(stored: str, shuffle: bool, world: int) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 1 if shuffle else None, "epochs": 2}
    found = [
        drained(DatasetReader(stored, batch_size=4, shard=(rank, world), **options)) for rank in range(world)
    ]
    alone, _ = drained(DatasetReader(stored, batch_size=4, **options))
    assert sum(served for served, _ in found) == alone in (2 * 50, 2 * 55, 2 * 60)
    assert {skipped for _, skipped in found} == {0}


def test_missing_rows_are_counted_by_each_rank_and_trimmed_ones_by_none() -> None:
    root = fresh_root()
    for first in (0, 5, 15):
        grow(root, A, first, 5)
    trim(root, A, 3)
    found = [
        drained(DatasetReader(root, epochs=2, batch_size=3, shard=(rank, 2), on_error="skip"))
        for rank in (0, 1)
    ]
    assert found == [(12, 5), (12, 5)]


def test_an_error_takes_no_row_with_it() -> None:
    root = fresh_root()
    grow(root, A, 0, 30, limit=100)
    ((path, data),) = files(root).items()
    put(path, data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
    for reader in (DatasetReader(root, epochs=1), follow(root)):
        with reader:
            before = reader.state_dict()
            for _ in range(2):
                with pytest.raises(CorruptData, match="CRC"):
                    reader.sample(30)
                assert reader.state_dict() == before


def test_a_group_that_decodes_to_fewer_rows_is_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    root = store(numbered(10), writer_id=A)
    decode = batches._policy_batch

    def shorter(*args: Any) -> Folded:
        return Folded(decode(*args).batch[1:])

    monkeypatch.setattr(batches, "_policy_batch", shorter)
    with (
        DatasetReader(root, epochs=1) as reader,
        pytest.raises(ValueError, match=r"9 steps and its shard says 10"),
    ):
        reader.sample()


def test_a_follower_counts_what_it_skips_and_nothing_that_was_trimmed_or_dropped() -> None:
    root = fresh_root()
    grow(root, A, 0, 10)
    grow(root, B, 0, 7)
    trim(root, B, 2, delete=False)
    seal(root, A, 12)
    seal(root, B, 7)
    assert drained(follow(root, batch_size=4, drop_last=True, on_error="skip")) == (12, 2)


def test_sequences_and_joint_steps_are_followed_by_rows() -> None:
    for batch, rows in ((sequences(), 55), (joint(), 50)):
        root = fresh_root()
        publish(root, A, 0, encode(batch))
        assert drained(follow(root), 3) == (rows, 0)


# ---- readers of files, and those around others ----


def json_file(folder: Path) -> Path:
    records = [{"type": "SampleBatch", "t": list(range(n)), "rewards": [1.0] * n} for n in (3, 4, 5)]
    lines = [*map(json.dumps, records), '{"damaged']
    (folder / "a.json").write_text("\n".join(lines))
    return folder / "a.json"


AROUND: dict[str, Callable[[InputReader], InputReader]] = {
    "ShuffledInput": lambda child: ShuffledInput(child, 2, seed=0),
    "MappedInput": lambda child: MappedInput(child, lambda batch: batch),
    "RecordingInput": lambda child: RecordingInput(child, NoopOutput()),
    "MixedInput": lambda child: MixedInput([(child, 1)], batch_size=5),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_a_child_skips_is_told_by_the_reader_around_it(name: str, tmp_path: Path) -> None:
    reader = AROUND[name](JsonReader(json_file(tmp_path), epochs=1, on_error="skip"))
    assert drained(reader, 5) == (12, 1)


def test_damaged_groups_of_a_file_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for name in ("observations", "actions"):
            file[name] = np.arange(12, dtype=np.float32)[:, None]
        file["rewards"], file["terminals"] = np.ones(12, np.float32), np.arange(12) == 11
    load = D4rlSource._read_rows

    def damaged(self: Any, part: int, start: int, stop: int, columns: Any) -> SampleBatch:
        if start <= 7 < stop:
            raise CorruptData("damaged")
        return load(self, part, start, stop, columns)

    monkeypatch.setattr("rlio.formats.d4rl.source._MIN_GROUP_ROWS", 5)
    monkeypatch.setattr(D4rlSource, "_read_rows", damaged)
    for shuffle in (False, True):
        reader = D4RLReader(tmp_path, epochs=2, shuffle=shuffle, seed=0, on_error="skip")
        assert drained(reader) == (14, 1)
