"""Many machines on Ray (extra ``rlio[ray]``): a group of worker actors, data sets in and out of Ray Data.

Nothing here is needed to share a data set: writers never coordinate, and readers are cut by ``shard=(rank,
world)`` without any engine.
"""

__all__: list[str] = []
