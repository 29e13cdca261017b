"""`PolicyServerInput`: a policy behind HTTP, which loops elsewhere ask for actions, and what they experience.

Example:
    >>> from gymnasium.spaces import Box, Discrete
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> from rlio.rollout.policy_client import PolicyClient
    >>> policy = RandomPolicy()
    >>> policy.bind(Box(0.0, 9.0, (1,)), Discrete(2), seed=0)
    >>> server = PolicyServerInput(policy)
    >>> client = PolicyClient(server.url, server.token, inference_mode="local", policy=RandomPolicy())
    >>> name = client.start_episode()
    >>> for t in range(3):
    ...     action = client.get_action(name, [float(t)])
    ...     client.log_returns(name, 1.0)
    >>> client.end_episode(name, [3.0])
    >>> client.close()
    >>> server.sample(3)["obs"].ravel().tolist()
    [0.0, 1.0, 2.0]
    >>> server.close()
"""

from __future__ import annotations

import hmac
import io
import json
import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rlio.batch import SampleBatch
from rlio.columns import Columns
from rlio.envs.external import ExternalEnv
from rlio.errors import (
    ClosedError,
    EndOfData,
    EnvError,
    OptionError,
    RlioError,
    SchemaError,
    UnknownName,
    UnsafeData,
    excerpt,
)
from rlio.interfaces import Batch, InputReader, JsonState
from rlio.policies.policy import Policy
from rlio.rollout.callbacks import CallbacksLike
from rlio.rollout.config import RolloutConfig
from rlio.rollout.external_runner import ExternalRunner
from rlio.rollout.metrics import RolloutMetrics
from rlio.rollout.policy_protocol import PREFIX, WEIGHTS_SEQ_NO, batch_from_bytes, from_json, to_json
from rlio.rollout.trajectories import with_sequences
from rlio.schemas import space_to_json

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["PolicyServerInput"]

logger = logging.getLogger("rlio")

# How often the server looks whether it is to end.
_POLL_SECONDS: Final = 0.05
# A client that says nothing for so long in the middle of a request, or between two, is gone.
_SILENCE_SECONDS: Final = 300.0
_STATUS: Final[dict[type[RlioError], int]] = {
    ClosedError: 503,
    EnvError: 503,
    UnsafeData: 413,
    UnknownName: 404,
}


class PolicyServerInput(InputReader):
    """Serves ``policy`` over HTTP, and gives the experience of its clients; endless.

    Clients with ``inference_mode="remote"`` get their actions here, while `sample` runs: those who wait are
    answered together. Clients with ``"local"`` act by themselves, fetch weights now and then, and report
    rows. The protocol is in `rlio.rollout.policy_protocol`. Nothing that a client sends can run code, and all
    of it is checked; who may send anything is who knows the `token`. HTTP is not encrypted: to be reached
    from other machines, put a TLS proxy before it, and pass its address on.

    Args:
        policy: Acts; bound to its spaces, or they are given.
        spaces: (observation space, action space).
        host: Address to listen on; only this machine's clients reach 127.0.0.1.
        port: 0 takes a free one.
        token: What clients must know; None makes one.
        config: As for `ExternalRunner`.
        callbacks: Likewise.
        seed: Likewise.
        timeout: Seconds that a client waits for an action at most: longer than the longest pause between two
            calls of `sample`.
        idle_timeout: Seconds without a word of any client after which the data ends; None: never.
        max_request_bytes: Larger requests are refused.

    Attributes:
        url: Where clients connect to.
        token: What they must know.
        runner: The `ExternalRunner` of remote clients.

    Raises:
        OptionError: The policy has no spaces, or the address cannot be listened on.
    """

    replayable = False

    def __init__(
        self,
        policy: Policy,
        *,
        spaces: tuple[gym.Space[Any], gym.Space[Any]] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        config: RolloutConfig | None = None,
        callbacks: CallbacksLike = None,
        seed: int | None = None,
        timeout: float = 60.0,
        idle_timeout: float | None = None,
        max_request_bytes: int = 64 << 20,
    ) -> None:
        self.token = secrets.token_urlsafe(32) if token is None else token
        if not self.token.isascii() or len(self.token) < 8:
            raise OptionError("token: at least 8 ASCII characters, which nobody can guess; None makes one")
        self.max_request_bytes = max_request_bytes
        observation_space, action_space = policy.spaces if spaces is None else spaces
        self._loop = _Elsewhere(observation_space, action_space)
        self.runner = ExternalRunner(
            self._loop, policy, config=config, callbacks=callbacks, seed=seed, timeout=timeout
        )
        self._idle_timeout = idle_timeout
        self._heard_at = time.monotonic()
        self._reported: deque[SampleBatch] = deque()
        #: Held while weights are read, or set.
        self.weights_lock = threading.Lock()
        try:
            self._server = _Server((host, port), self)
        except OSError as error:
            self.runner.stop()
            raise OptionError(f"host={excerpt(host)}, port={port} cannot be listened on: {error}") from error
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="rlio-policy-server", daemon=True
        )
        self._thread.start()
        logger.info("a policy is served on %s", self.url)

    @property
    def policy(self) -> Policy:
        """Who acts."""
        return self.runner.policy

    # ---- what is sampled ----

    def _next(self) -> Batch:
        runner = self.runner
        runner.metrics.begin()
        runner.serve_until(
            lambda: bool(self._reported) or self._is_idle() or runner.rows_ready >= self._wanted
        )
        if self._reported:
            batch = runner.postprocessed(self._reported.popleft())
        elif runner.rows_ready:
            batch = runner.hand_out()
        else:
            raise EndOfData(f"no client has said a word for {self._idle_timeout} s (idle_timeout)")
        return with_sequences(batch, max_seq_len=runner.policy.max_seq_len)

    @property
    def _wanted(self) -> int:
        return self.runner.config.fragment_steps

    def _is_idle(self) -> bool:
        return self._idle_timeout is not None and time.monotonic() - self._heard_at > self._idle_timeout

    def get_metrics(self) -> RolloutMetrics:
        """What happened since the last call; see `ExternalRunner.get_metrics`."""
        return self.runner.get_metrics()

    def _position(self) -> JsonState:
        return {"runner": self.runner.state_dict()}

    def _seek(self, position: JsonState) -> None:
        self.runner.load_state_dict(position["runner"])

    def _close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._loop.over.set()
        self.runner.stop()

    # ---- what clients say ----

    def answer(self, command: str, body: bytes) -> tuple[str, bytes, dict[str, str]]:
        """Do what a client asks for; called by the server's threads.

        Returns:
            Content type, content and headers of the answer.

        Raises:
            RlioError: It cannot be done.
        """
        self._heard_at = time.monotonic()
        if command == "report_samples":
            self._report(batch_from_bytes(body))
            return _json({})
        if command == "get_weights":
            return self._weights()
        told = _object(body)
        if command == "get_spaces":
            observation, action = self.policy.spaces
            return _json({"observation": space_to_json(observation), "action": space_to_json(action)})
        try:
            do = _COMMANDS[command]
        except KeyError:
            raise UnknownName(
                f"there is no command {excerpt(command)}: there are {', '.join(sorted(_COMMANDS))}, "
                "get_spaces, get_weights and report_samples"
            ) from None
        return _json(do(self._loop, told))

    def _report(self, batch: SampleBatch) -> None:
        for name in (Columns.OBS, Columns.ACTIONS, Columns.REWARDS, Columns.EPS_ID, Columns.T):
            if name not in batch:
                raise SchemaError("reported rows lack this column", column=name)
        if len(batch):
            with self.runner.episodes.changed:
                self._reported.append(batch)
                self.runner.episodes.timesteps += len(batch)
                self.runner.episodes.changed.notify_all()

    def _weights(self) -> tuple[str, bytes, dict[str, str]]:
        with self.weights_lock:
            weights, version = self.policy.get_weights(), self.policy.weights_seq_no
        buffer = io.BytesIO()
        np.savez(buffer, **weights)  # type: ignore[arg-type]  # The stub takes the keywords for allow_pickle.
        return "application/octet-stream", buffer.getvalue(), {WEIGHTS_SEQ_NO: str(version)}


class _Elsewhere(ExternalEnv):
    """Stands for the clients: its loop is theirs."""

    def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        super().__init__(observation_space, action_space)
        self.over = threading.Event()

    def run(self) -> None:
        self.over.wait()


def _start(loop: ExternalEnv, told: Mapping[str, Any]) -> dict[str, Any]:
    name = told.get("episode_id")
    if name is not None and not isinstance(name, str):
        raise SchemaError(f"episode_id={excerpt(name)}: expected a string or null")
    return {
        "episode_id": loop.start_episode(name, training_enabled=told.get("training_enabled") is not False)
    }


def _get_action(loop: ExternalEnv, told: Mapping[str, Any]) -> dict[str, Any]:
    return {"action": to_json(loop.get_action(_episode(told), from_json(told.get("observation"))))}


def _log_action(loop: ExternalEnv, told: Mapping[str, Any]) -> dict[str, Any]:
    columns = told.get("columns") or {}
    if not isinstance(columns, dict):
        raise SchemaError(f"columns={excerpt(columns)}: expected an object of numbers by column")
    observation, action = from_json(told.get("observation")), from_json(told.get("action"))
    loop.log_action(_episode(told), observation, action, **from_json(columns))
    return {}


def _log_returns(loop: ExternalEnv, told: Mapping[str, Any]) -> dict[str, Any]:
    reward, info = told.get("reward"), told.get("info")
    if not isinstance(reward, (int, float)) or not (info is None or isinstance(info, dict)):
        raise SchemaError(
            f"reward={excerpt(reward)}, info={excerpt(info)}: expected a number, an object or null"
        )
    loop.log_returns(_episode(told), reward, info)
    return {}


def _end(loop: ExternalEnv, told: Mapping[str, Any]) -> dict[str, Any]:
    observation = from_json(told.get("observation"))
    loop.end_episode(_episode(told), observation, truncated=told.get("truncated") is True)
    return {}


_COMMANDS: Final[dict[str, Callable[[ExternalEnv, Mapping[str, Any]], dict[str, Any]]]] = {
    "start_episode": _start,
    "get_action": _get_action,
    "log_action": _log_action,
    "log_returns": _log_returns,
    "end_episode": _end,
}


def _episode(told: Mapping[str, Any]) -> str:
    name = told.get("episode_id")
    if not isinstance(name, str):
        raise SchemaError(f"episode_id={excerpt(name)}: expected the string that start_episode gave")
    return name


def _object(body: bytes) -> dict[str, Any]:
    try:
        told = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"the request is no JSON: {error}") from error
    if not isinstance(told, dict):
        raise SchemaError(f"the request is {excerpt(told)}: expected a JSON object")
    return told


def _json(value: dict[str, Any]) -> tuple[str, bytes, dict[str, str]]:
    return "application/json", json.dumps(value).encode(), {}


class _Server(ThreadingHTTPServer):
    """One thread a connection; connections are kept."""

    daemon_threads = True
    # Threads that wait for an action are let go by the runner, and those that wait for a request end with
    # the interpreter.
    block_on_close = False

    def __init__(self, address: tuple[str, int], reader: PolicyServerInput) -> None:
        self.reader = reader
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    """Reads requests, lets the reader answer, and says what went wrong."""

    protocol_version = "HTTP/1.1"
    timeout = _SILENCE_SECONDS
    server: _Server

    def setup(self) -> None:
        super().setup()
        # Answers are small, and somebody waits for each of them.
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_POST(self) -> None:
        reader = self.server.reader
        # Before a byte of the body is looked at, and taking as long for a wrong token as for a right one.
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, f"Bearer {reader.token}".encode()):
            self._refuse(401, "UnsafeData", "this server wants the header Authorization: Bearer <its token>")
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self._refuse(411, "SchemaError", "the request does not say its Content-Length")
            return
        if int(length) > reader.max_request_bytes:
            self._refuse(
                413, "UnsafeData", f"{length} bytes, more than max_request_bytes={reader.max_request_bytes}"
            )
            return
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            self.close_connection = True
            return
        try:
            kind, content, headers = reader.answer(self.path.removeprefix(PREFIX), body)
        except RlioError as error:
            status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 400)
            self._say_error(status, type(error).__name__, str(error))
        except Exception as error:
            logger.exception("a request to %s failed", self.path)
            self._say_error(500, "EnvError", f"the server failed: {type(error).__name__}")
        else:
            self._say(200, kind, content, headers)

    def _refuse(self, status: int, name: str, message: str) -> None:
        """Answer a request whose body was not read, and hang up."""
        self.close_connection = True
        self._say_error(status, name, message)

    def _say_error(self, status: int, name: str, message: str) -> None:
        self._say(status, "application/json", json.dumps({"error": name, "message": message}).encode(), {})

    def _say(self, status: int, kind: str, content: bytes, headers: Mapping[str, str]) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            if self.close_connection:
                self.send_header("Connection", "close")
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
        except OSError as error:
            logger.info("a client is gone: %s", error)
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("policy server: %s", format % args)
