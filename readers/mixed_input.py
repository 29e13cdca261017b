"""Mixes readers by steps, exactly: each source stays within one step of its share for ever.

Example:
    >>> from rlio.batch import SampleBatch
    >>> from rlio.reader import InputReader
    >>> class Always(InputReader):
    ...     def __init__(self, value):
    ...         self.value = value
    ...     def _next(self):
    ...         return SampleBatch(rewards=[self.value] * 100)
    >>> mix = MixedInput([(Always(1.0), 0.7), (Always(2.0), 0.2), (Always(3.0), 0.1)], batch_size=10)
    >>> mix.sample()["rewards"].tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 3.0]
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch, MultiAgentBatch, SampleBatch, concat_samples, count_units
from rlio.batch.columns import Columns
from rlio.batch.join import UNLIKE, Unlike
from rlio.errors import EndOfData, OptionError, StateError, excerpt
from rlio.reader import Endless, InputReader, JsonState
from rlio.readers.mix_block import MixBlock, plain_columns, woven
from rlio.readers.mix_schedule import Schedule, Shares, Weight, whole_weights
from rlio.readers.mix_source import MOST_AHEAD, MixSource
from rlio.readers.read_options import check_batch_size
from rlio.replay.buffers import Buffers
from rlio.replay.joint_gather import JointGather
from rlio.replay.order import Permutation

__all__ = ["MixedInput"]

logger = logging.getLogger("rlio")

Weights: TypeAlias = Mapping[str, Weight] | Sequence[Weight]

Sources: TypeAlias = (
    Mapping[str, InputReader] | Mapping[InputReader, Weight] | Iterable[tuple[InputReader, Weight]]
)

# Bytes that are put together at once, of as many batches as that makes; as many again wait with the sources.
_AHEAD_BYTES = 4 << 20
_ENDS = ("error", "rewind", "renormalise")
# Columns of which it is known what they are where they are absent.
_KEPT = (Columns.TRUNCATEDS, Columns.NEXT_OBS_VALID)


class MixedInput(InputReader):
    """Gives batches that hold steps of every source in proportion to its weight.

    Shares are exact in steps (or sequences, where all sources count in those), whatever the sizes of the
    sources' own batches: see `Schedule`. The rows of a batch are grouped by source, in the sources' order,
    so that sequences and fragments stay whole. A SampleBatch beside a MultiAgentBatch is wrapped as
    ``default_policy``.

    Args:
        sources: Name -> reader, with ``weights``; or reader -> weight; or pairs (reader, weight). Sources
            without a name are called ``source_0``, ``source_1``, ... The mixture owns and closes them.
        batch_size: Steps of `sample()`; where all sources are endless, no more than they have together.
        weights: Relative, they need no particular sum: name -> weight or, in the sources' order, a sequence.
            Or a function of the steps served so far that gives either; it is called before each batch, and
            where its result changes, what a source was owed is carried over. None: equal weights, or those
            given with the sources.
        seed: Decides which of equally entitled sources goes first; None: in the sources' order.
        end: What happens when a source ends while others go on. ``"error"`` raises; ``"rewind"`` starts it
            again from where it stood when the mixture was made; ``"renormalise"`` goes on without it. When
            all end, the last batch may be short, and then comes `EndOfData`.
        columns: What happens when sources have unlike columns, as in `concat_samples`: ``"error"``;
            ``"intersect"``, the columns that all sources have in their first batches; or ``"fill"``. What is
            left out is logged. Where some sources have ``truncateds`` and others only ``terminateds``, it is
            False in the rows of these, and that is logged, once.
        source_column: Whether each row carries its source's name, in the column ``source``; the names of a
            mixture within follow after a slash.

    Raises:
        OptionError: An argument is illegal: no sources, one twice, a weight that is negative or not finite,
            all weights 0, sources that count in different units.
    """

    def __init__(
        self,
        sources: Sources,
        *,
        batch_size: int,
        weights: Weights | Callable[[int], Weights] | None = None,
        seed: int | None = None,
        end: Literal["error", "rewind", "renormalise"] = "error",
        columns: Unlike = "error",
        source_column: bool = False,
    ) -> None:
        if operator.index(batch_size) < 1:
            raise OptionError(f"batch_size={batch_size}: steps of a batch, at least 1")
        for option, value, known in (("end", end, _ENDS), ("columns", columns, UNLIKE)):
            if value not in known:
                raise OptionError(f"{option}={excerpt(value)}: one of {', '.join(map(repr, known))}")
        readers, given = _named(sources)
        if given is not None and weights is not None:
            raise OptionError("the sources come with weights already: leave out weights=")
        count = len(readers)
        self.batch_size = operator.index(batch_size)
        self.end = end
        self.columns = columns
        self.source_column = source_column
        self.replayable = all(reader.replayable for reader in readers.values())
        self.unit = next(iter(readers.values())).unit
        self._sources = [MixSource(name, reader, rewinds=end == "rewind") for name, reader in readers.items()]
        self._order = list(range(count))
        if seed is not None:
            self._order = Permutation(count, seed=seed, epoch=0).take(0, count).tolist()
        self._function: Callable[[int], Weights] | None = None
        if callable(weights):
            self._function = weights
            weights = weights(0)
        elif weights is None:
            weights = [1] * count if given is None else given
        self._raw = self._aligned(weights)
        self._whole = whole_weights(self._raw, list(readers))
        self._schedule = Schedule(self._whole, order=self._order)
        self._multi_agent = False
        #: Policy -> name of a source -> the columns of its rows, of the sources that were met.
        self._met: dict[str, dict[str, frozenset[str]]] = {}
        self._kept = (*_KEPT, Columns.SOURCE) if source_column else _KEPT
        # What was logged: sources without truncateds, and columns that are left out.
        self._never_truncated: set[str] = set()
        self._left_out: list[dict[str, list[str]]] = []
        #: Batches that were put together at once, and not all given yet.
        self._block: MixBlock | None = None
        #: What gathers the rows of all sources together, once it is known whether that can be.
        self._joint: tuple[JointGather | None] | None = None
        #: Whether sources may be read before their rows are asked for; and bytes of a row, once known.
        self._reads_ahead = self.unit == "steps" and all(reader.can_read_ahead for reader in readers.values())
        self._row_bytes: int | None = None
        # Batches to join one by one before the sources are read ahead again.
        self._alone = 0
        self._buffers = Buffers()

    @property
    def sources(self) -> dict[str, InputReader]:
        """Name -> reader."""
        self._settle()
        return {source.name: source.reader for source in self._sources}

    @property
    def counts(self) -> dict[str, int]:
        """Name -> steps served so far."""
        self._settle()
        return {source.name: source.served for source in self._sources}

    @property
    def skipped(self) -> int:
        """What the sources left out, in all."""
        return sum(source.reader.skipped for source in self._sources)

    # ---- one batch ----

    def _next(self) -> Batch:
        block = self._block
        if block is None:
            self._check_size(self.batch_size)
            block = self._block = self._next_block()
            if block is None:
                return self._join(self.batch_size)
        batch = block.cut()
        if block.is_spent:
            self._settle()
            self._block = None
        return batch

    def _take(self, n: int) -> Batch:
        if n == self.batch_size:
            return self._next()
        self._settle()
        self._block = None
        self._check_size(n)
        return self._join(n)

    def _check_size(self, n: int) -> None:
        found = self._endless()
        check_batch_size(n, there=None if found is None else found.units, unit=self.unit)

    def _endless(self) -> Endless | None:
        units: int | None = 0
        for source in self._sources:
            found = source.reader._endless()
            if found is None:
                return None
            units = None if units is None or found.units is None else units + found.units
        return Endless(0, units)

    def _join(self, n: int) -> Batch:
        """A batch of ``n`` units, joined of what each source gives."""
        # What is left over waits with the sources, so the mixture itself has nothing left over.
        self._follow_weights()
        schedule, counts = self._schedule, self._schedule.counts
        drawn: list[list[Batch]] = [[] for _ in self._sources]
        try:
            self._draw(n, drawn)
            made = self._joined(drawn)
        except BaseException:
            # A source that fails, or one that does not fit the others, costs no rows: they come next time.
            self._schedule, schedule.counts = schedule, counts
            for source in self._sources:
                source.undo()
            raise
        for source, parts in zip(self._sources, drawn, strict=True):
            source.commit(sum(count_units(part, self.unit) for part in parts))
        if self._row_bytes is None and self._reads_ahead:
            self._look_at(made)
        return made

    # ---- several batches at once ----

    def _next_block(self) -> MixBlock | None:
        """The next batches, put together at once; None where they are joined one by one.

        Nothing is served before it is given: `_settle` steps the sources over what was.
        """
        if self._function is not None:
            return None
        if self._joint is None:
            self._joint = (JointGather.of([source.rows for source in self._sources]),)
        gather = self._joint[0]
        if gather is not None and not any(source.is_cut for source in self._sources):
            shares = self._schedule.plan(self.batch_size, max(self._batches_of(gather.row_bytes), 1))
            columns = gather.columns(shares)
            if columns is not None:
                return self._block_of(columns, shares)
        if self._alone:  # Batches that are joined one by one.
            self._alone -= 1
            return None
        if not self._reads_ahead or self._row_bytes is None:
            return None
        return self._read_ahead(self._batches_of(self._row_bytes))

    def _batches_of(self, row_bytes: int) -> int:
        """How many batches are put together at once."""
        return min(MOST_AHEAD, _AHEAD_BYTES // max(row_bytes, 1)) // self.batch_size

    def _read_ahead(self, batches: int) -> MixBlock | None:
        """The next batches, of sources that can be read ahead; None where that gives less than two."""
        shares = self._filled(self._schedule.plan(self.batch_size, batches)) if batches > 1 else []
        if len(shares) < 2:
            return None
        parts = [
            source.parts if any(own) else []
            for source, own in zip(self._sources, zip(*shares, strict=True), strict=True)
        ]
        columns = woven(parts, shares, self._buffers)
        if columns is None:
            self._reads_ahead = False
            return None
        return self._block_of(columns, shares)

    def _block_of(self, columns: dict[str, NDArray[Any]], shares: list[Shares]) -> MixBlock | None:
        """The batches that the columns hold; None, for ever, where each row says already where it is from."""
        if self.source_column:
            if Columns.SOURCE in columns:
                self._joint, self._reads_ahead = (None,), False
                return None
            names = np.array([source.name for source in self._sources] * len(shares), object)
            columns[Columns.SOURCE] = names.repeat([rows for share in shares for rows in share])
        return MixBlock(columns, shares=shares, batch_size=self.batch_size)

    def _filled(self, shares: list[Shares]) -> list[Shares]:
        """Read what some batches have of each source, and give those for which all is there."""
        have = []
        for source, own in zip(self._sources, zip(*shares, strict=True), strict=True):
            try:
                source.fill(sum(own))
            except Exception as error:
                # Batches before the trouble can still be given. The one that runs into it raises it again.
                logger.debug("source %r cannot be read ahead: %r", source.name, error)
                self._alone = len(shares)
            have.append(source.waiting_units())
        for number, share in enumerate(shares):
            have = [there - rows for there, rows in zip(have, share, strict=True)]
            if min(have) < 0:
                return shares[:number]
        return shares

    def _look_at(self, batch: Batch) -> None:
        """Find out from a first batch whether, and how far, sources may be read ahead."""
        columns = plain_columns(batch)
        if columns is None:
            self._reads_ahead = False
        elif len(batch):
            self._row_bytes = sum(column.nbytes for column in columns.values()) // len(batch)

    def _settle(self) -> None:
        """Step the sources over what was given of a block."""
        if self._block is None:
            return
        given = self._block.settle()
        if not given:
            return
        for source, rows in zip(self._sources, given, strict=True):
            if rows:
                source.give(rows)
        counts = self._schedule.counts
        self._schedule.counts = [count + rows for count, rows in zip(counts, given, strict=True)]

    def _draw(self, n: int, drawn: list[list[Batch]]) -> None:
        """Add ``n`` units to ``drawn``, fewer only if all sources end."""
        missing = n
        while missing:
            ended = []
            for i, share in enumerate(self._schedule.deal(missing)):
                got = self._sources[i].draw(share, drawn[i]) if share else 0
                missing -= got
                if got < share:
                    ended.append(self._sources[i])
            if not ended:
                return
            self._take_leave(ended)
            if not any(self._alive()):
                if missing == n:
                    raise EndOfData(f"all sources of the mixture have ended: {self.counts}")
                return
            self._schedule = Schedule(self._alive(), order=self._order)

    def _take_leave(self, ended: list[MixSource]) -> None:
        """Mark sources that ended; raise if others go on and may not do so alone."""
        if self.end != "renormalise":
            for source, weight in zip(self._sources, self._whole, strict=True):
                if not weight or source in ended or source.at_end():
                    continue
                why = "cannot rewind, as it is not replayable" if self.end == "rewind" else "end='error'"
                raise OptionError(
                    f"source {ended[0].name!r} of the mixture ended after {ended[0].served} served "
                    f"{self.unit} ({ended[0].end}) while {source.name!r} goes on, and {why}: give it more "
                    "epochs, or say end='rewind' or end='renormalise'"
                )
            ended = self._sources
        for source in ended:
            source.ended = True

    def _alive(self) -> list[int]:
        """The weights, 0 for sources that ended."""
        return [
            0 if source.ended else weight for source, weight in zip(self._sources, self._whole, strict=True)
        ]

    def _joined(self, drawn: list[list[Batch]]) -> Batch:
        """One batch of the parts, which are the mixture's own."""
        parts = []
        for source, own in zip(self._sources, drawn, strict=True):
            for part in own:
                self._multi_agent |= isinstance(part, MultiAgentBatch)
                if self.source_column:
                    _mark(part, source.name)
                parts.append(part)
        if self.columns != "error":
            self._bring_together(drawn)
        batch = parts[0] if len(parts) == 1 else concat_samples(parts, columns=self.columns)
        # Once a source has several agents, batches of the others alone look the same as the joined ones.
        if self._multi_agent and isinstance(batch, SampleBatch):
            return batch.as_multi_agent()
        return batch

    def _bring_together(self, drawn: list[list[Batch]]) -> None:
        """Give the parts, which are the mixture's own, the columns that the sources make together."""
        if not self._met:
            # All sources are met at once, so that all batches have the same columns.
            for source, weight, own in zip(self._sources, self._whole, drawn, strict=True):
                first = source.peek() if weight and not own and not source.ended else None
                if first is not None:
                    self._meet(source.name, first)
        for source, own in zip(self._sources, drawn, strict=True):
            for part in own:
                self._meet(source.name, part)
        self._say_left_out()
        for source, own in zip(self._sources, drawn, strict=True):
            for batch in own:
                for policy, rows in batch.policies().items():
                    self._align(source.name, policy, rows)

    def _meet(self, source: str, batch: Batch) -> None:
        for policy, rows in batch.policies().items():
            if len(rows):
                self._met.setdefault(policy, {}).setdefault(source, frozenset(rows))

    def _align(self, source: str, policy: str, rows: SampleBatch) -> None:
        met = self._met.get(policy, {}).values()
        lacks_flag = Columns.TERMINATEDS in rows and Columns.TRUNCATEDS not in rows
        if lacks_flag and any(Columns.TRUNCATEDS in columns for columns in met):
            rows[Columns.TRUNCATEDS] = np.zeros_like(rows[Columns.TERMINATEDS])
            if source not in self._never_truncated:
                self._never_truncated.add(source)
                logger.warning(
                    "the source %r of the mixture does not say which episodes were truncated, as others do: "
                    "truncateds is False in its rows",
                    source,
                )
        if self.columns == "intersect" and met:
            for name in set(rows).difference(frozenset.intersection(*met), self._kept):
                del rows[name]

    def _say_left_out(self) -> None:
        """Log, once, the columns that not all sources have."""
        for met in self._met.values() if self.columns == "intersect" else ():
            common = frozenset.intersection(*met.values()).union(self._kept)
            left = {name: sorted(columns - common) for name, columns in met.items() if columns - common}
            if left and left not in self._left_out:
                self._left_out.append(left)
                logger.warning("columns that not all sources of the mixture have are left out: %s", left)

    # ---- weights ----

    def _aligned(self, weights: object) -> list[Weight]:
        """Weights, which a user's function may have given, in the order of the sources."""
        names = [source.name for source in self._sources]
        if isinstance(weights, Mapping):
            if set(weights) != set(names):
                raise OptionError(
                    f"weights name {excerpt(list(weights))} but the sources are {excerpt(names)}"
                )
            return [weights[name] for name in names]
        if not isinstance(weights, Sequence) or len(weights) != len(names):
            raise OptionError(
                f"weights are {excerpt(weights)}: name -> weight, or one for each of the {len(names)} sources"
            )
        return list(weights)

    def _follow_weights(self) -> None:
        """Ask the function of weights, if there is one, and follow a change."""
        if self._function is None:
            return
        raw = self._aligned(self._function(sum(source.served for source in self._sources)))
        if raw == self._raw:
            return
        self._raw = raw
        whole = whole_weights(raw, [source.name for source in self._sources])
        if whole != self._whole:
            self._whole = whole
            if any(self._alive()):
                self._schedule = Schedule(self._alive(), order=self._order, credits=self._schedule.owed())

    # ---- state ----

    def state_dict(self) -> JsonState:
        self._settle()
        state = super().state_dict()
        state["dropped"] += sum(
            source.waiting_units() for source in self._sources if not source.reader.replayable
        )
        return state

    def _position(self) -> JsonState:
        position: JsonState = {
            # The lists are in this order: that of the sources below may get lost in JSON.
            "names": [source.name for source in self._sources],
            "sources": {source.name: source.position() for source in self._sources},
            "served": [source.served for source in self._sources],
            "ended": [source.ended for source in self._sources],
            "weights": self._whole,
            "order": self._order,
            "counts": self._schedule.counts,
            "credits": self._schedule.credits,
            "multi_agent": self._multi_agent,
        }
        if self.end == "rewind":
            position["starts"] = [source.start for source in self._sources]
        return position

    def _seek(self, position: JsonState) -> None:
        names = [source.name for source in self._sources]
        # States of 4d4987e have the names as the keys of "sources" only.
        stored = position.get("names", list(position["sources"]))
        checks = [("names", stored, names), ("order", position["order"], self._order)]
        if self._function is None:
            checks.append(("weights", position["weights"], self._whole))
        for key, found, expected in checks:
            if found != expected:
                raise StateError(
                    f"state['position'][{key!r}] is {excerpt(found)} but this one has {excerpt(expected)}: "
                    "make it with the sources, weights and seed of the one that saved it"
                )
        for name in ("counts", "credits", "weights"):
            numbers = position[name]
            if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
                raise StateError(f"state['position'][{name!r}] is {excerpt(numbers)}: expected whole numbers")
        self._block, self._alone = None, 0
        for i, source in enumerate(self._sources):
            source.seek(position["sources"][source.name])
            source.served = int(position["served"][i])
            source.ended = bool(position["ended"][i])
            if self.end == "rewind":
                source.start = position["starts"][i]
        self._whole = list(position["weights"])
        # Whatever the function gives next is compared with the weights themselves.
        self._raw = []
        alive = self._alive()
        if any(alive):
            self._schedule = Schedule(alive, order=self._order, credits=position["credits"])
            self._schedule.counts = list(position["counts"])
        self._multi_agent = bool(position["multi_agent"])

    def interrupt(self) -> None:
        """Interrupt the sources; see `InputReader`."""
        for source in self._sources:
            source.reader.interrupt()

    def _close(self) -> None:
        self._settle()
        self._block = self._joint = None  # The rows of stores should not wait for the garbage collector.
        first: Exception | None = None
        for source in self._sources:
            try:
                source.reader.close()
            except Exception as failure:
                place = f"source {source.name!r} of the mixture, as it closed"
                if first is None:
                    first = failure
                    first.add_note(f"raised by {place}")
                else:
                    first.add_note(f"{place}, failed too: {failure!r}")
        if first is not None:
            raise first


def _named(sources: Sources) -> tuple[dict[str, InputReader], list[Weight] | None]:
    """Name -> reader, and the weights if they come with the readers."""
    pairs = list(sources.items()) if isinstance(sources, Mapping) else list(sources)
    readers: dict[str, InputReader] = {}
    weights: list[Weight] = []
    for number, pair in enumerate(pairs):
        match pair:
            case (str() as name, InputReader() as reader) if isinstance(sources, Mapping):
                readers[name] = reader
            case (InputReader() as reader, weight) if not isinstance(weight, InputReader):
                readers[f"source_{number}"] = reader
                weights.append(weight)
            case _:
                raise OptionError(
                    f"source {number} of the mixture is {excerpt(pair)}: give name -> reader, "
                    "reader -> weight or pairs (reader, weight); rlio.read() opens paths and mixes of them"
                )
    if not readers or len({id(reader) for reader in readers.values()}) < len(readers):
        raise OptionError(f"a mixture needs one source or more, each reader once; it was given {len(pairs)}")
    if weights and len(weights) < len(readers):
        raise OptionError("some sources have names and others weights: name all of them, or none")
    units = {name: reader.unit for name, reader in readers.items()}
    if len(set(units.values())) > 1:
        raise OptionError(f"the sources count in different units: {excerpt(units)}; a mixture needs one")
    return readers, weights or None


def _mark(batch: Batch, name: str) -> None:
    """Give ``batch``, which is ours, the column `Columns.SOURCE`."""
    for part in batch.policies().values():
        rows = np.empty(len(part), object)
        if Columns.SOURCE in part:
            rows[:] = [f"{name}/{inner}" for inner in part[Columns.SOURCE]]
        else:
            rows[:] = name
        part[Columns.SOURCE] = rows
