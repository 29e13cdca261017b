"""docs/rllib.md beside RLlib: each row is run on both sides, or `READ_ONLY` has it with the reason.

What a row names is looked up on both sides, and compared: defaults of options, arguments of methods and
callbacks, attributes, columns, and numbers in brackets. `BY_TEST` names the tests, of this folder, that run
what a row says beyond its names. A row that is in none of the three fails. Rows that begin with "none" claim
no sameness: RLlib has their names, and `tests/test_rllib_page.py` shows that rlio has not.
"""

from __future__ import annotations

import ast
import gc
import inspect
import re
import runpy
import shutil
import sys
import warnings
import zipfile
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import rlio
import rlio.distributed
from rlio.envs.context import EnvContext
from rlio.sampling.callbacks import RunningEpisode

ray = pytest.importorskip("ray", reason="ray is not installed")
pytest.importorskip("ray.rllib", reason="ray[rllib] is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import callback_calls  # noqa: E402
from callback_calls import GOLDEN, Scenario, Steps, agents_env, policy_of  # noqa: E402
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig  # noqa: E402
from ray.rllib.algorithms.ppo import PPOConfig, PPOTorchPolicy  # noqa: E402
from ray.rllib.callbacks.callbacks import RLlibCallback  # noqa: E402
from ray.rllib.env.env_context import EnvContext as RllibContext  # noqa: E402
from ray.rllib.env.env_runner_group import EnvRunnerGroup  # noqa: E402
from ray.rllib.env.external_env import ExternalEnv  # noqa: E402
from ray.rllib.env.external_multi_agent_env import ExternalMultiAgentEnv  # noqa: E402
from ray.rllib.env.multi_agent_env import MultiAgentEnv  # noqa: E402
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner  # noqa: E402
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode  # noqa: E402
from ray.rllib.env.policy_client import PolicyClient  # noqa: E402
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner  # noqa: E402
from ray.rllib.env.single_agent_episode import SingleAgentEpisode  # noqa: E402
from ray.rllib.evaluation.episode_v2 import EpisodeV2  # noqa: E402
from ray.rllib.evaluation.rollout_worker import RolloutWorker  # noqa: E402
from ray.rllib.offline.io_context import IOContext  # noqa: E402
from ray.rllib.offline.json_reader import JsonReader  # noqa: E402
from ray.rllib.offline.json_writer import JsonWriter  # noqa: E402
from ray.rllib.policy.policy import Policy, PolicySpec  # noqa: E402
from ray.rllib.policy.policy_map import PolicyMap  # noqa: E402
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch, concat_samples  # noqa: E402
from ray.rllib.utils.error import MultiAgentEnvError  # noqa: E402
from ray.rllib.utils.filter import MeanStdFilter  # noqa: E402
from test_rllib_page import Row, dotted, expressions, rows, spans  # noqa: E402

# RLlib uses what others have deprecated, and leaves files open.
pytestmark = pytest.mark.filterwarnings("ignore")

MAKE: Any = runpy.run_path(str(GOLDEN.with_name("make.py")))

OLD, NEW = "old", "new"

# ---- what is compared: names of a row ----

#: Of a section, the classes whose attributes its rows name: RLlib's and rlio's.
PAIRS: dict[str, list[tuple[type, Any]]] = {
    "Rollout workers": [(RolloutWorker, rlio.RolloutWorker)],
    "Sampling": [
        (SampleBatch, rlio.SampleBatch),
        (MultiAgentBatch, rlio.MultiAgentBatch),
        (EpisodeV2, RunningEpisode),
    ],
    "Callbacks and metrics": [(RLlibCallback, rlio.Callbacks)],
    "Weights and filters": [(MeanStdFilter, rlio.connectors.MeanStdFilter)],
    "Policies": [
        (Policy, rlio.TorchPolicy),
        (PolicySpec, rlio.PolicySpec),
        (PolicyMap, rlio.policies.PolicyMap),
    ],
    "Environments": [(RllibContext, EnvContext)],
    "The new API stack: `SingleAgentEnvRunner`": [
        (SingleAgentEnvRunner, rlio.EnvRunner),
        (SingleAgentEpisode, rlio.Episode),
    ],
    "Groups of workers": [(EnvRunnerGroup, rlio.distributed.WorkerGroup)],
    "External environments": [
        (ExternalEnv, rlio.ExternalEnv),
        (ExternalMultiAgentEnv, rlio.envs.ExternalMultiAgentEnv),
        (PolicyClient, rlio.serving.PolicyClient),
    ],
    "Several agents": [
        (MultiAgentEnvRunner, rlio.MultiAgentEnvRunner),
        (MultiAgentEpisode, rlio.sampling.MultiAgentEpisode),
        (MultiAgentEnv, rlio.MultiAgentEnv),
    ],
    "What has no counterpart, and what to do instead": [
        (IOContext, rlio.IOContext),
        (JsonReader, rlio.JsonReader),
    ],
}
#: Where options of RLlib's config are in rlio.
OPTIONS = (
    rlio.RolloutConfig,
    rlio.sampling.PolicySetup,
    rlio.sampling.WorkerPlace,
    rlio.RolloutWorker,
    rlio.distributed.FaultTolerance,
)
#: Options with other defaults, each as its rows say: RLlib's and rlio's.
OTHER_DEFAULTS: dict[str, tuple[Any, Any]] = {
    "normalize_actions": (True, False),
    "remote_env_batch_wait_ms": (0, None),
    "train_batch_size": (32, None),
    "num_workers": (None, 0),
    # RLlib's is "deprecated"; both mean that nothing is estimated.
    "input_evaluation": (-1, None),
}
#: Arguments that methods of rlio do not have under RLlib's name: RLlib and its users give the first ones by
#: position, and rows name the others.
OTHER_ARGUMENTS = {
    "RolloutWorker.learn_on_batch": "samples",
    "RolloutWorker.compute_gradients": "samples single_agent",
    "RolloutWorker.apply_gradients": "grads",
    "RolloutWorker.add_policy": "policy_cls observation_space action_space config policy_state module_spec",
    "RolloutWorker.sync_filters": "new_filters",
    "EpisodeV2.policy_for": "refresh",
    "SampleBatch.timeslices": "k",
    "SampleBatch.to_device": "use_stream",
    "Policy.compute_actions": "obs_batch state_batches prev_action_batch prev_reward_batch info_batch "
    "episodes",
    "Policy.compute_single_action": "input_dict prev_action prev_reward info episode",
    "Policy.postprocess_trajectory": "sample_batch",
    "Policy.compute_gradients": "postprocessed_batch",
    "Policy.learn_on_batch": "samples",
    "Policy.export_model": "export_dir onnx",
    "EnvRunnerGroup.sync_weights": "policies from_worker_or_learner_group to_worker_indices global_vars "
    "timeout_seconds inference_only",
    "MultiAgentEpisode.get_observations": "one_hot_discrete",
    "MultiAgentEpisode.cut": "len_lookback_buffer",
    "MultiAgentEpisode.slice": "slice_ len_lookback_buffer",
    "MultiAgentEpisode.get_return": "include_hanging_rewards",
}
#: Names on the page that RLlib 2.60 has no more.
OF_EARLIER = {
    *("as_remote", "sample_async", "monitor_path", "tf_session_creator", "import_policy_model_from_h5"),
    *("PolicyEvaluator", "compute_apply", "AsyncSampler", "blackhole_outputs", "StateBuffer"),
    *("PolicyServerInput", "idle_timeout"),
}


@cache
def config() -> dict[str, Any]:
    """Options of RLlib's config and of its worker, with their defaults."""
    of_worker = inspect.signature(RolloutWorker).parameters.items()
    return {name: each.default for name, each in of_worker if name != "config"} | vars(AlgorithmConfig())


@cache
def words_of_rllib() -> frozenset[str]:
    """Every word in the source of RLlib, and of what its users import from Ray beside it."""
    root = Path(inspect.getfile(ray)).parent
    files = [*root.glob("rllib/**/*.py"), *root.glob("tune/registry.py"), *root.glob("data/dataset.py")]
    return frozenset(word for file in files for word in re.findall(r"\w+", file.read_text()))


def names(cell: str) -> Iterator[tuple[str, ast.Call | None]]:
    """The dotted names in a cell, with their calls."""
    for span in spans(cell):
        for node in expressions(span):
            name = dotted(node.func if isinstance(node, ast.Call) else node)
            if name and name not in {"f", "_"}:
                yield name, node if isinstance(node, ast.Call) else None


def keywords(cell: str) -> Iterator[str]:
    """Names of options in a cell: ``name`` and ``name=value``."""
    for span in spans(cell):
        found = re.match(r"(\w+)(=|$)", span)
        if found:
            yield found[1]


def has(kind: Any, name: str) -> bool:
    """Whether instances of a class have an attribute, also one that is set when they are made."""
    if inspect.getattr_static(kind, name, None) is not None or name in getattr(kind, "__annotations__", {}):
        return True
    return name in set_when_made(kind)


@cache
def set_when_made(kind: Any) -> frozenset[str]:
    sources = (inspect.getsource(each) for each in kind.__mro__ if each.__module__[:4] in {"rlio", "ray."})
    return frozenset(name for source in sources for name in re.findall(r"self\.(\w+)\b.* = ", source))


@cache
def option(name: str) -> Any:
    """The default that an option has in rlio; `inspect.Parameter.empty` if rlio has none of that name."""
    for kind in OPTIONS:
        found = inspect.signature(kind).parameters.get(name)
        if found is not None and found.default is not found.empty:
            return found.default
    return inspect.Parameter.empty


def pair(row: Row, name: str) -> tuple[Any, Any, str] | None:
    """The classes of RLlib and rlio that both have what a row names, and its name there."""
    owner, _, attribute = name.rpartition(".")
    of_row = re.match(r"`(\w+)`:", row.theirs)
    every = [each for of_section in PAIRS.values() for each in of_section]
    wanted = owner or (of_row[1] if of_row else "")
    among = [each for each in every if each[0].__name__ == wanted] or PAIRS.get(row.section, [])
    for theirs, ours in among:
        if has(theirs, attribute) and has(ours, attribute):
            return theirs, ours, attribute
    return None


def arguments(function: Any) -> dict[str, inspect.Parameter]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    found = inspect.signature(function).parameters.items()
    return {name: each for name, each in found if name != "self" and each.kind not in kinds}


def takes_any(function: Any) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(each.kind is each.VAR_KEYWORD for each in parameters)


@cache
def differences(row: Row) -> tuple[int, list[str]]:
    """How much of a row was compared by its names, and what is unlike."""
    compared, wrong = 0, []
    for name in dict.fromkeys(keywords(row.theirs)):
        theirs, default = config().get(name, inspect.Parameter.empty), option(name)
        if inspect.Parameter.empty not in (theirs, default):
            compared += 1
            if not same_default(OTHER_DEFAULTS.get(name, (theirs, theirs)), (theirs, default)):
                wrong.append(f"default of {name}: {theirs!r}, {default!r}")
    for name, number in re.findall(r"`(\w+)` \((\d+)\)", row.theirs):
        compared += 1
        if config()[name] != int(number):
            wrong.append(f"{name} is {config()[name]}")
    for name, call in names(row.theirs):
        found = pair(row, name)
        if found is None:
            continue
        compared += 1
        theirs, ours = (inspect.getattr_static(each, found[2], None) for each in found[:2])
        if inspect.isfunction(theirs) and inspect.isfunction(ours):
            other = OTHER_ARGUMENTS.get(f"{found[0].__name__}.{found[2]}", "").split()
            if takes_any(ours) or found[0] is RLlibCallback:
                missing = set(other)  # Callbacks: see the test of their arguments.
            else:
                missing = (arguments(theirs).keys() - arguments(ours).keys()) ^ set(other)
            if missing:
                wrong.append(f"{found[0].__name__}.{found[2]}: {sorted(missing)} are not arguments in rlio")
        if call is not None and inspect.isfunction(theirs):
            named = [dotted(each) for each in call.args if not isinstance(each, ast.Constant)]
            unknown = set(named) - arguments(theirs).keys() - {None}
            if unknown:
                wrong.append(f"{found[0].__name__}.{found[2]} has no {sorted(map(str, unknown))} in RLlib")
    return compared, wrong


def same_default(expected: tuple[Any, Any], found: tuple[Any, Any]) -> bool:
    if not found[0] and "factory" in repr(found[1]):
        return True  # An empty dict, made for each.
    if callable(found[0]):
        return found[1] is None  # All agents have the default policy.
    return expected == found


# ---- rows ----

#: Section, the beginning of a row, and the tests that run it on both sides: of this module, or with the name
#: of another file of this folder (calls, callbacks, or nothing for test_rllib.py) before a colon.
BY_TEST = """
##
`input_={"sampler"
    inputs_and_outputs_are_the_same_words
`config.offline_data(output="out")`
    :the_old_stack_records_and_trains
`config.offline_data(input_="out")`
    :the_old_stack_records_and_trains
`JsonReader(path, ioctx)`
    :json_of_rllib_is_equal_after_a_data_set_of_rlio
`JsonWriter(path, ioctx)`
    :rllibs_json_reader_reads_a_folder_of_rlio_only_when_it_is_converted
## Choosing an input
a directory
    files_are_found_in_the_same_ways
a zip file
    files_are_found_in_the_same_ways
`"sampler"`
    inputs_and_outputs_are_the_same_words
`{"sampler": 0.4
    inputs_and_outputs_are_the_same_words
a function of `IOContext`
    inputs_and_outputs_are_the_same_words
a name given to
    inputs_and_outputs_are_the_same_words
## Choosing an output
a path or URI
    :rllibs_json_reader_reads_a_folder_of_rlio_only_when_it_is_converted
`None`
    inputs_and_outputs_are_the_same_words
`"logdir"`
    inputs_and_outputs_are_the_same_words
a function of `IOContext`
    inputs_and_outputs_are_the_same_words
## Options of writing
`compress_observations`
    observations_are_compressed_in_the_batch_that_is_returned
`infos`
    :infos_that_rllib_recorded_are_those_of_the_next_observation
    :infos_of_rlio_are_those_of_the_observation_for_rllib
## Rollout workers
kinds of environments
    several_agents_are_set_up_alike
    calls:a_vector_env_of_rllib_gives_the_steps_of_its_environments
a multi-agent config
    several_agents_are_set_up_alike
`clip_rewards`
    callbacks:rewards_are_clipped_as_the_page_says
`batch_mode`
    batches_have_the_rows_of_rllib
`sample()`
    batches_have_the_rows_of_rllib
`sample_with_count()`
    numbers_of_learning_are_by_policy_as_the_page_says
`sample_and_learn(
    sample_and_learn_takes_rllibs_arguments
`learn_on_batch`
    numbers_of_learning_are_by_policy_as_the_page_says
`compute_gradients(samples
    calls:the_batch_count_lies_beside_the_policies
`get_metrics()`
    calls:metrics_of_the_old_stack_have_the_same_names_with_one_agent
`foreach_env`
    numbers_of_learning_are_by_policy_as_the_page_says
`for_policy`
    numbers_of_learning_are_by_policy_as_the_page_says
`get_state`
    states_of_workers_and_runners_are_got_and_set_by_the_same_calls
`get_weights(policies
    numbers_of_learning_are_by_policy_as_the_page_says
`set_weights(weights
    numbers_of_learning_are_by_policy_as_the_page_says
`get_global_vars`
    numbers_of_learning_are_by_policy_as_the_page_says
`lock`
    numbers_of_learning_are_by_policy_as_the_page_says
`creation_args()`
    numbers_of_learning_are_by_policy_as_the_page_says
## Sampling
`mean_raw_obs_processing_ms`
    calls:metrics_of_the_old_stack_have_the_same_names_with_one_agent
fragments that span
    batches_have_the_rows_of_rllib
complete episodes
    batches_have_the_rows_of_rllib
`unroll_id`
    batches_have_the_rows_of_rllib
`training_enabled`
    rows_that_are_not_for_training_are_in_no_batch
`postprocess_episode`
    callbacks:rllib_calls_callbacks_as_the_golden_list_says
`SampleBatch.shuffle()`
    methods_of_batches_give_the_same
`SampleBatch.OBS`
    calls:constants_of_the_batch_are_rllibs
    methods_of_batches_give_the_same
## Columns of a batch
`obs`, `new_obs`
    columns_are_those_of_the_table
`infos`, if
    columns_are_those_of_the_table
`unroll_id`, `agent_index`
    columns_are_those_of_the_table
`weights_seq_no`
    columns_are_those_of_the_table
`vf_preds`
    columns_are_those_of_the_table
`state_in_0`
    columns_are_those_of_the_table
`t` of agents
    t_is_as_the_page_says
## Callbacks and metrics
`worker`
    callbacks_with_rllibs_signatures_are_called_alike
`base_env`
    callbacks_with_rllibs_signatures_are_called_alike
`env_context`
    callbacks_with_rllibs_signatures_are_called_alike
`policies`, `rl_module`
    callbacks_with_rllibs_signatures_are_called_alike
`prev_episode_chunks`
    callbacks_with_rllibs_signatures_are_called_alike
`config.callbacks(
    callbacks_may_be_functions_on_both_sides
`on_environment_created`
    callbacks_with_rllibs_signatures_are_called_alike
`on_episode_created`
    callbacks:rllib_calls_callbacks_as_the_golden_list_says
`on_postprocess_trajectory`
    callbacks:rllib_calls_callbacks_as_the_golden_list_says
`summarize_episodes`
    calls:metrics_of_the_old_stack_have_the_same_names_with_one_agent
    calls:metrics_of_the_new_stack_have_the_same_names
## Weights and filters
`weights_seq_no`
    rllibs_workers_refuse_external_environments_and_take_other_weights
`MeanStdFilter`
    filters_have_the_same_statistics
## Policies
`use_gae`
    postprocessing_gives_the_same_numbers
`n_step`
    postprocessing_gives_the_same_numbers
`compute_advantages`
    postprocessing_gives_the_same_numbers
## Environments
`EnvContext.worker_index`
    contexts_of_environments_are_the_same
a subclass of `VectorEnv`
    calls:a_vector_env_of_rllib_gives_the_steps_of_its_environments
## The new API stack: `SingleAgentEnvRunner`
`sample(num_timesteps
    new_runners_sample_the_same_episodes
chunks
    new_runners_sample_the_same_episodes
`make_env`
    new_runners_sample_the_same_episodes
`get_state(components
    states_of_workers_and_runners_are_got_and_set_by_the_same_calls
## External environments
RLlib 2.60's workers refuse
    rllibs_workers_refuse_external_environments_and_take_other_weights
`ExternalMultiAgentEnv`
    calls:agents_of_an_external_env_have_the_transitions_of_rllibs_adapter
`log_action`
    calls:agents_of_an_external_env_have_the_transitions_of_rllibs_adapter
## Several agents
flags of agents
    batches_of_several_agents_have_the_rows_of_rllib
`policy_mapping_fn(
    the_mapping_of_agents_gets_the_same_arguments
an agent that comes back
    an_agent_that_comes_back_is_an_error_as_in_the_new_stack
`make_multi_agent("CartPole-v1")`
    several_agents_are_set_up_alike
`sample(num_timesteps
    new_runners_sample_the_same_episodes
`MultiAgentEpisode.get_observations`
    calls:values_of_an_episode_are_filled_as_rllib_fills_them
late agents
    batches_of_several_agents_have_the_rows_of_rllib
## Judging a policy from the log
`ImportanceSampling`
    estimates_are_those_of_rllibs_classes
`WeightedImportanceSampling`
    estimates_are_those_of_rllibs_classes
`v_gain` of
    estimates_are_those_of_rllibs_classes
## What RLlib wrote, read by rlio
`JsonWriter`
    :json_of_rllib_is_equal_after_a_data_set_of_rlio
`DatasetWriter`
    :parquet_of_rllibs_dataset_writer_is_read
the new stack with `output_write_episodes=True`
    :episodes_of_rllib_are_equal_after_a_data_set_of_rlio
"""


#: Rows that are read only, by the reason; section, and the beginnings of rows.
READ_ONLY = """
# RLlib does otherwise, as the row says
## Choosing an input
a class path `"package.module.Class"`
## Options of reading
the policy's spaces
files of one folder
## Rollout workers
worker 0 without
`observation_filter
## Sampling
what the policy
the warning of
exploration hooks
## Columns of a batch
`prev_actions`, `prev_rewards`
## Callbacks and metrics
a method without
smoothing over
## Weights and filters
`FilterManager.synchronize`
filters in evaluation
## Policies
`weights_seq_no`
## Environments
`validate_env(env
`disable_env_checking`
`custom_vector_env`
`try_reset` that
a reset that keeps
## The new API stack: `SingleAgentEnvRunner`
every output of
a failed step drops
seeds in evaluation
## External environments
a loop that raises;
## Several agents
a last observation
rewards after an
a row at the end
`infos["__common__"]`
zero-agent episodes
a failed step:
## Judging a policy from the log
`estimate_on_dataset
`OfflinePolicyEvaluationRunner`
# another name or form: what is there instead, of which nothing is the same
## Choosing an input
`"d4rl.hopper-medium-v2"`
`"dataset"` with `input_config
`"dataset"` with `loader_fn`
## Options of reading
`input_config=
## Choosing an output
`"dataset"` with `{"format": "parquet"
`"dataset"` with `{"format": "json"
## Options of writing
`output_max_file_size`
`max_num_samples_per_file`
`output_compress_columns
`output_filesystem`
`output_config
## The new API stack: `OfflineData`
`input_read_method`
`input_read_schema
`input_filesystem`
`input_spaces_jsonable`
`offline_data_class`
## Rollout workers
`policies={id:
`preprocessor_pref
`num_envs_per_worker`
## Sampling
`SamplerInput.next`
`off_policy_actions`
`SampleBatchBuilder`
`chop_into_sequences`
## Callbacks and metrics
`make_callback`
`metrics_logger`
## Policies
`view_requirements`
`exploration_config`
an `RLModule`, a
`do_minibatch_sgd
## Environments
`num_envs_per_env_runner`
`extra_python_environs_for_driver`
## The new API stack: `SingleAgentEnvRunner`
`SingleAgentEpisode.get_observations`
env-to-module pipeline
`merge_env_runner_states`
`FlattenObservations`
`PrevActionsPrevRewards`
`OfflineSingleAgentEnvRunner`
`EnvRunnerGroup`
`get_ctor_args_and_kwargs`
## External environments
RLlink, `env_runner_server_for_external_inference`
## Several agents
`check_multiagent_environments`
`MultiAgentEnvRunner
`one_hot_discrete
`len_lookback_buffer`
## Judging a policy from the log
`OffPolicyEstimator.estimate
## What has no counterpart, and what to do instead
`InputReader.tf_input_ops
`IOContext.config`
`IOContext.worker`
`IOContext.input_config`
`JsonReader.read_all_files
`from_json_data`
an action connector
# only in rlio
## Choosing an output
-
## Options of writing
-
## Columns of a batch
-
# RLlib 2.60 has it no more
## Rollout workers
`sample_async`
`export_policy_model`
`PolicyEvaluator`
## Sampling
`SyncSampler`, `AsyncSampler`
agent connectors
`horizon`, `soft_horizon`
`observation_fn`
rendering, Atari's
## Callbacks and metrics
`"callbacks": {"on_episode_end":
## External environments
`PolicyServerInput
its queue of samples
# needs a cluster, devices, games or training for minutes
## Policies
`setup_torch_data_parallel
PPO, A2C as policies
`num_gpus`, `_fake_gpus`
## Environments
`preprocessor_pref
metrics of Atari's
## Groups of workers
`EnvRunnerGroup`
`local_env_runner
`synchronous_parallel_sample
`foreach_env_runner(
`foreach_env_runner_async`
`sync_env_runner_states`
`collect_metrics`
`FaultTolerantActorManager
`restart_failed_env_runners`
an exception in
a replaced worker
`num_env_runners
`num_cpus_per_env_runner`
`is_policy_to_train`
a replay buffer
## External environments
`PolicyClient(address
## Judging a policy from the log
`DirectMethod`, `FQETorchModel`
`DoublyRobust`, `normalize_weights`
`FeatureImportance`
# recordings of it are in tests/test_rllib_recordings.py, foreign_parquet and packed
## What RLlib wrote, read by rlio
`ray.data`'s `write_json`
the new stack with `output_write_episodes=False`
RLlib of 2019 (ray
"""


def listed(text: str) -> Iterator[tuple[Row, str]]:
    """The rows that a list names, each with the line that goes with it: a reason, or a test."""
    section = reason = ""
    row: Row | None = None
    for line in text.strip().splitlines():
        if line.startswith("##"):
            section = line[3:]
        elif line.startswith("# "):
            reason = line[2:]
        elif line.startswith(" "):
            assert row is not None
            yield row, line.strip()
        else:
            (row,) = (each for each in rows() if each.section == section and each.theirs.startswith(line))
            if reason:
                yield row, reason


def test_every_row_is_run_on_both_sides_or_listed_as_read_only() -> None:
    by_test, read_only = dict(listed(BY_TEST)), dict(listed(READ_ONLY))
    compared = {row for row in rows() if not row.is_absent and differences(row)[0]}
    left = [
        row for row in rows() if not row.is_absent and row not in compared | by_test.keys() | read_only.keys()
    ]
    assert not left, "run them by a test that BY_TEST names, or give the reason in READ_ONLY"
    twice = [row.theirs for row in read_only if row in compared | by_test.keys()]
    assert not twice, "they are run: READ_ONLY must not have them"
    assert len(compared | by_test.keys()) > 130


def test_the_names_in_a_row_are_the_same_in_rllib_and_rlio() -> None:
    wrong = [(row.theirs, each) for row in rows() for each in differences(row)[1] if not row.is_absent]
    assert not wrong


def test_tests_that_run_a_row_exist() -> None:
    missing = []
    for row, name in listed(BY_TEST):
        file, has_file, test = name.rpartition(":")
        of = "test_rllib_rows" if not has_file else f"test_rllib_{file}".rstrip("_")
        if f"\ndef test_{test}(" not in (HERE / f"{of}.py").read_text():
            missing.append((row.theirs, name))
    assert not missing


def test_names_of_rllib_are_in_rllib() -> None:
    unknown = {
        name
        for row in rows()
        for name, _ in names(row.theirs)
        if not set(name.split(".")) - {"f", "_"} <= words_of_rllib() | OF_EARLIER
    }
    assert not unknown
    assert not OF_EARLIER & words_of_rllib(), "RLlib has them still"


# ---- what rows say beyond names ----


def old_worker(*, agents: str | None = None, num_envs: int = 1, clip: Any = None, **options: Any) -> Any:
    """RLlib's RolloutWorker with random policies, in the environments of `callback_calls`."""
    callback_calls.Lengths.made = count()
    env = Steps if agents is None else agents_env(MultiAgentEnv, agents)
    return MAKE["_old"](Scenario(OLD, agents, num_envs, 1, options), env, RLlibCallback, clip_rewards=clip)


def new_runner(*, agents: str | None = None, num_envs: int = 1, **options: Any) -> Any:
    """RLlib's SingleAgentEnvRunner or MultiAgentEnvRunner, likewise."""
    callback_calls.Lengths.made = count()
    env = Steps if agents is None else agents_env(MultiAgentEnv, agents)
    return MAKE["_new"](Scenario(NEW, agents, num_envs, 1, options), env, RLlibCallback)


def own_worker(*, agents: str | None = None, num_envs: int = 1, **options: Any) -> rlio.RolloutWorker:
    """The worker of rlio, likewise."""
    callback_calls.Lengths.made = count()
    rollout = rlio.RolloutConfig(num_envs=num_envs, **options)
    if agents is None:
        return rlio.RolloutWorker(
            lambda context: Steps(context), rlio.RandomPolicy(), rollout=rollout, seed=0
        )
    env = agents_env(rlio.MultiAgentEnv, agents)
    policies = {name: rlio.RandomPolicy() for name in ("first", "second")}
    setup = rlio.sampling.PolicySetup(policy_mapping_fn=lambda agent_id, episode: policy_of(agent_id))
    return rlio.RolloutWorker(
        lambda context: env(context), policies, rollout=rollout, policy_setup=setup, seed=0
    )


def own_runner(*, agents: str | None = None, num_envs: int = 1, **options: Any) -> Any:
    callback_calls.Lengths.made = count()
    rollout = rlio.RolloutConfig(num_envs=num_envs, **options)
    if agents is None:
        return rlio.EnvRunner(lambda context: Steps(context), rlio.RandomPolicy(), config=rollout, seed=0)
    env = agents_env(rlio.MultiAgentEnv, agents)
    policies = {name: rlio.RandomPolicy() for name in ("first", "second")}
    return rlio.MultiAgentEnvRunner(
        lambda context: env(context),
        policies,
        lambda agent, episode: policy_of(agent),
        config=rollout,
        seed=0,
    )


def ppo_worker(**options: Any) -> Any:
    made = PPOConfig().api_stack(enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False)
    made.environment("CartPole-v1").env_runners(rollout_fragment_length=60).debugging(seed=0)
    made.training(model={"fcnet_hiddens": [8]}).update_from_dict(options)
    return RolloutWorker(
        env_creator=lambda _: gym.make("CartPole-v1"), default_policy_class=PPOTorchPolicy, config=made
    )


def actor_critic_worker(**options: Any) -> rlio.RolloutWorker:
    policy = rlio.policies.ActorCritic(hidden=[8])
    rollout = rlio.RolloutConfig(rollout_fragment_length=60, **options)
    return rlio.RolloutWorker("CartPole-v1", policy, rollout=rollout, seed=0)


def seen(batch: Any) -> list[Any]:
    """The rows of a batch by what does not depend on the actions, and whether they are followed by a cut."""
    columns = [np.asarray(batch[name]) for name in ("obs", "new_obs", "rewards", "terminateds", "t")]
    return [tuple(np.ravel(value).tolist() for value in row) for row in zip(*columns, strict=True)]


@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_batches_have_the_rows_of_rllib(mode: str, num_envs: int) -> None:
    """Fragments that span episodes, and whole episodes: the same rows, and as many in each batch."""
    options: dict[str, Any] = {"rollout_fragment_length": 4, "batch_mode": mode, "num_envs": num_envs}
    theirs = old_worker(**options)
    with own_worker(**options) as ours:
        for _ in range(3):
            said, found = theirs.sample()["default_policy"], ours.sample()
            assert isinstance(found, rlio.SampleBatch)
            # The observation after a cut is the next one on both sides; RLlib orders episodes as they ended.
            assert sorted(seen(found)) == sorted(seen(said))
            assert len(found) == len(said)
            pieces = [
                [len(part) for part in np.split(ids, 1 + np.flatnonzero(np.diff(ids)))]
                for ids in (np.asarray(each["unroll_id"]) for each in (said, found))
            ]
            assert sorted(pieces[0]) == sorted(pieces[1])
    theirs.stop()


@pytest.mark.parametrize(("agents", "steps"), [("together", None), ("turns", ([1, 3], [0, 2]))])
def test_t_is_as_the_page_says(agents: str, steps: Any) -> None:
    options: dict[str, Any] = {
        "agents": agents,
        "rollout_fragment_length": 5,
        "batch_mode": "complete_episodes",
    }
    theirs = old_worker(**options)
    said, found = [], []
    with own_worker(**options) as ours:
        for _ in range(2):  # The second episode has five steps.
            said, found = [
                each.policy_batches["first"]["t"].tolist() for each in (theirs.sample(), ours.sample())
            ]
    theirs.stop()
    if steps is None:
        assert said == found
    else:
        assert (said[-3:-1], found[-3:-1]) == steps  # The last rows end the episode, in its step 4.


def test_columns_are_those_of_the_table() -> None:
    theirs, plain, recurrent = ppo_worker(), actor_critic_worker(), ppo_worker(model={"use_lstm": True})
    said, of_lstm = (set(each.sample()["default_policy"].keys()) for each in (theirs, recurrent))
    with plain, actor_critic_worker(record_infos=True) as with_infos:
        found, found_infos = set(plain.sample()), set(with_infos.sample())
    new = SingleAgentEnvRunner(config=PPOConfig().environment("CartPole-v1"))
    steps = new.sample(num_timesteps=10)
    new.stop()
    table = {
        row.theirs: set(re.findall(r"`(\w+)`", row.theirs))
        for row in rows()
        if row.section == "Columns of a batch"
    }
    of_row = {start: names for start in table for names in [table[start]]}

    def row(start: str) -> set[str]:
        (names,) = (each for key, each in of_row.items() if key.startswith(start))
        return names

    always = row("`obs`") | row("`unroll_id`")
    assert always <= said
    assert always <= found
    assert row("`infos`") <= said & (found_infos - found)
    assert row("`vf_preds`") <= said & found
    assert row("`state_in_0`") <= of_lstm
    assert (
        row("`weights_seq_no`") <= {name for episode in steps for name in episode.extra_model_outputs} & found
    )
    # Nothing that RLlib has is left out of the table.
    assert said - set().union(*table.values()) == set()


def test_callbacks_with_rllibs_signatures_are_called_alike() -> None:
    """Each callback of RLlib, with its arguments, in its own worker and in rlio's."""
    called: dict[str, set[str]] = {}

    def recorder(base: type, of: str) -> Any:
        called[of] = set()

        def method(name: str) -> Any:
            def call(self: Any, **given: Any) -> None:
                known.bind(self, **given)
                called[of].add(name)

            known = inspect.signature(getattr(RLlibCallback, name))
            call.__signature__ = known  # type: ignore[attr-defined]
            return call

        return type("Recorder", (base,), {name: method(name) for name in CALLED})

    worker = ppo_worker(callbacks_class=recorder(RLlibCallback, OLD), batch_mode="complete_episodes")
    worker.learn_on_batch(worker.sample())
    runner = MAKE["_new"](
        Scenario(NEW, None, 2, 1, {"rollout_fragment_length": 4}), Steps, recorder(RLlibCallback, NEW)
    )
    runner.sample(num_timesteps=8)
    runner.stop()
    rollout = rlio.RolloutConfig(rollout_fragment_length=4, num_envs=2)
    ours = recorder(rlio.Callbacks, "rlio")
    policy = rlio.policies.DQN(hidden=[4])
    with rlio.RolloutWorker(lambda: Steps(), policy, rollout=rollout, callbacks=ours, seed=0) as own:
        own.learn_on_batch(own.sample())
    assert called[OLD] | called[NEW] == set(CALLED)
    assert called["rlio"] == set(CALLED)


#: Callbacks of runners and workers.
CALLED = (
    *("on_environment_created", "on_sub_environment_created", "on_create_policy"),
    *("on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end"),
    *("on_postprocess_trajectory", "on_sample_end", "on_learn_on_batch"),
)


def test_methods_of_batches_give_the_same() -> None:
    """All methods of the same name that need no argument, and the others with one."""
    columns: dict[str, Any] = {
        "obs": np.arange(12, dtype=np.float32).reshape(6, 2),
        "actions": np.arange(6),
        "eps_id": np.array([1, 1, 1, 2, 2, 2]),
        "terminateds": np.array([False, False, True] * 2),
        "truncateds": np.zeros(6, bool),
    }
    calls: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(("agent_steps", "env_steps", "copy", "size_bytes", "split_by_episode"), ()),
        **dict.fromkeys(("is_single_trajectory", "is_terminated_or_truncated", "as_multi_agent"), ()),
        "slice": (1, 4),
        "columns": (["obs", "actions"],),
    }

    def plain(value: Any) -> Any:
        if isinstance(value, (SampleBatch, rlio.SampleBatch, dict)):
            return {name: np.asarray(value[name]).tolist() for name in value.keys()}  # noqa: SIM118 - RLlib's
        if isinstance(value, (MultiAgentBatch, rlio.MultiAgentBatch)):
            return {name: plain(batch) for name, batch in value.policy_batches.items()}, value.count
        if isinstance(value, (list, tuple)):
            return [plain(each) for each in value]
        return np.asarray(value).tolist()

    theirs, ours = SampleBatch(columns), rlio.SampleBatch(columns)
    for name, args in calls.items():
        assert plain(getattr(ours, name)(*args)) == plain(getattr(theirs, name)(*args)), name
    assert plain(list(ours.rows())) == plain(list(theirs.rows()))
    assert plain(ours.concat(ours)) == plain(theirs.concat(theirs))
    joined = plain(concat_samples([theirs, theirs]))
    assert (
        plain(rlio.concat_samples([ours, ours]))
        == plain(rlio.SampleBatch.concat_samples([ours, ours]))
        == joined
    )
    with pytest.raises(ValueError, match="deprecated"):
        SampleBatch.concat_samples([theirs, theirs])
    # RLlib's never ends where the size does not divide the rows.
    assert [plain(part) for part in ours.timeslices(3)] == [plain(part) for part in theirs.timeslices(3)]
    assert len(theirs) == len(ours) == theirs.count == ours.count
    # In place in RLlib, and not here.
    before = plain(ours)
    assert theirs.shuffle() is theirs
    assert ours.shuffle(seed=0) is not ours
    packed, own_packed = theirs.copy(), ours.compress(columns=["obs"])
    packed.compress(columns={"obs"})
    assert packed.is_training == own_packed.is_training
    packed.decompress_if_needed(columns={"obs"})
    assert np.asarray(packed["obs"]).tolist() == np.asarray(theirs["obs"]).tolist()
    assert plain(own_packed.decompress_if_needed(["obs"])) == before == plain(ours)
    padded, sequences = ({**columns, "seq_lens": np.array([2, 4])} for _ in range(2))
    said = SampleBatch(padded)
    assert said.right_zero_pad(4) is said
    found = rlio.SampleBatch(sequences).right_zero_pad(4)
    assert np.asarray(found["obs"]).tolist() == said["obs"].tolist()
    assert found["obs"].shape == (8, 2)


def test_sample_and_learn_takes_rllibs_arguments() -> None:
    theirs = ppo_worker()
    said, steps = theirs.sample_and_learn(60, 2, 20, ["advantages"])
    with actor_critic_worker() as ours:
        found, own_steps = ours.sample_and_learn(60, 2, 20, ["advantages"])
        assert own_steps == steps == 60
        # By policy id in RLlib; of the only policy here.
        assert said.keys() == {"default_policy"}
        assert "default_policy" not in found
        assert len(ours.sample(7)) == 7
    with pytest.raises(AssertionError):
        theirs.sample_and_learn(59, 2, 20, [])


def test_numbers_of_learning_are_by_policy_as_the_page_says() -> None:
    theirs = ppo_worker()
    batch = theirs.sample()
    said = theirs.learn_on_batch(batch)
    with actor_critic_worker() as ours:
        found = ours.learn_on_batch(ours.sample())
        assert theirs.sample_with_count()[1] == ours.sample_with_count()[1] == 60
        assert theirs.get_weights().keys() == {"default_policy"}
        assert all(isinstance(value, np.ndarray) for value in ours.get_weights().values())
        for steps, of_ours in ((420, 420), (7, 120)):  # 120 were sampled here.
            theirs.set_weights(theirs.get_weights(), {"timestep": steps}, 3)
            ours.set_weights(ours.get_weights(), {"timestep": steps}, 3)
            assert theirs.get_global_vars()["timestep"] == steps
            assert ours.get_global_vars().timestep == of_ours
        assert theirs.get_policy("default_policy") is not None
        assert ours.for_policy(lambda policy: 1) == theirs.for_policy(lambda policy: 1) == 1
        for name in ("foreach_policy", "foreach_policy_to_train"):
            calls = [getattr(each, name)(lambda policy, policy_id: policy_id) for each in (theirs, ours)]
            assert calls[0] == calls[1] == ["default_policy"]
        assert theirs.foreach_env(lambda env: 1) == ours.foreach_env(lambda env: 1) == [1]
        assert len(theirs.foreach_env_with_context(lambda env, context: context.worker_index)) == 1
        assert len(ours.foreach_env_with_context(lambda env, context: context.worker_index)) == 1
        assert theirs.apply(lambda worker, by: by, 3) == ours.apply(lambda worker, by: by, 3) == 3
        assert theirs.get_node_ip() == ours.get_node_ip()
        assert theirs.get_host() == ours.get_host()
        assert isinstance(theirs.find_free_port(), int) is isinstance(ours.find_free_port(), int) is True
        assert theirs.get_policies_to_train() == set(ours.get_policies_to_train()) == {"default_policy"}
        ours.lock()
        ours.unlock()
        theirs.lock()
        theirs.unlock()
    (of_policy,) = said.values()
    assert of_policy["num_grad_updates_lifetime"] == found["num_grad_updates_lifetime"] == 1


def test_states_of_workers_and_runners_are_got_and_set_by_the_same_calls(tmp_path: Path) -> None:
    theirs, again = ppo_worker(), ppo_worker()
    again.set_state(theirs.get_state())
    with actor_critic_worker() as ours, actor_critic_worker() as other:
        ours.sample()
        other.set_state(ours.get_state())
        for name, value in ours.get_weights().items():
            np.testing.assert_array_equal(other.get_weights()[name], value)
        state = ours.get_state()
        components = {
            "policies",
            "policy_mapping_fn",
            "policies_to_train",
            "global_vars",
            "position",
            "metrics",
            "connectors",
        }
        assert {name for name in components if name in str(state)} >= {"policies", "global_vars"}
        # By name or in a list, and left out likewise.
        for part in ("policies", ["policies"]):
            assert set(ours.get_state(part)) == set(ours.get_state(["policies"]))
            assert "policies" not in ours.get_state(not_components=part)
    runner, own = new_runner(), own_runner()
    assert set(runner.get_state("rl_module")) >= {"rl_module"}
    assert "rl_module" not in runner.get_state(not_components="rl_module")
    assert "policy" in own.get_state("policy")
    assert "policy" not in own.get_state(not_components="policy")
    assert "policy" not in own.get_state(not_components=["policy"])
    runner.stop()
    own.stop()


@pytest.mark.parametrize("agents", [None, "together", "come and go"])
def test_new_runners_sample_the_same_episodes(agents: str | None) -> None:
    """Lengths, ends and ids of what `sample` returns, in its order."""

    def told(episodes: Any) -> list[Any]:
        return [(steps(each), bool(each.is_done)) for each in episodes]

    def steps(episode: Any) -> int:
        return int(episode.env_steps()) if agents else len(episode)

    theirs, ours = new_runner(agents=agents), own_runner(agents=agents)
    for call in (
        {"num_episodes": 3},
        {"num_timesteps": 4},
        {"num_timesteps": 7},
        {"num_timesteps": 4, "force_reset": True},
    ):
        said, found = theirs.sample(**call), ours.sample(**call)
        assert told(found) == told(said), call
    # RLlib cannot go on at random where several agents had outputs of a module.
    random = {"num_timesteps": 3, "random_actions": True, "explore": False, "force_reset": True}
    assert sum(map(steps, theirs.sample(**random))) == sum(map(steps, ours.sample(**random)))
    for name in ("assert_healthy", "get_spaces", "get_metrics", "make_env"):
        getattr(theirs, name)()
        getattr(ours, name)()
    theirs.stop()
    ours.stop()


def test_contexts_of_environments_are_the_same() -> None:
    given: dict[str, Any] = {
        "worker_index": 2,
        "vector_index": 1,
        "num_workers": 3,
        "remote": True,
        "recreated_worker": True,
    }
    for kind in (RllibContext, EnvContext):
        context: Any = kind({"a": 1}, **given)
        assert {name: getattr(context, name) for name in given} == given
        copied = context.copy_with_overrides(env_config={"b": 2}, worker_index=5)
        assert (copied["b"], copied.worker_index, copied.vector_index) == (2, 5, 1)
        context.set_defaults({"a": 7, "c": 8})
        assert dict(context) == {"a": 1, "c": 8}


def test_filters_have_the_same_statistics() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(3.0, 2.0, (50, 3)).astype(np.float32) for _ in range(2)]
    theirs, ours = [MeanStdFilter((3,)) for _ in parts], [rlio.connectors.MeanStdFilter() for _ in parts]
    for values, said, found in zip(parts, theirs, ours, strict=True):
        found.bind(gym.spaces.Box(-np.inf, np.inf, (3,), np.float32), rlio.RandomPolicy())
        expected = [said(each) for each in values]
        given = np.concatenate([found(each[None]) for each in values])
        # RLlib adds 1e-8 to the deviation, after the first value of which there is none.
        np.testing.assert_allclose(given[2:], expected[2:], rtol=1e-4, atol=1e-4)
    for filters in (theirs, ours):
        filters[0].apply_changes(filters[1])
        filters[1].sync(filters[0])
        copied = filters[1].copy()
        assert copied.running_stats.n == filters[1].running_stats.n == 100
        copied.reset_buffer()
    np.testing.assert_allclose(ours[1].running_stats.mean, theirs[1].running_stats.mean, rtol=1e-6)
    np.testing.assert_allclose(ours[1].running_stats.std, theirs[1].running_stats.std, rtol=1e-6)


def test_postprocessing_gives_the_same_numbers() -> None:
    from ray.rllib.evaluation import postprocessing as theirs
    from ray.rllib.utils.sgd import standardized

    from rlio.policies import postprocessing as ours

    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {
        "obs": rng.random((6, 2), np.float32),
        "new_obs": np.zeros((6, 2), np.float32),
        "actions": np.zeros(6, np.int64),
        "rewards": rng.random(6, np.float32),
        "vf_preds": rng.random(6, np.float32),
        "terminateds": np.array([False] * 5 + [True]),
        "truncateds": np.zeros(6, bool),
        "eps_id": np.ones(6, np.int64),
        "t": np.arange(6),
    }
    columns["new_obs"][:-1] = columns["obs"][1:]
    for options in ({"use_gae": True}, {"use_gae": False}, {"use_gae": False, "use_critic": False}):
        said = theirs.compute_advantages(SampleBatch(dict(columns)), 0.0, 0.9, 0.7, **options)
        own = {"use_critic": options.get("use_critic", True), "lambda_": 0.7 if options["use_gae"] else 1.0}
        gae = rlio.policies.GAE(gamma=0.9, **own)
        found = ours.compute_gae(rlio.SampleBatch(dict(columns)), gae, lambda ends: np.zeros(len(ends)))
        # RLlib has zeros as the targets of no critic.
        for name in ("advantages", "value_targets") if own["use_critic"] else ("advantages",):
            np.testing.assert_allclose(found[name], said[name], rtol=1e-5, err_msg=f"{name} {options}")
    np.testing.assert_allclose(
        ours.discount_cumsum(columns["rewards"], 0.9),
        theirs.discount_cumsum(columns["rewards"], 0.9),
        rtol=1e-6,
    )
    steps = SampleBatch({name: value.copy() for name, value in columns.items()})
    theirs.adjust_nstep(3, 0.9, steps)
    shortened = ours.adjust_nstep(rlio.SampleBatch(dict(columns)), ours.NStep(3, 0.9))
    for name in ("rewards", "new_obs", "terminateds"):
        np.testing.assert_allclose(np.asarray(shortened[name]), np.asarray(steps[name]), rtol=1e-5)
    scaled = ours.standardize_fields(rlio.SampleBatch(dict(columns)), ["rewards"])["rewards"]
    np.testing.assert_allclose(scaled, standardized(columns["rewards"]), rtol=1e-5)


def test_files_are_found_in_the_same_ways(tmp_path: Path) -> None:
    """A folder, a glob, a list and a zip file; each has the same rows for both readers."""
    for number in range(3):
        writer = JsonWriter(str(tmp_path / str(number)))
        writer.write(
            SampleBatch(
                obs=np.full((2, 1), number),
                actions=np.zeros(2),
                rewards=np.zeros(2),
                eps_id=np.full(2, number),
                terminateds=np.zeros(2, bool),
                truncateds=np.zeros(2, bool),
            )
        )
        writer.cur_file.close()
        (file,) = (tmp_path / str(number)).iterdir()
        file.rename(tmp_path / f"{number}.json")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        text = "".join((tmp_path / f"{number}.json").read_text() for number in range(3))
        archive.writestr(
            "all.json", text
        )  # RLlib unpacks it into the folder, and reads what has the same name.
    files = [str(tmp_path / f"{number}.json") for number in (0, 2)]
    folder = tmp_path / "folder"
    folder.mkdir()
    for file in files:
        shutil.copy(file, folder)
    for paths in (str(folder), str(folder / "*.json"), files, str(tmp_path / "all.zip")):
        found = [int(batch["obs"][0, 0]) for batch in rlio.JsonReader(paths, epochs=1)]
        said = [int(each["obs"][0, 0]) for each in JsonReader(paths).read_all_files()]
        assert sorted(found) == sorted(said) == ([0, 1, 2] if "zip" in paths else [0, 2]), paths


def test_observations_are_compressed_in_the_batch_that_is_returned() -> None:
    for how in (True, "bulk"):
        theirs = ppo_worker(compress_observations=how).sample()["default_policy"]
        with actor_critic_worker(compress_observations=how) as worker:
            ours = worker.sample()
        # Each row is packed, or all of them at once.
        assert np.asarray(theirs["obs"]).dtype.kind != "f"
        assert len(theirs) == len(ours) == 60
        theirs.decompress_if_needed()
        assert np.asarray(theirs["obs"]).shape == ours.decompress_if_needed()["obs"].shape == (60, 4)


def test_several_agents_are_set_up_alike() -> None:
    from ray.rllib.env.multi_agent_env import make_multi_agent

    said = make_multi_agent("CartPole-v1")({"num_agents": 2})
    found = rlio.envs.make_multi_agent("CartPole-v1")({"num_agents": 2})
    for name in ("possible_agents", "observation_spaces", "action_spaces"):
        assert getattr(found, name) == getattr(said, name)
    assert found.get_observation_space(0) == said.get_observation_space(0)
    for each in (said, found):
        obs, _ = each.reset(seed=0)
        assert obs.keys() == {0, 1}
        assert each.step({0: 0, 1: 1})[2].keys() >= {"__all__"}
    # A multi-agent config with an environment of one agent.
    policies = dict.fromkeys(("a", "b"), (None, Steps.observation_space, Steps.action_space, {}))
    made = AlgorithmConfig().api_stack(
        enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False
    )
    made.environment(Steps).multi_agent(policies=policies, policy_mapping_fn=lambda *_, **__: "a")
    with pytest.raises(ValueError, match="MultiAgentEnv"):
        RolloutWorker(env_creator=lambda _: Steps(), default_policy_class=MAKE["RandomPolicy"], config=made)
    with pytest.raises(ValueError, match="agent"):
        rlio.RolloutWorker("CartPole-v1", {"a": rlio.RandomPolicy(), "b": rlio.RandomPolicy()})


def test_estimates_are_those_of_rllibs_classes(tmp_path: Path) -> None:
    from ray.rllib.offline.estimators import ImportanceSampling, WeightedImportanceSampling

    from rlio.evaluation import evaluate_offline

    class Judged:
        config: Any = {}  # noqa: RUF012 - read by RLlib

        def compute_log_likelihoods(self, actions: Any, obs_batch: Any, **_: Any) -> Any:
            return np.log(np.where(np.asarray(actions) == 1, 0.7, 0.3))

    rng = np.random.default_rng(0)
    lengths = (3, 5, 4)
    columns: dict[str, Any] = {
        "obs": rng.random((12, 2), np.float32),
        "actions": rng.integers(0, 2, 12),
        "rewards": rng.random(12),
        "eps_id": np.repeat([1, 2, 3], lengths),
        "t": np.concatenate([np.arange(n) for n in lengths]),
        "action_prob": np.full(12, 0.5),
        "terminateds": np.concatenate([np.arange(n) == n - 1 for n in lengths]),
    }
    found = evaluate_offline(
        rlio.SampleBatch(columns),
        lambda obs, actions: Judged().compute_log_likelihoods(actions, obs),
        gamma=0.9,
        estimators=["pdis", "stepwise_wis"],
    )
    for name, kind in (("pdis", ImportanceSampling), ("stepwise_wis", WeightedImportanceSampling)):
        said = kind(Judged(), gamma=0.9).estimate(SampleBatch(columns))
        assert found[name].v_target.value == pytest.approx(said["v_target"])
        assert found[name].v_behavior.value == pytest.approx(said["v_behavior"])
        assert found[name].v_gain.value == pytest.approx(said["v_delta"])
        assert found[name].v_gain_ratio == pytest.approx(said["v_gain"])


def test_rows_that_are_not_for_training_are_in_no_batch() -> None:
    """RLlib reads the flag from infos, rlio from the episode."""

    class Untrained(Steps):
        def step(self, action: Any) -> Any:
            *step, info = super().step(action)
            return *step, {**info, "training_enabled": self._lengths.number % 2 == 1}

    class Callbacks(rlio.Callbacks):
        def on_episode_step(self, *, episode: Any, **_: Any) -> None:
            episode.training_enabled = int(episode.last_observation[1]) % 2 == 1

    whole: dict[str, Any] = {"rollout_fragment_length": 4, "batch_mode": "complete_episodes"}
    callback_calls.Lengths.made = count()
    theirs = MAKE["_old"](Scenario(OLD, None, 1, 1, whole), Untrained, RLlibCallback)
    said = theirs.sample()["default_policy"]
    theirs.stop()
    callback_calls.Lengths.made = count()
    options: dict[str, Any] = {"rollout": rlio.RolloutConfig(**whole), "callbacks": Callbacks, "seed": 0}
    with rlio.RolloutWorker(lambda: Untrained(), rlio.RandomPolicy(), **options) as own:
        assert seen(own.sample()) == seen(said)
    assert set(said["obs"][:, 1].tolist()) == {1.0}


def batches_of(by_row: Any) -> dict[str, list[Any]]:
    return {name: sorted(seen_agents(rows)) for name, rows in by_row.items()}


def seen_agents(batch: Any) -> list[Any]:
    """Rows of agents: `t` is of the page's own row."""
    return [row[:-1] for row in seen(batch)]


@pytest.mark.parametrize("agents", ["together", "turns", "come and go"])
def test_batches_of_several_agents_have_the_rows_of_rllib(agents: str) -> None:
    """With agents that come late and leave early, and flags of their own."""
    options: dict[str, Any] = {
        "agents": agents,
        "rollout_fragment_length": 5,
        "batch_mode": "complete_episodes",
    }
    theirs = old_worker(**options)
    with own_worker(**options) as ours:
        for _ in range(3):
            said, found = theirs.sample(), ours.sample()
            assert batches_of(found.policies()) == batches_of(said.policy_batches)
            assert found.env_steps() == said.env_steps()
    theirs.stop()


def test_the_mapping_of_agents_gets_the_same_arguments() -> None:
    called: dict[str, list[Any]] = {OLD: [], "rlio": []}

    def mapping(of: str) -> Any:
        def policy_for(agent_id: Any, episode: Any, worker: Any, **kwargs: Any) -> str:
            called[of].append((agent_id, episode is not None, worker is not None))
            return policy_of(agent_id)

        return policy_for

    options: dict[str, Any] = {"rollout_fragment_length": 4, "batch_mode": "complete_episodes"}
    theirs = old_worker(agents="together", **options)
    theirs.set_policy_mapping_fn(mapping(OLD))
    with own_worker(agents="together", **options) as ours:
        ours.set_policy_mapping_fn(mapping("rlio"))
        for each in (theirs, ours):
            each.sample()
            each.sample()
    theirs.stop()
    assert set(called[OLD]) == set(called["rlio"]) == {("a", True, True), ("b", True, True)}


def test_an_agent_that_comes_back_is_an_error_as_in_the_new_stack() -> None:
    def comes_back(base: type) -> Any:
        class Env(agents_env(base, "together")):  # type: ignore[misc]
            def step(self, action_dict: Any) -> Any:
                obs, rewards, _, truncateds, infos = super().step(action_dict)
                return obs, rewards, {"b": self._t == 1, "__all__": False}, truncateds, infos

        return Env

    callback_calls.Lengths.made = count()
    theirs = MAKE["_new"](Scenario(NEW, "together", 1, 1, {}), comes_back(MultiAgentEnv), RLlibCallback)
    with pytest.raises(MultiAgentEnvError, match="already had its"):
        theirs.sample(num_timesteps=6)
    theirs.stop()
    callback_calls.Lengths.made = count()
    policies = {name: rlio.RandomPolicy() for name in ("first", "second")}
    ours = rlio.MultiAgentEnvRunner(
        lambda: comes_back(rlio.MultiAgentEnv)(), policies, lambda agent, episode: policy_of(agent), seed=0
    )
    with pytest.raises(rlio.errors.RlioError, match="'b'"):
        ours.sample(num_timesteps=6)
    ours.stop()


def test_inputs_and_outputs_are_the_same_words(tmp_path: Path) -> None:
    """The defaults, a function of the context, a registered name, a mixture, and the folder of logs."""
    from ray.tune.registry import register_input

    assert (
        config()["input_"] == inspect.signature(rlio.RolloutWorker).parameters["input"].default == "sampler"
    )
    assert config()["output"] is inspect.signature(rlio.RolloutWorker).parameters["output"].default is None
    writer = JsonWriter(str(tmp_path / "json"))
    logged = SampleBatch(
        {name: value[:30] for name, value in ppo_worker().sample()["default_policy"].items()}
    )
    writer.write(logged)
    writer.cur_file.close()
    paths = str(tmp_path / "json")
    register_input("logged", lambda context: JsonReader(paths, context))
    rlio.register_input("logged", lambda context: rlio.JsonReader(paths))
    given: list[Any] = ["logged", paths, {paths: 0.5, "logged": 0.5}]
    functions: list[Any] = [
        lambda context: JsonReader(paths, context),
        lambda context: rlio.JsonReader(paths),
    ]
    for theirs, ours in [*((each, each) for each in given), functions]:
        said = ppo_worker(input_=theirs).sample()
        policy = rlio.RandomPolicy()
        policy.bind(*spaces())
        with rlio.RolloutWorker(None, policy, input=ours) as worker:
            found = worker.sample()
        # RLlib adds records until it has a batch.
        rows_of = [set(map(tuple, np.asarray(each["obs"]).tolist())) for each in (said, found)]
        assert rows_of[0] == rows_of[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # RLlib's JsonReader leaves its file open.
        gc.collect()


def spaces() -> Any:
    env = gym.make("CartPole-v1")
    return env.observation_space, env.action_space


def test_callbacks_may_be_functions_on_both_sides() -> None:
    called: list[str] = []

    def ended(of: str) -> Any:
        return lambda *, episode, **kwargs: called.append(of)

    made = PPOConfig().environment(Steps).callbacks(on_episode_end=[ended("a"), ended("b")])
    theirs = SingleAgentEnvRunner(config=made.env_runners(num_env_runners=0))
    theirs.sample(num_episodes=1)
    theirs.stop()
    given: Any = {"on_episode_end": [ended("a"), ended("b")]}
    ours = rlio.EnvRunner(lambda: Steps(), rlio.RandomPolicy(), callbacks=given, seed=0)
    ours.sample(num_episodes=1)
    ours.stop()
    assert called == ["a", "b", "a", "b"]


def test_rllibs_workers_refuse_external_environments_and_take_other_weights() -> None:
    class Waits(ExternalEnv):
        def run(self) -> None:
            raise AssertionError

    made = PPOConfig().api_stack(enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False)
    env = Waits(spaces()[1], spaces()[0])
    with pytest.raises(ValueError, match="do not support ExternalEnv"):
        RolloutWorker(env_creator=lambda _: env, default_policy_class=PPOTorchPolicy, config=made).sample()
    # Weights of another number are taken in RLlib, of a newer one in rlio.
    theirs = ppo_worker()
    weights = theirs.get_weights()
    zeros = {name: {key: 0 * value for key, value in each.items()} for name, each in weights.items()}
    theirs.set_weights(weights, None, 3)
    theirs.set_weights(zeros, None, 2)
    assert all(not value.any() for value in theirs.get_weights()["default_policy"].values())
    with actor_critic_worker() as ours:
        own = ours.get_weights()
        ours.set_weights(own, None, 3)
        for number, is_taken in ((2, False), (0, True)):
            ours.set_weights({key: 0 * value for key, value in own.items()}, None, number)
            assert any(value.any() for value in ours.get_weights().values()) is not is_taken
