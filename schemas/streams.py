"""Assigns rows to streams: the ``_stream`` column and the footer's table of streams.

A stream is the rows of one policy with one (eps_id, agent_index, env_id), in order; without ``eps_id`` it
ends where an episode ends. Without ``agent_index``, the column ``agent_id`` tells agents apart. In data of
merged writers, ``_writer`` is a part of the key, because writers may have used the same ids. Streams are
numbered per shard, in the order of their first rows.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import AGENT_ID, Columns
from rlio.errors import CorruptData, UnsafeData, excerpt

__all__ = ["STREAM_COLUMNS", "TABLE_COLUMNS", "WRITER", "KeptTimes", "StreamTable", "Streams", "Times"]

#: The column that names the original writer of each row, in data of merged writers.
WRITER = "_writer"
_KEYS = (Columns.EPS_ID, Columns.AGENT_INDEX, Columns.ENV_ID, WRITER)
#: The logical columns from which streams are made.
STREAM_COLUMNS = (*_KEYS, AGENT_ID, Columns.T, Columns.TERMINATEDS, Columns.TRUNCATEDS, Columns.REWARDS)
#: Those from which the table of streams is made.
TABLE_COLUMNS = (*STREAM_COLUMNS, Columns.WEIGHTS_SEQ_NO)

Columned: TypeAlias = Mapping[str, NDArray[Any]]
_Key: TypeAlias = tuple[Hashable, ...]
#: Runs from which on those of each stream are added up together: less costs more than it saves.
_FEW_RUNS = 16
#: Columns of the table that earlier versions, and data without times, lack.
_OPTIONAL = frozenset(("writer", "began", "written", "version"))


class Times:
    """When rows were written, and when their episodes began: milliseconds since 1970-01-01 UTC.

    Attributes:
        written: The time of the `write()`; None: unknown.
        began: ``eps_id`` -> start of the episode, where that is known.
    """

    __slots__ = ("began", "written")

    def __init__(self, written: int | None = None, began: Mapping[Any, int] | None = None) -> None:
        self.written: int | None = written
        self.began: Mapping[Any, int] = began or {}

    def of(self, key: _Key) -> tuple[int | None, int | None]:
        """When the stream of (policy, eps_id, agent_index, env_id, writer) began, and was written."""
        return self.began.get(key[1]), self.written


class KeptTimes(Times):
    """The times of the streams of a shard, for rows that are written again.

    Without ``eps_id``, the streams of an agent and environment have the times of the first.

    Args:
        streams: The table of the shard.
        writer: The writer that the rows get, for a table that names none.
    """

    __slots__ = ("_found",)

    def __init__(self, streams: Streams, *, writer: str | None = None) -> None:
        super().__init__()
        self._found: dict[_Key, tuple[int | None, int | None]] = {}
        named = zip(
            *(streams.policy, streams.eps_id, streams.agent_index, streams.env_id, streams.writer),
            *(streams.began, streams.written),
            strict=True,
        )
        for policy, eps_id, agent_index, env_id, own, began, written in named:
            key = (policy, eps_id, agent_index, env_id, writer if own is None else own)
            self._found.setdefault(key, (began, written))

    def of(self, key: _Key) -> tuple[int | None, int | None]:
        """See `Times`."""
        return self._found.get(key, (None, None))


@dataclass
class Streams:
    """The streams of one shard, one entry each.

    Attributes:
        policy, eps_id, agent_index, env_id: Identify the stream; None where the data has no such column. For
            data with ``agent_id`` and no ``agent_index``, the latter is the agent's id.
        rows: Rows in this shard.
        t0: ``t`` of the first row; None without that column, or if it is not finite.
        end: How the last row in this shard ended: "terminated", "truncated" or "open".
        reward: Sum of the rewards in this shard.
        writer: Original writer of the rows; None if it is the shard's writer.
        began, written: When the episode began, and when the first of its rows in this shard was written, in
            milliseconds since 1970-01-01 UTC by the clock of the writer's machine; None if unknown.
        version: ``weights_seq_no`` of the first row in this shard; None if unknown.
    """

    policy: list[str] = field(default_factory=list)
    eps_id: list[Any] = field(default_factory=list)
    agent_index: list[Any] = field(default_factory=list)
    env_id: list[Any] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    t0: list[int | None] = field(default_factory=list)
    end: list[str] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    writer: list[str | None] = field(default_factory=list)
    began: list[int | None] = field(default_factory=list)
    written: list[int | None] = field(default_factory=list)
    version: list[int | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.policy)

    def to_json(self) -> dict[str, list[Any]]:
        """Return one list per field; a reward sum that is not finite is null, because JSON has none."""
        written = {name: list(values) for name, values in vars(self).items()}
        written["reward"] = [value if math.isfinite(value) else None for value in self.reward]
        for name in _OPTIONAL:
            if all(value is None for value in written[name]):
                del written[name]
        return written

    @classmethod
    def from_json(cls, written: Any) -> Streams:
        """Parse the written form, which may be hostile."""
        if not isinstance(written, dict) or written.keys() | _OPTIONAL != _KINDS.keys():
            raise CorruptData("the table of streams has unexpected columns")
        if not all(isinstance(values, list) for values in written.values()):
            raise CorruptData("the table of streams has columns that are not lists")
        if len({len(values) for values in written.values()}) > 1:
            raise CorruptData("the columns of the table of streams differ in length")
        _check_types(written)
        found = cls(**written)
        for name in _OPTIONAL - written.keys():
            setattr(found, name, [None] * len(found))
        return found

    @classmethod
    def from_text(cls, text: bytes, *, rows: int) -> Streams:
        """Parse the JSON text of the written form, which may be hostile.

        Args:
            text: The JSON.
            rows: Rows of the shard. Each stream has at least one row, so there are at most this many.

        Raises:
            CorruptData: It is not such a table. (UnsafeData: it would take many times its size in memory.)
        """
        lists, commas = _structure(text)
        if lists > len(_KINDS) + 1 or commas > len(_KINDS) * max(rows, 1):
            raise UnsafeData(f"a table of streams of {lists} lists and {commas} values for {rows} rows")
        return cls.from_json(json.loads(text))


# A string of JSON, including its escapes.
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_ENDS = frozenset(("terminated", "truncated", "open"))
_KINDS: Mapping[str, frozenset[type]] = {
    "policy": frozenset((str,)),
    "eps_id": frozenset((str, int, type(None))),
    "agent_index": frozenset((str, int, type(None))),
    "env_id": frozenset((str, int, type(None))),
    "rows": frozenset((int,)),
    "t0": frozenset((int, type(None))),
    "end": frozenset((str,)),
    "reward": frozenset((float, int, type(None))),
    "writer": frozenset((str, type(None))),
    "began": frozenset((int, type(None))),
    "written": frozenset((int, type(None))),
    "version": frozenset((int, type(None))),
}


def _structure(text: bytes) -> tuple[int, int]:
    """Return how many lists and objects, and how many commas, JSON has outside its strings."""
    bare = _STRING.sub(b"", text)
    return bare.count(b"[") + bare.count(b"{"), bare.count(b",")


def _check_types(written: Mapping[str, list[Any]]) -> None:
    """Refuse a table with values that rlio never writes."""
    for name, values in written.items():
        kinds = _KINDS[name]
        if not kinds.issuperset(map(type, values)):
            unlike = next(value for value in values if type(value) not in kinds)
            raise CorruptData(f"the table of streams has {excerpt(unlike)} as {name}")
    if not _ENDS.issuperset(written["end"]) or min(written["rows"], default=0) < 0:
        raise CorruptData("the table of streams has an impossible end or number of rows")


class StreamTable:
    """Assigns stream numbers to a shard's rows while they are written.

    Args:
        names_agents: Whether ``agent_id`` tells agents apart where there is no ``agent_index``. Earlier
            versions did not use it.
    """

    def __init__(self, *, names_agents: bool = True) -> None:
        self._names_agents = names_agents
        self.streams: Streams = Streams()
        self._numbers: dict[_Key, int] = {}
        # Without eps_id, the open streams of a policy: (policy, rest of the key) -> episodes so far.
        self._episodes: dict[_Key, int] = {}

    def assign(
        self, policy: str, columns: Columned, rows: int, *, times: Sequence[tuple[int, Times]] = ()
    ) -> NDArray[np.int32]:
        """Number the rows of one policy's batch and add them to the table.

        Args:
            policy: The policy's id.
            columns: The logical columns that are one array each; only those of `TABLE_COLUMNS` are used.
            rows: Number of rows.
            times: (First row, times) of each part of the rows, ascending.

        Returns:
            The stream of each row, shape (rows,).
        """
        if not rows:
            return np.empty(0, np.int32)
        keys = {name: columns[name] for name in _KEYS if _is_key(columns.get(name))}
        if Columns.AGENT_INDEX not in keys and self._names_agents and _is_key(columns.get(AGENT_ID)):
            keys[Columns.AGENT_INDEX] = columns[AGENT_ID]
        ends = _flags(columns, Columns.TERMINATEDS, rows) | _flags(columns, Columns.TRUNCATEDS, rows)
        starts = np.zeros(rows, bool)
        starts[:1] = True
        for values in keys.values():
            starts[1:] |= values[1:] != values[:-1]
        if Columns.EPS_ID not in keys:
            starts[1:] |= ends[:-1]
        first = np.flatnonzero(starts)
        last = np.append(first[1:], rows) - 1
        found = {name: values[first].tolist() for name, values in keys.items()}
        names = self._names(policy, [found.get(name) for name in _KEYS], ends[last])
        new = self._begin(names)
        if new:
            self._enter_first_rows(columns, first[new])
            if times:
                self._enter_times(times, [names[run] for run in new], first[new].tolist())
        numbers = list(map(self._numbers.__getitem__, names))
        self._tally(columns, numbers, first, last)
        return np.repeat(np.array(numbers, np.int32), last - first + 1)

    def _names(
        self, policy: str, columns: Sequence[list[Any] | None], closes: NDArray[np.bool_]
    ) -> list[_Key]:
        """The key of the stream of each run.

        Args:
            policy: The policy's id.
            columns: The values of each of `_KEYS`, shape (runs,); None: the data has no such column.
            closes: Whether the last row of the run ends an episode, shape (runs,).
        """
        runs = len(closes)
        values = [[None] * runs if column is None else column for column in columns]
        names: list[_Key] = list(zip([policy] * runs, *values, strict=True))
        if columns[0] is None:  # No eps_id: count the episodes of each agent and environment.
            for run, close in enumerate(closes.tolist()):
                key = names[run]
                episode = self._episodes.setdefault(key, 0)
                self._episodes[key] = episode + close
                names[run] = (*key, episode)
        return names

    def _begin(self, names: Sequence[_Key]) -> list[int]:
        """Start the streams that are new, numbered in the order of their first runs, which are returned."""
        numbers, table = self._numbers, self.streams
        new = []
        for run, key in enumerate(names):
            if key not in numbers:
                numbers[key] = len(numbers)
                new.append(run)
        if not new:
            return new
        keys = [names[run] for run in new]
        table.policy += [str(key[0]) for key in keys]
        table.eps_id += [key[1] for key in keys]
        table.agent_index += [key[2] for key in keys]
        table.env_id += [key[3] for key in keys]
        table.writer += [None if key[4] is None else str(key[4]) for key in keys]
        table.rows += [0] * len(new)
        table.end += ["open"] * len(new)
        table.reward += [0.0] * len(new)
        for column in (table.t0, table.began, table.written, table.version):
            column += [None] * len(new)
        return new

    def _enter_first_rows(self, columns: Columned, first: NDArray[np.int64]) -> None:
        """Enter t0 and version of the newest streams, which begin at the rows ``first``."""
        t, versions = columns.get(Columns.T), columns.get(Columns.WEIGHTS_SEQ_NO)
        if t is not None and _is_numeric(t):
            begins = t[first].tolist()
            self.streams.t0[-len(first) :] = [int(t0) if math.isfinite(t0) else None for t0 in begins]
        if versions is not None and versions.ndim == 1 and versions.dtype.kind in "iu":
            self.streams.version[-len(first) :] = versions[first].tolist()

    def _enter_times(
        self, times: Sequence[tuple[int, Times]], keys: Sequence[_Key], first: Sequence[int]
    ) -> None:
        """Enter when the newest streams, with these keys and first rows, began and were written."""
        rows = [row for row, _ in times]
        told = [
            times[bisect_right(rows, row) - 1][1].of(_plain(key))
            for row, key in zip(first, keys, strict=True)
        ]
        self.streams.began[-len(keys) :] = [began for began, _ in told]
        self.streams.written[-len(keys) :] = [written for _, written in told]

    def _tally(
        self, columns: Columned, numbers: list[int], first: NDArray[np.int64], last: NDArray[np.int64]
    ) -> None:
        """Add rows and rewards of the runs that `assign` found, in order, and enter how they end."""
        table, rows = self.streams, int(last[-1]) + 1
        terminated, truncated = (
            _flags(columns, name, rows)[last].tolist() for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS)
        )
        ends = [
            "terminated" if is_terminated else "truncated" if is_truncated else "open"
            for is_terminated, is_truncated in zip(terminated, truncated, strict=True)
        ]
        rewards = columns.get(Columns.REWARDS)
        if not _is_numeric(rewards):
            sums = np.zeros(len(first))
        else:
            with np.errstate(over="ignore", invalid="ignore"):  # Rewards, and so their sum, may be infinite.
                sums = np.add.reduceat(np.asarray(rewards, np.float64), first)
        lengths = last - first + 1
        if len(numbers) > _FEW_RUNS:
            self._tally_together(numbers, lengths, sums, ends)
            return
        for number, length, reward, end in zip(numbers, lengths.tolist(), sums.tolist(), ends, strict=True):
            table.rows[number] += length
            table.reward[number] += reward  # Python's floats: inf - inf is NaN without a warning.
            table.end[number] = end

    def _tally_together(
        self, numbers: list[int], lengths: NDArray[np.int64], sums: NDArray[np.float64], ends: list[str]
    ) -> None:
        """Enter many runs at once: those of many environments take turns, and each row may be a run."""
        table = self.streams
        streams, of_run = np.unique(numbers, return_inverse=True)
        known = streams.tolist()
        rows = np.bincount(of_run, lengths).astype(np.int64)
        rewards = np.array([table.reward[number] for number in known])
        with np.errstate(over="ignore", invalid="ignore"):
            np.add.at(rewards, of_run, sums)  # One after the other, as a loop would.
        for number, more, reward in zip(known, rows.tolist(), rewards.tolist(), strict=True):
            table.rows[number] += more
            table.reward[number] = reward
        for number, end in zip(numbers, ends, strict=True):
            table.end[number] = end


def _plain(key: _Key) -> _Key:
    return key if key[4] is None else (*key[:4], str(key[4]))


def _is_key(values: NDArray[Any] | None) -> bool:
    """Whether a column can identify streams: one integer or string per row."""
    if values is None or values.ndim != 1:
        return False
    return values.dtype.kind in "iuU" or (
        values.dtype.kind == "O" and all(type(value) in (str, int) for value in values)
    )


def _is_numeric(values: NDArray[Any] | None) -> bool:
    return values is not None and values.ndim == 1 and values.dtype.kind in "biuf"


def _flags(columns: Columned, name: str, rows: int) -> NDArray[np.bool_]:
    values = columns.get(name)
    return np.asarray(values, bool) if _is_numeric(values) else np.zeros(rows, bool)
