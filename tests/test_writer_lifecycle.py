"""However a process ends, what `write()` took is in the data set, or in the log and comes back; once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from interrupts import interrupted_at
from lifecycle_steps import ROWS, Site, batch
from warm_children import Ended, run_all

import rlio
from rlio.catalog.listing import list_shards
from rlio.errors import PublishError
from rlio.log.spool import find_logs
from rlio.storage.filesystem import Storage

# One process runs them all, since they share their children.
pytestmark = pytest.mark.xdist_group("writer_lifecycle")

KINDS = ("parquet", "json")
#: A root that no shell, glob, URL or format string may get hold of.
ODD = "odd ü日 #%+&?*[a] {0} $HOME"

# ---- the ends of processes: every child takes 60 rows, of which the roll ends shards, and then ends ----

BEGIN = """
site = Site({folder!r}, {store!r}, {kind!r})
at_the_end.append(site.print_rows if site.store == "memory" else lambda: None)
writer = site.writer()
site.write(writer, 3)
if {hangs}:
    site.hang()
"""
ENDS = {
    "sys_exit_inside_with": "with writer:\n    site.write(writer, 3)\n    leaving()\n    sys.exit(7)",
    "sys_exit_with_an_open_writer": "site.write(writer, 3)\nleaving()\nsys.exit(7)",
    "an_exception_inside_with": "with writer:\n    site.write(writer, 3)\n    leaving()\n    1 / 0",
    "the_last_line": "site.write(writer, 3)\nleaving()",
    "os_exit": "site.write(writer, 3)\nleaving()\nos._exit(7)",
    "a_dropped_writer": """
site.write(writer, 3)
circle = [writer]
circle.append(circle)
del writer, circle
gc.collect()
leaving()
""",
    "sigterm": """
with writer:
    site.write(writer, 3)
    leaving()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
""",
    "sigint": """
with writer:
    site.write(writer, 3)
    leaving()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
""",
    "sigint_twice": """
def again():
    time.sleep(0.5)
    leaving()
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=again, daemon=True).start()
with writer:
    site.write(writer, 3)
    leaving()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
""",
    "a_daemon_thread_that_still_writes": """
def go_on():
    while True:
        site.write(writer)
threading.Thread(target=go_on, daemon=True).start()
time.sleep(0.2)
leaving()
""",
    "a_thread_that_waits_in_write": """
writer._publisher.log.has_room = lambda: False
writer._publisher.log.wait_for_room = lambda: time.sleep(60)
threading.Thread(target=site.write, args=(writer,), daemon=True).start()
time.sleep(0.2)
leaving()
""",
    "two_open_writers": """
other = site.writer()
other.write(batch(0, who=1))
site.write(writer, 3)
leaving()
""",
    "a_tee": """
with rlio.TeeWriter(writer, rlio.NoopOutput()) as tee:
    site.write(writer, 3)
    leaving()
    1 / 0
""",
}
KILLED = ("os_exit", "sigterm")
#: Ends that differ in how writers of another kind, or of rows in memory, come to be closed.
JSON_ENDS = ("sys_exit_inside_with", "an_exception_inside_with", "the_last_line", "os_exit", "sigint")
MEMORY_ENDS = ("sys_exit_inside_with", "the_last_line", "a_dropped_writer", "sigint")


def _cases() -> Iterator[tuple[str, str, str]]:
    for store in ("slow", "local"):
        yield from ((end, store, "parquet") for end in ENDS)
        yield from ((end, store, "json") for end in JSON_ENDS)
    yield from ((end, "memory", "parquet") for end in MEMORY_ENDS)
    yield "the_last_line", "memory", "json"


CASES = list(_cases())
#: Of the ends on a store that works, `make test` has these: the others differ where it hangs, too.
ON_A_LOCAL_DISK = ("sys_exit_inside_with", "an_exception_inside_with", "the_last_line", "os_exit", "sigterm")


#: In JSON, `make test` has these: what ends a process is the same for both kinds.
IN_JSON = ("the_last_line", "os_exit")


def _is_further(end: str, store: str, kind: str) -> bool:
    if kind == "json":
        return store == "local" or end not in IN_JSON
    return store == "local" and end not in ON_A_LOCAL_DISK


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lifecycle")


@pytest.fixture(scope="module")
def ended(folder: Path, request: pytest.FixtureRequest) -> dict[str, Ended]:
    """The children of the tests that run, many at once: those whose store hangs mostly wait."""
    tasks: dict[str, str] = {}
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    chosen = {tuple(map(each.get, ("end", "store", "kind"))) for each in params}
    for end, store, kind in [case for case in CASES if case in chosen]:
        begin = BEGIN.format(
            folder=str(_site_folder(folder, end, store, kind)), store=store, kind=kind, hangs=store == "slow"
        )
        tasks[f"{end}-{store}-{kind}"] = begin + ENDS[end]
    names = {str(each.get("name")) for each in params}
    for name in [name for name in FORKS if name in names]:
        where = str(folder / name / ODD)
        tasks[name] = BEGIN.format(folder=where, store="local", kind="parquet", hangs=False) + FORKS[name]
    return run_all(tasks, folder, jobs=13)


def _site_folder(folder: Path, end: str, store: str, kind: str) -> Path:
    return folder / f"{end}-{store}-{kind}" / ("plain" if store == "memory" else ODD)


def _site(folder: Path, end: str, store: str, kind: str) -> Site:
    return Site(str(_site_folder(folder, end, store, kind)), store, kind)


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("end", "store", "kind"),
    [
        pytest.param(*case, marks=pytest.mark.further) if _is_further(*case) else case
        for case in CASES
        if case[1] != "memory"
    ],
)
def test_however_a_process_ends_every_row_taken_is_there_once_and_nothing_is_torn(
    folder: Path, ended: dict[str, Ended], end: str, store: str, kind: str
) -> None:
    child = ended[f"{end}-{store}-{kind}"]
    site = _site(folder, end, store, kind)
    expected = {
        "os_exit": 7,
        "sigterm": -signal.SIGTERM,
        "sys_exit_inside_with": 7,
        "sys_exit_with_an_open_writer": 7,
        "an_exception_inside_with": 1,
        "a_tee": 1,
    }
    if not end.startswith("sigint"):
        assert child.status == expected.get(end, 0), child.output
    assert child.seconds < 5
    if store == "slow" and end not in KILLED:
        assert child.seconds > 1, "the store was waited for"
    taken = site.taken()
    assert taken >= 3 * ROWS
    storage = Storage.open(site.root)
    before = list_shards(storage)
    assert before.rejected == []
    site.mend()
    report = site.recover()
    assert report.is_clean, report
    rows = site.rows()
    assert rows == list(range(len(rows))), "rows are lost, doubled or out of order"
    assert taken <= len(rows) <= taken + ROWS
    if end == "two_open_writers":
        assert site.rows(who=1) == list(range(ROWS))
    if store == "local" and end not in (*KILLED, "a_thread_that_waits_in_write", "sigint_twice"):
        assert report.rows == 0, "all was published before the process ended"
    assert find_logs(str(report.spool)) == []
    assert site.recover().logs == ()
    after = list_shards(storage)
    assert after.rejected == []
    assert sorted(after.sealed) == after.writers


@pytest.mark.parametrize(("end", "store", "kind"), [case for case in CASES if case[1] == "memory"])
def test_rows_in_memory_are_published_before_the_interpreter_ends(
    folder: Path, ended: dict[str, Ended], end: str, store: str, kind: str
) -> None:
    output = ended[f"{end}-{store}-{kind}"].output
    (line,) = [line for line in output.splitlines() if line.startswith("rows ")]
    assert line == "rows 60 of 60"


# ---- forks ----

FORKS = {
    "a_child_of_os_fork": """
pid = os.fork()
if pid == 0:
    for call in (lambda: site.write(writer), writer.flush, writer.close):
        try:
            call()
        except rlio.errors.PublishError as error:
            assert "fork" in str(error)
        else:
            os._exit(3)
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
site.write(writer, 3)
""",
    "a_child_that_leaves_the_with_block_by_an_exception": """
with writer:
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    site.write(writer, 3)
""",
    "a_child_that_outlives_its_parent": """
if os.fork() == 0:
    (site.folder / "child").write_text(str(os.getpid()))
    time.sleep(600)
    os._exit(0)
site.write(writer, 3)
os._exit(0)
""",
    "a_child_forked_while_another_thread_writes": """
def go_on():
    while writer.rows_received < 500:
        site.write(writer)
thread = threading.Thread(target=go_on)
thread.start()
for _ in range(5):
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
thread.join()
""",
    "workers_of_multiprocessing": """
import multiprocessing
from lifecycle_steps import work
def run(method, who):
    process = multiprocessing.get_context(method).Process(target=work, args=(str(site.folder), who))
    process.start()
    process.join()
    assert process.exitcode == 0
run("fork", 1)
run("spawn", 2)
site.write(writer, 3)
""",
}


@pytest.mark.parametrize("name", FORKS)
def test_a_forked_child_neither_writes_nor_holds_the_log_and_its_parent_goes_on(
    folder: Path, ended: dict[str, Ended], name: str
) -> None:
    assert ended[name].status == 0, ended[name].output
    site = Site(str(folder / name / ODD), "local", "parquet")
    report = site.recover()
    assert report.is_clean
    outlives = name == "a_child_that_outlives_its_parent"
    assert [log.outcome for log in report.logs] == (["recovered"] if outlives else [])
    if outlives:
        os.kill(int((site.folder / "child").read_text()), signal.SIGKILL)
    assert site.rows() == list(range(site.taken()))
    assert site.taken() >= 6 * ROWS
    if name == "workers_of_multiprocessing":
        assert site.rows(who=1) == site.rows(who=2) == list(range(ROWS))
    assert len(list_shards(Storage.open(site.root)).writers) == (3 if "workers" in name else 1)


# ---- a KeyboardInterrupt at any line ----


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "stride"),
    [("parquet", 29), ("json", 13), *(pytest.param(kind, 1, marks=pytest.mark.soak) for kind in KINDS)],
)
def test_an_interrupt_at_any_line_of_write_loses_and_doubles_no_row(
    tmp_path: Path, kind: str, stride: int
) -> None:
    """It ends the writer: what is logged and what is in memory may have parted."""
    interrupted, line, done = 0, 0, False
    while not done:
        site = Site(str(tmp_path / f"{line}"), "local", kind)
        writer = site.writer(roll=rlio.Roll(max_rows=15, max_seconds=None), sync="never")
        writer.write(batch(0))
        done = interrupted_at(line, lambda: writer.write(batch(ROWS))) is None  # noqa: B023
        if not done and writer._interrupted:
            interrupted += 1
            with pytest.raises(PublishError, match="interrupted"):
                writer.write(batch(2 * ROWS))
        elif not done and writer._publisher.received == ROWS:  # Else it was about to return.
            writer.write(batch(ROWS))
        writer.close()
        rows = site.rows()
        assert rows == list(range(len(rows)))
        # Of a batch that is logged in several frames a part may be there, as after a kill.
        assert ROWS <= len(rows) <= 2 * ROWS, f"interrupted at line {line}"
        assert len(rows) == 2 * ROWS or writer._interrupted
        assert find_logs(str(site.folder / "spool")) == []
        line += stride
    assert interrupted > 5
