"""What a run found, shown: tables on the terminal, tables in a page, a plot.

A page has pairs of comments, ``<!-- goals -->`` and ``<!-- /goals -->``, and what is between them is written
here. The names are ``machine``, ``goals`` and those of the parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import Figure, Line, Run, Section

__all__ = ["markdown", "plot", "replace_blocks", "show", "table", "update_page"]

_BLOCK = re.compile(r"(<!-- (?P<name>[\w-]+) -->\n)(?P<text>.*?)(<!-- /(?P=name) -->)", re.DOTALL)
# Spread of the rounds from which on a figure is marked as unsteady.
_UNSTEADY = 0.1
# Facts of a part that are shown in one line; more are a table.
_FACTS_OF_A_LINE = 8
# Of tables that go to a file or pipe.
_WIDTH = 130


def show(run: Run) -> None:
    """Print every figure, then the one table of goals."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    for section in run.sections:
        figures = Table(title=section.title, title_justify="left", title_style="bold")
        for number, heading in enumerate(_headings(section)):
            figures.add_column(heading, justify="left" if number < 2 else "right")
        for row in _figure_rows(section):
            figures.add_row(*row)
        console.print(figures if section.figures else section.title)
        for title, rows in section.tables.items():
            headings, cells = _counts(rows)
            counts = Table(*headings, title=title, title_justify="left")
            for each in cells:
                counts.add_row(*each)
            console.print(counts)
        for text in _footnotes(section):
            console.print(text, style="dim")
    goals = Table(title="rlio beside the others", title_justify="left", title_style="bold")
    for heading, justify in zip(_LINE_HEADINGS, ("left", "left", "right", "right", "left"), strict=True):
        goals.add_column(heading, justify=justify)  # type: ignore[arg-type]  # One of rich's literals.
    for line in run.lines:
        style = {"missed": "red", "not measured": "yellow"}.get(line.verdict)
        goals.add_row(*_line_row(line), style=style)
    console.print(goals)


def update_page(page: Path, run: Run) -> None:
    """Write the tables into a page, between its comments; parts that were not run keep what they have.

    Raises:
        ValueError: The page has no place for a table that was asked for.
    """
    replace_blocks(page, markdown(run))


def replace_blocks(page: Path, blocks: Mapping[str, str]) -> None:
    """Write texts into a page, between the comments of their names.

    Raises:
        ValueError: The page has no place for one of them.
    """
    text = page.read_text(encoding="utf-8")
    places = {match["name"] for match in _BLOCK.finditer(text)}
    if missing := [name for name in blocks if name not in places]:
        raise ValueError(
            f"{page} has no place for {', '.join(missing)}: put '<!-- name -->' and '<!-- /name -->' there"
        )

    def replace(match: re.Match[str]) -> str:
        return match[1] + blocks.get(match["name"], match["text"]) + match[4]

    page.write_text(_BLOCK.sub(replace, text), encoding="utf-8")


def markdown(run: Run) -> dict[str, str]:
    """The tables as Markdown, by the names of their places in a page.

    Of some parts only (``--only``), each has its goals and the machine with it: the page's are of other runs.
    """
    some = run.options.get("only", False)
    blocks = {} if some else {"machine": _machine(run), "goals": _goals(run.lines)}
    for section in run.sections:
        if section.part == "growth":
            text = _growth_table(section)
        else:
            headings = _headings(section)
            figures = _figure_rows(section)
            text = table(headings, figures, "ll" + "r" * (len(headings) - 2)) if figures else ""
        counts = (f"{title.capitalize()}:\n\n{_counts_table(rows)}" for title, rows in section.tables.items())
        text = "\n".join(filter(None, (text, *counts)))
        notes = "".join(f"\n{text}\n" for text in _footnotes(section))
        about = f"\n{_goals(section.lines)}\n{_machine(run)}" if some else ""
        blocks[section.part] = f"**{section.title}**\n\n{text}{notes}{about}"
    return blocks


# ---- rows of tables ----

_LINE_HEADINGS = ("work", "beside", "measured", "goal", "verdict")


def _goals(lines: Sequence[Line]) -> str:
    return table(_LINE_HEADINGS, [_line_row(line) for line in lines], "llrrl")


def _headings(section: Section) -> tuple[str, ...]:
    middle = ("rows/s", "ns a row") if section.unit == "row" else ("seconds",)
    return ("what", "who", *middle, "rounds ±")


def _figure_rows(section: Section) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for figure in section.figures:
        what = figure.case if figure.at is None else f"{figure.case}, {figure.at:,.0f}"
        spread = f"{100 * figure.spread:.0f} %" + (" !" if figure.spread > _UNSTEADY else "")
        values = [_number(figure.median)]
        if section.unit == "row":
            values = [_number(figure.rate), _number(1e9 * figure.median)]
        rows.append((what, figure.name, *values, spread))
    return rows


def _counts(rows: Mapping[str, Mapping[str, float]]) -> tuple[list[str], list[list[str]]]:
    """The headings and cells of a table: a row for each "what", a column for each "which"."""
    kinds = list(dict.fromkeys(which for row in rows.values() for which in row))
    cells = [
        [what, *(_number(row[which]) if which in row else "" for which in kinds)]
        for what, row in rows.items()
    ]
    return ["what", *kinds], cells


def _counts_table(rows: Mapping[str, Mapping[str, float]]) -> str:
    headings, cells = _counts(rows)
    return table(headings, cells, "l" + "r" * (len(headings) - 1))


def _line_row(line: Line) -> tuple[str, ...]:
    value = "" if line.value is None else _quantity(line.value, line.unit)
    goal = "" if line.goal is None else f"{line.sense} {_quantity(line.goal, line.unit)}"
    return line.work, line.beside, value, goal, line.verdict


def _footnotes(section: Section) -> list[str]:
    notes = []
    if len(section.facts) > _FACTS_OF_A_LINE:
        notes.append(_fact_table(section.facts))
    elif section.facts:
        notes.append("; ".join(f"{name}: {_number(value)}" for name, value in section.facts.items()))
    notes += [f"{name} did not run: {why}." for name, why in section.absent.items()]
    return notes


def _fact_table(facts: Mapping[str, float]) -> str:
    """Of the names "what: which"."""
    rows: dict[str, dict[str, float]] = {}
    for name, value in facts.items():
        what, _, which = name.rpartition(": ")
        rows.setdefault(what, {})[which] = value
    return _counts_table(rows).rstrip()


def _growth_table(section: Section) -> str:
    """One row a point, one column a contender, in microseconds a batch."""
    from benchmarks.parts.growth import SIZE

    names = list(dict.fromkeys(figure.name for figure in section.figures))
    points: dict[tuple[str, float], dict[str, Figure]] = {}
    for figure in section.figures:
        points.setdefault((figure.case, figure.at or 0), {})[figure.name] = figure
    rows = []
    for (axis, at), found in points.items():
        size = at if axis == "batch size" else SIZE
        cells = (_number(1e6 * size * found[name].median) if name in found else "" for name in names)
        rows.append((axis, f"{at:,.0f}", *cells))
    return table(("what grows", "to", *(f"{name}, us" for name in names)), rows, "lr" + "r" * len(names))


def _machine(run: Run) -> str:
    machine = run.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    load = ", ".join(str(value) for value in machine["load_average_at_start"])
    return (
        f"Measured {machine['date']} on {machine['cpu']}, {machine['cores']} cores "
        f"({machine['caches'] or 'caches unknown'}), {machine['memory_gib']} GiB of memory that one thread "
        f"copies at {machine['copy_gb_per_s']} GB/s; {machine['system']}, Python {machine['python']}; "
        f"{versions}. Load average at the start: {load}. Rounds: {run.options['rounds']}.\n"
    )


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """A table in Markdown; ``align`` has one of "l" and "r" for each column."""
    rule = ["---:" if each == "r" else "---" for each in align]
    lines = [headings, rule, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _quantity(value: float, unit: str) -> str:
    if unit == "x":
        return f"{value:.2f}x" if value < 10 else f"{value:.0f}x"
    return f"{_number(value)} {unit}"


def _number(value: float) -> str:
    """Three digits or more, as a reader can say them."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


# ---- plot ----


def plot(run: Run, path: Path) -> None:
    """Draw what was measured of random batches and of growth; ``path`` says the format.

    Raises:
        ImportError: matplotlib, extra ``plot``, is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn = [(_draw_bars, section, case) for section, case in _bar_cases(run)]
    drawn += [
        (_draw_curve, section, axis)
        for section in run.sections
        if section.part == "growth"
        for axis in dict.fromkeys(figure.case for figure in section.figures)
    ]
    if not drawn:
        raise ValueError("the run has nothing to plot: it needs batches, images, priorities or growth")
    rows = -(-len(drawn) // 2)
    figure, axes = plt.subplots(rows, 2, figsize=(13, 3.6 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(drawn) :]:
        axis.set_visible(False)
    for axis, (draw, section, case) in zip(axes.flat, drawn, strict=False):
        draw(axis, section, case)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bar_cases(run: Run) -> list[tuple[Section, str]]:
    return [
        (section, case)
        for section in run.sections
        if section.part in ("batches", "images", "priorities")
        for case in dict.fromkeys(figure.case for figure in section.figures)
    ]


def _draw_bars(axis: Any, section: Section, case: str) -> None:
    from matplotlib.ticker import NullFormatter

    figures = sorted((each for each in section.figures if each.case == case), key=lambda each: -each.median)
    colours = [_colour(figure.name) for figure in figures]
    axis.barh([figure.name for figure in figures], [figure.rate for figure in figures], color=colours)
    axis.set_xscale("log")
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("rows a second")
    axis.set_title(f"{section.part}, {case}")


def _draw_curve(axis: Any, section: Section, case: str) -> None:
    from matplotlib.ticker import NullFormatter

    from benchmarks.parts.growth import SIZE

    per_batch: Callable[[Figure], float] = lambda each: SIZE if case != "batch size" else float(each.at or 1)  # noqa: E731
    for name in dict.fromkeys(figure.name for figure in section.figures):
        points = [each for each in section.figures if (each.case, each.name) == (case, name)]
        axis.plot(
            [each.at for each in points],
            [1e6 * each.median * per_batch(each) for each in points],
            marker="o",
            label=name,
            color=_colour(name),
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel(case)
    axis.set_ylabel("us a batch")
    axis.legend(fontsize="small", framealpha=0.5)


def _colour(name: str) -> str:
    if name.startswith("rlio"):
        return "tab:blue"
    if name.startswith("bound"):
        return "tab:grey"
    return {"cpprb": "tab:orange", "TorchRL": "tab:red"}.get(name.split(",")[0], "tab:green")
