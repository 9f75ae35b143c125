"""Re-export: ``torch.distributed.elastic.rendezvous.registry``."""

from elasticlib.rendezvous.handlers._registry import get_rendezvous_handler

__all__ = ["get_rendezvous_handler"]
