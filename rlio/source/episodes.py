"""`EpisodeFiles`: the episodes of another library's files as a `Source`.

A format owns its layout: `EpisodeSource` states the lengths of the episodes and reads one. Everything else
that the engine asks for follows: segments, groups, schemas, identities. A group is an episode, a part of a
long one, or a run of short ones where the format reads runs. If damage is skipped, a run is read at once and
served as the episodes in it, so that one that is damaged is lost alone.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from rlio.batch import SampleBatch, concat_samples
from rlio.batch.arrays import size_bytes, zero_leaf
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns
from rlio.batch.encoded_picture import is_encoded, row_type
from rlio.batch.nested import Path, leaves, map_structure
from rlio.errors import CorruptData, RlioError, SchemaError, excerpt, raise_at
from rlio.schemas.leaves import column_of_name
from rlio.schemas.schema import Schema
from rlio.source.damage import damage_named
from rlio.source.files import GroupFiles
from rlio.source.uniform import Uniform
from rlio.storage import InputFile, InputFiles, Span
from rlio.support.spaces import Spaces, pair_of

__all__ = [
    "EpisodeFiles",
    "EpisodeSource",
    "PartSource",
    "RunSource",
    "SpanSource",
    "measure_first",
    "with_next_obs",
    "without_final_obs",
]

logger: logging.Logger = logging.getLogger("rlio")

# Largest group: rows that are decoded at once, unless one episode has more and its format reads no parts.
_GROUP_ROWS: Final = 4096
_GROUP_BYTES: Final = 64 << 20
# Groups of a segment: memory then holds the spans of this many groups.
_SEGMENT_GROUPS: Final = 4096
# Rows of which the schema is made.
_SAMPLE_ROWS: Final = 64


class EpisodeSource(Protocol):
    """Episodes in another library's format, each readable by itself.

    Attributes:
        uri: Where they are stored, for messages.
        files: The files of the episodes; their names and sizes are part of a reader's state.
        lengths: Steps of each episode.
        row_bytes: About how many bytes a row takes in memory. Saved positions depend on it, so a source
            measures the same episode in all versions.
        spaces: (observation space, action space); None: the format does not say.

    A source may have more: ``origin``, the `rlio.formats.sink.Origin` that a conversion keeps; ``notes``,
    sentences about its data for the report (`rlio.conversion.report`); ``left_out``, names of what it has of
    each step and does not read; ``beside``, further files that determine the rows, such as videos;
    ``group_rows``, the most rows to read at once, if not 4096: where files are packed in larger pieces, that
    many cost as one; ``version``, the version of the format that the files state; ``sizes``, the bytes of
    all files with rows, if `files` are not all; and ``failures``, what was left out because it cannot be
    opened (`rlio.formats.files.inputs.Failures`).
    """

    uri: str
    files: Sequence[InputFile]
    lengths: Sequence[int]
    row_bytes: int
    spaces: tuple[Any, Any] | None

    def load(self, episode: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read one episode as fresh arrays, a row a step.

        Args:
            episode: Index into `lengths`.
            columns: Columns that are needed; None: all. More may be given.

        Returns:
            Columns by rlio's names, without ``eps_id`` and ``t``, which are added if they are absent.
            Pictures that are stored as PNG or JPEG stay so (`rlio.batch.picture_codecs.encoded_column`): the
            engine decodes them.

        Raises:
            CorruptData: The episode is damaged.
            SchemaError: Its columns are not columns of a batch.
        """

    def close(self) -> None:
        """Close all files."""


@runtime_checkable
class PartSource(Protocol):
    """A source that may read a part of a long episode; more of an `EpisodeSource`.

    Attributes:
        reads_parts: Whether it does.
    """

    reads_parts: bool

    def load_part(self, episode: int, start: int, stop: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read the steps from ``start`` to ``stop``; see `EpisodeSource.load`."""


@runtime_checkable
class RunSource(Protocol):
    """A source that reads many short episodes at once; more of an `EpisodeSource`."""

    lengths: Sequence[int]

    def load_run(self, first: int, stop: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read the episodes from ``first`` to ``stop``, with ``eps_id`` and ``t``; see `EpisodeSource`."""


@runtime_checkable
class SpanSource(Protocol):
    """A source that knows where the bytes of its episodes are; more of an `EpisodeSource`.

    Attributes:
        inputs: The files; None: it does not know.
    """

    inputs: InputFiles | None

    def spans(
        self, first: int, stop: int, start: int, rows: int, columns: frozenset[str] | None
    ) -> Iterable[Span]:
        """The bytes that reading ``rows`` steps of some episodes from step ``start`` on fetches, in order."""


class _Group(NamedTuple):
    """Rows that are read at once: whole episodes, or steps of one.

    Attributes:
        first, stop: The episodes.
        start: The first step, of one episode.
        rows: Number of rows.
    """

    first: int
    stop: int
    start: int
    rows: int


class EpisodeFiles(GroupFiles):
    """The episodes of a format as a source of one writer.

    Args:
        layout: The episodes; closed by the caller.
        about: Everything besides the files that determines the rows, as JSON values.
        columns: Columns that are asked for. A format may have some that it gives only then.
        on_error: "skip": damage is lost by the episode.
        spaces: (observation space, action space), for files that do not state them.

    Raises:
        CorruptData, SchemaError: No episode can be read, or ``spaces`` do not fit the first one.
        OptionError: ``spaces`` are no spaces, or the files state them.
    """

    def __init__(
        self,
        layout: EpisodeSource,
        *,
        about: Mapping[str, Any],
        columns: Collection[str] = (),
        on_error: Literal["raise", "skip"] = "raise",
        spaces: Spaces | None = None,
    ) -> None:
        super().__init__(layout.files, about)
        self.layout = layout
        self._beside = getattr(layout, "beside", ())
        #: (observation space, action space), as the caller or the files state them; None: neither does.
        self.pair: tuple[Any, Any] | None = pair_of(spaces, layout.spaces, uri=layout.uri)
        self._check_fit = spaces is not None
        self.format: str = str(about.get("format") or "")
        self.format_version: str | None = getattr(layout, "version", None)
        self.environment: str | None = getattr(getattr(layout, "origin", None), "env", None)
        wished = getattr(layout, "group_rows", _GROUP_ROWS)
        self._most = max(1, min(wished, _GROUP_BYTES // max(1, layout.row_bytes)))
        self._reads_parts = isinstance(layout, PartSource) and layout.reads_parts
        self._runs = layout if isinstance(layout, RunSource) else None
        self.run_rows: int = self._most if self._runs else 0
        self._groups: list[_Group] = []
        for start, stop in _runs(layout, 0 if on_error == "skip" else self._most):
            steps = layout.lengths[start]
            if self._reads_parts and stop == start + 1 and steps > self._most:
                self._groups += [
                    _Group(start, stop, at, min(self._most, steps - at)) for at in range(0, steps, self._most)
                ]
            else:
                self._groups.append(_Group(start, stop, 0, sum(layout.lengths[start:stop])))
        self._uniform = Uniform()
        # Columns of the rows, if those that the format gives by itself are not all.
        self._all: frozenset[str] | None = None
        schema, count = self._first_schema(columns), len(self._groups)
        if schema is not None:
            self._adopt(schema)
        self._state(
            [group.rows for group in self._groups],
            (
                (f"{self.uri}#{number}", range(first, min(first + _SEGMENT_GROUPS, count)))
                for number, first in enumerate(range(0, count, _SEGMENT_GROUPS))
            ),
            pieces=len(layout.lengths),
            row_bytes=layout.row_bytes,
        )

    def again(self, columns: Collection[str], on_error: Literal["raise", "skip"]) -> EpisodeFiles:
        """The same open episodes as another source, for other columns."""
        return EpisodeFiles(self.layout, about=self._about, columns=columns, on_error=on_error)

    @property
    def uri(self) -> str:
        return self.layout.uri

    @property
    def notes(self) -> Sequence[str]:  # type: ignore[override]  # The base has an attribute, for formats' sake.
        """What the format says of its data."""
        return getattr(self.layout, "notes", ())

    @property
    def failures(self) -> Any:
        """What the format left out because it cannot be opened; None: nothing."""
        return getattr(self.layout, "failures", None)

    @property
    def policy_spaces(self) -> dict[str, tuple[Any, Any]]:
        """The spaces that the files state, or the caller."""
        return {} if self.pair is None else {DEFAULT_POLICY_ID: self.pair}

    @property
    def sizes(self) -> Sequence[int | None]:
        """See `FileSource`."""
        return getattr(self.layout, "sizes", None) or super().sizes

    def uri_of(self, path: str) -> str:
        return self.uri

    @property
    def inputs(self) -> InputFiles | None:
        """See `GroupFiles`."""
        return self.layout.inputs if isinstance(self.layout, SpanSource) else None

    def _spans(self, groups: range, columns: frozenset[str] | None) -> Iterator[Span]:
        wanted = self._all if columns is None else columns
        assert isinstance(self.layout, SpanSource)
        for number in groups:
            first, stop, start, rows = self._groups[number]
            yield from self.layout.spans(first, stop, start, rows, wanted)

    def _read(self, group: int, columns: frozenset[str] | None) -> SampleBatch:
        return self._read_group(self._groups[group], columns)

    def _read_run(self, groups: range, columns: frozenset[str] | None) -> SampleBatch:
        # Whole episodes are read at once; parts of long ones are read by themselves, and joined with them.
        joined: list[_Group] = []
        for group in (self._groups[number] for number in groups):
            before = joined[-1] if joined else group
            if joined and self._is_whole(before) and self._is_whole(group):
                joined[-1] = _Group(before.first, group.stop, 0, before.rows + group.rows)
            else:
                joined.append(group)
        found = [self._read_group(group, columns) for group in joined]
        return found[0] if len(found) == 1 else concat_samples(found)

    def _is_whole(self, group: _Group) -> bool:
        """Whether the group is episodes, not a part of one."""
        return group.stop > group.first + 1 or group.rows == self.layout.lengths[group.first]

    def _read_group(self, found: _Group, columns: frozenset[str] | None) -> SampleBatch:
        wanted = self._all if columns is None else columns
        try:
            with damage_named(self.format or "episodes", uri=self.uri, record=found.first):
                batch = self._loaded(found, wanted)
            if wanted is not None:
                for name in batch.keys() - wanted:
                    del batch[name]
            self._uniform.conform(batch, wanted)
        except (CorruptData, SchemaError) as error:
            if error.record is None:  # Places of damage are counted by it.
                error.record = found.first
            raise_at(error, uri=self.uri, record=error.record)
        return batch

    def _loaded(self, group: _Group, wanted: frozenset[str] | None) -> SampleBatch:
        first, stop, start, rows = group
        layout = self.layout
        if rows < layout.lengths[first] and isinstance(layout, PartSource):
            batch = layout.load_part(first, start, start + rows, wanted)
        elif self._runs is not None:
            batch = self._runs.load_run(first, stop, wanted)
        else:
            batch = layout.load(first, wanted)
        if len(batch) != rows:
            raise CorruptData(f"episode {first} has {len(batch)} steps, expected {rows}")
        if Columns.EPS_ID not in batch and (wanted is None or Columns.EPS_ID in wanted):
            batch[Columns.EPS_ID] = np.full(rows, first, np.int64)
        if Columns.T not in batch and (wanted is None or Columns.T in wanted):
            batch[Columns.T] = np.arange(start, start + rows)
        return batch

    def _first_schema(self, asked: Collection[str]) -> Schema | None:
        """The schema of the first readable group, which every other one must fit."""
        failure: RlioError | None = None
        for group in self._groups:
            part, steps = group, self.layout.lengths[group.first]
            if self._reads_parts and steps:
                rows = min(steps - group.start, self._most, _SAMPLE_ROWS)
                part = _Group(group.first, group.first + 1, group.start, rows)
            try:
                with damage_named(self.format or "episodes", uri=self.uri, record=group.first):
                    batch = self._loaded(part, None)
                if more := {name for name in asked if not {name, column_of_name(name)} & batch.keys()}:
                    more |= {*map(column_of_name, more)}
                    found = self._loaded(part, frozenset(more))
                    for name in more & found.keys():
                        batch[name] = found[name]
                        self._all = frozenset(batch)
            except (CorruptData, SchemaError) as error:
                failure = failure or error
                continue
            self._uniform.adopt(batch)
            if self._check_fit:
                _check_fit(batch, self.pair, uri=self.uri)
            return Schema.of(batch, is_written=False)
        if isinstance(failure, (CorruptData, SchemaError)):
            raise_at(failure, uri=self.uri, record=0)
        return None

    def close(self) -> None:
        """Close all files."""
        self.layout.close()


def _check_fit(rows: SampleBatch, pair: Any, *, uri: str) -> None:
    """Refuse spaces that the caller states if their values have other parts or shapes than the rows."""
    for name, space in zip((Columns.OBS, Columns.ACTIONS), pair, strict=True):
        if name not in rows:
            continue
        found = {path: row_type(leaf)[1] for path, leaf in leaves(rows[name])}
        expected = dict(_shapes_of(space, ()))
        if found != expected and None not in expected.values():
            raise SchemaError(
                f"spaces: found rows of the shapes {excerpt(found)}, expected {excerpt(expected)}, those of "
                f"{excerpt(space)}",
                uri=uri,
                column=name,
            )


def _shapes_of(space: Any, path: Path) -> Iterator[tuple[Path, tuple[int, ...] | None]]:
    """The shape of each part; None: its values have no fixed shape."""
    inner = getattr(space, "spaces", None)
    if inner is None:
        yield path, space.shape
        return
    for key, part in inner.items() if isinstance(inner, Mapping) else enumerate(inner):
        yield from _shapes_of(part, (*path, key))


def _runs(layout: EpisodeSource, most: int) -> Iterator[tuple[int, int]]:
    """First episode of each run with rows, and the one after its last: one episode, unless the format reads
    runs, and ``most`` rows are not 0.
    """
    start, rows = 0, 0
    reads_runs = most and isinstance(layout, RunSource)
    for episode, steps in enumerate(layout.lengths):
        if not reads_runs:
            if steps:
                yield episode, episode + 1
            continue
        if rows and rows + steps > most:
            yield start, episode
            start, rows = episode, 0
        rows += steps
    if rows:
        yield start, len(layout.lengths)


def _row_bytes(rows: SampleBatch) -> int:
    """About how many bytes a row takes in memory, by the rows of an episode; pictures count as decoded."""
    size: int = rows.size_bytes()
    for column in rows.values():
        for _, leaf in leaves(column):
            size += len(leaf) * leaf[0].nbytes - size_bytes(leaf) if is_encoded(leaf) else 0
    return max(1, size // max(1, len(rows)))


def measure_first(episodes: Iterable[int], load: Callable[[int], SampleBatch]) -> int:
    """About how many bytes a row takes in memory, by the first of some episodes that is not damaged.

    A damaged one is raised, or skipped, where it is served: it must not take its neighbours with it.

    Args:
        episodes: The episodes to try.
        load: Reads one, or a part of it.
    """
    for episode in episodes:
        with contextlib.suppress(CorruptData, SchemaError):
            return _row_bytes(load(episode))
    return 1


def with_next_obs(observations: Any) -> dict[str, Any]:
    """Columns ``obs`` and ``new_obs`` of an episode of N steps, as views of its N+1 observations.

    Args:
        observations: Array of N+1 rows, or such arrays nested in dicts and tuples.
    """
    return {
        Columns.OBS: map_structure(lambda leaf: leaf[:-1], observations),
        Columns.NEXT_OBS: map_structure(lambda leaf: leaf[1:], observations),
    }


def without_final_obs(observations: Any, steps: int | None = None) -> dict[str, Any]:
    """Columns ``obs``, ``new_obs`` and ``new_obs_valid`` of an episode whose last observation is not stored.

    ``new_obs`` of the last row is zeros, and ``new_obs_valid`` is False there.

    Args:
        observations: Array of N rows, or such arrays nested in dicts and tuples. Of a part of an episode that
            goes on, one row more than its steps.
        steps: Steps of the part; None: N.
    """
    known = len(leaves(observations)[0][1])
    count = known if steps is None else steps
    if known > count:
        return {**with_next_obs(observations), Columns.NEXT_OBS_VALID: np.ones(count, np.bool_)}

    def shifted(leaf: np.ndarray) -> np.ndarray:
        follow: np.ndarray = zero_leaf(leaf, len(leaf))
        follow[:-1] = leaf[1:]
        return follow

    valid = np.ones(count, np.bool_)
    valid[-1:] = False
    return {
        Columns.OBS: observations,
        Columns.NEXT_OBS: map_structure(shifted, observations),
        Columns.NEXT_OBS_VALID: valid,
    }
