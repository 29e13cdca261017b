"""`save_checkpoint` and `load_checkpoint`: the complete state of a training run, in one folder.

``checkpoint.json`` names the subfolder of the newest checkpoint. It is replaced last, atomically: with any
number of savers and loaders, and if a process dies at any time, the folder holds one whole checkpoint
(`rlio.storage.generations`). States are JSON and ``.npz``; rows of a live store are mapped arrays. Nothing is
pickled, and loading runs no code.

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

import json
import os
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from rlio.errors import CorruptData, OptionError, RlioError, StateError, excerpt
from rlio.policies.checkpoint import load_state, save_state
from rlio.policies.torch_arrays import is_optimizer, load_optimizer
from rlio.replay.samplers import PrioritisedSampler
from rlio.replay.store import ReplayStore
from rlio.storage import Storage
from rlio.storage.generations import Generations
from rlio.support.states import restore_generator

__all__ = ["load_checkpoint", "save_checkpoint"]

_NEWEST: Final = "checkpoint.json"
_STATES: Final = "states"
_FORMAT: Final = 2

#: How a part is stored: as rows of a store, through one of the pairs of methods, or directly as a value.
_Kind: TypeAlias = Literal["store", "priorities", "generator", "get_state", "state_dict", "value"]
_KINDS: Final = frozenset(get_args(_Kind))
# Kinds that are the name of a method, and the method that loads what it gives.
_METHODS: Final[dict[_Kind, str]] = {"get_state": "set_state", "state_dict": "load_state_dict"}


def save_checkpoint(
    folder: str | os.PathLike[str], /, *, storage_options: Mapping[str, Any] | None = None, **parts: Any
) -> None:
    """Store ``parts`` in ``folder`` and replace the previous checkpoint: completely, or not at all.

    Several processes may save into one folder at once: the checkpoint that was completed last counts, whole.
    Do not pass a writer: it publishes its rows itself. A live mix is not restored exactly: its state holds
    the positions of its stored sources, and its sampler continues at the start of new episodes.

    Args:
        folder: A path or any fsspec URL. Other files in it are not touched.
        storage_options: For fsspec; no part can have this name.
        parts: Name -> object or value to store, under any other name:

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
        PublishError: The checkpoint could not be stored; the previous one is unchanged.
        StoreError: Likewise.
        CacheError: Likewise: the disk is full.
    """
    if not parts:
        raise OptionError("save_checkpoint() was given no parts: name them, such as policy=policy, step=step")
    kinds = {name: _kind_of(name, part) for name, part in parts.items()}
    storage = Storage.open(folder, storage_options=storage_options)
    stores = [name for name, kind in kinds.items() if kind == "store"]
    if stores and not storage.is_local:
        raise OptionError(
            f"{excerpt(stores[0])} is a store, and {excerpt(str(folder))} is not a local folder: rows are "
            "saved only to local disks; leave the store out, or pass a local path",
            uri=storage.uri,
        )
    states = {name: _state_of(kinds[name], part) for name, part in parts.items() if name not in stores}

    def make(number: str) -> bytes:
        place = _place_of(folder, storage, number)
        save_state(f"{place}/{_STATES}", states, storage_options=storage_options)
        for index, name in enumerate(stores):
            parts[name].save(f"{place}/store-{index}")
        newest = {"format": _FORMAT, "newest": number, "parts": kinds, "stores": stores}
        return json.dumps(newest, sort_keys=True).encode()

    Generations(storage, _NEWEST).replace(make)


def load_checkpoint(
    folder: str | os.PathLike[str], /, *, storage_options: Mapping[str, Any] | None = None, **parts: Any
) -> dict[str, Any]:
    """Restore ``parts`` from what `save_checkpoint` stored under their names.

    Reads and checks everything requested before it changes a part. If others save there meanwhile, all parts
    are of one checkpoint.

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
            fit. In the last case the parts before it are already restored, and a torch module has taken what
            fits.
    """
    storage = Storage.open(folder, storage_options=storage_options)
    generations = Generations(storage, _NEWEST)

    def load(content: bytes) -> tuple[_Contents, dict[str, Any], dict[str, Any]]:
        contents = _contents(content, generations, storage.uri_of(_NEWEST))
        for name, part in parts.items():
            _check_fits(name, part, contents.kinds, storage.uri)
        place = _place_of(folder, storage, contents.number)
        states = load_state(f"{place}/{_STATES}", storage_options=storage_options)
        if missing := contents.kinds.keys() - states.keys() - contents.stores.keys():
            raise CorruptData(f"the checkpoint lacks {excerpt(sorted(missing))}: save again", uri=storage.uri)
        stores = {
            name: part.load(f"{place}/{contents.stores[name]}")
            for name, part in parts.items()
            if name in contents.stores
        }
        return contents, states, stores

    contents, states, found = generations.read(load)
    found |= {name: states[name] for name, kind in contents.kinds.items() if kind == "value"}
    for name, part in parts.items():
        if name not in found:
            _restore(name, contents.kinds[name], part, states[name])
    return found


def _place_of(folder: str | os.PathLike[str], storage: Storage, number: str) -> str:
    """The subfolder of a checkpoint."""
    # Not of `storage.uri`, which masks the secrets of a URL.
    return f"{storage.root if storage.is_local else os.fspath(folder).rstrip('/')}/{number}"


class _Contents(NamedTuple):
    """What ``checkpoint.json`` says.

    Attributes:
        number: The subfolder of the newest checkpoint.
        kinds: Part -> its kind.
        stores: Store -> its folder in the subfolder.
    """

    number: str
    kinds: dict[str, _Kind]
    stores: dict[str, str]


def _contents(content: bytes, generations: Generations, uri: str) -> _Contents:
    try:
        newest = json.loads(content)
        number, kinds, version = newest["newest"], newest["parts"], newest["format"]
        if version not in (1, _FORMAT) or not generations.is_name(number):
            raise ValueError(f"format {excerpt(version)}, expected {_FORMAT}")
        if not _KINDS.issuperset(kinds.values()):
            raise ValueError(f"kinds {excerpt(kinds)}, expected {excerpt(sorted(_KINDS))}")
        names = [name for name, kind in kinds.items() if kind == "store"]
        if version == 1:  # The folder of a store had the name of the part.
            return _Contents(number, kinds, {name: name for name in names})
        if sorted(newest["stores"]) != sorted(names):
            raise ValueError(f"stores {excerpt(newest['stores'])}, expected {excerpt(names)}")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptData(
            f"this is not a checkpoint of this version: {excerpt(repr(error))}", uri=uri
        ) from error
    return _Contents(number, kinds, {name: f"store-{i}" for i, name in enumerate(newest["stores"])})


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
        raise StateError(
            f"the checkpoint has no part {excerpt(name)}: it has {excerpt(sorted(kinds))}", uri=uri
        )
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


def _restore(name: str, kind: _Kind, part: Any, state: Any) -> None:
    """Give a part its state.

    Raises:
        StateError: The state does not fit.
    """
    try:
        if kind == "generator":
            restore_generator(part.bit_generator, state, of=f"the state of the part {excerpt(name)}")
        elif kind == "state_dict" and is_optimizer(part):
            load_optimizer(part, state)
        elif kind == "priorities":
            part.restore(state)
            part.load_state_dict(state["state"])
        else:
            getattr(part, _METHODS[kind])(state)
    except RlioError:
        raise
    except Exception as error:  # Modules, optimizers and the objects of others raise what they like.
        raise StateError(
            f"the state of the part {excerpt(name)} does not fit {excerpt(type(part))}: "
            f"{type(error).__name__}: {excerpt(str(error))}; make the object as it was when it was saved"
        ) from error
