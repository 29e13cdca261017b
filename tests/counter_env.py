"""Steps of an environment whose observation encodes (env, episode, t), so that any batch can be judged alone.

``obs`` is [env, episode, t], or a stack of the last frames of such numbers; the reward of a step is t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio import SampleBatch, concat_samples

__all__ = ["check_transitions", "episode", "interleaved"]


def observations(env: int, number: int, times: NDArray[np.int64], *, kind: str = "vector") -> NDArray[Any]:
    """What the environment shows at ``times``."""
    if kind == "vector":
        return np.stack([np.full(len(times), env), np.full(len(times), number), times], 1).astype(np.float32)
    depth = {"image": 1, "stack": 4}[kind]
    # The oldest frame first; before the first step, the first frame is repeated.
    shown = np.maximum(times[:, None] - np.arange(depth - 1, -1, -1), 0)
    frames = np.zeros((len(times), depth, 20, 24), np.uint8)
    frames[:, :, 0, :3] = np.stack(np.broadcast_arrays(env, number, shown), -1)
    frames[:, :, 1, :] = (shown[:, :, None] * 7 + np.arange(24)) % 251
    return frames[:, 0] if kind == "image" else frames


def episode(
    env: int,
    number: int,
    length: int,
    *,
    start: int = 0,
    stop: int | None = None,
    truncated: bool = False,
    kind: str = "vector",
) -> SampleBatch:
    """Steps ``start`` to ``stop - 1`` of an episode of ``length`` steps."""
    t = np.arange(start, length if stop is None else stop)
    last = t == length - 1
    return SampleBatch(
        obs=observations(env, number, t, kind=kind),
        new_obs=observations(env, number, t + 1, kind=kind),
        actions=(t % 3).astype(np.int64),
        rewards=(t + 1).astype(np.float32),
        terminateds=last & (not truncated),
        truncateds=last & truncated,
        eps_id=np.full(len(t), env * 1000 + number),
        env_id=np.full(len(t), env),
        t=t,
    )


def interleaved(parts: Sequence[SampleBatch]) -> SampleBatch:
    """The rows of several environments as a vector environment records them: step by step."""
    joined = concat_samples(parts)
    step = np.concatenate([np.arange(len(part)) for part in parts])
    return joined[np.argsort(step, kind="stable")]


def decode(obs: NDArray[Any]) -> NDArray[np.int64]:
    """(env, episode, t) of each observation, shape (n, 3); of a stack, of its newest frame."""
    if obs.ndim == 2:
        return obs.astype(np.int64)
    newest = obs if obs.ndim == 3 else obs[:, -1]
    return newest[:, 0, :3].astype(np.int64)


def check_transitions(batch: SampleBatch, *, lengths: dict[tuple[int, int], int], n_step: int = 1,
                      gamma: float = 1.0) -> None:  # fmt: skip
    """Every row is a transition, of up to ``n_step`` steps, within one episode, with what belongs to it."""
    here, there = decode(batch["obs"]), decode(batch["new_obs"])
    ends = np.array([lengths[env, number] for env, number in here[:, :2].tolist()])
    steps = np.minimum(n_step, ends - here[:, 2])
    np.testing.assert_array_equal(there[:, :2], here[:, :2])
    np.testing.assert_array_equal(there[:, 2], here[:, 2] + steps)
    np.testing.assert_array_equal(batch["t"], here[:, 2])
    np.testing.assert_array_equal(batch["eps_id"], here[:, 0] * 1000 + here[:, 1])
    ended = np.asarray(batch["terminateds"]) | np.asarray(batch["truncateds"])
    np.testing.assert_array_equal(ended, there[:, 2] == ends)
    rewards = sum(gamma**k * (here[:, 2] + k + 1) * (k < steps) for k in range(n_step))
    np.testing.assert_allclose(batch["rewards"], rewards, rtol=1e-5)
    if batch["obs"].ndim == 4:
        for name in ("obs", "new_obs"):
            newest = decode(batch[name])[:, 2]
            shown = np.maximum(newest[:, None] - np.arange(3, -1, -1), 0)
            np.testing.assert_array_equal(batch[name][:, :, 0, 2], shown)
