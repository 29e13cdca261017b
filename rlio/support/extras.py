"""`needs`: turns the failed import of an optional dependency into an error with its pip line.

Example:
    >>> with needs("nothing", "none"):
    ...     import nothing_of_this_name
    Traceback (most recent call last):
    ...
    rlio.errors.MissingExtra: nothing is not installed: run  pip install 'rlio[none]'
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlio.errors import MissingExtra

__all__ = ["needs"]


@contextmanager
def needs(package: str, extra: str) -> Iterator[None]:
    """Import ``package``, which the extra ``extra`` installs, in the ``with`` block.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise MissingExtra(package, extra) from error
