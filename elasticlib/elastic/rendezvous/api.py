"""Re-export: ``torch.distributed.elastic.rendezvous.api``."""

from elasticlib import _lazy
from elasticlib.rendezvous import (
    RendezvousClosedError as RendezvousClosedError,
    RendezvousConnectionError as RendezvousConnectionError,
    RendezvousError as RendezvousError,
    RendezvousGracefulExitError as RendezvousGracefulExitError,
    RendezvousHandler as RendezvousHandler,
    RendezvousHandlerCreator as RendezvousHandlerCreator,
    RendezvousHandlerRegistry as RendezvousHandlerRegistry,
    RendezvousInfo as RendezvousInfo,
    RendezvousParameters as RendezvousParameters,
    RendezvousStateError as RendezvousStateError,
    RendezvousStoreInfo as RendezvousStoreInfo,
    RendezvousTimeoutError as RendezvousTimeoutError,
    rendezvous_handler_registry as rendezvous_handler_registry,
)

_lazy.offer(__name__)
