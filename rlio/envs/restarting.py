"""`RestartPolicy` and `Restarts`: which failed environments are made anew, when, and when it is enough.

Example:
    >>> now = 0.0
    >>> restarts = Restarts(RestartPolicy(max_restarts=3), num_envs=2, clock=lambda: now)
    >>> restarts.failed(1, ValueError("no connection"))
    >>> restarts.is_due(1)
    True
    >>> restarts.failed(1, ValueError("still none"))
    >>> restarts.is_due(1), restarts.seconds_until_due()
    (False, 0.1)
    >>> restarts.made_anew(1)
    >>> restarts.down
    set()
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rlio.envs.served_envs import ProcessDied
from rlio.errors import EnvError, OptionError, excerpt

__all__ = ["RestartPolicy", "Restarts"]

logger = logging.getLogger("rlio")

# An environment that ended none of so many episodes never will; without a bound, sampling would never end.
_EPISODES_LOST = 1000


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """How environments that failed are made anew.

    The first restart comes at once, the next after `pause_s` seconds, then each after twice the time of the
    one before, up to `max_pause_s`.

    Attributes:
        max_restarts: Restarts of one environment in a row, that is, without a step that worked in between.
            One more failure raises an `EnvError`, and so does the thousandth episode in a row that fails.
        pause_s: Seconds before the second restart in a row.
        max_pause_s: Seconds before any.

    Raises:
        OptionError: A number is out of range.
    """

    max_restarts: int = 100
    pause_s: float = 0.1
    # Longer ones would save nothing: a try costs milliseconds.
    max_pause_s: float = 10.0

    def __post_init__(self) -> None:
        if not isinstance(self.max_restarts, int) or isinstance(self.max_restarts, bool):
            raise OptionError(f"max_restarts={excerpt(self.max_restarts)}: a whole number, at least 1")
        if self.max_restarts < 1:
            raise OptionError(
                f"max_restarts={self.max_restarts}: at least 1; without restarts, leave out the policy"
            )
        for name in ("pause_s", "max_pause_s"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise OptionError(f"{name}={excerpt(value)}: seconds, at least 0")

    def pause(self, failures: int) -> float:
        """Seconds from failure number ``failures`` in a row, from 1, to the restart."""
        if failures <= 1:
            return 0.0
        return min(self.pause_s * 2.0 ** min(failures - 2, 60), self.max_pause_s)


class Restarts:
    """The failures of ``num_envs`` environments.

    Args:
        policy: When to restart; None: never, each failure is raised.
        num_envs: Environments.
        clock: Seconds; for tests.

    Attributes:
        down: Environments that failed and were not made anew yet.
        count: Failures so far, of all environments.
    """

    def __init__(
        self, policy: RestartPolicy | None, *, num_envs: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.policy = policy
        self.down: set[int] = set()
        self.count = 0
        self._clock = clock
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
            pause = policy.pause(failures)
            logger.warning("%s; made anew in %.1f s (failure %s in a row)", what, pause, failures)
            self._due[env] = self._clock() + pause
            self.down.add(env)
            self.failing.add(env)
            return
        raise EnvError(f"{what}; {hint}", env_index=env, episode=episode, seed=seed) from error

    def is_due(self, env: int) -> bool:
        """Whether ``env``, which is down, is to be made anew now."""
        return self._clock() >= self._due[env]

    def seconds_until_due(self, envs: Iterable[int] | None = None) -> float:
        """Until the first of ``envs``, or of all that are down, is to be made anew; at least 0."""
        due = [self._due[env] for env in (self.down if envs is None else envs)]
        return max(0.0, min(due, default=0.0) - self._clock())

    def made_anew(self, env: int) -> None:
        """``env`` was made anew and has its first observation."""
        self.down.discard(env)

    def stepped(self, env: int, *, ended: bool = False) -> None:
        """``env`` made a step that worked; call it for those in `failing`."""
        self._in_a_row[env] = 0
        if ended:
            self._lost[env] = 0
            self.failing.discard(env)
