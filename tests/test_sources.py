"""The engine reads all that is stored through `rlio.source.source.Source`: a made-up source shows it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

import rlio
from rlio.batch import SampleBatch, concat_samples
from rlio.errors import CorruptData, EndOfData, HoleError
from rlio.look.stats import Normaliser
from rlio.query.filters import RowFilter
from rlio.read_options import ReadOptions
from rlio.readers import group_source
from rlio.readers.cold_pass import ColdPass
from rlio.readers.stored_pass import StoredPass
from rlio.replay.draw_options import draw_of
from rlio.replay.draws import Draw
from rlio.schemas.folded import Folded
from rlio.schemas.schema import Schema
from rlio.source.source import SegmentKey, Source


class File(NamedTuple):
    """Episodes of five steps, held in memory."""

    path: str
    first: int
    rows: int
    writer: str = "them"
    skip: int = 0

    @property
    def key(self) -> SegmentKey:
        return SegmentKey(f"{self.path}@1", 0, self.rows)


def episode(number: int) -> SampleBatch:
    ids = number * 5 + np.arange(5)
    return SampleBatch(
        obs=ids[:, None].astype(np.float32), rewards=ids.astype(np.float32), actions=ids,
        terminateds=np.arange(5) == 4, truncateds=np.zeros(5, bool), eps_id=np.full(5, number),
        t=np.arange(5),
    )  # fmt: skip


class OpenFile:
    """A group is an episode."""

    def __init__(self, file: File, schema: Schema, damaged: frozenset[int]) -> None:
        self.schema = schema
        self._first, self._damaged = file.first // 5, damaged
        self.rows = self.units = [5] * (file.rows // 5)

    def read_folded(
        self, index: int, *, columns: Sequence[str] | None = None, rows: range | None = None
    ) -> Folded:
        number = self._first + index
        if number in self._damaged:
            raise CorruptData("an episode is damaged", uri="made-up", record=number)
        found = episode(number)
        assert rows is None
        return Folded(
            SampleBatch({name: found[name] for name in found if columns is None or name in columns})
        )

    def bounds(self, index: int) -> Mapping[str, Any]:
        return {}


class RunFile(OpenFile):
    """Four episodes, up to 20 rows, can be read together."""

    run_rows = 20

    def read_run(self, groups: range, columns: Sequence[str] | None) -> Folded:
        assert 2 <= len(groups) <= 4
        found = [self.read_folded(group, columns=columns).batch for group in groups]
        return Folded(concat_samples(found))


class Files(Source):
    """Two files of ten episodes each."""

    open_file = OpenFile

    def __init__(self, *, damaged: Sequence[int] = (), gone: Sequence[str] = ()) -> None:
        schema = Schema.of(episode(0))
        self._schemas = {schema.hash: schema}
        self._damaged, self._gone = frozenset(damaged), gone

    uri = "made-up"  # type: ignore[assignment]  # An attribute does for a property.
    state_identity = "20 episodes"  # type: ignore[assignment]  # The same.

    @property
    def schemas(self) -> Mapping[str, Schema]:
        return self._schemas

    @property
    def segments(self) -> Sequence[File]:
        return [File("a", 0, 50), File("b", 50, 50)]

    def open_segment(self, segment: Any) -> OpenFile:
        if segment.path in self._gone:
            from rlio.errors import DataNotFound

            raise DataNotFound("no such file", uri="made-up/" + segment.path)
        return self.open_file(segment, next(iter(self._schemas.values())), self._damaged)

    def uri_of(self, path: str) -> str:
        return f"made-up/{path}"


class Runs(Files):
    open_file = RunFile


def passes(kind: str, source: Source, *, draw: Draw | None = None, **options: Any) -> Any:
    read = ReadOptions(**{"batch_size": 7, "epochs": 1, **options})
    draw = draw or draw_of({}, columns=read.columns)
    if kind == "cold":
        return ColdPass(source, read, "error", draw.filter)
    return StoredPass(source, read, draw=draw, cache="memory", missing="error")


def actions(reader: Any) -> list[int]:
    found: list[int] = []
    try:
        while True:
            found += reader.take(None)["actions"].tolist()
    except EndOfData:
        return found
    finally:
        reader.close()


both = pytest.mark.parametrize("kind", ["cold", "stored"])
runs = pytest.mark.parametrize("files", [Files, Runs], ids=["groups", "runs of groups"])


@both
def test_a_made_up_source_is_read_in_its_order_and_as_a_permutation_by_ranks(kind: str) -> None:
    assert actions(passes(kind, Files())) == list(range(100))
    shares = [actions(passes(kind, Files(), shuffle=True, seed=3, shard=(rank, 3))) for rank in range(3)]
    assert sorted(functools.reduce(operator.iadd, shares, [])) == list(range(100))
    assert min(map(len, shares)) >= 33
    assert functools.reduce(operator.iadd, shares, []) != list(range(100))


@both
def test_a_damaged_episode_of_a_made_up_source_loses_its_own_rows_alone(kind: str) -> None:
    with pytest.raises(CorruptData, match="an episode is damaged"):
        actions(passes(kind, Files(damaged=[7])))
    reader = passes(kind, Files(damaged=[7, 12]), on_error="skip")
    assert actions(reader) == [n for n in range(100) if n // 5 not in (7, 12)]
    if kind == "cold":
        assert reader.skipped == 10


@both
def test_a_missing_file_of_a_made_up_source_is_a_hole(kind: str) -> None:
    with pytest.raises(HoleError, match="1 attempts"):
        actions(passes(kind, Files(gone=["b"])))
    assert actions(passes(kind, Files(gone=["b"]), on_error="skip")) == list(range(50))


@both
def test_a_made_up_source_resumes_filters_and_splits(kind: str) -> None:
    draw = draw_of({"filter": "rewards >= 30", "split": ("train", 0.5)})
    assert draw.filter is not None
    whole = actions(passes(kind, Files(), draw=draw, shuffle=True, seed=1))
    ids = np.arange(30, 100) // 5
    expected = np.arange(30, 100)[RowFilter.of(draw.filter).split.holds(ids, "them")]  # type: ignore[union-attr]
    assert sorted(whole) == expected.tolist()
    assert 0 < len(whole) < 70
    first = passes(kind, Files(), draw=draw, shuffle=True, seed=1)
    begun = first.take(None)["actions"].tolist()
    second = passes(kind, Files(), draw=draw, shuffle=True, seed=1)
    second.seek(first.position())
    first.close()
    assert begun + actions(second) == whole


def test_a_made_up_source_has_n_step_and_derived_columns_and_statistics() -> None:
    draw = draw_of({"draw": rlio.NStep(2, gamma=0.5), "derive": ["returns_to_go"]})
    reader = passes("stored", Files(), draw=draw, batch_size=100)
    found = reader.take(None)
    reader.close()
    rows = concat_samples([episode(number) for number in range(20)])
    rewards = rows["rewards"].reshape(20, 5)
    two = rewards + 0.5 * np.pad(rewards[:, 1:], ((0, 0), (0, 1)))
    np.testing.assert_allclose(found["rewards"], two.reshape(-1))
    np.testing.assert_allclose(found["returns_to_go"], rewards[:, ::-1].cumsum(1)[:, ::-1].reshape(-1))
    scaled = Normaliser.of("mean_std", Files())(episode(3))["obs"]
    np.testing.assert_allclose(scaled[:, 0], (np.arange(15, 20) - 49.5) / np.arange(100).std(), rtol=1e-6)


def test_the_content_of_a_source_has_an_identity_apart_from_its_rows() -> None:
    one, other = Files(), Files()
    assert one.content_identity == other.content_identity
    moved = [File("a", 0, 50), File("c", 50, 50)]
    other.__class__ = type("Moved", (Files,), {"segments": property(lambda self: moved)})
    assert one.content_identity != other.content_identity
    assert one.state_identity == other.state_identity


# ---- short groups are read together ----


@pytest.mark.few(2)
@runs
@both
@pytest.mark.parametrize("size", [3, 5, 64])
@pytest.mark.each_value_once
def test_damage_among_groups_that_are_read_together_loses_its_group_alone(
    kind: str, files: type[Files], size: int
) -> None:
    rows = [row for row in range(100) if row // 5 not in (0, 7, 12, 19)]
    options: dict[str, Any] = {"on_error": "skip", "batch_size": size}
    reader = passes(kind, files(damaged=[0, 7, 12, 19]), **options)
    assert actions(reader) == rows
    assert reader.skipped == 20
    assert [place.record for place in reader.damage.errors] == [0, 7, 12, 19]
    shuffled = actions(passes(kind, files(damaged=[0, 7, 12, 19]), shuffle=True, seed=3, **options))
    assert sorted(shuffled) == rows
    ranks = [
        actions(passes(kind, files(damaged=[0, 7, 12, 19]), shard=(rank, 3), **options)) for rank in range(3)
    ]
    assert sorted(functools.reduce(operator.iadd, ranks, [])) == rows


@runs
def test_rows_before_a_damaged_group_are_served_before_it_raises(files: type[Files]) -> None:
    reader = passes("cold", files(damaged=[7]), batch_size=5)
    assert [reader.take(None)["eps_id"][0] for _ in range(7)] == list(range(7))
    for _ in range(2):
        with pytest.raises(CorruptData, match="an episode is damaged"):
            reader.take(None)
    reader.close()


@runs
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_filter_passes_the_same_rows_of_groups_that_are_read_together(
    files: type[Files], shuffle: bool
) -> None:
    draw = draw_of({"filter": "t > 1 and eps_id != 4 and actions != 43"}, columns=None)
    expected = [row for row in range(100) if row % 5 > 1 and row // 5 != 4 and row != 43]
    for damaged in ((), (6,)):
        source, kept = files(damaged=damaged), [row for row in expected if row // 5 not in damaged]
        options: dict[str, Any] = {"on_error": "skip", "shuffle": shuffle, "seed": 3 if shuffle else None}
        found = actions(passes("cold", source, draw=draw, **options))
        assert (sorted(found) if shuffle else found) == kept


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("block", [4, 12, 4096])
def test_batches_of_one_window_or_run_share_no_rows(
    shuffle: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = actions(passes("cold", Files(), shuffle=shuffle, seed=3 if shuffle else None))
    monkeypatch.setattr(group_source, "_BLOCK_ROWS", block)
    reader = passes("cold", Files(), shuffle=shuffle, seed=3 if shuffle else None)
    found = []
    for _ in range(14):
        batch = reader.take(None)
        found += batch["actions"].tolist()
        batch["actions"][:] = -1
    reader.close()
    assert found == order[:98]
