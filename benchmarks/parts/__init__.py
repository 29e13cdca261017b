"""The parts of the benchmark, by their names on the command line.

Each module has `run`, which takes a `Setup` and gives a `Section`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from benchmarks.results import Section
from benchmarks.scales import Setup

__all__ = ["PARTS", "WHOLE", "part"]

#: Name -> module, in the order in which they run.
PARTS = {
    "files": "files",
    "llm": "llm",
    "ragged": "ragged",
    "infos": "infos",
    "formats": "formats",
    "batches": "batches",
    "images": "images",
    "frames": "frames",
    "priorities": "priorities",
    "mixing": "mixing",
    "resume": "resume",
    "rollouts": "rollouts",
    "recording": "recording",
    "evaluation": "evaluation",
    "episodes": "episodes",
    "growth": "growth",
    "live": "live",
    "s3": "s3",
    "far": "far",
}
#: Those that run where none is named: the tables of the other are on a page of their own.
WHOLE = tuple(name for name in PARTS if name != "far")


def part(name: str) -> Callable[[Setup], Section]:
    """The function that runs a part."""
    run: Callable[[Setup], Section] = importlib.import_module(f"benchmarks.parts.{PARTS[name]}").run
    return run
