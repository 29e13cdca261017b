"""`python -m benchmarks --only far`: it reads what was written, and counts what a store is asked for."""

import dataclasses
import doctest
import json
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from further import further

from benchmarks import foreign_memory, layouts, report
from benchmarks.far_store import FarStore, Traffic, one_at_a_time
from benchmarks.layouts import LAYOUTS, Shape, rows_in
from benchmarks.parts import far
from benchmarks.results import Run
from benchmarks.scales import TINY, Setup
from rlio.storage import expand_inputs
from rlio.storage.input_files import InputFiles

SHAPE = Shape(rows=40, episode=10, width=12)
KINDS = {"parquet": "Parquet, by a mapping", "d4rl": "D4RL, chunks", "zarr": "Zarr 2, chunks"}


class Asked:
    """What a store is asked for, counted beside `Traffic`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests = self.bytes = self.now = self.most = 0
        lock, own = threading.Lock(), FarStore._late

        def late(store: FarStore, answer: Any) -> Any:
            with lock:
                self.requests, self.now = self.requests + 1, self.now + 1
                self.most = max(self.most, self.now)
            try:
                found = own(store, answer)
            finally:
                with lock:
                    self.now -= 1
            with lock:
                self.bytes += len(found) if isinstance(found, bytes) else 0
            return found

        monkeypatch.setattr(FarStore, "_late", late)


def what(kind: str) -> Any:
    return next(one for one in far.WHAT if one.title == KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alone", [False, True])
def test_it_counts_the_requests_and_bytes_that_a_store_is_asked_for(
    kind: str, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, rows = LAYOUTS[kind](SHAPE, 6), rows_in(kind, SHAPE, 6)
    assert rows == 240
    asked = Asked(monkeypatch)
    with one_at_a_time() if alone else monkeypatch.context():
        opening, epoch = far._read(files, rows, 0.01, shuffle=False, **what(kind).read)
    assert opening.requests + epoch.requests == asked.requests > 6
    assert opening.bytes + epoch.bytes == asked.bytes
    if kind != "zarr":  # It needs no more than the chunks.
        assert asked.bytes >= sum(map(len, files.values()))
    assert opening.waits >= 1
    assert opening.waited > 0.005 * opening.waits
    assert (asked.most == 1) == alone


def test_rows_that_are_not_those_that_were_written_end_it() -> None:
    files = LAYOUTS["parquet"](SHAPE, 2)
    with pytest.raises(RuntimeError, match="read 80 rows, expected 81"):
        far._read(files, 81, 0, shuffle=True)


def test_each_layout_is_in_each_table_or_named_as_absent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    some = [what(kind) for kind in KINDS]
    monkeypatch.setattr(far, "WHAT", some)
    monkeypatch.setitem(sys.modules, "h5py", None)
    section = far.run(Setup(scale=dataclasses.replace(TINY, far_rounds=1), data=tmp_path, scratch=tmp_path))
    read = ["Parquet, by a mapping", "Zarr 2, chunks"]
    assert {title: list(rows) for title, rows in section.tables.items()} == {
        "opening": read, "an epoch in order": read, "a shuffled epoch without a store": read[:1]
    }  # fmt: skip
    assert list(section.absent) == ["D4RL, chunks"]
    assert "h5py" in section.absent["D4RL, chunks"]
    run = Run({"versions": {}, "load_average_at_start": []}, {"only": True, "rounds": 1}, [section])
    monkeypatch.setattr(report, "_machine", lambda run: "")
    text = report.markdown(run)["far"]
    assert "\nD4RL, chunks did not run: not installed" in text
    (row,) = (
        line
        for line in text.split("An epoch in order:")[1].split("A shuffled")[0].splitlines()
        if "Zarr" in line
    )
    found = section.tables["an epoch in order"]["Zarr 2, chunks"]
    assert row.split(" | ")[1:3] == [f"{found['MB']:.3g}", f"{found['requests']:,.0f}"]
    assert found["one by one: waited, s"] > found["waited, s"]


@pytest.mark.parametrize("at", [*range(0, len(far.WHAT), 7), *further(*range(len(far.WHAT)))])
def test_every_layout_gives_the_rows_that_it_says(at: int) -> None:
    one = far.WHAT[at]
    files, rows = far._made(one.kind, 20_000, 2)
    far._read(files, rows, 0, shuffle=one.is_table, **one.read)


def test_a_reader_stands_still_for_requests_and_for_nothing_else() -> None:
    traffic, path = Traffic(), f"/{uuid.uuid4().hex}"
    for name in "ab":
        MemoryFileSystem().pipe_file(f"{path}/{name}", b"0123")
    given = {"traffic": traffic, "seconds": 0.05}
    with traffic.watched():
        files = InputFiles(expand_inputs(f"far://{path}", storage_options=given))
        assert len(traffic.waits) == traffic.requests > 0  # In this thread.
        traffic.clear()
        threading.Event().wait(0.02)
        assert traffic.waits == []
        for number in range(2):  # The first in another thread; the second begins a plan, in one of the pool.
            assert files.open(number).read() == b"0123"
            assert (traffic.requests, traffic.bytes) == (number + 1, 4 * number + 4)
            assert len(traffic.waits) == number + 1
        files.close()


def test_the_page_shows_what_the_committed_figures_say(checkout: Path, tmp_path: Path) -> None:
    folder = checkout / "docs" / "design"
    text = (folder / "requests.md").read_text()
    page = tmp_path / "page.md"
    page.write_text(text)
    run = Run.from_json(json.loads((folder / "requests.json").read_text()))
    report.update_page(page, run)
    assert page.read_text() == text
    (section,) = run.sections
    named = [*section.tables["an epoch in order"], *section.absent]
    assert sorted(named) == sorted(one.title for one in far.WHAT)


def test_examples_in_docstrings_run() -> None:
    found = doctest.testmod(layouts)
    assert found.attempted == 2
    assert not found.failed


@pytest.mark.further
@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak of memory")
def test_memory_is_counted_by_processes_that_read_all_rows(capsys: pytest.CaptureFixture[str]) -> None:
    foreign_memory.main(["--only", "d4rl", "--small", "0.001", "--gigabytes", "0.002"])
    *_, small, large = capsys.readouterr().out.splitlines()
    for line, rows in ((small, "2,000"), (large, "4,500")):
        kind, _, found, *peaks = (cell.strip() for cell in line.strip("|").split("|"))
        assert (kind, found) == ("d4rl", rows)
        assert all(50 < float(peak) < 2000 for peak in peaks)
