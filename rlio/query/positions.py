"""Positions of a pass over epochs, and their saved form.

A position counts units of all ranks together: equal calls lead to equal positions on all ranks.

One rule says which states load (docs/guarantees.md): what decides which units come next must be equal; what
only decides how they are served is the loading reader's own.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from rlio.errors import StateError, excerpt
from rlio.query.filters import advice_for
from rlio.read_options import ReadOptions
from rlio.schemas.schema import canonical_json
from rlio.support.states import seed_in, whole_number

__all__ = [
    "UnitRange",
    "check_offset",
    "check_options",
    "check_position",
    "check_seed",
    "choose_seed",
    "columns_digest",
    "draw_seed",
    "own_batch_size",
    "spans_of",
]

logger: logging.Logger = logging.getLogger("rlio")

# Options that do not decide which units come next. States hold some of them.
_SERVING = frozenset(("batch_size", "drop_last", "epochs"))
# Keys of a state's options -> the option that sets them, where it has another name.
_SET_BY = {"n_step": "draw", "sequences": "draw", "episodes": "draw", "gamma": "derive"}
_OTHER_ORDER = "pass the same shuffle, or finish the run with the version of rlio that began it"


class UnitRange(NamedTuple):
    """Units ``start`` to ``stop - 1`` of an epoch; or each ``step``-th of one lane: `rlio.query.lanes`."""

    epoch: int
    start: int
    stop: int
    lane: int = 0
    lanes: int = 1
    step: int = 1


def spans_of(epoch: int, first: int, last: int, total: int) -> Iterator[UnitRange]:
    """Split positions, counted from the start of ``epoch``, where epochs of ``total`` units meet."""
    while first < last:
        crossed, start = divmod(first, total)
        stop = min(start + last - first, total)
        yield UnitRange(epoch + crossed, start, stop)
        first += stop - start


def own_batch_size(options: ReadOptions, usual: int, *, there: Callable[[], int]) -> int:
    """Default number of units in a batch: for an endless reader, at most the units of an epoch.

    Args:
        options: Options of the reader.
        usual: Default for ``batch_size=None``.
        there: Returns the units of one epoch.
    """
    if options.batch_size is not None:
        return options.batch_size
    return usual if options.epochs is not None else max(min(usual, there()), 1)


def choose_seed(options: ReadOptions, uri: str) -> int | None:
    """The seed of the order; None for the recorded order. A seed from the OS is logged."""
    if not options.shuffle:
        return None
    if options.seed is not None:
        return options.seed
    return draw_seed(uri)


def draw_seed(uri: str) -> int:
    """Draw a seed from the OS, and log it."""
    drawn = secrets.randbits(63)
    logger.info("shuffling %s with seed %d", uri, drawn)
    return drawn


def columns_digest(options: ReadOptions) -> str | None:
    """A digest of ``columns``, in any order, for a state, because there may be thousands of columns."""
    return None if options.columns is None else _digest(sorted(options.columns))


def _digest(columns: list[str]) -> str:
    return hashlib.blake2b(canonical_json(columns).encode(), digest_size=8).hexdigest()


def check_options(saved: Any, ours: Mapping[str, Any], options: ReadOptions, *, uri: str) -> None:
    """Compare the options in a saved state, which may have any form, with those of a reader.

    Args:
        saved: The options in the state.
        ours: The same of the reader.
        options: The reader's options.
        uri: For messages.

    Raises:
        StateError: Some options differ that decide which units come next; the message names them.
    """
    saved = saved if isinstance(saved, dict) else {}
    # States of earlier versions hold the digest of the columns in the order in which they were named.
    if options.columns is not None and saved.get("columns") == _digest(list(options.columns)):
        saved = {**saved, "columns": columns_digest(options)}
    unlike = [name for name in {**ours, **saved} if not _fits(name, saved.get(name), ours.get(name))]
    if unlike:
        shown = [excerpt(name) + (f" ({_SET_BY[name]}=)" if name in _SET_BY else "") for name in unlike]
        raise StateError(
            f"the state was saved with other values of the options {', '.join(shown)}: open the data with "
            f"the options of the saved reader{advice_for(saved.get('filter'), ours.get('filter'))}",
            uri=uri,
        )


def _fits(name: str, saved: Any, ours: Any) -> bool:
    """Whether a saved value of an option fits a reader's: it is equal, or may differ and is of its kind."""
    if name not in _SERVING:
        return bool(saved == ours)
    if isinstance(ours, str):  # A digest.
        return isinstance(saved, str)
    return saved is None or (type(saved) is int and saved > 0)


def check_position(
    position: Mapping[str, Any], fingerprint: Mapping[str, Any], options: ReadOptions, *, uri: str
) -> None:
    """Compare a saved position, apart from its epoch and offset, with that of a reader.

    Raises:
        StateError: The position belongs to other data or other options.
    """
    for key, value in fingerprint.items():
        if key == "options":
            check_options(position.get(key), value, options, uri=uri)
        elif position.get(key) != value:
            raise StateError(
                f"state['position'][{key!r}] is {excerpt(position.get(key))} but this reader has {value!r}: "
                + _advice(key, position.get(key), value),
                uri=uri,
            )
    if not options.shuffle:
        if position.get("seed") is not None:
            raise StateError(
                f"state['position']['seed'] is {excerpt(position['seed'])}, but the recorded order has none: "
                "load the state into the reader that saved it",
                uri=uri,
            )
    else:
        check_seed(position, options.seed, uri=uri)


def _advice(key: str, saved: Any, ours: Any) -> str:
    if key == "order":
        return _OTHER_ORDER
    # After the dash stands which rows a store leaves out as damaged.
    if key == "snapshot" and str(saved).partition("-")[0] == str(ours).partition("-")[0]:
        return "other rows of the same data are damaged than when it was saved: restore them, or begin anew"
    return "open the same data with the same options"


def check_seed(position: Mapping[str, Any], given: int | None, *, uri: str = "") -> int:
    """The seed of a saved position, which counts if the reader was given none.

    Raises:
        StateError: The reader was given another.
    """
    saved = seed_in(position)
    if given is not None and given != saved:
        raise StateError(
            f"state['position']['seed'] is {saved} but this reader was given {given}: pass the same seed, or "
            "none to take that of the state",
            uri=uri or None,
        )
    return saved


def check_offset(position: Mapping[str, Any], options: ReadOptions, *, total: int) -> tuple[int, int]:
    """The epoch and the offset of a saved position, which must exist in the data, and in this reader.

    Raises:
        StateError: They do not exist.
    """
    epoch, offset = (whole_number(position, key) for key in ("epoch", "position"))
    last = options.epochs
    if offset >= max(total, 1) or (last is not None and (epoch, offset) > (last, 0)):
        raise StateError(
            f"state['position'] is unit {offset} of epoch {epoch}, but an epoch has {total} units and the "
            f"reader has {'endless' if last is None else last} epochs: open the same data, with at least as "
            "many epochs"
        )
    return epoch, offset
