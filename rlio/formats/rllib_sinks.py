"""`FilesOfEpisodes`: the shared part of the sinks of RLlib's JSON and episode Parquet.

Files are ``episodes-000000.json`` and so on, each with whole episodes. A file appears when it is complete.
"""

from __future__ import annotations

import re

import numpy as np

from rlio.batch.arrays import to_numpy
from rlio.batch.columns import Columns
from rlio.batch.episode import Episode
from rlio.batch.nested import map_structure
from rlio.errors import OptionError, SchemaError, excerpt
from rlio.storage.filesystem import Storage

__all__ = ["FilesOfEpisodes", "with_final_obs"]

_FILE_BYTES = 64 << 20


class FilesOfEpisodes:
    """Writes files of some 64 MiB; an `EpisodeSink` that continues after the files that are there.

    Args:
        storage: The folder.
        final_obs: What to do if a final observation is missing: "raise", or "repeat" the last observation.

    Attributes:
        ending: Of the files' names.
    """

    ending: str

    def __init__(self, storage: Storage, final_obs: str) -> None:
        if final_obs not in ("raise", "repeat"):
            raise OptionError(f"final_obs={excerpt(final_obs)}: expected 'raise' or 'repeat'")
        self._storage, self._repeats = storage, final_obs == "repeat"
        self._waiting: list[bytes] = []
        self._bytes = 0
        pattern = re.compile(r"episodes-\d{6,}" + re.escape(self.ending))
        names = [name for name, is_folder in storage.children() if not is_folder and pattern.fullmatch(name)]
        self._files = len(names)
        self.episodes: int = sum(self._count(storage.read(name)) for name in names)

    def _count(self, content: bytes) -> int:
        """Episodes in a file."""
        raise NotImplementedError

    def _packed(self, episode: Episode) -> bytes:
        """An episode with its final observation, as it is stored."""
        raise NotImplementedError

    def _file(self, packed: list[bytes]) -> bytes:
        """A file of episodes."""
        raise NotImplementedError

    def check(self, episode: Episode) -> bytes:
        """The episode as it is stored; see `EpisodeSink`."""
        return self._packed(with_final_obs(episode, repeats=self._repeats))

    def write(self, episode: Episode) -> None:
        """See `EpisodeSink`."""
        data = self.check(episode)
        if self._waiting and self._bytes + len(data) > _FILE_BYTES:
            self._flush()
        self._waiting.append(data)
        self._bytes += len(data)

    def _flush(self) -> None:
        if self._waiting:
            self._storage.put(f"episodes-{self._files:06d}{self.ending}", self._file(self._waiting))
            self._files += 1
            self.episodes += len(self._waiting)
            self._waiting, self._bytes = [], 0

    def close(self) -> None:
        """See `EpisodeSink`."""
        self._flush()

    def abort(self) -> None:
        """See `EpisodeSink`."""
        self._waiting, self._bytes = [], 0


def with_final_obs(episode: Episode, *, repeats: bool) -> Episode:
    """The episode with N+1 observations; the last one comes twice if the final one is missing.

    Raises:
        SchemaError: It is missing, and ``final_obs`` is "raise"; or the episode has no step.
    """
    if episode.has_final_observation and len(episode):
        return episode
    if not repeats or not len(episode):
        raise SchemaError(
            f"{episode!r} lacks its final observation, which RLlib needs; the option final_obs='repeat' "
            "writes the last one again",
            column=Columns.OBS,
        )
    return Episode(
        episode.id_,
        agent_id=episode.agent_id,
        observations=map_structure(
            lambda leaf: np.concatenate([to_numpy(leaf), to_numpy(leaf)[-1:]]), episode.observations
        ),
        actions=episode.actions,
        rewards=episode.rewards,
        infos=episode.infos,
        extra_outputs=episode.extra_outputs,
        terminated=episode.terminated,
        truncated=episode.truncated,
        t_started=episode.t_started,
    )
