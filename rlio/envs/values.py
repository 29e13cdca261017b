"""One check for every value of a step: observations, actions, rewards and flags.

All recorders and runners, and the check of a first step, accept the same values. A value that would change
when it is stored is refused: a float in an integer space, 300 in int8, 1e300 in float32, None as a reward.

Example:
    >>> import gymnasium as gym
    >>> from rlio.envs.leaves import leaves_of
    >>> (leaf,) = leaves_of(gym.spaces.Box(-128, 127, (2,), np.int8))
    >>> fitted(leaf, [1, -2], column="obs", giver="the environment").dtype
    dtype('int8')
    >>> fitted(leaf, [1, 300], column="obs", giver="the environment")
    Traceback (most recent call last):
    ...
    rlio.errors.SchemaError: the environment gave [1, 300], which int8 cannot hold: expected int8 (2,), ...
    >>> as_reward(np.array([1.5]), giver="the environment")
    1.5
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import is_tensor, object_column
from rlio.batch.columns import Columns
from rlio.batch.copies import own_copy
from rlio.batch.nested import path_text, unflatten
from rlio.envs.leaves import Leaf, leaf_of
from rlio.errors import SchemaError, excerpt

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "MOST_REWARD",
    "as_flag",
    "as_flags",
    "as_info",
    "as_reward",
    "as_rewards",
    "as_text",
    "cast_whole",
    "fitted",
    "has_true",
    "in_numpy",
    "is_plain",
    "on_host",
    "own_leaves",
    "text_column",
]

#: Batches hold rewards as float32, which learners compute in.
MOST_REWARD: Final = float(np.finfo(np.float32).max)
# With this factor, no square of a float64 overflows.
_SCALE: Final = 1e-160
# Up to so many numbers, Python's min and max are faster than NumPy's.
_FEW: Final = 64
_MOST_SQUARE: Final = (MOST_REWARD * _SCALE) ** 2
_OBJECT: Final = np.dtype(object)
_BOOL: Final = np.dtype(bool)
_NUMBERS: Final = (float, int, np.floating, np.integer, np.bool_)


def in_numpy(value: Any) -> NDArray[Any]:
    """``value`` as an array; tensors may be on any device, which copies them to the host once.

    Raises:
        ValueError, TypeError, RuntimeError: ``value`` is not an array.
    """
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("a masked array: which numbers stand for the masked ones is unknown")
    return np.asarray(value.detach().cpu() if is_tensor(value) else value)


def as_text(value: Any) -> Any:
    """A copy of a text, of bytes, or of a list, tuple or array of texts; None: it is no such value.

    They are kept as objects: a buffer of the dtype of the first text would cut longer ones.
    """
    kind = type(value)
    if kind is str or kind is bytes:
        return value
    if isinstance(value, np.str_ | np.bytes_):
        return value.item()
    if kind is np.ndarray and value.dtype.kind in "US":
        return value.copy() if value.ndim else value.item()
    return value[:] if kind in (list, tuple) and {*map(type, value)} <= {str} else None


def text_column(values: Any) -> NDArray[Any] | None:
    """Rows that `as_text` takes, as objects, shape (rows,); None: they are something else."""
    is_listed = type(values) in (list, tuple) or (type(values) is np.ndarray and values.ndim > 0)
    if not is_listed or not len(values):
        return None
    rows = [as_text(value) for value in values]
    return None if any(row is None for row in rows) else object_column(rows)


def fitted(leaf: Leaf, value: Any, *, column: str, giver: str, rows: int | None = None) -> Any:
    """``value`` as an array of the leaf's shape and dtype.

    Whole numbers fit any whole type that holds them. Other numbers fit a type of the same kind, if finite
    ones stay finite there: float64 fits float32 but not uint8.

    Args:
        leaf: A leaf of a space.
        value: One value, or a batch of them; an array, a tensor, a number or a list.
        column: Name of the column, for messages.
        giver: Who gave the value, for messages.
        rows: Number of values in a batch; None for one value.

    Returns:
        An array of ``leaf.dtype``, (*leaf.shape) or (rows, *leaf.shape), which may be ``value`` itself. The
        values of leaves that are objects are returned as they are.

    Raises:
        SchemaError: The value does not fit.
    """
    dtype = leaf.dtype
    shape = leaf.shape if rows is None else (rows, *leaf.shape)
    # The usual case first. NumPy has one object for each builtin dtype, and one for objects.
    if type(value) is np.ndarray and value.dtype is dtype and value.shape == shape and dtype is not _OBJECT:
        return value
    if leaf.is_object:
        return _fitted_objects(leaf, value, column=column, giver=giver, rows=rows)
    try:
        given = in_numpy(value)
    except (ValueError, TypeError, RuntimeError) as error:
        found = f"{excerpt(value)}, which is not an array ({error})"
        raise _misfit(leaf, found, shape, column, giver) from error
    if given.dtype == leaf.dtype and given.shape == shape:
        return given
    made = cast_whole(given, leaf.dtype) if given.shape == shape else None
    if made is not None:
        return made
    if given.dtype == object:
        found = excerpt(value)
    elif given.shape == shape and _is_alike(given.dtype, leaf.dtype):
        found = f"{excerpt(given.tolist())}, which {leaf.dtype} cannot hold"
    else:
        found = f"{given.dtype} {given.shape}"
    raise _misfit(leaf, found, shape, column, giver)


def cast_whole(given: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """``given`` in ``dtype``; None if a number would change in kind, wrap, or become infinite.

    Lists of Python numbers are int64 and float64: smaller dtypes are accepted if they hold the values.
    """
    if given.dtype == dtype:
        return given
    if not _is_alike(given.dtype, dtype):
        return None
    whole = given.dtype.kind in "iu"
    try:
        with np.errstate(over="raise"):
            made = given.astype(dtype)
    except FloatingPointError:
        return None
    return None if whole and dtype.kind in "iu" and not np.array_equal(made, given) else made


def _is_alike(given: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """Whether numbers of one dtype may be numbers of the other."""
    whole = given.kind in "iu" and dtype.kind in "iu"
    return given.kind != "O" and (whole or np.can_cast(given, dtype, "same_kind"))


def _fitted_objects(leaf: Leaf, value: Any, *, column: str, giver: str, rows: int | None) -> Any:
    from gymnasium.spaces import Text

    if rows is not None and len(value) != rows:
        raise SchemaError(f"{giver} gave {len(value)} values: expected {rows}", column=_name(column, leaf))
    if isinstance(leaf.space, Text):
        for text in (value,) if rows is None else value:
            if not isinstance(text, str):
                raise SchemaError(
                    f"{giver} gave {excerpt(text)}: expected a str of {excerpt(str(leaf.space))}",
                    column=_name(column, leaf),
                )
    return value


def _misfit(leaf: Leaf, found: str, shape: tuple[int, ...], column: str, giver: str) -> SchemaError:
    return SchemaError(
        f"{giver} gave {found}: expected {leaf.dtype} {shape}, as its space says, {excerpt(str(leaf.space))}",
        column=_name(column, leaf),
    )


def _name(column: str, leaf: Leaf) -> str:
    return "/".join(filter(None, (column, path_text(leaf.path))))


def is_plain(leaves: Sequence[Leaf], values: Any, shape: tuple[int, ...]) -> bool:
    """Whether ``values`` need no `fitted`, as usual: an array of ``shape`` for a space that is one array."""
    dtype = leaves[0].dtype
    return (
        type(values) is np.ndarray
        and values.dtype is dtype
        and values.shape == shape
        and not leaves[0].path
        and dtype is not _OBJECT
    )


def own_leaves(leaves: Sequence[Leaf], obs: Any, *, giver: str) -> list[Any]:
    """Checked copies of the ``leaves`` of one observation, because environments reuse their arrays.

    Raises:
        SchemaError: The observation does not fit its space.
    """
    if leaves and is_plain(leaves, obs, leaves[0].shape):
        return [obs.copy()]
    return [
        own_copy(fitted(leaf, leaf_of(obs, leaf.path), column=Columns.OBS, giver=giver)) for leaf in leaves
    ]


def on_host(leaves: Sequence[Leaf], values: Any) -> Any:
    """A batch with NumPy arrays for the tensors or arrays of a device; itself if it has none.

    Args:
        leaves: The leaves of the space of one value.
        values: The batch, nested as the space.
    """
    if type(values) is np.ndarray:
        return values
    parts = [leaf_of(values, leaf.path) for leaf in leaves]
    if all(leaf.is_object or type(part) is np.ndarray for leaf, part in zip(leaves, parts, strict=True)):
        return values
    found = [part if leaf.is_object else in_numpy(part) for leaf, part in zip(leaves, parts, strict=True)]
    return found[0] if not leaves[0].path else unflatten([leaf.path for leaf in leaves], found)


# ---- rewards, flags, infos ----


def as_reward(value: Any, *, giver: str) -> float:
    """One reward. An array or tensor of shape () or (1,) is a number, too.

    Raises:
        SchemaError: ``value`` is not a number, or is finite but beyond float32.
    """
    if isinstance(value, float):  # As np.float64 is, which most environments give.
        number = float(value)
        if -MOST_REWARD <= number <= MOST_REWARD:
            return number
    try:
        number = float(value) if isinstance(value, _NUMBERS) else _number(value)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise _not_a_reward(value, giver) from error
    if abs(number) > MOST_REWARD and not math.isinf(number):
        raise _not_a_reward(value, giver)
    return number


def _number(value: Any) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError("a text")
    array = in_numpy(value)
    if array.shape not in ((), (1,)):
        raise ValueError("not one number")
    item = array.item()
    if isinstance(item, (str, bytes)):
        raise TypeError("a text")
    return float(item)


def _not_a_reward(value: Any, giver: str) -> SchemaError:
    return SchemaError(
        f"{giver} gave the reward {excerpt(value)}: expected a number that float32 holds",
        column=Columns.REWARDS,
    )


def as_rewards(values: Any, rows: int, *, giver: str) -> NDArray[Any]:
    """The rewards of N environments, (N,), from (N,) or (N, 1) numbers.

    Raises:
        SchemaError: They are not numbers, or not one for each environment.
    """
    is_usual = type(values) is np.ndarray and values.shape == (rows,)
    found = values if is_usual else _column(values, rows)
    if found is not None and found.dtype.kind in "biuf":
        if found.dtype != np.float64:
            return found
        if rows <= _FEW:
            listed = found.tolist()
            if min(listed) >= -MOST_REWARD and max(listed) <= MOST_REWARD:
                return found
        else:
            # No reward is beyond float32 if the sum of all squares is not: one product, at each step.
            scaled = found * _SCALE
            if scaled.dot(scaled) <= _MOST_SQUARE:
                return found
        if np.all((np.abs(found) <= MOST_REWARD) | ~np.isfinite(found)):
            return found
    raise SchemaError(
        f"{giver} gave the rewards {excerpt(values)}: expected {rows} numbers that float32 holds",
        column=Columns.REWARDS,
    )


def has_true(mask: NDArray[np.bool_]) -> bool:
    """Whether one of a few flags is True: `numpy.any` takes ten times as long, at each step."""
    return 1 in mask.tobytes()


def as_flag(value: Any, *, column: str, giver: str) -> bool:
    """A flag: True, False, or an array or number that is 0 or 1.

    Raises:
        SchemaError: ``value`` is something else.
    """
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    try:
        values = in_numpy(value).reshape(-1)
    except (ValueError, TypeError, RuntimeError):
        values = np.empty(0)
    if values.dtype.kind not in "biuf" or values.tolist() not in ([0], [1]):
        raise SchemaError(f"{giver} gave {excerpt(value)}: expected True or False", column=column)
    return bool(values[0])


def as_flags(values: Any, rows: int, *, column: str, giver: str) -> NDArray[np.bool_]:
    """The flags of N environments, (N,) bool, from (N,) or (N, 1) values that are True, False, 0 or 1.

    Raises:
        SchemaError: They are something else, or not one for each environment.
    """
    if type(values) is np.ndarray and values.dtype is _BOOL and values.shape == (rows,):
        return values
    found = _column(values, rows)
    if found is not None and found.dtype == bool:
        return found
    if found is not None and found.dtype.kind in "iuf" and np.all((found == 0) | (found == 1)):
        return found.astype(bool)
    raise SchemaError(f"{giver} gave {excerpt(values)}: expected {rows} of True and False", column=column)


def _column(values: Any, rows: int) -> NDArray[Any] | None:
    """(rows,) values; None if ``values`` are not an array of one value a row."""
    try:
        found = in_numpy(values)
    except (ValueError, TypeError, RuntimeError):
        return None
    if found.shape == (rows,):
        return found
    return found.reshape(rows) if found.shape == (rows, 1) else None


def as_info(value: Any, *, giver: str) -> dict[str, Any]:
    """A copy of an info, at any depth.

    Raises:
        SchemaError: ``value`` is not a dict, or contains itself.
    """
    if not isinstance(value, dict):
        raise SchemaError(f"{giver} gave the info {excerpt(value)}: expected a dict", column=Columns.INFOS)
    made: dict[str, Any] = own_copy(value)
    return made
