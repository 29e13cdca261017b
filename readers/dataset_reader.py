"""`DatasetReader`: replays a data set written by rlio, in recorded order or shuffled, exactly resumable.

Row groups are decoded one ahead, in a background thread. Shuffled, the order is a permutation of windows of
row groups and of the rows within each (`rlio.replay.order.WindowOrder`). With ``follow=True`` it goes along
with a data set that others are still writing.

Example:
    >>> import numpy as np, rlio
    >>> with rlio.ParquetWriter("memory://dataset-reader-example") as writer:
    ...     writer.write(rlio.SampleBatch(obs=np.arange(10.0), t=np.arange(10)))
    >>> reader = rlio.DatasetReader("memory://dataset-reader-example", batch_size=4, epochs=1)
    >>> [len(batch) for batch in reader]
    [4, 4, 2]
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, Literal, Unpack, cast

from rlio.batch import Batch
from rlio.dataset.dataset import Dataset, Snapshot, opened, refuse_open_options
from rlio.errors import OptionError, excerpt
from rlio.following.follow import FollowPass
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.reader import Endless, InputReader, JsonState, Unit
from rlio.readers.cold_pass import ColdPass
from rlio.readers.growing_pass import GrowingPass, SnapshotPass
from rlio.readers.read_options import ReadKeywords, ReadOptions
from rlio.readers.stored_pass import Cache, Kept, StoredPass, choose_cache
from rlio.replay.draws import Draw
from rlio.replay.joint_gather import RowSource
from rlio.replay.store import DrawKeywords, UnitKeywords, draw_of
from rlio.storage.filesystem import Storage
from rlio.support.options import checked_keywords

__all__ = ["DatasetReader"]


class DatasetKeywords(ReadKeywords, UnitKeywords, total=False):
    """The keyword options of a `DatasetReader` that say what is read."""


_DRAWN: Final = tuple(UnitKeywords.__annotations__)


class DatasetReader(InputReader):
    """Reads the data set under ``root``; see `ReadOptions` for the keywords that all readers share.

    Rows come as they were written: column order, dtypes and shapes. With ``seq_lens`` in the data, ``n`` and
    ``batch_size`` count sequences; where several agents were recorded, joint steps. Without ``batch_size`` a
    batch has 4,096 rows, or those of a row group where rows are wide; of an endless reader, no more than all.
    The rows of a batch are the caller's: writable, and shared with no other batch.

    All ranks of a ``shard=(rank, world)`` walk the same order, and rank r takes slice r of every
    ``world * batch_size`` positions, so that states are equal on all ranks after equal calls. With
    ``on_error="skip"`` positions of damaged rows are passed over and later rows move up, for all ranks alike:
    each of them looks at the rows of all then, and a batch is short only at the end.

    With ``follow=True`` it reads a data set that may still grow, or not be there yet, in one unshuffled pass:
    every row once, in order within each writer, whatever is compacted meanwhile. `sample` waits for rows.
    It ends once every writer is closed (sealed) and served, or after ``idle_timeout`` seconds of waiting in
    vain; the end is final, and a fresh reader that loads the state goes on from there. New writers are taken
    up as they appear; until then the order of writers is that of their ids, taken in turns. Without
    ``batch_size`` a batch is what is there, up to the 4,096 rows. Of a ``shard=(rank, world)``, each rank
    follows the writers of its own: those with CRC-32 of the id, modulo world, equal to rank; states are then
    each rank's own. Columns that a later writer brings come, with ``missing="fill"``, from then on.

    Args:
        root: Folder of the data set: a path or any fsspec URL; or an open `Dataset`.
        at: A snapshot, as `Dataset.snapshot` gave it: exactly its rows are read, whatever was added since.
        grow: Whether each epoch reads what is there when it begins, instead of what was there when the reader
            was opened; for one reader alone, without ``at``. An epoch is read as it was listed, also by a
            reader that loads its state: that holds the snapshot, a number for each writer. Where nothing is
            there, the data ends for this call; the next one looks again.
        follow: Whether to go along with the data set as it grows; without ``epochs``, ``shuffle``, ``at``.
        idle_timeout: When following, seconds to wait for the next row; None waits for ever, 0 not at all.
        poll_seconds: When following, least seconds between two listings while there is nothing to read; where
            a listing takes long, ten times as long as that.
        cache: Where rows are kept for random access: in "memory", on "disk" (mapped files in a folder that
            runs and processes share: ``RLIO_CACHE`` and ``RLIO_CACHE_BYTES``, see
            `rlio.replay.cache.CacheFolder`), or "none": shards are decoded as they are read. The order of
            shuffled rows depends on it: one permutation of all rows with a store, windows of row groups
            permuted, and rows within each, without. "auto" chooses by the size that a store would have, on
            any machine alike: up to 2 GiB memory, up to 64 GiB disk, else none; and none for rows in recorded
            order. What it chose is in the attribute `cache`, and logged.
        policy: Of several policies, the one whose rows are read, as `SampleBatch`; None: joint steps of all.
        draw: ``n_step`` and ``gamma``; ``sequence_length``, ``burn_in`` and ``overlap``; ``episodes``;
            ``filter``; ``views``; ``indexes``: see `rlio.replay.store.draw_of`. They need a store, but for
            ``filter``: without one, the columns that it reads are decoded when the reader is opened, where
            the bounds in the footers leave rows to look for, and at most 4 bytes are kept for each row that
            passes (and at most a bit for each row there is). Not for joint steps of several agents.
        missing: What to do with columns that only some writers have: "error", "drop" them, or "fill"
            them with zeros.
        storage_options: For fsspec.
        limits: What the data may ask for: memory, names, depth.

    Raises:
        DataNotFound: There is no data set, or it is empty.
        CorruptData: Rows are damaged; with ``on_error="skip"`` they are counted in `skipped`.
        HoleError: Rows are missing, of the snapshot too; likewise. It is a CorruptData.
        OptionError: A batch is larger than the data, which is read endlessly (``epochs=None``).
        LedgerError: A store does not have as many rows as the shards' names say: a bug of rlio.
    """

    replayable = True

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
        **keywords: Unpack[DatasetKeywords],
    ) -> None:
        if cache not in ("auto", "memory", "disk", "none"):
            raise OptionError(f"cache={excerpt(cache)}: 'auto', 'memory', 'disk' or 'none'")
        given: dict[str, Any] = {**keywords}
        drawn = {name: given.pop(name) for name in _DRAWN if name in given}
        if isinstance(given.get("columns"), str):
            raise OptionError(
                f"columns={excerpt(given['columns'])}: a list of names, or None for all columns; for columns "
                "that only some writers have, give missing='error', 'drop' or 'fill'"
            )
        self.options = ReadOptions.of(cast(ReadKeywords, given), reader="DatasetReader")
        self.drop_last = self.options.drop_last
        draw = draw_of(cast(DrawKeywords, drawn), columns=self.options.columns)
        self._pass: SnapshotPass | GrowingPass | FollowPass
        if follow:
            choosy = bool(drawn) or cache in ("memory", "disk")
            _check_follow(choosy=choosy, bounded=at is not None or grow)
            storage = _storage(root, storage_options, limits)
            self._pass = FollowPass(
                storage, self.options, missing, idle_timeout=idle_timeout, poll_seconds=poll_seconds
            )
            return
        if idle_timeout is not None or poll_seconds != 1.0:
            raise OptionError("idle_timeout and poll_seconds are for follow=True: nothing else waits")
        # Ranks share batches out, how many rows are dropped is a matter of their size, and of what a subclass
        # does to them nothing is known.
        alone = self.options.shard[1] == 1 and type(self) is DatasetReader
        self.can_read_ahead = alone and not (grow or self.drop_last)
        dataset = opened(
            root, at=at, on_error=self.options.on_error, storage_options=storage_options, limits=limits
        )
        open_pass = partial(_open_pass, draw=draw, cache=cache, missing=missing)
        if grow:
            _check_growth(dataset, self.options)
            self._pass = GrowingPass(dataset, self.options, missing, open_pass)
        else:
            self._pass = open_pass(dataset, self.options)

    @property
    def cache(self) -> Kept:
        """Where the rows are; with ``cache="auto"``, what was chosen (with ``grow``, for this epoch)."""
        return self._pass.cache

    @property
    def dataset(self) -> Dataset:
        """What is read, as it was listed last.

        Raises:
            DataNotFound: It is followed, and there is nothing yet.
        """
        return self._pass.dataset

    # Known, when following, once there is something to read: a plain attribute would be too early.
    @property
    def unit(self) -> Unit:  # type: ignore[override]  # The base has an attribute, for authors' sake.
        """What ``n`` and ``batch_size`` count."""
        return self._pass.unit

    @property
    def skipped(self) -> int:
        """Rows lost to damage so far, with ``on_error="skip"``."""
        return self._pass.skipped

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next batch begins in, from 0."""
        return self._pass.epoch

    @property
    def seed(self) -> int | None:
        """Seed of the order; None if it is the recorded one."""
        return self._pass.seed

    def __len__(self) -> int:
        """Units of one epoch, of all ranks together; when following, the rows that are listed."""
        return self._pass.total

    def skip(self, n: int) -> None:
        """Step over ``n`` batches of ``batch_size`` units: go where as many calls of `sample` would lead.

        Nothing is read, unless with ``on_error="skip"``: rows after damaged ones fill batches up, so that
        only reading tells where the next one begins; and with ``grow``.

        Args:
            n: Batches, 0 or more.

        Raises:
            EndOfData: Fewer are left; the reader is at the end then, as after `sample` raised it.
            OptionError: ``n`` is below 0, or the reader follows a data set, whose batches are what is there.
            StateError: The last `load_state_dict` failed.
            ClosedError: After `close`.
        """
        self._check_open()
        self._check_loaded()
        if operator.index(n) < 0:
            raise OptionError(f"skip(n={n}): n is a number of batches, 0 or more")
        self._pass.skip(operator.index(n))

    @property
    def row_source(self) -> RowSource | None:
        """Its next rows, for whoever gathers them with those of others; None without a store."""
        return self._pass if isinstance(self._pass, StoredPass) else None

    # ---- hooks of InputReader ----

    def _endless(self) -> Endless | None:
        if self.options.epochs is not None or isinstance(self._pass, FollowPass):
            return None
        return Endless(self._pass.epoch, self._pass.total)

    def interrupt(self) -> None:
        """Let a `sample` that waits for rows go; see `InputReader`."""
        if isinstance(self._pass, FollowPass):
            self._pass.interrupt()

    def _next(self) -> Batch:
        return self._pass.take(None)

    def _take(self, n: int) -> Batch:
        return self._pass.take(n)

    def _position(self) -> JsonState:
        return self._pass.position()

    def _seek(self, position: JsonState) -> None:
        self._pass.seek(position)

    def _close(self) -> None:
        self._pass.close()


def _storage(
    root: str | os.PathLike[str] | Dataset, storage_options: Mapping[str, Any] | None, limits: Limits
) -> Storage:
    """Where the data set is, or will be."""
    if isinstance(root, Dataset):
        refuse_open_options(storage_options, limits)
        return root.storage
    return Storage.open(root, storage_options=storage_options, limits=limits)


def _check_follow(*, choosy: bool, bounded: bool) -> None:
    """Refuse what does not go with following.

    Args:
        choosy: Whether rows are drawn, or kept in a store.
        bounded: Whether they are those of a snapshot, or of epochs.

    Raises:
        OptionError: One of them.
    """
    if choosy:
        raise OptionError("follow=True: rows are given as they come; leave out cache, " + ", ".join(_DRAWN))
    if bounded:
        raise OptionError(
            "follow=True goes along with the data, at=... is a snapshot, which does not grow, and "
            "grow=True takes rows up epoch by epoch: give one of the three"
        )


def _check_growth(dataset: Dataset, options: ReadOptions) -> None:
    """Refuse growth where readers could not agree on it.

    Raises:
        OptionError: The rows are those of a snapshot, or shared out among ranks.
    """
    if dataset.pinned:
        raise OptionError("grow=True and a snapshot, which does not grow: leave out at, or grow")
    if options.shard[1] > 1:
        raise OptionError(
            f"grow=True, shard={options.shard}: ranks would list at different moments and see other rows. "
            "For each epoch, take a snapshot on one rank, rlio.open_dataset(root).snapshot(), and open the "
            "readers of all ranks with at= it"
        )


def _open_pass(
    dataset: Dataset,
    options: ReadOptions,
    *,
    draw: Draw,
    cache: Cache,
    missing: Literal["error", "drop", "fill"],
) -> SnapshotPass:
    """What reads epochs of a data set as it was listed."""
    chosen = choose_cache(dataset, options, draw, cache)
    if chosen == "none":
        return ColdPass(dataset, options, missing, draw.filter)
    return StoredPass(dataset, options, draw=draw, cache=chosen, missing=missing)
