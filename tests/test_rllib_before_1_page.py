"""docs/rllib-before-1.md: every name of RLlib's first evaluators and workers has a row, in their own order.

The names are those of ``PolicyEvaluator`` in ray 0.5.3 and 0.6.6 and of ``RolloutWorker`` in ray 0.8.7, read
from their sources: the arguments of the constructor, the public methods, the public attributes.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

import rlio
from rlio.sampling import PolicySetup, WorkerPlace

PAGE = Path(__file__).resolve().parent.parent / "docs" / "rllib-before-1.md"

#: Version -> (arguments of the constructor, methods), in their order.
NAMES = {
    "0.5": (
        "env_creator policy_graph policy_mapping_fn policies_to_train tf_session_creator batch_steps "
        "batch_mode episode_horizon preprocessor_pref sample_async compress_observations num_envs "
        "observation_filter clip_rewards env_config model_config policy_config worker_index monitor_path",
        "sample sample_with_count for_policy foreach_policy foreach_trainable_policy sync_filters "
        "get_filters get_weights set_weights compute_gradients apply_gradients compute_apply save restore "
        "set_global_vars get_host apply as_remote",
    ),
    "0.6": (
        "env_creator policy_graph policy_mapping_fn policies_to_train tf_session_creator batch_steps "
        "batch_mode episode_horizon preprocessor_pref sample_async compress_observations num_envs "
        "observation_filter clip_rewards clip_actions env_config model_config policy_config worker_index "
        "monitor_path log_dir log_level callbacks input_creator input_evaluation output_creator "
        "remote_worker_envs remote_env_batch_wait_ms soft_horizon _fake_sampler",
        "sample sample_with_count get_weights set_weights compute_gradients apply_gradients learn_on_batch "
        "get_metrics foreach_env get_policy for_policy foreach_policy foreach_trainable_policy "
        "sync_filters get_filters save restore set_global_vars export_policy_model "
        "export_policy_checkpoint stop get_host apply as_remote get_global_evaluator",
    ),
    "0.8": (
        "env_creator policy policy_mapping_fn policies_to_train tf_session_creator rollout_fragment_length "
        "batch_mode episode_horizon preprocessor_pref sample_async compress_observations num_envs "
        "observation_fn observation_filter clip_rewards clip_actions env_config model_config policy_config "
        "worker_index num_workers monitor_path log_dir log_level callbacks input_creator input_evaluation "
        "output_creator remote_worker_envs remote_env_batch_wait_ms soft_horizon no_done_at_end seed "
        "extra_python_environs fake_sampler",
        "sample sample_with_count get_weights set_weights compute_gradients apply_gradients learn_on_batch "
        "sample_and_learn get_metrics foreach_env get_policy for_policy foreach_policy "
        "foreach_trainable_policy sync_filters get_filters save restore set_global_vars get_global_vars "
        "export_policy_model import_policy_model_from_h5 export_policy_checkpoint stop creation_args "
        "get_host apply setup_torch_data_parallel get_node_ip find_free_port as_remote get_global_worker",
    ),
}
ATTRIBUTES = (
    "env async_env policy_map filters preprocessors preprocessing_enabled sampler input_reader "
    "output_writer io_context reward_estimators multiagent global_vars last_batch tf_sess env_creator "
    "policies_to_train policy_config batch_mode compress_observations num_envs callbacks worker_index "
    "num_workers rollout_fragment_length sample_batch_size batch_steps fake_sampler"
)
#: Names of the classes around them, of configs, metrics and files.
AROUND = (
    "PolicyEvaluator RolloutWorker EvaluatorInterface evaluator_cls evaluator_args sample_batch_size "
    "policy_graphs input_evaluation_method on_postprocess_traj with_vector_index AsyncVectorEnv wrap_async "
    "poll send_actions try_reset get_unwrapped BaseEnv VectorEnv vector_reset reset_at vector_step "
    "ServingEnv ExternalEnv run start_episode get_action log_action log_returns end_episode max_concurrent "
    "PolicyServer PolicyClient MultiAgentEnv with_agent_groups wrap_deepmind register_env PolicyGraph "
    "TFPolicyGraph TorchPolicyGraph compute_actions compute_single_action postprocess_trajectory "
    "get_initial_state get_state set_state on_global_var_update export_model export_checkpoint soft_reset "
    "policy_for last_observation_for last_raw_obs_for last_info_for last_action_for prev_action_for "
    "prev_reward_for rnn_state_for last_pi_info_for new_batch_builder add_extra_batch batch_builder "
    "total_reward length episode_id agent_rewards custom_metrics user_data hist_data SampleBatchBuilder "
    "MultiAgentSampleBatchBuilder policy_batches compress decompress_if_needed dones collect_metrics "
    "collect_episodes summarize_episodes episode_reward_mean policy_reward_mean num_metric_batches_dropped "
    "V_prev V_step_IS V_step_WIS V_gain_est JsonReader JsonWriter MixedInput ShuffledInput IOContext"
)


@cache
def rows() -> list[tuple[str, str, str, str]]:
    """(section, names, versions, what rlio has) of each row."""
    found, section = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line[3:]
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 3 and cells[0] != "name":
            found.append((section, *cells))
    return found


def names_of(cell: str) -> list[str]:
    """The names in a cell, and in code spans of calls and attributes, their parts."""
    spans = re.findall(r"`([^`]+)`", cell)
    return [name for span in spans for name in re.findall(r"[A-Za-z_]\w*", span)]


def first_rows(section: str | None = None) -> dict[str, int]:
    """Name -> number of the first row whose first cell has it."""
    found: dict[str, int] = {}
    for number, (own, names, _, _) in enumerate(rows()):
        for name in names_of(names) if section in (None, own) else ():
            found.setdefault(name, number)
    return found


@pytest.mark.parametrize("version", NAMES)
def test_every_argument_and_method_has_a_row_in_its_own_order(version: str) -> None:
    arguments, methods = NAMES[version]
    constructor, others = first_rows("The constructor"), first_rows("Methods")
    assert not [name for name in arguments.split() if name not in constructor]
    both = {**constructor, **others}
    assert not [name for name in methods.split() if name not in both]
    if version == "0.8":  # The order of the earlier ones differs.
        joined = {"num_workers", "get_node_ip", "find_free_port"}  # In rows of names that come before them.
        for names, own in ((arguments, constructor), (methods, others)):
            places = [own[name] for name in names.split() if name in own and name not in joined]
            assert places == sorted(places)


@pytest.mark.parametrize("names", [ATTRIBUTES, AROUND], ids=["attributes", "around"])
def test_every_other_name_of_rllib_before_1_has_a_row(names: str) -> None:
    known = first_rows()
    assert not [name for name in names.split() if name not in known]


def test_every_row_says_where_the_name_is_or_why_it_is_not() -> None:
    assert len(rows()) > 100
    for _, names, versions, here in rows():
        assert names_of(names) or names.startswith("files"), names
        assert re.search(r"0\.[568]", versions), names
        assert len(here) > 7, names
        assert not here.startswith("none") or ": " in here or here.startswith("none to subclass"), names


def test_an_unchanged_row_keeps_the_old_name() -> None:
    fields = {field.name for field in dataclasses.fields(rlio.RolloutConfig)}
    for section, names, _, here in rows():
        if here.startswith("the same field"):
            assert set(names_of(names)) <= fields, names
        elif section == "Methods" and here.startswith("the same"):
            first = [span.partition("(")[0] for span in re.findall(r"`([^`]+)`", names)]
            assert all(hasattr(rlio.RolloutWorker, name) for name in first), names


def test_keywords_and_methods_of_the_page_exist() -> None:
    owners = {"RolloutConfig": rlio.RolloutConfig, "PolicySetup": PolicySetup, "WorkerPlace": WorkerPlace}
    text = "\n".join(here for *_, here in rows())
    for owner, arguments in re.findall(r"\b(\w+)\(((?:\w+=[^()`]*,? ?)+)", text):
        known = inspect.signature(owners[owner]).parameters if owner in owners else {}
        assert not [name for name in re.findall(r"(\w+)=", arguments) if known and name not in known], owner
    worker = rlio.RolloutWorker("CartPole-v1", rlio.RandomPolicy(), seed=0)
    with worker:
        for name in re.findall(r"`worker((?:\.\w+)+)", text):
            found: object = worker
            for part in name[1:].split("."):
                found = getattr(found, part)
