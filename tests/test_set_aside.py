"""Rows that recovery had to set aside are an error of `verify`, until somebody has dealt with them."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from test_verify import WRITER
from test_verify_live import killed
from typer.testing import CliRunner

import rlio
from rlio.catalog.listing import HoleCheck
from rlio.cli.main import app
from rlio.log.wal import whole_rows
from rlio.maintenance.findings import Finding

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no logs without flock")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting between listings."""
    monkeypatch.setattr("rlio.catalog.listing.HOLE_CHECK", HoleCheck(seconds=0))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """100 rows in shards and 30, of three writes, in the log of a writer that died."""
    killed(tmp_path / "run")
    return tmp_path / "run"


def damage(root: Path, write: int) -> Path:
    """Flip a bit of one write of the log; gives a copy of the log from before."""
    log = root / "_wal" / WRITER
    backup = Path(shutil.copytree(log, root.parent / "backup"))
    (segment,) = sorted(log.glob("*.wal"))[-1:]
    data = bytearray(segment.read_bytes())
    frames = [match.start() for match in re.finditer(rb"rlw0", bytes(data))]  # The first is the header.
    data[frames[1 + write] + 60] ^= 1
    segment.write_bytes(data)
    return backup


def found(root: Path) -> Finding:
    (finding,) = rlio.verify(root).findings
    return finding


def verified(root: Path) -> int:
    return CliRunner().invoke(app, ["verify", str(root), "--level", "quick"]).exit_code


def test_rows_behind_damage_in_a_log_are_an_error_that_says_which_where_and_what_to_do(root: Path) -> None:
    damage(root, 1)
    report = rlio.maintenance.recover(root)
    (aside,) = report.logs[0].set_aside
    finding = found(root)
    assert (finding.severity, finding.code, finding.uri) == ("error", "log-set-aside", aside)
    # Those of the damaged write, too, although only the write behind it says where it begins.
    assert finding.rows == 20
    assert f"20 rows of writer {WRITER!r} (110 to 129)" in finding.message
    assert str(root / "_wal" / WRITER) in finding.message
    assert "rlio recover --all-hosts" in finding.message
    assert verified(root) == 1
    # A second recovery has nothing to do, and makes it no better.
    assert rlio.maintenance.recover(root).is_clean
    assert verified(root) == 1


def test_a_last_write_that_is_damaged_is_an_error_although_nothing_tells_its_rows(root: Path) -> None:
    damage(root, 2)
    rlio.maintenance.recover(root)
    finding = found(root)
    assert (finding.severity, finding.rows) == ("error", 0)
    assert f"rows of writer {WRITER!r} were acknowledged" in finding.message


def test_what_the_message_says_brings_the_rows_back(root: Path) -> None:
    backup = damage(root, 1)
    (aside,) = rlio.maintenance.recover(root).logs[0].set_aside
    shutil.copytree(backup, root / "_wal" / WRITER)
    result = CliRunner().invoke(app, ["recover", str(root), "--all-hosts"])
    assert result.exit_code == 0, result.output
    assert len(rlio.open_dataset(root)) == 130
    os.unlink(aside)
    assert rlio.verify(root).findings == ()
    assert verified(root) == 0


def test_a_damaged_header_loses_the_rows_behind_it(root: Path) -> None:
    (segment,) = sorted((root / "_wal" / WRITER).glob("*.wal"))[-1:]
    data = bytearray(segment.read_bytes())
    data[60] ^= 1
    segment.write_bytes(data)
    assert [*map(len, whole_rows(str(segment)))] == [10, 10, 10]
    rlio.maintenance.recover(root)
    assert (found(root).severity, found(root).rows) == ("error", 30)


def test_a_damaged_shard_of_a_log_is_an_error_only_where_nobody_else_has_its_rows(root: Path) -> None:
    rlio.maintenance.recover(root)
    aside = root / "_wal" / "_damaged"
    aside.mkdir(parents=True)
    (last,) = (root / "data" / WRITER).glob("000000000100-*.parquet")
    shutil.copy(last, aside / f"{WRITER}-{last.name}")
    assert (found(root).severity, found(root).rows) == ("note", 0)
    assert verified(root) == 0
    last.rename(root / "elsewhere")
    lost = [finding for finding in rlio.verify(root).findings if finding.code == "log-set-aside"]
    assert [(finding.severity, finding.rows) for finding in lost] == [("error", 30)]


def test_pipes_and_links_that_were_set_aside_are_told_and_never_opened(root: Path) -> None:
    rlio.maintenance.recover(root)
    aside = root / "_wal" / "_damaged"
    aside.mkdir(parents=True)
    os.mkfifo(aside / f"{WRITER}-000000000000.wal")
    (aside / "w-other-1.wal").symlink_to("/etc/passwd")
    told = [finding for finding in rlio.verify(root).findings if finding.code == "log-set-aside"]
    assert [(finding.severity, finding.rows) for finding in told] == [("error", 0), ("error", 0)]
