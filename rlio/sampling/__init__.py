"""Live sampling: a policy acts in environments, and its steps become batches and episodes.

`env_runner` steps and records as `config` says. `recorder` holds the columns. `evaluate` measures a policy.
"""

from rlio.support.lazy import lazy_exports

# The names and their homes are stated once, in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
