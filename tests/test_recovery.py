"""Recovery makes of a dead writer's log what the writer would have made, and of a damaged one a prefix."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_child import WRITERS, Tally, batch_of, files_of, fork, logs_of, rows_of, shard_names, wait_for
from further import first, further
from spilled_log import REST, ROWS, TOTAL
from spilled_log import batch_of as spilled_batch
from typer.testing import CliRunner

from rlio import DatasetReader, JsonWriter, MultiAgentBatch, ParquetWriter, Roll, SampleBatch
from rlio.cli.main import app
from rlio.errors import HoleError
from rlio.log.spool import Spool
from rlio.storage.filesystem import Storage
from rlio.writers import recovery
from rlio.writers.recovery import recover

Writer = ParquetWriter | JsonWriter


def _abandon(open_writer: Callable[[], Writer], act: Callable[[Writer], object]) -> None:
    """Use a writer in a child that then dies without a word."""

    def run() -> None:
        act(open_writer())
        os._exit(7)

    assert wait_for(fork(run)) == 7


@pytest.fixture(scope="module", params=["parquet", "json"])
def log(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a log of 3 segments of 5 writes each, of 3 rows, of which no row is published."""
    root = tmp_path_factory.mktemp("log")

    def act(writer: Writer) -> None:
        tally = Tally()
        for _ in range(3):
            for _ in range(5):
                tally.write(writer, 3)
            writer._publisher.log.cut(begins_shard=True)

    _abandon(lambda: WRITERS[request.param](root, writer_id="w"), act)
    return root


@pytest.mark.few(1)
def test_recovery_shows_how_many_bytes_of_all_logs_are_done(log: Path, tmp_path: Path) -> None:
    """There was no progress of a recovery, which may take minutes."""
    shutil.copytree(log, tmp_path / "a")
    parts: list[tuple[str, int]] = []
    done: list[int] = []

    @contextlib.contextmanager
    def shown(name: str, total: int) -> Iterator[Callable[[int], object]]:
        parts.append((name, total))
        yield done.append

    assert recover(tmp_path / "a", all_hosts=True, progress=shown).rows == 45
    ((name, total),) = parts
    assert (name, sum(done)) == ("recover", total)
    assert sum(map(bool, done)) > 10  # By frame.


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_a_log_with_encoded_shards_of_an_earlier_version_is_recovered_whole(
    kind: str, tmp_path: Path, checkout: Path
) -> None:
    log = checkout / "tests" / "golden" / "spilled-log" / kind
    root = _copy(log, tmp_path / "whole")
    shards = {path.name: path.read_bytes() for path in (root / "_wal" / "w").glob("0*-*")}
    assert len(shards) == 3
    found = _recover_copy(root)
    assert (found.rows, found.lost_rows, found.set_aside, found.error) == (TOTAL - ROWS, 0, (), None)
    stored = {path.name: path.read_bytes() for path in (root / "data" / "w").iterdir()}
    assert shards.items() <= stored.items()
    with DatasetReader(root, epochs=1, batch_size=TOTAL) as reader:
        (batch,) = reader
    assert batch.equals(spilled_batch(0, TOTAL))
    assert list((root / "data" / "w").glob(f"_sealed-{TOTAL}"))

    root = _copy(log, tmp_path / "damaged")
    damaged = sorted((root / "_wal" / "w").glob("000000000020-*"))[0]
    damaged.write_bytes(damaged.read_bytes()[::-1])
    found = _recover_copy(root)
    assert found.rows == 2 * ROWS
    assert found.lost_rows >= ROWS + REST, "those of the shard, and those behind the hole"
    assert found.error is not None
    with pytest.raises(HoleError):
        rows_of(root)


def _segments(root: Path) -> list[Path]:
    return sorted((root / "_wal" / "w").glob("*.wal"))


def _copy(log: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(log, target)
    return target


def _recover_copy(root: Path) -> recovery.RecoveredLog:
    (found,) = recover(root, all_hosts=True).logs
    assert found.outcome == "recovered"
    assert logs_of(root) == []
    return found


@pytest.mark.few(1)
def test_a_log_is_recovered_whole(log: Path, tmp_path: Path) -> None:
    root = _copy(log, tmp_path / "copy")
    found = _recover_copy(root)
    assert (found.rows, found.lost_rows, found.set_aside, found.error) == (45, 0, (), None)
    assert rows_of(root) == list(range(45))
    assert len(shard_names(root)) == 3
    assert list((root / "data" / "w").glob("_sealed-45"))


def test_recovery_lists_the_folders_of_dead_writers_and_not_the_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is done whenever a writer opens, also where a hundred thousand shards lie beside the dead one's."""
    with ParquetWriter(tmp_path, writer_id="other") as writer:
        writer.write(batch_of(0, 3))

    def write_two(writer: Writer) -> None:
        JsonWriter(tmp_path, writer_id="b").write(batch_of(5, 2))
        writer.write(batch_of(3, 2))

    _abandon(lambda: ParquetWriter(tmp_path, writer_id="a"), write_two)
    # A log without an owner, of a writer that was closed: files that a power failure brought back.
    kept = _copy(tmp_path / "_wal" / "a", tmp_path.with_name("kept"))
    listed: list[str] = []
    real = Storage.list

    def note(self: Storage, prefix: str = "", *, limit: int | None = None) -> Any:
        listed.append(prefix)
        return real(self, prefix, limit=limit)

    monkeypatch.setattr(Storage, "list", note)
    with ParquetWriter(tmp_path) as writer:
        writer.write(batch_of(7, 1))
    found = [prefix for prefix in listed if prefix.startswith("data") or not prefix]
    assert found.count("data/a") <= 2
    assert found.count("data/b") <= 2
    assert set(found) == {"data/a", "data/b"}

    (kept / "owner").unlink()
    shutil.copytree(kept, tmp_path / "_wal" / "a")
    listed.clear()
    (again,) = recover(tmp_path, must_exist=True).logs
    assert (again.outcome, again.error) == ("recovered", None)
    assert listed == ["data/a"]
    listed.clear()
    assert recover(tmp_path, must_exist=True).logs == ()
    assert listed == []


def test_rows_that_a_better_copy_of_a_log_has_are_served(log: Path, tmp_path: Path) -> None:
    """As `rlio verify` says to do where recovery set a damaged segment aside."""
    root = _copy(log, tmp_path / "copy")
    kept = _copy(root / "_wal" / "w", tmp_path / "kept")
    _segments(root)[2].write_bytes(b"")
    _recover_copy(root)
    assert rows_of(root) == list(range(30))
    shutil.copytree(kept, root / "_wal" / "w")
    _recover_copy(root)
    assert rows_of(root) == list(range(45))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_segment_that_is_gone_leaves_no_hole(log: Path, tmp_path: Path, lost: int) -> None:
    """Names are synced with the rows: a later segment may be there, and an earlier one not."""
    root = _copy(log, tmp_path / "copy")
    _segments(root)[lost].unlink()
    found = _recover_copy(root)
    assert rows_of(root) == list(range(15 * lost))
    assert (found.rows, found.lost_rows, len(found.set_aside)) == (15 * lost, 30 - 15 * lost, 2 - lost)
    assert "are missing" in str(found.error)


def test_what_a_power_failure_brought_back_of_a_finished_log_goes(log: Path, tmp_path: Path) -> None:
    """Removals that were not synced may come undone one by one: rows are there, and their owner is not."""
    root = _copy(log, tmp_path / "copy")
    kept = _copy(root / "_wal" / "w", tmp_path / "kept")
    _recover_copy(root)
    (kept / "owner").unlink()
    shutil.copytree(kept, root / "_wal" / "w")
    found = _recover_copy(root)
    assert (found.rows, found.error) == (0, None)
    assert not (root / "_wal" / "w").exists()
    assert rows_of(root) == list(range(45))


def test_rows_without_an_owner_stay_unless_all_are_stored(log: Path, tmp_path: Path) -> None:
    root = _copy(log, tmp_path / "copy")
    (root / "_wal" / "w" / "owner").unlink()
    (found,) = recover(root, all_hosts=True).logs
    assert found.outcome != "recovered"
    assert "no owner file" in str(found.error)
    assert len(_segments(root)) == 3


@pytest.mark.further
@pytest.mark.parametrize("sizes", [20, *further(60)])
def test_a_log_that_ends_at_any_byte_gives_the_rows_before_it(log: Path, tmp_path: Path, sizes: int) -> None:
    last = _segments(log)[-1]
    data = last.read_bytes()
    for size in range(0, len(data) + 1, max(len(data) // sizes, 1)):
        root = _copy(log, tmp_path / "copy")
        _segments(root)[-1].write_bytes(data[:size])
        found = _recover_copy(root)
        rows = rows_of(root)
        assert rows == list(range(len(rows)))
        # What a death within write() leaves is no damage.
        assert (found.rows, found.lost_rows, found.error) == (len(rows), 0, None)
        assert 30 <= len(rows) <= 45


def _check_flip(log: Path, root: Path, bit: int) -> None:
    _copy(log, root)
    for path in _segments(root):
        size = path.stat().st_size
        if bit < 8 * size:
            data = bytearray(path.read_bytes())
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(bytes(data))
            break
        bit -= 8 * size
    found = _recover_copy(root)
    rows = rows_of(root)
    assert rows == list(range(len(rows)))
    # At most the damaged frame is not counted as lost: its row count cannot be believed.
    assert found.rows == len(rows)
    assert 45 - 3 <= found.rows + found.lost_rows <= 45
    # No acknowledged row goes in silence, the last ones of a segment neither.
    assert (found.error is None) == (found.set_aside == ()) == (len(rows) == 45)
    before = files_of(root)
    assert recover(root, all_hosts=True).logs == ()
    assert files_of(root) == before


@pytest.mark.few(1)
@pytest.mark.parametrize(("seed", "bits"), [(1, 20), *further((1, 50), (2, 50), (3, 50))])
def test_no_flipped_bit_of_a_log_publishes_a_wrong_row(
    log: Path, tmp_path: Path, seed: int, bits: int
) -> None:
    there = 8 * sum(path.stat().st_size for path in _segments(log))
    for bit in random.Random(seed).sample(range(there), bits):
        _check_flip(log, tmp_path / "copy", bit)


@pytest.mark.soak
def test_no_flipped_bit_of_all_publishes_a_wrong_row(log: Path, tmp_path: Path) -> None:
    for bit in range(8 * sum(path.stat().st_size for path in _segments(log))):
        _check_flip(log, tmp_path / "copy", bit)


@pytest.mark.few(1)
@pytest.mark.parametrize("first", first(1, range(1, 10)))
def test_recovery_of_damage_that_is_interrupted_anywhere_leaves_no_hole(
    log: Path, tmp_path: Path, first: int
) -> None:
    """What is set aside goes the last file first: the next recovery must still see the damage."""
    from crash_shim import DIED, dying_at, intercepted

    for point in range(first, 200, 9):
        root = _copy(log, tmp_path / "copy")
        middle = _segments(root)[0]
        data = bytearray(middle.read_bytes())
        data[len(data) * 3 // 4] ^= 1
        middle.write_bytes(bytes(data))

        def die(point: int = point, root: Path = root) -> None:
            with intercepted(dying_at(point)):
                recover(root, all_hosts=True)

        code = wait_for(fork(die))
        recover(root, all_hosts=True)
        rows = rows_of(root)
        assert rows == list(range(len(rows))), point
        assert 6 <= len(rows) < 15, point
        if code != DIED:
            break
    else:
        raise AssertionError("it never ended by itself")


def test_a_damaged_header_costs_its_segment_and_those_after_it(log: Path, tmp_path: Path) -> None:
    root = _copy(log, tmp_path / "copy")
    middle = _segments(root)[1]
    middle.write_bytes(b"\0" + middle.read_bytes()[1:])
    found = _recover_copy(root)
    assert (found.rows, found.lost_rows, len(found.set_aside)) == (15, 30, 2)
    assert rows_of(root) == list(range(15))


@pytest.mark.few(1)
def test_pipes_and_links_in_a_log_are_set_aside_unread(log: Path, tmp_path: Path) -> None:
    for what in ("pipe", "link"):
        root = _copy(log, tmp_path / what)
        path = _segments(root)[2]
        kept = tmp_path / f"{what}.kept"
        path.rename(kept)
        if what == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(kept)
        found = _recover_copy(root)
        assert found.rows == 30
        assert len(found.set_aside) == 1
        assert rows_of(root) == list(range(30))


def test_a_log_without_segments_or_of_an_empty_one_goes(tmp_path: Path) -> None:
    _abandon(lambda: ParquetWriter(tmp_path, writer_id="a"), lambda writer: None)
    (found,) = recover(tmp_path).logs
    assert (found.rows, found.outcome) == (0, "recovered")
    assert not (tmp_path / "_wal").exists()


def test_a_log_of_a_later_format_stays_and_says_so(log: Path, tmp_path: Path) -> None:
    root = _copy(log, tmp_path / "copy")
    from rlio.log.wal import SegmentWriter, read_segment

    (first, *_) = _segments(root)
    header = read_segment(str(first)).header
    for change in ({"format": 9}, {"kind": "other"}, {"roll": None}, {"compression": {}}, {"schema": "["}):
        first.unlink()
        segment = SegmentWriter(str(first), header={**header, **change}, first=0)
        segment.append([b"x"], rows=3)
        segment.close()
        (found,) = recover(root, all_hosts=True).logs
        assert found.outcome == "failed", change
        assert found.error
        assert len(_segments(root)) == 3
    assert rows_of(root) == []


def test_one_log_that_cannot_be_recovered_does_not_stop_the_others(log: Path, tmp_path: Path) -> None:
    root = _copy(log, tmp_path / "copy")
    shutil.copytree(root / "_wal" / "w", root / "_wal" / "a")
    for path in (root / "_wal" / "a").glob("*.wal"):
        path.unlink()
        path.mkdir()
    found = {entry.writer: entry for entry in recover(root, all_hosts=True).logs}
    assert found["w"].rows == 45
    assert rows_of(root) == list(range(45))


@pytest.mark.few(1)
def test_recovery_that_fails_leaves_no_threads_and_can_be_repeated(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = _copy(log, tmp_path / "copy")
    before = set(threading.enumerate())
    shutil.rmtree(root / "data")
    (root / "data").write_text("in the way")
    for _ in range(3):
        (found,) = recover(root, all_hosts=True).logs
        assert found.outcome == "failed"
    until = time.monotonic() + 60
    while set(threading.enumerate()) - before and time.monotonic() < until:
        time.sleep(0.01)
    assert set(threading.enumerate()) - before == set()
    (root / "data").unlink()
    assert _recover_copy(root).rows == 45


def test_the_report_is_json(log: Path, tmp_path: Path) -> None:
    root = _copy(log, tmp_path / "copy")
    found = json.loads(json.dumps(recover(root, all_hosts=True).to_json()))
    assert (found["rows"], found["logs"][0]["writer"]) == (45, "w")


def test_the_command_stores_rows_that_do_not_fit_the_data_set_only_when_told_to(tmp_path: Path) -> None:
    def write(writer: Writer) -> None:
        writer._publisher.expect = lambda schema: None  # type: ignore[method-assign]  # It was not stored yet.
        writer.write(SampleBatch(t=np.arange(3), x=np.zeros(3, np.float32)))

    _abandon(lambda: ParquetWriter(tmp_path, writer_id="w"), write)
    with ParquetWriter(tmp_path, spool=None) as writer:
        writer.write(SampleBatch(t=np.arange(3, 5), x=np.zeros(2)))
    for _ in range(2):
        found = CliRunner().invoke(app, ["recover", str(tmp_path)])
        assert (found.exit_code, logs_of(tmp_path)) == (1, ["000000000000.wal"])
        assert all(words in found.output for words in ("<f4 ()", "<f8 ()", "recover --conflicting"))
    assert CliRunner().invoke(app, ["recover", str(tmp_path), "--conflicting"]).exit_code == 0
    assert logs_of(tmp_path) == []
    with DatasetReader(tmp_path, columns=["t"], epochs=1) as reader:
        assert sorted(t for batch in reader for t in batch["t"].tolist()) == list(range(5))


# ---- the same bytes ----


def _agents(first: int, rows: int) -> MultiAgentBatch:
    t = np.arange(first, first + rows)
    eps = np.full(rows, 7)
    one = SampleBatch(eps_id=eps, t=t, obs=t.astype(np.float32))
    few = rows // 2 + 1
    two = SampleBatch(eps_id=eps[:few], t=t[:few], obs=np.ones((few, 300), np.uint8))
    return MultiAgentBatch({"one": one, "two": two}, rows)


def _sequences(first: int, rows: int) -> SampleBatch:
    lengths = [rows - rows // 2, rows // 2] if rows > 1 else [1]
    return SampleBatch(
        t=np.arange(first, first + rows),
        seq_lens=np.array(lengths, np.int32),
        state_in_0=np.arange(len(lengths) * 2, dtype=np.float32).reshape(-1, 2),
    )


def _everything(first: int, rows: int) -> SampleBatch:
    number = np.arange(first, first + rows)
    return SampleBatch(
        t=number,
        obs=np.random.default_rng(first).integers(0, 255, (rows, 12, 12, 3), np.uint8),
        new_obs=np.random.default_rng(first + 1).integers(0, 255, (rows, 12, 12, 3), np.uint8),
        half=number.astype(np.float16),
        small=np.stack([number, number], 1).astype(np.int8),
        name=np.array([f"row {n}" for n in number]),
        infos=np.array([{"n": int(n)} for n in number], object),
        terminateds=number % 5 == 0,
    )


def _stacks(first: int, rows: int) -> SampleBatch:
    """Stacks of four frames, of episodes of 23 rows in two environments that take turns; enough to tell."""
    number = np.arange(first, first + rows + 8)
    t, env = number // 2, number % 2
    newest = np.maximum(t[:, None] + [-3, -2, -1, 0], t[:, None] // 23 * 23) * 2 + env[:, None]
    pixels = np.random.default_rng(0).integers(0, 255, (4000, 6, 5), np.uint8)
    stacks = (
        np.moveaxis(pixels[newest], 1, 3),
        np.moveaxis(pixels[newest[:, [1, 2, 3, 3]] + [0, 0, 0, 2]], 1, 3),
    )
    obs, new_obs = (np.ascontiguousarray(values) for values in stacks)
    return SampleBatch(t=number, obs=obs, new_obs=new_obs, eps_id=t // 23, env_id=env)


def _keys(first: int, rows: int) -> SampleBatch:
    """Infos with a key more, and the first final observation that is missing, from some row on."""
    number = np.arange(first, first + rows)
    infos = [{"n": int(n)} if n < 400 else {"n": int(n), "e": {"r": float(n)}} for n in number]
    infos = [
        {**info, "s": "text"} if n > 700 else info for n, info in zip(number.tolist(), infos, strict=True)
    ]
    batch = SampleBatch(
        t=number,
        obs=number.astype(np.float32),
        new_obs=number.astype(np.float32) + 1,
        infos=np.array([*infos, None], object)[:-1],
    )
    if first > 500:
        batch["new_obs_valid"] = number % 5 != 0
    return batch


def _keys_of_agents(first: int, rows: int) -> MultiAgentBatch:
    """Several policies, whose infos get keys at different rows."""
    batch = _agents(first, rows)
    for after, (pid, part) in zip((100, 300), batch.items(), strict=True):
        keys = {"x": np.float64(first), "y": 1} if first > after else {"x": np.float64(first)}
        part["infos"] = np.array([*([keys] * len(part)), None], object)[:-1]
        assert pid in ("one", "two")
    return batch


_BATCHES: dict[str, Callable[[int, int], Any]] = {
    "plain": batch_of,
    "agents": _agents,
    "sequences": _sequences,
    "everything": _everything,
    "stacks": _stacks,
    "keys": _keys,
    "keys_of_agents": _keys_of_agents,
}
_ROLLS = {
    "rows": Roll(max_rows=37, max_seconds=None),
    "bytes": Roll(max_bytes=6000, max_seconds=None),
    "both": Roll(max_rows=300, max_bytes=6000, max_seconds=None),
    "neither": Roll(max_seconds=None),
}


def _sizes() -> Iterator[int]:
    random_ = random.Random(3)
    while True:
        yield random_.choice([1, 5, 20, 60, 150])


def _steps(writer: Writer, make: Callable[[int, int], Any], count: int) -> None:
    first = 0
    for number, size in zip(range(count), _sizes(), strict=False):
        batch = make(first, size)
        writer.write(batch)
        first += batch.agent_steps()
        if number == 7:
            writer.flush()


@pytest.mark.few(1)
@pytest.mark.parametrize("batches", list(_BATCHES))
@pytest.mark.parametrize("roll", list(_ROLLS))
@pytest.mark.parametrize("kind", ["parquet", "json", "json.zst"])
@pytest.mark.each_value_once
@pytest.mark.usefixtures("stopped_clock")
def test_a_crash_and_recovery_make_the_same_shards_as_no_crash(
    tmp_path: Path, kind: str, roll: str, batches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlio.schemas.schema._GROUP_BYTES", 4096)
    monkeypatch.setattr("rlio.schemas.row_groups._GROUP_FRAMES", 1500)
    monkeypatch.setattr("rlio.schemas.row_groups._PIECE_STACKS", 2500)
    options: dict[str, Any] = {"compression": "zstd"} if kind == "json.zst" else {}

    def open_at(name: str) -> Writer:
        return WRITERS[kind.removesuffix(".zst")](
            tmp_path / name, roll=_ROLLS[roll], writer_id="w", spool=Spool(sync="never"), **options
        )

    make, count = _BATCHES[batches], 10 + (len(batches) + len(roll)) % 4
    with open_at("whole") as writer:
        _steps(writer, make, count)
    _abandon(lambda: open_at("crashed"), lambda writer: _steps(writer, make, count))
    report = recover(tmp_path / "crashed")
    assert report.is_clean
    assert files_of(tmp_path / "crashed") == files_of(tmp_path / "whole")


@pytest.mark.further
@pytest.mark.parametrize(
    ("kind", "batches"),
    [
        ("parquet", "agents"),
        ("parquet", "keys"),
        *further(("parquet", "plain"), ("parquet", "everything"), ("parquet", "keys_of_agents")),
        *further(("json", "plain"), ("json", "agents"), ("json", "everything")),
    ],
)
@pytest.mark.usefixtures("stopped_clock")
def test_recovery_after_any_shard_ends_the_next_ones_where_the_writer_would_have(
    tmp_path: Path, kind: str, batches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows count towards ``max_rows`` on from before the shard that its bytes have ended."""
    monkeypatch.setattr("rlio.schemas.schema._GROUP_BYTES", 4096)
    roll = Roll(max_rows=190, max_bytes=4000, max_seconds=None)

    def open_at(name: str) -> Writer:
        return WRITERS[kind](tmp_path / name, roll=roll, writer_id="w", spool=Spool(sync="never"))

    def store_few(writer: Writer, stored: int) -> None:
        """The store takes a few shards, and then the machine has no time for it any more."""
        publisher, given = writer._publisher, 0
        submit = publisher.submit

        def shim(shard: Any) -> None:
            nonlocal given
            given += 1
            if given <= stored:
                submit(shard)
                publisher.flush()

        monkeypatch.setattr(publisher, "submit", shim)
        _steps(writer, _BATCHES[batches], 25)
        assert given > stored

    with open_at("whole") as writer:
        _steps(writer, _BATCHES[batches], 25)
    whole = files_of(tmp_path / "whole")
    for stored in (1, 5):
        name = f"crashed-{stored}"
        _abandon(lambda name=name: open_at(name), lambda writer, stored=stored: store_few(writer, stored))  # type: ignore[misc]
        assert len(shard_names(tmp_path / name)) == stored
        assert recover(tmp_path / name).is_clean
        assert files_of(tmp_path / name) == whole
