"""Exports that are imported on first use, so `import rlio` stays fast (PEP 562).

The ``__init__.pyi`` of a package states its public names and their homes once: type checkers read it, and
`lazy_loader` reads it at run time.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import lazy_loader

from rlio.support.options import folded

__all__ = ["lazy_exports"]


def lazy_exports(
    package: str, file: str
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Make the module-level ``__getattr__``, ``__dir__`` and ``__all__`` of ``package``.

    Args:
        package: ``__name__`` of the package whose `__init__` calls this.
        file: Its ``__file__``; the stub is beside it.

    Returns:
        The three objects. ``__all__`` has no subpackages, but they are found. A name is looked up once; then
        it is an ordinary attribute of the package. A name is also found in the other spelling, British or
        American.
    """
    load, dir_, names = lazy_loader.attach_stub(package, file)
    stub = Path(file).with_suffix(".pyi").read_text(encoding="utf-8")
    packages = set(re.findall(r"^from \. import (\w+)", stub, re.MULTILINE))
    spelled = {folded(name): name for name in names}

    def getattr_(name: str) -> object:
        known = name if name in names else spelled.get(folded(name))
        if known is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = load(known)
        setattr(sys.modules[package], name, value)
        return value

    public = [name for name in names if name not in packages]
    return getattr_, lambda: sorted({*vars(sys.modules[package]), *dir_()}), public
