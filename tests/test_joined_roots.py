"""A list of data sets is read as one: epochs, stores, ranks and states are exact; episodes stay apart."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlio
from rlio import ParquetWriter, SampleBatch
from rlio.batch import Batch
from rlio.errors import MissingColumn, OptionError, SchemaConflict, StateError
from rlio.look.episode_index import read_episodes
from rlio.source.joined import JoinedRoots
from rlio.testing import SourceTests

LENGTHS = (7, 4, 9)


def record(root: Any, *, writer: str | None = None, first: int = 0, **extra: Any) -> Any:
    """Three episodes with the ids 0, 1, 2; ``obs`` counts rows from ``first``."""
    with ParquetWriter(root, writer_id=writer) as out:
        for eps_id, length in enumerate(LENGTHS):
            rows = np.arange(first, first + length)
            out.write(
                SampleBatch(
                    obs=rows.astype(np.float32)[:, None],
                    actions=rows % 2,
                    rewards=rows.astype(np.float32),
                    terminateds=np.arange(length) == length - 1,
                    truncateds=np.zeros(length, bool),
                    eps_id=np.full(length, eps_id),
                    t=np.arange(length),
                    **{name: np.full(length, value) for name, value in extra.items()},
                )
            )
            out.flush()
            first += length
    return root


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """Their writers have one id, and their episodes equal ids."""
    return [
        record(tmp_path / name, writer="actor-0", first=100 * i) for i, name in enumerate(("a", "b", "c"))
    ]


def rows_of(reader: Any) -> list[int]:
    with reader:
        return [int(row) for batch in reader for row in batch["obs"][:, 0]]


EXPECTED = [100 * i + row for i in range(3) for row in range(sum(LENGTHS))]


class TestSource(SourceTests):
    @pytest.fixture(autouse=True)
    def _roots(self, roots: list[Path]) -> None:
        self.roots = roots

    def make_source(self) -> JoinedRoots:
        source = rlio.DatasetReader(self.roots).dataset
        assert isinstance(source, JoinedRoots)
        return source

    def expected_rows(self) -> Batch:
        return rlio.batch.concat_samples([rlio.open_dataset(root)[:] for root in self.roots])


def test_rows_come_in_the_order_of_the_list(roots: list[Path]) -> None:
    assert rows_of(rlio.read(roots, epochs=1, batch_size=8)) == EXPECTED
    assert (
        rows_of(rlio.read(roots[::-1], epochs=1, batch_size=8))
        == EXPECTED[40:] + EXPECTED[20:40] + EXPECTED[:20]
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("cache", ["none", "memory", "disk"])
def test_a_shuffled_epoch_has_each_row_of_every_root_once_and_resumes(cache: Any, roots: list[Path]) -> None:
    options: dict[str, Any] = {"epochs": 1, "batch_size": 8, "shuffle": True, "seed": 3, "cache": cache}
    whole = rows_of(rlio.read(roots, **options))
    assert sorted(whole) == EXPECTED
    with rlio.read(roots, **options) as reader:
        begun = [int(row) for _ in range(3) for row in reader.sample()["obs"][:, 0]]
        state = json.loads(json.dumps(reader.state_dict()))
    rest = rlio.read(roots, **options)
    rest.load_state_dict(state)
    assert begun + rows_of(rest) == whole
    with pytest.raises(StateError):
        rlio.read(roots[:2], **options).load_state_dict(state)


@pytest.mark.few(1)
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_share_the_rows_of_all_roots(shuffle: bool, roots: list[Path]) -> None:
    options: dict[str, Any] = {
        "epochs": 1,
        "batch_size": 4,
        "shuffle": shuffle,
        "seed": 3 if shuffle else None,
    }
    found = [rows_of(rlio.read(roots, shard=(rank, 3), **options)) for rank in range(3)]
    assert sorted(row for rows in found for row in rows) == EXPECTED


def test_episodes_of_equal_ids_in_two_roots_are_two(roots: list[Path]) -> None:
    with rlio.read(roots, draw=rlio.WholeEpisodes(), epochs=1, batch_size=1) as reader:
        assert [batch.count for batch in reader] == 3 * list(LENGTHS)
    returns = rows_of(rlio.read(roots, filter="episode_return > 1000", epochs=1, batch_size=8))
    assert returns == [*range(111, 120), *range(200, 207), *range(211, 220)]


def test_an_episode_of_a_merged_writer_does_not_go_on_in_another_root(tmp_path: Path) -> None:
    """Two roots have rows of one writer and one ``eps_id``, with steps that would follow each other."""
    for name, t in (("a", 0), ("b", 4)):
        with ParquetWriter(tmp_path / name, writer_id="actor-0") as writer:
            ends = np.array([False, False, False, t > 0])
            zeros = np.zeros(4, np.int64)
            writer.write(
                SampleBatch(
                    obs=np.zeros((4, 1), np.float32),
                    rewards=np.ones(4, np.float32),
                    terminateds=ends,
                    truncateds=zeros > 0,
                    eps_id=zeros,
                    t=t + np.arange(4),
                )
            )
        rlio.maintenance.compact(tmp_path / name, into=tmp_path / f"merged-{name}")
    for roots in (["a", "b"], ["merged-a", "merged-b"]):
        paths = [tmp_path / root for root in roots]
        for cache in ("memory", "disk"):
            options: dict[str, Any] = {"epochs": 1, "cache": cache}
            reader = rlio.read(paths, derive=["returns_to_go"], batch_size=8, **options)
            np.testing.assert_array_equal(reader.sample()["returns_to_go"], [*[np.nan] * 4, 4, 3, 2, 1])
            episodes = rlio.read(paths, draw=rlio.WholeEpisodes(), batch_size=1, **options)
            assert [batch.count for batch in episodes] == [4, 4]
        joined = rlio.DatasetReader(paths).dataset
        assert read_episodes(joined).length == [4, 4]


def test_an_archive_and_a_live_root_are_read_as_one(roots: list[Path], tmp_path: Path) -> None:
    rlio.maintenance.compact(roots[0], into=tmp_path / "archive")
    found = rlio.read([tmp_path / "archive", roots[1]], epochs=1, batch_size=8, missing="drop")
    assert rows_of(found) == EXPECTED[:40]


def test_a_row_is_on_the_side_of_the_split_that_it_has_alone(tmp_path: Path) -> None:
    """Its writer keeps its id, unless another root has a writer of that id."""
    roots = [record(tmp_path / str(i), writer=f"actor-{i}", first=100 * i) for i in range(6)]
    options: dict[str, Any] = {"split": ("train", 0.5), "epochs": 1, "batch_size": 8}
    alone = [row for root in roots for row in rows_of(rlio.read(root, **options))]
    assert 0 < len(alone) < 120
    assert rows_of(rlio.read(roots, **options)) == alone


def test_snapshots_are_a_list(tmp_path: Path) -> None:
    roots = [record(tmp_path / "a"), record(tmp_path / "b", first=100)]
    reader = rlio.DatasetReader(roots, epochs=1, batch_size=8)
    at = reader.dataset.snapshot()
    record(tmp_path / "a", first=500)
    assert len(rows_of(rlio.read(roots, epochs=1, batch_size=8))) == 60
    assert rows_of(rlio.read(roots, at=json.loads(json.dumps(at)), epochs=1, batch_size=8)) == EXPECTED[:40]
    assert len(rows_of(rlio.read(roots, at=[None, at[1]], epochs=1, batch_size=8))) == 60
    for wrong in (at[:1], at[0], [*at, None]):
        with pytest.raises(OptionError, match="expected a list with a snapshot"):
            rlio.read(roots, at=wrong)


def test_open_data_sets_stores_and_loaders_take_lists(roots: list[Path]) -> None:
    torch = pytest.importorskip("torch")
    opened = [rlio.open_dataset(roots[0]), str(roots[1]), roots[2]]
    assert rows_of(rlio.read(opened, epochs=1, batch_size=8)) == EXPECTED
    store = rlio.ReplayStore.open(opened)
    assert len(store) == 60
    with store.epochs(batch_size=8, seed=0, epochs=1) as epoch:
        assert sorted(int(row) for batch in epoch for row in batch["obs"][:, 0]) == EXPECTED
    assert len(rlio.ReplayStore.open(roots[:1])) == 20
    data = rlio.torch.ReplayDataset(roots, batch_size=8, epochs=1)
    assert torch.cat([batch["obs"] for batch in data.loader(num_workers=0)])[:, 0].int().tolist() == EXPECTED
    assert str(roots[0]) in repr(data)


def test_a_list_becomes_one_data_set_of_rlio_in_which_equal_ids_stay_apart(
    roots: list[Path], tmp_path: Path
) -> None:
    report = rlio.convert(roots, tmp_path / "both", prove=True)
    assert (report.episodes, report.rows) == (3 * len(LENGTHS), len(EXPECTED))
    data = rlio.open_dataset(tmp_path / "both")
    assert sorted(rows_of(data.read(epochs=1))) == EXPECTED
    assert sorted(data.lengths()) == sorted(3 * list(LENGTHS))


def test_a_list_is_converted_into_one_data_set(roots: list[Path], tmp_path: Path) -> None:
    rlio.convert(roots, tmp_path / "out", to="parquet")
    files = sorted((tmp_path / "out").glob("**/*.parquet"))
    with rlio.read(files, epochs=1, batch_size=60) as reader:
        batch = reader.sample()
    assert batch["obs"][:, 0].astype(int).tolist() == EXPECTED
    assert np.flatnonzero(batch["t"] == 0).tolist() == [0, 7, 11, 20, 27, 31, 40, 47, 51]


def test_roots_with_unlike_columns_need_a_rule(tmp_path: Path) -> None:
    roots = [record(tmp_path / "a"), record(tmp_path / "b", first=100, extra=1.5)]
    with pytest.raises(SchemaConflict, match="missing='drop' or missing='fill'"):
        rlio.read(roots, epochs=1)
    assert "extra" not in rlio.read(roots, epochs=1, missing="drop").sample()
    filled = rlio.read(roots, epochs=1, missing="fill", batch_size=40).sample()
    assert filled["extra"].tolist() == [0.0] * 20 + [1.5] * 20
    with pytest.raises(MissingColumn):
        rlio.read(roots, columns=["nothing"])


def test_a_list_with_a_data_set_twice_or_of_two_kinds_is_refused(roots: list[Path], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is in the list twice: pass each data set once"):
        rlio.read([roots[0], str(roots[0])])
    (tmp_path / "rows.csv").write_text("obs,rewards\n1,2\n")
    for read in (rlio.read, rlio.ReplayStore.open):
        with pytest.raises(OptionError, match="a list has one kind"):
            read([roots[0], tmp_path / "rows.csv"])
    for wrong in ([], 3, [3], [roots[0], None]):
        for read in (rlio.read, rlio.DatasetReader, rlio.ReplayStore.open):
            with pytest.raises(OptionError):
                read(wrong)
    with pytest.raises(OptionError, match="several data sets are read by"):
        rlio.open_dataset(roots)


@pytest.mark.parametrize("where", ["a link", "memory"])
def test_a_list_with_a_data_set_under_two_names_is_refused(where: str, tmp_path: Path) -> None:
    """Its rows would be served twice."""
    if where == "a link":
        names = [str(record(tmp_path / "a")), str(tmp_path / "b")]
        (tmp_path / "b").symlink_to("a")
    else:
        name = uuid.uuid4().hex
        names = [f"memory://{name}/run", f"memory:///{name}/run"]
        record(names[0])
    with pytest.raises(OptionError, match=f"{names[1]}' is in the list twice, also as '{names[0]}'"):
        rlio.read(names)


def test_damage_in_one_root_is_named_and_skipped_alone(roots: list[Path]) -> None:
    victim = sorted((roots[1] / "data" / "actor-0").glob("*.parquet"))[0]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 255
    victim.write_bytes(bytes(data))
    with pytest.raises(rlio.errors.CorruptData, match=victim.name):
        rows_of(rlio.read(roots, epochs=1, batch_size=8))
    reader = rlio.read(roots, epochs=1, batch_size=8, on_error="skip")
    assert rows_of(reader) == EXPECTED[:20] + EXPECTED[27:]
    assert reader.skipped == 7
