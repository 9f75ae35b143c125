"""Re-export: ``torch.distributed.elastic.utils.api``."""

from elasticlib.utils._environment import get_env_variable_or_raise
from elasticlib.utils._macros import macros
from elasticlib.utils._ports import get_socket_with_port

__all__ = ["get_env_variable_or_raise", "get_socket_with_port", "macros"]
