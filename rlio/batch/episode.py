"""`Episode`: one agent's trajectory, or a chunk of it: N actions and N + 1 observations.

Example:
    >>> episode = Episode(7, observations=[0.0, 1.0, 2.0], actions=[1, 0], rewards=[1, 1], terminated=True)
    >>> len(episode), episode.total_reward, episode.is_done
    (2, 2.0, True)
    >>> episode.to_batch()["new_obs"]
    array([1., 2.])
"""

from __future__ import annotations

import os
import re
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import datetime
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.arrays import (
    Column,
    as_column,
    concat_leaves,
    equal_columns,
    join_columns,
    row_count,
    take_column,
    to_numpy,
    zero_leaf,
)
from rlio.batch.columns import AGENT_ID, TRAJECTORY, Columns, is_per_sequence
from rlio.batch.nested import map_structure
from rlio.batch.pictures import encode_png, evenly, leaf_texts, pictures_in, pillow
from rlio.errors import MissingColumn, SchemaError, excerpt
from rlio.support.clock import utc_ms_of, utc_time
from rlio.support.options import check_count
from rlio.support.words import and_more

__all__ = ["Episode"]

#: Columns that an episode holds in its own attributes.
_OWN_COLUMNS = TRAJECTORY | {AGENT_ID}


@dataclass(slots=True, eq=False, repr=False)
class Episode:
    """One agent's trajectory from step ``t_started`` on: a whole episode, or any chunk of it.

    The observation after the last action may be missing. The episode then has as many observations as
    actions; none is invented. Columns are kept, not copied. Do not change an episode.

    Attributes:
        id_: The episode's id, an int or a str.
        agent_id: The agent's id; None for a single agent.
        observations: N + 1 rows, or N if the final observation is missing; nested if the space is.
        actions: N rows.
        rewards: N rows.
        infos: N rows: what the env returned with each reward; None: not recorded.
        extra_outputs: More columns of N rows, such as ``action_logp``.
        terminated: Whether the last step terminated the episode.
        truncated: Whether the episode was truncated after the last step.
        t_started: Step number of the first action.
        start_time: When the episode began, in UTC by the clock of the machine that recorded it; None:
            unknown.
        lookback: At least some of the steps before this chunk, for code that needs history; not part of the
            chunk. None: not available.

    Raises:
        SchemaError: A column's rows do not fit the number of actions.
    """

    id_: int | str
    _: KW_ONLY
    agent_id: int | str | None = None
    observations: Column
    actions: Column
    rewards: Column
    infos: Column | None = None
    extra_outputs: dict[str, Column] = field(default_factory=dict)
    terminated: bool = False
    truncated: bool = False
    t_started: int = 0
    start_time: datetime | None = None
    lookback: Episode | None = None

    def __post_init__(self) -> None:
        self.id_ = _plain(self.id_)
        self.agent_id = _plain(self.agent_id)
        self.observations = as_column("observations", self.observations)
        self.actions = as_column("actions", self.actions)
        self.rewards = as_column("rewards", self.rewards)
        if self.infos is not None:
            self.infos = as_column(Columns.INFOS, self.infos)
        self.extra_outputs = {
            name: as_column(name, value) for name, value in (self.extra_outputs or {}).items()
        }
        self.terminated, self.truncated = bool(self.terminated), bool(self.truncated)
        self.t_started = int(self.t_started)
        self._check()

    def _check(self) -> None:
        steps = len(self)
        for name in self.extra_outputs:
            if name in _OWN_COLUMNS or is_per_sequence(name):
                raise SchemaError(
                    "an extra output has the name of a column with a meaning of its own: rename it",
                    column=name,
                )
        per_step = {Columns.REWARDS: self.rewards, Columns.INFOS: self.infos, **self.extra_outputs}
        for name, column in per_step.items():
            if column is not None and (rows := row_count(column)) != steps:
                raise SchemaError(
                    f"{rows} rows but 'actions' has {steps}: expected one row an action", column=name
                )
        observations = row_count(self.observations)
        if observations not in (steps, steps + 1):
            raise SchemaError(
                f"{observations} observations for {steps} actions: expected {steps + 1}, or {steps} if the "
                "final observation is missing",
                column="observations",
            )

    # ---- what it is ----

    def __len__(self) -> int:
        """Number of steps, which equals the number of actions."""
        return row_count(self.actions) or 0

    @property
    def is_done(self) -> bool:
        """Whether the episode ended here, by termination or truncation."""
        return self.terminated or self.truncated

    @property
    def has_final_observation(self) -> bool:
        """Whether the observation after the last action is known."""
        return row_count(self.observations) == len(self) + 1

    @property
    def total_reward(self) -> float:
        """Sum of the rewards, in float64."""
        return float(np.sum(to_numpy(self.rewards), dtype=np.float64))

    def __repr__(self) -> str:
        agent = "" if self.agent_id is None else f" of agent {excerpt(self.agent_id)}"
        end = " and ".join(name for name in ("terminated", "truncated") if getattr(self, name)) or "not ended"
        final = "" if self.has_final_observation else ", final observation missing"
        start, stop = self.t_started, self.t_started + len(self)
        return f"Episode({excerpt(self.id_)}{agent}: steps {start} to {stop}, {end}{final})"

    def _repr_html_(self) -> str:
        from rlio.batch.shown import episode_panel

        return episode_panel(self)

    # ---- pictures ----

    @property
    def frames(self) -> NDArray[np.uint8]:
        """The pictures of the observations before each action: uint8, (steps, height, width, 1, 3 or 4).

        They are views where that is possible. Of a stack of frames, the newest is taken; channels come last,
        whatever their place in the observation.

        Raises:
            MissingColumn: No observation is a picture (uint8 of two axes, or of three with few channels); the
                message names other columns that could be frames.
            SchemaError: Several are: name one to `frames_of`.
        """
        found = pictures_in({Columns.OBS: self._columns()[Columns.OBS]})
        if len(found) == 1:
            return next(iter(found.values()))
        if found:
            raise SchemaError(
                f"{len(found)} observations are pictures: name one, frames_of({min(found)!r}); they are "
                f"{', '.join(found)}"
            )
        raise MissingColumn(f"no observation is a picture{self._could_be_frames()}", column=Columns.OBS)

    def frames_of(self, column: str) -> NDArray[np.uint8]:
        """The pictures in a column, or in a part of one (``obs/camera``), as `frames` has them.

        Raises:
            MissingColumn: There is no such column, or it has no pictures; the message names those that have.
        """
        found = pictures_in(self._columns())
        if column not in found:
            raise MissingColumn(f"{excerpt(column)} has no pictures{self._could_be_frames()}", column=column)
        return found[column]

    def write_frames(
        self, folder: str | os.PathLike[str], count: int | None = None, *, column: str | None = None
    ) -> list[str]:
        """Write frames as PNG files named by the episode and the step, ``episode-7-step-000012.png``.

        Args:
            folder: Made if it is absent. Files of the same names are replaced.
            count: How many, spread evenly from the first to the last; None: all.
            column: See `frames_of`; None: `frames`.

        Returns:
            The paths of the files.

        Raises:
            MissingExtra: Pillow is not installed: ``pip install 'rlio[images]'``.
            MissingColumn, SchemaError: As `frames` and `frames_of`.
        """
        count = check_count("count", count, least=1, of="frames", none="all")
        frames = self.frames if column is None else self.frames_of(column)
        pillow()  # Without it, no folder is made.
        os.makedirs(folder, exist_ok=True)
        name = re.sub(r"[^A-Za-z0-9.-]+", "_", str(self.id_))[:80]
        paths = []
        for number in evenly(len(frames), count):
            path = os.path.join(folder, f"episode-{name}-step-{self.t_started + number:06d}.png")
            (picture,) = encode_png([frames[number]])
            with open(path, "wb") as file:
                file.write(picture)
            paths.append(path)
        return paths

    def _columns(self) -> dict[str, Column]:
        """The columns by name, with as many rows as steps."""
        steps = len(self)
        found = {Columns.OBS: map_structure(lambda leaf: leaf[:steps], self.observations)}
        found |= {Columns.ACTIONS: self.actions, Columns.REWARDS: self.rewards}
        if self.infos is not None:
            found[Columns.INFOS] = self.infos
        return found | self.extra_outputs

    def _could_be_frames(self) -> str:
        """The end of a message: the columns with pictures, or what the observations are."""
        columns = self._columns()
        if found := pictures_in(columns):
            return f": pictures are in {', '.join(found)}, frames_of({next(iter(found))!r})"
        texts = leaf_texts({Columns.OBS: columns[Columns.OBS]})
        return (
            f", and no other column has any: the episode has {and_more(texts, 5)}; frames are uint8 of shape "
            "(height, width) or (height, width, channels)"
        )

    # ---- parts ----

    def with_lookback(self) -> Episode:
        """This chunk preceded by its `lookback`, in fresh memory; itself without a `lookback`."""
        return self if self.lookback is None else self.lookback.concat(self)

    def slice(self, start: int = 0, stop: int | None = None) -> Self:
        """The steps ``start`` to ``stop``, counted from the first step here (as in a Python slice), as views.

        A part that stops before the last step is not ended, and its final observation is known.
        """
        steps = len(self)
        first, end, _ = slice(start, stop).indices(steps)
        end = max(first, end)

        last = end == steps
        return replace(
            self,
            observations=map_structure(lambda leaf: leaf[first : end + 1], self.observations),
            terminated=self.terminated and last,
            truncated=self.truncated and last,
            t_started=self.t_started + first,
            lookback=None if first else self.lookback,
            **map_structure(lambda leaf: leaf[first:end], self._per_step()),
        )

    def _per_step(self) -> dict[str, Column]:
        """The attributes with a row for each action."""
        found = {"actions": self.actions, "rewards": self.rewards, "extra_outputs": self.extra_outputs}
        return found if self.infos is None else {**found, "infos": self.infos}

    def concat(self, next_chunk: Episode) -> Self:
        """Join this chunk and the next one, in fresh memory.

        Raises:
            SchemaError: ``next_chunk`` is of another episode or agent, does not start at the step where this
                chunk stops, does not start with this chunk's final observation, or has other columns; or this
                chunk has ended.
        """
        self._check_next(next_chunk)
        observations = self.observations
        if self.has_final_observation:
            observations = map_structure(lambda leaf: leaf[:-1], observations)
        return replace(
            self,
            observations=join_columns([observations, next_chunk.observations]),
            terminated=next_chunk.terminated,
            truncated=next_chunk.truncated,
            **join_columns([self._per_step(), next_chunk._per_step()]),
        )

    def _check_next(self, other: Episode) -> None:
        here = f"{self!r} cannot be followed by {other!r}"
        if (self.id_, self.agent_id) != (other.id_, other.agent_id):
            raise SchemaError(f"{here}: expected chunks of one episode, with the same id and agent_id")
        if self.is_done:
            raise SchemaError(f"{here}: the first has ended")
        if other.t_started != self.t_started + len(self):
            raise SchemaError(
                f"{here}: expected the next chunk to start at step {self.t_started + len(self)}"
            )
        if not self.leads_to(other):
            raise SchemaError(f"{here}: one has infos or extra outputs that the other lacks")
        if self.has_final_observation and row_count(other.observations):
            final = map_structure(lambda leaf: leaf[-1:], self.observations)
            if not equal_columns(final, map_structure(lambda leaf: leaf[:1], other.observations)):
                raise SchemaError(
                    f"{here}: the final observation of the first is not where the second starts"
                )

    def leads_to(self, next_chunk: Episode) -> bool:
        """Whether `concat` can join the next chunk of the same episode: it follows, with the same columns."""
        return (
            self.t_started + len(self) == next_chunk.t_started
            and self.extra_outputs.keys() == next_chunk.extra_outputs.keys()
            and (self.infos is None) == (next_chunk.infos is None)
        )

    def tail(self, steps: int) -> Episode:
        """The last ``steps`` steps, including those of the `lookback`, in fresh memory."""
        whole = self if len(self) >= steps else self.with_lookback()
        part = whole.slice(max(0, len(whole) - steps))
        part.lookback = None
        # Copies, because views would keep a whole batch in memory.
        for name in ("observations", "actions", "rewards", "infos", "extra_outputs"):
            column = getattr(part, name)
            if column is not None:
                setattr(part, name, map_structure(np.array, column))
        return part

    # ---- as rows ----

    def to_batch(self) -> SampleBatch:
        """The steps as a `SampleBatch`: obs, actions, rewards, new_obs, done flags, t, eps_id and all others.

        ``obs`` and ``new_obs`` are views of the same memory and therefore read-only. If the final observation
        is missing, ``new_obs`` is a copy that ends in zeros, and ``new_obs_valid`` marks the missing one. The
        agent id is ``agent_index`` if it is an int, else the column ``agent_id``.
        """
        steps = len(self)
        flags = np.zeros((2, steps), bool)
        if steps:
            flags[:, -1] = self.terminated, self.truncated
        columns: dict[str, Column] = {
            Columns.OBS: map_structure(lambda leaf: _read_only(leaf[:steps]), self.observations),
            Columns.ACTIONS: self.actions,
            Columns.REWARDS: self.rewards,
            Columns.TERMINATEDS: flags[0],
            Columns.TRUNCATEDS: flags[1],
            Columns.T: np.arange(self.t_started, self.t_started + steps),
            Columns.EPS_ID: _constant(self.id_, steps),
        }
        if self.has_final_observation:
            columns[Columns.NEXT_OBS] = map_structure(lambda leaf: _read_only(leaf[1:]), self.observations)
        else:
            columns[Columns.NEXT_OBS] = map_structure(
                lambda leaf: concat_leaves([leaf[1:], zero_leaf(leaf, min(1, steps))]), self.observations
            )
            columns[Columns.NEXT_OBS_VALID] = np.arange(steps) < steps - 1
        if self.agent_id is not None:
            name = Columns.AGENT_INDEX if isinstance(self.agent_id, int) else AGENT_ID
            columns[name] = _constant(self.agent_id, steps)
        if self.infos is not None:
            columns[Columns.INFOS] = self.infos
        starts = None if self.start_time is None else {self.id_: utc_ms_of(self.start_time)}
        return SampleBatch({**columns, **self.extra_outputs}, episode_starts=starts)

    @classmethod
    def from_batch(cls, batch: SampleBatch, *, id_: int | str | None = None) -> Self:
        """Make an episode of the single trajectory, in order, in ``batch``.

        Args:
            batch: Rows of one episode and agent; at least one row, with obs, actions and rewards. The final
                observation is missing if ``new_obs`` is absent or the last ``new_obs_valid`` is False. The
                agent's id is in ``agent_id``, or else in ``agent_index``.
            id_: The episode's id, if the batch has no ``eps_id``.

        Raises:
            MissingColumn: A column is absent, or there is neither ``eps_id`` nor ``id_``.
            SchemaError: The rows are several trajectories or out of order, or a ``new_obs`` is not the next
                ``obs``; or the batch has ``seq_lens``, which an episode cannot keep.
        """
        if not len(batch):
            raise SchemaError("a batch without rows is not a trajectory: expected a first observation")
        if Columns.SEQ_LENS in batch:
            raise SchemaError("an episode has no sequences: unpad() and delete seq_lens and state_in_* first")
        found = _constant_of(batch, Columns.EPS_ID)
        id_ = found if id_ is None else id_
        if id_ is None:
            raise MissingColumn("there is no eps_id: pass id_=", column=Columns.EPS_ID)
        name, index = _constant_of(batch, AGENT_ID), _constant_of(batch, Columns.AGENT_INDEX)
        t_started = _start(batch)  # First: a gap in t says more than the observations around it.
        return cls(
            id_,
            agent_id=index if name is None else name,
            observations=_observations(batch),
            actions=batch[Columns.ACTIONS],
            rewards=batch[Columns.REWARDS],
            infos=batch.get(Columns.INFOS),
            extra_outputs={name: column for name, column in batch.items() if name not in _OWN_COLUMNS},
            terminated=_ends(batch, Columns.TERMINATEDS),
            truncated=_ends(batch, Columns.TRUNCATEDS),
            t_started=t_started,
            start_time=utc_time((batch.episode_starts or {}).get(id_)),
        )


def _read_only(leaf: Any) -> Any:
    """A read-only view of ``leaf``; a tensor has no such view and is returned unchanged."""
    if isinstance(leaf, np.ndarray):
        leaf = leaf.view()
        leaf.flags.writeable = False
    return leaf


def _constant(value: int | str, rows: int) -> np.ndarray:
    return np.full(rows, value, np.int64 if isinstance(value, int) else object)


def _constant_of(batch: SampleBatch, name: str) -> Any:
    """The single value of column ``name`` as a Python object; None without such a column."""
    if name not in batch:
        return None
    values = to_numpy(batch[name])
    other = np.flatnonzero(values != values[0])
    if len(other):
        raise SchemaError(
            f"row {other[0]} has {excerpt(values[other[0]])} but row 0 has {excerpt(values[0])}: "
            "an episode is one trajectory; split_by_episode first",
            column=name,
        )
    return _plain(values[0])


def _plain(value: Any) -> Any:
    """``value``, or the Python object of a NumPy scalar."""
    return value.item() if isinstance(value, np.generic) else value


def _start(batch: SampleBatch) -> int:
    if Columns.T not in batch:
        return 0
    times = to_numpy(batch[Columns.T]).astype(np.int64)
    gaps = np.flatnonzero(np.diff(times) != 1)
    if len(gaps):
        row = int(gaps[0]) + 1
        raise SchemaError(
            f"row {row} is step {times[row]} but follows step {times[row - 1]}: an episode has every step",
            column=Columns.T,
        )
    return int(times[0])


def _ends(batch: SampleBatch, name: str) -> bool:
    """Whether the last row has the flag; raises if an earlier row has it."""
    if name not in batch:
        return False
    flags = to_numpy(batch[name]).astype(bool)
    if flags[:-1].any():
        raise SchemaError(
            f"row {int(flags.argmax())} of {len(flags)} ends an episode: an episode is one trajectory; "
            "split_by_episode first",
            column=name,
        )
    return bool(flags[-1])


def _observations(batch: SampleBatch) -> Column:
    """obs, followed by the last new_obs if it is known."""
    obs = batch[Columns.OBS]
    if Columns.NEXT_OBS not in batch:
        return obs
    new_obs, steps = batch[Columns.NEXT_OBS], len(batch)
    valid = np.ones(steps, bool)
    if Columns.NEXT_OBS_VALID in batch:
        valid = to_numpy(batch[Columns.NEXT_OBS_VALID]).astype(bool)
    # If a new_obs is missing before the last row, the next row's obs takes its place.
    if valid[:-1].all():  # Nearly always, and without copies.
        here, there = (
            map_structure(lambda leaf, rows=rows: leaf[rows], column)
            for column, rows in ((new_obs, slice(steps - 1)), (obs, slice(1, None)))
        )
    else:
        known = np.flatnonzero(valid[:-1])
        here, there = take_column(new_obs, known), take_column(obs, known + 1)
    if not equal_columns(here, there):
        raise SchemaError(
            "a new_obs is not the obs of the next row, but an episode has one observation between two "
            "actions: keep these rows as a SampleBatch",
            column=Columns.NEXT_OBS,
        )
    if not valid[-1]:
        return obs
    return map_structure(lambda leaf, after: concat_leaves([leaf, after[-1:]]), obs, new_obs)
