"""`OffPolicyEvaluator` and `evaluate_offline`: estimate a policy's return from another policy's record.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Discrete
    >>> from rlio.batch import SampleBatch
    >>> rng = np.random.default_rng(0)
    >>> actions = rng.integers(0, 2, 1000)
    >>> half = np.full(1000, 0.5)
    >>> logged = SampleBatch(obs=half, actions=actions, rewards=actions * 1.0, action_prob=half)
    >>> def mostly_one(obs, actions):
    ...     return np.log(np.where(actions == 1, 0.9, 0.1))
    >>> found = evaluate_offline(logged, mostly_one, gamma=1.0, bandit=True)
    >>> round(found["wis"].v_target.value, 1), round(found["wis"].v_behavior.value, 1)
    (0.9, 0.5)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeAlias, Unpack

import numpy as np

from rlio.batch import Batch, MultiAgentBatch, SampleBatch
from rlio.batch.arrays import Column
from rlio.batch.columns import Columns
from rlio.batch.nested import map_structure
from rlio.batch.probabilities import read_log_probabilities
from rlio.dataset.dataset import Dataset
from rlio.dataset.file_dataset import FileDataset
from rlio.errors import DataNotFound, OptionError
from rlio.evaluation.estimates import OffPolicyEstimate
from rlio.evaluation.estimation import Estimation, EstimationKeywords
from rlio.evaluation.evidence import LOG_RATIOS, Evidence
from rlio.evaluation.logged_rows import (
    LoggedRows,
    StepNumbers,
    read_nested,
    read_rewards,
    rows_of,
)
from rlio.evaluation.target import LogProbabilities, Target, as_target
from rlio.policies.policy import Policy
from rlio.read_options import ReadOptions
from rlio.reader import InputReader
from rlio.readers.dataset_reader import DatasetReader
from rlio.resolve import read
from rlio.source.snapshot import DatasetSnapshot
from rlio.support.options import checked_keywords

__all__ = ["Logged", "OffPolicyEvaluator", "evaluate_offline", "keeps_order"]

#: Sources of rows: a root, path or glob, anything else that `rlio.read` opens, a reader, or batches.
Logged: TypeAlias = "str | os.PathLike[str] | Dataset | InputReader | Batch | Iterable[Batch]"


class OffPolicyEvaluator:
    """Estimates a policy's return from batches that arrive one at a time.

    ``is``, ``pdis`` and ``wis`` keep five numbers of each whole episode, and two per step of incomplete ones;
    ``wpdis`` and ``stepwise_wis`` (RLlib's ``WeightedImportanceSampling``) keep two numbers per step of all;
    ``dm``, ``dr`` and ``wdr`` keep all rows, because they fit a model to them.

    Args:
        policy: The policy to judge: a bound `Policy`, a function (obs, actions) -> log-probabilities, or a
            `Target`, for example with epsilon-greedy actions.
        estimation: The estimators and their options.
        policy_id: Recorded policy whose rows to use, if batches have several.

    Raises:
        OptionError: The policy cannot be judged.
    """

    def __init__(
        self,
        policy: Policy | LogProbabilities | Target,
        estimation: Estimation,
        *,
        policy_id: str | None = None,
    ) -> None:
        self.estimation = estimation
        self.target: Target = as_target(policy)
        self._policy_id = policy_id
        self._rows: dict[Hashable, int] = {}
        self._steps: dict[Hashable, StepNumbers] = {}
        #: Evidence of the rows so far: it can be sent elsewhere, and added to that of other evaluators.
        self.evidence: Evidence = self.estimation.evidence()

    def renewed(self) -> OffPolicyEvaluator:
        """Return an evaluator like this one without rows; it shares the policy object."""
        return OffPolicyEvaluator(self.target, self.estimation, policy_id=self._policy_id)

    def add(self, batch: Batch, *, source: Hashable = None, in_order: bool = True) -> None:
        """Add the rows of ``batch``: any episodes, or parts of them, in any order.

        Rows without ``t`` must arrive in the order in which they were recorded: their steps are counted, and
        the first row of an episode counts as its first step.

        Args:
            batch: The rows.
            source: Scope of ``eps_id``, such as a writer's id: rows of two sources never belong to one
                episode. Sources of one evaluator must be sortable.
            in_order: Whether this evaluator receives all rows of an episode, in order; otherwise they need
                ``t``.

        Raises:
            MissingColumn: A required column is absent.
            SchemaError: A probability or reward is impossible, or a step came twice.
            OptionError: The policy cannot compute the likelihood of the actions.
        """
        rows = rows_of(batch, self._policy_id)
        if not len(rows):
            return
        first = self._rows.get(source, 0)
        self._rows[source] = first + len(rows)
        columns = self._columns(rows)
        if self.estimation.bandit:
            judged = LoggedRows.single_steps(columns, range(first, first + len(rows)))
        else:
            steps = self._steps.setdefault(source, StepNumbers()) if in_order else None
            judged = LoggedRows.of(rows, columns, steps)
        self.evidence.add(judged, source=source)

    def _columns(self, rows: SampleBatch) -> dict[str, Column]:
        """Return the columns that are kept until the episode is whole."""
        kept: dict[str, Column] = {Columns.REWARDS: read_rewards(rows)}
        obs, actions = read_nested(rows, Columns.OBS), read_nested(rows, Columns.ACTIONS)
        if self.estimation.weighs:
            # First, because it refuses rows of other spaces: what the log says of those means nothing.
            judged = self.target.log_probabilities(obs, actions)
            logged = read_log_probabilities(rows, densities=self.target.has_densities(actions))
            kept[LOG_RATIOS] = judged - logged
        else:
            kept[LOG_RATIOS] = np.zeros(len(rows))
        if self.estimation.fits:
            kept |= {Columns.OBS: obs, Columns.ACTIONS: actions}
            for name in (Columns.NEXT_OBS, Columns.NEXT_OBS_VALID, Columns.TERMINATEDS):
                if name in rows:
                    kept[name] = read_nested(rows, name)
            # Copied, because a reader with out= overwrites its batches.
            kept = {name: map_structure(np.copy, column) for name, column in kept.items()}
        return kept

    def estimate(self) -> dict[str, OffPolicyEstimate]:
        """Return the estimates from the whole episodes so far, by name.

        Raises:
            SchemaError: An episode lacks steps or its end, and ``incomplete="raise"``; or none is whole.
            OptionError: All weights are 0, or a model cannot be fitted.
        """
        return self.estimation.of(self.evidence, self.target)


@checked_keywords
def evaluate_offline(
    data: Logged,
    policy: Policy | LogProbabilities | Target,
    *,
    gamma: float,
    policy_id: str | None = None,
    progress: Callable[[int], object] | None = None,
    **options: Unpack[EstimationKeywords],
) -> dict[str, OffPolicyEstimate]:
    """Estimate a policy's return from rows that another policy recorded.

    Args:
        data: A root, path or glob, or anything else that `rlio.read` opens, read once, in order; or a reader
            that ends, which stays open; or a batch, or batches.
        policy: The policy to judge.
        gamma: Discount per step, 0 to 1.
        policy_id: Recorded policy whose rows to use, if batches have several.
        progress: Called with the number of rows of each batch that was read.
        options: ``estimators``, ``bandit``, ``incomplete``, ``q_model``, ``folds`` and ``intervals``: see
            `Estimation`; see there and `OffPolicyEvaluator.add` for the errors.

    Returns:
        Name of the estimator -> its estimate.
    """
    evaluator = OffPolicyEvaluator(policy, Estimation(gamma=gamma, **options), policy_id=policy_id)
    in_order = not isinstance(data, InputReader) or keeps_order(data)
    for source, batch in _sourced(data):
        evaluator.add(batch, source=source, in_order=in_order)
        if progress is not None:
            progress(sum(rows.count for rows in batch.policies().values()))
    return evaluator.estimate()


def keeps_order(reader: InputReader) -> bool:
    """Whether ``reader`` is known to return all recorded rows in the order in which they were recorded.

    If so, rows do not need the step of their episode.
    """
    options = getattr(reader, "options", None)
    if not isinstance(options, ReadOptions):
        return False
    if isinstance(reader, DatasetReader) and len(reader) != len(reader.dataset):
        return False  # A filter, or units that overlap.
    return not options.shuffle and options.shard[1] == 1 and options.on_error == "raise"


def _sourced(data: Logged) -> Iterator[tuple[Hashable, Batch]]:
    """Yield batches and their writers; only an rlio data set distinguishes writers."""
    dataset: DatasetSnapshot
    if isinstance(data, str | os.PathLike):
        with read(os.fspath(data), epochs=1) as reader:
            if not isinstance(reader, DatasetReader):
                yield from _batches(reader)
                return
            assert isinstance(reader.dataset, DatasetSnapshot)  # Of one path.
            dataset = reader.dataset
    elif isinstance(data, FileDataset):
        with read(data, epochs=1) as reader:
            yield from _batches(reader)
        return
    elif isinstance(data, Dataset):
        dataset = data
    else:
        yield from _batches(data)
        return
    dataset.check_complete()
    if not len(dataset):
        raise DataNotFound(dataset.why_empty(), uri=dataset.uri)
    for writer, rows in dataset.snapshot().items():
        with DatasetReader(dataset.part({writer: rows}), epochs=1) as reader:
            for batch in reader:
                yield writer, batch


def _batches(data: InputReader | Batch | Iterable[Batch]) -> Iterator[tuple[None, Batch]]:
    if isinstance(data, SampleBatch | MultiAgentBatch):
        yield None, data
        return
    if isinstance(data, InputReader) and data._endless() is not None:
        raise OptionError(f"{type(data).__name__} never ends: open it with epochs=1")
    for batch in data:
        yield None, batch
