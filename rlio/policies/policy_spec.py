"""`PolicySpec`: describes how to make a policy.

States and checkpoints store functions and classes as text, ``module:name``. Reading such a name imports the
module: load states only from a source whose code you would run.

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
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias, get_type_hints

import numpy as np

from rlio.errors import OptionError, StateError, excerpt
from rlio.policies.policy import Policy

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["MakePolicy", "PolicySpec", "Spaces", "as_specs", "callable_name", "load_callable", "load_object"]

#: A policy class, or a function that returns a policy; called with the config as keywords.
MakePolicy: TypeAlias = "Callable[..., Policy]"
#: Observation and action space of one agent.
Spaces: TypeAlias = "tuple[gym.Space[Any], gym.Space[Any]]"

_CALLABLE, _OPTIONS = "$callable", "$options"


@dataclass(frozen=True)
class PolicySpec:
    """Describes how to make a policy.

    Attributes:
        policy_class: A policy class or a function that returns a policy, or its ``"module:name"``; None: the
            default of the caller. A function given by name, or to be stored, needs a return annotation that
            is a policy class.
        observation_space: Space of one agent; None: the environment's.
        action_space: Space of one agent; None: the environment's.
        config: Keywords of ``policy_class``. To be stored, they must be JSON, arrays, importable functions
            and classes, and frozen dataclasses of these.

    Raises:
        OptionError: ``policy_class`` or ``config`` has another type.
    """

    policy_class: MakePolicy | str | None = None
    observation_space: gym.Space[Any] | None = None
    action_space: gym.Space[Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        made = self.policy_class
        if made is not None and not isinstance(made, str) and not callable(made):
            raise OptionError(
                f"policy_class={excerpt(made)}: expected a policy class, or its 'module:name', such as "
                "'rlio.policies.dqn:DQN'"
            )
        if not isinstance(self.config, Mapping) or not all(isinstance(key, str) for key in self.config):
            raise OptionError(
                f"config={excerpt(self.config)}: expected keywords of the policy's class, as a dict"
            )

    @classmethod
    def of(cls, policy: Policy) -> PolicySpec:
        """How ``policy`` was made: its own spec, or else its class and arguments; with its spaces.

        Raises:
            OptionError: It was made with arguments that have no names.
        """
        spec = policy.spec
        if spec is None:
            args, keywords = policy._made_with
            parameters = inspect.signature(type(policy).__init__).parameters.values()
            names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD][1:]
            if len(args) > len(names):
                raise OptionError(
                    f"{type(policy).__name__} was made with {len(args)} arguments by position, but only "
                    f"{excerpt(names)} have names: pass it as a PolicySpec"
                )
            spec = cls(type(policy), config={**dict(zip(names, args, strict=False)), **keywords})
        return spec.with_spaces(*policy.spaces) if policy.is_bound else spec

    def with_spaces(
        self, observation_space: gym.Space[Any] | None, action_space: gym.Space[Any] | None
    ) -> PolicySpec:
        """This spec, with the given spaces where it has none."""
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
            OptionError: The class is missing, it gives no policy, or the policy cannot act in the spaces.
        """
        given = self.policy_class
        if given is None:
            raise OptionError("this PolicySpec has no policy_class: pass one, such as rlio.TorchPolicy")
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
        """The fields in the form that `save_state` stores: JSON and arrays, callables as ``module:name``.

        Raises:
            OptionError: A function cannot be imported by name, or the config holds another kind of value.
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
        """The spec that `to_state` described. Imports functions and classes: see `rlio.policies.policy_spec`.

        Raises:
            StateError: ``state`` is not such a description.
            OptionError: A function or class does not exist.
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
    """Load the class or function ``name``.

    Raises:
        OptionError: It does not give policies. The name may come from a stored file, so nothing else is
            called.
    """
    make = load_callable(name)
    given: Any = make
    if not isinstance(make, type):
        try:
            given = get_type_hints(make).get("return")
        except (NameError, TypeError):  # Annotations that only type checkers know, or none.
            given = None
    if not (isinstance(given, type) and issubclass(given, Policy)):
        raise OptionError(
            f"{name} is not a policy class, nor a function annotated to return one: annotate the "
            "function, as in  def make(...) -> Policy"
        )
    return make


def _described(value: Any, place: str) -> Any:
    if value is None or isinstance(value, (str, int, float, bool, np.ndarray, np.generic)):
        return value
    if isinstance(value, (list, tuple)):
        return [_described(part, f"{place}[{i}]") for i, part in enumerate(value)]
    if isinstance(value, Mapping):
        if any(not isinstance(key, str) or key in (_CALLABLE, _OPTIONS) for key in value):
            raise OptionError(f"{place} has the keys {excerpt(list(value))}: stored keys must be strings")
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
        f"{place} is {excerpt(value)}, which cannot be stored: pass JSON, arrays, frozen dataclasses of "
        "these, or importable functions and classes (for a module, the function that makes it)"
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
        # Only dataclasses of options are called for a stored file.
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            raise StateError(f"{excerpt(value[_OPTIONS])} in a policy's config is not a dataclass of options")
        return kind(**{key: _restored(part) for key, part in value["fields"].items()})
    return {key: _restored(part) for key, part in value.items()}


# ---- arguments of users ----


def as_specs(policies: Any) -> dict[str, Policy | PolicySpec]:
    """The user's policies as a dict from policy id to policy or spec.

    Args:
        policies: A mapping from ids to policies, specs, classes, ``"module:name"``, tuples of a spec's
            fields, or None; or ids alone.

    Raises:
        OptionError: ``policies`` has another form, or no ids.
    """
    if isinstance(policies, Mapping):
        given = dict(policies)
    elif isinstance(policies, Iterable) and not isinstance(policies, (str, bytes)):
        given = dict.fromkeys(policies)
    else:
        raise OptionError(
            f"policies={excerpt(policies)}: expected a dict from policy id to policy or PolicySpec"
        )
    if not given or not all(isinstance(policy_id, str) and policy_id for policy_id in given):
        raise OptionError(
            f"policies={excerpt(given)}: expected at least one policy, with ids that are strings"
        )
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
    """``module:name`` of an importable function or class.

    Raises:
        OptionError: ``value`` is not importable: it is a lambda, was made inside a function, is an object, or
            belongs to ``__main__``, which is another module in other processes.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None or name is None or "<" in name or module == "__main__":
        raise OptionError(
            f"{excerpt(value)} cannot be imported by a name: define it at the top of a module, and pass it, "
            "or its 'module:name'"
        )
    text = f"{module}:{name}"
    if load_callable(text) is not value:
        raise OptionError(f"{excerpt(value)} has the name {text}, but that is another object: rename it")
    return text


def load_callable(name: str) -> Callable[..., Any]:
    """Load the function or class that `callable_name` named.

    Raises:
        OptionError: The module or the name does not exist, or the object cannot be called.
    """
    value = load_object(name)
    if not callable(value):
        raise OptionError(f"{name} is {excerpt(value)}: expected a function or class")
    return value  # type: ignore[no-any-return] # any object may have this name; checked to be callable


def load_object(name: str) -> Any:
    """Load the object ``module:name``.

    Raises:
        OptionError: The module or the name does not exist.
    """
    module, _, path = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not all(part.isidentifier() for part in [*module.split("."), *path.split(".")]):
        raise OptionError(
            f"{excerpt(name)} is not the name of an object: expected 'module:name', such as "
            "'my_policies:greedy'"
        )
    try:
        value: Any = import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"there is no {name}: {error}") from error
    return value
