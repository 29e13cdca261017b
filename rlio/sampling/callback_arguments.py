"""`with_arguments`: calls a callback with the arguments that it names: rlio's, and those that RLlib passes.

=========================  =======================================================================
RLlib's argument           what a callback gets
=========================  =======================================================================
``worker``, ``env_runner`` ``runner``
``base_env``               ``env``
``sub_environment``        ``env`` of `Callbacks.on_sub_environment_created`
``env_context``            ``context``
``env_index``              ``episode.env_index``
``policies``               the runner's policies, by id
``rl_module``              the policy's torch module; by policy id, if there are several policies; None
                           for a policy without one
``prev_episode_chunks``    [], because ``episode`` is the whole episode
=========================  =======================================================================

An argument that rlio does not have, such as ``metrics_logger`` or ``algorithm``, keeps its default. Without a
default, the callback is refused.

RLlib 0.8 takes functions by name, each with one dict: ``on_episode_start``, ``on_episode_step`` and
``on_episode_end`` (``env, policy, episode``), ``on_sample_end`` (``worker, samples``) and
``on_postprocess_traj`` (``episode, agent_id, pre_batch, post_batch, all_pre_batches``). A function whose only
argument has none of the names above gets that dict.

Example:
    >>> def on_episode_end(worker, policies, episode):
    ...     print(worker, policies, episode)
    >>> class Runner:
    ...     policies = {"p": None}
    ...     def __repr__(self): return "the runner"
    >>> call = with_arguments("on_episode_end", ("runner", "env", "episode", "error"), on_episode_end)
    >>> call(runner=Runner(), env=None, episode="the episode", error=None)
    the runner {'p': None} the episode
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any, Final

from rlio.batch.columns import DEFAULT_POLICY_ID
from rlio.errors import OptionError, excerpt

__all__ = ["OLD_NAMES", "with_arguments"]

# Any in this module: users define what callbacks take, and runners what they get.

#: The names of RLlib 0.8 that are others here.
OLD_NAMES: Final = {"on_postprocess_traj": "on_postprocess_trajectory"}

_Given = Mapping[str, Any]


def _policies_of(runner: Any) -> Mapping[str, Any]:
    """The policies of a runner, of a worker, or of external episodes."""
    group = getattr(runner, "group", None)
    if group is not None:
        policies: Mapping[str, Any] = group.policies
        return policies
    return getattr(runner, "policies", None) or {DEFAULT_POLICY_ID: runner.policy}


def _modules_of(runner: Any) -> Any:
    policies = _policies_of(runner)
    modules = {policy_id: getattr(policies[policy_id], "module", None) for policy_id in policies}
    return modules[DEFAULT_POLICY_ID] if modules.keys() == {DEFAULT_POLICY_ID} else modules


#: RLlib's argument -> (rlio's argument that it needs, the function that makes it).
_ALIASES: Final[dict[str, tuple[str, Callable[[_Given], Any]]]] = {
    "worker": ("runner", lambda given: given["runner"]),
    "env_runner": ("runner", lambda given: given["runner"]),
    "base_env": ("env", lambda given: given["env"]),
    "sub_environment": ("env_index", lambda given: given["env"]),
    "env_context": ("context", lambda given: given.get("context")),
    "env_index": ("episode", lambda given: getattr(given["episode"], "env_index", None)),
    "policies": ("runner", lambda given: _policies_of(given["runner"])),
    "rl_module": ("runner", lambda given: _modules_of(given["runner"])),
    "prev_episode_chunks": ("error", lambda given: []),
}

#: What to do instead of an argument that rlio does not have.
_INSTEAD: Final = {
    "metrics_logger": "write numbers to episode.custom_metrics, which get_metrics().summarise() has",
    "algorithm": "put code for an Algorithm into your training loop",
}


def _old_episode(given: _Given) -> dict[str, Any]:
    return {"env": given["env"], "policy": _policies_of(given["runner"]), "episode": given["episode"]}


def _old_sample(given: _Given) -> dict[str, Any]:
    return {"worker": given["runner"], "samples": given["samples"]}


def _old_trajectory(given: _Given) -> dict[str, Any]:
    before = {
        agent: (given["policies"][policy_id], rows)
        for agent, (policy_id, rows) in given["original_batches"].items()
    }
    return {
        "episode": given["episode"],
        "agent_id": given["agent_id"],
        "pre_batch": before[given["agent_id"]],
        "post_batch": given["postprocessed_batch"],
        "all_pre_batches": before,
    }


#: RLlib 0.8's functions -> what makes their dict.
_OLD: Final[dict[str, Callable[[_Given], dict[str, Any]]]] = {
    "on_episode_start": _old_episode,
    "on_episode_step": _old_episode,
    "on_episode_end": _old_episode,
    "on_sample_end": _old_sample,
    "on_postprocess_traj": _old_trajectory,
}


def with_arguments(name: str, native: tuple[str, ...], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``function`` with the arguments that it takes.

    Args:
        name: The callback's name.
        native: The arguments with which rlio calls it, all keywords.
        function: A method or function; returned as it is if it takes these arguments.

    Raises:
        OptionError: The function needs an argument that rlio does not have.
    """
    try:
        parameters = [
            each
            for each in signature(function).parameters.values()
            if each.kind is not Parameter.VAR_POSITIONAL
        ]
    except ValueError:  # C code without a signature.
        return function
    rest = any(each.kind is Parameter.VAR_KEYWORD for each in parameters)
    named = [each for each in parameters if each.kind is not Parameter.VAR_KEYWORD]
    makers = {
        alias: make for alias, (source, make) in _ALIASES.items() if source in native and alias not in native
    }
    unknown = [each for each in named if each.name not in makers and each.name not in native]
    if name in _OLD and (name in OLD_NAMES or (len(named) == len(unknown) == 1 and not rest)):
        make_info = _OLD[name]
        return lambda **given: function(make_info(given))
    for each in unknown:
        if each.default is Parameter.empty:
            raise OptionError(
                f"{name} takes {excerpt(each.name)}, which rlio does not have: expected some of "
                f"{', '.join((*native, *makers))}"
                + (f"; {_INSTEAD[each.name]}" if each.name in _INSTEAD else "")
            )
    for each in named:
        if each.kind is Parameter.POSITIONAL_ONLY:
            raise OptionError(f"{name} takes {excerpt(each.name)} by position: callbacks get keywords")
    taken = {each.name for each in named}
    made = {alias: make for alias, make in makers.items() if alias in taken}
    if not made and (rest or taken.issuperset(native)):
        return function

    def call(**given: Any) -> None:
        own = given if rest else {key: value for key, value in given.items() if key in taken}
        function(**own, **{alias: make(given) for alias, make in made.items()})

    return call
