"""`EnvContext`: what a function that makes environments is told of the one it makes.

Example:
    >>> def make(context):
    ...     return f"port {context['port'] + context.vector_index} for worker {context.worker_index}"
    >>> context = EnvContext({"port": 6000}, worker_index=2)
    >>> create(make, context.with_index(3))
    'port 6003 for worker 2'
    >>> create(lambda: "whatever it is told", EnvContext(worker_index=2))
    'whatever it is told'
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rlio.errors import OptionError, excerpt

__all__ = ["EnvContext", "create", "takes_context"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMES = ("config", "context", "env_config", "env_context")


class EnvContext(dict[str, Any]):
    """The ``env_config``, and for whom an environment is made.

    Args:
        env_config: The items.
        worker_index: Of the worker: 0 for a local one, 1 to ``num_workers`` for others.
        vector_index: Of the environment among those of its worker.
        num_workers: Workers in all.
        remote: Whether it is made in a process of its own.
        recreated_worker: Whether the worker replaces one that failed.
        recreated: Whether the environment replaces one that failed.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        *,
        worker_index: int = 0,
        vector_index: int = 0,
        num_workers: int = 0,
        remote: bool = False,
        recreated_worker: bool = False,
        recreated: bool = False,
    ) -> None:
        super().__init__(env_config or {})
        self.worker_index = worker_index
        self.vector_index = vector_index
        self.num_workers = num_workers
        self.remote = remote
        self.recreated_worker = recreated_worker
        self.recreated = recreated

    def copy_with_overrides(self, env_config: Mapping[str, Any] | None = None, **changes: Any) -> EnvContext:
        """A copy with other items in place of some, and with other attributes."""
        return EnvContext({**self, **(env_config or {})}, **{**vars(self), **changes})

    def with_index(self, vector_index: int, **changes: Any) -> EnvContext:
        """A copy for environment ``vector_index``."""
        return self.copy_with_overrides(vector_index=vector_index, **changes)

    def set_defaults(self, defaults: Mapping[str, Any]) -> None:
        """Take those of ``defaults`` that are not there."""
        for name, value in defaults.items():
            self.setdefault(name, value)


def takes_context(make: Callable[..., Any]) -> bool:
    """Whether ``make`` wants an argument: a positional one without a default."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # Written in C, without a signature.
        return False
    return any(p.kind in _POSITIONAL and p.default is inspect.Parameter.empty for p in parameters)


def create(make: Callable[..., Any], context: EnvContext) -> Any:
    """``make(context)``, or ``make()`` if it takes none.

    It takes one if it has a positional argument without a default, or if its first one is called ``config``,
    ``context``, ``env_config`` or ``env_context``, as in RLlib's ``__init__(self, config=None)``.

    Raises:
        OptionError: The context has items, and ``make`` would never see them.
    """
    if takes_context(make) or _first_argument(make) in _NAMES:
        return make(context)
    if context:
        raise OptionError(
            f"env_config={excerpt(dict(context))}, but env={excerpt(make)} takes no argument for it: let it "
            "take an EnvContext"
        )
    return make()


def _first_argument(make: Callable[..., Any]) -> str | None:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # Written in C, without a signature.
        return None
    return next((p.name for p in parameters if p.kind in _POSITIONAL), None)
