"""Tianshou's buffers in HDF5.

`ReplayBuffer.save_hdf5` writes the arrays of ``_meta`` at the full capacity: ``obs``, ``act``, ``rew``,
``terminated``, ``truncated``, ``done``, ``info``, and ``obs_next`` unless the buffer ignores it. Row t has
the observation, the action, and the reward and the flags that followed it. The buffer is a ring: the
attributes ``_size`` and ``_index`` (since version 2 ``_insertion_idx``) are the number of valid rows, and the
place of the next one. A buffer of several environments has a ring for each: ``_offset`` is where it begins,
``_lengths`` its valid rows, ``last_index`` the newest one. Only valid rows are read, in the order in which
they were added. The oldest episode may lack its first steps, and the newest its last; the file does not
state it.

Without ``obs_next``, the observation after the last step of an episode is not stored. Arrays that are
pickled are not read: as a column they are left out, with a note.

A buffer with ``save_only_last_obs`` has one frame of each observation, and puts the observations together
when it is sampled: it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rlio.batch import SampleBatch
from rlio.batch.columns import Columns
from rlio.errors import CorruptData, UnknownLayout, UnsafeData, excerpt
from rlio.formats.files.step_rows import cut_ranges, flags_of, flat, one_more, ranges_of
from rlio.formats.files.value_arrays import flags_in
from rlio.formats.format import Format, Marks
from rlio.formats.hdf5_source import Hdf5Source
from rlio.source.episodes import without_final_obs

FORMAT = Format(
    name="tianshou",
    title="Tianshou",
    marks=Marks(
        hdf5=lambda paths: "_meta" in paths and bool({"_indices", "_size"} & paths),
        endings=(".hdf5", ".h5"),
    ),
    source="rlio.formats.tianshou:TianshouSource",
    about=(
        "The valid rows of the ring, in the order in which they were added. Episodes at its ends may be "
        "parts. Pickled arrays are left out. Buffers with save_only_last_obs are refused."
    ),
)

_COLUMNS = {"obs": Columns.OBS, "act": Columns.ACTIONS, "rew": Columns.REWARDS}
_FLAGS = ("terminated", "truncated")
#: Other members of ``_meta`` of which no note is needed.
_ALSO = ("obs_next", "info", "done")
_Ranges = list[tuple[int, int]]
_Key = tuple[_Ranges, bool, bool]


class TianshouSource(Hdf5Source):
    """The episodes of one or several files of `ReplayBuffer.save_hdf5`; an `EpisodeSource`."""

    def _index(self, number: int) -> Iterator[tuple[_Key, int]]:
        rows = self._rows_in(number, "_meta/rew")
        self._check_frames(number)
        self._check_rows(number, [f"_meta/{name}" for name in ("act", *_FLAGS)], rows)
        shapes = [self._handles.checked(number, f"_meta/{name}").shape[1:] for name in _FLAGS]
        if any(shape not in ((), (1,)) for shape in shapes):
            raise UnknownLayout(
                f"found flags of the shapes {excerpt(shapes)} a row, expected one a row",
                uri=self.files[number].uri,
            )
        terminated, truncated = (flags_in(name, self._values(number, f"_meta/{name}")) for name in _FLAGS)
        for first, size, valid, begin in self._rings(number, rows):
            order = first + (begin + np.arange(valid)) % size
            ends = np.flatnonzero((terminated | truncated)[order]) + 1
            for start, stop in pairwise([0, *ends.tolist(), *([valid] if valid not in ends else [])]):
                last = int(order[stop - 1])
                ranges = ranges_of(order[start:stop])
                if start < stop:
                    yield (ranges, bool(terminated[last]), bool(truncated[last])), stop - start

    def _check_frames(self, number: int) -> None:
        """Refuse a buffer that has one frame of each observation, and note what is not read."""
        options = self._handles.file(number).attrs
        if options.get("_save_only_last_obs"):
            raise UnknownLayout(
                "found a buffer with save_only_last_obs=True, which has the last frame of each observation, "
                "expected whole observations: load it with Tianshou, and write what buffer[indices] gives "
                "with rlio.ParquetWriter",
                uri=self.files[number].uri,
            )
        if (stacked := int(options.get("stack_num", 1))) > 1:
            self._note(f"The buffer stacks {stacked} observations when it is sampled; a row has one.")
        unread = sorted({*self._handles.member(number, "_meta")} - {*_COLUMNS, *_FLAGS, *_ALSO})
        if unread:
            self._note(f"These members of _meta are not read: {excerpt(unread)}.")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _rings(self, number: int, rows: int) -> Iterator[tuple[int, int, int, int]]:
        """First row, capacity, valid rows, and the oldest of them, of each ring."""
        if self._handles.member(number, "_offset") is not None:
            offsets = self._values(number, "_offset").tolist()
            lengths = self._values(number, "_lengths").tolist()
            newest = self._values(number, "last_index").tolist()
            if not len(offsets) == len(lengths) == len(newest):
                raise CorruptData("_offset, _lengths and last_index have different lengths")
            ends = [*offsets[1:], rows]
            rings = [
                (first, end - first, valid, last + 1 - first if valid == end - first else 0)
                for first, end, valid, last in zip(offsets, ends, lengths, newest, strict=True)
            ]
        else:
            about = self._handles.file(number).attrs
            cursor = "_index" if "_index" in about else "_insertion_idx"
            if "_size" not in about or cursor not in about:
                raise CorruptData("the attributes _size, and _index or _insertion_idx, are absent")
            valid, next_ = int(about["_size"]), int(about[cursor])
            rings = [(0, rows, valid, next_ if valid == rows else 0)]
        for first, size, valid, begin in rings:
            if not (first >= 0 and size > 0 and first + size <= rows and 0 <= valid <= size and begin >= 0):
                raise CorruptData(
                    f"a ring of {size} rows from row {first} with {valid} valid ones does not fit {rows} rows"
                )
            yield first, size, valid, begin % size

    def _wanted(
        self, number: int, key: _Key, rows: range, steps: int
    ) -> Iterator[tuple[str, Sequence[tuple[int, int]]]]:
        members = self._handles.tree(number, "_meta")
        for name in ("obs", "obs_next", "act", "rew", "info"):
            if name in members:
                more = name == "obs" and "obs_next" not in members
                yield f"_meta/{name}", cut_ranges(key[0], one_more(rows) if more else rows)

    def _rows(self, number: int, key: _Key, rows: range, steps: int) -> SampleBatch:
        whole, terminated, truncated = key
        derives = self._handles.member(number, "_meta/obs_next") is None
        ranges = cut_ranges(whole, rows)
        found = {
            name: self._column(
                number,
                f"_meta/{path}",
                cut_ranges(whole, one_more(rows)) if derives and name == Columns.OBS else ranges,
            )
            for path, name in _COLUMNS.items()
        }
        columns: dict[str, Any] = {
            Columns.ACTIONS: found[Columns.ACTIONS],
            Columns.REWARDS: flat(found[Columns.REWARDS]),
            **flags_of(rows, steps, terminated=terminated, truncated=truncated),
        }
        if derives:
            columns = {**without_final_obs(found[Columns.OBS], len(rows)), **columns}
        else:
            after = self._column(number, "_meta/obs_next", ranges)
            columns = {Columns.OBS: found[Columns.OBS], Columns.NEXT_OBS: after, **columns}
        info = self._handles.member(number, "_meta/info")
        if info is not None and self._handles.is_group(info):
            for name in info:
                try:
                    columns[f"infos/{name}"] = self._column(number, f"_meta/info/{name}", ranges)
                except UnsafeData as error:
                    if "pickled" not in str(error):
                        raise
                    self._note(f"The pickled array _meta/info/{name} is not read.")
        return SampleBatch(columns)

    def _column(self, number: int, path: str, ranges: _Ranges) -> Any:
        member = self._handles.member(number, path)
        if self._handles.is_group(member):
            return {name: self._column(number, f"{path}/{name}", ranges) for name in member}
        dataset = self._handles.checked(number, path)
        if dataset.attrs.get("__data_type__") not in (None, "ndarray"):
            raise UnsafeData(f"{path} is pickled: expected an array")
        if dataset.shape[0] < ranges[-1][1]:
            raise CorruptData(f"{path} has {dataset.shape[0]} rows, expected {ranges[-1][1]} or more")
        return self._rows_at(dataset, ranges)
