"""Ledgers of all readers: rows that get lost on the way are an error of `close`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stored_batches import numbered, store

from rlio import (
    DatasetReader,
    InputReader,
    JsonReader,
    JsonWriter,
    MappedInput,
    MixedInput,
    NoopOutput,
    OutputWriter,
    RecordingInput,
    SampleBatch,
    ShuffledInput,
)
from rlio.errors import CorruptData, EndOfData, LedgerError, PublishError, SchemaError
from rlio.interfaces import ReadLedger
from rlio.readers import d4rl_reader, inputs, mixed_input
from rlio.readers.d4rl_reader import D4RLReader
from rlio.readers.foreign_parquet import ForeignParquetReader


class Counting(InputReader):
    """Batches of 3, 4 and 5 rows, numbered."""

    def __init__(self) -> None:
        self.at = 0

    def _next(self) -> SampleBatch:
        if self.at == 3:
            raise EndOfData("all 12 rows were read")
        self.at += 1
        return SampleBatch(t=np.arange(self.at + 2))

    def _position(self) -> dict[str, Any]:
        return {"at": self.at}

    def _seek(self, position: dict[str, Any]) -> None:
        self.at = int(position["at"])


def json_file(folder: Path) -> Path:
    records = [{"type": "SampleBatch", "t": list(range(n)), "rewards": [1.0] * n} for n in (3, 4, 5)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.json").write_text("\n".join(map(json.dumps, records)))
    return folder / "a.json"


def json_set(folder: Path) -> Path:
    with JsonWriter(folder) as writer:
        for n in (3, 4, 5):
            writer.write(numbered(n))
    return folder


def parquet_file(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table({"obs": np.arange(12.0), "t": np.arange(12)}), folder / "a.parquet", row_group_size=5
    )
    return folder / "a.parquet"


def hdf5_file(folder: Path) -> Path:
    h5py = pytest.importorskip("h5py")
    folder.mkdir(parents=True, exist_ok=True)
    with h5py.File(folder / "a.hdf5", "w") as file:
        for name in ("observations", "actions"):
            file[name] = np.arange(12, dtype=np.float32)[:, None]
        file["rewards"], file["terminals"] = np.ones(12, np.float32), np.arange(12) == 11
    return folder / "a.hdf5"


READERS: dict[str, Callable[[Path], InputReader]] = {
    "InputReader": lambda folder: Counting(),
    "JsonReader": lambda folder: JsonReader(json_file(folder), epochs=1),
    "JsonReader shuffled": lambda folder: JsonReader(json_file(folder), epochs=1, shuffle=True, seed=0),
    "DatasetReader of JSON shards": lambda folder: DatasetReader(json_set(folder), epochs=1),
    "DatasetReader": lambda folder: DatasetReader(store(numbered(12)), epochs=1),
    "ForeignParquetReader": lambda folder: ForeignParquetReader(parquet_file(folder), epochs=1),
    "ForeignParquetReader shuffled": lambda folder: ForeignParquetReader(
        parquet_file(folder), epochs=1, shuffle=True, seed=0
    ),
    "D4RLReader": lambda folder: D4RLReader(hdf5_file(folder), epochs=1),
    "ShuffledInput": lambda folder: ShuffledInput(Counting(), 2, seed=0),
    "MappedInput": lambda folder: MappedInput(Counting(), lambda batch: batch),
    "RecordingInput": lambda folder: RecordingInput(Counting(), NoopOutput()),
    "MixedInput": lambda folder: MixedInput(
        [(Counting(), 1), (JsonReader(json_file(folder), epochs=1), 0)], batch_size=5, end="renormalise"
    ),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("n", [None, 1, 5])
def test_the_ledger_counts_the_rows_that_are_served_and_not_those_that_wait(
    name: str, n: int | None, tmp_path: Path
) -> None:
    served = 0
    with READERS[name](tmp_path) as reader:
        while True:
            try:
                served += len(reader.sample(n))
            except EndOfData:
                break
            assert reader.ledger == ReadLedger(expected=served, served=served)
    assert served == 12


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("batches", [1, 2])
def test_the_ledger_begins_anew_where_a_reader_is_restored(name: str, batches: int, tmp_path: Path) -> None:
    with READERS[name](tmp_path / "one") as reader:
        for _ in range(batches):
            reader.sample(5)
        state = reader.state_dict()
        # Data sets in memory have a name of their own each; the same reader can go back, too.
        reader.load_state_dict(state)
        assert reader.ledger == ReadLedger()
        rest = 12 - 5 * batches
        assert sum(len(batch) for batch in reader) == rest
        assert reader.ledger == ReadLedger(expected=rest, served=rest)


@pytest.mark.parametrize("name", ["InputReader", "JsonReader", "ForeignParquetReader", "ShuffledInput"])
def test_rows_that_get_lost_as_batches_are_cut_are_an_error_of_close(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = "rlio.interfaces.split_units"
    monkeypatch.setattr(cut, lambda batch, n, unit: (batch[:n], batch[n + 1 :]))
    reader = READERS[name](tmp_path)
    reader.sample(2)
    with pytest.raises(LedgerError, match="accounted for"):
        reader.close()
    reader.close()  # It is closed all the same.


def test_a_group_that_decodes_to_fewer_rows_than_its_footer_says_is_an_error_of_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = inputs.TableCursor._load
    monkeypatch.setattr(inputs.TableCursor, "_load", lambda self, *at: whole(self, *at)[1:])  # type: ignore[index]
    for make in (READERS["ForeignParquetReader"], READERS["D4RLReader"]):
        reader = make(tmp_path)
        reader.sample()
        with pytest.raises(LedgerError):
            reader.close()


def test_rows_of_damaged_groups_are_skipped_and_counted_in_each_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hdf5_file(tmp_path)
    load = d4rl_reader._Table.load

    def damaged(self: Any, group: int, start: int, stop: int) -> SampleBatch:
        if group == 1:
            raise CorruptData("damaged", uri=str(path), record=group)
        return load(self, group, start, stop)

    monkeypatch.setattr(d4rl_reader, "_MIN_GROUP_ROWS", 5)
    monkeypatch.setattr(d4rl_reader._Table, "load", damaged)
    for shuffle in (False, True):
        with D4RLReader(path, epochs=2, shuffle=shuffle, seed=0, on_error="skip") as reader:
            assert sum(len(batch) for batch in reader) == 14
            assert reader.ledger == ReadLedger(expected=24, served=14, skipped=10)
            assert reader.skipped == 1


def test_what_drop_last_drops_and_what_out_does_not_take_is_told() -> None:
    reader = Counting()
    reader.drop_last = True
    with reader:
        with pytest.raises(SchemaError):
            reader.sample(5, out=SampleBatch(t=np.zeros(4, np.int64)))
        reader.sample(5)
        with pytest.raises(EndOfData):
            reader.sample(5)
        assert reader.ledger == ReadLedger(expected=12, served=5, dropped=7)


def test_a_mixture_tells_the_rows_of_each_source_through_rewinds() -> None:
    sources: dict[str, InputReader] = {
        "whole": Counting(),
        "set": DatasetReader(store(numbered(12)), epochs=1, columns=["t"]),
    }
    with MixedInput(sources, weights=[1, 3], batch_size=8, end="rewind") as mix:
        for _ in range(6):
            mix.sample()
        assert mix.ledgers == {
            "whole": ReadLedger(expected=12, served=12),
            "set": ReadLedger(expected=36, served=36),
        }
        assert mix.ledger == ReadLedger(expected=48, served=48)


def test_a_mixture_that_loses_rows_as_it_joins_its_sources_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    join = mixed_input.concat_samples
    monkeypatch.setattr(mixed_input, "concat_samples", lambda *args, **options: join(*args, **options)[1:])
    mix = MixedInput([(Counting(), 1), (Counting(), 1)], batch_size=4)
    assert len(mix.sample()) == 3
    with pytest.raises(LedgerError):
        mix.close()


class Refusing(OutputWriter):
    """Takes the first batch and no other."""

    def _write(self, batch: Any) -> None:
        if self.rows_received:
            raise PublishError("full")


def test_rows_that_a_recording_could_not_write_are_dropped_and_told() -> None:
    with RecordingInput(Counting(), Refusing()) as reader:
        reader.sample()
        with pytest.raises(PublishError):
            reader.sample()
        assert reader.ledger == ReadLedger(expected=7, served=3, dropped=4)
