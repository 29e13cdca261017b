"""Refuses rows of an episode that has ended: its id would then name two episodes of one writer.

An episode is the rows of one policy with one (eps_id, agent_index, env_id), and one ``_writer`` in merged
data. Without ``agent_index``, ``agent_id`` tells agents apart. Its rows may come in any order and in any
number of batches, because ``t`` tells where a row belongs. A row of an ended episode is refused if its step
was written before, or if it lies behind the end, unless it follows right after the last row. Without ``t``,
each later row is refused. docs/design/episode-ids.md has the reasons.

`EndedEpisodes` remembers the newest episodes; `rlio verify` finds the ids that come again later.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from itertools import islice, repeat
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch, SampleBatch
from rlio.batch.arrays import to_numpy
from rlio.batch.columns import AGENT_ID, Columns
from rlio.errors import SchemaError, excerpt
from rlio.schemas.policy_schema import PolicySchema
from rlio.schemas.row_groups import unpadded
from rlio.schemas.schema import Schema
from rlio.schemas.streams import WRITER

__all__ = ["EndedEpisodes", "EpisodeComesAgain", "Seen"]

_KEYS: Final = (Columns.EPS_ID, Columns.AGENT_INDEX, Columns.ENV_ID, WRITER)
_FLAGS: Final = (Columns.TERMINATEDS, Columns.TRUNCATEDS)
#: Episodes to remember, at about 200 bytes.
_MOST_EPISODES: Final = 50_000
#: Ranges of steps to remember of an episode whose rows come out of order.
_MOST_RANGES: Final = 16
#: Runs of a batch from which on rows are sorted by episode, if those of many environments take turns.
_MANY_RUNS: Final = 64

#: For an episode of which nothing is known.
_NEW: Final = (0, 0, None, ())
#: What is known of an episode: its steps [start, stop), the step of its end or None, and further ranges of
#: steps. A plain tuple, because each `write()` makes one. Without ``t``, its only step is 0.
_Known: TypeAlias = "tuple[int, int, int | None, tuple[tuple[int, int], ...]]"
#: The same. None: it is not checked, because its rows come in too many ranges, or belong to several agents. A
#: number n: the whole episode came at once, steps [0, n), so that most episodes need no tuple.
_Kept: TypeAlias = "_Known | int | None"
Seen: TypeAlias = Mapping[Hashable, _Kept]
#: Rows of an episode with consecutive steps: its key, [start, stop), the step of its end or None, first row.
_Run: TypeAlias = "tuple[tuple[Any, ...], int, int, int | None, int]"


class _Runs(NamedTuple):
    """Runs in their order: the parts of each `_Run`, as one list each."""

    keys: list[tuple[Any, ...]]
    starts: list[int]
    stops: list[int]
    ends: list[int | None]
    rows: list[int]


class _Look(NamedTuple):
    """The columns of a policy to look at.

    Attributes:
        policy: The policy's id.
        keys: The columns that tell episodes apart; ``eps_id`` is the first.
        t: The column ``t``; None: there is none.
        flags: The columns with done flags.
        shared: Whether agents may share the policy, and no column tells them apart.
    """

    policy: str
    keys: tuple[str, ...]
    t: str | None
    flags: tuple[str, ...]
    shared: bool


class EpisodeComesAgain(SchemaError):
    """Rows of an episode that has ended. Another writer may take them as another episode."""


class EndedEpisodes:
    """The episodes of one writer that were written last. Not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Kept] = {}
        self._schema: Schema | None = None
        self._looks: list[_Look] = []

    def check(self, batch: Batch, schema: Schema) -> Seen:
        """Refuse a batch with rows of an ended episode; the batch must fit ``schema``.

        Returns:
            What to pass to `take` once the batch is written.

        Raises:
            EpisodeComesAgain: An episode that has ended comes again; the message names row and ``eps_id``.
        """
        if schema is not self._schema:
            self._looks = _looks(schema)
            self._schema = schema
        if not schema.multi_agent:
            for look in self._looks:
                run = _one_run(batch, look)
                if run is not None:
                    key, start, stop, end, _ = run
                    before = self._known.get(key, _NEW)
                    if before is _NEW:
                        return {key: (start, stop, end, ())}
                    if isinstance(before, tuple) and before[1:] == (start, None, ()):
                        return {key: (before[0], stop, end, ())}
        found: dict[Hashable, _Kept] = {}
        for look in self._looks:
            part = batch.policies().get(look.policy)
            runs = None if part is None else _runs(part, look)
            if runs is not None:
                found |= self._seen(runs, look)
        return found

    def _seen(self, runs: _Runs, look: _Look) -> dict[Hashable, _Kept]:
        """Return what is known of a policy's episodes with its rows of a batch; see `check`."""
        known = self._known
        # Without a loop of Python: each row may be an episode, and nearly all episodes are new, in one run.
        whole = None not in runs.ends and not any(runs.starts)
        states: Iterable[_Kept] = (
            runs.stops if whole else zip(runs.starts, runs.stops, runs.ends, repeat(()), strict=False)
        )
        once: dict[Hashable, _Kept] = dict(zip(runs.keys, states, strict=True))
        again = known.keys() & once.keys()
        several = len(once) < len(runs.keys)
        if not again and not several:
            return once
        found: dict[Hashable, _Kept] = {}
        for run in zip(*runs, strict=True):
            key, start, stop, end, _ = run
            if not several and key not in again:
                continue
            kept = found[key] if key in found else known.get(key, _NEW)
            before = (0, kept, kept - 1, ()) if isinstance(kept, int) else kept
            if before is _NEW:
                found[key] = (start, stop, end, ())
            elif before is None:
                found[key] = None
            elif before[1] == start and before[2] is None and not before[3] and look.t is not None:
                found[key] = (before[0], stop, end, ())
            else:
                found[key] = _joined(before, run, look, within=key in found)
        return found if several else once | found

    def take(self, seen: Seen) -> None:
        """Remember the episodes of a batch that was written."""
        self._known.update(seen)
        if len(self._known) > _MOST_EPISODES:  # Forget those that began first.
            spare = len(self._known) - _MOST_EPISODES // 2
            self._known = dict(islice(self._known.items(), spare, None))


def _joined(before: _Known, run: _Run, look: _Look, *, within: bool) -> _Known | None:
    """Return what is known of an episode after more of its rows; None: it is not checked any more.

    Args:
        before: What was known.
        run: The rows.
        look: The columns of the policy.
        within: Whether earlier rows of the same batch belong to the episode.

    Raises:
        EpisodeComesAgain: The episode had ended before these rows.
    """
    _, start, stop, ends_at, _ = run
    ranges = (before[:2], *before[3])
    again = look.t is None or any(low < stop and start < high for low, high in ranges)
    if again and look.shared and within:
        return None
    end, last = before[2], max(high for _, high in ranges)
    if end is not None and (again or (stop - 1 > end and start != last)):
        raise _comes_again(run, end, look)
    if ends_at is not None:
        end = ends_at if end is None else min(end, ends_at)
    first, *more = _merged((*ranges, (start, stop)))
    return (*first, end, tuple(more)) if len(more) < _MOST_RANGES else None


def _looks(schema: Schema) -> list[_Look]:
    """Return the columns to look at, for the policies whose episodes have ids."""
    looks = []
    for pid, policy in schema.policies.items():
        keys = tuple(name for name in _KEYS if _kind(policy, name, "iuU"))
        if Columns.AGENT_INDEX not in keys and _kind(policy, AGENT_ID, "iuU"):
            keys += (AGENT_ID,)
        t = Columns.T if _kind(policy, Columns.T, "iu") else None
        # Steps that are no integers tell nothing about the order.
        if Columns.EPS_ID in keys and (t is not None or Columns.T not in policy.columns):
            flags = tuple(name for name in _FLAGS if _kind(policy, name, "biuf"))
            shared = schema.multi_agent and not {Columns.AGENT_INDEX, AGENT_ID} & {*keys}
            looks.append(_Look(pid, keys, t, flags, shared))
    return looks


def _kind(policy: PolicySchema, name: str, kinds: str) -> bool:
    """Whether a column has one value a row, of one of these kinds of dtypes; texts are of the kind U."""
    leaves = policy.columns.get(name, [])
    if len(leaves) != 1 or leaves[0].path or leaves[0].spec.shape:
        return False
    spec = leaves[0].spec
    return ("U" if spec.kind == "text" and spec.dtype != "|S" else spec.numpy.kind) in kinds


def _runs(part: SampleBatch, look: _Look) -> _Runs | None:
    """Return the runs of a policy's rows; None: it has no rows."""
    if Columns.EPS_ID not in part or not len(part[Columns.EPS_ID]):
        return None
    plain = unpadded(part)
    keys = [to_numpy(plain[name]) for name in look.keys]
    t = None if look.t is None else to_numpy(plain[look.t])
    ends = np.zeros(len(keys[0]), bool)
    for name in look.flags:
        ends |= to_numpy(plain[name]).astype(bool, copy=False)
    runs = _runs_of(keys, t, ends, look)
    if len(runs.keys) <= _MANY_RUNS or len({*runs.keys}) == len(runs.keys):
        return runs
    row = _by_episode(keys)
    if row is None:
        return runs
    runs = _runs_of([values[row] for values in keys], None if t is None else t[row], ends[row], look)
    return runs._replace(rows=row[runs.rows].tolist())


def _one_run(batch: Batch, look: _Look) -> _Run | None:
    """Return a batch of one policy as one run, by a look at its first and its last row; None: look at all.

    Two rows of an episode that are as many steps apart as there are rows have its other rows between them. A
    done flag among these is not seen: an episode may continue without a gap anyway.
    """
    # The dict itself: batch[name] takes three times as long, and a `write()` may have one row.
    columns: Mapping[str, Any] = batch.keys().mapping  # type: ignore[attr-defined]  # typeshed lacks it
    if look.t is None:
        return None
    try:
        ids, steps = columns[Columns.EPS_ID], columns[look.t]
        rows, eps_id, start = len(ids), ids.item(0), steps.item(0)
        stop = start + rows
        if rows > 1 and (ids.item(-1) != eps_id or steps.item(-1) != stop - 1):
            return None
        ends = False
        for name in look.flags:
            if columns[name].item(-1):
                ends = True
        key = [look.policy, eps_id]
        for name in look.keys[1:]:
            key.append(columns[name].item(0))
    except (TypeError, LookupError):  # Tensors, or no rows.
        return None
    return tuple(key), start, stop, stop - 1 if ends else None, 0


def _runs_of(keys: list[NDArray[Any]], t: NDArray[Any] | None, ends: NDArray[np.bool_], look: _Look) -> _Runs:
    first, last = _bounds(keys, t, ends)
    steps: list[int] = [0] * len(last) if t is None else t[last].tolist()
    closes: list[int | None] = [*steps]
    for run in np.flatnonzero(~ends[last]).tolist():
        closes[run] = None
    return _Runs(
        [*zip(repeat(look.policy), *(values[first].tolist() for values in keys))],
        [0] * len(first) if t is None else t[first].tolist(),
        [step + 1 for step in steps],
        closes,
        first.tolist(),
    )


def _bounds(
    keys: list[NDArray[Any]], t: NDArray[Any] | None, ends: NDArray[np.bool_]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the first and the last row of each run."""
    breaks = np.ones(len(ends) + 1, bool)
    inner = breaks[1:-1]  # Between two rows each.
    inner[:] = ends[:-1]
    for values in keys:
        inner |= values[1:] != values[:-1]
    if t is not None:
        inner |= t[1:] != t[:-1] + 1
    at = np.flatnonzero(breaks)
    return at[:-1], at[1:] - 1


def _by_episode(keys: list[NDArray[Any]]) -> NDArray[np.int64] | None:
    """Return the order that brings the rows of each episode together, in the order that they have."""
    try:
        order: NDArray[np.int64] = np.lexsort(keys)
    except TypeError:  # Objects that cannot be compared.
        return None
    return order


def _merged(ranges: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """Return the same steps as few ascending ranges."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def _comes_again(run: _Run, end: int, look: _Look) -> EpisodeComesAgain:
    (_, *ids), start, _, _, row = run
    named = ", ".join(f"{name} {excerpt(value)}" for name, value in zip(look.keys, ids, strict=True))
    when = "" if look.t is None else f" at t={end}, and this row has t={start}"
    return EpisodeComesAgain(
        f"row {row} of policy {excerpt(look.policy)}: the episode with {named} comes again after it has "
        f"ended{when}; in the rows of one writer, {' and '.join(look.keys)} name one episode. Give each "
        "episode its own id, write other data with another writer of the same root, or leave out eps_id if "
        "the rows are no episodes",
        column=Columns.EPS_ID,
    )
