"""HDF5 by a mapping: an episode a group, a file, or rows that an id or a flag divides; and wrong mappings.

Numbers say where they belong: row t of episode e has joints = 100 e + t, rewards 1000 e + t, actions t.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from further import first

import rlio
from rlio.batch import SampleBatch, concat_samples
from rlio.errors import (
    DataNotFound,
    MissingColumn,
    OptionError,
    RlioError,
    SchemaError,
    UnknownLayout,
    UnsafeData,
)
from rlio.limits import DEFAULT_LIMITS
from rlio.opening import open_files
from rlio.source import episodes as episode_sources
from rlio.testing import SourceTests

#: More than ten episodes, so that the order of numbers is not that of letters.
LENGTHS = (3, 1, 5, 2, 2, 1, 4, 2, 1, 3, 2, 6)
COLUMNS: dict[str, Any] = {"obs": "obs", "actions": "actions", "rewards": "rewards"}
GROUPS = rlio.Mapping(COLUMNS, episode="data/demo_*", terminated="dones", next_obs="derive")
FINAL = rlio.Mapping(COLUMNS, episode="traj_*", terminated="end", next_obs="derive", final_row=True)


def fill(group: Any, episode: int, steps: int, *, final: bool = False, flag: str = "dones") -> None:
    """An episode with nested observations, with or without the final one."""
    at = np.arange(steps + final, dtype=np.float32)
    group["obs/arm/joints"] = np.stack([100 * episode + at, at], 1)
    group["obs/gripper"] = 100 * episode + at
    group["actions"], group["rewards"] = np.arange(steps), 1000.0 * episode + np.arange(steps)
    group[flag] = np.arange(steps) == (steps - 1 if episode % 2 == 0 else -1)


def demos(path: Path, lengths: Any = LENGTHS, **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        for episode, steps in enumerate(lengths):
            fill(file.create_group(f"data/demo_{episode}"), episode, steps, **options)
    return path


def trajectories(path: Path, lengths: Any = LENGTHS) -> Path:
    with h5py.File(path, "w") as file:
        for episode, steps in enumerate(lengths):
            fill(file.create_group(f"traj_{episode}"), episode, steps, final=True, flag="end")
    return path


def rows(path: Any, mapping: rlio.Mapping, **options: Any) -> SampleBatch:
    with rlio.read(path, mapping=mapping, epochs=1, **options) as reader:
        return concat_samples(list(reader))


def expected(lengths: Any = LENGTHS) -> tuple[np.ndarray, np.ndarray]:
    """The number of the episode, and the step, of each row."""
    return np.repeat(np.arange(len(lengths)), lengths), np.concatenate([np.arange(n) for n in lengths])


def check(found: SampleBatch, lengths: Any = LENGTHS, *, final: bool) -> None:
    """Compare rows with the episodes that `fill` made."""
    episode, t = expected(lengths)
    last = np.append(np.diff(episode) > 0, True)
    np.testing.assert_array_equal(found["eps_id"], episode)
    np.testing.assert_array_equal(found["t"], t)
    np.testing.assert_array_equal(found["obs"]["arm"]["joints"], np.stack([100 * episode + t, t], 1))
    np.testing.assert_array_equal(found["obs"]["gripper"], 100 * episode + t)
    np.testing.assert_array_equal(found["actions"], t)
    np.testing.assert_array_equal(found["rewards"], 1000.0 * episode + t)
    known = np.ones(len(t), np.bool_) if final else ~last
    np.testing.assert_array_equal(found["new_obs"]["gripper"], np.where(known, 100 * episode + t + 1, 0))
    np.testing.assert_array_equal(found.get("new_obs_valid", known), known)
    np.testing.assert_array_equal(found["terminateds"], last & (episode % 2 == 0))
    np.testing.assert_array_equal(found["truncateds"], last & (episode % 2 == 1))


def test_each_group_that_matches_is_an_episode_in_the_order_of_numbers(tmp_path: Path) -> None:
    check(rows(demos(tmp_path / "a.hdf5"), GROUPS), final=False)
    parts = rlio.Mapping(
        {
            "obs/arm/joints": "obs/arm/joints",
            "obs/gripper": "obs/gripper",
            "actions": "actions",
            "rewards": "rewards",
        },
        episode="data/*",
        terminated="dones",
        next_obs="derive",
    )
    check(rows(tmp_path / "a.hdf5", parts), final=False)


def test_a_row_more_of_the_observations_is_the_final_one(tmp_path: Path) -> None:
    check(rows(trajectories(tmp_path / "a.h5"), FINAL), final=True)


def test_flat_hdf5_by_rlios_names_needs_no_mapping(tmp_path: Path) -> None:
    episode, t = expected()
    last = np.append(np.diff(episode) > 0, True)
    columns = {
        "obs/arm/joints": np.stack([100 * episode + t, t], 1), "obs/gripper": 100 * episode + t, "actions": t,
        "new_obs/arm/joints": np.stack([100 * episode + t + 1, t], 1),
        "new_obs/gripper": 100 * episode + t + 1,
        "rewards": 1000.0 * episode + t, "eps_id": episode, "t": t,
        "terminateds": last & (episode % 2 == 0), "truncateds": last & (episode % 2 == 1),
    }  # fmt: skip
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, values in columns.items():
            file[name] = values
    with rlio.read(tmp_path / "a.h5", epochs=1) as reader:
        check(concat_samples(list(reader)), final=True)


def test_observations_of_one_row_more_in_each_episode_are_known_to_be_final(tmp_path: Path) -> None:
    path = trajectories(tmp_path / "a.h5")
    plain = rlio.Mapping(COLUMNS, episode="traj_*", terminated="end")
    check(rows(path, plain), final=True)
    with h5py.File(path, "a") as file:  # An episode of another kind would lose its last step.
        del file["traj_7/actions"]
        file["traj_7/actions"] = np.zeros(3)
    with pytest.raises(SchemaError, match=r"different numbers of rows in 'traj_7'.*one more in obs"):
        rows(path, plain)
    for episode, steps in enumerate(LENGTHS):
        with h5py.File(tmp_path / f"episode_{episode}.hdf5", "w") as file:
            fill(file, episode, steps, final=True)
    files = rlio.Mapping(COLUMNS, terminated="dones", per_file=True)
    check(rows(tmp_path / "*.hdf5", files), final=True)


def test_each_file_is_an_episode(tmp_path: Path) -> None:
    for episode, steps in enumerate(LENGTHS):
        with h5py.File(tmp_path / f"episode_{episode}.hdf5", "w") as file:
            fill(file, episode, steps)
    mapping = rlio.Mapping(COLUMNS, terminated="dones", next_obs="derive", per_file=True)
    check(rows(tmp_path, mapping), final=False)


def test_flat_datasets_are_columns_as_in_npz(tmp_path: Path) -> None:
    episode, t = expected()
    last = np.append(np.diff(episode) > 0, True)
    columns = {
        "obs/arm/joints": np.stack([100 * episode + t, t], 1).astype(np.float32),
        "obs/gripper": (100 * episode + t).astype(np.float32),
        "actions": t, "rewards": 1000.0 * episode + t, "trip": episode,
        "dones": last & (episode % 2 == 0), "cut": last & (episode % 2 == 1),
    }  # fmt: skip
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, values in columns.items():
            file[name] = values
        file["about"] = np.zeros(2)
    by_id = rlio.Mapping(COLUMNS, episode="trip", terminated="dones", next_obs="derive")
    check(rows(tmp_path / "a.h5", by_id), final=False)
    by_flag = rlio.Mapping(COLUMNS, terminated="dones", truncated="cut", next_obs="derive")
    check(rows(tmp_path / "a.h5", by_flag), final=False)
    wrong = rlio.Mapping({**COLUMNS, "more": "about"}, episode="trip")
    with pytest.raises(SchemaError, match=r"found 2 rows, expected 32.*trip \(int64 \(32,\)\)"):
        rows(tmp_path / "a.h5", wrong)


@pytest.mark.few(1)
@pytest.mark.parametrize("final", [False, True])
def test_long_episodes_are_read_in_parts(
    final: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_sources, "_GROUP_ROWS", 4)
    lengths = (3, 11, 2, 4, 9)
    path = (trajectories if final else demos)(tmp_path / "a.h5", lengths)
    check(rows(path, FINAL if final else GROUPS, cache="none"), lengths, final=final)
    most: list[int] = []
    real = h5py.Dataset.__getitem__

    def noted(self: Any, place: Any) -> Any:
        found = real(self, place)
        most.append(len(found) if np.ndim(found) else 0)
        return found

    with rlio.read(path, mapping=FINAL if final else GROUPS, epochs=1, batch_size=2, cache="none") as reader:
        monkeypatch.setattr(h5py.Dataset, "__getitem__", noted)
        assert sum(map(len, reader)) == sum(lengths)
    assert max(most) <= 5  # A part, and the observation after it.


def test_hdf5_by_a_mapping_is_converted_and_proved(tmp_path: Path) -> None:
    trajectories(tmp_path / "a.h5")
    report = rlio.convert(tmp_path / "a.h5", tmp_path / "own", mapping=FINAL, prove=True)
    assert (report.episodes, report.rows, report.proved) == (len(LENGTHS), sum(LENGTHS), True)
    with rlio.ReplayStore.open(tmp_path / "a.h5", mapping=FINAL) as store:
        assert len(store) == sum(LENGTHS)


@pytest.mark.further
class TestGroups(SourceTests):
    """Episodes that are groups, as the engine sees them; one is read in parts."""

    @pytest.fixture(autouse=True)
    def _files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(episode_sources, "_GROUP_ROWS", 4)
        self.path = trajectories(tmp_path / "a.h5")

    def make_source(self) -> Any:
        shared: Any = {"storage_options": None, "limits": DEFAULT_LIMITS, "on_error": "raise"}
        return open_files(str(self.path), mapping=FINAL, **shared)

    def expected_rows(self) -> Any:
        return None


WRONG: dict[str, tuple[dict[str, Any], type[RlioError], str]] = {
    "no such column": (
        {"columns": {"obs": "obs/arn"}, "episode": "data/demo_*"},
        MissingColumn,
        "did you mean",
    ),
    "no such group": (
        {"columns": COLUMNS, "episode": "demo_*"},
        MissingColumn,
        "no group of the file matches",
    ),
    "names of the file": (
        {"columns": COLUMNS, "per_file": True},
        MissingColumn,
        r"pass episode='data/demo_\*'",
    ),
    "no end": ({"columns": {"obs": "data/demo_0/obs"}}, OptionError, "where an episode ends"),
    "no numbers": ({"columns": {"obs": "text"}, "episode": "data/demo_*"}, SchemaError, "expected numbers"),
    "no rows": ({"columns": {"obs": "single"}, "episode": "data/demo_*"}, SchemaError, "with a row a step"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("fields", "kind", "text"), first(3, WRONG.values()))
def test_a_wrong_mapping_shows_the_tree_of_names(
    fields: dict[str, Any], kind: type[RlioError], text: str, tmp_path: Path
) -> None:
    path = demos(tmp_path / "a.hdf5")
    with h5py.File(path, "a") as file:
        for episode in range(len(LENGTHS)):
            file[f"data/demo_{episode}/text"] = ["a"] * LENGTHS[episode]
            file[f"data/demo_{episode}/single"] = 1.0
    for on_error in ("raise", "skip"):
        with pytest.raises(kind, match=text) as caught:
            rows(path, rlio.Mapping(**fields), on_error=on_error)
        assert "data/demo_0/obs/arm/joints (float32 (3, 2))" in str(caught.value)
        assert "11 more data/demo_*/" in str(caught.value)
        assert len(str(caught.value)) < 2000


def test_rows_that_do_not_fit_are_refused_by_their_numbers(tmp_path: Path) -> None:
    path = trajectories(tmp_path / "a.h5")
    named = rlio.Mapping(COLUMNS, episode="traj_*", terminated="end", next_obs="obs")
    with pytest.raises(SchemaError, match=r"'actions': 3.*next_obs='derive' and final_row=True"):
        rows(path, named)
    with h5py.File(path, "a") as file:
        del file["traj_7/actions"]
        file["traj_7/actions"] = np.zeros(9)
    with pytest.raises(SchemaError, match="different numbers of rows in 'traj_7'"):
        rows(path, FINAL)
    with h5py.File(path, "a") as file:
        del file["traj_7/actions"]
    with pytest.raises(MissingColumn, match="'traj_7' has no 'actions'"):
        rows(path, FINAL)


def test_groups_with_other_parts_are_refused(tmp_path: Path) -> None:
    path = demos(tmp_path / "a.hdf5")
    with h5py.File(path, "a") as file:
        file["data/demo_4/obs/camera"] = np.zeros((2, 4))
    with pytest.raises(SchemaError, match=r"data/demo_4.*expected the datasets of the first episode"):
        rows(path, GROUPS)


def test_links_out_of_the_file_are_refused_by_name(tmp_path: Path) -> None:
    demos(tmp_path / "other.hdf5")
    path = demos(tmp_path / "a.hdf5")
    with h5py.File(path, "a") as file:
        del file["data/demo_1/actions"]
        file["data/demo_1/actions"] = h5py.ExternalLink("other.hdf5", "data/demo_1/actions")
    with pytest.raises(UnsafeData, match="ExternalLink"):
        rows(path, GROUPS)


def test_groups_in_circles_end(tmp_path: Path) -> None:
    path = demos(tmp_path / "a.hdf5")
    with h5py.File(path, "a") as file:
        file["data/demo_0/obs/again"] = file["data/demo_0"]
    with pytest.raises(UnsafeData, match="levels"):
        rows(path, GROUPS)
    parts = rlio.Mapping({"obs": "obs/gripper", "actions": "actions"}, episode="data/demo_*")
    assert len(rows(path, parts)) == sum(LENGTHS)


@pytest.mark.parametrize("name", first(1, ["a.b", "é", "*", "[x]", "a b", "..", "a\nb"]))
def test_hostile_names_are_columns(name: str, tmp_path: Path) -> None:
    path = demos(tmp_path / "a.hdf5")
    with h5py.File(path, "a") as file:
        for episode, steps in enumerate(LENGTHS):
            file[f"data/demo_{episode}"].create_dataset(name.encode(), data=np.arange(steps) + 7)
    mapping = rlio.Mapping({**COLUMNS, "more": name}, episode="data/demo_*")
    np.testing.assert_array_equal(rows(path, mapping)["more"], expected()[1] + 7)


def test_unknown_hdf5_shows_the_mapping_that_it_may_need(tmp_path: Path) -> None:
    path = trajectories(tmp_path / "a.h5")
    shown = (
        "rlio.Mapping(columns={'obs': 'obs', 'actions': 'actions', 'rewards': 'rewards'}, episode='traj_*')"
    )
    for opens in (rlio.read, rlio.open_dataset, rlio.ReplayStore.open):
        with pytest.raises((UnknownLayout, DataNotFound)) as caught:
            opens(path)
        assert f"mapping={shown}" in str(caught.value)
        assert "traj_0/obs/arm/joints (float32 (4, 2))" in str(caught.value)
    with pytest.raises((UnknownLayout, DataNotFound)) as caught:
        rlio.convert(path, tmp_path / "own")
    assert f"mapping={shown}" in str(caught.value)


# ---- rows of any number of items ----


def with_tokens(path: Path, lengths: Any = LENGTHS, *, final: bool = False, dtype: str = "<i4") -> Path:
    """`demos`, with as many tokens in a row as its step, in a data set of variable length."""
    demos(path, lengths, final=final)
    with h5py.File(path, "a") as file:
        for episode, steps in enumerate(lengths):
            tokens = file[f"data/demo_{episode}"].create_dataset(
                "tokens", (steps,), h5py.vlen_dtype(np.dtype(dtype))
            )
            for step in range(1, steps):  # That of the first step is never written, and has no items.
                tokens[step] = np.full(step, 100 * episode + step, dtype)
    return path


@pytest.mark.few(1)
@pytest.mark.parametrize("final", [False, True])
def test_a_data_set_of_variable_length_has_rows_of_any_number_of_items(final: bool, tmp_path: Path) -> None:
    source = with_tokens(tmp_path / "a.hdf5", final=final)
    mapping = rlio.Mapping(
        {**COLUMNS, "tokens": "tokens", "actions": "tokens"},
        episode="data/demo_*",
        terminated="dones",
        next_obs="derive",
    )
    episode, step = expected()
    lists = [[100 * e + t] * t for e, t in zip(episode.tolist(), step.tolist(), strict=True)]
    found = rows(source, mapping, shuffle=False)
    for name in ("tokens", "actions"):
        assert [row.tolist() for row in found[name]] == lists
        assert {row.dtype.str for row in found[name]} == {"<i4"}
    assert rows(source, mapping, columns=["tokens"], batch_size=4, seed=0).keys() == {"tokens"}
    assert rlio.convert(source, tmp_path / "out", mapping=mapping, prove=True).proved
    with pytest.raises(OptionError, match="ragged='tokens': the file itself says"):
        rows(source, rlio.Mapping({**COLUMNS, "tokens": "tokens"}, episode="data/demo_*", ragged="tokens"))


def test_observations_of_variable_length_are_shifted_to_the_row_before(tmp_path: Path) -> None:
    source = with_tokens(tmp_path / "a.hdf5")
    mapping = rlio.Mapping(
        {**COLUMNS, "obs": "tokens"}, episode="data/demo_*", terminated="dones", next_obs="derive"
    )
    found = rows(source, mapping, shuffle=False)
    step = expected()[1]
    after = [len(row) for row in found["new_obs"]]
    assert after == [t + 1 if valid else 0 for t, valid in zip(step, found["new_obs_valid"], strict=True)]
    assert (~found["new_obs_valid"]).sum() == len(LENGTHS)


def test_lists_that_h5py_does_not_read_right_and_other_objects_are_refused(tmp_path: Path) -> None:
    mapping = rlio.Mapping({**COLUMNS, "tokens": "tokens"}, episode="data/demo_*")
    with pytest.raises(SchemaError, match=r"lists of >f4.*order of bytes"):
        rows(with_tokens(tmp_path / "swapped.hdf5", dtype=">f4"), mapping)
    source = demos(tmp_path / "texts.hdf5", (2,))
    with h5py.File(source, "a") as file:
        file["data/demo_0/tokens"] = ["a", "b"]
    with pytest.raises(SchemaError, match=r"object of the shape \(2,\).*expected numbers"):
        rows(source, mapping)
