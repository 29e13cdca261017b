"""MultiAgentEpisode: looking into it, cutting it and putting it together, as rows and as a state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counter_agents import AgentCounter, Chosen, map_agent
from hypothesis import given, settings
from hypothesis import strategies as st

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.batch.episode import Episode
from rlio.errors import MissingColumn, OptionError, SchemaError, StateError
from rlio.policies.checkpoint import load_state, save_state
from rlio.sampling.config import RolloutConfig
from rlio.sampling.multi_agent_episode import MultiAgentEpisode
from rlio.sampling.multi_agent_runner import MultiAgentEnvRunner
from rlio.testing import assert_same


def made(**changes: Any) -> MultiAgentEpisode:
    """Steps 10 to 16 of an episode; observations are 100 and the step, actions the step, of "b" 200 and it.

    "a" acts in 10, 12 and 14 and sees 16; "b" acts in 11 and 12, has ended and saw nothing; "c" has seen 15.
    """
    a = Episode(
        5,
        agent_id="a",
        observations={"x": np.array([110, 112, 114, 116])},
        actions=np.array([10, 12, 14]),
        rewards=np.array([1.0, 2.0, 3.0]),
        infos=np.array([{"i": 10}, {"i": 12}, {"i": 14}], object),
        extra_outputs={"logp": np.array([0.1, 0.2, 0.3])},
        t_started=5,
    )
    b = Episode(
        5,
        agent_id="b",
        observations=np.array([211, 212]),
        actions=np.array([211, 212]),
        rewards=np.array([4.0, 5.0]),
        terminated=True,
        t_started=3,
    )
    options: dict[str, Any] = {
        "env_ts": {"a": [10, 12, 14, 16], "b": [11, 12]},
        "policy_ids": {"a": "main", "b": "other"},
        "env_t_started": 10,
        "env_t": 16,
    }
    return MultiAgentEpisode(5, {"a": a, "b": b}, **options | changes)


def plain(value: Any) -> Any:
    """Arrays as lists."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


# ---- looking into it ----


def test_values_are_found_by_the_environments_steps() -> None:
    """Reference 2.5: get_observations/actions/rewards/infos/extra_model_outputs by env step."""
    episode = made()
    assert plain(episode.get_actions(0)) == {"a": 10}
    assert plain(episode.get_actions(2)) == {"a": 12, "b": 212}
    assert plain(episode.get_actions(5)) == {}
    assert plain(episode.get_actions(-2)) == {"a": 14}
    assert plain(episode.get_actions([1, 2])) == {"a": [12], "b": [211, 212]}
    assert plain(episode.get_actions(slice(0, 3))) == {"a": [10, 12], "b": [211, 212]}
    assert plain(episode.get_actions()) == {"a": [10, 12, 14], "b": [211, 212]}
    assert plain(episode.get_observations(-1)) == {"a": {"x": 116}}
    assert plain(episode.get_observations(slice(-3, None))) == {"a": {"x": [114, 116]}}
    assert plain(episode.get_rewards(2, agent_ids=["b"])) == {"b": 5.0}
    assert episode.get_infos(4) == {"a": {"i": 14}}
    assert plain(episode.get_extra_outputs("logp", slice(2, None))) == {"a": [0.2, 0.3]}
    assert episode.get_extra_outputs("vf_preds") == {}


def test_values_may_come_as_a_list_of_dicts_and_with_something_where_there_is_nothing() -> None:
    episode = made()
    assert plain(episode.get_rewards(slice(0, 3), return_list=True)) == [
        {"a": 1.0},
        {"b": 4.0},
        {"a": 2.0, "b": 5.0},
    ]
    assert plain(episode.get_rewards([0, 1], fill=-1.0)) == {"a": [1.0, -1.0], "b": [-1.0, 4.0]}
    assert plain(episode.get_actions(3, fill=0)) == {"a": 0, "b": 0}
    assert plain(episode.get_actions([3, 4], fill=0, return_list=True)) == [
        {"a": 0, "b": 0},
        {"a": 14, "b": 0},
    ]


def test_fill_gives_values_of_steps_outside_the_episode() -> None:
    """RLlib: ``get_rewards(indices=9, fill=0.0)``, and slices that reach beyond both ends."""
    episode = made()
    assert plain(episode.get_rewards(9, fill=0.0)) == {"a": 0.0, "b": 0.0}
    assert plain(episode.get_rewards(-9, fill=0.5)) == {"a": 0.5, "b": 0.5}
    assert plain(episode.get_rewards([2, 9], fill=0.0)) == {"a": [2.0, 0.0], "b": [5.0, 0.0]}
    assert plain(episode.get_rewards(slice(4, 8), fill=0.0)) == {"a": [3.0, 0, 0, 0], "b": [0.0] * 4}
    assert plain(episode.get_rewards(slice(-8, -5), fill=0.0)) == {"a": [0, 0, 1.0], "b": [0.0] * 3}
    assert plain(episode.get_actions(slice(7, 3, -1), fill=0)["a"]) == [0, 0, 0, 14]
    assert plain(episode.get_actions(slice(None, None, -1), fill=0)["a"]) == [0, 14, 0, 12, 0, 10]
    assert plain(episode.get_observations(slice(6, 9), ["a"], fill=-1)) == {"a": {"x": [116, -1, -1]}}
    assert plain(episode.get_rewards(9, fill=0.0, return_list=True)) == [{"a": 0.0, "b": 0.0}]
    assert plain(episode.get_rewards(slice(2, 5), env_steps=False, fill=0.0)) == {
        "a": [3.0, 0, 0],
        "b": [0.0] * 3,
    }
    with pytest.raises(OptionError, match="has 6 such steps"):
        episode.get_rewards(9)


def test_fill_beyond_the_beginning_of_a_chunk_gives_its_lookback() -> None:
    """RLlib's buffer of 10 to 14, two of them lookback, answers slice(-7, -2) with [0, 0, 10, 11, 12]."""
    whole = made()
    chunk = whole.slice(4)
    chunk.lookback = whole.slice(0, 4).tail(1)
    assert plain(chunk.get_actions(slice(-6, None), fill=0)) == {"a": [0, 0, 12, 0, 14, 0]}


def test_fill_that_a_column_cannot_hold_is_refused() -> None:
    for fill in (0.5, float("nan"), 2.0**70):
        with pytest.raises(OptionError, match="the values are int64, which cannot hold it"):
            made().get_actions(3, fill=fill)


def test_fill_gives_values_of_an_agent_that_has_not_acted() -> None:
    waits = Episode(5, agent_id="c", observations=[1.0], actions=np.zeros(0, int), rewards=np.zeros(0))
    episode = MultiAgentEpisode(5, {"c": waits}, env_ts={"c": [3]}, policy_ids={"c": "main"}, env_t=4)
    assert plain(episode.get_rewards([0, 9], fill=7.0)) == {"c": [7.0, 7.0]}


def test_one_agent_may_be_named_alone_and_by_position() -> None:
    """RLlib: ``agent_ids``: "an optional collection of AgentIDs or a single AgentID", the second argument."""
    one = Episode(1, agent_id="agent_1", observations=[0, 1], actions=[3], rewards=[1.0])
    two = Episode(1, agent_id=2, observations=[0, 1], actions=[4], rewards=[2.0])
    episode = MultiAgentEpisode(
        1, {"agent_1": one, 2: two}, env_ts={"agent_1": [0, 1], 2: [0, 1]},
        policy_ids={"agent_1": "main", 2: "main"}, env_t=1,
    )  # fmt: skip
    assert plain(episode.get_rewards(0, "agent_1")) == {"agent_1": 1.0}
    assert plain(episode.get_actions(0, agent_ids=2)) == {2: 4}
    assert plain(episode.get_observations(0, ["agent_1", 2])) == {"agent_1": 0, 2: 0}


def test_values_are_found_by_the_agents_own_steps() -> None:
    episode = made()
    assert plain(episode.get_actions(-1, env_steps=False)) == {"a": 14, "b": 212}
    assert plain(episode.get_actions(2, env_steps=False)) == {"a": 14}
    assert plain(episode.get_observations(slice(1, 3), env_steps=False)) == {
        "a": {"x": [112, 114]},
        "b": [212],
    }
    assert plain(episode.get_rewards([0, 2], env_steps=False, fill=9)) == {"a": [1, 3], "b": [4, 9]}
    with pytest.raises(OptionError, match="each agent has its own"):
        episode.get_actions(0, env_steps=False, return_list=True)


def test_negative_steps_may_be_those_before_the_chunk() -> None:
    """Reference 2.5: neg_index_as_lookback."""
    whole = made()
    chunk = whole.slice(4)
    chunk.lookback = whole.slice(0, 4).tail(1)
    assert chunk.lookback.agent_steps() == 1, "b has ended before"
    assert plain(chunk.get_actions(-2, neg_index_as_lookback=True)) == {"a": 12}
    assert plain(chunk.get_actions([-2, 0], neg_index_as_lookback=True)) == {"a": [12, 14]}
    assert plain(chunk.get_actions(slice(-4, 1), neg_index_as_lookback=True)) == {"a": [12, 14]}
    assert plain(chunk.get_actions(-1, neg_index_as_lookback=True, env_steps=False)) == {"a": 12}
    assert plain(chunk.get_actions(0, env_steps=False, neg_index_as_lookback=True)) == {"a": 14}
    assert plain(chunk.get_actions([-4], neg_index_as_lookback=True, fill=0)) == {"a": [0]}
    assert plain(chunk.with_lookback().get_rewards()) == {"a": [2.0, 3.0]}
    assert whole.get_actions(-1, neg_index_as_lookback=True, env_steps=False) == {}, "there is no lookback"


def test_the_tail_of_an_episode_that_ended_has_not_ended() -> None:
    tail = made(terminated=True).tail(1)
    assert (tail.terminated, tail.truncated) == (False, False)


def test_what_is_not_there_is_told() -> None:
    episode = made()
    with pytest.raises(OptionError, match="has 6 such steps"):
        episode.get_actions(6)
    with pytest.raises(OptionError, match="has 7 such steps"):
        episode.get_observations([0, -8])
    with pytest.raises(OptionError, match="agent 'z' is not in this chunk"):
        episode.get_actions(agent_ids=["z"])
    with pytest.raises(OptionError, match="agent 'z'"):
        episode.policy_for("z")


def test_sizes_returns_and_ends() -> None:
    """Reference 2.5: env_steps/agent_steps, get_return."""
    episode = made()
    assert (len(episode), episode.env_steps(), episode.agent_steps()) == (6, 6, 5)
    assert episode.get_return() == 15.0
    assert episode.agent_returns() == {"a": 6.0, "b": 9.0}
    assert episode.agent_ids == ["a", "b"]
    assert episode.policy_for("b") == "other"
    assert not episode.is_done
    assert repr(episode) == "MultiAgentEpisode(5: env steps 10 to 16, 5 steps of 2 agents, ongoing)"


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(SchemaError, match="4 observations, at the steps"):
        made(env_ts={"a": [10, 12, 14], "b": [11, 12]})
    with pytest.raises(SchemaError, match="ascending"):
        made(env_ts={"a": [10, 12, 12, 16], "b": [11, 12]})
    with pytest.raises(SchemaError, match="policy_ids has the agents"):
        made(policy_ids={"a": "main"})
    with pytest.raises(SchemaError, match="env_t=9 is before"):
        made(env_t=9)


# ---- parts ----


def test_a_slice_has_the_rows_of_agents_that_acted_in_it() -> None:
    """Reference 2.5: slice."""
    episode = made(terminated=True)
    part = episode.slice(1, 3)
    assert (part.env_t_started, part.env_t, part.is_done) == (11, 13, False)
    assert plain(part.get_actions()) == {"a": [12], "b": [211, 212]}
    assert part.agent_episodes["b"].terminated
    assert plain(part.agent_episodes["a"].observations) == {"x": [112, 114]}
    assert part.env_ts["a"].tolist() == [12, 14]
    assert episode.slice(3).is_done
    assert episode.slice(-1).agent_steps() == 0


def test_a_cut_episode_goes_on_with_what_was_seen_last() -> None:
    """Reference 2.5: cut(lookback)."""
    episode = made()
    following = episode.cut(2)
    assert (following.env_t_started, following.env_t, following.agent_steps()) == (16, 16, 0)
    assert plain(following.get_observations(0)) == {"a": {"x": 116}}
    assert following.agent_ids == ["a"], "b has ended"
    assert following.lookback is not None
    assert plain(following.lookback.get_actions()) == {"a": [12, 14]}
    assert episode.leads_to(following)
    assert_same(episode.concat(following).to_batch(), episode.to_batch())
    with pytest.raises(OptionError, match="no chunk follows it"):
        made(truncated=True).cut()


@settings(max_examples=40, deadline=None)
@given(at=st.integers(0, 6))
def test_slices_put_together_are_the_episode(at: int) -> None:
    episode = made(truncated=True)
    first, second = episode.slice(0, at), episode.slice(at)
    if at < 6:
        assert first.leads_to(second)
        joined = first.concat(second)
        assert (joined.env_t_started, joined.env_t, joined.truncated) == (10, 16, True)
        assert_same(joined.to_batch(), episode.to_batch())
        assert {agent: ts.tolist() for agent, ts in joined.env_ts.items()} == {
            agent: ts.tolist() for agent, ts in episode.env_ts.items()
        }


def test_chunks_that_do_not_follow_one_another_are_not_joined() -> None:
    episode = made()
    first, second = episode.slice(0, 3), episode.slice(3)
    for one, other in ((first, episode), (second, first), (made(truncated=True), second)):
        with pytest.raises(SchemaError, match="cannot be followed by"):
            one.concat(other)
    gap = MultiAgentEpisode(
        5, {"a": episode.slice(4).agent_episodes["a"]}, env_ts={"a": [14, 16]}, policy_ids={"a": "main"},
        env_t_started=13, env_t=16,
    )  # fmt: skip
    assert first.leads_to(gap)
    before = episode.slice(0, 2)
    before.env_t = 13
    assert not before.leads_to(gap)
    with pytest.raises(SchemaError):
        before.concat(gap)
    second.policy_ids["a"] = "else"
    with pytest.raises(SchemaError, match="has the policy 'main' here, but 'else'"):
        first.concat(second)


# ---- as rows, as a state ----


def test_rows_are_by_policy_with_the_environments_steps() -> None:
    """Reference 2.5: get_sample_batch."""
    batch = made().to_batch()
    assert batch.env_steps() == 6
    assert batch["main"]["t"].tolist() == [10, 12, 14]
    assert batch["other"]["t"].tolist() == [11, 12]
    assert batch["other"]["agent_index"].tolist() == [1, 1]
    assert batch["other"]["new_obs_valid"].tolist() == [True, False]
    assert batch["main"]["new_obs"]["x"].tolist() == [112, 114, 116]
    assert "agent_id" not in batch["main"]
    back = MultiAgentEpisode.from_batch(batch, agents=["a", "b"])
    assert (back.env_t_started, back.env_t) == (10, 15)
    assert plain(back.get_actions(agent_ids=["b"])) == {"b": [211, 212]}
    assert back.policy_ids == {"a": "main", "b": "other"}
    for policy_id, rows in batch.items():
        assert_same(back.to_batch()[policy_id], rows)


def test_rows_of_a_runner_are_episodes_again() -> None:
    runner = MultiAgentEnvRunner(
        AgentCounter,
        {"even": Chosen(), "odd": Chosen()},
        map_agent,
        config=RolloutConfig(batch_mode="complete_episodes", record_infos=True),
        seed=11,
    )
    for episode in runner.sample(num_episodes=20):
        batch = episode.to_batch()
        back = MultiAgentEpisode.from_batch(batch, agents=AgentCounter.possible_agents)
        assert back.is_done
        assert back.id_ == episode.id_
        assert set(back.agent_ids) == set(episode.agent_ids)
        for policy_id, rows in batch.items():
            order = np.lexsort((rows["t"], rows["agent_index"]))
            assert_same(back.to_batch()[policy_id], rows[order])


def test_rows_that_are_no_episode_are_refused() -> None:
    batch = made().to_batch()
    main, other = batch["main"], batch["other"]
    with pytest.raises(SchemaError, match="has no rows"):
        MultiAgentEpisode.from_batch(MultiAgentBatch({"main": main[:0]}, 0))
    with pytest.raises(MissingColumn, match="distinguishes the rows"):
        MultiAgentEpisode.from_batch(MultiAgentBatch({"p": SampleBatch(obs=[1], t=[0])}, 1))
    for index in (["t", [12, 12]], ["eps_id", [6, 6]]):
        wrong = other.copy()
        wrong[str(index[0])] = np.array(index[1])
        with pytest.raises(SchemaError):
            MultiAgentEpisode.from_batch(MultiAgentBatch({"main": main, "other": wrong}, 6))


def test_a_state_is_json_and_arrays_and_gives_the_episode_back(tmp_path: Path) -> None:
    """Issue: episodes' states are JSON and .npz; reference 2.5: get_state/from_state."""
    episode = made(terminated=True)
    first = episode.slice(0, 3)
    chunk = episode.slice(3)
    chunk.lookback = first.tail(1)
    nested = Episode(
        5,
        agent_id=7,
        observations=(np.arange(3), {"y": np.zeros((3, 2), np.float32)}),
        actions=np.array([1, 2]),
        rewards=[0.0, 1.0],
    )
    more = MultiAgentEpisode(5, {7: nested}, env_ts={7: [13, 14, 15]}, policy_ids={7: "p"}, env_t=15)
    for each in (episode, chunk, more):
        save_state(tmp_path / "state", each.get_state())
        back = MultiAgentEpisode.from_state(load_state(tmp_path / "state"))
        assert_same(back.to_batch(), each.to_batch())
        assert (back.env_t_started, back.env_t, back.terminated, back.truncated) == (
            (each.env_t_started, each.env_t, each.terminated, each.truncated)
        )
        assert repr(back) == repr(each)
        assert {agent: ts.tolist() for agent, ts in back.env_ts.items()} == {
            agent: ts.tolist() for agent, ts in each.env_ts.items()
        }
        assert (back.lookback is None) == (each.lookback is None)
    with pytest.raises(StateError, match="not the state of a MultiAgentEpisode"):
        MultiAgentEpisode.from_state({"id": 3})
