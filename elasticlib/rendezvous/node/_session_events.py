"""
Events for a node's session, and the actions that its shell does for it. Pure.

Rules of this file: data only. A connection has two threads, and each carries one operation at a time.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

from attrs import frozen

from elasticlib.errors import ConfigError, RendezvousError, StartError
from elasticlib.rendezvous.node._session_liveness import TimePassed
from elasticlib.rendezvous.protocol._messages import Descriptor, Report
from elasticlib.rendezvous.protocol._operations import Log, Operation, Result

Answered: TypeAlias = Result | Descriptor
Permanent: TypeAlias = RendezvousError | ConfigError | StartError
"""An error that ends a node's part: no further attempt helps."""


class ConnectionThread(enum.Enum):
    """A thread of a connection: one operation at a time."""

    SPEAK = "speak"
    WATCH = "watch"


# Events.


@frozen
class Connected:
    """The connection of this number was made."""

    connection: int


@frozen
class ConnectionLost:
    """The connection could not be made, or it broke. *gone*: nobody listens there any more."""

    connection: int
    why: str
    gone: bool = False


@frozen
class OperationDone:
    """The result of operation *number*."""

    connection: int
    number: int
    result: Answered = None


@frozen
class Refused:
    """A permanent error; *connection* None: it belongs to no connection."""

    connection: int | None
    error: Permanent


@frozen
class Denied:
    """The store refuses operation *number*; the connection stays usable."""

    connection: int
    number: int
    why: str
    too_large: bool


@frozen
class Seek:
    """The agent wants ranks in the next round; no worker of this node runs any more."""

    slots: int
    role: str


@frozen
class SendReport:
    """The agent has a report for the coordinator."""

    report: Report


@frozen
class SuspendHeartbeats:
    """Heartbeats must pause, or resume."""

    is_suspended: bool


@frozen
class CloseSession:
    """Send pending messages, and leave."""


AgentEvent: TypeAlias = Seek | SendReport | SuspendHeartbeats | CloseSession | TimePassed
"""Events that belong to no connection."""
Event: TypeAlias = Connected | ConnectionLost | OperationDone | Refused | Denied | AgentEvent


# Actions.


@frozen
class OpenConnection:
    """Give up every other connection and try this one, for about *limit* seconds."""

    connection: int
    limit: float


@frozen
class Describe:
    """Describe this node for the next round. Answer: its `Descriptor`."""

    slots: int
    role: str


@frozen
class Ask:
    """Perform an operation on a thread of the connection; its `OperationDone` carries *number*."""

    connection: int
    thread: ConnectionThread
    number: int
    operation: Operation | Describe


@frozen
class Disconnect:
    """End a connection: no more requests will come for it."""

    connection: int


Action: TypeAlias = OpenConnection | Ask | Disconnect | Log
