"""Applies functions to every batch of a reader: clipping, normalising, postprocessing, filtering.

Example:
    >>> from rlio.batch import SampleBatch
    >>> from rlio.reader import InputReader
    >>> class Ones(InputReader):
    ...     def _next(self):
    ...         return SampleBatch(rewards=[1.0, 1.0])
    >>> def double(batch):
    ...     batch["rewards"] = 2 * batch["rewards"]
    ...     return batch
    >>> MappedInput(Ones(), double).sample(3)["rewards"].tolist()
    [2.0, 2.0, 2.0]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlio.batch import Batch, MultiAgentBatch, SampleBatch
from rlio.errors import OptionError, excerpt
from rlio.reader import Endless, InputReader, InputReaderAround

__all__ = ["MappedInput"]


class MappedInput(InputReaderAround):
    """Gives the batches of ``child`` after ``functions``, applied in order.

    Functions always get the child's own batches whole, for any requested size. A function that
    combines rows (returns of an episode, for example) therefore gives the same rows for any size. Functions
    may add, change and drop columns and rows, and may change the given batch in place. For a resumable reader
    they must be pure: the same batch in, the same batch out.

    Several threads may call it: see `rlio.InputReader`. Functions are called by one thread at a time.

    Args:
        child: The reader; closed with this one.
        functions: Each takes a batch and returns a batch.

    Raises:
        OptionError: ``child`` is not a reader, or a function cannot be called.
    """

    def __init__(self, child: InputReader, *functions: Callable[[Batch], Batch]) -> None:
        super().__init__(child)
        for function in functions:
            if not callable(function):
                raise OptionError(f"MappedInput takes functions of a batch, not {excerpt(function)}")
        self.functions = functions

    def _describe(self) -> Iterator[str]:
        yield from super()._describe()
        yield ", ".join(map(_name, self.functions))

    def _next(self) -> Batch:
        batch = self.child.sample()
        for function in self.functions:
            batch = function(batch)
            if not isinstance(batch, (SampleBatch, MultiAgentBatch)):
                raise OptionError(
                    f"{_name(function)} returned {excerpt(batch)}: a function of MappedInput must return a "
                    "batch"
                )
        return batch

    def _endless(self) -> Endless | None:
        found = self.child._endless()
        # Functions may add and drop rows.
        return None if found is None else found._replace(units=None)


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
