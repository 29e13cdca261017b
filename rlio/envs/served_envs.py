"""`ServedEnvs`: N environments, each with a server in its own process, local or on another machine.

The subclasses `EnvProcesses` and `EnvActors` define the kind of process. `ProcessStepper` steps the
environments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rlio.envs.env_server import EnvTraits, other_spaces
from rlio.errors import EnvError
from rlio.support.forks import Owner

__all__ = ["LAST_WORDS", "ProcessDied", "ServedEnvs", "ServerHandle"]

#: Seconds that a process gets to end before it is killed.
LAST_WORDS = 2.0


class ProcessDied(EnvError):
    """The process of an environment is gone."""


class ServerHandle(ABC):
    """Handle of the server of environment ``index``, which answers requests in order."""

    def __init__(self, index: int) -> None:
        self.index = index

    @abstractmethod
    def send(self, command: str, *arguments: Any) -> None:
        """Request a call of a method of its `EnvServer`.

        Raises:
            ProcessDied: The process is gone.
        """

    @abstractmethod
    def is_ready(self, timeout: float | None) -> bool:
        """Whether an answer is available; waits up to ``timeout`` seconds for it."""

    @abstractmethod
    def receive(self) -> Any:
        """Return the answer to the oldest unanswered request.

        Raises:
            ProcessDied: The process is gone, and the answer will not come.
            Exception: The error of the request.
        """

    @abstractmethod
    def tell_to_end(self) -> None:
        """Request that it closes its environment and ends."""

    @abstractmethod
    def stop(self, *, kill: bool = False) -> None:
        """Wait up to `LAST_WORDS` for the process to end, or kill it."""

    def died(self, how: str) -> ProcessDied:
        """Make the error that reports the end of the process."""
        return ProcessDied(f"the process of environment {self.index} is gone ({how})", env_index=self.index)


class ServedEnvs(VectorEnv[Any, Any, Any]):
    """N environments with a process each, none of them in this one. Subclasses call `_make_all`.

    Args:
        num_envs: Number of environments.

    Attributes:
        patience: Seconds that other requests wait for running steps; None sets no limit.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.patience: float | None = None
        #: Observation and action space, once the environments are made.
        self._spaces: tuple[Any, Any] | None = None
        self._owner = Owner()
        self._servers: list[ServerHandle | None] = [None] * num_envs
        #: Unanswered requests, and answers that were received early.
        self._asked = [0] * num_envs
        self._early: list[list[tuple[Any, Exception | None]]] = [[] for _ in range(num_envs)]

    def _describe(self, traits: EnvTraits) -> None:
        """Set gymnasium's attributes from those of the first environment."""
        self._spaces = traits.spaces
        self.metadata: dict[str, Any] = {**traits.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.render_mode: str | None = traits.render_mode
        self.spec: EnvSpec | None = traits.spec
        self.single_observation_space: gym.Space[Any] = traits.observation_space
        self.single_action_space: gym.Space[Any] = traits.action_space
        self.observation_space: gym.Space[Any] = batch_space(traits.observation_space, self.num_envs)
        self.action_space: gym.Space[Any] = batch_space(traits.action_space, self.num_envs)

    def _make_all(self) -> None:
        """Start all servers, and make their environments in parallel.

        Raises:
            SchemaError: The environments have different spaces.
            Exception: The error raised while making an environment.
        """
        try:
            for env in range(self.num_envs):
                self.spawn(env)
                self.ask(env, "make", False)
            # Wrapped for pickle, because a spec may name a function that only cloudpickle can send.
            each: list[EnvTraits] = [self.answer(env).fn for env in range(self.num_envs)]
            for env, traits in enumerate(each):
                if traits.spaces != each[0].spaces:
                    raise other_spaces(env, traits.spaces, each[0].spaces)
            self._describe(each[0])
        except BaseException:
            self.close()
            raise

    # ---- servers ----

    @abstractmethod
    def _start(self, env: int) -> ServerHandle:
        """Start a server for ``env``.

        Raises:
            OSError: The process cannot be started now.
        """

    @abstractmethod
    def _wait(self, timeout: float | None) -> list[int]:
        """Environments whose servers are ready; waits up to ``timeout`` seconds for the first one."""

    def is_alive(self, env: int) -> bool:
        """Whether ``env`` has a process, as far as known."""
        return self._servers[env] is not None

    def spawn(self, env: int) -> None:
        """Start a process for ``env``, which must have none.

        Raises:
            OSError: The process cannot be started now.
        """
        self._servers[env] = self._start(env)

    def drop(self, env: int) -> None:
        """Kill the process of ``env``, if it has one."""
        server, self._servers[env] = self._servers[env], None
        self._asked[env] = 0
        self._early[env].clear()
        if server is not None:
            self._let_go(server)

    def _let_go(self, server: ServerHandle) -> None:
        server.stop(kill=True)

    def _server(self, env: int) -> ServerHandle:
        self._owner.check("environment in its own process")
        server = self._servers[env]
        if server is None:
            raise ProcessDied(f"the process of environment {env} is gone", env_index=env)
        return server

    # ---- requests ----

    def ask(self, env: int, command: str, *arguments: Any) -> None:
        """Send a request.

        Raises:
            ProcessDied: The process is gone.
        """
        self._server(env).send(command, *arguments)
        self._asked[env] += 1

    def ready(self, timeout: float | None) -> list[int]:
        """Environments whose answers are available; waits up to ``timeout`` seconds for the first one."""
        early = [env for env, answers in enumerate(self._early) if answers]
        return sorted({*early, *self._wait(0 if early else timeout)})

    def is_ready(self, env: int, timeout: float | None) -> bool:
        """Whether an answer of ``env`` is available; waits up to ``timeout`` seconds for it."""
        return bool(self._early[env]) or self._server(env).is_ready(timeout)

    def answer(self, env: int) -> Any:
        """Return the answer to the oldest request; waits for it.

        Raises:
            ProcessDied: The process is gone, and the answer will not come.
            Exception: The error of the request.
        """
        if self._early[env]:
            answer, error = self._early[env].pop(0)
            if error is not None:
                raise error
            return answer
        self._asked[env] -= 1
        return self._server(env).receive()

    def _settle(self, env: int) -> bool:
        """Receive all answers of ``env`` and keep them for `answer`; returns whether all came within
        `patience`.
        """
        while self._asked[env] > 0:
            if not self._server(env).is_ready(self.patience):
                return False
            try:
                self._asked[env] -= 1
                self._early[env].append((self._server(env).receive(), None))
            # Raised when the answer is taken.
            except Exception as error:
                self._early[env].append((None, error))
        return True

    # ---- gymnasium's interface ----

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each environment, or get an attribute; None for environments that do not answer.

        Waits for running steps, up to `patience`, and keeps their results.

        Raises:
            Exception: The error of an environment.
        """
        asked: list[int] = []
        for env in range(self.num_envs):
            if self._settle(env) and self.is_alive(env):
                with suppress(ProcessDied):  # The next step reports it.
                    self._server(env).send("call", name, args, kwargs)
                    asked.append(env)
        found: dict[int, Any] = {}
        failed: list[Exception] = []
        for env in asked:
            # Take every answer, else a later request would get it.
            try:
                found[env] = self._server(env).receive()
            except ProcessDied:
                continue  # The next step reports it.
            except Exception as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return tuple(found.get(env) for env in range(self.num_envs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of each environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of each environment, from a list with one value each, or to the same value."""
        each = values if isinstance(values, (list, tuple)) else [values] * self.num_envs
        for env, value in zip(range(self.num_envs), each, strict=True):
            if not self._settle(env):
                raise TimeoutError(f"environment {env} does not answer, because its step takes too long")
            self._server(env).send("set_attr", name, value)
            self._server(env).receive()

    def render(self) -> tuple[Any, ...]:
        """A frame of each environment."""
        return self.call("render")

    def close_extras(self, **kwargs: Any) -> None:
        """End the processes, and kill them after 2 s. A forked process leaves them to its parent."""
        if not self._owner.is_here:
            return
        for server in self._servers:
            if server is not None:
                server.tell_to_end()
        for env, server in enumerate(self._servers):
            if server is not None:
                server.stop()
                self._servers[env] = None
