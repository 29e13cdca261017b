"""`MultiAgentBatch`: the rows of several policies, and their number of environment steps.

Import it from `rlio.batch` or `rlio`.

Example:
    >>> from rlio.batch import SampleBatch
    >>> left = SampleBatch(eps_id=[0, 0, 0], t=[0, 1, 2], actions=[1, 2, 3])
    >>> right = SampleBatch(eps_id=[0, 0], t=[1, 2], actions=[7, 8])
    >>> batch = MultiAgentBatch({"left": left, "right": right}, 3)
    >>> [(part.env_steps(), part.agent_steps()) for part in batch.timeslices(2)]
    [(2, 3), (1, 2)]
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import numpy as np

from rlio.batch.arrays import joint_dtype
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns
from rlio.batch.join import Unlike, join
from rlio.batch.rows import generator, sort_by_part, steps
from rlio.batch.shown import column_table
from rlio.batch.tensors import Dtypes
from rlio.errors import MissingColumn, OptionError, SchemaError, excerpt
from rlio.support.html import Html, panel
from rlio.support.words import counted

if TYPE_CHECKING:
    import torch

    from rlio.batch.sample_batch import SampleBatch

    _Order: TypeAlias = tuple[str, dict[str, SampleBatch], dict[str, np.ndarray], int]

__all__ = [
    "MAX_ENV_STEPS",
    "MultiAgentBatch",
    "check_batch",
    "concat_samples_into_ma_batch",
    "episode_numbers",
    "step_numbers",
]


#: The most environment steps of a batch.
MAX_ENV_STEPS = 2**48


class MultiAgentBatch:
    """Policy id -> `SampleBatch`, with the interface of a mapping; ``len(batch)`` is the environment steps.

    Policies may have different columns and rows. Rows of different policies belong to the same environment
    step if their ``eps_id`` and ``t`` are equal.

    Args:
        policy_batches: The rows of each policy; the mapping is copied, the batches are not.
        env_steps: Number of environment steps of the rows. It is not checked against the rows, because a
            batch may hold only some of the agents.

    Raises:
        SchemaError: A value is not a SampleBatch, a policy id is not a str, or ``env_steps`` is negative or
            over 2^48.
    """

    __slots__ = ("__weakref__", "_env_steps", "_order", "policy_batches")

    def __init__(self, policy_batches: Mapping[str, SampleBatch], env_steps: int) -> None:
        for policy_id, batch in policy_batches.items():
            if not isinstance(policy_id, str):
                raise SchemaError(f"found the policy id {excerpt(policy_id)}: a policy id is a str")
            if not _is_sample_batch(batch):
                raise SchemaError(
                    f"policy {excerpt(policy_id)} has a {type(batch).__name__}, expected a SampleBatch"
                )
        if not 0 <= env_steps <= MAX_ENV_STEPS:
            raise SchemaError(f"env_steps={env_steps}: expected a number of steps, 0 to {MAX_ENV_STEPS}")
        self.policy_batches: dict[str, SampleBatch] = dict(policy_batches)
        self._env_steps = int(env_steps)
        # For a part cut from a batch: (unit, its policy batches, the unit number of each row, number of
        # units).
        self._order: _Order | None = None

    # ---- the mapping ----

    def __getitem__(self, policy_id: str) -> SampleBatch:
        try:
            return self.policy_batches[policy_id]
        except KeyError:
            known = ", ".join(map(excerpt, self.policy_batches)) or "none"
            raise MissingColumn(f"there is no policy {excerpt(policy_id)}; the batch has {known}") from None

    def get(self, policy_id: str, default: SampleBatch | None = None) -> SampleBatch | None:
        """The rows of ``policy_id``, or ``default``."""
        return self.policy_batches.get(policy_id, default)

    def __contains__(self, policy_id: object) -> bool:
        return policy_id in self.policy_batches

    def __iter__(self) -> Iterator[str]:
        return iter(self.policy_batches)

    def policies(self) -> Mapping[str, SampleBatch]:
        """Policy id -> its rows, as in a `SampleBatch`; not a copy."""
        return self.policy_batches

    def keys(self) -> KeysView[str]:
        """The policy ids."""
        return self.policy_batches.keys()

    def values(self) -> ValuesView[SampleBatch]:
        """The batches of the policies."""
        return self.policy_batches.values()

    def items(self) -> ItemsView[str, SampleBatch]:
        """Policy ids and batches."""
        return self.policy_batches.items()

    def equals(self, other: object) -> bool:
        """Whether ``other`` has the same env steps, policies and rows; see `SampleBatch.equals`."""
        return (
            isinstance(other, MultiAgentBatch)
            and self._env_steps == other._env_steps
            and self.policy_batches.keys() == other.policy_batches.keys()
            and all(batch.equals(other.policy_batches[key]) for key, batch in self.policy_batches.items())
        )

    def __repr__(self) -> str:
        inner = ", ".join(f"{excerpt(key)}: {batch!r}" for key, batch in self.policy_batches.items())
        return f"{type(self).__name__}({self._env_steps} env steps: {{{inner}}})"

    def _repr_html_(self) -> str:
        parts = (
            Html(panel(f"{policy}: {counted(batch.count, 'step')}", column_table(dict(batch.items()))))
            for policy, batch in self.policy_batches.items()
        )
        return panel(f"{type(self).__name__}: {counted(self._env_steps, 'env step')}", *parts)

    # ---- sizes ----

    @property
    def count(self) -> int:
        """Environment steps, as given."""
        return self._env_steps

    def __len__(self) -> int:
        return self._env_steps

    def env_steps(self) -> int:
        """Environment steps, as given."""
        return self._env_steps

    def agent_steps(self) -> int:
        """Steps of all policies together."""
        return sum(batch.count for batch in self.policy_batches.values())

    def size_bytes(self) -> int:
        """Memory of all columns in bytes."""
        return sum(batch.size_bytes() for batch in self.policy_batches.values())

    # ---- rows ----

    def timeslices(self, k: int) -> list[Self]:
        """Cut into parts of ``k`` environment steps; the last part may be shorter.

        All rows of one (eps_id, t) are in the same part. Steps are in the order of `step_numbers`, and a
        policy's rows keep their order within a part. A part omits policies that have no rows in it. Parts are
        views if a policy's rows are in step order, else copies. Sequences that extend over several parts are
        cut, and each piece has the state at its beginning.

        Raises:
            MissingColumn: A policy has no ``eps_id`` or no ``t``.
            SchemaError: A cut falls into a sequence without the ``state_out_k`` from which the rest
                continues.
        """
        if k < 1:
            raise OptionError(f"timeslices(k={k}): expected a number of environment steps, at least 1")
        numbers, total = step_numbers(self)
        return self._cut(numbers, [*range(0, total, k), total] if total else [0])

    def _cut(self, numbers: Mapping[str, np.ndarray], ends: list[int], unit: str = "steps") -> list[Self]:
        """The parts between consecutive unit numbers ``ends``; each part remembers the order of its rows."""
        parts: list[dict[str, SampleBatch]] = [{} for _ in ends[1:]]
        orders: list[dict[str, np.ndarray]] = [{} for _ in ends[1:]]
        for policy_id, batch in self.policy_batches.items():
            number = numbers[policy_id]
            part = np.searchsorted(ends, number, side="right")
            if Columns.SEQ_LENS in batch and not batch.zero_padded:
                batch, order = sort_by_part(batch, part)
                part, number = part[order], number[order]
            elif np.any(part[1:] < part[:-1]):
                order = np.argsort(part, kind="stable")
                batch, part, number = batch[order], part[order], number[order]
            at = np.searchsorted(part, np.arange(1, len(ends) + 1))
            for i, (a, b) in enumerate(zip(at[:-1].tolist(), at[1:].tolist(), strict=True)):
                if b > a:
                    parts[i][policy_id] = batch[a:b]
                    orders[i][policy_id] = number[a:b] - ends[i]
        made = []
        for rows, own, start, stop in zip(parts, orders, ends[:-1], ends[1:], strict=True):
            made.append(type(self)(rows, stop - start))
            made[-1]._order = (unit, dict(made[-1].policy_batches), own, stop - start)
        return made

    def _remembered_order(self, unit: str) -> tuple[dict[str, np.ndarray], int] | None:
        """The unit numbers that `_cut` assigned to the rows, if the rows are unchanged; else None.

        New numbers could give a part another order than it had within the whole: a policy may take part in
        all steps of the part, but not in all steps of the whole. A batch cut bit by bit would then differ
        from one cut at once, and resuming relies on equal cuts.
        """
        if self._order is None or self._order[0] != unit:
            return None
        _, parts, numbers, total = self._order
        same = parts.keys() == self.policy_batches.keys() and all(
            self.policy_batches[policy_id] is part and part.count == len(numbers[policy_id])
            for policy_id, part in parts.items()
        )
        return (dict(numbers), total) if same else None

    # ---- transformations: each gives a new batch ----

    @staticmethod
    def wrap_as_needed(
        policy_batches: Mapping[str, SampleBatch], env_steps: int
    ) -> SampleBatch | MultiAgentBatch:
        """The SampleBatch itself if ``default_policy`` is the only policy, else a `MultiAgentBatch`."""
        if list(policy_batches) == [DEFAULT_POLICY_ID]:
            return policy_batches[DEFAULT_POLICY_ID]
        return MultiAgentBatch(policy_batches, env_steps)

    @staticmethod
    def concat_samples(
        samples: Sequence[SampleBatch | MultiAgentBatch], *, columns: Unlike = "error"
    ) -> MultiAgentBatch:
        """All of ``samples`` joined; see `rlio.batch.concat_samples_into_ma_batch`."""
        return concat_samples_into_ma_batch(samples, columns=columns)

    def _each(self, fn: Callable[[SampleBatch], SampleBatch]) -> Self:
        return type(self)({key: fn(batch) for key, batch in self.policy_batches.items()}, self._env_steps)

    def copy(self, shallow: bool = False) -> Self:
        """A copy with its own arrays; if ``shallow``, with shared arrays."""
        return self._each(lambda batch: batch.copy(shallow))

    def concat(self, other: SampleBatch | MultiAgentBatch) -> MultiAgentBatch:
        """This batch and ``other`` joined; see `rlio.batch.concat_samples_into_ma_batch`."""
        return concat_samples_into_ma_batch([self, other])

    def shuffle(self, seed: int | np.random.Generator | None = None) -> Self:
        """Each policy's rows in their own random order; see `SampleBatch.shuffle`."""
        rng = generator(seed)
        return self._each(lambda batch: batch.shuffle(rng))

    def to_torch(
        self,
        device: torch.device | str | None = None,
        *,
        dtype: Dtypes | None = None,
        pin_memory: bool = False,
        non_blocking: bool = False,
    ) -> dict[str, dict[str, Any]]:
        """Policy id -> tensors; see `SampleBatch.to_torch`."""
        return {
            key: batch.to_torch(device, dtype=dtype, pin_memory=pin_memory, non_blocking=non_blocking)
            for key, batch in self.policy_batches.items()
        }

    def to_device(
        self,
        device: torch.device | str,
        framework: Literal["torch"] = "torch",
        *,
        dtype: Dtypes | None = None,
        pin_memory: bool = False,
        non_blocking: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> Self:
        """A batch with tensors for columns; see `SampleBatch.to_device`."""
        copy: dict[str, Any] = {
            "dtype": dtype,
            "pin_memory": pin_memory,
            "non_blocking": non_blocking,
            "stream": stream,
        }
        return self._each(lambda batch: batch.to_device(device, framework, **copy))

    def compress(self, bulk: bool = False, columns: Iterable[str] = ("obs", "new_obs")) -> Self:
        """A batch with ``columns`` of every policy compressed; see `SampleBatch.compress`."""
        names = columns if isinstance(columns, str) else list(columns)
        return self._each(lambda batch: batch.compress(bulk, names))

    def decompress_if_needed(self, columns: Iterable[str] | None = None) -> Self:
        """The inverse of `compress`."""
        names = columns if columns is None or isinstance(columns, str) else list(columns)
        return self._each(lambda batch: batch.decompress_if_needed(names))

    def as_multi_agent(self) -> Self:
        """This batch itself."""
        return self


def concat_samples_into_ma_batch(
    samples: Sequence[SampleBatch | MultiAgentBatch], *, columns: Unlike = "error"
) -> MultiAgentBatch:
    """Join batches policy by policy; env steps are summed.

    A SampleBatch counts as ``default_policy``. See `concat_samples` for columns, dtypes and errors.
    """
    parts: dict[str, list[SampleBatch]] = {}
    env_steps = 0
    for i, sample in enumerate(samples):
        check_batch(i, sample)
        env_steps += sample.env_steps()
        for policy_id, batch in sample.policies().items():
            parts.setdefault(policy_id, []).append(batch)
    joined = {policy_id: join(own, columns=columns) for policy_id, own in parts.items()}
    return MultiAgentBatch(joined, env_steps)


def check_batch(i: int, sample: object) -> None:
    """Check that ``sample``, number ``i`` of some batches, is a batch of either kind."""
    if not isinstance(sample, MultiAgentBatch) and not _is_sample_batch(sample):
        raise SchemaError(
            f"batch {i} is a {type(sample).__name__}, expected a SampleBatch or a MultiAgentBatch: "
            f"{excerpt(sample)}"
        )


def _is_sample_batch(value: object) -> bool:
    # By a method, because the module of SampleBatch imports this one.
    return hasattr(value, "_map_rows")


def step_numbers(batch: MultiAgentBatch) -> tuple[dict[str, np.ndarray], int]:
    """Number the environment steps of ``batch``, its distinct (eps_id, t), from 0.

    The order is that of the first policy that takes part in every step and whose ``t`` only increases within
    each episode, because rows may also come agent by agent. Without such a policy, episodes follow each other
    in the order of their first appearance, policy by policy, and their steps by ``t``. The order does not
    depend on the values of the ids. If only one policy has rows, and it lacks ``eps_id`` or ``t``, each row
    is a step.

    Returns:
        For each policy, the step number of each row, (rows,) int64; and the number of steps.

    Raises:
        MissingColumn: There are several policies, and one has no ``eps_id`` or no ``t``.
        SchemaError: The dtypes of ids or times differ between policies.
    """
    filled = {policy_id: rows for policy_id, rows in batch.items() if rows.count}
    numbers = {policy_id: np.zeros(0, np.int64) for policy_id in batch}
    if not filled:
        return numbers, 0
    if len(filled) == 1:
        ((policy_id, rows),) = filled.items()
        if Columns.EPS_ID not in rows or Columns.T not in rows:
            return numbers | {policy_id: np.arange(rows.count)}, rows.count
    episodes = _codes(_joined(filled, Columns.EPS_ID))
    times = _codes(_joined(filled, Columns.T), by_value=True)
    # One integer for each (episode, time); each factor is at most the number of rows.
    span = int(times.max()) + 1
    unique, number = np.unique(episodes * span + times, return_inverse=True)
    same_episode = np.diff(unique // span) == 0
    bounds = np.cumsum([rows.count for rows in filled.values()])[:-1]
    for part in np.split(number, bounds):
        present, first = np.unique(part, return_index=True)
        if len(present) == len(unique) and (np.diff(first)[same_episode] > 0).all():
            number = _ranks(first)[number]
            break
    return numbers | dict(zip(filled, np.split(number, bounds), strict=True)), len(unique)


def episode_numbers(batch: MultiAgentBatch) -> tuple[dict[str, np.ndarray], int]:
    """Number the episodes of ``batch``, its distinct ``eps_id``, from 0, in the order of their first steps.

    Returns:
        For each policy, the episode number of each row; and the number of episodes.

    Raises:
        MissingColumn: A policy has no ``eps_id`` (or no ``t``, if there are several policies).
    """
    filled = {policy_id: rows for policy_id, rows in batch.items() if rows.count}
    numbers, _ = step_numbers(batch)
    if not filled:
        return numbers, 0
    episodes = _codes(_joined(filled, Columns.EPS_ID))
    first = np.full(int(episodes.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, episodes, np.concatenate([numbers[policy_id] for policy_id in filled]))
    bounds = np.cumsum([rows.count for rows in filled.values()])[:-1]
    return numbers | dict(zip(filled, np.split(_ranks(first)[episodes], bounds), strict=True)), len(first)


def _ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each of the distinct ``values`` in sorted order."""
    ranks = np.empty(len(values), np.int64)
    ranks[np.argsort(values)] = np.arange(len(values))
    return ranks


def _joined(filled: Mapping[str, SampleBatch], column: str) -> np.ndarray:
    """The column of all policies, concatenated."""
    parts = []
    for policy_id, rows in filled.items():
        if column not in rows:
            raise MissingColumn(
                f"policy {excerpt(policy_id)} lacks this column: eps_id and t identify environment steps",
                column=column,
            )
        values = steps(rows, rows._columns[column])
        if values.ndim != 1:
            raise SchemaError(
                f"policy {excerpt(policy_id)}: shape {values.shape}, expected 1-D", column=column
            )
        parts.append(values)
    dtype = joint_dtype([part.dtype for part in parts])
    if dtype is None:
        found = ", ".join(sorted({str(part.dtype) for part in parts}))
        raise SchemaError(f"the policies' {column} are {found}: expected one dtype", column=column)
    return np.concatenate(parts, dtype=dtype)


def _codes(values: np.ndarray, *, by_value: bool = False) -> np.ndarray:
    """Numbers from 0 for the distinct ``values``, in the order of first appearance or of their values."""
    if values.dtype == object:
        # Objects (str ids) may have no common order, and a dict needs none.
        numbers: dict[Any, int] = {}
        return np.fromiter((numbers.setdefault(v, len(numbers)) for v in values), np.int64, len(values))
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    return inverse if by_value else _ranks(first)[inverse]
