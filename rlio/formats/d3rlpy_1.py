"""d3rlpy 1: flat HDF5 with `episode_terminals`.

`MDPDataset.dump` of d3rlpy 1 writes ``observations``, ``actions``, ``rewards``, ``terminals`` and
``episode_terminals``, a row a step. Row t has the observation, the action, and the reward that followed it.
``episode_terminals`` is 1 on the last row of each episode; where ``terminals`` is 0 there, the episode was
cut (truncated). The observation after the last step is not stored. Rows after the last end are an
unfinished episode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rlio.batch import SampleBatch
from rlio.batch.columns import Columns
from rlio.errors import CorruptData
from rlio.formats.files.step_rows import flags_of, flat
from rlio.formats.files.value_arrays import flags_in
from rlio.formats.format import Format, Marks
from rlio.formats.hdf5_source import Hdf5Source
from rlio.source.episodes import without_final_obs

FORMAT = Format(
    name="d3rlpy-1",
    title="d3rlpy 1",
    marks=Marks(hdf5=lambda paths: {"observations", "episode_terminals"} <= paths, endings=(".h5", ".hdf5")),
    source="rlio.formats.d3rlpy_1:D3rlpy1Source",
    about="Final observations are not stored. Episodes that end without a terminal are truncated.",
)

_COLUMNS = {"observations": Columns.OBS, "actions": Columns.ACTIONS, "rewards": Columns.REWARDS}


class D3rlpy1Source(Hdf5Source):
    """The episodes of one or several files of `MDPDataset.dump`; an `EpisodeSource`."""

    def _index(self, number: int) -> Iterator[tuple[tuple[int, int, bool, bool], int]]:
        rows = self._rows_in(number, "rewards")
        self._check_rows(number, [*_COLUMNS, "terminals", "episode_terminals"], rows)
        terminals, ends = (
            flags_in(name, self._values(number, name)) for name in ("terminals", "episode_terminals")
        )
        if (terminals & ~ends).any():
            raise CorruptData(
                f"row {int((terminals & ~ends).argmax())} is terminal, and not the last of its episode"
            )
        start = 0
        for last in np.flatnonzero(ends).tolist():
            terminated = bool(terminals[last])
            yield (start, last + 1, terminated, not terminated), last + 1 - start
            start = last + 1
        if start < rows:
            yield (start, rows, False, False), rows - start

    def _wanted(
        self, number: int, key: tuple[int, int, bool, bool], rows: range, steps: int
    ) -> Iterator[tuple[str, Sequence[tuple[int, int]]]]:
        first, last = key[:2]
        for path, name in _COLUMNS.items():
            yield path, [(first + rows.start, min(first + rows.stop + (name == Columns.OBS), last))]

    def _rows(self, number: int, key: tuple[int, int, bool, bool], rows: range, steps: int) -> SampleBatch:
        first, last, terminated, truncated = key
        start, stop = first + rows.start, first + rows.stop
        found = {
            name: self._handles.read(
                self._handles.checked(number, path), start, min(stop + (name == Columns.OBS), last)
            )
            for path, name in _COLUMNS.items()
        }
        return SampleBatch(
            {
                **without_final_obs(found[Columns.OBS], len(rows)),
                Columns.ACTIONS: found[Columns.ACTIONS],
                Columns.REWARDS: flat(found[Columns.REWARDS]),
                **flags_of(rows, steps, terminated=terminated, truncated=truncated),
            }
        )
