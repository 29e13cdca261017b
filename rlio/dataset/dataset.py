"""`Dataset`: the rows stored under one root. It opens, lists and describes them; `DatasetReader` replays.

Example:
    >>> import numpy as np, rlio
    >>> with rlio.ParquetWriter("memory://dataset-example", writer_id="w00000-00000000") as writer:
    ...     writer.write(rlio.SampleBatch(obs=np.zeros((3, 4)), rewards=np.ones(3)))
    >>> data = rlio.open_dataset("memory://dataset-example")
    >>> len(data), data.snapshot()
    (3, {'w00000-00000000': 3})
    >>> with rlio.ParquetWriter("memory://dataset-example", writer_id="w00001-00000000") as writer:
    ...     writer.write(rlio.SampleBatch(obs=np.zeros((2, 4)), rewards=np.ones(2)))
    >>> len(rlio.open_dataset("memory://dataset-example", at=data.snapshot())), len(data.refresh())
    (3, 5)
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import Columns
from rlio.catalog.names import VIDEO_DIR
from rlio.errors import (
    CorruptData,
    DataNotFound,
    MissingColumn,
    OptionError,
    excerpt,
)
from rlio.read_options import ReadOptions
from rlio.resolve import read
from rlio.source.snapshot import DatasetSnapshot, Snapshot
from rlio.source.source import EpisodeInfo
from rlio.source.span_reader import GoneSegments
from rlio.storage.filesystem import Storage

if TYPE_CHECKING:
    import datasets
    import pandas
    import polars
    import pyarrow as pa

    from rlio.batch import SampleBatch
    from rlio.batch.episode import Episode
    from rlio.dataset.random_access import RandomAccess
    from rlio.look.episode_index import EpisodeIndex, Seen
    from rlio.look.episode_table import EpisodeTable
    from rlio.look.info import DatasetInfo, Stored
    from rlio.look.stats import Stats
    from rlio.query.filters import RowFilter, RowFunction

__all__ = ["Dataset", "EpisodeInfo", "Snapshot"]


class Dataset(DatasetSnapshot):
    """The live rows under one root, as listed when the data set was opened. Use `rlio.open_dataset`.

    Rows are ordered by writer id, then ascending within each writer.

    Args:
        storage: The root.
        listing: The objects under the root.
        at: The snapshot to show; None: all listed rows.
    """

    #: ``data.read(...)`` is ``rlio.read(data, ...)``: a reader of the listed rows, with the same options.
    read = read

    @classmethod
    def listed(cls, storage: Storage, *, at: Snapshot | None = None) -> Self:
        """List the root, and read its schemas: those of later writers are not of the listed rows.

        Those of a snapshot are found at first use, because this reads footers.
        """
        found = super().listed(storage, at=at)
        if at is None:
            # What needs a damaged one raises it; the snapshot, files and number of rows are of the listing.
            with suppress(CorruptData, DataNotFound):
                _ = found.schemas
        return found

    def to_arrow_batches(
        self,
        *,
        columns: list[str] | None = None,
        filter: str | RowFunction | RowFilter | None = None,
        policy: str | None = None,
        writers: bool = False,
        missing: Literal["error", "drop", "fill"] = "error",
        on_error: Literal["raise", "skip"] = "raise",
    ) -> pa.RecordBatchReader:
        """`to_arrow` as a stream of record batches of at most 32 MiB each (more only if one row is larger).

        Reads each row group on demand, so memory stays bounded. Iterate over the stream, or pass it to
        DuckDB, Polars or ``pyarrow.dataset.write_dataset``. The arguments are those of `to_arrow`. The stream
        raises the errors of damaged rows when it reads them.
        """
        from rlio.dataset.arrow_export import record_batches

        options = ReadOptions(columns=columns, on_error=on_error)
        return record_batches(self, options, filter=filter, policy=policy, writers=writers, missing=missing)

    def to_arrow(
        self,
        *,
        columns: list[str] | None = None,
        filter: str | RowFunction | RowFilter | None = None,
        policy: str | None = None,
        writers: bool = False,
        missing: Literal["error", "drop", "fill"] = "error",
        on_error: Literal["raise", "skip"] = "raise",
    ) -> pa.Table:
        """Return the live rows as one Arrow table in memory, one row per step, in the order of the data set.

        The values are those that `rlio.DatasetReader` serves: full ``new_obs`` and full frame stacks. Where a
        final observation is missing, ``new_obs`` holds zeros and ``new_obs_valid`` is False. The rows are
        those listed when the data set was opened. Later writes, compactions and collections do not change
        them.

        A row of several values is a list of fixed size (``fixed_size_list<float>[17]``), nested if the value
        has several axes. Objects (``infos``) are JSON text. Nested columns are split into leaves
        (``obs/position``). For data recorded in sequences, the first row of each sequence holds its
        ``seq_lens`` and ``state_in_k``; the other rows hold zeros.

        Args:
            columns: Logical columns to read (``obs`` for all of its leaves, ``obs/position`` for one); None:
                all. ``new_obs`` brings ``new_obs_valid``, if some final observation may be missing.
            filter: The rows to read, as for `rlio.DatasetReader`: a text such as ``"rewards > 0"``, or a
                function of a batch. Skips the row groups that the footer bounds rule out.
            policy: The policy whose rows to read. None: the rows of all policies, with the column
                ``policy_id``; the rows of a joint step follow each other. The policies must then have the
                read columns in common, with equal types.
            writers: Whether to add the column ``_writer`` with the writer id of each row. You need it if
                several writers use the same ``eps_id``.
            missing: What to do with columns that only some writers have: "error", "drop", or "fill" with
                zeros.
            on_error: What to do with damaged or missing rows: "raise", or "skip" and log how many.

        Raises:
            MissingColumn: A requested column does not exist.
            OptionError: The options contradict each other or do not fit the data.
            SchemaError: The policies do not share the columns, or Arrow has no such type (complex numbers).
            CorruptData: Rows are damaged. (HoleError: rows are missing.)
        """
        return self.to_arrow_batches(
            columns=columns,
            filter=filter,
            policy=policy,
            writers=writers,
            missing=missing,
            on_error=on_error,
        ).read_all()

    def to_pandas(
        self,
        *,
        columns: list[str] | None = None,
        filter: str | RowFunction | RowFilter | None = None,
        policy: str | None = None,
        writers: bool = False,
        missing: Literal["error", "drop", "fill"] = "error",
        on_error: Literal["raise", "skip"] = "raise",
    ) -> pandas.DataFrame:
        """Return `to_arrow` as a pandas data frame; ``numpy.stack(frame["obs"])`` is all observations.

        A row of several values is a NumPy array of the value's shape: a read-only view of the table.

        Raises:
            MissingExtra: pandas is not installed.
        """
        from rlio.dataset.arrow_export import pandas_frame

        return pandas_frame(
            lambda: self.to_arrow(
                columns=columns,
                filter=filter,
                policy=policy,
                writers=writers,
                missing=missing,
                on_error=on_error,
            )
        )

    def to_polars(
        self,
        *,
        columns: list[str] | None = None,
        filter: str | RowFunction | RowFilter | None = None,
        policy: str | None = None,
        writers: bool = False,
        missing: Literal["error", "drop", "fill"] = "error",
        on_error: Literal["raise", "skip"] = "raise",
    ) -> polars.DataFrame:
        """Return `to_arrow` as a Polars data frame; a row of several values has the type ``Array``.

        Raises:
            MissingExtra: Polars is not installed.
        """
        from rlio.dataset.arrow_export import polars_frame

        return polars_frame(
            lambda: self.to_arrow(
                columns=columns,
                filter=filter,
                policy=policy,
                writers=writers,
                missing=missing,
                on_error=on_error,
            )
        )

    # ---- by number, and statistics ----

    def take(
        self,
        rows: Sequence[int] | np.ndarray,
        *,
        columns: list[str] | None = None,
        missing: Literal["error", "drop", "fill"] = "error",
    ) -> SampleBatch:
        """Return rows by their numbers, in the given order; a number may come twice.

        The caller owns the rows. Decodes each row group in which a row lies, whole, and keeps the last one
        for the next call; for many random draws, use a `rlio.ReplayStore`. Several threads take turns.

        Args:
            rows: Numbers in the order of the data set, from 0; negative ones count from the end.
            columns: Logical columns, or parts (``obs/position``), as for `to_arrow`; None: all, without those
                that have a row a sequence.
            missing: What to do with columns that only some writers have: "error", "drop" or "fill".

        Raises:
            IndexError: There is no such row.
            OptionError: The data has several agents; or ``rows`` are not whole numbers, or none.
            CorruptData: A row group is damaged. (HoleError: rows are missing.)
        """
        numbers = np.asarray(rows)
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not len(numbers):
            raise OptionError(
                f"take({excerpt(rows)}): expected a list of row numbers, at least one", uri=self.uri
            )
        numbers = numbers.astype(np.int64)
        wrong = np.flatnonzero((numbers < -len(self)) | (numbers >= len(self)))
        if len(wrong):
            raise IndexError(f"no row {numbers[wrong[0]]} in {self.uri}, which has {len(self)} rows")
        return self._access(columns, missing).take(np.where(numbers < 0, numbers + len(self), numbers))

    def __getitem__(self, key: Any) -> Any:
        """One row as a dict (``data[3]``), or a batch of the rows of a slice or an array; see `take`."""
        if isinstance(key, str):
            raise OptionError(
                f"data[{excerpt(key)}]: expected numbers of rows, such as data[3] or data[:100]; a column is "
                f"data[:100][{excerpt(key)}], or of all rows data.to_arrow(columns=[{excerpt(key)}])",
                uri=self.uri,
            )
        if isinstance(key, slice):
            return self.take(np.arange(len(self))[key])
        if isinstance(key, int | np.integer) and not isinstance(key, bool):
            return next(iter(self.take([operator.index(key)]).rows()))
        found = np.asarray(key)
        if found.dtype == np.bool_ and found.shape != (len(self),):
            raise OptionError(f"a mask of shape {found.shape}: expected ({len(self)},)", uri=self.uri)
        return self.take(np.flatnonzero(found) if found.dtype == np.bool_ else found)

    @property
    def episode_count(self) -> int:
        """Number of episodes, unfinished ones included. The first call reads the footers of all shards."""
        return self._access(None, "error").episode_count

    def episode(self, number: int) -> Episode:
        """Return an episode by its number, in the order of first rows; fragments and shards are joined.

        Decodes the shards in which its rows lie. Rows without ``eps_id`` follow each other until one ends the
        episode; the number is then the id. Several threads take turns.

        Raises:
            IndexError: There is no such episode.
            MissingColumn: The data lacks obs, actions or rewards.
            SchemaError: Rows of the episode are missing, or a ``new_obs`` is not the next ``obs``.
            CorruptData: A row group is damaged. (HoleError: rows are missing.)
        """
        index, count = operator.index(number), self.episode_count
        if not -count <= index < count:
            raise IndexError(f"no episode {index} in {self.uri}, which has {count} episodes")
        return self._access(None, "error").episode(index % count)

    @property
    def episodes(self) -> EpisodeTable:
        """The table of the episodes: one row an episode, in the order of `episode`.

        ``data.episodes["return"]`` is an array; see `rlio.EpisodeTable` for the columns, sorting and filters.
        The first call reads the footers of all shards, and the narrow columns (rewards, ends, ids) where
        only a part of a shard is live, or where the shards are JSON. The table is kept, also in a small file
        in ``rlio/episodes`` of the user's cache folder, which the next process reads; never below the root.
        After rows were added, trimmed or compacted, it is made again.

        Raises:
            CorruptData: A shard is damaged. (HoleError: rows are missing.)
        """
        known = vars(self).get("_table")
        if known is None:
            from rlio.look.episode_table import episodes_of

            self.check_complete()
            known = self._table = episodes_of(self, self._joined_episodes)
        table: EpisodeTable = known
        return table

    def _joined_episodes(self, seen: Seen | None = None) -> EpisodeIndex:
        from rlio.look.episode_index import read_episodes

        return GoneSegments("raise").read(self, partial(read_episodes, seen=seen))

    def returns(self) -> NDArray[np.float64]:
        """Return the sum of the rewards of each episode, undiscounted, float64, in the order of `episodes`.

        Episodes without their last or first rows count with the rows that are there;
        ``data.episodes.filter("finished")["return"]`` leaves them out. The caller owns the array.

        Raises:
            MissingColumn: The data has no rewards.
            CorruptData: A shard is damaged. (HoleError: rows are missing.)
        """
        from rlio.source.row_streams import plain_rewards

        policies = [policy for schema in self.schemas.values() for policy in schema.policies.values()]
        if policies and all(plain_rewards(policy) is None for policy in policies):
            raise MissingColumn(
                "returns are sums of rewards, and the data has no column of one number a row with this name",
                uri=self.uri,
                column=Columns.REWARDS,
            )
        found: NDArray[np.float64] = self.episodes["return"].copy()
        return found

    def lengths(self) -> NDArray[np.int64]:
        """Return the number of rows of each episode, int64, in the order of `episodes`.

        The caller owns the array.

        Raises:
            CorruptData: A shard is damaged. (HoleError: rows are missing.)
        """
        found: NDArray[np.int64] = self.episodes["length"].copy()
        return found

    def _access(self, columns: list[str] | None, missing: Literal["error", "drop", "fill"]) -> RandomAccess:
        from rlio.dataset.random_access import RandomAccess

        key = (None if columns is None else tuple(columns), missing)
        known = vars(self).get("_accessed")
        if known is None or known[0] != key:
            known = self._accessed = key, RandomAccess(self, columns, missing)
        return known[1]

    def stats(
        self,
        columns: Sequence[str] | None = None,
        *,
        policy: str | None = None,
        missing: Literal["error", "drop", "fill"] = "error",
        on_error: Literal["raise", "skip"] = "raise",
        cache_folder: str | os.PathLike[str] | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Stats:
        """Return mean, std, min, max, quantiles and count of columns, for each value of a row.

        Reads the columns once, in bounded memory. Keeps the result in a small file, which the next call for
        the same rows reads; after rows were added, trimmed or compacted, it computes again.

        Args:
            columns: Logical columns with numbers, or parts of them (``obs/position``). None: all columns
                with numbers except the ones that name rows (``eps_id``, ``agent_index``, ``env_id``,
                ``env_seed``, ``unroll_id``), and ``new_obs``, which repeats ``obs``.
            policy: With several policies, the one whose rows count.
            missing: What to do with columns that only some writers have: "error", "drop", or "fill": their
                zeros count.
            on_error: What to do with damaged or missing rows: "raise", or "skip" them; the result is then
                not kept.
            cache_folder: Folder of the files; None: ``rlio/stats`` in the user's cache folder. Never the
                root. If it cannot be written, nothing is kept.
            progress: Called with the number of rows of each part that was read.

        Raises:
            MissingColumn: A named column does not exist.
            OptionError: A named column has no numbers; there are several policies, or no rows.
            CorruptData: Rows are damaged. (HoleError: rows are missing.)
        """
        from rlio.look.stats import read_stats

        return read_stats(
            self,
            columns,
            policy=policy,
            missing=missing,
            on_error=on_error,
            cache_folder=cache_folder,
            progress=progress,
        )

    def info(
        self, *, ranges: bool = False, cache_folder: str | os.PathLike[str] | None = None
    ) -> DatasetInfo:
        """Return what the data is and holds: rows, episodes, returns, lengths, columns, spaces, times.

        Its `repr` is a text of at most ten lines; `rlio.DatasetInfo` has the parts.

        Costs what `episodes` costs: one pass over the footers, or over the narrow columns where files have no
        such footers. The least and greatest values of columns are those that footers state, and those that
        are known from an earlier call with ``ranges=True``; the others are None, "range not read". What is
        found is kept in a small file, which the next call for the same rows reads.

        Args:
            ranges: Whether to read all columns with numbers, once, for their ranges and shares of NaN, as
                `stats` does.
            cache_folder: Folder of the files; None: in the user's cache folder. Never the root.

        Raises:
            CorruptData: A shard is damaged. (HoleError: rows are missing.)
        """
        from rlio.look.info import info_of, read_columns

        stored = self._stored(cache_folder)
        policies = {policy for schema in self.schemas.values() for policy in schema.policies}
        found: dict[str, Stats | None] = {}
        for policy in policies if len(self) else ():
            if names := read_columns(self, policy):
                found[policy] = self._range_stats(names, policy, ranges=ranges, cache_folder=cache_folder)
        return info_of(self, self.episodes, stored, found)

    def _range_stats(
        self, names: list[str], policy: str, *, ranges: bool, cache_folder: str | os.PathLike[str] | None
    ) -> Stats | None:
        """The statistics of columns; without ``ranges``, if an earlier call has read them."""
        from rlio.look.episode_index import rows_bar
        from rlio.look.stats import known_stats

        if ranges:
            with rows_bar("ranges", self) as bar:
                return self.stats(names, policy=policy, cache_folder=cache_folder, progress=bar.update)
        return known_stats(self, names, policy=policy, cache_folder=cache_folder)

    def _stored(self, cache_folder: str | os.PathLike[str] | None) -> Stored:
        """What is stored besides rows. The pass over the footers that finds it finds the episodes, too."""
        from rlio.look.episode_table import episodes_of
        from rlio.look.info import Survey

        self.check_complete()
        survey = Survey.kept(self, cache_folder)
        if survey is None:
            survey = Survey()
            index = self._joined_episodes(survey.add)
            if vars(self).get("_table") is None:
                self._table = episodes_of(self, lambda: index)
            survey.keep(self, cache_folder)
        has_videos = any(schema.has_videos for schema in self.schemas.values())
        videos = self.storage.list(VIDEO_DIR) if has_videos else []
        return survey.stored(
            bytes=self.bytes() + sum(entry.size or 0 for entry in videos),
            files=len(self.segments) + len(videos),
        )

    def to_hf(
        self,
        *,
        columns: list[str] | None = None,
        filter: str | RowFunction | RowFilter | None = None,
        policy: str | None = None,
        writers: bool = False,
        missing: Literal["error", "drop", "fill"] = "error",
        on_error: Literal["raise", "skip"] = "raise",
    ) -> datasets.Dataset:
        """Return `to_arrow` as a Hugging Face `datasets.Dataset` over the same memory.

        Raises:
            MissingExtra: datasets is not installed.
        """
        from rlio.dataset.arrow_export import hf_dataset

        return hf_dataset(
            lambda: self.to_arrow(
                columns=columns,
                filter=filter,
                policy=policy,
                writers=writers,
                missing=missing,
                on_error=on_error,
            )
        )
