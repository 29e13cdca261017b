"""Fixtures for more than one test file."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The repository's top folder."""
    return ROOT


@pytest.fixture(scope="session")
def recordings() -> Path:
    """Folder of real RLlib recordings beside the checkout; tests that need it are skipped without it."""
    folder = ROOT.parent / "shared" / "data" / "rllib"
    if not folder.is_dir():
        pytest.skip("the RLlib recordings are not beside this checkout (../shared/data/rllib)")
    return folder
