"""`Ragged`: rows of different lengths as one array of their items, and where each row begins.

Columns of such rows (tokens, sets of objects, nodes of graphs) are object arrays with one array a row, so
that they are sliced, shuffled, joined and pickled like any other column. The rows of a shard are views of one
array, which `Ragged.of` finds again::

    batch["tokens"]:    [ array([5, 1, 7]) | array([2]) | array([]) ]
    Ragged.values:      [ 5   1   7   2 ]
    Ragged.offsets:     [ 0           3   4   4 ]

Example:
    >>> import numpy as np
    >>> from rlio.batch.arrays import object_column
    >>> tokens = Ragged.of(object_column([np.array([5, 1, 7]), np.array([2]), np.array([], int)]))
    >>> tokens.lengths.tolist()
    [3, 1, 0]
    >>> values, mask = tokens.to_padded()
    >>> values.tolist()
    [[5, 1, 7], [2, 0, 0], [0, 0, 0]]
    >>> mask.sum(axis=1).tolist()
    [3, 1, 0]
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args, overload

import numpy as np
from numpy.typing import NDArray

from rlio.errors import OptionError, SchemaError, excerpt
from rlio.support.options import check_choice, check_count

__all__ = ["Ragged", "item_type", "ragged_rows"]

#: Where rows are filled up.
Side: TypeAlias = Literal["left", "right"]


class Ragged:
    """Rows of different lengths: their items in one array.

    Args:
        values: Items of all rows, one row after the other, shape (n, *item).
        offsets: Where each row begins, and the end of the last, shape (rows + 1,), int64; the first is 0, the
            last is n.

    Attributes:
        values, offsets: The arguments. They are views of the rows where those lie one after the other in
            memory, as in a batch that was read in order; else copies.

    Raises:
        SchemaError: The offsets decrease, or do not span the values.
    """

    __slots__ = ("offsets", "values")

    def __init__(self, values: NDArray[Any], offsets: NDArray[np.int64]) -> None:
        if not isinstance(values, np.ndarray) or not values.ndim:
            raise SchemaError(f"values {excerpt(values)}: expected an array of shape (n, ...)")
        given = np.asarray(offsets)
        if given.ndim != 1 or (len(given) and given.dtype.kind not in "iu"):
            raise SchemaError(
                f"offsets {excerpt(offsets)}: expected whole numbers, as an array of shape (rows + 1,)"
            )
        self.values: NDArray[Any] = values
        self.offsets: NDArray[np.int64] = given.astype(np.int64, copy=False)
        if not len(self.offsets) or self.offsets[0] != 0 or self.offsets[-1] != len(values):
            raise SchemaError(
                f"offsets {excerpt(offsets)} of {len(values)} items: expected 0 to {len(values)}"
            )
        if (np.diff(self.offsets) < 0).any():
            raise SchemaError(
                f"offsets {excerpt(offsets)}: expected each at least as large as the one before"
            )

    @classmethod
    def of(cls, column: NDArray[Any]) -> Ragged:
        """The rows of a column.

        Args:
            column: Object array of shape (rows,): one array a row, of one dtype and of one shape but for the
                first axis.

        Raises:
            SchemaError: It has other rows; or no row, which leaves the dtype open.
        """
        is_column = isinstance(column, np.ndarray) and column.ndim
        found = _known(column) if is_column else None
        if found is None and is_column and len(column) and isinstance(column[0], np.ndarray):
            found = cls.joined(column, column[0].dtype, column[0].shape[1:])
        if found is None:
            raise SchemaError(
                f"found {_described(column)}, expected an object array with one array a row, of one dtype "
                "and of one shape but for the first axis"
            )
        return found

    @classmethod
    def joined(cls, column: NDArray[Any], dtype: np.dtype[Any], item: tuple[int, ...]) -> Ragged | None:
        """A copy of rows that are arrays of items of one dtype and shape; None: some are not."""
        rows: list[Any] = column.tolist() if column.dtype == object and column.ndim == 1 else [None]
        if not set(map(type, rows)) <= {np.ndarray}:
            return None
        if not rows:
            return cls(np.empty((0, *item), dtype), np.zeros(1, np.int64))
        try:
            values = np.concatenate(rows, dtype=dtype, casting="no")
        except (TypeError, ValueError):  # Of another dtype, or shape.
            return None
        return cls(values, _ends(rows)) if values.shape[1:] == item else None

    @classmethod
    def known(cls, column: NDArray[Any]) -> Ragged | None:
        """The rows of a column that was made of them, or of a slice of it, without a copy; else None."""
        return _known(column)

    @classmethod
    def taken(cls, parts: Sequence[Ragged], rows: NDArray[np.int64]) -> Ragged:
        """A copy of rows of several parts; rows that follow each other are copied at once.

        Args:
            parts: At least one; with items of one dtype and shape.
            rows: The rows, numbered through the parts. The number after the last stands for no items.
        """
        none = np.zeros(1, np.int64)
        begins = np.concatenate([none, np.cumsum([len(part) for part in parts])])
        part_of = np.searchsorted(begins, rows, side="right") - 1
        is_first = (np.diff(rows, prepend=-2) != 1) | (np.diff(part_of, prepend=-1) != 0)
        runs = np.split(rows, np.flatnonzero(is_first)[1:]) if len(rows) else []
        pieces = [parts[0].values[:0]]
        for run, number in zip(runs, part_of[is_first].tolist(), strict=True):
            if number < len(parts):
                ends = parts[number].offsets[run[[0, -1]] - begins[number] + (0, 1)]
                pieces.append(parts[number].values[ends[0] : ends[1]])
        lengths = np.concatenate([*(part.lengths for part in parts), none])
        return cls(np.concatenate(pieces), np.concatenate([none, np.cumsum(lengths[rows])]))

    @classmethod
    def from_padded(cls, values: NDArray[Any], mask: NDArray[np.bool_]) -> Ragged:
        """A copy of the items of padded rows: the inverse of `to_padded`.

        Args:
            values: Shape (rows, length, *item).
            mask: Shape (rows, length), bool: True where an item is, at any places of a row.

        Raises:
            SchemaError: The shapes do not fit, or the mask is not bool.
        """
        values, mask = np.asarray(values), np.asarray(mask)
        if mask.ndim != 2 or mask.dtype != bool or values.shape[:2] != mask.shape:
            raise SchemaError(
                f"found values of shape {values.shape} and a mask of {mask.dtype} and shape {mask.shape}, "
                "expected shapes (rows, length, ...) and (rows, length), and bool"
            )
        return cls(values[mask], np.cumsum([0, *mask.sum(axis=1)]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, key: int) -> NDArray[Any]: ...

    @overload
    def __getitem__(self, key: slice) -> Ragged: ...

    def __getitem__(self, key: int | slice) -> NDArray[Any] | Ragged:
        """The items of a row, or the rows of a slice without a step, as views.

        Raises:
            IndexError: There is no such row.
            OptionError: The key is something else.
        """
        if isinstance(key, slice) and key.step in (None, 1):
            start, stop, _ = key.indices(len(self))
            offsets = self.offsets[start : max(start, stop) + 1]
            return Ragged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])
        if isinstance(key, bool | np.bool_) or not isinstance(key, int | np.integer):
            raise OptionError(
                f"ragged[{excerpt(key)}]: expected the number of a row, or a slice without a step; for other "
                "rows, index the column: rlio.Ragged.of(batch[name][rows])"
            )
        if not -len(self) <= key < len(self):
            raise IndexError(f"no row {key} in a Ragged of {len(self)} rows")
        row = int(key) % len(self)
        found: NDArray[Any] = self.values[self.offsets[row] : self.offsets[row + 1]]
        return found

    def __iter__(self) -> Iterator[NDArray[Any]]:
        ends = self.offsets.tolist()
        return (self.values[start:stop] for start, stop in pairwise(ends))

    def __repr__(self) -> str:
        item = "".join(f", {n}" for n in self.values.shape[1:])
        return f"Ragged({len(self)} rows, {len(self.values)} items, {self.values.dtype}[n{item}])"

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Items of each row, shape (rows,)."""
        return np.diff(self.offsets)

    def to_padded(
        self, *, length: int | None = None, fill: Any = 0, side: Side = "right"
    ) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """The rows in one array, filled up at one side.

        Args:
            length: Items of each row; None: those of the longest.
            fill: The value beside the items of a row.
            side: Where it is: behind them ("right"), or before them ("left"), as for prompts to continue.

        Returns:
            (values, mask): shape (rows, length, *item), and (rows, length): True where an item is. The caller
            owns both.

        Raises:
            OptionError: A row has more items: cut it first; or the items cannot hold ``fill``.
        """
        lengths = self.lengths
        longest = int(lengths.max(initial=0))
        size = check_count("length", length, least=0, none="the longest row")
        size = longest if size is None else size
        if size < longest:
            row = int(lengths.argmax())
            raise OptionError(
                f"length={size}: row {row} has {longest} items; pass more, or cut the rows first"
            )
        check_choice("side", side, get_args(Side))
        mask = np.arange(size) < lengths[:, None]
        mask = mask if side == "right" else mask[:, ::-1].copy()
        shape = (len(self), size, *self.values.shape[1:])
        values = np.full(shape, _filled(fill, self.values.dtype), self.values.dtype)
        values[mask] = self.values
        return values, mask

    def to_torch(self) -> Any:
        """The rows as a nested tensor of torch (layout ``torch.jagged``), over the same memory."""
        import torch

        return torch.nested.nested_tensor_from_jagged(
            torch.from_numpy(self.values), torch.from_numpy(self.offsets)
        )

    def rows(self) -> NDArray[Any]:
        """The rows as a column: object array of views, shape (rows,)."""
        return ragged_rows(self)


class _Known(NamedTuple):
    """The items of a column that was made of them.

    Attributes:
        column: The column, which others may change.
        ragged: The items.
        rows: A copy of the column, whose addresses show whether a row was replaced. It holds the rows,
            because one that is gone leaves its address to the next array.
    """

    column: weakref.ref[NDArray[Any]]
    ragged: Ragged
    rows: NDArray[Any]


#: By the id of the column.
_KNOWN: Final[dict[int, _Known]] = {}


def ragged_rows(ragged: Ragged) -> NDArray[Any]:
    """See `Ragged.rows`; `Ragged.of` gives the items of the column, and of slices of it, without a copy."""
    values = ragged.values
    views = [values[start:stop] for start, stop in pairwise(ragged.offsets.tolist())]
    column = np.fromiter(views, dtype=object, count=len(views))
    key = id(column)
    _KNOWN[key] = _Known(weakref.ref(column, lambda _: _KNOWN.pop(key, None)), ragged, column.copy())
    return column


def _addresses(column: NDArray[Any]) -> NDArray[np.intp]:
    """The addresses of the objects in a contiguous object array, as a view."""
    return np.frombuffer(column, np.intp) if len(column) else np.empty(0, np.intp)


def _start(array: Any) -> int:
    """The address of an array."""
    start: int = array.__array_interface__["data"][0]
    return start


def _known(column: NDArray[Any]) -> Ragged | None:
    """The items of rows that are one after the other, without a copy; None: they are not known."""
    owner: Any = column
    if id(column) not in _KNOWN:
        owner = column.base
    found = _KNOWN.get(id(owner))
    if found is None or owner is not found.column() or not column.flags.c_contiguous or column.ndim != 1:
        return None
    first = (_start(column) - _start(owner)) // column.itemsize
    rows = found.rows[first : first + len(column)]
    if not np.array_equal(_addresses(column), _addresses(rows)):
        return None
    offsets = found.ragged.offsets[first : first + len(column) + 1]
    return Ragged(found.ragged.values[offsets[0] : offsets[-1]], offsets - offsets[0])


def _filled(fill: Any, dtype: np.dtype[Any]) -> Any:
    """A value as an item of a dtype.

    Raises:
        OptionError: It is another value there: NaN, fractions and large numbers among whole numbers, and
            among floats what is no number, or becomes infinite.
    """
    try:
        with np.errstate(all="ignore"):
            found = np.asarray(fill).astype(dtype)
        # A float is rounded, but not to infinity.
        is_number = isinstance(fill, (int, float, np.number)) and not isinstance(fill, bool)
        rounds = dtype.kind == "f" and is_number and bool(np.isinf(found) == np.isinf(fill))
        if rounds or (dtype.kind != "f" and np.all(found == fill)):
            return found
    except (TypeError, ValueError, OverflowError):
        pass  # Refused below.
    raise OptionError(f"fill={excerpt(fill)}: items of {dtype} do not hold it; pass another value")


def _ends(rows: list[NDArray[Any]]) -> NDArray[np.int64]:
    ends = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), out=ends[1:])
    return ends


def item_type(column: NDArray[Any]) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """Dtype and shape of an item, if all rows of an object array are arrays of such items; else None."""
    if column.dtype != object or column.ndim != 1 or not len(column):
        return None
    rows = column.tolist()
    if not all(type(row) is np.ndarray and row.ndim for row in rows):
        return None
    kinds = {(row.dtype, row.shape[1:]) for row in rows}
    return kinds.pop() if len(kinds) == 1 else None


def _described(column: NDArray[Any]) -> str:
    if not isinstance(column, np.ndarray) or column.dtype != object or column.ndim != 1:
        return excerpt(column)
    kinds = {
        f"{row.dtype} of shape {row.shape}" if isinstance(row, np.ndarray) else type(row).__name__
        for row in column.tolist()
    }
    return f"rows that are {excerpt(', '.join(sorted(kinds)), 160)}" if kinds else "no rows"
