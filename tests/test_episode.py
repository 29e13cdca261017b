"""Episode: N actions, N + 1 observations, and nothing invented."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlio.batch import SampleBatch
from rlio.batch.episode import Episode
from rlio.errors import MissingColumn, SchemaError


def episode(steps: int = 4, *, final: bool = True, nested: bool = False, **more: Any) -> Episode:
    obs: Any = np.arange(steps + final, dtype=np.float32)[:, None] * 10
    if nested:
        obs = {"x": obs, "y": (obs.astype(np.uint8),)}
    return Episode(
        **{
            "id_": 5,
            "observations": obs,
            "actions": np.arange(steps),
            "rewards": np.arange(steps, dtype=np.float32),
            "infos": [{"i": i} for i in range(steps)],
            "extra_outputs": {"action_logp": np.zeros(steps, np.float32)},
            **more,
        }
    )


class TestEpisode:
    def test_it_knows_what_it_is(self) -> None:
        ep = episode(terminated=True)
        assert (len(ep), ep.total_reward, ep.is_done, ep.has_final_observation) == (4, 6.0, True, True)
        assert not episode().is_done
        assert episode(truncated=True).is_done
        assert repr(episode(final=False, agent_id="x", t_started=3)) == (
            "Episode(5 of agent 'x': steps 3 to 7, not ended, final observation missing)"
        )

    @pytest.mark.parametrize("observations", [3, 6])
    def test_another_number_of_observations_is_refused(self, observations: int) -> None:
        with pytest.raises(SchemaError, match=f"{observations} observations for 4 actions: expected 5, or 4"):
            episode(observations=np.zeros(observations))

    @pytest.mark.parametrize("name", ["rewards", "infos"])
    def test_columns_have_one_row_an_action(self, name: str) -> None:
        with pytest.raises(SchemaError, match=f"3 rows but 'actions' has 4.*column {name}"):
            episode(**{name: [1, 2, 3]})

    @pytest.mark.parametrize("name", ["obs", "t", "seq_lens", "state_in_0", "new_obs_valid", "infos"])
    def test_extra_outputs_cannot_take_a_name_with_a_meaning(self, name: str) -> None:
        with pytest.raises(SchemaError, match="meaning of its own"):
            episode(extra_outputs={name: np.zeros(4)})


class TestToBatch:
    def test_rows_hold_each_transition(self) -> None:
        batch = episode(terminated=True, t_started=2).to_batch()
        assert batch["obs"].ravel().tolist() == [0, 10, 20, 30]
        assert batch["new_obs"].ravel().tolist() == [10, 20, 30, 40]
        assert batch["terminateds"].tolist() == [False, False, False, True]
        assert batch["truncateds"].tolist() == [False] * 4
        assert batch["t"].tolist() == [2, 3, 4, 5]
        assert batch["eps_id"].tolist() == [5] * 4
        assert "new_obs_valid" not in batch
        assert "agent_index" not in batch
        assert batch["action_logp"].dtype == np.float32

    def test_columns_that_share_memory_are_read_only(self) -> None:
        batch = episode().to_batch()
        assert np.shares_memory(batch["obs"], batch["new_obs"])
        for name in ("obs", "new_obs"):
            with pytest.raises(ValueError, match="read-only"):
                batch[name][0] = 1

    def test_a_missing_final_observation_is_zeros_and_marked(self) -> None:
        batch = episode(final=False, nested=True).to_batch()
        assert batch["new_obs"]["x"].ravel().tolist() == [10, 20, 30, 0]
        assert batch["new_obs"]["y"][0].dtype == np.uint8
        assert batch["new_obs_valid"].tolist() == [True, True, True, False]

    def test_agents_are_kept(self) -> None:
        assert episode(agent_id=3).to_batch()["agent_index"].tolist() == [3] * 4
        assert episode(agent_id="left").to_batch()["agent_id"].tolist() == ["left"] * 4

    def test_an_episode_of_no_steps_gives_an_empty_batch_with_dtypes(self) -> None:
        for final in (True, False):
            batch = episode(0, final=final).to_batch()
            assert len(batch) == 0
            assert batch["new_obs"].shape == (0, 1)
            assert batch["new_obs"].dtype == np.float32


class TestFromBatch:
    @given(
        steps=st.integers(1, 5),
        final=st.booleans(),
        nested=st.booleans(),
        terminated=st.booleans(),
        truncated=st.booleans(),
        agent_id=st.sampled_from([None, 2, "b"]),
        id_=st.sampled_from([7, "seven"]),
        t_started=st.integers(0, 3),
    )
    @settings(max_examples=40, deadline=None)
    def test_the_round_trip_is_exact(self, steps: int, final: bool, nested: bool, **more: Any) -> None:
        first = episode(steps, final=final, nested=nested, **more)
        second = Episode.from_batch(first.to_batch())
        assert repr(second) == repr(first)
        assert (second.id_, second.agent_id) == (more["id_"], more["agent_id"])
        assert second.to_batch().equals(first.to_batch())

    def test_without_new_obs_the_final_observation_is_missing(self) -> None:
        ep = Episode.from_batch(
            SampleBatch(obs=[1.0, 2.0], actions=[0, 1], rewards=[0.0, 0.0], eps_id=[1, 1])
        )
        assert not ep.has_final_observation
        assert ep.t_started == 0

    def test_an_id_may_be_given(self) -> None:
        batch = SampleBatch(obs=[1.0], actions=[0], rewards=[0.0])
        assert Episode.from_batch(batch, id_="x").id_ == "x"
        with pytest.raises(MissingColumn, match="id_"):
            Episode.from_batch(batch)

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"eps_id": [1, 1, 2]}, "split_by_episode"),
            ({"t": [0, 1, 3]}, "row 2 is step 3 but follows step 1"),
            ({"terminateds": [False, True, False]}, "row 1 of 3"),
            ({"truncateds": [True, False, False]}, "row 0 of 3"),
            ({"new_obs": [2.0, 9.0, 4.0]}, "not the obs of the next row"),
            ({"agent_index": [0, 0, 1]}, "agent_index"),
            ({"seq_lens": np.array([1, 2])}, "no sequences"),
        ],
    )
    def test_rows_that_are_no_single_trajectory_are_refused(self, change: dict[str, Any], match: str) -> None:
        columns = {"obs": [1.0, 2.0, 3.0], "actions": [0] * 3, "rewards": [0.0] * 3, "eps_id": [1] * 3}
        with pytest.raises(SchemaError, match=match):
            Episode.from_batch(SampleBatch({**columns, **change}))

    def test_an_empty_batch_is_refused(self) -> None:
        with pytest.raises(SchemaError, match="without rows"):
            Episode.from_batch(SampleBatch())


class TestParts:
    @given(steps=st.integers(0, 6), cut=st.integers(0, 6), final=st.booleans(), nested=st.booleans())
    @settings(max_examples=40, deadline=None)
    def test_slices_join_to_the_whole(self, steps: int, cut: int, final: bool, nested: bool) -> None:
        whole = episode(steps, final=final, nested=nested, truncated=True, t_started=2)
        head, tail = whole.slice(0, cut), whole.slice(cut)
        if cut < steps:
            assert not head.is_done
            assert head.has_final_observation
            assert head.concat(tail).to_batch().equals(whole.to_batch())
        else:
            assert head.is_done
            assert len(tail) == 0

    def test_slices_count_from_the_chunk_and_may_be_negative(self) -> None:
        part = episode(t_started=10, terminated=True).slice(-2)
        assert (part.t_started, part.observations.ravel().tolist()) == (12, [20, 30, 40])
        assert part.terminated
        assert not episode(terminated=True).slice(1, 2).terminated

    def test_a_chunk_without_final_observation_is_continued_by_the_next_one(self) -> None:
        whole = episode()
        head = episode(2, final=False)
        joined = head.concat(whole.slice(2))
        assert joined.to_batch().equals(whole.to_batch())

    @pytest.mark.parametrize(
        ("first", "second", "match"),
        [
            ({}, {"id_": 6}, "same id"),
            ({}, {"agent_id": 1}, "same id"),
            ({"terminated": True}, {}, "has ended"),
            ({}, {"t_started": 5}, "start at step 4"),
            ({}, {"infos": None}, "infos or extra outputs"),
            ({}, {"extra_outputs": {}}, "infos or extra outputs"),
            ({}, {}, "not where the second starts"),
        ],
    )
    def test_chunks_that_do_not_follow_are_refused(
        self, first: dict[str, Any], second: dict[str, Any], match: str
    ) -> None:
        with pytest.raises(SchemaError, match=match):
            episode(**first).concat(episode(**{"t_started": 4, **second}))
