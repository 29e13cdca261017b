"""RLlib's episodes: one episode a row, packed by msgpack, which RLlib's new stack writes by default.

A Parquet file has the one column ``item``, each value the msgpack of ``SingleAgentEpisode.get_state()``.
RLlib writes a folder ``<output>/<env>/run-<worker>-<call>/`` of such files at each call of ``sample()``.

An episode of N steps has N+1 observations and infos, and N actions, rewards and further model outputs.
Observation t is what action t was chosen for; reward t and info t+1 follow it. The info of the reset is not
read. A buffer may begin with ``lookback`` values of earlier steps, which belong to another chunk.

With its defaults, RLlib's recorder writes all earlier episodes again at each call. An episode that is stored
several times with the same bytes is read once; `RllibEpisodeSource.notes` counts the copies. Chunks of one
episode that follow each other are joined. Chunks with a gap between them are separate episodes with the
same ``eps_id``, and ``t`` shows where they begin. A chunk after one that is terminated or truncated is
damage: RLlib's ``concat_episode`` refuses it, too.
"""

from __future__ import annotations

import hashlib
import io
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch, concat_samples
from rlio.batch.arrays import object_column
from rlio.batch.columns import TRAJECTORY, Columns, is_per_sequence
from rlio.batch.nested import leaves, map_structure
from rlio.errors import CorruptData, SchemaError, UnknownLayout, excerpt
from rlio.formats.episode_files import EpisodeFilesSink
from rlio.formats.files.allowance import Allowance
from rlio.formats.files.inputs import Guard, in_column
from rlio.formats.files.parquet_files import ParquetFiles
from rlio.formats.files.step_rows import flags_of
from rlio.formats.files.value_arrays import stack_rows, standard_dtype
from rlio.formats.format import Format, Holds, Marks
from rlio.formats.place import Place
from rlio.formats.rllib.states import msgpack, pack, read_keys, space_from_rllib, space_to_rllib, unpack
from rlio.formats.sink import Origin, PreparedEpisode
from rlio.limits import Limits
from rlio.source.episodes import measure_first, with_next_obs
from rlio.storage import InputFile, each_file
from rlio.storage.filesystem import Storage
from rlio.support.calls import closing_on_error
from rlio.support.progress import each

logger: logging.Logger = logging.getLogger("rlio")

FORMAT = Format(
    name="rllib-episodes",
    title="RLlib's episodes",
    marks=Marks(columns=lambda names: names == {"item"}, endings=(".parquet",)),
    source="rlio.formats.rllib.episodes:RllibEpisodeSource",
    writer="rlio.formats.rllib.episodes:RllibEpisodeSink",
    holds=Holds(
        obs="dicts",
        actions="dicts",
        extra="dicts",
        texts=frozenset(("obs", "actions", "extra")),
        floats=frozenset((Columns.REWARDS,)),
        final_obs="needed",
        ids="text",
        infos=True,
    ),
    about="Episodes that RLlib's recorder has written several times are read once. Infos of resets are not "
    "read. Multi-agent episodes are refused.",
)

_KEYS: Final = frozenset(
    ("id_", "agent_id", "multi_agent_episode_id", "t_started", "t", "is_terminated", "is_truncated")
)
#: In what `RllibEpisodeSink` writes of an episode without infos, for RLlib's episodes always have them.
_NO_INFOS: Final = {"has_infos": False}
_RUN: Final = re.compile(r"(.*)/run-\d+-\d+/[^/]+")
_OWN: Final = TRAJECTORY - {Columns.AGENT_INDEX}


@dataclass(frozen=True)
class _Chunk:
    """One row: a chunk of an episode, or all of it."""

    id_: Any
    start: int
    stop: int
    file: int
    group: int
    row: int
    is_done: bool


class RllibEpisodeSource:
    """The episodes of one or several files; an `EpisodeSource`.

    Every file is read once when it is opened, because the number of steps is in the packed episodes.

    Attributes:
        notes: What was left out, each a sentence.
    """

    def __init__(self, place: Place, *, limits: Limits) -> None:
        msgpack()
        self.uri: str = place.uri
        self.files: tuple[InputFile, ...] = place.files
        self._limits = limits
        self._allowance = Allowance.of(place.files, limits)
        self._check_one_env()
        self._parquet = ParquetFiles(place.files, limits)
        self.notes: list[str] = []
        with closing_on_error(self):
            self._episodes = self._joined(self._find())
            self.lengths: list[int] = [
                sum(chunk.stop - chunk.start for chunk in chunks) for chunks in self._episodes
            ]
            self.spaces: tuple[Any, Any] | None = self._first_spaces()
            self.row_bytes: int = measure_first(
                range(len(self.lengths)), lambda episode: self.load(episode, None)
            )
        for note in self.notes:
            logger.warning("%s: %s", self.uri, note)

    def _check_one_env(self) -> None:
        runs = {found[1] for file in self.files if (found := _RUN.fullmatch(file.uri))}
        envs = sorted(run.rpartition("/")[2] for run in runs)
        if len(envs) > 1:
            raise UnknownLayout(
                f"found recordings of {len(envs)} environments ({excerpt(envs)}), "
                "expected those of one: pass the folder of one of them",
                uri=self.uri,
            )

    # ---- finding the episodes ----

    def _find(self) -> Iterable[_Chunk]:
        """The chunks that have steps, each once, in the order of their rows."""
        seen: set[bytes] = set()
        rows = empty = 0
        for number in each_file(self.files):
            file = self.files[number]
            with self._parquet.guarded(number):
                groups = self._groups(number)
            for group in each(range(groups)):
                values = self._values(number, group)
                for row in range(len(values)):
                    rows += 1
                    data = values[row].as_py()
                    digest = hashlib.blake2b(data or b"", digest_size=16).digest()
                    if digest in seen:
                        continue
                    seen.add(digest)
                    with Guard(file, row, format="msgpack"):
                        chunk = self._chunk(data, number, group, row)
                    if chunk.stop > chunk.start:
                        yield chunk
                    else:
                        empty += 1
        if rows > len(seen):
            self.notes.append(
                f"{rows - len(seen)} of {rows} stored episodes are copies, because RLlib's recorder writes "
                "earlier episodes again: each episode is read once"
            )
        if empty:
            self.notes.append(f"{empty} episodes have no step, and are not read")

    def _chunk(self, data: bytes | None, file: int, group: int, row: int) -> _Chunk:
        if data is None:
            raise CorruptData("a row is empty, expected an episode")
        state = read_keys(data, _KEYS, allowance=self._allowance.piece())
        if "agent_episodes" in state or state.get("multi_agent_episode_id") is not None:
            raise UnknownLayout(
                "found a multi-agent episode of RLlib, expected those of a single agent: record with RLlib's "
                "old stack into JSON, which rlio reads"
            )
        missing = _KEYS - state.keys()
        id_, start, stop = state.get("id_"), state.get("t_started"), state.get("t")
        if missing or not isinstance(id_, str | int):
            raise CorruptData(f"not a state of an episode: {sorted(missing)} absent, id_ {excerpt(id_, 80)}")
        if type(start) is not int or type(stop) is not int or not 0 <= start <= stop < 2**40:
            raise CorruptData(f"steps {excerpt(start, 40)} to {excerpt(stop, 40)}")
        self._allowance.claim(stop - start)
        is_done = bool(state["is_terminated"] or state["is_truncated"])
        return _Chunk(id_, start, stop, file, group, row, is_done)

    def _joined(self, chunks: Iterable[_Chunk]) -> list[list[_Chunk]]:
        """The chunks of each episode that follow each other."""
        by_id: dict[Any, list[_Chunk]] = {}
        for chunk in chunks:
            by_id.setdefault(chunk.id_, []).append(chunk)
        found: list[list[_Chunk]] = []
        for parts in by_id.values():
            parts.sort(key=lambda part: part.start)
            for number, part in enumerate(parts):
                before = parts[number - 1] if number else None
                if before is not None and part.start < before.stop:
                    raise CorruptData(
                        f"episode {excerpt(part.id_, 80)} is stored twice with different content: steps "
                        f"{part.start} to {part.stop} here, {before.start} to {before.stop} in "
                        f"{self.files[before.file].uri}; remove one of the files",
                        uri=self.files[part.file].uri,
                        record=part.row,
                    )
                if before is not None and before.is_done:
                    raise CorruptData(
                        f"episode {excerpt(part.id_, 80)} goes on with step {part.start} after it ended with "
                        f"step {before.stop - 1} in {self.files[before.file].uri}; expected another id_ for "
                        "another episode: remove one of the two, or change its id_",
                        uri=self.files[part.file].uri,
                        record=part.row,
                    )
                if before is not None and part.start == before.stop:
                    found[-1].append(part)
                else:
                    found.append([part])
        return found

    def _first_spaces(self) -> tuple[Any, Any] | None:
        """The spaces of the first episode, if it states both."""
        if not self._episodes:
            return None
        chunk = self._episodes[0][0]
        with self._guarded(chunk):
            spaces = self._spaces(self._state(chunk))
        return None if None in spaces else spaces

    # ---- reading ----

    def _groups(self, number: int) -> int:
        file = self._parquet.file(number)
        field = file.arrow.schema_arrow.field("item") if file.arrow.schema_arrow.names == ["item"] else None
        if field is None or str(field.type) not in ("binary", "large_binary"):
            raise UnknownLayout(
                f"found the columns {excerpt(file.arrow.schema_arrow.names)}, expected 'item'"
            )
        return int(file.arrow.metadata.num_row_groups)

    def _values(self, number: int, group: int) -> Any:
        """The packed episodes of a row group, as an Arrow column."""
        with self._parquet.guarded(number):
            return self._parquet.group(number, group, ["item"]).column("item")

    def _guarded(self, chunk: _Chunk) -> Guard:
        return Guard(self.files[chunk.file], chunk.row, format="an episode")

    def load(self, episode: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read one episode; see `EpisodeSource`."""
        parts = [self._rows_of(chunk) for chunk in self._episodes[episode]]
        joined = parts[0] if len(parts) == 1 else concat_samples(parts)
        assert isinstance(joined, SampleBatch)
        return joined

    def _state(self, chunk: _Chunk) -> dict[str, Any]:
        state = unpack(
            self._values(chunk.file, chunk.group)[chunk.row].as_py(), allowance=self._allowance.piece()
        )
        assert isinstance(state, dict)
        return state

    def _rows_of(self, chunk: _Chunk) -> SampleBatch:
        with self._guarded(chunk):
            return self._rows(self._state(chunk), chunk)

    def _spaces(self, state: dict[str, Any]) -> tuple[Any, Any]:
        """The spaces of observations and actions; None if they are not stored."""
        observation, action = (
            space_from_rllib(state.get(name), limits=self._limits)
            for name in ("_observation_space", "_action_space")
        )
        return observation, action

    def _rows(self, state: dict[str, Any], chunk: _Chunk) -> SampleBatch:
        steps, allowance = chunk.stop - chunk.start, self._allowance.piece()
        observation_space, action_space = self._spaces(state)

        def column(name: str, buffer: Any, rows: int, space: Any = None) -> Any:
            with in_column(name):
                return _column(buffer, rows, space, allowance)

        found = {
            **with_next_obs(column(Columns.OBS, state["observations"], steps + 1, observation_space)),
            Columns.ACTIONS: column(Columns.ACTIONS, state["actions"], steps, action_space),
            Columns.REWARDS: standard_dtype(
                Columns.REWARDS, column(Columns.REWARDS, state["rewards"], steps)
            ),
            **flags_of(steps, terminated=state["is_terminated"], truncated=state["is_truncated"]),
            Columns.T: np.arange(chunk.start, chunk.stop),
            Columns.EPS_ID: np.full(steps, chunk.id_, object if isinstance(chunk.id_, str) else np.int64),
        }
        if state.get("custom_data") != _NO_INFOS:
            found[Columns.INFOS] = object_column(_values_of(state["infos"], steps + 1)[1:])
        for name, buffer in (state.get("extra_model_outputs") or {}).items():
            if name in _OWN or is_per_sequence(name):
                raise SchemaError("a model output has the name of another column", column=name)
            found[name] = column(name, buffer, steps)
        return SampleBatch(found)

    def close(self) -> None:
        """Close all files."""
        self._parquet.close()


def _values_of(buffer: Any, rows: int) -> list[Any]:
    """The values of a list in a buffer, without the lookback."""
    data, lookback = buffer["data"], buffer["lookback"]
    if not isinstance(data, list) or type(lookback) is not int or len(data) - lookback != rows:
        raise CorruptData(
            f"found {len(data)} values, {excerpt(lookback, 40)} of them lookback; expected {rows}"
        )
    return data[lookback:]


def _column(buffer: Any, rows: int, space: Any, allowance: Allowance) -> Any:
    """One row a value, from a buffer of arrays, or of a list of values."""
    if not buffer["finalized"]:
        values = [_with_tuples(value, space) for value in _values_of(buffer, rows)]
        if set(map(type, values)) <= {int, float, bool}:
            return np.array(values)
        return stack_rows(values, allowance)
    data, lookback = _with_tuples(buffer["data"], space), buffer["lookback"]
    for _, leaf in leaves(data):
        if not isinstance(leaf, np.ndarray) or type(lookback) is not int or len(leaf) - lookback != rows:
            raise CorruptData(
                f"found {excerpt(leaf, 80)}, {excerpt(lookback, 40)} of it lookback; expected {rows} rows"
            )
    return map_structure(lambda leaf: leaf[lookback:], data)


def _with_tuples(value: Any, space: Any) -> Any:
    """``value`` with tuples where the space has them; msgpack makes them lists."""
    if isinstance(value, list):
        if space is None:
            raise SchemaError("found a list, but no space states whether it is a tuple of parts")
        parts = getattr(space, "spaces", None)
        if isinstance(parts, tuple):
            if len(parts) != len(value):
                raise SchemaError(f"found {len(value)} parts where the space has {len(parts)}")
            return tuple(_with_tuples(part, of) for part, of in zip(value, parts, strict=True))
        return np.asarray(value)
    if isinstance(value, dict):
        spaces = getattr(space, "spaces", None)
        named: Any = spaces if isinstance(spaces, Mapping) else {}
        return {key: _with_tuples(part, named.get(key)) for key, part in value.items()}
    return value


# ---- writing ----


class RllibEpisodeSink(EpisodeFilesSink):
    """Writes Parquet files of episodes; an `EpisodeSink` that continues after the files that are there.

    RLlib trains only on episodes that are terminated or truncated, and its episodes have a final observation.
    Ids of episodes become texts, which RLlib needs.

    Args:
        storage: The folder.
        origin: What is known of the data; its spaces go into each episode.
    """

    ending = ".parquet"

    def __init__(self, storage: Storage, origin: Origin) -> None:
        msgpack()
        observation_space, action_space = origin.spaces or (None, None)
        self._described = space_to_rllib(observation_space), space_to_rllib(action_space)
        super().__init__(storage)

    def _part(self, episode: PreparedEpisode) -> bytes:
        return pack(episode_state(episode, self._described))

    def _encoded(self, episodes: list[bytes]) -> bytes:
        import pyarrow as pa
        import pyarrow.parquet as pq

        stream = io.BytesIO()
        pq.write_table(pa.table({"item": pa.array(episodes, pa.binary())}), stream, compression="zstd")
        return stream.getvalue()


def episode_state(episode: PreparedEpisode, described: tuple[Any, Any]) -> dict[str, Any]:
    """What ``SingleAgentEpisode.from_state`` of RLlib takes.

    Args:
        episode: An episode with its final observation.
        described: Its spaces, as `space_to_rllib` describes them.
    """
    steps = len(episode)
    infos = [{}] * steps if episode.infos is None else episode.infos.tolist()
    outputs = {name: _buffer(column) for name, column in episode.extra_outputs.items()}
    observation_space, action_space = described
    return {
        "id_": str(episode.id_),
        "agent_id": None,
        "module_id": None,
        "multi_agent_episode_id": None,
        "observations": _buffer(episode.observations, observation_space),
        "actions": _buffer(episode.actions, action_space),
        "rewards": _buffer(episode.rewards),
        "infos": {"data": [{}, *infos], "lookback": 0, "finalized": False, "space": None},
        "extra_model_outputs": outputs or None,
        "is_terminated": episode.terminated,
        "is_truncated": episode.truncated,
        "t_started": episode.t_started,
        "t": episode.t_started + steps,
        "_observation_space": observation_space,
        "_action_space": action_space,
        "_start_time": None,
        "_last_step_time": None,
        "custom_data": {} if episode.infos is not None else _NO_INFOS,
    }


def _buffer(column: Any, space: Any = None) -> dict[str, Any]:
    """The state of RLlib's buffer of a column, as arrays."""

    def array(leaf: NDArray[Any]) -> NDArray[Any]:
        return np.ascontiguousarray(leaf.astype(np.str_) if leaf.dtype == object else leaf)

    return {"data": map_structure(array, column), "lookback": 0, "finalized": True, "space": space}
