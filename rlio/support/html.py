"""What notebooks show of an object: small HTML in the colours of the page, light or dark.

All text is escaped, because names and values may be those of a stranger's data.

Example:
    >>> shown("<b>me</b>"), "&lt;b&gt;me" in panel("Box", facts([("owner", "<b>me</b>")]))
    ('&lt;b&gt;me&lt;/b&gt;', True)
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from typing import Any, Final

from rlio.support.words import one_line

__all__ = ["Html", "facts", "panel", "pictures", "shown", "table"]

# Characters of a cell, and rows of a table.
_CELL: Final = 200
_ROWS: Final = 60
# No colour and no background: those of the page are inherited.
_BOX: Final = "font-family:sans-serif;font-size:13px;line-height:1.4;color:inherit"
_TABLE: Final = "border-collapse:collapse;margin:4px 0;color:inherit"
_CELLS: Final = "text-align:left;vertical-align:top;padding:1px 12px 1px 0;border:0;font-weight:normal"
_HEAD: Final = f"{_CELLS};border-bottom:1px solid;opacity:0.7"
_PICTURE: Final = "height:96px;image-rendering:pixelated;margin:4px 4px 0 0;vertical-align:top"


class Html(str):
    """Text that is markup. Made here alone; all other text is escaped."""

    __slots__ = ()


def shown(value: object) -> Html:
    """A value as escaped text, which is cut if it is long; markup stays as it is."""
    if isinstance(value, Html):
        return value
    return Html(html.escape(one_line(str(value), _CELL)))


def panel(title: object, *parts: Html) -> str:
    """A box with a title."""
    return f'<div style="{_BOX}"><strong>{shown(title)}</strong>{"".join(parts)}</div>'


def facts(found: Iterable[tuple[object, object]]) -> Html:
    """Names, each beside its value."""
    rows = "".join(_row("td", _CELLS, (_faint(name), value)) for name, value in found)
    return Html(f'<table style="{_TABLE}"><tbody>{rows}</tbody></table>' if rows else "")


def lines(found: Iterable[object]) -> Html:
    """Texts, each on a line of its own."""
    return Html("".join(f"<div>{shown(line)}</div>" for line in found))


def table(heads: Sequence[object], found: Iterable[Sequence[object]]) -> Html:
    """Rows below their heads; of many rows, the first, and how many there are more."""
    rows = list(found)
    if not rows:
        return Html("")
    body = "".join(_row("td", _CELLS, row) for row in rows[:_ROWS])
    if len(rows) > _ROWS:
        body += f'<tr><td style="{_CELLS}" colspan="{len(heads)}">and {len(rows) - _ROWS} more</td></tr>'
    head = _row("th", _HEAD, heads)
    return Html(f'<table style="{_TABLE}"><thead>{head}</thead><tbody>{body}</tbody></table>')


def pictures(files: Iterable[tuple[bytes, object]]) -> Html:
    """PNG files in a row, each with a text that is shown for it."""
    made = (
        f'<img style="{_PICTURE}" src="data:image/png;base64,{base64.b64encode(file).decode()}" '
        f'alt="{shown(text)}" title="{shown(text)}">'
        for file, text in files
    )
    return Html(f"<div>{''.join(made)}</div>")


def _faint(value: object) -> Html:
    return Html(f'<span style="opacity:0.7">{shown(value)}</span>')


def _row(tag: str, style: str, cells: Iterable[Any]) -> str:
    return "<tr>" + "".join(f'<{tag} style="{style}">{shown(cell)}</{tag}>' for cell in cells) + "</tr>"
