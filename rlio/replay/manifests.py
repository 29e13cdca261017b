"""Manifests of built stores: JSON under a checksum, so damage is detected before anything else is read.

Example:
    >>> manifest = Manifest(describe={"root": "/data"}, arrays={"rows": 4096}, state={"head": 128})
    >>> Manifest.load(manifest.dump()) == manifest
    True
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from rlio.errors import CorruptData, OptionError, excerpt

__all__ = ["LAYOUT_VERSION", "MAX_BYTES", "Manifest"]

#: Version of a store's files and of the row layout in them. Raise it with every change of `layout`, `table`,
#: `frames` or `texts`. Stores of another version are rebuilt.
LAYOUT_VERSION: Final = 1
#: Limit on the size of a manifest.
MAX_BYTES: Final = 256 << 20

_OPENING: Final = b'{"crc32":"%08x","manifest":'
_BODY_AT: Final = len(_OPENING % 0)


@dataclass(frozen=True)
class Manifest:
    """One published state of a store.

    Attributes:
        describe: What identifies the store, from its builder, as JSON.
        arrays: Name -> bytes of every array; bytes beyond do not belong to the store yet.
        state: Further information from the builder for readers, as JSON.
    """

    describe: Mapping[str, Any]
    arrays: Mapping[str, int]
    state: Mapping[str, Any]

    def dump(self) -> bytes:
        """The manifest as bytes.

        Raises:
            OptionError: The manifest is too long.
        """
        fields = {
            "layout": LAYOUT_VERSION,
            "byteorder": sys.byteorder,
            "describe": dict(self.describe),
            "arrays": dict(self.arrays),
            "state": dict(self.state),
        }
        body = json.dumps(fields, allow_nan=False, separators=(",", ":")).encode()
        if len(body) > MAX_BYTES - _BODY_AT - 1:
            raise OptionError(f"a manifest of {len(body)} bytes: expected at most {MAX_BYTES}")
        return _OPENING % zlib.crc32(body) + body + b"}"

    @classmethod
    def load(cls, data: bytes) -> Self:
        """Read the result of `dump`.

        Raises:
            CorruptData: The manifest is damaged, or of another layout version or byte order.
        """
        body = data[_BODY_AT:-1]
        if data != _OPENING % zlib.crc32(body) + body + b"}":
            raise CorruptData(
                f"a manifest of {len(data)} bytes does not fit its checksum: build the store again"
            )
        try:
            fields = json.loads(body)
            made = cls(describe=fields["describe"], arrays=fields["arrays"], state=fields["state"])
            if not all(type(size) is int and size >= 0 for size in made.arrays.values()):
                raise ValueError("sizes of arrays")
            found = fields["layout"], fields["byteorder"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptData(
                f"a manifest has an unknown form: {excerpt(body)}; build the store again"
            ) from error
        if found != (LAYOUT_VERSION, sys.byteorder):
            raise CorruptData(
                f"a store of layout {found[0]}, {found[1]}-endian: expected {LAYOUT_VERSION}, {sys.byteorder}"
            )
        return made
