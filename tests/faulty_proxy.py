"""A TCP proxy that spoils one exchange: the server has done what was asked, and its client never hears so."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

#: What happens to the k-th exchange: its answer is dropped, or cut in the middle; its request is cut in the
#: middle, and the connection reset; its answer comes late.
Spoil: TypeAlias = Literal["drop", "cut", "reset", "stall"]


class Proxy:
    """Passes bytes between clients and a server on 127.0.0.1.

    Args:
        target: Port of the server.
        seconds: How late a stalled answer comes.
    """

    def __init__(self, target: int, *, seconds: float = 3.0) -> None:
        self.target = target
        self.seconds = seconds
        self.spoil: Spoil | None = None
        self.at = range(0)
        #: Exchanges so far, and those that were spoiled.
        self.count = 0
        self.spoiled = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, spoil: Spoil, at: range) -> None:
        """From now on, spoil the exchanges of these numbers, counted from 1."""
        with self._lock:
            self.spoil, self.at, self.count, self.spoiled = spoil, at, 0, 0

    def disarm(self) -> None:
        """Spoil nothing any more."""
        with self._lock:
            self.spoil = None

    def close(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):  # Ends the wait for one; a close alone would leave it.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _next(self) -> Spoil | None:
        with self._lock:
            self.count += 1
            hit = self.spoil if self.count in self.at else None
            self.spoiled += hit is not None
            return hit

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self.target)) as server:
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError):
                self._exchange(client, server)

    def _exchange(self, client: socket.socket, server: socket.socket) -> None:
        """Relay, HTTP/1.1 without pipelining: a request begins when the client speaks after an answer."""
        spoil: Spoil | None = None
        late = threading.Event()
        state = {"turn": "server"}

        def upstream() -> None:
            nonlocal spoil
            with contextlib.suppress(OSError):
                while data := client.recv(65536):
                    if state["turn"] == "server":
                        spoil, state["turn"] = self._next(), "client"
                    if spoil == "reset" and len(data) > 1:
                        server.sendall(data[: len(data) // 2])
                        _reset(client)
                        _reset(server)
                        return
                    server.sendall(data)
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=upstream, daemon=True)
        thread.start()
        while data := server.recv(65536):
            state["turn"] = "server"
            if spoil == "drop":
                _reset(client)
                return
            if spoil == "cut":
                client.sendall(data[: len(data) * 2 // 3])
                _reset(client)
                return
            if spoil == "stall":
                spoil = None
                late.wait(self.seconds)
            client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        thread.join(self.seconds)


def _reset(end: socket.socket) -> None:
    """Close with RST, as a machine that lost its power does once it is back."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


@contextmanager
def proxy(target: int, *, seconds: float = 3.0) -> Iterator[Proxy]:
    """A proxy before the server on port ``target``."""
    found = Proxy(target, seconds=seconds)
    try:
        yield found
    finally:
        found.close()
