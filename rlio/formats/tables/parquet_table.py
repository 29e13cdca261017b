"""`ParquetTable`: Parquet files of other programs as a `Table`, read a row group at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.formats.files.inputs import Failures
from rlio.formats.files.parquet_footer import Extension
from rlio.formats.place import Place
from rlio.formats.tables.parquet_source import RowGroups
from rlio.formats.tables.table import Pieces
from rlio.limits import Limits
from rlio.storage import InputFiles
from rlio.support.calls import closing_on_error

__all__ = ["ParquetTable"]


class ParquetTable(Pieces):
    """Parquet files; a `Table`. Opening reads their footers.

    Columns that `rlio.convert` wrote are what they were: its footers state rows of different
    lengths, and times.

    Args:
        place: The files.
        limits: Bounds on the files.
    """

    def __init__(self, place: Place, *, limits: Limits) -> None:
        super().__init__(place.uri, place.files, limits)
        self._groups = RowGroups(place.files, limits, None, refuse=True, mapped=True)
        self.inputs: InputFiles | None = self._groups.inputs
        with closing_on_error(self._groups):
            self._groups.index(Failures("raise"))
            #: Of each file: the numbers of its row groups among all.
            self._of_file: list[list[int]] = [[] for _ in self.files]
            for group, (file, _, _) in enumerate(self._groups.places):
                self._of_file[file].append(group)
            for file, groups in enumerate(self._of_file):
                self.add_pieces(self._groups.names(file), [self._groups.rows[group] for group in groups])
            self.ragged: Mapping[str, NDArray[Any]] = self._groups.stated_lists

    def decode(self, file: int, piece: int, names: Sequence[str]) -> Any:
        """See `Pieces`."""
        group = self._of_file[file][piece]
        rows = self._groups.rows[group]
        with self._groups.guarded(group):
            return self._groups.read(group, 0, rows, frozenset(names))

    def places(self, file: int, piece: int, names: Collection[str]) -> Iterator[tuple[int, int]]:
        """See `Pieces`."""
        found = self._groups.spans(self._of_file[file][piece], frozenset(names))
        yield from (span[1:] for span in found)

    def ensure_open(self, file: int) -> None:
        """See `Table`."""
        for group in self._of_file[file][:1]:
            self._groups.open(group)

    def extensions(self, file: int) -> Mapping[str, Extension]:
        """See `Pieces`."""
        groups = self._of_file[file]
        return self._groups.extensions(groups[0]) if groups else {}

    def times(self, file: int) -> Mapping[str, np.dtype[Any]]:
        """See `Pieces`."""
        return self._groups.times_of[file]

    def close(self) -> None:
        """Close all files."""
        super().close()
        self._groups.close()
