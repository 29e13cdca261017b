"""`RestartPolicy` and `Restarts`: which failed environments are made anew, when, and when it is enough.

Example:
    >>> restarts = Restarts(RestartPolicy(max_restarts=3), num_envs=2)
    >>> restarts.failed(1, ValueError("no connection"))
    >>> restarts.is_due(1)
    True
    >>> restarts.failed(1, ValueError("still none"))
    >>> 0.0 < restarts.seconds_until_due() <= 0.1
    True
    >>> restarts.made_anew(1)
    >>> restarts.down
    set()
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from rlio.envs.served_envs import ProcessDied
from rlio.errors import EnvError, OptionError, excerpt

__all__ = ["RestartPolicy", "Restarts"]

logger = logging.getLogger("rlio")

# An environment that ended none of so many episodes never will; without a bound, sampling would never end.
_EPISODES_LOST = 1000
# Seconds before the second restart in a row, and before any. Longer ones would save nothing: a try costs
# milliseconds.
_PAUSE_S, _MAX_PAUSE_S = 0.1, 10.0


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """How environments that failed are made anew.

    The first restart comes at once, the next after 0.1 seconds, then each after twice the time of the one
    before, up to 10 seconds.

    Attributes:
        max_restarts: Restarts of one environment in a row, that is, without a step that worked in between.
            One more failure raises an `EnvError`, and so does the thousandth episode in a row that fails.

    Raises:
        OptionError: The number is out of range.
    """

    max_restarts: int = 100

    def __post_init__(self) -> None:
        given = self.max_restarts
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise OptionError(f"max_restarts={excerpt(given)}: a whole number, at least 1")


def _pause(failures: int) -> float:
    """Seconds from failure number ``failures`` in a row, from 1, to the restart."""
    return 0.0 if failures <= 1 else min(_PAUSE_S * 2.0 ** min(failures - 2, 60), _MAX_PAUSE_S)


class Restarts:
    """The failures of ``num_envs`` environments.

    Args:
        policy: When to restart; None: never, each failure is raised.
        num_envs: Environments.

    Attributes:
        down: Environments that failed and were not made anew yet.
        count: Failures so far, of all environments.
    """

    def __init__(self, policy: RestartPolicy | None, *, num_envs: int) -> None:
        self.policy = policy
        self.down: set[int] = set()
        self.count = 0
        self._due = [0.0] * num_envs
        self._in_a_row = [0] * num_envs
        self._lost = [0] * num_envs
        #: Environments of which `_in_a_row` is not 0: `stepped` costs nothing where nobody failed.
        self.failing: set[int] = set()

    def failed(
        self, env: int, error: BaseException, *, where: str = "", episode: int | None = None,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        """Take note that environment ``env`` failed.

        Args:
            env: Its index.
            error: Its own error.
            where: What it was doing, for the message.
            episode: As in `EnvError`.
            seed: As in `EnvError`.

        Raises:
            EnvError: It is not to be made anew: nobody said so, it failed too often, or it is no legal
            environment.
        """
        if isinstance(error, EnvError) and not isinstance(error, ProcessDied):
            # It works, and does what it should not, as its check says: no restart changes that.
            raise EnvError(str(error), env_index=env, episode=episode, seed=seed) from error
        self.count += 1
        self._in_a_row[env] += 1
        self._lost[env] += 1
        failures, policy = self._in_a_row[env], self.policy
        what = f"environment {env} failed{where}"
        if episode is not None:
            what += f", episode {episode}"
        if seed is not None:
            what += f" (seed {seed})"
        what += f": {type(error).__name__}: {excerpt(str(error), 500)}"
        if policy is None:
            hint = "restart_failed_sub_environments=True makes such environments anew"
        elif failures > policy.max_restarts:
            hint = f"it was made anew {policy.max_restarts} times in a row, see max_env_restarts"
        elif self._lost[env] >= _EPISODES_LOST:
            hint = f"none of its last {_EPISODES_LOST} episodes came to an end"
        else:
            pause = _pause(failures)
            logger.warning("%s; made anew in %.1f s (failure %s in a row)", what, pause, failures)
            self._due[env] = time.monotonic() + pause
            self.down.add(env)
            self.failing.add(env)
            return
        raise EnvError(f"{what}; {hint}", env_index=env, episode=episode, seed=seed) from error

    def is_due(self, env: int) -> bool:
        """Whether ``env``, which is down, is to be made anew now."""
        return time.monotonic() >= self._due[env]

    def seconds_until_due(self, envs: Iterable[int] | None = None) -> float:
        """Until the first of ``envs``, or of all that are down, is to be made anew; at least 0."""
        due = [self._due[env] for env in (self.down if envs is None else envs)]
        return max(0.0, min(due, default=0.0) - time.monotonic())

    def made_anew(self, env: int) -> None:
        """``env`` was made anew and has its first observation."""
        self.down.discard(env)

    def stepped(self, env: int, *, ended: bool = False) -> None:
        """``env`` made a step that worked; call it for those in `failing`."""
        self._in_a_row[env] = 0
        if ended:
            self._lost[env] = 0
            self.failing.discard(env)
