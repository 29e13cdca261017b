from .batch import (
    MultiAgentBatch as MultiAgentBatch,
)
from .batch import (
    SampleBatch as SampleBatch,
)
from .batch import (
    concat_samples as concat_samples,
)
from .batch.builder import BatchBuilder as BatchBuilder
from .batch.builder import MultiAgentBatchBuilder as MultiAgentBatchBuilder
from .batch.columns import Columns as Columns
from .batch.episode import Episode as Episode
from .checkpoint import load_checkpoint as load_checkpoint
from .checkpoint import save_checkpoint as save_checkpoint
from .connectors.connector import Connector as Connector
from .connectors.flatten import Flatten as Flatten
from .connectors.flatten import OneHot as OneHot
from .connectors.frame_stack import FrameStack as FrameStack
from .connectors.mean_std import MeanStdFilter as MeanStdFilter
from .dataset.arrow_tables import in_c_order as in_c_order
from .dataset.dataset import Dataset as Dataset
from .dataset.dataset import open_dataset as open_dataset
from .envs.external import ExternalEnv as ExternalEnv
from .envs.multi_agent import MultiAgentEnv as MultiAgentEnv
from .envs.multi_agent import make_multi_agent as make_multi_agent
from .errors import (
    CacheError as CacheError,
)
from .errors import (
    ClosedError as ClosedError,
)
from .errors import (
    CorruptData as CorruptData,
)
from .errors import (
    DataNotFound as DataNotFound,
)
from .errors import (
    EndOfData as EndOfData,
)
from .errors import (
    EnvError as EnvError,
)
from .errors import (
    HoleError as HoleError,
)
from .errors import (
    LedgerError as LedgerError,
)
from .errors import (
    MissingColumn as MissingColumn,
)
from .errors import (
    MissingExtra as MissingExtra,
)
from .errors import (
    OptionError as OptionError,
)
from .errors import (
    PublishError as PublishError,
)
from .errors import (
    RlioError as RlioError,
)
from .errors import (
    SchemaConflict as SchemaConflict,
)
from .errors import (
    SchemaError as SchemaError,
)
from .errors import (
    StateError as StateError,
)
from .errors import (
    StoreError as StoreError,
)
from .errors import (
    UnknownLayout as UnknownLayout,
)
from .errors import (
    UnknownName as UnknownName,
)
from .errors import (
    UnsafeData as UnsafeData,
)
from .errors import (
    WaitTimeout as WaitTimeout,
)
from .errors import (
    WorkerError as WorkerError,
)
from .errors import (
    WorkerLost as WorkerLost,
)
from .following.markers import Markers as Markers
from .following.paced_writer import Pace as Pace
from .following.paced_writer import PacedWriter as PacedWriter
from .following.replay import FollowingReplay as FollowingReplay
from .following.samples_per_insert import SamplesPerInsert as SamplesPerInsert
from .limits import Limits as Limits
from .log.recovery import recover as recover
from .log.spool import Spool as Spool
from .maintenance.compact import compact as compact
from .maintenance.gc import gc as gc
from .maintenance.repair import repair as repair
from .maintenance.trim import trim as trim
from .maintenance.verify import verify as verify
from .policies.actor_critic import ActorCritic as ActorCritic
from .policies.behaviour_cloning import BehaviourCloning as BehaviourCloning
from .policies.dqn import DQN as DQN
from .policies.policy import Policy as Policy
from .policies.policy_map import PolicyMap as PolicyMap
from .policies.policy_spec import PolicySpec as PolicySpec
from .policies.postprocessing import GAE as GAE
from .policies.random_policy import RandomPolicy as RandomPolicy
from .policies.torch_policy import TorchPolicy as TorchPolicy
from .reader import InputReader as InputReader
from .readers.async_input import AsyncInput as AsyncInput
from .readers.d4rl_reader import D4RLReader as D4RLReader
from .readers.dataset_reader import DatasetReader as DatasetReader
from .readers.foreign_parquet import ForeignParquetReader as ForeignParquetReader
from .readers.json_reader import JsonReader as JsonReader
from .readers.mapped_input import MappedInput as MappedInput
from .readers.mixed_input import MixedInput as MixedInput
from .readers.recording_input import RecordingInput as RecordingInput
from .readers.sampler_input import SamplerInput as SamplerInput
from .readers.shuffled_input import ShuffledInput as ShuffledInput
from .recording import RecordExperience as RecordExperience
from .recording import RecordVectorExperience as RecordVectorExperience
from .replay.store import ReplayStore as ReplayStore
from .resolve import IOContext as IOContext
from .resolve import read as read
from .resolve import register_input as register_input
from .resolve import register_output as register_output
from .sampling.callbacks import Callbacks as Callbacks
from .sampling.config import RolloutConfig as RolloutConfig
from .sampling.env_runner import EnvRunner as EnvRunner
from .sampling.external_runner import ExternalRunner as ExternalRunner
from .sampling.multi_agent_episode import MultiAgentEpisode as MultiAgentEpisode
from .sampling.multi_agent_runner import MultiAgentEnvRunner as MultiAgentEnvRunner
from .sampling.policy_setup import PolicySetup as PolicySetup
from .serving.policy_client import PolicyClient as PolicyClient
from .serving.policy_server import PolicyServerInput as PolicyServerInput
from .worker import RolloutWorker as RolloutWorker
from .writer import OutputWriter as OutputWriter
from .writers.json_writer import JsonWriter as JsonWriter
from .writers.noop_output import NoopOutput as NoopOutput
from .writers.parquet_writer import ParquetWriter as ParquetWriter
from .writers.roll import Roll as Roll
from .writers.tee_writer import TeeWriter as TeeWriter

__version__: str
