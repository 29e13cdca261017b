"""Segments of the write-ahead log: what comes back is a prefix of what went in, and the rest is damage."""

from __future__ import annotations

import os
import random
import stat
import struct
import zlib
from contextlib import closing
from pathlib import Path

import pytest
import zstandard
from further import further
from hypothesis import given
from hypothesis import strategies as st

from rlio.errors import CorruptData, PublishError, UnsafeData
from rlio.log.wal import SegmentWriter, count_whole_rows, logged_rows, read_segment

Rows = list[tuple[int, int, bytes]]


def _payload(number: int) -> bytes:
    """Some compress, some do not, one looks like a frame."""
    noise = random.Random(number).randbytes(40)
    return [noise, b"the same text again " * 8, b"rlw0" + noise, b""][number % 4]


def _write(path: Path, frames: int, *, first: int = 0) -> Rows:
    segment = SegmentWriter(str(path), header={"writer": "w"}, first=first)
    written: Rows = []
    for number in range(frames):
        rows = number % 3 + 1
        written.append((segment.end, rows, _payload(number)))
        segment.append([_payload(number)[:7], _payload(number)[7:]], rows=rows)
    segment.close()
    return written


def _read(path: Path) -> Rows:
    return [(frame.first, frame.rows, frame.payload) for frame in read_segment(str(path)).frames]


@given(payloads=st.lists(st.binary(max_size=300), max_size=6), first=st.integers(0, 2**61))
def test_frames_come_back_as_they_went_in(
    tmp_path_factory: pytest.TempPathFactory, payloads: list[bytes], first: int
) -> None:
    path = tmp_path_factory.mktemp("wal") / "s.wal"
    segment = SegmentWriter(str(path), header={"n": [1, "two"]}, first=first)
    for payload in payloads:
        segment.append([payload], rows=2)
    segment.close()
    found = read_segment(str(path))
    assert (found.header, found.first, found.end) == ({"n": [1, "two"]}, first, first + 2 * len(payloads))
    assert [frame.payload for frame in found.frames] == payloads
    assert found.damage is None
    assert path.stat().st_size == segment.bytes


def test_a_segment_is_for_its_user_alone_and_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "s.wal"
    _write(path, 1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for there in (path, tmp_path / "link.wal"):
        if there != path:
            there.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(PublishError, match="could not be opened"):
            SegmentWriter(str(there), header={}, first=0)
    assert len(_read(path)) == 1
    assert not (tmp_path / "elsewhere").exists()


def test_links_folders_and_pipes_are_no_segments(tmp_path: Path) -> None:
    _write(tmp_path / "real", 1)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder"):
        with pytest.raises(UnsafeData):
            read_segment(str(tmp_path / name))


def test_any_truncation_gives_an_exact_prefix(tmp_path: Path) -> None:
    written = _write(tmp_path / "whole", 5)
    data = (tmp_path / "whole").read_bytes()
    header = data.index(b"rlw0", 1)
    path = tmp_path / "cut"
    ends = set()
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        if size < header:
            with pytest.raises(CorruptData, match="header"):
                read_segment(str(path))
            assert count_whole_rows(str(path)) == 0
            continue
        found = _read(path)
        assert found == written[: len(found)], size
        damage = read_segment(str(path)).damage
        # Whole frames are never missing before the cut, and a cut within a frame is torn, not damage.
        assert damage is None or (damage.torn and damage.rows == 0 and damage.start + damage.bytes == size)
        if damage is None:
            ends.add(len(found))
    assert ends == set(range(len(written) + 1))


def _flip(data: bytes, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def _check_flip(path: Path, data: bytes, bit: int, written: Rows) -> None:
    path.write_bytes(_flip(data, bit))
    try:
        found = read_segment(str(path))
    except CorruptData:
        assert bit // 8 < data.index(b"rlw0", 1)
        return
    assert [tuple(frame) for frame in found.frames] == written[: len(list(found.frames))], bit
    # What is behind the damage is counted, and is not called torn, unless the length itself was hit.
    assert found.damage is not None, bit
    assert found.damage.rows <= written[-1][0] + written[-1][1] - found.end


@pytest.mark.parametrize("count", [1000, *further(4000)])
def test_no_flipped_bit_gives_a_wrong_row(tmp_path: Path, count: int) -> None:
    written = _write(tmp_path / "whole", 40)
    data = (tmp_path / "whole").read_bytes()
    bits = random.Random(0).sample(range(8 * len(data)), count)
    for bit in bits:
        _check_flip(tmp_path / "flipped", data, bit, written)


@pytest.mark.soak
def test_no_flipped_bit_of_all_gives_a_wrong_row(tmp_path: Path) -> None:
    written = _write(tmp_path / "whole", 200)
    data = (tmp_path / "whole").read_bytes()
    for bit in range(8 * len(data)):
        _check_flip(tmp_path / "flipped", data, bit, written)


def test_damage_in_the_middle_is_not_taken_for_a_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "s.wal"
    written = _write(path, 9)
    data = path.read_bytes()
    third = [i for i in range(len(data)) if data.startswith(b"rlw0", i)][3]
    path.write_bytes(_flip(data, 8 * (third + 20)))
    found = read_segment(str(path))
    assert found.damage is not None
    assert not found.damage.torn
    assert found.damage.start == third
    assert found.end + found.damage.rows < written[-1][0] + written[-1][1]


def test_a_frame_that_inflates_to_another_size_than_it_says_is_refused(tmp_path: Path) -> None:
    """Frames of a stranger have right CRCs."""
    for stored, plain in (
        (zstandard.ZstdCompressor().compress(bytes(1 << 20)), 10),
        (b"no zstd at all", 14),
        (zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 50), 50),
    ):
        path = tmp_path / f"{plain}.wal"
        _write(path, 0)
        fields = struct.pack("<4sIQQQQ", b"rlw0", 1, 0, 1, len(stored), plain)
        crcs = zlib.crc32(fields), zlib.crc32(stored, zlib.crc32(fields))
        with path.open("ab") as file:
            file.write(fields + struct.pack("<II", *crcs) + stored)
        with pytest.raises(CorruptData):
            list(read_segment(str(path)).frames)


def test_frames_out_of_order_or_of_absurd_lengths_end_the_prefix(tmp_path: Path) -> None:
    for first, rows, stored in ((1, 1, 0), (0, 0, 0), (0, 2**63, 0), (0, 1, 2**63), (2**63, 1, 0)):
        path = tmp_path / f"{first}-{rows}-{stored}"
        _write(path, 0)
        fields = struct.pack("<4sIQQQQ", b"rlw0", 0, first, rows, stored, stored)
        with path.open("ab") as file:
            file.write(fields + struct.pack("<II", zlib.crc32(fields), zlib.crc32(fields)))
        found = read_segment(str(path))
        assert found.end == 0
        assert found.damage is not None


def test_what_was_taken_back_is_gone_and_what_follows_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "s.wal"
    segment = SegmentWriter(str(path), header={}, first=0)
    segment.append([b"kept"], rows=1)
    size, end = segment.bytes, segment.end
    segment.append([b"gone" * 50], rows=5)
    segment.sync()
    segment.take_back(size, end)
    assert not segment.is_dirty
    segment.append([b"next"], rows=2)
    assert segment.is_dirty
    segment.sync()
    segment.close()
    segment.close()
    assert _read(path) == [(0, 1, b"kept"), (1, 2, b"next")]


def test_a_flipped_bit_in_the_fields_of_the_last_frame_is_damage_and_not_a_torn_end(tmp_path: Path) -> None:
    """A torn end was never acknowledged, and goes with its log; this frame was."""
    path = tmp_path / "0.wal"
    with closing(SegmentWriter(str(path), header={}, first=0)) as segment:
        segment.append([b"first"], rows=3)
        start = segment.bytes
        segment.append([b"second"], rows=3)
    data = path.read_bytes()
    for bit in range(8 * 48):
        path.write_bytes(_flip(data, 8 * start + bit))
        found = read_segment(str(path))
        assert found.end == 3, bit
        assert found.damage is not None, bit
        assert not found.damage.torn, bit


# ---- rows by headers alone ----


def test_the_headers_tell_the_rows_of_a_segment_that_ends_anywhere(tmp_path: Path) -> None:
    path, cut = tmp_path / "whole.wal", tmp_path / "cut.wal"
    _write(path, 6, first=40)
    whole = path.read_bytes()
    header = whole.index(b"rlw0", 1)
    ends = set()
    for size in range(len(whole) + 1):
        cut.write_bytes(whole[:size])
        rows, behind = logged_rows(str(cut))
        if size < header:
            assert (rows, behind) == (range(0), size)
        else:
            found = read_segment(str(cut))
            assert rows == range(found.first, found.end)
            assert behind == (0 if found.damage is None else found.damage.bytes)
        ends.add(rows.stop)
    assert len(ends) == 8, "no frame, the header, and each of six frames"


def test_damaged_fields_end_the_rows_that_the_headers_tell_and_damaged_payloads_do_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s.wal"
    _write(path, 3)
    whole = path.read_bytes()
    second = [at for at in range(len(whole)) if whole[at : at + 4] == b"rlw0"][2]
    for offset, rows in ((8, 1), (50, 6)):
        data = bytearray(whole)
        data[second + offset] ^= 1
        path.write_bytes(data)
        assert logged_rows(str(path))[0] == range(rows)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeData):
        logged_rows(str(path))
    path.unlink()
    with pytest.raises(FileNotFoundError):
        logged_rows(str(path))
