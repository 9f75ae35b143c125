"""
The state that one coordinator leaves to the next, signed where the job has a token. Pure.

A signature keeps strangers from writing such a text. It does not keep them from putting an older
one back. Nodes have seen later states, so that is noticed. It ends the job, because a round or a
restart that was used would be used twice.

Rules of this file:

* The text is JSON with ``"v": 1``. With a token it begins with a signature of the job's id and
  every byte after it.
* Any other text is a `RendezvousStateError`.
* Times are written as ages. The clock of another host can continue them, and the time between
  writing and reading
does not count.
* Signs of life are left out: a new coordinator gives every node a full heartbeat time.
* Decisions are stored, not computed again: ranks are written down, their common parts once.

Size of a state: 0.7 kB, and 120 bytes for each node with a name of 30 and an address of 10
characters. A past node takes 35 bytes, a failed worker what its message and traceback take. So
10,000 nodes take 1.2 MB.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from json import dumps, loads
from typing import Any, TypeVar

from attrs import evolve, fields, frozen

from elasticlib import _untrusted
from elasticlib.errors import RendezvousStateError
from elasticlib.rendezvous.coordinator._garbage import Garbage
from elasticlib.rendezvous.coordinator._node_liveness import mailboxes
from elasticlib.rendezvous.coordinator._outbox import Outbox
from elasticlib.rendezvous.coordinator._state import (
    NOT_HANDED_OVER,
    Cause,
    Entry,
    Exits,
    JobState,
    Round,
    Rules,
    StopAgreement,
)
from elasticlib.rendezvous.protocol import _messages as messages
from elasticlib.rendezvous.protocol._codec import PLAIN
from elasticlib.rendezvous.protocol._exchange import key_place, mailbox_name

VERSION = 1
_T = TypeVar("_T")
_OWN = ("rank_base", "role_rank_base", "role_world_size", "heartbeat_count")
"""Fields, besides the place, that differ between the rank assignments of a round."""
_SHARED = tuple(part.name for part in fields(messages.RankAssignment) if part.name not in (*_OWN, "group_rank"))
_RULES = {part.name: PLAIN[str(part.type)] for part in fields(Rules) if NOT_HANDED_OVER not in part.metadata}
OBJECTION = 1.0
"""
Share of the heartbeat time within which every node and a new coordinator have exchanged heartbeats.

A node without contact has stopped its workers by then. Heartbeats come after 0.25 of it; one that
comes back without a newer heartbeat of the coordinator does not count.
"""
ADVICE = "; another program writes to this job's keys: give each job its own --rdzv-id, or restrict access to the store"
_MARK = b"signed:"
_DAMAGES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_DIGITS = hashlib.sha256().digest_size * 2


@frozen
class Handover:
    """The coordinator's memory, as last written."""

    nonce: str
    epoch: int
    """Number of takeovers of the coordination."""
    state: JobState
    outbox: Outbox
    garbage: Garbage

    @property
    def round(self) -> int:
        """Number of the last round; -1: there was none."""
        return -1 if self.state.round is None else self.state.round.number


def write_handover(memory: Handover, run_id: str, key: bytes | None, now: float) -> bytes:
    """Return the text of *memory*; *now* is a time of the clock used in it."""
    # The state is a separate text: it is read, and refused, as one.
    state = encode_state(memory.state, now).decode("ascii")
    parts = {
        "state": state,
        "mail": memory.outbox.plain(memory.state),
        "gone": memory.garbage.plain(mailboxes(memory.state)),
    }
    body = {"v": VERSION, "nonce": memory.nonce, "epoch": memory.epoch, **parts}
    text = dumps(body, separators=(",", ":")).encode("ascii")
    return text if key is None else b"%s%s:%s" % (_MARK, _signature(text, run_id, key), text)


def read_handover(
    data: bytes | None, run_id: str, key: bytes | None, now: float, *, is_private: bool = False
) -> Handover:
    """
    Return the memory in *data*, in the time of a clock that shows *now*; otherwise raise
    `RendezvousStateError`.

    *is_private*: it was stored where no stranger writes, so it is the latest.
    """
    if data is None:
        raise RendezvousStateError(
            "the coordinator's state is no longer in the store: the job ended without this node, or was deleted"
        )

    text = _checked(data, run_id, key)
    try:
        body = loads(text)
        nonce, epoch = _untrusted.name(body["nonce"]), body["epoch"]
        if type(epoch) is not int or not 0 <= epoch < messages.LAST_EPOCH:
            raise ValueError(f"its epoch {_untrusted.shown(epoch)} is not a valid number")
        state = decode_state(body["state"].encode("ascii"), now)
        state = state if is_private else _reserved(state, now, key is not None)
        outbox, garbage = Outbox.from_plain(body["mail"], state, now), Garbage.from_plain(body["gone"], now)
        return Handover(nonce, epoch, state, outbox, garbage)
    except (*_DAMAGES, RendezvousStateError) as error:
        raise RendezvousStateError(f"the coordinator's state in the store is damaged: {error!r:.400}") from error


def _reserved(state: JobState, now: float, signed: bool) -> JobState:
    """
    Delay the next round if *state* may be old, so that running nodes have the time to object.

    This holds for a state without a round. With a token it holds for any: strangers can only put an
    old state back.
    """
    if state.round is not None and not signed:
        return state
    return evolve(state, opens_at=now + OBJECTION * state.rules.heartbeat)


def _checked(data: bytes, run_id: str, key: bytes | None) -> bytes:
    if key is None:
        if data.startswith(_MARK):
            raise RendezvousStateError("the coordinator's state in the store is signed, but this node has no token")
        return data

    if not data.startswith(_MARK):
        raise RendezvousStateError("the coordinator's state in the store is not signed, but this node has a token")

    start = len(_MARK) + _DIGITS
    found, mark, text = data[len(_MARK) : start], data[start : start + 1], data[start + 1 :]

    # In constant time, or a stranger could find the signature byte by byte.
    if mark != b":" or not hmac.compare_digest(found, _signature(text, run_id, key)):
        raise RendezvousStateError(
            "the coordinator's state in the store was signed with another token, or for another job"
        )

    return text


def _signature(text: bytes, run_id: str, key: bytes) -> bytes:
    place = key_place(run_id, "", "state").encode("utf-8", "surrogatepass")
    return hmac.new(key, place + b"\0" + text, hashlib.sha256).hexdigest().encode("ascii")


# The state.


def encode_state(state: JobState, now: float) -> bytes:
    """Return the state as ASCII JSON; *now* is a time of the clock used in it."""
    commands: dict[str, int] = {}
    """Each known command, once, and its number."""
    body = {
        "v": VERSION,
        "rules": {name: getattr(state.rules, name) for name in _RULES},
        "received": dict(state.received),
        "forgotten": state.has_forgotten,
        "waiting": [_entry(entry, commands) for entry in state.waiting.values()],
        "round": None if state.round is None else _round(state.round, now, commands),
        "restarts": state.restarts,
        "losses": dict(state.losses),
        "exits": {place: [its.times, now - its.at, its.why] for place, its in state.exits.items()},
        "after": {entry.mailbox: entry.exits for entry in _entries(state) if entry.exits},
        "commands": list(commands),
        "others": [node for node, entry in state.waiting.items() if entry.is_other],
        "replacements": [node for node, entry in state.waiting.items() if entry.is_replacement],
        "pauses": {node: entry.free_at - now for node, entry in state.waiting.items() if entry.free_at},
        "gathering": None if state.gathering_since is None else now - state.gathering_since,
        "last_join": now - state.last_join,
        "final": _message(state.final),
    }
    return dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")


def decode_state(data: bytes, now: float) -> JobState:
    """
    Return the state in *data*, by a clock that shows *now*; raise `RendezvousStateError` for any
    other text.
    """
    try:
        body = _untrusted.parse(data)
        if _untrusted.whole(body["v"]) != VERSION:
            raise ValueError(f"its version is {body['v']}, but this node reads only version {VERSION}")
        return _state(body, now)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        why = f"{data[:80]!r} is not a coordinator's state: {error!r}"
        raise RendezvousStateError(why) from error


def _state(body: Any, now: float) -> JobState:
    rules = Rules(**{name: read(body["rules"][name]) for name, read in _RULES.items()})
    after = _counts(body["after"])

    # A node of an earlier version, without the parts that are read by `get`, may have written this.
    commands = [_untrusted.line(text) for text in body.get("commands", [])]
    waiting = [_read_entry(entry, now, after, commands) for entry in _untrusted.exactly(body["waiting"], list)]
    others = {_untrusted.name(node) for node in body.get("others", [])}
    replacements = {_untrusted.name(node) for node in body.get("replacements", [])}
    free_at = {_untrusted.name(node): now + _untrusted.seconds(left) for node, left in _members(body["pauses"])}
    return JobState(
        rules,
        received=_counts(body["received"]),
        has_forgotten=_untrusted.exactly(body.get("forgotten", False), bool),
        waiting={
            entry.node: evolve(
                entry,
                free_at=free_at.get(entry.node, 0.0),
                is_other=entry.node in others,
                is_replacement=entry.node in replacements,
            )
            for entry in waiting
        },
        round=None if body["round"] is None else _read_round(body["round"], now, after, commands),
        restarts=_untrusted.whole(body["restarts"], 0),
        losses=_counts(body["losses"], _untrusted.line),
        exits={_untrusted.line(place): _read_exits(its, now) for place, its in _members(body["exits"])},
        pausing=frozenset(free_at),
        gathering_since=None if body["gathering"] is None else now - _age(body["gathering"]),
        last_join=now - _age(body["last_join"]),
        final=None if body["final"] is None else _read_message(body["final"], messages.Final),
    )


def _entry(entry: Entry, commands: dict[str, int]) -> list[Any]:
    its = entry.descriptor
    row = [entry.node, entry.seq, its.slots, its.role, its.addresses, its.store_port, its.index, its.hosts, its.work]
    return [*row, commands.setdefault(its.command, len(commands)), its.is_scheduled]


def _entries(state: JobState) -> Iterator[Entry]:
    yield from state.waiting.values()
    if state.round is not None:
        yield from state.round.entries.values()


def _read_exits(value: Any, now: float) -> Exits:
    times, age, why = value
    return Exits(_untrusted.whole(times, 1), now - _age(age), _untrusted.line(why))


def _read_entry(value: Any, now: float, after: Mapping[str, int], commands: Sequence[str]) -> Entry:
    # Rows of earlier versions are shorter.
    node, seq, slots, role, addresses, port, index, hosts, work, *more = value
    command = more[0] if more else None
    is_scheduled = more[1] if len(more) > 1 else False
    descriptor = messages.Descriptor(
        _untrusted.whole(slots),
        _untrusted.line(role),
        tuple(_untrusted.line(address) for address in _untrusted.exactly(addresses, list)),
        _untrusted.whole(port),
        None if index is None else _untrusted.whole(index),
        _untrusted.exactly(hosts, bool),
        _untrusted.line(work),
        "" if command is None else commands[_untrusted.whole(command, 0)],
        _untrusted.exactly(is_scheduled, bool),
    )

    # It is unknown how long the node has been there: it is judged as a newcomer from now on.
    mailbox = mailbox_name(_untrusted.name(node), _untrusted.whole(seq, 1))
    return Entry(node, mailbox, seq, descriptor, arrived=now, exits=after.get(mailbox, 0))


def _round(current: Round, now: float, commands: dict[str, int]) -> dict[str, Any]:
    index = {node: number for number, node in enumerate(current.entries)}
    return {
        "number": current.number,
        "entries": [_entry(entry, commands) for entry in current.entries.values()],
        "seats": {name: getattr(current.assignments[0], name) for name in _SHARED},
        "own": [_own(assignment) for assignment in current.assignments],
        "succeeded": sorted(map(index.__getitem__, current.succeeded)),
        "stopped": sorted(map(index.__getitem__, current.stopped)),
        "left": [[index[node], why] for node, why in current.left.items()],
        "lost": sorted(map(index.__getitem__, current.lost)),
        "causes": [_cause(cause, now) for cause in current.causes],
        "end": _message(current.end),
        "rejoined": current.rejoined,
        "stop": _agreement(current.stop),
        "cause_due": None if current.cause_due is None else max(0.0, current.cause_due - now),
    }


def _own(assignment: messages.RankAssignment) -> list[Any]:
    return [getattr(assignment, name) for name in _OWN]


def _cause(cause: Cause, now: float) -> list[Any]:
    return [now - cause.at, _message(messages.Failed(cause.node, 0, (cause.note,)))]


def _read_round(value: Any, now: float, after: Mapping[str, int], commands: Sequence[str]) -> Round:
    entries = [_read_entry(entry, now, after, commands) for entry in _untrusted.exactly(value["entries"], list)]
    nodes = [entry.node for entry in entries]
    assignments = _read_assignments(value["seats"], _untrusted.exactly(value["own"], list))

    # Ranks are looked up by place: each node appears once, with one assignment.
    if not len(set(nodes)) == len(nodes) == len(assignments) > 0:
        raise ValueError(
            f"it has {len(assignments)} rank assignments for the nodes {nodes!r:.80}: each node must have one"
        )

    return Round(
        number=_untrusted.whole(value["number"], 0),
        entries={entry.node: entry for entry in entries},
        assignments=assignments,
        succeeded=_at(nodes, value["succeeded"]),
        stopped=_at(nodes, value["stopped"]),
        left={nodes[_untrusted.whole(place, 0)]: _untrusted.line(why) for place, why in value["left"]},
        lost=_at(nodes, value["lost"]),
        causes=tuple(_read_cause(cause, now) for cause in value["causes"]),
        end=None if value["end"] is None else _read_message(value["end"], messages.RoundEnd),
        rejoined=_untrusted.line(value.get("rejoined", "")),
        stop=_read_agreement(value.get("stop")),
        cause_due=None if value.get("cause_due") is None else now + _untrusted.seconds(value["cause_due"]),
    )


def _agreement(stop: StopAgreement | None) -> list[Any] | None:
    return None if stop is None else [dict(stop.calls), stop.proposed, stop.rate, stop.tries, stop.is_agreed]


def _read_agreement(value: Any) -> StopAgreement | None:
    if value is None:
        return None
    calls, proposed, rate, tries, is_agreed = value
    return StopAgreement(
        _counts(calls),
        _untrusted.whole(proposed, 0),
        _untrusted.seconds(rate, 0.0),
        _untrusted.whole(tries, 0),
        _untrusted.exactly(is_agreed, bool),
    )


def _read_assignments(shared: Any, own: list[Any]) -> tuple[messages.RankAssignment, ...]:
    alike = {name: shared[name] for name in _SHARED} | {"type": "seat", "v": 1}
    each = [dict(zip(_OWN, numbers, strict=True)) | {"group_rank": place} for place, numbers in enumerate(own)]
    return tuple(_read_message(alike | its, messages.RankAssignment) for its in each)


def _read_cause(value: Any, now: float) -> Cause:
    age, body = value
    failed = _read_message(body, messages.Failed)
    (note,) = failed.failures
    return Cause(now - _age(age), failed.node, note)


def _at(nodes: list[str], places: Any) -> frozenset[str]:
    return frozenset(nodes[_untrusted.whole(place, 0)] for place in _untrusted.exactly(places, list))


def _age(value: Any) -> float:
    # A failure may be reported long after it happened, and stored even longer.
    return _untrusted.seconds(value, 0.0, 2 * _untrusted.LONGEST_TIME)


def _counts(value: Any, read: Callable[[Any], str] = _untrusted.name) -> Mapping[str, int]:
    return {read(who): _untrusted.whole(count, 0) for who, count in _members(value)}


def _members(value: Any) -> ItemsView[str, Any]:
    members: dict[str, Any] = _untrusted.exactly(value, dict)
    return members.items()


def _message(message: messages.Message | None) -> Any:
    return None if message is None else loads(messages.encode(message))


def _read_message(body: Any, kind: type[_T]) -> _T:
    message = messages.decode(dumps(body).encode("ascii"))
    if not isinstance(message, kind):
        raise ValueError(f"it contains a {type(message).__name__} where a {kind.__name__} should be")
    return message
