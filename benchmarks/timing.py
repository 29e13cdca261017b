"""Rounds in which every contender runs once, one after the other, so that a slow moment hits them all.

Example:
    >>> taken = interleave([Case("a", list, rows=1), Case("b", dict, rows=1)], rounds=3, seconds=0.001)
    >>> sorted(taken), len(taken["a"].seconds)
    (['a', 'b'], 3)
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["Case", "Taken", "interleave", "seconds_of"]


@dataclass(frozen=True)
class Case:
    """A contender: what is called, and how many rows (steps, positions) one call gives.

    Args:
        name: Of the contender.
        call: What is timed; its result is dropped before the next call.
        rows: Rows of a call.
        before: Called before each round, untimed.
        after: Likewise, after it.
        once: Call it once a round, because a call is long or changes something; else it is called until the
            round's time is over.
    """

    name: str
    call: Callable[[], object]
    rows: float
    before: Callable[[], object] | None = None
    after: Callable[[], object] | None = None
    once: bool = False


@dataclass(frozen=True)
class Taken:
    """Seconds a row, one value a round: on the clock, and of all processors."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def interleave(cases: Sequence[Case], *, rounds: int, seconds: float) -> dict[str, Taken]:
    """Time the cases; every other round runs them in the opposite order.

    Args:
        cases: The contenders.
        rounds: Measured rounds; one more before them warms up.
        seconds: What a case is given in a round, at least.

    Returns:
        Name -> what it took.
    """
    taken = {case.name: Taken() for case in cases}
    if len(taken) < len(cases):
        raise ValueError(f"two cases have one name: {[case.name for case in cases]}")
    calls = {case.name: _calls(case, seconds) for case in cases}
    # What was made so far is there for good: a collection need not look at it in one contender's round.
    gc.collect()
    gc.freeze()
    try:
        for number in range(rounds + 1):
            for case in cases if number % 2 else reversed(cases):
                clock, cpu = _round(case, calls[case.name])
                if number:
                    taken[case.name].seconds.append(clock)
                    taken[case.name].cpu.append(cpu)
    finally:
        gc.unfreeze()
    return taken


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds on the clock of one call."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _calls(case: Case, seconds: float) -> int:
    """How often a case is called in a round; it has been warmed up by then."""
    if case.once:
        return 1
    calls = 1
    with _around(case):
        # Not by more than ten times at once: first calls are slow.
        while (took := _repeat(case.call, calls)) < seconds:
            calls = min(calls * 10, int(calls * seconds / max(took, 1e-9) * 1.1) + 1)
    return calls


def _round(case: Case, calls: int) -> tuple[float, float]:
    """Seconds a row, on the clock and of all processors."""
    with _around(case):
        if case.once:
            os.sync()  # What one contender left to the kernel to write must not slow down the next.
        cpu = time.process_time()
        took = _repeat(case.call, calls)
        cpu = time.process_time() - cpu
    return took / (calls * case.rows), cpu / (calls * case.rows)


@contextmanager
def _around(case: Case) -> Iterator[None]:
    if case.before is not None:
        case.before()
    try:
        yield
    finally:
        if case.after is not None:
            case.after()


def _repeat(call: Callable[[], object], times: int) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        call()
    return time.perf_counter() - begun
