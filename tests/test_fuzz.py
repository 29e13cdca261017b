"""Mutated data of every kind, from fixed seeds: an error of ours or the right rows, never a crash or a hang.

The mutator knows no coverage; what it knows is the formats: CRCs are made right after a mutation, so that
what they cover is reached. ``atheris`` would find more per hour, where it can be installed.
"""

from __future__ import annotations

import json
import random
import struct
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hostile_corpus import (
    GOOD,
    WRITER,
    _json_lines,
    _sealed,
    footer_of,
    json_files,
    parquet_files,
    shard_of,
)
from stored_batches import files, fresh_root, store
from stored_batches import put as put_file

import rlio
from rlio.catalog.commit import HEADER_BYTES, read_header
from rlio.catalog.names import ShardName, parse_sealed, parse_trim
from rlio.errors import CorruptData, RlioError, StateError
from rlio.formats.rllib.decoder import RllibDecoder
from rlio.schemas.json_lines import decode_line
from rlio.schemas.schema import Schema
from rlio.schemas.shard_file import ShardFile
from rlio.schemas.zstd_frames import inflate
from rlio.storage.filesystem import Storage

# A call that takes longer is a hang; shared machines pause for less.
SLOW = 5.0
INTERESTING = (0, 1, 2, 7, 8, 127, 128, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """``data`` with a few bytes changed, put in, taken out, repeated or replaced."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(found) + 1)
        kind = rng.randrange(7)
        if kind == 0 and found:
            found[at % len(found)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            found[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 2:
            del found[at : at + rng.randrange(1, 9)]
        elif kind == 3:
            part = found[at : at + rng.randrange(1, 40)]
            found[at:at] = part * rng.choice((1, 2, 50))
        elif kind == 4:
            found[at : at + 4] = struct.pack("<I", rng.choice(INTERESTING) & 0xFFFFFFFF)
        elif kind == 5:
            found[at : at + 1] = rng.choice(
                (b"[", b"{", b'"', b"\\", b"-", b"9" * 30, b"1e999", b"null", b"\0")
            )
        else:
            del found[at:]
    return bytes(found)


def hammer(
    count: int, seed: int, make: Callable[[random.Random], Any], use: Callable[[Any], object]
) -> tuple[int, int]:
    """Use ``count`` things; gives how many were refused with an error of ours, and how many were taken."""
    refused = taken = 0
    for number in range(count):
        rng = random.Random(seed * 1_000_003 + number)
        given = make(rng)
        began = time.process_time()  # Of the processor, so that a busy machine does not matter.
        try:
            use(given)
            taken += 1
        except RlioError:
            refused += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}, number {number}: {error!r} of {given!r:.500}") from error
        spent = time.process_time() - began
        assert spent < SLOW, f"seed {seed}, number {number}: {spent:.1f} s"
    return refused, taken


def sizes(quick: int, soak: int) -> list[Any]:
    """How many mutations: some in every run, many under the marker ``soak``."""
    return [quick, pytest.param(soak, marks=pytest.mark.soak)]


@pytest.mark.parametrize("count", sizes(3000, 1_000_000))
def test_names_of_shards_and_markers(count: int) -> None:
    (path,) = (path for path in parquet_files() if path.startswith("data/") and path.endswith(".parquet"))
    name = path.rsplit("/", 1)[1]

    def use(text: str) -> None:
        found = ShardName.parse(text)
        assert found is None or ShardName.parse(found.format()) == found
        assert found is None or ("/" not in text and "\0" not in text)
        for parse in (parse_sealed, parse_trim):
            row = parse(text)
            assert row is None or 0 <= row <= 2**62

    hammer(count, 1, lambda rng: mutated(name.encode(), rng).decode("utf-8", "surrogateescape"), use)


@pytest.mark.parametrize("count", sizes(600, 200_000))
def test_headers(count: int) -> None:
    root = fresh_root()

    def use(data: bytes) -> None:
        put_file(f"{root}/_rlio.json", data)
        assert read_header(Storage.open(root))["format"] == 0

    refused, _ = hammer(count, 2, lambda rng: mutated(HEADER_BYTES, rng), use)
    assert refused > count / 2


@pytest.mark.parametrize("count", sizes(1500, 500_000))
def test_records_of_rllib(count: int) -> None:
    lines = [
        GOOD,
        json.dumps(
            {"type": "MultiAgentBatch", "count": 2, "policy_batches": {"a": json.loads(GOOD)}}
        ).encode(),
    ]
    decoder = RllibDecoder()
    refused, _ = hammer(count, 3, lambda rng: mutated(rng.choice(lines), rng), decoder.decode)
    assert refused > count / 3


@pytest.mark.parametrize("count", sizes(1500, 500_000))
def test_lines_of_json_shards_under_right_crcs(count: int) -> None:
    (text,) = (data for path, data in json_files().items() if path.startswith("_schema/"))
    schema = Schema.from_text(text)
    line = _json_lines()[2]

    def make(rng: random.Random) -> bytes:
        return _sealed(mutated(line[:-20], rng))

    refused, _ = hammer(count, 4, make, lambda data: decode_line(data, lambda name: schema))
    assert refused > count / 3


@pytest.mark.parametrize("count", sizes(400, 100_000))
def test_schemas(count: int) -> None:
    (text,) = (data for path, data in json_files().items() if path.startswith("_schema/"))
    hammer(count, 5, lambda rng: mutated(text, rng), Schema.from_text)


@pytest.mark.parametrize("count", sizes(1000, 300_000))
def test_frames(count: int) -> None:
    frame = shard_of(json_files("zstd"))
    hammer(
        count,
        6,
        lambda rng: mutated(frame[: rng.choice((20, 200, 2000))], rng),
        lambda data: inflate(data, most=1 << 20),
    )


# ---- Parquet ----


def small_and_whole() -> bytes:
    return shard_of(parquet_files())


@pytest.mark.parametrize("count", sizes(600, 8 * 10**6))
def test_no_flipped_bit_of_a_footer_changes_what_is_served(count: int) -> None:
    """Under the name that the shard has: the CRC of the footer catches each, before pyarrow sees it."""
    data = small_and_whole()
    footer = footer_of(data)
    crc, first = zlib.crc32(footer), 8 * (len(data) - len(footer))
    bits: Any = range(first, 8 * len(data))
    for bit in random.Random(10).sample(bits, count) if count < len(bits) else bits:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptData):
            ShardFile(
                lambda start, stop, found=bytes(damaged): found[start:stop],
                size=len(data),
                footer_crc32=crc,
                uri="test://shard",
            )


# ---- saved states ----


def other_json(value: Any, rng: random.Random) -> Any:
    """A JSON value with one part of it replaced."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: other_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], other_json(value[at], rng), *value[at + 1 :]]
    return rng.choice(
        (None, True, -1, 0, 1, 2**31, 2**63, 2**64, 2**80, 10**400, -(2**70), 0.5, float("inf"), float("nan"),
         1e300, "", "x" * 1000, "\ud800", [], {}, [[]], {"": 0}, [1] * 100)
    )  # fmt: skip


def readers(tmp: str) -> dict[str, Callable[[], Any]]:
    root = store(rlio.SampleBatch(obs=np.zeros((50, 2)), t=np.arange(50)))
    put_file(f"{tmp}/a.json", GOOD + b"\n" + GOOD)
    put_file(f"{tmp}/b.json", GOOD)
    return {
        "dataset": lambda: rlio.DatasetReader(root, batch_size=7, shuffle=True, seed=0, epochs=3),
        "recorded": lambda: rlio.DatasetReader(root, batch_size=7),
        "json": lambda: rlio.JsonReader(tmp, shuffle=True, seed=1, batch_size=3),
        "json in order": lambda: rlio.JsonReader(tmp, epochs=2),
        "mixed": lambda: rlio.MixedInput(
            [(rlio.DatasetReader(root, seed=0), 1), (rlio.DatasetReader(root, batch_size=3), 2)],
            batch_size=6,
            seed=0,
        ),
        "shuffled": lambda: rlio.ShuffledInput(rlio.DatasetReader(root, batch_size=3), 4, seed=0),
    }


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["dataset", "recorded", "json", "json in order", "mixed", "shuffled"])
@pytest.mark.parametrize("count", sizes(60, 20_000))
def test_states_with_absurd_values_are_state_errors_or_load_and_go_on(count: int, kind: str) -> None:
    open_reader = readers(fresh_root())[kind]
    with open_reader() as reader:
        reader.sample()
        reader.sample(2)
        state = json.loads(json.dumps(reader.state_dict()))

    def use(changed: Any) -> None:
        with open_reader() as reader:
            try:
                reader.load_state_dict(changed)
            except StateError:
                return
            try:
                reader.sample()
            except rlio.EndOfData:
                return

    hammer(count, 11, lambda rng: other_json(state, rng), use)


def test_the_writer_of_the_corpus_is_one() -> None:
    assert files(store(rlio.SampleBatch(t=[1]), writer_id=WRITER))
