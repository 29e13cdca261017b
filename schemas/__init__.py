"""The schemas of stored data: columns, spaces, and the written form of both."""

from rlio.support.lazy import lazy_exports

if __name__ != "rlio.schemas":
    raise ImportError(
        f"this package was imported as {__name__!r}; it is installed as 'rlio.schemas': "
        "write 'import rlio.schemas' and keep the checkout's root off sys.path"
    )

# __init__.pyi states each name and its module once.
__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
