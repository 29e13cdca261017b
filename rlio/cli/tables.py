"""Output of commands: tables on standard output, progress bars on standard error, and plots.

Tables are never cut: they take their full width in a pipe, and become lines on a narrow terminal.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlio.errors import MissingExtra, OptionError, excerpt
from rlio.support.extras import needs

if TYPE_CHECKING:
    from rlio.support.progress import Progress, Work

__all__ = ["check_plot", "missing_plots", "new_plot", "print_table", "progress_bar", "progress_of", "waiting"]

#: Work that takes no longer shows no progress.
_QUIET_SECONDS = 1.0
#: A width in characters that no table reaches.
_UNBOUNDED = 100_000


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose first column names its rows.

    In a pipe or a file the table has its full width, because cut text would be lost. On a terminal that is
    too narrow, each row becomes a line of "heading value" pairs, which the terminal wraps.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title))
    for number, heading in enumerate(headings):
        table.add_column(escape(heading), justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console(highlight=False)
    width = console.measure(table, options=console.options.update_width(_UNBOUNDED)).maximum
    if width <= console.width or not console.is_terminal:
        console.width = width
        console.print(table)
        return
    console.print(escape(title), style="italic", soft_wrap=True)
    for name, *values in rows:
        pairs = [f"{heading} {value}" for heading, value in zip(headings[1:], values, strict=True) if value]
        console.print(escape(f"{name}: {', '.join(pairs)}"), soft_wrap=True)


@contextmanager
def progress_bar(name: str, total: int | None, **options: Any) -> Iterator[Callable[[int], Any]]:
    """Show a bar with rate and remaining time on standard error; yields the function that advances it.

    It appears after a second, and only if standard error is a terminal.

    Args:
        name: Label of the bar.
        total: Units of work; None: not known, then there is no remaining time.
        options: Options of tqdm.
    """
    with _new_bar(name, total, **options) as bar:
        yield bar.update


def _new_bar(name: str, total: int | None, **options: Any) -> Any:
    from tqdm import tqdm

    usual = {"disable": None, "leave": False, "delay": _QUIET_SECONDS, "unit_scale": True}
    return tqdm(total=total, desc=name, **{**usual, **options})


@contextmanager
def waiting(name: str) -> Iterator[None]:
    """Show how far work is that `watched` sees, where and when `progress_bar` shows a bar.

    While its size is not known, the seconds are shown that it takes.
    """
    from rlio.support.progress import watched

    if not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()
    seconds = {"bar_format": "{desc}: {elapsed}", "miniters": 0, "unit": ""}
    with watched() as work, _new_bar(name, None, **seconds) as bar:
        thread = threading.Thread(target=_show, args=(bar, work, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _show(bar: Any, work: Work, ended: threading.Event) -> None:
    """Bring a bar of tqdm to where the work is, until it has ended."""
    while not ended.wait(_QUIET_SECONDS / 2):
        if work.total:
            bar.bar_format, bar.total = None, work.total
        bar.update(work.done - bar.n)


def progress_of(*, as_json: bool, unit: str = "it") -> Progress:
    """How a command shows its progress: by `progress_bar`; not at all with ``--json``.

    Args:
        as_json: Whether ``--json`` was given.
        unit: What is counted.
    """
    from rlio.support.progress import silent

    return silent if as_json else partial(progress_bar, unit=unit)


def new_plot(*, width: float) -> tuple[Any, Any]:
    """Return a figure ``width`` by 4 inches that needs no display, and its axes.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    with needs("matplotlib", "plot"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def missing_plots() -> str | None:
    """Why `new_plot` would fail, with the pip line; None if it works. Ask before the work that is plotted."""
    try:
        new_plot(width=1)
    except MissingExtra as error:
        return str(error)
    return None


def check_plot(path: Path) -> None:
    """Check that a plot can be saved as ``path``, before the work that is plotted.

    Raises:
        MissingExtra: matplotlib is not installed.
        OptionError: The extension names no known format, or the folder cannot be written to.
    """
    known = new_plot(width=1)[0].canvas.get_supported_filetypes()
    ending = path.suffix.removeprefix(".").lower()
    if ending and ending not in known:
        why = f"expected one of the endings {', '.join(f'.{name}' for name in sorted(known))}"
    elif path.is_dir():
        why = "it is a folder: name a file in it"
    elif not path.parent.is_dir():
        why = f"there is no folder {excerpt(str(path.parent))}: make it first"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "it cannot be written: name another file"
    else:
        return
    raise OptionError(f"--plot {excerpt(str(path))}: {why}")
