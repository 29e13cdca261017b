"""Short shards are decoded together: what readers and stores give, raise and count is that of single ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlio
from rlio.catalog.names import ShardName
from rlio.errors import CorruptData, RlioError
from rlio.schemas.shard_file import ShardFile
from rlio.source.snapshot import DatasetSnapshot
from rlio.source.span_reader import SpanReader
from rlio.storage.filesystem import Storage
from tests.further import first, further
from tests.stored_batches import group_bytes

SHARDS, ROWS, WRITERS = 9, 5, 2


def rows_of(count: int, *, dtype: Any = np.float32) -> rlio.SampleBatch:
    """Episodes of 12 rows, which end in an observation that no other row has; with texts and infos."""
    at = np.arange(count)
    ends = at % 12 == 11
    obs = np.stack([at, at * 0.5], axis=1).astype(dtype)
    return rlio.SampleBatch(
        obs=obs,
        new_obs=np.where(ends[:, None], -obs, np.stack([at + 1, (at + 1) * 0.5], axis=1)).astype(dtype),
        rewards=at.astype(np.float32),
        terminateds=ends,
        eps_id=at // 12,
        t=at % 12,
        text=np.array([f"row {n % 3}" for n in at]),
        infos=np.array([{"n": int(n)} if n % 4 else {} for n in at], object),
    )


def write(root: Path, **kwargs: Any) -> str:
    for number in range(WRITERS):
        name, roll = f"w{number}-0000000{number}", rlio.Roll(max_rows=ROWS)
        with rlio.ParquetWriter(root, writer_id=name, spool=None, roll=roll) as writer:
            writer.write(rows_of(SHARDS * ROWS, **kwargs))
    return str(root)


def bits_of(batch: Any) -> dict[str, Any]:
    """Dtype, shape and bytes of each column; objects as they are."""
    return {
        name: (
            str(values.dtype),
            values.shape,
            values.tolist() if values.dtype == object else values.tobytes(),
        )
        for name, values in ((name, np.asarray(batch[name])) for name in batch)
    }


def shards(root: str) -> list[Path]:
    return sorted(Path(root).glob("data/*/*.parquet"))


def in_order(root: str, **options: Any) -> Iterator[Any]:
    with rlio.DatasetReader(root, batch_size=7, epochs=1, cache="none", **options) as reader:
        yield from (bits_of(batch) for batch in reader)
        yield reader.skipped


def shuffled(root: str, **options: Any) -> Iterator[Any]:
    yield from in_order(root, shuffle=True, seed=3, **options)


def of_a_rank(root: str, **options: Any) -> Iterator[Any]:
    yield from shuffled(root, shard=(1, 2), **options)


def of_a_store(root: str, **options: Any) -> Iterator[Any]:
    with rlio.ReplayStore.open(root, **options) as store:
        with store.epochs(batch_size=7, epochs=1, shuffle=False) as reader:
            yield from (bits_of(batch) for batch in reader)
        with store.uniform(batch_size=7, seed=1, draw=rlio.NStep(3)) as sampler:
            yield bits_of(sampler.sample())
        yield store.skipped


READ = [in_order, shuffled, of_a_rank, of_a_store]


def outcome(read: Callable[..., Iterator[Any]], root: str, **options: Any) -> list[Any]:
    """What is read, and the error that ends it."""
    found: list[Any] = []
    try:
        found.extend(read(root, **options))
    except RlioError as error:
        # The rows of a shard after a damaged one may be decoded, but are not served.
        found += [type(error), str(error)]
    return found


def one_by_one(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> list[Any]:
    with monkeypatch.context() as patch:
        patch.setattr(SpanReader, "read_joined", lambda *args, **kwargs: None)
        return outcome(*args, **options)


def together(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> tuple[list[Any], list[int]]:
    """What is read, and how many shards were decoded together each time."""
    sizes: list[int] = []
    plain = ShardFile.read_joined

    def counted(files: Any, **kwargs: Any) -> Any:
        found = plain(files, **kwargs)
        sizes.append(len(files))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(ShardFile, "read_joined", staticmethod(counted))
        return outcome(*args, **options), sizes


@pytest.mark.few(1)
@pytest.mark.parametrize("read", READ)
def test_short_shards_decoded_together_give_the_rows_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Any
) -> None:
    root = write(tmp_path)
    found, sizes = together(monkeypatch, read, root)
    assert found == one_by_one(monkeypatch, read, root)
    assert max(sizes) > (3 if read is of_a_rank else 4)  # A window has four shards. A rank reads half of all.
    if read in (in_order, of_a_store):
        assert sum(sizes) == SHARDS * WRITERS


@pytest.mark.few(1)
@pytest.mark.parametrize("read", [in_order, shuffled])
def test_intact_short_shards_are_still_decoded_together_if_others_are_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Any
) -> None:
    root = write(tmp_path)
    paths = shards(root)
    for place in (5, 13):
        flipped(paths[place], 40)
    alone: list[str] = []
    plain = ShardFile.read_group

    def counted(self: ShardFile, *args: Any, **kwargs: Any) -> Any:
        alone.append(self.uri)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(ShardFile, "read_group", counted)
    (*_, skipped), _ = together(monkeypatch, read, root, on_error="skip")
    assert skipped == 2 * ROWS
    assert {str(paths[place]) for place in (5, 13)} <= set(alone)
    # A damaged shard leaves at most two others alone: the first of what failed, and the rest of a window.
    assert len(set(alone)) <= 2 * 3


def test_a_reader_of_short_shards_resumes_inside_of_what_was_decoded_together(tmp_path: Path) -> None:
    root = write(tmp_path)
    options: dict[str, Any] = {"cache": "none", "shuffle": True, "seed": 3, "batch_size": 7, "epochs": 2}
    with rlio.DatasetReader(root, **options) as reader:
        states, batches = [], []
        for batch in reader:
            batches.append(bits_of(batch))
            states.append(reader.state_dict())
    with rlio.DatasetReader(root, **options) as reader:
        for number in (*range(0, len(states), 5), 1):
            reader.load_state_dict(states[number])
            assert [bits_of(batch) for batch in reader] == batches[number + 1 :]


@pytest.mark.further
def test_shards_of_other_columns_or_dtypes_are_not_decoded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(tmp_path)
    with rlio.ParquetWriter(root, writer_id="w0-1", spool=None, roll=rlio.Roll(max_rows=ROWS)) as writer:
        writer.write(
            rlio.SampleBatch({name: rows_of(20)[name] for name in ("obs", "rewards", "eps_id", "t")})
        )
    for read in READ:
        found, sizes = together(monkeypatch, read, root, missing="fill")
        assert found == one_by_one(monkeypatch, read, root, missing="fill")
        assert sizes


def flipped(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 16
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a flipped bit in a row group": lambda path: flipped(path, 40),
    "a flipped bit in a footer": lambda path: flipped(path, -200),
    "a lost shard": lambda path: path.unlink(),
    "a cut shard": lambda path: path.write_bytes(path.read_bytes()[:-1]),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("damage", first(2, DAMAGE))
@pytest.mark.parametrize("on_error", ["skip", "raise"])
@pytest.mark.each_value_once
def test_one_damaged_shard_among_short_ones_costs_its_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Any, damage: str, on_error: str
) -> None:
    root = write(tmp_path)
    DAMAGE[damage](shards(root)[4])
    found, _ = together(monkeypatch, read, root, on_error=on_error)
    assert found == one_by_one(monkeypatch, read, root, on_error=on_error)
    if on_error == "skip":
        assert found[-1] == ROWS
    else:
        assert issubclass(found[-2], CorruptData)


def test_a_link_to_a_row_of_the_next_shard_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(tmp_path)
    plain = ShardFile._table

    def forged(self: ShardFile, *args: Any) -> Any:
        table = plain(self, *args)
        at = table.column_names.index("_next")
        links = table.column("_next").to_numpy().copy()
        links[-2] += self.uri == uri
        return table.set_column(at, table.field(at), [links])

    uri = rlio.open_dataset(root).files()[3]
    monkeypatch.setattr(ShardFile, "_table", forged)
    for read in READ:
        found, _ = together(monkeypatch, read, root)
        assert found[-2:] == one_by_one(monkeypatch, read, root)[-2:]
        assert "leaves its row group" in found[-1]
        assert uri in found[-1]


def test_a_row_of_a_stream_of_the_next_shard_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(tmp_path)
    plain = ShardFile._table

    def forged(self: ShardFile, *args: Any) -> Any:
        table = plain(self, *args)
        at = table.column_names.index("_stream")
        streams = table.column("_stream").to_numpy() + len(self.streams) * (self.uri == uri)
        return table.set_column(at, table.field(at), [streams.astype(np.int32)])

    uri = rlio.open_dataset(root).files()[4]
    monkeypatch.setattr(ShardFile, "_table", forged)
    for read in READ:
        found, _ = together(monkeypatch, read, root)
        assert found[-1] == one_by_one(monkeypatch, read, root)[-1]
        assert "belongs to no stream" in found[-1]


def test_attributes_of_short_written_batches_come_with_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rlio.ParquetWriter(tmp_path, spool=None, roll=rlio.Roll(max_rows=ROWS)) as writer:
        for number in range(SHARDS):
            batch = rows_of(ROWS)
            batch["eps_id"] = batch["eps_id"] + number
            batch.num_grad_updates = float(number)
            writer.write(batch)

    def updates(root: str) -> Iterator[Any]:
        with rlio.DatasetReader(root, batch_size=ROWS, epochs=1, cache="none") as reader:
            yield from (batch.num_grad_updates for batch in reader)

    found = outcome(updates, str(tmp_path))
    assert found == [*map(float, range(SHARDS))] == one_by_one(monkeypatch, updates, str(tmp_path))


@pytest.mark.further
def test_a_trimmed_shard_and_its_neighbours_give_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(tmp_path)
    rlio.maintenance.trim(root, before={"w0-00000000": 2 * ROWS + 2})
    for read in READ:
        found, _ = together(monkeypatch, read, root)
        assert found == one_by_one(monkeypatch, read, root)


def test_a_small_shard_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(tmp_path)
    fetched: list[str] = []
    plain = Storage.read_range

    def counted(self: Any, path: str, start: int, stop: int) -> bytes:
        if ShardName.parse(path.rsplit("/", 1)[-1]):
            fetched.append(path)
        return plain(self, path, start, stop)

    monkeypatch.setattr(Storage, "read_range", counted)
    outcome(of_a_store, root)
    assert len(fetched) == len(set(fetched)) == SHARDS * WRITERS


def infos_and_times(root: Path) -> str:
    """Shards with infos whose keys are columns, a later one with a further key, and times."""
    for writer in range(WRITERS):
        with rlio.ParquetWriter(str(root), writer_id=f"w{writer}", roll=rlio.Roll(max_rows=ROWS)) as out:
            for first in range(0, SHARDS * ROWS, ROWS):
                t = np.arange(first, first + ROWS)
                infos = [{"x": float(row), **({"late": row} if first else {})} for row in t.tolist()]
                out.write(rlio.SampleBatch(t=t, infos=infos, when=t.astype("M8[s]")))
    return str(root)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["numbers", "infos and times"])
def test_a_shuffle_opens_no_shard_before_those_of_its_window(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = numbers(tmp_path) if kind == "numbers" else infos_and_times(tmp_path)
    opened: list[str] = []
    plain = DatasetSnapshot.open_shard

    def counted(self: Any, segment: Any) -> Any:
        opened.append(segment.path)
        return plain(self, segment)

    monkeypatch.setattr(DatasetSnapshot, "open_shard", counted)
    with rlio.DatasetReader(root, cache="none", shuffle=True, seed=3, batch_size=4, epochs=1) as reader:
        assert not opened
        reader.sample()
        # Those of the window, and of the one that is loaded ahead.
        assert len(set(opened)) <= 8 < SHARDS * WRITERS
        rows = rlio.concat_samples(list(reader))
    if kind != "numbers":
        assert [info["x"] for info in rows["infos"]] == rows["t"].tolist()
        assert (rows["when"].astype(np.int64) == rows["t"]).all()


def numbers(root: Path) -> str:
    """Rows of fixed size, whose groups follow from the names of the shards."""
    for number in range(WRITERS):
        name, roll = f"w{number}-0000000{number}", rlio.Roll(max_rows=ROWS)
        with rlio.ParquetWriter(root, writer_id=name, spool=None, roll=roll) as writer:
            at = np.arange(SHARDS * ROWS)
            writer.write(rlio.SampleBatch(obs=np.stack([at, at], axis=1), rewards=at * 1.0, t=at))
    return str(root)


@pytest.mark.few(1)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("damage", [None, *further(*DAMAGE)])
@pytest.mark.parametrize("stated", [3, *further(2, 64)])
def test_a_shuffle_of_shards_in_other_groups_than_stated_gives_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stated: int, damage: str | None, on_error: str
) -> None:
    with group_bytes(64):
        root = numbers(tmp_path)
    files = shards(root)
    groups = {len(rlio.open_dataset(root).open_shard(each).rows) for each in rlio.open_dataset(root).segments}
    assert groups == {3}
    if damage is not None:
        DAMAGE[damage](files[4])
    monkeypatch.setattr(DatasetSnapshot, "_group_rows", stated)
    if damage is not None and on_error == "raise":
        found = outcome(shuffled, root)
        assert issubclass(found[-2], CorruptData)
        return
    with rlio.DatasetReader(
        root, cache="none", shuffle=True, seed=3, batch_size=4, epochs=1, on_error=on_error
    ) as reader:
        rows = np.concatenate([batch["t"] for batch in reader]).tolist()
        skipped = reader.skipped
    expected = [*range(SHARDS * ROWS)] * WRITERS
    lost = set(range(4 * ROWS, 5 * ROWS))
    assert len(rows) + skipped == len(expected)
    assert set(expected) - lost <= set(rows)
    assert sorted([*rows, *(lost_rows(rows, expected))]) == sorted(expected)
    assert skipped == (0 if damage is None else len(lost_rows(rows, expected)))


@pytest.mark.parametrize("stated", [2, *further(1, 4)])
def test_a_shuffle_of_shards_of_one_group_that_windows_cut_gives_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stated: int
) -> None:
    """A window has a part of a shard, which is short enough to be decoded with others."""
    root = numbers(tmp_path)
    monkeypatch.setattr(DatasetSnapshot, "_group_rows", stated)
    with rlio.DatasetReader(root, cache="none", shuffle=True, seed=3, batch_size=4, epochs=1) as reader:
        rows = np.concatenate([batch["t"] for batch in reader]).tolist()
    assert sorted(rows) == sorted([*range(SHARDS * ROWS)] * WRITERS)


def lost_rows(rows: list[int], expected: list[int]) -> list[int]:
    left = list(expected)
    for row in rows:
        left.remove(row)
    return left


def test_a_state_of_a_shuffle_fits_groups_that_are_stated_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = numbers(tmp_path)
    kwargs: dict[str, Any] = {"cache": "none", "shuffle": True, "seed": 3, "batch_size": 4, "epochs": 2}
    with monkeypatch.context() as patch:  # As earlier versions have it.
        patch.setattr(DatasetSnapshot, "stated_groups", lambda self, segment: None)
        with rlio.DatasetReader(root, **kwargs) as reader:
            for _ in range(5):
                reader.sample()
            state = reader.state_dict()
            rest = [bits_of(batch) for batch in reader]
    with rlio.DatasetReader(root, **kwargs) as reader:
        reader.load_state_dict(state)
        assert [bits_of(batch) for batch in reader] == rest
