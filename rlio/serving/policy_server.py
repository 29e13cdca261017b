"""`PolicyServerInput`: serves a policy over HTTP to loops in other processes, and collects their experience.

Example:
    >>> from gymnasium.spaces import Box, Discrete
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> from rlio.serving.policy_client import PolicyClient
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

import contextlib
import hmac
import io
import json
import logging
import math
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, Final

from rlio.batch import Batch, SampleBatch
from rlio.batch.columns import Columns
from rlio.batch.npz import pack_arrays
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
from rlio.policies.policy import Policy
from rlio.reader import InputReader, JsonState
from rlio.sampling.callbacks import CallbacksLike
from rlio.sampling.config import RolloutConfig
from rlio.sampling.external_runner import ExternalRunner
from rlio.sampling.metrics import RolloutMetrics
from rlio.sampling.trajectories import with_sequences
from rlio.schemas import space_to_json
from rlio.schemas.json_columns import parse_json
from rlio.serving.policy_protocol import (
    PREFIX,
    REPORT_ID,
    TIMESTEP,
    WEIGHTS_SEQ_NO,
    batch_from_bytes,
    from_json,
    to_json,
)
from rlio.serving.reported_rows import ReportedRows
from rlio.support.forks import Owner
from rlio.support.options import check_count, check_number, set_options

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["PolicyServerInput", "ServerLimits"]

logger: logging.Logger = logging.getLogger("rlio")

# Seconds between the server's checks whether it must end.
_POLL_SECONDS: Final = 0.05
# Seconds of silence, in a body or between requests, after which an authenticated client counts as gone.
_SILENCE_SECONDS: Final = 300.0
# Seconds between searches for episodes whose clients are gone.
_LOOK_SECONDS: Final = 1.0
_MOST_NAME: Final = 256
_MOST_DIGITS: Final = 18
_STATUS: Final[dict[type[RlioError], int]] = {
    ClosedError: 503,
    EnvError: 503,
    UnsafeData: 413,
    UnknownName: 404,
}


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits on what clients may use. A request beyond a limit is refused, and none of it is kept.

    Attributes:
        request_bytes: Bytes of one request.
        waiting_bytes: Bytes of reported rows that are not sampled yet: a client that reports more waits.
        connections: Simultaneous connections.
        head_seconds: Seconds for the head of a request, which has the token. They count from connecting, or
            from the first byte of a later request, even if bytes keep arriving.
        episodes: Simultaneous episodes with remote inference.
        episode_seconds: An episode with remote inference is abandoned if its client has been silent for so
            long, and is not waiting for an action; None: never. The episode then has no end. In complete mode
            its rows are dropped, otherwise the row of its last action.

    Raises:
        OptionError: A limit is not above 0.
    """

    request_bytes: int = 64 << 20
    waiting_bytes: int = 1 << 30
    connections: int = 1000
    head_seconds: float = 10.0
    episodes: int = 10_000
    episode_seconds: float | None = 3600.0

    def __post_init__(self) -> None:
        for option in fields(self):
            name, value = f"ServerLimits.{option.name}", getattr(self, option.name)
            checked: float | None
            if option.type == "int":
                checked = check_count(name, check_number(name, value, above=0), least=1)
            elif option.type == "float":
                checked = check_number(name, value, above=0, most=threading.TIMEOUT_MAX)
            else:
                checked = check_number(name, value, above=0, most=threading.TIMEOUT_MAX, none="no limit")
            set_options(self, **{option.name: checked})


class PolicyServerInput(InputReader):
    """Serves ``policy`` over HTTP, and gives the experience of its clients; endless.

    Clients with ``inference_mode="remote"`` get their actions here, while `sample` runs; waiting clients are
    answered together. Clients with ``"local"`` act in their own process, fetch weights now and then, and
    report rows. `rlio.serving.policy_protocol` describes the protocol. Nothing that a client sends can run
    code, and reported rows must fit the policy's spaces. Only a client that knows the `token` can send
    anything. The server trusts it with the names of all episodes, and with the truth of its reports. HTTP is
    not encrypted: for clients on other machines, put a TLS proxy in front, and give them the proxy's address.

    Metrics include the episodes of remote clients, and only the rows of local ones.

    Several threads may call it: see `rlio.InputReader`.

    Args:
        policy: Acts; bound to its spaces, unless ``spaces`` are given.
        spaces: (observation space, action space).
        host: Address to listen on; only clients on this machine reach 127.0.0.1.
        port: 0 takes a free port.
        token: Secret that clients must know; None makes one.
        config: As for `ExternalRunner`.
        callbacks: As for `ExternalRunner`.
        seed: As for `ExternalRunner`.
        timeout: Maximum seconds that a client waits for an action: use more than the longest pause between
            two calls of `sample`. Reports that find no room wait as long.
        idle_timeout: Seconds of sampling without a request of any client after which the data ends; None:
            never.
        limits: Limits on what clients may use.

    Attributes:
        url: Address for clients.
        token: Secret that clients must know.
        runner: The `ExternalRunner` of remote clients.
        weights_lock: The policy's `rlio.Policy.lock`, held while weights are read for a client.

    Raises:
        OptionError: The policy has no spaces, or the server cannot listen on the address.
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
        limits: ServerLimits | None = None,
    ) -> None:
        self.token: str = secrets.token_urlsafe(32) if token is None else token
        if not self.token.isascii() or len(self.token) < 8:
            raise OptionError("token: expected at least 8 ASCII characters, hard to guess; None makes one")
        self.limits: ServerLimits = ServerLimits() if limits is None else limits
        observation_space, action_space = policy.spaces if spaces is None else spaces
        self._loop = _Elsewhere(observation_space, action_space)
        self.runner: ExternalRunner = ExternalRunner(
            self._loop, policy, config=config, callbacks=callbacks, seed=seed, timeout=timeout
        )
        self._timeout, self._idle_timeout = timeout, idle_timeout
        self._heard_at = self._looked_at = time.monotonic()
        self._reported = ReportedRows(observation_space, action_space)
        self.weights_lock: threading.RLock = policy.lock
        #: The process that owns the server's threads.
        self._owner = Owner()
        try:
            self._server = _Server((host, port), self)
        except (OSError, OverflowError) as error:
            self.interrupt()
            self.runner.stop()
            raise OptionError(f"host={excerpt(host)}, port={port}: cannot listen there: {error}") from error
        self.url: str = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="rlio-policy-server", daemon=True
        )
        self._thread.start()
        logger.info("a policy is served on %s", self.url)

    def _describe(self) -> Iterator[str]:
        yield repr(self.url)
        yield repr(self.runner)

    @property
    def policy(self) -> Policy:
        """The acting policy."""
        return self.runner.policy

    # ---- sampling ----

    def _next(self) -> Batch:
        self._owner.check(type(self).__name__)
        runner = self.runner
        runner.metrics.begin()
        # Without sampling no client was answered, so silence counts only from now on.
        self._heard_at = max(self._heard_at, time.monotonic())
        runner.episodes.serve(0.0)  # Otherwise clients waiting for actions would wait for reporting clients.
        runner.serve_until(self._has_enough)
        # Alternate between both kinds of batch: `hand_out` leaves no rows.
        if runner.rows_ready >= self._wanted or (runner.rows_ready and not self._reported):
            batch = runner.hand_out()
        elif self._reported:
            with runner.episodes.changed:
                batch = self._reported.pop()
                runner.episodes.changed.notify_all()
            batch = runner.postprocessed(batch)
        else:
            raise EndOfData(f"no client has sent a request for {self._idle_timeout} s (idle_timeout)")
        return with_sequences(batch, max_seq_len=runner.policy.max_seq_len)

    def _has_enough(self) -> bool:
        now, silence = time.monotonic(), self.limits.episode_seconds
        if silence is not None and now - self._looked_at > min(_LOOK_SECONDS, silence):
            self._looked_at = now
            gone = self.runner.abandon_silent(silence)
            if gone:
                logger.warning("clients of %d episodes are gone: %s", len(gone), excerpt(gone))
        is_idle = self._idle_timeout is not None and now - self._heard_at > self._idle_timeout
        return bool(self._reported) or is_idle or self.runner.rows_ready >= self._wanted

    @property
    def _wanted(self) -> int:
        return self.runner.config.fragment_steps

    def get_metrics(self) -> RolloutMetrics:
        """Metrics since the last call; see `ExternalRunner.get_metrics`."""
        return self.runner.get_metrics()

    def _position(self) -> JsonState:
        runner = self.runner.state_dict()
        with self.runner.episodes.changed:
            runner["steps_dropped"] += self._reported.rows
        return {"runner": runner}

    def _seek(self, position: JsonState) -> None:
        with self.runner.episodes.changed:
            self.runner.load_state_dict(position["runner"])
            self.runner.episodes.progress.timesteps += self._reported.rows

    def interrupt(self) -> None:
        """Wake waiting clients and a waiting `sample`; see `InputReader`."""
        if not self._owner.is_here:
            return
        self._loop.over.set()
        self.runner.interrupt()

    def _close(self) -> None:
        if not self._owner.is_here:
            self._server.socket.close()  # The fork's copy; the parent continues.
            return
        self._server.shutdown()
        self._server.server_close()
        self.interrupt()
        self.runner.stop()
        self._server.hang_up()

    # ---- requests of clients ----

    def answer(
        self, command: str, body: bytes, report_id: str | None = None
    ) -> tuple[str, bytes, dict[str, str]]:
        """Execute a client's command; called by the server's threads.

        Returns:
            Content type, content and headers of the answer.

        Raises:
            RlioError: The command failed.
        """
        self._check_open()
        self._heard_at = time.monotonic()
        if command == "report_samples":
            self._report(batch_from_bytes(body), report_id)
            return _json({})
        told = _fields(command, body)
        if command == "get_weights":
            return self._weights()
        if command == "get_spaces":
            observation, action = self.policy.spaces
            spaces = {"observation": space_to_json(observation), "action": space_to_json(action)}
            config = self.runner.config
            return _json({**spaces, "explore": config.explore, "infos": config.record_infos})
        if command == "start_episode" and self.runner.episodes.episodes_running >= self.limits.episodes:
            raise EnvError(f"{self.limits.episodes} episodes run: end some, or raise ServerLimits.episodes")
        return _json(_COMMANDS[command](self._loop, told))

    def _report(self, batch: SampleBatch, report_id: str | None) -> None:
        if report_id is not None and len(report_id) > _MOST_NAME:
            raise SchemaError(f"the header {REPORT_ID} is longer than {_MOST_NAME} characters")
        episodes, reported = self.runner.episodes, self._reported
        batch.pop(Columns.UNROLL_ID, None)  # Each client has its own numbers.
        with episodes.changed:
            reported.check(batch)
            if not episodes.changed.wait_for(self._has_room, self._timeout):
                raise EnvError(
                    f"{reported.waiting_bytes} bytes of reported rows wait, and were not sampled within "
                    f"{self._timeout} s: send these again later"
                )
            self._check_open()
            batch[Columns.UNROLL_ID] = episodes.unroll_ids(batch[Columns.EPS_ID])
            if reported.add(batch, report_id):
                episodes.progress.timesteps += len(batch)
                episodes.changed.notify_all()

    def _has_room(self) -> bool:
        return self._closed or self._reported.waiting_bytes < self.limits.waiting_bytes

    def _weights(self) -> tuple[str, bytes, dict[str, str]]:
        with self.weights_lock:
            weights, version = self.policy.get_weights(), self.policy.weights_seq_no
        steps = max(self.runner.env_steps, self.policy.global_vars.timestep)
        headers = {WEIGHTS_SEQ_NO: str(version), TIMESTEP: str(steps)}
        return "application/octet-stream", pack_arrays(weights), headers


class _Elsewhere(ExternalEnv):
    """Stands for the clients, which run the loop."""

    def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        super().__init__(observation_space, action_space)
        self.over = threading.Event()

    def run(self) -> None:
        self.over.wait()


def _start(loop: ExternalEnv, told: Mapping[str, Any]) -> dict[str, Any]:
    name = told.get("episode_id")
    if name is not None and not (isinstance(name, str) and len(name) <= _MOST_NAME):
        raise SchemaError(
            f"episode_id={excerpt(name)}: expected a string of at most {_MOST_NAME} characters, or null"
        )
    return {"episode_id": loop.start_episode(name, training_enabled=_flag(told, "training_enabled", True))}


def _get_action(loop: ExternalEnv, told: Mapping[str, Any]) -> dict[str, Any]:
    return {"action": to_json(loop.get_action(_episode(told), from_json(told["observation"])))}


def _log_action(loop: ExternalEnv, told: Mapping[str, Any]) -> dict[str, Any]:
    columns = _mapping(told, "columns") or {}
    for name in _OWN_NAMES & columns.keys():  # They would be taken for the method's own arguments.
        raise SchemaError("log_action() got a column that the policy does not have", column=name)
    observation, action = from_json(told["observation"]), from_json(told["action"])
    loop.log_action(_episode(told), observation, action, **columns)
    return {}


def _log_returns(loop: ExternalEnv, told: Mapping[str, Any]) -> dict[str, Any]:
    reward, info = told["reward"], _mapping(told, "info")
    if not isinstance(reward, (int, float)) or isinstance(reward, bool):
        raise SchemaError(f"reward={excerpt(reward)}: expected a number")
    loop.log_returns(_episode(told), reward, info)
    return {}


def _end(loop: ExternalEnv, told: Mapping[str, Any]) -> dict[str, Any]:
    observation = from_json(told.get("observation"))
    loop.end_episode(_episode(told), observation, truncated=_flag(told, "truncated", False))
    return {}


_COMMANDS: Final[dict[str, Callable[[ExternalEnv, Mapping[str, Any]], dict[str, Any]]]] = {
    "start_episode": _start,
    "get_action": _get_action,
    "log_action": _log_action,
    "log_returns": _log_returns,
    "end_episode": _end,
}
#: Command -> its fields, those that it needs first.
_FIELDS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "start_episode": ((), ("episode_id", "training_enabled")),
    "get_action": (("episode_id", "observation"), ()),
    "log_action": (("episode_id", "observation", "action"), ("columns",)),
    "log_returns": (("episode_id", "reward"), ("info",)),
    "end_episode": (("episode_id",), ("observation", "truncated")),
    "get_spaces": ((), ()),
    "get_weights": ((), ()),
}
_OWN_NAMES: Final = {"self", "episode_id", "observation", "action"}


def _fields(command: str, body: bytes) -> dict[str, Any]:
    """The fields of a command's request."""
    if command not in _FIELDS:
        raise UnknownName(
            f"there is no command {excerpt(command)}: expected one of {', '.join(sorted(_FIELDS))} or "
            "report_samples"
        )
    told = _object(body)
    needed, further = _FIELDS[command]
    missing, unknown = [name for name in needed if name not in told], told.keys() - {*needed, *further}
    if missing or unknown:
        wrong = f"has the unknown field {excerpt(min(unknown))}" if unknown else f"lacks {missing[0]}"
        raise SchemaError(
            f"{command} {wrong}: expected the fields {', '.join((*needed, *further)) or 'none'}"
        )
    return told


def _mapping(told: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """An optional field that is an object; packed arrays are objects too until they are unpacked."""
    value = from_json(told.get(name))
    if not isinstance(value, dict | None):
        raise SchemaError(f"{name}={excerpt(value)}: expected an object, or null")
    return value


def _flag(told: Mapping[str, Any], name: str, otherwise: bool) -> bool:
    value = told.get(name)
    if value is not None and not isinstance(value, bool):
        raise SchemaError(f"{name}={excerpt(value)}: expected true or false")
    return otherwise if value is None else value


def _episode(told: Mapping[str, Any]) -> str:
    name = told.get("episode_id")
    if not isinstance(name, str):
        raise SchemaError(f"episode_id={excerpt(name)}: expected the string that start_episode returned")
    return name


def _object(body: bytes) -> dict[str, Any]:
    try:
        told = parse_json(body or b"{}")
    except ValueError as error:
        raise SchemaError(f"the request is not JSON: {error}") from error
    if not isinstance(told, dict):
        raise SchemaError(f"the request is {excerpt(told)}: expected a JSON object")
    return told


def _json(value: dict[str, Any]) -> tuple[str, bytes, dict[str, str]]:
    return "application/json", json.dumps(value, allow_nan=False).encode(), {}


class _Server(socketserver.ThreadingTCPServer):
    """One thread for each connection; connections stay open between requests."""

    daemon_threads = True
    allow_reuse_address = True
    # Connections that may wait to be accepted: the workers of a cluster connect at once.
    request_queue_size = 1024
    # The runner wakes threads that wait for an action. Threads that wait for a request end with the
    # interpreter.
    block_on_close = False

    def __init__(self, address: tuple[str, int], reader: PolicyServerInput) -> None:
        self.reader = reader
        #: The open connections, and until when each must have sent the head of its request.
        self._connections: dict[Any, float] = {}
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            has_room = len(self._connections) < self.reader.limits.connections
            if has_room:
                self._connections[request] = time.monotonic() + self.reader.limits.head_seconds
        if not has_room:
            logger.warning("a connection is refused: %d are open already", self.reader.limits.connections)
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def await_head(self, connection: Any, seconds: float = math.inf) -> bool:
        """Set the deadline of the head of a request; returns whether the deadline before has not passed."""
        now = time.monotonic()
        with self._lock:
            is_in_time = self._connections[connection] > now
            self._connections[connection] = now + seconds
        return is_in_time

    def service_actions(self) -> None:
        """Hang up on connections whose heads take too long; `serve_forever` calls this regularly."""
        self.hang_up(until=time.monotonic(), how=socket.SHUT_RDWR)  # A part of a head gets no answer.

    def hang_up(self, until: float = math.inf, how: int = socket.SHUT_RD) -> None:
        """End threads that wait for the head of a request, if it is due by ``until``; others may finish."""
        with self._lock:
            for connection, due in self._connections.items():
                if due <= until:
                    with contextlib.suppress(OSError):  # It is closed already.
                        connection.shutdown(how)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.info("a connection has ended: %s", excerpt(repr(sys.exc_info()[1])))


class _Handler(BaseHTTPRequestHandler):
    """Reads requests, passes them to the reader, and sends answers and errors."""

    protocol_version = "HTTP/1.1"
    server_version = "rlio"
    sys_version = ""
    disable_nagle_algorithm = True
    timeout = _SILENCE_SECONDS
    server: _Server
    rfile: io.BufferedReader
    _is_later = False

    def handle_one_request(self) -> None:
        if self._is_later:  # The pause before a later head has no deadline.
            self.rfile.peek(1)
            self.server.await_head(self.connection, self.server.reader.limits.head_seconds)
        self._is_later = True
        super().handle_one_request()

    def do_POST(self) -> None:
        reader = self.server.reader
        # Before the body is read, and in the same time for wrong and right tokens.
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, f"Bearer {reader.token}".encode()):
            self._refuse(401, "UnsafeData", "this server needs the header Authorization: Bearer <its token>")
            return
        if not self.server.await_head(self.connection):
            self.close_connection = True  # The head may be cut off.
            return
        body = self._body()
        if body is None:
            return
        try:
            if not self.path.startswith(PREFIX):
                raise UnknownName(f"there is nothing at {excerpt(self.path)}: expected {PREFIX}<command>")
            command, report_id = self.path.removeprefix(PREFIX), self.headers.get(REPORT_ID)
            kind, content, headers = reader.answer(command, body, report_id)
        except RlioError as error:
            status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 400)
            self._say_error(status, type(error).__name__, str(error))
        except Exception as error:
            logger.exception("a request to %s failed", self.path)
            self._say_error(500, "EnvError", f"the server failed: {type(error).__name__}")
        else:
            self._say(200, kind, content, headers)

    def _body(self) -> bytes | None:
        """The request's body; None if it was refused, or the client is gone."""
        lengths = self.headers.get_all("Content-Length", [])
        # Otherwise a proxy and this server could see different ends of a request, and a client could
        # impersonate another.
        if len(lengths) != 1 or self.headers.get_all("Transfer-Encoding"):
            self._refuse(411, "SchemaError", "expected one Content-Length in the request, and no chunks")
            return None
        length, most = lengths[0], self.server.reader.limits.request_bytes
        if not (length.isascii() and length.isdecimal()):
            self._refuse(400, "SchemaError", f"Content-Length is {excerpt(length)}: expected a number")
            return None
        if len(length) > _MOST_DIGITS or int(length) > most:
            self._refuse(
                413, "UnsafeData", f"{excerpt(length)} bytes, more than ServerLimits.request_bytes={most}"
            )
            return None
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            self.close_connection = True
            return None
        return body

    def _refuse(self, status: int, name: str, message: str) -> None:
        """Answer a request without reading its body, and close the connection."""
        self.close_connection = True
        self._say_error(status, name, message)

    def _say_error(self, status: int, name: str, message: str) -> None:
        self._say(status, "application/json", json.dumps({"error": name, "message": message}).encode(), {})

    def _say(self, status: int, kind: str, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is not HTTP as expected here, in JSON; called by the base class."""
        # The base class has 501 for methods, and 505 for versions: the client's error, not the server's.
        status = {HTTPStatus.NOT_IMPLEMENTED: 405, HTTPStatus.HTTP_VERSION_NOT_SUPPORTED: 400}.get(
            HTTPStatus(code), int(code)
        )
        expected = f"expected POST {PREFIX}<command> of HTTP/1.1"
        self.request_version = self.protocol_version  # Otherwise a request without one gets no status line.
        self._refuse(status, "SchemaError", f"{excerpt(message or HTTPStatus(code).phrase)}: {expected}")

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("policy server: %s", format % args)
