"""A writer's write-ahead log, what publishes its shards, and recovery after a crash."""

from rlio.support.lazy import lazy_exports

# The names and their homes are stated once, in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
