"""Batches as NumPy ``.npz`` files, one a batch: a complete third-party reader and writer for rlio.

Installed, they are found by name: ``rlio.read("npz", folder="runs")`` and
``RolloutWorker(env, policy, output="npz", output_options={"folder": "runs"})``.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import numpy as np

import rlio

__all__ = ["NpzReader", "NpzWriter", "open_shard"]


class NpzWriter(rlio.OutputWriter):
    """Writes each batch into a file of its own under ``folder``."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._name = uuid.uuid4().hex
        self._number = 0
        self._schema: dict[str, tuple[np.dtype, tuple[int, ...]]] | None = None

    def _write(self, batch: rlio.SampleBatch | rlio.MultiAgentBatch) -> None:
        if not isinstance(batch, rlio.SampleBatch):
            raise rlio.errors.SchemaError(
                "a MultiAgentBatch does not fit into .npz: write each policy on its own"
            )
        schema = {name: (batch[name].dtype, batch[name].shape[1:]) for name in batch}
        if self._schema is None:
            self._schema = schema
        elif schema != self._schema:
            raise rlio.errors.SchemaError(f"the batch has {schema}, expected {self._schema}")
        if not len(batch):
            return
        path = self._folder / f"{self._name}-{self._number:08d}.npz"
        with open(path.with_suffix(".tmp"), "wb") as file:
            np.savez(file, **{name: batch[name] for name in batch})
        path.with_suffix(".tmp").rename(path)
        self._number += 1


class NpzReader(rlio.InputReader):
    """Reads the files under ``folder`` in the order of their names, ``epochs`` times (None: for ever)."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        epochs: int | None = None,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        rank, world = shard
        self._files = sorted(Path(folder).glob("*.npz"))[rank::world]
        if not self._files:
            raise rlio.errors.DataNotFound("no .npz files for this shard", uri=str(folder))
        self._epochs = epochs
        self._epoch = 0
        self._file = 0

    def _next(self) -> rlio.SampleBatch:
        if self._file == len(self._files):
            self._epoch, self._file = self._epoch + 1, 0
        if self._epoch == self._epochs:
            raise rlio.EndOfData(f"{self._epochs} epochs of {len(self._files)} files")
        with np.load(self._files[self._file], allow_pickle=False) as arrays:
            batch = rlio.SampleBatch(dict(arrays))
        self._file += 1
        return batch

    def _position(self) -> dict[str, int]:
        return {"epoch": self._epoch, "file": self._file}

    def _seek(self, position: dict[str, int]) -> None:
        self._epoch, self._file = position["epoch"], position["file"]


def open_shard(context: rlio.IOContext) -> NpzReader:
    """Read the files that are this worker's, out of ``context.options["folder"]``."""
    return NpzReader(**context.options, shard=(context.rank, context.world))
