"""Connectors: what happens to observations before a policy sees them, and to its actions behind it.

`connector` is the contract, and the pipelines that runners put connectors into; the others are ready-made:
`flatten` (Flatten, OneHot), `frame_stack` (FrameStack), `mean_std` (MeanStdFilter) and `clip` (ClipAction,
UnsquashAction, clip_rewards).
"""

from rlio.support.lazy import lazy_exports

# The names and their homes are stated once, in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
