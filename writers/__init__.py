"""The writers that ship with rlio. They are found the same way as third-party writers."""

from rlio.support.lazy import lazy_exports

if __name__ != "rlio.writers":
    raise ImportError(
        f"this package was imported as {__name__!r}, but is installed as 'rlio.writers': "
        "write 'import rlio.writers' and keep the checkout's root off sys.path"
    )

# The names and their homes are stated once, in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
