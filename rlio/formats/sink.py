"""`EpisodeSink`: writes episodes in the format of another library: their layout, and nothing else.

Not here: which episodes are written, in which order, and how often (`rlio.conversion.convert`); how an
episode is fitted to what the format holds (`rlio.conversion.prepare`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.arrays import concat_leaves, row_count, to_numpy, zero_leaf
from rlio.batch.columns import AGENT_ID, Columns
from rlio.batch.episode import Episode
from rlio.batch.nested import map_structure
from rlio.formats.files.step_rows import flags_of
from rlio.storage.filesystem import Storage

__all__ = ["MARKER", "EpisodeSink", "Origin", "PreparedEpisode"]

#: In a folder that a conversion has not finished: which one. Readers of the format pass over it.
MARKER: Final = "_rlio_convert.json"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What is known of the data that a sink writes.

    Attributes:
        uri: Where the data comes from.
        spaces: (observation space, action space); None: not known.
        env: Id or JSON of the environment; None: not known. A sink gets what its format keeps
            (`Holds.environment`).
        extra: More that the source states, as JSON values.
    """

    uri: str
    spaces: tuple[Any, Any] | None = None
    env: str | None = None
    extra: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(kw_only=True)
class PreparedEpisode:
    """An episode as a format holds it: NumPy's arrays, texts as objects. See `rlio.batch.episode.Episode`.

    Attributes:
        id_: The episode's id.
        observations: N+1 rows, or N if the last is missing or not kept.
        actions: N rows.
        rewards: N rows; None: there are none.
        terminated, truncated: How it ended.
        t_started: Number of its first step.
        infos: N objects; None: there are none.
        extra_outputs: Further columns, N rows each.
        declares_final: Whether the format has a place for final observations (`Holds.final_obs`).
    """

    id_: int | str
    observations: Any
    actions: Any
    rewards: NDArray[Any] | None
    terminated: bool = False
    truncated: bool = False
    t_started: int = 0
    infos: NDArray[Any] | None = None
    extra_outputs: dict[str, Any] = field(default_factory=dict)
    declares_final: bool = True

    @classmethod
    def of(cls, episode: Episode) -> Self:
        """An episode as it is, with its agent's id as a further column."""
        extra = {name: map_structure(to_numpy, column) for name, column in episode.extra_outputs.items()}
        if episode.agent_id is not None:
            is_number = isinstance(episode.agent_id, int)
            name, dtype = (Columns.AGENT_INDEX, np.int64) if is_number else (AGENT_ID, object)
            extra[name] = np.full(len(episode), episode.agent_id, dtype)
        return cls(
            id_=episode.id_,
            observations=map_structure(to_numpy, episode.observations),
            actions=map_structure(to_numpy, episode.actions),
            rewards=to_numpy(episode.rewards),
            terminated=episode.terminated,
            truncated=episode.truncated,
            t_started=episode.t_started,
            infos=None if episode.infos is None else to_numpy(episode.infos),
            extra_outputs=extra,
        )

    def __len__(self) -> int:
        """Number of steps."""
        return row_count(self.actions) or 0

    @property
    def has_final_observation(self) -> bool:
        """Whether there is an observation after the last step."""
        return row_count(self.observations) == len(self) + 1

    @property
    def obs(self) -> Any:
        """The observation before each step."""
        return map_structure(lambda leaf: leaf[: len(self)], self.observations)

    @property
    def new_obs(self) -> Any:
        """The observation after each step; zeros after the last one if it is missing."""
        if self.has_final_observation:
            return map_structure(lambda leaf: leaf[1:], self.observations)
        return map_structure(lambda leaf: concat_leaves([leaf[1:], zero_leaf(leaf, 1)]), self.observations)

    @property
    def ends(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Whether each step terminates, and truncates the episode."""
        found = flags_of(len(self), terminated=self.terminated, truncated=self.truncated)
        return found[Columns.TERMINATEDS], found[Columns.TRUNCATEDS]

    def rows(self) -> SampleBatch:
        """A row a step by rlio's names, with ``new_obs_valid``: all episodes have the same columns."""
        steps = len(self)
        valid = np.ones(steps, np.bool_)
        valid[-1:] = self.has_final_observation
        terminateds, truncateds = self.ends
        columns = {Columns.OBS: self.obs, Columns.ACTIONS: self.actions}
        if self.rewards is not None:
            columns[Columns.REWARDS] = self.rewards
        columns |= {
            Columns.TERMINATEDS: terminateds,
            Columns.TRUNCATEDS: truncateds,
            Columns.T: np.arange(self.t_started, self.t_started + steps),
            Columns.EPS_ID: np.full(steps, self.id_, np.int64 if isinstance(self.id_, int) else object),
            Columns.NEXT_OBS: self.new_obs,
            Columns.NEXT_OBS_VALID: valid,
        }
        if self.infos is not None:
            columns[Columns.INFOS] = self.infos
        return SampleBatch({**columns, **self.extra_outputs})


class EpisodeSink(Protocol):
    """Writes whole episodes, one after the other, below one root.

    A sink is made with ``(storage, origin, **options)``: the folder to write in, and what is known of the
    data. All options are keywords with defaults. A format of one file takes ``file=``, its name in the
    folder: `rlio.convert` gives it where its target ends in one of the format's `Marks.endings`.

    A sink is made for a folder in which an earlier one was interrupted, or has just been closed. It either
    continues (`episodes` counts the complete ones, and the caller writes those after them), or begins again
    with ``episodes = 0`` and replaces what is there. Nothing in the folder looks complete before `close`.
    `rlio.convert` keeps `MARKER` in the folder until it is done, and refuses a folder that has other files.

    Episodes come fitted to `Format.holds`; or to ``holds`` of the sink, if what it holds depends on its
    options. Where `Holds.named` has columns, the sink has ``takes(name, column)``: whether the values of a
    column of one of these names are what the layout has under it.

    Attributes:
        episodes: Whole episodes that are stored safely.
    """

    episodes: int

    def __init__(self, storage: Storage, origin: Origin, **options: Any) -> None: ...

    def write(self, episode: PreparedEpisode) -> None:
        """Add one episode."""

    def close(self) -> None:
        """Write the metadata of the data set, so that the other library can open it."""

    def abort(self) -> None:
        """Release everything; another sink can continue in the folder."""
