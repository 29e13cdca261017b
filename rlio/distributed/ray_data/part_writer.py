"""`PartWriter`: one attempt at a part of a job: written, and sealed unless another attempt is sealed already.

What the attempt's id means, and which attempt readers take, is in docs/design/attempts.md. Nothing here needs
Ray.

Example:
    >>> import numpy as np
    >>> from rlio.batch import SampleBatch
    >>> from rlio.dataset.names import part_id
    >>> storage, part = Storage.open("memory://part-writer-example"), part_id("nightly", 0)
    >>> writer = PartWriter(storage, part)
    >>> writer.write(SampleBatch(t=np.arange(3)))
    >>> writer.finish().rows
    3
    >>> again = PartWriter(storage, part)
    >>> again.taken == writer.taken
    True
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlio.batch import Batch
from rlio.dataset.listing import cover_rows, list_writer
from rlio.dataset.names import DATA_DIR, make_attempt_id, parse_sealed, part_of, writer_dir
from rlio.errors import OptionError, PublishError, RlioError
from rlio.log.new_writer import open_publisher
from rlio.log.publisher import Publisher
from rlio.schemas.parquet import Compression
from rlio.storage.filesystem import Storage
from rlio.writers.parquet_encoder import ParquetEncoder
from rlio.writers.roll import Roll

__all__ = ["PartOptions", "PartWriter", "Sealed", "sealed_attempt"]

logger = logging.getLogger("rlio")

# How long what is dropped may take to be stored first, so that it can be removed.
_LAST_SECONDS = 10.0


class Sealed(NamedTuple):
    """An attempt that is sealed, and its rows; no attempt where a part has no rows."""

    writer: str | None
    rows: int


@dataclass(frozen=True)
class PartOptions:
    """How parts are written.

    Attributes:
        roll: When to store a shard; its age is not looked at.
        compression: Of the pages.
        provenance: JSON text for every footer.
        stored: Of the schema; see `rlio.schemas.schema.Schema`.
        spaces: Policy id -> spaces as JSON, or None.
    """

    roll: Roll = field(default_factory=Roll)
    compression: Compression = field(default_factory=lambda: Compression.parse("zstd:1"))
    provenance: str = "{}"
    stored: Mapping[str, str] = field(default_factory=dict)
    spaces: Mapping[str, Mapping[str, Any]] | None = None


def sealed_attempt(storage: Storage, part: str) -> tuple[Sealed | None, int]:
    """The first sealed attempt at a part, and the number that a new attempt has.

    One listing of the folders in ``data/``, and one of each attempt.
    """
    # Not what a copying tool may have named like them.
    attempts = [name for name in storage.folders(DATA_DIR, f"{part}~") if part_of(name) == part]
    found: Sealed | None = None
    for writer in attempts:
        seals = [parse_sealed(entry.path.rpartition("/")[2]) for entry in storage.list(writer_dir(writer))]
        rows = [seal for seal in seals if seal is not None]
        if rows:
            found = Sealed(writer, max(rows))
            break
    # The folders are sorted, and numbers have four digits.
    return found, int(attempts[-1][len(part) + 1 :][:4]) + 1 if attempts else 0


class PartWriter:
    """Writes the rows of one part as one attempt, which readers see whole or not at all. Not thread-safe.

    Nothing is stored before the first rows. There is no log: whoever runs the task can run it again.

    Args:
        storage: The data set's root.
        part: From `rlio.dataset.names.part_id`.
        options: How.

    Raises:
        PublishError: The store cannot be asked, or does not take the attempt's first object.
    """

    def __init__(
        self,
        storage: Storage,
        part: str,
        options: PartOptions | None = None,
    ) -> None:
        self._storage = storage
        self._part = part
        self._options = options or PartOptions()
        self._writer_id: str | None = None
        self._publisher: Publisher | None = None
        self._encoder: ParquetEncoder | None = None
        #: The attempt that is sealed: another one's, or, after `finish`, this one. Then nothing is written.
        self.taken: Sealed | None
        self.taken, self._number = sealed_attempt(storage, part)

    @property
    def writer_id(self) -> str | None:
        """The attempt's id; None before the first rows."""
        return self._writer_id

    def write(self, batch: Batch) -> None:
        """Take rows; they are stored shard by shard, and not seen before `finish`.

        Raises:
            SchemaError: They cannot be stored, or do not fit those before.
            SchemaConflict: They do not fit those of the data set's other writers.
            PublishError: A shard could not be stored.
        """
        if self.taken is not None:
            raise OptionError(f"{self.taken.writer} is sealed: nothing more is written of this part")
        if not batch.agent_steps():
            return
        publisher, encoder = self._open()
        encoder.check()
        schema = encoder.schema_after(batch, spaces=self._options.spaces, stored=self._options.stored)
        parts = encoder.cut(batch, schema)
        if schema is not encoder.schema:
            publisher.check_schema(schema)
            encoder.start()
            encoder.use(schema)
        for part in parts:
            encoder.append(part)
            publisher.received += encoder.rows_of(part)
        if publisher.waiting_bytes >= self._options.roll.max_bytes:
            publisher.flush()

    def finish(self) -> Sealed:
        """Store what is left and seal the attempt, unless another one is sealed by now: then remove it.

        Returns:
            The attempt that is sealed, this one or another.

        Raises:
            PublishError: It could not be stored, or somebody has removed what was; nothing of it is seen.
        """
        if self.taken is not None:
            return self.taken
        if self._publisher is None or self._encoder is None:
            self.taken = Sealed(None, 0)
            return self.taken
        publisher, encoder = self._publisher, self._encoder
        try:
            encoder.store()
            encoder.close()
            publisher.check_counts()
            other, _ = sealed_attempt(self._storage, self._part)
            if other is None:
                self._check_stored(publisher)
        except BaseException:
            self.abandon()
            raise
        if other is not None:
            logger.info("%s was sealed first: %s is dropped", other.writer, publisher.writer_id)
            self._drop(publisher)
            self.taken = other
            return other
        self._publisher = None  # Also if the next line raises, it may be sealed: nothing for `abandon`.
        publisher.close(seal_at=publisher.received)
        self.taken = Sealed(publisher.writer_id, publisher.received)
        return self.taken

    def abandon(self) -> None:
        """Give the attempt up, and remove what can be removed of it. May be called at any time."""
        if self._publisher is not None:
            if self._encoder is not None:
                with contextlib.suppress(RlioError, OSError):
                    self._encoder.close()
            self._drop(self._publisher)

    def _open(self) -> tuple[Publisher, ParquetEncoder]:
        if self._publisher is None or self._encoder is None:
            options = self._options
            self._writer_id = make_attempt_id(self._part, self._number)
            self._publisher = open_publisher(self._storage, writer_id=self._writer_id)
            self._encoder = ParquetEncoder(
                self._publisher,
                roll=options.roll,
                compression=options.compression,
                provenance=options.provenance,
            )
        return self._publisher, self._encoder

    def _check_stored(self, publisher: Publisher) -> None:
        """Raise where a shard is gone: a seal over a hole would be an error for every reader."""
        found = list_writer(self._storage, publisher.writer_id).passed_over.get(publisher.writer_id)
        holes = cover_rows([] if found is None else found.shards, end=publisher.received).holes
        if holes:
            raise PublishError(
                f"rows {holes[0].start} to {holes[0].stop - 1} of the attempt are gone: it ran for longer "
                "than the grace of `rlio gc`, or somebody removed them; run the task again",
                uri=self._storage.uri_of(writer_dir(publisher.writer_id)),
            )

    def _drop(self, publisher: Publisher) -> None:
        """Close without a seal, and remove what nobody can have read; what stays is for gc."""
        self._publisher = None
        with contextlib.suppress(RlioError, OSError):
            publisher.flush(_LAST_SECONDS)  # What is on its way would come after it is removed.
        with contextlib.suppress(RlioError, OSError):
            publisher.close(seal_at=None)
        with contextlib.suppress(RlioError, OSError):
            entries = self._storage.list(writer_dir(publisher.writer_id))
            # The claim last: while it is there, everybody knows that the attempt may be at work.
            for entry in sorted(entries, key=lambda entry: "/_" in entry.path):
                self._storage.remove(entry.path)
