"""How large a run is: for figures, for a first look, and for the tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["FULL", "QUICK", "TINY", "Scale", "Setup"]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of a run.

    Attributes:
        rows: Vector rows in the hot stores.
        image_rows: Image rows in the hot stores.
        recorded_rows: Vector rows that are written and read.
        recorded_image_rows: Image rows that are written and read.
        long_image_rows: Image rows of a long recording.
        opened_image_rows: Image rows of a store that is opened.
        resumed_rows: Rows of the data set in which a reader resumes.
        shards: Shards of the data set that is opened.
        episodes: Episodes over which a recorder's overhead must stay the same.
        rollout_steps: Steps of each environment in a timed call.
        growth: Rows, columns, bytes a row and batch sizes over which the cost is followed.
        growth_bytes: Size of a store whose rows are not what grows.
        live_rows: Capacities of live stores, the least first.
        far_files: Files of a layout on a far store.
        far_bytes: Bytes of such a file, about: above 4 MiB, it is not fetched whole.
        far_seconds: Of each request.
        far_rounds: Rounds in which each layout is read, at most.
        rounds: Measured rounds.
        seconds: What a contender is given in a round.
    """

    # 182 MB: several times what the last cache of most machines holds, so that rows come from memory.
    rows: int = 1_000_000
    image_rows: int = 20_000
    recorded_rows: int = 200_000
    recorded_image_rows: int = 3_000
    long_image_rows: int = 30_000
    opened_image_rows: int = 8_000
    resumed_rows: int = 10**8
    shards: int = 10**5
    episodes: int = 10**5
    rollout_steps: int = 200
    growth: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]] = (
        (10**4, 10**5, 10**6, 10**7),
        (4, 8, 16, 32, 64),
        (16, 64, 256, 1024, 4096, 16384, 65536),
        (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536),
    )
    growth_bytes: int = 256 << 20
    live_rows: tuple[int, ...] = (10**4, 10**5, 10**6)
    far_files: int = 4
    far_bytes: int = 8_000_000
    far_seconds: float = 0.03
    far_rounds: int = 3
    rounds: int = 7
    seconds: float = 0.12


FULL = Scale()
QUICK = Scale(
    rows=200_000,
    image_rows=2_000,
    recorded_rows=50_000,
    recorded_image_rows=400,
    long_image_rows=2_000,
    opened_image_rows=1_000,
    resumed_rows=10**7,
    shards=10**4,
    episodes=10**3,
    growth=((10**4, 10**6), (4, 64), (16, 1024, 65536), (1, 256, 65536)),
    growth_bytes=64 << 20,
    live_rows=(10**4, 10**5),
    far_files=2,
    far_bytes=5_000_000,
    far_rounds=1,
    rounds=3,
    seconds=0.03,
)
TINY = Scale(
    rows=5_000,
    image_rows=300,
    recorded_rows=2_000,
    recorded_image_rows=40,
    long_image_rows=300,
    opened_image_rows=100,
    resumed_rows=10**4,
    shards=50,
    episodes=100,
    rollout_steps=5,
    growth=((1_000, 2_000), (4, 8), (16, 1024), (1, 64)),
    growth_bytes=1 << 16,
    live_rows=(2_000, 4_000),
    far_files=2,
    far_bytes=200_000,
    far_seconds=0.006,
    far_rounds=1,
    rounds=2,
    seconds=0.0,
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a part gets.

    Attributes:
        scale: Sizes.
        data: Folder of recordings, kept from run to run.
        scratch: Folder of what is thrown away.
    """

    scale: Scale
    data: Path
    scratch: Path
