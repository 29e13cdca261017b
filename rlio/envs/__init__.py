"""Environments: making them, stepping any of them in one way, and making them anew where they fail.

`making` turns what a user names into environments and a `stepping.Stepper`: `local` for those in this
process, `waiting` for those in `processes` of their own, `stepping.VectorStepper` for vector environments,
whatever their autoreset mode. `restarting` says who is made anew and when, `seeding` what each episode is
seeded with, `checking` what is wrong with an environment, `context` what those are told who make one;
`leaves` says which arrays a space's values are made of. `atari` prepares games, `multi_agent` and
`pettingzoo` have several agents, `external` is for environments that call.
"""

from rlio.support.lazy import lazy_exports

# The names and their homes are stated once, in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
