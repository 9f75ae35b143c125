"""Re-export: ``torch.distributed.elastic.rendezvous.dynamic_rendezvous``."""

from __future__ import annotations

from elasticlib.rendezvous.handlers._dynamic import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    create_handler,
)
from elasticlib.rendezvous.stores._state_backend import RendezvousBackend, Token

__all__ = [
    "DynamicRendezvousHandler",
    "RendezvousBackend",
    "RendezvousSettings",
    "RendezvousTimeout",
    "Token",
    "create_handler",
]
