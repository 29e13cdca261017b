"""PyTorch's side: stored data sets for DataLoaders, and batches that are ready on the device.

`ReplayDataset` shares a data set out among ranks and DataLoader workers; its `ReplayDataset.loader` gives
batches in the one order that a `rlio.DatasetReader` has, whatever the number of workers, with a state that
counts what was delivered. `prefetch` reads and copies ahead for any reader, in a thread.

A batch is a dict of tensors, by policy where there are several. It is the caller's: no later batch uses its
memory. Reading without a transform is mostly faster with `prefetch`: each worker decodes for itself, and its
batches are copied to this process.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BytesIO
from itertools import accumulate, pairwise
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeVar

import torch
import torch.distributed
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from rlio.batch import Batch, SampleBatch
from rlio.batch.join import joined_plainly
from rlio.batch.tensors import to_tensors
from rlio.dataset.dataset import Dataset, Snapshot
from rlio.errors import ClosedError, DataNotFound, EndOfData, OptionError, StateError, excerpt
from rlio.reader import JsonState, Restorable
from rlio.readers.dataset_reader import DatasetReader
from rlio.readers.prefetch import Prefetch
from rlio.support.options import refuse_unknown

__all__ = ["Prefetch", "ReplayDataset", "ReplayLoader", "prefetch"]

logger = logging.getLogger("rlio")

T = TypeVar("T")

# A worker sends several small batches in one message: each message wakes up threads of both processes, which
# takes as long as reading some batches. All batches of a message together have about as many bytes at most.
_MESSAGE_BATCHES = 16
_MESSAGE_BYTES = 1 << 20
# Tensors and batches above travel in shared memory, a file descriptor each; others inside the message.
_SHARED_BYTES = 2 << 20

#: What users have made of a batch: a dict of tensors, or whatever their ``transform`` gives.
Item = Any


class ReplayDataset(Restorable, IterableDataset[Item]):
    """The batches of a stored data set, for PyTorch: this rank's, shared out among DataLoader workers.

    Batch i of the rank's sequence is read by DataLoader worker i modulo their number, so that a DataLoader
    delivers the sequence in its order with any number of workers, none included, forked or spawned. The
    sequence is that of ``DatasetReader(root, batch_size=..., shard=(rank, world), ...)``: endless unless
    ``epochs`` says otherwise, each epoch in another order if ``shuffle`` asks for it; there is no epoch to
    set. What is read is the snapshot of the moment of opening.

    The way to read it is `loader`, whose state is exact and may be loaded with another number of workers or
    ranks. A DataLoader of one's own (``DataLoader(dataset, batch_size=None, num_workers=...)``) gives the
    same batches in the same order, but the main process does not know what was delivered, and each ``iter()``
    begins anew, in the same order: at the state that was loaded, else at the beginning. torchdata's
    StatefulDataLoader keeps a state for each worker, which fits the same number of workers only.

    With ``cache="memory"``, which "auto" chooses for small data, each worker keeps all rows for itself; with
    ``cache="disk"`` all processes share them, in the same order.

    Args:
        root: Folder of the data set, a path or fsspec URL, or an open `rlio.Dataset`.
        batch_size: Units (rows, sequences, joint steps) of a batch, for each rank.
        transform: Called with each `rlio.SampleBatch` or `rlio.MultiAgentBatch`, in the worker that read it;
            what it returns is delivered. None: ``batch.to_torch()``.
        rank: This process's number among those that share the data set; given together with ``world``.
        world: How many those are. None: as torch.distributed says, else 0 of 1.
        options: Those of `rlio.DatasetReader`, but for ``shard``, ``follow`` and what goes with it.

    Raises:
        OptionError: An option is illegal, or ``seed`` is missing where ranks could not agree on one: without
            torch.distributed.
        DataNotFound: There is no data set.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Dataset,
        *,
        batch_size: int,
        transform: Callable[[Batch], Item] | None = None,
        rank: int | None = None,
        world: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        _check_options(batch_size, options)
        self._root = root
        self._transform = transform
        self.rank, self.world, together = _place(rank, world)
        self._options = {"batch_size": batch_size, **options}
        if self.world > 1 and not together and options.get("shuffle") and options.get("seed") is None:
            raise OptionError(
                f"rank={self.rank}, world={self.world} and no seed: give all ranks the same seed=..., or "
                "initialise torch.distributed, through which they agree on one"
            )
        # A reader of this process that stands idle, and the process: opening one may cost a lot.
        self._idle: tuple[int, DatasetReader] | None = None
        # All workers and ranks read one snapshot in one order, whatever they would find or draw themselves:
        # the state has the seed, and does not load over another layout of the rows.
        self._options["at"], self._start = (
            _from_first_rank(self._begin, self.rank) if together else self._begin()
        )
        self._loaded: JsonState | None = None
        self._position = self._start

    def _begin(self) -> tuple[Snapshot, JsonState]:
        """What all ranks and workers must agree on."""
        reader = self._open()
        self._idle = (os.getpid(), reader)
        if reader.seed is not None:
            logger.info("reading %s with seed %d", reader.dataset.uri, reader.seed)
        return reader.dataset.snapshot(), reader.state_dict()

    def _open(self) -> DatasetReader:
        return DatasetReader(self._root, shard=(self.rank, self.world), **self._options)

    def _reader(self) -> DatasetReader:
        """A reader that nobody else has; the caller closes it."""
        process, reader = self._idle or (None, None)
        self._idle = None
        if reader is not None and process == os.getpid():
            return reader
        return self._open()

    def _rest(self) -> None:
        """Close the reader that stands idle: workers have their own."""
        if self._idle is not None and self._idle[0] == os.getpid():
            self._idle[1].close()
        self._idle = None

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = {**self.__dict__, "_idle": None}
        return state

    # ---- reading ----

    def __iter__(self) -> Iterator[Item]:
        """Begin at the state that was loaded, the first time; else at the beginning.

        Raises:
            StateError: The last `load_state_dict` failed.
        """
        self._check_loaded()
        start, self._loaded = self._loaded or self._start, None
        self._position = start
        return self._items(start)

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
        with self._reader() as reader:
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
        """How many batches a worker sends together; the same number in all workers."""
        reader = self._reader()
        self._idle = (os.getpid(), reader)
        length = self._options.get("sequence_length")
        if reader.unit == "episodes" or (reader.unit == "sequences" and length is None):
            return 1  # The number of rows of a batch is not known before it is read.
        row_bytes = max((schema.row_bytes for schema in reader.dataset.schemas.values()), default=1)
        batch_bytes: int = self._options["batch_size"] * (length or 1) * max(row_bytes, 1)
        return max(1, min(_MESSAGE_BATCHES, _MESSAGE_BYTES // batch_bytes))

    def loader(self, *, num_workers: int = 0, **options: Any) -> ReplayLoader:
        """Begin to read where the dataset stands, in worker processes if there are any: see `ReplayLoader`.

        Args:
            num_workers: Processes; 0 reads in this one.
            options: Of `torch.utils.data.DataLoader`: ``pin_memory``, ``prefetch_factor``, ``timeout``,
                ``worker_init_fn``, ``multiprocessing_context``. ``prefetch_factor`` bounds the batches that a
                worker reads ahead. Without it, a worker reads up to 48 small batches ahead, and 2 large ones.
                With a ``timeout``, each batch travels alone, since the timeout is that of one batch.

        Raises:
            OptionError: Another option, or an illegal one.
        """
        return ReplayLoader(self, num_workers=num_workers, **options)

    # ---- state ----

    def state_dict(self) -> JsonState:
        """Where the iteration in this process is: after the batch that it gave last.

        It is the state of a `rlio.DatasetReader`; in a DataLoader worker, that worker's own.

        Raises:
            StateError: The last `load_state_dict` failed.
        """
        self._check_loaded()
        return self._position

    def load_state_dict(self, state: JsonState) -> None:
        """Let the next ``iter()`` begin at a state, of a dataset, a loader or a `rlio.DatasetReader`.

        After any error here, ``iter()`` raises StateError until a load succeeds.

        Raises:
            StateError: It does not fit the data or the options, or is another worker's.
        """
        with self._loading():
            self._accept(_resumed(state, *_worker())[0])
            self._loaded = self._position = state

    def _accept(self, state: JsonState) -> None:
        """Check a state."""
        reader = self._reader()
        self._idle = (os.getpid(), reader)
        reader.load_state_dict(state)


class ReplayLoader(Restorable, Iterator[Item]):
    """Delivers the batches of a `ReplayDataset` in their order, read by workers; made by its `loader`.

    It is an iterator: a second ``for`` goes on where the first one was left, with the same workers. Its
    state counts batches that were delivered, not those that workers have ready, and is that of a
    `rlio.DatasetReader`: it loads with any number of workers and, where all ranks have taken equally many
    batches, of ranks. After an error, the next call tries again, from the batch that failed on.

    What random transforms draw from the global generators of a worker is seeded by the order's seed and the
    place where the workers began. The generators of this process are left alone.
    """

    def __init__(self, dataset: ReplayDataset, *, num_workers: int = 0, **options: Any) -> None:
        if operator.index(num_workers) < 0:
            raise OptionError(f"num_workers={num_workers}: worker processes, 0 or more")
        taken = ("num_workers", *_LOADER_OPTIONS)
        refuse_unknown(options, taken, of="loader() (batches and their order are the dataset's)")
        self._dataset = dataset
        self._num_workers = num_workers
        self._options = options
        self._state = _resumed(dataset.state_dict(), 0, 1)[0]
        self._workers: Iterator[list[_Sent]] | None = None
        self._running: Iterator[_Sent] | None = None
        self._ended = self._closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        """The next batch.

        Raises:
            StateError: The last `load_state_dict` failed.
            ClosedError: After `close`.
            Exception: What a worker raised, with its traceback as a note.
        """
        if self._closed:
            raise ClosedError("the loader is closed: make another one, or use it before close()")
        self._check_loaded()
        while not self._ended:
            sent = self._receive()
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
        """What comes next from the workers; None if all have ended."""
        try:
            if self._running is None:
                self._running = self._start()
            return next(self._running)
        except StopIteration:
            self._stop()
            return None
        except BaseException:  # A worker that was killed, a timeout, Ctrl-C: workers cannot go on.
            self._stop()
            raise

    def _start(self) -> Iterator[_Sent]:
        options, together = dict(self._options), 1
        if self._num_workers:
            options, together = self._grouped()
            self._dataset._rest()
        # A DataLoader seeds its workers from here; without it, it would draw from the user's generator.
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
        """The options of the DataLoader, and how many batches a worker sends together."""
        ahead = self._options.get("prefetch_factor")
        if self._options.get("timeout") or (ahead is not None and ahead < 4):
            return self._options, 1
        together = self._dataset._batches_per_message()
        if ahead is None:
            return self._options, together
        together = min(together, ahead // 2)
        # One message is being delivered.
        return {**self._options, "prefetch_factor": ahead // together - (together > 1)}, together

    def _stop(self) -> None:
        """End the workers; what they have ready is read again, should anybody want it."""
        workers, self._workers, self._running = self._workers, None, None
        # Its own destructor does the same, but waits until the last traceback that holds it is gone.
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
        """Go on from a state: of a loader or dataset, or of a `rlio.DatasetReader`; workers begin anew.

        After any error here, no batch is delivered until a load succeeds.

        Raises:
            StateError: It does not fit the data or the options, or is that of one of several workers.
            ClosedError: After `close`.
        """
        if self._closed:
            raise ClosedError("the loader is closed: load the state into another one")
        with self._loading():
            plain = _resumed(state, 0, 1)[0]
            self._dataset._accept(plain)
            self._stop()
            self._state = plain
        self._ended = False

    def close(self) -> None:
        """End the workers. May be called again."""
        self._closed = True
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


#: Options of a DataLoader that do not touch the order or the batches.
_LOADER_OPTIONS = (
    "pin_memory",
    "pin_memory_device",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
)


class _Sent(NamedTuple):
    """What a worker sends: a batch and the state after it, the state at the end, or an error.

    The value of "rows" is a batch that is to become tensors; on the way, its number of rows.
    """

    what: Literal["batch", "rows", "end", "error"]
    state: JsonState
    value: Item


class _Sending(IterableDataset[list[_Sent]]):
    """What the workers of a `ReplayLoader` read: batches with their states, several in one message."""

    def __init__(self, dataset: ReplayDataset, start: JsonState, together: int) -> None:
        super().__init__()
        self._dataset = dataset
        self._start = start
        self._together = together

    def __iter__(self) -> Iterator[Any]:  # A `_Message` is a list where it arrives.
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
            # A DataLoader would make another error of it, with the traceback for a message.
            yield _Sent("error", {}, _portable(error, worker))


class _Message:
    """Sent batches as bytes; unpickled, the list of them, with tensors of the receiver's own.

    torch sends each tensor in shared memory with a file descriptor of its own, in several system calls. Most
    columns of a batch have a few KB, which are copied in less time. Batches whose columns are alike are
    joined, and cut again where they arrive. Large tensors go torch's way.
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
    """The columns of small batches, one after the other; None of others."""
    if not batches or len(batches) * batches[0].size_bytes() > _SHARED_BYTES:
        return None
    plain = [batch for batch in batches if isinstance(batch, SampleBatch)]
    return joined_plainly(plain) if len(plain) == len(batches) else None


def _as_tensors(sent: _Sent) -> _Sent:
    return _Sent("batch", sent.state, sent.value.to_torch()) if sent.what == "rows" else sent


def _as_count(sent: _Sent) -> _Sent:
    return sent._replace(value=sent.value.count) if sent.what == "rows" else sent


def _received(data: bytes) -> list[_Sent]:
    """The batches of a message; `pickle` calls it."""
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
    # Views of one tensor share its version and gradient: a change of one batch could fail in another.
    rows = column.numpy()
    return [torch.from_numpy(rows[start:stop]) for start, stop in pairwise(ends)]


class _Pickler(ForkingPickler):
    """Pickles small tensors by value, and others as torch does: in shared memory."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file, -1)  # The newest protocol.
        self.dispatch_table = {**self.dispatch_table, torch.Tensor: _reduce_tensor}


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    try:
        if tensor.nbytes <= _SHARED_BYTES:
            return torch.from_numpy, (tensor.numpy(),)
    except (RuntimeError, TypeError) as error:
        # Sparse, on a device, with a gradient, or of a dtype that NumPy lacks.
        logger.debug("a tensor is sent in shared memory: %s", error)
    return reduce_tensor(tensor)  # type: ignore[no-untyped-call]  # torch does not annotate it.


def _in_turns(messages: Iterable[list[_Sent]], workers: int) -> Iterator[_Sent]:
    """One batch of each worker in turn; a message has the next batches of one worker."""
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
        ForkingPickler.dumps(error)  # What the DataLoader does with it; and below, what the receiver does.
        sent = copy.copy(error)
    except Exception as failure:
        logger.debug("%r cannot be sent as it is: %r", error, failure)
        sent = None
    if type(sent) is not type(error):
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"raised in DataLoader worker {worker}:\n{text}")
    return error


def _as_it_is(sent: Any) -> Any:
    """Instead of the DataLoader's own conversion; at the top of the module, so that workers find it."""
    return sent


def _worker() -> tuple[int, int]:
    """This process's number among the DataLoader's workers, and theirs; 0 of 1 in the main process."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def _resumed(state: JsonState, worker: int, workers: int) -> tuple[JsonState, int]:
    """The reader's state in a state of a dataset, and how many batches are to be skipped from there.

    Raises:
        StateError: It is one of another worker.
    """
    if not isinstance(state, dict) or "worker" not in state:
        return state, worker
    if state["worker"] != [worker, workers] or "state" not in state:
        raise StateError(
            f"the state is that of DataLoader worker {excerpt(state['worker'])} (number, workers), and this "
            f"is {[worker, workers]}: load it with the number of workers that it was saved with, or use "
            "ReplayDataset.loader(), whose states fit any number"
        )
    return state["state"], workers - 1


def _check_options(batch_size: int, options: dict[str, Any]) -> None:
    if batch_size is None:
        raise OptionError("batch_size=None: a ReplayDataset needs a number of units, at least 1")
    if "shard" in options:
        raise OptionError("shard=...: give rank=... and world=... instead; workers are no ranks")
    if options.get("follow"):
        raise OptionError(
            "follow=True: what comes is not known, and cannot be shared out among workers; use "
            "rlio.torch.prefetch(DatasetReader(root, follow=True))"
        )
    if options.get("grow"):
        raise OptionError(
            "grow=True: workers would list at different moments and see other rows; open a new "
            "ReplayDataset for what was added, or use rlio.torch.prefetch(DatasetReader(root, grow=True))"
        )


def _place(rank: int | None, world: int | None) -> tuple[int, int, bool]:
    """Rank, world, and whether all of them can be reached through torch.distributed.

    Raises:
        OptionError: Only one is given, or they do not fit.
    """
    if (rank is None) != (world is None):
        raise OptionError(f"rank={rank}, world={world}: give both or neither")
    if rank is not None and world is not None:
        if not 0 <= operator.index(rank) < operator.index(world):
            raise OptionError(f"rank={rank}, world={world}: 0 <= rank < world")
        return rank, world, False
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size(), True
    if os.environ.get("WORLD_SIZE", "1") != "1":
        logger.warning(
            "WORLD_SIZE is %s, but torch.distributed is not initialised: this process reads all of the data; "
            "call torch.distributed.init_process_group() before, or give rank=... and world=...",
            os.environ["WORLD_SIZE"],
        )
    return 0, 1, False


def _from_first_rank(make: Callable[[], T], rank: int) -> T:
    """What ``make()`` gives on rank 0, on all ranks.

    Raises:
        DataNotFound: It failed there.
    """
    made: list[Any] = [None, None]
    failure: Exception | None = None
    if rank == 0:
        try:
            made = [make(), None]
        except Exception as error:  # The others wait for word of it.
            failure, made = error, [None, f"{type(error).__name__}: {error}"]
    torch.distributed.broadcast_object_list(made, src=0)
    if failure is not None:
        raise failure
    if made[1] is not None:
        raise DataNotFound(f"rank 0 could not open the data set: {made[1]}")
    found: T = made[0]
    return found


#: As users write it: ``with rlio.torch.prefetch(reader, device="cuda") as batches``.
prefetch = Prefetch
