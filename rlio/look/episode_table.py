"""`EpisodeTable`: one row an episode, as NumPy columns. Users have it as `rlio.Dataset.episodes`.

Example:
    >>> import numpy as np, rlio
    >>> with rlio.ParquetWriter("memory://episode-table-example") as writer:
    ...     writer.write(rlio.SampleBatch(obs=np.arange(5.0), actions=np.zeros(5), rewards=[1.0, 2, 4, 8, 16],
    ...         terminateds=[False, True, False, True, False], eps_id=[7, 7, 8, 8, 9], t=[0, 1, 0, 1, 0]))
    >>> data = rlio.open_dataset("memory://episode-table-example")
    >>> data.episodes["return"], data.episodes["finished"]
    (array([ 3., 12., 16.]), array([ True,  True, False]))
    >>> best = data.episodes.filter("finished").sort("return", descending=True)[0]
    >>> best["episode"], best["length"], data.episode(best["episode"]).total_reward
    (1, 2, 12.0)
"""

from __future__ import annotations

import json
import logging
import operator
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from rlio.batch.other_names import did_you_mean
from rlio.errors import MissingColumn, OptionError, RlioError, excerpt
from rlio.look.episode_index import EpisodeIndex
from rlio.look.kept import keep, kept_path, read_kept
from rlio.query.filters import RowFilter
from rlio.source.source import Source
from rlio.support.clock import utc_time
from rlio.support.extras import needs
from rlio.support.words import counted, one_line

if TYPE_CHECKING:
    import pandas
    import pyarrow as pa

__all__ = ["EpisodeTable", "episodes_of", "table_of"]

logger: logging.Logger = logging.getLogger("rlio")

#: Names in a filter -> those that a filter of rows has for the same.
_OF_ROWS: Final = {"return": "episode_return", "length": "episode_length"}
# Texts in quotes stay as they are; so do keys and attributes.
_NAME: Final = re.compile(
    r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|(?<![\w.])(?:return|length)(?!\w)", re.DOTALL
)
_SHOWN_ROWS: Final = 8
# Characters of a cell; ids are texts of strangers.
_TEXT: Final = 60
# NumPy's number for NaT.
_NAT: Final = -(1 << 63)
# Grows with every change of the table's columns or of their file.
_VERSION: Final = 3
_COLUMNS: Final = frozenset(("episode", "writer", "eps_id", "length", "return", "finished", "start_time"))


class EpisodeTable:
    """One row an episode: ``table["return"]`` is a NumPy array, ``table[0]`` a row, ``table[:10]`` a table.

    Columns, in this order; each is an array of shape (episodes,), which is read-only:

    - ``episode``: int64, the number of the episode: ``data.episode(number)`` has its steps.
    - ``writer``: its writer's id. Two writers may use the same ``eps_id``. Empty for other libraries' files.
    - ``eps_id``: int64, or objects; without that column, the number.
    - ``policy``, ``agent``: only of data with several. Each agent of a joint episode has a row.
    - ``length``: int64, its rows; ``return``: float64, the sum of its rewards, undiscounted. NaN if a reward
      is, or if the data has none.
    - ``terminated``, ``truncated``: bool, how its last row ended it (terminated, if both).
    - ``finished``: bool, whether either did, and the first row is there: ``t`` begins at 0, or all count
      from 1; in data without ``t``, no rows of the writer were trimmed. The others are incomplete: length and
      return are those of the rows that are there.
    - ``start_time``: datetime64[ms], UTC by the clock of the writer's machine; NaT if unknown.
    - ``policy_version``: only of data with ``weights_seq_no``: int64, that of the first row; -1 if unknown.

    Iteration gives rows: dicts of Python values, in which ``start_time`` is a `datetime`, or None.
    """

    def __init__(self, columns: Mapping[str, NDArray[Any]]) -> None:
        self._columns = dict(columns)
        for array in self._columns.values():
            array.flags.writeable = False

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self._columns)

    def __len__(self) -> int:
        return len(self._columns["episode"])

    def __getitem__(self, key: Any) -> Any:
        """A column by its name; a row by its number; a table of the rows of a slice, a mask, or numbers.

        Raises:
            MissingColumn: There is no such column.
            IndexError: There is no such row.
            OptionError: The key is none of these.
        """
        if isinstance(key, str):
            if key not in self._columns:
                raise self._no_column(key)
            return self._columns[key]
        if isinstance(key, slice):
            return self._taken(key)
        if isinstance(key, int | np.integer) and not isinstance(key, bool):
            number = operator.index(key)
            if not -len(self) <= number < len(self):
                raise IndexError(f"no row {number} in a table of {len(self)} episodes")
            return self._row(number)
        found = np.asarray(key)
        if found.ndim == 1 and found.dtype == np.bool_:
            return self.filter(found)
        if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
            raise OptionError(
                f"table[{excerpt(key)}]: expected the name of a column, a number, a slice, a mask or numbers"
            )
        return self._taken(found.astype(np.int64))

    def _no_column(self, name: str) -> MissingColumn:
        hint = did_you_mean(name, self._columns)
        return MissingColumn(f"the table has the columns {', '.join(self._columns)}{hint}", column=name)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self._row(number) for number in range(len(self)))

    def _row(self, number: int) -> dict[str, Any]:
        return {name: _plain(array[number]) for name, array in self._columns.items()}

    def _taken(self, rows: Any) -> EpisodeTable:
        return EpisodeTable({name: array[rows] for name, array in self._columns.items()})

    def sort(self, by: str, *, descending: bool = False) -> EpisodeTable:
        """Return the table in the order of a column: stable, with NaN and NaT last.

        Raises:
            MissingColumn: There is no such column.
        """
        return self._taken(_order(self[by], descending=descending))

    def filter(self, condition: str | NDArray[np.bool_]) -> EpisodeTable:
        """Return the rows that pass a condition.

        Args:
            condition: A mask, shape (episodes,); or a text in the language of filters of rows
                (docs/replay.md), with the columns of this table: ``"return > 100 and not truncated"``,
                ``"finished and length < 50"``. ``return >= quantile(0.9)`` compares with the quantile of this
                table's rows, NaN left out. ``start_time`` is compared as an array, in a mask.

        Raises:
            OptionError: It is neither, or has another length.
            MissingColumn: The text names another column.
        """
        if isinstance(condition, str):
            return self._taken(self._passing(condition))
        mask = np.asarray(condition)
        if mask.dtype != np.bool_ or mask.shape != (len(self),):
            raise OptionError(
                f"found a condition of {mask.dtype} of shape {mask.shape}: expected a text such as "
                f"'return > 100', or bools of shape ({len(self)},)"
            )
        return self._taken(mask)

    def _passing(self, text: str) -> NDArray[np.bool_]:
        """The mask of a filter's text; errors quote the names in it."""
        try:
            return self._mask(text)
        except RlioError as error:
            if isinstance(error, MissingColumn) and error.column not in _OF_ROWS.values():
                raise
            message, column = str(error), error.column
            if column is not None:
                message = message.rpartition(" [")[0]
            for name, other in _OF_ROWS.items():
                if other not in text:
                    message = re.sub(rf"\b{other}\b", name, message)
                    column = name if column == other else column
            raise type(error)(message, column=column) from None

    def _mask(self, text: str) -> NDArray[np.bool_]:
        found = RowFilter.parse(_NAME.sub(lambda name: _OF_ROWS.get(name[0], name[0]), text))
        columns = {**self._columns, **{other: self[name] for name, other in _OF_ROWS.items()}}
        for name in found.columns or ():
            if name not in columns:
                raise self._no_column(name)
        if "start_time" in (found.columns or ()):
            raise OptionError(
                "a filter's text has no times: compare the array, "
                "table[table['start_time'] >= np.datetime64('2026-01-31')]",
                column="start_time",
            )

        def value_of(name: str, share: float) -> float:
            values = columns[name].astype(np.float64)
            values = values[~np.isnan(values)]
            return float(np.quantile(values, share)) if len(values) else np.nan

        return found.with_quantiles(value_of).mask(columns, rows=len(self))

    def to_arrow(self) -> pa.Table:
        """Return the table as an Arrow table."""
        import pyarrow as pa

        return pa.table({name: _arrow(array) for name, array in self._columns.items()})

    def to_pandas(self) -> pandas.DataFrame:
        """Return the table as a pandas data frame.

        Raises:
            MissingExtra: pandas is not installed.
        """
        with needs("pandas", "pandas"):
            import pandas
        return pandas.DataFrame({name: array.copy() for name, array in self._columns.items()})

    def __repr__(self) -> str:
        unfinished = int((~self["finished"]).sum())
        said = counted(len(self), "episode")
        head = f"EpisodeTable({said}{f', {unfinished} unfinished' if unfinished else ''})"
        half = _SHOWN_ROWS // 2
        short = len(self) <= _SHOWN_ROWS
        rows = list(range(len(self))) if short else [*range(half), *range(len(self) - half, len(self))]
        cells = [[name, *(_text(array[row]) for row in rows)] for name, array in self._columns.items()]
        if not short:
            for column in cells:
                column.insert(half + 1, "...")
        lines = zip(
            *([text.rjust(max(map(len, column))) for text in column] for column in cells), strict=True
        )
        return "\n".join((head, *("  ".join(line) for line in lines)))


def table_of(index: EpisodeIndex) -> EpisodeTable:
    """The table of joined episodes."""
    terminated, truncated = (
        np.array([end == name for end in index.end], bool) for name in ("terminated", "truncated")
    )
    columns: dict[str, NDArray[Any]] = {
        "episode": np.arange(len(index)),
        "writer": _objects(index.writer),
        "eps_id": _ids([n if eps_id is None else eps_id for n, eps_id in enumerate(index.eps_id)]),
    }
    if len(set(index.policy)) > 1:
        columns["policy"] = _objects(index.policy)
    agents = set(zip(index.policy, index.agent, strict=True))
    if len(agents) > 1 and any(agent is not None for _, agent in agents):
        columns["agent"] = _ids(index.agent)
    versions = [-1 if one is None or not 0 <= one < 1 << 63 else one for one in index.version]
    return EpisodeTable(
        {
            **columns,
            "length": np.array(index.length, np.int64),
            "return": np.array(index.reward, np.float64),
            "terminated": terminated,
            "truncated": truncated,
            "finished": (terminated | truncated) & index.has_start(),
            "start_time": _times(index.began),
            **({"policy_version": np.array(versions, np.int64)} if set(index.version) - {None} else {}),
        }
    )


def episodes_of(source: Source, read: Callable[[], EpisodeIndex]) -> EpisodeTable:
    """The table of the episodes of a source: as kept in the user's cache folder, or joined, and then kept.

    Args:
        source: The source.
        read: Joins its episodes.
    """
    path = kept_path("episodes", f"{source.content_identity}-{_VERSION}.episodes")
    content = read_kept(path)
    if content is not None:
        try:
            return _decoded(content)
        except (LookupError, TypeError, ValueError) as error:
            logger.warning("%s holds no table of episodes (%r): it is made again", path, error)
    made = table_of(read())
    keep(path, _encoded(made))
    return made


def _encoded(table: EpisodeTable) -> bytes:
    """The content of a file: a line of JSON, the bytes of the arrays, compressed; and its CRC-32.

    The line has the name and dtype of each array, and the distinct objects of an array of objects, whose
    bytes are their numbers. Not Arrow: with an array of NumPy, pyarrow imports pandas, which takes 0.25 s.
    """
    head, parts = [], []
    for name in table.columns:
        array, distinct = table[name], None
        if array.dtype == object:
            numbers: dict[Any, int] = {}
            array = np.array([numbers.setdefault(one, len(numbers)) for one in array.tolist()], np.int32)
            distinct = list(numbers)
        head.append([name, array.dtype.str, distinct])
        parts.append(array.tobytes())
    whole = b"".join([json.dumps([len(table), head]).encode(), b"\n", *parts])
    content = zstandard.ZstdCompressor(level=3).compress(whole)
    return content + zlib.crc32(content).to_bytes(4, "little")


def _decoded(content: bytes) -> EpisodeTable:
    """What `_encoded` wrote; raises LookupError, TypeError or ValueError for anything else."""
    if zlib.crc32(content[:-4]) != int.from_bytes(content[-4:], "little") or len(content) < 8:
        raise ValueError("it does not match its CRC-32")
    try:
        line, _, data = zstandard.ZstdDecompressor().decompress(content[:-4]).partition(b"\n")
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    rows, head = json.loads(line)
    columns: dict[str, NDArray[Any]] = {}
    at = 0
    for name, dtype, distinct in head:
        array = np.frombuffer(data, np.dtype(dtype), rows, at)
        at += array.nbytes
        columns[name] = array if distinct is None else _objects(distinct)[array]
    if not columns.keys() >= _COLUMNS:
        raise ValueError(f"it has the columns {', '.join(columns)}")
    return EpisodeTable(columns)


def _objects(values: Sequence[Any]) -> NDArray[Any]:
    found = np.empty(len(values), object)
    found[:] = values
    return found


def _ids(values: Sequence[Any]) -> NDArray[Any]:
    """int64 if all are such numbers, otherwise objects."""
    if {int}.issuperset(map(type, values)) and (
        not values or -(1 << 63) <= min(values) <= max(values) < 1 << 63
    ):
        return np.array(values, np.int64)
    return _objects(values)


def _times(values: Sequence[int | None]) -> NDArray[np.datetime64]:
    """Milliseconds as times; NaT for None, and for what is no time of our calendar."""
    known = [_NAT if value is None or utc_time(value) is None else value for value in values]
    return np.array(known, np.int64).view("datetime64[ms]")


def _plain(value: Any) -> Any:
    """A Python value."""
    if isinstance(value, np.datetime64):
        return None if np.isnat(value) else utc_time(int(value.astype(np.int64)))
    return value.item() if isinstance(value, np.generic) else value


def _order(values: NDArray[Any], *, descending: bool) -> NDArray[np.int64]:
    """The order of values: stable, with NaN and NaT last."""
    if values.dtype == object:  # Ids may be numbers and texts.
        keys = list(map(_comparable, values))
        return np.array(sorted(range(len(keys)), key=keys.__getitem__, reverse=descending), np.int64)
    is_known = values == values  # NaN and NaT are not equal to themselves.
    known = np.flatnonzero(is_known)[:: -1 if descending else 1]
    order = known[np.argsort(values[known], kind="stable")][:: -1 if descending else 1]
    return np.append(order, np.flatnonzero(~is_known))


def _comparable(value: Any) -> tuple[int, Any]:
    return (1, value) if isinstance(value, str) else (2, 0) if value is None else (0, value)


def _arrow(array: NDArray[Any]) -> pa.Array:
    import pyarrow as pa

    if array.dtype == object and any(isinstance(value, str) for value in array):
        array = _objects([None if value is None else str(value) for value in array])
    return pa.array(array, from_pandas=False)


def _text(value: Any) -> str:
    if isinstance(value, float | np.floating):
        return f"{value:.6g}"
    if isinstance(value, np.datetime64):
        return "" if np.isnat(value) else str(value.astype("datetime64[s]")).replace("T", " ")
    return "" if value is None else one_line(str(value), _TEXT)
