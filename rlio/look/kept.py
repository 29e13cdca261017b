"""Small files in the user's cache folder: what was computed of a data set, under a digest of its content.

They are never below a root, which may be read-only or shared. Losing one costs computing it again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from typing import Final

from rlio.errors import OptionError
from rlio.replay.cache_files import user_folder

__all__ = ["keep", "kept_path", "read_kept"]

logger: logging.Logger = logging.getLogger("rlio")

#: The most that the files of a folder take together; the oldest are removed.
MAX_BYTES: Final = 256 << 20


def kept_path(kind: str, name: str, folder: str | os.PathLike[str] | None = None) -> str | None:
    """The path of a file.

    Args:
        kind: Name of the default folder, in ``rlio`` of the user's cache folder.
        name: Name of the file; it changes with the content that the file is computed from.
        folder: The folder; None: the default.

    Returns:
        None: the user has no cache folder, so nothing is kept.
    """
    if folder is None:
        try:
            folder = os.path.join(os.path.dirname(user_folder()), kind)
        except OptionError:
            return None
    return os.path.join(folder, name)


def read_kept(path: str | None) -> bytes | None:
    """The content of a file; None: there is none that can be read."""
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s cannot be read (%r): its content is computed again", path, error)
        return None


def keep(path: str | None, content: bytes) -> None:
    """Write a file, atomically, and remove the oldest beside it if there are too many.

    If that fails, nothing is kept.
    """
    if path is None:
        return
    folder = os.path.dirname(path)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        handle, made = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(made, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(made)
            raise
        _make_room(folder, os.path.splitext(path)[1])
    except OSError as error:
        logger.info("%s cannot be written, so its content is computed again next time: %r", path, error)


def _make_room(folder: str, ending: str) -> None:
    """Remove the oldest files with this ending, if all together are too large."""
    with os.scandir(folder) as entries:
        known = [(entry.stat(), entry.path) for entry in entries if entry.name.endswith(ending)]
    total = sum(info.st_size for info, _ in known)
    for info, path in sorted(known, key=lambda one: one[0].st_mtime):
        if total <= MAX_BYTES:
            return
        with contextlib.suppress(FileNotFoundError):  # Another process removed it.
            os.unlink(path)
        total -= info.st_size
