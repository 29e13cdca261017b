"""`EpisodeSink`: writes episodes in the format of another library.

Not here: which episodes are written, in which order, and how often (`rlio.conversion.convert`).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np

from rlio.batch.arrays import to_numpy
from rlio.batch.episode import Episode
from rlio.batch.nested import map_structure
from rlio.storage.filesystem import Storage

__all__ = ["MARKER", "EpisodeSink", "Origin", "repeat_last_obs"]

#: In a folder that a conversion has not finished: which one. Readers of the format pass over it.
MARKER: Final = "_rlio_convert.json"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What is known of the data that a sink writes.

    Attributes:
        uri: Where the data comes from.
        spaces: (observation space, action space); None: not known.
        env: Id, or JSON of the spec, of the environment; None: not known.
        extra: More that the source states, as JSON values.
    """

    uri: str
    spaces: tuple[Any, Any] | None = None
    env: str | None = None
    extra: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


class EpisodeSink(Protocol):
    """Writes whole episodes, one after the other, below one root.

    A sink is made with ``(storage, origin, **options)``: the folder to write in, and what is known of the
    data. All options are keywords with defaults. A format of one file takes ``file=``, its name in the
    folder: `rlio.convert` gives it where its target ends in one of the format's `Marks.endings`.

    A sink is made for a folder in which an earlier one was interrupted, or has just been closed. It either
    continues (`episodes` counts the complete ones, and the caller writes those after them), or begins again
    with ``episodes = 0`` and replaces what is there. A sink that continues has ``check(episode)``, which
    raises what `write` raises: an episode that is refused does not count as a stored one. Nothing in the
    folder looks complete before `close`.
    `rlio.convert` keeps `MARKER` in the folder until it is done, and refuses a folder that has other files.

    The caller leaves out infos and extra columns that the format loses (`Format.loses`); a sink leaves out
    anything else that is named there, and raises for what is not. A sink may have two more attributes:
    ``loses``, if that depends on its options; and ``keeps``, the names of further columns that it can hold
    although it loses "extra".

    Attributes:
        episodes: Whole episodes that are stored safely.
    """

    episodes: int

    def __init__(self, storage: Storage, origin: Origin, **options: Any) -> None: ...

    def write(self, episode: Episode) -> None:
        """Add one episode.

        Raises:
            SchemaError: The format cannot hold one of its columns.
        """

    def close(self) -> None:
        """Write the metadata of the data set, so that the other library can open it."""

    def abort(self) -> None:
        """Release everything; another sink can continue in the folder."""


def repeat_last_obs(episode: Episode) -> Episode:
    """The episode with its last observation again as the final one, which is not known."""
    found = copy(episode)
    found.observations = map_structure(
        lambda leaf: np.concatenate([to_numpy(leaf), to_numpy(leaf)[-1:]]), episode.observations
    )
    return found
