"""What holds for every test and every doctest of the checkout."""

import os

import hypothesis
import pytest

# One thread a process: test processes with as many torch threads each would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Shared machines pause at will, so no deadline; few examples, so that all laws run in seconds.
# HYPOTHESIS_PROFILE=thorough looks further.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=20)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(autouse=True)
def _doctests_write_elsewhere(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run doctests in a fresh folder: examples write to relative paths, as users would."""
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.chdir(tmp_path_factory.mktemp("doctest"))
