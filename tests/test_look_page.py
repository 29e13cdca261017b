"""docs/look.md shows what its blocks print. ``python tests/test_look_page.py`` writes it."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pages
import pytest

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "look.md"
#: What differs from run to run, or between versions of libraries.
VARIES: Final = {
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC": "2026-11-28 12:00:00 UTC",
    r"[\d.,]+ [KM]iB": "100 KiB",
}
_SHOWN: Final = re.compile(
    r"(^```(?:python|console)\n.*?^```\n)(?:\n```\n.*?^```\n)?", re.MULTILINE | re.DOTALL
)


def outputs(folder: Path) -> Iterator[str]:
    """What each block prints, in order, run in ``folder``."""
    scope: dict[str, Any] = {"__name__": "page"}
    with contextlib.chdir(folder), pages.one_thread():
        for block in pages.blocks_of(PAGE):
            if block.language == "python":
                with contextlib.redirect_stdout(io.StringIO()) as printed:
                    exec(compile(block.code, f"{PAGE.name}:{block.line}", "exec"), scope)
                text = printed.getvalue()
            elif block.language == "console":
                text = "".join(pages.run_command(one, PAGE.name) for one in pages.commands_of(block.code))
            else:
                continue
            for pattern, constant in VARIES.items():
                text = re.sub(pattern, constant, text)
            yield "\n".join(line.rstrip() for line in text.replace(f"{folder}/", "").splitlines())


def written(folder: Path) -> str:
    """The page with these outputs."""
    found = outputs(folder)

    def shown(block: re.Match[str]) -> str:
        text = next(found)
        return block[1] + (f"\n```\n{text}\n```\n" if text else "")

    return _SHOWN.sub(shown, PAGE.read_text(encoding="utf-8"))


@pytest.mark.further
def test_the_page_shows_what_its_blocks_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    assert written(tmp_path) == PAGE.read_text(encoding="utf-8"), "python tests/test_look_page.py writes it"


def test_it_has_eight_lines_of_python_four_commands_and_five_formats() -> None:
    python = pages.blocks(PAGE, "python")
    assert len(python[1].splitlines()) == 8
    assert len([line for block in pages.blocks(PAGE, "console") for line in pages.commands_of(block)]) == 4
    assert len(re.findall(r'"(?:runs|downloads)/[\w-]+"', python[-1])) == 5


if __name__ == "__main__":
    os.environ["COLUMNS"] = "110"
    with tempfile.TemporaryDirectory() as name:
        os.environ["RLIO_CACHE"] = f"{name}/cache"
        os.makedirs(root := f"{name}/page")
        PAGE.write_text(written(Path(root)), encoding="utf-8")
