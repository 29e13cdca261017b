"""PyTorch support: stored data sets for DataLoaders, and batches prefetched to the device.

`ReplayDataset` divides a data set among ranks and DataLoader workers. `ReplayDataset.loader` gives batches in
the order of a `rlio.DatasetReader`, for any number of workers; its state counts the delivered batches.
`prefetch` reads and copies ahead for any reader, in a thread.

A batch is a dict of tensors; with several policies, a dict by policy. The caller owns the batch: no later
batch uses its memory. Without a transform, `prefetch` is mostly faster, because batches of worker processes
are copied to this process.

Example:
    >>> import numpy as np, rlio, rlio.torch
    >>> with rlio.ParquetWriter("memory://torch-example") as writer:
    ...     writer.write(rlio.SampleBatch(obs=np.arange(10.0), t=np.arange(10)))
    >>> dataset = rlio.torch.ReplayDataset("memory://torch-example", batch_size=4, epochs=1)
    >>> with dataset.loader() as loader:
    ...     first = next(loader)
    ...     state = loader.state_dict()
    >>> first["t"]
    tensor([0, 1, 2, 3])
    >>> with dataset.loader() as loader:
    ...     loader.load_state_dict(state)
    ...     [batch["t"].tolist() for batch in loader]
    [[4, 5, 6, 7], [8, 9]]
    >>> reader = rlio.DatasetReader("memory://torch-example", batch_size=5, epochs=1)
    >>> with rlio.torch.prefetch(reader, depth=2) as batches:
    ...     [batch["t"].tolist() for batch in batches]
    [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import operator
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import accumulate, pairwise
from multiprocessing.reduction import ForkingPickler
from typing import Annotated, Any, Literal, NamedTuple, Self, TypedDict, TypeVar, Unpack

import torch
import torch.distributed
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from rlio.batch import Batch, SampleBatch
from rlio.batch.join import joined_plainly
from rlio.batch.tensors import to_tensors
from rlio.bridges import to_tensordict
from rlio.errors import ClosedError, DataNotFound, EndOfData, OptionError, StateError, excerpt
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.look.stats import Normalise
from rlio.opening import OtherFiles
from rlio.query.positions import draw_seed
from rlio.read_options import OrderKeywords
from rlio.reader import JsonState, Restorable, warn_endless
from rlio.readers.prefetch import Prefetch
from rlio.readers.source_reader import SourceReader
from rlio.readers.stored_pass import Cache
from rlio.replay.draw_options import UnitKeywords
from rlio.replay.sequences import Sequences
from rlio.resolve import read
from rlio.source.joined import JoinedRoots, Snapshots
from rlio.source.snapshot import DatasetSnapshot
from rlio.storage.paths import mask_secrets
from rlio.support.options import check_count, checked_keywords
from rlio.support.states import seed_in
from rlio.support.turns import Turns

__all__ = ["Prefetch", "ReplayDataset", "ReplayLoader", "prefetch", "to_tensordict"]

logger: logging.Logger = logging.getLogger("rlio")

T = TypeVar("T")

# Options of opening what is stored. An open data set of rlio has them.
_OPENING = ("at", "storage_options", "limits")

# A worker sends several small batches in one message, because each message wakes threads of both processes,
# which takes as long as reading some batches. A message has about `_MESSAGE_BYTES` at most.
_MESSAGE_BATCHES = 16
_MESSAGE_BYTES = 1 << 20
# Larger tensors and batches travel in shared memory, with a file descriptor each; others inside the message.
_SHARED_BYTES = 2 << 20

#: What users receive: a dict of tensors, or the result of their ``transform``.
Item = Any


class StoredKeywords(OrderKeywords, UnitKeywords, total=False):
    """The options of `rlio.read`, with defaults, that a `ReplayDataset` takes."""

    at: Annotated[Snapshots | None, None]
    cache: Annotated[Cache, "auto"]
    missing: Annotated[Literal["error", "drop", "fill"], "error"]
    storage_options: Annotated[Mapping[str, Any] | None, None]
    limits: Annotated[Limits, DEFAULT_LIMITS]
    normalise: Annotated[Normalise | None, None]


def _place_of(root: Any) -> str:
    """Where the data is, for messages."""
    if isinstance(root, DatasetSnapshot | OtherFiles):
        return root.uri
    if isinstance(root, (str, os.PathLike)):
        return mask_secrets(os.fspath(root))
    if isinstance(root, Sequence):
        return ", ".join(map(_place_of, root))
    return f"a {type(root).__name__}"


class LoaderKeywords(TypedDict, total=False):
    """The options of a DataLoader, with its defaults, that change neither the order nor the batches."""

    pin_memory: Annotated[bool, False]
    pin_memory_device: Annotated[str, ""]
    prefetch_factor: Annotated[int | None, None]
    timeout: Annotated[float, 0]
    worker_init_fn: Annotated[Callable[[int], None] | None, None]
    multiprocessing_context: Annotated[Any, None]


class ReplayDataset(Restorable, IterableDataset[Item]):
    """This rank's batches of a stored data set, for PyTorch, divided among DataLoader workers.

    DataLoader worker i mod W reads batch i of the rank's sequence, where W is the number of workers. A
    DataLoader therefore delivers the sequence in order for any W, also without workers, forked or spawned.
    The sequence is that of ``rlio.read(root, batch_size=..., shard=(rank, world), ...)``: endless unless
    ``epochs`` is given; with ``shuffle``, each epoch has another order. You need not set an epoch. All
    reading of a data set of rlio is from the snapshot taken at opening.

    Read through `loader`: its state is exact, and loads with another number of workers or ranks. Your own
    DataLoader (``DataLoader(dataset, batch_size=None, num_workers=...)``) gives the same batches in the same
    order. But the main process does not know what was delivered, and each ``iter()`` starts again, in the
    same order: at the loaded state, or else at the beginning. torchdata's StatefulDataLoader keeps one state
    for each worker, so its state fits only the same number of workers.

    With ``cache="memory"``, which "auto" chooses for small data, each worker holds its own copy of all rows;
    with ``cache="disk"`` all processes share one copy. The order is the same.

    Several threads may call it. Each ``iter()`` is for one thread; `state_dict` is that of the last batch
    that any of them gave.

    Args:
        root: What is stored: the folder of a data set, a path or fsspec URL, files of another library, an
            open `rlio.Dataset`, or a list of these. Open tables, and files that need options of their format,
            by `rlio.open_dataset`. Of a table in memory, each worker gets a copy.
        batch_size: Units (rows, sequences, joint steps) of a batch, for each rank.
        transform: Called with each `rlio.SampleBatch` or `rlio.MultiAgentBatch`, in the worker that read it;
            its result is delivered, such as ``batch.to_torch(dtype=...)``. None: ``batch.to_torch()``.
        rank: Index of this process among those that share the data set; given together with ``world``.
        world: Number of those processes. None: from torch.distributed, or else rank 0 of 1.
        options: Options of `rlio.read`, except ``shard`` (pass ``rank`` and ``world``). For a data
            set that grows, use ``prefetch(rlio.FollowReader(root))``: workers would see different rows.

    Raises:
        OptionError: ``root`` is nothing that is stored, or an option is illegal; or ``seed`` is missing while
            torch.distributed, through which ranks agree on one, is not initialised.
        DataNotFound: The data set does not exist.
    """

    @checked_keywords
    def __init__(
        self,
        root: Any,
        *,
        batch_size: int,
        transform: Callable[[Batch], Item] | None = None,
        rank: int | None = None,
        world: int | None = None,
        **options: Unpack[StoredKeywords],
    ) -> None:
        super().__init__()
        if batch_size is None:
            raise OptionError("batch_size=None: a ReplayDataset needs a number of units, at least 1")
        self._transform = transform
        self.rank: int
        self.world: int
        self.rank, self.world, together = _place(rank, world)
        self._options: dict[str, Any] = {"batch_size": batch_size, **options}
        # What readers open, and the options of opening it. Of data of rlio, from the first reader on, what
        # that one opened: it has the listing and the schemas, so that workers request neither.
        opening = {name: self._options.pop(name) for name in _OPENING if name in self._options}
        self._opened: tuple[Any, dict[str, Any]] = root, opening
        # Whether the ranks agreed on a seed, because none was given. Then that of a state counts.
        self._agreed: bool = self.world > 1 and bool(options.get("shuffle")) and options.get("seed") is None
        if self._agreed:
            if not together:
                raise OptionError(
                    f"rank={self.rank}, world={self.world} and no seed: give all ranks the same seed=..., or "
                    "initialise torch.distributed, through which they agree on one"
                )
            uri = _place_of(root)
            self._options["seed"] = _from_first_rank(lambda: draw_seed(uri), self.rank)
        # An idle reader, kept for reuse because opening one may be slow, and the process that opened it. A
        # deque, because of several threads only one gets it.
        self._idle: deque[tuple[int, SourceReader]] = deque(maxlen=1)
        # All workers and ranks must read one snapshot in one order. Their state therefore holds the seed, and
        # does not load over another layout of the rows.
        at, self._start = _from_first_rank(self._begin, self.rank) if together else self._begin()
        if at is not None and together and self.rank:
            root, opening = self._opened
            self._opened = root, {**opening, "at": at}
        self._loaded: JsonState | None = None
        self._position = self._start
        # Whether the log says already that iteration does not end.
        self._said_endless = False

    def _begin(self) -> tuple[Snapshots | None, JsonState]:
        """The snapshot, of data of rlio, and the state that all ranks and workers share."""
        reader = self._open()
        self._put_back(reader)
        if reader.seed is not None:
            logger.info("reading %s with seed %d", _place_of(self._opened[0]), reader.seed)
        own = reader.stored_source
        at = own.snapshot() if isinstance(own, DatasetSnapshot | JoinedRoots) else None
        return at, reader.state_dict()

    def _open(self, **options: Any) -> SourceReader:
        root, opening = self._opened
        reader = read(root, shard=(self.rank, self.world), **{**self._options, **opening, **options})
        if not isinstance(reader, SourceReader):
            reader.close()
            raise OptionError(f"{type(reader).__name__} reads nothing that is stored: wrap it in prefetch()")
        own = reader.stored_source
        if isinstance(own, DatasetSnapshot | JoinedRoots):
            self._opened = own if isinstance(own, DatasetSnapshot) else own.roots, {}
        return reader

    def _reader(self, state: JsonState | None = None) -> SourceReader:
        """A reader for exclusive use, at the beginning or for loading ``state``; the caller closes it."""
        reader, position = self._idle_reader(), (state or {}).get("position")
        if not self._agreed or not isinstance(position, dict) or "seed" not in position:
            return reader or self._open()
        if reader is not None and reader.seed == position["seed"]:
            return reader
        if reader is not None:
            reader.close()
        return self._open(seed=seed_in(position))

    def _idle_reader(self) -> SourceReader | None:
        """The idle reader, if this process has one."""
        try:
            process, reader = self._idle.pop()
        except IndexError:
            return None
        return reader if process == os.getpid() else None

    def _put_back(self, reader: SourceReader) -> None:
        """Keep a reader for reuse, instead of an idle one that another thread has put back."""
        other = self._idle_reader()
        self._idle.append((os.getpid(), reader))
        if other is not None:
            other.close()

    def _rest(self) -> None:
        """Close the idle reader: workers open their own."""
        reader = self._idle_reader()
        if reader is not None:
            reader.close()

    def _describe(self) -> Iterator[str]:
        yield repr(_place_of(self._opened[0]))
        yield f"batch_size={self._options['batch_size']}"
        yield f"rank={self.rank}, world={self.world}"

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = {**self.__dict__, "_idle": deque(maxlen=1)}
        return state

    # ---- reading ----

    def __iter__(self) -> Iterator[Item]:
        """Begin at the loaded state the first time, later at the beginning.

        Without ``epochs`` it has no end, and logs this once; so do a loader and `prefetch`.

        Raises:
            StateError: The last `load_state_dict` failed.
        """
        self._check_loaded()
        if _worker()[0] == 0:
            self._say_if_endless()
        start, self._loaded = self._loaded or self._start, None
        self._position = start
        return self._items(start)

    def _say_if_endless(self) -> None:
        """Log, once, that iteration does not end."""
        if self._options.get("epochs") is None and not self._said_endless:
            self._said_endless = True
            warn_endless(type(self).__name__)

    def _items(self, start: JsonState) -> Iterator[Item]:
        worker, workers = _worker()
        state, skip = _resumed(start, worker, workers)
        for batch, after in self._turns(state, skip, workers):
            item = None if batch is None else self._made(batch)
            self._position = after if workers == 1 else {"worker": [worker, workers], "state": after}
            if batch is not None:
                yield item

    def _turns(self, start: JsonState, skip: int, workers: int) -> Iterator[tuple[Batch | None, JsonState]]:
        """Every ``workers``-th batch with the state after it; at the end, None and the state there."""
        with self._reader(start) as reader:
            reader.load_state_dict(start)
            while True:
                try:
                    reader.skip(skip)
                    batch = reader.sample()
                except EndOfData:
                    break
                yield batch, reader.state_dict()
                skip = workers - 1
            yield None, reader.state_dict()

    def _made(self, batch: Batch) -> Item:
        return batch.to_torch() if self._transform is None else self._transform(batch)

    def _batches_per_message(self) -> int:
        """How many batches a worker sends in one message; the same number in all workers."""
        reader = self._reader()
        draw = self._options.get("draw")
        length = draw.length if isinstance(draw, Sequences) else None
        unit, schemas = reader.unit, reader.stored_source.schemas.values()
        self._put_back(reader)
        if unit == "episodes" or (unit == "sequences" and length is None):
            return 1  # The number of rows in a batch is known only after reading it.
        row_bytes = max((schema.row_bytes for schema in schemas), default=1)
        batch_bytes: int = self._options["batch_size"] * (length or 1) * max(row_bytes, 1)
        return max(1, min(_MESSAGE_BATCHES, _MESSAGE_BYTES // batch_bytes))

    @checked_keywords
    def loader(self, *, num_workers: int = 0, **options: Unpack[LoaderKeywords]) -> ReplayLoader:
        """Begin to read at the dataset's position, in worker processes if there are any: see `ReplayLoader`.

        Args:
            num_workers: Processes; 0 reads in this one.
            options: Options of `torch.utils.data.DataLoader`: ``pin_memory``, ``prefetch_factor``,
                ``timeout``, ``worker_init_fn``, ``multiprocessing_context``. ``prefetch_factor`` limits the
                batches that a worker reads ahead. The default is up to 48 small batches, or 2 large ones.
                With a ``timeout``, each batch travels alone, because the timeout applies to one batch.

        Raises:
            OptionError: An option is unknown or illegal.
        """
        return ReplayLoader(self, num_workers=num_workers, **options)

    # ---- state ----

    def state_dict(self) -> JsonState:
        """The position of the iteration in this process: after the last batch that it gave.

        The state is that of the reader; a DataLoader worker gives its own.

        Raises:
            StateError: The last `load_state_dict` failed.
        """
        self._check_loaded()
        return self._position

    def load_state_dict(self, state: JsonState) -> None:
        """Make the next ``iter()`` begin at a state of a dataset, a loader or a `rlio.DatasetReader`.

        After any error here, ``iter()`` raises StateError until a load succeeds.

        Raises:
            StateError: The state does not fit the data or the options, or is another worker's.
        """
        with self._loading():
            self._accept(_resumed(state, *_worker())[0])
            self._loaded = self._position = state

    def _accept(self, state: JsonState) -> None:
        """Check that a state fits."""
        reader = self._reader(state)
        try:
            reader.load_state_dict(state)
        finally:
            self._put_back(reader)


class ReplayLoader(Restorable, Iterator[Item]):
    """Delivers the batches of a `ReplayDataset` in order, read by workers. Made by `ReplayDataset.loader`.

    It is an iterator: a second ``for`` continues where the first one stopped, with the same workers. Its
    state counts delivered batches, not those that workers have ready. The state is that of a
    `rlio.DatasetReader`: it loads with any number of workers and, if all ranks have taken equally many
    batches, of ranks. After an error, the next call retries from the batch that failed.

    Several threads may call it: their calls take turns, and each batch goes to one of them. `close` ends a
    call that waits for its batch, as soon as the batch arrives.

    The global random generators of a worker, which transforms may use, are seeded by the order's seed and the
    position where the workers began. The generators of this process are not touched.
    """

    @checked_keywords
    def __init__(
        self, dataset: ReplayDataset, *, num_workers: int = 0, **options: Unpack[LoaderKeywords]
    ) -> None:
        num_workers = check_count("num_workers", num_workers, least=0, of="worker processes")
        self._dataset = dataset
        self._num_workers = num_workers
        self._options: dict[str, Any] = {**options}
        self._state = _resumed(dataset.state_dict(), 0, 1)[0]
        self._workers: Iterator[list[_Sent]] | None = None
        self._running: Iterator[_Sent] | None = None
        self._ended = self._closed = False
        self._turns = Turns(type(self).__name__)

    def _describe(self) -> Iterator[str]:
        yield f"num_workers={self._num_workers}"
        yield repr(self._dataset)

    def __iter__(self) -> Self:
        self._dataset._say_if_endless()
        return self

    def __next__(self) -> Item:
        """The next batch.

        Raises:
            StateError: The last `load_state_dict` failed.
            ClosedError: After `close`.
            Exception: The worker's exception, with its traceback as a note.
        """
        self._turns.take(self._check_open)
        try:
            return self._take()
        finally:
            self._turns.lock.release()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the loader is closed: make another one, or use it before close()")

    def _take(self) -> Item:
        self._check_open()
        self._check_loaded()
        while not self._ended:
            sent = self._receive()
            if self._closed:
                self._stop()
                raise ClosedError("the loader was closed while this thread waited for a batch")
            if sent is None:
                self._ended = True
                break
            if sent.what == "error":
                self._stop()
                raise sent.value
            self._state = sent.state
            if sent.what == "batch":
                return sent.value
        raise StopIteration

    def _receive(self) -> _Sent | None:
        """The next item from the workers; None if all have ended."""
        try:
            if self._running is None:
                self._running = self._start()
            return next(self._running)
        except StopIteration:
            self._stop()
            return None
        except BaseException:  # A killed worker, a timeout, Ctrl-C: the workers cannot continue.
            self._stop()
            raise

    def _start(self) -> Iterator[_Sent]:
        options, together = dict(self._options), 1
        if self._num_workers:
            options, together = self._grouped()
            self._dataset._rest()
        # A DataLoader seeds its workers from this generator. Without it, it would use the user's generator.
        place = json.dumps(self._state, sort_keys=True).encode()
        seed = int.from_bytes(hashlib.blake2b(place, digest_size=7).digest(), "little")
        loader: DataLoader[list[_Sent]] = DataLoader(
            _Sending(self._dataset, self._state, together),
            batch_size=None,
            num_workers=self._num_workers,
            collate_fn=_as_it_is,
            generator=torch.Generator().manual_seed(seed),
            **options,
        )
        self._workers = iter(loader)
        return _in_turns(self._workers, max(self._num_workers, 1))

    def _grouped(self) -> tuple[dict[str, Any], int]:
        """The options of the DataLoader, and how many batches a worker sends in one message."""
        ahead = self._options.get("prefetch_factor")
        if self._options.get("timeout") or (ahead is not None and ahead < 4):
            return self._options, 1
        together = self._dataset._batches_per_message()
        if ahead is None:
            return self._options, together
        together = min(together, ahead // 2)
        # One message is always being delivered.
        return {**self._options, "prefetch_factor": ahead // together - (together > 1)}, together

    def _stop(self) -> None:
        """End the workers. Batches that they have ready are read again if needed."""
        workers, self._workers, self._running = self._workers, None, None
        # The DataLoader's destructor does the same, but only after the last traceback that holds it is gone.
        shutdown = getattr(workers, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()

    def state_dict(self) -> JsonState:
        """The state after the batch that was delivered last; that of a `rlio.DatasetReader`.

        Raises:
            StateError: The last `load_state_dict` failed.
        """
        self._check_loaded()
        return self._state

    def load_state_dict(self, state: JsonState) -> None:
        """Continue from a state of a loader, dataset or `rlio.DatasetReader`, with new workers.

        After any error here, no batch is delivered until a load succeeds.

        Raises:
            StateError: The state does not fit the data or the options, or is that of one of several workers.
            ClosedError: After `close`.
        """
        with self._turns.held():
            if self._closed:
                raise ClosedError("the loader is closed: load the state into a new one")
            with self._loading():
                plain = _resumed(state, 0, 1)[0]
                self._dataset._accept(plain)
                self._stop()
                self._state = plain
            self._ended = False

    def close(self) -> None:
        """End the workers. May be called again.

        Waits some seconds for a batch that another thread waits for; after that, its call ends the workers.
        """
        self._closed = True
        with self._turns.after_calls() as alone:
            if alone:
                self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Sent(NamedTuple):
    """A worker's message item: a batch and the state after it, the state at the end, or an error.

    The value of "rows" is a batch that is converted to tensors later; on the way, its number of rows.
    """

    what: Literal["batch", "rows", "end", "error"]
    state: JsonState
    value: Item


class _Sending(IterableDataset[list[_Sent]]):
    """The workers' side of a `ReplayLoader`: batches with their states, several in one message."""

    def __init__(self, dataset: ReplayDataset, start: JsonState, together: int) -> None:
        super().__init__()
        self._dataset = dataset
        self._start = start
        self._together = together

    def __iter__(self) -> Iterator[Any]:  # A `_Message` arrives as a list.
        here = get_worker_info() is None
        sent: list[_Sent] = []
        for each in self._sent():
            sent.append(each)
            if len(sent) == self._together or each.what in ("end", "error"):
                yield sent if here else _Message(sent)
                sent = []

    def _sent(self) -> Iterator[_Sent]:
        worker, workers = _worker()
        try:
            for batch, state in self._dataset._turns(self._start, worker, workers):
                if batch is None:
                    yield _Sent("end", state, None)
                elif get_worker_info() is not None and self._dataset._transform is None:
                    yield _Sent("rows", state, batch)
                else:
                    yield _Sent("batch", state, self._dataset._made(batch))
        except Exception as error:
            if get_worker_info() is None:
                raise
            # A DataLoader would raise another error, with the traceback as its message.
            yield _Sent("error", {}, _portable(error, worker))


class _Message:
    """Sent batches as bytes. Unpickling gives the list of them, with tensors that the receiver owns.

    torch sends each tensor in shared memory with its own file descriptor, in several system calls. Most
    columns of a batch have a few KB, and copying them is faster. Batches with the same columns are joined,
    and split again by the receiver. torch sends large tensors.
    """

    def __init__(self, sent: list[_Sent]) -> None:
        joined = _joined([each.value for each in sent if each.what == "rows"])
        file = BytesIO()
        _Pickler(file).dump(
            (joined, [_as_tensors(each) if joined is None else _as_count(each) for each in sent])
        )
        self._bytes = file.getvalue()

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self._bytes,)


def _joined(batches: Sequence[Batch]) -> dict[str, Any] | None:
    """The columns of small batches, joined in order; None for other batches, and for nested columns."""
    if not batches or len(batches) * batches[0].size_bytes() > _SHARED_BYTES:
        return None
    plain = [batch for batch in batches if isinstance(batch, SampleBatch)]
    joined = joined_plainly(plain) if len(plain) == len(batches) else None
    return None if joined is None or any(type(column) is dict for column in joined.values()) else joined


def _as_tensors(sent: _Sent) -> _Sent:
    return _Sent("batch", sent.state, sent.value.to_torch()) if sent.what == "rows" else sent


def _as_count(sent: _Sent) -> _Sent:
    return sent._replace(value=sent.value.count) if sent.what == "rows" else sent


def _received(data: bytes) -> list[_Sent]:
    """The batches of a message; called by `pickle`."""
    joined, sent = ForkingPickler.loads(
        data
    )  # From our own worker, through torch's queue; never from a file.
    if joined is None:
        return sent  # type: ignore[no-any-return]  # pickle knows no types.
    ends = [0, *accumulate(each.value for each in sent if each.what == "rows")]
    columns = [_cut(column, ends) for column in to_tensors(joined).values()]
    batches = (dict(zip(joined, parts, strict=True)) for parts in zip(*columns, strict=True))
    return [_Sent("batch", s.state, next(batches)) if s.what == "rows" else s for s in sent]


def _cut(column: Any, ends: list[int]) -> list[Any]:
    """The part of each batch, in the same memory."""
    if not isinstance(column, torch.Tensor):
        return [column[start:stop] for start, stop in pairwise(ends)]
    # Views of one tensor would share its version and gradient: a change of one batch could fail in another.
    rows = column.numpy()
    return [torch.from_numpy(rows[start:stop]) for start, stop in pairwise(ends)]


class _Pickler(ForkingPickler):
    """Pickles small tensors by value, and others like torch: in shared memory."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file, -1)  # The newest protocol.
        self.dispatch_table = {**self.dispatch_table, torch.Tensor: _reduce_tensor}


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    try:
        if tensor.nbytes <= _SHARED_BYTES:
            return torch.from_numpy, (tensor.numpy(),)
    except (RuntimeError, TypeError) as error:
        # Sparse, on a device, with a gradient, or of a dtype that NumPy does not have.
        logger.debug("a tensor is sent in shared memory: %s", error)
    return reduce_tensor(tensor)  # type: ignore[no-untyped-call]  # torch does not annotate it.


def _in_turns(messages: Iterable[list[_Sent]], workers: int) -> Iterator[_Sent]:
    """One batch of each worker in turn; a message holds the next batches of one worker."""
    queues: deque[deque[_Sent]] = deque(deque() for _ in range(workers))
    for message in messages:
        queues[0].extend(message)
        while queues[0]:
            yield queues[0].popleft()
            queues.rotate(-1)


def _portable(error: Exception, worker: int) -> Exception:
    """An error that survives being sent, with the traceback as a note."""
    text = "".join(traceback.format_exception(error))
    try:
        ForkingPickler.dumps(error)  # As the DataLoader does; the copy below is what the receiver does.
        sent = copy.copy(error)
    except Exception as failure:
        logger.debug("%r cannot be sent: %r", error, failure)
        sent = None
    if type(sent) is not type(error):
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"raised in DataLoader worker {worker}:\n{text}")
    return error


def _as_it_is(sent: Any) -> Any:
    """Replaces the DataLoader's own conversion. At the top of the module because workers import it."""
    return sent


def _worker() -> tuple[int, int]:
    """This process's index among the DataLoader's workers, and their number; (0, 1) in the main process."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def _resumed(state: JsonState, worker: int, workers: int) -> tuple[JsonState, int]:
    """Split a dataset's state into the reader's state and the number of batches to skip from there.

    Raises:
        StateError: The state belongs to another worker.
    """
    if not isinstance(state, dict) or "worker" not in state:
        return state, worker
    if state["worker"] != [worker, workers] or "state" not in state:
        raise StateError(
            f"found the state of DataLoader worker {excerpt(state['worker'])} (index, workers), expected "
            f"that of {[worker, workers]}: load the state with the number of workers that saved it, or use "
            "ReplayDataset.loader(), whose states fit any number"
        )
    return state["state"], workers - 1


def _place(rank: int | None, world: int | None) -> tuple[int, int, bool]:
    """Rank, world, and whether torch.distributed reaches all ranks.

    Raises:
        OptionError: Only one is given, or the rank is outside the world.
    """
    if (rank is None) != (world is None):
        raise OptionError(f"rank={rank}, world={world}: pass both or neither")
    if rank is not None and world is not None:
        if not 0 <= operator.index(rank) < operator.index(world):
            raise OptionError(f"rank={rank}, world={world}: expected 0 <= rank < world")
        return rank, world, False
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size(), True
    if os.environ.get("WORLD_SIZE", "1") != "1":
        logger.warning(
            "WORLD_SIZE is %s, but torch.distributed is not initialised: this process reads all of the data; "
            "call torch.distributed.init_process_group() first, or pass rank=... and world=...",
            os.environ["WORLD_SIZE"],
        )
    return 0, 1, False


def _from_first_rank(make: Callable[[], T], rank: int) -> T:
    """Call ``make()`` on rank 0, and give its result to all ranks.

    Raises:
        DataNotFound: ``make()`` failed on rank 0.
    """
    made: list[Any] = [None, None]
    failure: Exception | None = None
    if rank == 0:
        try:
            made = [make(), None]
        except Exception as error:  # The other ranks wait for the result.
            failure, made = error, [None, f"{type(error).__name__}: {error}"]
    torch.distributed.broadcast_object_list(made, src=0)
    if failure is not None:
        raise failure
    if made[1] is not None:
        raise DataNotFound(f"rank 0 could not open the data set: {made[1]}")
    found: T = made[0]
    return found


#: The spelling for users: ``with rlio.torch.prefetch(reader, device="cuda") as batches``.
prefetch = Prefetch
