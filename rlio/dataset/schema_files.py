"""Reads the schema files of a root, and checks that they agree.

Readers combine the schemas of all writers, so a column must have one type throughout a root.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from rlio.batch.nested import Path, path_text
from rlio.dataset import listing
from rlio.dataset.names import SCHEMA_DIR
from rlio.errors import CorruptData, SchemaConflict, UnsafeData, excerpt
from rlio.schemas.column import ColumnSpec
from rlio.schemas.schema import Schema, is_named
from rlio.storage.filesystem import Storage

__all__ = ["check_agreement", "read_schemas"]

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


def check_agreement(
    schemas: Mapping[str, Schema], *, uri: str, columns: Collection[str] | None = None
) -> None:
    """Refuse schemas in which a column of a policy nests differently, or a leaf has another dtype or shape.

    Texts and other objects in one column agree: readers give objects.

    Args:
        schemas: Hash -> schema.
        uri: The root, for the message.
        columns: Logical columns, or parts of them, to check; None: all.

    Raises:
        SchemaConflict: Two schemas differ; the message names both.
    """
    seen: dict[tuple[str, str], tuple[str, dict[Path, ColumnSpec]]] = {}
    for name, schema in sorted(schemas.items()):
        for pid, policy in schema.policies.items():
            for column, every in policy.columns.items():
                leaves = [leaf for leaf in every if is_named(leaf, columns)]
                if not leaves:
                    continue
                found = {leaf.path: leaf.spec for leaf in leaves}
                other, specs = seen.setdefault((pid, column), (name, found))
                difference = _difference(specs, found)
                if difference is not None:
                    raise SchemaConflict(
                        f"policy {excerpt(pid)} has {difference[0]} in schema {other} and {difference[1]} in "
                        f"schema {name}: keep them in different roots, or read the columns that agree with "
                        "columns=[...]",
                        uri=uri,
                        column=column,
                    )


def _difference(one: Mapping[Path, ColumnSpec], other: Mapping[Path, ColumnSpec]) -> tuple[str, str] | None:
    """Return how the leaves of a column differ in two schemas, as a text for each; None: they agree."""
    if one.keys() != other.keys():
        return _nesting(one), _nesting(other)
    for path, spec in one.items():
        if (spec.dtype, spec.shape) != (other[path].dtype, other[path].shape):
            return f"{spec.dtype} {spec.shape}", f"{other[path].dtype} {other[path].shape}"
    return None


def _nesting(paths: Iterable[Path]) -> str:
    found = sorted(map(path_text, paths))
    return "no parts" if found == [""] else f"the parts {excerpt(found)}"
