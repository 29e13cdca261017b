"""D4RL's flat HDF5: one dataset a column, one row a step. `rlio.D4RLReader` reads it.

Row t has the observation, the action, and the reward and the flags that followed it. ``terminals`` and
``timeouts`` mark the last row of an episode. ``next_observations``, if it is there, is the observation
after each row.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlio.batch.columns import Columns
from rlio.batch.episode import Episode
from rlio.errors import SchemaError
from rlio.formats.format import Format, Marks
from rlio.formats.hdf5_sink import Hdf5Sink, array_of
from rlio.formats.sink import Origin
from rlio.storage.filesystem import Storage

# Rows that are collected before they are written.
_BLOCK_ROWS = 16_384
_NEEDED = frozenset(("observations", "actions", "rewards", "terminals"))

FORMAT = Format(
    name="d4rl",
    title="D4RL",
    marks=Marks(
        endings=(".hdf5", ".h5"), hdf5=lambda paths: paths >= _NEEDED and "episode_terminals" not in paths
    ),
    reader="rlio.readers.d4rl_reader:D4RLReader",
    rows="rlio.formats.d4rl.source:open_d4rl",
    writer="rlio.formats.d4rl.sink:D4rlSink",
    loses=frozenset(("unfinished", "ids", "start", "infos", "extra")),
    advice="read it with rlio.D4RLReader",
    about="Timeouts are truncations. Final observations are known only where the file has next_observations.",
)


class D4rlSink(Hdf5Sink):
    """Writes one file; an `EpisodeSink`.

    An episode that has not ended gets a timeout: without it, its rows would be those of the next one.

    Args:
        storage: The folder.
        origin: What is known of the data.
        file: Name of the file.
        next_observations: Whether to write them, which needs all final observations; False: D4RL's first
            files have none.
    """

    def __init__(
        self, storage: Storage, origin: Origin, *, file: str = "dataset.hdf5", next_observations: bool = True
    ) -> None:
        super().__init__(storage, file)
        self._has_next = next_observations
        self.loses: frozenset[str] = FORMAT.loses | (set() if next_observations else {"final_obs"})
        #: Dtype and shape of the rows of each dataset.
        self._kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._pending: list[dict[str, np.ndarray]] = []
        self._rows = 0

    def _write(self, episode: Episode) -> None:
        steps = len(episode)
        observations = array_of(episode.observations, Columns.OBS)
        ends = np.zeros((2, steps), np.bool_)
        ends[:, -1:] = [[episode.terminated], [episode.truncated or not episode.terminated]]
        found = {
            "observations": observations[:steps],
            "actions": array_of(episode.actions, Columns.ACTIONS),
            "rewards": array_of(episode.rewards, Columns.REWARDS),
            "terminals": ends[0],
            "timeouts": ends[1],
        }
        if self._has_next:
            if not episode.has_final_observation:
                raise SchemaError(
                    "the final observation is not known, which next_observations would need: convert with "
                    "the option next_observations=False",
                    column=Columns.NEXT_OBS,
                )
            found["next_observations"] = observations[1:]
        for name, array in found.items():
            kind = array.dtype, array.shape[1:]
            if kind != (known := self._kinds.setdefault(name, kind)):
                raise SchemaError(
                    f"found {kind[0]} {kind[1]}, expected {known[0]} {known[1]} as before", column=name
                )
        self._pending.append(found)
        self._rows += steps
        if self._rows >= _BLOCK_ROWS:
            self._flush()

    def _flush(self) -> None:
        """Append the collected rows to the datasets."""
        for name, (dtype, shape) in self._kinds.items():
            if name not in self.file:
                row_bytes = max(1, dtype.itemsize * math.prod(shape))
                chunk = max(1, min(_BLOCK_ROWS, (1 << 20) // row_bytes))
                self.file.create_dataset(
                    name, (0, *shape), dtype, maxshape=(None, *shape), chunks=(chunk, *shape)
                )
            dataset = self.file[name]
            first = len(dataset)
            dataset.resize(first + self._rows, axis=0)
            dataset[first:] = np.concatenate([columns[name] for columns in self._pending])
        self._pending, self._rows = [], 0

    def close(self) -> None:
        """See `EpisodeSink`."""
        if self._pending:
            self._flush()
        super().close()
