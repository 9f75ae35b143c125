"""
Who is in a round, when it starts and ends and why, and how the job ends. Pure.

    gathering --seal--> running --failure within budget, arrival, leave--> gathering
                           |----all succeeded--------------------------> over
                           '----failure, no budget--> closing --all stopped--> over

Rules of this file: `step` is a function of state, event and time; time is the coordinator's monotonic
seconds. A sealed round's seats never change. Nobody is seated while a worker of an earlier round may
run. Failures spend the job's restarts, arrivals and leaves do not. Each decision says why. Events that
repeat, or that speak of an older round, change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from attrs import Factory, evolve, field, frozen
from attrs.validators import ge, gt
from typing_extensions import assert_never

from elasticlib.errors import ConfigError
from elasticlib.rendezvous._messages import (
    Descriptor,
    Failed,
    FailureNote,
    Final,
    Join,
    Leave,
    Notice,
    Report,
    RoundEnd,
    Seat,
    Stopped,
    Succeeded,
)
from elasticlib.rendezvous._seats import assign, order


@frozen
class Rules:
    """What the job asked for; raises a ``ValueError`` for a number that breaks its rule."""

    min_nodes: int = field(default=1, validator=ge(1))
    max_nodes: int = field(default=1)
    max_restarts: int = field(default=3, validator=ge(0))
    """Restarts after worker failures, counted over the whole job and all its nodes."""
    last_call: float = field(default=30.0, validator=ge(0))
    """Seconds without a new join after which a round below `max_nodes` starts."""
    join_timeout: float = field(default=600.0, validator=gt(0))
    """Seconds that too few nodes wait for others, from when nothing of the last round runs any more."""

    @max_nodes.validator
    def _not_below_min(self, _: object, value: int) -> None:
        if value < self.min_nodes:
            raise ConfigError(f"max_nodes={value} is below min_nodes={self.min_nodes}: raise max_nodes")


@frozen
class Received:
    """Entry *number* of the inbox; numbers start at 1 and each stands for one report for ever."""

    number: int
    report: Report


@frozen
class Tick:
    """Time has passed."""


@frozen
class Send:
    """Tell a node: its notices go to the box with the number of its latest `Join`."""

    box: int
    node: str
    notice: Notice


@frozen
class WakeAt:
    """Step again at *when* if nothing comes before; a step without one waits for the next report."""

    when: float


Event: TypeAlias = Received | Tick
Action: TypeAlias = Send | WakeAt


@frozen
class Entry:
    """A node that asked for a seat; *number* is that of its `Join` in the inbox."""

    node: str
    number: int
    descriptor: Descriptor


@frozen
class Cause:
    """A failure and when it happened, in the coordinator's seconds."""

    at: float
    node: str
    note: FailureNote


@frozen
class Round:
    """A sealed round: `entries` and `seats` stay as they are; the rest tells how far it came."""

    number: int
    entries: Mapping[str, Entry]
    """By node, in the order of group ranks."""
    seats: tuple[Seat, ...]
    succeeded: frozenset[str] = frozenset()
    stopped: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    causes: tuple[Cause, ...] = ()
    end: RoundEnd | None = None


@frozen
class State:
    """All that the coordinator knows. Its mappings are never changed in place."""

    rules: Rules
    heard: int = 0
    """Number of the last inbox entry that was handled."""
    waiting: Mapping[str, Entry] = Factory(dict)
    """Nodes without a seat, in the order in which they came."""
    round: Round | None = None
    """The round that runs, or the last one that did."""
    restarts: int = 0
    gathering_since: float | None = None
    last_join: float = 0.0
    final: Final | None = None


Outcome: TypeAlias = tuple[State, tuple[Action, ...]]


def step(state: State, event: Event, now: float) -> Outcome:
    """What *event* changes, and what to do about it; *now* never goes back."""
    actions: tuple[Action, ...] = ()
    if isinstance(event, Received) and event.number > state.heard:
        state, actions = _hear(evolve(state, heard=event.number), event, now)
    state, more = _settle(state, now)
    return state, actions + more


def abandon(state: State, why: str) -> Outcome:
    """End the job for everybody at once, without a failed worker as its cause."""
    return _finish(state, Final(False, why)) if state.final is None else (state, ())


def _hear(state: State, event: Received, now: float) -> Outcome:
    report = event.report
    if isinstance(report, Join):
        return _join(state, Entry(report.node, event.number, report.descriptor), now)
    if state.final is not None:
        return state, ()
    if isinstance(report, Leave):
        return _leave(state, report)
    current = state.round
    if current is None or report.round != current.number or report.node not in current.entries:
        return state, ()
    if report.node in current.succeeded:
        return state, ()
    match report:
        case Succeeded():
            return evolve(state, round=evolve(current, succeeded=current.succeeded | {report.node})), ()
        case Failed() | Stopped():
            return _lose_workers(state, current, report, now)
    assert_never(report)


def _join(state: State, entry: Entry, now: float) -> Outcome:
    if state.final is not None:
        return state, (Send(entry.number, entry.node, state.final),)
    waiting = {node: other for node, other in state.waiting.items() if node != entry.node}
    state = evolve(state, waiting={**waiting, entry.node: entry}, last_join=now)
    current = state.round
    if current is None:
        return state, ()
    if entry.node in current.entries:
        # A node that asks for a seat has no worker left, whatever it said before.
        current = evolve(current, stopped=current.stopped | {entry.node})
        state = evolve(state, round=current)
    if current.end is not None or entry.node in current.succeeded:
        return state, ()
    if entry.node in current.entries:
        return _end(state, current, f"node {entry.node} came anew", restart=True)
    # Work that a node has finished is not thrown away for an arrival: who comes then waits for the end.
    if len(current.entries) < state.rules.max_nodes and not current.succeeded:
        return _end(state, current, f"node {entry.node} joins", restart=True)
    return state, ()


def _leave(state: State, report: Leave) -> Outcome:
    node, current = report.node, state.round
    entry = state.waiting.get(node)
    if current is not None and node in current.entries and node not in current.left:
        entry = entry or current.entries[node]
        gone = frozenset() if report.round == current.number else frozenset({node})
        current = evolve(current, left=current.left | {node}, stopped=current.stopped | gone)
    if entry is None:
        return state, ()
    final = Final(False, f"node {node} left: {report.why}")
    goodbye = Send(entry.number, node, final)
    waiting = {other: its for other, its in state.waiting.items() if other != node}
    state = evolve(state, waiting=waiting, round=current)
    if current is not None and current.end is None and (node not in current.entries or node in current.succeeded):
        return state, (goodbye,)
    if current is not None and current.end is not None and not current.end.restart:
        return state, (goodbye,)
    if not waiting and not _alive(current):
        state, actions = _finish(state, final)
    elif current is not None and current.end is None:
        state, actions = _end(state, current, final.why, restart=True)
    else:
        actions = ()
    return state, (goodbye, *actions)


def _lose_workers(state: State, current: Round, report: Failed | Stopped, now: float) -> Outcome:
    causes = {(cause.node, cause.note.rank): cause for cause in current.causes}
    for note in report.failures:
        known = causes.get((report.node, note.rank))
        # The later note is the more complete one; the time of a failure is that of its first note.
        at = now - note.age if known is None else min(known.at, now - note.age)
        causes[report.node, note.rank] = Cause(at, report.node, note)
    current = evolve(current, causes=tuple(causes.values()))
    if isinstance(report, Stopped):
        current = evolve(current, stopped=current.stopped | {report.node})
    state = evolve(state, round=current)
    if current.end is not None:
        return state, ()
    if isinstance(report, Stopped) and not report.failures:
        return _end(state, current, f"node {report.node} stopped its workers", restart=True)
    return _spend(state, current, _describe(report.node, _root(current.causes)))


def _spend(state: State, current: Round, why: str) -> Outcome:
    allowed = state.rules.max_restarts
    if state.restarts < allowed:
        state = evolve(state, restarts=state.restarts + 1)
        return _end(state, current, f"{why}; restart {state.restarts} of {allowed}", restart=True)
    spent = f"all {allowed} restarts are used" if allowed else "no restarts are allowed"
    return _end(state, current, f"{why}; {spent}", restart=False)


def _end(state: State, current: Round, why: str, *, restart: bool) -> Outcome:
    end = RoundEnd(current.number, why, restart)
    present = (entry for entry in current.entries.values() if entry.node not in current.left)
    told = (entry for entry in present if entry.node not in state.waiting)
    actions = tuple(Send(entry.number, entry.node, end) for entry in told)
    return evolve(state, round=evolve(current, end=end)), actions


def _settle(state: State, now: float) -> Outcome:
    """What the state itself calls for, whichever event led to it."""
    current = state.round
    if state.final is not None:
        return state, ()
    if current is None:
        return _gather(state, now)
    if current.entries.keys() <= current.succeeded:
        why = f"all {len(current.entries)} nodes succeeded in round {current.number}"
        return _finish(state, Final(True, why))
    if current.end is None:
        return state, ()
    if current.end.restart:
        return _gather(state, now)
    if current.entries.keys() <= current.stopped | current.succeeded | current.left:
        root = _root(current.causes)
        node, note = (root.node, root.note) if root else (None, None)
        return _finish(state, Final(False, current.end.why, node, note))
    return state, ()


def _gather(state: State, now: float) -> Outcome:
    rules, current, present = state.rules, state.round, len(state.waiting)
    if current is not None and not current.entries.keys() <= current.stopped | current.succeeded:
        return evolve(state, gathering_since=None), ()
    since = now if state.gathering_since is None else state.gathering_since
    state = evolve(state, gathering_since=since)
    deadline = since + rules.join_timeout
    alive = _alive(current)
    coming = sorted(alive - state.waiting.keys())
    if present < rules.min_nodes:
        if now < deadline:
            return state, (WakeAt(deadline),)
        missing = f"; missing of round {current.number}: {', '.join(coming)}" if current and coming else ""
        here = ", ".join(sorted(state.waiting)) or "none"
        why = f"{present} of at least {rules.min_nodes} nodes came in {rules.join_timeout:g} s ({here}){missing}"
        return _finish(state, Final(False, why))
    if coming:
        # Seated without them, they would end the round as soon as they come: for ever, with a short quiet period.
        if now < deadline:
            return state, (WakeAt(deadline),)
        return _seal(
            state, f"{present} nodes are there; {', '.join(coming)} did not return in {rules.join_timeout:g} s"
        )
    if present >= rules.max_nodes:
        return _seal(state, f"all {rules.max_nodes} nodes are there")
    if current is not None and alive:
        return _seal(state, f"all nodes that stayed after round {current.number} are back, {present} are there")
    quiet = min(state.last_join + rules.last_call, deadline)
    if now < quiet:
        return state, (WakeAt(quiet),)
    return _seal(state, f"{present} nodes are there and no other came for {now - state.last_join:.3g} s")


def _seal(state: State, why: str) -> Outcome:
    last = tuple(state.round.entries) if state.round is not None else ()
    number = state.round.number + 1 if state.round is not None else 0
    by_claim = sorted(state.waiting, key=lambda node: node not in last)  # stable: then in order of arrival
    chosen = {node: state.waiting[node].descriptor for node in by_claim[: state.rules.max_nodes]}
    nodes = order(chosen, last)
    seats = assign([chosen[node] for node in nodes], number, state.restarts, state.rules.max_restarts, why)
    entries = {node: state.waiting[node] for node in nodes}
    rest = {node: entry for node, entry in state.waiting.items() if node not in entries}
    state = evolve(state, waiting=rest, round=Round(number, entries, seats), gathering_since=None)
    sends = zip(entries.values(), seats, strict=True)
    return state, tuple(Send(entry.number, entry.node, seat) for entry, seat in sends)


def _finish(state: State, final: Final) -> Outcome:
    audience = dict(state.waiting)
    if state.round is not None:
        present = (entry for entry in state.round.entries.values() if entry.node not in state.round.left)
        for entry in present:
            audience.setdefault(entry.node, entry)
    actions = tuple(Send(entry.number, entry.node, final) for entry in audience.values())
    return evolve(state, final=final), actions


def _alive(current: Round | None) -> frozenset[str]:
    return frozenset() if current is None else frozenset(current.entries.keys() - current.left)


def _root(causes: Iterable[Cause]) -> Cause | None:
    """The failure that came first; a lost connection never beats another kind of failure."""

    def place(cause: Cause) -> tuple[bool, float, str, int]:
        return (cause.note.secondary, cause.at, cause.node, cause.note.rank)

    return min(causes, key=place, default=None)


def _describe(node: str, root: Cause | None) -> str:
    if root is None:
        return f"workers of node {node} failed"
    note = root.note
    how = f"was ended by signal {-note.exitcode}" if note.exitcode < 0 else f"ended with exit status {note.exitcode}"
    # Without an exception the message of a signal only says so again.
    said = note.message.strip().splitlines() if note.exception_type or note.exitcode >= 0 else []
    return f"rank {note.rank} on node {root.node} {how}" + (f" ({said[0]})" if said else "")
