"""`PartWriter`: writes one attempt at a part of a job, and seals it unless another attempt is sealed.

docs/design/attempts.md defines attempt ids, and which attempt readers take. This module does not need Ray.

Example:
    >>> import numpy as np
    >>> from rlio.batch import SampleBatch
    >>> from rlio.catalog.names import part_id
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
from rlio.catalog.listing import cover_rows, list_writer
from rlio.catalog.names import DATA_DIR, make_attempt_id, parse_sealed, part_of, writer_dir
from rlio.errors import OptionError, PublishError, RlioError
from rlio.log.new_writer import open_publisher
from rlio.log.publisher import Publisher
from rlio.schemas.parquet import Compression
from rlio.storage.filesystem import Storage
from rlio.writers.parquet_encoder import ParquetEncoder
from rlio.writers.roll import Roll

__all__ = ["PartOptions", "PartWriter", "Sealed", "sealed_attempt"]

logger: logging.Logger = logging.getLogger("rlio")

# Longest time to store rows of a dropped attempt before they are removed.
_LAST_SECONDS = 10.0


class Sealed(NamedTuple):
    """A sealed attempt and its rows; the attempt is None if a part has no rows."""

    writer: str | None
    rows: int


@dataclass(frozen=True)
class PartOptions:
    """Options for writing parts.

    Attributes:
        roll: When to store a shard; its age is ignored.
        compression: Compression of the pages.
        provenance: JSON text for every footer.
        stored: Field of the schema; see `rlio.schemas.schema.Schema`.
        spaces: Policy id -> spaces as JSON, or None.
    """

    roll: Roll = field(default_factory=Roll)
    compression: Compression = field(default_factory=lambda: Compression.parse("zstd"))
    provenance: str = "{}"
    stored: Mapping[str, str] = field(default_factory=dict)
    spaces: Mapping[str, Mapping[str, Any]] | None = None


def sealed_attempt(storage: Storage, part: str) -> tuple[Sealed | None, int]:
    """Return the first sealed attempt at a part, and the number for a new attempt.

    Makes one listing of the folders in ``data/``, and one of each attempt.
    """
    # Excludes folders with similar names, such as those of copying tools.
    attempts = [name for name in storage.folders(DATA_DIR, f"{part}~") if part_of(name) == part]
    found: Sealed | None = None
    for writer in attempts:
        seals = [parse_sealed(entry.path.rpartition("/")[2]) for entry in storage.list(writer_dir(writer))]
        rows = [seal for seal in seals if seal is not None]
        if rows:
            found = Sealed(writer, max(rows))
            break
    # The folders are sorted, and attempt numbers have four digits.
    return found, int(attempts[-1][len(part) + 1 :][:4]) + 1 if attempts else 0


class PartWriter:
    """Writes the rows of one part as one attempt, which readers see whole or not at all. Not thread-safe.

    It stores nothing before the first rows. It has no log, because the task can be run again.

    Args:
        storage: The data set's root.
        part: From `rlio.catalog.names.part_id`.
        options: Options; None: the defaults.

    Raises:
        PublishError: The store does not answer, or does not accept the attempt's first object.
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
        #: The sealed attempt: another one, or, after `finish`, this one. Then nothing more is written.
        self.taken: Sealed | None
        self.taken, self._number = sealed_attempt(storage, part)

    @property
    def writer_id(self) -> str | None:
        """The attempt's id; None before the first rows."""
        return self._writer_id

    def write(self, batch: Batch) -> None:
        """Write rows. They are stored shard by shard, and readers do not see them before `finish`.

        Raises:
            SchemaError: The rows cannot be stored, or do not fit earlier ones.
            SchemaConflict: The rows do not fit those of the data set's other writers.
            PublishError: A shard could not be stored.
        """
        if self.taken is not None:
            raise OptionError(f"{self.taken.writer} is sealed, so this part accepts no more rows")
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
        """Store the remaining rows and seal the attempt; if another attempt is sealed, remove this one.

        Returns:
            The sealed attempt, this one or another.

        Raises:
            PublishError: The attempt could not be stored, or its shards were removed; readers see nothing of
                it.
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
        self._publisher = None  # The next line may seal even if it raises, so `abandon` must not remove it.
        publisher.close(seal_at=publisher.received)
        self.taken = Sealed(publisher.writer_id, publisher.received)
        return self.taken

    def abandon(self) -> None:
        """Give up the attempt, and remove as much of it as possible. May be called at any time."""
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
        """Raise if a shard is gone, because a seal over a hole would be an error for every reader."""
        found = list_writer(self._storage, publisher.writer_id).passed_over.get(publisher.writer_id)
        holes = cover_rows([] if found is None else found.shards, end=publisher.received).holes
        if holes:
            raise PublishError(
                f"rows {holes[0].start} to {holes[0].stop - 1} of the attempt are gone: it ran for longer "
                "than the grace of `rlio gc`, or they were removed; run the task again",
                uri=self._storage.uri_of(writer_dir(publisher.writer_id)),
            )

    def _drop(self, publisher: Publisher) -> None:
        """Close without a seal, and remove the objects, which no reader has used; gc removes the rest."""
        self._publisher = None
        with contextlib.suppress(RlioError, OSError):
            publisher.flush(_LAST_SECONDS)  # Shards in flight would appear after the removal.
        with contextlib.suppress(RlioError, OSError):
            publisher.close(seal_at=None)
        with contextlib.suppress(RlioError, OSError):
            entries = self._storage.list(writer_dir(publisher.writer_id))
            # Removes the claim last: while it exists, it shows that the attempt may be running.
            for entry in sorted(entries, key=lambda entry: "/_" in entry.path):
                self._storage.remove(entry.path)
