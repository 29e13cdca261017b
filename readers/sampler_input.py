"""`SamplerInput`: live experience as a reader.

Example:
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> from rlio.sampling.env_runner import EnvRunner
    >>> with SamplerInput(EnvRunner("CartPole-v1", RandomPolicy(), seed=0)) as reader:
    ...     len(reader.sample()), len(reader.sample(33))
    (200, 33)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rlio.batch import Batch, MultiAgentBatch, concat_samples
from rlio.errors import OptionError, StateError, excerpt
from rlio.reader import InputReader, JsonState, Unit

if TYPE_CHECKING:
    from rlio.batch.episode import Episode

__all__ = ["Chunk", "Runner", "SamplerInput"]


@runtime_checkable
class _ColumnarRunner(Protocol):
    """A runner of rlio: it gives batches without building episodes, and saves its counters."""

    def run(self) -> Batch: ...

    def state_dict(self) -> JsonState: ...

    def load_state_dict(self, state: JsonState) -> None: ...


class Chunk(Protocol):
    """The steps of several agents in an episode, or in a part of it: a `MultiAgentEpisode`."""

    def to_batch(self) -> MultiAgentBatch:
        """The rows."""


@runtime_checkable
class Runner(Protocol):
    """Steps environments: an EnvRunner, a MultiAgentEnvRunner. `SamplerInput` makes a reader of a runner."""

    def sample(
        self, *, num_timesteps: int | None = None, num_episodes: int | None = None
    ) -> Sequence[Episode] | Sequence[Chunk]:
        """Step the environments; return the episodes, or chunks of episodes, from these steps."""

    def stop(self) -> None:
        """Close the environments."""


class SamplerInput(InputReader):
    """Gives batches that ``runner`` samples; endless.

    It is not `replayable`, because environments cannot be saved: the state holds the runner's seeds and
    counters. A reader that loads the state continues at the start of new episodes. Rows that were sampled but
    not served by then are dropped and counted in `dropped`.

    With a recurrent policy, whose batches have ``seq_lens``, ``sample(n)`` counts sequences, like readers of
    stored sequences: it cuts none. Batches of several agents are counted in steps; if one of their policies
    is recurrent, take whole batches with ``sample()``.

    Several threads may call it: see `rlio.InputReader`.

    Args:
        runner: An `EnvRunner`, a `MultiAgentEnvRunner`, or any other `Runner` (this reader does not save the
            state of another one); closed with this reader.

    Raises:
        OptionError: ``runner`` is not a runner.
    """

    replayable = False

    def __init__(self, runner: Runner) -> None:
        if not isinstance(runner, Runner):
            raise OptionError(f"SamplerInput takes a runner, not {excerpt(runner)}: see rlio.EnvRunner")
        self.runner = runner
        self._columnar = runner if isinstance(runner, _ColumnarRunner) else None
        self.unit: Unit = getattr(runner, "unit", self.unit)

    def _describe(self) -> Iterator[str]:
        yield repr(self.runner)

    def _next(self) -> Batch:
        if self._columnar is not None:
            return self._columnar.run()
        return concat_samples([episode.to_batch() for episode in self.runner.sample()])

    def _position(self) -> JsonState:
        return {"runner": None if self._columnar is None else self._columnar.state_dict()}

    def _seek(self, position: JsonState) -> None:
        state = position["runner"]
        if (state is None) != (self._columnar is None):
            raise StateError(
                f"state['position']['runner'] is {excerpt(state)}, and this reader's runner "
                f"{'has no state' if self._columnar is None else 'needs one'}: load it into a reader of the "
                "same kind of runner"
            )
        if self._columnar is not None:
            self._columnar.load_state_dict(state)

    def interrupt(self) -> None:
        """Interrupt the runner; see `InputReader`."""
        if hasattr(self.runner, "interrupt"):
            self.runner.interrupt()

    def _close(self) -> None:
        self.runner.stop()
