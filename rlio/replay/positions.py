"""Positions of a pass over epochs, and the states in which they are kept.

A position counts units over all ranks, so that it is equal on all ranks after equal calls.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from rlio.errors import StateError
from rlio.readers.read_options import ReadOptions
from rlio.schemas.schema import canonical_json

__all__ = [
    "UnitRange",
    "check_offset",
    "check_options",
    "check_position",
    "choose_seed",
    "columns_digest",
    "draw_seed",
    "own_batch_size",
    "spans_of",
]

logger = logging.getLogger("rlio")


class UnitRange(NamedTuple):
    """Units ``start`` to ``stop - 1`` of an epoch."""

    epoch: int
    start: int
    stop: int


def spans_of(epoch: int, first: int, last: int, total: int) -> Iterator[UnitRange]:
    """Cut positions counted from the beginning of ``epoch`` where epochs of ``total`` units meet."""
    while first < last:
        crossed, start = divmod(first, total)
        stop = min(start + last - first, total)
        yield UnitRange(epoch + crossed, start, stop)
        first += stop - start


def own_batch_size(options: ReadOptions, usual: int, *, there: Callable[[], int]) -> int:
    """Units of a batch where no number is asked for: of an endless reader, no more than there are.

    Args:
        options: Of the reader.
        usual: Where ``batch_size`` is None.
        there: Gives the units of one epoch.
    """
    if options.batch_size is not None:
        return options.batch_size
    return usual if options.epochs is not None else max(min(usual, there()), 1)


def choose_seed(options: ReadOptions, uri: str) -> int | None:
    """The seed of the order; None if it is the recorded one. One from the OS is logged."""
    if not options.shuffle:
        return None
    if options.seed is not None:
        return options.seed
    return draw_seed(uri)


def draw_seed(uri: str) -> int:
    """A seed from the OS, logged."""
    drawn = secrets.randbits(63)
    logger.info("shuffling %s with seed %d", uri, drawn)
    return drawn


def columns_digest(options: ReadOptions) -> str | None:
    """What a state holds of ``columns``: a digest, as there may be thousands."""
    if options.columns is None:
        return None
    return hashlib.blake2b(canonical_json(list(options.columns)).encode(), digest_size=8).hexdigest()


def check_options(saved: Any, ours: Mapping[str, Any], *, uri: str) -> None:
    """Compare the options in a saved state, which may be anything, with those of a reader.

    Raises:
        StateError: Some differ; the message names them.
    """
    saved = saved if isinstance(saved, dict) else {}
    unlike = [name for name, value in ours.items() if saved.get(name) != value]
    if unlike:
        raise StateError(
            f"the state was saved with another value of the options {', '.join(unlike)}: open the data "
            "with the options of that time",
            uri=uri,
        )


def check_position(
    position: Mapping[str, Any], fingerprint: Mapping[str, Any], options: ReadOptions, *, uri: str
) -> None:
    """Compare what a saved position holds beside epoch and offset with what a reader has.

    Raises:
        StateError: It is a position in other data, or with other options.
    """
    for key, value in fingerprint.items():
        if key == "options":
            check_options(position.get(key), value, uri=uri)
        elif position.get(key) != value:
            raise StateError(
                f"state['position'][{key!r}] is {position.get(key)!r} but this reader has {value!r}: "
                "open the same data with the same options",
                uri=uri,
            )
    if options.seed is not None and options.shuffle and position["seed"] != options.seed:
        raise StateError(
            f"state['position']['seed'] is {position['seed']}; this reader has {options.seed}", uri=uri
        )


def check_offset(position: Mapping[str, Any], options: ReadOptions, *, total: int) -> tuple[int, int]:
    """The epoch and the offset of a saved position, which must be in the data.

    Raises:
        StateError: They are not.
    """
    epoch, offset, last = int(position["epoch"]), int(position["position"]), options.epochs
    if not 0 <= offset < max(total, 1) or epoch < 0 or (last is not None and epoch > last):
        raise StateError(
            f"state['position'] is unit {offset} of epoch {epoch}; an epoch has {total} and there are "
            f"{'endless' if last is None else last} epochs"
        )
    return epoch, offset
