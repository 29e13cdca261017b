"""`Game`: what an environment tells of a game of which its episodes are parts, such as lives.

An environment whose episodes are shorter than its games, or whose rewards are not the game's points, puts a
`Game` into the info of the step that ends a game, under the key `GAME`, and None into that of a step which
ends an episode alone. Metrics count games then.

Example:
    >>> infos = [{GAME: None}, {}, {GAME: Game(21.0, 900)}]
    >>> finished_games(infos, [0, 1, 2])
    {0: None, 2: Game(total_reward=21.0, length=900)}
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ["GAME", "Game", "finished_games", "tells_games"]

#: Key of an info.
GAME = "game"


class Game(NamedTuple):
    """A game that is over.

    Attributes:
        total_reward: Its points: the sum of rewards before they were clipped.
        length: Its steps, as an agent counts them.
    """

    total_reward: float
    length: int


def finished_games(infos: Sequence[Any], envs: Iterable[int]) -> dict[int, Game | None]:
    """What the environments ``envs``, whose episodes ended, tell of their games, if they tell anything."""
    found: dict[int, Game | None] = {}
    for env in envs:
        info = infos[env]
        if info and GAME in info:
            told = info[GAME]
            found[env] = None if told is None else Game(float(told[0]), int(told[1]))
    return found


def tells_games(infos: Any) -> bool:
    """Whether it may be worth looking: ``infos`` are a list, or gymnasium's arrays and have the key."""
    if isinstance(infos, list):
        return True
    return GAME in infos or GAME in infos.get("final_info", ())
