"""Statistics of a data set's columns in one pass, and the normalisation of batches by them.

Example:
    >>> import numpy as np, rlio
    >>> with rlio.ParquetWriter("memory://stats-example") as writer:
    ...     writer.write(rlio.SampleBatch(obs=np.array([[1.0, 5.0], [3.0, 5.0]]), rewards=np.ones(2)))
    >>> stats = rlio.open_dataset("memory://stats-example").stats(["obs"])
    >>> stats["obs"].mean, stats["obs"].std, stats["obs"].q50
    (array([2., 5.]), array([1., 0.]), array([2., 5.]))
    >>> stats.normaliser("mean_std")(rlio.SampleBatch(obs=np.array([[3.0, 5.0]])))["obs"]
    array([[1., 0.]], dtype=float32)
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch, MultiAgentBatch, SampleBatch
from rlio.batch.arrays import to_numpy
from rlio.batch.columns import Columns
from rlio.batch.nested import Path, leaves, unflatten
from rlio.batch.other_names import did_you_mean
from rlio.errors import MissingColumn, OptionError, SchemaError, excerpt
from rlio.look.kept import keep, kept_path, read_kept
from rlio.look.moments import LeafStats, Moments, Sample
from rlio.look.numeric_columns import (
    is_numeric,
    named_leaves,
    numbers_of,
    wanted_leaves,
)
from rlio.read_options import ReadOptions
from rlio.schemas.folded import unfold
from rlio.schemas.leaves import Leaf, column_of_name, is_in, is_named, leaf_name
from rlio.schemas.schema import canonical_json
from rlio.source.selection import counting_of, group_options, with_step_columns
from rlio.source.source import Source
from rlio.source.span_reader import GoneSegments, SpanReader

__all__ = ["LeafStats", "Normalise", "Normaliser", "Stats", "known_stats", "read_stats"]

logger: logging.Logger = logging.getLogger("rlio")

Missing: TypeAlias = Literal["error", "drop", "fill"]

# Bytes of rows whose frame stacks are looked up at once.
_PART_BYTES: Final = 32 << 20
# Grows with every change of the numbers or of their file.
_VERSION: Final = 4

Method: TypeAlias = Literal["mean_std", "min_max"]
_METHODS: Final = ("mean_std", "min_max")


class Stats(Mapping[str, LeafStats]):
    """Statistics of a data set: name of a column, or of an array in it (``obs/position``) -> `LeafStats`.

    Attributes:
        rows: Rows of the data set.
        quantile_rows: Rows from which the quantiles were computed.
        columns: Name -> (logical column, path in it).
        dtypes: Name -> dtype of the values.
    """

    def __init__(
        self,
        found: Mapping[str, LeafStats],
        *,
        columns: Mapping[str, tuple[str, tuple[str | int, ...]]],
        dtypes: Mapping[str, np.dtype[Any]],
        rows: int,
        quantile_rows: int,
    ) -> None:
        self._found = dict(found)
        self.columns: dict[str, tuple[str, tuple[str | int, ...]]] = dict(columns)
        self.dtypes: dict[str, np.dtype[Any]] = dict(dtypes)
        self.rows: int = rows
        self.quantile_rows: int = quantile_rows

    def __getitem__(self, name: str) -> LeafStats:
        if name not in self._found:
            raise MissingColumn(
                f"the statistics have the columns {', '.join(self._found)}{did_you_mean(name, self._found)}",
                column=name,
            )
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        lines = [f"Stats({self.rows} rows, quantiles of {self.quantile_rows}:"]
        for name, leaf in self._found.items():
            shown = ", ".join(
                f"{field.name} {_shown(getattr(leaf, field.name))}" for field in fields(leaf)[1:5]
            )
            lines.append(f"  {name}: {shown}")
        return "\n".join(lines) + ")"

    def normaliser(self, method: Method = "mean_std", *, columns: Sequence[str] | None = None) -> Normaliser:
        """Return a normaliser of some columns by these statistics.

        Args:
            method: "mean_std": to mean 0 and standard deviation 1. "min_max": to -1 for the least value and 1
                for the greatest.
            columns: Columns, or parts of nested ones (``obs/position``), as in `Normaliser.of_stats`; None:
                the floats of ``obs``.
        """
        return Normaliser.of_stats(self, method if columns is None else dict.fromkeys(columns, method))

    def to_json(self) -> dict[str, Any]:
        """The JSON form, without NaN (None in its place)."""
        return {
            "rows": self.rows,
            "quantile_rows": self.quantile_rows,
            "leaves": {
                name: {
                    "column": self.columns[name][0],
                    "path": list(self.columns[name][1]),
                    "dtype": self.dtypes[name].str,
                    "shape": list(leaf.count.shape),
                    **{
                        field.name: [
                            value if value == value else None
                            for value in getattr(leaf, field.name).reshape(-1).tolist()
                        ]
                        for field in fields(leaf)
                    },
                }
                for name, leaf in self._found.items()
            },
        }

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Self:
        """Read the form of `to_json`; raises KeyError, TypeError or ValueError for anything else."""
        found, columns, dtypes = {}, {}, {}
        for name, leaf in written["leaves"].items():
            arrays = {
                # NumPy makes NaN of None.
                field.name: np.array(
                    leaf[field.name], np.int64 if field.name in ("count", "nan") else np.float64
                ).reshape(leaf["shape"])
                for field in fields(LeafStats)
            }
            found[name], columns[name] = LeafStats(**arrays), (str(leaf["column"]), tuple(leaf["path"]))
            dtypes[name] = np.dtype(str(leaf["dtype"]))
        return cls(
            found,
            columns=columns,
            dtypes=dtypes,
            rows=int(written["rows"]),
            quantile_rows=int(written["quantile_rows"]),
        )


def _shown(values: NDArray[Any]) -> str:
    return (
        f"{values:.4g}" if not values.ndim else np.array2string(values.reshape(-1), precision=4, threshold=8)
    )


# ---- computing ----


def read_stats(
    source: Source,
    columns: Sequence[str] | None,
    *,
    policy: str | None,
    missing: Missing,
    on_error: Literal["raise", "skip"],
    cache_folder: str | os.PathLike[str] | None,
    progress: Callable[[int], object] | None = None,
) -> Stats:
    """See `rlio.Dataset.stats`."""
    wanted = wanted_leaves(source, columns, policy)
    path = _path_of(source, wanted, policy=policy, missing=missing, cache_folder=cache_folder)
    whole = on_error == "raise" or not source.lost_rows()
    if whole and (known := _load(path)) is not None:
        return known
    if on_error == "raise":
        source.check_complete()
    stats = _computed(source, wanted, policy=policy, missing=missing, on_error=on_error, progress=progress)
    if on_error == "raise":  # No row was left out.
        keep(path, json.dumps(stats.to_json()).encode())
    return stats


def known_stats(
    source: Source,
    columns: Sequence[str],
    *,
    policy: str | None,
    cache_folder: str | os.PathLike[str] | None,
) -> Stats | None:
    """What an earlier `read_stats` of the same rows and columns has kept; None: there is none."""
    wanted = wanted_leaves(source, columns, policy)
    return _load(_path_of(source, wanted, policy=policy, missing="error", cache_folder=cache_folder))


def _path_of(
    source: Source,
    wanted: Sequence[Leaf],
    *,
    policy: str | None,
    missing: Missing,
    cache_folder: str | os.PathLike[str] | None,
) -> str | None:
    """The file of the statistics of some columns; None: nothing is kept."""
    # The keys of segments change with their content: grown or rewritten data has another key.
    describe = {
        "version": _VERSION,
        "rows": [list(segment.key) for segment in source.segments],
        "columns": [leaf.name for leaf in wanted],
        "policy": policy,
        "missing": missing,
    }
    key = hashlib.blake2b(canonical_json(describe).encode(), digest_size=16).hexdigest()
    return kept_path("stats", f"{key}.json", cache_folder)


def _computed(
    source: Source,
    wanted: Sequence[Leaf],
    *,
    policy: str | None,
    missing: Missing,
    on_error: Literal["raise", "skip"],
    progress: Callable[[int], object] | None,
) -> Stats:
    # Of a tuple, all parts are read; new_obs brings new_obs_valid. A column may have a slash in its name,
    # which the name of its only leaf escapes.
    names = dict.fromkeys(
        leaf.name if leaf.path and all(isinstance(part, str) for part in leaf.path) else leaf.column
        for leaf in wanted
    )
    columns = with_step_columns(source, list(names))
    options = group_options(source, ReadOptions(columns=columns, on_error=on_error), missing)
    wanted = [leaf for leaf in wanted if is_named(leaf, options.columns)]  # Without those that are dropped.
    if not wanted:
        raise OptionError("missing='drop' leaves no column: the writers have none in common", uri=source.uri)
    gone = GoneSegments(on_error)

    def read(source: Source) -> Stats:
        moments = {leaf.name: Moments(leaf.spec.shape) for leaf in wanted}
        sample = Sample(sum(leaf.spec.row_bytes for leaf in wanted))
        counting = counting_of(source, options.columns)
        rows = 0
        for batch in _batches(SpanReader(source, options, counting, given_up=gone.given_up), policy):
            arrays = numbers_of(batch, wanted)
            for name, values in arrays.items():
                moments[name].add(values)
            sample.add(arrays)
            rows += batch.count
            if progress is not None:
                progress(batch.count)
        if not rows:
            raise OptionError("statistics need rows: all were skipped (on_error='skip')", uri=source.uri)
        quantiles = sample.quantiles()
        return Stats(
            {name: found.stats(quantiles[name]) for name, found in moments.items()},
            columns={leaf.name: (leaf.column, leaf.path) for leaf in wanted},
            dtypes={leaf.name: leaf.spec.numpy for leaf in wanted},
            rows=rows,
            quantile_rows=sample.rows,
        )

    return gone.read(source, read)


def _batches(reader: SpanReader, policy: str | None) -> Iterator[SampleBatch]:
    """The rows of a policy, or of the only one."""
    source = reader.source
    for where, rows in source.lost_rows():
        logger.warning("skipped %d rows of %s, which are missing: %s", rows, source.uri, where)
    most = max(1, _PART_BYTES // max((schema.row_bytes for schema in source.schemas.values()), default=1))
    for segment, spans in reader.in_turn(source.segments):
        for span in spans:
            folded = reader.read_folded(segment, span)
            for part in () if folded is None else folded.parts(most):
                batch = unfold([part])
                own = batch.get(policy or min(batch)) if isinstance(batch, MultiAgentBatch) else batch
                if own is not None and own.count:
                    yield own


# ---- the file ----


def _load(path: str | None) -> Stats | None:
    """The statistics in a file; None: there is none that can be read, so that they are computed again."""
    text = read_kept(path)
    try:
        return None if text is None else Stats.from_json(json.loads(text))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        logger.warning("%s holds no statistics (%r): they are computed again", path, error)
        return None


# ---- normalising ----


class _Array(NamedTuple):
    """An array of numbers in a column, at a path; its name is ``obs/position``."""

    name: str
    column: str
    path: Path
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class _Scale:
    """What brings the values of an array to the wanted range: (value - offset) / scale."""

    offset: NDArray[np.float64]
    scale: NDArray[np.float64]
    column: str
    path: Path


class Normaliser:
    """Normalises columns of batches: ``normaliser(batch)``. Made by `Stats.normaliser` or `of`.

    ``new_obs`` follows ``obs``. Values become float32. A value that is constant in the data becomes 0. The
    zeros in padded rows stay zeros. Other parts of nested columns stay as they are.

    Attributes:
        columns: Column, or part of one (``obs/position``) -> "mean_std" or "min_max".
        digest: 16 hex digits that identify the numbers; readers keep it in their states.
    """

    def __init__(self, columns: Mapping[str, Method], scales: Mapping[str, _Scale]) -> None:
        self.columns: dict[str, Method] = dict(columns)
        self._scales = dict(scales)
        #: Logical column -> the names of its scales.
        self._names: dict[str, set[str]] = {}
        for name, one in scales.items():
            self._names.setdefault(one.column, set()).add(name)
        numbers = {name: [one.offset.tolist(), one.scale.tolist()] for name, one in self._scales.items()}
        self.digest: str = hashlib.blake2b(canonical_json(numbers).encode(), digest_size=8).hexdigest()

    @classmethod
    def of_stats(
        cls, stats: Stats, columns: Mapping[str, Method] | Method, *, read: Collection[str] | None = None
    ) -> Self:
        """Return a normaliser of columns, each by its method.

        Args:
            stats: The statistics.
            columns: Column, or part of one -> method. Of a nested one, the arrays of floats are normalised.
                An array of integers must be named itself. A method alone is for the floats of ``obs``.
            read: The columns, or parts, that are read; None: all.

        Raises:
            MissingColumn: The statistics lack a column, or nothing of it is read.
            OptionError: A method is unknown, a column is ``new_obs``, has no floats to normalise, or has a
                value without statistics.
        """
        by_default = isinstance(columns, str)
        named = {Columns.OBS: columns} if isinstance(columns, str) else columns
        scales: dict[str, _Scale] = {}
        for name, method in named.items():
            if method not in _METHODS:
                raise OptionError(
                    f"normalise={excerpt(method)}: expected one of {', '.join(map(repr, _METHODS))}"
                )
            found = [
                _Array(leaf, *at, stats.dtypes[leaf])
                for leaf, at in stats.columns.items()
                if is_in(*at, (name,))
            ]
            if not found:
                raise MissingColumn(
                    f"the statistics have the columns {', '.join(stats)}{did_you_mean(name, stats)}",
                    column=name,
                )
            for array in _chosen(name, found, read=read, by_default=by_default):
                scales[array.name] = _scale(stats[array.name], method, array)
        return cls(named, scales)

    @classmethod
    def of(
        cls,
        value: Normalise,
        source: Source | None,
        *,
        policy: str | None = None,
        columns: Sequence[str] | None = None,
        missing: Missing = "error",
        on_error: Literal["raise", "skip"] = "raise",
    ) -> Normaliser:
        """Return the normaliser that the option ``normalise`` of a reader means.

        Args:
            value: A method, for the floats of ``obs``; or column, or part of one -> method; or statistics,
                for the floats of ``obs`` by "mean_std"; or a `Normaliser`.
            source: The data that is read; it has the statistics for the first two. None: not known yet.
            policy: The policy whose rows are read.
            columns: The columns, or parts, that are read; None: all.
            missing: What the reader does with columns that only some writers have; zeros of "fill" count.
            on_error: What it does with damaged rows; those that it skips do not count.

        Raises:
            OptionError: ``value`` is none of these; or rows of several agents are read together.
            MissingColumn: A column is not read, or does not exist.
        """
        if source is not None and policy is None and any(s.multi_agent for s in source.schemas.values()):
            raise OptionError("normalise is for the rows of one policy: pass policy=...", uri=source.uri)
        if isinstance(value, Normaliser):
            value._check_read(columns)
            return value
        if isinstance(value, Stats):
            return cls.of_stats(value, "mean_std", read=columns)
        assert source is not None  # The reader refuses a method without data.
        named: Any = {Columns.OBS: value} if isinstance(value, str) else value
        if not isinstance(named, Mapping) or not named or not set(named.values()) <= set(_METHODS):
            raise OptionError(
                f"normalise={excerpt(value)}: expected 'mean_std' or 'min_max', a dict of columns to "
                "these, Dataset.stats(...), or its normaliser(...)"
            )
        methods: dict[str, Method] = {}
        for name, method in named.items():  # Only what is normalised needs statistics.
            found = [
                _Array(leaf.name, leaf.column, leaf.path, leaf.spec.numpy)
                for leaf in named_leaves(source, name, policy)
                if is_numeric(leaf)
            ]
            for array in _chosen(name, found, read=columns, by_default=isinstance(value, str)):
                methods[array.name] = method
        stats = read_stats(
            source, list(methods), policy=policy, missing=missing, on_error=on_error, cache_folder=None
        )
        return cls.of_stats(stats, methods)

    def _check_read(self, columns: Collection[str] | None) -> None:
        """Refuse columns that are not read.

        Raises:
            MissingColumn: One is not among ``columns``.
        """
        for name, one in self._scales.items():
            if not is_in(one.column, one.path, columns):
                raise MissingColumn(
                    f"normalise names a column that columns={list(columns or ())} leaves out", column=name
                )

    def __repr__(self) -> str:
        return f"Normaliser({self.columns}, {self.digest})"

    def __call__(self, batch: Batch) -> SampleBatch:
        """Return the batch with normalised columns, which are new arrays; the others are the batch's own.

        Raises:
            MissingColumn: The batch has none of the columns.
            SchemaError: A column has another shape; or the batch has several agents.
        """
        if not isinstance(batch, SampleBatch):
            raise SchemaError("normalise is for the rows of one policy: pass policy=...")
        made = batch.copy(shallow=True)
        padding = _padding(batch)
        for source in self._names:
            for column in (source, Columns.NEXT_OBS) if source == Columns.OBS else (source,):
                if column in batch:
                    made[column] = self.apply(source, batch[column])
                    for path, leaf in leaves(made[column]) if padding is not None else ():
                        if leaf_name(source, path) in self._scales:
                            leaf[padding] = 0
        return made

    def apply(self, column: str, values: Any) -> Any:
        """Return normalised values of a column, nested like it: new float32 arrays, (..., *row)."""
        return self._each(column, values, lambda x, one: ((x - one.offset) / one.scale).astype(np.float32))

    def undo(self, column: str, values: Any) -> Any:
        """Return the values that `apply` normalised, float64."""
        return self._each(column, values, lambda x, one: x * one.scale + one.offset)

    def _each(self, column: str, values: Any, calculate: Any) -> Any:
        found, missing = leaves(values), set(self._names.get(column, ()))
        made = []
        for path, leaf in found:
            name = leaf_name(column, path)
            one = self._scales.get(name)
            if one is None:
                made.append(leaf)
                continue
            missing.discard(name)
            array = to_numpy(leaf)
            if array.shape[array.ndim - one.offset.ndim :] != one.offset.shape:
                raise SchemaError(
                    f"found values of shape {array.shape}, expected rows of shape {one.offset.shape}",
                    column=name,
                )
            made.append(calculate(array.astype(np.float64), one))
        if missing or column not in self._names:
            shown = f"the normalised columns are {', '.join(self._scales)}"
            raise MissingColumn(shown, column=min(missing, default=column))
        return (
            made[0] if not isinstance(values, dict | tuple) else unflatten([path for path, _ in found], made)
        )


#: What the option ``normalise`` of a reader takes.
Normalise: TypeAlias = Method | Mapping[str, Method] | Stats | Normaliser


def _chosen(
    name: str, found: Sequence[_Array], *, read: Collection[str] | None, by_default: bool
) -> list[_Array]:
    """The arrays to normalise of a column, or a part of one, that is named.

    Args:
        name: The name.
        found: Its arrays of numbers.
        read: What is read; None: all.
        by_default: Whether the column was not named by the user.

    Raises:
        OptionError: Only integers would be normalised, which may be choices or pictures; or new_obs is named.
        MissingColumn: None of it is read.
    """
    if column_of_name(name) == Columns.NEXT_OBS:
        raise OptionError("normalise: new_obs follows obs; name obs, or a part of it, alone")
    if any(array.column == Columns.INFOS and array.path for array in found):
        raise OptionError(f"normalise: {name} is of infos, which are served as recorded: leave it out")
    is_itself = len(found) == 1 and name in (found[0].name, found[0].column) and not by_default
    chosen = [array for array in found if is_itself or array.dtype.kind == "f"]
    if not chosen:
        shown = ", ".join(f"{array.name} ({array.dtype})" for array in found) or "no numbers"
        raise OptionError(
            f"normalise: {name} has no floats, but {shown}. Integers may be choices or pictures: to "
            "normalise them, name each, normalise={'obs/position': 'mean_std'}"
        )
    kept = [array for array in chosen if is_in(array.column, array.path, read)]
    if not kept:
        raise MissingColumn(
            f"normalise names a column that columns={list(read or ())} leaves out", column=name
        )
    return kept


def _scale(leaf: LeafStats, method: Method, array: _Array) -> _Scale:
    offset, scale = (leaf.mean, leaf.std) if method == "mean_std" else (leaf.min, leaf.max)
    if not (np.isfinite(offset) & np.isfinite(scale)).all():
        raise OptionError(
            f"normalise: {array.name} has an element without any finite value: leave the column out"
        )
    if method == "min_max":
        offset, scale = (offset / 2 + scale / 2), (scale / 2 - offset / 2)
    # A constant has a scale of 0, or of the rounding error of its mean.
    constant = scale <= 1e-12 * np.maximum(np.abs(offset), 1e-300)
    return _Scale(offset, np.where(constant, 1.0, scale), array.column, array.path)


def _padding(batch: SampleBatch) -> NDArray[np.bool_] | None:
    """Which rows are padding; None: none."""
    mask = batch.get("mask")  # Sequences with layout="time".
    if mask is not None and mask.dtype == np.bool_ and mask.ndim == 2:
        return ~to_numpy(mask)
    if not batch.zero_padded:
        return None
    length, sizes = batch.max_seq_len or 0, to_numpy(batch[Columns.SEQ_LENS])
    found: NDArray[np.bool_] = (np.arange(length) >= sizes[:, None]).reshape(-1)
    return found
