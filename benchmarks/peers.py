"""The others, each set up as its own documentation says, behind two calls: `sample` and `update`.

A peer that is not installed, or that cannot do what is asked, is an `Absent` with the reason, which a run
reports.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.data import Columns, episode_slices
from benchmarks.timing import Case

__all__ = [
    "Absent",
    "Prioritised",
    "Sampler",
    "cpprb_prioritised",
    "cpprb_uniform",
    "d3rlpy_uniform",
    "gathered",
    "import_all",
    "minari_buffers",
    "minari_dataset",
    "not_installed",
    "threadings",
    "torchrl_cases",
    "torchrl_prioritised",
    "torchrl_uniform",
]

T = TypeVar("T")


class Absent(Exception):
    """A contender cannot run; the message says why, and what would help."""


class Sampler(Protocol):
    """Gives random batches."""

    def sample(self, batch_size: int) -> object: ...


class Prioritised(Protocol):
    """Gives batches by priority; ``sample`` is followed by ``update`` with an error a row."""

    def sample(self, batch_size: int) -> object: ...

    def update(self, errors: NDArray[np.float32]) -> None: ...


def gathered(makers: Mapping[str, Callable[[], T]], absent: dict[str, str]) -> dict[str, T]:
    """What the makers make, by name; those that are absent are noted with the reason."""
    made = {}
    for name, make in makers.items():
        try:
            made[name] = make()
        except Absent as reason:
            absent[name] = str(reason)
    return made


def import_all() -> None:
    """Import the peers that are installed, so that doing so is no part of what follows."""
    for name in ("cpprb", "torchrl.data", "d3rlpy.dataset", "minari"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def not_installed(error: ImportError) -> Absent:
    """Why a peer that could not be imported is absent."""
    return Absent(f"not installed ({error}); docs/performance.md says how to")


# ---- cpprb ----


def _cpprb() -> Any:
    try:
        import cpprb
    except ImportError as error:
        raise not_installed(error) from error
    return cpprb


class _Cpprb:
    def __init__(self, buffer: Any, options: dict[str, Any]) -> None:
        self.buffer = buffer
        self._options = options
        self._drawn: Any = None

    def sample(self, batch_size: int) -> object:
        batch = self.buffer.sample(batch_size, **self._options)
        self._drawn = batch.get("indexes")
        return batch

    def update(self, errors: NDArray[np.float32]) -> None:
        self.buffer.update_priorities(self._drawn, errors)


def _env_dict(columns: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    return {name: {"shape": values.shape[1:] or 1, "dtype": values.dtype} for name, values in columns.items()}


def cpprb_uniform(batches: Iterable[Columns], *, rows: int, share_frames: bool = False) -> _Cpprb:
    """The ReplayBuffer of cpprb.

    Args:
        batches: The rows, in recorded order.
        rows: How many.
        share_frames: Whether ``next_obs`` and the frames of stacks, along the last axis, are kept once.
    """
    cpprb = _cpprb()
    buffer = None
    for batch in batches:
        if buffer is None:
            if share_frames:
                kept = {name: values for name, values in batch.items() if name != "new_obs"}
                buffer = cpprb.ReplayBuffer(rows, _env_dict(kept), next_of="obs", stack_compress="obs")
            else:
                buffer = cpprb.ReplayBuffer(rows, _env_dict(batch))
        if not share_frames:
            buffer.add(**batch)
            continue
        for part in episode_slices(batch["eps_id"]):
            cut = {name: values[part] for name, values in batch.items()}
            cut["next_obs"] = cut.pop("new_obs")
            buffer.add(**cut)
            if (cut["terminateds"] | cut["truncateds"])[-1]:
                buffer.on_episode_end()
    return _Cpprb(buffer, {})


def cpprb_prioritised(columns: Columns) -> _Cpprb:
    """The PrioritizedReplayBuffer of cpprb; an alpha of 0.6 and a beta of 0.4."""
    buffer = _cpprb().PrioritizedReplayBuffer(len(columns["rewards"]), _env_dict(columns), alpha=0.6)
    buffer.add(**columns)
    return _Cpprb(buffer, {"beta": 0.4})


# ---- TorchRL ----


def _torchrl() -> Any:
    try:
        import tensordict
        import torchrl.data
    except ImportError as error:
        raise not_installed(error) from error
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    return torchrl.data, tensordict.TensorDict


class _TorchRL:
    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self._drawn: Any = None

    def sample(self, batch_size: int) -> object:
        self._drawn = self.buffer.sample(batch_size)
        return self._drawn

    def update(self, errors: NDArray[np.float32]) -> None:
        self.buffer.update_priority(self._drawn["index"], errors)


def _torchrl_storage(rows: int, folder: Path | None) -> Any:
    data, _ = _torchrl()
    # Without a device, values stay where they were made: on the CPU here.
    return (
        data.LazyTensorStorage(rows) if folder is None else data.LazyMemmapStorage(rows, scratch_dir=folder)
    )


def _torchrl_fill(buffer: Any, batches: Iterable[Columns]) -> _TorchRL:
    import torch

    _, tensor_dict = _torchrl()
    for batch in batches:
        size = len(next(iter(batch.values())))
        with warnings.catch_warnings():
            # Mapped recordings are read-only arrays, and TorchRL only copies them.
            warnings.simplefilter("ignore", UserWarning)
            tensors = {name: torch.from_numpy(values) for name, values in batch.items()}
        buffer.extend(tensor_dict(tensors, batch_size=[size]))
    return _TorchRL(buffer)


def torchrl_uniform(
    batches: Iterable[Columns], *, rows: int, folder: Path | None = None, replacement: bool = True
) -> _TorchRL:
    """TorchRL's TensorDictReplayBuffer: LazyTensorStorage, or LazyMemmapStorage in ``folder``."""
    data, _ = _torchrl()
    sampler = data.RandomSampler() if replacement else data.SamplerWithoutReplacement()
    buffer = data.TensorDictReplayBuffer(storage=_torchrl_storage(rows, folder), sampler=sampler)
    return _torchrl_fill(buffer, batches)


def torchrl_cases(case: Case) -> list[Case]:
    """A case of TorchRL, as it is and with one thread of torch.

    Threads that wait for each other are slow on a machine that does anything else, and by how much is chance.
    """
    import torch

    threads = torch.get_num_threads()
    return [
        replace(case, before=partial(torch.set_num_threads, threads)),
        replace(
            case,
            name=f"{case.name}, one thread",
            before=partial(torch.set_num_threads, 1),
            after=partial(torch.set_num_threads, threads),
        ),
    ]


def threadings(name: str) -> list[str]:
    """The contenders that a name stands for: the cases of `torchrl_cases`, or itself."""
    return [name, f"{name}, one thread"] if name.startswith("TorchRL") else [name]


def torchrl_prioritised(columns: Columns, *, folder: Path | None = None) -> _TorchRL:
    """TorchRL's TensorDictReplayBuffer with a PrioritizedSampler; an alpha of 0.6 and a beta of 0.4."""
    data, _ = _torchrl()
    rows = len(columns["rewards"])
    try:
        sampler = data.PrioritizedSampler(rows, alpha=0.6, beta=0.4)
    except RuntimeError as error:
        # Its wheel is compiled for one version of torch, and imports with every other.
        raise Absent(f"its C++ part does not load ({error}): python -m benchmarks.build_torchrl") from error
    buffer = data.TensorDictReplayBuffer(storage=_torchrl_storage(rows, folder), sampler=sampler)
    return _torchrl_fill(buffer, [columns])


# ---- d3rlpy ----


class _D3rlpy:
    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def sample(self, batch_size: int) -> object:
        return self.buffer.sample_transition_batch(batch_size)


def d3rlpy_uniform(columns: Columns) -> _D3rlpy:
    """d3rlpy's ReplayBuffer of whole episodes."""
    try:
        from d3rlpy.dataset import Episode, InfiniteBuffer, ReplayBuffer
    except ImportError as error:
        raise not_installed(error) from error
    episodes = [
        Episode(
            columns["obs"][part],
            columns["actions"][part],
            columns["rewards"][part, None],
            bool(columns["terminateds"][part][-1]),
        )
        for part in episode_slices(columns["eps_id"])
        # Its transitions need a next step.
        if part.stop - part.start > 1
    ]
    with contextlib.redirect_stdout(io.StringIO()):  # What it logs of each buffer.
        return _D3rlpy(ReplayBuffer(InfiniteBuffer(), episodes=episodes))


# ---- Minari ----


class _Minari:
    """Whole episodes: it draws nothing smaller."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.rows = int(dataset.total_steps)

    def sample(self, episodes: int) -> object:
        return self.dataset.sample_episodes(episodes)

    def read(self) -> int:
        """Read every episode once; gives the steps."""
        return sum(len(episode.rewards) for episode in self.dataset.iterate_episodes())


def minari_buffers(columns: Columns) -> list[Any]:
    """The episodes as Minari takes them: observations are one more than actions.

    Raises:
        Absent: It is not installed.
    """
    try:
        from minari.data_collector import EpisodeBuffer
    except ImportError as error:
        raise not_installed(error) from error
    return [
        EpisodeBuffer(
            id=number,
            observations=np.concatenate([columns["obs"][part], columns["new_obs"][part][-1:]]),
            actions=columns["actions"][part],
            rewards=columns["rewards"][part],
            terminations=columns["terminateds"][part],
            truncations=columns["truncateds"][part],
        )
        for number, part in enumerate(episode_slices(columns["eps_id"]))
    ]


def minari_dataset(name: str, buffers: list[Any], folder: Path) -> _Minari:
    """A Minari data set of the episodes in its default format, HDF5, below ``folder``."""
    import minari
    from gymnasium.spaces import Box

    os.environ["MINARI_DATASETS_PATH"] = str(folder)
    obs, actions = (np.asarray(getattr(buffers[0], key)) for key in ("observations", "actions"))
    with warnings.catch_warnings():
        # Names no author.
        warnings.simplefilter("ignore", UserWarning)
        try:
            dataset = minari.create_dataset_from_buffers(
                f"rlio-benchmarks/{name}-v0",
                buffers,
                observation_space=Box(-np.inf, np.inf, obs.shape[1:], obs.dtype),
                action_space=Box(-np.inf, np.inf, actions.shape[1:], actions.dtype),
            )
        except ImportError as error:
            raise not_installed(error) from error
    return _Minari(dataset)
