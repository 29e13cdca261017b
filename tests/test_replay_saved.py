"""A live store that was loaded draws as the one that was saved: the same rows follow each other."""

from __future__ import annotations

import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counter_env import episode
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_stores import STORES, numbered, with_infos

from rlio import MultiAgentBatch, ReplayStore, SampleBatch, concat_samples
from rlio.errors import CacheError, OptionError, SchemaError, StateError
from rlio.replay.draws import Draw
from rlio.replay.memory import RamArrays
from rlio.replay.n_step import NStep
from rlio.replay.sequences import Sequences

GOLDEN = Path(__file__).with_name("golden") / "saved-stores"
GOLDEN_2 = Path(__file__).with_name("golden") / "saved-stores-2"

#: One of each kind of unit.
DRAWS = {
    "steps": Draw(indexes=True),
    "n_step": Draw(n_step=NStep(3, 0.5), indexes=True),
    "sequences": Draw(sequences=Sequences(4, burn_in=2, overlap=1), indexes=True),
    "episodes": Draw(episodes=True, indexes=True),
    "views": Draw(views=True),
}


def everything(store: ReplayStore) -> dict[str, Any]:
    """Every unit of every draw, policy by policy and of all together: "draw/policy" -> column -> values."""
    found: dict[str, Any] = {}
    for name, draw in DRAWS.items():
        for policy in store.tables:
            own = Draw(**{**vars(draw), "policy": policy})
            units = store.units(own)
            found[f"{name}/{policy}"] = columns(units.batch(np.arange(units.count)))
    units = store.units(Draw())
    if units.count:
        joint = units.batch(np.arange(units.count))
        parts = joint if isinstance(joint, MultiAgentBatch) else {"all": joint}
        found |= {f"joint/{pid}": columns(part) for pid, part in parts.items()}
    return found


def columns(batch: Any) -> dict[str, Any]:
    assert isinstance(batch, SampleBatch)
    found = {}
    for name, values in batch.items():
        shown = values.tolist() if values.ndim < 2 or values.size < 200 else zlib.crc32(values.tobytes())
        found[name] = values.dtype.str, values.shape, shown
    return found


def loaded(store: ReplayStore, folder: Path) -> ReplayStore:
    store.save(folder)
    return ReplayStore.load(folder)


def returns(store: ReplayStore) -> list[float]:
    units = store.units(Draw(n_step=NStep(3, 1.0)))
    return sorted(units.batch(np.arange(units.count))["rewards"].tolist())


# ---- what was wrong ----


def test_a_load_does_not_join_the_rows_of_two_writers_with_one_eps_id(tmp_path: Path) -> None:
    store = STORES["two_writers"]()
    expected = returns(store)
    assert expected == [3.0, 5.0, 6.0, 30.0, 50.0, 60.0]
    assert returns(loaded(store, tmp_path / "saved")) == expected


def test_an_episode_that_lost_its_first_rows_is_not_whole_after_a_load(tmp_path: Path) -> None:
    store = STORES["half_an_episode"]()
    other = loaded(store, tmp_path / "saved")
    for each in (store, other):
        found = each.units(DRAWS["episodes"]).batch(np.arange(1))
        assert found["t"].tolist() == list(range(10))
        assert each.units(DRAWS["episodes"]).count == 1


def test_a_writer_goes_on_with_its_own_episode_after_a_load(tmp_path: Path) -> None:
    store = ReplayStore(100)
    for writer, rewards in (("a", [1.0, 2.0]), ("b", [10.0, 20.0])):
        store.append(numbered(0, rewards, ends=False), writer=writer)
    other = loaded(store, tmp_path / "saved")
    for each in (store, other):
        each.append(numbered(0, [30.0], first=2), writer="b")
        each.append(numbered(0, [3.0], first=2), writer="a")
    assert everything(other) == everything(store)
    assert returns(other) == [3.0, 5.0, 6.0, 30.0, 50.0, 60.0]


# ---- the law ----


def any_part(data: st.DataObject, times: dict[tuple[str, int, int], int], kind: str) -> SampleBatch | None:
    """Some steps of some environments: rows of episodes that alternate, each going on where it was."""
    count = data.draw(st.integers(1, 3))
    parts = []
    for env in range(count):
        number = times.setdefault(("number", env, 0), 0)
        start = times.get(("t", env, number), 0)
        stop = min(start + data.draw(st.integers(1, 7)), 9)
        parts.append(episode(env, number, 9, start=start, stop=stop, kind=kind))
        times["t", env, number] = stop
        if stop == 9:
            times["number", env, 0] = number + 1
    order = data.draw(st.permutations(range(sum(map(len, parts)))))
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    env, t = joined["env_id"], joined["t"]
    rows = sorted(range(len(t)), key=lambda row: (int(t[row]), order[row], int(env[row])))
    rows = sorted(rows, key=lambda row: order[row] % 2) if data.draw(st.booleans()) else rows
    made = SampleBatch({name: values[rows] for name, values in joined.items()})
    # Two writers count their episodes alike.
    made["eps_id"] = made["eps_id"] % 1000
    infos = np.empty(len(made), object)
    infos[:] = [{"t": int(value), "text": "é" * int(value)} for value in made["t"]]
    made["infos"] = infos
    return made


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_what_is_loaded_draws_and_goes_on_as_what_was_saved(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["vector", "image", "stack"]))
    capacity = data.draw(st.integers(4, 60))
    frames = data.draw(st.sampled_from([None, 8 * capacity + 40]))
    joint = data.draw(st.booleans())
    store = ReplayStore(capacity, frames=frames)
    times: dict[str, dict[Any, int]] = {}

    def append(*stores: ReplayStore) -> None:
        writer = data.draw(st.sampled_from(["a", "b", ""]))
        own = times.setdefault(writer, {})
        batch: Any = any_part(data, own, kind)
        if joint:
            late = any_part(data, times.setdefault(f"{writer} b", {}), kind)
            parts = {"x": batch} | ({"y": late} if data.draw(st.booleans()) else {})
            batch = MultiAgentBatch(parts, len(batch))
        for each in stores:
            each.append(batch, writer=writer)

    for _ in range(data.draw(st.integers(1, 8))):
        append(store)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "saved"
        other = loaded(store, folder)
        assert everything(other) == everything(store)
        for _ in range(data.draw(st.integers(0, 4))):
            append(store, other)
            assert everything(other) == everything(store)
        again = loaded(other, folder)
        assert everything(again) == everything(store)


def test_frames_that_run_out_are_forgotten_as_before_after_a_load(tmp_path: Path) -> None:
    store = ReplayStore(60, frames=30)
    other = store
    for start in range(0, 80, 4):
        rows = episode(0, 0, 200, start=start, stop=start + 4, kind="stack")
        for each in {store, other}:
            each.append(rows)
        assert everything(other) == everything(store)
        if start == 60:
            assert len(store) < 40  # Not as many as there is room for: frames are used up.
            other = loaded(store, tmp_path / "saved")
    assert other is not store


# ---- what is refused ----


def test_a_batch_that_is_refused_leaves_every_row_as_it_was() -> None:
    """That an episode has too many frames was found out after frames of older rows had been overwritten."""
    store, twin = (ReplayStore(160, frames=14) for _ in range(2))
    for each in (store, twin):
        each.append(episode(0, 0, 9, stop=6, kind="stack"))
    before = everything(store)
    # The first episode has room for its frames, and the second has none.
    with pytest.raises(OptionError):
        store.append(concat_samples([episode(1, 0, 5, kind="stack"), episode(2, 0, 30, kind="stack")]))
    assert everything(store) == before
    with pytest.raises(SchemaError):
        store.append(SampleBatch(obs=[[1.0]]))
    assert everything(store) == before
    for each in (store, twin):
        each.append(episode(0, 0, 9, start=6, kind="stack"))
    assert everything(store) == everything(twin)


def test_a_joint_batch_is_taken_whole_or_not_at_all() -> None:
    store = ReplayStore(160, frames=14)
    first = {"a": episode(0, 0, 4, kind="stack"), "b": episode(1, 0, 4, kind="stack")}
    store.append(MultiAgentBatch(first, 4))
    before = everything(store)
    good, too_long = episode(0, 1, 20, stop=5, kind="stack"), episode(1, 1, 20, kind="stack")
    for pid in ("b", "c"):  # One that is known, and one that is new.
        with pytest.raises(OptionError):
            store.append(MultiAgentBatch({"a": good, pid: too_long}, 20))
        found = everything(store)
        assert {name: found[name] for name in before} == before


def test_a_store_whose_first_batch_is_refused_takes_another(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        with ReplayStore(160, frames=14, folder=folder) as store:
            with pytest.raises(OptionError):
                store.append(episode(0, 0, 30, kind="stack"))
            assert len(store) == 0
            store.append(numbered(0, [1.0, 2.0, 3.0]))
            assert returns(store) == [3.0, 5.0, 6.0]


@pytest.mark.further
def test_an_episode_goes_on_after_a_batch_that_found_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever piece of memory is the one that is refused."""

    def appended(store: ReplayStore, number: int) -> None:
        rows = episode(0, 0, 90, start=6 * number, stop=6 * number + 6, kind="stack")
        rows["infos"] = np.array([{"t": int(t)} for t in rows["t"]] + [None], object)[:-1]
        other = episode(1, 0, 90, start=6 * number, stop=6 * number + 6)
        store.append(MultiAgentBatch({"a": rows, "b": other}, 6))

    twin = ReplayStore(20)
    for number in range(6):
        appended(twin, number)
    store, calls = ReplayStore(20), 0
    reserve = RamArrays.reserve
    for number in range(6):
        refused = 0
        while True:
            before, left = everything(store), refused

            def full(self: RamArrays, name: str, rows: int) -> None:
                nonlocal left
                left -= 1
                if left == -1:
                    raise CacheError("no space")
                reserve(self, name, rows)

            with monkeypatch.context() as patch:
                patch.setattr(RamArrays, "reserve", full)
                try:
                    appended(store, number)
                    break
                except CacheError:
                    refused += 1
                    calls += 1
            if number:
                assert everything(store) == before
    assert calls >= 6
    assert everything(store) == everything(twin)


# ---- files of before ----


@pytest.mark.parametrize("name", ["whole_episodes", "agents"])
def test_a_store_that_an_earlier_version_saved_is_loaded_where_its_rows_say_what_follows(name: str) -> None:
    store, old = STORES[name](), ReplayStore.load(GOLDEN / name)
    assert everything(old) == everything(store)
    if name == "whole_episodes":
        assert old.prioritised(batch_size=4).span == (20, 64)
        more = with_infos(episode(0, 6, 10, start=4, kind="stack"))
        for each in (store, old):
            each.append(more)
        assert everything(old) == everything(store)


@pytest.mark.parametrize("name", sorted(set(STORES) - {"whole_episodes", "agents"}))
def test_a_store_of_an_earlier_version_whose_rows_do_not_say_what_follows_is_refused(name: str) -> None:
    with pytest.raises(StateError) as raised:
        ReplayStore.load(GOLDEN / name)
    assert raised.value.uri == str(GOLDEN / name)


@pytest.mark.parametrize("name", ["two_writers", "agents"])
def test_a_store_whose_arrays_lie_beside_its_manifest_is_loaded_and_replaced(
    name: str, tmp_path: Path
) -> None:
    """As commit dd0ca8f saved it."""
    folder = tmp_path / "saved"
    shutil.copytree(GOLDEN_2 / name, folder)
    (folder / "mine.array").write_text("not a part of the store")
    store = STORES[name]()
    assert everything(ReplayStore.load(folder)) == everything(store)
    assert len(list(folder.glob("*.array"))) > 1
    assert everything(loaded(store, folder)) == everything(store)
    assert [path.name for path in folder.glob("*.array")] == ["mine.array"]
