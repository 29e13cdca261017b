"""`MemoryTrackingCallbacks`: where the memory goes, as custom metrics of episodes.

Example:
    >>> from rlio.rollout.callbacks import RunningEpisode
    >>> callbacks = MemoryTrackingCallbacks(top=3)
    >>> episode = RunningEpisode(eps_id=1)
    >>> callbacks.on_episode_end(episode=episode)
    >>> episode.custom_metrics["memory/rss"] > 0
    True
    >>> callbacks.stop()
"""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path
from typing import Any

from rlio.errors import OptionError
from rlio.rollout.callbacks import Callbacks, RunningEpisode

__all__ = ["MemoryTrackingCallbacks"]


class MemoryTrackingCallbacks(Callbacks):
    """Puts into the custom metrics what memory the process has, and which lines allocated the most.

    ``memory/rss`` is the process's resident memory in bytes, ``memory/traced`` what Python's allocators have
    given out and not got back, ``memory/<file>:<line>`` how much of it came from there. Python traces every
    allocation meanwhile, which makes it several times slower: for finding a leak, not for good.

    Args:
        top: How many lines.
        every: Look at the end of every so many episodes.

    Raises:
        OptionError: One of them is below 1.
    """

    def __init__(self, *, top: int = 10, every: int = 1) -> None:
        if top < 1 or every < 1:
            raise OptionError(f"top={top}, every={every}: at least 1")
        self._top = top
        self._every = every
        self._ended = 0
        self._began = not tracemalloc.is_tracing()
        if self._began:
            tracemalloc.start()

    def stop(self) -> None:
        """End tracing, if it was begun here; may be called again."""
        if self._began:
            self._began = False
            tracemalloc.stop()

    def on_episode_end(
        self, *, episode: RunningEpisode, error: Exception | None = None, **kwargs: Any
    ) -> None:
        """Measure."""
        self._ended += 1
        if self._ended % self._every or not tracemalloc.is_tracing():
            return
        metrics = episode.custom_metrics
        metrics["memory/rss"] = _resident_bytes()
        metrics["memory/traced"] = tracemalloc.get_traced_memory()[0]
        for line in tracemalloc.take_snapshot().statistics("lineno")[: self._top]:
            frame = line.traceback[0]
            metrics[f"memory/{frame.filename}:{frame.lineno}"] = line.size


def _resident_bytes() -> int:
    """Resident memory of this process; where the system tells only the most it ever had, that."""
    import resource

    statistics = Path("/proc/self/statm")
    if statistics.exists():
        return int(statistics.read_text().split()[1]) * resource.getpagesize()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
