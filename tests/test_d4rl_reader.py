"""D4RL's HDF5 files: every row once, episodes cut where they end, and no way out of the file."""

import functools
import io
import sys
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from further import further

import rlio
from rlio.batch import SampleBatch, concat_samples
from rlio.errors import (
    CorruptData,
    DataNotFound,
    MissingColumn,
    MissingExtra,
    OptionError,
    SchemaError,
    UnknownLayout,
    UnsafeData,
)
from rlio.formats.d4rl import source as d4rl_source
from rlio.formats.files.hdf5_files import Hdf5Files
from rlio.readers.d4rl_reader import D4RLReader
from rlio.testing.readers import ReaderTests, assert_resumes

h5py = pytest.importorskip("h5py")


def datasets(rows: int, *, first: int = 0, seed: int = 0) -> dict[str, np.ndarray]:
    """Columns of a file whose rows are numbered from ``first``, with terminals and timeouts."""
    rng = np.random.default_rng(seed)
    numbers = np.arange(first, first + rows)
    terminals = rng.random(rows) < 0.1
    return {
        "observations": np.stack([numbers, -numbers], 1).astype(np.float32),
        "actions": rng.normal(size=(rows, 3)).astype(np.float32),
        "rewards": numbers.astype(np.float32),
        "terminals": terminals,
        "timeouts": ~terminals & (rng.random(rows) < 0.1),
    }


def save(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            if np.ndim(values):
                file.create_dataset(name, data=values, **options)
            else:
                file[name] = values
    return path


def read(path: Any, **options: Any) -> SampleBatch:
    with D4RLReader(path, epochs=1, **options) as reader:
        batch = concat_samples(list(reader))
    assert isinstance(batch, SampleBatch)
    return batch


def own_reading(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same rows by a plain loop."""
    done = columns["terminals"] | columns["timeouts"]
    rows = len(done)
    new_obs = np.zeros_like(columns["observations"])
    valid = np.zeros(rows, bool)
    eps_id, t = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    episode = step = 0
    for row in range(rows):
        eps_id[row], t[row] = episode, step
        if row + 1 < rows and not done[row]:
            new_obs[row], valid[row] = columns["observations"][row + 1], True
        episode, step = (episode + 1, 0) if done[row] else (episode, step + 1)
    return {
        "obs": columns["observations"],
        "actions": columns["actions"],
        "rewards": columns["rewards"],
        "terminateds": columns["terminals"],
        "truncateds": columns["timeouts"],
        "new_obs": new_obs,
        "new_obs_valid": valid,
        "eps_id": eps_id,
        "t": t,
    }


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of 16 rows, so that small files have many."""
    monkeypatch.setattr(d4rl_source, "_MIN_GROUP_ROWS", 16)


def assert_columns(batch: SampleBatch, expected: dict[str, np.ndarray]) -> None:
    assert set(batch) == set(expected)
    for name, values in expected.items():
        assert batch[name].dtype == values.dtype, name
        np.testing.assert_array_equal(batch[name], values, err_msg=name)


@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "shuffle": True, "chunks": True}])
def test_every_row_comes_once_with_its_successor_within_the_episode(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    columns = datasets(203)
    path = tmp_path / "a.hdf5"
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file.create_dataset(name, data=values, **options)
    batch = read(path)
    assert_columns(batch, own_reading(columns))
    assert not (batch["terminateds"] & batch["truncateds"]).any()
    assert batch["new_obs_valid"].sum() < 203 - batch["terminateds"].sum()


def test_next_observations_of_the_file_are_used_where_it_has_them(tmp_path: Path) -> None:
    columns = datasets(50)
    columns["next_observations"] = columns["observations"] + 0.5
    batch = read(save(tmp_path / "a.hdf5", columns))
    np.testing.assert_array_equal(batch["new_obs"], columns["next_observations"])
    assert "new_obs_valid" not in batch


def test_one_number_a_row_may_be_a_column_of_the_file(tmp_path: Path) -> None:
    columns = datasets(40)
    expected = own_reading(columns)
    columns["rewards"] = columns["rewards"][:, None]
    columns["terminals"] = columns["terminals"][:, None].astype(np.uint8)
    columns["timeouts"] = columns["timeouts"].astype(np.float32)
    assert_columns(read(save(tmp_path / "a.hdf5", columns)), expected)


def test_other_datasets_keep_their_names_and_metadata_is_left_out(tmp_path: Path) -> None:
    columns: dict[str, Any] = datasets(40)
    extra = {
        "infos/action_log_probs": np.linspace(-1, 0, 40, dtype=np.float32),
        "infos/qpos": np.ones((40, 5)),
        "metadata/policy/weight": np.ones((3, 3)),
        "metadata/algorithm": "SAC",
        "weird": np.ones(7),
    }
    batch = read(save(tmp_path / "a.hdf5", columns | extra))
    np.testing.assert_array_equal(batch["action_logp"], extra["infos/action_log_probs"])
    assert batch["infos/qpos"].shape == (40, 5)
    assert set(batch) - set(own_reading(columns)) == {"action_logp", "infos/qpos"}


@pytest.mark.parametrize("cache", ["none", "memory"])
def test_a_dataset_below_infos_is_read_by_its_path(tmp_path: Path, cache: Any) -> None:
    """The name was taken for a part of a column infos, and the dataset was left out without a word."""
    path = save(tmp_path / "a.hdf5", datasets(40) | {"infos/qpos": np.arange(80.0).reshape(40, 2)})
    for columns in (["infos/qpos", "rewards"], ["infos/qpos"]):
        batch = read(path, columns=columns, cache=cache)
        assert set(batch) == set(columns)
        np.testing.assert_array_equal(batch["infos/qpos"], np.arange(80.0).reshape(40, 2))


def test_a_long_episode_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = datasets(200) | {"terminals": np.arange(200) == 199, "timeouts": np.zeros(200, bool)}
    path = save(tmp_path / "a.hdf5", columns)
    rows: list[int] = []
    real = Hdf5Files.read

    def counted(files: Hdf5Files, dataset: Any, first: int, stop: int) -> Any:
        rows.append(stop - first)
        return real(files, dataset, first, stop)

    with D4RLReader(path, epochs=1, cache="memory", draw=rlio.NStep(3, gamma=1.0), batch_size=200) as reader:
        expected = reader.sample()
    with D4RLReader(path, epochs=1) as reader:
        monkeypatch.setattr(Hdf5Files, "read", counted)
        batch = concat_samples(list(reader))
    assert max(rows) == 17  # One more observation, the next one of the last row.
    assert isinstance(batch, SampleBatch)
    assert_columns(batch, own_reading(columns))
    assert isinstance(expected, SampleBatch)
    np.testing.assert_allclose(expected["rewards"][:198], 3.0 * np.arange(1, 199))


def test_episodes_are_numbered_through_all_files(tmp_path: Path) -> None:
    first, second = datasets(60), datasets(45, first=60, seed=1)
    save(tmp_path / "a.hdf5", first)
    save(tmp_path / "b.h5", second)
    batch = read(tmp_path)
    one, two = own_reading(first), own_reading(second)
    assert batch["rewards"].tolist() == list(range(105))
    np.testing.assert_array_equal(batch["t"], np.concatenate([one["t"], two["t"]]))
    starts = np.flatnonzero(np.concatenate([one["t"], two["t"]]) == 0)
    np.testing.assert_array_equal(batch["eps_id"], np.searchsorted(starts, np.arange(105), "right") - 1)


def test_numbered_groups_of_very_large_files_are_read_in_their_order(tmp_path: Path) -> None:
    parts = {number: datasets(20, first=20 * number, seed=number) for number in range(11)}
    save(
        tmp_path / "a.hdf5",
        {f"virtual/{number}/{name}": v for number, part in parts.items() for name, v in part.items()},
    )
    assert read(tmp_path / "a.hdf5")["rewards"].tolist() == list(range(220))


@pytest.mark.few(2)
@pytest.mark.parametrize("steps", [1, 7, 20, 1000])
def test_a_time_limit_truncates_files_without_timeouts(steps: int, tmp_path: Path) -> None:
    columns = datasets(150)
    del columns["timeouts"]
    path = save(tmp_path / "a.hdf5", columns)
    assert "truncateds" not in read(path)
    batch = read(path, max_episode_steps=steps)
    t, terminals, truncateds = 0, columns["terminals"], np.zeros(150, bool)
    for row in range(150):
        truncateds[row] = t + 1 == steps and not terminals[row]
        t = 0 if terminals[row] or truncateds[row] else t + 1
    assert_columns(batch, own_reading(columns | {"timeouts": truncateds}))


def test_episodes_that_cannot_be_told_apart_are_warned_of_once(tmp_path: Path, caplog: Any) -> None:
    columns = datasets(20)
    for option, known in (
        ({}, {"timeouts": columns["timeouts"]}),
        ({}, {"next_observations": columns["observations"]}),
        ({"max_episode_steps": 10}, {}),
        ({}, {}),
    ):
        save(tmp_path / "a.hdf5", {name: columns[name] for name in columns if name != "timeouts"} | known)
        save(tmp_path / "b.hdf5", {name: columns[name] for name in columns if name != "timeouts"} | known)
        caplog.clear()
        D4RLReader(tmp_path, **option).close()
        warnings = [record for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == (not known and not option), option


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_episodes_that_only_next_observations_tell_apart_are_refused(tmp_path: Path, on_error: Any) -> None:
    """As in dumps of `d4rl.qlearning_dataset`, which leaves out the rows of timeouts."""
    columns = datasets(60)
    columns["next_observations"] = columns["observations"] + np.float32([1, -1])
    cut = np.flatnonzero(columns["timeouts"])
    columns["next_observations"][columns["timeouts"] | columns["terminals"]] += 0.5
    timeouts = columns.pop("timeouts")
    path = save(tmp_path / "a.hdf5", columns)
    with pytest.raises(UnknownLayout, match=f"row {cut[0]} is not the observation of row {cut[0] + 1}"):
        D4RLReader(path, on_error=on_error)
    assert len(read(path, max_episode_steps=100)) == 60
    save(path, columns | {"timeouts": timeouts})
    own = own_reading(columns | {"timeouts": timeouts})
    np.testing.assert_array_equal(read(path)["eps_id"], own["eps_id"])
    np.savez(tmp_path / "a.npz", **columns)
    with pytest.raises(SchemaError, match=f"new_obs of row {cut[0]} is not the obs"):
        rlio.read(tmp_path / "a.npz")


def test_a_time_limit_for_a_file_with_timeouts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="timeouts"):
        D4RLReader(save(tmp_path / "a.hdf5", datasets(20)), max_episode_steps=5)
    with pytest.raises(OptionError, match="at least 1"):
        D4RLReader(tmp_path / "a.hdf5", max_episode_steps=0)


def test_shuffled_rows_come_from_many_places_and_each_comes_once(tmp_path: Path) -> None:
    path = save(tmp_path / "a.hdf5", datasets(1000))
    with D4RLReader(path, epochs=2, batch_size=50, shuffle=True, seed=0) as reader:
        batches = [batch["rewards"].astype(int) for batch in reader]
    epochs = [np.concatenate(batches[:20]), np.concatenate(batches[20:])]
    assert all(sorted(epoch) == list(range(1000)) for epoch in epochs)
    assert (epochs[0] != epochs[1]).any()
    assert np.ptp(batches[0]) > 500
    assert len(np.unique(batches[0] // 16)) > 25


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world", [1, 3, *further(2, 7)])
@pytest.mark.each_value_once
def test_ranks_get_each_row_once_and_even_shares(world: int, shuffle: bool, tmp_path: Path) -> None:
    path = save(tmp_path / "a.hdf5", datasets(205))
    found = []
    for rank in range(world):
        with D4RLReader(path, epochs=1, shard=(rank, world), shuffle=shuffle, seed=4) as reader:
            found.append(np.concatenate([batch["rewards"] for batch in reader]))
    assert sorted(np.concatenate(found)) == list(range(205))
    groups = 1 if shuffle else -(-205 // 16)
    assert max(map(len, found)) - min(map(len, found)) <= groups


@pytest.mark.parametrize(
    ("n", "shuffle", "shard"),
    [
        (7, True, (0, 1)),
        *further((None, False, (0, 1)), (40, False, (2, 3)), (7, False, (0, 1)), (None, True, (2, 3))),
    ],
)
def test_it_resumes_across_epochs(
    n: int | None, shuffle: bool, shard: tuple[int, int], tmp_path: Path
) -> None:
    save(tmp_path / "a.hdf5", datasets(70))
    save(tmp_path / "b.hdf5", datasets(30, first=70))
    assert_resumes(
        functools.partial(D4RLReader, tmp_path, shuffle=shuffle, seed=3, shard=shard), n=n, batches=9
    )


class D4RLReaderSuite(ReaderTests):
    options: ClassVar[dict[str, Any]] = {"epochs": 1}

    @pytest.fixture(autouse=True)
    def _files(self, tmp_path: Path) -> None:
        self.columns = datasets(61)
        self.path = save(tmp_path / "a.hdf5", self.columns)

    def make_reader(self) -> D4RLReader:
        return D4RLReader(self.path, **self.options)

    def expected_rows(self) -> SampleBatch:
        return SampleBatch(own_reading(self.columns))


@pytest.mark.further
class TestInOrder(D4RLReaderSuite):
    pass


@pytest.mark.further  # The engine shuffles any source: test_dataset_reader, test_every_option.
class TestShuffled(D4RLReaderSuite):
    ordered = False
    options: ClassVar[dict[str, Any]] = {"epochs": 1, "shuffle": True, "seed": 1, "batch_size": 10}


def test_columns_chooses_what_is_read(tmp_path: Path) -> None:
    path = save(tmp_path / "a.hdf5", datasets(40))
    assert set(read(path, columns=["rewards", "t"])) == {"rewards", "t"}
    assert set(read(path, columns=["t"])) == {"t"}
    assert set(read(path, columns=["new_obs"])) == {"new_obs", "new_obs_valid"}
    with pytest.raises(MissingColumn, match=r"a\.hdf5, column advantages"):
        D4RLReader(path, columns=["advantages"])


def test_files_on_other_filesystems_are_read(tmp_path: Path) -> None:
    path = save(tmp_path / "a.hdf5", datasets(40), compression="gzip")
    fsspec.filesystem("memory").pipe_file("/d4rl/a.hdf5", path.read_bytes())
    assert read("memory://d4rl").equals(read(path))


# ---- bad files ----


def test_bytes_that_are_no_hdf5_are_named(tmp_path: Path) -> None:
    good = save(tmp_path / "b.hdf5", datasets(100))
    for data in (b"", b"not HDF5 at all" * 100, good.read_bytes()[:3000]):
        (tmp_path / "a.hdf5").write_bytes(data)
        with pytest.raises(CorruptData, match=r"a\.hdf5"):
            D4RLReader(tmp_path)
        with D4RLReader(tmp_path, on_error="skip", epochs=1) as reader:
            assert sum(map(len, reader)) == 100
            assert reader.skipped == 1


def test_a_damaged_chunk_is_named_and_costs_only_the_episodes_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(d4rl_source, "_MIN_GROUP_ROWS", 100)
    path = tmp_path / "a.hdf5"
    columns = datasets(160)
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file.create_dataset(name, data=values, chunks=(16, *values.shape[1:]), fletcher32=True)
        where = file["actions"].id.get_chunk_info(3).byte_offset
    data = bytearray(path.read_bytes())
    data[where + 5] ^= 255
    path.write_bytes(data)
    eps_id = own_reading(columns)["eps_id"]
    lost = set(eps_id[48:64].tolist())
    good = np.flatnonzero(~np.isin(eps_id, [*lost])).tolist()
    assert 3 < len(lost) < 12
    with pytest.raises(CorruptData, match=r"a\.hdf5, record \d+\]"):
        read(path)
    for options in ({}, {"shuffle": True, "seed": 0, "cache": "none"}, {"cache": "memory"}):
        with D4RLReader(path, on_error="skip", epochs=2, **options) as reader:
            rows = np.concatenate([batch["rewards"] for batch in reader])
            assert sorted(rows) == sorted(good * 2)
            assert {error.record for error in reader.errors} == lost
            assert reader.skipped == len(lost)


def test_files_in_another_layout_say_what_they_hold(tmp_path: Path) -> None:
    save(tmp_path / "a.hdf5", {"runs/0/actions": np.zeros((3, 2))})
    with pytest.raises(UnknownLayout, match=r"has observations.*found runs/0/actions \(float64 \(3, 2\)\)"):
        D4RLReader(tmp_path)
    columns = datasets(20)
    with pytest.raises(SchemaError, match=r"19 rows.*20.*column rewards"):
        D4RLReader(save(tmp_path / "a.hdf5", columns | {"rewards": np.zeros(19)}))
    with pytest.raises(SchemaError, match=r"one number a row.*column rewards"):
        D4RLReader(save(tmp_path / "a.hdf5", columns | {"rewards": np.zeros((20, 2))}))
    with pytest.raises(SchemaError, match=r"flags.*a\.hdf5.*column terminateds"):
        D4RLReader(save(tmp_path / "a.hdf5", columns | {"terminals": np.full(20, 3)}))


def test_a_file_unlike_the_first_names_the_column(tmp_path: Path) -> None:
    save(tmp_path / "a.hdf5", datasets(20))
    save(tmp_path / "b.hdf5", datasets(20) | {"actions": np.zeros((20, 4), np.float32)})
    with pytest.raises(SchemaError, match=r"shape \(4,\).*first.*\(3,\).*b\.hdf5, column actions"):
        D4RLReader(tmp_path)
    save(tmp_path / "b.hdf5", datasets(20) | {"rewards": np.zeros(20, np.int8)})
    with pytest.raises(SchemaError, match=r"int8.*first.*float.*b\.hdf5, column rewards"):
        D4RLReader(tmp_path)


def test_files_that_differ_are_refused_at_opening_also_where_columns_are_brought_together(
    tmp_path: Path,
) -> None:
    save(tmp_path / "a.hdf5", datasets(20))
    save(tmp_path / "b.hdf5", datasets(20) | {"actions": np.zeros((20, 4), np.float32)})
    with pytest.raises(SchemaError, match=r"shape \(4,\).*b\.hdf5, column actions"):
        D4RLReader(tmp_path, columns="fill")


def test_a_misspelt_column_is_not_damage(tmp_path: Path) -> None:
    save(tmp_path / "a.hdf5", datasets(20))
    with pytest.raises(MissingColumn, match=r"column rewrds"):
        D4RLReader(tmp_path, columns=["rewrds"], on_error="skip")


def test_datasets_that_are_not_requested_do_not_matter(tmp_path: Path) -> None:
    path = save(tmp_path / "a.hdf5", datasets(20) | {"dones": np.zeros(20, bool), "seq_lens": np.ones(20)})
    assert set(read(path, columns=["obs"])) == {"obs"}


def test_a_refused_file_decides_nothing_for_the_others(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for number, width in enumerate((3, 4)):
            for name, values in (datasets(20) | {"actions": np.zeros((20, width), np.float32)}).items():
                file[f"virtual/{number}/{name}"] = values
    save(tmp_path / "b.hdf5", datasets(20) | {"actions": np.zeros((20, 4), np.float32)})
    batch = read(tmp_path, on_error="skip")
    assert batch["actions"].shape == (20, 4)


@pytest.mark.parametrize("columns", ["intersect", "fill"])
def test_groups_of_files_with_different_columns_have_the_sizes_of_the_columns_read(
    columns: str, tmp_path: Path
) -> None:
    save(tmp_path / "a.hdf5", datasets(16))
    save(tmp_path / "b.hdf5", datasets(16) | {"infos/wide": np.zeros((16, 100))})
    with D4RLReader(tmp_path, columns=columns, epochs=1) as reader:
        assert {len(batch) for batch in reader} == {32}
        assert reader.source.row_bytes == sum(
            column[:1].nbytes for column in read(tmp_path, columns=columns).values()
        )


def test_files_without_rows_raise(tmp_path: Path) -> None:
    save(tmp_path / "a.hdf5", {name: values[:0] for name, values in datasets(5).items()})
    with pytest.raises(DataNotFound, match="no row"):
        D4RLReader(tmp_path)
    with pytest.raises(DataNotFound):
        D4RLReader(tmp_path / "*.h5")


@pytest.mark.parametrize("kind", ["external link", "soft link", "virtual", "external storage"])
def test_nothing_outside_of_the_file_is_read(kind: str, tmp_path: Path) -> None:
    secret = save(tmp_path / "secret.h5", {"rewards": np.arange(20, dtype=np.float32)})
    (tmp_path / "secret.bin").write_bytes(np.arange(20, dtype=np.float32).tobytes())
    columns = datasets(20)
    del columns["rewards"]
    path = save(tmp_path / "a.hdf5", columns)
    with h5py.File(path, "a") as file:
        if kind == "external link":
            file["rewards"] = h5py.ExternalLink(str(secret), "rewards")
        elif kind == "soft link":
            file["metadata/way"] = h5py.ExternalLink(str(secret), "/")
            file["rewards"] = h5py.SoftLink("/metadata/way/rewards")
        elif kind == "virtual":
            layout = h5py.VirtualLayout((20,), np.float32)
            layout[:] = h5py.VirtualSource(str(secret), "rewards", (20,))
            file.create_virtual_dataset("rewards", layout)
        else:
            file.create_dataset(
                "rewards", (20,), np.float32, external=[(str(tmp_path / "secret.bin"), 0, 80)]
            )
    with pytest.raises(UnsafeData, match=r"rewards.*a\.hdf5"):
        D4RLReader(path)


def test_a_compression_plug_in_is_not_loaded(tmp_path: Path) -> None:
    columns = datasets(20)
    path = save(tmp_path / "a.hdf5", {name: v for name, v in columns.items() if name != "rewards"})
    with h5py.File(path, "a") as file:
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plan.set_chunk((20,))
        plan.set_filter(307, h5py.h5z.FLAG_OPTIONAL)  # bzip2, which h5py does not have
        space = h5py.h5s.create_simple((20,))
        h5py.h5d.create(file.id, b"rewards", h5py.h5t.IEEE_F32LE, space, plan)
    with pytest.raises(UnsafeData, match=r"plug-ins \[307\]"):
        D4RLReader(path)


def test_rows_too_large_for_memory_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.hdf5", datasets(20))
    with h5py.File(path, "a") as file:
        file.create_dataset("huge", (20, 1 << 30), np.float64, chunks=(1, 1 << 20), compression="gzip")
    with pytest.raises(UnsafeData, match="too large"):
        D4RLReader(path)


def test_without_h5py_the_error_holds_the_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a.hdf5", datasets(5))
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingExtra, match=r"rlio\[hdf5\]"):
        D4RLReader(path)


def test_closing_closes_the_files(tmp_path: Path) -> None:
    save(tmp_path / "a.hdf5", datasets(40))
    reader = D4RLReader(tmp_path)
    reader.sample()
    (opened,) = reader.source._handles._open
    assert opened.datasets
    reader.close()
    assert not opened.file
    assert not opened.datasets
    assert opened.stream.closed
    assert isinstance(opened.stream, io.BufferedReader)


def test_datasets_stay_open_while_what_they_cache_is_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group of rows opened each dataset again, which took longer than reading the rows."""
    opened: list[str] = []
    real = h5py.Group.__getitem__

    def counted(self: Any, name: Any) -> Any:
        opened.append(name)
        return real(self, name)

    save(tmp_path / "a.hdf5", datasets(40))
    with h5py.File(tmp_path / "b.hdf5", "w") as file:
        for name, values in datasets(40).items():
            file.create_dataset(name, data=values, chunks=(4, *values.shape[1:]))
    monkeypatch.setattr(d4rl_source, "_MIN_GROUP_ROWS", 4)
    monkeypatch.setattr(h5py.Group, "__getitem__", counted)
    found = {}
    for name, most in (("a", 0), ("b", 1 << 20), ("b", 1)):
        monkeypatch.setattr("rlio.formats.files.hdf5_files._CACHE_BYTES", most)
        options: Any = {"epochs": 1, "shuffle": False, "cache": "none", "columns": ["actions", "rewards"]}
        with D4RLReader(tmp_path / f"{name}.hdf5", **options) as reader:
            opened.clear()
            assert sum(map(len, reader)) == 40
        found[name, most] = opened.count("/rewards")
    assert found["a", 0] <= 1
    assert found["b", 1 << 20] <= 1
    assert found["b", 1] >= 5


def test_the_last_part_of_a_long_episode_is_read_right_beside_short_ones(tmp_path: Path) -> None:
    """It was read with them as if it were the first part."""
    lengths = [5000, 2, 3]
    steps = np.arange(sum(lengths))
    save(
        tmp_path / "a.hdf5",
        {
            "observations": steps[:, None] + np.zeros((1, 2)),
            "actions": np.zeros((len(steps), 1)),
            "rewards": steps.astype(float),
            "terminals": np.isin(steps + 1, np.cumsum(lengths)),
            "timeouts": np.zeros(len(steps), np.bool_),
        },
    )
    with D4RLReader(tmp_path / "a.hdf5", epochs=1, shuffle=False, cache="none") as reader:
        found = concat_samples(list(reader))
    np.testing.assert_array_equal(found["rewards"], steps)
    np.testing.assert_array_equal(found["obs"][:, 0], steps)
    np.testing.assert_array_equal(found["t"], np.concatenate([np.arange(n) for n in lengths]))


# ---- values that are not stored ----


def unfilled(path: Path, *, chunks: tuple[int, ...] | None, rows: int) -> None:
    """D4RL's names; of the observations, which have no fill value, so many of six rows are written."""
    with h5py.File(path, "w") as file:
        low = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        low.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        if chunks is not None:
            low.set_chunk(chunks)
        space = h5py.h5s.create_simple((6, 3))
        h5py.h5d.create(file.id, b"observations", h5py.h5t.NATIVE_FLOAT, space, low)
        if rows:
            file["observations"][:rows] = 1.0
        file["actions"], file["rewards"] = np.ones((6, 1), np.float32), np.ones(6, np.float32)
        file["terminals"], file["timeouts"] = np.zeros(6, bool), np.arange(6) == 5


@pytest.mark.parametrize(("chunks", "rows"), [((2, 3), 4), ((2, 3), 0), (None, 0)])
def test_rows_that_are_neither_stored_nor_filled_are_refused(
    chunks: tuple[int, ...] | None, rows: int, tmp_path: Path
) -> None:
    """HDF5 gives what was in memory before."""
    unfilled(tmp_path / "a.hdf5", chunks=chunks, rows=6)
    with rlio.read(tmp_path / "a.hdf5", epochs=1) as reader:
        assert (reader.sample()["obs"] == 1).all()
    unfilled(tmp_path / "b.hdf5", chunks=chunks, rows=rows)
    with pytest.raises(CorruptData, match=r"observations.*not stored, and no value to fill them"):
        rlio.read(tmp_path / "b.hdf5", epochs=1)


def tree_of_chunks(data: bytearray) -> int:
    """Where the first key of the tree of the chunks is; it begins with the bytes of a chunk."""
    found = data.index(b"TREE\x01") + 24
    assert data[found : found + 4] == (24).to_bytes(4, "little")
    return found


@pytest.mark.parametrize("sizes", [(0, 24, 24), (12, 36, 24), (48, 24, None)])
def test_a_chunk_that_says_it_has_other_bytes_is_refused(
    sizes: tuple[int | None, ...], tmp_path: Path
) -> None:
    """HDF5 gives what was in memory before, also if other chunks say that they have the missing bytes."""
    path = tmp_path / "a.hdf5"
    stored = sum(size is not None for size in sizes)
    with h5py.File(path, "w") as file:
        file.create_dataset("observations", (6, 3), np.float32, chunks=(2, 3))
        file["observations"][: 2 * stored] = 1
        file["actions"], file["rewards"] = np.ones((6, 1), np.float32), np.ones(6, np.float32)
        file["terminals"], file["timeouts"] = np.zeros(6, bool), np.arange(6) == 5
    data = bytearray(path.read_bytes())
    first = tree_of_chunks(data)
    for chunk, size in enumerate(sizes[:stored]):
        place = first + 40 * chunk  # A key of two dimensions, and the place of the chunk.
        data[place : place + 4] = (size or 0).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(CorruptData, match=r"observations.*has chunks of \d+ to \d+ bytes, expected 24"):
        rlio.read(path, epochs=1)
