"""Checks that shards with the same rows of a writer hold the same values, even with other row groups.

Compares 64-bit digests of the rows' columns, so memory is 8 bytes per row of the shards that overlap with a
later one. Digests find accidents, not forgeries.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import to_numpy
from rlio.batch.columns import Columns, is_per_sequence
from rlio.batch.nested import leaves
from rlio.catalog.listing import ShardRef
from rlio.maintenance.findings import Findings
from rlio.maintenance.shard_scan import Part, Rows
from rlio.schemas.column import TEXTS, ColumnSpec
from rlio.schemas.json_values import dump_value
from rlio.schemas.schema import Schema, canonical_json

__all__ = ["OverlapCheck", "row_digests"]

_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)


@dataclass
class _Known:
    """The digests of one shard's rows."""

    ref: ShardRef
    uri: str
    digests: NDArray[np.uint64]
    valid: NDArray[np.bool_]


class OverlapCheck:
    """Compares the shards of one writer, ordered by first row.

    Args:
        refs: All shards of the writer, in the order in which they will be scanned.
        findings: Receives the differences.
    """

    def __init__(self, refs: list[ShardRef], findings: Findings) -> None:
        self._findings = findings
        self._known: list[_Known] = []
        self._current: _Known | None = None
        # A shard matters if it overlaps with an earlier or a later one.
        self._wanted: set[str] = set()
        reach: ShardRef | None = None
        for ref in refs:
            if reach is not None and ref.name.first < reach.name.end:
                self._wanted |= {reach.path, ref.path}
            if reach is None or ref.name.end > reach.name.end:
                reach = ref
        for index, ref in enumerate(refs[:-1]):
            if refs[index + 1].name.first < ref.name.end:
                self._wanted.add(ref.path)

    def wants(self, ref: ShardRef) -> bool:
        """Whether the shard overlaps with another one; others may be left out."""
        return ref.path in self._wanted

    def begin(self, ref: ShardRef, *, uri: str) -> None:
        """Start the next shard."""
        self._known = [known for known in self._known if known.ref.name.end > ref.name.first]
        self._current = None
        if self.wants(ref):
            rows = ref.name.rows
            self._current = _Known(ref, uri, np.zeros(rows, np.uint64), np.zeros(rows, bool))

    def add(self, schema: Schema, rows: Rows) -> None:
        """Add intact rows of the shard."""
        if self._current is None:
            return
        for part in rows.parts:
            at = rows.first + part.rows
            self._current.digests[at] = row_digests(schema, part)
            self._current.valid[at] = True

    def end(self) -> None:
        """Compare the shard with the earlier ones."""
        current = self._current
        if current is None:
            return
        for known in self._known:
            first = max(known.ref.name.first, current.ref.name.first)
            last = min(known.ref.name.end, current.ref.name.end)
            if first >= last:
                continue
            ours = slice(first - current.ref.name.first, last - current.ref.name.first)
            theirs = slice(first - known.ref.name.first, last - known.ref.name.first)
            unlike = (current.digests[ours] != known.digests[theirs]) & (
                current.valid[ours] & known.valid[theirs]
            )
            if unlike.any():
                row = first + int(unlike.argmax())
                self._findings.add(
                    "overlap-differs",
                    f"{int(unlike.sum())} rows of writer {current.ref.writer!r}, the first {row}, differ "
                    f"from those in {known.uri}, although both match their CRCs: two writers had the same id",
                    uri=current.uri,
                    rows=int(unlike.sum()),
                )
        self._known.append(current)


def row_digests(schema: Schema, part: Part) -> NDArray[np.uint64]:
    """Return a digest of each row, shape (rows,); equal values of the schema's dtypes give equal digests."""
    policy = schema.policies[part.policy].shown
    total = np.full(len(part.rows), zlib.crc32(part.policy.encode()), np.uint64)
    lens = part.batch.get(Columns.SEQ_LENS)
    firsts = None
    if lens is not None:
        lengths = to_numpy(lens).astype(np.int64)
        firsts = np.cumsum(lengths) - lengths
    arrays = {column: dict(leaves(part.batch[column])) for column in policy.columns if column in part.batch}
    with np.errstate(over="ignore"):
        for leaf in policy.leaves:
            if leaf.spec.kind == "none" or leaf.column not in arrays:
                continue
            values = _leaf_digests(to_numpy(arrays[leaf.column][leaf.path]), leaf.spec)
            values ^= np.uint64(zlib.crc32(f"{leaf.column}/{leaf.path}".encode()))
            if not is_per_sequence(leaf.column):
                total = (total ^ values) * _MIX
            elif firsts is not None:
                total[firsts] = (total[firsts] ^ values) * _MIX
            total ^= total >> np.uint64(31)
    return total


def _text(value: object) -> str:
    """The JSON text of an object. The keys of infos have another order where they are columns."""
    return canonical_json(json.loads(dump_value(value)))


def _leaf_digests(values: NDArray[Any], spec: ColumnSpec) -> NDArray[np.uint64]:
    if spec.kind in TEXTS:
        texts = (value if isinstance(value, str | bytes) else _text(value) for value in values.tolist())
        raw = (text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text for text in texts)
        return np.array([zlib.crc32(data) | len(data) << 32 for data in raw], np.uint64)
    flat = np.ascontiguousarray(values).reshape(len(values), spec.size).view(np.uint8)
    spare = -flat.shape[1] % 8
    if spare:
        flat = np.concatenate([flat, np.zeros((len(flat), spare), np.uint8)], 1)
    words = np.ascontiguousarray(flat).view(np.uint64)
    # Odd factors lose no bit of any word.
    factors = (np.arange(1, words.shape[1] + 1, dtype=np.uint64) * _ODD) | np.uint64(1)
    return np.asarray((words * factors).sum(1, dtype=np.uint64))
