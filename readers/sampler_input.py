"""`SamplerInput`: live experience as a reader like any other.

Example:
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> from rlio.sampling.env_runner import EnvRunner
    >>> with SamplerInput(EnvRunner("CartPole-v1", RandomPolicy(), seed=0)) as reader:
    ...     len(reader.sample()), len(reader.sample(33))
    (200, 33)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rlio.batch import Batch, MultiAgentBatch, concat_samples
from rlio.errors import OptionError, excerpt
from rlio.reader import InputReader, JsonState

if TYPE_CHECKING:
    from rlio.batch.episode import Episode

__all__ = ["Chunk", "Runner", "SamplerInput"]


@runtime_checkable
class _ColumnarRunner(Protocol):
    """A runner that gives batches without the way through episodes, and saves its counters: one of ours."""

    def run(self) -> Batch: ...

    def state_dict(self) -> JsonState: ...

    def load_state_dict(self, state: JsonState) -> None: ...


class Chunk(Protocol):
    """What several agents did in an episode, or in a part of it: a `MultiAgentEpisode`."""

    def to_batch(self) -> MultiAgentBatch:
        """The rows."""


@runtime_checkable
class Runner(Protocol):
    """What steps environments: an EnvRunner, a MultiAgentEnvRunner. `SamplerInput` makes a reader of it."""

    def sample(
        self, *, num_timesteps: int | None = None, num_episodes: int | None = None
    ) -> Sequence[Episode] | Sequence[Chunk]:
        """Step the environments and return the episodes, or chunks of episodes, that it took."""

    def stop(self) -> None:
        """Close the environments."""


class SamplerInput(InputReader):
    """Gives what ``runner`` samples; endless.

    It is not `replayable`, as environments cannot be saved: the state holds the runner's seeds and counters.
    A reader that loads it goes on at the start of new episodes; rows that were sampled but not served by
    then are dropped and counted in `dropped`.

    With a recurrent policy, whose batches have ``seq_lens``, ``sample(n)`` counts sequences, as readers of
    stored ones do: none is cut. Those of several agents are counted in steps; where a policy of theirs is
    recurrent, take whole batches, ``sample()``.

    Args:
        runner: An `EnvRunner`, a `MultiAgentEnvRunner`, or any other `Runner` (whose state is its own
            affair); closed with this reader.

    Raises:
        OptionError: ``runner`` is none.
    """

    replayable = False

    def __init__(self, runner: Runner) -> None:
        if not isinstance(runner, Runner):
            raise OptionError(f"SamplerInput takes a runner, not {excerpt(runner)}: see rlio.EnvRunner")
        self.runner = runner
        self._columnar = runner if isinstance(runner, _ColumnarRunner) else None
        self.unit = getattr(runner, "unit", self.unit)

    def _next(self) -> Batch:
        if self._columnar is not None:
            return self._columnar.run()
        return concat_samples([episode.to_batch() for episode in self.runner.sample()])

    def _position(self) -> JsonState:
        return {"runner": None if self._columnar is None else self._columnar.state_dict()}

    def _seek(self, position: JsonState) -> None:
        state = position["runner"]
        if self._columnar is not None and state is not None:
            self._columnar.load_state_dict(state)

    def interrupt(self) -> None:
        """Interrupt the runner, if it is one that waits for others; see `InputReader`."""
        if hasattr(self.runner, "interrupt"):
            self.runner.interrupt()

    def _close(self) -> None:
        self.runner.stop()
