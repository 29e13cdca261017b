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

import numpy as np

from rlio.batch.episode import Episode
from rlio.batch.nested import map_structure

__all__ = ["LookBack"]


class LookBack:
    """Adds the preceding steps to chunks of episodes.

    Args:
        steps: Maximum number of steps; 0 for none.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._kept: dict[int | str, Episode] = {}

    def follow(self, chunks: Iterable[Episode], *, running: Collection[int | str]) -> list[Episode]:
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
            if before is not None and _continues(before, chunk):
                chunk.lookback = before
            self._kept[chunk.id_] = self._tail(chunk) if chunk.id_ in running else chunk
        self._kept = {id_: tail for id_, tail in self._kept.items() if id_ in running}
        return given

    def forget(self) -> None:
        """Forget all episodes."""
        self._kept.clear()

    def _tail(self, chunk: Episode) -> Episode:
        """Copy the chunk's last steps, because views would keep a whole batch in memory."""
        whole = chunk
        if chunk.lookback is not None and len(chunk) < self._steps:
            whole = chunk.with_lookback()
        tail = whole.slice(max(0, len(whole) - self._steps))
        tail.lookback = None
        return Episode(
            tail.id_,
            agent_id=tail.agent_id,
            observations=map_structure(np.array, tail.observations),
            actions=map_structure(np.array, tail.actions),
            rewards=np.array(tail.rewards),
            infos=None if tail.infos is None else np.array(tail.infos),
            extra_outputs={
                name: map_structure(np.array, column) for name, column in tail.extra_outputs.items()
            },
            t_started=tail.t_started,
        )


def _continues(before: Episode, chunk: Episode) -> bool:
    """Whether the chunks are consecutive and have the same columns, and can be joined."""
    return (
        before.t_started + len(before) == chunk.t_started
        and before.extra_outputs.keys() == chunk.extra_outputs.keys()
        and (before.infos is None) == (chunk.infos is None)
    )
