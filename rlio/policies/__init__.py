"""Policies: what chooses actions, and may learn.

`policy` is the contract and `random_policy` the simplest of them; `torch_policy` makes one of a torch
module, and `dqn` and `behaviour_cloning` are two that learn.
"""

from rlio.support.lazy import lazy_exports

# The names and their homes are stated once, in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
