"""`ReplayStore`: experience in memory, or in memory-mapped files of a cache, for draws at memory speed.

Every transition is one row of fixed size: drawing it touches one place in memory. Each frame is stored once.
A store holds a recorded data set or, with a capacity, the newest rows of live experience.

Example:
    >>> import numpy as np, rlio
    >>> store = rlio.ReplayStore(capacity=1000)
    >>> store.append(rlio.SampleBatch(obs=np.eye(3), rewards=np.arange(3.0)))
    >>> batch = store.uniform(batch_size=4, seed=0).sample()
    >>> batch["obs"].shape, len(store)
    ((4, 3), 3)
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from traceback import clear_frames
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from tqdm import tqdm

from rlio.batch import Batch, MultiAgentBatch, SampleBatch
from rlio.errors import ClosedError, OptionError, SchemaError, StoreError, excerpt
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.mapping import Mapping as ColumnMapping
from rlio.opening import open_source
from rlio.query.filter_pushdown import check_split
from rlio.read_options import ReadOptions
from rlio.reader import Unit
from rlio.replay.build import StoreInput, build, rows_of, schema_of
from rlio.replay.cache import CacheFolder
from rlio.replay.cached import open_cached
from rlio.replay.draw_options import (
    DrawKeywords,
    draw_of,
)
from rlio.replay.draws import Draw, Units
from rlio.replay.epochs import OWN_BATCH
from rlio.replay.memory import RamArrays
from rlio.replay.priorities import Prioritised
from rlio.replay.rows import AddedRows, StoreRows
from rlio.replay.samplers import EpochReader, PrioritisedSampler, UniformSampler
from rlio.replay.saved import load_rows, save_rows
from rlio.replay.scratch import ScratchArrays
from rlio.replay.table import RowTable
from rlio.schemas.schema import Schema, canonical_json
from rlio.schemas.shown import leaf_table
from rlio.source.damage import Damage
from rlio.source.joined import Snapshots
from rlio.source.snapshot import DatasetSnapshot
from rlio.source.source import FileSource, Source
from rlio.source.span_reader import GoneSegments
from rlio.support.described import Described
from rlio.support.html import Html
from rlio.support.options import (
    check_choice,
    check_count,
    checked_keywords,
    refuse_mapped_columns,
)
from rlio.support.words import counted

__all__ = ["ReplayStore"]

logger: logging.Logger = logging.getLogger("rlio")

# A build shows its progress after this many seconds.
_QUIET_SECONDS = 1.0


class ReplayStore(Described):
    """Rows for random access.

    ``ReplayStore(capacity=n)`` keeps the newest n appended rows in memory. `open` makes a store of a data
    set. Several threads may call a store and its samplers, also one sampler: appends and draws take turns. A
    call that waits for the rows to be loaded lets the others have their turn, and ends if the store is
    closed. A forked child can continue to sample; rows that it appends exist only in the child.

    Args:
        capacity: Rows to keep, for each policy.
        frames: How many wide observations (above 1 KiB) to keep, each once; None: enough for ``capacity``
            rows, even if they share none. Memory is taken as it fills.
        folder: Keep the rows in memory-mapped files in this folder, on a local disk, instead of in memory
            (texts and objects stay in memory). The files have no names and vanish with the store or the
            process; use `save` to keep rows. None: in memory.
    """

    def __init__(
        self, capacity: int, *, frames: int | None = None, folder: str | os.PathLike[str] | None = None
    ) -> None:
        self._capacity = check_count("capacity", capacity, least=1, of="rows")
        self._frames = check_count("frames", frames, least=1, of="frames", none="enough for all rows")
        self._init(live=True, uri="the live store", digest="live", folder=folder)

    def _init(
        self, *, live: bool, uri: str, digest: str, folder: str | os.PathLike[str] | None = None
    ) -> None:
        #: True: a live store, which appends rows and keeps the newest. False: a recorded data set.
        self.live = live
        self.uri = uri
        self._digest = digest
        # Whether damaged rows are left out, so that the digest is known once all rows are loaded.
        self._skips = False
        #: Grows with every change of the rows.
        self.version: int = 0
        #: Held while rows are added or drawn, and not while a thread waits for rows to be loaded.
        self.lock: threading.RLock = threading.RLock()
        # Notified when the build ends, or a call that waits for it shall end.
        self._changed = threading.Condition(self.lock)
        self._rows: StoreRows | None = None
        self._pieces: list[AddedRows] | None = None
        #: Rows of the pieces. The files of a cached store may hold rows that follow them.
        self._served = 0
        #: The source of the rows; None: a live store.
        self._source: Source | None = None
        self._missing: Literal["error", "drop", "fill"] = "error"
        #: Rows of the data set lost to damage, with ``on_error="skip"``.
        self.skipped: int = 0
        #: The damaged places.
        self.damage: Damage = Damage()
        self._closed = False
        #: Holds the rows in files instead of memory.
        self._scratch = None if folder is None else ScratchArrays(folder)
        self._stop = threading.Event()
        self._builder: threading.Thread | None = None
        #: A live store is loaded. "raised": the object store failed, and a call has raised its error; the
        #: next one loads all rows anew.
        self._phase: Literal["loading", "loaded", "failed", "raised"] = "loaded"
        self._failure: BaseException | None = None
        #: What `_build` is called with.
        self._given: tuple[Source, Literal["raise", "skip"], frozenset[str] | None, bool | None]
        #: Closed once the rows are loaded, or never will be.
        self._ending = ExitStack()
        self._folder: CacheFolder | None = None
        #: Saved priorities and where they were, for the first sampler that `prioritised` makes.
        self._loaded: tuple[Mapping[str, Any], str] | None = None
        with _stores_lock:
            _stores.add(self)

    # ---- a data set ----

    @classmethod
    @checked_keywords
    def open(
        cls,
        root: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | DatasetSnapshot | Any,
        *,
        at: Snapshots | None = None,
        mapping: ColumnMapping | None = None,
        format: str | None = None,
        format_options: Mapping[str, Any] | None = None,
        spaces: Any = None,
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
        """Open a store of a data set's rows, as the data set is now.

        Args:
            root: Folder of the data set (a path or any fsspec URL), an open `Dataset`, or a list of these; or
                files of another library, or a table, as `rlio.read` takes them (docs/foreign.md).
            at: A snapshot from `Dataset.snapshot`; of a list, one for each data set, or None.
            mapping: What the columns of a table mean.
            format: Name of the format of another library's files; None: recognise it.
            format_options: Options of that format.
            spaces: Of files that do not state them: see `rlio.open_dataset`.
            cache: Where to keep the rows: in "memory", or on "disk", in memory-mapped files of the cache
                folder.
            cache_folder: The cache folder; None: ``RLIO_CACHE``, or the user's default. See `CacheFolder`.
            columns: Columns, or parts of nested ones (``obs/camera``), to keep in memory; None: all. Others
                are not decoded, and cannot be drawn. A store on disk keeps all, for every reader of the data.
            missing: What to do with columns that only some writers have: "error", "drop" or "fill" them.
            on_error: What to do with damaged rows: "raise", or "skip" and count them.
            wait: Return only once all rows are loaded. If False, a background thread reads them and draws
                wait for it; see `wait`.
            progress: Whether to show a progress bar; None: on a terminal, if loading takes over a second.
            storage_options: Options for fsspec.
            limits: Limits on what the data may demand.

        Raises:
            DataNotFound: There is no data set.
            CorruptData: Rows are damaged.
            OptionError: The data was recorded in sequences, or an option is illegal.
        """
        refuse_mapped_columns(columns)
        source = open_source(
            root,
            at=at,
            own={"mapping": mapping, "format": format, "format_options": format_options, "spaces": spaces},
            on_error=on_error,
            storage_options=storage_options,
            limits=limits,
        )
        return cls.of(
            source,
            cache=cache,
            cache_folder=cache_folder,
            columns=columns,
            missing=missing,
            on_error=on_error,
            wait=wait,
            progress=progress,
            then=source.close if isinstance(source, FileSource) else None,
        )

    @classmethod
    def of(
        cls,
        source: Source,
        *,
        cache: Literal["memory", "disk"] = "memory",
        cache_folder: str | os.PathLike[str] | CacheFolder | None = None,
        columns: Sequence[str] | None = None,
        missing: Literal["error", "drop", "fill"] = "error",
        on_error: Literal["raise", "skip"] = "raise",
        wait: bool = True,
        progress: bool | None = None,
        then: Callable[[], None] | None = None,
    ) -> ReplayStore:
        """Make a store of a source's rows; see `open`. Calls ``then`` when the rows are loaded."""
        store = cls.__new__(cls)
        check_choice("cache", cache, ("memory", "disk"))
        if cache == "memory" and cache_folder is not None:
            raise OptionError("cache_folder= needs cache='disk': a store in memory has no files")
        if cache == "disk" and columns is not None:
            raise OptionError(
                "columns= with cache='disk': a store on disk has all columns; pass columns= when drawing"
            )
        store._init(live=False, uri=source.uri, digest=source.state_identity)
        if cache == "disk":
            store._folder = (
                cache_folder if isinstance(cache_folder, CacheFolder) else CacheFolder(cache_folder)
            )
        store._source, store._missing, store._skips = source, missing, on_error == "skip"
        wanted = None if columns is None else frozenset(columns)
        store._given = source, on_error, wanted, progress
        if then is not None:
            store._ending.callback(then)
        store._start()
        if wait:
            try:
                store.wait()
            except StoreError:
                store.close()  # Nobody else can.
                raise
        return store

    def _start(self) -> None:
        """Load the rows in a background thread."""
        self.damage = Damage()
        builder = threading.Thread(target=self._run, name="rlio-build", daemon=True)
        with self._changed:  # The thread takes it at its end.
            builder.start()
            self._builder, self._phase, self._failure = builder, "loading", None

    def _run(self) -> None:
        try:
            with ExitStack() as after:
                after.callback(self._ending.close)
                try:
                    self._build(*self._given)
                except StoreError:
                    after.pop_all()  # The rows are not given up.
                    raise
        except BaseException as error:
            clear_frames(error.__traceback__)  # They hold the rows so far.
            with self._changed:
                self._failure = error
        with self._changed:
            self._phase = "loaded" if self._failure is None else "failed"
            self._changed.notify_all()

    def _build(
        self,
        source: Source,
        on_error: Literal["raise", "skip"],
        columns: frozenset[str] | None,
        progress: bool | None,
    ) -> None:
        """Read every row."""
        gone = GoneSegments(on_error)

        def read(source: Source) -> None:
            given = StoreInput(
                source, self._missing, on_error, columns, gone.given_up, self.damage, self._stop
            )
            self._read(given, progress)

        gone.read(source, read)

    def _read(self, given: StoreInput, progress: bool | None) -> None:
        """Read every row of a source.

        Raises:
            SegmentGone: A segment is missing.
        """
        source = given.source
        lost = sum(rows for _, rows in source.lost_rows())
        schema = schema_of(given)
        if schema is None or not len(source):
            self._pieces, self.skipped = [], lost
            return
        with tqdm(
            total=len(source),
            desc=f"rlio: {source.uri}",
            unit=" rows",
            unit_scale=True,
            delay=_QUIET_SECONDS,
            disable=None if progress is None else not progress,
            leave=False,
        ) as bar:
            given = replace(given, progress=bar.update)
            if self._folder is not None:
                rows, parts = open_cached(given, schema, self._folder)
            else:
                rows = StoreRows(schema, capacity=len(source), arrays=RamArrays(), columns=given.columns)
                parts = build(given, source.segments, rows)
        self._pieces, skipped = rows_of(parts, source.segments)
        self._served = sum(rows for piece in self._pieces for _, rows in piece.rows.values())
        self.skipped = skipped + lost
        if skipped:
            left_out = canonical_json([part.lost for part in parts]).encode()
            self._digest += f"-{hashlib.blake2b(left_out, digest_size=8).hexdigest()}"
        self._rows = rows
        self.version += 1

    @property
    def ready(self) -> bool:
        """Whether all rows are loaded, or the build failed."""
        return self._phase != "loading" or self._builder is None or not self._builder.is_alive()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all rows are loaded.

        Args:
            timeout: Seconds; None: no limit.

        Returns:
            Whether all rows are loaded.

        Raises:
            RlioError: The build failed, for any reason. After a StoreError, the next call loads all rows
                anew.
            ClosedError: The store was closed before.
        """
        return self.wait_unless(lambda: False, timeout)

    def wait_unless(self, given_up: Callable[[], bool], timeout: float | None = None) -> bool:
        """Like `wait`, until `wake` is called and ``given_up()`` is true; then raise ClosedError."""
        if self._phase == "loaded":
            return True
        with self._changed:
            if self._phase == "raised":
                self.check_open()
                self._start()
            if not self.wait_ended(given_up, timeout):
                return False
            if self._failure is not None:
                if isinstance(self._failure, StoreError):
                    self._phase = "raised"
                raise self._failure
        return True

    def wait_ended(self, given_up: Callable[[], bool] = lambda: False, timeout: float | None = None) -> bool:
        """Like `wait_unless`, but a build that failed has ended, too: `wait` raises its error."""
        if self._phase == "loaded":
            return True
        # Releases the lock, also if this thread holds it already: other threads, and a fork, then get it.
        with self._changed:
            self._changed.wait_for(lambda: self.ready or self._closed or given_up(), timeout)
            if not self.ready:
                self.check_open()
                if given_up():
                    raise ClosedError("the reader was closed while it waited for its store to be built")
                return False
            if self._phase == "loading":
                raise ClosedError(
                    "the store was still being built when this process was forked: open the store again in "
                    "this process, or call wait() before forking",
                    uri=self.uri,
                )
        return True

    def wake(self) -> None:
        """Make calls that wait for the rows look whether they are given up."""
        with self._changed:
            self._changed.notify_all()

    # ---- rows ----

    def append(self, batch: Batch, *, writer: str = "") -> None:
        """Add rows to a live store; the oldest rows make room. Thread-safe. The caller still owns ``batch``.

        Rows of one ``eps_id`` (and ``agent_index``, ``env_id``) follow each other by ``t``, in any number of
        batches. Without ``eps_id``, rows follow each other until one ends an episode.

        Args:
            batch: The rows.
            writer: Name of the writer: rows of one writer never follow those of another, even with equal
                ``eps_id``.

        Raises:
            OptionError: The store is of a data set; or ``frames`` is too low for the frames of one episode.
            SchemaError: The batch has other columns than earlier ones, or ``batch`` is not a batch.
            CacheError: The disk is full.
            ClosedError: The store is closed. Any error here adds no row and loses none.
        """
        self.check_open()
        if not self.live:
            raise OptionError(
                "append() to the store of a data set: record rows with a writer, then open the store again"
            )
        if not isinstance(batch, (SampleBatch, MultiAgentBatch)):
            raise SchemaError(
                f"append() was given {excerpt(batch)}: expected a SampleBatch or MultiAgentBatch, such as "
                "rlio.SampleBatch(columns)"
            )
        with self.lock:
            self.check_open()  # Again: another thread may have closed it.
            if self._rows is None:
                self._rows = self._first_rows(batch, writer)
            else:
                self._rows.add(batch, writer=writer)
            self.version += 1

    def _first_rows(self, batch: Batch, writer: str) -> StoreRows:
        """Make a ring for a first batch, whose columns all later batches must have, and add its rows."""
        try:
            schema = Schema.of(batch)
            if schema.has_pictures:
                raise SchemaError(
                    "found encoded pictures, and a store holds frames: append rlio.batch.picture_codecs."
                    "decode_batch(batch)"
                )
            rows = StoreRows(
                schema.with_validity(),  # A later batch may bring the validity column.
                capacity=self._capacity,
                arrays=self._scratch or RamArrays(),
                ring=True,
                frames=self._frames,
            )
            rows.add(batch, writer=writer)
        except BaseException:
            if self._scratch is not None:
                self._scratch.close()
            raise
        return rows

    def __len__(self) -> int:
        """Number of rows, of all policies together."""
        tables = self.tables  # Waits until all rows are loaded.
        return sum(map(len, tables.values())) if self._pieces is None else self._served

    def _describe(self) -> Iterator[str]:
        yield repr(self.uri)
        rows = self._rows  # Read once: another thread may close the store.
        if not self.ready:
            yield "being built"
        elif rows is not None:
            held = rows.tables
            yield counted(sum(map(len, held.values())), "row")
            yield counted(len({leaf.column for table in held.values() for leaf in table.leaves}), "column")
            if len(held) > 1:
                yield counted(len(held), "policy")
        if self.live:
            yield f"capacity={self._capacity}"

    def _tables(self) -> Iterator[Html]:
        rows = self._rows
        if self.ready and rows is not None:
            yield leaf_table({policy: table.leaves for policy, table in rows.tables.items()})

    @property
    def tables(self) -> Mapping[str, RowTable]:
        """Policy id -> its rows; waits until they are loaded."""
        self.wait()
        rows = self._rows
        if rows is None:
            self.check_open()
        return {} if rows is None else rows.tables

    @property
    def row_bytes(self) -> int:
        """Bytes of a packed row; 0 for an empty store."""
        self.wait()
        rows = self._rows
        return 0 if rows is None else rows.row_bytes

    @property
    def digest(self) -> str:
        """Identifies the rows: a sampler's state fits only a store with the same digest.

        Rows that are left out as damaged are part of it, because the numbers of units depend on them.
        """
        if self._skips:
            self.wait()
        return self._digest

    @property
    def changes(self) -> int:
        """How often the columns of draws changed, the first rows included; earlier units have the earlier."""
        rows = self._rows
        return 0 if rows is None else 1 + rows.changes

    def units(self, draw: Draw) -> Units:
        """The units of a draw over the current rows, for samplers.

        Raises:
            OptionError: The rows have no such units.
            MissingColumn: A column is absent.
        """
        self.check_open()
        if self._source is None:
            draw.check_live()
        else:
            check_split(self._source, draw.filter, missing=self._missing)
        self.wait()
        with self.lock:
            self.check_open()
            if self._rows is None:
                return _NoUnits()
            segments = () if self._source is None else self._source.segments
            cut = {segment.writer for segment in segments if segment.first}
            cut -= {segment.writer for segment in segments if not segment.first}
            return self._rows.units(draw, pieces=self._pieces, trimmed=frozenset(cut))

    def why_empty(self, unit: Unit) -> str:
        """Say why the store has nothing to draw, including rows that still wait in logs of this machine."""
        if self._source is None:
            return f"the store holds no {unit} to draw yet"
        if not len(self._source):
            return self._source.why_empty()
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
        """Make a reader that draws uniformly, with replacement, from the rows of the moment.

        Args:
            batch_size: Units of a batch; None: 256.
            seed: Seed of the draws; None: one from the OS, logged and kept in the state.
            draw: What to draw: ``columns`` (None: all), ``draw``, ``policy``, ``filter``, ``split``,
                ``derive``, ``views`` and ``indexes`` as described at `rlio.DatasetReader`.
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
        """Make a reader that gives every unit of a data set once an epoch.

        The order is a permutation of all units, a pure function of (seed, epoch) for any number of ranks.

        Args:
            batch_size: Units of a batch, of each rank; None: 256, or all if the store has fewer.
            epochs: Number of passes; None: endless.
            shuffle: Use a seeded permutation; False: the recorded order.
            seed: Seed of the order; None: one from the OS, logged and kept in the state.
            shard: (rank, world).
            drop_last: Drop the last batch if it is shorter.
            draw: What is drawn: ``columns`` (None: all), ``draw``, ``policy``, ``filter``, ``split``,
                ``derive``, ``views`` and ``indexes`` as described at `rlio.DatasetReader`.

        Raises:
            OptionError: The store is live: it may forget rows before their turn.
        """
        if self.live:
            raise OptionError("epochs() of a live store, whose rows change: use uniform()")
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
        """Make a reader that draws in proportion to priorities; new rows get the highest priority so far.

        Args:
            batch_size: Units of a batch; None: 256.
            alpha: How much priorities count; 0: not at all. See `rlio.replay.priorities.Prioritised`.
            beta: How much of the bias the weights correct, 0 to 1, or a function of the number of units drawn
                so far.
            epsilon: Added to each absolute error.
            normalise: Where the largest weight is 1: among all units ("buffer"), or in each batch ("batch").
            seed: Seed of the draws; None: one from the OS, logged and kept in the state.
            draw: What to draw: ``columns`` (None: all), ``draw``, ``policy``, ``filter``, ``split``,
                ``derive``, ``views`` and ``indexes`` as described at `rlio.DatasetReader`.

        Raises:
            StateError: The store was loaded with priorities, of other options: see `load`.

        Source: Schaul et al., "Prioritized Experience Replay" (ICLR 2016).
        """
        options = Prioritised(alpha=alpha, beta=beta, epsilon=epsilon, normalise=normalise)
        sampler = PrioritisedSampler(self, draw_of(draw), options, batch_size=batch_size, seed=seed)
        with self.lock:
            if self._loaded is not None:
                kept, uri = self._loaded
                sampler.restore(kept, uri=uri, hint=", or load the store with priorities=False")
                self._loaded = None
        return sampler

    prioritized = prioritised

    # ---- keeping a live store ----

    def save(self, path: str | os.PathLike[str], *, priorities: PrioritisedSampler | None = None) -> None:
        """Write a live store to a folder; replaces an earlier store there as a whole, also beside others.

        Args:
            path: The folder, on a local disk; other files in it are not touched.
            priorities: A sampler of this store whose priorities to save with the rows. The first sampler that
                `prioritised` makes of the loaded store continues with them; it must have the same options.

        Raises:
            OptionError: The store is of a data set, which needs no saving; or the sampler is of another
                store.
            CacheError, PublishError, StoreError: The disk is full or fails; the earlier store is unchanged.
        """
        self.check_open()
        if not self.live:
            raise OptionError(
                "save() of the store of a data set: its rows are on disk already; save the priorities alone"
            )
        if priorities is not None and priorities.store is not self:
            raise OptionError(
                "save(priorities=...): the sampler belongs to another store; pass one of this store"
            )
        with self.lock:
            if self._rows is None:
                raise OptionError("save() of an empty store: append rows first")
            kept = None if priorities is None else priorities.kept()
            save_rows(Path(path), self._rows, capacity=self._capacity, frames=self._frames, kept=kept)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, priorities: bool = True) -> ReplayStore:
        """Load a live store that `save` wrote. Rows keep their numbers, and open episodes can continue.

        Args:
            path: The folder that was given to `save`.
            priorities: Whether the first sampler that `prioritised` makes continues with saved priorities. It
                must then have the options of the sampler that was saved. False: it begins with new ones.

        Raises:
            DataNotFound: The folder holds no saved store.
            CorruptData: The saved store is damaged.
            StateError: Its priorities are damaged, or an earlier version saved it in a form that does not
                tell which rows follow each other.
        """
        found = load_rows(Path(path), arrays=RamArrays(), priorities=priorities)
        store = cls(found.capacity, frames=found.frames)
        store._rows = found.rows
        store._loaded = None if found.kept is None else (found.kept, os.fspath(path))
        store.version += 1
        return store

    # ---- the end ----

    def check_open(self) -> None:
        """Raise ClosedError after `close`."""
        if self._closed:
            raise ClosedError("the store is closed: open a new one")

    def close(self) -> None:
        """Stop building and release the rows; batches drawn earlier stay valid. May be called again."""
        self._closed = True
        self._stop.set()
        with self._changed:  # After a draw or append of another thread.
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.ready)
            self._rows = None
            if self._scratch is not None:
                self._scratch.close()
        if self._builder is not None:
            self._builder.join()
        if self._phase != "loading":  # In a fork, the parent's builder may be using it.
            self._ending.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


#: Stores of this process, and the lock for adding one.
_stores: weakref.WeakSet[ReplayStore] = weakref.WeakSet()
_stores_lock = threading.Lock()
#: Stores whose locks the forking thread holds.
_held: list[ReplayStore] = []


def _hold_all() -> None:
    """Wait until no thread adds or draws rows: a child then gets whole stores and free locks."""
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


class _NoUnits(Units):
    """Units of an empty store."""

    @property
    def count(self) -> int:
        return 0

    def batch(self, numbers: Any, also: Any = None) -> Batch:
        raise OptionError("a store without rows has no batches: append rows first")
