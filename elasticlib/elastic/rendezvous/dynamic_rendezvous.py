"""Re-export: ``torch.distributed.elastic.rendezvous.dynamic_rendezvous``."""

from elasticlib import _lazy
from elasticlib.rendezvous.handlers._dynamic import (
    DynamicRendezvousHandler as DynamicRendezvousHandler,
    RendezvousSettings as RendezvousSettings,
    RendezvousTimeout as RendezvousTimeout,
    create_handler as create_handler,
)
from elasticlib.rendezvous.stores._state_keys import RendezvousBackend as RendezvousBackend, Token as Token

_lazy.offer(__name__)
