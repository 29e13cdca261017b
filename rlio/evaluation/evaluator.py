"""`OffPolicyEvaluator` and `evaluate_offline`: how much a policy would earn, by what another one recorded.

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

import copy
import os
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np

from rlio.batch import Batch, MultiAgentBatch, SampleBatch
from rlio.batch.arrays import Column
from rlio.batch.columns import Columns
from rlio.batch.nested import map_structure
from rlio.dataset.dataset import Dataset
from rlio.errors import DataNotFound, OptionError
from rlio.evaluation.estimates import OffPolicyEstimate
from rlio.evaluation.estimation import Estimation
from rlio.evaluation.evidence import LOG_RATIOS
from rlio.evaluation.logged_rows import (
    LoggedRows,
    StepNumbers,
    read_log_probabilities,
    read_nested,
    read_rewards,
    rows_of,
)
from rlio.evaluation.target import LogProbabilities, Target, as_target
from rlio.policies.policy import Policy
from rlio.reader import InputReader
from rlio.readers.dataset_reader import DatasetReader
from rlio.readers.read_options import ReadOptions
from rlio.resolve import read

__all__ = ["Logged", "OffPolicyEvaluator", "evaluate_offline", "keeps_order"]

#: What rows may come from: a root, path or glob, whatever else `rlio.read` opens, a reader, or batches.
Logged: TypeAlias = "str | os.PathLike[str] | Dataset | InputReader | Batch | Iterable[Batch]"


class OffPolicyEvaluator:
    """Estimates what a policy would earn, from batches that come one by one.

    ``is``, ``pdis`` and ``wis`` keep five numbers of each whole episode, beside two a step of those that are
    not whole yet; ``wpdis`` and ``stepwise_wis`` (RLlib's ``WeightedImportanceSampling``) keep two numbers a
    step of all; ``dm``, ``dr`` and ``wdr`` keep all rows, since a model is fitted to them.

    Args:
        policy: The one to judge: a bound `Policy`, a function (obs, actions) -> logs of probabilities, or a
            `Target`, which says how to act epsilon-greedily and more.
        estimation: What is estimated, and how.
        policy_id: Whose rows count, where batches have those of several policies.

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
        self.target = as_target(policy)
        self._policy_id = policy_id
        self._rows: dict[Hashable, int] = {}
        self._steps: dict[Hashable, StepNumbers] = {}
        #: What the rows said so far: it can be sent elsewhere, and added to that of other evaluators.
        self.evidence = self.estimation.evidence()

    def renewed(self) -> OffPolicyEvaluator:
        """One like this that has seen nothing yet; the policy is the same object."""
        found = copy.copy(self)
        found.evidence, found._rows, found._steps = self.estimation.evidence(), {}, {}
        return found

    def add(self, batch: Batch, *, source: Hashable = None, in_order: bool = True) -> None:
        """Take the rows of ``batch``: of any episodes, or parts of them, in any order.

        Rows without ``t`` must come in the order in which they were recorded: their steps are counted, and
        the first row of an episode is taken for its first step.

        Args:
            batch: The rows.
            source: Where ``eps_id`` means an episode of its own, such as a writer's id: rows of two sources
                are never of one episode. Sources of one evaluator must be sortable.
            in_order: Whether all rows of an episode come here, one after the other; else they need ``t``.

        Raises:
            MissingColumn: A column is absent that is needed.
            SchemaError: A probability or reward cannot be, or a step came twice.
            OptionError: The policy cannot say how likely the actions are.
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
        """What is kept of rows until their episode is whole."""
        kept: dict[str, Column] = {Columns.REWARDS: read_rewards(rows)}
        obs, actions = read_nested(rows, Columns.OBS), read_nested(rows, Columns.ACTIONS)
        if self.estimation.weighs:
            densities = self.target.has_densities(actions)
            logp = read_log_probabilities(rows, densities=densities)
            kept[LOG_RATIOS] = self.target.log_probabilities(obs, actions) - logp
        else:
            kept[LOG_RATIOS] = np.zeros(len(rows))
        if self.estimation.fits:
            kept |= {Columns.OBS: obs, Columns.ACTIONS: actions}
            for name in (Columns.NEXT_OBS, Columns.NEXT_OBS_VALID, Columns.TERMINATEDS):
                if name in rows:
                    kept[name] = read_nested(rows, name)
            # Copies: who reads with out= overwrites what was added.
            kept = {name: map_structure(np.copy, column) for name, column in kept.items()}
        return kept

    def estimate(self) -> dict[str, OffPolicyEstimate]:
        """What the estimators say by the episodes that are whole so far, by name.

        Raises:
            SchemaError: An episode lacks steps or its end, and ``incomplete="raise"``; or none is whole.
            OptionError: All weights are 0, or a model cannot be fitted.
        """
        return self.estimation.of(self.evidence, self.target)


def evaluate_offline(
    data: Logged,
    policy: Policy | LogProbabilities | Target,
    *,
    gamma: float,
    policy_id: str | None = None,
    **options: Any,
) -> dict[str, OffPolicyEstimate]:
    """What a policy would earn, by rows that another one recorded.

    Args:
        data: A root, path or glob, or whatever else `rlio.read` opens: read once, in order. Or a reader that
            comes to an end, which is closed by nobody but its owner; or a batch, or batches.
        policy: The one to judge.
        gamma: What a reward a step later counts, 0 to 1.
        policy_id: Whose rows count, where batches have those of several policies.
        options: The other fields of `Estimation`; see there and `OffPolicyEvaluator.add` for what is raised.

    Returns:
        Name of the estimator -> what it says.
    """
    evaluator = OffPolicyEvaluator(policy, Estimation(gamma=gamma, **options), policy_id=policy_id)
    in_order = not isinstance(data, InputReader) or keeps_order(data)
    for source, batch in _sourced(data):
        evaluator.add(batch, source=source, in_order=in_order)
    return evaluator.estimate()


def keeps_order(reader: InputReader) -> bool:
    """Whether it is known that ``reader`` gives all rows that were recorded, in the order in which they were.

    Then rows need not say which step of their episode they are.
    """
    options = getattr(reader, "options", None)
    if not isinstance(options, ReadOptions):
        return False
    if isinstance(reader, DatasetReader) and len(reader) != len(reader.dataset):
        return False  # A filter, or units that overlap.
    return not options.shuffle and options.shard[1] == 1 and options.on_error == "raise"


def _sourced(data: Logged) -> Iterator[tuple[Hashable, Batch]]:
    """Batches, and the writers that they are of: only a data set of ours tells them apart."""
    if isinstance(data, str | os.PathLike):
        with read(os.fspath(data), epochs=1) as reader:
            if not isinstance(reader, DatasetReader):
                yield from _batches(reader)
                return
            data = reader.dataset
    if not isinstance(data, Dataset):
        yield from _batches(data)
        return
    data.check_complete()
    if not len(data):
        raise DataNotFound(data.why_empty(), uri=data.uri)
    for writer, rows in data.snapshot().items():
        with DatasetReader(data.part({writer: rows}), epochs=1) as reader:
            for batch in reader:
                yield writer, batch


def _batches(data: InputReader | Batch | Iterable[Batch]) -> Iterator[tuple[None, Batch]]:
    if isinstance(data, SampleBatch | MultiAgentBatch):
        yield None, data
        return
    options = getattr(data, "options", None)
    if isinstance(options, ReadOptions) and options.epochs is None:
        raise OptionError(f"{type(data).__name__} never ends: open it with epochs=1")
    for batch in data:
        yield None, batch
