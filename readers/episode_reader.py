"""`EpisodeReader`: reads data sets of other libraries through the sources of `rlio.formats`.

An `EpisodeSource` gives one episode after the other as a `SampleBatch` with rlio's columns. The reader adds
what all readers have: batch sizes, epochs, seeded shuffling, shards, damaged episodes, saved positions.

Not here: how a format stores an episode (`rlio.formats`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol, Self, Unpack, runtime_checkable

import numpy as np

from rlio.batch import SampleBatch, concat_samples
from rlio.batch.columns import Columns, with_possible_validity
from rlio.batch.nested import leaves, map_structure
from rlio.errors import CorruptData, SchemaError
from rlio.formats.format import Format
from rlio.formats.place import locate_format, open_source
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.readers.inputs import Cursor, Failures, StoredReader, TableCursor, raise_at
from rlio.readers.read_options import ReadKeywords, ReadOptions
from rlio.readers.rllib_json import check_asked
from rlio.readers.uniform import Uniform
from rlio.storage import InputFile
from rlio.storage.paths import StrPath
from rlio.support.options import checked_keywords

__all__ = [
    "EpisodeReader",
    "EpisodeSource",
    "RunSource",
    "measure_row",
    "with_next_obs",
    "without_final_obs",
]

# Rows that are read at a time: whole episodes, as many as fit.
_GROUP_ROWS = 4096
_GROUP_BYTES = 64 << 20


class EpisodeSource(Protocol):
    """Episodes in another library's format, each readable by itself.

    Attributes:
        uri: Where they are stored, for messages.
        files: The files of the episodes; their names and sizes are part of a reader's state.
        lengths: Steps of each episode.
        row_bytes: About how many bytes a row takes in memory. Saved positions depend on it, so a source
            measures the same episode in all versions.
        spaces: (observation space, action space); None: the format does not say.

    A source may have two more: ``origin``, the `rlio.formats.sink.Origin` that a conversion keeps, and
    ``notes``, sentences about its data for the report (`rlio.formats.report`).
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
            Columns by rlio's names, without ``eps_id`` and ``t``, which the reader adds if they are absent.

        Raises:
            CorruptData: The episode is damaged.
            SchemaError: Its columns are not columns of a batch.
        """

    def close(self) -> None:
        """Close all files."""


@runtime_checkable
class RunSource(Protocol):
    """A source that reads many short episodes at once; more of an `EpisodeSource`."""

    def load_run(self, first: int, stop: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read the episodes from ``first`` to ``stop``, with ``eps_id`` and ``t``; see `EpisodeSource`."""


def measure_row(rows: SampleBatch) -> int:
    """About how many bytes a row takes in memory, by the rows of an episode."""
    return max(1, rows.size_bytes() // max(1, len(rows)))


def with_next_obs(observations: Any) -> dict[str, Any]:
    """Columns ``obs`` and ``new_obs`` of an episode of N steps, as views of its N+1 observations.

    Args:
        observations: Array of N+1 rows, or such arrays nested in dicts and tuples.
    """
    return {
        Columns.OBS: map_structure(lambda leaf: leaf[:-1], observations),
        Columns.NEXT_OBS: map_structure(lambda leaf: leaf[1:], observations),
    }


def without_final_obs(observations: Any) -> dict[str, Any]:
    """Columns ``obs``, ``new_obs`` and ``new_obs_valid`` of an episode whose last observation is not stored.

    ``new_obs`` of the last row is zeros, and ``new_obs_valid`` is False there.

    Args:
        observations: Array of N rows, or such arrays nested in dicts and tuples.
    """

    def shifted(leaf: np.ndarray) -> np.ndarray:
        follow = np.zeros_like(leaf)
        follow[:-1] = leaf[1:]
        return follow

    valid = np.ones(len(leaves(observations)[0][1]), np.bool_)
    valid[-1:] = False
    return {
        Columns.OBS: observations,
        Columns.NEXT_OBS: map_structure(shifted, observations),
        Columns.NEXT_OBS_VALID: valid,
    }


class EpisodeReader(StoredReader):
    """Reads a data set that another library wrote, in one of the formats of `rlio.formats`.

    Rows are served in the order of the episodes, each episode in the order of its steps. ``eps_id`` numbers
    the episodes, and ``t`` the steps of each, unless the format has these columns. Without ``batch_size``,
    `sample` serves some thousands of rows. Shuffled, rows of some 16 places of the data set are mixed at a
    time. Each rank gets its share of every stretch of episodes.

    Args:
        inputs: The data set: a folder, a file, a glob, a URI, or a list of files.
        format: Name of the format, such as ``"minari"``; None: recognise it.
        format_options: Options of the format, see docs/foreign.md.
        limits: Bounds on the files.
        storage_options: Keywords of the fsspec filesystem.
        keywords: See `ReadOptions`.

    Attributes:
        format: The format.
        spaces: (observation space, action space) as the data set states them; None: it does not.

    Raises:
        DataNotFound: ``inputs`` name nothing, or the data set has no episode.
        UnknownLayout: The format is not known, or rlio does not read it.
        MissingExtra: The library that decodes the files is not installed.
        CorruptData: The data set is damaged. (UnsafeData: it exceeds ``limits``.)
        OptionError: An option is illegal.
    """

    @checked_keywords
    def __init__(
        self,
        inputs: StrPath | Sequence[StrPath],
        *,
        format: str | None = None,
        format_options: Mapping[str, Any] | None = None,
        limits: Limits = DEFAULT_LIMITS,
        storage_options: Mapping[str, Any] | None = None,
        **keywords: Unpack[ReadKeywords],
    ) -> None:
        ReadOptions.of(keywords)  # Raises before anything is opened.
        own = dict(format_options or {})
        found, place = locate_format(inputs, format=format, storage_options=storage_options, limits=limits)
        self._open(open_source(found, place, own, limits=limits), found, keywords, own)

    @classmethod
    def of(
        cls,
        source: EpisodeSource,
        format: Format,
        *,
        details: Mapping[str, Any] | None = None,
        **keywords: Unpack[ReadKeywords],
    ) -> Self:
        """Read an open source.

        Args:
            source: The episodes; owned by the reader.
            format: Their format.
            details: Everything besides the files that determines the rows, as JSON values; part of states.
            keywords: See `ReadOptions`.
        """
        made = cls.__new__(cls)
        made._open(source, format, keywords, dict(details or {}))
        return made

    def _open(
        self, source: EpisodeSource, format: Format, keywords: ReadKeywords, own: dict[str, Any]
    ) -> None:
        self.format: Format = format
        self._episodes, self._own = source, own
        self._is_shared = False
        try:
            options = ReadOptions.of(keywords)
            self.spaces: tuple[Any, Any] | None = self._episodes.spaces
            self._table = _EpisodeTable(self._episodes, options)

            def make_cursor(seed: int, failures: Failures) -> Cursor:
                return TableCursor(self._table, options, seed=seed, failures=failures)

            details = {"format": self.format.name, "format_options": own or None}
            StoredReader.__init__(self, options, self._episodes.files, make_cursor, details=details)
        except BaseException:
            self._episodes.close()
            raise

    @property
    def source(self) -> EpisodeSource:
        """The episodes, owned by the reader."""
        return self._episodes

    def again(self, **keywords: Unpack[ReadKeywords]) -> Self:
        """Another reader of the same open source, from its beginning; it must be closed before this one.

        Args:
            keywords: See `ReadOptions`.
        """
        made = type(self).of(self._episodes, self.format, details=self._own, **keywords)
        made._is_shared = True
        return made

    def _close(self) -> None:
        super()._close()
        if not self._is_shared:
            self._episodes.close()


class _EpisodeTable:
    """The rows of a source in groups of whole episodes; a `TableSource`."""

    def __init__(self, source: EpisodeSource, options: ReadOptions) -> None:
        self._episodes = source
        self._asked = options.columns
        self._wanted = None if options.columns is None else with_possible_validity(options.columns)
        self._uniform = Uniform(unlike=options.unlike)
        #: Rows before each episode, and all rows.
        self._starts = [0, *accumulate(source.lengths)]
        most = max(1, min(_GROUP_ROWS, _GROUP_BYTES // max(1, source.row_bytes)))
        #: First episode of each group, and the number of episodes.
        self._groups = [0]
        for episode in range(len(source.lengths)):
            rows = self._starts[episode + 1] - self._starts[self._groups[-1]]
            if rows > most and episode > self._groups[-1]:
                self._groups.append(episode)
        self._groups.append(len(source.lengths))
        ends = [self._starts[episode] for episode in self._groups]
        self.rows = [stop - start for start, stop in pairwise(ends)]
        self.sizes = [rows * source.row_bytes for rows in self.rows]

    def load(self, group: int, start: int, stop: int) -> SampleBatch:
        base = self._starts[self._groups[group]]
        first = bisect_right(self._starts, base + start) - 1
        last = bisect_left(self._starts, base + stop)
        step = last - first if isinstance(self._episodes, RunSource) else 1
        parts = []
        for episode in range(first, last, max(1, step)):
            begin = self._starts[episode]
            rows = self._rows(group, episode, episode + step)
            parts.append(rows[max(0, base + start - begin) : base + stop - begin])
        joined = parts[0] if len(parts) == 1 else concat_samples(parts)
        assert isinstance(joined, SampleBatch)
        return joined

    def _rows(self, group: int, episode: int, stop: int) -> SampleBatch:
        """The rows of the episodes from ``episode`` to ``stop``: several if the source takes more."""
        steps = self._starts[stop] - self._starts[episode]
        try:
            if isinstance(self._episodes, RunSource):
                rows = self._episodes.load_run(episode, stop, self._wanted)
            else:
                rows = self._episodes.load(episode, self._wanted)
            if len(rows) != steps:
                raise CorruptData(f"episode {episode} has {len(rows)} steps, expected {steps}")
            if Columns.EPS_ID not in rows:
                rows[Columns.EPS_ID] = np.full(steps, episode, np.int64)
            if Columns.T not in rows:
                rows[Columns.T] = np.arange(steps)
            check_asked(self._asked, rows)
            if self._wanted is not None:
                for name in rows.keys() - self._wanted:
                    del rows[name]
            conformed = self._uniform.conform(rows)
        except (CorruptData, SchemaError) as error:
            raise_at(error, uri=self._episodes.uri, record=group)
        assert isinstance(conformed, SampleBatch)
        return conformed
