"""Many machines on Ray (extra ``rlio[ray]``): a group of worker actors, data sets in and out of Ray Data.

Nothing here is needed to share a data set: writers never coordinate, and readers are cut by ``shard=(rank,
world)`` without any engine. Ray is imported by what uses it, when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlio._lazy import lazy_exports

__all__ = [
    "FaultTolerance",
    "Fragment",
    "Loss",
    "ReaderShard",
    "WorkerGroup",
    "WorkerStatus",
    "WriteReport",
    "WrittenPart",
    "evaluate_offline",
    "read_dataset",
    "reader_shards",
    "write_dataset",
]

if TYPE_CHECKING:
    from rlio.distributed.data_sink import WriteReport, WrittenPart, write_dataset
    from rlio.distributed.data_source import read_dataset
    from rlio.distributed.fault_tolerance import FaultTolerance, Loss
    from rlio.distributed.offline_evaluation import evaluate_offline
    from rlio.distributed.rank_readers import ReaderShard, reader_shards
    from rlio.distributed.remote_worker import Fragment, WorkerStatus
    from rlio.distributed.worker_group import WorkerGroup
else:
    # Hidden from type checkers: to them a module with __getattr__ has every attribute.
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "FaultTolerance": "rlio.distributed.fault_tolerance",
            "Fragment": "rlio.distributed.remote_worker",
            "Loss": "rlio.distributed.fault_tolerance",
            "ReaderShard": "rlio.distributed.rank_readers",
            "WorkerGroup": "rlio.distributed.worker_group",
            "WorkerStatus": "rlio.distributed.remote_worker",
            "WriteReport": "rlio.distributed.data_sink",
            "WrittenPart": "rlio.distributed.data_sink",
            "evaluate_offline": "rlio.distributed.offline_evaluation",
            "read_dataset": "rlio.distributed.data_source",
            "reader_shards": "rlio.distributed.rank_readers",
            "write_dataset": "rlio.distributed.data_sink",
        },
    )
