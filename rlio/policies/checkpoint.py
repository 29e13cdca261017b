"""Storing what a policy knows: arrays as ``arrays.npz``, the rest as ``state.json``. No pickle.

Example:
    >>> import numpy as np
    >>> save_state("memory://checkpoint-example", {"weights": {"w": np.zeros(3)}, "updates": 7})
    >>> load_state("memory://checkpoint-example")
    {'updates': 7, 'weights': {'w': array([0., 0., 0.])}}
"""

from __future__ import annotations

import io
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.errors import CorruptData, StateError, excerpt
from rlio.storage import Storage

__all__ = ["load_state", "save_state"]

_ARRAYS, _STATE = "arrays.npz", "state.json"
_FORMAT = 0
_ARRAY_KEY = "$array"


def save_state(
    folder: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Store ``state`` in ``folder``, in place of one that is there.

    Args:
        folder: A path or any fsspec URL.
        state: Nested dicts, lists and tuples (which come back as lists) of arrays, strings, numbers, bools
            and None.
        storage_options: For fsspec.

    Raises:
        StateError: ``state`` holds something else.
        PublishError: It could not be stored.
    """
    arrays: dict[str, NDArray[Any]] = {}
    described = _described(state, arrays, "state")
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type] # the stub takes the keywords for allow_pickle
    data = buffer.getvalue()
    storage = Storage.open(folder, storage_options=storage_options)
    # The description certifies the arrays and is put last: a torn pair is found when it is read.
    storage.put(_ARRAYS, data)
    text = {"format": _FORMAT, "arrays_crc32": zlib.crc32(data), "state": described}
    storage.put(_STATE, json.dumps(text, sort_keys=True, allow_nan=False).encode())


def load_state(
    folder: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Read what `save_state` stored.

    Raises:
        DataNotFound: Nothing is stored there.
        CorruptData: What is stored is damaged, or not from `save_state`.
    """
    storage = Storage.open(folder, storage_options=storage_options)
    raw, data = storage.read(_STATE), storage.read(_ARRAYS)
    try:
        text = json.loads(raw)
        if text["format"] != _FORMAT or not isinstance(text["state"], dict):
            raise ValueError(f"format {excerpt(text['format'])}, expected {_FORMAT}")
        crc32 = text["arrays_crc32"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptData(f"this is no policy's state: {error!r}", uri=storage.uri_of(_STATE)) from error
    if zlib.crc32(data) != crc32:
        raise CorruptData(
            "the arrays are not those that state.json was stored with: save the policy again",
            uri=storage.uri_of(_ARRAYS),
        )
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            state = _restored(text["state"], file)
    except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
        raise CorruptData(f"the arrays cannot be read: {error!r}", uri=storage.uri_of(_ARRAYS)) from error
    assert isinstance(state, dict)
    return state


def _described(value: Any, arrays: dict[str, NDArray[Any]], place: str) -> Any:
    """``value`` as JSON; its arrays are moved into ``arrays`` and referred to by number."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        name = f"a{len(arrays)}"
        arrays[name] = value
        return {_ARRAY_KEY: name}
    if isinstance(value, np.generic):
        return _described(value.item(), arrays, place)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == _ARRAY_KEY:
                raise StateError(f"{place} has the key {excerpt(key)}: a state's keys are strings")
        return {key: _described(part, arrays, f"{place}/{key}") for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_described(part, arrays, f"{place}/{i}") for i, part in enumerate(value)]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise StateError(f"{place} is {excerpt(value)}: a state holds arrays and what JSON takes")


def _restored(value: Any, arrays: Any) -> Any:
    if isinstance(value, dict):
        if list(value) == [_ARRAY_KEY]:
            return arrays[value[_ARRAY_KEY]]
        return {key: _restored(part, arrays) for key, part in value.items()}
    if isinstance(value, list):
        return [_restored(part, arrays) for part in value]
    return value
