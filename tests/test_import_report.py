"""The report of an import: planted defects are found, one at a time, and clean data gives no suspicion."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from further import further

import rlio
from rlio.conversion.report import KINDS, Finding, Inspector
from rlio.errors import CorruptData
from rlio.formats.format import by_name, formats, load
from rlio.support.options import option_names

SHARED = Path(__file__).resolve().parents[2] / "shared/data/rllib"

Episodes = list[rlio.SampleBatch]


@cache
def recorded(env_id: str, count: int) -> tuple[Episodes, Any]:
    """Whole episodes of a random policy, and the spaces."""
    env = gym.make(env_id)
    env.action_space.seed(0)
    made = []
    for number in range(count):
        rows: list[Any] = []
        obs, _ = env.reset(seed=number)
        ended = False
        while not ended:
            action = env.action_space.sample()
            after, reward, terminated, truncated, _ = env.step(action)
            rows.append((obs, after, action, float(reward), terminated, truncated))
            obs, ended = after, terminated or truncated
        columns = [np.array(column) for column in zip(*rows, strict=True)]
        names = ("obs", "new_obs", "actions", "rewards", "terminateds", "truncateds")
        steps = len(rows)
        made.append(
            rlio.SampleBatch(
                {**dict(zip(names, columns, strict=True)), "eps_id": [number] * steps, "t": range(steps)}
            )
        )
    spaces = env.observation_space, env.action_space
    env.close()
    return made, spaces


def copies(env_id: str = "CartPole-v1", count: int = 30) -> Episodes:
    return [rows.copy() for rows in recorded(env_id, count)[0]]


def inspected(episodes: Episodes, spaces: Any = None) -> dict[str, Finding]:
    inspector = Inspector(spaces)
    for number, rows in enumerate(episodes):
        inspector.add(rows, place=f"episode {number}")
    return {finding.kind: finding for finding in inspector.findings()}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("env_id", "count"),
    [("CartPole-v1", 30), ("Pendulum-v1", 5), ("FrozenLake-v1", 60),
     *further(("MountainCarContinuous-v0", 2), ("Acrobot-v1", 3), ("HalfCheetah-v5", 6), ("Hopper-v5", 40))],
)  # fmt: skip
def test_clean_recordings_give_no_finding(env_id: str, count: int) -> None:
    assert inspected(copies(env_id, count), recorded(env_id, count)[1]) == {}


def final_obs_lost(episodes: Episodes) -> None:
    rows = episodes[3]
    rows["new_obs"][-1] = 0
    rows["new_obs_valid"] = np.arange(len(rows)) < len(rows) - 1


def never_ended(episodes: Episodes) -> None:
    episodes[3]["terminateds"][:] = False


def timeouts_lost(episodes: Episodes) -> None:
    for rows in episodes:
        del rows["truncateds"]


def new_obs_crossed(episodes: Episodes) -> None:
    rows = episodes[3]
    rows["new_obs"][[2, 5]] = rows["new_obs"][[5, 2]]


def merged(episodes: Episodes) -> None:
    a, b = episodes[3], episodes.pop(4)
    a["terminateds"][:] = a["truncateds"][:] = False
    a["new_obs"][-1] = b["obs"][0]
    joined = rlio.concat_samples([a, b])
    joined["t"], joined["eps_id"] = np.arange(len(joined)), np.full(len(joined), 3)
    episodes[3] = joined


def rows_swapped(episodes: Episodes) -> None:
    rows = episodes[3]
    order = np.arange(len(rows))
    order[[4, 6]] = [6, 4]
    episodes[3] = rows[order]


def row_stored_twice(episodes: Episodes) -> None:
    rows = episodes[3]
    order = np.insert(np.arange(len(rows)), 4, 4)
    doubled = rows[order]
    doubled["t"] = np.arange(len(doubled))
    doubled["new_obs"][:-1] = doubled["obs"][1:]
    episodes[3] = doubled


def step_stored_twice(episodes: Episodes) -> None:
    rows = episodes[3]
    episodes[3] = rows[np.insert(np.arange(len(rows)), 4, 4)]


def episode_stored_twice(episodes: Episodes) -> None:
    episodes.append(episodes[3].copy())


def steps_lost(episodes: Episodes) -> None:
    rows = episodes[3]
    episodes[3] = rows[np.delete(np.arange(len(rows)), [4, 5])]


def beginning_lost(episodes: Episodes) -> None:
    episodes[3] = episodes[3][5:]


def padded_after_the_end(episodes: Episodes) -> None:
    rows = episodes[3]
    padding = rows[:2].copy()
    for column in padding.values():
        column[:] = 0
    joined = rlio.concat_samples([rows, padding])
    joined["t"] = np.arange(len(joined))
    joined["eps_id"][:] = 3
    joined["new_obs"][-3] = 0
    episodes[3] = joined


def rewards_shifted(episodes: Episodes) -> None:
    for rows in episodes:
        rows["rewards"] = np.concatenate([[0.0], rows["rewards"][:-1]])


def not_a_number(episodes: Episodes) -> None:
    episodes[3]["rewards"][4] = np.nan


def infinite(episodes: Episodes) -> None:
    episodes[3]["obs"][4, 1] = np.inf
    episodes[3]["new_obs"][3, 1] = np.inf


def actions_beyond(episodes: Episodes) -> None:
    episodes[3]["actions"][4] = 9


def other_dtype(episodes: Episodes) -> None:
    episodes[3]["rewards"] = episodes[3]["rewards"].astype(np.float32)


def all_wide(episodes: Episodes) -> None:
    for rows in episodes:
        for name in ("obs", "new_obs"):
            rows[name] = rows[name].astype(np.float64)


def actions_normalised(episodes: Episodes) -> None:
    for rows in episodes:
        rows["actions"] = rows["actions"] / 2


PLANTED: list[tuple[str, Callable[[Episodes], None], set[str], int]] = [
    ("CartPole-v1", final_obs_lost, {"no_final_obs"}, 1),
    ("CartPole-v1", never_ended, {"unfinished"}, 1),
    ("CartPole-v1", timeouts_lost, {"no_timeouts"}, 1),
    ("CartPole-v1", new_obs_crossed, {"unlike_new_obs"}, 2),
    ("CartPole-v1", merged, {"jumps"}, 1),
    ("HalfCheetah-v5", merged, {"jumps"}, 1),
    ("CartPole-v1", rows_swapped, {"unlike_new_obs", "order", "jumps"}, 0),
    ("CartPole-v1", row_stored_twice, {"repeated_rows"}, 1),
    ("CartPole-v1", step_stored_twice, {"repeated_rows", "order", "repeated_steps", "unlike_new_obs"}, 1),
    ("CartPole-v1", episode_stored_twice, {"repeated_episodes"}, 1),
    ("CartPole-v1", steps_lost, {"missing_steps", "unlike_new_obs", "jumps"}, 1),
    ("CartPole-v1", beginning_lost, {"late_start"}, 1),
    ("CartPole-v1", padded_after_the_end, {"rows_after_end", "zero_rows", "jumps"}, 0),
    ("CartPole-v1", rewards_shifted, {"shifted_rewards"}, 30),
    ("CartPole-v1", not_a_number, {"nan"}, 1),
    ("CartPole-v1", infinite, {"infinite", "jumps"}, 0),
    ("CartPole-v1", actions_beyond, {"actions_outside"}, 1),
    ("CartPole-v1", other_dtype, {"dtype_change"}, 1),
    ("CartPole-v1", all_wide, {"space_dtype"}, 1),
    ("Pendulum-v1", actions_normalised, {"normalised_actions"}, 1),
]  # fmt: skip
COUNTS = {"CartPole-v1": 30, "HalfCheetah-v5": 6, "Pendulum-v1": 5}


@pytest.mark.few(10)
@pytest.mark.parametrize(
    ("env_id", "plant", "kinds", "count"),
    [case if case[0] != "HalfCheetah-v5" else further(case)[0] for case in PLANTED],
)
def test_a_planted_defect_is_found_and_nothing_else(
    env_id: str, plant: Callable[[Episodes], None], kinds: set[str], count: int
) -> None:
    episodes = copies(env_id, COUNTS[env_id])
    plant(episodes)
    found = inspected(episodes, recorded(env_id, COUNTS[env_id])[1])
    facts = {kind for kind in found if kind != "jumps"}
    assert facts == kinds - {"jumps"}
    assert ("jumps" in found) <= ("jumps" in kinds)
    if kinds == {"jumps"}:
        assert set(found) == kinds
    if count:
        assert {finding.count for finding in found.values() if finding.kind != "jumps"} <= {count}
    for kind, finding in found.items():
        unit, _, suspicion = KINDS[kind]
        assert (finding.unit, finding.suspicion) == (unit, suspicion)
        if unit in ("rows", "episodes") and count == 1:
            where = len(episodes) - 1 if plant is episode_stored_twice else 3
            assert finding.first is not None
            assert finding.first.startswith(f"episode {where}")


def test_every_kind_has_a_planted_defect() -> None:
    # Of conversions: tests/test_convert.py and tests/test_convert_matrix.py.
    ours = {"left_out", "refused", "sorted", "note", "renamed", "unnested", "reshaped", "environment"}
    ours |= {"repeated_obs", "dropped_step", "no_step_left", "as_floats"}
    ours |= {"final_obs_lost", "end_lost", "start_lost", "id_lost"}
    assert {kind for *_, kinds, _ in PLANTED for kind in kinds} == KINDS.keys() - ours


def write_d4rl(path: Path, episodes: Episodes, *, timeouts: bool = True, new_obs: bool = False) -> None:
    rows = rlio.concat_samples(episodes)
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        file["observations"], file["rewards"] = rows["obs"], rows["rewards"].astype(np.float32)
        file["actions"], file["terminals"] = rows["actions"], rows["terminateds"]
        if timeouts:
            file["timeouts"] = rows["truncateds"]
        if new_obs:
            file["next_observations"] = rows["new_obs"]


def kinds_of(src: Path, dst: Path) -> set[str]:
    return {finding.kind for finding in rlio.convert(src, dst).findings}


def test_d4rl_without_timeouts_joins_episodes_and_the_report_says_so(tmp_path: Path) -> None:
    episodes = copies("Pendulum-v1", 5)
    write_d4rl(tmp_path / "v2.hdf5", episodes, new_obs=True)
    assert kinds_of(tmp_path / "v2.hdf5", tmp_path / "a") == set()
    write_d4rl(tmp_path / "v0.hdf5", episodes, timeouts=False)
    found = kinds_of(tmp_path / "v0.hdf5", tmp_path / "b")
    assert {"no_timeouts", "unfinished", "no_final_obs", "note"} <= found
    new_obs_crossed(episodes)
    write_d4rl(tmp_path / "crossed.hdf5", episodes, new_obs=True)
    assert kinds_of(tmp_path / "crossed.hdf5", tmp_path / "c") == {"unlike_new_obs"}


def test_the_report_says_which_d4rl_file_of_several_lacks_timeouts(tmp_path: Path) -> None:
    episodes = copies("Pendulum-v1", 5)[:4]
    write_d4rl(tmp_path / "d/a.hdf5", episodes[:2])
    write_d4rl(tmp_path / "d/b.hdf5", episodes[2:], timeouts=False)
    report = rlio.convert(tmp_path / "d", tmp_path / "out", read_options={"columns": "fill"})
    notes = [finding.text for finding in report.findings if finding.kind == "note"]
    assert ["b.hdf5 has no timeouts" in note for note in notes] == [True, True]
    assert report.episodes == 3  # The time limit cut all four: those of b.hdf5 are joined.


def test_rows_that_a_format_numbers_are_sorted_and_that_is_said(tmp_path: Path) -> None:
    episodes = copies()
    rows = episodes[3]
    order = np.arange(len(rows))
    order[[4, 6]] = [6, 4]
    episodes[3] = rows[order]
    with rlio.ParquetWriter(tmp_path / "a", spool=None) as writer:
        for part in episodes:
            writer.write(part)
    found = rlio.convert(tmp_path / "a", tmp_path / "b").findings
    assert {"order", "sorted"} <= {finding.kind for finding in found}
    with rlio.read(tmp_path / "b", epochs=1) as reader:
        stored = rlio.concat_samples(list(reader))
    assert stored.equals(rlio.concat_samples(copies()))
    assert kinds_of(tmp_path / "b", tmp_path / "c") == set()


def in_format(to: str, episodes: Episodes, root: Path, env_id: str = "CartPole-v1") -> Path:
    """The episodes in a format, written without looking at them."""
    spaces = {"default_policy": recorded(env_id, COUNTS[env_id])[1]}
    with rlio.ParquetWriter(root / "a", spool=None, spaces=spaces, writer_id="w0") as writer:
        ids = [rows["eps_id"][0] for rows in episodes]
        for number, rows in enumerate(episodes):
            if ids[number] not in ids[:number]:
                writer.write(rows)
    copies = [rows for number, rows in enumerate(episodes) if ids[number] in ids[:number]]
    with rlio.ParquetWriter(root / "a", spool=None, spaces=spaces, writer_id="w1") as writer:
        for rows in copies:  # A writer takes an episode once.
            writer.write(rows)
    format = by_name(to)
    assert format is not None
    ending = "" if format.root else format.marks.endings[:1]
    takes_file = format.writer is not None and "file" in (option_names(load(format.writer)) or ())
    dst = root / f"b{ending[0] if takes_file and ending else ''}"
    rlio.convert(root / "a", dst, to=to)
    return dst


def written(*now: str, without: tuple[str, ...] = ()) -> list[Any]:
    """The formats that are written; `make test` looks at those of ``now``."""
    names = {format.name for format in formats() if format.writer} - {*without}
    return [*now, *further(*sorted(names - {*now}))]


@pytest.mark.further
@pytest.mark.parametrize("to", written("d4rl"))
def test_defects_are_found_in_every_format_that_is_written(to: str, tmp_path: Path) -> None:
    clean = in_format(to, copies(), tmp_path / "clean")
    facts = {finding.kind for finding in rlio.convert(clean, tmp_path / "out").findings}
    assert facts <= {"no_final_obs", "no_timeouts", "unfinished", "note"}
    for plant, kind in (
        (merged, "jumps"),
        (row_stored_twice, "repeated_rows"),
        (episode_stored_twice, "repeated_episodes"),
        (rewards_shifted, "shifted_rewards"),
        (not_a_number, "nan"),
    ):
        episodes = copies()
        plant(episodes)
        found = rlio.convert(
            in_format(to, episodes, tmp_path / plant.__name__), tmp_path / f"out-{plant.__name__}"
        ).findings
        expected = {
            ("rllib-episodes", "repeated_episodes"): {"note"},  # The reader leaves out copies, and says so.
            ("npz", "repeated_episodes"): {kind, "note"},  # It numbers them, since both have the same id.
        }.get((to, kind), {kind})
        assert {finding.kind for finding in found} - facts == expected, plant.__name__


@pytest.mark.few(1)
@pytest.mark.skipif(not SHARED.exists(), reason="the recordings of RLlib are not here")
@pytest.mark.parametrize("name", ["cartpole/large.json", "pendulum/large.json", "parquet/cartpole-v1_large"])
def test_recordings_of_rllib_give_no_suspicion(name: str, tmp_path: Path) -> None:
    report = rlio.convert(SHARED / name, tmp_path / "a", prove=True)
    assert report.rows > 100
    assert report.suspicions == ()


# ---- defects in files, where no writer of rlio refuses them ----

#: Format -> our names of columns -> its names of arrays in HDF5.
_HDF5 = {
    "d4rl": {"obs": "observations", "new_obs": "next_observations", "actions": "actions",
             "rewards": "rewards", "terminateds": "terminals", "truncateds": "timeouts"},
    "robomimic": {"obs": "obs/flat", "new_obs": "next_obs/flat", "actions": "actions", "rewards": "rewards",
                  "terminateds": "dones"},
    "d3rlpy": {"obs": "observations_3", "actions": "actions_3", "rewards": "rewards_3"},
    "minari": {"obs": "observations", "actions": "actions", "rewards": "rewards",
               "terminateds": "terminations", "truncateds": "truncations"},
}  # fmt: skip
_GROUPS = {"robomimic": "data/demo_3", "minari": "episode_3"}
Columns = dict[str, np.ndarray[Any, Any]]
Change = Callable[[Columns], Columns]


def change_file(to: str, dst: Path, change: Change) -> None:
    """Change the rows of episode 3 in a file of 30 episodes, as arrays of the file with our names."""
    path = next(p for p in [dst, *sorted(dst.rglob("*"))] if p.is_file() and p.name != "metadata.json")
    lengths = [len(rows) for rows in copies()]
    start, stop = sum(lengths[:3]), sum(lengths[:4])
    if to in _HDF5:
        with h5py.File(path, "r+") as file:
            group = file[_GROUPS.get(to, "/")]
            names = {ours: theirs for ours, theirs in _HDF5[to].items() if theirs in group}
            flat = {ours: group[theirs][()] for ours, theirs in names.items()}
            cut = slice(start, stop) if to == "d4rl" else slice(0, lengths[3])
            changed = change({name: values[cut] for name, values in flat.items()})
            for ours, theirs in names.items():
                del group[theirs]
                group[theirs] = np.concatenate(
                    [flat[ours][: cut.start], changed[ours], flat[ours][cut.stop :]]
                )
            if to == "robomimic":
                group.attrs["num_samples"] = len(changed["obs"])
            elif to == "minari":
                group.attrs["total_steps"] = len(changed["obs"])
    elif to == "npz":
        with np.load(path) as found:
            arrays = dict(found)
        stored = arrays.pop("lengths")
        changed = change({name: values[start:stop] for name, values in arrays.items()})
        arrays = {n: np.concatenate([v[:start], changed[n], v[stop:]]) for n, v in arrays.items()}
        stored[3] = len(changed["obs"])
        np.savez(path, lengths=stored, **arrays)
    elif to == "parquet":
        table = pq.read_table(path)
        columns = {name: np.array(table[name].to_pylist()) for name in table.column_names}
        changed = change({name: values[start:stop] for name, values in columns.items()})
        whole = {n: np.concatenate([v[:start], changed[n], v[stop:]]) for n, v in columns.items()}
        pq.write_table(pa.table({n: v.tolist() for n, v in whole.items()}), path)
    elif to == "rllib-json":
        lines = path.read_text().splitlines()
        record = json.loads(lines[3])
        kind = record.pop("type")
        changed = change({name: np.array(values) for name, values in record.items()})
        lines[3] = json.dumps({"type": kind, **{name: values.tolist() for name, values in changed.items()}})
        path.write_text("\n".join(lines) + "\n")
    else:
        raise NotImplementedError(to)
    if to == "minari":
        about = dst / "data/metadata.json"
        found = json.loads(about.read_text())
        about.write_text(
            json.dumps({**found, "total_steps": sum(lengths) + len(changed["obs"]) - lengths[3]})
        )


def rows_of(order: Callable[[Any], Any]) -> Change:
    return lambda columns: {name: values[order(np.arange(len(values)))] for name, values in columns.items()}


def crossed(columns: Columns) -> Columns:
    columns["new_obs"][[2, 5]] = columns["new_obs"][[5, 2]]
    return columns


def exchanged(order: Any) -> Any:
    order[[4, 6]] = [6, 4]
    return order


def nan(columns: Columns) -> Columns:
    columns["rewards"][4] = np.nan
    return columns


def beyond(columns: Columns) -> Columns:
    columns["actions"][4] = 9
    return columns


IN_FILES: dict[str, Change] = {
    "crossed": crossed,
    "exchanged": rows_of(exchanged),
    "twice": rows_of(lambda order: np.insert(order, 4, 4)),
    "lost": rows_of(lambda order: np.delete(order, [4, 5])),
    "nan": nan,
    "beyond": beyond,
}
_STEPS = {
    "crossed": {"unlike_new_obs"},
    "exchanged": {"order", "sorted", "unlike_new_obs"},
    "twice": {"order", "repeated_rows", "repeated_steps", "unlike_new_obs"},
    "lost": {"missing_steps", "unlike_new_obs"},
    "nan": {"nan"},
}
_NEXT = {
    "crossed": {"unlike_new_obs"},
    "exchanged": {"unlike_new_obs"},
    "lost": {"unlike_new_obs"},
    "twice": {"repeated_rows", "unlike_new_obs"},
    "nan": {"nan"},
}
#: What is found of them; nothing, where a format has neither a next observation, a number of the step nor a
#: space. "damage": the file contradicts itself.
FOUND: dict[str, dict[str, set[str]]] = {
    **dict.fromkeys(("npz", "parquet", "rllib-json"), _STEPS),
    **dict.fromkeys(("d4rl", "robomimic"), _NEXT),
    "d3rlpy": {"twice": {"repeated_rows"}, "nan": {"nan"}},
    "minari": {"beyond": {"actions_outside"}, "twice": {"damage"}, "lost": {"damage"}, "nan": {"damage"}},
}


@pytest.mark.further
@pytest.mark.parametrize("to", ["npz", *further(*sorted(FOUND.keys() - {"npz"}))])
def test_defects_in_the_files_of_a_format_are_found(to: str, tmp_path: Path) -> None:
    clean = in_format(to, copies(), tmp_path / "clean")
    facts = {finding.kind for finding in rlio.convert(clean, tmp_path / "out").findings}
    for name, change in IN_FILES.items():
        if name == "crossed" and name not in FOUND[to]:
            continue  # Its next observation is the one of the next row.
        shutil.copytree(clean.parent, tmp_path / name)
        change_file(to, tmp_path / name / clean.name, change)
        try:
            report = rlio.convert(tmp_path / name / clean.name, tmp_path / f"{name}-out")
            found = {finding.kind for finding in report.findings} - facts
        except CorruptData:
            found = {"damage"}
        assert found == FOUND[to].get(name, set()), name


# An episode of d3rlpy that did not terminate was cut; D4RL's without timeouts are above.
@pytest.mark.few(1)
@pytest.mark.parametrize("to", written("npz", "minari", without=("d3rlpy", "d4rl")))
def test_lost_timeouts_are_found_in_every_format_that_is_written(to: str, tmp_path: Path) -> None:
    episodes = copies("Pendulum-v1", 5)
    for rows in episodes:
        rows["truncateds"][:] = False
    found = rlio.convert(in_format(to, episodes, tmp_path, "Pendulum-v1"), tmp_path / "out").findings
    kinds = {finding.kind for finding in found} - {"no_final_obs", "note"}
    assert kinds
    assert kinds <= {"unfinished", "no_timeouts"}
