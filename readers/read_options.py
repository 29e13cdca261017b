"""What every reader of stored data takes.

Example:
    >>> ReadOptions.of({"batch_size": 256, "epochs": 1}, reader="DatasetReader").shuffle
    False
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, TypedDict

from rlio.batch.join import UNLIKE, Unlike
from rlio.errors import OptionError, excerpt
from rlio.support.options import refuse_unknown

__all__ = ["ReadKeywords", "ReadOptions", "Unlike", "check_batch_size"]


class ReadKeywords(TypedDict, total=False):
    """The keyword options that every reader of stored data takes; see `ReadOptions`."""

    batch_size: int | None
    epochs: int | None
    shuffle: bool
    seed: int | None
    shard: tuple[int, int]
    columns: list[str] | Unlike | None
    on_error: Literal["raise", "skip"]
    drop_last: bool


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How stored data is read.

    Attributes:
        batch_size: Rows per `sample()`; of an endless reader, no more than its data has. None: the reader's
            own size.
        epochs: Passes over the data; None: endless.
        shuffle: Whether the order is a seeded permutation, another one each epoch; else as recorded.
        seed: Seed of the order; None draws one from the OS, logs it and keeps it in the state.
        shard: (rank, world): read the part of the data that is ``rank``'s out of ``world``.
        columns: Columns to read; None: all. As a keyword, a text says what is done where files have unlike
            columns: ``"error"``, ``"intersect"`` or ``"fill"``, see `unlike`.
        unlike: ``"error"`` refuses such files when they are opened; ``"intersect"`` reads the columns that
            all have; ``"fill"`` reads all, with zeros where a file has none. ``truncateds`` and
            ``new_obs_valid`` are kept by either: a file without them has no row that is truncated, or whose
            ``new_obs`` is missing.
        on_error: What to do with a damaged record: ``"raise"``, or ``"skip"`` it, count it and log it.
        drop_last: Drop the last batch if it is shorter than asked for.
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
    def of(cls, keywords: ReadKeywords, *, reader: str) -> ReadOptions:
        """Check ``keywords`` of the class named ``reader`` and give the options."""
        refuse_unknown(keywords, (field.name for field in fields(cls) if field.name != "unlike"), of=reader)
        columns = keywords.get("columns")
        if isinstance(columns, str):
            return cls(**{**keywords, "columns": None, "unlike": columns})  # type: ignore[arg-type]  # by name, above
        return cls(**keywords)  # type: ignore[arg-type]  # columns is no str here

    def __post_init__(self) -> None:
        for name, least, what in (
            ("batch_size", 1, "a number of rows, at least 1, or None"),
            ("epochs", 1, "a whole number, at least 1, or None for endless"),
            ("seed", 0, "a whole number, 0 or more, or None"),
        ):
            value = getattr(self, name)
            if value is not None and not (_is_whole(value) and value >= least):
                raise OptionError(f"{name}={excerpt(value)}: {what}")
        for name in ("shuffle", "drop_last"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name}={excerpt(getattr(self, name))}: True or False")
        match self.shard:
            case (rank, world) if _is_whole(rank) and _is_whole(world) and 0 <= rank < world:
                pass
            case _:
                raise OptionError(f"shard={excerpt(self.shard)}: (rank, world) with 0 <= rank < world")
        names = self.columns
        if names is not None and (isinstance(names, str) or not all(isinstance(x, str) for x in names)):
            raise OptionError(f"columns={excerpt(names)}: a list of names, or None for all columns")
        if self.unlike not in UNLIKE:
            raise OptionError(
                f"columns={excerpt(self.unlike)}: a list of names, None for all columns, or one of "
                f"{', '.join(map(repr, UNLIKE))} for files with unlike ones"
            )
        if self.on_error not in ("raise", "skip"):
            raise OptionError(f"on_error={excerpt(self.on_error)}: 'raise' or 'skip'")
        if self.drop_last and self.batch_size is None:
            raise OptionError("drop_last=True needs batch_size: without one, no batch is short")


def check_batch_size(units: int, *, there: int | None, unit: str, uri: str | None = None) -> None:
    """Refuse a batch that would hold rows of an endless reader twice, or fill the memory with them.

    Args:
        units: What is asked for.
        there: Units of one pass; None: the reader ends, or that is not known.
        unit: What is counted.
        uri: For messages.

    Raises:
        OptionError: ``units`` are more.
    """
    if there is not None and units > there:
        raise OptionError(
            f"a batch of {units} {unit} of an endless reader, whose data has {there} {unit}: ask for fewer, "
            "or give epochs=1 for one short batch of all; Dataset.to_arrow() gives all rows of a data set",
            uri=uri,
        )


def _is_whole(value: object) -> bool:
    """Whether ``value`` counts something: an integer, NumPy's included, and no bool."""
    return hasattr(value, "__index__") and not isinstance(value, bool)
