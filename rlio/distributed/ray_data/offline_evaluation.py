"""`evaluate_offline`: off-policy evaluation that reads data and runs the policy in Ray tasks.

Example, with Ray running::

    found = rlio.distributed.evaluate_offline("s3://bucket/cartpole", policy, gamma=0.99)
    print(found["wpdis"])
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from rlio.batch import SampleBatch
from rlio.dataset.dataset import Dataset
from rlio.dataset.file_dataset import FileDataset
from rlio.dataset.opening import open_dataset
from rlio.dataset.part_reader import Rows, split
from rlio.dataset.portions import Portion
from rlio.distributed.ray_data.file_parts import Files, cut_files, whole_batches
from rlio.distributed.ray_import import require_ray
from rlio.errors import DataNotFound, OptionError
from rlio.evaluation.estimates import OffPolicyEstimate
from rlio.evaluation.estimation import Estimation, EstimationKeywords
from rlio.evaluation.evaluator import OffPolicyEvaluator
from rlio.evaluation.evidence import Evidence
from rlio.evaluation.target import LogProbabilities, Target
from rlio.policies.policy import Policy
from rlio.readers.dataset_reader import DatasetReader
from rlio.support.options import checked_keywords

if TYPE_CHECKING:
    pass

__all__ = ["evaluate_offline"]


@checked_keywords
def evaluate_offline(
    data: Any,
    policy: Policy | LogProbabilities | Target,
    *,
    gamma: float,
    policy_id: str | None = None,
    tasks: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Unpack[EstimationKeywords],
) -> dict[str, OffPolicyEstimate]:
    """Run `rlio.evaluation.evaluate_offline` on a Ray cluster.

    Tasks read rows and run the policy on them. For each whole episode they send a few numbers to this
    process; with ``wpdis`` and ``stepwise_wis`` two numbers a step; with models all rows, because models are
    fitted here. They also send the rows of episodes whose other rows another task has. Rows need ``t``,
    because tasks have no order. This process sorts episodes by id and sums them, so results equal those of
    one process: to the last bit, if the policy's probability of an action does not depend on which rows are
    evaluated together (for networks, the last bits do).

    Args:
        data: The root of a data set, or an open one, read in ranges of rows: also other libraries' files, as
            `rlio.open_dataset` takes them; or a Ray Data Dataset with the columns of one policy, read block
            by block.
        policy: The policy to evaluate; it is sent to the tasks.
        gamma: Discount per step, 0 to 1.
        policy_id: Recorded policy whose rows to use, if there are several.
        tasks: Number of parts in which to read a data set; None: as in `rlio.distributed.read_dataset`.
        storage_options: For fsspec.
        options: ``estimators``, ``bandit``, ``incomplete``, ``q_model``, ``folds`` and ``intervals``: see
            `rlio.evaluation.Estimation`, also for the errors.

    Returns:
        Name of the estimator -> its estimate.

    Raises:
        MissingExtra: Ray is not installed.
        DataNotFound: The data set does not exist, or is empty.
        OptionError: ``tasks`` is below 1, or given for a Ray Data Dataset.
    """
    require_ray()
    import ray.data

    evaluator = OffPolicyEvaluator(policy, Estimation(gamma=gamma, **options), policy_id=policy_id)
    if not isinstance(data, Dataset | ray.data.Dataset):
        data = open_dataset(data, storage_options=storage_options)
    elif storage_options is not None:
        raise OptionError("storage_options need a root, but data is already open: omit storage_options")
    if isinstance(data, Dataset):
        found = _by_parts(evaluator, data, tasks)
    elif tasks is None:
        found = _by_blocks(evaluator, data)
    else:
        raise OptionError(f"tasks={tasks}: a Ray Data Dataset is read by blocks: use repartition()")
    for evidence in found:
        evaluator.evidence.absorb(evidence)
    return evaluator.estimate()


# ---- rlio data sets ----


def _by_parts(evaluator: OffPolicyEvaluator, dataset: Dataset, tasks: int | None) -> Iterator[Evidence]:
    """Evaluate each part of the data set; the order may vary."""
    ray = require_ray()
    dataset.check_complete()
    if not len(dataset):
        raise DataNotFound(dataset.why_empty(), uri=dataset.uri)
    shared = ray.put(evaluator)
    if isinstance(dataset, FileDataset):
        files, cut = cut_files(dataset, tasks=tasks)
        judge = ray.remote(_judge_files)
        firsts = accumulate((sum(one.rows for one in part) for part in cut), initial=0)
        waiting = [judge.remote(shared, files, part, first) for part, first in zip(cut, firsts, strict=False)]
    else:
        judge, opened = ray.remote(_judge_part), ray.put(dataset)
        waiting = [judge.remote(shared, opened, part) for part in split(dataset, tasks=tasks)]
    while waiting:
        done, waiting = ray.wait(waiting)
        yield from ray.get(done)


def _judge_part(evaluator: OffPolicyEvaluator, dataset: Dataset, part: list[Rows]) -> Evidence:
    """Return the evidence of the rows of ``part``; runs in a task."""
    evaluator = evaluator.renewed()
    for rows in part:
        # One-step episodes are numbered from the first row of the range.
        source = (rows.writer, rows.first) if evaluator.estimation.bandit else rows.writer
        with DatasetReader(dataset.part({rows.writer: [rows.first, rows.stop]}), epochs=1) as reader:
            for batch in reader:
                evaluator.add(batch, source=source, in_order=False)
    return evaluator.evidence


def _judge_files(
    evaluator: OffPolicyEvaluator, files: Files, part: Sequence[Portion], first: int
) -> Evidence:
    """`_judge_part` of other libraries' files; ``first``: the number of rows before the part."""
    evaluator = evaluator.renewed()
    with files.opened() as source:
        for batch in whole_batches(source, part):
            evaluator.add(batch, source=first if evaluator.estimation.bandit else None, in_order=False)
    return evaluator.evidence


# ---- Ray Data Datasets ----


def _by_blocks(evaluator: OffPolicyEvaluator, dataset: Any) -> Iterator[Evidence]:
    """Evaluate each block, in order."""
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
    """Return the evidence of the rows of ``block`` as a block with one row; runs in a task."""
    evaluator = evaluator.renewed()
    evaluator.add(SampleBatch(block), in_order=False)
    found = np.empty(1, object)
    found[0] = evaluator.evidence
    return {"evidence": found}
