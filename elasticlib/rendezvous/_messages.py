"""
What nodes and coordinator say to each other, and how it looks on the wire. Pure.

Rules of this file: a message is a small frozen class; its fields, as annotated, are its wire format.
The wire is JSON with ``"v": 1`` and sorted keys. `decode` trusts nothing: whatever is not exactly a
message of this version is a `RendezvousStateError`. No wall clock travels: times are ages in seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

from attrs import asdict, field, fields, frozen
from attrs.validators import and_, ge, le, min_len, optional

from elasticlib.errors import RendezvousStateError

VERSION = 1


@frozen
class Descriptor:
    """What a node offers to one round."""

    slots: int = field(validator=ge(1))
    """Workers that it will run."""
    role: str
    addresses: tuple[str, ...] = field(validator=min_len(1))
    """Where peers reach this node, best first."""
    store_port: int = field(validator=and_(ge(0), le(65535)))
    """Port that this node has bound for the round's worker store, in case it becomes group rank 0."""
    index: int | None = field(default=None, validator=optional(ge(0)))
    """Place in the order of ranks, where the user or a scheduler fixed one."""


@frozen
class FailureNote:
    """One worker that failed, as far as peers need to know."""

    rank: int
    local_rank: int
    pid: int
    exitcode: int
    """Exit status; ``-n`` when signal ``n`` ended the worker."""
    message: str = ""
    exception_type: str = ""
    traceback: str = ""
    hint: str = ""
    secondary: bool = False
    """True for a lost connection to a peer: most likely a consequence of another failure."""
    age: float = field(default=0.0, validator=ge(0))
    """Seconds between the failure and the sending of this note."""


@frozen
class Join:
    """To the coordinator: this node has no running worker and asks for a seat."""

    node: str
    descriptor: Descriptor


@frozen
class Failed:
    """To the coordinator, at once: workers of this node failed; others may still run."""

    node: str
    round: int
    failures: tuple[FailureNote, ...]


@frozen
class Stopped:
    """To the coordinator: all workers of this node are gone; `failures` is the complete list."""

    node: str
    round: int
    failures: tuple[FailureNote, ...]


@frozen
class Succeeded:
    """To the coordinator: all workers of this node ended well."""

    node: str
    round: int


@frozen
class Leave:
    """To the coordinator, at once: this node will not come back, nor start a worker any more."""

    node: str
    why: str
    round: int | None = None
    """Round whose workers still run here, and whose `Stopped` will follow; None when none runs."""


@frozen
class Seat:
    """To one node: its place in a round. Ranks of its workers are `rank_base` + local rank."""

    round: int
    group_rank: int
    group_world_size: int
    rank_base: int
    world_size: int
    role_rank_base: int
    role_world_size: int
    restart_count: int
    """Restarts that the whole job has used up so far."""
    max_restarts: int
    master_addresses: tuple[str, ...]
    """Addresses of group rank 0, best first."""
    master_port: int
    why: str
    """What made the round start."""


@frozen
class RoundEnd:
    """To every node of a round: stop the workers; then join again if `restart`, else wait for `Final`."""

    round: int
    why: str
    restart: bool


@frozen
class Final:
    """To a node: the job is over for it. `root` is the failure that came first anywhere, if one decided."""

    succeeded: bool
    why: str
    root_node: str | None = None
    root: FailureNote | None = None


Report: TypeAlias = Join | Failed | Stopped | Succeeded | Leave
"""What nodes tell the coordinator."""

Notice: TypeAlias = Seat | RoundEnd | Final
"""What the coordinator tells nodes."""

Message: TypeAlias = Report | Notice

_CLASSES: dict[str, type[Any]] = {
    "join": Join,
    "failed": Failed,
    "stopped": Stopped,
    "succeeded": Succeeded,
    "leave": Leave,
    "seat": Seat,
    "end": RoundEnd,
    "final": Final,
}
_NAMES = {cls: name for name, cls in _CLASSES.items()}


def encode(message: Message) -> bytes:
    """The message as canonical ASCII JSON."""
    body = asdict(message)
    body |= {"v": VERSION, "type": _NAMES[type(message)]}
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def decode(data: bytes) -> Message:
    """The message that *data* holds; raises `RendezvousStateError` for anything else."""
    try:
        body = json.loads(data, parse_constant=_refuse)
        if not isinstance(body, dict):
            raise ValueError("it is no JSON object")
        version = body.pop("v", None)
        if type(version) is not int or version != VERSION:
            raise ValueError(f"it has version {version!r}, we speak {VERSION}")
        name = body.pop("type", None)
        if not isinstance(name, str) or name not in _CLASSES:
            raise ValueError(f"its type {name!r} is unknown")
        message: Message = _read(_CLASSES[name], body)
        return message
    except (ValueError, RecursionError) as error:
        why = f"the store holds {data[:80]!r}, which is no message of this job: {error}"
        raise RendezvousStateError(why) from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _read(cls: type[Any], body: Any) -> Any:
    readers = _FIELDS[cls]
    if not isinstance(body, dict) or body.keys() != readers.keys():
        raise ValueError(f"{cls.__name__} needs exactly the fields {', '.join(readers)}")
    return cls(**{name: read(body[name]) for name, read in readers.items()})


def _exactly(kind: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) is not kind:  # a bool is an int, but not on the wire
            raise ValueError(f"{value!r:.40} should be a {kind.__name__}")
        return value

    return read


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{value!r:.40} should be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("a number is not finite")
    return number


def _or_none(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _many(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read_all(value: Any) -> Any:
        if not isinstance(value, list):
            raise ValueError(f"{value!r:.40} should be a list")
        return tuple(read(item) for item in value)

    return read_all


def _note(value: Any) -> Any:
    return _read(FailureNote, value)


_READERS: dict[str, Callable[[Any], Any]] = {
    "int": _exactly(int),
    "str": _exactly(str),
    "bool": _exactly(bool),
    "float": _number,
    "int | None": _or_none(_exactly(int)),
    "str | None": _or_none(_exactly(str)),
    "tuple[str, ...]": _many(_exactly(str)),
    "Descriptor": lambda value: _read(Descriptor, value),
    "FailureNote | None": _or_none(_note),
    "tuple[FailureNote, ...]": _many(_note),
}
_FIELDS = {
    cls: {part.name: _READERS[str(part.type)] for part in fields(cls)}
    for cls in (*_CLASSES.values(), Descriptor, FailureNote)
}
