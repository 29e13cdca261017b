from .policy_client import PolicyClient as PolicyClient
from .policy_server import PolicyServerInput as PolicyServerInput
