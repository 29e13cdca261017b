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
from typing import TYPE_CHECKING

from rlio.batch import Batch
from rlio.errors import OptionError, excerpt
from rlio.writer import OutputWriter

if TYPE_CHECKING:
    from rlio.log.recovery import WriterLog

__all__ = ["TeeWriter"]


class TeeWriter(OutputWriter):
    """Gives every batch to each of ``writers``, which it owns: it closes them.

    A writer that fails does not keep the others from receiving. The first failure is then raised, with a
    note that says whose it was, and one for each further failure; `rows_received` counts batches that all
    of them took.

    Args:
        writers: At least one, none twice.

    Raises:
        OptionError: No writer, one given twice, or not a writer at all.
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
        #: Rows survive only where every writer keeps them.
        self.durable = all(writer.durable for writer in writers)

    @property
    def rows_published(self) -> int:
        """Rows that every reader of each output can see."""
        return self.rows_received - max(each.rows_received - each.rows_published for each in self.writers)

    @property
    def seconds_waited(self) -> float:
        """Seconds that `write` has waited in all writers."""
        return sum(writer.seconds_waited for writer in self.writers)

    @property
    def logs(self) -> tuple[WriterLog, ...]:
        """The write-ahead logs of all writers."""
        return tuple(log for writer in self.writers for log in getattr(writer, "logs", ()))

    def _write(self, batch: Batch) -> None:
        self._each(lambda writer: writer.write(batch))

    def _flush(self) -> None:
        self._each(lambda writer: writer.flush())

    def _close(self) -> None:
        self._each(lambda writer: writer.close())

    def _each(self, call: Callable[[OutputWriter], None]) -> None:
        """Make ``call`` on every writer, then raise the first failure with notes on all of them."""
        first: Exception | None = None
        for number, writer in enumerate(self.writers):
            try:
                call(writer)
            except Exception as failure:
                place = f"writer {number} of {len(self.writers)}, {type(writer).__name__}"
                if first is None:
                    first = failure
                    first.add_note(f"raised by {place}")
                else:
                    first.add_note(f"{place}, failed too: {failure!r}")
        if first is not None:
            raise first
