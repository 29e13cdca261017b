"""Many machines on Ray (extra ``rlio[ray]``): a group of worker actors, and data sets to and from Ray Data.

You do not need this package to share a data set: writers never coordinate, and ``shard=(rank, world)``
divides rows among readers. The functions here import Ray when you call them.
"""

from rlio.support.lazy import lazy_exports

# The names and their homes are stated once, in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
