"""`ScratchArrays`: arrays over unnamed files, whose space is freed when the process ends.

Example:
    >>> import tempfile
    >>> import numpy as np
    >>> folder = tempfile.mkdtemp()
    >>> arrays = ScratchArrays(folder)
    >>> rows = arrays.array("rows", (1000, 2), np.dtype("f4"))
    >>> arrays.reserve("rows", 3)
    >>> rows[:3] = 1
    >>> os.listdir(folder)
    []
"""

from __future__ import annotations

import os
import tempfile

from rlio.errors import CacheError
from rlio.replay.memory import FileArrays

__all__ = ["ScratchArrays"]


class ScratchArrays(FileArrays):
    """`FileArrays` for one process, over files without names.

    Args:
        folder: Folder on a local disk; created if missing. Several processes may use the same folder.

    Raises:
        CacheError: No file can be created there.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            os.makedirs(folder, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise CacheError(
                f"cannot create files: {error}; choose another folder", uri=os.fspath(folder)
            ) from error
        super().__init__(folder, writable=True)

    def _open(self, name: str, flags: int) -> int:
        fd, path = tempfile.mkstemp(dir=self.folder, prefix="rlio-ring-")
        os.unlink(path)
        return fd
