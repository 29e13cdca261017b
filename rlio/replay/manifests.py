"""What a built store says of itself: JSON under a checksum, so that damage is seen before anything is read.

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

#: Of the files of a store, and of how rows lie in them: raised by whoever changes that (`layout`, `table`,
#: `frames`, `texts`). Stores of another version are built again.
LAYOUT_VERSION: Final = 1
#: No manifest is larger.
MAX_BYTES: Final = 256 << 20

_OPENING: Final = b'{"crc32":"%08x","manifest":'
_BODY_AT: Final = len(_OPENING % 0)


@dataclass(frozen=True)
class Manifest:
    """One published state of a store.

    Attributes:
        describe: What the store is of, as its builder said: JSON.
        arrays: Name -> bytes of every array; what lies behind them belongs to nobody yet.
        state: What else the builder noted for its readers: JSON.
    """

    describe: Mapping[str, Any]
    arrays: Mapping[str, int]
    state: Mapping[str, Any]

    def dump(self) -> bytes:
        """The text of it.

        Raises:
            OptionError: It holds what JSON cannot, or is too long.
        """
        fields = {
            "layout": LAYOUT_VERSION,
            "byteorder": sys.byteorder,
            "describe": dict(self.describe),
            "arrays": dict(self.arrays),
            "state": dict(self.state),
        }
        try:
            body = json.dumps(fields, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(f"what a store says of itself is JSON: {error}") from error
        if len(body) > MAX_BYTES - _BODY_AT - 1:
            raise OptionError(f"a manifest of {len(body)} bytes: at most {MAX_BYTES}")
        return _OPENING % zlib.crc32(body) + body + b"}"

    @classmethod
    def load(cls, data: bytes) -> Self:
        """Read the text of one.

        Raises:
            CorruptData: It is damaged, or of another layout version or machine.
        """
        body = data[_BODY_AT:-1]
        if data != _OPENING % zlib.crc32(body) + body + b"}":
            raise CorruptData(f"a manifest of {len(data)} bytes that does not fit its checksum")
        try:
            fields = json.loads(body)
            made = cls(describe=fields["describe"], arrays=fields["arrays"], state=fields["state"])
            found = fields["layout"], fields["byteorder"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptData(f"a manifest that is none: {excerpt(body)}") from error
        if found != (LAYOUT_VERSION, sys.byteorder):
            raise CorruptData(
                f"a store of layout {found[0]}, {found[1]}-endian: expected {LAYOUT_VERSION}, {sys.byteorder}"
            )
        return made
