"""What readers of foreign files share: their files, errors of libraries, and damage.

Not here: the contents of files (`rlio.readers.json_reader`, `rlio.readers.foreign_parquet`, `rlio.formats`),
and the order of reading (`rlio.readers.source_reader`, `rlio.readers.record_reader`).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as AnyMapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from rlio.errors import CorruptData, DataNotFound, SchemaError, UnknownLayout, raise_at
from rlio.formats.files.partitions import has_partitions
from rlio.formats.format import refuse_known
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.mapping import Mapping
from rlio.source.damage import Damage, SkippedRecord, damage_named
from rlio.storage import InputFile, expand_inputs
from rlio.storage.paths import StrPath
from rlio.support.spaces import Spaces

__all__ = ["Failures", "FileOptions", "Guard", "find_files", "in_column"]

logger: logging.Logger = logging.getLogger("rlio")


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """How files of another library are opened, as `rlio.read` and `rlio.open_dataset` take it.

    Attributes:
        mapping: What the columns of a table mean; None: their names are rlio's.
        format: Name of the format; None: recognise it.
        format_options: Options of the format, see docs/foreign.md.
        spaces: (observation space, action space), if the files do not state them; None: not known.
        storage_options: Keywords of the fsspec filesystem.
        limits: Bounds on the files.
        on_error: What to do with damage that is found at opening.
        columns: Columns that are asked for. A format may have some that it gives only then.
    """

    mapping: Mapping | None = None
    format: str | None = None
    format_options: AnyMapping[str, Any] | None = None
    spaces: Spaces | None = None
    storage_options: AnyMapping[str, Any] | None = None
    limits: Limits = DEFAULT_LIMITS
    on_error: Literal["raise", "skip"] = "raise"
    columns: Sequence[str] = ()


class Guard:
    """A block that reads a file: turns a library's errors about damage into CorruptData with the place.

    Args:
        file: The file.
        record: Number of the record or row group; None: the file as a whole.
        format: Name of the format, for the message.
    """

    def __init__(self, file: InputFile, record: int | None = None, *, format: str) -> None:
        self._file, self._record, self._format = file, record, format

    def __enter__(self) -> None:  # With contextlib, it would take ten times as long for each episode.
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        uri, record = self._file.uri, self._record
        try:
            with damage_named(self._format, uri=uri, record=record):
                raise error
        except (SchemaError, CorruptData, UnknownLayout) as damage:
            raise_at(damage, uri=uri, record=record)
        finally:
            # The error's traceback has this frame: a name for it here would keep all alive until the next
            # collection of garbage.
            del error, trace


def find_files(
    inputs: StrPath | Sequence[StrPath], how: FileOptions, *, suffixes: tuple[str, ...]
) -> list[InputFile]:
    """The files that ``inputs`` name, see `expand_inputs`. If there are none, the error says why.

    Raises:
        UnsafeData: ``inputs`` hold more names than `Limits.listed_names`.
        UnknownLayout: ``inputs`` hold no such files, but data of another library.
        DataNotFound: ``inputs`` hold no such files.
    """
    storage_options = how.storage_options
    try:
        is_lone = isinstance(inputs, (str, os.PathLike))
        return expand_inputs(
            inputs,
            suffixes=suffixes,
            recursive=is_lone and has_partitions(cast("StrPath", inputs), storage_options),
            storage_options=storage_options,
            limit=how.limits.listed_names,
        )
    except DataNotFound as error:
        values = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
        refuse_known(values, storage_options, error)
        raise


@contextlib.contextmanager
def in_column(name: str) -> Iterator[None]:
    """Add the column to errors about data that have none."""
    try:
        yield
    except (CorruptData, SchemaError) as error:
        if error.column is not None:
            raise
        raise type(error)(str(error), column=name) from error


# ---- damaged records ----


class Failures:
    """Handles damaged records: raises their errors, or counts and logs them.

    Attributes:
        skips: Whether damaged records are skipped and counted.
    """

    def __init__(self, on_error: Literal["raise", "skip"]) -> None:
        self.skips: bool = on_error == "skip"
        self._damage = Damage()
        self._in_a_row = 0

    @property
    def count(self) -> int:
        """Records skipped so far, each counted once over all epochs."""
        return self._damage.count

    @property
    def errors(self) -> list[SkippedRecord]:
        """The first 1000 of them."""
        return self._damage.errors

    def handle(self, error: CorruptData | SchemaError) -> None:
        """Raise ``error``, or count it and return."""
        if not self.skips:
            raise error
        self._in_a_row += 1
        before = self.count
        self._damage.add(error)
        if self.count > before:  # Otherwise it was met in an earlier epoch.
            logger.warning("skipped a record: %s", error)

    def succeeded(self) -> None:
        """Note that a record was read: not all data is damaged."""
        self._in_a_row = 0

    def check_hope(self, records: int) -> None:
        """Raise if ``records`` in a row failed: an endless reader would search without end."""
        if self._in_a_row and self._in_a_row >= records:
            raise CorruptData(
                f"none of the last {self._in_a_row} records could be read: an endless reader would never "
                f"return; one of the errors: {self.errors[-1].message if self.errors else 'unknown'}"
            )
