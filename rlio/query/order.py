"""The orders of stored rows: pure functions of (seed, epoch, position), with nothing to save.

`Permutation` shuffles ``range(n)`` and computes any stretch of the result directly. `WindowOrder` is the
named order ``windows`` over row groups. A reader's state is therefore one position, and the number of ranks
may change in the middle of an epoch.

A seed stands for one order: orders change only together with `ORDER_VERSION`, and the tests hold golden
vectors of every version.

Example:
    >>> from rlio.query.order import Permutation
    >>> order = Permutation(10, seed=7, epoch=0)
    >>> sorted(order.take(0, 10).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    >>> order.take(4, 6).tolist() == order.take(0, 10)[4:6].tolist()
    True
"""

from __future__ import annotations

import hashlib
import operator
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rlio.catalog.names import part_of
from rlio.errors import OptionError

__all__ = [
    "ORDER_VERSION",
    "Permutation",
    "UniformDraws",
    "WindowOrder",
    "WindowRef",
    "gather",
    "rank_of",
    "share",
]

#: Version of the orders in this file; readers keep it in their state.
ORDER_VERSION = 1

IntArray: TypeAlias = npt.NDArray[np.int64]

# Up to this size a permutation is a table of sorted random keys. The table is exactly uniform; a Feistel
# network over so few values is not. Building a table of this size takes some 60 us.
_TABLE_MAX = 1024
# Positions to compute at a time: four scratch arrays of uint32 stay in the second-level cache. Half as many
# take longer each, because a block costs some 150 calls of NumPy, half of them for cycle walking.
_BLOCK = 32_768
_FROM_ZERO = np.arange(_BLOCK)
# With four rounds, positions one base apart keep a constant distance too often: chi-square 27,000 instead of
# 64 over 64 bins, 2,000 seeds, n=1025. With six it looks like NumPy's shuffle, at 3/4 of the speed.
_ROUNDS = 6
_MAX = 2**63 - 1

_scratch = threading.local()


def share(count: int, shard: tuple[int, int]) -> tuple[int, int]:
    """The first unit, and the unit after the last, that a ``shard=(rank, world)`` gets of ``count`` units.

    Parts follow each other in the order of the ranks, and differ by one unit at most.
    """
    rank, world = shard
    return count * rank // world, count * (rank + 1) // world


def rank_of(writer: str, *, world: int, slots: int | None = None) -> int:
    """The rank, of ``world``, that follows a writer; by the writer's slot if ``slots`` is given."""
    number = zlib.crc32((part_of(writer) or writer).encode())  # One rank gets all attempts at a part.
    return (number if slots is None else number % slots) % world


class Permutation:
    """A pseudo-random permutation of ``range(n)``, a pure function of (n, seed, epoch, key).

    Above 1024 values it is a balanced Feistel network: a position is split into two digits of base
    ceil(sqrt(n)), and each round adds a keyed hash of one digit to the other, modulo the base. The few
    results beyond ``n`` pass through the network again (cycle walking). Up to 1024 values it is a table.

    Args:
        n: Number of values; below 2**63.
        seed: Any integer.
        epoch: Each epoch has another permutation.
        key: Further integers that distinguish permutations of one seed and epoch.

    Raises:
        OptionError: ``n`` is negative or too large.

    Source:
        Luby and Rackoff, "How to construct pseudorandom permutations" (1988); Black and Rogaway, "Ciphers
        with arbitrary finite domains" (2002), the generalised Feistel construction.
    """

    __slots__ = ("_base", "_keys", "_table", "_words", "n")

    def __init__(self, n: int, *, seed: int, epoch: int, key: tuple[int, ...] = ()) -> None:
        self.n: int = operator.index(n)
        if not 0 <= self.n <= _MAX:
            raise OptionError(f"Permutation(n={n}): expected a number of values, 0 to 2**63 - 1")
        self._base = isqrt(self.n - 1) + 1 if self.n else 1
        self._keys = _derive(self.n, seed, epoch, key)
        self._table = _sorted_keys(self.n, self._keys[0]) if self.n <= _TABLE_MAX else None
        # Arrays without an axis: NumPy takes half the time for them that it takes for scalars.
        word = _word(self.n)
        mask = int(np.iinfo(word).max)
        self._words = [
            (np.array(add & mask, word), np.array((odd | 1) & mask, word))
            for add, odd in zip(self._keys[1::2], self._keys[2::2], strict=True)
        ]

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"Permutation(n={self.n})"

    def take(self, start: int, stop: int, *, out: IntArray | None = None) -> IntArray:
        """Return the values at positions ``start`` to ``stop - 1``: int64, a fresh array, or ``out``.

        Args:
            start: First position.
            stop: Position after the last.
            out: Where to write them, shape (stop - start,), int64.

        Raises:
            OptionError: Not ``0 <= start <= stop <= n``.
        """
        if not 0 <= start <= stop <= self.n:
            raise OptionError(f"take({start}, {stop}): expected positions from 0 to {self.n}")
        found = np.empty(stop - start, np.int64) if out is None else out
        if self._table is not None:
            found[:] = self._table[start:stop]
            return found
        for low in range(0, len(found), _BLOCK):
            part = found[low : low + _BLOCK]
            np.add(_FROM_ZERO[: len(part)], start + low, out=part)
        return self._permuted(found)

    def at(self, positions: npt.ArrayLike) -> IntArray:
        """Return the values at ``positions``: int64 of the same shape, a fresh array.

        Raises:
            OptionError: A position is not in ``range(n)``.
        """
        wanted = np.asarray(positions, np.int64)
        flat = wanted.ravel()
        if flat.size and (int(flat.min()) < 0 or int(flat.max()) >= self.n):
            raise OptionError(f"at({flat.min()}..{flat.max()}): expected positions from 0 to {self.n - 1}")
        if self._table is not None:
            return self._table[wanted]
        return self._permuted(flat.copy()).reshape(wanted.shape)

    def _permuted(self, values: IntArray) -> IntArray:
        """Replace positions by the values there, in place."""
        scratch = _Scratch.of(self.n)
        for low in range(0, len(values), _BLOCK):
            part = values[low : low + _BLOCK]
            self._apply(scratch, part)
            self._walk(scratch, part)
        return values

    def _apply(self, scratch: _Scratch, values: IntArray) -> None:
        """Pass up to `_BLOCK` values through the network, in place."""
        x = scratch.x[: len(values)]
        x[:] = values
        self._encrypt(scratch, len(values))
        values[:] = x

    def _walk(self, scratch: _Scratch, values: IntArray) -> None:
        """Pass values beyond ``n`` through the network again until none is left: roughly one in sqrt(n)."""
        beyond = np.flatnonzero(values >= self.n)
        while beyond.size:
            again = values[beyond]
            self._apply(scratch, again)
            values[beyond] = again
            beyond = beyond[again >= self.n]

    def _encrypt(self, scratch: _Scratch, size: int) -> None:
        """Pass the first ``size`` values of ``scratch.x`` once through the network, in place."""
        half, multiplier, base = scratch.half, scratch.multiplier, np.array(self._base, scratch.x.dtype)
        x, left = scratch.x[:size], scratch.left[:size]
        hash_, folded = scratch.hash[:size], scratch.folded[:size]
        np.floor_divide(x, base, left)
        np.multiply(left, base, hash_)
        right = np.subtract(x, hash_, x)
        target, source = left, right
        for add, odd in self._words:
            np.add(source, add, hash_)
            np.multiply(hash_, multiplier, hash_)
            np.right_shift(hash_, half, folded)
            np.bitwise_xor(hash_, folded, hash_)
            np.multiply(hash_, odd, hash_)
            # Upper half of the word, scaled to the base. The product fits, because the base is at most
            # 2**half.
            np.right_shift(hash_, half, hash_)
            np.multiply(hash_, base, hash_)
            np.right_shift(hash_, half, hash_)
            np.add(target, hash_, target)
            # target mod base without a division: below the base, the subtraction wraps to a huge number.
            np.subtract(target, base, hash_)
            np.minimum(target, hash_, out=target)
            target, source = source, target
        np.multiply(left, base, left)
        np.add(right, left, x)


class _Scratch:
    """Arrays of one block for the intermediate values of every permutation in a thread."""

    def __init__(self, word: type[np.unsignedinteger[Any]], multiplier: int) -> None:
        self.half = np.array(np.iinfo(word).bits // 2, word)
        self.multiplier = np.array(multiplier, word)
        self.x, self.left, self.hash, self.folded = np.empty((4, _BLOCK), word)

    @staticmethod
    def of(n: int) -> _Scratch:
        """This thread's arrays for permutations of ``n`` values."""
        word = _word(n)
        name = word.__name__
        found: _Scratch | None = getattr(_scratch, name, None)
        if found is None:
            found = _Scratch(word, 0x9E3779B1 if word is np.uint32 else 0x9E3779B97F4A7C15)
            setattr(_scratch, name, found)
        return found


def _word(n: int) -> type[np.unsignedinteger[Any]]:
    """The integers in which permutations of ``n`` values are computed: narrow ones are faster."""
    return np.uint32 if n <= 2**32 else np.uint64


def _derive(n: int, seed: int, epoch: int, key: tuple[int, ...]) -> tuple[int, ...]:
    """64-bit keys, one for the table and two a round, hashed so that similar seeds are unrelated."""
    numbers = ",".join(str(operator.index(k)) for k in (ORDER_VERSION, n, seed, epoch, *key))
    words: list[int] = []
    for part in range(2):
        digest = hashlib.blake2b(f"{part}:{numbers}".encode("ascii"), digest_size=64).digest()
        words += (int.from_bytes(digest[i : i + 8], "little") for i in range(0, 64, 8))
    return tuple(words[: 2 * _ROUNDS + 1])


def _sorted_keys(n: int, key: int) -> IntArray:
    """The sort order of ``n`` random keys: every permutation is equally likely."""
    return np.argsort(_hashes(1, n + 1, key), kind="stable").astype(np.int64, copy=False)


def _hashes(start: int, stop: int, key: int) -> npt.NDArray[np.uint64]:
    """Random numbers ``start`` to ``stop - 1`` of a key: a pure function of the counter."""
    # SplitMix64, written out, because NumPy does not promise the same streams across versions.
    z = np.arange(start, stop, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class UniformDraws:
    """Numbers drawn uniformly, with replacement: a pure function of (seed, counter, range).

    Args:
        seed: Any integer.
    """

    def __init__(self, seed: int) -> None:
        self._key = _derive(0, seed, 0, (3,))[0]

    def take(self, start: int, stop: int, n: int) -> IntArray:
        """Draws ``start`` to ``stop - 1``, each from ``range(n)``: int64, a fresh array.

        Raises:
            OptionError: ``n`` is below 1, or beyond 2**53.
        """
        if not 1 <= n <= 2**53:
            raise OptionError(f"draws from range({n}): expected at least 1 and at most 2**53")
        # 53 bits of each hash make a float in [0, 1): the bias over n values is below n / 2**53.
        parts = (_hashes(start + 1, stop + 1, self._key) >> np.uint64(11)).astype(np.float64)
        parts *= n * 2.0**-53
        found = parts.astype(np.int64)
        # The product may round up to n.
        return np.minimum(found, n - 1, out=found)


@dataclass(frozen=True, slots=True)
class WindowRef:
    """One window of a `WindowOrder` in one epoch.

    Attributes:
        index: Number of the window in recorded order.
        groups: Row groups of the window, consecutive in recorded order.
        first_row: Number of its first row in recorded order.
        start_position: Position in the epoch at which its first row is served.
        rows: Number of rows.
    """

    index: int
    groups: range
    first_row: int
    start_position: int
    rows: int

    @property
    def stop_position(self) -> int:
        """Position in the epoch at which the next window begins."""
        return self.start_position + self.rows


class WindowOrder:
    """The order ``windows``: windows of row groups permuted each epoch, rows permuted within a window.

    A reader needs only one window in memory at a time, for a data set of any size, and every tier of the
    replay engine serves the same batches. The order is a pure function of (group_rows, window_rows, seed,
    epoch, position).

    Args:
        group_rows: Rows of each row group, in recorded order.
        seed: Any integer.
        window_rows: Most rows in a window, which always has at least one group. None: four times the rows of
            the largest group, the budget of a reader's memory.

    Raises:
        OptionError: A group has a negative number of rows, or ``window_rows`` is below 1.
    """

    def __init__(
        self, group_rows: Sequence[int] | IntArray, *, seed: int, window_rows: int | None = None
    ) -> None:
        sizes = np.asarray(group_rows, np.int64).reshape(-1)
        if sizes.size and int(sizes.min()) < 0:
            raise OptionError(f"group_rows holds {sizes.min()}: expected 0 or more rows in each row group")
        if window_rows is None:
            window_rows = max(4 * int(sizes.max(initial=0)), 1)
        if window_rows < 1:
            raise OptionError(f"window_rows={window_rows}: expected a number of rows, at least 1")
        self.seed: int = operator.index(seed)
        self.window_rows = window_rows
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        self._first_group = gather(ends, window_rows)
        self._first_row = ends[self._first_group]
        self._rows = np.diff(self._first_row)
        self._total = int(ends[-1])
        # Permutation and prefix sums of one epoch; a reader moves to the next epoch only rarely.
        self._cached: tuple[int, IntArray, IntArray] | None = None

    def __len__(self) -> int:
        return self._total

    def groups_of(self, window: int) -> range:
        """Return the row groups of a window, which are the same in every epoch."""
        return range(int(self._first_group[window]), int(self._first_group[window + 1]))

    def window_at(self, epoch: int, position: int) -> WindowRef:
        """Return the window that serves ``position`` of ``epoch``, in O(log windows).

        Raises:
            OptionError: ``position`` is not in ``range(len(self))``.
        """
        if not 0 <= position < self._total:
            raise OptionError(f"position {position}: expected a position of an epoch, 0 to {self._total - 1}")
        served, starts = self._epoch(epoch)
        place = int(np.searchsorted(starts, position, side="right")) - 1
        index = int(served[place])
        return WindowRef(
            index=index,
            groups=self.groups_of(index),
            first_row=int(self._first_row[index]),
            start_position=int(starts[place]),
            rows=int(self._rows[index]),
        )

    def rows_in(self, epoch: int, window: WindowRef) -> IntArray:
        """Return the rows of ``window`` in serving order: int64, counted from the window's first row."""
        key = (1, window.index)
        return Permutation(window.rows, seed=self.seed, epoch=epoch, key=key).take(0, window.rows)

    def _epoch(self, epoch: int) -> tuple[IntArray, IntArray]:
        """Windows in serving order, and the position at which each begins."""
        cached = self._cached
        if cached is None or cached[0] != epoch:
            count = len(self._rows)
            served = Permutation(count, seed=self.seed, epoch=epoch, key=(0,)).take(0, count)
            rows = self._rows[served]
            # Assign a whole tuple at once: threads that share an order never see half of it.
            self._cached = cached = (epoch, served, np.cumsum(rows) - rows)
        return cached[1], cached[2]


def gather(ends: IntArray, window_rows: int) -> IntArray:
    """First group of each window, and the number of groups; ``ends`` are the groups' prefix sums from 0."""
    if ends[-1] == 0:
        return np.zeros(1, np.int64)
    # A window that begins at group g ends before its rows would exceed the limit, but contains at least one
    # row. Groups without rows join the window before. Following the jumps is O(windows).
    first_row_in = np.minimum(np.searchsorted(ends, ends, side="right"), len(ends) - 1)
    limit = np.maximum(ends + window_rows, ends[first_row_in])
    hops = (np.searchsorted(ends, limit, side="right") - 1).tolist()
    last = len(ends) - 1
    first = [0]
    while first[-1] < last:
        first.append(hops[first[-1]])
    return np.asarray(first, np.int64)
