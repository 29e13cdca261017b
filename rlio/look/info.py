"""`DatasetInfo`: what a data set is and holds, in ten lines. Users have it from `rlio.Dataset.info`.

Example:
    >>> import numpy as np, rlio
    >>> with rlio.ParquetWriter("memory://info-example", writer_id="w0") as writer:
    ...     writer.write(rlio.SampleBatch(obs=np.zeros((3, 4)), actions=[0, 1, 0], rewards=[1.0, 1, 2],
    ...         terminateds=[False, True, False], eps_id=[0, 0, 1], t=[0, 1, 0]))
    >>> info = rlio.open_dataset("memory://info-example").info()
    >>> info.rows, info.episodes, info.terminated, info.unfinished, info.returns.mean
    (3, 2, 1, 1, 2.0)
    >>> print(repr(info).splitlines()[2])
    3 rows in 2 episodes: 1 terminated, 0 truncated, 1 unfinished
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import Columns, is_per_sequence
from rlio.errors import SchemaConflict
from rlio.look.kept import keep, kept_path, read_kept
from rlio.schemas.column import TEXTS, ColumnSpec
from rlio.schemas.filling import joint_infos
from rlio.schemas.leaves import Leaf
from rlio.schemas.schema import FORMAT_VERSION, Schema
from rlio.schemas.times import TIME_FORMS
from rlio.support.clock import utc_time
from rlio.support.html import Html, facts, panel, table
from rlio.support.words import and_more, counted, one_line

if TYPE_CHECKING:
    from rlio.look.episode_table import EpisodeTable
    from rlio.look.stats import Stats
    from rlio.schemas.streams import Streams
    from rlio.source.source import OpenSegment, Source

__all__ = ["ColumnInfo", "DatasetInfo", "Quantiles", "SpacesInfo", "Stored", "Survey", "info_of"]

logger: logging.Logger = logging.getLogger("rlio")

# Grows with every change of what a survey keeps.
_VERSION: Final = 1
# Columns and texts that a line shows.
_COLUMNS: Final = 6
_LINE: Final = 118
_NAME: Final = 9
_FIRST: Final = (Columns.OBS, Columns.ACTIONS, Columns.REWARDS)
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """Where the values of episodes lie.

    Attributes:
        count: Values that are numbers; the others are of these.
        min, q10, median, q90, max: Least value, quantiles and greatest value, by linear interpolation.
        mean: Their mean.
    """

    count: int
    min: float
    q10: float
    median: float
    q90: float
    max: float
    mean: float

    @classmethod
    def of(cls, values: NDArray[Any]) -> Self | None:
        """Those of an array, NaN left out; None: there is no number."""
        known = np.asarray(values, np.float64)
        known = np.sort(known[~np.isnan(known)])
        if not len(known):
            return None
        # numpy.quantile imports numpy.ma at first: that takes longer than the rest of an info that is kept.
        at = np.array((0, 0.1, 0.5, 0.9, 1)) * (len(known) - 1)
        below, above = known[np.floor(at).astype(int)], known[np.ceil(at).astype(int)]
        with np.errstate(invalid="ignore"):  # Values may be infinite.
            between = np.where(below == above, below, below + (above - below) * (at % 1))
            low, q10, median, q90, high = between.tolist()
            mean = float(known.mean())
        return cls(count=len(known), min=low, q10=q10, median=median, q90=q90, max=high, mean=mean)

    def __str__(self) -> str:
        shares = ("min", "min"), ("10 %", "q10"), ("median", "median"), ("90 %", "q90"), ("max", "max")
        named = (*shares, ("mean", "mean"))
        return ", ".join(f"{name} {getattr(self, field):.6g}" for name, field in named)


@dataclass(frozen=True, kw_only=True)
class ColumnInfo:
    """One array of a column.

    Attributes:
        name: The column, and the path in it (``obs/camera``).
        policy: Whose column it is; None: the data has one policy.
        dtype: Name of the dtype of its values; "str" for texts, "int32[n]" for rows of any length, "date"
            and "datetime" for those of Python, "object" for other objects.
        shape: Shape of a row.
        min, max: Least and greatest finite value of all rows; None: not read, or there is none.
        nan: Share of its values that are NaN; None: not read, or they are no numbers.
    """

    name: str
    policy: str | None = None
    dtype: str
    shape: tuple[int, ...]
    min: float | None = None
    max: float | None = None
    nan: float | None = None

    @property
    def is_read(self) -> bool:
        """Whether the range is known, or the column has none."""
        is_ragged = self.dtype.endswith(("]", ")")) or self.dtype in TIME_FORMS
        has_range = not is_ragged and np.dtype(self.dtype).kind in "biuf" and 0 not in self.shape
        if self.name.split("/")[0] == Columns.NEXT_OBS:
            return True
        return self.min is not None or self.nan == 1 or not has_range

    @property
    def range(self) -> str:
        """The range as a text."""
        if self.min is None and self.name.split("/")[0] == Columns.NEXT_OBS:
            return "as obs"
        if not self.is_read:
            return "range not read"
        parts = [] if self.min is None or self.max is None else [f"{self.min:.6g} to {self.max:.6g}"]
        return ", ".join(parts + ([f"NaN {self.nan:.3g}"] if self.nan else []))

    def __str__(self) -> str:
        shape = f" {self.shape}" if self.shape else ""
        policy = "" if self.policy is None else f"{self.policy}: "
        return f"{policy}{self.name} {self.dtype}{shape} {self.range if self.is_read else ''}".rstrip()


@dataclass(frozen=True, kw_only=True)
class SpacesInfo:
    """The spaces of a policy, as texts.

    Attributes:
        policy: Whose spaces they are.
        observation, action: As gymnasium shows them.
    """

    policy: str
    observation: str
    action: str


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What is stored besides rows.

    Attributes:
        format, title: Name of the format, as `rlio.convert` takes it, and its users' name.
        version: Of the format; None: it states none.
        environments: As recorded.
        has_writers: Whether the episodes name their writers.
        bytes, files: Of the files with the rows; None: unknown.
        first_write, last_write: In milliseconds since 1970-01-01 UTC; None: unknown.
        bounds: Name of a column -> its least and greatest value, as far as they are known.
    """

    format: str
    title: str
    version: str | None = None
    environments: tuple[str, ...] = ()
    has_writers: bool = False
    bytes: int | None = None
    files: int | None = None
    first_write: int | None = None
    last_write: int | None = None
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, repr=False)
class DatasetInfo:
    """What a data set is, and what it holds. Its `repr` has at most ten lines.

    Attributes:
        uri: Where it is.
        format: Name of the format, as `rlio.convert` takes it: "rlio", "minari", "lerobot", ...
        title: The name that its users know.
        version: Version of the format; None: the files state none.
        environments: Id of each environment that the data names, or what it has in its stead.
        rows: Rows of all agents.
        episodes: Episodes, unfinished ones included; each agent of a joint episode counts, see
            `rlio.EpisodeTable`.
        returns, lengths: Of all episodes, unfinished ones with the rows that are there; None: there are none.
        terminated, truncated, unfinished: Episodes by their end. Those without their first rows are
            unfinished, and a note says so.
        columns: The columns of each policy.
        spaces: The stored spaces of each policy.
        policies: Ids of the policies.
        policy_versions: First and last version of the weights that acted (``weights_seq_no``); None: unknown.
        writers: Ids of the writers; of other libraries' files, ().
        first_write, last_write: When the first and the last shard began to be filled, in UTC by the writers'
            clocks; None: unknown.
        bytes, files: Of the files that hold the rows; None: they are in memory, or their size is unknown.
        notes: What the format does not read, and what the data leaves unclear.
    """

    uri: str
    format: str
    title: str
    version: str | None
    environments: tuple[str, ...]
    rows: int
    episodes: int
    returns: Quantiles | None
    lengths: Quantiles | None
    terminated: int
    truncated: int
    unfinished: int
    columns: tuple[ColumnInfo, ...]
    spaces: tuple[SpacesInfo, ...]
    policies: tuple[str, ...]
    policy_versions: tuple[int, int] | None
    writers: tuple[str, ...]
    first_write: datetime | None
    last_write: datetime | None
    bytes: int | None
    files: int | None
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The attributes as JSON values: times as ISO 8601, None for a number that is not finite."""
        found: dict[str, Any] = _json(asdict(self))
        return found

    def __repr__(self) -> str:
        named = (f"{name:<{_NAME}}{value}" for name, value in self._lines()[3:])
        return "\n".join(one_line(line, _LINE) for line in (*(v for _, v in self._lines()[:3]), *named))

    def _lines(self) -> list[tuple[str, str]]:
        """Names and texts of what is known, at most ten."""
        ends = f"{self.terminated:,} terminated, {self.truncated:,} truncated, {self.unfinished:,} unfinished"
        what = self.title if self.version is None else f"{self.title}, version {self.version}"
        env = and_more(self.environments, 3) or "environment not recorded"
        found = [
            ("format", f"{what}: {env}"),
            ("path", self.uri),
            ("holds", f"{counted(self.rows, 'row')} in {counted(self.episodes, 'episode')}: {ends}"),
            ("returns", self._values(self.returns)),
            ("lengths", self._values(self.lengths)),
            ("columns", self._column_text()),
            ("spaces", self._space_text()),
            ("writers", self._writer_text()),
            ("written", self._times()),
            ("stored", self._size()),
        ]
        return found[:3] + [(name, text) for name, text in found[3:] if text]

    def _values(self, found: Quantiles | None) -> str:
        if found is None:
            return "none"
        rest = self.episodes - found.count
        return f"{found}{f', NaN in {rest:,} of them' if rest else ''}"

    def _column_text(self) -> str:
        ordered = sorted(self.columns, key=lambda column: column.name.split("/")[0] not in _FIRST)
        unread = [column.name for column in ordered if not column.is_read]
        few = f"; range not read: {', '.join(unread)}" if unread else ""
        end = few if len(unread) <= 2 else f"; {len(unread)} ranges not read"
        texts, most = [str(column) for column in ordered], _COLUMNS
        while most > 1 and len(and_more(texts, most)) + len(end) + _NAME > _LINE:
            most -= 1
        return and_more(texts, most) + end

    def _space_text(self) -> str:
        several = len(self.spaces) > 1
        texts = [
            f"{f'{one.policy}: ' if several else ''}obs {one.observation}, actions {one.action}"
            for one in self.spaces
        ]
        return and_more(texts, 2) or "not stored"

    def _writer_text(self) -> str:
        texts = [counted(len(self.writers), "writer")] if self.writers else []
        if len(self.policies) > 1 or self.policy_versions is not None:
            texts.append(counted(len(self.policies), "policy"))
        if self.policy_versions is not None:
            first, last = self.policy_versions
            texts.append(f"weights of version {first:,}" + (f" to {last:,}" if last > first else ""))
        return ", ".join(texts)

    def _times(self) -> str:
        if self.first_write is None or self.last_write is None:
            return ""
        first, last = (f"{time:%Y-%m-%d %H:%M:%S}" for time in (self.first_write, self.last_write))
        return f"{first} UTC" if first == last else f"{first} to {last} UTC"

    def _size(self) -> str:
        files = "" if self.files is None else f" in {counted(self.files, 'file')}"
        return "" if self.bytes is None else f"{_size(self.bytes)}{files}"

    def _repr_html_(self) -> str:
        several = len(self.policies) > 1
        heads = ("policy", "column", "dtype", "shape", "range")[not several :]
        rows = (
            (*((one.policy,) if several else ()), one.name, one.dtype, one.shape, one.range)
            for one in self.columns
        )
        shown = [(name, text) for name, text in self._lines() if name != "columns"]
        notes = [("note", note) for note in self.notes]
        parts: list[Html] = [facts([*shown, *notes]), table(heads, rows)]
        return panel("DatasetInfo", *parts)


# ---- how it is made ----


class Survey:
    """What the footers of rlio's shards state, collected while the shards are open.

    Attributes:
        environments: As recorded.
        first, last: First and last time of writing.
    """

    def __init__(self) -> None:
        self.environments: dict[str, None] = {}
        self.first: int | None = None
        self.last: int | None = None
        self._bounds: dict[str, tuple[Any, Any]] = {}
        self._unknown: set[str] = set()
        self._names: dict[str, list[tuple[str, str]]] = {}

    def add(self, opened: OpenSegment, streams: Streams) -> None:
        """Take in an open shard, and the streams of its live rows."""
        for env in _environments(getattr(opened, "provenance", {})):
            self.environments[environment_of(env)] = None
        times = [time for time in streams.written if time is not None]
        if times:
            self.first = min(times) if self.first is None else min(self.first, *times)
            self.last = max(times) if self.last is None else max(self.last, *times)
        schema = opened.schema
        names = self._names.get(schema.hash)
        if names is None:
            names = self._names[schema.hash] = [
                (leaf.physical, _name(leaf))
                for policy in schema.policies.values()
                for leaf in policy.listed.leaves
            ]
        # Bounds are those of all rows of the shard; and policies may share a stored column.
        if sum(streams.rows) < sum(opened.rows) or len(schema.policies) > 1:
            self._unknown.update(name for _, name in names)
            return
        for group in range(len(opened.rows)):
            found = opened.bounds(group)
            for physical, name in names:
                if physical not in found:
                    self._unknown.add(name)
                    continue
                low, high = found[physical]
                known = self._bounds.get(name)
                self._bounds[name] = (
                    (low, high) if known is None else (min(low, known[0]), max(high, known[1]))
                )

    @classmethod
    def kept(cls, source: Source, folder: str | os.PathLike[str] | None) -> Self | None:
        """What `keep` has kept of the same rows; None: nothing that can be read."""
        path = _path_of(source, folder)
        text = read_kept(path)
        if text is None:
            return None
        found = cls()
        try:
            written = json.loads(text)
            found.environments = dict.fromkeys(map(str, written["environments"]))
            found.first, found.last = written["first"], written["last"]
            found._bounds = {str(name): (low, high) for name, (low, high) in written["bounds"].items()}
            numbers = [found.first or 0, found.last or 0, *chain(*found._bounds.values())]
            if not all(isinstance(number, (int, float)) for number in numbers):
                raise ValueError("it has values that are no numbers")
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            logger.warning("%s says nothing of the data set (%r): it is looked at again", path, error)
            return None
        return found

    def keep(self, source: Source, folder: str | os.PathLike[str] | None) -> None:
        """Keep what was found in a small file."""
        written = {
            "environments": list(self.environments),
            "first": self.first,
            "last": self.last,
            "bounds": self.bounds(),
        }
        keep(_path_of(source, folder), json.dumps(written).encode())

    def stored(self, *, bytes: int, files: int) -> Stored:
        """What was found, with the size of the shards."""
        return Stored(
            format="rlio",
            title="rlio",
            version=str(FORMAT_VERSION),
            environments=tuple(self.environments),
            bytes=bytes,
            files=files,
            first_write=self.first,
            last_write=self.last,
            bounds=self.bounds(),
            has_writers=True,
        )

    def bounds(self) -> dict[str, tuple[float, float]]:
        """Name of a column -> its least and greatest value, where all rows are known."""
        found = {}
        for name, pair in self._bounds.items():
            low, high = (value.item() if isinstance(value, np.generic) else value for value in pair)
            if name not in self._unknown and math.isfinite(low) and math.isfinite(high):
                found[name] = low + 0, high + 0  # Footers have -0.0 for 0, and bools become numbers.
        return found


def _path_of(source: Source, folder: str | os.PathLike[str] | None) -> str | None:
    return kept_path("info", f"{source.content_identity}-{_VERSION}.json", folder)


def _environments(provenance: Mapping[str, Any]) -> Iterator[str]:
    """The environments that a footer names; a shard of merged writers has the provenance of each."""
    merged = provenance.get("merged")
    for one in merged.values() if isinstance(merged, Mapping) else (provenance,):
        if isinstance(one, Mapping) and isinstance(one.get("env"), str):
            yield one["env"]


def environment_of(text: str) -> str:
    """The id of the environment in a recorded text, which may be the JSON of its spec."""
    try:
        spec = json.loads(text) if text.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        return text
    if isinstance(spec, dict):
        for key in ("id", "env_name"):
            if isinstance(spec.get(key), str):
                return str(spec[key])
    return text


def info_of(
    source: Source, episodes: EpisodeTable, stored: Stored, stats: Mapping[str, Stats | None]
) -> DatasetInfo:
    """What a source is and holds.

    Args:
        source: The source.
        episodes: Its episodes.
        stored: What else is known of it.
        stats: Policy -> the statistics of its columns, if they are known.
    """
    notes, finished = list(source.notes), episodes["finished"]
    terminated, truncated = (int((episodes[end] & finished).sum()) for end in ("terminated", "truncated"))
    if cut := int(((episodes["terminated"] | episodes["truncated"]) & ~finished).sum()):
        notes.append(
            f"{counted(cut, 'episode')} that ended without the first rows (trimmed, or not recorded): "
            "counted as unfinished."
        )
    policies = sorted({name for schema in source.schemas.values() for name in schema.policies})
    has_all_rewards = bool(np.isfinite(episodes["return"]).all())
    columns = list(_columns(source.schemas.values(), policies, stored, stats, has_all_rewards))
    versions = [
        (int(one.min), int(one.max))
        for one in columns
        if one.name == Columns.WEIGHTS_SEQ_NO and one.min is not None and one.max is not None
    ]
    if not versions and "policy_version" in episodes.columns:  # That of the first row of each episode.
        known = episodes["policy_version"]
        versions = [(one, one) for one in set(known[known >= 0].tolist())]
    return DatasetInfo(
        uri=source.uri,
        format=stored.format,
        title=stored.title,
        version=stored.version,
        environments=stored.environments,
        rows=sum(segment.rows for segment in source.segments),
        episodes=len(episodes),
        returns=Quantiles.of(episodes["return"]),
        lengths=Quantiles.of(episodes["length"]),
        terminated=terminated,
        truncated=truncated,
        unfinished=len(episodes) - terminated - truncated,
        columns=tuple(columns),
        spaces=tuple(_spaces(source, notes)),
        policies=tuple(policies),
        policy_versions=(min(versions)[0], max(last for _, last in versions)) if versions else None,
        writers=tuple(sorted(set(episodes["writer"]))) if stored.has_writers else (),
        first_write=utc_time(stored.first_write),
        last_write=utc_time(stored.last_write),
        bytes=stored.bytes,
        files=stored.files,
        notes=tuple(notes),
    )


def _columns(
    schemas: Iterable[Schema],
    policies: Sequence[str],
    stored: Stored,
    stats: Mapping[str, Stats | None],
    has_all_rewards: bool,
) -> Iterator[ColumnInfo]:
    for policy in policies:
        found: dict[str, Leaf] = {}
        for schema in schemas:
            if policy in schema.policies:
                found.update({_name(leaf): leaf for leaf in schema.policies[policy].listed.leaves})
        known = stats.get(policy)
        for name, leaf in found.items():
            dtype = leaf.spec.numpy
            low, high, nan = None, None, None
            if (dtype.kind in "biu" and leaf.spec.kind not in TEXTS) or (
                leaf.column == Columns.REWARDS and not leaf.path and has_all_rewards
            ):
                nan = 0.0
            if known is not None and leaf.name in known:
                low, high, nan = _range(known, leaf.name)
            low, high = stored.bounds.get(name, (low, high))  # These are exact.
            yield ColumnInfo(
                name=name,
                policy=policy if len(policies) > 1 else None,
                dtype=_shown_type(leaf.spec),
                shape=leaf.spec.shape,
                min=low,
                max=high,
                nan=nan,
            )


def _shown_type(spec: ColumnSpec) -> str:
    """The dtype of a column; of rows of any length, that of their items, as ``int32[n]``."""
    if spec.structure is not None:
        return repr(spec.structure)
    if spec.items is not None:
        return f"{spec.items.numpy.name}[{', '.join(('n', *map(str, spec.items.shape)))}]"
    return "str" if spec.kind == "text" else spec.numpy.name


def _name(leaf: Leaf) -> str:
    """The name by which a column, or a part of one, is read; a column's own name may have a slash."""
    return leaf.name if leaf.path else leaf.column


def _range(stats: Stats, name: str) -> tuple[float | None, float | None, float | None]:
    """Least and greatest value, and share of NaN, of all values of a column."""
    leaf = stats[name]
    values = stats.rows * leaf.count.size
    nan = float(leaf.nan.sum() / values) if values else None
    if not leaf.count.any():
        return None, None, nan
    is_whole = stats.dtypes[name].kind in "biu"
    low, high = float(np.nanmin(leaf.min)), float(np.nanmax(leaf.max))
    return (int(low), int(high), nan) if is_whole else (low, high, nan)


def read_columns(source: Source, policy: str) -> list[str]:
    """The columns of a policy of which all writers have numbers, for statistics; without new_obs, which
    repeats obs.
    """
    common: dict[str, Leaf] | None = None
    every = [schema.policies[policy] for schema in source.schemas.values() if policy in schema.policies]
    infos = joint_infos(every)
    keys = {} if infos is None or infos.has_rest else infos.keys  # Others may be among objects.
    for own in every:
        found = {
            _name(leaf): leaf
            for leaf in own.listed.leaves
            if (leaf.column != Columns.INFOS or own.infos is None or leaf.path in keys)
            and leaf.spec.kind not in TEXTS
            and leaf.spec.numpy.kind in "biuf"
            and leaf.spec.size
        }
        common = found if common is None else {name: leaf for name, leaf in common.items() if name in found}
    return [
        name
        for name, leaf in (common or {}).items()
        if leaf.column != Columns.NEXT_OBS and not is_per_sequence(leaf.column)
    ]


def _spaces(source: Source, notes: list[str]) -> Iterator[SpacesInfo]:
    try:
        found = source.policy_spaces
    except SchemaConflict as error:
        notes.append(str(error))
        return
    for policy, (observation, action) in sorted(found.items()):
        yield SpacesInfo(policy=policy, observation=_space_text(observation), action=_space_text(action))


def _space_text(space: Any) -> str:
    with np.printoptions(threshold=8, edgeitems=2, precision=4):
        return " ".join(str(space).split())


def _json(value: Any) -> Any:
    """JSON values of nested attributes."""
    if isinstance(value, dict):
        return {name: _json(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(part) for part in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _size(count: int) -> str:
    size, unit = float(count), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    digits = f"{size:.3g}" if size < 999.5 else f"{size:.0f}"
    return f"{digits} {_UNITS[unit]}" if unit else f"{count} B"
