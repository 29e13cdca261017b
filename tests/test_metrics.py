"""Metrics: everything that a runner counts arrives once, under RLlib's names."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlio.errors import OptionError, StateError
from rlio.sampling import metrics as metrics_module
from rlio.sampling.callbacks import RunningEpisode
from rlio.sampling.metrics import Counts, EpisodeMetrics, MetricsCollector, PerfCounters, RolloutMetrics


def episode_of(**fields: Any) -> RunningEpisode:
    return RunningEpisode(**({"eps_id": 1, "length": 5, "total_reward": 2.0} | fields))


def test_what_is_drained_is_what_was_counted_and_is_gone_afterwards() -> None:
    collector = MetricsCollector()
    collector.episodes_ended([1.0, 2.0], [3, 4])
    collector.episodes_ended(np.array([5.0]), np.array([6]), np.array([0.5]))
    collector.episode_ended(episode_of(custom_metrics={"x": 1}), duration=2.0)
    collector.episodes_failed(2, rows=7, restarts=1)
    collector.rows_dropped(3)
    collector.sampled(18, agent_steps=36, policy_steps={"a": 30, "b": 6})
    drained = collector.drain()
    plain = [(one.length, one.total_reward) for one in drained.episodes]
    assert plain == [(3, 1.0), (4, 2.0), (6, 5.0), (5, 2.0)]
    assert [one.duration_s for one in drained.episodes[2:]] == [0.5, 2.0]
    assert math.isnan(drained.episodes[0].duration_s)
    assert drained.counts == Counts(
        env_steps=18,
        agent_steps=36,
        episodes=4,
        faulty_episodes=2,
        env_restarts=1,
        rows_dropped=10,
        policy_steps=Counter({"a": 30, "b": 6}),
    )
    again = collector.drain()
    assert again.episodes == []
    assert again.counts == Counts()
    assert again.lifetime == drained.lifetime == drained.counts


def test_a_summary_has_rllibs_names() -> None:
    """Row "summarise metrics" of 2.3, and "metrics" of 2.5."""
    collector = MetricsCollector()
    collector.episodes_ended([1.0, 3.0], [10, 20], [0.5, 1.5])
    collector.sampled(30, weights_seq_no=4)
    collector.sampled(30, weights_seq_no=5)
    summary = collector.drain().summarise()
    expected: dict[str, Any] = {
        "episode_return_mean": 2.0,
        "episode_return_min": 1.0,
        "episode_return_max": 3.0,
        "episode_reward_mean": 2.0,
        "episode_reward_min": 1.0,
        "episode_reward_max": 3.0,
        "episode_len_mean": 15.0,
        "episode_len_min": 10,
        "episode_len_max": 20,
        "episode_duration_sec_mean": 1.0,
        "episodes_this_iter": 2,
        "num_episodes": 2,
        "num_episodes_lifetime": 2,
        "num_faulty_episodes": 0,
        "num_env_steps_sampled": 60,
        "num_env_steps_sampled_lifetime": 60,
        "episodes_timesteps_total": 30,
        "num_agent_steps_sampled": {"default_agent": 60},
        "num_agent_steps_sampled_lifetime": {"default_agent": 60},
        "num_module_steps_sampled": {"default_policy": 60},
        "num_module_steps_sampled_lifetime": {"default_policy": 60},
        "agent_episode_return_mean": {"default_agent": 2.0},
        "module_episode_return_mean": {"default_policy": 2.0},
        "weights_seq_no": 4.5,
        "policy_reward_mean": {"default_policy": 2.0},
        "policy_reward_min": {"default_policy": 1.0},
        "policy_reward_max": {"default_policy": 3.0},
        "custom_metrics": {},
        "hist_stats": {
            "episode_reward": [1.0, 3.0],
            "episode_lengths": [10, 20],
            "policy_default_policy_reward": [1.0, 3.0],
        },
        "sampler_perf": {},
    }
    assert {name: summary[name] for name in expected} == expected
    json.dumps(summary)


def test_without_episodes_statistics_are_nan() -> None:
    summary = MetricsCollector().drain().summarise()
    for what in ("episode_return_mean", "episode_len_max", "weights_seq_no", "time_between_sampling"):
        assert math.isnan(summary[what]), what
    assert summary["num_episodes"] == 0


def test_custom_metrics_are_averaged_without_nan() -> None:
    collector = MetricsCollector()
    for value in (1.0, math.nan, 4.0):
        collector.episode_ended(episode_of(custom_metrics={"angle": value, "none": math.nan}))
    collector.episode_ended(episode_of(custom_metrics={"list": [1, 2, 3]}))
    collector.episode_ended(episode_of(custom_metrics={"list": [7, math.nan]}))
    drained = collector.drain()
    custom = drained.summarise()["custom_metrics"]
    assert [custom[f"angle_{what}"] for what in ("mean", "min", "max")] == [2.5, 1.0, 4.0]
    assert [custom[f"list_{what}"] for what in ("mean", "min", "max")] == [2.0, 1.0, 3.0]
    assert all(math.isnan(custom[f"none_{what}"]) for what in ("mean", "min", "max"))
    kept = drained.summarise(keep_custom_metrics=True)["custom_metrics"]
    assert kept["list"] == [[1, 2, 3], [7, math.nan]]


def test_agents_and_policies_have_returns_of_their_own() -> None:
    """Rows "episode metrics" of 2.3 and "per agent and module returns" of 2.5: policies that several agents
    share keep all their returns (5.3, 34)."""
    collector = MetricsCollector()
    collector.episode_ended(episode_of(agent_rewards={("a", "p"): 1.0, ("b", "p"): 2.0, (0, "q"): 5.0}))
    collector.episode_ended(episode_of(agent_rewards={("a", "p"): 6.0}))
    summary = collector.drain().summarise()
    assert summary["policy_reward_mean"] == {"p": 3.0, "q": 5.0}
    assert summary["policy_reward_min"] == {"p": 1.0, "q": 5.0}
    assert summary["policy_reward_max"] == {"p": 6.0, "q": 5.0}
    assert summary["hist_stats"]["policy_p_reward"] == [1.0, 2.0, 6.0]
    assert summary["agent_episode_returns_mean"] == {"a": 3.5, "b": 2.0, "0": 5.0}
    assert summary["module_episode_returns_mean"] == {"p": 3.0, "q": 5.0}


def test_steps_by_agent_and_policy_are_counted_over_the_lifetime_and_stay_in_the_state() -> None:
    """``num_agent_steps_sampled_lifetime`` and ``num_module_steps_sampled_lifetime`` of RLlib's new stack."""
    collector = MetricsCollector()
    for steps in (3, 4):
        collector.sampled(
            5, agent_steps=2 * steps, policy_steps={"p": 2 * steps}, steps_of_agents={"a": steps, "0": steps}
        )
        summary = collector.drain().summarise()
        assert summary["num_agent_steps_sampled"] == {"a": steps, "0": steps}
        assert summary["num_module_steps_sampled"] == {"p": 2 * steps}
    again = MetricsCollector()
    again.load_state_dict(json.loads(json.dumps(collector.state_dict())))
    again.sampled(1, agent_steps=1, policy_steps={"q": 1}, steps_of_agents={"a": 1})
    summary = again.drain().summarise()
    assert summary["num_agent_steps_sampled"] == {"a": 1}
    assert summary["num_agent_steps_sampled_lifetime"] == {"a": 8, "0": 7}
    assert summary["num_module_steps_sampled_lifetime"] == {"p": 14, "q": 1}


def test_metrics_states_without_steps_by_agent_and_policy_are_read() -> None:
    """States of earlier versions."""
    collector = MetricsCollector()
    collector.sampled(7)
    state = {name: value for name, value in collector.state_dict().items() if isinstance(value, int)}
    collector.load_state_dict(state)
    assert collector.drain().summarise()["num_agent_steps_sampled_lifetime"] == {"default_agent": 7}
    for wrong in ({"policy_steps": 3}, {"steps_of_agents": {"a": 1.5}}):
        with pytest.raises(StateError):
            collector.load_state_dict(state | wrong)


def test_histograms_and_media_of_callbacks_are_gathered() -> None:
    collector = MetricsCollector()
    first = episode_of(hist_data={"v": [1, 2]}, media={"film": "one"})
    collector.episode_ended(first)
    first.hist_data["v"].append(9)
    collector.episode_ended(episode_of(hist_data={"v": [3]}, media={"film": "two"}))
    summary = collector.drain().summarise()
    assert summary["hist_stats"]["v"] == [1, 2, 3]
    assert summary["episode_media"] == {"film": ["one", "two"]}


def test_the_metrics_of_several_workers_add_up() -> None:
    parts = []
    for worker in (1, 2):
        collector = MetricsCollector()
        collector.episodes_ended([10.0 * worker], [worker])
        collector.episode_ended(episode_of(total_reward=float(worker)))
        collector.sampled(100 * worker, policy_steps={"p": worker})
        for _ in range(worker):
            collector.perf.begin()
            collector.perf.lap(PerfCounters.INFERENCE)
            collector.perf.end_step()
        parts.append(collector.drain())
    merged = RolloutMetrics.merge(parts)
    assert sorted(one.total_reward for one in merged.episodes) == [1.0, 2.0, 10.0, 20.0]
    assert merged.counts.env_steps == merged.lifetime.env_steps == 300
    assert merged.counts.policy_steps == merged.lifetime.policy_steps == {"p": 3}
    weighted = sum(p.perf["mean_inference_ms"] * p.perf_steps for p in parts) / 3
    assert merged.perf["mean_inference_ms"] == pytest.approx(weighted)
    assert merged.summarise()["episode_return_max"] == 20.0
    assert RolloutMetrics.merge([]).episodes == []


def test_time_is_counted_within_and_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows "sample throughput" and "time between samples"."""
    clock = iter([0.0, 2.0, 5.0, 6.0, 16.0, 17.0])
    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    collector = MetricsCollector()
    for _ in range(3):
        collector.begin()
        collector.sampled(100)
    drained = collector.drain()
    assert (drained.seconds, drained.between, drained.calls) == (4.0, 13.0, 3)
    summary = drained.summarise()
    assert summary["num_env_steps_sampled_throughput"] == 75.0
    assert summary["time_between_sampling"] == pytest.approx(13 / 3)


def laps(perf: PerfCounters, clock: list[float], durations: list[float]) -> None:
    perf.begin()
    for part, seconds in enumerate(durations):
        clock[0] += seconds
        perf.lap(part)
    perf.end_step()


@pytest.mark.parametrize(("ema_coef", "expected"), [(None, 3000.0), (0.25, 2500.0)])
def test_performance_is_milliseconds_a_step(
    monkeypatch: pytest.MonkeyPatch, ema_coef: float | None, expected: float
) -> None:
    """Row "perf stats" of 2.3, and its ``sampler_perf_stats_ema_coef``."""
    clock = [0.0]
    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    perf = PerfCounters(ema_coef)
    # RLlib's _PerfStats divides by zero here (5.3, 32).
    assert perf.take() == (0, {})
    laps(perf, clock, [2.0, 0.0, 0.0, 1.0, 0.0])
    laps(perf, clock, [4.0, 0.0, 0.0, 1.0, 0.0])
    steps, means = perf.take()
    assert steps == 2
    assert means == {
        "mean_raw_obs_processing_ms": expected,
        "mean_inference_ms": 0.0,
        "mean_action_processing_ms": 0.0,
        "mean_env_wait_ms": 1000.0,
        "mean_env_render_ms": 0.0,
    }
    assert perf.take() == (0, {})
    with pytest.raises(OptionError, match="ema_coef=0"):
        PerfCounters(0)


def test_of_too_many_episodes_the_latest_are_kept_but_all_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_module, "_MOST_EPISODES", 100)
    collector = MetricsCollector()
    for i in range(1000):
        collector.episodes_ended([float(i)], [i])
        collector.episode_ended(episode_of(total_reward=float(i)))
    drained = collector.drain()
    returns = drained.returns.tolist()
    assert 50 <= len(returns) <= 100
    assert returns == list(range(1000 - len(returns), 1000))
    kept = [one.total_reward for one in drained.details]
    assert 50 <= len(kept) <= 100
    assert kept == list(range(1000 - len(kept), 1000))
    assert drained.counts.episodes == 2000
    collector.episodes_ended(np.arange(250.0), np.arange(250))
    assert len(collector.drain().returns) >= 100


def test_lifetime_counts_go_on_after_a_restore() -> None:
    collector = MetricsCollector()
    collector.sampled(10)
    collector.drain()
    collector.sampled(5)
    state = json.loads(json.dumps(collector.state_dict()))
    other = MetricsCollector()
    other.sampled(1000)
    other.load_state_dict(state)
    other.sampled(1)
    summary = other.drain().summarise()
    assert summary["num_env_steps_sampled"] == 1
    assert summary["num_env_steps_sampled_lifetime"] == 16
    with pytest.raises(StateError, match="needs 'episodes'"):
        other.load_state_dict(state | {"episodes": "many"})


def test_draining_from_another_thread_loses_and_doubles_nothing() -> None:
    collector = MetricsCollector()
    done = threading.Event()
    parts: list[RolloutMetrics] = []

    def drain() -> None:
        while not done.is_set():
            parts.append(collector.drain())

    thread = threading.Thread(target=drain)
    thread.start()
    for i in range(3000):
        collector.episodes_ended([float(i)], [1])
        collector.sampled(2)
    done.set()
    thread.join()
    parts.append(collector.drain())
    merged = RolloutMetrics.merge(parts)
    assert merged.returns.tolist() == list(range(3000))
    assert merged.counts.env_steps == 6000


def test_episodes_of_unlike_agents_are_plain_values() -> None:
    one = EpisodeMetrics(3, 1.5)
    assert (one.agent_rewards, one.custom_metrics, one.hist_data, one.media) == ({}, {}, {}, {})
