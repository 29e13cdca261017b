"""docs/rllib.md: each row of its tables is checked, by tests of this module or by those that are named here.

`CHECKS` has, section by section, the beginning of a row's first cell and the tests that show what the row
says, as ``file:name`` for ``tests/test_<file>.py::test_<name>``; without a file they are in this module.
Besides, the names and keywords that the page gives exist, what it calls the same has the name and the
arguments that it has in RLlib, and what has no counterpart is not there under RLlib's name.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import rlio
import rlio.distributed
import rlio.evaluation
from rlio.batch.columns import Columns
from rlio.envs.context import EnvContext
from rlio.policies.checkpoint import load_state, save_state
from rlio.policies.random_policy import RandomPolicy
from rlio.sampling.callbacks import RunningEpisode
from rlio.sampling.metrics import RolloutMetrics
from rlio.serving.policy_server import ServerLimits

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "rllib.md"


class Row(NamedTuple):
    """A row of a table: its section, and the cells for RLlib and for rlio."""

    section: str
    theirs: str
    ours: str

    @property
    def is_absent(self) -> bool:
        """Whether the row says that there is no counterpart."""
        return self.ours.startswith("none")


@cache
def rows() -> tuple[Row, ...]:
    found, section = [], ""
    lines = PAGE.read_text().splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("## "):
            section = line[3:]
        is_rule = bool(re.fullmatch(r"\|[-| ]+\|", line))
        if not line.startswith("|") or is_rule or re.fullmatch(r"\|[-| ]+\|", following):
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        found.append(Row(section, cells[0], cells[1].replace(r"\|", "|")))
    return tuple(found)


#: Section, rows, and tests; parsed by `checks`.
CHECKS = """
##
`config.offline_data(output="out")`
    the_first_table_runs
`config.offline_data(input_="out")`
    the_first_table_runs
`input_={"sampler"
    the_first_table_runs
`JsonReader(path, ioctx)`
    the_first_table_runs
`JsonWriter(path, ioctx)`
    the_first_table_runs
## Choosing an input
`"sampler"`
    resolve:the_sampler_is_the_workers_own
a directory
    json_reader:folders_globs_lists_and_uris_name_the_same_records
    resolve:a_path_opens_the_reader_of_what_is_there
`{"sampler": 0.4
    resolve:pairs_are_a_mixture_too_and_nest
    mixing_exact:stores_streams_and_live_samplers_mix_exactly_and_every_row_says_where_it_is_from
a function of `IOContext`
    resolve:a_function_gets_the_context
a name given to
    resolve:a_registered_name_wins_over_a_folder_and_a_dot_means_the_folder
    plugin_seam:an_installed_package_is_found_by_name_on_both_sides
a class path
    resolve:a_class_gets_the_options_as_keywords
    resolve:a_reader_is_itself
`"d4rl.
    d4rl_reader:every_row_comes_once_with_its_successor_within_the_episode
    json_reader:a_path_with_d4rl_in_it_is_a_path
`"dataset"` with `input_config=
    resolve:a_path_opens_the_reader_of_what_is_there
    json_reader:a_data_set_of_rlio_is_refused_with_the_reader_that_reads_it
`"dataset"` with `loader_fn`
    resolve:a_function_gets_the_context
a zip file
    json_reader:zip_files_are_read_where_they_lie_and_never_extracted
## Options of reading
`train_batch_size`
    json_reader:batches_have_exactly_the_size_asked_for_across_records_and_epochs
    json_reader:records_are_served_as_they_were_written
`shuffle_buffer_size`
    worker:batches_are_shuffled_in_windows
    shuffled_input:one_pass_gives_exactly_the_childs_batches_for_any_window
`postprocess_inputs=True`
    worker:logged_trajectories_are_postprocessed_if_asked_for
`clip_actions`
    worker:logged_actions_are_clipped_and_scaled_as_configured_and_live_ones_are_not
    actions:both_work_on_every_batch_of_a_mapped_input
`actions_in_input_normalized=False`
    actions:normalising_is_the_inverse_of_unsquashing
    worker:logged_actions_are_clipped_and_scaled_as_configured_and_live_ones_are_not
`normalize_actions=True`
    rllib_input:scaled_actions_of_rllib_are_said_once_and_scaled_back_where_that_is_asked_for
    rllib_input:actions_of_parquet_and_of_several_policies_are_scaled_back
files of one folder
    rllib_input:files_with_unlike_columns_are_refused_when_they_are_opened
    rllib_input:the_columns_that_all_files_have_are_served_and_truncateds_with_them
    rllib_input:the_columns_that_some_files_have_are_filled_in_the_others
    rllib_input:a_list_of_columns_means_those_columns
    rllib_input:unlike_parquet_files_are_refused_or_brought_together
    rllib_input:unlike_hdf5_files_are_refused_or_brought_together
the policy's spaces
    json_reader:spaces_give_structure_and_dtypes_back
    foreign_parquet:spaces_give_structure_and_dtypes
the worker's share
    json_reader:ranks_get_each_record_once_whatever_their_number
    resolve:workers_get_disjoint_shards_and_their_seed
`input_config={...}`
    resolve:an_unknown_option_of_a_file_reader_raises
## Choosing an output
`None`
    resolve:no_output_keeps_nothing
a path or URI
    resolve:an_output_path_is_a_data_set_that_reads_back
    resolve:a_writer_is_itself_and_functions_and_names_get_the_context
`"logdir"`
    resolve:logdir_is_the_workers_log_folder
`"dataset"` with `{"format": "parquet"
    resolve:an_output_path_is_a_data_set_that_reads_back
`"dataset"` with `{"format": "json"
    json_writer:one_write_is_one_line_behind_the_provenance
a function of `IOContext`
    resolve:a_writer_is_itself_and_functions_and_names_get_the_context
-
    outputs:a_noop_output_counts_and_keeps_nothing
    outputs:a_writer_that_fails_does_not_keep_the_others_from_receiving
## Options of writing
`output_max_file_size`
    parquet_writer:a_shard_ends_at_max_bytes
`max_num_samples_per_file`
    parquet_writer:shards_of_plain_rows_have_exactly_max_rows
-
    parquet_writer:rows_are_stored_when_they_are_old_enough_without_another_call
`output_compress_columns=
    json_writer:compressed_columns_are_blobs_and_the_others_stay_readable
    parquet_writer:every_codec_comes_back
`compress_observations`
    worker:observations_are_compressed_after_they_were_written
`infos`
    env_runner:infos_are_left_out_unless_asked_for
    rllib_input:an_info_of_rllib_is_served_with_the_observation_that_it_came_with
`output_filesystem`
    options_of_stores_reach_readers_and_writers
`output_config={...}`
    resolve:an_unknown_option_of_the_writer_raises_and_names_the_known_ones
## The new API stack: `OfflineData`
`input_read_method`
    resolve:a_reader_is_itself
`input_read_schema=
    columns_are_renamed_by_a_function
`input_filesystem`
    options_of_stores_reach_readers_and_writers
`input_spaces_jsonable`
    spaces:every_space_comes_back_exactly
`offline_data_class`
    plugin_seam:a_plugin_mixes_with_what_rlio_ships
`ignore_final_observation`
    env_runner:a_missing_final_observation_is_never_invented
## Rollout workers
`env_creator`
    resolve:workers_get_disjoint_shards_and_their_seed
    env_runner:an_environment_can_be_named_in_several_ways
`worker_index`
    interfaces:a_local_worker_reads_alone_and_others_share
    worker_live:makers_of_environments_know_whether_the_worker_replaces_another
`spaces`
    worker_policies:the_setup_gives_class_and_spaces_to_those_without
kinds of environments
    worker_external:an_external_environment_is_sampled_like_any_other
    worker_multi_agent:one_policy_acts_for_all_agents_of_an_environment_that_is_seen_to_have_several
    pettingzoo:agents_of_a_parallel_environment_end_each_for_itself
`policies={id
    worker_policies:a_policy_is_given_in_any_form_and_takes_the_environments_spaces
    policy_map:policies_are_given_in_many_forms
`policy_mapping_fn`
    multi_agent_runner:the_mapping_is_asked_once_an_agent_and_episode_and_sees_the_episode
    policy_group:only_policies_to_train_learn
a multi-agent config
    worker_multi_agent:policies_and_environments_that_do_not_go_together_are_refused
`policy_map_capacity`
    policy_map:upstreams_policy_map_row_capacity_two_of_six
    policy_group:policies_that_are_swapped_out_learn_and_keep_what_they_learned
worker 0 without
    worker_policies:a_worker_without_an_environment_learns_and_has_nothing_to_sample
`ParallelIteratorWorker`
    worker_policies:a_worker_is_an_iterator_of_its_batches
`seed`
    worker:workers_with_one_seed_sample_differently_and_the_same_each_time
    nothing_global_is_seeded
`preprocessor_pref
    connectors:flat_observations_are_those_of_gymnasium
    connectors:one_hot_changes_discrete_leaves_only
`clip_rewards`
    worker_live:clipped_rewards_are_in_batches_and_not_in_metrics
`normalize_actions`
    worker_live:batches_have_the_policys_own_actions
`observation_filter="MeanStdFilter"`
    connectors_mean_std:threads_may_share_a_filter
    connectors_mean_std:batches_of_any_size_give_what_single_values_give
`num_envs_per_worker`
    worker_live:vectorised_environments_are_counted_together
`rollout_fragment_length="auto"`
    env_runner_sampling:an_auto_fragment_shares_out_the_train_batch
`batch_mode`
    worker_live:complete_episodes_are_packed_and_not_cut
    callback_order:a_batch_of_whole_episodes_has_a_fragment_of_each_environment
    multi_agent_runner:steps_may_be_counted_by_agents
`sampler_perf_stats_ema_coef`
    metrics:performance_is_milliseconds_a_step
`fake_sampler`
    worker_policies:a_fake_sampler_gives_its_first_batch_forever_and_writes_it_once
`sample_async`
    worker_external:a_sampler_that_runs_ahead_gives_and_records_the_same_rows
    worker_external:policies_do_not_act_while_they_learn_or_change
    worker_external:learning_on_the_policy_itself_does_not_overlap_its_acting_in_a_thread
`input_evaluation=
    input_evaluation:is_and_wis_are_step_wise_as_in_rllib
    worker_policies:a_simulation_runs_beside_what_is_read_and_is_served_to_nobody
`sample()`
    worker:exactly_what_is_served_is_written_whatever_sizes_are_asked_for
    worker_policies:callbacks_have_samples_before_they_are_written_and_cut
`sample_with_count()`
    worker_policies:a_batch_comes_with_its_count
`sample_and_learn(
    worker_policies:sample_and_learn_takes_exactly_so_many_steps_in_shuffled_parts
    numbers_of_several_passes_are_averaged_over_all_parts
`learn_on_batch`
    policy_group:results_are_by_policy_unless_the_default_policy_is_the_only_one
    policy_group:a_policy_without_rows_does_not_learn
`compute_gradients(samples
    policy_group:gradients_have_a_batch_count_and_can_be_applied_elsewhere
    policy_group:results_are_by_policy_unless_the_default_policy_is_the_only_one
`get_metrics()`
    worker_live:metrics_are_drained_and_summarised_over_workers
`foreach_env`
    worker_live:functions_are_called_for_each_environment
`get_policy`
    worker_policies:policies_are_added_and_removed
    policy_group:nobody_knows_a_policy_that_was_removed
`set_policy_mapping_fn`
    worker_policies:policies_to_train_and_mapping_change_on_the_fly
`for_policy`
    policy_group:functions_are_called_for_policies_with_their_ids
`get_filters(flush_after)`
    worker_live:filters_are_synchronised
`get_state`
    worker_policies:a_saved_worker_is_restored_with_its_policies_functions_and_counts
    worker_policies:components_are_saved_and_restored_by_name
    worker_policies:a_checkpoint_is_two_files
    worker_policies:only_policies_that_learn_are_saved_if_asked_for
    policy_group:what_has_no_name_is_left_out_of_a_state_with_a_warning
`get_weights(policies
    policy_group:results_are_by_policy_unless_the_default_policy_is_the_only_one
    policy_group:of_an_only_policy_that_does_not_learn_nothing_is_given_and_nothing_is_taken
    policy_group:only_policies_to_train_learn
`set_weights(weights
    worker_policies:weights_and_global_vars_arrive_together
    policy_group:weights_are_taken_if_they_are_newer
`get_global_vars`
    worker_live:the_steps_of_a_worker_are_in_its_global_vars
    distributed_group:epsilon_in_a_group_falls_with_the_steps_of_all_workers
`lock`
    worker_policies:the_lock_keeps_other_threads_out
    worker_policies:a_function_is_applied_to_the_worker
    worker:stopping_closes_all_parts_once
`setup_torch_data_parallel`
    worker_policies:policies_that_learn_join_other_processes
`creation_args()`
    worker_policies:a_worker_says_what_it_was_made_with
`assert_healthy`
    worker_live:a_stopped_worker_is_not_healthy
    worker_multi_agent:spaces_are_those_of_policies_and_of_agents
`export_policy_model`
    worker_policies:policies_are_exported_and_imported
`PolicyEvaluator`
    policy_group:gradients_have_a_batch_count_and_can_be_applied_elsewhere
## Sampling
`SampleBatch.shuffle()`
    rllib_input:methods_that_work_in_place_in_rllib_leave_the_batch_as_it_was_here
`SampleBatch.OBS`
    rllib_input:column_names_are_constants_of_the_batch
    rllib_input:batches_are_joined_by_a_method_of_their_class
`SampleBatch.timeslices(k)`
    rllib_input:zero_pad_is_right_zero_pad
    batch:sequences_slices_by_sequence_in_every_layout
`SamplerInput.next`
    sampler_input:a_batch_is_a_fragment_and_left_over_rows_are_kept
`SyncSampler`
    external:a_black_hole_swallows_what_nobody_takes
    external:the_queue_is_bounded
`mean_raw_obs_processing_ms`
    metrics:performance_is_milliseconds_a_step
agent connectors
    env_runner_sampling:the_environment_gets_what_action_connectors_make_and_the_batch_what_the_policy_said
`off_policy_actions`
    external:logged_actions_are_recorded_and_not_called_the_policys
what the policy gave
    env_runner:actions_are_recorded_as_given_and_sent_as_configured
fragments that span
    policy_learning:values_are_recorded_and_advantages_follow_from_them
    postprocessing:values_are_asked_for_once_and_only_where_a_trajectory_goes_on
    env_runner:every_recorded_row_is_a_true_transition
complete episodes
    env_runner:truncate_mode_gives_exactly_the_fragment_and_complete_mode_packs_episodes
the warning of
    env_runner_sampling:a_batch_that_waits_for_long_episodes_warns_once
`unroll_id`
    env_runner:unroll_ids_are_never_used_again_and_mark_the_pieces_of_episodes
    worker_live:unroll_ids_of_batches_and_workers_are_disjoint
    states_are_whole:rows_after_the_save_and_rows_after_the_restore_share_no_unroll_id
`training_enabled`
    env_runner_callbacks:episodes_that_are_not_for_training_are_in_no_batch
exploration hooks
    env_runner_callbacks:policies_are_told_of_episodes
`EpisodeV2`
    callbacks:an_episode_knows_who_acts_for_whom
    multi_agent_runner:callbacks_get_to_know_the_episodes_and_metrics_what_they_left
`postprocess_episode`
    multi_agent_runner:postprocessing_sees_the_other_agents_and_changes_its_own_rows_only
`horizon`
    env_runner_sampling:at_the_horizon_an_episode_is_truncated_and_the_environment_reset
    env_runner_sampling:at_a_soft_horizon_the_environment_goes_on_in_another_episode
    env_runner_sampling:no_row_says_that_its_episode_ended
`observation_fn`
    connectors:the_space_behind_a_function_is_found_out_from_samples
`SampleBatchBuilder`
    batch_builder:rows_and_batches_keep_their_order
    batch_builder:rows_go_to_the_policies_of_their_agents
`chop_into_sequences`
    replay_store:burn_in_precedes_what_is_trained_and_overlap_repeats_it
    batch:rows_after_a_sequence_are_zero
    env_runner_callbacks:sequences_have_the_state_that_they_began_with
rendering
    envs_seeding:frames_go_into_the_media_of_episodes
## Columns of a batch
`obs`, `new_obs`
    columns_are_there_always_or_with_the_option_that_the_page_names
`infos`, if
    columns_are_there_always_or_with_the_option_that_the_page_names
`prev_actions`
    columns_are_there_always_or_with_the_option_that_the_page_names
`unroll_id`, `agent_index`
    columns_are_there_always_or_with_the_option_that_the_page_names
`weights_seq_no`
    columns_are_there_always_or_with_the_option_that_the_page_names
`vf_preds`
    columns_are_there_always_or_with_the_option_that_the_page_names
`state_in_0`
    env_runner_callbacks:sequences_have_the_state_that_they_began_with
-
    columns_are_there_always_or_with_the_option_that_the_page_names
`t` of agents
    callback_order:t_is_the_step_in_which_an_agent_acted
## Callbacks and metrics
`worker`
    callbacks:callbacks_with_rllibs_arguments_get_what_there_is_of_them
`base_env`
    callbacks:callbacks_with_rllibs_arguments_get_what_there_is_of_them
`env_context`
    callbacks:callbacks_with_rllibs_arguments_get_what_there_is_of_them
    callbacks:callbacks_with_the_arguments_of_rllibs_new_stack_get_what_there_is_of_them
`policies`, `rl_module`
    callbacks:callbacks_with_the_arguments_of_rllibs_new_stack_get_what_there_is_of_them
`prev_episode_chunks`
    callbacks:callbacks_with_the_arguments_of_rllibs_new_stack_get_what_there_is_of_them
the argument `metrics_logger`
    callbacks:an_argument_that_rlio_does_not_have_is_refused_when_callbacks_are_given
`algorithm`
    callbacks:an_argument_that_rlio_does_not_have_is_refused_when_callbacks_are_given
a method without
    callbacks:a_callback_gets_only_the_arguments_that_it_names
`config.callbacks(
    callbacks:callbacks_may_be_functions_by_name
`"callbacks": {
    callbacks:functions_of_rllib_0_8_get_one_dict
    callbacks:functions_that_nobody_could_call_are_refused
`on_environment_created`
    env_runner_callbacks:environments_are_told_of_when_they_are_made
    policy_group:policies_are_announced_when_they_have_their_spaces
`on_episode_created`
    env_runner_callbacks:the_last_step_of_an_episode_is_a_step
    callback_order:callbacks_are_called_in_the_order_of_rllib
    env_runner_callbacks:callbacks_get_to_know_each_episode_from_beginning_to_end
    env_runner_callbacks:the_episode_of_an_environment_that_fails_is_discarded_and_the_others_go_on
`on_postprocess_trajectory`
    env_runner_callbacks:trajectories_and_samples_are_shown
    callback_order:metrics_that_postprocessing_sets_are_counted
    callback_order:callbacks_are_called_in_the_order_of_rllib
    policy_group:callbacks_see_batches_before_they_are_learned_on_and_may_add_to_the_results
`on_evaluate_start`
    evaluate:callbacks_hear_of_an_evaluation_and_its_episodes
`on_checkpoint_loaded`
    worker_policies:a_saved_worker_is_restored_with_its_policies_functions_and_counts
`on_algorithm_init`
    callbacks:a_callback_that_nobody_would_call_is_refused
`make_callback`
    callbacks:several_callbacks_are_called_in_their_order_and_may_be_nested
`summarize_episodes`
    metrics:a_summary_has_rllibs_names
    metrics:custom_metrics_are_averaged_without_nan
    metrics:histograms_and_media_of_callbacks_are_gathered
smoothing
    metrics:the_metrics_of_several_workers_add_up
`metrics_logger`
    examples:an_example_runs
## Weights and filters
`weights_seq_no`
    policy_group:weights_are_taken_if_they_are_newer
    env_runner_callbacks:older_weights_are_not_taken_over
`MeanStdFilter`
    connectors_mean_std:workers_put_their_shares_together_and_each_counts_once
    connectors_mean_std:the_state_is_json_and_exact
    worker_multi_agent:save_and_restore_keep_the_filter_statistics_of_every_policy
`FilterManager.synchronize`
    filters_of_workers:each_observation_counts_once_however_often_workers_synchronise
filters in evaluation
    evaluate:filters_are_those_of_training_and_stay_as_they_are
## Policies
`Policy(observation_space
    policies:binding_again_checks_the_spaces_and_keeps_the_random_numbers
`compute_actions`
    policy_contract:a_single_action_is_a_row_of_many
    multi_agent_runner:every_extra_column_and_the_version_of_the_weights_are_recorded
`view_requirements`
    env_runner:recurrent_state_and_inputs_start_over_with_every_episode
`get_initial_state`
    env_runner_callbacks:sequences_have_the_state_that_they_began_with
`postprocess_trajectory(
    policy_contract:an_override_gets_the_batches_of_other_agents_and_the_episode
    policy_contract:a_batch_of_trajectories_is_postprocessed_one_by_one_where_the_policy_knows_no_better
`compute_gradients`
    policy_learning:gradients_travel_as_arrays_and_do_what_learning_does
`get_weights`
    policy_contract:weights_for_acting_alone_leave_the_critic_out_and_are_taken_over_as_they_are
`weights_seq_no`
    policy_contract:weights_are_taken_over_if_they_are_newer_or_have_no_version
`get_state`
    policy_contract:checkpoints_are_stored_and_loaded_by_components
    torch_policy:checkpoints_hold_no_pickle_and_damage_is_found
    torch_policy:a_restored_policy_acts_and_learns_on_as_the_first
`export_model`
    policy_contract:weights_are_exported_and_imported_as_arrays
    policy_contract:a_module_is_exported_for_where_there_is_no_rlio
`PolicySpec(
    policy_map:a_spec_goes_through_a_checkpoint_with_its_functions_and_options_by_name
`PolicyMap(
    policy_map:what_is_learned_while_a_policy_is_held_stays
    policy_map:what_cannot_be_put_away_is_said_at_once
    policy_map:many_threads_see_each_policy_as_it_is
`exploration_config`
    policy_contract:exploration_that_lasts_an_episode_is_told_of_its_start_and_end
`on_global_var_update`
    policy_contract:schedules_follow_what_all_workers_sampled
    worker_live:the_steps_of_a_worker_are_in_its_global_vars
    worker_live:with_several_agents_the_steps_are_those_of_environments
an `RLModule`
    torch_policy:a_given_module_is_used_and_shared
    torch_policy:a_function_makes_the_module_from_space_outputs_and_generator
    policy_learning:a_recurrent_module_learns_from_what_it_did_when_it_acted
`use_gae`
    postprocessing:gae_over_all_trajectories_at_once_is_what_a_loop_over_each_gives
    postprocessing:without_a_critic_advantages_are_the_discounted_rewards_to_come
`n_step`
    policy_learning:sampled_transitions_look_n_steps_ahead_and_dqn_discounts_them_so
    replay_store:n_step_transitions_stop_at_the_end_of_their_episode
    replay_store:a_missing_final_observation_is_not_bootstrapped_from
`compute_advantages`
    postprocessing:gae_over_all_trajectories_at_once_is_what_a_loop_over_each_gives
    postprocessing:discounted_sums_stay_in_their_trajectory
    postprocessing:fields_are_standardised_for_each_policy_by_itself
`do_minibatch_sgd(
    postprocessing:minibatches_hold_each_row_once_a_pass_in_another_order_each
    postprocessing:sequences_are_never_cut_by_minibatches
`setup_torch_data_parallel(
    policy_data_parallel:two_processes_learn_as_one_on_the_rows_of_both
PPO, A2C
    policy_learning:the_loss_of_an_actor_critic_is_that_of_ppo_and_of_a2c
`num_gpus`
    policy_contract:the_modules_device_is_known
## Environments
`env_creator(EnvContext)`
    envs_seeding:an_env_config_reaches_who_makes_environments_or_is_refused
    envs_seeding:the_config_of_an_id_is_its_keywords
    multi_agent_runner:a_class_with_a_default_for_its_config_gets_the_context_without_an_env_config
`EnvContext.worker_index`
    envs_seeding:a_function_is_told_for_whom_it_makes_an_environment
    envs_seeding:a_context_is_copied_with_changes_and_takes_defaults
`validate_env(
    envs_seeding:validate_env_sees_each_environment
`disable_env_checking`
    envs_checking:what_is_wrong_is_told_with_the_place
    envs_checking:checks_look_once_and_step_nothing
`num_envs_per_env_runner`
    env_runner:native_vector_environments_are_stepped_truly
    env_runner_counting:environments_in_processes
`custom_vector_env`
    envs:a_function_may_make_a_vector_environment
    env_runner:every_recorded_row_is_a_true_transition
a subclass of `VectorEnv`
    rllib_vector:a_vector_env_of_rllib_is_sampled
a subclass of `BaseEnv`
    worker_live:functions_are_called_for_each_environment
`remote_worker_envs`
    distributed_envs:a_worker_records_the_rows_of_environments_in_this_process_and_replaces_a_dead_actor
    distributed_envs:every_row_is_recorded_in_order_with_true_final_observations
    distributed_envs:what_actors_cannot_be_is_refused
`remote_env_batch_wait_ms`
    envs_waiting:the_ready_ones_go_on_and_the_slow_one_keeps_its_action
    distributed_envs:only_the_ready_ones_are_stepped_and_the_slow_one_keeps_its_action
`try_reset`
    envs_waiting:rows_of_slow_environments_are_exact
`seed`
    envs_seeding:each_episode_has_a_seed_that_can_be_computed_and_is_recorded
    envs_seeding:a_given_vector_environment_is_seeded_as_far_as_it_lets_itself
    nothing_global_is_seeded
`restart_failed_sub_environments`
    envs_that_crash:a_runner_discards_the_episode_counts_it_and_goes_on
    envs_that_crash:a_process_that_dies_or_hangs_is_replaced
    envs_that_crash:without_restarts_the_error_says_which_environment_episode_and_seed
a reset that
    envs_that_crash:restarts_are_bounded_and_the_last_error_is_raised
    envs_that_crash:pauses_grow_up_to_a_bound_and_the_others_go_on_meanwhile
`extra_python_environs_for_driver`
    envs_seeding:environs_are_set_before_environments_are_made
`render_env`
    envs_seeding:frames_go_into_the_media_of_episodes
    envs_seeding:only_the_first_worker_renders_and_only_what_can_be
`preprocessor_pref="deepmind"`
    envs_atari:pong_is_prepared_as_usual
    envs_atari:stacks_of_pong_are_recorded_with_each_frame_once
metrics of Atari
    envs_atari:metrics_are_of_whole_games_and_not_of_lives_or_clipped_rewards
## The new API stack: `SingleAgentEnvRunner`
`sample(num_timesteps
    env_runner:an_exact_number_of_whole_episodes_comes_back
    env_runner:sampled_steps_are_at_least_as_many_as_asked_for
    env_runner_sampling:force_reset_abandons_what_runs
    env_runner_sampling:random_actions_are_of_the_runners_seed_and_have_columns_of_their_own
chunks
    env_runner_sampling:chunks_keep_their_ids_and_come_with_the_steps_before_them
`SingleAgentEpisode.get_observations`
    episode:slices_join_to_the_whole
    episode:the_round_trip_is_exact
env-to-module
    env_runner_sampling:the_environment_gets_what_action_connectors_make_and_the_batch_what_the_policy_said
    env_runner_sampling:stacks_are_true_also_at_the_end_of_episodes
`merge_env_runner_states`
    env_runner_sampling:filters_are_given_and_taken
`FlattenObservations`
    env_runner_sampling:filters_see_each_observation_once_and_the_same_ones_in_every_mode
    connectors:stacks_are_those_of_gymnasium_stream_by_stream
`PrevActionsPrevRewards`
    env_runner:recurrent_state_and_inputs_start_over_with_every_episode
every output
    env_runner:recurrent_state_and_inputs_start_over_with_every_episode
    env_runner:the_version_of_the_weights_is_recorded_with_every_step
    env_runner_sampling:a_policy_cannot_overwrite_what_a_runner_records
a failed step
    envs_that_crash:a_runner_discards_the_episode_counts_it_and_goes_on
`make_env`
    env_runner_parts:recreated_in_the_middle_it_counts_what_waited_and_goes_on
    env_runner_callbacks:a_stopped_runner_is_not_healthy
`get_state(components
    env_runner_callbacks:the_parts_of_a_state_can_be_taken_over_one_by_one
    env_runner:a_restored_runner_goes_on_counting_with_other_episodes
`OfflineSingleAgentEnvRunner`
    worker:a_recorded_data_set_reads_back_as_it_was_served
`EnvRunnerGroup`
    distributed_group_losses:a_probe_finds_idle_workers_that_died
seeds in evaluation
    policies:evaluation_gives_each_environment_its_share
`get_ctor_args_and_kwargs`
    worker_policies:a_worker_says_what_it_was_made_with
    the_state_of_a_runner_is_stored_and_loaded
## Groups of workers
`delay_between_env_runner_restarts_s`
    distributed_group_parts:restarts_count_against_the_limit_within_a_window_and_wait_with_growing_pauses
`EnvRunnerGroup`
    distributed_group:every_worker_writes_one_data_set_and_says_there_how_it_was_seeded
    distributed_group_parts:a_group_takes_the_keywords_of_a_worker_but_those_that_it_gives_itself
`local_env_runner=True`
    distributed_group:weights_reach_all_workers_before_their_next_fragment_and_older_ones_none
`synchronous_parallel_sample(
    distributed_group:exactly_so_many_steps_are_given_and_what_is_left_over_comes_next
    distributed_group:who_is_late_is_served_by_the_next_call_and_nothing_is_lost
`foreach_env_runner(
    distributed_group:a_function_is_called_in_each_worker_and_its_errors_are_raised_or_returned
`foreach_env_runner_async`
    distributed_group:no_worker_is_asked_for_more_than_may_be_in_flight
    distributed_group:what_is_in_flight_is_served_by_the_next_call_of_any_kind
`foreach_policy`
    distributed_group:a_function_is_called_in_each_worker_and_its_errors_are_raised_or_returned
`sync_weights(
    distributed_group:weights_reach_all_workers_before_their_next_fragment_and_older_ones_none
    distributed_group:epsilon_in_a_group_falls_with_the_steps_of_all_workers
    distributed_group_losses:who_takes_anothers_place_begins_with_weights_and_filters_and_others_go_on_meanwhile
`sync_env_runner_states`
    distributed_group_losses:statistics_of_all_workers_are_put_together_each_observation_once
    distributed_group_parts:what_a_worker_sees_while_statistics_are_summed_is_counted_the_next_time
`collect_metrics`
    distributed_group:counts_of_all_workers_add_up
`FaultTolerantActorManager(
    distributed_group_losses:killed_workers_lose_no_row_that_was_acknowledged_and_what_is_lost_is_told
    distributed_group_parts:a_tolerance_that_means_nothing_is_refused
`restart_failed_env_runners`
    distributed_group_losses:a_worker_that_always_dies_is_given_up_and_what_it_had_written_is_stored
`max_num_env_runner_restarts`
    defaults_are_those_that_the_page_gives
    distributed_group_losses:a_worker_that_always_dies_is_given_up_and_what_it_had_written_is_stored
an exception in
    distributed_group:an_error_of_an_environment_says_whose_it_is_and_the_others_rows_stay
`probe_unhealthy_env_runners`
    distributed_group_losses:a_probe_replaces_idle_workers_that_hang_and_tells_of_those_that_cannot_sample
    distributed_group_losses:a_worker_that_hangs_is_replaced
`env_runner_restore_timeout_s`
    defaults_are_those_that_the_page_gives
    distributed_group_parts:a_tolerance_that_means_nothing_is_refused
`recreated_worker`
    distributed_group_losses:who_takes_anothers_place_begins_with_weights_and_filters_and_others_go_on_meanwhile
    worker_live:makers_of_environments_know_whether_the_worker_replaces_another
a replaced worker
    distributed_group_parts:who_takes_anothers_place_records_other_episodes_under_other_ids
    distributed_group_parts:no_two_workers_have_the_same_seed_whoever_takes_whose_place
`num_env_runners=0`
    worker_live:fragments_are_exact
`num_cpus_per_env_runner`
    distributed_group:workers_have_the_resources_that_are_asked_for
    distributed_group_parts:how_workers_are_restarted_is_the_groups_affair
`is_policy_to_train`
    distributed_group:policies_are_added_and_removed_in_each_worker
`stop()`
    distributed_group:every_worker_writes_one_data_set_and_says_there_how_it_was_seeded
a replay buffer
    distributed_group_together:a_learner_follows_what_a_group_writes_within_limits_and_across_a_kill
## External environments
`ExternalEnv`
    external:rows_of_loops_are_their_steps
    worker_external:an_external_environment_is_sampled_like_any_other
    external:a_final_observation_that_nobody_knows_is_marked_missing
`log_action`
    external:logged_actions_are_recorded_and_not_called_the_policys
    external_episodes:of_a_logged_actions_probability_and_its_logarithm_one_is_enough
`ExternalMultiAgentEnv`
    external_agents:agents_of_a_loop_share_steps_and_one_joins_late
    external_agents:logged_actions_are_recorded_and_their_likelihoods_unknown
    external_agents:agents_leave_early_and_are_rewarded_before_and_between_their_turns
    external_agents:a_worker_samples_a_loop_of_agents_with_several_policies
RLlib 2.60's workers refuse
    external_agents:a_worker_samples_a_loop_of_agents_with_several_policies
    worker_external:an_external_environment_is_sampled_like_any_other
a loop that raises
    external:an_error_in_the_loop_surfaces_where_it_is_sampled
    external_episodes:episodes_whose_loops_are_gone_can_be_given_up
    policy_server:episodes_of_clients_that_vanish_are_given_up
connectors, `clip_rewards`
    worker_external:what_a_loop_elsewhere_does_not_heed_is_refused
`PolicyServerInput(
    external:remote_inference
    external:who_does_not_know_the_token_gets_nothing
    external:without_clients_the_data_ends_where_that_is_wanted
its queue of samples
    policy_server:a_report_that_is_sent_twice_is_taken_once
    policy_server:rows_that_wait_are_bounded_and_senders_keep_theirs
    policy_server:rows_that_do_not_fit_are_their_senders_error_not_the_learners
`PolicyClient(
    external:remote_inference
    external:local_inference_reports_rows_and_fetches_weights
    policy_server:clients_with_local_inference_get_the_steps_of_all_of_them_with_the_weights
RLlink
    policy_server:values_travel_as_json_that_every_language_reads
## Several agents
`MultiAgentEnv`
    multi_agent_env:an_environment_with_the_methods_of_rllibs_is_taken_as_it_is
    multi_agent_env:a_step_that_makes_no_sense_is_refused
    multi_agent_env:actions_are_of_those_who_have_an_observation
flags of agents
    multi_agent_env:who_has_no_flag_of_its_own_gets_that_of_all
`make_multi_agent("CartPole-v1")`
    multi_agent_env:copies_are_independent_seeded_apart_and_over_when_the_last_one_is
`PettingZooEnv`
    pettingzoo:which_kind_it_is_is_seen_by_its_methods
    pettingzoo:an_aec_environment_gives_the_rows_that_its_own_loop_sees
`BaseEnv`
    multi_agent_runner:inference_is_one_batch_a_policy_over_all_environments_and_agents
    multi_agent_runner:arguments_that_make_no_sense_are_refused
`check_multiagent_environments`
    multi_agent_env:the_check_looks_into_spaces_and_rewards
`policy_mapping_fn(
    multi_agent_runner:the_mapping_is_asked_once_an_agent_and_episode_and_sees_the_episode
    multi_agent_runner:another_mapping_counts_from_the_next_episode_on
    multi_agent_runner:a_policy_that_is_removed_acts_no_more_and_another_takes_over
late agents
    multi_agent_runner:an_agent_that_is_born_done_is_neither_in_the_metrics_nor_in_the_episode
    multi_agent_runner:every_row_is_a_true_transition_of_its_agent
an agent that comes back
    multi_agent_env:what_is_repeated_of_the_dead_is_passed_over_but_for_rewards
    multi_agent_env:a_step_that_makes_no_sense_is_refused
a last observation
    multi_agent_runner:every_row_is_a_true_transition_of_its_agent
rewards after
    multi_agent_runner:rewards_after_an_agents_end_are_in_its_last_row
    multi_agent_runner:rewards_that_come_when_the_row_is_gone_are_counted_and_told_once
a row at the end
    multi_agent_runner:an_agent_that_waits_for_its_turn_has_its_row_in_the_next_batch
`infos["__common__"]`
    multi_agent_runner:infos_are_those_of_the_agent_and_the_common_ones
    multi_agent_env:common_infos_are_told_apart
`count_steps_by`
    multi_agent_runner:steps_may_be_counted_by_agents
zero-agent episodes
    multi_agent_runner:an_episode_in_which_nobody_acts_is_an_error
    multi_agent_env:an_episode_in_which_nobody_ever_acts_again_is_an_error
`MultiAgentEnvRunner(config=...)`
    multi_agent_runner:200_env_steps_are_400_agent_steps_grouped_by_policy
`sample(num_timesteps
    multi_agent_runner:whole_episodes_are_as_many_as_asked_for
    multi_agent_runner:random_actions_are_not_postprocessed_by_a_policy_that_did_not_act
    multi_agent_runner:exploring_may_be_said_for_a_call_and_episodes_started_over
`make_env`
    multi_agent_runner:environments_can_be_recreated
    multi_agent_runner:states_are_got_and_set_by_components
a failed step
    multi_agent_runner:a_failed_environment_is_recreated_and_the_others_make_up_for_it
`MultiAgentEpisode.get_observations`
    multi_agent_episode:values_are_found_by_the_environments_steps
    multi_agent_episode:negative_steps_may_be_those_before_the_chunk
    multi_agent_episode:slices_put_together_are_the_episode
    multi_agent_episode:a_state_is_json_and_arrays_and_gives_the_episode_back
`one_hot_discrete=True`
    connectors:one_hot_changes_discrete_leaves_only
`len_lookback_buffer`
    multi_agent_runner:chunks_put_together_are_the_episodes_with_their_ids
`module_for`
    multi_agent_episode:sizes_returns_and_ends
## Judging a policy from the log
`OffPolicyEstimator.estimate(
    ope_evaluator:one_step_episodes_are_the_same_with_and_without_bandit
    ope_evaluator:epsilon_greedy_targets_are_mixed_with_random_actions
`ImportanceSampling`
    input_evaluation:is_wis_and_gains_are_those_of_rllibs_classes
    input_evaluation:is_and_wis_are_step_wise_as_in_rllib
`WeightedImportanceSampling`
    input_evaluation:is_wis_and_gains_are_those_of_rllibs_classes
    input_evaluation:a_step_that_no_weighted_episode_reaches_counts_nothing
    ope_estimators:each_estimator_is_its_formula_on_episodes_of_unequal_lengths
`DirectMethod`
    ope_fitted_q:discrete_actions_within_a_tenth_of_what_returns_vary_by
    ope_fitted_q:continuous_actions_within_a_tenth_of_the_value
`DoublyRobust`
    ope_estimators:doubly_robust_recursion_and_sum_are_the_same
    ope_estimators:each_estimator_is_its_formula_on_episodes_of_unequal_lengths
`estimate_on_dataset(
    distributed_evaluation:blocks_of_a_ray_dataset_give_the_same_numbers
`v_gain` of
    input_evaluation:is_wis_and_gains_are_those_of_rllibs_classes
    gains_of_whole_data_sets_are_rllibs_ratios
`FeatureImportance`
    ope_evaluator:importance_is_of_the_features_that_actions_depend_on
`input_evaluation=
    input_evaluation:is_and_wis_are_step_wise_as_in_rllib
    worker_policies:a_simulation_runs_beside_what_is_read_and_is_served_to_nobody
`OfflinePolicyEvaluationRunner`
    ope_estimators:each_estimator_is_its_formula_on_episodes_of_unequal_lengths
    distributed_evaluation:parts_that_cut_episodes_give_the_numbers_of_one_process_to_the_last_bit
## What has no counterpart, and what to do instead
`InputReader.tf_input_ops(
    torch:tensors_share_the_memory_of_their_arrays
    worker_policies:a_worker_is_an_iterator_of_its_batches
`IOContext.config`
    worker:an_input_creator_gets_the_workers_place_spaces_and_options
`IOContext.worker`
    worker:an_input_creator_gets_the_workers_place_spaces_and_options
`IOContext.input_config`
    worker:an_input_creator_gets_the_workers_place_spaces_and_options
`JsonReader.read_all_files()`
    json_reader:records_are_served_as_they_were_written
`from_json_data`
    json_reader:files_in_memory_and_behind_wrappers_are_read
an action connector
    mapped_input:functions_are_applied_in_their_order
## What RLlib wrote, read by rlio
`JsonWriter`
    rllib_recordings:a_json_recording_is_read_whole
    rllib_recordings:packed_and_plain_columns_keep_their_dtypes
    json_reader:packed_columns_come_back_with_their_dtypes
    json_reader:the_place_of_type_in_the_line_does_not_matter
    json_reader:dones_become_terminateds_and_truncateds_stay_apart
    json_reader:a_multi_agent_record_keeps_policies_and_environment_steps
`ray.data`'s `write_json`
    json_reader:a_line_of_one_step_without_type_is_a_batch_of_one_row
    json_reader:a_record_wrapped_in_value_is_unwrapped
`DatasetWriter`
    rllib_recordings:a_parquet_recording_is_read_whole
    rllib_input:parquet_with_pickled_objects_of_several_policies_is_read
    foreign_parquet:rows_that_are_batches_are_records
the new stack with `output_write_episodes=False`
    foreign_parquet:packed_text_of_one_row_a_step_is_unpacked
    foreign_parquet:an_unregistered_tensor_type_reads_as_its_storage_in_its_shape
    foreign_parquet:a_registered_extension_type_is_refused_before_its_code_runs
the new stack with `output_write_episodes=True`
    foreign_parquet:episodes_in_msgpack_say_what_to_do
    rllib_episodes:a_row_holds_what_its_action_saw_and_caused
    rllib_episodes:episodes_that_the_recorder_wrote_again_are_read_once_and_counted
RLlib of 2019
    packed:arrays_of_2019_are_those_that_were_packed
    packed:what_is_no_array_of_2019_is_refused_by_name_and_damage_is_not_taken_for_it
"""


@cache
def checks() -> dict[tuple[str, str], list[str]]:
    """(section, beginning of a row) -> names of tests."""
    found: dict[tuple[str, str], list[str]] = {}
    section = start = ""
    for line in CHECKS.strip().splitlines():
        if line.startswith("##"):
            section = line[3:]
        elif line.startswith(" "):
            found[section, start].append(line.strip())
        else:
            start = line
            found[section, start] = []
    return found


# ---- every row ----


def test_every_row_of_the_page_has_a_check_and_every_check_a_row() -> None:
    named = {
        key: [row for row in rows() if row.section == key[0] and row.theirs.startswith(key[1])]
        for key in checks()
    }
    assert not [key for key, found in named.items() if len(found) != 1], "they name no row, or several"
    found = [row for each in named.values() for row in each]
    assert len(found) == len(set(found)), "a row is named twice"
    unchecked = [row for row in rows() if row not in found and not row.is_absent]
    assert not unchecked
    assert len(rows()) > 250


def test_every_check_that_is_named_is_a_test() -> None:
    missing = []
    for key, names in checks().items():
        for file, _, test in (name.rpartition(":") for name in names):
            if f"test_{test}" not in names_in(file or "rllib_page"):
                missing.append((key, test))
    assert not missing
    assert all(checks().values()), "rows without a test"


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((HERE / f"test_{file}.py").read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


# ---- names ----

#: What the page calls objects, and classes that it names without their package.
KINDS: dict[str, Any] = {
    "worker": rlio.RolloutWorker,
    "runner": rlio.EnvRunner,
    "group": rlio.distributed.WorkerGroup,
    "server": rlio.serving.PolicyServerInput,
    "policy": rlio.TorchPolicy,
    "batch": rlio.SampleBatch,
    "chunk": rlio.Episode,
    "RunningEpisode": RunningEpisode,
    "RolloutMetrics": RolloutMetrics,
    "EnvContext": EnvContext,
    "ServerLimits": ServerLimits,
    "FaultTolerance": rlio.distributed.FaultTolerance,
    "FittedQ": rlio.evaluation.FittedQ,
    "Target": rlio.evaluation.Target,
}
#: Attributes that only instances have.
OF_INSTANCES = {
    "runner.late_rewards": rlio.MultiAgentEnvRunner.late_rewards,
    "runner.abandon_silent": rlio.sampling.ExternalRunner.abandon_silent,
}


def spans(cell: str) -> Iterator[str]:
    for span in re.findall(r"`([^`]+)`", cell):
        yield span.replace("...", "_").replace("=,", "=None,").replace("=)", "=None)")


def expressions(span: str) -> Iterator[ast.expr]:
    """The expressions of a code span, those of keywords included; what is no Python has none."""
    for text in (span, f"f({span})"):
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.expr))
        return


def dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def thing(name: str) -> Any:
    """What a dotted name on the page means; None for a name that is not ours."""
    if name in OF_INSTANCES:
        return OF_INSTANCES[name]
    first, *rest = name.split(".")
    found: Any
    if first == "rlio":
        found, path = rlio, "rlio"
        for part in rest:
            path = f"{path}.{part}"
            found = getattr(found, part, None) or importlib.import_module(path)
        return found
    found = KINDS.get(first, getattr(rlio, first, None) if first[:1].isupper() else None)
    for part in rest if found is not None else ():
        own = getattr(found, "__annotations__", {}) | dict(inspect.getmembers(found))
        if part not in own and not has_in_init(found, part):
            raise AttributeError(f"{name}: {found} has no {part}")
        found = own.get(part, object)
        if isinstance(found, property):
            return object  # Of what it gives nothing is known here.
    return found


def has_in_init(kind: Any, attribute: str) -> bool:
    """Whether instances of a class get an attribute when they are made."""
    sources = [
        inspect.getsource(each) for each in getattr(kind, "__mro__", ()) if each.__module__[:4] == "rlio"
    ]
    return any(f"self.{attribute}" in source for source in sources)


def test_names_and_keywords_of_the_page_exist() -> None:
    wrong: list[Any] = []
    checked = 0
    for row in rows():
        for span in spans(row.ours):
            for node in expressions(span):
                name = dotted(node.func if isinstance(node, ast.Call) else node)
                if name is None:
                    continue
                try:
                    found = thing(name)
                    if found is not None and isinstance(node, ast.Call):
                        check_keywords(found, node)
                except (AttributeError, ImportError, TypeError) as error:
                    wrong.append((row.section, span, repr(error)))
                checked += found is not None
    assert not wrong
    assert checked > 200


def check_keywords(function: Any, call: ast.Call) -> None:
    parameters = inspect.signature(function).parameters
    given = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return
    unknown = [name for name in given if name not in parameters]
    if unknown:
        raise TypeError(f"{function} has no {unknown}")


#: For what the page calls the same: whose the names in RLlib's cell are. Names of the first come first.
OWNERS: dict[str, list[Any]] = {
    "Rollout workers": [
        rlio.RolloutWorker,
        rlio.RolloutConfig,
        rlio.sampling.PolicySetup,
        rlio.sampling.WorkerPlace,
    ],
    "Sampling": [
        rlio.RolloutConfig,
        RunningEpisode,
        rlio.SampleBatch,
        rlio.MultiAgentBatch,
        rlio.ExternalEnv,
    ],
    "Callbacks and metrics": [rlio.Callbacks],
    "Weights and filters": [rlio.connectors.MeanStdFilter],
    "Policies": [rlio.Policy, rlio.PolicySpec],
    "Environments": [EnvContext, rlio.RolloutConfig],
    "The new API stack: `SingleAgentEnvRunner`": [rlio.EnvRunner],
    "External environments": [rlio.ExternalEnv, rlio.envs.ExternalMultiAgentEnv, rlio.serving.PolicyClient],
    "Several agents": [
        rlio.MultiAgentEnvRunner,
        rlio.RolloutConfig,
        rlio.MultiAgentEnv,
        rlio.sampling.MultiAgentEpisode,
    ],
    "Options of reading": [rlio.RolloutConfig],
}
#: Names in such cells that are no attributes: classes, values and keywords, and what the row says otherwise.
OTHERWISE = {
    *("EpisodeV2", "MeanStdFilter", "ExternalEnv", "ExternalMultiAgentEnv", "MultiAgentEnv", "PolicyClient"),
    *("PolicySpec", "RLlib", "pickles"),
    *("as_serializable", "last_info_for", "creation_args", "policy_ids", "module_for", "max_concurrent"),
    *("global_vars", "inference_only", "mean_raw_obs_processing_ms"),
}


def test_what_the_page_calls_the_same_has_the_name_and_the_arguments() -> None:
    missing = []
    checked = 0
    for row in rows():
        if not re.match(r"(`[^`]*`[,:] )?(with )?the same\b", row.ours):
            continue
        for span in spans(row.theirs) if row.section in OWNERS else ():
            node = next(iter(expressions(span)), None)
            name = None if node is None else dotted(node.func if isinstance(node, ast.Call) else node)
            name = (name or "").rpartition(".")[2]
            if isinstance(node, ast.expr) and name and name not in OTHERWISE:
                checked += 1
                owner = next((o for o in OWNERS[row.section] if is_of(o, name)), None)
                if owner is None:
                    missing.append((row.section, name))
                elif isinstance(node, ast.Call) and "arguments" in row.ours[:60]:
                    wanted = [dotted(each) for each in node.args]
                    own = inspect.signature(getattr(owner, name)).parameters
                    missing += [(row.section, name, each) for each in wanted if each not in own]
    assert not missing
    assert checked > 80


def is_of(owner: Any, name: str) -> bool:
    parameters = inspect.signature(owner).parameters
    return hasattr(owner, name) or name in parameters or has_in_init(owner, name)


#: Fields of `rlio.RolloutConfig` that rows name of which something else is absent.
OF_ALL_POLICIES = {"clip_actions", "clip_rewards", "explore", "horizon", "remote_worker_envs"}


def test_what_has_no_counterpart_is_not_there_under_rllibs_name() -> None:
    there = []
    for row in rows():
        if row.is_absent:
            for span in spans(row.theirs):
                name = re.split(r"[(=\s]", span)[0].rpartition(".")[2]
                owners = [rlio, rlio.RolloutWorker, rlio.RolloutConfig, rlio.EnvRunner, rlio.JsonReader]
                if name.isidentifier() and name not in OF_ALL_POLICIES:
                    there += [(row.theirs, name) for owner in owners if is_there(owner, name)]
    assert not there


def is_there(owner: Any, name: str) -> bool:
    return hasattr(owner, name) or (inspect.isclass(owner) and name in inspect.signature(owner).parameters)


#: Numbers that the page gives as defaults.
DEFAULTS = [
    (rlio.distributed.FaultTolerance, "max_restarts", 1000),
    (rlio.distributed.FaultTolerance, "max_restarts_in_a_row", 8),
    (rlio.distributed.FaultTolerance, "probe_timeout_s", 30),
    (rlio.distributed.FaultTolerance, "start_timeout_s", 300),
    (rlio.RolloutConfig, "max_env_restarts", 100),
    (rlio.RolloutConfig, "normalize_actions", False),
    (rlio.RolloutConfig, "clip_actions", False),
    (rlio.RolloutConfig, "remote_env_batch_wait_ms", None),
    (rlio.AsyncInput, "queue_size", 5),
    (rlio.serving.PolicyClient, "inference_mode", "remote"),
]


@pytest.mark.parametrize(("kind", "name", "value"), DEFAULTS, ids=lambda value: str(value))
def test_defaults_are_those_that_the_page_gives(kind: Any, name: str, value: Any) -> None:
    assert inspect.signature(kind).parameters[name].default == value


# ---- rows that no other test is about ----


def test_the_first_table_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    policy: rlio.Policy = RandomPolicy()
    with rlio.RolloutWorker("CartPole-v1", policy, output="out", seed=0) as worker:
        sampled = worker.sample()
    assert isinstance(sampled, rlio.SampleBatch)
    reader = rlio.read("out", batch_size=50, shuffle=True, seed=0)
    rows_read = rlio.concat_samples([reader.sample() for _ in range(4)])
    assert isinstance(rows_read, rlio.SampleBatch)
    np.testing.assert_array_equal(np.sort(rows_read["t"]), np.sort(sampled["t"]))
    with rlio.JsonWriter("json") as writer:
        writer.write(sampled[:30])
        writer.write(sampled[30:100])
    assert len(rlio.DatasetReader("json", epochs=1).sample()) == 100
    # RLlib's JSON: a line a batch, columns as lists.
    columns = {name: np.asarray(sampled[name]).tolist() for name in sampled}
    (tmp_path / "rllib").mkdir()
    (tmp_path / "rllib" / "old.json").write_text(json.dumps({"type": "SampleBatch", **columns}) + "\n")
    assert len(rlio.JsonReader("rllib/*.json").sample()) == 200
    mixture = {"sampler": 0.5, "rllib/*.json": 0.5}
    with rlio.RolloutWorker("CartPole-v1", RandomPolicy(), input=mixture, seed=0) as worker:
        mixed = worker.sample(100)
        assert worker.get_global_vars().timestep == 200, "a fragment was sampled, of which 50 rows are served"
        assert len(mixed) == 100


class Marked(MemoryFileSystem):
    """Keeps what it was made with."""

    protocol = "marked"
    cachable = False
    marks: list[Any] = []  # noqa: RUF012 - of the class

    def __init__(self, mark: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.marks.append(mark)


def test_options_of_stores_reach_readers_and_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.import_module("fsspec.registry")._registry
    monkeypatch.setitem(known, "marked", Marked)
    given: Any = {"storage_options": {"mark": 7}}
    root = "marked://page/rows"
    with rlio.RolloutWorker("CartPole-v1", RandomPolicy(), output=root, output_options=given) as worker:
        worker.sample()
        spaces = worker.get_spaces()["__env__"]
    with rlio.ParquetWriter(root, **given) as writer:
        writer.write(rlio.DatasetReader(root, epochs=1, **given).sample())
    policy = RandomPolicy()
    policy.bind(*spaces)
    with rlio.RolloutWorker(None, policy, input=root, input_options=given) as reader:
        assert len(reader.sample(400)) == 400
    assert Marked.marks
    assert set(Marked.marks) == {7}


def test_columns_are_renamed_by_a_function(tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path) as writer:
        writer.write(rlio.SampleBatch(o_t=np.arange(3.0), a_t=np.arange(3)))

    def renamed(batch: Any) -> Any:
        return rlio.SampleBatch({Columns.OBS: batch["o_t"], Columns.ACTIONS: batch["a_t"]})

    with rlio.MappedInput(rlio.DatasetReader(tmp_path, epochs=1), renamed) as reader:
        batch = reader.sample()
    assert batch["obs"].tolist() == [0.0, 1.0, 2.0]
    assert "o_t" not in batch


class RemembersLast(rlio.Policy):
    """Records the previous action and reward."""

    input_columns = ("prev_actions", "prev_rewards")

    def compute_actions(
        self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
    ) -> Any:
        return np.arange(len(obs)) % 2, state, {name: inputs[name].copy() for name in self.input_columns}


def test_columns_are_there_always_or_with_the_option_that_the_page_names() -> None:
    """Each column of the table "Columns of a batch" is there with its option, and not without."""

    def columns(policy: rlio.Policy, **config: Any) -> set[str]:
        rollout = rlio.RolloutConfig(rollout_fragment_length=12, **config)
        with rlio.RolloutWorker("CartPole-v1", policy, rollout=rollout, seed=0) as worker:
            return set(worker.sample())

    torch = pytest.importorskip("torch")
    plain = columns(rlio.RandomPolicy())
    always = {"obs", "new_obs", "actions", "rewards", "terminateds", "truncateds", "eps_id", "t"}
    always |= {"unroll_id", "agent_index", "weights_seq_no", "env_id"}
    assert plain == always | {"action_prob", "action_logp"}
    assert columns(rlio.RandomPolicy(), record_infos=True) == plain | {"infos"}
    assert columns(rlio.RandomPolicy(), record_env_seeds=True) == plain | {"env_seed"}
    assert columns(RemembersLast()) == always | {"prev_actions", "prev_rewards"}
    of_torch = {"action_dist_inputs", "action_logp"}
    assert columns(rlio.TorchPolicy(torch.nn.Linear(4, 2))) == always | of_torch
    of_gae = {"vf_preds", "advantages", "value_targets", "values_bootstrapped"}
    gae = rlio.TorchPolicy(torch.nn.Linear(4, 3), postprocessing=rlio.policies.GAE())
    assert columns(gae) == always | of_torch | of_gae


def test_nothing_global_is_seeded() -> None:
    import torch

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()  # type: ignore[index]
    with rlio.RolloutWorker("CartPole-v1", rlio.policies.DQN(hidden=[4]), seed=3) as worker:
        worker.learn_on_batch(worker.sample())
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()  # type: ignore[index]
    assert after == before


def test_numbers_of_several_passes_are_averaged_over_all_parts() -> None:
    losses: list[float] = []

    class Notes(rlio.policies.DQN):
        def learn_on_batch(self, batch: Any) -> Any:
            stats = super().learn_on_batch(batch)
            losses.append(stats["loss"])
            return stats

    config = rlio.RolloutConfig(rollout_fragment_length=20)
    with rlio.RolloutWorker("CartPole-v1", Notes(hidden=[4]), rollout=config, seed=3) as worker:
        stats, steps = worker.sample_and_learn(20, num_sgd_iter=3, sgd_minibatch_size=10)
    assert (steps, len(losses)) == (20, 6)
    assert stats["loss"] == pytest.approx(np.mean(losses))
    assert stats["num_grad_updates_lifetime"] == 6


def test_the_state_of_a_runner_is_stored_and_loaded(tmp_path: Path) -> None:
    config = rlio.RolloutConfig(
        rollout_fragment_length=20, observation_connectors=[rlio.connectors.MeanStdFilter()]
    )
    runner = rlio.EnvRunner("CartPole-v1", RandomPolicy(), config=config, seed=3)
    runner.run()
    save_state(tmp_path, runner.get_state())
    other = rlio.EnvRunner("CartPole-v1", RandomPolicy(), config=config, seed=4)
    other.set_state(load_state(tmp_path))
    assert other.seeds["seed"] == 3
    (found,), (expected,) = (each.get_filters()["default_policy"] for each in (other, runner))
    assert found.state_dict() == expected.state_dict()
    for each in (runner, other):
        each.stop()


def test_gains_of_whole_data_sets_are_rllibs_ratios() -> None:
    """As `estimate_on_dataset` has them: each record is an episode of one step."""
    rng = np.random.default_rng(0)
    actions, rewards = rng.integers(0, 2, 500), 1.0 + rng.random(500)
    batch = rlio.SampleBatch(
        obs=np.zeros(500), actions=actions, rewards=rewards, action_prob=np.full(500, 0.5)
    )

    def judged(obs: Any, taken: Any) -> Any:
        return np.log(np.where(taken == 1, 0.8, 0.2))

    found = rlio.evaluation.evaluate_offline(batch, judged, gamma=1.0, bandit=True)["pdis"]
    weighted = rewards * np.where(actions == 1, 1.6, 0.4)
    assert found.v_gain_ratio == pytest.approx(weighted.mean() / rewards.mean())
    error = weighted.std(ddof=1) / rewards.mean() / np.sqrt(500)
    assert found.v_target.standard_error / found.v_behavior.value == pytest.approx(error)
    assert found.v_gain.value == pytest.approx(weighted.mean() - rewards.mean())
