"""ExternalMultiAgentEnv: loops of several agents ask for actions, log their own, join late, leave early."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import rlio
from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.errors import ClosedError, EndOfData, EnvError, OptionError
from rlio.policies.policy import Policy
from rlio.sampling import ExternalAgentsRunner, PolicySetup
from rlio.sampling.callbacks import Callbacks

OBS, ACTIONS = Box(-100.0, 100.0, (1,), np.float32), Discrete(5)


class Always(Policy):
    """Acts with one number, with a probability."""

    def __init__(self, action: int = 1) -> None:
        self.action = action

    def compute_actions(
        self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
    ) -> Any:
        logp = np.full(len(obs), -0.5, np.float32)
        return np.full(len(obs), self.action), state, {"action_logp": logp}


class Played(rlio.envs.ExternalMultiAgentEnv):
    """Its loop is a function; spaces are those of any agent, or by agent."""

    def __init__(self, play: Callable[[Any], None], agents: tuple[Any, ...] = ()) -> None:
        spaces: tuple[Any, Any] = (OBS, ACTIONS)
        if agents:
            spaces = dict.fromkeys(agents, OBS), dict.fromkeys(agents, ACTIONS)
        super().__init__(*spaces)
        self._play = play
        self.raised: list[BaseException] = []

    def run(self) -> None:
        self._play(self)

    def refused(self, call: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Keep the error of a call, which the loop survives."""
        try:
            call(*args, **options)
        except rlio.RlioError as error:
            self.raised.append(error)


@contextmanager
def runner_of(
    play: Callable[[Any], None],
    policies: Any = None,
    mapping: Any = None,
    *,
    agents: Any = (),
    **options: Any,
) -> Iterator[ExternalAgentsRunner]:
    more = {name: options.pop(name) for name in ("callbacks", "timeout") if name in options}
    config = rlio.RolloutConfig(**{"rollout_fragment_length": 4} | options)
    runner = ExternalAgentsRunner(
        Played(play, agents), policies or {"p": Always()}, config=config, seed=0, **more
    )
    try:
        yield runner
    finally:
        runner.stop()


def game(env: Any, *, logged: bool = False, steps: int = 4) -> None:
    """ "a" sees 0, 1, .. and earns t; "late" joins at step 1, sees 10 + t and earns 10 + t."""
    name = env.start_episode()
    for t in range(steps):
        seen = {"a": [t]} | ({"late": [10 + t]} if t else {})
        if logged:
            env.log_action(name, seen, dict.fromkeys(seen, 3))
        else:
            assert env.get_action(name, seen) == dict.fromkeys(seen, 1)
        env.log_returns(name, {agent: float(t + 10 * (agent == "late")) for agent in seen})
    env.end_episode(name, {"a": [steps], "late": [10 + steps]})


def rows_of(batch: Any, agent: int, policy_id: str = "p") -> SampleBatch:
    rows = batch[policy_id]
    own: SampleBatch = rows[np.flatnonzero(rows["agent_index"] == agent)]
    return own


def listed(rows: SampleBatch, *names: str) -> list[list[Any]]:
    return [np.asarray(rows[name]).ravel().tolist() for name in names]


# ---- rows ----


def test_agents_of_a_loop_share_steps_and_one_joins_late() -> None:
    with runner_of(lambda env: game(env)) as runner:
        batch = runner.run(4)
        assert isinstance(batch, MultiAgentBatch)
        assert (batch.env_steps(), batch.agent_steps()) == (4, 7)
        assert listed(rows_of(batch, 0), "t", "obs", "new_obs", "rewards", "terminateds") == [
            [0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3, 4], [0, 1, 2, 3], [False] * 3 + [True],
        ]  # fmt: skip
        assert listed(rows_of(batch, 1), "t", "obs", "new_obs", "rewards", "terminateds") == [
            [1, 2, 3], [11, 12, 13], [12, 13, 14], [11, 12, 13], [False, False, True],
        ]  # fmt: skip
        assert set(batch["p"]["actions"]) == {1}
        assert not batch["p"]["logged_action"].any()
        assert len(set(batch["p"]["eps_id"])) == 1
        with pytest.raises(EndOfData, match=r"run\(\) ended"):
            runner.run()
        summary = runner.get_metrics().summarise()
        assert (summary["num_episodes"], summary["episode_return_mean"]) == (1, 42.0)
        assert summary["agent_episode_returns_mean"] == {"a": 6.0, "late": 36.0}
        assert summary["num_agent_steps_sampled"] == {"a": 4, "late": 3}


def test_logged_actions_are_recorded_and_their_likelihoods_unknown() -> None:
    def play(env: Any) -> None:
        game(env)
        game(env, logged=True)

    with runner_of(play) as runner:
        batch = runner.run(8)
        for agent, steps in ((0, 4), (1, 3)):
            rows = rows_of(batch, agent)
            assert listed(rows, "actions", "logged_action") == [
                [1] * steps + [3] * steps,
                [False] * steps + [True] * steps,
            ]
            assert np.isnan(rows["action_logp"]).tolist() == [False] * steps + [True] * steps


def test_agents_leave_early_and_are_rewarded_before_and_between_their_turns() -> None:
    def play(env: Any) -> None:
        name = env.start_episode("one")
        env.get_action(name, {"a": [0], "b": [10]})
        env.log_returns(name, {"a": 1.0, "c": 5.0}, {"a": {"k": 1}})
        env.log_returns(name, {"a": 1.0}, None, {"b": True})
        assert env.get_action(name, {"a": [1], "b": [11]}) == {"a": 1}, "b has ended"
        assert env.get_action(name, {"c": [22]}) == {"c": 1}
        env.log_returns(name, {"a": 0.5})
        env.end_episode(name, {"c": [23]}, truncated=True)

    with runner_of(play, agents=("a", "b", "c"), record_infos=True) as runner:
        batch = runner.run(3)
        a, b, c = (rows_of(batch, agent) for agent in range(3))
        names = ("t", "obs", "new_obs", "rewards", "terminateds", "truncateds")
        assert listed(a, *names[:4]) == [[0, 1], [0, 1], [1, 0], [2.0, 0.5]]
        assert a["new_obs_valid"].tolist() == [True, False], "nothing was seen of a after its last action"
        assert a["infos"].tolist() == [{"k": 1}, {}]
        assert listed(b, *names) == [[0], [10], [11], [0.0], [True], [False]]
        assert listed(c, *names) == [[2], [22], [23], [5.0], [False], [True]]


def test_any_number_of_episodes_of_one_or_several_threads_run_side_by_side() -> None:
    def play(env: Any) -> None:
        one, other = env.start_episode(), env.start_episode()
        for t in range(3):
            for name, first in ((one, 0), (other, 50)):
                env.get_action(name, {"a": [first + t], "b": [first + 10 + t]})
        env.end_episode(one, {"a": [3], "b": [13]})
        env.end_episode(other, {"a": [53], "b": [63]})
        threads = [threading.Thread(target=game, args=(env,)) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with runner_of(play, batch_mode="complete_episodes") as runner:
        seen = [runner.run(6)]
        while sum(batch.env_steps() for batch in seen) < 6 + 5 * 4:
            seen.append(runner.run(6))
        with pytest.raises(EndOfData):
            runner.run()
        rows = rlio.concat_samples([batch["p"] for batch in seen])
        assert len(rows) == 12 + 5 * 7
        for episode in np.unique(rows["eps_id"]):
            for agent in (0, 1):
                own = rows[np.flatnonzero((rows["eps_id"] == episode) & (rows["agent_index"] == agent))]
                assert own["new_obs"][:-1].tolist() == own["obs"][1:].tolist()
                assert own["terminateds"].tolist() == [False] * (len(own) - 1) + [True]


def test_sample_returns_episodes_of_all_agents() -> None:
    def play(env: Any) -> None:
        for _ in range(3):
            game(env)

    with runner_of(play) as runner:
        (chunk,) = runner.sample(num_timesteps=2)
        assert chunk.env_steps() == 2
        (rest,) = runner.sample(num_episodes=1)
        assert chunk.leads_to(rest), "a running episode goes on"
        assert (rest.env_steps(), rest.is_done, sorted(rest.agent_ids)) == (2, True, ["a", "late"])
        assert len(runner.sample(num_episodes=2)) == 2
        for options in ({"random_actions": True}, {"force_reset": True}):
            with pytest.raises(OptionError, match="loops"):
                runner.sample(**options)


def test_episodes_may_be_left_out_of_training() -> None:
    def play(env: Any) -> None:
        name = env.start_episode(None, False)
        env.get_action(name, {"a": [7]})
        env.end_episode(name)
        game(env)

    with runner_of(play) as runner:
        batch = runner.run(5)
        assert 7.0 not in batch["p"]["obs"]
        assert runner.steps_dropped == 1


# ---- a worker ----


def test_a_worker_samples_a_loop_of_agents_with_several_policies(tmp_path: Path) -> None:
    """As an `ExternalEnv` does: recorded, postprocessed, with callbacks, and made by a function."""
    log: list[Any] = []

    class Tells(Callbacks):
        def on_episode_start(self, *, episode: Any, **kwargs: Any) -> None:
            log.append(("start", sorted(episode.agent_rewards)))

        def on_episode_step(self, *, episode: Any, **kwargs: Any) -> None:
            log.append(("step", episode.length, sorted(episode.last_observation)))

        def on_episode_end(self, *, episode: Any, **kwargs: Any) -> None:
            log.append(("end", episode.total_reward))

        def on_postprocess_trajectory(self, *, agent_id: Any, original_batches: Any, **kwargs: Any) -> None:
            log.append(("post", agent_id, sorted(original_batches)))

    def play(env: Any) -> None:
        name = env.start_episode()
        actions = env.get_action(name, {"a": [0], "b": [1]})
        assert actions == {"a": 2, "b": 4}
        env.log_returns(name, {"a": 1.0, "b": 2.0})
        env.end_episode(name, {"a": [2], "b": [3]})

    with rlio.RolloutWorker(
        lambda: Played(play),
        {"first": Always(2), "second": Always(4)},
        output=tmp_path,
        rollout=rlio.RolloutConfig(rollout_fragment_length=1, batch_mode="complete_episodes"),
        policy_setup=PolicySetup(policy_mapping_fn=lambda agent, _: "first" if agent == "a" else "second"),
        callbacks=Tells,
        seed=0,
    ) as worker:
        batch = worker.sample()
        assert {name: rows["actions"].tolist() for name, rows in batch.policies().items()} == {
            "first": [2],
            "second": [4],
        }
        assert type(worker.runner) is ExternalAgentsRunner
        assert [type(env) for env in worker.foreach_env(lambda env: env)] == [Played]
        assert worker.get_spaces()["first"] == (OBS, ACTIONS)
        assert worker.get_state("position")
    assert log[:2] == [("start", [("a", "first"), ("b", "second")]), ("step", 1, ["a", "b"])]
    assert sorted(log[2:]) == [("end", 3.0), ("post", "a", ["a", "b"]), ("post", "b", ["a", "b"])]
    assert len(rlio.open_dataset(tmp_path)) == 2


# ---- what is refused ----


def test_a_loop_gets_its_own_mistakes_and_goes_on() -> None:
    def play(env: Any) -> None:
        name, no = env.start_episode("one"), env.refused
        no(env.start_episode, "one")
        no(env.get_action, "two", {"a": [0]})
        no(env.log_returns, name, {"a": 1.0})
        no(env.get_action, name, {"a": [1000]})
        no(env.get_action, name, {"z": [0]})
        no(env.log_action, name, {"a": [0]}, {"a": 9})
        no(env.log_action, name, {"a": [0]}, {})
        env.get_action(name, {"a": [0], "b": [10]})
        no(env.log_returns, name, {"a": float("nan")})
        no(env.log_returns, name, {"z": 1.0})
        no(env.log_returns, name, {"a": 1.0}, None, {"__all__": True})
        no(env.log_returns, name, {"a": 1.0}, None, {"b": "yes"})
        no(env.log_returns, name, {"a": 1.0}, {"a": 3})
        no(env.end_episode, name, truncated="no")
        env.log_returns(name, {"a": 1.0}, None, {"b": True})
        env.get_action(name, {"a": [1], "b": [11]})
        no(env.get_action, name, {"a": [2], "b": [12]})
        env.end_episode(name, {"a": [2]})

    with runner_of(play, agents=("a", "b")) as runner:
        batch = runner.run(2)
        found = [str(error) for error in runner.envs[0].raised]
        for text, error in zip(
            (
                "'one' is already running", "no episode 'two' is running", "before its first action",
                "found 1000.0", "unknown agent 'z'", "found 9", r"got actions of []", "finite number",
                "unknown agent 'z'", "end_episode()", "dones['b']='yes'", "expected a mapping",
                "truncated='no'",
                "agent 'b', which has ended before",
            ),
            found,
            strict=True,
        ):  # fmt: skip
            assert text in error
        assert listed(rows_of(batch, 0), "obs", "new_obs", "rewards") == [[0, 1], [1, 2], [1.0, 0.0]]
        assert listed(rows_of(batch, 1), "obs", "new_obs", "terminateds") == [[10], [11], [True]]


def test_agents_of_one_space_have_results_once_they_were_seen() -> None:
    def play(env: Any) -> None:
        name = env.start_episode()
        env.get_action(name, {"a": [0]})
        env.refused(env.log_returns, name, {"b": 1.0})
        env.end_episode(name)

    with runner_of(play) as runner:
        assert runner.run(1)["p"]["new_obs_valid"].tolist() == [False]
        assert "agent 'b', which has had no observation" in str(runner.envs[0].raised[0])


def test_a_runner_of_one_agent_names_the_runner_of_several() -> None:
    with pytest.raises(OptionError, match="ExternalAgentsRunner"):
        rlio.sampling.ExternalRunner(Played(game), Always())
    with pytest.raises(OptionError, match="expected an ExternalMultiAgentEnv"):
        ExternalAgentsRunner("CartPole-v1", {"p": Always()})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="horizon=3: the sampler of an ExternalMultiAgentEnv"):
        ExternalAgentsRunner(Played(game), {"p": Always()}, config=rlio.RolloutConfig(horizon=3))
    for spaces in (({"a": OBS}, ACTIONS), ({"a": OBS}, {"b": ACTIONS}), ({}, {})):
        with pytest.raises(OptionError, match="the same agents"):
            rlio.envs.ExternalMultiAgentEnv(*spaces)  # type: ignore[arg-type]


# ---- ends ----


def test_an_error_of_the_loop_is_raised_where_experience_is_sampled() -> None:
    def play(env: Any) -> None:
        game(env)
        raise RuntimeError("the simulator is gone")

    with runner_of(play) as runner:
        with pytest.raises(EnvError, match="the simulator is gone"):
            runner.run(100)
        assert runner.run(100).env_steps() == 4, "the rows before the error"
        with pytest.raises(EnvError, match="the simulator is gone"):
            runner.run(100)
        with pytest.raises(EnvError):
            runner.assert_healthy()


def test_an_error_of_a_policy_reaches_the_sampler_and_the_loops_and_both_go_on() -> None:
    class Fails(Always):
        fails = True

        def compute_actions(self, *args: Any, **options: Any) -> Any:
            if self.fails:
                raise ValueError("no weights")
            return super().compute_actions(*args, **options)

    def play(env: Any) -> None:
        env.refused(game, env)
        game(env)

    policy = Fails()
    with runner_of(play, {"p": policy}) as runner:
        with pytest.raises(ValueError, match="no weights"):
            runner.run(4)
        policy.fails = False
        assert runner.run(4).env_steps() == 4
        assert "is lost, because sampling failed" in str(runner.envs[0].raised[0])


def test_stopping_wakes_a_loop_that_waits() -> None:
    def play(env: Any) -> None:
        name = env.start_episode()
        while True:
            env.refused(env.get_action, name, {"a": [0]})
            if env.raised:
                return

    with runner_of(play) as runner:
        runner.run(3)
        env = runner.envs[0]
    assert type(env.raised[0]) is ClosedError
    with pytest.raises(ClosedError):
        runner.run()


def test_a_loop_that_waits_too_long_gives_its_episode_up() -> None:
    given_up, go_on = threading.Event(), threading.Event()

    def play(env: Any) -> None:
        name = env.start_episode()
        env.refused(env.get_action, name, {"a": [0]})
        given_up.set()
        go_on.wait(60)
        game(env)

    with runner_of(play, timeout=0.2) as runner:
        env = runner.envs[0]
        assert given_up.wait(60)
        runner._loops._timeout = None  # On a busy machine an answer may take longer.
        go_on.set()
        assert "no actions were chosen" in str(env.raised[0])
        assert runner.run(4)["p"]["obs"].min() == 0.0
        assert runner.get_metrics().counts.episodes == 1


@pytest.mark.parametrize(("mode", "rows"), [("truncate_episodes", 2), ("complete_episodes", 0)])
def test_rows_of_a_silent_loop_are_kept_if_their_outcome_is_known(mode: Any, rows: int) -> None:
    quiet, given_up = threading.Event(), threading.Event()

    def play(env: Any) -> None:
        name = env.start_episode()
        for t in range(3):
            env.get_action(name, {"a": [50 + t]})
        quiet.set()
        given_up.wait()
        env.refused(env.get_action, name, {"a": [53]})
        game(env)

    with runner_of(play, batch_mode=mode) as runner:

        def give_up() -> None:
            quiet.wait()
            while not runner.abandon_silent(0.01):
                time.sleep(0.01)
            given_up.set()

        threading.Thread(target=give_up).start()
        batch = runner.run(4)
        assert "no episode" in str(runner.envs[0].raised[0])
        assert int((batch["p"]["obs"] >= 50).sum()) == rows
        counts = runner.get_metrics().counts
        assert (counts.faulty_episodes, counts.rows_dropped) == (1, 3 - rows)


def test_a_restored_runner_counts_on_and_has_other_episode_ids() -> None:
    with runner_of(game) as runner:
        first = runner.run(4)
        state = runner.state_dict()
    with runner_of(game) as again:
        again.load_state_dict(state)
        second = again.run(4)
        assert not set(first["p"]["eps_id"]) & set(second["p"]["eps_id"])
        assert again.timesteps == 14
