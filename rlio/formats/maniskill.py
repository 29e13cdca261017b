"""ManiSkill's HDF5 (`RecordEpisode`): one group ``traj_<i>`` an episode, and a JSON file beside it.

A group of N steps has ``actions``, ``terminated``, ``truncated`` and perhaps ``rewards``, ``success`` and
``fail`` with N rows; ``obs`` and ``env_states`` have N+1, the last of which is final. Row t has the
observation before action t, and the reward and the flags that followed it. ``obs`` is an array, or groups in
groups. A flag before the last row ends nothing: recordings go on after the task was done.

The JSON file of the same name states the environment and the steps of each episode.
"""

from __future__ import annotations

import re
from typing import Any, Final

from rlio.batch.columns import Columns
from rlio.errors import CorruptData, DataNotFound, MissingColumn, excerpt
from rlio.formats.files.json_files import parse_json
from rlio.formats.format import Format, Marks, with_all_of
from rlio.formats.place import Place
from rlio.formats.sink import Origin
from rlio.formats.tables.hdf5 import Hdf5Table
from rlio.formats.tables.mapping import MappedSource
from rlio.limits import Limits
from rlio.mapping import DERIVE, Mapping
from rlio.storage import InputFile, open_input
from rlio.support.calls import closing_on_error

_KNOWN: Final = ("obs", "actions", "rewards", "terminated", "truncated")
_FLAGS: Final = ("terminated", "truncated")
_EPISODE: Final = re.compile("traj_[0-9]+")


def _is_maniskill(paths: frozenset[str]) -> bool:
    episodes = {path for path in paths if _EPISODE.fullmatch(path)}
    return any({f"{path}/{name}" for name in ("actions", *_FLAGS)} <= paths for path in episodes)


FORMAT = Format(
    name="maniskill",
    title="ManiSkill",
    marks=Marks(hdf5=_is_maniskill, json=with_all_of({"env_info", "episodes"}), endings=(".h5", ".hdf5")),
    source="rlio.formats.maniskill:open_maniskill",
    about="All observations and both flags are read, and the environment's id from the JSON file beside it.",
)


def open_maniskill(place: Place, *, limits: Limits) -> MappedSource:
    """The trajectories of ManiSkill's files.

    Raises:
        MissingColumn: They have no observations.
        CorruptData: The JSON file states other steps.
    """
    files = tuple(_with_ending(file, ".h5") if file.path.endswith(".json") else file for file in place.files)
    place = Place.of_files(files)
    table = Hdf5Table(place, limits=limits, last_only=_FLAGS)
    with closing_on_error(table):
        names = table.tree("traj_*")
        if "obs" not in names:
            raise MissingColumn(
                "the trajectories have no obs: they hold states of the simulator; make observations of them "
                "with python -m mani_skill.trajectory.replay_trajectory --traj-path ... -o state --save-traj",
                uri=place.uri,
                column="obs",
            )
        more, left_out = table.further("traj_*", known=_KNOWN, like="actions", lacks=1)
        rewards = {Columns.REWARDS: "rewards"} if "rewards" in names else {}
        columns = {Columns.OBS: "obs", Columns.ACTIONS: "actions", **rewards, **more}
        source = MappedSource(
            table,
            Mapping(
                columns,
                episode="traj_*",
                terminated="terminated",
                truncated="truncated",
                next_obs=DERIVE,
                final_row=True,
            ),
        )
        source.origin = _origin(place, table, limits)
    if table.early:
        source.notes.append(
            f"Rows before the last are marked as ends in {len(table.early)} trajectories: rlio reads them as "
            "steps after which the recording went on, not as ends."
        )
    source.left_out = left_out
    return source


def _origin(place: Place, table: Hdf5Table, limits: Limits) -> Origin:
    """The environment, as the JSON file beside the first file states it; checks the steps of all files."""
    env: str | None = None
    for number, file in enumerate(place.files):
        about = _beside(file, limits)
        if about is None:
            continue
        info = about.get("env_info")
        found = info.get("env_id") if isinstance(info, dict) else None
        env = env or (found if isinstance(found, str) else None)
        steps = dict(table.episodes_of(number))
        episodes = about.get("episodes")
        for episode in episodes if isinstance(episodes, list) else ():
            about_one = episode if isinstance(episode, dict) else {}
            name, stated = f"traj_{about_one.get('episode_id')}", about_one.get("elapsed_steps")
            if name in steps and isinstance(stated, int) and stated != steps[name] - 1:
                raise CorruptData(
                    f"{name} has {steps[name] - 1} steps, expected the {excerpt(stated)} that the JSON file "
                    "beside it states",
                    uri=file.uri,
                )
    return Origin(uri=place.uri, env=env)


def _beside(file: InputFile, limits: Limits) -> dict[str, Any] | None:
    """The JSON object in the file of the same name; None: there is none."""
    beside = _with_ending(file, ".json")
    try:
        with open_input(beside) as stream:
            text = stream.read(limits.schema_bytes + 1)
    except (DataNotFound, FileNotFoundError):
        return None
    found = parse_json(text, "the description", uri=beside.uri, limits=limits)
    return found if isinstance(found, dict) else None


def _with_ending(file: InputFile, ending: str) -> InputFile:
    """The file of the same name with another ending."""
    path, uri = (re.sub(r"\.[^./]+$", ending, text) for text in (file.path, file.uri))
    return InputFile(file.fs, path, uri, None)
