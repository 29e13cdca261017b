"""Damage at rest: no truncation and no flipped bit ever gives a wrong row, through the public reader.

`tests/test_parquet_shards.py` and `tests/test_json_shard.py` look closer, at single shards.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
from further import further
from hostile_corpus import _written, json_files, shard_of, small_batch
from stored_batches import columns_of_parts, fresh_root, put

import rlio
from rlio.batch.arrays import object_column
from rlio.batch.picture_codecs import encode_column
from rlio.catalog.listing import ShardRef, list_shards
from rlio.catalog.names import ShardName
from rlio.errors import CorruptData, RlioError
from rlio.schemas.json_lines import SchemaLookup
from rlio.source.json_shard import schema_lookup
from rlio.source.shards import open_shard
from rlio.storage.filesystem import Storage

PARTS = ("words", "names", "graphs")
KINDS = ["parquet", "jsonl", "jsonl.zst"]
ALL_KINDS = [*KINDS, "parquet of parts", *further("jsonl of parts")]


@cache
def data_set(kind: str) -> dict[str, bytes]:
    """Path -> bytes of a data set with one shard; the Parquet one has 25 kB."""
    if kind == "parquet":
        return _written(rlio.ParquetWriter, small_batch(220), compression="zstd")
    if kind == "parquet of parts":
        return _written(rlio.ParquetWriter, with_parts(60))
    if kind == "jsonl of parts":
        batch = with_parts(30)
        return _written(rlio.JsonWriter, batch[:10], batch[10:20], batch[20:])
    return json_files("zstd" if kind == "jsonl.zst" else None)


def with_parts(rows: int) -> rlio.SampleBatch:
    """The batch of the corpus, with pictures, lists, and rows that have parts."""
    batch = small_batch(rows)
    batch["tokens"] = object_column(np.full(n % 4, n, np.int32) for n in range(rows))
    batch["camera"] = encode_column(np.arange(18 * rows, dtype=np.uint8).reshape(rows, 3, 2, 3))
    parts = columns_of_parts(rows)
    for name in PARTS:
        batch[name] = parts[name]
    return batch


@cache
def expected(kind: str) -> dict[int, bytes]:
    """Number of a row -> its bytes."""
    found = rows_of(rlio.DatasetReader(stored(kind)[0], epochs=1))
    assert len(found) == {"parquet": 220, "parquet of parts": 60}.get(kind, 30)
    return found


def stored(kind: str) -> tuple[str, str]:
    """A fresh root with the data set, and the path of its shard."""
    root = fresh_root()
    for path, data in data_set(kind).items():
        put(f"{root}/{path}", data)
    (path,) = (path for path in data_set(kind) if ShardName.parse(path.rsplit("/", 1)[-1]))
    return root, f"{root}/{path}"


def rows_of(reader: Any) -> dict[int, bytes]:
    """Number -> bytes, of the rows that a reader serves; their number is in their infos."""
    found: dict[int, bytes] = {}
    with reader:
        for batch in reader:
            add_rows(found, batch)
    return found


def add_rows(found: dict[int, bytes], batch: Any) -> None:
    """Number -> bytes, of the rows of one more batch."""
    for index, info in enumerate(batch["infos"]):
        values = [
            np.ascontiguousarray(batch[name][index]).tobytes()
            for name in ("obs", "new_obs", "rewards", "t", "camera", "tokens")
            if name in batch
        ]
        values += [repr(batch[name][index]).encode() for name in PARTS if name in batch]
        assert info["n"][0] not in found, "a row twice"
        found[info["n"][0]] = b"".join([*values, str(batch["label"][index]).encode()])


def check(kind: str, root: str) -> int:
    """Read what there is, skipping damage; every row must be right. Gives how many there are."""
    try:
        found = rows_of(rlio.DatasetReader(root, epochs=1, on_error="skip"))
    except RlioError:
        return 0
    true = expected(kind)
    wrong = [number for number, row in found.items() if true.get(number) != row]
    assert wrong == []
    return len(found)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("count", [12, *further(40), pytest.param(4000, marks=pytest.mark.soak)])
def test_no_flipped_bit_gives_a_wrong_row_to_a_reader(kind: str, count: int) -> None:
    root, path = stored(kind)
    data = shard_of(data_set(kind))
    served = 0
    for bit in random.Random(0).sample(range(8 * len(data)), count):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        put(path, bytes(damaged))
        served += check(kind, root)
    # Damage costs what it hits: some rows are served nearly always.
    assert served > count * len(expected(kind)) / 4


@pytest.mark.further
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_shard_cut_at_any_byte_serves_nothing(kind: str) -> None:
    """The listing sees it by its size. The decoders see it as well, where no size is known."""
    root, path = stored(kind)
    data = shard_of(data_set(kind))
    for length in [*range(0, len(data), max(len(data) // 5, 1)), len(data) - 1]:
        put(path, data[:length])
        assert check(kind, root) == 0


@pytest.mark.parametrize("step", [9, *further(1)])
def test_every_truncation_of_a_parquet_shard_of_25_kb_is_refused(step: int) -> None:
    from rlio.schemas.shard_file import ShardFile

    (path,) = (path for path in data_set("parquet") if path.endswith(".parquet"))
    name = ShardName.parse(path.rsplit("/", 1)[1])
    data = shard_of(data_set("parquet"))
    assert name is not None
    assert len(data) > 25_000
    for length in [*range(0, len(data), step), len(data) - 1]:
        with pytest.raises(RlioError):
            ShardFile(
                lambda start, stop, stored=data[:length]: stored[start:stop],
                size=name.size,
                footer_crc32=name.footer_crc32,
                uri="test://shard",
            )


def open_and_check(kind: str, storage: Storage, ref: ShardRef, schemas: SchemaLookup) -> int:
    """Open a JSON shard by our own opener and read every group of it. Gives how many rows there are.

    What is there must be right and in order, and what is not must be declared as lost.
    """
    shard = open_shard(storage, ref, schemas=schemas)
    found: dict[int, bytes] = {}
    lost = 0
    for index, rows in enumerate(shard.rows):
        try:
            batch = shard.read(index)
        except CorruptData:
            lost += rows
            continue
        assert len(batch) == rows
        add_rows(found, batch)
    true = expected(kind)
    assert [*found.items()] == [(number, true[number]) for number in sorted(found)]
    assert len(found) + lost == len(true)
    return len(found)


def json_shard(kind: str) -> tuple[Storage, ShardRef, SchemaLookup]:
    root, path = stored(kind)
    storage = Storage.open(root)
    (refs,) = list_shards(storage).shards.values()
    assert storage.uri_of(refs[0].path).endswith(path.removeprefix("memory:"))
    return storage, refs[0], schema_lookup(storage)


@pytest.mark.few(1)
@pytest.mark.parametrize(("first", "step"), [(1, 12), *further((1, 3), (2, 3), (3, 3))])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_json_shard_cut_at_any_byte_is_refused_and_under_a_name_of_its_size_gives_no_wrong_row(
    kind: str, first: int, step: int
) -> None:
    storage, ref, schemas = json_shard(kind)
    data = shard_of(data_set(kind))
    path = storage.uri_of(ref.path)
    served = set()
    for length in [*range(first, len(data) - 1, step), len(data) - 1]:
        put(path, data[:length])
        with pytest.raises(CorruptData, match="torn"):
            open_shard(storage, ref, schemas=schemas)
        cut = ref._replace(name=ref.name._replace(size=length))
        try:
            served.add(open_and_check(kind, storage, cut, schemas))
        except CorruptData:
            served.add(0)
    # The last line lacks its end where nothing but the line feed is cut off.
    assert served == {0, 10, 20} | ({30} if kind == "jsonl" else set())


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [*KINDS[1:], *further("jsonl of parts")])
@pytest.mark.parametrize(
    ("seed", "bits"), [(0, 120), *further((1, 500), (2, 500)), pytest.param(3, 4000, marks=pytest.mark.soak)]
)
def test_no_flipped_bit_of_a_json_shard_gives_a_wrong_row_and_what_is_lost_is_counted(
    kind: str, seed: int, bits: int
) -> None:
    storage, ref, schemas = json_shard(kind)
    data = shard_of(data_set(kind))
    path = storage.uri_of(ref.path)
    served: Counter[int] = Counter()
    for bit in random.Random(seed).sample(range(8 * len(data)), bits):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        put(path, bytes(damaged))
        served[open_and_check(kind, storage, ref, schemas)] += 1
    # Damage costs its line: two lines, where it is the line feed between them.
    assert served[20] > 0.875 * bits - 1, served
    assert set(served) <= {10, 20, 30}


def test_a_header_cut_at_any_byte_or_with_any_bit_flipped_is_refused_or_the_same() -> None:
    root, _ = stored("jsonl")
    header = data_set("jsonl")["_rlio.json"]
    cuts = [header[:length] for length in range(len(header))]
    flips = [
        bytes(byte ^ (1 << bit % 8) if at == bit // 8 else byte for at, byte in enumerate(header))
        for bit in range(8 * len(header))
    ]
    for text in cuts + flips:
        put(f"{root}/_rlio.json", text)
        try:
            dataset = rlio.open_dataset(root)
        except RlioError:
            continue
        assert len(dataset) == 30
        assert text.strip() == header.strip() or text.split() == header.split() or b'"format"' in text
