"""One stored column: the type of its values in memory, and their form in a file.

`rlio.schemas.schema` has the columns of a data set, and `rlio.schemas.arrow` the conversion to Arrow.

Example:
    >>> import numpy as np
    >>> ColumnSpec.of(np.zeros((5, 17), np.float32))
    ColumnSpec(dtype='<f4', shape=(17,), kind='list', stack=None, codec=None, items=None, structure=None)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from rlio.batch.encoded_picture import CODECS, Codec, EncodedPicture, is_encoded
from rlio.batch.ragged import Ragged, item_type
from rlio.errors import CorruptData, SchemaError, excerpt
from rlio.schemas.dtypes import is_stored, stored_dtype
from rlio.schemas.structure import PARQUET_TYPES, Structure, is_structured, structure_of

__all__ = ["TEXTS", "ColumnSpec", "FrameStack", "Kind", "Nullable", "object_rows"]

#: ``scalar``: one Parquet value per row; ``list``: a Parquet list, which SQL engines can index; ``bytes``:
#: the row's array as fixed-length bytes; ``picture``: the row's array as a PNG or JPEG file; ``text``: one
#: string per row; ``ragged``: a Parquet list of any length; ``nested``: lists and structs of a `Structure`;
#: ``time``: a date, a timestamp, or a number of units; ``json``: any object as JSON text; ``none``: no
#: bytes at all, for zero-sized shapes; ``mask``: which rows have a value in another column, as its nulls.
Kind: TypeAlias = Literal[
    "scalar", "list", "bytes", "time", "picture", "text", "ragged", "nested", "json", "none", "mask"
]

#: Kinds whose values have no fixed size.
TEXTS = ("text", "ragged", "nested", "json")

#: Values of some rows: the values as one array, and which rows have one (None: all).
Nullable: TypeAlias = tuple[NDArray[Any], NDArray[np.bool_] | None]

# Each value of a list costs a repetition level (about 4 ns), so wide rows are stored as bytes. One- and
# two-byte values are widened to four in a list, so their limit is lower.
_LIST_LIMIT = 512
_NARROW_LIST_LIMIT = 16
_MAX_NDIM = 32
_MAX_ROW_BYTES = 256 << 20
_PICTURE_CHANNELS = ((), (1,), (3,), (4,))
#: Units of `numpy.datetime64` -> how many make one unit of the Parquet type.
_PER_STORED: Final = {"D": 1, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1, "us": 1, "ns": 1}


@dataclass(frozen=True)
class FrameStack:
    """A stack of frames along an axis of the row: consecutive rows share all but the newest frame."""

    axis: int
    depth: int


@dataclass(frozen=True)
class ColumnSpec:
    """Type of one stored column (of a leaf, if the column is nested).

    Attributes:
        dtype: NumPy's ``dtype.str``, with byte order; ``"<U"`` and ``"|S"`` without a width, because the
            width depends on the batch.
        shape: Shape of one row.
        kind: The stored form.
        stack: Set if only the newest frame of each row is stored.
        codec: Of the kind ``picture``: how pictures are encoded; ``dtype`` and ``shape`` are those of their
            values.
        items: Of the kind ``ragged``: the spec of one item of a row; ``dtype`` and ``shape`` are those of
            objects, one a row.
        structure: Of the kind ``nested``: that of the rows.
    """

    dtype: str
    shape: tuple[int, ...]
    kind: Kind
    stack: FrameStack | None = None
    codec: Codec | None = None
    items: ColumnSpec | None = None
    structure: Structure | None = None

    @classmethod
    def of(
        cls,
        values: NDArray[Any],
        *,
        column: str = "",
        codec: Codec | None = None,
        expected: Structure | None = None,
    ) -> ColumnSpec:
        """Infer the spec of an array whose first axis is the rows.

        Args:
            values: The array.
            column: Its name, for messages.
            codec: How to encode its pictures; None: they are not encoded.
            expected: What its space says of a row, which decides if the rows fit it.

        Raises:
            SchemaError: The dtype has no stored form (structured dtypes), or a row is too large for one; or
                they are no pictures, and ``codec`` is given.
        """
        dtype, shape = values.dtype, tuple(int(n) for n in values.shape[1:])
        if codec is not None or is_encoded(values):
            return cls._of_pictures(values, column, codec)
        if dtype.kind == "O":
            if shape:
                raise SchemaError(f"object arrays have one axis; found shape {values.shape}", column=column)
            return cls._of_objects(values, expected)
        if dtype.kind in "US":
            if shape:
                raise SchemaError(f"text arrays have one axis; found shape {values.shape}", column=column)
            return cls(dtype.str[:2], (), "text")
        if not is_stored(dtype):
            how = "split it into one column per field" if dtype.names else "cast it to a dtype of NumPy's own"
            raise SchemaError(f"dtype {dtype} cannot be stored; {how}", column=column)
        spec = cls(dtype.str, shape, _fixed_kind(dtype, shape))
        if not spec._is_legal():
            raise SchemaError(
                f"rows of shape {shape} and dtype {dtype}: a row has at most {_MAX_NDIM} axes and "
                f"{_MAX_ROW_BYTES >> 20} MiB; split the column, or store a reference to it",
                column=column,
            )
        return spec

    @classmethod
    def _of_objects(cls, values: NDArray[Any], expected: Structure | None) -> ColumnSpec:
        if (items := cls._items_of(values)) is not None:
            return cls("|O", (), "ragged", items=items)
        if len(values) > 0 and all(type(value) is str for value in values):
            return cls("|O", (), "text")
        structure = None
        if expected is not None and _fits(values, expected):
            structure = expected
        elif all(map(is_structured, values)):
            structure = structure_of(values)
        return cls("|O", (), "json" if structure is None else "nested", structure=structure)

    @classmethod
    def _items_of(cls, values: NDArray[Any]) -> ColumnSpec | None:
        """The spec of the items, if each row is an array of them; None: rows are something else."""
        found = item_type(values)
        if found is None or found[0].str[1:] not in PARQUET_TYPES:
            return None
        spec = cls(found[0].str, found[1], _fixed_kind(*found))
        return spec if spec.kind != "none" and spec._is_legal() else None

    @classmethod
    def _of_pictures(cls, values: NDArray[Any], column: str, codec: Codec | None) -> ColumnSpec:
        dtype, shape = values.dtype, values.shape[1:]
        if is_encoded(values):
            first: EncodedPicture = values[0]
            if codec not in (None, first.codec):
                raise SchemaError(f"found pictures that are {first.codec}, expected {codec}", column=column)
            dtype, shape, codec = np.dtype(np.uint8), first.shape, first.codec
        spec = cls(dtype.str, tuple(int(n) for n in shape), "picture", codec=codec)
        if not spec._is_legal():
            raise SchemaError(
                f"found {dtype} of shape {shape} a row, expected pictures: uint8 of shape (height, width) or "
                f"(height, width, channels), with 1, 3 or 4 channels, of at most {_MAX_ROW_BYTES >> 20} MiB",
                column=column,
            )
        return spec

    @property
    def numpy(self) -> np.dtype[Any]:
        """The in-memory dtype."""
        return stored_dtype(self.dtype)

    @property
    def native(self) -> np.dtype[Any]:
        """The dtype in this machine's byte order, as Arrow holds it."""
        return self.numpy.newbyteorder("=")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory; an estimate of 64 for text and objects."""
        if self.kind in TEXTS:
            return 64
        return self.size * self.numpy.itemsize

    @property
    def size(self) -> int:
        """Number of values in a row."""
        return math.prod(self.shape)

    @property
    def decoded(self) -> ColumnSpec:
        """The spec of the values of pictures; itself if it has none."""
        if self.kind != "picture":
            return self
        return ColumnSpec(self.dtype, self.shape, _fixed_kind(self.numpy, self.shape))

    @property
    def in_groups(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Dtype, and shape of a row, of values in a row group that is collected: objects are one a row."""
        if self.kind == "picture":
            return np.dtype(object), ()
        return np.dtype(object) if self.kind == "text" else self.numpy, self.shape

    def joined(self, values: NDArray[Any], missing: NDArray[np.bool_] | None = None) -> NDArray[Any] | None:
        """A copy of the rows of a ragged or nested column; None: they do not fit, or it is no such column.

        ``missing``: rows that get no items, whatever they hold.
        """
        if self.structure is not None:
            return self._taken(values, self.structure, missing)
        if self.items is None:
            return None
        dtype, shape = self.items.numpy, self.items.shape
        if missing is not None and missing.any() and values.dtype == object:
            values = values.copy()
            values[missing] = object_rows([np.empty((0, *shape), dtype)] * int(missing.sum()))
        if values.ndim > 1 and (values.dtype, values.shape[2:]) == (dtype, shape):
            values = object_rows(values)  # They have one length, and are one array.
        found = Ragged.joined(values, dtype, shape)
        return None if found is None else found.rows()

    def _taken(
        self, values: NDArray[Any], structure: Structure, missing: NDArray[np.bool_] | None
    ) -> NDArray[Any] | None:
        if values.dtype != object or values.ndim != 1:
            return None
        given = values.tolist()
        if missing is not None:
            given = [structure.blank() if lost else row for row, lost in zip(given, missing, strict=True)]
        try:
            return object_rows([structure.taken(row) for row in given])
        except ValueError:
            return None  # `mismatch` says why.

    @property
    def empty_row(self) -> Any:
        """A row of a ragged or nested column that has no items."""
        if self.structure is not None:
            return self.structure.blank()
        assert self.items is not None
        return np.empty((0, *self.items.shape), self.items.numpy)

    def mismatch(self, values: NDArray[Any]) -> str | None:
        """Return the problem with ``values`` for this column, or None."""
        dtype = values.dtype
        if self.kind == "picture":
            return self._unlike_picture(values)
        if is_encoded(values):
            return f"encoded pictures, but the column has {self.dtype}"
        found = dtype.str[:2] if dtype.kind in "US" else dtype.str
        if found != self.dtype:
            return f"dtype {dtype}, but the column has {self.dtype}"
        if values.shape[1:] != self.shape:
            return f"rows of shape {values.shape[1:]}, but the column has {self.shape}"
        if self.kind == "text" and dtype.kind == "O" and not all(type(v) is str for v in values):
            return "objects, but the column has only strings"
        if self.kind == "time" and dtype.kind == "M":
            return self._beyond(values)
        if self.structure is not None:
            return _unlike_structure(values, self.structure)
        return None if self.items is None else self._unlike_items(values, self.items)

    def _unlike_items(self, values: NDArray[Any], items: ColumnSpec) -> str | None:
        expected = f"{items.dtype} of shape {('n', *items.shape)}".replace("'", "")
        for row, value in enumerate(values.tolist()):
            if type(value) is not np.ndarray:
                return f"{type(value).__name__} in row {row}, but the column has arrays, {expected}"
            if value.dtype != items.numpy or value.ndim == 0 or value.shape[1:] != items.shape:
                return f"{value.dtype.str} of shape {value.shape} in row {row}, but the column has {expected}"
        return None

    @property
    def time_unit(self) -> tuple[str, int]:
        """Unit of stored dates or timestamps (``D``, ``ms``, ``us``, ``ns``), and how many one value is."""
        unit = np.datetime_data(self.numpy)[0]
        return unit if unit in ("D", "ms", "us", "ns") else "ms", _PER_STORED[unit]

    def _beyond(self, values: NDArray[Any]) -> str | None:
        unit, factor = self.time_unit
        most = np.iinfo(np.int32 if unit == "D" else np.int64).max // factor
        counts = np.where(np.isnat(values), 0, values.astype(np.int64))
        far = values[(counts > most) | (counts < -most)]
        return f"{far[0]}, which is too far from 1970 for the dates of files" if len(far) else None

    def _unlike_picture(self, values: NDArray[Any]) -> str | None:
        for row, value in enumerate(values.tolist()):
            if not isinstance(value, EncodedPicture):
                return f"{type(value).__name__} in row {row}, but the column has pictures"
            if (value.codec, value.shape) != (self.codec, self.shape):
                return (
                    f"a {value.codec} of shape {value.shape} in row {row}, but the column has {self.codec} "
                    f"of shape {self.shape}"
                )
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the written form; see docs/format.md."""
        written: dict[str, Any] = {"dtype": self.dtype, "shape": list(self.shape), "kind": self.kind}
        if self.stack is not None:
            written["stack"] = {"axis": self.stack.axis, "depth": self.stack.depth}
        if self.codec is not None:
            written["picture"] = {"codec": self.codec, "lossless": CODECS[self.codec]}
        if self.items is not None:
            written["items"] = self.items.to_json()
        if self.structure is not None:
            written["structure"] = self.structure.to_json()
        return written

    @classmethod
    def from_json(cls, written: Any, *, column: str, uri: str | None = None) -> ColumnSpec:
        """Parse the written form, which may be hostile."""
        try:
            dtype, shape, kind = written["dtype"], tuple(written["shape"]), written["kind"]
            if kind not in get_args(Kind):
                raise CorruptData(
                    f"found the unknown kind {excerpt(kind)} of a column: upgrade rlio",
                    uri=uri,
                    column=column,
                )
            stack = FrameStack(**written["stack"]) if "stack" in written else None
            codec = written["picture"]["codec"] if "picture" in written else None
            items = written.get("items")
            if items is not None:
                items = cls.from_json(items, column=column, uri=uri)
            structure = Structure.from_json(written["structure"]) if "structure" in written else None
            spec = cls(dtype, shape, kind, stack, codec, items, structure)
            legal = spec._is_legal()
        except (TypeError, KeyError, ValueError) as error:
            raise CorruptData(
                f"not a column description: {error!r}; see docs/format.md", uri=uri, column=column
            ) from error
        if not legal:
            raise CorruptData(f"illegal column description {spec!r}", uri=uri, column=column)
        return spec

    def _is_legal(self) -> bool:
        """Whether the parts fit each other and the limits for hostile data."""
        if len(self.shape) > _MAX_NDIM or not all(type(n) is int and n >= 0 for n in self.shape):
            return False
        if (self.kind == "ragged") != (self.items is not None):
            return False
        if (self.kind == "nested") != (self.structure is not None) or (self.structure and self.dtype != "|O"):
            return False
        if self.items is not None and (
            self.dtype != "|O" or self.items.kind not in ("scalar", "list", "bytes") or self.items.stack
        ):
            return False
        if self.kind == "mask":
            return (self.dtype, self.shape, self.stack, self.codec) == ("|b1", (), None, None)
        if self.kind in TEXTS:
            return self.shape == () and self.dtype in ("|O", "<U", ">U", "|S") and self.stack is None
        dtype = self.numpy
        if (self.kind == "picture") != (self.codec is not None):
            return False
        if self.codec is not None and (
            self.codec not in CODECS
            or self.dtype != "|u1"
            or 0 in self.shape
            or len(self.shape) < 2
            or self.shape[2:] not in (_PICTURE_CHANNELS if self.codec != "video" else ((3,),))
            or self.stack is not None
        ):
            return False
        # Without zeros: NumPy itself refuses an empty array of absurd shape.
        nominal = math.prod(n for n in self.shape if n) * dtype.itemsize
        if dtype.kind not in "biufcmM" or dtype.str != self.dtype or nominal > _MAX_ROW_BYTES:
            return False
        if self.stack is not None:
            axis, depth = self.stack.axis, self.stack.depth
            if axis not in (0, len(self.shape) - 1) or depth < 2 or self.shape[axis] != depth:
                return False
        is_earlier = dtype.kind in "mM" and self.size and self.kind == "bytes"  # Before there was ``time``.
        return bool(is_earlier) or self.kind in ("picture", _fixed_kind(dtype, self.shape))


def _fits(values: NDArray[Any], structure: Structure) -> bool:
    try:
        for value in values.tolist():
            structure.taken(value)
    except ValueError:
        return False
    return True


def _unlike_structure(values: NDArray[Any], structure: Structure) -> str | None:
    for row, value in enumerate(values.tolist()):
        try:
            structure.taken(value)
        except ValueError as error:
            return f"{error} in row {row}; the column has {structure!r}"
    return None


def object_rows(values: Sequence[Any] | NDArray[Any]) -> NDArray[Any]:
    """Return arrays, or the rows of an array as views, as objects, shape (rows,)."""
    return np.fromiter(values, dtype=object, count=len(values))


def _is_time(dtype: np.dtype[Any]) -> bool:
    """Whether single values have an Arrow type, or are numbers of units."""
    unit, many = np.datetime_data(dtype)
    return unit != "generic" if dtype.kind == "m" else unit in _PER_STORED and many == 1


def _fixed_kind(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Kind:
    """Return the stored form of a row of fixed size."""
    size = math.prod(shape)
    if size == 0:
        return "none"
    if dtype.kind in "mM" and shape == () and _is_time(dtype):
        return "time"
    if dtype.str[1:] not in PARQUET_TYPES:
        return "bytes"
    if shape == ():
        return "scalar"
    limit = _LIST_LIMIT if dtype.itemsize >= 4 else _NARROW_LIST_LIMIT
    return "list" if len(shape) == 1 and size <= limit else "bytes"
