"""imitation's trajectories on disk (`imitation.data.serialize.save`): a Hugging Face data set of episodes.

Row i has the lists of episode i: ``obs`` with N+1 observations, ``acts``, ``infos`` and perhaps ``rews`` with
N values, and ``terminal``. Action t was taken in observation t; the reward and the info followed it.

``terminal`` is true where the episode ended, also by a time limit, which the last info may state
(``TimeLimit.truncated``); if it is false, the episode has not ended. ``infos`` are texts of jsonpickle: rlio
reads them as JSON, makes no objects of them, and leaves them out if all are empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from rlio.batch import SampleBatch
from rlio.batch.arrays import object_column
from rlio.batch.columns import Columns
from rlio.errors import CorruptData, SchemaError, excerpt
from rlio.formats.files.arrow_columns import to_column
from rlio.formats.files.step_rows import flags_of
from rlio.formats.format import Format, Marks
from rlio.formats.place import Place
from rlio.formats.tables.hugging_face import saved_table
from rlio.limits import Limits
from rlio.source.episodes import measure_first, with_next_obs
from rlio.storage import InputFile, InputFiles, Span, each_file
from rlio.support.calls import closing_on_error
from rlio.support.progress import each

_NAMES: Final = frozenset(("obs", "acts", "infos", "terminal"))
_EMPTY: Final = "{}"

FORMAT = Format(
    name="imitation",
    title="imitation's trajectories",
    marks=Marks(
        columns=_NAMES.issubset,
        json=lambda found: isinstance(found.get("features"), Mapping) and found["features"].keys() >= _NAMES,
    ),
    within="huggingface",
    source="rlio.formats.imitation:ImitationSource",
    root=("state.json",),
    about="All observations are read. Objects in infos stay the JSON that jsonpickle made of them.",
)


class ImitationSource:
    """The trajectories of a folder; an `EpisodeSource`.

    Args:
        place: The folder.
        limits: Bounds on the files.

    Attributes:
        inputs: See `SpanSource`.

    Raises:
        SchemaError: A column is not of lists.
    """

    spaces: tuple[Any, Any] | None = None

    def __init__(self, place: Place, *, limits: Limits) -> None:
        self.uri: str = place.uri
        self._limits = limits
        self._table = saved_table(place, limits=limits)
        self.files: Sequence[InputFile] = self._table.files
        self.inputs: InputFiles = self._table.inputs
        self.notes: list[str] = []
        self.lengths: list[int] = []
        #: Of each episode: number of the file, of the piece, and the row in it.
        self._places: list[tuple[int, int, int]] = []
        self._has_infos = False
        with closing_on_error(self):
            names = self._table.names
            if missing := sorted(_NAMES - {*names}):
                raise SchemaError(f"found the columns {excerpt(names)}, expected {missing}", uri=self.uri)
            self._names = ["obs", "acts", "infos", "terminal", *(["rews"] if "rews" in names else [])]
            pieces = [range(len(self._table.piece_rows(file))) for file in range(len(self.files))]
            if self.inputs.are_far:
                of_all = [(file, piece) for file, numbers in enumerate(pieces) for piece in numbers]
                self.inputs.expect(self._spans_of(of_all))
            for file in each_file(self.files):
                for piece in each(pieces[file]):
                    self._index(file, piece)
            self.row_bytes: int = measure_first(
                range(len(self.lengths)), lambda episode: self.load(episode, None)
            )
        if any(terminal for terminal in self._terminals()):
            self.notes.append(
                "terminal is also true where a time limit ended an episode: it is read as terminated, unless "
                "the last info has TimeLimit.truncated."
            )

    def _index(self, file: int, piece: int) -> None:
        """Take in the episodes of a record batch."""
        import pyarrow as pa
        import pyarrow.compute as pc

        batch = self._batch(file, piece)
        kinds = {name: batch.column(name).type for name in self._names}
        are_lists = all(_is_list(kind) for name, kind in kinds.items() if name != "terminal")
        if not are_lists or kinds["terminal"] != pa.bool_() or kinds["infos"].value_type != pa.string():
            shown = excerpt({name: str(kind) for name, kind in kinds.items()}, 300)
            raise SchemaError(f"found columns of the types {shown}, expected lists", uri=self.uri)
        steps = pc.list_value_length(batch.column("acts"))
        if steps.null_count or any(batch.column(name).null_count for name in self._names):
            raise CorruptData("found an episode without values", uri=self.files[file].uri)
        self._table.allowance.claim(pc.sum(steps, min_count=0).as_py())
        for row, count in enumerate(steps.to_pylist()):
            self._places.append((file, piece, row))
            self.lengths.append(count)
        infos = pc.list_flatten(batch.column("infos"))
        self._has_infos |= not pc.all(pc.equal(infos, _EMPTY), min_count=0).as_py()

    def _batch(self, file: int, piece: int) -> Any:
        return self._table.piece(file, piece, self._names)

    def _terminals(self) -> Iterator[bool]:
        for file, piece, row in self._places:
            yield self._batch(file, piece).column("terminal")[row].as_py()

    def spans(
        self, first: int, stop: int, start: int, rows: int, columns: frozenset[str] | None
    ) -> Iterator[Span]:
        """See `SpanSource`. A record batch is read whole."""
        if not self._table.keeps_all:
            yield from self._spans_of(dict.fromkeys(place[:2] for place in self._places[first:stop]))

    def _spans_of(self, pieces: Iterable[tuple[int, int]]) -> Iterator[Span]:
        for file, piece in pieces:
            yield from ((file, *place) for place in self._table.places(file, piece, self._names))

    def load(self, episode: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read one episode; see `EpisodeSource`."""
        file, piece, row = self._places[episode]
        batch, steps = self._batch(file, piece), self.lengths[episode]

        def values(name: str, column: str, rows: int) -> Any:
            found = to_column(column, batch.column(name)[row].values, {})
            if found is None or len(found) != rows:
                count = 0 if found is None else len(found)
                raise CorruptData(
                    f"{name} of episode {episode} has {count} rows, expected {rows}", column=name
                )
            return found

        texts = batch.column("infos")[row].values
        if len(texts) != steps:
            raise CorruptData(f"infos of episode {episode} has {len(texts)} rows, expected {steps}")
        ended = batch.column("terminal")[row].as_py()
        is_cut = any(one.get("TimeLimit.truncated") is True for one in self._infos(texts[-1:], episode))
        found = {
            **with_next_obs(values("obs", Columns.OBS, steps + 1)),
            Columns.ACTIONS: values("acts", Columns.ACTIONS, steps),
            **flags_of(steps, terminated=ended and not is_cut, truncated=ended and is_cut),
        }
        if "rews" in self._names:
            found[Columns.REWARDS] = values("rews", Columns.REWARDS, steps)
        if self._has_infos and (columns is None or Columns.INFOS in columns):
            found[Columns.INFOS] = object_column(self._infos(texts, episode))
        return SampleBatch(found)

    def _infos(self, texts: Any, episode: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for text in texts.to_pylist() if self._has_infos else ():
            try:
                self._limits.check_json(text or "", "an info")
                info = json.loads(text or "")
            except (ValueError, RecursionError) as error:
                raise CorruptData(
                    f"an info of episode {episode} is no JSON: {excerpt(str(error))}", column="infos"
                ) from error
            found.append(info if isinstance(info, dict) else {"info": info})
        return found

    def close(self) -> None:
        """Close all files."""
        self._table.close()


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))
