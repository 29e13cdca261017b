"""`CheckedStore`: files that rlio reads for zarr, each chunk checked before zarr unpacks it.

Importing this module imports zarr (extra ``zarr``).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

import zarr
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from rlio.errors import DataNotFound
from rlio.storage import Storage

__all__ = ["CheckedStore"]


class CheckedStore(Store):
    """A folder as a store of zarr that is read only. Links out of it are refused.

    zarr asks in a thread of its own, which all its arrays share. So bytes are read before, and given to it.

    Args:
        root: The folder.
        check: Called before zarr gets bytes of a chunk: (path of the array, bytes, whether they are the index
            of a shard, whether they are a part of a file).
        most: Bytes of a file.

    Attributes:
        given: Path of a file -> its size, and its bytes, by the first one of each part. What is not in it is
            read when zarr asks for it, whole.
    """

    supports_writes = supports_deletes = supports_listing = False

    def __init__(self, root: Storage, check: Callable[[str, bytes, bool, bool], None], *, most: int) -> None:
        super().__init__(read_only=True)
        self._root, self._check, self._most = root, check, most
        self.given: dict[str, tuple[int, dict[int, bytes]]] = {}

    def array(self, path: str, name: str, about: Mapping[str, Any]) -> Any:
        """The array at a path.

        Args:
            path: The path.
            name: Name of the file that describes it.
            about: What that file says.
        """
        data = json.dumps(about).encode()
        self.given = {f"{path}/{name}": (len(data), {0: data})}
        return zarr.open_array(self, path=path, mode="r", zarr_format=2 if name == ".zarray" else 3)

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """See `Store`."""
        name = key.rpartition("/")[2]
        if name == ".zattrs":  # rlio reads no attributes.
            return None
        given = self.given
        if (data := _part_of(given.get(key), byte_range)) is None:
            try:
                whole = self._root.read(key, limit=self._most)
            except DataNotFound:
                return None
            given[key] = len(whole), {0: whole}
            data = _part_of(given[key], byte_range) or b""
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


def _part_of(given: tuple[int, dict[int, bytes]] | None, byte_range: ByteRequest | None) -> bytes | None:
    """Some bytes of a file that was given; None: they were not."""
    size, parts = given or (0, {})
    start, stop = 0, size
    if isinstance(byte_range, RangeByteRequest):
        start, stop = byte_range.start, min(byte_range.end, size)
    elif isinstance(byte_range, OffsetByteRequest):
        start = byte_range.offset
    elif isinstance(byte_range, SuffixByteRequest):
        start = max(0, size - byte_range.suffix)
    first = start if start in parts else 0
    data = parts[first][start - first : stop - first] if first in parts else b""
    return data if given is not None and len(data) == max(0, stop - start) else None
