"""The pages: README.md and docs/*.md, the blocks of code in them, and running these in order in a folder."""

from __future__ import annotations

import contextlib
import re
import runpy
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from typer.testing import CliRunner

from rlio.cli import main as cli

#: Languages of blocks that can run. Others show data: JSON, a folder, a formula.
RUNNABLE: Final = frozenset({"bash", "console", "python", "sql"})

_BLOCK: Final = re.compile(
    r"^(?:<!-- (?P<mark>not run|run by)(?P<why>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_FILE: Final = re.compile(r"# (\w+\.py)\b")


class Block(NamedTuple):
    """A block of code of a page.

    Attributes:
        language: What is written behind the backticks.
        code: Its text.
        mark: "not run" or "run by", from the HTML comment before it; None: it runs with its page.
        why: What the comment says: a reason, or test files.
        line: Where it begins.
    """

    language: str
    code: str
    mark: str | None
    why: str
    line: int


def pages(checkout: Path) -> list[Path]:
    """README.md and the pages of docs."""
    return [checkout / "README.md", *sorted((checkout / "docs").glob("*.md"))]


def blocks_of(page: Path) -> Iterator[Block]:
    """All blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("code"))
        why = (found["why"] or "").strip(" :")
        yield Block(found["language"], found["code"], found["mark"], why, line)


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return [block.code for block in blocks_of(page) if block.language == language]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Small networks learn several times faster with one thread, where other tests use the processors too."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run_page(
    page: Path,
    folder: Path,
    *,
    fewer: Mapping[str, str] | None = None,
    given: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run the blocks of a page that have no mark, one after the other, in a folder.

    Python that begins with the name of a file, ``# train.py``, becomes that file. Of shells, each line that
    begins with ``$`` is run; it must end with exit code 0.

    Args:
        page: The page.
        folder: The current folder meanwhile.
        fewer: Text of blocks -> what stands in its place, to do less.
        given: Names that the page takes for granted.

    Returns:
        The names that the blocks defined, and ``sql``, the answers to queries.
    """
    scope: dict[str, Any] = {"__name__": "page", **(given or {})}
    left = dict(fewer or {})
    with contextlib.chdir(folder), one_thread():
        for block in blocks_of(page):
            if block.mark is None and block.language in RUNNABLE:
                code = block.code
                for text in [text for text in left if text in code]:
                    code = code.replace(text, left.pop(text))
                _run(block._replace(code=code), f"{page.name}:{block.line}", scope)
    assert not left, f"{page.name} does not say {list(left)}"
    return scope


def _run(block: Block, place: str, scope: dict[str, Any]) -> None:
    if block.language == "python" and (file := _FILE.match(block.code)):
        Path(file[1]).write_text(block.code, encoding="utf-8")
    elif block.language == "python":
        # Lines in errors are those of the page.
        exec(compile("\n" * (block.line - 1) + block.code, place, "exec"), scope)
    elif block.language == "sql":
        import duckdb

        with duckdb.connect() as connection:
            answer = connection.sql(block.code)
            scope["sql"] = [*scope.get("sql", []), None if answer is None else answer.fetchall()]
    elif block.language == "console":
        for command in commands_of(block.code):
            run_command(command, place)
    else:
        raise AssertionError(f"{place}: nothing here runs {block.language}")


def commands_of(code: str) -> list[list[str]]:
    """The commands of a console block, as lists of words."""
    lines = (line[2:] for line in code.splitlines() if line.startswith("$ "))
    return [shlex.split(line, comments=True) for line in lines]


def run_command(command: Sequence[str], place: str) -> str:
    """Run ``rlio ...`` or ``python FILE ...`` in this process; give what it printed."""
    program, *arguments = command
    if program == "python":
        saved = sys.argv
        sys.argv = list(arguments)
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        finally:
            sys.argv = saved
        return ""
    assert program == "rlio", f"{place}: nothing here runs {program}"
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, f"{place}: {' '.join(command)}: {done.exit_code}\n{done.output}"
    return done.output
