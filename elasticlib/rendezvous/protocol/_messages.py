"""
Messages of nodes and their coordinator, and their wire format. Pure.

Rules of this file: a message is a small frozen class; its annotated fields are its wire format and
state valid values. The wire is JSON with ``"v": 1`` and sorted keys. `decode` trusts nothing:
anything but a valid message of this version is a `RendezvousStateError`. No wall clock travels:
times are ages in seconds.

With a key, a message carries an HMAC-SHA256 over its body and its *place*. The place is a text that
names the job, the coordinator's nonce and the one key or number of this message. So a copy is
worthless elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from attrs import field, frozen
from attrs.validators import and_, ge, in_, le, lt, min_len, optional, or_

from elasticlib.errors import RendezvousStateError
from elasticlib.rendezvous.protocol._codec import Code, Codec, Lines, Name, Place, mac, write
from elasticlib.rendezvous.protocol._heartbeats_read import HeartbeatsRead
from elasticlib.rendezvous.protocol._timing import SHORTEST_HEARTBEAT

VERSION = 1
MOST_SLOTS = 1_000_000
"""Workers on one node: more processes than a kernel has."""
EPOCH_BITS = 32
"""Bits of a heartbeat's count that lie below the epoch of its coordinator."""
LAST_EPOCH = (1 << 30) - 1
"""Limit of takeovers; heartbeats up to it have counts that every reader accepts."""


@frozen
class Descriptor:
    """The offer of a node for one round."""

    slots: int = field(validator=and_(ge(1), le(MOST_SLOTS)))
    """Number of workers that it will run."""
    role: str
    addresses: tuple[str, ...] = field(validator=min_len(1))
    """Addresses at which peers reach this node, best first."""
    store_port: int = field(validator=and_(ge(0), le(65535)))
    """Port that this node has bound for the round's worker store, in case it becomes group rank 0."""
    index: int | None = field(default=None, validator=optional(ge(0)))
    """Place in the order of ranks, if the user or a scheduler fixed one."""
    hosts: bool = False
    """True if the job's store lives on this node: without fixed places it comes first."""
    work: str = ""
    """The program of its workers, which distinguishes two jobs of one name."""
    command: str = ""
    """`work` with its arguments, equal for equal commands; empty: unknown."""
    is_scheduled: bool = False
    """True if a scheduler set `index`; then no two living nodes have the same."""
    presence_port: int = field(default=0, validator=and_(ge(0), le(65535)))
    """Port of a socket that all processes of this node hold; 0: there is none."""
    presence_address: str = ""
    """Address of the presence socket; empty: the first of `addresses`."""


@frozen
class Terms:
    """Settings that must be the same on all nodes of a job."""

    min_nodes: int
    max_nodes: int
    max_restarts: int


@frozen
class Join:
    """To the coordinator: this node has no running worker and asks for ranks."""

    node: Name
    descriptor: Descriptor
    terms: Terms | None = None
    """Compared with the coordinator's own, where given."""
    round: int = field(default=-1, validator=ge(-1))
    """The last round in which this node had ranks; -1: none."""
    epoch: int = field(default=0, validator=and_(ge(0), le(LAST_EPOCH)))
    """
    The latest coordinator's epoch that this node knows; a coordinator with a lower one was given an
    old memory.
    """
    pulse: int = field(default=0, validator=ge(0))
    """
    Count of the latest heartbeat of the coordinator that it has read; 0: none. No coordinator uses
    it any more.
    """
    after: str = ""
    """
    The end of this node's last sidecar, if this is the first message of a new one; earlier ones may
    be missing.
    """
    succeeded: int = field(default=-1, validator=ge(-1))
    """The round whose success that sidecar may not have reported; -1: none."""


@frozen
class FailureNote:
    """One worker that failed, with the facts that peers need: a part of other messages."""

    rank: int
    local_rank: int
    pid: int
    exitcode: int
    """Exit status; ``-n`` when signal ``n`` ended the worker."""
    message: Lines = ""
    exception_type: str = ""
    traceback: Lines = ""
    hint: Lines = ""
    secondary: bool = False
    """True for a lost connection to a peer: most likely a consequence of another failure."""
    age: float = field(default=0.0, validator=ge(0))
    """Seconds between the failure and the sending of this note."""
    fatal: bool = False
    """True if a restart would only repeat it: the job ends, whatever restarts are left."""
    process: str = ""
    """The helper process of elasticlib that ended, with `rank` in its place; empty: a worker."""
    cut: bool = False
    """
    True if texts were left out, and more of them can be requested: from its node, or at the root
    cause's key.
    """


@frozen
class Failed:
    """To the coordinator, at once: workers here failed, or the store that those of other nodes use; others may run."""

    node: Name
    round: int
    failures: tuple[FailureNote, ...]


@frozen
class Stopped:
    """
    To the coordinator: all workers of this node are gone; `failures` has all that `Failed` did not
    contain.
    """

    node: Name
    round: int
    failures: tuple[FailureNote, ...]


@frozen
class Succeeded:
    """To the coordinator: all workers of this node succeeded."""

    node: Name
    round: int


@frozen
class Leave:
    """To the coordinator, at once: this node leaves for good, and starts no worker any more."""

    node: Name
    why: str
    round: int | None = None
    """Round whose workers still run here, and whose `Stopped` will follow; None when none runs."""
    lost: bool = False
    """
    True if another process reports it for a dead agent: that counts as a loss, not as the node's
    own wish.
    """
    stops: bool = False
    """True if a person stops the job: it ends for all nodes, and `why` is the reason for all."""


@frozen
class StopWanted:
    """To the coordinator: this node must end; its workers, and those of the other nodes, may first agree on a step."""

    node: Name
    round: int
    why: str
    left: float = field(validator=ge(0))
    """Seconds until its workers are killed."""


@frozen
class CallsCounted:
    """To the coordinator, after a `StopAsked` or `StopProposed`: the most calls of `should_stop` of a worker here."""

    node: Name
    round: int
    calls: int = field(validator=ge(0))
    """0: no worker here asks whether it should stop."""
    rate: float = field(default=0.0, validator=ge(0))
    """Its calls per second."""
    proposed: int = field(default=0, validator=ge(0))
    """The proposal that these workers know since; 0: none."""


@frozen
class RankAssignment:
    """To one node: its place in a round. Ranks of its workers are `rank_base` + local rank."""

    round: int = field(validator=ge(0))
    group_rank: int = field(validator=ge(0))
    group_world_size: int
    rank_base: int = field(validator=ge(0))
    world_size: int
    role_rank_base: int = field(validator=ge(0))
    role_world_size: int
    restart_count: int = field(validator=ge(0))
    """Restarts that the whole job has used up so far."""
    max_restarts: int = field(validator=ge(0))
    master_addresses: tuple[str, ...] = field(validator=min_len(1))
    """Addresses of group rank 0, best first."""
    master_port: int = field(validator=and_(ge(0), le(65535)))
    why: str
    """The reason for the start of the round."""
    cause: str = ""
    """The reason for the end of the last round, if its workers failed."""
    heartbeat_count: int = field(default=0, validator=ge(0))
    """Count of the last heartbeat of this node that was read since it asked for ranks; 0: none was yet."""

    def __attrs_post_init__(self) -> None:
        for own, all_of_them in (
            (self.group_rank, self.group_world_size),
            (self.rank_base, self.world_size),
            (self.role_rank_base, self.role_world_size),
        ):
            if own >= all_of_them:
                raise ValueError(f"rank {own} is out of range: it must be below {all_of_them}")


@frozen
class RoundEnd:
    """To every node of a round: stop the workers; then join again if `restart`, else wait for `Final`."""

    round: int
    why: str
    restart: bool
    decided: bool = True
    """
    False if workers that still stop may report an earlier failure. The cause then follows in
    another `RoundEnd`, in the next ranks or in the job's end.
    """
    failed: bool = False
    """True if workers failed: those that still run cannot do their common work."""


@frozen
class StopAsked:
    """To every node of a round: let the workers say how many calls of `should_stop` they have made."""

    round: int
    why: str
    left: float = field(validator=ge(0))
    """Seconds until the workers of the node that must end are killed."""
    first_rank: int = field(validator=ge(0))
    ranks: int = field(validator=ge(0))
    """The node that must end has so many ranks, from `first_rank` on."""


@frozen
class StopProposed:
    """To every node of a round: its workers wait in this call of `should_stop`."""

    round: int
    call: int = field(validator=ge(1))


@frozen
class StopAgreed:
    """To every node of a round: no worker had passed the proposed call, so that all return in it."""

    round: int


@frozen
class GivenUp:
    """
    Notice to a node that was counted as lost and is heard again: it has no part in the job until it
    asks for ranks.
    """

    why: str


@frozen
class Elaborate:
    """
    To a node, for its session: a failure of its workers is the root cause; send as much of it as
    fits.
    """

    round: int


@frozen
class Caution:
    """To a node, for people: a possible mistake in the job, and what to do about it."""

    text: str


@frozen
class Final:
    """
    To a node: the job is over for it. `root` is the first failure of all nodes, if one decided.
    """

    succeeded: bool
    why: str
    root_node: Name | None = None
    root: FailureNote | None = None
    kind: str = "failed"
    """
    Sort of an end without success.

    * ``failed``: workers failed
    * ``timeout``: too few nodes
    * ``closed``: the job had ended, or was ended from outside
    * ``refused``: this node may not take part
    * ``left``: this node asked to leave
    * ``stopped``: a person stopped the job
    """
    round: int | None = None
    """The round that succeeded, whose results are the job's."""
    lost_hosts: tuple[str, ...] = ()
    """Some of the hosts whose nodes were lost in the last rounds."""


@frozen
class Acknowledgement:
    """To the coordinator: this node has read its `Final`; it needs the store no more."""

    node: Name


@frozen
class Close:
    """To the coordinator: end the job for all nodes."""

    node: Name
    why: str
    stops: bool = False
    """True if a person stops the job: `why` is the reason for all nodes."""


@frozen
class Envelope:
    """
    A report in its envelope. Messages of a node are numbered from 1; the same number means the same
    message.
    """

    seq: int = field(validator=ge(1))
    report: Report


@frozen
class Announcement:
    """The coordinator's greeting to every node: the identity of the job, and its settings."""

    run_id: Code
    nonce: Name
    """Random, new when a job begins; kept when another node takes over the coordination."""
    host: str
    """The node that coordinates, for people."""
    terms: Terms
    heartbeat: float = field(validator=or_(in_((0,)), ge(SHORTEST_HEARTBEAT)))
    """Seconds of silence after which a node is lost; 0: no node is ever thought lost."""
    signed: bool = False
    """True if all messages of this job carry a MAC."""


@frozen
class CoordinatorHeartbeat:
    """
    The coordinator lives: `count` grows by one for each `TICK` of the heartbeat time in which it
    looked around.
    """

    nonce: Name
    """Identifies the beginning of the job that it coordinates."""
    count: int = field(validator=and_(ge(0), lt((LAST_EPOCH + 1) << EPOCH_BITS)))
    status: str = ""
    """The nodes for which the job waits, for people; empty while it runs."""
    waiting: int = field(default=0, validator=ge(0))
    """Nodes that wait for ranks while a round runs."""
    over: str = ""
    """
    The reason for the job's end, if the coordinator may not know all nodes that must learn it.
    """
    read: HeartbeatsRead | None = None
    """Heartbeats of the nodes of the last round that the coordinator has read."""

    @property
    def epoch(self) -> int:
        """Number of takeovers of the coordination."""
        return self.count >> EPOCH_BITS


@frozen
class NodeHeartbeat:
    """A node lives: `count` grows with each heartbeat of the mailbox."""

    count: int = field(validator=ge(0))
    read: int = field(default=0, validator=ge(0))
    """Notices of this mailbox that were read; the coordinator writes the others again."""
    stored: int = field(default=0, validator=ge(0))
    """Number of the last message that this node wrote."""


@frozen
class ContactLost:
    """
    To an agent, by its own node: this node was silent for too long, and others will get its ranks.

    The agent must stop the workers within *grace* seconds, then ask for ranks again; meanwhile
    contact is sought.
    """

    why: str
    grace: float


@frozen
class StoreGone:
    """
    Notice to an agent from its own node: no coordinator is left or will come. The error about that
    follows.
    """

    why: str


WorkerReport: TypeAlias = Failed | Stopped | Succeeded | Leave | StopWanted | CallsCounted
"""Report of an agent about its workers."""

Report: TypeAlias = Join | WorkerReport | Acknowledgement | Close
"""Message of a node to the coordinator."""

Notice: TypeAlias = RankAssignment | RoundEnd | StopAsked | StopProposed | StopAgreed | Final
"""Notice of the coordinator to a node."""

CoordinatorNotice: TypeAlias = Notice | GivenUp | Elaborate | Caution
"""The same, with notices for a node's session instead of its agent."""

Message: TypeAlias = Report | CoordinatorNotice | Envelope | Announcement | CoordinatorHeartbeat | NodeHeartbeat

_CLASSES: dict[str, type[Any]] = {
    "join": Join,
    "failed": Failed,
    "stopped": Stopped,
    "succeeded": Succeeded,
    "leave": Leave,
    "stop wanted": StopWanted,
    "calls": CallsCounted,
    "bye": Acknowledgement,
    "close": Close,
    "letter": Envelope,
    "hello": Announcement,
    "pulse": CoordinatorHeartbeat,
    "beat": NodeHeartbeat,
    "seat": RankAssignment,
    "end": RoundEnd,
    "stop asked": StopAsked,
    "stop proposed": StopProposed,
    "stop agreed": StopAgreed,
    "given up": GivenUp,
    "elaborate": Elaborate,
    "caution": Caution,
    "final": Final,
}
_REPORTS = ("join", "failed", "stopped", "succeeded", "leave", "stop wanted", "calls", "bye", "close")
_CODEC = Codec(VERSION, _CLASSES, (Descriptor, FailureNote, Terms, HeartbeatsRead), _REPORTS)


def encode(message: Message, key: bytes | None = None, place: str = "") -> bytes:
    """Return the message as canonical ASCII JSON; with a *key*, signed for its *place*."""
    body = _CODEC.plain(message)
    if key is not None:
        body["mac"] = mac(write(body), key, place)
    return write(body)


def sealed(messages: Mapping[str, Message], key: bytes | None, place_of: Callable[[str], str]) -> dict[str, bytes]:
    """
    Return all messages, each encoded for the place of its key; equal messages are encoded once.
    """
    known: dict[int, tuple[dict[str, Any], bytes]] = {}
    found = {}
    for name, message in messages.items():
        # A notice for thousands of nodes is one object: only its signature differs from key to key.
        if id(message) not in known:
            body = _CODEC.plain(message)
            known[id(message)] = body, write(body)
        body, data = known[id(message)]
        found[name] = data if key is None else write(body | {"mac": mac(data, key, place_of(name))})

    return found


def to_plain(message: Message) -> dict[str, Any]:
    """
    Return the message as plain data, for a channel between processes of one node. `from_plain`
    reads it.
    """
    return _CODEC.plain(message)


def from_plain(body: Any) -> Message:
    """Return the message in plain data; raises `RendezvousStateError` for any other data."""
    try:
        message: Message = _CODEC.of(body)
        return message
    except ValueError as error:
        raise RendezvousStateError(f"{body!s:.80} is not a message of this job: {error}") from error


def decode(data: bytes, key: bytes | None = None, place: Place = "") -> Message:
    """
    Return the message in *data*; raises `RendezvousStateError` for any other data.

    With a *key*, a message must be signed with it for this *place*; without one, it must not be
    signed. Its texts are for people, and safe to be shown; its names can be written anywhere.
    """
    try:
        message: Message = _CODEC.read(data, key, place)
        return message
    except ValueError as error:
        why = f"the store holds {data[:80]!r}, which is not a message of this job: {error}"
        raise RendezvousStateError(why) from error
