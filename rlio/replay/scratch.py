"""`ScratchArrays`: arrays over unnamed files, whose space is freed when the process ends.

Example:
    >>> import tempfile
    >>> import numpy as np
    >>> folder = tempfile.mkdtemp()
    >>> arrays = ScratchArrays(folder)
    >>> rows = arrays.array("rows", (1000, 2), np.dtype("f4"))
    >>> arrays.reserve("rows", 3)
    >>> rows[:3] = 1
    >>> arrays.close()
    >>> os.listdir(folder)
    []
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

import numpy.typing as npt
from numpy.typing import NDArray

from rlio.errors import CacheError
from rlio.replay.memory import FileArrays
from rlio.support.forks import Owner

__all__ = ["ScratchArrays"]


class ScratchArrays(FileArrays):
    """`FileArrays` for one process: each file is removed once it is mapped, and lives on without a name.

    Args:
        folder: Folder on a local disk; created if missing. Several processes may use the same folder.

    Raises:
        CacheError: No file can be created there.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            os.makedirs(folder, exist_ok=True)
            made = tempfile.mkdtemp(dir=folder, prefix="rlio-ring-")
        except OSError as error:
            raise CacheError(
                f"cannot create files: {error}; choose another folder", uri=os.fspath(folder)
            ) from error
        self._owner = Owner()
        super().__init__(made, writable=True)

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> NDArray[Any]:
        """See `Arrays.array`."""
        found = super().array(name, shape, dtype)
        os.unlink(self._path(name))
        return found

    def close(self) -> None:
        """See `FileArrays.close`."""
        super().close()
        if not self._owner.is_here:
            return  # The folder belongs to the parent process.
        with contextlib.suppress(FileNotFoundError):  # It was already closed.
            os.rmdir(self.folder)
