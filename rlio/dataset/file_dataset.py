"""`FileDataset`: another library's files as a `rlio.Dataset` that is read only.

What is left out needs shards of rlio: it raises, and names `rlio convert`.

Not here: how the files are read (`rlio.opening.open_files`, and the sources that it opens).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

from rlio.batch.columns import DEFAULT_POLICY_ID
from rlio.dataset.dataset import Dataset
from rlio.errors import OptionError, excerpt
from rlio.formats.format import by_name
from rlio.opening import OtherFiles
from rlio.read_options import ReadOptions
from rlio.schemas.schema import Schema
from rlio.schemas.streams import Streams
from rlio.source.source import EpisodeInfo, FileSource, HoleCheck, OpenSegment, StoredSegment
from rlio.storage.parallel import Plan, Range
from rlio.support.clock import utc_time
from rlio.support.words import counted

if TYPE_CHECKING:
    import pyarrow as pa

    from rlio.look.episode_index import EpisodeIndex
    from rlio.look.info import Stored
    from rlio.look.stats import Stats

__all__ = ["FileDataset"]


class FileDataset(OtherFiles, Dataset):
    """The rows of other libraries' files, or of a table, when they were opened. Use `rlio.open_dataset`.

    Rows come in the order of the episodes. Exports and statistics open the files again, so several threads
    may call it.

    Args:
        inputs: The files, or a table in memory.
        options: Keywords of `rlio.opening.open_files`.
        source: The files, open; None: they are opened. Closed with this object.
    """

    def __init__(self, inputs: Any, options: Mapping[str, Any], source: FileSource | None = None) -> None:
        # Not that of the base: there is no listing.
        self.inputs = inputs
        self.options: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        self._source: FileSource = self.again() if source is None else source
        weakref.finalize(self, self._source.close)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.inputs, self.options)

    def _describe(self) -> Iterator[str]:
        yield repr(self.uri)
        yield counted(len(self), "row")
        yield "files of another library, read only"

    # ---- the source ----

    @property
    def uri(self) -> str:
        return self._source.uri

    @property
    def schemas(self) -> Mapping[str, Schema]:  # type: ignore[override]  # Read, not modified.
        return self._source.schemas

    @property
    def segments(self) -> Sequence[StoredSegment]:  # type: ignore[override]  # Those of files are no shards.
        return self._source.segments

    @property
    def pinned(self) -> bool:  # type: ignore[override]  # The base has an attribute, for formats' sake.
        return True

    @property
    def state_identity(self) -> str:
        return self._source.state_identity

    @property
    def sizes(self) -> Sequence[int | None]:
        """Bytes of each file that holds rows; None: unknown. (): they are in memory."""
        return self._source.sizes

    @property
    def notes(self) -> Sequence[str]:  # type: ignore[override]  # Likewise.
        """What the format says of its data."""
        return self._source.notes

    _why_no_spaces: ClassVar[str] = (
        "these files state no spaces: pass them to rlio.open_dataset(..., spaces=(observation_space, "
        "action_space)), which rlio.Mapping and rlio.convert take too"
    )

    @property
    def policy_spaces(self) -> dict[str, tuple[Any, Any]]:
        found, given = self._source.policy_spaces, self.options.get("spaces")
        if found or given is None:
            return found
        # RLlib's records read them, and do not state them.
        return dict(given) if isinstance(given, Mapping) else {DEFAULT_POLICY_ID: given}

    @property
    def hole_check(self) -> HoleCheck:
        return self._source.hole_check

    def open_segment(self, segment: StoredSegment) -> OpenSegment:  # type: ignore[override]  # No shard.
        return self._source.open_segment(segment)

    def plan(self) -> Plan | None:
        return self._source.plan()

    def ranges(
        self, segment: StoredSegment, opened: OpenSegment | None, groups: Sequence[int] | None
    ) -> Sequence[Range]:
        return self._source.ranges(segment, opened, groups)

    def stated_groups(self, segment: StoredSegment) -> list[int] | None:
        found = self._source.stated_groups(segment)
        return None if found is None else list(found)

    @property
    def stated_group_rows(self) -> int | None:  # type: ignore[override]  # The base has an attribute.
        return self._source.stated_group_rows

    def streams(self, opened: OpenSegment, segment: StoredSegment) -> Streams:
        return self._source.streams(opened, segment)

    def uri_of(self, path: str) -> str:
        return self._source.uri_of(path)

    def listed_again(self) -> FileDataset:
        return self

    def lost_rows(self) -> list[tuple[str, int]]:
        return self._source.lost_rows()

    def check_complete(self) -> None:
        self._source.check_complete()

    def check_schema(self, schema: Schema, segment: StoredSegment) -> None:
        self._source.check_schema(schema, segment)

    def why_empty(self) -> str:
        return self._source.why_empty()

    # ---- what reads rows ----

    def _joined_episodes(self, seen: object = None) -> EpisodeIndex:
        from rlio.look.episode_index import read_episodes

        return self._access(None, "error").read(read_episodes)

    def episode_parts(self) -> Iterator[EpisodeInfo]:
        """Yield the episodes; reads the columns that tell them apart, group by group."""
        access = self._access(None, "error")
        for number in range(len(self.segments)):
            for *values, writer, began, written, version in zip(
                *vars(access.streams(number)).values(), strict=True
            ):
                own: list[Any] = [writer or "", *values, utc_time(began), utc_time(written), version]
                yield EpisodeInfo(*own)

    def to_arrow_batches(
        self,
        *,
        columns: list[str] | None = None,
        filter: Any = None,
        policy: str | None = None,
        writers: bool = False,
        missing: Literal["error", "drop", "fill"] = "error",
        on_error: Literal["raise", "skip"] = "raise",
    ) -> pa.RecordBatchReader:
        """See `rlio.Dataset.to_arrow_batches`. The files have no writers."""
        from rlio.dataset.arrow_export import source_batches

        if writers:
            self._refuse("writers=True")
        options = ReadOptions(columns=columns, on_error=on_error)
        return source_batches(self.again(), options, filter=filter, policy=policy, missing=missing)

    def stats(
        self,
        columns: Sequence[str] | None = None,
        *,
        policy: str | None = None,
        missing: Literal["error", "drop", "fill"] = "error",
        on_error: Literal["raise", "skip"] = "raise",
        cache_folder: str | os.PathLike[str] | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Stats:
        """See `rlio.Dataset.stats`."""
        from rlio.look.stats import read_stats

        source = self.again()
        try:
            return read_stats(
                source,
                columns,
                policy=policy,
                missing=missing,
                on_error=on_error,
                cache_folder=cache_folder,
                progress=progress,
            )
        finally:
            source.close()

    def _stored(self, cache_folder: object) -> Stored:
        from rlio.look.info import Stored, environment_of

        source, format = self._source, by_name(self._source.format)
        sizes = source.sizes
        return Stored(
            format=source.format,
            title="a table in memory" if format is None else format.title,
            version=source.format_version,
            environments=() if source.environment is None else (environment_of(source.environment),),
            bytes=None if None in sizes or not sizes else sum(size or 0 for size in sizes),
            files=len(sizes) or None,
        )

    # ---- what only shards of rlio have ----

    def _refuse(self, name: str) -> NoReturn:
        raise OptionError(
            f"{name} needs a data set of rlio, and these files are of another library: convert them first, "
            f"`rlio convert {excerpt(self.uri)} DST`, or rlio.convert(src, dst)",
            uri=self.uri,
        )

    @property
    def storage(self) -> Any:  # type: ignore[override]  # The base sets an attribute.
        self._refuse("storage")

    def snapshot(self) -> NoReturn:
        self._refuse("snapshot()")

    def refresh(self, *, at: object = None) -> NoReturn:
        self._refuse("refresh()")

    def part(self, at: object) -> NoReturn:
        self._refuse("part()")

    @property
    def digest(self) -> NoReturn:
        self._refuse("digest")

    def files(self) -> NoReturn:
        self._refuse("files()")

    def cut_files(self) -> NoReturn:
        self._refuse("cut_files()")

    def bytes(self) -> NoReturn:
        self._refuse("bytes()")

    def open_shard(self, segment: object) -> NoReturn:
        self._refuse("open_shard()")

    def missing_shards(self) -> NoReturn:
        self._refuse("missing_shards()")
