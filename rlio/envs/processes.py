"""`EnvProcesses`: environments that live in their own processes.

A process answers one request at a time. A process that died or was killed is replaced.
"""

from __future__ import annotations

import gc
import multiprocessing
import selectors
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from gymnasium.vector.utils import CloudpickleWrapper, clear_mpi_env_vars

from rlio.envs.env_server import EnvServer, portable
from rlio.envs.served_envs import LAST_WORDS, ProcessDied, ServedEnvs, ServerHandle

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["EnvProcess", "EnvProcesses"]


class EnvProcesses(ServedEnvs):
    """N environments with a process each. `rlio.envs.process_stepper.ProcessStepper` steps them.

    Args:
        make: Makes an environment from its index and whether it replaces a failed one.
        num_envs: Number of environments.
        check: Check the first reset and the first step of each.

    Raises:
        SchemaError: The environments have different spaces.
        Exception: The error raised while making an environment.
    """

    def __init__(
        self, make: Callable[[int, bool], gym.Env[Any, Any]], *, num_envs: int, check: bool = False
    ) -> None:
        super().__init__(num_envs)
        self._selector = selectors.DefaultSelector()
        # Any: gymnasium's wrapper is annotated for functions without arguments.
        function: Any = make
        self._make, self._check = CloudpickleWrapper(function), check
        self._context = multiprocessing.get_context()
        self._make_all()

    def _start(self, env: int) -> ServerHandle:
        work = (env, self._make, {"spaces": self._spaces, "check": self._check})
        process = EnvProcess(env, work, self._context)
        self._selector.register(process.pipe, selectors.EVENT_READ, env)
        return process

    def _let_go(self, server: ServerHandle) -> None:
        assert isinstance(server, EnvProcess)
        self._selector.unregister(server.pipe)
        super()._let_go(server)

    def _wait(self, timeout: float | None) -> list[int]:
        return [key.data for key, _ in self._selector.select(timeout)]

    def close_extras(self, **kwargs: Any) -> None:
        super().close_extras(**kwargs)
        self._selector.close()


class EnvProcess(ServerHandle):
    """Handle of the process of environment ``index``.

    Args:
        index: Index of the environment.
        work: Arguments of `_serve` after the ends of the pipe.
        context: Context of `multiprocessing`.
    """

    def __init__(self, index: int, work: tuple[Any, ...], context: Any) -> None:
        super().__init__(index)
        # Any: `Pipe` gives another class on each platform.
        self.pipe: Any
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self.pipe, *work), name=f"rlio-env-{index}", daemon=True
        )
        try:
            with clear_mpi_env_vars():
                self._process.start()
        finally:
            # Else the pipe would stay open, and the end of the process would go unnoticed.
            theirs.close()

    def send(self, command: str, *arguments: Any) -> None:
        try:
            self.pipe.send((command, arguments))
        except (BrokenPipeError, ConnectionError, OSError) as error:
            raise self._died() from error

    def is_ready(self, timeout: float | None) -> bool:
        return bool(self.pipe.poll(timeout))

    def receive(self) -> Any:
        try:
            answer, error = self.pipe.recv()
        except (EOFError, ConnectionError, OSError) as gone:
            raise self._died() from gone
        if error is not None:
            raise error
        return answer

    def _died(self) -> ProcessDied:
        self._process.join(LAST_WORDS)
        code = self._process.exitcode
        return self.died(f"exit code {code}" if code is None or code >= 0 else f"killed by signal {-code}")

    def tell_to_end(self) -> None:
        with suppress(ConnectionError, OSError):  # The process is gone or ending.
            self.pipe.send(("close", ()))

    def stop(self, *, kill: bool = False) -> None:
        self.pipe.close()
        if not kill:
            self._process.join(LAST_WORDS)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._process.close()


def _serve(
    pipe: Connection,
    other_end: Connection,
    index: int,
    make: Any,
    options: dict[str, Any],
    kind: Callable[..., EnvServer] = EnvServer,
) -> None:
    """Make environment ``index`` in this process and step it on request, until told to end or the pipe
    closes.

    Args:
        pipe: Receives requests and sends answers.
        other_end: The parent's end of the pipe.
        index: Index of the environment.
        make: Wraps, for cloudpickle, the function that makes it; see `EnvServer`.
        options: Options of the server.
        kind: Makes the server.
    """
    other_end.close()
    # The parent handles interrupts and closes the pipe. freeze() keeps this process from freeing the parent's
    # objects.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    server = kind(index, make.fn, **options)
    with suppress(EOFError, ConnectionError):  # The parent closed the pipe, or died.
        while True:
            command, arguments = pipe.recv()
            if command == "close":
                break
            try:
                pipe.send(server.answer(command, arguments))
            except ConnectionError:
                raise
            # The answer cannot be pickled; no part of it was sent.
            except Exception as error:
                pipe.send((None, portable(error)))
    server.close()
