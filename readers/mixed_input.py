"""Mixes readers by steps, exactly: each source is always within one step of its share.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch, MultiAgentBatch, SampleBatch, concat_samples
from rlio.batch.columns import Columns
from rlio.batch.join import UNLIKE, Unlike
from rlio.batch.nested import leaves
from rlio.errors import EndOfData, OptionError, StateError, excerpt
from rlio.query.order import Permutation
from rlio.read_options import check_batch_size
from rlio.reader import Endless, InputReader, JsonState, Unit
from rlio.readers.mix_block import MixBlock, plain_columns, woven
from rlio.readers.mix_schedule import Schedule, Shares, Weight, whole_weights
from rlio.readers.mix_source import MOST_AHEAD, MixSource
from rlio.replay.buffers import Buffers
from rlio.replay.joint_gather import JointGather
from rlio.support.calls import call_each
from rlio.support.forks import cached_property
from rlio.support.options import check_choice, check_count, in_own_spelling
from rlio.support.states import flag_in, value_in, whole_numbers

__all__ = ["MixedInput"]

logger: logging.Logger = logging.getLogger("rlio")

Weights: TypeAlias = Mapping[str, Weight] | Sequence[Weight]

Sources: TypeAlias = (
    Mapping[str, InputReader] | Mapping[InputReader, Weight] | Iterable[tuple[InputReader, Weight]]
)

# Bytes of the batches that are assembled at once; the sources hold about as many again.
_AHEAD_BYTES = 4 << 20
_ENDS = ("error", "rewind", "renormalise")
# Columns with a known value where they are absent.
_KEPT = (Columns.TRUNCATEDS, Columns.NEXT_OBS_VALID)


class MixedInput(InputReader):
    """Gives batches that hold steps of every source in proportion to its weight.

    Shares are exact in steps (or in sequences, if all sources count those), for any sizes of the sources' own
    batches: see `Schedule`. The rows of a batch are grouped by source, in the sources' order, so
    sequences and fragments stay whole. A SampleBatch beside a MultiAgentBatch becomes its ``default_policy``.

    Several threads may call it: see `rlio.InputReader`.

    Args:
        sources: Name -> reader, with ``weights``; or reader -> weight; or pairs (reader, weight). Sources
            without a name are called ``source_0``, ``source_1``, ... The mixture owns and closes them.
        batch_size: Steps of `sample()`; if all sources are endless, at most as many as they have together.
        weights: Relative weights, with any sum: name -> weight or, in the sources' order, a sequence. Or a
            function of the steps served so far that returns either. It is called before each batch; when its
            result changes, what each source is still owed is carried over. None: equal weights, or the
            weights in ``sources``.
        seed: Decides which of several sources with equal claims goes first; None: the sources' order.
        end: What happens when a source ends while others continue. ``"error"`` raises; ``"rewind"`` restarts
            it at its position when the mixture was made; ``"renormalise"`` continues without it. When all
            sources end, the last batch may be short; then comes `EndOfData`.
        columns: What happens when sources have different columns, as in `concat_samples`: ``"error"``;
            ``"intersect"``, the columns that all sources have in their first batches; or ``"fill"``. Columns
            that are left out are logged. If only some sources have ``truncateds`` beside ``terminateds``, the
            rows of the others get False, and this is logged once.
        source_column: Whether each row carries its source's name in the column ``source``. For a nested
            mixture, its own source name follows after a slash.

    Raises:
        OptionError: An argument is illegal: no sources, a source given twice, a weight that is negative or
            not finite, all weights 0, sources that count in different units.
    """

    def __init__(
        self,
        sources: Sources,
        *,
        batch_size: int,
        weights: Weights | Callable[[int], Weights] | None = None,
        seed: int | None = None,
        end: Literal["error", "rewind", "renormalise", "renormalize"] = "error",
        columns: Unlike = "error",
        source_column: bool = False,
    ) -> None:
        self.batch_size: int = check_count("batch_size", batch_size, least=1, of="steps")
        end = check_choice("end", in_own_spelling(end, _ENDS), _ENDS)
        check_choice("columns", columns, UNLIKE)
        seed = check_count("seed", seed, least=0, none="the order of the sources")
        readers, given = _named(sources)
        if given is not None and weights is not None:
            raise OptionError("the sources come with weights already: leave out weights=")
        count = len(readers)
        self.end = end
        self.columns = columns
        self.source_column = source_column
        self.replayable: bool = all(reader.replayable for reader in readers.values())
        self.unit: Unit = next(iter(readers.values())).unit
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
        #: Policy -> name of a source -> the columns of its rows, for the sources that gave rows.
        self._met: dict[str, dict[str, frozenset[str]]] = {}
        self._kept = (*_KEPT, Columns.SOURCE) if source_column else _KEPT
        # Logged so far: sources without truncateds, and columns that are left out.
        self._never_truncated: set[str] = set()
        self._left_out: list[dict[str, list[str]]] = []
        #: Batches that were assembled at once, and are not all served yet.
        self._block: MixBlock | None = None
        #: Whether sources may be read ahead; and bytes of a row, once known.
        self._reads_ahead = self.unit == "steps" and all(reader.can_read_ahead for reader in readers.values())
        self._row_bytes: int | None = None
        # Batches to join one by one before the sources are read ahead again.
        self._alone = 0
        self._buffers = Buffers()

    @property
    def sources(self) -> dict[str, InputReader]:
        """Name -> reader."""
        with self._turns_of_threads.held():
            self._settle()
        return {source.name: source.reader for source in self._sources}

    @property
    def counts(self) -> dict[str, int]:
        """Name -> steps served so far."""
        with self._turns_of_threads.held():
            self._settle()
            return {source.name: source.served for source in self._sources}

    @property
    def skipped(self) -> int:
        """Rows or records that all sources skipped."""
        return sum(source.reader.skipped for source in self._sources)

    # ---- one batch ----

    def _describe(self) -> Iterator[str]:
        yield f"batch_size={self.batch_size}"
        yield ", ".join(
            f"{weight} x {s.reader!r}" for weight, s in zip(self._raw, self._sources, strict=True)
        )

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
        """A batch of ``n`` units, joined from the sources' batches."""
        # The sources keep their left-over rows, so the mixture has none.
        self._follow_weights()
        schedule, counts = self._schedule, self._schedule.counts
        try:
            shares = self._draw(n)
            made = self._joined([s.head(share) for s, share in zip(self._sources, shares, strict=True)])
            self._give(shares)
        except BaseException:
            # If a source fails, or does not fit the others, no rows are lost: they come in the next batch.
            self._schedule, schedule.counts = schedule, counts
            raise
        if self._row_bytes is None and self._reads_ahead:
            self._look_at(made)
        return made

    # ---- several batches at once ----

    def _next_block(self) -> MixBlock | None:
        """The next batches, assembled at once; None where batches are joined one by one.

        A row counts as served only when its batch is served: `_settle` advances the sources over served rows.
        """
        if self._function is not None:
            return None
        gather = self._joint
        if gather is not None and not any(source.is_cut for source in self._sources):
            shares = self._schedule.plan(self.batch_size, max(self._batches_of(gather.row_bytes), 1))
            columns = gather.columns(shares)
            if columns is not None:
                return self._block_of(columns, shares)
        if self._alone:  # Number of batches that are joined one by one.
            self._alone -= 1
            return None
        if not self._reads_ahead or self._row_bytes is None:
            return None
        return self._read_ahead(self._batches_of(self._row_bytes))

    @cached_property
    def _joint(self) -> JointGather | None:
        """Gathers the rows of all sources together; None if that is impossible."""
        return JointGather.of([source.rows for source in self._sources])

    def _batches_of(self, row_bytes: int) -> int:
        """How many batches are assembled at once."""
        return min(MOST_AHEAD, _AHEAD_BYTES // max(row_bytes, 1)) // self.batch_size

    def _read_ahead(self, batches: int) -> MixBlock | None:
        """The next batches of sources that can be read ahead; None if that gives fewer than two."""
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
        """The batches in the columns; None, permanently, if rows already have a source column."""
        if self.source_column:
            if Columns.SOURCE in columns:
                self._joint, self._reads_ahead = None, False
                return None
            names = np.array([source.name for source in self._sources] * len(shares), object)
            columns[Columns.SOURCE] = names.repeat([rows for share in shares for rows in share])
        return MixBlock(columns, shares=shares, batch_size=self.batch_size)

    def _filled(self, shares: list[Shares]) -> list[Shares]:
        """Read ahead each source's rows of some batches, and return the batches that are complete."""
        have = []
        for source, own in zip(self._sources, zip(*shares, strict=True), strict=True):
            try:
                source.fill(sum(own))
            except Exception as error:
                # The batches before the failure can still be served. The batch that meets it raises it again.
                logger.debug("source %r cannot be read ahead: %r", source.name, error)
                self._alone = len(shares)
            have.append(source.waiting_units())
        for number, share in enumerate(shares):
            have = [there - rows for there, rows in zip(have, share, strict=True)]
            if min(have) < 0:
                return shares[:number]
        return shares

    def _look_at(self, batch: Batch) -> None:
        """Decide from a first batch whether, and how far, sources may be read ahead."""
        columns = plain_columns(batch)
        if columns is None:
            self._reads_ahead = False
        elif len(batch):
            self._row_bytes = sum(column.nbytes for column in columns.values()) // len(batch)

    def _settle(self) -> None:
        """Advance the sources over the served batches of a block."""
        if self._block is None:
            return
        given = self._block.settle()
        if not given:
            return
        self._give(given)
        counts = self._schedule.counts
        self._schedule.counts = [count + rows for count, rows in zip(counts, given, strict=True)]

    def _give(self, shares: Sequence[int]) -> None:
        """Move each source past its served units."""
        with self._moving():
            for source, units in zip(self._sources, shares, strict=True):
                if units:
                    source.give(units)

    def _draw(self, n: int) -> list[int]:
        """How many waiting units each source gives: ``n`` in all, fewer only if all sources end."""
        drawn = [0] * len(self._sources)
        while missing := n - sum(drawn):
            ended = []
            for i, share in enumerate(self._schedule.deal(missing)):
                wanted = drawn[i] + share
                drawn[i] = self._sources[i].wait_for(wanted) if share else wanted
                if drawn[i] < wanted:
                    ended.append(self._sources[i])
            if not ended:
                break
            self._take_leave(ended, drawn)
            if not any(self._alive()):
                if not any(drawn):
                    raise EndOfData(f"all sources of the mixture have ended: {self.counts}")
                break
            self._schedule = Schedule(self._alive(), order=self._order)
        return drawn

    def _take_leave(self, ended: list[MixSource], drawn: list[int]) -> None:
        """Mark sources that ended; raise if others continue and `end` does not allow that."""
        if self.end != "renormalise":
            for source, weight, units in zip(self._sources, self._whole, drawn, strict=True):
                if not weight or source in ended or source.ends_after(units):
                    continue
                why = "cannot rewind, because it is not replayable" if self.end == "rewind" else "end='error'"
                raise OptionError(
                    f"source {ended[0].name!r} of the mixture ended after {ended[0].served} served "
                    f"{self.unit} ({ended[0].end}) while {source.name!r} continues, and {why}: give the "
                    "source more epochs, or pass end='rewind' or end='renormalise'"
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
        """One batch from the parts."""
        if self.source_column or self.columns != "error":  # The parts still wait: change copies.
            drawn = [[part.copy(shallow=True) for part in own] for own in drawn]
        parts = [part for own in drawn for part in own if len(part)]
        self._multi_agent |= any(isinstance(part, MultiAgentBatch) for part in parts)
        for source, own in zip(self._sources, drawn, strict=True):
            for part in own if self.source_column else ():
                _mark(part, source.name)
        if self.columns != "error":
            self._bring_together(drawn)
        batch = parts[0] if len(parts) == 1 else concat_samples(parts, columns=self.columns)
        # Once a source has several agents, all batches have the multi-agent form, also those of other
        # sources.
        if self._multi_agent and isinstance(batch, SampleBatch):
            return batch.as_multi_agent()
        return batch

    def _bring_together(self, drawn: list[list[Batch]]) -> None:
        """Give the parts, which the mixture owns, the common columns of the sources."""
        if not self._met:
            # Look at all sources at once, so all batches have the same columns.
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
                    "the source %r of the mixture has no truncateds column, as other sources have: "
                    "truncateds is False in its rows",
                    source,
                )
        if self.columns == "intersect" and met:
            for name in set(rows).difference(frozenset.intersection(*met), self._kept):
                del rows[name]
            if Columns.NEXT_OBS not in rows:
                rows.pop(Columns.NEXT_OBS_VALID, None)
        # In every batch, as other columns: without it, all rows of a source have their new_obs.
        told = any(Columns.NEXT_OBS_VALID in columns for columns in met)
        if told and Columns.NEXT_OBS in rows and Columns.NEXT_OBS_VALID not in rows:
            _, leaf = leaves(rows[Columns.NEXT_OBS])[0]
            rows[Columns.NEXT_OBS_VALID] = np.ones(leaf.shape[: 1 + rows.time_major], bool)

    def _say_left_out(self) -> None:
        """Log, once, the columns that some sources lack."""
        for met in self._met.values() if self.columns == "intersect" else ():
            common = frozenset.intersection(*met.values()).union(self._kept)
            left = {name: sorted(columns - common) for name, columns in met.items() if columns - common}
            if left and left not in self._left_out:
                self._left_out.append(left)
                logger.warning("columns that some sources of the mixture lack are left out: %s", left)

    # ---- weights ----

    def _aligned(self, weights: object) -> list[Weight]:
        """Weights, possibly from a user's function, in the order of the sources."""
        names = [source.name for source in self._sources]
        if isinstance(weights, Mapping):
            if set(weights) != set(names):
                raise OptionError(
                    f"weights name {excerpt(list(weights))} but the sources are {excerpt(names)}"
                )
            return [weights[name] for name in names]
        if not isinstance(weights, Sequence) or len(weights) != len(names):
            raise OptionError(
                f"weights are {excerpt(weights)}: expected name -> weight, or one for each of the "
                f"{len(names)} sources"
            )
        return list(weights)

    def _follow_weights(self) -> None:
        """Call the function of weights, if there is one, and apply a change."""
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

    def _whole_state(self) -> JsonState:
        self._settle()
        state = super()._whole_state()
        state["dropped"] += sum(
            source.waiting_units() for source in self._sources if not source.reader.replayable
        )
        return state

    def _position(self) -> JsonState:
        position: JsonState = {
            # The lists are in this order, because JSON may lose the order of the dict of sources.
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
        self._check_alike(position)
        counts, owed, weights, served = self._numbers_in(position)
        ended = value_in(position, "ended", list)
        if len(ended) != len(self._sources) or not all(isinstance(one, bool) for one in ended):
            raise StateError(
                f"state['position']['ended'] is {excerpt(ended)}: expected a bool of each source"
            )
        starts = self._starts_in(position)
        self._block, self._alone = None, 0
        for i, source in enumerate(self._sources):
            source.seek(position["sources"][source.name], starts[i])
            source.served, source.ended = served[i], ended[i]
        self._whole = weights
        # The next result of the function is compared with the restored whole weights.
        self._raw = []
        alive = self._alive()
        if any(alive):
            self._schedule = Schedule(alive, order=self._order, credits=owed)
            self._schedule.counts = counts
        self._multi_agent = flag_in(position, "multi_agent")

    def _check_alike(self, position: JsonState) -> None:
        """Refuse the position of another mixture."""
        names = [source.name for source in self._sources]
        # States of 4d4987e store the names only as the keys of "sources".
        stored = position.get("names", list(value_in(position, "sources", dict)))
        checks = [("names", stored, names), ("order", position["order"], self._order)]
        if self._function is None:
            checks.append(("weights", position["weights"], self._whole))
        for key, found, expected in checks:
            if found != expected:
                raise StateError(
                    f"state['position'][{key!r}] is {excerpt(found)}, expected {excerpt(expected)}: make the "
                    "mixture with the sources, weights and seed of the one that saved the state"
                )

    def _numbers_in(self, position: JsonState) -> tuple[list[int], list[int], list[int], list[int]]:
        """Counts, credits, weights and served rows of a position."""
        counts, owed, weights, served = (
            whole_numbers(position, key, len(self._sources))
            for key in ("counts", "credits", "weights", "served")
        )
        if min(*counts, *served, *weights) < 0 or sum(owed) != 0:
            raise StateError(
                f"state['position'] has counts {excerpt(counts)}, credits {excerpt(owed)}, served rows "
                f"{excerpt(served)} and weights {excerpt(weights)}: expected credits that add up to 0, and "
                "otherwise no number below 0"
            )
        return counts, owed, weights, served

    def _starts_in(self, position: JsonState) -> list[Any]:
        """The states to which sources rewind; None: a source does not."""
        if self.end != "rewind":
            return [None] * len(self._sources)
        starts: list[Any] = value_in(position, "starts", list)
        if [one is None for one in starts] != [source.start is None for source in self._sources]:
            raise StateError(
                f"state['position']['starts'] is {excerpt(starts)}: expected the states of the sources that "
                "are replayable"
            )
        return starts

    def interrupt(self) -> None:
        """Interrupt the sources; see `InputReader`."""
        for source in self._sources:
            source.reader.interrupt()

    def _close(self) -> None:
        self._settle()
        self._block = self._joint = None  # Free the rows of stores before the garbage collector runs.
        call_each(
            (f"source {source.name!r} of the mixture while closing", source.reader.close)
            for source in self._sources
        )


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
                    f"source {number} of the mixture is {excerpt(pair)}: expected name -> reader, reader -> "
                    "weight or pairs (reader, weight); rlio.read() opens paths and mixes of them"
                )
    if not readers or len({id(reader) for reader in readers.values()}) < len(readers):
        raise OptionError(f"a mixture needs one source or more, each reader once; found {len(pairs)}")
    if weights and len(weights) < len(readers):
        raise OptionError("some sources have names and others weights: name all of them, or none")
    units = {name: reader.unit for name, reader in readers.items()}
    if len(set(units.values())) > 1:
        raise OptionError(f"the sources count in different units: {excerpt(units)}; a mixture needs one")
    return readers, weights or None


def _mark(batch: Batch, name: str) -> None:
    """Add the column `Columns.SOURCE` to ``batch``, which the mixture owns."""
    for part in batch.policies().values():
        rows = np.empty(len(part), object)
        if Columns.SOURCE in part:
            rows[:] = [f"{name}/{inner}" for inner in part[Columns.SOURCE]]
        else:
            rows[:] = name
        part[Columns.SOURCE] = rows
