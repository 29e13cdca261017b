"""Tables of commands can be read in full: in a pipe, and on a terminal of any width."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import rlio

fcntl = pytest.importorskip("fcntl", reason="no terminals to make")
pty = pytest.importorskip("pty", reason="no terminals to make")
termios = pytest.importorskip("termios", reason="no terminals to make")

TITLE = "rows [by] writer"
HEADINGS = ["writer", "end", "trimmed", "missing", "damaged", "live", "waiting", "shards", "sealed"]
ROWS = [
    ["w00000-0a1b2c3d-of-a-job-with-a-long-name", *(f"{7 * 10**9 + n:,}" for n in range(7)), ""],
    ["total", *(f"{8 * 10**9 + n:,}" for n in range(7)), "9,123,456,789"],
]
COMMAND = [
    sys.executable,
    "-c",
    f"from rlio.cli.tables import print_table; print_table({TITLE!r}, {HEADINGS!r}, {ROWS!r})",
]
ENVIRONMENT = {
    **{name: text for name, text in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR", "NO_COLOR")},
    "PYTHONPATH": str(Path(rlio.__file__).parents[1]),
    "TERM": "xterm",
}


def in_a_pipe() -> str:
    return subprocess.run(COMMAND, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout


def on_a_terminal(columns: int) -> str:
    """What a terminal of that width is sent, without its escape sequences."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with subprocess.Popen(COMMAND, env=ENVIRONMENT, stdin=theirs, stdout=theirs, stderr=theirs) as child:
        os.close(theirs)
        sent = b""
        while True:
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # Linux says so that nobody writes any more.
                break
            if not piece:
                break
            sent += piece
    os.close(ours)
    assert child.returncode == 0, sent
    return re.sub(r"\x1b\[[0-9;]*m", "", sent.decode())


def assert_full(text: str) -> None:
    assert TITLE in text
    assert "…" not in text
    for words in (HEADINGS[1:], *ROWS):
        for word in words:
            assert word in text


def test_in_a_pipe_a_table_is_as_wide_as_it_must_be_and_a_row_is_a_line() -> None:
    text = in_a_pipe()
    assert_full(text)
    for row in ROWS:
        (line,) = [line for line in text.splitlines() if row[0] in line]
        assert [cell.strip() for cell in line.split("│")[1:-1]] == row


@pytest.mark.few(1)
@pytest.mark.parametrize("columns", [20, 80])
def test_on_a_narrow_terminal_every_heading_and_number_is_there(columns: int) -> None:
    text = on_a_terminal(columns)
    assert_full(text)
    # Each number stands with what it is, and a row is a line that the terminal breaks.
    assert f"{ROWS[1][0]}: end 8,000,000,000, trimmed 8,000,000,001" in text
    assert text.count("sealed") == 1  # What is empty is left out.


def test_on_a_wide_terminal_it_is_a_table() -> None:
    text = on_a_terminal(220)
    assert_full(text)
    assert text.count("│") >= 2 * (len(HEADINGS) + 1)
