"""`EnvActors`: environments as Ray actors, on this machine or on others (``pip install 'rlio[ray]'``).

An actor answers one request at a time, like a process of `rlio.envs.processes`. An actor that died or was
killed is started again where Ray finds room.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rlio.envs.env_server import EnvServer
from rlio.envs.served_envs import LAST_WORDS, ServedEnvs, ServerHandle
from rlio.errors import excerpt
from rlio.support.extras import needs

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["EnvActors"]

# Ray places actors without requirements anywhere; SPREAD uses the processors of all machines. rlio counts
# restarts and begins new episodes after them, so Ray must not restart actors.
_ACTOR_OPTIONS: dict[str, Any] = {
    "num_cpus": 0,
    "max_restarts": 0,
    "max_task_retries": 0,
    "scheduling_strategy": "SPREAD",
}


class EnvActors(ServedEnvs):
    """N environments with an actor each. `rlio.envs.process_stepper.ProcessStepper` steps them.

    Arrays in infos and final observations belong to Ray and are read-only. Call ``ray.init()`` before, or Ray
    starts on this machine.

    Args:
        make: Makes an environment from its index and whether it replaces a failed one; Ray pickles it.
        num_envs: Number of environments.
        check: Check the first reset and the first step of each.

    Raises:
        MissingExtra: Ray is not installed.
        SchemaError: The environments have different spaces.
        Exception: The error raised while making an environment.
    """

    def __init__(
        self, make: Callable[[int, bool], gym.Env[Any, Any]], *, num_envs: int, check: bool = False
    ) -> None:
        super().__init__(num_envs)
        self._ray = _connected_ray()
        # Stored once for all actors.
        self._make, self._check = self._ray.put(make), check
        self._make_all()

    def _start(self, env: int) -> ServerHandle:
        return _EnvActor(env, self._make, self._ray, spaces=self._spaces, check=self._check)

    def _wait(self, timeout: float | None) -> list[int]:
        asked = {
            server.oldest: server.index
            for server in self._servers
            if isinstance(server, _EnvActor) and server.oldest is not None
        }
        if not asked:
            time.sleep(timeout or 0)
            return []
        found, rest = self._ray.wait(list(asked), timeout=timeout)
        if found and rest:  # wait() returns after the first one, so check the rest.
            found += self._ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        return [asked[ref] for ref in found]


class _EnvActor(ServerHandle):
    """Handle of the actor of environment ``index``.

    Args:
        index: Index of the environment.
        make: Ray's reference to the function that makes it.
        ray: The Ray module.
        options: Options of `EnvServer`.
    """

    # Any: Ray may not be installed, and its types do not describe actors.
    def __init__(self, index: int, make: Any, ray: Any, **options: Any) -> None:
        super().__init__(index)
        self._ray = ray
        try:
            kind = ray.remote(**_ACTOR_OPTIONS)(EnvServer)
            self._actor = kind.options(name=None).remote(index, make, **options)
        except ray.exceptions.RayError as error:
            raise OSError(
                f"Ray could not start an actor for environment {index}: {excerpt(str(error))}"
            ) from error
        self._asked: deque[Any] = deque()
        self._ending: Any = None

    @property
    def oldest(self) -> Any:
        """The reference of the oldest unanswered request; None if there is none."""
        return self._asked[0] if self._asked else None

    def send(self, command: str, *arguments: Any) -> None:
        if not self._ray.is_initialized():  # Else Ray would silently start again for this call.
            raise self.died("this process is no longer connected to Ray")
        try:
            self._asked.append(self._actor.answer.remote(command, arguments))
        except self._ray.exceptions.RayError as error:
            raise self.died(_reason(error)) from error

    def is_ready(self, timeout: float | None) -> bool:
        return bool(self._ray.wait([self._asked[0]], timeout=timeout)[0])

    def receive(self) -> Any:
        exceptions = self._ray.exceptions
        try:
            answer, error = self._ray.get(self._asked.popleft())
        except exceptions.RayTaskError as error:
            # The request or the answer cannot be pickled; errors of the environment are in the answer.
            raise RuntimeError(excerpt(str(error.cause), 500)) from error
        except exceptions.RayError as error:
            raise self.died(_reason(error)) from error
        if error is not None:
            raise error
        return answer

    def tell_to_end(self) -> None:
        if self._ray.is_initialized():
            with suppress(self._ray.exceptions.RayError):  # The actor is gone or ending.
                self._ending = self._actor.close.remote()

    def stop(self, *, kill: bool = False) -> None:
        self._asked.clear()
        if not self._ray.is_initialized():
            return  # The actors ended with the connection.
        if not kill and self._ending is not None:
            self._ray.wait([self._ending], timeout=LAST_WORDS)
        self._ray.kill(self._actor)


def _reason(error: Exception) -> str:
    """The first line of Ray's message; the rest is in the error's cause."""
    first, *_ = [*str(error).splitlines(), ""]
    return f"{type(error).__name__}: {excerpt(first, 300)}"


def _connected_ray() -> Any:
    """Import Ray, and start it on this machine if this process is not connected to a cluster."""
    with needs("ray", "ray"):
        import ray
    if not ray.is_initialized():
        ray.init()
    return ray
