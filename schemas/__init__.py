"""The schemas of stored data: columns, spaces, and how both are written."""

from typing import TYPE_CHECKING

from rlio._lazy import lazy_exports

__all__ = [
    "space_from_json",
    "space_to_json",
]

if __name__ != "rlio.schemas":
    raise ImportError(
        f"this package was imported as {__name__!r}; it is installed as 'rlio.schemas': "
        "write 'import rlio.schemas' and keep the checkout's root off sys.path"
    )

if TYPE_CHECKING:
    from rlio.schemas.spaces import space_from_json, space_to_json
else:
    # Hidden from type checkers: to them a module with __getattr__ has every attribute.
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "space_from_json": "rlio.schemas.spaces",
            "space_to_json": "rlio.schemas.spaces",
        },
    )
