"""Saved priorities: they say what they are of, and damage is an error of the state, never a wrong draw."""

from __future__ import annotations

import io
import json
import logging
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counter_env import episode
from stored_batches import store

import rlio
from rlio import MultiAgentBatch, ReplayStore
from rlio.errors import DataNotFound, StateError
from rlio.replay.samplers import PrioritisedSampler

ROWS = 40


@pytest.fixture(scope="module")
def root() -> str:
    return store(*(episode(0, number, 10) for number in range(4)))


@pytest.fixture
def stored(root: str) -> Iterator[ReplayStore]:
    with ReplayStore.open(root) as opened:
        yield opened


def live(*policies: str) -> ReplayStore:
    made = ReplayStore(ROWS)
    for number in range(4):
        rows = episode(0, number, 10)
        made.append(MultiAgentBatch(dict.fromkeys(policies, rows), 10) if policies else rows)
    return made


def updated(sampler: PrioritisedSampler) -> PrioritisedSampler:
    batch: Any = sampler.sample()
    sampler.update_priorities(batch["batch_indexes"], batch["rewards"])
    return sampler


# ---- other samplers ----

OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another alpha": ({"alpha": 0.9}, {"alpha": 0.4}, "alpha"),
    "another epsilon": ({}, {"epsilon": 0.1}, "epsilon"),
    "other steps": ({"draw": rlio.NStep(3)}, {}, "n_step"),
    "another discount": ({"draw": rlio.NStep(3)}, {"draw": rlio.NStep(3, gamma=0.5)}, "n_step"),
    "another filter": ({"filter": "t > 4"}, {"filter": "t <= 4"}, "filter"),
    "other derived columns": ({}, {"derive": ["mc_return(0.5)"]}, "derive"),
    "no derived columns": ({"derive": ["mc_return(0.5)"]}, {}, "derive"),
    "other sequences": ({"draw": rlio.Sequences(5)}, {"draw": rlio.Sequences(6, overlap=1)}, "sequences"),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("name", OTHERS)
def test_priorities_of_another_sampler_are_refused_and_the_message_says_what_differs(
    stored: ReplayStore, tmp_path: Path, name: str
) -> None:
    """They were drawn from in silence: with other exponents, or as those of other rows."""
    mine, theirs, key = OTHERS[name]
    updated(stored.prioritised(seed=0, **mine)).save(tmp_path / "kept")
    other = stored.prioritised(seed=0, **theirs)
    before = other.priorities.tree.values.copy()
    with pytest.raises(StateError, match=key) as raised:
        other.load(tmp_path / "kept")
    assert str(tmp_path / "kept") in str(raised.value)
    np.testing.assert_array_equal(other.priorities.tree.values, before)
    again = stored.prioritised(seed=0, **mine)
    again.load(tmp_path / "kept")
    assert again.priorities.tree.values.max() > 1.0


@pytest.mark.parametrize("name", ["another alpha", "another epsilon", "other steps"])
def test_a_state_of_a_sampler_with_other_priorities_is_refused(stored: ReplayStore, name: str) -> None:
    mine, theirs, key = OTHERS[name]
    state = json.loads(json.dumps(stored.prioritised(seed=0, **mine).state_dict()))
    with pytest.raises(StateError, match=key):
        stored.prioritised(seed=0, **theirs).load_state_dict(state)
    stored.prioritised(**mine).load_state_dict(state)
    # What the weights are computed with may change from run to run, as when beta grows.
    stored.prioritised(beta=0.9, normalise="batch", **mine).load_state_dict(state)


def test_priorities_of_other_data_are_refused(stored: ReplayStore, tmp_path: Path) -> None:
    """Another data set with as many rows."""
    updated(stored.prioritised(seed=0)).save(tmp_path / "kept")
    with ReplayStore.open(store(episode(0, 0, ROWS))) as other, pytest.raises(StateError, match="store"):
        other.prioritised(seed=0).load(tmp_path / "kept")


def test_priorities_of_one_policy_are_refused_by_the_sampler_of_another(tmp_path: Path) -> None:
    agents = live("a", "b")
    updated(agents.prioritised(seed=0, policy="a")).save(tmp_path / "kept")
    agents.save(tmp_path / "store", priorities=updated(agents.prioritised(seed=0, policy="a")))
    with pytest.raises(StateError, match="policy"):
        agents.prioritised(seed=0, policy="b").load(tmp_path / "kept")
    loaded = ReplayStore.load(tmp_path / "store")
    with pytest.raises(StateError, match="policy"):
        loaded.prioritised(seed=0, policy="b")
    assert loaded.prioritised(seed=0, policy="a").priorities.tree.values.max() > 1.0
    agents.prioritised(seed=0, policy="a").load(tmp_path / "kept")


def test_the_only_policy_may_be_named_or_not(tmp_path: Path) -> None:
    only = live()
    updated(only.prioritised(seed=0)).save(tmp_path / "kept")
    only.prioritised(seed=0, policy="default_policy").load(tmp_path / "kept")


def test_a_loaded_store_is_drawn_from_otherwise_without_its_priorities(tmp_path: Path) -> None:
    made = live()
    made.save(tmp_path / "store", priorities=updated(made.prioritised(seed=0, alpha=0.9)))
    loaded = ReplayStore.load(tmp_path / "store")
    with pytest.raises(StateError, match=r"alpha.*priorities=False"):
        loaded.prioritised(seed=0)
    assert loaded.prioritised(seed=0, alpha=0.9).priorities.drawn == 256
    bare = ReplayStore.load(tmp_path / "store", priorities=False)
    assert bare.prioritised(seed=0).priorities.tree.values.tolist() == [1.0] * ROWS


def test_a_checkpoint_of_priorities_says_what_they_are_of(stored: ReplayStore, tmp_path: Path) -> None:
    rlio.save_checkpoint(tmp_path / "saved", sampler=updated(stored.prioritised(seed=0, alpha=0.9)))
    with pytest.raises(StateError, match="alpha"):
        rlio.load_checkpoint(tmp_path / "saved", sampler=stored.prioritised(seed=0))
    sampler = stored.prioritised(alpha=0.9)
    rlio.load_checkpoint(tmp_path / "saved", sampler=sampler)
    assert (sampler.priorities.drawn, sampler.seed) == (256, 0)


# ---- damage ----


def saved(sampler: PrioritisedSampler, folder: Path) -> bytes:
    updated(sampler).save(folder / "kept")
    return (folder / "kept").read_bytes()


def npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def members(data: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(data)) as found:
        return dict(found)


def zipped(data: bytes, how: int = zipfile.ZIP_STORED, **other: bytes) -> bytes:
    """The archive again, with other bytes in place of some members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", how) as new:
        for name in old.namelist():
            new.writestr(name, other.get(name.removesuffix(".npy"), old.read(name)))
    return buffer.getvalue()


def header(**fields: Any) -> bytes:
    """An array file that promises what ``fields`` say, and has eight bytes."""
    buffer = io.BytesIO()
    told = {"descr": "<f8", "fortran_order": False, "shape": (1,), **fields}
    np.lib.format.write_array_header_1_0(buffer, told)
    return buffer.getvalue() + bytes(8)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "not an archive": lambda data: b"a text" * 100,
    "a single array": lambda data: header(),
    "an archive of nothing": lambda data: npz(),
    "an archive of other things": lambda data: npz(weights=np.ones(3)),
    "compressed": lambda data: zipped(data, zipfile.ZIP_DEFLATED),
    "values of another length": lambda data: npz(**members(data) | {"values": np.ones(ROWS - 1)}),
    "values in a square": lambda data: npz(**members(data) | {"values": np.ones((ROWS, 1))}),
    "values in single precision": lambda data: npz(**members(data) | {"values": np.ones(ROWS, np.float32)}),
    "whole numbers": lambda data: npz(**members(data) | {"values": np.ones(ROWS, np.int64)}),
    "texts": lambda data: npz(**members(data) | {"values": np.full(ROWS, "1")}),
    "NaN": lambda data: npz(**members(data) | {"values": np.full(ROWS, np.nan)}),
    "infinity": lambda data: npz(**members(data) | {"values": np.full(ROWS, np.inf)}),
    "negative": lambda data: npz(**members(data) | {"values": -np.ones(ROWS)}),
    "a row that is never drawn": lambda data: npz(**members(data) | {"values": np.eye(ROWS)[0]}),
    "a lower maximum": lambda data: npz(**members(data) | {"maximum": np.float64(1.0)}),
    "no maximum": lambda data: npz(**{k: v for k, v in members(data).items() if k != "maximum"}),
    "no values": lambda data: npz(**{k: v for k, v in members(data).items() if k != "values"}),
    "no rows": lambda data: npz(**{k: v for k, v in members(data).items() if k != "span"}),
    "rows in words": lambda data: npz(**members(data) | {"span": np.array(["a", "b"])}),
    "one row": lambda data: npz(**members(data) | {"span": np.array([1])}),
    "draws before none": lambda data: npz(**members(data) | {"drawn": np.int64(-1)}),
    "what it is of in numbers": lambda data: npz(**members(data) | {"of": np.ones(3)}),
    "what it is of in no JSON": lambda data: npz(**members(data) | {"of": np.array("{")}),
    "what it is of in a list": lambda data: npz(**members(data) | {"of": np.array("[]")}),
    "objects": lambda data: zipped(data, values=header(descr="|O")),
    "more than there is": lambda data: zipped(data, values=header(shape=(10**12,))),
    "no shape": lambda data: zipped(data, values=header(shape="wide")),
    "no array": lambda data: zipped(data, values=b"\x93NUMPY"),
}


@pytest.mark.few(15)
@pytest.mark.parametrize("rows", ["stored", "live"])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.each_value_once
def test_damaged_priorities_are_an_error_of_the_state(
    stored: ReplayStore, tmp_path: Path, damage: str, rows: str
) -> None:
    held = stored if rows == "stored" else live()
    (tmp_path / "kept").write_bytes(DAMAGES[damage](saved(held.prioritised(seed=0), tmp_path)))
    sampler = held.prioritised(seed=0)
    before = sampler.priorities.tree.values.copy()
    with pytest.raises(StateError) as raised:
        sampler.load(tmp_path / "kept")
    assert str(tmp_path / "kept") in str(raised.value)
    np.testing.assert_array_equal(sampler.priorities.tree.values, before)
    sampler.sample()


def test_priorities_cut_anywhere_or_with_a_flipped_byte_are_refused_or_unchanged(
    stored: ReplayStore, tmp_path: Path
) -> None:
    data = saved(stored.prioritised(seed=0), tmp_path)
    expected = members(data)["values"]
    place, sampler, refused = tmp_path / "kept", stored.prioritised(seed=0), 0
    rng = np.random.default_rng(0)
    flips = [(at, 1 << int(rng.integers(8))) for at in range(0, len(data), 5)]
    for change in (*range(0, len(data), 31), *flips):
        if isinstance(change, int):
            place.write_bytes(data[:change])
        else:
            at, bit = change
            place.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
        try:
            sampler.load(place)
        except StateError:
            refused += 1
        else:  # A time or a flag of the archive, of which nothing is read.
            np.testing.assert_array_equal(sampler.priorities.tree.values, expected)
            assert sampler.priorities.drawn == 256
    assert refused > 0.8 * (len(data) / 31 + len(data) / 5)


def test_a_file_of_priorities_takes_no_more_memory_than_the_store_needs(
    stored: ReplayStore, tmp_path: Path
) -> None:
    with (tmp_path / "kept").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(StateError, match="bytes"):
        stored.prioritised(seed=0).load(tmp_path / "kept")


def test_absent_priorities_are_not_found(stored: ReplayStore, tmp_path: Path) -> None:
    with pytest.raises(DataNotFound):
        stored.prioritised(seed=0).load(tmp_path / "nothing")
    with pytest.raises(StateError):
        stored.prioritised(seed=0).load(tmp_path)


@pytest.mark.few(5)
@pytest.mark.parametrize("damage", ["flipped", "truncated", "absent"])
@pytest.mark.parametrize("array", ["values", "maximum", "drawn"])
def test_damaged_priorities_of_a_saved_store_are_an_error_of_the_state_and_its_rows_are_not_lost(
    tmp_path: Path, array: str, damage: str
) -> None:
    made = live()
    made.save(tmp_path / "store", priorities=updated(made.prioritised(seed=0)))
    (file,) = (tmp_path / "store").glob(f"**/priorities*{array}*")
    data = file.read_bytes()
    if damage == "flipped":
        file.write_bytes(data[:3] + bytes([data[3] ^ 4]) + data[4:])
    elif damage == "truncated":
        file.write_bytes(data[:-1])
    else:
        file.unlink()
    with pytest.raises(StateError, match="priorities=False") as raised:
        ReplayStore.load(tmp_path / "store")
    assert str(tmp_path / "store") in str(raised.value)
    assert len(ReplayStore.load(tmp_path / "store", priorities=False)) == ROWS


# ---- earlier versions ----


def earlier(place: Path) -> None:
    """What a version before wrote: without what the priorities are of."""
    place.write_bytes(npz(**{k: v for k, v in members(place.read_bytes()).items() if k != "of"}))


def test_earlier_priorities_go_to_a_sampler_with_the_defaults_and_say_so(
    stored: ReplayStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(stored.prioritised(seed=0), tmp_path)
    earlier(tmp_path / "kept")
    sampler = stored.prioritised(seed=0)
    with caplog.at_level(logging.WARNING):
        sampler.load(tmp_path / "kept")
    assert sampler.priorities.drawn == 256
    assert [record for record in caplog.records if "alpha" in record.message]
    for options in ({"alpha": 0.5}, {"epsilon": 0.1}):
        with pytest.raises(StateError, match="earlier version"):
            stored.prioritised(seed=0, **options).load(tmp_path / "kept")


def test_earlier_priorities_of_one_of_several_policies_are_refused(tmp_path: Path) -> None:
    agents = live("a", "b")
    saved(agents.prioritised(seed=0, policy="a"), tmp_path)
    earlier(tmp_path / "kept")
    for policy in ("a", "b"):
        with pytest.raises(StateError, match="earlier version"):
            agents.prioritised(seed=0, policy=policy).load(tmp_path / "kept")


def test_an_earlier_state_without_alpha_is_loaded(stored: ReplayStore) -> None:
    state = stored.prioritised(seed=0, alpha=0.9).state_dict()
    del state["position"]["priorities"]
    stored.prioritised(alpha=0.3).load_state_dict(state)


def test_hostile_priorities_in_a_checkpoint_are_refused(stored: ReplayStore, tmp_path: Path) -> None:
    sampler = updated(stored.prioritised(seed=0))
    kept = sampler.kept()
    with pytest.raises(StateError):
        sampler.restore([])  # type: ignore[arg-type]
    for wrong in ({}, {"span": None}, {"span": [1]}, {"priorities": None}, {"of": 3}, {"of": {}}):
        with pytest.raises(StateError):
            sampler.restore(kept | wrong if wrong else {})
    sampler.restore(kept)
