"""Answers that get lost between a store and its client: no row is lost, none is doubled, errors are clean."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_proxy import Proxy, Spoil, proxy
from further import further, on_servers
from servers import Server
from stored_batches import numbered

from rlio import DatasetReader, ParquetWriter, concat_samples
from rlio.errors import PublishError, RlioError
from rlio.log.spool import Spool
from rlio.storage.filesystem import Retry, Storage
from rlio.writers.recovery import recover

STORES = [
    pytest.param("s3", marks=pytest.mark.xdist_group("s3")),
    pytest.param("azure", marks=pytest.mark.xdist_group("azure")),
]

#: Azure's client is tried with the answers that are lost, too; the rest of it is in `make test-all`.
S3_FIRST = pytest.mark.parametrize("server", on_servers("s3", "azure"), indirect=True)


@pytest.fixture(autouse=True)
def _clients_wait_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Azure's client waits 15 s before it tries again; what it does then is what is tested."""
    policies = pytest.importorskip("azure.storage.blob._shared.policies_async")
    monkeypatch.setattr(policies.ExponentialRetry, "get_backoff_time", lambda self, settings: 0.05)


@pytest.fixture(params=STORES)
def server(request: pytest.FixtureRequest, serve: Callable[[str], Server]) -> Server:
    return serve(request.param)


@pytest.fixture
def between(server: Server) -> Iterator[Proxy]:
    with proxy(server.port) as found:
        yield found


def read(server: Server, root: str) -> list[int]:
    """Row numbers of an epoch, read from the server itself."""
    with DatasetReader(root, epochs=1, storage_options=server.options) as reader:
        rows: list[int] = concat_samples(list(reader))["t"].tolist()  # type: ignore[index,assignment,union-attr]
    return rows


def write_through(
    between: Proxy, server: Server, spoil: Spoil, at: range, *, spool: Spool | None = None
) -> int:
    """Write while exchanges are spoiled; gives how often flush() was refused."""
    root, options = server.fresh_root(), dict(server.options_at(between.port))
    refused = 0
    between.disarm()
    with ParquetWriter(root, spool=spool, storage_options=options) as writer:
        between.arm(spoil, at)
        for first in range(0, 20, 10):
            writer.write(numbered(10, first))
            try:
                writer.flush()
            except PublishError:
                refused += 1
                between.disarm()
                writer.flush()
        assert between.spoiled > 0, "what is tested"
        between.disarm()
    assert read(server, root) == list(range(20))
    return refused


@pytest.mark.few(1)
@pytest.mark.parametrize("spoil", ["drop", *further("cut", "reset")])
@pytest.mark.parametrize("k", [1, *further(2, 3, 4)])
def test_a_lost_answer_to_a_writer_loses_and_doubles_nothing(
    server: Server, between: Proxy, spoil: Spoil, k: int
) -> None:
    assert write_through(between, server, spoil, range(k, k + 1)) == 0, "one loss is repaired by trying again"


@pytest.mark.few(1)
@pytest.mark.parametrize("spoil", ["drop", "cut", "reset"])
@pytest.mark.parametrize("k", [1, *further(2)])
@pytest.mark.each_value_once
def test_a_lost_answer_to_a_writer_with_a_log_loses_and_doubles_nothing(
    server: Server, between: Proxy, spoil: Spoil, k: int, tmp_path: Path
) -> None:
    assert write_through(between, server, spoil, range(k, k + 1), spool=Spool(folder=tmp_path)) == 0
    assert logged(tmp_path) == [], "a log goes once its rows are stored"


@pytest.mark.further
@S3_FIRST
def test_rows_whose_answers_were_all_lost_are_in_the_log_of_a_dead_writer_and_recovered_once(
    server: Server, between: Proxy, tmp_path: Path
) -> None:
    """The store has a shard of which the writer never learned; recovery makes the same one again."""
    root, options = server.fresh_root(), dict(server.options_at(between.port))
    program = _WRITING.format(
        tests=str(Path(__file__).parent), root=root, spool=str(tmp_path), options=options
    )
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            between.arm("drop", range(1, 10_000))
            process.stdin.write("write\n")
            process.stdin.flush()
            assert process.stdout.readline() == "written\n"
            until = time.monotonic() + 60
            while not between.spoiled:
                assert time.monotonic() < until
                time.sleep(0.01)
        finally:
            process.kill()
    between.disarm()
    assert logged(tmp_path) != [], "what is tested"
    report = recover(root, spool=Spool(folder=tmp_path), storage_options=options)
    assert report.is_clean, report
    assert (len(report.logs), logged(tmp_path)) == (1, [])
    assert read(server, root) == list(range(25))


_WRITING = """
import faulthandler, sys
faulthandler.dump_traceback_later(240, exit=True)  # Says where it hangs, if it does.
sys.path.insert(0, {tests!r})
from rlio import ParquetWriter, Roll
from rlio.log.spool import Spool
from stored_batches import numbered
roll = Roll(max_rows=10, max_seconds=None)
writer = ParquetWriter({root!r}, spool=Spool(folder={spool!r}), roll=roll, storage_options={options!r})
writer.write(numbered(5))
print("open", flush=True)
sys.stdin.readline()
for first in range(5, 25, 5):
    writer.write(numbered(5, first))
print("written", flush=True)
sys.stdin.readline()
"""


def logged(folder: Path) -> list[str]:
    """Segments and shards that wait in a spool."""
    return sorted(path.name for path in folder.rglob("*") if path.suffix in (".wal", ".parquet"))


@pytest.mark.soak
@pytest.mark.parametrize("spoil", ["drop", "cut", "reset"])
@pytest.mark.parametrize("lost", range(1, 9))
@pytest.mark.parametrize("k", range(1, 10))
@pytest.mark.timeout(3600)
def test_any_run_of_lost_answers_to_a_writer_loses_and_doubles_nothing(
    server: Server, between: Proxy, spoil: Spoil, k: int, lost: int
) -> None:
    write_through(between, server, spoil, range(k, k + lost))


@pytest.mark.further
@pytest.mark.parametrize("spoil", ["drop", *further("cut", "reset")])
@S3_FIRST
def test_lost_answers_to_a_reader_change_nothing_that_it_serves(
    server: Server, between: Proxy, spoil: Spoil
) -> None:
    root = server.fresh_root()
    with ParquetWriter(root, spool=None, storage_options=server.options) as writer:
        writer.write(numbered(30))
    options = dict(server.options_at(between.port))
    DatasetReader(root, storage_options=options).close()
    for k in range(1, 8):
        between.arm(spoil, range(k, k + 1))
        with DatasetReader(root, epochs=1, batch_size=8, storage_options=options) as reader:
            rows: Any = concat_samples(list(reader))
        assert rows["t"].tolist() == list(range(30)), k
        if not between.spoiled:
            break
    assert k > 2, "what is tested"


@S3_FIRST
@pytest.mark.further
def test_a_store_whose_answers_never_come_is_an_error_in_time(server: Server) -> None:
    with proxy(server.port, seconds=30) as between:
        options, root = dict(server.options_at(between.port)), server.fresh_root()
        # A busy machine may take longer for an answer that comes.
        patient = Storage.open(root, storage_options=options)
        patient.put("a.bin", b"content")
        storage = Storage.open(
            root, storage_options=options, timeout=0.25, retry=Retry(attempts=2, first_delay=0)
        )
        between.arm("stall", range(1, 100))
        begun = time.monotonic()
        with pytest.raises(PublishError, match=r"TimeoutError: no answer within 0\.25 seconds"):
            storage.put("b.bin", b"content")
        for look in (lambda: storage.read("a.bin", limit=10), lambda: storage.exists("a.bin"), storage.list):
            with pytest.raises(TimeoutError, match="no answer within"):
                look()
        assert time.monotonic() - begun < 25, "not as long as the store hangs"
        between.disarm()
        patient.put("b.bin", b"content")
        assert patient.read("b.bin") == b"content"


@S3_FIRST
@pytest.mark.further
def test_a_store_that_hangs_once_is_asked_again(server: Server) -> None:
    with proxy(server.port, seconds=30) as between:
        options = dict(server.options_at(between.port))
        storage = Storage.open(
            server.fresh_root(), storage_options=options, timeout=1, retry=Retry(first_delay=0)
        )
        storage.put("a.bin", b"content")
        between.arm("stall", range(1, 2))
        storage.put("b.bin", b"content")
        between.arm("stall", range(1, 2))
        assert storage.read_range("b.bin", 0, 7) == b"content"
        assert between.spoiled == 1


@S3_FIRST
@pytest.mark.further
def test_a_writer_on_a_store_that_answers_nothing_any_more_says_so_and_keeps_its_rows(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # S3's client, and the client in that client, try again five times each in each of our five attempts.
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    with proxy(server.port) as between:
        root, options = server.fresh_root(), dict(server.options_at(between.port))
        if server.name.startswith("S3"):
            options["config_kwargs"] = {"retries": {"max_attempts": 0}}
        writer = ParquetWriter(root, spool=None, storage_options=options)
        writer.write(numbered(10))
        between.arm("drop", range(1, 10_000))
        with pytest.raises(RlioError, match="stored"):
            writer.flush()
        between.disarm()
        writer.close()
        assert read(server, root) == list(range(10))
