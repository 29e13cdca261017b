"""Arrays as the bytes of an ``.npz`` file, and back: in memory proportional to the bytes, without pickle.

`numpy.load` allocates what the header of an array claims and unpacks what an archive claims: some hundred
bytes take gigabytes. Here arrays are stored as they are, and what is read must have the sizes that it claims.

Example:
    >>> data = pack_arrays({"w": np.zeros((2, 3), np.float32)})
    >>> unpack_arrays(data, uri="example.npz")["w"].shape, is_certified(data)
    ((2, 3), True)
"""

from __future__ import annotations

import ast
import io
import math
import re
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from typing import IO, Any, Final

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from rlio.errors import CorruptData, UnsafeData, excerpt

__all__ = ["is_certified", "pack_arrays", "read_array", "unpack_arrays", "write_arrays_to"]

# The archive's comment: the CRC-32 of all bytes before it.
_SEAL: Final = b"crc32 %08x"
_SEALED: Final = re.compile(rb"crc32 [0-9a-f]{8}")
_SEAL_BYTES: Final = len(_SEAL % 0)
_CHUNK: Final = 1 << 20

#: What damaged bytes make `zipfile` and NumPy's parser of headers raise. (RuntimeError: an encrypted member;
#: its child NotImplementedError: an unknown compression.)
_DAMAGE: Final = (
    ArithmeticError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
)
# NumPy's limit.
_MOST_HEADER: Final = 10_000
# What the header's text makes Python's own parser raise. The text is short: MemoryError means deep nesting.
_BAD_HEADER: Final = (SyntaxError, MemoryError, RecursionError, tokenize.TokenError)


def write_arrays_to(file: IO[bytes], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write an ``.npz`` file. Unlike with `numpy.savez`, an array may have any name, also ``file``."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, values in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                npy.write_array(member, np.asanyarray(values), allow_pickle=False)


def pack_arrays(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """The bytes of an ``.npz`` file of ``arrays``, which certify themselves: see `is_certified`."""
    buffer = io.BytesIO()
    write_arrays_to(buffer, arrays)
    buffer.seek(-2, io.SEEK_END)  # The length of the comment.
    buffer.write(_SEAL_BYTES.to_bytes(2, "little"))
    buffer.write(_SEAL % zlib.crc32(buffer.getbuffer()))
    return buffer.getvalue()


def is_certified(data: bytes) -> bool:
    """Whether ``data`` is a whole result of `pack_arrays`, unchanged."""
    return data[-_SEAL_BYTES:] == _SEAL % zlib.crc32(memoryview(data)[:-_SEAL_BYTES])


def unpack_arrays(data: bytes, *, uri: str) -> dict[str, NDArray[Any]]:
    """The arrays in the bytes of an ``.npz`` file, by name; they own their memory.

    Raises:
        CorruptData: The bytes have another format, or are damaged.
        UnsafeData: They are compressed, claim more memory than they have bytes, or hold pickled objects.
    """
    if _SEALED.fullmatch(data[-_SEAL_BYTES:]) and not is_certified(data):
        raise CorruptData("the checksum of this .npz file does not fit its bytes: it is damaged", uri=uri)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            claimed = sum(member.file_size for member in members)
            if claimed > len(data) or any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise UnsafeData(
                    f"{len(data)} bytes of an .npz file would unpack to {claimed}: expected arrays that are "
                    "not compressed, as numpy.savez writes them",
                    uri=uri,
                )
            return {info.filename.removesuffix(".npy"): _member(archive, info) for info in members}
    except _DAMAGE as error:
        if isinstance(error, CorruptData) and error.uri is not None:
            raise
        kind = UnsafeData if isinstance(error, UnsafeData) else CorruptData
        raise kind(f"this is not a .npz file of arrays: {excerpt(str(error))}", uri=uri) from error


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(info) as member:
        return read_array(member, info.file_size, info.filename)


def read_array(stream: IO[bytes], size: int, name: str, *, rows: int | None = None) -> NDArray[Any]:
    """The array of an ``.npy`` of ``size`` bytes, which must be as many as its header says.

    Args:
        stream: The ``.npy``.
        size: Its bytes.
        name: Of the array, for messages.
        rows: Read only this many first rows, if they lie together; None: all. Later damage is not seen.

    Raises:
        CorruptData, ValueError: It is damaged.
        UnsafeData: It is pickled.
    """
    shape, is_fortran, dtype = read_header(stream)
    if dtype.hasobject:
        raise UnsafeData(f"the array {excerpt(name)} is pickled: expected numbers or text")
    left = size - stream.tell()
    if left != math.prod(shape) * dtype.itemsize:
        raise CorruptData(f"the array {excerpt(name)} has {left} bytes for the shape {excerpt(shape)}")
    is_part = rows is not None and bool(shape) and rows < shape[0] and not is_fortran
    if rows is not None and is_part:
        shape = (rows, *shape[1:])
        left = math.prod(shape) * dtype.itemsize
    made = bytearray(left)
    view, at = memoryview(made), 0
    # After the last byte, zipfile compares the checksum.
    while not (is_part and at == left) and (part := stream.read(min(_CHUNK, left - at) or 1)):
        view[at : at + len(part)] = part
        at += len(part)
    if at != left:
        raise CorruptData(f"the array {excerpt(name)} ends after {at} of {left} bytes")
    return np.ndarray(shape, dtype, buffer=made, order="F" if is_fortran else "C")


def read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether the order is Fortran's, and dtype of an ``.npy``.

    Raises:
        CorruptData, ValueError: The header is damaged.
    """
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise CorruptData(f"an array has version {version} of NumPy's format, expected 1 to 3")
    stated = stream.read(2 if version == (1, 0) else 4)
    if int.from_bytes(stated, "little") > _MOST_HEADER:  # NumPy reads it before it looks at its size.
        raise CorruptData(f"an array has a header of more than {_MOST_HEADER} bytes")
    text = stream.read(int.from_bytes(stated, "little"))
    try:
        if version == (3, 0):  # As 2.0, but in UTF-8, for names of fields. NumPy's own function is private.
            described = ast.literal_eval(text.decode())
            dtype = npy.descr_to_dtype(described["descr"])
            shape, is_fortran = tuple(described["shape"]), bool(described["fortran_order"])
        else:
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, is_fortran, dtype = read(io.BytesIO(stated + text))
    except _BAD_HEADER as error:
        raise CorruptData(f"the header of an array cannot be parsed: {error!r}") from error
    if any(type(size) is not int or size < 0 for size in shape):
        raise CorruptData(f"an array has the shape {excerpt(shape)}")
    return shape, is_fortran, dtype
