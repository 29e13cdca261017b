"""What a conversion decides before a sink sees an episode: names, environments, columns, and the report."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from further import further
from typer.testing import CliRunner

import rlio
from rlio.cli.main import app
from rlio.conversion.episodes import open_episodes
from rlio.conversion.prepare import environment_for
from rlio.conversion.report import Inspector
from rlio.errors import CorruptData, OptionError, SchemaError
from rlio.schemas.provenance import Provenance

ROBOSUITE = json.dumps({"env_name": "Lift", "type": 1, "env_kwargs": {"robots": "Panda"}})


def rows(steps: int = 4, **columns: Any) -> rlio.SampleBatch:
    at = np.arange(steps + 1, dtype=np.float32)[:, None]
    return rlio.SampleBatch(
        {
            "obs": at[:-1],
            "new_obs": at[1:],
            "actions": at[:-1] / 10,
            "rewards": np.arange(steps) + 0.5,
            "terminateds": np.arange(steps) == steps - 1,
            "truncateds": np.zeros(steps, np.bool_),
            "eps_id": np.zeros(steps, np.int64),
            "t": np.arange(steps),
            **columns,
        }
    )


def recorded(root: Path, *batches: rlio.SampleBatch, **options: Any) -> Path:
    with rlio.ParquetWriter(root, spool=None, **options) as writer:
        for number, batch in enumerate(batches):
            batch["eps_id"] = np.full(len(batch), number)
            writer.write(batch)
    return root


def found(path: Path, **options: Any) -> rlio.SampleBatch:
    with rlio.read(path, epochs=1, **options) as reader:
        return rlio.concat_samples(list(reader))


def kinds(report: Any) -> dict[str, list[str | None]]:
    named: dict[str, list[str | None]] = {}
    for finding in report.findings:
        named.setdefault(finding.kind, []).append(finding.column)
    return named


# ---- environments ----


def test_descriptions_of_environments_are_never_taken_for_one_another() -> None:
    spec = gym.spec("CartPole-v1").to_json()
    assert environment_for("gymnasium", spec) == spec
    assert environment_for("gymnasium", "CartPole-v1") == spec
    assert environment_for("robomimic", ROBOSUITE) == ROBOSUITE
    for other in (ROBOSUITE, "Nowhere-v0", '{"id": 5}', "[1]", "", None):
        assert environment_for("gymnasium", other) is None
    expected = {"env_name": "CartPole-v1", "type": 2, "env_kwargs": {}}
    assert json.loads(environment_for("robomimic", "CartPole-v1") or "") == expected
    made = json.loads(environment_for("robomimic", spec) or "")
    assert (made["env_name"], made["type"]) == ("CartPole-v1", 2)
    assert made["env_kwargs"] == json.loads(spec)["kwargs"]
    assert environment_for("robomimic", '{"id": 5}') is None
    assert environment_for("", spec) is None


def test_robomimic_data_becomes_a_minari_data_set_without_its_environment(tmp_path: Path) -> None:
    recorded(tmp_path / "own", rows(), provenance=Provenance(env=ROBOSUITE))
    rlio.convert(tmp_path / "own", tmp_path / "a.hdf5", to="robomimic", prove=True)
    with h5py.File(tmp_path / "a.hdf5") as file:
        assert file["data"].attrs["env_args"] == ROBOSUITE
    report = rlio.convert(tmp_path / "a.hdf5", tmp_path / "b", to="minari", prove=True)
    assert "env_spec" not in json.loads((tmp_path / "b/data/metadata.json").read_text())
    (finding,) = [finding for finding in report.findings if finding.kind == "environment"]
    assert "Lift" in finding.text


def test_minari_data_becomes_robomimic_data_with_env_args_of_gymnasium(tmp_path: Path) -> None:
    recorded(tmp_path / "own", rows(), provenance=Provenance(env="CartPole-v1"))
    rlio.convert(tmp_path / "own", tmp_path / "a", to="minari", prove=True)
    assert "entry_point" in json.loads((tmp_path / "a/data/metadata.json").read_text())["env_spec"]
    rlio.convert(tmp_path / "a", tmp_path / "b.hdf5", to="robomimic", prove=True)
    with h5py.File(tmp_path / "b.hdf5") as file:
        args = json.loads(file["data"].attrs["env_args"])
    assert (args["env_name"], args["type"]) == ("CartPole-v1", 2)
    assert gym.make(args["env_name"], **args["env_kwargs"]).spec is not None


# ---- names and values ----


def test_names_that_a_target_uses_itself_are_changed_and_their_values_kept(tmp_path: Path) -> None:
    names = ("index", "frame_index", "timestamp", "observation.x", "next.reward", "a/b", "plain")
    recorded(tmp_path / "own", rows(**{name: np.arange(4) + 5 for name in names}))
    report = rlio.convert(tmp_path / "own", tmp_path / "a", to="lerobot", prove=True)
    batch = found(tmp_path / "a")
    for name in ("index_", "frame_index_", "timestamp_", "observation_x_", "next_reward_", "a.b", "plain"):
        assert batch[name].tolist() == [5, 6, 7, 8], name
    assert "index -> index_" in kinds(report)["renamed"]
    assert len(kinds(report)["renamed"]) == len(names) - 1
    names = ("file", "lengths", "allow_pickle", "infos/x")
    recorded(tmp_path / "own-2", rows(**{name: np.arange(4) + 5 for name in names}))
    rlio.convert(tmp_path / "own-2", tmp_path / "b", to="npz", prove=True)
    assert {"file", "lengths_", "allow_pickle", "infos.x"} < {*found(tmp_path / "b")}


def test_a_name_that_is_changed_takes_no_name_that_is_there(tmp_path: Path) -> None:
    recorded(tmp_path / "own", rows(index=np.arange(4), index_=np.arange(4) + 9))
    rlio.convert(tmp_path / "own", tmp_path / "a", to="lerobot", prove=True)
    assert found(tmp_path / "a")["index_"].tolist() == [9, 10, 11, 12]
    assert found(tmp_path / "a")["index__"].tolist() == [0, 1, 2, 3]


def test_texts_come_back_from_npz_and_from_rllibs_episodes(tmp_path: Path) -> None:
    words = np.array(["a", "bc", "", "d"], object)
    recorded(tmp_path / "own", rows(words=words))
    for to in ("npz", "rllib-episodes", "lerobot", "parquet", "rllib-json"):
        rlio.convert(tmp_path / "own", tmp_path / to, to=to, prove=True)
        assert found(tmp_path / to)["words"].tolist() == words.tolist()


def test_data_of_robots_without_rewards_goes_from_one_version_of_lerobot_to_the_next(tmp_path: Path) -> None:
    batch = rows()
    del batch["rewards"]
    recorded(tmp_path / "own", batch)
    rlio.convert(tmp_path / "own", tmp_path / "a", to="lerobot", prove=True)
    report = rlio.convert(tmp_path / "a", tmp_path / "b", to="lerobot", prove=True)
    assert report.written == 4
    assert "rewards" not in found(tmp_path / "b")


def test_lerobot_gets_the_final_observations_that_the_first_episode_lacks(
    tmp_path: Path,
) -> None:
    lacks = rows(new_obs_valid=np.array([True, True, True, False]))
    has = rows(new_obs_valid=np.ones(4, np.bool_))
    recorded(tmp_path / "own", lacks, has)
    rlio.convert(tmp_path / "own", tmp_path / "a", to="lerobot", prove=True)
    batch = found(tmp_path / "a")
    assert batch["new_obs_valid"].tolist() == [True, True, True, False, True, True, True, True]
    assert batch["new_obs"][:, 0].tolist() == [1, 2, 3, 0, 1, 2, 3, 4]


def test_an_episode_of_one_step_is_left_out_if_its_step_is_dropped(tmp_path: Path) -> None:
    one, four = (
        rows(1, new_obs_valid=np.array([False])),
        rows(4, new_obs_valid=np.array([True] * 3 + [False])),
    )
    recorded(tmp_path / "own", one, four)
    report = rlio.convert(tmp_path / "own", tmp_path / "a", to="minari", final_obs="drop-step", prove=True)
    counts = {finding.kind: finding.count for finding in report.findings}
    assert (counts["no_step_left"], counts["dropped_step"], report.written) == (1, 1, 3)
    assert found(tmp_path / "a")["actions"][:, 0].tolist() == pytest.approx([0, 0.1, 0.2])


def test_whole_numbers_beyond_the_floats_of_a_target_are_refused_or_kept(tmp_path: Path) -> None:
    recorded(tmp_path / "own", rows(rewards=np.arange(4) + 2**53 + 1))
    rlio.convert(tmp_path / "own", tmp_path / "a", to="lerobot", prove=True)
    assert found(tmp_path / "a")["rewards"].tolist() == [2**53 + 1 + step for step in range(4)]
    with pytest.raises(rlio.errors.SchemaError, match="beyond 2"):
        rlio.convert(tmp_path / "own", tmp_path / "b.h5", to="d3rlpy")
    assert not (tmp_path / "b.h5").exists()


# ---- what is read ----


def libero(path: Path, *, unlike: bool = False) -> None:
    """Demonstrations with members beside those of robomimic, as LIBERO, MimicGen and Isaac Lab have them."""
    with h5py.File(path, "w") as file:
        for number in range(2):
            demo = file.create_group(f"data/demo_{number}")
            demo.attrs["num_samples"], demo.attrs["success"] = 3, True
            demo["obs/x"], demo["actions"] = np.zeros((3, 2)), np.ones((3, 1))
            demo["rewards"], demo["dones"] = np.zeros(3), np.array([0, 0, 1])
            demo["states"], demo["robot_states"] = np.zeros((3, 4)), np.full((3, 2), number)
            demo["datagen_info/eef_pose/hand"] = np.full((3, 4, 4), 7.0)
            demo["initial_state/pose"] = np.zeros((1, 2))
            if number == 0 or not unlike:
                demo["extra"] = np.zeros(3)
        file["data"].attrs["env_args"] = ROBOSUITE


def test_members_of_robomimic_demonstrations_are_columns_or_in_the_report(tmp_path: Path) -> None:
    libero(tmp_path / "a.hdf5")
    report = rlio.convert(tmp_path / "a.hdf5", tmp_path / "b", prove=True)
    batch = found(tmp_path / "b")
    assert batch["robot_states"][:, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert batch["datagen_info"]["eef_pose"]["hand"].shape == (6, 4, 4)
    assert batch["states"].shape == (6, 4)
    assert kinds(report)["left_out"] == ["initial_state", "success (an attribute)"]
    rlio.convert(tmp_path / "b", tmp_path / "c.hdf5", to="robomimic", prove=True)
    libero(tmp_path / "d.hdf5", unlike=True)
    report = rlio.convert(tmp_path / "d.hdf5", tmp_path / "e", prove=True)
    assert "extra" in kinds(report)["left_out"]
    assert "extra" not in found(tmp_path / "e")


@pytest.mark.further
def test_d3rlpy_files_of_many_episodes_are_recognised(tmp_path: Path) -> None:
    recorded(tmp_path / "own", *[rows(1) for _ in range(260)])
    rlio.convert(tmp_path / "own", tmp_path / "a.h5", to="d3rlpy", prove=True)
    assert len(found(tmp_path / "a.h5")) == 260


def test_rllibs_json_of_a_conversion_is_not_said_to_have_scaled_actions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorded(tmp_path / "own", rows())
    rlio.convert(tmp_path / "own", tmp_path / "a", to="rllib-json")
    with caplog.at_level(logging.WARNING, logger="rlio"):
        found(tmp_path / "a")
        assert "scaled" not in caplog.text
        (tmp_path / "output-1.json").write_text(next((tmp_path / "a").glob("*.json")).read_text())
        found(tmp_path / "output-1.json")
        assert "scaled" in caplog.text


def test_a_tables_integers_beyond_floats_are_not_rounded_when_read(tmp_path: Path) -> None:
    batch = rows(advantages=np.arange(4) + 2**60 + 1)
    np.savez(tmp_path / "a.npz", **{name: np.asarray(column) for name, column in batch.items()})
    with pytest.raises(rlio.errors.SchemaError, match="beyond 2"):
        found(tmp_path / "a.npz")


# ---- the report ----


def test_identical_findings_are_one_line_with_a_count_and_three_places() -> None:
    inspector = Inspector()
    for number in range(5):
        batch = rows(
            3, a=np.full(3, np.nan), b=np.full(3, np.nan), c=np.full(3, np.nan), d=np.full(3, np.nan)
        )
        inspector.add(batch, place=f"episode {number}")
    (finding, *_) = [finding for finding in inspector.findings() if finding.kind == "nan"]
    assert (finding.count, finding.first) == (15, "episode 0, row 0")
    assert finding.places == tuple(f"episode {number}, row 0" for number in range(3))
    report = rlio_report(inspector)
    (line,) = [line for line in report.lines() if line[0] == "nan"]
    assert line == (
        "nan",
        "60 rows",
        "a; b; c and 1 more",
        "episode 0, row 0; episode 1, row 0; episode 2, row 0",
        "The column has NaN.",
    )


def rlio_report(inspector: Inspector) -> Any:
    from rlio.conversion.report import ImportReport

    return ImportReport(
        source="a", target="b", source_format="rlio", target_format="rlio", episodes=5, rows=15, written=15,
        findings=inspector.findings(),
    )  # fmt: skip


def test_the_command_takes_what_to_do_with_missing_final_observations(tmp_path: Path) -> None:
    recorded(tmp_path / "own", rows(new_obs_valid=np.array([True, True, True, False])))
    command = ["convert", str(tmp_path / "own"), str(tmp_path / "a"), "--to", "minari", "--prove"]
    assert CliRunner().invoke(app, command).exit_code == 1
    ran = CliRunner().invoke(app, [*command, "--final-obs", "repeat"])
    assert ran.exit_code == 0, ran.output
    assert "repeated_obs" in ran.output
    assert CliRunner().invoke(app, [*command, "--final-obs", "zeros"]).exit_code == 2
    with pytest.raises(OptionError, match="pass final_obs= to"):
        rlio.convert(tmp_path / "own", tmp_path / "b", to="rllib-json", options={"final_obs": "repeat"})


# ---- rows of different lengths ----

_LENGTHS = {
    "different": [0, 1, 2, 3],
    "none at first": [0, 0, 0, 0],
    "one length at first": [2, 2, 2, 2],
}


def lists(lengths: list[int], item: tuple[int, ...] = (), dtype: str = "<i4") -> np.ndarray:
    return rlio.batch.object_column(np.full((n, *item), n, dtype) for n in lengths)


@pytest.mark.few(1)
@pytest.mark.parametrize("first", _LENGTHS.values(), ids=_LENGTHS)
@pytest.mark.parametrize("episodes", [None, 1])
@pytest.mark.parametrize("to", ["npz", "parquet"])
@pytest.mark.each_value_once
def test_rows_of_different_lengths_are_written_and_come_back(
    to: str, first: list[int], episodes: int | None, tmp_path: Path
) -> None:
    tokens = [lists(first), lists([5, 0, 1, 2])]
    points = [lists(first, (2,), ">f8"), lists([1, 1, 1, 3], (2,), ">f8")]
    batches = [
        rows(tokens=own, points=pairs, obs=own, new_obs=rlio.batch.object_column([*own[1:], own[0]]))
        for own, pairs in zip(tokens, points, strict=True)
    ]
    source = recorded(tmp_path / "own", *batches)
    options = {} if episodes is None else {"episodes_per_file": episodes}
    report = rlio.convert(source, tmp_path / "out", to=to, prove=True, options=options)
    assert "left_out" not in kinds(report)
    back, expected = found(tmp_path / "out", shuffle=False), rlio.concat_samples(batches)
    for name in ("tokens", "points", "obs", "new_obs"):
        assert [row.tolist() for row in back[name]] == [row.tolist() for row in expected[name]]
        assert {row.dtype for row in back[name]} == {expected[name][0].dtype.newbyteorder("=")}
    assert rlio.Ragged.of(back["tokens"]).lengths.tolist() == [*first, 5, 0, 1, 2]
    file = sorted((tmp_path / "out").iterdir())[0]
    if to == "parquet":
        kept = pq.read_table(file)
        assert kept.column("tokens").to_pylist()[:4] == [row.tolist() for row in tokens[0]]
    else:
        with np.load(file) as arrays:
            assert arrays["tokens.offsets"][:5].tolist() == np.cumsum([0, *first]).tolist()
            assert arrays["points.values"].shape[1:] == (2,)


def test_npz_has_rows_of_different_lengths_in_parts_and_refuses_keys_of_their_names(tmp_path: Path) -> None:
    parts = {"tokens": lists([0, 1, 2, 3]), "x": np.arange(4.0)}
    after = {"tokens": lists([1, 2, 3, 0]), "x": np.arange(1.0, 5.0)}
    recorded(tmp_path / "own", rows(obs=parts, new_obs=after, **{"a.values": np.arange(4)}))
    report = rlio.convert(tmp_path / "own", tmp_path / "out", to="npz", prove=True)
    assert kinds(report)["renamed"] == ["a.values -> a_values_"]
    back = found(tmp_path / "out", shuffle=False)
    assert [row.tolist() for row in back["obs"]["tokens"]] == [row.tolist() for row in parts["tokens"]]
    recorded(tmp_path / "keys", rows(obs={"x.values": np.arange(4)}, new_obs={"x.values": np.arange(1, 5)}))
    with pytest.raises(SchemaError, match=r"rename it.*obs/x\.values"):
        rlio.convert(tmp_path / "keys", tmp_path / "b", to="npz")


@pytest.mark.parametrize("to", ["lerobot", *further("d3rlpy", "d4rl", "minari", "rllib-json", "robomimic")])
def test_formats_without_lists_leave_them_out_or_say_what_holds_them(to: str, tmp_path: Path) -> None:
    recorded(tmp_path / "extra", rows(tokens=lists([0, 1, 2, 3])))
    name = "out" if to in ("lerobot", "minari", "rllib-json") else "out.hdf5"
    report = rlio.convert(tmp_path / "extra", tmp_path / name, to=to, prove=True)
    assert "tokens" in kinds(report)["left_out"]
    tokens = lists([0, 1, 2, 3])
    recorded(tmp_path / "obs", rows(obs=tokens, new_obs=lists([1, 2, 3, 4])))
    holding = r"rows of different lengths.*to_padded.*\['npz', 'parquet'\].*column obs"
    with pytest.raises(SchemaError, match=holding):
        rlio.convert(tmp_path / "obs", tmp_path / f"b{name}", to=to)


def test_a_last_observation_that_is_missing_has_no_items(tmp_path: Path) -> None:
    tokens, valid = lists([1, 2, 3, 4]), np.array([True, True, True, False])
    recorded(tmp_path / "own", rows(obs=tokens, new_obs=lists([2, 3, 4, 0]), new_obs_valid=valid))
    rlio.convert(tmp_path / "own", tmp_path / "out", to="parquet", prove=True)
    back = found(tmp_path / "out", shuffle=False)
    assert [len(row) for row in back["new_obs"]] == [2, 3, 4, 0]
    assert back["new_obs_valid"].tolist() == valid.tolist()


def test_shapes_of_lists_that_are_no_shapes_are_damage(tmp_path: Path) -> None:
    table = pa.table({"obs": [1.0], "actions": [0], "rewards": [1.0], "eps_id": [0]})
    for written in (
        b"5",
        b"[]",
        b'{"obs": 5}',
        b'{"obs": [-1]}',
        b'{"obs": ["a"]}',
        b"x",
        b"\xff",
        b"[" * 100_000,
    ):
        pq.write_table(table.replace_schema_metadata({"rlio.lists": written}), tmp_path / "a.parquet")
        with pytest.raises(CorruptData, match=r"rlio\.lists .*(states no shapes|is not readable as JSON)"):
            found(tmp_path / "a.parquet")


# ---- times ----

_TIMES = ["<M8[D]", "<M8[h]", "<M8[m]", "<M8[s]", "<M8[ms]", "<M8[us]", "<M8[ns]", ">M8[us]", "<M8[25s]"]
_DURATIONS = ["<m8[W]", "<m8[D]", "<m8[h]", "<m8[s]", "<m8[ms]", "<m8[us]", "<m8[ns]"]


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [*_TIMES, *_DURATIONS])
def test_times_come_back_from_parquet_with_their_unit(dtype: str, tmp_path: Path) -> None:
    when = np.array([0, -5, "NaT", 1000], dtype)
    recorded(tmp_path / "own", rows(when=when), rows(when=when[::-1]))
    report = rlio.convert(tmp_path / "own", tmp_path / "out", to="parquet", prove=True)
    assert "left_out" not in kinds(report)
    back = found(tmp_path / "out", shuffle=False)["when"]
    assert back.dtype == when.dtype.newbyteorder("=")
    assert back.tolist() == [*when.tolist(), *when[::-1].tolist()]
    kind = pq.read_schema(next((tmp_path / "out").glob("*.parquet"))).field("when").type
    is_date, is_duration = dtype == "<M8[D]", "m8" in dtype
    assert (pa.types.is_date(kind), pa.types.is_duration(kind)) == (is_date, is_duration)
    assert pa.types.is_timestamp(kind) == (not is_date and not is_duration)


@pytest.mark.parametrize("when", [np.array([1] * 4, "M8[M]"), np.array([[1]] * 4, "M8[s]")])
def test_times_that_arrow_has_not_are_left_out_of_parquet(when: np.ndarray, tmp_path: Path) -> None:
    recorded(tmp_path / "own", rows(when=when))
    report = rlio.convert(tmp_path / "own", tmp_path / "out", to="parquet", prove=True)
    assert kinds(report)["left_out"] == ["when"]


def test_dtypes_of_times_that_lie_are_damage(tmp_path: Path) -> None:
    table = pa.table(
        {
            "obs": [1.0],
            "actions": [0],
            "rewards": [1.0],
            "eps_id": [0],
            "when": pa.array(np.array([1500], "M8[ms]")),
        }
    )
    for written in (
        b"5",
        b'{"when": 5}',
        b'{"when": "<f8"}',
        b'{"when": "<m8[ms]"}',
        b'{"actions": "<m8[Y]"}',
        b'{"when": "<M8[s]"}',
        b'{"obs": "<M8[s]"}',
    ):
        pq.write_table(table.replace_schema_metadata({"rlio.times": written}), tmp_path / "a.parquet")
        with pytest.raises(CorruptData, match=r"rlio\.times in the metadata states"):
            found(tmp_path / "a.parquet")


def mapped(root: Path, *more: str) -> rlio.SampleBatch:
    """The rows of Parquet by a mapping of the same names."""
    names = ("obs", "actions", "rewards", *more)
    mapping = rlio.Mapping({name: name for name in names}, episode="eps_id", terminated="terminateds")
    with rlio.read(root, mapping=mapping, epochs=1) as reader:
        return rlio.concat_samples(list(reader))


@pytest.mark.parametrize("dtype", ["<M8[D]", "<M8[25s]", "<m8[h]", *further(*_TIMES, *_DURATIONS)])
def test_a_mapping_reads_times_that_rlio_wrote_to_parquet_with_their_unit(dtype: str, tmp_path: Path) -> None:
    when = np.array([0, -5, "NaT", 1000], dtype)
    recorded(tmp_path / "own", rows(when=when), rows(when=when[::-1]))
    rlio.convert(tmp_path / "own", tmp_path / "out", to="parquet")
    back = mapped(tmp_path / "out", "when")["when"]
    assert back.dtype == when.dtype.newbyteorder("=")
    assert back.tolist() == [*when.tolist(), *when[::-1].tolist()]


@pytest.mark.parametrize("counts", [[1, 0, 3, 2], [2, 2, 2, 2], [0, 0, 0, 0]])
@pytest.mark.parametrize("item", [(), *further(((2,),), ((0,),))])
def test_a_mapping_reads_lists_that_rlio_wrote_to_parquet_as_lists(
    counts: list[int], item: tuple[int, ...], tmp_path: Path
) -> None:
    """They were refused, or arrays where all had one length."""
    tokens = np.empty(4, object)
    tokens[:] = [np.full((count, *item), row, np.int16) for row, count in enumerate(counts)]
    recorded(tmp_path / "own", rows(obs=tokens, new_obs=np.roll(tokens, -1), tokens=tokens))
    rlio.convert(tmp_path / "own", tmp_path / "out", to="parquet")
    back = mapped(tmp_path / "out", "tokens")
    for name in ("obs", "tokens"):
        assert back[name].dtype == object
        for row, stored in zip(back[name], tokens, strict=True):
            assert row.dtype == stored.dtype
            np.testing.assert_array_equal(row, stored)
            assert row.shape == stored.shape


def test_a_mapping_refuses_parquet_whose_footer_lies_about_times(tmp_path: Path) -> None:
    table = pa.table({"obs": [1.0], "actions": [0], "rewards": [1.0], "eps_id": [0], "terminateds": [True]})
    pq.write_table(table.replace_schema_metadata({"rlio.times": '{"obs": "<M8[s]"}'}), tmp_path / "a.parquet")
    with pytest.raises(CorruptData, match=r"rlio\.times in the metadata states"):
        mapped(tmp_path / "a.parquet")


# ---- the arrays of rows of different lengths ----


def npz(path: Path, **arrays: np.ndarray) -> Path:
    """A file of two steps."""
    steps = {
        "obs": np.zeros((2, 1)),
        "actions": np.zeros(2),
        "rewards": np.zeros(2),
        "eps_id": np.zeros(2, int),
    }
    np.savez(path, **{name.replace("__", "."): array for name, array in {**steps, **arrays}.items()})
    return path


@pytest.mark.parametrize(
    "offsets", [[0, 2, 1], [1, 2, 3], [0, 1, 2], [0, 1, 4], [0.0, 1.0, 3.0], [0, 3]], ids=str
)
def test_offsets_that_lie_are_refused_by_the_name_of_the_column(offsets: list[float], tmp_path: Path) -> None:
    file = npz(tmp_path / "a.npz", tokens__values=np.arange(3), tokens__offsets=np.array(offsets))
    with pytest.raises(SchemaError) as caught:
        found(file)
    assert caught.value.column == "tokens"
    assert caught.value.uri == str(file)


def test_two_arrays_are_a_column_unless_there_is_one_of_that_name(tmp_path: Path) -> None:
    two = {"tokens__values": np.arange(3), "tokens__offsets": np.array([0, 0, 3], np.int32)}
    back = found(npz(tmp_path / "a.npz", **two), shuffle=False)
    assert [row.tolist() for row in back["tokens"]] == [[], [0, 1, 2]]
    mapping = rlio.Mapping(
        {"obs": "obs", "actions": "actions", "rewards": "rewards", "tokens": "tokens"}, episode="eps_id"
    )
    own = npz(tmp_path / "b.npz", tokens=np.arange(2), **two)
    assert found(own, mapping=mapping, shuffle=False)["tokens"].tolist() == [0, 1]
    empty = npz(tmp_path / "c.npz", tokens__values=np.arange(0), tokens__offsets=np.arange(0))
    with pytest.raises(rlio.errors.MissingColumn, match="tokens"):
        found(empty, mapping=mapping)


def test_opened_episodes_travel_to_another_process_and_are_whole_there(tmp_path: Path) -> None:
    """RLlib's offline data reads them in tasks."""
    t = np.arange(12) % 4
    with rlio.ParquetWriter(tmp_path / "own") as writer:
        writer.write(
            rlio.SampleBatch(
                obs=np.zeros((12, 2)),
                new_obs=np.ones((12, 2)),
                actions=t,
                rewards=np.arange(12.0),
                terminateds=t == 3,
                truncateds=np.zeros(12, bool),
                eps_id=np.arange(12) // 4,
                t=t,
            )
        )
    with open_episodes(str(tmp_path / "own"), read_options={"filter": "rewards > 3"}) as found:
        there = pickle.loads(pickle.dumps(found))
        for one in (there, found):
            rows = [batch["rewards"].tolist() for _, batch in one if isinstance(batch, rlio.SampleBatch)]
            assert rows == [[4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]]
