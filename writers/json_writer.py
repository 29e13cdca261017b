"""`JsonWriter`: shards of JSON lines, for people and for tools that read nothing else.

Each `write()` becomes one line, of which `rlio.schemas.json_lines` describes the grammar; the first line of
each shard is its provenance. Parquet is read some eight times faster (HalfCheetah-v5, 1,000 rows a line).

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
from typing import Any, Final

from rlio.dataset.json_shard import MAX_JSON_SHARD_BYTES
from rlio.errors import OptionError
from rlio.log.spool import SpoolLike
from rlio.log.wal import Sync
from rlio.schemas.provenance import Provenance
from rlio.support.options import checked_keywords, expected
from rlio.writers.dataset_writer import DatasetWriter
from rlio.writers.json_encoder import JsonEncoder
from rlio.writers.roll import Roll

__all__ = ["JsonWriter"]

# Level 3 is no smaller on lines of 1,000 HalfCheetah-v5 steps, and a third slower.
_DEFAULT_LEVEL: Final = 1
_MAX_LEVEL: Final = 22


class JsonWriter(DatasetWriter):
    """Writes batches into a data set of JSON shards, on any filesystem, beside Parquet shards if there are.

    Lines are logged by `write` and collected, and stored as a whole shard, in the background, when `roll`
    says so, at `flush` and at `close`. A batch that makes no legal line (64 MiB) or has more than
    ``roll.max_rows`` is cut into several; sequences, and batches of several policies, are not cut. What a
    dead writer of this machine has left in its log is published when the next writer opens the root, and by
    `rlio recover`.

    Args:
        root: Folder of the data set: a path or any fsspec URL.
        roll: When to store a shard.
        compression: None, or ``"zstd"`` or ``"zstd:level"``: ``.jsonl.zst``, in which each line is a frame.
        compress_columns: Columns to write as compressed binary within the line, as RLlib's
            ``output_compress_columns``; those that a batch lacks do not matter.
        spool: The write-ahead log: "auto", a folder, a `Spool`, or None: rows are safe once published.
        sync: When logged rows become safe against power failure: "interval", "always" or "never"; see
            `Spool`. None: as the `Spool` says.
        writer_id: For jobs and tests that want fixed names; it must have no rows yet. None draws one.
        worker_index: Goes into a drawn id.
        spaces: Policy id -> (observation space, action space), stored with the schema.
        provenance: What made the data, stored in every shard.
        storage_options: For fsspec.

    A store that is down when the writer opens, or that hangs, does not refuse it where rows can wait: in a
    log that is not on the root's own disk, under a drawn id. Opening then takes about a minute at most.

    Raises:
        OptionError: An option is illegal, or ``writer_id`` has rows.
        UnknownName: No filesystem has the URL's scheme.
        PublishError: Nothing can be stored, or logged, there.
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
        provenance: Provenance | None = None,
        storage_options: dict[str, object] | None = None,
    ) -> None:
        about = provenance or Provenance()
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
            provenance=about,
            storage_options=storage_options,
        )


def _checked_roll(roll: Roll) -> Roll:
    if roll.max_bytes > MAX_JSON_SHARD_BYTES // 2:
        raise OptionError(
            f"Roll(max_bytes={roll.max_bytes}): a JSON shard is read as a whole when it is opened; at most "
            f"{MAX_JSON_SHARD_BYTES // 2} bytes"
        )
    return roll


def _parse_level(compression: str | None) -> int | None:
    """The zstd level; None without compression."""
    if compression is None:
        return None
    match = re.fullmatch(r"zstd(?::([0-9]{1,2}))?", compression)
    level = int(match[1] or _DEFAULT_LEVEL) if match else 0
    if not 1 <= level <= _MAX_LEVEL:
        raise OptionError(f"compression={compression!r}: None, 'zstd', or 'zstd:1' to 'zstd:{_MAX_LEVEL}'")
    return level


def _checked_columns(columns: Iterable[str]) -> frozenset[str]:
    if isinstance(columns, str):
        raise OptionError(f"compress_columns={columns!r}: names of columns, such as ('obs', 'new_obs')")
    return frozenset(columns)
