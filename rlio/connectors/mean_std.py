"""`MeanStdFilter`: scales observations to mean 0 and standard deviation 1, by running statistics.

The statistics are Welford's, in float64, updated with whole batches (Chan, Golub and LeVeque, "Updating
formulae and a pairwise algorithm for computing sample variances", 1979). A separate buffer holds the
statistics since the last synchronisation, so several workers can merge their shares: each share is added
once.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box
    >>> here, there = MeanStdFilter(), MeanStdFilter()
    >>> for each in here, there:
    ...     _ = each.bind(Box(0.0, 9.0, (1,)))
    >>> here(np.array([[1.0], [3.0]])).ravel().tolist()
    [-0.70710..., 0.70710...]
    >>> there.apply_changes(here)
    >>> there.running_stats.n, float(there.running_stats.mean[0])
    (2, 2.0)
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from rlio.batch.nested import unflatten
from rlio.connectors.connector import Connector, Streams
from rlio.connectors.spaces import nested_space
from rlio.envs.leaves import Leaf, leaf_of, leaves_of
from rlio.errors import OptionError, SchemaError, StateError, excerpt
from rlio.reader import JsonState
from rlio.support.options import check_flag, check_number
from rlio.support.states import fitting, value_in, whole_number

if TYPE_CHECKING:
    import gymnasium as gym

    from rlio.policies.policy import Policy

__all__ = ["MeanStdFilter", "RunningStat"]

_STATISTICS = "running statistics"


class RunningStat:
    """Mean and variance of all finite values of one shape so far, in float64.

    A value with a number that is NaN or infinite is left out, because it would spoil the statistics for good.

    Args:
        shape: Shape of one value.

    Attributes:
        n: Number of finite values so far.
        mean: Their mean; zeros before the first value.
    """

    __slots__ = ("_m2", "mean", "n")

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.n: int = 0
        self.mean: NDArray[np.float64] = np.zeros(shape)
        #: Sum of squared differences from the mean.
        self._m2: NDArray[np.float64] = np.zeros(shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one value."""
        return self.mean.shape

    def push(self, value: Any) -> None:
        """Add one value."""
        self.update(RunningStat.of(np.asarray(value)[None], self.shape))

    @classmethod
    def of(cls, values: NDArray[Any], shape: tuple[int, ...]) -> Self:
        """The statistics of the finite ``values``, (N, *shape).

        Raises:
            SchemaError: The values have another shape.
        """
        if values.shape[1:] != shape:
            raise SchemaError(f"found values of shape {values.shape[1:]} for statistics of shape {shape}")
        made = cls(shape)
        exact = values.astype(np.float64)
        if not np.isfinite(exact).all():
            exact = exact[np.isfinite(exact).reshape(len(exact), -1).all(axis=1)]
        made.n = len(exact)
        if made.n:
            made.mean = np.asarray(exact.mean(axis=0))
            exact -= made.mean
            made._m2 = np.asarray(np.einsum("i...,i...->...", exact, exact))
        return made

    def update(self, other: RunningStat) -> None:
        """Add all values that ``other`` has seen.

        Raises:
            SchemaError: ``other`` has another shape.
        """
        if other.shape != self.shape:
            raise SchemaError(f"found statistics of shape {other.shape} for statistics of shape {self.shape}")
        if not other.n:
            return
        n = self.n + other.n
        delta = other.mean - self.mean
        self._m2 = self._m2 + other._m2 + delta * delta * (self.n * other.n / n)
        self.mean = self.mean + delta * (other.n / n)
        self.n = n

    @property
    def var(self) -> NDArray[np.float64]:
        """Sample variance (divided by n - 1); for a single value, as in RLlib, the square of its mean."""
        return self._m2 / (self.n - 1) if self.n > 1 else np.square(self.mean)

    @property
    def std(self) -> NDArray[np.float64]:
        """Square root of `var`."""
        return np.sqrt(self.var)

    def copy(self) -> RunningStat:
        """An independent copy."""
        made = RunningStat(self.shape)
        # Arrays are replaced, never changed.
        made.n, made.mean, made._m2 = self.n, self.mean, self._m2
        return made

    def state_dict(self) -> JsonState:
        """Return the statistics as exact JSON."""
        return {"n": self.n, "mean": self.mean.tolist(), "m2": self._m2.tolist()}

    @classmethod
    def from_state(cls, state: JsonState, shape: tuple[int, ...]) -> Self:
        """Rebuild statistics from `state_dict`.

        Raises:
            StateError: ``state`` is not such a state, or has another shape.
        """
        made = cls(shape)
        made.n = whole_number(state, "n", of=f"a state of {_STATISTICS}")
        made.mean, made._m2 = (_values_in(state, key, shape) for key in ("mean", "m2"))
        if (made._m2 < 0.0).any():
            raise StateError(f"the m2 of {_STATISTICS} is {excerpt(state['m2'])}: expected sums of squares")
        return made

    def __repr__(self) -> str:
        return f"RunningStat(n={self.n}, shape={self.shape})"


def _values_in(state: JsonState, key: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Numbers of saved statistics; text and None are none, though NumPy would convert them.

    Raises:
        StateError: They have another shape, or are no numbers.
    """
    with fitting(f"a state of {_STATISTICS}"):
        found = np.array(state[key])
        if found.shape != shape or not _are_numbers(state[key]):
            raise StateError(
                f"the {key} of {_STATISTICS} is {excerpt(state[key])}: expected shape {shape}, of numbers"
            )
        return found.astype(np.float64)


def _are_numbers(values: Any) -> bool:
    """Whether nested lists hold numbers only. NumPy would take a bool among floats."""
    return all(map(_are_numbers, values)) if isinstance(values, list) else type(values) in (int, float)


class MeanStdFilter(Connector):
    """Subtracts the running mean and divides by the running standard deviation, leaf by leaf.

    Every batch is added to the statistics before it is filtered; final observations are only filtered, and
    observations that are not finite are left out. Box
    leaves become float32; other leaves are unchanged. Thread-safe.

    Args:
        demean: Whether to subtract the mean.
        destd: Whether to divide by the standard deviation plus 1e-8.
        clip: Bound of the output; None: none.

    Attributes:
        update: Whether observations are added to the statistics; set it to False for evaluation.
    """

    _leaves: list[Leaf]

    def __init__(self, *, demean: bool = True, destd: bool = True, clip: float | None = 10.0) -> None:
        self.demean: bool = check_flag("demean", demean)
        self.destd: bool = check_flag("destd", destd)
        self.clip: float | None = check_number("clip", clip, above=0, none="no bound")
        self.update = True
        self._lock = threading.Lock()
        self._running: list[RunningStat] = []
        self._buffer: list[RunningStat] = []

    def bind(self, space: gym.Space[Any], policy: Policy | None = None) -> gym.Space[Any]:
        from gymnasium import spaces

        self._leaves = leaves_of(space)
        self._filtered = [isinstance(leaf.space, spaces.Box) for leaf in self._leaves]
        if not any(self._filtered):
            raise OptionError(f"MeanStdFilter is for Box spaces, but {excerpt(str(space))} has none")
        self._running = [RunningStat(shape) for shape in self._shapes()]
        self._buffer = [RunningStat(shape) for shape in self._shapes()]
        bound = np.inf if self.clip is None else self.clip
        made: list[gym.Space[Any]] = [
            spaces.Box(-bound, bound, leaf.shape, np.float32) if filtered else leaf.space
            for leaf, filtered in zip(self._leaves, self._filtered, strict=True)
        ]
        return nested_space(self._leaves, made)

    def _shapes(self) -> list[tuple[int, ...]]:
        return [leaf.shape for leaf, chosen in zip(self._leaves, self._filtered, strict=True) if chosen]

    # ---- filtering ----

    def __call__(self, values: Any, streams: Streams | None = None) -> Any:
        return self._each(values, self._add if self.update else self._stat)

    def final(self, values: Any, streams: Streams | None = None) -> Any:
        return self._each(values, self._stat)

    def _each(self, values: Any, stat_of: Callable[[int, NDArray[Any]], RunningStat]) -> Any:
        made, place = [], 0
        for leaf, filtered in zip(self._leaves, self._filtered, strict=True):
            part = leaf_of(values, leaf.path)
            if filtered:
                part = np.asarray(part)
                part = self._filter(part, stat_of(place, part))
                place += 1
            made.append(part)
        return unflatten([leaf.path for leaf in self._leaves], made)

    def _add(self, place: int, values: NDArray[Any]) -> RunningStat:
        """Add ``values`` and return a copy of the statistics."""
        seen = RunningStat.of(values, self._running[place].shape)
        with self._lock:
            self._running[place].update(seen)
            self._buffer[place].update(seen)
            return self._running[place].copy()

    def _stat(self, place: int, values: NDArray[Any]) -> RunningStat:
        with self._lock:
            return self._running[place].copy()

    def _filter(self, values: NDArray[Any], stat: RunningStat) -> NDArray[np.float32]:
        made = values.astype(np.float64)
        if self.demean:
            made -= stat.mean
        if self.destd:
            made /= stat.std + 1e-8
        if self.clip is not None:
            made.clip(-self.clip, self.clip, out=made)
        return made.astype(np.float32)

    # ---- synchronising ----

    @property
    def running_stats(self) -> Any:
        """A copy of the statistics, nested like the space, with None for leaves that are not filtered."""
        return self._nested(self._running)

    @property
    def buffer(self) -> Any:
        """Like `running_stats`, for the values since `reset_buffer`."""
        return self._nested(self._buffer)

    def _nested(self, stats: list[RunningStat]) -> Any:
        with self._lock:
            copies = iter([stat.copy() for stat in stats])
        made = [next(copies) if filtered else None for filtered in self._filtered]
        return unflatten([leaf.path for leaf in self._leaves], made)

    def apply_changes(self, other: MeanStdFilter, with_buffer: bool = False) -> None:
        """Add the values that ``other`` received since its buffer was reset.

        Args:
            other: A filter of the same space.
            with_buffer: Whether to copy its buffer too.
        """
        theirs = other._stats()[1]
        with self._lock:
            for mine, seen in zip(self._running, theirs, strict=True):
                mine.update(seen)
            if with_buffer:
                self._buffer = theirs

    def sync(self, other: MeanStdFilter) -> None:
        """Become equal to ``other``: options, statistics and buffer."""
        running, buffer = other._stats()
        if [stat.shape for stat in running] != [stat.shape for stat in self._running]:
            raise SchemaError("sync() needs a filter of the same space")
        with self._lock:
            self.demean, self.destd, self.clip = other.demean, other.destd, other.clip
            self._running, self._buffer = running, buffer

    def reset(self) -> None:
        """Drop all statistics."""
        with self._lock:
            self._running = [RunningStat(stat.shape) for stat in self._running]
            self._buffer = [RunningStat(stat.shape) for stat in self._buffer]

    def reset_buffer(self) -> None:
        """Empty the buffer; the statistics stay."""
        with self._lock:
            self._buffer = [RunningStat(stat.shape) for stat in self._buffer]

    def copy(self) -> MeanStdFilter:
        """An independent copy."""
        return copy.deepcopy(self)

    def _stats(self) -> tuple[list[RunningStat], list[RunningStat]]:
        with self._lock:
            return [stat.copy() for stat in self._running], [stat.copy() for stat in self._buffer]

    def __getstate__(self) -> dict[str, Any]:
        # A lock can be neither copied nor pickled.
        running, buffer = self._stats()
        return {k: v for k, v in vars(self).items() if k != "_lock"} | {
            "_running": running,
            "_buffer": buffer,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()

    def state_dict(self) -> JsonState:
        """Return statistics and buffer as JSON."""
        running, buffer = self._stats()
        return {
            "running": [stat.state_dict() for stat in running],
            "buffer": [stat.state_dict() for stat in buffer],
        }

    def load_state_dict(self, state: JsonState) -> None:
        shapes = [stat.shape for stat in self._running]
        loaded = []
        for key in ("running", "buffer"):
            stats = value_in(state, key, list, of="a filter's state")
            if len(stats) != len(shapes):
                raise StateError(
                    f"a filter's state needs {key!r}, statistics of {len(shapes)} leaves, but found "
                    f"{excerpt(stats)}"
                )
            loaded.append([RunningStat.from_state(s, shape) for s, shape in zip(stats, shapes, strict=True)])
        with self._lock:
            self._running, self._buffer = loaded
