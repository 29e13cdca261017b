"""`EnvActors`: environments that are Ray actors, on this machine or on others (``pip install 'rlio[ray]'``).

An actor answers one request after the other, as a process of `rlio.envs.processes` does. One that died or
was killed is started again, where Ray finds room.

Example::

    import ray
    ray.init(address="auto")
    config = rlio.RolloutConfig(num_envs=32, remote_worker_envs=True, remote_env_batch_wait_ms=5)
    worker = rlio.RolloutWorker("CartPole-v1", policy, rollout=config)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rlio.envs.env_server import EnvServer
from rlio.envs.served_envs import LAST_WORDS, ServedEnvs, ServerHandle
from rlio.errors import MissingExtra, excerpt

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["EnvActors"]

# Ray places what needs nothing anywhere; spread, environments use the processors of all machines. Restarts
# are counted, and begin another episode, which is not Ray's to know.
_ACTOR_OPTIONS: dict[str, Any] = {
    "num_cpus": 0,
    "max_restarts": 0,
    "max_task_retries": 0,
    "scheduling_strategy": "SPREAD",
}


class EnvActors(ServedEnvs):
    """N environments in an actor each. `rlio.envs.process_stepper.ProcessStepper` steps them.

    Arrays in infos and final observations are Ray's, and read-only. Ray is used as it is: call ``ray.init()``
    before, or Ray starts itself on this machine.

    Args:
        make: Makes one, given its index and whether it takes the place of one that failed; Ray pickles it.
        num_envs: How many.
        check: Check the first reset and the first step of each.

    Raises:
        MissingExtra: Ray is not installed.
        SchemaError: They have unlike spaces.
        Exception: What making one raised.
    """

    def __init__(
        self, make: Callable[[int, bool], gym.Env[Any, Any]], *, num_envs: int, check: bool = False
    ) -> None:
        super().__init__(num_envs)
        self._ray = _connected_ray()
        # Stored once, however many actors take it.
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
        if found and rest:  # It returns with the first one: who else is ready?
            found += self._ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        return [asked[ref] for ref in found]


class _EnvActor(ServerHandle):
    """The actor of environment ``index``, seen from here.

    Args:
        index: Which environment.
        make: Ray's reference to the function that makes it.
        ray: The module.
        options: Of `EnvServer`.
    """

    # Any: Ray may not be installed, and its types say nothing of actors.
    def __init__(self, index: int, make: Any, ray: Any, **options: Any) -> None:
        super().__init__(index)
        self._ray = ray
        try:
            kind = ray.remote(**_ACTOR_OPTIONS)(EnvServer)
            self._actor = kind.options(name=None).remote(index, make, **options)
            self._pid = self._actor.pid.remote()
        except ray.exceptions.RayError as error:
            raise OSError(f"Ray starts no actor for environment {index}: {excerpt(str(error))}") from error
        self._asked: deque[Any] = deque()
        self._ending: Any = None

    @property
    def oldest(self) -> Any:
        """The reference of the oldest request that was not answered; None if there is none."""
        return self._asked[0] if self._asked else None

    @property
    def pid(self) -> int:
        return int(self._get(self._pid))

    def send(self, command: str, *arguments: Any) -> None:
        if not self._ray.is_initialized():  # Else Ray would start anew, in silence, for this call.
            raise self.died("this process is no longer connected to Ray")
        try:
            self._asked.append(self._actor.answer.remote(command, arguments))
        except self._ray.exceptions.RayError as error:
            raise self.died(_reason(error)) from error

    def is_ready(self, timeout: float | None) -> bool:
        return bool(self._ray.wait([self._asked[0]], timeout=timeout)[0])

    def receive(self) -> Any:
        answer, error = self._get(self._asked.popleft())
        if error is not None:
            raise error
        return answer

    def _get(self, ref: Any) -> Any:
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(ref)
        except exceptions.RayTaskError as error:
            # A request or an answer that cannot be pickled: what fails in the environment is in the answer.
            raise RuntimeError(excerpt(str(error.cause), 500)) from error
        except exceptions.RayError as error:
            raise self.died(_reason(error)) from error

    def tell_to_end(self) -> None:
        if self._ray.is_initialized():
            with suppress(self._ray.exceptions.RayError):  # It is gone, or about to.
                self._ending = self._actor.close.remote()

    def stop(self, *, kill: bool = False) -> None:
        self._asked.clear()
        if not self._ray.is_initialized():
            return  # Its actors went with the connection.
        if not kill and self._ending is not None:
            self._ray.wait([self._ending], timeout=LAST_WORDS)
        self._ray.kill(self._actor)


def _reason(error: Exception) -> str:
    """What Ray says first; the rest is in the error's cause."""
    first, *_ = [*str(error).splitlines(), ""]
    return f"{type(error).__name__}: {excerpt(first, 300)}"


def _connected_ray() -> Any:
    """Ray, which starts on this machine where this process is not connected to a cluster."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("ray", "ray") from error
    if not ray.is_initialized():
        ray.init()
    return ray
