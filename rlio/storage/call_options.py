"""The part of ``storage_options`` for rlio itself; the rest is for the fsspec filesystem.

These options begin with ``rlio_``, unlike any filesystem's. (Several filesystems have a ``timeout`` with
another meaning: for a connection, or for one read.)

Example:
    >>> split_options({"endpoint_url": "http://127.0.0.1:9000", "rlio_timeout": 10})
    ({'endpoint_url': 'http://127.0.0.1:9000'}, {'rlio_timeout': 10})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from rlio.errors import OptionError, excerpt
from rlio.support.options import check_count, check_number, expected_mapping, refuse_unknown

__all__ = ["CallOptions", "refuse_call_options", "split_options"]

_PREFIX = "rlio_"


class CallOptions(TypedDict, total=False):
    """Options for calls of a store.

    Attributes:
        rlio_timeout: Seconds for one attempt, plus the time for its bytes; None: no limit.
        rlio_retries: Most retries of a failed attempt; 0: none.
    """

    rlio_timeout: float | None
    rlio_retries: int


def split_options(options: Mapping[str, Any] | None) -> tuple[dict[str, Any], CallOptions]:
    """Split ``storage_options`` into the filesystem's options and rlio's.

    Raises:
        OptionError: An option of rlio's is unknown, or has an illegal value.
    """
    given = expected_mapping(options, "storage_options")
    theirs = {name: value for name, value in given.items() if not _is_ours(name)}
    ours: CallOptions = {}
    for name, value in given.items():
        if name == "rlio_timeout":
            limit = check_number(_named(name), value, above=0, of="seconds", none="no limit")
            ours["rlio_timeout"] = limit
        elif name == "rlio_retries":
            ours["rlio_retries"] = check_count(_named(name), value, least=0)
        elif _is_ours(name):
            refuse_unknown([name], CallOptions.__annotations__, of="storage_options")
    return theirs, ours


def refuse_call_options(options: Mapping[str, Any] | None) -> None:
    """Refuse rlio's options for files that are read directly through the filesystem's client."""
    ours = sorted(name for name in options or () if _is_ours(name))
    if ours:
        raise OptionError(
            f"storage_options {', '.join(map(excerpt, ours))} are for data sets that rlio wrote, but the "
            "filesystem's client reads other files: leave them out, or pass the client's own limits"
        )


def _named(name: str) -> str:
    return f"storage_options[{name!r}]"


def _is_ours(name: object) -> bool:
    return isinstance(name, str) and name.startswith(_PREFIX)
