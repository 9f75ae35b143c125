"""Re-export: ``torch.distributed.elastic.utils.api``."""

from elasticlib.utils import get_env_variable_or_raise, get_socket_with_port, macros

__all__ = ["get_env_variable_or_raise", "get_socket_with_port", "macros"]
