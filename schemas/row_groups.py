"""Row groups in memory: collects rows in reused buffers until a group is large enough to encode.

`rlio.schemas.parquet` encodes groups, and `rlio.writers` decides when to roll to a new shard.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.batch.arrays import to_numpy
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns
from rlio.batch.encoded_picture import is_encoded
from rlio.batch.multi_agent import step_numbers
from rlio.errors import SchemaError, UnsafeData, excerpt
from rlio.limits import DEFAULT_LIMITS
from rlio.schemas.arrow import to_arrow
from rlio.schemas.column import TEXTS, ColumnSpec, FrameStack, Nullable
from rlio.schemas.frame_pools import Frames, StackPool, grown, pool_stacks
from rlio.schemas.info_columns import absent
from rlio.schemas.observations import as_unsigned, successors
from rlio.schemas.policy_schema import PolicySchema
from rlio.schemas.schema import Schema
from rlio.schemas.streams import TABLE_COLUMNS, StreamTable, Times
from rlio.schemas.text_columns import check_texts
from rlio.support.clock import utc_ms

__all__ = [
    "ATTRIBUTES",
    "GroupBuffer",
    "Piece",
    "RowGroup",
    "Texts",
    "attributes_of",
    "pieces_of",
    "pooled",
    "times_of",
    "unpadded",
]

#: Characters of text in one row group. This limits its decoded size, because `Schema.group_rows` can only
#: estimate how long texts will be.
_GROUP_TEXT = 8 << 20

#: So many bytes of a picture's file count as a character of text.
_FILE_SHARE = 8

#: Bytes of a column of texts in one row group as an array of NumPy, which pads each text to the longest.
_GROUP_PADDED = 64 << 20

#: Rows that cannot be cut, whose episodes are counted, and the most episodes that they may have: the footer
#: lists them.
_MANY_EPISODES = 1 << 17

#: Bytes of frames in one row group: `Schema.group_rows` counts one frame per row, but stacks that share none
#: have eight.
_GROUP_FRAMES = 16 << 20

#: Bytes of stacks in one piece: possibly none of its frames are shared.
_PIECE_STACKS = 16 << 20

#: Attributes of a batch that are stored and restored with it.
ATTRIBUTES = ("max_seq_len", "num_grad_updates")


@dataclass(frozen=True)
class RowGroup:
    """Collected rows, ready to encode; the arrays are views of the buffer that collected them.

    Attributes:
        rows: Number of rows.
        columns: Physical column -> (values of the rows that have one, mask of these rows or None for all).
        policy: Policy number of each row, or None if there is one policy.
        policies: Names of the policies by number.
        missing: Rows whose final observation is missing, or None.
        batches: One JSON text for the first row of each `write()`, None elsewhere.
        units: Steps, sequences or joint steps in this group.
        env_steps: Environment steps of the batches that begin here.
        stacks: Physical column of ``obs`` -> its stacks and those of ``new_obs``; `columns` lacks both.
        times: (First row, times) of each piece.
        earlier: (Schema, rows) of the first rows that were collected under earlier schemas; see
            `GroupBuffer.extended`.
    """

    rows: int
    columns: dict[str, Nullable]
    policy: NDArray[np.int16] | None
    policies: list[str]
    missing: NDArray[np.bool_] | None
    batches: list[str | None]
    units: int
    env_steps: int
    stacks: dict[str, StackPool] = field(default_factory=dict)
    times: list[tuple[int, Times]] = field(default_factory=list)
    earlier: tuple[tuple[Schema, int], ...] = ()


@dataclass(frozen=True)
class Piece:
    """Checked rows of one policy from one `write()`, for one row group.

    Attributes:
        policy: The policy's id.
        arrays: Physical column -> values, from `PolicySchema.flatten`.
        rows: Number of rows.
        attributes: JSON text if the piece begins a `write()`, else None.
        env_steps: Environment steps that count for this piece.
        stacks: Physical column of ``obs`` -> its stacks and those of ``new_obs``; see `pooled`.
        times: When the rows were written, and their episodes began.
    """

    policy: str
    arrays: dict[str, NDArray[Any]]
    rows: int
    attributes: str | None
    env_steps: int
    stacks: dict[str, StackPool] = field(default_factory=dict)
    times: Times = Times()  # noqa: RUF009 - it never changes


def times_of(*parts: SampleBatch) -> Times:
    """The times of rows that are written now. The time of a clock from before 1970 is unknown."""
    starts: dict[int | str, int] = {}
    for part in parts:
        if part.episode_starts and Columns.EPS_ID in part:
            values = to_numpy(part[Columns.EPS_ID])
            ids = values[:1].tolist() + values[1:][values[1:] != values[:-1]].tolist()
            told = part.episode_starts
            if [*told] != ids and not told.keys() <= (known := {*ids}):  # Recorders tell each, in order.
                told = {eps_id: start for eps_id, start in told.items() if eps_id in known}
            starts |= zip(told, map(int, told.values()), strict=True)
    now = utc_ms()
    return Times(now if now >= 0 else None, starts)


def pooled(piece: Piece, schema: Schema) -> Piece:
    """Return the piece with its frame stacks as single frames; itself if it has no unpooled stacks."""
    if not schema.stacked or piece.stacks:
        return piece
    # Only the candidates for equal frames: their bytes decide which are equal.
    stream = np.zeros(1, np.int32)
    if piece.rows > 1:
        stream = StreamTable().assign(piece.policy, _stream_columns(piece, schema), piece.rows)
    following = successors(stream)
    arrays, stacks = dict(piece.arrays), {}
    for name, (new_name, stack) in schema.stacked.items():
        stacks[name] = pool_stacks(arrays.pop(name), arrays.pop(new_name), stack, following)
    return replace(piece, arrays=arrays, stacks=stacks)


def _stream_columns(piece: Piece, schema: Schema) -> dict[str, NDArray[Any]]:
    """Return the columns of a piece from which streams are made."""
    columns = schema.policies[piece.policy].columns
    return {
        name: piece.arrays[columns[name][0].physical]
        for name in TABLE_COLUMNS
        if name in columns and columns[name][0].physical in piece.arrays
    }


def pieces_of(
    batch: SampleBatch | MultiAgentBatch, schema: Schema, *, rooms: Iterator[int], limit: int
) -> list[list[Piece]]:
    """Check a written batch and cut it into lists of pieces, each for one row group.

    Never cuts a sequence. Never cuts a batch of several policies either, to keep joint steps together. In
    these cases a row group may be longer than the schema's, but not larger than readers allow.

    Args:
        batch: The written batch.
        schema: The schema that it must fit.
        rooms: How many plain rows fit into the open row group, into the next one, and so on without end.
        limit: Most rows of sequences to put into one piece.

    Raises:
        SchemaError: The batch does not fit the schema, or rows that cannot be cut are too large.
    """
    if isinstance(batch, MultiAgentBatch):
        joint = _joint_pieces(batch, schema)
        _check_readable(joint, schema)
        return [joint]
    plain = unpadded(batch)
    attributes = attributes_of(batch)  # Before the padding is removed, to keep max_seq_len.
    text = json.dumps(attributes) if attributes else "{}"
    policy = schema.policies[DEFAULT_POLICY_ID]
    arrays = policy.flatten(plain, policy=DEFAULT_POLICY_ID)
    rows = len(plain)
    most = max(_PIECE_STACKS // max(schema.row_bytes, 1) if schema.stacked else rows, 1)
    texts = Texts.of(arrays, policy)
    cuts = (
        _cut_sequences(arrays, policy, min(limit, most), texts)
        if policy.has_sequences
        else _cut_rows(arrays, rows, rooms, most=most, texts=texts)
    )
    times = times_of(plain)
    pieces = [
        [
            Piece(
                DEFAULT_POLICY_ID,
                part,
                stop - start,
                text if start == 0 else None,
                stop - start,
                times=times,
            )
        ]
        for start, stop, part in cuts
    ]
    if policy.has_sequences or (texts is not None and texts.most > _GROUP_TEXT):
        for piece in pieces:
            _check_readable(piece, schema)
    return pieces


def _check_readable(pieces: list[Piece], schema: Schema) -> None:
    """Refuse the rows of one row group if readers would refuse it, by their default limits.

    Raises:
        SchemaError: They are too large.
    """
    rows, limits = sum(piece.rows for piece in pieces), DEFAULT_LIMITS
    if rows > limits.group_rows or rows * schema.group_row_bytes > limits.group_bytes:
        raise SchemaError(
            f"{rows} rows of {schema.group_row_bytes} bytes that cannot be cut (a sequence, or several "
            f"policies): at most {limits.group_rows} rows and {limits.group_bytes} bytes; write smaller "
            "batches"
        )
    if rows > _MANY_EPISODES:
        table = StreamTable()
        for piece in pieces:
            table.assign(piece.policy, _stream_columns(piece, schema), piece.rows)
        if len(table.streams) > _MANY_EPISODES:
            raise SchemaError(
                f"{len(table.streams)} episodes in rows that cannot be cut (a sequence, or several "
                f"policies): at most {_MANY_EPISODES}; write smaller batches"
            )
    for piece in pieces:
        for leaf in schema.policies[piece.policy].leaves:
            if leaf.spec.kind in TEXTS:
                _check_text_size(piece.arrays[leaf.physical], leaf.spec, leaf.name, rows)


def _check_text_size(values: NDArray[Any], spec: ColumnSpec, name: str, rows: int) -> None:
    """Refuse texts of a row group by the measure of readers; only large ones are measured exactly."""
    lengths = _lengths(values, spec)
    if spec.kind in ("ragged", "nested"):
        if (size := int(lengths.sum())) > DEFAULT_LIMITS.group_bytes:
            raise SchemaError(
                f"{size} bytes in rows that cannot be cut, more than {DEFAULT_LIMITS.group_bytes}; write "
                "less at once",
                column=name,
            )
        return
    # A character takes at most four bytes of UTF-8, and an object at most 72 times its text.
    most = 4 * int(lengths.sum()) + 64 * rows
    if max(most, int(lengths.max(initial=0)) * _padding(spec) * rows) <= _GROUP_PADDED:
        return
    try:
        texts = to_arrow(values, np.arange(rows) < len(values), spec)
        check_texts(texts.dictionary_encode(), spec, name, DEFAULT_LIMITS)
    except UnsafeData as error:
        found = str(error).removesuffix(f" [column {error.column}]")
        raise SchemaError(f"{found}, in rows that cannot be cut; write less at once", column=name) from error


def attributes_of(batch: SampleBatch) -> dict[str, Any]:
    """Return the set attributes of `ATTRIBUTES`, as JSON values.

    Raises:
        SchemaError: One is not a finite number.
    """
    found: dict[str, Any] = {}
    for name, kind in (("max_seq_len", int), ("num_grad_updates", float)):
        value = getattr(batch, name)
        if value is None:
            continue
        try:
            found[name] = kind(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise SchemaError(f"{name} is {excerpt(value)}: expected a number") from error
        if not math.isfinite(found[name]):
            raise SchemaError(f"{name} is {value}: expected a finite number")
    return found


def _joint_pieces(batch: MultiAgentBatch, schema: Schema) -> list[Piece]:
    parts = [(pid, unpadded(part)) for pid, part in batch.policy_batches.items() if len(part)]
    text = json.dumps({"env_steps": batch.env_steps(), "policies": [[pid, len(part)] for pid, part in parts]})
    times = times_of(*(part for _, part in parts))
    return [
        Piece(
            pid,
            schema.policies[pid].flatten(part, policy=pid),
            len(part),
            text if index == 0 else None,
            batch.env_steps() if index == 0 else 0,
            times=times,
        )
        for index, (pid, part) in enumerate(parts)
    ]


class GroupBuffer:
    """Collects rows of one schema in preallocated arrays, which are reused for every group.

    New memory costs a page fault every 4 KiB, more than the copy itself; so the arrays are reused.
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.rows: int = 0
        self._policies = sorted(schema.policies)
        self._arrays: dict[str, NDArray[Any]] = {}
        self._counts: dict[str, int] = {}
        self._valid: dict[str, NDArray[np.bool_]] = {}
        self._partial = partial_columns(schema)
        self._pairs = schema.stacked
        self._pools = {name: _PoolBuffer(schema, name, stack) for name, (_, stack) in self._pairs.items()}
        self._pooled = {*self._pairs, *(new_obs for new_obs, _ in self._pairs.values())}
        self._capacity = 0
        self._policy = np.empty(0, np.int16)
        self._missing = np.empty(0, np.bool_)
        self._has_missing = False
        #: First row and JSON text of each `write()`.
        self._batches: list[tuple[int, str]] = []
        #: First row and times of each piece.
        self._times: list[tuple[int, Times]] = []
        self._units = 0
        self._env_steps = 0
        self._text = 0
        #: Bytes of the longest text in a column that NumPy pads.
        self._longest = 0
        self._earlier: tuple[tuple[Schema, int], ...] = ()
        self._reserve(schema.group_rows)
        self._clear()

    @property
    def is_full(self) -> bool:
        """Whether the group has the rows of the schema, or its limit of text or frames."""
        # Half of the text limit, because the next piece may have as much as a whole group.
        if self.rows >= self.schema.group_rows or 2 * self._text >= _GROUP_TEXT:
            return True
        return sum(pool.size(self._counts[name]) for name, pool in self._pools.items()) >= _GROUP_FRAMES

    @property
    def room(self) -> int:
        """Rows until the group is full."""
        return max(self.schema.group_rows - self.rows, 0)

    def fits(self, rows: int, texts: list[Texts | None]) -> bool:
        """Whether the group stays small with more ``rows`` with these texts."""
        rows += self.rows
        if rows > self.schema.group_rows:
            return False
        for each in texts:
            if each is not None and (
                each.total > _GROUP_TEXT or rows * each.longest(self._longest) > _GROUP_PADDED
            ):
                return False
        return True

    def append(self, piece: Piece, texts: Texts | None = None) -> None:
        """Copy a piece's rows into the group; its columns must have been checked against the schema.

        Args:
            piece: The rows.
            texts: Those of the piece, if known.
        """
        piece = pooled(piece, self.schema)
        rows, arrays = piece.rows, piece.arrays
        policy = self.schema.policies[piece.policy]
        start, stop = self.rows, self.rows + rows
        self._reserve(stop)
        self._wipe(start, stop)
        counts = dict(self._counts)
        at = slice(start, stop)
        for leaf in policy.per_row:
            if leaf.physical not in self._pooled:
                self._put(leaf.physical, arrays[leaf.physical], at, counts)
        for name, pool in piece.stacks.items():
            counts[name] = self._pools[name].put(pool, start, counts[name])
        units = rows
        if policy.per_sequence:
            lengths = policy.single(arrays, Columns.SEQ_LENS).astype(np.int64)
            firsts = start + np.cumsum(lengths) - lengths
            for leaf in policy.per_sequence:
                self._put(leaf.physical, arrays[leaf.physical], firsts, counts)
            units = len(lengths)
        self._policy[start:stop] = self._policies.index(piece.policy)
        has_missing = self._has_missing
        if Columns.NEXT_OBS_VALID in policy.columns:
            self._missing[start:stop] = ~policy.single(arrays, Columns.NEXT_OBS_VALID).astype(bool)
            has_missing = True
        if piece.attributes is not None:
            self._batches.append((start, piece.attributes))
        self._times.append((start, piece.times))
        texts = Texts.of(arrays, policy) if texts is None else texts
        text = 0 if texts is None else texts.total
        longest = self._longest if texts is None else texts.longest(self._longest)
        # The rows count only from here. These lines call nothing, so no signal can interrupt them.
        self._counts = counts
        self._units += units
        self._has_missing = has_missing
        self._env_steps += piece.env_steps
        self._text += text
        self._longest = longest
        self.rows = stop

    def _wipe(self, start: int, stop: int) -> None:
        """Clear the marks that earlier groups, or an interrupted `append`, left on rows from ``start`` on."""
        for valid in self._valid.values():
            valid[start:stop] = False
        self._missing[start:stop] = False
        marks: list[Any]
        for marks in (self._batches, self._times):
            while marks and marks[-1][0] >= start:
                marks.pop()

    def take(self) -> RowGroup:
        """Return the collected rows as a group, valid until the next `append`, and empty the buffer."""
        rows = self.rows
        columns: dict[str, Nullable] = {}
        stacks = {name: pool.take(rows, self._counts[name]) for name, pool in self._pools.items()}
        for name in self.schema.columns:
            if name in self._arrays:
                valid = self._valid[name][:rows].copy() if name in self._valid else None
                columns[name] = (self._arrays[name][: self._counts[name]], valid)
        group = RowGroup(
            rows=rows,
            columns=columns,
            policy=self._policy[:rows] if len(self._policies) > 1 else None,
            policies=self._policies,
            missing=self._missing[:rows].copy() if self._has_missing else None,
            batches=self._texts_of_batches(),
            units=self._joint_steps(rows) if self.schema.multi_agent else self._units,
            env_steps=self._env_steps,
            stacks=stacks,
            times=self._times,
            earlier=self._earlier,
        )
        self._clear()
        return group

    def extended(self, schema: Schema) -> GroupBuffer:
        """Return a buffer of a schema that `Schema.holds` this one's, with the rows, as if written under it.

        This buffer must not be used any more.
        """
        made = GroupBuffer(schema)
        if not self.rows:
            return made
        made._reserve(self.rows)
        made._policy[: self.rows] = self._policy[: self.rows]
        made._missing[: self.rows] = self._missing[: self.rows]
        made._counts = dict(self._counts)
        for name in made._arrays:
            self._extend(name, made)
        made._pools = self._pools
        knows_missing = [Columns.NEXT_OBS_VALID in schema.policies[pid].columns for pid in self._policies]
        made._has_missing = bool(np.array(knows_missing)[self._policy[: self.rows]].any())
        made._batches, made._times = self._batches, self._times
        made._units, made._env_steps = self._units, self._env_steps
        made._text, made._longest = self._text, self._longest
        made._earlier = (*self._earlier, (self.schema, self.rows - sum(rows for _, rows in self._earlier)))
        made.rows = self.rows
        return made

    def _extend(self, name: str, made: GroupBuffer) -> None:
        """Put the values of a physical column into ``made``: those that were collected, else absent ones."""
        has = self._valid[name][: self.rows] if name in self._valid else np.ones(self.rows, np.bool_)
        spec, before = made.schema.columns[name], self.schema.columns.get(name)
        if before != spec:  # Only the residual of infos gets another spec, and no row had one.
            has = np.zeros(self.rows, np.bool_)
        wanted = has.copy()
        for number, pid in enumerate(self._policies):
            own, earlier = (
                {leaf.physical: leaf.spec for leaf in schema.policies[pid].per_row}.get(name)
                for schema in (made.schema, self.schema)
            )
            if own != earlier:
                wanted |= self._policy[: self.rows] == number
        count = int(wanted.sum())
        values = made._arrays[name][:count]
        if not has.all():
            values[:] = "" if spec.kind == "json" else absent(spec, count)
        if has.any():
            values[has[wanted]] = self._arrays[name][: self._counts[name]]
        made._counts[name] = count
        if name in made._valid:
            made._valid[name][: self.rows] = wanted

    def _texts_of_batches(self) -> list[str | None]:
        texts: list[str | None] = [None] * self.rows
        for row, text in self._batches:
            if row < self.rows:
                texts[row] = text
        return texts

    def _put(
        self, name: str, values: NDArray[Any], at: slice | NDArray[np.int64], counts: dict[str, int]
    ) -> None:
        """Append the values of a column, and record which rows they belong to."""
        count = counts[name]
        counts[name] = stop = count + len(values)
        self._arrays[name][count:stop] = values
        if name in self._valid:
            self._valid[name][at] = True

    def _reserve(self, rows: int) -> None:
        """Make room for ``rows``. Only sequences and joint steps need more rows than a full group."""
        if rows <= self._capacity:
            return
        capacity = max(rows, 2 * self._capacity)
        for name, spec in self.schema.columns.items():
            if name != Columns.NEXT_OBS_VALID and name not in self._pooled:
                dtype, shape = spec.in_groups
                empty = np.empty((0, *shape), dtype)
                self._arrays[name] = _grown(self._arrays.get(name, empty), capacity)
                if name in self._partial:
                    self._valid[name] = _grown(self._valid.get(name, np.empty(0, np.bool_)), capacity)
        self._policy = _grown(self._policy, capacity)
        self._missing = _grown(self._missing, capacity)
        self._capacity = capacity

    def _clear(self) -> None:
        self.rows = 0
        self._counts = dict.fromkeys((*self._arrays, *self._pools), 0)
        self._has_missing = False
        self._batches = []
        self._times = []
        self._units = 0
        self._env_steps = 0
        self._text = 0
        self._longest = 0
        self._earlier = ()

    def _joint_steps(self, rows: int) -> int:
        """Count the distinct (eps_id, t) among the rows, exactly as readers will."""
        parts: dict[str, SampleBatch] = {}
        for number, pid in enumerate(self._policies):
            own = self._policy[:rows] == number
            columns = self.schema.policies[pid].columns
            ids: dict[str, Any] = {}
            for name in (Columns.EPS_ID, Columns.T):
                if name in columns:
                    physical = columns[name][0].physical
                    has = self._valid[physical][:rows] if physical in self._valid else np.ones(rows, bool)
                    ids[name] = self._arrays[physical][: self._counts[physical]][own[has]]
            if len(ids) < 2:  # Without both columns there is one policy, and each row is a step.
                ids = {Columns.T: np.arange(int(own.sum()))}
            parts[pid] = SampleBatch(ids)
        return step_numbers(MultiAgentBatch(parts, 0))[1]


class _PoolBuffer:
    """Collects the frames of one pair of stacked columns, in memory that is reused for every group."""

    def __init__(self, schema: Schema, name: str, stack: FrameStack) -> None:
        spec = schema.columns[name]
        frame = tuple(n for axis, n in enumerate(spec.shape) if axis != stack.axis)
        rows = schema.group_rows
        self._stack = stack
        self._frames = np.empty((rows + rows // 4 + 4 * stack.depth, *frame), spec.numpy)
        self._obs = np.empty((rows, stack.depth), np.int32)
        self._new_obs = np.empty((rows, stack.depth), np.int32)

    def put(self, pool: StackPool, row: int, count: int) -> int:
        """Add the stacks of rows from ``row`` on, after ``count`` frames. Returns the new frame count."""
        frames = pool.frames.values
        end, stop = count + len(frames), row + len(pool.obs)
        if end > len(self._frames):
            self._frames = grown(self._frames, max(end, 2 * len(self._frames)))
        if stop > len(self._obs):
            self._obs, self._new_obs = (
                grown(places, max(stop, 2 * len(places))) for places in (self._obs, self._new_obs)
            )
        places = np.arange(count, end, dtype=np.int32)
        first = len(
            pool.obs
        )  # Where the stack of the first row usually is, and behind it few frames or none.
        last = first + pool.obs.shape[1]
        if row and pool.obs[0].tolist() == [*range(first, last)] and self._ends_with(row, frames[first:last]):
            places[first:last] = self._new_obs[row - 1]
            places[last:] -= last - first
            end -= last - first
            self._frames[count + first : end] = frames[last:]
            self._frames[count : count + first] = frames[:first]
        else:
            self._frames[count:end] = frames
        np.take(places, pool.obs, out=self._obs[row:stop], mode="clip")
        np.take(places, pool.new_obs, out=self._new_obs[row:stop], mode="clip")
        return end

    def size(self, count: int) -> int:
        """Return the bytes of ``count`` frames."""
        return count * self._frames[:1].nbytes

    def _ends_with(self, row: int, stack: NDArray[Any]) -> bool:
        """Whether the stack equals, byte for byte, the new_obs of the row before ``row``."""
        before = self._frames[self._new_obs[row - 1]]
        return np.array_equal(as_unsigned(before), as_unsigned(stack))

    def take(self, rows: int, count: int) -> StackPool:
        """Return the collected stacks as views."""
        return StackPool(Frames(self._frames[:count], self._stack), self._obs[:rows], self._new_obs[:rows])


def partial_columns(schema: Schema) -> set[str]:
    """Return the physical columns that some rows lack: those of only some policies, and of sequences."""
    owners: dict[str, int] = {}
    per_sequence = set()
    for policy in schema.policies.values():
        for leaf in policy.leaves:
            owners[leaf.physical] = owners.get(leaf.physical, 0) + 1
        per_sequence |= {leaf.physical for leaf in policy.per_sequence}
    return {name for name, count in owners.items() if count < len(schema.policies)} | per_sequence


def _grown(old: NDArray[Any], rows: int) -> NDArray[Any]:
    """Return an array of ``rows`` rows that begins with the rows of ``old``.

    Most of it may never be written, so it is memory that the system gives page by page.
    """
    fresh = np.empty((rows, *old.shape[1:]), old.dtype)
    fresh[: len(old)] = old
    return fresh


def unpadded(batch: SampleBatch) -> SampleBatch:
    """Return the rows that are experience, without the zeros that pad sequences.

    Raises:
        SchemaError: Time is the first axis, or a sequence has no rows.
    """
    if batch.time_major:
        raise SchemaError(
            "a time-major batch cannot be written: its first axis is time, not rows; transpose it"
        )
    if Columns.SEQ_LENS in batch and (np.asarray(batch[Columns.SEQ_LENS]) < 1).any():
        raise SchemaError("a sequence of no rows cannot be written; drop it", column=Columns.SEQ_LENS)
    return batch.unpad() if batch.zero_padded else batch


_Cut = tuple[int, int, dict[str, NDArray[Any]]]


def _cut_rows(
    arrays: dict[str, NDArray[Any]],
    rows: int,
    rooms: Iterator[int],
    *,
    most: int,
    texts: Texts | None,
) -> Iterator[_Cut]:
    """Yield parts that fit the room and the text limit, or ``most`` rows: (first row, end row, views)."""
    start = 0
    while start < rows:
        room = min(start + next(rooms), rows)
        while start < room:
            stop = min(start + most, room)
            if texts is not None:
                stop = texts.cut(start, stop)
            whole = stop - start == rows
            yield start, stop, arrays if whole else {name: x[start:stop] for name, x in arrays.items()}
            start = stop


@dataclass(frozen=True)
class Texts:
    """The texts, objects and pictures of some rows, by their lengths.

    Attributes:
        lengths: Physical column -> characters of each row's text, shape (rows,).
        ends: Characters of all rows up to each row, shape (rows,). Those of ``eps_id`` count four times,
            because the footer has them too.
        padding: Physical column that NumPy pads to its longest text -> bytes of a character.
    """

    lengths: dict[str, NDArray[np.int64]]
    ends: NDArray[np.int64]
    padding: dict[str, int]

    @classmethod
    def of(cls, arrays: dict[str, NDArray[Any]], policy: PolicySchema) -> Texts | None:
        """Return the texts of a policy's rows; None without such columns."""
        found = policy.texts
        if not found:
            return None
        lengths = {leaf.physical: _lengths(arrays[leaf.physical], leaf.spec) for leaf in found}
        sizes = [
            lengths[leaf.physical] // _FILE_SHARE
            if leaf.spec.kind == "picture"
            else lengths[leaf.physical] * (4 if leaf.column == Columns.EPS_ID else 1)
            for leaf in found
        ]
        padding = {leaf.physical: size for leaf in found if (size := _padding(leaf.spec))}
        return cls(lengths, np.cumsum(np.sum(sizes, axis=0)), padding)

    @property
    def total(self) -> int:
        """Characters of all rows."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def most(self) -> int:
        """Characters of the row that has the most."""
        return int(np.diff(self.ends, prepend=0).max(initial=0))

    def longest(self, least: int = 0) -> int:
        """Return the bytes of the longest text in a padded column, at least ``least``."""
        found = [size * int(self.lengths[name].max(initial=0)) for name, size in self.padding.items()]
        return max([least, *found])

    def cut(self, start: int, stop: int) -> int:
        """Return the end, up to ``stop``, of a part from ``start`` on that is small, or a single row."""
        before = self.ends[start - 1] if start else 0
        stop = min(int(np.searchsorted(self.ends, before + _GROUP_TEXT, side="right")), stop)
        for name, size in self.padding.items():
            lengths = self.lengths[name][start:stop]
            if size * len(lengths) * int(lengths.max(initial=0)) > _GROUP_PADDED:
                padded = size * np.maximum.accumulate(lengths) * np.arange(1, len(lengths) + 1)
                stop = start + int(np.searchsorted(padded, _GROUP_PADDED, side="right"))
        return max(stop, start + 1)


def _lengths(texts: NDArray[Any], spec: ColumnSpec) -> NDArray[np.int64]:
    """Return the characters of each text, or the bytes of each picture or list, shape (rows,)."""
    listed = texts.tolist()
    if spec.structure is not None:
        return spec.structure.sizes(listed)
    if len(listed) and isinstance(listed[0], np.ndarray):
        items = np.fromiter(map(len, listed), np.int64, len(listed))
        size: int = listed[0].itemsize * math.prod(listed[0].shape[1:])
        return items * size
    if is_encoded(texts):
        listed = [picture.data for picture in listed]
    return np.fromiter(map(len, listed), np.int64, len(texts))


def _padding(spec: ColumnSpec) -> int:
    """Return the bytes of a character in an array that NumPy pads; 0: each text is an object."""
    if spec.kind == "picture":
        return 0
    return {"|O": 0, "|S": 1}.get(spec.dtype, 4)


def _cut_sequences(
    arrays: dict[str, NDArray[Any]], policy: PolicySchema, limit: int, texts: Texts | None
) -> Iterator[_Cut]:
    """Yield whole sequences, in parts of at most ``limit`` rows or of one longer sequence."""
    per_sequence = {leaf.physical for leaf in policy.per_sequence}
    ends = np.cumsum(policy.single(arrays, Columns.SEQ_LENS))
    if texts is not None and texts.total:
        rows, longest = len(texts.ends), texts.longest()
        limit = max(min(limit, _GROUP_TEXT * rows // texts.total, _GROUP_PADDED // max(longest, 1)), 1)
    first = 0
    while first < len(ends):
        start = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, start + limit, side="right")))
        stop = int(ends[last - 1])
        yield (
            start,
            stop,
            {
                name: values[first:last] if name in per_sequence else values[start:stop]
                for name, values in arrays.items()
            },
        )
        first = last
