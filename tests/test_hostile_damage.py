"""Damage at rest: no truncation and no flipped bit ever gives a wrong row, through the public reader.

`tests/test_parquet_shards.py` and `tests/test_json_shard.py` look closer, at single shards.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
from hostile_corpus import _written, json_files, shard_of, small_batch
from stored_batches import fresh_root, put

import rlio
from rlio.errors import RlioError
from rlio.storage.names import ShardName

KINDS = ["parquet", "jsonl", "jsonl.zst"]


@cache
def data_set(kind: str) -> dict[str, bytes]:
    """Path -> bytes of a data set with one shard; the Parquet one has 25 kB."""
    if kind == "parquet":
        return _written(rlio.ParquetWriter, small_batch(220), compression="zstd")
    return json_files("zstd" if kind == "jsonl.zst" else None)


@cache
def expected(kind: str) -> dict[int, bytes]:
    """Number of a row -> its bytes."""
    found = rows_of(rlio.DatasetReader(stored(kind)[0], epochs=1))
    assert len(found) == (220 if kind == "parquet" else 30)
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
    found = {}
    with reader:
        for batch in reader:
            for index, info in enumerate(batch["infos"]):
                values = [
                    np.ascontiguousarray(batch[name][index]).tobytes()
                    for name in ("obs", "new_obs", "rewards", "t")
                ]
                assert info["n"] not in found, "a row twice"
                found[info["n"]] = b"".join([*values, str(batch["label"][index]).encode()])
    return found


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [40, pytest.param(4000, marks=pytest.mark.soak)])
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_cut_at_any_byte_serves_nothing(kind: str) -> None:
    """The listing sees it by its size. The decoders see it as well, where no size is known."""
    root, path = stored(kind)
    data = shard_of(data_set(kind))
    for length in [*range(0, len(data), max(len(data) // 5, 1)), len(data) - 1]:
        put(path, data[:length])
        assert check(kind, root) == 0


def test_every_truncation_of_a_parquet_shard_of_25_kb_is_refused() -> None:
    from rlio.schemas.shard_file import ShardFile

    (path,) = (path for path in data_set("parquet") if path.endswith(".parquet"))
    name = ShardName.parse(path.rsplit("/", 1)[1])
    data = shard_of(data_set("parquet"))
    assert name is not None
    assert len(data) > 25_000
    for length in range(len(data)):
        with pytest.raises(RlioError):
            ShardFile(
                lambda start, stop, stored=data[:length]: stored[start:stop],
                size=name.size,
                footer_crc32=name.footer_crc32,
                uri="test://shard",
            )


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
