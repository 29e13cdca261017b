"""`EpisodeFilesSink`: the base of sinks that write a folder of files, each with whole episodes.

A file's name has the number of its first episode and of its episodes, so that a later sink can continue.
A file appears when it is complete.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any, Final

from rlio.errors import OptionError
from rlio.formats.sink import PreparedEpisode
from rlio.storage.filesystem import Storage
from rlio.support.options import check_count

__all__ = ["EPISODE_FILE", "EpisodeFilesSink"]

_FILE_BYTES = 64 << 20
#: The name of a file of such a sink, without its suffix: number of the first episode, and of episodes.
EPISODE_FILE: Final = re.compile("episodes-([0-9]{9})-([0-9]{1,9})(?=[.])")


class EpisodeFilesSink(ABC):
    """Collects episodes, and stores them as a file as soon as there are enough; an `EpisodeSink`.

    Args:
        storage: The folder.
        episodes_per_file: Whole episodes in a file; None: 64 MiB of them.

    Attributes:
        ending: Suffix of the files' names.
        episodes: Whole episodes that are stored.
    """

    ending: str

    def __init__(self, storage: Storage, *, episodes_per_file: int | None = None) -> None:
        self._storage = storage
        self._most = check_count(
            "episodes_per_file", episodes_per_file, least=1, of="episodes", none="a number by size"
        )
        #: The episodes as `_part` made them.
        self._pending: list[Any] = []
        self._bytes = 0
        names = [name for name, is_folder in storage.children() if not is_folder]
        # Earlier versions numbered the files: how many episodes such a file has is not in its name.
        earlier = re.compile(rf"episodes-[0-9]{{6}}{re.escape(self.ending)}")
        if begun := [name for name in names if earlier.fullmatch(name)]:
            raise OptionError(
                f"another version of rlio began to write here: found {begun[0]}; choose another folder",
                uri=storage.uri,
            )
        found = (EPISODE_FILE.match(name) for name in names if name.endswith(self.ending))
        self.episodes: int = max((int(name[1]) + int(name[2]) for name in found if name), default=0)

    def _part(self, episode: PreparedEpisode) -> Any:
        """The episode as `_encoded` takes it: its rows, or bytes."""
        return episode.rows()

    @abstractmethod
    def _encoded(self, episodes: list[Any]) -> bytes:
        """Return the bytes of a file of episodes."""

    def write(self, episode: PreparedEpisode) -> None:
        """Add an episode."""
        part = self._part(episode)
        self._pending.append(part)
        self._bytes += len(part) if isinstance(part, bytes) else part.size_bytes()
        if self._bytes >= _FILE_BYTES if self._most is None else len(self._pending) >= self._most:
            self.close()

    def close(self) -> None:
        """Store the collected episodes."""
        if self._pending:
            name = f"episodes-{self.episodes:09d}-{len(self._pending)}{self.ending}"
            self._storage.put(name, self._encoded(self._pending))
            self.episodes += len(self._pending)
            self.abort()

    def abort(self) -> None:
        """Forget the collected episodes. Another sink continues after those that are stored."""
        self._pending, self._bytes = [], 0
