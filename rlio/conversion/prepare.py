"""`Preparer`: fits each episode to what a format holds, once, before its sink sees it.

Every difference between an episode of the source and the one that the sink gets is a decision: it is in
`Decisions`, by which the proof (`rlio.conversion.proof`) knows what to compare, and in the report. A
column that cannot be written, and cannot be left out, raises SchemaError.

Not here: what a format holds (`rlio.formats.format.Holds`), and its layout (its sink).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.columns import AGENT_ID, TRAJECTORY, Columns
from rlio.batch.encoded_picture import EncodedPicture, is_encoded, row_type
from rlio.batch.episode import Episode
from rlio.batch.nested import Path, leaves, map_structure, path_text
from rlio.batch.picture_codecs import decode_batch
from rlio.batch.ragged import Ragged, item_type
from rlio.errors import MissingColumn, SchemaError, excerpt
from rlio.formats.files.space_arrays import check_fits
from rlio.formats.format import Holds, Nesting, formats
from rlio.formats.sink import Origin, PreparedEpisode
from rlio.schemas.arrow_tables import arrow_times

__all__ = ["BeginAgain", "Decisions", "FinalObs", "Preparer", "environment_for", "origin_for"]

#: What to do with an episode whose final observation is missing, where the target needs it.
FinalObs: TypeAlias = Literal["error", "repeat", "drop-step"]
#: Counts a finding: ``note(kind, first=place, column=name)``.
Note: TypeAlias = Callable[..., None]
#: The kind of a column: dtype, or "text", and the shape of a row; of each leaf.
_Kinds: TypeAlias = dict[tuple[str, Path], tuple[str, tuple[int, ...]]]

_AGENTS: Final = (Columns.AGENT_INDEX, AGENT_ID)
#: No further column may have one of these names.
_OWN: Final = TRAJECTORY | {*_AGENTS, Columns.DONES}
# Robomimic's number of Gymnasium.
_GYM_TYPE: Final = 2


class BeginAgain(Exception):
    """The first episodes had no final observation, and the format declares them for all: begin again."""


@dataclass
class Decisions:
    """How the prepared episodes differ from those of the source, on purpose.

    Attributes:
        holds: What the format holds.
        left_out: Columns that were not written.
        renamed: (column, key, ...) of the source -> the same of the target; of columns, and of keys in them.
        unnested: Columns whose only key was left out: they are its array.
        floats: Columns whose whole numbers were written as floats.
        repeated, shortened: Numbers of the episodes whose last observation was repeated, and of those whose
            last step was left out, because the final observation is missing.
        refused: Numbers of the episodes that were not written.
    """

    holds: Holds
    left_out: set[str] = field(default_factory=set)
    renamed: dict[tuple[Any, ...], tuple[Any, ...]] = field(default_factory=dict)
    unnested: set[str] = field(default_factory=set)
    floats: set[str] = field(default_factory=set)
    repeated: set[int] = field(default_factory=set)
    shortened: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)


class Preparer:
    """Fits the episodes of a source to a format, one after the other.

    Args:
        name: The name of the format, for messages.
        holds: What it holds.
        final_obs: What to do with a missing final observation, if it needs them.
        spaces: (observation space, action space); None: not known.
        takes: See `rlio.formats.sink.EpisodeSink`.
        declares_final: Whether final observations have a place; None: as the first episode has one.

    Attributes:
        decisions: What was decided.
    """

    def __init__(
        self,
        name: str,
        holds: Holds,
        *,
        final_obs: FinalObs = "error",
        spaces: tuple[Any, Any] | None = None,
        takes: Callable[[str, NDArray[Any]], bool] | None = None,
        declares_final: bool | None = None,
    ) -> None:
        self.decisions: Decisions = Decisions(holds)
        self._title, self._holds, self._final_obs = f"the format {name}", holds, final_obs
        self._spaces = spaces if holds.spaces else None
        self._takes = takes
        self._declares = declares_final if holds.final_obs == "declared" else holds.final_obs != "lost"
        self._first: _Kinds | None = None
        self._reported: set[tuple[str, str]] = set()

    def prepare(self, rows: SampleBatch, number: int, place: str, note: Note) -> PreparedEpisode | None:
        """Fit one episode.

        Args:
            rows: Its rows, in order.
            number: Its number in the source.
            place: Where it is, for findings.
            note: Counts findings.

        Returns:
            The episode in arrays that may be views; None if nothing of it is left.

        Raises:
            SchemaError: It is not a trajectory, or the format cannot hold it.
            BeginAgain: Pass ``declares_final=True`` to another one, and begin again.
        """
        plain = decode_batch(rows, keep=self._keeps_picture)
        assert isinstance(plain, SampleBatch)
        rows = plain
        found = self._trajectory(rows, number)
        if (ready := self._with_final_obs(found, number, place, note)) is None:
            return None
        self._end(ready, place, note)
        self._identify(ready, rows, number, place, note)
        ready.observations = self._fitted(Columns.OBS, ready.observations, self._holds.obs, "obs", note)
        ready.actions = self._fitted(Columns.ACTIONS, ready.actions, self._holds.actions, "actions", note)
        if self._spaces is not None:
            check_fits(ready.observations, self._spaces[0], Columns.OBS)
            check_fits(ready.actions, self._spaces[1], Columns.ACTIONS)
        ready.rewards = self._fitted_rewards(ready.rewards, note)
        ready.infos = self._fitted_infos(ready.infos, note)
        taken = {*ready.extra_outputs, *_OWN}
        ready.extra_outputs = dict(
            pair
            for name, column in ready.extra_outputs.items()
            if (pair := self._fitted_extra(name, column, taken, note)) is not None
        )
        self._check_alike(ready)
        return ready

    # ---- rows ----

    def _keeps_picture(self, picture: EncodedPicture) -> bool:
        return picture.codec in self._holds.pictures and len(picture.shape) == 3

    def _trajectory(self, rows: SampleBatch, number: int) -> PreparedEpisode:
        """The episode as it is."""
        missing = [name for name in (Columns.OBS, Columns.ACTIONS) if name not in rows]
        if missing:
            raise MissingColumn(f"found the columns {excerpt([*rows])}", column=missing[0])
        has_rewards = Columns.REWARDS in rows
        if not has_rewards:
            if self._holds.needs_rewards:
                able = [one.name for one in formats() if one.writer and not one.holds.needs_rewards]
                raise MissingColumn(
                    f"found no rewards, which {self._title} needs: convert into a data set of rlio, or "
                    f"to={excerpt(able)}, which hold data without rewards",
                    column=Columns.REWARDS,
                )
            rows = SampleBatch({**rows, Columns.REWARDS: np.zeros(len(rows), np.float32)})
        episode = Episode.from_batch(rows, id_=None if Columns.EPS_ID in rows else number)
        found = PreparedEpisode.of(episode)
        if not has_rewards:
            found.rewards = None
        return found

    def _with_final_obs(
        self, episode: PreparedEpisode, number: int, place: str, note: Note
    ) -> PreparedEpisode | None:
        """The episode with or without its final observation, as the format needs it."""
        mode, steps = self._holds.final_obs, len(episode)
        has_one = episode.has_final_observation
        if mode == "declared":
            if self._declares is None:
                self._declares = has_one
            elif has_one and not self._declares:
                raise BeginAgain
        episode.declares_final = bool(self._declares)
        if mode == "lost" and has_one:
            episode.observations = episode.obs
            note("final_obs_lost", first=place)
        if mode != "needed" or has_one:
            return episode
        if self._final_obs == "repeat":
            note("repeated_obs", first=place)
            self.decisions.repeated.add(number)
            return replace(
                episode,
                observations=map_structure(
                    lambda leaf: np.concatenate([leaf, leaf[-1:]]), episode.observations
                ),
            )
        if self._final_obs == "error":
            raise SchemaError(
                f"the observation after the last of {steps} steps is not known, and {self._title} needs it: "
                "final_obs='repeat' writes the last one again, 'drop-step' leaves out the last step",
                column=Columns.NEXT_OBS,
            )
        if steps == 1:
            note("no_step_left", first=place)
            self.decisions.refused.add(number)
            return None
        note("dropped_step", first=place)
        self.decisions.shortened.add(number)

        def cut(column: Any) -> Any:
            return map_structure(lambda leaf: leaf[: steps - 1], column)

        return replace(
            episode,
            actions=cut(episode.actions),
            rewards=None if episode.rewards is None else cut(episode.rewards),
            infos=None if episode.infos is None else cut(episode.infos),
            extra_outputs={name: cut(column) for name, column in episode.extra_outputs.items()},
            terminated=False,
            truncated=True,
        )

    def _end(self, episode: PreparedEpisode, place: str, note: Note) -> None:
        """Set the ends to those that come back."""
        before = episode.terminated, episode.truncated
        mode = self._holds.ends
        if mode == "terminated":
            episode.truncated = False
        elif mode == "either":
            episode.truncated = not episode.terminated
        elif mode == "closed" and not episode.terminated:
            episode.truncated = True
        elif mode == "none":
            episode.terminated, episode.truncated = True, False
        if (episode.terminated, episode.truncated) != before:
            note("end_lost", first=place)

    def _identify(
        self, episode: PreparedEpisode, rows: SampleBatch, number: int, place: str, note: Note
    ) -> None:
        """Set the id, the first step and the agent to those that come back."""
        if self._holds.ids == "none":
            if Columns.EPS_ID in rows and episode.id_ != number:
                note("id_lost", first=place)
            episode.id_ = number
        elif self._holds.ids == "text":
            episode.id_ = str(episode.id_)
        if not self._holds.start and episode.t_started:
            note("start_lost", first=place)
            episode.t_started = 0
        for name in _AGENTS if not self._holds.agents else ():
            if episode.extra_outputs.pop(name, None) is not None:
                self._leave_out(name, note)

    # ---- columns ----

    def _fitted(self, name: str, column: Any, nesting: Nesting, kind: str, note: Note) -> Any:
        """A column, nested and named as the format holds it."""
        lone = self._holds.lone_keys
        if (
            kind == "obs"
            and isinstance(column, dict)
            and len(column) == 1
            and (key := next(iter(column))) in lone
        ):
            self._once("unnested", f"{name}/{key}", note)
            self.decisions.unnested.add(name)
            column = column[key]
        _check_nesting(name, column, nesting, self._title)
        column = self._with_keys(name, (), column, note)

        is_whole = not isinstance(column, dict | tuple)

        def fitted(leaf: NDArray[Any]) -> NDArray[Any]:
            return self._with_floats(name, self._leaf(name, leaf, kind, is_whole=is_whole), note)

        return map_structure(fitted, column)

    def _with_keys(self, name: str, path: Path, column: Any, note: Note) -> Any:
        """A column whose keys the format can have."""
        if isinstance(column, tuple):
            return tuple(self._with_keys(name, (*path, at), part, note) for at, part in enumerate(column))
        if not isinstance(column, dict):
            return column
        if others := [key for key in column if not isinstance(key, str)]:
            raise SchemaError(f"found the keys {excerpt(others)}, expected texts", column=name)
        found: dict[str, Any] = {}
        for key, part in column.items():
            plain = key
            if not key or ("/" in key and not self._holds.slash):
                plain = _free(key.replace("/", ".") or "_", {*column, *found})
                self._rename((name, *path, key), (name, *path, plain), note)
            found[plain] = self._with_keys(name, (*path, key), part, note)
        return found

    def _leaf(self, name: str, leaf: NDArray[Any], kind: str, *, is_whole: bool = True) -> NDArray[Any]:
        """An array of numbers in the machine's order of bytes, or of texts."""
        array = np.asarray(leaf)
        if is_encoded(array) and kind in ("obs", "extra"):
            return array
        if array.dtype.kind == "U" or (array.dtype == object and _are_texts(array)):
            known = self._spaces is not None and kind in ("obs", "actions")  # `check_fits` decides.
            if not known and (kind not in self._holds.texts or array.ndim > self._holds.text_axes):
                hint = ", unless spaces say so: record with spaces" if self._holds.spaces else ""
                raise SchemaError(
                    f"found texts, expected numbers: {self._title} has none there{hint}", column=name
                )
            return _checked_texts(array.astype(object), name)
        if (items := item_type(array)) is not None and items[0].kind in "biuf" and items[0].itemsize <= 8:
            return self._ragged(name, array, items, kind if is_whole else "parts")
        if (
            array.dtype.kind in "mM"
            and self._holds.times
            and kind == "extra"
            and is_whole
            and array.ndim == 1
        ):
            try:
                arrow_times(array)
            except (TypeError, OverflowError) as error:
                raise SchemaError(f"found {array.dtype}: {error}", column=name) from error
            return array.astype(array.dtype.newbyteorder("="), copy=False)
        if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
            what = "objects" if array.dtype == object else str(array.dtype)
            raise SchemaError(
                f"found {what}, expected numbers{' or texts' * bool(self._holds.texts)}", column=name
            )
        if array.ndim > self._holds.axes or (self._holds.axes < 32 and 0 in array.shape[1:]):
            raise SchemaError(f"{self._title} has no {array.dtype} of shape {array.shape[1:]}", column=name)
        expected = dict(self._holds.shapes).get(name, array.shape[1:])
        if array.shape[1:] != expected:
            raise SchemaError(
                f"found rows of shape {array.shape[1:]}, expected {expected}: {self._title} has no others",
                column=name,
            )
        return array.astype(array.dtype.newbyteorder("="), copy=False)

    def _ragged(
        self, name: str, array: NDArray[Any], items: tuple[np.dtype[Any], tuple[int, ...]], kind: str
    ) -> NDArray[Any]:
        """Rows of different lengths, with items in the machine's order of bytes."""
        if kind not in self._holds.ragged:
            able = [one.name for one in formats() if one.writer and kind in one.holds.ragged]
            raise SchemaError(
                f"found rows of different lengths, of {items[0]}: {self._title} has none there; pad them "
                f"(rlio.Ragged.to_padded), or convert into a data set of rlio{', or to=' * bool(able)}"
                f"{excerpt(able) if able else ''}",
                column=name,
            )
        rows = Ragged.of(array)
        values = rows.values.astype(items[0].newbyteorder("="), copy=False)
        return Ragged(values, rows.offsets).rows()

    def _fitted_rewards(self, rewards: NDArray[Any] | None, note: Note) -> NDArray[Any] | None:
        if rewards is None:
            return None
        array = self._leaf(Columns.REWARDS, rewards, "rewards")
        if array.ndim > 1 and array[:1].size == 1:  # Readers of all formats give one number a row.
            self._once("reshaped", Columns.REWARDS, note)
            array = array.reshape(len(array))
        if array.ndim > 1 and self._holds.rewards != "numbers":
            able = [one.name for one in formats() if one.writer and one.holds.rewards == "numbers"]
            raise SchemaError(
                f"found rewards of shape {array.shape[1:]} a step, and {self._title} has one number a step: "
                f"convert into a data set of rlio, or to={excerpt(able)}",
                column=Columns.REWARDS,
            )
        return self._with_floats(Columns.REWARDS, array, note)

    def _with_floats(self, name: str, array: NDArray[Any], note: Note) -> NDArray[Any]:
        """An array, as floats if whole numbers come back as such."""
        if name not in self._holds.floats or array.dtype.kind not in "iu":
            return array
        floats = array.astype(np.float64)
        if not np.array_equal(floats.astype(array.dtype), array):
            raise SchemaError(
                f"found whole numbers beyond 2^53, which floats cannot hold: {self._title} has floats there",
                column=name,
            )
        if self._holds.dtypes:
            self._once("as_floats", name, note)
            self.decisions.floats.add(name)
        return floats

    def _fitted_infos(self, infos: NDArray[Any] | None, note: Note) -> NDArray[Any] | None:
        if infos is None or self._holds.infos:
            for info in () if infos is None else infos:
                _check_json(info)
            return infos
        self._leave_out(Columns.INFOS, note)
        return None

    def _fitted_extra(self, name: str, column: Any, taken: set[str], note: Note) -> tuple[str, Any] | None:
        """Name and array of a further column; None: it is left out."""
        holds = self._holds
        is_array = not isinstance(column, (dict, tuple))
        if name in self.decisions.left_out:
            return None
        known = self.decisions.renamed.get((name,))
        takes = self._takes if is_array and known is None and name in holds.named else None
        if takes is not None and takes(name, column):
            return name, column
        if holds.extra is None:
            self._leave_out(name, note)
            return None
        try:
            fitted = self._fitted(name, column, holds.extra, "extra", note)
        except SchemaError:
            self._leave_out(name, note)
            return None
        plain = name
        if known is not None:
            return str(known[0]), fitted
        if "/" in plain and not holds.slash:
            plain = plain.replace("/", ".")
        if not plain or re.fullmatch(holds.reserved, plain):
            plain = _free(f"{plain.replace('.', '_')}_", taken)
        if plain != name:
            plain = _free(plain, taken)
            taken.add(plain)
            self._rename((name,), (plain,), note)
        return plain, fitted

    # ---- decisions ----

    def _leave_out(self, name: str, note: Note) -> None:
        self.decisions.left_out.add(name)
        self._once("left_out", name, note)

    def _once(self, kind: str, column: str, note: Note) -> None:
        """Report what is decided of a column once, although it is done in each episode."""
        if (kind, column) not in self._reported:
            self._reported.add((kind, column))
            note(kind, column=column)

    def _rename(self, before: tuple[Any, ...], after: tuple[Any, ...], note: Note) -> None:
        if before not in self.decisions.renamed:
            self.decisions.renamed[before] = after
            note("renamed", column=f"{path_text(before)} -> {path_text(after)}")

    def _check_alike(self, episode: PreparedEpisode) -> None:
        """Raise unless the columns are like those of the first episode, where the format needs it."""
        if not self._holds.uniform:
            return
        columns = {
            Columns.OBS: episode.observations,
            Columns.ACTIONS: episode.actions,
            **({} if episode.rewards is None else {Columns.REWARDS: episode.rewards}),
            **episode.extra_outputs,
        }
        by_dtype = self._holds.uniform == "dtypes"
        found: _Kinds = {
            (name, path): (_dtype_of(leaf) if by_dtype else "", row_type(leaf)[1])
            for name, column in columns.items()
            for path, leaf in leaves(column)
        }
        if self._first is None:
            self._first = found
        if found != self._first:
            names = [*found, *self._first]
            other = next(name for name in names if found.get(name) != self._first.get(name))
            raise SchemaError(
                f"found {_told(found.get(other))}, expected {_told(self._first.get(other))} as in the first "
                "episode",
                column=path_text((other[0], *other[1])),
            )


def _check_nesting(name: str, column: Any, nesting: Nesting, title: str) -> None:
    """Raise unless the format has columns nested like this."""
    parts = (
        list(column.values())
        if isinstance(column, dict)
        else list(column)
        if isinstance(column, tuple)
        else []
    )
    is_flat = not any(isinstance(part, (dict, tuple)) for part in parts)
    if isinstance(column, dict):
        is_held = nesting in ("dicts", "any") or (nesting == "keys" and is_flat)
    elif isinstance(column, tuple):
        is_held = nesting == "any" or (nesting == "parts" and is_flat)
    else:
        return
    if not is_held:
        expected = {
            "array": "one array",
            "keys": "an array, or a dict of arrays",
            "parts": "an array, or a tuple of arrays",
            "dicts": "an array, or dicts of arrays",
        }[nesting]
        what = "tuple" if isinstance(column, tuple) else "dict" if is_flat else "dict in a dict"
        raise SchemaError(f"found a {what}, expected {expected}: {title} has no other", column=name)
    for part in parts:
        _check_nesting(name, part, nesting, title)


def _free(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _are_texts(array: NDArray[Any]) -> bool:
    return all(isinstance(value, str) for value in array.reshape(-1).tolist())


def _checked_texts(array: NDArray[Any], name: str) -> NDArray[Any]:
    for text in array.reshape(-1).tolist():
        if text.endswith("\0"):
            raise SchemaError("found a text that ends in NUL, which arrays of texts cannot keep", column=name)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise SchemaError(f"found a text that is not Unicode: {excerpt(text)}", column=name) from error
    return array


def _check_json(value: Any) -> None:
    """Raise unless an info is made of JSON's values and arrays."""
    if isinstance(value, Mapping):
        for part in value.values():
            _check_json(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _check_json(part)
    elif isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind not in "biufU":
            _check_json(value.tolist())
    elif not isinstance(value, (bool, float, str, type(None))) and not (
        isinstance(value, int) and -(1 << 63) <= value < 1 << 64
    ):
        raise SchemaError(
            f"found {type(value).__name__} ({excerpt(value, 80)}) in an info, expected values of JSON",
            column=Columns.INFOS,
        )


def _dtype_of(leaf: NDArray[Any]) -> str:
    if not is_encoded(leaf) and (items := item_type(leaf)) is not None:
        return f"rows of any length of {items[0]} {items[1] or ''}".strip()
    dtype, _ = row_type(leaf)
    return "text" if dtype.hasobject else str(dtype)


def _told(kind: tuple[str, tuple[int, ...]] | None) -> str:
    return "nothing" if kind is None else f"{kind[0]} rows of shape {kind[1]}".strip()


# ---- environments ----


def environment_for(kind: str, env: str | None) -> str | None:
    """The description of an environment as a format keeps it; None: it cannot be made of what is known.

    Args:
        kind: `Holds.environment`.
        env: An id, the JSON of a spec of Gymnasium, or robomimic's ``env_args``.
    """
    known, about = _environment(env)
    if not kind or known == kind:
        return env if kind else None
    if kind == "robomimic" and known:
        args: dict[str, Any] = {"env_name": env, "type": _GYM_TYPE, "env_kwargs": {}}
        if known == "gymnasium":
            args |= {"env_name": about["id"], "env_kwargs": about.get("kwargs") or {}}
        return json.dumps(args)
    if kind == "gymnasium" and known == "id":
        import gymnasium as gym

        try:
            spec: str = gym.spec(env or "").to_json()
        except (gym.error.Error, ValueError):
            return None
        return spec
    return None


def _environment(env: str | None) -> tuple[str, dict[str, Any]]:
    """What describes an environment: "gymnasium", "robomimic", "id", or "" for none or another; and JSON."""
    if not env:
        return "", {}
    try:
        about = json.loads(env)
    except ValueError:
        return "id", {}
    if not isinstance(about, dict):
        return "id", {}
    if isinstance(about.get("env_name"), str):
        return "robomimic", about
    return ("gymnasium" if isinstance(about.get("id"), str) and "entry_point" in about else ""), about


def origin_for(holds: Holds, origin: Origin, note: Note) -> Origin:
    """What is known of the data, with the environment as the format keeps it."""
    env = environment_for(holds.environment, origin.env)
    if holds.environment and origin.env and env is None:
        text = f"its description is not one of {holds.environment}, and none can be made of it"
        note("environment", text=f"The environment {excerpt(origin.env, 60)} was left out: {text}.")
    return replace(origin, env=env)
