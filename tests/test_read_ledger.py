"""The ledger of a reader: what is expected is served, skipped or dropped, or an error is raised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from growing_data import A, B, encode, follow, grow, publish, seal, trim
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_batches import files, fresh_root, group_bytes, numbered, put, remove, store

from rlio import DatasetReader, MultiAgentBatch, Roll, SampleBatch
from rlio.errors import CorruptData, EndOfData, LedgerError
from rlio.interfaces import ReadLedger
from rlio.readers import group_source
from rlio.replay.segment_reader import split_batch
from rlio.schemas import batches
from rlio.schemas.folded import Folded
from rlio.storage import listing
from rlio.storage.listing import Patience


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "PATIENCE", Patience(seconds=0))


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


def drained(reader: DatasetReader, n: int | None = None) -> ReadLedger:
    with reader:
        while True:
            try:
                reader.sample(n)
            except EndOfData:
                return reader.ledger


@settings(max_examples=12)
@given(
    shuffle=st.booleans(),
    epochs=st.integers(1, 3),
    size=st.integers(1, 25),
    drop_last=st.booleans(),
    damage=st.lists(st.integers(0, 10**6), max_size=2),
    gone=st.booleans(),
    kind=st.sampled_from(sorted(KINDS)),
)
def test_served_skipped_and_dropped_rows_are_those_that_the_names_promise(
    shuffle: bool, epochs: int, size: int, drop_last: bool, damage: list[int], gone: bool, kind: str
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
    try:
        ledger = drained(DatasetReader(root, epochs=epochs, batch_size=size, drop_last=drop_last, **options))
    except CorruptData as error:  # Nothing at all is left of an epoch.
        assert "every row of an epoch is damaged" in str(error)  # noqa: PT017
        return
    assert ledger.expected == epochs * promised
    assert ledger.served + ledger.skipped + ledger.dropped == ledger.expected
    if not damage and not gone:
        assert ledger.skipped == 0
    if not drop_last:
        assert ledger.dropped == 0


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.each_value_once
def test_the_ledgers_of_ranks_add_up(stored: str, shuffle: bool, world: int) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 1 if shuffle else None, "epochs": 2}
    found = [
        drained(DatasetReader(stored, batch_size=4, shard=(rank, world), **options)) for rank in range(world)
    ]
    alone = drained(DatasetReader(stored, batch_size=4, **options))
    assert sum(ledger.served for ledger in found) == sum(ledger.expected for ledger in found)
    assert sum(ledger.served for ledger in found) == alone.served == alone.expected


def test_missing_and_trimmed_rows_are_counted_by_one_rank() -> None:
    root = fresh_root()
    for first in (0, 5, 15):
        grow(root, A, first, 5)
    trim(root, A, 3)
    found = [
        drained(DatasetReader(root, epochs=2, batch_size=3, shard=(rank, 2), on_error="skip"))
        for rank in (0, 1)
    ]
    assert sum(ledger.expected for ledger in found) == 2 * 17
    assert sum(ledger.skipped for ledger in found) == 2 * 5
    assert sum(ledger.served for ledger in found) == 2 * 12
    assert sum(ledger.trimmed for ledger in found) == 3


def test_a_restored_reader_counts_anew(stored: str) -> None:
    with DatasetReader(stored, epochs=2, batch_size=3) as reader:
        reader.sample()
        head = reader.ledger.served
        state = reader.state_dict()
        total = drained(reader).served
    with DatasetReader(stored, epochs=2, batch_size=3) as reader:
        reader.sample(5)
        reader.load_state_dict(state)
        assert reader.ledger == ReadLedger()
        assert drained(reader).served == total - head


def test_an_error_takes_back_what_was_counted() -> None:
    root = fresh_root()
    grow(root, A, 0, 30, limit=100)
    ((path, data),) = files(root).items()
    put(path, data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
    for reader in (DatasetReader(root, epochs=1), follow(root)):
        with reader:
            before = reader.ledger
            for _ in range(2):
                with pytest.raises(CorruptData, match="CRC"):
                    reader.sample(30)
                assert reader.ledger == before


def lossy(batch: Any, start: int, stop: int, unit: Any) -> Any:
    """A split that loses the last unit of what it splits off."""
    head, rest = split_batch(batch, start, stop, unit)
    return split_batch(head, 0, max(stop - start - 1, 0), unit)[0], rest


def test_a_row_that_a_split_loses_is_found_out(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlio.readers import follow as follow_module

    monkeypatch.setattr(group_source, "split_batch", lossy)
    monkeypatch.setattr(follow_module, "split_batch", lossy)
    for reader in (DatasetReader(stored, epochs=1), follow(stored)):
        with reader, pytest.raises(LedgerError, match="rows were expected"):
            reader.sample(2)


def test_a_row_that_a_shuffle_loses_is_found_out(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take = group_source._take
    monkeypatch.setattr(group_source, "_take", lambda batch, units, *more: take(batch, units[1:], *more))
    with (
        DatasetReader(stored, epochs=1, shuffle=True, seed=1, cache="none") as reader,
        pytest.raises(LedgerError, match="rows were expected"),
    ):
        reader.sample(3)


def test_groups_that_an_epoch_leaves_out_are_found_out_at_its_end(
    stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlio.replay.segment_reader import SegmentReader

    spans = SegmentReader.spans
    monkeypatch.setattr(SegmentReader, "spans", lambda self, segment: spans(self, segment)[1:])
    with (
        DatasetReader(stored, epochs=1, shuffle=True, seed=1) as reader,
        pytest.raises(LedgerError, match="as the shards' names say"),
    ):
        list(reader)


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


def test_a_follower_counts_writer_by_writer_and_what_it_dropped() -> None:
    root = fresh_root()
    grow(root, A, 0, 10)
    grow(root, B, 0, 7)
    trim(root, B, 2, delete=False)
    seal(root, A, 12)
    seal(root, B, 7)
    ledger = drained(follow(root, batch_size=4, drop_last=True, on_error="skip"))
    assert ledger == ReadLedger(expected=17, served=12, skipped=2, dropped=3, trimmed=2)


def test_sequences_and_joint_steps_are_followed_by_rows() -> None:
    for batch, rows in ((sequences(), 55), (joint(), 50)):
        root = fresh_root()
        publish(root, A, 0, encode(batch))
        assert drained(follow(root), 3) == ReadLedger(expected=rows, served=rows)
