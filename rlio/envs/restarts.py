"""`Restarts`: when to recreate failed environments, and when to give up.

Example:
    >>> restarts = Restarts(3, num_envs=2)
    >>> restarts.failed(1, ValueError("no connection"))
    >>> restarts.is_due(1)
    True
    >>> restarts.failed(1, ValueError("still none"))
    >>> 0.0 < restarts.seconds_until_due() <= 0.1
    True
    >>> restarts.recreated(1)
    >>> restarts.down
    set()
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from rlio.envs.served_envs import ProcessDied
from rlio.errors import EnvError, excerpt

__all__ = ["Restarts"]

logger: logging.Logger = logging.getLogger("rlio")

# An environment that ended none of this many episodes never will; without a bound, sampling would not end.
_EPISODES_LOST = 1000
# Seconds before the second restart in a row, and the maximum. Longer pauses would save nothing, because a try
# costs milliseconds.
_PAUSE_S, _MAX_PAUSE_S = 0.1, 10.0


def _pause(failures: int) -> float:
    """Seconds between failure number ``failures`` in a row, counted from 1, and the restart."""
    return 0.0 if failures <= 1 else min(_PAUSE_S * 2.0 ** min(failures - 2, 60), _MAX_PAUSE_S)


class Restarts:
    """The failures of ``num_envs`` environments.

    The first restart comes at once and the second after 0.1 seconds. Each further pause doubles, up to 10
    seconds.

    Args:
        max_restarts: Restarts of one environment in a row, without a successful step in between. One more
            failure raises an `EnvError`, and so does the thousandth failed episode in a row. None raises each
            failure.
        num_envs: Number of environments.

    Attributes:
        down: Environments that failed and were not recreated yet.
        count: Failures of all environments so far.
    """

    def __init__(self, max_restarts: int | None, *, num_envs: int) -> None:
        self.max_restarts = max_restarts
        self.down: set[int] = set()
        self.count: int = 0
        self._due = [0.0] * num_envs
        self._in_a_row = [0] * num_envs
        self._lost = [0] * num_envs
        #: Environments whose `_in_a_row` is not 0; without failures, `stepped` need not be called.
        self.failing: set[int] = set()

    def failed(
        self, env: int, error: BaseException, *, where: str = "", episode: int | None = None,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        """Record that environment ``env`` failed.

        Args:
            env: Its index.
            error: The environment's error.
            where: What it was doing, for the message.
            episode: As in `EnvError`.
            seed: As in `EnvError`.

        Raises:
            EnvError: It must not be recreated: restarts are off, it failed too often, or it breaks the
                interface.
        """
        if isinstance(error, EnvError) and not isinstance(error, ProcessDied):
            # The environment works, but breaks the interface, as its check reports. A restart would not help.
            raise EnvError(str(error), env_index=env, episode=episode, seed=seed) from error
        self.count += 1
        self._in_a_row[env] += 1
        self._lost[env] += 1
        failures, most = self._in_a_row[env], self.max_restarts
        what = f"environment {env} failed{where}"
        if episode is not None:
            what += f", episode {episode}"
        if seed is not None:
            what += f" (seed {seed})"
        what += f": {type(error).__name__}: {excerpt(str(error), 500)}"
        if most is None:
            hint = "set restart_failed_sub_environments=True to recreate such environments"
        elif failures > most:
            hint = f"it was recreated {most} times in a row, see max_env_restarts"
        elif self._lost[env] >= _EPISODES_LOST:
            hint = f"none of its last {_EPISODES_LOST} episodes ended"
        else:
            pause = _pause(failures)
            logger.warning("%s; recreating it in %.1f s (failure %s in a row)", what, pause, failures)
            self._due[env] = time.monotonic() + pause
            self.down.add(env)
            self.failing.add(env)
            return
        raise EnvError(f"{what}; {hint}", env_index=env, episode=episode, seed=seed) from error

    def is_due(self, env: int) -> bool:
        """Whether the failed environment ``env`` must be recreated now."""
        return time.monotonic() >= self._due[env]

    def seconds_until_due(self, envs: Iterable[int] | None = None) -> float:
        """Seconds until the first of ``envs``, or of all that are down, must be recreated; at least 0."""
        due = [self._due[env] for env in (self.down if envs is None else envs)]
        return max(0.0, min(due, default=0.0) - time.monotonic())

    def recreated(self, env: int) -> None:
        """Record that ``env`` was recreated and has its first observation."""
        self.down.discard(env)

    def stepped(self, env: int, *, ended: bool = False) -> None:
        """Record a successful step of ``env``; call it for environments in `failing`."""
        self._in_a_row[env] = 0
        if ended:
            self._lost[env] = 0
            self.failing.discard(env)
