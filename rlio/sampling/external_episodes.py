"""`ExternalEpisodes`: episodes whose loops run elsewhere, in other threads or behind a network.

A loop asks for actions and reports rewards. The sampler answers with a policy, batching the requests of many
episodes, and takes the rows.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Discrete
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> policy = RandomPolicy()
    >>> policy.bind(Box(0.0, 9.0, (1,)), Discrete(2), seed=0)
    >>> episodes = ExternalEpisodes(policy, immediate=True)
    >>> name = episodes.start()
    >>> for t in range(3):
    ...     action = episodes.get_action(name, [float(t)])
    ...     episodes.log_returns(name, 1.0)
    >>> episodes.end(name, [3.0])
    >>> batch = episodes.take()
    >>> batch["new_obs"].tolist(), batch["terminateds"].tolist()
    ([[1.0], [2.0], [3.0]], [False, False, True])
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch, concat_samples
from rlio.batch.columns import RECORDED, STATE_OUT_PREFIX, Columns
from rlio.batch.nested import map_structure
from rlio.connectors.connector import Streams
from rlio.envs.values import as_info
from rlio.errors import ClosedError, EnvError, OptionError, SchemaError, excerpt
from rlio.policies.policy import Policy
from rlio.sampling.actor import STATE_BEFORE_PREFIX, Acted, Actor
from rlio.sampling.agent_rows import NEXT_T, AgentRows
from rlio.sampling.callbacks import Callbacks, RunningEpisode, overridden
from rlio.sampling.given_values import (
    OF_THE_CHOICE,
    check_choice,
    check_flag,
    column_of,
    finite_reward,
    value_of,
)
from rlio.sampling.metrics import MetricsCollector
from rlio.sampling.postprocessed import Postprocessed
from rlio.sampling.progress import Progress
from rlio.support.clock import utc_ms
from rlio.support.turns import awaited

__all__ = ["LOGGED", "ExternalEpisodes", "fill_in", "joined", "name_of_episode", "row_of"]

#: Column, bool: the action was logged by the loop, not chosen by the policy.
LOGGED = "logged_action"
_RECORDED: Final = RECORDED | {LOGGED}
_STATES: Final = (STATE_BEFORE_PREFIX, STATE_OUT_PREFIX)


@dataclass(eq=False)
class _Episode:
    """One running episode.

    Attributes:
        name: The episode's name in its loop.
        running: The episode that callbacks see.
        slot: Its stream in the actor.
        began: Start time, on the monotonic clock.
        heard: Time of the loop's last call or of the last answer.
        started: Whether callbacks were notified of its start.
        t: Number of the next step.
        row: Number of its open row; None if no action is pending.
        action: The latest action, (1, ...), nested as the space; None before the first.
        reward: Sum of the rewards for `action` so far.
        info: Infos that came with `reward`.
        obs: The observation for which its loop wants an action, (1, ...), nested as the space.
        logged: The action that the loop chose, (1, ...); None requests one.
        columns: Columns that the loop passed for that action.
        answer: The action, or why there is none.
    """

    name: str
    running: RunningEpisode
    slot: int
    began: float
    heard: float
    started: bool = False
    t: int = 0
    row: int | None = None
    action: Any = None
    reward: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    obs: Any = None
    logged: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    answer: Future[Any] = field(default_factory=Future)


def name_of_episode(episode_id: str | None, running: Container[str]) -> str:
    """The name of an episode that starts beside the ``running`` ones.

    Raises:
        OptionError: An episode with this name is running.
        SchemaError: The name is not a str.
    """
    if not isinstance(episode_id, str | None):
        raise SchemaError(f"episode_id={excerpt(episode_id)}: expected a str, or None to make one")
    name = uuid.uuid4().hex if episode_id is None else episode_id
    if name in running:
        raise OptionError(f"episode {excerpt(name)} is already running: end it first, or use another name")
    return name


class ExternalEpisodes:
    """The running episodes and their rows. Thread-safe.

    A row is one transition, with the columns of `EnvRunner` and the bool column ``logged_action``. For logged
    actions ``action_logp`` and ``action_prob`` are NaN, unless the loop passes them, because the policy did
    not choose. A reward belongs to the latest action before it. If the final observation is unknown,
    ``new_obs_valid`` is False. An episode without an end keeps its last action's row open; see
    `abandon_silent`.

    Args:
        policy: Policy that acts; must be bound to its spaces.
        explore: Whether the policy explores.
        infos: Whether to record infos.
        immediate: Compute each action at once, in the requesting thread; else `serve` computes them in
            batches.
        timeout: Seconds that a loop waits for an action; None waits without limit.
        callbacks: Called on episode events.
        metrics: Counts the episodes.
        seed: Seed of the episode ids, or the generator that draws them.
        worker_index: Passed to callbacks, and selects the range of unroll ids.

    Attributes:
        actor: The policy and its memory of each episode.
        progress: Counts rows with a known outcome, rows that no batch will contain, and unroll ids.
        changed: The lock; notified on each change.
        postprocess: Called with rows of an episode that ends, before ``on_episode_end``, and with rows of
            running ones when they are taken; returns what becomes of them. None: rows stay as recorded.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        explore: bool = True,
        infos: bool = False,
        immediate: bool = False,
        timeout: float | None = None,
        callbacks: Callbacks | None = None,
        metrics: MetricsCollector | None = None,
        seed: int | np.random.Generator | None = None,
        worker_index: int = 0,
    ) -> None:
        self.policy = policy
        self.explore = explore
        self.progress: Progress = Progress.of_worker(worker_index)
        self.changed: threading.Condition = threading.Condition(threading.RLock())
        self._spaces = policy.spaces
        self.actor: Actor = Actor(policy, *policy.spaces)
        self._rows = AgentRows(policy.observation_space, policy.action_space, infos=infos)
        self._infos = infos
        self._immediate = immediate
        self._timeout = timeout
        self._callbacks = callbacks if callbacks is not None else Callbacks()
        self._wanted = overridden(self._callbacks)
        self._metrics = metrics if metrics is not None else MetricsCollector()
        self._ids = np.random.default_rng(seed)
        self._worker_index = worker_index
        self.postprocess: Callable[[SampleBatch, RunningEpisode | None], SampleBatch] | None = None
        self._done_rows = Postprocessed()
        self._episodes: dict[str, _Episode] = {}
        #: Episodes whose loops wait for an action.
        self._waiting: list[_Episode] = []
        #: Ids of ended episodes with rows -> whether these go into batches.
        self._over: dict[int, bool] = {}
        #: When the episodes began that run or have rows; see `SampleBatch.episode_starts`.
        self._starts: dict[int | str, int] = {}
        #: The policy's columns, without rows; None before it has acted.
        self._known: dict[str, NDArray[Any]] | None = None
        self._closed = False

    # ---- called by loops ----

    def start(self, episode_id: str | None = None, *, training_enabled: bool = True) -> str:
        """Begin an episode.

        Args:
            episode_id: The episode's name; None makes one.
            training_enabled: Whether its rows go into batches.

        Returns:
            The episode's name.

        Raises:
            OptionError: An episode with this name is running.
            SchemaError: The name is not a str, or the flag not a bool.
            ClosedError: The runner is stopped.
        """
        check_flag("training_enabled", training_enabled)
        with self.changed:
            self._check_open()
            name = name_of_episode(episode_id, self._episodes)
            running = RunningEpisode(
                self._new_id(),
                worker_index=self._worker_index,
                training_enabled=training_enabled,
            )
            self._call("on_episode_created", running)
            now = time.monotonic()
            self._starts[running.eps_id] = utc_ms()
            self._episodes[name] = _Episode(name, running, self.actor.new_slot(), began=now, heard=now)
        return name

    def get_action(self, episode_id: str, observation: Any) -> Any:
        """Report an observation and wait for the action.

        Args:
            episode_id: Name of a running episode.
            observation: The observation, nested as the space; lists are accepted.

        Returns:
            The action, a copy.

        Raises:
            OptionError: No such episode is running, or it already waits for an action.
            SchemaError: The observation does not fit the space.
            EnvError: No action was chosen in time; the loop may ask again.
            ClosedError: The runner is stopped.
        """
        return self._ask(episode_id, observation, None, {})

    def log_action(self, episode_id: str, observation: Any, action: Any, **columns: Any) -> None:
        """Report an observation, and the action that the loop took instead of the policy's.

        Args:
            episode_id: Name of a running episode.
            observation: The observation, nested as the space.
            action: The action, nested as the action space.
            columns: Known data of the choice, such as ``action_logp``, in columns that the policy has too.
                One of ``action_logp`` and ``action_prob`` is enough.

        Raises:
            As for `get_action`.
        """
        if self._known is not None:
            _check_known(columns, self._known)
        check_choice(columns, self._spaces[1])
        acted = value_of(self._spaces[1], action, Columns.ACTIONS)
        self._ask(episode_id, observation, acted, columns)

    def log_returns(self, episode_id: str, reward: float, info: Mapping[str, Any] | None = None) -> None:
        """Report a reward for the latest action; several rewards for one action add up.

        Raises:
            OptionError: No such episode is running, or it has no pending action.
            SchemaError: The reward is not a finite number, or the info not a mapping.
        """
        number = finite_reward(reward)
        if not isinstance(info, Mapping | None):
            raise SchemaError(f"info={excerpt(info)}: expected a mapping, or None", column=Columns.INFOS)
        copied = as_info(dict(info or {}), giver="the loop")
        with self.changed:
            episode = self._episode(episode_id)
            if episode.row is None:
                raise OptionError(
                    f"episode {excerpt(episode_id)} got a reward before its first action, or while it waits "
                    "for the next one: log rewards after an action, before the observation that follows it"
                )
            episode.heard = time.monotonic()
            episode.reward += number
            episode.running.total_reward += number
            episode.running.last_reward = number
            episode.info.update(copied)

    def end(self, episode_id: str, observation: Any = None, *, truncated: bool = False) -> None:
        """Report the end of an episode.

        Args:
            episode_id: Name of a running episode.
            observation: The final observation; None if unknown.
            truncated: Whether the episode was cut off instead of terminating.

        Raises:
            OptionError: No such episode is running.
            SchemaError: The observation does not fit the space, or ``truncated`` is not a bool.
        """
        check_flag("truncated", truncated)
        seen = None if observation is None else value_of(self._spaces[0], observation, Columns.OBS)
        with self.changed:
            episode = self._episode(episode_id)
            self._withdraw(episode)
            running = episode.running
            running.last_observation = None if seen is None else map_structure(lambda leaf: leaf[0], seen)
            try:
                self._close_row(episode, seen, ended=(not truncated, truncated))
                self._postprocess(running)
                self._call("on_episode_end", running)
                self._metrics.episode_ended(running, duration=time.monotonic() - episode.began)
            finally:
                self._forget(episode)

    def _postprocess(self, episode: RunningEpisode) -> None:
        """Postprocess the rows of an episode that ends."""
        if self.postprocess is None or not episode.training_enabled:
            return
        chosen = self._rows.closed & (self._rows.integers(Columns.EPS_ID) == episode.eps_id)
        if chosen.any():
            rows = self._finished(self._rows.peek(chosen), [])
            with awaited():  # Usually in the thread of a loop, while `sample` waits.
                made = self.postprocess(rows, episode)
            self._done_rows.add(episode.eps_id, len(rows), made)

    def _with_postprocessed(self, batch: SampleBatch) -> SampleBatch:
        """``batch``, in which rows of running episodes are postprocessed now."""
        if self.postprocess is None or not len(batch):
            return batch
        running = {episode.running.eps_id: episode.running for episode in self._episodes.values()}
        made = []
        for rows in batch.split_by_episode():
            eps_id = int(rows[Columns.EPS_ID][0])
            done = self._done_rows.take(eps_id, len(rows))
            made.append(self.postprocess(rows, running.get(eps_id)) if done is None else done)
        return concat_samples(made)

    def _new_id(self) -> int:
        return int(self._ids.integers(0, 1 << 63, dtype=np.int64))

    def _forget(self, episode: _Episode) -> None:
        """Remove a running episode; its waiting rows then belong to an ended episode."""
        self._remove(episode)
        eps_id = episode.running.eps_id
        if np.any(self._rows.integers(Columns.EPS_ID) == eps_id):
            self._over[eps_id] = episode.running.training_enabled
        self.changed.notify_all()

    def _remove(self, episode: _Episode) -> None:
        del self._episodes[episode.name]
        self.actor.free_slot(episode.slot)

    def _withdraw(self, episode: _Episode) -> None:
        """Wake the loop that waits for an action of an ended episode, because its row would stay open."""
        if episode in self._waiting:
            self._waiting.remove(episode)
            episode.answer.set_exception(
                OptionError(
                    f"episode {excerpt(episode.name)} was ended by another caller while it waited for an "
                    "action"
                )
            )

    def abandon(self, episode_id: str, *, keep_rows: bool = True) -> None:
        """Give up an episode whose loop is gone; it gets no end, and its last action's row is dropped.

        Args:
            episode_id: Name of a running episode.
            keep_rows: Whether to keep the rows with a known outcome. Pass False if only whole episodes are
                wanted.

        Raises:
            OptionError: No such episode is running.
        """
        with self.changed:
            self._abandon(self._episode(episode_id), keep_rows=keep_rows)

    def abandon_silent(self, seconds: float, *, keep_rows: bool = True) -> list[str]:
        """Abandon episodes whose loops were silent this long and do not wait for an action.

        Args:
            seconds: Seconds since the loop's last call for the episode, or since its answer.
            keep_rows: As in `abandon`.

        Returns:
            Names of the abandoned episodes.
        """
        with self.changed:
            before = time.monotonic() - seconds
            silent = [
                episode
                for episode in self._episodes.values()
                if episode.heard < before and episode not in self._waiting
            ]
            for episode in silent:
                self._abandon(episode, keep_rows=keep_rows)
        return [episode.name for episode in silent]

    def _abandon(self, episode: _Episode, *, keep_rows: bool) -> None:
        self._withdraw(episode)
        eps_id = episode.running.eps_id
        lost = self._rows.integers(Columns.EPS_ID) == eps_id
        if keep_rows and episode.running.training_enabled:
            lost &= ~self._rows.closed
        self._remove(episode)
        self._drop(lost)
        self._metrics.episodes_failed()
        self.changed.notify_all()

    def _drop(self, chosen: NDArray[np.bool_]) -> None:
        """Drop rows and count them."""
        dropped = int(np.count_nonzero(chosen))
        if not dropped:
            return
        self._moved(self._rows.drop(chosen))
        self.progress.dropped += dropped
        self._metrics.rows_dropped(dropped)

    def _moved(self, numbers: NDArray[np.int64]) -> None:
        """Update the row numbers of running episodes."""
        for episode in self._episodes.values():
            if episode.row is not None:
                episode.row = int(numbers[episode.row])

    @property
    def episodes_running(self) -> int:
        """Number of running episodes."""
        return len(self._episodes)

    def _ask(self, episode_id: str, observation: Any, logged: Any, columns: Mapping[str, Any]) -> Any:
        obs = value_of(self._spaces[0], observation, Columns.OBS)
        with self.changed:
            episode = self._episode(episode_id)
            if episode in self._waiting:
                raise OptionError(
                    f"episode {excerpt(episode_id)} already waits for an action, in another thread"
                )
            episode.heard = time.monotonic()
            episode.running.last_observation = map_structure(lambda leaf: leaf[0], obs)
            self._close_row(episode, obs, ended=(False, False))
            episode.obs, episode.logged, episode.columns = obs, logged, columns
            answer: Future[Any] = Future()
            episode.answer = answer
            if self._immediate:
                self._answer([episode])
            else:
                self._waiting.append(episode)
                self.changed.notify_all()
        try:
            return answer.result(self._timeout)
        except TimeoutError as error:
            with self.changed:
                # It may have been answered since. Then its row is open, and the action counts. Another thread
                # may even wait for the next action.
                if episode in self._waiting and episode.answer is answer:
                    self._waiting.remove(episode)
                    raise EnvError(
                        f"no action was chosen for episode {excerpt(episode_id)} within {self._timeout} s: "
                        "call sample(), or give loops more time (timeout=)"
                    ) from error
        return answer.result()

    def _episode(self, episode_id: str) -> _Episode:
        self._check_open()
        if not isinstance(episode_id, str):
            raise SchemaError(f"episode_id={excerpt(episode_id)}: expected the str that start returned")
        try:
            return self._episodes[episode_id]
        except KeyError:
            raise OptionError(
                f"no episode {excerpt(episode_id)} is running: start it first; {len(self._episodes)} are "
                f"running, such as {excerpt(list(itertools.islice(self._episodes, 3)))}"
            ) from None

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the runner is stopped and no longer samples these episodes")

    def _close_row(self, episode: _Episode, obs: Any, *, ended: tuple[bool, bool]) -> None:
        """Record the outcome of the episode's latest action."""
        if episode.row is None:
            return
        self._rows.close(
            np.array([episode.row]),
            rewards=[episode.reward],
            t=episode.t,
            new_obs=obs,
            ended=[ended],
            infos=[episode.info] if self._infos else None,
        )
        self.progress.timesteps += 1
        running = episode.running
        running.length = episode.t
        running.last_info = episode.info
        running.last_action = map_structure(lambda leaf: leaf[0], episode.action)
        episode.row = None
        self.actor.reward([episode.slot], episode.reward)
        episode.reward, episode.info = 0.0, {}
        self._call("on_episode_step", running)
        self.changed.notify_all()

    # ---- called by the sampler ----

    def serve(self, timeout: float | None = None) -> None:
        """Wait for a change, then answer all waiting loops in one batch.

        Args:
            timeout: Maximum seconds to wait.
        """
        with self.changed:
            if not self._waiting:
                self.changed.wait(timeout)
            waiting, self._waiting = self._waiting, []
            if waiting:
                self._answer(waiting)

    def _answer(self, episodes: list[_Episode]) -> None:
        try:
            self._act(episodes)
        except BaseException as error:
            # The loops must not wait without end; the sampler gets the error as well.
            for episode in episodes:
                if not episode.answer.done():
                    episode.answer.set_exception(error)
            if not self._immediate:
                raise
        finally:
            now = time.monotonic()
            for episode in episodes:
                episode.heard = now

    def _act(self, episodes: list[_Episode]) -> None:
        for episode in episodes:
            if not episode.started:
                episode.started = True
                self._call("on_episode_start", episode.running)
        obs = joined([episode.obs for episode in episodes])
        acted = self.actor.act(
            self.policy,
            obs,
            Streams(np.array([each.slot for each in episodes]), np.array([not each.t for each in episodes])),
            _integers_of(episodes),
            explore=self.explore,
            timestep=self.progress.timesteps,
            own=_RECORDED,
        )
        columns = {name: np.array(value) for name, value in acted.extras.items()}
        own = {name for name in columns if not name.startswith(_STATES)}
        if self._known is None or self._known.keys() != own:
            self._known = {name: columns[name][:0] for name in own}
        kept = [i for i, each in enumerate(episodes) if not each.columns or _is_sound(each, self._known)]
        acted = acted._replace(extras=columns)
        if len(kept) < len(episodes):
            # One loop's mistake must not affect the others, so they are answered.
            obs, columns, actions, state = map_structure(
                lambda leaf: np.asarray(leaf)[kept], (obs, columns, acted.actions, acted.state)
            )
            acted = acted._replace(actions=actions, extras=columns, state=state)
        if kept:
            self._record([episodes[i] for i in kept], obs, acted)

    def _record(self, episodes: list[_Episode], obs: Any, acted: Acted) -> None:
        """Open rows for the policy's results, and keep the actions for the loops."""
        columns = acted.extras
        parts = [row_of(acted.actions, i) if e.logged is None else e.logged for i, e in enumerate(episodes)]
        for i, episode in enumerate(episodes):
            if episode.logged is not None:
                fill_in(columns, i, episode.columns)
        columns[LOGGED] = np.array([episode.logged is not None for episode in episodes], bool)
        acted = acted._replace(actions=joined(parts))
        integers = _integers_of(episodes)
        integers[Columns.WEIGHTS_SEQ_NO] = acted.weights_seq_no
        first = self._rows.open(obs, acted.actions, columns, integers)
        # Nothing may fail from here on, because a row that no episode knows would stay open.
        self.actor.keep(np.array([episode.slot for episode in episodes]), acted)
        for i, episode in enumerate(episodes):
            episode.row, episode.t, episode.action = first + i, episode.t + 1, parts[i]
            episode.answer.set_result(map_structure(lambda leaf: leaf[0], parts[i]))

    def _call(self, name: str, episode: RunningEpisode) -> None:
        if name in self._wanted:
            with awaited():  # Usually in the thread of a loop, while `sample` waits.
                getattr(self._callbacks, name)(runner=self, env=None, episode=episode)

    # ---- rows ----

    def rows_ready(self, *, whole: bool) -> int:
        """Number of rows that `take` would return."""
        with self.changed:
            return int(np.count_nonzero(self._chosen(whole=whole)))

    @property
    def episodes_ready(self) -> int:
        """Number of ended episodes whose rows `take` would return."""
        with self.changed:
            return len(self._over)

    def take(self, *, whole: bool = False) -> SampleBatch:
        """Hand out rows, episode by episode.

        Args:
            whole: Take only rows of ended episodes; else all rows with a known outcome.

        Returns:
            A batch that owns its memory, with ``unroll_id`` and without rows excluded from training.
        """
        with self.changed:
            chosen = self._chosen(whole=whole)
            columns, moved = self._rows.take(chosen)
            self._moved(moved)
            running = [episode.running for episode in self._episodes.values()]
            wanted = self._over | {each.eps_id: each.training_enabled for each in running}
            # Forget episodes without rows, because the number of episodes grows without limit.
            left = set(self._rows.integers(Columns.EPS_ID).tolist())
            self._over = {eps_id: enabled for eps_id, enabled in self._over.items() if eps_id in left}
            batch = self._finished(columns, [eps_id for eps_id in wanted if not wanted[eps_id]])
            batch = self._with_postprocessed(batch)
            batch.episode_starts = self._starts
            left |= {each.eps_id for each in running}
            self._starts = {eps_id: start for eps_id, start in self._starts.items() if eps_id in left}
            self._done_rows.keep(left.__contains__)
            return batch

    def _chosen(self, *, whole: bool) -> NDArray[np.bool_]:
        chosen = self._rows.closed
        if whole:
            chosen &= np.isin(self._rows.integers(Columns.EPS_ID), list(self._over))
        return chosen

    def _finished(self, columns: dict[str, Any], unwanted: list[int]) -> SampleBatch:
        if Columns.EPS_ID not in columns:  # No action yet.
            return SampleBatch(columns)
        eps_id = columns[Columns.EPS_ID]
        # Rows lie in time order, and episodes run side by side.
        _, first, episode = np.unique(eps_id, return_index=True, return_inverse=True)
        order = np.argsort(first[episode], kind="stable")
        kept = order[~np.isin(eps_id[order], unwanted)]
        self.progress.dropped += len(order) - len(kept)
        self._metrics.rows_dropped(len(order) - len(kept))
        whole = SampleBatch({name: column for name, column in columns.items() if name != NEXT_T})
        batch: SampleBatch = whole[kept]
        batch[Columns.UNROLL_ID] = self.unroll_ids(eps_id[kept])
        return batch

    def unroll_ids(self, eps_id: NDArray[np.int64]) -> NDArray[np.int64]:
        """Assign a new id to each run of equal ids in ``eps_id``, one value per row."""
        with self.changed:
            return self.progress.unroll_ids(eps_id)

    @property
    def rows_waiting(self) -> int:
        """Rows with a known outcome that were not handed out yet."""
        with self.changed:
            return self._rows.closed_rows

    def go_on_from(self, progress: Progress, ids: np.random.Generator) -> None:
        """Continue counting from another runner's counters, with new episode ids.

        Loops cannot be stopped here, so running episodes and waiting rows get new ids.

        Args:
            progress: Counters of the other runner.
            ids: Generator that draws episode ids.
        """
        with self.changed:
            self._ids = ids
            self.progress.take_over(progress)
            self.progress.timesteps += self._rows.closed_rows
            eps_id = self._rows.integers(Columns.EPS_ID)
            running = [episode.running for episode in self._episodes.values()]
            known = dict.fromkeys([*(each.eps_id for each in running), *eps_id.tolist()])
            new = {old: self._new_id() for old in known}
            eps_id[:] = [new[old] for old in eps_id.tolist()]
            self._over = {new[old]: enabled for old, enabled in self._over.items()}
            self._done_rows.clear()  # Their ids changed.
            self._starts = {new[old]: start for old, start in self._starts.items() if old in new}
            for each in running:
                each.eps_id = new[each.eps_id]

    def close(self) -> None:
        """Wake all waiting loops with a ClosedError."""
        with self.changed:
            self._closed = True
            for episode in self._waiting:
                episode.answer.set_exception(ClosedError("the runner is stopped: no more actions are chosen"))
            self._waiting = []
            self.changed.notify_all()


def _integers_of(episodes: list[_Episode]) -> dict[str, Any]:
    """The integer columns of new steps, known before the policy acts."""
    zeros = [0] * len(episodes)
    return {
        Columns.EPS_ID: [episode.running.eps_id for episode in episodes],
        Columns.T: [episode.t for episode in episodes],
        Columns.ENV_ID: zeros,
        Columns.AGENT_INDEX: zeros,
    }


def joined(parts: list[Any]) -> Any:
    """Concatenate batches of one."""
    return map_structure(lambda *found: np.concatenate(found), *parts)


def row_of(values: Any, i: int) -> Any:
    """Copy row ``i`` as a batch of one."""
    return map_structure(lambda leaf: np.array(np.asarray(leaf)[i : i + 1]), values)


def _check_known(given: Mapping[str, Any], known: Mapping[str, NDArray[Any]]) -> None:
    for name, value in given.items():
        if name not in known:
            raise SchemaError(
                f"log_action() got a column that the policy does not have: expected some of {sorted(known)}",
                column=name,
            )
        column_of(value, known[name], name)


def _is_sound(episode: _Episode, known: Mapping[str, NDArray[Any]]) -> bool:
    """Whether a loop can be answered; sets its error if not."""
    try:
        _check_known(episode.columns, known)
    except SchemaError as error:
        episode.answer.set_exception(error)
        return False
    return True


def fill_in(columns: dict[str, NDArray[Any]], i: int, known: Mapping[str, Any]) -> None:
    """Write the known data of a logged action into row ``i`` of the policy's columns."""
    for name in OF_THE_CHOICE:
        if name in columns and columns[name].dtype.kind == "f":
            columns[name][i] = np.nan
    for name, value in _implied(known).items():
        if name in columns:
            columns[name][i] = value
    for name, value in known.items():
        columns[name][i] = value


def _implied(known: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the probability from its logarithm, or the logarithm from the probability."""
    with np.errstate(divide="ignore"):  # log(0) is -inf.
        if Columns.ACTION_LOGP in known:
            return {Columns.ACTION_PROB: np.exp(known[Columns.ACTION_LOGP])}
        if Columns.ACTION_PROB in known:
            return {Columns.ACTION_LOGP: np.log(known[Columns.ACTION_PROB])}
    return {}
