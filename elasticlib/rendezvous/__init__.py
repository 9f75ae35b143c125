"""
How the nodes of a job find each other, agree on ranks, and end rounds together.

`protocol` is what they say to each other; `coordinator` decides, and is pure; `node` is one node's side and runs the
coordinator where it is this node's turn; `sidecar` puts a node's side into a process of its own; `stores` carry the
messages. One node or many, the same code runs. `handlers` are torch's rendezvous API to the same, `third_party` is for
jobs that meet through somebody else's handler, `net` is endpoints and addresses. An agent needs a `Membership` only.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.errors import (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousError,
        RendezvousGracefulExitError,
        RendezvousStateError,
        RendezvousTimeoutError,
    )
    from elasticlib.rendezvous._membership import Membership
    from elasticlib.rendezvous._open import Rendezvous, open_local, open_remote
    from elasticlib.rendezvous.coordinator._state import Rules
    from elasticlib.rendezvous.handlers._base import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousParameters,
        RendezvousStoreInfo,
    )
    from elasticlib.rendezvous.handlers._registry import (
        RendezvousHandlerCreator,
        RendezvousHandlerRegistry,
        get_rendezvous_handler,
        rendezvous_handler_registry,
    )
    from elasticlib.rendezvous.protocol._exchange import Exchange
    from elasticlib.rendezvous.protocol._messages import (
        ContactLost,
        Descriptor,
        FailureNote,
        Final,
        Notice,
        RankAssignment,
        RoundEnd,
    )
    from elasticlib.rendezvous.stores._memory import MemoryExchange

_MODULES = {
    "elasticlib.errors": (
        "RendezvousClosedError",
        "RendezvousConnectionError",
        "RendezvousError",
        "RendezvousGracefulExitError",
        "RendezvousStateError",
        "RendezvousTimeoutError",
    ),
    "elasticlib.rendezvous.coordinator._state": ("Rules",),
    "elasticlib.rendezvous.protocol._exchange": ("Exchange",),
    "elasticlib.rendezvous.handlers._base": (
        "RendezvousHandler",
        "RendezvousInfo",
        "RendezvousParameters",
        "RendezvousStoreInfo",
    ),
    "elasticlib.rendezvous._membership": ("Membership",),
    "elasticlib.rendezvous.protocol._messages": (
        "ContactLost",
        "Descriptor",
        "FailureNote",
        "Final",
        "Notice",
        "RoundEnd",
        "RankAssignment",
    ),
    "elasticlib.rendezvous._open": ("Rendezvous", "open_local", "open_remote"),
    "elasticlib.rendezvous.stores._memory": ("MemoryExchange",),
    "elasticlib.rendezvous.handlers._registry": (
        "RendezvousHandlerCreator",
        "RendezvousHandlerRegistry",
        "get_rendezvous_handler",
        "rendezvous_handler_registry",
    ),
}

__all__ = [
    "ContactLost",
    "Descriptor",
    "Exchange",
    "FailureNote",
    "Final",
    "Membership",
    "MemoryExchange",
    "Notice",
    "RankAssignment",
    "Rendezvous",
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousStateError",
    "RendezvousStoreInfo",
    "RendezvousTimeoutError",
    "RoundEnd",
    "Rules",
    "get_rendezvous_handler",
    "open_local",
    "open_remote",
    "rendezvous_handler_registry",
]

__getattr__, __dir__ = _lazy.names(__name__, _MODULES)
