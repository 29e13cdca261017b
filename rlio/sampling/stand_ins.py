"""Readers that stand in for a worker's sampler, or run one beside what is read.

Example:
    >>> from rlio.batch import SampleBatch
    >>> from rlio.reader import InputReader
    >>> class Counts(InputReader):
    ...     number = 0
    ...     def _next(self):
    ...         self.number += 1
    ...         return SampleBatch(t=[self.number])
    >>> reader = FirstBatchForever(Counts())
    >>> [reader.sample()["t"].item() for _ in range(3)]
    [1, 1, 1]
"""

from __future__ import annotations

from typing import Protocol

from rlio.batch import Batch
from rlio.errors import OptionError
from rlio.reader import InputReader, InputReaderAround, JsonState

__all__ = ["FirstBatchForever", "NoInput", "Simulated", "SimulatedRunner"]


class FirstBatchForever(InputReaderAround):
    """Gives copies of the first batch of ``child``: to time what learns from it without what samples it.

    Args:
        child: The reader; closed with this one.
    """

    def __init__(self, child: InputReader) -> None:
        super().__init__(child)
        self.replayable = False
        self._first: Batch | None = None

    def _next(self) -> Batch:
        if self._first is None:
            self._first = self.child.sample()
        return self._first.copy()

    def _seek(self, position: JsonState) -> None:
        super()._seek(position)
        self._first = None


class NoInput(InputReader):
    """Gives nothing: of a worker that only learns, or hands out weights."""

    replayable = False

    def _next(self) -> Batch:
        raise OptionError(
            "this worker has input=None, and so nothing to sample: learn on the batches of other workers, "
            "or make it with an environment or an input"
        )


class SimulatedRunner(Protocol):
    """What `Simulated` needs of a runner."""

    def run(self) -> Batch:
        """Sample a batch."""

    def state_dict(self) -> JsonState:
        """Seeds and counters."""

    def load_state_dict(self, state: JsonState) -> None:
        """Continue counting."""


class Simulated(InputReaderAround):
    """Gives what ``child`` gives, and lets ``runner`` sample a fragment with each batch, for its metrics.

    So a policy that learns from logged experience is watched in an environment. What the runner samples is
    served to nobody.

    Args:
        child: The reader; closed with this one.
        runner: Samples; not closed here.
    """

    def __init__(self, child: InputReader, runner: SimulatedRunner) -> None:
        super().__init__(child)
        self.runner = runner

    def _next(self) -> Batch:
        self.runner.run()
        return self.child.sample()

    def _take(self, n: int) -> Batch:
        # The child cuts to size and keeps what is left over: its rows, and nothing else, are the state.
        self.runner.run()
        return self.child.sample(n)

    def _position(self) -> JsonState:
        return {**super()._position(), "runner": self.runner.state_dict()}

    def _seek(self, position: JsonState) -> None:
        super()._seek(position)
        self.runner.load_state_dict(position["runner"])
