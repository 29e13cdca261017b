"""`PolicyClient`: plays episodes with a policy that a `PolicyServerInput` serves."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import threading
import time
import urllib.parse
import uuid
from collections import deque
from collections.abc import Mapping
from email.message import Message
from types import TracebackType
from typing import Any, Final, Literal, Self

from rlio.batch.columns import Columns
from rlio.batch.npz import unpack_arrays
from rlio.errors import (
    ClosedError,
    CorruptData,
    EnvError,
    MissingExtra,
    OptionError,
    RlioError,
    SchemaError,
    excerpt,
)
from rlio.policies.policy import Policy
from rlio.policies.weights import GlobalVars, update_weights
from rlio.sampling.external_episodes import ExternalEpisodes
from rlio.sampling.given_values import finite_reward
from rlio.schemas import space_from_json
from rlio.schemas.json_values import dump_value
from rlio.serving.policy_protocol import (
    PREFIX,
    REPORT_ID,
    TIMESTEP,
    WEIGHTS_SEQ_NO,
    error_class,
    from_json,
    pieces_to_bytes,
    to_json,
)
from rlio.support.options import check_choice, check_count, check_number, check_seconds

__all__ = ["PolicyClient"]

logger: logging.Logger = logging.getLogger("rlio")

_JSON: Final = "application/json"
_BINARY: Final = "application/octet-stream"
# Servers and proxies close connections that are silent for long; our server after 300 s.
_IDLE_SECONDS: Final = 30.0


class PolicyClient:
    """Gets actions from a server, or acts with the server's weights and reports the rows. Thread-safe.

    Args:
        url: The server's `PolicyServerInput.url`.
        token: The server's token.
        inference_mode: ``"remote"``: the server chooses every action. ``"local"``: ``policy`` acts here, with
            the server's weights, fetched again every ``update_seconds``. Rows are sent when there are
            ``report_rows``, at the end of an episode, and by `close`. Rows that the server could not take are
            sent again with the next ones; none arrives twice.
        policy: For local inference: a policy like the server's; it is bound to the server's spaces here.
        update_seconds: Age at which weights are fetched again, before the next action.
        report_rows: See ``inference_mode``.
        timeout: Seconds to wait for an answer; more than the server's own timeout for actions.

    Raises:
        OptionError: The options contradict each other.
        EnvError: The server cannot be reached.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        inference_mode: Literal["remote", "local"] = "remote",
        policy: Policy | None = None,
        update_seconds: float = 10.0,
        report_rows: int = 200,
        timeout: float = 90.0,
    ) -> None:
        check_choice("inference_mode", inference_mode, ("remote", "local"))
        if (policy is None) == (inference_mode == "local"):
            raise OptionError(
                "inference_mode='local' needs a policy, and 'remote' takes none: change one of them"
            )
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise OptionError(f"url={excerpt(url)}: expected http://HOST:PORT, such as PolicyServerInput.url")
        self._parts, self._token = parts, token
        self._timeout = check_number("timeout", timeout, above=0, of="seconds")
        self._update_seconds = check_seconds("update_seconds", update_seconds)
        self._report_rows = check_count("report_rows", report_rows, least=1, of="rows")
        self._prefix = parts.path.rstrip("/") + PREFIX
        #: Connections that no request uses, and since when; the most recently used one is taken first.
        self._idle: deque[tuple[http.client.HTTPConnection, float]] = deque()
        #: Held while weights are fetched, or rows are sent.
        self._lock = threading.RLock()
        #: Reports that the server has not confirmed: (id, content).
        self._unsent: deque[tuple[str, bytes]] = deque()
        self._closed = False
        self._records_infos = False
        self._episodes: ExternalEpisodes | None = None
        self._updated_at = -float("inf")
        if policy is not None:
            spaces = self._call("get_spaces", {}, "observation", "action")
            policy.bind(space_from_json(spaces["observation"]), space_from_json(spaces["action"]))
            self._records_infos = spaces.get("infos", False) is True
            self._episodes = ExternalEpisodes(
                policy,
                explore=spaces.get("explore", True) is True,
                infos=self._records_infos,
                immediate=True,
            )
            self.update_policy_weights()

    # ---- episodes ----

    def start_episode(self, episode_id: str | None = None, training_enabled: bool = True) -> str:
        """Begin an episode and return its name; see `ExternalEpisodes.start`."""
        self._check_open()
        if self._episodes is not None:
            return self._episodes.start(episode_id, training_enabled=training_enabled)
        told = {"episode_id": episode_id, "training_enabled": training_enabled}
        return str(self._call("start_episode", told, "episode_id")["episode_id"])

    def get_action(self, episode_id: str, observation: Any) -> Any:
        """Report an observation and get the policy's action; see `ExternalEpisodes.get_action`.

        Returns:
            The action, nested like its space; with remote inference, arrays and tuples are lists.
        """
        self._check_open()
        if self._episodes is not None:
            self._update_if_old()
            return self._episodes.get_action(episode_id, observation)
        told = {"episode_id": episode_id, "observation": observation}
        return from_json(self._call("get_action", told, "action")["action"])

    def log_action(self, episode_id: str, observation: Any, action: Any, **columns: Any) -> None:
        """Report an observation and the action taken; see `ExternalEpisodes.log_action`."""
        self._check_open()
        if self._episodes is not None:
            self._update_if_old()
            self._episodes.log_action(episode_id, observation, action, **columns)
            return
        told = {"observation": observation, "action": action, "columns": columns}
        self._call("log_action", {"episode_id": episode_id, **told})

    def log_returns(self, episode_id: str, reward: float, info: Mapping[str, Any] | None = None) -> None:
        """Report a reward for the last action; see `ExternalEpisodes.log_returns`.

        Raises:
            SchemaError: Also if the info has values that cannot be sent.
        """
        self._check_open()
        number = finite_reward(reward)
        if not isinstance(info, Mapping | None):
            raise SchemaError(f"info={excerpt(info)}: expected a mapping, or None", column=Columns.INFOS)
        told = None if info is None else dict(info)
        if self._episodes is not None:
            if told and self._records_infos:
                _check_info(told)
            self._episodes.log_returns(episode_id, number, told)
            return
        self._call("log_returns", {"episode_id": episode_id, "reward": number, "info": told})

    def end_episode(self, episode_id: str, observation: Any = None, *, truncated: bool = False) -> None:
        """Report the end of an episode; see `ExternalEpisodes.end`."""
        self._check_open()
        if self._episodes is not None:
            self._episodes.end(episode_id, observation, truncated=truncated)
            self._report()
            return
        told = {"observation": observation, "truncated": truncated}
        self._call("end_episode", {"episode_id": episode_id, **told})

    # ---- local inference ----

    def update_policy_weights(self) -> None:
        """Fetch the server's weights now.

        Raises:
            OptionError: The server chooses the actions.
        """
        if self._episodes is None:
            raise OptionError("with inference_mode='remote' there are no weights here: the server acts")
        # One fetch at a time: otherwise older weights could arrive after newer ones.
        with self._lock:
            content, headers = self._post("get_weights", b"", _JSON)
            version, steps = (
                _number(headers, name, self._parts.netloc) for name in (WEIGHTS_SEQ_NO, TIMESTEP)
            )
            weights = unpack_arrays(content, uri=self._parts.netloc)
            policy = self._episodes.policy
            with self._episodes.changed:
                # Older versions too: a restarted server begins at an earlier version.
                update_weights(policy, weights)
                policy.weights_seq_no = version
                policy.on_global_var_update(GlobalVars(steps))
            self._updated_at = time.monotonic()

    def _update_if_old(self) -> None:
        assert self._episodes is not None
        if self._is_old():
            with self._lock:
                if self._is_old():  # Another thread may have fetched them meanwhile.
                    self.update_policy_weights()
        if self._episodes.rows_ready(whole=False) >= self._report_rows:
            self._report()

    def _is_old(self) -> bool:
        return time.monotonic() - self._updated_at > self._update_seconds

    def _report(self) -> None:
        """Send all new rows, and those that the server could not take before."""
        assert self._episodes is not None
        with self._lock:
            batch = self._episodes.take()
            if len(batch):
                self._unsent += [(uuid.uuid4().hex, piece) for piece in pieces_to_bytes(batch)]
            while self._unsent:
                report_id, content = self._unsent[0]
                try:
                    self._post("report_samples", content, _BINARY, {REPORT_ID: report_id})
                except (EnvError, ClosedError):
                    raise  # Keep the report, and send it again later.
                except RlioError:
                    self._unsent.popleft()  # The server will never take it.
                    raise
                self._unsent.popleft()

    # ---- the wire ----

    def _call(self, command: str, told: dict[str, Any], *answers: str) -> dict[str, Any]:
        """Send a command with its fields; returns the answer, which has the fields ``answers``."""
        try:
            body = json.dumps(to_json(told), allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise SchemaError(f"{command}: {excerpt(told)} cannot be sent as JSON: {error}") from error
        content, _ = self._post(command, body, _JSON)
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or not answer.keys() >= set(answers):
            raise CorruptData(f"{self._parts.netloc} answered {excerpt(content)}: is it a PolicyServerInput?")
        return answer

    def _post(
        self, command: str, body: bytes, kind: str, more: Mapping[str, str] | None = None
    ) -> tuple[bytes, Message]:
        """Send a command over a connection that no other request uses.

        Raises:
            RlioError: The server reports an error; of the class that it names.
            EnvError: The server cannot be reached, or does not answer in time.
        """
        self._check_open()
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind, **(more or {})}
        connection = self._connection()
        try:
            connection.request("POST", self._prefix + command, body, headers)
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            # Not retried: the server may have executed the command.
            connection.close()
            raise EnvError(
                f"{command} was sent to {self._parts.netloc}, which did not answer: {error!r}; start a new "
                "episode when the server is back"
            ) from error
        self._idle.append((connection, time.monotonic()))
        if response.status != 200:
            raise _error(response.status, content, self._parts.netloc)
        return content, response.headers

    def _connection(self) -> http.client.HTTPConnection:
        """An idle connection, or a new one if there is none or all were idle for long."""
        with contextlib.suppress(IndexError):  # Another thread may take the last one.
            while True:
                found, since = self._idle.pop()
                if time.monotonic() - since <= _IDLE_SECONDS:
                    return found
                found.close()  # The server may have closed it meanwhile.
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(str(self._parts.hostname), self._parts.port, timeout=self._timeout)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this PolicyClient is closed: make a new one")

    def close(self) -> None:
        """Send unsent rows, and close the connections. May be called again.

        Raises:
            EnvError: The server does not take the rows, which are lost.
        """
        if self._closed:
            return
        try:
            if self._episodes is not None:
                self._report()
        except RlioError as error:
            error.add_note(
                f"this client is closed: its unreported rows are lost ({len(self._unsent)} reports)"
            )
            raise
        finally:
            self._closed = True
            for connection, _ in list(self._idle):
                connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_info(info: dict[str, Any]) -> None:
    """Refuse an info that cannot be reported, before it costs the other rows of its report."""
    try:
        dump_value(info)
    except SchemaError as error:
        raise SchemaError(str(error), column=Columns.INFOS) from error


def _number(headers: Message, name: str, netloc: str) -> int:
    """A header of a server's answer, as a whole number."""
    given = headers.get(name, "")
    if not (given.isascii() and given.isdecimal()):
        raise CorruptData(
            f"{netloc} answered with the header {name}: {excerpt(given)}, expected a whole number: is it a "
            "PolicyServerInput of this version?"
        )
    return int(given)


def _error(status: int, content: bytes, netloc: str) -> RlioError:
    """The error that a server's answer reports, as an exception of its class."""
    try:
        told = json.loads(content)
        name, message = str(told["error"]), str(told["message"])
    except (ValueError, KeyError, TypeError):
        name, message = "EnvError", f"{netloc} answered {status}: {excerpt(content, 200)}"
    kind = error_class(name)
    # MissingExtra takes other arguments than a message.
    if kind is None or issubclass(kind, MissingExtra):
        kind = EnvError
    return kind(f"{message} (reported by {netloc})")
