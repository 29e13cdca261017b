"""A reader that records every batch it gives: a live run, a replay, a conversion.

Example:
    >>> from rlio.batch import SampleBatch
    >>> from rlio.reader import InputReader
    >>> from rlio.writers.noop_output import NoopOutput
    >>> class Ones(InputReader):
    ...     def _next(self):
    ...         return SampleBatch(rewards=[1.0, 1.0])
    >>> reader = RecordingInput(Ones(), NoopOutput())
    >>> len(reader.sample(3)), reader.writer.rows_received
    (3, 3)
"""

from __future__ import annotations

from collections.abc import Iterator

from rlio.batch import Batch, count_units
from rlio.errors import OptionError, excerpt
from rlio.reader import InputReader, InputReaderAround
from rlio.writer import OutputWriter
from rlio.writers.ended_episodes import EpisodeComesAgain
from rlio.writers.storable_rows import write_storable

__all__ = ["RecordingInput"]


class RecordingInput(InputReaderAround):
    """Gives the batches of ``child`` and writes each to ``writer`` before serving it.

    Exactly the served rows are written, for any sizes, unless some of a batch have no stored form, such as an
    info with a set: then `sample` raises, the other rows are written, and none of them is served.

    The state is the child's: a reader that is restored to an earlier state serves rows again, and writes them
    again.

    A writer of a data set refuses the rows of an episode that has ended, because its ``eps_id`` would name
    two episodes. Therefore record one epoch of a replay with one writer (``epochs=1``), or leave ``eps_id``
    out (``columns=[...]``, `rlio.MappedInput`) if nobody reads the rows by episode.

    Several threads may call it: see `rlio.InputReader`.

    Args:
        child: The reader; closed with this one.
        writer: The writer; closed with this one, after the child.

    Raises:
        OptionError: ``child`` is not a reader, or ``writer`` is not a writer.
    """

    def __init__(self, child: InputReader, writer: OutputWriter) -> None:
        super().__init__(child)
        if not isinstance(writer, OutputWriter):
            raise OptionError(f"RecordingInput takes a writer, not {excerpt(writer)}: see ParquetWriter")
        self.writer = writer

    def _describe(self) -> Iterator[str]:
        yield from super()._describe()
        yield repr(self.writer)

    def _next(self) -> Batch:
        return self._recorded(self.child.sample())

    def _take(self, n: int) -> Batch:
        # The child cuts to size and keeps the left-over, so unserved rows are not written.
        return self._recorded(self.child.sample(n))

    def _recorded(self, batch: Batch) -> Batch:
        try:
            write_storable(self.writer, batch)
        except Exception as error:
            were = "are" if getattr(error, "__notes__", None) else "were not written and are"
            error.add_note(
                f"{count_units(batch, self.unit)} {self.unit} of {type(self.child).__name__} {were} not "
                "served"
            )
            if isinstance(error, EpisodeComesAgain):
                error.add_note(
                    "a replay is recorded once: read it with epochs=1, or each epoch with a writer of its own"
                )
            raise
        return batch

    def _close(self) -> None:
        try:
            super()._close()
        finally:
            self.writer.close()
