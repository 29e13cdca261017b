"""`MetricsCollector` counts what a runner does; `RolloutMetrics` holds the result, merges and summarises it.

Example:
    >>> import numpy as np
    >>> collector = MetricsCollector()
    >>> collector.episodes_ended(returns=np.array([10.0, 20.0]), lengths=np.array([10, 20]))
    >>> collector.sampled(env_steps=35)
    >>> summary = collector.drain().summarise()
    >>> summary["episode_return_mean"], summary["episode_len_max"], summary["num_env_steps_sampled"]
    (15.0, 20, 35)
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import DEFAULT_POLICY_ID
from rlio.errors import OptionError, excerpt
from rlio.reader import JsonState
from rlio.sampling.callbacks import RunningEpisode
from rlio.support.states import value_in, whole_number

if TYPE_CHECKING:
    from rlio.sampling.logged_evaluation import Judged

__all__ = ["Counts", "EpisodeMetrics", "MetricsCollector", "PerfCounters", "RolloutMetrics"]

# Any in this module: users' metrics are numbers, lists or arrays; media are any objects.

# Maximum number of episodes that wait for `drain`, because memory must stay bounded if it is never called.
_MOST_EPISODES = 65_536


@dataclass(frozen=True, slots=True)
class EpisodeMetrics:
    """An episode that ended. Field names are RLlib's, where RLlib has them.

    Attributes:
        length: Environment steps.
        total_reward: Sum of all agents' unclipped rewards.
        duration_s: Duration in seconds; NaN if not measured.
        agent_rewards: Sum of rewards by (agent id, policy id); empty with one agent.
        custom_metrics: Numbers or arrays of numbers, from callbacks.
        hist_data: Lists of numbers from callbacks.
        media: Pictures, videos and the like from callbacks.
    """

    length: int
    total_reward: float
    duration_s: float = math.nan
    agent_rewards: Mapping[tuple[Any, str], float] = field(default_factory=dict)
    custom_metrics: Mapping[str, Any] = field(default_factory=dict)
    hist_data: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    media: Mapping[str, Any] = field(default_factory=dict)


class PerfCounters:
    """Measures where sampling time goes, in laps that cost about 0.1 us each.

    Call `begin` before a step, `lap` after each part, and `end_step` at its end.

    Args:
        ema_coef: Weight of the newest step in exponential moving averages; None gives the plain average of
            all steps since the last `take`. RLlib's ``sampler_perf_stats_ema_coef``.

    Raises:
        OptionError: ``ema_coef`` is not within (0, 1].
    """

    #: Parts of a step, for `lap`.
    OBS_PROCESSING, INFERENCE, ACTION_PROCESSING, ENV_WAIT, ENV_RENDER = range(5)
    _NAMES = (
        "mean_raw_obs_processing_ms",
        "mean_inference_ms",
        "mean_action_processing_ms",
        "mean_env_wait_ms",
        "mean_env_render_ms",
    )

    __slots__ = ("_averages", "_ema_coef", "_last", "_seconds", "steps")

    def __init__(self, ema_coef: float | None = None) -> None:
        if ema_coef is not None and not 0 < ema_coef <= 1:
            raise OptionError(f"ema_coef={excerpt(ema_coef)}: within (0, 1], or None for plain averages")
        self._ema_coef = ema_coef
        #: Steps since `take`.
        self.steps: int = 0
        self._seconds = [0.0] * len(self._NAMES)
        self._averages: list[float] | None = None
        self._last = 0.0

    def begin(self) -> None:
        """Start the clock."""
        self._last = time.perf_counter()

    def lap(self, part: int) -> None:
        """Add the time since the last lap, or `begin`, to ``part``."""
        now = time.perf_counter()
        self._seconds[part] += now - self._last
        self._last = now

    def end_step(self) -> None:
        """Count a step."""
        self.steps += 1
        if self._ema_coef is not None:
            self._average(self._ema_coef)

    def _average(self, coef: float) -> None:
        seconds = self._seconds
        if self._averages is None:
            self._averages = list(seconds)
        else:
            self._averages = [
                (1 - coef) * average + coef * new
                for average, new in zip(self._averages, seconds, strict=True)
            ]
        self._seconds = [0.0] * len(seconds)

    def take(self) -> tuple[int, dict[str, float]]:
        """Return the number of steps and the milliseconds per step by RLlib's names, and reset both.

        Returns ``(0, {})`` if there was no step.
        """
        steps, self.steps = self.steps, 0
        if not steps:
            return 0, {}
        if self._averages is not None:
            means = self._averages
        else:
            means = [seconds / steps for seconds in self._seconds]
            self._seconds = [0.0] * len(means)
        return steps, {name: 1e3 * mean for name, mean in zip(self._NAMES, means, strict=True)}


@dataclass(slots=True)
class Counts:
    """Numbers that add up over workers.

    Attributes:
        env_steps: Environment steps sampled.
        agent_steps: Agent transitions sampled.
        episodes: Episodes that ended without a failure.
        faulty_episodes: Episodes discarded because their environment failed.
        env_restarts: Environments that were recreated.
        rows_dropped: Sampled rows that are in no batch.
        policy_steps: Transitions by policy id; empty with one agent.
        steps_of_agents: Transitions by agent id, as text; empty with one agent.
    """

    env_steps: int = 0
    agent_steps: int = 0
    episodes: int = 0
    faulty_episodes: int = 0
    env_restarts: int = 0
    rows_dropped: int = 0
    policy_steps: Counter[str] = field(default_factory=Counter)
    steps_of_agents: Counter[str] = field(default_factory=Counter)

    @classmethod
    def from_state(cls, state: JsonState) -> Counts:
        """Return the counts that `state_dict` described.

        Raises:
            StateError: A count is missing, or is not a whole number.
        """
        found: dict[str, Any] = {
            name: _by_id(state, name) if name in _BY_ID else whole_number(state, name, of=_STATE)
            for name in cls.__slots__
        }
        return cls(**found)

    def state_dict(self) -> JsonState:
        """The counts as JSON."""
        numbers = {name: getattr(self, name) for name in Counts.__slots__}
        return numbers | {name: dict(numbers[name]) for name in _BY_ID}

    def by_policy(self) -> dict[str, int]:
        """Transitions by policy id; with one agent, all under ``default_policy``."""
        return dict(self.policy_steps) or _alone(DEFAULT_POLICY_ID, self.agent_steps)

    def by_agent(self) -> dict[str, int]:
        """Transitions by agent id, as text; with one agent, all under RLlib's ``default_agent``."""
        return dict(self.steps_of_agents) or _alone(_DEFAULT_AGENT_ID, self.agent_steps)

    def plus(self, other: Counts) -> Counts:
        """Return the sum of both."""
        return Counts.total([self, other])

    @classmethod
    def total(cls, parts: Sequence[Counts]) -> Counts:
        """Return the sum of all."""
        found: dict[str, Any] = {
            name: sum(getattr(part, name) for part in parts) for name in cls.__slots__ if name not in _BY_ID
        }
        for name in _BY_ID:
            found[name] = Counter()
            for part in parts:
                if own := getattr(part, name):
                    found[name] += own
        return cls(**found)


#: Fields of `Counts` with one number a policy or agent.
_BY_ID = ("policy_steps", "steps_of_agents")
_STATE = "the metrics' state"
#: RLlib's name of an only agent.
_DEFAULT_AGENT_ID = "default_agent"
_SUMS = ("seconds", "between", "calls", "weights_seq_no", "perf_steps")


@dataclass
class RolloutMetrics:
    """Metrics since the last request, of one runner or of several (`merge`).

    Attributes:
        returns: Returns of episodes without further details, float64, shape (E,).
        lengths: Lengths of the same episodes, int64, shape (E,).
        durations: Durations of the same episodes in seconds, float64, shape (E,); NaN if not measured.
        details: Further episodes, with all details.
        counts: Counts since the last request.
        lifetime: Counts since the runner was made, including the run that it was restored from.
        seconds: Time spent sampling.
        between: Total seconds between the end of one ``sample`` call and the start of the next.
        calls: Number of calls of ``sample``, or of the method that replaces it.
        weights_seq_no: Sum over the calls; see ``summarise``.
        perf_steps: Number of steps that `perf` averages over.
        perf: Milliseconds per step, by RLlib's names.
        off_policy: Policy id -> estimates from the rows that a worker read (``input_evaluation``).
    """

    returns: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    durations: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    details: list[EpisodeMetrics] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    lifetime: Counts = field(default_factory=Counts)
    seconds: float = 0.0
    between: float = 0.0
    calls: int = 0
    weights_seq_no: int = 0
    perf_steps: int = 0
    perf: dict[str, float] = field(default_factory=dict)
    off_policy: dict[str, Judged] = field(default_factory=dict)

    @property
    def episodes(self) -> list[EpisodeMetrics]:
        """All episodes, built on demand to spare runners an object per episode."""
        plain = zip(self.lengths.tolist(), self.returns.tolist(), self.durations.tolist(), strict=True)
        return [EpisodeMetrics(*one) for one in plain] + self.details

    @classmethod
    def merge(cls, parts: Iterable[RolloutMetrics]) -> Self:
        """Combine ``parts``: counts add up, and times per step are averaged over steps.

        Consecutive parts of one runner also add up, except ``lifetime``: use that of the last part.
        """
        given = list(parts)
        merged = cls(
            details=[episode for part in given for episode in part.details],
            **{name: sum(getattr(part, name) for part in given) for name in _SUMS},
        )
        merged.counts = Counts.total([part.counts for part in given])
        merged.lifetime = Counts.total([part.lifetime for part in given])
        for part in given:
            for policy_id, judged in part.off_policy.items():
                before = merged.off_policy.get(policy_id)
                merged.off_policy[policy_id] = judged if before is None else before.plus(judged)
            for name, mean in part.perf.items():
                merged.perf[name] = merged.perf.get(name, 0.0) + mean * part.perf_steps / merged.perf_steps
        for name in ("returns", "lengths", "durations") if given else ():
            setattr(merged, name, np.concatenate([getattr(part, name) for part in given]))
        return merged

    def summarise(self, *, keep_custom_metrics: bool = False) -> dict[str, Any]:
        """Return numbers by RLlib's names: nested dicts of numbers, lists and media.

        Covers all `episodes`. Means, minima and maxima are NaN if no episode ended.

        Args:
            keep_custom_metrics: Return custom metrics as lists instead of their mean, min and max.
        """
        details = self.details
        returns = np.concatenate([self.returns, [one.total_reward for one in details]])
        lengths = np.concatenate([self.lengths, np.array([one.length for one in details], np.int64)])
        durations = np.concatenate([self.durations, [one.duration_s for one in details]])
        by_policy, by_agent = _agent_returns(details)
        alone = [*self.returns.tolist(), *(one.total_reward for one in details if not one.agent_rewards)]
        if alone:
            by_policy[DEFAULT_POLICY_ID] = alone + by_policy.get(DEFAULT_POLICY_ID, [])
            by_agent[_DEFAULT_AGENT_ID] = alone
        histograms = {"episode_reward": returns.tolist(), "episode_lengths": lengths.tolist()}
        histograms |= {f"policy_{name}_reward": values for name, values in by_policy.items()}
        histograms |= _joined(one.hist_data for one in details)
        summary = (
            _spread("episode_return", returns)
            | _spread("episode_reward", returns)
            | _spread("episode_len", lengths)
            | _spread("episode_duration_sec", durations)
            | self._numbers()
        )
        of_agents = {name: float(np.mean(values)) for name, values in by_agent.items()}
        of_modules = {name: float(np.mean(values)) for name, values in by_policy.items()}
        return summary | {
            **_by_name("policy_reward", by_policy),
            # RLlib has the plural with several agents, and the singular with one.
            "agent_episode_returns_mean": of_agents,
            "agent_episode_return_mean": of_agents,
            "module_episode_returns_mean": of_modules,
            "module_episode_return_mean": of_modules,
            "episodes_timesteps_total": int(lengths.sum()),
            "custom_metrics": _custom(details, keep=keep_custom_metrics),
            "hist_stats": histograms,
            "episode_media": _gathered(one.media for one in details),
            "sampler_perf": dict(self.perf),
            "off_policy_estimator": self._off_policy(),
        }

    summarize = summarise

    def _off_policy(self) -> dict[str, Any]:
        """Estimates by estimator name, as in RLlib, if there is one policy; else by policy first."""
        found = {policy_id: judged.summarise() for policy_id, judged in self.off_policy.items()}
        return found[DEFAULT_POLICY_ID] if list(found) == [DEFAULT_POLICY_ID] else found

    def _numbers(self) -> dict[str, Any]:
        counts, lifetime = self.counts, self.lifetime
        return {
            "episodes_this_iter": counts.episodes,
            "num_episodes": counts.episodes,
            "num_episodes_lifetime": lifetime.episodes,
            "num_faulty_episodes": counts.faulty_episodes,
            "num_env_restarts": counts.env_restarts,
            "num_rows_dropped": counts.rows_dropped,
            "num_env_steps_sampled": counts.env_steps,
            "num_env_steps_sampled_lifetime": lifetime.env_steps,
            "num_agent_steps_sampled": counts.by_agent(),
            "num_agent_steps_sampled_lifetime": lifetime.by_agent(),
            "num_module_steps_sampled": counts.by_policy(),
            "num_module_steps_sampled_lifetime": lifetime.by_policy(),
            "num_env_steps_sampled_throughput": _ratio(counts.env_steps, self.seconds),
            "time_between_sampling": _ratio(self.between, self.calls),
            "weights_seq_no": _ratio(self.weights_seq_no, self.calls),
        }


class MetricsCollector:
    """Counts what a runner does between requests; other threads may request the metrics.

    Args:
        perf_ema_coef: See `PerfCounters`.

    Attributes:
        perf: Times per part of a step.
        lifetime: Counts since the beginning.
    """

    def __init__(self, *, perf_ema_coef: float | None = None) -> None:
        self.perf: PerfCounters = PerfCounters(perf_ema_coef)
        self.lifetime: Counts = Counts()
        self._lock = threading.Lock()
        self._now = RolloutMetrics()
        #: (Return, length, duration) of episodes without further details.
        self._episodes: deque[tuple[float, int, float]] = deque(maxlen=_MOST_EPISODES)
        self._details: deque[EpisodeMetrics] = deque(maxlen=_MOST_EPISODES)
        self._began: float | None = None
        self._ended: float | None = None

    # ---- called by runners ----

    def episodes_ended(
        self,
        returns: Sequence[float] | NDArray[Any],
        lengths: Sequence[int] | NDArray[Any],
        durations: Sequence[float] | NDArray[Any] | None = None,
    ) -> None:
        """Count episodes without further details.

        Args:
            returns: Sums of rewards, shape (E,).
            lengths: Environment steps, shape (E,).
            durations: Seconds, shape (E,).
        """
        seconds = repeat(math.nan) if durations is None else durations
        self.plain_episodes_ended(list(zip(returns, lengths, seconds, strict=False)))

    def plain_episodes_ended(self, episodes: Sequence[tuple[float, int, float]]) -> None:
        """Count episodes without further details, each given as return, length and seconds."""
        with self._lock:
            self._now.counts.episodes += len(episodes)
            self._episodes.extend(episodes)

    def episode_ended(self, episode: RunningEpisode, *, duration: float = math.nan) -> None:
        """Count one episode with the data of callbacks and agents; copies it, so it may change later."""
        ended = EpisodeMetrics(
            length=episode.length,
            total_reward=float(episode.total_reward),
            duration_s=duration,
            agent_rewards=dict(episode.agent_rewards),
            custom_metrics=dict(episode.custom_metrics),
            hist_data={name: list(values) for name, values in episode.hist_data.items()},
            media=dict(episode.media),
        )
        with self._lock:
            self._now.counts.episodes += 1
            self._details.append(ended)

    def episodes_failed(self, episodes: int = 1, *, rows: int = 0, restarts: int = 0) -> None:
        """Count discarded episodes with their ``rows``, and recreated environments."""
        with self._lock:
            counts = self._now.counts
            counts.faulty_episodes += episodes
            counts.rows_dropped += rows
            counts.env_restarts += restarts

    def rows_dropped(self, rows: int) -> None:
        """Count sampled rows that are in no batch."""
        with self._lock:
            self._now.counts.rows_dropped += rows

    def begin(self) -> None:
        """Start the clock of a ``sample`` call."""
        self._began = time.perf_counter()

    def sampled(
        self,
        env_steps: int,
        *,
        agent_steps: int | None = None,
        policy_steps: Mapping[str, int] | None = None,
        steps_of_agents: Mapping[str, int] | None = None,
        weights_seq_no: int = 0,
    ) -> None:
        """Count a batch, and the time since `begin`.

        Args:
            env_steps: Environment steps.
            agent_steps: Rows; None means one per environment step.
            policy_steps: Rows by policy id.
            steps_of_agents: Rows by agent id.
            weights_seq_no: Version of the weights that sampled the batch.
        """
        end = time.perf_counter()
        with self._lock:
            now = self._now
            now.counts.env_steps += env_steps
            now.counts.agent_steps += env_steps if agent_steps is None else agent_steps
            now.counts.policy_steps.update(policy_steps or {})
            now.counts.steps_of_agents.update(steps_of_agents or {})
            now.weights_seq_no += weights_seq_no
            now.calls += 1
            if self._began is not None:
                now.seconds += end - self._began
                now.between += 0.0 if self._ended is None else self._began - self._ended
            self._began, self._ended = None, end

    # ---- called by users ----

    def drain(self) -> RolloutMetrics:
        """Return the metrics since the last call, and reset them.

        Keeps at most the latest 65,536 episodes, but counts all.
        """
        with self._lock:
            drained, self._now = self._now, RolloutMetrics()
            table = np.array(self._episodes, np.float64).reshape(-1, 3)
            drained.returns, drained.durations = table[:, 0].copy(), table[:, 2].copy()
            drained.lengths = table[:, 1].astype(np.int64)
            drained.details = list(self._details)
            self._forget_episodes()
            drained.perf_steps, drained.perf = self.perf.take()
            self.lifetime = self.lifetime.plus(drained.counts)
            drained.lifetime = self.lifetime
            return drained

    def state_dict(self) -> JsonState:
        """The lifetime counts as JSON, including those not drained yet."""
        with self._lock:
            return self.lifetime.plus(self._now.counts).state_dict()

    def load_state_dict(self, state: JsonState) -> None:
        """Continue counting from a `state_dict` state; discards metrics that were not drained.

        Raises:
            StateError: A count is missing or not an integer.
        """
        lifetime = Counts.from_state(state)
        with self._lock:
            self.lifetime = lifetime
            self._now = RolloutMetrics()
            self._forget_episodes()

    def _forget_episodes(self) -> None:
        self._episodes.clear()
        self._details.clear()


def _by_id(state: JsonState, name: str) -> Counter[str]:
    """Counts by id; none in states of earlier versions."""
    found = value_in({name: {}, **state}, name, dict, of=_STATE)
    return Counter({each: whole_number(found, each, of=_STATE) for each in found})


def _alone(name: str, steps: int) -> dict[str, int]:
    return {name: steps} if steps else {}


def _ratio(amount: float, of: float) -> float:
    return amount / of if of else math.nan


def _spread(name: str, values: NDArray[Any]) -> dict[str, Any]:
    """Mean, min and max of ``values`` without NaN, which stands for an unknown value."""
    known = values[~np.isnan(values)]
    if not len(known):
        return {f"{name}_{what}": math.nan for what in ("mean", "min", "max")}
    return {
        f"{name}_mean": float(known.mean()),
        f"{name}_min": known.min().item(),
        f"{name}_max": known.max().item(),
    }


def _by_name(prefix: str, values: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Statistics in RLlib's order: the statistic first, then the policy."""
    found: dict[str, dict[str, float]] = {f"{prefix}_{what}": {} for what in ("mean", "min", "max")}
    for name, of_name in values.items():
        for key, number in _spread(prefix, np.asarray(of_name, np.float64)).items():
            found[key][name] = number
    return found


def _agent_returns(episodes: list[EpisodeMetrics]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The agents' returns by policy id and by agent id."""
    by_policy: dict[str, list[float]] = {}
    by_agent: dict[str, list[float]] = {}
    for episode in episodes:
        for (agent_id, policy_id), total in episode.agent_rewards.items():
            by_policy.setdefault(policy_id, []).append(float(total))
            by_agent.setdefault(str(agent_id), []).append(float(total))
    return by_policy, by_agent


def _custom(episodes: list[EpisodeMetrics], *, keep: bool) -> dict[str, Any]:
    gathered = _gathered(episode.custom_metrics for episode in episodes)
    if keep:
        return gathered
    summary: dict[str, Any] = {}
    for name, values in gathered.items():
        numbers = [np.asarray(value, np.float64).ravel() for value in values]
        # As in RLlib: one NaN among an episode's values excludes that episode's values.
        whole = [value for value in numbers if not np.isnan(value).any()]
        summary |= _spread(name, np.concatenate(whole) if whole else np.zeros(0))
    return summary


def _gathered(of_episodes: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Name -> values of the episodes that have the name."""
    found: dict[str, list[Any]] = {}
    for values in of_episodes:
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return found


def _joined(of_episodes: Iterable[Mapping[str, Sequence[Any]]]) -> dict[str, list[Any]]:
    """Name -> values of all episodes in one list."""
    return {name: [v for values in lists for v in values] for name, lists in _gathered(of_episodes).items()}
