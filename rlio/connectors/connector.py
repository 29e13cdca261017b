"""`Connector`: one processing step for batches between environments and a policy; and pipelines of them.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box
    >>> from rlio.connectors.frame_stack import FrameStack
    >>> pipeline = ObservationPipeline([lambda obs: obs / 10, FrameStack(2)], Box(0.0, 9.0, (1,)))
    >>> pipeline.space.shape
    (2, 1)
    >>> streams = Streams(slots=np.array([0]), starts=np.array([True]))
    >>> pipeline(np.array([[5.0]], np.float32), streams).tolist()
    [[[0.5], [0.5]]]
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch.copies import own_copy
from rlio.batch.nested import leaves, path_text
from rlio.connectors.spaces import samples_of, space_like
from rlio.errors import OptionError, StateError, excerpt
from rlio.reader import JsonState
from rlio.support.states import fitting

if TYPE_CHECKING:
    import gymnasium as gym

    from rlio.policies.policy import Policy

__all__ = [
    "ActionPipeline",
    "Connector",
    "ConnectorLike",
    "Function",
    "ObservationPipeline",
    "Pipeline",
    "Streams",
]

# Any throughout: observations and actions are arrays, or dicts and tuples of arrays, like their spaces.


class Streams(NamedTuple):
    """The streams that the rows of a batch belong to.

    A stream is a sequence of observations: those of one environment, or, with several agents, those of one
    agent in one environment.

    Attributes:
        slots: Number of each row's stream, shape (N,), int64: a small number, at most once in a batch.
        starts: Which rows begin an episode, shape (N,), bool.
    """

    slots: NDArray[np.int64]
    starts: NDArray[np.bool_]


class Connector(ABC):
    """Changes observations on their way to a policy, or actions on their way to the environments.

    To write a connector, implement `__call__`. Implement `bind` if the space changes, `final` if there is
    state (kept by slot), and `state_dict` and `load_state_dict` if the state outlives an episode.
    """

    def bind(self, space: gym.Space[Any], policy: Policy | None = None) -> gym.Space[Any]:
        """Take the space on the environments' side, and return the space on the policy's side.

        Args:
            space: Space of one incoming observation, or of one outgoing action.
            policy: The policy; None if it is unknown.

        Returns:
            The space of one outgoing observation, or of one incoming action.

        Raises:
            OptionError: The connector does not support ``space``.
        """
        return space

    @abstractmethod
    def __call__(self, values: Any, streams: Streams) -> Any:
        """Process ``values``.

        Args:
            values: (N, ...), nested like the space; the owner may overwrite them later. Do not change them.
            streams: The streams of the rows.
        """

    def final(self, values: Any, streams: Streams) -> Any:
        """Process the last observations of episodes, without a change of state."""
        return self(values, streams)

    def state_dict(self) -> JsonState:
        """Return the state that outlives an episode, as JSON; {} if there is none."""
        return {}

    def load_state_dict(self, state: JsonState) -> None:
        """Continue from a state of `state_dict`.

        Raises:
            StateError: The state does not fit this connector.
        """
        if not isinstance(state, Mapping) or state:
            raise StateError(f"{type(self).__name__} has no state but was given {excerpt(state)}")


#: A connector, or a function of a batch of values.
ConnectorLike: TypeAlias = Connector | Callable[[Any], Any]


class Function(Connector):
    """A function of a batch, as a connector.

    Args:
        fn: Takes values of N rows and returns N rows.
        space: The space on the policy's side. None: for observations, it is inferred by applying ``fn`` to
            samples, with the bounds of their dtypes; for actions, the space is unchanged.
    """

    def __init__(self, fn: Callable[[Any], Any], *, space: gym.Space[Any] | None = None) -> None:
        if not callable(fn):
            raise OptionError(f"fn={excerpt(fn)}: expected a function of a batch")
        self.fn = fn
        self.space = space

    def bind(self, space: gym.Space[Any], policy: Policy | None = None) -> gym.Space[Any]:
        return space if self.space is None else self.space

    def __call__(self, values: Any, streams: Streams) -> Any:
        # A copy, because the function may change what it gets, which others still use.
        return self.fn(own_copy(values))

    def __repr__(self) -> str:
        return getattr(self.fn, "__qualname__", repr(self.fn))


class Pipeline:
    """A chain of connectors.

    Connectors are copied, so several runners made from one configuration share no state.

    Args:
        connectors: In the order of application; functions become `Function`s.

    Attributes:
        connectors: The copies.

    Raises:
        OptionError: An element is neither a connector nor a function.
    """

    def __init__(self, connectors: Iterable[ConnectorLike]) -> None:
        self.connectors: list[Connector] = [_connector(each) for each in connectors]

    def __len__(self) -> int:
        """The number of connectors; 0: values are unchanged."""
        return len(self.connectors)

    def __call__(self, values: Any, streams: Streams) -> Any:
        """Process ``values``, (N, ...)."""
        for connector in self.connectors:
            values = connector(values, streams)
        return values

    def state_dict(self) -> JsonState:
        """Return the states of the connectors that have one: position -> state, as JSON."""
        states = {str(i): connector.state_dict() for i, connector in enumerate(self.connectors)}
        return {position: state for position, state in states.items() if state}

    def load_state_dict(self, state: JsonState) -> None:
        """Continue from a state of `state_dict`.

        Raises:
            StateError: The state belongs to other connectors.
        """
        if not isinstance(state, Mapping):
            raise StateError(f"the state of a pipeline is {excerpt(state)}: expected a dict by position")
        for position in state:
            if position not in map(str, range(len(self))):
                raise StateError(
                    f"the state has connector {excerpt(position)}, but the pipeline has {len(self)}"
                )
        for i, connector in enumerate(self.connectors):
            if str(i) in state:
                with fitting(f"the state of connector {i}"):
                    connector.load_state_dict(state[str(i)])


class ObservationPipeline(Pipeline):
    """Connectors between environments and a policy.

    Args:
        connectors: From the environments to the policy.
        space: Space of the environments' observations.
        policy: The policy; None if it is unknown.

    Attributes:
        space: Space of the observations that the policy gets.
    """

    def __init__(
        self, connectors: Iterable[ConnectorLike], space: gym.Space[Any], policy: Policy | None = None
    ) -> None:
        super().__init__(connectors)
        for connector in self.connectors:
            if isinstance(connector, Function) and connector.space is None:
                connector.space = _found_out(connector, space)
            space = connector.bind(space, policy)
        self.space = space

    def final(self, values: Any, streams: Streams) -> Any:
        """Process the last observations of episodes, (N, ...), without a change of state."""
        for connector in self.connectors:
            values = connector.final(values, streams)
        return values


class ActionPipeline(Pipeline):
    """Connectors between a policy and environments.

    Args:
        connectors: From the policy to the environments.
        space: Space of the environments' actions.
        policy: The policy; None if it is unknown.

    Attributes:
        space: Space of the policy's actions.
    """

    def __init__(
        self, connectors: Iterable[ConnectorLike], space: gym.Space[Any], policy: Policy | None = None
    ) -> None:
        super().__init__(connectors)
        for connector in reversed(self.connectors):
            space = connector.bind(space, policy)
        self.space = space


def _connector(given: ConnectorLike) -> Connector:
    if isinstance(given, Connector):
        return copy.deepcopy(given)
    if isinstance(given, type) or not callable(given):
        raise OptionError(
            f"{excerpt(given)} is not a connector: expected an object such as FrameStack(4), or a function "
            "of a batch"
        )
    return Function(given)


def _found_out(function: Function, space: gym.Space[Any]) -> gym.Space[Any]:
    rows = 2
    try:
        given = function.fn(samples_of(space, rows))
    except Exception as error:
        raise OptionError(
            f"the connector {function!r} failed on {rows} samples of {excerpt(str(space))}: "
            f"{type(error).__name__}: {excerpt(str(error))}"
        ) from error
    for path, leaf in leaves(given):
        if not isinstance(leaf, np.ndarray) or not leaf.ndim or len(leaf) != rows or leaf.dtype == object:
            found = f"{leaf.dtype} {leaf.shape}" if isinstance(leaf, np.ndarray) else excerpt(leaf)
            place = f" at {path_text(path)}" if path else ""
            raise OptionError(
                f"the connector {function!r} made {found}{place} from {rows} samples: expected a function of "
                "a batch that returns arrays of as many rows; for objects, give the resulting space with "
                "Function(fn, space=...)"
            )
    return space_like(given)
