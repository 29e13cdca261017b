"""One stream of batches into several writers.

Example:
    >>> from rlio.batch import SampleBatch
    >>> from rlio.writers.noop_output import NoopOutput
    >>> one, other = NoopOutput(), NoopOutput()
    >>> with TeeWriter(one, other) as writer:
    ...     writer.write(SampleBatch(rewards=[1.0, 2.0]))
    >>> one.rows_received, other.rows_received
    (2, 2)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlio.errors import LedgerError, OptionError, excerpt
from rlio.interfaces import Batch, OutputWriter

if TYPE_CHECKING:
    from rlio.writers.recovery import WriterLog

__all__ = ["TeeLedger", "TeeWriter"]


@dataclass(frozen=True, kw_only=True)
class TeeLedger:
    """The rows that one writer of a `TeeWriter` was given.

    Attributes:
        writer: Its class.
        given: Rows of the batches that its `write()` has returned for.
        received: Rows that it says it has received since.
    """

    writer: str
    given: int
    received: int

    def check(self) -> None:
        """Raise where the two differ.

        Raises:
            LedgerError: They do.
        """
        if self.received != self.given:
            raise LedgerError(
                f"{self.writer} was given {self.given} rows and has received {self.received}: somebody else "
                "writes to it too, or it counts wrongly; compare what it stored with the other outputs"
            )


class TeeWriter(OutputWriter):
    """Gives every batch to each of ``writers``, which it owns: it closes them.

    A writer that fails does not keep the others from receiving. The first failure is then raised, with a
    note that says whose it was, and one for each further failure; `rows_received` counts batches that all
    of them took.

    Args:
        writers: At least one, none twice.

    Raises:
        OptionError: No writer, one given twice, or not a writer at all.
        LedgerError: At `close`, a writer has received other rows than it was given.
    """

    def __init__(self, *writers: OutputWriter) -> None:
        for writer in writers:
            if not isinstance(writer, OutputWriter):
                raise OptionError(
                    f"TeeWriter takes writers, not {excerpt(writer)}: open a path with ParquetWriter first"
                )
        if not writers or len({id(writer) for writer in writers}) < len(writers):
            raise OptionError(f"TeeWriter takes one writer or more, each once; it was given {len(writers)}")
        super().__init__()
        self.writers = writers
        # Rows that each of them took here, and those that it says it has received.
        self._taken = [0] * len(writers)
        self._before = [writer.rows_received for writer in writers]
        #: Rows survive only where every writer keeps them.
        self.durable = all(writer.durable for writer in writers)

    @property
    def ledger(self) -> tuple[TeeLedger, ...]:
        """What became of the rows, writer by writer: their own ledgers say what they did with them."""
        return tuple(
            TeeLedger(writer=type(writer).__name__, given=given, received=writer.rows_received - before)
            for writer, given, before in zip(self.writers, self._taken, self._before, strict=True)
        )

    @property
    def rows_published(self) -> int:
        """Rows that every reader of each output can see."""
        return self.rows_received - max(each.rows_received - each.rows_published for each in self.writers)

    @property
    def logs(self) -> tuple[WriterLog, ...]:
        """The write-ahead logs of all writers."""
        return tuple(log for writer in self.writers for log in getattr(writer, "logs", ()))

    def _write(self, batch: Batch) -> None:
        rows = batch.agent_steps()

        def write(number: int, writer: OutputWriter) -> None:
            writer.write(batch)
            self._taken[number] += rows

        self._each(write)

    def _flush(self) -> None:
        self._each(lambda _, writer: writer.flush())

    def _close(self) -> None:
        ledgers = self.ledger
        self._each(lambda _, writer: writer.close())
        for ledger in ledgers:
            ledger.check()

    def _each(self, call: Callable[[int, OutputWriter], None]) -> None:
        """Make ``call`` on every writer, then raise the first failure with notes on all of them."""
        first: Exception | None = None
        for number, writer in enumerate(self.writers):
            try:
                call(number, writer)
            except Exception as failure:
                place = f"writer {number} of {len(self.writers)}, {type(writer).__name__}"
                if first is None:
                    first = failure
                    first.add_note(f"raised by {place}")
                else:
                    first.add_note(f"{place}, failed too: {failure!r}")
        if first is not None:
            raise first
