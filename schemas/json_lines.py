r"""The lines of JSON shards: one line holds the rows of one `write()`, with its own CRC.

A line is a JSON object in UTF-8 with its keys in this order and no white space::

    {"type":"SampleBatch","schema":"<hash>","rows":2,"units":2,"attributes":{},"columns":{...},"crc32":"9f0c11aa"}
    {"type":"MultiAgentBatch","schema":"<hash>","env_steps":2,"rows":3,"units":2,"policies":{"<id>":{"rows":3,
     "attributes":{},"columns":{...}}},"crc32":"..."}
    {"type":"Provenance","schema":"<hash>","provenance":{...},"crc32":"..."}

- ``crc32`` is zlib's CRC-32 of the bytes from the line's start up to ``,"crc32":``, as 8 hex digits.
- ``schema`` names the root's ``_schema/<hash>.json``, which gives dtypes and shapes.
- ``rows`` and ``units`` (what readers count: rows; sequences with ``seq_lens``; distinct (eps_id, t) with
  several policies) come early, so an index needs no parsing.
- ``columns`` are all columns of the schema, each as in `rlio.schemas.json_columns`. A nested column is the
  object (dict) or list (tuple) of its leaves. ``new_obs`` is written in full.
- Padding is not written. ``attributes`` has the time of writing, starts of episodes, ``max_seq_len`` and
  ``num_grad_updates``, as far as they are known.
- A line has at most 64 MiB, 4 million lists and objects, and 16 million rows. Its columns decode to at most 1
  GiB.
- The first line of a shard is its ``Provenance``: the origin of the data, and library versions. It has no
  rows.

Example:
    >>> import numpy as np
    >>> schema = Schema.of(SampleBatch(obs=np.float32([[0.1, 1], [2, np.nan]]), t=[0, 1]))
    >>> line = encode_line(SampleBatch(obs=np.float32([[0.1, 1], [2, np.nan]]), t=[0, 1]), schema)
    >>> print(line.decode())
    {"type":"SampleBatch","schema":"...","rows":2,"units":2,"attributes":{"written":...},"columns":{"obs":[[0.1,1],[2,"NaN"]],"t":[0,1]},"crc32":"..."}
    >>> decode_line(line, lambda name: schema)
    SampleBatch(2 steps: obs float32 (2, 2), t int64 (2,))
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from numpy.typing import NDArray

from rlio.batch import MultiAgentBatch, SampleBatch, count_units
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns, is_per_sequence
from rlio.batch.multi_agent import MAX_ENV_STEPS
from rlio.errors import CorruptData, RlioError, SchemaError, UnsafeData, excerpt, raise_at
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.schemas.json_columns import MAX_TEXT_BYTES, check_containers, dump_column, load_column, parse_json
from rlio.schemas.leaves import Leaf, is_named, rebuild
from rlio.schemas.policy_schema import PolicySchema
from rlio.schemas.row_groups import ATTRIBUTES, attributes_of, times_of, unpadded
from rlio.schemas.schema import Schema

__all__ = [
    "MAX_LINE_BYTES",
    "LineHead",
    "LineTooLarge",
    "SchemaLookup",
    "decode_line",
    "encode_line",
    "encode_provenance",
    "is_intact",
    "is_provenance",
    "parse_head",
    "parse_provenance",
]

MAX_LINE_BYTES: Final = MAX_TEXT_BYTES

#: Returns the schema of a hash; raises CorruptData or DataNotFound if there is none.
SchemaLookup: TypeAlias = Callable[[str], Schema]

# Bytes of the columns of one line in memory, plus one per row.
_MAX_DECODED = 1 << 30
# Readers draw orders of a line's rows: for 16 million rows these take 128 MiB.
_MAX_ROWS = 1 << 24
# The shortest text of a value: a digit and a comma.
_LEAST_BYTES = 2
# Attributes with times, and where a line says when it was written. (In a text, a quote is an escape.)
_BEGAN, _WRITTEN = "began", "written"
_WHEN = re.compile(rb'"written":(\d{1,18})}')
_HEAD = re.compile(
    rb'\{"type":"(?:SampleBatch|MultiAgentBatch)","schema":"([0-9a-f]{8,64})",'
    rb'(?:"env_steps":[0-9]{1,15},)?"rows":([0-9]{1,15}),"units":([0-9]{1,15}),'
)
_HEAD_BYTES = 256
_PROVENANCE = b'{"type":"Provenance","schema":"'
_TAIL = re.compile(rb',"crc32":"([0-9a-f]{8})"\}')
_TAIL_BYTES = 20


class LineTooLarge(SchemaError):
    """A batch that is too large for a legal line; parts of it may fit."""


class LineHead(NamedTuple):
    """The values that the beginning of a line states."""

    schema: str
    rows: int
    units: int


# ---- writing ----


def encode_line(
    batch: SampleBatch | MultiAgentBatch,
    schema: Schema,
    *,
    compress_columns: Collection[str] = (),
    first_row: int = 0,
) -> bytes:
    """Return the line of a batch, without a line end.

    Args:
        batch: Rows that fit the schema.
        schema: Schema of the writer's rows; its hash goes into the line.
        compress_columns: Logical columns to write as zstd blobs; names that the batch lacks are ignored.
        first_row: Number of the first row in the batch that was written, for messages.

    Raises:
        SchemaError: The batch does not fit the schema. (LineTooLarge: it must be split.)
    """
    if isinstance(batch, MultiAgentBatch):
        parts = {pid: unpadded(part) for pid, part in batch.items() if len(part)}
        plain: SampleBatch | MultiAgentBatch = MultiAgentBatch(parts, batch.env_steps())
    else:
        plain = unpadded(batch)
        parts = {DEFAULT_POLICY_ID: plain}
    arrays = {pid: _flatten(part, schema, pid, first_row) for pid, part in parts.items()}
    _check_arrays(arrays, schema, compress_columns)
    try:
        written = {
            pid: b"%b%b" % (_attributes(part), _columns(arrays[pid], schema.policies[pid], compress_columns))
            for pid, part in parts.items()
        }
    except UnsafeData as error:
        raise _too_large(str(error)) from error
    if isinstance(batch, MultiAgentBatch):
        kind, steps = b"MultiAgentBatch", b'"env_steps":%d,' % batch.env_steps()
        listed = [b'%b:{"rows":%d,%b}' % (_json(pid), len(parts[pid]), text) for pid, text in written.items()]
        content = b'"policies":{%b}' % b",".join(listed)
    else:
        kind, steps, content = b"SampleBatch", b"", written[DEFAULT_POLICY_ID]
    line = _sealed(
        b'{"type":"%b","schema":"%b",%b"rows":%d,"units":%d,%b'
        % (kind, schema.hash.encode(), steps, plain.agent_steps(), _units(plain), content)
    )
    _check_size(line)
    return line


def encode_provenance(text: str, schema: Schema) -> bytes:
    """Return a shard's first line, without a line end; ``text`` is JSON, see `rlio.schemas.provenance`."""
    return _sealed(b'%b%b","provenance":%b' % (_PROVENANCE, schema.hash.encode(), text.encode()))


def _sealed(start: bytes) -> bytes:
    """Complete a line from its start, with the CRC of that start."""
    return b'%b,"crc32":"%08x"}' % (start, zlib.crc32(start))


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _flatten(batch: SampleBatch, schema: Schema, pid: str, first_row: int) -> dict[str, NDArray[Any]]:
    """Return the arrays of one policy's rows by physical name."""
    arrays = schema.policies[pid].flatten(batch, policy=pid, first_row=first_row)
    if not arrays:
        raise SchemaError(f"policy {pid!r} has a batch without columns: leave it out")
    return arrays


def _columns(arrays: Mapping[str, NDArray[Any]], policy: PolicySchema, compress: Collection[str]) -> bytes:
    """Return the columns of one policy's rows as JSON."""
    written = []
    for column, leaves in policy.columns.items():
        # Never compress the lengths: the number of rows in other columns depends on them.
        packed = column in compress and column != Columns.SEQ_LENS
        texts = [
            (leaf.path, dump_column(arrays[leaf.physical], leaf.spec, compress=packed)) for leaf in leaves
        ]
        written.append(b"%b:%b" % (_json(column), _nested(rebuild(texts))))
    return b'"columns":{%b}' % b",".join(written)


def _attributes(batch: SampleBatch) -> bytes:
    found = {name: v if v != int(v) else int(v) for name, v in attributes_of(batch).items()}
    times = times_of(batch)
    began = {_BEGAN: [list(item) for item in times.began.items()]} if times.began else {}
    written = {} if times.written is None else {_WRITTEN: times.written}
    attributes = {**found, **began, **written}
    return b'"attributes":%b,' % _json(attributes) if attributes else b""


def _nested(value: Any) -> bytes:
    """Put objects and lists around the texts of a column's leaves."""
    if isinstance(value, dict):
        return b"{%b}" % b",".join(b"%b:%b" % (_json(key), _nested(part)) for key, part in value.items())
    if isinstance(value, tuple):
        return b"[%b]" % b",".join(map(_nested, value))
    return bytes(value)


def _check_arrays(
    arrays: Mapping[str, Mapping[str, NDArray[Any]]], schema: Schema, compress: Collection[str]
) -> None:
    """Refuse, before encoding, arrays that are too large for a line."""
    found = [
        (values[leaf.physical], leaf.spec, leaf.column in compress)
        for pid, values in arrays.items()
        for leaf in schema.policies[pid].leaves
    ]
    decoded = least = rows = 0
    for array, spec, packed in found:
        rows = max(rows, len(array))
        if spec.kind == "picture":
            decoded += len(array) * (spec.row_bytes + 1)
            least += sum(len(picture.data) for picture in array.tolist())
        else:
            decoded += array.nbytes + len(array)
            least += 0 if packed else array.size * _LEAST_BYTES
    if decoded > _MAX_DECODED or least > MAX_LINE_BYTES or rows > _MAX_ROWS:
        raise _too_large(f"{decoded} bytes of columns, {rows} rows")


def _check_size(line: bytes) -> None:
    if len(line) > MAX_LINE_BYTES:
        raise _too_large(f"a line of {len(line)} bytes")
    try:
        check_containers(line)
    except UnsafeData as error:
        raise _too_large(str(error)) from error


def _too_large(found: str) -> LineTooLarge:
    return LineTooLarge(
        f"{found}: a JSON line has at most {MAX_LINE_BYTES >> 20} MiB, 4 million lists, 16 million "
        "rows and 1 GiB of columns; write smaller batches, or name wide columns in compress_columns"
    )


def _units(batch: SampleBatch | MultiAgentBatch) -> int:
    """Return the number of units; see `rlio.batch.concat.count_units`."""
    if isinstance(batch, MultiAgentBatch):
        return count_units(batch, "steps")
    return count_units(batch, "sequences" if Columns.SEQ_LENS in batch else "steps")


# ---- reading ----


def is_intact(line: bytes) -> bool:
    """Whether the line, without its end, matches its CRC."""
    tail = _TAIL.fullmatch(line[-_TAIL_BYTES:])
    return tail is not None and zlib.crc32(memoryview(line)[:-_TAIL_BYTES]) == int(tail[1], 16)


def parse_head(line: bytes) -> LineHead | None:
    """Return the values at the beginning of a line, unchecked; None if it is not the line of a batch."""
    head = _HEAD.match(line[:_HEAD_BYTES])
    if head is None:
        return None
    return LineHead(head[1].decode(), int(head[2]), int(head[3]))


def written_at(line: bytes) -> int | None:
    """When a line was written, in milliseconds since 1970-01-01 UTC; None: by an earlier version."""
    found = _WHEN.search(line, 0, line.find(b'"columns":{'))
    return None if found is None else int(found[1])


def is_provenance(line: bytes) -> bool:
    """Whether a line is the provenance line of a shard, which has no rows."""
    return line.startswith(_PROVENANCE)


def parse_provenance(line: bytes, *, uri: str | None = None) -> dict[str, Any]:
    """Return the origin of the data, from the first line of a shard.

    Raises:
        CorruptData: The line is damaged, or not a provenance line.
    """
    if is_intact(line) and is_provenance(line):
        try:
            return dict(parse_json(line)["provenance"])
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptData(f"the provenance is malformed: {error}", uri=uri, record=0) from error
    raise CorruptData(f"expected an intact line of provenance, found {excerpt(line)}", uri=uri, record=0)


def decode_line(
    line: bytes,
    schemas: SchemaLookup,
    *,
    columns: Collection[str] | None = None,
    uri: str | None = None,
    record: int | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> SampleBatch | MultiAgentBatch:
    """Return the batch in a line.

    Args:
        line: The bytes of the line, without the line end; they may be hostile.
        schemas: Returns the schema of the hash in the line.
        columns: Logical columns, or parts of them (``obs/camera``), to decode; None: all.
        uri: URI of the file, for messages.
        record: Number of the line, for messages.
        limits: The most that the line may ask for: its bytes, its rows, and their decoded size.

    Returns:
        A batch that owns its arrays, with its columns in the order of the schema.

    Raises:
        CorruptData: The line is damaged or does not fit its schema; none of it can be trusted.
        UnsafeData: The line would take far more memory than its bytes.
        MissingColumn: No policy of its schema has one of ``columns``.
    """
    if len(line) > limits.line_bytes:
        raise UnsafeData(
            f"a line of {len(line)} bytes, more than {limits.line_bytes}: raise Limits.line_bytes if the "
            "data are yours",
            uri=uri,
            record=record,
        )
    head = parse_head(line)
    if head is None or not is_intact(line):
        raise CorruptData(
            f"the line does not match its CRC-32: its rows are lost; it begins with {excerpt(line[:80])}",
            uri=uri,
            record=record,
        )
    schema = schemas(head.schema)
    schema.check_columns(columns or (), uri=uri)
    try:
        return _decode(parse_json(line, limits), schema, head, columns, limits)
    except CorruptData as error:
        raise_at(error, uri=uri, record=record)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        if isinstance(error, RlioError):
            raise
        raise CorruptData(f"the line is malformed: {error}", uri=uri, record=record) from error


def _decode(
    written: Any, schema: Schema, head: LineHead, columns: Collection[str] | None, limits: Limits
) -> SampleBatch | MultiAgentBatch:
    multi_agent = written["type"] == "MultiAgentBatch"
    if multi_agent != schema.multi_agent:
        raise CorruptData(f"found a {written['type']}, but the schema is of the other kind")
    listed = written["policies"] if multi_agent else {DEFAULT_POLICY_ID: written}
    parts = {pid: _Part.of(part, schema, pid, limits) for pid, part in listed.items()}
    if (rows := sum(part.rows for part in parts.values())) != head.rows:
        raise CorruptData(f"the policies have {rows} rows and the line says {head.rows}")
    if (size := sum(part.size for part in parts.values())) > limits.group_bytes or rows > limits.group_rows:
        raise UnsafeData(
            f"{rows} rows of {size} bytes in one line, more than {limits.group_rows} or {limits.group_bytes}"
        )
    batches = {pid: part.decode(columns, limits) for pid, part in parts.items()}
    batch: SampleBatch | MultiAgentBatch
    if multi_agent:
        batch = MultiAgentBatch(batches, _count(written["env_steps"]))
    else:
        batch = batches[DEFAULT_POLICY_ID]
    if columns is None:
        _check_units(batch, head)
    return batch


def _check_units(batch: SampleBatch | MultiAgentBatch, head: LineHead) -> None:
    try:
        units = _units(batch)
    except SchemaError as error:
        raise CorruptData(str(error)) from error
    if units != head.units:
        raise CorruptData(f"{units} units and the line says {head.units}")


def _count(value: Any) -> int:
    """Return a checked number of rows or steps."""
    if type(value) is not int or not 0 <= value <= MAX_ENV_STEPS:
        raise CorruptData(f"found {excerpt(value)} rows or steps, expected 0 to {MAX_ENV_STEPS}")
    return value


class _Part(NamedTuple):
    """The parsed rows of one policy, and their number.

    Attributes:
        written: The object with the columns.
        policy: The schema of the columns.
        rows: Number of rows as the line states; nothing else is known yet.
        sequences: Number of sequences, whose ``seq_lens`` add up to the rows; without it, the rows.
    """

    written: dict[str, Any]
    policy: PolicySchema
    rows: int
    sequences: int

    @classmethod
    def of(cls, written: dict[str, Any], schema: Schema, pid: str, limits: Limits) -> _Part:
        """Return the rows of policy ``pid``; checks that it has the columns of the schema."""
        if pid not in schema.policies:
            raise CorruptData(f"policy {excerpt(pid)} is not in the schema")
        policy, rows, found = schema.policies[pid], _count(written["rows"]), written["columns"]
        if not isinstance(found, dict) or found.keys() != policy.columns.keys():
            unlike = sorted(set(found) ^ set(policy.columns)) if isinstance(found, dict) else [None]
            raise CorruptData("the line has other columns than its schema", column=unlike[0])
        sequences = rows
        if policy.has_sequences:
            sequences = _sequences(found[Columns.SEQ_LENS], policy, rows, limits)
        return cls(written, policy, rows, sequences)

    @property
    def size(self) -> int:
        """Bytes of the columns in memory, with text as pointers; rows without bytes count as one byte."""
        return self.rows + sum(
            self._count(leaf.column) * (8 if leaf.spec.kind in ("text", "json") else leaf.spec.row_bytes)
            for leaf in self.policy.leaves
        )

    def decode(self, columns: Collection[str] | None, limits: Limits) -> SampleBatch:
        """Return the batch."""
        made = {}
        for column, leaves in self.policy.columns.items():
            if any(is_named(leaf, columns) for leaf in leaves):
                tree = rebuild([(leaf.path, leaf if is_named(leaf, columns) else None) for leaf in leaves])
                written = self.written["columns"][column]
                made[column] = _load(written, tree, column, self._count(column), limits)
        attributes = _read_attributes(self.written.get("attributes", {}))
        try:
            return SampleBatch(made, **attributes)
        except SchemaError as error:
            # A subset of the columns may not make a batch (states without seq_lens). All columns do.
            if columns is not None:
                raise
            raise CorruptData(str(error)) from error

    def _count(self, column: str) -> int:
        return self.sequences if is_per_sequence(column) else self.rows


def _sequences(written: Any, policy: PolicySchema, rows: int, limits: Limits) -> int:
    """Return the number of sequences; checks that their lengths add up to the rows."""
    (leaf,) = policy.columns[Columns.SEQ_LENS]
    if not isinstance(written, list) or len(written) > rows:
        # A blob does not state its length; a writer of rlio never needs one here.
        raise CorruptData(f"expected at most {rows} lengths, found {excerpt(written)}", column=leaf.column)
    lens = _load(written, leaf, leaf.column, len(written), limits)
    if len(lens) and (int(lens.min()) < 1 or sum(lens.tolist()) != rows):
        raise CorruptData(f"sequences of {sum(lens.tolist())} rows, expected {rows}", column=leaf.column)
    if not len(lens) and rows:
        raise CorruptData(f"no sequences for {rows} rows", column=leaf.column)
    return len(lens)


def _load(written: Any, tree: Any, column: str, count: int, limits: Limits) -> Any:
    """Return a column from its nested lists and objects, which must nest like the schema's leaves.

    Parts of the ``tree`` that are None are left out; a column, or part, of which nothing is left is None.
    """
    if tree is None:
        return None
    if isinstance(tree, dict):
        if not isinstance(written, dict) or written.keys() != tree.keys():
            raise CorruptData(f"expected the keys {sorted(tree)}, found {excerpt(written)}", column=column)
        parts = {
            key: _load(written[key], part, f"{column}/{key}", count, limits) for key, part in tree.items()
        }
        return {key: part for key, part in parts.items() if part is not None} or None
    if isinstance(tree, tuple):
        if not isinstance(written, list) or len(written) != len(tree):
            raise CorruptData(f"expected {len(tree)} columns, found {excerpt(written)}", column=column)
        found = tuple(_load(written[i], part, f"{column}/{i}", count, limits) for i, part in enumerate(tree))
        return (
            None if any(part is None for part in found) else found
        )  # Of a tuple, all places are named, or none.
    assert isinstance(tree, Leaf)
    try:
        return load_column(written, tree.spec, rows=count, limits=limits)
    except UnsafeData as error:
        raise UnsafeData(f"column {column}: {error}") from error
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise CorruptData(str(error), column=column) from error


def _read_attributes(written: Any) -> dict[str, Any]:
    if not isinstance(written, dict) or not written.keys() <= {*ATTRIBUTES, _BEGAN, _WRITTEN}:
        raise CorruptData(f"attributes {excerpt(written)}")
    longest, updates = written.get("max_seq_len"), written.get("num_grad_updates")
    if type(longest) not in (int, type(None)) or type(updates) not in (int, float, type(None)):
        raise CorruptData(f"attributes {excerpt(written)}")
    starts = written.get(_BEGAN, [])
    if type(starts) is not list or not all(
        type(start) is list and len(start) == 2 and type(start[0]) in (int, str) and type(start[1]) is int
        for start in starts
    ):
        raise CorruptData(f"attributes {excerpt(written)}")
    found = {name: written[name] for name in ATTRIBUTES if name in written}
    return {**found, "episode_starts": dict(starts)} if starts else found
