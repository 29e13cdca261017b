"""A test run ends, whatever a test does to its process: see after_crash.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.further

TESTS = """
import os, signal
import pytest

@pytest.mark.parametrize("n", range(12))
def test_alone(n):
    if n == 6:
        os._exit(3)

@pytest.mark.xdist_group("group")
@pytest.mark.parametrize("n", range(4))
def test_together(n):
    if n == 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        signal.pause()
"""

CONFTEST = """
from after_crash import EachOnce

def pytest_xdist_make_scheduler(config, log):
    return EachOnce(config, log)
"""


def test_a_test_that_ends_its_process_or_hangs_in_it_fails_once_and_the_others_are_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_them.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    options = ["-o", "timeout=2", "-o", "faulthandler_timeout=4", "-o", "faulthandler_exit_on_timeout=true"]
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "2",
            "--dist",
            "loadgroup",
            "-p",
            "no:cacheprovider",
            *options,
        ],
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    said = run.stdout + run.stderr
    assert "2 failed, 14 passed" in said, said
    assert "test_them.py::test_alone[6]" in said
    assert "test_them.py::test_together[1]@group" in said
