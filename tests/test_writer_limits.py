"""A writer accepts only what readers take by default: larger batches are cut, or refused as a whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from further import further
from stored_batches import assert_identical, files, fresh_root, load

import rlio
from rlio import JsonWriter, MultiAgentBatch, ParquetWriter, Roll, SampleBatch
from rlio.batch.arrays import object_column
from rlio.errors import OptionError, SchemaConflict, SchemaError
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.schemas import json_columns, json_lines, row_groups
from rlio.schemas.parquet import Compression
from rlio.schemas.provenance import Provenance

NO_ROLL = Roll(max_seconds=None)
MIB = 1 << 20


def refused(batch: Any, message: str, *, make: Callable[..., Any] = ParquetWriter, **options: Any) -> None:
    """Check that a batch is refused as a whole, and that the writer goes on."""
    root = fresh_root()
    with make(root, **options) as writer:
        with pytest.raises(SchemaError, match=message):
            writer.write(batch)
        assert writer.rows_received == 0
    assert files(root) == {}


# ---- rows that cannot be cut ----


def test_a_joint_batch_that_readers_would_refuse_is_refused() -> None:
    """The memory of the zeros is never touched."""
    rows = 1126
    ids = {"eps_id": np.zeros(rows, int), "t": np.arange(rows)}
    wide = SampleBatch(obs=np.zeros((rows, MIB), np.uint8), **ids)
    refused(
        MultiAgentBatch({"a": wide}, rows),
        r"1126 rows of \d+ bytes.*at most .* 1073741824 bytes.*smaller batch",
    )
    half = MultiAgentBatch({"a": wide[:400], "b": wide[400:]}, rows)
    refused(half, "1126 rows")


def test_a_sequence_that_readers_would_refuse_is_refused() -> None:
    rows = DEFAULT_LIMITS.group_rows + 1
    refused(
        SampleBatch(x=np.zeros(rows, np.uint8), seq_lens=[rows]), f"{rows} rows of .* at most {rows - 1} rows"
    )


def test_rows_that_readers_would_refuse_are_refused() -> None:
    columns = {f"x{number}": np.zeros((1, 200 * MIB), np.uint8) for number in range(6)}
    refused(SampleBatch(columns), "rows of 1258291212 bytes: at most 1073741824; store references")


def test_more_episodes_than_a_footer_lists_are_refused_in_one_joint_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_groups, "_MANY_EPISODES", 100)
    part = SampleBatch(eps_id=np.arange(101), t=np.zeros(101, int))
    refused(MultiAgentBatch({"a": part}, 101), "101 episodes in rows that cannot be cut")
    with ParquetWriter(fresh_root()) as writer:  # The same rows of one episode.
        writer.write(MultiAgentBatch({"a": SampleBatch(eps_id=np.zeros(101, int), t=np.arange(101))}, 101))


@pytest.mark.parametrize("joint", [False, True])
def test_texts_that_readers_would_refuse_are_refused_in_rows_that_cannot_be_cut(
    joint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_groups, "DEFAULT_LIMITS", Limits(group_bytes=1 << 20))
    monkeypatch.setattr(row_groups, "_GROUP_PADDED", 1 << 10)
    ids = {"eps_id": np.zeros(100, int), "t": np.arange(100)}
    for found, columns in {
        "as an array of equal widths": {"x": np.array(["x" * 3000] * 100)},
        "bytes of text": {"x": object_column(["x" * 20_000] * 100)},
        "objects of about": {"infos": object_column([{"x": "[" * 600}] * 100)},
    }.items():
        part = SampleBatch({**columns, **ids})
        batch = MultiAgentBatch({"a": part}, 100) if joint else SampleBatch(part, seq_lens=[100])
        refused(batch, f"{found}.*cannot be cut")


# ---- texts of equal widths ----


@pytest.mark.few(2)
@pytest.mark.parametrize("text", ["x", b"x"])
@pytest.mark.parametrize("sequences", [False, True])
def test_one_long_text_does_not_make_the_rows_beside_it_unreadable(
    text: str | bytes, sequences: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy pads each of 6,001 texts to 500 or 2,000 bytes; by default, 5,000 characters were too many."""
    monkeypatch.setattr(row_groups, "_GROUP_PADDED", 100_000)
    small = Limits(group_bytes=1_000_000)
    batches = [SampleBatch(x=np.array([500 * text])), *[SampleBatch(x=np.array([2 * text] * 2000))] * 3]
    for batch in batches if sequences else ():
        batch["seq_lens"] = np.array([len(batch)])
    root = fresh_root()
    with ParquetWriter(root, roll=NO_ROLL) as writer:
        for batch in batches:
            writer.write(batch)
    with rlio.DatasetReader(root, epochs=1, limits=small) as reader:
        texts = [each for batch in reader for each in batch["x"].tolist()]
    assert texts == [500 * text, *[2 * text] * 6000]


def test_a_batch_with_one_long_text_is_cut_into_groups_of_little_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_groups, "_GROUP_PADDED", 4000)
    texts = np.array(["a"] * 50 + ["b" * 100] + ["a"] * 50)
    root = fresh_root()
    with ParquetWriter(root) as writer:
        writer.write(SampleBatch(x=texts, t=np.arange(101)))
    small = Limits(group_bytes=64 * 101 + 2)  # Of the texts' share; padded they would take 40,400 bytes.
    found = load(root, limits=small)
    assert_identical(found, SampleBatch(x=texts, t=np.arange(101)))


# ---- what shrinks too well ----


@pytest.mark.parametrize("codec", ["zstd:1", *further("gzip", "lz4", "none")])
def test_a_large_row_group_of_zeros_is_read_by_default(codec: str) -> None:
    """zstd shrinks zeros to a thirty-thousandth, and readers refuse less than a thousandth."""
    batch = SampleBatch(obs=np.zeros((1, 70 * MIB), np.uint8), t=[3])
    root = fresh_root()
    with ParquetWriter(root, compression=codec, roll=NO_ROLL) as writer:
        writer.write(SampleBatch(obs=np.ones((1, 70 * MIB), np.uint8), t=[2])[:0])
        writer.write(batch)
    with rlio.DatasetReader(root, epochs=1, columns=["obs"]) as reader:
        (found,) = reader
    assert not found["obs"].any()
    assert found["obs"].nbytes == 70 * MIB


def test_only_large_row_groups_get_another_codec() -> None:
    zstd = Compression("zstd", 3)
    assert zstd.of_group(DEFAULT_LIMITS.free_bytes) is zstd
    assert zstd.of_group(DEFAULT_LIMITS.free_bytes + 1).codec in ("lz4", "snappy", "none")
    assert Compression("snappy", None).of_group(1 << 40).codec == "snappy"


def test_compressed_columns_of_json_that_readers_would_refuse_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Zeros shrink too well, and compressed text is limited like a line."""
    small = Limits(line_bytes=20_000, free_bytes=10_000, inflation=20)
    for module in (json_columns, json_lines):
        monkeypatch.setattr(module, "DEFAULT_LIMITS", small)
    monkeypatch.setattr(json_columns, "MAX_TEXT_BYTES", small.line_bytes)
    options = {"make": JsonWriter, "compress_columns": ["obs", "infos"]}
    batch = SampleBatch(
        obs=np.zeros((40, 1000), np.uint8), infos=object_column({"x": str(n) * 800} for n in range(40))
    )
    root = fresh_root()
    with JsonWriter(root, compress_columns=["obs", "infos"]) as writer:
        writer.write(batch)
    assert_identical(load(root, limits=small), batch)
    refused(SampleBatch(obs=np.zeros((1, 20_000), np.uint8)), "would inflate", **options)
    refused(SampleBatch(infos=object_column([{"x": "a" * 20_000}])), "compressed column of", **options)


def test_a_compressed_line_of_json_that_readers_would_refuse_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Limits(free_bytes=4000, inflation=20)
    monkeypatch.setattr("rlio.writers.json_encoder.DEFAULT_LIMITS", small)
    batch = SampleBatch(obs=np.zeros((40, 1000), np.uint8))
    root = fresh_root()
    with JsonWriter(root, compression="zstd") as writer:
        writer.write(batch)
    assert_identical(load(root, limits=small), batch)


# ---- names, spaces, provenance: what every footer repeats ----


@pytest.mark.further
def test_a_schema_whose_footer_readers_would_refuse_is_refused() -> None:
    refused(SampleBatch({"x" * 5 * MIB: np.zeros(3)}), "need a footer of .* at most")
    low = np.arange(1_200_000, dtype=np.float32)
    spaces = {"default_policy": (gym.spaces.Box(low, low + 1), gym.spaces.Discrete(2))}
    refused(SampleBatch(t=[1]), "the spaces and the provenance need a footer", spaces=spaces)
    part = SampleBatch(eps_id=[1], t=[1])
    refused(MultiAgentBatch({"p" * 600: part}, 1), "an id has at most 512 characters")


@pytest.mark.further
def test_long_names_count_towards_the_footer_of_a_shard() -> None:
    batch = SampleBatch({"x" * 800_000: np.zeros((2, 4 * MIB), np.uint8)})
    root = fresh_root()
    with ParquetWriter(root, roll=Roll(max_bytes=1 << 30, max_seconds=None)) as writer:
        for _ in range(16):
            writer.write(batch)
    assert len(load(root)) == 32


@pytest.mark.parametrize(
    "extra",
    [
        {"x": "a" * 5 * MIB}, {"x": [[]] * 1_000_001}, {"x": "\ud800"}, {"x": float("nan")}, {"x": object()},
        {"x": list(itertools.accumulate(range(3000), lambda inner, _: [inner], initial=[]))[-1]},
    ],
)  # fmt: skip
def test_a_provenance_that_readers_would_refuse_is_refused_before_a_row_is_taken(
    extra: Mapping[str, Any],
) -> None:
    with pytest.raises(OptionError, match="provenance must be small JSON"):
        ParquetWriter(fresh_root(), provenance=Provenance(extra=extra))


@pytest.mark.parametrize("make", [ParquetWriter, JsonWriter])
def test_attributes_that_do_not_come_back_are_refused(make: Any) -> None:
    for wrong in (float("nan"), float("inf"), "many", 10**400):
        refused(SampleBatch(t=[1], num_grad_updates=wrong), "num_grad_updates is", make=make)
    with pytest.raises(SchemaError, match="env_steps"):
        MultiAgentBatch({}, 2**48 + 1)


def test_a_json_shard_has_at_most_a_million_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.writers.json_encoder._MAX_LINES", 10)
    root = fresh_root()
    with JsonWriter(root) as writer:
        for number in range(35):
            writer.write(SampleBatch(t=[number]))
    assert len(files(root)) == 4
    assert load(root)["t"].tolist() == [*range(35)]


# ---- writers of one root ----

TEXTS, OBJECTS = object_column(["a", "b", "c"]), object_column([{"a": 1}, None, "c"])
ZEROS = np.zeros(3)
READERS: dict[str, Callable[[str], Any]] = {
    "from the disk": lambda root: load(root, cache="none", batch_size=2),
    "from memory": lambda root: load(root, cache="memory", batch_size=2),
    "shuffled": lambda root: load(root, cache="memory", shuffle=True, seed=1),
    "arrow": lambda root: rlio.open_dataset(root).to_arrow(),
    "taken": lambda root: rlio.open_dataset(root)[1:5],
}


@pytest.mark.few(2)
@pytest.mark.each_value_once
@pytest.mark.parametrize("how", READERS)
@pytest.mark.parametrize("first", ["texts", "objects"])
def test_texts_of_one_writer_beside_objects_of_another_are_read(first: str, how: str) -> None:
    """Which schema comes first depends on their hashes, so both orders and several schemas are tried."""
    for number in range(4):
        root, more = fresh_root(), {f"y{number}": ZEROS}
        for column in (TEXTS, OBJECTS) if first == "texts" else (OBJECTS, TEXTS):
            with ParquetWriter(root) as writer:
                writer.write(SampleBatch(x=column, t=np.arange(3), **more))
        found = READERS[how](root)
        if how == "arrow":
            assert sorted(found["x"].to_pylist()) == sorted(['"a"', '"b"', '"c"', '{"a":1}', "null", '"c"'])
        elif how != "taken":
            assert sorted(map(repr, found["x"])) == sorted(map(repr, [*TEXTS, *OBJECTS]))
        assert rlio.verify(root).ok


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": ZEROS, "b": ZEROS}, {"a": ZEROS, "c": ZEROS}), ({"a": ZEROS, "b": ZEROS}, {"a": ZEROS}),
        ({"a": ZEROS}, ZEROS), ((ZEROS, ZEROS), (ZEROS,)), ((ZEROS, ZEROS), {"0": ZEROS, "1": ZEROS}),
        ({"a": {"b": ZEROS}}, {"a": ZEROS}),
    ],
)  # fmt: skip
def test_a_column_that_nests_otherwise_than_in_another_writer_is_refused(one: Any, other: Any) -> None:
    for first, second in ((one, other), (other, one)):
        root = fresh_root()
        with ParquetWriter(root) as writer:
            writer.write(SampleBatch(obs=first, t=np.arange(3)))
        with ParquetWriter(root) as writer:
            with pytest.raises(SchemaConflict, match=r"parts.*keep them in different roots.*column obs"):
                writer.write(SampleBatch(obs=second, t=np.arange(3)))
            writer.write(SampleBatch(obs=first, t=np.arange(3)))
        assert len(load(root, cache="memory")) == 6
