"""Reads packed columns, RLlib's compressed text in JSON and Parquet, without running the pickle in them.

RLlib stores a column as base64 text of an LZ4 frame of a Python object stream. Such a stream is a small
program; the usual loader runs any function that it names. This interpreter instead reads the opcodes as data.
It knows only the few opcodes and six functions that NumPy arrays need, and has its own version of each
function. It imports nothing, calls nothing by name, and limits size, depth and number of values. It refuses
everything else.

Until early 2020 the stream was a message of `pyarrow.serialize`, which later versions of pyarrow do not have.
A message of one array of numbers begins with bytes that depend on the version alone, and goes on with a
tensor that Arrow still reads. Other messages, which may hold pickles, are refused.

Not here: how columns become batches (`rlio.formats.rllib.decoder`).

Example:
    >>> column = unpack(
    ...     "BCJNGGhAoQAAAAAAAACQmAAAAFKABZWWAAEA8hqME251bXB5Ll9jb3JlLm51bWVyaWOUjAtfZnJvbWJ1ZmZlcpSTlCiWIC8A"
    ...     "AwIA8Q6APwAAAEAAAEBAAACAQAAAoEAAAMBAAADgQJSMBVEA8RaUjAVkdHlwZZSTlIwCZjSUiYiHlFKUKEsDjAE8lE5OTkr/"
    ...     "////BQDwBUsAdJRiSwRLAoaUjAFDlHSUUpQuAAAAAA=="
    ... )
    >>> column.dtype, column.tolist()
    (dtype('float32'), [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]])
"""

from __future__ import annotations

import binascii
import hashlib
import math
import pickletools
import re
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

import numpy as np
import pybase64
from numpy.typing import NDArray

from rlio.errors import CorruptData, UnknownLayout, UnsafeData, excerpt
from rlio.formats.files.allowance import Allowance
from rlio.schemas.dtypes import numpy_type

__all__ = ["is_packed", "unpack", "unpickle"]

# The head of an LZ4 frame in base64: the magic number, then the flags. The flags vary with the size (one
# block or several, linked or not) and with the library: content size stated or not, checksum or none, block
# size.
_PREFIX: Final = re.compile("BCJNG[EFGH][BRhx][AQgw]")
_MAX_ROWS: Final = 2**40
_MAX_NDIM: Final = 32
# Maximum nesting depth of lists, tuples and dicts.
_MAX_DEPTH: Final = 32
_PROTO: Final = 0x80
_NATIVE_ORDER: Final = "<" if sys.byteorder == "little" else ">"

# A message of pyarrow.serialize with one array of numbers: where its tensor begins -> digests of all bytes
# before it, as ray 0.6.0, 0.6.6 to 0.7.6, 0.6.3, and 0.7.7 to 0.8.1 wrote them.
_LONE_TENSORS: Final = {
    448: ("c9917e719144f590", "0f0e2d05497748ce"),
    512: ("8708db1c2a74988b", "a2eed7637a705e10"),
}

Array: TypeAlias = NDArray[Any]


def is_packed(value: object) -> bool:
    """Whether ``value`` is text that RLlib packed; any other string is plain data."""
    return isinstance(value, str) and _PREFIX.match(value) is not None


def unpack(text: str, *, allowance: Allowance | None = None) -> Any:
    """Return the value packed into ``text``.

    Args:
        text: A string for which `is_packed` holds.
        allowance: The budget that it shares with other columns; None: the default budget of one record.

    Returns:
        The packed value: an array (with its dtype, shape and memory order), or a dict, list or tuple of such
        values and of plain Python values. The caller owns the arrays, and they are writable. An array that
        the stream mentions several times is read-only, and shares its memory each time.

    Raises:
        UnknownLayout: The value was packed by pyarrow.serialize, as RLlib did in 2019, and is not an array of
            numbers.
        UnsafeData: The stream names a function, opcode or dtype that is not NumPy data, or exceeds
            ``allowance``.
        CorruptData: The base64 text, the LZ4 frame or the stream is damaged.
    """
    allowance = Allowance() if allowance is None else allowance
    # Values are copied out of the stream. For a moment the stream is in memory three times.
    stream = _decompress(text, allowance.bytes // 2)
    allowance.spend(len(stream))
    # RLlib's pickles begin with the opcode PROTO, the messages of 2019 with two small numbers.
    if len(stream) >= 8 and stream[2:4] == stream[6:8] == b"\0\0" and stream[0] != _PROTO:
        return _tensor_of_2019(stream, allowance)
    return _value_of(stream, allowance)


def unpickle(stream: bytes, *, allowance: Allowance) -> Any:
    """Return the value in a bare Python object stream, as Ray Data stores objects that Arrow has no type for.

    Its values and errors are those of `unpack`.
    """
    allowance.spend(len(stream))
    return _value_of(stream, allowance)


def _value_of(stream: bytes, allowance: Allowance) -> Any:
    """The value that a stream describes: interpreted, unless all but the numbers was interpreted before."""
    alike = _SEEN.get(len(stream), ())
    for frame in alike:
        if stream.startswith(frame.head) and stream.endswith(frame.tail):
            return frame.fill(stream, allowance)
    bytes_left, values_left = allowance.bytes, allowance.values
    machine = _Interpreter(allowance)
    value = machine.run(stream)
    if len(machine.literals) == 1 and type(value) is np.ndarray and value.dtype.kind in "biufc":
        ((start, size),) = machine.literals
        # Nothing else can be the bytes of the array.
        if value.nbytes == size and len(stream) - size <= _FRAME_BYTES[1]:
            spent = bytes_left - allowance.bytes, values_left - allowance.values
            head, tail = stream[:start], stream[start + size :]
            if sum(map(len, _SEEN.values())) >= _MOST_FRAMES:
                _SEEN.clear()
            _SEEN[len(stream)] = (*alike, _Frame(head, tail, value.dtype, value.shape, value.strides, *spent))
    return value


def _tensor_of_2019(stream: bytes, allowance: Allowance) -> Array:
    """The array in a message of pyarrow.serialize."""
    import pyarrow as pa

    digests = {start: hashlib.blake2b(stream[:start], digest_size=8).hexdigest() for start in _LONE_TENSORS}
    start = next((start for start, known in _LONE_TENSORS.items() if digests[start] in known), None)
    if start is None:
        raise UnknownLayout(
            "found a column packed by pyarrow.serialize, as RLlib did in 2019, and no array of numbers: "
            "write the file again with the RLlib that recorded it, unpacked (output_compress_columns=[])"
        )
    try:
        tensor = pa.ipc.read_tensor(pa.BufferReader(stream[start:]))
        shape, kind = tuple(tensor.shape), numpy_type(tensor.type)
    except (pa.ArrowException, OSError, ValueError, TypeError, NotImplementedError) as error:
        raise CorruptData(f"packed column: damaged tensor: {excerpt(str(error))}") from error
    size = _Interpreter(allowance)._check_shape(shape) * kind.itemsize
    # Strides of 0 would repeat a value.
    if size > len(stream) or any(stride < 0 for stride in tensor.strides):
        raise CorruptData(f"packed column: a tensor of shape {shape} in {len(stream)} bytes")
    allowance.spend(size)
    return np.array(tensor.to_numpy())


def _decompress(text: str, max_bytes: int) -> bytes:
    """The bytes inside the base64 text of an LZ4 frame, at most ``max_bytes``."""
    import pyarrow as pa

    try:
        frame = pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise CorruptData(f"packed column: not base64 ({error}); found {excerpt(text, 40)}") from error
    # Bit 3 of the flags says that the content size follows: it is checked before a byte is inflated.
    stated = int.from_bytes(frame[6:14], "little") if len(frame) >= 14 and frame[4] & 8 else None
    if stated is not None and stated > max_bytes:
        raise UnsafeData(f"packed column: inflates to {stated} bytes, more than the {max_bytes} allowed")
    try:
        size = _inflated_size(frame, max_bytes) if stated is None else stated
        with pa.CompressedInputStream(pa.BufferReader(frame), "lz4") as inflated:
            data: bytes = inflated.read(size + 1)
    except OSError as error:
        raise CorruptData(f"packed column: damaged LZ4 frame: {error}") from error
    if len(data) != size:
        raise CorruptData(f"packed column: the LZ4 frame states {size} bytes and holds {len(data)} or more")
    return data


def _inflated_size(frame: bytes, max_bytes: int) -> int:
    """Bytes that an LZ4 frame inflates to: inflate it once, and keep nothing.

    Raises:
        UnsafeData: They are more than ``max_bytes``.
    """
    import pyarrow as pa

    size = 0
    with pa.CompressedInputStream(pa.BufferReader(frame), "lz4") as inflated:
        while part := inflated.read(1 << 22):
            size += len(part)
            if size > max_bytes:
                raise UnsafeData(f"packed column: inflates to more than the {max_bytes} bytes allowed")
    return size


_DTYPE_NAME = re.compile(r"b1|[iu][1248]|f[248]|c8|c16|[mM]8|[US][1-9]\d{0,6}|O8?")
_TIME_UNIT = re.compile(rb"[YMWDhms]|[munpfa]s")


class _Dtype:
    """A dtype under construction: its state, with the byte order, follows its first mention."""

    def __init__(self, name: str) -> None:
        self.value = np.dtype(name)


class _ArrayShell:
    """An array under construction: its state, with all its content, follows its first mention."""

    def __init__(self) -> None:
        #: The values. For an object array, `objects` holds the stream's list until it is resolved.
        self.value: Array | None = None
        self.objects: list[Any] | None = None
        self.shape: tuple[int, ...] = ()
        self.fortran = False
        self.served = False


class _Frame(NamedTuple):
    """All of a stream but the numbers of its one array: records of one length have the same.

    ::

        head: PROTO, _frombuffer, 680 bytes follow | numbers | tail: float32, (10, 17), "C", STOP
    """

    head: bytes
    tail: bytes
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    spent_bytes: int
    spent_values: int

    def fill(self, stream: bytes, allowance: Allowance) -> Array:
        """The array of a stream with this head and tail; it costs what interpreting the stream costs."""
        allowance.count(self.spent_values)
        allowance.spend(self.spent_bytes)
        numbers = bytearray(memoryview(stream)[len(self.head) : len(stream) - len(self.tail)])
        array: Array = np.ndarray(self.shape, self.dtype, numbers, strides=self.strides)
        _check_values(np.frombuffer(numbers, self.dtype))
        return array


#: Of the length of a stream: the frames of that length.
_SEEN: Final[dict[int, tuple[_Frame, ...]]] = {}
_MOST_FRAMES: Final = 256
# Fewest bytes of numbers, and most of the rest, of a stream whose frame is kept.
_FRAME_BYTES: Final = (64, 1024)
# Opcodes with a literal of bytes, and how far behind them the literal begins.
_LITERALS: Final = {"SHORT_BINBYTES": 2, "BINBYTES": 5, "BINBYTES8": 9, "BYTEARRAY8": 9}

_Handler: TypeAlias = "Callable[[_Interpreter, Any], None]"


class _Interpreter:
    """Reads one stream of opcodes as data."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._used_buffers: set[int] = set()
        #: Place and size of each literal of bytes that is long enough for a frame.
        self.literals: list[tuple[int, int]] = []

    def run(self, stream: bytes) -> Any:
        """Return the value that ``stream`` describes."""
        count = self._allowance.count
        try:
            for opcode, argument, place in pickletools.genops(stream):
                count(1)
                if opcode.name in _LITERALS and argument is not None and len(argument) >= _FRAME_BYTES[0]:
                    self.literals.append(((place or 0) + _LITERALS[opcode.name], len(argument)))
                if opcode.name == "STOP":
                    break
                handler = _HANDLERS.get(opcode.name)
                if handler is None:
                    raise UnsafeData(
                        f"packed column: opcode {opcode.name} is not needed for arrays and is refused"
                    )
                handler(self, argument)
            if len(self._stack) != 1 or self._outer:
                raise CorruptData("packed column: the stream does not end with one value")
            return self._resolve(self._stack.pop(), 0)
        except CorruptData:
            raise
        except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError) as error:
            # The errors that a damaged stream causes; genops itself raises ValueError.
            raise CorruptData(f"packed column: damaged stream: {excerpt(str(error))}") from error

    # ---- opcodes ----

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def push_integer(self, value: int) -> None:
        if not -(2**63) <= value < 2**64:
            raise UnsafeData("packed column: an integer of more than 64 bits")
        self._stack.append(value)

    def mark(self, _: Any) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._outer.pop()
        return items

    def _pop(self, count: int) -> tuple[Any, ...]:
        if len(self._stack) < count:
            raise CorruptData("packed column: the stream takes a value that it never gave")
        taken = tuple(self._stack[len(self._stack) - count :])
        del self._stack[len(self._stack) - count :]
        return taken

    def tuple_since_mark(self, _: Any) -> None:
        self.push(tuple(self._since_mark()))

    def append(self, _: Any) -> None:
        (item,) = self._pop(1)
        self._extend([item])

    def appends(self, _: Any) -> None:
        self._extend(self._since_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise CorruptData("packed column: an append to what is not a list")
        target.extend(items)

    def set_item(self, _: Any) -> None:
        self._update(list(self._pop(2)))

    def set_items(self, _: Any) -> None:
        self._update(self._since_mark())

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise CorruptData("packed column: an item set on what is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Keys cannot be chosen to collide if they are text or small integers. Large integers and floats
            # can, which would make this loop hang.
            if type(key) is not str and not (type(key) is int and -(2**31) <= key < 2**31):
                raise UnsafeData(f"packed column: a dict key of type {type(key).__name__} is refused")
            target[key] = value

    def memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def get(self, index: int) -> None:
        self.push(self._memo[index])

    def global_(self, name: str) -> None:
        module, _, attribute = name.partition(" ")
        self._push_function(module, attribute)

    def stack_global(self, _: Any) -> None:
        module, attribute = self._pop(2)
        self._push_function(module, attribute)

    def _push_function(self, module: Any, attribute: Any) -> None:
        named = (module, attribute)
        function = _FUNCTIONS.get(named) if all(type(part) is str for part in named) else None
        if function is None:
            raise UnsafeData(
                f"packed column: names the global {excerpt(f'{module}.{attribute}')}; only NumPy's array "
                "functions are read, and nothing was imported"
            )
        self.push(function)

    def reduce(self, _: Any) -> None:
        function, arguments = self._pop(2)
        if type(arguments) is not tuple:
            raise CorruptData("packed column: a call whose arguments are not a tuple")
        if not isinstance(function, FunctionType):  # `_push_function` alone pushes functions.
            raise UnsafeData(f"packed column: a call of {excerpt(function)} is refused")
        self.push(function(self, *arguments))

    def build(self, _: Any) -> None:
        (state,) = self._pop(1)
        target = self._stack[-1]
        if type(target) is _Dtype:
            _set_dtype_state(target, state)
        elif type(target) is _ArrayShell:
            self._set_array_state(target, state)
        else:
            raise UnsafeData(f"packed column: state for a {type(target).__name__} is refused")

    # ---- what the functions do ----

    def dtype(self, name: Any, *_: Any) -> _Dtype:
        if type(name) is not str or not _DTYPE_NAME.fullmatch(name):
            raise UnsafeData(
                f"packed column: dtype {excerpt(name)} is refused; numbers, times and text are read"
            )
        return _Dtype(name)

    def ndarray(self, *_: Any) -> NoReturn:
        raise UnsafeData("packed column: a call of ndarray is refused")

    def reconstruct(self, kind: Any, *_: Any) -> _ArrayShell:
        if kind is not _Interpreter.ndarray:
            raise UnsafeData("packed column: an array of another class than ndarray is refused")
        return _ArrayShell()

    def encode(self, text: Any, encoding: Any = None) -> bytes:
        """Old protocols write bytes as text in Latin-1."""
        if type(text) is not str or encoding != "latin1":
            raise UnsafeData(f"packed column: text in the encoding {excerpt(encoding)} is refused")
        return text.encode("latin1")

    def from_buffer(self, buffer: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> _ArrayShell:
        shell = _ArrayShell()
        if order == "K":
            if type(axes) is not tuple or sorted(axes) != list(range(len(shape))):
                raise CorruptData("packed column: a memory order that is not an order of the axes")
        elif order not in ("C", "F"):
            raise CorruptData("packed column: a memory order other than C, F and K")
        array = self._array(buffer, dtype, shape, "F" if order == "F" else "C")
        shell.value = array.transpose(axes) if order == "K" else array
        return shell

    def scalar(self, dtype: Any, buffer: Any) -> Any:
        return self._array(buffer, dtype, (), "C")[()]

    def _array(self, buffer: Any, dtype: Any, shape: Any, order: Any) -> Array:
        """An array over ``buffer``: the buffer itself at its first use, a copy at later uses."""
        if type(buffer) not in (bytes, bytearray) or type(dtype) is not _Dtype:
            raise CorruptData("packed column: an array without bytes or dtype")
        kind = dtype.value
        if kind.hasobject:
            raise UnsafeData("packed column: an array of object pointers is refused")
        rows = self._check_shape(shape)
        if rows * kind.itemsize != len(buffer):
            raise CorruptData(
                f"packed column: an array of shape {excerpt(shape)} and dtype {kind} over {len(buffer)} bytes"
            )
        self._allowance.spend(len(buffer))
        flat = np.frombuffer(buffer, kind) if buffer else np.empty(0, kind)
        if type(buffer) is bytes or id(buffer) in self._used_buffers:
            flat = flat.copy()
        self._used_buffers.add(id(buffer))
        _check_values(flat)
        return flat.reshape(shape, order=order)

    def _set_array_state(self, shell: _ArrayShell, state: Any) -> None:
        """NumPy's array state: (version, shape, dtype, Fortran order?, bytes or list of objects)."""
        _, shape, dtype, fortran, data = state
        if shell.value is not None or shell.objects is not None:
            raise CorruptData("packed column: an array that is filled twice")
        if type(data) is list and type(dtype) is _Dtype and dtype.value.hasobject:
            if self._check_shape(shape) != len(data):
                raise CorruptData(f"packed column: {len(data)} objects for shape {excerpt(shape)}")
            shell.objects, shell.shape, shell.fortran = data, shape, bool(fortran)
        else:
            shell.value = self._array(data, dtype, shape, "F" if fortran else "C")

    def _check_shape(self, shape: Any) -> int:
        """The number of values in an array of ``shape``."""
        if type(shape) is not tuple or len(shape) > _MAX_NDIM:
            raise CorruptData(f"packed column: shape {excerpt(shape)}")
        if not all(type(n) is int and 0 <= n < _MAX_ROWS for n in shape):
            raise CorruptData(f"packed column: shape {excerpt(shape)}")
        # Rows without values take no bytes: only this check stops an array of 10**12 of them.
        if 0 in shape and math.prod(n for n in shape if n) > self._allowance.limits.group_rows:
            raise UnsafeData(f"packed column: an empty array of shape {excerpt(shape)}")
        return math.prod(shape)

    # ---- the result ----

    def _resolve(self, value: Any, depth: int) -> Any:
        """``value`` with finished arrays; each mention of a shared value counts, since mentions multiply."""
        self._allowance.count(1)
        if depth > _MAX_DEPTH:
            raise UnsafeData(f"packed column: nested more than {_MAX_DEPTH} deep")
        kind = type(value)
        if kind is _ArrayShell:
            return self._finish(value, depth)
        if kind is dict:
            return {key: self._resolve(item, depth + 1) for key, item in value.items()}
        if kind is list:
            return [self._resolve(item, depth + 1) for item in value]
        if kind is tuple:
            return tuple(self._resolve(item, depth + 1) for item in value)
        if value is None or kind in (bool, int, float, str, bytes) or isinstance(value, np.generic):
            return value
        raise UnsafeData(f"packed column: a {kind.__name__} is not data")

    def _finish(self, shell: _ArrayShell, depth: int) -> Array:
        if shell.objects is not None:
            flat = np.empty(len(shell.objects), object)
            for index, item in enumerate(shell.objects):
                flat[index] = self._resolve(item, depth + 1)
            return flat.reshape(shell.shape, order="F" if shell.fortran else "C")
        if shell.value is None:
            raise CorruptData("packed column: an array that is never filled")
        if not shell.served:
            shell.served = True
            return shell.value
        # Counted like a copy, because it is copied where rows are joined.
        self._allowance.spend(shell.value.nbytes)
        shell.value.flags.writeable = False
        return shell.value.view()


def _set_dtype_state(dtype: _Dtype, state: Any) -> None:
    """NumPy's dtype state: (version, byte order, subarray, names, fields, size, alignment, flags, unit)."""
    order, subarray, names, fields = state[1:5]
    if subarray is not None or names or fields:
        raise UnsafeData("packed column: a structured dtype is refused; write one column for each field")
    if order not in ("<", ">", "|", "="):
        raise CorruptData(f"packed column: byte order {excerpt(order)}")
    if dtype.value.kind in "mM" and len(state) > 8 and state[8] is not None:
        unit, count = state[8][1][:2]
        if not _TIME_UNIT.fullmatch(unit) or not 0 < count < 2**31:
            raise CorruptData(f"packed column: time unit {excerpt(unit)}")
        dtype.value = np.dtype(f"{dtype.value.kind}8[{count}{unit.decode('ascii')}]")
    if order in "<>" and order != _NATIVE_ORDER:
        dtype.value = dtype.value.newbyteorder(order)


def _check_values(flat: Array) -> None:
    """Refuse bytes that are not values of their dtype."""
    if flat.dtype.kind == "b" and flat.size and flat.view(np.uint8).max() > 1:
        raise CorruptData("packed column: booleans other than 0 and 1")
    if flat.dtype.kind == "U" and flat.size:
        points = flat.view(np.dtype(np.uint32).newbyteorder(flat.dtype.byteorder))
        if points.max() > 0x10FFFF:
            raise CorruptData("packed column: text that is not Unicode")


#: The functions that streams of arrays name: the interpreter has its own version of each.
_FUNCTIONS: Final[dict[tuple[str, str], Callable[..., Any]]] = {
    ("numpy.core.numeric", "_frombuffer"): _Interpreter.from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _Interpreter.from_buffer,
    ("numpy.core.multiarray", "_reconstruct"): _Interpreter.reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _Interpreter.reconstruct,
    ("numpy.core.multiarray", "scalar"): _Interpreter.scalar,
    ("numpy._core.multiarray", "scalar"): _Interpreter.scalar,
    ("numpy", "dtype"): _Interpreter.dtype,
    ("numpy", "ndarray"): _Interpreter.ndarray,
    ("_codecs", "encode"): _Interpreter.encode,
}


def _constant(value: Any) -> _Handler:
    return lambda machine, _: machine.push(value)


def _tuple_of(count: int) -> _Handler:
    return lambda machine, _: machine.push(machine._pop(count))


def _ignore(machine: _Interpreter, argument: Any) -> None:
    """Skip a protocol or frame header."""


_HANDLERS: Final[dict[str, _Handler]] = {
    **dict.fromkeys(("PROTO", "FRAME"), _ignore),
    **dict.fromkeys(
        (
            *("BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
            *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
        ),
        _Interpreter.push,
    ),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), _Interpreter.push_integer),
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "EMPTY_TUPLE": _constant(()),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "TUPLE": _Interpreter.tuple_since_mark,
    "MARK": _Interpreter.mark,
    "APPEND": _Interpreter.append,
    "APPENDS": _Interpreter.appends,
    "SETITEM": _Interpreter.set_item,
    "SETITEMS": _Interpreter.set_items,
    "MEMOIZE": _Interpreter.memoize,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Interpreter.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Interpreter.get),
    "GLOBAL": _Interpreter.global_,
    "STACK_GLOBAL": _Interpreter.stack_global,
    "REDUCE": _Interpreter.reduce,
    "BUILD": _Interpreter.build,
}
