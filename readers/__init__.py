"""The readers that ship with rlio. They are found the same way as third-party readers."""

from rlio.support.lazy import lazy_exports

if __name__ != "rlio.readers":
    raise ImportError(
        f"this package was imported as {__name__!r}, but is installed as 'rlio.readers': "
        "write 'import rlio.readers' and keep the checkout's root off sys.path"
    )

# The names and their homes are stated once, in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
