"""
Events for a coordinator's server, and the actions that its shell does for it. Pure.

Rules of this file: data only. The actions of one step are done in their order; when one of them
fails, those after it are skipped. The last action is `Load`, `Receive`, `Read` or `ServerStopped`,
and its outcome is the next event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from attrs import frozen

from elasticlib.rendezvous.coordinator._state import Presence
from elasticlib.rendezvous.protocol._exchange import Posted
from elasticlib.rendezvous.protocol._operations import ClearForeign, Delete, Discard, Log, Read, Receive, Write

# Events.


@frozen
class Loaded:
    """The saved state of the last coordinator; None if there was none."""

    data: bytes | None
    is_private: bool = False
    """True if it was stored where strangers cannot write."""


@frozen
class Destroyed:
    """The saved state of the last coordinator cannot be read any more."""

    why: str


@frozen
class Unsaved:
    """The store answered, but refused the document; *undone*: the actions after the save."""

    why: str
    undone: Sequence[Action]


@frozen
class Arrived:
    """Messages that came into the inbox until the wait for them ended."""

    entries: Sequence[Posted]


@frozen
class HeartbeatsFetched:
    """Values at the keys of the nodes' heartbeats."""

    found: Sequence[bytes | None]


@frozen
class Abandon:
    """A request to end the job for all nodes; *leaver* needs no answer."""

    why: str
    leaver: str | None = None
    kind: str = "closed"
    """Kind of the `Final` that all nodes get."""


@frozen
class NodeEnded:
    """No process of a node is left."""

    presence: Presence


@frozen
class CloseServer:
    """Stop, once all nodes have read how the job ended, or *linger* seconds from now."""

    linger: float


@frozen
class OperationFailed:
    """An unexpected failure: no node may wait for an answer that will not come."""

    why: str


Event: TypeAlias = (
    Loaded | Destroyed | Unsaved | Arrived | HeartbeatsFetched | Abandon | NodeEnded | CloseServer | OperationFailed
)


# Actions.


@frozen
class Load:
    """Read the state log. Answer: `Loaded` or `Destroyed`."""


@frozen
class Save:
    """Write the state log; if that fails, the next actions must not be done."""

    data: bytes


@frozen
class WatchNodes:
    """Report the end of each of these nodes as a `NodeEnded`; those of earlier such actions count no more."""

    presences: tuple[Presence, ...]


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
    Load
    | Save
    | WatchNodes
    | Interrupt
    | Purge
    | ServerStopped
    | Log
    | Receive
    | Read
    | Write
    | Delete
    | Discard
    | ClearForeign
)
