"""A writer that keeps no rows: the meaning of ``output=None``.

Example:
    >>> from rlio.batch import SampleBatch
    >>> writer = NoopOutput()
    >>> writer.write(SampleBatch(rewards=[1.0, 2.0]))
    >>> writer.rows_received
    2
"""

from __future__ import annotations

from rlio.batch import Batch
from rlio.writer import OutputWriter

__all__ = ["NoopOutput"]


class NoopOutput(OutputWriter):
    """Takes every batch, counts its rows and drops it.

    Several threads may call it: see `rlio.OutputWriter`.
    """

    def _write(self, batch: Batch) -> None:
        """Keep nothing."""
