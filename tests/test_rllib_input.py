"""What RLlib's users have written works here: mixtures with old recordings, unlike files, scaled actions."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import lz4.frame
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import rlio
from rlio.errors import CorruptData, MissingColumn, OptionError, SchemaError
from rlio.readers.mixed_input import MixedInput
from rlio.testing.readers import assert_resumes


def record(first: int = 0, rows: int = 6, **columns: Any) -> dict[str, Any]:
    """A record as RLlib 1 wrote it: ``dones``, and columns that a live sampler does not give."""
    numbers = np.arange(first, first + rows)
    found = {
        "type": "SampleBatch",
        "obs": np.stack([numbers, -numbers, numbers, numbers], 1).astype(float).tolist(),
        "new_obs": np.stack([numbers + 1, -numbers, numbers, numbers], 1).astype(float).tolist(),
        "actions": (numbers % 2).tolist(),
        "rewards": [1.0] * rows,
        "dones": (numbers % 3 == 2).tolist(),
        "eps_id": (numbers // 3).tolist(),
        "weights": [1.0] * rows,
        "q_values": [[0.0, 1.0]] * rows,
        **columns,
    }
    return {name: value for name, value in found.items() if value is not None}


def save(path: Path, *records: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [log.getMessage() for log in caplog.records if log.levelno == logging.WARNING]


def read(reader: Any) -> Any:
    with reader:
        return rlio.concat_samples(list(reader))


# ---- mixtures ----


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return save(tmp_path / "old.json", *[record(6 * i) for i in range(10)])


def test_the_sampler_and_an_old_recording_mix_as_they_are_written(
    old: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mixture = {"sampler": 0.5, str(old): 0.5}
    with rlio.RolloutWorker("CartPole-v1", rlio.RandomPolicy(), input=mixture, seed=0) as worker:
        batches = [worker.sample() for _ in range(20)]
    assert {len(batch) for batch in batches} == {200}
    assert len({tuple(sorted(batch)) for batch in batches}) == 1
    assert {"obs", "new_obs", "actions", "rewards", "terminateds", "truncateds"} <= set(batches[0])
    said = [text for text in warnings_of(caplog) if "truncateds" in text and str(old) in text]
    assert len(said) == 1
    assert any("weights_seq_no" in text for text in warnings_of(caplog)), "what is left out is said"


def flags(rows: int, **columns: Any) -> rlio.SampleBatch:
    return rlio.SampleBatch(obs=np.arange(rows), **columns)


class Rows(rlio.InputReader):
    """The same batch again and again."""

    def __init__(self, batch: rlio.SampleBatch | rlio.MultiAgentBatch) -> None:
        self.batch = batch

    def _next(self) -> Any:
        return self.batch.copy()


@pytest.mark.parametrize("columns", ["intersect", "fill"])
@pytest.mark.parametrize("several", [False, True])
def test_truncateds_of_a_source_outlive_one_that_has_only_terminateds(
    columns: Any, several: bool, caplog: pytest.LogCaptureFixture
) -> None:
    live: Any = flags(4, terminateds=[False] * 4, truncateds=[False, True] * 2)
    logged: Any = flags(4, terminateds=[False, True] * 2)
    if several:
        live, logged = live.as_multi_agent(), logged.as_multi_agent()
    sources = {"live": Rows(live), "logged": Rows(logged)}
    mixture = MixedInput(sources, batch_size=8, columns=columns)
    for _ in range(3):
        batch: Any = mixture.sample()
        batch = batch["default_policy"] if several else batch
        assert batch["truncateds"].tolist() == [False, True] * 2 + [False] * 4
        assert batch["terminateds"].tolist() == [False] * 4 + [False, True] * 2
    assert len([text for text in warnings_of(caplog) if "truncateds" in text and "'logged'" in text]) == 1


def test_batches_of_a_mixture_have_the_same_columns_also_where_one_source_gives_all_rows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sources = {"a": Rows(flags(1, rewards=[1.0], more=[1])), "b": Rows(flags(1, rewards=[1.0], other=[1]))}
    mixture = MixedInput(sources, batch_size=1, columns="intersect", seed=0)
    assert {tuple(mixture.sample()) for _ in range(6)} == {("obs", "rewards")}
    assert len(warnings_of(caplog)) == 1


def test_a_mixture_of_unlike_sources_says_what_it_leaves_out_and_can_be_told_to_raise(
    old: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = save(old.parent / "other/a.json", record(dones=None, terminateds=[False] * 6, q_values=None))
    sources = {str(old): 1, str(other): 1}
    with rlio.read(sources, columns="error") as reader, pytest.raises(MissingColumn):
        reader.sample()
    caplog.clear()
    reader = rlio.read(sources)
    batch = reader.sample()
    reader.sample()
    assert set(batch) == set(record()) - {"type", "dones", "q_values"} | {"terminateds"}
    assert [text for text in warnings_of(caplog) if "q_values" in text and str(old) in text]
    reader.close()


# ---- dones ----


@pytest.mark.parametrize("packed", [False, True])
def test_infos_tell_which_dones_are_truncations(
    packed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    infos: Any = [{}, {}, {"TimeLimit.truncated": True}, {}, {}, {"TimeLimit.truncated": False}]
    if packed:
        import base64
        import pickle

        infos = base64.b64encode(lz4.frame.compress(pickle.dumps(infos, 5))).decode()
    path = save(tmp_path / "a.json", record(infos=infos))
    for columns in (None, ["obs", "terminateds", "truncateds"], ["dones"]):
        batch = read(rlio.JsonReader(path, epochs=1, columns=columns))
        assert batch["truncateds"].tolist() == [False, False, True, False, False, False]
        assert batch["terminateds"].tolist() == [False, False, False, False, False, True]
        assert ("infos" in batch) == (columns is None)
    assert warnings_of(caplog) == []


def test_infos_of_one_step_a_line_and_of_parquet_tell_it_too(tmp_path: Path) -> None:
    for name, info in (("a", {"TimeLimit.truncated": True}), ("b", {"TimeLimit.truncated": False})):
        save(
            tmp_path / f"{name}.json",
            {"obs": [0.5], "rewards": 1.0, "dones": True, "infos": info},
        )
    batch = read(rlio.JsonReader(tmp_path, epochs=1, columns=["truncateds", "terminateds"]))
    assert batch["truncateds"].tolist() == [True, False]
    table = pa.table({"obs": [0.5, 1.0], "dones": [True, True], "infos": [{"TimeLimit.truncated": True}, {}]})
    pq.write_table(table, tmp_path / "a.parquet")
    for columns in (None, ["truncateds", "terminateds"]):
        batch = read(rlio.ForeignParquetReader(tmp_path, epochs=1, columns=columns))
        assert batch["truncateds"].tolist() == [True, False]
        assert batch["terminateds"].tolist() == [False, True]


def test_dones_that_do_not_say_whether_they_are_truncations_are_warned_of_once(
    old: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batch = read(rlio.JsonReader(old, epochs=2))
    assert batch["terminateds"].sum() == 40
    assert "truncateds" not in batch
    assert len([text for text in warnings_of(caplog) if "dones" in text and str(old) in text]) == 1
    caplog.clear()
    save(old, record(dones=None, terminateds=[False] * 6, truncateds=[False] * 6))
    read(rlio.JsonReader(old, epochs=1))
    assert warnings_of(caplog) == []


# ---- files of one folder with unlike columns ----


@pytest.fixture
def unlike(tmp_path: Path) -> Path:
    """Many alike records, and behind them a file with other columns."""
    save(tmp_path / "unlike/1.json", *[record(6 * i) for i in range(50)])
    other = record(300, q_values=None, action_logp=[-0.5] * 6, new_obs=None, dones=None)
    save(tmp_path / "unlike/2.json", {**other, "terminateds": [False] * 6, "truncateds": [True] * 6})
    return tmp_path / "unlike"


def test_files_with_unlike_columns_are_refused_when_they_are_opened(unlike: Path) -> None:
    with pytest.raises(SchemaError) as caught:
        rlio.JsonReader(unlike)
    assert caught.value.uri == str(unlike / "2.json")
    assert caught.value.column in {"q_values", "action_logp", "new_obs", "truncateds"}


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_columns_that_all_files_have_are_served_and_truncateds_with_them(
    unlike: Path, shuffle: bool
) -> None:
    options: Any = {"epochs": 1, "columns": "intersect", "shuffle": shuffle, "seed": 0}
    batch = read(rlio.JsonReader(unlike, **options))
    assert set(batch) == {
        *("obs", "actions", "rewards", "eps_id", "weights", "terminateds", "truncateds"),
    }
    assert len(batch) == 306
    assert batch["truncateds"].sum() == 6
    assert_resumes(lambda: rlio.JsonReader(unlike, **options), n=7)


def test_the_columns_that_some_files_have_are_filled_in_the_others(unlike: Path) -> None:
    batch = read(rlio.JsonReader(unlike, epochs=1, columns="fill"))
    assert set(batch) == set(record()) - {"type", "dones"} | {
        *("terminateds", "truncateds", "action_logp", "new_obs_valid"),
    }
    assert batch["new_obs_valid"].tolist() == [True] * 300 + [False] * 6
    assert batch["action_logp"].tolist() == [0.0] * 300 + [-0.5] * 6
    assert batch["q_values"][-1].tolist() == [0.0, 0.0]
    assert batch["new_obs"][-1].tolist() == [0.0] * 4


def test_a_list_of_columns_means_those_columns(unlike: Path) -> None:
    assert set(read(rlio.JsonReader(unlike, epochs=1, columns=["obs", "rewards"]))) == {"obs", "rewards"}
    for columns in ("union", "obs", ""):
        with pytest.raises(OptionError):
            rlio.JsonReader(unlike, columns=columns)
    with rlio.ParquetWriter(unlike.parent / "set") as writer:
        writer.write(rlio.SampleBatch(obs=[0]))
    with pytest.raises(OptionError):
        rlio.DatasetReader(unlike.parent / "set", columns="fill")  # Its missing= says it.


def test_unlike_records_of_several_policies_are_brought_together(tmp_path: Path) -> None:
    def joint(**more: Any) -> dict[str, Any]:
        one = {"obs": [0.5, 1.0], "rewards": [1.0, 1.0], "terminateds": [False, True], **more}
        return {"type": "MultiAgentBatch", "count": 2, "policy_batches": {"a": one, "b": {"obs": [1]}}}

    save(tmp_path / "1.json", joint(label=[1, 2]), joint(label=[1, 2]))
    save(tmp_path / "2.json", joint(truncateds=[True, False]))
    with pytest.raises(SchemaError):
        rlio.JsonReader(tmp_path)
    common: Any = read(rlio.JsonReader(tmp_path, epochs=1, columns="intersect"))
    assert set(common["a"]) == {"obs", "rewards", "terminateds", "truncateds"}
    assert common["a"]["truncateds"].tolist() == [False] * 4 + [True, False]
    filled: Any = read(rlio.JsonReader(tmp_path, epochs=1, columns="fill"))
    assert filled["a"]["label"].tolist() == [1, 2, 1, 2, 0, 0]


def test_unlike_parquet_files_are_refused_or_brought_together(tmp_path: Path) -> None:
    first = {"obs": [[0.0], [1.0]], "rewards": [1.0, 2.0], "dones": [False, True], "more": [1, 2]}
    second = {"obs": [[2.0]], "rewards": [3.0], "terminateds": [False], "truncateds": [True]}
    pq.write_table(pa.table(first), tmp_path / "1.parquet", row_group_size=1)
    pq.write_table(pa.table(second), tmp_path / "2.parquet")
    with pytest.raises(SchemaError) as caught:
        rlio.ForeignParquetReader(tmp_path)
    assert caught.value.uri == str(tmp_path / "2.parquet")
    common = read(rlio.ForeignParquetReader(tmp_path, epochs=1, columns="intersect"))
    assert set(common) == {"obs", "rewards", "terminateds", "truncateds"}
    assert common["truncateds"].tolist() == [False, False, True]
    filled = read(rlio.ForeignParquetReader(tmp_path, epochs=1, columns="fill", shuffle=True, seed=0))
    assert sorted(filled["more"]) == [0, 1, 2]


def test_unlike_hdf5_files_are_refused_or_brought_together(tmp_path: Path) -> None:
    for number, more in enumerate(("infos/qpos", "infos/qvel")):
        with h5py.File(tmp_path / f"{number}.hdf5", "w") as file:
            for name in ("observations", "actions", "rewards", more):
                file[name] = np.arange(6.0)
            file["terminals"] = np.arange(6) == 5
            if number:
                file["timeouts"] = np.arange(6) == 2
                file["next_observations"] = np.arange(1.0, 7.0)
    with pytest.raises(SchemaError) as caught:
        rlio.D4RLReader(tmp_path)
    assert caught.value.uri == str(tmp_path / "1.hdf5")
    common = read(rlio.D4RLReader(tmp_path, epochs=1, columns="intersect"))
    assert set(common) == {
        *(
            "obs",
            "actions",
            "rewards",
            "terminateds",
            "truncateds",
            "new_obs",
            "new_obs_valid",
            "eps_id",
            "t",
        ),
    }
    assert common["truncateds"].tolist() == [False] * 8 + [True] + [False] * 3
    assert common["new_obs_valid"].tolist() == [True] * 5 + [False] + [True] * 6
    filled = read(rlio.D4RLReader(tmp_path, epochs=1, columns="fill"))
    assert filled["infos/qpos"].tolist() == [*np.arange(6.0), *[0.0] * 6]
    assert filled["infos/qvel"].tolist() == [*[0.0] * 6, *np.arange(6.0)]


# ---- actions ----

PENDULUM = (gym.spaces.Box(-8, 8, (4,), np.float32), gym.spaces.Box(-2, 2, (1,), np.float32))
SCALED = [[-1.0], [0.0], [0.5], [1.0], [3.0], [-0.5]]


def scaled(**more: Any) -> dict[str, Any]:
    return record(actions=SCALED, prev_actions=SCALED, infos=[{}] * 6, **more)


def test_scaled_actions_of_rllib_are_said_once_and_scaled_back_where_that_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(tmp_path / "a.json", scaled(), scaled())
    batch = read(rlio.JsonReader(path, epochs=1, spaces=PENDULUM))
    assert batch["actions"][:6].tolist() == SCALED
    assert len([text for text in warnings_of(caplog) if "unnormalise_actions" in text]) == 1
    caplog.clear()
    batch = read(rlio.JsonReader(path, epochs=1, spaces=PENDULUM, unnormalise_actions=True))
    for column in ("actions", "prev_actions"):
        assert batch[column][:6].tolist() == [[-2.0], [0.0], [1.0], [2.0], [2.0], [-1.0]]
    assert read(rlio.JsonReader(path, epochs=1, unnormalise_actions=False))["actions"][0] == [-1.0]
    save(path, record())
    read(rlio.JsonReader(path, epochs=1))
    assert [text for text in warnings_of(caplog) if "unnormalise_actions" in text] == []


def test_actions_of_parquet_and_of_several_policies_are_scaled_back(tmp_path: Path) -> None:
    table = pa.table(
        {"obs": [[0.0] * 4] * 6, "actions": SCALED, "rewards": [1.0] * 6, "module_id": ["a"] * 6}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    options: Any = {"epochs": 1, "unnormalise_actions": True}
    batch = read(rlio.ForeignParquetReader(tmp_path, spaces=PENDULUM, **options))
    assert batch["actions"].ravel().tolist() == [-2.0, 0.0, 1.0, 2.0, 2.0, -1.0]
    one = {name: value for name, value in scaled().items() if name != "type"}
    joint = {"type": "MultiAgentBatch", "count": 6, "policy_batches": {"a": one, "b": one}}
    save(tmp_path / "a.json", joint)
    wide = (PENDULUM[0], gym.spaces.Box(-4, 4, (1,), np.float32))
    found: Any = read(rlio.JsonReader(tmp_path, spaces={"a": PENDULUM, "b": wide}, **options))
    assert (found["a"]["actions"][0, 0], found["b"]["actions"][0, 0]) == (-2.0, -4.0)


def test_actions_cannot_be_scaled_back_to_a_space_that_is_not_known(tmp_path: Path) -> None:
    path = save(tmp_path / "a.json", scaled())
    for reader in (rlio.JsonReader, rlio.ForeignParquetReader):
        with pytest.raises(OptionError):
            reader(path, unnormalise_actions=True)
    joint = {"type": "MultiAgentBatch", "count": 6, "policy_batches": {"b": scaled(type=None)}}
    save(path, joint)
    with pytest.raises(OptionError):
        read(rlio.JsonReader(path, epochs=1, spaces={"a": PENDULUM, "c": PENDULUM}, unnormalise_actions=True))


# ---- compressed lines ----


def test_compressed_lines_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "a.jsonl.zst"
    place.write_bytes(zstandard.compress(json.dumps(record()).encode()))
    with pytest.raises(rlio.errors.OptionError):
        rlio.read(place)
    with pytest.raises(rlio.errors.DataNotFound):
        rlio.JsonReader(tmp_path)
    with pytest.raises(CorruptData):
        read(rlio.JsonReader(place, epochs=1))


# ---- methods ----


def test_methods_that_work_in_place_in_rllib_leave_the_batch_as_it_was_here() -> None:
    lengths = rlio.SampleBatch(obs=np.arange(6.0), seq_lens=[2, 4])
    batch = rlio.SampleBatch(obs=np.arange(6.0))
    for call in (
        lambda: batch.shuffle(seed=1),
        lambda: batch.compress(bulk=True),
        lambda: batch.to_device("cpu"),
        lambda: lengths.right_zero_pad(4),
        lambda: batch.compress().decompress_if_needed(),
    ):
        found = call()
        assert found is not batch
        assert found is not lengths
        assert batch["obs"].tolist() == lengths["obs"].tolist() == list(np.arange(6.0))
        assert type(batch["obs"]) is type(lengths["obs"]) is np.ndarray
        assert not lengths.zero_padded


#: The constants of RLlib's SampleBatch; tests/integrations/test_rllib_calls.py compares both.
CONSTANTS = {
    "OBS": "obs",
    "CUR_OBS": "obs",
    "NEXT_OBS": "new_obs",
    "ACTIONS": "actions",
    "REWARDS": "rewards",
    "PREV_ACTIONS": "prev_actions",
    "PREV_REWARDS": "prev_rewards",
    "TERMINATEDS": "terminateds",
    "TRUNCATEDS": "truncateds",
    "DONES": "dones",
    "INFOS": "infos",
    "SEQ_LENS": "seq_lens",
    "T": "t",
    "EPS_ID": "eps_id",
    "ENV_ID": "env_id",
    "AGENT_INDEX": "agent_index",
    "UNROLL_ID": "unroll_id",
    "ACTION_DIST_INPUTS": "action_dist_inputs",
    "ACTION_DIST": "action_dist",
    "ACTION_PROB": "action_prob",
    "ACTION_LOGP": "action_logp",
    "VF_PREDS": "vf_preds",
    "VALUES_BOOTSTRAPPED": "values_bootstrapped",
    "OBS_EMBEDS": "obs_embeds",
    "RETURNS_TO_GO": "returns_to_go",
    "ATTENTION_MASKS": "attention_masks",
}


def test_column_names_are_constants_of_the_batch() -> None:
    batch = rlio.SampleBatch({rlio.SampleBatch.OBS: [1.0], rlio.SampleBatch.EPS_ID: [7]})
    assert {name: getattr(batch, name) for name in CONSTANTS} == CONSTANTS
    assert batch[batch.OBS].tolist() == [1.0]
    assert not hasattr(batch, "__dict__"), "an attribute that is mistyped is refused"


def test_batches_are_joined_by_a_method_of_their_class() -> None:
    """RLlib until 2.3: ``SampleBatch.concat_samples([one, other])``, and of MultiAgentBatch."""
    one, other = rlio.SampleBatch(obs=[1.0, 2.0]), rlio.SampleBatch(obs=[3.0])
    joined = one.concat_samples([one, other])
    assert isinstance(joined, rlio.SampleBatch)
    assert joined["obs"].tolist() == [1.0, 2.0, 3.0]
    agents = rlio.MultiAgentBatch({"a": one}, 2)
    for found in (agents.concat_samples([agents, agents]), rlio.SampleBatch.concat_samples([agents, agents])):
        assert isinstance(found, rlio.MultiAgentBatch)
        assert (found["a"].count, found.count) == (4, 4)
    with pytest.raises(SchemaError, match="batch 1 is a dict"):
        one.concat_samples([one, {}])  # type: ignore[list-item]


def test_zero_pad_is_right_zero_pad() -> None:
    batch = rlio.SampleBatch(obs=[1.0, 2.0, 3.0], state_in_0=[5.0, 6.0], seq_lens=[2, 1])
    for padded in (batch.zero_pad(3), batch.right_zero_pad(3, True), batch.zero_pad(3, exclude_states=True)):
        assert padded["obs"].tolist() == [1.0, 2.0, 0.0, 3.0, 0.0, 0.0]
        assert padded["state_in_0"].tolist() == [5.0, 6.0]
    with pytest.raises(OptionError, match="exclude_states=False"):
        batch.zero_pad(3, False)  # type: ignore[arg-type]


def test_the_page_names_the_methods_that_return_copies(checkout: Path) -> None:
    page = (checkout / "docs/rllib.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("| `SampleBatch.shuffle()`")]
    for name in ("shuffle", "compress", "decompress_if_needed", "right_zero_pad", "to_device"):
        assert name in row
