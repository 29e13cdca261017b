"""`RllibSink`: the shared part of the sinks of RLlib's JSON and episode Parquet."""

from __future__ import annotations

from abc import abstractmethod

from rlio.batch.columns import Columns
from rlio.batch.episode import Episode
from rlio.errors import SchemaError
from rlio.formats.episode_files import EpisodeFilesSink
from rlio.formats.sink import repeat_last_obs
from rlio.storage.filesystem import Storage
from rlio.support.options import check_choice

__all__ = ["RllibSink", "with_final_obs"]


class RllibSink(EpisodeFilesSink[bytes]):
    """Writes files of episodes that have their final observation.

    Args:
        storage: The folder.
        final_obs: What to do if a final observation is missing: "raise", or "repeat" the last observation.
    """

    def __init__(self, storage: Storage, final_obs: str) -> None:
        check_choice("final_obs", final_obs, ("raise", "repeat"))
        self._repeats = final_obs == "repeat"
        super().__init__(storage)

    @abstractmethod
    def _packed(self, episode: Episode) -> bytes:
        """An episode with its final observation, as it is stored."""

    def check(self, episode: Episode) -> bytes:
        """The episode as it is stored; see `EpisodeSink`."""
        return self._packed(with_final_obs(episode, repeats=self._repeats))


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
    return repeat_last_obs(episode)
