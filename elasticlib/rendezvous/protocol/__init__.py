"""Messages of nodes and their coordinator, their form in a store, and operations on it. Pure."""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.rendezvous.protocol._messages import (
        CallsCounted as CallsCounted,
        Close as Close,
        ContactLost as ContactLost,
        Failed as Failed,
        FailureNote as FailureNote,
        Final as Final,
        Leave as Leave,
        RankAssignment as RankAssignment,
        RoundEnd as RoundEnd,
        StopAgreed as StopAgreed,
        StopAsked as StopAsked,
        Stopped as Stopped,
        StopProposed as StopProposed,
        StopWanted as StopWanted,
        StoreGone as StoreGone,
        Succeeded as Succeeded,
    )

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.rendezvous.protocol._messages": (
            "CallsCounted Close ContactLost Failed FailureNote Final Leave RankAssignment RoundEnd StopAgreed "
            "StopAsked StopProposed StopWanted Stopped StoreGone Succeeded"
        ),
    },
)
