"""Lists of one length that are encoded without pyarrow are what pyarrow, and others, read from the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

import rlio
from rlio.limits import Limits
from rlio.schemas.fixed_pages import decode_fixed
from rlio.schemas.list_chunks import level_bytes
from rlio.schemas.parquet_metadata import measure_pages, parse_metadata
from rlio.schemas.thrift import (
    I16,
    I32,
    LIST,
    STRUCT,
    TEXT,
    CompactReader,
    Field,
    encode_int,
    encode_list,
    encode_struct,
    encode_text,
    raw_int,
    raw_struct,
)

RANDOM = np.random.default_rng(0)
DTYPES = ["f4", "f8", "i4", "i8", "u4", "u8", ">f4"]


def _numbers(dtype: str, *shape: int) -> NDArray[Any]:
    kind = np.dtype(dtype)
    return RANDOM.integers(0, 256, (*shape[:-1], shape[-1] * kind.itemsize), np.uint8).view(kind)


def _written(root: Path, columns: dict[str, NDArray[Any]], **options: Any) -> Path:
    with rlio.ParquetWriter(root, spool=None, **options) as writer:
        writer.write(rlio.SampleBatch(columns))
    (file,) = rlio.open_dataset(root).files()
    return Path(file)


def _columns(rows: int) -> dict[str, NDArray[Any]]:
    """Lists that we encode between columns that pyarrow does, by name."""
    columns: dict[str, NDArray[Any]] = {"a": np.arange(rows), "z": np.array(["text"] * rows)}
    for dtype in DTYPES:
        for length in (1, 8, 17):
            columns[f"{dtype[-2:]}-{length}-{len(columns)}"] = _numbers(dtype, rows, length)
    return columns | {"half": _numbers("f2", rows, 3), "flags": np.ones((rows, 3), bool)}


@pytest.mark.parametrize("rows", [1, 7, 8, 1000])
@pytest.mark.parametrize("compression", ["zstd:1", "zstd", "zstd:5", "zstd:-3", "zstd:22", "none"])
def test_pyarrow_reads_what_was_written_and_finds_every_checksum_right(
    tmp_path: Path, rows: int, compression: str
) -> None:
    columns = _columns(rows)
    table = pq.read_table(
        _written(tmp_path, columns, compression=compression), page_checksum_verification=True
    )
    for name, values in columns.items():
        if values.ndim == 2 and values.dtype != np.float16:
            found = table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            assert found.tobytes() == values.astype(values.dtype.newbyteorder("=")).tobytes(), name


def test_a_flipped_bit_in_such_a_page_fails_its_checksum(tmp_path: Path) -> None:
    file = _written(tmp_path, {"obs": _numbers("f4", 1000, 17)})
    data = bytearray(file.read_bytes())
    data[pq.read_metadata(file).row_group(0).column(0).data_page_offset + 500] ^= 1
    with pytest.raises(OSError, match="CRC"):
        pq.read_table(pa.BufferReader(bytes(data)), page_checksum_verification=True)


def test_the_footer_says_of_every_column_what_pyarrow_says_of_its_own(tmp_path: Path) -> None:
    columns = {
        "obs": _numbers("f4", 1000, 17),
        "rewards": _numbers("f4", 1000, 1)[:, 0],
        "b": _numbers("i8", 1000, 2),
    }
    file = _written(tmp_path, columns)
    ours = pq.read_metadata(file)
    sink = pa.BufferOutputStream()
    leaves = ["obs.list.element", "b.list.element", "rewards", "_next", "_stream"]
    pq.write_table(
        pq.read_table(file).cast(pq.read_schema(file)),
        sink,
        use_dictionary=["_batch"],
        use_byte_stream_split=leaves,
        compression="zstd",
        store_schema=False,
    )
    theirs = pq.read_metadata(pa.BufferReader(sink.getvalue()))
    assert ours.schema.equals(theirs.schema)
    group, other = ours.row_group(0), theirs.row_group(0)
    assert group.total_byte_size == sum(
        group.column(i).total_uncompressed_size for i in range(group.num_columns)
    )
    for index in range(group.num_columns):
        found, wanted = group.column(index), other.column(index)
        for what in ("path_in_schema", "physical_type", "num_values", "compression"):
            assert getattr(found, what) == getattr(wanted, what), what
        assert set(found.encodings) == set(wanted.encodings)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 16, 17, 512])
@pytest.mark.parametrize("rows", [1, 3, 8, 700])
def test_our_reader_takes_such_pages_up_by_itself(tmp_path: Path, rows: int, length: int) -> None:
    values = _numbers("f4", rows, length)
    data = _written(tmp_path, {"obs": values}).read_bytes()
    end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    (group,) = parse_metadata(data[end:-8], end=end, limits=Limits()).groups
    chunk = next(chunk for chunk in group.chunks if chunk.leaf.path[0] == "obs")
    view = memoryview(data)[chunk.start : chunk.stop]
    totals = measure_pages(view, chunk, limits=Limits())
    (page,) = totals.pages
    assert page.unpacked == len(level_bytes(rows, length)) + values.nbytes
    found = decode_fixed(view, chunk, totals, dtype=values.dtype, per_row=length, rows=rows)
    assert found is not None
    assert found.tobytes() == values.tobytes()


def test_a_footer_that_is_taken_apart_and_put_together_is_the_same() -> None:
    sink = pa.BufferOutputStream()
    table = pa.table({f"column {i}": pa.array([-i, None, 1 << i], pa.int64()) for i in range(40)})
    pq.write_table(table, sink, row_group_size=1)
    data = sink.getvalue().to_pybytes()
    footer = data[len(data) - 8 - int.from_bytes(data[-8:-4], "little") : -8]
    fields, end = raw_struct(footer)
    assert encode_struct(fields) == footer
    assert end == len(footer)
    fields, _ = raw_struct(footer, {4: {1: None}})
    groups = [group | {1: (LIST, encode_list(STRUCT, group[1]))} for group in fields[4]]
    assert (
        encode_struct(fields | {4: (LIST, encode_list(STRUCT, list(map(encode_struct, groups))))}) == footer
    )


@pytest.mark.parametrize("value", [0, 1, -1, 63, 64, -64, -65, (1 << 31) - 1, -(1 << 31)])
def test_what_is_encoded_is_what_the_reader_reads(value: int) -> None:
    texts = [encode_text(b"x" * size) for size in range(value % 40)]
    written = encode_struct(
        {1: (I32, encode_int(value)), 9: (LIST, encode_list(TEXT, texts)), 11: (I16, b"\2")}
    )
    fields = {1: Field("value", I32), 9: Field("texts", LIST, TEXT), 11: Field("one", I16)}
    found = CompactReader(written, max_values=1000).struct(fields)
    assert found == {"value": value, "texts": [b"x" * size for size in range(value % 40)], "one": 1}
    assert raw_int(encode_int(value)) == value
