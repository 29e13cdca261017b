"""Looking after a stored data set: what is wrong with it, and what can be put right or thrown away."""

from rlio.maintenance.findings import Finding, VerifyReport, WriterLedger
from rlio.maintenance.repair import Action, RepairReport

__all__ = [
    "Action",
    "Finding",
    "RepairReport",
    "VerifyReport",
    "WriterLedger",
]
