"""Checks the objects of a root beside its shards: the header, schema files, and foreign objects."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from rlio.catalog.commit import HEADER_BYTES, read_header
from rlio.catalog.listing import Listing
from rlio.catalog.names import DATA_DIR, HEADER, INDEX_DIR, SCHEMA_DIR, VIDEO_DIR, WAL_DIR
from rlio.errors import CorruptData, DataNotFound, SchemaConflict, UnsafeData, excerpt
from rlio.following.marks import PROGRESS_DIR, parse_mark_path
from rlio.maintenance.findings import Findings
from rlio.opening import require_header
from rlio.schemas.agreement import check_agreement
from rlio.schemas.schema import Schema
from rlio.storage.filesystem import Storage
from rlio.storage.paths import TMP_DIR

__all__ = ["QUARANTINE_DIR", "SchemaFiles", "check_header", "check_strays", "read_schema_files"]

#: Folder for damaged objects that repair sets aside. Readers never look into it.
QUARANTINE_DIR = "_quarantine"

_SCHEMA_PATH = re.compile(rf"{SCHEMA_DIR}/([0-9a-f]{{16}})\.json")
_VIDEO_PATH = re.compile(rf"{VIDEO_DIR}/[0-9a-f]{{32}}\.mp4")
_MAX_HEADER = 64 << 10

#: Folder -> code and text of the finding that counts its objects.
_COUNTED: Final = {
    TMP_DIR: (
        "unfinished",
        "unfinished files, being written or left by writers that died: `rlio gc` removes old ones",
    ),
    INDEX_DIR: (
        "unused-index",
        "objects that an early version left to speed up listing, not used: `rlio gc` removes them",
    ),
    QUARANTINE_DIR: (
        "quarantined",
        "objects that repair has set aside: remove them when you no longer need to examine them",
    ),
}

HeaderState = Literal["fine", "missing", "damaged"]


def check_header(storage: Storage, listing: Listing, findings: Findings) -> HeaderState:
    """Check the header.

    Raises:
        DataNotFound: This is not a data set: it has neither a header nor a shard.
        OptionError: The data set has another format version.
    """
    try:
        data = storage.read(HEADER, limit=_MAX_HEADER)
        if data != HEADER_BYTES:
            read_header(storage)
    except DataNotFound:
        if not listing.writers:
            require_header(storage)  # Raises, and says what was found instead.
        findings.add(
            "header-missing",
            "the root has shards but no header: readers do not accept it as a data set; repair writes it",
            uri=storage.uri_of(HEADER),
        )
        return "missing"
    except CorruptData as error:
        findings.add_error("header-damaged", error, uri=storage.uri_of(HEADER))
        return "damaged"
    if data != HEADER_BYTES:
        findings.add(
            "header-damaged",
            f"the header is {excerpt(data)}, which is readable, but every writer puts "
            f"{excerpt(HEADER_BYTES)}",
            uri=storage.uri_of(HEADER),
            severity="warning",
        )
        return "damaged"
    return "fine"


@dataclass
class SchemaFiles:
    """The schema files of a root.

    Attributes:
        intact: Hash -> schema.
        damaged: Hashes of the files whose content does not match their names.
    """

    intact: dict[str, Schema] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)


def read_schema_files(storage: Storage, findings: Findings) -> SchemaFiles:
    """Read and check every schema file."""
    files = SchemaFiles()
    for entry in storage.list(SCHEMA_DIR):
        match = _SCHEMA_PATH.fullmatch(entry.path)
        if match is None:
            continue
        uri = storage.uri_of(entry.path)
        try:
            text = storage.read(entry.path, limit=storage.limits.schema_bytes)
            found = hashlib.blake2b(text, digest_size=8).hexdigest()
            if found != match[1]:
                raise CorruptData(f"the hash of the file is {found}: the file is damaged", uri=uri)
            schema = Schema.from_text(text, uri=uri, limits=storage.limits)
            if schema.hash != match[1]:
                raise CorruptData("the file is not canonical JSON of a schema of this format", uri=uri)
            files.intact[match[1]] = schema
        except DataNotFound:
            continue
        except CorruptData as error:
            findings.add_error(
                "unsafe" if isinstance(error, UnsafeData) else "schema-file-damaged", error, uri=uri
            )
            files.damaged.add(match[1])
    try:
        check_agreement(files.intact, uri=storage.uri)
    except SchemaConflict as error:
        findings.add_error("schema-conflict", error, uri=storage.uri)
    return files


def check_strays(storage: Storage, listing: Listing, findings: Findings) -> list[str]:
    """Find objects that do not belong to the format. Changes none of them.

    Returns:
        Paths of the objects that repair has set aside.
    """
    torn = {rejected for found in listing.torn().values() for rejected, _ in found}
    for rejected in listing.rejected:
        if rejected not in torn:
            uri = storage.uri_of(rejected.path)
            findings.add("stray", f"{rejected.reason}: readers ignore it", uri=uri)
    counted: dict[str, list[str]] = {folder: [] for folder in _COUNTED}
    for entry in storage.list():
        top = entry.path.split("/", 1)[0]
        if top in counted and "/" in entry.path:
            counted[top].append(entry.path)
        elif top == SCHEMA_DIR and not _SCHEMA_PATH.fullmatch(entry.path):
            findings.add("stray", "the name is not that of a schema file", uri=storage.uri_of(entry.path))
        elif top == PROGRESS_DIR:
            if parse_mark_path(entry.path) is None:
                findings.add(
                    "stray", "the name is not that of a progress mark", uri=storage.uri_of(entry.path)
                )
        elif top == VIDEO_DIR and not _VIDEO_PATH.fullmatch(entry.path):
            findings.add("stray", "the name is not that of a video", uri=storage.uri_of(entry.path))
        elif entry.path != HEADER and top not in (DATA_DIR, SCHEMA_DIR, VIDEO_DIR, WAL_DIR):
            findings.add("foreign", "it is not part of a data set", uri=storage.uri_of(entry.path))
    for folder, (code, what) in _COUNTED.items():
        if counted[folder]:
            findings.add(code, f"{len(counted[folder])} {what}", uri=storage.uri_of(folder))
    for path, kind in _odd_files(storage.root) if storage.is_local else ():
        findings.add(
            "link",
            f"a {kind}: it is not followed, because it could lead out of the root; put the file itself there",
            uri=storage.uri_of(path),
        )
    return counted[QUARANTINE_DIR]


def _odd_files(root: str) -> Iterator[tuple[str, str]]:
    """Yield links and special files of a local root: (path, kind)."""
    for folder, folders, files in os.walk(root, followlinks=False):
        for name in sorted(folders + files):
            path = os.path.join(folder, name)
            try:
                mode = os.lstat(path).st_mode
            except FileNotFoundError:
                continue  # Renamed or removed after the listing.
            if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                kind = "symbolic link" if stat.S_ISLNK(mode) else "special file"
                yield os.path.relpath(path, root), kind
