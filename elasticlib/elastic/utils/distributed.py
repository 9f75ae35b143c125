"""Re-export: ``torch.distributed.elastic.utils.distributed``."""

from elasticlib.utils.distributed import create_c10d_store, get_free_port, get_socket_with_port

__all__ = ["create_c10d_store", "get_free_port", "get_socket_with_port"]
