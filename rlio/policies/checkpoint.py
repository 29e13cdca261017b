"""Stores states: arrays as ``arrays.npz``, the rest as ``state.json``, without pickle.

``arrays.npz`` is stored first and is whole by itself: it also has the text, as the array ``state``, and ends
with a checksum. It replaces the earlier one in one step, so with any number of savers, and if one of them
dies, the newest ``arrays.npz`` is one state. ``state.json`` has the text too, to look at, and names the
checksum of its arrays: one that names another belongs to another save.

Example:
    >>> import numpy as np
    >>> save_state("memory://checkpoint-example", {"weights": {"w": np.zeros(3)}, "updates": 7})
    >>> load_state("memory://checkpoint-example")
    {'updates': 7, 'weights': {'w': array([0., 0., 0.])}}
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import uuid
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import is_tensor
from rlio.batch.npz import is_certified, pack_arrays, unpack_arrays, write_arrays_to
from rlio.errors import CorruptData, DataNotFound, OptionError, StateError, excerpt
from rlio.storage import Storage
from rlio.storage.local import remove_unfinished

__all__ = [
    "load_components",
    "load_state",
    "pack_state",
    "read_arrays",
    "read_scratch",
    "replacing_file",
    "save_components",
    "save_state",
    "select_components",
    "unpack_state",
    "write_arrays",
    "write_scratch",
]

T = TypeVar("T")

_ARRAYS, _STATE = "arrays.npz", "state.json"
# The array that holds the text; those of the state are called a0, a1 and so on.
_TEXT = "state"
_FORMAT = 0
_COMPONENTS_VERSION = 1
# Keys of one-entry objects that stand for values JSON does not have: arrays and tensors by name, mappings
# with other keys as pairs, and numbers such as infinity.
_ARRAY, _TENSOR, _ITEMS, _FLOAT = _SPECIAL = "$array", "$tensor", "$items", "$float"


def save_state(
    folder: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Store ``state`` in ``folder``, replacing an earlier one as a whole, also while others use it.

    Args:
        folder: A path or any fsspec URL.
        state: Nested dicts, lists and tuples (which come back as lists) of arrays, tensors, strings, numbers,
            bools and None. Keys of dicts are strings or whole numbers.
        storage_options: For fsspec.

    Raises:
        StateError: ``state`` holds another kind of value.
        PublishError: The state could not be stored.
    """
    text, data = pack_state(state)
    storage = Storage.open(folder, storage_options=storage_options)
    storage.put(_ARRAYS, data)
    storage.put(_STATE, text)
    if storage.is_local:
        remove_unfinished(storage.root)  # Users would otherwise see them beside the state.


def load_state(
    folder: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Read what `save_state` stored.

    Raises:
        DataNotFound: Nothing is stored there.
        CorruptData: The stored state is damaged, or is not from `save_state`.
    """
    storage = Storage.open(folder, storage_options=storage_options)
    text = _read_if_there(storage, _STATE)
    try:
        data = storage.read(_ARRAYS)
    except DataNotFound as error:
        if text is None:
            raise
        raise CorruptData(
            f"{_STATE} is there without {_ARRAYS}: copy both files, or save again", uri=storage.uri
        ) from error
    return unpack_state(text, data, uri_of=storage.uri_of)


def _read_if_there(storage: Storage, name: str) -> bytes | None:
    try:
        return storage.read(name)
    except DataNotFound:
        return None


def save_components(
    folder: str | os.PathLike[str],
    components: Mapping[str, Any],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Store the state of a `rlio.RolloutWorker`; see `save_state`."""
    stored = {"version": _COMPONENTS_VERSION, "components": components}
    save_state(folder, stored, storage_options=storage_options)


def load_components(
    folder: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Read what `save_components` stored.

    Raises:
        DataNotFound: Nothing is stored there.
        CorruptData: The stored state is damaged.
        StateError: It is another kind of state, or of another version.
    """
    stored = load_state(folder, storage_options=storage_options)
    components = stored.get("components")
    if stored.get("version") != _COMPONENTS_VERSION or not isinstance(components, dict):
        raise StateError(
            f"this is not a state of a RolloutWorker of this version: it has {excerpt(sorted(stored))}",
            uri=os.fspath(folder),
        )
    return components


def write_scratch(folder: Path, state: Mapping[str, Any]) -> None:
    """Like `save_state`, in a local folder of this process only: faster, but it may not survive a crash.

    Raises:
        StateError: As in `save_state`.
    """
    text, data = pack_state(state)
    folder.mkdir(exist_ok=True)
    (folder / _ARRAYS).write_bytes(data)
    (folder / _STATE).write_bytes(text)


def read_scratch(folder: Path) -> dict[str, Any]:
    """Read what `write_scratch` wrote.

    Raises:
        CorruptData: Another program has changed the files.
    """
    return unpack_state(
        (folder / _STATE).read_bytes(),
        (folder / _ARRAYS).read_bytes(),
        uri_of=lambda name: os.fspath(folder / name),
    )


def pack_state(state: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Pack ``state`` as the bytes of ``state.json`` and ``arrays.npz``.

    Raises:
        StateError: ``state`` holds a value that is neither an array nor JSON.
    """
    arrays: dict[str, NDArray[Any]] = {}
    try:
        text = {"format": _FORMAT, "state": _described(state, arrays, "state")}
        arrays[_TEXT] = np.frombuffer(_dumped(text), np.uint8)
    except StateError:
        raise
    except (RecursionError, ValueError) as error:  # ValueError: a whole number of thousands of digits.
        raise StateError(
            f"the state nests too deeply, contains itself, or has a number that is too long: {error}"
        ) from error
    data = pack_arrays(arrays)
    return _dumped(text | {"arrays_crc32": zlib.crc32(data)}), data


def _dumped(text: Mapping[str, Any]) -> bytes:
    return json.dumps(text, sort_keys=True, allow_nan=False).encode()


def unpack_state(raw: bytes | None, data: bytes, *, uri_of: Callable[[str], str]) -> dict[str, Any]:
    """Unpack the state that `pack_state` packed.

    Args:
        raw: Bytes of ``state.json``; None: there is none.
        data: Bytes of ``arrays.npz``.
        uri_of: File name -> its URI, for messages.

    Raises:
        CorruptData: The bytes are damaged, or are not from `pack_state`.
    """
    text = None if raw is None else _parsed(raw, uri_of(_STATE))
    if text is None or text.get("arrays_crc32") != zlib.crc32(data):
        if not is_certified(data):
            raise CorruptData(
                "the arrays are not those that state.json was stored with, nor a whole state by themselves: "
                "save the state again",
                uri=uri_of(_ARRAYS),
            )
        text = None  # Another save has stored its arrays since, and not yet its text, or never.
    arrays = unpack_arrays(data, uri=uri_of(_ARRAYS))
    if _TEXT in arrays:
        own = _parsed(arrays[_TEXT].tobytes(), uri_of(_ARRAYS))
        if text is not None and text["state"] != own["state"]:
            raise CorruptData("the text was changed after it was stored: save again", uri=uri_of(_STATE))
        text = own
    if text is None:
        raise CorruptData("these arrays are no state, and have no state.json", uri=uri_of(_ARRAYS))
    try:
        state = _restored(text["state"], arrays)
        if not isinstance(state, dict):
            raise TypeError(f"the state is {excerpt(state)}")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CorruptData(
            f"the arrays do not fit the state: {excerpt(repr(error))}", uri=uri_of(_ARRAYS)
        ) from error
    return state


def _parsed(raw: bytes, uri: str) -> dict[str, Any]:
    """The text of a state, with a dict as ``state``."""
    try:
        text: dict[str, Any] = json.loads(raw)
        if text["format"] != _FORMAT or not isinstance(text["state"], dict):
            raise ValueError(f"format {excerpt(text['format'])}, expected {_FORMAT}")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CorruptData(f"this is not a stored state: {excerpt(repr(error))}", uri=uri) from error
    return text


def select_components(
    state: Mapping[str, T],
    components: str | Collection[str] | None = None,
    not_components: str | Collection[str] | None = None,
) -> dict[str, T]:
    """Select parts of ``state``.

    Args:
        state: Name -> part.
        components: Name or names of parts to keep; None: all.
        not_components: Name or names of parts to leave out; None: none.

    Raises:
        OptionError: A name is not that of a part, or is both requested and left out.
    """
    wanted, unwanted = _names(state if components is None else components), _names(not_components or ())
    unknown = (wanted | unwanted) - state.keys()
    if unknown:
        raise OptionError(
            f"the state has no components {excerpt(sorted(unknown))}: it has {excerpt(sorted(state))}"
        )
    if components is not None and wanted & unwanted:
        raise OptionError(
            f"the components {excerpt(sorted(wanted & unwanted))} are both requested and excluded"
        )
    return {name: part for name, part in state.items() if name in wanted - unwanted}


def _names(given: str | Collection[str]) -> set[str]:
    return {given} if isinstance(given, str) else set(given)


@contextlib.contextmanager
def replacing_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Another path, whose file replaces the local file ``path`` at the end: completely, or not at all."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def write_arrays(path: str | os.PathLike[str], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write ``arrays`` to the local file ``path`` as ``.npz``, completely or not at all."""
    with replacing_file(path) as partial, partial.open("wb") as file:
        write_arrays_to(file, arrays)


def read_arrays(path: str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    """The arrays of a local ``.npz`` file, by name; nothing is unpickled.

    Raises:
        DataNotFound: The file does not exist.
        CorruptData: The file has another format, or is damaged.
    """
    uri = os.fspath(path)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        kind = DataNotFound if isinstance(error, FileNotFoundError) else CorruptData
        raise kind(f"this file cannot be read: {error}", uri=uri) from error
    return unpack_arrays(data, uri=uri)


def _described(value: Any, arrays: dict[str, NDArray[Any]], place: str) -> Any:
    """``value`` as JSON. Moves its arrays into ``arrays``, and refers to them by number."""
    if (
        isinstance(value, np.ndarray)
        and not value.dtype.hasobject
        and not isinstance(value, np.ma.MaskedArray)  # Its mask would be lost.
    ):
        return {_ARRAY: _numbered(value, arrays)}
    if is_tensor(value):
        try:
            return {_TENSOR: _numbered(value.detach().cpu().numpy(), arrays)}
        except (TypeError, RuntimeError) as error:
            raise StateError(f"{place} is a tensor that NumPy cannot hold: {error}; convert it") from error
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return _described(value.item(), arrays, place)
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key not in _SPECIAL for key in value):
            return {key: _described(part, arrays, f"{place}/{key}") for key, part in value.items()}
        # The states of torch's optimizers have numbers as keys.
        pairs = [[key, _described(part, arrays, f"{place}/{key}")] for key, part in value.items()]
        for key, _ in pairs:
            if not isinstance(key, (str, int)):
                raise StateError(
                    f"{place} has the key {excerpt(key)}: expected a string or whole number as key"
                )
        return {_ITEMS: pairs}
    if isinstance(value, (list, tuple)):
        return [_described(part, arrays, f"{place}/{i}") for i, part in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(value)}  # JSON has no such numbers.
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise StateError(f"{place} is {excerpt(value)}: expected arrays, tensors and JSON values")


def _numbered(array: NDArray[Any], arrays: dict[str, NDArray[Any]]) -> str:
    name = f"a{len(arrays)}"
    arrays[name] = array
    return name


def _restored(value: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """The value that `_described` described; it may have any form.

    Raises:
        ValueError, LookupError, TypeError: `_described` did not describe it.
    """
    if isinstance(value, list):
        return [_restored(part, arrays) for part in value]
    if not isinstance(value, dict):
        return value
    kind, *others = value or ("",)
    if others or kind not in _SPECIAL:
        return {key: _restored(part, arrays) for key, part in value.items()}
    stored = value[kind]
    if kind == _ITEMS:
        if not all(isinstance(key, (str, int)) for key, _ in stored):
            raise TypeError(f"keys of {excerpt(stored)}")
        return {key: _restored(part, arrays) for key, part in stored}
    if kind == _FLOAT:
        return float(stored)
    if kind == _TENSOR:
        import torch

        return torch.from_numpy(arrays[stored])
    return arrays[stored]
