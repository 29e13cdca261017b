"""`RecordVectorExperience`: records the steps of a loop in a gymnasium vector environment."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv, VectorWrapper
from numpy.typing import NDArray

from rlio.batch.columns import DEFAULT_POLICY_ID, Columns
from rlio.envs.leaves import Leaf
from rlio.envs.values import has_true
from rlio.envs.vector import VectorStepper
from rlio.errors import OptionError, SchemaError, excerpt
from rlio.recording.recorder import Mode, Recording, WriterLike, alone, check_names, check_object, extra_rows
from rlio.recording.vector_rows import VectorRows
from rlio.resolve import IOContext
from rlio.schemas.json_values import check_value

__all__ = ["RecordVectorExperience"]


class _Stepper(VectorStepper):
    """Refuses observations without a stored form, too."""

    def _fitted(self, leaf: Leaf, value: Any, *, rows: int | None = None) -> Any:
        found = super()._fitted(leaf, value, rows=rows)
        if leaf.is_object:
            for one in (found,) if rows is None else found:
                check_object(leaf, one, Columns.OBS)
        return found


class RecordVectorExperience(Recording, VectorWrapper):
    """Steps the vector environment ``envs`` unchanged, and records every transition.

    Rows are like those of `RecordExperience`; ``env_id`` is the number of the environment. They are written
    when all environments together have as many. The environment's autoreset mode decides what a step is: a
    step that is a reset is not a row, and ``new_obs`` at the end of an episode is the final observation, in
    every mode. With DISABLED, `reset` takes ``options={"reset_mask": ...}``.

    Steps may return arrays of PyTorch or JAX on any device. They are copied to the host once a step, in one
    transfer a column.

    Threads: as for `RecordExperience`.

    Args:
        envs: The vector environment.
        writer: A writer, or a value that `resolve_output` takes.
        mode: As for `RecordExperience`.
        infos: Whether to record the info of each step.
        seeds: As for `RecordExperience`; episodes that begin by autoreset have none.
        seed: Seed of the episode ids; None draws one from the OS.
        close_writer: Whether `close` closes the writer.
        storage_options: For the fsspec filesystem of a path or URL.

    Raises:
        OptionError: ``envs`` is not a vector environment or does not tell its autoreset mode; ``writer``
            describes no writer; ``mode`` or ``storage_options`` do not fit ``writer``; or the data set is not
            new.
    """

    def __init__(
        self,
        envs: VectorEnv[Any, Any, Any],
        writer: WriterLike,
        *,
        mode: Mode = "append",
        infos: bool = False,
        seeds: bool = False,
        seed: int | None = None,
        close_writer: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(envs, VectorEnv):
            raise OptionError(
                f"RecordVectorExperience was given {excerpt(envs)}: expected a gymnasium vector environment. "
                "One environment is recorded by rlio.RecordExperience"
            )
        super().__init__(envs)
        self._stepper = _Stepper(envs)
        self._infos = infos
        self._rows: VectorRows = VectorRows(envs, infos=infos, seeds=seeds, seed=seed)
        spaces = (envs.single_observation_space, envs.single_action_space)
        self._start_recording(
            self._rows,
            writer,
            context=IOContext(
                spaces={DEFAULT_POLICY_ID: spaces},
                made_by={} if envs.spec is None else {"env": envs.spec.id},
                options={} if storage_options is None else {"storage_options": storage_options},
            ),
            storage_options=storage_options,
            mode=mode,
            seeds=seeds,
            close_writer=close_writer,
        )
        self._extras: dict[str, NDArray[Any]] = {}
        #: Which environments have an observation to act on.
        self._running = np.zeros(envs.num_envs, bool)

    @alone
    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin episodes everywhere, or where ``options["reset_mask"]`` is True; see `VectorEnv.reset`."""
        mask = (options or {}).get("reset_mask")  # Read first: some environments remove it from the options.
        which = np.ones(self.num_envs, bool) if mask is None else np.array(mask, bool)
        self._running[which] = False
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

    @alone
    def record(self, **columns: Any) -> None:
        """Add columns to the next step, such as ``action_logp``: arrays of shape (num_envs, ...).

        Args:
            columns: Arrays or tensors; the same names, dtypes and shapes at every step.

        Raises:
            OptionError: The wrapper records a column of that name itself.
            SchemaError: A value cannot become an array.
        """
        check_names(columns, seeds=self._seeds)
        self._extras.update({name: extra_rows(name, value) for name, value in columns.items()})

    @alone
    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take a step in every environment; see `VectorEnv.step`.

        Raises:
            OptionError: No episode is running in an environment, or a step has failed; see
                `RecordExperience.step`.
            SchemaError: The actions do not fit the environment's space, or the columns given to `record`
                differ from those of earlier steps: no step was taken. Or results of the step cannot be
                stored: the step was taken, and the rows of the other environments are recorded.
            PublishError: Rows could not be written; they are kept.
        """
        self._check_state()
        if 0 in self._running.tobytes():
            raise OptionError(
                f"step() was called, but environments {excerpt(np.flatnonzero(~self._running).tolist())} "
                "have no "
                "running episode: call reset() first, with options={'reset_mask': ...} for those that ended"
            )
        if self._rows.full:  # The previous write failed.
            self._recorder.write()
        extras, self._extras = self._extras, {}
        chosen = self._rows.checked(actions, extras)
        self._failed = True
        result = self.env.step(actions)
        step = self._stepper.read(result)
        self._failed = False
        if self._stepper.is_reset_by_caller:
            self._running[step.starts] = False
        misfits = step.misfits
        infos: list[dict[str, Any]] | None = None
        if self._infos:
            misfits = dict(misfits)
            try:
                infos = self._stepper.env_infos(step)
            except SchemaError as error:
                infos = [{}] * self.num_envs
                misfits = dict.fromkeys(range(self.num_envs), error)
            for env, info in enumerate(infos):
                try:
                    check_value(info, Columns.INFOS)
                except SchemaError as error:
                    misfits.setdefault(env, error)
                    infos[env] = {}
        self._rows.add(step, chosen, extras, infos, misfits)
        self._recorder.write_if_due(ended=has_true(step.starts))
        return result

    def close(self, **kwargs: Any) -> None:
        """Write the waiting rows, and close the environments and the writer. May be called again.

        All of it is done, also if some of it fails; the first error is raised.
        """
        if hasattr(self, "_recorder"):  # gymnasium also closes a wrapper whose __init__ failed.
            self._finish(partial(VectorWrapper.close, self, **kwargs))
