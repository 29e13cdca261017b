"""`Hdf5Source`: what the sources of HDF5 files share. Each file is indexed when it is opened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.columns import Columns
from rlio.errors import CorruptData
from rlio.formats.files.hdf5_files import Hdf5Files
from rlio.formats.place import Place
from rlio.limits import Limits
from rlio.source.episodes import measure_first
from rlio.storage import InputFile, each_file
from rlio.support.calls import closing_on_error

__all__ = ["Hdf5Source", "cut_ranges", "flags_of", "flat", "one_more", "ranges_of"]

# Rows that are measured.
_SAMPLE_ROWS: Final = 64


class Hdf5Source:
    """Base of an `EpisodeSource` over HDF5 files, of which parts are read: implement `_index` and `_rows`.

    Attributes:
        uri, files, lengths, row_bytes, spaces: See `EpisodeSource`.
        notes: Sentences about the data for a report.
    """

    spaces: tuple[Any, Any] | None = None
    reads_parts = True

    def __init__(self, place: Place, *, limits: Limits) -> None:
        self.uri: str = place.uri
        self.files: tuple[InputFile, ...] = place.files
        self._limits = limits
        self.notes: list[str] = []
        self._handles = Hdf5Files(place.files, limits)
        self._places: list[tuple[int, Any]] = []
        self.lengths: list[int] = []
        with closing_on_error(self._handles):
            for number in each_file(self.files):
                for key, steps in self._handles.guarded(number, None, partial(self._indexed, number)):
                    self._places.append((number, key))
                    self.lengths.append(steps)
            self.row_bytes: int = measure_first(range(len(self.lengths)), self._sample)

    def _sample(self, episode: int) -> SampleBatch:
        return self.load_part(episode, 0, min(self.lengths[episode], _SAMPLE_ROWS), None)

    def _indexed(self, number: int) -> list[tuple[Any, int]]:
        return list(self._index(number))

    def _index(self, number: int) -> Iterator[tuple[Any, int]]:
        """The episodes of a file: what `_rows` needs to find each, and its steps."""
        raise NotImplementedError  # A hook: each format has its own.

    def _rows(self, number: int, key: Any, rows: range, steps: int) -> SampleBatch:
        """Rows of an episode of ``steps`` steps: all of them, or those of a part."""
        raise NotImplementedError

    def load(self, episode: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read one episode; see `EpisodeSource`."""
        return self.load_part(episode, 0, self.lengths[episode], columns)

    def load_part(self, episode: int, start: int, stop: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read some steps of an episode; see `PartSource`."""
        number, key = self._places[episode]
        rows, steps = range(start, stop), self.lengths[episode]
        return self._handles.guarded(number, episode, lambda: self._rows(number, key, rows, steps))

    def close(self) -> None:
        """Close all files."""
        self._handles.close()

    # ---- for subclasses ----

    def _member(self, number: int, path: str) -> Any:
        """A group or dataset that is stored in the file itself; None: there is none."""
        return self._handles.member(number, path)

    def _dataset(self, number: int, path: str) -> Any:
        """A dataset, checked.

        Raises:
            CorruptData: It is absent, or not a dataset.
            UnsafeData: It leads out of the file, or asks for too much.
        """
        return self._handles.checked(number, path)

    def _read(self, number: int, path: str, rows: range, steps: int) -> NDArray[Any]:
        """Rows of a dataset that has ``steps``; ``rows`` may go beyond them by one."""
        dataset = self._dataset(number, path)
        if dataset.shape[:1] != (steps,):
            raise CorruptData(f"{path} has the shape {dataset.shape}, expected {steps} rows")
        return self._handles.read(dataset, rows.start, rows.stop)

    def _rows_in(self, number: int, path: str) -> int:
        """The rows of a dataset, which are claimed."""
        shape = self._dataset(number, path).shape
        if not shape:
            raise CorruptData(f"{path} is one value, expected rows")
        self._handles.allowance.claim(shape[0])
        return int(shape[0])

    def _values(self, number: int, path: str) -> NDArray[Any]:
        """All of a dataset."""
        return self._handles.read(self._dataset(number, path))

    def _rows_at(self, dataset: Any, ranges: Sequence[tuple[int, int]]) -> NDArray[Any]:
        """Rows of a dataset, from one or two ranges."""
        parts = [self._handles.read(dataset, start, stop) for start, stop in ranges]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _check_rows(self, number: int, paths: Sequence[str], rows: int) -> None:
        """Raise unless each dataset has ``rows`` rows."""
        for path in paths:
            shape = self._dataset(number, path).shape
            if not shape or shape[0] != rows:
                raise CorruptData(f"{path} has the shape {shape}, expected {rows} rows")


def flat(array: NDArray[Any]) -> NDArray[Any]:
    """One number a row, also where the file has (N, 1)."""
    return array.reshape(len(array)) if array.ndim == 2 and array.shape[1] == 1 else array


def one_more(rows: range) -> range:
    """Rows of a part, and the one after it, whose observation is the last row's next one."""
    return range(rows.start, rows.stop + 1)


def flags_of(
    rows: range | int, steps: int | None = None, *, terminated: bool, truncated: bool
) -> dict[str, NDArray[np.bool_]]:
    """The ends of an episode, on its last row: of all rows, or of some of its ``steps``."""
    count, stop = (rows, rows) if isinstance(rows, int) else (len(rows), rows.stop)
    ends = np.zeros((2, count), np.bool_)
    if steps is None or stop == steps:
        ends[:, -1:] = [[terminated], [truncated]]
    return {Columns.TERMINATEDS: ends[0], Columns.TRUNCATEDS: ends[1]}


def ranges_of(rows: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Rows as ranges (start, stop) of rows that follow each other."""
    cuts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    return [(int(rows[a]), int(rows[b - 1]) + 1) for a, b in pairwise(cuts) if a < b]


def cut_ranges(ranges: Sequence[tuple[int, int]], rows: range) -> list[tuple[int, int]]:
    """Those of ``rows``, counted through the ranges."""
    found, at = [], 0
    for start, stop in ranges:
        low, high = max(rows.start - at, 0), min(rows.stop - at, stop - start)
        if low < high:
            found.append((start + low, start + high))
        at += stop - start
    return found
