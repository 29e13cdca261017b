"""NPZ files by the names of other libraries: OGBench, and D4RL.

*OGBench*: ``observations``, ``actions`` and ``terminals``, which is 1 in the last row of each trajectory.
That row has its final observation; its action leads nowhere, and is left out, as OGBench's own loader does.
No end is a termination: a trajectory was cut after so many steps. Files have no rewards. Further arrays, such
as ``qpos``, ``qvel`` and ``button_states``, belong to the observation of their row.

*D4RL's names*: ``observations``, ``actions``, ``rewards`` and ``terminals``, and perhaps ``timeouts`` and
``next_observations``; see `rlio.formats.d4rl`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import Final

import numpy as np

from rlio.batch.columns import Columns, is_per_sequence
from rlio.errors import RlioError, StoreError, UnknownLayout
from rlio.formats.files.step_columns import suggested_mapping
from rlio.formats.files.value_arrays import flags_in, one_a_row
from rlio.formats.format import Format, Marks
from rlio.formats.place import Place
from rlio.formats.tables.mapping import MappedSource
from rlio.formats.tables.npz import NpzTable
from rlio.formats.tables.table import Rows
from rlio.limits import Limits
from rlio.mapping import DERIVE, Mapping
from rlio.support.calls import closing_on_error

logger: logging.Logger = logging.getLogger("rlio")

_OGBENCH: Final = frozenset(("observations", "actions", "terminals"))
_D4RL: Final = frozenset((*_OGBENCH, "rewards"))
_NEXT: Final = "next_observations"
_TIMEOUTS: Final = "timeouts"
#: Names of other layouts: rlio's own columns, and flags with another meaning.
_OTHERS: Final = frozenset(
    (Columns.OBS, Columns.NEXT_OBS, Columns.EPS_ID, Columns.T, Columns.DONES, "lengths", "episode_ends")
) | {Columns.TERMINATEDS, Columns.TRUNCATEDS, Columns.NEXT_OBS_VALID, "masks", "valids", "episode_terminals"}


#: What the names of OGBench's files for validation end with.
_HELD_OUT: Final = "-val.npz"


def _is_ogbench(names: Collection[str]) -> bool:
    return _OGBENCH.issubset(names) and (_OTHERS | {"rewards", _NEXT, _TIMEOUTS}).isdisjoint(names)


def _is_d4rl(names: Collection[str]) -> bool:
    return _D4RL.issubset(names) and _OTHERS.isdisjoint(names)


FORMATS: Final = (
    Format(
        name="ogbench",
        title="OGBench",
        marks=Marks(npz=_is_ogbench, endings=(".npz",)),
        source="rlio.formats.tables.known_npz:open_ogbench",
        about="The last row of a trajectory is its final observation. All ends are truncations; no rewards.",
    ),
    Format(
        name="d4rl-npz",
        title="NPZ with D4RL's names",
        marks=Marks(npz=_is_d4rl, endings=(".npz",)),
        source="rlio.formats.tables.known_npz:open_d4rl_npz",
        about="Timeouts are truncations. Final observations are known only with next_observations.",
    ),
)


def open_ogbench(place: Place, *, limits: Limits) -> MappedSource:
    """The trajectories of OGBench's NPZ.

    Raises:
        UnknownLayout: The last row does not end a trajectory.
    """
    table = NpzTable(place, limits=limits)
    with closing_on_error(table):
        table.lengths = list(_trajectories(table))
        more, left_out = _further(table, _OGBENCH)
        columns = {Columns.OBS: "observations", Columns.ACTIONS: "actions", **more}
        source = MappedSource(table, Mapping(columns, truncated=True, next_obs=DERIVE, final_row=True))
    source.notes.append(
        "The last row of each trajectory is its final observation, as OGBench's loader reads it: its action "
        "is left out. terminals end trajectories that were cut; none of them terminated."
    )
    held_out = [file.uri for file in place.files if file.uri.endswith(_HELD_OUT)]
    if 0 < len(held_out) < len(place.files):
        source.notes.append(
            f"{held_out[0]} holds trajectories for validation, which are read with the others: pass the "
            "paths of the other files to leave them out"
        )
        logger.warning("%s", source.notes[-1])
    source.left_out = left_out
    return source


def open_d4rl_npz(place: Place, *, limits: Limits) -> MappedSource:
    """The episodes of NPZ with D4RL's names."""
    table = NpzTable(place, limits=limits)
    with closing_on_error(table):
        more, left_out = _further(table, {*_D4RL, _TIMEOUTS, _NEXT})
        names = {Columns.OBS: "observations", Columns.ACTIONS: "actions", Columns.REWARDS: "rewards"}
        source = MappedSource(
            table,
            Mapping(
                {**names, **more},
                terminated="terminals",
                truncated=_TIMEOUTS if _TIMEOUTS in table.names else None,
                next_obs=_NEXT if _NEXT in table.names else DERIVE,
            ),
        )
    if not {_TIMEOUTS, _NEXT} & {*table.names}:
        source.notes.append(
            f"{source.uri} has no timeouts and no next observations: an episode that a time limit cut is "
            "joined with the next one"
        )
        logger.warning("%s", source.notes[-1])
    source.left_out = left_out
    return source


def _trajectories(table: NpzTable) -> Iterator[int]:
    """The rows of each trajectory, the final one included."""
    for file, rows in enumerate(table.rows):
        found = table.read(Rows(file, 0, rows), ["terminals"])["terminals"]
        ends = np.array(flags_in("terminals", one_a_row(Columns.TERMINATEDS, found)), np.bool_)
        if rows and not ends[-1]:
            raise UnknownLayout(
                "found OGBench's names, and no end in the last row of terminals, which OGBench's files have: "
                f"say what the columns mean: {suggested_mapping(list(table.names))} (docs/mapping.md)",
                uri=table.files[file].uri,
                column="terminals",
            )
        bounds = [0, *(np.flatnonzero(ends) + 1).tolist()]
        yield from (stop - start for start, stop in pairwise(bounds))


def _further(table: NpzTable, known: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Further arrays with a row a step as columns of their names, and the names of the others."""
    columns: dict[str, str] = {}
    left_out: list[str] = []
    for name in table.names:
        if name in known:
            continue
        try:
            is_plain = name and "/" not in name and not is_per_sequence(name)
            values = table.read(Rows(0, 0, 1), [name])[name] if is_plain else None
            Mapping({Columns.OBS: "observations", name: name})
        except StoreError:
            raise
        except RlioError:
            values = None
        if values is None or values.dtype.kind not in "biuf":
            left_out.append(name)
        else:
            columns[name] = name
    return columns, sorted(left_out)
