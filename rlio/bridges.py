"""Data in memory for other libraries' trainers: d3rlpy, TorchRL, Stable-Baselines3 and Minari.

`rlio.Dataset.to_hf` makes a Hugging Face data set, and `rlio.torch.to_tensordict` is `to_tensordict`. Each
library is imported on use. Arrays are shared with the given batch where the library permits it.
What a library cannot hold is refused, or left out and counted.

Example:
    >>> import numpy as np, rlio
    >>> batch = rlio.SampleBatch(
    ...     obs=np.arange(5.0), t=[0, 1, 2, 0, 1], eps_id=[7, 7, 7, 8, 8],
    ...     terminateds=[False, False, True, False, False])
    >>> trajectories(batch)
    Trajectories(starts=array([0, 3]), stops=array([3, 5]), terminated=array([ True, False]))
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.arrays import Column, equal_columns, to_numpy
from rlio.batch.columns import Columns, is_per_sequence
from rlio.batch.nested import leaves, map_structure
from rlio.batch.tensors import Dtypes
from rlio.dataset.dataset import Dataset
from rlio.errors import EndOfData, MissingColumn, OptionError, SchemaError, excerpt
from rlio.formats.minari.sink import about_episode, columns_of, id_of, kept_fields, spec_of
from rlio.formats.minari.spaces import space_to_minari
from rlio.replay.draws import Draw
from rlio.replay.store import ReplayStore
from rlio.resolve import read
from rlio.support.extras import needs
from rlio.support.options import check_choice

if TYPE_CHECKING:
    import d3rlpy
    import minari
    import tensordict
    import torch
    import torchrl.data
    from stable_baselines3.common.buffers import ReplayBuffer

__all__ = [
    "Filled",
    "Trajectories",
    "fill_sb3",
    "to_d3rlpy",
    "to_minari",
    "to_tensordict",
    "torchrl_storage",
    "trajectories",
]

logger: logging.Logger = logging.getLogger("rlio")

Array = NDArray[Any]

_ENDS = (Columns.TERMINATEDS, Columns.TRUNCATEDS)
#: Rows that `fill_sb3` reads at a time.
_ROWS = 1 << 14


# ---- d3rlpy ----


class Trajectories(NamedTuple):
    """The positions of the trajectories in a batch.

    Attributes:
        starts: First row of each, (N,) int64.
        stops: Row after the last of each, (N,) int64.
        terminated: Whether its last row is a terminal step, (N,) bool. The others were cut.
    """

    starts: Array
    stops: Array
    terminated: Array


def trajectories(batch: SampleBatch) -> Trajectories:
    """Find the trajectories of a batch whose rows are in order: each ends at a flag, or before a gap.

    Args:
        batch: Rows with ``t``, or with ``new_obs``, either of which proves the order; or whole episodes with
            ``seq_lens``, without padding.

    Raises:
        MissingColumn: Nothing proves the order of the rows.
        SchemaError: The rows of an episode do not follow each other, or are padded.
    """
    rows = len(batch)
    terminateds, truncateds = (_flags(batch, name) for name in _ENDS)
    ends = terminateds | truncateds
    if Columns.SEQ_LENS in batch:
        if batch.zero_padded:
            raise SchemaError("found padded sequences, expected episodes: unpad() first", column="seq_lens")
        ends[np.cumsum(to_numpy(batch[Columns.SEQ_LENS])) - 1] = True
    ids = [batch[name] for name in (Columns.EPS_ID, Columns.AGENT_INDEX, Columns.ENV_ID) if name in batch]
    keys = [to_numpy(column) for column in ids]
    for column in keys:
        ends[:-1] |= column[1:] != column[:-1]
    if Columns.T in batch:
        ends[:-1] |= np.diff(to_numpy(batch[Columns.T])) != 1
    elif Columns.NEXT_OBS in batch:
        _check_chain(batch, np.flatnonzero(~ends[:-1]))
    else:
        raise MissingColumn(
            "found neither t nor new_obs, expected one of them: without it nothing shows the order of rows",
            column=Columns.T,
        )
    if rows:
        ends[-1] = True
    stops = np.flatnonzero(ends) + 1
    starts = np.concatenate([[0], stops[:-1]]).astype(np.int64)[: len(stops)]
    if Columns.T in batch and Columns.EPS_ID in batch:
        _check_joined(keys, to_numpy(batch[Columns.T]), starts)
    return Trajectories(starts, stops, terminateds[stops - 1])


def _flags(batch: SampleBatch, name: str) -> Array:
    return to_numpy(batch[name]).astype(bool) if name in batch else np.zeros(len(batch), bool)


def _check_chain(batch: SampleBatch, rows: Array) -> None:
    if Columns.NEXT_OBS_VALID in batch:
        rows = rows[to_numpy(batch[Columns.NEXT_OBS_VALID]).astype(bool)[rows]]
    after = map_structure(lambda leaf: to_numpy(leaf)[rows], batch[Columns.NEXT_OBS])
    if not equal_columns(after, map_structure(lambda leaf: to_numpy(leaf)[rows + 1], batch[Columns.OBS])):
        raise SchemaError(
            "a new_obs is not the obs of the next row of its episode: pass the rows in order",
            column=Columns.NEXT_OBS,
        )


def _check_joined(keys: Sequence[Array], times: Array, starts: Array) -> None:
    """Refuse episodes whose rows alternate: `trajectories` cannot follow them."""
    lasts = np.append(starts[1:], len(times)) - 1
    stopped = {(*(key[row] for key in keys), times[row] + 1) for row in lasts}
    for row in starts:
        if times[row] and (*(key[row] for key in keys), times[row]) in stopped:
            raise SchemaError(
                f"row {row} continues an episode whose earlier rows are not directly before it: pass the "
                "rows of each episode together, or the rlio.Dataset",
                column=Columns.EPS_ID,
            )


class _Transitions:
    """A buffer for d3rlpy (its `BufferProtocol`) that counts transitions instead of listing them."""

    def __init__(self, episodes: Sequence[Any]) -> None:
        self.episodes = list(episodes)
        self._ends = list(accumulate(episode.transition_count for episode in episodes))

    @property
    def transition_count(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        return self.transition_count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, index)
        return self.episodes[number], index - (self._ends[number - 1] if number else 0)

    def append(self, episode: Any, index: int) -> None:
        """Add one transition; d3rlpy adds those of an episode in order."""
        if not self.episodes or episode is not self.episodes[-1]:
            self.episodes.append(episode)
            self._ends.append(len(self))
        self._ends[-1] += 1


def to_d3rlpy(
    data: Dataset | SampleBatch, *, policy: str | None = None, action_size: int | None = None
) -> d3rlpy.dataset.ReplayBuffer:
    """Return rows as d3rlpy's `ReplayBuffer` of episodes, which all of its algorithms train on.

    The arrays of a batch are shared. A data set is read into memory, each episode's rows one after the other.
    An episode that was truncated, or has no end, has ``terminated=False`` (a timeout). d3rlpy keeps no
    observation after the last step, so it does not train on the last step of such an episode; an episode of
    one such step is left out. A warning counts both. ``buffer.episodes`` are d3rlpy's `Episode` objects.

    Args:
        data: A data set; or rows in order, with ``t`` or ``new_obs``.
        policy: The policy whose rows to take, if the data set has several.
        action_size: Number of discrete actions. None: from the recorded spaces, else the largest plus one.

    Raises:
        MissingExtra: d3rlpy is not installed.
        MissingColumn: There are no actions or rewards, or nothing shows the order of rows.
        SchemaError: d3rlpy has no such observations or actions, or the rows are not in order.
        OptionError: There are several policies, and ``policy`` is None.
        EndOfData: There are no transitions.
    """
    with needs("d3rlpy", "d3rlpy"):
        from d3rlpy.constants import ActionSpace
        from d3rlpy.dataset import Episode, ReplayBuffer
    if isinstance(data, Dataset) and action_size is None:
        action_size = _number_of_actions(data, policy)
    batch = _episodes_of(data, policy) if isinstance(data, Dataset) else data
    observations = _d3rlpy_observations(_needed(batch, Columns.OBS))
    actions, discrete = _d3rlpy_actions(_needed(batch, Columns.ACTIONS))
    rewards = to_numpy(_needed(batch, Columns.REWARDS)).reshape(len(batch), 1)
    episodes = [
        Episode(
            tuple(part[start:stop] for part in observations)
            if isinstance(observations, tuple)
            else observations[start:stop],
            actions[start:stop],
            rewards[start:stop],
            bool(terminated),
        )
        for start, stop, terminated in zip(*(each.tolist() for each in trajectories(batch)), strict=True)
    ]
    kept = [episode for episode in episodes if episode.transition_count]
    if not kept:
        raise EndOfData(f"{len(batch)} rows hold no transition: no episode was terminated or has two steps")
    cut = sum(not episode.terminated for episode in kept)
    if cut or len(kept) < len(episodes):
        logger.warning(
            "d3rlpy does not train on the last step of %d episodes that were truncated or have no end; "
            "%d episodes of one step are left out",
            cut,
            len(episodes) - len(kept),
        )
    if discrete:
        size = int(actions.max()) + 1 if action_size is None else action_size
        if actions.min() < 0 or actions.max() >= size:
            raise SchemaError(
                f"found actions from {actions.min()} to {actions.max()}, expected 0 to {size - 1}",
                column=Columns.ACTIONS,
            )
    else:
        size = actions.shape[1]
    return ReplayBuffer(
        _Transitions(kept),
        observation_signature=kept[0].observation_signature,
        action_signature=kept[0].action_signature,
        reward_signature=kept[0].reward_signature,
        action_space=ActionSpace.DISCRETE if discrete else ActionSpace.CONTINUOUS,
        action_size=size,
    )


def _episodes_of(data: Dataset, policy: str | None) -> SampleBatch:
    names = (Columns.OBS, Columns.ACTIONS, Columns.REWARDS, *_ENDS, Columns.EPS_ID, Columns.T)
    present = {n for each in data.schemas.values() for rows in each.policies.values() for n in rows.columns}
    with ReplayStore.open(data, columns=[name for name in names if name in present]) as store:
        units = store.units(Draw(episodes=True, policy=policy))
        batch = units.batch(np.arange(units.count))
        rows = len(store) if policy is None else len(store.tables[policy])
    assert isinstance(batch, SampleBatch)  # Episodes are of one policy.
    if len(batch) != rows:
        raise SchemaError(
            f"{rows - len(batch)} of {rows} rows follow a gap in the recording of their episode, and d3rlpy "
            "needs every step: pass the rows as a SampleBatch to cut episodes there"
        )
    return batch


def _number_of_actions(data: Dataset, policy: str | None) -> int | None:
    spaces = data.policy_spaces
    found = spaces.get(policy) if policy is not None else next(iter(spaces.values()), None)
    space = None if found is None else found[1]
    return int(space.n) if isinstance(space, gym.spaces.Discrete) and space.start == 0 else None


def _needed(batch: Mapping[str, Any] | SampleBatch, name: str) -> Any:
    if name not in batch:
        raise MissingColumn(f"found the columns {excerpt(sorted(batch))}", column=name)
    return batch[name]


def _d3rlpy_observations(column: Column) -> Array | tuple[Array, ...]:
    parts = column if isinstance(column, tuple) else (column,)
    for part in parts:
        if isinstance(part, dict | tuple) or to_numpy(part).dtype.kind not in "biuf":
            raise SchemaError(
                "d3rlpy takes an array of numbers or a flat tuple of them: flatten the observations, for "
                "example with rlio.connectors.Flatten",
                column=Columns.OBS,
            )
    arrays = tuple(map(to_numpy, parts))
    arrays = tuple(part.reshape(len(part), 1) if part.ndim == 1 else part for part in arrays)
    return arrays if isinstance(column, tuple) else arrays[0]


def _d3rlpy_actions(column: Column) -> tuple[Array, bool]:
    """Return actions of two axes, and whether they are discrete."""
    actions = None if isinstance(column, dict | tuple) else to_numpy(column)
    if actions is None or actions.dtype.kind not in "iuf" or actions.ndim > 2:
        raise SchemaError("d3rlpy takes one integer, or one vector of floats, as an action", column="actions")
    actions = actions.reshape(len(actions), -1)
    discrete = actions.dtype.kind in "iu"
    if discrete and actions.shape[1] != 1:
        raise SchemaError(
            f"found {actions.shape[1]} integers an action (MultiDiscrete), expected one, or floats",
            column=Columns.ACTIONS,
        )
    return actions, discrete


# ---- tensordict and TorchRL ----


def to_tensordict(
    batch: SampleBatch,
    *,
    layout: Literal["rlio", "torchrl"] = "rlio",
    device: torch.device | str | None = None,
    dtype: Dtypes | None = None,
) -> tensordict.TensorDict:
    """Return a batch as a `TensorDict` of batch size ``[len(batch)]``; CPU tensors share the batch's memory.

    Args:
        batch: Steps in rows. Read-only arrays are copied once, as torch has no read-only tensors.
        layout: "rlio" keeps the names of columns. "torchrl" has the keys of TorchRL's losses:
            ``observation``, ``action`` and, below ``next``, ``observation``, and ``reward``, ``done``,
            ``terminated`` and ``truncated`` of shape (n, 1). Observations in a dict are nested below
            ``observation``. Other columns keep their names.
        device: Device of the tensors; None: the CPU.
        dtype: See `SampleBatch.to_torch`.

    Raises:
        MissingExtra: tensordict is not installed.
        MissingColumn: "torchrl" needs obs, new_obs, actions, rewards and terminateds.
        SchemaError: The rows are sequences; a column holds no numbers, or tuples; or, for "torchrl", a final
            observation is missing in a row that does not terminate.
    """
    with needs("tensordict", "torchrl"):
        from tensordict import TensorDict
    if not isinstance(batch, SampleBatch):
        raise SchemaError("found rows of several policies, expected a SampleBatch: batch.policies()[name]")
    check_choice("layout", layout, ("rlio", "torchrl"))
    for name in batch:
        if is_per_sequence(name):
            raise SchemaError("found sequences, expected steps: unpad() and delete this column", column=name)
    tensors = batch.to_torch(device, dtype=dtype)
    columns = {name: _as_dicts(name, column) for name, column in tensors.items()}
    if layout == "torchrl":
        columns = _torchrl_layout(columns)
    return TensorDict(columns, batch_size=[len(batch)], device=device)


def _as_dicts(name: str, column: Column) -> Any:
    if any(isinstance(part, np.ndarray) for _, part in leaves(column)):
        raise SchemaError(
            "a TensorDict holds numbers: delete this column, or omit it in columns=", column=name
        )
    if any(not isinstance(key, str) for path, _ in leaves(column) for key in path):
        raise SchemaError("a TensorDict has no tuples: make them dicts, or delete the column", column=name)
    return column


def _torchrl_layout(columns: dict[str, Any]) -> dict[str, Any]:
    needed = (Columns.OBS, Columns.NEXT_OBS, Columns.ACTIONS, Columns.REWARDS, Columns.TERMINATEDS)
    obs, new_obs, actions, rewards, terminated = (_needed(columns, name) for name in needed)
    others = {name: column for name, column in columns.items() if name not in needed}
    truncated = others.pop(Columns.TRUNCATEDS, None)
    valid = others.pop(Columns.NEXT_OBS_VALID, None)
    terminated = terminated.bool()
    truncated = terminated.new_zeros(terminated.shape) if truncated is None else truncated.bool()
    if valid is not None and bool((lost := ~valid.bool() & ~terminated).any()):
        raise SchemaError(
            f"{int(lost.sum())} rows do not terminate and have no new_obs, so a loss would bootstrap from "
            "zeros: read with filter=lambda batch: batch['new_obs_valid'] | batch['terminateds']",
            column=Columns.NEXT_OBS_VALID,
        )
    following = {
        "observation": new_obs,
        "reward": rewards.unsqueeze(-1),
        "done": (terminated | truncated).unsqueeze(-1),
        "terminated": terminated.unsqueeze(-1),
        "truncated": truncated.unsqueeze(-1),
    }
    taken = {"observation", "action", "next"} & others.keys()
    if taken:
        raise SchemaError("a column has a name that TorchRL gives a meaning: rename it", column=min(taken))
    return {"observation": obs, "action": actions, "next": following, **others}


def torchrl_storage(
    store: ReplayStore,
    *,
    policy: str | None = None,
    columns: Sequence[str] | None = None,
    layout: Literal["rlio", "torchrl"] = "torchrl",
) -> torchrl.data.Storage:
    """Return a TorchRL `Storage` over a store of recorded data, for any of TorchRL's buffers and samplers.

    Pass it with ``writer=torchrl.data.ImmutableDatasetWriter()`` and ``collate_fn=lambda rows: rows``. Item i
    is always the i-th recorded row, so priorities stay with their rows. To mix it with live rows, put both
    buffers into a ``torchrl.data.ReplayBufferEnsemble``.

    Args:
        store: Made by `rlio.ReplayStore.open`.
        policy: The policy whose rows to draw, if the data set has several.
        columns: Columns to draw; None: all. Objects (``infos``) must be omitted.
        layout: See `to_tensordict`.

    Raises:
        MissingExtra: torchrl is not installed.
        OptionError: The store is live, and its rows move; or it has several policies.
        SchemaError: See `to_tensordict`; raised as rows are drawn.
    """
    if store.live:
        raise OptionError(
            "found a live store, whose rows move, expected a store of recorded data: keep live rows "
            "in a buffer of TorchRL, and join both in a ReplayBufferEnsemble"
        )
    storage = _storage_class()
    units = store.units(Draw(policy=policy, columns=None if columns is None else frozenset(columns)))
    if policy is None and len(store.tables) > 1:
        raise OptionError(f"found the policies {excerpt(sorted(store.tables))}: pass policy=")
    return storage(units, layout)


@cache
def _storage_class() -> Any:
    with needs("torchrl", "torchrl"):
        import torch
        from torchrl.data import Storage

    class StoreStorage(Storage):  # type: ignore[misc, unused-ignore]  # torchrl may be absent
        """Items are the rows of a `rlio.ReplayStore`."""

        def __init__(self, units: Any, layout: Literal["rlio", "torchrl"]) -> None:
            super().__init__(units.count)
            self._units, self._layout = units, layout
            self.device = torch.device("cpu")

        def __len__(self) -> int:
            return int(self.max_size)

        def get(self, index: Any) -> Any:
            if isinstance(index, slice):
                numbers = np.arange(*index.indices(len(self)))
            else:
                numbers = np.asarray(index[0] if isinstance(index, tuple) else index)
            wanted = numbers.reshape(-1)
            if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self):
                raise IndexError(f"found {wanted.min()} to {wanted.max()}, expected 0 to {len(self) - 1}")
            found = to_tensordict(self._units.batch(wanted.astype(np.int64)), layout=self._layout)
            return found[0] if not numbers.ndim else found.reshape(*numbers.shape)

        def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
            raise OptionError(
                "recorded rows do not change: pass writer=torchrl.data.ImmutableDatasetWriter()"
            )

        def state_dict(self) -> dict[str, Any]:
            return {"rows": len(self)}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            if state_dict.get("rows") != len(self):
                raise OptionError(f"the state has {state_dict.get('rows')} rows, expected {len(self)}")

        def _empty(self) -> None:
            raise OptionError("recorded rows cannot be removed: make a buffer with another storage")

    return StoreStorage


# ---- Stable-Baselines3 ----


class Filled(NamedTuple):
    """What `fill_sb3` did.

    Attributes:
        rows: Rows that were added.
        without_new_obs: Rows left out because they do not terminate and their final observation is missing.
        rest: Rows left out at the end, as the buffer takes ``n_envs`` at a time.
    """

    rows: int
    without_new_obs: int
    rest: int


def fill_sb3(buffer: ReplayBuffer, data: Dataset | SampleBatch, *, policy: str | None = None) -> Filled:
    """Add recorded rows to a replay buffer of Stable-Baselines3, for example to ``model.replay_buffer``.

    A truncated row is a timeout, which SB3 bootstraps from (``handle_timeout_termination``). Actions of a Box
    are scaled to -1 to 1, as SB3's algorithms store them; 0 where the Box has one value only.
    Rows are copied once, into the buffer's arrays.

    Args:
        buffer: A `ReplayBuffer` or `DictReplayBuffer` with room for all rows.
        data: Rows with obs, new_obs, actions, rewards and terminateds. Actions are those given to the
            environment.
        policy: The policy whose rows to take, if the data set has several.

    Returns:
        What was added, and what was left out. The latter is logged, too.

    Raises:
        MissingExtra: Stable-Baselines3 is not installed.
        MissingColumn: A column is absent.
        OptionError: The buffer is of another class or has too little room, or there are several policies.
        SchemaError: Observations or actions do not fit the buffer's spaces, or the rows are sequences. Rows
            before an error may have been written, but the buffer does not count them.
    """
    with needs("stable-baselines3", "sb3"):
        from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
    if type(buffer) not in (ReplayBuffer, DictReplayBuffer) or buffer.optimize_memory_usage:
        raise OptionError(
            f"found {type(buffer).__name__} with optimize_memory_usage={buffer.optimize_memory_usage}, "
            "expected ReplayBuffer or DictReplayBuffer with False: others need the order of episodes"
        )
    room = 0 if buffer.full else (buffer.buffer_size - buffer.pos) * buffer.n_envs
    lost = row = 0
    first = buffer.pos * buffer.n_envs
    for batch in _rows_of(data, policy):
        kept = _usable(batch)
        lost += len(batch) - len(kept)
        if row + len(kept) > room:
            raise OptionError(f"more rows than the {room} free places: raise buffer_size")
        _write(buffer, first + row, kept)
        row += len(kept)
    rest = row % buffer.n_envs
    if lost or rest:
        logger.warning("left out %d rows without a final observation, and %d at the end", lost, rest)
    buffer.pos += row // buffer.n_envs
    if buffer.pos == buffer.buffer_size:
        buffer.pos, buffer.full = 0, True
    return Filled(row - rest, lost, rest)


def _rows_of(data: Dataset | SampleBatch, policy: str | None) -> Iterator[SampleBatch]:
    if isinstance(data, SampleBatch):
        if any(map(is_per_sequence, data)):
            raise SchemaError("found sequences, expected steps: unpad() and delete seq_lens and state_in_*")
        yield data
        return
    policies = {pid for schema in data.schemas.values() for pid in schema.policies}
    if policy is None and len(policies) > 1:
        raise OptionError(f"found the policies {excerpt(sorted(policies))}: pass policy=")
    with read(data, batch_size=_ROWS, epochs=1, policy=policy) as reader:
        for batch in reader:
            assert isinstance(batch, SampleBatch)  # One policy.
            yield from _rows_of(batch, None)


def _usable(batch: SampleBatch) -> SampleBatch:
    for name in (Columns.OBS, Columns.NEXT_OBS, Columns.ACTIONS, Columns.REWARDS, Columns.TERMINATEDS):
        _needed(batch, name)
    if Columns.NEXT_OBS_VALID not in batch:
        return batch
    usable = _flags(batch, Columns.NEXT_OBS_VALID) | _flags(batch, Columns.TERMINATEDS)
    return batch if usable.all() else batch[np.flatnonzero(usable)]


def _write(buffer: ReplayBuffer, first: int, batch: SampleBatch) -> None:
    terminateds, truncateds = (_flags(batch, name) for name in _ENDS)
    timeouts = truncateds & ~terminateds & buffer.handle_timeout_termination
    for name, place, column in (
        (Columns.OBS, buffer.observations, batch[Columns.OBS]),
        (Columns.NEXT_OBS, buffer.next_observations, batch[Columns.NEXT_OBS]),
        (Columns.ACTIONS, buffer.actions, _sb3_actions(buffer, batch[Columns.ACTIONS])),
        (Columns.REWARDS, buffer.rewards, batch[Columns.REWARDS]),
        (Columns.TERMINATEDS, buffer.dones, terminateds | truncateds),
        (Columns.TRUNCATEDS, buffer.timeouts, timeouts),
    ):
        targets, values = (place, column) if isinstance(place, dict) else ({"": place}, {"": column})
        if not isinstance(values, dict) or targets.keys() != values.keys():
            raise SchemaError(f"the buffer has the parts {excerpt(sorted(targets))}", column=name)
        for key, target in targets.items():
            _put(target, first, values[key], name)


def _put(target: Array, first: int, column: Column, name: str) -> None:
    """Write rows to an array of shape (buffer_size, n_envs, ...), row by row."""
    values = None if isinstance(column, dict | tuple) else to_numpy(column)
    shape = target.shape[2:]
    if values is not None and values.ndim == 1 and math.prod(shape) == 1:
        values = values.reshape(-1, *shape)
    if (
        values is None
        or values.shape[1:] != shape
        or not np.can_cast(values.dtype, target.dtype, "same_kind")
    ):
        found = "parts" if values is None else f"{values.dtype} of shape {values.shape[1:]}"
        raise SchemaError(
            f"found {found}, expected {target.dtype} of shape {shape}, as in the buffer", column=name
        )
    target.reshape(-1, *shape)[first : first + len(values)] = values


def _sb3_actions(buffer: ReplayBuffer, column: Column) -> Array:
    space = buffer.action_space
    actions = None if isinstance(column, dict | tuple) else to_numpy(column)
    if actions is None or (len(actions) and math.prod(actions.shape[1:]) != buffer.action_dim):
        raise SchemaError(f"the buffer's actions are {space}", column=Columns.ACTIONS)
    rows = actions.reshape(len(actions), -1)
    low, high = (
        (space.low.reshape(-1), space.high.reshape(-1))
        if isinstance(space, gym.spaces.Box)
        else (0, space.n - 1)
        if isinstance(space, gym.spaces.Discrete)
        else (rows.min(initial=0), rows.max(initial=0))
    )
    outside = int((~((rows >= low) & (rows <= high))).any(axis=1).sum())  # NaN lies outside.
    if outside or not np.isfinite(np.asarray(high) - low).all():
        raise SchemaError(
            f"{outside} actions are outside {space}, or it has no bounds: pass the actions that the "
            "environment received, such as clipped ones",
            column=Columns.ACTIONS,
        )
    if isinstance(space, gym.spaces.Box):
        constant = low == high
        rows = np.where(constant, 0.0, 2.0 * ((rows - low) / np.where(constant, 1.0, high - low)) - 1.0)
    return rows


# ---- Minari ----


def to_minari(data: Dataset) -> minari.MinariDataset:
    """Return a data set as Minari's `MinariDataset`, which reads an episode when you access it.

    It is read-only. Episode i is ``data.episode(i)``, with one observation more than steps, and without
    infos. ``minari.split_dataset`` opens a folder of Minari again, so it does not accept this data set: use
    ``minari.MinariDataset(view.storage, numbers)``. For one thread at a time.

    Args:
        data: Rows of one policy, with recorded spaces. The environment's spec is known if all writers
            recorded the same environment. Minari's own fields (author, algorithm_name, description, ...) are
            those in the provenance (``extra``), if all writers have the same.

    Raises:
        MissingExtra: Minari is not installed.
        OptionError: There are several policies.
        SchemaError: No spaces were recorded, or Minari has no such space. As an episode is read: its final
            observation is missing, or its columns do not fit the spaces.
    """
    storage = _minari_class()
    if len(data.columns) > 1:
        raise OptionError(
            f"found the policies {excerpt(sorted(data.columns))}, expected one: convert one of them with "
            "rlio.convert(..., policy=...), and open the result",
            uri=data.uri,
        )
    for space in data.spaces:
        space_to_minari(space)  # Raises.
    from minari import MinariDataset

    return MinariDataset(storage(data))


@cache
def _minari_class() -> Any:
    with needs("minari", "minari"):
        import minari
        from minari.dataset.minari_storage import MinariStorage

    def refuse(*_: Any, **__: Any) -> Any:
        raise OptionError(
            "a view of a data set of rlio is read-only: record with rlio, or convert it with "
            "rlio.convert(..., to='minari')"
        )

    class DatasetStorage(MinariStorage):  # type: ignore[misc, unused-ignore]  # minari may be absent
        """Episodes are those of a `rlio.Dataset`."""

        #: In which `minari.combine_datasets` writes what it copies.
        FORMAT = "hdf5"
        jpeg_encoding = False

        def __init__(self, data: Dataset) -> None:
            super().__init__(Path(data.uri), *data.spaces)
            self._data = data
            firsts = {segment.ref.writer: segment for segment in reversed(data.segments)}
            recorded = [data.open_shard(segment).provenance for segment in firsts.values()]
            fields = _common(
                [{"env": each.get("env"), **kept_fields(each.get("extra", {}))} for each in recorded]
            )
            env = fields.pop("env", None)
            self._about = {
                **fields,
                "dataset_id": id_of(data.storage),
                "minari_version": minari.__version__,
                "total_episodes": data.episode_count,
                "total_steps": len(data),
                "observation_space": self.observation_space,
                "action_space": self.action_space,
                "jpeg_encoding": False,
                **spec_of(env if isinstance(env, str) else None),
            }

        @property
        def metadata(self) -> dict[str, Any]:
            return dict(self._about)

        def get_size(self) -> float:
            return round(self._data.bytes() / 1e6, 1)

        def get_episode_metadata(self, episode_indices: Any) -> Iterator[dict[str, Any]]:
            for number in map(int, episode_indices):
                yield about_episode(number, self._data.episode(number))

        def get_episodes(self, episode_indices: Any) -> Iterator[dict[str, Any]]:
            spaces = self.observation_space, self.action_space
            for number in map(int, episode_indices):
                advice = (
                    f"leave out episode {number} with minari.MinariDataset(view.storage, numbers), or "
                    "rlio.convert(..., to='minari', options={'final_obs': 'repeat'}) or 'drop-step'"
                )
                columns = columns_of(self._data.episode(number), spaces, advice=advice)
                texts = {name: map_structure(_text_as_list, columns[name]) for name in _MINARI_SPACED}
                yield {"id": number, "infos": {}, **columns, **texts}

        _create = classmethod(refuse)
        update_metadata = update_episode_metadata = update_episodes = refuse

    return DatasetStorage


_MINARI_SPACED = ("observations", "actions")


def _common(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entries that all have."""
    first = each[0] if each else {}
    return {name: value for name, value in first.items() if all(one.get(name) == value for one in each)}


def _text_as_list(leaf: Array) -> Any:
    """Return texts as lists, as Minari stores them."""
    return leaf.tolist() if leaf.dtype.kind in "OU" else leaf
