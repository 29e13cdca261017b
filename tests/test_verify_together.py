"""`verify` decodes short shards together: what it says of each is what it says of one that it reads alone."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Callable
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from further import first
from stored_batches import files, put, remove, store

import rlio
from rlio import Roll, SampleBatch
from rlio.catalog.listing import HoleCheck
from rlio.catalog.markers import trim
from rlio.catalog.names import ShardName
from rlio.maintenance import VerifyReport
from rlio.maintenance.shard_scan import ShardScan
from rlio.schemas import shard_file
from rlio.schemas.shard_file import ShardFile
from rlio.storage import Storage

SHARDS, ROWS = 9, 10
WRITER = "w00000-00000001"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting between listings: memory shows at once what was put."""
    monkeypatch.setattr("rlio.catalog.listing.HOLE_CHECK", HoleCheck(seconds=0))


def rows_of(count: int = SHARDS * ROWS, **more: Any) -> SampleBatch:
    """Episodes of 30 rows, so of three shards; new_obs are the next rows' obs, except at the ends."""
    at = np.arange(count)
    obs = np.stack([at, -at], axis=1).astype(np.float32)
    ends = at % 30 == 29
    return SampleBatch(
        {
            "obs": obs,
            "new_obs": np.where(ends[:, None], 0.5, np.stack([at + 1, -at - 1], axis=1)).astype(np.float32),
            "rewards": at % 7 * 1.0,
            "terminateds": ends,
            "truncateds": np.zeros(count, bool),
            "eps_id": at // 30,
            "t": at % 30,
            "infos": np.array([{"n": int(n)} if n % 3 else {} for n in at], object),
            **more,
        }
    )


def recorded(
    batch: SampleBatch | None = None, *, root: str | None = None, writer: str = WRITER, rows: int = ROWS
) -> str:
    """A data set of a writer of shards of so many rows."""
    with pytest.MonkeyPatch.context() as patch:
        # Writers refuse ids of ended episodes again, and objects as ids.
        patch.setattr("rlio.writers.ended_episodes.EndedEpisodes.check", lambda *_: {})
        patch.setattr("rlio.schemas.policy_schema._Rows.check_keys", lambda *_: None)
        batch = rows_of() if batch is None else batch
        return store(batch, root=root, writer_id=writer, roll=Roll(max_rows=rows, max_seconds=None))


def shards(root: str) -> list[str]:
    """Paths of the shards, in order."""
    return sorted(path for path in files(root) if ShardName.parse(path.rsplit("/", 1)[1]))


def together(monkeypatch: pytest.MonkeyPatch, root: str) -> tuple[VerifyReport, list[int]]:
    """The report, and how many shards were decoded together each time."""
    sizes: list[int] = []
    plain = ShardFile.read_joined

    def counted(some: Any, **options: Any) -> Any:
        found = plain(some, **options)
        sizes.append(len(some))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(ShardFile, "read_joined", staticmethod(counted))
        return rlio.verify(root), sizes


def alone(monkeypatch: pytest.MonkeyPatch, root: str) -> VerifyReport:
    """The report if each shard is read by itself."""
    with monkeypatch.context() as patch:
        patch.setattr(ShardScan, "ahead", lambda self: None)
        return rlio.verify(root)


def named(report: VerifyReport) -> dict[str, set[str]]:
    """Path of a shard -> the codes of the errors in it."""
    found: dict[str, set[str]] = {}
    for finding in report.findings:
        if finding.severity == "error" and finding.uri.endswith(".parquet"):
            found.setdefault(finding.uri.removeprefix("memory:/"), set()).add(finding.code)
    return found


def bytes_of(path: str) -> bytes:
    return bytes(fsspec.filesystem("memory").cat_file(path))


def flip(path: str, at: int) -> str:
    data = bytearray(bytes_of(path))
    data[at] ^= 16
    put(path, bytes(data))
    return path


def renamed(path: str, data: bytes, **changes: Any) -> str:
    """Store bytes under a name that certifies them, with changes, in place of a shard."""
    folder, _, text = path.rpartition("/")
    name = ShardName.parse(text)
    assert name is not None
    start = len(data) - int.from_bytes(data[-8:-4], "little") - 8
    sums = {"crc32": zlib.crc32(data), "footer_crc32": zlib.crc32(data[start:])}
    values = {"first": name.first, "rows": name.rows, "size": len(data), **sums, **changes}
    remove(path)
    fresh = f"{folder}/{ShardName(**values).format()}"
    put(fresh, data)
    return fresh


def with_units(path: str, more: int) -> str:
    """Make a footer state so many units more than there are rows, under right checksums."""
    data = bytes_of(path)
    (listed,) = json.loads(pq.read_metadata(io.BytesIO(data)).metadata[b"rlio.groups"])
    fresh = [*listed[:4], listed[4] + more, listed[5]]
    before, after = (json.dumps(each, separators=(",", ":")).encode() for each in (listed, fresh))
    assert data.count(before) == 1
    return renamed(path, data.replace(before, after.ljust(len(before))))


def nan_in(*numbers: int) -> SampleBatch:
    batch = rows_of()
    batch["obs"][[*numbers]] = np.nan
    return batch


def _objects(change: Callable[[int], Any]) -> Any:
    """Ids of episodes, changed."""
    ids = np.empty(SHARDS * ROWS, object)
    ids[:] = [change(n // 30) for n in range(SHARDS * ROWS)]
    return ids


def again(root: str) -> None:
    """A shard of a writer of the same id, with some rows of another shard, one of them with another value."""
    batch = rows_of()[4 * ROWS : 4 * ROWS + 4]
    batch["rewards"] = batch["rewards"] + [0, 0, 1, 0]
    other = store(batch, writer_id=WRITER)
    path = renamed(shards(other)[0], bytes_of(shards(other)[0]), first=4 * ROWS)
    put(path.replace(other.removeprefix("memory:/"), root.removeprefix("memory:/")), bytes_of(path))


ROOTS: dict[str, Callable[[], str]] = {
    "nothing": recorded,
    "NaN in two shards": lambda: recorded(nan_in(35, 36, 47)),
    "an episode lacks steps": lambda: recorded(
        rows_of(t=np.delete(np.arange(SHARDS * ROWS + 4), [*range(31, 35)]))
    ),
    "episodes come again": lambda: recorded(rows_of(eps_id=np.arange(SHARDS * ROWS) // 30 % 2)),
    "steps come twice in two shards": lambda: recorded(
        rows_of(eps_id=np.zeros(SHARDS * ROWS, int), terminateds=np.zeros(SHARDS * ROWS, bool))
    ),
    "both flags": lambda: recorded(rows_of(truncateds=np.arange(SHARDS * ROWS) % 30 == 29)),
    "no episodes": lambda: recorded(SampleBatch(obs=np.arange(SHARDS * ROWS) * 1.0)),
    "ids in texts": lambda: recorded(rows_of(eps_id=np.array([f"é{n // 30}" for n in range(SHARDS * ROWS)]))),
    "ids in texts and numbers": lambda: recorded(rows_of(eps_id=_objects(lambda n: str(n) if n == 1 else n))),
    "ids that are neither in one shard": lambda: recorded(
        rows_of(eps_id=_objects(lambda n: (n,) if n == 1 else n))
    ),
    "two writers": lambda: recorded(root=recorded(), writer="w00001-00000002"),
}
DAMAGE: dict[str, Callable[[str], object]] = {
    "none": lambda root: None,
    "two neighbours": lambda root: [flip(shards(root)[4], 60), flip(shards(root)[5], -200)],
    "a lost shard": lambda root: remove(shards(root)[4]),
    "rows twice": again,
    "a row group": lambda root: flip(shards(root)[4], 60),
    "a footer": lambda root: flip(shards(root)[4], -200),
    "a trim": lambda root: trim(Storage.open(root), WRITER, 23),
    "a name": lambda root: renamed(shards(root)[3], bytes_of(shards(root)[3]), crc32=1),
    "rows in a name": lambda root: renamed(shards(root)[8], bytes_of(shards(root)[8]), rows=9),
    "units": lambda root: with_units(shards(root)[2], -1),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("made", ROOTS)
@pytest.mark.parametrize("damage", first(4, DAMAGE))
@pytest.mark.each_value_once
def test_a_report_is_the_same_however_shards_are_read(
    made: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = ROOTS[made]()
    DAMAGE[damage](root)
    report, sizes = together(monkeypatch, root)
    assert report == alone(monkeypatch, root)
    if damage == "none":
        assert sizes == [SHARDS] * len(report.ledger)
        assert report.ok or made == "episodes come again"


# ---- what is wrong in one does not make up for what is wrong in another ----


def swapped_sums(one: str, other: str) -> tuple[str, ...]:
    """Give each shard the other's CRC-32 in its name: all of them together have the same sum."""
    names = [ShardName.parse(path.rsplit("/", 1)[1]) for path in (one, other)]
    sums = [name.crc32 for name in names if name is not None]
    return tuple(
        renamed(path, bytes_of(path), crc32=crc32)
        for path, crc32 in zip((one, other), reversed(sums), strict=True)
    )


OPPOSITE: dict[str, Callable[[str, str], tuple[str, ...]]] = {
    "units": lambda one, other: (with_units(one, -1), with_units(other, 1)),
    "fewer units in both": lambda one, other: (with_units(one, -1), with_units(other, -2)),
    "checksums in names": swapped_sums,
    "rows in names": lambda one, other: (
        renamed(one, bytes_of(one), rows=ROWS + 1),
        renamed(other, bytes_of(other), rows=ROWS - 1, first=3 * ROWS + 1),
    ),
    "one bit of the same place": lambda one, other: (flip(one, 60), flip(other, 60)),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("opposite", OPPOSITE)
def test_two_opposite_errors_in_neighbours_are_both_named(
    opposite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = recorded()
    damaged = OPPOSITE[opposite](*shards(root)[2:4])
    report, _ = together(monkeypatch, root)
    assert named(report).keys() == {*damaged}
    assert report == alone(monkeypatch, root)


class Reader:
    """A reader whose pages hold a row fewer than the footer states in one shard, and one more in the next."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self.metadata = plain.metadata

    def read_row_group(self, index: int, **options: Any) -> Any:
        table = self._plain.read_row_group(index, **options)
        row = 30 * table["eps_id"][0].as_py() + table["t"][0].as_py()
        if row == 2 * ROWS:
            return table.slice(1)
        return table.take([0, *range(ROWS)]) if row == 3 * ROWS else table


def rows_moved(patch: pytest.MonkeyPatch, uris: list[str]) -> None:
    plain = shard_file._reader
    patch.setattr(shard_file, "_reader", lambda *args, **options: Reader(plain(*args, **options)))


def column_changed(name: str, change: Callable[[ShardFile, Any, int], None]) -> Any:
    """A plant that changes a column of two shards after their checksums have matched."""

    def plant(patch: pytest.MonkeyPatch, uris: list[str]) -> None:
        plain = ShardFile._table

        def forged(self: ShardFile, *args: Any) -> Any:
            table = plain(self, *args)
            if self.uri not in uris:
                return table
            values = table.column(name).to_numpy().copy()
            change(self, values, 1 - 2 * uris.index(self.uri))
            at = table.column_names.index(name)
            return table.set_column(at, table.field(at), [values])

        patch.setattr(ShardFile, "_table", forged)

    return plant


def of_a_neighbour(file: ShardFile, links: Any, sign: int) -> None:
    """A link to the next shard's first row, or to the row before the first."""
    if sign > 0:
        links[-1] = 1
    else:
        links[0] = -2


def stream_of_a_neighbour(file: ShardFile, streams: Any, sign: int) -> None:
    streams[0] += sign * len(file.streams)


FORGED: dict[str, Callable[[pytest.MonkeyPatch, list[str]], None]] = {
    "a row more, a row fewer": rows_moved,
    "links": column_changed("_next", of_a_neighbour),
    "streams": column_changed("_stream", stream_of_a_neighbour),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("forged", FORGED)
def test_two_opposite_errors_under_right_checksums_are_both_named(
    forged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = recorded()
    uris = [f"memory:/{path}" for path in shards(root)[2:4]]
    FORGED[forged](monkeypatch, uris)
    report, _ = together(monkeypatch, root)
    assert named(report) == {uri.removeprefix("memory:/"): {"group-malformed"} for uri in uris}
    assert report.total.live == (SHARDS - 2) * ROWS
    assert report == alone(monkeypatch, root)


def test_a_short_shard_is_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    root = recorded()
    fetched: list[str] = []
    plain = Storage.read_range

    def counted(self: Any, path: str, start: int, stop: int) -> bytes:
        fetched.append(path)
        return plain(self, path, start, stop)

    monkeypatch.setattr(Storage, "read_range", counted)
    assert rlio.verify(root).ok
    assert len(fetched) == len(set(fetched)) == SHARDS


def test_few_shards_are_open_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    report, sizes = together(monkeypatch, recorded(rows_of(70), rows=1))
    assert report.ok
    assert sizes == [64, 6]
