"""Stores that are reached by options: their logs are found by all that name the same server, commands too."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crash_child import batch_of, fork, wait_for
from servers import Server
from typer.testing import CliRunner

import rlio
from rlio import ParquetWriter
from rlio.cli import main as cli
from rlio.cli.options import parse_storage_options
from rlio.errors import DataNotFound, OptionError, PublishError
from rlio.log.spool import LogFolder, Spool, spool_of
from rlio.storage.endpoint import endpoint_of, normal_endpoint
from rlio.storage.filesystem import Storage
from rlio.writers.recovery import recover

runner = CliRunner()
ROWS = 50


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No server named by this machine's environment; gives the file of AWS's configuration, not made."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws-config"))
    return tmp_path / "aws-config"


def _run(*arguments: str) -> Any:
    return runner.invoke(cli.app, list(arguments))


def _die(root: str, *, spool: Path, writer: str = "w", **options: Any) -> None:
    """Leave 50 acknowledged rows in the log of a writer that was killed."""

    def run() -> None:
        ParquetWriter(root, writer_id=writer, spool=spool, **options).write(batch_of(0, ROWS))
        os._exit(5)

    assert wait_for(fork(run)) == 5


def _endpoint(uri: str = "s3://bucket/run", **options: Any) -> list[str]:
    return endpoint_of(Storage.open(uri, storage_options=options))


# ---- which server ----


@pytest.mark.parametrize(
    ("one", "same"),
    [
        ("http://127.0.0.1:9000/", "http://127.0.0.1:9000"),
        ("HTTP://Minio.Example:80", "http://minio.example/"),
        ("https://minio.example:443/s3/", "https://minio.example/s3"),
        ("https://user:secret@minio.example", "https://minio.example"),
        ("http://[::1]:80", "http://[::1]"),
        ("https://s3.eu-west-1.amazonaws.com", ""),
    ],
)
def test_spellings_of_one_endpoint_are_equal(one: str, same: str) -> None:
    assert normal_endpoint(one) == normal_endpoint(same)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://a:9000", "http://a:9001"),
        ("http://a", "https://a"),
        ("http://a/x", "http://a/X"),
        ("https://s3.amazonaws.com.example", ""),
    ],
)
def test_endpoints_of_two_servers_are_not_equal(one: str, other: str) -> None:
    assert normal_endpoint(one) != normal_endpoint(other)


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_endpoint_of_the_environment_is_that_of_the_options(
    surroundings: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pytest.importorskip("s3fs")
    assert _endpoint() == []
    given = _endpoint(endpoint_url="http://127.0.0.1:9000/")
    assert given == _endpoint(client_kwargs={"endpoint_url": "http://127.0.0.1:9000"})
    assert given == _endpoint(endpoint_url=None, client_kwargs={"endpoint_url": "http://127.0.0.1:9000"})
    monkeypatch.setenv(name, "http://127.0.0.1:9000")
    assert _endpoint() == given
    assert _endpoint(endpoint_url="http://other") == ["endpoint_url=http://other"]


def test_an_endpoint_of_the_configuration_is_that_of_the_options(surroundings: Path) -> None:
    pytest.importorskip("s3fs")
    surroundings.write_text("[profile lab]\nendpoint_url = http://lab:9000/\n")
    assert _endpoint(profile="lab") == ["endpoint_url=http://lab:9000"]
    assert _endpoint(profile="not there") == _endpoint() == []


def test_an_azure_account_in_a_connection_string_is_told_from_another() -> None:
    pytest.importorskip("adlfs")

    def account(name: str) -> list[str]:
        text = f"DefaultEndpointsProtocol=https;AccountName={name};AccountKey=aGVsbG8="
        return _endpoint("az://container/run", connection_string=text)

    assert account("one") != account("two")
    assert account("one") == _endpoint("az://container/run", account_name="one", account_key="aGVsbG8=")
    assert not any("aGVsbG8" in part for part in account("one"))


# ---- a real server ----


def test_a_log_is_found_by_the_endpoint_however_it_is_given(
    serve: Callable[[str], Server], surroundings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 acknowledged rows of a killed writer: shown without its endpoint, and recovered with it."""
    server = serve("s3")
    root, spool = server.fresh_root(), tmp_path / "spool"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    options = {**server.options, "endpoint_url": server.options["endpoint_url"] + "/"}
    _die(root, spool=spool, storage_options=options)

    # The same store under another name: what the writer was given cannot be known.
    alias = json.dumps({**server.options, "endpoint_url": f"http://localhost:{server.port}"})
    arguments = [root, "--spool", str(spool), "--storage-options", alias]
    found = _run("recover", *arguments, "--json")
    (log,) = json.loads(found.stdout)["logs"]
    assert (found.exit_code, log["outcome"], log["rows"]) == (1, "elsewhere", 0)
    assert "other storage options" in log["error"]

    monkeypatch.setenv("AWS_ENDPOINT_URL", server.options["endpoint_url"])
    found = _run("recover", root, "--spool", str(spool))
    assert (found.exit_code, "50 rows recovered from 1 logs" in found.stdout) == (0, True), found.output
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    for command in (["verify"], ["compact"], ["trim", "--keep-rows", "10"], ["gc"], ["recover"]):
        found = _run(*command, root, "--storage-options", json.dumps(server.options))
        assert found.exit_code == 0, found.output
    assert json.loads(_run("verify", root, "--json", "--storage-options", alias).stdout)["ok"]


# ---- logs under other options ----


@pytest.fixture
def stray(tmp_path: Path, surroundings: Path) -> tuple[Path, Path]:
    """A data set of a killed writer, and a spool in which its log lies as one of other options would."""
    root, spool = tmp_path / "root", tmp_path / "spool"
    with ParquetWriter(root, writer_id="first", spool=spool) as writer:
        writer.write(batch_of(0, 5))
    _die(str(root), spool=spool)
    own = spool_of(Storage.open(root), Spool(folder=spool))
    os.rename(str(own), spool / "0123456789abcdef")
    return root, spool


def test_a_log_under_other_options_is_shown_and_left(stray: tuple[Path, Path], caplog: Any) -> None:
    root, spool = stray
    report = recover(root, spool=spool)
    assert [(log.outcome, log.rows) for log in report.logs] == [("elsewhere", 0)]
    assert not report.is_clean
    assert (spool / "0123456789abcdef" / "w" / "owner").exists()
    caplog.clear()
    with ParquetWriter(root, spool=spool):
        assert "other storage options" in caplog.text
    assert len(rlio.open_dataset(root)) == 5


def test_verify_tells_of_rows_under_other_options(stray: tuple[Path, Path]) -> None:
    root, spool = stray
    report = rlio.verify(root, spool=spool)
    (finding,) = (finding for finding in report.findings if finding.code == "log-elsewhere")
    assert (finding.severity, finding.rows) == ("warning", ROWS)
    assert report.ok
    assert _run("verify", str(root), "--spool", str(spool), "--strict").exit_code == 1


def test_logs_of_other_roots_and_of_living_writers_are_not_shown(tmp_path: Path) -> None:
    root, spool = tmp_path / "root", tmp_path / "spool"
    _die(str(tmp_path / "another"), spool=spool)
    writer = ParquetWriter(root, writer_id="w", spool=spool)
    writer.write(batch_of(0, 3))
    own = spool_of(Storage.open(root), Spool(folder=spool))
    os.rename(str(own), spool / "0123456789abcdef")
    assert recover(root, spool=spool).logs == ()
    os.rename(spool / "0123456789abcdef", str(own))
    writer.close()


# ---- what is left, and why ----


def _as_other_host(root: Path) -> None:
    owner = root / "_wal" / "w" / "owner"
    owner.write_text(json.dumps({**json.loads(owner.read_text()), "host": "elsewhere"}))


def test_a_log_of_another_host_makes_recover_exit_with_1_until_it_is_told(tmp_path: Path) -> None:
    ParquetWriter(tmp_path).close()

    def run() -> None:
        ParquetWriter(tmp_path, writer_id="w").write(batch_of(0, ROWS))
        os._exit(5)

    assert wait_for(fork(run)) == 5
    _as_other_host(tmp_path)
    found = _run("recover", str(tmp_path))
    assert (found.exit_code, "another host" in found.stdout) == (1, True), found.output
    with pytest.raises(PublishError, match=r"already exists: it is another host's.*--all-hosts"):
        LogFolder.create(str(tmp_path / "_wal" / "w"), root=str(tmp_path), writer="w")
    found = _run("recover", str(tmp_path), "--all-hosts")
    assert (found.exit_code, "50 rows recovered from 1 logs" in found.stdout) == (0, True), found.output


def test_a_log_that_lost_its_owner_is_not_taken_for_a_living_writers(tmp_path: Path) -> None:
    with ParquetWriter(tmp_path, writer_id="w") as writer:
        writer.write(batch_of(0, 3))
        (tmp_path / "copy" / "_wal" / "w").mkdir(parents=True)
        (tmp_path / "copy" / "_wal" / "w" / "000000000000.wal").write_bytes(b"")
    (log,) = recover(tmp_path / "copy").logs
    assert (log.outcome, "no owner file" in str(log.error)) == ("failed", True)


def test_a_mistyped_root_is_said_and_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for root in (tmp_path / "typo", tmp_path / "runs"):
        found = _run("recover", str(root))
        assert (found.exit_code, "no data set" in found.stderr) == (2, True), found.output
        with pytest.raises(DataNotFound):
            recover(root, must_exist=True)
        assert recover(root).logs == ()
    with ParquetWriter(tmp_path / "runs"):
        assert _run("recover", str(tmp_path / "runs")).exit_code == 0


# ---- the option ----


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"secret": "hunter2"', "line 1"),
        ('["hunter2"]', "an array"),
        ('"hunter2"', "a string"),
        ("@/nowhere/hunter3", "cannot be read"),
        ("hunter2", "expected a JSON object"),
        ("[" * 100_000 + "hunter2", "not JSON"),
    ],
)
def test_options_that_are_no_json_object_are_refused_and_never_repeated(text: str, said: str) -> None:
    with pytest.raises(OptionError, match=said) as error:
        parse_storage_options(text)
    assert "hunter2" not in str(error.value)
    assert error.value.__context__ is None or error.value.__suppress_context__
    found = _run("verify", "memory://nothing", "--storage-options", text)
    assert (found.exit_code, "hunter2" in found.output) == (2, False)


def test_an_option_that_s3fs_does_not_know_is_named() -> None:
    pytest.importorskip("s3fs")
    found = _run("verify", "s3://bucket/run", "--storage-options", '{"endpoint": "http://127.0.0.1:9000"}')
    assert (found.exit_code, type(found.exception)) == (2, SystemExit)
    assert "refused storage_options ['endpoint']" in found.output
    assert "endpoint_url" in found.output
    with pytest.raises(OptionError, match="'endpoint'"):
        rlio.read("s3://bucket/log.csv", storage_options={"endpoint": "http://127.0.0.1:9000"})


def test_options_are_read_from_a_file_that_other_users_cannot_see(tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    file.write_text('{"key": "k", "client_kwargs": {"region_name": "x"}}')
    assert parse_storage_options(f"@{file}") == {"key": "k", "client_kwargs": {"region_name": "x"}}
    assert parse_storage_options(None) is None


@pytest.mark.parametrize(
    "command",
    [["recover"], ["verify"], ["compact"], ["trim", "--keep-rows", "1"], ["gc"]],
    ids=lambda x: x[0],
)
def test_every_command_with_a_uri_hands_the_options_to_the_store(command: list[str], tmp_path: Path) -> None:
    """A local path takes none, and says which it was given; never what they are."""
    found = _run(*command, str(tmp_path), "--storage-options", '{"nonsense": "hunter2"}')
    said = found.output + str(found.exception)
    assert found.exit_code != 0
    assert ("nonsense" in said, "hunter2" in said) == (True, False)
