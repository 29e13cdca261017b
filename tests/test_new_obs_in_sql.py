"""The SQL of docs/format.md gives the new_obs that readers give, in DuckDB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from further import further
from golden_data import agents, cartpole_like
from pages import blocks
from stored_batches import group_bytes, load, store, with_other_ids

import rlio
from rlio import MultiAgentBatch, Roll, SampleBatch
from rlio.maintenance.compact import compact


@pytest.fixture(scope="module")
def view(checkout: Path) -> str:
    """The view of the page, with ``root`` and the two names of a leaf to be replaced."""
    (found,) = (sql for sql in blocks(checkout / "docs" / "format.md", "sql") if "CREATE VIEW steps" in sql)
    return found


def steps_of(root: Path, view: str, columns: str, *, obs: str = "obs", stored: str = "_new_obs") -> list[Any]:
    """Columns of the view, in the order of the data set."""
    text = view.replace("'root/", f"'{root}/").replace("lead(obs,", f'lead("{obs}",')
    text = text.replace("ELSE _new_obs END", f'ELSE "{stored}" END')
    assert text.count(f'"{obs}"') == text.count(f'"{stored}"') == 1
    with duckdb.connect() as connection:
        connection.sql(text)
        query = f"SELECT {columns} FROM steps ORDER BY filename, file_row_number"
        return [list(column) for column in zip(*connection.sql(query).fetchall(), strict=True)]


def assert_as_the_reader_says(found: list[Any], batch: SampleBatch, leaf: np.ndarray) -> None:
    """NULL where the final observation is missing, and the very value elsewhere."""
    valid = np.asarray(batch.get("new_obs_valid", np.ones(len(batch), bool)))
    assert [value is not None for value in found] == valid.tolist()
    known = [value for value in found if value is not None]
    np.testing.assert_array_equal(np.array(known, leaf.dtype), leaf[valid])


@pytest.mark.further
def test_real_recordings_of_several_writers(view: str, recordings: Path, tmp_path: Path) -> None:
    for writer in range(3):
        with rlio.JsonReader(recordings / "cartpole" / "large.json", batch_size=1500, epochs=1) as reader:
            batches = [reader.sample() for _ in range(2)]
        with group_bytes(1 << (14 + writer)):
            store(
                *(batch[writer * 100 :] for batch in batches),
                root=str(tmp_path),
                writer_id=f"w{writer:05}-00000000",
                roll=Roll(max_rows=700, max_seconds=None),
            )
    batch = load(str(tmp_path))
    assert len(batch) > 7000
    assert len(np.unique(batch["eps_id"])) > 10
    (found,) = steps_of(tmp_path, view, "new_obs")
    assert_as_the_reader_says(found, batch, batch["new_obs"])


def test_interleaved_environments_and_a_missing_final_observation(view: str, tmp_path: Path) -> None:
    store(cartpole_like(), with_other_ids(cartpole_like()), root=str(tmp_path))
    batch = load(str(tmp_path))
    (found,) = steps_of(tmp_path, view, "new_obs")
    assert found.count(None) == 2
    assert_as_the_reader_says(found, batch, batch["new_obs"])


def test_several_agents_whose_observations_are_nested_and_disagree(view: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    store(agents(), root=str(root))
    (schema,) = rlio.open_dataset(root).schemas.values()
    names = {
        pid: {leaf.path: leaf.physical for column in ("obs", "new_obs") for leaf in policy.columns[column]}
        for pid, policy in schema.policies.items()
    }
    assert len(names) == 4
    for pid, batch in load(str(root)).policy_batches.items():
        for obs, new_obs in zip(
            schema.policies[pid].columns["obs"], schema.policies[pid].columns["new_obs"], strict=True
        ):
            if obs.spec.kind == "bytes":  # No arrays in SQL.
                continue
            columns = f'new_obs, "{obs.physical}" IS NOT NULL'
            found, own = steps_of(root, view, columns, obs=obs.physical, stored=new_obs.physical)
            found = [value for value, is_own in zip(found, own, strict=True) if is_own]
            expected = batch["new_obs"]
            for token in obs.path:
                expected = expected[token]
            assert_as_the_reader_says(found, batch, expected)


def random_steps(rng: np.random.Generator, first: int, rows: int, ids: list[int]) -> SampleBatch:
    """Steps of two environments in any order, whose new_obs is often the next obs, or another, or missing.

    ``ids`` are the present episodes of the environments. An environment begins another after a truncated row,
    and sometimes otherwise.
    """
    env = rng.integers(0, 2, rows)
    obs = rng.integers(0, 3, (rows, 2)).astype(np.float32)
    new_obs = rng.integers(0, 3, (rows, 2)).astype(np.float32)
    for number in (0, 1):
        own = np.flatnonzero(env == number)
        linked = rng.random(max(len(own) - 1, 0)) < 0.8
        new_obs[own[:-1][linked]] = obs[own[1:][linked]]
    valid = rng.random(rows) < 0.8
    new_obs[~valid] = 0
    truncated = rng.random(rows) < 0.1
    ids[int(rng.integers(0, 2))] += 2 * int(rng.integers(0, 2))
    eps_id = np.zeros(rows, np.int64)
    for row in range(rows):
        eps_id[row] = ids[env[row]]
        ids[env[row]] += 2 * int(truncated[row])
    return SampleBatch(
        obs=obs,
        new_obs=new_obs,
        new_obs_valid=valid,
        truncateds=truncated,
        eps_id=eps_id,
        env_id=env,
        t=np.arange(first, first + rows),
    )


def write_random(root: Path, seed: int, *, joint: bool) -> None:
    """Two writers' shards of at most 20 rows or one batch, with row groups of any size; ``t`` is unique."""
    rng = np.random.default_rng(seed)
    first = 0
    for writer in range(2):
        batches: list[Any] = []
        ids: dict[str, list[int]] = {"a": [0, 1], "b": [0, 1]}
        for _ in range(4):
            parts = {}
            for policy in ("a", "b"):
                parts[policy] = random_steps(rng, first, int(rng.integers(1, 30)), ids[policy])
                first += len(parts[policy])
            if seed % 2 and not joint:  # Without ids, an episode ends where it is truncated.
                del parts["a"]["eps_id"]
                del parts["a"]["env_id"]
            batches.append(MultiAgentBatch(parts, 30) if joint else parts["a"])
        with group_bytes(int(rng.choice([100, 400, 1 << 20]))):
            store(
                *batches,
                root=str(root),
                writer_id=f"w{writer:05}-00000000",
                roll=Roll(max_rows=20, max_seconds=None),
            )


@pytest.mark.parametrize("joint", [*further(False), True])
def test_any_rows_of_any_agents_also_where_covered_shards_lie_beside_live_ones(
    view: str, tmp_path: Path, joint: bool
) -> None:
    covered = 0
    for seed in range(4):
        root = tmp_path / str(seed)
        write_random(root, seed, joint=joint)
        read = load(str(root))
        parts = list(read.policy_batches.values()) if isinstance(read, MultiAgentBatch) else [read]
        row_of = {t: (part, row) for part in parts for row, t in enumerate(part["t"].tolist())}
        for compacted in (False, True):
            if compacted:
                report = compact(root)
                covered += report.shards_before - report.shards_after
            new_obs, times = steps_of(root, view, "new_obs, t")
            assert set(times) == set(row_of)
            assert len(times) >= len(row_of)
            for value, t in zip(new_obs, times, strict=True):
                part, row = row_of[t]
                expected = part["new_obs"][row].tolist() if part["new_obs_valid"][row] else None
                assert value == expected, (seed, t)
    assert covered > 0
