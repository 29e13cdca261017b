"""What readers of foreign files share: their files, errors of libraries, and damage.

Not here: the contents of files (`rlio.readers.json_reader`, `rlio.readers.foreign_parquet`, `rlio.formats`),
and the order of reading (`rlio.readers.source_reader`, `rlio.readers.record_reader`).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

from rlio.errors import CorruptData, DataNotFound, SchemaError, UnknownLayout, raise_at
from rlio.formats.files.partitions import has_partitions
from rlio.formats.format import refuse_known
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.source.damage import SkippedRecord, damage_named
from rlio.storage import InputFile, expand_inputs
from rlio.storage.paths import StrPath

__all__ = ["Failures", "Guard", "find_files", "in_column"]

logger: logging.Logger = logging.getLogger("rlio")

_KEPT_ERRORS = 1000
# Damaged records whose places are remembered, to count each once; 100 MB at most.
_KNOWN_PLACES = 1_000_000


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
    inputs: StrPath | Sequence[StrPath],
    *,
    suffixes: tuple[str, ...],
    storage_options: Mapping[str, Any] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> list[InputFile]:
    """The files that ``inputs`` name, see `expand_inputs`. If there are none, the error says why.

    Raises:
        UnsafeData: ``inputs`` hold more names than `Limits.listed_names`.
        UnknownLayout: ``inputs`` hold no such files, but data of another library.
        DataNotFound: ``inputs`` hold no such files.
    """
    try:
        is_lone = isinstance(inputs, (str, os.PathLike))
        return expand_inputs(
            inputs,
            suffixes=suffixes,
            recursive=is_lone and has_partitions(cast("StrPath", inputs), storage_options),
            storage_options=storage_options,
            limit=limits.listed_names,
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
        count: Records skipped so far, each counted once over all epochs.
        errors: The first 1000 of them.
    """

    def __init__(self, on_error: Literal["raise", "skip"]) -> None:
        self.skips: bool = on_error == "skip"
        self.count: int = 0
        self.errors: list[SkippedRecord] = []
        self._in_a_row = 0
        self._known: set[tuple[str | None, int]] = set()

    def handle(self, error: CorruptData | SchemaError) -> None:
        """Raise ``error``, or count it and return."""
        if not self.skips:
            raise error
        self._in_a_row += 1
        if error.record is not None:
            place = (error.uri, error.record)
            if place in self._known:
                return  # Counted in an earlier epoch.
            if len(self._known) < _KNOWN_PLACES:
                self._known.add(place)
        self.count += 1
        if len(self.errors) < _KEPT_ERRORS:
            self.errors.append(SkippedRecord(error.uri, error.record, str(error)))
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
