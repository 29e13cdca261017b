"""d3rlpy 2: HDF5 with one dataset for each episode and column.

`ReplayBuffer.dump` of d3rlpy 2 writes ``columns`` (names), ``num_episodes``, ``version`` and the datasets
``<column>_<episode>``, or ``<column>_<episode>_<part>`` for observations that are tuples. The observation
after the last step is not stored. An episode that is not ``terminated`` was cut. Rewards, and actions of one
number, have the shape (N, 1).

`D3rlpySink` writes what `d3rlpy.dataset.ReplayBuffer.load` opens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlio.batch import SampleBatch
from rlio.batch.columns import Columns
from rlio.errors import CorruptData, MissingColumn, UnknownLayout, excerpt
from rlio.formats.files.step_rows import flags_of, flat, one_more
from rlio.formats.files.value_arrays import flags_in
from rlio.formats.format import Format, Holds, Marks
from rlio.formats.hdf5_sink import Hdf5Sink
from rlio.formats.hdf5_source import Hdf5Source
from rlio.formats.place import Place
from rlio.formats.sink import Origin, PreparedEpisode
from rlio.limits import Limits
from rlio.source.episodes import without_final_obs
from rlio.storage.filesystem import Storage
from rlio.support.progress import each

_OWN = frozenset(("columns", "num_episodes", "version"))

FORMAT = Format(
    name="d3rlpy",
    title="d3rlpy 2",
    marks=Marks(
        hdf5=lambda paths: paths >= _OWN,
        hdf5_names=_OWN,
        endings=(".h5", ".hdf5"),
    ),
    source="rlio.formats.d3rlpy_2:D3rlpySource",
    writer="rlio.formats.d3rlpy_2:D3rlpySink",
    holds=Holds(
        obs="parts",
        floats=frozenset((Columns.REWARDS,)),
        final_obs="lost",
        ends="either",
        ids="none",
        start=False,
        row_shape=False,
        dtypes=False,
    ),
    about="Final observations are not stored. Episodes that are not terminated are truncated.",
)

_NAMES = {"observations": Columns.OBS, "actions": Columns.ACTIONS, "rewards": Columns.REWARDS}
_NEEDED = (*_NAMES, "terminated")


class D3rlpySource(Hdf5Source):
    """The episodes of one or several files of `ReplayBuffer.dump`; an `EpisodeSource`."""

    def __init__(self, place: Place, *, limits: Limits) -> None:
        self._columns: list[list[str]] = []
        #: That of the format, in the last file.
        self.version: str | None = None
        super().__init__(place, limits=limits)

    def _index(self, number: int) -> Iterator[tuple[int, int]]:
        file = self._handles.file(number)
        version = _text(self._values(number, "version")[()])
        if not version.startswith("2."):
            raise UnknownLayout(f"found version {excerpt(version)} of d3rlpy's format, expected 2")
        self.version = version
        columns = [_text(name) for name in self._values(number, "columns")]
        missing = [name for name in _NEEDED if name not in columns]
        if missing:
            raise MissingColumn(f"found the columns {excerpt(columns)}", column=missing[0])
        count = int(self._values(number, "num_episodes")[()])
        if not 0 <= count <= len(file):
            raise CorruptData(f"num_episodes is {count}, and the file has {len(file)} datasets")
        self._columns.append(columns)
        for episode in each(range(count)):
            yield episode, self._rows_in(number, f"rewards_{episode}")

    def _wanted(
        self, number: int, key: int, rows: range, steps: int
    ) -> Iterator[tuple[str, Sequence[tuple[int, int]]]]:
        for name in self._columns[number]:
            more = name == "observations"
            for path in self._paths(number, f"{name}_{key}"):
                yield path, [(rows.start, rows.stop + more)]

    def _rows(self, number: int, key: int, rows: range, steps: int) -> SampleBatch:
        names = [name for name in self._columns[number] if name != "terminated"]
        found = {
            name: self._column(
                number, f"{name}_{key}", one_more(rows) if name == "observations" else rows, steps
            )
            for name in names
        }
        rewards = flat(found.pop("rewards"))
        terminated = bool(flags_in("terminated", [self._values(number, f"terminated_{key}")[()]])[0])
        return SampleBatch(
            {
                **without_final_obs(found.pop("observations"), len(rows)),
                Columns.ACTIONS: found.pop("actions"),
                Columns.REWARDS: rewards,
                **flags_of(rows, steps, terminated=terminated, truncated=not terminated),
                **found,
            }
        )

    def _column(self, number: int, path: str, rows: range, steps: int) -> Any:
        found = [self._read(number, part, rows, steps) for part in self._paths(number, path)]
        return found[0] if path in self._handles.file(number) else tuple(found)

    def _paths(self, number: int, path: str) -> list[str]:
        """The dataset of a column of an episode, or those of its parts."""
        file, parts = self._handles.file(number), list[str]()
        if path in file:
            return [path]
        while f"{path}_{len(parts)}" in file:
            parts.append(f"{path}_{len(parts)}")
        if not parts:
            raise CorruptData(f"{path} is absent")
        return parts


class D3rlpySink(Hdf5Sink):
    """Writes one file; an `EpisodeSink`.

    Observations may be an array or a tuple of arrays.

    Args:
        storage: The folder.
        origin: What is known of the data.
        file: Name of the file.
    """

    def __init__(self, storage: Storage, origin: Origin, *, file: str = "dataset.h5") -> None:
        super().__init__(storage, file)

    def _write(self, episode: PreparedEpisode) -> None:
        steps, number, file = len(episode), self.episodes, self.file
        if isinstance(episode.observations, tuple):
            for part, column in enumerate(episode.observations):
                file[f"observations_{number}_{part}"] = column
        else:
            file[f"observations_{number}"] = episode.observations
        actions = episode.actions
        file[f"actions_{number}"] = actions.reshape(steps, -1) if actions.ndim == 1 else actions
        assert episode.rewards is not None
        file[f"rewards_{number}"] = episode.rewards.reshape(steps, 1)
        file[f"terminated_{number}"] = episode.terminated

    def close(self) -> None:
        """See `EpisodeSink`."""
        file = self.file
        file["columns"] = ["observations", "actions", "rewards", "terminated"]
        file["num_episodes"], file["version"] = self.episodes, "2.1"
        super().close()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
