"""`PolicyClient`: plays episodes with a policy that a `PolicyServerInput` serves."""

from __future__ import annotations

import http.client
import io
import json
import logging
import threading
import time
import urllib.parse
import zipfile
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Literal, Self

import numpy as np

from rlio.errors import ClosedError, CorruptData, EnvError, OptionError, RlioError, excerpt
from rlio.policies.policy import Policy
from rlio.policies.weights import update_weights
from rlio.rollout.external_episodes import ExternalEpisodes
from rlio.rollout.policy_protocol import (
    PREFIX,
    WEIGHTS_SEQ_NO,
    batch_to_bytes,
    error_class,
    from_json,
    to_json,
)
from rlio.schemas import space_from_json

__all__ = ["PolicyClient"]

logger = logging.getLogger("rlio")

_JSON: Final = "application/json"
# Servers and proxies close connections that say nothing for long; ours after 300 s.
_IDLE_SECONDS: Final = 30.0


class PolicyClient:
    """Asks a server for actions, or acts with its weights and reports what came of it. Thread-safe.

    Args:
        url: The server's `PolicyServerInput.url`.
        token: Its token.
        inference_mode: ``"remote"``: every action is asked for. ``"local"``: ``policy`` acts here, with
            weights of the server that are fetched anew every ``update_seconds``; rows are sent when there are
            ``report_rows``, at the end of an episode, and by `close`.
        policy: For local inference: as the server's; bound to the server's spaces here.
        update_seconds: Age at which weights are fetched anew, before the next action.
        report_rows: See above.
        timeout: Seconds that the server may take for an answer; more than its own timeout for actions.

    Raises:
        OptionError: The options do not go together.
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
        if inference_mode not in ("remote", "local"):
            raise OptionError(f"inference_mode={excerpt(inference_mode)}: 'remote' or 'local'")
        if (policy is None) == (inference_mode == "local"):
            raise OptionError("a policy is for inference_mode='local', which needs one")
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise OptionError(f"url={excerpt(url)}: expected http://HOST:PORT, such as PolicyServerInput.url")
        self._parts, self._token, self._timeout = parts, token, timeout
        self._update_seconds, self._report_rows = update_seconds, report_rows
        self._connections = threading.local()
        self._lock = threading.RLock()
        self._closed = False
        self._episodes: ExternalEpisodes | None = None
        self._updated_at = -float("inf")
        if policy is not None:
            spaces = self._call("get_spaces", {})
            policy.bind(space_from_json(spaces["observation"]), space_from_json(spaces["action"]))
            self._episodes = ExternalEpisodes(policy, immediate=True)
            self.update_policy_weights()

    # ---- episodes ----

    def start_episode(self, episode_id: str | None = None, *, training_enabled: bool = True) -> str:
        """Begin an episode and return its name; see `ExternalEpisodes.start`."""
        self._check_open()
        if self._episodes is not None:
            return self._episodes.start(episode_id, training_enabled=training_enabled)
        told = self._call("start_episode", {"episode_id": episode_id, "training_enabled": training_enabled})
        return str(told["episode_id"])

    def get_action(self, episode_id: str, observation: Any) -> Any:
        """Report an observation and get the policy's action; see `ExternalEpisodes.get_action`.

        Returns:
            The action: nested as its space; with remote inference lists stand for arrays and tuples.
        """
        if self._episodes is not None:
            self._update_if_old()
            return self._episodes.get_action(episode_id, observation)
        told = self._call("get_action", {"episode_id": episode_id, "observation": to_json(observation)})
        return from_json(told["action"])

    def log_action(self, episode_id: str, observation: Any, action: Any, **columns: Any) -> None:
        """Report an observation and the action that was taken; see `ExternalEpisodes.log_action`."""
        if self._episodes is not None:
            self._update_if_old()
            self._episodes.log_action(episode_id, observation, action, **columns)
            return
        told = {"observation": to_json(observation), "action": to_json(action), "columns": to_json(columns)}
        self._call("log_action", {"episode_id": episode_id, **told})

    def log_returns(self, episode_id: str, reward: float, info: Mapping[str, Any] | None = None) -> None:
        """Report a reward for the last action; see `ExternalEpisodes.log_returns`."""
        if self._episodes is not None:
            self._episodes.log_returns(episode_id, reward, info)
            return
        told = {"reward": float(reward), "info": None if info is None else to_json(dict(info))}
        self._call("log_returns", {"episode_id": episode_id, **told})

    def end_episode(self, episode_id: str, observation: Any = None, *, truncated: bool = False) -> None:
        """Report the end of an episode; see `ExternalEpisodes.end`."""
        if self._episodes is not None:
            self._episodes.end(episode_id, observation, truncated=truncated)
            self._report()
            return
        told = {"observation": to_json(observation), "truncated": truncated}
        self._call("end_episode", {"episode_id": episode_id, **told})

    # ---- local inference ----

    def update_policy_weights(self) -> None:
        """Fetch the server's weights now.

        Raises:
            OptionError: Actions are chosen by the server.
        """
        if self._episodes is None:
            raise OptionError("with inference_mode='remote' there are no weights here: the server acts")
        content, headers = self._post("get_weights", b"", _JSON)
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as file:
                weights = {name: file[name] for name in file.files}
        except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
            raise CorruptData(f"the server's weights are no .npz file: {error}") from error
        with self._episodes.changed:
            update_weights(self._episodes.policy, weights, int(headers[WEIGHTS_SEQ_NO]))
        self._updated_at = time.monotonic()

    def _update_if_old(self) -> None:
        assert self._episodes is not None
        if time.monotonic() - self._updated_at > self._update_seconds:
            self.update_policy_weights()
        if self._episodes.rows_ready(whole=False) >= self._report_rows:
            self._report()

    def _report(self) -> None:
        """Send all rows that are there."""
        assert self._episodes is not None
        with self._lock:
            batch = self._episodes.take()
            if len(batch):
                self._post("report_samples", batch_to_bytes(batch), "application/octet-stream")

    # ---- the wire ----

    def _call(self, command: str, told: dict[str, Any]) -> dict[str, Any]:
        content, _ = self._post(command, json.dumps(told).encode(), _JSON)
        answer = json.loads(content)
        assert isinstance(answer, dict)
        return answer

    def _post(self, command: str, body: bytes, kind: str) -> tuple[bytes, Mapping[str, str]]:
        """Send a command, over this thread's connection.

        Raises:
            RlioError: The server says that it cannot be done; of the class it names.
            EnvError: It cannot be reached, or does not answer in time.
        """
        self._check_open()
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind}
        connection = self._connection()
        try:
            connection.request("POST", PREFIX + command, body, headers)
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            # Not sent again: the server may have done it.
            connection.close()
            raise EnvError(
                f"{command} was sent to {self._parts.netloc}, which did not answer: {error!r}; start the "
                "episode anew once the server is there"
            ) from error
        if response.status != 200:
            raise _error(response.status, content, self._parts.netloc)
        self._connections.used_at = time.monotonic()
        return content, dict(response.headers)

    def _connection(self) -> http.client.HTTPConnection:
        found: http.client.HTTPConnection | None = getattr(self._connections, "connection", None)
        if found is not None and time.monotonic() - self._connections.used_at > _IDLE_SECONDS:
            found.close()  # Which connects again: the server may have hung up meanwhile.
        if found is None:
            kind = (
                http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
            )
            found = kind(str(self._parts.hostname), self._parts.port, timeout=self._timeout)
            self._connections.connection, self._connections.used_at = found, time.monotonic()
        return found

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this PolicyClient is closed: make another one")

    def close(self) -> None:
        """Send what was not sent yet, and hang up. May be called again."""
        if self._closed:
            return
        try:
            if self._episodes is not None:
                self._report()
        finally:
            self._closed = True
            connection = getattr(self._connections, "connection", None)
            if connection is not None:
                connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _error(status: int, content: bytes, netloc: str) -> RlioError:
    """What a server's answer says went wrong, as the error that it was there."""
    try:
        told = json.loads(content)
        name, message = str(told["error"]), str(told["message"])
    except (ValueError, KeyError, TypeError):
        name, message = "EnvError", f"{netloc} answered {status}: {excerpt(content, 200)}"
    kind = error_class(name) or EnvError
    return kind(f"{message} (said by {netloc})")
