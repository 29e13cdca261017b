"""`JsonReader`: RLlib's JSON recordings, from folders, globs, lists, URIs and zip files.

One line is one record: the batch that was written at one time. Records are read one at a time in the order of
the files, or, with ``shuffle``, in another pseudo-random order each epoch. The reader remembers the offsets
of records as it reads the files.

Not here: the formats of a record (`rlio.readers.rllib_json`), and rlio's data sets, whose JSON shards
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

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Unpack

from rlio.batch import Batch
from rlio.dataset.names import HEADER, ShardName
from rlio.dataset.stats import Normalise
from rlio.errors import OptionError, SchemaError
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.reader import Endless, InputReader, JsonState, Unit
from rlio.readers.inputs import Cursor, Failures, RecordCursor, StoredReader, find_files, raise_at
from rlio.readers.json_records import JsonRecords
from rlio.readers.json_source import SUFFIXES, JsonSource
from rlio.readers.line_files import open_line_files
from rlio.readers.read_options import ReadOptions
from rlio.readers.rllib_json import RllibDecoder
from rlio.readers.source_reader import Asked, SourceKeywords, SourceReader, refuse_earlier
from rlio.readers.space_arrays import Spaces
from rlio.readers.stored_pass import Cache, Kept
from rlio.replay.joint_gather import RowSource
from rlio.source.damage import SkippedRecord
from rlio.source.uniform import Agreed
from rlio.storage import InputFile
from rlio.storage.filesystem import StrPath
from rlio.support.options import checked_keywords

__all__ = ["JsonReader"]


class JsonReader(InputReader):
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
            recorded, they have ``{}``.
        cache: Where rows are kept: see `rlio.DatasetReader`.
        normalise: Brings columns to one range: see `rlio.DatasetReader`.
        limits: Limits on the files' demands.
        storage_options: Keywords of the fsspec filesystem.
        keywords: What is read, in which order, and what a unit is: see `rlio.DatasetReader`. A text as
            ``columns`` (``"intersect"``, ``"fill"``) is for files with different columns.

    Raises:
        DataNotFound: ``inputs`` name no file.
        OptionError: An option is illegal, or a file belongs to a data set of rlio.
        CorruptData: A zip file is damaged (UnsafeData: it would inflate to too much memory).
    """

    replayable = True

    @checked_keywords
    def __init__(
        self,
        inputs: StrPath | Sequence[StrPath],
        *,
        spaces: Spaces | None = None,
        unnormalise_actions: bool | None = None,
        format_options: Mapping[str, Any] | None = None,
        cache: Cache = "auto",
        normalise: Normalise | None = None,
        limits: Limits = DEFAULT_LIMITS,
        storage_options: Mapping[str, Any] | None = None,
        **keywords: Unpack[SourceKeywords],
    ) -> None:
        asked = Asked.of(keywords)
        found = find_files(inputs, suffixes=SUFFIXES, storage_options=storage_options, limits=limits)
        _refuse_data_sets(found)

        def decoder_of(columns: list[str] | None) -> RllibDecoder:
            return RllibDecoder(
                columns,
                spaces=spaces,
                limits=limits,
                unnormalise_actions=unnormalise_actions,
                format_options=format_options,
                source=found[0].uri,
            )

        records = JsonRecords(open_line_files(found, limits), limits.line_bytes)
        self.options: ReadOptions = asked.options
        self.drop_last: bool = asked.options.drop_last
        by_rows = asked.options.batch_size is not None or asked.drawn or cache != "auto" or bool(normalise)
        self._inner: _Records | _Rows
        if by_rows:
            source = JsonSource(records, found, decoder_of, asked.options, columns=asked.columns)
            self._inner = _Rows(source, asked, cache, normalise)
            self.can_read_ahead: bool = asked.options.shard[1] == 1 and not self.drop_last
        else:
            self._inner = _Records(records, found, decoder_of(asked.options.columns), asked.options, limits)

    def _describe(self) -> Iterator[str]:
        yield from self._inner._describe()

    @property
    def unit(self) -> Unit:  # type: ignore[override]  # The base has an attribute, for authors' sake.
        """The unit that ``n`` and ``batch_size`` count."""
        return self._inner.unit

    @property
    def cache(self) -> Kept:
        """Where the rows are kept; with ``cache="auto"``, the choice."""
        return self._inner.cache if isinstance(self._inner, _Rows) else "none"

    @property
    def skipped(self) -> int:
        """Damaged records that ``on_error="skip"`` has skipped so far, each counted once."""
        return self._inner.skipped

    @property
    def errors(self) -> list[SkippedRecord]:
        """The first 1000 of them, each with its place and its damage."""
        return self._inner.errors

    @property
    def row_source(self) -> RowSource | None:
        """The source of its next rows, to gather them with those of others; None without a store."""
        return self._inner.row_source if isinstance(self._inner, _Rows) else None

    # ---- hooks of InputReader ----

    def _next(self) -> Batch:
        return self._inner._next()

    def _take(self, n: int) -> Batch:
        return self._inner._take(n) if isinstance(self._inner, _Rows) else super()._take(n)

    def _endless(self) -> Endless | None:
        return self._inner._endless()

    def interrupt(self) -> None:
        """Wake a `sample` that waits for its store to be built; see `InputReader`."""
        self._inner.interrupt()

    def _position(self) -> JsonState:
        return self._inner._position()

    def _load(self, state: JsonState) -> None:
        if isinstance(self._inner, _Records):
            self._inner.check_ranks(state)
        super()._load(state)

    def _seek(self, position: JsonState) -> None:
        self._inner._seek(position)

    def _close(self) -> None:
        self._inner._close()


class _Records(StoredReader):
    """Records as they were written."""

    def __init__(
        self,
        records: JsonRecords,
        files: Sequence[InputFile],
        decoder: RllibDecoder,
        options: ReadOptions,
        limits: Limits,
    ) -> None:
        agreed = Agreed(options, lambda: records.firsts(decoder), several=len(records.files) > 1)
        found = _AgreedRecords(records, decoder, agreed)

        def make_cursor(seed: int, failures: Failures) -> Cursor:
            records.failures = failures
            return RecordCursor(found, options, seed=seed, failures=failures)

        details = {**decoder.details, "max_line_bytes": limits.line_bytes}
        super().__init__(options, files, make_cursor, details=details)


class _AgreedRecords:
    """Records with equal columns; a `RecordSource`."""

    def __init__(self, records: JsonRecords, decoder: RllibDecoder, agreed: Agreed) -> None:
        self._records, self._decoder, self._agreed = records, decoder, agreed
        self.has, self.count, self.close = records.has, records.count, records.close

    def load(self, index: int) -> Batch:
        batch = self._records.load(index, self._decoder)
        try:
            return self._agreed.conform(batch)
        except SchemaError as error:
            raise_at(error, uri=self._records.uri_of(index), record=self._records.numbers[index])


class _Rows(SourceReader):
    """Rows, by the engine of all stored data."""

    def __init__(self, source: JsonSource, asked: Asked, cache: Cache, normalise: Normalise | None) -> None:
        self.options, self._uri, self._source = asked.options, source.uri, source
        try:
            self._open(source, asked, cache=cache, missing="error", normalise=normalise)
        except BaseException:
            source.close()
            raise

    @property
    def skipped(self) -> int:
        count: int = self._source.failures.count + self._pass.damage.count
        return count

    @property
    def errors(self) -> list[SkippedRecord]:
        return [*self._source.failures.errors, *self._pass.damage.errors][:1000]

    def _seek(self, position: JsonState) -> None:
        refuse_earlier(position, uri=self._uri)
        super()._seek(position)

    def _close(self) -> None:
        super()._close()
        self._source.close()


def _refuse_data_sets(files: Sequence[InputFile]) -> None:
    for file in files:
        name = file.path.rsplit("/", 1)[-1]
        if name == HEADER or ShardName.parse(name) is not None:
            raise OptionError(
                "this file belongs to a data set of rlio: read the data set's root with rlio.DatasetReader "
                "(writers= selects writers), and mix it with other recordings through rlio.MixedInput",
                uri=file.uri,
            )
