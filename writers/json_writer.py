"""`JsonWriter`: shards of JSON lines, for people and for tools that read only JSON.

Each `write()` becomes one line; `rlio.schemas.json_lines` describes its grammar. The first line of each shard
is its provenance. Parquet reads about eight times faster (HalfCheetah-v5, 1,000 rows a line).

Example:
    >>> import numpy as np, rlio
    >>> with rlio.JsonWriter("memory://json-writer-example") as writer:
    ...     writer.write(rlio.SampleBatch(obs=np.zeros((3, 4), np.float32), rewards=np.ones(3, np.float32)))
    >>> len(rlio.open_dataset("memory://json-writer-example"))
    3
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final, Literal

from rlio.errors import OptionError, excerpt
from rlio.log.spool import SpoolLike
from rlio.log.wal import Sync
from rlio.schemas.provenance import Provenance
from rlio.source.json_shard import MAX_JSON_SHARD_BYTES
from rlio.support.options import checked_keywords, expected
from rlio.writers.dataset_writer import DatasetWriter
from rlio.writers.json_encoder import JsonEncoder
from rlio.writers.roll import Roll

__all__ = ["JsonWriter"]

# Level 3 does not make lines of 1,000 HalfCheetah-v5 steps smaller, and is a third slower.
_DEFAULT_LEVEL: Final = 1
_MAX_LEVEL: Final = 22


class JsonWriter(DatasetWriter):
    """Writes batches into a data set of JSON shards, on any filesystem; Parquet shards may be beside them.

    `write` logs and collects lines. A background thread stores them as a whole shard when `roll` says so, at
    `flush` and at `close`. A batch is cut into several lines if it exceeds the limit of a line (64 MiB) or
    ``roll.max_rows``; sequences, and batches of several policies, are not cut. A NaN loses its sign and
    payload, except in ``compress_columns``: JSON has one NaN. If a writer on this machine
    died, the next writer that opens the root publishes the rows in its log; `rlio recover` does so too.

    Several threads may call it: see `rlio.OutputWriter`.

    Args:
        root: Folder of the data set: a path or any fsspec URL.
        roll: When to store a shard.
        compression: None, or ``"zstd"`` or ``"zstd:level"``: ``.jsonl.zst`` with one frame a line.
        compress_columns: Columns to write as compressed binary within the line, like RLlib's
            ``output_compress_columns``; columns that a batch lacks are ignored.
        spool: The write-ahead log: "auto", a folder, a `Spool`, or None: rows are safe once published.
        sync: When logged rows become safe against power failure: "interval", "always" or "never"; see
            `Spool`. None: the `Spool` decides.
        writer_id: A fixed id, for jobs and tests; it must have no rows yet. None draws one.
        worker_index: Part of a drawn id.
        spaces: Policy id -> (observation space, action space), stored with the schema.
        pictures: Name of a column (``"obs/camera"``) -> ``"png"``: its frames, uint8 of shape (height, width)
            or (height, width, 1, 3 or 4), are stored as PNG, without loss, and decoded when they are read;
            ``new_obs`` is stored as ``obs``. Needs Pillow (extra ``images``). docs/design/pictures.md has the
            cost.
        provenance: The origin of the data, stored in every shard.
        storage_options: For fsspec.

    A writer opens although the store is down or hangs if rows can wait: in a log that is not on the root's
    own disk, under a drawn id. Opening then takes up to about a minute.

    Raises:
        OptionError: An option is illegal, or ``writer_id`` has rows already.
        MissingExtra: ``pictures`` needs Pillow, which is not installed.
        UnknownName: No filesystem has the URL's scheme.
        PublishError: Rows cannot be stored, or logged, there.
    """

    @checked_keywords
    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        roll: Roll | None = None,
        compression: str | None = None,
        compress_columns: Iterable[str] = (),
        spool: SpoolLike = "auto",
        sync: Sync | None = None,
        writer_id: str | None = None,
        worker_index: int = 0,
        spaces: Mapping[str, tuple[Any, Any]] | None = None,
        pictures: Mapping[str, Literal["png"]] | None = None,
        provenance: Provenance | None = None,
        storage_options: dict[str, object] | None = None,
    ) -> None:
        about = expected(provenance, Provenance, "provenance")
        encoder = partial(
            JsonEncoder,
            roll=_checked_roll(expected(roll, Roll, "roll")),
            level=_parse_level(compression),
            provenance=about.text,
            compress_columns=_checked_columns(compress_columns),
        )
        super().__init__(
            root,
            encoder,
            spool=spool,
            sync=sync,
            writer_id=writer_id,
            worker_index=worker_index,
            spaces=spaces,
            pictures=pictures,
            provenance=about,
            storage_options=storage_options,
        )


def _checked_roll(roll: Roll) -> Roll:
    if roll.max_bytes > MAX_JSON_SHARD_BYTES // 2:
        raise OptionError(
            f"Roll(max_bytes={roll.max_bytes}): expected at most {MAX_JSON_SHARD_BYTES // 2} bytes, because "
            "a JSON shard is read as a whole when it is opened"
        )
    return roll


def _parse_level(compression: str | None) -> int | None:
    """The zstd level; None without compression."""
    if compression is None:
        return None
    text = compression if isinstance(compression, str) else ""
    match = re.fullmatch(r"zstd(?::([0-9]{1,2}))?", text)
    level = int(match[1] or _DEFAULT_LEVEL) if match else 0
    if not 1 <= level <= _MAX_LEVEL:
        raise OptionError(
            f"compression={excerpt(compression)}: expected None, 'zstd', or 'zstd:1' to 'zstd:{_MAX_LEVEL}'"
        )
    return level


def _checked_columns(columns: Iterable[str]) -> frozenset[str]:
    names = None if isinstance(columns, str) or not isinstance(columns, Iterable) else [*columns]
    if names is None or not all(isinstance(name, str) for name in names):
        raise OptionError(
            f"compress_columns={excerpt(columns)}: expected column names, such as ('obs', 'new_obs')"
        )
    return frozenset(names)
