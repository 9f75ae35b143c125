"""Re-export: ``torch.distributed.elastic.rendezvous.api``."""

from elasticlib import _lazy
from elasticlib.errors import (
    RendezvousClosedError as RendezvousClosedError,
    RendezvousConnectionError as RendezvousConnectionError,
    RendezvousError as RendezvousError,
    RendezvousGracefulExitError as RendezvousGracefulExitError,
    RendezvousStateError as RendezvousStateError,
    RendezvousTimeoutError as RendezvousTimeoutError,
)
from elasticlib.rendezvous.handlers._base import (
    RendezvousHandler as RendezvousHandler,
    RendezvousInfo as RendezvousInfo,
    RendezvousParameters as RendezvousParameters,
    RendezvousStoreInfo as RendezvousStoreInfo,
)
from elasticlib.rendezvous.handlers._registry import (
    RendezvousHandlerCreator as RendezvousHandlerCreator,
    RendezvousHandlerRegistry as RendezvousHandlerRegistry,
    rendezvous_handler_registry as rendezvous_handler_registry,
)

_lazy.offer(__name__)
