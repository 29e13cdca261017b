"""What goes wrong with stores on disk is a clear error or a clean rebuild: no wrong row, no crash."""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import subprocess
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counter_env import episode
from counter_world import World, record_world
from crash_child import fork, wait_for
from further import further

import rlio
from rlio import DatasetReader, ParquetWriter, ReplayStore, Roll, open_dataset
from rlio.errors import CacheError, RlioError
from rlio.maintenance import compact
from rlio.replay import build as building
from rlio.replay import cached as caching
from rlio.replay import table

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLIO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return record_world(tmp_path / "data", kind="stack", episodes=4)


def check_all(world: World) -> None:
    """Raise unless the store on disk has every row once, and right."""
    with DatasetReader(world.root, cache="disk", shuffle=True, seed=0, epochs=1, batch_size=100) as reader:
        found = np.concatenate([world.check(batch) for batch in reader])  # type: ignore[arg-type]
    np.testing.assert_array_equal(found[np.lexsort(found.T[::-1])], world.keys)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A small disk of its own for the cache; options of the mount are the parameter."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", request.param, "tmpfs", str(folder)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small disk could be mounted: {done.stderr.strip()}")
    monkeypatch.setenv("RLIO_CACHE", str(folder / "cache"))
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "disk", ["size=700k", "size=40m", *further("size=300k", "size=1200k")], indirect=True
)
def test_a_full_disk_is_an_error_and_a_store_is_built_once_there_is_room(world: World, disk: Path) -> None:
    filler = disk / "filler"
    filler.write_bytes(bytes(_free(disk) - 150_000))

    def child() -> None:  # In a process of its own: the disk is given back at its end.
        with pytest.raises(CacheError, match=r"space|room|RLIO_CACHE"):
            ReplayStore.open(world.root, cache="disk")
        filler.unlink()
        if _free(disk) > 30e6:
            check_all(world)
        else:
            with pytest.raises(CacheError):
                ReplayStore.open(world.root, cache="disk")

    assert wait_for(fork(child)) == 0


def _free(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


@pytest.mark.parametrize("disk", ["size=64m,noexec,nosuid,nodev"], indirect=True)
def test_a_disk_from_which_nothing_may_run_will_do(world: World, disk: Path) -> None:
    assert wait_for(fork(lambda: check_all(world))) == 0


@pytest.mark.parametrize("limit", [1000, *further(0, 100_000, 400_000)])
def test_a_limit_on_file_sizes_is_an_error_and_then_forgotten(world: World, cache: Path, limit: int) -> None:
    def child() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with pytest.raises(RlioError) as caught:
            ReplayStore.open(world.root, cache="disk")
        assert isinstance(caught.value, CacheError)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        check_all(world)

    assert wait_for(fork(child)) == 0


def test_a_cache_that_is_no_folder_is_an_error_that_names_it(world: World, cache: Path) -> None:
    cache.write_text("not a folder")
    with pytest.raises(RlioError, match=r"give the folder itself .*cache"):
        ReplayStore.open(world.root, cache="disk")
    with ReplayStore.open(world.root, cache="memory") as store:
        assert len(store) == world.rows


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_cache_that_may_not_be_written_is_an_error_that_names_it(
    world: World, cache: Path, tmp_path: Path
) -> None:
    for folder in (tmp_path, *tmp_path.parents):  # Those of the tests, down from /tmp, are root's alone.
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(0o755)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o755)

    def child() -> None:
        os.environ["RLIO_CACHE"] = str(closed / "cache")
        os.setuid(65534)
        with pytest.raises(CacheError, match="closed"):
            ReplayStore.open(world.root, cache="disk")

    assert wait_for(fork(child)) == 0


@pytest.mark.further
@pytest.mark.parametrize("seed", [0, *further(1, 2, 3, 4, 5)])
def test_an_extension_that_is_killed_anywhere_costs_nobody_a_row(
    tmp_path: Path, cache: Path, seed: int
) -> None:
    """Episodes go on over it: links and frames of rows that are there are written by an extension."""
    rng = random.Random(seed)
    root = tmp_path / "growing"

    def add(number: int) -> None:
        with ParquetWriter(root, writer_id=f"w{number:05}-00000000", roll=Roll(max_rows=40)) as writer:
            for env in range(3):
                writer.write(episode(env, number, 30, kind="stack"))

    add(0)
    with ParquetWriter(root, writer_id="w00009-00000000", roll=Roll(max_rows=40)) as writer:
        writer.write(episode(9, 0, 60, stop=20, kind="stack"))
        writer.flush()
        old = ReplayStore.open(root, cache="disk")
        # Windows that would lead into what comes later, if links were followed there.
        before = rows_of(old), rows_of(old, draw=rlio.NStep(30))
        writer.write(episode(9, 0, 60, start=20, kind="stack"))
    add(1)
    calls, dies_at = [0], 0

    def dying(module: Any, name: str) -> None:
        plain = getattr(module, name)

        def maybe(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == dies_at or name == "to_json":  # The last call: all is there, and not yet said.
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args, **kwargs)

        setattr(module, name, maybe)

    def child() -> None:
        dying(table.RowTable, "link")
        dying(table.RowTable, "append")
        dying(table.FramePool, "append")
        dying(caching._Contents, "to_json")
        ReplayStore.open(root, cache="disk")

    ends = []
    for at in (0, *rng.sample(range(1, 10), 3)):  # After the first, it is rebuilt.
        dies_at = at
        ends.append(wait_for(fork(child)))
        assert_same_rows(rows_of(old), before[0])
        assert_same_rows(rows_of(old, draw=rlio.NStep(30)), before[1])
    assert ends == [-signal.SIGKILL] * 4
    with ReplayStore.open(root, cache="disk") as store, ReplayStore.open(root) as plain:
        for options in (
            {},
            {"draw": rlio.NStep(7)},
            {"draw": rlio.Sequences(5, burn_in=2)},
            {"draw": rlio.WholeEpisodes()},
        ):
            assert_same_rows(rows_of(store, **options), rows_of(plain, **options))
    assert_same_rows(rows_of(old, draw=rlio.NStep(30)), before[1])


def test_an_older_listing_gets_no_windows_into_rows_that_it_has_not(tmp_path: Path, cache: Path) -> None:
    """The store has them between those of the listing: it was rebuilt, writer by writer."""
    root = tmp_path / "growing"
    with (
        ParquetWriter(root, writer_id="w00000-00000000") as one,
        ParquetWriter(root, writer_id="w00001-00000000") as other,
    ):
        one.write(episode(0, 0, 40, stop=20))
        other.write(episode(1, 0, 40, stop=20))
        one.flush()
        other.flush()
        earlier = open_dataset(root)
        one.write(episode(0, 0, 40, start=20))
        one.flush()
        with ReplayStore.open(root, cache="disk") as store:
            assert len(store) == 60
        with ReplayStore.open(earlier, cache="disk") as store, ReplayStore.open(earlier) as plain:
            for options in (
                {},
                {"draw": rlio.NStep(10)},
                {"draw": rlio.Sequences(15)},
                {"draw": rlio.WholeEpisodes()},
            ):
                assert_same_rows(rows_of(store, **options), rows_of(plain, **options))


def rows_of(store: ReplayStore, **options: Any) -> list[Any]:
    return list(store.epochs(batch_size=50, epochs=1, shuffle=False, **options))


def assert_same_rows(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.equals(theirs)


def test_shards_that_are_compacted_while_a_store_is_built_are_read_where_they_are_now(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = record_world(tmp_path / "data", episodes=6)
    dataset = open_dataset(world.root)
    plain, turns = building.batches_of, [0]
    gone: list[str] = []

    def and_then_they_are_gone(*args: Any) -> Any:
        for found in plain(*args):
            turns[0] += 1
            if turns[0] == 3:
                old = set(dataset.files())
                compact(world.root)
                for path in old - set(open_dataset(world.root).files()):
                    gone.append(path)
                    Path(path).unlink()
            yield found

    monkeypatch.setattr(building, "batches_of", and_then_they_are_gone)
    with DatasetReader(dataset, cache="disk", epochs=1, shuffle=True, seed=0, batch_size=100) as reader:
        found = np.concatenate([world.check(batch) for batch in reader])  # type: ignore[arg-type]
    np.testing.assert_array_equal(found[np.lexsort(found.T[::-1])], world.keys)
    assert gone


@pytest.mark.parametrize("times", [3, *further(12)])
def test_damage_in_a_built_store_ends_no_process(world: World, cache: Path, times: int) -> None:
    """No checksum covers the bytes of a built store (one covers their lengths): what a disk damages later
    may be served. What must not happen is a crash, or a read behind the end of an array.
    """
    ReplayStore.open(world.root, cache="disk").close()
    files = sorted(cache.rglob("*.array"))
    assert files
    rng = random.Random(0)

    def child() -> None:
        for path in files:
            whole = path.read_bytes()
            for _ in range(times):
                damaged = bytearray(whole)
                for _ in range(200):
                    damaged[rng.randrange(len(damaged))] ^= rng.randrange(1, 256)
                path.write_bytes(damaged)
                for options in (
                    {},
                    {"draw": rlio.NStep(9)},
                    {"draw": rlio.Sequences(4)},
                    {"draw": rlio.WholeEpisodes()},
                ):
                    try:
                        with ReplayStore.open(world.root, cache="disk") as store:
                            rows_of(store, **options)
                    except (RlioError, IndexError, ValueError):
                        pass
            path.write_bytes(whole)
        check_all(world)

    assert wait_for(fork(child), seconds=120) == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_closed_reader_holds_no_rows(world: World, cache: Path, where: Any) -> None:
    """Gigabytes would else wait for the garbage collector, which counts objects."""
    gc.disable()
    try:
        reader = DatasetReader(world.root, cache=where, shuffle=True, seed=0, batch_size=10)
        reader.sample()
        (rows,) = reader._pass.store.tables.values()  # type: ignore[attr-defined]
        kept = weakref.ref(rows)
        del rows
        reader.close()
        assert kept() is None
        assert len(reader) == world.rows
    finally:
        gc.enable()
