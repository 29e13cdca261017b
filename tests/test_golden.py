"""Files of earlier versions of the format read as they were written, alone and beside new ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from further import further
from golden_data import DATA_SETS
from stored_batches import assert_identical, load

import rlio
from rlio.batch.nested import leaves
from rlio.batch.picture_codecs import decode_column
from rlio.errors import SchemaError
from rlio.maintenance.compact import compact
from rlio.maintenance.gc import gc
from rlio.maintenance.repair import repair
from rlio.maintenance.trim import trim
from rlio.maintenance.verify import verify
from rlio.writers.recovery import recover

GOLDEN = Path(__file__).with_name("golden")
#: Those whose physical column of ``new_obs`` has that name, and whose infos are JSON; and the present one.
BEFORE, WITH_JSON, PRESENT = "format-0-new_obs", "format-0", "format-0-infos"
#: Data sets that a version does not have.
LATER = {BEFORE: ("parts", "times", "dates"), WITH_JSON: ("dates",), PRESENT: ()}
ROOTS = sorted(root.parent for root in GOLDEN.glob("*/data/*/_rlio.json"))
LOGS = sorted(root.parent for root in GOLDEN.glob("*/logs/*/_rlio.json"))


def test_every_version_has_every_data_set() -> None:
    named = {f"{name}.{kind}" for name in DATA_SETS for kind in ("parquet", "jsonl")}
    assert {(root.parts[-3], root.name) for root in ROOTS} == {
        (version, name)
        for version in (BEFORE, WITH_JSON, PRESENT)
        for name in named
        if not name.startswith(LATER[version])
    }
    assert {root.name for root in LOGS} == {"agents", "cartpole_like", "frames"}


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: f"{root.parts[-3]}-{root.name}")
def test_golden_files_read_equal_to_the_rows_that_made_them(root: Path) -> None:
    expected = DATA_SETS[root.stem]()
    with rlio.DatasetReader(root, epochs=1, batch_size=1000) as reader:
        (batch,) = reader
    assert batch.equals(decoded_pictures(expected))
    assert verify(root).ok


def decoded_pictures(batch: Any) -> Any:
    """A batch with the frames of its encoded pictures."""
    if isinstance(batch, rlio.MultiAgentBatch) or "camera" not in batch:
        return batch
    made = batch[:]
    made["camera"] = decode_column(batch["camera"])
    return made


def test_golden_spaces_are_kept() -> None:
    data = rlio.open_dataset(GOLDEN / PRESENT / "data" / "cartpole_like.parquet")
    (schema,) = data.schemas.values()
    assert schema.policies["default_policy"].spaces["action"]["type"] == "Discrete"


def test_the_present_version_writes_the_golden_schemas(tmp_path: Path) -> None:
    """So that the files under `format-0-infos` are those of the present version."""
    for name, make in DATA_SETS.items():
        spaces = None
        for root in (GOLDEN / PRESENT / "data").glob(f"{name}.*"):
            (golden,) = rlio.open_dataset(root).schemas.values()
            given = {pid: policy.spaces for pid, policy in golden.policies.items() if policy.spaces}
            spaces = given or spaces
            keys = True if root.suffix == ".parquet" else None
            made = rlio.schemas.schema.Schema.of(make(), spaces=spaces, stored=golden.stored, info_keys=keys)
            assert made.text == golden.text


@pytest.mark.few(3)
@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.name)
def test_logs_of_writers_of_the_version_before_are_recovered(log: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(log, root)
    (found,) = recover(root, all_hosts=True).logs
    assert (found.outcome, found.lost_rows, found.error) == ("recovered", 0, None)
    assert load(str(root), batch_size=1000).equals(DATA_SETS[log.name]())
    assert verify(root).ok


def _write_as_before(root: Path, batches: list[Any], **options: Any) -> None:
    """Write shards of the version before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlio.schemas.schema.STORED_NEXT_OBS", "new_obs")
        patch.setattr("rlio.writers.parquet_encoder.ParquetEncoder.has_info_keys", False)
        _write(root, batches, **options)


def _write(root: Path, batches: list[Any], **options: Any) -> None:
    with rlio.ParquetWriter(root, **options) as writer:
        for batch in batches:
            writer.write(batch)
            writer.flush()


def _names(root: Path) -> list[list[str]]:
    """Of each schema of a root, the physical names of new_obs."""
    return sorted(
        sorted({leaf.physical for policy in schema.policies.values() for leaf in policy.columns["new_obs"]})
        for schema in rlio.open_dataset(root).schemas.values()
    )


@pytest.fixture(params=["cartpole_like", "frames", *further("agents")])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[Any]]:
    """A root with four shards of the version before and four of the present one; and their rows."""
    batches = [DATA_SETS[request.param]() for _ in range(4)]
    for number, batch in enumerate(batches):
        for part in batch.policy_batches.values() if isinstance(batch, rlio.MultiAgentBatch) else [batch]:
            part["eps_id"] = part["eps_id"] + 50_000 * number
    root = tmp_path / "root"
    _write_as_before(root, batches, writer_id="w00000-00000000")
    _write(root, batches, writer_id="w00001-00000000")
    (golden,) = rlio.open_dataset(GOLDEN / BEFORE / "data" / f"{request.param}.parquet").schemas.values()
    stored = {frozenset(schema.columns) for schema in rlio.open_dataset(root).schemas.values()}
    assert len(stored) == 2
    assert frozenset(golden.columns) in stored
    return root, batches * 2


@pytest.mark.few(1)
def test_shards_of_both_versions_in_one_root_are_read_by_all_readers(both: tuple[Path, list[Any]]) -> None:
    root, batches = both
    expected = rlio.concat_samples(batches)
    assert_identical(load(str(root), batch_size=37), expected)
    data = rlio.open_dataset(root)
    assert len(data) == expected.agent_steps()
    whole = load(str(root))
    for options in ({"cache": "memory"}, {"cache": "disk"}, {"cache": "disk"}, {"cache": "none"}):
        assert_identical(load(str(root), batch_size=1000, **options), whole)
    with rlio.FollowReader(root, idle_timeout=0) as following:
        assert_identical(rlio.concat_samples(list(following)), expected)
    for policy, columns in data.columns.items():
        own = expected[policy] if isinstance(expected, rlio.MultiAgentBatch) else expected
        table = data.to_arrow(policy=policy)
        assert table["eps_id"].to_pylist() == own["eps_id"].tolist()
        for path, values in leaves(own["new_obs"]):
            assert table["/".join(("new_obs", *path))].to_pylist() == values.tolist()
        with rlio.DatasetReader(root, epochs=1, policy=policy, cache="memory", shuffle=False) as reader:
            found = rlio.concat_samples(list(reader))
        if isinstance(found, rlio.MultiAgentBatch):
            found = found[policy]
        assert set(found) == set(columns)
        assert found["eps_id"].tolist() == own["eps_id"].tolist()


@pytest.mark.few(1)
def test_stores_of_both_versions_have_one_name_for_new_obs(both: tuple[Path, list[Any]]) -> None:
    """The name is a part of what a cached store is found by."""
    root, _ = both
    with rlio.ReplayStore.open(root) as store:
        names = {
            leaf.physical.split("@")[0].split("/")[0]
            for table in store._rows.tables.values()
            for leaf in table.leaves
            if leaf.column == "new_obs"
        }
    assert names == {"new_obs"}


def test_a_live_store_that_was_saved_by_the_version_before_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = DATA_SETS["cartpole_like"]()
    with monkeypatch.context() as patch:
        patch.setattr("rlio.schemas.schema.STORED_NEXT_OBS", "new_obs")
        with rlio.ReplayStore(capacity=100) as store:
            store.append(batch)
            store.save(tmp_path / "saved")
    with rlio.ReplayStore.load(tmp_path / "saved") as store:
        later = batch[:40]
        later["eps_id"] = later["eps_id"] + 100
        store.append(later)
        with store.uniform(batch_size=500, seed=0) as sampler:
            found = sampler.sample()
    both = rlio.concat_samples([batch, later])
    row_of = {
        key: row for row, key in enumerate(zip(both["eps_id"].tolist(), both["t"].tolist(), strict=True))
    }
    rows = [row_of[key] for key in zip(found["eps_id"].tolist(), found["t"].tolist(), strict=True)]
    assert len(set(rows)) > 80
    assert_identical(found, both[np.array(rows)])


def test_a_column_of_a_user_that_was_called_new_obs_in_private_before_stays_itself(tmp_path: Path) -> None:
    """Since then it is the physical name of another column, and refused."""
    own = rlio.SampleBatch(obs=[1.0, 2.0], new_obs=[2.0, 3.0], _new_obs=[7.0, 8.0], eps_id=[1, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlio.schemas.leaves.RESERVED", frozenset())
        _write_as_before(tmp_path, [own], writer_id="w00001-00000000")
    later = rlio.SampleBatch(obs=[5.0], new_obs=[6.0], eps_id=[2])
    _write(tmp_path, [later], writer_id="w00000-00000000")
    _write(tmp_path, [later], writer_id="w00002-00000000")
    for options in ({"cache": "none"}, {"cache": "memory"}, {"cache": "disk"}):
        found = load(str(tmp_path), missing="fill", **options)
        assert found["new_obs"].tolist() == [6.0, 2.0, 3.0, 6.0]
        assert found["_new_obs"].tolist() == [0.0, 7.0, 8.0, 0.0]
    table = rlio.open_dataset(tmp_path).to_arrow(missing="fill")
    assert table["new_obs"].to_pylist() == [6.0, 2.0, 3.0, 6.0]
    assert table["_new_obs"].to_pylist() == [0.0, 7.0, 8.0, 0.0]
    with pytest.raises(SchemaError):
        _write(tmp_path, [own])


@pytest.mark.few(1)
def test_shards_of_both_versions_are_looked_after_in_one_root(both: tuple[Path, list[Any]]) -> None:
    root, batches = both
    expected = rlio.concat_samples(batches)
    half = expected.agent_steps() // 2
    names = _names(root)
    assert verify(root).ok
    assert compact(root).shards_after == 2
    assert_identical(load(str(root)), expected)
    assert gc(root, grace=0).removed
    assert len(rlio.open_dataset(root).files()) == 2
    assert_identical(load(str(root)), expected)
    assert verify(root).ok
    compact(root, into=root.with_name("copy"))
    copied = load(str(root.with_name("copy")), columns=None)
    for part in copied.policy_batches.values() if isinstance(copied, rlio.MultiAgentBatch) else [copied]:
        del part["_writer"]
    assert_identical(copied, expected)
    assert _names(root) == _names(root.with_name("copy")) == names
    trim(root, before={"w00000-00000000": half})
    assert_identical(load(str(root)), rlio.concat_samples(batches[4:]))
    assert verify(root).ok


def test_intact_rows_of_a_damaged_shard_of_the_version_before_are_read(tmp_path: Path) -> None:
    batch = DATA_SETS["cartpole_like"]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlio.schemas.schema._GROUP_BYTES", 800)
        _write_as_before(tmp_path, [batch], writer_id="w00000-00000000")
    (shard,) = tmp_path.glob("data/*/*.parquet")
    data = bytearray(shard.read_bytes())
    data[len(data) // 4] ^= 1
    shard.write_bytes(data)
    assert not verify(tmp_path).ok
    assert repair(tmp_path).actions == ()
    found = load(str(tmp_path), on_error="skip", batch_size=1000)
    kept = np.flatnonzero(np.isin(batch["eps_id"] * 100 + batch["t"], found["eps_id"] * 100 + found["t"]))
    assert 0 < len(kept) < len(batch)
    assert_identical(found, batch[kept])
