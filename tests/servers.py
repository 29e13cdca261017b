"""Real servers for the tests: started here, on 127.0.0.1 and a free port, and stopped by their process id.

Each function gives a context manager whose value is a `Server`: where it listens, and how a fresh root on it
is named. A server that cannot be started raises `Unavailable` with the reason. Used through the fixtures of
`tests/conftest.py`, which start each server once a test process and count what ran.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: The emulator's only account; its key is public (docs of Azurite).
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
USER, PASSWORD = "tester", "secret"


class Unavailable(Exception):
    """The server cannot be started here; the message says why."""


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Attributes:
        name: What the summary calls it.
        port: Where it listens, on 127.0.0.1.
        base: URI under which roots are made, without a trailing slash.
        options: fsspec's options for it, as a function of the port: a proxy listens elsewhere.
        folder: The local folder that it serves, if it serves one.
    """

    name: str
    port: int
    base: str
    options_at: Callable[[int], Mapping[str, Any]]
    folder: Path | None = None
    made: list[str] = field(default_factory=list)

    @property
    def options(self) -> dict[str, Any]:
        """What `storage_options` takes."""
        return dict(self.options_at(self.port))

    def fresh_root(self) -> str:
        """A root that nobody else has."""
        return f"{self.base}/{uuid.uuid4().hex}/run"


def free_port() -> int:
    """A port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def process(command: list[str], port: int, *, seconds: float = 120, **options: Any) -> Iterator[None]:
    """Run ``command`` until the block ends; wait first until it listens on ``port``."""
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **options)
        try:
            _wait(server, port, seconds, log)
            yield
        finally:
            server.terminate()
            try:
                server.wait(5)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait(server: subprocess.Popen[bytes], port: int, seconds: float, log: Any) -> None:
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if server.poll() is not None or time.monotonic() > end:
            log.seek(0)
            said = log.read()[-500:].decode(errors="replace").strip()
            raise Unavailable(f"{server.args[0]!r} does not listen: {said}")  # type: ignore[index]
        time.sleep(0.02)


def python(*arguments: str) -> list[str]:
    """The command of this Python."""
    return [sys.executable, *arguments]


def _need(*modules: str) -> None:
    import importlib

    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise Unavailable(f"{module} is not installed") from error


@contextmanager
def s3() -> Iterator[Server]:
    """moto's server of S3, reached by s3fs."""
    _need("s3fs", "moto")
    # boto reads these; the region must not be in the client's options, or moto refuses to make a bucket.
    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
    port = free_port()
    command = python("-m", "moto.server", "-H", "127.0.0.1", "-p", str(port))

    def options(at: int) -> dict[str, Any]:
        return {"key": "key", "secret": "secret", "endpoint_url": f"http://127.0.0.1:{at}"}

    with process(command, port):
        import fsspec

        fsspec.filesystem("s3", **options(port)).mkdir("bucket")
        yield Server("S3 (moto)", port, "s3://bucket", options)


@contextmanager
def azure() -> Iterator[Server]:
    """Azurite, reached by adlfs."""
    _need("adlfs")
    script = Path(os.environ.get("RLIO_AZURITE", ROOT / ".node" / "node_modules" / "azurite"))
    script = script / "dist" / "src" / "blob" / "main.js"
    node = shutil.which("node")
    if node is None:
        raise Unavailable("no node")
    if not script.is_file():
        raise Unavailable("Azurite is not installed: make .node/azurite-3.35.0, or set RLIO_AZURITE")
    port = free_port()

    def options(at: int) -> dict[str, Any]:
        text = (
            f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY};"
            f"BlobEndpoint=http://127.0.0.1:{at}/{AZURE_ACCOUNT};"
        )
        return {"connection_string": text}

    with tempfile.TemporaryDirectory(prefix="rlio-azurite-") as folder:
        arguments = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", folder, "--silent"]
        with process([node, str(script), *arguments, "--skipApiVersionCheck", "--disableTelemetry"], port):
            import fsspec

            fsspec.filesystem("az", **options(port)).mkdir("container")
            yield Server("Azure (Azurite)", port, "az://container", options)


_SFTP = """
import asyncio, asyncssh, sys
port, root, user, password = int(sys.argv[1]), *sys.argv[2:]
class Auth(asyncssh.SSHServer):
    def begin_auth(self, username): return True
    def password_auth_supported(self): return True
    def validate_password(self, username, given): return (username, given) == (user, password)
async def main():
    key = asyncssh.generate_private_key("ssh-ed25519")
    await asyncssh.listen("127.0.0.1", port, server_factory=Auth, server_host_keys=[key], allow_scp=False,
                          sftp_factory=lambda chan: asyncssh.SFTPServer(chan, chroot=root))
    await asyncio.Event().wait()
asyncio.run(main())
"""


@contextmanager
def sftp() -> Iterator[Server]:
    """An SFTP server (asyncssh's), reached by paramiko."""
    _need("paramiko", "asyncssh")
    port = free_port()

    def options(at: int) -> dict[str, Any]:
        return {
            "port": at,
            "username": USER,
            "password": PASSWORD,
            "look_for_keys": False,
            "allow_agent": False,
        }

    with tempfile.TemporaryDirectory(prefix="rlio-sftp-") as folder, contextlib.ExitStack() as stack:
        stack.enter_context(process(python("-c", _SFTP, str(port), folder, USER, PASSWORD), port))
        yield Server("SFTP (asyncssh)", port, "sftp://127.0.0.1", options, Path(folder))


@contextmanager
def ftp() -> Iterator[Server]:
    """An FTP server (pyftpdlib's), reached by the standard library's client."""
    _need("pyftpdlib")
    port = free_port()

    def options(at: int) -> dict[str, Any]:
        return {"port": at, "username": USER, "password": PASSWORD}

    with tempfile.TemporaryDirectory(prefix="rlio-ftp-") as folder:
        arguments = ["-i", "127.0.0.1", "-p", str(port), "-w", "-d", folder, "-u", USER, "-P", PASSWORD]
        with process(python("-m", "pyftpdlib", *arguments), port):
            yield Server("FTP (pyftpdlib)", port, "ftp://127.0.0.1", options, Path(folder))


_HTTP = """
import http.server, os, re, sys
port, root, ranges = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "ranges"
class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every answer waits 40 ms for an acknowledgement
    def log_message(self, *args): pass
    def do_GET(self):
        wanted = re.fullmatch(r"bytes=(\\d+)-(\\d*)", self.headers.get("Range", ""))
        path = self.translate_path(self.path)
        if not ranges or not wanted or not os.path.isfile(path):
            return super().do_GET()
        with open(path, "rb") as file:
            data = file.read()
        start, stop = int(wanted[1]), min(int(wanted[2] or len(data)) + 1, len(data))
        if start >= len(data):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(data)}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.send_response(206)
        self.send_header("Content-Type", self.guess_type(path))
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        self.wfile.write(data[start:stop])
os.chdir(root)
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@contextmanager
def http(*, ranges: bool = True) -> Iterator[Server]:
    """A web server (the standard library's) that lists folders, reached by aiohttp.

    Without ``ranges`` it is as the standard library made it: it answers a range with the whole file.
    """
    _need("aiohttp")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="rlio-http-") as folder, contextlib.ExitStack() as stack:
        command = python("-c", _HTTP, str(port), folder, "ranges" if ranges else "whole")
        stack.enter_context(process(command, port))
        name = "HTTP (http.server)" if ranges else "HTTP without ranges"
        yield Server(name, port, f"http://127.0.0.1:{port}", lambda at: {}, Path(folder))


#: Name of the fixture -> what starts the server.
SERVERS: dict[str, Callable[[], contextlib.AbstractContextManager[Server]]] = {
    "s3": s3,
    "azure": azure,
    "sftp": sftp,
    "ftp": ftp,
    "http": http,
    "http_whole": lambda: http(ranges=False),
}
