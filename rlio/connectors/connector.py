"""`Connector`: one thing that is done to batches between environments and a policy; and pipelines of them.

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
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch.nested import leaves, path_text
from rlio.connectors.spaces import samples_of, space_like
from rlio.errors import OptionError, StateError, excerpt
from rlio.reader import JsonState

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

# Any throughout: observations and actions are arrays, or dicts and tuples of them, as the spaces are.


class Streams(NamedTuple):
    """To which streams the rows of a batch belong.

    A stream is what follows one another: the observations of one environment, and with several agents those
    of one agent of one environment.

    Attributes:
        slots: The number of each row's stream, shape (N,), int64: small numbers, each at most once a batch.
        starts: Which rows begin an episode, shape (N,), bool.
    """

    slots: NDArray[np.int64]
    starts: NDArray[np.bool_]


class Connector(ABC):
    """Changes observations on their way to a policy, or actions on their way to the environments.

    To write one, implement `__call__`, `bind` if the space changes, `final` if there is state, which is kept
    by slot, and `state_dict` and `load_state_dict` if the state outlives an episode.
    """

    def bind(self, space: gym.Space[Any], policy: Policy | None = None) -> gym.Space[Any]:
        """Take what the space is on the side of the environments, and say what it is on the policy's side.

        Args:
            space: Of one observation that comes in, or of one action that goes out.
            policy: For whom; None where it is not known.

        Returns:
            The space of one observation that goes out, or of one action that comes in.

        Raises:
            OptionError: The connector is of no use for ``space``.
        """
        return space

    @abstractmethod
    def __call__(self, values: Any, streams: Streams) -> Any:
        """Return what becomes of ``values``.

        Args:
            values: (N, ...), nested as the space is; may be overwritten by its owner later, and is not to be
                changed.
            streams: Whose rows they are.
        """

    def final(self, values: Any, streams: Streams) -> Any:
        """Return what becomes of the last observations of episodes; no state changes."""
        return self(values, streams)

    def state_dict(self) -> JsonState:
        """Return what outlives an episode, as JSON; {} if nothing does."""
        return {}

    def load_state_dict(self, state: JsonState) -> None:
        """Continue from a state of `state_dict`.

        Raises:
            StateError: It is not of such a connector.
        """
        if state:
            raise StateError(f"{type(self).__name__} has no state but was given {excerpt(sorted(state))}")


#: A connector, or a function of a batch of values.
ConnectorLike: TypeAlias = Connector | Callable[[Any], Any]


class Function(Connector):
    """A function of a batch as a connector.

    Args:
        fn: Takes values of N rows and gives such.
        space: What the space is on the policy's side. None: for observations, it is found out by applying
            ``fn`` to samples, whose bounds are then those of their dtypes; for actions, it stays.
    """

    def __init__(self, fn: Callable[[Any], Any], *, space: gym.Space[Any] | None = None) -> None:
        if not callable(fn):
            raise OptionError(f"fn={excerpt(fn)}: expected a function of a batch")
        self.fn = fn
        self.space = space

    def bind(self, space: gym.Space[Any], policy: Policy | None = None) -> gym.Space[Any]:
        return space if self.space is None else self.space

    def __call__(self, values: Any, streams: Streams) -> Any:
        return self.fn(values)

    def __repr__(self) -> str:
        return getattr(self.fn, "__qualname__", repr(self.fn))


class Pipeline:
    """Connectors one behind the other.

    They are copied, so that several runners can be made from one configuration and share no state.

    Args:
        connectors: In the order in which they are applied; functions stand for `Function`s.

    Attributes:
        connectors: The copies.

    Raises:
        OptionError: An element is neither a connector nor a function.
    """

    def __init__(self, connectors: Iterable[ConnectorLike]) -> None:
        self.connectors = [_connector(each) for each in connectors]

    def __len__(self) -> int:
        """How many; 0 means that nothing happens."""
        return len(self.connectors)

    def __call__(self, values: Any, streams: Streams) -> Any:
        """Return what becomes of ``values``, (N, ...)."""
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
            StateError: It is of other connectors.
        """
        for position in state:
            if position not in map(str, range(len(self))):
                raise StateError(
                    f"the state is of a connector {excerpt(position)}, but there are {len(self)}"
                )
        for i, connector in enumerate(self.connectors):
            if str(i) in state:
                connector.load_state_dict(state[str(i)])


class ObservationPipeline(Pipeline):
    """Connectors between environments and a policy.

    Args:
        connectors: From the environments to the policy.
        space: Of the environments' observations.
        policy: For whom; None where it is not known.

    Attributes:
        space: Of the observations that the policy gets.
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
        """Return what becomes of the last observations of episodes, (N, ...); no state changes."""
        for connector in self.connectors:
            values = connector.final(values, streams)
        return values


class ActionPipeline(Pipeline):
    """Connectors between a policy and environments.

    Args:
        connectors: From the policy to the environments.
        space: Of the environments' actions.
        policy: Whose actions they are; None where it is not known.

    Attributes:
        space: Of the actions that the policy gives.
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
            f"{excerpt(given)} is no connector: expected an object such as FrameStack(4), or a function of a "
            "batch"
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
                f"the connector {function!r} made {found}{place} of {rows} samples: it is a function of a "
                "batch that gives arrays of as many rows; for objects, say what comes out with "
                "Function(fn, space=...)"
            )
    return space_like(given)
