"""`PolicyServerInput`, `PolicyClient`: strangers, clients that vanish, and rows that arrive once."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from rlio import AsyncInput, RandomPolicy, RolloutConfig, SampleBatch, concat_samples
from rlio.errors import ClosedError, CorruptData, EndOfData, EnvError, OptionError, SchemaError
from rlio.policies.weights import GlobalVars
from rlio.serving import PolicyClient, PolicyServerInput
from rlio.serving.policy_protocol import batch_from_bytes, batch_to_bytes, from_json, to_json
from rlio.serving.policy_server import ServerLimits, _Server

AXES = str([0] * 99)
OBS, ACT = gym.spaces.Box(-1, 1e6, (2,), np.float32), gym.spaces.Discrete(50)


@pytest.fixture
def served() -> Iterator[Callable[..., PolicyServerInput]]:
    made: list[PolicyServerInput] = []

    def serve(*, spaces: Any = (OBS, ACT), **options: Any) -> PolicyServerInput:
        options.setdefault("config", RolloutConfig(rollout_fragment_length=1))
        made.append(PolicyServerInput(RandomPolicy(), spaces=spaces, **options))
        return made[-1]

    yield serve
    for server in made:
        server.close()


def said(server: PolicyServerInput, head: bytes, body: bytes = b"") -> tuple[int, bytes]:
    """Status and answer to a request as it is on the wire; 0 where the server hangs up."""
    with socket.create_connection(server._server.server_address[:2], timeout=60) as connection:
        token = b"Authorization: Bearer " + server.token.encode() + b"\r\n"
        connection.sendall(
            head.replace(b"TOKEN", token).replace(b"\n", b"\r\n").replace(b"\r\r", b"\r") + body
        )
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    return int(answer.split(b" ", 2)[1] if answer else 0), answer


def until(is_so: Callable[[], bool]) -> None:
    """Wait for what other threads do; it fails after a minute, and does not hang."""
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


def rows(number: int, count: int = 3, **other: Any) -> SampleBatch:
    """Reported rows as a `PolicyClient` with a `RandomPolicy` has them."""
    t = np.arange(count)
    obs = np.stack([np.full(count, number), t], 1).astype(np.float32)
    columns: dict[str, Any] = {
        "obs": obs,
        "actions": t % 50,
        "rewards": np.ones(count, np.float32),
        "new_obs": obs + np.float32([0, 1]),
        "terminateds": t == count - 1,
        "truncateds": np.zeros(count, bool),
        "eps_id": np.full(count, number),
        "t": t,
        "unroll_id": np.zeros(count, np.int64),
    }
    return SampleBatch({name: value for name, value in (columns | other).items() if value is not None})


# ---- the wire ----


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        (b"POST /v1/get_spaces HTTP/1.1\nTOKENContent-Length: 2\n\n", b"{}", 200),
        (b"POST /v1/get_spaces HTTP/1.1\nContent-Length: 2\n\n", b"{}", 401),
        (b"POST /v1/get_spaces HTTP/1.1\nAuthorization: Bearer \xff\nContent-Length: 2\n\n", b"{}", 401),
        (b"POST /v1/get_spaces HTTP/1.1\nTOKEN\n", b"", 411),
        (b"POST /v1/get_spaces HTTP/1.1\nTOKENContent-Length: 2\nContent-Length: 30\n\n", b"{}", 411),
        (b"POST /v1/get_spaces HTTP/1.1\nTOKENContent-Length: 2\nTransfer-Encoding: chunked\n\n", b"{}", 411),
        (b"POST /v1/get_spaces HTTP/1.1\nTOKENContent-Length: -2\n\n", b"{}", 400),
        (b"POST /v1/get_spaces HTTP/1.1\nTOKENContent-Length: +2\n\n", b"{}", 400),
        (b"POST /v1/get_spaces HTTP/1.1\nTOKENContent-Length: \xb2\n\n", b"{}", 400),
        (b"POST /v1/get_spaces HTTP/1.1\nTOKENContent-Length: 9999999999\n\n", b"{}", 413),
        (b"POST /v1/get_spaces HTTP/1.1\nTOKENContent-Length: " + b"9" * 5000 + b"\n\n", b"{}", 413),
        (b"POST /v1/get_spaces HTTP/1.1\nTOKENContent-Length: 9\n\n", b"{}", 0),
        (b"GET /v1/get_spaces HTTP/1.1\nTOKEN\n", b"", 405),
    ],
)  # fmt: skip
def test_requests_begin_and_end_where_they_say(served: Any, head: bytes, body: bytes, status: int) -> None:
    server = served()
    found, answer = said(server, head, body)
    assert found == status, answer
    assert b"Python" not in answer
    assert answer.count(b"HTTP/1.1 ") == (status > 0)


def test_no_more_connections_than_there_may_be(served: Any) -> None:
    server = served(limits=ServerLimits(connections=2))
    held = [socket.create_connection(server._server.server_address[:2], timeout=60) for _ in range(2)]
    with socket.create_connection(server._server.server_address[:2], timeout=60) as third:
        assert third.recv(1) == b""
    for connection in held:
        connection.close()
    until(lambda: not server._server._connections)
    with PolicyClient(server.url, server.token) as client:
        client.start_episode()


HEAD = b"POST /v1/get_spaces HTTP/1.1\r\nX-Slow: " + b"a" * 1000


def test_clients_that_send_a_byte_now_and_then_keep_nobody_out(served: Any) -> None:
    """The time limit was one of each byte: so many sockets as there may be kept all clients out, for ever."""
    server = served(limits=ServerLimits(connections=20, head_seconds=0.5))
    over = threading.Event()

    def send_slowly(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            for byte in HEAD:
                connection.sendall(bytes([byte]))
                if over.wait(0.1):
                    return

    address = server._server.server_address[:2]
    threads = []
    for _ in range(20):
        connection = socket.create_connection(address, timeout=60)
        threads.append(in_thread(lambda connection=connection: send_slowly(connection)))  # type: ignore[misc]
    # On a busy machine one may be cut off before the last has come.
    until(lambda: len(server._server._connections) == 20 or not all(each.is_alive() for each in threads))
    # Each of them sends bytes all the time, far more often than every half second, and for 100 seconds.
    until(lambda: _is_let_in(server))
    over.set()
    for thread in threads:
        thread.join(60)


def _is_let_in(server: PolicyServerInput) -> bool:
    try:
        with PolicyClient(server.url, server.token) as client:
            client.start_episode()
    except EnvError:
        return False
    return True


def test_the_head_of_a_later_request_has_a_deadline_and_the_pause_before_it_has_none(served: Any) -> None:
    server = served(limits=ServerLimits(head_seconds=60))  # A busy machine may be slow to send a head.
    client = http.client.HTTPConnection(*server._server.server_address[:2], timeout=60)
    with contextlib.closing(client):
        for _ in range(2):
            client.request("POST", "/v1/get_spaces", b"{}", {"Authorization": f"Bearer {server.token}"})
            answer = client.getresponse()
            assert answer.status == 200
            answer.read()  # The head and the body may arrive apart.
            assert list(server._server._connections.values()) == [math.inf], "until when a head must come"
        server.limits = ServerLimits(head_seconds=0.4)
        connection = client.sock
        with contextlib.suppress(OSError):
            for byte in HEAD[:600]:  # For a minute.
                connection.sendall(bytes([byte]))
                time.sleep(0.1)
                if not server._server._connections:
                    break
        assert not server._server._connections


@pytest.mark.parametrize(
    "head", [b"POST /v1/start_epis", b"POST /v1/start_episode HTTP/1.1\r\nTOKEN", b"GET / HTT"]
)
def test_a_head_that_is_cut_off_by_its_deadline_gets_no_answer_and_is_not_executed(
    served: Any, head: bytes
) -> None:
    server = served(limits=ServerLimits(head_seconds=0.3))
    with socket.create_connection(server._server.server_address[:2], timeout=60) as connection:
        more = f"Authorization: Bearer {server.token}\r\nContent-Length: 0\r\nX-".encode()
        connection.sendall(head.replace(b"TOKEN", more))
        assert connection.recv(100) == b""
    assert not server.runner.episodes.episodes_running


def test_many_clients_may_connect_at_once() -> None:
    """Five may wait by default: of a hundred workers that start together, most were refused."""
    server = _Server(("127.0.0.1", 0), None)  # type: ignore[arg-type] # it does not accept anyone here
    waiting = []
    try:
        for _ in range(120):
            waiting.append(socket.create_connection(server.server_address[:2], timeout=1))
    finally:
        for connection in waiting:
            connection.close()
        server.server_close()
    assert len(waiting) == 120


def test_threads_and_sockets_end_with_the_server(served: Any) -> None:
    server = served()
    clients = [PolicyClient(server.url, server.token) for _ in range(3)]
    names = [client.start_episode() for client in clients]
    server.close()
    until(lambda: not server._server._connections)
    for client, name in zip(clients, names, strict=True):
        with pytest.raises((EnvError, ClosedError)):
            client.get_action(name, [0.0, 0.0])
    with pytest.raises(ClosedError):
        server.answer("report_samples", batch_to_bytes(rows(1)))


@pytest.mark.few(11)
@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("start_episode", '{"episode_id": "%s"}' % ("x" * 300)),
        ("start_episode", '{"training_enabled": 0}'),
        ("start_episode", '{"episode_id": "a", "episode_id": "b"}'),
        ("log_returns", '{"episode_id": "e", "reward": true}'),
        ("log_returns", '{"episode_id": "e", "reward": NaN}'),
        ("log_returns", '{"episode_id": "e", "reward": 1e999}'),
        ("log_returns", '{"episode_id": "e", "reward": 1%s}' % ("0" * 400)),
        ("log_returns", '{"episode_id": "e", "reward": 1%s}' % ("0" * 5000)),
        ("log_returns", '{"episode_id": "e", "reward": 1, "info": [1]}'),
        ("end_episode", '{"episode_id": "e", "truncated": "yes"}'),
        ("end_episode", '{"episode_id": "e", "observation": %s}' % ("[" * 500 + "]" * 500)),
        ("end_episode", '{"episode_id": "e", "observation": {"dtype": "O", "shape": [1], "base64": ""}}'),
        ("end_episode", '{"episode_id": "e", "observation": {"dtype": "<f4", "shape": "12", "base64": ""}}'),
        ("end_episode", '{"episode_id": "e", "observation": {"dtype": "f4,f4", "shape": [0], "base64": ""}}'),
        ("end_episode", '{"episode_id": "e", "observation": {"dtype": "(", "shape": [0], "base64": ""}}'),
        ("end_episode", '{"episode_id": "e", "observation": {"dtype": "f4", "base64": "", "shape": AXES}}'),
        ("log_action", '{"episode_id": "e", "observation": [0, 0], "action": 50}'),
        ("log_action", '{"episode_id": "e", "observation": [0, 0], "action": -1}'),
        ("log_action", '{"episode_id": "e", "observation": [0, 0], "action": 1, "columns": {"rewards": 1}}'),
        ("log_action", '{"episode_id": "e", "observation": [0, 0], "action": 1, "columns": {"vf": 1}}'),
        ("log_action", '{"episode_id":"e","observation":[0,0],"action":1,"columns":{"action_logp":"x"}}'),
        ("get_action", '{"episode_id": "e", "observation": [0, 1e39]}'),
    ],
)  # fmt: skip
def test_what_is_no_value_is_refused_and_changes_nothing(served: Any, command: str, told: str) -> None:
    server = served()
    episodes = server.runner.episodes
    with PolicyClient(server.url, server.token) as client:
        episodes.start("e")
        thread = threading.Thread(target=client.get_action, args=("e", [0.0, 0.0]))
        thread.start()
        while not episodes._known:
            episodes.serve(0.01)
        thread.join()
    with pytest.raises(SchemaError):
        server.answer(command, told.replace("AXES", AXES).encode())
    server.answer("end_episode", b'{"episode_id": "e", "observation": [0, 1]}')
    assert server.sample()["rewards"].tolist() == [0.0]


@pytest.mark.parametrize(
    "value",
    [
        np.float32([0.5, np.nan, -np.inf]), np.float64(np.nan), np.arange(100).reshape(4, 25),
        np.zeros((0, 3)), np.array([True, False]), {"a": (np.zeros(2, np.uint8), [np.inf])},
        np.arange(3, dtype=">i2"),
    ],
)  # fmt: skip
def test_values_travel_as_json_that_every_language_reads(value: Any) -> None:
    text = json.dumps(to_json(value), allow_nan=False)
    found = from_json(json.loads(text))
    if isinstance(value, dict):
        assert_array_equal(found["a"][1], value["a"][1])
    else:
        assert_array_equal(found, value)


def test_bytes_that_are_neither_true_nor_false_are_true() -> None:
    text = base64.b64encode(b"\x02\x00").decode()
    assert from_json({"dtype": "|b1", "shape": [2], "base64": text}).view(np.uint8).tolist() == [1, 0]


def test_infos_and_lists_arrive_as_they_were_sent(served: Any) -> None:
    space = gym.spaces.Box(0, 255, (3,), np.uint8)
    server = served(spaces=(space, ACT), config=RolloutConfig(rollout_fragment_length=1, record_infos=True))
    big = np.arange(100.0)

    def play() -> None:
        with PolicyClient(server.url + "/", server.token) as client:
            name = client.start_episode()
            client.get_action(name, [0, 255, 7])
            client.log_returns(name, 1.0, {"big": big, "lost": np.nan})
            client.end_episode(name)

    thread = threading.Thread(target=play)
    thread.start()
    batch = server.sample()
    thread.join()
    assert batch["obs"].tolist() == [[0, 255, 7]]
    assert_array_equal(batch["infos"][0]["big"], big)
    assert np.isnan(batch["infos"][0]["lost"])


# ---- only what the spaces hold: each field of each request ----

NAN = to_json(np.float32([0.0, np.nan]))
INSIDE = gym.spaces.Dict(
    place=gym.spaces.Box(-1, 1, (2,), np.float32),
    legs=gym.spaces.Sequence(gym.spaces.Box(-1, 1, (1,), np.float32)),
    stack=gym.spaces.Sequence(gym.spaces.Box(-1, 1, (2,), np.float32), stack=True),
    graph=gym.spaces.Graph(gym.spaces.Box(-1, 1, (1,), np.float32), gym.spaces.Discrete(3)),
    either=gym.spaces.OneOf([gym.spaces.Discrete(2), gym.spaces.Box(-1, 1, (1,), np.float32)]),
)
SEEN: dict[str, Any] = {
    "place": [0.5, 0], "legs": [[0.5]], "stack": [[0, 1]],
    "graph": [[[0.5], [1]], [2], [[0, 1]]], "either": [1, [0.5]],
}  # fmt: skip
STEERED = gym.spaces.Box(-1, 1, (1,), np.float32)
DEEP = json.loads("[" * 70 + "]" * 70)
LOGGED_STEP = {"episode_id": "e", "observation": SEEN, "action": [0.5]}


def posted(server: PolicyServerInput, command: str, body: Any, method: str = "POST") -> tuple[int, Any]:
    """Status and JSON of the answer to a request."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    with contextlib.closing(connection):
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, f"/v1/{command}", text, {"Authorization": f"Bearer {server.token}"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@pytest.fixture(scope="module")
def strict() -> Iterator[PolicyServerInput]:
    """A server whose episode ``e`` runs, and has acted once."""
    config = RolloutConfig(rollout_fragment_length=1, record_infos=True)
    server = PolicyServerInput(RandomPolicy(), spaces=(INSIDE, STEERED), config=config, timeout=60)
    episodes = server.runner.episodes
    episodes.start("e")
    thread = threading.Thread(target=episodes.get_action, args=("e", SEEN))
    thread.start()
    until(lambda: episodes.serve(0.01) or bool(episodes._known))
    thread.join()
    yield server
    server.close()


def seen(**other: Any) -> dict[str, Any]:
    return {"episode_id": "e", "observation": SEEN | other}


def chosen(**columns: Any) -> dict[str, Any]:
    return LOGGED_STEP | {"columns": columns}


@pytest.mark.parametrize(
    ("command", "told", "message"),
    [
        ("get_action", seen(place=NAN), "obs/place"),
        ("get_action", seen(place=[5.0, 0]), "5.0"),
        ("get_action", seen(place=to_json(np.float32([0, np.inf]))), "obs/place"),
        ("get_action", seen(legs=[[5.0]]), "obs/legs"),
        ("get_action", seen(legs=[[0.5, 0.5]]), "obs/legs"),
        ("get_action", seen(legs=5), "obs/legs"),
        ("get_action", seen(legs=None), "obs/legs"),
        ("get_action", seen(legs=to_json(np.array(np.nan))), "obs/legs"),
        ("get_action", seen(legs=[[0.5, [1]]]), "obs/legs"),
        ("get_action", seen(stack=[[0, 5]]), "obs/stack"),
        ("get_action", seen(stack=[[0]]), "obs/stack"),
        ("get_action", seen(stack={"a": 1}), "obs/stack"),
        ("get_action", seen(graph=[[[5]], None, None]), "obs/graph"),
        ("get_action", seen(graph=[[[0.5]], [3], [[0, 0]]]), "obs/graph"),
        ("get_action", seen(graph=[[[0.5]], [2], [[0, 1]]]), "obs/graph"),
        ("get_action", seen(graph=[[[0.5]], [2], None]), "obs/graph"),
        ("get_action", seen(graph=[[[0.5]], [2], [[0], [0, 0]]]), "obs/graph"),
        ("get_action", seen(graph="x"), "obs/graph"),
        ("get_action", seen(either=[2, 0]), "obs/either"),
        ("get_action", seen(either=[True, [0.5]]), "obs/either"),
        ("get_action", seen(either=[0, 2]), "obs/either"),
        ("get_action", seen(either=0), "obs/either"),
        ("get_action", {"episode_id": "e", "observation": {**SEEN, "more": 1}}, "more"),
        ("get_action", {"episode_id": "e"}, "observation"),
        ("get_action", {"episode_id": "e", "observatoin": SEEN}, "observatoin"),
        ("get_action", {"episode_id": ["e"], "observation": SEEN}, "episode_id"),
        ("end_episode", seen(place=[-5.0, 0]), "obs/place"),
        ("end_episode", {"episode_id": "e", "observatoin": SEEN}, "observatoin"),
        ("end_episode", {"episode_id": "e", "truncated": [True]}, "truncated"),
        ("log_action", LOGGED_STEP | {"action": [5.0]}, "actions"),
        ("log_action", LOGGED_STEP | {"action": to_json(np.float32([np.nan]))}, "actions"),
        ("log_action", LOGGED_STEP | {"observation": SEEN | {"place": NAN}}, "obs/place"),
        ("log_action", {"episode_id": "e", "observation": SEEN}, "action"),
        ("log_action", LOGGED_STEP | {"columns": []}, "columns"),
        ("log_action", LOGGED_STEP | {"columns": 0}, "columns"),
        ("log_action", LOGGED_STEP | {"columns": to_json(np.float32([np.nan]))}, "columns"),
        ("log_action", chosen(observation=1), "observation"),
        ("log_action", chosen(self=1), "self"),
        ("log_action", chosen(episode_id="e"), "episode_id"),
        ("log_action", chosen(action=1), "action"),
        ("log_action", chosen(vf_preds=1.0), "vf_preds"),
        ("log_action", chosen(action_logp=1e39), "action_logp"),
        ("log_action", chosen(action_logp=[0.0]), "action_logp"),
        ("log_action", chosen(action_logp=[[0.0], [0.0, 1.0]]), "action_logp"),
        ("log_action", chosen(action_logp=True), "action_logp"),
        ("log_action", chosen(action_logp=to_json(np.nan)), "action_logp"),
        ("log_action", chosen(action_prob=-1.0), "action_prob"),
        ("log_action", chosen(action_prob=0.0), "action_prob"),
        ("log_action", chosen(action_prob=to_json(np.inf)), "action_prob"),
        ("log_action", chosen(action_logp=0.0, action_prob=0.5), "contradict"),
        ("log_returns", {"episode_id": "e", "reward": {"a": 1}}, "reward"),
        ("log_returns", {"episode_id": "e", "reward": to_json(np.nan)}, "reward"),
        ("log_returns", {"episode_id": "e", "reward": None}, "reward"),
        ("log_returns", {"episode_id": "e"}, "reward"),
        ("log_returns", {"episode_id": "e", "reward": 1, "info": NAN}, "info"),
        ("log_returns", {"episode_id": "e", "reward": 1, "info": []}, "info"),
        ("log_returns", {"episode_id": "e", "reward": 1, "info": {"a": DEEP}}, "levels"),
        ("log_returns", {"episode_id": "e", "reward": 1, "rewards": 1}, "rewards"),
        ("start_episode", {"episode": "f"}, "episode"),
        ("start_episode", {"training_enabled": "yes"}, "training_enabled"),
        ("get_spaces", {"observation": 1}, "observation"),
        ("get_weights", {"version": 1}, "version"),
        ("get_weights", b"[]", "object"),
    ],
)  # fmt: skip
def test_a_request_with_a_field_that_does_not_fit_is_a_400_that_names_it(
    strict: PolicyServerInput, command: str, told: Any, message: str
) -> None:
    """Most of these reached the learner, or were a 500; and nothing of them is kept."""
    status, answer = posted(strict, command, told)
    assert (status, answer["error"]) == (400, "SchemaError"), answer
    assert message in answer["message"]
    assert len(strict.runner.episodes._rows) == 1
    assert strict.runner.episodes._episodes["e"].reward == 0


def test_values_of_ragged_spaces_arrive_as_the_space_has_them(served: Any) -> None:
    """JSON has lists alone; they stayed lists, which no such space contains."""
    server = served(spaces=(INSIDE, STEERED))
    thread = threading.Thread(target=server.sample)
    thread.start()
    assert posted(server, "start_episode", {"episode_id": "e"})[0] == 200
    assert posted(server, "get_action", seen(graph=[[], None, None], legs=[], stack=[]))[0] == 200
    assert posted(server, "log_action", chosen(action_logp=-0.5))[0] == 200
    assert posted(server, "end_episode", seen())[0] == 200
    thread.join()
    batch = server.sample()
    for column in ("obs", "new_obs"):
        for row in batch.rows():
            leaves = {name: row[column][name] for name in SEEN}
            assert INSIDE.contains({**leaves, "place": np.asarray(leaves["place"])}), leaves


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/get_spaces", 405), ("PUT", "/v1/get_spaces", 405), ("POST", "/get_spaces", 404),
     ("POST", "get_spaces", 404), ("POST", "/v1/get_spaces?x=1", 404)],
)  # fmt: skip
def test_requests_that_are_no_commands_get_a_status_and_json(
    served: Any, method: str, path: str, status: int
) -> None:
    head = f"{method} {path} HTTP/1.1\nTOKENContent-Length: 2\n\n".encode()
    found, answer = said(served(), head, b"{}")
    assert found == status
    told = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert set(told) == {"error", "message"}


def test_a_request_of_another_version_of_http_is_a_400(served: Any) -> None:
    status, answer = said(served(), b"POST /v1/get_spaces HTTP/9.0\nTOKENContent-Length: 2\n\n", b"{}")
    assert (status, json.loads(answer.partition(b"\r\n\r\n")[2])["error"]) == (400, "SchemaError")


BOXES = gym.spaces.Box(-1, 1, (2,), np.float32), STEERED


def reported(count: int = 3, **other: Any) -> SampleBatch:
    """Rows of a `PolicyClient` in `BOXES`."""
    columns = {
        "obs": np.zeros((count, 2), np.float32), "new_obs": np.zeros((count, 2), np.float32),
        "actions": np.zeros((count, 1), np.float32), "logged_action": np.zeros(count, bool),
        "action_logp": np.zeros(count, np.float32), "action_prob": np.ones(count, np.float32),
        "vf_preds": np.zeros(count, np.float32), "q": np.zeros((count, 3), np.float32),
    }  # fmt: skip
    return rows(0, count, **(columns | other))


def third(value: float, shape: tuple[int, ...] = (), otherwise: float = 0.0) -> np.ndarray:
    made = np.full((3, *shape), otherwise, np.float32)
    made[2] = value
    return made


LAST = np.array([False, False, True])


@pytest.mark.few(11)
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"obs": third(5.0, (2,))}, r"row 2.*\[column obs\]"),
        ({"obs": third(np.nan, (2,))}, r"row 2.*\[column obs\]"),
        ({"new_obs": third(-5.0, (2,))}, r"row 2.*\[column new_obs\]"),
        ({"new_obs": third(np.inf, (2,))}, r"row 2.*\[column new_obs\]"),
        ({"new_obs": third(np.nan, (2,)), "new_obs_valid": ~LAST}, "zeros.*new_obs"),
        ({"new_obs_valid": {"a": ~LAST}}, "new_obs_valid"),
        ({"actions": third(5.0, (1,)), "logged_action": LAST}, "actions"),
        ({"actions": third(5.0, (1,)), "logged_action": None}, "actions"),
        ({"actions": third(np.nan, (1,))}, "actions"),
        ({"actions": third(np.inf, (1,))}, "actions"),
        ({"t": np.array([0, 1, -1])}, r"below 0.*row 2.*\[column t\]"),
        ({"rewards": {"a": np.zeros(3, np.float32)}}, "rewards"),
        ({"terminateds": {"a": LAST}}, "terminateds"),
        ({"eps_id": {"a": np.zeros(3, np.int64)}}, "eps_id"),
        ({"logged_action": np.zeros(3)}, "logged_action"),
        ({"logged_action": {"a": LAST}}, "logged_action"),
        ({"vf_preds": third(np.nan)}, "vf_preds"),
        ({"q": third(np.nan, (3,))}, r"\[column q\]"),
        ({"action_logp": third(np.nan)}, "action_logp"),
        ({"action_prob": third(0.5, otherwise=1.0)}, "contradict"),
        ({"action_prob": third(np.nan, otherwise=1.0)}, "action_prob"),
        ({"action_logp": third(-np.inf), "action_prob": None}, "action_logp"),
    ],
)  # fmt: skip
def test_reported_rows_outside_the_space_are_refused_and_named(
    served: Any, other: dict[str, Any], message: str
) -> None:
    server = served(spaces=BOXES)
    server.answer("report_samples", batch_to_bytes(reported()))
    with pytest.raises(SchemaError, match=message):
        server.answer("report_samples", batch_to_bytes(reported(**other)))
    assert server._reported.rows == 3


def test_reported_rows_may_have_what_a_client_records(served: Any) -> None:
    """A Gaussian policy acts outside of the bounds; nobody knows how likely a logged action was."""
    server = served(spaces=BOXES)
    unknown = third(np.nan)
    for other in (
        {"actions": third(1.5, (1,))},
        {"logged_action": LAST, "action_logp": unknown, "action_prob": third(np.nan, otherwise=1.0)},
        {"new_obs_valid": ~LAST},
        {"q": third(-np.inf, (3,))},
        {"action_logp": third(2.0), "action_prob": third(float(np.exp(2.0)), otherwise=1.0)},
    ):
        server.answer("report_samples", batch_to_bytes(reported(**other)))
    assert server._reported.rows == 15


def test_reported_probabilities_of_discrete_actions_are_at_most_1(served: Any) -> None:
    server = served()
    more = {"action_logp": np.full(3, 0.5, np.float32)}
    with pytest.raises(SchemaError, match=r"above 1.*action_logp"):
        server.answer("report_samples", batch_to_bytes(rows(1, **more)))


@pytest.mark.parametrize("mode", ["remote", "local"])
def test_a_client_takes_a_reward_of_one_number_and_refuses_others_with_our_errors(
    served: Any, mode: Any
) -> None:
    """float() of them raised TypeError, and of (1,) warned."""
    server = served(config=RolloutConfig(rollout_fragment_length=1, record_infos=True))
    policy = RandomPolicy() if mode == "local" else None
    with PolicyClient(server.url, server.token, inference_mode=mode, policy=policy) as client:
        server.runner.episodes._immediate = True
        name = client.start_episode()
        client.get_action(name, [0.0, 0.0])
        client.log_returns(name, np.array([0.5]))
        client.log_returns(name, np.float32(0.25))
        for reward in (
            {"a": 1.0},
            None,
            "1",
            [1.0, 2.0],
            np.zeros((1, 1)),
            np.nan,
            1j,
            10**400,
            np.array("1"),
        ):
            with pytest.raises(SchemaError, match="reward"):
                client.log_returns(name, reward)
        for info in ([1], "x", 3, {"a": {1, 2}}, *([{1: 2}] if mode == "remote" else [])):
            with pytest.raises(SchemaError, match="info"):
                client.log_returns(name, 1.0, info)  # type: ignore[arg-type] # it is refused
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        for bad in ({"a": {1, 2}}, {1: 0.5}, deep, 1j, None):
            with pytest.raises(SchemaError):
                client.get_action(name, bad)
        for other in (["e"], 3, {}):
            with pytest.raises((SchemaError, OptionError), match="episode"):
                client.get_action(other, [0.0, 0.0])  # type: ignore[arg-type] # it is refused
            with pytest.raises(SchemaError, match="episode_id"):
                client.start_episode(other)  # type: ignore[arg-type] # it is refused
        with pytest.raises(SchemaError, match="training_enabled"):
            client.start_episode(training_enabled="no")  # type: ignore[arg-type] # it is refused
        with pytest.raises(SchemaError, match="truncated"):
            client.end_episode(name, truncated="no")  # type: ignore[arg-type] # it is refused
        client.end_episode(name, [0.0, 1.0])
    batch = server.sample()
    assert batch["rewards"].tolist() == [0.75]


def test_a_client_of_something_else_says_that_it_is_no_policy_server() -> None:
    class Other(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{other.server_address[1]}"
        client = PolicyClient(url, "12345678")
        for call in (client.start_episode, lambda: client.get_action("e", [0.0])):
            with pytest.raises(CorruptData, match="PolicyServerInput"):
                call()
        with pytest.raises(CorruptData, match="PolicyServerInput"):
            PolicyClient(url, "12345678", inference_mode="local", policy=RandomPolicy())
        client.close()
        other.shutdown()
        thread.join()


@pytest.mark.parametrize("value", [None, "1", True, float("nan"), 0])
def test_limits_of_a_server_are_numbers_above_0(value: Any) -> None:
    """None was taken, and each request was then a 500."""
    with pytest.raises(OptionError, match="request_bytes"):
        ServerLimits(request_bytes=value)


# ---- clients that vanish ----


def test_episodes_of_clients_that_vanish_are_given_up(served: Any) -> None:
    server = served(limits=ServerLimits(episode_seconds=0.01, episodes=3), idle_timeout=0.3)
    with PolicyClient(server.url, server.token) as client:
        for _ in range(3):
            client.start_episode()
        with pytest.raises(EnvError, match="3 episodes run"):
            client.start_episode()
        with pytest.raises(EndOfData):
            server.sample()
        assert not server.runner.episodes.episodes_running
        client.start_episode()


def test_silence_counts_while_somebody_samples(served: Any) -> None:
    """A learner that takes its time does not end the data of clients who wait for it."""
    server = served(idle_timeout=60.0)
    server._heard_at -= 100
    thread = threading.Thread(target=one_step, args=(server,), daemon=True)
    thread.start()
    assert len(server.sample()) == 1
    thread.join()


def one_step(server: PolicyServerInput) -> None:
    with PolicyClient(server.url, server.token) as client:
        name = client.start_episode()
        client.get_action(name, [0.0, 0.0])
        client.end_episode(name, [0.0, 1.0])


def test_who_waits_for_an_action_is_not_starved_by_those_who_report(served: Any) -> None:
    server = served()
    thread = threading.Thread(target=one_step, args=(server,), daemon=True)
    thread.start()
    seen = []
    while thread.is_alive() and len(seen) < 100_000:
        server.answer("report_samples", batch_to_bytes(rows(7, weights_seq_no=np.zeros(3, np.int64))))
        seen.append(len(server.sample()))
    assert not thread.is_alive()
    server.answer("report_samples", batch_to_bytes(rows(7, weights_seq_no=np.zeros(3, np.int64))))
    seen += [len(server.sample())]
    assert set(seen) == {1, 3}


def test_a_sampler_that_waits_for_clients_can_be_closed(served: Any) -> None:
    server = served()
    reader = AsyncInput(server)
    errors: list[BaseException] = []

    def sample() -> None:
        try:
            reader.sample()
        except ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    until(lambda: reader._ahead.is_running and bool(server.runner.episodes.changed._waiters))
    closing = threading.Thread(target=reader.close, daemon=True)
    closing.start()
    for waited in (closing, thread):
        waited.join(60)
        assert not waited.is_alive()
    assert len(errors) == 1


# ---- rows that are reported ----


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("other", "column"),
    [
        ({"obs": np.zeros((3, 3), np.float32)}, "obs"),
        ({"obs": np.zeros((3, 2))}, "obs"),
        ({"obs": {"a": np.zeros((3, 2), np.float32)}}, "obs"),
        ({"new_obs": None}, "new_obs"),
        ({"actions": np.full(3, 50)}, "actions"),
        ({"actions": np.zeros((3, 1), np.int64)}, "actions"),
        ({"rewards": np.float32([0, np.nan, 0])}, "rewards"),
        ({"rewards": np.zeros(3)}, "rewards"),
        ({"terminateds": np.zeros(3, np.int64)}, "terminateds"),
        ({"eps_id": np.zeros(3, np.float32)}, "eps_id"),
        ({"new_obs_valid": np.zeros(3)}, "new_obs_valid"),
        ({"seq_lens": np.int32([3]), "state_in_0": np.zeros((1, 1))}, "seq_lens"),
        ({"action_logp": np.zeros(3)}, "action_logp"),
    ],
)
def test_rows_that_do_not_fit_are_their_senders_error_not_the_learners(
    served: Any, other: dict[str, Any], column: str
) -> None:
    server = served()
    server.answer("report_samples", batch_to_bytes(rows(1)))
    with pytest.raises(SchemaError, match=column):
        server.answer("report_samples", batch_to_bytes(rows(2, **other)))
    server.answer("report_samples", batch_to_bytes(rows(3)))
    batch = server.sample(6)
    assert batch["eps_id"].tolist() == [1] * 3 + [3] * 3
    assert batch["unroll_id"].tolist() == [0] * 3 + [1] * 3


def test_a_restored_seeded_server_repeats_no_episode_id_and_no_unroll_id(served: Any) -> None:
    """A server that is restarted with the seed of the one before: remote episodes, and reported rows."""
    config = RolloutConfig(rollout_fragment_length=3)
    found: list[SampleBatch] = []
    state = None
    for _ in range(2):
        server = served(seed=3, config=config)
        client = PolicyClient(server.url, server.token)
        name = client.start_episode()
        if state is not None:
            server.load_state_dict(state)
        playing = in_thread(lambda c=client, n=name: [c.get_action(n, [0.0, float(t)]) for t in range(4)])
        found.append(server.sample())
        server.answer("report_samples", batch_to_bytes(rows(1)))
        found.append(server.sample())
        state = json.loads(json.dumps(server.state_dict()))
        playing.join(60)
        client.close()
    assert len({int(batch["eps_id"][0]) for batch in (found[0], found[2])}) == 2
    ids = np.concatenate([batch["unroll_id"] for batch in found]).tolist()
    assert len(set(ids)) == 4


def in_thread(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_rows_that_were_reported_and_not_sampled_are_told_in_the_state(served: Any) -> None:
    server = served()
    server.answer("report_samples", batch_to_bytes(rows(1)))
    state = server.state_dict()
    assert state["position"]["runner"]["timesteps"] == 3
    assert state["position"]["runner"]["steps_dropped"] == 3
    state["position"]["runner"]["timesteps"] = 100
    server.load_state_dict(state)
    assert server.runner.timesteps == 103, "these rows are here, and will be sampled"
    assert len(server.sample()) == 3


def test_clients_with_local_inference_get_the_steps_of_all_of_them_with_the_weights(served: Any) -> None:
    """Each client's schedules went by its own steps."""
    server = served()
    policies = [RandomPolicy(), RandomPolicy()]
    clients = [
        PolicyClient(server.url, server.token, inference_mode="local", policy=policy) for policy in policies
    ]
    for client in clients:
        name = client.start_episode()
        for t in range(3):
            client.get_action(name, [0.0, float(t)])
        client.end_episode(name)
    clients[0].update_policy_weights()
    assert [policy.global_vars.timestep for policy in policies] == [6, 0]
    server.policy.on_global_var_update(GlobalVars(100))
    clients[1].update_policy_weights()
    assert policies[1].global_vars.timestep == 100
    for client in clients:
        client.close()


def test_a_report_that_is_sent_twice_is_taken_once(served: Any) -> None:
    server = served()
    for number, report in enumerate(["a", "a", None, None, "b", "a"]):
        server.answer("report_samples", batch_to_bytes(rows(number)), report)
    batch = concat_samples([server.sample() for _ in range(4)])
    assert sorted(set(batch["eps_id"].tolist())) == [0, 2, 3, 4]
    assert server.runner.timesteps == 12
    assert not server._reported
    with pytest.raises(SchemaError, match="longer than 256"):
        server.answer("report_samples", batch_to_bytes(rows(9)), "x" * 300)


def test_rows_that_wait_are_bounded_and_senders_keep_theirs(served: Any) -> None:
    server = served(limits=ServerLimits(waiting_bytes=1), timeout=0.01)
    client = PolicyClient(server.url, server.token, inference_mode="local", policy=RandomPolicy())

    def episode(number: int) -> None:
        name = client.start_episode()
        client.get_action(name, [float(number), 0.0])
        client.end_episode(name, [float(number), 1.0])

    episode(0)
    for number in (1, 2):
        with pytest.raises(EnvError, match="were not sampled"):
            episode(number)
    found = [server.sample()]
    server._timeout = 60.0  # They are sent one by one, each once there is room.
    thread = threading.Thread(target=client.close)
    thread.start()
    found += [server.sample() for _ in range(2)]
    thread.join()
    assert [batch["obs"][0, 0] for batch in found] == [0, 1, 2]


def test_answers_that_are_lost_double_no_row_and_lose_none(served: Any, monkeypatch: Any) -> None:
    """The server takes the rows, and the connection breaks before its answer arrives."""
    server = served()
    client = PolicyClient(server.url, server.token, inference_mode="local", policy=RandomPolicy())
    post, broken = client._post, [True]

    def breaks(command: str, *args: Any) -> Any:
        found = post(command, *args)
        if command == "report_samples" and broken:
            broken.pop()
            raise EnvError("the answer is lost")
        return found

    monkeypatch.setattr(client, "_post", breaks)
    name = client.start_episode()
    client.get_action(name, [5.0, 0.0])
    with pytest.raises(EnvError, match="lost"):
        client.end_episode(name, [5.0, 1.0])
    name = client.start_episode()
    client.get_action(name, [6.0, 0.0])
    client.end_episode(name, [6.0, 1.0])
    assert server.sample(2)["obs"][:, 0].tolist() == [5, 6]
    assert not server._reported
    client.close()
    for call in (
        lambda: client.get_action(name, [0.0, 0.0]),
        lambda: client.log_returns(name, 1.0),
        lambda: client.end_episode(name),
    ):
        with pytest.raises(ClosedError):
            call()


def test_clients_of_two_kinds_have_no_unroll_id_in_common(served: Any) -> None:
    server = served()
    for number in range(2):
        with PolicyClient(server.url, server.token, inference_mode="local", policy=RandomPolicy()) as client:
            name = client.start_episode()
            client.get_action(name, [float(number), 0.0])
            client.end_episode(name)
    thread = threading.Thread(target=one_step, args=(server,), daemon=True)
    thread.start()
    batch = server.sample(3)
    thread.join()
    assert len(set(batch["unroll_id"].tolist())) == len(set(batch["eps_id"].tolist())) == 3


def test_a_server_that_is_restarted_gives_its_own_weights(served: Any) -> None:
    """Its versions begin at 0 again, below what the client has."""
    server = served()
    own = RandomPolicy()
    client = PolicyClient(server.url, server.token, inference_mode="local", policy=own, update_seconds=0.0)
    own.weights_seq_no = 100
    server.policy.weights_seq_no = 3
    client.update_policy_weights()
    assert own.weights_seq_no == 3
    client.close()


def test_local_clients_explore_if_the_server_says_so(served: Any) -> None:
    server = served(config=RolloutConfig(explore=False, record_infos=True))
    client = PolicyClient(server.url, server.token, inference_mode="local", policy=RandomPolicy())
    assert client._episodes is not None
    assert not client._episodes.explore
    assert client._episodes._infos
    client.close()


def test_batches_too_large_for_a_line_are_several(monkeypatch: Any) -> None:
    from rlio.schemas.json_lines import LineTooLarge
    from rlio.serving import policy_protocol

    whole = policy_protocol.batch_to_bytes

    def small(batch: SampleBatch) -> bytes:
        if len(batch) > 2:
            raise LineTooLarge("too large")
        return whole(batch)

    monkeypatch.setattr(policy_protocol, "batch_to_bytes", small)
    pieces = policy_protocol.pieces_to_bytes(rows(1, 7))
    assert_array_equal(concat_samples([batch_from_bytes(piece) for piece in pieces])["t"], range(7))


def test_options_that_cannot_be_are_refused() -> None:
    for limits in ({"connections": 0}, {"episode_seconds": -1.0}):
        with pytest.raises(OptionError, match="above 0"):
            ServerLimits(**limits)  # type: ignore[arg-type]
    before = set(threading.enumerate())
    for port in (99_999, -1):
        with pytest.raises(OptionError, match="cannot listen there"):
            PolicyServerInput(RandomPolicy(), spaces=(OBS, ACT), port=port)
    assert set(threading.enumerate()) <= before
