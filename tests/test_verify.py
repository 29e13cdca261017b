"""rlio.verify: damage of each kind is found under its code and nothing else is; the ledger adds up."""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from further import first, further
from stored_batches import files, fresh_root, group_bytes, numbered, put, remove, store

import rlio
from rlio import DatasetReader, JsonWriter, MultiAgentBatch, ParquetWriter, Roll, SampleBatch
from rlio.batch import Batch
from rlio.catalog.listing import HoleCheck, list_shards
from rlio.catalog.markers import seal, trim
from rlio.catalog.names import ShardName
from rlio.errors import DataNotFound, OptionError, RlioError
from rlio.limits import Limits
from rlio.maintenance import VerifyReport
from rlio.maintenance.findings import CODES
from rlio.storage import Storage

WRITER = "w00000-00000000"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting between listings: memory shows at once what was put."""
    monkeypatch.setattr("rlio.catalog.listing.HOLE_CHECK", HoleCheck(seconds=0))


def episodes(rows: int, first: int = 0, length: int = 20, **more: Any) -> SampleBatch:
    """Rows of episodes one after the other, all of them whole; numbered through from row ``first``."""
    row = np.arange(first, first + rows)
    return SampleBatch(
        {
            "obs": np.stack([row, -row], 1).astype(np.float32),
            "actions": row % 3,
            "rewards": (row % 7).astype(np.float32),
            "t": row % length,
            "eps_id": row // length,
            "terminateds": row % length == length - 1,
            **more,
        }
    )


def recorded(kind: str = "parquet", *, rows: int = 300, step: int = 100, root: str | None = None) -> str:
    """A data set of one writer, in three shards of several row groups or lines each; without a seal."""
    root = root or fresh_root()
    roll = Roll(max_rows=step, max_seconds=None)
    with group_bytes(1000):
        writer: Any = (
            ParquetWriter(root, writer_id=WRITER, roll=roll)
            if kind == "parquet"
            else JsonWriter(root, writer_id=WRITER, roll=roll, compression="zstd" if kind == "zstd" else None)
        )
        with writer:
            for first in range(0, rows, 20):
                writer.write(episodes(20, first))
    unseal(root)
    return root


#: Each data set is damaged and verified once.
one_process = pytest.mark.xdist_group("verify")


@cache
def verified(name: str) -> tuple[str, VerifyReport]:
    """A data set that is damaged so, and what is found in it."""
    kind, plant, _, _ = DAMAGE[name]
    root = recorded(kind)
    plant(root)
    return root, rlio.verify(root)


def unseal(root: str) -> None:
    """Take the seal away, which writers put: the writer may then go on."""
    fs = fsspec.filesystem("memory")
    for path in fs.find(f"{root}/data"):
        if "_sealed-" in path:
            fs.rm_file(path)


def shards(root: str) -> list[str]:
    """Paths of the shards, in order."""
    return sorted(path for path in files(root) if ShardName.parse(path.rsplit("/", 1)[1]))


def flip(path: str, at: int, bit: int = 0) -> None:
    """Flip one bit of an object; negative places count from the end."""
    data = bytearray(fsspec.filesystem("memory").cat_file(path))
    data[at] ^= 1 << bit
    put(path, bytes(data))


def bad(report: VerifyReport) -> list[str]:
    """Codes of the errors and warnings."""
    return [finding.code for finding in report.findings if finding.severity != "note"]


def footer_start(data: bytes) -> int:
    return len(data) - int.from_bytes(data[-8:-4], "little") - 8


def renamed(path: str, data: bytes, **changes: Any) -> str:
    """Store bytes under a name that certifies them, with changes, in place of the object at ``path``."""
    folder, _, text = path.rpartition("/")
    name = ShardName.parse(text)
    assert name is not None
    is_parquet = name.suffix == "parquet"
    values = {
        "first": name.first,
        "rows": name.rows,
        "size": len(data),
        "crc32": zlib.crc32(data),
        "footer_crc32": zlib.crc32(data[footer_start(data) :]) if is_parquet else 0,
        "suffix": name.suffix,
        **changes,
    }
    remove(path)
    fresh = f"{folder}/{ShardName(**values).format()}"
    put(fresh, data)
    return fresh


# ---- what is sound is clean ----


def multi_agent() -> MultiAgentBatch:
    steps = np.arange(30)
    ids = {"eps_id": np.zeros(30, int), "t": steps, "terminateds": steps == 29}
    parts = {
        pid: SampleBatch(obs=steps[:, None] * np.ones(2), agent_index=np.full(30, index), **ids)
        for index, pid in enumerate(("a", "b"))
    }
    return MultiAgentBatch(parts, 30)


def frames() -> SampleBatch:
    rng = np.random.default_rng(0)
    film = rng.integers(0, 256, (45, 8, 8), dtype=np.uint8)
    stacks = np.stack([film[i : i + 41] for i in range(4)], -1)
    t = np.arange(40)
    return SampleBatch(
        obs=stacks[:-1],
        new_obs=stacks[1:],
        t=t,
        eps_id=np.zeros(40, int),
        terminateds=t == 39,
        rewards=t * 0.1,
    )


def sequences() -> SampleBatch:
    t = np.arange(24)
    return SampleBatch(
        {"obs": np.ones((24, 3)), "t": t, "eps_id": np.zeros(24, int), "state_in_0": np.zeros((3, 5))},
        seq_lens=np.array([8, 8, 8]),
    )


SOUND: dict[str, Callable[[], Batch]] = {
    "episodes": lambda: episodes(60),
    "several agents": multi_agent,
    "frame stacks": frames,
    "sequences": sequences,
    "objects, text and odd types": lambda: episodes(
        20,
        infos=np.array([{"n": i, "x": np.zeros(2)} for i in range(20)], object),
        name=np.array([f"row {i}" for i in range(20)]),
        half=np.zeros((20, 2), np.float16),
        nested={"a": np.zeros((20, 3)), "b": (np.zeros(20, np.uint8), np.zeros((20, 0)))},
    ),
    "missing final observations": lambda: episodes(
        20, new_obs=np.zeros((20, 2), np.float32), new_obs_valid=np.arange(20) < 19
    ),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", ["parquet", "json"])
@pytest.mark.parametrize("name", SOUND)
@pytest.mark.each_value_once
def test_what_writers_write_has_no_finding(name: str, kind: str) -> None:
    root, batch = fresh_root(), SOUND[name]()
    with group_bytes(2000), ParquetWriter(root) if kind == "parquet" else JsonWriter(root) as writer:
        writer.write(batch)
    for level in ("quick", "full"):
        report = rlio.verify(root, level=level)  # type: ignore[arg-type]  # mypy widens the tuple's items
        assert [str(f) for f in report.findings if f.severity != "note"] == []
        assert {f.code for f in report.findings} <= {"left-open"}
        assert report.total.live == (
            batch.agent_steps() if isinstance(batch, MultiAgentBatch) else len(batch)
        )


@pytest.mark.parametrize("writer", [ParquetWriter, JsonWriter])
@pytest.mark.parametrize(
    "file", ["cartpole/small.json", *further("cartpole/large.json", "pendulum/large.json")]
)
def test_real_recordings_are_clean(recordings: Path, tmp_path: Path, file: str, writer: Any) -> None:
    reader = rlio.JsonReader(recordings / file, epochs=1)
    with rlio.RecordingInput(reader, writer(tmp_path / "copy")) as recording:
        rows = sum(map(len, recording))
    report = rlio.verify(tmp_path / "copy")
    assert bad(report) == []
    assert {f.code for f in report.findings} <= {"time-unchecked", "left-open"}
    assert report.total.live == rows > 0


def test_an_empty_data_set_is_clean_and_no_data_set_is_an_error() -> None:
    root = fresh_root()
    ParquetWriter(root).close()
    assert rlio.verify(root).ok
    with pytest.raises(DataNotFound, match="no data set"):
        rlio.verify(fresh_root())
    put(f"{root}/_rlio.json", b'{"format": 7}')
    with pytest.raises(OptionError, match="format 7"):
        rlio.verify(root)
    with pytest.raises(OptionError, match="level='deep'"):
        rlio.verify(recorded(), level="deep")  # type: ignore[arg-type]  # That is the point.


# ---- damage of each kind ----


def middle_group(data: bytes) -> int:
    """A byte of the second row group."""
    metadata = pq.read_metadata(io.BytesIO(data))
    start, stop = json.loads(metadata.metadata[b"rlio.groups"])[1][:2]
    return int(start + stop) // 2


def forge_group(root: str) -> None:
    """Overwrite the head of a page and make all checksums right again."""
    path = shards(root)[1]
    data = bytearray(files(root)[path])
    start, stop, crc32, *_ = json.loads(pq.read_metadata(io.BytesIO(data)).metadata[b"rlio.groups"])[1]
    at = footer_start(data)
    for filler in range(256):
        data[start : start + 4] = bytes([255, 255, 255, filler])
        fresh = str(zlib.crc32(data[start:stop]))
        if len(fresh) == len(str(crc32)):
            data[at:] = data[at:].replace(str(crc32).encode(), fresh.encode())
            renamed(path, bytes(data))
            return
    raise AssertionError("no CRC of as many digits")


def forge_rows(root: str) -> None:
    path = shards(root)[2]
    renamed(path, files(root)[path], rows=99)


def rename_with_another_crc(root: str) -> None:
    path = shards(root)[1]
    renamed(path, files(root)[path], crc32=1)


def cover(root: str, batch: SampleBatch) -> None:
    """Add a shard of the writer's first rows."""
    with group_bytes(1000):
        other = store(batch, writer_id=WRITER)
    (path,) = shards(other)
    put(path.replace(other.removeprefix("memory:/"), root.removeprefix("memory:/")), files(other)[path])


def unlike_overlap(root: str) -> None:
    """Another shard for the same rows, with one value changed."""
    batch = episodes(300)
    batch["obs"][137, 1] += 1
    cover(root, batch)


def torn(root: str, index: int) -> None:
    path = shards(root)[index]
    put(path, files(root)[path][:-100])


def damaged_line(root: str) -> None:
    path = shards(root)[1]
    data = files(root)[path]
    flip(path, data.index(b'"columns"') + 20)


def malformed_line(root: str) -> None:
    """A line whose CRC is right and which holds no rows of its schema."""
    path = shards(root)[1]
    lines = files(root)[path].splitlines(keepends=True)
    body = lines[2].replace(b'"actions":[', b'"acts":[', 1).split(b',"crc32":')[0]
    lines[2] = b'%b,"crc32":"%08x"}\n' % (body, zlib.crc32(body))
    renamed(path, b"".join(lines))


def conflicting(root: str) -> None:
    other = store(numbered(5, eps_id=np.zeros(5, int), rewards=np.zeros(5, np.float64)), writer_id="w1")
    unseal(other)
    for folder in ("data", "_schema"):
        for path, data in files(other, folder).items():
            put(path.replace(other.removeprefix("memory:/"), root.removeprefix("memory:/")), data)


def schema_file(root: str) -> str:
    (path,) = files(root, "_schema")
    return path


def mount(root: str, path: str) -> str:
    return f"{root.removeprefix('memory:/')}/{path}"


DAMAGE: dict[str, tuple[str, Callable[[str], Any], list[str], int]] = {
    "nothing": ("parquet", lambda root: None, [], 300),
    "no header": ("parquet", lambda root: remove(mount(root, "_rlio.json")), ["header-missing"], 300),
    "a header of nonsense": (
        "parquet",
        lambda root: put(mount(root, "_rlio.json"), b'{"format": 0'),
        ["header-damaged"],
        300,
    ),
    "a header with other spaces": (
        "parquet",
        lambda root: put(mount(root, "_rlio.json"), b'{"format":0}'),
        ["header-damaged"],
        300,
    ),
    "no schema file": ("parquet", lambda root: remove(schema_file(root)), ["schema-file-missing"], 300),
    "a flipped schema file": (
        "parquet",
        lambda root: flip(schema_file(root), 40),
        ["schema-file-damaged"],
        300,
    ),
    "no schema file of JSON shards": (
        "json",
        lambda root: remove(schema_file(root)),
        ["schema-file-missing"],
        0,
    ),
    "a flipped footer": ("parquet", lambda root: flip(shards(root)[1], -60), ["footer-crc"], 200),
    "a flipped length of the footer": (
        "parquet",
        lambda root: flip(shards(root)[1], -5, 6),
        ["footer-crc"],
        200,
    ),
    "a flipped closing magic": ("parquet", lambda root: flip(shards(root)[1], -1), ["footer-crc"], 200),
    "a flipped row group": (
        "parquet",
        lambda root: flip(shards(root)[1], middle_group(files(root)[shards(root)[1]])),
        ["group-crc"],
        284,
    ),
    "a forged row group": ("parquet", forge_group, ["group-malformed"], 284),
    "another CRC in the name": ("parquet", rename_with_another_crc, ["file-crc"], 300),
    "another number of rows in the name": ("parquet", forge_rows, ["shard-rows"], 200),
    "a torn shard between others": ("parquet", lambda root: torn(root, 1), ["torn"], 200),
    "a torn last shard": ("parquet", lambda root: torn(root, 2), ["uploading"], 200),
    "a torn last shard of a sealed writer": (
        "parquet",
        lambda root: (torn(root, 2), seal(Storage.open(root), WRITER, 300)),
        ["torn"],
        200,
    ),
    "a shard that is gone": ("parquet", lambda root: remove(shards(root)[1]), ["hole"], 200),
    "the last shard of a sealed writer gone": (
        "parquet",
        lambda root: (remove(shards(root)[2]), seal(Storage.open(root), WRITER, 300)),
        ["hole"],
        200,
    ),
    "a seal before the end": (
        "parquet",
        lambda root: seal(Storage.open(root), WRITER, 250),
        ["past-the-seal"],
        300,
    ),
    "an unlike shard of the same rows": ("parquet", unlike_overlap, ["overlap-differs"], 300),
    "a stray file beside shards": (
        "parquet",
        lambda root: put(mount(root, f"data/{WRITER}/notes.txt"), b"x"),
        ["stray"],
        300,
    ),
    "a stray folder": ("parquet", lambda root: put(mount(root, "data/Not A Writer/x"), b"x"), ["stray"], 300),
    "unlike schemas": ("parquet", conflicting, ["schema-conflict"], 305),
    "a damaged line": ("json", damaged_line, ["line-damaged"], 280),
    "a damaged frame": ("zstd", lambda root: flip(shards(root)[1], 900), ["line-damaged"], 280),
    "a malformed line": ("json", malformed_line, ["line-malformed"], 280),
    "a damaged provenance": ("json", lambda root: flip(shards(root)[1], 60), ["provenance-damaged"], 300),
    "a renamed JSON shard": ("json", rename_with_another_crc, ["file-crc"], 300),
}


@pytest.mark.few(10)
@one_process
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_of_each_kind_is_found_under_its_code_and_nothing_else_is(name: str) -> None:
    _, _, expected, live = DAMAGE[name]
    _, report = verified(name)
    assert bad(report) == expected, [str(finding) for finding in report.findings]
    assert report.total.live == live
    assert (
        report.ok == all(CODES[code] != "error" for code in expected) or name == "a header with other spaces"
    )


@pytest.mark.further
def test_codes_do_not_depend_on_the_words_of_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = RlioError.__init__

    def reworded(self: RlioError, message: str = "", **places: Any) -> None:
        whole(self, "something is wrong", **places)

    for name in (
        "a flipped row group",
        "a forged row group",
        "a damaged line",
        "a damaged frame",
        "a malformed line",
    ):
        kind, plant, expected, live = DAMAGE[name]
        root = recorded(kind)
        plant(root)
        with monkeypatch.context() as patch:
            patch.setattr(RlioError, "__init__", reworded)
            report = rlio.verify(root)
        assert (name, bad(report), report.total.live) == (name, expected, live)


@one_process
@pytest.mark.parametrize("name", [name for name in DAMAGE if name != "nothing"])
def test_each_error_says_where_and_of_how_many_rows(name: str) -> None:
    _, _, _, live = DAMAGE[name]
    root, report = verified(name)
    for finding in report.findings:
        assert finding.uri.startswith(root)
        assert len(finding.message) > 20
    if live < 300:
        assert max(finding.rows for finding in report.findings) >= 290 - live


QUICK = {
    "a flipped footer",
    "a shard that is gone",
    "a torn shard between others",
    "no schema file",
    "no header",
}
SLOW = {"a flipped row group", "a damaged line"}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", sorted(QUICK | SLOW))
def test_quick_finds_what_needs_no_rows_and_reads_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, plant, expected, _ = DAMAGE[name]
    root = recorded(kind)
    plant(root)
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", None)
    assert bad(rlio.verify(root, level="quick")) == (expected if name in QUICK else [])


def test_links_and_special_files_are_found_and_not_followed(tmp_path: Path) -> None:
    root = tmp_path / "data set"
    with ParquetWriter(root, writer_id=WRITER) as writer:
        writer.write(episodes(20))
    secret = tmp_path / "000000000020-1-1-00000000-00000000.parquet"
    secret.write_bytes(b"x")
    (root / "data" / WRITER / secret.name).symlink_to(secret)
    os.mkfifo(root / "data" / WRITER / "pipe")
    (root / "README.md").write_text("a card")
    report = rlio.verify(root)
    assert sorted(bad(report)) == ["link", "link"]
    assert [f.uri.rsplit("/", 1)[1] for f in report.findings if f.code == "foreign"] == ["README.md"]
    assert report.total.live == 20


def test_unfinished_and_quarantined_objects_are_counted_and_no_error() -> None:
    root = recorded()
    put(mount(root, "_tmp/a.tmp"), b"x")
    put(mount(root, "_quarantine/data/w0/x"), b"x")
    report = rlio.verify(root)
    assert report.ok
    assert {f.code for f in report.findings} == {"unfinished", "quarantined"}


def test_no_byte_reaches_pyarrow_before_a_crc_that_covers_it_has_matched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = recorded(step=300)
    (path,) = shards(root)
    whole, calls = files(root)[path], []
    reads = pq.read_metadata
    monkeypatch.setattr(pq, "read_metadata", lambda *a, **k: calls.append("footer") or reads(*a, **k))
    groups = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda self, i, **k: calls.append(i) or groups(self, i, **k)
    )
    flip(path, -60)
    assert bad(rlio.verify(root)) == ["footer-crc"]
    assert calls == []
    put(path, whole)
    flip(path, middle_group(whole))
    assert bad(rlio.verify(root)) == ["group-crc"]
    assert 1 not in calls
    assert 0 in calls


# ---- damage anywhere ----


def one_shard() -> tuple[str, str, bytes]:
    root = recorded(rows=60, step=60)
    (path,) = shards(root)
    return root, path, files(root)[path]


@pytest.mark.parametrize("flips", [100, *further(600)])
def test_every_bit_flip_in_a_footer_is_found(flips: int) -> None:
    root, path, data = one_shard()
    rng = np.random.default_rng(5)
    start = footer_start(data)
    for at, bit in zip(rng.integers(start, len(data), flips), rng.integers(0, 8, flips), strict=True):
        changed = bytearray(data)
        changed[at] ^= 1 << bit
        put(path, bytes(changed))
        report = rlio.verify(root, level="quick")
        assert bad(report) == ["footer-crc"], (at, bit)
        assert report.total.live == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["parquet", "json", "zstd"])
@pytest.mark.parametrize("flips", [40, *further(150)])
def test_every_bit_flip_and_every_truncation_across_a_shard_is_found(kind: str, flips: int) -> None:
    root = recorded(kind, rows=60, step=60)
    (path,) = shards(root)
    data = files(root)[path]
    rng = np.random.default_rng(6)
    for at, bit in zip(rng.integers(0, len(data), flips), rng.integers(0, 8, flips), strict=True):
        changed = bytearray(data)
        changed[at] ^= 1 << bit
        put(path, bytes(changed))
        report = rlio.verify(root)
        assert not report.ok, (at, bit)
        assert report.total.live + report.total.damaged == 60
    for length in rng.integers(0, len(data), flips * 2 // 5):
        put(path, data[:length])
        assert bad(rlio.verify(root)) == ["uploading"], length
        put(path, data[:length] + bytes(len(data) - length))
        assert not rlio.verify(root).ok, length


# ---- the ledger ----


def served(root: str) -> int:
    """Rows that a reader gets which skips damage."""
    with DatasetReader(root, epochs=1, on_error="skip") as reader:
        return sum(map(len, reader))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["parquet", "json", "zstd"])
@pytest.mark.parametrize("seed", first(4, range(12)))
@pytest.mark.each_value_once
def test_the_rows_that_verify_are_those_that_a_reader_serves(kind: str, seed: int) -> None:
    rng = np.random.default_rng([seed, len(kind)])
    root = recorded(kind, rows=200, step=40)
    storage = Storage.open(root)
    for path in shards(root):
        match rng.integers(6):
            case 0:
                remove(path)
            case 1:
                flip(path, int(rng.integers(len(files(root)[path]))), int(rng.integers(8)))
            case 2:
                flip(path, -int(rng.integers(1, 40)))
            case _:
                pass
    if rng.integers(2):
        trim(storage, WRITER, int(rng.integers(100)))
    if rng.integers(2):
        seal(storage, WRITER, 200)
    if rng.integers(2):
        with ParquetWriter(root, writer_id="w9") as writer:
            writer.write(episodes(20))
    report = rlio.verify(root)
    assert report.total.live == served(root)
    for entry in report.ledger:
        assert entry.end == entry.trimmed + entry.missing + entry.damaged + entry.live
        if list_shards(storage).sealed.get(entry.writer):
            assert entry.sealed == entry.end


def test_rows_in_several_shards_are_counted_once() -> None:
    root = recorded()
    cover(root, episodes(300))
    (entry,) = rlio.verify(root).ledger
    assert (entry.shards, entry.stored, entry.live, entry.missing) == (4, 300, 300, 0)
    assert bad(rlio.verify(root)) == []


def test_damage_in_a_shard_that_another_covers_costs_no_row_and_is_found() -> None:
    root = recorded()
    cover(root, episodes(300))
    flip(shards(root)[2], -60)
    report = rlio.verify(root)
    assert bad(report) == ["footer-crc"]
    assert (report.total.live, report.total.damaged) == (300, 0)


def test_a_torn_object_whose_rows_are_elsewhere_is_a_warning() -> None:
    root = recorded()
    path = shards(root)[1]
    put(path.replace("-100-", "-40-", 1), b"torn")
    report = rlio.verify(root)
    assert report.ok
    assert bad(report) == ["torn"]
    assert report.total.live == 300


def test_trimmed_rows_are_not_missing() -> None:
    root = recorded()
    trim(Storage.open(root), WRITER, 150)
    remove(shards(root)[0])
    (entry,) = rlio.verify(root).ledger
    assert bad(rlio.verify(root)) == []
    assert (entry.trimmed, entry.live, entry.missing, entry.end) == (150, 150, 0, 300)


def test_the_report_keeps_as_many_findings_as_it_is_told_and_counts_the_others() -> None:
    root = recorded()
    for path in shards(root):
        flip(path, -60)
    report = rlio.verify(root, limit=2)
    assert (len(report.findings), report.omitted, report.counts["error"]) == (2, 1, 3)
    assert not report.ok


def test_progress_is_told_of_every_byte() -> None:
    root = recorded()
    told: list[int] = []

    class Bar:
        def __init__(self, name: str, total: int) -> None:
            self.total = total

        def __enter__(self) -> Callable[[int], None]:
            return told.append

        def __exit__(self, *error: object) -> None:
            assert sum(told) == self.total

    report = rlio.verify(root, progress=Bar)  # type: ignore[arg-type]  # A context manager by its methods.
    assert sum(told) == report.bytes > 0


def test_what_asks_for_more_than_the_limits_is_unsafe_and_repair_leaves_it_alone() -> None:
    root = recorded()
    small = Limits(group_rows=5)
    report = rlio.verify(root, limits=small)
    assert bad(report) == ["unsafe"] * 3
    assert report.total.live == 0
    assert rlio.maintenance.repair(root, limits=small).actions == ()
    assert rlio.verify(root).findings == ()


@pytest.mark.soak
def test_every_bit_of_a_footer_is_covered() -> None:
    root, path, data = one_shard()
    for at in range(footer_start(data), len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            put(path, bytes(changed))
            assert bad(rlio.verify(root, level="quick")) == ["footer-crc"], (at, bit)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["parquet", "json", "zstd"])
def test_every_byte_of_a_shard_is_covered(kind: str) -> None:
    root = recorded(kind, rows=60, step=60)
    (path,) = shards(root)
    data = files(root)[path]
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        put(path, bytes(changed))
        assert not rlio.verify(root).ok, at
        put(path, data[:at])
        assert bad(rlio.verify(root)) == ["uploading"], at
