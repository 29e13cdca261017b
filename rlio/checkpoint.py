"""`save_checkpoint` and `load_checkpoint`: the complete state of a training run, in one folder.

``checkpoint.json`` names the subfolder of the newest checkpoint. It is replaced last, atomically: if the
process dies at any time, the folder holds one whole checkpoint, the old or the new. States are JSON and
``.npz``; rows of a live store are arrays with checksums. Nothing is pickled, and loading runs no code.

Example:
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> save_checkpoint("memory://run-7/checkpoint", rng=rng, step=3, best={"return": 21.5})
    >>> expected = rng.random()
    >>> again = np.random.default_rng(1)
    >>> load_checkpoint("memory://run-7/checkpoint", rng=again)
    {'best': {'return': 21.5}, 'step': 3}
    >>> again.random() == expected
    True
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from rlio.errors import CorruptData, OptionError, RlioError, StateError, excerpt
from rlio.policies.checkpoint import load_state, remove_empty, save_state
from rlio.replay.samplers import PrioritisedSampler
from rlio.replay.store import ReplayStore
from rlio.storage import Storage

__all__ = ["load_checkpoint", "save_checkpoint"]

_NEWEST: Final = "checkpoint.json"
_STATES: Final = "states"
_FORMAT: Final = 1

#: How a part is stored: as rows of a store, through one of the pairs of methods, or directly as a value.
_Kind: TypeAlias = Literal["store", "priorities", "generator", "get_state", "state_dict", "value"]
# Kinds that are the name of a method, and the method that loads what it gives.
_METHODS: Final[dict[_Kind, str]] = {"get_state": "set_state", "state_dict": "load_state_dict"}


def save_checkpoint(
    folder: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, **parts: Any
) -> None:
    """Store ``parts`` in ``folder`` and replace the previous checkpoint: completely, or not at all.

    Do not pass a writer: it publishes its rows itself. A live mix is not restored exactly: its state holds
    the positions of its stored sources, and its sampler continues at the start of new episodes.

    Args:
        folder: A path or any fsspec URL, used for this checkpoint only.
        storage_options: For fsspec.
        parts: Name -> object or value to store:

            - a `Policy`, a `RolloutWorker`, or another object with ``get_state`` and ``set_state``;
            - a reader, a sampler, a torch module, optimizer or scheduler, or another object with
              ``state_dict`` and ``load_state_dict``. A prioritised sampler is stored with its priorities;
            - a live `ReplayStore`, with its rows. ``folder`` must then be on a local disk;
            - a `numpy.random.Generator`;
            - numbers, strings, None, arrays, tensors, and dicts, lists and tuples of those.

    Raises:
        OptionError: No parts are given; or a part is a data set's store, or a store while ``folder`` is
            remote.
        StateError: A part is of none of these kinds, or its state holds another kind of value.
        PublishError: The checkpoint could not be stored.
        CacheError: The disk is full.
    """
    if not parts:
        raise OptionError("save_checkpoint() was given no parts: name them, such as policy=policy, step=step")
    kinds = {name: _kind_of(name, part) for name, part in parts.items()}
    storage = Storage.open(folder, storage_options=storage_options)
    stores = [name for name, kind in kinds.items() if kind == "store"]
    if stores and not storage.is_local:
        raise OptionError(
            f"{stores[0]}= is a store, and {excerpt(str(folder))} is not a local folder: rows are saved only "
            "to local disks; leave the store out, or pass a local path",
            uri=storage.uri,
        )
    states = {name: _state_of(kinds[name], part) for name, part in parts.items() if name not in stores}
    number = uuid.uuid4().hex
    try:
        place = storage.uri_of(number)
        save_state(f"{place}/{_STATES}", states, storage_options=storage_options)
        for name in stores:
            parts[name].save(Path(place, name))
        newest = {"format": _FORMAT, "newest": number, "parts": kinds}
        storage.put(_NEWEST, json.dumps(newest, sort_keys=True).encode())
    except BaseException:
        with contextlib.suppress(RlioError):  # The error that is raised is the one that matters.
            _remove(storage, lambda other: other == number)
        raise
    _remove(storage, lambda other: other != number)
    remove_empty(storage)


def load_checkpoint(
    folder: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, **parts: Any
) -> dict[str, Any]:
    """Restore ``parts`` from what `save_checkpoint` stored under their names.

    Reads and checks everything requested before it changes a part.

    Args:
        folder: The folder that was given to `save_checkpoint`.
        storage_options: For fsspec.
        parts: Name -> the object to restore, made as before: policies are bound, readers and modules have the
            same arguments. ``store=rlio.ReplayStore``, the class, asks for a new store with the rows. Parts
            that you leave out are not restored.

    Returns:
        By name: the values that were stored directly, and the new stores. Tuples come back as lists.

    Raises:
        DataNotFound: The folder holds no checkpoint.
        CorruptData: The checkpoint is damaged.
        StateError: The checkpoint has no part of a given name, or a part of another kind; or a state does not
            fit. In the last case the parts before it are already restored.
    """
    storage = Storage.open(folder, storage_options=storage_options)
    number, kinds = _newest(storage)
    for name, part in parts.items():
        _check_fits(name, part, kinds, storage.uri)
    place = storage.uri_of(number)
    states = load_state(f"{place}/{_STATES}", storage_options=storage_options)
    found = {name: state for name, state in states.items() if kinds[name] == "value"}
    for name, part in parts.items():
        if kinds[name] == "store":
            found[name] = part.load(Path(place, name))
    for name, part in parts.items():
        if kinds[name] not in ("store", "value"):
            _restore(kinds[name], part, states[name])
    return found


def _newest(storage: Storage) -> tuple[str, dict[str, _Kind]]:
    """The subfolder of the newest checkpoint, and the kinds of its parts."""
    raw = storage.read(_NEWEST)
    try:
        newest = json.loads(raw)
        number, kinds = newest["newest"], newest["parts"]
        if newest["format"] != _FORMAT or not isinstance(kinds, dict) or uuid.UUID(hex=number).hex != number:
            raise ValueError(f"format {excerpt(newest['format'])}, expected {_FORMAT}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptData(
            f"this is not a checkpoint of this version: {error!r}", uri=storage.uri_of(_NEWEST)
        ) from error
    return number, kinds


def _kind_of(name: str, part: Any) -> _Kind:
    if isinstance(part, ReplayStore):
        return "store"
    if isinstance(part, PrioritisedSampler):
        return "priorities"
    if isinstance(part, np.random.Generator):
        return "generator"
    for save, load in _METHODS.items():
        if callable(getattr(part, save, None)) and callable(getattr(part, load, None)):
            if isinstance(part, type):
                raise StateError(f"{name}={excerpt(part)} is a class: pass an instance")
            return save
    return "value"


def _check_fits(name: str, part: Any, kinds: Mapping[str, _Kind], uri: str) -> None:
    if name not in kinds:
        raise StateError(f"the checkpoint has no part {name!r}: it has {', '.join(sorted(kinds))}", uri=uri)
    stored = kinds[name]
    if stored == "store":
        if isinstance(part, type) and issubclass(part, ReplayStore):
            return
        raise StateError(
            f"{name}={excerpt(part)}: the rows of a store are loaded into a new store; pass "
            f"{name}=rlio.ReplayStore, and take the store from the result",
            uri=uri,
        )
    given = _kind_of(name, part)
    if given != stored or given == "value":
        raise StateError(
            f"{name}={excerpt(part)} cannot restore a part of the kind {stored!r}: values come with the "
            "result; pass an object like the one that was saved for other parts",
            uri=uri,
        )


def _state_of(kind: _Kind, part: Any) -> Any:
    if kind == "generator":
        return part.bit_generator.state
    if kind == "priorities":
        with part.store.lock:
            return {"state": part.state_dict(), **part.kept()}
    return getattr(part, kind)() if kind in _METHODS else part


def _restore(kind: _Kind, part: Any, state: Any) -> None:
    if kind == "generator":
        _restore_generator(part, state)
    elif kind == "priorities":
        part.restore(state)
        part.load_state_dict(state["state"])
    else:
        getattr(part, _METHODS[kind])(state)


def _restore_generator(generator: np.random.Generator, state: Mapping[str, Any]) -> None:
    try:
        generator.bit_generator.state = state
    except (ValueError, TypeError, KeyError) as error:
        raise StateError(
            f"the state is not of a {type(generator.bit_generator).__name__}: {error}"
        ) from error


def _remove(storage: Storage, chosen: Callable[[str], bool]) -> None:
    """Remove the checkpoints whose subfolders are ``chosen``, and nothing else."""
    for number in storage.folders(""):
        with contextlib.suppress(ValueError):
            if uuid.UUID(hex=number).hex == number and chosen(number):
                if storage.is_local:
                    shutil.rmtree(Path(storage.root, number), ignore_errors=True)
                else:
                    for path, _ in storage.list(number):
                        storage.remove(path)
