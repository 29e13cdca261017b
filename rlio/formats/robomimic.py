"""Robomimic's HDF5: one group a demonstration.

``data`` has the attributes ``total`` (steps) and ``env_args`` (JSON), and the groups ``demo_<i>`` with the
attribute ``num_samples``, the datasets ``actions``, ``rewards``, ``dones`` and ``states`` (N rows each) and
the groups ``obs`` and ``next_obs``, a dataset for each key. ``mask`` has lists of demonstrations by name.
Row t has the observation, the action, and the reward that followed it; row t of ``next_obs`` is the
observation after it.

A demonstration is one episode, which is terminated if its last row is done. Truncation is not stored. What
``dones`` means depends on the option ``done_mode`` of robomimic's dataset_states_to_obs.py, which files do
not keep: 0, the row led to a success; 1, it is the last one; 2, both. So if all last rows are done, the
report says that terminations are not known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from rlio.batch import SampleBatch
from rlio.batch.columns import Columns
from rlio.batch.episode import Episode
from rlio.errors import CorruptData, MissingColumn, OptionError, SchemaError, excerpt
from rlio.formats.files.value_arrays import flags_in
from rlio.formats.format import Format, Marks
from rlio.formats.hdf5_sink import Hdf5Sink, array_of
from rlio.formats.hdf5_source import Hdf5Source, flags_of, flat, one_more
from rlio.formats.place import Place
from rlio.formats.sink import Origin
from rlio.limits import Limits
from rlio.source.episodes import without_final_obs
from rlio.storage.filesystem import Storage

FORMAT = Format(
    name="robomimic",
    title="Robomimic",
    marks=Marks(
        hdf5=lambda paths: any(re.fullmatch("data/demo_[0-9]+", path) for path in paths),
        endings=(".hdf5", ".h5"),
    ),
    source="rlio.formats.robomimic:RobomimicSource",
    writer="rlio.formats.robomimic:RobomimicSink",
    loses=frozenset(("truncated", "ids", "start", "infos", "extra")),
    advice="read it with rlio.read",
    about="A demonstration is an episode. Truncation is not stored: without done, it is unfinished.",
)

_DEMO = re.compile("demo_([0-9]{1,9})")
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
        super().__init__(place, limits=limits)

    def _index(self, number: int) -> Iterator[tuple[str, int]]:
        data = self._member(number, "data")
        about = data.attrs.get("env_args")
        if isinstance(about, str) and number == 0:
            self.origin = Origin(uri=self.uri, env=about)
        demos = sorted((int(found[1]), name) for name in data if (found := _DEMO.fullmatch(name)))
        chosen = None if self._mask is None else self._named(number, self._mask, {name for _, name in demos})
        done_before = done_last = seen = 0
        for _, name in demos:
            if chosen is not None and name not in chosen:
                continue
            group = self._handles.child(data, name)
            steps = self._dataset(number, f"data/{name}/actions").shape[0]
            if int(group.attrs.get("num_samples", steps)) != steps:
                raise CorruptData(
                    f"{name} has {steps} actions, num_samples says {group.attrs['num_samples']}"
                )
            if "obs" not in group:
                raise MissingColumn(
                    f"{name} has no obs: it holds states of the simulator; make observations of them with "
                    "robomimic's dataset_states_to_obs.py",
                    column=Columns.OBS,
                )
            self._some_without_next |= "next_obs" not in group
            names = [one for one in ("rewards", "dones") if one in group]
            self._check_rows(number, [f"data/{name}/{one}" for one in names], steps)
            seen += int(steps > 0)
            if "dones" in group:
                dones = np.asarray(self._dataset(number, f"data/{name}/dones")[()])
                done_before += int(dones[:-1].any())
                done_last += int(dones[-1:].any())
            if steps:
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

    def _named(self, number: int, mask: str, known_demos: set[str]) -> set[str]:
        if self._member(number, f"mask/{mask}") is None:
            known = self._member(number, "mask")
            raise OptionError(f"mask={excerpt(mask)}: expected one of {excerpt(list(known or ()))}")
        found = self._dataset(number, f"mask/{mask}")[()].tolist()
        chosen = {name.decode() if isinstance(name, bytes) else str(name) for name in found}
        if absent := sorted(chosen - known_demos):
            raise CorruptData(
                f"mask/{mask} names demonstrations that are absent: {excerpt(absent)}; expected those in "
                "data: write the list again (robomimic's split_train_val.py), or leave out mask="
            )
        return chosen

    def _rows(self, number: int, key: str, rows: range, steps: int) -> SampleBatch:
        root = f"data/{key}"
        group = self._member(number, root)
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
        columns[Columns.ACTIONS] = self._read(number, f"{root}/actions", rows, steps)
        if "rewards" in group:
            columns[Columns.REWARDS] = flat(self._read(number, f"{root}/rewards", rows, steps))
        done = "dones" in group and bool(flags_in("dones", self._dataset(number, f"{root}/dones")[-1:])[0])
        columns[Columns.TERMINATEDS] = flags_of(rows, steps, terminated=done, truncated=False)[
            Columns.TERMINATEDS
        ]  # Whether an episode was truncated is not stored.
        if "states" in group:
            columns["states"] = self._read(number, f"{root}/states", rows, steps)
        return SampleBatch(columns)

    def _observations(self, number: int, path: str, rows: range, steps: int) -> Any:
        group = self._member(number, path)
        if not self._handles.is_group(group):
            raise CorruptData(f"{path} is not a group")
        found = {name: self._read(number, f"{path}/{name}", rows, steps) for name in group}
        plain = self._member(number, "data").attrs.get(_PLAIN)
        return found.get(plain, found)


class RobomimicSink(Hdf5Sink):
    """Writes one file; an `EpisodeSink`.

    Observations are an array, or a dict of arrays. ``next_obs`` is written if the final observation is
    known.

    Args:
        storage: The folder.
        origin: ``env`` becomes ``env_args``.
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
        self._data.attrs["env_args"] = _env_args(origin.env)

    def _write(self, episode: Episode) -> None:
        steps = len(episode)
        observations = episode.observations
        if not isinstance(observations, dict):
            observations = {self._key: observations}
            self._data.attrs[_PLAIN] = self._key
        arrays = {key: array_of(column, f"{Columns.OBS}/{key}") for key, column in observations.items()}
        if any("/" in key for key in arrays):
            raise SchemaError("a key of an observation has a slash", column=Columns.OBS)
        found = {f"obs/{key}": array[:steps] for key, array in arrays.items()}
        if episode.has_final_observation:
            found |= {f"next_obs/{key}": array[1:] for key, array in arrays.items()}
        found["actions"] = array_of(episode.actions, Columns.ACTIONS)
        found["rewards"] = array_of(episode.rewards, Columns.REWARDS)
        dones = np.zeros(steps, np.int64)
        dones[-1:] = episode.terminated
        group = self._data.create_group(f"demo_{self.episodes}")
        group.attrs["num_samples"] = steps
        for name, array in {**found, "dones": dones}.items():
            group[name] = array
        self._total += steps

    def close(self) -> None:
        """See `EpisodeSink`."""
        self._data.attrs["total"] = self._total
        super().close()


def _env_args(env: str | None) -> str:
    """The JSON that Robomimic expects; as it is, if it is such JSON."""
    try:
        if isinstance(json.loads(env or ""), dict):
            return env or ""
    except ValueError:
        pass  # An id.
    return json.dumps({"env_name": env or "", "type": 1, "env_kwargs": {}})
