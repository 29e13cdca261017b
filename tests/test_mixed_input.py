"""Mixtures: exact shares for ever, sources that end, columns, names, and the law of resuming."""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from counting import Agents, Counting, Live, numbers, rows_of
from further import further
from hypothesis import given, settings
from hypothesis import strategies as st

from rlio.batch import Batch, MultiAgentBatch, SampleBatch, concat_samples
from rlio.errors import CorruptData, EndOfData, MissingColumn, OptionError, SchemaError, StateError
from rlio.reader import InputReader
from rlio.readers.mix_schedule import Schedule
from rlio.readers.mixed_input import MixedInput
from rlio.readers.shuffled_input import ShuffledInput
from rlio.testing import ReaderTests, assert_resumes, assert_same

WEIGHTS = st.lists(st.integers(0, 20) | st.integers(1, 10**12), min_size=1, max_size=7).filter(any)


def mix(
    weights: Sequence[Any], *, batch_size: int = 10, total: int | None = None, **options: Any
) -> MixedInput:
    """A mixture of counting readers, source i labelled i and with batches of its own size."""
    pairs = [(Counting(total, (5 + 3 * i, 2), label=i), weight) for i, weight in enumerate(weights)]
    return MixedInput(pairs, batch_size=batch_size, **options)


def labels(batch: Batch) -> list[int]:
    assert isinstance(batch, SampleBatch)
    return np.bincount(batch["label"], minlength=3).tolist()


class TestFiniteMixture(ReaderTests):
    size_free = False

    def make_reader(self) -> InputReader:
        pairs = [(Counting(total, (4, 7), label=i), total) for i, total in enumerate((42, 12, 6))]
        return MixedInput(pairs, batch_size=10)

    def expected_rows(self) -> None:
        """Sources are joined batch by batch; the tests below look at each."""


class TestEndlessMixture(ReaderTests):
    finite = False
    size_free = False

    def make_reader(self) -> InputReader:
        return mix([0.7, 0.2, 0.1], seed=3, source_column=True)

    def expected_rows(self) -> None:
        """As above."""


class TestMixtureOfOne(ReaderTests):
    def make_reader(self) -> InputReader:
        return mix([1], total=31, batch_size=4)

    def expected_rows(self) -> Batch:
        return rows_of(0, 31)


# ---- shares ----


@pytest.mark.parametrize("batches", [1_000, *further(10_000)])
def test_mixing_stays_within_one_row_of_each_share(batches: int) -> None:
    reader, served = mix([0.7, 0.2, 0.1], batch_size=7), np.zeros(3, np.int64)
    shares = [Fraction(7, 10), Fraction(2, 10), Fraction(1, 10)]
    for _ in range(batches):
        served += labels(reader.sample())
        total = int(served.sum())
        assert all(abs(share * total - int(count)) < 1 for share, count in zip(shares, served, strict=True))
    assert (
        list(reader.counts.values())
        == served.tolist()
        == [49 * batches // 10, 14 * batches // 10, 7 * batches // 10]
    )


@pytest.mark.further
@given(weights=WEIGHTS, sizes=st.lists(st.integers(1, 300), min_size=1, max_size=60), data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_weights_and_sizes_stay_within_one_row(
    weights: list[int], sizes: list[int], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(weights))))
    schedule, total = Schedule(weights, order=order), 0
    for size in sizes:
        shares = schedule.deal(size)
        total += size
        assert sum(shares) == size
        assert min(shares) >= 0
        for weight, count in zip(weights, schedule.counts, strict=True):
            assert abs(Fraction(weight * total, sum(weights)) - count) < 1


def test_shares_stay_within_one_row_where_largest_remainders_drift_past_it() -> None:
    weights = [3, 1, 1, 1, 3, 3, 3, 3, 3]
    schedule = Schedule(weights, order=range(9))
    for total in range(1, 2 * sum(weights) + 1):
        schedule.deal(1)
        for weight, count in zip(weights, schedule.counts, strict=True):
            assert abs(Fraction(weight * total, sum(weights)) - count) < 1


@given(
    phases=st.lists(
        st.tuples(st.lists(st.integers(0, 50), min_size=3, max_size=3).filter(any), st.integers(1, 20)),
        min_size=1,
        max_size=80,
    )
)
@settings(max_examples=100, deadline=None)
def test_changing_weights_carry_over_what_was_owed(phases: list[tuple[list[int], int]]) -> None:
    schedule: Schedule | None = None
    for weights, size in phases:
        owed = None if schedule is None else schedule.owed()
        assert owed is None or sum(owed) == 0
        schedule = Schedule(weights, order=[0, 1, 2], credits=owed)
        shares = schedule.deal(size)
        assert sum(shares) == size
        assert min(shares) >= 0
        assert all(share == 0 for share, weight in zip(shares, weights, strict=True) if weight == 0)


def test_a_small_share_is_not_starved_by_weights_that_change_every_batch() -> None:
    reader = MixedInput(
        {"big": Counting(None, label=0), "small": Counting(None, label=1)},
        batch_size=1,
        weights=lambda steps: {"big": 9 + steps / 1e6, "small": 1},
    )
    for _ in range(1000):
        reader.sample()
    assert abs(reader.counts["small"] - 100) <= 1


def test_sources_keep_their_own_order_and_lose_nothing() -> None:
    reader = mix([3, 2, 1], batch_size=7)
    rows = concat_samples([reader.sample(n) for n in (None, 1, 5, 20, None, 3)])
    assert isinstance(rows, SampleBatch)
    for label in range(3):
        own = rows["t"][rows["label"] == label]
        assert own.tolist() == list(range(len(own)))


def test_rows_of_a_batch_are_grouped_in_the_order_of_the_sources() -> None:
    batch = mix([0.5, 0.3, 0.2]).sample()
    assert isinstance(batch, SampleBatch)
    assert batch["label"].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 2, 2]


def test_batches_are_exact_whatever_the_sources_sizes() -> None:
    reader = mix([1, 1, 1])
    assert [len(reader.sample(n)) for n in (None, 1, 2, 100, None)] == [10, 1, 2, 100, 10]


@pytest.mark.parametrize(
    "weights",
    [
        [7, 2, 1],
        [0.7, 0.2, 0.1],
        [70.0, 20.0, 10.0],
        [Decimal("0.7"), Decimal("0.2"), Decimal("0.1")],
        [Fraction(7, 3), Fraction(2, 3), Fraction(1, 3)],
        [np.float64(0.7), np.float64(0.2), np.float64(0.1)],
        [np.float32(0.7), np.float32(0.2), np.float32(0.1)],
    ],
)
def test_weights_are_relative_and_floats_mean_their_decimal_text(weights: list[Any]) -> None:
    assert mix(weights)._whole == [7, 2, 1]


def test_a_source_of_weight_0_is_never_asked() -> None:
    reader = mix([1, 0], total=None)
    assert numbers([reader.sample(), reader.sample()]) == list(range(20))
    assert reader.counts == {"source_0": 20, "source_1": 0}


def test_the_seed_decides_who_goes_first() -> None:
    def first(seed: int | None) -> list[int]:
        reader = mix([1] * 6, batch_size=1, seed=seed)
        return [int(reader.sample()["label"][0]) for _ in range(12)]

    assert first(None)[:6] == first(None)[6:] == [0, 1, 2, 3, 4, 5]
    orders = {tuple(first(seed)[:6]) for seed in range(10)}
    assert len(orders) > 5
    assert first(4) == first(4)


def test_weights_may_follow_a_schedule() -> None:
    calls: list[int] = []

    def anneal(steps: int) -> dict[str, float]:
        calls.append(steps)
        return {"live": 0.9, "old": 0.1} if steps >= 100 else {"old": 1, "live": 0}

    reader = MixedInput({"old": Counting(None), "live": Counting(None)}, batch_size=20, weights=anneal)
    for _ in range(5):
        reader.sample()
    assert reader.counts == {"old": 100, "live": 0}
    for _ in range(5):
        reader.sample()
    assert reader.counts == {"old": 110, "live": 90}
    assert calls == [0, *range(0, 200, 20)]


# ---- ways to name sources ----


def test_sources_may_be_named_or_paired_or_keyed() -> None:
    one, other = Counting(None), Counting(None)
    named = MixedInput({"a": one, "b": other}, weights={"b": 3, "a": 1}, batch_size=4)
    named.sample()
    assert named.counts == {"a": 1, "b": 3}
    assert named.sources == {"a": one, "b": other}
    listed = MixedInput({"a": Counting(None), "b": Counting(None)}, weights=[1, 3], batch_size=4)
    keyed = MixedInput({Counting(None): 1, Counting(None): 3}, batch_size=4)
    paired = MixedInput(
        ((reader, w) for reader, w in [(Counting(None), 1), (Counting(None), 3)]), batch_size=4
    )
    for reader in (listed, keyed, paired):
        reader.sample()
        assert list(reader.counts.values()) == [1, 3]
    equal = MixedInput({"a": Counting(None), "b": Counting(None)}, batch_size=4)
    equal.sample()
    assert equal.counts == {"a": 2, "b": 2}


SAME = Counting(None)


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        ({}, {}, "one source or more"),
        ([], {}, "one source or more"),
        ([(SAME, 1), (SAME, 1)], {}, "each reader once"),
        ([("path", 1)], {}, "rlio.read"),
        ([SAME], {}, "rlio.read"),
        ({"a": "path"}, {}, "rlio.read"),
        ([(SAME, -1)], {}, "0 or more"),
        ([(SAME, float("nan"))], {}, "finite"),
        ([(SAME, float("inf"))], {}, "finite"),
        ([(SAME, "many")], {}, "finite"),
        ([(SAME, 0)], {}, "all 0"),
        ([(SAME, 1)], {"weights": [1]}, "weights already"),
        ({"a": SAME}, {"weights": {"b": 1}}, "'b'"),
        ({"a": SAME}, {"weights": [1, 2]}, "1 source"),
        ({"a": SAME}, {"weights": 3}, "name -> weight"),
        ({"a": SAME}, {"batch_size": 0}, "batch_size=0"),
        ({"a": SAME}, {"end": "stop"}, "end='stop'"),
        ({"a": SAME}, {"columns": "outer"}, "columns='outer'"),
    ],
)
def test_illegal_arguments_raise(sources: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        MixedInput(sources, **{"batch_size": 4, **options})


def test_sources_that_count_in_different_units_raise() -> None:
    reader = Counting(None)
    reader.unit = "episodes"
    assert MixedInput([(reader, 1)], batch_size=4).unit == "episodes"
    with pytest.raises(OptionError, match=r"different units.*episodes"):
        MixedInput([(reader, 1), (Counting(None), 1)], batch_size=4)


# ---- ends ----


def test_a_source_that_ends_before_the_others_is_an_error_that_names_it() -> None:
    reader = MixedInput({"short": Counting(7), "long": Counting(None)}, batch_size=4)
    for _ in range(3):
        reader.sample()
    with pytest.raises(OptionError, match=r"'short'.*after 6.*'long' continues"):
        reader.sample()
    # What was drawn for the batch that never was is still there.
    assert reader.counts == {"short": 6, "long": 6}
    for name, first in (("short", 6), ("long", 6)):
        position = reader.state_dict()["position"]["sources"][name]
        assert position["state"]["position"]["row"] + position["served"] == first


def test_sources_that_end_together_end_the_mixture_with_every_row_served() -> None:
    for totals, batch_size in (((70, 20, 10), 64), ((70, 20, 10), 10), ((71, 20, 10), 64), ((7, 2, 1), 100)):
        pairs = [
            (Counting(total, (5,), label=i), w)
            for i, (total, w) in enumerate(zip(totals, (7, 2, 1), strict=False))
        ]
        reader = MixedInput(pairs, batch_size=batch_size)
        rows = concat_samples(list(reader))
        assert labels(rows) == list(totals)
        for _ in range(2):
            with pytest.raises(EndOfData):
                reader.sample()


def test_renormalise_serves_every_row_and_keeps_the_proportions_of_the_rest() -> None:
    pairs = [(Counting(total, (5,), label=i), w) for i, (total, w) in enumerate([(10, 2), (60, 2), (30, 1)])]
    reader = MixedInput(pairs, batch_size=10, end="renormalise")
    counts = []
    for batch in reader:
        assert len(batch) == 10
        counts.append(labels(batch))
    assert np.sum(counts, axis=0).tolist() == [10, 60, 30]
    after = np.cumsum(counts, axis=0)[3:]  # source 0 ends in the third batch
    gained = after - after[0]
    assert all(abs(2 * own[2] - own[1]) <= 3 for own in gained[:-1])


def test_rewind_starts_a_source_again_as_often_as_it_takes() -> None:
    reader = MixedInput({"short": Counting(7), "long": Counting(None)}, batch_size=40, end="rewind")
    batch = reader.sample()
    assert batch["t"][:20].tolist() == [*range(7), *range(7), *range(6)]
    assert batch["t"][20:].tolist() == list(range(20))
    assert reader.sample(2)["t"].tolist() == [6, 20]


def test_a_live_source_that_ends_cannot_rewind() -> None:
    reader = MixedInput({"live": Live(5), "old": Counting(None)}, batch_size=4, end="rewind")
    reader.sample(10)
    with pytest.raises(OptionError, match=r"'live'.*not replayable"):
        reader.sample()
    # Even where the other stands at its own end, from which it could rewind.
    reader = MixedInput({"live": Live(6), "old": Counting(6)}, batch_size=4, end="rewind")
    reader.sample(12)
    with pytest.raises(OptionError, match=r"'live'.*not replayable"):
        reader.sample()


def test_rewinding_a_source_without_rows_raises_instead_of_hanging() -> None:
    reader = MixedInput({"empty": Counting(0), "old": Counting(None)}, batch_size=4, end="rewind")
    with pytest.raises(OptionError, match=r"'empty'.*no steps"):
        reader.sample()


class Flaky(Counting):
    """Raises when it is asked for its second batch, once."""

    failed = False

    def _next(self) -> Batch:
        if self.number == 1 and not self.failed:
            self.failed = True
            raise CorruptData("bad", record=1)
        return super()._next()


def test_a_source_that_fails_costs_no_rows_of_any_source() -> None:
    def make(flaky: type[Counting]) -> MixedInput:
        sources = {"good": Counting(None, (2, 9)), "flaky": flaky(None, (4,)), "rare": Counting(None)}
        return MixedInput(sources, weights=[4, 2, 1], batch_size=6)

    reader, whole = make(Flaky), make(Counting)
    for _ in range(2):
        assert_same(reader.sample(), whole.sample())
    with pytest.raises(CorruptData):
        reader.sample()
    state = json.loads(json.dumps(reader.state_dict()).replace("Flaky", "Counting"))
    restored = make(Counting)
    restored.load_state_dict(state)
    for _ in range(8):
        expected = whole.sample()
        assert_same(reader.sample(), expected)
        assert_same(restored.sample(), expected)
    assert reader.counts == whole.counts


def test_a_source_that_could_not_be_rewound_is_rewound_by_the_next_call() -> None:
    class Remote(Counting):
        outages = 1

        def _seek(self, position: Any) -> None:
            if self.outages:
                self.outages -= 1
                raise OSError("the store does not answer")
            super()._seek(position)

    def make(kind: type[Counting]) -> MixedInput:
        return MixedInput({"a": kind(5), "b": Counting(None)}, batch_size=4, end="rewind")

    reader, whole = make(Remote), make(Counting)
    for _ in range(2):
        assert_same(reader.sample(), whole.sample())
    with pytest.raises(OSError, match="does not answer"):
        reader.sample()
    for _ in range(4):
        assert_same(reader.sample(), whole.sample())
    assert reader.counts == whole.counts


def test_sources_that_do_not_fit_together_keep_their_rows() -> None:
    reader = MixedInput({"a": Counting(None), "b": Fewer(None)}, batch_size=4)
    for _ in range(2):
        with pytest.raises((MissingColumn, SchemaError)):
            reader.sample()
    assert reader.counts == {"a": 0, "b": 0}
    reader.columns = "intersect"
    assert reader.sample()["t"].tolist() == [0, 1, 0, 1]


# ---- columns and kinds ----


class Fewer(Counting):
    """Without the column ``label``."""

    def _next(self) -> Batch:
        batch = super()._next()
        del batch["label"]  # type: ignore[union-attr]  # it is a SampleBatch
        return batch


def test_unlike_columns_raise_unless_told() -> None:
    def two(columns: Any) -> MixedInput:
        return MixedInput([(Counting(None), 1), (Fewer(None), 1)], batch_size=4, columns=columns)

    with pytest.raises((MissingColumn, SchemaError), match="label"):
        two("error").sample()
    assert set(two("intersect").sample()) == {"t", "obs"}
    filled = two("fill").sample()
    assert filled["label"].tolist() == [0, 0, 0, 0]
    assert filled["t"].tolist() == [0, 1, 0, 1]


def test_every_row_can_carry_the_name_of_its_source() -> None:
    inner = MixedInput({"a": Counting(None), "b": Counting(None)}, batch_size=2, source_column=True)
    reader = MixedInput({"inner": inner, "c": Counting(None)}, batch_size=4, source_column=True)
    batch = reader.sample()
    assert batch["source"].tolist() == ["inner/a", "inner/b", "c", "c"]
    assert batch["source"].dtype == object


def test_a_sample_batch_beside_agents_is_wrapped_for_ever() -> None:
    reader = MixedInput(
        {"one": Counting(None), "many": Agents(None)}, batch_size=4, weights=[3, 1], source_column=True
    )
    first = reader.sample()
    assert isinstance(first, MultiAgentBatch)
    assert set(first.policy_batches) == {"default_policy", "even", "odd"}
    assert first.env_steps() == 4
    assert first.policy_batches["odd"]["source"].tolist() == ["many"]
    alone = reader.sample(1)
    assert isinstance(alone, MultiAgentBatch)
    restored = MixedInput(
        {"one": Counting(None), "many": Agents(None)}, batch_size=4, weights=[3, 1], source_column=True
    )
    restored.load_state_dict(json.loads(json.dumps(reader.state_dict())))
    assert_same(restored.sample(1), reader.sample(1))


# ---- state ----


@pytest.mark.few(1)
@pytest.mark.parametrize("end", ["error", "rewind", "renormalise"])
def test_a_mixture_resumes_before_every_batch_under_every_end(end: Any) -> None:
    def make() -> MixedInput:
        pairs = [(Counting(total, (4, 7), label=i), 1 + i) for i, total in enumerate((13, 26, 39))]
        return MixedInput(pairs, batch_size=6, end=end, source_column=True)

    for n in (None, 1, 5, 17):
        assert_resumes(make, n, batches=12)


@pytest.mark.further
def test_a_mix_of_shuffles_of_mixes_resumes() -> None:
    def make() -> MixedInput:
        inner = mix([5, 1], total=None, batch_size=5)
        return MixedInput(
            {
                "shuffled": ShuffledInput(Counting(40, (4, 7)), 4, seed=1),
                "mixed": ShuffledInput(inner, 3, seed=2),
            },
            weights=[0.3, 0.7],
            batch_size=6,
            end="rewind",
            seed=4,
        )

    for n in (None, 1, 11):
        assert_resumes(make, n, batches=12)


def test_a_mixture_is_restored_whatever_the_order_of_its_sources() -> None:
    """States are stored with sorted keys, and the order of the sources was taken from them."""
    names = ["zebra", "runs/cartpole", "sampler", "a"]

    def make(order: list[str], weights: dict[str, int]) -> MixedInput:
        sources = {name: Counting(None, (4, 7), label=names.index(name)) for name in order}
        return MixedInput(sources, weights=weights, batch_size=6, seed=3)

    weights = {"zebra": 4, "runs/cartpole": 1, "sampler": 2, "a": 1}
    assert_resumes(lambda: make(names, weights), 5)
    state = json.loads(json.dumps(make(names, weights).state_dict(), sort_keys=True))
    # Another mixture, in which the order decides which source goes first.
    with pytest.raises(StateError):
        make(names[::-1], weights).load_state_dict(state)


def test_more_than_ten_sources_without_names_are_restored() -> None:
    """source_10 is sorted before source_2."""
    assert_resumes(lambda: MixedInput([(Counting(None, label=i), 1 + i) for i in range(12)], batch_size=30))


def test_a_mixture_of_which_one_source_was_not_restored_gives_nothing() -> None:
    def make(total: int) -> MixedInput:
        return MixedInput({"b": Counting(None), "a": ShuffledInput(Counting(total), 3, seed=0)}, batch_size=4)

    reader = make(30)
    reader.sample()
    state = reader.state_dict()
    broken = json.loads(json.dumps(state))
    broken["position"]["sources"]["a"]["state"]["position"]["order"] = -1
    with make(30) as restored:
        with pytest.raises(StateError):
            restored.load_state_dict(broken)
        with pytest.raises(StateError):
            restored.sample()
        restored.load_state_dict(state)
        assert_same(restored.sample(), reader.sample())


def test_a_source_rewinds_to_its_own_order_in_a_restored_mixture_too() -> None:
    def make() -> MixedInput:
        shuffled = ShuffledInput(Counting(30, (1,)), 30, seed=None)
        return MixedInput([(shuffled, 1)], batch_size=10, end="rewind")

    reader, restored = make(), make()
    reader.sample()
    restored.load_state_dict(json.loads(json.dumps(reader.state_dict())))
    for _ in range(6):
        assert_same(restored.sample(), reader.sample())


def test_a_mixture_under_a_schedule_resumes() -> None:
    def make() -> MixedInput:
        return MixedInput(
            {"a": Counting(None, label=0), "b": Counting(None, label=1)},
            batch_size=5,
            weights=lambda steps: [1, 1 + steps // 7],
        )

    assert_resumes(make)
    assert_resumes(make, 3)


def test_a_mixture_with_a_live_source_resumes_the_others_exactly() -> None:
    def make() -> MixedInput:
        return MixedInput(
            {"live": Live(None, (10,)), "old": Counting(None, (7,))}, batch_size=5, weights=[0.6, 0.4]
        )

    reader = make()
    assert not reader.replayable
    for _ in range(3):
        reader.sample()
    restored = make()
    restored.load_state_dict(json.loads(json.dumps(reader.state_dict())))
    ours, theirs = reader.sample(), restored.sample()
    assert ours["t"][3:].tolist() == theirs["t"][3:].tolist() == [6, 7]
    assert theirs["t"][:3].tolist() == [10, 11, 12]
    assert restored.dropped == 1
    assert reader.dropped == 0
    assert restored.counts == reader.counts


@pytest.mark.parametrize(
    ("weights", "seed", "key"),
    [([1] * 5, None, "names"), ([1] * 5 + [2], None, "weights"), ([1] * 6, 4, "order")],
)
def test_the_state_of_another_mixture_raises_and_names_the_difference(
    weights: list[int], seed: int | None, key: str
) -> None:
    state = mix([1] * 6).state_dict()
    with pytest.raises(StateError, match=rf"'position'\]\['{key}'\]"):
        mix(weights, seed=seed).load_state_dict(state)


# ---- closing ----


def test_closing_a_mixture_closes_every_source_even_if_one_fails() -> None:
    class Stuck(Counting):
        def _close(self) -> None:
            raise OSError("stuck")

    last = Counting(None)
    reader = MixedInput({"a": Stuck(None), "b": Stuck(None), "c": last}, batch_size=3)
    with pytest.raises(OSError, match="stuck") as caught:
        reader.close()
    assert last.closed == 1
    assert "'a'" in caught.value.__notes__[0]
    assert "'b'" in caught.value.__notes__[1]
