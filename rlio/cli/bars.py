"""Progress bars on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(name: str, total: int, **options: Any) -> Iterator[Callable[[int], Any]]:
    """Show the progress of a part, where standard error is a terminal; gives what advances it.

    Args:
        name: Of the part.
        total: Of what it does.
        options: Of tqdm.
    """
    from tqdm import tqdm

    with tqdm(total=total, desc=name, unit_scale=True, **{"disable": None, "leave": False, **options}) as bar:
        yield bar.update
