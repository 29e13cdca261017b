"""ParquetWriter: what it accepts is stored, what it refuses leaves nothing, whatever fails in between."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from stored_batches import assert_identical, files, fresh_root, group_bytes, load, numbered, round_trip

from rlio import MultiAgentBatch, ParquetWriter, Roll, SampleBatch, concat_samples, open_dataset
from rlio.batch import Batch
from rlio.errors import (
    ClosedError,
    MissingColumn,
    OptionError,
    PublishError,
    RlioError,
    SchemaConflict,
    SchemaError,
    UnknownName,
)
from rlio.schemas.provenance import Provenance
from rlio.testing import WriterTests
from rlio.writer import _written_writers


class TestParquetWriter(WriterTests):
    def make_writer(self, root: Path) -> ParquetWriter:
        return ParquetWriter(root)

    def read_back(self, root: Path) -> Batch:
        return load(str(root))  # type: ignore[no-any-return]  # The helper reads either kind.


@pytest.mark.further
class TestSmallShards(TestParquetWriter):
    def make_writer(self, root: Path) -> ParquetWriter:
        return ParquetWriter(root, roll=Roll(max_rows=7, max_seconds=None))


# ---- a refused batch leaves nothing ----

IDS = {"eps_id": np.zeros(3, int), "t": np.arange(3)}
MISFITS: dict[str, tuple[Any, type[RlioError], str]] = {
    "dtype": (lambda: numbered(3, x=np.zeros(3, np.float32)), SchemaConflict, r"float32.*<f8.*\[column x\]"),
    "byte order": (lambda: numbered(3, x=np.zeros(3, ">f8")), SchemaConflict, r"\[column x\]"),
    "shape": (lambda: numbered(3, x=np.zeros((3, 1))), SchemaConflict, r"\(1,\).*\(\).*\[column x\]"),
    "missing": (lambda: numbered(3), MissingColumn, r"'x' before.*\[column x\]"),
    "extra": (lambda: numbered(3, x=np.zeros(3), y=np.zeros(3)), SchemaError, r"'y' is new.*\[column y\]"),
    "nested": (lambda: numbered(3, x={"a": np.zeros(3)}), SchemaConflict, r"nests.*\[column x\]"),
    "kind": (lambda: MultiAgentBatch({"a": numbered(3)}, 3), SchemaConflict, "MultiAgentBatch after"),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("misfit", MISFITS)
def test_a_batch_that_does_not_fit_is_refused_by_column_and_leaves_nothing(misfit: str) -> None:
    make, kind, message = MISFITS[misfit]
    root = fresh_root()
    with ParquetWriter(root) as writer:
        writer.write(numbered(3, x=np.zeros(3)))
        with pytest.raises(kind, match=message):
            writer.write(make())
        assert writer.rows_received == 3
        writer.write(numbered(3, 3, x=np.ones(3)))
        assert writer.rows_received == 6
    assert_identical(load(root), numbered(6, x=np.repeat([0.0, 1.0], 3)))


UNSTORABLE: dict[str, Any] = {
    "a set in infos": lambda: SampleBatch(infos=[{"a": {1}}, {}]),
    "infos without end": lambda: SampleBatch(infos=[_circle(), {}]),
    "a function in infos": lambda: SampleBatch(infos=[{"a": len}, {}]),
    "a number of 5000 digits": lambda: SampleBatch(infos=[{"a": 10**5000}, {}]),
    "half a surrogate pair": lambda: SampleBatch(name=np.array(["\ud800", "b"], object)),
    "half a surrogate pair in unicode": lambda: SampleBatch(name=np.array(["\udfff", "b"])),
    "half a surrogate pair as a name": lambda: SampleBatch({"\ud800": np.zeros(2)}),
    "half a surrogate pair as a policy": lambda: MultiAgentBatch({"\ud800": SampleBatch(x=np.zeros(2))}, 2),
    "a name of the format": lambda: SampleBatch(_next=np.zeros(2)),
    "a name of stacks": lambda: SampleBatch({"obs#older": np.zeros(2)}),
    "a structured dtype": lambda: SampleBatch(x=np.zeros(2, [("a", "f4")])),
    "objects in two dimensions": lambda: SampleBatch(x=np.empty((2, 2), object)),
    "texts in two dimensions": lambda: SampleBatch(x=np.array([["a"], ["b"]])),
    "forty axes": lambda: SampleBatch(x=np.zeros((2,) + (1,) * 40)),
    "rows of 300 MiB": lambda: SampleBatch(x=np.broadcast_to(np.uint8(0), (2, 300 << 20))),
    "an empty dict": lambda: SampleBatch({"x": np.zeros(2), "obs": {"a": np.zeros(2), "b": {}}}),
    "nesting of ten": lambda: SampleBatch(x=_nested(10)),
    "5000 columns": lambda: SampleBatch({f"c{i}": np.zeros(2, np.int8) for i in range(5000)}),
    "validity of two columns": lambda: SampleBatch(obs=np.zeros(2), new_obs_valid=np.ones((2, 1), bool)),
    "validity of numbers": lambda: SampleBatch(obs=np.zeros(2), new_obs_valid=np.array([2, 0])),
    "several policies without ids": lambda: MultiAgentBatch(
        {"a": SampleBatch(x=np.zeros(2)), "b": SampleBatch(x=np.zeros(2))}, 2
    ),
    "policies whose ids differ in kind": lambda: MultiAgentBatch(
        {"a": SampleBatch(eps_id=np.zeros(2), t=[0, 1]), "b": SampleBatch(eps_id=[0, 0], t=[0, 1])}, 2
    ),
    "one of several policies": lambda: MultiAgentBatch(
        {"a": SampleBatch(IDS), "b": SampleBatch({**IDS, "infos": np.array([{1}] * 3, object)})}, 3
    ),
}


def _circle() -> dict[str, Any]:
    circle: dict[str, Any] = {}
    circle["again"] = circle
    return circle


def _nested(depth: int) -> Any:
    value: Any = np.zeros(2)
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.few(12)
@pytest.mark.parametrize("what", UNSTORABLE)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.each_value_once
def test_what_cannot_be_stored_is_refused_at_once_and_leaves_nothing(what: str, first: bool) -> None:
    """Also as the first batch, which would else have fixed the columns of all others."""
    root = fresh_root()
    bad = UNSTORABLE[what]()
    joint = isinstance(bad, MultiAgentBatch)
    good: Batch = MultiAgentBatch({"other": SampleBatch(IDS)}, 3) if joint else numbered(3)
    with ParquetWriter(root) as writer:
        if not first:
            writer.write(good)
        with pytest.raises(SchemaError):
            writer.write(bad)
        assert writer.rows_received == (0 if first else 3)
        writer.write(good)
    found = load(root)
    assert found.agent_steps() == (3 if first else 6)
    assert not joint or list(found) == ["other"]


def test_numbers_that_are_no_times_and_rewards_without_bound_are_stored() -> None:
    """What the table of streams cannot say is left out there, and is in the rows."""
    batch = SampleBatch(
        t=np.array([np.nan, np.inf, 2.0]), rewards=np.array([np.inf, -np.inf, 1e308]), eps_id=[1, 2, 2]
    )
    root = fresh_root()
    with ParquetWriter(root) as writer:
        writer.write(batch)
    assert_identical(load(root), batch)
    first, second = open_dataset(root).episode_parts()
    assert (first.t0, second.t0) == (None, None)
    assert first.reward is None


def test_the_caller_may_change_its_infos_after_writing() -> None:
    infos = [{"a": np.zeros(2)}, {"a": [1]}]
    root = fresh_root()
    with ParquetWriter(root) as writer:
        writer.write(SampleBatch(infos=infos))
        infos[0]["a"][:] = 7
        infos[1]["b"] = 1
        infos.clear()
    found = load(root)["infos"]
    assert found[0]["a"].tolist() == [0, 0]
    assert found[1] == {"a": [1]}


# ---- when rows become visible ----


def shard_rows(root: str) -> list[int]:
    return [segment.rows for segment in open_dataset(root).segments]


@pytest.mark.few(2)
@pytest.mark.parametrize("limit", [1, 200, 1 << 23])
@pytest.mark.parametrize("writes", [[100], [1] * 30, [7, 3, 50, 9, 10, 11], [10, 10], [25]])
@pytest.mark.each_value_once
def test_shards_of_plain_rows_have_exactly_max_rows(limit: int, writes: list[int]) -> None:
    root, first = fresh_root(), 0
    with group_bytes(limit), ParquetWriter(root, roll=Roll(max_rows=10, max_seconds=None)) as writer:
        for rows in writes:
            writer.write(numbered(rows, first))
            first += rows
    assert shard_rows(root) == [10] * (first // 10) + [first % 10] * (first % 10 > 0)
    assert load(root)["t"].tolist() == list(range(first))


def test_sequences_and_joint_steps_are_not_cut_to_max_rows_and_not_heaped_up_either() -> None:
    root = fresh_root()
    with ParquetWriter(root, roll=Roll(max_rows=10, max_seconds=None)) as writer:
        writer.write(numbered(60, seq_lens=[4, 4, 4, 4, 25, 4, 5, 5, 5]))
    assert shard_rows(root) == [8, 8, 25, 9, 10]


def test_a_shard_ends_at_max_bytes() -> None:
    root = fresh_root()
    rng = np.random.default_rng(0)
    with group_bytes(1 << 14), ParquetWriter(root, roll=Roll(max_bytes=50_000, max_seconds=None)) as writer:
        for _ in range(20):
            writer.write(SampleBatch(x=rng.integers(0, 256, (100, 100), np.uint8)))
    sizes = [segment.ref.name.size for segment in open_dataset(root).segments]
    assert len(sizes) > 2
    assert max(sizes) < 50_000 + (1 << 15)
    assert len(load(root)["x"]) == 2000


def test_rows_are_stored_when_they_are_old_enough_without_another_call() -> None:
    root = fresh_root()
    with ParquetWriter(root, roll=Roll(max_seconds=0.05)) as writer:
        for first in (0, 3):
            writer.write(numbered(3, first))
            deadline = time.monotonic() + 30
            while writer.rows_published < first + 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert load(root)["t"].tolist() == list(range(first + 3))


def test_rows_are_invisible_before_flush_and_visible_after() -> None:
    root = fresh_root()
    with ParquetWriter(root, roll=Roll(max_seconds=None)) as writer:
        writer.write(numbered(3))
        assert len(open_dataset(root)) == 0
        writer.flush()
        assert (writer.rows_published, writer.bytes_published) == (3, sum(map(len, files(root).values())))
        assert len(open_dataset(root)) == 3
        writer.flush()
        assert len(files(root)) == 1


@pytest.mark.parametrize("batch", [SampleBatch(), SampleBatch(x=np.zeros((0, 3))), MultiAgentBatch({}, 0)])
def test_batches_without_rows_make_no_files(batch: Batch) -> None:
    root = fresh_root()
    with ParquetWriter(root) as writer:
        writer.write(batch)
    assert [path.rsplit("/", 1)[-1] for path in files(root, "")] == ["_rlio.json"]


def test_a_first_batch_without_rows_fixes_dtypes_and_shapes() -> None:
    root = fresh_root()
    with ParquetWriter(root) as writer:
        writer.write(SampleBatch(x=np.zeros((0, 3), np.float32)))
        with pytest.raises(SchemaConflict):
            writer.write(SampleBatch(x=np.zeros((2, 3))))
        writer.write(SampleBatch(x=np.zeros((2, 3), np.float32)))
    assert load(root)["x"].shape == (2, 3)


def test_late_policies_get_a_schema_of_their_own_and_earlier_rows_stay_readable() -> None:
    root = fresh_root()
    with ParquetWriter(root) as writer:
        for first, pids in enumerate(["a", "ab", "b", "abc"]):
            writer.write(MultiAgentBatch({pid: numbered(2, 2 * first, eps_id=[1, 1]) for pid in pids}, 2))
    found = load(root)
    assert {pid: part["t"].tolist() for pid, part in found.items()} == {
        "a": [0, 1, 2, 3, 6, 7], "b": [2, 3, 4, 5, 6, 7], "c": [6, 7]
    }  # fmt: skip
    assert len(open_dataset(root).schemas) == 3


@pytest.mark.usefixtures("stopped_clock")
def test_equal_rows_of_one_time_make_equal_bytes() -> None:
    roots = [fresh_root() for _ in range(2)]
    for root, sizes in zip(roots, ([30], [30]), strict=True):
        with ParquetWriter(root, writer_id="w00000-00000000", provenance=Provenance(seed=1)) as writer:
            for rows in sizes:
                writer.write(numbered(rows))
    one, other = (sorted(data for data in files(root, "").values()) for root in roots)
    assert one == other


# ---- options ----


def test_a_writer_id_that_has_rows_is_refused() -> None:
    root = fresh_root()
    with ParquetWriter(root, writer_id="w00000-00000000") as writer:
        writer.write(numbered(3))
    with pytest.raises(OptionError, match="was used there already"):
        ParquetWriter(root, writer_id="w00000-00000000")
    assert load(root)["t"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "options",
    [{"compression": "zip"}, {"compression": "zstd:x"}, {"compression": "zstd:"}, {"compression": None},
     {"compression": "snappy:3"}, {"compression": "gzip:22"}, {"compression": "none:1"},
     {"writer_id": "../escape"}, {"writer_id": ""},
     {"provenance": Provenance(extra={"a": {1}})}],
)  # fmt: skip
def test_illegal_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        ParquetWriter(fresh_root(), **options)


@pytest.mark.parametrize("option", ["max_rows", "max_bytes", "max_seconds"])
@pytest.mark.parametrize("value", [0, -1, "30", True, float("nan")])
def test_illegal_rolls_are_refused(option: str, value: Any) -> None:
    with pytest.raises(OptionError, match=option):
        Roll(**{option: value})


@pytest.mark.parametrize(("option", "value"), [("max_rows", 1.5), ("max_bytes", 2.0), ("max_bytes", None)])
def test_rows_and_bytes_of_a_roll_are_whole_and_bytes_are_bounded(option: str, value: Any) -> None:
    with pytest.raises(OptionError, match=option):
        Roll(**{option: value})


@pytest.mark.few(4)
@pytest.mark.parametrize("codec", ["none", "lz4", "snappy", "gzip", "zstd", "zstd:9", "brotli:1"])
def test_every_codec_comes_back(codec: str) -> None:
    root = fresh_root()
    with ParquetWriter(root, compression=codec) as writer:
        writer.write(numbered(100))
    assert_identical(load(root), numbered(100))


@pytest.mark.few(1)
@pytest.mark.parametrize("alike", [True, False])
def test_frames_that_hardly_change_take_fewer_bytes_unless_a_level_is_given(alike: bool) -> None:
    rng = np.random.default_rng(0)
    frames = np.tile(rng.integers(0, 255, (12, 12), np.uint8), (151, 7, 7))
    sprite = rng.integers(0, 255, (8, 8), np.uint8)
    for frame, places in zip(frames, rng.integers(-2, 3, (151, 3, 2)).cumsum(axis=0) % 76, strict=True):
        for x, y in places:
            frame[x : x + 8, y : y + 8] = sprite
    if not alike:
        frames = rng.integers(0, 255, frames.shape, np.uint8)
    stacks = np.stack([frames[i : i + 4] for i in range(148)])
    batch = SampleBatch(obs=stacks[:-1], new_obs=stacks[1:], t=np.arange(147))
    sizes = []
    options: list[dict[str, Any]] = [{"compression": "zstd:1"}, {"compression": "zstd"}, {}]
    for option in options:
        root = fresh_root()
        with ParquetWriter(root, **option) as writer:
            writer.write(batch)
        assert_identical(load(root), batch)
        sizes.append(open_dataset(root).bytes())
    assert sizes[1] == pytest.approx(sizes[2], rel=0.01)
    assert sizes[1] < 0.97 * sizes[0] if alike else sizes[1] == pytest.approx(sizes[0], rel=0.01)


def test_rows_that_could_not_be_encoded_are_an_error_of_every_later_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are gone: what follows them would stand under their numbers."""
    from rlio.schemas.parquet import ShardEncoder

    def fail(self: ShardEncoder, group: Any) -> None:
        raise MemoryError("no room to encode")

    root = fresh_root()
    writer = ParquetWriter(root)
    writer.write(numbered(3))
    with monkeypatch.context() as patch:
        patch.setattr(ShardEncoder, "add", fail)
        with pytest.raises(MemoryError, match="no room"):
            writer.flush()
    for act in (lambda: writer.write(numbered(3, first=3)), writer.flush, writer.close):
        with pytest.raises(MemoryError, match="no room"):
            act()
    assert not files(root)
    _written_writers.remove(writer)  # Nothing can close it.


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(UnknownName, match="nosuch"):
        ParquetWriter("nosuch://bucket/root")


# ---- a store that fails ----


class Failing(MemoryFileSystem):  # type: ignore[misc]  # fsspec ships no type information
    """A store in memory whose puts fail while ``down``."""

    protocol = "failing"
    down = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.removeprefix("failing://")))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> Any:
        if type(self).down:
            raise PermissionError(13, "denied")
        return super().pipe_file(path, value, mode=mode, **kwargs)


@pytest.fixture
def failing() -> Iterator[str]:
    """A root on a store that fails while ``Failing.down``."""
    fsspec.register_implementation("failing", Failing, clobber=True)
    Failing.down = False
    yield fresh_root().replace("memory://", "failing://")
    Failing.down = False


def test_rows_that_could_not_be_stored_are_kept_and_flushed_later(failing: str) -> None:
    with ParquetWriter(failing, roll=Roll(max_rows=5, max_seconds=None)) as writer:
        writer.write(numbered(3))
        writer.flush()
        Failing.down = True
        writer.write(numbered(9, 3))
        for _ in range(2):
            with pytest.raises(PublishError):
                writer.flush()
        assert (writer.rows_received, writer.rows_published) == (12, 3)
        writer.write(numbered(1, 12))
        Failing.down = False
        writer.flush()
        assert writer.rows_published == 13
        writer.write(numbered(2, 13))
    assert load(failing)["t"].tolist() == list(range(15))


def test_a_writer_whose_queue_is_full_takes_nothing_until_it_is_stored(failing: str) -> None:
    roll = Roll(max_rows=5, max_bytes=1, max_seconds=None)
    with ParquetWriter(failing, roll=roll) as writer:
        Failing.down = True
        with pytest.raises(PublishError):  # noqa: PT012 - which call fails first depends on the thread
            for first in range(0, 1000, 5):
                writer.write(numbered(5, first))
        accepted = writer.rows_received
        assert accepted < 50
        Failing.down = False
        writer.write(numbered(5, accepted))
    assert load(failing)["t"].tolist() == list(range(accepted + 5))


def test_a_new_policy_while_the_store_fails_is_taken_or_refused_as_a_whole(failing: str) -> None:
    with ParquetWriter(failing) as writer:
        writer.write(MultiAgentBatch({"a": numbered(2, eps_id=[1, 1])}, 2))
        Failing.down = True
        with contextlib.suppress(PublishError):
            writer.write(MultiAgentBatch({"b": numbered(2, eps_id=[1, 1])}, 2))
        received = writer.rows_received
        Failing.down = False
    assert load(failing).agent_steps() == received


def test_closing_while_the_store_fails_raises(failing: str) -> None:
    writer = ParquetWriter(failing)
    writer.write(numbered(3))
    Failing.down = True
    with pytest.raises(PublishError):
        writer.close()
    Failing.down = False
    writer.close()


def test_an_exception_in_the_block_is_never_replaced(failing: str) -> None:
    with pytest.raises(KeyError) as caught, ParquetWriter(failing) as writer:  # noqa: PT012 - both fail
        writer.write(numbered(3))
        Failing.down = True
        raise KeyError("mine")
    assert "PublishError" in "".join(caught.value.__notes__)
    Failing.down = False
    writer.close()


def test_a_closed_writer_is_closed() -> None:
    root = fresh_root()
    writer = ParquetWriter(root)
    writer.write(numbered(3))
    writer.close()
    with pytest.raises(ClosedError):
        writer.write(numbered(3))
    assert len(load(root)) == 3


# ---- processes and threads ----


@pytest.mark.further
def test_rows_of_a_writer_that_was_left_open_are_stored_when_the_interpreter_exits(tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np, rlio\n"
        "writer = rlio.ParquetWriter(sys.argv[1])\n"
        "writer.write(rlio.SampleBatch(t=np.arange(5)))\n"
        "other = rlio.ParquetWriter(sys.argv[1])\n"
        "other.write(rlio.SampleBatch(t=np.arange(5, 9)))\n"
        "raise SystemExit(3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert sorted(load(str(tmp_path))["t"].tolist()) == list(range(9))


@pytest.mark.further
def test_a_writer_that_was_refused_says_nothing_at_exit(tmp_path: Path) -> None:
    code = (
        "import sys, rlio\n"
        "try: rlio.ParquetWriter(sys.argv[1], compression='zip')\n"
        "except rlio.RlioError as error: kept = error\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_writers_leave_no_thread_behind() -> None:
    before = set(threading.enumerate())
    for _ in range(3):
        round_trip(numbered(5))
    assert {thread for thread in threading.enumerate() if thread.is_alive()} <= before


def test_many_threads_and_writers_lose_nothing() -> None:
    root = fresh_root()
    roll = Roll(max_rows=17, max_seconds=0.01)
    writers = [ParquetWriter(root, roll=roll) for _ in range(3)]

    def work(number: int) -> None:
        for i in range(20):
            writers[number % 3].write(numbered(3, 60 * number + 3 * i))
            if i % 7 == 0:
                writers[number % 3].flush()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for writer in writers:
        writer.close()
    found = load(root)
    assert sorted(found["t"].tolist()) == list(range(360))
    assert_identical(found, numbered(360)[found["t"]])


@pytest.mark.few(1)
@pytest.mark.parametrize("sequences", [False, True])
def test_a_row_group_has_at_most_so_much_text_however_long_the_texts_are(sequences: bool) -> None:
    """Readers decode a group as a whole: one of 65,536 rows with infos of 20 kB would be 1.3 GB."""
    root = fresh_root()
    infos = np.empty(1000, object)
    infos[:] = [{"text": "x" * 20_000}] * 1000
    more = {"seq_lens": np.full(100, 10)} if sequences else {}
    with ParquetWriter(root, roll=Roll(max_rows=900)) as writer:
        for _ in range(2):
            writer.write(SampleBatch(t=np.arange(1000), infos=infos, **more))
    dataset = open_dataset(root)
    groups = [rows for segment in dataset.segments for rows in dataset.open_shard(segment).rows]
    assert sum(groups) == 2000
    assert max(groups) <= 1.5 * (8 << 20) / 20_000 + 10
    if not sequences:
        assert [segment.rows for segment in dataset.segments] == [900, 900, 200]


@pytest.mark.parametrize("call", range(5))
def test_an_interrupt_while_rows_are_copied_misaligns_none_of_those_before(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a log they are in memory only: what was half copied must leave no trace."""
    from rlio.schemas.row_groups import GroupBuffer

    put, calls = GroupBuffer._put, 0

    def interrupted(self: GroupBuffer, *arguments: Any) -> None:
        nonlocal calls
        put(self, *arguments)
        calls += 1
        if calls > call:
            raise KeyboardInterrupt

    def joint(first: int) -> MultiAgentBatch:
        a, b = (numbered(3, first, eps_id=np.full(3, first)) for _ in range(2))
        b["weights"] = np.ones(3)
        return MultiAgentBatch({"a": a, "b": b}, 3)

    root = fresh_root()
    writer = ParquetWriter(root, spool=None)
    writer.write(joint(0))
    with monkeypatch.context() as patch:
        patch.setattr(GroupBuffer, "_put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.write(joint(3))
    with pytest.raises(PublishError, match="interrupted"):
        writer.write(joint(6))
    writer.close()
    found = load(root)
    assert_identical(found.policy_batches["b"], joint(0).policy_batches["b"])
    # The piece of policy a was whole: it is there, or not.
    a = found.policy_batches["a"]
    assert len(a) in (3, 6)
    assert_identical(
        a, concat_samples([joint(0).policy_batches["a"], joint(3).policy_batches["a"]])[: len(a)]
    )
