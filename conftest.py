"""What holds for every test and every doctest of the checkout."""

import os
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

# One thread a process: test processes with as many torch threads each would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Shared machines pause at will, so no deadline; few examples, so that all laws run in seconds; the same ones
# in every run, so that a failure is of the change. HYPOTHESIS_PROFILE=thorough looks further, at random.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=20, derandomize=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path,
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for examples in the modules that have a prompt: elsewhere a search of each object finds none.

    The search of all modules takes each test process 2 s.
    """
    found = yield
    if file_path.suffix != ".py" or b">>> " in file_path.read_bytes():
        return found
    # Doctest's collector is a kind of `pytest.Module`.
    return [one for one in found if type(one) is pytest.Module]


@pytest.fixture(autouse=True)
def _doctests_write_elsewhere(request: pytest.FixtureRequest) -> None:
    """Run doctests in a fresh folder: examples write to relative paths, as users would."""
    if isinstance(request.node, pytest.DoctestItem):
        folder = request.getfixturevalue("tmp_path_factory").mktemp("doctest")
        request.getfixturevalue("monkeypatch").chdir(folder)
