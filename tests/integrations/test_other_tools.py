"""Shards are plain Parquet: older versions of other tools read them, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rlio

#: Folders with one version of one tool each, which `make test-integrations` fills.
TOOLS = Path(sys.prefix) / "older-tools"

QUERIES = {
    "duckdb": """
found = duckdb.sql(
    "SELECT count(*), max(t), sum(rewards), sum(len(tokens)), sum(obs[2]), count(DISTINCT eps_id), max(name)"
    f" FROM read_parquet('{pattern}')"
).fetchone()
""",
    "polars": """
table = polars.read_parquet(pattern)
found = (
    len(table), table["t"].max(), table["rewards"].sum(), table["tokens"].list.len().sum(),
    table["obs"].list.get(1).sum(), table["eps_id"].n_unique(), table["name"].max(),
)
""",
    "pandas": """
table = pandas.concat(pandas.read_parquet(path) for path in glob.glob(pattern))
found = (
    len(table), table["t"].max(), table["rewards"].sum(), table["tokens"].map(len).sum(),
    table["obs"].map(lambda row: row[1]).sum(), table["eps_id"].nunique(), table["name"].max(),
)
""",
}


@pytest.mark.parametrize(
    "tool", sorted(path for path in TOOLS.iterdir() if path.is_dir()) if TOOLS.is_dir() else [None], ids=str
)
def test_an_older_version_reads_every_kind_of_column(tool: Path | None, tmp_path: Path) -> None:
    if tool is None:
        pytest.skip("make test-integrations installs older versions of other tools, and did not here")
    rows = np.arange(1000)
    ids = np.random.default_rng(0).integers(0, 2**62, 10)
    with rlio.ParquetWriter(str(tmp_path), spool=None) as writer:
        writer.write(
            rlio.SampleBatch(
                t=rows,
                eps_id=np.repeat(ids, 100),
                rewards=rows.astype(np.float32),
                obs=np.stack([rows, -rows], 1).astype(np.float32),
                tokens=rlio.batch.object_column([np.arange(n % 5, dtype=np.int32) for n in rows]),
                name=rlio.batch.object_column([f"row {n % 7}" for n in rows]),
            )
        )
    name = tool.name.partition("-")[0]
    script = f"""
import sys, json, glob
sys.path.insert(0, {str(tool)!r})
import {name}
assert {name}.__version__ == {tool.name.partition("-")[2]!r}, {name}.__version__
pattern = {str(tmp_path)!r} + "/data/*/*.parquet"
{QUERIES[name]}
print(json.dumps([value if isinstance(value, str) else float(value) for value in found]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == [1000, 999, 499500, 2000, -499500, 10, "row 6"]
