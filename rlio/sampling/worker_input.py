"""`WorkerInput`: puts together what a worker samples and reads, before anybody asks for it.

Some readers here stand in for a worker's sampler, or run one beside what is read.

Example:
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> from rlio.sampling.env_runner import EnvRunner
    >>> policy = RandomPolicy()
    >>> runner = EnvRunner("CartPole-v1", policy, seed=0)
    >>> parts = WorkerInput(runner, config=RolloutConfig(), policies={"default_policy": policy})
    >>> with parts.open("sampler", IOContext(default_sampler_input=parts.sampler)) as reader:
    ...     len(reader.sample())
    200
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

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from rlio.batch import Batch
from rlio.errors import OptionError, excerpt
from rlio.policies.policy import Policy
from rlio.reader import InputReader, InputReaderAround, JsonState
from rlio.readers.async_input import AsyncInput
from rlio.readers.mapped_input import MappedInput
from rlio.readers.recording_input import RecordingInput
from rlio.readers.sampler_input import SamplerInput
from rlio.readers.shuffled_input import ShuffledInput
from rlio.resolve import IOContext, resolve_input
from rlio.sampling.config import RolloutConfig
from rlio.sampling.offline import PostprocessInputs, offline_functions
from rlio.sampling.runners import AnyRunner
from rlio.writer import OutputWriter

if TYPE_CHECKING:
    from rlio.sampling.logged_evaluation import LoggedEvaluation

__all__ = ["FirstBatchForever", "NoInput", "Simulated", "SimulatedRunner", "WorkerInput"]


class WorkerInput:
    """Makes one reader.

    Args:
        runner: What the sampler samples; None: there is none.
        config: How what is sampled and read is treated.
        policies: For actions and trajectories that are read.
        hear: Called with each batch that is sampled or read; None: nobody listens.

    Attributes:
        writer: Where live rows go, set before `open`; None: nowhere.
        ahead: The sampler that runs ahead, if it does.
        evaluation: What judges the policies by what is read; None: nothing does.
    """

    def __init__(
        self,
        runner: AnyRunner | None,
        *,
        config: RolloutConfig,
        policies: Mapping[str, Policy],
        hear: Callable[[Batch], None] | None = None,
    ) -> None:
        self.writer: OutputWriter | None = None
        self.ahead: AsyncInput | None = None
        self._runner = runner
        self._config = config
        self._policies = policies
        self._hear = hear
        self.evaluation: LoggedEvaluation | None = None
        if config.logged_estimators:
            from rlio.sampling.logged_evaluation import LoggedEvaluation

            self.evaluation = LoggedEvaluation(config, policies)
        self._has_sampler = False

    def sampler(self) -> InputReader:
        """The input ``"sampler"``: what it gives is recorded before it can be mixed with anything.

        Raises:
            OptionError: It was asked for before.
        """
        assert self._runner is not None
        if self._has_sampler:
            raise OptionError(
                "the input has the worker's sampler twice: it is one stream; add up its weights"
            )
        self._has_sampler = True
        sampler: InputReader = SamplerInput(self._runner)
        if self._config.sample_async:
            sampler = self.ahead = AsyncInput(sampler)
        if self._hear is not None:
            sampler = MappedInput(sampler, self._heard)
        if self.writer is not None:
            sampler = RecordingInput(sampler, self.writer)
        return FirstBatchForever(sampler) if self._config.fake_sampler else sampler

    def _heard(self, batch: Batch) -> Batch:
        assert self._hear is not None
        self._hear(batch)
        return batch

    def _wrapped(self, reader: InputReader) -> InputReader:
        """A reader of what was recorded, as the worker wants it."""
        functions = offline_functions(self._config, self._policies)
        if self.evaluation is not None:
            try:
                judge = self.evaluation.judge_of(reader)
            except OptionError:
                reader.close()
                raise
            # Before trajectories are postprocessed, which may add, drop and change rows.
            later = [number for number, f in enumerate(functions) if isinstance(f, PostprocessInputs)]
            functions.insert(min(later, default=len(functions)), judge)
        if self._hear is not None:
            functions.append(self._heard)
        return MappedInput(reader, *functions) if functions else reader

    def open(self, source: Any, context: IOContext) -> InputReader:
        """Open what a user gave as an input; None gives nothing.

        Raises:
            OptionError: It stands for no reader, or contradicts the config.
            DataNotFound: Nothing is stored where it says.
        """
        reader = NoInput() if source is None else resolve_input(source, context, wrap=self._wrapped)
        try:
            self._check(source)
        except OptionError:
            reader.close()
            raise
        if self._config.simulates:
            assert self._runner is not None
            reader = Simulated(reader, self._runner)
        size = self._config.shuffle_buffer_size
        return ShuffledInput(reader, size, seed=context.seed) if size else reader

    def _check(self, source: Any) -> None:
        """Refuse options that the input ``source``, which was opened, leaves without effect."""
        if self.writer is not None and not self._has_sampler:
            raise OptionError(
                "the output would stay empty: record='live' writes rows of the sampler, and the input "
                f"{excerpt(source)} has none; leave output out, or set record='all'"
            )
        for name in ("fake_sampler", "sample_async"):
            if getattr(self._config, name) and not self._has_sampler:
                raise OptionError(f"{name}=True, but the input {excerpt(source)} has no sampler")
        if self._config.simulates and (self._has_sampler or self._runner is None):
            raise OptionError(
                "input_evaluation='simulation' samples beside what is read from files: it needs an "
                "environment, and an input without the sampler"
            )
        if self.evaluation is not None and not self.evaluation.sources:
            raise OptionError(
                f"input_evaluation={self._config.input_evaluation} judges policies by what is read, but the "
                f"input {excerpt(source)} has the sampler alone"
            )


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
    in no batch.

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
