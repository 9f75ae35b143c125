"""
Data of the coordinator: its knowledge, its events and its actions. Pure.

Rules of this file: nothing is changed in place, mappings included. Time is the coordinator's
monotonic seconds. Texts that name many nodes name the first few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

from attrs import Attribute, Factory, field, frozen

from elasticlib._untrusted import LONGEST_TIME
from elasticlib.errors import ConfigError
from elasticlib.rendezvous.coordinator._rank_order import natural_key
from elasticlib.rendezvous.protocol import _messages as messages
from elasticlib.rendezvous.protocol._timing import SHORTEST_HEARTBEAT

FIRST_JOIN_LIMIT = 600.0
"""Seconds that nodes wait for others where a `join_timeout` of 0 forbids to wait for replacements only."""
MOST_NAMES = 16


def _count(least: int) -> Callable[[object, Attribute[int], int], None]:
    def check(_: object, attribute: Attribute[int], value: int) -> None:
        if type(value) is not int or value < least:
            raise ConfigError.of_setting(attribute.name, f"{value!r:.80}: give a whole number, {least} or more")

    return check


def _seconds(_: object, attribute: Attribute[float], value: float) -> None:
    if type(value) not in (int, float) or not 0 <= value <= LONGEST_TIME:
        raise ConfigError.of_setting(attribute.name, f"{value!r:.80}: give a number of seconds, 0 or more")


def _heartbeat(_: object, attribute: Attribute[float], value: float) -> None:
    if type(value) not in (int, float) or (value != 0 and not SHORTEST_HEARTBEAT <= value <= LONGEST_TIME):
        rule = f"give a number of seconds, {SHORTEST_HEARTBEAT:g} or more, or 0 for none"
        raise ConfigError.of_setting(attribute.name, f"{value!r:.80}: {rule}")


def _whom(_: object, attribute: Attribute[str], value: str) -> None:
    if value not in ("quiet", "min", "max"):
        raise ConfigError.of_setting(attribute.name, f"{value!r:.80}: give 'quiet', 'min' or 'max'")


NOT_HANDED_OVER = "not handed over"
"""Metadata of a field of `Rules` that each coordinator has from its own node."""


@frozen
class Rules:
    """Settings of the job; raises a `ConfigError` for a value that breaks its rule."""

    min_nodes: int = field(default=1, validator=_count(1))
    max_nodes: int = field(default=1, validator=_count(1))
    max_restarts: int = field(default=3, validator=_count(0))
    """Restarts after worker failures, counted over the whole job and all its nodes."""
    last_call: float = field(default=30.0, validator=_seconds)
    """Seconds without a new join after which a round below `max_nodes` starts, if `wait_for` is ``quiet``."""
    join_timeout: float = field(default=600.0, validator=_seconds)
    """
    Seconds that too few nodes wait for others, from the end of the last round's workers.

    With 0 no replacement is waited for: once too few nodes are left, the job ends. The nodes of the
    first round, and those that come back after a failure, are then waited for as by default, for
    600 s.
    """
    heartbeat: float = field(default=0.0, validator=_heartbeat)
    """Seconds without a new heartbeat after which a node is lost; 0: no node is ever thought lost."""
    wait_for: str = field(default="quiet", validator=_whom)
    """
    Nodes for which a first round waits between min and max.

    ``max``: for all until `join_timeout`; ``min``: for none; ``quiet``: until no node joined for
    some time.
    """
    fixed_places: bool = field(default=False)
    """Each node brings its group rank, and a round needs all of them."""
    shared_store: bool = False
    """Workers use the coordinator's own store: it is cleared of their keys between two rounds."""
    hosts: tuple[str, ...] = field(default=(), eq=False, metadata={NOT_HANDED_OVER: True})
    """Names of the machines on which an engine has started nodes, in the order of their indexes; empty if unknown."""

    ends_together: bool = field(default=False, eq=False, metadata={NOT_HANDED_OVER: True})
    """True if a node that coordinates must not leave before the workers of the others have ended."""

    @max_nodes.validator
    def _not_below_min(self, _: object, value: int) -> None:
        if value < self.min_nodes:
            raise ConfigError(f"max_nodes={value} is below min_nodes={self.min_nodes}: raise max_nodes")

    @fixed_places.validator
    def _needs_all(self, _: object, value: bool) -> None:
        if value and self.min_nodes != self.max_nodes:
            raise ConfigError(
                f"fixed_places=True needs one number of nodes, not {self.min_nodes} to {self.max_nodes}: "
                "give min_nodes and max_nodes the same value"
            )

    @property
    def join_limit(self) -> float:
        """Seconds that a gathering may take."""
        return self.join_timeout or FIRST_JOIN_LIMIT

    @property
    def terms(self) -> messages.Terms:
        """Settings that must be the same on all nodes."""
        return messages.Terms(self.min_nodes, self.max_nodes, self.max_restarts)


# Events.


@frozen
class MessageReceived:
    """A node's message number *seq*; its messages are numbered from 1 without a gap."""

    seq: int
    report: messages.Report


@frozen
class Heartbeats:
    """The heartbeats were read: the count of each mailbox that has one."""

    counts: Mapping[str, int]


@frozen
class Tick:
    """Time has passed."""


# Actions, done by the shell in this order.


@frozen
class Send:
    """Send a notice to a node, to the mailbox that its latest `Join` opened."""

    mailbox: str
    node: str
    notice: messages.CoordinatorNotice


@frozen
class WakeAt:
    """Step again at *when* if nothing comes before; a step without one waits for the next event."""

    when: float


@frozen
class ClearStore:
    """Delete the keys that workers of the last round left in the shared store: none of them runs any more."""


Event: TypeAlias = MessageReceived | Heartbeats | Tick
Action: TypeAlias = Send | WakeAt | ClearStore


@frozen
class Presence:
    """A socket that all processes of a *node* hold, so that its end proves theirs; see `net._presence`."""

    node: str
    address: str
    """The node's best address. Another one, such as that of a bridge, may be an address of every machine."""
    port: int


@frozen
class Exits:
    """Exits in a row on the nodes' own request at one place, without any work done."""

    times: int
    at: float
    """Time of the last one."""
    why: str


@frozen
class Entry:
    """A node that asked for ranks, in its message *seq*; the answers go to *mailbox*."""

    node: str
    mailbox: str
    seq: int
    descriptor: messages.Descriptor
    requested_at: float = field(default=0.0, eq=False)
    """Time of its request, in the coordinator's seconds: a sign of life."""
    arrived: float = field(default=0.0, eq=False)
    """Time of its first request."""
    exits: int = 0
    """Exits in a row at its place that counted when it came."""
    is_other: bool = False
    """True if its arguments differ from those of the job's first node, and it never had ranks."""
    is_replacement: bool = False
    """True if it waits for the end of another node that has its place."""
    free_at: float = 0.0
    """Earliest time at which it may have ranks: a node that comes and goes must pause."""


@frozen
class Cause:
    """A failure and when it happened, in the coordinator's seconds."""

    at: float
    node: str
    note: messages.FailureNote


@frozen
class StopAgreement:
    """A stop of the round's workers at a step on which all ranks agree, because one node must end."""

    calls: Mapping[str, int] = Factory(dict)
    """Most calls of `should_stop` of a worker, by node, as far as nodes have reported them since the proposal."""
    proposed: int = 0
    """The call in which all may return; 0: none was proposed yet."""
    rate: float = 0.0
    """Calls per second of the fastest worker."""
    tries: int = 0
    """Number of proposals."""
    is_agreed: bool = False


@frozen
class Round:
    """A finalized round: `entries` and `assignments` never change; the rest is its progress."""

    number: int
    entries: Mapping[str, Entry]
    """Entries by node, in the order of group ranks."""
    assignments: tuple[messages.RankAssignment, ...]
    succeeded: frozenset[str] = frozenset()
    stopped: frozenset[str] = frozenset()
    """Nodes that have no worker of this round any more and did not succeed."""
    left: Mapping[str, str] = Factory(dict)
    """Nodes that left or were lost, each with the reason."""
    lost: frozenset[str] = frozenset()
    """Nodes of `left` that did not leave on their own request."""
    causes: tuple[Cause, ...] = ()
    requested: frozenset[str] = field(default=frozenset(), eq=False)
    """Nodes that were asked for the rest of their failures; the next coordinator asks again."""
    end: messages.RoundEnd | None = None
    rejoined: str = ""
    """
    The node that asked for ranks again as its sidecar had ended, and how that ended; empty: none.
    """
    stop: StopAgreement | None = None
    """The stop that a node has asked for; None: none has."""
    cause_due: float | None = field(default=None, eq=False)
    """Time to report a cause that was open when the round ended; None: nothing to report."""

    @property
    def has_workers(self) -> bool:
        """
        True if workers of this round may still run; no node may get ranks until they are gone.
        """
        return len(self.stopped) + len(self.succeeded) < len(self.entries)

    def may_run_on(self, node: str) -> bool:
        """Return whether workers of this round may still run on its *node*."""
        return node not in self.stopped and node not in self.succeeded

    def members(self) -> Iterator[Entry]:
        """Yield the nodes that neither left nor were lost, in the order of group ranks."""
        for node, entry in self.entries.items():
            if node not in self.left:
                yield entry


@frozen
class Sighting:
    """The last heartbeat that was seen of a node."""

    mailbox: str
    count: int | None
    """None: the node has joined and sent no heartbeat yet."""
    at: float
    """Time at which the coordinator saw it change."""

    def is_before(self, count: int | None) -> bool:
        """Return whether a heartbeat with *count* is newer than the last one; False for None."""
        if count is None:
            return False
        return self.count is None or count > self.count


@frozen
class Sightings:
    """Last signs of life of each node; a new coordinator begins without."""

    sightings: Mapping[str, Sighting] = Factory(dict)
    given_up: Mapping[str, Sighting] = Factory(dict)
    """
    The latest nodes that were lost and have not asked again; one that is heard again gets a
    `GivenUp`.
    """
    at: float | None = None
    """Time at which heartbeats were last read."""


@frozen
class JobState:
    """All knowledge of the coordinator. States that differ only in signs of life are equal."""

    rules: Rules
    received: Mapping[str, int] = Factory(dict)
    """Number of the last handled message of each node, in the order of their first message."""
    has_forgotten: bool = False
    """True if the oldest nodes that are gone were removed from `received`."""
    waiting: Mapping[str, Entry] = Factory(dict)
    """Nodes without ranks, in the order of their arrival."""
    round: Round | None = None
    """The running round, or the last one."""
    restarts: int = 0
    losses: Mapping[str, int] = Factory(dict)
    """For each host, its rounds in a row that had lost it when the present one began."""
    exits: Mapping[str, Exits] = Factory(dict)
    """Exits by place, the oldest first."""
    pausing: frozenset[str] = field(default=frozenset(), eq=False)
    """Nodes that had to pause when they came, at least those that still wait."""
    gathering_since: float | None = None
    last_join: float = 0.0
    opens_at: float = field(default=0.0, eq=False)
    """No node gets ranks before this time: unknown nodes may be at work."""
    final: messages.Final | None = None
    watch: Sightings = field(factory=Sightings, eq=False)


Outcome: TypeAlias = tuple[JobState, tuple[Action, ...]]


def present(state: JobState) -> Iterator[Entry]:
    """Yield the nodes with ranks, which are the job, then those that wait."""
    if state.round is not None:
        yield from state.round.members()
    yield from state.waiting.values()


def entry_of(state: JobState, node: str) -> Entry | None:
    """Return the present entry of *node*; None if it is not in the job."""
    if node in state.waiting:
        return state.waiting[node]
    current = state.round
    if current is None or node in current.left:
        return None
    return current.entries.get(node)


def host_of(node: str) -> str:
    """Return the host part of a node's name."""
    return node.partition("/")[0]


def named(nodes: Iterable[str], reasons: Mapping[str, str] | None = None) -> str:
    """Return the first nodes as a text for people, each with its reason if it has one."""
    known = sorted(nodes, key=natural_key)
    hosts = Counter(map(host_of, known))
    texts = []
    for node in known[:MOST_NAMES]:
        # Two nodes of one host differ by their whole names.
        text = node
        if hosts[host_of(node)] == 1:
            text = host_of(node)
        if reasons is not None and reasons.get(node):
            text = f"{text} ({reasons[node]})"
        texts.append(text)

    if len(known) > MOST_NAMES:
        texts.append(f"and {len(known) - MOST_NAMES} more")
    return ", ".join(texts) or "none"
