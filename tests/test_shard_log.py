"""One writer's side of the commit."""

from pathlib import Path

import pytest

import rlio
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
