from .atari import make_atari as make_atari
from .context import EnvContext as EnvContext
from .external import ExternalEnv as ExternalEnv
from .external import ExternalMultiAgentEnv as ExternalMultiAgentEnv
from .multi_agent import MultiAgentEnv as MultiAgentEnv
from .multi_agent import make_multi_agent as make_multi_agent
