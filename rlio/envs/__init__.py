"""Environments: making them, stepping any of them in one way, and replacing them where they fail.

`make` turns what a user names into environments and a `vector.Stepper`: `local` for those in this process,
`process_stepper` for those in `processes` of their own, `vector.VectorStepper` for vector environments in any
autoreset mode. `restarts` says which environments are replaced and when, `seeds` what each episode is seeded
with, `checking` what is wrong with an environment. `context` is what a function that makes environments is
given, `leaves` the arrays that a space's values are made of. `atari` prepares games. `multi_agent` and
`pettingzoo` have several agents. `external` is for environments that call.
"""

from rlio.support.lazy import lazy_exports

# The names and their homes are stated once, in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
