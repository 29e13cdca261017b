"""`JsonReader` on JSON that rlio wrote: every line once, as it was written, whatever is damaged beside it."""

from __future__ import annotations

import json
import shutil
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import gymnasium as gym
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import rlio
from rlio import JsonReader, JsonWriter, MultiAgentBatch, ParquetWriter, Roll, SampleBatch, concat_samples
from rlio.errors import CorruptData, DataNotFound, EndOfData, MissingColumn, OptionError, SchemaError
from rlio.interfaces import Batch
from rlio.limits import Limits
from rlio.readers import shard_lines
from rlio.readers.shard_lines import read_frames
from rlio.schemas import json_columns
from rlio.storage import ShardName
from rlio.storage.json_shard import _frames
from rlio.storage.listing import Patience
from rlio.testing import ReaderTests, assert_resumes
from rlio.testing.readers import assert_same

SIZES = (3, 1, 4, 2, 5)
COMPRESSIONS = [None, "zstd"]


def rows(count: int, first: int = 0, **more: Any) -> SampleBatch:
    """Rows that know their number, in ``t``, of many dtypes."""
    t = np.arange(first, first + count)
    infos = np.empty(count, object)
    infos[:] = [{"n": int(n), "x": np.float32([n])} for n in t]
    return SampleBatch(
        obs={"image": np.repeat(t, 4).reshape(-1, 2, 2).astype(np.uint8), "pair": (t / 3, t.astype("f2"))},
        actions=(t % 3).astype(np.int32),
        rewards=(t / 3).astype(np.float32),
        terminateds=t % 4 == 3,
        t=t,
        infos=infos,
        **more,
    )


def write(root: Path | str, *batches: Batch, lines: int | None = None, **options: Any) -> None:
    """Store each batch as a line; a shard has ``lines`` of them."""
    options.setdefault("writer_id", "w0")
    with JsonWriter(root, roll=Roll(max_seconds=None), **options) as writer:
        for number, batch in enumerate(batches):
            writer.write(batch)
            if lines is not None and number % lines == lines - 1:
                writer.flush()


def records(sizes: tuple[int, ...] = SIZES, first: int = 0) -> list[SampleBatch]:
    ends = np.cumsum((first, *sizes)).tolist()
    return [rows(size, at) for size, at in zip(sizes, ends, strict=False)]


def shards(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("data/*/*") if ".jsonl" in path.name)


def numbers(reader: JsonReader) -> list[int]:
    with reader:
        return [int(t) for batch in reader for t in batch["t"]]


def assert_records(found: list[Batch], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


# ---- whole data sets ----


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_each_write_comes_back_as_one_record_to_the_dtype(tmp_path: Path, compression: str | None) -> None:
    write(tmp_path, *records(), lines=2, compression=compression, compress_columns=["rewards"])
    assert len(shards(tmp_path)) == 3
    with JsonReader(tmp_path, epochs=2) as reader:
        assert_records(list(reader), records() * 2)
        assert reader.blank_lines == reader.skipped == 0


def test_writers_come_by_id_and_their_rows_ascending(tmp_path: Path) -> None:
    write(tmp_path, *records(first=100), writer_id="w10", lines=1)
    write(tmp_path, *records(), writer_id="w2", lines=2, compression="zstd")
    found = numbers(JsonReader(tmp_path, epochs=1))
    assert found == [*range(100, 115), *range(15)]
    with rlio.DatasetReader(tmp_path, epochs=1) as reader:
        assert concat_samples(list(reader))["t"].tolist() == found


class TestRoot(ReaderTests):
    """Any reader's contract, over shards of both kinds."""

    root: ClassVar[str] = "memory://json-shards-contract"
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def written(self) -> None:
        if not fsspec.filesystem("memory").exists(self.root):
            write(self.root, *records((2, 5, 1)), lines=2, writer_id="w0")
            write(self.root, *records((4, 3, 2, 3), first=8), lines=3, writer_id="w1", compression="zstd")

    def make_reader(self) -> JsonReader:
        return JsonReader(self.root, epochs=1, **self.options)

    def expected_rows(self) -> SampleBatch:
        return rows(20)


class TestRootShuffled(TestRoot):
    ordered = False
    options: ClassVar[dict[str, Any]] = {"shuffle": True, "seed": 3}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_it_resumes_before_every_batch_over_epochs(
    tmp_path: Path, shuffle: bool, compression: str | None
) -> None:
    write(tmp_path, *records(), lines=2, compression=compression)
    for n in (None, 4):
        assert_resumes(lambda: JsonReader(tmp_path, epochs=3, shuffle=shuffle, seed=1), n, batches=30)


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_get_each_record_once(tmp_path: Path, shuffle: bool) -> None:
    write(tmp_path, *records((1,) * 11), lines=4, compression="zstd")
    found = [
        numbers(JsonReader(tmp_path, epochs=1, shuffle=shuffle, seed=5, shard=(rank, 3))) for rank in range(3)
    ]
    assert sorted(t for own in found for t in own) == list(range(11))
    assert [len(own) for own in found] == [4, 4, 3]


def test_batches_are_exact_whatever_the_lines_hold(tmp_path: Path) -> None:
    write(tmp_path, *records(), lines=2)
    with JsonReader(tmp_path, batch_size=4, epochs=2) as reader:
        found = list(reader)
    assert [len(batch) for batch in found] == [4] * 7 + [2]
    assert_same(concat_samples(found), concat_samples([rows(15), rows(15)]))


def test_other_columns_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, *records(), compression="zstd")
    decoded = []
    load = json_columns.load_column

    def spy(written: Any, spec: Any, **options: Any) -> Any:
        decoded.append(spec)
        return load(written, spec, **options)

    monkeypatch.setattr("rlio.schemas.json_lines.load_column", spy)
    with JsonReader(tmp_path, columns=["t", "rewards"], epochs=1) as reader:
        found = list(reader)
    assert [set(batch) for batch in found] == [{"t", "rewards"}] * 5
    assert concat_samples(found)["rewards"].dtype == np.float32
    assert {spec.dtype for spec in decoded} == {"<i8", "<f4"}
    with pytest.raises(MissingColumn, match=r"no column 'vf_preds'; the shard has .* \[in .*record 1"):
        JsonReader(tmp_path, columns=["t", "vf_preds"]).sample()


def test_batches_of_several_policies_keep_environment_steps(tmp_path: Path) -> None:
    eps = {"eps_id": np.zeros(4, np.int64)}
    batches = [
        MultiAgentBatch({"a": rows(4, first, **eps), "b": rows(4, first, **eps)}, 4) for first in (0, 4)
    ]
    write(tmp_path, *batches)
    with JsonReader(tmp_path, epochs=1) as reader:
        assert_records(list(reader), batches)
    with JsonReader(tmp_path, epochs=1, batch_size=3) as reader:
        assert [len(batch["b"]) for batch in reader] == [3, 3, 2]


def test_sizes_count_sequences_where_all_records_have_them(tmp_path: Path) -> None:
    batches = [
        SampleBatch(t=np.arange(6), seq_lens=np.int32([1, 3, 2]), state_in_0=np.float32([[1], [2], [3]])),
        SampleBatch(t=np.arange(6, 9), seq_lens=np.int32([2, 1]), state_in_0=np.float32([[4], [5]])),
    ]
    write(tmp_path, *batches)
    with JsonReader(tmp_path, epochs=1, batch_size=2) as reader:
        assert reader.unit == "sequences"
        assert [batch["seq_lens"].tolist() for batch in reader] == [[1, 3], [2, 2], [1]]
    with JsonReader(tmp_path, epochs=1, columns=["state_in_0", "t"]) as reader:
        assert [set(batch) for batch in reader] == [{"state_in_0", "t", "seq_lens"}] * 2
    with JsonReader(tmp_path, epochs=1, columns=["t"], batch_size=4) as reader:
        assert reader.unit == "steps"
        assert [len(batch) for batch in reader] == [4, 4, 1]


def test_a_root_with_parquet_shards_asks_for_the_other_reader(tmp_path: Path) -> None:
    write(tmp_path, *records())
    with ParquetWriter(tmp_path, writer_id="w1") as writer:
        writer.write(rows(3))
    with pytest.raises(OptionError, match=r"DatasetReader.*\.parquet"):
        JsonReader(tmp_path)
    (parquet,) = tmp_path.glob("data/w1/*.parquet")
    with pytest.raises(OptionError, match="DatasetReader"):
        JsonReader([parquet, *shards(tmp_path)])
    # The JSON shards alone are there to be read.
    assert numbers(JsonReader(tmp_path / "data" / "w0", epochs=1)) == list(range(15))


def test_a_root_without_shards_holds_no_record(tmp_path: Path) -> None:
    (tmp_path / "_rlio.json").write_text('{"format": 0}')
    with pytest.raises(DataNotFound, match="no rows"):
        JsonReader(tmp_path)


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    write(tmp_path, *records())
    (tmp_path / "_rlio.json").write_text('{"format": 7}')
    for value in (tmp_path, tmp_path / "data" / "w0"):
        with pytest.raises(OptionError, match="format"):
            JsonReader(value)


def test_read_opens_roots_with_the_reader_of_both_kinds_and_shards_with_this_one(tmp_path: Path) -> None:
    write(tmp_path, *records(), compression="zstd")
    with rlio.read(tmp_path, epochs=1) as reader:
        assert isinstance(reader, rlio.DatasetReader)
    with rlio.read(str(tmp_path / "data/*/*.jsonl.zst"), epochs=1) as reader:
        assert isinstance(reader, JsonReader)
        assert_records(list(reader), records())


# ---- files ----


@pytest.mark.parametrize("pattern", ["data/*/*.jsonl*", "data/w0", "data/w0/{0}"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_shards_may_be_named_as_files(tmp_path: Path, pattern: str, compression: str | None) -> None:
    write(tmp_path, *records(), compression=compression)
    name = shards(tmp_path)[0].name
    for options in ({}, {"shuffle": True, "seed": 0}):
        with JsonReader(tmp_path / pattern.format(name), epochs=1, **options) as reader:  # type: ignore[arg-type]  # any of them
            found = sorted(reader, key=lambda batch: int(batch["t"][0]))
        assert_records(found, records())


def test_uris_work_as_paths_do() -> None:
    write("memory://shards-by-uri", *records(), lines=2, compression="zstd")
    for value in ("memory://shards-by-uri", "memory://shards-by-uri/data/*/*.jsonl.zst"):
        with JsonReader(value, epochs=1) as reader:
            assert_records(list(reader), records())


def test_a_single_shard_of_many_is_read_alone(tmp_path: Path) -> None:
    write(tmp_path, *records(), lines=2)
    assert numbers(JsonReader(shards(tmp_path)[1], epochs=1)) == list(range(4, 10))


def test_naming_a_data_set_and_its_shards_reads_each_record_once(tmp_path: Path) -> None:
    write(tmp_path, *records(), lines=2)
    for value in ([tmp_path, *shards(tmp_path)], [*shards(tmp_path), tmp_path / "_rlio.json"]):
        assert numbers(JsonReader(value, epochs=1)) == list(range(15))


def test_a_shard_without_its_schema_is_refused_with_the_place_that_is_needed(tmp_path: Path) -> None:
    write(tmp_path / "root", *records())
    (shard,) = shards(tmp_path / "root")
    alone = shutil.copy(shard, tmp_path / shard.name)
    with pytest.raises(DataNotFound, match=r"<root>/data/<writer>/<shard> and <root>/_schema/"):
        JsonReader(alone)
    shutil.rmtree(tmp_path / "root" / "_schema")
    with pytest.raises(DataNotFound, match="there is no _schema/ beside data/"):
        JsonReader(shard)
    (tmp_path / "root" / "_schema").mkdir()
    with pytest.raises(CorruptData, match=r"needs this schema, which is not there.*record 1"):
        JsonReader(shard).sample()


def test_a_shard_under_another_name_is_recognised_and_refused(tmp_path: Path) -> None:
    write(tmp_path, *records())
    (shard,) = shards(tmp_path)
    for copy in (shard.with_name("copy.jsonl"), tmp_path / "copy.json"):
        shutil.copy(shard, copy)
        for on_error in ("raise", "skip"):
            with pytest.raises(OptionError, match="name of a shard"):
                JsonReader(copy, on_error=on_error).sample()  # type: ignore[arg-type]  # a literal
    packed = tmp_path / "copy.jsonl.zst"
    packed.write_bytes(zstandard.compress(shard.read_bytes()))
    with pytest.raises(OptionError, match="name of a shard"):
        JsonReader(packed).sample()


# ---- beside RLlib's files ----


def rllib(path: Path, count: int, first: int, **more: Any) -> Path:
    t = np.arange(first, first + count)
    line = {"type": "SampleBatch", "t": t.tolist(), "rewards": (t / 4).tolist(), **more}
    path.write_text(json.dumps(line) + "\n")
    return path


@pytest.mark.parametrize("shuffle", [False, True])
def test_rllibs_files_and_ours_are_read_from_one_list(tmp_path: Path, shuffle: bool) -> None:
    write(tmp_path / "m", *records())
    early, late = rllib(tmp_path / "a.json", 2, 100), rllib(tmp_path / "z.json", 3, 200)
    options: dict[str, Any] = {"columns": ["t", "rewards"], "shuffle": shuffle, "seed": 0, "epochs": 1}
    for ours in (tmp_path / "m", str(tmp_path / "m/data/*/*.jsonl")):
        with JsonReader([late, ours, early], **options) as reader:
            found = list(reader)
        joined = concat_samples(found)
        assert (joined["rewards"].dtype, joined["t"].dtype) == (np.float32, np.int64)
        expected = [100, 101, *range(15), 200, 201, 202]
        assert (sorted(joined["t"]) if shuffle else joined["t"].tolist()) == (
            sorted(expected) if shuffle else expected
        )
        assert_resumes(lambda ours=ours: JsonReader([late, ours, early], **options), 4)  # type: ignore[misc]  # a default binds it


def test_floats_of_rllibs_files_are_not_rounded_to_our_dtypes(tmp_path: Path) -> None:
    write(tmp_path / "m", *records())
    path = rllib(tmp_path / "a.json", 1, 0, rewards=[0.1])
    with pytest.raises(SchemaError, match=r"float64 where the first record has float32.*a\.json"):
        JsonReader([path, tmp_path / "m"], columns=["t", "rewards"]).sample()
    path = rllib(tmp_path / "a.json", 1, 0, rewards=[1e300])
    with pytest.raises(SchemaError, match=r"float64 where the first record has float32"):
        JsonReader([path, tmp_path / "m"], columns=["t", "rewards"]).sample()


# ---- shards that overlap ----


def relined(path: Path, first: int, lines: list[bytes], count: int) -> Path:
    """Another shard in the folder of ``path``: with those lines, and rows from ``first`` on."""
    data = b"".join(lines)
    suffix: Any = "jsonl.zst" if path.name.endswith(".zst") else "jsonl"
    name = ShardName(
        first=first,
        rows=count,
        size=len(data),
        crc32=zlib.crc32(data),
        footer_crc32=0,
        suffix=suffix,
    )
    target = path.with_name(name.format())
    target.write_bytes(data)
    return target


def pieces(path: Path) -> list[bytes]:
    """The lines or frames of a shard, as they lie there."""
    if path.suffix == ".zst":
        data = path.read_bytes()
        return [data[start:stop] for start, stop in _frames(data)]
    return path.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("first", "line", "rest"), [(5, 2, 7), (1, 0, 7), (3, 1, 8)])
def test_rows_of_shards_that_overlap_come_once(
    tmp_path: Path, compression: str | None, shuffle: bool, first: int, line: int, rest: int
) -> None:
    # Lines of rows 0-2, 3, 4-7, 8-9, 10-14. One shard has the first three; the other those from some line on,
    # as rows from ``first`` on, of which those before row 8 are superseded: in the middle of a line, or not.
    write(tmp_path, *records(), compression=compression)
    (whole,) = shards(tmp_path)
    provenance, *lines = pieces(whole)
    relined(whole, 0, [provenance, *lines[:3]], 8)
    relined(whole, first, [provenance, *lines[line:]], sum(SIZES[line:]))
    whole.unlink()
    expected = [*range(8), *range(rest, 15)]
    options: dict[str, Any] = {"epochs": 1, "shuffle": shuffle, "seed": 1}
    for value in (tmp_path, tmp_path / "data/w0"):
        found = numbers(JsonReader(value, **options))
        assert sorted(found) == sorted(expected) if shuffle else found == expected
        assert_resumes(lambda value=value: JsonReader(value, **options), 3)  # type: ignore[misc]  # a default binds it
    with rlio.DatasetReader(tmp_path, epochs=1) as reader:
        assert concat_samples(list(reader))["t"].tolist() == expected


def test_a_shard_that_a_larger_one_covers_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, *records())
    (whole,) = shards(tmp_path)
    relined(whole, 0, pieces(whole)[:3], 4).write_bytes(b"x" * len(b"".join(pieces(whole)[:3])))
    assert numbers(JsonReader(str(tmp_path / "data/*/*"), epochs=1)) == list(range(15))


def test_sequences_are_not_cut_where_shards_overlap(tmp_path: Path) -> None:
    batch = SampleBatch(t=np.arange(4), seq_lens=np.int32([2, 2]))
    write(tmp_path, batch, batch)
    (whole,) = shards(tmp_path)
    provenance, *lines = pieces(whole)
    relined(whole, 0, [provenance, lines[0]], 4)
    relined(whole, 2, [provenance, *lines], 8)
    whole.unlink()
    with JsonReader(tmp_path, epochs=1) as reader:
        assert reader.sample()["t"].tolist() == [0, 1, 2, 3]
        with pytest.raises(CorruptData, match=r"only rows from number 2 on .* cannot be cut.*record 1"):
            reader.sample()
    with JsonReader(tmp_path, epochs=1, on_error="skip") as reader:
        assert len(list(reader)) == 2
        assert reader.skipped == 1


# ---- damage ----


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_damaged_line_is_one_lost_record_and_the_others_come(
    tmp_path: Path, compression: str | None, shuffle: bool
) -> None:
    write(tmp_path, *records(), compression=compression)
    (shard,) = shards(tmp_path)
    lines = pieces(shard)
    middle = len(b"".join(lines[:3])) + len(lines[3]) // 2
    data = bytearray(shard.read_bytes())
    data[middle] ^= 1
    shard.write_bytes(data)
    with JsonReader(shard, epochs=2, on_error="skip", shuffle=shuffle, seed=0) as reader:
        found = [int(t) for batch in reader for t in batch["t"]]
        assert reader.skipped == 1
        (error,) = reader.errors
    assert sorted(found) == sorted([*range(4), *range(8, 15)] * 2)
    assert (error.uri, error.record) == (str(shard), 3)
    with pytest.raises(CorruptData, match=rf"CRC-32.*{shard.name}, record 3"):
        numbers(JsonReader(tmp_path, epochs=1, shuffle=shuffle, seed=0))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_damaged_byte_costs_at_most_the_lines_that_it_touches(data: st.DataObject) -> None:
    packed = data.draw(st.booleans())
    root = f"memory://flipped-{packed}"
    fs = fsspec.filesystem("memory")
    if not fs.exists(root):
        write(root, *records(), compression="zstd" if packed else None)
    (path,) = fs.glob(f"{root}/data/*/*.jsonl*")
    clean = fs.cat_file(path)
    at = data.draw(st.integers(0, len(clean) - 1))
    new = data.draw(st.integers(0, 255).filter(lambda value: value != clean[at]))
    starts = np.cumsum([len(p) for p in _pieces_of(clean, packed)])
    line = int(np.searchsorted(starts, at, side="right"))
    fs.pipe_file(path, clean[:at] + bytes([new]) + clean[at + 1 :])
    try:
        with JsonReader(root, epochs=1, on_error="skip") as reader:
            found = list(reader)
            skipped = reader.skipped
    finally:
        fs.pipe_file(path, clean)
    # A line end that is gone joins two lines.
    lost = {line, line + 1} if at == starts[line] - 1 else {line}
    expected = [batch for number, batch in enumerate(records(), 1) if number not in lost]
    kept = {int(batch["t"][0]): batch for batch in found}
    for batch in expected:
        assert_same(kept.pop(int(batch["t"][0])), batch)
    for first, batch in kept.items():  # A byte may make no difference: white space at the line's end.
        assert_same(batch, next(b for b in records() if b["t"][0] == first))
    assert skipped <= 2
    assert len(found) + skipped >= 5 - (at == starts[line] - 1)


def _pieces_of(data: bytes, packed: bool) -> list[bytes]:
    return [data[a:b] for a, b in _frames(data)] if packed else data.splitlines(keepends=True)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_line_end_lost_after_the_provenance_loses_the_first_record_and_says_so(
    tmp_path: Path, compression: str | None
) -> None:
    write(tmp_path, *records(), compression=compression)
    (shard,) = shards(tmp_path)
    first = len(pieces(shard)[0])
    data = bytearray(shard.read_bytes())
    data[first - 1] ^= 0x40
    shard.write_bytes(data)
    with JsonReader(tmp_path, epochs=1, on_error="skip") as reader:
        found = [int(t) for batch in reader for t in batch["t"]]
        # A frame ends by itself, whatever its checksum says.
        assert reader.skipped == (0 if compression else 1)
    assert found == list(range(0 if compression else 3, 15))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_torn_shard_says_so_wherever_it_was_cut(
    tmp_path: Path, compression: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlio.storage.listing.PATIENCE", Patience(seconds=0))  # Nobody is uploading it.
    write(tmp_path, *records(), compression=compression)
    (shard,) = shards(tmp_path)
    data, ends = shard.read_bytes(), np.cumsum([len(piece) for piece in pieces(shard)])
    for size in {*range(1, len(data), 37), *ends[:-1].tolist(), *(ends - 1).tolist()}:
        shard.write_bytes(data[:size])
        # The last line is there without its end.
        whole = int(np.searchsorted(ends, size, side="right"))
        intact = whole + (not compression and size + 1 in ends)
        with JsonReader(shard, epochs=1, on_error="skip") as reader:
            try:
                found = list(reader)
            except DataNotFound:  # Not even the beginning of a record is left.
                assert size <= ends[0]
                found = []
            assert len(found) == max(intact - 1, 0), size
            assert reader.skipped == 1, size
        with pytest.raises(CorruptData):
            numbers(JsonReader(shard, epochs=1))
        with pytest.raises(CorruptData, match="rows are lost"):
            JsonReader(tmp_path)
        if size in ends:
            with pytest.raises(CorruptData, match=rf"has {size} bytes and its name says {len(data)}"):
                numbers(JsonReader(shard, epochs=1))


def test_missing_shards_of_a_data_set_raise_or_are_counted(tmp_path: Path) -> None:
    write(tmp_path, *records(), lines=1)
    shards(tmp_path)[1].unlink()
    with pytest.raises(CorruptData, match=r"rows 3 to 3 .* are missing"):
        JsonReader(tmp_path)
    with JsonReader(tmp_path, on_error="skip", epochs=1) as reader:
        assert [len(batch) for batch in reader] == [3, 4, 2, 5]
        assert reader.skipped == 1
    # Who names files names those that are there.
    assert len(numbers(JsonReader(tmp_path / "data/w0", epochs=1))) == 14


def test_writers_with_unlike_columns_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path, *records(), writer_id="w0")
    write(tmp_path, rows(2, vf_preds=np.float32([1, 2])), writer_id="w1")
    with pytest.raises(SchemaError, match=r"not in the first record.*column vf_preds"):
        numbers(JsonReader(tmp_path, epochs=1))
    assert len(numbers(JsonReader(tmp_path, epochs=1, columns=["t", "obs"]))) == 17


def test_lines_above_the_limit_are_refused_before_they_are_inflated(tmp_path: Path) -> None:
    big = SampleBatch(t=np.zeros(5000, np.int64), obs=np.zeros(5000))
    write(tmp_path, SampleBatch(t=[1], obs=[0.0]), big, SampleBatch(t=[2], obs=[0.0]), compression="zstd")
    options: dict[str, Any] = {"epochs": 1, "limits": Limits(line_bytes=2000)}
    for shuffle in (False, True):
        with JsonReader(tmp_path, on_error="skip", shuffle=shuffle, seed=0, **options) as reader:
            assert sorted(int(t) for batch in reader for t in batch["t"]) == [1, 2]
            assert reader.skipped == 1
            assert "line_bytes" in reader.errors[0].message


# ---- frames ----


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=5), st.data())
def test_frames_are_found_in_pieces_as_in_the_whole(texts: list[bytes], data: st.DataObject) -> None:
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    stored = bytearray(b"".join(map(compressor.compress, texts)))
    for at in data.draw(st.lists(st.integers(0, max(len(stored) - 1, 0)), max_size=3)) if stored else []:
        stored[at] ^= data.draw(st.integers(1, 255))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_lines, "_CHUNK", data.draw(st.integers(1, 20)))
        found = list(read_frames(BytesIO(stored)))
        if found:
            start = data.draw(st.sampled_from(found))
            assert (
                list(read_frames(BytesIO(stored), offset=start.start, number=start.number))
                == found[start.number :]
            )
    assert [(line.start, line.end) for line in found] == list(_frames(bytes(stored)))
    assert [line.number for line in found] == list(range(len(found)))
    assert b"".join(line.data or b"" for line in found) == stored


def test_what_is_no_frame_is_not_kept_in_memory() -> None:
    found = list(read_frames(BytesIO(b"\x00" * (5 << 20)), limit=1 << 20))
    assert [line.data for line in found[:-1]] == [None] * (len(found) - 1)
    assert sum(line.size for line in found) == 5 << 20
    assert max(line.size for line in found) <= 3 << 20


def test_the_end_stays_the_end_of_the_data(tmp_path: Path) -> None:
    write(tmp_path, *records())
    with JsonReader(tmp_path, epochs=1) as reader:
        list(reader)
        with pytest.raises(EndOfData):
            reader.sample()


def test_a_data_set_without_rows_says_so_when_it_is_opened(tmp_path: Path) -> None:
    """Shuffled, it raised an IndexError; else it said nothing of rows that wait in a log."""
    with JsonWriter(tmp_path / "empty"):
        pass
    for options in ({}, {"shuffle": True, "seed": 1}, {"epochs": 1}):
        with pytest.raises(DataNotFound) as raised:
            JsonReader(tmp_path / "empty", **options)
        assert raised.value.uri is not None


def test_spaces_are_not_ignored_of_shards_that_have_their_own(tmp_path: Path) -> None:
    with JsonWriter(tmp_path / "set") as writer:
        writer.write(rows(5))
    spaces = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    with pytest.raises(OptionError, match="spaces"):
        JsonReader(tmp_path / "set", spaces=spaces)
