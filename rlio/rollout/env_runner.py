"""`EnvRunner`: a policy acts in environments, and every step is recorded.

Example:
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> from rlio.rollout.config import RolloutConfig
    >>> config = RolloutConfig(num_envs=2, rollout_fragment_length=5)
    >>> runner = EnvRunner("CartPole-v1", RandomPolicy(), config=config, seed=0)
    >>> batch = runner.run()
    >>> len(batch), batch["obs"].shape, batch["t"].tolist()
    (10, (10, 4), [0, 1, 2, 3, 4, 0, 1, 2, 3, 4])
    >>> runner.stop()
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.actions import clip_actions, has_boxes, unsquash_actions
from rlio.batch import SampleBatch, concat_samples
from rlio.columns import Columns
from rlio.envs.leaves import leaves_of
from rlio.envs.making import EnvLike, make_vector_env
from rlio.envs.stepping import VectorStep, VectorStepper
from rlio.episode import Episode
from rlio.errors import ClosedError, OptionError, StateError, excerpt
from rlio.interfaces import JsonState
from rlio.nested import map_structure, unflatten
from rlio.policies.policy import Policy
from rlio.rollout.config import RolloutConfig
from rlio.rollout.recorder import StepRecorder

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["EnvRunner"]

logger = logging.getLogger("rlio")

# Unroll ids of different workers never meet: 2^40 fragments each.
_UNROLLS_A_WORKER = 1 << 40
_INPUTS = (Columns.PREV_ACTIONS, Columns.PREV_REWARDS, Columns.T, Columns.EPS_ID, Columns.ENV_ID)


class EnvRunner:
    """Steps a vector environment with a policy and gives what happened, as batches or as episodes.

    A row is one transition: ``obs, actions, rewards, new_obs, terminateds, truncateds`` and, int64,
    ``eps_id`` (63 random bits), ``t``, ``env_id``, ``agent_index`` (0), ``unroll_id`` (the same for rows of
    one episode in one batch, never used again) and ``weights_seq_no``; the policy's extra columns; and
    ``infos``, if the config says so. ``new_obs`` is the true next observation, at the end of an episode the
    final one, in all three of gymnasium's autoreset modes; resets are never recorded as steps. Dtypes are
    the spaces'; rewards are float32. ``actions`` are the policy's own, not the clipped or scaled ones that
    the environment gets.

    Rows are ordered by environment, and within one by time. Rewards, actions and ids are in memory of their
    own: a batch belongs to the caller.

    Args:
        env: What `make_vector_env` takes. The runner closes it, also if it was given as an object.
        policy: Acts; bound to the environment's spaces here, if it was not before.
        config: How to step and record; None: the defaults.
        seed: Of the environments, the episode ids and, if it is not yet bound, the policy. None draws one
            from the OS, logs it and keeps it in `seeds`.
        worker_index: Makes the seeds and ids of workers with the same ``seed`` different.

    Attributes:
        seeds: What everything random was seeded with: ``seed, worker_index, policy, env``.
        timesteps: Rows recorded so far.
        steps_dropped: Rows that were recorded but are in no batch, because of a restart.

    Raises:
        OptionError: The environment cannot be made, or the policy cannot act in it.
    """

    def __init__(
        self,
        env: EnvLike,
        policy: Policy,
        *,
        config: RolloutConfig | None = None,
        seed: int | None = None,
        worker_index: int = 0,
    ) -> None:
        if not isinstance(policy, Policy):
            raise OptionError(f"policy={excerpt(policy)}: expected a Policy, such as RandomPolicy()")
        self.config = config if config is not None else RolloutConfig()
        self.policy = policy
        self._given_env = env
        self.worker_index = worker_index
        self.timesteps = 0
        self.steps_dropped = 0
        self.seeds = _seeds(seed, worker_index)
        self._unrolls = worker_index * _UNROLLS_A_WORKER
        self._restarts = 0
        self._closed = False
        self._stepper = VectorStepper(
            make_vector_env(env, num_envs=self.config.num_envs, vectorize_mode=self.config.vectorize_mode)
        )
        try:
            policy.bind(self.observation_space, self.action_space, self.seeds["policy"])
            _check_inputs(policy)
            self._recorder = self._new_recorder()
        except BaseException:
            self._stepper.close()
            raise
        has_bounds = has_boxes(self.action_space)
        self._clips = self.config.clip_actions and has_bounds
        self._scales = self.config.normalize_actions and has_bounds
        self._begun = False
        #: Whether the next step can be taken: not at first, and not after one that failed half-way.
        self._ready = False
        #: Whether rows of running episodes were handed out.
        self._is_cut = False

    # ---- what it steps ----

    @property
    def num_envs(self) -> int:
        """Environments that are stepped together."""
        return self._stepper.num_envs

    @property
    def env_id(self) -> str | None:
        """The registered id of the environments; None if they have none that can be seen from here."""
        if isinstance(self._given_env, str):
            return self._given_env
        envs = self._stepper.envs
        first = next(iter(getattr(envs, "envs", ())), None)
        spec = envs.spec or getattr(first, "spec", None)
        return None if spec is None else str(spec.id)

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Of one environment."""
        return self._stepper.observation_space

    @property
    def action_space(self) -> gym.Space[Any]:
        """Of one environment."""
        return self._stepper.action_space

    def _new_recorder(self) -> StepRecorder:
        steps = self.config.fragment_steps
        # A reset is followed by a transition: at most every other step of an environment is none.
        capacity = 2 * steps + 2 if self._stepper.has_reset_steps else steps
        return StepRecorder(
            self.observation_space,
            self.action_space,
            num_envs=self.num_envs,
            capacity=capacity,
            infos=self.config.record_infos,
        )

    # ---- sampling ----

    def run(self, steps: int | None = None) -> SampleBatch:
        """Sample a batch.

        Args:
            steps: In place of the config's ``rollout_fragment_length``.

        Returns:
            In truncate mode num_envs x steps rows: exactly ``steps`` of each environment, or, where the
            vector environment spends steps on resets (NEXT_STEP), as many of each as it got to. In complete
            mode whole episodes with at least ``steps`` rows in all.

        Raises:
            OptionError: ``steps`` is below 1.
            ClosedError: After `stop`.
        """
        steps = self.config.fragment_steps if steps is None else steps
        if steps < 1:
            raise OptionError(f"steps={steps}: a number of steps, at least 1")
        if self.config.batch_mode == "complete_episodes":
            return self._complete(rows=steps)
        return self._fragment(steps)

    def sample(self, *, num_timesteps: int | None = None, num_episodes: int | None = None) -> list[Episode]:
        """Sample episodes, or chunks of episodes.

        Args:
            num_timesteps: At least so many steps in all; chunks in truncate mode, else whole episodes. With
                neither argument, a fragment of the config's size.
            num_episodes: Exactly so many whole episodes; begun ones of which rows were handed out are
                abandoned.

        Raises:
            OptionError: Both are given, or one is below 1.
            ClosedError: After `stop`.
        """
        if num_timesteps is not None and num_episodes is not None:
            raise OptionError(
                f"num_timesteps={num_timesteps} and num_episodes={num_episodes}: give one of them"
            )
        if num_episodes is not None:
            if num_episodes < 1:
                raise OptionError(f"num_episodes={num_episodes}: at least 1")
            batch = self._complete(episodes=num_episodes)
        elif num_timesteps is None or self.config.batch_mode == "complete_episodes":
            batch = self.run(num_timesteps)
        else:
            batch = self.run(-(-num_timesteps // self.num_envs))
        return [Episode.from_batch(rows) for rows in batch.split_by_episode()]

    def stop(self) -> None:
        """Close the environments; may be called again."""
        if not self._closed:
            self._closed = True
            self._stepper.close()

    # ---- the loop ----

    def _begin(self) -> None:
        """Start new episodes everywhere, the first time from the seed."""
        self.steps_dropped += self._recorder.rows
        obs = self._stepper.reset(seed=None if self._begun else self._env_seed())
        if not self._begun:
            self._episode_ids = np.random.default_rng(self._sequence(1))
            self._begun = True
        self._recorder.start(obs)
        self._state = self.policy.initial_state(self.num_envs)
        self._eps_id = self._new_episode_ids(self.num_envs)
        self._t = np.zeros(self.num_envs, np.int64)
        self._before: dict[str, Any] = {}
        self._is_cut = False
        self._ready = True

    def _step(self) -> NDArray[np.bool_]:
        """Step every environment once, record it, and return which episodes ended."""
        self._ready = False
        obs = self._recorder.obs
        actions, self._state, extras = self.policy.compute_actions(
            obs,
            self._state,
            explore=self.config.explore,
            inputs=self._inputs() if self.policy.input_columns else None,
            timestep=self.timesteps,
        )
        step = self._stepper.step(self._sent(actions))
        self._recorder.add(
            step,
            actions=actions,
            extras=extras,
            scalars={
                Columns.EPS_ID: self._eps_id,
                Columns.T: self._t,
                Columns.WEIGHTS_SEQ_NO: self.policy.weights_seq_no,
            },
            infos=self._stepper.env_infos(step) if self.config.record_infos else None,
        )
        ended = self._advance(step, actions)
        self._ready = True
        return ended

    def _advance(self, step: VectorStep, actions: Any) -> NDArray[np.bool_]:
        ended: NDArray[np.bool_] = step.terminateds | step.truncateds
        if step.valid is None:
            self.timesteps += self.num_envs
            self._t += 1
        else:
            ended = ended & step.valid
            self.timesteps += int(step.valid.sum())
            self._t += step.valid
        if ended.any():
            self._t[ended] = 0
            self._eps_id[ended] = self._new_episode_ids(int(ended.sum()))
        if self._state and step.starts.any():
            fresh = self.policy.initial_state(self.num_envs)
            self._state = tuple(
                np.where(_per_row(step.starts, old), new, old)
                for old, new in zip(self._state, fresh, strict=True)
            )
        if self.policy.input_columns:
            self._before = {
                name: map_structure(lambda leaf: np.where(_per_row(step.starts, leaf), 0, leaf), value)
                for name, value in ((Columns.PREV_ACTIONS, actions), (Columns.PREV_REWARDS, step.rewards))
            }
        return ended

    def _sent(self, actions: Any) -> Any:
        """What the environment gets."""
        if self._scales:
            actions = unsquash_actions(actions, self.action_space)
        return clip_actions(actions, self.action_space) if self._clips else actions

    def _inputs(self) -> SampleBatch:
        """What the policy asked for in `Policy.input_columns`."""
        known = {
            Columns.T: self._t.copy(),
            Columns.EPS_ID: self._eps_id.copy(),
            Columns.ENV_ID: np.arange(self.num_envs),
        }
        known |= self._before or self._nothing_before()
        return SampleBatch({name: known[name] for name in self.policy.input_columns})

    def _nothing_before(self) -> dict[str, Any]:
        specs = leaves_of(self.action_space)
        zeros = [np.zeros((self.num_envs, *leaf.shape), leaf.dtype) for leaf in specs]
        actions = unflatten([leaf.path for leaf in specs], zeros)
        return {Columns.PREV_ACTIONS: actions, Columns.PREV_REWARDS: np.zeros(self.num_envs, np.float32)}

    # ---- rows out of steps ----

    def _fragment(self, steps: int) -> SampleBatch:
        """Exactly num_envs x ``steps`` rows."""
        self._make_ready()
        wanted = steps * self.num_envs
        recorder = self._recorder
        while recorder.rows < wanted:
            self._make_room(2 * steps + 2 if self._stepper.has_reset_steps else steps)
            self._step()
        # The first rows in time. Rows that are left over are of the last step, unless whole episodes were
        # asked for before.
        valid = recorder.valid
        chosen = (
            None if recorder.rows == wanted else valid & (np.cumsum(valid).reshape(valid.shape) <= wanted)
        )
        self._is_cut = True
        return self._handed_out(chosen)

    def _complete(self, *, rows: int = 0, episodes: int = 0) -> SampleBatch:
        """Whole episodes: at least ``rows`` rows of them, or exactly ``episodes``, those that ended first."""
        self._make_ready()
        if self._is_cut:
            self._begin()
        ended = self._recorder.ended
        ended_episodes, ended_rows = int(ended.sum()), int(_until_last(ended, self._recorder.valid).sum())
        while ended_rows < rows or ended_episodes < episodes:
            self._make_room(2 * self._recorder.capacity)
            lengths = self._t + 1
            ended = self._step()
            ended_episodes += int(ended.sum())
            ended_rows += int(lengths[ended].sum())
        ended = self._recorder.ended
        if episodes:
            ended &= np.cumsum(ended).reshape(ended.shape) <= episodes
        return self._handed_out(_until_last(ended, self._recorder.valid))

    def _make_ready(self) -> None:
        """Begin, or begin anew where the last step failed half-way."""
        if self._closed:
            raise ClosedError("the EnvRunner is stopped: make a new one, or sample before stop()")
        if not self._ready:
            self._begin()

    def _make_room(self, steps: int) -> None:
        if self._recorder.is_full:
            self._recorder.reserve(steps)

    def _handed_out(self, chosen: NDArray[np.bool_] | None) -> SampleBatch:
        columns, counts = self._recorder.take(chosen)
        eps_id = columns[Columns.EPS_ID]
        columns[Columns.ENV_ID] = np.repeat(np.arange(self.num_envs), counts)
        columns[Columns.AGENT_INDEX] = np.zeros(len(eps_id), np.int64)
        starts = np.ones(len(eps_id), np.int64)
        starts[1:] = eps_id[1:] != eps_id[:-1]
        columns[Columns.UNROLL_ID] = self._unrolls + np.cumsum(starts) - 1
        self._unrolls += int(starts.sum())
        batch = SampleBatch(columns)
        if type(self.policy).postprocess_trajectory is Policy.postprocess_trajectory or not len(batch):
            return batch
        return concat_samples([self.policy.postprocess_trajectory(part) for part in batch.split_by_episode()])

    # ---- seeds and state ----

    def _sequence(self, *key: int) -> np.random.SeedSequence:
        return np.random.SeedSequence(self.seeds["seed"], spawn_key=(self.worker_index, self._restarts, *key))

    def _env_seed(self) -> int:
        # From the second start on, others than the first: a restored runner is not to repeat its episodes.
        return self.seeds["env"] if not self._restarts else _number(self._sequence(0))

    def _new_episode_ids(self, n: int) -> NDArray[np.int64]:
        return self._episode_ids.integers(0, 1 << 63, n, dtype=np.int64, endpoint=False)

    def state_dict(self) -> JsonState:
        """Return seeds and counters as JSON. Environments cannot be saved: see `load_state_dict`."""
        return {
            "seed": self.seeds["seed"],
            "restarts": self._restarts,
            "timesteps": self.timesteps,
            "unrolls": self._unrolls,
            "steps_dropped": self.steps_dropped + self._recorder.rows,
        }

    def load_state_dict(self, state: JsonState) -> None:
        """Continue counting from a state of `state_dict`, at the start of new episodes.

        The episodes are others than those before, and the same ones for each runner that loads the state.
        Rows that were recorded but not handed out when it was saved are in `steps_dropped`.

        Raises:
            StateError: A key is missing, or no whole number.
        """
        for key in ("seed", "restarts", "timesteps", "unrolls", "steps_dropped"):
            if not isinstance(state.get(key), int):
                raise StateError(
                    f"the runner's state needs {key!r} (int), but it has {excerpt(state.get(key))}"
                )
        self.seeds = _seeds(state["seed"], self.worker_index)
        self._restarts = state["restarts"] + 1
        self.timesteps, self._unrolls = state["timesteps"], state["unrolls"]
        self.steps_dropped = state["steps_dropped"]
        self._recorder.start(self._recorder.obs)
        self._begun = self._ready = False


def _seeds(seed: int | None, worker_index: int) -> dict[str, int]:
    """What everything random of a runner is seeded with."""
    entropy = np.random.SeedSequence(seed).entropy
    assert isinstance(entropy, int)
    if seed is None:
        logger.info("EnvRunner: seed %s, drawn from the OS", entropy)
    env, policy = np.random.SeedSequence(entropy, spawn_key=(worker_index,)).spawn(2)
    return {"seed": entropy, "worker_index": worker_index, "policy": _number(policy), "env": _number(env)}


def _number(sequence: np.random.SeedSequence) -> int:
    # 30 bits: some environments take a 32-bit int, and those after the first get seed + 1, seed + 2, ...
    return int(sequence.generate_state(1)[0] >> 2)


def _check_inputs(policy: Policy) -> None:
    for name in policy.input_columns:
        if name not in _INPUTS:
            raise OptionError(
                f"{type(policy).__name__}.input_columns has {excerpt(name)}: known are {', '.join(_INPUTS)}"
            )


def _per_row(mask: NDArray[np.bool_], like: NDArray[Any]) -> NDArray[np.bool_]:
    """``mask``, (N,), with as many axes as ``like``."""
    return mask.reshape(-1, *[1] * (like.ndim - 1))


def _until_last(ended: NDArray[np.bool_], valid: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of the ``valid`` rows, (steps, N), those up to each environment's last ``ended``."""
    return valid & np.logical_or.accumulate(ended[::-1], axis=0)[::-1]
