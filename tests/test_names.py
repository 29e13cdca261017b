"""Names: one strict grammar each, and what is formatted parses back."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlio.catalog.names import (
    MAX_ROW,
    MAX_ROWS,
    MAX_SHARD_BYTES,
    ShardName,
    Suffix,
    check_writer_id,
    is_writer_id,
    make_writer_id,
    parse_sealed,
    parse_trim,
    schema_path,
    sealed_name,
    shard_path,
    trim_name,
)
from rlio.errors import OptionError

shard_names = st.builds(
    ShardName,
    first=st.integers(0, MAX_ROW - MAX_ROWS),
    rows=st.integers(1, MAX_ROWS),
    size=st.integers(1, MAX_SHARD_BYTES),
    crc32=st.integers(0, 2**32 - 1),
    footer_crc32=st.integers(0, 2**32 - 1),
    suffix=st.sampled_from(get_args(Suffix)),
)


def a_name(**changes: Any) -> ShardName:
    fields = {"first": 0, "rows": 1, "size": 1, "crc32": 0, "footer_crc32": 0}
    return ShardName(**{**fields, **changes})


@settings(max_examples=200)
@given(shard_names)
def test_what_is_formatted_parses_back(name: ShardName) -> None:
    assert ShardName.parse(name.format()) == name


@settings(max_examples=50)
@given(shard_names)
def test_a_name_travels_to_other_processes(name: ShardName) -> None:
    for twin in (pickle.loads(pickle.dumps(name)), copy.deepcopy(name)):
        assert type(twin) is ShardName
        assert twin == name
        assert hash(twin) == hash(name)


def test_a_name_is_immutable_and_its_numbers_are_not_told_apart_by_position() -> None:
    name: Any = a_name()
    with pytest.raises(AttributeError):
        name.rows = 2
    with pytest.raises(AttributeError):
        name.other = 2
    make: Any = ShardName
    with pytest.raises(TypeError, match="positional"):
        make(0, 1, 1, 0, 0)


@settings(max_examples=100)
@given(shard_names, shard_names)
def test_within_twelve_digits_the_order_of_names_is_the_order_of_rows(a: ShardName, b: ShardName) -> None:
    if max(a.first, b.first) < 10**12 and a.first != b.first:
        assert (a.format() < b.format()) == (a.first < b.first)


def test_a_name_looks_as_documented() -> None:
    name = ShardName(first=4096, rows=2048, size=913422, crc32=0x9F0C11AA, footer_crc32=0x1B)
    assert name.format() == "000000004096-2048-913422-9f0c11aa-0000001b.parquet"
    assert name.end == 6144
    expected = "data/w00001-0a1b2c3d/000000004096-2048-913422-9f0c11aa-0000001b.parquet"
    assert shard_path("w00001-0a1b2c3d", name) == expected


@pytest.mark.parametrize(
    "text", ["5-1-7-0000000a-00000000.jsonl", "000000000000005-01-007-0000000a-00000000.jsonl"]
)
def test_numbers_are_parsed_at_any_width(text: str) -> None:
    expected = ShardName(first=5, rows=1, size=7, crc32=10, footer_crc32=0, suffix="jsonl")
    assert ShardName.parse(text) == expected


REFUSED = [
    "",
    "000000000000-1-1-00000000-00000000",
    "000000000000-1-1-00000000-00000000.",
    "000000000000-1-1-00000000-00000000.PARQUET",
    "000000000000-1-1-00000000-00000000.jsonl.zst.tmp",
    "000000000000-1-1-00000000-00000000.json",
    "000000000000-1-1-00000000-00000000.parquet\n",
    " 000000000000-1-1-00000000-00000000.parquet",
    "000000000000-1-1-00000000.parquet",
    "000000000000-1-1-0000000-00000000.parquet",
    "000000000000-1-1-0000000G-00000000.parquet",
    "000000000000-1-1-0000000A-00000000.parquet",
    "000000000000-1-1-000000000-00000000.parquet",
    "-1-1-1-00000000-00000000.parquet",
    "+0-1-1-00000000-00000000.parquet",
    "0_0-1-1-00000000-00000000.parquet",
    "1.0-1-1-00000000-00000000.parquet",
    "٣-1-1-00000000-00000000.parquet",  # the digit 3 in Arabic
    "../000000000000-1-1-00000000-00000000.parquet",
    "a/000000000000-1-1-00000000-00000000.parquet",
    "000000000000-0-1-00000000-00000000.parquet",
    "000000000000-1-0-00000000-00000000.parquet",
    f"0-{MAX_ROWS + 1}-1-00000000-00000000.parquet",
    f"0-1-{MAX_SHARD_BYTES + 1}-00000000-00000000.parquet",
    f"{MAX_ROW}-1-1-00000000-00000000.parquet",
    "9" * 20 + "-1-1-00000000-00000000.parquet",
    "9" * 5000 + "-1-1-00000000-00000000.parquet",
    "_sealed-5",
]


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_a_shard_s_name_is_none(text: str) -> None:
    assert ShardName.parse(text) is None


@pytest.mark.further
@settings(max_examples=100)
@given(st.text(max_size=60) | st.from_regex(r"[0-9]{1,20}(-[0-9a-f]{1,20}){4}\.parquet"))
def test_no_text_makes_the_parser_fail_and_what_it_accepts_says_the_same_again(text: str) -> None:
    name = ShardName.parse(text)
    if name is not None:
        assert ShardName.parse(name.format()) == name


@pytest.mark.parametrize(
    "changes",
    [
        {"first": -1},
        {"rows": 0},
        {"rows": MAX_ROWS + 1},
        {"first": MAX_ROW},
        {"size": 0},
        {"size": MAX_SHARD_BYTES + 1},
        {"crc32": -1},
        {"crc32": 2**32},
        {"footer_crc32": 2**32},
        {"suffix": "json"},
    ],
)
def test_a_name_that_could_not_be_parsed_cannot_be_made(changes: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="expected first >= 0"):
        a_name(**changes)


def test_writer_ids_are_new_every_time_and_legal() -> None:
    ids = {make_writer_id(3) for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch(r"w00003-[0-9a-f]{8}", writer) and is_writer_id(writer) for writer in ids)
    assert make_writer_id(123456).startswith("w123456-")
    with pytest.raises(OptionError, match="worker_index=-1"):
        make_writer_id(-1)


@pytest.mark.parametrize("writer", ["w00000-0a1b2c3d", "a", "0", "a-", "x" * 64, "demo-run-1"])
def test_legal_writer_ids_are_taken(writer: str) -> None:
    assert check_writer_id(writer) == writer


@pytest.mark.parametrize(
    "writer", ["", "A", "a b", "a/b", "..", ".", "a.b", "-a", "_a", "x" * 65, "a\n", "ä", "a\0", None, 5]
)
def test_illegal_writer_ids_are_refused(writer: Any) -> None:
    with pytest.raises(OptionError, match="writer_id="):
        check_writer_id(writer)
    with pytest.raises(OptionError, match="writer_id="):
        shard_path(writer, a_name())


@pytest.mark.parametrize("row", [0, 5, 10**12, MAX_ROW])
def test_markers_parse_back_and_are_not_each_other(row: int) -> None:
    assert parse_sealed(sealed_name(row)) == row
    assert parse_trim(trim_name(row)) == row
    assert parse_sealed(trim_name(row)) is None
    assert parse_trim(sealed_name(row)) is None
    assert ShardName.parse(sealed_name(row)) is None


@pytest.mark.parametrize("tail", ["", "-", "-5 ", "--5", "-5.json", "-٣", f"-{MAX_ROW + 1}", "-" + "9" * 30])
def test_what_is_not_a_marker_is_none(tail: str) -> None:
    assert parse_sealed(f"_sealed{tail}") is None
    assert parse_trim(f"_trim{tail}") is None


def test_a_marker_for_no_row_is_refused() -> None:
    for make in (sealed_name, trim_name):
        with pytest.raises(OptionError, match="row -1"):
            make(-1)


def test_a_schema_s_path_holds_its_hash_and_nothing_else() -> None:
    assert schema_path("0123456789abcdef") == "_schema/0123456789abcdef.json"
    for text in ("", "../../x", "0123456", "ABCDEF01", "g" * 8, "a" * 65):
        with pytest.raises(OptionError, match="hex digits"):
            schema_path(text)
