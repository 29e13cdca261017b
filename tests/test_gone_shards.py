"""A shard that is listed and not there is looked for in a few listings; then it is lost, in every reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from stored_batches import files, numbered, put, remove, store

import rlio
from rlio import DatasetReader, FollowReader, Roll
from rlio.catalog import listing
from rlio.catalog.listing import HoleCheck, Segment
from rlio.errors import DataNotFound, HoleError
from rlio.source.snapshot import DatasetSnapshot
from rlio.source.span_reader import GoneSegments, SegmentGone

ROWS, LOST = 60, 20


class Hidden:
    """Hides the second shard from a number of attempts to open it, while listings name it."""

    def __init__(self, patch: pytest.MonkeyPatch, attempts: float) -> None:
        self.attempts = attempts
        self.waits: list[float] = []
        patch.setattr(listing, "HOLE_CHECK", HoleCheck(sleep=self.waits.append))
        opened = DatasetSnapshot.open_shard

        def open_shard(dataset: DatasetSnapshot, segment: Segment) -> Any:
            if segment.ref.name.first == LOST and self.attempts > 0:
                self.attempts -= 1
                raise DataNotFound("hidden", uri=segment.ref.path)
            return opened(dataset, segment)

        patch.setattr(DatasetSnapshot, "open_shard", open_shard)


def root() -> str:
    return store(numbered(ROWS), roll=Roll(max_rows=LOST, max_seconds=None))


def read(reader_class: Any = DatasetReader, **options: Any) -> Callable[[str, str], list[int]]:
    def rows(uri: str, on_error: Any) -> list[int]:
        with reader_class(uri, on_error=on_error, batch_size=7, **options) as reader:
            return np.concatenate([batch["t"] for batch in reader]).tolist()

    return rows


def ranks(**options: Any) -> Callable[[str, str], list[int]]:
    """Two ranks, of which one has the shard in its lane."""
    ways = [read(epochs=1, cache="none", shard=(rank, 2), **options) for rank in range(2)]
    return lambda uri, on_error: [row for way in ways for row in way(uri, on_error)]


def exported(uri: str, on_error: Any) -> list[int]:
    return rlio.open_dataset(uri).to_arrow(on_error=on_error)["t"].to_pylist()


WAYS = {
    "recorded": read(epochs=1, cache="none"),
    "shuffled": read(epochs=1, cache="none", shuffle=True, seed=0),
    "filtered": read(epochs=1, cache="none", filter="t >= 0"),
    "by ranks": ranks(),
    "shuffled by ranks": ranks(shuffle=True, seed=0),
    "stored": read(epochs=1, cache="memory"),
    "followed": read(FollowReader, idle_timeout=0),
    "exported": exported,
}


@pytest.mark.few(4)
@pytest.mark.parametrize("way", WAYS)
def test_a_shard_that_comes_back_in_time_is_read(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = Hidden(monkeypatch, attempts=3)
    assert sorted(WAYS[way](root(), "raise")) == list(range(ROWS))
    assert hidden.attempts == 0
    assert hidden.waits == [0.1, 0.1]


@pytest.mark.few(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_shard_that_stays_away_is_a_hole_or_damage(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = root()
    Hidden(monkeypatch, attempts=np.inf)
    with pytest.raises(HoleError):
        WAYS[way](uri, "raise")
    assert sorted(WAYS[way](uri, "skip")) == [*range(LOST), *range(2 * LOST, ROWS)]


def test_attempts_are_counted_by_shard_and_forgotten_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "HOLE_CHECK", HoleCheck(listings=2, seconds=0))
    data = rlio.open_dataset(root())
    first, second = (SegmentGone(data, segment, DataNotFound("gone")) for segment in data.segments[:2])
    gone = GoneSegments("raise")
    for error in (first, second, first, second):
        gone.miss(error)
    with pytest.raises(HoleError):
        gone.miss(first)
    gone.forget()
    gone.miss(first)
    assert not gone.given_up


@pytest.mark.few(1)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_second_shard_may_be_gone_when_the_data_is_listed_again(
    shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlio.source.together.RUN_ROWS", LOST)  # Or all of them are read ahead.
    rows = 20 * LOST
    uri = store(numbered(rows), roll=Roll(max_rows=LOST, max_seconds=None))
    hidden = Hidden(monkeypatch, attempts=0)
    seed = 0 if shuffle else None
    with DatasetReader(uri, cache="none", epochs=1, batch_size=7, shuffle=shuffle, seed=seed) as reader:
        found = [reader.sample()["t"]]
        for path, data in files(uri).items():  # The same rows under other names; one shard stays.
            folder, _, name = path.rpartition("/")
            first, rest = name.split("-", 1)
            if int(first) != LOST:
                put(f"{folder}/{int(first):013d}-{rest}", data)
                remove(path)
        hidden.attempts = 1
        found += [batch["t"] for batch in reader]
    assert sorted(np.concatenate(found).tolist()) == list(range(rows))
    assert hidden.attempts == 0
