"""`RecordExperience`, `RecordVectorExperience`: record the steps of your own loop in gymnasium environments.

Example:
    >>> import gymnasium as gym, rlio
    >>> env = RecordExperience(gym.make("CartPole-v1"), "memory://recording-example")
    >>> obs, info = env.reset(seed=0)
    >>> for _ in range(3):
    ...     env.record(action_logp=-0.7)
    ...     obs, reward, terminated, truncated, info = env.step(1)
    >>> env.close()
    >>> batch = rlio.DatasetReader("memory://recording-example", epochs=1).sample()
    >>> batch["t"].tolist(), batch["action_logp"].tolist(), bool((batch["new_obs"][-1] == obs).all())
    ([0, 1, 2], [-0.699999988079071, -0.699999988079071, -0.699999988079071], True)
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv, VectorWrapper
from numpy.typing import NDArray

from rlio.batch import Column, SampleBatch
from rlio.batch.arrays import object_column
from rlio.batch.columns import DEFAULT_POLICY_ID, RECORDED, Columns, is_per_sequence
from rlio.batch.nested import path_text
from rlio.envs.leaves import leaf_of, leaves_of
from rlio.envs.vector import VectorStep, VectorStepper
from rlio.errors import OptionError, PublishError, SchemaError, excerpt
from rlio.resolve import IOContext, resolve_output
from rlio.sampling.recorder import StepRecorder
from rlio.sampling.row_store import copied, nested
from rlio.support.forks import Owner
from rlio.support.turns import Turns
from rlio.writer import OutputWriter

__all__ = ["RecordExperience", "RecordVectorExperience"]

logger: logging.Logger = logging.getLogger("rlio")

# A write of any size costs as much as some hundred steps. 256 rows are few enough that a crash loses
# little, and enough that writing costs a microsecond a step.
_MOST_ROWS: Final = 256
_MOST_SECONDS: Final = 1.0
# Episodes of a few steps end faster than they could be written one by one.
_PAUSE_SECONDS: Final = 0.002
# Runners record these columns. They are not recorded here, so a loop may pass them to `record`.
_FREE: Final = frozenset({Columns.UNROLL_ID, Columns.AGENT_INDEX, Columns.WEIGHTS_SEQ_NO})


class _Buffer:
    """One value of a space for each step, nested or not, as preallocated columns."""

    def __init__(self, column: str, space: gym.Space[Any], rows: int) -> None:
        self._column = column
        self._leaves = leaves_of(space)
        self._arrays = [np.zeros((rows, *leaf.shape), leaf.dtype) for leaf in self._leaves]
        self._checked = False
        first = self._leaves[0]
        #: The array of a space that is a single array: assigned to without a loop.
        self._plain = None if first.path or first.is_object else self._arrays[0]
        self._shape = first.shape

    def put(self, at: int, value: Any) -> None:
        """Copy a value into row ``at``.

        Raises:
            SchemaError: The value does not fit the space's shape, or the first value not its dtype.
        """
        plain = self._plain
        if not self._checked or plain is None or (self._shape and getattr(value, "shape", ()) != self._shape):
            self._check(value)
        try:
            if plain is not None:
                plain[at] = value
                return
            for leaf, array in zip(self._leaves, self._arrays, strict=True):
                array[at] = leaf_of(value, leaf.path)
        except (TypeError, ValueError) as error:
            raise SchemaError(
                f"the space does not hold {excerpt(value)}: {error}", column=self._column
            ) from error

    def _check(self, value: Any) -> None:
        for leaf, array in zip(self._leaves, self._arrays, strict=True):
            if leaf.is_object:
                continue
            found = np.asarray(leaf_of(value, leaf.path))
            if found.shape != array.shape[1:] or not np.can_cast(found.dtype, array.dtype, "same_kind"):
                raise SchemaError(
                    f"the loop gave {found.dtype} {found.shape}, and the environment's {leaf.space} holds "
                    f"{array.dtype} {array.shape[1:]}",
                    column="/".join(filter(None, (self._column, path_text(leaf.path)))),
                )
        self._checked = True

    def row(self, at: int) -> list[Any]:
        """Copies of row ``at``, one for each leaf."""
        return [copied(array[at]) for array in self._arrays]

    def move(self, at: int, to: int) -> None:
        """Copy row ``at`` to row ``to``."""
        for array in self._arrays:
            array[to] = array[at]

    def columns(self, first: int, rows: int, changed: list[tuple[int, list[Any]]] | None = None) -> Column:
        """Some rows, nested like the space: views, or copies if some rows are ``changed``."""
        parts = [array[first : first + rows] for array in self._arrays]
        if changed:
            parts = [part.copy() for part in parts]
            for at, values in changed:
                for part, value in zip(parts, values, strict=True):
                    part[at] = value
        made: Column = nested(self._leaves, parts)
        return made


class _Rows:
    """The steps of one environment since the last write."""

    def __init__(self, env: gym.Env[Any, Any], *, infos: bool, seeds: bool) -> None:
        # One more row: the observation after step n is the one before step n + 1.
        self._obs = _Buffer(Columns.OBS, env.observation_space, _MOST_ROWS + 1)
        self._actions = _Buffer(Columns.ACTIONS, env.action_space, _MOST_ROWS)
        # float32, as EnvRunner records rewards: learners compute in float32.
        self._rewards = np.zeros(_MOST_ROWS, np.float32)
        self._terminateds = np.zeros(_MOST_ROWS, bool)
        self._truncateds = np.zeros(_MOST_ROWS, bool)
        self._infos: list[dict[str, Any]] | None = [] if infos else None
        self._seeds = seeds
        #: Columns that the user passes to `RecordExperience.record`; known from the first step on.
        self.extras: dict[str, NDArray[Any]] = {}
        self._begun = False
        #: Number of rows.
        self.count = 0
        #: Id, step and seed of each row's episode; and those of the next row.
        self._keys: list[tuple[int, int, int]] = []
        self._next = (0, 0, -1)
        #: Last rows of episodes and their final observations: the next episode's first observation follows
        #: there.
        self._finals: list[tuple[int, list[Any]]] = []

    @property
    def full(self) -> bool:
        """Whether the buffer has no room for another step."""
        return self.count == _MOST_ROWS

    def start(self, obs: Any, eps_id: int, seed: int | None) -> None:
        """Begin an episode."""
        at = self.count
        # Only once: a later observation that did not fit may have overwritten part of that row.
        if at and not (self._finals and self._finals[-1][0] == at - 1):
            self._finals.append((at - 1, self._obs.row(at)))
        self._obs.put(at, obs)
        self._next = eps_id, 0, -1 if seed is None else seed

    def add(self, action: Any, result: tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]) -> None:
        """Record a step: the action, and the environment's result."""
        obs, reward, terminated, truncated, info = result
        at = self.count
        self._actions.put(at, action)
        self._obs.put(at + 1, obs)
        self._rewards[at] = reward
        self._terminateds[at] = terminated
        self._truncateds[at] = truncated
        if self._infos is not None:
            self._infos.append(dict(info))
        self._keys.append(self._next)
        eps_id, t, seed = self._next
        self._next = eps_id, t + 1, seed
        self.count = at + 1
        self._begun = True

    def add_extras(self, extras: dict[str, Any]) -> None:
        """Store extra columns of the next step; every step must have the same ones.

        Raises:
            SchemaError: The columns differ from those of earlier steps.
        """
        if not self._begun:
            self.extras = {name: _extra_buffer(name, value) for name, value in extras.items()}
        known = self.extras
        if extras.keys() != known.keys():
            raise SchemaError(
                f"record() was given {excerpt(sorted(extras))} for this step, and {excerpt(sorted(known))} "
                "before: every step has the same columns, from the first one on"
            )
        for name, value in extras.items():
            buffer = known[name]
            if type(value) is float and buffer.ndim == 1 and buffer.dtype.kind == "f":
                buffer[self.count] = value  # The common case, in a tenth of the time of the checks below.
                continue
            found = _array(name, value)
            if found.shape != buffer.shape[1:] or not np.can_cast(found.dtype, buffer.dtype, "same_kind"):
                raise SchemaError(
                    f"record() was given {found.dtype} {found.shape}, and {buffer.dtype} {buffer.shape[1:]} "
                    "before",
                    column=name,
                )
            buffer[self.count] = found

    def batch(self) -> SampleBatch:
        """The rows: views, except for ``eps_id`` and ``t``."""
        rows = self.count
        eps_ids, ts, seeds = np.array(self._keys, np.int64).T.copy()
        columns: dict[str, Any] = {
            Columns.OBS: self._obs.columns(0, rows),
            Columns.ACTIONS: self._actions.columns(0, rows),
            Columns.REWARDS: self._rewards[:rows],
            Columns.NEXT_OBS: self._obs.columns(1, rows, self._finals),
            Columns.TERMINATEDS: self._terminateds[:rows],
            Columns.TRUNCATEDS: self._truncateds[:rows],
        }
        if self._infos is not None:
            columns[Columns.INFOS] = object_column(self._infos)
        columns[Columns.EPS_ID], columns[Columns.T] = eps_ids, ts
        if self._seeds:
            columns[Columns.ENV_SEED] = seeds
        for name, buffer in self.extras.items():
            columns[name] = buffer[:rows]
        # As vector environments and runners record it: all of them may share a data set.
        columns[Columns.ENV_ID] = np.zeros(rows, np.int64)
        return SampleBatch(columns)

    def written(self) -> None:
        """Drop the rows; the episode continues."""
        rows = self.count
        self._keys.clear()
        self._finals.clear()
        self._obs.move(rows, 0)
        if self._infos is not None:
            self._infos.clear()
        self.count = 0


class _VectorRows:
    """The steps of a vector environment since the last write."""

    def __init__(self, envs: VectorEnv[Any, Any, Any], *, infos: bool, seeds: bool, seed: int | None) -> None:
        self._envs = envs.num_envs
        self._steps = StepRecorder(
            envs.single_observation_space,
            envs.single_action_space,
            num_envs=self._envs,
            capacity=-(-_MOST_ROWS // self._envs),
            infos=infos,
        )
        self._ids = np.random.default_rng(seed)
        self._eps_id = np.zeros(self._envs, np.int64)
        self._t = np.zeros(self._envs, np.int64)
        self._env_seed = np.full(self._envs, -1, np.int64) if seeds else None
        #: Rows that were taken from the recorder but not written.
        self._taken: SampleBatch | None = None

    @property
    def count(self) -> int:
        """Number of rows."""
        return self._steps.rows + (0 if self._taken is None else len(self._taken))

    @property
    def full(self) -> bool:
        """Whether the buffer has no room for another step."""
        return self._steps.is_full

    def start(self, obs: Any, which: NDArray[np.bool_], seed: int | Sequence[int | None] | None) -> None:
        """Begin episodes in some environments."""
        self._steps.restart(obs, which)
        self._begin(which)
        if self._env_seed is not None and seed is not None:
            # One number is the first environment's seed; the others get the numbers after it.
            of_each = [seed + env for env in range(self._envs)] if isinstance(seed, int) else seed
            given = np.array([-1 if one is None else one for one in of_each], np.int64)
            self._env_seed[which] = given[which]

    def _begin(self, which: NDArray[np.bool_]) -> None:
        if self._env_seed is not None:
            self._env_seed[which] = -1
        self._t[which] = 0
        self._eps_id[which] = self._ids.integers(0, 1 << 63, int(which.sum()), dtype=np.int64)

    def add(self, step: VectorStep, actions: Any, extras: dict[str, Any], infos: Any) -> None:
        """Record a step of all environments."""
        scalars = {Columns.EPS_ID: self._eps_id, Columns.T: self._t}
        if self._env_seed is not None:
            scalars[Columns.ENV_SEED] = self._env_seed
        self._steps.add(step, actions=actions, extras=extras, scalars=scalars, infos=infos)
        ended = step.terminateds | step.truncateds
        if step.valid is None:
            self._t += 1
        else:
            self._t += step.valid
            ended &= step.valid
        if ended.any():
            self._begin(ended)

    def batch(self) -> SampleBatch:
        """The rows, environment by environment; they stay here until `written` is called."""
        if self._taken is None:
            columns, counts = self._steps.take()
            columns[Columns.ENV_ID] = np.repeat(np.arange(self._envs), counts)
            self._taken = SampleBatch(columns)
        return self._taken

    def written(self) -> None:
        """Drop the rows of the last `batch`."""
        self._taken = None


def _extra_buffer(name: str, value: Any) -> NDArray[Any]:
    found = _array(name, value)
    # The type of a Python float does not show its precision; policies compute in float32.
    kind = np.float32 if isinstance(value, float) and not isinstance(value, np.generic) else found.dtype
    return np.zeros((_MOST_ROWS, *found.shape), kind)


def _array(name: str, value: Any) -> NDArray[Any]:
    """The value given to `record` as an array; tensors may be on any device, with or without gradients."""
    try:
        found = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SchemaError(f"record() was given {excerpt(value)}: {error}", column=name) from error
    if found.dtype == object:
        raise SchemaError(f"record() was given {excerpt(value)}: expected a number or an array", column=name)
    return found


class _Recorder:
    """Decides when the rows go to the writer."""

    def __init__(self, rows: _Rows | _VectorRows, writer: OutputWriter) -> None:
        self.rows = rows
        self.writer = writer
        self._written_at = time.monotonic()
        self._owner = Owner()
        _recorders.add(self)

    def write_if_due(self, *, ended: bool) -> None:
        """Write if the buffer is full, the last write is old, or an episode ended.

        Raises:
            PublishError: This is a forked child: the writer is its parent's.
        """
        self._owner.check("recorder", error=PublishError)
        since = time.monotonic() - self._written_at
        if self.rows.full or since > (_PAUSE_SECONDS if ended else _MOST_SECONDS):
            self.write()

    def finish(self) -> None:
        """Write all rows, unless the writer was closed before."""
        if not self.writer.closed:
            self.write()

    def write(self) -> None:
        """Write all rows. If the write fails, the rows are kept and written later."""
        # A forked child has a copy of its parent's rows; the parent writes them.
        while self.rows.count and self._owner.is_here:
            self.writer.write(self.rows.batch())
            self.rows.written()
        self._written_at = time.monotonic()


#: Recorders whose rows are written when the interpreter exits.
_recorders: weakref.WeakSet[_Recorder] = weakref.WeakSet()


def _write_all() -> None:
    for recorder in list(_recorders):
        _let_go(recorder)


def _let_go(recorder: _Recorder) -> None:
    """Write the waiting rows where no caller can get an exception: log errors."""
    try:
        recorder.finish()
    except Exception as error:
        logger.error("%d recorded rows are lost: they could not be written: %s", recorder.rows.count, error)


# `rlio.writer` registered the closing of open writers before. The last registered function runs first, so the
# rows are written before the writers close.
getattr(threading, "_register_atexit", atexit.register)(_write_all)


class _Recording:
    """The rows of a wrapped environment, and the writer that gets them."""

    _rows: _Rows | _VectorRows

    def _start_recording(
        self,
        env: gym.Env[Any, Any] | VectorEnv[Any, Any, Any],
        writer: OutputWriter | str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None,
        *,
        seeds: bool,
        close_writer: bool,
    ) -> None:
        self._turns = Turns(type(self).__name__)
        self._lock = self._turns.lock
        self.writer: OutputWriter = _writer_of(writer, env, storage_options)
        self._recorder = _Recorder(self._rows, self.writer)
        self._seeds, self._close_writer = seeds, close_writer
        self._extras: dict[str, Any] = {}
        #: Whether a step failed since the last reset: the state of the environment is then unknown.
        self._failed = False
        # The rows of an environment that was dropped without close() are written too.
        self._finalizer = weakref.finalize(self, _let_go, self._recorder)
        self._finalizer.atexit = False

    def _check_state(self) -> None:
        if self._failed:
            raise OptionError(
                "the last step failed, and the state of the environment is unknown: call reset() first"
            )

    def flush(self) -> None:
        """Pass the waiting rows to the writer."""
        with self._turns.held():
            self._recorder.write()

    def _finish(self, close_env: Callable[[], None]) -> None:
        with self._turns.after_calls():
            try:
                self._recorder.finish()
            finally:
                close_env()
            if self._close_writer:
                self.writer.close()


class RecordExperience(_Recording, gym.Wrapper[Any, Any, Any, Any]):
    """Steps ``env`` unchanged, and records every transition.

    A row is one transition: ``obs, actions, rewards`` (float32), ``new_obs, terminateds, truncateds, eps_id``
    (63 random bits), ``t`` and ``env_id`` (0), with the dtypes of the environment's spaces, and the columns
    passed to `record`. `RecordVectorExperience` records the same columns: both may write into one data set.
    ``new_obs`` is the observation that the step returned, also at the end of an episode. Resets are not rows.
    An episode that `reset` leaves before its end is neither terminated nor truncated.

    Rows are written when there are 256 of them, after a second, and at the end of an episode (unless the last
    write was less than 2 ms ago). A crash loses at most the rows since the last write. `close`, and the end
    of the interpreter, write the rest. If writing fails, `step` raises although the step was taken; the rows
    are kept for the next attempt.

    One thread at a time may step it: `step`, `reset` and `record` raise an OptionError while another thread
    is in a call. `flush` and `close` may come from any thread, and wait for a running step.

    In gymnasium's SyncVectorEnv and AsyncVectorEnv you can wrap each environment, each with its own writer:
    pass a path, which all may share, in the function that makes the environment.

    Args:
        env: The environment; wrap it last, because the wrapper records what your policy sees and does.
        writer: A writer, or a value that `resolve_output` takes: a path or URL of a data set.
        infos: Whether to record the info of each step, in a column of dicts.
        seeds: Whether to record the seed given to the `reset` of the row's episode, in the int64 column
            ``env_seed``; -1: none.
        seed: Seed of the episode ids; None draws one from the OS. Two environments of one data set need
            different seeds.
        autoreset: Whether the step after an episode's last is a reset; None: if ``env`` is wrapped in
            gymnasium's Autoreset.
        close_writer: Whether `close` closes the writer. Pass False if others write with it.
        storage_options: For the fsspec filesystem of a path or URL.

    Raises:
        OptionError: ``writer`` describes no writer, or is a writer and ``storage_options`` are given.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        writer: OutputWriter | str | os.PathLike[str],
        *,
        infos: bool = False,
        seeds: bool = False,
        seed: int | None = None,
        autoreset: bool | None = None,
        close_writer: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(env)
        self._rows: _Rows = _Rows(env, infos=infos, seeds=seeds)
        self._start_recording(env, writer, storage_options, seeds=seeds, close_writer=close_writer)
        self._autoreset = _has_autoreset(env) if autoreset is None else autoreset
        self._ids = np.random.default_rng(seed)
        #: Whether an episode is running, with an observation to act on.
        self._running = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; see `gymnasium.Env.reset`."""
        lock = self._lock
        if not lock.acquire(False):
            raise self._turns.taken()
        try:
            return self._reset(seed, options)
        finally:
            lock.release()

    def _reset(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        self._running = False
        obs, info = self.env.reset(seed=seed, options=options)
        self._start(obs, seed)
        self._failed = False
        return obs, info

    def _start(self, obs: Any, seed: int | None) -> None:
        self._rows.start(obs, int(self._ids.integers(0, 1 << 63, dtype=np.int64)), seed)
        self._extras.clear()
        self._running = True

    def record(self, **columns: Any) -> None:
        """Add columns to the next step, such as ``action_logp`` of the policy that chose its action.

        Args:
            columns: Numbers, arrays or tensors; the same names at every step, from the first one on. A Python
                float is stored as float32, anything else in its own dtype.

        Raises:
            OptionError: The wrapper records a column of that name itself.
        """
        _check_names(columns, seeds=self._seeds)
        lock = self._lock
        if not lock.acquire(False):
            raise self._turns.taken()
        try:
            self._extras.update(columns)
        finally:
            lock.release()

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Take a step; see `gymnasium.Env.step`.

        Raises:
            OptionError: No episode is running: it has ended, or a step has failed. An exception from the
                environment, or a SchemaError about its result, ends the episode here, neither terminated nor
                truncated, because the state of the environment is then unknown.
            SchemaError: An action or observation does not fit the environment's space, or the columns given
                to `record` differ from those of earlier steps.
            PublishError: Rows could not be written; they are kept.
        """
        lock = self._lock
        if not lock.acquire(False):
            raise self._turns.taken()
        try:
            return self._take_step(action)
        finally:
            lock.release()

    def _take_step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        rows = self._rows
        self._check_state()
        if not self._running:
            return self._step_outside(action)
        if rows.full:  # The previous write failed.
            self._recorder.write()
        if self._extras or rows.extras:
            rows.add_extras(self._extras)
            self._extras.clear()
        self._failed = True
        result = self.env.step(action)
        rows.add(action, result)
        self._failed = False
        ended = bool(result[2] or result[3])
        if ended:
            self._running = False
        self._recorder.write_if_due(ended=ended)
        return result

    def _step_outside(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Take the step that resets an autoreset environment; raise if no step is allowed."""
        if not self._autoreset:
            raise OptionError(
                "step() was called while no episode is running: call reset() first, or pass autoreset=True "
                "if the environment resets itself in the step after an episode's last"
            )
        self._failed = True
        result = self.env.step(action)
        self._start(result[0], None)
        self._failed = False
        return result

    def close(self) -> None:
        """Write the waiting rows, and close the environment and the writer. May be called again."""
        self._finish(super().close)


class RecordVectorExperience(_Recording, VectorWrapper):
    """Steps the vector environment ``envs`` unchanged, and records every transition.

    Rows are like those of `RecordExperience`; ``env_id`` is the number of the environment. They are written
    when all environments together have as many. The environment's metadata tell gymnasium's three autoreset
    modes apart: a step that is a reset is not a row, and ``new_obs`` at the end of an episode is the final
    observation, in every mode. With DISABLED, `reset` takes ``options={"reset_mask": ...}``.

    Threads: as for `RecordExperience`.

    Args:
        envs: The vector environment.
        writer: A writer, or a value that `resolve_output` takes.
        infos: Whether to record the info of each step.
        seeds: As for `RecordExperience`; episodes that begin by autoreset have none.
        seed: Seed of the episode ids; None draws one from the OS.
        close_writer: Whether `close` closes the writer.
        storage_options: For the fsspec filesystem of a path or URL.

    Raises:
        OptionError: ``writer`` describes no writer, or is a writer and ``storage_options`` are given; or the
            metadata do not give the autoreset mode.
    """

    def __init__(
        self,
        envs: VectorEnv[Any, Any, Any],
        writer: OutputWriter | str | os.PathLike[str],
        *,
        infos: bool = False,
        seeds: bool = False,
        seed: int | None = None,
        close_writer: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(envs)
        self._stepper = VectorStepper(envs)
        self._infos = infos
        self._rows: _VectorRows = _VectorRows(envs, infos=infos, seeds=seeds, seed=seed)
        self._start_recording(envs, writer, storage_options, seeds=seeds, close_writer=close_writer)
        #: Which environments have an observation to act on.
        self._running = np.zeros(envs.num_envs, bool)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin episodes everywhere, or where ``options["reset_mask"]`` is True; see `VectorEnv.reset`."""
        lock = self._lock
        if not lock.acquire(False):
            raise self._turns.taken()
        try:
            return self._reset(seed, options)
        finally:
            lock.release()

    def _reset(
        self, seed: int | list[int | None] | None, options: dict[str, Any] | None
    ) -> tuple[Any, dict[str, Any]]:
        mask = (options or {}).get("reset_mask")  # Read first: some environments remove it from the options.
        which = np.ones(self.num_envs, bool) if mask is None else np.array(mask, bool)
        # gymnasium's own vector environments take a list as well.
        given: Any = seed
        obs, infos = self.env.reset(seed=given, options=options)
        if mask is None:
            self._stepper.forget()
            self._failed = False
        self._rows.start(obs, which, seed)
        self._running[which] = True
        self._extras.clear()
        return obs, infos

    def record(self, **columns: Any) -> None:
        """Add columns to the next step, such as ``action_logp``: arrays of shape (num_envs, ...).

        Args:
            columns: Arrays or tensors; the same names, dtypes and shapes at every step.

        Raises:
            OptionError: The wrapper records a column of that name itself.
            SchemaError: A value cannot become an array.
        """
        _check_names(columns, seeds=self._seeds)
        lock = self._lock
        if not lock.acquire(False):
            raise self._turns.taken()
        try:
            self._extras.update({name: _array(name, value) for name, value in columns.items()})
        finally:
            lock.release()

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take a step in every environment; see `VectorEnv.step`.

        Raises:
            OptionError: No episode is running in an environment, or a step has failed; see
                `RecordExperience.step`.
            SchemaError: A value does not fit the environment's spaces, or differs from earlier steps.
            PublishError: Rows could not be written; they are kept.
        """
        lock = self._lock
        if not lock.acquire(False):
            raise self._turns.taken()
        try:
            return self._take_step(actions)
        finally:
            lock.release()

    def _take_step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self._check_state()
        if not self._running.all():
            raise OptionError(
                f"step() was called, but environments {excerpt(np.flatnonzero(~self._running).tolist())} "
                "have no "
                "running episode: call reset() first, with options={'reset_mask': ...} for those that ended"
            )
        if self._rows.full:  # The previous write failed.
            self._recorder.write()
        self._failed = True
        result = self.env.step(actions)
        step = self._stepper.read(result)
        infos = self._stepper.env_infos(step) if self._infos else None
        self._rows.add(step, actions, dict(self._extras), infos)
        self._extras.clear()
        self._failed = False
        if self._stepper.is_reset_by_caller:
            self._running[step.starts] = False
        self._recorder.write_if_due(ended=bool(step.starts.any()))
        return result

    def close(self, **kwargs: Any) -> None:
        """Write the waiting rows, and close the environments and the writer. May be called again."""
        if hasattr(self, "_recorder"):  # gymnasium also closes a wrapper whose __init__ failed.
            self._finish(partial(super().close, **kwargs))


def _check_names(columns: dict[str, Any], *, seeds: bool) -> None:
    free = _FREE if seeds else _FREE | {Columns.ENV_SEED}
    for name in columns:
        if name in RECORDED - free:
            raise OptionError(f"record({name}=...): rlio records this column itself; leave it out")
        if is_per_sequence(name):
            raise OptionError(
                f"record({name}=...): this column is of sequences, and rows are steps; leave it out"
            )


def _writer_of(
    writer: Any,
    env: gym.Env[Any, Any] | VectorEnv[Any, Any, Any],
    storage_options: Mapping[str, Any] | None,
) -> OutputWriter:
    if isinstance(writer, OutputWriter):
        if storage_options is not None:
            raise OptionError("found storage_options= beside a writer: pass them to the writer instead")
        return writer
    spec = env.spec
    spaces = (
        (env.single_observation_space, env.single_action_space)
        if isinstance(env, VectorEnv)
        else (env.observation_space, env.action_space)
    )
    made_by = {} if spec is None else {"env": spec.id}
    options = {} if storage_options is None else {"storage_options": storage_options}
    context = IOContext(spaces={DEFAULT_POLICY_ID: spaces}, made_by=made_by, options=options)
    return resolve_output(writer, context)


def _has_autoreset(env: gym.Env[Any, Any]) -> bool:
    from gymnasium.wrappers import Autoreset

    while isinstance(env, gym.Wrapper):
        if isinstance(env, Autoreset):
            return True
        env = env.env
    return False
