"""`normalised_score`: D4RL's scale."""

from __future__ import annotations

import numpy as np
import pytest

import rlio
from rlio.errors import OptionError


def test_a_random_policy_has_0_and_an_expert_100() -> None:
    score = rlio.evaluation.normalised_score
    assert score([[-20.0], [180.0], [80.0]], reference=(-20, 180)).tolist() == [[0.0], [100.0], [50.0]]
    assert float(score(30.0, reference={"ref_min_score": 10, "ref_max_score": 20.0})) == 200.0
    assert rlio.evaluation.normalized_score is score


def test_a_reference_without_two_ordered_numbers_is_refused() -> None:
    for wrong in ((1, 1), (2, 1), (0,), (0, 1, 2), (0, np.inf), {"ref_min_score": 1}, None, "ab"):
        with pytest.raises(OptionError):
            rlio.evaluation.normalised_score([1.0], reference=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("reference", ["19", b"19", {0, 5}])
def test_a_reference_without_an_order_or_of_digits_is_refused(reference) -> None:
    with pytest.raises(OptionError):
        rlio.evaluation.normalised_score([1.0], reference=reference)
