"""Opening a writer: what is refused before any row, and what closing it says."""

from pathlib import Path

import numpy as np
import pytest

import rlio
from rlio.catalog.listing import list_shards
from rlio.log import publisher as publishing
from rlio.log.new_writer import open_publisher
from rlio.log.publisher import NewShard, Publisher
from rlio.schemas.schema import Schema
from rlio.storage.filesystem import Storage


@pytest.mark.parametrize(
    ("header", "error"), [('{"format": 9}', rlio.errors.OptionError), ("[", rlio.errors.CorruptData)]
)
def test_a_root_that_cannot_be_written_is_refused_before_any_row(
    tmp_path: Path, header: str, error: type[Exception]
) -> None:
    (tmp_path / "_rlio.json").write_text(header)
    for writer in (rlio.ParquetWriter, rlio.JsonWriter):
        with pytest.raises(error, match=str(tmp_path)):
            writer(tmp_path)


def test_a_root_that_cannot_be_made_is_refused_before_any_row(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text("[]")
    with pytest.raises(rlio.RlioError, match=r"file\.json"):
        rlio.RolloutWorker("CartPole-v1", rlio.RandomPolicy(), output=tmp_path / "file.json")


@pytest.mark.parametrize("writer", [rlio.ParquetWriter, rlio.JsonWriter])
def test_a_writer_of_another_type_of_column_is_refused_and_the_root_stays_readable(
    tmp_path: Path, writer: type[rlio.ParquetWriter]
) -> None:
    with rlio.ParquetWriter(tmp_path) as first:
        first.write(rlio.SampleBatch(obs=np.zeros((2, 4), np.float32)))
    with writer(tmp_path) as second:
        with pytest.raises(rlio.errors.SchemaConflict, match="keep them in different") as caught:
            second.write(rlio.SampleBatch(obs=np.zeros((2, 3), np.float32)))
        assert caught.value.column == "obs"
        second.write(rlio.SampleBatch(obs=np.ones((2, 4), np.float32)))
    (batch,) = rlio.DatasetReader(tmp_path, epochs=1)
    assert sorted(batch["obs"][:, 0].tolist()) == [0.0, 0.0, 1.0, 1.0]


def test_columns_that_agree_can_be_read_where_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two writers that began at the same moment could not see each other.
    monkeypatch.setattr(publishing, "read_schemas", lambda storage, **options: {})
    for size in (3, 4):
        with rlio.ParquetWriter(tmp_path, writer_id=f"w{size}") as writer:
            writer.write(rlio.SampleBatch(obs=np.zeros((2, size)), rewards=np.full(2, size)))
    with pytest.raises(rlio.errors.SchemaConflict, match="policy 'default_policy' has"):
        rlio.DatasetReader(tmp_path)
    (batch,) = rlio.DatasetReader(tmp_path, columns=["rewards"], epochs=1)
    assert batch["rewards"].tolist() == [3, 3, 4, 4]


def _counts(publisher: Publisher) -> tuple[int, int, int, int]:
    return publisher.next_row, publisher.rows_published, publisher.bytes_published, publisher.waiting_bytes


def test_shards_that_cannot_be_stored_wait_in_order_and_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = open_publisher(tmp_path, writer_id="w")
    schema = Schema.of(rlio.SampleBatch(t=[0]))

    def fail(*args: object, **options: object) -> None:
        raise rlio.errors.PublishError("the store is full")

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "put", fail)
        for data, rows in ((b"first", 2), (b"second", 3)):
            publisher.submit(NewShard(data=data, rows=rows, suffix="jsonl", footer_crc32=0, schema=schema))
        for _ in range(2):
            with pytest.raises(rlio.errors.PublishError, match="full"):
                publisher.flush()
    assert _counts(publisher) == (5, 0, 0, 11)
    assert [path.name for path in (tmp_path / "data" / "w").iterdir()] == ["_trim-0"]
    publisher.flush()
    assert _counts(publisher) == (5, 5, 11, 0)
    stored = sorted((tmp_path / "data" / "w").glob("*.jsonl"))
    assert [path.read_bytes() for path in stored] == [b"first", b"second"]
    assert [path.name.split("-")[0] for path in stored] == ["000000000000", "000000000002"]


def test_a_close_that_is_interrupted_before_the_seal_leaves_the_log_to_recovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C twice. Without the log nothing would ever seal the writer, and followers would wait for it."""
    writer = rlio.ParquetWriter(tmp_path)
    writer.write(rlio.SampleBatch(t=[0, 1]))

    def interrupt(self: Publisher, last: object, *, timeout: float | None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Publisher, "_finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.close()
    assert list(list_shards(Storage.open(tmp_path)).sealed) == []
    assert rlio.maintenance.recover(tmp_path).is_clean
    assert list_shards(Storage.open(tmp_path)).sealed == {writer.writer_id: 2}
