"""JSON shards: damage costs the line that it is in, is counted once, and never gives wrong rows."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from further import further
from growing_data import publish_shard

import rlio
from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.catalog.listing import ShardRef
from rlio.catalog.names import schema_path
from rlio.errors import CorruptData, MissingColumn, UnsafeData
from rlio.limits import Limits
from rlio.schemas.json_lines import encode_line
from rlio.schemas.schema import Schema
from rlio.source import json_shard
from rlio.source.json_shard import JsonShard, schema_lookup
from rlio.source.shards import open_shard
from rlio.storage.filesystem import Storage
from rlio.testing.readers import assert_same
from rlio.writers.json_writer import JsonWriter

COMPRESSIONS = [None, "zstd"]


def steps(rows: int, first: int = 0) -> SampleBatch:
    t = np.arange(first, first + rows)
    return SampleBatch(
        obs=(t[:, None] / 3).astype(np.float32),
        rewards=t.astype(np.float32),
        terminateds=t % 4 == 3,
        eps_id=t // 4,
        t=t,
    )


def stored(
    root: Path, compression: str | None, sizes: tuple[int, ...] = (3, 2, 4)
) -> tuple[Storage, ShardRef]:
    """A shard with a line of each size, its rows numbered in ``t``."""
    with JsonWriter(root, compression=compression, writer_id="w") as writer:
        for i, size in enumerate(sizes):
            writer.write(steps(size, sum(sizes[:i])))
    dataset = rlio.open_dataset(root)
    (segment,) = dataset.segments
    return dataset.storage, segment.ref


def damaged(storage: Storage, ref: ShardRef, data: bytes) -> ShardRef:
    """``data`` under the shard's name, as the disk would give it."""
    # Not through the storage: it would wait for the disk a thousand times.
    Path(storage.uri_of(ref.path)).write_bytes(data)
    return ref


def readable(shard: Any) -> tuple[list[int], int]:
    """The rows that can be read, by number, and how many are declared lost."""
    found, lost = [], 0
    for index, rows in enumerate(shard.rows):
        try:
            batch = shard.read(index)
        except CorruptData:
            lost += rows
            continue
        assert len(batch) == rows
        numbers = batch["t"].tolist()
        assert_same(batch, steps(len(numbers), numbers[0]), "rows that were read")
        found += numbers
    return found, lost


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_line_is_a_group(tmp_path: Path, compression: str | None) -> None:
    shard = open_shard(*stored(tmp_path, compression))
    assert isinstance(shard, JsonShard)
    assert (shard.rows, shard.units) == ([3, 2, 4], [3, 2, 4])
    assert_same(shard.read(1), steps(2, 3), "the second line")
    assert list(shard.read(2, columns=["t"])) == ["t"]
    with pytest.raises(MissingColumn):
        shard.read(0, columns=["nope"])
    assert shard.provenance["versions"]["rlio"]


def test_units_are_sequences_or_joint_steps(tmp_path: Path) -> None:
    with JsonWriter(tmp_path / "s") as writer:
        writer.write(SampleBatch(obs=np.zeros(5), seq_lens=[2, 3], state_in_0=np.zeros((2, 4))))
    with JsonWriter(tmp_path / "m") as writer:
        writer.write(MultiAgentBatch({"a": steps(3), "b": steps(2)}, 9))
    for name, units in (("s", 2), ("m", 3)):
        dataset = rlio.open_dataset(tmp_path / name)
        shard = dataset.open_shard(dataset.segments[0])
        assert (shard.rows, shard.units) == ([5], [units])


@pytest.mark.usefixtures("stopped_clock")
def test_streams_are_those_of_the_parquet_shard_of_the_same_rows(tmp_path: Path) -> None:
    tables = []
    for name, kind in (("json", JsonWriter), ("parquet", rlio.ParquetWriter)):
        with kind(tmp_path / name) as writer:
            for first in (0, 3, 6):
                writer.write(steps(3, first))
        dataset = rlio.open_dataset(tmp_path / name)
        tables.append(dataset.open_shard(dataset.segments[0]).streams)
    assert tables[0] == tables[1]
    assert tables[0].rows == [4, 4, 1]


@pytest.mark.few(1)
@pytest.mark.parametrize("step", [5, *further(1)])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_no_flipped_bit_gives_wrong_rows_and_most_cost_one_line(
    tmp_path: Path, compression: str | None, step: int
) -> None:
    storage, ref = stored(tmp_path, compression)
    data = storage.read(ref.path)
    schemas = schema_lookup(storage)
    whole = [*range(9)]
    for place in range(0, len(data), step):
        flipped = bytearray(data)
        flipped[place] ^= 1 << (place % 8)
        shard = JsonShard(storage, damaged(storage, ref, bytes(flipped)), schemas)
        found, lost = readable(shard)
        assert sum(shard.rows) == 9
        assert len(found) + lost == 9, f"byte {place}: {found} and {lost} lost"
        assert found == [number for number in whole if number in found]
        # A flipped line end joins two lines; all else hits one, or none, where it is the provenance.
        assert lost in (0, 2, 3, 4, 5, 6), f"byte {place}"


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_damage_in_one_line_leaves_the_others(tmp_path: Path, compression: str | None) -> None:
    """Rule 4.1 of docs/format.md."""
    storage, ref = stored(tmp_path, compression)
    clean = open_shard(storage, ref)
    data = bytearray(storage.read(ref.path))
    middle = clean._lines[1]  # type: ignore[attr-defined]  # Where the lines are is nobody's business else.
    data[middle.start + 5 : middle.stop - 5] = bytes(middle.stop - middle.start - 10)
    shard = open_shard(storage, damaged(storage, ref, bytes(data)))
    assert readable(shard) == ([0, 1, 2, 5, 6, 7, 8], 2)
    with pytest.raises(CorruptData, match="2 rows are lost") as caught:
        shard.read(1)
    assert caught.value.uri == storage.uri_of(ref.path)
    assert caught.value.record == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_shard_cut_anywhere_is_no_shard(tmp_path: Path, compression: str | None) -> None:
    storage, ref = stored(tmp_path, compression, (2, 1))
    data = storage.read(ref.path)
    for end in range(len(data)):
        damaged(storage, ref, data[:end])
        with pytest.raises(CorruptData, match="torn"):
            open_shard(storage, ref)
    damaged(storage, ref, data + b"\n")
    with pytest.raises(CorruptData, match="torn"):
        open_shard(storage, ref)


@pytest.mark.few(1)
@pytest.mark.parametrize("step", [5, *further(1)])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_zeros_from_anywhere_on_leave_the_lines_before(
    tmp_path: Path, compression: str | None, step: int
) -> None:
    """What a filesystem leaves of a file whose last blocks were lost."""
    storage, ref = stored(tmp_path, compression)
    data = storage.read(ref.path)
    ends = [line.stop for line in open_shard(storage, ref)._lines]  # type: ignore[attr-defined]
    for start in range(0, len(data), step):
        zeroed = data[:start] + bytes(len(data) - start)
        damaged(storage, ref, zeroed)
        # (A line may end in zeros.)
        whole = sum(zeroed[:stop] == data[:stop] for stop in ends)
        if not whole:
            with pytest.raises(CorruptData, match="all 9 rows are lost"):
                open_shard(storage, ref)
        else:
            rows = sum((3, 2, 4)[:whole])
            assert readable(open_shard(storage, ref)) == ([*range(rows)], 9 - rows)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_reader_that_skips_counts_each_lost_row_once(
    tmp_path: Path, compression: str | None, shuffle: bool
) -> None:
    storage, ref = stored(tmp_path, compression)
    data = bytearray(storage.read(ref.path))
    data[-40] ^= 1
    damaged(storage, ref, bytes(data))
    options: dict[str, Any] = {"shuffle": True, "seed": 1} if shuffle else {}
    with rlio.DatasetReader(tmp_path, batch_size=2, epochs=2, on_error="skip", **options) as reader:
        numbers = [t for batch in reader for t in batch["t"].tolist()]
    assert sorted(numbers) == sorted([0, 1, 2, 3, 4] * 2)
    assert reader.skipped == 4
    with (
        rlio.DatasetReader(tmp_path, batch_size=2, epochs=1, **options) as reader,
        pytest.raises(CorruptData, match="4 rows are lost"),
    ):
        list(reader)


def test_a_large_shard_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_shard, "_HELD_BYTES", 0)
    monkeypatch.setattr(json_shard, "_BLOCK_BYTES", 1000)
    storage, ref = stored(tmp_path, None, (3,) * 20)
    shard = open_shard(storage, ref)
    for index in (*range(20), 3, 19, 0):
        assert_same(shard.read(index), steps(3, 3 * index), f"line {index}")


def test_a_shard_over_the_limit_is_not_loaded(tmp_path: Path) -> None:
    _, ref = stored(tmp_path, None)
    storage = Storage.open(tmp_path, limits=Limits(shard_bytes=100))
    with pytest.raises(UnsafeData, match="more than 100"):
        open_shard(storage, ref)


def test_a_shard_of_too_many_lines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, ref = stored(tmp_path, None)
    monkeypatch.setattr(json_shard, "_MAX_LINES", 2)
    with pytest.raises(UnsafeData, match="more than 2 lines in a shard"):
        open_shard(storage, ref)


def forged(root: Path, data: bytes, *, rows: int, suffix: Any = "jsonl") -> tuple[Storage, ShardRef]:
    """A shard whose name is right and whose content is a stranger's."""
    storage = Storage.open(root)
    schema = Schema.of(steps(1))
    storage.put(schema_path(schema.hash), schema.text.encode())
    return storage, publish_shard(storage, "x", data, first=0, rows=rows, suffix=suffix, footer_crc32=0)


def test_a_shard_that_lies_is_corrupt_as_a_whole(tmp_path: Path) -> None:
    schema = Schema.of(steps(1))
    line = encode_line(steps(2), schema) + b"\n"
    for data, rows, message in (
        (line, 3, "hold 2 rows and the shard's name says 3"),
        (line * 2, 3, "hold 4 rows"),
        (b"\n" * 50, 3, "no line can be read"),
        (b"{}\n", 3, "no line can be read"),
        (line + b"\n", 2, "bytes .* no line"),
        (line + b"{}\n", 3, "bytes .* no line"),
    ):
        with pytest.raises(CorruptData, match=message):
            open_and_read(*forged(tmp_path, data, rows=rows))


def open_and_read(storage: Storage, ref: ShardRef) -> None:
    shard = open_shard(storage, ref)
    for index in range(len(shard.rows)):
        shard.read(index)


def test_a_line_without_its_schema_says_what_is_missing(tmp_path: Path) -> None:
    storage, ref = stored(tmp_path, None)
    for entry in storage.list("_schema"):
        storage.remove(entry.path)
    with pytest.raises(CorruptData, match="schema, which is not there"):
        open_shard(storage, ref)


def test_a_frame_that_would_inflate_is_not_inflated(tmp_path: Path) -> None:
    line = encode_line(steps(2), Schema.of(steps(1)))
    head = line[: line.index(b'"columns"')]
    bomb = zstandard.ZstdCompressor().compress(head + bytes(200 << 20))
    good = zstandard.ZstdCompressor().compress(line + b"\n")
    shard = open_shard(*forged(tmp_path, good + bomb, rows=4, suffix="jsonl.zst"))
    assert len(shard.read(0)) == 2
    with pytest.raises(CorruptData):
        shard.read(1)


@pytest.mark.usefixtures("stopped_clock")
def test_a_compressed_shard_is_what_zstd_makes_of_lines(tmp_path: Path) -> None:
    plain, packed = stored(tmp_path / "a", None), stored(tmp_path / "b", "zstd:7")
    lines = plain[0].read(plain[1].path)
    frames = packed[0].read(packed[1].path)
    with zstandard.ZstdDecompressor().stream_reader(frames, read_across_frames=True) as reader:
        assert reader.read() == lines
    assert packed[1].name.suffix == "jsonl.zst"
    assert zlib.crc32(frames) == packed[1].name.crc32
