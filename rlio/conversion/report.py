"""The report of an import: what a data set holds, lacks and may have wrong, counted episode by episode.

A finding is a fact or a suspicion. Clean data gives no suspicion.

Example:
    >>> import numpy as np
    >>> from rlio.batch import SampleBatch
    >>> inspector = Inspector()
    >>> rewards = np.array([1, 1, 1, 1, np.nan, 1])
    >>> rows = SampleBatch(obs=np.arange(6.0)[:, None], actions=np.ones(6), rewards=rewards)
    >>> inspector.add(rows, place="episode 0")
    >>> for finding in inspector.findings():
    ...     print(finding.kind, finding.count, finding.unit, finding.first)
    no_final_obs 1 episodes episode 0
    unfinished 1 episodes episode 0
    no_timeouts 1 data sets None
    nan 1 rows episode 0, row 4
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.batch.arrays import equal_columns, to_numpy
from rlio.batch.columns import Columns
from rlio.batch.encoded_picture import is_encoded, row_type
from rlio.batch.nested import leaves, map_structure, path_text
from rlio.support.html import facts, panel, table
from rlio.support.words import counted

__all__ = ["Finding", "ImportReport", "Inspector", "ends_of"]

#: kind -> (unit, what was found, whether it is a suspicion).
KINDS: Final[Mapping[str, tuple[str, str, bool]]] = {
    "no_final_obs": ("episodes", "The observation after the last step is not stored.", False),
    "unfinished": ("episodes", "The last row is neither terminated nor truncated.", False),
    "no_timeouts": (
        "data sets",
        "Truncations are not stored: episodes that a time limit cut are unfinished or joined.",
        False,
    ),
    "late_start": (
        "episodes",
        "The first step is not number 0: the steps before it are not in the data.",
        False,
    ),
    "unlike_new_obs": ("rows", "The stored new_obs is not the obs of the next row.", False),
    "rows_after_end": ("rows", "Rows follow the row that ends their episode; they may be padding.", False),
    "order": ("rows", "The step number is not above that of the row before.", False),
    "repeated_steps": ("rows", "The step number is that of another row of the episode.", False),
    "missing_steps": ("rows", "Steps before this row are not in the data.", False),
    "nan": ("rows", "The column has NaN.", False),
    "infinite": ("rows", "The column has infinite values.", False),
    "actions_outside": ("rows", "The action is outside the action space.", False),
    "dtype_change": ("episodes", "The dtype of the column is not that of the first episode.", False),
    "space_dtype": ("columns", "The dtype of the column is not that of its space.", False),
    "left_out": ("columns", "The column was left out: it is not read, or the target cannot hold it.", False),
    "renamed": ("columns", "The name was changed: the target uses it itself, or cannot have it.", False),
    "unnested": ("columns", "The only key was left out: the target has its array alone.", False),
    "as_floats": ("columns", "Whole numbers were written as floats: the target is read so.", False),
    "reshaped": ("columns", "Rows of one number were written as numbers.", False),
    "repeated_obs": (
        "episodes",
        "The observation after the last step is not known: the one before it was written again.",
        False,
    ),
    "dropped_step": (
        "episodes",
        "The observation after the last step is not known: the step was left out.",
        False,
    ),
    "no_step_left": (
        "episodes",
        "The episode was left out: the observation after its only step is not known.",
        False,
    ),
    "final_obs_lost": (
        "episodes",
        "The observation after the last step was left out: the target has no place for it.",
        False,
    ),
    "end_lost": (
        "episodes",
        "The target cannot keep how the episode ended, or that it did not (see the format's losses).",
        False,
    ),
    "start_lost": ("episodes", "The number of the first step was left out: the target counts from 0.", False),
    "id_lost": ("episodes", "The id was left out: the target counts the episodes.", False),
    "environment": ("data sets", "", False),
    "refused": ("episodes", "The episode was left out: it is not a trajectory.", False),
    "sorted": ("episodes", "The rows were put in the order of their step numbers.", False),
    "note": ("data sets", "", False),
    "repeated_rows": (
        "rows",
        "Obs, action and reward are those of the row before: rows may be stored twice.",
        True,
    ),
    "repeated_episodes": ("episodes", "The episode equals an earlier one: it may be stored twice.", True),
    "zero_rows": ("rows", "The last rows of the episode are all zero: they may be padding.", True),
    "shifted_rewards": (
        "episodes",
        "The first reward is 0, and no other is: rewards may be shifted by one row.",
        True,
    ),
    "jumps": (
        "rows",
        "The obs jumps far beyond other steps: episodes may be joined or rows be reordered.",
        True,
    ),
    "normalised_actions": (
        "data sets",
        "All actions are within [-1, 1], and the action space is wider: they may be normalised.",
        True,
    ),
}

# Places that a finding names.
_PLACES = 3
# Episodes whose content is remembered, 16 bytes each.
_KNOWN_EPISODES = 1_000_000
# Rows and bytes from which the usual size of a step is taken.
_SCALE_ROWS = 20_000
_SCALE_BYTES = 64 << 20
# Observations of more numbers are not looked at for jumps.
_JUMP_WIDTH = 1024
# A jump is this many times the 99th percentile of a column's steps.
_JUMP = 3.0
_MIN_ACTIONS = 100


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding.

    Attributes:
        kind: One of `KINDS`.
        count: How often.
        unit: Of ``count``: "rows", "episodes", "columns" or "data sets".
        text: The finding in one sentence.
        places: The first places, at most three; (): it concerns the whole.
        column: The column, if it concerns one.
        suspicion: Whether the data may be right although it looks wrong.
    """

    kind: str
    count: int
    unit: str
    text: str
    places: tuple[str, ...] = ()
    column: str | None = None
    suspicion: bool = False

    @property
    def first(self) -> str | None:
        """The first place; None: it concerns the whole."""
        return self.places[0] if self.places else None


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """What a conversion read, wrote and found.

    Attributes:
        source, target: URIs.
        source_format, target_format: Names of formats.
        episodes, rows: Read. With several agents, ``episodes`` is 0: their rows are copied unchanged.
        written: Rows that this call wrote; fewer than ``rows`` if it continued an interrupted one.
        findings: What was found.
        proved: Whether both sides were read again and are equal; None: not requested.
    """

    source: str
    target: str
    source_format: str
    target_format: str
    episodes: int
    rows: int
    written: int
    findings: tuple[Finding, ...]
    proved: bool | None = None

    @property
    def suspicions(self) -> tuple[Finding, ...]:
        """The findings that are suspicions."""
        return tuple(finding for finding in self.findings if finding.suspicion)

    def _repr_html_(self) -> str:
        counts = [("source", f"{self.source} ({self.source_format})")]
        counts += [("target", f"{self.target} ({self.target_format})")]
        counts += [("read", f"{counted(self.rows, 'row')} in {counted(self.episodes, 'episode')}")]
        counts += [("written", counted(self.written, "row"))]
        if self.proved is not None:
            counts += [("proved", "both sides are equal" if self.proved else "the sides differ")]
        heads = ("", "found", "count", "unit", "column", "first")
        found = (
            ("suspicion" if f.suspicion else "fact", f.text, f.count, f.unit, f.column or "", f.first or "")
            for f in self.findings
        )
        return panel("ImportReport", facts(counts), table(heads, found))

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        findings = [{**asdict(finding), "places": list(finding.places)} for finding in self.findings]
        return {**asdict(self), "findings": findings}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> ImportReport:
        """The report that `to_json` gave."""
        findings = (Finding(**{**one, "places": tuple(one["places"])}) for one in found["findings"])
        return cls(**{**found, "findings": tuple(findings)})

    def lines(self) -> list[tuple[str, str, str, str, str]]:
        """The findings as a table: (kind, count, columns, places, sentence); identical ones are one line.

        Findings are identical if they say the same of several columns. A line names three columns and three
        places, and says how many more there are.
        """
        groups: dict[tuple[str, str], list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault((finding.kind, finding.text), []).append(finding)
        return [
            (
                f"{kind}{' (suspicion)' if group[0].suspicion else ''}",
                f"{sum(finding.count for finding in group):,} {group[0].unit}",
                _some([finding.column for finding in group if finding.column is not None]),
                _some([*dict.fromkeys(place for finding in group for place in finding.places)], more=False),
                text,
            )
            for (kind, text), group in groups.items()
        ]


def _some(names: Sequence[str], *, more: bool = True) -> str:
    """Three names, and how many more there are."""
    rest = f" and {len(names) - _PLACES} more" if more and len(names) > _PLACES else ""
    return "; ".join(names[:_PLACES]) + rest


def ends_of(rows: SampleBatch) -> NDArray[np.bool_]:
    """Whether each row is terminated or truncated."""
    ends = np.zeros(len(rows), np.bool_)
    for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS):
        if name in rows:
            ends |= to_numpy(rows[name]).astype(np.bool_)
    return ends


class Inspector:
    """Checks each episode of a data set.

    Args:
        spaces: (observation space, action space); None: not known.
    """

    def __init__(self, spaces: tuple[Any, Any] | None = None) -> None:
        self._spaces = spaces
        self._found: dict[tuple[str, str | None], Finding] = {}
        self._dtypes: dict[str, np.dtype[Any]] = {}
        self._episodes_seen: set[bytes] = set()
        self._jumps = _Jumps()
        self._rewards = _ShiftedRewards()
        self._actions = _ActionRange(spaces)
        self._knows_timeouts = False
        self.episodes: int = 0
        self.rows: int = 0

    def note(
        self,
        kind: str,
        *,
        count: int = 1,
        first: str | None = None,
        column: str | None = None,
        text: str = "",
    ) -> None:
        """Count a finding."""
        unit, sentence, suspicion = KINDS[kind]
        known = self._found.get((kind, text or column))
        if count:
            self._found[kind, text or column] = Finding(
                kind=kind,
                count=count + (known.count if known else 0),
                unit=unit,
                text=text or sentence,
                places=((*(known.places if known else ()), *([] if first is None else [first]))[:_PLACES]),
                column=column,
                suspicion=suspicion,
            )

    def _mark(self, kind: str, place: str, rows: NDArray[np.bool_], column: str | None = None) -> None:
        """Count the rows of an episode that are marked."""
        self.note(kind, count=int(rows.sum()), first=f"{place}, row {int(rows.argmax())}", column=column)

    def add_batch(self, batch: MultiAgentBatch | SampleBatch, *, place: str) -> None:
        """Check rows that are not episodes: only their values."""
        parts = batch.items() if isinstance(batch, MultiAgentBatch) else [("", batch)]
        for policy, rows in parts:
            self.rows += len(rows)
            self._values(rows, f"{place}, policy {policy}" if policy else place)

    def add(self, rows: SampleBatch, *, place: str) -> None:
        """Check the rows of one episode, in stored order."""
        self.episodes += 1
        self.rows += len(rows)
        self._values(rows, place)
        self._ends(rows, place)
        self._steps(rows, place)
        if Columns.OBS not in rows:
            return
        self._new_obs(rows, place)
        self._jumps.add(rows, place)
        self._repeats(rows, place)
        if Columns.REWARDS in rows:
            self._rewards.add(to_numpy(rows[Columns.REWARDS]), place)
        if Columns.ACTIONS in rows:
            self._actions.add(rows[Columns.ACTIONS])
            outside = self._actions.outside(rows[Columns.ACTIONS])
            self._mark("actions_outside", place, outside, Columns.ACTIONS)

    def findings(self) -> tuple[Finding, ...]:
        """All findings so far, facts first."""
        late = Inspector()
        late._found = dict(self._found)
        if self.episodes and not self._knows_timeouts:
            late.note("no_timeouts")
        for kind, (count, first), column in (
            ("shifted_rewards", self._rewards.found(), Columns.REWARDS),
            ("jumps", self._jumps.found(), Columns.OBS),
        ):
            late.note(kind, count=count, first=first, column=column)
        if self._actions.is_normalised():
            late.note("normalised_actions", column=Columns.ACTIONS)
        order = list(KINDS)
        return tuple(sorted(late._found.values(), key=lambda f: (order.index(f.kind), f.column or "")))

    # ---- facts ----

    def _values(self, rows: SampleBatch, place: str) -> None:
        for name, column in rows.items():
            if name == Columns.INFOS:
                continue
            for path, leaf in leaves(column):
                full = f"{name}/{path_text(path)}" if path else name
                array = to_numpy(leaf)
                dtype, _ = row_type(array)
                if self._dtypes.setdefault(full, dtype) != dtype and dtype.kind not in "OU":
                    self.note("dtype_change", first=place, column=full)
                if array.dtype.kind in "fc" and not np.isfinite(np.sum(array)):
                    flat = array.reshape(len(array), -1)
                    for kind, bad in (("nan", np.isnan(flat).any(1)), ("infinite", np.isinf(flat).any(1))):
                        if name == Columns.NEXT_OBS and Columns.OBS in rows:
                            bad[:-1] = False  # Said of the next obs.
                        self._mark(kind, place, bad, full)
        if self.episodes == 1 and self._spaces is not None:
            for name, space in zip((Columns.OBS, Columns.ACTIONS), self._spaces, strict=True):
                wanted = getattr(space, "dtype", None)
                column = rows.get(name)
                if isinstance(column, np.ndarray) and wanted not in (None, row_type(column)[0]):
                    self.note(
                        "space_dtype", column=name, first=f"{row_type(column)[0]}, the space has {wanted}"
                    )

    def _ends(self, rows: SampleBatch, place: str) -> None:
        ends = ends_of(rows)
        self._knows_timeouts |= Columns.TRUNCATEDS in rows
        first = int(ends.argmax()) if ends.any() else len(rows) - 1
        self.note("rows_after_end", count=len(rows) - 1 - first, first=f"{place}, row {first + 1}")
        self.note("unfinished", count=int(not ends.any()), first=place)

    def _steps(self, rows: SampleBatch, place: str) -> None:
        if Columns.T not in rows:
            return
        t = to_numpy(rows[Columns.T]).astype(np.int64)
        step = np.diff(t)
        if (step == 1).all():
            self.note("late_start", count=int(t[0] > 0), first=place)
            return
        back = np.concatenate([[False], step <= 0])
        self._mark("order", place, back, Columns.T)
        kept = np.sort(t)
        self.note("repeated_steps", count=int((np.diff(kept) == 0).sum()), first=place, column=Columns.T)
        gaps = int((np.diff(kept) > 1).sum())
        self.note("missing_steps", count=gaps, first=place, column=Columns.T)
        self.note("late_start", count=int(kept[0] > 0), first=place)

    def _new_obs(self, rows: SampleBatch, place: str) -> None:
        valid = np.full(len(rows), Columns.NEXT_OBS in rows)
        if Columns.NEXT_OBS_VALID in rows:
            valid &= to_numpy(rows[Columns.NEXT_OBS_VALID]).astype(np.bool_)
        self.note("no_final_obs", count=int(not valid[-1]), first=place)
        if Columns.NEXT_OBS not in rows or len(rows) < 2:
            return
        here = map_structure(lambda leaf: leaf[:-1], rows[Columns.NEXT_OBS])
        there = map_structure(lambda leaf: leaf[1:], rows[Columns.OBS])
        if not valid[:-1].all() or not equal_columns(here, there):
            self._mark("unlike_new_obs", place, valid[:-1] & ~_same_rows(here, there), Columns.NEXT_OBS)

    # ---- suspicions ----

    def _repeats(self, rows: SampleBatch, place: str) -> None:
        names = [name for name in (Columns.OBS, Columns.ACTIONS, Columns.REWARDS) if name in rows]
        found = [_without_pictures(to_numpy(leaf)) for name in names for _, leaf in leaves(rows[name])]
        is_float = any(leaf.dtype.kind == "f" for _, leaf in leaves(rows[Columns.OBS]))
        if any(array.dtype == object for array in found):
            return
        if is_float and len(rows) > 1:
            flat = [array.reshape(len(array), -1) for array in found]
            same = np.append(False, np.all([(part[1:] == part[:-1]).all(1) for part in flat], axis=0))
            used = np.flatnonzero(np.any([part.any(1) for part in flat], axis=0))
            padding = len(rows) - 1 - int(used[-1]) if len(used) else 0
            self.note("zero_rows", count=padding, first=f"{place}, row {len(rows) - padding}")
            same[len(rows) - padding :] = False
            self._mark("repeated_rows", place, same)
        # Short episodes of a small world may well be equal.
        if (is_float or len(rows) >= 20) and len(self._episodes_seen) < _KNOWN_EPISODES:
            digest = hashlib.blake2b(digest_size=16)
            for array in found:
                digest.update(f"{array.dtype.str}{array.shape}".encode())
                digest.update(np.ascontiguousarray(array).data)
            self.note("repeated_episodes", count=int(digest.digest() in self._episodes_seen), first=place)
            self._episodes_seen.add(digest.digest())


def _without_pictures(array: NDArray[Any]) -> NDArray[Any]:
    """An array; of encoded pictures, a number a row that is the same for the same file."""
    if not is_encoded(array):
        return array
    return np.fromiter((zlib.crc32(picture.data) for picture in array.tolist()), np.uint32, len(array))


def _same_rows(a: Any, b: Any) -> NDArray[np.bool_]:
    """Whether each row of two columns of the same structure is the same; NaN equals NaN."""
    same: list[NDArray[np.bool_]] = []
    for (_, x), (_, y) in zip(leaves(a), leaves(b), strict=True):
        if x.dtype == object:  # Arrays, lists, graphs, pictures.
            rows = range(len(x))
            same.append(
                np.array([equal_columns(x[row : row + 1], y[row : row + 1]) for row in rows], np.bool_)
            )
            continue
        x, y = to_numpy(x).reshape(len(x), -1), to_numpy(y).reshape(len(y), -1)
        equal = x == y
        if x.dtype.kind == y.dtype.kind == "f":
            equal |= np.isnan(x) & np.isnan(y)
        same.append(np.all(np.asarray(equal, np.bool_), axis=1))
    return np.asarray(np.all(same, axis=0))


class _ShiftedRewards:
    """Whether in all episodes the first reward is 0 and no other is."""

    def __init__(self) -> None:
        self._count = self._others = 0
        self._first: str | None = None

    def add(self, rewards: NDArray[Any], place: str) -> None:
        if len(rewards) < 3 or rewards.ndim > 1 or rewards.dtype.kind not in "fiub":
            return
        if rewards[0] == 0 and (rewards[1:] != 0).all():
            self._count += 1
            self._first = self._first or place
        else:
            self._others += 1

    def found(self) -> tuple[int, str | None]:
        return (0, None) if self._others else (self._count, self._first)


class _ActionRange:
    """Compares the actions with their space."""

    def __init__(self, spaces: tuple[Any, Any] | None) -> None:
        space = spaces[1] if spaces is not None else None
        low, high = getattr(space, "low", None), getattr(space, "high", None)
        n, start = getattr(space, "n", None), getattr(space, "start", 0)
        self._is_box = low is not None and high is not None
        if not self._is_box and n is not None and not getattr(space, "shape", ()):
            low, high = start, start + n - 1
        self._is_bounded = low is not None and high is not None
        self._low, self._high = np.asarray(low, np.float64), np.asarray(high, np.float64)
        self._rows = 0
        self._most = 0.0

    def outside(self, actions: Any) -> NDArray[np.bool_]:
        """Which rows are outside, by more than rounding."""
        if (
            not self._is_bounded
            or not isinstance(actions, np.ndarray)
            or actions.dtype.kind not in "fiu"
            or actions.shape[1:] != self._low.shape
        ):
            return np.zeros(1, np.bool_)
        low, high = self._low, self._high
        room = 1e-6 * np.maximum(1.0, np.nan_to_num(np.abs(high - low), posinf=1.0))
        wrong = (actions < low - room) | (actions > high + room)
        return np.asarray(wrong.reshape(len(actions), -1).any(1), np.bool_)

    def add(self, actions: Any) -> None:
        if not self._is_box or not isinstance(actions, np.ndarray) or actions.dtype.kind != "f":
            return
        wide = np.isfinite(self._high) & (self._high >= 1.5) & (self._low <= -1.5)
        if actions.shape[1:] != wide.shape or not wide.any():
            return
        self._rows += len(actions)
        self._most = max(self._most, float(np.abs(actions[:, wide]).max(initial=0.0)))

    def is_normalised(self) -> bool:
        """Whether the actions fill [-1, 1] and leave it nowhere."""
        return self._rows >= _MIN_ACTIONS and 0.7 <= self._most <= 1.0 + 1e-6


class _Jumps:
    """Finds steps of the observation that are far larger than others, as between two joined episodes.

    The size of a step is measured by the 99th percentile of each number of the observation, over the first
    rows. A step is a jump where half of the numbers that change go far beyond theirs; or where one does, and
    the step leads to where episodes start.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[NDArray[np.float64], str]] = []
        self._rows = self._bytes = 0
        self._scale: NDArray[np.float64] | None = None
        #: Least and greatest first observation, and how many episodes they are of.
        self._low = self._high = np.zeros(0)
        self._starts = 0
        self._count = 0
        self._first: str | None = None
        self._is_off = False

    def add(self, rows: SampleBatch, place: str) -> None:
        parts = [to_numpy(leaf) for _, leaf in leaves(rows[Columns.OBS])]
        parts = [part.reshape(len(part), -1) for part in parts if part.dtype.kind == "f"]
        width = sum(part.shape[1] for part in parts)
        if self._is_off or not parts or not 0 < width <= _JUMP_WIDTH:
            self._is_off = True
            return
        obs = np.concatenate(parts, 1).astype(np.float64)
        if self._starts == 0:
            self._low = self._high = obs[0]
        self._low, self._high = np.minimum(self._low, obs[0]), np.maximum(self._high, obs[0])
        self._starts += 1
        if self._scale is not None:
            self._look(obs, place)
            return
        self._kept.append((obs, place))
        self._rows += len(obs)
        self._bytes += obs.nbytes
        if self._rows >= _SCALE_ROWS or self._bytes >= _SCALE_BYTES:
            self._measure()

    def found(self) -> tuple[int, str | None]:
        """How many jumps there are, and the place of the first."""
        if self._scale is None and self._kept:
            self._measure()
        # In data whose observations jump everywhere, no jump says anything.
        return (self._count, self._first) if self._count <= 0.01 * max(self._rows, 200) else (0, None)

    def _measure(self) -> None:
        steps = np.concatenate([np.abs(np.diff(obs, axis=0)) for obs, _ in self._kept])
        if len(steps) < 50:
            return
        with np.errstate(all="ignore"):
            self._scale = np.nanpercentile(steps, 99, axis=0)
        kept, self._kept = self._kept, []
        self._rows = 0
        for obs, place in kept:
            self._look(obs, place)

    def _look(self, obs: NDArray[np.float64], place: str) -> None:
        assert self._scale is not None
        self._rows += len(obs)
        moves = self._scale > 0
        if len(obs) < 2 or not moves.any():
            return
        with np.errstate(all="ignore"):
            ratio = np.abs(np.diff(obs[:, moves], axis=0)) / self._scale[moves]
        far = ratio > _JUMP
        jumps = far.sum(1) >= np.maximum(1, 0.5 * far.shape[1])
        one = far.any(1)
        if self._starts >= 5 and one.any():
            room = 2 * (self._high - self._low)  # Few starts do not show all of their range.
            near = np.asarray((obs >= self._low - room) & (obs <= self._high + room))
            inside: NDArray[np.bool_] = np.asarray(near.all(1))
            jumps |= one & inside[1:] & ~inside[:-1]
        if jumps.any():
            self._first = self._first or f"{place}, row {int(jumps.argmax()) + 1}"
            self._count += int(jumps.sum())
