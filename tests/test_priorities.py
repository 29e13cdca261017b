"""Priorities: rows are found as by a running sum, drawn as often as they should be, and weighted."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rlio.errors import OptionError, StateError
from rlio.replay.priorities import LARGEST, LEAST, Priorities, Prioritised, SumTree

# None, one, two and three levels of sums below the running sums, whole and not.
CAPACITIES = [1, 2, 7, 8, 9, 100, 2048, 2049, 5000, 16_384, 16_385, 131_073, 1_000_003]

Values = NDArray[np.float64]


def philox(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def tree_of(values: Any, **options: bool) -> SumTree:
    values = np.asarray(values, np.float64)
    tree = SumTree(len(values), **options)
    put(tree, np.arange(len(values)), values)
    return tree


def put(tree: SumTree, slots: Any, values: Any) -> None:
    values = np.asarray(values, np.float64)
    tree.put(np.asarray(slots, np.int64), values, bounds=np.where(values > 0.0, values, np.inf))


def find(tree: SumTree, masses: Any) -> NDArray[np.int64]:
    return tree.locate(np.array(masses, np.float64))[0]


def model_find(values: Values, masses: Values) -> NDArray[np.int64]:
    return np.cumsum(values).searchsorted(masses, side="right").astype(np.int64)


def assert_same_sums(one: SumTree, other: SumTree) -> None:
    assert one.capacity == other.capacity
    assert one.total == other.total
    for mine, theirs in zip(one._levels, other._levels, strict=True):
        assert mine.tobytes() == theirs.tobytes()
    assert one._running_sums().tobytes() == other._running_sums().tobytes()


class TestFind:
    @given(
        values=st.lists(st.integers(0, 9), min_size=1, max_size=300).filter(any),
        capacity=st.sampled_from(CAPACITIES[:-2]),
        data=st.data(),
    )
    def test_masses_fall_where_a_running_sum_puts_them(
        self, values: list[int], capacity: int, data: st.DataObject
    ) -> None:
        """Integers have exact sums: every mass has one right answer, borders included."""
        model = np.zeros(max(capacity, len(values)))
        first = data.draw(st.integers(0, len(model) - len(values)))
        model[first : first + len(values)] = values
        tree = tree_of(model)
        masses = np.arange(2 * int(model.sum())) / 2.0
        assert tree.total == model.sum()
        found = find(tree, masses)
        assert found.dtype == np.int64
        assert found.tolist() == model_find(model, masses).tolist()

    @pytest.mark.parametrize("capacity", CAPACITIES)
    def test_each_slot_holds_its_half_open_interval_at_every_size(self, capacity: int) -> None:
        values = philox(capacity).integers(0, 3, capacity).astype(np.float64)
        values[-1] = 2.0
        tree = tree_of(values)
        masses = philox(1).integers(0, int(values.sum()), 2000).astype(np.float64)
        assert find(tree, masses).tolist() == model_find(values, masses).tolist()
        ends = np.cumsum(values)
        assert find(tree, [0.0, ends[-1] - 0.5, ends[-1] - 2.0]).tolist() == [
            int(np.flatnonzero(values)[0]),
            capacity - 1,
            capacity - 1,
        ]

    def test_masses_may_come_in_any_order_and_none_at_all(self) -> None:
        tree = tree_of([1.0, 2.0, 3.0])
        assert find(tree, [5.5, 0.0, 2.9, 3.0]).tolist() == [2, 0, 1, 2]
        assert find(tree, []).tolist() == []
        assert find(tree, [-0.0]).tolist() == [0]

    @given(
        seed=st.integers(0, 2**32),
        zeros=st.floats(0.0, 0.999),
        decades=st.sampled_from([0, 1, 20, 250]),
        capacity=st.sampled_from([5, 300, 4096, 40_000]),
    )
    def test_rounding_never_leads_to_a_zero_or_out_of_range(
        self, seed: int, zeros: float, decades: int, capacity: int
    ) -> None:
        rng = philox(seed)
        values = 10.0 ** rng.uniform(-decades, decades, capacity) * (rng.random(capacity) >= zeros)
        values[rng.integers(capacity)] = 1.0
        tree = tree_of(values)
        total = tree.total
        # The largest mass of all, and masses close below and above the borders.
        borders = np.cumsum(values)[rng.integers(0, capacity, 500)]
        masses = np.concatenate(
            [
                [math.nextafter(total, 0.0), 0.0],
                rng.random(500) * math.nextafter(total, 0.0),
                borders,
                np.nextafter(borders, 0.0),
                np.nextafter(borders, np.inf),
            ]
        )
        masses = masses[masses < total]
        found = find(tree, masses)
        assert (values[found] > 0.0).all()
        # And it is the right slot but for rounding: its interval is no farther than that.
        slack = 1e-12 * total
        ends = np.cumsum(values)
        assert (masses <= ends[found] + slack).all()
        assert (masses >= ends[found] - values[found] - slack).all()

    @pytest.mark.parametrize("exponent", [-900, -52, 0, 800])
    def test_a_mass_that_rounding_carries_past_a_node_stays_on_its_last_value(self, exponent: int) -> None:
        """The sum of these two rounds up so far that the mass below it, less the first, is the second."""
        first, second = math.ldexp(2.0**52 + 3, exponent), math.ldexp(2.0**53 + 4, exponent)
        mass = math.nextafter(first + second, 0.0)
        assert mass - first == second
        for capacity, gap in itertools.product([4097, 40_000], [1, 3, 4, 7, 8, 64, 512, 4096]):
            for at in (0, capacity - gap - 1):
                tree = SumTree(capacity)
                put(tree, [at, at + gap], [first, second])
                assert find(tree, [mass, first, 0.0]).tolist() == [at + gap, at + gap, at], (capacity, gap)


class TestChange:
    @given(
        capacity=st.sampled_from([1, 9, 3000, 20_000]),
        seed=st.integers(0, 2**32),
        steps=st.lists(
            st.tuples(st.sampled_from(["set", "fill", "clear"]), st.integers(1, 5000)), max_size=8
        ),
    )
    def test_sums_are_those_of_a_tree_that_was_built_at_once(
        self, capacity: int, seed: int, steps: list[tuple[str, int]]
    ) -> None:
        rng = philox(seed)
        tree, model = SumTree(capacity, smallest=True), np.zeros(capacity)
        for what, size in steps:
            first = int(rng.integers(len(model)))
            stretch = range(first, min(first + size, len(model)))
            if what == "set":
                slots, values = rng.integers(0, len(model), size), rng.random(size) * (rng.random(size) > 0.3)
                put(tree, slots, values)
                for slot, value in zip(slots, values, strict=True):  # the last one stays
                    model[slot] = value
            else:
                value = 0.0 if what == "clear" else float(rng.random())
                if what == "clear":
                    tree.fill(stretch, 0.0)
                else:
                    tree.fill(stretch, value)
                model[stretch.start : stretch.stop] = value
            assert tree.total == pytest.approx(math.fsum(model), rel=1e-12)
            assert tree.smallest == (model[model > 0.0].min() if model.any() else math.inf)
        assert tree.values.tolist() == model.tolist()
        assert_same_sums(tree, tree_of(model))

    def test_a_million_updates_leave_no_drift(self) -> None:
        rng, capacity = philox(3), 10_000
        tree, model = SumTree(capacity), np.zeros(capacity)
        for _ in range(4000):
            slots = rng.integers(0, capacity, 250)
            values = 10.0 ** rng.uniform(-8, 8, 250)
            put(tree, slots, values)
            model[slots] = values
        assert tree.values.tolist() == model.tolist()
        assert_same_sums(tree, tree_of(model))

    @pytest.mark.parametrize("size", [1, 40, 100_000])
    def test_of_a_slot_that_is_named_twice_the_last_value_stays(self, size: int) -> None:
        tree = SumTree(30_000)
        put(tree, np.full(size, 17), np.arange(1, size + 1))
        put(tree, [5, 5], [1.0, 0.0])
        assert tree.values[[17, 5]].tolist() == [size, 0.0]
        assert tree.total == size

    def test_a_smallest_value_that_goes_up_or_away_is_missed_by_nobody(self) -> None:
        rng, capacity = philox(11), 20_000
        tree, model = SumTree(capacity, smallest=True), np.zeros(capacity)
        for _ in range(300):
            slots = rng.integers(0, capacity, 50)
            # The smallest ones among them: those that the bounds rest on.
            slots[:10] = np.argsort(np.where(model > 0.0, model, np.inf))[:10]
            values = rng.random(50) * (rng.random(50) > 0.2)
            put(tree, slots, values)
            for slot, value in zip(slots, values, strict=True):
                model[slot] = value
            assert tree.smallest == (model[model > 0.0].min() if model.any() else math.inf)

    def test_arrays_give_the_same_tree_back(self) -> None:
        tree = tree_of(philox(4).random(5000) + 0.1)
        again = SumTree(5000, smallest=True)
        again.restore(tree.values)
        assert_same_sums(tree, again)
        assert again.smallest == tree.values.min()
        put(again, [0], [0.0])
        assert tree.values[[0]] > 0.0

    def test_extremes_side_by_side_do_not_overflow(self) -> None:
        tree = tree_of([LEAST, LARGEST, LEAST, LARGEST] * 1000, smallest=True)
        assert tree.total == 2000 * LARGEST
        assert tree.smallest == LEAST
        assert set((find(tree, philox(0).random(1000) * tree.total) % 2).tolist()) == {1}


def chi_square(drawn: NDArray[np.int64], shares: Values, draws: int) -> tuple[float, int]:
    """Pearson's statistic over cells of at least 20 expected draws, neighbours put together."""
    expected = shares * draws
    cells = np.floor(np.cumsum(expected) / 20.0).astype(np.int64).clip(max=int(draws / 20) - 1)
    seen = np.bincount(cells, np.bincount(drawn, minlength=len(shares)))
    wanted = np.bincount(cells, expected)
    used = wanted > 0.0
    return float(((seen - wanted)[used] ** 2 / wanted[used]).sum()), int(used.sum()) - 1


def filled(errors: Values, **options: Any) -> Priorities:
    priorities = Priorities(len(errors), Prioritised(**options))
    priorities.appended(range(len(errors)))
    priorities.update(np.arange(len(errors)), errors)
    return priorities


class TestDraw:
    @pytest.mark.few(2)
    @pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
    @pytest.mark.parametrize("rows", [1, 2, 10, 1000, 10_000, 100_000, 1_000_000])
    @pytest.mark.each_value_once
    def test_rows_are_drawn_in_proportion_to_their_priorities(self, rows: int, alpha: float) -> None:
        """By chi-square, of draws one at a time: strata make batches even, and the statistic too small."""
        errors = philox(rows).exponential(1.0, rows)
        priorities = filled(errors, alpha=alpha)
        shares = (errors + 1e-6) ** alpha
        shares /= shares.sum()
        draws, rng = 200_000, philox(5)
        slots = find(priorities.tree, rng.random(draws) * priorities.tree.total)
        statistic, freedom = chi_square(slots, shares, draws)
        # Six standard deviations of the chi-square distribution either way: too even is wrong as well.
        assert abs(statistic - freedom) <= 6.0 * math.sqrt(2.0 * freedom) + 1e-9
        # Strata keep the frequencies, and each row within one draw at each end of its interval.
        slots, _ = priorities.draw(draws, rng)
        counts = np.bincount(slots, minlength=rows)
        assert (np.abs(counts - shares * draws) < 2.0).all()

    @pytest.mark.few(2)
    @pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
    def test_batches_together_follow_the_priorities(self, alpha: float) -> None:
        """Many batches of few rows: what a training run sees."""
        errors = philox(1).exponential(1.0, 300)
        priorities = filled(errors, alpha=alpha)
        rng, counts = philox(2), np.zeros(300)
        for _ in range(2000):
            counts += np.bincount(priorities.draw(32, rng)[0], minlength=300)
        shares = (errors + 1e-6) ** alpha
        expected = shares / shares.sum() * counts.sum()
        assert priorities.drawn == counts.sum() == 64_000
        # A stratum's share of a row is a Bernoulli draw at most: no more spread than independent draws.
        statistic = float(((counts - expected) ** 2 / expected).sum())
        assert statistic < 299 + 6.0 * math.sqrt(2 * 299)
        # And by row: within five standard deviations.
        assert (np.abs(counts - expected) <= 5.0 * np.sqrt(expected) + 1.0).all()

    def test_one_draw_falls_into_each_stratum(self) -> None:
        priorities = filled(np.ones(1000), alpha=1.0)
        slots, _ = priorities.draw(100, philox(0))
        assert (slots // 10).tolist() == list(range(100))

    @pytest.mark.parametrize("rows", [3, 2048, 16_384])
    def test_a_mass_that_is_rounded_up_to_the_total_falls_on_the_last_row(self, rows: int) -> None:
        class HighestNumbers:
            def random(self, n: int) -> Values:
                return np.full(n, math.nextafter(1.0, 0.0))

        priorities = filled(np.ones(rows))
        slots, _ = priorities.draw(4096, HighestNumbers())  # type: ignore[arg-type]
        assert slots[-1] == rows - 1
        assert (np.diff(slots) >= 0).all()
        priorities.forget(range(rows // 2, rows))
        assert priorities.draw(4096, HighestNumbers())[0][-1] == rows // 2 - 1  # type: ignore[arg-type]

    def test_rows_of_priority_zero_are_never_drawn(self) -> None:
        rng, rows = philox(8), 50_000
        priorities = filled(rng.random(rows))
        gone = np.flatnonzero(rng.random(rows) < 0.9)
        put(priorities.tree, gone, 0.0)
        priorities.forget(range(rows - 1000, rows))
        priorities.forget(range(1000))
        alive = np.ones(rows, bool)
        alive[gone] = alive[:1000] = alive[-1000:] = False
        for _ in range(25):
            assert alive[priorities.draw(40_000, rng)[0]].all()
        assert priorities.drawn == 1_000_000

    @pytest.mark.parametrize("rows", [1, 9, 5000, 100_000])
    def test_one_row_alone_is_drawn_always(self, rows: int) -> None:
        for slot in {0, rows // 2, rows - 1}:
            priorities = Priorities(rows)
            priorities.appended(range(slot, slot + 1))
            slots, weights = priorities.draw(100, philox(1))
            assert slots.tolist() == [slot] * 100
            assert weights.tolist() == [1.0] * 100

    def test_equal_rows_have_equal_weights_and_frequencies(self) -> None:
        priorities = filled(np.full(4096, 0.3))
        slots, weights = priorities.draw(8192, philox(1))
        assert set(np.bincount(slots).tolist()) <= {1, 2, 3}
        assert set(weights.tolist()) == {1.0}

    @pytest.mark.parametrize("normalise", ["buffer", "batch"])
    @pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
    def test_weights_follow_the_formula(self, beta: float, normalise: Any) -> None:
        errors = philox(6).exponential(1.0, 3000)
        errors[:1500] = 0.0
        priorities = filled(errors, alpha=0.7, beta=beta, epsilon=0.01, normalise=normalise)
        priorities.forget(range(100))
        p = (errors + 0.01) ** 0.7
        p[:100] = 0.0
        alive = p > 0.0
        probability = p / p.sum()
        slots, weights = priorities.draw(64, philox(7))
        every = (alive.sum() * probability[alive]) ** -beta
        mine = (alive.sum() * probability[slots]) ** -beta
        expected = mine / (every.max() if normalise == "buffer" else mine.max())
        assert weights.dtype == np.float32
        assert weights.shape == (64,)
        np.testing.assert_allclose(weights, expected, rtol=1e-6)

    def test_the_two_ways_to_normalise_differ(self) -> None:
        """One row of tiny priority that is not drawn: the buffer's largest weight is its."""
        errors = np.ones(1000)
        errors[0] = 1e-5
        of_buffer = filled(errors, alpha=1.0, beta=1.0, normalise="buffer").draw(8, philox(0))[1]
        of_batch = filled(errors, alpha=1.0, beta=1.0, normalise="batch").draw(8, philox(0))[1]
        np.testing.assert_allclose(of_buffer, 1.1e-5, rtol=1e-4)
        assert of_batch.tolist() == [1.0] * 8

    def test_beta_may_depend_on_the_rows_drawn_before(self) -> None:
        seen: list[int] = []

        def beta(drawn: int) -> float:
            seen.append(drawn)
            return min(1.0, drawn / 20)

        priorities = filled(np.array([1.0, 3.0]), alpha=1.0, beta=beta)
        weights = [priorities.draw(10, philox(0))[1].min() for _ in range(4)]
        assert seen == [0, 10, 20, 30]
        np.testing.assert_allclose(weights, [1.0, 3**-0.5, 1 / 3, 1 / 3], rtol=1e-5)
        with pytest.raises(OptionError, match=r"beta=1\.5"):
            filled(np.ones(2), beta=lambda drawn: 1.5).draw(1, philox(0))

    def test_equal_states_of_the_generator_draw_equal_rows(self) -> None:
        one, other = filled(np.arange(5000.0)), filled(np.arange(5000.0))
        first, second = one.draw(100, philox(3)), other.draw(100, philox(3))
        assert first[0].tolist() == second[0].tolist()
        assert first[0].tolist() != one.draw(100, philox(4))[0].tolist()

    def test_where_nothing_can_be_drawn_it_says_so(self) -> None:
        priorities = Priorities(10)
        with pytest.raises(OptionError, match="no row has a priority above 0"):
            priorities.draw(4, philox(0))
        priorities.appended(range(3, 4))
        with pytest.raises(OptionError, match="at least 1"):
            priorities.draw(0, philox(0))
        priorities.forget(range(10))
        with pytest.raises(OptionError, match="no row has a priority above 0"):
            priorities.draw(4, philox(0))


class TestUpdate:
    def test_priorities_are_powers_of_errors_of_either_sign(self) -> None:
        priorities = filled(np.zeros(4), alpha=0.5, epsilon=0.25)
        priorities.update(np.array([3, 0]), np.array([-2.0, 6.0], np.float32))
        assert priorities.tree.values[[0, 1, 2, 3]].tolist() == [2.5, 0.5, 0.5, 1.5]

    def test_new_rows_get_the_highest_priority_given_so_far(self) -> None:
        priorities = Priorities(8, Prioritised(alpha=1.0, epsilon=0.5))
        priorities.appended(range(2))
        assert priorities.tree.values[[0, 1, 2]].tolist() == [1.0, 1.0, 0.0]
        priorities.update([0, 1], [4.0, 0.1])
        priorities.update([0], [0.0])
        priorities.appended(range(1, 3))
        assert priorities.maximum == 4.5
        assert priorities.tree.values[[0, 1, 2]].tolist() == [0.5, 4.5, 4.5]

    def test_an_update_does_not_bring_back_what_is_gone(self) -> None:
        priorities = filled(np.ones(10))
        slots, _ = priorities.draw(10, philox(0))
        priorities.forget(range(4))
        priorities.update(slots, np.full(10, 9.0))
        assert (priorities.tree.values[:4] == 0.0).all()
        assert (priorities.tree.values[4:10] > 3.0).all()
        np.testing.assert_allclose(priorities.draw(6, philox(0))[1], 1.0)

    @pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
    @pytest.mark.parametrize("error", [math.nan, math.inf, -math.inf])
    def test_errors_that_are_not_finite_are_refused_and_change_nothing(
        self, error: float, alpha: float
    ) -> None:
        priorities = filled(np.ones(4), alpha=alpha)
        before = priorities.tree.values[:4].tolist()
        with pytest.raises(OptionError, match=r"1 of 2 errors are not finite.*diverged"):
            priorities.update([0, 1], [5.0, error])
        assert priorities.tree.values[:4].tolist() == before
        assert priorities.maximum == pytest.approx(1.0, rel=1e-5)

    def test_the_largest_errors_are_right_or_refused(self) -> None:
        for alpha in (0.0, 0.3, 0.6, 1.0, 3.0):
            priorities = filled(np.ones(2), alpha=alpha)
            largest = priorities._largest_error
            priorities.update([0], [largest])
            assert 1.0 <= priorities.maximum <= LARGEST
            assert math.isfinite(priorities.tree.total)
            if alpha:
                with pytest.raises(OptionError, match="scale them down"):
                    priorities.update([0], [2.0 * largest] if largest < 1e300 else [1.7e308])

    def test_errors_and_slots_that_do_not_match_are_refused(self) -> None:
        priorities = filled(np.ones(4))
        with pytest.raises(OptionError, match=r"shape \(3,\) for 2 slots"):
            priorities.update([0, 1], [1.0, 2.0, 3.0])
        for slots in ([-1], [4], [1.0], [[1]], [True]):
            with pytest.raises(OptionError, match="slots"):
                priorities.update(slots, [1.0])  # type: ignore[arg-type]
        assert priorities.tree.total == pytest.approx(4.0, rel=1e-5)

    def test_saved_priorities_go_on_as_if_nothing_had_happened(self) -> None:
        options = Prioritised(beta=lambda drawn: min(1.0, drawn / 1000))
        one, rng = Priorities(20_000, options), philox(1)
        one.appended(range(15_000))
        one.update(np.arange(15_000), rng.exponential(3.0, 15_000))
        one.draw(100, rng)
        saved = {name: array.copy() for name, array in one.to_arrays().items()}
        other = Priorities.from_arrays(saved, options)
        assert (other.drawn, other.maximum) == (100, one.maximum)
        for seed in range(5):
            mine, theirs = one.draw(64, philox(seed)), other.draw(64, philox(seed))
            assert mine[0].tobytes() == theirs[0].tobytes()
            assert mine[1].tobytes() == theirs[1].tobytes()
            for priorities in (one, other):
                priorities.update(mine[0], np.arange(64.0))
                priorities.appended(range(15_000 + seed, 15_010 + seed))
        assert_same_sums(one.tree, other.tree)

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("drawn", np.array(-1), "drawn=-1"),
            ("maximum", np.array(math.nan), "maximum=nan"),
            ("maximum", np.array(0.5), "maximum=0.5"),
            ("drawn", np.array(1.0), "drawn has dtype float64"),
            ("values", np.zeros(0), "values is empty"),
            ("values", np.array([1.0, -1.0]), "not priorities"),
            ("values", np.array(["1"]), "values has dtype"),
            ("values", None, "values is missing"),
        ],
    )
    def test_arrays_of_another_form_are_refused(self, name: str, value: Any, message: str) -> None:
        arrays = {**filled(np.ones(3)).to_arrays(), name: value}
        if value is None:
            del arrays[name]
        with pytest.raises(StateError, match=message):
            Priorities.from_arrays(arrays)


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": -0.1},
        {"alpha": math.nan},
        {"alpha": math.inf},
        {"alpha": "1"},
        {"beta": 1.1},
        {"beta": -0.1},
        {"beta": math.nan},
        {"beta": None},
        {"epsilon": 0.0},
        {"epsilon": -1e-6},
        {"epsilon": math.inf},
        {"normalise": "rows"},
        {"alpha": 60.0},
    ],
)
def test_illegal_options_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        Prioritised(**options)
