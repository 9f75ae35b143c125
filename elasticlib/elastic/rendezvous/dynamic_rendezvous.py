"""
The name under which torch's users know the rendezvous over a shared state: a door only.

Its code is in `_state_backend` (what such a state must do), `_dynamic` (the handler) and `_state_keys` (how a job is
carried by it). (torch: ``torch.distributed.elastic.rendezvous.dynamic_rendezvous``)
"""

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
