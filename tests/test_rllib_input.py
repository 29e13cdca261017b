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
from rlio.errors import CorruptData, MissingColumn, OptionError, SchemaError, StateError, UnsafeData
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


@pytest.mark.few(1)
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
    with pytest.raises(rlio.errors.UnknownLayout, match="unpack it"):
        rlio.read(place)
    with pytest.raises(rlio.errors.UnknownLayout, match="unpack it"):
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


# ---- infos ----


def new_record(eps_id: list[int], t: list[int], ends: str = "", **columns: Any) -> dict[str, Any]:
    """A record as RLlib writes it since 2.3: an info came with ``obs``. ``ends``: T, U or - for each row."""
    ends = ends or "-" * len(t)
    return {
        "type": "SampleBatch",
        "obs": [[float(step)] for step in t],
        "new_obs": [[float(step + 1)] for step in t],
        "actions": [0] * len(t),
        "rewards": [1.0] * len(t),
        "terminateds": [end == "T" for end in ends],
        "truncateds": [end == "U" for end in ends],
        "infos": [{"came_with": [episode, step]} for episode, step in zip(eps_id, t, strict=True)],
        "eps_id": eps_id,
        "agent_index": [0] * len(t),
        "t": t,
        **columns,
    }


def came_with(batch: Any) -> list[Any]:
    return [info.get("came_with") for info in batch["infos"]]


# Two environments, whose fragments alternate; episode 1 ends in the second record, 2 and 3 in the third.
FRAGMENTS = [
    new_record([1, 1, 2, 2], [0, 1, 0, 1]),
    new_record([1, 1, 2, 2], [2, 3, 2, 3], "-T--"),
    new_record([3, 3, 2], [0, 1, 4], "-UT"),
]
ALIGNED = [[1, 1], [1, 2], [2, 1], [2, 2], [1, 3], None, [2, 3], [2, 4], [3, 1], None, None]


def test_an_info_of_rllib_is_served_with_the_observation_that_it_came_with(tmp_path: Path) -> None:
    save(tmp_path / "a.json", *FRAGMENTS)
    batch = read(rlio.read(tmp_path, epochs=1))
    assert came_with(batch) == ALIGNED
    for info, episode, new_obs in zip(batch["infos"], batch["eps_id"], batch["new_obs"], strict=True):
        assert info in ({}, {"came_with": [episode, int(new_obs[0])]})


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [{"batch_size": 3}, {"shuffle": True, "seed": 3, "batch_size": 2}, {"columns": ["infos", "eps_id", "t"]}],
)
def test_an_info_does_not_depend_on_how_records_are_read(options: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path / "a.json", *FRAGMENTS[:2])
    save(tmp_path / "b.json", *FRAGMENTS[2:])
    wanted = {(one[0], one[1] - 1): one for one in ALIGNED if one is not None}
    batch = read(rlio.JsonReader(tmp_path, epochs=1, **options))
    assert len(batch) == 11
    for row, info in enumerate(came_with(batch)):
        assert info == wanted.get((batch["eps_id"][row], batch["t"][row]))
    assert set(batch) == set(options.get("columns", FRAGMENTS[0].keys() - {"type"}))
    assert_resumes(lambda: rlio.JsonReader(tmp_path, epochs=2, **options))


def test_shards_of_a_recording_have_the_same_infos_as_all_of_it(tmp_path: Path) -> None:
    save(tmp_path / "a.json", *FRAGMENTS)
    parts = [read(rlio.JsonReader(tmp_path, epochs=1, shard=(rank, 2))) for rank in range(2)]
    assert came_with(parts[0]) == ALIGNED[:4] + ALIGNED[8:]
    assert came_with(parts[1]) == ALIGNED[4:8]


def test_infos_of_several_policies_and_agents_are_aligned_one_by_one(tmp_path: Path) -> None:
    def several(*parts: dict[str, Any]) -> dict[str, Any]:
        found = {f"p{i}": {k: v for k, v in part.items() if k != "type"} for i, part in enumerate(parts)}
        return {"type": "MultiAgentBatch", "count": 4, "policy_batches": found}

    # Agents 0 and 1 have one policy and take turns; their first info is nested, as RLlib leaves it.
    infos = [{"0": {"agent": {}}}, {"a": 1}, {"0": {"agent": {}}}, {"b": 1}]
    both = new_record([1, 1, 1, 1], [0, 2, 1, 3], "----", agent_index=[0, 0, 1, 1], infos=infos)
    more = new_record([1, 1], [4, 5], "TT", agent_index=[1, 0], infos=[{"b": 2}, {"a": 2}])
    save(tmp_path / "a.json", several(both, FRAGMENTS[0]), several(more, FRAGMENTS[1]))
    first, second = rlio.read(tmp_path, epochs=1)
    assert first["p0"]["infos"].tolist() == [{"a": 1}, {"a": 2}, {"b": 1}, {"b": 2}]
    assert second["p0"]["infos"].tolist() == [{}, {}]
    assert came_with(first["p1"]) == ALIGNED[:4]


def test_infos_of_files_with_dones_and_of_single_steps_stay_where_they_are(tmp_path: Path) -> None:
    old = record(rows=3, infos=[{"a": i} for i in range(3)])
    both = record(rows=3, infos=[{"a": i} for i in range(3)], terminateds=[False, False, True])
    for number, one in enumerate((old, both)):
        path = save(tmp_path / f"{number}.json", one)
        assert read(rlio.read(path, epochs=1))["infos"].tolist() == [{"a": i} for i in range(3)]
    steps = [{"obs": [0.5], "rewards": 1.0, "terminateds": i == 1, "infos": {"a": i}} for i in range(2)]
    assert read(rlio.read(save(tmp_path / "steps.json", *steps), epochs=1))["infos"].tolist() == [
        {"a": 0},
        {"a": 1},
    ]


def test_a_format_option_says_what_infos_belong_to(tmp_path: Path) -> None:
    new = save(tmp_path / "new.json", *FRAGMENTS)
    kept = read(rlio.read(new, epochs=1, format_options={"infos": "new_obs"}))
    assert came_with(kept)[:4] == [[1, 0], [1, 1], [2, 0], [2, 1]]
    old = save(tmp_path / "old.json", record(rows=3, infos=[{"a": i} for i in range(3)]))
    moved = read(rlio.read(old, epochs=1, format_options={"infos": "obs"}))
    assert moved["infos"].tolist() == [{"a": 1}, {"a": 2}, {}]
    assert_resumes(lambda: rlio.JsonReader(new, epochs=1, format_options={"infos": "new_obs"}))
    with rlio.JsonReader(new) as plain:
        state = plain.state_dict()
    other = rlio.JsonReader(new, format_options={"infos": "new_obs"})
    with other, pytest.raises(StateError, match="format_options"):
        other.load_state_dict(state)


@pytest.mark.parametrize("options", [{"infos": "action"}, {"infos": None, "info": "obs"}, {"infos": True}])
def test_an_unknown_format_option_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    path = save(tmp_path / "a.json", *FRAGMENTS)
    with pytest.raises(OptionError, match=r"infos"):
        rlio.JsonReader(path, format_options=options)
    pq.write_table(
        pa.table({"obs": [0.5], "infos": [{"a": 1}], "terminateds": [True]}), tmp_path / "a.parquet"
    )
    with pytest.raises(OptionError, match=r"infos"):
        rlio.ForeignParquetReader(tmp_path, format_options=options)


def test_infos_of_single_steps_in_parquet_are_not_moved_even_if_that_is_asked_for(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"obs": [0.5], "infos": [{"a": 1}], "terminateds": [True]}), tmp_path / "a.parquet"
    )
    assert read(rlio.ForeignParquetReader(tmp_path, epochs=1))["infos"].tolist() == [{"a": 1}]
    with pytest.raises(OptionError, match="single steps"):
        rlio.ForeignParquetReader(tmp_path, format_options={"infos": "obs"})


def test_damage_in_the_next_record_does_not_spoil_the_infos_of_this_one(tmp_path: Path) -> None:
    path = save(tmp_path / "a.json", FRAGMENTS[0])
    for damage in (b"{", b'{"type": "MultiAgentBatch", "infos": [{"a": 1}], "policy_batches": 3}', b"[1]"):
        path.write_bytes(json.dumps(FRAGMENTS[0]).encode() + b"\n" + damage + b"\n")
        with rlio.JsonReader(path, epochs=1) as reader:
            assert came_with(reader.sample()) == [[1, 1], None, [2, 1], None]
            with pytest.raises(CorruptData):
                reader.sample()
    path.write_text(json.dumps({**new_record([1, 1], [0, 1]), "eps_id": [1]}) + "\n")
    with pytest.raises(SchemaError, match="eps_id"):
        rlio.JsonReader(path, epochs=1).sample()


def test_infos_of_a_mixture_of_live_and_logged_rows_have_one_meaning(tmp_path: Path) -> None:
    class Counting(gym.Env[Any, Any]):
        observation_space, action_space = gym.spaces.Box(0, 9, (1,)), gym.spaces.Discrete(2)

        def reset(self, **options: Any) -> Any:
            self.t = 0
            return np.zeros(1, np.float32), {"came_with": [0, 0]}

        def step(self, action: Any) -> Any:
            self.t += 1
            return np.full(1, self.t, np.float32), 1.0, self.t == 4, False, {"came_with": [0, self.t]}

    episode = new_record([1, 1, 1, 1], [0, 1, 2, 3], "---T")
    path = save(tmp_path / "logged.json", *[{**episode, "eps_id": [i] * 4} for i in range(1, 6)])
    rollout = rlio.RolloutConfig(record_infos=True, rollout_fragment_length=8)
    policy = rlio.RandomPolicy()
    with rlio.RolloutWorker(
        Counting, policy, input={"sampler": 0.5, str(path): 0.5}, rollout=rollout, seed=0
    ) as worker:
        batch = worker.sample(40)
    given = [info for info in came_with(batch) if info is not None]
    assert len(given) >= 35
    for info, new_obs in zip(batch["infos"], batch["new_obs"], strict=True):
        assert info == {} or info["came_with"][1] == new_obs[0]


def test_infos_of_json_for_rllib_come_back_and_are_in_rllibs_order_for_rllib(tmp_path: Path) -> None:
    infos = [{"came_with": [1, step + 1]} for step in range(3)]
    columns = {**new_record([1, 1, 1], [0, 1, 2], "--T"), "infos": np.array(infos, object)}
    with rlio.ParquetWriter(tmp_path / "own") as writer:
        writer.write(rlio.SampleBatch({name: np.array(v) for name, v in columns.items() if name != "type"}))
    rlio.convert(tmp_path / "own", tmp_path / "json", to="rllib-json", prove=True)
    assert came_with(read(rlio.read(tmp_path / "json", epochs=1))) == [[1, 1], [1, 2], [1, 3]]
    for columns_asked in (["infos"], ["infos", "obs"]):
        again = read(rlio.JsonReader(tmp_path / "json", epochs=1, columns=columns_asked))
        assert (set(again), came_with(again)) == (set(columns_asked), [[1, 1], [1, 2], [1, 3]])
    (file,) = (tmp_path / "json").glob("*.json")
    assert json.loads(file.read_text())["infos"] == [{}, *infos[:2]]
    rlio.convert(tmp_path / "json", tmp_path / "back", prove=True)
    assert came_with(read(rlio.read(tmp_path / "back", epochs=1, shuffle=False))) == [[1, 1], [1, 2], [1, 3]]


# ---- RLlib's output="dataset" ----

DATASET = Path(__file__).with_name("golden") / "formats/rllib-dataset"


def test_parquet_with_pickled_objects_of_one_agent_is_read() -> None:
    batch = read(rlio.read(DATASET / "one-agent.parquet", epochs=1))
    assert batch["infos"].tolist() == [{"a": 1}, {"a": 2}, {}, {"a": 1}, {}]
    assert batch["obs"][:, 0].tolist() == [0.0, 4.0, 8.0, 1.0, 5.0]
    kept = read(rlio.read(DATASET / "one-agent.parquet", epochs=1, format_options={"infos": "new_obs"}))
    assert kept["infos"][0] == {0: {"agent0": {"x": 1}}}


def test_parquet_with_pickled_objects_of_several_policies_is_read() -> None:
    first, second = rlio.read(DATASET / "two-policies.parquet", epochs=1)
    for batch in (first, second):
        assert batch.env_steps() == 3
        assert batch["p0"]["infos"].tolist() == [{"a": 1}, {"a": 2}, {}]
        assert batch["p1"]["obs"].dtype == np.float32
        assert batch["p1"]["obs"][:, 0].tolist() == [1.0, 5.0]


def pickled(path: Path, value: bytes) -> Path:
    """Steps with a column of objects, as Ray Data stores it."""
    marks = {b"ARROW:extension:name": b"ray.data.arrow_pickled_object", b"ARROW:extension:metadata": b""}
    field = pa.field("extra", pa.large_binary(), metadata=marks)
    arrays = [pa.array([[0.5]]), pa.array([1.0]), pa.array([0]), pa.array([value], pa.large_binary())]
    names = [
        pa.field("obs", arrays[0].type),
        pa.field("rewards", pa.float64()),
        pa.field("actions", pa.int64()),
    ]
    pq.write_table(pa.Table.from_arrays(arrays, schema=pa.schema([*names, field])), path)
    return path


def test_pickled_objects_in_steps_are_read_and_run_nothing(tmp_path: Path) -> None:
    import os
    import pickle

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    path = pickled(tmp_path / "a.parquet", pickle.dumps({"a": np.arange(3)}, 5))
    assert read(rlio.ForeignParquetReader(path, epochs=1))["extra"]["a"].tolist() == [[0, 1, 2]]
    for damage, kind in ((pickle.dumps(Evil(), 5), UnsafeData), (b"\x80\x05", CorruptData)):
        with pytest.raises(kind, match="extra"):
            read(rlio.ForeignParquetReader(pickled(tmp_path / "b.parquet", damage), epochs=1))
    assert not (tmp_path / "made").exists()
