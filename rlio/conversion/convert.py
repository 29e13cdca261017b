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

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal

from rlio.batch import Batch, SampleBatch
from rlio.batch.arrays import to_numpy
from rlio.batch.columns import Columns
from rlio.batch.encoded_picture import EncodedPicture, is_encoded
from rlio.batch.nested import leaves
from rlio.batch.picture_codecs import decode_batch
from rlio.catalog.commit import read_header
from rlio.catalog.listing import list_shards
from rlio.catalog.markers import seal
from rlio.catalog.names import DATA_DIR, HEADER
from rlio.conversion.episodes import Episodes, Part, open_episodes
from rlio.conversion.prepare import BeginAgain, Decisions, FinalObs, Preparer, origin_for
from rlio.conversion.proof import (
    Digests,
    RowDigests,
    digests_of_episode,
    digests_of_rows,
    in_order,
    prove_episodes,
    prove_joint,
)
from rlio.conversion.report import ImportReport, Inspector
from rlio.errors import MissingColumn, OptionError, RlioError, SchemaError, UnknownName, excerpt
from rlio.formats.format import Format, Holds, by_name, formats, load
from rlio.formats.hold import hold_folder
from rlio.formats.sink import MARKER, EpisodeSink
from rlio.mapping import Mapping as ColumnMapping
from rlio.opening import dataset_on
from rlio.schemas.leaves import leaf_name
from rlio.schemas.provenance import Provenance
from rlio.storage.filesystem import Storage
from rlio.storage.paths import TMP_DIR, StrPath
from rlio.support.isolation import Isolation, call_isolated
from rlio.support.options import check_choice, check_flag, option_names, refuse_unknown
from rlio.support.spaces import Spaces
from rlio.writers.dataset_writer import checked_pictures
from rlio.writers.ended_episodes import EpisodeComesAgain
from rlio.writers.parquet_writer import ParquetWriter
from rlio.writers.roll import Roll

__all__ = ["convert"]

logger: logging.Logger = logging.getLogger("rlio")

#: Rows read so far, and episodes.
Progress = Callable[[int, int], object]
DigestsOf = Callable[[], Digests]

# Bytes of rows that become one shard, which ends where an episode does: what is stored is whole episodes.
_SHARD_BYTES = 128 << 20
_MAX_ENCODED = 256 << 20
# So many bytes of decoded frames of videos count as one of a shard.
_VIDEO_SHARE = 64
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
    final_obs: FinalObs = "error",
    on_error: Literal["raise", "skip"] = "raise",
    options: Mapping[str, Any] | None = None,
    read_options: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    into_storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    isolated: bool | Isolation = False,
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
        prove: Whether to read both sides again, and compare them with what was written, episode by episode
            and column by column. What the report names as changed or left out is not compared.
        final_obs: What to do with an episode whose observation after the last step is missing, if the target
            needs it: "error"; "repeat": write the last one again; "drop-step": leave out the last step, so
            that the episode is truncated before it. Other targets mark it as missing, whatever this is.
        on_error: What to do with an episode that is not a trajectory or does not fit: "raise", or
            "skip" it, which the report counts. A data set of rlio takes all rows.
        options: Options of the format.
        read_options: Keywords of the reader of ``src``.
        storage_options: For the filesystem of ``src``.
        into_storage_options: For the filesystem of ``dst``.
        progress: Called after each episode with the rows and the episodes that were read. If it has a method
            ``begin``, that is called before each pass with its name, "convert" or "prove", and all rows that
            will be read; None: not known.
        isolated: True or an `Isolation`: do it in a process of its own, with bounds on memory, processor time
            and open files. A library that crashes there, or exceeds a bound, is an error here. ``src`` is a
            path, URI or glob, or a list of those. Linux only.

    Returns:
        A report of what was read, written and found. A data set of rlio also stores it in the provenance of
        the last shard.

    Raises:
        OptionError: An option is illegal, ``dst`` holds something else, or another conversion writes into it
            (which is found out where ``dst`` is a local folder).
        DataNotFound: ``src`` has no data.
        SchemaError: An episode is not a trajectory, or the format cannot hold it.
        CorruptData: ``src`` is damaged; or ``prove`` found a difference, which the message names; or the
            isolated process died. (UnsafeData: it exceeded a bound.)
    """
    given: dict[str, Any] = {
        "src": src,
        "dst": dst,
        "to": to,
        "mapping": mapping,
        "spaces": spaces,
        "policy": policy,
        "prove": prove,
        "final_obs": final_obs,
        "on_error": on_error,
        "options": options,
        "read_options": read_options,
        "storage_options": storage_options,
        "into_storage_options": into_storage_options,
    }
    if isinstance(isolated, Isolation):
        return _isolated(given, isolated, progress)
    if check_flag("isolated", isolated):
        return _isolated(given, Isolation(), progress)
    return _convert(**given, progress=progress)


def _isolated(given: Mapping[str, Any], bounds: Isolation, progress: Progress | None) -> ImportReport:
    """`_convert` in a process of its own."""
    src = given["src"]
    values = [src] if isinstance(src, (str, os.PathLike)) else src
    for value in [*(values if isinstance(values, list | tuple) else [values]), given["dst"]]:
        if not isinstance(value, (str, os.PathLike)) or os.fspath(value).startswith("memory:"):
            raise OptionError(
                f"isolated= reads and writes files in another process, found {excerpt(value)}, expected "
                "paths or URIs that it can open"
            )
    found = call_isolated(
        _convert_and_tell,
        {**given, "tells": progress is not None},
        bounds,
        uri=excerpt(src if len(values) > 1 else os.fspath(values[0]))[1:-1],
        hear=partial(_hear, progress),
    )
    return ImportReport.from_json(found)


def _convert_and_tell(*, tells: bool, tell: Callable[..., None], **given: Any) -> dict[str, Any]:
    """`_convert` in the isolated process; the report in JSON."""
    return _convert(**given, progress=_Telling(tell) if tells else None).to_json()


class _Telling:
    """Progress that is told to the process that called."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell

    def begin(self, name: str, total: int | None) -> None:
        self._tell("begin", name, total)

    def __call__(self, rows: int, episodes: int) -> None:
        self._tell("rows", rows, episodes)


def _hear(progress: Progress | None, kind: str, *values: Any) -> None:
    """Pass progress on."""
    call = progress if kind == "rows" else getattr(progress, "begin", None)
    if call is not None:
        call(*values)


def _convert(
    src: Any,
    dst: StrPath,
    *,
    to: str | None,
    mapping: ColumnMapping | None,
    spaces: Spaces | None,
    policy: str | None,
    prove: bool,
    final_obs: FinalObs,
    on_error: Literal["raise", "skip"],
    options: Mapping[str, Any] | None,
    read_options: Mapping[str, Any] | None,
    storage_options: Mapping[str, Any] | None,
    into_storage_options: Mapping[str, Any] | None,
    progress: Progress | None,
) -> ImportReport:
    """See `convert`."""
    check_choice("on_error", on_error, ("raise", "skip"))
    check_choice("final_obs", final_obs, ("error", "repeat", "drop-step"))
    format = _format(to)
    if prove and format is not None and not format.is_read:
        raise OptionError(f"prove=True: rlio does not read {format.title}")
    with open_episodes(
        src,
        policy=policy,
        keeps_batches=format is None,
        keeps_pictures=True,
        read_options=_with_options(read_options, mapping=mapping, spaces=spaces),
        storage_options=storage_options,
    ) as source:
        storage = Storage.open(dst, storage_options=into_storage_options)
        if f"{storage.uri.rstrip('/')}/".startswith(f"{source.uri.rstrip('/')}/"):
            # What is written would be read as a part of the source, by the proof and by a later call.
            raise OptionError("the target is the source, or lies in it: name another place", uri=storage.uri)
        with nullcontext() if _is_one_file(format) else hold_folder(storage):
            opens = partial(
                _open_target,
                source,
                dst,
                format,
                dict(options or {}),
                into_storage_options,
                on_error,
                final_obs,
            )
            target = opens()
            try:
                report, handed = _copy(source, target, format, progress, prove=prove)
            except BeginAgain:  # The folder has rows already in a layout that cannot go on.
                target = opens(declares_final=True)
                report, handed = _copy(source, target, format, progress, prove=prove)
            if handed is not None:
                _prove(source, dst, format, into_storage_options, target.decisions, handed, progress)
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
    *,
    prove: bool,
) -> tuple[ImportReport, list[Digests] | RowDigests | None]:
    """Write all episodes into the target, and close it.

    Returns:
        The report; and what was handed to the target, for the proof.
    """
    inspector = Inspector(source.parts[0].origin.spaces)
    handed: list[Digests] = []
    all_rows = RowDigests()
    if begin := getattr(progress, "begin", None):
        begin("convert", source.rows)
    try:
        target.begin(inspector)
        for number, (part, rows) in enumerate(source):
            if source.joint:
                inspector.add_batch(rows, place=f"batch {number}")
                if prove:
                    all_rows.add(rows)
            else:
                assert isinstance(rows, SampleBatch)
                place = _place(number, rows)
                inspector.add(rows, place=place)
                if (sorted_rows := in_order(rows)) is not rows:
                    inspector.note("sorted", first=place)
                    rows = sorted_rows
            digests = target.write(part, rows, inspector, number)
            if prove and not source.joint and digests is not None:
                handed.append(digests())
            if progress is not None:
                progress(inspector.rows, inspector.episodes)
        for note in source.notes:
            inspector.note("note", text=note)
        for column in source.left_out:
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
    return report, None if not prove else all_rows if source.joint else handed


def _prove(
    source: Episodes,
    dst: StrPath,
    format: Format | None,
    storage_options: Mapping[str, Any] | None,
    decisions: Decisions | None,
    handed: list[Digests] | RowDigests,
    progress: Progress | None,
) -> None:
    """Read both sides again; see `rlio.conversion.proof`."""

    def opened(columns: list[str] | None = None) -> Episodes:
        return open_episodes(
            dst,
            keeps_batches=format is None,
            keeps_pictures=True,
            layout="whole" if format is not None or source.layout == "whole" else "runs",
            read_options=None if columns is None else {"columns": columns},
            storage_options=storage_options,
        )

    if begin := getattr(progress, "begin", None):
        sides = 2 if isinstance(handed, RowDigests) else 1
        begin("prove", None if source.rows is None else sides * source.rows)
    with ExitStack() as stack:
        written = stack.enter_context(opened())
        if isinstance(handed, RowDigests):
            prove_joint(source, written, handed, progress)
            return
        # Some columns are read only if they are named.
        named = {name for digests in handed[:1] for name in digests} if decisions is not None else set()
        if decisions is not None and (more := named & decisions.holds.named - written.columns):
            written = stack.enter_context(opened([*written.columns, *more]))
        prove_episodes(source, written, handed, decisions, progress)


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


# ---- targets ----


def _open_target(
    source: Episodes,
    dst: StrPath,
    format: Format | None,
    options: dict[str, Any],
    storage_options: Mapping[str, Any] | None,
    on_error: str,
    final_obs: FinalObs,
    *,
    declares_final: bool | None = None,
) -> _DatasetTarget | _SinkTarget:
    if format is None:
        refuse_unknown(options, ("pictures",), of="a data set of rlio")
        return _DatasetTarget(
            Storage.open(dst, storage_options=storage_options), source, dst, storage_options, **options
        )
    assert format.writer is not None
    sink = load(format.writer)
    names = [name for name in option_names(sink) or () if name not in ("storage", "origin", "self")]
    if "final_obs" in options:
        raise OptionError(
            "options={'final_obs': ...}: pass final_obs= to rlio.convert, --final-obs to rlio convert"
        )
    text = os.fspath(dst)
    if "file" in names and "file" not in options and text.lower().endswith(format.marks.endings):
        folder, slash, options["file"] = text.rpartition("/")
        dst = folder + slash if slash else "."
    refuse_unknown(options, names, of=f"the format {format.name}")
    storage = Storage.open(dst, storage_options=storage_options)
    return _SinkTarget(
        storage, source, sink, format, options, on_error, final_obs, declares_final=declares_final
    )


def _same_but_content(found: str, about: Mapping[str, Any]) -> bool:
    """Whether the JSON of a marker is that of ``about``, but for the content of the source."""
    try:
        known = json.loads(found)
    except ValueError:
        return False
    wished = json.loads(json.dumps(about, default=str))
    return isinstance(known, dict) and {**known, "content": ""} == {**wished, "content": ""}


def _has_files(storage: Storage, *, besides: str | None = None) -> bool:
    """Whether there is more than what an interrupted `Storage.put` leaves, and the file ``besides``."""
    names = (name for name, _ in storage.children("", most=100))
    return any(not name.startswith(".") and name not in (TMP_DIR, besides) for name in names)


def _check_empty(storage: Storage) -> None:
    if _has_files(storage):
        raise OptionError("found other files, expected an empty folder: name another", uri=storage.uri)


def _codecs(batch: Batch) -> dict[tuple[Any, ...], str]:
    """How the encoded pictures of each column are encoded."""
    return {
        (policy, name, *path): leaf[0].codec
        for policy, rows in batch.policies().items()
        for name, column in rows.items()
        for path, leaf in leaves(column)
        if is_encoded(leaf)
    }


def _videos_of(batch: Batch) -> Iterator[tuple[str, EncodedPicture, int]]:
    """The columns of frames of videos, ``new_obs`` as ``obs``: its name, first frame, and rows."""
    for rows in batch.policies().values():
        for name, column in rows.items():
            own = Columns.OBS if name == Columns.NEXT_OBS else name
            for path, leaf in leaves(column):
                if is_encoded(leaf) and leaf[0].codec == "video":
                    yield leaf_name(own, path), leaf[0], len(leaf)


class _DatasetTarget:
    """A data set of rlio.

    The ids of its writers identify the source of the rows. A shard is stored once it has 128 MiB of whole
    episodes. So a process that died has stored whole episodes, and the number of rows shows which ones.
    """

    #: It holds everything.
    decisions: Decisions | None = None

    def __init__(
        self,
        storage: Storage,
        source: Episodes,
        root: StrPath,
        storage_options: Mapping[str, Any] | None,
        *,
        pictures: Literal["keep", "frames"] | Mapping[str, Literal["png"]] = "keep",
    ) -> None:
        if isinstance(pictures, str):
            check_choice("options={'pictures': ...}", pictures, ("keep", "frames"))
        self._as_frames = pictures == "frames"
        self._pictures = None if isinstance(pictures, str) else checked_pictures(pictures)
        self.uri = storage.uri
        self.written = 0
        self._root, self._options = root, dict(storage_options) if storage_options is not None else None
        self._source = source
        self._prefix = f"convert-{source.identity}-{source.content}-"
        #: Rows that an earlier call has stored and that are still to be passed over.
        self._stored, self._number = self._begin(storage)
        self._passed = 0
        self._writer: ParquetWriter | None = None
        self._open_for = (0, 0)
        self._codecs: dict[tuple[Any, ...], str] = {}
        self._pending: list[Batch] = []
        self._pending_part = 0
        self._bytes = 0

    def begin(self, inspector: Inspector) -> None:
        """Nothing of the source is left out."""

    def _begin(self, storage: Storage) -> tuple[int, int]:
        """Rows that are stored, and the number of the next writer."""
        if not storage.exists(HEADER):
            _check_empty(storage)
            return 0, 0
        read_header(storage)
        names = storage.folders(DATA_DIR)
        others = [name for name in names if not name.startswith(self._prefix)]
        if others and all(name.startswith(f"convert-{self._source.identity}-") for name in others):
            raise OptionError(
                "found rows of another version of the source, which has changed since they were converted: "
                "remove this folder, or name another",
                uri=storage.uri,
            )
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

    def write(self, part: int, rows: Batch, inspector: Inspector, number: int) -> DigestsOf | None:
        """Add rows; gives what makes their digests."""
        if self._as_frames:
            rows = decode_batch(rows)
        elif self._pictures:
            chosen = {id(first) for name, first, _ in _videos_of(rows) if name in self._pictures}
            rows = decode_batch(rows, keep=lambda picture: id(picture) not in chosen)
        self._add(part, rows)
        return partial(digests_of_rows, rows) if isinstance(rows, SampleBatch) else None

    def _add(self, part: int, rows: Batch) -> None:
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
        # A shard of frames of videos is small, but has the footer of as many row groups as one of frames.
        shown = sum(rows_of * first.nbytes for _, first, rows_of in _videos_of(rows))
        self._bytes += rows.size_bytes() + shown // _VIDEO_SHARE
        self.written += count

    def _store(self, report: ImportReport | None = None) -> None:
        """Store what is pending as one shard."""
        # One long episode may be larger than what a shard usually holds.
        room = max(_MAX_ENCODED, 2 * self._bytes)
        if self._open_for != (self._pending_part, room) or report is not None:
            self._close_writer()
        for batch in self._pending:
            if (codecs := _codecs(batch)) != self._codecs:  # One writer has one codec a column.
                self._close_writer()
                self._codecs = codecs
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
            pictures=self._pictures,
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
        format: Format,
        options: dict[str, Any],
        on_error: str,
        final_obs: FinalObs,
        *,
        declares_final: bool | None,
    ) -> None:
        self.written = self._good = 0
        self._skips = on_error == "skip"
        name = options.get("file")
        self.uri = storage.uri if name is None else storage.uri_of(name)
        self._storage, self._has_marker = storage, name is None
        about = {"source": source.uri, "identity": source.identity, "final_obs": final_obs, **options}
        self._begin(name, {**about, "content": source.content})
        origin = source.parts[0].origin
        #: (kind, text) of what was found before there was a report.
        self._found: list[dict[str, Any]] = []
        try:
            known = origin_for(
                format.holds, origin, lambda kind, text: self._found.append({"kind": kind, "text": text})
            )
            self._sink: EpisodeSink = sink(storage, known, **options)
        except BaseException:
            self.abort()
            raise
        self._holds: Holds = getattr(self._sink, "holds", format.holds)
        self._preparer = Preparer(
            format.name,
            self._holds,
            final_obs=final_obs,
            spaces=origin.spaces,
            takes=getattr(self._sink, "takes", None),
            declares_final=declares_final,
        )
        self.decisions: Decisions = self._preparer.decisions

    def begin(self, inspector: Inspector) -> None:
        """Report what was left out of what is known of the data."""
        for finding in self._found:
            inspector.note(**finding)

    def _begin(self, name: str | None, about: dict[str, Any]) -> None:
        """Refuse what holds something else."""
        storage, identity = self._storage, json.dumps(about, default=str)
        if name is not None:
            if storage.exists(name):
                raise OptionError("found a file there, expected none: name another", uri=self.uri)
            return
        if storage.exists(MARKER):
            found = storage.read(MARKER, limit=1 << 20).decode()
            if found != identity and _same_but_content(found, about):
                raise OptionError(
                    "found an unfinished conversion of another version of the source, which has changed "
                    "since: remove this folder, or name another",
                    uri=self.uri,
                )
            if found != identity:
                raise OptionError(
                    f"found an unfinished conversion of something else, or with other options "
                    f"({excerpt(found)}): remove it, or name another folder",
                    uri=self.uri,
                )
            return
        _check_empty(storage)
        storage.put(MARKER, identity.encode())

    def write(self, part: int, rows: Batch, inspector: Inspector, number: int) -> DigestsOf | None:
        """Add an episode; gives what makes its digests, None if nothing was written."""
        assert isinstance(rows, SampleBatch)
        place = _place(number, rows)
        try:
            episode = self._preparer.prepare(rows, number, place, inspector.note)
        except SchemaError as error:
            if not self._skips:
                what = str(error).removesuffix(f" [column {error.column}]")
                hint = "" if isinstance(error, MissingColumn) else "; or pass on_error='skip'"
                raise type(error)(f"{place}: {what}{hint}", column=error.column) from error
            inspector.note("refused", first=place)
            self.decisions.refused.add(number)
            return None
        if episode is None:
            return None
        if self._good >= self._sink.episodes:
            self._sink.write(episode)
            self.written += len(episode)
        self._good += 1  # An earlier call may have stored it.
        return partial(digests_of_episode, episode, self._holds)

    def close(self, report: ImportReport) -> None:
        self._sink.close()
        if self._has_marker:
            self._storage.remove_folder(TMP_DIR)
            self._storage.remove(MARKER)

    def abort(self) -> None:
        sink = getattr(self, "_sink", None)
        if sink is not None:
            sink.abort()
        try:
            if self._has_marker:
                self._storage.remove_folder(TMP_DIR)
            if self._has_marker and not _has_files(self._storage, besides=MARKER):
                # Nothing is stored, so another call may have other options.
                self._storage.remove(MARKER)
        except RlioError as error:  # What is aborted has raised already.
            logger.warning("removing %s failed: %r", MARKER, error)
