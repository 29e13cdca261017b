"""The options that all readers of stored data share.

Example:
    >>> ReadOptions.of({"batch_size": 256, "epochs": 1}).shuffle
    False
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Literal, TypedDict

from rlio.batch.join import UNLIKE, Unlike
from rlio.errors import OptionError, excerpt
from rlio.support.options import check_choice, check_count, check_flag, refuse_mapped_columns, set_options

__all__ = ["OrderKeywords", "PassKeywords", "ReadKeywords", "ReadOptions", "Unlike", "check_batch_size"]


class PassKeywords(TypedDict, total=False):
    """How often data is read and in which order, with defaults; see `ReadOptions`."""

    epochs: Annotated[int | None, None]
    shuffle: Annotated[bool, False]
    seed: Annotated[int | None, None]
    on_error: Annotated[Literal["raise", "skip"], "raise"]
    drop_last: Annotated[bool, False]


class OrderKeywords(PassKeywords, total=False):
    """Which data is read, how often and in which order, with defaults; see `ReadOptions`."""

    columns: Annotated[list[str] | Unlike | None, None]


class ReadKeywords(OrderKeywords, total=False):
    """The keyword options that every reader of stored data takes, with defaults; see `ReadOptions`."""

    batch_size: Annotated[int | None, None]
    shard: Annotated[tuple[int, int], (0, 1)]


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How stored data is read.

    Attributes:
        batch_size: Rows per `sample()`; for an endless reader, at most as many as its data has. None: the
            reader's own size.
        epochs: Passes over the data; None: endless.
        shuffle: Whether each epoch has its own seeded permutation; otherwise rows come in recorded order.
        seed: Seed of the order; None draws one from the OS, logs it and keeps it in the state. Ranks that
            shuffle need one, the same for all: their shares are parts of one order.
        shard: (rank, world): read only the part of the data for this rank out of ``world``.
        columns: Columns to read; None: all. As a keyword, a text says what to do if files have different
            columns: ``"error"``, ``"intersect"`` or ``"fill"``, see `unlike`.
        unlike: ``"error"`` refuses files with different columns at opening; ``"intersect"`` reads the columns
            that all files have; ``"fill"`` reads all columns, with zeros where a file has none. Both keep
            ``truncateds`` and ``new_obs_valid``: in a file without them, no row is truncated or lacks its
            ``new_obs``.
        on_error: What to do with a damaged record: ``"raise"``, or ``"skip"`` it, count it and log it.
        drop_last: Drop the last batch if it is shorter than requested.
    """

    batch_size: int | None = None
    epochs: int | None = None
    shuffle: bool = False
    seed: int | None = None
    shard: tuple[int, int] = (0, 1)
    columns: list[str] | None = None
    unlike: Unlike = "error"
    on_error: Literal["raise", "skip"] = "raise"
    drop_last: bool = False

    @classmethod
    def of(cls, keywords: ReadKeywords) -> ReadOptions:
        """Return the options that ``keywords`` of a reader stand for."""
        columns = keywords.get("columns")
        if isinstance(columns, str):
            return cls(**{**keywords, "columns": None, "unlike": columns})  # type: ignore[arg-type]  # by name, above
        return cls(**keywords)  # type: ignore[arg-type]  # columns is not a str here

    def given(self) -> Iterator[str]:
        """``name=value`` of each option that is not the default."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                yield f"{field.name}={excerpt(value, 60)}"

    def __post_init__(self) -> None:
        set_options(
            self,
            batch_size=check_count(
                "batch_size", self.batch_size, least=1, of="rows", none="the source's own"
            ),
            epochs=check_count("epochs", self.epochs, least=1, none="endless"),
            seed=check_count("seed", self.seed, least=0, none="one from the OS"),
            shuffle=check_flag("shuffle", self.shuffle),
            drop_last=check_flag("drop_last", self.drop_last),
            shard=_checked_shard(self.shard),
        )
        names = self.columns
        refuse_mapped_columns(names)
        if names is not None and (isinstance(names, str) or not all(isinstance(x, str) for x in names)):
            raise OptionError(f"columns={excerpt(names)}: expected a list of names, or None for all columns")
        if self.unlike not in UNLIKE:
            raise OptionError(
                f"columns={excerpt(self.unlike)}: expected a list of names, None for all columns, or one of "
                f"{', '.join(map(repr, UNLIKE))} for files with different columns"
            )
        check_choice("on_error", self.on_error, ("raise", "skip"))
        if self.shuffle and self.seed is None and self.shard[1] > 1:
            raise OptionError(
                f"shard={self.shard} with shuffle=True and no seed: ranks that shuffle by seeds of their own "
                "serve some rows twice and others never; pass the same seed=... to all ranks"
            )
        if self.drop_last and self.batch_size is None:
            raise OptionError("drop_last=True needs batch_size: without one, no batch is short")


def check_batch_size(units: int, *, there: int | None, unit: str, uri: str | None = None) -> None:
    """Refuse a batch that would hold rows of an endless reader twice, or fill the memory with them.

    Args:
        units: Requested units.
        there: Units of one pass; None: the reader ends, or the number is unknown.
        unit: Name of the unit.
        uri: For messages.

    Raises:
        OptionError: ``units`` is larger than ``there``.
    """
    if there is not None and units > there:
        raise OptionError(
            f"a batch of {units} {unit} of an endless reader, whose data has {there} {unit}: ask for fewer, "
            "or pass epochs=1 for one short batch of all; Dataset.to_arrow() gives all rows of a data set",
            uri=uri,
        )


def _checked_shard(shard: object) -> tuple[int, int]:
    match shard:
        case (rank, world):
            most = check_count("shard[1]", world, least=1, of="ranks") - 1
            return check_count("shard[0]", rank, least=0, most=most), most + 1
        case _:
            raise OptionError(f"shard={excerpt(shard)}: expected (rank, world) with 0 <= rank < world")
