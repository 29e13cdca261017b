"""`Hdf5Source`: what the sources of HDF5 files share. Each file is indexed when it is opened."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.errors import CorruptData
from rlio.formats.files.hdf5_files import Hdf5Files, leaves_of
from rlio.formats.place import Place
from rlio.limits import Limits
from rlio.source.episodes import measure_first
from rlio.storage import InputFile, InputFiles, Span, each_file
from rlio.support.calls import closing_on_error

__all__ = ["Hdf5Source"]

# Rows that are measured.
_SAMPLE_ROWS: Final = 64


class Hdf5Source:
    """Base of an `EpisodeSource` over HDF5 files, of which parts are read: implement the three hooks.

    Attributes:
        uri, files, lengths, row_bytes, spaces: See `EpisodeSource`.
        notes: Sentences about the data for a report.
        inputs: See `SpanSource`.
    """

    spaces: tuple[Any, Any] | None = None
    reads_parts = True

    def __init__(self, place: Place, *, limits: Limits) -> None:
        self.uri: str = place.uri
        self.files: tuple[InputFile, ...] = place.files
        self._limits = limits
        self.notes: list[str] = []
        self._handles = Hdf5Files(place.files, limits)
        self.inputs: InputFiles = self._handles.inputs
        self._places: list[tuple[int, Any]] = []
        self.lengths: list[int] = []
        with closing_on_error(self._handles):
            for number in each_file(self.files):
                with self._handles.guarded(number):
                    found = list(self._index(number))
                for key, steps in found:
                    self._places.append((number, key))
                    self.lengths.append(steps)
            self.row_bytes: int = measure_first(range(len(self.lengths)), self._sample)

    def _sample(self, episode: int) -> SampleBatch:
        return self.load_part(episode, 0, min(self.lengths[episode], _SAMPLE_ROWS), None)

    def _index(self, number: int) -> Iterator[tuple[Any, int]]:
        """The episodes of a file: what `_rows` needs to find each, and its steps."""
        raise NotImplementedError  # A hook: each format has its own.

    def _rows(self, number: int, key: Any, rows: range, steps: int) -> SampleBatch:
        """Rows of an episode of ``steps`` steps: all of them, or those of a part."""
        raise NotImplementedError

    def _wanted(
        self, number: int, key: Any, rows: range, steps: int
    ) -> Iterable[tuple[str, Sequence[tuple[int, int]]]]:
        """The datasets, or groups of them, that `_rows` reads, and the ranges of their own rows."""
        raise NotImplementedError

    def load(self, episode: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read one episode; see `EpisodeSource`."""
        return self.load_part(episode, 0, self.lengths[episode], columns)

    def load_part(self, episode: int, start: int, stop: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read some steps of an episode; see `PartSource`."""
        number, key = self._places[episode]
        self._handles.hold(number, self.spans(episode, episode + 1, start, stop - start, columns))
        with self._handles.guarded(number, episode):
            return self._rows(number, key, range(start, stop), self.lengths[episode])

    def spans(
        self, first: int, stop: int, start: int, rows: int, columns: frozenset[str] | None
    ) -> Iterator[Span]:
        """See `SpanSource`. All columns are read."""
        for episode in range(first, stop):
            yield from self._handles.spans(self._places[episode][0], self._stretches(episode, start, rows))

    def _stretches(self, episode: int, start: int, rows: int) -> Iterator[tuple[Any, int, int]]:
        (number, key), steps = self._places[episode], self.lengths[episode]
        for path, ranges in self._wanted(number, key, range(start, min(start + rows, steps)), steps):
            for leaf in leaves_of(self._handles.tree(number, path), path):
                dataset = self._handles.checked(number, leaf)
                yield from ((dataset, *own) for own in ranges)

    def close(self) -> None:
        """Close all files."""
        self._handles.close()

    # ---- for subclasses ----

    def _read(self, number: int, path: str, rows: range, steps: int) -> NDArray[Any]:
        """Rows of a dataset that has ``steps``; ``rows`` may go beyond them by one."""
        dataset = self._handles.checked(number, path)
        if dataset.shape[:1] != (steps,):
            raise CorruptData(f"{path} has the shape {dataset.shape}, expected {steps} rows")
        return self._handles.read(dataset, rows.start, rows.stop)

    def _rows_in(self, number: int, path: str) -> int:
        """The rows of a dataset, which are claimed."""
        shape = self._handles.checked(number, path).shape
        if not shape:
            raise CorruptData(f"{path} is one value, expected rows")
        self._handles.allowance.claim(shape[0])
        return int(shape[0])

    def _values(self, number: int, path: str) -> NDArray[Any]:
        """All of a dataset."""
        return self._handles.read(self._handles.checked(number, path))

    def _rows_at(self, dataset: Any, ranges: Sequence[tuple[int, int]]) -> NDArray[Any]:
        """Rows of a dataset, from one or two ranges."""
        parts = [self._handles.read(dataset, start, stop) for start, stop in ranges]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _check_rows(self, number: int, paths: Sequence[str], rows: int) -> None:
        """Raise unless each dataset has ``rows`` rows."""
        for path in paths:
            shape = self._handles.checked(number, path).shape
            if not shape or shape[0] != rows:
                raise CorruptData(f"{path} has the shape {shape}, expected {rows} rows")
