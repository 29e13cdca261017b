"""`require_ray`: imports Ray on use, so that nothing else needs it."""

from __future__ import annotations

from typing import Any

from rlio.support.extras import needs

__all__ = ["require_ray"]


def require_ray() -> Any:  # Any: Ray's own types are not checked here.
    """Return the module ``ray``.

    Raises:
        MissingExtra: Ray is not installed.
    """
    with needs("ray", "ray"):
        import ray
    return ray
