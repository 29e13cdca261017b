"""`require_ray`: Ray, imported where it is used, so that nothing else needs it."""

from __future__ import annotations

from typing import Any

from rlio.errors import MissingExtra

__all__ = ["require_ray"]


def require_ray() -> Any:  # Any: Ray's own types are not checked here.
    """The module ``ray``.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("ray", "ray") from error
    return ray
