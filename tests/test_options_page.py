"""docs/reading.md: which option works on which source. `python` this file writes the table.

Each cell is tried: the rows that an option gives are compared with plain NumPy on what was recorded.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import rlio
from rlio.errors import RlioError

LENGTHS = np.array([3, 1, 7, 5, 4, 6, 2, 9, 8, 5])
ROWS = int(LENGTHS.sum())
IDS = np.arange(ROWS)
EPISODES = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
STARTS = np.repeat(np.cumsum(LENGTHS) - LENGTHS, LENGTHS)
LAST = np.isin(IDS, np.cumsum(LENGTHS) - 1)
#: Rewards are the numbers of the rows, so each row says which one it is.
RECORDED = {
    "obs": np.stack([IDS, IDS % 7], 1).astype(np.float32),
    "new_obs": np.stack([IDS + 1, (IDS + 1) % 7], 1).astype(np.float32),
    "actions": IDS % 5,
    "rewards": IDS.astype(np.float32),
    "terminateds": LAST,  # Robomimic has no other ends.
    "truncateds": np.zeros(ROWS, bool),
    "eps_id": EPISODES,
    "t": IDS - STARTS,
}
MAPPING = rlio.Mapping(
    {"obs": ["x", "y"], "actions": "act", "rewards": "rew"},
    episode="trip",
    terminated="end",
    truncated="stop",
    next_obs=["x2", "y2"],
    dtypes={"obs": "float32", "rewards": "float32"},
)
#: Formats that rlio writes -> ending of their file; those of pictures and robots need further libraries.
WRITTEN = {
    "minari": "", "d4rl": ".hdf5", "d3rlpy": ".h5", "robomimic": ".hdf5", "npz": "", "parquet": "",
    "rllib-json": "", "rllib-episodes": "",
}  # fmt: skip

Read = Callable[..., list[rlio.SampleBatch]]


def sources(folder: Path) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Name -> (what `rlio.read` is given, options that say what it is)."""
    batch = rlio.SampleBatch(RECORDED)
    with rlio.ParquetWriter(folder / "rlio", roll=rlio.Roll(max_rows=13)) as writer:
        writer.write(batch)
    with rlio.JsonWriter(folder / "json") as lines:
        for first in range(0, ROWS, 10):
            lines.write(batch[first : first + 10])
    found: dict[str, tuple[Any, dict[str, Any]]] = {
        "rlio (Parquet)": (folder / "rlio", {}),
        "rlio (JSON)": (folder / "json", {}),
    }
    for name, ending in WRITTEN.items():
        rlio.convert(folder / "rlio", folder / f"{name}{ending}", to=name)
        found[name] = (folder / f"{name}{ending}", {})
    columns = {
        "x": RECORDED["obs"][:, 0], "y": RECORDED["obs"][:, 1], "act": RECORDED["actions"],
        "rew": RECORDED["rewards"], "end": RECORDED["terminateds"], "stop": RECORDED["truncateds"],
        "trip": EPISODES, "x2": RECORDED["new_obs"][:, 0], "y2": RECORDED["new_obs"][:, 1],
    }  # fmt: skip
    frame = pd.DataFrame(columns)
    frame.to_csv(folder / "table.csv", index=False)
    frame.to_json(folder / "table.jsonl", orient="records", lines=True)
    frame.to_parquet(folder / "table.parquet", index=False)
    for name in ("csv", "jsonl", "parquet"):
        found[f"table ({name})"] = (folder / f"table.{name}", {"mapping": MAPPING})
    found["table (DataFrame)"] = (frame, {"mapping": MAPPING})
    return found


def rows_of(batches: list[rlio.SampleBatch], name: str = "rewards") -> Any:
    """Column of all batches; d3rlpy and others have actions of shape (rows, 1)."""
    values = np.concatenate([np.asarray(batch[name]) for batch in batches])
    return values.reshape(len(values), -1).squeeze(1) if name != "obs" else values


def check_order(read: Read) -> None:
    found = read()
    for name in ("rewards", "actions", "terminateds", "obs"):
        np.testing.assert_array_equal(rows_of(found, name), RECORDED[name])
    assert [len(batch) for batch in found] == [5] * (ROWS // 5)


def check_epochs(read: Read) -> None:
    np.testing.assert_array_equal(rows_of(read(epochs=3)), np.tile(IDS, 3))


def check_columns(read: Read) -> None:
    found = read(columns=["rewards", "actions"])
    assert all(set(batch) == {"rewards", "actions"} for batch in found)
    np.testing.assert_array_equal(rows_of(found, "actions"), RECORDED["actions"])


def check_shuffle(read: Read) -> None:
    rows = rows_of(found := read(shuffle=True, seed=3, epochs=2))
    np.testing.assert_array_equal(rows_of(found, "obs"), RECORDED["obs"][rows.astype(int)])
    for epoch in (rows[:ROWS], rows[ROWS:]):
        np.testing.assert_array_equal(np.sort(epoch), IDS)
    assert not np.array_equal(rows[:ROWS], rows[ROWS:])
    np.testing.assert_array_equal(rows_of(read(shuffle=True, seed=3, epochs=2)), rows)


def check_ranks(read: Read) -> None:
    ranks = [rows_of(read(shuffle=True, seed=5, shard=(rank, 3))) for rank in range(3)]
    np.testing.assert_array_equal(np.sort(np.concatenate(ranks)), IDS)
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 5


def check_filter(read: Read) -> None:
    np.testing.assert_array_equal(
        rows_of(read(filter="rewards > 20 and not terminateds")), IDS[21:][~RECORDED["terminateds"][21:]]
    )


def check_episodes_by_return(read: Read) -> None:
    returns = np.bincount(EPISODES, RECORDED["rewards"])
    np.testing.assert_array_equal(rows_of(read(filter="episode_return > 100")), IDS[returns[EPISODES] > 100])


def check_split(read: Read) -> None:
    sides = [rows_of(read(split=(side, 0.5))).astype(int) for side in ("train", "test")]
    np.testing.assert_array_equal(np.sort(np.concatenate(sides)), IDS)
    assert not {*EPISODES[sides[0]]} & {*EPISODES[sides[1]]}


def check_derive(read: Read) -> None:
    found = read(derive=["returns_to_go", "episode_length"])
    sums = np.concatenate([IDS[n == EPISODES][::-1].cumsum()[::-1] for n in range(len(LENGTHS))])
    np.testing.assert_allclose(rows_of(found, "returns_to_go"), sums)
    np.testing.assert_array_equal(rows_of(found, "episode_length"), LENGTHS[EPISODES])


def check_n_step(read: Read) -> None:
    ends = STARTS + LENGTHS[EPISODES]
    sums = [sum(0.9**k * (row + k) for k in range(min(3, end - row))) for row, end in enumerate(ends)]
    np.testing.assert_allclose(rows_of(read(draw=rlio.NStep(3, gamma=0.9))), sums, rtol=1e-6)


def check_sequences(read: Read) -> None:
    found = read(draw=rlio.Sequences(4))
    lengths = [min(4, length - at) for length in LENGTHS for at in range(0, length, 4)]
    np.testing.assert_array_equal(np.concatenate([batch["seq_lens"] for batch in found]), lengths)
    starts = np.concatenate(
        [
            [first + at for at in range(0, length, 4)]
            for first, length in zip(np.cumsum(LENGTHS) - LENGTHS, LENGTHS, strict=True)
        ]
    )
    np.testing.assert_array_equal(rows_of(found).reshape(-1, 4)[:, 0], starts)


def check_whole_episodes(read: Read) -> None:
    found = read(draw=rlio.WholeEpisodes(), batch_size=1)
    assert [
        int(batch["seq_lens"][0]) if "seq_lens" in batch else len(batch) for batch in found
    ] == LENGTHS.tolist()


def check_normalise(read: Read) -> None:
    obs = RECORDED["obs"].astype(np.float64)
    expected = (obs - obs.mean(0)) / obs.std(0)
    np.testing.assert_allclose(rows_of(read(normalise="mean_std"), "obs"), expected, atol=1e-5)


def check_drop_last(read: Read) -> None:
    assert [len(batch) for batch in read(batch_size=7, drop_last=True)] == [7] * (ROWS // 7)


def check_kept(read: Read) -> None:
    for cache in ("memory", "disk"):
        np.testing.assert_array_equal(rows_of(read(cache=cache)), IDS)


OPTIONS: dict[str, Callable[[Read], None]] = {
    "recorded order": check_order,
    "`epochs`": check_epochs,
    "`columns`": check_columns,
    "`shuffle`": check_shuffle,
    "`shard`": check_ranks,
    "`filter` of rows": check_filter,
    "`filter` of episodes": check_episodes_by_return,
    "`split`": check_split,
    "`derive`": check_derive,
    "`NStep`": check_n_step,
    "`Sequences`": check_sequences,
    "`WholeEpisodes`": check_whole_episodes,
    "`normalise`": check_normalise,
    "`drop_last`": check_drop_last,
    "`cache`": check_kept,
}


def check_state(given: Any, own: dict[str, Any]) -> None:
    options: Any = {"batch_size": 4, "epochs": 2, "shuffle": True, "seed": 7, **own}
    with rlio.read(given, **options) as reader:
        reader.sample(3)
        state = reader.state_dict()
        rest = rows_of(list(reader))
    with rlio.read(given, **options) as reader:
        reader.load_state_dict(state)
        np.testing.assert_array_equal(rows_of(list(reader)), rest)


def check_store(given: Any, own: dict[str, Any]) -> None:
    with rlio.ReplayStore.open(given, **own) as store:
        assert len(store) == ROWS
        with store.uniform(batch_size=200, seed=1) as sampler:
            batch = sampler.sample()
    rows = batch["rewards"].astype(int)
    np.testing.assert_array_equal(batch["obs"], RECORDED["obs"][rows])
    assert len({*rows.tolist()}) > ROWS // 2


def check_data_set(given: Any, own: dict[str, Any]) -> None:
    data = rlio.open_dataset(given, **own)
    assert data.episode_count == len(LENGTHS)
    np.testing.assert_array_equal(data.episode(2).rewards, IDS[EPISODES == 2])
    assert data.lengths().tolist() == list(LENGTHS)
    assert data.returns().tolist() == [IDS[number == EPISODES].sum() for number in range(len(LENGTHS))]
    assert data.episodes["finished"].all()
    np.testing.assert_array_equal(np.sort(data.to_pandas()["rewards"]), IDS)


WAYS: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "a state": check_state,
    "`ReplayStore.open`": check_store,
    "`open_dataset`": check_data_set,
}


def verdict(check: Callable[[], None]) -> str:
    """ "yes", or the name of rlio's error; AssertionError if rows are wrong."""
    try:
        check()
    except RlioError as error:
        return type(error).__name__
    return "yes"


def verdicts(place: Any, own: dict[str, Any]) -> dict[str, str]:
    """Of one source, the verdict of each option."""

    def read(**options: Any) -> list[rlio.SampleBatch]:
        with rlio.read(place, **{"batch_size": 5, "epochs": 1, **own, **options}) as reader:
            return list(reader)

    tried = {name: verdict(partial(check, read)) for name, check in OPTIONS.items()}
    return tried | {name: verdict(partial(way, place, own)) for name, way in WAYS.items()}


def matrix(folder: Path) -> list[list[str]]:
    """The table: a row for each option, a column for each source."""
    given = sources(folder)
    columns = [verdicts(*one) for one in given.values()]
    return [["", *given], *([name, *(column[name] for column in columns)] for name in columns[0])]


def with_table(page: str, table: list[list[str]]) -> str:
    """The page with the table between its marks."""
    lines = ["| " + " | ".join(row) + " |" for row in table]
    lines.insert(1, "|---" * len(table[0]) + "|")
    mark = "<!-- options -->"
    text = "\n".join(lines)
    page, made = re.subn(f"{mark}.*?{mark}", lambda _: f"{mark}\n{text}\n{mark}", page, flags=re.DOTALL)
    assert made == 1
    return page


@pytest.mark.further
def test_the_page_has_the_options_that_work_on_each_source(checkout: Path, tmp_path: Path) -> None:
    page = (checkout / "docs/reading.md").read_text(encoding="utf-8")
    table = matrix(tmp_path)
    assert with_table(page, table) == page, "run  python tests/test_options_page.py"
    cells = [cell for row in table[1:] for cell in row[1:]]
    assert {*cells} == {"yes"}


def test_a_wrong_row_is_no_verdict() -> None:
    with pytest.raises(AssertionError):
        verdict(lambda: check_order(lambda **options: [rlio.SampleBatch(RECORDED)[::-1]]))


if __name__ == "__main__":
    place = Path(__file__).resolve().parents[1] / "docs/reading.md"
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["RLIO_CACHE"] = os.path.join(scratch, "stores")
        made = matrix(Path(scratch))
    place.write_text(with_table(place.read_text(encoding="utf-8"), made), encoding="utf-8")
