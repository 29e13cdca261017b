"""`RecordExperience`: records the steps of a loop in one gymnasium environment."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np

from rlio.batch.columns import DEFAULT_POLICY_ID, Columns
from rlio.envs.values import as_flag
from rlio.errors import OptionError, excerpt
from rlio.recording.env_rows import EnvRows
from rlio.recording.recorder import ENV, MOST_ROWS, Mode, Recording, WriterLike, alone, check_names
from rlio.resolve import IOContext

__all__ = ["RecordExperience"]


class RecordExperience(Recording, gym.Wrapper[Any, Any, Any, Any]):
    """Steps ``env`` unchanged, and records every transition.

    A row is one transition: ``obs, actions, rewards`` (float32), ``new_obs, terminateds, truncateds, eps_id``
    (63 random bits), ``t`` and ``env_id`` (0), with the dtypes of the environment's spaces, and the columns
    passed to `record`. `RecordVectorExperience` records the same columns: both may write into one data set.
    ``new_obs`` is the observation that the step returned, also at the end of an episode. Resets are not rows.
    An episode that `reset` leaves before its end is neither terminated nor truncated.

    Everything is copied at its step: the environment may reuse what it returns and change what it gets. A
    step whose result cannot be stored is not recorded: `step` raises, and ``t`` has a gap there.

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
        mode: "append" adds to the rows of a data set, and logs how many it holds. "new" refuses a data set
            that holds rows, unless a recorder of this process wrote them.
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
        OptionError: ``env`` is not a gymnasium environment, or ``writer`` describes no writer; ``mode`` or
            ``storage_options`` do not fit ``writer``; or the data set is not new.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        writer: WriterLike,
        *,
        mode: Mode = "append",
        infos: bool = False,
        seeds: bool = False,
        seed: int | None = None,
        autoreset: bool | None = None,
        close_writer: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        _check_env(env)
        super().__init__(env)
        self._rows: EnvRows = EnvRows(env, infos=infos, seeds=seeds)
        self._start_recording(
            self._rows,
            writer,
            context=IOContext(
                spaces={DEFAULT_POLICY_ID: (env.observation_space, env.action_space)},
                made_by={} if env.spec is None else {"env": env.spec.id},
                options={} if storage_options is None else {"storage_options": storage_options},
            ),
            storage_options=storage_options,
            mode=mode,
            seeds=seeds,
            close_writer=close_writer,
        )
        self._extras: dict[str, Any] = {}
        self._autoreset = _has_autoreset(env) if autoreset is None else autoreset
        self._bits = np.random.default_rng(seed).bit_generator
        #: Whether an episode is running, with an observation to act on.
        self._running = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; see `gymnasium.Env.reset`.

        Raises:
            SchemaError: The observation does not fit the environment's space; call `reset` again.
        """
        # As `alone` does it, in less time: an episode may have a single step.
        if not self._lock.acquire(False):
            raise self._turns.taken()
        try:
            self._running = False
            obs, info = self.env.reset(seed=seed, options=options)
            self._start(obs, seed)
            self._failed = False
            return obs, info
        finally:
            self._lock.release()

    def _start(self, obs: Any, seed: int | None) -> None:
        # The number that `Generator.integers(1 << 63)` draws, in a sixth of its time.
        self._rows.start(obs, self._bits.random_raw() >> 1, seed)
        self._extras.clear()
        self._running = True

    @alone
    def record(self, **columns: Any) -> None:
        """Add columns to the next step, such as ``action_logp`` of the policy that chose its action.

        Args:
            columns: Numbers, arrays or tensors; the same names at every step, from the first one on. A Python
                float is stored as float32, anything else in its own dtype.

        Raises:
            OptionError: The wrapper records a column of that name itself.
        """
        check_names(columns, seeds=self._seeds)
        self._extras.update(columns)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Take a step; see `gymnasium.Env.step`.

        Raises:
            OptionError: No episode is running: it has ended, or a step has failed. An exception from the
                environment ends the episode here, neither terminated nor truncated, because the state of the
                environment is then unknown.
            SchemaError: The action does not fit the environment's space, or the columns given to `record`
                differ from those of earlier steps: no step was taken. Or the result of the step cannot be
                stored: the step was taken and is not recorded; go on, with another step or with `reset`.
            PublishError: Rows could not be written; they are kept.
        """
        # As `alone` does it; here its call would be a tenth of the time.
        if not self._lock.acquire(False):
            raise self._turns.taken()
        try:
            if self._failed or not self._running:
                self._check_state()
                return self._step_outside(action)
            rows = self._rows
            if rows.count == MOST_ROWS:  # The previous write failed.
                self._recorder.write()
            if self._extras or rows.extras:
                rows.act(action, self._extras)
            else:
                rows.actions.put(rows.count, action)
            self._failed = True
            result = self.env.step(action)
            obs, reward, terminated, truncated, info = result
            if terminated is not False and terminated is not True:
                terminated = as_flag(terminated, column=Columns.TERMINATEDS, giver=ENV)
            if truncated is not False and truncated is not True:
                truncated = as_flag(truncated, column=Columns.TRUNCATEDS, giver=ENV)
            self._failed = False
            ended = terminated or truncated
            if ended:
                self._running = False
            rows.add(obs, reward, terminated, truncated, info)
            self._recorder.write_if_due(ended=ended)
            return result
        finally:
            self._lock.release()

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
        """Write the waiting rows, and close the environment and the writer. May be called again.

        All of it is done, also if some of it fails; the first error is raised.
        """
        self._finish(partial(gym.Wrapper.close, self))


def _check_env(env: Any) -> None:
    if isinstance(env, gym.Env):
        return
    raise OptionError(f"RecordExperience was given {excerpt(env)}: {_advice(env)}")


def _advice(env: Any) -> str:
    """The recorder for ``env``, which is not a gymnasium environment."""
    from gymnasium.vector import VectorEnv

    from rlio.envs.pettingzoo import is_aec, is_pettingzoo

    if isinstance(env, VectorEnv):
        return "a vector environment is recorded by rlio.RecordVectorExperience"
    if is_pettingzoo(env):
        kind = "RecordAECEnv" if is_aec(env) else "RecordParallelEnv"
        return f"an environment of PettingZoo is recorded by rlio.{kind}"
    return (
        "expected a gymnasium environment. Wrap one of another interface in a gymnasium.Env (shimmy has "
        "wrappers), or pass its rows to rlio.BatchBuilder"
    )


def _has_autoreset(env: gym.Env[Any, Any]) -> bool:
    from gymnasium.wrappers import Autoreset

    while isinstance(env, gym.Wrapper):
        if isinstance(env, Autoreset):
            return True
        env = env.env
    return False
