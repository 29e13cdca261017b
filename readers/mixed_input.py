"""Mixes readers by steps, exactly: each source stays within one step of its share for ever.

Example:
    >>> from rlio.batch import SampleBatch
    >>> from rlio.interfaces import InputReader, ReadLedger
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

import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from rlio.batch import MultiAgentBatch, SampleBatch, concat_samples, count_units, split_units
from rlio.columns import Columns
from rlio.errors import EndOfData, OptionError, StateError, excerpt
from rlio.interfaces import Batch, InputReader, JsonState, ReadLedger
from rlio.readers.mix_schedule import Schedule, Weight, whole_weights
from rlio.replay.joint_gather import JointGather, RowSource
from rlio.replay.order import Permutation

__all__ = ["MixedInput"]

Weights: TypeAlias = Mapping[str, Weight] | Sequence[Weight]

Sources: TypeAlias = (
    Mapping[str, InputReader] | Mapping[InputReader, Weight] | Iterable[tuple[InputReader, Weight]]
)

# Rows that are gathered together, of as many batches as that makes.
_AHEAD_ROWS = 4096
_ENDS = ("error", "rewind", "renormalise")
_COLUMNS = ("error", "intersect", "fill")


class _Waiting(NamedTuple):
    """What is left of a batch of a source, the source's state before it, and how many units were served."""

    batch: Batch
    origin: JsonState
    served: int


class _Ahead(NamedTuple):
    """Batches whose rows were gathered together.

    Attributes:
        block: The rows of all.
        shares: For each batch, how many are of each source.
        counts: For each batch, what the schedule has dealt after it.
        given: How many batches were given.
    """

    block: SampleBatch
    shares: list[list[int]]
    counts: list[list[int]]
    given: int


class _Source:
    """A reader of the mixture, read in its own sizes and cut to measure here.

    Cutting a batch costs 2 us, asking a reader for a few rows ten times that and more.
    """

    def __init__(self, name: str, reader: InputReader, *, rewinds: bool) -> None:
        self.name = name
        self.reader = reader
        self.served = 0
        self.ended = False
        # Rows: that the reader gave, that were drawn for good, and what it lost before it was rewound.
        self._rows_read = self._rows_served = 0
        self._lost = ReadLedger()
        #: Where it begins again; None: nowhere.
        self.start: JsonState | None = reader.state_dict() if rewinds and reader.replayable else None
        self._waiting: deque[_Waiting] = deque()
        # Drawn since the last `commit`, and what the last one of those left over.
        self._taken: list[_Waiting] = []
        self._tail: _Waiting | None = None

    def draw(self, n: int, parts: list[Batch]) -> int:
        """Add up to ``n`` units to ``parts``, fewer at the end, and return how many; it rewinds if it may."""
        missing, rewound = n, False
        while missing:
            if not self._waiting and not self._read():
                if self.start is None:
                    break
                if rewound:
                    raise OptionError(
                        f"source {self.name!r} of the mixture has no {self.reader.unit}: leave it out"
                    )
                # Trimmed rows are gone once, not in every pass.
                self._lost += replace(_losses(self.reader), trimmed=0)
                self.reader.load_state_dict(self.start)
                rewound = True
                continue
            waiting = self._waiting.popleft()
            self._taken.append(waiting)
            batch, size = waiting.batch, count_units(waiting.batch, self.reader.unit)
            if size > missing:
                batch, tail = split_units(batch, missing, self.reader.unit)
                self._tail = _Waiting(tail, waiting.origin, waiting.served + missing)
                self._waiting.appendleft(self._tail)
                size = missing
            if size:
                parts.append(batch)
                rewound = False
            missing -= size
        return n - missing

    @property
    def rows(self) -> RowSource | None:
        """Its next rows where they lie; None if they do not lie in a store."""
        found: RowSource | None = getattr(self.reader, "row_source", None)
        return found

    @property
    def is_cut(self) -> bool:
        """Whether a part of a batch waits."""
        return bool(self._waiting)

    def give(self, rows: int) -> None:
        """Step over rows that were given from where they lie."""
        source = self.rows
        assert source is not None
        source.advance(rows)
        self.reader._give(rows)
        self._rows_read += rows
        self._rows_served += rows
        self.served += rows

    def at_end(self) -> bool:
        """Whether nothing is left, and it cannot rewind."""
        return self.start is None and not self._waiting and not self._read()

    def commit(self, parts: list[Batch]) -> None:
        """What was drawn is served: ``parts``."""
        self._taken.clear()
        self._rows_served += sum(part.agent_steps() for part in parts)

    @property
    def ledger(self) -> ReadLedger:
        """Rows that the reader gave, those excepted that wait, and what it left out."""
        waiting = sum(waiting.batch.agent_steps() for waiting in self._waiting)
        rows = ReadLedger(expected=self._rows_read - waiting, served=self._rows_served)
        return rows.over(self._lost + _losses(self.reader))

    def undo(self) -> None:
        """Take back what was drawn since the last `commit`."""
        if self._taken and self._waiting and self._waiting[0] is self._tail:
            self._waiting.popleft()
        self._waiting.extendleft(reversed(self._taken))
        self._taken.clear()

    def waiting_units(self) -> int:
        """Units that were read and wait to be served."""
        return sum(count_units(waiting.batch, self.reader.unit) for waiting in self._waiting)

    def position(self) -> JsonState:
        """The state from which the reader gives first what waits; a live one cannot, and goes on behind."""
        if self._waiting and self.reader.replayable:
            return {"state": self._waiting[0].origin, "served": self._waiting[0].served}
        return {"state": self.reader.state_dict(), "served": 0}

    def seek(self, position: JsonState) -> None:
        """Stand where `position` was taken."""
        self._waiting.clear()
        self.reader.load_state_dict(position["state"])
        self._rows_read = self._rows_served = 0
        self._lost = ReadLedger()
        served = int(position["served"])
        if served == 0:
            return
        size = count_units(self._waiting[0].batch, self.reader.unit) if self._read() else 0
        if not 0 < served < size:
            raise StateError(
                f"the state says that {served} {self.reader.unit} of a batch of source {self.name!r} were "
                f"served, but it has {size}: the data changed since it was saved"
            )
        whole = self._waiting.popleft()
        head, tail = split_units(whole.batch, served, self.reader.unit)
        self._rows_read -= head.agent_steps()  # Before the state was saved.
        self._waiting.append(_Waiting(tail, whole.origin, served))

    def _read(self) -> bool:
        """Read a batch, or return False at the end."""
        origin = self.reader.state_dict()
        try:
            batch = self.reader.sample()
        except EndOfData:
            return False
        self._rows_read += batch.agent_steps()
        self._waiting.append(_Waiting(batch, origin, 0))
        return True


def _losses(reader: InputReader) -> ReadLedger:
    """What a reader did not give."""
    ledger = reader.ledger
    return ReadLedger(skipped=ledger.skipped, dropped=ledger.dropped, trimmed=ledger.trimmed)


class MixedInput(InputReader):
    """Gives batches that hold steps of every source in proportion to its weight.

    Shares are exact in steps (or sequences, where all sources count in those), whatever the sizes of the
    sources' own batches: see `Schedule`. The rows of a batch are grouped by source, in the sources' order,
    so that sequences and fragments stay whole. A SampleBatch beside a MultiAgentBatch is wrapped as
    ``default_policy``.

    Args:
        sources: Name -> reader, with ``weights``; or reader -> weight; or pairs (reader, weight). Sources
            without a name are called ``source_0``, ``source_1``, ... The mixture owns and closes them.
        batch_size: Steps of `sample()`.
        weights: Relative, they need no particular sum: name -> weight or, in the sources' order, a sequence.
            Or a function of the steps served so far that gives either; it is called before each batch, and
            where its result changes, what a source was owed is carried over. None: equal weights, or those
            given with the sources.
        seed: Decides which of equally entitled sources goes first; None: in the sources' order.
        end: What happens when a source ends while others go on. ``"error"`` raises; ``"rewind"`` starts it
            again from where it stood when the mixture was made; ``"renormalise"`` goes on without it. When
            all end, the last batch may be short, and then comes `EndOfData`.
        columns: What happens when sources have unlike columns, as in `concat_samples`: ``"error"``,
            ``"intersect"`` or ``"fill"``.
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
        columns: Literal["error", "intersect", "fill"] = "error",
        source_column: bool = False,
    ) -> None:
        if operator.index(batch_size) < 1:
            raise OptionError(f"batch_size={batch_size}: steps of a batch, at least 1")
        for option, value, known in (("end", end, _ENDS), ("columns", columns, _COLUMNS)):
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
        self._sources = [_Source(name, reader, rewinds=end == "rewind") for name, reader in readers.items()]
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
        #: What gathers the rows of all sources together, once it is known whether that can be.
        self._joint: tuple[JointGather | None] | None = None
        self._ahead: _Ahead | None = None

    @property
    def sources(self) -> dict[str, InputReader]:
        """Name -> reader."""
        return {source.name: source.reader for source in self._sources}

    @property
    def counts(self) -> dict[str, int]:
        """Name -> steps served so far."""
        return {source.name: source.served for source in self._sources}

    @property
    def ledgers(self) -> dict[str, ReadLedger]:
        """Name -> what became of the rows of that source, since the mixture was made or restored."""
        return {source.name: source.ledger for source in self._sources}

    @property
    def ledger(self) -> ReadLedger:
        """The sum of `ledgers`, but for the rows served, which are those of the mixture's batches."""
        own = super().ledger
        total = sum(self.ledgers.values(), ReadLedger(dropped=own.dropped))
        return replace(total, served=own.served)

    # ---- one batch ----

    def _next(self) -> Batch:
        return self._take(self.batch_size)

    def _take(self, n: int) -> Batch:
        ahead = self._take_ahead() if n == self.batch_size else None
        if ahead is not None:
            return ahead
        self._ahead = None
        # What is left over waits with the sources, so the mixture itself has nothing left over.
        self._follow_weights()
        schedule, counts = self._schedule, self._schedule.counts
        drawn: list[list[Batch]] = [[] for _ in self._sources]
        try:
            self._draw(n, drawn)
            batch = self._joined(drawn)
        except BaseException:
            # A source that fails, or one that does not fit the others, costs no rows: they come next time.
            self._schedule, schedule.counts = schedule, counts
            for source in self._sources:
                source.undo()
            raise
        for source, parts in zip(self._sources, drawn, strict=True):
            source.commit(parts)
            source.served += sum(count_units(part, self.unit) for part in parts)
        return batch

    def _take_ahead(self) -> Batch | None:
        """The next batch, of several whose rows were gathered together; None where they cannot be.

        Nothing is drawn before it is given: the sources are stepped over what each batch has of them.
        """
        if self._ahead is None:
            self._ahead = self._gather_ahead()
            if self._ahead is None:
                return None
        ahead, at = self._ahead, self._ahead.given
        batch: Batch = ahead.block[at * self.batch_size : (at + 1) * self.batch_size]
        for source, share in zip(self._sources, ahead.shares[at], strict=True):
            if share:
                source.give(share)
        self._schedule.counts = ahead.counts[at]
        self._ahead = None if at + 1 == len(ahead.shares) else ahead._replace(given=at + 1)
        return batch

    def _gather_ahead(self) -> _Ahead | None:
        """Some batches at once, of sources that are all stores of like rows and have enough of them."""
        if self._function is not None or self.source_column or any(s.is_cut for s in self._sources):
            return None
        if self._joint is None:
            self._joint = (JointGather.of([source.rows for source in self._sources]),)
        gather = self._joint[0]
        if gather is None:
            return None
        schedule, shares, counts = self._schedule.twin(), [], []
        for _ in range(max(_AHEAD_ROWS // self.batch_size, 1)):
            shares.append(schedule.deal(self.batch_size))
            counts.append(schedule.counts)
        block = gather.block(shares)
        return None if block is None else _Ahead(block, shares, counts, 0)

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

    def _take_leave(self, ended: list[_Source]) -> None:
        """Mark sources that ended; raise if others go on and may not do so alone."""
        if self.end != "renormalise":
            for source, weight in zip(self._sources, self._whole, strict=True):
                if not weight or source in ended or source.at_end():
                    continue
                why = "cannot rewind, as it is not replayable" if self.end == "rewind" else "end='error'"
                raise OptionError(
                    f"source {ended[0].name!r} of the mixture ended after {ended[0].served} served "
                    f"{self.unit} while {source.name!r} goes on, and {why}: give it more epochs, or say "
                    "end='rewind' or end='renormalise'"
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
        batch = parts[0] if len(parts) == 1 else concat_samples(parts, columns=self.columns)
        # Once a source has several agents, batches of the others alone look the same as the joined ones.
        if self._multi_agent and isinstance(batch, SampleBatch):
            return batch.as_multi_agent()
        return batch

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
        state = super().state_dict()
        state["dropped"] += sum(
            source.waiting_units() for source in self._sources if not source.reader.replayable
        )
        return state

    def _position(self) -> JsonState:
        position: JsonState = {
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
        checks = [("sources", list(position["sources"]), names), ("order", position["order"], self._order)]
        if self._function is None:
            checks.append(("weights", position["weights"], self._whole))
        for key, found, expected in checks:
            if found != expected:
                raise StateError(
                    f"state['position'][{key!r}] is {excerpt(found)} but this one has {excerpt(expected)}: "
                    "make it with the sources, weights and seed of the one that saved it"
                )
        self._ahead = None
        for i, source in enumerate(self._sources):
            source.seek(position["sources"][source.name])
            source.served = int(position["served"][i])
            source.ended = bool(position["ended"][i])
            if self.end == "rewind":
                source.start = position["starts"][i]
        self._whole = [int(weight) for weight in position["weights"]]
        # Whatever the function gives next is compared with the weights themselves.
        self._raw = []
        alive = self._alive()
        if any(alive):
            self._schedule = Schedule(alive, order=self._order, credits=position["credits"])
            self._schedule.counts = [int(count) for count in position["counts"]]
        self._multi_agent = bool(position["multi_agent"])

    def _close(self) -> None:
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
    if isinstance(batch, MultiAgentBatch):
        for part in batch.policy_batches.values():
            _mark(part, name)
        return
    rows = np.empty(len(batch), object)
    if Columns.SOURCE in batch:
        rows[:] = [f"{name}/{inner}" for inner in batch[Columns.SOURCE]]
    else:
        rows[:] = name
    batch[Columns.SOURCE] = rows
