"""Many machines on Ray (extra ``rlio[ray]``): a group of worker actors, data sets in and out of Ray Data.

Nothing here is needed to share a data set: writers never coordinate, and readers are cut by ``shard=(rank,
world)`` without any engine. Ray is imported by what uses it, when it is used.
"""

from rlio.support.lazy import lazy_exports

# The names and their homes are stated once, in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
