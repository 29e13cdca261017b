"""`ExternalEpisodes`, `ExternalRunner`: what loops do at the wrong time, or never, and what stays true."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from fractions import Fraction
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from rlio import AsyncInput, ExternalEnv, RandomPolicy, RolloutConfig, SamplerInput
from rlio.errors import ClosedError, EndOfData, EnvError, OptionError, SchemaError, StateError
from rlio.sampling.callbacks import Callbacks
from rlio.sampling.external_episodes import ExternalEpisodes
from rlio.sampling.external_runner import ExternalRunner

OBS, ACT = gym.spaces.Box(-1, 1e6, (2,), np.float32), gym.spaces.Discrete(50)
SPACES = (OBS, ACT)


def made(*, spaces: Any = SPACES, policy: RandomPolicy | None = None, **options: Any) -> ExternalEpisodes:
    policy = RandomPolicy() if policy is None else policy
    policy.bind(*spaces, seed=0)
    return ExternalEpisodes(policy, **options)


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A call in a thread of its own, and, once it has ended, what came of it."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def left_in(episodes: ExternalEpisodes) -> list[int]:
    """What it keeps, which is to be nothing where no episode runs and all rows are taken."""
    return [len(kept) for kept in (episodes._rows, episodes._over, episodes._episodes)]


def until_waiting(episodes: ExternalEpisodes, requests: int = 1) -> None:
    with episodes.changed:
        assert episodes.changed.wait_for(lambda: len(episodes._waiting) >= requests, 60)


# ---- asking, ending, timing out and stopping at the same time ----


def test_an_action_that_comes_at_the_last_moment_counts() -> None:
    """The loop's time is over while it is answered: its row is open, and so it gets the action."""
    episodes = made(timeout=0.05)
    acting, timed_out = threading.Event(), threading.Event()
    act = episodes.policy.compute_actions

    def slowly(*args: Any, **options: Any) -> Any:
        acting.set()
        assert timed_out.wait(60)
        return act(*args, **options)

    episodes.policy.compute_actions = slowly  # type: ignore[method-assign]

    class Late(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            if timeout is None:
                return super().result()
            acting.wait(60)
            timed_out.set()
            raise TimeoutError

    name = episodes.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlio.sampling.external_episodes.Future", Late)
        thread, found = in_thread(lambda: episodes.get_action(name, [0.0, 0.0]))
        until_waiting(episodes)
        episodes.serve()
        thread.join(60)
    assert [int(action) for action in found] == [int(found[0])]
    episodes.end(name, [0.0, 1.0])
    assert len(episodes.take()) == 1
    assert not len(episodes._rows)


def test_a_loop_that_waited_in_vain_may_ask_again() -> None:
    episodes = made(timeout=0.01)
    name = episodes.start()
    for _ in range(2):
        with pytest.raises(EnvError, match="within"):
            episodes.get_action(name, [0.0, 0.0])
    thread, refused = in_thread(lambda: episodes.get_action(name, [0.0, 0.0]))
    thread.join(60)
    assert [type(error) for error in refused] == [EnvError]
    episodes._timeout = None
    thread, found = in_thread(lambda: episodes.get_action(name, [0.0, 0.0]))
    until_waiting(episodes)
    episodes.serve()
    thread.join(60)
    assert [int(action) for action in found] == [int(found[0])]
    episodes.end(name, [0.0, 1.0])
    assert episodes.take()["t"].tolist() == [0]


def test_the_end_of_an_episode_lets_go_who_waits_for_its_action() -> None:
    """Else a row is opened of an episode that is over, and stays for ever."""
    episodes = made()
    name = episodes.start()
    thread, found = in_thread(lambda: episodes.get_action(name, [0.0, 0.0]))
    until_waiting(episodes)
    episodes.end(name, [0.0, 0.0])
    thread.join(60)
    assert isinstance(found[0], OptionError)
    episodes.serve(0.0)
    assert not len(episodes._rows)
    assert not episodes.episodes_ready


def test_two_threads_cannot_ask_for_one_episode() -> None:
    episodes = made()
    name = episodes.start()
    thread, found = in_thread(lambda: episodes.get_action(name, [0.0, 0.0]))
    until_waiting(episodes)
    with pytest.raises(OptionError, match="in another thread"):
        episodes.get_action(name, [0.0, 0.0])
    with pytest.raises(OptionError, match="while it waits"):
        episodes.log_returns(name, 1.0)
    episodes.close()
    thread.join(60)
    assert isinstance(found[0], ClosedError)
    assert not episodes._waiting


def test_many_threads_that_ask_end_and_stop_at_once_leave_nothing() -> None:
    """Upstream test_external_env: concurrency. Each row is a step of its episode, whoever runs beside it."""
    episodes = made()
    stop = threading.Event()

    def play(first: int) -> None:
        for number in range(first, 200, 8):
            name = episodes.start()
            for t in range(number % 7):
                episodes.get_action(name, [float(number), float(t)])
                episodes.log_returns(name, float(number + t))
            episodes.end(name, [float(number), float(number % 7)], truncated=number % 3 == 0)

    threads = [threading.Thread(target=play, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    parts = []
    while any(thread.is_alive() for thread in threads):
        episodes.serve(0.01)
        parts.append(episodes.take())
    stop.set()
    parts.append(episodes.take())
    rows = [part for part in parts if len(part)]
    obs, new_obs, rewards, truncated = (
        np.concatenate([part[name] for part in rows]) for name in ("obs", "new_obs", "rewards", "truncateds")
    )
    assert_array_equal(new_obs - obs, np.tile([0, 1], (len(obs), 1)))
    assert_array_equal(rewards, obs.sum(axis=1))
    assert_array_equal(truncated, (obs[:, 0] % 3 == 0) & (obs[:, 1] == obs[:, 0] % 7 - 1))
    assert len(obs) == sum(number % 7 for number in range(200))
    assert not len(episodes._rows)
    assert left_in(episodes) == [0, 0, 0]


# ---- what fails takes nobody with it, and leaves nothing ----


class Fails(Callbacks):
    def __init__(self, name: str) -> None:
        self.name, self.fails = name, True

    def _called(self, name: str) -> None:
        if name == self.name and self.fails:
            self.fails = False
            raise ZeroDivisionError(name)

    def on_episode_created(self, **_: Any) -> None:
        self._called("created")

    def on_episode_start(self, **_: Any) -> None:
        self._called("start")

    def on_episode_step(self, **_: Any) -> None:
        self._called("step")

    def on_episode_end(self, **_: Any) -> None:
        self._called("end")


@pytest.mark.parametrize("name", ["created", "start", "step", "end"])
def test_a_callback_that_fails_leaves_no_row_open_and_no_episode_behind(name: str) -> None:
    episodes = made(immediate=True, callbacks=Fails(name))
    failed = 0

    def again(call: Callable[[], Any], *, repeat: bool = True) -> Any:
        nonlocal failed
        try:
            return call()
        except ZeroDivisionError:
            failed += 1
            return call() if repeat else None

    for _ in range(2):
        episode = again(lambda: episodes.start("one"))
        for t in range(3):
            again(lambda t=t: episodes.get_action("one", [0.0, float(t)]))  # type: ignore[misc]
        again(lambda: episodes.end("one", [0.0, 3.0]), repeat=False)
        assert episode == "one"
    assert failed == 1
    assert episodes.episodes_ready == 2
    batch = episodes.take(whole=True)
    assert_array_equal(batch["t"], [0, 1, 2, 0, 1, 2])
    assert not len(episodes._rows)
    assert not episodes.episodes_running


class WithQ(RandomPolicy):
    """Has a further column."""

    def compute_actions(self, obs: Any, *args: Any, **options: Any) -> Any:
        actions, state, extras = super().compute_actions(obs, *args, **options)
        return actions, state, {**extras, "q": np.zeros(len(actions), np.float32)}


@pytest.mark.parametrize(
    "columns",
    [{"nonsense": 1.0}, {"q": "x"}, {"q": [1.0, 2.0]}, {"q": 1e39}, {"q": np.nan}, {"q": True}],
    ids=str,
)
def test_one_loops_wrong_column_is_no_other_loops_error(columns: dict[str, Any]) -> None:
    episodes = made(policy=WithQ())
    names = [episodes.start() for _ in range(2)]
    bad, told = in_thread(lambda: episodes.log_action(names[0], [0.0, 0.0], 1, **columns))
    good, action = in_thread(lambda: episodes.get_action(names[1], [1.0, 0.0]))
    until_waiting(episodes, 2)
    episodes.serve()
    bad.join(60)
    good.join(60)
    assert isinstance(told[0], SchemaError)
    assert int(action[0]) in range(50)
    for name in names:
        episodes.end(name, [1.0, 1.0])
    assert_array_equal(episodes.take()["obs"], [[1.0, 0.0]])
    with pytest.raises(SchemaError):  # The policy's columns are known by now.
        episodes.log_action(episodes.start(), [0.0, 0.0], 1, **columns)


@pytest.mark.parametrize("known", [{"action_logp": -0.5}, {"action_prob": np.exp(-0.5)}], ids=str)
def test_of_a_logged_actions_probability_and_its_logarithm_one_is_enough(known: dict[str, float]) -> None:
    episodes = made(immediate=True)
    name = episodes.start()
    episodes.log_action(name, [0.0, 0.0], 1, **known)
    episodes.log_action(name, [0.0, 0.0], 1, action_logp=-1.0, action_prob=0.36788)  # as it is said
    episodes.log_action(name, [0.0, 0.0], 1)
    episodes.end(name)
    batch = episodes.take()
    assert batch["action_logp"].tolist() == pytest.approx([-0.5, -1.0, np.nan], nan_ok=True)
    assert batch["action_prob"].tolist() == pytest.approx([np.exp(-0.5), 0.36788, np.nan], nan_ok=True)


@pytest.mark.parametrize(
    "columns",
    [{"action_logp": -1.0, "action_prob": 0.25}, {"action_logp": 0.5}, {"action_prob": 1.5},
     {"action_prob": 0.0}, {"action_prob": -0.5}, {"action_logp": np.nan}, {"action_logp": -np.inf},
     {"action_logp": "x"}, {"action_logp": [1.0, 2.0]}, {"action_logp": True}],
    ids=str,
)  # fmt: skip
def test_a_loop_cannot_log_an_impossible_probability(columns: dict[str, Any]) -> None:
    """It was recorded, and off-policy evaluation counts by it."""
    episodes = made(immediate=True)
    name = episodes.start()
    with pytest.raises(SchemaError, match="action_"):
        episodes.log_action(name, [0.0, 0.0], 1, **columns)
    episodes.end(name)
    assert left_in(episodes) == [0, 0, 0]


# ---- only what the spaces hold ----


@pytest.mark.parametrize(
    "reward",
    [
        *(float("nan"), float("inf"), 1e39, 10**400, "1", None, [1.0, 2.0], [[1.0], [2.0, 3.0]], {"a": 1.0}),
        *(1j, b"1", np.array("1"), np.zeros((1, 1)), np.zeros(0), [[1.0]], np.datetime64("2020"), object()),
    ],
)
def test_a_reward_is_a_finite_number(reward: Any) -> None:
    episodes = made(immediate=True)
    name = episodes.start()
    episodes.get_action(name, [0.0, 0.0])
    with pytest.raises(SchemaError, match="reward"):
        episodes.log_returns(name, reward)
    with pytest.raises(SchemaError, match="info"):
        episodes.log_returns(name, 1.0, [1])  # type: ignore[arg-type] # it is refused
    for number in (
        np.float32(0.5),
        np.array([0.5]),
        np.array(0.5),
        [0.5],
        torch.tensor([0.5]),
        Fraction(1, 2),
    ):
        episodes.log_returns(name, number)  # type: ignore[arg-type] # of one number
    episodes.end(name)
    assert episodes.take()["rewards"].tolist() == [3.0]


def test_names_and_flags_of_an_episode_are_what_they_say() -> None:
    episodes = made(immediate=True)
    for name in (3, ["e"], b"e"):
        with pytest.raises(SchemaError, match="episode_id"):
            episodes.start(name)  # type: ignore[arg-type] # it is refused
        with pytest.raises(SchemaError, match="episode_id"):
            episodes.get_action(name, [0.0, 0.0])  # type: ignore[arg-type] # it is refused
    with pytest.raises(SchemaError, match="training_enabled"):
        episodes.start(training_enabled="no")  # type: ignore[arg-type] # it is refused
    with pytest.raises(SchemaError, match="truncated"):
        episodes.end(episodes.start("e"), truncated=1)  # type: ignore[arg-type] # it is refused
    assert episodes.episodes_running == 1


@pytest.mark.parametrize(
    ("space", "good", "bad"),
    [
        (gym.spaces.Discrete(3, start=1), [1, 3, np.uint8(2)], [0, 4, -1, 2**63 + 2, 1.0, None]),
        (gym.spaces.MultiDiscrete([2, 3]), [[1, 2]], [[2, 0], [0, -1], [1]]),
        (gym.spaces.MultiBinary(2), [[0, 1], [True, False]], [[0, 2], [-1, 0]]),
        (gym.spaces.Box(0, 255, (2,), np.uint8), [[0, 255]], [[0, 256], [-1, 0], [0.5, 1.0]]),
        (
            gym.spaces.Box(-9, 9, (1,), np.float32),
            [[1], [-9]],
            [[1e39], [10**400], [9.5], [np.nan], [np.inf]],
        ),
        (gym.spaces.Box(-np.inf, 9, (1,), np.float32), [[1], [-np.inf]], [[9.5], [np.nan]]),
        (gym.spaces.Box(0, 9, (1,), np.int8), [[1]], [[-1], [10], [300]]),
        (gym.spaces.Text(3), ["abc"], ["abcd", 3, {"a": 1}]),
        (gym.spaces.Sequence(gym.spaces.Discrete(3)), [(1, 2), ()], [(3,), 1, "x", None, ((1,),)]),
        (gym.spaces.OneOf([gym.spaces.Discrete(2)]), [(0, 1)], [(1, 1), (0, 2), 0, ("0", 1), None]),
    ],
)
def test_values_go_into_a_space_that_holds_them(space: Any, good: list[Any], bad: list[Any]) -> None:
    """Lists of Python's numbers are int64 and float64; nothing wraps round, or is cut, in silence."""
    episodes = made(spaces=(space, ACT), immediate=True)
    for value in good:
        name = episodes.start()
        episodes.get_action(name, value)
        episodes.end(name)
        assert episodes.take()["obs"].tolist() == [value]
    for value in bad:
        with pytest.raises(SchemaError, match="obs"):
            episodes.get_action(episodes.start(), value)
    if space.shape is not None:  # A policy can act in it.
        episodes = made(spaces=(OBS, space), immediate=True)
        for value in bad:
            with pytest.raises(SchemaError, match="actions"):
                episodes.log_action(episodes.start(), [0.0, 0.0], value)


# ---- loops that vanish ----


def test_episodes_whose_loops_are_gone_can_be_given_up() -> None:
    """What is known of them stays; the row of the last action, of which nobody knows what came, does not."""
    episodes = made(immediate=True)
    gone, here = episodes.start(), episodes.start()
    for t in range(3):
        episodes.get_action(gone, [0.0, float(t)])
        episodes.get_action(here, [1.0, float(t)])
    episodes._episodes[gone].heard -= 100
    assert episodes.abandon_silent(50) == [gone]
    assert episodes.episodes_running == 1
    episodes.end(here, [1.0, 3.0])
    batch = episodes.take()
    assert_array_equal(batch["obs"], [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2]])
    assert_array_equal(batch["new_obs"], [[0, 1], [0, 2], [1, 1], [1, 2], [1, 3]])
    assert_array_equal(batch["terminateds"], [False] * 4 + [True])
    assert not len(episodes._rows)
    assert episodes.progress.dropped == 1
    with pytest.raises(OptionError, match="no episode"):
        episodes.abandon(gone)


def test_of_whole_episodes_nothing_is_kept_that_is_given_up() -> None:
    episodes = made(immediate=True)
    name = episodes.start()
    for t in range(3):
        episodes.get_action(name, [0.0, float(t)])
    episodes.abandon(name, keep_rows=False)
    assert not len(episodes._rows)
    assert episodes.progress.dropped == 3


def test_a_loop_that_waits_is_not_gone() -> None:
    episodes = made()
    name = episodes.start()
    thread, _ = in_thread(lambda: episodes.get_action(name, [0.0, 0.0]))
    until_waiting(episodes)
    episodes._episodes[name].heard -= 100
    assert episodes.abandon_silent(50) == []
    episodes.serve()
    thread.join(60)
    assert episodes.abandon_silent(50) == []


def test_memory_does_not_grow_with_the_number_of_episodes() -> None:
    episodes = made(immediate=True)
    for number in range(50):
        name = episodes.start(training_enabled=number % 2 == 0)
        for t in range(3):
            episodes.get_action(name, [0.0, float(t)])
        episodes.end(name)
        episodes.take()
    assert left_in(episodes) == [0, 0, 0]


# ---- the runner ----


class Loop(ExternalEnv):
    def __init__(self, run: Callable[[Loop], None]) -> None:
        super().__init__(OBS, ACT)
        self._run = run

    def run(self) -> None:
        self._run(self)


def one_episode(env: Loop, steps: int = 3) -> None:
    name = env.start_episode()
    for t in range(steps):
        env.get_action(name, [0.0, float(t)])
    env.end_episode(name, [0.0, float(steps)])


def test_an_error_of_the_loop_is_no_end_of_the_data() -> None:
    """It is raised first, then come the rows before it, and then it is raised again."""

    def fails(env: Loop) -> None:
        one_episode(env)
        raise ClosedError("a file of the simulator's, not this runner")

    runner = ExternalRunner(Loop(fails), RandomPolicy())
    with pytest.raises(EnvError, match="raised ClosedError"):
        runner.run(50)
    assert len(runner.run(50)) == 3
    with pytest.raises(EnvError, match="a file"):
        runner.run(50)
    with pytest.raises(EnvError, match="a file"):
        runner.assert_healthy()
    runner.stop()


def test_what_happens_between_looking_and_waiting_is_seen_at_once(monkeypatch: Any) -> None:
    """Rows become ready after `enough` has looked, and before it waits: no wake-up is lost."""
    monkeypatch.setattr("rlio.sampling.external_runner.LOOK_SECONDS", 3600.0)
    looked, go = threading.Event(), threading.Event()

    def plays(env: Loop) -> None:
        name = env.start_episode()
        env.get_action(name, [0.0, 0.0])
        looked.wait(60)
        env.end_episode(name, [0.0, 1.0])
        go.wait(120)

    runner = ExternalRunner(Loop(plays), RandomPolicy())
    runner.serve_until(lambda: bool(runner.episodes._rows))

    def enough() -> bool:
        ready = runner.rows_ready > 0
        if not looked.is_set():
            looked.set()
            # The loop ends its episode now, if the lock lets it.
            threading.Event().wait(0.05)
        return ready

    thread, found = in_thread(lambda: runner.serve_until(enough))
    thread.join(60)
    assert found == [None]
    go.set()
    runner.stop()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_sampler_that_waits_for_a_loop_can_be_stopped(ahead: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr("rlio.sampling.external_runner._STOP_SECONDS", 0.01)
    hangs = threading.Event()
    runner = ExternalRunner(Loop(lambda env: hangs.wait() and None), RandomPolicy())
    reader = AsyncInput(SamplerInput(runner)) if ahead else SamplerInput(runner)
    sampling, found = in_thread(reader.sample)
    while not runner.episodes.changed._waiters:  # type: ignore[attr-defined]
        assert sampling.is_alive()
    closing, closed = in_thread(reader.close)
    for thread in (closing, sampling):
        thread.join(60)
    hangs.set()
    assert closed == [None]
    assert isinstance(found[0], ClosedError)


def test_a_trajectory_that_is_cut_by_the_fragment_goes_on_in_the_next() -> None:
    """Upstream test_external_env: truncated trajectories; unroll ids differ, episode ids do not."""
    runner = ExternalRunner(Loop(lambda env: one_episode(env, 10)), RandomPolicy(), seed=0)
    first, second = runner.run(4), runner.run(6)
    assert_array_equal(np.concatenate([first["t"], second["t"]]), range(10))
    assert len(set(first["eps_id"]) | set(second["eps_id"])) == 1
    assert set(first["unroll_id"]).isdisjoint(second["unroll_id"])
    assert not first["terminateds"].any()
    assert_array_equal(second["terminateds"], np.arange(len(second)) == len(second) - 1)
    with pytest.raises(EndOfData):
        runner.run(1)
    runner.stop()


def test_counters_go_on_from_a_state_and_whole_episodes_stay_whole() -> None:
    config = RolloutConfig(batch_mode="complete_episodes", rollout_fragment_length=1)
    runner = ExternalRunner(Loop(lambda env: one_episode(env)), RandomPolicy(), config=config)
    state = runner.state_dict()
    runner.load_state_dict(state | {"timesteps": 100, "steps_dropped": 7})
    assert runner.run()["t"].tolist() == [0, 1, 2]
    assert runner.state_dict() == state | {
        "timesteps": 103,
        "steps_dropped": 7,
        "restarts": 1,
        "unrolls": runner.state_dict()["unrolls"],
    }
    for broken in ({"timesteps": 100}, state | {"unrolls": "x"}):
        with pytest.raises(StateError):
            runner.load_state_dict(broken)
    runner.stop()


def test_a_restored_seeded_runner_repeats_no_episode_id_and_no_unroll_id() -> None:
    """Rows after the save, and episodes whose loops began before the state was loaded, included."""

    def made() -> ExternalRunner:
        return ExternalRunner(Loop(lambda env: one_episode(env, 200)), RandomPolicy(), seed=3)

    first, again, other = made(), made(), made()
    before = [first.run(10)]
    state = json.loads(json.dumps(first.state_dict()))
    before.append(first.run(10))
    restored = []
    for runner in (again, other):
        until_waiting(runner.episodes)
        if runner is other:
            runner.run(5)  # These rows are handed out before; the episode goes on.
        runner.load_state_dict(state)
        restored.append(runner.run(10))
    for runner in (first, again, other):
        runner.stop()
    for name in ("eps_id", "unroll_id"):
        seen = set(np.concatenate([batch[name] for batch in before]).tolist())
        for batch in restored:
            assert len(set(batch[name].tolist())) == 1, "rows of one episode have one id"
            assert seen.isdisjoint(batch[name].tolist()), name
    assert_array_equal(restored[0]["eps_id"][:1], restored[1]["eps_id"][:1])  # as those of an EnvRunner


def test_rows_that_wait_when_a_state_is_loaded_are_counted_and_get_the_new_ids() -> None:
    runner = ExternalRunner(Loop(lambda env: one_episode(env, 50)), RandomPolicy(), seed=3)
    before = runner.run(10)
    state = runner.state_dict()
    runner.serve_until(lambda: runner.rows_ready >= 5)
    waiting = runner.rows_ready
    assert runner.state_dict()["steps_dropped"] == waiting, "who loads this state never has them"
    runner.load_state_dict(state)
    assert runner.timesteps == state["timesteps"] + waiting
    batch = runner.run(10)
    assert len(set(batch["eps_id"].tolist())) == 1
    assert batch["eps_id"][0] != before["eps_id"][0]
    assert batch["t"].tolist() == list(range(len(before), len(before) + len(batch)))
    runner.stop()
