"""docs/columns.md has every standard column, with the dtype and shape that batches have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest

import rlio
from rlio.policies import GAE, ActorCritic
from rlio.policies.networks import gru
from rlio.query.derived_columns import EPISODE_COLUMNS

ZEROS = np.zeros((2, 4), np.float32)


class Row(NamedTuple):
    """What the page says of a column."""

    dtype: str
    shape: str


@pytest.fixture(scope="module")
def said(checkout: Path) -> dict[str, Row]:
    """The page's table, by column; of ``state_in_0, ...`` the first one."""
    text = (checkout / "docs" / "columns.md").read_text(encoding="utf-8")
    found = {}
    for line in text.split("## End of an episode")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0].startswith("`"):
            dtype, _, shape = cells[1].partition(", ")
            for name in re.findall(r"`(\w+)`", cells[0]):
                found[name] = Row(dtype, shape)
    return found


def test_every_standard_column_is_in_the_table(said: dict[str, Row]) -> None:
    names = {value for name, value in vars(rlio.Columns).items() if name.isupper()}
    assert len(names) > 25
    assert names - said.keys() == set()


def batches(root: Path) -> Iterator[rlio.SampleBatch]:
    """Batches that have, in all, most of the columns."""
    rollout = rlio.RolloutConfig(rollout_fragment_length=60, record_infos=True, record_env_seeds=True)
    for policy in (rlio.RandomPolicy(), ActorCritic(), rlio.TorchPolicy(gru, postprocessing=GAE(0.9, 0.9))):
        with rlio.RolloutWorker("CartPole-v1", policy, rollout=rollout, seed=0, output=root / "a") as worker:
            yield worker.sample()
    with rlio.RecordExperience(gym.make("CartPole-v1"), root / "b", seeds=True, infos=True) as env:
        env.reset(seed=0)
        for _ in range(8):
            env.record(action_prob=0.5)
            env.step(0)
    with rlio.ParquetWriter(root / "c") as writer:
        writer.write(rlio.SampleBatch(obs=ZEROS, new_obs=ZEROS, new_obs_valid=[True, False]))
    yield from (rlio.read(root / name, epochs=1).sample() for name in "bc")
    with rlio.ReplayStore.open(root / "b") as store:
        yield store.uniform(batch_size=4, draw=rlio.NStep(3), indexes=True, seed=0).sample()
        yield store.epochs(batch_size=2, draw=rlio.Sequences(3, burn_in=1), seed=0).sample()
        yield store.prioritised(batch_size=4, seed=0).sample()
        yield store.uniform(batch_size=4, seed=0, derive=EPISODE_COLUMNS).sample()
        yield store.epochs(batch_size=2, draw=rlio.Sequences(3, layout="time"), seed=0, columns=[]).sample()
    with rlio.read({root / "b": 1, root / "c": 1}, batch_size=4, source_column=True) as mix:
        yield mix.sample()


def test_batches_have_the_dtypes_and_shapes_of_the_table(said: dict[str, Row], tmp_path: Path) -> None:
    seen = set()
    for batch in batches(tmp_path):
        for name, column in batch.items():
            assert name in said, f"{name} is not in the table"
            row = said[name]
            if row.dtype in ("bool", "float32", "int32", "int64", "object"):
                assert column.dtype == row.dtype, f"{name}: {column.dtype}"
            if row.shape == "(N,)":
                assert column.ndim == 1, f"{name}: {column.shape}"
            seen.add(name)
    # Those that need several agents, an engine, or a simulator that has the loop.
    elsewhere = {"dones", "agent_id", "logged_action", "policy_id", "_writer", "prev_actions", "prev_rewards"}
    assert said.keys() - seen == elsewhere
