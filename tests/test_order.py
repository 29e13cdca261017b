"""Orders are permutations, pure functions of (seed, epoch, position), and frozen by golden vectors."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlio.errors import OptionError
from rlio.query.order import ORDER_VERSION, Permutation, WindowOrder

# (n, seed, epoch, positions, values). These never change for a given ORDER_VERSION: a changed value means
# that saved states continue with other rows.
GOLDEN_VERSION = 1
GOLDEN = [
    (4, 0, 0, [0, 1, 2, 3], [3, 0, 1, 2]),
    (10, 7, 0, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [8, 2, 7, 6, 3, 1, 5, 9, 4, 0]),
    (1024, -5, 3, [0, 1, 511, 1023], [630, 38, 64, 876]),
    (1025, 0, 0, [0, 1, 2, 1023, 1024], [1022, 321, 643, 614, 869]),
    (1000000, 42, 9, [0, 1, 2, 500000, 999999], [365598, 511817, 461618, 856406, 308220]),
    (4294967296, 18446744073709551616, 1, [0, 1, 4294967295], [2486251115, 1183168529, 1278653459]),
    (4294967297, 18446744073709551616, 1, [0, 1, 4294967296], [3998483486, 2980803081, 1150165731]),
    (
        9223372036854775807,
        1,
        1000000000000,
        [0, 1, 9223372036854775806],
        [5904218184751111114, 5436963699188681431, 5804949401945277023],
    ),
]
GOLDEN_WINDOWS = [
    19,
    25,
    21,
    23,
    26,
    20,
    24,
    18,
    16,
    22,
    17,
    45,
    48,
    50,
    47,
    43,
    44,
    51,
    49,
    46,
    33,
    37,
    32,
    42,
    40,
    29,
    28,
    35,
    34,
    41,
    27,
    39,
    38,
    30,
    31,
    36,
    8,
    10,
    15,
    0,
    2,
    1,
    11,
    3,
    4,
    6,
    12,
    14,
    13,
    7,
    9,
    5,
]

GROUPS = st.lists(st.integers(0, 40), max_size=30)
SEEDS = st.integers(-(2**40), 2**130)


def test_order_version_has_golden_vectors() -> None:
    assert ORDER_VERSION == GOLDEN_VERSION


@pytest.mark.parametrize(("n", "seed", "epoch", "positions", "values"), GOLDEN)
def test_permutation_gives_the_golden_values(
    n: int, seed: int, epoch: int, positions: list[int], values: list[int]
) -> None:
    assert Permutation(n, seed=seed, epoch=epoch).at(positions).tolist() == values


def rows_of(order: WindowOrder, epoch: int, start: int, stop: int) -> list[int]:
    """The rows at positions ``start`` to ``stop - 1``, numbered over all groups."""
    found: list[int] = []
    while start < stop:
        window = order.window_at(epoch, start)
        end = min(stop, window.stop_position)
        part = slice(start - window.start_position, end - window.start_position)
        found += (window.first_row + order.rows_in(epoch, window)[part]).tolist()
        start = end
    return found


def test_window_order_gives_the_golden_rows() -> None:
    order = WindowOrder([8, 8, 3, 8, 8, 8, 8, 1], seed=11, window_rows=16)
    assert rows_of(order, 2, 0, len(order)) == GOLDEN_WINDOWS


def test_every_small_permutation_is_a_bijection() -> None:
    for n in range(2001):
        values = Permutation(n, seed=3, epoch=n).take(0, n)
        assert values.dtype == np.int64
        assert np.array_equal(np.sort(values), np.arange(n)), n


@pytest.mark.parametrize("n", [2**16 - 1, 2**16, 2**16 + 1, 1_000_003, 1025**2, 1025**2 + 1])
def test_every_large_permutation_is_a_bijection(n: int) -> None:
    seen = np.zeros(n, bool)
    seen[Permutation(n, seed=5, epoch=1).take(0, n)] = True
    assert seen.all()


@pytest.mark.few(2)
@pytest.mark.parametrize("n", [2**32 - 1, 2**32, 2**32 + 1, 2**40 + 17, 2**63 - 1])
def test_huge_permutations_stay_in_range_and_never_repeat(n: int) -> None:
    order = Permutation(n, seed=1, epoch=0)
    values = np.concatenate([order.take(0, 40_000), order.take(n - 40_000, n)])
    assert values.min() >= 0
    assert values.max() < n
    assert len(np.unique(values)) == 80_000
    assert values.max() > n * 0.99
    assert values.min() < n * 0.01


@given(n=st.integers(1, 10**7), seed=SEEDS, epoch=st.integers(0, 10**6), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_stretch_equals_the_positions_taken_one_by_one(
    n: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    order = Permutation(n, seed=seed, epoch=epoch)
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, min(n, start + 40_000)))
    values = order.take(start, stop)
    assert np.array_equal(values, order.at(np.arange(start, stop)))
    if stop > start:
        assert int(order.at(start)) == values[0]


def test_at_keeps_the_shape_and_leaves_the_positions_alone() -> None:
    for n in (100, 100_000):
        positions = np.array([[3, 1], [4, 99]])
        values = Permutation(n, seed=0, epoch=0).at(positions)
        assert values.shape == (2, 2)
        assert positions.tolist() == [[3, 1], [4, 99]]


def test_a_taken_stretch_is_the_callers_own() -> None:
    order = Permutation(10, seed=0, epoch=0)
    before = order.take(0, 10).tolist()
    order.take(0, 10)[:] = -1
    assert order.take(0, 10).tolist() == before


def test_permutations_of_other_seeds_epochs_and_keys_are_others() -> None:
    for n in (50, 5000):
        variants = [
            Permutation(n, seed=seed, epoch=epoch, key=key).take(0, n).tobytes()
            for seed, epoch, key in itertools.product((0, 1, -1, 2**64), (0, 1, 2), ((), (0,), (1,), (0, 0)))
        ]
        assert len(set(variants)) == len(variants)


@pytest.mark.further
def test_all_permutations_of_four_values_occur_equally_often() -> None:
    draws = 4800
    counts = Counter(tuple(Permutation(4, seed=s, epoch=0).take(0, 4)) for s in range(draws))
    assert len(counts) == 24
    chi_square = sum((c - draws / 24) ** 2 / (draws / 24) for c in counts.values())
    assert chi_square < 49.7  # 23 degrees of freedom: exceeded once in 1000 tries


@pytest.mark.few(1)
@pytest.mark.parametrize("n", [1025, 4096, 32_768])
def test_distances_between_positions_are_uniform(n: int) -> None:
    base = int(np.ceil(np.sqrt(n)))
    values = np.stack([Permutation(n, seed=s, epoch=0).take(0, 4 * base) for s in range(400)])
    for lag in (1, 2, base - 1, base, base + 1, 2 * base):
        distance = (values[:, lag:] - values[:, :-lag]) % n
        counts = np.bincount((distance * 32 // n).ravel(), minlength=32)
        chi_square = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
        assert chi_square < 100, (lag, chi_square)  # 31 degrees of freedom; 4 rounds give thousands


def test_mean_displacement_is_that_of_a_random_permutation() -> None:
    n = 100_000
    moved = np.abs(Permutation(n, seed=9, epoch=0).take(0, n) - np.arange(n))
    assert abs(moved.mean() / (n / 3) - 1) < 0.01


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 11)])
def test_stretches_beyond_the_range_raise(start: int, stop: int) -> None:
    with pytest.raises(OptionError, match="0 to 10"):
        Permutation(10, seed=0, epoch=0).take(start, stop)


def test_illegal_sizes_and_positions_raise() -> None:
    with pytest.raises(OptionError, match="n=-1"):
        Permutation(-1, seed=0, epoch=0)
    with pytest.raises(OptionError, match="n="):
        Permutation(2**63, seed=0, epoch=0)
    with pytest.raises(OptionError, match="0 to 9"):
        Permutation(10, seed=0, epoch=0).at([3, 10])
    with pytest.raises(OptionError, match="0 to 1999"):
        Permutation(2000, seed=0, epoch=0).at([-1])


# ---- windows ----


@given(groups=GROUPS, seed=SEEDS, epoch=st.integers(0, 5), window_rows=st.none() | st.integers(1, 100))
@settings(max_examples=150, deadline=None)
def test_windows_serve_every_row_once_and_windows_whole(
    groups: list[int], seed: int, epoch: int, window_rows: int | None
) -> None:
    order = WindowOrder(groups, seed=seed, window_rows=window_rows)
    assert len(order) == sum(groups)
    served: list[int] = []
    indexes, position = [], 0
    firsts = np.concatenate([[0], np.cumsum(groups, dtype=np.int64)])
    while position < len(order):
        window = order.window_at(epoch, position)
        assert window.start_position == position
        assert window.rows == sum(groups[g] for g in window.groups) > 0
        assert window.first_row == firsts[window.groups.start]
        filled = [g for g in window.groups if groups[g]]
        assert len(filled) == 1 or window.rows <= order.window_rows
        served += (window.first_row + order.rows_in(epoch, window)).tolist()
        indexes.append(window.index)
        position = window.stop_position
    assert sorted(served) == list(range(sum(groups)))
    assert sorted(indexes) == list(range(len(indexes)))


@pytest.mark.further
@given(groups=GROUPS.filter(any), seed=SEEDS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_position_of_any_epoch_is_found_at_random(
    groups: list[int], seed: int, data: st.DataObject
) -> None:
    order, fresh = WindowOrder(groups, seed=seed), WindowOrder(groups, seed=seed)
    whole = {epoch: rows_of(order, epoch, 0, len(order)) for epoch in range(3)}
    for _ in range(10):
        epoch, start = data.draw(st.integers(0, 2)), data.draw(st.integers(0, len(order) - 1))
        stop = data.draw(st.integers(start, len(order)))
        assert rows_of(fresh, epoch, start, stop) == whole[epoch][start:stop]


def test_a_window_gathers_four_groups_unless_told() -> None:
    order = WindowOrder([8] * 10, seed=0)
    spans = {w.index: w.groups for w in (order.window_at(0, p) for p in range(80))}
    assert spans == {0: range(4), 1: range(4, 8), 2: range(8, 10)}
    order = WindowOrder([8] * 10, seed=0, window_rows=1)
    assert len({order.window_at(0, position).index for position in range(80)}) == 10


def test_epochs_serve_windows_and_rows_in_other_orders() -> None:
    order = WindowOrder([64] * 40, seed=0)
    windows = [[order.window_at(e, p).index for p in range(0, len(order), 256)] for e in range(4)]
    assert len({tuple(w) for w in windows}) == 4
    of_epoch = [{w.index: w for w in (order.window_at(e, p) for p in range(len(order)))} for e in range(4)]
    rows = [order.rows_in(e, windows[3]).tolist() for e, windows in enumerate(of_epoch)]
    assert len({tuple(r) for r in rows}) == 4
    assert rows[0] != order.rows_in(0, of_epoch[0][4]).tolist()


def test_an_order_over_no_rows_has_no_positions() -> None:
    for groups in ([], [0, 0]):
        order = WindowOrder(groups, seed=0)
        assert len(order) == 0
        with pytest.raises(OptionError, match="position 0"):
            order.window_at(0, 0)


def test_a_window_order_of_illegal_sizes_raises() -> None:
    with pytest.raises(OptionError, match="-1"):
        WindowOrder([3, -1], seed=0)
    with pytest.raises(OptionError, match="window_rows=0"):
        WindowOrder([3], seed=0, window_rows=0)
