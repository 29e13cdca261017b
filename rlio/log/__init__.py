"""A writer's write-ahead log, the publisher that stores its shards, and recovery after a crash."""

from rlio.support.lazy import lazy_exports

# __init__.pyi states each name and its module once.
__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
