"""`DatasetSink`: a data set as a Ray Data datasink. Only `write_dataset` imports it, because it needs Ray."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from ray.data import Datasink

from rlio.catalog.names import part_id
from rlio.distributed.ray_data.blocks import Assembler
from rlio.distributed.ray_data.part_writer import PartOptions, PartWriter, Sealed
from rlio.distributed.ray_data.row_digest import RowDigest
from rlio.errors import OptionError, SchemaError
from rlio.opening import dataset_on
from rlio.readers.dataset_reader import DatasetReader
from rlio.schemas.arrow_tables import Layout
from rlio.storage.filesystem import Storage

__all__ = ["DatasetSink", "Done"]

logger: logging.Logger = logging.getLogger("rlio")


class Done(NamedTuple):
    """A task's report of its part.

    Attributes:
        part: Its id.
        sealed: The sealed attempt.
        written: Whether this task wrote the sealed attempt.
        left_out: Columns without a value in any of its rows.
        names: The other columns.
    """

    part: str
    sealed: Sealed
    written: bool
    left_out: tuple[str, ...]
    names: tuple[str, ...]


class DatasetSink(Datasink[Any]):
    """Writes each task's rows as an attempt at a part of a job.

    The part is the task's index, which Ray keeps when it reruns a task; each run is a new attempt.

    Args:
        storage: The root.
        job: Name of the job.
        options: Options for writing parts.
        like: Layout of columns whose blocks lack metadata.
        before: Parts that an earlier run of the job sealed: their rows are compared.
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
        #: Reports of all tasks after the job, in the driver.
        self.done: list[Done] = []

    def get_name(self) -> str:
        """Return the name for Ray's messages."""
        return "Rlio"

    def write(self, blocks: Iterable[Any], ctx: Any) -> Done:
        """Write the rows of a task, unless its part is already sealed. Runs in the task."""
        part = part_id(self._job, ctx.task_idx)
        writer = PartWriter(self._storage, part, self._options)
        if writer.taken is not None:
            # If sealed in this run, then by a task with the same rows that was killed before it could report.
            assembler = self._compare(writer.taken, blocks, known=part in self._before)
            logger.info("%s is already sealed: nothing is written", writer.taken.writer)
            return _done(part, writer.taken, assembler, written=False)
        assembler = Assembler(self._like)
        try:
            for batch in assembler.batches(blocks):
                writer.write(batch)
        except BaseException:
            writer.abandon()
            raise
        sealed = writer.finish()
        return _done(part, sealed, assembler, written=sealed.writer == writer.writer_id)

    def _compare(self, taken: Sealed, blocks: Iterable[Any], *, known: bool) -> Assembler:
        """Raise if a part that an earlier run sealed (``known``) has other rows than these."""
        new, old, assembler = RowDigest(), RowDigest(), Assembler(self._like)
        for batch in assembler.batches(blocks):
            if known:
                new.add(batch)
        if not known:
            return assembler
        dataset = dataset_on(self._storage, at={str(taken.writer): taken.rows})
        with DatasetReader(dataset, epochs=1) as reader:
            for batch in reader:
                old.add(batch)
        if unlike := old.unlike(new):
            raise OptionError(
                f"job={self._job!r}: {taken.writer}, which an earlier run sealed, has {taken.rows} rows that "
                f"differ from the new ones in {', '.join(unlike)}: run a job again with "
                "the same rows in the same order, or use another job name",
                uri=self._storage.uri,
            )
        return assembler

    def on_write_complete(self, write_result: Any) -> None:
        """Take the reports of the tasks. Runs in the driver."""
        self.done = sorted(write_result.write_returns)
        self._tell_of_left_out()
        extra = self._before - {done.part for done in self.done}
        if extra:
            raise OptionError(
                f"job={self._job!r}: an earlier run sealed {len(extra)} parts that this one does not have, "
                f"{min(extra)} first: run it again with the same rows in the same order, or use another name",
                uri=self._storage.uri,
            )

    @property
    def left_out(self) -> tuple[str, ...]:
        """Columns without a value in any row of the job."""
        return tuple(dict.fromkeys(name for done in self.done for name in done.left_out))

    def _tell_of_left_out(self) -> None:
        """Warn of columns without a value in any row; raise if only some parts have values.

        Raises:
            SchemaError: Only some parts have values. The parts are already stored, as when another task
                fails.
        """
        for name in self.left_out:
            without = [done.part for done in self.done if name in done.left_out]
            others = [done.part for done in self.done if name in done.names]
            if others:
                raise SchemaError(
                    f"all rows of {len(others)} parts ({others[0]} first) have a value, but no row of "
                    f"{len(without)} parts ({without[0]} first) has one: expected values in all rows or in "
                    "none; fill them, or leave the column out",
                    uri=self._storage.uri,
                    column=name,
                )
        if self.left_out:
            logger.warning(
                "%s: %s have no value in any row, and are not written",
                self._storage.uri,
                ", ".join(self.left_out),
            )


def _done(part: str, sealed: Sealed, assembler: Assembler, *, written: bool) -> Done:
    left_out, names = tuple(sorted(assembler.left_out)), tuple(sorted(assembler.names))
    return Done(part, sealed, written, left_out, names)
