"""`ParquetWriter` keeps the contract of every writer."""

from __future__ import annotations

from pathlib import Path

import rlio
from rlio.batch import Batch, concat_samples
from rlio.testing import WriterTests
from rlio.writer import OutputWriter


def read_back(root: Path) -> Batch:
    """All rows under ``root``, in recorded order."""
    with rlio.DatasetReader(root, epochs=1) as reader:
        return concat_samples(list(reader))


class TestParquetWriter(WriterTests):
    def make_writer(self, root: Path) -> OutputWriter:
        return rlio.ParquetWriter(root)

    def read_back(self, root: Path) -> Batch:
        return read_back(root)


class TestParquetWriterThatRolls(WriterTests):
    def make_writer(self, root: Path) -> OutputWriter:
        return rlio.ParquetWriter(root, roll=rlio.Roll(max_rows=7))

    def read_back(self, root: Path) -> Batch:
        return read_back(root)
