"""A batch larger than the data: an error of readers that begin again for ever, one short batch of others."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from counter_env import episode
from stored_batches import store

import rlio
from rlio import DatasetReader, JsonReader, MixedInput, NoopOutput, ReplayStore, SampleBatch, ShuffledInput
from rlio.errors import EndOfData, OptionError
from rlio.reader import InputReader
from rlio.readers.async_input import AsyncInput
from rlio.readers.d4rl_reader import D4RLReader
from rlio.readers.foreign_parquet import ForeignParquetReader
from rlio.readers.mapped_input import MappedInput
from rlio.readers.recording_input import RecordingInput

ROWS = 60
HUGE = 99_999_999


@pytest.fixture(scope="module")
def root() -> str:
    """Six episodes of ten rows."""
    return store(*(episode(0, number, 10) for number in range(6)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty rows as other programs write them."""
    folder = tmp_path_factory.mktemp("others")
    lines = [
        json.dumps({"type": "SampleBatch", "t": [*range(6 * i, 6 * i + 6)], "obs": [[0.5]] * 6})
        for i in range(10)
    ]
    (folder / "rllib.json").write_text("\n".join(lines) + "\n")
    pq.write_table(pa.table({"t": np.arange(ROWS), "rewards": np.ones(ROWS)}), folder / "rows.parquet")
    with h5py.File(folder / "d4rl.hdf5", "w") as file:
        file["observations"] = np.zeros((ROWS, 2), np.float32)
        file["actions"] = np.zeros((ROWS, 1), np.float32)
        file["rewards"] = np.ones(ROWS, np.float32)
        file["terminals"] = np.zeros(ROWS, bool)
        file["timeouts"] = np.arange(ROWS) % 10 == 9
    return folder


#: Options of a DatasetReader -> units of an epoch.
TIERS: dict[str, tuple[dict[str, Any], int]] = {
    "cold": ({"cache": "none"}, ROWS),
    "cold, shuffled": ({"cache": "none", "shuffle": True, "seed": 1}, ROWS),
    "cold, one of two ranks": ({"cache": "none", "shard": (1, 2)}, ROWS),
    "cold, filtered": ({"cache": "none", "filter": "t > 6"}, 18),
    "cold, damage skipped": ({"cache": "none", "on_error": "skip"}, ROWS),
    "store": ({"cache": "memory"}, ROWS),
    "store, filtered": ({"cache": "memory", "filter": "t > 6"}, 18),
    "n_step": ({"cache": "memory", "draw": rlio.NStep(3)}, ROWS),
    "sequences": ({"cache": "memory", "draw": rlio.Sequences(5)}, 12),
    "episodes": ({"cache": "memory", "draw": rlio.WholeEpisodes()}, 6),
}


def check_endless(
    make: Callable[..., InputReader], units: int, *, sizes: Sequence[int] | None = None, **options: Any
) -> None:
    """A batch of as many units as there are is given, and a larger one refused, again and again."""
    for size in sizes or (units + 1, HUGE):
        for given, n in (({}, size), ({"batch_size": size}, None)):
            if n is None and "batch_size" in options:
                continue
            with make(**options | given) as reader:
                for _ in range(2):
                    with pytest.raises(OptionError) as raised:
                        reader.sample(n)
                    assert str(size) in str(raised.value)
                    assert str(units) in str(raised.value)
                    if isinstance(reader, DatasetReader) and n is None:
                        with pytest.raises(OptionError):
                            reader.skip(1)
                reader.sample(units)
                reader.sample(1)


@pytest.mark.few(5)
@pytest.mark.parametrize("tier", TIERS)
def test_an_endless_reader_of_a_data_set_refuses_a_batch_larger_than_its_data(root: str, tier: str) -> None:
    """It read the data again and again into one batch, until the memory was full."""
    options, units = TIERS[tier]
    check_endless(lambda **given: DatasetReader(root, **options, **given), units)


@pytest.mark.few(5)
@pytest.mark.parametrize("tier", TIERS)
def test_one_epoch_gives_one_short_batch_or_drops_it(root: str, tier: str) -> None:
    options, units = TIERS[tier]
    own = -(-units // 2) if "shard" in options else units
    with DatasetReader(root, **options, batch_size=HUGE, epochs=1) as reader:
        sizes = [batch.count if reader.unit == "steps" else len(batch["seq_lens"]) for batch in reader]  # type: ignore[arg-type, union-attr]
    assert sizes == [own]
    with DatasetReader(root, **options, batch_size=HUGE, epochs=1, drop_last=True) as reader:
        assert list(reader) == []


def test_without_a_batch_size_an_endless_reader_gives_no_row_twice_in_a_batch(root: str) -> None:
    for options, units in TIERS.values():
        with DatasetReader(root, **options) as reader:
            batch = reader.sample()
            assert isinstance(batch, SampleBatch)
            assert len(batch.get("seq_lens", batch["t"])) == units
    with ReplayStore.open(root) as kept:
        assert len(kept.epochs(seed=0).sample()["t"]) == ROWS


def test_an_endless_pass_over_a_store_refuses_a_batch_larger_than_it(root: str) -> None:
    with ReplayStore.open(root) as kept:
        check_endless(lambda **given: kept.epochs(seed=0, **given), ROWS)
        check_endless(lambda **given: kept.epochs(seed=0, draw=rlio.WholeEpisodes(), **given), 6)


@pytest.mark.further
def test_an_endless_reader_of_other_files_refuses_a_batch_larger_than_they_are(folder: Path) -> None:
    readers: list[tuple[Any, str]] = [
        (JsonReader, "rllib.json"),
        (ForeignParquetReader, "rows.parquet"),
        (D4RLReader, "d4rl.hdf5"),
    ]
    for reader, file in readers:
        for order in ({}, {"shuffle": True, "seed": 1}):
            # Of lines, only reading tells how many there are: two passes are read before a batch is refused.
            make = partial(reader, str(folder / file))
            check_endless(make, ROWS, sizes=[HUGE] if reader is JsonReader else None, **order)
            with make(batch_size=HUGE, epochs=1, **order) as once:
                assert [len(batch) for batch in once] == [ROWS]


def test_what_wraps_an_endless_reader_refuses_a_batch_larger_than_its_data(root: str) -> None:
    def child() -> DatasetReader:
        return DatasetReader(root, batch_size=7)

    makers: list[Callable[[], InputReader]] = [
        lambda: ShuffledInput(child(), 3, seed=0),
        lambda: RecordingInput(child(), NoopOutput()),
        lambda: AsyncInput(child()),
    ]
    for make in makers:
        check_endless(lambda make=make, **_: make(), ROWS, batch_size=7)
    for reader in (MappedInput(child(), lambda batch: batch), MappedInput(child(), lambda batch: batch[:1])):
        with reader, pytest.raises(OptionError):
            reader.sample(HUGE)


def test_a_mixture_of_endless_readers_refuses_a_batch_larger_than_all_of_them(root: str) -> None:
    def make(batch_size: int) -> MixedInput:
        sources = {
            "a": DatasetReader(root, batch_size=7),
            "b": DatasetReader(root, cache="memory", batch_size=7),
        }
        return MixedInput(sources, batch_size=batch_size)

    check_endless(lambda batch_size=8: make(batch_size), 2 * ROWS)


def test_a_function_that_makes_more_rows_may_give_batches_larger_than_the_data(root: str) -> None:
    def twice(batch: Any) -> SampleBatch:
        return SampleBatch({name: np.repeat(batch[name], 2, axis=0) for name in batch})

    with MappedInput(DatasetReader(root, batch_size=7), twice) as reader:
        assert len(reader.sample(2 * ROWS)) == 2 * ROWS


def test_epochs_that_end_still_give_what_is_left(root: str) -> None:
    with DatasetReader(root, batch_size=100, epochs=2) as reader:
        assert [batch.count for batch in reader] == [100, 20]
        with pytest.raises(EndOfData):
            reader.sample()
