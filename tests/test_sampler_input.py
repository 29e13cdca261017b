"""SamplerInput: a runner as a reader."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest

from rlio.batch import SampleBatch, concat_samples
from rlio.batch.episode import Episode
from rlio.errors import ClosedError, OptionError
from rlio.policies.policy import Policy
from rlio.policies.random_policy import RandomPolicy
from rlio.readers.mixed_input import MixedInput
from rlio.readers.sampler_input import SamplerInput
from rlio.sampling.callbacks import Callbacks
from rlio.sampling.config import RolloutConfig
from rlio.sampling.env_runner import EnvRunner
from rlio.testing import ReaderTests, assert_same


def reader_of(seed: int = 0, **config: Any) -> SamplerInput:
    options = {"rollout_fragment_length": 10, "num_envs": 2} | config
    return SamplerInput(EnvRunner("CartPole-v1", RandomPolicy(), config=RolloutConfig(**options), seed=seed))


class TestSamplerInput(ReaderTests):
    finite = False

    def make_reader(self) -> SamplerInput:
        return reader_of()

    def expected_rows(self) -> SampleBatch:
        runner = reader_of().runner
        assert isinstance(runner, EnvRunner)
        return concat_samples([runner.run() for _ in range(12)])


def test_a_batch_is_a_fragment_and_left_over_rows_are_kept() -> None:
    one, other = reader_of(), reader_of()
    assert len(one.sample()) == len(one.next()) == 20
    parts = [other.sample(7), other.sample(30), other.sample()]
    assert [len(part) for part in parts] == [7, 30, 3]
    assert_same(concat_samples(parts), concat_samples([reader_of().sample(40)]))


def test_it_is_not_replayable_and_says_how_many_rows_a_restored_one_drops(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = reader_of()
    reader.sample(7)
    state = json.loads(json.dumps(reader.state_dict()))
    assert not reader.replayable
    restored = reader_of(seed=5)
    with caplog.at_level(logging.WARNING, "rlio"):
        restored.load_state_dict(state)
    assert restored.dropped == 13
    assert "13 steps" in caplog.text
    batch = restored.sample()
    assert batch["t"][0] == 0
    assert batch["unroll_id"].min() >= 2
    assert restored.runner.timesteps == 40
    again = reader_of(seed=6)
    again.load_state_dict(state)
    # environments and ids; the policy's random numbers are the policy's own state
    assert np.array_equal(again.sample()["eps_id"][:1], batch["eps_id"][:1])


class Recorded:
    """A runner that is none of ours."""

    stopped = 0

    def __init__(self) -> None:
        self.number = 0

    def sample(self, *, num_timesteps: int | None = None, num_episodes: int | None = None) -> list[Episode]:
        self.number += 1
        return [
            Episode(
                10 * self.number + i,
                observations=np.arange(3.0),
                actions=[0, 1],
                rewards=[1.0, 2.0],
                terminated=bool(i),
            )
            for i in range(2)
        ]

    def stop(self) -> None:
        self.stopped += 1


def test_any_runner_of_episodes_will_do() -> None:
    runner = Recorded()
    with SamplerInput(runner) as reader:
        batch = reader.sample()
        assert batch["eps_id"].tolist() == [10, 10, 11, 11]
        assert batch["terminateds"].tolist() == [False, False, False, True]
        assert batch["new_obs"].tolist() == [1.0, 2.0, 1.0, 2.0]
        reader.load_state_dict(reader.state_dict())
    assert runner.stopped == 1
    with pytest.raises(ClosedError):
        reader.sample()


def test_what_is_no_runner_is_refused() -> None:
    with pytest.raises(OptionError, match="takes a runner"):
        SamplerInput(RandomPolicy())  # type: ignore[arg-type]


class Remembers(Policy):
    """Its state counts the steps."""

    max_seq_len = 4

    def initial_state(self, batch_size: int) -> Any:
        return (np.zeros(batch_size, np.int64),)

    def compute_actions(
        self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
    ) -> Any:
        return np.zeros(len(obs), np.int64), (state[0] + 1,), {}


def remembering(callbacks: Any = None) -> SamplerInput:
    config = RolloutConfig(rollout_fragment_length=10, num_envs=2)
    return SamplerInput(EnvRunner("CartPole-v1", Remembers(), config=config, callbacks=callbacks, seed=0))


def test_sequences_of_a_recurrent_policy_are_counted_and_never_cut() -> None:
    one, other = remembering(), remembering()
    whole = concat_samples([one.sample(), one.sample()])
    parts = [other.sample(n) for n in (1, 2, 3, 1)]
    assert [len(part["seq_lens"]) for part in parts] == [1, 2, 3, 1]
    joined = concat_samples(parts)
    assert_same(joined, whole[: len(joined)])
    for part in parts:
        assert np.array_equal(part["state_in_0"], part["t"][np.cumsum(part["seq_lens"]) - part["seq_lens"]])
    with MixedInput({"a": remembering(), "b": remembering()}, batch_size=6, seed=0) as mixed:
        assert len(mixed.sample()["seq_lens"]) == 6


def test_where_callbacks_want_no_row_sequences_can_be_counted_all_the_same() -> None:
    class OddOnesOnly(Callbacks):
        seen = 0

        def on_episode_start(self, *, episode: Any, **kwargs: Any) -> None:
            self.seen += 1
            episode.training_enabled = self.seen > 4

    assert len(remembering(OddOnesOnly()).sample(3)["seq_lens"]) == 3
