"""Refuses rows of an episode that has ended: its id would then name two episodes of one writer.

An episode is the rows of one policy with one (eps_id, agent_index, env_id), and one ``_writer`` in merged
data. Without ``agent_index``, ``agent_id`` tells agents apart. Its rows may come in any order and in any
number of batches, because ``t`` tells where a row belongs. A row of an ended episode is refused if its step
was written before, or if it lies behind the end, unless it follows right after the last row. Without ``t``,
each later row is refused. docs/design/episode-ids.md has the reasons.

`EndedEpisodes` remembers the newest episodes; `rlio verify` finds the ids that come again later.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
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
#: Up to so many rows, bytes of a column are compared.
_FEW_ROWS: Final = 4096

#: For an episode of which nothing is known.
_NEW: Final = 0
#: What is known of an episode: its steps [start, stop), the step of its end or None, and further ranges of
#: steps. Without ``t``, its only step is 0.
_Known: TypeAlias = "tuple[int, int, int | None, tuple[tuple[int, int], ...]]"
#: The same. Nearly all episodes are a number, which takes less time: n of the whole episode, steps [0, n);
#: -n of one that goes on after these steps. None: it is not checked, because its rows come in too many
#: ranges, or belong to several agents.
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
                    kept = self._known.get(key, _NEW)
                    if kept == -start <= 0:
                        return {key: -stop if end is None else stop}
                    if isinstance(kept, tuple) and kept[1:] == (start, None, ()):
                        return {key: (kept[0], stop, end, ())}
        found: dict[Hashable, _Kept] = {}
        for look in self._looks:
            part = batch.policies().get(look.policy)
            runs = None if part is None else _runs(part, look)
            if runs is not None:
                found |= self._seen(runs, look)
        return found

    def _seen(self, runs: _Runs, look: _Look) -> dict[Hashable, _Kept]:
        """Return what is known of a policy's episodes with its rows of a batch; see `check`."""
        # Without a loop of Python: each row may be an episode, and nearly all episodes are new or go on.
        before: list[_Kept] = [*map(self._known.get, runs.keys, repeat(_NEW))]
        after = [-stop if end is None else stop for stop, end in zip(runs.stops, runs.ends, strict=True)]
        once: dict[Hashable, _Kept] = dict(zip(runs.keys, after, strict=True))
        several = len(once) < len(runs.keys)
        usual = [-start for start in runs.starts]
        if before == usual and max(usual) <= 0 and not several:
            return once
        found: dict[Hashable, _Kept] = {}
        for run, kept, state, wanted in zip(zip(*runs, strict=True), before, after, usual, strict=True):
            key, start, stop, end, _ = run
            kept = found.get(key, kept)
            if kept == wanted <= 0:
                found[key] = state
            elif kept is None:
                found[key] = None
            elif kept == _NEW:
                found[key] = (start, stop, end, ())
            else:
                found[key] = _joined(kept, run, look, within=key in found)
        return found

    def take(self, seen: Seen) -> None:
        """Remember the episodes of a batch that was written."""
        self._known.update(seen)
        if len(self._known) > _MOST_EPISODES:  # Forget those that began first.
            spare = len(self._known) - _MOST_EPISODES // 2
            self._known = dict(islice(self._known.items(), spare, None))


def _joined(kept: _Known | int, run: _Run, look: _Look, *, within: bool) -> _Known | None:
    """Return what is known of an episode after more of its rows; None: it is not checked any more.

    Args:
        kept: What was known.
        run: The rows.
        look: The columns of the policy.
        within: Whether earlier rows of the same batch belong to the episode.

    Raises:
        EpisodeComesAgain: The episode had ended before these rows.
    """
    _, start, stop, ends_at, _ = run
    before: _Known = kept if isinstance(kept, tuple) else (0, abs(kept), kept - 1 if kept > 0 else None, ())
    if before[1:] == (start, None, ()) and look.t is not None:
        return before[0], stop, ends_at, ()
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
    columns = _columns(unpadded(part))
    if Columns.EPS_ID not in columns or not len(columns[Columns.EPS_ID]):
        return None
    keys = [to_numpy(columns[name]) for name in look.keys]
    t = None if look.t is None else to_numpy(columns[look.t])
    ends = None
    for name in look.flags:
        flag = to_numpy(columns[name])
        flag = flag if flag.dtype == bool else flag.astype(bool)
        ends = flag if ends is None else ends | flag
    if ends is None:
        ends = np.zeros(len(keys[0]), bool)
    runs = _runs_of(keys, t, ends, look)
    if len(runs.keys) <= _MANY_RUNS or len({*runs.keys}) == len(runs.keys):
        return runs
    row = _by_episode(keys)
    if row is None:
        return runs
    runs = _runs_of([values[row] for values in keys], None if t is None else t[row], ends[row], look)
    return runs._replace(rows=row[runs.rows].tolist())


def _columns(part: SampleBatch) -> Mapping[str, Any]:
    """Return the columns themselves: batch[name] takes longer, and a `write()` may have one row."""
    columns: Mapping[str, Any] = part.keys().mapping  # type: ignore[attr-defined]  # typeshed lacks it
    return columns


def _one_run(batch: Batch, look: _Look) -> _Run | None:
    """Return a batch of one policy as one run; None: it is none, or finding that out takes longer.

    A done flag within the run is not seen: an episode may continue without a gap anyway.
    """
    if look.t is None or not isinstance(batch, SampleBatch):
        return None
    columns = _columns(batch)
    try:
        steps = columns[look.t]
        rows, start = len(steps), steps.item(0)
        stop = start + rows
        if rows > 1 and steps.item(-1) != stop - 1:
            return None
        key: list[Any] = [look.policy]
        for name in look.keys:
            values = columns[name]
            key.append(values.item(0))
            if rows > 1 and (values.item(-1) != key[-1] or not _is_one_value(values)):
                return None
        if rows > 2 and steps.tobytes() != np.arange(start, stop, dtype=steps.dtype).tobytes():
            return None
        ends = False
        for name in look.flags:
            if columns[name].item(-1):
                ends = True
    except (TypeError, LookupError, OverflowError):  # Tensors, no rows, or steps near the limit of int64.
        return None
    return tuple(key), start, stop, stop - 1 if ends else None, 0


def _runs_of(keys: list[NDArray[Any]], t: NDArray[Any] | None, ends: NDArray[np.bool_], look: _Look) -> _Runs:
    # Most batches are of one agent and one environment: comparing bytes takes a fifth of the time.
    same = [False, *map(_is_one_value, keys[1:])]
    breaks = ends[:-1].copy()
    for values, is_one in zip(keys, same, strict=True):
        if not is_one:
            breaks |= values[1:] != values[:-1]
    if t is not None:
        breaks |= t[1:] - t[:-1] != 1
    last = breaks.nonzero()[0]
    first = last + 1
    firsts = [
        repeat(values.item(0)) if is_one else _and_first(values, first)
        for values, is_one in zip(keys, same, strict=True)
    ]
    starts = stops = [0] * (len(last) + 1)
    if t is not None:
        starts, stops = _and_first(t, first), _and_last(t, last)
    return _Runs(
        [*zip(repeat(look.policy), *firsts)],
        starts,
        [step + 1 for step in stops],
        [step if ended else None for step, ended in zip(stops, _and_last(ends, last), strict=True)],
        [0, *first.tolist()],
    )


def _is_one_value(values: NDArray[Any]) -> bool:
    """Whether all rows have the value of the first one; False if that takes a copy of many rows."""
    if len(values) > _FEW_ROWS:
        return False
    stored = values.tobytes()
    return stored == stored[: values.itemsize] * len(values)


def _and_first(values: NDArray[Any], at: NDArray[np.intp]) -> list[Any]:
    """Return the first value, and those of the rows ``at``."""
    found: list[Any] = values[at].tolist()
    found.insert(0, values.item(0))
    return found


def _and_last(values: NDArray[Any], at: NDArray[np.intp]) -> list[Any]:
    """Return the values of the rows ``at``, and the last one."""
    found: list[Any] = values[at].tolist()
    found.append(values.item(-1))
    return found


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
