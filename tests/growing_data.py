"""Helpers of the tests of data sets that grow: shards put one by one, larger ones over them, marks."""

from __future__ import annotations

import json
import os
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from stored_batches import files, fresh_root, group_bytes, numbered

from rlio import EndOfData, FollowReader, InputReader, JsonWriter, ParquetWriter, Roll, SampleBatch
from rlio.batch import Batch
from rlio.catalog import markers
from rlio.catalog.commit import put_header, put_shard
from rlio.catalog.listing import ShardRef, list_shards
from rlio.catalog.names import ShardName
from rlio.storage.filesystem import Storage

A, B, C = "w00000-0000000a", "w00001-0000000b", "w00002-0000000c"


def encode(*batches: Batch, limit: int | None = None, kind: Any = ParquetWriter) -> dict[str, bytes]:
    """Name -> bytes of the shards of some batches, and path -> bytes of their schemas."""
    root = fresh_root()
    with group_bytes(limit or 8 << 20), kind(root, roll=Roll(max_seconds=None)) as writer:
        for batch in batches:
            writer.write(batch)
    shards = {path.rsplit("/", 1)[1]: data for path, data in files(root).items()}
    schemas = {"_schema/" + path.rsplit("/", 1)[1]: data for path, data in files(root, "_schema").items()}
    return shards | schemas


@lru_cache(4096)
def _numbered(first: int, rows: int, label: int, limit: int | None) -> dict[str, bytes]:
    return encode(labelled(first, rows, label), limit=limit)


def labelled(first: int, rows: int, label: int = 0) -> SampleBatch:
    """Rows that know their number in ``t``, and in ``label`` whose they are."""
    return numbered(rows, first, label=np.full(rows, label, np.int8))


def grow(
    root: str, writer: str, first: int, rows: int, *, label: int = 0, limit: int | None = 200
) -> ShardRef:
    """Store the shard with rows ``first`` to ``first + rows - 1`` of a writer."""
    return publish(root, writer, first, _numbered(first, rows, label, limit))


def publish_shard(
    storage: Storage, writer: str, data: Any, *, first: int, rows: int, **fields: Any
) -> ShardRef:
    """Store a shard of any content; ``fields``: suffix and footer_crc32."""
    size, crc32 = len(data), zlib.crc32(data)
    name = ShardName(first=first, rows=rows, size=size, crc32=crc32, **fields)
    return put_shard(storage, writer, name, memoryview(data))


def publish(root: str, writer: str, first: int, encoded: dict[str, bytes]) -> ShardRef:
    """Store what `encode` gave, which must be one shard, with the numbers from ``first`` on."""
    storage = Storage.open(root, sync=False)
    put_header(storage)
    found: list[ShardRef] = []
    for name, data in sorted(encoded.items(), reverse=True):  # Schemas first: "_" comes after digits.
        if name.startswith("_schema/"):
            storage.put(name, data)
            continue
        parsed = ShardName.parse(name)
        assert parsed is not None
        found.append(
            publish_shard(
                storage,
                writer,
                data,
                first=first,
                rows=parsed.rows,
                suffix=parsed.suffix,
                footer_crc32=parsed.footer_crc32,
            )
        )
    (ref,) = found
    return ref


def remove_shard(root: str, ref: ShardRef) -> None:
    """Delete a shard."""
    Storage.open(root).remove(ref.path)


def seal(root: str, writer: str, rows: int) -> None:
    """Close a writer for good."""
    storage = Storage.open(root, sync=False)
    put_header(storage)
    markers.seal(storage, writer, rows)


def trim(root: str, writer: str, row: int, *, delete: bool = True) -> None:
    """Trim a writer, and delete the shards that lie below."""
    storage = Storage.open(root, sync=False)
    markers.trim(storage, writer, row)
    for ref in list_shards(storage).shards.get(writer, []) if delete else ():
        if ref.name.end <= row:
            storage.remove(ref.path)


def follow(root: Any, **options: Any) -> FollowReader:
    """A follower that ends at once when there is nothing to read."""
    return FollowReader(root, **{"idle_timeout": 0, "poll_seconds": 0.01, **options})


def drain(reader: InputReader, n: int | None = None) -> list[int]:
    """The row numbers, until the end."""
    found: list[int] = []
    while True:
        try:
            found += reader.sample(n)["t"].tolist()
        except EndOfData:
            return found


# ---- processes ----


def write_rows(root: str, label: int, shards: int, rows: int) -> None:
    """A process that writes numbered rows, flushing now and then; closing seals its writer."""
    writer_id = f"w{label:05d}-0000000{label}"
    with ParquetWriter(root, writer_id=writer_id, roll=Roll(max_rows=rows, max_seconds=None)) as writer:
        for number in range(shards):
            writer.write(labelled(number * rows, rows, label))
            writer.flush()


def tail_rows(root: str, log: str, seed: int) -> None:
    """A process that follows, with a fresh reader every few batches, and logs each batch with its state."""
    sizes = np.random.default_rng(seed)
    state = logged(log)[-1]["state"] if os.path.exists(log) and logged(log) else None
    while True:
        with follow(root, idle_timeout=60) as reader, open(log, "a") as out:
            if state is not None:
                reader.load_state_dict(state)
            for _ in range(int(sizes.integers(1, 8))):
                try:
                    batch = reader.sample(int(sizes.integers(1, 90)))
                except EndOfData:
                    out.write(json.dumps({"end": True, "t": [], "label": [], "state": state}) + "\n")
                    return
                state = reader.state_dict()
                served = {"t": batch["t"].tolist(), "label": batch["label"].tolist(), "state": state}
                out.write(json.dumps(served) + "\n")
                out.flush()


def logged(log: str) -> list[dict[str, Any]]:
    """What `tail_rows` logged in whole lines; a line that a kill cut goes, as its state does."""
    text = Path(log).read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        Path(log).write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


__all__ = [
    "A", "B", "C", "JsonWriter", "drain", "encode", "follow", "grow", "labelled", "logged", "publish",
    "remove_shard", "seal", "tail_rows", "trim", "write_rows",
]  # fmt: skip
