"""Episodes of anything that `rlio.read` opens, one after the other, in bounded memory.

Rows of an episode need not be adjacent: recordings of several environments alternate between them. An episode
that has not ended waits until it ends, or until the rows of its writer end.

Not here: where the episodes go (`rlio.conversion.convert`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, Self, TypeAlias

import numpy as np

from rlio.batch import Batch, MultiAgentBatch, SampleBatch, concat_samples
from rlio.batch.arrays import is_table, refuse_columns, to_numpy
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns, is_per_sequence
from rlio.catalog.names import HEADER
from rlio.conversion.report import ends_of
from rlio.errors import OptionError, SchemaError, excerpt
from rlio.formats.format import formats
from rlio.formats.sink import Origin
from rlio.opening import OtherFiles
from rlio.query.derived_columns import EPISODE_COLUMNS
from rlio.query.filters import RowFilter
from rlio.readers.dataset_reader import DatasetReader
from rlio.readers.episode_reader import EpisodeReader
from rlio.resolve import read
from rlio.schemas.folded import unfold
from rlio.schemas.schema import Schema
from rlio.source.joined import JoinedRoots
from rlio.source.snapshot import DatasetSnapshot
from rlio.source.source import Source
from rlio.storage.filesystem import Storage
from rlio.storage.paths import is_uri, mask_secrets
from rlio.support.calls import closing_on_error
from rlio.support.spaces import Spaces, pair_of

__all__ = ["EpisodeCutter", "Episodes", "Part", "StoredEpisodes", "episode_key", "open_episodes"]

#: How the rows of episodes lie: "whole", one episode after the other with nothing between; "runs", likewise,
#: and a row with an end is the last of its episode; "mixed", rows of several episodes alternate.
Layout: TypeAlias = Literal["whole", "runs", "mixed"]

# Keywords of readers that would change the order of rows, or that this module sets; and those that readers of
# data sets get.
_REFUSED = frozenset(
    ("epochs", "shuffle", "seed", "shard", "batch_size", "drop_last", "cache", "policy", "draw")
)
_OF_DATASETS = frozenset(("columns", "missing", "on_error", "filter", "split"))
_OPENING = frozenset(("at", "storage_options", "limits"))
# Keywords of other readers that choose rows or columns, or what is done with damage.
_CHOOSING = frozenset(("columns", "missing", "on_error", "filter", "split", "derive", "normalise"))

_KEYS = (Columns.EPS_ID, Columns.AGENT_INDEX, "agent_id", Columns.ENV_ID, "_writer")
# Rows of episodes that have not ended, and their bytes: where more wait, the oldest episode is given as is.
_WAITING_ROWS = 2_000_000
_WAITING_BYTES = 1 << 30


def episode_key(batch: SampleBatch) -> tuple[Any, ...]:
    """What tells the episode of the first row from others, as far as the columns know."""
    return tuple(to_numpy(batch[name][:1]).item() for name in _KEYS if name in batch)


class EpisodeCutter:
    """Cuts batches into episodes.

    Args:
        layout: How the rows are ordered.

    Attributes:
        given_up: Episodes that were returned unfinished because too many rows waited.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._waiting: dict[tuple[Any, ...], list[SampleBatch]] = {}
        self._rows = self._bytes = 0
        self.given_up: int = 0

    def add(self, batch: SampleBatch) -> Iterator[SampleBatch]:
        """Take rows; return the episodes that are now complete, each in the order of its rows."""
        keys = [to_numpy(batch[name]) for name in _KEYS if name in batch]
        ends = ends_of(batch)
        new = np.zeros(len(batch), np.bool_)
        new[:1] = True
        for values in keys:
            new[1:] |= values[1:] != values[:-1]
        if self._layout != "whole":
            new[1:] |= ends[:-1]
        starts = np.flatnonzero(new).tolist()
        for start, stop in zip(starts, [*starts[1:], len(batch)], strict=True):
            key = tuple(values.item(start) for values in keys)
            if self._layout != "mixed" and self._waiting and key not in self._waiting:
                yield from self.finish()
            part = batch[start:stop]
            if self._layout != "whole" and ends[stop - 1]:
                yield self._joined(key, part)
            else:
                self._wait(key, part if stop - start == len(batch) else part.copy())
        while self._rows > _WAITING_ROWS or self._bytes > _WAITING_BYTES:
            if len(self._waiting) < 2:
                break  # One long episode.
            self.given_up += 1
            yield self._joined(next(iter(self._waiting)))

    def finish(self) -> Iterator[SampleBatch]:
        """The episodes that have not ended, in the order of their first rows."""
        for key in [*self._waiting]:
            yield self._joined(key)

    def _wait(self, key: tuple[Any, ...], part: SampleBatch) -> None:
        self._waiting.setdefault(key, []).append(part)
        self._rows += len(part)
        self._bytes += part.size_bytes()

    def _joined(self, key: tuple[Any, ...], last: SampleBatch | None = None) -> SampleBatch:
        parts = self._waiting.pop(key, [])
        self._rows -= sum(map(len, parts))
        self._bytes -= sum(part.size_bytes() for part in parts)
        if last is not None:
            parts = [*parts, last]
        return parts[0] if len(parts) == 1 else concat_samples(parts)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows with one origin: those of one writer of a data set of rlio, or all rows of another source.

    Attributes:
        origin: What is known of the rows.
        spaces: Policy id -> (observation space, action space).
        provenance: Fields of `rlio.schemas.Provenance`; of a data set of rlio.
    """

    origin: Origin
    spaces: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)


class Episodes:
    """An opened source, to be closed. Each iteration reads it again, and gives (part, rows of one episode).

    Episodes of several agents, and of rows in sequences, cannot be separated: if `joint`, an iteration gives
    batches unchanged.

    Attributes:
        uri: Where it is.
        format: Name of its format; "rlio" for a data set of rlio.
        identity: Hex digits that tell which data it is: its place, and the options that choose rows.
        content: Hex digits that change with the content of the data.
        parts: Parts of the rows, in order.
        layout: How the rows lie.
        joint: Whether batches are given as they are.
        columns: Columns of the first rows.
        notes: What the source says of its data, each a sentence.
        rows: All rows that an iteration gives; None: known only by reading.
        left_out: Columns that are not given.
    """

    def __init__(
        self,
        *,
        uri: str,
        format: str,
        identity: object,
        content: str,
        parts: Sequence[Part],
        layout: Layout,
        notes: Sequence[str] = (),
    ) -> None:
        self.uri: str = uri
        self.format: str = format
        self.identity: str = _digest([uri, identity])
        self.content: str = _digest(content)
        self.parts: list[Part] = list(parts)
        self.layout: Layout = layout
        self.notes: list[str] = list(notes)
        self.joint = False
        self.rows: int | None = None
        self.left_out: dict[str, None] = {}
        self.columns: frozenset[str] = frozenset()
        # The first rows, and those after them, which the first iteration goes on with.
        self._begun: tuple[tuple[int, Batch], Iterator[tuple[int, Batch]]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the iteration that was begun: another process begins its own."""
        return {**self.__dict__, "_begun": None}

    def _batches(self) -> Iterator[tuple[int, Batch]]:
        """(index of the part, rows), in order."""
        raise NotImplementedError  # A hook: each kind of source has its own.

    def of_part(self, number: int) -> Iterator[tuple[int, Batch]]:
        """As an iteration, of one part alone, so that several processes share the parts.

        Args:
            number: Index of the part.
        """
        return self._cut(self._batches_of(number))

    def _batches_of(self, number: int) -> Iterator[tuple[int, Batch]]:
        """`_batches` of one part."""
        if len(self.parts) > 1:
            raise NotImplementedError  # A hook: a source of several parts has its own.
        return self._batches()

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        if self._begun is None:
            return self._cut(self._batches())
        (first, others), self._begun = self._begun, None
        return self._cut(chain([first], others))

    def first(self) -> Batch | None:
        """The first rows, before an iteration; None: there are none."""
        batches = self._batches()
        first = next(batches, None)
        if first is None:
            return None
        self._begun = first, batches
        return first[1]

    def decoded(self) -> Iterator[tuple[int, Batch]]:
        """As an iteration, for a proof: by the groups of the `Source`, if no option chooses rows."""
        return self._cut(self._decoded())

    def _decoded(self) -> Iterator[tuple[int, Batch]]:
        """`_batches`, without the engine of readers."""
        return self._batches()

    def close(self) -> None:
        """Close the files."""
        if self._begun is not None:
            close = getattr(self._begun[1], "close", None)
            self._begun = None
            if close is not None:
                close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cut(self, batches: Iterator[tuple[int, Batch]]) -> Iterator[tuple[int, Batch]]:
        cutter, part = EpisodeCutter(self.layout), 0
        for number, batch in batches:
            if self.joint:
                yield number, batch
                continue
            assert isinstance(batch, SampleBatch)
            if number != part:
                yield from ((part, rows) for rows in cutter.finish())
                part = number
            yield from ((part, rows) for rows in cutter.add(self._steps(batch)))
        yield from ((part, rows) for rows in cutter.finish())
        if cutter.given_up:
            self._note(
                f"{cutter.given_up} episodes were taken as they were, without an end, because too many rows "
                "waited for theirs: more steps of them may come later as further episodes."
            )

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _note_skipped(self, reader: Any, what: str) -> None:
        if reader.skipped:
            self._note(f"{reader.skipped} {what} that are damaged were left out of {self.uri}.")

    def _steps(self, batch: SampleBatch) -> SampleBatch:
        """Without columns of sequences, which episodes have not."""
        dropped = [name for name in batch if is_per_sequence(name)]
        if not dropped:
            return batch
        self.left_out.update(dict.fromkeys(dropped))
        return SampleBatch({name: column for name, column in batch.items() if name not in dropped})


class StoredEpisodes(Episodes):
    """Of a data set of rlio, one writer after the other.

    Attributes:
        dataset: The data set.
        policy: The policy whose rows are read, if there are several.
        options: Keywords of `rlio.DatasetReader` that say what is read.
        needs_store: Whether the filter needs whole episodes: ``episode_return >= 100``.
        writers: The writer of each part.
    """

    def __init__(
        self,
        dataset: DatasetSnapshot,
        policy: str | None,
        layout: Layout,
        options: Mapping[str, Any],
        spaces: Spaces | None = None,
        *,
        keeps_pictures: bool = False,
    ) -> None:
        self.dataset: DatasetSnapshot = dataset
        self.policy: str | None = policy
        self.options: dict[str, Any] = {
            name: value for name, value in options.items() if name in _OF_DATASETS
        }
        self.needs_store: bool = False
        if options.get("filter") is not None:
            # By its name, and not by the address of a function: the identity holds it.
            rows = self.options["filter"] = RowFilter.of_option(options["filter"])
            if rows.quantiles:
                raise OptionError(
                    f"filter={excerpt(rows.text)}: a quantile needs the episodes of all writers, but a "
                    "conversion reads one writer after the other; pass the value instead of quantile(...)"
                )
            known = {name for names in dataset.columns.values() for name in names}
            if {*EPISODE_COLUMNS} & {*(rows.columns or ())} - known:
                self.needs_store = True
        self._keeps_pictures = (
            keeps_pictures and not self.needs_store and _may_keep(self.options, dataset.schemas.values())
        )
        self.writers: list[str] = list(dataset.snapshot())
        self._snapshots = [{writer: rows} for writer, rows in dataset.snapshot().items()]
        parts = []
        stated = dataset.policy_spaces
        if spaces is not None:
            pids = [pid for names in dataset.schemas.values() for pid in names.policies]
            pid = policy or next(iter(pids), DEFAULT_POLICY_ID)
            pair = pair_of(spaces, next(iter(stated.values()), None), uri=dataset.uri)
            stated = {pid: pair} if pair is not None else {}
        chosen = {pid: pair for pid, pair in stated.items() if policy in (None, pid)}
        for at in self._snapshots:
            provenance = dict(dataset.open_shard(dataset.part(at).segments[0]).provenance)
            provenance.pop("versions", None)
            env = provenance.get("env")
            own = {name: value for name, value in provenance.items() if name not in ("env", "extra")}
            origin = Origin(
                uri=dataset.uri,
                spaces=next(iter(chosen.values())) if len(chosen) == 1 else None,
                env=env if isinstance(env, str) else None,
                extra={**provenance.get("extra", {}), **own},
            )
            parts.append(Part(origin=origin, spaces=chosen, provenance=provenance))
        super().__init__(
            uri=dataset.uri,
            format="rlio",
            identity=[dataset.snapshot(), policy, self.options],
            content=dataset.content_identity,
            parts=parts,
            layout=layout,
        )
        if policy is None and not {"filter", "split"} & self.options.keys():
            self.rows: int | None = len(dataset)

    def _batches(self) -> Iterator[tuple[int, Batch]]:
        for number in range(len(self._snapshots)):
            yield from self._batches_of(number)

    def _batches_of(self, number: int) -> Iterator[tuple[int, Batch]]:
        part = self._part(self._snapshots[number])
        # Only what needs a store takes its room.
        cache: Literal["auto", "none"] = "auto" if self.needs_store else "none"
        with DatasetReader(part, epochs=1, cache=cache, **self.options) as reader:
            yield from ((number, rows) for batch in reader for rows in _of(batch, self.policy))
            self._note_skipped(reader, "rows")

    def _part(self, at: Mapping[str, Any]) -> DatasetSnapshot:
        part = self.dataset.part(at)
        part.keeps_pictures = self._keeps_pictures
        return part

    def _decoded(self) -> Iterator[tuple[int, Batch]]:
        if self.options:
            yield from self._batches()
            return
        for number, at in enumerate(self._snapshots):
            for batch in _groups_of(self._part(at)):
                yield from ((number, rows) for rows in _of(batch, self.policy))


class _ReadEpisodes(Episodes):
    """Of a reader of another library's files, which begins again for each iteration."""

    def __init__(
        self,
        src: Any,
        reader: Any,
        options: Mapping[str, Any],
        policy: str | None,
        *,
        keeps_pictures: bool,
    ) -> None:
        stored: Source | None = getattr(reader, "stored_source", None)
        if stored is not None and keeps_pictures:
            stored.keeps_pictures = _may_keep(options, stored.schemas.values())
        self._reader, self._options, self._policy = reader, options, policy
        self._start = reader.state_dict()
        source = getattr(reader, "source", None)
        uri = _text(src)
        origin = getattr(source, "origin", None) or Origin(uri=uri)
        spaces = getattr(reader, "spaces", None)
        if isinstance(src, EpisodeReader):
            spaces = pair_of(options.get("spaces"), spaces, uri=uri)
        if origin.spaces is None:
            spaces = spaces or options.get("spaces")
            if isinstance(spaces, Mapping):
                spaces = spaces.get(policy or DEFAULT_POLICY_ID)
            origin = replace(origin, spaces=spaces if isinstance(spaces, tuple) else None)
        policies = {policy or DEFAULT_POLICY_ID: origin.spaces} if origin.spaces is not None else {}
        whole = isinstance(reader, EpisodeReader)
        super().__init__(
            uri=uri,
            format=reader.format.name if whole else _format_of(reader),
            identity=[self._start, policy],
            content=getattr(reader, "content_identity", ""),
            parts=[Part(origin=origin, spaces=policies)],
            layout="whole" if whole else "mixed",
        )
        self.rows = len(reader) if whole else None

    def _batches(self) -> Iterator[tuple[int, Batch]]:
        self._reader.load_state_dict(self._start)
        yield from ((0, rows) for batch in self._reader for rows in _of(batch, self._policy))
        self._note_skipped(self._reader, "records")
        for note in _notes_of(self._reader):
            self._note(note)
        self.left_out.update(dict.fromkeys(getattr(_layout_of(self._reader), "left_out", ())))

    def _decoded(self) -> Iterator[tuple[int, Batch]]:
        source = None if _CHOOSING & self._options.keys() else getattr(self._reader, "stored_source", None)
        if source is None:
            yield from self._batches()
            return
        for batch in _groups_of(source):
            yield from ((0, rows) for rows in _of(batch, self._policy))

    def close(self) -> None:
        """Close the files."""
        super().close()
        self._reader.close()


def _may_keep(options: Mapping[str, Any], schemas: Iterable[Schema]) -> bool:
    """Whether no option of the reader needs the values of pictures, or a store, which holds values."""
    if {"derive", "normalise"} & options.keys() or "fill" in (options.get("missing"), options.get("columns")):
        return False
    if options.get("filter") is None:
        return True
    chosen = RowFilter.of_option(options["filter"])
    if chosen.quantiles or {*EPISODE_COLUMNS} & {*(chosen.columns or ())}:
        return False
    return not any(
        chosen.columns is None or leaf.column in chosen.columns
        for schema in schemas
        for policy in schema.policies.values()
        for leaf in policy.leaves
        if leaf.spec.kind == "picture"
    )


def _groups_of(source: Source) -> Iterator[Batch]:
    """All rows of a source, in order, one group at a time."""
    for segment, opened in source.opened_in_turn(source.segments):
        start = 0
        for index, count in enumerate(opened.rows):
            first, stop = max(segment.skip - start, 0), min(segment.skip + segment.rows - start, count)
            start += count
            if first < stop:
                live = None if (first, stop) == (0, count) else range(first, stop)
                yield unfold([opened.read_folded(index, rows=live)])


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, default=str, sort_keys=True).encode(), digest_size=6).hexdigest()


def _as_taken(src: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options that a reader of ``src`` takes: an open one, and data sets of rlio, take no spaces."""
    if "spaces" not in options:
        return options
    is_path = isinstance(src, (str, os.PathLike))
    if not isinstance(src, EpisodeReader) and not (
        is_path and Storage.open(src, storage_options=options.get("storage_options")).exists(HEADER)
    ):
        return options
    return {name: value for name, value in options.items() if name != "spaces"}


def _opened(src: Any, options: Mapping[str, Any]) -> Any:
    """A reader of all rows."""
    if not isinstance(src, EpisodeReader):
        return read(src, epochs=1, **options)
    if options:
        raise OptionError(f"{excerpt(list(options))} have no effect: the source is a reader")
    return src.again(epochs=1)


def _notes_of(reader: Any) -> Sequence[str]:
    """What a source of episodes, or a reader without one, says of its data."""
    found: Sequence[str] = getattr(_layout_of(reader), "notes", ())
    return found


def _layout_of(reader: Any) -> Any:
    """The source of episodes; a reader without one."""
    return getattr(reader, "source", reader)


def _of(batch: Batch, policy: str | None) -> list[Batch]:
    """The rows of a policy, if it is one of several; else all."""
    if policy is None or not isinstance(batch, MultiAgentBatch):
        return [batch]
    return [batch[policy]] if policy in batch else []


def open_episodes(
    src: Any,
    *,
    policy: str | None = None,
    keeps_batches: bool = False,
    keeps_pictures: bool = False,
    layout: Layout | None = None,
    read_options: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Episodes:
    """Open data for reading by episode.

    Args:
        src: A path, URI or glob, or a list of those; an open `Dataset`; a table in memory; or an
            `EpisodeReader`.
        policy: The policy whose rows to read, if there are several.
        keeps_batches: Whether rows of several policies, or in sequences, may come as they are (`joint`).
        keeps_pictures: Whether pictures that are stored as PNG or JPEG stay so, unless an option needs their
            values (`rlio.batch.encoded_picture`).
        layout: How the rows lie; None: as the source has them.
        read_options: Keywords of the reader.
        storage_options: For the filesystem.

    Raises:
        OptionError: ``src`` is something else, or has several policies and ``policy`` names none of them.
        DataNotFound: Nothing is there.
    """
    options = {**(read_options or {})}
    if isinstance(src, OtherFiles):
        src, options = src.inputs, {**src.options, **options}
    if refused := sorted(_REFUSED & options.keys()):
        raise OptionError(f"read_options: a conversion reads all rows once, in order; leave out {refused}")
    if isinstance(src, DatasetSnapshot):
        dataset, taken = src, _OF_DATASETS
    else:
        is_one = isinstance(src, (str, os.PathLike, EpisodeReader)) or is_table(src)
        paths = src if isinstance(src, Sequence) and not is_one else ()
        if not is_one and not (paths and all(isinstance(one, (str, os.PathLike)) for one in paths)):
            refuse_columns(src)
            raise OptionError(
                f"found {excerpt(src)}, expected a path, a list of paths, a Dataset, a table "
                "or an EpisodeReader"
            )
        if storage_options is not None:
            options["storage_options"] = storage_options
        reader = _opened(src, _as_taken(src, options))
        with closing_on_error(reader):
            if not isinstance(reader, DatasetReader) or isinstance(reader.dataset, JoinedRoots):
                found = _ReadEpisodes(src, reader, options, policy, keeps_pictures=keeps_pictures)
                found.layout = layout or found.layout
                return _checked(found, policy, keeps_batches=keeps_batches)
        reader.close()
        dataset, taken = reader.dataset, _OF_DATASETS | _OPENING
    spaces = options.pop("spaces", None)
    if unknown := sorted(options.keys() - taken):
        raise OptionError(
            f"read_options: found {unknown}; of a data set of rlio, expected some of {sorted(taken)}",
            uri=dataset.uri,
        )
    several = any(schema.multi_agent for schema in dataset.schemas.values())
    pids = list(dataset.columns)
    if policy is None and several and len(pids) == 1 and not keeps_batches:
        policy = pids[0]
    if policy is not None and policy not in pids:
        raise OptionError(f"policy={excerpt(policy)}: expected one of {excerpt(pids)}", uri=dataset.uri)
    stored = StoredEpisodes(
        dataset,
        policy if several else None,
        layout or "mixed",
        options,
        spaces,
        keeps_pictures=keeps_pictures,
    )
    return _checked(stored, policy, keeps_batches=keeps_batches)


def _checked(found: Episodes, policy: str | None, *, keeps_batches: bool) -> Episodes:
    """Decide by the first rows whether they come as they are."""
    first = found.first()
    if first is None:
        raise OptionError(f"policy={excerpt(policy)}: no row belongs to that policy", uri=found.uri)
    if isinstance(first, MultiAgentBatch):
        if not keeps_batches:
            raise OptionError(
                f"found rows of the policies {excerpt(list(first))}, expected those of one: pass policy=, or "
                "convert into a data set of rlio, which holds all of them",
                uri=found.uri,
            )
        found.joint = True
        return found
    found.columns = frozenset(first)
    missing = [name for name in (Columns.OBS, Columns.ACTIONS) if name not in first]
    if missing and not keeps_batches:
        raise SchemaError("an episode needs obs and actions", uri=found.uri, column=missing[0])
    found.joint = keeps_batches and any(map(is_per_sequence, first))
    return found


def _format_of(reader: Any) -> str:
    name = type(reader).__name__
    return next((f.name for f in formats() if f.reader and f.reader.endswith(f":{name}")), name)


def _text(src: Any) -> str:
    if isinstance(src, (str, os.PathLike)):
        text = os.fspath(src)
        return mask_secrets(text) if is_uri(text) else os.path.abspath(os.path.expanduser(text))
    if isinstance(src, EpisodeReader):
        return src.source.uri
    if is_table(src):
        return f"{type(src).__module__.partition('.')[0]}.{type(src).__name__}"
    return _text(src[0]) + (f" and {len(src) - 1} more" if len(src) > 1 else "")
