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

    Rows keep the column order, dtypes and shapes in which they were written. The caller owns the rows of a
    batch: they are writable, and no other batch shares them. Several threads may call it: see
    `rlio.InputReader`. docs/reading.md describes the options in full.

    With ``follow=True`` it reads a data set that may still grow, or may not exist yet, in one unshuffled
    pass: every row once, in order within each writer. `sample` waits for rows. The data ends when every
    writer is closed and served, or after ``idle_timeout`` seconds without a row. With ``shard=(rank, world)``
    each rank follows writers of its own, and has its own state.

    Args:
        root: Folder of the data set: a path or any fsspec URL; or an open `Dataset`.
        at: A snapshot from `Dataset.snapshot`, whose rows alone are read.
        grow: Whether each epoch reads the rows that exist when it begins; for one reader without ``at``.
        follow: Whether to follow the data set as it grows; without ``epochs``, ``shuffle``, ``at``.
        idle_timeout: When following, seconds to wait for the next row; None: no limit.
        poll_seconds: When following, least seconds between two listings while no rows are available.
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
