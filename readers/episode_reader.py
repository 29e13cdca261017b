"""`EpisodeReader`: reads data sets of other libraries through the sources of `rlio.formats`.

Not here: how a format stores an episode (`rlio.formats`), how the engine sees it (`rlio.source.episodes`),
and the engine (`rlio.readers.source_reader`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Self, Unpack

from rlio.errors import DataNotFound
from rlio.formats.files.inputs import FileOptions
from rlio.formats.format import Format, by_name
from rlio.formats.place import open_episode_files
from rlio.formats.tables.table_files import IN_MEMORY
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.readers.source_reader import Asked, FileReader, Missing, SourceKeywords
from rlio.source.episodes import EpisodeFiles, EpisodeSource
from rlio.storage.paths import StrPath
from rlio.support.options import checked_keywords
from rlio.support.spaces import Spaces

__all__ = ["EpisodeReader"]

# What `columns="intersect"` and the like mean for the schemas of a source.
_MISSING: Final[dict[str, Missing]] = {"error": "error", "intersect": "drop", "fill": "fill"}


class EpisodeReader(FileReader):
    """Reads a data set that another library wrote, in one of the formats of `rlio.formats`.

    Rows come in the order of the episodes, each episode in the order of its steps. ``eps_id`` numbers the
    episodes, and ``t`` the steps of each, unless the format has these columns. All options are those of
    `rlio.DatasetReader`, except ``at``. With ``on_error="skip"``, a damaged episode
    is left out, and `skipped` counts episodes.

    Args:
        inputs: The data set: a folder, a file, a glob, a URI, or a list of files.
        format: Name of the format, such as ``"minari"``; None: recognise it.
        format_options: Options of the format, see docs/foreign.md.
        spaces: (observation space, action space), if the files do not state them; None: not known.
        limits: Bounds on the files.
        storage_options: Keywords of the fsspec filesystem.
        keywords: What is read, in which order, what a unit is, and where rows are kept: see
            `rlio.DatasetReader`. A text as
            ``columns`` (``"intersect"``, ``"fill"``) is for files with different columns.

    Attributes:
        format: The format.
        spaces: (observation space, action space) as the data set states them; None: it does not.

    Raises:
        DataNotFound: ``inputs`` name nothing, or the data set has no episode.
        UnknownLayout: The format is not known, or rlio does not read it.
        MissingExtra: The library that decodes the files is not installed.
        CorruptData: The data set is damaged. (UnsafeData: it exceeds ``limits``.)
        MissingColumn: A column does not exist.
        OptionError: An option is illegal.
    """

    _source: EpisodeFiles

    @checked_keywords
    def __init__(
        self,
        inputs: StrPath | Sequence[StrPath],
        *,
        format: str | None = None,
        format_options: Mapping[str, Any] | None = None,
        spaces: Spaces | None = None,
        limits: Limits = DEFAULT_LIMITS,
        storage_options: Mapping[str, Any] | None = None,
        **keywords: Unpack[SourceKeywords],
    ) -> None:
        how = FileOptions(
            format=format,
            format_options=format_options,
            spaces=spaces,
            limits=limits,
            storage_options=storage_options,
        )
        asked = Asked.of(keywords)  # Raises before anything is opened.
        self._begin(open_episode_files(inputs, asked.opening(how)), asked)

    @classmethod
    def of(cls, source: EpisodeFiles, asked: Asked) -> Self:
        """Read an open source.

        Args:
            source: The episodes, opened as `Asked.opening` says; owned by the reader.
            asked: What to read.
        """
        made = cls.__new__(cls)
        made._begin(source, asked)
        return made

    def _begin(self, source: EpisodeFiles, asked: Asked, *, owns: bool = True) -> None:
        self.format: Format = by_name(source.format) or IN_MEMORY
        self.spaces: tuple[Any, Any] | None = source.pair
        if not len(source):
            source.close()
            raise DataNotFound("found no row in the files: expected at least one", uri=source.uri)
        self._open_files(source, asked, missing=_MISSING[asked.options.unlike], owns=owns)

    @property
    def source(self) -> EpisodeSource:
        """The episodes, owned by the reader."""
        return self._source.layout

    @checked_keywords
    def again(self, **keywords: Unpack[SourceKeywords]) -> Self:
        """Another reader of the same open source, from its beginning; it must be closed before this one.

        Args:
            keywords: See the class.
        """
        asked, made = Asked.of(keywords), type(self).__new__(type(self))
        made._begin(self._source.again(asked.columns or (), asked.options.on_error), asked, owns=False)
        made.spaces = self.spaces
        return made
