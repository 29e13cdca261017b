"""Exports that are imported on first use, so that `import rlio` stays quick (PEP 562).

An `__init__` gives a literal table of public name -> home module; nothing of it is imported before it is
asked for. The same names stand in the `__init__`'s `__all__` and, for type checkers, in its imports under
`TYPE_CHECKING`; tests/test_public_names.py compares the three.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

from rlio.options import folded

__all__ = ["lazy_exports"]


def lazy_exports(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Make the module-level ``__getattr__`` and ``__dir__`` of ``package``.

    Args:
        package: ``__name__`` of the package whose `__init__` calls this.
        homes: Public name -> full name of the module that defines it.

    Returns:
        The two functions. A name is looked up once: it then is an ordinary attribute of the package. A name
        in the other spelling, British or American, is found too.
    """
    spelled = {folded(name): name for name in homes}

    def getattr_(name: str) -> object:
        known = name if name in homes else spelled.get(folded(name))
        if known is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(homes[known]), known)
        setattr(sys.modules[package], name, value)
        return value

    def dir_() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return getattr_, dir_
