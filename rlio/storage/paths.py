"""Checks and resolves paths, URIs and object names, before anything is opened.

Example:
    >>> is_uri("s3://bucket/run"), is_uri("s3foo/run"), is_uri("C:/run")
    (True, False, False)
    >>> check_path("data/w00001-0a1b2c3d/x.parquet")
    'data/w00001-0a1b2c3d/x.parquet'
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from rlio.errors import MissingExtra, OptionError, UnknownName, excerpt

__all__ = [
    "TMP_DIR",
    "Entry",
    "Location",
    "StrPath",
    "check_path",
    "is_litter",
    "is_uri",
    "locate",
    "locate_on",
    "mask_secrets",
]

StrPath: TypeAlias = str | os.PathLike[str]

#: Folder of a root that holds objects until they are complete.
TMP_DIR: Final = "_tmp"

# A scheme has at least two characters: `C:\run` and `c:/run` are Windows drives. fsspec's chained wrappers
# may precede it (`simplecache::s3://...`); `file:/run` is the short form of RFC 8089.
_URI = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]+::)*[A-Za-z][A-Za-z0-9+.-]+://|file:/")
# A URI after pathlib, which merges the two slashes.
_MERGED = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
_PASSWORD = re.compile(r"(://[^/@:]*):[^/@]*@")
_QUERY = re.compile(r"(https?://[^?]*)\?.*", re.DOTALL)

#: Scheme -> (package, our extra), for filesystems that have an extra.
_EXTRAS: Final = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
    "az": ("adlfs", "azure"),
    "abfs": ("adlfs", "azure"),
    "abfss": ("adlfs", "azure"),
    "adl": ("adlfs", "azure"),
    "sftp": ("paramiko", "sftp"),
    "ssh": ("paramiko", "sftp"),
}


class Entry(NamedTuple):
    """One regular object: its path relative to the listed root, and its bytes if known."""

    path: str
    size: int | None


class Location(NamedTuple):
    """A resolved path or URI.

    Attributes:
        fs: The fsspec filesystem; None for a local path, which needs no fsspec.
        path: Path within ``fs``, or the absolute local path; no trailing slash.
        uri: For messages: an absolute path or a URI, with secrets masked.
    """

    # Any: fsspec ships no type information.
    fs: Any
    path: str
    uri: str

    def uri_of(self, path: str) -> str:
        """The URI of another ``path`` of the same filesystem, secrets masked."""
        if self.fs is None:
            return path
        if self.path and self.uri.endswith(self.path):
            return self.uri[: len(self.uri) - len(self.path)] + path
        return mask_secrets(str(self.fs.unstrip_protocol(path)))


def is_uri(text: str) -> bool:
    """Whether ``text`` is a URI for fsspec; any other text is a path."""
    return _URI.match(text) is not None


def is_litter(path: str) -> bool:
    """Whether a name in a relative ``path`` begins with a dot: what tools and file managers leave is no data.

    Such are ``._run.csv``, ``.DS_Store`` and ``.ipynb_checkpoints/run.csv``.
    """
    return any(
        name.startswith(".") and name not in (".", "..") for name in path.replace(os.sep, "/").split("/")
    )


def mask_secrets(uri: str) -> str:
    """Return ``uri`` without passwords, and without the query of a web address, which may be signed."""
    return _QUERY.sub(r"\1?***", _PASSWORD.sub(r"\1:***@", uri))


def check_path(path: str, *, uri: str | None = None) -> str:
    """Return ``path`` if it names something below a root: relative, normalised, and never outside the root.

    Raises:
        OptionError: It is empty or absolute, or has an empty, ``.`` or ``..`` component or a NUL.
    """
    parts = path.split("/")
    if "\0" in path or any(part in ("", ".", "..") for part in parts) or (os.name == "nt" and "\\" in path):
        raise OptionError(
            f"{excerpt(path)} is not a path below the root: expected names joined by single slashes, none of "
            "them '.' or '..'",
            uri=uri,
        )
    return path


def locate(value: StrPath, storage_options: Mapping[str, Any] | None = None) -> Location:
    """Resolve ``value``, without reading or creating anything.

    Args:
        value: A local path (``~`` is expanded, a relative path made absolute) or a URI, which fsspec gets
            unchanged. A `os.PathLike` is always a local path.
        storage_options: Keywords of the fsspec filesystem.

    Raises:
        UnknownName: No known filesystem has the URI's scheme.
        MissingExtra: The filesystem's client is not installed.
        OptionError: ``value`` is empty or a URI that went through pathlib, or the options do not fit.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
    if not isinstance(text, str) or not text or "\0" in text:
        raise OptionError(f"{excerpt(value)} is not a path: expected a non-empty str or os.PathLike of str")
    if isinstance(value, str) and is_uri(text):
        return _locate_uri(text, dict(storage_options or {}))
    merged = _MERGED.match(text)
    if merged and _is_known(merged[1]) and not os.path.lexists(f"{merged[1]}:"):
        raise OptionError(
            f"{excerpt(text)} looks like a URI that went through pathlib, which merges slashes: pass the "
            f"text '{merged[1]}://...' itself"
        )
    if storage_options:
        raise OptionError(
            f"storage_options {sorted(storage_options)} were given for a local path, which takes none: drop "
            "them, or pass a URI; what rlio.convert and compact write to has into_storage_options",
            uri=text,
        )
    path = os.path.abspath(os.path.expanduser(text))
    return Location(None, path, path)


def _locate_uri(text: str, options: dict[str, Any]) -> Location:
    import fsspec

    for scheme in _schemes(text):
        _require(scheme)
    uri = mask_secrets(text).rstrip("/")
    try:
        fs, path = fsspec.core.url_to_fs(text, **options)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"the filesystem refused the URI or storage_options {sorted(options)}: "
            f"{mask_secrets(excerpt(str(error)))}",
            uri=uri,
        ) from error
    place = locate_on(fs, path, uri=uri)
    if place.fs is None and options:
        raise OptionError(
            f"storage_options {sorted(options)} were given for local files, which take none: drop them",
            uri=place.uri,
        )
    return place


def locate_on(fs: Any, path: str, *, uri: str | None = None) -> Location:
    """The place ``path`` of an fsspec filesystem object; messages call it ``uri``."""
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.local import LocalFileSystem

    # A folder behind `dir::` is a folder: removing the wrapper shows its real abilities. A derived class
    # keeps its own methods, here and below, because it may encrypt what it stores.
    while type(fs) is DirFileSystem:
        path = f"{fs.path.rstrip('/')}/{path.lstrip('/')}" if fs.path else path
        fs = fs.fs
    path = path.rstrip("/")
    if type(fs) is LocalFileSystem:
        path = os.path.abspath(path or os.sep)
        return Location(None, path, path)
    name = str(fs.unstrip_protocol(path)) if uri is None else uri
    return Location(fs, path, mask_secrets(name).rstrip("/"))


def _schemes(text: str) -> list[str]:
    """The schemes that ``text`` chains; a link without ``://`` that is not a bare word is a path."""
    links = text.split("::")
    schemes = [link.split("://")[0] if "://" in link else link for link in links]
    return [
        s for s, link in zip(schemes, links, strict=True) if "://" in link or re.fullmatch(r"[\w+.-]+", s)
    ]


def _is_known(scheme: str) -> bool:
    import fsspec

    return scheme in fsspec.available_protocols()


def _require(scheme: str) -> None:
    """Import the filesystem of ``scheme``, or raise."""
    import fsspec

    if scheme.startswith("file:/"):
        return
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        if scheme in _EXTRAS:
            raise MissingExtra(*_EXTRAS[scheme]) from error
        raise UnknownName(f"the filesystem {scheme}:// is not installed: {error}") from error
    except ValueError as error:
        known = sorted(fsspec.available_protocols())
        close = difflib.get_close_matches(scheme.lower(), known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}://? " if close else ""
        raise UnknownName(
            f"no filesystem is known for {excerpt(scheme)}: {hint}known are {', '.join(known)}; "
            "a local folder of that name is './...'"
        ) from error
