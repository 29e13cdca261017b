"""What goes through ParquetWriter and DatasetReader comes back to the bit, whatever it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from stored_batches import (
    assert_identical,
    files,
    fresh_root,
    group_bytes,
    load,
    numbered,
    round_trip,
    store,
)

from rlio import DatasetReader, MultiAgentBatch, ParquetWriter, Roll, SampleBatch, concat_samples
from rlio.batch.arrays import object_column
from rlio.errors import SchemaConflict, SchemaError

DTYPES = [
    *("u1", "<u2", "<u4", "<u8", "i1", "<i2", "<i4", "<i8", "?"),
    *("<f2", "<f4", "<f8", "<c8", "<c16", "<M8[ns]", "<m8[s]", ">f4", ">i8", ">u2", ">c8", ">f2"),
]
SHAPES: list[tuple[int, ...]] = [(), (1,), (3,), (17,), (513,), (2, 3), (0,), (3, 0), (12, 12, 4)]
NAMES = [
    "obs",
    "new_obs",
    "actions",
    "rewards",
    "infos",
    "a/b",
    "a~b",
    "a~1b",
    "a.b",
    "a@b",
    "ключ",
    "x y",
    "",
]


def raw(rows: int, dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random bits: NaN of every payload, -0.0 and infinities included."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return rng.integers(0, 2, (rows, *shape)).astype(bool)
    values = rng.integers(0, 256, (rows, *shape, kind.itemsize), np.uint8)
    return values.view(kind)[..., 0] if values.size else np.empty((rows, *shape), kind)


@st.composite
def columns(draw: st.DrawFn) -> dict[str, Any]:
    """Column name -> what makes its values for a number of rows and a seed."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=5, unique=True))
    return {name: draw(column()) for name in names}


@st.composite
def column(draw: st.DrawFn, depth: int = 0) -> Any:
    kinds = ["array"] * 4 + ["ragged", "text", "unicode", "bytes", "infos"] + ["dict", "tuple"] * (depth < 2)
    kind = draw(st.sampled_from(kinds))
    if kind == "ragged":
        return "ragged", draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES))
    if kind == "array":
        return (
            "array",
            draw(st.sampled_from(DTYPES)),
            draw(st.sampled_from(SHAPES)),
            draw(st.sampled_from("CFSR")),
        )
    if kind == "dict":
        keys = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
        return "dict", {key: draw(column(depth + 1)) for key in keys}
    if kind == "tuple":
        return "tuple", tuple(draw(st.lists(column(depth + 1), min_size=1, max_size=3)))
    return (kind,)


def make(spec: Any, rows: int, seed: int) -> Any:
    kind = spec[0]
    if kind == "dict":
        return {key: make(part, rows, seed + i) for i, (key, part) in enumerate(spec[1].items())}
    if kind == "tuple":
        return tuple(make(part, rows, seed + i) for i, part in enumerate(spec[1]))
    if kind == "array":
        _, dtype, shape, layout = spec
        if layout == "S":  # Every second row of a longer array.
            return raw(2 * rows, dtype, shape, seed)[::2]
        values = raw(rows, dtype, shape, seed)
        if layout == "F":
            return np.asfortranarray(values)
        return values[::-1] if layout == "R" else values
    rng = np.random.default_rng(seed)
    if kind == "ragged":
        lengths = rng.integers(0, 4, rows).tolist()
        return object_column(raw(n, spec[1], spec[2], seed + i) for i, n in enumerate(lengths))
    words = ["", "a", "žluť", "🙂", "line\nbreak", "nul\0inside", '"quoted"']
    if kind == "text":
        return np.array([words[i] for i in rng.integers(0, 7, rows)] or [], object)
    if kind == "unicode":
        return np.array([words[i] for i in rng.integers(0, 5, rows)], "<U12")
    if kind == "bytes":
        return np.array([bytes(rng.integers(1, 256, n).tolist()) for n in rng.integers(0, 5, rows)], "S5")
    infos = np.empty(rows, object)
    for i in range(rows):
        infos[i] = {"n": i, "a": raw(2, "<f4", (2,), seed + i), "t": (1, [2.5, None]), "x": float("nan")}
    return infos


@settings(max_examples=9, deadline=None)
@given(
    specs=columns(),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    limit=st.sampled_from([1, 200, 5000, 1 << 23]),
    max_rows=st.sampled_from([None, 1, 7, 1000]),
    seed=st.integers(0, 2**31),
)
def test_batches_come_back_to_the_bit(
    specs: dict[str, Any], sizes: list[int], limit: int, max_rows: int | None, seed: int
) -> None:
    sizes[0] += not sizes[0]  # Texts of no rows do not say that they are texts.
    batches = [
        SampleBatch({name: make(spec, rows, seed + 97 * i) for name, spec in specs.items()})
        for i, rows in enumerate(sizes)
    ]
    with group_bytes(limit):
        root = store(*batches, roll=Roll(max_rows=max_rows, max_seconds=None))
    expected = concat_samples(batches)
    with DatasetReader(root, epochs=1, batch_size=13) as reader:
        parts = list(reader)
    assert [len(part) for part in parts[:-1]] == [13] * (len(parts) - 1)
    assert_identical(concat_samples(parts), expected)
    for part in parts:
        for leaf in (array for array in part.values() if isinstance(array, np.ndarray)):
            assert leaf.flags.writeable


@settings(max_examples=10, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from(SHAPES),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    agents=st.integers(1, 3),
    keyed=st.sampled_from(["eps_id", "env_id", "agent_index", "done"]),
    broken=st.floats(0, 1),
    missing=st.floats(0, 1),
    limit=st.sampled_from([1, 300, 1 << 23]),
    seed=st.integers(0, 2**31),
)
def test_observations_stored_once_come_back_to_the_bit(
    dtype: str, shape: tuple[int, ...], lengths: list[int], agents: int, keyed: str, broken: float,
    missing: float, limit: int, seed: int,
) -> None:  # fmt: skip
    """Interleaved streams, links broken by single bits, final observations missing, nested or not."""
    rng = np.random.default_rng(seed)
    batch = interleaved(rng, dtype, shape, lengths, agents, keyed)
    new_obs = batch["new_obs"]["a"]
    flip = rng.random(len(new_obs)) < broken / 2
    new_obs[flip] = raw(int(flip.sum()), dtype, shape, seed)
    if missing > 0.5:
        valid = rng.random(len(new_obs)) > 0.2
        new_obs[~valid] = np.zeros((), new_obs.dtype)
        batch["new_obs"]["b"][0][~valid] = 0
        batch["new_obs_valid"] = valid
    cut = len(new_obs) // 2
    with group_bytes(limit):
        root = store(batch[:cut], batch[cut:])
    assert_identical(load(root, batch_size=5), batch)
    only = load(root, columns=["new_obs"])
    flag = {"new_obs_valid": batch["new_obs_valid"]} if "new_obs_valid" in batch else {}
    assert_identical(only, SampleBatch({"new_obs": batch["new_obs"], **flag}))
    part = load(root, columns=["new_obs/b"])
    assert_identical(part, SampleBatch({"new_obs": {"b": batch["new_obs"]["b"]}, **flag}))


def interleaved(
    rng: np.random.Generator, dtype: str, shape: tuple[int, ...], lengths: list[int], agents: int, keyed: str
) -> SampleBatch:
    """Episodes of several agents in turn, each observation the next one's predecessor."""
    rows: list[tuple[int, int, int, bool]] = []
    pools = [[(n, i) for i, n in enumerate(lengths)] for _ in range(agents)]
    states = [pool.pop(0) for pool in pools]
    time = [0] * agents
    alive = list(range(agents))
    while alive:
        for agent in list(alive):
            length, episode = states[agent]
            end = time[agent] == length - 1
            rows.append((agent, episode, time[agent], end))
            time[agent] += 1
            if end and not pools[agent]:
                alive.remove(agent)
            elif end:
                states[agent], time[agent] = pools[agent].pop(0), 0
    agent, episode, t, end = (np.array(values) for values in zip(*rows, strict=True))
    table = raw(agents * len(lengths) * 8, dtype, shape, int(rng.integers(2**31)))
    at = (agent * len(lengths) + episode) * 8 + t
    columns: dict[str, Any] = {
        "obs": {"a": table[at], "b": (at.astype(np.float32),)},
        "new_obs": {"a": table[at + 1].copy(), "b": ((at + 1).astype(np.float32),)},
        "t": t,
        "terminateds": end,
    }
    if keyed == "eps_id":
        columns["eps_id"] = agent * 1000 + episode
    elif keyed != "done":
        columns[keyed] = agent
    return SampleBatch(columns)


def stored_rows(root: str, name: str) -> int:
    """How many values of a physical column are in the files."""
    import io

    import pyarrow.parquet as pq

    tables = [
        pq.read_table(io.BytesIO(data)) for path, data in files(root).items() if path.endswith(".parquet")
    ]
    return sum(table.num_rows - table.column(name).null_count for table in tables)


def test_each_observation_of_interleaved_environments_is_stored_once() -> None:
    steps, envs = 20, 4
    obs = np.random.default_rng(0).normal(size=(steps + 1, envs, 5)).astype(np.float32)
    batch = SampleBatch(
        obs=obs[:-1].reshape(-1, 5),
        new_obs=obs[1:].reshape(-1, 5),
        env_id=np.tile(np.arange(envs), steps),
        eps_id=np.tile(np.arange(envs), steps),
    )
    root = store(batch)
    assert stored_rows(root, "_new_obs") == envs
    assert_identical(load(root), batch)


@pytest.mark.parametrize("difference", ["one bit", "NaN", "-0.0"])
def test_an_observation_is_stored_where_a_single_bit_differs(difference: str) -> None:
    obs = np.zeros((4, 3), np.float32)
    new_obs = obs.copy()
    new_obs[1, 2] = {"one bit": np.float32(1e-45), "NaN": np.float32("nan"), "-0.0": np.float32("-0.0")}[
        difference
    ]
    batch = SampleBatch(obs=obs, new_obs=new_obs, eps_id=[7] * 4)
    root = store(batch)
    assert stored_rows(root, "_new_obs") == 2  # That row and the last one.
    assert_identical(load(root), batch)


def test_nan_observations_with_equal_bits_are_stored_once() -> None:
    obs = np.full((4, 3), np.nan, np.float32)
    root = store(SampleBatch(obs=obs, new_obs=obs, eps_id=[7] * 4))
    assert stored_rows(root, "_new_obs") == 1


@pytest.mark.further
@settings(max_examples=15, deadline=None)
@given(
    axis=st.sampled_from([0, 2]),
    depth=st.integers(2, 5),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    envs=st.integers(1, 3),
    broken=st.sampled_from([0.0, 0.1, 1.0]),
    limit=st.sampled_from([100, 3000, 1 << 23]),
    seed=st.integers(0, 2**31),
)
def test_frame_stacks_come_back_to_the_bit(
    axis: int, depth: int, lengths: list[int], envs: int, broken: float, limit: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    batch = stacked(rng, axis, depth, lengths, envs)
    for name in ("obs", "new_obs"):
        wrong = rng.random(len(batch)) < broken
        batch[name][wrong] = rng.integers(0, 256, batch[name][wrong].shape)
    cut = len(batch) // 3
    with group_bytes(limit):
        root = store(batch[:cut], batch[cut:])
    assert_identical(load(root, batch_size=9), batch)


def stacked(rng: np.random.Generator, axis: int, depth: int, lengths: list[int], envs: int) -> SampleBatch:
    """Stacks of 6x5 frames; the first of an episode repeats one frame; environments take turns."""
    obs, new_obs, ids, env = [], [], [], []
    for number, length in enumerate(lengths):
        for e in range(envs):
            frames = rng.integers(0, 256, (length + 1, 6, 5), np.uint8)
            frames = np.concatenate([frames[:1].repeat(depth - 1, 0), frames])
            stacks = np.stack([frames[i : i + depth] for i in range(length + 1)])
            stacks = stacks if axis == 0 else np.moveaxis(stacks, 1, 3)
            obs.append(stacks[:-1])
            new_obs.append(stacks[1:])
            ids.append(np.full(length, number * envs + e))
            env.append(np.full(length, e))
    order = np.argsort(np.concatenate([np.arange(len(i)) for i in ids]), kind="stable")
    joined = {
        name: np.concatenate(parts)[order]
        for name, parts in {"obs": obs, "new_obs": new_obs, "eps_id": ids, "env_id": env}.items()
    }
    return SampleBatch({name: np.ascontiguousarray(values) for name, values in joined.items()})


@pytest.mark.parametrize("axis", [0, 2])
def test_frame_stacks_are_stored_frame_by_frame(axis: int) -> None:
    batch = stacked(np.random.default_rng(1), axis, 4, [60, 60], 2)
    root = store(batch)
    assert stored_rows(root, "obs#older") == 4  # The first row of each episode.
    size = sum(map(len, files(root).values()))
    frames = len(batch) * 30
    assert size < 1.6 * frames, f"{size} bytes for {frames} bytes of frames; raw: {batch.size_bytes()}"
    assert_identical(load(root), batch)


@pytest.mark.parametrize("axis", [0, 2])
def test_missing_frame_stacks_come_back_as_zeros(axis: int) -> None:
    batch = stacked(np.random.default_rng(1), axis, 4, [10, 10], 1)
    valid = np.arange(20) % 10 < 9
    batch["new_obs"][~valid] = 0
    batch["new_obs_valid"] = valid
    assert_identical(load(store(batch)), batch)


@pytest.mark.parametrize("axis", [0, 2])
def test_a_final_stack_that_shares_no_frame_comes_back(axis: int) -> None:
    batch = stacked(np.random.default_rng(1), axis, 4, [10, 10], 1)
    batch["new_obs"][np.flatnonzero(batch["eps_id"] == 0)[-1]] = 200
    assert_identical(load(store(batch)), batch)


def test_rows_that_are_no_stacks_are_stored_whole() -> None:
    values = np.random.default_rng(0).integers(0, 256, (30, 6, 6, 4), np.uint8)
    batch = SampleBatch(obs=values, new_obs=values[::-1].copy(), eps_id=[1] * 30)
    root = store(batch)
    assert not any(b"#older" in data for data in files(root).values())
    assert_identical(load(root), batch)


def test_torch_tensors_come_back_as_arrays() -> None:
    batch = SampleBatch(
        obs=torch.arange(12.0).reshape(3, 4).requires_grad_(),
        new_obs=torch.arange(12.0).reshape(4, 3).T,
        flags=torch.tensor([True, False, True]),
    )
    assert_identical(round_trip(batch), SampleBatch({name: batch[name].detach().numpy() for name in batch}))


def test_tensors_that_numpy_cannot_hold_are_refused_with_the_column() -> None:
    with pytest.raises(SchemaError, match=r"bfloat16.*\[column obs\]"):
        store(SampleBatch(obs=torch.zeros(2, dtype=torch.bfloat16)))


def test_images_come_back_to_the_bit() -> None:
    images = np.random.default_rng(3).integers(0, 256, (40, 84, 84, 4), np.uint8)
    batch = SampleBatch(obs=images[:-1], new_obs=images[1:], eps_id=[1] * 39)
    root = store(batch)
    assert stored_rows(root, "_new_obs") == 1
    assert_identical(load(root), batch)


def test_a_nested_column_may_give_its_keys_in_another_order() -> None:
    a, b = np.zeros(2), np.ones(2)
    found = round_trip(SampleBatch(obs={"a": a, "b": b}), SampleBatch(obs={"b": b, "a": a}))
    assert found["obs"]["a"].tolist() == [0.0] * 4
    assert found["obs"]["b"].tolist() == [1.0] * 4


def test_a_nested_column_of_another_structure_is_refused() -> None:
    a = np.zeros(2)
    with pytest.raises(SchemaConflict, match="nests as"):
        store(SampleBatch(obs={"a": a, "b": a}), SampleBatch(obs={"a": a, "c": a}))


def test_tuples_of_more_than_ten_parts_keep_their_order() -> None:
    batch = SampleBatch({"obs": tuple(np.full(3, i) for i in range(12))})
    assert_identical(round_trip(batch), batch)


def test_positions_and_keys_that_read_alike_are_told_apart() -> None:
    """A dict with the key "0" and a tuple lie under the same physical name."""
    eps = {"eps_id": np.zeros(2, int), "t": np.arange(2)}
    batch = MultiAgentBatch(
        {
            "a": SampleBatch({"obs": (np.zeros(2),), **eps}),
            "b": SampleBatch({"obs": {"0": np.ones(2)}, **eps}),
        },
        2,
    )
    assert_identical(round_trip(batch), batch)


def test_padded_sequences_come_back_without_their_padding() -> None:
    ragged = SampleBatch(
        obs=np.arange(10.0),
        state_in_0=np.arange(8.0).reshape(4, 2),
        seq_lens=np.array([1, 4, 2, 3], np.int32),
    )
    found = round_trip(ragged.right_zero_pad(6))
    assert not found.zero_padded
    assert found.max_seq_len == 6
    assert_identical(found, ragged)


def test_time_major_batches_are_refused() -> None:
    batch = numbered(4, seq_lens=[2, 2]).right_zero_pad(2, time_major=True)
    with pytest.raises(SchemaError, match="time-major"):
        store(batch)


@pytest.mark.further
@settings(max_examples=12, deadline=None)
@given(
    writes=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=6), min_size=1, max_size=5),
    limit=st.sampled_from([1, 64, 300, 1 << 23]),
    max_rows=st.sampled_from([None, 3, 10]),
    n=st.integers(1, 5),
    shuffle=st.booleans(),
)
def test_sequences_stay_whole(
    writes: list[list[int]], limit: int, max_rows: int | None, n: int, shuffle: bool
) -> None:
    """Over writes, groups and shards, also where one is longer than a row group; in either order."""
    batches, first = [], 0
    for lengths in writes:
        batch = numbered(sum(lengths), first, seq_lens=np.array(lengths, np.int32))
        batch["state_in_0"] = np.repeat(batch["t"][np.cumsum(lengths) - lengths], 2).reshape(-1, 2)
        batches.append(batch)
        first += sum(lengths)
    with group_bytes(limit):
        root = store(*batches, roll=Roll(max_rows=max_rows, max_seconds=None))
    with DatasetReader(root, batch_size=n, epochs=1, shuffle=shuffle, seed=5 if shuffle else None) as reader:
        assert reader.unit == "sequences"
        assert len(reader) == sum(map(len, writes))
        parts = list(reader)
    assert all(len(part["seq_lens"]) == n for part in parts[:-1])
    found = []
    for part in parts:
        for sequence in (part.sequences(i, i + 1) for i in range(len(part["seq_lens"]))):
            t = sequence["t"]
            assert np.array_equal(t, np.arange(t[0], t[0] + len(t)))
            assert sequence["state_in_0"].tolist() == [[t[0], t[0]]]
            found.append((int(t[0]), len(t)))
    starts = np.cumsum([0, *(n for lengths in writes for n in lengths)]).tolist()
    expected = list(zip(starts[:-1], [n for lengths in writes for n in lengths], strict=True))
    assert (sorted(found) if shuffle else found) == expected


def test_rows_of_sequences_can_be_read_without_their_lengths() -> None:
    batch = numbered(30, seq_lens=[3] * 10, state_in_0=np.zeros((10, 2)))
    found = round_trip(batch, columns=["t"], batch_size=7)
    assert found["t"].tolist() == list(range(30))


def agents_batch(rng: np.random.Generator, first: int, steps: int, pids: list[str]) -> MultiAgentBatch:
    """Policies with spaces of their own; agents of one episode that die early."""
    parts = {}
    for pid in pids:
        number = int(pid[1:])
        alive = int(rng.integers(1, steps + 1))
        t = np.arange(first, first + alive)
        obs = rng.normal(size=(alive + 1, 2 + number // 2)).astype(np.float32)
        parts[pid] = SampleBatch(
            obs=obs[:-1], new_obs=obs[1:].copy(), actions=rng.integers(0, 4, alive),
            rewards=rng.random(alive),
            eps_id=np.full(alive, 5), t=t, agent_index=np.full(alive, number),
        )  # fmt: skip
        if number == 3:
            parts[pid]["extra"] = rng.random((alive, 2))
    return MultiAgentBatch(parts, steps)


@settings(max_examples=10, deadline=None)
@given(
    writes=st.lists(
        st.lists(st.sampled_from(["p0", "p1", "p2", "p3"]), min_size=1, max_size=4, unique=True),
        min_size=1,
        max_size=5,
    ),
    limit=st.sampled_from([1, 200, 1 << 23]),
    n=st.integers(1, 9),
    seed=st.integers(0, 2**31),
)
def test_several_policies_come_back_to_the_bit(
    writes: list[list[str]], limit: int, n: int, seed: int
) -> None:
    """Unlike spaces (p0 and p1 share theirs), some policies absent from some writes, others late."""
    rng = np.random.default_rng(seed)
    batches = [agents_batch(rng, 20 * i, 6, pids) for i, pids in enumerate(writes)]
    with group_bytes(limit):
        root = store(*batches)
    assert_identical(_by_time(load(root)), _by_time(concat_samples(batches)))
    with DatasetReader(root, batch_size=n, epochs=1) as reader:
        parts = list(reader)
    assert [part.env_steps() for part in parts[:-1]] == [n] * (len(parts) - 1)
    assert_identical(_by_time(concat_samples(parts)), _by_time(concat_samples(batches)))
    with DatasetReader(root, batch_size=n, epochs=1, shuffle=True, seed=seed) as reader:
        parts = list(reader)
    assert [part.env_steps() for part in parts[:-1]] == [n] * (len(parts) - 1)
    assert_identical(_by_time(concat_samples(parts)), _by_time(concat_samples(batches)))
    for part in parts:  # All rows of a step are in one batch.
        for other in parts:
            times = [{int(t) for rows in b.values() for t in rows["t"]} for b in (part, other)]
            assert part is other or not times[0] & times[1]


def _by_time(batch: MultiAgentBatch) -> MultiAgentBatch:
    """Rows of every policy by time, in which all their rows differ."""
    return MultiAgentBatch({pid: part[np.argsort(part["t"])] for pid, part in batch.items()}, 0)


def test_joint_steps_of_equal_ids_in_other_writers_stay_apart() -> None:
    rng = np.random.default_rng(0)
    root = fresh_root()
    for _ in range(3):
        with group_bytes(1):
            store(*(agents_batch(rng, 20 * i, 4, ["p0", "p2"]) for i in range(2)), root=root)
    for shuffle in (False, True):
        with DatasetReader(
            root, batch_size=5, epochs=1, shuffle=shuffle, seed=1 if shuffle else None
        ) as reader:
            total = len(reader)
            assert sum(batch.env_steps() for batch in reader) == total


def test_policies_that_share_a_column_link_it_each_on_its_own() -> None:
    """One policy has obs only, another new_obs only, a third both: the physical columns are the same."""
    ids = {"eps_id": np.zeros(6, int), "t": np.arange(6)}
    x = np.arange(42.0).reshape(7, 6)
    batch = MultiAgentBatch(
        {
            "a": SampleBatch({"obs": x[:6] + 100, **ids}),
            "b": SampleBatch({"new_obs": x[:6] + 200, **ids}),
            "c": SampleBatch({"obs": x[:6], "new_obs": x[1:], **ids}),
            "d": SampleBatch(
                {"obs": x[:6] + 300, "new_obs": x[1:] + 300, "new_obs_valid": np.arange(6) > 0, **ids}
            ),
        },
        6,
    )
    batch["d"]["new_obs"][0] = 0
    root = store(batch)
    assert_identical(load(root), batch)
    assert stored_rows(root, "_new_obs") == 6 + 1 + 1


def test_a_missing_observation_of_one_policy_is_missing_in_no_other_and_no_later_row_group() -> None:
    def rows(first: int, **more: Any) -> SampleBatch:
        t = np.arange(first, first + 4)
        return SampleBatch(
            obs=t + 0.5, new_obs=(t + 9.5) * (first % 8 > 0), eps_id=np.zeros(4, int), t=t, **more
        )

    batches = [MultiAgentBatch({"a": rows(0, new_obs_valid=np.zeros(4, bool))}, 4)]
    for first in range(8, 200, 32):  # Buffers take turns: each is used again with the policies in turn.
        missing, known = np.zeros(4, bool), np.ones(4, bool)
        for at in (first, first + 8):
            batches.append(MultiAgentBatch({"a": rows(at, new_obs_valid=missing), "b": rows(at + 4)}, 8))
        for at in (first + 16, first + 24):
            batches.append(MultiAgentBatch({"b": rows(at + 4), "a": rows(at + 1, new_obs_valid=known)}, 8))
    with group_bytes(1):
        assert_identical(_by_time(round_trip(*batches)), _by_time(concat_samples(batches)))


def test_agents_of_one_policy_are_linked_each_with_itself() -> None:
    """Two agents share a policy and an episode id: their steps interleave, and count once."""
    obs = np.arange(24.0).reshape(6, 2, 2)
    part = SampleBatch(
        obs=obs[:5].reshape(-1, 2), new_obs=obs[1:].reshape(-1, 2), eps_id=np.full(10, 3),
        t=np.repeat(np.arange(5), 2), agent_index=np.tile([0, 1], 5),
    )  # fmt: skip
    batch = MultiAgentBatch({"shared": part}, 5)
    root = store(batch)
    assert stored_rows(root, "_new_obs") == 2
    assert_identical(load(root), batch)
    with DatasetReader(root, epochs=1, batch_size=2) as reader:
        assert [b["shared"]["t"].tolist() for b in reader] == [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4]]


def test_rows_count_although_their_environment_steps_are_given_as_none() -> None:
    batch = MultiAgentBatch({"a": numbered(3, eps_id=[1] * 3)}, 0)
    root = fresh_root()
    with ParquetWriter(root) as writer:
        writer.write(batch)
        assert writer.rows_received == 3
    assert load(root)["a"]["t"].tolist() == [0, 1, 2]


@given(values=npst.arrays(np.float64, 5, elements=st.floats()))
@settings(max_examples=15, deadline=None)
def test_the_rest_of_a_batch_s_attributes_comes_back(values: np.ndarray) -> None:
    found = round_trip(SampleBatch(x=values, num_grad_updates=np.float32(2.5)))
    assert found.num_grad_updates == 2.5
    found = round_trip(SampleBatch(x=values, seq_lens=[2, 3], max_seq_len=np.int64(9)))
    assert found.max_seq_len == 9


def test_a_group_that_begins_with_the_rest_of_longer_sequences_is_read() -> None:
    with group_bytes(200):
        long, short = numbered(10, seq_lens=[5, 5]), numbered(2, 10, seq_lens=[1, 1])
        found = round_trip(long, short, batch_size=1)
    assert found["seq_lens"].tolist() == [5, 5, 1, 1]
