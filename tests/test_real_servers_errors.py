"""What servers answer when they are busy, refuse, or are something else: tried again, or said at once."""

from __future__ import annotations

import ftplib
import http.server
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from further import further
from servers import AZURE_ACCOUNT, AZURE_KEY, Server

from rlio.errors import DataNotFound, PublishError
from rlio.storage.failures import behind_not_found, is_permanent
from rlio.storage.filesystem import Retry, Storage

CODES = {
    400: "InvalidArgument",
    401: "AuthenticationFailed",
    403: "AccessDenied",
    404: "NoSuchKey",
    409: "OperationAborted",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
}
AGAIN, AT_ONCE = {409, 429, 500, 503}, {400, 401, 403}


class Grumpy:
    """A server that answers every request with one status; it counts them."""

    def __init__(self) -> None:
        self.status = 503
        self.count = 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def answer(self) -> None:
                outer.count += 1
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                code = CODES[outer.status]
                body = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
                body = b"" if self.command == "HEAD" else body
                self.send_response(outer.status)
                self.send_header("Content-Type", "application/xml")
                self.send_header("x-ms-error-code", code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer  # noqa: N815

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def grumpy() -> Iterator[Grumpy]:
    found = Grumpy()
    yield found
    found.server.shutdown()
    found.server.server_close()


def on(grumpy: Grumpy, kind: str) -> Storage:
    """A storage on the server, whose client tries nothing again by itself."""
    retry = Retry(attempts=3, first_delay=0)
    if kind == "http":
        return Storage.open(f"http://127.0.0.1:{grumpy.port}/run", retry=retry)
    if kind == "s3":
        pytest.importorskip("s3fs")
        options: dict[str, Any] = {
            "key": "key",
            "secret": "secret",
            "endpoint_url": f"http://127.0.0.1:{grumpy.port}",
            "config_kwargs": {"retries": {"max_attempts": 0}},
        }
        return Storage.open("s3://bucket/run", storage_options=options, retry=retry)
    pytest.importorskip("adlfs")
    text = (
        f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY};"
        f"BlobEndpoint=http://127.0.0.1:{grumpy.port}/{AZURE_ACCOUNT};"
    )
    return Storage.open("az://container/run", storage_options={"connection_string": text}, retry=retry)


@pytest.fixture(autouse=True)
def _clients_wait_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    policies = pytest.importorskip("azure.storage.blob._shared.policies_async")
    monkeypatch.setattr(policies.ExponentialRetry, "get_backoff_time", lambda self, settings: 0.01)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)


@pytest.mark.parametrize("kind", ["s3", "azure", "http"])
@pytest.mark.parametrize(
    "status", [400, 403, 500, 503, *further(*sorted((AGAIN | AT_ONCE) - {400, 403, 500, 503}))]
)
@pytest.mark.each_value_once
def test_what_may_pass_is_tried_again_and_what_will_not_is_said_at_once(
    grumpy: Grumpy, kind: str, status: int
) -> None:
    grumpy.status = status
    storage = on(grumpy, kind)
    attempts = 3 if status in AGAIN else 1
    looks: list[Callable[[], object]] = [lambda: storage.read("a.bin", limit=9), storage.exists, storage.list]
    for look in looks:
        with pytest.raises(OSError) as caught:  # noqa: PT011 - what it says is below
            look()
        assert not isinstance(caught.value, FileNotFoundError)
        if kind != "s3" or status != 401:  # S3 itself answers 403 alone, and its client knows no other
            assert isinstance(caught.value, PermissionError) is (status in (401, 403))
        assert f"after {attempts} attempts" in "\n".join(
            [str(caught.value), *getattr(caught.value, "__notes__", ())]
        )
    if kind != "http":
        with pytest.raises(PublishError, match=f"in {attempts} attempts"):
            storage.put("a.bin", b"content")


@pytest.mark.parametrize("kind", ["s3", "azure", "http"])
def test_what_is_not_there_is_asked_for_once(grumpy: Grumpy, kind: str) -> None:
    grumpy.status = 404
    storage = on(grumpy, kind)
    with pytest.raises(DataNotFound):
        storage.read("a.bin", limit=9)
    assert grumpy.count <= 2
    assert not storage.exists("a.bin")
    assert storage.list() == []


@pytest.mark.xdist_group("sftp")
def test_a_wrong_password_is_said_at_once(serve: Callable[[str], Server]) -> None:
    for name in ("sftp", "ftp"):
        server = serve(name)
        options = server.options | {"password": "wrong"}
        with pytest.raises(PermissionError, match=r"(?i)after 1 attempts.*authentication") as caught:
            Storage.open(server.fresh_root(), storage_options=options)
        assert "wrong" not in str(caught.value)


@pytest.mark.parametrize("name", ["sftp", "ftp"])
def test_a_connection_that_broke_is_made_again(serve: Callable[[str], Server], name: str) -> None:
    server = serve(name)
    storage = Storage.open(server.fresh_root(), storage_options=server.options, retry=Retry(first_delay=0))
    storage.put("a.bin", b"content")
    for client in storage._backend._clients._idle:  # type: ignore[union-attr]
        end = client.client.get_transport().sock if name == "sftp" else client.ftp.sock
        end.close()
    assert storage.read("a.bin") == b"content"
    storage.put("b.bin", b"content")
    assert [entry.path for entry in storage.list()] == ["a.bin", "b.bin"]


@pytest.mark.further
@pytest.mark.parametrize("name", ["sftp", *further("ftp", "s3")])
def test_threads_that_use_one_storage_get_each_what_they_asked_for(
    serve: Callable[[str], Server], name: str
) -> None:
    server = serve(name)
    storage = Storage.open(server.fresh_root(), storage_options=server.options)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        data = bytes([number]) * (1000 * number)
        try:
            for _ in range(5):
                storage.put(f"data/{number}.bin", data)
                assert storage.read(f"data/{number}.bin") == data
                assert storage.read_range(f"data/{number}.bin", 10, 90) == data[10:90]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [entry.size for entry in storage.list()] == [1000 * i for i in range(1, 9)]


def test_a_server_that_says_nothing_is_an_error_in_time() -> None:
    import socket
    import time

    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        begun = time.monotonic()
        for uri in (f"sftp://127.0.0.1:{port}/run", f"ftp://127.0.0.1:{port}/run"):
            with pytest.raises(TimeoutError, match="no answer within"):
                Storage.open(uri, timeout=0.3, retry=Retry(attempts=2, first_delay=0))
        web = Storage.open(
            f"http://127.0.0.1:{port}/run", timeout=0.3, retry=Retry(attempts=2, first_delay=0)
        )
        with pytest.raises(TimeoutError, match="no answer within"):
            web.exists()
        assert time.monotonic() - begun < 20


@pytest.mark.parametrize(
    ("reply", "missing"),
    [
        ("550 No such file or directory.", True),
        ("501 No such directory.", True),
        ("550 Permission denied.", False),
        ("530 Log in first.", False),
    ],
)
def test_what_ftp_calls_missing_is_missing_only_if_the_server_said_so(reply: str, missing: bool) -> None:
    error = FileNotFoundError("a.bin")
    error.__cause__ = ftplib.error_perm(reply)
    assert (behind_not_found(error) is None) is missing
    error.__cause__ = ftplib.error_temp("426 Connection closed; transfer aborted.")
    found = behind_not_found(error)
    assert found is error.__cause__
    assert not is_permanent(found)
