"""Re-export: ``torch.distributed.elastic.rendezvous.c10d_rendezvous_backend``."""

from __future__ import annotations

from elasticlib.rendezvous.handlers._c10d_backend import C10dRendezvousBackend, create_backend

__all__ = ["C10dRendezvousBackend", "create_backend"]
