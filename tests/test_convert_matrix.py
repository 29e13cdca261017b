"""Conversions, all of them: every source to what each format holds, and every kind of data into each format.

Each is proved, and what was changed or left out is in the report; or it is refused by the name of the column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from further import first

import rlio
from rlio.conversion.episodes import open_episodes
from rlio.conversion.prepare import FinalObs, Preparer
from rlio.conversion.proof import _original, digests_of_episode, in_order
from rlio.errors import CorruptData, SchemaError
from rlio.formats.format import by_name, formats, load
from rlio.formats.sink import PreparedEpisode

GOLDEN = Path(__file__).with_name("golden") / "formats"
TARGETS = [format.name for format in formats() if format.writer]
ENDINGS = {"d3rlpy": ".h5", "d4rl": ".hdf5", "robomimic": ".hdf5"}
MODES: tuple[FinalObs, ...] = ("error", "repeat", "drop-step")


# ---- kinds of data ----


def rows_of(number: int, steps: int, **columns: Any) -> rlio.SampleBatch:
    """An episode whose values say where they belong; a column of None is left out."""
    at = np.arange(steps + 1)
    obs = (100 * number + at[:, None] + np.zeros((1, 3))).astype(np.float32)
    made = {
        "obs": obs[:-1],
        "new_obs": obs[1:],
        "actions": (at[:-1, None] / 10).astype(np.float32),
        "rewards": 100 * number + at[:-1] + 0.5,
        "terminateds": (at[:-1] == steps - 1) & (number % 2 == 0),
        "truncateds": (at[:-1] == steps - 1) & (number % 2 == 1),
        "eps_id": np.full(steps, 7 * number + 3),
        "t": at[:-1],
        **columns,
    }
    return rlio.SampleBatch({name: column for name, column in made.items() if column is not None})


LENGTHS = (3, 1, 4)


def made(change: Callable[[int, int], dict[str, Any]]) -> list[rlio.SampleBatch]:
    """Three episodes, one of one step, with the columns of ``change(number, steps)``."""
    return [rows_of(number, steps, **change(number, steps)) for number, steps in enumerate(LENGTHS)]


def nested(number: int, steps: int, name: str, shape: tuple[int, ...] = (2,), dtype: Any = np.float32) -> Any:
    """Columns obs and new_obs that have one key."""
    leaf = (number + np.arange((steps + 1) * int(np.prod(shape)))).reshape(steps + 1, *shape).astype(dtype)
    return {"obs": {name: leaf[:-1]}, "new_obs": {name: leaf[1:]}}


def valid(*known: bool) -> Callable[[int, int], dict[str, Any]]:
    """Whether each episode has its final observation."""

    def change(number: int, steps: int) -> dict[str, Any]:
        flags = np.ones(steps, np.bool_)
        flags[-1] = known[number]
        return {"new_obs_valid": flags}

    return change


def texts(number: int, steps: int) -> np.ndarray:
    return np.array([f"{'long ' * (step % 2)}ä{number}" for step in range(steps)], object)


HOSTILE = (
    *("index", "frame_index", "episode_index", "timestamp", "task_index", "observation.x", "action.x"),
    *("next.reward", "next.done", "next.observation.final", "a/b", "a.b", "infos/x", "file", "lengths"),
    *("allow_pickle", "dones_", "type", "new_infos", "next_obs", "obs_0", "state", "item", "t_0", "env_seed"),
)


def at_ends(steps: int, *, terminated: bool, truncated: bool) -> dict[str, Any]:
    last = np.arange(steps) == steps - 1
    return {"terminateds": last & terminated, "truncateds": last & truncated}


def text_keys(number: int, steps: int) -> dict[str, Any]:
    column = texts(number, steps + 1)
    return {"obs": {"text": column[:-1]}, "new_obs": {"text": column[1:]}}


def in_each(change: Callable[[Any], Any]) -> Callable[[int, int], dict[str, Any]]:
    """Observations made of an array."""
    return lambda number, steps: {
        name: change(column["b"]) for name, column in nested(number, steps, "b").items()
    }


def infos(steps: int) -> np.ndarray:
    return np.array([{"k": [step, None, "x"]} for step in range(steps)], object)


DATA: dict[str, list[rlio.SampleBatch]] = {
    "plain": made(lambda number, steps: {}),
    "no final obs": made(valid(False, False, False)),
    "first without final obs": made(valid(False, True, True)),
    "last without final obs": made(valid(True, True, False)),
    "unfinished": made(lambda _, steps: at_ends(steps, terminated=False, truncated=False)),
    "both ends": made(lambda _, steps: at_ends(steps, terminated=True, truncated=True)),
    "late start": made(lambda _, steps: {"t": np.arange(5, 5 + steps)}),
    "large ids": made(lambda number, steps: {"eps_id": np.full(steps, 2**62 + number)}),
    "ids are texts": made(lambda number, steps: {"eps_id": np.full(steps, f"run-{number}", object)}),
    "hostile names": made(lambda number, steps: {name: np.arange(steps) + 10 * number for name in HOSTILE}),
    "texts": made(
        lambda number, steps: {"words": texts(number, steps), "fixed": texts(number, steps).astype(str)}
    ),
    "texts as observations": made(text_keys),
    "texts as actions": made(lambda number, steps: {"actions": texts(number, steps)}),
    "nested extra": made(lambda _, steps: {"extra": {"a": np.arange(steps), "b/c": np.arange(steps) / 2}}),
    "dict": made(lambda number, steps: nested(number, steps, "position")),
    "lone state": made(lambda number, steps: nested(number, steps, "state")),
    "keys with slashes": made(lambda number, steps: nested(number, steps, "a/b")),
    "dicts in dicts": made(in_each(lambda leaf: {"a": {"b": leaf}})),
    "tuple": made(in_each(lambda leaf: (leaf, leaf + 1))),
    "grey pictures": made(lambda number, steps: nested(number, steps, "camera", (4, 5, 1), np.uint8)),
    "vector rewards": made(lambda _, steps: {"rewards": np.arange(2.0 * steps).reshape(steps, 2)}),
    "rewards of one number": made(lambda _, steps: {"rewards": np.arange(1.0 * steps).reshape(steps, 1)}),
    "whole rewards": made(lambda _, steps: {"rewards": np.arange(steps)}),
    "large rewards": made(lambda _, steps: {"rewards": np.arange(steps) + 2**53 + 1}),
    "no rewards": made(lambda _, steps: {"rewards": None}),
    "infos": made(lambda _, steps: {"infos": infos(steps)}),
    "agents": made(lambda number, steps: {"agent_index": np.full(steps, number)}),
    "large actions": made(lambda _, steps: {"actions": np.arange(steps) + 2**60 + 1}),
    "flags": made(in_each(lambda leaf: leaf > 2)),
}

#: (kind of data, column) -> the formats that refuse it by this column.
REFUSED: dict[tuple[str, str], tuple[str, ...]] = {
    ("texts as observations", "obs"): ("d3rlpy", "d4rl", "minari", "npz", "robomimic"),
    ("texts as actions", "actions"): ("d3rlpy", "d4rl", "minari", "npz", "robomimic"),
    ("dict", "obs"): ("d3rlpy", "d4rl"),
    ("lone state", "obs"): ("d3rlpy", "d4rl"),
    ("keys with slashes", "obs"): ("d3rlpy", "d4rl"),
    ("dicts in dicts", "obs"): ("d3rlpy", "d4rl", "lerobot", "robomimic"),
    ("tuple", "obs"): ("d4rl", "lerobot", "npz", "parquet", "rllib-episodes", "rllib-json", "robomimic"),
    ("grey pictures", "obs"): ("d3rlpy", "d4rl"),
    ("vector rewards", "rewards"): ("d3rlpy", "d4rl", "minari", "rllib-episodes", "rllib-json", "robomimic"),
    ("large rewards", "rewards"): ("d3rlpy", "npz", "parquet", "rllib-episodes", "rllib-json"),
    ("no rewards", "rewards"): ("d3rlpy", "d4rl", "minari", "rllib-episodes", "rllib-json"),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a data set of rlio with a kind of data."""
    root = tmp_path_factory.mktemp("recorded")

    def folder(name: str) -> Path:
        place = root / name
        if not place.exists():
            with rlio.ParquetWriter(place, spool=None) as writer:
                for rows in DATA[name]:
                    writer.write(rows)
        return place

    return folder


@pytest.mark.few(14)
@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", DATA)
@pytest.mark.each_value_once
def test_every_kind_of_data_is_proved_in_every_format_or_refused_by_its_column(
    name: str, to: str, recorded: Callable[[str], Path], tmp_path: Path
) -> None:
    refused = {column for (kind, column), formats in REFUSED.items() if kind == name and to in formats}
    for mode in MODES if "final" in name else ("repeat",):
        target = tmp_path / f"{mode}{ENDINGS.get(to, '')}"
        needs = by_name(to).holds.final_obs == "needed"  # type: ignore[union-attr]  # It is there.
        column = "new_obs" if mode == "error" and needs else next(iter(refused), None)
        if column is not None:
            with pytest.raises(SchemaError) as caught:
                rlio.convert(recorded(name), target, to=to, final_obs=mode, prove=True)
            assert caught.value.column == column
        else:
            report = rlio.convert(recorded(name), target, to=to, final_obs=mode, prove=True)
            assert report.proved
            if mode != "drop-step":
                assert report.written == sum(LENGTHS)
        assert not [*tmp_path.rglob("_tmp")]


# ---- every source ----

SOURCES = {
    "minari": "minari/nested/hdf5-v0",
    "minari-pictures": "minari/images/raw-v0",
    "minari-parquet": "minari/nested/parquet-v0",
    "minari-arrow": "minari/nested/arrow-v0",
    "lerobot-2": "lerobot/v2.1",
    "lerobot-3": "lerobot/v3.0",
    "lerobot-image": "lerobot/v3.0-image",
    "rllib-episodes": "rllib/cartpole",
    "rllib-nested": "rllib/nested",
    "rllib-2019": "rllib-2019/output-2019-10-28_00-00-00_worker-0_0.json",
    "rllib-parquet": "rllib-dataset/one-agent.parquet",
    "rlds": "rlds/counts/1.0.0",
    "d3rlpy": "d3rlpy/buffer.h5",
    "tianshou": "tianshou/without_next.hdf5",
    "torchrl": "torchrl/ring",
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SOURCES)
def test_every_source_is_prepared_for_every_format_and_equals_itself_but_for_the_decisions(name: str) -> None:
    prepared = 0
    columns = set()
    with open_episodes(GOLDEN / SOURCES[name]) as source:
        episodes = [in_order(rows) for _, rows in source if isinstance(rows, rlio.SampleBatch)]
        spaces = source.parts[0].origin.spaces
        decoded = [rows for _, rows in source.decoded() if isinstance(rows, rlio.SampleBatch)]
        assert len(episodes) == len(decoded)
        for format in formats():
            for mode in ("repeat", "drop-step") if format.writer else ():
                preparer = Preparer(
                    format.name, format.holds, final_obs=mode, declares_final=True, spaces=spaces
                )
                for number, (rows, again) in enumerate(zip(episodes, decoded, strict=True)):
                    try:
                        found = preparer.prepare(rows, number, f"episode {number}", lambda *_, **__: None)
                    except SchemaError as error:
                        columns.add(error.column)
                        continue
                    assert found is not None or len(rows) == 1
                    if found is not None:
                        given = digests_of_episode(found, format.holds)
                        assert given == _original(again, number, preparer.decisions)
                        prepared += 1
    assert None not in columns
    # Some fixtures have no trajectories.
    assert prepared > 0 or columns == {"new_obs"}


# ---- planted faults ----


def swapped(column: Any) -> Any:
    """A column whose first and last row are exchanged."""
    changed = np.array(column)
    changed[[0, -1]] = changed[[-1, 0]]
    return changed


FAULTS: dict[str, Callable[[PreparedEpisode], PreparedEpisode]] = {
    "rewards": lambda one: replace(one, rewards=swapped(one.rewards)),
    "obs": lambda one: replace(one, observations=swapped(one.observations)),
    "new_obs": lambda one: replace(one, observations=np.concatenate([one.obs, one.obs[-1:]])),
    "no new_obs": lambda one: replace(one, observations=one.obs),
    "actions": lambda one: replace(one, actions=swapped(one.actions)),
    "dtype": lambda one: replace(one, actions=one.actions.astype(np.float64)),
    "terminateds": lambda one: replace(one, terminated=not one.terminated),
    "truncateds": lambda one: replace(one, truncated=not one.truncated),
    "eps_id": lambda one: replace(one, id_=8),
    "t": lambda one: replace(one, t_started=1),
    "instruction": lambda one: replace(one, extra_outputs={}),
    "other": lambda one: replace(one, extra_outputs={**one.extra_outputs, "other": one.rewards}),
}


@pytest.fixture
def with_texts(tmp_path: Path) -> Path:
    with rlio.ParquetWriter(tmp_path / "with texts", spool=None) as writer:
        for number in range(3):
            writer.write(rows_of(number, 4, instruction=texts(number, 4)))
    return tmp_path / "with texts"


@pytest.mark.few(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_prepare_fails_the_proof(
    fault: str, with_texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Preparer.prepare

    def broken(self: Preparer, rows: Any, number: int, place: str, note: Any) -> Any:
        found = original(self, rows, number, place, note)
        assert found is not None
        return FAULTS[fault](found)

    monkeypatch.setattr(Preparer, "prepare", broken)
    with pytest.raises(CorruptData, match="source") as caught:
        rlio.convert(with_texts, tmp_path / "b", to="npz", prove=True)
    assert (caught.value.record, caught.value.column) == (
        0,
        {"dtype": "actions", "no new_obs": "new_obs"}.get(fault, fault),
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("fault", ["rewards", "obs", "actions", "terminateds"])
@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.each_value_once
def test_a_fault_of_a_sink_fails_the_proof(
    fault: str, to: str, with_texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    format = by_name(to)
    assert format is not None
    assert format.writer is not None
    sink, count = load(format.writer), [0]
    original = sink.write

    def broken(self: Any, episode: PreparedEpisode) -> None:
        count[0] += 1
        original(self, FAULTS[fault](episode) if count[0] == 2 else episode)

    monkeypatch.setattr(sink, "write", broken)
    with pytest.raises(CorruptData, match="the proof failed") as caught:
        rlio.convert(with_texts, tmp_path / f"b{ENDINGS.get(to, '')}", to=to, prove=True)
    assert caught.value.record == 1


#: What decodes the rows of each format.
DECODERS = {
    "d3rlpy": "rlio.formats.d3rlpy_2:D3rlpySource._rows",
    "d4rl": "rlio.formats.d4rl.source:D4rlSource._read_rows",
    "lerobot": "rlio.formats.lerobot.source:LeRobotSource._rows",
    "minari": "rlio.formats.minari.source:MinariSource.load",
    "npz": "rlio.formats.tables.mapping:MappedSource.load_run",
    "parquet": "rlio.formats.tables.parquet_source:StepRows._read",
    "rllib-episodes": "rlio.formats.rllib.episodes:RllibEpisodeSource._rows",
    "rllib-json": "rlio.formats.rllib.json_records:JsonRecords.load",
    "robomimic": "rlio.formats.robomimic:RobomimicSource._rows",
    "rlds": "rlio.formats.rlds:RldsSource._rows",
    "tianshou": "rlio.formats.tianshou:TianshouSource._rows",
    "torchrl": "rlio.formats.torchrl:TorchrlSource.load",
}


def plant(place: str, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let a decoder swap rewards; gives the switch."""
    module, _, path = place.partition(":")
    owner, method = path.split(".")
    kind = getattr(import_module(module), owner)
    original, switch = getattr(kind, method), [False]

    def broken(self: Any, *args: Any, **options: Any) -> Any:
        found = original(self, *args, **options)
        if switch[0]:
            found["rewards"] = np.array(found["rewards"]) + 1
        return found

    monkeypatch.setattr(kind, method, broken)
    return switch


@pytest.mark.few(2)
@pytest.mark.parametrize("to", TARGETS)
def test_a_fault_of_what_reads_the_target_fails_the_proof(
    to: str, with_texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = plant(DECODERS[to], monkeypatch)
    target = tmp_path / f"b{ENDINGS.get(to, '')}"
    with pytest.raises(CorruptData, match="the proof failed") as caught:
        rlio.convert(with_texts, target, to=to, prove=True, progress=lambda *_: switch.__setitem__(0, True))
    assert caught.value.column == "rewards"


@pytest.mark.few(1)
@pytest.mark.parametrize("name", first(3, dict.fromkeys(["rlds", "npz", "rllib-json", *DECODERS])))
def test_a_source_that_gives_other_rows_the_second_time_fails_the_proof(
    name: str, with_texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in TARGETS:
        source = tmp_path / f"a{ENDINGS.get(name, '')}"
        rlio.convert(with_texts, source, to=name)
    else:
        source = GOLDEN / SOURCES[name]
    count = rlio.convert(source, tmp_path / "counted").episodes
    switch = plant(DECODERS[name], monkeypatch)

    def last(_: int, episodes: int) -> None:
        switch[0] = episodes == count

    with pytest.raises(CorruptData, match="source") as caught:
        rlio.convert(source, tmp_path / "b", prove=True, progress=last)
    assert caught.value.column == "rewards"
