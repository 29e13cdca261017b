"""D4RL's flat HDF5: one dataset a column, one row a step. `rlio.D4RLReader` reads it.

Row t has the observation, the action, and the reward and the flags that followed it. ``terminals`` and
``timeouts`` mark the last row of an episode. ``next_observations``, if it is there, is the observation
after each row.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from rlio.formats.format import Format, Holds, Marks
from rlio.formats.hdf5_sink import Hdf5Sink
from rlio.formats.sink import Origin, PreparedEpisode
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
    takes=("spaces",),
    writer="rlio.formats.d4rl.sink:D4rlSink",
    holds=Holds(final_obs="needed", ends="closed", ids="none", start=False, uniform="dtypes"),
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
        next_observations: Whether to write them; False: D4RL's first files have none.
    """

    def __init__(
        self, storage: Storage, origin: Origin, *, file: str = "dataset.hdf5", next_observations: bool = True
    ) -> None:
        super().__init__(storage, file)
        self._has_next = next_observations
        self.holds: Holds = FORMAT.holds if next_observations else replace(FORMAT.holds, final_obs="lost")
        #: Dtype and shape of the rows of each dataset.
        self._kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._pending: list[dict[str, np.ndarray]] = []
        self._rows = 0

    def _write(self, episode: PreparedEpisode) -> None:
        terminals, timeouts = episode.ends
        assert episode.rewards is not None
        found = {
            "observations": episode.obs,
            "actions": episode.actions,
            "rewards": episode.rewards,
            "terminals": terminals,
            "timeouts": timeouts,
        }
        if self._has_next:
            found["next_observations"] = episode.new_obs
        self._kinds = self._kinds or {name: (array.dtype, array.shape[1:]) for name, array in found.items()}
        self._pending.append(found)
        self._rows += len(episode)
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
