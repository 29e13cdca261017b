"""`rlio info`, `rlio head`, `rlio episodes`, `rlio stats`: what is in some data, and is it any good."""

# (Without `from __future__ import annotations`, see `rlio.cli.data`.)

import math
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rlio.cli.data import reads_data
from rlio.cli.failures import print_json
from rlio.cli.options import Json
from rlio.cli.spark import histogram, sparkline
from rlio.cli.tables import print_table, progress_of
from rlio.errors import OptionError
from rlio.support.words import counted, one_line

if TYPE_CHECKING:
    from rlio.dataset.dataset import Dataset
    from rlio.look.episode_table import EpisodeTable
    from rlio.look.stats import LeafStats, Stats

__all__ = ["episodes", "head", "info", "stats"]

#: Characters of a drawing.
_DRAWN: Final = 40
#: Episodes that are shown without ``--top``.
_EPISODES: Final = 30
#: Values of a row that a table shows; a larger array is named by its dtype and shape.
_VALUES: Final = 6
#: Values of a row that have a line each in the statistics.
_LINES: Final = 8
_COLUMNS = Annotated[
    list[str] | None, typer.Option("--column", "-c", help="Column, or part of one (obs/camera); repeatable.")
]


class MissingOption(Enum):
    """Values of ``--missing``."""

    error = "error"
    drop = "drop"
    fill = "fill"


_MISSING = Annotated[
    MissingOption, typer.Option("--missing", help="Columns that only some writers have; fill: with zeros.")
]


# ---- rlio info ----


@reads_data
def info(
    data: "Dataset",
    ranges: Annotated[
        bool, typer.Option("--ranges", help="Read all columns with numbers, for ranges and shares of NaN.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what the data is and holds: rows, episodes, returns, columns, spaces, times."""
    found = data.info(ranges=ranges)
    if as_json:
        print_json(found.as_dict())
        return
    typer.echo(repr(found))
    for line in _drawings(data.episodes):
        typer.echo(line)
    for note in found.notes:
        typer.echo(f"note: {note}")


def _drawings(table: "EpisodeTable") -> Iterator[str]:
    """The returns over the episodes, and a histogram of the lengths, if there is anything to see."""
    if len(table) < 2:
        return
    encoding = sys.stdout.encoding
    for name, drawn, low, high in (
        ("returns over episodes", sparkline(table["return"], width=_DRAWN, encoding=encoding), "", ""),
        (
            "histogram of lengths",
            histogram(table["length"], width=_DRAWN // 2, encoding=encoding),
            f"{int(table['length'].min()):,} ",
            f" {int(table['length'].max()):,}",
        ),
    ):
        if drawn:
            yield f"{name:<22} {low}{drawn}{high}"


# ---- rlio head ----


@reads_data
def head(
    data: "Dataset",
    rows: Annotated[int, typer.Option("-n", "--rows", min=1, help="How many rows.")] = 5,
    columns: _COLUMNS = None,
    missing: _MISSING = MissingOption.error,
    frames: Annotated[
        int | None, typer.Option(min=1, help="Write this many frames of an episode as PNG files instead.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Folder of the frames.")] = None,
    number: Annotated[int, typer.Option("--number", help="Number of the episode of the frames.")] = 0,
    as_json: Json = False,
) -> None:
    """Show the first rows; or, with --frames N -o FOLDER, write frames of an episode as PNG files."""
    if (frames is None) != (out is None):
        raise OptionError("--frames N and -o FOLDER belong together: pass both, or neither")
    if frames is not None and out is not None:
        _write_frames(data, frames, out, columns, number, as_json=as_json)
        return
    found = list(islice(_rows_of(data, rows, columns, missing), rows))
    if as_json:
        print_json({"rows": [_json(row) for row in found]})
        return
    if not found:
        typer.echo(f"{data.uri} has no rows")
        return
    names = list(found[0])
    cells = [[f"{place:,}", *(_cell(row[name]) for name in names)] for place, row in enumerate(found)]
    print_table(f"{counted(len(found), 'row')} of {len(data):,}", ["row", *map(_cell, names)], cells)


def _rows_of(
    data: "Dataset", most: int, columns: list[str] | None, missing: MissingOption
) -> Iterator[dict[str, Any]]:
    """The first rows, as dicts of values and arrays."""
    if not any(schema.multi_agent for schema in data.schemas.values()):
        count = min(most, len(data))
        yield from data.take(range(count), columns=columns, missing=missing.value).rows() if count else ()
        return
    # Rows of several agents: those of a joint step follow each other, with the column policy_id.
    with data.to_arrow_batches(columns=columns, missing=missing.value) as batches:
        for batch in batches:
            columns_of = [_values_of(column) for column in batch.columns]
            for row in zip(*columns_of, strict=True):
                yield dict(zip(batch.schema.names, row, strict=True))


def _values_of(column: Any) -> list[Any]:
    """The values of an Arrow array: times of NumPy, because those of Python reach from year 1 to 9999."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_fixed_size_list(kind):
        parts = _values_of(column.flatten())
        return [parts[at : at + kind.list_size] for at in range(0, len(parts), kind.list_size)]
    if pa.types.is_date(kind) or pa.types.is_duration(kind) or (pa.types.is_timestamp(kind) and not kind.tz):
        return [*column.to_numpy(zero_copy_only=False)]
    found: list[Any] = column.to_pylist()
    return found


def _write_frames(
    data: "Dataset", count: int, folder: Path, columns: list[str] | None, number: int, *, as_json: bool
) -> None:
    if columns is not None and len(columns) > 1:
        raise OptionError("--column: frames are of one column: pass one")
    column = columns[0] if columns else None
    try:
        episode = data.episode(number)
    except IndexError as error:
        raise OptionError(f"--number {number}: {error}") from error
    paths = episode.write_frames(folder, count, column=column)
    if as_json:
        print_json({"frames": paths})
    else:
        for path in paths:
            typer.echo(path)


def _cell(value: Any) -> str:
    """A value in a table: short arrays whole, longer ones by dtype and shape."""
    import numpy as np

    if isinstance(value, dict):
        return "{" + ", ".join(f"{_cell(key)}: {_cell(part)}" for key, part in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_cell, value)) + ")"
    if isinstance(value, float | np.floating):
        return f"{value:.6g}"
    if isinstance(value, list | np.ndarray):
        array = np.asarray(value)
        if array.dtype == object or array.size > _VALUES:
            return f"{array.dtype} {array.shape}"
        return "[" + ", ".join(_cell(part) for part in array) + "]"
    return one_line(str(value), 60)


# ---- rlio episodes ----


@reads_data
def episodes(
    data: "Dataset",
    sort: Annotated[
        str | None, typer.Option(help="Column to sort by, such as return or length; the greatest first.")
    ] = None,
    ascending: Annotated[bool, typer.Option("--ascending", help="The least first.")] = False,
    top: Annotated[int | None, typer.Option(min=1, help="Only this many, after sorting.")] = None,
    where: Annotated[
        str | None, typer.Option(help="Only episodes that pass, such as 'return > 100 and not truncated'.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the episodes: return, length and end of each; sorted, filtered, the best ones."""
    if ascending and sort is None:
        raise OptionError("--ascending needs --sort COLUMN")
    found = data.episodes
    if where is not None:
        found = found.filter(where)
    if sort is not None:
        found = found.sort(sort, descending=not ascending)
    shown = found if top is None else found[:top]
    if as_json:
        print_json({"episodes": [_json(row) for row in shown]})
        return
    _print_episodes(shown if top is not None else shown[:_EPISODES])
    rest = len(shown) - _EPISODES if top is None else 0
    if rest > 0:
        typer.echo(f"and {counted(rest, 'more episode')}: --top {len(shown)} shows all")
    unfinished = int((~found["finished"]).sum())
    writers = {writer for writer in found["writer"] if writer}
    parts = [
        counted(len(found), "episode"),
        *([f"{unfinished:,} unfinished"] if unfinished else []),
        *([counted(len(writers), "writer")] if writers else []),
    ]
    typer.echo(f"{data.uri}: {', '.join(parts)}")
    for line in _drawings(found):
        typer.echo(line)


def _print_episodes(table: "EpisodeTable") -> None:
    # A column that says nothing is left out.
    several = len(set(table["writer"])) > 1
    names = [name for name in table.columns if name != "writer" or several]
    rows = [[_episode_cell(row[name]) for name in names] for row in table]
    print_table(counted(len(rows), "episode"), names, rows)


def _episode_cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    return "" if value is None else _cell(value)


# ---- rlio stats ----


@reads_data
def stats(
    data: "Dataset",
    columns: _COLUMNS = None,
    missing: _MISSING = MissingOption.error,
    policy: Annotated[
        str | None, typer.Option(help="With several policies, the one whose rows count.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show mean, deviation, range, quantiles and NaN of each column. Reads all rows, once."""
    with progress_of(as_json=as_json, unit=" rows")("stats", len(data)) as advance:
        found = data.stats(columns, policy=policy, missing=missing.value, progress=advance)
    if as_json:
        print_json(_json(found.to_json()))
        return
    print_table(
        f"{counted(found.rows, 'row')}, quantiles of {found.quantile_rows:,}",
        ["column", "mean", "std", "min", "10 %", "median", "90 %", "max", "NaN"],
        [row for name in found for row in _stat_rows(name, found)],
    )


def _stat_rows(name: str, found: "Stats") -> Iterator[list[str]]:
    """A line for each value of a row; of many values, one line of all."""
    leaf = found[name]
    shape = leaf.count.shape
    if leaf.count.size > _LINES:
        yield _joint_row(f"{_cell(name)} {shape}", leaf)
        return
    fields = (leaf.mean, leaf.std, leaf.min, leaf.q10, leaf.q50, leaf.q90, leaf.max)
    for place in _places(shape):
        label = f"{_cell(name)}[{', '.join(map(str, place))}]" if place else _cell(name)
        yield [
            label,
            *(f"{field[place]:.6g}" for field in fields),
            _nans(int(leaf.nan[place]), leaf.count[place]),
        ]


def _joint_row(label: str, leaf: "LeafStats") -> list[str]:
    """Mean, deviation and range of all values of a row together; quantiles are known only of each."""
    import numpy as np

    known = leaf.count > 0
    if not known.any():
        return [label, *["nan"] * 7, _nans(int(leaf.nan.sum()), 0)]
    share = leaf.count[known] / leaf.count[known].sum()
    mean = float((leaf.mean[known] * share).sum())
    square = float(((leaf.std[known] ** 2 + leaf.mean[known] ** 2) * share).sum())
    std = math.sqrt(max(0.0, square - mean**2))
    low, high = float(np.min(leaf.min[known])), float(np.max(leaf.max[known]))
    shown = [f"{mean:.6g}", f"{std:.6g}", f"{low:.6g}", "", "", "", f"{high:.6g}"]
    return [label, *shown, _nans(int(leaf.nan.sum()), int(leaf.count.sum()))]


def _places(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    import numpy as np

    yield from np.ndindex(*shape)


def _nans(nan: int, finite: int) -> str:
    return f"{nan / (nan + finite):.2%}" if nan else ""


# ---- JSON ----


def _json(value: Any) -> Any:
    """A value as JSON: null for NaN, infinities and unknown times, ISO 8601 for times.

    A duration is NumPy's text of it, such as ``90 seconds``.
    """
    import numpy as np

    if isinstance(value, dict):
        return {str(key): _json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_json(part) for part in value]
    if isinstance(value, np.datetime64 | np.timedelta64):  # Python has no nanoseconds, and few years.
        return None if np.isnat(value) else str(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "mM":
        return [_json(part) for part in value] if value.ndim else _json(value[()])
    if isinstance(value, np.ndarray | np.generic):
        return _json(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime):
        return value.isoformat()
    return value if isinstance(value, str | int | bool | None) else str(value)
