from .callbacks import Callbacks as Callbacks
from .config import RolloutConfig as RolloutConfig
from .env_runner import EnvRunner as EnvRunner
from .external_runner import ExternalRunner as ExternalRunner
from .metrics import MetricsCollector as MetricsCollector
from .metrics import RolloutMetrics as RolloutMetrics
from .multi_agent_runner import MultiAgentEnvRunner as MultiAgentEnvRunner
from .policy_setup import PolicySetup as PolicySetup
