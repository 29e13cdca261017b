"""Dates and times of Python, as texts that give them back.

Example:
    >>> import datetime
    >>> text_of(datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC))
    '2026-01-31T12:00:00+00:00'
    >>> time_of("2026-01-31", "date")
    datetime.date(2026, 1, 31)
"""

from __future__ import annotations

import datetime
from typing import Any, Final, Literal, TypeAlias, get_args

__all__ = ["TIME_FORMS", "TimeForm", "form_of", "text_of", "time_of"]

#: ``datetime``: one without a zone; ``utc``: a datetime in `datetime.UTC`; ``date``: that.
TimeForm: TypeAlias = Literal["datetime", "utc", "date"]
TIME_FORMS: Final = get_args(TimeForm)


def form_of(value: Any) -> TimeForm | None:
    """The form of a value; None: it has another zone, is of a subclass (of pandas), or is no time."""
    kind = type(value)
    if kind is datetime.date:
        return "date"
    if kind is not datetime.datetime or value.fold or value.tzinfo not in (None, datetime.UTC):
        return None
    return "datetime" if value.tzinfo is None else "utc"


def text_of(value: datetime.date) -> str:
    """The text of a value that has a form."""
    return value.isoformat()


def time_of(text: str, form: TimeForm | None = None) -> datetime.date:
    """The value of a text.

    Raises:
        ValueError: It is not the text of a value of this form (None: of any).
    """
    value = datetime.datetime.fromisoformat(text) if "T" in text else datetime.date.fromisoformat(text)
    found = form_of(value)
    if found is None or value.isoformat() != text or form not in (None, found):
        raise ValueError(f"not a {form or 'time'}: {text!r:.100}")
    return value
