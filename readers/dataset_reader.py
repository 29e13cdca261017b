"""`DatasetReader`: replays a data set written by rlio, in recorded order or shuffled, exactly resumable.

A background thread decodes one row group ahead. The shuffled order permutes windows of row groups, and the
rows within each (`rlio.replay.order.WindowOrder`). `rlio.FollowReader` reads a data set that other processes
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

import os
from collections.abc import Mapping
from typing import Any, Literal, Unpack

from rlio.dataset.dataset import Dataset, Snapshot, opened
from rlio.dataset.file_dataset import FileDataset
from rlio.dataset.stats import Normalise
from rlio.errors import OptionError, StateError, excerpt
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.reader import JsonState
from rlio.readers.read_options import ReadOptions
from rlio.readers.source_reader import Asked, SourceKeywords, SourceReader
from rlio.readers.stored_pass import Cache
from rlio.support.options import check_choice, checked_keywords

__all__ = ["DatasetReader"]


class DatasetReader(SourceReader):
    """Reads the data set under ``root``, in recorded order or shuffled.

    Rows keep the column order, dtypes and shapes in which they were written. ``n`` and ``batch_size`` count
    sequences if the data has ``seq_lens``, and joint steps if several agents were recorded. Without
    ``batch_size`` a batch has 4,096 rows, or those of one row group if rows are wide; for an endless reader,
    at most all rows. The caller owns the rows of a batch: they are writable, and no other batch shares them.

    All ranks of a ``shard=(rank, world)`` walk the same order. Rank r takes slice r of every
    ``world * batch_size`` positions, so states are equal on all ranks after equal calls. With
    ``on_error="skip"`` all ranks skip the positions of damaged rows, and later rows move up. To do so, each
    rank looks at the rows of all ranks. A batch is then short only at the end.

    To read rows that are added later, open another reader for each epoch with a newer snapshot
    (docs/replay.md), or follow the data set with `rlio.FollowReader`.

    Several threads may call it: see `rlio.InputReader`.

    Args:
        root: Folder of the data set: a path or any fsspec URL; or an open `Dataset`.
        at: A snapshot from `Dataset.snapshot`: the reader reads exactly its rows, and none that were added
            later.
        cache: Where rows are kept for random access: in "memory", on "disk" (mapped files in a folder that
            runs and processes share: ``RLIO_CACHE`` and ``RLIO_CACHE_BYTES``, see
            `rlio.replay.cache.CacheFolder`), or "none": shards are decoded as they are read. The order of
            shuffled rows depends on it. A store gives one permutation of all rows; "none" permutes windows of
            row groups, and rows within each. "auto" chooses by the size that a store would have, the same on
            every machine: up to 2 GiB memory, up to 64 GiB disk, above none. It chooses none for rows in
            recorded order. The attribute `cache` and the log show the choice.
        missing: What to do with columns that only some writers have: "error", "drop" them, or "fill"
            them with zeros.
        storage_options: For fsspec.
        limits: Limits on the data's demands: memory, names, depth.
        normalise: Brings columns to one range, as float32, by statistics of the whole data set
            (`Dataset.stats`). "mean_std" (mean 0, standard deviation 1) or "min_max" (-1 to 1): for the
            floats of ``obs`` and ``new_obs``. Or a dict of columns, or parts (``obs/position``), to these;
            arrays of integers (choices, pictures) in a nested column only if they are named themselves. Or
            statistics of this or other data, for the floats of ``obs`` by "mean_std"; or their
            ``normaliser(...)``. The state names the statistics, and loads only with equal ones. None: values
            as recorded.
        batch_size: Rows (sequences, episodes, joint steps) of a batch; see above for None.
        epochs: Passes over the data; None: endless.
        shuffle: Whether the order is a seeded permutation, different in each epoch; otherwise as recorded.
        seed: Seed of the order, the same for all ranks. None draws one from the OS, logs it and keeps it in
            the state; ranks that shuffle need one.
        shard: (rank, world): which part of the rows is read; see above.
        columns: Names of the columns to read, or of parts of nested ones (``obs/position``: ``obs`` is then a
            dict of these), also those of ``derive``; None: all. Other columns are not decoded. ``new_obs``
            brings ``new_obs_valid``, if some final observation may be missing.
        on_error: What to do with damaged rows: "raise", or "skip", which counts them in `skipped` and logs.
        drop_last: Whether to drop the last batch if it is shorter than ``batch_size``.
        n_step: n-step transitions. ``rewards`` are discounted sums over up to ``n_step`` rows; ``new_obs``
            and the end flags are those of the last row. ``n_step_discount`` (float32) is gamma to the power
            of the steps taken. ``bootstrap_mask`` (float32) is 0 after a termination and where the final
            observation is missing. None: rows as recorded.
        gamma: Discount per step, with ``n_step`` and for ``mc_return``.
        sequence_length: Sequences of ``burn_in + sequence_length`` rows, padded with zeros, with
            ``seq_lens``, the column ``burn_in`` (True for rows that only warm up the state) and
            ``state_in_k`` from the recorded ``state_out_k``. None: no sequences.
        burn_in: Rows before each sequence that warm up the state.
        overlap: Rows that a sequence shares with the previous one.
        episodes: Whether a unit is a whole episode; batches have ``seq_lens``.
        policy: With several policies, the one whose rows are read, as `SampleBatch`; None: joint steps of
            all.
        filter: Which rows are read: a text such as ``"rewards > 0"``, or a function of columns. For sequences
            and episodes, the filter applies to their first rows. A text may read the columns of ``derive``,
            also if they are not derived, and compare them with quantiles of the episodes:
            ``"episode_return >= quantile(0.9)"`` reads the best tenth. This needs a store.
        split: ("train", share) or ("test", share): only the episodes of that side. A hash of ``eps_id``
            decides, with the writer's id unless the ids were drawn at random: in a data set an episode never
            changes sides, also when data is added or compacted. A conversion has other writers. None: all.
        derive: Columns to add, float32: "returns_to_go" (undiscounted sum of the rewards from the row on),
            "mc_return" (discounted by ``gamma``), "episode_return", "episode_length". NaN if rows are
            missing: the first two in an unfinished episode, the others also if the first rows are missing.
            Episodes are whole, across shards; a truncated episode ends without a bootstrapped value.
        starts: "strided": sequences begin ``sequence_length - overlap`` rows apart. "all": one begins at each
            row; the last ones of an episode are short.
        padding: Side of the zeros in a short sequence; "left" only with ``layout="time"``.
        layout: "rows": the sequences of a batch in one axis. "time": columns (sequences, rows, ...) with the
            bool column ``mask`` (True: not padding) instead of ``seq_lens``; ``state_in_k`` and priorities
            have one value a sequence.
        views: Whether columns are strided views of one block of rows instead of contiguous copies, which is
            faster. If each ``new_obs`` is the next ``obs``, wide ``obs`` and ``new_obs`` overlap and are
            read-only.
        indexes: Whether batches have the column ``batch_indexes``: the rows' logical numbers.

    The options from ``n_step`` on need a store (see ``cache``), except ``filter`` and ``split``. Without a
    store, opening the reader decodes the columns that these two read, except where the bounds in the footers
    decide. It keeps at most 4 bytes for each row that passes (and at most a bit for each row that exists).
    Neither works without a store for joint steps of several agents.

    Raises:
        DataNotFound: The data set does not exist, or is empty.
        CorruptData: Rows are damaged; with ``on_error="skip"`` they are counted in `skipped`.
        HoleError: Rows are missing, also rows of the snapshot; otherwise like CorruptData, its base class.
        OptionError: The reader is endless (``epochs=None``), and a batch is larger than the data.
        LedgerError: The row count of a store differs from the count in the shards' names: a bug in rlio.
    """

    @checked_keywords
    def __init__(
        self,
        root: str | os.PathLike[str] | Dataset,
        *,
        at: Snapshot | None = None,
        cache: Cache = "auto",
        missing: Literal["error", "drop", "fill"] = "error",
        storage_options: Mapping[str, Any] | None = None,
        limits: Limits = DEFAULT_LIMITS,
        normalise: Normalise | None = None,
        **keywords: Unpack[SourceKeywords],
    ) -> None:
        check_choice("cache", cache, ("auto", "memory", "disk", "none"))
        if isinstance(keywords.get("columns"), str):
            raise OptionError(
                f"columns={excerpt(keywords['columns'])}: expected a list of names, or None for all columns; "
                "for columns that only some writers have, pass missing='error', 'drop' or 'fill'"
            )
        if isinstance(root, FileDataset):
            raise OptionError(
                "DatasetReader reads data sets of rlio, and these files are of another library: pass them to "
                "rlio.read()",
                uri=root.uri,
            )
        asked = Asked.of(keywords)
        self.options: ReadOptions = asked.options
        self.drop_last: bool = self.options.drop_last
        # With ranks or drop_last, reading ahead changes the rows that are dropped. A subclass may do anything
        # to its rows.
        alone = self.options.shard[1] == 1 and type(self) is DatasetReader
        self.can_read_ahead: bool = alone and not self.drop_last
        dataset = opened(
            root, at=at, on_error=self.options.on_error, storage_options=storage_options, limits=limits
        )
        self._uri = dataset.uri
        self._open(dataset, asked, cache=cache, missing=missing, normalise=normalise)

    @property
    def dataset(self) -> Dataset:
        """The data set, as listed last."""
        found = self._pass.source
        assert isinstance(found, Dataset)
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
