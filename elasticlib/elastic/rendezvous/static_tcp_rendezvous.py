"""Re-export: ``torch.distributed.elastic.rendezvous.static_tcp_rendezvous``."""

from elasticlib.rendezvous.handlers._registry import StaticTCPRendezvous, create_handler as create_rdzv_handler

__all__ = ["StaticTCPRendezvous", "create_rdzv_handler"]
