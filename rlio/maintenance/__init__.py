"""Looking after a stored data set: what is wrong with it, and what can be put right or thrown away."""

# Functions have the names of their modules: they are imported here, so that the names are the functions'.
from rlio.log.recovery import recover
from rlio.maintenance.compact import compact
from rlio.maintenance.findings import Finding, VerifyReport, WriterLedger
from rlio.maintenance.gc import gc
from rlio.maintenance.repair import Action, RepairReport, repair
from rlio.maintenance.trim import trim
from rlio.maintenance.verify import verify

__all__ = [
    "Action",
    "Finding",
    "RepairReport",
    "VerifyReport",
    "WriterLedger",
    "compact",
    "gc",
    "recover",
    "repair",
    "trim",
    "verify",
]
