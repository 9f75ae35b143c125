"""
What happens to a coordinator's server, and what a server has its shell do. Pure.

Rules of this file: data only. The actions of one step are done in their order; when one of them fails, those after
it are not done. The last is `Load`, `Receive`, `Read` or `ServerStopped`, and what came of it is the next event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from attrs import frozen

from elasticlib.rendezvous.protocol._exchange import Posted
from elasticlib.rendezvous.protocol._operations import ClearForeign, Delete, Discard, Log, Read, Receive, Write

# Events: what happened.


@frozen
class Loaded:
    """What the last coordinator saved; None if there was none."""

    data: bytes | None
    is_private: bool = False
    """Whether it was where no stranger writes."""


@frozen
class Destroyed:
    """What the last coordinator saved cannot be read any more."""

    why: str


@frozen
class Unsaved:
    """The store is there, and would not take the document; *undone*: the actions that were to follow."""

    why: str
    undone: Sequence[Action]


@frozen
class Arrived:
    """What came into the inbox until the wait for it ended."""

    entries: Sequence[Posted]


@frozen
class HeartbeatsFetched:
    """What lay where the nodes' heartbeats lie."""

    found: Sequence[bytes | None]


@frozen
class Abandon:
    """The job is to end for everybody; *leaver* needs no answer."""

    why: str
    leaver: str | None = None


@frozen
class CloseServer:
    """Stop, once all nodes have read how the job ended, or *linger* seconds from now."""

    linger: float


@frozen
class OperationFailed:
    """Something failed that should not: nobody must wait for an answer that does not come."""

    why: str


Event: TypeAlias = Loaded | Destroyed | Unsaved | Arrived | HeartbeatsFetched | Abandon | CloseServer | OperationFailed


# Actions: what the shell must do.


@frozen
class Load:
    """Read the state log. Answer: `Loaded` or `Destroyed`."""


@frozen
class Save:
    """Write the state log: without that, nothing that follows may be done."""

    data: bytes


@frozen
class Interrupt:
    """End the wait for the inbox at once."""


@frozen
class Purge:
    """Delete the job from the store: its id is free again."""


@frozen
class ServerStopped:
    """This coordinator's part is over."""


Action: TypeAlias = (
    Load | Save | Interrupt | Purge | ServerStopped | Log | Receive | Read | Write | Delete | Discard | ClearForeign
)
