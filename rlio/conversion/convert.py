"""`convert`: converts any data that `rlio.read` opens into a data set of rlio, or another format.

Example:
    >>> import numpy as np, rlio
    >>> with rlio.ParquetWriter("memory://convert-example/a") as writer:
    ...     writer.write(rlio.SampleBatch(obs=np.zeros((3, 4)), actions=[0, 1, 0], rewards=np.ones(3),
    ...                                   terminateds=[False, False, True], eps_id=[5] * 3, t=range(3)))
    >>> report = convert("memory://convert-example/a", "memory://convert-example/b", prove=True)
    >>> report.episodes, report.rows, report.proved, len(rlio.open_dataset("memory://convert-example/b"))
    (1, 3, True, 3)
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch, SampleBatch
from rlio.batch.arrays import take_leaf, to_numpy
from rlio.batch.columns import Columns
from rlio.batch.episode import Episode
from rlio.batch.nested import leaves, map_structure, path_text
from rlio.catalog.commit import read_header
from rlio.catalog.listing import list_shards
from rlio.catalog.markers import seal
from rlio.catalog.names import DATA_DIR, HEADER
from rlio.conversion.episodes import Episodes, Part, open_episodes
from rlio.conversion.report import ImportReport, Inspector
from rlio.errors import CorruptData, OptionError, RlioError, SchemaError, UnknownName, excerpt
from rlio.formats.format import Format, by_name, formats, load
from rlio.formats.hold import hold_folder
from rlio.formats.sink import MARKER, EpisodeSink
from rlio.mapping import Mapping as ColumnMapping
from rlio.opening import dataset_on
from rlio.schemas.provenance import Provenance
from rlio.storage.filesystem import Storage
from rlio.storage.paths import TMP_DIR, StrPath
from rlio.support.options import check_choice, option_names, refuse_unknown
from rlio.support.spaces import Spaces
from rlio.writers.ended_episodes import EpisodeComesAgain
from rlio.writers.parquet_writer import ParquetWriter
from rlio.writers.roll import Roll

__all__ = ["convert"]

logger: logging.Logger = logging.getLogger("rlio")

#: Rows read so far, and episodes.
Progress = Callable[[int, int], object]

# Bytes of rows that become one shard, which ends where an episode does: what is stored is whole episodes.
_SHARD_BYTES = 128 << 20
_MAX_ENCODED = 256 << 20
_PROVENANCE = tuple(field.name for field in fields(Provenance))


def convert(
    src: Any,
    dst: StrPath,
    *,
    to: str | None = None,
    mapping: ColumnMapping | None = None,
    spaces: Spaces | None = None,
    policy: str | None = None,
    prove: bool = False,
    on_error: Literal["raise", "skip"] = "raise",
    options: Mapping[str, Any] | None = None,
    read_options: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    into_storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Convert data into a data set of rlio, or into a format of another library.

    Episodes are written whole and in order; spaces, environment, seeds and provenance are kept if both
    formats have them. Memory holds a few episodes, and 128 MiB of rows. Called again after an interruption,
    even by ``kill -9``, it continues: it reads ``src`` from the beginning, for the report, and writes only
    the missing rows. (Formats of a single file are written again.) Only a data set of rlio takes rows of
    several policies, unless ``policy`` names one.

    Args:
        src: What `rlio.read` opens: a path, URI or glob, or a list of those, an open `Dataset`, a table in
            memory; or an `EpisodeReader`, such as `rlio.from_arrays` gives.
        dst: A folder; or, for formats of one file, a file whose ending is one of the format's.
        to: Name of the format; None: a data set of rlio.
        mapping: What the columns of a table mean.
        spaces: (observation space, action space), for data that does not state them.
        policy: The policy whose rows are converted, if there are several.
        prove: Whether to read both sides again, and compare them episode by episode and column by column, in
            what the format holds (`Format.loses` names the rest).
        on_error: What to do with an episode that is not a trajectory or does not fit: "raise", or
            "skip" it, which the report counts. A data set of rlio takes all rows.
        options: Options of the format.
        read_options: Keywords of the reader of ``src``.
        storage_options: For the filesystem of ``src``.
        into_storage_options: For the filesystem of ``dst``.
        progress: Called after each episode with the rows and the episodes that were read. If it has a method
            ``begin``, that is called first with all rows that will be read; None: not known.

    Returns:
        A report of what was read, written and found. A data set of rlio also stores it in the provenance of
        the last shard.

    Raises:
        OptionError: An option is illegal, ``dst`` holds something else, or another conversion writes into it
            (which is found out where ``dst`` is a local folder).
        DataNotFound: ``src`` has no data.
        SchemaError: An episode is not a trajectory, or the format cannot hold it.
        CorruptData: ``src`` is damaged; or ``prove`` found a difference, which the message names.
    """
    check_choice("on_error", on_error, ("raise", "skip"))
    format = _format(to)
    source = open_episodes(
        src,
        policy=policy,
        keeps_batches=format is None,
        read_options=_with_options(read_options, mapping=mapping, spaces=spaces),
        storage_options=storage_options,
    )
    storage = Storage.open(dst, storage_options=into_storage_options)
    if f"{storage.uri.rstrip('/')}/".startswith(f"{source.uri.rstrip('/')}/"):
        # What is written would be read as a part of the source: by the proof, and when it is called again.
        raise OptionError("the target is the source, or lies in it: name another place", uri=storage.uri)
    with nullcontext() if _is_one_file(format) else hold_folder(storage):
        target = _open_target(source, dst, format, dict(options or {}), into_storage_options, on_error)
        report = _copy(source, target, format, progress)
        if prove:
            _prove(source, dst, format, into_storage_options, target)
            report = replace(report, proved=True)
    return report


def _with_options(read_options: Mapping[str, Any] | None, **own: Any) -> Mapping[str, Any] | None:
    """The keywords of the reader of the source, with those that `convert` takes itself."""
    given = {name: value for name, value in own.items() if value is not None}
    if twice := [name for name in given if name in (read_options or {})]:
        raise OptionError(
            f"{twice[0]}= and read_options={{{twice[0]!r}: ...}} are one option: pass one of them"
        )
    return {**read_options, **given} if read_options and given else given or read_options


def _copy(
    source: Episodes,
    target: _DatasetTarget | _SinkTarget,
    format: Format | None,
    progress: Progress | None,
) -> ImportReport:
    """Write all episodes into the target, and close it."""
    inspector = Inspector(source.parts[0].origin.spaces)
    if begin := getattr(progress, "begin", None):
        begin(source.rows)
    try:
        for number, (part, rows) in enumerate(source):
            if source.joint:
                inspector.add_batch(rows, place=f"batch {number}")
            else:
                assert isinstance(rows, SampleBatch)
                place = _place(number, rows)
                inspector.add(rows, place=place)
                if (in_order := _in_order(rows)) is not rows:
                    inspector.note("sorted", first=place)
                    rows = in_order
            target.write(part, rows, inspector, number)
            if progress is not None:
                progress(inspector.rows, inspector.episodes)
        for note in source.notes:
            inspector.note("note", text=note)
        for column in [*source.left_out, *target.left_out]:
            inspector.note("left_out", column=column)
        report = ImportReport(
            source=source.uri,
            target=target.uri,
            source_format=source.format,
            target_format="rlio" if format is None else format.name,
            episodes=inspector.episodes,
            rows=inspector.rows,
            written=target.written,
            findings=inspector.findings(),
        )
        target.close(report)
    except BaseException:
        target.abort()
        raise
    return report


def _format(name: str | None) -> Format | None:
    """The format of ``to=``; None: a data set of rlio."""
    if name is None or name == "rlio":
        return None
    found = by_name(name)
    if found is None or found.writer is None:
        names = ", ".join(["rlio", *(format.name for format in formats() if format.writer)])
        raise UnknownName(f"to={excerpt(name)}: rlio writes {names}")
    return found


def _is_one_file(format: Format | None) -> bool:
    if format is None:
        return False
    assert format.writer is not None
    return "file" in (option_names(load(format.writer)) or ())


def _place(number: int, rows: SampleBatch) -> str:
    eps_id = rows.get(Columns.EPS_ID)
    return f"episode {number}" + ("" if eps_id is None else f" (eps_id {excerpt(to_numpy(eps_id).item(0))})")


def _in_order(rows: SampleBatch) -> SampleBatch:
    """The rows of an episode, sorted by step if each comes once."""
    if Columns.T not in rows:
        return rows
    t = to_numpy(rows[Columns.T])
    if (np.diff(t) == 1).all() or len(np.unique(t)) < len(t):
        return rows
    order = np.argsort(t, kind="stable")
    if (np.diff(order) == 1).all():
        return rows
    return SampleBatch(
        {name: map_structure(lambda leaf: take_leaf(leaf, order), column) for name, column in rows.items()}
    )


# ---- targets ----


def _open_target(
    source: Episodes,
    dst: StrPath,
    format: Format | None,
    options: dict[str, Any],
    storage_options: Mapping[str, Any] | None,
    on_error: str,
) -> _DatasetTarget | _SinkTarget:
    if format is None:
        refuse_unknown(options, (), of="a data set of rlio")
        return _DatasetTarget(
            Storage.open(dst, storage_options=storage_options), source, dst, storage_options
        )
    assert format.writer is not None
    sink = load(format.writer)
    names = [name for name in option_names(sink) or () if name not in ("storage", "origin", "self")]
    text = os.fspath(dst)
    if "file" in names and "file" not in options and text.lower().endswith(format.marks.endings):
        folder, slash, options["file"] = text.rpartition("/")
        dst = folder + slash if slash else "."
    refuse_unknown(options, names, of=f"the format {format.name}")
    storage = Storage.open(dst, storage_options=storage_options)
    return _SinkTarget(storage, source, sink, options, on_error, format.loses)


def _has_files(storage: Storage, *, besides: str | None = None) -> bool:
    """Whether there is more than what an interrupted `Storage.put` leaves, and the file ``besides``."""
    names = (name for name, _ in storage.children("", most=100))
    return any(not name.startswith(".") and name not in (TMP_DIR, besides) for name in names)


def _check_empty(storage: Storage) -> None:
    if _has_files(storage):
        raise OptionError("found other files, expected an empty folder: name another", uri=storage.uri)


class _DatasetTarget:
    """A data set of rlio.

    The ids of its writers identify the source of the rows. A shard is stored once it has 128 MiB of whole
    episodes. So a process that died has stored whole episodes, and the number of rows shows which ones.
    """

    # It holds everything.
    lost: Collection[str] = ()
    refused: Collection[int] = ()
    left_out: Collection[str] = ()

    def __init__(
        self, storage: Storage, source: Episodes, root: StrPath, storage_options: Mapping[str, Any] | None
    ) -> None:
        self.uri = storage.uri
        self.written = 0
        self._root, self._options = root, dict(storage_options) if storage_options is not None else None
        self._source = source
        self._prefix = f"convert-{source.identity}-"
        #: Rows that an earlier call has stored and that are still to be passed over.
        self._stored, self._number = self._begin(storage)
        self._passed = 0
        self._writer: ParquetWriter | None = None
        self._open_for = (0, 0)
        self._pending: list[Batch] = []
        self._pending_part = 0
        self._bytes = 0

    def _begin(self, storage: Storage) -> tuple[int, int]:
        """Rows that are stored, and the number of the next writer."""
        if not storage.exists(HEADER):
            _check_empty(storage)
            return 0, 0
        read_header(storage)
        names = storage.folders(DATA_DIR)
        others = [name for name in names if not name.startswith(self._prefix)]
        if others:
            raise OptionError(
                f"found rows of {len(others)} other writers ({excerpt(others[:3])}), expected a new folder, "
                "or one in which a conversion of the same source was interrupted: name another",
                uri=storage.uri,
            )
        listing = list_shards(storage)
        dataset = dataset_on(storage)
        dataset.check_complete()
        for writer, rows in dataset.snapshot().items():
            if writer not in listing.sealed:
                assert isinstance(rows, int)
                seal(storage, writer, rows)
        return len(dataset), 1 + max((int(name.removeprefix(self._prefix)) for name in names), default=-1)

    def write(self, part: int, rows: Batch, inspector: Inspector, number: int) -> None:
        count = rows.agent_steps()
        if self._passed < self._stored:
            self._passed += count
            if self._passed > self._stored:
                raise OptionError(
                    f"found {self._stored} rows there, which do not end where an episode of the source does: "
                    "name another folder",
                    uri=self.uri,
                )
            return
        if self._pending and (part != self._pending_part or self._bytes >= _SHARD_BYTES):
            self._store()
        self._pending.append(rows)
        self._pending_part = part
        self._bytes += rows.size_bytes()
        self.written += count

    def _store(self, report: ImportReport | None = None) -> None:
        """Store what is pending as one shard."""
        # One long episode may be larger than what a shard usually holds.
        room = max(_MAX_ENCODED, 2 * self._bytes)
        if self._open_for != (self._pending_part, room) or report is not None:
            self._close_writer()
        for batch in self._pending:
            try:
                self._open(room, report).write(batch)
            except EpisodeComesAgain:  # Two episodes of the source have one id.
                self._close_writer()
                self._open(room, report).write(batch)
        if self._writer is not None:
            self._writer.flush()
        self._pending, self._bytes = [], 0

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, room: int, report: ImportReport | None) -> ParquetWriter:
        """The writer for what is pending."""
        if self._writer is None:
            self._writer = self._open_writer(self._source.parts[self._pending_part], room, report)
            self._open_for = (self._pending_part, room)
        return self._writer

    def _open_writer(self, part: Part, room: int, report: ImportReport | None) -> ParquetWriter:
        known = dict(part.provenance) or {"env": part.origin.env, **part.origin.extra}
        known.pop("versions", None)
        extra = {**known.pop("extra", {})}
        for name in [name for name in known if name not in _PROVENANCE]:
            extra[name] = known.pop(name)
        extra["converted"] = {"source": self._source.uri, "format": self._source.format}
        if report is not None:
            extra["import_report"] = report.to_json()
        provenance = Provenance(**known, extra=extra)
        writer = ParquetWriter(
            self._root,
            writer_id=f"{self._prefix}{self._number:06d}",
            roll=Roll(max_bytes=room, max_seconds=None),
            spool=None,
            spaces=part.spaces or None,
            provenance=provenance,
            storage_options=self._options,
        )
        self._number += 1
        return writer

    def close(self, report: ImportReport) -> None:
        if self._passed < self._stored:
            raise OptionError(
                f"found {self._stored} rows there, more than the source has: name another folder",
                uri=self.uri,
            )
        if self._pending:
            self._store(report)
        self._close_writer()

    def abort(self) -> None:
        """Keep what is stored; a later call continues."""
        if self._writer is not None and not self._writer.closed:
            try:
                self._writer.close()
            except Exception as error:  # Raised already, by what is aborted; a later call seals the writer.
                logger.warning("closing the writer failed: %r", error)


class _SinkTarget:
    """Another library's format."""

    def __init__(
        self,
        storage: Storage,
        source: Episodes,
        sink: Any,
        options: dict[str, Any],
        on_error: str,
        lost: frozenset[str],
    ) -> None:
        self.written = self._good = 0
        #: Numbers of the episodes that were left out.
        self.refused: set[int] = set()
        self._skips = on_error == "skip"
        #: Columns that were not written.
        self.left_out: dict[str, None] = {}
        name = options.get("file")
        self.uri = storage.uri if name is None else storage.uri_of(name)
        self._storage, self._has_marker = storage, name is None
        self._begin(
            name, json.dumps({"source": source.uri, "identity": source.identity, **options}, default=str)
        )
        try:
            self._sink: EpisodeSink = sink(storage, source.parts[0].origin, **options)
        except BaseException:
            self.abort()
            raise
        #: What does not come back; some formats lose more with some options.
        self.lost: frozenset[str] = getattr(self._sink, "loses", lost)

    def _begin(self, name: str | None, identity: str) -> None:
        """Refuse what holds something else."""
        storage = self._storage
        if name is not None:
            if storage.exists(name):
                raise OptionError("found a file there, expected none: name another", uri=self.uri)
            return
        if storage.exists(MARKER):
            found = storage.read(MARKER, limit=1 << 20).decode()
            if found != identity:
                raise OptionError(
                    f"found an unfinished conversion of something else, or with other options "
                    f"({excerpt(found)}): remove it, or name another folder",
                    uri=self.uri,
                )
            return
        _check_empty(storage)
        storage.put(MARKER, identity.encode())

    def write(self, part: int, rows: Batch, inspector: Inspector, number: int) -> None:
        assert isinstance(rows, SampleBatch)
        try:
            episode = Episode.from_batch(rows, id_=None if Columns.EPS_ID in rows else number)
            if self._good < self._sink.episodes:
                self._sink.check(self._kept(episode))  # type: ignore[attr-defined] # this one continues
                self._good += 1  # An earlier call has stored it.
                return
            self._sink.write(self._kept(episode))
        except SchemaError as error:
            if not self._skips:
                raise SchemaError(f"{_place(number, rows)}: {error}; or pass on_error='skip'") from error
            inspector.note("refused", first=_place(number, rows))
            self.refused.add(number)
            return
        self._good += 1
        self.written += len(rows)

    def _kept(self, episode: Episode) -> Episode:
        """The episode without what the format cannot hold."""
        kept = copy(episode)
        if "infos" in self.lost and episode.infos is not None:
            kept.infos = None
            self.left_out[Columns.INFOS] = None
        if "extra" in self.lost:
            keeps = getattr(self._sink, "keeps", ())
            kept.extra_outputs = {
                name: column for name, column in episode.extra_outputs.items() if name in keeps
            }
            self.left_out.update(dict.fromkeys(name for name in episode.extra_outputs if name not in keeps))
        return kept

    def close(self, report: ImportReport) -> None:
        self._sink.close()
        if self._has_marker:
            self._storage.remove(MARKER)

    def abort(self) -> None:
        sink = getattr(self, "_sink", None)
        if sink is not None:
            sink.abort()
        try:
            if self._has_marker and not _has_files(self._storage, besides=MARKER):
                # Nothing is stored, so another call may have other options.
                self._storage.remove(MARKER)
        except RlioError as error:  # What is aborted has raised already.
            logger.warning("removing %s failed: %r", MARKER, error)


# ---- proof ----


def _prove(
    source: Episodes,
    dst: StrPath,
    format: Format | None,
    storage_options: Mapping[str, Any] | None,
    target: _DatasetTarget | _SinkTarget,
) -> None:
    """Read both sides and compare them.

    Raises:
        CorruptData: They differ.
        OptionError: rlio does not read the format.
    """
    if format is not None and not format.is_read:
        raise OptionError(f"prove=True: rlio does not read {format.title}")
    written = open_episodes(
        dst,
        keeps_batches=format is None,
        layout="whole" if format is not None or source.layout == "whole" else "runs",
        storage_options=storage_options,
    )
    if source.joint:
        _compare("all rows", _hash_all(source), _hash_all(written), written.uri)
        return
    given = _hashes(source, target.lost, besides=target.refused, is_row_wise=format is None)
    found = _hashes(written, target.lost, is_row_wise=format is None)
    for number, (a, b) in enumerate(zip_longest(given, found)):
        if a is None or b is None:
            raise CorruptData(
                f"the proof failed: the {'source' if b is None else 'target'} has more than {number} "
                "episodes",
                uri=written.uri,
                record=number,
            )
        _compare(f"episode {number}", a, b, written.uri, number)


def _compare(
    what: str, a: Mapping[str, str], b: Mapping[str, str], uri: str, record: int | None = None
) -> None:
    for column in [*a, *b]:
        if a.get(column) != b.get(column):
            lacks = "is absent" if column not in b else "is new" if column not in a else "differs"
            raise CorruptData(
                f"the proof failed: {what}: the column {lacks}", uri=uri, record=record, column=column
            )


def _hashes(
    episodes: Episodes, lost: Collection[str], *, is_row_wise: bool, besides: Collection[int] = ()
) -> Iterator[dict[str, str]]:
    """The content of each episode, but for the numbers ``besides``: column -> digest."""
    for number, (_, found) in enumerate(episodes):
        if number in besides:
            continue
        assert isinstance(found, SampleBatch)
        rows = _in_order(found)
        if is_row_wise:
            yield {name: _digest(column, lost) for name, column in rows.items()}
            continue
        episode = Episode.from_batch(rows, id_=None if Columns.EPS_ID in rows else number)
        yield {name: _digest(column, lost) for name, column in _contents(episode, lost).items()}


def _contents(episode: Episode, lost: Collection[str]) -> dict[str, Any]:
    steps = len(episode)
    observations = episode.observations
    if "final_obs" in lost:
        observations = map_structure(lambda leaf: leaf[:steps], observations)
    found: dict[str, Any] = {
        Columns.OBS: observations,
        Columns.ACTIONS: episode.actions,
        Columns.REWARDS: episode.rewards,
        Columns.TERMINATEDS: np.array([episode.terminated]),
    }
    if "truncated" not in lost:
        truncated = not episode.terminated if "unfinished" in lost else episode.truncated
        found[Columns.TRUNCATEDS] = np.array([truncated])
    if "ids" not in lost:
        found[Columns.EPS_ID] = np.array([episode.id_])
    if "start" not in lost:
        found[Columns.T] = np.array([episode.t_started])
    if "infos" not in lost and episode.infos is not None:
        found[Columns.INFOS] = episode.infos
    if "extra" not in lost:
        found.update(episode.extra_outputs)
    return found


def _digest(column: Any, lost: Collection[str]) -> str:
    """Digest of a column's structure, dtypes, shapes and values."""
    digest = hashlib.blake2b(digest_size=16)
    # Keys of a dict have no order.
    for path, leaf in sorted(leaves(column), key=lambda part: path_text(part[0])):
        array = to_numpy(leaf)
        if "row_shape" in lost and array.ndim > 1 and array[0:1].size == 1:
            array = array.reshape(len(array))
        if "dtypes" in lost and array.dtype.kind in "biuf":
            array = _without_dtype(array)
        digest.update(f"{path_text(path)}|{array.dtype.str}|{array.shape}".encode())
        _feed_rows(digest, array, by_value="dtypes" in lost)
    return digest.hexdigest()


def _feed_rows(digest: Any, array: NDArray[Any], *, by_value: bool = False) -> None:
    """Add the rows of an array, which may be cut anywhere."""
    if array.dtype == object:
        for value in array.tolist():
            _feed(digest, value, by_value=by_value)
    else:
        digest.update(array.tobytes())


def _without_dtype(array: NDArray[Any]) -> NDArray[Any]:
    """The values as float64, or as objects if float64 does not hold the whole numbers."""
    wide = array.astype(np.float64)
    with np.errstate(invalid="ignore"):
        is_exact = array.dtype.kind not in "iu" or np.array_equal(wide.astype(array.dtype), array)
    return wide if is_exact else array.astype(object)


def _feed(digest: Any, value: Any, *, by_value: bool = False) -> None:
    """Add a Python value, such as an info; ``by_value``: arrays and NumPy's numbers without their dtypes."""
    if isinstance(value, Mapping):
        digest.update(f"{{{len(value)}".encode())
        for key in sorted(value, key=str):
            digest.update(f"{str(key)!r}:".encode())
            _feed(digest, value[key], by_value=by_value)
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)}".encode())
        for one in value:
            _feed(digest, one, by_value=by_value)
    elif isinstance(value, np.ndarray):
        if not by_value:
            kind = value.dtype.newbyteorder("=").str  # The order of bytes is no matter of content.
            digest.update(f"{kind}{value.shape}".encode())
        _feed(digest, value.tolist(), by_value=by_value)
    else:
        # np.float64 and np.str_ are Python's types, too, and are stored as such.
        is_plain = by_value or isinstance(value, (float, complex, str, bytes))
        kind = value.dtype.str if isinstance(value, np.generic) and not is_plain else ""
        plain = value.item() if isinstance(value, np.generic) else value
        digest.update(f"{kind}{plain!r},".encode())


def _hash_all(episodes: Episodes) -> dict[str, str]:
    """The content of all rows of each policy, however they are cut into batches."""
    found: dict[str, Any] = {}
    for _, batch in episodes:
        for policy, rows in batch.policies().items():
            for name, column in rows.items():
                for path, leaf in leaves(column):
                    array = to_numpy(leaf)
                    key = f"{policy}/{name}" + (f"/{path_text(path)}" if path else "")
                    if key not in found:
                        found[key] = hashlib.blake2b(f"{array.dtype.str}{array.shape[1:]}".encode())
                    _feed_rows(found[key], array)
    return {key: digest.hexdigest() for key, digest in found.items()}
