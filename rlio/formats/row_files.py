"""`RowFilesSink`: the base of sinks that write a folder of files, each with whole episodes.

A file's name has the number of its first episode and of its episodes, so that a later sink can continue.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

import numpy as np

from rlio.batch import SampleBatch
from rlio.batch.columns import Columns
from rlio.batch.episode import Episode
from rlio.errors import OptionError
from rlio.storage.filesystem import Storage

__all__ = ["RowFilesSink"]

_BYTES = 64 << 20


class RowFilesSink(ABC):
    """Collects episodes, and stores them as a file as soon as there are enough; an `EpisodeSink`.

    Args:
        storage: The folder.
        ending: Suffix of the files' names.
        episodes_per_file: Whole episodes in a file; None: 64 MiB of them.

    Attributes:
        episodes: Whole episodes that are stored.
    """

    def __init__(self, storage: Storage, ending: str, *, episodes_per_file: int | None) -> None:
        if episodes_per_file is not None and episodes_per_file < 1:
            raise OptionError(f"episodes_per_file={episodes_per_file}: expected 1 or more, or None")
        self._storage, self._ending, self._most = storage, ending, episodes_per_file
        self._pending: list[SampleBatch] = []
        self._bytes = 0
        pattern = re.compile(rf"episodes-([0-9]{{9}})-([0-9]{{1,9}}){re.escape(ending)}")
        found = [pattern.fullmatch(name) for name, is_folder in storage.children() if not is_folder]
        self.episodes: int = max((int(name[1]) + int(name[2]) for name in found if name), default=0)

    @abstractmethod
    def _check(self, rows: SampleBatch) -> None:
        """Raise `SchemaError` if the format cannot hold the rows of an episode."""

    @abstractmethod
    def _encoded(self, episodes: list[SampleBatch]) -> bytes:
        """Return the bytes of a file of whole episodes, which were checked."""

    def check(self, episode: Episode) -> SampleBatch:
        """The rows of an episode.

        Raises:
            SchemaError: The format cannot hold them.
        """
        rows = episode.to_batch()
        if Columns.NEXT_OBS_VALID not in rows:  # All files have the same columns.
            rows[Columns.NEXT_OBS_VALID] = np.ones(len(rows), np.bool_)
        self._check(rows)
        return rows

    def write(self, episode: Episode) -> None:
        """Add an episode."""
        rows = self.check(episode)
        self._pending.append(rows)
        self._bytes += rows.size_bytes()
        if self._bytes >= _BYTES if self._most is None else len(self._pending) >= self._most:
            self.close()

    def close(self) -> None:
        """Store the collected episodes."""
        if self._pending:
            name = f"episodes-{self.episodes:09d}-{len(self._pending)}{self._ending}"
            self._storage.put(name, self._encoded(self._pending))
            self.episodes += len(self._pending)
            self._pending, self._bytes = [], 0

    def abort(self) -> None:
        """Forget the collected episodes. Another sink continues after those that are stored."""
        self._pending, self._bytes = [], 0
