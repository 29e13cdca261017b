"""`EnvProcesses`: environments that live in processes of their own, with observations in shared memory.

A process answers one request after the other. One that died or was killed is started anew.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import selectors
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from gymnasium.vector import VectorEnv

from rlio.envs.checking import EnvCheck, takes_seed
from rlio.envs.leaves import Leaf, leaves_of
from rlio.envs.observation_buffer import ObservationBuffer
from rlio.errors import EnvError, SchemaError, excerpt

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["EnvProcesses", "ProcessDied", "Transition"]

logger = logging.getLogger("rlio")

# Seconds for a process that was told to end, before it is killed.
_LAST_WORDS = 2.0


class ProcessDied(EnvError):
    """The process of an environment is gone."""


class Transition(NamedTuple):
    """What a step in another process gave; the observation after it lies in shared memory.

    Attributes:
        reward: Of the step.
        terminated: Whether it ended the episode.
        truncated: Whether it cut it.
        info: Of the step, not of the reset after it.
        final: The leaves of the final observation, where the step ended the episode; else None.
        error: What the reset after it failed with.
        reset_info: What came with that reset, if it was asked for.
    """

    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    final: list[Any] | None
    error: Exception | None
    reset_info: dict[str, Any] | None = None


class EnvProcesses(VectorEnv[Any, Any, Any]):
    """N environments in a process each. `rlio.envs.waiting.ProcessStepper` steps them.

    Args:
        make: Makes one, given its index and whether it takes the place of one that failed. One more is made
            in this process, looked at and closed.
        num_envs: How many.
        check: Check the first reset and the first step of each.
        start_method: How processes are started; None: `multiprocessing`'s default.

    Attributes:
        observations: What each environment showed last, in shared memory; None if they hold objects, which
            come through the pipes.
        seedless: Environments that can be reset without a seed only.
        patience: Seconds to wait for steps that are under way, where something else is asked; None: as long
            as they take.

    Raises:
        Exception: What making one raised.
    """

    def __init__(
        self,
        make: Callable[[int, bool], gym.Env[Any, Any]],
        *,
        num_envs: int,
        check: bool = False,
        start_method: str | None = None,
    ) -> None:
        from gymnasium.vector import AutoresetMode
        from gymnasium.vector.utils import batch_space

        probe = make(0, False)
        try:
            self._spaces = probe.observation_space, probe.action_space
            self.metadata = {**probe.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
            self.render_mode = probe.render_mode
            self.spec = probe.spec
        finally:
            probe.close()
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = self._spaces
        self.observation_space = batch_space(self._spaces[0], num_envs)
        self.action_space = batch_space(self._spaces[1], num_envs)
        self._make, self._check = make, check
        self._context = multiprocessing.get_context(start_method)
        self._blocks = _shared_blocks(self._spaces[0], num_envs, self._context)
        self.observations = (
            None if self._blocks is None else _buffer_in(self._spaces[0], num_envs, self._blocks)
        )
        self._processes: list[_EnvProcess | None] = [None] * num_envs
        #: Requests that were not answered, and answers that nobody took.
        self._asked = [0] * num_envs
        self._early: list[list[tuple[Any, Exception | None]]] = [[] for _ in range(num_envs)]
        self._selector = selectors.DefaultSelector()
        self.seedless: set[int] = set()
        self.patience: float | None = None
        try:
            for env in range(num_envs):
                self.spawn(env)
                self.ask(env, "make", False)
            self.seedless = {env for env in range(num_envs) if not self.answer(env)}
        except BaseException:
            self.close()
            raise

    # ---- processes ----

    def is_alive(self, env: int) -> bool:
        """Whether ``env`` has a process, as far as is known."""
        return self._processes[env] is not None

    def pid(self, env: int) -> int:
        """The id of its process.

        Raises:
            ProcessDied: It has none.
        """
        return self._process(env).pid

    def spawn(self, env: int) -> None:
        """Start a process for ``env``, which has none."""
        serving = _Serving(
            env,
            partial(self._make, env),
            self._spaces,
            self._blocks,
            num_envs=self.num_envs,
            check=self._check,
        )
        process = _EnvProcess(env, serving, self._context)
        self._processes[env] = process
        self._selector.register(process.pipe, selectors.EVENT_READ, env)

    def drop(self, env: int) -> None:
        """Kill the process of ``env``, if it has one."""
        process, self._processes[env] = self._processes[env], None
        self._asked[env] = 0
        self._early[env].clear()
        if process is not None:
            self._selector.unregister(process.pipe)
            process.stop(kill=True)

    def _process(self, env: int) -> _EnvProcess:
        process = self._processes[env]
        if process is None:
            raise ProcessDied(f"the process of environment {env} is gone", env_index=env)
        return process

    # ---- requests ----

    def ask(self, env: int, command: str, data: Any = None) -> None:
        """Send a request.

        Raises:
            ProcessDied: Nobody is there.
        """
        self._process(env).send(command, data)
        self._asked[env] += 1

    def ready(self, timeout: float | None) -> list[int]:
        """Environments whose answers can be taken; waits up to ``timeout`` seconds for the first one."""
        early = [env for env, answers in enumerate(self._early) if answers]
        found = self._selector.select(0 if early else timeout)
        return sorted({*early, *(key.data for key, _ in found)})

    def is_ready(self, env: int, timeout: float | None) -> bool:
        """Whether an answer of ``env`` can be taken; waits up to ``timeout`` seconds for it."""
        return bool(self._early[env]) or self._process(env).pipe.poll(timeout)

    def answer(self, env: int) -> Any:
        """The answer to the oldest request; waits for it.

        Raises:
            ProcessDied: It will not come.
            Exception: What it failed with there.
        """
        if self._early[env]:
            answer, error = self._early[env].pop(0)
            if error is not None:
                raise error
            return answer
        self._asked[env] -= 1
        return self._process(env).receive()

    def _settle(self, env: int) -> bool:
        """Wait for answers of ``env`` and keep them for `answer`; whether all came within `patience`."""
        while self._asked[env] > 0:
            if not self._process(env).pipe.poll(self.patience):
                return False
            try:
                self._asked[env] -= 1
                self._early[env].append((self._process(env).receive(), None))
            # It is raised when the answer is taken.
            except Exception as error:
                self._early[env].append((None, error))
        return True

    # ---- gymnasium's interface ----

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each environment, or get an attribute; None of those that do not answer.

        Steps that are under way are waited for, up to `patience`, and are not lost.

        Raises:
            Exception: What one of them raised.
        """
        asked: list[int] = []
        found: dict[int, Any] = {}
        failed: list[Exception] = []
        for env in range(self.num_envs):
            if self._settle(env) and self.is_alive(env):
                with suppress(ProcessDied):  # The next step will find that out.
                    self._process(env).send("call", (name, args, kwargs))
                    asked.append(env)
        for env in asked:
            # Every answer is taken, or it would be taken for that to the next request.
            try:
                found[env] = self._process(env).receive()
            except ProcessDied:
                continue  # Likewise.
            except Exception as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return tuple(found.get(env) for env in range(self.num_envs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of each environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of each environment: to its own of a list, or to the same."""
        each = values if isinstance(values, (list, tuple)) else [values] * self.num_envs
        for env, value in zip(range(self.num_envs), each, strict=True):
            if not self._settle(env):
                raise TimeoutError(f"environment {env} does not answer: its step takes too long")
            self._process(env).send("set", (name, value))
            self._process(env).receive()

    def render(self) -> tuple[Any, ...]:
        """A frame of each environment."""
        return self.call("render")

    def close_extras(self, **kwargs: Any) -> None:
        """End the processes: those that do not in 2 s are killed."""
        for process in self._processes:
            if process is not None:
                process.tell_to_end()
        for env, process in enumerate(self._processes):
            if process is not None:
                process.stop()
                self._processes[env] = None
        self._selector.close()


def _shared_blocks(space: gym.Space[Any], num_envs: int, context: Any) -> list[Any] | None:
    """Memory for the observations of ``num_envs`` environments, a block a leaf; None: they hold objects."""
    specs = leaves_of(space)
    if any(leaf.is_object for leaf in specs):
        return None  # Objects cannot lie in shared memory.
    return [context.RawArray("b", max(1, num_envs * _bytes(leaf))) for leaf in specs]


def _bytes(leaf: Leaf) -> int:
    return int(leaf.dtype.itemsize * np.prod(leaf.shape, dtype=np.int64))


def _buffer_in(space: gym.Space[Any], num_envs: int, blocks: Sequence[Any]) -> ObservationBuffer:
    """The buffer that lies in ``blocks``."""
    arrays = []
    for leaf, block in zip(leaves_of(space), blocks, strict=True):
        count = num_envs * int(np.prod(leaf.shape, dtype=np.int64))
        arrays.append(np.frombuffer(block, leaf.dtype, count).reshape(num_envs, *leaf.shape))
    return ObservationBuffer(space, num_envs=num_envs, arrays=arrays)


class _EnvProcess:
    """The process of environment ``index``, seen from here.

    Args:
        index: Which environment.
        serve: Runs there, with its end of a pipe and ours, which it closes.
        context: Of `multiprocessing`.
    """

    def __init__(self, index: int, serve: Callable[[Connection, Connection], None], context: Any) -> None:
        from gymnasium.vector.utils import clear_mpi_env_vars

        self.index = index
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, self.pipe), name=f"rlio-env-{index}", daemon=True
        )
        try:
            with clear_mpi_env_vars():
                self._process.start()
        finally:
            # Else its end would not be seen: the pipe would stay open.
            theirs.close()

    def send(self, command: str, data: Any = None) -> None:
        """Ask for something.

        Raises:
            ProcessDied: It cannot be asked.
        """
        try:
            self.pipe.send((command, data))
        except (BrokenPipeError, ConnectionError, OSError) as error:
            raise self._died() from error

    def receive(self) -> Any:
        """The answer to the oldest request that was not answered.

        Raises:
            ProcessDied: It will not come.
            Exception: What it failed with there.
        """
        try:
            answer, error = self.pipe.recv()
        except (EOFError, ConnectionError, OSError) as gone:
            raise self._died() from gone
        if error is not None:
            raise error
        return answer

    def _died(self) -> ProcessDied:
        self._process.join(_LAST_WORDS)
        code = self._process.exitcode
        how = f"exit code {code}" if code is None or code >= 0 else f"killed by signal {-code}"
        return ProcessDied(f"the process of environment {self.index} is gone ({how})", env_index=self.index)

    @property
    def pid(self) -> int:
        """Its process id."""
        return int(self._process.pid or 0)

    def tell_to_end(self) -> None:
        """Ask it to close its environment and end."""
        with suppress(ConnectionError, OSError):  # It is gone, or about to.
            self.pipe.send(("close", None))

    def stop(self, *, kill: bool = False) -> None:
        """Wait until it has ended, or kill it."""
        self.pipe.close()
        if not kill:
            self._process.join(_LAST_WORDS)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._process.close()


class _Serving:
    """What a process does: it makes environment ``index`` and steps it on request.

    Args:
        index: Which environment.
        make: Makes it, given whether it takes the place of one that failed; pickled by cloudpickle.
        spaces: What its observations and actions are.
        blocks: Where its observations go; None: through the pipe.
        num_envs: Environments that share ``blocks``.
        check: Whether to check its first reset and step.
    """

    def __init__(
        self, index: int, make: Callable[[bool], Any], spaces: tuple[Any, Any], blocks: list[Any] | None,
        *, num_envs: int, check: bool,
    ) -> None:  # fmt: skip
        from gymnasium.vector.utils import CloudpickleWrapper

        # Any: gymnasium's wrapper is annotated for functions without arguments.
        function: Any = make
        self._index, self._check = index, check
        self._make: Any = CloudpickleWrapper(function)
        self._spaces, self._blocks, self._num_envs = spaces, blocks, num_envs
        self._env: Any = None
        self._checking: EnvCheck | None = None
        self._takes_seed = True

    def __call__(self, pipe: Connection, other_end: Connection) -> None:
        """Serve until told to end, or nobody is there any more."""
        other_end.close()
        # An interrupt is the parent's business, which closes the pipe; and what it holds is not ours to free.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.freeze()
        self._buffer = (
            ObservationBuffer(self._spaces[0], num_envs=self._num_envs)
            if self._blocks is None
            else _buffer_in(self._spaces[0], self._num_envs, self._blocks)
        )
        with suppress(EOFError, ConnectionError):  # Nobody is there any more.
            while True:
                command, data = pipe.recv()
                if command == "close":
                    break
                self._answer(pipe, command, data)
        if self._env is not None:
            self._env.close()

    def _answer(self, pipe: Connection, command: str, data: Any) -> None:
        answer: tuple[Any, Exception | None]
        try:
            answer = getattr(self, f"_on_{command}")(data), None
        # Whatever it is, it is raised there.
        except Exception as error:
            answer = None, _portable(error)
        try:
            pipe.send(answer)
        except ConnectionError:
            raise
        # An answer that cannot be pickled; nothing of it was sent.
        except Exception as error:
            pipe.send((None, _portable(error)))

    def _on_make(self, recreated: bool) -> bool:
        """Make it; whether it takes seeds."""
        old, self._env = self._env, None
        if old is not None:
            try:
                old.close()
            except Exception as error:
                # It failed before, which was told; what counts is the one in its place.
                logger.warning(
                    "environment %s, which failed, cannot be closed: %s", self._index, excerpt(str(error))
                )
        env = self._make.fn(recreated)
        if (env.observation_space, env.action_space) != self._spaces:
            env.close()
            raise SchemaError(
                f"environment {self._index} has other spaces, {env.observation_space} and "
                f"{env.action_space}, than the first one, {self._spaces[0]} and {self._spaces[1]}"
            )
        self._takes_seed = takes_seed(env)
        if self._check:
            self._checking = EnvCheck(env, f"environment {self._index}")
            self._check = False
        self._env = env
        return self._takes_seed

    def _on_reset(self, data: tuple[int | None, bool]) -> tuple[Any, dict[str, Any] | None]:
        """Reset it; its observation, where that does not lie in shared memory, and the info if wanted."""
        seed, keeps_info = data
        result = self._env.reset() if seed is None or not self._takes_seed else self._env.reset(seed=seed)
        if self._checking is not None:
            self._checking.reset(result)
        return self._shown(result[0]), result[1] if keeps_info else None

    def _on_anew(self, data: tuple[int | None, bool]) -> tuple[Any, dict[str, Any] | None]:
        self._on_make(True)
        return self._on_reset(data)

    def _on_step(self, data: tuple[Any, tuple[int | None, bool]]) -> tuple[Transition, Any]:
        action, next_reset = data
        result = self._env.step(action)
        if self._checking is not None:
            self._checking.step(result)
            self._checking = None
        obs, reward, terminated, truncated, info = result
        # float: what is no number fails here, where it belongs.
        reward, terminated, truncated = float(reward), bool(terminated), bool(truncated)
        if not (terminated or truncated):
            return Transition(reward, terminated, truncated, info, None, None), self._shown(obs)
        final = self._buffer.leaves_of(obs)
        shown, failed, reset_info = None, None, None
        try:
            shown, reset_info = self._on_reset(next_reset)
        except Exception as error:
            failed = _portable(error)
        return Transition(reward, terminated, truncated, info, final, failed, reset_info), shown

    def _on_call(self, data: tuple[str, tuple[Any, ...], dict[str, Any]]) -> Any:
        name, args, kwargs = data
        found = self._env.render if name == "render" else self._env.get_wrapper_attr(name)
        return found(*args, **kwargs) if callable(found) else found

    def _on_set(self, data: tuple[str, Any]) -> None:
        self._env.set_wrapper_attr(*data)

    def _shown(self, obs: Any) -> Any:
        self._buffer.write(self._index, obs)
        return None if self._blocks is not None else obs


def _portable(error: Exception) -> Exception:
    """``error``, or what can be said of it where it does not come through a pipe."""
    try:
        # As the pipe does it: whether the other end would get the error, and no error of its own.
        ForkingPickler.loads(ForkingPickler.dumps(error))
    # A class of its own may fail in any way, when it is packed or unpacked.
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {excerpt(str(error), 500)}")
    return error
