"""Looking after a stored data set: what is wrong with it, and what can be put right or thrown away."""

from rlio.maintenance.findings import Finding, VerifyReport, WriterLedger

__all__ = [
    "Finding",
    "VerifyReport",
    "WriterLedger",
]
