"""`WorkerSpec`: the arguments from which a group makes every worker, on any machine.

Example:
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> spec = WorkerSpec("CartPole-v1", RandomPolicy, {}, num_workers=2, seed=7)
    >>> with spec.make(WorkerId(1)) as first, spec.make(WorkerId(2)) as second:
    ...     seeds = [first.runner.seeds["seed"], second.runner.seeds["seed"]]
    >>> seeds == [spec.seed_of(WorkerId(1)), spec.seed_of(WorkerId(2))], len(set(seeds))
    (True, 2)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias, TypedDict

import numpy as np

from rlio.envs.external import ExternalEnv
from rlio.errors import OptionError, excerpt
from rlio.policies.policy import Policy
from rlio.reader import InputReader
from rlio.resolve import IOContext, registered_input, registered_output, resolve_output
from rlio.sampling.callbacks import CallbacksLike
from rlio.sampling.config import RolloutConfig
from rlio.sampling.offline import refuse_same_root
from rlio.sampling.policy_setup import PolicySetup
from rlio.sampling.runners import WorkerPlace
from rlio.storage.paths import is_uri
from rlio.worker import RolloutWorker
from rlio.writer import OutputWriter

__all__ = ["Acknowledge", "WorkerId", "WorkerKeywords", "WorkerSpec", "draw_seed", "portable"]

# Any in this module: arguments are what `RolloutWorker` takes.


#: When a group returns a row: after its writer accepted it, or after it is in the data set.
Acknowledge: TypeAlias = Literal["written", "published"]


class WorkerKeywords(TypedDict, total=False):
    """The keywords of `RolloutWorker` that a group accepts, with defaults; it sets the others itself."""

    input: Annotated[Any, "sampler"]
    output: Annotated[Any, None]
    rollout: Annotated[RolloutConfig | None, None]
    log_dir: Annotated[str | os.PathLike[str] | None, None]
    input_options: Annotated[Mapping[str, Any] | None, None]
    output_options: Annotated[Mapping[str, Any] | None, None]
    record: Annotated[Literal["live", "all"], "live"]
    callbacks: Annotated[CallbacksLike, None]
    policy_setup: Annotated[PolicySetup | None, None]


@dataclass(frozen=True)
class WorkerId:
    """Which worker of a group, and how many workers have held this index before.

    Attributes:
        worker_index: From 1 on.
        incarnation: How many workers have held the index before, in any process.
    """

    worker_index: int
    incarnation: int = 0


def draw_seed() -> int:
    """Draw a seed of 53 bits from the operating system: all JSON parsers keep such numbers exactly."""
    return _number(np.random.SeedSequence())


def _number(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(11))


@dataclass(frozen=True)
class WorkerSpec:
    """Arguments of `RolloutWorker`.

    Attributes:
        env: As for a worker.
        policy: As for a worker.
        keywords: Other arguments, from `portable`.
        num_workers: Workers in the group.
        seed: Seed of the group.
        acknowledge: See `WorkerGroup`.
        order_seed: Seed for the order of a stored input. It stays when `seed` changes, because replaced
            workers take over a share of the order in which the others read. None: `seed`.
    """

    env: Any
    policy: Any
    keywords: Mapping[str, Any]
    num_workers: int
    seed: int
    acknowledge: Acknowledge = "written"
    order_seed: int | None = None

    def __post_init__(self) -> None:
        if self.order_seed is None:
            object.__setattr__(self, "order_seed", self.seed)

    def seed_of(self, worker_id: WorkerId) -> int:
        """Return the seed of one worker: different for each index and incarnation."""
        key = (worker_id.worker_index, worker_id.incarnation)
        return _number(np.random.SeedSequence(self.seed, spawn_key=key))

    def make(self, worker_id: WorkerId) -> RolloutWorker:
        """Make the worker ``worker_id``."""
        keywords = dict(self.keywords)
        place = WorkerPlace(
            worker_id.worker_index,
            self.num_workers,
            recreated_worker=worker_id.incarnation > 0,
            log_dir=keywords.pop("log_dir", None),
            order_seed=self.order_seed,
        )
        if keywords.get("output") is not None:
            keywords["output"] = _Output(keywords["output"], self._about(worker_id))
        return RolloutWorker(
            self.env,
            self.policy,
            **keywords,
            seed=self.seed_of(worker_id),
            place=place,
        )

    def _about(self, worker_id: WorkerId) -> dict[str, Any]:
        """Return the group's part of the provenance: how to derive the worker's seed."""
        return {
            "seed": self.seed,
            "worker_index": worker_id.worker_index,
            "num_workers": self.num_workers,
            "incarnation": worker_id.incarnation,
        }


class _Output:
    """Opens the output with the group's part of the provenance."""

    def __init__(self, output: Any, about: Mapping[str, Any]) -> None:
        self._output, self._about = output, about

    def __call__(self, context: IOContext) -> OutputWriter:
        made_by = dict(context.made_by)
        made_by["extra"] = {**made_by.get("extra", {}), "worker_group": self._about}
        return resolve_output(self._output, replace(context, made_by=made_by))


def portable(env: Any, policy: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``keywords`` with the same meaning in every process.

    Local paths become absolute, and names registered in this process become what they stand for.

    Raises:
        OptionError: An object is open, and so cannot be in several processes.
    """
    _refuse_objects(env, policy)
    made = dict(keywords)
    if "input" in made:
        made["input"] = _portable_input(made["input"])
    if "output" in made:
        made["output"] = _portable_output(made["output"])
    if made.get("log_dir") is not None:
        made["log_dir"] = _absolute(made["log_dir"])
    if made.get("record") == "all" and made.get("output") is not None:
        # The workers' own check sees only a function.
        refuse_same_root(made.get("input"), made["output"])
    return made


def _refuse_objects(env: Any, policy: Any) -> None:
    from gymnasium import Env
    from gymnasium.vector import VectorEnv

    if isinstance(env, (Env, VectorEnv, ExternalEnv)):
        raise OptionError(
            f"env={excerpt(env)} is one environment, but each worker needs its own: pass its id, or a "
            "function that makes it"
        )
    given = policy if isinstance(policy, Mapping) else {"policy": policy}
    for name, value in given.items():
        if isinstance(value, Policy) and value.is_bound:
            raise OptionError(
                f"{name}={excerpt(value)} already acts, so all workers would draw its random numbers: pass a "
                "PolicySpec, a class, or a policy that is not bound to spaces yet, and pass the weights to "
                "set_weights()"
            )


def _portable_output(value: Any) -> Any:
    _refuse_open("output", value, OutputWriter)
    return _portable_place(value, "logdir", registered_output)


def _portable_input(value: Any) -> Any:
    _refuse_open("input", value, InputReader)
    if isinstance(value, Mapping):
        return [(_portable_input(source), weight) for source, weight in value.items()]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [
            (_portable_input(item[0]), item[1]) if isinstance(item, tuple) and len(item) == 2
            else _portable_input(item)
            for item in value
        ]  # fmt: skip
    return _portable_place(value, "sampler", registered_input)


def _refuse_open(name: str, value: Any, kind: type) -> None:
    if isinstance(value, kind):
        raise OptionError(
            f"{name}={excerpt(value)} is open in this process, but each worker needs its own: pass a path, "
            "or a function of IOContext"
        )


def _portable_place(value: Any, keyword: str, registered: Callable[[str], Any]) -> Any:
    """Return an absolute path, or what a name stands for; ``keyword`` and other values are unchanged."""
    if isinstance(value, str):
        return value if value == keyword else registered(value) or _absolute(value)
    return _absolute(value) if isinstance(value, os.PathLike) else value


def _absolute(value: str | os.PathLike[str]) -> str:
    """Return a path that does not depend on the current folder."""
    text = os.fspath(value)
    if isinstance(value, str) and is_uri(text):
        return text
    return os.path.abspath(os.path.expanduser(text))
