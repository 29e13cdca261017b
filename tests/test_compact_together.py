"""`compact` opens each short shard once and decodes it with its neighbours: its new shards are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from further import first
from stored_batches import files, fresh_root, group_bytes, put, remove, store

import rlio
from rlio import Roll, SampleBatch
from rlio.catalog.names import ShardName
from rlio.errors import CorruptData, RlioError
from rlio.schemas.provenance import Provenance
from rlio.schemas.shard_file import ShardFile
from rlio.storage import Storage

SHARDS, ROWS = 9, 5


def rows_of(count: int = SHARDS * ROWS, at: int = 0) -> SampleBatch:
    """Episodes of 12 rows, which end in an observation that no other row has; with texts and infos."""
    row = np.arange(at, at + count)
    ends = row % 12 == 11
    obs = np.stack([row, row * 0.5], axis=1).astype(np.float32)
    return SampleBatch(
        obs=obs,
        new_obs=np.where(ends[:, None], -obs, np.stack([row + 1, (row + 1) * 0.5], axis=1)).astype(
            np.float32
        ),
        rewards=row.astype(np.float32),
        terminateds=ends,
        eps_id=row // 12,
        t=row % 12,
        text=np.array([f"row {n % 3}" for n in row]),
        infos=np.array([{"n": int(n)} if n % 4 else {} for n in row], object),
    )


def recorded(*, rows: int = ROWS, shards: int = SHARDS, root: str | None = None, **options: Any) -> str:
    options.setdefault("writer_id", "w0")
    return store(rows_of(rows * shards), root=root, roll=Roll(max_rows=rows, max_seconds=None), **options)


def in_small_groups() -> str:
    """Shards of one group each, whose rows fill several groups of a larger one."""
    with group_bytes(1200):
        return recorded()


def in_batches() -> str:
    """Written batches that begin within shards, have attributes, and come at other times."""
    root, times = fresh_root(), iter(range(10_000_000, 99_000_000, 1000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlio.schemas.row_groups.utc_ms", lambda: next(times))
        with rlio.ParquetWriter(root, writer_id="w0", roll=Roll(max_rows=ROWS, max_seconds=None)) as writer:
            for at in range(0, SHARDS * ROWS, 3):
                batch = rows_of(3, at)
                batch.num_grad_updates = float(at)
                writer.write(batch)
    return root


def of_two_schemas() -> str:
    """The infos of a writer's later shards have a key more, which is a column."""
    root = fresh_root()
    with rlio.ParquetWriter(root, writer_id="w0", roll=Roll(max_rows=ROWS, max_seconds=None)) as writer:
        writer.write(rows_of(4 * ROWS))
        batch = rows_of(5 * ROWS, 4 * ROWS)
        batch["infos"] = np.array([{"n": n, "late": 0.5} for n in range(5 * ROWS)], object)
        writer.write(batch)
    return root


def of_two_writers() -> str:
    root = recorded(provenance=Provenance(seed=1))
    return recorded(root=root, writer_id="w1", provenance=Provenance(seed=2))


def trimmed() -> str:
    root = recorded()
    rlio.maintenance.trim(root, before={"w0": 2 * ROWS + 2})
    return root


def shards(root: str) -> list[str]:
    """Paths of the shards, in order."""
    return sorted(path for path in files(root) if ShardName.parse(path.rsplit("/", 1)[1]))


def copied(root: str) -> str:
    found = fresh_root()
    for path, data in files(root, "").items():
        put(path.replace(root.removeprefix("memory:/"), found.removeprefix("memory:/")), data)
    return found


def made(root: str, **options: Any) -> Any:
    """The objects that `compact` leaves, whose names hold their checksums, and what it says, or its error."""
    said: Any
    try:
        report = rlio.maintenance.compact(root, **options)
        said = [(run.first, run.rows, len(run.sources)) for run in report.runs]
        said += [text.replace(root, "") for text in report.skipped]
    except RlioError as error:
        said = type(error), str(error).replace(root, "")
    return sorted(path.replace(root.removeprefix("memory:/"), "") for path in files(root)), said


def together(monkeypatch: pytest.MonkeyPatch, root: str, **options: Any) -> tuple[Any, list[int]]:
    """What is `made`, and how many shards were decoded together each time."""
    sizes: list[int] = []
    plain = ShardFile.read_joined

    def counted(some: Any, **kwargs: Any) -> Any:
        found = plain(some, **kwargs)
        sizes.append(len(some))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(ShardFile, "read_joined", staticmethod(counted))
        return made(root, **options), sizes


def alone(monkeypatch: pytest.MonkeyPatch, root: str, **options: Any) -> Any:
    """What is `made` if each shard is decoded by itself."""
    with monkeypatch.context() as patch:
        patch.setattr(ShardFile, "form", None)
        return made(root, **options)


ROOTS: dict[str, Callable[[], str]] = {
    "one writer": recorded,
    "small groups": in_small_groups,
    "written batches": in_batches,
    "two schemas": of_two_schemas,
    "two writers": of_two_writers,
    "a trim": trimmed,
}


@pytest.mark.few(2)
@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.each_value_once
def test_the_new_shards_are_those_of_shards_decoded_one_by_one(
    root: str, into: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = ROOTS[root]()
    other = copied(stored)
    if into:
        roots = fresh_root(), fresh_root()
        _, sizes = together(monkeypatch, stored, into=roots[0])
        alone(monkeypatch, stored, into=roots[1])
        found, expected = ([*files(each).values()] for each in roots)
    else:
        found, sizes = together(monkeypatch, stored)
        expected = alone(monkeypatch, other)
    assert found == expected
    assert max(sizes) > 1


# ---- damage ----


def flip(path: str, at: int) -> None:
    root = f"memory://{path.split('/')[1]}"
    data = bytearray(files(root)[path])
    data[at] ^= 16
    put(path, bytes(data))


def rename(path: str) -> None:
    """Give a shard a name with another checksum."""
    root = f"memory://{path.split('/')[1]}"
    folder, _, text = path.rpartition("/")
    name = ShardName.parse(text)
    assert name is not None
    put(f"{folder}/{name._replace(crc32=1).format()}", files(root)[path])
    remove(path)


DAMAGE: dict[str, Callable[[str], object]] = {
    "a row group": lambda root: flip(shards(root)[4], 40),
    "a name": lambda root: rename(shards(root)[4]),
    "a footer": lambda root: flip(shards(root)[4], -200),
    "two footers": lambda root: [flip(shards(root)[n], -200) for n in (1, 2)],
    "the first footer": lambda root: flip(shards(root)[0], -200),
    "the last footer": lambda root: flip(shards(root)[-1], -200),
}
LEFT = {
    "a row group": [],
    "a name": [],
    "a footer": [4, 4],
    "two footers": [6],
    "the first footer": [8],
    "the last footer": [8],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("damage", first(3, DAMAGE))
@pytest.mark.parametrize("on_error", ["skip", "raise"])
@pytest.mark.each_value_once
def test_a_damaged_shard_is_named_and_its_run_left_as_it_was(
    damage: str, on_error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = recorded()
    DAMAGE[damage](root)
    other, before = copied(root), shards(root)
    found, _ = together(monkeypatch, root, on_error=on_error)
    assert found == alone(monkeypatch, other, on_error=on_error)
    if on_error == "raise":
        assert issubclass(found[1][0], CorruptData)
        assert shards(root) == before
    else:
        runs = [said for said in found[1] if isinstance(said, tuple)]
        assert [sources for _, _, sources in runs] == LEFT[damage]
        assert len(found[1]) - len(runs) == (2 if damage == "two footers" else 1)
        assert {*before} < {*shards(root)} if runs else before == shards(root)


# ---- what is read ----


def ranges(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> list[tuple[str, int, int]]:
    """The ranges of shards that a call reads."""
    fetched: list[tuple[str, int, int]] = []
    plain = Storage.read_range

    def counted(self: Any, path: str, start: int, stop: int) -> bytes:
        fetched.append((path, start, stop))
        return plain(self, path, start, stop)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "read_range", counted)
        call()
    return fetched


def test_a_short_shard_is_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    root = recorded()
    fetched = ranges(monkeypatch, lambda: rlio.maintenance.compact(root))
    assert len(fetched) == len({path for path, _, _ in fetched}) == SHARDS
    assert len(rlio.open_dataset(root).segments) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize(("least", "left"), [(69, 1), (70, 1), (71, 70)])
def test_a_run_needs_as_many_shards_as_asked_for(least: int, left: int) -> None:
    """More than stay open."""
    root = recorded(rows=1, shards=70)
    assert rlio.maintenance.compact(root, min_shards=least).shards_after == left
    assert len(rlio.open_dataset(root).segments) == left


def test_only_footers_are_read_of_shards_that_do_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    root = fresh_root()
    for seed in range(4):
        batch = SampleBatch(obs=np.random.default_rng(seed).random((2000, 10)), rewards=np.zeros(2000))
        elsewhere = store(batch, writer_id="w0", provenance=Provenance(seed=seed))
        (path,) = shards(elsewhere)
        name = ShardName.parse(path.rsplit("/", 1)[1])
        assert name is not None
        put(
            f"{root.removeprefix('memory:/')}/data/w0/{name._replace(first=2000 * seed).format()}",
            files(elsewhere)[path],
        )
    put(
        f"{root.removeprefix('memory:/')}/_rlio.json",
        files(elsewhere, "")[f"{elsewhere.removeprefix('memory:/')}/_rlio.json"],
    )
    fetched = ranges(monkeypatch, lambda: rlio.maintenance.compact(root))
    assert len({path for path, _, _ in fetched}) == 4
    assert all(start > 0 for _, start, _ in fetched)
