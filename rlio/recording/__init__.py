"""Recorders: they step your environment unchanged, and write every transition.

`RecordExperience` wraps one environment, `RecordVectorExperience` a vector environment. `RecordParallelEnv`
and `RecordAECEnv` wrap PettingZoo's environments.

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

from rlio.recording.env import RecordExperience
from rlio.recording.pettingzoo import RecordAECEnv, RecordParallelEnv
from rlio.recording.vector_env import RecordVectorExperience

__all__ = ["RecordAECEnv", "RecordExperience", "RecordParallelEnv", "RecordVectorExperience"]
