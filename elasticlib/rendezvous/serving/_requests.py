"""
Messages of nodes and a server that coordinates jobs for them. Pure.

    mark              `ServerMark`: this store belongs to a server, so no node coordinates here
    inbox             `OpenJob`s of nodes
    answer/<word>     `Opened` or `OpenDeclined`, the answer to the request with this word

Rules of this file: the keys belong to the id of no job. Anybody can have written the bytes. A request is signed
with the job's token where it has one. The answers are not signed: what counts is the greeting of the job's own
coordinator, which is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from attrs import Attribute, evolve, field, frozen

from elasticlib import _untrusted
from elasticlib.rendezvous.coordinator._state import Rules
from elasticlib.rendezvous.protocol._codec import Code, Codec, Name, mac, write

VERSION = 1
NO_JOB = ""
"""The id in the keys between nodes and server: no job has it."""
MARK = "mark"
LONGEST_REQUEST = 64 * 1024
"""Bytes of a request."""
LONGEST_ID = 1000
"""Bytes of a job's id on the wire, in a store that a server hosts."""


@frozen
class ServerMark:
    """To every node that reaches the store: the server called *name* coordinates the jobs in it."""

    name: Name


def _beats(_: object, attribute: Attribute[Rules], rules: Rules) -> None:
    # Without heartbeats the server would never learn that the nodes are gone.
    if not rules.heartbeat:
        raise ValueError("its heartbeat time is 0, so nodes that are gone would never be noticed")


def _fits_key(_: object, attribute: Attribute[str], run_id: str) -> None:
    size = len(write(run_id))
    if not run_id or size > LONGEST_ID:
        raise ValueError(f"the job's id has {size:,} bytes: give it 1 to {LONGEST_ID:,}")


@frozen
class OpenJob:
    """To the server: coordinate job *run_id* by these *rules*, unless you do already."""

    word: Name
    """Name of the answer's key."""
    node: Name
    run_id: Code = field(validator=_fits_key)
    rules: Rules = field(validator=_beats)
    close_timeout: float = 30.0
    """Seconds that the coordinator waits for nodes to read how the job ended."""
    is_known: bool = False
    """True if the node may have been in the job before: then it has yet to read how the job ended."""


@frozen
class Opened:
    """To a node: the server coordinates its job."""


@frozen
class OpenDeclined:
    """To a node: the server does not coordinate its job, for this reason."""

    why: str


Message: TypeAlias = ServerMark | OpenJob | Opened | OpenDeclined

_CODEC = Codec(
    VERSION, {"server": ServerMark, "open": OpenJob, "opened": Opened, "declined": OpenDeclined}, (Rules,), ()
)


def answer_key(word: str) -> str:
    """Return the key of the answer to the request with this *word*."""
    return f"answer/{word}"


def encode(message: Message) -> bytes:
    """Return the *message* as canonical JSON."""
    return write(_CODEC.plain(message))


def decode(data: bytes) -> Message:
    """Return the message in *data*, which is not signed; raise ValueError for any other data."""
    message: Message = _CODEC.read(data, None, "")
    return message


def encode_request(request: OpenJob, key: bytes | None) -> bytes:
    """Return the *request*, signed with *key* if there is one."""
    data = _signed(request, key)
    if len(data) <= LONGEST_REQUEST:
        return data
    # The names of thousands of machines only serve messages about missing nodes.
    return _signed(evolve(request, rules=evolve(request.rules, hosts=())), key)


def _signed(request: OpenJob, key: bytes | None) -> bytes:
    body = _CODEC.plain(request)
    if key is not None:
        body["mac"] = mac(write(body), key, _place(request))
    return write(body)


def _place(request: OpenJob) -> str:
    return f"{request.run_id}/open"


def read_request(data: bytes) -> OpenJob:
    """Return the request in *data* without a look at its signature; raise ValueError for any other data."""
    # Checked before it is parsed: parsing a stranger's megabytes would delay every node.
    if len(data) > LONGEST_REQUEST:
        raise ValueError(f"it has {len(data):,} bytes, and a request has at most {LONGEST_REQUEST:,}")

    body = _untrusted.parse(data)
    if isinstance(body, dict):
        body.pop("mac", None)
    request = _CODEC.of(body)
    if not isinstance(request, OpenJob):
        raise ValueError(f"a node cannot send a {type(request).__name__}")
    return request


def key_that_signed(data: bytes, keys: Sequence[bytes | None]) -> tuple[bytes | None, bool]:
    """Return the one of *keys* that signed the request in *data* (None: unsigned), and whether there is one."""
    for key in keys:
        if _is_signed_with(data, key):
            return key, True
    return None, False


def _is_signed_with(data: bytes, key: bytes | None) -> bool:
    def place(request: Any) -> str:
        return _place(request) if isinstance(request, OpenJob) else ""

    try:
        _CODEC.read(data, key, place)
    except ValueError:
        return False
    return True
