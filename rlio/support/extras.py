"""`needs`: imports of optional packages, whose absence is an error with the pip line.

Example:
    >>> with needs("d4rl-atari", "atari"):
    ...     import no_such_package
    Traceback (most recent call last):
    ...
    rlio.errors.MissingExtra: d4rl-atari is not installed: run  pip install 'rlio[atari]'
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlio.errors import MissingExtra

__all__ = ["needs"]


@contextmanager
def needs(package: str, extra: str) -> Iterator[None]:
    """Turn the ImportError of a block of imports into `MissingExtra`.

    Args:
        package: What is imported, as the message names it.
        extra: The extra of rlio that installs it.
    """
    try:
        yield
    except ImportError as error:
        raise MissingExtra(package, extra) from error
