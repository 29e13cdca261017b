"""`require_ray`: imports Ray on use, so that nothing else needs it."""

from __future__ import annotations

from typing import Any

from rlio.errors import MissingExtra

__all__ = ["require_ray"]


def require_ray() -> Any:  # Any: Ray's own types are not checked here.
    """Return the module ``ray``.

    Raises:
        MissingExtra: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("ray", "ray") from error
    return ray
