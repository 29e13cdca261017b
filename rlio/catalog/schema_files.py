"""Reads the schema files of a root."""

from __future__ import annotations

import json
import logging
import re
from typing import Literal

from rlio.catalog import listing
from rlio.catalog.names import SCHEMA_DIR
from rlio.errors import CorruptData, UnsafeData
from rlio.schemas.schema import Schema
from rlio.storage.filesystem import Storage

__all__ = ["read_schemas"]

logger: logging.Logger = logging.getLogger("rlio")

_SCHEMA_PATH = re.compile(rf"{SCHEMA_DIR}/[0-9a-f]{{16}}\.json")


class _Torn(CorruptData):
    """A schema file ends too early."""


def read_schemas(storage: Storage, *, torn: Literal["raise", "skip"] = "raise") -> dict[str, Schema]:
    """Read every schema file under a root: hash -> schema.

    Args:
        storage: The root.
        torn: What to do with a file that ends too early. Where puts are not atomic, it is being uploaded, or
            its writer died then. "raise" first reads again, as often as `listing.HOLE_CHECK` says. "skip" is
            for writers, because the accident of one writer must not stop another.

    Raises:
        CorruptData: The content of a file does not match its name.
    """
    hole_check = listing.HOLE_CHECK
    for _ in range(hole_check.listings - 1):
        try:
            return _read_once(storage, torn)
        except _Torn as error:
            logger.debug("%s", error)
            hole_check.sleep(hole_check.seconds)
    return _read_once(storage, torn)


def _read_once(storage: Storage, torn: Literal["raise", "skip"]) -> dict[str, Schema]:
    found, left = {}, storage.limits.schema_bytes
    for entry in storage.list(SCHEMA_DIR):
        if not _SCHEMA_PATH.fullmatch(entry.path):
            continue  # Not from rlio: for example left by a file manager or a synchronisation tool.
        uri = storage.uri_of(entry.path)
        # The limit is for all files together: a folder of a thousand large ones is not from rlio.
        text = storage.read(entry.path, limit=left)
        left -= len(text)
        try:
            schema = Schema.from_text(text, uri=uri, limits=storage.limits)
        except UnsafeData:
            raise
        except CorruptData as error:
            if not _ends_early(text):
                raise
            if torn == "raise":
                raise _Torn(
                    f"not a schema: it ends after {len(text)} bytes; another writer is uploading it, or died "
                    "then. Read again later; `rlio recover`, or `rlio verify --repair`, restores it if rows "
                    "need it; if no rows do, remove it",
                    uri=uri,
                ) from error
            logger.warning("%s ends after %d bytes: torn, or not uploaded yet", uri, len(text))
            continue
        if not entry.path.endswith(f"/{schema.hash}.json"):
            raise CorruptData(f"the schema's hash is {schema.hash}: the file is damaged", uri=uri)
        found[schema.hash] = schema
    return found


def _ends_early(text: bytes) -> bool:
    """Whether ``text`` is an incomplete JSON text."""
    try:
        json.loads(text.decode("utf-8", "ignore"))
    except json.JSONDecodeError as error:
        # The last token may be cut too, if it is a literal or a string.
        return error.pos >= len(error.doc) - len("false") or error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        return False
    return False
