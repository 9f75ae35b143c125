"""
torch's rendezvous handler API over elasticlib's own protocol: handlers, backends of shared state,
the registry.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.rendezvous.handlers._base import NO_SHARING as NO_SHARING
    from elasticlib.rendezvous.handlers._coordinated import CoordinatedHandler as CoordinatedHandler
    from elasticlib.rendezvous.handlers._round_store import first_reachable as first_reachable

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.rendezvous.handlers._base": "NO_SHARING",
        "elasticlib.rendezvous.handlers._coordinated": "CoordinatedHandler",
        "elasticlib.rendezvous.handlers._round_store": "first_reachable",
    },
)
