"""
The nodes of a job: how they find each other, agree on ranks and end rounds together.

* `protocol`: the messages of nodes and coordinator; `stores` carry them.
* `coordinator`: decides; pure.
* `node`: one node's side. It also runs the coordinator when it is this node's turn.
* `sidecar`: runs a node's side in its own process.
* `serving`: a server that coordinates jobs outside their nodes.
* `handlers`: torch's rendezvous API on top of the same code.
* `third_party`: jobs that meet through another project's handler.
* `net`: endpoints and addresses.

Jobs of one node and of many nodes run the same code. An agent needs only a `Membership`.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.errors import (
        RendezvousClosedError as RendezvousClosedError,
        RendezvousConnectionError as RendezvousConnectionError,
        RendezvousError as RendezvousError,
        RendezvousGracefulExitError as RendezvousGracefulExitError,
        RendezvousStateError as RendezvousStateError,
        RendezvousTimeoutError as RendezvousTimeoutError,
    )
    from elasticlib.rendezvous._choice import PlugIn as PlugIn
    from elasticlib.rendezvous._command import command_line as command_line
    from elasticlib.rendezvous._membership import Membership as Membership, MembershipEvent as MembershipEvent
    from elasticlib.rendezvous._names import host_name as host_name
    from elasticlib.rendezvous._open import (
        Rendezvous as Rendezvous,
        open_local as open_local,
        open_remote as open_remote,
    )
    from elasticlib.rendezvous._opening import (
        check_for_engine as check_for_engine,
        choose_rendezvous as choose_rendezvous,
        opened_rendezvous as opened_rendezvous,
    )
    from elasticlib.rendezvous._own_token import tokens_of_server as tokens_of_server
    from elasticlib.rendezvous._rdzv_options import (
        ETCD_BACKENDS as ETCD_BACKENDS,
        RDZV_CONF_KEYS as RDZV_CONF_KEYS,
        RdzvConfKey as RdzvConfKey,
        parse_conf as parse_conf,
    )
    from elasticlib.rendezvous.coordinator._state import Rules as Rules
    from elasticlib.rendezvous.handlers._base import (
        RendezvousHandler as RendezvousHandler,
        RendezvousInfo as RendezvousInfo,
        RendezvousParameters as RendezvousParameters,
        RendezvousStoreInfo as RendezvousStoreInfo,
    )
    from elasticlib.rendezvous.handlers._registry import (
        RendezvousHandlerCreator as RendezvousHandlerCreator,
        RendezvousHandlerRegistry as RendezvousHandlerRegistry,
        get_rendezvous_handler as get_rendezvous_handler,
        rendezvous_handler_registry as rendezvous_handler_registry,
    )
    from elasticlib.rendezvous.protocol._exchange import Exchange as Exchange
    from elasticlib.rendezvous.protocol._messages import (
        ContactLost as ContactLost,
        Descriptor as Descriptor,
        FailureNote as FailureNote,
        Final as Final,
        Notice as Notice,
        RankAssignment as RankAssignment,
        RoundEnd as RoundEnd,
    )
    from elasticlib.rendezvous.serving._program import serve_until_signal as serve_until_signal
    from elasticlib.rendezvous.serving._server_process import serve as serve
    from elasticlib.rendezvous.serving._settings import ServerSettings as ServerSettings
    from elasticlib.rendezvous.stores._memory_exchange import MemoryExchange as MemoryExchange

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.errors": (
            "RendezvousClosedError RendezvousConnectionError RendezvousError RendezvousGracefulExitError "
            "RendezvousStateError RendezvousTimeoutError"
        ),
        "elasticlib.rendezvous._choice": "PlugIn",
        "elasticlib.rendezvous._command": "command_line",
        "elasticlib.rendezvous._opening": "check_for_engine choose_rendezvous opened_rendezvous",
        "elasticlib.rendezvous._membership": "Membership MembershipEvent",
        "elasticlib.rendezvous._names": "host_name",
        "elasticlib.rendezvous._open": "Rendezvous open_local open_remote",
        "elasticlib.rendezvous._own_token": "tokens_of_server",
        "elasticlib.rendezvous._rdzv_options": "ETCD_BACKENDS RDZV_CONF_KEYS RdzvConfKey parse_conf",
        "elasticlib.rendezvous.coordinator._state": "Rules",
        "elasticlib.rendezvous.handlers._base": (
            "RendezvousHandler RendezvousInfo RendezvousParameters RendezvousStoreInfo"
        ),
        "elasticlib.rendezvous.handlers._registry": (
            "RendezvousHandlerCreator RendezvousHandlerRegistry get_rendezvous_handler rendezvous_handler_registry"
        ),
        "elasticlib.rendezvous.protocol._exchange": "Exchange",
        "elasticlib.rendezvous.protocol._messages": (
            "ContactLost Descriptor FailureNote Final Notice RankAssignment RoundEnd"
        ),
        "elasticlib.rendezvous.serving._program": "serve_until_signal",
        "elasticlib.rendezvous.serving._server_process": "serve",
        "elasticlib.rendezvous.serving._settings": "ServerSettings",
        "elasticlib.rendezvous.stores._memory_exchange": "MemoryExchange",
    },
)
