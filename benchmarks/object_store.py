"""An S3 server of this machine, filled without a request for each object: for what a listing costs."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rlio.storage.filesystem import Storage

__all__ = ["Traffic", "Unavailable", "count_requests", "delayed", "server"]

_BUCKET = "scaling"

# Fills moto's store before it listens: a PUT for each of 10^5 objects would take minutes.
_SERVER = """
import json, logging, sys
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
from moto.s3.models import s3_backends
logging.getLogger("werkzeug").setLevel(logging.ERROR)
port, file = int(sys.argv[1]), sys.argv[2]
backend = s3_backends["123456789012"]["aws"]
backend.create_bucket(sys.argv[3], "us-east-1")
for line in open(file, encoding="utf-8"):
    path, text = json.loads(line)
    backend.put_object(sys.argv[3], path, text.encode())
server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
server.start()
print("listening", flush=True)
sys.stdin.read()
"""


# Passes bytes on to a server, each from a client late by as much as a way there and back takes. Every line on
# stdin is answered with the numbers of requests, and of bytes answered, since the last.
_PROXY = """
import asyncio, sys
port, delay = int(sys.argv[1]), float(sys.argv[2])
requests = answered = 0
async def serve(reader, writer):
    far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
    late, loop = asyncio.Queue(), asyncio.get_running_loop()
    async def take():
        global requests
        while data := await reader.read(1 << 16):
            requests += data.split(b" ", 1)[0] in (b"GET", b"HEAD", b"PUT", b"POST", b"DELETE")
            late.put_nowait((loop.time() + delay, data))
        late.put_nowait((loop.time() + delay, b""))
    async def send():
        while True:
            when, data = await late.get()
            await asyncio.sleep(when - loop.time())
            if not data:
                return far_writer.close()
            far_writer.write(data)
    async def answer():
        global answered
        while data := await far_reader.read(1 << 18):
            answered += len(data)
            writer.write(data)
            await writer.drain()
        writer.close()
    await asyncio.gather(take(), send(), answer(), return_exceptions=True)
async def main():
    global requests, answered
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(requests, answered, flush=True)
        requests = answered = 0
asyncio.run(main())
"""


class Unavailable(Exception):
    """The server cannot run here; the message says why."""


@contextmanager
def server(objects: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A data set's root on a server that runs until the block ends, and fsspec's options for it.

    Args:
        objects: Path below the root, and bytes, of what it holds at first.

    Raises:
        Unavailable: moto or s3fs is not installed.
    """
    for module in ("moto", "s3fs"):
        if importlib.util.find_spec(module) is None:
            raise Unavailable(f"{module} is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "objects.jsonl"
        with open(file, "w", encoding="utf-8") as lines:
            for path, data in objects:
                lines.write(json.dumps([f"run/{path}", data.decode()]) + "\n")
        command = [sys.executable, "-c", _SERVER, str(port), str(file), _BUCKET]
        running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert running.stdout is not None
            while (line := running.stdout.readline()) and "listening" not in line:
                time.sleep(0.01)
            if not line:
                raise Unavailable(f"moto ended with {running.wait()}")
            options = {
                "key": "test",
                "secret": "test",
                "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}", "region_name": "us-east-1"},
            }
            yield f"s3://{_BUCKET}/run", options
        finally:
            running.terminate()
            with running:  # Closes its pipes, and waits.
                pass


def count_requests(storage: Storage) -> Callable[[], int]:
    """Count the requests that a store's client makes from now on; what is given says how many so far."""
    from fsspec.asyn import sync

    fs = storage.fs
    client = sync(fs.loop, fs.set_session)
    seen: list[str] = []
    client.meta.events.register("before-send.s3", lambda **event: seen.append(event["event_name"]))
    return lambda: len(seen)


class Traffic(NamedTuple):
    """What passed through a proxy: requests, and bytes of their answers."""

    requests: int
    bytes: int


@contextmanager
def delayed(
    options: dict[str, Any], seconds: float
) -> Iterator[tuple[dict[str, Any], Callable[[], Traffic]]]:
    """The options of `server` with each request late by some seconds, and what counts traffic since last."""
    port = options["client_kwargs"]["endpoint_url"].rpartition(":")[2]
    command = [sys.executable, "-c", _PROXY, port, str(seconds)]
    running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdin is not None
        assert running.stdout is not None
        own = f"http://127.0.0.1:{int(running.stdout.readline())}"

        def traffic() -> Traffic:
            assert running.stdin is not None
            assert running.stdout is not None
            running.stdin.write("\n")
            running.stdin.flush()
            return Traffic(*map(int, running.stdout.readline().split()))

        yield {**options, "client_kwargs": {**options["client_kwargs"], "endpoint_url": own}}, traffic
    finally:
        running.terminate()
        with running:  # Closes its pipes, and waits.
            pass
