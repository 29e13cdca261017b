"""`make_atari`: games of the Arcade Learning Environment, prepared as in DQN's paper.

Example:
    >>> from functools import partial
    >>> env = make_atari("ALE/Pong-v5", AtariOptions(noop_max=0))
    >>> env.observation_space.shape, env.observation_space.dtype
    ((4, 84, 84), dtype('uint8'))
    >>> env.close()

Pass runners a function that makes them: ``EnvRunner(partial(make_atari, "ALE/Pong-v5"), policy)``.

Source: Mnih et al. 2015, "Human-level control through deep reinforcement learning"; Machado et al. 2018,
"Revisiting the Arcade Learning Environment".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from rlio.envs.games import GAME, Game
from rlio.errors import MissingExtra
from rlio.support.extras import needs
from rlio.support.options import check_count, check_number, set_options

__all__ = ["AtariOptions", "make_atari", "wrap_atari"]

# Any: gymnasium's generic parameters carry no information here.
_Env = gym.Env[Any, Any]
_Wrapper = gym.Wrapper[Any, Any, Any, Any]


@dataclass(frozen=True, kw_only=True)
class AtariOptions:
    """How to prepare a game.

    Attributes:
        frame_stack: Frames in an observation, the newest last; 1 gives the frame without that axis.
        screen_size: Height and width in pixels.
        frame_skip: Frames for which an action is repeated; the last two are max-pooled.
        noop_max: Maximum number of steps without action at the beginning of a game.
        grayscale: Whether to drop colours; else frames have a last axis of 3.
        sticky: Probability that the game repeats the previous action, frame by frame.
        episodic_life: Whether losing a life ends the episode, but not the game.
        fire_reset: Begin with FIRE if the game waits for it.
        clip_rewards: Clip rewards to -1, 0 or 1. Metrics still report the points.

    Raises:
        OptionError: A number is out of range.
    """

    frame_stack: int = 4
    screen_size: int = 84
    frame_skip: int = 4
    noop_max: int = 30
    grayscale: bool = True
    # Machado et al. 2018, the value of ALE/*-v5. DQN's paper has 0.
    sticky: float = 0.25
    episodic_life: bool = True
    fire_reset: bool = True
    clip_rewards: bool = True

    def __post_init__(self) -> None:
        for name, least in (("frame_stack", 1), ("screen_size", 1), ("frame_skip", 1), ("noop_max", 0)):
            set_options(self, **{name: check_count(name, getattr(self, name), least=least)})
        set_options(self, sticky=check_number("sticky", self.sticky, least=0, below=1))


def make_atari(env_id: str, options: AtariOptions | None = None, **keywords: Any) -> _Env:
    """Make a game and prepare it.

    Args:
        env_id: Id of the game, such as ``"ALE/Pong-v5"``.
        options: How to prepare it; None uses the defaults.
        keywords: Further keyword arguments of the game, such as ``full_action_space`` and ``render_mode``.

    Raises:
        MissingExtra: ale-py or OpenCV is not installed.
        gymnasium.error.Error: The game is unknown.
    """
    with needs("ale-py", "atari"):
        import ale_py
    options = options if options is not None else AtariOptions()
    gym.register_envs(ale_py)
    env = gym.make(
        env_id,
        frameskip=1,  # The wrapper below skips and pools frames.
        repeat_action_probability=options.sticky,
        disable_env_checker=True,
        **keywords,
    )
    return wrap_atari(env, options)


def wrap_atari(env: _Env, options: AtariOptions | None = None) -> _Env:
    """Prepare a game that was made with ``frameskip=1``.

    Args:
        env: The game.
        options: How to prepare it; None uses the defaults. ``sticky`` has no effect here, because the game
            was made already.

    Raises:
        MissingExtra: OpenCV is not installed.
    """
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TransformReward

    options = options if options is not None else AtariOptions()
    try:
        made: _Env = AtariPreprocessing(
            env,
            noop_max=options.noop_max,
            frame_skip=options.frame_skip,
            screen_size=options.screen_size,
            grayscale_obs=options.grayscale,
        )
    except gym.error.DependencyNotInstalled as error:
        raise MissingExtra("opencv-python-headless", "atari") from error
    made = _CountGames(made)
    if options.episodic_life:
        made = _EpisodicLife(made)
    if options.fire_reset and "FIRE" in _actions(made):
        made = _FireReset(made)
    if options.clip_rewards:
        made = TransformReward(made, lambda reward: float(np.sign(float(reward))))
    return made if options.frame_stack == 1 else FrameStackObservation(made, options.frame_stack)


def _actions(env: _Env) -> list[str]:
    # Any: ale-py has no type information.
    game: Any = env.unwrapped
    return list(game.get_action_meanings())


class _CountGames(_Wrapper):
    """Puts a `Game` into the info of its last step."""

    def __init__(self, env: _Env) -> None:
        super().__init__(env)
        self._points, self._steps = 0.0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._points, self._steps = 0.0, 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._points += float(reward)
        self._steps += 1
        if terminated or truncated:
            info = {**info, GAME: Game(self._points, self._steps)}
        return obs, reward, terminated, truncated, info


class _EpisodicLife(_Wrapper):
    """Ends an episode with each life; the game continues at the next reset, which then ignores its seed."""

    def __init__(self, env: _Env) -> None:
        super().__init__(env)
        self._lives, self._is_over = 0, True
        #: A game that ended in a reset, whose info is not visible; reported with the next life that ends.
        self._untold: Game | None = None

    @property
    def _left(self) -> int:
        # Any: ale-py has no type information.
        game: Any = self.unwrapped
        return int(game.ale.lives())

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        begun = None
        if not self._is_over:
            # One step without action continues after the lost life. It may end the game by the time limit.
            obs, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                self._untold = info[GAME]
            else:
                begun = obs, info
        if begun is None:
            begun = self.env.reset(seed=seed, options=options)
        self._lives, self._is_over = self._left, False
        return begun

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._is_over = bool(terminated or truncated)
        left = self._left
        if not self._is_over and 0 < left < self._lives:
            terminated, info = True, {**info, GAME: self._untold}
            self._untold = None
        self._lives = left
        return obs, reward, terminated, truncated, info


class _FireReset(_Wrapper):
    """Presses FIRE at the start, because some games show nothing before."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.env.reset(seed=seed, options=options)
        obs, _, terminated, truncated, info = self.env.step(_actions(self).index("FIRE"))
        return self.env.reset(options=options) if terminated or truncated else (obs, info)
