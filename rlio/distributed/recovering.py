"""`recover_here`, `recover_elsewhere`: what workers that died had written, published when a group is closed.

Mostly there is nothing left to do: the writer of whoever takes a worker's place publishes it when it opens.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from rlio.distributed.crew import Crew
from rlio.distributed.ray_import import require_ray
from rlio.errors import RlioError, WorkerError
from rlio.storage.paths import is_uri
from rlio.writers.recovery import recover

__all__ = ["recover_elsewhere", "recover_here"]

logger = logging.getLogger("rlio")


def recover_here(crew: Crew, arguments: Mapping[str, Any]) -> None:
    """Publish what dead workers left in logs on this machine; what fails is logged, and stays.

    Args:
        crew: Those who died, and those who live.
        arguments: Of the workers.
    """
    recovery = _Recovery.of(arguments)
    if recovery is not None and crew.losses:
        recovery()


def recover_elsewhere(crew: Crew, arguments: Mapping[str, Any]) -> None:
    """On each other machine where workers died, let one that lives there publish what they left."""
    recovery = _Recovery.of(arguments)
    if recovery is None or not crew.losses or not crew.connected:
        return
    here = require_ray().get_runtime_context().get_node_id()
    for node in {loss.node_id for loss in crew.losses} - {None, here}:
        there = [each for each in crew.alive if each.opened is not None and each.opened.node_id == node]
        answers = crew.call(there[:1], "apply", recovery, timeout_s=crew.tolerance.close_timeout_s)
        if not there or isinstance(answers[0], WorkerError):
            logger.warning(
                "a worker died on machine %s, where none lives that could publish what is in its log: "
                "`rlio recover %s` there does",
                node,
                recovery.root,
            )


class _Recovery:
    """Publishes what dead writers left in their logs on the machine where it is called."""

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        self.root, self._options = root, options

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> _Recovery | None:
        """For the output in a worker's ``arguments``; None where it is a function's affair, or has no log."""
        output, options = arguments.get("output"), arguments.get("output_options") or {}
        if output == "logdir":
            output = arguments.get("log_dir")
        if not isinstance(output, str) or not (is_uri(output) or os.path.isabs(output)):
            return None
        if options.get("spool", "auto") is None:
            return None
        kept = {name: options[name] for name in ("spool", "storage_options") if name in options}
        return cls(output, kept)

    def __call__(self, worker: object = None) -> None:
        try:
            recover(self.root, **self._options)
        except (RlioError, OSError) as error:
            logger.error("what dead workers left in their logs is not published yet: %s", error)
