"""`MultiAgentProcess`: steps a multi-agent environment that lives in its own process.

Example:
    >>> from rlio.envs.multi_agent import make_multi_agent
    >>> make = make_multi_agent("CartPole-v1")
    >>> process = MultiAgentProcess(0, lambda index, recreated: make(num_agents=2))
    >>> sorted(process.reset(seed=0).observations)
    [0, 1]
    >>> process.send({0: 1, 1: 0})
    >>> process.step().rewards
    {0: 1.0, 1: 1.0}
    >>> process.close()
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NamedTuple

from gymnasium.vector.utils import CloudpickleWrapper

from rlio.envs.env_server import EnvServer
from rlio.envs.multi_agent import AgentId, MultiAgentDict, MultiAgentEnv
from rlio.envs.multi_agent_stepping import MultiAgentStep, MultiAgentStepper
from rlio.envs.processes import EnvProcess
from rlio.envs.served_envs import ProcessDied
from rlio.errors import OptionError
from rlio.support.forks import Owner

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["AgentsElsewhere", "MultiAgentProcess", "ready"]


class _Traits(NamedTuple):
    """The properties of an environment that the runner needs."""

    possible_agents: list[AgentId]
    spaces: dict[AgentId, tuple[gym.Space[Any], gym.Space[Any]]]
    metadata: dict[str, Any]
    render_mode: str | None


class MultiAgentServer(EnvServer):
    """Serves multi-agent environment ``index``, one request at a time.

    Args:
        index: Index of the environment.
        make: Makes the environment from its index and whether it replaces a failed one.
        horizon: As in `MultiAgentStepper`.
        check: As in `MultiAgentStepper`.
    """

    def __init__(
        self,
        index: int,
        make: Callable[[int, bool], MultiAgentEnv],
        *,
        horizon: int | None = None,
        check: bool = False,
    ) -> None:
        super().__init__(index, make)
        self._horizon, self._checks = horizon, check

    def make_agents(self, recreated: bool) -> _Traits:
        """Make the environment, and return its traits."""
        env = self._make(self._index, recreated)
        self.env: Any = env
        self._stepper = MultiAgentStepper(env, horizon=self._horizon, check=self._checks)
        agents = list(env.possible_agents)
        inner = getattr(env, "env", env)
        metadata = {"name": type(inner).__name__} | dict(getattr(inner, "metadata", None) or {})
        return _Traits(agents, {each: self.spaces_of(each) for each in agents}, metadata, env.render_mode)

    def spaces_of(self, agent: AgentId) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Observation and action space of an agent."""
        return self.env.get_observation_space(agent), self.env.get_action_space(agent)

    def reset_agents(self, seed: int | None) -> MultiAgentStep:
        """See `MultiAgentStepper.reset`."""
        return self._stepper.reset(seed=seed)

    def step_agents(self, actions: MultiAgentDict) -> MultiAgentStep:
        """See `MultiAgentStepper.step`."""
        return self._stepper.step(actions)

    def render(self) -> Any:
        """Return a frame."""
        return self.env.render()


class AgentsElsewhere(MultiAgentEnv):
    """Proxy of an environment in another process, with its spaces and its frames."""

    def __init__(self, traits: _Traits, call: Callable[..., Any]) -> None:
        self.possible_agents: list[AgentId] = traits.possible_agents
        self.metadata: dict[str, Any] = traits.metadata  # type: ignore[misc]  # Each environment has its own.
        self.render_mode: str | None = traits.render_mode
        self._spaces, self._call = traits.spaces, call

    def _spaces_of(self, agent_id: AgentId) -> tuple[gym.Space[Any], gym.Space[Any]]:
        if agent_id in self._spaces:
            return self._spaces[agent_id]
        # Not kept, because the number of agents outside possible_agents is unlimited.
        spaces: tuple[gym.Space[Any], gym.Space[Any]] = self._call("spaces_of", agent_id)
        return spaces

    def get_observation_space(self, agent_id: AgentId) -> gym.Space[Any]:
        return self._spaces_of(agent_id)[0]

    def get_action_space(self, agent_id: AgentId) -> gym.Space[Any]:
        return self._spaces_of(agent_id)[1]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        raise self._misused()

    def step(self, actions: MultiAgentDict) -> Any:
        raise self._misused()

    def render(self) -> Any:
        return self._call("render")

    def _misused(self) -> OptionError:
        return OptionError("this environment lives in its own process; only its runner can step it")


class MultiAgentProcess:
    """Steps one environment in its own process, and ends the process.

    Args:
        index: Index of the environment.
        make: Makes the environment from its index and whether it replaces a failed one.
        recreated: Whether it replaces a failed one.
        horizon: As in `MultiAgentStepper`.
        check: As in `MultiAgentStepper`.
        timeout: Seconds after which a step or reset counts as failed; None sets no limit.

    Attributes:
        env: Proxy of the environment.
        steps: Steps of the episode so far.

    Raises:
        Exception: The error raised while making the environment.
    """

    def __init__(
        self,
        index: int,
        make: Callable[[int, bool], MultiAgentEnv],
        *,
        recreated: bool = False,
        horizon: int | None = None,
        check: bool = False,
        timeout: float | None = None,
    ) -> None:
        self.steps: int = 0
        self._index, self._timeout = index, timeout
        self._owner = Owner()
        #: Deadlines of the unanswered requests, on the monotonic clock.
        self._due: list[float | None] = []
        # Any: gymnasium's wrapper is annotated for functions without arguments.
        function: Any = make
        options = {"horizon": horizon, "check": check}
        work = (index, CloudpickleWrapper(function), options, MultiAgentServer)
        self._process: EnvProcess | None = EnvProcess(index, work, multiprocessing.get_context())
        try:
            self._process.send("make_agents", recreated)
            self.env: MultiAgentEnv = AgentsElsewhere(self._process.receive(), self._call)
        except BaseException:
            self._end(kill=True)
            raise

    @property
    def pipe(self) -> Any:
        """The pipe that becomes readable when an answer arrives; None: `step` raises."""
        return None if self._process is None else self._process.pipe

    def _running(self) -> EnvProcess:
        self._owner.check("environment in its own process")
        if self._process is None:
            raise ProcessDied(f"the process of environment {self._index} is gone", env_index=self._index)
        return self._process

    @property
    def seconds_left(self) -> float | None:
        """Seconds left for the running request; None means no limit."""
        due = self._due[0] if self._due else None
        return None if due is None else max(0.0, due - time.monotonic())

    def reset(self, *, seed: int | None = None) -> MultiAgentStep:
        """Start an episode; waits for a running step."""
        while self._due:
            with suppress(Exception):  # Its episode is abandoned.
                self._answer()
        self.steps = 0
        made: MultiAgentStep = self._call("reset_agents", seed)
        return made

    def send(self, actions: MultiAgentDict) -> None:
        """Begin a step; `step` returns its result."""
        try:
            self._ask("step_agents", actions)
        except ProcessDied:
            self._due.append(None)  # `step` reports it.

    def step(self) -> MultiAgentStep:
        """Return the result of the step that `send` began.

        Raises:
            TimeoutError: The step takes too long.
            ProcessDied: The process is gone.
            Exception: The environment's error.
        """
        made: MultiAgentStep = self._answer()
        self.steps += 1
        return made

    def _call(self, command: str, *arguments: Any) -> Any:
        self._ask(command, *arguments)
        return self._answer()

    def _ask(self, command: str, *arguments: Any) -> None:
        self._running().send(command, *arguments)
        self._due.append(None if self._timeout is None else time.monotonic() + self._timeout)

    def _answer(self) -> Any:
        left = self.seconds_left
        self._due.pop(0)
        process = self._running()
        if not process.is_ready(left):
            self._end(kill=True)
            raise TimeoutError(f"no answer within {self._timeout} s")
        return process.receive()

    def close(self) -> None:
        """End the process, and kill it after 2 s. A forked process leaves it to its parent."""
        if self._owner.is_here:
            self._end(kill=False)

    def _end(self, *, kill: bool) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.tell_to_end()
            process.stop(kill=kill)


def ready(processes: Mapping[int, MultiAgentProcess], *, wait_ms: float) -> list[int]:
    """Environments whose step is ready or overdue. Waits for the first, then ``wait_ms`` for others."""
    found = {index for index, each in processes.items() if each.pipe is None}
    pipes = {each.pipe: index for index, each in processes.items() if each.pipe is not None}
    limits = [left for each in processes.values() if (left := each.seconds_left) is not None]
    for pipe in wait(list(pipes), 0.0 if found else min(limits, default=None)):
        found.add(pipes.pop(pipe))
    until = time.monotonic() + wait_ms / 1000
    while pipes and (left := until - time.monotonic()) > 0:
        for pipe in wait(list(pipes), left):
            found.add(pipes.pop(pipe))
    return sorted(found | {index for index, each in processes.items() if each.seconds_left == 0.0})
