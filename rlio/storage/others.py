"""Folders of other libraries: what tools leave in them is not listed, and links within them are followed.

A link that leads out of the folder is refused by name: a stranger's data set must not lead to the user's own
files, and rows behind a link must not be left out silently either. One layout is known in which links lead
out: the cache of the Hugging Face hub keeps the files of a repository in its folder ``blobs``, and each
snapshot has links to them. These are followed, and no others. ::

    datasets--owner--name/blobs/4f1c...                          the file
    datasets--owner--name/snapshots/9e2b.../data/0.parquet  ->  ../../../blobs/4f1c...

Not here: rlio's own data sets, in which no link is followed (`rlio.storage.local`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Final

from rlio.errors import UnsafeData, excerpt
from rlio.storage.local import LocalFolder
from rlio.storage.paths import Entry, is_litter

__all__ = ["OthersFolder", "blobs_of", "inside"]

#: Folders of repositories in the cache of the Hugging Face hub.
_REPOSITORY: Final = re.compile(r"(datasets|models|spaces)--.+")


def blobs_of(root: str) -> str | None:
    """The folder of blobs to which links may lead, if ``root`` is in a snapshot of the hub's cache; or None.

    Args:
        root: Absolute path of a folder.
    """
    above, name = os.path.split(os.path.realpath(root))
    while name:
        repository = os.path.basename(above)
        if name == "snapshots" and _REPOSITORY.fullmatch(repository):
            return os.path.join(above, "blobs")
        above, name = os.path.split(above)
    return None


def inside(path: str, root: str) -> str:
    """The file or folder that ``path``, below the folder ``root``, leads to.

    Raises:
        UnsafeData: It leads out of ``root``, and not to a file in its `blobs_of`; or to nothing.
    """
    real, bound = os.path.realpath(path), os.path.realpath(root)
    name = excerpt(os.path.relpath(path, root))
    is_out = real != bound and not real.startswith(os.path.join(bound, ""))
    if is_out and os.path.dirname(real) != blobs_of(bound):
        raise UnsafeData(
            f"the symbolic link {name} leads out of the folder, to {excerpt(real)}: if the file is yours, "
            "pass its own path, or copy the folder with cp -rL, which copies what links point to",
            uri=root,
        )
    if not os.path.exists(real):
        raise UnsafeData(
            f"the symbolic link {name} leads to {excerpt(real)}, where nothing is: put the file there (git "
            "annex get fetches it in a repository of git-annex), or remove the link",
            uri=root,
        )
    return real


class OthersFolder(LocalFolder):
    """A local folder of another library, to be read.

    Args:
        root: Absolute path of the folder.
        bound: Absolute path of the folder that was named, out of which no link may lead.
    """

    def __init__(self, root: str, bound: str) -> None:
        super().__init__(root, sync=False)
        self.bound: str = os.path.realpath(bound)
        # Opens what links lead to, without following any: none can be put there in the meantime.
        self._all = LocalFolder(self.bound, sync=False)
        blobs = blobs_of(self.bound)
        self._blobs = None if blobs is None else LocalFolder(blobs, sync=False)

    def real(self, path: str) -> str:
        """Where what is at ``path`` lies.

        Raises:
            UnsafeData: A link leads out, or to nothing.
        """
        full = os.path.join(self.root, path) if path else self.root
        return inside(full, self.bound) if os.path.lexists(full) else full

    @contextmanager
    def _open(self, path: str) -> Iterator[int]:
        real, folder = self.real(path), self._all
        if self._blobs is not None and os.path.dirname(real) == self._blobs.root:
            folder = self._blobs
        with folder._open(os.path.relpath(real, folder.root).replace(os.sep, "/")) as fd:
            yield fd

    def exists(self, path: str) -> bool:
        """Whether a regular file or a folder exists there."""
        full = os.path.join(self.root, path)
        real = self.real(path) if os.path.lexists(full) else full
        return os.path.isfile(real) or os.path.isdir(real)

    def children(self, folder: str, most: int | None) -> list[tuple[str, bool]]:
        """See `LocalFolder`."""
        try:
            found = os.scandir(self.real(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        with found:
            return [
                (child.name, child.is_dir()) for child in islice(found, most) if not is_litter(child.name)
            ]

    def entries(
        self, folder: str, limit: int, *, times: dict[str, float | None] | None = None
    ) -> list[Entry]:
        """Every regular file below ``folder``, unsorted; also behind links, but each folder once.

        Raises:
            UnsafeData: There are more than ``limit`` names, or a link leads out, or to nothing.
        """
        found: list[Entry] = []
        seen_names, seen, pending = 0, set[str](), [folder]
        while pending:
            parent = pending.pop()
            real = self.real(parent)
            if real in seen or not os.path.isdir(real):
                continue
            seen.add(real)
            with os.scandir(real) as children:
                for child in children:
                    seen_names += 1
                    if seen_names > limit:
                        raise UnsafeData(f"more than {limit} names: raise the limit if they are yours")
                    path = f"{parent}/{child.name}" if parent else child.name
                    if is_litter(child.name):
                        continue
                    target = self.real(path) if child.is_symlink() else child.path
                    if os.path.isdir(target):
                        pending.append(path)
                    elif os.path.isfile(target):
                        status = os.stat(target)
                        found.append(Entry(path, status.st_size))
                        if times is not None:
                            times[path] = status.st_mtime
        return found
