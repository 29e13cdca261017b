"""What a path that does not exist may mean: names beside it that are spelled nearly alike.

Example:
    >>> from rlio.storage.filesystem import Storage
    >>> from rlio.storage.paths import locate
    >>> Storage.open("memory://near-example/cartpole").put("a.bin", b"")
    >>> did_you_mean_path(locate("memory://near-example/cartpol"))
    ": did you mean 'memory://near-example/cartpole'?"
"""

from __future__ import annotations

import difflib
import os
from itertools import islice
from typing import Final

from rlio.errors import DataNotFound, excerpt
from rlio.storage.paths import Location
from rlio.storage.remote import RemoteFolder

__all__ = ["did_you_mean_path", "with_hint"]

#: Names of a folder that are compared, and how many are named.
_NAMES: Final = 2000
_SHOWN: Final = 3
#: Seconds for the listing of a remote folder, on which nobody has to wait for a hint.
_SECONDS: Final = 2.0


def did_you_mean_path(place: Location) -> str:
    """The question that names what ``place`` may mean, to be appended; "": it exists, or nothing is near.

    Lists one folder at most: the nearest one above a local path that exists, or the parent of a remote path.
    """
    found = _local(place.path) if place.fs is None else _remote(place)
    return f": did you mean {' or '.join(excerpt(one, 200) for one in found)}?" if found else ""


def with_hint(error: DataNotFound, hint: str) -> DataNotFound:
    """The same error with ``hint`` at the end of its message."""
    return DataNotFound(str(error).removesuffix(f" [in {error.uri}]") + hint, uri=error.uri)


def _local(path: str) -> list[str]:
    if os.path.lexists(path):
        return []
    folder, _, name = path.rpartition(os.sep)
    rest: list[str] = []
    while folder and not os.path.isdir(folder):
        rest.insert(0, name)
        folder, _, name = folder.rpartition(os.sep)
    try:
        with os.scandir(folder or os.sep) as children:
            names = [child.name for child in islice(children, _NAMES)]
    except OSError:  # It may not be listed: there is no hint.
        return []
    found = [os.path.join(folder or os.sep, one, *rest) for one in _near(name, names)]
    return [one for one in found if os.path.lexists(one)] or ([] if rest else found)


def _remote(place: Location) -> list[str]:
    folder, _, name = place.path.rpartition("/")
    if not name or not folder.strip("/"):
        return []  # The buckets of an account, or the names of a server, are not listed.
    try:
        # A listing has five times the time of a call.
        children = RemoteFolder(place.fs, folder, timeout=_SECONDS / 5).children("", _NAMES)
    except Exception:  # Clients share no error class, and the caller has an error to report already.
        return []
    names = [one for one, _ in children]
    return [] if name in names else [place.uri_of(f"{folder}/{one}") for one in _near(name, names)]


def _near(name: str, names: list[str]) -> list[str]:
    """The names that are nearly ``name``, the nearest first; letters of either case are equal."""
    folded = {one.lower(): one for one in names}
    return [folded[one] for one in difflib.get_close_matches(name.lower(), folded, _SHOWN, 0.7)]
