"""docs/convert.md: its tables are those of the registry and of the report. `python` this file writes them."""

from __future__ import annotations

import re
from pathlib import Path

from rlio.conversion.report import KINDS
from rlio.formats.format import LOSSES, formats


def format_table() -> str:
    lines = ["| name | format | read | written | lost in writing |", "|---|---|---|---|---|"]
    for format in formats():
        if format.is_read or format.writer:
            lost = ", ".join(f"`{name}`" for name in LOSSES if name in format.loses)
            lost = lost or ("nothing" if format.writer else "")
            read, written = ("yes" if able else "" for able in (format.is_read, format.writer))
            what = f"{format.title}. {format.about}".strip()
            lines.append(f"| `{format.name}` | {what} | {read} | {written} | {lost} |")
    return "\n".join(lines)


def loss_table() -> str:
    lines = ["| lost | what does not come back |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {text} |" for name, text in LOSSES.items())])


def kind_table() -> str:
    lines = ["| finding | counts | what it says |", "|---|---|---|"]
    for kind, (unit, sentence, suspicion) in KINDS.items():
        mark = "Suspicion. " if suspicion else ""
        lines.append(f"| `{kind}` | {unit} | {mark}{sentence or 'What the source says of its data.'} |")
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """The page, each table between its marks made new."""
    for name, table in (("formats", format_table()), ("lost", loss_table()), ("findings", kind_table())):
        mark = f"<!-- {name} -->"
        page, made = re.subn(f"{mark}.*?{mark}", lambda _: f"{mark}\n{table}\n{mark}", page, flags=re.DOTALL)  # noqa: B023 - called here
        assert made == 1, name
    return page


def test_the_page_has_the_tables_of_the_registry_and_of_the_report(checkout: Path) -> None:
    page = (checkout / "docs/convert.md").read_text(encoding="utf-8")
    assert with_tables(page) == page, "run  python tests/test_convert_page.py"


if __name__ == "__main__":
    place = Path(__file__).resolve().parents[1] / "docs/convert.md"
    place.write_text(with_tables(place.read_text(encoding="utf-8")), encoding="utf-8")
