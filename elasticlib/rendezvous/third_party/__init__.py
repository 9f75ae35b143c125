"""
Jobs that meet through a third-party rendezvous handler: its contract, and the nodes' agreement
through its store.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.rendezvous.third_party._contract import checked_handler as checked_handler
    from elasticlib.rendezvous.third_party._member import HandlerMember as HandlerMember

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.rendezvous.third_party._contract": "checked_handler",
        "elasticlib.rendezvous.third_party._member": "HandlerMember",
    },
)
