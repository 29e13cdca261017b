"""`JsonReader`: RLlib's JSON recordings, from folders, globs, lists, URIs and zip files.

One line is one record: the batch that was written at one time. Records are read one at a time in the order of
the files, or, with ``shuffle``, in another pseudo-random order each epoch. The reader remembers the offsets
of records as it reads the files.

Not here: the formats of a record (`rlio.formats.rllib.decoder`), and rlio's data sets, whose JSON shards
`rlio.DatasetReader` reads.

Example:
    >>> from rlio.storage import Storage
    >>> record = b'{"type": "SampleBatch", "obs": [[0.5], [1.0]], "rewards": [1.0, 1.0]}'
    >>> Storage.open("memory://json-example").put("old.json", record)
    >>> with JsonReader("memory://json-example", epochs=1) as reader:
    ...     [batch["rewards"].tolist() for batch in reader]
    [[1.0, 1.0]]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from rlio.formats.files.inputs import FileOptions
from rlio.formats.rllib.json_records import open_records
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.readers.record_reader import RecordReader
from rlio.readers.source_reader import Asked, SourceKeywords
from rlio.storage.filesystem import StrPath
from rlio.support.options import checked_keywords
from rlio.support.spaces import Spaces

__all__ = ["JsonReader"]


class JsonReader(RecordReader):
    """Reads RLlib's JSON recordings.

    Without ``batch_size``, `sample` serves the records as they were written, in their order or shuffled;
    record number i of the order over all epochs belongs to rank i modulo world. With ``batch_size``, or an
    option that shapes or keeps rows (``draw``, ``filter``, ``cache`` and others), the reader serves rows,
    as `rlio.DatasetReader` does: a shuffle is a permutation of all rows, and ranks divide rows. It then reads
    the files once at opening, to count their rows.

    All records must be alike: a record counts as damaged if its columns, dtypes or shapes differ from those
    of the first readable record. With ``on_error="skip"``, `skipped` counts records.

    Rows keep the dtypes of JSON (int64, float64, bool; packed columns have their own) unless ``spaces`` are
    given; legacy ``dones`` become ``terminateds``.

    Several threads may call it: see `rlio.InputReader`.

    Args:
        inputs: A file, folder, glob or URI, or a list of those. In folders and zip files, every ``*.json``
            and ``*.jsonl`` is read; in folders also every ``*.zip``.
        spaces: (observation space, action space), or policy id -> such a pair: restores the structure and
            dtypes of obs, new_obs, actions and prev_actions.
        unnormalise_actions: RLlib records actions of bounded Boxes scaled to [-1, 1]. True: actions and
            prev_actions are scaled to the bounds of their space, and clipped to them. False, or None: they
            are served as recorded; None also logs this once if actions are floats.
        format_options: ``{"infos": "obs"}`` or ``{"infos": "new_obs"}``: which observation an info came with.
            None: RLlib's rule, which changed with its version 2.3: that of ``obs`` in batches with
            ``terminateds``, else that of ``new_obs``. rlio's rows have that of ``new_obs``; where it was not
            recorded, they have ``{}``. ``{"lists": ["tokens"]}``: columns, or parts of them (``obs/tokens``),
            whose rows have any number of items (`rlio.Ragged`), where those of the first record have one.
        limits: Limits on the files' demands.
        storage_options: Keywords of the fsspec filesystem.
        keywords: What is read, in which order, what a unit is, and where rows are kept: see
            `rlio.DatasetReader`. A text as
            ``columns`` (``"intersect"``, ``"fill"``) is for files with different columns.

    Raises:
        DataNotFound: ``inputs`` name no file.
        OptionError: An option is illegal, or a file belongs to a data set of rlio.
        CorruptData: A zip file is damaged (UnsafeData: it would inflate to too much memory).
    """

    @checked_keywords
    def __init__(
        self,
        inputs: StrPath | Sequence[StrPath],
        *,
        spaces: Spaces | None = None,
        unnormalise_actions: bool | None = None,
        format_options: Mapping[str, Any] | None = None,
        limits: Limits = DEFAULT_LIMITS,
        storage_options: Mapping[str, Any] | None = None,
        **keywords: Unpack[SourceKeywords],
    ) -> None:
        asked = Asked.of(keywords)  # Raises before anything is opened.
        how = FileOptions(
            spaces=spaces, format_options=format_options, storage_options=storage_options, limits=limits
        )
        found = open_records(inputs, asked.opening(how), unnormalise_actions=unnormalise_actions)
        self._serve(*found, asked, details={"max_line_bytes": limits.line_bytes})
