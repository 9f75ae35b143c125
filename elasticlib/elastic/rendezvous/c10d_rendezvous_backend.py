"""Re-export: ``torch.distributed.elastic.rendezvous.c10d_rendezvous_backend``."""

from elasticlib.rendezvous.handlers._c10d_backend import DEFAULT_PORT, C10dRendezvousBackend, create_backend

__all__ = ["DEFAULT_PORT", "C10dRendezvousBackend", "create_backend"]
