"""Limits on how often rows are drawn: what they allow, and that one side can always go on."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pytest
from further import further
from hypothesis import given
from hypothesis import strategies as st

from rlio import SamplesPerInsert
from rlio.errors import LedgerError, OptionError
from rlio.following.samples_per_insert import NO_BOUND, Account


def test_limits_are_those_of_the_formulas() -> None:
    limits = SamplesPerInsert(min=2, max=4, error_buffer=100, min_size=1000)
    assert limits.most_drawn(999) == 0
    assert limits.most_drawn(1000) == 100
    assert limits.most_drawn(1500) == 4 * 500 + 100
    assert limits.most_inserted(0) == 1000 + 50
    assert limits.most_inserted(700) == 1000 + 400


def test_without_limits_nobody_waits_but_for_the_least_size() -> None:
    account = Account(SamplesPerInsert(min_size=10))
    assert account.may_insert == NO_BOUND
    assert account.may_draw == 0
    account.insert(10)
    assert account.may_draw == NO_BOUND


def test_a_tenth_is_a_tenth() -> None:
    assert SamplesPerInsert(min=0.1).most_inserted(100) == 1 + 1000
    assert SamplesPerInsert(max=0.1).most_drawn(1001) == 100


@pytest.mark.few(1)
@pytest.mark.parametrize("least", [0.5, 8, *further(1, 2)])
def test_equal_limits_are_those_of_reverb(least: float) -> None:
    """Its table inserts while inserts * spi - samples <= spi * min_size + buffer, and samples while >= ..."""
    ours = SamplesPerInsert(min=least, max=least, error_buffer=300, min_size=50)
    ratio = Fraction(least)
    for drawn in range(0, 3000, 7):
        for inserted in range(50, 600, 13):
            difference = inserted * ratio - drawn
            assert (drawn <= ours.most_drawn(inserted)) == (difference >= ratio * 50 - 300)
            assert (inserted <= ours.most_inserted(drawn)) == (difference <= ratio * 50 + 300)


@pytest.mark.parametrize(
    "wrong",
    [
        {"min": 0},
        {"max": -1},
        {"min": 3, "max": 2},
        {"max": float("nan")},
        {"max": True},
        {"max": "4"},
        {"error_buffer": -1},
        {"error_buffer": 1.5},
        {"error_buffer": NO_BOUND},
        {"min_size": 0},
        {"min_size": NO_BOUND},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        SamplesPerInsert(**wrong)


def test_an_account_refuses_to_be_overdrawn() -> None:
    account = Account(SamplesPerInsert(min=1, max=1, error_buffer=5, min_size=10))
    with pytest.raises(LedgerError):
        account.insert(16)
    account.insert(15)
    with pytest.raises(LedgerError):
        account.draw(11)
    account.draw(10)
    assert (account.may_draw, account.may_insert) == (0, 10)


ratios = st.floats(0.01, 50).map(lambda ratio: round(ratio, 3))


@given(
    least=ratios,
    width=st.sampled_from([1, 1, 1.01, 2]),
    batch=st.integers(1, 300),
    min_size=st.integers(1, 200),
    seed=st.integers(0, 1000),
)
def test_within_limits_that_are_accepted_one_side_can_always_go_on(
    least: float, width: float, batch: int, min_size: int, seed: int
) -> None:
    """Rows come one at a time, draws by batches; and the least buffer that a refusal names is accepted."""
    most = least * width
    needed = 0
    try:
        SamplesPerInsert(min=least, max=most, error_buffer=0, min_size=min_size).check_batch(batch)
    except OptionError as error:
        needed = int(str(error).rpartition("error_buffer=")[2].split()[0])
    limits = SamplesPerInsert(min=least, max=most, error_buffer=needed, min_size=min_size)
    limits.check_batch(batch)
    account, order = Account(limits), random.Random(seed)
    for _ in range(200):
        sides = [account.may_insert > 0, account.may_draw >= batch]
        assert any(sides)
        if sides[0] and (not sides[1] or order.random() < 0.5):
            account.insert(order.randint(1, min(account.may_insert, 50)))
        else:
            account.draw(batch)
        assert account.drawn <= limits.most_drawn(account.inserted)
        assert account.inserted <= limits.most_inserted(account.drawn)
