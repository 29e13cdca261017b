"""`EnvContext`: the argument of functions that make environments.

Example:
    >>> def make(context):
    ...     return f"port {context['port'] + context.vector_index} for worker {context.worker_index}"
    >>> context = EnvContext({"port": 6000}, worker_index=2)
    >>> create(make, context.with_index(3))
    'port 6003 for worker 2'
    >>> create(lambda: "no argument", EnvContext(worker_index=2))
    'no argument'
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
    """The ``env_config``, with the position of the environment that is made.

    Args:
        env_config: The items.
        worker_index: Index of the worker: 0 for a local one, 1 to ``num_workers`` for others.
        vector_index: Index of the environment in its worker.
        num_workers: Total number of workers.
        remote: Whether the environment is made in its own process.
        recreated_worker: Whether the worker replaces a failed one.
        recreated: Whether the environment replaces a failed one.
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
        """A copy with some items and attributes replaced."""
        return EnvContext({**self, **(env_config or {})}, **{**vars(self), **changes})

    def with_index(self, vector_index: int, **changes: Any) -> EnvContext:
        """A copy for environment ``vector_index``."""
        return self.copy_with_overrides(vector_index=vector_index, **changes)

    def set_defaults(self, defaults: Mapping[str, Any]) -> None:
        """Add the items of ``defaults`` that are missing."""
        for name, value in defaults.items():
            self.setdefault(name, value)


def takes_context(make: Callable[..., Any]) -> bool:
    """Whether ``make`` has a positional argument without a default."""
    return any(p.default is inspect.Parameter.empty for p in _positional(make))


def create(make: Callable[..., Any], context: EnvContext) -> Any:
    """Call ``make(context)``, or ``make()`` if it takes no context.

    ``make`` takes a context if it has a positional argument without a default, or if its first argument is
    called ``config``, ``context``, ``env_config`` or ``env_context``, as in RLlib's ``__init__(self,
    config=None)``.

    Raises:
        OptionError: The context has items, but ``make`` does not take it.
    """
    if takes_context(make) or any(p.name in _NAMES for p in _positional(make)[:1]):
        return make(context)
    if context:
        raise OptionError(
            f"env_config={excerpt(dict(context))}, but env={excerpt(make)} takes no argument for it: add an "
            "EnvContext argument"
        )
    return make()


def _positional(make: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # Written in C, without a signature.
        return []
    return [p for p in parameters if p.kind in _POSITIONAL]
