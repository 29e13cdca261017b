"""Writes one stream of batches to several writers.

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

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from rlio.batch import Batch
from rlio.errors import OptionError, excerpt
from rlio.support.calls import call_each
from rlio.support.words import counted
from rlio.writer import OutputWriter

if TYPE_CHECKING:
    from rlio.writers.recovery import WriterLog

__all__ = ["TeeWriter"]


class TeeWriter(OutputWriter):
    """Gives every batch to each of ``writers``. It owns the writers and closes them.

    If a writer fails, the others still receive the batch. Then the first failure is raised, with a note that
    names its writer, and a note for each further failure. `rows_received` counts batches that all writers
    took.

    Several threads may call it: see `rlio.OutputWriter`.

    Args:
        writers: At least one, and each only once.

    Raises:
        OptionError: No writers are given, one is given twice, or one is not a writer.
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
        #: Rows survive only if every writer keeps them.
        self.durable: bool = all(writer.durable for writer in writers)

    def _describe(self) -> Iterator[str]:
        yield f"{counted(self.rows_received, 'row')} received"
        yield from map(repr, self.writers)

    @property
    def rows_published(self) -> int:
        """Rows that every reader of every output can see."""
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
        """Make ``call`` on every writer, then raise the first failure with notes on all failures."""
        call_each(
            (f"writer {number} of {len(self.writers)}, {type(writer).__name__}", partial(call, writer))
            for number, writer in enumerate(self.writers)
        )
