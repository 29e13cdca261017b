"""`SourceTests`: the requirements of every `rlio.source.source.Source`.

The engine relies on these and on nothing else: a source that passes has every option of `rlio.read`.

Nothing here needs pytest, but pytest collects the suite: write a subclass whose name it collects.

    class TestMine(SourceTests):
        def make_source(self):
            return MySource("recording.bin")

        def expected_rows(self):
            return rows_that_were_written
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from rlio.batch import Batch, SampleBatch, concat_samples
from rlio.batch.nested import leaves
from rlio.schemas.folded import unfold
from rlio.source.source import FileSource, OpenSegment, Source
from rlio.testing.readers import assert_same

__all__ = ["SourceTests"]


class SourceTests:
    """Conformance suite of sources. Subclass it and implement the two accessors; pytest finds the tests."""

    # ---- the two accessors ----

    def make_source(self) -> Source:
        """Return a new source of the same data; it has at least one row."""
        raise NotImplementedError(f"{type(self).__name__}.make_source() must give a fresh source")

    def expected_rows(self) -> Batch | None:
        """Return all rows in order, found without the source; None if they cannot be known."""
        raise NotImplementedError(f"{type(self).__name__}.expected_rows() must give the rows, or None")

    # ---- what is known before a row is read ----

    def test_schemas_and_segments_are_known_without_rows(self) -> None:
        with _closing(self.make_source()) as source:
            assert source.schemas, "a source needs at least one schema"
            for name, schema in source.schemas.items():
                assert schema.hash == name, f"schemas[{name!r}] has the hash {schema.hash!r}"
            assert len(source) == sum(segment.rows for segment in source.segments) > 0
            assert all(source.columns.values()), f"a policy has no column: {source.columns}"

    def test_segments_number_the_rows_of_each_writer(self) -> None:
        """Segments of one writer do not overlap, and follow one another."""
        with _closing(self.make_source()) as source:
            ends: dict[str, int] = defaultdict(int)
            for segment in source.segments:
                assert segment.rows > 0, f"{segment.path} has no row"
                assert segment.first >= ends[segment.writer], (
                    f"{segment.path} begins at row {segment.first} of {segment.writer!r}, whose segments "
                    f"before it end at {ends[segment.writer]}"
                )
                ends[segment.writer] = segment.first + segment.rows
            keys = [segment.key for segment in source.segments]
            assert len(set(keys)) == len(keys), "two segments have one key"

    def test_two_sources_of_the_same_data_have_the_same_identities(self) -> None:
        with _closing(self.make_source()) as one, _closing(self.make_source()) as other:
            assert json.loads(json.dumps(one.state_identity)) == other.state_identity
            assert one.content_identity == other.content_identity
            assert [segment.key for segment in one.segments] == [segment.key for segment in other.segments]
            assert {*one.schemas} == {*other.schemas}

    # ---- reading ----

    def test_groups_are_the_rows_of_their_segments(self) -> None:
        with _closing(self.make_source()) as source:
            for segment in source.segments:
                opened = source.open_segment(segment)
                source.check_schema(opened.schema, segment)
                assert len(opened.rows) == len(opened.units)
                assert sum(opened.rows) >= segment.skip + segment.rows
                assert all(0 <= units <= rows for units, rows in zip(opened.units, opened.rows, strict=True))

    def test_all_groups_in_order_are_the_rows(self) -> None:
        expected = self.expected_rows()
        with _closing(self.make_source()) as source:
            found = concat_samples([*_live_rows(source)])
            assert found.agent_steps() >= len(source)
            if expected is not None:
                assert_same(found, expected, "the rows of the source")

    def test_a_group_may_be_read_at_any_time_and_is_the_callers_own(self) -> None:
        """Backwards, again, and after a batch was overwritten."""
        with _closing(self.make_source()) as source:
            groups = [*_groups(source)]
            first = [_read(opened, index).copy() for opened, index in groups]
            for number in reversed(range(len(groups))):
                opened, index = groups[number]
                found = _read(opened, index)
                assert_same(found, first[number], f"group {index}, read again")
                _overwrite(found)
                assert_same(_read(opened, index), first[number], f"group {index}, after a change of a batch")

    def test_columns_are_chosen_and_have_the_same_values(self) -> None:
        with _closing(self.make_source()) as source:
            for opened, index in _groups(source):
                whole = _read(opened, index)
                if not isinstance(whole, SampleBatch):
                    continue
                for name in whole:
                    found = _read(opened, index, columns=[name])
                    assert isinstance(found, SampleBatch)
                    assert name in found, f"columns=[{name!r}] has {list(found)}"
                    assert_same(
                        SampleBatch({name: found[name]}), SampleBatch({name: whole[name]}), f"column {name}"
                    )

    def test_the_live_rows_of_a_group_may_be_read_alone(self) -> None:
        """Of groups of which only a part belongs to the segment."""
        with _closing(self.make_source()) as source:
            for opened, index, live in _live_groups(source):
                whole = _read(opened, index)
                if live is not None and isinstance(whole, SampleBatch):
                    found = _read(opened, index, rows=live)
                    assert_same(found, whole[live.start : live.stop], f"{live} of group {index}")

    def test_bounds_hold(self) -> None:
        """No value of a group is outside of what the source says of it."""
        with _closing(self.make_source()) as source:
            for opened, index in _groups(source):
                known = opened.bounds(index)
                whole = _read(opened, index)
                for policy, rows in whole.policies().items():
                    for name, column in rows.items():
                        specs = opened.schema.policies[policy].columns.get(name, ())
                        values = {path: np.asarray(leaf) for path, leaf in leaves(column)}
                        for leaf in specs:
                            if leaf.physical in known:
                                _assert_within(values[leaf.path], known[leaf.physical], leaf.physical)

    def test_episodes_that_are_known_are_those_of_the_rows(self) -> None:
        with _closing(self.make_source()) as source:
            told = source.episode_parts()
            if told is None:
                return
            assert sum(episode.rows for episode in told) == sum(
                rows.agent_steps() for rows in _live_rows(source)
            )


@contextmanager
def _closing(source: Source) -> Iterator[Source]:
    try:
        yield source
    finally:
        if isinstance(source, FileSource):
            source.close()


def _groups(source: Source) -> Iterator[tuple[OpenSegment, int]]:
    for segment in source.segments:
        opened = source.open_segment(segment)
        yield from ((opened, index) for index in range(len(opened.rows)))


def _live_groups(source: Source) -> Iterator[tuple[OpenSegment, int, range | None]]:
    """The groups with rows of their segments, and which rows these are; None: all."""
    for segment in source.segments:
        opened = source.open_segment(segment)
        start = 0
        for index, count in enumerate(opened.rows):
            first = max(segment.skip - start, 0)
            stop = min(segment.skip + segment.rows - start, count)
            start += count
            if first < stop:
                yield opened, index, None if (first, stop) == (0, count) else range(first, stop)


def _read(opened: OpenSegment, index: int, **options: Any) -> Batch:
    return unfold([opened.read_folded(index, **options)])


def _live_rows(source: Source) -> Iterator[Batch]:
    for opened, index, live in _live_groups(source):
        yield _read(opened, index, rows=live)


def _overwrite(batch: Batch) -> None:
    for rows in batch.policies().values():
        for column in rows.values():
            for _, leaf in leaves(column):
                if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
                    leaf[...] = 1


def _assert_within(values: np.ndarray[Any, Any], bounds: Any, name: str) -> None:
    least, greatest = bounds
    numbers = values[~np.isnan(values)] if values.dtype.kind == "f" else values
    assert numbers.size == 0 or (least <= numbers.min() and numbers.max() <= greatest), (
        f"{name}: values from {numbers.min()} to {numbers.max()}, bounds {least} to {greatest}"
    )
