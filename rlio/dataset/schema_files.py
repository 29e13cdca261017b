"""The schema files of a root: reading them, and whether they agree.

Readers take the schemas of all writers together, so that a column must have one type throughout a root.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping
from typing import Literal

from rlio.dataset import listing
from rlio.dataset.names import SCHEMA_DIR
from rlio.errors import CorruptData, SchemaConflict, UnsafeData
from rlio.schemas.column import ColumnSpec
from rlio.schemas.schema import Schema
from rlio.storage.filesystem import Storage

__all__ = ["check_agreement", "read_schemas"]

logger = logging.getLogger("rlio")

_SCHEMA_PATH = re.compile(rf"{SCHEMA_DIR}/[0-9a-f]{{16}}\.json")


class _Torn(CorruptData):
    """A schema file ends too early."""


def read_schemas(storage: Storage, *, torn: Literal["raise", "skip"] = "raise") -> dict[str, Schema]:
    """Hash -> schema, of every schema file under a root.

    Args:
        storage: The root.
        torn: What to do with a file that ends too early: where puts are not atomic it is being uploaded, or
            was when its writer died. "raise" looks again first, as often as `listing.HOLE_CHECK` says. "skip"
            is for writers, whom no other writer's accident may stop.

    Raises:
        CorruptData: A file does not hold the schema of its name.
    """
    patience = listing.HOLE_CHECK
    for _ in range(patience.listings - 1):
        try:
            return _read_once(storage, torn)
        except _Torn as error:
            logger.debug("%s", error)
            patience.sleep(patience.seconds)
    return _read_once(storage, torn)


def _read_once(storage: Storage, torn: Literal["raise", "skip"]) -> dict[str, Schema]:
    found, left = {}, storage.limits.schema_bytes
    for entry in storage.list(SCHEMA_DIR):
        if not _SCHEMA_PATH.fullmatch(entry.path):
            continue  # Not ours: what file managers and synchronisation leave behind.
        uri = storage.uri_of(entry.path)
        # The bound is that of all of them together: a folder of a thousand large ones is none of ours.
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
                    "then. Read again later; `rlio recover`, or `rlio verify --repair`, puts it where rows "
                    "need it; where none do, remove it",
                    uri=uri,
                ) from error
            logger.warning("%s ends after %d bytes: torn, or not uploaded yet", uri, len(text))
            continue
        if not entry.path.endswith(f"/{schema.hash}.json"):
            raise CorruptData(f"the schema's hash is {schema.hash}: the file is damaged", uri=uri)
        found[schema.hash] = schema
    return found


def _ends_early(text: bytes) -> bool:
    """Whether ``text`` is the beginning of a JSON text, and not all of it."""
    try:
        json.loads(text.decode("utf-8", "ignore"))
    except json.JSONDecodeError as error:
        # The last token may be cut too: a literal, or a string.
        return error.pos >= len(error.doc) - len("false") or error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        return False
    return False


def check_agreement(
    schemas: Mapping[str, Schema], *, uri: str, columns: Collection[str] | None = None
) -> None:
    """Refuse schemas that give a leaf of a policy different dtypes or shapes.

    Args:
        schemas: Hash -> schema.
        uri: The root, for the message.
        columns: Logical columns that matter; None: all.

    Raises:
        SchemaConflict: Two of them do; the message names both.
    """
    seen: dict[tuple[str, str, tuple[str | int, ...]], tuple[str, ColumnSpec]] = {}
    for name, schema in sorted(schemas.items()):
        for pid, policy in schema.policies.items():
            for leaf in policy.leaves:
                if columns is not None and leaf.column not in columns:
                    continue
                other, spec = seen.setdefault((pid, leaf.column, leaf.path), (name, leaf.spec))
                if (spec.dtype, spec.shape) != (leaf.spec.dtype, leaf.spec.shape):
                    raise SchemaConflict(
                        f"policy {pid!r} has {spec.dtype} {spec.shape} in schema {other} and "
                        f"{leaf.spec.dtype} {leaf.spec.shape} in schema {name}: keep them in different "
                        "roots, or read the columns that agree with columns=[...]",
                        uri=uri,
                        column=leaf.column,
                    )
