"""`FollowState`: the saved state of a `FollowingReplay`, and its division among other numbers of ranks.

Counters are divided by rows: each rank gets a share of the drawn rows in proportion to the rows that its
writers have put in. Shares are whole rows, and their sum is unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlio.catalog.names import MAX_ROW, is_writer_id
from rlio.errors import StateError, excerpt
from rlio.query.order import rank_of
from rlio.reader import JsonState
from rlio.support.states import fitting, seed_in, text_in, value_in, whole_number

__all__ = ["FollowState", "merge_states"]

_VERSION = ["following-replay", 1]
#: The reader's class name in states.
_READER = "FollowingReplay"


@dataclass(kw_only=True)
class FollowState:
    """Positions, counters and seeds of one rank, or of all of them.

    Attributes:
        seed: Seed of the draws.
        slots: Number of parts that writers are divided into.
        ranks: The ranks whose state this is.
        world: Number of ranks.
        draws: Units drawn; decides the next random numbers.
        drawn: Rows drawn.
        rows: Writer -> next row.
        missed: Writer -> rows below it that were not put in, if any.
        ring: Writer -> its first row in the ring, if any.
        turn: The writer whose rows came last.
        draw: What is drawn, as JSON; None: unknown, in a state of an earlier version.
    """

    seed: int
    slots: int
    draw: JsonState | None = None
    ranks: tuple[int, ...] = (0,)
    world: int = 1
    draws: int = 0
    drawn: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)
    ring: dict[str, int] = field(default_factory=dict)
    turn: str = ""

    @property
    def inserted(self) -> int:
        """Rows that were put in."""
        return sum(self.rows.values()) - sum(self.missed.values())

    def take(self, writer: str, first: int, rows: int) -> None:
        """Advance over rows that are put in."""
        self.pass_over({writer: first})
        self.rows[writer] = first + rows
        self.turn = writer

    def pass_over(self, reached: Mapping[str, int]) -> None:
        """Advance over rows that are not put in: writer -> the row after them."""
        for writer, row in reached.items():
            passed = row - self.rows.get(writer, 0)
            if passed > 0:
                self.missed[writer] = self.missed.get(writer, 0) + passed
                self.rows[writer] = row

    def to_json(self) -> JsonState:
        """The JSON form; a writer is ``[next row, missed, first row in the ring or null]``."""
        return {
            "version": _VERSION,
            "seed": self.seed,
            "slots": self.slots,
            "ranks": list(self.ranks),
            "world": self.world,
            "draws": self.draws,
            "drawn": self.drawn,
            "turn": self.turn,
            **({} if self.draw is None else {"draw": self.draw}),
            "writers": {
                writer: [row, self.missed.get(writer, 0), self.ring.get(writer)]
                for writer, row in sorted(self.rows.items())
            },
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> FollowState:
        """Read and check the JSON form: a state may come from an untrusted source.

        Raises:
            StateError: ``saved`` is not a valid state.
        """
        if saved.get("version") != _VERSION:
            raise StateError(
                f"state['position']['version'] is {excerpt(saved.get('version'))}, expected {_VERSION}: load "
                "the state into the version of rlio that saved it"
            )
        state = cls(
            seed=seed_in(saved),
            slots=whole_number(saved, "slots"),
            ranks=tuple(value_in(saved, "ranks", list)),
            world=whole_number(saved, "world"),
            draws=whole_number(saved, "draws"),
            drawn=whole_number(saved, "drawn"),
            turn=text_in(saved, "turn"),
            draw=value_in(saved, "draw", dict) if "draw" in saved else None,
        )
        state._check_ranks()
        for writer, (row, missed, first) in value_in(saved, "writers", dict).items():
            numbers = (row, missed, row if first is None else first)
            whole = all(type(number) is int for number in numbers)
            if (
                not is_writer_id(writer)
                or not whole
                or not 0 <= min(numbers) <= max(numbers) <= row <= MAX_ROW
            ):
                raise StateError(
                    f"state['position']['writers'][{excerpt(writer)}] is {excerpt([row, missed, first])}: "
                    "expected [next row, rows missed, first row in the ring]"
                )
            state.rows[writer] = row
            if missed:
                state.missed[writer] = missed
            if first is not None and first < row:
                state.ring[writer] = first
        return state

    def _check_ranks(self) -> None:
        if (
            any(type(rank) is not int for rank in self.ranks)
            or list(self.ranks) != sorted(set(self.ranks))
            or not 0 <= min(self.ranks, default=-1) <= max(self.ranks) < self.world <= self.slots
        ):
            raise StateError(
                f"state['position'] is of the ranks {excerpt(list(self.ranks))} of {self.world}, with "
                f"{self.slots} slots: expected numbers below that of the ranks, which is at most that of the "
                "slots"
            )

    def share(self, rank: int, world: int, *, uri: str) -> FollowState:
        """The state of one of ``world`` ranks.

        Raises:
            StateError: The state belongs to other ranks, and not to all of them.
        """
        if (self.ranks, self.world) == ((rank,), world):
            return self
        if len(self.ranks) != self.world:
            raise StateError(
                f"the state is that of rank {', '.join(map(str, self.ranks[:10]))} of {self.world}, and this "
                f"reader is rank {rank} of {world}: merge the states of all ranks with "
                "rlio.FollowingReplay.merge_states(), for any number of ranks",
                uri=uri,
            )

        def inserted_before(limit: int) -> int:
            """Rows that the writers of the ranks below ``limit`` have put in."""
            return sum(
                row - self.missed.get(writer, 0)
                for writer, row in self.rows.items()
                if rank_of(writer, world=world, slots=self.slots) < limit
            )

        def own(numbers: Mapping[str, int]) -> dict[str, int]:
            return {
                writer: number
                for writer, number in numbers.items()
                if rank_of(writer, world=world, slots=self.slots) == rank
            }

        total = self.inserted
        if total:
            before, after = (self.drawn * inserted_before(limit) // total for limit in (rank, rank + 1))
        else:
            before, after = 0, self.drawn if rank == 0 else 0
        return replace(
            self,
            ranks=(rank,),
            world=world,
            drawn=after - before,
            rows=own(self.rows),
            missed=own(self.missed),
            ring=own(self.ring),
            turn="",
        )

    def ring_ranges(self, capacity: int) -> dict[str, range]:
        """Writer -> its rows in the ring; if the ring is smaller now, each writer's newest rows."""
        found = {writer: range(first, self.rows[writer]) for writer, first in self.ring.items()}
        total = sum(len(rows) for rows in found.values())
        if total <= capacity:
            return found
        return {writer: rows[len(rows) - len(rows) * capacity // total :] for writer, rows in found.items()}


def merge_states(states: Sequence[JsonState]) -> JsonState:
    """Merge the states of all ranks into one. The ranks may have served different numbers of batches.

    Args:
        states: The results of `FollowingReplay.state_dict` on every rank of one group.

    Returns:
        A state that any number of ranks may load; each rank takes its own part.

    Raises:
        StateError: A state is missing, given twice, of another group, or invalid.
    """
    if not states:
        raise StateError("merge_states() was given no states: pass those of all ranks")
    found = []
    for number, state in enumerate(states):
        if not isinstance(state, Mapping) or state.get("reader") != _READER:
            raise StateError(f"state {number} is {excerpt(state)}: expected one of FollowingReplay")
        with fitting(f"state {number}"):
            found.append(FollowState.from_json(state["position"]))
    first = found[0]
    if len({(state.world, state.slots) for state in found}) > 1:
        raise StateError("the states come from groups with different numbers of ranks or slots")
    if any(state.draw != first.draw for state in found):
        raise StateError("the states come from readers that draw differently (draw, filter, ...)")
    ranks = sorted(rank for state in found for rank in state.ranks)
    if len(ranks) != first.world or len(set(ranks)) != len(ranks):
        raise StateError(
            f"found states of the ranks {excerpt(ranks)} of {first.world}: pass each rank's state once"
        )
    merged = replace(
        first,
        ranks=tuple(ranks),
        seed=min(found, key=lambda state: state.ranks).seed,
        draws=max(state.draws for state in found),
        drawn=sum(state.drawn for state in found),
        rows={},
        missed={},
        ring={},
        turn="",
    )
    for one in found:
        merged.rows.update(one.rows)
        merged.missed.update(one.missed)
        merged.ring.update(one.ring)
    return {
        **states[0],
        "position": merged.to_json(),
        "dropped": sum(whole_number(state, "dropped", of="state") for state in states),
    }
