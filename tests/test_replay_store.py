"""Stores of data sets and of live rows: every draw is what was recorded, whatever it was cut into."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counter_env import check_transitions, decode, episode, interleaved

import rlio
from rlio import (
    DatasetReader,
    MixedInput,
    MultiAgentBatch,
    ParquetWriter,
    ReplayStore,
    Roll,
    SampleBatch,
    ShuffledInput,
    open_dataset,
)
from rlio.errors import (
    ClosedError,
    CorruptData,
    DataNotFound,
    EndOfData,
    HoleError,
    MissingColumn,
    OptionError,
    SchemaError,
    StateError,
)

LENGTHS = {(env, number): 3 + (5 * env + 7 * number) % 23 for env in range(3) for number in range(8)}


def record(root: Path, *, kind: str = "vector", rows: int = 40) -> str:
    """Episodes of three environments, cut into fragments and shards, the environments step by step."""
    with ParquetWriter(root, roll=Roll(max_rows=rows), writer_id="w00000-00000000") as writer:
        for number in range(8):
            parts = [
                episode(env, number, LENGTHS[env, number], truncated=bool(env % 2), kind=kind)
                for env in range(3)
            ]
            whole = interleaved(parts)
            for start in range(0, len(whole), 11):
                writer.write(whole[start : start + 11])
    return str(root)


def collected(reader: Any) -> SampleBatch:
    found = list(reader)
    return SampleBatch({name: np.concatenate([b[name] for b in found]) for name in found[0]})


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["vector", "image", "stack"])
def test_an_epoch_gives_every_transition_once(tmp_path: Path, kind: str) -> None:
    store = ReplayStore.open(record(tmp_path, kind=kind))
    total = sum(LENGTHS.values())
    assert len(store) == total
    batch = collected(store.epochs(batch_size=7, epochs=1, seed=1))
    check_transitions(batch, lengths=LENGTHS)
    keys = decode(batch["obs"])
    assert len(np.unique(keys, axis=0)) == len(keys) == total
    assert not (np.diff(batch["eps_id"]) == 0).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["vector", "stack"])
@pytest.mark.parametrize("n", [1, 2, 5, 40])
@pytest.mark.each_value_once
def test_n_step_transitions_stop_at_the_end_of_their_episode(tmp_path: Path, kind: str, n: int) -> None:
    store = ReplayStore.open(record(tmp_path, kind=kind))
    batch = collected(store.epochs(batch_size=50, epochs=1, seed=1, draw=rlio.NStep(n, gamma=0.9)))
    check_transitions(batch, lengths=LENGTHS, n_step=n, gamma=0.9)
    here, there = decode(batch["obs"]), decode(batch["new_obs"])
    np.testing.assert_allclose(batch["n_step_discount"], 0.9 ** (there[:, 2] - here[:, 2]), rtol=1e-5)
    # Environments 0 and 2 terminate, 1 is truncated and bootstraps from its true last observation.
    ends = np.array([LENGTHS[e, m] for e, m in here[:, :2].tolist()])
    np.testing.assert_array_equal(batch["bootstrap_mask"], (there[:, 2] < ends) | (here[:, 0] == 1))


def test_sequences_cover_each_row_once_and_keep_to_one_episode(tmp_path: Path) -> None:
    store = ReplayStore.open(record(tmp_path))
    found = list(store.epochs(batch_size=5, epochs=1, seed=1, draw=rlio.Sequences(4)))
    seen = []
    for batch in found:
        assert batch.zero_padded
        lens = batch["seq_lens"]
        assert len(batch["obs"]) == 4 * len(lens)
        for number, length in enumerate(lens.tolist()):
            keys = decode(batch["obs"][4 * number : 4 * number + length])
            assert len(np.unique(keys[:, :2], axis=0)) == 1
            np.testing.assert_array_equal(np.diff(keys[:, 2]), 1)
            assert keys[0, 2] % 4 == 0
            assert not batch["obs"][4 * number + length : 4 * number + 4].any()
            seen += [tuple(key) for key in keys.tolist()]
    assert len(seen) == len(set(seen)) == sum(LENGTHS.values())


def test_burn_in_precedes_what_is_trained_and_overlap_repeats_it(tmp_path: Path) -> None:
    store = ReplayStore.open(record(tmp_path))
    trained: dict[tuple[int, ...], int] = {}
    reader = store.epochs(batch_size=3, epochs=1, seed=1, draw=rlio.Sequences(6, burn_in=3, overlap=2))
    for batch in reader:
        for number, length in enumerate(batch["seq_lens"].tolist()):
            rows = slice(9 * number, 9 * number + length)
            keys, warm = decode(batch["obs"][rows]), batch["burn_in"][rows]
            assert (np.diff(warm.astype(int)) <= 0).all()
            first = int(keys[~warm][0, 2])
            assert first % 4 == 0
            assert warm.sum() == min(first, 3)
            assert not batch["burn_in"][rows.stop : 9 * number + 9].any()
            for key in keys[~warm].tolist():
                trained[tuple(key)] = trained.get(tuple(key), 0) + 1
    assert len(trained) == sum(LENGTHS.values())
    for (_, _, t), times in trained.items():
        assert times == 1 or t >= 4


def test_recurrent_state_is_what_the_row_before_left(tmp_path: Path) -> None:
    with ParquetWriter(tmp_path) as writer:
        for number in range(3):
            rows = episode(0, number, 10)
            rows["state_out_0"] = np.stack([rows["eps_id"], rows["t"]], 1).astype(np.float32)
            writer.write(rows)
    store = ReplayStore.open(tmp_path)
    batch = store.epochs(batch_size=9, epochs=1, shuffle=False, draw=rlio.Sequences(4)).sample()
    assert batch["seq_lens"].tolist() == [4, 4, 2] * 3
    assert batch["state_in_0"][:3].tolist() == [[0, 0], [0, 3], [0, 7]]
    assert batch["state_in_0"][3:6].tolist() == [[0, 0], [1, 3], [1, 7]]


def test_whole_episodes(tmp_path: Path) -> None:
    store = ReplayStore.open(record(tmp_path))
    reader = store.epochs(batch_size=5, epochs=1, seed=2, draw=rlio.WholeEpisodes())
    assert len(reader) == len(LENGTHS)
    seen = []
    for batch in reader:
        start = 0
        for length in batch["seq_lens"].tolist():
            keys = decode(batch["obs"][start : start + length])
            assert length == LENGTHS[int(keys[0, 0]), int(keys[0, 1])]
            np.testing.assert_array_equal(keys[:, 2], np.arange(length))
            seen.append(tuple(keys[0, :2].tolist()))
            start += length
    assert sorted(seen) == sorted(LENGTHS)


def test_an_episode_that_was_not_recorded_to_its_end_shortens_the_window(tmp_path: Path) -> None:
    with ParquetWriter(tmp_path) as writer:
        writer.write(episode(0, 0, 10, stop=4))
        writer.write(episode(0, 0, 10, start=6, stop=9))
    store = ReplayStore.open(tmp_path)
    batch = store.epochs(batch_size=7, epochs=1, shuffle=False, draw=rlio.NStep(3, gamma=0.5)).sample()
    assert decode(batch["new_obs"])[:, 2].tolist() == [3, 4, 4, 4, 9, 9, 9]
    assert batch["bootstrap_mask"].tolist() == [1] * 7
    assert batch["n_step_discount"].tolist() == [0.125, 0.125, 0.25, 0.5, 0.125, 0.25, 0.5]
    assert len(store.epochs(epochs=1, draw=rlio.WholeEpisodes())) == 2


def test_a_missing_final_observation_is_not_bootstrapped_from(tmp_path: Path) -> None:
    rows = episode(0, 0, 5, truncated=True)
    rows["new_obs_valid"] = np.arange(5) < 4
    with ParquetWriter(tmp_path) as writer:
        writer.write(rows)
    batch = (
        ReplayStore.open(tmp_path).epochs(batch_size=5, epochs=1, shuffle=False, draw=rlio.NStep(2)).sample()
    )
    assert batch["bootstrap_mask"].tolist() == [1, 1, 1, 0, 0]


def test_filters_choose_rows_and_the_first_rows_of_what_is_longer(tmp_path: Path) -> None:
    store = ReplayStore.open(record(tmp_path))
    batch = collected(store.epochs(batch_size=9, epochs=1, seed=0, filter="rewards > 3 and obs[0] == 1"))
    keys = decode(batch["obs"])
    assert (keys[:, 0] == 1).all()
    assert (keys[:, 2] >= 3).all()
    assert len(keys) == sum(max(n - 3, 0) for (env, _), n in LENGTHS.items() if env == 1)
    found = store.epochs(batch_size=99, epochs=1, draw=rlio.Sequences(4), filter="t == 4").sample()
    assert (found["t"].reshape(-1, 4)[:, 0] == 4).all()
    with pytest.raises(MissingColumn, match="speed"):
        store.epochs(filter="speed > 0")


def test_columns_are_projected_and_unknown_ones_refused(tmp_path: Path) -> None:
    store = ReplayStore.open(record(tmp_path))
    assert set(store.uniform(columns=["obs", "rewards"]).sample()) == {"obs", "rewards"}
    with pytest.raises(MissingColumn, match="speed"):
        store.uniform(columns=["speed"]).sample()
    assert set(store.uniform(columns=["t"], indexes=True).sample()) == {"t", "batch_indexes"}
    some = ReplayStore.open(str(tmp_path), columns=["rewards"])
    assert "obs" not in some.uniform().sample()


@pytest.mark.parametrize(
    "options",
    [
        {"draw": 3}, {"draw": "episodes"}, {"draw": rlio.WholeEpisodes}, {"draw": {"n": 3}}, {"draw": True},
        {"views": True, "draw": rlio.NStep(2)}, {"views": True, "draw": rlio.WholeEpisodes()},
        {"colour": 1}, {"filter": "import os"},
    ],
)  # fmt: skip
def test_options_that_say_nothing_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    store = ReplayStore(10)
    with pytest.raises(OptionError):
        store.uniform(**options)


def test_views_of_one_block_where_observations_follow_each_other(tmp_path: Path) -> None:
    store = ReplayStore.open(record(tmp_path, kind="stack"))
    batch = store.uniform(batch_size=64, seed=0, views=True).sample()
    check_transitions(batch, lengths=LENGTHS)
    assert np.shares_memory(batch["obs"], batch["new_obs"])
    assert not batch["obs"].flags.writeable
    plain = store.uniform(batch_size=64, seed=0).sample()
    np.testing.assert_array_equal(plain["obs"], batch["obs"])
    np.testing.assert_array_equal(plain["new_obs"], batch["new_obs"])


def test_uniform_draws_are_the_same_whatever_batch_they_come_in_and_resume(tmp_path: Path) -> None:
    store = ReplayStore.open(record(tmp_path))
    whole = collected(b for _, b in zip(range(60), store.uniform(batch_size=5, seed=3), strict=False))
    reader = store.uniform(batch_size=5, seed=3)
    parts = [reader.sample(n) for n in (1, 7, 5, 5, 5, 20, 57)]
    parts += [reader.sample() for _ in range(40)]
    found = np.concatenate([part["obs"] for part in parts])
    np.testing.assert_array_equal(found, whole["obs"])
    state = reader.state_dict()
    expected = [reader.sample()["obs"] for _ in range(5)]
    other = ReplayStore.open(str(tmp_path)).uniform(batch_size=5)
    other.load_state_dict(state)
    for rows in expected:
        np.testing.assert_array_equal(other.sample()["obs"], rows)


def test_batches_are_never_views_of_each_other(tmp_path: Path) -> None:
    store = ReplayStore.open(record(tmp_path))
    reader = store.epochs(batch_size=16, epochs=3, seed=0)
    kept = [(batch, batch["obs"].copy()) for batch in reader]
    for index, (batch, copy) in enumerate(kept):
        np.testing.assert_array_equal(batch["obs"], copy)
        batch["obs"][:] = -index - 1
    for index, (batch, _) in enumerate(kept):
        assert (batch["obs"] == -index - 1).all()
    check_transitions(collected(store.epochs(batch_size=16, epochs=1)), lengths=LENGTHS)


# ---- several agents ----


def agents(numbers: range) -> MultiAgentBatch:
    parts: dict[str, list[SampleBatch]] = {"a": [], "b": []}
    steps = 0
    for number in numbers:
        parts["a"].append(episode(0, number, 6))
        late = episode(1, number, 6, start=2)  # It joins late, and sees another world.
        late["eps_id"] = np.full(len(late), number)
        parts["b"].append(late)
        steps += 6
    return MultiAgentBatch(
        {
            pid: SampleBatch({name: np.concatenate([b[name] for b in found]) for name in found[0]})
            for pid, found in parts.items()
        },
        steps,
    )


def test_joint_steps_are_drawn_whole(tmp_path: Path) -> None:
    with ParquetWriter(tmp_path) as writer:
        for start in range(0, 20, 5):
            writer.write(agents(range(start, start + 5)))
    store = ReplayStore.open(tmp_path)
    seen = []
    for batch in store.epochs(batch_size=7, epochs=1, seed=0):
        a = [tuple(key) for key in zip(batch["a"]["eps_id"].tolist(), batch["a"]["t"].tolist(), strict=True)]
        b = (
            [tuple(k) for k in zip(batch["b"]["eps_id"].tolist(), batch["b"]["t"].tolist(), strict=True)]
            if "b" in batch
            else []
        )
        assert b == [key for key in a if key[1] >= 2]
        assert batch.env_steps() == len(a)
        seen += a
    assert sorted(seen) == [(number, t) for number in range(20) for t in range(6)]
    alone = collected(store.epochs(batch_size=8, epochs=1, policy="b", draw=rlio.NStep(2, gamma=1.0)))
    assert len(alone) == 80
    with pytest.raises(OptionError, match="policy"):
        store.epochs(draw=rlio.Sequences(3))


def test_priorities_of_a_live_store_are_one_policys() -> None:
    store = ReplayStore(100)
    store.append(agents(range(2)))
    with pytest.raises(OptionError, match=r"policy=\.\.\., one of a, b"):
        store.prioritised(batch_size=4).sample()
    sampler = store.prioritised(batch_size=64, seed=0, policy="b", alpha=1.0, epsilon=1e-9)
    first = sampler.sample()
    assert set(first["t"].tolist()) == {2, 3, 4, 5}
    sampler.update_priorities(np.arange(8), np.arange(8) == 5)
    assert (sampler.sample()["batch_indexes"] == 5).all()
    store.append(agents(range(2, 3)))
    assert {5, 8, 9, 10, 11} == set(sampler.sample()["batch_indexes"].tolist())


def test_a_state_is_of_one_policys_rows() -> None:
    store = ReplayStore(100)
    store.append(agents(range(2)))
    state = store.uniform(batch_size=4, seed=0, policy="b").state_dict()
    with pytest.raises(StateError, match="policy"):
        store.uniform(batch_size=4, policy="a").load_state_dict(state)


# ---- live rows ----


def test_a_live_store_keeps_the_newest_rows_and_follows_episodes_across_appends() -> None:
    store = ReplayStore(100)
    with pytest.raises(EndOfData, match="yet"):
        store.uniform().sample()
    sampler = store.uniform(batch_size=32, seed=0, draw=rlio.NStep(3, gamma=0.9))
    lengths = {(0, number): 20 for number in range(30)}
    for number in range(30):
        for start in range(0, 20, 5):
            store.append(episode(0, number, 20, start=start, stop=start + 5))
            batch = sampler.sample()
            oldest = max(number * 20 + start + 5 - 100, 0)
            row = decode(batch["obs"])[:, 1] * 20 + decode(batch["obs"])[:, 2]
            assert (row >= oldest).all()
            ends = np.minimum(row + 3, number * 20 + start + 5)
            np.testing.assert_array_equal(
                decode(batch["new_obs"])[:, 2], np.minimum(ends - decode(batch["obs"])[:, 1] * 20, 20)
            )
    assert len(store) == 100
    check_transitions(store.uniform(batch_size=64).sample(), lengths=lengths)
    with pytest.raises(OptionError, match="uniform"):
        store.epochs()
    with pytest.raises(SchemaError):
        store.append(SampleBatch(obs=[[1.0]]))


def test_a_loop_over_a_store_without_rows_does_not_end_in_silence(tmp_path: Path) -> None:
    """It had no round, and said nothing."""
    empty = ReplayStore(10)
    with ParquetWriter(tmp_path / "empty"):
        pass
    stored = ReplayStore.open(tmp_path / "empty")
    for reader in (
        empty.uniform(),
        empty.prioritised(),
        stored.uniform(),
        stored.epochs(),
        ShuffledInput(empty.uniform(), 3, seed=0),
        MixedInput({"live": empty.uniform()}, batch_size=3),
        DatasetReader(tmp_path / "empty"),
        DatasetReader(tmp_path / "empty", cache="memory"),
    ):
        with pytest.raises(EndOfData):
            for _ in reader:
                pass
    assert list(stored.epochs(epochs=1)) == []


def test_a_sampler_that_was_asked_before_the_first_row_draws_once_there_are_rows() -> None:
    """It said for ever that the store holds no steps."""
    store = ReplayStore(10)
    samplers = store.uniform(batch_size=4, seed=0), store.prioritised(batch_size=4, seed=0)
    for sampler in samplers:
        with pytest.raises(EndOfData):
            sampler.sample()
    store.append(episode(0, 0, 10))
    assert [len(sampler.sample()) for sampler in samplers] == [4, 4]


def test_a_state_over_rows_that_were_forgotten_is_an_error() -> None:
    store = ReplayStore(10)
    store.append(episode(0, 0, 10))
    sampler = store.uniform(batch_size=2, seed=0)
    sampler.sample()
    state = sampler.state_dict()
    expected = sampler.sample()
    fresh = store.uniform(batch_size=2)
    fresh.load_state_dict(state)
    np.testing.assert_array_equal(fresh.sample()["obs"], expected["obs"])
    store.append(episode(0, 1, 3))
    with pytest.raises(StateError, match="rows 0 to 9"):
        store.uniform(batch_size=2).load_state_dict(state)


def test_prioritised_draws_of_a_live_store() -> None:
    store = ReplayStore(50)
    sampler = store.prioritised(batch_size=16, seed=0, alpha=1.0, epsilon=1e-9)
    for number in range(12):
        store.append(episode(0, number, 10))
        for _ in range(5):
            batch = sampler.sample()
            rows = batch["batch_indexes"]
            np.testing.assert_array_equal(rows, decode(batch["obs"])[:, 1] * 10 + decode(batch["obs"])[:, 2])
            assert rows.min() >= max(number * 10 + 10 - 50, 0)
            sampler.update_priorities(rows, np.where(rows % 10 == 3, 1.0, 0.0))
    for _ in range(40):
        rows = sampler.sample()["batch_indexes"]
        sampler.update_priorities(rows, np.where(rows % 10 == 3, 1.0, 0.0))
    assert (sampler.sample()["batch_indexes"] % 10 == 3).all()
    # What is forgotten meanwhile is passed over.
    old = sampler.sample()["batch_indexes"]
    store.append(episode(0, 12, 50))
    sampler.update_priorities(old, np.full(len(old), 1e6))
    assert sampler.sample()["batch_indexes"].min() >= 120
    # A number that no row has had would otherwise fall on another row's slot.
    for wrong in (170, 1_000, -1):
        with pytest.raises(OptionError, match="rows 0 to 169"):
            sampler.update_priorities([wrong], [1.0])


def test_priorities_are_kept_beside_the_store(tmp_path: Path) -> None:
    store = ReplayStore.open(record(tmp_path / "data"))
    sampler = store.prioritised(batch_size=8, seed=0)
    for _ in range(10):
        batch = sampler.sample()
        sampler.update_priorities(batch["batch_indexes"], batch["rewards"])
    sampler.save(tmp_path / "priorities.npz")
    state = sampler.state_dict()
    expected = [sampler.sample() for _ in range(3)]
    other = ReplayStore.open(str(tmp_path / "data")).prioritised(batch_size=8)
    other.load(tmp_path / "priorities.npz")
    other.load_state_dict(state)
    for batch in expected:
        found = other.sample()
        for name in ("batch_indexes", "weights", "obs"):
            np.testing.assert_array_equal(found[name], batch[name])
    with pytest.raises(StateError):
        ReplayStore.open(record(tmp_path / "more", rows=7)).prioritised(batch_size=8).load_state_dict(
            state | {"position": state["position"] | {"store": "another"}}
        )


def test_a_state_of_a_prioritised_sampler_without_its_priorities_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It drew from equal priorities, and said nothing."""
    store = ReplayStore.open(record(tmp_path / "data"))
    sampler = store.prioritised(batch_size=8, seed=0)
    for _ in range(3):
        batch = sampler.sample()
        sampler.update_priorities(batch["batch_indexes"], batch["rewards"])
    state = json.loads(json.dumps(sampler.state_dict()))
    sampler.save(tmp_path / "priorities.npz")
    alone, early, late = (store.prioritised(batch_size=8) for _ in range(3))
    alone.load_state_dict(state)
    alone.sample()
    assert [record.levelname for record in caplog.records if "priorities" in record.message] == ["WARNING"]
    alone.sample()  # Once is enough.
    early.load(tmp_path / "priorities.npz")
    early.load_state_dict(state)
    late.load_state_dict(state)
    late.load(tmp_path / "priorities.npz")
    for each in (early, late):
        each.sample()
    assert len([record for record in caplog.records if "priorities" in record.message]) == 1


def test_prioritised_sequences_carry_their_unit_in_every_row(tmp_path: Path) -> None:
    store = ReplayStore.open(record(tmp_path))
    sampler = store.prioritised(batch_size=6, seed=0, draw=rlio.Sequences(4))
    batch = sampler.sample()
    numbers = batch["batch_indexes"].reshape(6, 4)
    assert (numbers == numbers[:, :1]).all()
    sampler.update_priorities(numbers[:, 0], np.ones(6))


# ---- building ----


def test_a_store_is_built_in_the_background_and_waited_for(tmp_path: Path) -> None:
    store = ReplayStore.open(record(tmp_path), wait=False)
    assert len(store.uniform(batch_size=4).sample()) == 4
    assert store.ready
    assert store.wait()


def test_damage_is_raised_or_counted(tmp_path: Path) -> None:
    record(tmp_path)
    shard = sorted(tmp_path.rglob("*.parquet"))[1]
    data = bytearray(shard.read_bytes())
    data[20] ^= 1
    shard.write_bytes(data)
    with pytest.raises(Exception, match="CRC-32"):
        ReplayStore.open(str(tmp_path))
    store = ReplayStore.open(str(tmp_path), on_error="skip")
    assert len(store) + store.skipped == sum(LENGTHS.values())
    assert store.skipped > 0


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = ReplayStore.open(record(tmp_path))
    sampler = store.uniform(batch_size=2)
    store.close()
    with pytest.raises(ClosedError):
        sampler.sample()
    with pytest.raises(ClosedError):
        ReplayStore(3).close() or store.append(episode(0, 0, 3))


def test_an_empty_data_set_has_nothing_to_draw(tmp_path: Path) -> None:
    ParquetWriter(tmp_path).close()
    store = ReplayStore.open(open_dataset(tmp_path))
    assert len(store) == 0
    with pytest.raises(EndOfData):
        store.epochs(epochs=1).sample()
    with pytest.raises(EndOfData):
        store.uniform().sample()


def test_a_shard_that_is_gone_is_an_error_or_counted(tmp_path: Path) -> None:
    data = open_dataset(record(tmp_path))
    gone = data.segments[1]
    Path(data.files()[1]).unlink()
    with pytest.raises(HoleError, match=r"rows \d+ to \d+"):
        ReplayStore.open(data)
    store = ReplayStore.open(data, on_error="skip")
    assert store.skipped == gone.rows
    assert len(store) == sum(LENGTHS.values()) - gone.rows
    # Links do not lead over the hole.
    batch = store.uniform(batch_size=500, draw=rlio.NStep(3, gamma=1.0)).sample()
    here, there = decode(batch["obs"]), decode(batch["new_obs"])
    np.testing.assert_array_equal(here[:, :2], there[:, :2])
    steps = there[:, 2] - here[:, 2]
    np.testing.assert_allclose(batch["rewards"], sum((here[:, 2] + k + 1) * (k < steps) for k in range(3)))


@pytest.mark.parametrize("kind", ["vector", "stack"])
def test_a_live_store_goes_on_as_it_was_saved(tmp_path: Path, kind: str) -> None:
    store = ReplayStore(60)
    sampler = store.prioritised(batch_size=8, seed=0)
    for number in range(9):
        store.append(episode(0, number, 10, kind=kind))
        batch = sampler.sample()
        sampler.update_priorities(batch["batch_indexes"], batch["rewards"])
    store.append(episode(0, 9, 10, stop=4, kind=kind))
    sampler.sample()
    store.save(tmp_path / "buffer", priorities=sampler)
    store.save(tmp_path / "buffer", priorities=sampler)  # In the place of the first.
    state = sampler.state_dict()
    other = ReplayStore.load(tmp_path / "buffer")
    assert len(other) == len(store)
    twin = other.prioritised(batch_size=8)
    twin.load_state_dict(state)
    for step in range(4, 10):
        for each, drawn in ((store, sampler), (other, twin)):
            each.append(episode(0, 9, 10, start=step, stop=step + 1, kind=kind))
            found = drawn.sample()
            drawn.update_priorities(found["batch_indexes"], found["rewards"])
        again = sampler.sample()
        for name, values in twin.sample().items():
            np.testing.assert_array_equal(values, again[name])
    lengths = {(0, number): 10 for number in range(10)}
    check_transitions(
        other.uniform(batch_size=200, draw=rlio.NStep(3, gamma=0.9)).sample(),
        lengths=lengths,
        n_step=3,
        gamma=0.9,
    )
    with pytest.raises(DataNotFound):
        ReplayStore.load(tmp_path / "nothing")
    (manifest,) = (tmp_path / "buffer").glob("*.json")
    manifest.write_bytes(manifest.read_bytes()[:-9])
    with pytest.raises(CorruptData):
        ReplayStore.load(tmp_path / "buffer")


@pytest.mark.parametrize("kind", [np.int64, np.int8, np.float16, np.float64, np.bool_])
def test_returns_of_whole_numbers_are_not_rounded(kind: Any) -> None:
    rows = episode(0, 0, 6)
    rows["rewards"] = np.ones(6, kind)
    store = ReplayStore(10)
    store.append(rows)
    found = store.uniform(batch_size=64, seed=0, draw=rlio.NStep(3, gamma=0.5)).sample()
    expected = np.array([1.75, 1.75, 1.75, 1.75, 1.5, 1.0])[found["t"]]
    np.testing.assert_array_equal(found["rewards"], expected)
    assert found["rewards"].dtype == (kind if np.dtype(kind).kind == "f" else np.float32)


# ---- policies that come later ----


def acted(steps: list[int], *, width: int) -> SampleBatch:
    """Rows of one episode whose observations say the step."""
    t = np.array(steps)
    obs = np.repeat(t[:, None], width, axis=1).astype(np.float32)
    flags = np.zeros(len(t), bool)
    return SampleBatch(
        obs=obs, new_obs=obs + 1, actions=t % 2, terminateds=flags, truncateds=flags, eps_id=t * 0, t=t
    )


def test_policies_may_come_with_a_later_batch_of_a_live_store(tmp_path: Path) -> None:
    """In games of turns, and where agents join late, the first fragment has not all of them."""
    widths = {"x": 3, "a": 5, "b": 3}
    with ReplayStore(capacity=10) as store:
        reader = store.uniform(batch_size=4, seed=0)
        store.append(MultiAgentBatch({"x": acted([0, 1, 2], width=3)}, 3))
        assert set(reader.sample()) == {"x"}
        store.append(MultiAgentBatch({"x": acted([3], width=3), "a": acted([3, 4], width=5)}, 2))
        store.append(MultiAgentBatch({"b": acted([5], width=3), "none": SampleBatch({})}, 1))
        store.save(tmp_path / "saved")
        with ReplayStore.load(tmp_path / "saved") as loaded:
            for source in (reader, loaded.uniform(batch_size=4, seed=0)):
                seen: dict[str, set[int]] = {}
                for _ in range(60):
                    batch = source.sample()
                    assert batch.env_steps() == 4
                    for pid, rows in batch.items():
                        assert rows["obs"].shape[1] == widths[pid]
                        np.testing.assert_array_equal(rows["obs"][:, 0], rows["t"])
                        np.testing.assert_array_equal(rows["new_obs"], rows["obs"] + 1)
                        seen.setdefault(pid, set()).update(rows["t"].tolist())
                assert seen == {"x": {0, 1, 2, 3}, "a": {3, 4}, "b": {5}}
        for t in range(6, 30):
            store.append(MultiAgentBatch({"a": acted([t], width=5)}, 1))
        assert {pid: len(table) for pid, table in store.tables.items()} == {"x": 4, "a": 10, "b": 1}
        assert set(store.uniform(batch_size=50, seed=1, policy="a").sample()["t"]) <= set(range(20, 30))
