"""`Dataset.info`: what a data set is and holds, of every source, compared with plain NumPy on all rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from gymnasium.spaces import Box, Discrete
from test_html import check
from test_options_page import EPISODES, LENGTHS, RECORDED, ROWS, sources

import rlio
from rlio.errors import CorruptData, DataNotFound, UnknownLayout
from rlio.look.info import Quantiles, _size
from rlio.schemas.provenance import Provenance

GOLDEN = Path(__file__).with_name("golden")
TITLES = {
    "rlio (Parquet)": "rlio", "rlio (JSON)": "rlio", "minari": "Minari", "d4rl": "D4RL", "d3rlpy": "d3rlpy",
    "robomimic": "Robomimic", "table (csv)": "CSV", "table (DataFrame)": "table",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, dict[str, Any]]]:
    return sources(tmp_path_factory.mktemp("sources"))


def check_quantiles(found: Quantiles | None, values: np.ndarray) -> None:
    """Compare with NumPy over all values."""
    assert found is not None
    known = values[~np.isnan(values)]
    assert found.count == len(known)
    wanted = np.quantile(known, [0, 0.1, 0.5, 0.9, 1])
    np.testing.assert_allclose([found.min, found.q10, found.median, found.q90, found.max], wanted)
    np.testing.assert_allclose(found.mean, known.mean())


def column(info: rlio.DatasetInfo, name: str) -> Any:
    (found,) = [one for one in info.columns if one.name == name]
    return found


NAMES = [
    "rlio (Parquet)", "rlio (JSON)", "minari", "d4rl", "d3rlpy", "robomimic", "npz", "parquet", "rllib-json",
    "rllib-episodes", "table (csv)", "table (jsonl)", "table (parquet)", "table (DataFrame)",
]  # fmt: skip


@pytest.mark.few(6)
@pytest.mark.parametrize("name", NAMES)
def test_info_of_every_source_has_the_numbers_of_plain_numpy(
    name: str, written: dict[str, tuple[Any, dict[str, Any]]]
) -> None:
    where, options = written[name]
    data = rlio.open_dataset(where, **options)
    info = data.info()
    assert TITLES.get(name, "") in info.title
    assert (info.uri, info.rows, info.episodes) == (data.uri, ROWS, len(LENGTHS))
    check_quantiles(info.returns, np.bincount(EPISODES, RECORDED["rewards"]))
    check_quantiles(info.lengths, LENGTHS.astype(float))
    assert (info.terminated, info.truncated, info.unfinished) == (len(LENGTHS), 0, 0)
    assert len(info.writers) == (1 if name.startswith("rlio") else 0)
    assert column(info, "rewards").nan == 0
    if isinstance(where, pd.DataFrame):
        assert info.bytes is info.files is None
    else:
        files = [file for file in Path(where).rglob("*") if file.is_file()] or [Path(where)]
        assert info.files is not None
        assert 1 <= info.files <= len(files)
        assert 0 < (info.bytes or 0) <= sum(file.stat().st_size for file in files)
    assert len(repr(info).splitlines()) <= 10
    assert max(map(len, repr(info).splitlines())) <= 118
    json.dumps(info.as_dict(), allow_nan=False)
    check(info._repr_html_())

    read = data.info(ranges=True)
    for one, values in (("rewards", RECORDED["rewards"]), ("actions", RECORDED["actions"])):
        found = column(read, one)
        assert (found.min, found.max, found.nan) == (values.min(), values.max(), 0), one
    obs = column(read, "obs")
    dtype = "float64" if name == "rllib-json" else "float32"  # JSON has no dtypes.
    assert (obs.dtype, obs.shape, obs.min, obs.max) == (dtype, (2,), 0, ROWS - 1)
    again = rlio.open_dataset(where, **options).info()  # What was read is known to later calls.
    assert again == read


#: Fixtures of other libraries -> (path, options, title, version, environment).
FIXTURES: dict[str, tuple[str, dict[str, Any], str, str | None, str | None]] = {
    "minari": ("formats/minari/cart/collected-v0", {}, "Minari", "0.5.4", "CartPole-v1"),
    "minari, nested": ("formats/minari/nested/parquet-v0", {}, "Minari", "0.5.4", "CartPole-v1"),
    "minari, pictures": ("formats/minari/images/raw-v0", {}, "Minari", "0.5.4", "CartPole-v1"),
    "lerobot 2": ("formats/lerobot/v2.1", {}, "LeRobot", "v2.1", None),
    "lerobot 3": ("formats/lerobot/v3.0", {}, "LeRobot", "v3.0", None),
    "lerobot, pictures": ("formats/lerobot/v3.0-image", {}, "LeRobot", "v3.0", None),
    "rllib": ("formats/rllib/cartpole", {}, "RLlib", None, None),
    "rllib, nested": ("formats/rllib/nested", {}, "RLlib", None, None),
    "rllib of 2019": ("formats/rllib-2019/*.json", {}, "RLlib", None, None),
    "d3rlpy": ("formats/d3rlpy/buffer.h5", {}, "d3rlpy", "2.1", None),
    "tianshou": ("formats/tianshou/ring.hdf5", {}, "Tianshou", None, None),
    "tianshou, vector": ("formats/tianshou/vector.hdf5", {}, "Tianshou", None, None),
    "rlds": ("formats/rlds/counts/1.0.0", {}, "RLDS", None, None),
    "torchrl": ("formats/torchrl/ring", {}, "TorchRL", None, None),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FIXTURES)
def test_info_of_fixtures_of_other_libraries_has_the_numbers_of_plain_numpy(name: str) -> None:
    path, options, title, version, environment = FIXTURES[name]
    with rlio.read(GOLDEN / path, epochs=1, batch_size=10**6, **options) as reader:
        rows = reader.sample()
    ids, of = np.unique(rows["eps_id"], return_inverse=True)
    info = rlio.open_dataset(GOLDEN / path, **options).info()
    assert (info.rows, info.episodes) == (len(rows), len(ids))
    check_quantiles(info.returns, np.bincount(of, rows["rewards"].astype(float)))
    check_quantiles(info.lengths, np.bincount(of).astype(float))
    last = len(rows) - 1 - np.unique(rows["eps_id"][::-1], return_index=True)[1]
    terminated = rows["terminateds"][last]
    truncated = rows["truncateds"][last] if "truncateds" in rows else np.zeros_like(terminated)
    assert info.terminated == terminated.sum()
    assert info.truncated == (truncated & ~terminated).sum()
    assert info.unfinished == (~terminated & ~truncated).sum()
    assert title in info.title
    assert info.version == version
    assert info.environments == (() if environment is None else (environment,))
    assert not info.writers
    assert {one.name.split("/")[0] for one in info.columns} >= {"actions", "rewards"}
    json.dumps(info.as_dict(), allow_nan=False)
    check(info._repr_html_())


# ---- data of rlio ----


def steps(rows: int, first: int = 0, **more: Any) -> rlio.SampleBatch:
    """Episodes of 5 steps; the reward of a row is its number."""
    number = np.arange(first, first + rows)
    columns = {
        "obs": np.stack([number, -number], 1).astype(np.float32), "actions": number % 3,
        "rewards": number.astype(np.float64), "terminateds": number % 10 == 4, "truncateds": number % 10 == 9,
        "eps_id": number // 5, "t": number % 5,
    }  # fmt: skip
    return rlio.SampleBatch({**columns, **more})


def test_info_of_own_data_says_where_it_comes_from(tmp_path: Path) -> None:
    pair = (Box(-1, 1, (2,)), Discrete(3))
    options: dict[str, Any] = {
        "spaces": {"default_policy": pair},
        "roll": rlio.Roll(max_rows=7),
        "provenance": Provenance(env='{"id": "Walker-v4", "kwargs": {}}', policy="random"),
    }
    for number, name in enumerate(("w1", "w2")):
        with rlio.ParquetWriter(tmp_path / "a", writer_id=name, **options) as writer:
            writer.write(steps(12 - 2 * number, weights_seq_no=np.arange(12 - 2 * number) // 3 + number))
    data = rlio.open_dataset(tmp_path / "a")
    info = data.info()
    assert (info.format, info.title, info.version, info.environments) == ("rlio", "rlio", "0", ("Walker-v4",))
    assert (info.rows, info.episodes, info.writers) == (22, 5, ("w1", "w2"))
    assert (info.terminated, info.truncated, info.unfinished) == (2, 2, 1)
    assert (info.bytes, info.files) == (data.bytes(), len(data.files()))
    assert (info.policies, info.policy_versions) == (("default_policy",), (0, 4))
    assert info.first_write is not None
    assert info.last_write is not None
    assert info.first_write <= info.last_write
    (found,) = info.spaces
    assert found.observation == "Box(-1.0, 1.0, (2,), float32)"
    assert found.action == "Discrete(3)"
    check_quantiles(info.returns, np.array([10, 35, 21, 10, 35.0]))
    text = repr(info)
    assert text.splitlines()[0] == "rlio, version 0: Walker-v4"
    assert "22 rows in 5 episodes: 2 terminated, 2 truncated, 1 unfinished" in text
    assert "2 writers, 1 policy, weights of version 0 to 4" in text
    assert len(text.splitlines()) == 10


def test_ranges_of_footers_need_no_rows_and_others_are_named_as_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlio.schemas.shard_file import ShardFile

    with rlio.ParquetWriter(tmp_path / "a", roll=rlio.Roll(max_rows=6)) as writer:
        writer.write(steps(20))
    with monkeypatch.context() as patch:
        patch.setattr(ShardFile, "read_group", lambda *_, **__: pytest.fail("rows were read"))
        info = rlio.open_dataset(tmp_path / "a").info()
    for name, most in (("rewards", 19), ("actions", 2), ("eps_id", 3)):
        assert (column(info, name).min, column(info, name).max) == (0, most)
    assert (column(info, "rewards").nan, column(info, "terminateds").range) == (0, "0 to 1")
    assert (column(info, "obs").min, column(info, "obs").nan, column(info, "obs").range) == (
        None, None, "range not read",
    )  # fmt: skip
    assert "rewards float64 0 to 19" in repr(info)
    assert "range not read: obs" in repr(info)
    read = rlio.open_dataset(tmp_path / "a").info(ranges=True)
    assert (column(read, "obs").min, column(read, "obs").max, column(read, "obs").nan) == (-19, 19, 0)
    assert "not read" not in repr(read)


def test_the_second_info_opens_no_shard_and_other_rows_are_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rlio.ParquetWriter(tmp_path / "a", writer_id="w1") as writer:
        writer.write(steps(20))
    first = rlio.open_dataset(tmp_path / "a").info()
    with monkeypatch.context() as patch:
        patch.setattr(rlio.Dataset, "open_shard", lambda *_: pytest.fail("a shard was opened"))
        assert rlio.open_dataset(tmp_path / "a").info() == first
    with rlio.ParquetWriter(tmp_path / "a", writer_id="w2") as writer:
        writer.write(steps(5, 100))
    grown = rlio.open_dataset(tmp_path / "a").info()
    assert (grown.rows, column(grown, "rewards").max) == (25, 104)
    assert not list((tmp_path / "a").rglob("*.json.tmp*"))
    for file in (tmp_path / "cache").rglob("*"):  # Files that hold something else are made again.
        if file.is_file():
            file.write_bytes(
                b'{"bounds": {"rewards": ["a", "b"]}, "environments": [], "first": 0, "last": 0}'
            )
    assert rlio.open_dataset(tmp_path / "a").info() == grown


def test_info_works_where_nothing_can_be_kept(tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path / "a") as writer:
        writer.write(steps(20))
    (tmp_path / "file").write_text("")
    data = rlio.open_dataset(tmp_path / "a")
    assert data.info(cache_folder=tmp_path / "file" / "x").rows == 20
    assert data.info(cache_folder=tmp_path / "kept", ranges=True).rows == 20
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_ranges_and_nan_are_those_of_all_values(tmp_path: Path) -> None:
    rewards = np.array([1.0, np.nan, -2.5, np.inf, 3.0, 4.0, np.nan, 0.0, 0.0, 0.0])
    obs = np.array([[np.nan, 1], [2, -7]] * 5, np.float32)
    batch = steps(10, rewards=rewards, obs={"a/b": obs, "all": np.full(10, np.nan)}, note=["x"] * 10)
    with rlio.ParquetWriter(tmp_path / "a") as writer:
        writer.write(batch)
    for ranges in (False, True):
        info = rlio.open_dataset(tmp_path / "a").info(ranges=ranges)
        assert info.returns is None  # Each episode has a NaN.
        assert info.lengths is not None
        json.dumps(info.as_dict(), allow_nan=False)
        assert column(info, "note").range == ""
        if not ranges:
            assert column(info, "rewards").nan is None
            continue
        assert (column(info, "rewards").min, column(info, "rewards").max) == (-2.5, 4)
        assert column(info, "rewards").nan == 0.2
        found = column(info, "obs/a~1b")
        assert (found.min, found.max, found.nan) == (-7, 2, 0.25)
        assert (column(info, "obs/all").min, column(info, "obs/all").nan) == (None, 1)
        assert "NaN 0.2" in column(info, "rewards").range
        assert column(info, "obs/all").range == "NaN 1"


def test_info_of_trimmed_and_compacted_data_counts_live_rows(tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path / "a", writer_id="w1", roll=rlio.Roll(max_rows=7)) as writer:
        writer.write(steps(30))
    rlio.maintenance.trim(tmp_path / "a", before={"w1": 12})
    info = rlio.open_dataset(tmp_path / "a").info()
    left = np.arange(12, 30)
    assert (info.rows, info.episodes) == (18, 4)
    check_quantiles(info.returns, np.bincount(left // 5 - 2, left.astype(float)))
    # A part of a shard is live, and its footer has the bounds of all rows.
    assert column(info, "rewards").range == "range not read"
    rlio.maintenance.compact(tmp_path / "a")
    read = rlio.open_dataset(tmp_path / "a").info(ranges=True)
    assert (column(read, "rewards").min, column(read, "rewards").max) == (12, 29)
    assert read.returns == info.returns


def test_info_of_several_agents_has_the_columns_of_each_policy(tmp_path: Path) -> None:
    def agent(policy: int) -> rlio.SampleBatch:
        batch = steps(10, 100 * policy)
        batch["eps_id"], batch["agent_index"] = np.arange(10) // 5, np.full(10, policy)
        return batch

    with rlio.ParquetWriter(tmp_path / "a") as writer:
        writer.write(rlio.MultiAgentBatch({"a": agent(0), "<b>": agent(1)}, 10))
    data = rlio.open_dataset(tmp_path / "a")
    info = data.info()
    assert (info.policies, info.episodes, info.rows) == (("<b>", "a"), 4, 20)
    found = {(one.policy, one.name): one for one in info.columns}
    assert found["a", "rewards"].range == "range not read"  # Both policies share the stored column.
    assert "2 policies" in repr(info)
    read = {(one.policy, one.name): one for one in data.info(ranges=True).columns}
    assert [(read[name, "rewards"].min, read[name, "rewards"].max) for name in ("a", "<b>")] == [
        (0, 9), (100, 109),
    ]  # fmt: skip
    check(info._repr_html_())
    json.dumps(info.as_dict(), allow_nan=False)


def test_info_of_writers_with_other_columns_and_spaces_says_so(tmp_path: Path) -> None:
    for number, name in enumerate(("w1", "w2")):
        pair = (Box(-1, 1, (2,)), Discrete(3 + number))
        more = {"speed": np.arange(10.0)} if number else {}
        with rlio.ParquetWriter(tmp_path / "a", writer_id=name, spaces={"default_policy": pair}) as writer:
            writer.write(steps(10, **more))
    info = rlio.open_dataset(tmp_path / "a").info(ranges=True)
    assert (info.rows, info.episodes, info.spaces) == (20, 4, ())
    assert "writers stored different spaces" in info.notes[0]
    assert (column(info, "speed").min, column(info, "speed").max) == (
        0,
        9,
    )  # By the footers of those with it.
    assert column(info, "obs").max == 9


def test_info_of_no_rows_and_of_one_row(tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path / "a"):
        pass
    empty = rlio.open_dataset(tmp_path / "a").info(ranges=True)
    assert (empty.rows, empty.episodes, empty.returns, empty.lengths) == (0, 0, None, None)
    assert "0 rows in 0 episodes" in repr(empty)
    json.dumps(empty.as_dict(), allow_nan=False)
    check(empty._repr_html_())
    with rlio.ParquetWriter(tmp_path / "a") as writer:
        writer.write(steps(1))
    assert "1 row in 1 episode: 0 terminated, 0 truncated, 1 unfinished" in repr(
        rlio.open_dataset(tmp_path / "a").info()
    )
    assert "1 writer\n" in repr(rlio.open_dataset(tmp_path / "a").info())


def test_a_long_info_stays_ten_lines_that_a_stranger_cannot_break(tmp_path: Path) -> None:
    evil = "<b>\n\x1b[2J" + "x" * 300
    columns = {f"column_{number}": np.arange(10.0) for number in range(15)}
    batch = steps(10, **columns, **{evil: np.arange(10)})
    with rlio.ParquetWriter(tmp_path / "a", provenance=Provenance(env=evil, policy=evil)) as writer:
        writer.write(batch)
    info = rlio.open_dataset(tmp_path / "a").info()
    lines = repr(info).splitlines()
    assert len(lines) == 10
    assert all(len(line) <= 118 and line.isprintable() for line in lines)
    assert "more; range not read: obs" in repr(info)
    check(info._repr_html_())


def test_info_of_a_damaged_shard_raises(tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path / "a") as writer:
        writer.write(steps(20))
    (file,) = (tmp_path / "a" / "data").rglob("*.parquet")
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptData):
        rlio.open_dataset(tmp_path / "a").info()


def test_infinite_returns_are_none_in_json(tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path / "a") as writer:
        writer.write(steps(10, rewards=np.append(np.ones(9), np.inf)))
    info = rlio.open_dataset(tmp_path / "a").info()
    assert info.returns is not None
    assert (info.returns.min, info.returns.max) == (5, np.inf)
    found = json.loads(json.dumps(info.as_dict(), allow_nan=False))
    assert (found["returns"]["min"], found["returns"]["max"], found["returns"]["mean"]) == (5, None, None)
    assert found["first_write"].endswith("+00:00")
    assert found["columns"][0]["shape"] == [2]
    assert "max inf" in repr(info)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1000 << 10, "1000 KiB"),
        ((1 << 20) - 1, "1024 KiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_a_size_is_no_power_of_ten(count: int, text: str) -> None:
    assert _size(count) == text


def _table(folder: Path, name: str, **renamed: str) -> Path:
    frame = pd.DataFrame(
        {
            "obs": [[float(n), 1.0] for n in range(12)],
            "actions": np.arange(12) % 2,
            "rewards": np.arange(12.0),
            "terminateds": np.arange(12) % 4 == 3,
            "eps_id": np.arange(12) // 4,
            "t": np.arange(12) % 4,
        }
    ).rename(columns=renamed)
    folder.mkdir(exist_ok=True)
    if name.endswith(".parquet"):
        frame.to_parquet(folder / name)
    else:
        frame.to_json(folder / name, orient="records", lines=True)
    return folder / name


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
@pytest.mark.parametrize("lone", [True, False])
def test_tables_that_read_takes_by_the_ending_of_their_name_are_looked_at(
    name: str, lone: bool, tmp_path: Path
) -> None:
    path = _table(tmp_path / "tables", name)
    data = rlio.open_dataset(path if lone else path.parent)
    assert (data.returns().tolist(), data.lengths().tolist()) == ([6, 22, 38], [4, 4, 4])
    assert (data.info().rows, data.info().terminated) == (12, 3)
    assert len(rlio.open_dataset([path])) == 12


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
@pytest.mark.parametrize("lone", [True, False])
def test_a_table_of_unknown_columns_is_refused_with_the_mapping_that_reads_it(
    name: str, lone: bool, tmp_path: Path
) -> None:
    """It was "no data set: _rlio.json is not there"."""
    path = _table(tmp_path / "tables", name, obs="state", rewards="reward")
    with pytest.raises(UnknownLayout) as read:
        rlio.read(path if lone else path.parent, epochs=1).sample()
    with pytest.raises(UnknownLayout, match=r"rlio\.Mapping\(columns=\{'obs': 'state'") as opened:
        rlio.open_dataset(path if lone else path.parent)
    assert str(opened.value) == str(read.value)
    for other in ("notes.txt", "config.json"):
        (tmp_path / other).write_text('{"lr": 0.1}')
        with pytest.raises(DataNotFound, match="file"):
            rlio.open_dataset(tmp_path / other)
        (tmp_path / "tables" / other).write_text('{"lr": 0.1}')
    if not lone:
        with pytest.raises(DataNotFound, match="found 'a"):
            rlio.open_dataset(path.parent)


def test_info_of_npz_reads_the_first_rows_of_wide_arrays_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlio.formats.tables import npz

    rows, whole = 8192, npz.read_array
    read: dict[str, int] = {}

    def counted(*args: Any, **options: Any) -> Any:
        found = whole(*args, **options)
        read[args[2]] = max(read.get(args[2], 0), len(found))
        return found

    columns = {
        "obs": np.arange(rows * 10.0).reshape(rows, 10), "actions": np.arange(rows) % 3,
        "rewards": np.arange(rows) % 7, "terminateds": np.arange(rows) % 64 == 63,
        "eps_id": np.arange(rows) // 64, "t": np.arange(rows) % 64,
    }  # fmt: skip
    np.savez(tmp_path / "a.npz", **columns)
    monkeypatch.setattr(npz, "read_array", counted)
    data = rlio.open_dataset(tmp_path / "a.npz")
    info = data.info()
    np.testing.assert_array_equal(data.returns(), np.bincount(columns["eps_id"], columns["rewards"]))
    assert (info.rows, info.episodes, read["rewards"]) == (rows, rows // 64, rows)
    assert read["obs"] <= rows // 8
    np.testing.assert_array_equal(data.take([0, 1500, rows - 1])["obs"], columns["obs"][[0, 1500, -1]])
    assert column(data.info(ranges=True), "obs").max == rows * 10 - 1


def test_reading_ranges_moves_a_bar_over_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlio.look import episode_index

    moved: dict[str, list[int]] = {}

    class Bar(episode_index.tqdm):  # type: ignore[type-arg,misc]  # A generic only for type checkers.
        def update(self, n: float | None = 1) -> bool | None:
            moved.setdefault(self.told, []).append(int(n or 0))
            return None

        def __init__(self, **options: Any) -> None:
            self.told = options["desc"].split()[1]
            assert (options["total"], options["delay"], options["disable"]) == (20, 1.0, None)
            super().__init__(**options)

    monkeypatch.setattr(episode_index, "tqdm", Bar)
    with rlio.ParquetWriter(tmp_path / "a", roll=rlio.Roll(max_rows=6)) as writer:
        writer.write(steps(20))
    rlio.open_dataset(tmp_path / "a").info(ranges=True)
    assert {name: sum(parts) for name, parts in moved.items()} == {"episodes": 20, "ranges": 20}
