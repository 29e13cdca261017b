"""CRCs of parts make that of the whole."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from rlio.schemas.parquet import joined_crc32


@given(st.binary(), st.binary())
def test_the_crc_of_two_parts_is_that_of_both_together(first: bytes, second: bytes) -> None:
    joined = joined_crc32(zlib.crc32(first), zlib.crc32(second), len(second))
    assert joined == zlib.crc32(first + second)


@given(st.binary(), st.integers(0, 1 << 22))
def test_it_does_so_for_parts_of_any_size(first: bytes, size: int) -> None:
    second = bytes(size)
    assert joined_crc32(zlib.crc32(first), zlib.crc32(second), size) == zlib.crc32(second, zlib.crc32(first))
