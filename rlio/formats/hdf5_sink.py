"""`Hdf5Sink`: the base of sinks of one HDF5 file; `NewHdf5File`, which appears only when it is complete."""

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

__all__ = ["Hdf5Sink", "NewHdf5File"]


class NewHdf5File:
    """An HDF5 file that has its name once it is complete. Unfinished files of earlier processes are replaced.

    Args:
        storage: The folder.
        path: The file's path in it.
        track_order: Whether groups keep the order of their members.

    Attributes:
        file: The open h5py file.

    Raises:
        MissingExtra: h5py is not installed.
        PublishError: The file could not be made, or another conversion writes it.
    """

    def __init__(self, storage: Storage, path: str, *, track_order: bool = False) -> None:
        with needs("h5py", "hdf5"):
            import h5py
        self._storage, self._name = storage, path
        self._temporary = None if storage.is_local else tempfile.mkdtemp(prefix="rlio-new-file-")
        folder, _, name = path.rpartition("/")
        self._folder = os.path.join(storage.root, folder) if storage.is_local else ""
        if storage.is_local:
            os.makedirs(self._folder, exist_ok=True)
        self._path = os.path.join(self._temporary or self._folder, f".{name}.partial")
        try:
            self.file: Any = h5py.File(self._path, "w", track_order=track_order)
        except OSError as error:  # HDF5 locks the file.
            raise PublishError(
                f"the file could not be made: {error}; if another conversion writes it, wait for it",
                uri=storage.uri_of(path),
            ) from error

    def close(self) -> int:
        """Put the file, which is written, under its name; gives its bytes.

        Raises:
            PublishError: It could not be stored.
        """
        self.file.close()
        try:
            size = os.path.getsize(self._path)
            if self._temporary is None:
                with open(self._path, "rb") as file:
                    os.fsync(file.fileno())
                os.replace(self._path, os.path.join(self._storage.root, self._name))
                sync_folder(self._folder)
            else:
                self._upload()
            return size
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
            partial = f"{os.path.dirname(final)}/.{os.path.basename(final)}.partial"
            fs.put_file(self._path, partial)
            getattr(fs, move)(partial, final)

    def abort(self) -> None:
        """Remove the file if it is not under its name yet."""
        self.file.close()
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._path)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
        elif "/" in self._name:
            with contextlib.suppress(OSError):  # It has files.
                os.rmdir(self._folder)


class Hdf5Sink(ABC):
    """Base of an `EpisodeSink` of one HDF5 file.

    Args:
        storage: The folder.
        name: Of the file.

    Attributes:
        file: The open h5py file.
        episodes: Episodes that were written.

    Raises:
        MissingExtra, PublishError: As `NewHdf5File`.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        if "/" in name or not name.strip("."):
            raise OptionError(f"file={excerpt(name)}: expected the name of a file, without folders")
        self.episodes: int = 0
        self._new = NewHdf5File(storage, name)
        self.file: Any = self._new.file

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
        self._new.close()

    def abort(self) -> None:
        """Remove the file if it is not under its name yet."""
        self._new.abort()
