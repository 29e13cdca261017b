"""`BatchBuilder`, `MultiAgentBatchBuilder`: make batches of rows that come one by one, from any source.

Example:
    >>> builder = BatchBuilder()
    >>> for t in range(3):
    ...     builder.add_values(obs=[float(t), 0.0], actions=t % 2, rewards=1.0, eps_id=7, t=t)
    >>> batch = builder.build_and_reset()
    >>> batch["obs"].dtype, batch["obs"].shape, batch["unroll_id"].tolist(), len(builder)
    (dtype('float32'), (3, 2), [0, 0, 0], 0)
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from rlio.batch import MultiAgentBatch, SampleBatch, concat_samples
from rlio.batch.arrays import object_column
from rlio.batch.columns import Columns
from rlio.batch.nested import leaves, map_structure, path_text, unflatten
from rlio.batch.ragged import item_type
from rlio.errors import OptionError, SchemaError, excerpt
from rlio.schemas.json_values import check_value

__all__ = ["BatchBuilder", "MultiAgentBatchBuilder", "Postprocess"]

#: Changes an agent's trajectory, given the other agents' trajectories: agent id -> (policy id, rows).
Postprocess = Callable[[SampleBatch, dict[Any, tuple[str, SampleBatch]]], SampleBatch]


class BatchBuilder:
    """Collects rows into one `SampleBatch`. One thread at a time may call it.

    Every row has the columns of the first row. A number without a dtype becomes int64, bool or float32 (the
    precision of policies), also in lists; NumPy values keep their dtype. Dicts and tuples are nested columns;
    ``infos``, strings and None are objects.

    Args:
        unroll_ids: Whether to add a column ``unroll_id``, unless the rows have one: the same number for the
            rows of one episode (``eps_id``) in one batch. This builder never reuses a number.
    """

    def __init__(self, *, unroll_ids: bool = True) -> None:
        self._rows: list[dict[str, Any]] = []
        self._batches: list[SampleBatch] = []
        self._batched = 0
        self._unroll = 0 if unroll_ids else None

    def __len__(self) -> int:
        return self._batched + len(self._rows)

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self)

    def add_values(self, **values: Any) -> None:
        """Add a row.

        Args:
            values: Values by column; tensors become arrays. All values are copied.

        Raises:
            SchemaError: The columns differ from those of the previous row, or a value has no stored form,
                such as an enum; nothing is added.
        """
        if self._rows and values.keys() != self._rows[0].keys():
            raise SchemaError(
                f"this row has the columns {excerpt(sorted(values))}, but the rows before have "
                f"{excerpt(sorted(self._rows[0]))}: give every row the same columns"
            )
        row = {}
        for name, value in values.items():
            if type(value) not in _PLAIN:
                _check(value, name)
                # A walk through all values at once takes twice the time of a row of numbers.
                value = np.array(value) if type(value) is np.ndarray else map_structure(_copy_leaf, value)
            row[name] = value
        self._rows.append(row)

    def add_batch(self, batch: SampleBatch) -> None:
        """Add the rows of a batch; they are copied only in `build_and_reset`."""
        self._close_rows()
        self._batches.append(batch)
        self._batched += len(batch)

    def _close_rows(self) -> None:
        """Make a batch of the rows that were added one by one."""
        if self._rows:
            columns = {name: _column(name, [row[name] for row in self._rows]) for name in self._rows[0]}
            self._batches.append(SampleBatch(columns))
            self._batched += len(self._rows)
            self._rows = []

    def _joined(self) -> SampleBatch:
        """The rows so far, in order, as one batch with its own memory; they stay in the builder.

        Raises:
            SchemaError: The values of a column do not fit together.
        """
        self._close_rows()
        return concat_samples(self._batches)

    def build_and_reset(self) -> SampleBatch:
        """Return the rows so far, in order, and empty the builder.

        Returns:
            A batch with its own memory. Without rows it is empty and has no columns.

        Raises:
            SchemaError: The values of a column do not fit together; the rows stay.
        """
        batch = self._joined()
        self._batches, self._batched = [], 0
        if self._unroll is not None and len(batch) and Columns.UNROLL_ID not in batch:
            pieces = np.zeros(len(batch), np.int64)
            if Columns.EPS_ID in batch:
                eps_id = batch[Columns.EPS_ID]
                pieces[1:] = np.cumsum(eps_id[1:] != eps_id[:-1])
            batch[Columns.UNROLL_ID] = self._unroll + pieces
            self._unroll += int(pieces[-1]) + 1
        return batch


class MultiAgentBatchBuilder:
    """Collects rows of several agents into one `MultiAgentBatch`. One thread at a time may call it.

    Args:
        postprocess: Called with each agent's trajectory, in the order in which agents appeared, before the
            trajectory becomes part of a batch. It sees rows of other agents as recorded. None: no
            postprocessing. Each trajectory gets its own ``unroll_id``, unless it has one.
    """

    def __init__(self, postprocess: Postprocess | None = None) -> None:
        self._postprocess = postprocess
        #: Agent of the running episode -> its policy and rows.
        self._agents: dict[Any, tuple[str, BatchBuilder]] = {}
        self._policies: dict[str, BatchBuilder] = {}
        self._env_steps = 0
        self._unrolls = itertools.count()

    @property
    def total(self) -> int:
        """Number of rows, of all agents together."""
        return sum(len(builder) for _, builder in self._agents.values()) + sum(
            map(len, self._policies.values())
        )

    @property
    def env_steps(self) -> int:
        """Steps of the environment: the number of `count_step` calls."""
        return self._env_steps

    @property
    def has_pending_agent_data(self) -> bool:
        """Whether rows wait for `postprocess_batch_so_far`."""
        return any(len(builder) for _, builder in self._agents.values())

    def add_values(self, agent_id: Any, policy_id: str, **values: Any) -> None:
        """Add a row of an agent.

        Args:
            agent_id: The agent's id; any hashable.
            policy_id: The policy that acts for the agent, the same for the whole episode.
            values: Values by column, as for `BatchBuilder.add_values`.

        Raises:
            OptionError: The agent had another policy earlier in this episode.
            SchemaError: The columns differ from those of the agent's earlier rows.
        """
        known, builder = self._agents.setdefault(agent_id, (policy_id, BatchBuilder(unroll_ids=False)))
        if known != policy_id:
            raise OptionError(
                f"agent {excerpt(agent_id)} has the policy {excerpt(known)} in this episode, but now "
                f"{excerpt(policy_id)}: change it between episodes, after postprocess_batch_so_far()"
            )
        builder.add_values(**values)

    def count_step(self) -> None:
        """Count one step of the environment, in which any number of agents acted."""
        self._env_steps += 1

    def check_missing_dones(self) -> None:
        """Check that an episode that has ended has ended for every agent.

        Raises:
            SchemaError: An agent's last row is neither terminated nor truncated.
        """
        for agent_id, (_, builder) in self._agents.items():
            if not len(builder):
                continue
            rows = builder._joined()
            ends = [rows[name][-1] for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS) if name in rows]
            if not any(ends):
                raise SchemaError(
                    f"the episode is over, but the last row of agent {excerpt(agent_id)} is neither "
                    "terminated nor truncated: mark it, or keep the episode running"
                )

    def postprocess_batch_so_far(self) -> None:
        """Move the agents' postprocessed trajectories to the rows of their policies.

        If ``postprocess`` raises, the rows stay as they were.
        """
        parts = {
            agent_id: (policy_id, builder._joined())
            for agent_id, (policy_id, builder) in self._agents.items()
            if len(builder)
        }
        made = [
            (policy_id, self._postprocessed(agent_id, parts)) for agent_id, (policy_id, _) in parts.items()
        ]
        for policy_id, done in made:
            if Columns.UNROLL_ID not in done:
                done[Columns.UNROLL_ID] = np.full(len(done), next(self._unrolls))
            self._policies.setdefault(policy_id, BatchBuilder(unroll_ids=False)).add_batch(done)
        self._agents = {}

    def _postprocessed(self, agent_id: Any, parts: dict[Any, tuple[str, SampleBatch]]) -> SampleBatch:
        _, rows = parts[agent_id]
        if self._postprocess is None:
            return rows.copy(shallow=True)
        # Pass a copy: other agents, and a second attempt, must see these rows as recorded.
        others = {other: part for other, part in parts.items() if other != agent_id}
        return self._postprocess(rows.copy(), others).copy(shallow=True)

    def build_and_reset(self) -> MultiAgentBatch:
        """Return all rows so far, postprocessed, by policy, and empty the builder.

        Raises:
            OptionError: There are rows, but `count_step` was never called.
            SchemaError: Postprocessed trajectories of one policy have different columns; the rows stay.
        """
        if self.total and not self._env_steps:
            raise OptionError(
                f"{self.total} rows, but no environment step: call count_step() once for each step of the "
                "environment"
            )
        self.postprocess_batch_so_far()
        built = {policy_id: builder._joined() for policy_id, builder in self._policies.items()}
        batch = MultiAgentBatch(built, self._env_steps)
        self._policies, self._env_steps = {}, 0
        return batch


# Types whose values always have a stored form, as columns.
_PLAIN: Final = frozenset((bool, int, float, complex, type(None), np.float32, np.float64, np.int64, np.bool_))


def _is_plain(value: Any) -> bool:
    kind = type(value)
    return kind in _PLAIN or (kind is np.ndarray and value.dtype.kind in "biufc")


def _check(value: Any, name: str) -> None:
    """Refuse what writers refuse; `check_value` judges parts, and columns may also be complex."""
    if name == Columns.INFOS:
        check_value(value, name)
        return
    if _is_plain(value):
        return
    for path, leaf in leaves(value):
        is_array = hasattr(leaf, "__array__") and not isinstance(leaf, np.ndarray)  # Such as a pandas.Series.
        if not is_array and not _is_plain(leaf) and not (isinstance(leaf, list) and _is_numbers(leaf)):
            check_value(leaf, "/".join(filter(None, (name, path_text(path)))))


def _is_numbers(values: list[Any]) -> bool:
    try:
        return np.array(values).dtype.kind in "biufc"
    except ValueError:  # Of different lengths.
        return False


def _copy_leaf(leaf: Any) -> Any:
    """A copy that no other code can change."""
    if isinstance(leaf, np.ndarray):
        return np.array(leaf)
    if hasattr(leaf, "detach"):
        return np.asarray(leaf.detach().cpu()).copy()
    return copy.deepcopy(leaf) if isinstance(leaf, list) else leaf


def _is_texts(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "US" and value.ndim > 0
    return isinstance(value, list) and len(value) > 0 and {*map(type, value)} <= {str}


def _column(name: str, rows: list[Any]) -> Any:
    """One column of the values of ``rows``, with the same nesting."""
    if name == Columns.INFOS or not isinstance(rows[0], (dict, tuple)):
        return _leaf(name, rows)
    try:
        lists = leaves(map_structure(lambda *values: list(values), *({name: row} for row in rows)))
    except SchemaError as error:
        raise SchemaError(str(error), column=name) from error
    paths = [path[1:] for path, _ in lists]
    return unflatten(paths, [_leaf(path_text(path), values) for path, values in lists])


def _leaf(name: str, values: list[Any]) -> Any:
    if name == Columns.INFOS or any(
        value is None or isinstance(value, (str, bytes, dict)) or _is_texts(value) for value in values
    ):
        return object_column(values)
    try:
        array = np.array(values)
    except ValueError as error:
        if item_type(rows := object_column(values)) is not None:
            return rows  # Of different lengths: `rlio.Ragged`.
        raise SchemaError(
            f"the values have different shapes: {error}. A builder has no columns of such rows: make the "
            "rlio.SampleBatch yourself, and give it a rlio.Ragged",
            column=name,
        ) from error
    # NumPy makes floats or objects of integers beyond int64, such as the upper half of uint64.
    if array.dtype.kind in "fuO" and all(type(value) is int for value in values):
        raise SchemaError("a whole number is beyond int64: cut ids to 63 bits", column=name)
    if array.dtype == object:
        return object_column(values)
    typed = any(isinstance(value, (np.generic, np.ndarray)) for value in values)
    return array.astype(np.float32) if array.dtype == np.float64 and not typed else array
