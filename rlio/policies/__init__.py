"""Policies: they choose actions, and may learn.

`policy` is the contract, and `random_policy` the simplest policy. `torch_policy` makes a policy from a torch
module. `dqn`, `actor_critic` and `behaviour_cloning` are policies that learn.
"""

from rlio.support.lazy import lazy_exports

# The names and their homes are stated once, in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
