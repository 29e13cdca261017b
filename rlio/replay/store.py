"""`ReplayStore`: experience in memory, or in mapped files of a cache, for draws at memory speed.

Every transition is one row of fixed size, so that drawing it touches one place in memory; frames are kept
once. A store holds a data set as it was recorded, or, with a capacity, the newest rows of live experience.

Example:
    >>> import numpy as np, rlio
    >>> store = rlio.ReplayStore(capacity=1000)
    >>> store.append(rlio.SampleBatch(obs=np.eye(3), rewards=np.arange(3.0)))
    >>> batch = store.uniform(batch_size=4, seed=0).sample()
    >>> batch["obs"].shape, len(store)
    ((4, 3), 3)
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack

from tqdm import tqdm

from rlio.batch import Batch, MultiAgentBatch, SampleBatch
from rlio.dataset.dataset import Dataset, Snapshot, opened
from rlio.dataset.segment_reader import GoneShards, ShardGone
from rlio.errors import ClosedError, OptionError, SchemaError, excerpt
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.reader import Unit
from rlio.readers.read_options import ReadOptions
from rlio.replay.build import Source, build, key_of, schema_of
from rlio.replay.cache import CacheFolder
from rlio.replay.cached import Cached, open_cached
from rlio.replay.draws import Draw, Units
from rlio.replay.epochs import OWN_BATCH
from rlio.replay.filters import RowFilter, RowFunction
from rlio.replay.memory import RamArrays
from rlio.replay.n_step import NStep
from rlio.replay.priorities import Prioritised
from rlio.replay.rows import AddedRows, StoreRows
from rlio.replay.samplers import EpochReader, PrioritisedSampler, UniformSampler
from rlio.replay.saved import load_rows, save_rows
from rlio.replay.scratch import ScratchArrays
from rlio.replay.sequences import Sequences
from rlio.replay.table import RowTable
from rlio.schemas.schema import Schema
from rlio.support.options import checked_keywords, refuse_unknown

__all__ = ["DrawKeywords", "ReplayStore", "UnitKeywords", "draw_of"]

logger = logging.getLogger("rlio")

# Seconds that a build takes before its progress is shown.
_QUIET_SECONDS = 1.0


class UnitKeywords(TypedDict, total=False):
    """What a unit is: the keywords of `DrawKeywords` but for the columns."""

    n_step: int | None
    gamma: float
    sequence_length: int | None
    burn_in: int
    overlap: int
    episodes: bool
    policy: str | None
    filter: str | RowFunction | RowFilter | None
    views: bool
    indexes: bool


class DrawKeywords(UnitKeywords, total=False):
    """What is drawn: the keywords that all samplers of a store share; see `draw_of`."""

    columns: Sequence[str] | None


def draw_of(keywords: DrawKeywords, *, columns: Sequence[str] | None = None) -> Draw:
    """What is drawn, from the keywords that all samplers share.

    Args:
        keywords: ``columns``: logical columns; None: all.
            ``n_step``, ``gamma`` (0.99): n-step transitions: ``rewards`` are discounted sums over up to
            ``n_step`` rows, ``new_obs`` and the ends those of the last, ``n_step_discount`` (float32) is
            gamma to the power of the steps taken, ``bootstrap_mask`` (float32) is 0 where nothing follows:
            after a termination, or where the final observation is missing.
            ``sequence_length``, ``burn_in`` (0), ``overlap`` (0): sequences, padded with zeros to
            ``burn_in + sequence_length`` rows, with ``seq_lens``, the column ``burn_in`` (True for rows that
            only warm up the state) and ``state_in_k`` from the recorded ``state_out_k``.
            ``episodes``: whole episodes, with ``seq_lens``.
            ``policy``: of several policies, the one whose rows are drawn, as `SampleBatch`; None: joint steps
            of all.
            ``filter``: rows that are drawn, ``"rewards > 0"`` or a function of columns; of sequences and
            episodes, their first rows.
            ``views``: columns are views of one block of rows, strided, instead of contiguous copies, which
            is quicker; wide ``obs`` and ``new_obs`` overlap and are read-only, where each ``new_obs`` is the
            next ``obs``.
            ``indexes``: the column ``batch_indexes``, the rows' logical numbers.
        columns: Logical columns, where they are not among the keywords.

    Raises:
        OptionError: An option is illegal, or two exclude each other.
    """
    refuse_unknown(keywords, DrawKeywords.__annotations__, of="a draw")
    n_step, length = keywords.get("n_step"), keywords.get("sequence_length")
    for name in ("gamma", "burn_in", "overlap"):
        needed = "n_step" if name == "gamma" else "sequence_length"
        if name in keywords and keywords.get(needed) is None:
            raise OptionError(f"{name}={excerpt(keywords.get(name))} needs {needed}")
    columns, chosen = keywords.get("columns", columns), keywords.get("filter")
    return Draw(
        columns=None if columns is None else frozenset(columns),
        n_step=None if n_step is None else NStep(n_step, keywords.get("gamma", 0.99)),
        sequences=None
        if length is None
        else Sequences(length, keywords.get("burn_in", 0), keywords.get("overlap", 0)),
        episodes=keywords.get("episodes", False),
        policy=keywords.get("policy"),
        filter=None if chosen is None else RowFilter.of(chosen),
        views=keywords.get("views", False),
        indexes=keywords.get("indexes", False),
    )


class ReplayStore:
    """Rows for random access.

    ``ReplayStore(capacity=n)`` keeps the newest n rows of what is appended, in memory. `open` gives a store
    of a data set. Samplers of a store may be used in several threads, one thread each, while another appends.
    A forked child may go on sampling; what it appends is its own.

    Args:
        capacity: Rows to keep, of each policy.
        frames: Wide observations (above 1 KiB) that are kept, each once; None: enough for ``capacity`` rows,
            whatever they share. Memory is taken as it is filled.
        folder: Keep the rows in mapped files there, on a local disk, instead of in memory (texts and objects
            stay in memory). The files have no names, and are gone with the store or the process: `save`
            keeps rows. None: in memory.
    """

    def __init__(
        self, capacity: int, *, frames: int | None = None, folder: str | os.PathLike[str] | None = None
    ) -> None:
        if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
            raise OptionError(f"capacity={excerpt(capacity)}: a number of rows, at least 1")
        self._capacity = capacity
        self._frames = frames
        self._init(live=True, uri="the live store", digest="live", folder=folder)

    def _init(
        self, *, live: bool, uri: str, digest: str, folder: str | os.PathLike[str] | None = None
    ) -> None:
        #: Whether rows are appended, the newest staying, or it is a data set as it was recorded.
        self.live = live
        self.uri = uri
        #: Names the rows: states of samplers fit only the same.
        self.digest = digest
        #: Grows with every change of the rows.
        self.version = 0
        #: Held while rows are added or drawn.
        self.lock = threading.RLock()
        self._rows: StoreRows | None = None
        self._pieces: list[AddedRows] | None = None
        #: What it is the store of; None: of live rows.
        self._dataset: Dataset | None = None
        #: Rows of the data set that were lost to damage, with ``on_error="skip"``.
        self.skipped = 0
        self._closed = False
        #: Files for the rows, instead of memory.
        self._scratch = None if folder is None else ScratchArrays(folder)
        self._stop = threading.Event()
        self._builder: threading.Thread | None = None
        #: Whether the builder came to its end, whatever that was.
        self._finished = False
        self._failure: BaseException | None = None
        self._folder: CacheFolder | None = None
        self._cached: Cached | None = None
        #: Priorities that were saved with the rows, and those rows: for the first sampler that wants them.
        self._loaded: tuple[Mapping[str, Any], tuple[int, int]] | None = None
        with _stores_lock:
            _stores.add(self)

    # ---- a data set ----

    @classmethod
    def open(
        cls,
        root: str | os.PathLike[str] | Dataset,
        *,
        at: Snapshot | None = None,
        cache: Literal["memory", "disk"] = "memory",
        cache_folder: str | os.PathLike[str] | CacheFolder | None = None,
        columns: Sequence[str] | None = None,
        missing: Literal["error", "drop", "fill"] = "error",
        on_error: Literal["raise", "skip"] = "raise",
        wait: bool = True,
        progress: bool | None = None,
        storage_options: Mapping[str, Any] | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> ReplayStore:
        """A store of the rows of a data set, as it is now.

        Args:
            root: Folder of the data set: a path or any fsspec URL; or an open `Dataset`.
            at: A snapshot, as `Dataset.snapshot` gave it.
            cache: Where the rows are: in "memory", or on "disk", in mapped files of the cache folder.
            cache_folder: That folder; None: ``RLIO_CACHE``, or the user's own. See `CacheFolder`.
            columns: Columns to keep, in memory; None: all. What lies on disk serves every reader of the data.
            missing: What to do with columns that only some writers have: "error", "drop" or "fill" them.
            on_error: What to do with damaged rows: "raise", or "skip" and count them.
            wait: Whether to return only once all rows are there. Else they are read in the background, and
                whoever draws waits for them; see `wait`.
            progress: Whether a bar shows how far it is; None: on a terminal, if it takes over a second.
            storage_options: For fsspec.
            limits: What the data may ask for.

        Raises:
            DataNotFound: There is no data set.
            CorruptData: Rows are damaged.
            OptionError: The data was recorded in sequences, or an option is illegal.
        """
        dataset = opened(root, at=at, on_error=on_error, storage_options=storage_options, limits=limits)
        store = cls.__new__(cls)
        if cache not in ("memory", "disk"):
            raise OptionError(f"cache={excerpt(cache)}: 'memory' or 'disk'")
        if cache == "memory" and cache_folder is not None:
            raise OptionError("cache_folder= is for cache='disk': a store in memory has no files")
        if cache == "disk" and columns is not None:
            raise OptionError(
                "columns= with cache='disk': a store on disk has all; choose columns when drawing"
            )
        store._init(live=False, uri=dataset.uri, digest=dataset.digest)
        if cache == "disk":
            store._folder = (
                cache_folder if isinstance(cache_folder, CacheFolder) else CacheFolder(cache_folder)
            )
        store._dataset = dataset
        store._start(Source(dataset, missing, on_error), columns, progress)
        if wait:
            store.wait()
        return store

    def _start(self, source: Source, columns: Sequence[str] | None, progress: bool | None) -> None:
        wanted = None if columns is None else frozenset(columns)

        def run() -> None:
            try:
                self._build(source, wanted, progress)
            except BaseException as error:
                self._failure = error
            self._finished = True

        self._builder = threading.Thread(target=run, name="rlio-build", daemon=True)
        self._builder.start()

    def _build(self, source: Source, columns: frozenset[str] | None, progress: bool | None) -> None:
        """Read every row; in the background."""
        missing = GoneShards(source.dataset.storage, source.on_error)
        while True:
            try:
                self._read(source, columns, progress, missing.given_up)
                return
            except ShardGone as gone:
                missing.miss(gone)
                source = replace(source, dataset=source.dataset.refresh(at=source.dataset.snapshot()))
                if source.on_error == "raise":
                    source.dataset.check_complete()

    def _read(
        self, source: Source, columns: frozenset[str] | None, progress: bool | None, given_up: set[str]
    ) -> None:
        """Read every row of a snapshot.

        Raises:
            ShardGone: One of its shards is not there.
        """
        dataset = source.dataset
        lost = sum(rows for _, rows in dataset.lost_rows())
        schema = schema_of(source)
        if schema is None or not len(dataset):
            self._pieces, self.skipped = [], lost
            return
        with tqdm(
            total=len(dataset),
            desc=f"rlio: {dataset.uri}",
            unit=" rows",
            unit_scale=True,
            delay=_QUIET_SECONDS,
            disable=None if progress is None else not progress,
            leave=False,
        ) as bar:
            if self._folder is not None:
                cached = open_cached(
                    source,
                    schema,
                    self._folder,
                    progress=_advance(bar),
                    stop=self._stop,
                    given_up=given_up,
                )
                self._cached = cached
                rows, self._pieces, self.skipped = cached.rows, cached.pieces, cached.skipped + lost
            else:
                rows = StoreRows(schema, capacity=len(dataset), arrays=RamArrays(), columns=columns)
                built = build(
                    source,
                    dataset.segments,
                    rows,
                    progress=_advance(bar),
                    stop=self._stop,
                    given_up=given_up,
                )
                self.skipped = built.skipped + lost
                keys = map(key_of, dataset.segments)
                self._pieces = [built.pieces[key] for key in keys if key in built.pieces]
        self._rows = rows
        self.version += 1

    @property
    def ready(self) -> bool:
        """Whether all rows are there, or building them has failed."""
        return self._builder is None or not self._builder.is_alive()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all rows are there.

        Args:
            timeout: Seconds; None: as long as it takes.

        Returns:
            Whether they are.

        Raises:
            RlioError: Building failed; whatever the reason was.
        """
        if self._builder is not None:
            self._builder.join(timeout)
            if self._builder.is_alive():
                return False
            self._builder = None
            if not self._finished:  # The thread is that of the process that forked.
                self._failure = ClosedError(
                    "the store was still being built when this process was forked: open it anew here, or "
                    "wait() before forking",
                    uri=self.uri,
                )
        if self._failure is not None:
            raise self._failure
        return True

    # ---- rows ----

    def append(self, batch: Batch, *, writer: str = "") -> None:
        """Add rows to a live store; the oldest ones make room. Thread-safe; ``batch`` stays the caller's.

        Rows of one ``eps_id`` (and ``agent_index``, ``env_id``) follow each other by ``t``, in any number of
        batches; without ``eps_id``, until a row that ends an episode.

        Args:
            batch: The rows.
            writer: Whose they are: rows of one never follow those of another, whatever their ``eps_id``.

        Raises:
            OptionError: It is the store of a data set; or ``frames`` is too low for the frames of an episode.
            SchemaError: The batch has not the columns of those before, or ``batch`` is no batch.
            CacheError: The disk is full.
            ClosedError: After `close`. After any error here, no row was added, and none is lost.
        """
        self.check_open()
        if not self.live:
            raise OptionError(
                "append() to the store of a data set: record rows with a writer, and open it anew"
            )
        if not isinstance(batch, (SampleBatch, MultiAgentBatch)):
            raise SchemaError(
                f"append() was given {excerpt(batch)}: expected a SampleBatch or MultiAgentBatch, such as "
                "rlio.SampleBatch(columns)"
            )
        with self.lock:
            if self._rows is None:
                self._rows = self._first_rows(batch, writer)
            else:
                self._rows.add(batch, writer=writer)
            self.version += 1

    def _first_rows(self, batch: Batch, writer: str) -> StoreRows:
        """A ring with the rows of a first batch, whose columns are those of all to come."""
        try:
            rows = StoreRows(
                Schema.of(batch).with_validity(),  # Which may come with a later batch.
                capacity=self._capacity,
                arrays=self._scratch or RamArrays(),
                ring=True,
                frames=self._frames,
            )
            rows.add(batch, writer=writer)
        except BaseException:
            if self._scratch is not None:
                self._scratch.clear()
            raise
        return rows

    def __len__(self) -> int:
        """Rows that are there, of all policies."""
        return sum(len(table) for table in self.tables.values())

    def __repr__(self) -> str:
        state = f"{len(self)} rows" if self.ready else "being built"
        return f"ReplayStore({self.uri!r}: {state})"

    @property
    def tables(self) -> Mapping[str, RowTable]:
        """Policy id -> its rows; waits until they are there."""
        self.wait()
        return {} if self._rows is None else self._rows.tables

    @property
    def row_bytes(self) -> int:
        """Bytes of a packed row, 0 where there are none."""
        self.wait()
        return 0 if self._rows is None else self._rows.row_bytes

    @property
    def changes(self) -> int:
        """How often the columns changed that draws give: units that were opened before are those of then."""
        return 0 if self._rows is None else self._rows.changes

    def units(self, draw: Draw) -> Units:
        """The units of a draw, over the rows that are there now: what samplers are made of.

        Raises:
            OptionError: There are no such units.
            MissingColumn: A column is absent.
        """
        self.check_open()
        self.wait()
        with self.lock:
            if self._rows is None:
                return _NoUnits()
            return self._rows.units(draw, pieces=self._pieces)

    def why_empty(self, unit: Unit) -> str:
        """Say why there is nothing to draw: also that rows wait in logs of this machine, if some do."""
        if self._dataset is None:
            return f"the store holds no {unit} that could be drawn yet"
        if not len(self._dataset):
            return self._dataset.why_empty()
        return f"there are no {unit} to draw among the {len(self)} rows of {self.uri}"

    # ---- samplers ----

    @checked_keywords
    def uniform(
        self,
        *,
        batch_size: int | None = None,
        seed: int | None = None,
        **draw: Unpack[DrawKeywords],
    ) -> UniformSampler:
        """A reader that draws uniformly, with replacement, from what is there at that moment.

        Args:
            batch_size: Units of a batch; None: 256.
            seed: Of the draws; None: one from the OS, logged and kept in the state.
            draw: See `draw_of`.
        """
        return UniformSampler(self, draw_of(draw), batch_size=batch_size, seed=seed)

    @checked_keywords
    def epochs(
        self,
        *,
        batch_size: int | None = None,
        epochs: int | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        shard: tuple[int, int] = (0, 1),
        drop_last: bool = False,
        **draw: Unpack[DrawKeywords],
    ) -> EpochReader:
        """A reader that gives every unit once an epoch, of a data set.

        The order is a permutation of all units, a pure function of (seed, epoch), whatever the number of
        ranks.

        Args:
            batch_size: Units of a batch, of each rank; None: 256, or all that there are.
            epochs: Passes; None: endless.
            shuffle: Whether the order is a seeded permutation; else as recorded.
            seed: Of the order; None: one from the OS, logged and kept in the state.
            shard: (rank, world).
            drop_last: Drop the last batch if it is shorter.
            draw: See `draw_of`.

        Raises:
            OptionError: The store is live: what is forgotten meanwhile could not be given.
        """
        if self.live:
            raise OptionError("epochs() of a live store, whose rows change: draw with uniform()")
        options = ReadOptions(
            batch_size=OWN_BATCH if batch_size is None and drop_last else batch_size,
            epochs=epochs,
            shuffle=shuffle,
            seed=seed,
            shard=shard,
            drop_last=drop_last,
        )
        return EpochReader(self, draw_of(draw), options)

    @checked_keywords
    def prioritised(
        self,
        *,
        batch_size: int | None = None,
        alpha: float = 0.6,
        beta: float | Callable[[int], float] = 0.4,
        epsilon: float = 1e-6,
        normalise: Literal["buffer", "batch"] = "buffer",
        seed: int | None = None,
        **draw: Unpack[DrawKeywords],
    ) -> PrioritisedSampler:
        """A reader that draws in proportion to priorities; new rows have the highest one so far.

        Args:
            batch_size: Units of a batch; None: 256.
            alpha: How much priorities count; 0: not at all. See `rlio.replay.priorities.Prioritised`.
            beta: How much of the bias the weights undo, 0 to 1, or a function of the units drawn so far.
            epsilon: Added to each absolute error.
            normalise: What the largest weight is 1 of: all units, or those of the batch.
            seed: Of the draws; None: one from the OS, logged and kept in the state.
            draw: See `draw_of`.

        Source: Schaul et al., "Prioritized Experience Replay" (ICLR 2016).
        """
        options = Prioritised(alpha=alpha, beta=beta, epsilon=epsilon, normalise=normalise)
        sampler = PrioritisedSampler(self, draw_of(draw), options, batch_size=batch_size, seed=seed)
        if self._loaded is not None:
            sampler.restore(*self._loaded)
            self._loaded = None
        return sampler

    prioritized = prioritised

    # ---- keeping a live store ----

    def save(self, path: str | os.PathLike[str], *, priorities: PrioritisedSampler | None = None) -> None:
        """Write a live store to a folder, whole or not at all; one that is there is replaced.

        Args:
            path: The folder, on a local disk; its parent exists.
            priorities: A sampler of this store whose priorities are kept with the rows: the first that
                `prioritised` makes of the loaded store goes on with them.

        Raises:
            OptionError: It is the store of a data set, which needs no saving; or the sampler is not its own.
            CacheError: The disk is full.
        """
        self.check_open()
        if not self.live:
            raise OptionError("save() of the store of a data set: its rows are there; save priorities alone")
        if priorities is not None and priorities.store is not self:
            raise OptionError("save(priorities=...): the sampler is one of another store")
        with self.lock:
            if self._rows is None:
                raise OptionError("save() of a store to which nothing was appended")
            kept = None if priorities is None else priorities.priorities.to_arrays()
            save_rows(
                Path(path),
                self._rows,
                capacity=self._capacity,
                frames=self._frames,
                priorities=kept,
                span=(0, 0) if priorities is None else priorities.span,
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ReplayStore:
        """A live store as `save` wrote it: its rows under the same numbers, its episodes going on.

        Raises:
            DataNotFound: There is none.
            CorruptData: It is damaged.
        """
        found = load_rows(Path(path), arrays=RamArrays())
        store = cls(found.capacity, frames=found.frames)
        store._rows = found.rows
        store._loaded = None if found.priorities is None else (found.priorities, found.span)
        store.version += 1
        return store

    # ---- the end ----

    def check_open(self) -> None:
        """Raise ClosedError after `close`."""
        if self._closed:
            raise ClosedError("the store is closed: open a new one")

    def close(self) -> None:
        """Give up building, and let go of the rows; batches that were drawn stay. May be called again."""
        self._closed = True
        self._stop.set()
        builder, self._builder = self._builder, None
        if builder is not None:
            builder.join()
        self._rows = None
        if self._scratch is not None:
            self._scratch.close()
        if self._cached is not None:
            self._cached.reading.close()
            self._cached = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


#: Stores of this process, and what is held while one is added.
_stores: weakref.WeakSet[ReplayStore] = weakref.WeakSet()
_stores_lock = threading.Lock()
#: Those whose locks the thread holds that forks.
_held: list[ReplayStore] = []


def _hold_all() -> None:
    """Wait until nobody adds rows or draws: a child has them whole, and no lock of a thread it has not."""
    _stores_lock.acquire()
    for store in list(_stores):
        store.lock.acquire()
        _held.append(store)


def _let_go_of_all() -> None:
    while _held:
        _held.pop().lock.release()
    _stores_lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_all, after_in_parent=_let_go_of_all, after_in_child=_let_go_of_all)


def _advance(bar: tqdm[Any]) -> Callable[[int], None]:
    def advance(rows: int) -> None:
        bar.update(rows)

    return advance


class _NoUnits(Units):
    """Of a store without rows."""

    @property
    def count(self) -> int:
        return 0

    def batch(self, numbers: Any, also: Any = None) -> Batch:
        raise OptionError("a store without rows has no batches")
