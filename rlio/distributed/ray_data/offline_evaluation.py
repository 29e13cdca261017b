"""`evaluate_offline`: off-policy evaluation with the data read, and the policy asked, in Ray's tasks.

Example, where Ray runs::

    found = rlio.distributed.evaluate_offline("s3://bucket/cartpole", policy, gamma=0.99)
    print(found["wpdis"])
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rlio.batch import SampleBatch
from rlio.dataset.dataset import Dataset, open_dataset
from rlio.dataset.part_reader import Rows, split
from rlio.distributed.ray_import import require_ray
from rlio.errors import DataNotFound, OptionError
from rlio.evaluation.estimates import OffPolicyEstimate
from rlio.evaluation.estimation import Estimation
from rlio.evaluation.evaluator import OffPolicyEvaluator
from rlio.evaluation.evidence import Evidence
from rlio.evaluation.target import LogProbabilities, Target
from rlio.policies.policy import Policy
from rlio.readers.dataset_reader import DatasetReader

if TYPE_CHECKING:
    import ray.data

__all__ = ["evaluate_offline"]


def evaluate_offline(
    data: str | os.PathLike[str] | Dataset | ray.data.Dataset,
    policy: Policy | LogProbabilities | Target,
    *,
    gamma: float,
    policy_id: str | None = None,
    tasks: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, OffPolicyEstimate]:
    """What `rlio.evaluation.evaluate_offline` says, worked out on a Ray cluster.

    Tasks read rows and ask the policy about them. Of each whole episode they send a few numbers to this
    process, with ``wpdis`` and ``stepwise_wis`` two numbers a step, with models all rows that those are
    fitted to, here; and of episodes that another task has the rest of, those rows: rows need ``t``, as tasks
    have no order among them. Here episodes are put in the order of their ids
    and summed up, so that results are those of one process: to the last bit, if the policy's probability of
    an action does not depend on the rows that it is asked about together (of networks, the last bits do).

    Args:
        data: The root of a data set of ours, read in ranges of rows; or a Dataset of Ray Data with the
            columns of one policy, read block by block.
        policy: The one to judge; it is sent to the tasks.
        gamma: What a reward a step later counts, 0 to 1.
        policy_id: Whose rows count, where those of several policies were recorded.
        tasks: In how many parts a data set is read; None: as in `rlio.distributed.read_dataset`.
        storage_options: For fsspec.
        options: The other fields of `rlio.evaluation.Estimation`; see there, also for what is raised.

    Returns:
        Name of the estimator -> what it says.

    Raises:
        MissingExtra: Ray is not installed.
        DataNotFound: There is no data set, or it is empty.
        OptionError: ``tasks`` is below 1, or given for a Dataset of Ray Data.
    """
    require_ray()
    evaluator = OffPolicyEvaluator(policy, Estimation(gamma=gamma, **options), policy_id=policy_id)
    if isinstance(data, str | os.PathLike):
        data = open_dataset(data, storage_options=storage_options)
    elif storage_options is not None:
        raise OptionError("storage_options are for a root: what is open has its own")
    if isinstance(data, Dataset):
        found = _by_parts(evaluator, data, tasks)
    elif tasks is None:
        found = _by_blocks(evaluator, data)
    else:
        raise OptionError(f"tasks={tasks}: a Dataset of Ray Data is read by its blocks; see repartition()")
    for evidence in found:
        evaluator.evidence.absorb(evidence)
    return evaluator.estimate()


# ---- data sets of ours ----


def _by_parts(evaluator: OffPolicyEvaluator, dataset: Dataset, tasks: int | None) -> Iterator[Evidence]:
    """What each part of the data set says, in any order."""
    ray = require_ray()
    if tasks is not None and tasks < 1:
        raise OptionError(f"tasks={tasks}: parts of the data set, at least 1")
    dataset.check_complete()
    if not len(dataset):
        raise DataNotFound(dataset.why_empty(), uri=dataset.uri)
    judge = ray.remote(_judge_part)
    shared = ray.put(evaluator), ray.put(dataset)
    waiting = [judge.remote(*shared, part) for part in split(dataset, tasks=tasks)]
    while waiting:
        done, waiting = ray.wait(waiting)
        yield from ray.get(done)


def _judge_part(evaluator: OffPolicyEvaluator, dataset: Dataset, part: list[Rows]) -> Evidence:
    """In a task: what the rows of ``part`` say."""
    evaluator = evaluator.renewed()
    for rows in part:
        # Rows that are episodes by themselves are numbered from the first of the range on.
        source = (rows.writer, rows.first) if evaluator.estimation.bandit else rows.writer
        with DatasetReader(dataset.part({rows.writer: [rows.first, rows.stop]}), epochs=1) as reader:
            for batch in reader:
                evaluator.add(batch, source=source, in_order=False)
    return evaluator.evidence


# ---- datasets of Ray Data ----


def _by_blocks(evaluator: OffPolicyEvaluator, dataset: Any) -> Iterator[Evidence]:
    """What each block says, in their order."""
    judged = dataset.map_batches(
        partial(_judge_block, evaluator), batch_size=None, batch_format="numpy", zero_copy_batch=True
    )
    judged.context.execution_options.preserve_order = True
    for number, row in enumerate(judged.iter_rows()):
        evidence: Evidence = row["evidence"]
        if evaluator.estimation.bandit:
            evidence.rename_source(number)
        yield evidence


def _judge_block(evaluator: OffPolicyEvaluator, block: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """In a task: what the rows of ``block`` say, as the only row of a block."""
    evaluator = evaluator.renewed()
    evaluator.add(SampleBatch(block), in_order=False)
    found = np.empty(1, object)
    found[0] = evaluator.evidence
    return {"evidence": found}
