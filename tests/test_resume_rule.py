"""What decides which rows come next is the same in a state and its reader; how they are served may differ.

The table is in docs/guarantees.md, under "Resuming".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from further import some
from test_ranks import MAPPING, WHOLE, episodes, table

import rlio
from rlio.errors import EndOfData, StateError
from rlio.readers.table_reader import from_arrays, from_episodes

LENGTH, EPISODES = 6, 8
ROWS = LENGTH * EPISODES
COLUMNS = ["rewards", "actions", "obs"]

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("resume")
    ids = np.arange(ROWS)
    columns: dict[str, Any] = {
        "obs": ids[:, None].astype(np.float32),
        "new_obs": (ids[:, None] + 1).astype(np.float32),
        "actions": ids % 3,
        "rewards": ids.astype(np.float32),
        "terminateds": ids % LENGTH == LENGTH - 1,
        "truncateds": np.zeros(ROWS, bool),
        "eps_id": ids // LENGTH,
        "t": ids % LENGTH,
    }
    with rlio.ParquetWriter(folder / "rlio", roll=rlio.Roll(max_rows=20, max_seconds=None)) as writer:
        writer.write(rlio.SampleBatch(columns))
    found = {"rlio": str(folder / "rlio")}
    for name, suffix in {"minari": "", "rllib-json": "", "d4rl": ".hdf5", "npz": ""}.items():
        found[name] = str(folder / f"{name}{suffix}")
        rlio.convert(folder / "rlio", found[name], to=name)
    plain = {"obs": columns["rewards"], "actions": columns["actions"], "rewards": columns["rewards"]}
    pq.write_table(pa.table(plain), folder / "foreign.parquet", row_group_size=7)
    return {**found, "parquet": str(folder / "foreign.parquet")}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLIO_CACHE", str(tmp_path / "cache"))


def reading(name: str, **fixed: Any) -> Callable[[dict[str, str]], Make]:
    return lambda roots: lambda **options: rlio.read(roots[name], **{**fixed, **options})


def wrapped(wrap: Callable[[Any], Any]) -> Callable[[dict[str, str]], Make]:
    return lambda roots: lambda **options: wrap(rlio.read(roots["rlio"], cache="none", **options))


SHUFFLED: dict[str, Any] = {"shuffle": True, "seed": 3}
#: Readers of epochs, by the options that all of them take.
READERS: dict[str, Callable[[dict[str, str]], Make]] = {
    "recorded order": reading("rlio", cache="none"),
    "windows": reading("rlio", cache="none", **SHUFFLED),
    "windows of a filter": reading("rlio", cache="none", filter="rewards >= 5", **SHUFFLED),
    "a permutation": reading("rlio", cache="memory", **SHUFFLED),
    "a permutation on disk": reading("rlio", cache="disk", **SHUFFLED),
    "n-step": reading("rlio", draw=rlio.NStep(2, gamma=0.5), **SHUFFLED),
    "epochs of a store": lambda roots: (
        lambda **options: rlio.ReplayStore.open(roots["rlio"]).epochs(**{"seed": 3, **options})
    ),
    "Minari": reading("minari", **SHUFFLED),
    "Minari without a store": reading("minari", cache="none", **SHUFFLED),
    "NPZ in order": reading("npz"),
    "RLlib's JSON": reading("rllib-json", **SHUFFLED),
    "D4RL": reading("d4rl", **SHUFFLED),
    "D4RL without a store": reading("d4rl", cache="none", **SHUFFLED),
    "others' Parquet": reading("parquet", **SHUFFLED),
    "others' Parquet without a store": reading("parquet", cache="none", **SHUFFLED),
    "a function of batches": wrapped(lambda reader: rlio.MappedInput(reader, lambda batch: batch)),
    "a recording": wrapped(lambda reader: rlio.RecordingInput(reader, rlio.NoopOutput())),
    "a mixture": lambda roots: (
        lambda batch_size, **options: rlio.MixedInput(
            [(rlio.read(roots["rlio"], **SHUFFLED | options), 1), (rlio.read(roots["minari"], **options), 1)],
            batch_size=batch_size,
        )
    ),
}
SEEDED = [name for name in READERS if not {"recorded", "order", "function", "recording"} & set(name.split())]


def reals(batch: Any) -> list[float]:
    found: list[float] = np.asarray(batch["rewards"]).ravel().tolist()
    return found


def rest_of(reader: Any) -> list[float]:
    with reader:
        return [value for batch in reader for value in reals(batch)]


def saved(make: Make, calls: int = 4, **options: Any) -> tuple[Any, list[float]]:
    """The state after some batches, through JSON, and all rows that follow."""
    reader = make(**{"batch_size": 5, "epochs": 2, **options})
    for _ in range(calls):
        reader.sample()
    state = json.loads(json.dumps(reader.state_dict()))
    return state, rest_of(reader)


def loaded(make: Make, state: Any, **options: Any) -> Any:
    reader = make(**{"batch_size": 5, "epochs": 2, **options})
    try:
        reader.load_state_dict(state)
    except BaseException:
        reader.close()
        raise
    return reader


@pytest.mark.few(2)
@pytest.mark.parametrize("name", some(2, READERS, start=1))
def test_a_state_loads_with_another_batch_size(roots: dict[str, str], name: str) -> None:
    make = READERS[name](roots)
    state, rest = saved(make)
    assert len(rest) > ROWS
    # The rows of a batch of a mixture are in the order of its sources.
    order = sorted if name == "a mixture" else list
    assert order(rest_of(loaded(make, state, batch_size=9))) == order(rest)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", some(2, READERS))
def test_a_state_loads_with_more_epochs_and_not_beyond_the_end_of_fewer(
    roots: dict[str, str], name: str
) -> None:
    """A finished reader could not read on, and one that had read further gave nothing, without an error."""
    make = READERS[name](roots)
    state, rest = saved(make)
    more = rest_of(loaded(make, state, epochs=3))
    # A last batch that was short is now filled up, which changes the order in a batch of a mixture.
    assert more[: len(rest) - 5] == rest[:-5]
    assert len(more) > len(rest)
    assert name == "a mixture" or more[: len(rest)] == rest
    with make(batch_size=5, epochs=2) as reader:
        while True:
            try:
                reader.sample()
            except EndOfData:
                break
        finished = reader.state_dict()
    assert rest_of(loaded(make, finished)) == []
    order = sorted if name == "a mixture" else list
    assert order(rest + rest_of(loaded(make, finished, epochs=3))) == order(more)
    with pytest.raises(StateError, match="epochs"):
        loaded(make, finished, epochs=1)
    endless = loaded(make, finished, epochs=None)
    assert name == "a mixture" or reals(endless.sample(3)) == more[len(rest) :][:3]
    endless.close()


@pytest.mark.few(3)
@pytest.mark.parametrize("epochs", [0, -1, 1.5, "2", True, []])
def test_a_state_whose_epochs_are_no_number_is_refused(roots: dict[str, str], epochs: Any) -> None:
    make = READERS["recorded order"](roots)
    state, _ = saved(make)
    state["position"]["options"]["epochs"] = epochs
    with pytest.raises(StateError, match="epochs"):
        loaded(make, state)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", some(2, READERS, start=1))
def test_a_state_loads_with_the_columns_in_another_order_and_not_with_others(
    roots: dict[str, str], name: str
) -> None:
    make = READERS[name](roots)
    state, rest = saved(make, columns=COLUMNS)
    assert rest_of(loaded(make, state, columns=COLUMNS[::-1])) == rest
    if name == "epochs of a store":  # Its rows are loaded: columns cannot change them.
        assert rest_of(loaded(make, state, columns=["rewards"])) == rest
        return
    with pytest.raises(StateError, match="columns"):
        loaded(make, state, columns=["rewards"])


@pytest.mark.few(2)
@pytest.mark.parametrize("name", some(2, SEEDED))
def test_the_seed_of_a_state_counts_unless_another_is_given(roots: dict[str, str], name: str) -> None:
    make = READERS[name](roots)
    state, rest = saved(make, seed=3)
    with pytest.raises(StateError, match="same seed"):
        loaded(make, state, seed=4)
    reader = loaded(make, state, seed=None)
    assert name == "a mixture" or getattr(reader, "seed", 3) == 3
    assert rest_of(reader) == rest


def test_a_state_of_what_is_followed_loads_with_another_batch_size_and_order_of_columns(
    roots: dict[str, str],
) -> None:
    make = READERS["recorded order"](roots)

    def follow(**options: Any) -> Any:
        return rlio.FollowReader(roots["rlio"], idle_timeout=0, **options)

    with follow(batch_size=5, columns=COLUMNS) as reader:
        reader.sample()
        state = reader.state_dict()
    with follow(batch_size=7, columns=COLUMNS[::-1]) as reader:
        reader.load_state_dict(state)
        assert rest_of(reader) == rest_of(make(epochs=1))[5:]
    with follow(columns=["rewards"]) as reader, pytest.raises(StateError, match="columns"):
        reader.load_state_dict(state)


# ---- draws ----


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("kind", ["uniform", "prioritised"])
def test_a_sampler_refuses_a_state_of_another_seed(roots: dict[str, str], kind: str, live: bool) -> None:
    """It went on with the seed of the state, whatever seed it was given."""
    if live:
        store = rlio.ReplayStore(ROWS)
        store.append(rlio.read(roots["rlio"], batch_size=ROWS, epochs=1).sample())  # type: ignore[arg-type]
    else:
        store = rlio.ReplayStore.open(roots["rlio"])

    def draws(**options: Any) -> Any:
        return getattr(store, kind)(**{"batch_size": 4, **options})

    first = draws(seed=1)
    first.sample()
    state = json.loads(json.dumps(first.state_dict()))
    expected = reals(first.sample(12))
    with pytest.raises(StateError, match="same seed"):
        draws(seed=2).load_state_dict(state)
    for options in ({"seed": 1}, {}, {"batch_size": 6}, {"columns": ["t", "rewards"]}):
        other = draws(**options)
        other.load_state_dict(state)
        assert other.seed == 1
        assert reals(other.sample(12)) == expected, options
    store.close()


def test_a_replay_that_follows_refuses_a_state_of_another_seed(roots: dict[str, str]) -> None:
    def replay(**options: Any) -> Any:
        return rlio.FollowingReplay(roots["rlio"], capacity=100, batch_size=4, **options)

    with replay(seed=1) as reader:
        reader.sample()
        state = reader.state_dict()
    with replay(seed=2) as reader, pytest.raises(StateError, match="same seed"):
        reader.load_state_dict(state)
    with replay() as reader:
        reader.load_state_dict(state)
        assert reader.seed == 1


# ---- batches that are shuffled ----


def test_a_shuffle_refuses_a_state_of_another_seed(roots: dict[str, str]) -> None:
    """It went on with the seed of the state, whatever seed it was given."""

    def shuffle(seed: int | None) -> rlio.ShuffledInput:
        return rlio.ShuffledInput(rlio.read(roots["rlio"], batch_size=5, epochs=2), 4, seed=seed)

    with shuffle(1) as reader:
        reader.sample()
        state, rest = json.loads(json.dumps(reader.state_dict())), rest_of(reader)
    with shuffle(2) as other, pytest.raises(StateError, match="same seed"):
        other.load_state_dict(state)
    with shuffle(None) as other:
        other.load_state_dict(state)
        assert other.seed == 1
        assert rest_of(other) == rest


def test_a_shuffle_refuses_a_state_within_a_window_of_batches_of_another_size(roots: dict[str, str]) -> None:
    """Rows of the window were served twice, and others never."""

    def shuffle(batch_size: int, epochs: int = 2) -> rlio.ShuffledInput:
        child = rlio.read(roots["rlio"], batch_size=batch_size, epochs=epochs)
        return rlio.ShuffledInput(child, 4, seed=1)

    reader = shuffle(5)
    states = []
    for _ in range(4):
        reader.sample()
        states.append(json.loads(json.dumps(reader.state_dict())))
    rest = rest_of(reader)
    with shuffle(6) as other:
        other.load_state_dict(states[0])
        for _ in range(2):
            with pytest.raises(StateError, match="batch size"):
                other.sample()
    with shuffle(6) as other:  # Between two windows, any size fits.
        other.load_state_dict(states[3])
        assert sorted(rest_of(other)) == sorted(rest)
    del states[0]["position"]["units"]  # As earlier versions saved it.
    with shuffle(5) as other:
        other.load_state_dict(states[0])
        assert rest_of(other)[-len(rest) :] == rest


# ---- earlier states, and tables in memory ----


def test_an_earlier_state_holds_the_columns_in_the_order_in_which_they_were_named(
    roots: dict[str, str],
) -> None:
    for more in ({}, SHUFFLED, {"on_error": "skip", "cache": "memory"}):
        make = reading("rlio", **more)(roots)
        state, rest = saved(make, columns=["rewards", "actions", "obs"])
        # What dd0ca8f saved for these columns.
        state["position"]["options"]["columns"] = "a1b2"
        with pytest.raises(StateError, match="columns"):
            loaded(make, state, columns=["rewards", "actions", "obs"])
        text = json.dumps(["rewards", "actions", "obs"], separators=(",", ":")).encode()
        state["position"]["options"]["columns"] = hashlib.blake2b(text, digest_size=8).hexdigest()
        assert rest_of(loaded(make, state, columns=["rewards", "actions", "obs"])) == rest


def test_states_of_tables_in_memory_follow_the_rule() -> None:
    def arrays(**options: Any) -> Any:
        return from_arrays(table(), **MAPPING, **SHUFFLED, **options)

    def listed(**options: Any) -> Any:
        return from_episodes(episodes(), mapping=WHOLE, **SHUFFLED, **options)

    for make in (arrays, listed):
        state, rest = saved(make)
        more = rest_of(loaded(make, state, batch_size=9, epochs=3))
        assert more[: len(rest)] == rest
