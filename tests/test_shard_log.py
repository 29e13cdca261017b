"""One writer's side of the commit."""

from pathlib import Path

import pytest

import rlio
from rlio.schemas.schema import Schema
from rlio.storage.filesystem import Storage
from rlio.storage.shard_log import ShardLog


@pytest.mark.parametrize(("header", "error"), [('{"format": 9}', rlio.OptionError), ("[", rlio.CorruptData)])
def test_a_root_that_cannot_be_written_is_refused_before_any_row(
    tmp_path: Path, header: str, error: type[Exception]
) -> None:
    (tmp_path / "_rlio.json").write_text(header)
    for writer in (rlio.ParquetWriter, rlio.JsonWriter):
        with pytest.raises(error, match=str(tmp_path)):
            writer(tmp_path)


def test_an_empty_or_absent_root_is_not_touched_before_the_first_shard(tmp_path: Path) -> None:
    ShardLog(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_shards_that_cannot_be_stored_wait_in_order_and_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ShardLog(tmp_path, writer_id="w")
    schema = Schema.of(rlio.SampleBatch(t=[0]))

    def fail(*args: object, **options: object) -> None:
        raise rlio.PublishError("the store is full")

    log.append(b"first", rows=2, suffix="jsonl", footer_crc32=0, schema=schema)
    log.append(b"second", rows=3, suffix="jsonl", footer_crc32=0, schema=schema)
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "put", fail)
        log.try_publish()
        with pytest.raises(rlio.PublishError, match="full"):
            log.publish()
    assert (log.next_row, log.rows_published, log.bytes_published, log.waiting_bytes) == (5, 0, 0, 11)
    assert not (tmp_path / "data").exists()
    log.publish()
    assert (log.next_row, log.rows_published, log.bytes_published, log.waiting_bytes) == (5, 5, 11, 0)
    stored = sorted((tmp_path / "data" / "w").iterdir())
    assert [path.read_bytes() for path in stored] == [b"first", b"second"]
    assert [path.name.split("-")[0] for path in stored] == ["000000000000", "000000000002"]
