"""`Game`: an environment's report on a game that spans several episodes, such as lives.

An environment may have episodes shorter than its games, or rewards other than the game's points. Its info of
the step that ends a game then has a `Game` under the key `GAME`; its info of a step that ends only an episode
has None there. Metrics then count games.

Example:
    >>> infos = [{GAME: None}, {}, {GAME: Game(21.0, 900)}]
    >>> finished_games(infos, [0, 1, 2])
    {0: None, 2: Game(total_reward=21.0, length=900)}
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ["GAME", "Game", "finished_games", "tells_games"]

#: The key in an info.
GAME = "game"


class Game(NamedTuple):
    """A finished game.

    Attributes:
        total_reward: Points of the game: the sum of unclipped rewards.
        length: Steps of the game, as an agent counts them.
    """

    total_reward: float
    length: int


def finished_games(infos: Sequence[Any], envs: Iterable[int]) -> dict[int, Game | None]:
    """The games reported by the environments ``envs``, whose episodes ended, if they report any."""
    found: dict[int, Game | None] = {}
    for env in envs:
        info = infos[env]
        if info and GAME in info:
            told = info[GAME]
            found[env] = None if told is None else Game(float(told[0]), int(told[1]))
    return found


def tells_games(infos: Any) -> bool:
    """Whether ``infos`` may report games: they are a list, or gymnasium's arrays with the key."""
    if isinstance(infos, list):
        return True
    return GAME in infos or GAME in infos.get("final_info", ())
