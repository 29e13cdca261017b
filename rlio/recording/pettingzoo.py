"""`RecordParallelEnv`, `RecordAECEnv`: record the steps of your own loop in PettingZoo's environments.

This module does not import PettingZoo (``pip install rlio[pettingzoo]``): callers pass its environments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

from rlio.batch.columns import AGENT_ID, Columns
from rlio.batch.copies import own_copy
from rlio.envs.pettingzoo import is_aec, is_pettingzoo
from rlio.envs.values import as_flag
from rlio.errors import OptionError, SchemaError, excerpt
from rlio.recording.joint_rows import JointRows, PolicyMappingFn, policies_of
from rlio.recording.recorder import ENV, Mode, Recording, WriterLike, alone, check_names
from rlio.resolve import IOContext

__all__ = ["RecordAECEnv", "RecordParallelEnv"]

_Step: TypeAlias = tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any], dict[Any, Any], dict[Any, Any]]

# `Columns.AGENT_INDEX` is recorded here, unlike by the recorders of one agent.
_OWN = frozenset({AGENT_ID, Columns.AGENT_INDEX})


class _PettingZooRecorder(Recording):
    """What both recorders share. Other attributes are those of the environment.

    Attributes:
        env: The environment.
    """

    _records_aec: ClassVar[bool]

    def __init__(
        self,
        env: Any,
        writer: WriterLike,
        *,
        mode: Mode = "append",
        infos: bool = False,
        seeds: bool = False,
        seed: int | None = None,
        policy_mapping_fn: PolicyMappingFn | None = None,
        close_writer: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not is_pettingzoo(env) or is_aec(env) is not self._records_aec:
            other = "RecordParallelEnv" if self._records_aec else "RecordAECEnv"
            advice = f"use rlio.{other} for this kind" if is_pettingzoo(env) else _EXPECTED
            raise OptionError(f"{type(self).__name__} was given {excerpt(env)}: {advice}")
        self.env = env
        agents = getattr(env, "possible_agents", None)
        if not agents:
            raise OptionError(
                f"{excerpt(env)} has no possible_agents, which are needed to find spaces and policies"
            )
        mapping, spaces = policies_of(agents, self._spaces_of, policy_mapping_fn)
        self._rows: JointRows = JointRows(
            self._spaces_of, agents, mapping, infos=infos, seeds=seeds, seed=seed
        )
        name = getattr(env, "metadata", {}).get("name")
        self._start_recording(
            self._rows,
            writer,
            context=IOContext(
                spaces=spaces,
                made_by={} if name is None else {"env": str(name)},
                options={} if storage_options is None else {"storage_options": storage_options},
            ),
            storage_options=storage_options,
            mode=mode,
            seeds=seeds,
            close_writer=close_writer,
        )
        self._extras: dict[Any, dict[str, Any]] = {}
        #: Whether an episode is running.
        self._running = False

    def __getattr__(self, name: str) -> Any:
        # (Only for names that are not found here. `env` itself is missing while __init__ has not run.)
        if name.startswith("_") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    def __str__(self) -> str:
        return f"{type(self).__name__}<{self.env}>"

    def _spaces_of(self, agent: Any) -> tuple[Any, Any]:
        return self.env.observation_space(agent), self.env.action_space(agent)

    def _record(self, agent: Any, columns: dict[str, Any]) -> None:
        check_names(columns, seeds=self._seeds, own=_OWN)
        self._extras.setdefault(agent, {}).update(columns)

    def _act(self, actions: Mapping[Any, Any]) -> None:
        try:
            self._rows.act(actions, self._extras)
        finally:
            self._extras.clear()

    def _check_running(self) -> None:
        self._check_state()
        if not self._running:
            raise OptionError("step() was called while no episode is running: call reset() first")

    def _leave(self) -> None:
        """End an episode that `reset` or `close` leaves before its end."""
        if self._failed:
            self._rows.forget()
        elif self._running:
            self._rows.cut(self._seen())
        self._running = False

    def _seen(self) -> dict[Any, tuple[Any, Any]]:
        """What agents with open rows would see now; see `JointRows.cut`."""
        return {}

    def close(self) -> None:
        """Write the waiting rows, and close the environment and the writer. May be called again.

        All of it is done, also if some of it fails; the first error is raised.
        """
        self._finish(self.env.close, leave=self._leave)


class RecordParallelEnv(_PettingZooRecorder):
    """Steps a parallel environment of PettingZoo unchanged, and records every transition of every agent.

    A row is a transition of one agent: the columns of `RecordExperience`, with ``agent_id`` (the agent's
    name) and ``agent_index`` (its position in ``possible_agents``). ``t`` is the step of the environment, the
    same for all agents. The row of an agent that has no observation after its action stays open until it has
    one; rewards until then add up. If it ends without one, ``new_obs_valid`` is False.

    Batches are `MultiAgentBatch`es. Rows are written as by `RecordExperience`, when all agents together have
    as many. Threads: as there.

    Args:
        env: The environment; wrap it last, because the wrapper records what your policies see and do.
        writer: A writer, or a value that `resolve_output` takes: a path or URL of a data set.
        mode: As for `RecordExperience`, like ``infos``, ``close_writer`` and ``storage_options``.
        infos: Whether to record the agents' infos.
        seeds: Whether to record the seed given to the `reset` of the row's episode.
        seed: Seed of the episode ids; None draws one from the OS.
        policy_mapping_fn: Agent -> id of the policy under which its rows are stored. None: ``default_policy``
            if all agents have equal spaces, else each agent's name.
        close_writer: Whether `close` closes the writer.
        storage_options: For the fsspec filesystem of a path or URL.

    Raises:
        OptionError: ``env`` is not a parallel environment, or has no ``possible_agents``; agents of one
            policy have unlike spaces; or as for `RecordExperience`.
    """

    _records_aec = False

    @alone
    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Begin an episode; see PettingZoo's ``ParallelEnv.reset``."""
        self._leave()
        obs: dict[Any, Any]
        infos: dict[Any, Any]
        obs, infos = self.env.reset(seed=seed, options=options)
        self._rows.start(seed)
        self._failed = False
        for agent, value in obs.items():
            self._rows.see(agent, obs=value)
        self._extras.clear()
        self._running = True
        return obs, infos

    @alone
    def record(self, agent: Any, /, **columns: Any) -> None:
        """Add columns to the next step of ``agent``, such as ``action_logp``; see `RecordExperience.record`.

        Raises:
            OptionError: The recorder records a column of that name itself.
        """
        self._record(agent, columns)

    @alone
    def step(self, actions: dict[Any, Any]) -> _Step:
        """Take a step; see PettingZoo's ``ParallelEnv.step``.

        Raises:
            OptionError, SchemaError, PublishError: As `RecordExperience.step`. If values of one agent cannot
                be stored, the rows of the others are recorded.
        """
        self._check_running()
        self._act(actions)
        self._failed = True
        result: _Step = self.env.step(actions)
        obs, rewards, terminations, truncations, infos = result
        flags = {
            agent: (
                as_flag(terminations.get(agent, False), column=Columns.TERMINATEDS, giver=ENV),
                as_flag(truncations.get(agent, False), column=Columns.TRUNCATEDS, giver=ENV),
            )
            for agent in {**terminations, **truncations}
        }
        self._failed = False
        self._running = bool(self.env.agents)
        errors = []
        for agent in {**obs, **rewards, **flags}:
            try:
                self._rows.see(
                    agent,
                    obs=obs.get(agent),
                    reward=rewards.get(agent, 0.0),
                    ended=flags.get(agent, (False, False)),
                    info=infos.get(agent),
                )
            except SchemaError as error:
                errors.append(error)
        if not self._running:
            self._rows.cut({})
        if errors:
            raise errors[0]
        self._recorder.write_if_due(ended=not self._running)
        return result


class RecordAECEnv(_PettingZooRecorder):
    """Steps an AEC environment of PettingZoo unchanged, and records every transition of every agent.

    Rows are like those of `RecordParallelEnv`. An agent's row begins with its action. It ends at the agent's
    next turn, with the observation, the reward and the flags that ``last()`` gives then. ``t`` counts the
    actions of all agents. If `reset` or `close` leaves an episode before its end, open rows end with what
    their agents would see at that moment.

    Threads: as for `RecordExperience`.

    Args:
        env, writer, options: As for `RecordParallelEnv`.

    Raises:
        OptionError: ``env`` is not an AEC environment; or as for `RecordParallelEnv`.
    """

    _records_aec = True
    #: Copies of what `last` gave for this turn; None: it was not called, or without the observation.
    _turn: tuple[Any, Any, bool, bool, Any] | None = None

    @alone
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Begin an episode; see PettingZoo's ``AECEnv.reset``."""
        self._leave()
        self.env.reset(seed=seed, options=options)
        self._rows.start(seed)
        self._failed = False
        self._turn = None
        self._extras.clear()
        self._running = True

    @alone
    def last(self, observe: bool = True) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """What the agent whose turn it is sees; see PettingZoo's ``AECEnv.last``."""
        result: tuple[Any, float, bool, bool, dict[str, Any]] = self.env.last(observe)
        if observe:
            self._turn = own_copy(result)
        return result

    @alone
    def record(self, **columns: Any) -> None:
        """Add columns to the next step, such as ``action_logp``; see `RecordExperience.record`.

        Raises:
            OptionError: The recorder records a column of that name itself.
        """
        self._record(self.env.agent_selection, columns)

    @alone
    def step(self, action: Any) -> None:
        """Take the action of the agent whose turn it is; see PettingZoo's ``AECEnv.step``.

        Raises:
            OptionError, SchemaError, PublishError: As `RecordExperience.step`.
        """
        self._check_running()
        agent = self.env.agent_selection
        error = self._see_turn(agent)
        if action is not None:
            self._act({agent: action})
        self._failed = True
        self.env.step(action)
        self._failed = False
        self._running = bool(self.env.agents)
        if error is not None:
            raise error
        self._recorder.write_if_due(ended=not self._running)

    def _see_turn(self, agent: Any) -> SchemaError | None:
        """Record the outcome of the agent's last action; returns why it cannot be stored."""
        obs, reward, terminated, truncated, info = self._turn or self.env.last()
        self._turn = None
        ended = (
            as_flag(terminated, column=Columns.TERMINATEDS, giver=ENV),
            as_flag(truncated, column=Columns.TRUNCATEDS, giver=ENV),
        )
        try:
            self._rows.see(agent, obs=obs, reward=reward, ended=ended, info=info)
        except SchemaError as error:
            return error
        return None

    def _seen(self) -> dict[Any, tuple[Any, Any]]:
        rewards = self.env._cumulative_rewards  # `last` gives it for one agent only.
        # Copies, because `observe` may return the same arrays for all agents.
        return {agent: (own_copy(self.env.observe(agent)), rewards[agent]) for agent in self.env.agents}


_EXPECTED = (
    "expected an environment of PettingZoo. One agent is recorded by rlio.RecordExperience, or by "
    "rlio.RecordVectorExperience"
)
