"""A disk that remembers what was synced, and the states in which a power failure may leave it.

Every call passes through to the real files and is noted. From the notes any moment can be replayed: of the
bytes and names that were not synced by then, some are lost.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from crash_shim import Call, data_of

Step: TypeAlias = Callable[["Disk"], None]


@dataclass(eq=False)
class File:
    """A file's bytes, and those of its last sync."""

    data: bytes = b""
    synced: bytes = b""


@dataclass(eq=False)
class Folder:
    """A folder's names, and those of its last sync."""

    names: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)


class Disk:
    """Folders and files below one root, which itself is durable."""

    def __init__(self) -> None:
        self.root = Folder()

    def folder(self, path: str) -> tuple[Folder, str]:
        """The folder that a path below the root lies in, and its last name."""
        *above, name = path.split("/")
        found: Any = self.root
        for part in above:
            found = found.names[part]
        return found, name

    def at(self, path: str) -> Any:
        """What lies at a path below the root; "" for the root."""
        if not path:
            return self.root
        folder, name = self.folder(path)
        return folder.names[name]

    def after_power_failure(self, target: Path, random_: random.Random, loses: Losses) -> None:
        """Make real files of what may be left."""
        _put(self.root, target, random_, loses)


class Losses(NamedTuple):
    """Chances that a name, or bytes, that were not synced are lost."""

    names: float
    data: float


def _put(folder: Folder, target: Path, random_: random.Random, loses: Losses) -> None:
    target.mkdir(exist_ok=True)
    for name in sorted({*folder.names, *folder.synced}):
        new, old = folder.names.get(name), folder.synced.get(name)
        kept = old if new is not old and random_.random() < loses.names else new
        if isinstance(kept, Folder):
            _put(kept, target / name, random_, loses)
        elif kept is not None:
            (target / name).write_bytes(_bytes_left(kept, random_, loses.data))


def _bytes_left(file: File, random_: random.Random, loses: float) -> bytes:
    """The synced bytes, and some of those after them: less, or zeros, or all."""
    if not file.data.startswith(file.synced):
        return file.synced if random_.random() < loses else file.data
    if random_.random() >= loses:
        return file.data
    fresh = file.data[len(file.synced) :]
    kept = random_.choice([0, 0, random_.randint(0, len(fresh))])
    zeros = random_.choice([0, 0, len(fresh) - kept])
    return file.synced + fresh[:kept] + bytes(zeros)


class Recorder:
    """A handler for `crash_shim.intercepted` that notes what changes below a root.

    Attributes:
        steps: What happened, in order.
        marks: (how many steps had happened, rows) that `mark` was told.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._lock = threading.RLock()
        self._paths: dict[int, str] = {}
        self.steps: list[Step] = []
        self.marks: list[tuple[int, int]] = []

    def mark(self, rows: int) -> None:
        """Note that ``rows`` rows are promised to survive from now on."""
        with self._lock:
            self.marks.append((len(self.steps), rows))

    def replay(self, steps: int) -> Disk:
        """The disk after as many steps."""
        disk = Disk()
        for step in self.steps[:steps]:
            step(disk)
        return disk

    def __call__(self, call: Call) -> Any:
        # One call after the other, so that the notes have the order of the disk.
        with self._lock:
            path = self._path_of(call)
            found = call.go()
            if path is None:
                return found
            if call.name == "open":
                self._paths[found] = path
            if call.name == "close":
                self._paths.pop(call.args[0], None)
            step = self._step(call, path, found)
            if step is not None:
                self.steps.append(step)
            return found

    def _path_of(self, call: Call) -> str | None:
        """The path below the root that a call is about; None for others."""
        if isinstance(call.args[0], int):
            return self._paths.get(call.args[0])
        return self._below(call.args[0], call.kwargs.get("dir_fd", call.kwargs.get("src_dir_fd")))

    def _below(self, path: Any, folder: int | None) -> str | None:
        text = os.fspath(path)
        if folder is not None:
            base = self._paths.get(folder)
            return None if base is None else f"{base}/{text}".lstrip("/")
        if text == self._root:
            return ""
        return text[len(self._root) + 1 :] if text.startswith(f"{self._root}/") else None

    def _step(self, call: Call, path: str, found: Any) -> Step | None:
        name, args = call.name, call.args
        if name == "open":
            return (lambda disk: _create(disk, path)) if args[1] & os.O_CREAT else None
        if name in ("write", "writev"):
            data = data_of(call)[:found]
            return lambda disk: _append(disk.at(path), data)
        if name in ("fsync", "fdatasync"):
            return lambda disk: _sync(disk.at(path))
        if name == "ftruncate":
            return lambda disk: _cut(disk.at(path), args[1])
        if name == "mkdir":
            return lambda disk: _add(disk, path, Folder())
        if name in ("unlink", "rmdir"):
            return lambda disk: _drop(disk, path)
        if name in ("rename", "replace"):
            other = self._below(args[1], call.kwargs.get("dst_dir_fd"))
            return None if other is None else lambda disk: _move(disk, path, other)
        return None


def _create(disk: Disk, path: str) -> None:
    folder, name = disk.folder(path)
    folder.names.setdefault(name, File())


def _add(disk: Disk, path: str, what: File | Folder) -> None:
    folder, name = disk.folder(path)
    folder.names[name] = what


def _drop(disk: Disk, path: str) -> None:
    folder, name = disk.folder(path)
    folder.names.pop(name)


def _move(disk: Disk, path: str, other: str) -> None:
    folder, name = disk.folder(path)
    what = folder.names.pop(name)
    _add(disk, other, what)


def _append(file: File, data: bytes) -> None:
    file.data += data


def _cut(file: File, size: int) -> None:
    file.data = file.data[:size]


def _sync(what: File | Folder) -> None:
    if isinstance(what, File):
        what.synced = what.data
    else:
        what.synced = dict(what.names)
