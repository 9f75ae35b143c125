"""
The classes of events and their JSON.

Rules of this file: the fields and their JSON are torch's, byte for byte. Nothing here uses
destinations.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from json import dumps, loads
from typing import TypeAlias, TypeVar

from elasticlib.errors import ConfigError, UnknownNameError

__all__ = ["Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"]

EventMetadataValue: TypeAlias = str | int | float | bool | None

T = TypeVar("T")


class EventSource(str, Enum):
    """Subject of an event. (torch: ``torch.distributed.elastic.events.EventSource``)"""

    AGENT = "AGENT"
    WORKER = "WORKER"


class NodeState(str, Enum):
    """State of a node in its rendezvous. (torch: ``torch.distributed.elastic.events.NodeState``)"""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclass
class _JsonEvent:
    def __str__(self) -> str:
        return self.serialize()

    def serialize(self) -> str:
        """Return the event as JSON. Raises ``TypeError`` for metadata that JSON cannot contain."""
        return dumps(asdict(self))


@dataclass
class Event(_JsonEvent):
    """
    Event of an agent or of a worker. (torch: ``torch.distributed.elastic.events.Event``)

    `timestamp` is in milliseconds since the epoch; agents set it (torch leaves 0).
    """

    name: str
    source: EventSource
    timestamp: int = 0
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)

    @staticmethod
    def deserialize(data: str | Event) -> Event:
        """Return the event that `serialize` wrote, or *data* if it is one. Raises `ConfigError`."""
        return data if isinstance(data, Event) else _read(Event, data, "source", EventSource)


@dataclass
class RdzvEvent(_JsonEvent):
    """Event of a node's rendezvous. (torch: ``torch.distributed.elastic.events.RdzvEvent``)"""

    name: str
    """Step of the rendezvous, as ``file:function``."""
    run_id: str
    message: str
    hostname: str
    pid: int
    node_state: NodeState
    master_endpoint: str = ""
    rank: int | None = None
    local_id: int | None = None
    error_trace: str = ""

    @staticmethod
    def deserialize(data: str | RdzvEvent) -> RdzvEvent:
        """Return the event that `serialize` wrote, or *data* if it is one. Raises `ConfigError`."""
        return data if isinstance(data, RdzvEvent) else _read(RdzvEvent, data, "node_state", NodeState)


def _read(kind: type[T], data: object, key: str, members: type[Enum]) -> T:
    """Return the event of class *kind* in a JSON text, whose *key* names one of the *members*."""
    if not isinstance(data, str):
        raise ConfigError(f"data={data!r} is not an event: give the string that serialize() returned")

    try:
        fields = loads(data)
    except ValueError as error:
        raise ConfigError(f"data={data!r} is not an event: it is not JSON ({error})") from error

    if not isinstance(fields, dict) or key not in fields:
        raise UnknownNameError(f"data={data!r} is not an event: it has no {key!r}")

    name = fields[key]
    if not isinstance(name, str) or name not in members.__members__:
        raise UnknownNameError(
            f"{name!r} is not a valid {members.__name__}: give one of {', '.join(members.__members__)}"
        )

    try:
        return kind(**{**fields, key: members[name]})
    except TypeError as error:
        raise ConfigError(f"data={data!r} is not a valid {kind.__name__}: {error}") from error
