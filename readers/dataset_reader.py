"""`DatasetReader`: replays a data set written by rlio, in recorded order or shuffled, exactly resumable.

Row groups are decoded one ahead, in a background thread. Shuffled, the order is a permutation of windows of
row groups and of the rows within each (`rlio.replay.order.WindowOrder`).

Example:
    >>> import numpy as np, rlio
    >>> with rlio.ParquetWriter("memory://dataset-reader-example") as writer:
    ...     writer.write(rlio.SampleBatch(obs=np.arange(10.0), t=np.arange(10)))
    >>> reader = rlio.DatasetReader("memory://dataset-reader-example", batch_size=4, epochs=1)
    >>> [len(batch) for batch in reader]
    [4, 4, 2]
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Unpack

from rlio.batch import concat_samples
from rlio.dataset import Dataset, common_columns, open_dataset
from rlio.errors import CorruptData, EndOfData, OptionError, StateError
from rlio.interfaces import Batch, InputReader, JsonState, ReadKeywords, ReadOptions, Unit
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.readers.group_source import GroupOptions, WindowedOrder, open_groups
from rlio.replay.order import ORDER_VERSION
from rlio.schemas.filling import Filling
from rlio.schemas.schema import canonical_json

__all__ = ["DatasetReader"]

logger = logging.getLogger("rlio")

#: Rows of a batch where the user asks for none in particular, if no row group is smaller: large enough that
#: calls cost nothing (2 us of overhead over 4096 rows), small enough that a batch stays in the cache.
OWN_SIZE = 4096


@dataclass(frozen=True)
class _Span:
    """Units [start, stop) of one epoch."""

    epoch: int
    start: int
    stop: int


class DatasetReader(InputReader):
    """Reads the data set under ``root``; see `ReadOptions` for the keywords that all readers share.

    Rows come as they were written: column order, dtypes and shapes. With ``seq_lens`` in the data, ``n`` and
    ``batch_size`` count sequences; where several agents were recorded, joint steps. Without ``batch_size`` a
    batch has 4,096 rows, or those of a row group where rows are wide. The rows of a batch are the caller's:
    writable, and shared with no other batch.

    All ranks of a ``shard=(rank, world)`` walk the same order, and rank r takes slice r of every
    ``world * batch_size`` positions, so that states are equal on all ranks after equal calls.

    Args:
        root: Folder of the data set: a path or any fsspec URL.
        cache: "none" decodes shards as they are read. "auto" chooses; it chooses "none".
        missing: What to do with columns that only some writers have: "error", "drop" them, or "fill"
            them with zeros.
        storage_options: For fsspec.
        limits: What the data may ask for: memory, names, depth.

    Raises:
        DataNotFound: There is no data set, or it is empty.
        CorruptData: Rows are damaged or missing; with ``on_error="skip"`` they are counted in `skipped`.
    """

    replayable = True

    def __init__(
        self,
        root: str | os.PathLike[str] | Dataset,
        *,
        cache: Literal["auto", "none"] = "auto",
        missing: Literal["error", "drop", "fill"] = "error",
        storage_options: Mapping[str, Any] | None = None,
        limits: Limits = DEFAULT_LIMITS,
        **keywords: Unpack[ReadKeywords],
    ) -> None:
        if cache not in ("auto", "none"):
            raise OptionError(f"cache={cache!r}: 'auto' or 'none'")
        self.options = ReadOptions.of(keywords, reader="DatasetReader")
        self.drop_last = self.options.drop_last
        self.dataset = (
            root
            if isinstance(root, Dataset)
            else open_dataset(root, storage_options=storage_options, limits=limits)
        )
        self.seed = self._seed()
        self._missing = missing
        self._source = open_groups(self.dataset, self._group_options(missing), seed=self.seed)
        self.unit: Unit = self._source.unit
        group_rows = [schema.group_rows for schema in self.dataset.schemas.values()]
        self._batch_size = self.options.batch_size or min([OWN_SIZE, *group_rows])
        self._epoch = 0
        #: Units of this epoch that all ranks together have been dealt.
        self._offset = 0

    @property
    def skipped(self) -> int:
        """Rows lost to damage so far, with ``on_error="skip"``."""
        return self._source.skipped

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next batch begins in, from 0."""
        return self._epoch

    def __len__(self) -> int:
        """Units of one epoch, of all ranks together."""
        return self._source.total

    # ---- hooks of InputReader ----

    def _next(self) -> Batch:
        return self._take(self._batch_size)

    def _take(self, n: int) -> Batch:
        if self._source.total == 0:
            raise EndOfData("the data set has no rows")
        before = self._epoch, self._offset
        try:
            parts = self._gather_parts(n)
            return parts[0] if len(parts) == 1 else concat_samples(parts)
        except EndOfData:  # Of a rank that has no part in the last step; for the others it is served.
            raise
        except BaseException:
            # What was read and not served is read again: the error comes back until its cause is gone.
            self._epoch, self._offset = before
            self._source.rewind()
            raise

    def _gather_parts(self, n: int) -> list[Batch]:
        """Batches of ``n`` units in all; at least one."""
        parts: list[Batch] = []
        found, began = 0, self._epoch
        while found < n:
            for span in self._deal(n - found):
                for batch, units in self._source.units(span.epoch, span.start, span.stop):
                    parts.append(batch)
                    found += units
            # Only damage leaves a batch short of what was dealt. One reader alone can go on to fill it up;
            # several must stay in step with each other.
            if parts and (self.options.shard[1] > 1 or self._is_over()):
                break
            if not parts and self._epoch > began + 1:
                raise CorruptData("every row of an epoch is damaged", uri=self.dataset.uri)
        if self.drop_last and found < n and self._is_over():
            raise EndOfData(f"the last {found} {self.unit} are fewer than {n}, and drop_last drops them")
        return parts

    def _deal(self, n: int) -> list[_Span]:
        """This rank's part of the next ``world * n`` units, and step over them.

        Raises:
            EndOfData: The last epoch is over (or its rest is dropped).
        """
        rank, world = self.options.shard
        total, epochs = self._source.total, self.options.epochs
        covered = world * n
        if epochs is not None:
            left = (epochs - self._epoch) * total - self._offset
            if left <= 0 or (self.drop_last and left < covered):
                raise EndOfData(f"all {epochs} epochs of {total} {self.unit} have been read")
            covered = min(covered, left)
        first = self._offset + covered * rank // world
        last = self._offset + covered * (rank + 1) // world
        spans = list(_epochs_of(self._epoch, first, last, total))
        crossed, self._offset = divmod(self._offset + covered, total)
        self._epoch += crossed
        return spans

    def _is_over(self) -> bool:
        """Whether nothing is left."""
        return self.options.epochs is not None and self._epoch >= self.options.epochs

    def _position(self) -> JsonState:
        return {"epoch": self._epoch, "position": self._offset, "seed": self.seed, **self._fingerprint()}

    def _seek(self, position: JsonState) -> None:
        for key, value in self._fingerprint().items():
            if key == "options":
                self._check_options(position.get(key), value)
            elif position.get(key) != value:
                raise StateError(
                    f"state['position'][{key!r}] is {position.get(key)!r} but this reader has {value!r}: "
                    "open the same data with the same options",
                    uri=self.dataset.uri,
                )
        if position["seed"] != self.seed and self.options.seed is not None:
            raise StateError(
                f"state['position']['seed'] is {position['seed']}; this reader has {self.options.seed}"
            )
        if position["seed"] != self.seed:  # Drawn from the OS by both: the saved one counts.
            self.seed = position["seed"]
            if isinstance(self._source, WindowedOrder):
                self._source.reseed(position["seed"])
        epoch, offset = int(position["epoch"]), int(position["position"])
        last = self.options.epochs
        if not 0 <= offset < max(self._source.total, 1) or epoch < 0 or (last is not None and epoch > last):
            raise StateError(
                f"state['position'] is unit {offset} of epoch {epoch}; an epoch has {self._source.total} and "
                f"there are {'endless' if last is None else last} epochs"
            )
        self._epoch, self._offset = epoch, offset
        self._source.rewind()

    def _check_options(self, saved: Any, ours: dict[str, Any]) -> None:
        saved = saved if isinstance(saved, dict) else {}
        unlike = [name for name, value in ours.items() if saved.get(name) != value]
        if unlike:
            raise StateError(
                f"the state was saved with another value of the options {', '.join(unlike)}: open the data "
                "with the options of that time",
                uri=self.dataset.uri,
            )

    def _fingerprint(self) -> dict[str, Any]:
        """What must be the same for a position to mean the same rows."""
        columns = self.options.columns
        options = {
            "shuffle": self.options.shuffle,
            # A digest: there may be thousands.
            "columns": None if columns is None else _digest(list(columns)),
            "epochs": self.options.epochs,
            "on_error": self.options.on_error,
            "missing": self._missing,
        }
        order = ("windows", ORDER_VERSION) if self.options.shuffle else ("recorded", 0)
        return {
            "order": list(order),
            "snapshot": self.dataset.digest,
            "layout": self._source.layout,
            "options": options,
        }

    def _group_options(self, missing: Literal["error", "drop", "fill"]) -> GroupOptions:
        """What to read of each group, by the rule for columns that some writers lack."""
        columns = self.options.columns
        shared = common_columns(self.dataset, missing=missing, wanted=columns)
        chosen = columns if missing == "fill" else shared
        schemas = self.dataset.schemas.values()
        filling = Filling(schemas, columns=chosen)
        return GroupOptions(
            columns=chosen,
            skip_damage=self.options.on_error == "skip",
            filling=filling if missing == "fill" or filling.adds_validity else None,
        )

    def _seed(self) -> int | None:
        """The seed of the order; None if recorded. One from the OS is logged and kept in the state."""
        if not self.options.shuffle:
            return None
        if self.options.seed is not None:
            return self.options.seed
        drawn = secrets.randbits(63)
        logger.info("shuffling %s with seed %d", self.dataset.uri, drawn)
        return drawn

    def _close(self) -> None:
        self._source.close()


def _digest(value: Any) -> str:
    return hashlib.blake2b(canonical_json(value).encode(), digest_size=8).hexdigest()


def _epochs_of(epoch: int, first: int, last: int, total: int) -> Iterator[_Span]:
    """Cut positions counted from the beginning of ``epoch`` where epochs meet."""
    while first < last:
        crossed, start = divmod(first, total)
        stop = min(start + last - first, total)
        yield _Span(epoch + crossed, start, stop)
        first += stop - start
