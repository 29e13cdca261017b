"""Robomimic's HDF5: one group a demonstration.

``data`` has the attributes ``total`` (steps) and ``env_args`` (JSON), and the groups ``demo_<i>`` with the
attribute ``num_samples``, the datasets ``actions``, ``rewards``, ``dones`` and ``states`` (N rows each) and
the groups ``obs`` and ``next_obs``, a dataset for each key. ``mask`` has lists of demonstrations by name.
Row t has the observation, the action, and the reward that followed it; row t of ``next_obs`` is the
observation after it.

Isaac Lab records the same layout, with groups in groups: ``obs/datagen_info/object_pose``, and
``states/articulation/robot/joint_position``, which are those after the step. Its files have no rewards and no
``dones``, and the environment's name in ``env_args``. Observations may be one dataset, actions a group.

Other members with a row a step, such as ``robot_states`` of LIBERO and ``datagen_info`` of MimicGen, are
further columns if all demonstrations have them alike. What is not read is named in the report.

A demonstration is one episode, which is terminated if its last row is done. Truncation is not stored. What
``dones`` means depends on the option ``done_mode`` of robomimic's dataset_states_to_obs.py, which files do
not keep: 0, the row led to a success; 1, it is the last one; 2, both. So if all last rows are done, the
report says that terminations are not known.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.columns import AGENT_ID, TRAJECTORY, Columns, is_per_sequence
from rlio.batch.nested import leaves
from rlio.errors import CorruptData, MissingColumn, OptionError, SchemaError, UnsafeData, excerpt
from rlio.formats.files.hdf5_files import leaves_of
from rlio.formats.files.step_rows import flags_of, flat, one_more
from rlio.formats.files.value_arrays import flags_in
from rlio.formats.format import Format, Holds, Marks
from rlio.formats.hdf5_sink import Hdf5Sink
from rlio.formats.hdf5_source import Hdf5Source
from rlio.formats.place import Place
from rlio.formats.sink import Origin, PreparedEpisode
from rlio.limits import Limits
from rlio.source.episodes import without_final_obs
from rlio.storage.filesystem import Storage
from rlio.support.progress import each

FORMAT = Format(
    name="robomimic",
    title="Robomimic",
    marks=Marks(
        hdf5=lambda paths: any(re.fullmatch("data/demo_[0-9]+", path) for path in paths),
        endings=(".hdf5", ".h5"),
    ),
    source="rlio.formats.robomimic:RobomimicSource",
    writer="rlio.formats.robomimic:RobomimicSink",
    holds=Holds(
        obs="keys",
        extra="dicts",
        slash=False,
        reserved="next_obs|dones",
        needs_rewards=False,
        ends="terminated",
        ids="none",
        start=False,
        environment="robomimic",
    ),
    about="A demonstration is an episode. Truncation is not stored: without done, it is unfinished.",
)

_DEMO = re.compile("demo_([0-9]{1,9})")
#: Members and attributes of a demonstration that are no further columns.
_KNOWN = ("obs", "next_obs", "actions", "rewards", "dones")
_OURS = TRAJECTORY | {AGENT_ID, Columns.DONES}
_KNOWN_ATTRIBUTES = ("num_samples",)
#: Path in a column -> dtype, and shape of a row.
_Kinds: TypeAlias = dict[str, tuple[str, tuple[int, ...]]]
#: Robomimic needs a description.
_NO_ENVIRONMENT = '{"env_name": "", "type": 2, "env_kwargs": {}}'
#: Attribute of ``data`` in files of rlio: observations were one array, under this key.
_PLAIN = "rlio_obs"


class RobomimicSource(Hdf5Source):
    """The demonstrations of one or several files; an `EpisodeSource`.

    Args:
        place: The files.
        limits: Bounds on the files.
        mask: Name of a list of demonstrations in ``mask``, such as ``"train"``; None: all.

    Raises:
        OptionError: There is no such list.
        CorruptData: The list names demonstrations that are absent.
    """

    def __init__(self, place: Place, *, limits: Limits, mask: str | None = None) -> None:
        self._mask = mask
        self.origin: Origin = Origin(uri=place.uri)
        self._some_without_next = False
        #: How many demonstrations have rewards, and which have none.
        self._rewarded = 0
        self._unrewarded: set[tuple[int, str]] = set()
        #: (Number of the file, name) of the demonstrations that cannot be read -> what is wrong.
        self._damaged: dict[tuple[int, str], CorruptData | SchemaError] = {}
        #: Further columns: those that all demonstrations have.
        self._beside: dict[str, _Kinds] | None = None
        self._left_out: set[str] = set()
        super().__init__(place, limits=limits)

    def _index(self, number: int) -> Iterator[tuple[str, int]]:
        data = self._handles.member(number, "data")
        about = data.attrs.get("env_args")
        if isinstance(about, str) and number == 0:
            self.origin = Origin(uri=self.uri, env=about)
        done_before = done_last = seen = 0
        for name in each(self._chosen(number, data)):
            steps, dones = self._demonstration(number, data, name)
            done_before += int(dones[:-1].any())
            done_last += int(dones[-1:].any())
            if steps:
                seen += 1
                yield name, steps
        if done_before:
            self.notes.append(
                f"Rows before the last are marked as done in {done_before} demonstrations: rlio "
                "reads them as steps at which the task was done, not as ends."
            )
        if done_last and done_last == seen:
            self.notes.append(
                f"The last row of each of {seen} demonstrations is marked as done. robomimic's done_mode 1 "
                "and 2 mark it whether or not the task was done: terminateds may be ends of the recording."
            )

    def _chosen(self, number: int, data: Any) -> list[str]:
        """The names of the demonstrations that are read, by their numbers."""
        names = [name for name in data if _DEMO.fullmatch(name)]
        if self._mask is not None:
            chosen = self._named(number, self._mask, {*names})
            names = [name for name in names if name in chosen]
        return sorted(names, key=lambda name: (int(name.removeprefix("demo_")), name))

    def _demonstration(self, number: int, data: Any, name: str) -> tuple[int, NDArray[Any]]:
        """Check a demonstration; gives its steps, and their flags, if it has some."""
        group = self._handles.child(data, name)
        members = list(group)
        try:
            steps = self._checked_steps(number, name, group, members)
        except UnsafeData:
            raise
        except (CorruptData, SchemaError) as error:
            # Raised, or skipped, when it is read: the others are whole.
            self._damaged[number, name] = error
            return self._steps_of_damaged(number, name, members), np.zeros(0, np.bool_)
        self._some_without_next |= "next_obs" not in members
        if "rewards" in members:
            self._rewarded += 1
        else:
            self._unrewarded.add((number, name))
        if steps:
            self._look_beside(number, name, group, members, steps)
        if "dones" not in members:
            return steps, np.zeros(0, np.bool_)
        return steps, self._values(number, f"data/{name}/dones")

    def _checked_steps(self, number: int, name: str, group: Any, members: Sequence[str]) -> int:
        """The steps of a demonstration.

        Raises:
            MissingColumn: It has no observations or actions.
            CorruptData: Its parts have unlike lengths.
        """
        if "obs" not in members:
            raise MissingColumn(
                f"{name} has no obs: it holds states of the simulator; make observations of them with "
                "robomimic's dataset_states_to_obs.py",
                column=Columns.OBS,
            )
        if "actions" not in members:
            raise MissingColumn(f"{name} has no actions", column=Columns.ACTIONS)
        steps = self._steps(number, f"data/{name}/actions")
        if int(group.attrs.get("num_samples", steps)) != steps:
            raise CorruptData(f"{name} has {steps} actions, num_samples says {group.attrs['num_samples']}")
        of_steps = [one for one in ("rewards", "dones") if one in members]
        self._check_rows(number, [f"data/{name}/{one}" for one in of_steps], steps)
        return steps

    def _steps_of_damaged(self, number: int, name: str, members: Sequence[str]) -> int:
        """The steps of a demonstration that cannot be read, by any part of it; at least 1, to be counted."""
        for one in _KNOWN:
            with contextlib.suppress(CorruptData, SchemaError):
                if one in members and (steps := self._steps(number, f"data/{name}/{one}")):
                    return steps
        return 1

    def _named(self, number: int, mask: str, known_demos: set[str]) -> set[str]:
        if self._handles.member(number, f"mask/{mask}") is None:
            known = self._handles.member(number, "mask")
            raise OptionError(f"mask={excerpt(mask)}: expected one of {excerpt(list(known or ()))}")
        found = self._values(number, f"mask/{mask}").tolist()
        chosen = {name.decode() if isinstance(name, bytes) else str(name) for name in found}
        if absent := sorted(chosen - known_demos):
            raise CorruptData(
                f"mask/{mask} names demonstrations that are absent: {excerpt(absent)}; expected those in "
                "data: write the list again (robomimic's split_train_val.py), or leave out mask="
            )
        return chosen

    def load_part(self, episode: int, start: int, stop: int, columns: frozenset[str] | None) -> SampleBatch:
        """See `PartSource`. If some demonstrations have rewards, those without are damaged."""
        wanted = columns is None or Columns.REWARDS in columns
        if wanted and self._rewarded and (place := self._places[episode]) in self._unrewarded:
            raise MissingColumn(
                f"{place[1]} has no rewards, and {self._rewarded} demonstrations have some: pass columns= "
                "without rewards, or on_error='skip'",
                column=Columns.REWARDS,
            )
        return super().load_part(episode, start, stop, columns)

    def _rows(self, number: int, key: str, rows: range, steps: int) -> SampleBatch:
        if (number, key) in self._damaged:
            raise self._damaged[number, key].with_traceback(None)
        root = f"data/{key}"
        group = self._handles.member(number, root)
        if "next_obs" in group:
            columns = {
                name: self._observations(number, f"{root}/{path}", rows, steps)
                for name, path in ((Columns.OBS, "obs"), (Columns.NEXT_OBS, "next_obs"))
            }
        else:
            observations = self._observations(number, f"{root}/obs", one_more(rows), steps)
            columns = without_final_obs(observations, len(rows))
        if self._some_without_next:  # All demonstrations have the same columns.
            columns.setdefault(Columns.NEXT_OBS_VALID, np.ones(len(rows), np.bool_))
        columns[Columns.ACTIONS] = self._nested(number, f"{root}/actions", rows, steps)
        if "rewards" in group:
            columns[Columns.REWARDS] = flat(self._read(number, f"{root}/rewards", rows, steps))
        done = "dones" in group and self._is_done(number, f"{root}/dones", steps)
        columns[Columns.TERMINATEDS] = flags_of(rows, steps, terminated=done, truncated=False)[
            Columns.TERMINATEDS
        ]  # Whether an episode was truncated is not stored.
        for name in self._beside or ():
            columns[name] = self._nested(number, f"{root}/{name}", rows, steps)
        return SampleBatch(columns)

    def _wanted(
        self, number: int, key: str, rows: range, steps: int
    ) -> Iterator[tuple[str, Sequence[tuple[int, int]]]]:
        root = f"data/{key}"
        members = self._handles.member(number, root)
        for name in ("obs", "next_obs", "actions", "rewards", *(self._beside or ())):
            if name in members:
                more = name == "obs" and "next_obs" not in members
                yield f"{root}/{name}", [(rows.start, rows.stop + more)]
        if "dones" in members:
            yield f"{root}/dones", [(steps - 1, steps)]

    def _is_done(self, number: int, path: str, steps: int) -> bool:
        return bool(
            flags_in("dones", self._handles.read(self._handles.checked(number, path), steps - 1, steps))[0]
        )

    def _look_beside(self, number: int, demo: str, group: Any, members: Sequence[str], steps: int) -> None:
        """Note what a demonstration has of each step besides the columns that robomimic knows."""
        found: dict[str, _Kinds] = {}
        for name in members:
            if name in _KNOWN:
                continue
            kinds = (
                None
                if name in _OURS or is_per_sequence(name)
                else self._kinds(number, f"data/{demo}/{name}", steps)
            )
            if kinds:
                found[name] = kinds
            else:
                self._left_out.add(name)
        self._left_out.update(
            f"{name} (an attribute)" for name in group.attrs if name not in _KNOWN_ATTRIBUTES
        )
        if self._beside is None:
            self._beside = found
        # All demonstrations have the same columns.
        unlike = {name for name in {*found, *self._beside} if found.get(name) != self._beside.get(name)}
        self._left_out |= unlike
        self._beside = {name: kinds for name, kinds in self._beside.items() if name not in unlike}

    def _kinds(self, number: int, path: str, steps: int) -> _Kinds | None:
        """Dtype and row shape of a dataset, or of those in a group; None: it has other rows than steps."""
        try:
            tree = self._handles.tree(number, path)
        except SchemaError:  # Nothing is in it.
            return None
        found: _Kinds = {}
        for key in leaves_of(tree):
            try:
                member = self._handles.checked(number, path + key)
            except UnsafeData:
                return None
            if member.shape[:1] != (steps,) or member.dtype.kind not in "biuf":
                return None
            found[key] = (member.dtype.str, member.shape[1:])
        return found

    def _steps(self, number: int, path: str) -> int:
        """The rows of a dataset, or of the first one in a group."""
        tree = self._handles.tree(number, path)
        return self._rows_in(number, leaves_of(tree, path)[0])

    def _nested(self, number: int, path: str, rows: range, steps: int) -> Any:
        """Rows of a dataset, or of those in a group."""

        def read(path: str, tree: Any) -> Any:
            if not isinstance(tree, dict):
                return self._read(number, path, rows, steps)
            return {name: read(f"{path}/{name}", inner) for name, inner in tree.items()}

        return read(path, self._handles.tree(number, path))

    @property
    def left_out(self) -> list[str]:
        """Members of demonstrations that are not read."""
        return sorted(self._left_out)

    def _observations(self, number: int, path: str, rows: range, steps: int) -> Any:
        found = self._nested(number, path, rows, steps)
        plain = self._handles.member(number, "data").attrs.get(_PLAIN)
        return found.get(plain, found) if isinstance(found, dict) else found


class RobomimicSink(Hdf5Sink):
    """Writes one file; an `EpisodeSink`.

    Observations are an array, or a dict of arrays. ``next_obs`` is written if the final observation is
    known.

    Args:
        storage: The folder.
        origin: Its environment becomes ``env_args``.
        file: Name of the file.
        obs_key: Key of observations that are one array.
    """

    def __init__(
        self, storage: Storage, origin: Origin, *, file: str = "demos.hdf5", obs_key: str = "flat"
    ) -> None:
        super().__init__(storage, file)
        self._total = 0
        self._key = obs_key
        self._data = self.file.create_group("data")
        self._data.attrs["env_args"] = origin.env or _NO_ENVIRONMENT

    def _write(self, episode: PreparedEpisode) -> None:
        columns = {"obs": episode.obs, "actions": episode.actions, **episode.extra_outputs}
        if episode.has_final_observation:
            columns["next_obs"] = episode.new_obs
        if episode.rewards is not None:
            columns["rewards"] = episode.rewards
        columns["dones"] = episode.ends[0].astype(np.int64)
        if not isinstance(episode.observations, dict):
            self._data.attrs[_PLAIN] = self._key
            columns |= {name: {self._key: columns[name]} for name in ("obs", "next_obs") if name in columns}
        group = self._data.create_group(f"demo_{self.episodes}")
        group.attrs["num_samples"] = len(episode)
        for name, column in columns.items():
            for path, leaf in leaves(column):
                group["/".join((name, *map(str, path)))] = leaf
        self._total += len(episode)

    def close(self) -> None:
        """See `EpisodeSink`."""
        self._data.attrs["total"] = self._total
        super().close()
