"""`DatasetReader`: replays a data set written by rlio, in recorded order or shuffled, exactly resumable.

A background thread decodes one row group ahead. The shuffled order permutes windows of row groups, and the
rows within each (`rlio.replay.order.WindowOrder`). With ``follow=True`` the reader follows a data set that
other processes are still writing.

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
from functools import partial
from typing import Any, Literal, Unpack

from rlio.dataset.dataset import Dataset, Snapshot, opened, refuse_open_options
from rlio.dataset.stats import Normalise, Normaliser, Stats
from rlio.errors import OptionError, excerpt
from rlio.following.follow import FollowPass
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.reader import Endless
from rlio.readers.growing_pass import GrowingPass, SnapshotPass, dataset_of
from rlio.readers.read_options import ReadOptions
from rlio.readers.source_reader import DRAWN, Asked, SourceKeywords, SourceReader, open_pass
from rlio.readers.stored_pass import Cache
from rlio.storage.filesystem import Storage
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

    With ``follow=True`` it reads a data set that may still grow, or may not exist yet, in one unshuffled
    pass: every row once, in order within each writer, also while the data set is compacted. `sample` waits
    for rows. The data ends when every writer is closed (sealed) and served, or after ``idle_timeout`` seconds
    without a row. The end is final; a fresh reader that loads the state continues from there. Writers are
    served in turns, in the order of their ids; new writers join when they appear. Without ``batch_size`` a
    batch holds the rows that are available, up to 4,096. With ``shard=(rank, world)``, each rank follows its
    own writers: those whose CRC-32 of the id, modulo world, equals rank. Each rank then has its own state.
    With ``missing="fill"``, columns that a later writer adds appear from that point on.

    Several threads may call it: see `rlio.InputReader`.

    Args:
        root: Folder of the data set: a path or any fsspec URL; or an open `Dataset`.
        at: A snapshot from `Dataset.snapshot`: the reader reads exactly its rows, and none that were added
            later.
        grow: Whether each epoch reads the rows that exist when it begins, instead of those at opening. Only
            for one reader without ``at``. An epoch reads the snapshot of its beginning, also in a reader that
            loads its state: the state holds the snapshot, one number for each writer. If no rows exist, the
            data ends for this call; the next call looks again.
        follow: Whether to follow the data set as it grows; without ``epochs``, ``shuffle``, ``at``.
        idle_timeout: When following, seconds to wait for the next row; None: no limit, 0: no waiting.
        poll_seconds: When following, least seconds between two listings while no rows are available; at least
            ten times the duration of a listing.
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
            ``normaliser(...)``. With ``grow`` or ``follow``, only the last two. The state names the
            statistics, and loads only with equal ones. None: values as recorded.
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
        grow: bool = False,
        follow: bool = False,
        idle_timeout: float | None = None,
        poll_seconds: float = 1.0,
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
        asked = Asked.of(keywords)
        self.options: ReadOptions = asked.options
        self.drop_last: bool = self.options.drop_last
        draw = asked.draw
        self._pass: SnapshotPass | GrowingPass | FollowPass
        self._normaliser: Normaliser | None = None
        if (follow or grow) and not isinstance(normalise, Normaliser | Stats | None):
            raise OptionError(
                f"normalise={excerpt(normalise)}: the statistics of data that grows change with it; pass "
                "those of a snapshot, normalise=dataset.stats()"
            )
        if follow:
            choosy = asked.drawn or cache in ("memory", "disk")
            _check_follow(choosy=choosy, bounded=at is not None or grow)
            storage = _storage(root, storage_options, limits)
            self._uri = storage.uri
            self._pass = FollowPass(
                storage, self.options, missing, idle_timeout=idle_timeout, poll_seconds=poll_seconds
            )
            if normalise is not None:
                self._normaliser = Normaliser.of(normalise, None, columns=self.options.columns)
            return
        if idle_timeout is not None or poll_seconds != 1.0:
            raise OptionError("idle_timeout and poll_seconds need follow=True: no other reader waits")
        # With ranks or drop_last, reading ahead changes the rows that are dropped. A subclass may do anything
        # to its rows.
        alone = self.options.shard[1] == 1 and type(self) is DatasetReader
        self.can_read_ahead: bool = alone and not (grow or self.drop_last)
        dataset = opened(
            root, at=at, on_error=self.options.on_error, storage_options=storage_options, limits=limits
        )
        self._uri = dataset.uri
        if normalise is not None:
            self._normaliser = Normaliser.of(
                normalise, dataset, policy=draw.policy, columns=self.options.columns
            )
        opens = partial(open_pass, draw=draw, cache=cache, missing=missing)
        if grow:
            _check_growth(dataset, self.options)
            self._pass = GrowingPass(dataset, self.options, missing, opens)
        else:
            self._pass = opens(dataset, self.options)

    @property
    def _reading(self) -> SnapshotPass | FollowPass:
        """The pass; with ``grow``, that of this epoch."""
        if not isinstance(self._pass, GrowingPass):
            return self._pass
        with self._turns_of_threads.held():  # Between two epochs, only `sample` may open the next.
            return self._pass.current

    @property
    def dataset(self) -> Dataset:
        """The data set, as listed last.

        Raises:
            DataNotFound: The reader follows a data set that does not exist yet.
        """
        reading = self._reading
        if isinstance(reading, FollowPass):
            return reading.dataset
        return dataset_of(reading)

    @property
    def skipped(self) -> int:
        """Rows lost to damage so far, with ``on_error="skip"``."""
        if not isinstance(self._pass, GrowingPass):
            return self._pass.skipped
        with self._turns_of_threads.held():
            return self._pass.skipped

    # ---- hooks of InputReader ----

    def _endless(self) -> Endless | None:
        if self.options.epochs is not None or isinstance(self._pass, FollowPass):
            return None
        return Endless(self.epoch, len(self))


def _storage(
    root: str | os.PathLike[str] | Dataset, storage_options: Mapping[str, Any] | None, limits: Limits
) -> Storage:
    """The storage of the data set, which may not exist yet."""
    if isinstance(root, Dataset):
        refuse_open_options(storage_options, limits)
        return root.storage
    return Storage.open(root, storage_options=storage_options, limits=limits)


def _check_follow(*, choosy: bool, bounded: bool) -> None:
    """Refuse options that contradict following.

    Args:
        choosy: Whether rows are drawn, or kept in a store.
        bounded: Whether the rows are those of a snapshot, or of epochs.

    Raises:
        OptionError: One of them is true.
    """
    if choosy:
        raise OptionError("follow=True gives rows in recorded order; leave out cache, " + ", ".join(DRAWN))
    if bounded:
        raise OptionError(
            "follow=True follows new rows, at=... reads a fixed snapshot, and grow=True adds rows at each "
            "epoch: pass only one of the three"
        )


def _check_growth(dataset: Dataset, options: ReadOptions) -> None:
    """Refuse growth if readers could not agree on it.

    Raises:
        OptionError: The rows are those of a snapshot, or are divided among ranks.
    """
    if dataset.pinned:
        raise OptionError("grow=True contradicts a snapshot, which does not grow: leave out at, or grow")
    if options.shard[1] > 1:
        raise OptionError(
            f"grow=True, shard={options.shard}: ranks would list at different times and see different rows. "
            "For each epoch, take a snapshot on one rank, rlio.open_dataset(root).snapshot(), and pass it as "
            "at= to the readers of all ranks"
        )
