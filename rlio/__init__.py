"""rlio records reinforcement-learning experience, replays it, and mixes logged with live experience.

Workers, files, mixtures and shuffles are all `InputReader`s: `sample()` gives the next batch. `OutputWriter`s
take batches and nothing else. Names are imported on first use, so `import rlio` is fast.

Names, options and their values that are spelled differently in British and American English are accepted in
both spellings: ``store.prioritised(normalise="batch")`` is ``store.prioritized(normalize="batch")``.

Example:
    >>> import rlio
    >>> batch = rlio.SampleBatch(obs=[[0.0], [1.0]], rewards=[1.0, 0.5])
    >>> len(batch), batch["rewards"].dtype
    (2, dtype('float64'))
"""

from rlio.support.lazy import lazy_exports

__version__ = "0.1.0.dev0"

# The names and their homes are stated once, in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
__all__ += ["__version__"]
