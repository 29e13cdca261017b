"""`LookBack`: keeps the last steps of running episodes for the chunks that follow.

Example:
    >>> from rlio.batch.episode import Episode
    >>> look_back = LookBack(2)
    >>> first = Episode(5, observations=[0, 1, 2, 3], actions=[0, 0, 0], rewards=[1.0, 1.0, 1.0])
    >>> _ = look_back.follow([first], running={5})
    >>> next_ = Episode(5, observations=[3, 4], actions=[0], rewards=[1.0], t_started=3)
    >>> (chunk,) = look_back.follow([next_], running={5})
    >>> chunk.lookback, len(chunk)
    (Episode(5: steps 1 to 3, not ended), 1)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Generic, TypeVar

from rlio.batch.episode import Episode
from rlio.sampling.multi_agent_episode import MultiAgentEpisode

__all__ = ["LookBack"]

EpisodeT = TypeVar("EpisodeT", Episode, MultiAgentEpisode)


class LookBack(Generic[EpisodeT]):
    """Adds the preceding steps to chunks of episodes.

    Args:
        steps: Maximum number of steps, of each agent; 0 for none.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._kept: dict[int | str, EpisodeT] = {}

    def follow(self, chunks: Iterable[EpisodeT], *, running: Collection[int | str]) -> list[EpisodeT]:
        """Set the ``lookback`` of each chunk whose predecessor was the last chunk seen of its episode.

        Args:
            chunks: Sampled chunks; several chunks of an episode in their order.
            running: Ids of the episodes that continue.
        """
        given = list(chunks)
        if not self._steps:
            return given
        for chunk in given:
            before = self._kept.get(chunk.id_)
            if before is not None and before.leads_to(chunk):
                chunk.lookback = before
            self._kept[chunk.id_] = chunk.tail(self._steps) if chunk.id_ in running else chunk
        self._kept = {id_: tail for id_, tail in self._kept.items() if id_ in running}
        return given

    def forget(self) -> None:
        """Forget all episodes."""
        self._kept.clear()
