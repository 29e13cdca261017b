"""Mixes readers by steps, exactly: each source stays within one step of its share for ever.

Example:
    >>> from rlio.batch import SampleBatch
    >>> from rlio.interfaces import InputReader
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

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Literal, TypeAlias

import numpy as np

from rlio.batch import MultiAgentBatch, SampleBatch, concat_samples, count_units
from rlio.columns import Columns
from rlio.errors import EndOfData, OptionError, StateError, excerpt
from rlio.interfaces import Batch, InputReader, JsonState
from rlio.replay.order import Permutation

__all__ = ["MixedInput", "Schedule"]

#: A relative weight; a float counts as the decimal number that it prints as.
Weight: TypeAlias = float | Fraction | Decimal
Weights: TypeAlias = Mapping[str, Weight] | Sequence[Weight]

Sources: TypeAlias = (
    Mapping[str, InputReader] | Mapping[InputReader, Weight] | Iterable[tuple[InputReader, Weight]]
)

_ENDS = ("error", "rewind", "renormalise")
_COLUMNS = ("error", "intersect", "fill")


class Schedule:
    """Deals steps to sources by integer weights, each within one step of its share at any time.

    After T steps, source i of weight w_i (of 1 in all) has had more than ``w_i T - 1`` and fewer than
    ``w_i T + 1`` of them, for any T and any sizes of `deal`. A source must have had floor(w_i T); the steps
    that remain go to those with the earliest deadline (count + 1) / w_i. All in exact integers.

    Args:
        weights: Whole numbers, 0 or more, not all 0.
        order: Which source goes first at equal deadlines: a permutation of the sources.
        credits: Steps that each source is owed from before, in units of 1 / `UNIT`; 0 in all. The bound then
            holds for ``w_i T + credit_i`` as soon as the schedule has caught up.

    Source:
        Tijdeman, "The chairman assignment problem" (1980); Baruah et al., "Proportionate progress" (1996).
        They decide step by step; here only the end of a batch matters, as its rows have no order in time.
        That keeps the bound: if some schedule meets all later deadlines, then so does one that took earlier
        deadlines first (swap the two steps where they differ).
    """

    #: Credits are counted in this fraction of a step.
    UNIT = 2**32

    def __init__(
        self, weights: Sequence[int], *, order: Sequence[int], credits: Sequence[int] | None = None
    ) -> None:
        self.weights = list(weights)
        self.credits = [0] * len(self.weights) if credits is None else list(credits)
        heaviest = max(range(len(self.weights)), key=self.weights.__getitem__)
        for i, weight in enumerate(self.weights):
            if not weight:  # it gives nothing from now on, so what it is owed goes to another
                self.credits[heaviest] += self.credits[i]
                self.credits[i] = 0
        self.counts = [0] * len(self.weights)
        self._order = list(order)
        self._sum = sum(self.weights)
        # Deadlines are compared as whole numbers: those of source i are multiples of common / weight_i.
        common = math.lcm(*(weight for weight in self.weights if weight))
        self._spacing = [common // weight if weight else 0 for weight in self.weights]

    def deal(self, n: int) -> list[int]:
        """Return how many of the next ``n`` steps each source gives, and count them."""
        total = sum(self.counts) + n
        shares, left = [0] * len(self.counts), n
        optional = []
        for rank, i in enumerate(self._order):
            weight, count = self.weights[i], self.counts[i]
            if not weight:
                continue
            entitled = weight * total * self.UNIT + self.credits[i] * self._sum
            whole, part = divmod(entitled, self._sum * self.UNIT)
            if whole >= count:
                shares[i] = whole - count
                left -= shares[i]
                if part:
                    optional.append((self._deadline(i, whole + 1), rank, i))
        optional.sort()
        for _, _, i in optional[: max(left, 0)]:
            shares[i] += 1
        while left < 0:
            # Only with credits: more is owed than there are steps, and what is due last has to wait.
            _, i = max(
                (self._deadline(i, self.counts[i] + share), i) for i, share in enumerate(shares) if share
            )
            shares[i] -= 1
            left += 1
        self.counts = [count + share for count, share in zip(self.counts, shares, strict=True)]
        return shares

    def owed(self) -> list[int]:
        """Steps that each source is owed by now, as the ``credits`` of another schedule."""
        total, unit = sum(self.counts), self.UNIT
        owed = [
            credit + (weight * total * unit) // self._sum - count * unit
            for weight, credit, count in zip(self.weights, self.credits, self.counts, strict=True)
        ]
        # Rounding down left a few units over; they must be 0 in all.
        owed[self._order[0]] -= sum(owed)
        return owed

    def _deadline(self, i: int, step: int) -> int:
        """Time by which source ``i`` should have had ``step`` steps, in a unit common to all sources."""
        return (step * self.UNIT - self.credits[i]) * self._spacing[i]


class _Source:
    """A reader of the mixture and what is kept about it."""

    def __init__(self, name: str, reader: InputReader, *, rewinds: bool) -> None:
        self.name = name
        self.reader = reader
        self.served = 0
        self.ended = False
        #: Where it begins again; None: nowhere.
        self.start: JsonState | None = reader.state_dict() if rewinds and reader.replayable else None


class MixedInput(InputReader):
    """Gives batches that hold steps of every source in proportion to its weight.

    Shares are exact in steps (or sequences, where all sources count in those), whatever the sizes of the
    sources' own batches: see `Schedule`. The rows of a batch are grouped by source, in the sources' order, so that sequences and fragments stay whole. A
    SampleBatch beside a MultiAgentBatch is wrapped as ``default_policy``.

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
        self._whole = _whole(self._raw, list(readers))
        self._schedule = Schedule(self._whole, order=self._order)
        self._multi_agent = False

    @property
    def sources(self) -> dict[str, InputReader]:
        """Name -> reader."""
        return {source.name: source.reader for source in self._sources}

    @property
    def counts(self) -> dict[str, int]:
        """Name -> steps served so far."""
        return {source.name: source.served for source in self._sources}

    # ---- one batch ----

    def _next(self) -> Batch:
        return self._take(self.batch_size)

    def _take(self, n: int) -> Batch:
        # Sources cut to size and keep what is left over, so the mixture itself has nothing left over.
        self._follow_weights()
        schedule, counts = self._schedule, self._schedule.counts
        drawn: list[list[Batch]] = [[] for _ in self._sources]
        try:
            self._draw(n, drawn)
            batch = self._joined(drawn)
        except EndOfData:
            raise
        except BaseException as error:
            self._schedule, schedule.counts = schedule, counts
            if lost := sum(count_units(batch, self.unit) for parts in drawn for batch in parts):
                self.dropped += lost
                error.add_note(
                    f"{lost} {self.unit} that the mixture's sources gave for this batch are not served"
                )
            raise
        for source, parts in zip(self._sources, drawn, strict=True):
            source.served += sum(count_units(part, self.unit) for part in parts)
        return batch

    def _draw(self, n: int, drawn: list[list[Batch]]) -> None:
        """Add ``n`` steps to ``drawn``, fewer only if all sources end."""
        missing = n
        while missing:
            ended = []
            for i, share in enumerate(self._schedule.deal(missing)):
                got = self._draw_source(self._sources[i], share, drawn[i]) if share else 0
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

    def _draw_source(self, source: _Source, share: int, parts: list[Batch]) -> int:
        """Add up to ``share`` steps of ``source`` to ``parts`` and return how many; it rewinds if it may."""
        got, began = 0, -1
        while True:
            try:
                batch = source.reader.sample(share - got)
            except EndOfData:
                size = 0
            else:
                size = count_units(batch, self.unit)
                parts.append(batch)
            got += size
            if got == share or source.start is None:
                return got
            if got == began:
                raise OptionError(f"source {source.name!r} of the mixture has no {self.unit}: leave it out")
            began = got
            source.reader.load_state_dict(source.start)

    def _take_leave(self, ended: list[_Source]) -> None:
        """Mark sources that ended; raise if others go on and may not do so alone."""
        for source in ended:
            source.ended = True
        if self.end == "renormalise":
            return
        for source, weight in zip(self._sources, self._alive(), strict=True):
            if weight and not self._at_end(source):
                name = ended[0].name
                why = "cannot rewind, as it is not replayable" if self.end == "rewind" else "end='error'"
                raise OptionError(
                    f"source {name!r} of the mixture ended after {ended[0].served} served {self.unit} while "
                    f"{source.name!r} goes on, and {why}: give it more epochs, or say end='rewind' or "
                    "end='renormalise'"
                )

    def _at_end(self, source: _Source) -> bool:
        """Whether ``source`` has no step left; one that is read to find out is lost, the caller raises."""
        try:
            source.reader.sample(1)
        except EndOfData:
            source.ended = True
            return True
        self.dropped += 1
        return False

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
        whole = _whole(raw, [source.name for source in self._sources])
        if whole != self._whole:
            self._whole = whole
            if any(self._alive()):
                self._schedule = Schedule(self._alive(), order=self._order, credits=self._schedule.owed())

    # ---- state ----

    def _position(self) -> JsonState:
        position: JsonState = {
            "sources": {source.name: source.reader.state_dict() for source in self._sources},
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
        for i, source in enumerate(self._sources):
            source.reader.load_state_dict(position["sources"][source.name])
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


def _whole(weights: Sequence[Weight], names: Sequence[str]) -> list[int]:
    """The smallest whole numbers in the proportion of ``weights``."""
    exact = []
    for name, weight in zip(names, weights, strict=True):
        try:
            # 0.7 means seven tenths, not the binary fraction next to it.
            value = Fraction(str(weight)) if isinstance(weight, (float, np.floating)) else Fraction(weight)
        except (TypeError, ValueError, OverflowError) as error:
            raise OptionError(f"weight {excerpt(weight)} of source {name!r}: a finite number") from error
        if value < 0:
            raise OptionError(f"weight {weight} of source {name!r}: 0 or more")
        exact.append(value)
    scale = math.lcm(*(value.denominator for value in exact))
    whole = [int(value * scale) for value in exact]
    common = math.gcd(*whole)
    if not common:
        raise OptionError(f"the weights of {excerpt(list(names))} are all 0: one at least must be more")
    return [value // common for value in whole]


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
