"""What loops and clients give, as values of a space: copied in its dtypes, and refused if not in the space.

JSON and plain Python have lists where spaces have tuples and arrays, so both are accepted.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Dict, Discrete
    >>> value_of(Dict(at=Box(-1, 1, (2,)), gear=Discrete(3)), {"at": [0, 0.5], "gear": 2}, "obs")
    {'at': array([[0. , 0.5]], dtype=float32), 'gear': array([2])}
    >>> value_of(Box(-1, 1, (2,)), [0, 5], "obs")
    Traceback (most recent call last):
    ...
    rlio.errors.SchemaError: found 5.0 at index [1], but 'Box(-1.0, 1.0, (2,), float32)' expects numbers \
within its bounds [column obs]
    >>> finite_reward(np.array([0.5]))
    0.5
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.arrays import object_column
from rlio.batch.columns import Columns
from rlio.batch.copies import own_copy
from rlio.batch.nested import Path, map_structure, path_text
from rlio.batch.probabilities import read_log_probabilities
from rlio.envs.leaves import Leaf, leaves_of
from rlio.envs.values import as_reward, cast_whole, fitted, in_numpy
from rlio.errors import SchemaError, excerpt

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = [
    "OF_THE_CHOICE",
    "check_choice",
    "check_flag",
    "column_of",
    "finite_reward",
    "has_densities",
    "inside",
    "value_of",
]

#: These columns describe the policy's choice, so they are unknown for actions that the policy did not choose.
OF_THE_CHOICE: Final = (Columns.ACTION_LOGP, Columns.ACTION_PROB)
_GIVER: Final = "the loop"


def value_of(space: gym.Space[Any], value: Any, column: str, path: Path = ()) -> Any:
    """Copy one value of ``space`` into a batch of one, nested like the space.

    Args:
        space: The space; a part of it at ``path``.
        value: The value; lists and mappings are accepted for arrays, tuples and dicts.
        column: Name of the column, for messages.
        path: Where ``space`` is in the column's space.

    Returns:
        Arrays of shape (1, ...), of the dtypes of the space; object arrays for Text, Sequence, Graph and
        OneOf.

    Raises:
        SchemaError: The space does not contain the value; the message names the column and leaf.
    """
    match space:
        case spaces.Dict():
            if not isinstance(value, Mapping) or value.keys() != space.spaces.keys():
                found = f"the keys {list(value)}" if isinstance(value, Mapping) else excerpt(value)
                raise _misfit(found, f"a Dict space expects the keys {list(space.spaces)}", column, path)
            return {k: value_of(child, value[k], column, (*path, k)) for k, child in space.spaces.items()}
        case spaces.Tuple():
            if not _is_listed(value) or len(value) != len(space.spaces):
                raise _misfit(
                    excerpt(value), f"a Tuple space expects {len(space.spaces)} parts", column, path
                )
            parts = enumerate(zip(space.spaces, value, strict=True))
            return tuple(value_of(child, part, column, (*path, i)) for i, (child, part) in parts)
        case spaces.Box() | spaces.Discrete() | spaces.MultiDiscrete() | spaces.MultiBinary():
            return _array(space, value, column, path)[None]
    return object_column([_object(space, value, column, path)])


def _array(space: gym.Space[Any], value: Any, column: str, path: Path) -> NDArray[Any]:
    """Copy a leaf's value into its dtype."""
    leaf = Leaf(path, np.dtype(space.dtype), space.shape or (), space)
    made = np.array(fitted(leaf, value, column=column, giver=_GIVER))
    fits = inside(space, made)
    if not fits.all():
        at = np.unravel_index(int(fits.argmin()), fits.shape)
        where = f" at index {[int(i) for i in at]}" if at else ""
        expected = f"{excerpt(str(space))} expects numbers within its bounds"
        raise _misfit(f"{made[at]}{where}", expected, column, path)
    return made


def _array_of(value: Any) -> NDArray[Any]:
    """``value`` as an array; lists of different lengths, which are none, as an array of objects."""
    try:
        return in_numpy(value)
    except ValueError:
        return object_column(value)


def inside(space: gym.Space[Any], values: NDArray[Any]) -> NDArray[np.bool_]:
    """Mask of the numbers in ``values``, (..., *shape of the space), that a leaf's space contains.

    NaN is in no space. The bounds of a Box belong to it. All True for spaces of objects.
    """
    match space:
        case spaces.Box():
            found = (values >= space.low) & (values <= space.high)
        case spaces.Discrete() | spaces.MultiDiscrete():
            count = space.n if isinstance(space, spaces.Discrete) else space.nvec
            found = (values >= space.start) & (values - space.start < count)
        case spaces.MultiBinary():
            found = (values == 0) | (values == 1)
        case _:
            return np.ones(values.shape, bool)
    return np.asarray(found)


# ---- values that are objects ----


def _object(space: gym.Space[Any], value: Any, column: str, path: Path) -> Any:
    match space:
        case spaces.Sequence():
            return _sequence(space, value, column, path)
        case spaces.Graph():
            return _graph(space, value, column, path)
        case spaces.OneOf():
            return _one_of(space, value, column, path)
    if not space.contains(value):
        raise _misfit(excerpt(value), f"expected a value of {excerpt(str(space))}", column, path)
    return own_copy(value)


def _single(space: gym.Space[Any], value: Any, column: str, path: Path) -> Any:
    """`value_of` without the leading axis."""
    return map_structure(lambda leaf: leaf[0], value_of(space, value, column, path))


def _sequence(space: spaces.Sequence, value: Any, column: str, path: Path) -> Any:
    if space.stack:
        return _stacked(space.feature_space, value, column, path)
    if not _is_listed(value):
        raise _misfit(excerpt(value), f"{excerpt(str(space))} expects a tuple", column, path)
    return tuple(_single(space.feature_space, item, column, (*path, i)) for i, item in enumerate(value))


def _stacked(space: gym.Space[Any], value: Any, column: str, path: Path) -> Any:
    """Copy N values of ``space`` into arrays (N, ...), nested like the space."""
    children: Any = {}
    if isinstance(space, spaces.Dict):
        children = space.spaces
    elif isinstance(space, spaces.Tuple):
        children = dict(enumerate(space.spaces))
    if children:
        keys = value.keys() if isinstance(value, Mapping) else range(len(value) if _is_listed(value) else 0)
        if set(keys) != set(children):
            raise _misfit(excerpt(value), f"stacked values have the parts {list(children)}", column, path)
        made = {k: _stacked(child, value[k], column, (*path, k)) for k, child in children.items()}
        return made if isinstance(space, spaces.Dict) else tuple(made.values())
    if not _is_listed(value):
        raise _misfit(excerpt(value), f"expected a list of values of {excerpt(str(space))}", column, path)
    items = [_array(space, item, column, (*path, i)) for i, item in enumerate(value)]
    return np.stack(items) if items else np.zeros((0, *(space.shape or ())), space.dtype)


def _is_listed(value: Any) -> bool:
    return isinstance(value, (tuple, list)) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _graph(space: spaces.Graph, value: Any, column: str, path: Path) -> Any:
    expected = "a Graph expects (nodes, edges, edge_links), the last two None without edges"
    if not isinstance(value, (tuple, list)) or len(value) != 3 or (value[1] is None) != (value[2] is None):
        raise _misfit(excerpt(value), expected, column, path)
    nodes = _stacked(space.node_space, value[0], column, (*path, "nodes"))
    if value[1] is None:
        return spaces.GraphInstance(nodes, None, None)
    if space.edge_space is None:
        raise _misfit("edges", "the Graph space has none", column, path)
    edges = _stacked(space.edge_space, value[1], column, (*path, "edges"))
    links = _array_of(value[2])
    if not links.size:
        links = np.zeros((0, 2), np.int64)
    of_nodes = links.dtype.kind in "iu" and bool(((links >= 0) & (links < len(nodes))).all())
    if links.shape != (len(edges), 2) or not of_nodes:
        found = f"edge_links {excerpt(links.tolist())} for {len(nodes)} nodes and {len(edges)} edges"
        raise _misfit(found, "a Graph expects two numbers of nodes for each edge", column, path)
    return spaces.GraphInstance(nodes, edges, np.array(links))


def _one_of(space: spaces.OneOf[Any], value: Any, column: str, path: Path) -> Any:
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    index = value[0] if is_pair else None
    if (
        isinstance(index, bool)
        or not isinstance(index, (int, np.integer))
        or not 0 <= index < len(space.spaces)
    ):
        expected = f"a OneOf space expects (number below {len(space.spaces)}, value)"
        raise _misfit(excerpt(value), expected, column, path)
    return np.int64(index), _single(space.spaces[index], value[1], column, (*path, int(index)))


# ---- rewards and further columns ----


def finite_reward(reward: Any) -> float:
    """``reward`` as a number; arrays and tensors of shape () or (1,) are numbers.

    Raises:
        SchemaError: It is no finite number that float32 holds.
    """
    number = as_reward(reward, giver=_GIVER)
    if not math.isfinite(number):
        raise SchemaError(
            f"{_GIVER} gave the reward {excerpt(reward)}: expected a finite number", column=Columns.REWARDS
        )
    return number


def column_of(value: Any, like: NDArray[Any], column: str) -> NDArray[Any]:
    """Copy one row's value of a further column into its dtype.

    Args:
        value: The value.
        like: Rows of the column, (N, ...).
        column: Its name, for messages.

    Raises:
        SchemaError: The column cannot hold the value, or it is NaN.
    """
    expected = f"the policy has {like.dtype} {like.shape[1:]}"
    try:
        given = in_numpy(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise _misfit(excerpt(value), expected, column) from error
    is_alike = (given.dtype == bool) == (like.dtype == bool)
    made = cast_whole(given, like.dtype) if is_alike and given.shape == like.shape[1:] else None
    if made is None or (made.dtype.kind == "f" and np.isnan(made).any()):
        found = f"{given.dtype} {given.shape}: {excerpt(given.tolist())}"
        raise _misfit(found, f"{expected}, and no NaN", column)
    return np.array(made)


def check_flag(name: str, value: Any) -> None:
    """Refuse what is not a bool: the str "no" would count as True.

    Raises:
        SchemaError: It is not.
    """
    if not isinstance(value, bool | np.bool_):
        raise SchemaError(f"{name}={excerpt(value)}: expected True or False")


def check_choice(columns: Mapping[str, Any], space: gym.Space[Any]) -> None:
    """Check what a loop says of how likely a logged action was, with columns for one row.

    Raises:
        SchemaError: It is impossible, or the probability and its logarithm contradict each other.
    """
    rows = {name: _array_of(columns[name])[None] for name in OF_THE_CHOICE if name in columns}
    if rows:
        read_log_probabilities(SampleBatch(rows), densities=has_densities(space))


def has_densities(space: gym.Space[Any]) -> bool:
    """Whether likelihoods of actions of ``space`` may be above 1, as densities of floats may be."""
    return any(leaf.dtype.kind not in "iub" for leaf in leaves_of(space))


def _misfit(found: str, expected: str, column: str, path: Path = ()) -> SchemaError:
    return SchemaError(
        f"found {found}, but {expected}", column="/".join(filter(None, (column, path_text(path))))
    )
