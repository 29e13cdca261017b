"""Maintenance of a stored data set: verify, repair, compact, trim, and collect garbage."""

# Functions have the names of their modules. Importing them here makes each name the function.
from rlio.maintenance.compact import compact
from rlio.maintenance.findings import Finding, VerifyReport, WriterLedger
from rlio.maintenance.gc import gc
from rlio.maintenance.repair import Action, RepairReport, repair
from rlio.maintenance.status import DatasetStatus, FollowerStatus, LogStatus, WriterStatus, status
from rlio.maintenance.trim import trim
from rlio.maintenance.verify import verify
from rlio.writers.recovery import recover

__all__ = [
    "Action",
    "DatasetStatus",
    "Finding",
    "FollowerStatus",
    "LogStatus",
    "RepairReport",
    "VerifyReport",
    "WriterLedger",
    "WriterStatus",
    "compact",
    "gc",
    "recover",
    "repair",
    "status",
    "trim",
    "verify",
]
