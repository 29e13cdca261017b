"""`Hdf5Sink`: the base of sinks that write one HDF5 file, which appears only when it is complete."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from typing import Any

from rlio.errors import OptionError, PublishError, excerpt
from rlio.formats.sink import PreparedEpisode
from rlio.storage.filesystem import Storage
from rlio.storage.local import sync_folder
from rlio.storage.remote import real_move
from rlio.support.extras import needs

__all__ = ["Hdf5Sink"]


class Hdf5Sink(ABC):
    """Base of an `EpisodeSink` of one HDF5 file, which has its name once it is complete.

    Unfinished files of earlier processes are replaced.

    Args:
        storage: The folder.
        name: Of the file.

    Attributes:
        file: The open h5py file.
        episodes: Episodes that were written.

    Raises:
        MissingExtra: h5py is not installed.
        PublishError: The file could not be made, or another conversion writes it.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        if "/" in name or not name.strip("."):
            raise OptionError(f"file={excerpt(name)}: expected the name of a file, without folders")
        with needs("h5py", "hdf5"):
            import h5py
        self.episodes: int = 0
        self._storage, self._name = storage, name
        self._temporary = None if storage.is_local else tempfile.mkdtemp(prefix="rlio-new-file-")
        if storage.is_local:
            os.makedirs(storage.root, exist_ok=True)
        self._path = os.path.join(self._temporary or storage.root, f".{name}.partial")
        try:
            self.file: Any = h5py.File(self._path, "w")
        except OSError as error:  # HDF5 locks the file.
            raise PublishError(
                f"the file could not be made: {error}; if another conversion writes it, wait for it",
                uri=storage.uri_of(name),
            ) from error

    def write(self, episode: PreparedEpisode) -> None:
        """See `EpisodeSink`."""
        self._write(episode)
        self.episodes += 1

    @abstractmethod
    def _write(self, episode: PreparedEpisode) -> None:
        """Write an episode, whose number is ``episodes``."""

    def close(self) -> None:
        """Put the file, which is written, under its name.

        Raises:
            PublishError: It could not be stored.
        """
        self.file.close()
        try:
            if self._temporary is None:
                with open(self._path, "rb") as file:
                    os.fsync(file.fileno())
                os.replace(self._path, os.path.join(self._storage.root, self._name))
                sync_folder(self._storage.root)
            else:
                self._upload()
        except Exception as error:
            raise PublishError(
                f"the file could not be stored: {type(error).__name__}: {error}; repair access, then convert "
                "again",
                uri=self._storage.uri_of(self._name),
            ) from error
        finally:
            self.abort()

    def _upload(self) -> None:
        """Move the file to its name once it is whole, on filesystems that show it while it grows."""
        fs, folder = self._storage.fs, self._storage.root.rstrip("/")
        final, move = f"{folder}/{self._name}", real_move(fs)
        if move is None:
            fs.put_file(self._path, final)
        else:
            partial = f"{folder}/.{self._name}.partial"
            fs.put_file(self._path, partial)
            getattr(fs, move)(partial, final)

    def abort(self) -> None:
        """Remove the file if it is not under its name yet."""
        self.file.close()
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._path)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
