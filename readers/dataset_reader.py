"""`DatasetReader`: replays a data set written by rlio, in recorded order or shuffled, exactly resumable.

A background thread decodes one row group ahead. The shuffled order permutes windows of row groups, and the
rows within each (`rlio.query.order.WindowOrder`). `rlio.FollowReader` reads a data set that other processes
are still writing.

Example:
    >>> import numpy as np, rlio
    >>> with rlio.ParquetWriter("memory://dataset-reader-example") as writer:
    ...     writer.write(rlio.SampleBatch(obs=np.arange(10.0), t=np.arange(10)))
    >>> reader = rlio.DatasetReader("memory://dataset-reader-example", batch_size=4, epochs=1)
    >>> [len(batch) for batch in reader]
    [4, 4, 2]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack

from rlio.errors import OptionError, StateError, excerpt
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.opening import OtherFiles, Root, opened_roots
from rlio.reader import JsonState
from rlio.readers.source_reader import Asked, SourceKeywords, SourceReader
from rlio.source.joined import JoinedRoots, Snapshots
from rlio.source.snapshot import DatasetSnapshot
from rlio.support.options import checked_keywords

__all__ = ["DatasetReader"]


class DatasetReader(SourceReader):
    """Reads the data set under ``root``, in recorded order or shuffled.

    Rows keep the column order, dtypes and shapes in which they were written. The caller owns the rows of a
    batch: they are writable, and no other batch shares them. Several threads may call it: see
    `rlio.InputReader`. docs/reading.md describes the options in full.

    To read rows that are added later, open another reader for each epoch with a newer snapshot
    (docs/replay.md), or follow the data set with `rlio.FollowReader`.

    Args:
        root: Folder of the data set: a path or any fsspec URL; an open `Dataset`; or a list of these, whose
            rows are read as those of one data set, in this order.
        at: A snapshot from `Dataset.snapshot`, whose rows alone are read; of a list, one for each data set,
            or None.
        cache: Where rows are kept: in "memory", on "disk" (mapped files that processes share), or "none":
            decoded as they are read. "auto" chooses by size. The order of shuffled rows depends on it.
        missing: What to do with columns that only some writers have: "error", "drop" or "fill" with zeros.
        storage_options: For fsspec.
        limits: Limits on the data's demands: memory, names, depth.
        normalise: Scales columns by statistics of the data set (`Dataset.stats`): "mean_std", "min_max", a
            dict of columns to these, statistics, or their ``normaliser(...)``. None: values as recorded.
        batch_size: Units of a batch: rows, or sequences, episodes, joint steps. None: 4,096 rows or fewer.
        epochs: Passes over the data; None: endless.
        shuffle: Whether the order is a seeded permutation, different in each epoch; otherwise as recorded.
        seed: Seed of the order, the same for all ranks. None: one from the OS, logged and kept in the state.
        shard: (rank, world): which part of the rows is read.
        columns: Names of the columns to read, or of parts of nested ones (``obs/position``); None: all.
        on_error: What to do with damaged rows: "raise", or "skip", which counts them in `skipped` and logs.
        drop_last: Whether to drop the last batch if it is shorter than ``batch_size``.
        draw: What a unit is: `rlio.NStep`, `rlio.Sequences` or `rlio.WholeEpisodes`. None: a row, a joint
            step of several agents, or a sequence as recorded.
        policy: With several policies, the one whose rows are read, as `SampleBatch`; None: joint steps.
        filter: Which rows are read: a function of columns, or a text such as ``"rewards > 0"`` or
            ``"episode_return >= quantile(0.9)"``. For sequences and episodes, by their first rows.
        split: ("train", share) or ("test", share): only the episodes of that side, by a stable hash.
        derive: Columns to add, float32: "returns_to_go", "mc_return(0.99)" (discounted), "episode_return",
            "episode_length". NaN if rows of the episode are missing.
        views: Whether columns are strided views of one block of rows, which is faster; wide ``obs`` and
            ``new_obs`` may then overlap and be read-only.
        indexes: Whether batches have the column ``batch_indexes``: the rows' logical numbers.

    Raises:
        DataNotFound: The data set does not exist, or is empty.
        CorruptData: Rows are damaged. (HoleError: rows are missing.)
        OptionError: An option is illegal; or the reader is endless, and a batch is larger than the data.
        LedgerError: The row count of a store differs from the count in the shards' names: a bug in rlio.
    """

    @checked_keywords
    def __init__(
        self,
        root: Root | Sequence[Root],
        *,
        at: Snapshots | None = None,
        missing: Literal["error", "drop", "fill"] = "error",
        storage_options: Mapping[str, Any] | None = None,
        limits: Limits = DEFAULT_LIMITS,
        **keywords: Unpack[SourceKeywords],
    ) -> None:
        if isinstance(keywords.get("columns"), str):
            raise OptionError(
                f"columns={excerpt(keywords['columns'])}: expected a list of names, or None for all columns; "
                "for columns that only some writers have, pass missing='error', 'drop' or 'fill'"
            )
        if isinstance(root, OtherFiles):
            raise OptionError(
                "DatasetReader reads data sets of rlio, and these files are of another library: pass them to "
                "rlio.read()",
                uri=root.uri,
            )
        asked = Asked.of(keywords)
        on_error = asked.options.on_error
        dataset = opened_roots(root, at=at, on_error=on_error, storage_options=storage_options, limits=limits)
        self._open(dataset, asked, missing=missing)
        if type(self) is not DatasetReader:
            self.can_read_ahead: bool = False  # A subclass may do anything to its rows.

    @property
    def dataset(self) -> DatasetSnapshot | JoinedRoots:
        """The data set, or the data sets, as listed last."""
        found = self._pass.source
        assert isinstance(found, DatasetSnapshot | JoinedRoots)
        return found

    # ---- hooks of InputReader ----

    def _seek(self, position: JsonState) -> None:
        if "rows" in position:
            raise StateError(
                "the state was saved by a reader that followed the data set: load it into a "
                "rlio.FollowReader",
                uri=self._uri,
            )
        at = position.get("at")  # Earlier versions saved it in the state of an epoch of data that grows.
        if at is not None and position.get("snapshot") != self.dataset.state_identity:
            raise StateError(
                "the state is of an epoch over another snapshot: pass that as at=state['position']['at']",
                uri=self._uri,
            )
        super()._seek(position)
