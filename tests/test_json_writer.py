"""`JsonWriter` keeps the contract of every writer, rolls, and shares a root with Parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

import rlio
from rlio.batch import Batch, MultiAgentBatch, SampleBatch, concat_samples
from rlio.errors import OptionError, PublishError, SchemaConflict, SchemaError
from rlio.schemas import json_lines
from rlio.schemas.json_lines import LineTooLarge
from rlio.schemas.provenance import Provenance
from rlio.source.json_shard import JsonShard
from rlio.storage.filesystem import Retry, Storage
from rlio.testing import WriterTests
from rlio.testing.filesystem import FaultyFileSystem
from rlio.testing.readers import assert_same
from rlio.writer import OutputWriter


def read_back(root: Path, **options: Any) -> Batch:
    """All rows under ``root``, in recorded order."""
    with rlio.DatasetReader(root, epochs=1, **options) as reader:
        return concat_samples(list(reader))


def lines_of(root: Path) -> list[dict[str, Any]]:
    """The parsed lines of the one plain shard under ``root``."""
    (path,) = root.glob("data/*/*.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def steps(rows: int, first: int = 0) -> SampleBatch:
    t = np.arange(first, first + rows)
    return SampleBatch(obs=(t[:, None] / 3).astype(np.float32), eps_id=t // 4, t=t)


class TestJsonWriter(WriterTests):
    def make_writer(self, root: Path) -> OutputWriter:
        return rlio.JsonWriter(root)

    def read_back(self, root: Path) -> Batch:
        return read_back(root)


@pytest.mark.further
class TestCompressedJsonWriter(WriterTests):
    def make_writer(self, root: Path) -> OutputWriter:
        return rlio.JsonWriter(
            root, compression="zstd:3", compress_columns=["obs", "bytes"], roll=rlio.Roll(max_rows=7)
        )

    def read_back(self, root: Path) -> Batch:
        return read_back(root)


# ---- acceptance ----


def test_a_refused_first_batch_leaves_nothing_not_even_its_schema(tmp_path: Path) -> None:
    unstorable = SampleBatch(obs=np.zeros(2), infos=np.array([{}, {"x": object()}], object))
    with rlio.JsonWriter(tmp_path) as writer:
        with pytest.raises(SchemaError, match="object"):
            writer.write(unstorable)
        assert writer.rows_received == 0
        writer.write(steps(3))
    assert_same(read_back(tmp_path), steps(3), "what was read back")
    assert len(list(tmp_path.glob("_schema/*"))) == 1


def test_a_refused_batch_of_new_policies_leaves_the_schema_as_it_was(tmp_path: Path) -> None:
    good = MultiAgentBatch({"a": steps(2)}, 2)
    bad = SampleBatch({**dict(steps(2)), "infos": np.array([{}, {"x": object()}], object)})
    with rlio.JsonWriter(tmp_path) as writer:
        writer.write(good)
        with pytest.raises(SchemaError):
            writer.write(MultiAgentBatch({"a": steps(2), "b": bad}, 2))
        with pytest.raises(SchemaConflict, match="SampleBatch after"):
            writer.write(steps(2))
        writer.write(MultiAgentBatch({"a": steps(2, 2), "b": steps(2, 2)}, 2))
    found = read_back(tmp_path)
    assert_same(found["a"], steps(4), "policy a")
    assert_same(found["b"], steps(2, 2), "policy b")
    assert len(list(tmp_path.glob("_schema/*"))) == 2


def test_rows_without_environment_steps_are_written(tmp_path: Path) -> None:
    with rlio.JsonWriter(tmp_path) as writer:
        writer.write(MultiAgentBatch({"a": steps(2)}, 0))
        assert writer.rows_received == 2
    assert len(rlio.open_dataset(tmp_path)) == 2


def test_rows_that_cannot_be_stored_are_kept_and_stored_later(tmp_path: Path) -> None:
    failing = True

    def choose(call: Any) -> Any:
        return "before" if failing and call.operation == "pipe_file" else None

    writer = rlio.JsonWriter(tmp_path, roll=rlio.Roll(max_bytes=400), writer_id="w", spool=None)
    writer._publisher.storage = Storage.on(
        FaultyFileSystem(LocalFileSystem(), choose), str(tmp_path), retry=Retry(attempts=1)
    )
    writer.write(steps(20))
    assert (writer.rows_received, writer.rows_published) == (20, 0)
    with pytest.raises(PublishError):
        writer.flush()
    # From when on the next write() raises instead of taking rows is a matter of the thread that stores them.
    with pytest.raises(PublishError):
        writer.write(steps(5, 20))
    assert writer.rows_received == 20
    failing = False
    writer.write(steps(5, 20))
    writer.close()
    assert writer.rows_published == 25
    assert_same(read_back(tmp_path), steps(25), "what was read back")


# ---- what is written ----


def test_a_nan_in_json_loses_its_sign_and_payload_as_the_docs_say_and_compressed_columns_keep_it(
    tmp_path: Path,
) -> None:
    """docs/format.md 4.5 and 5, docs/guarantees.md."""
    bits = np.array([0xFFC01234, 0x7FC00001, 0x3F800000], np.uint32)
    column = bits.view(np.float32)
    infos = np.array([{"x": column}, {}, {}], object)
    batch = SampleBatch(plain=column, packed=column, infos=infos)
    standard = [0x7FC00000, 0x7FC00000, 0x3F800000]
    with rlio.JsonWriter(tmp_path / "json", compress_columns=["packed"]) as writer:
        writer.write(batch)
    with rlio.ParquetWriter(tmp_path / "parquet") as writer:
        writer.write(batch)
    for root, plain in ((tmp_path / "json", standard), (tmp_path / "parquet", bits.tolist())):
        found = read_back(root)
        assert found["plain"].view(np.uint32).tolist() == plain
        assert found["packed"].view(np.uint32).tolist() == bits.tolist()
        assert found["infos"][0]["x"].view(np.uint32).tolist() == plain  # A column of Parquet, or JSON.


def test_one_write_is_one_line_behind_the_provenance(tmp_path: Path) -> None:
    space = gym.spaces.Discrete(3)
    with rlio.JsonWriter(
        tmp_path,
        provenance=Provenance(env="Pong", seed=7),
        spaces={"default_policy": (space, space)},
        writer_id="mine",
    ) as writer:
        assert writer.writer_id == "mine"
        writer.write(steps(3))
        writer.write(steps(1, 3))
    provenance, *lines = lines_of(tmp_path)
    assert (provenance["provenance"]["env"], provenance["provenance"]["seed"]) == ("Pong", 7)
    assert [line["rows"] for line in lines] == [3, 1]
    dataset = rlio.open_dataset(tmp_path)
    shard = dataset.open_shard(dataset.segments[0])
    assert isinstance(shard, JsonShard)
    assert shard.provenance == provenance["provenance"]
    assert shard.schema.policies["default_policy"].spaces is not None
    (name,) = (segment.ref.name for segment in dataset.segments)
    assert (name.rows, name.footer_crc32, name.suffix) == (4, 0, "jsonl")


def test_compressed_columns_are_blobs_and_the_others_stay_readable(tmp_path: Path) -> None:
    with rlio.JsonWriter(tmp_path, compress_columns=("obs", "absent")) as writer:
        writer.write(steps(3))
    line = lines_of(tmp_path)[1]
    assert set(line["columns"]["obs"]) == {"zstd"}
    assert line["columns"]["t"] == [0, 1, 2]
    assert_same(read_back(tmp_path), steps(3), "what was read back")


@pytest.mark.usefixtures("stopped_clock")
def test_equal_writes_at_one_time_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with rlio.JsonWriter(tmp_path / name, compression="zstd", writer_id="w") as writer:
            writer.write(steps(30))
    (one,), (other,) = ([*(tmp_path / name).glob("data/*/*.jsonl.zst")] for name in ("a", "b"))
    assert one.name == other.name
    assert one.read_bytes() == other.read_bytes()


# ---- rolling ----


def test_shards_have_at_most_the_rows_and_bytes_of_the_roll(tmp_path: Path) -> None:
    with rlio.JsonWriter(tmp_path / "rows", roll=rlio.Roll(max_rows=5)) as writer:
        for first, rows in ((0, 3), (3, 3), (6, 12), (18, 5), (23, 1)):
            writer.write(steps(rows, first))
    dataset = rlio.open_dataset(tmp_path / "rows")
    assert [segment.rows for segment in dataset.segments] == [3, 3, 5, 5, 2, 5, 1]
    assert_same(read_back(tmp_path / "rows"), steps(24), "what was read back")
    with rlio.JsonWriter(tmp_path / "bytes", roll=rlio.Roll(max_bytes=1000)) as writer:
        for first in range(0, 60, 6):
            writer.write(steps(6, first))
    dataset = rlio.open_dataset(tmp_path / "bytes")
    assert max(segment.ref.name.size for segment in dataset.segments) < 1500
    assert_same(read_back(tmp_path / "bytes"), steps(60), "what was read back")


def test_sequences_and_joint_steps_are_not_cut_to_fit_the_rows_of_a_roll(tmp_path: Path) -> None:
    batch = SampleBatch(obs=np.zeros(9), seq_lens=[4, 5])
    with rlio.JsonWriter(tmp_path, roll=rlio.Roll(max_rows=2)) as writer:
        writer.write(batch)
    assert [segment.rows for segment in rlio.open_dataset(tmp_path).segments] == [9]


def test_a_shard_ends_before_a_line_that_would_take_it_past_its_bytes(tmp_path: Path) -> None:
    def write(name: str, lines: int, roll: rlio.Roll) -> int:
        with rlio.JsonWriter(tmp_path / name, roll=roll) as writer:
            for _ in range(lines):
                writer.write(steps(10))
        return writer.bytes_published

    line = write("two", 2, rlio.Roll()) - write("one", 1, rlio.Roll())
    write("many", 6, rlio.Roll(max_bytes=5 * line // 2))
    segments = rlio.open_dataset(tmp_path / "many").segments
    assert [segment.rows for segment in segments] == [20, 20, 20]


def test_rows_become_visible_when_they_are_old_enough(tmp_path: Path) -> None:
    with rlio.JsonWriter(tmp_path, roll=rlio.Roll(max_seconds=0.01)) as writer:
        writer.write(steps(3))
        timer = writer._timer._timer
        assert timer is not None
        timer.join(30)
        writer._encoder._jobs.wait(30)
        writer._publisher.wait(30)
        assert writer.rows_published == 3
        writer.write(steps(2, 3))
    assert_same(read_back(tmp_path), steps(5), "what was read back")


def test_a_batch_too_large_for_a_line_is_cut_into_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 500)
    sequences = SampleBatch(obs=np.arange(40) / 3, seq_lens=[7] * 5 + [5], state_in_0=np.arange(6.0))
    with rlio.JsonWriter(tmp_path / "steps") as writer:
        writer.write(steps(50))
    with rlio.JsonWriter(tmp_path / "sequences") as writer:
        writer.write(sequences)
    assert [line["rows"] for line in lines_of(tmp_path / "steps")[1:]] != [50]
    assert_same(read_back(tmp_path / "steps"), steps(50), "steps")
    assert len(lines_of(tmp_path / "sequences")) > 2
    found = read_back(tmp_path / "sequences")
    for name in sequences:
        np.testing.assert_array_equal(found[name], sequences[name])


def test_what_cannot_be_cut_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 500)
    with rlio.JsonWriter(tmp_path) as writer:
        for batch in (
            MultiAgentBatch({"default_policy": steps(60)}, 60),
            SampleBatch(obs=np.zeros((1, 300)) + 0.123456789),
            SampleBatch(obs=np.zeros(300), seq_lens=[300]),
        ):
            with pytest.raises(LineTooLarge, match="compress_columns"):
                writer.write(batch)
    assert len(rlio.open_dataset(tmp_path)) == 0
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["_rlio.json"]


# ---- beside Parquet ----


@pytest.mark.parametrize("shuffle", [False, True])
def test_one_root_holds_both_kinds_of_shards(tmp_path: Path, shuffle: bool) -> None:
    writers = (
        rlio.JsonWriter(tmp_path, writer_id="a"),
        rlio.ParquetWriter(tmp_path, writer_id="b"),
        rlio.JsonWriter(tmp_path, compression="zstd", writer_id="c"),
    )
    for number, writer in enumerate(writers):
        with writer:
            writer.write(steps(6, 10 * number))
            writer.write(steps(4, 10 * number + 6))
    assert len(list(tmp_path.glob("_schema/*"))) == 1
    options: dict[str, Any] = {"shuffle": True, "seed": 0} if shuffle else {}
    found = read_back(tmp_path, batch_size=7, **options)
    numbers = found["t"]
    if shuffle:
        assert numbers.tolist() != list(range(30))
        assert sorted(numbers.tolist()) == list(range(30))
    assert_same(found, steps(30)[numbers] if shuffle else steps(30), "what was read back")
    episodes = list(rlio.open_dataset(tmp_path).episode_parts())
    assert sum(episode.rows for episode in episodes) == 30


def test_a_reader_resumes_exactly_within_json_shards(tmp_path: Path) -> None:
    with rlio.JsonWriter(tmp_path) as writer:
        for first in range(0, 24, 6):
            writer.write(steps(6, first))
    reader = rlio.DatasetReader(tmp_path, batch_size=5, epochs=2, shuffle=True, seed=3)
    reader.sample()
    state = reader.state_dict()
    rest = [batch["t"].tolist() for batch in reader]
    other = rlio.DatasetReader(tmp_path, batch_size=5, epochs=2, shuffle=True, seed=3)
    other.load_state_dict(json.loads(json.dumps(state)))
    assert [batch["t"].tolist() for batch in other] == rest


def test_what_json_and_parquet_give_back_is_the_same(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    batch = SampleBatch(
        obs={"a": rng.normal(size=(9, 3)).astype(np.float32), "b": (rng.integers(0, 9, (9, 2)),)},
        actions=np.arange(9, dtype=np.uint8),
        names=np.array([f"n{i}" for i in range(9)]),
        infos=np.array([{"lives": i, "p": np.float32([i])} for i in range(9)], object),
        half=rng.normal(size=9).astype(np.float16),
        new_obs_valid=np.arange(9) % 2 == 0,
        seq_lens=np.array([4, 5]),
        state_in_0=rng.normal(size=(2, 4)).astype(np.float32),
        max_seq_len=6,
        num_grad_updates=3,
    )
    for name, kind in (("json", rlio.JsonWriter), ("parquet", rlio.ParquetWriter)):
        with kind(tmp_path / name) as writer:
            writer.write(batch)
    assert_same(read_back(tmp_path / "json"), read_back(tmp_path / "parquet"), "JSON beside Parquet")


# ---- options ----


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "gzip"},
        {"compression": "zstd:0"},
        {"compression": "zstd:23"},
        {"compression": "zstd:x"},
        {"compression": ""},
        {"compress_columns": "obs"},
        {"roll": rlio.Roll(max_bytes=1 << 30)},
        {"writer_id": "../up"},
    ],
)
def test_an_illegal_option_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        rlio.JsonWriter(tmp_path, **options)
