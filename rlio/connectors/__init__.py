"""Connectors: they process observations before a policy sees them, and its actions afterwards.

`connector` has the contract, and the pipelines in which runners put connectors. The others are ready to use:
`flatten` (Flatten, OneHot), `frame_stack` (FrameStack), `mean_std` (MeanStdFilter) and `clip` (ClipAction,
UnsquashAction, clip_rewards).
"""

from rlio.support.lazy import lazy_exports

# The names and their homes are stated once, in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
