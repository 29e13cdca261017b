"""`RolloutWorker`: a policy, the environments it acts in, what it reads and what it writes, as one reader.

Example:
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> output = "memory://worker-example"
    >>> with RolloutWorker("CartPole-v1", RandomPolicy(), output=output, seed=0) as worker:
    ...     rows = sum(len(worker.sample()) for _ in range(3))
    >>> rows, worker.writer.rows_received
    (600, 600)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

from numpy.typing import NDArray

from rlio.columns import DEFAULT_POLICY_ID
from rlio.envs.making import EnvLike
from rlio.errors import OptionError, excerpt
from rlio.interfaces import Batch, InputReader, IOContext, JsonState
from rlio.policies.policy import Policy, Stats, Weights
from rlio.readers.mapped_input import MappedInput
from rlio.readers.recording_input import RecordingInput
from rlio.readers.sampler_input import SamplerInput
from rlio.readers.shuffled_input import ShuffledInput
from rlio.resolve import resolve_input, resolve_output
from rlio.rollout.config import RolloutConfig
from rlio.rollout.env_runner import EnvRunner
from rlio.rollout.offline import offline_functions, refuse_same_root

__all__ = ["RolloutWorker"]


class RolloutWorker(InputReader):
    """Gives batches of live experience, logged experience or both, and writes down what it samples.

    It puts together what works alone: an `EnvRunner` and its `SamplerInput`, readers, a writer, a policy.
    What it reads from files is adapted first, as ``rollout`` says (`offline_functions`), and shuffled by
    batches if ``rollout.shuffle_buffer_size`` says so.

    Args:
        env: What `make_vector_env` takes. None for reading only: the policy must be bound to its spaces then.
        policy: Acts and learns; bound to the environment's spaces, if it was not before.
        input: What `resolve_input` takes. ``"sampler"`` is the worker's own; it may be part of a mixture.
        output: What `resolve_output` takes: where rows go. None keeps none.
        rollout: How to step the environments; None: the defaults.
        seed: Of the environments, the policy (if it is not yet bound) and the order of the input.
        worker_index: 0 for a local worker, 1 to ``num_workers`` for others, which share the files of an
            input.
        num_workers: Workers in all.
        log_dir: Folder of ``output="logdir"``.
        input_options: Keywords of the readers that ``input`` opens.
        output_options: Keywords of the writer that ``output`` opens.
        record: ``"live"``: only rows of the sampler are written; what is read from files is there already.
            A mixture takes whole fragments from it, which are written when they are sampled, even if rows of
            the last one are never served. ``"all"``: every batch that is served is written.

    The worker closes all of them, also those that were given as objects.

    Attributes:
        policy: The policy.
        runner: The EnvRunner; None without an environment.
        reader: Where batches come from.
        writer: Where rows go.

    Raises:
        OptionError: The environment cannot be made; its spaces do not fit the policy; a value stands for no
            reader or writer; or options contradict each other.
        DataNotFound: Nothing is stored where ``input`` says.
    """

    def __init__(
        self,
        env: EnvLike | None,
        policy: Policy,
        *,
        input: Any = "sampler",
        output: Any = None,
        rollout: RolloutConfig | None = None,
        seed: int | None = None,
        worker_index: int = 0,
        num_workers: int = 0,
        log_dir: str | os.PathLike[str] | None = None,
        input_options: Mapping[str, Any] | None = None,
        output_options: Mapping[str, Any] | None = None,
        record: Literal["live", "all"] = "live",
    ) -> None:
        if record not in ("live", "all"):
            raise OptionError(f"record={excerpt(record)}: 'live' or 'all'")
        if not isinstance(policy, Policy):
            raise OptionError(f"policy={excerpt(policy)}: expected a Policy, such as rlio.RandomPolicy()")
        self.policy = policy
        self.rollout = rollout if rollout is not None else RolloutConfig()
        self.runner: EnvRunner | None = None
        self._records_live = output is not None and record == "live"
        self._has_sampler = False
        # Whatever was opened is closed again where a later part fails.
        with ExitStack() as opened:
            if env is not None:
                self.runner = EnvRunner(
                    env, policy, config=self.rollout, seed=seed, worker_index=worker_index
                )
                opened.callback(self.runner.stop)
            context = IOContext(
                worker_index=worker_index,
                num_workers=num_workers,
                log_dir=None if log_dir is None else os.fspath(log_dir),
                seed=seed,
                spaces={DEFAULT_POLICY_ID: (policy.observation_space, policy.action_space)},
                made_by=self._made_by(),
                default_sampler_input=None if self.runner is None else self._sampler,
            )
            self.writer = resolve_output(output, replace(context, options=dict(output_options or {})))
            opened.callback(self.writer.close)
            self.reader = self._open(input, replace(context, options=dict(input_options or {})))
            opened.callback(self.reader.close)
            if record == "all" and output is not None:
                refuse_same_root(input, context.log_dir if output == "logdir" else output)
                self.reader = RecordingInput(self.reader, self.writer)
            opened.pop_all()
        self.replayable, self.unit = self.reader.replayable, self.reader.unit

    def _made_by(self) -> dict[str, Any]:
        """What a data set's provenance says of this worker."""
        if self.runner is None:
            return {"policy": type(self.policy).__name__}
        return {
            "env": self.runner.env_id,
            "policy": type(self.policy).__name__,
            "seed": self.runner.seeds["seed"],
        }

    def _sampler(self) -> InputReader:
        """The input ``"sampler"``: what it gives is recorded before it can be mixed with anything."""
        assert self.runner is not None
        if self._has_sampler:
            raise OptionError(
                "the input has the worker's sampler twice: it is one stream; add up its weights"
            )
        self._has_sampler = True
        sampler = SamplerInput(self.runner)
        return RecordingInput(sampler, self.writer) if self._records_live else sampler

    def _open(self, source: Any, context: IOContext) -> InputReader:
        functions = offline_functions(self.rollout, self.policy)
        wrap = (lambda reader: MappedInput(reader, *functions)) if functions else None
        reader = resolve_input(source, context, wrap=wrap)
        if self._records_live and not self._has_sampler:
            reader.close()
            raise OptionError(
                "the output would stay empty: record='live' writes rows of the sampler, and the input "
                f"{excerpt(source)} has none; leave output out, or set record='all'"
            )
        size = self.rollout.shuffle_buffer_size
        return ShuffledInput(reader, size, seed=context.seed) if size else reader

    # ---- sampling ----

    def _next(self) -> Batch:
        return self._served(self.reader.sample())

    def _take(self, n: int) -> Batch:
        # The reader cuts to size and keeps what is left over, so that exactly what is served is recorded.
        return self._served(self.reader.sample(n))

    def _served(self, batch: Batch) -> Batch:
        how = self.rollout.compress_observations
        return batch.compress(bulk=how == "bulk") if how else batch

    # ---- learning ----

    def learn_on_batch(self, batch: Batch) -> Stats:
        """Let the policy learn on ``batch``; see `Policy.learn_on_batch`."""
        return self.policy.learn_on_batch(batch)

    def get_weights(self) -> Weights:
        """Copies of the policy's weights, by name."""
        return self.policy.get_weights()

    def set_weights(self, weights: Mapping[str, NDArray[Any]], weights_seq_no: int | None = None) -> None:
        """Give the policy other weights.

        Args:
            weights: As `get_weights` gave them.
            weights_seq_no: Their version, recorded with every step from now on; if the policy has that
                version already, nothing is done. None: the version stays, and the weights are set in any
                case.
        """
        if weights_seq_no is not None and weights_seq_no == self.policy.weights_seq_no:
            return
        self.policy.set_weights(weights)
        if weights_seq_no is not None:
            self.policy.weights_seq_no = weights_seq_no

    # ---- state and end ----

    def _position(self) -> JsonState:
        return {"reader": self.reader.state_dict()}

    def _seek(self, position: JsonState) -> None:
        self.reader.load_state_dict(position["reader"])

    def _close(self) -> None:
        with ExitStack() as stack:
            # Last in, first out: the reader may still write, and the writer publishes what it was given.
            if self.runner is not None:
                stack.callback(self.runner.stop)
            stack.callback(self.writer.close)
            stack.callback(self.reader.close)

    def stop(self) -> None:
        """Same as `close`: the name that RLlib's users know."""
        self.close()
