"""Environments: making them, stepping all kinds in the same way, and replacing those that fail.

`make` turns a user's argument into environments and a `vector.Stepper`: `local` for environments in this
process, `process_stepper` for those in their own `processes`, and `vector.VectorStepper` for vector
environments in any autoreset mode. `restarts` decides which environments to replace and when, `seeds` derives
the seed of each episode, and `checking` reports what is wrong with an environment. `context` is the argument
of functions that make environments, and `leaves` are the arrays of a space's values. `atari` prepares games.
`multi_agent` and `pettingzoo` have several agents. `external` is for environments that drive the loop.
"""

from rlio.support.lazy import lazy_exports

# The names and their homes are stated once, in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
