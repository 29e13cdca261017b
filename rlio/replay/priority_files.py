"""Files of saved priorities: a ``.npz`` archive of arrays, and of a text that says what they are of.

The archive is not compressed, and its members have checksums. A file is read only as far as priorities of the
store need, and nothing in it is unpickled.

Example:
    >>> import tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "priorities.npz")
    >>> kept = {"priorities": {"values": np.ones(2)}, "span": [0, 2], "of": {"alpha": 0.6}}
    >>> write_priorities(path, kept)
    >>> read_priorities(path, slots=2)
    {'priorities': {'values': array([1., 1.])}, 'span': [0, 2], 'of': {'alpha': 0.6}}
"""

from __future__ import annotations

import io
import json
import math
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.errors import DataNotFound, StateError, excerpt
from rlio.storage.near import did_you_mean_path
from rlio.storage.paths import locate

__all__ = ["read_priorities", "write_priorities"]

_SPAN: Final = "span"
_OF: Final = "of"
_SUFFIX: Final = ".npy"
# Bytes of a file beside the values; most of them may be the text of a filter.
_MOST_BESIDE: Final = 1 << 20


def write_priorities(path: str | os.PathLike[str], kept: Mapping[str, Any]) -> None:
    """Write the result of `PrioritisedSampler.kept`; replaces an existing file atomically."""
    target = Path(path)
    handle, made = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    of = np.array(json.dumps(kept[_OF], sort_keys=True))
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, span=np.array(kept[_SPAN]), of=of, **kept["priorities"])  # Arrays of numbers.
            file.flush()
            os.fsync(file.fileno())
        Path(made).replace(target)
    except BaseException:
        Path(made).unlink(missing_ok=True)
        raise


def read_priorities(path: str | os.PathLike[str], *, slots: int) -> dict[str, Any]:
    """Read what `write_priorities` wrote, without ``of`` if an earlier version wrote it.

    Args:
        path: The file.
        slots: Number of priorities.

    Raises:
        DataNotFound: There is no file.
        StateError: It cannot be read, or is damaged.
    """
    try:
        arrays = _arrays(_bytes(path, most=8 * slots + _MOST_BESIDE))
        kept: dict[str, Any] = {_SPAN: arrays.pop(_SPAN).tolist()}
        if _OF in arrays:
            kept[_OF] = json.loads(str(arrays.pop(_OF)[()]))
        return {"priorities": arrays, **kept}
    except FileNotFoundError as error:
        hint = did_you_mean_path(locate(path))
        raise DataNotFound(
            f"there are no saved priorities: check the path{hint}", uri=os.fspath(path)
        ) from error
    # A damaged archive, or the header of an array, may be the cause of any error.
    except Exception as error:
        raise StateError(
            f"these are no saved priorities, or damaged ones: {excerpt(str(error) or repr(error))}; load a "
            "file that PrioritisedSampler.save wrote",
            uri=os.fspath(path),
        ) from error


def _bytes(path: str | os.PathLike[str], *, most: int) -> bytes:
    with Path(path).open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"the file has more than the {most} bytes of this sampler's priorities")
    return data


def _arrays(data: bytes) -> dict[str, NDArray[Any]]:
    found = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED or member.file_size > len(data):
                raise ValueError(f"{excerpt(member.filename)} is compressed")
            if member.filename.removesuffix(_SUFFIX) in found:
                raise ValueError(f"{excerpt(member.filename)} is there twice")
            found[member.filename.removesuffix(_SUFFIX)] = _array(archive.read(member))
    return found


def _array(data: bytes) -> NDArray[Any]:
    """The array of a ``.npy`` file, if its header tells of exactly the bytes there."""
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    if version != (1, 0):
        raise ValueError(f"an array of format {version}")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    if dtype.hasobject or fortran or math.prod(shape) * dtype.itemsize != len(data) - stream.tell():
        raise ValueError(f"an array of shape {excerpt(shape)} and dtype {dtype} in {len(data)} bytes")
    return np.frombuffer(data, dtype, offset=stream.tell()).reshape(shape)
