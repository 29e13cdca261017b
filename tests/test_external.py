"""Loops that are not ours: external environments, the policy server and its clients, sampling in a thread."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from further import further
from numpy.testing import assert_array_equal

from rlio import (
    AsyncInput,
    DatasetReader,
    EnvRunner,
    ExternalEnv,
    InputReader,
    NoopOutput,
    ParquetWriter,
    Policy,
    RandomPolicy,
    RecordingInput,
    RolloutConfig,
    SampleBatch,
    SamplerInput,
    TorchPolicy,
)
from rlio.errors import ClosedError, EndOfData, EnvError, OptionError, SchemaError, UnknownName, UnsafeData
from rlio.reader import JsonState
from rlio.sampling.callbacks import Callbacks
from rlio.sampling.external_runner import ExternalRunner
from rlio.serving import PolicyClient, PolicyServerInput
from rlio.serving.policy_server import ServerLimits

OBS, ACT = gym.spaces.Box(-1, 1e6, (2,), np.float32), gym.spaces.Discrete(50)


class Echo(Policy):
    """The action is the step's number; the state counts the policy's own calls."""

    input_columns = ("t", "prev_actions", "prev_rewards")

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.seen: list[SampleBatch] = []
        self.weights = {"w": np.zeros(2)}

    def compute_actions(self, obs: Any, state: Any = (), *, inputs: Any = None, **_: Any) -> Any:
        self.sizes.append(len(obs))
        self.seen.append(inputs.copy())
        extras = {"action_logp": -obs[:, 1], "vf_preds": obs[:, 0]}
        return obs[:, 1].astype(np.int64) % 50, (state[0] + 1,), extras

    def initial_state(self, batch_size: int) -> Any:
        return (np.zeros((batch_size, 1), np.float32),)

    def get_weights(self) -> Any:
        return {name: value.copy() for name, value in self.weights.items()}

    def set_weights(self, weights: Any) -> None:
        self.weights = dict(weights)


class Loops(ExternalEnv):
    """``side_by_side`` loops, each with episodes of ``length`` steps; observations are (episode, t)."""

    def __init__(
        self, *, length: int = 4, side_by_side: int = 1, episodes: int = 10_000, **options: Any
    ) -> None:
        super().__init__(OBS, ACT)
        self.length, self.side_by_side, self.episodes, self.options = length, side_by_side, episodes, options
        self.actions: list[list[int]] = []

    def run(self) -> None:
        threads = [
            threading.Thread(target=self.play, args=(i,), daemon=True) for i in range(self.side_by_side)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def play(self, first: int) -> None:
        try:
            for number in range(first, self.episodes, self.side_by_side):
                self.episode(number)
        except ClosedError:
            return

    def episode(self, number: int) -> None:
        name = self.start_episode(training_enabled=self.options.get("training_enabled", True))
        taken = []
        for t in range(self.length):
            obs = [float(number), float(t)]
            if self.options.get("logged") and t % 2:
                self.log_action(name, obs, 7, **self.options.get("columns", {}))
                taken.append(7)
            else:
                taken.append(int(self.get_action(name, obs)))
            self.log_returns(name, 0.5)
            self.log_returns(name, 0.5 * t, {"t": t})
        self.actions.append(taken)
        final = None if self.options.get("no_final") else [float(number), float(self.length)]
        self.end_episode(name, final, truncated=number % 2 == 1)


def check(batch: SampleBatch, length: int) -> None:
    """Rows are steps of the loops, each episode's in order."""
    obs, new_obs = batch["obs"], batch["new_obs"]
    assert_array_equal(new_obs[:, 0], obs[:, 0])
    assert_array_equal(new_obs[:, 1], obs[:, 1] + 1)
    assert_array_equal(batch["t"], obs[:, 1])
    assert_array_equal(batch["rewards"], 0.5 + 0.5 * batch["t"])
    ends = batch["t"] == length - 1
    assert_array_equal(batch["terminateds"], ends & (obs[:, 0] % 2 == 0))
    assert_array_equal(batch["truncateds"], ends & (obs[:, 0] % 2 == 1))
    for part in batch.split_by_episode():
        assert len(set(part["obs"][:, 0].tolist())) == 1
        assert_array_equal(np.diff(part["t"]), 1)


@pytest.mark.parametrize("side_by_side", [5, *further(1)])
def test_rows_of_loops_are_their_steps(side_by_side: int) -> None:
    runner = ExternalRunner(Loops(side_by_side=side_by_side), RandomPolicy(), seed=0)
    batches = [runner.run(50) for _ in range(20)]
    runner.stop()
    for batch in batches:
        assert len(batch) >= 50
        check(batch, 4)
        assert all(len(set(part["unroll_id"].tolist())) == 1 for part in batch.split_by_episode())
    steps = Counter((int(e), int(t)) for batch in batches for e, t in batch["obs"])
    assert max(steps.values()) == 1
    assert runner.timesteps >= sum(map(len, batches)) >= 1000
    ids = np.concatenate([batch["unroll_id"] for batch in batches])
    assert len(set(ids.tolist())) >= 250


def test_waiting_loops_are_answered_together() -> None:
    policy = Echo()
    runner = ExternalRunner(Loops(side_by_side=6, length=30), policy)
    runner.run(600)
    runner.stop()
    assert max(policy.sizes) > 1


def test_whole_episodes() -> None:
    config = RolloutConfig(rollout_fragment_length=10, batch_mode="complete_episodes")
    runner = ExternalRunner(Loops(side_by_side=3, length=7), RandomPolicy(), config=config)
    for _ in range(5):
        batch = runner.run()
        assert len(batch) >= 14
        for part in batch.split_by_episode():
            assert part["t"].tolist() == list(range(7))
    episodes = runner.sample(num_episodes=4)
    assert len(episodes) >= 4
    assert all(episode.is_done and len(episode) == 7 for episode in episodes)
    assert len(runner.sample(num_timesteps=9)) >= 2
    runner.stop()


def test_the_policy_gets_its_state_and_the_step_before() -> None:
    """Recurrent state follows each episode, whatever runs beside it."""
    policy = Echo()
    runner = ExternalRunner(Loops(side_by_side=3, length=5), policy)
    batch = runner.run(60)
    runner.stop()
    states = np.repeat(batch["state_in_0"][:, 0], batch["seq_lens"])
    first = np.concatenate([[t] * n for t, n in zip(_first_ts(batch), batch["seq_lens"], strict=True)])
    assert_array_equal(states, first)
    assert_array_equal(batch["state_out_0"][:, 0], batch["t"] + 1)
    for inputs in policy.seen:
        begins = inputs["t"] == 0
        assert_array_equal(inputs["prev_actions"], np.where(begins, 0, inputs["t"] - 1))
        assert_array_equal(inputs["prev_rewards"], np.where(begins, 0, 0.5 + 0.5 * (inputs["t"] - 1)))


def _first_ts(batch: SampleBatch) -> list[int]:
    ends = np.cumsum(batch["seq_lens"])
    return [int(batch["t"][end - n]) for end, n in zip(ends, batch["seq_lens"], strict=True)]


def test_logged_actions_are_recorded_and_not_called_the_policys() -> None:
    """Upstream test_external_env: off-policy actions land in the buffer."""
    runner = ExternalRunner(Loops(logged=True), Echo())
    batch = runner.run(40)
    runner.stop()
    odd = batch["t"] % 2 == 1
    assert_array_equal(batch["logged_action"], odd)
    assert_array_equal(batch["actions"], np.where(odd, 7, batch["t"]))
    assert_array_equal(np.isnan(batch["action_logp"]), odd)
    assert not np.isnan(batch["vf_preds"]).any()
    runner = ExternalRunner(Loops(logged=True, columns={"action_logp": -0.25}), Echo())
    batch = runner.run(40)
    runner.stop()
    assert_array_equal(batch["action_logp"], np.where(batch["t"] % 2 == 1, -0.25, -batch["t"]))


def test_a_final_observation_that_nobody_knows_is_marked_missing() -> None:
    runner = ExternalRunner(Loops(no_final=True), RandomPolicy())
    batch = runner.run(40)
    runner.stop()
    assert_array_equal(batch["new_obs_valid"], ~(batch["terminateds"] | batch["truncateds"]))
    assert not batch["new_obs"][~batch["new_obs_valid"]].any()


def test_episodes_that_are_not_for_training_leave_no_rows() -> None:
    runner = ExternalRunner(Loops(training_enabled=False, episodes=20), RandomPolicy())
    for _ in range(2):  # They are handed out, as batches without rows.
        assert not len(runner.run(40))
    with pytest.raises(EndOfData):
        runner.run(1)
    assert runner.episodes.progress.dropped == 80
    metrics = runner.get_metrics().summarise()
    assert metrics["episode_len_mean"] == 4
    runner.stop()


def test_the_end_of_the_loop_is_the_end_of_the_data() -> None:
    runner = ExternalRunner(Loops(episodes=5), RandomPolicy())
    assert sum(len(batch) for batch in SamplerInput(runner)) == 20
    with pytest.raises(EndOfData, match="ended"):
        runner.run(9)
    runner.stop()


def test_an_error_in_the_loop_surfaces_where_it_is_sampled() -> None:
    class Broken(Loops):
        def run(self) -> None:
            self.episode(0)
            raise ZeroDivisionError("the simulator")

    runner = ExternalRunner(Broken(), RandomPolicy())
    with pytest.raises(EnvError, match="ZeroDivisionError: 'the simulator'"):
        runner.run(50)
    runner.stop()


def test_an_error_of_the_policy_reaches_both_sides() -> None:
    class Fails(RandomPolicy):
        def compute_actions(self, *args: Any, **keywords: Any) -> Any:
            raise FloatingPointError("nan")

    caught: list[BaseException] = []

    class Loop(Loops):
        def run(self) -> None:
            try:
                self.episode(0)
            except FloatingPointError as error:
                caught.append(error)

    runner = ExternalRunner(Loop(), Fails())
    with pytest.raises(FloatingPointError):
        runner.run(1)
    runner.stop()
    assert len(caught) == 1


def test_stopping_lets_the_loops_go() -> None:
    others = set(threading.enumerate())
    env = Loops(side_by_side=3)
    runner = ExternalRunner(env, RandomPolicy())
    runner.run(10)
    runner.stop()
    runner.stop()
    with pytest.raises(ClosedError):
        runner.run(10)
    with pytest.raises(ClosedError):
        env.start_episode()
    started = set(threading.enumerate()) - others
    assert not [thread for thread in started if thread.name == "rlio-external-env"]


def test_wrong_calls_say_what_is_wrong() -> None:
    env = Loops(episodes=0)
    runner = ExternalRunner(env, RandomPolicy(), timeout=0.05)
    name = env.start_episode("mine")
    for call, error, words in (
        (lambda: env.start_episode("mine"), OptionError, "is already running"),
        (lambda: env.get_action("other", [0.0, 0.0]), OptionError, "'mine'"),
        (lambda: env.log_returns(name, 1.0), OptionError, "before its first action"),
        (lambda: env.get_action(name, [0.0, 0.0, 0.0]), SchemaError, r"\(3,\)"),
        (lambda: env.log_action(name, [0.0, 0.0], 0.5), SchemaError, "actions"),
        (lambda: env.get_action(name, [0.0, 0.0]), EnvError, r"within 0\.05 s"),
        (lambda: ExternalRunner(env, RandomPolicy()), OptionError, "already has a runner"),
        (lambda: ExternalRunner("CartPole-v1", RandomPolicy()), OptionError, "ExternalEnv"),  # type: ignore[arg-type]
    ):
        with pytest.raises(error, match=words):
            call()  # type: ignore[no-untyped-call]
    runner.stop()


def test_callbacks_and_metrics_see_the_episodes() -> None:
    class Tell(Callbacks):
        def __init__(self) -> None:
            self.calls: Counter[str] = Counter()

        def on_episode_start(self, *, episode: Any, **_: Any) -> None:
            self.calls["start"] += 1

        def on_episode_step(self, *, episode: Any, **_: Any) -> None:
            self.calls["step"] += 1

        def on_episode_end(self, *, episode: Any, **_: Any) -> None:
            self.calls["end"] += 1
            episode.custom_metrics["last"] = episode.length

        def on_postprocess_trajectory(self, *, postprocessed_batch: Any, **_: Any) -> None:
            postprocessed_batch["seen"] = np.ones(len(postprocessed_batch))

    runner = ExternalRunner(Loops(episodes=10), RandomPolicy(), callbacks=(tell := Tell()))
    batch = runner.run(40)
    assert batch["seen"].all()
    metrics = runner.get_metrics().summarise()
    assert metrics["episode_return_mean"] == 2.0 + 0.5 * 6
    assert metrics["custom_metrics"]["last_mean"] == 4
    assert tell.calls == {"start": 10, "step": 40, "end": 10}
    runner.stop()


def test_as_a_reader_it_can_be_recorded_and_read_back(tmp_path: Any) -> None:
    runner = ExternalRunner(Loops(side_by_side=2), RandomPolicy(), seed=1)
    with RecordingInput(SamplerInput(runner), ParquetWriter(tmp_path)) as reader:
        rows = sum(len(reader.sample()) for _ in range(3))
    batch = DatasetReader(tmp_path, epochs=1, batch_size=rows).sample()
    assert isinstance(batch, SampleBatch)
    check(batch, 4)


# ---- the server ----


def play(client: PolicyClient, number: int, length: int = 4, *, logged: bool = False) -> list[int]:
    name = client.start_episode()
    taken = []
    for t in range(length):
        obs = np.array([number, t], np.float32)
        if logged and t % 2:
            client.log_action(name, obs, np.int64(7))
            taken.append(7)
        else:
            taken.append(int(client.get_action(name, obs)))
        client.log_returns(name, 0.5 + 0.5 * t, {"t": t})
    client.end_episode(name, np.array([number, length], np.float32), truncated=number % 2 == 1)
    return taken


def test_remote_inference() -> None:
    server = PolicyServerInput(Echo(), spaces=(OBS, ACT), config=RolloutConfig(rollout_fragment_length=1))
    actions: list[list[int]] = []

    def loop(first: int) -> None:
        with PolicyClient(server.url, server.token) as client:
            actions.extend(play(client, number, logged=True) for number in range(first, 12, 3))

    threads = [threading.Thread(target=loop, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    batch = server.sample(48)
    for thread in threads:
        thread.join()
    assert isinstance(batch, SampleBatch)
    check(batch, 4)
    assert sorted(set(batch["obs"][:, 0].tolist())) == list(range(12))
    assert actions == [[0, 7, 2, 7]] * 12
    server.close()


def test_local_inference_reports_rows_and_fetches_weights() -> None:
    policy = Echo()
    server = PolicyServerInput(policy, spaces=(OBS, ACT))
    own = Echo()
    with PolicyClient(
        server.url, server.token, inference_mode="local", policy=own, update_seconds=0.0, report_rows=10
    ) as client:
        for number in range(6):
            with server.weights_lock:
                policy.weights, policy.weights_seq_no = {"w": np.full(2, float(number))}, number + 1
            assert play(client, number) == [0, 1, 2, 3]
            assert own.weights["w"].tolist() == [number, number]
    batch = server.sample(24)
    assert isinstance(batch, SampleBatch)
    check(batch, 4)
    assert_array_equal(batch["weights_seq_no"], batch["obs"][:, 0] + 1)
    server.close()


def test_a_torch_policy_acts_on_both_sides_alike() -> None:
    spaces = (gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Box(-2, 2, (2,), np.float32))
    policy, own = TorchPolicy(), TorchPolicy()
    policy.bind(*spaces, seed=1)
    server = PolicyServerInput(policy)
    with PolicyClient(server.url, server.token, inference_mode="local", policy=own) as client:
        name = client.start_episode()
        assert client.get_action(name, np.zeros(3, np.float32)).shape == (2,)
    for key, value in policy.get_weights().items():
        assert_array_equal(own.get_weights()[key], value)
    server.close()


def test_who_does_not_know_the_token_gets_nothing() -> None:
    server = PolicyServerInput(RandomPolicy(), spaces=(OBS, ACT))
    with pytest.raises(UnsafeData, match="token"):
        PolicyClient(server.url, "guessed-it").start_episode()
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    connection.request("POST", "/v1/get_weights")
    assert connection.getresponse().status == 401
    with pytest.raises(OptionError, match="8 ASCII"):
        PolicyServerInput(RandomPolicy(), spaces=(OBS, ACT), token="short")
    server.close()


def packed(dtype: str, size: int) -> bytes:
    array = {"dtype": dtype, "shape": [size], "base64": ""}
    return json.dumps({"episode_id": "e", "observation": array}).encode()


@pytest.mark.parametrize(
    ("command", "body", "status", "error"),
    [
        ("start_episode", b"{", 400, "SchemaError"),
        ("start_episode", b"[" * 100_000, 400, "SchemaError"),
        ("start_episode", b"[]", 400, "SchemaError"),
        ("start_episode", b'{"episode_id": 3}', 400, "SchemaError"),
        ("get_action", b"{}", 400, "SchemaError"),
        ("get_action", b'{"episode_id": "x", "observation": [0, 0]}', 400, "OptionError"),
        ("get_action", b'{"episode_id": "e", "observation": [0, "x"]}', 400, "SchemaError"),
        ("get_action", b'{"episode_id": "e", "observation": null}', 400, "SchemaError"),
        ("log_returns", b'{"episode_id": "e", "reward": "1"}', 400, "SchemaError"),
        ("log_action", b'{"episode_id": "e", "observation": [0,0], "columns": 3}', 400, "SchemaError"),
        ("end_episode", packed("O", 2), 400, "SchemaError"),
        ("end_episode", packed("<f4", 99_999_999_999), 400, "SchemaError"),
        ("end_episode", packed("<f4", -1), 400, "SchemaError"),
        ("report_samples", b"{}", 400, "SchemaError"),
        ("report_samples", b"{}\n{}", 400, "CorruptData"),
        ("drop_tables", b"{}", 404, "UnknownName"),
        ("report_samples", b"x" * 20_000, 413, "UnsafeData"),
    ],
)  # fmt: skip
def test_what_strangers_send_is_refused_by_name(command: str, body: bytes, status: int, error: str) -> None:
    server = PolicyServerInput(
        RandomPolicy(),
        spaces=(OBS, ACT),
        limits=ServerLimits(request_bytes=10_000 + 100_000 * (b"[[" in body)),
    )
    server.runner.episodes.start("e")
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    connection.request("POST", f"/v1/{command}", body, {"Authorization": f"Bearer {server.token}"})
    response = connection.getresponse()
    told = json.loads(response.read())
    assert (response.status, told["error"]) == (status, error)
    connection.close()
    server.close()


def test_rows_that_are_reported_must_be_rows() -> None:
    from rlio.serving.policy_protocol import batch_to_bytes

    server = PolicyServerInput(RandomPolicy(), spaces=(OBS, ACT))
    with pytest.raises(SchemaError, match="lack this column"):
        server.answer("report_samples", batch_to_bytes(SampleBatch(obs=[[1.0, 2.0]])))
    with pytest.raises(UnknownName):
        server.answer("nothing", b"{}")
    server.close()


def test_without_clients_the_data_ends_where_that_is_wanted() -> None:
    server = PolicyServerInput(RandomPolicy(), spaces=(OBS, ACT), idle_timeout=0.05)
    with pytest.raises(EndOfData, match="no client"):
        server.sample()
    server.close()


def test_a_client_of_a_server_that_is_gone_says_so() -> None:
    server = PolicyServerInput(RandomPolicy(), spaces=(OBS, ACT), timeout=0.2)
    client = PolicyClient(server.url, server.token)
    name = client.start_episode()
    with pytest.raises(EnvError, match=r"within 0\.2 s"):  # Nobody samples.
        client.get_action(name, [0.0, 0.0])
    server.close()
    with pytest.raises((EnvError, ClosedError)):
        client.get_action(name, [0.0, 0.0])
    client.close()
    with pytest.raises(ClosedError):
        client.start_episode()
    with pytest.raises(EnvError, match="did not answer"):
        PolicyClient(server.url, "whatever-it-is").start_episode()


# ---- in a thread ----


class Numbers(InputReader):
    """Batches of one row: 0, 1, 2, ...; some numbers raise instead, once."""

    def __init__(self, *, last: int = 1000, fails: tuple[int, ...] = ()) -> None:
        self.number, self.last, self.fails = 0, last, set(fails)

    def _next(self) -> SampleBatch:
        if self.number in self.fails:
            self.fails.remove(self.number)
            raise ValueError(f"at {self.number}")
        if self.number == self.last:
            raise EndOfData("no more numbers")
        self.number += 1
        return SampleBatch(t=[self.number - 1])


def test_batches_come_in_order_and_errors_in_their_place() -> None:
    with AsyncInput(Numbers(fails=(3,), last=6), queue_size=2) as reader:
        assert [int(reader.sample()["t"][0]) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="at 3"):
            reader.sample()
        assert [int(batch["t"][0]) for batch in reader] == [3, 4, 5]
        with pytest.raises(EndOfData):
            reader.sample()


class Seekable(Numbers):
    """They have a position."""

    replayable = False

    def _position(self) -> JsonState:
        return {"number": self.number}

    def _seek(self, position: JsonState) -> None:
        self.number = position["number"]


@pytest.mark.parametrize("last", [2, 1000], ids=["at the end", "in the middle"])
def test_after_a_load_no_batch_from_before_is_served_and_the_thread_goes_on(last: int) -> None:
    with AsyncInput(Seekable(last=last), queue_size=1) as reader:
        state = reader.state_dict()
        assert int(reader.sample()["t"][0]) == 0
        while reader.child.number < 2:
            time.sleep(0.001)
        reader.load_state_dict(state)
        assert [int(reader.sample()["t"][0]) for _ in range(2)] == [0, 1]
        assert reader.rows_dropped in (1, 2)


def test_a_size_that_the_waiting_batches_have_does_not_wait_for_the_next_one() -> None:
    goes_on = threading.Event()

    class Slow(Seekable):
        def _next(self) -> SampleBatch:
            if self.number == 3:
                goes_on.wait()
            return super()._next()

    with AsyncInput(Slow(), queue_size=3) as reader:
        reader.sample()
        while reader.child.number < 3:
            time.sleep(0.001)
        assert len(reader.sample(2)) == 2
        goes_on.set()


def test_the_queue_is_bounded() -> None:
    child = Numbers()
    with AsyncInput(child, queue_size=3) as reader:
        reader.sample()
        for _ in range(50):
            time.sleep(0.002)
            with reader.lock:
                assert child.number <= 1 + 3 + 1


def test_a_black_hole_swallows_what_nobody_takes() -> None:
    child = Numbers()
    reader = AsyncInput(child, queue_size=0, blackhole_outputs=True)
    while child.number < 50:
        time.sleep(0.001)
    reader.close()
    assert reader.rows_dropped == child.number
    with pytest.raises(OptionError, match="at least 1"):
        AsyncInput(Numbers(), queue_size=0)


def test_live_experience_is_sampled_in_a_thread() -> None:
    others = set(threading.enumerate())
    runner = EnvRunner("CartPole-v1", RandomPolicy(), seed=0)
    with RecordingInput(AsyncInput(SamplerInput(runner)), NoopOutput()) as reader:
        rows = [reader.sample() for _ in range(5)]
    assert sum(map(len, rows)) == 1000
    started = set(threading.enumerate()) - others
    assert not [thread for thread in started if thread.name == "rlio-async-input"]
