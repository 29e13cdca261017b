"""Whole transfers over SFTP: many requests under way at a time.

fsspec's client waits for the answer to every 32 KiB. Measured on a server beside it, that is 40 ms each
(Nagle's algorithm against delayed acknowledgements): 80 s for a shard of 64 MiB.
"""

from __future__ import annotations

import io
from typing import Any

__all__ = ["get_range", "put_whole"]


# Any: neither fsspec nor paramiko ships type information.
def put_whole(client: Any, path: str, content: bytes) -> None:
    """Write ``content`` to ``path``, and look whether all of it is there."""
    client.ftp.putfo(io.BytesIO(content), path, file_size=len(content), confirm=True)


def get_range(client: Any, path: str, start: int, stop: int | None) -> bytes:
    """Bytes ``[start, stop)`` of the object, fewer where it ends."""
    with client.ftp.open(path, "rb") as file:
        size = file.stat().st_size or 0
        end = size if stop is None else min(stop, size)
        if start >= end:
            return b""
        file.seek(start)
        file.prefetch(end)
        return bytes(file.read(end - start))
