"""`PolicySpec`: how to make a policy.

Functions and classes travel in states and checkpoints as text, ``module:name``. Reading such a name imports
the module: load states only from where you would run code from.

Example:
    >>> from gymnasium.spaces import Box, Discrete
    >>> spec = PolicySpec("rlio.policies.random_policy:RandomPolicy")
    >>> policy = spec.with_spaces(Box(-1.0, 1.0, (3,)), Discrete(2)).make(seed=0)
    >>> policy.action_space
    Discrete(2)
    >>> import math
    >>> callable_name(math.sqrt)
    'math:sqrt'
    >>> load_callable("math:sqrt")(9.0)
    3.0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias, get_type_hints

import numpy as np

from rlio.errors import OptionError, StateError, excerpt
from rlio.policies.policy import Policy

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["MakePolicy", "PolicySpec", "Spaces", "as_specs", "callable_name", "load_callable"]

#: A class of policies, or a function that gives one; called with the config as keywords.
MakePolicy: TypeAlias = "Callable[..., Policy]"
#: Observation and action space of one agent.
Spaces: TypeAlias = "tuple[gym.Space[Any], gym.Space[Any]]"

_CALLABLE, _OPTIONS = "$callable", "$options"


@dataclass(frozen=True)
class PolicySpec:
    """How to make a policy.

    Attributes:
        policy_class: A class of policies or a function that gives one, or its ``"module:name"``; None: the
            default of whoever makes the policy. A function that is named, or to be stored, says by its return
            annotation that it gives a policy.
        observation_space: Of one agent; None: the environment's.
        action_space: Of one agent; None: the environment's.
        config: Keywords of ``policy_class``. To be stored, they are JSON, arrays, importable functions and
            classes, and frozen dataclasses of these.

    Raises:
        OptionError: ``policy_class`` or ``config`` is none.
    """

    policy_class: MakePolicy | str | None = None
    observation_space: gym.Space[Any] | None = None
    action_space: gym.Space[Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        made = self.policy_class
        if made is not None and not isinstance(made, str) and not callable(made):
            raise OptionError(
                f"policy_class={excerpt(made)}: a class of policies, or its 'module:name', such as "
                "'rlio.policies.dqn:DQN'"
            )
        if not isinstance(self.config, Mapping) or not all(isinstance(key, str) for key in self.config):
            raise OptionError(f"config={excerpt(self.config)}: keywords of the policy's class, as a dict")

    def with_spaces(
        self, observation_space: gym.Space[Any] | None, action_space: gym.Space[Any] | None
    ) -> PolicySpec:
        """This, with the given spaces where it has none."""
        return replace(
            self,
            observation_space=observation_space if self.observation_space is None else self.observation_space,
            action_space=action_space if self.action_space is None else self.action_space,
        )

    def make(self, *, seed: int | None = None) -> Policy:
        """Make a policy, and bind it to the spaces if both are known.

        Args:
            seed: As in `Policy.bind`.

        Raises:
            OptionError: There is no class, it gives no policy, or the policy cannot act in the spaces.
        """
        given = self.policy_class
        if given is None:
            raise OptionError("this PolicySpec has no policy_class: give one, such as rlio.TorchPolicy")
        make = _maker_of(given) if isinstance(given, str) else given
        try:
            policy = make(**self.config)
        except TypeError as error:
            raise OptionError(
                f"{excerpt(make)} cannot be called with the config {excerpt(dict(self.config))}: {error}"
            ) from error
        if not isinstance(policy, Policy):
            raise OptionError(f"policy_class={excerpt(given)} gave {excerpt(policy)}: expected a Policy")
        policy.spec = replace(self, policy_class=given)
        if self.observation_space is not None and self.action_space is not None:
            policy.bind(self.observation_space, self.action_space, seed)
        return policy

    # ---- as a state ----

    def to_state(self) -> dict[str, Any]:
        """The fields as what `save_state` stores: JSON and arrays, callables as ``module:name``.

        Raises:
            OptionError: A function cannot be imported by a name, or the config holds something else.
            SchemaError: A space is of a kind that cannot be stored.
        """
        from rlio.schemas.spaces import space_to_json

        made = self.policy_class
        if callable(made):
            made = callable_name(made)
            _maker_of(made)
        spaces = (self.observation_space, self.action_space)
        return {
            "policy_class": made,
            "spaces": [None if space is None else space_to_json(space) for space in spaces],
            "config": {key: _described(value, f"config[{key!r}]") for key, value in self.config.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PolicySpec:
        """What `to_state` described. Functions and classes are imported: see `rlio.policies.policy_spec`.

        Raises:
            StateError: It is none of these.
            OptionError: There is no such function or class.
        """
        from rlio.schemas.spaces import space_from_json

        made, spaces, config = (state.get(key) for key in ("policy_class", "spaces", "config"))
        if (
            not (made is None or isinstance(made, str))
            or not (isinstance(spaces, (list, tuple)) and len(spaces) == 2)
            or not isinstance(config, Mapping)
        ):
            raise StateError(
                f"a policy's spec is {excerpt(dict(state))}: expected policy_class (a name), spaces (two) "
                "and config (a dict)"
            )
        observations, actions = (None if space is None else space_from_json(space) for space in spaces)
        restored = {str(key): _restored(value) for key, value in config.items()}
        return cls(made, observations, actions, restored)


def _maker_of(name: str) -> MakePolicy:
    """The class or function ``name``.

    Raises:
        OptionError: It gives no policies. A name may come from a stored file, so that nothing else is called.
    """
    make = load_callable(name)
    given: Any = make
    if not isinstance(make, type):
        try:
            given = get_type_hints(make).get("return")
        except (NameError, TypeError):  # Annotations that are known to type checkers only, or none at all.
            given = None
    if not (isinstance(given, type) and issubclass(given, Policy)):
        raise OptionError(
            f"{name} is no class of policies, nor a function that says it gives one: annotate what it "
            "returns, as in  def make(...) -> Policy"
        )
    return make


def _described(value: Any, place: str) -> Any:
    if value is None or isinstance(value, (str, int, float, bool, np.ndarray, np.generic)):
        return value
    if isinstance(value, (list, tuple)):
        return [_described(part, f"{place}[{i}]") for i, part in enumerate(value)]
    if isinstance(value, Mapping):
        if any(not isinstance(key, str) or key in (_CALLABLE, _OPTIONS) for key in value):
            raise OptionError(f"{place} has the keys {excerpt(list(value))}: keys are strings to be stored")
        return {key: _described(part, f"{place}[{key!r}]") for key, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {part.name: getattr(value, part.name) for part in dataclasses.fields(value) if part.init}
        return {
            _OPTIONS: callable_name(type(value)),
            "fields": {key: _described(part, f"{place}.{key}") for key, part in fields.items()},
        }
    if callable(value) and hasattr(value, "__qualname__"):
        return {_CALLABLE: callable_name(value)}
    raise OptionError(
        f"{place} is {excerpt(value)}, which cannot be stored: give JSON, arrays, frozen dataclasses of "
        "these, or functions and classes that can be imported (of a module, the function that makes it)"
    )


def _restored(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_restored(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {_CALLABLE}:
        return load_callable(value[_CALLABLE])
    if value.keys() == {_OPTIONS, "fields"}:
        kind = load_callable(value[_OPTIONS])
        # Nothing but options is called on a stored file's behalf.
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            raise StateError(f"{excerpt(value[_OPTIONS])} in a policy's config is no dataclass of options")
        return kind(**{key: _restored(part) for key, part in value["fields"].items()})
    return {key: _restored(part) for key, part in value.items()}


# ---- what users give ----


def as_specs(policies: Any) -> dict[str, Policy | PolicySpec]:
    """What a user gave as policies, as a dict from policy id to policy or spec.

    Args:
        policies: A mapping from ids to policies, specs, classes, ``"module:name"``, tuples of a spec's
            fields, or None; or ids alone.

    Raises:
        OptionError: It is none of these, or has no ids.
    """
    if isinstance(policies, Mapping):
        given = dict(policies)
    elif isinstance(policies, Iterable) and not isinstance(policies, (str, bytes)):
        given = dict.fromkeys(policies)
    else:
        raise OptionError(f"policies={excerpt(policies)}: a dict from policy id to policy or PolicySpec")
    if not given or not all(isinstance(policy_id, str) and policy_id for policy_id in given):
        raise OptionError(f"policies={excerpt(given)}: at least one, and their ids are strings")
    return {policy_id: _as_spec(policy_id, value) for policy_id, value in given.items()}


def _as_spec(policy_id: str, value: Any) -> Policy | PolicySpec:
    if isinstance(value, (Policy, PolicySpec)):
        return value
    if isinstance(value, tuple) and len(value) <= len(dataclasses.fields(PolicySpec)):
        return PolicySpec(*value)
    if value is None or isinstance(value, str) or callable(value):
        return PolicySpec(value)
    raise OptionError(f"the policy {policy_id!r} is {excerpt(value)}: expected a Policy or a PolicySpec")


def callable_name(value: Callable[..., Any]) -> str:
    """``module:name`` of a function or class that can be imported.

    Raises:
        OptionError: It cannot be: it is a lambda, was made inside a function, is an object, or belongs to
            ``__main__``, which is another module elsewhere.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None or name is None or "<" in name or module == "__main__":
        raise OptionError(
            f"{excerpt(value)} has no name that it could be imported by: "
            "define it at the top of a module, and give it, or its 'module:name'"
        )
    text = f"{module}:{name}"
    if load_callable(text) is not value:
        raise OptionError(f"{excerpt(value)} says it is {text}, but that is another object: give it a name")
    return text


def load_callable(name: str) -> Callable[..., Any]:
    """What `callable_name` named.

    Raises:
        OptionError: There is no such module, or no such thing in it, or it cannot be called.
    """
    module, _, path = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not all(part.isidentifier() for part in [*module.split("."), *path.split(".")]):
        raise OptionError(f"{excerpt(name)} is no name of a function or class: expected 'module:name'")
    try:
        value: Any = import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"there is no {name}: {error}") from error
    if not callable(value):
        raise OptionError(f"{name} is {excerpt(value)}: expected a function or class")
    return value  # type: ignore[no-any-return] # whatever has this name; checked to be callable
