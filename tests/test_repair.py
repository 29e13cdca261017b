"""`rlio.maintenance.repair`: what can be put right is, once; no intact row and no byte is lost by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from further import further
from stored_batches import assert_identical, files, fresh_root, put, remove, store
from test_verify import (
    DAMAGE,
    WRITER,
    bad,
    cover,
    episodes,
    flip,
    mount,
    recorded,
    served,
    shards,
    torn,
    unseal,
)

import rlio
from rlio import DatasetReader, JsonWriter, concat_samples
from rlio.catalog.listing import HoleCheck
from rlio.catalog.markers import seal
from rlio.errors import DataNotFound, OptionError, PublishError
from rlio.storage import Storage


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting between listings: memory shows at once what was put."""
    monkeypatch.setattr("rlio.catalog.listing.HOLE_CHECK", HoleCheck(seconds=0))


def rows_of(root: str) -> Any:
    """All rows that can be read, as one batch."""
    with DatasetReader(root, epochs=1, on_error="skip") as reader:
        return concat_samples(list(reader))


def everything(root: str) -> Counter[bytes]:
    return Counter(files(root, "").values())


# What is planted -> kinds of what is done about it, and what is found afterwards.
# (KEPT: nothing, since no other shard has the rows that are intact.)
KEPT = ["what was found"]
DONE: dict[str, tuple[list[str], list[str]]] = {
    "nothing": ([], []),
    "no header": (["header-written"], []),
    "a header of nonsense": (["quarantined", "header-written"], []),
    "a header with other spaces": (["quarantined", "header-written"], []),
    "no schema file": (["schema-written"], []),
    "a flipped schema file": (["quarantined", "schema-written"], []),
    "no schema file of JSON shards": ([], ["schema-file-missing"]),
    "a flipped footer": (["quarantined"], ["hole"]),
    "a flipped row group": ([], KEPT),
    "a forged row group": ([], KEPT),
    "another CRC in the name": ([], KEPT),
    "another number of rows in the name": ([], ["shard-rows"]),
    "a torn shard between others": ([], ["torn"]),
    "a torn last shard": ([], ["uploading"]),
    "a shard that is gone": ([], ["hole"]),
    "a seal before the end": ([], ["past-the-seal"]),
    "an unlike shard of the same rows": ([], ["overlap-differs"]),
    "a stray file beside shards": ([], ["stray"]),
    "a damaged line": ([], KEPT),
    "a damaged frame": ([], KEPT),
    "a malformed line": ([], KEPT),
    "a damaged provenance": ([], KEPT),
    "a renamed JSON shard": ([], KEPT),
}


@pytest.mark.few(9)
@pytest.mark.parametrize("name", DONE)
def test_damage_of_each_kind_is_repaired_as_far_as_it_can_be_and_only_once(name: str) -> None:
    kind, plant, _, live = DAMAGE[name]
    actions, left = DONE[name]
    root = recorded(kind)
    plant(root)
    before = everything(root)
    report = rlio.maintenance.repair(root)
    assert [action.kind for action in report.actions] == actions
    assert bad(report.after) == (bad(report.before) if left is KEPT else left)
    assert report.after.total.live == live
    after = everything(root)
    assert all(after[data] >= count for data, count in before.items()), "bytes that were there are gone"
    again = rlio.maintenance.repair(root)
    assert again.actions == ()
    assert everything(root) == after


def test_a_repaired_data_set_serves_the_rows_that_it_served_before_and_says_what_is_lost() -> None:
    name = "a flipped footer"
    kind, plant, _, live = DAMAGE[name]
    root = recorded(kind)
    plant(root)
    before = rows_of(root)
    report = rlio.maintenance.repair(root)
    assert_identical(rows_of(root), before)
    assert len(before) == live
    assert report.after.total.missing == 300 - live
    (hole,) = [finding for finding in report.after.findings if finding.code == "hole"]
    assert f"_quarantine/data/{WRITER}/" in hole.message
    with pytest.raises(rlio.errors.CorruptData, match="rows 1"):
        list(DatasetReader(root, epochs=1))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_what_a_damaged_shard_lacks_and_others_have_is_whole_again(kind: str) -> None:
    """The larger cover is what readers choose: it is what is damaged here."""
    root = recorded(kind)
    whole = rows_of(root)
    small = set(shards(root))
    if kind == "parquet":
        cover(root, episodes(300))
    else:
        large = recorded("json", step=1000)
        put(
            shards(large)[0].replace(large.removeprefix("memory:/"), root.removeprefix("memory:/")),
            files(large)[shards(large)[0]],
        )
    (added,) = set(shards(root)) - small
    flip(added, 5000)
    assert served(root) < 300
    report = rlio.maintenance.repair(root)
    assert [action.kind for action in report.actions] == ["quarantined"]
    assert bad(report.after) == []
    assert_identical(rows_of(root), whole)


def test_the_last_shard_of_a_writer_that_may_go_on_stays_so_that_its_loss_shows() -> None:
    root = recorded()
    flip(shards(root)[2], -60)
    report = rlio.maintenance.repair(root)
    assert report.actions == ()
    assert bad(report.after) == ["footer-crc"]
    with pytest.raises(rlio.errors.CorruptData):
        list(DatasetReader(root, epochs=1))
    seal(Storage.open(root), WRITER, 300)
    report = rlio.maintenance.repair(root)
    assert [action.kind for action in report.actions] == ["quarantined"]
    assert bad(report.after) == ["hole"]


def test_a_torn_object_whose_rows_are_elsewhere_is_moved_aside() -> None:
    root = recorded()
    path = shards(root)[1].replace("-100-", "-40-", 1)
    put(path, b"torn")
    report = rlio.maintenance.repair(root)
    assert [action.kind for action in report.actions] == ["quarantined"]
    assert report.after.findings[0].code == "quarantined"
    assert files(root, "_quarantine/data") == {
        mount(root, f"_quarantine/data/{WRITER}/{path.rsplit('/', 1)[1]}"): b"torn"
    }
    torn(root, 0)
    assert rlio.maintenance.repair(root).actions == ()


def test_a_second_object_of_the_same_name_goes_beside_the_first() -> None:
    root = recorded()
    path = shards(root)[1].replace("-100-", "-40-", 1)
    for data in (b"torn", b"again", b"torn"):
        put(path, data)
        assert len(rlio.maintenance.repair(root).actions) == 1
    assert sorted(files(root, "_quarantine/data").values()) == [b"again", b"torn"]


def test_a_damaged_shard_with_rows_of_its_own_stays_where_on_error_skip_reads_them() -> None:
    for name in ("a flipped row group", "a damaged line", "a damaged frame"):
        kind, plant, _, live = DAMAGE[name]
        root = recorded(kind)
        plant(root)
        before, rows = everything(root), rows_of(root)
        report = rlio.maintenance.repair(root)
        assert report.actions == ()
        assert bad(report.after) == bad(report.before) != []
        assert everything(root) == before
        assert_identical(rows_of(root), rows)
        assert len(rows) == live < 300
        with pytest.raises(rlio.errors.CorruptData):
            list(DatasetReader(root, epochs=1))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["parquet", "json", "zstd"])
@pytest.mark.parametrize("seed", [0, *further(*range(1, 10))])
def test_random_damage_is_repaired_once_and_no_readable_row_is_lost(kind: str, seed: int) -> None:
    rng = np.random.default_rng([seed, len(kind)])
    root = recorded(kind, rows=200, step=40)
    if kind == "parquet" and rng.integers(2):
        cover(root, episodes(100))
    if rng.integers(2):
        seal(Storage.open(root), WRITER, 200)
    for path in shards(root):
        for _ in range(rng.integers(3)):
            flip(path, int(rng.integers(len(files(root)[path]))), int(rng.integers(8)))
    before, readable = everything(root), served(root)
    report = rlio.maintenance.repair(root)
    after = everything(root)
    assert all(after[data] >= count for data, count in before.items())
    assert report.after.total.live == served(root) >= readable
    assert rlio.maintenance.repair(root).actions == ()
    rows = rows_of(root)
    assert rows["rewards"].tolist() == [float(row % 7) for row in _numbers(rows)]


def _numbers(rows: Any) -> Any:
    """Which row each one is: `episodes` numbers them in ``obs``."""
    return rows["obs"][:, 0].astype(int)


def pull_the_plug(patch: pytest.MonkeyPatch, *, after: int) -> None:
    """Let every change of a store fail, but for the first ones."""
    calls = iter(range(after))
    for operation in ("put", "remove"):
        patch.setattr(Storage, operation, _failing(getattr(Storage, operation), calls))


def _failing(call: Any, calls: Iterator[int]) -> Any:
    def operation(self: Storage, *args: Any) -> Any:
        if next(calls, None) is None:
            raise PublishError("the plug was pulled")
        return call(self, *args)

    return operation


@pytest.mark.usefixtures("stopped_clock")
@pytest.mark.parametrize("name", ["a flipped footer", *further("no schema file", "a header of nonsense")])
def test_a_repair_that_is_interrupted_anywhere_is_finished_by_the_next(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, plant, _, live = DAMAGE[name]

    def damaged() -> str:
        root = recorded(kind)
        plant(root)
        return root

    def names(root: str) -> set[str]:
        return {path.removeprefix(root.removeprefix("memory:/")) for path in files(root, "")}

    undisturbed = damaged()
    rlio.maintenance.repair(undisturbed)
    for at in range(50):
        root = damaged()
        before = everything(root)
        with monkeypatch.context() as patch:
            pull_the_plug(patch, after=at)
            try:
                rlio.maintenance.repair(root)
            except PublishError:
                assert all(everything(root)[data] >= count for data, count in before.items())
            else:
                assert at > 0
                return
        report = rlio.maintenance.repair(root)
        assert report.after.total.live == live
        assert names(root) == names(undisturbed)
    raise AssertionError("it never ended")


def test_what_is_no_data_set_of_this_format_is_not_touched() -> None:
    with pytest.raises(DataNotFound):
        rlio.maintenance.repair(fresh_root())
    root = recorded()
    put(mount(root, "_rlio.json"), b'{"format": 7}')
    before = everything(root)
    with pytest.raises(OptionError):
        rlio.maintenance.repair(root)
    assert everything(root) == before


def test_a_header_is_not_written_where_nothing_says_of_which_format_the_shards_are() -> None:
    root = recorded("json")
    remove(mount(root, "_rlio.json"))
    (schema,) = files(root, "_schema")
    remove(schema)
    assert rlio.maintenance.repair(root).actions == ()


def test_a_schema_comes_back_from_a_parquet_shard_for_json_shards_too() -> None:
    root = store(episodes(20), writer_id="w1")
    with JsonWriter(root, writer_id="w2") as writer:
        writer.write(episodes(20))
    unseal(root)
    (schema,) = files(root, "_schema")
    remove(schema)
    report = rlio.maintenance.repair(root)
    assert [action.kind for action in report.actions] == ["schema-written"]
    assert report.after.ok
    assert served(root) == 40


def test_quick_repairs_what_quick_finds() -> None:
    root = recorded()
    flip(shards(root)[1], -60)
    remove(mount(root, "_rlio.json"))
    report = rlio.maintenance.repair(root, level="quick")
    assert [action.kind for action in report.actions] == ["quarantined", "header-written"]
