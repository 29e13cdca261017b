"""RLlib's runners call callbacks as `tests/golden/rllib_callbacks/calls.json` says, which RLlib wrote."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.rllib", reason="ray[rllib] is not installed")
pytest.importorskip("torch", reason="torch is not installed")

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from callback_calls import GOLDEN, SCENARIOS, golden  # noqa: E402

# RLlib uses what others have deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")

CALLS: Any = runpy.run_path(str(GOLDEN.with_name("make.py")))["calls_of"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_rllib_calls_callbacks_as_the_golden_list_says(name: str) -> None:
    assert CALLS(SCENARIOS[name]) == golden()[name]
