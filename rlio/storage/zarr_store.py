"""`CheckedStore`: files that rlio reads for zarr, each chunk checked before zarr unpacks it.

Importing this module imports zarr (extra ``zarr``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import zarr
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from rlio.errors import DataNotFound
from rlio.storage import Storage

__all__ = ["CheckedStore"]


class CheckedStore(Store):
    """A folder as a store of zarr that is read only. Links out of it are refused.

    Args:
        root: The folder.
        check: Called before zarr gets bytes of a chunk: (path of the array, bytes, whether they are the index
            of a shard, whether they are a part of a file).
        most: Bytes of a file.
    """

    supports_writes = supports_deletes = supports_listing = False

    def __init__(self, root: Storage, check: Callable[[str, bytes, bool, bool], None], *, most: int) -> None:
        super().__init__(read_only=True)
        self._root, self._check, self._most = root, check, most
        # The file of which parts were read last: a shard, whose chunks follow each other.
        self._kept: tuple[str, bytes] = ("", b"")

    def array(self, path: str) -> Any:
        """The array at a path."""
        return zarr.open_array(self, path=path, mode="r")

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """See `Store`."""
        try:
            data = self._kept[1] if key == self._kept[0] else self._root.read(key, limit=self._most)
        except DataNotFound:
            return None
        if byte_range is not None:
            self._kept = key, data
        stop = len(data)
        if isinstance(byte_range, RangeByteRequest):
            data = data[byte_range.start : byte_range.end]
        elif isinstance(byte_range, OffsetByteRequest):
            data = data[byte_range.offset :]
        elif isinstance(byte_range, SuffixByteRequest):
            data = data[max(0, stop - byte_range.suffix) :]
        name = key.rpartition("/")[2]
        if not name.startswith(".z") and name != "zarr.json":
            is_index = isinstance(byte_range, SuffixByteRequest)
            self._check("/".join(key.split("/")[:2]), data, is_index, byte_range is not None)
        return (prototype or default_buffer_prototype()).buffer.from_bytes(data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """See `Store`."""
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def exists(self, key: str) -> bool:
        """See `Store`."""
        return self._root.exists(key)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    async def set(self, key: str, value: Buffer) -> None:
        """Refused: the store is read only."""
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Refused: the store is read only."""
        self._check_writable()

    async def list(self) -> AsyncIterator[str]:
        """Nothing: zarr is given the names of arrays."""
        for name in tuple[str, ...]():
            yield name

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Nothing; see `list`."""
        for name in tuple[str, ...]():
            yield name

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Nothing; see `list`."""
        for name in tuple[str, ...]():
            yield name
