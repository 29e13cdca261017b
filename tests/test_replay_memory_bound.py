"""Data larger than memory: what lies in mapped files takes no memory of its own, however long it is read.

Measured is anonymous resident memory (``RssAnon``): pages of mapped files are the kernel's, which drops them
when it needs room.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from further import further

import rlio

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists() or "RssAnon" not in Path("/proc/self/status").read_text(),
    reason="anonymous resident memory is read from /proc, which this system has not",
)

_COMMON = """
import sys, threading, time
import numpy as np
import rlio

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1000

class Peak:
    # The highest value of all moments, but for a few milliseconds between two looks.
    def __init__(self):
        self.most, self.over = 0.0, threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self):
        while not self.over.wait(0.005):
            self.most = max(self.most, anonymous())

    def stop(self):
        self.over.set()
        self.thread.join()
        return max(self.most, anonymous())
"""

_RECORD = """
root, megabytes, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
rng = np.random.default_rng(0)
shape, dtype = ((84, 84, 4), np.uint8) if kind == "frames" else ((512,), np.float32)
rows = 200 if kind == "frames" else 5000
fragment = rows * int(np.prod(shape)) * np.dtype(dtype).itemsize / 1e6
base = rng.integers(0, 5, (rows + 1, *shape), np.uint8)
with rlio.ParquetWriter(root, spool=None) as writer:
    for number in range(int(megabytes // fragment) + 1):
        seen = (base + np.uint8(number % 251)).astype(dtype)
        seen.reshape(rows + 1, -1)[:, 0] = np.arange(rows + 1) % 200
        writer.write(rlio.SampleBatch(
            obs=seen[:-1], new_obs=seen[1:], rewards=np.full(rows, number, np.float32), t=np.arange(rows),
            eps_id=np.full(rows, number), terminateds=np.arange(rows) == rows - 1,
        ))
"""

_REPLAY = """
root, batches, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
peak = Peak()
before = anonymous()
with rlio.DatasetReader(root, cache="disk", shuffle=True, seed=0, batch_size=size) as reader:
    total = len(reader)
    for number in range(batches):
        batch = reader.sample()
        flat, later = (batch[name].reshape(len(batch), -1) for name in ("obs", "new_obs"))
        assert (flat[:, 0] == batch["t"] % 200).all()
        assert (later[:, 0] == (batch["t"] + 1) % 200).all()
        assert ((flat[:, 1] - batch["rewards"]) % 251 < 5).all()
        assert (batch["rewards"] == batch["eps_id"]).all()
    rows = number * size
print(peak.stop(), before, total, rows)
"""


def python(code: str, *arguments: object, cache: Path) -> list[float]:
    """What a fresh process prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_COMMON + code), *map(str, arguments)],
        env={**os.environ, "RLIO_CACHE": str(cache), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(number) for number in done.stdout.split()]


def replays(tmp_path: Path, kind: str, megabytes: int, batches: int, size: int) -> tuple[float, float]:
    """Record, build and replay; gives the peak of memory in MB, and MB of the built store."""
    root, cache = tmp_path / "data", tmp_path / "cache"
    python(_RECORD, root, megabytes, kind, cache=cache)
    most, _, total, _ = python(_REPLAY, root, batches, size, cache=cache)
    stored = sum(path.stat().st_size for path in cache.rglob("*.array")) / 1e6
    assert total > 0
    # Built already: replayed without decoding anything.
    again, *_ = python(_REPLAY, root, batches, size, cache=cache)
    return max(most, again), stored


@pytest.mark.parametrize("megabytes", further(240, 500))
def test_data_replays_shuffled_within_half_of_its_size(tmp_path: Path, megabytes: int) -> None:
    most, stored = replays(tmp_path, "frames", megabytes, 100, 32)
    assert stored > 0.9 * megabytes
    assert most < megabytes / 2


@pytest.mark.parametrize("kind", [*further("frames"), pytest.param("vectors", marks=pytest.mark.soak)])
def test_a_gigabyte_replays_shuffled_within_half_of_it(tmp_path: Path, kind: str) -> None:
    most, stored = replays(tmp_path, kind, 1000, 300, 32)
    assert stored > 900
    assert most < 500


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["frames", "vectors"])
def test_ten_gigabytes_replay_shuffled_within_500_mb(tmp_path: Path, kind: str) -> None:
    most, stored = replays(tmp_path, kind, 10_000, 3000, 256)
    assert stored > 9_000
    assert most < 500


_EPISODES = """
root, rng = sys.argv[1], np.random.default_rng(0)
with rlio.ParquetWriter(root, spool=None) as writer:
    for number in range(300):
        rows = int(rng.integers(5, 400))
        seen = rng.random((rows + 1, 17)).astype(np.float32)
        writer.write(rlio.SampleBatch(
            obs=seen[:-1], new_obs=seen[1:], rewards=np.ones(rows, np.float32), t=np.arange(rows),
            eps_id=np.full(rows, number), terminateds=np.arange(rows) == rows - 1,
        ))
"""

_FLAT = """
from rlio import NStep, Sequences, WholeEpisodes

root, batches, cache, options = sys.argv[1], int(sys.argv[2]), sys.argv[3], eval(sys.argv[4])
every = batches // 100
with rlio.DatasetReader(root, cache=cache, shuffle=True, seed=0, **options) as reader:
    found = []
    for number in range(batches):
        batch = reader.sample()
        if number % 7 == 0:
            kept = batch  # The user holds one for a while.
        if number % every == every - 1:
            found.append(anonymous())
print(*found)
"""


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Episodes of any length, so that batches have ever other sizes."""
    folder = tmp_path_factory.mktemp("episodes")
    python(_EPISODES, folder / "data", cache=folder / "cache")
    return folder / "data"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("cache", "options", "batches"),
    [
        ("disk", {"batch_size": 64}, 1_500),
        ("none", {"batch_size": 32}, 1_500),
        *further(
            ("disk", {"batch_size": 32}, 100_000),
            ("memory", {"batch_size": 16, "filter": "t > 3"}, 3_000),
            ("memory", {"batch_size": 16, "draw": rlio.NStep(3)}, 20_000),
            ("memory", {"batch_size": 4, "draw": rlio.WholeEpisodes()}, 3_000),
            ("disk", {"batch_size": 8, "draw": rlio.Sequences(10)}, 10_000),
            ("none", {"batch_size": 32}, 100_000),
        ),
    ],
    ids=str,
)
def test_memory_is_flat_over_a_hundred_thousand_batches(
    episodes: Path, tmp_path: Path, cache: str, options: dict[str, Any], batches: int
) -> None:
    """The first tenth of the batches fills what is kept. A figure varies by 5 MB with what was just freed."""
    found = python(_FLAT, episodes, batches, cache, options, cache=tmp_path / "cache")
    assert len(found) == 100
    assert max(found[50:]) - max(found[10:50]) < 4, found
