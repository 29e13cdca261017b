"""Checks the episodes of one writer: no step missing, none twice, none after the end, no id used again.

An episode is the rows of one policy with one (eps_id, agent_index, env_id), as in docs/format.md 3.7, in all
shards of the writer. Its steps may come in any order; only the set of ``t`` counts. Without ``t``, the order
counts: rows after a done flag belong to another episode with the same id. Writers refuse these, but remember
only the newest episodes (`rlio.writers.ended_episodes`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import Columns
from rlio.maintenance.findings import Findings
from rlio.maintenance.shard_scan import Part, Rows, flat_column
from rlio.schemas.schema import Schema
from rlio.schemas.streams import WRITER

__all__ = ["TimeCheck"]

_Key: TypeAlias = tuple[Hashable, ...]

#: Episodes to remember, about 400 bytes each. Beyond them, the episodes that ended first are forgotten.
MAX_EPISODES = 1_000_000

#: Why steps are not checked, if that depends on the rows and not on their schema alone.
_OBJECTS: Final = "the ids of its episodes are objects"


@dataclass(slots=True)
class _Run:
    """Steps [start, stop) of an episode.

    Attributes:
        loss, last_loss: Number of losses of rows before its first and before its last step.
        uri, record: Where its first step is.
    """

    start: int
    stop: int
    loss: int
    last_loss: int
    uri: str
    record: int


@dataclass(slots=True)
class _Episode:
    """The known steps of an episode.

    Attributes:
        runs: Its steps, ascending, not touching each other.
        end: The first step with a done flag; None if there is none yet.
    """

    runs: list[_Run]
    end: int | None = None


@dataclass
class _Tally:
    """The count of one problem in one shard."""

    episodes: int
    rows: int
    record: int
    example: str


@dataclass
class TimeCheck:
    """Follows the episodes of one writer, whose live rows are added in order.

    Args:
        writer: The writer's id.
        findings: Receives the problems when the writer is finished.
    """

    writer: str
    findings: Findings
    _episodes: dict[_Key, _Episode] = field(default_factory=dict)
    #: Whether an episode without ``t`` has ended.
    _has_ended: dict[_Key, bool] = field(default_factory=dict)
    _tallies: dict[tuple[str, str], _Tally] = field(default_factory=dict)
    _unchecked: dict[str, str] = field(default_factory=dict)
    _losses: int = 0
    _first_uri: str = ""
    _forgotten: int = 0

    def lose(self) -> None:
        """Record that rows are missing here, so that their steps do not count as a gap of the recording."""
        self._losses += 1

    def add(
        self, schema: Schema, rows: Rows, live: NDArray[np.bool_] | None, *, places: Sequence[tuple[str, int]]
    ) -> None:
        """Add live rows, of which none between them is lost; see `ValueCheck.add`.

        Args:
            schema: Their schema.
            rows: The rows.
            live: Mask of the served rows; None: all.
            places: URI and number of rows of each shard that has them, in order.
        """
        self._first_uri = self._first_uri or places[0][0]
        for part in rows.parts:
            keys, problem = _keys(schema, part)
            if problem == _OBJECTS and len(places) > 1:  # Not in all of the shards.
                for own, place in zip(rows.split([count for _, count in places]), places, strict=True):
                    self.add(schema, own, None, places=[place])
                return
            t = flat_column(schema, part, Columns.T)
            if keys is None or t is None or t.dtype.kind not in "iu":
                reason = problem or "there is no integer column 't'"
                self._unchecked.setdefault(part.policy, reason)
            if keys is None or (t is not None and t.dtype.kind not in "iu"):
                continue
            done = np.zeros(len(part.rows), bool)
            for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS):
                flags = flat_column(schema, part, name)
                if flags is not None and flags.dtype.kind in "biuf":
                    done |= flags.astype(bool)
            steps = None if t is None else t.astype(np.int64)
            self._add_part(part, keys, steps, done, live, places, rows.record)
        if len(self._episodes) > MAX_EPISODES:
            self._forget()
        if len(self._has_ended) > MAX_EPISODES:
            self._forgotten += len(self._has_ended)
            self._has_ended.clear()

    def _add_part(
        self,
        part: Part,
        keys: list[NDArray[Any]],
        t: NDArray[np.int64] | None,
        done: NDArray[np.bool_],
        live: NDArray[np.bool_] | None,
        places: Sequence[tuple[str, int]],
        record: int,
    ) -> None:
        # What is found is told of a shard: its runs end with it.
        shard = np.repeat(np.arange(len(places)), [count for _, count in places])[part.rows]
        if live is not None:
            chosen = live[part.rows]
            keys, done, shard = [values[chosen] for values in keys], done[chosen], shard[chosen]
            t = None if t is None else t[chosen]
        if not len(done):
            return
        episode = _numbered(keys if len(places) == 1 else [shard, *keys])
        # Sort rows by episode, in recorded order within each. Then find runs of consecutive steps.
        order = np.argsort(episode, kind="stable")
        episode, done = episode[order], done[order]
        new = np.ones(len(done), bool)
        new[1:] = (episode[1:] != episode[:-1]) | done[:-1]
        if t is not None:
            t = t[order]
            new[1:] |= t[1:] != t[:-1] + 1
        starts = np.flatnonzero(new)
        stops = np.append(starts[1:], len(done))
        named = zip(*(values[order[starts]].tolist() for values in keys), strict=True)
        shards = shard[order[starts]].tolist()
        for start, stop, at, ids in zip(starts.tolist(), stops.tolist(), shards, named, strict=True):
            first, last = (0, stop - start - 1) if t is None else (int(t[start]), int(t[stop - 1]))
            run = _Run(first, last + 1, self._losses, self._losses, places[at][0], record)
            key, ends = (part.policy, *ids), bool(done[stop - 1])
            if t is None:
                self._take_in_order(key, run, ends=ends)
            else:
                self._take(key, run, ends=ends)

    def _take_in_order(self, key: _Key, run: _Run, *, ends: bool) -> None:
        """Add rows without steps to their episode."""
        if self._has_ended.get(key):
            self._tally("episode-again", run, run.stop, f"episode {_named(key)} comes again after its end")
        self._has_ended[key] = ends or self._has_ended.get(key, False)

    def _take(self, key: _Key, run: _Run, *, ends: bool) -> None:
        """Add steps to their episode."""
        episode = self._episodes.get(key)
        if episode is None:
            self._episodes[key] = _Episode([run], run.stop - 1 if ends else None)
            return
        repeated = sum(max(0, min(run.stop, old.stop) - max(run.start, old.start)) for old in episode.runs)
        behind = episode.end is not None and run.start > max(episode.end + 1, episode.runs[-1].stop)
        if episode.end is not None and (repeated or behind):
            example = (
                f"episode {_named(key)} ended at t={episode.end} and comes again at t={run.start}: its id "
                "names several episodes"
            )
            self._tally("episode-again", run, run.stop - run.start, example)
        elif repeated:
            example = f"episode {_named(key)} repeats its steps from t={run.start} on"
            self._tally("time-overlap", run, repeated, example)
        elif episode.end is not None and run.stop - 1 > episode.end:
            self._tally(
                "after-the-end",
                run,
                run.stop - max(run.start, episode.end + 1),
                f"episode {_named(key)} goes on at t={run.start} after its end at t={episode.end}",
            )
        if ends:
            episode.end = run.stop - 1 if episode.end is None else min(episode.end, run.stop - 1)
        episode.runs = _merged([*episode.runs, run])

    def finish(self, *, sealed: bool) -> None:
        """Report the findings; the writer has no more rows.

        Args:
            sealed: Whether the writer is closed for good, so that open episodes will never end.
        """
        for key, episode in self._episodes.items():
            for before, after in zip(episode.runs, episode.runs[1:], strict=False):
                if before.last_loss == after.loss:
                    self._tally(
                        "time-gap",
                        after,
                        after.start - before.stop,
                        f"episode {_named(key)} goes from t={before.stop - 1} to t={after.start}",
                    )
        for (code, uri), tally in self._tallies.items():
            self.findings.add(
                code,
                f"{tally.example}; {tally.episodes} such places, {tally.rows} steps",
                uri=uri,
                record=tally.record,
                column=Columns.EPS_ID if code == "episode-again" else Columns.T,
                rows=tally.rows,
            )
        still_open = sum(episode.end is None for episode in self._episodes.values())
        told: list[tuple[str, str]] = []
        if sealed and still_open:
            left = f"writer {self.writer!r} is sealed, but {still_open} of its episodes have no end"
            told.append(("left-open", left))
        for policy, reason in self._unchecked.items():
            told.append(("time-unchecked", f"the steps of policy {policy!r} are not checked: {reason}"))
        if self._forgotten:
            forgotten = (
                f"{self._forgotten} ended episodes were forgotten to bound memory; whether later rows repeat "
                "them is not checked"
            )
            told.append(("time-unchecked", forgotten))
        for code, message in told:
            self.findings.add(code, message, uri=self._first_uri.rpartition("/")[0])

    def _tally(self, code: str, run: _Run, rows: int, example: str) -> None:
        tally = self._tallies.get((code, run.uri))
        if tally is None:
            self._tallies[code, run.uri] = _Tally(1, rows, run.record, example)
        else:
            tally.episodes += 1
            tally.rows += rows

    def _forget(self) -> None:
        """Drop the oldest episodes that ended and have no gap."""
        spare = len(self._episodes) - MAX_EPISODES * 3 // 4
        episodes = self._episodes.items()
        ended = (key for key, found in episodes if found.end is not None and len(found.runs) == 1)
        for key in [key for _, key in zip(range(spare), ended, strict=False)]:
            del self._episodes[key]
            self._forgotten += 1


def _merged(runs: list[_Run]) -> list[_Run]:
    """Return the same steps as few ascending runs."""
    runs.sort(key=lambda run: run.start)
    merged = [runs[0]]
    for run in runs[1:]:
        last = merged[-1]
        if run.start > last.stop:
            merged.append(run)
            continue
        last.last_loss = max(last.last_loss, run.last_loss)
        last.stop = max(last.stop, run.stop)
    return merged


def _keys(schema: Schema, part: Part) -> tuple[list[NDArray[Any]] | None, str | None]:
    """Return the columns that identify the episode of each row, or why there are none."""
    eps_id = flat_column(schema, part, Columns.EPS_ID)
    if eps_id is None:
        return None, "there is no column 'eps_id' with one value per row"
    agent = flat_column(schema, part, Columns.AGENT_INDEX)
    if schema.multi_agent and agent is None:
        return None, "there is no column 'agent_index' to distinguish its agents"
    # For merged writers, a column names the writer of each row.
    others = [agent, flat_column(schema, part, Columns.ENV_ID), flat_column(schema, part, WRITER)]
    found: list[NDArray[Any]] = [eps_id, *(values for values in others if values is not None)]
    for values in found:
        if values.dtype.kind == "O" and not all(isinstance(value, str | int) for value in values):
            return None, _OBJECTS
        if values.dtype.kind not in "iuUO":
            return None, "the ids of its episodes are neither integers nor texts"
    return found, None


def _numbered(keys: list[NDArray[Any]]) -> NDArray[np.int64]:
    """Return a number for each distinct combination of keys, shape (rows,)."""
    number = np.zeros(len(keys[0]), np.int64)
    for values in keys:
        if values.dtype.kind == "O":
            values = np.array([f"{type(value).__name__}:{value}" for value in values])
        _, own = np.unique(values, return_inverse=True)
        own = own.reshape(-1).astype(np.int64)
        _, joint = np.unique(number * (int(own.max(initial=0)) + 1) + own, return_inverse=True)
        number = joint.reshape(-1).astype(np.int64)
    return number


def _named(key: _Key) -> str:
    """Return the key for a message, shortened, because ids come from data and may be long."""
    text = "/".join(ascii(part)[:60] for part in key[1:])
    return f"{text} of policy {ascii(key[0])[:60]}"
