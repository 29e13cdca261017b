"""`WorkerInput`: combines a worker's sampler and stored inputs into one reader.

Some readers here replace a worker's sampler, or run a sampler beside a stored input.

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
from typing import TYPE_CHECKING, Any

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

__all__ = ["FirstBatchForever", "NoInput", "Simulated", "WorkerInput"]


class WorkerInput:
    """Makes the reader of a worker from its sampler and its inputs.

    Args:
        runner: Runner that the sampler samples; None: no sampler.
        config: How to treat batches sampled and read.
        policies: Policies by id, to adapt actions and postprocess trajectories that are read.
        hear: Called with each batch sampled or read; None: no calls.

    Attributes:
        writer: Writer of live rows, set before `open`; None writes nothing.
        ahead: The sampler that runs ahead, if one does.
        evaluation: Judges the policies by the rows read; None: no evaluation.
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
        """Make the input ``"sampler"``, which records live rows before other inputs are mixed in.

        Raises:
            OptionError: The sampler was made before.
        """
        assert self._runner is not None
        if self._has_sampler:
            raise OptionError(
                "the input contains the worker's sampler twice: use it once, with the sum of the weights"
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
        """Wrap a reader of recorded data with the worker's functions."""
        functions = offline_functions(self._config, self._policies)
        if self.evaluation is not None:
            try:
                judge = self.evaluation.judge_of(reader)
            except OptionError:
                reader.close()
                raise
            # Judge before postprocessing, which may add, drop and change rows.
            later = [number for number, f in enumerate(functions) if isinstance(f, PostprocessInputs)]
            functions.insert(min(later, default=len(functions)), judge)
        if self._hear is not None:
            functions.append(self._heard)
        return MappedInput(reader, *functions) if functions else reader

    def open(self, source: Any, context: IOContext) -> InputReader:
        """Open a user's input argument; None opens an empty input.

        Raises:
            OptionError: The argument is not an input, or contradicts the config.
            DataNotFound: The location holds no data.
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
        """Refuse options that have no effect with the opened input ``source``."""
        if self.writer is not None and not self._has_sampler:
            raise OptionError(
                "the output would stay empty: record='live' writes rows of the sampler, but the input "
                f"{excerpt(source)} has none; leave output out, or set record='all'"
            )
        for name in ("fake_sampler", "sample_async"):
            if getattr(self._config, name) and not self._has_sampler:
                raise OptionError(f"{name}=True, but the input {excerpt(source)} has no sampler")
        if self._config.simulates and (self._has_sampler or self._runner is None):
            raise OptionError(
                "input_evaluation='simulation' samples beside an input from files: it needs an "
                "environment, and an input without the sampler"
            )
        if self.evaluation is not None and not self.evaluation.sources:
            raise OptionError(
                f"input_evaluation={self._config.input_evaluation} judges policies by rows read, but the "
                f"input {excerpt(source)} has only the sampler"
            )


class FirstBatchForever(InputReaderAround):
    """Repeats copies of the first batch of ``child``, to time learning without sampling.

    Args:
        child: The reader; closed together with this one.
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
    """The empty input of a worker that only learns or hands out weights."""

    replayable = False

    def _next(self) -> Batch:
        raise OptionError(
            "this worker has input=None and nothing to sample: learn on batches of other workers, or make "
            "the worker with an environment or an input"
        )


class Simulated(InputReaderAround):
    """Returns the batches of ``child``; with each, ``runner`` samples a fragment for its metrics.

    This evaluates, in an environment, a policy that learns from logged experience. The runner's samples are
    in no batch.

    Args:
        child: The reader; closed together with this one.
        runner: Samples the fragments; not closed here.
    """

    def __init__(self, child: InputReader, runner: AnyRunner) -> None:
        super().__init__(child)
        self.runner = runner

    def _next(self) -> Batch:
        self.runner.run()
        return self.child.sample()

    def _take(self, n: int) -> Batch:
        # The child cuts to size and keeps the remaining rows, so the state is only the child's rows.
        self.runner.run()
        return self.child.sample(n)

    def _position(self) -> JsonState:
        return {**super()._position(), "runner": self.runner.state_dict()}

    def _seek(self, position: JsonState) -> None:
        super()._seek(position)
        self.runner.load_state_dict(position["runner"])
