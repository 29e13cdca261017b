"""`DatasetSink`: a data set as a datasink of Ray Data. Only `rlio.distributed.data_sink` imports it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from ray.data import Datasink

from rlio.dataset import dataset_on
from rlio.distributed.blocks import Assembler
from rlio.distributed.part_writer import PartOptions, PartWriter, Sealed
from rlio.distributed.row_digest import RowDigest
from rlio.errors import OptionError
from rlio.readers.dataset_reader import DatasetReader
from rlio.replay.arrow_tables import Layout
from rlio.storage.filesystem import Storage
from rlio.storage.names import part_id

__all__ = ["DatasetSink", "Done"]

logger = logging.getLogger("rlio")


class Done(NamedTuple):
    """What a task says of its part.

    Attributes:
        part: Its id.
        sealed: The attempt that is sealed.
        written: Whether this task's attempt is it.
    """

    part: str
    sealed: Sealed
    written: bool


class DatasetSink(Datasink[Any]):
    """Writes each task's rows as an attempt at a part of a job.

    The part is the task's index, which Ray keeps when it runs a task again; the attempt is a new one each
    time.

    Args:
        storage: The root.
        job: Name of the job.
        options: How parts are written.
        like: What is known of columns whose blocks do not say it.
        before: Parts that an earlier run of the job has sealed: their rows are compared.
    """

    def __init__(
        self,
        storage: Storage,
        job: str,
        options: PartOptions,
        *,
        like: Layout | None,
        before: Collection[str],
    ) -> None:
        self._storage = storage
        self._job = job
        self._options = options
        self._like = like
        self._before = frozenset(before)
        #: Of all tasks, once the job is done; in the driver.
        self.done: list[Done] = []

    def get_name(self) -> str:
        """For Ray's messages."""
        return "Rlio"

    def write(self, blocks: Iterable[Any], ctx: Any) -> Done:
        """Write the rows of a task, unless its part is sealed already. In the task."""
        part = part_id(self._job, ctx.task_idx)
        writer = PartWriter(self._storage, part, self._options)
        if writer.taken is not None:
            # If in this run: by a task that was killed before it could say so. It had the same rows.
            if part in self._before:
                self._compare(writer.taken, blocks)
            logger.info("%s is sealed already: nothing is written", writer.taken.writer)
            return Done(part, writer.taken, written=False)
        try:
            for batch in Assembler(self._like).batches(blocks):
                writer.write(batch)
        except BaseException:
            writer.abandon()
            raise
        sealed = writer.finish()
        return Done(part, sealed, written=sealed.writer == writer.writer_id)

    def _compare(self, taken: Sealed, blocks: Iterable[Any]) -> None:
        """Raise where the part that an earlier run sealed has other rows than these."""
        new, old = RowDigest(), RowDigest()
        for batch in Assembler(self._like).batches(blocks):
            new.add(batch)
        dataset = dataset_on(self._storage, at={str(taken.writer): taken.rows})
        with DatasetReader(dataset, epochs=1) as reader:
            for batch in reader:
                old.add(batch)
        if unlike := old.unlike(new):
            raise OptionError(
                f"job={self._job!r}: {taken.writer}, which an earlier run sealed, has {taken.rows} rows that "
                f"differ from those that were to be written, in {', '.join(unlike)}: run a job again with "
                "the same rows in the same order, or name another job",
                uri=self._storage.uri,
            )

    def on_write_complete(self, write_result: Any) -> None:
        """Take what the tasks say. In the driver."""
        self.done = sorted(write_result.write_returns)
        extra = self._before - {done.part for done in self.done}
        if extra:
            raise OptionError(
                f"job={self._job!r}: an earlier run sealed {len(extra)} parts that this one does not have, "
                f"{min(extra)} first: run it again with the same rows in the same order, or name another job",
                uri=self._storage.uri,
            )
