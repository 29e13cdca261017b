"""rlio records reinforcement-learning experience, replays it, and mixes logged with live experience.

Workers, files, mixtures and shuffles are all `InputReader`s: `sample()` gives the next batch. `OutputWriter`s
take batches and nothing else. Every name below is imported on first use, so that `import rlio` is quick.

Example:
    >>> import rlio
    >>> batch = rlio.SampleBatch(obs=[[0.0], [1.0]], rewards=[1.0, 0.5])
    >>> len(batch), batch["rewards"].dtype
    (2, dtype('float64'))
"""

from typing import TYPE_CHECKING

from rlio._lazy import lazy_exports

__all__ = [
    "DQN",
    "GAE",
    "ActorCritic",
    "AsyncInput",
    "BatchBuilder",
    "BehaviourCloning",
    "CacheError",
    "Callbacks",
    "ClosedError",
    "Columns",
    "Connector",
    "CorruptData",
    "D4RLReader",
    "DataNotFound",
    "Dataset",
    "DatasetReader",
    "EndOfData",
    "EnvError",
    "EnvRunner",
    "Episode",
    "ExternalEnv",
    "ExternalRunner",
    "Flatten",
    "FollowingReplay",
    "ForeignParquetReader",
    "FrameStack",
    "HoleError",
    "IOContext",
    "InputReader",
    "JsonReader",
    "JsonWriter",
    "LedgerError",
    "Limits",
    "MappedInput",
    "Markers",
    "MeanStdFilter",
    "MissingColumn",
    "MissingExtra",
    "MixedInput",
    "MultiAgentBatch",
    "MultiAgentBatchBuilder",
    "MultiAgentEnv",
    "MultiAgentEnvRunner",
    "MultiAgentEpisode",
    "NoopOutput",
    "OneHot",
    "OptionError",
    "OutputWriter",
    "Pace",
    "PacedWriter",
    "ParquetWriter",
    "Policy",
    "PolicyClient",
    "PolicyMap",
    "PolicyServerInput",
    "PolicySetup",
    "PolicySpec",
    "PublishError",
    "RandomPolicy",
    "RecordExperience",
    "RecordVectorExperience",
    "RecordingInput",
    "ReplayStore",
    "RlioError",
    "Roll",
    "RolloutConfig",
    "RolloutWorker",
    "SampleBatch",
    "SamplerInput",
    "SamplesPerInsert",
    "SchemaConflict",
    "SchemaError",
    "ShuffledInput",
    "Spool",
    "StateError",
    "StoreError",
    "TeeWriter",
    "TorchPolicy",
    "UnknownLayout",
    "UnknownName",
    "UnsafeData",
    "WaitTimeout",
    "WorkerError",
    "WorkerLost",
    "__version__",
    "compact",
    "concat_samples",
    "gc",
    "in_c_order",
    "make_multi_agent",
    "open_dataset",
    "read",
    "recover",
    "register_input",
    "register_output",
    "repair",
    "trim",
    "verify",
]

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from rlio.batch import MultiAgentBatch, SampleBatch, concat_samples
    from rlio.batch_builder import BatchBuilder, MultiAgentBatchBuilder
    from rlio.columns import Columns
    from rlio.connectors.connector import Connector
    from rlio.connectors.flatten import Flatten, OneHot
    from rlio.connectors.frame_stack import FrameStack
    from rlio.connectors.mean_std import MeanStdFilter
    from rlio.dataset import Dataset, open_dataset
    from rlio.envs.external import ExternalEnv
    from rlio.envs.multi_agent import MultiAgentEnv, make_multi_agent
    from rlio.episode import Episode
    from rlio.errors import (
        CacheError,
        ClosedError,
        CorruptData,
        DataNotFound,
        EndOfData,
        EnvError,
        HoleError,
        LedgerError,
        MissingColumn,
        MissingExtra,
        OptionError,
        PublishError,
        RlioError,
        SchemaConflict,
        SchemaError,
        StateError,
        StoreError,
        UnknownLayout,
        UnknownName,
        UnsafeData,
        WaitTimeout,
        WorkerError,
        WorkerLost,
    )
    from rlio.interfaces import InputReader, IOContext, OutputWriter
    from rlio.limits import Limits
    from rlio.maintenance.compact import compact
    from rlio.maintenance.gc import gc
    from rlio.maintenance.repair import repair
    from rlio.maintenance.trim import trim
    from rlio.maintenance.verify import verify
    from rlio.policies.actor_critic import ActorCritic
    from rlio.policies.behaviour_cloning import BehaviourCloning
    from rlio.policies.dqn import DQN
    from rlio.policies.policy import Policy
    from rlio.policies.policy_map import PolicyMap
    from rlio.policies.policy_spec import PolicySpec
    from rlio.policies.postprocessing import GAE
    from rlio.policies.random_policy import RandomPolicy
    from rlio.policies.torch_policy import TorchPolicy
    from rlio.readers.async_input import AsyncInput
    from rlio.readers.d4rl_reader import D4RLReader
    from rlio.readers.dataset_reader import DatasetReader
    from rlio.readers.follow_marks import Markers
    from rlio.readers.following_replay import FollowingReplay
    from rlio.readers.foreign_parquet import ForeignParquetReader
    from rlio.readers.json_reader import JsonReader
    from rlio.readers.mapped_input import MappedInput
    from rlio.readers.mixed_input import MixedInput
    from rlio.readers.recording_input import RecordingInput
    from rlio.readers.sampler_input import SamplerInput
    from rlio.readers.shuffled_input import ShuffledInput
    from rlio.recording import RecordExperience, RecordVectorExperience
    from rlio.replay.samples_per_insert import SamplesPerInsert
    from rlio.replay.store import ReplayStore
    from rlio.replay.weaving import in_c_order
    from rlio.resolve import read, register_input, register_output
    from rlio.rollout.callbacks import Callbacks
    from rlio.rollout.config import RolloutConfig
    from rlio.rollout.env_runner import EnvRunner
    from rlio.rollout.external_runner import ExternalRunner
    from rlio.rollout.multi_agent_episode import MultiAgentEpisode
    from rlio.rollout.multi_agent_runner import MultiAgentEnvRunner
    from rlio.rollout.policy_client import PolicyClient
    from rlio.rollout.policy_server import PolicyServerInput
    from rlio.rollout.policy_setup import PolicySetup
    from rlio.storage.spool import Spool
    from rlio.worker import RolloutWorker
    from rlio.writers.json_writer import JsonWriter
    from rlio.writers.noop_output import NoopOutput
    from rlio.writers.paced_writer import Pace, PacedWriter
    from rlio.writers.parquet_writer import ParquetWriter
    from rlio.writers.recovery import recover
    from rlio.writers.roll import Roll
    from rlio.writers.tee_writer import TeeWriter
else:
    # Hidden from type checkers: to them a module with __getattr__ has every attribute.
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "ActorCritic": "rlio.policies.actor_critic",
            "AsyncInput": "rlio.readers.async_input",
            "BatchBuilder": "rlio.batch_builder",
            "BehaviourCloning": "rlio.policies.behaviour_cloning",
            "CacheError": "rlio.errors",
            "ClosedError": "rlio.errors",
            "Columns": "rlio.columns",
            "Connector": "rlio.connectors.connector",
            "CorruptData": "rlio.errors",
            "D4RLReader": "rlio.readers.d4rl_reader",
            "DQN": "rlio.policies.dqn",
            "DataNotFound": "rlio.errors",
            "Dataset": "rlio.dataset",
            "DatasetReader": "rlio.readers.dataset_reader",
            "EndOfData": "rlio.errors",
            "EnvError": "rlio.errors",
            "EnvRunner": "rlio.rollout.env_runner",
            "Episode": "rlio.episode",
            "ExternalEnv": "rlio.envs.external",
            "ExternalRunner": "rlio.rollout.external_runner",
            "Flatten": "rlio.connectors.flatten",
            "FollowingReplay": "rlio.readers.following_replay",
            "ForeignParquetReader": "rlio.readers.foreign_parquet",
            "FrameStack": "rlio.connectors.frame_stack",
            "GAE": "rlio.policies.postprocessing",
            "HoleError": "rlio.errors",
            "IOContext": "rlio.interfaces",
            "InputReader": "rlio.interfaces",
            "JsonReader": "rlio.readers.json_reader",
            "JsonWriter": "rlio.writers.json_writer",
            "LedgerError": "rlio.errors",
            "Limits": "rlio.limits",
            "MappedInput": "rlio.readers.mapped_input",
            "Markers": "rlio.readers.follow_marks",
            "MeanStdFilter": "rlio.connectors.mean_std",
            "MissingColumn": "rlio.errors",
            "MissingExtra": "rlio.errors",
            "MixedInput": "rlio.readers.mixed_input",
            "MultiAgentBatch": "rlio.batch",
            "MultiAgentBatchBuilder": "rlio.batch_builder",
            "MultiAgentEnv": "rlio.envs.multi_agent",
            "MultiAgentEnvRunner": "rlio.rollout.multi_agent_runner",
            "MultiAgentEpisode": "rlio.rollout.multi_agent_episode",
            "NoopOutput": "rlio.writers.noop_output",
            "OneHot": "rlio.connectors.flatten",
            "OptionError": "rlio.errors",
            "OutputWriter": "rlio.interfaces",
            "Pace": "rlio.writers.paced_writer",
            "PacedWriter": "rlio.writers.paced_writer",
            "ParquetWriter": "rlio.writers.parquet_writer",
            "Policy": "rlio.policies.policy",
            "PolicyClient": "rlio.rollout.policy_client",
            "PolicyMap": "rlio.policies.policy_map",
            "PolicyServerInput": "rlio.rollout.policy_server",
            "PolicySetup": "rlio.rollout.policy_setup",
            "PolicySpec": "rlio.policies.policy_spec",
            "PublishError": "rlio.errors",
            "RandomPolicy": "rlio.policies.random_policy",
            "RecordExperience": "rlio.recording",
            "RecordVectorExperience": "rlio.recording",
            "RecordingInput": "rlio.readers.recording_input",
            "ReplayStore": "rlio.replay.store",
            "RlioError": "rlio.errors",
            "Roll": "rlio.writers.roll",
            "Callbacks": "rlio.rollout.callbacks",
            "RolloutConfig": "rlio.rollout.config",
            "RolloutWorker": "rlio.worker",
            "SampleBatch": "rlio.batch",
            "SamplerInput": "rlio.readers.sampler_input",
            "SamplesPerInsert": "rlio.replay.samples_per_insert",
            "SchemaConflict": "rlio.errors",
            "SchemaError": "rlio.errors",
            "ShuffledInput": "rlio.readers.shuffled_input",
            "Spool": "rlio.storage.spool",
            "StateError": "rlio.errors",
            "StoreError": "rlio.errors",
            "TeeWriter": "rlio.writers.tee_writer",
            "TorchPolicy": "rlio.policies.torch_policy",
            "UnknownLayout": "rlio.errors",
            "UnknownName": "rlio.errors",
            "UnsafeData": "rlio.errors",
            "WaitTimeout": "rlio.errors",
            "WorkerError": "rlio.errors",
            "WorkerLost": "rlio.errors",
            "compact": "rlio.maintenance.compact",
            "concat_samples": "rlio.batch",
            "gc": "rlio.maintenance.gc",
            "in_c_order": "rlio.replay.weaving",
            "make_multi_agent": "rlio.envs.multi_agent",
            "open_dataset": "rlio.dataset",
            "read": "rlio.resolve",
            "recover": "rlio.writers.recovery",
            "register_input": "rlio.resolve",
            "register_output": "rlio.resolve",
            "repair": "rlio.maintenance.repair",
            "trim": "rlio.maintenance.trim",
            "verify": "rlio.maintenance.verify",
        },
    )
