"""
A simulated coordinator's host: what its thread does, as callbacks, around the real pure coordinator.

Rules of this file: it mirrors `rendezvous._host` call by call; each call takes its time, so the process can die or
be frozen between any two. With an election, what was decided is saved before anybody is told, and only by the
holder of the lease.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from attrs import Factory, define, field, frozen
from typing_extensions import assert_never

from elasticlib.rendezvous import _coordinator
from elasticlib.rendezvous._contact import INTERVAL
from elasticlib.rendezvous._coordinator import ClearStore, Received, Rules, Send, State, Tick, WakeAt
from elasticlib.rendezvous._document import decode_state, encode_state
from elasticlib.rendezvous._exchange import HELLO, PULSE, Posted, beat_key
from elasticlib.rendezvous._mail import Mail
from elasticlib.rendezvous._messages import Beat, Bye, Hello, Leave, Pulse, Terms, encode
from elasticlib.testing._store import LOST, Connection, Link, Store
from elasticlib.testing._timeline import Process, Timeline

LOOK = 0.1
SHORTEST_LOOK = 0.01


@frozen
class Journal:
    """What a coordinator leaves to the next one; its text is made when it is needed."""

    nonce: str
    epoch: int
    state: State
    at: float
    mail: Mapping[str, Any]
    way: tuple[State, ...] = ()
    """All states since the last saving: what was decided in them is told, too."""

    def read(self, now: float) -> State:
        """The state, as another machine reads it."""
        return decode_state(encode_state(self.state, self.at), now)


@define(eq=False, repr=False)
class Host:
    """One node's turn as the coordinator, from its start until `stop` or until it may not go on."""

    name: str
    process: Process
    link: Link
    timeline: Timeline
    store: Store
    rules: Rules
    nonce: str
    decided: Callable[[State], None]
    """Gets each state, where nothing needs to be saved before it counts."""
    ended: Callable[[str], None]
    """Called once, when this turn is over, with the reason."""
    term: int | None = None
    """Number of the lease; None: nobody else can coordinate."""
    logic: ModuleType | Any = _coordinator
    state: State = field(init=False)
    mail: Mail = Factory(Mail)
    pulses: int = 0
    epoch: int = 0
    over: bool = False
    leave_by: float | None = None
    _connection: Connection = field(init=False)
    _arrived: list[Posted] = Factory(list)
    _receiving: bool = False
    _resting: bool = False
    _abandon: tuple[str, str | None] | None = None
    _greet_at: float = 0.0
    _look_at: float = 0.0
    _looked: float = 0.0
    _dirty: bool = False
    _way: list[State] = Factory(list)
    _missing: dict[str, tuple[int, float]] = Factory(dict)
    _wake_at: float | None = None
    _alarm: int = 0

    def start(self) -> None:
        """Begin to answer."""
        self.state = State(self.rules)
        self._connection = self.store.connect(self.process, self.link, lambda _: self._begin(), self.stop)
        self._connection.term = self.term

    def stop(self, why: str) -> None:
        """Answer no more."""
        if not self.over:
            self.over = True
            self._connection.close()
            self.ended(why)

    def abandon(self, why: str, by: str | None = None) -> None:
        """End the job for all."""
        self._abandon = (why, by)
        self._disturb()

    def close(self, linger: float) -> None:
        """Stop, once all have read how the job ended, or after so many seconds."""
        if self.leave_by is None:
            self.leave_by = self._clock() + linger
            self._disturb()

    def _clock(self) -> float:
        return self.process.clock(self.timeline.now)

    @property
    def _interval(self) -> float:
        return self.rules.heartbeat * INTERVAL

    def _call(self, kind: str, *arguments: Any, then: Callable[[Any], None]) -> None:
        def done(result: Any) -> None:
            if result is LOST:
                self.stop("another node coordinates now")
            elif not self.over:
                then(result)

        if not self.over:
            self._connection.call(kind, *arguments, then=done)

    # Its life: one turn after the other.

    def _begin(self) -> None:
        self._greet_at = self._look_at = self._looked = self._clock()
        if self.term is None:
            self._first()
        else:
            self._call("load", then=self._take_over)

    def _take_over(self, journal: Journal | None) -> None:
        if journal is not None:
            now = self._clock()
            self.nonce, self.epoch = journal.nonce, journal.epoch + 1
            self.state = journal.read(now)
            self.mail = Mail.from_plain(journal.mail, now)
        self._save(self._first)

    def _first(self) -> None:
        self._step(Tick())
        self._commit(lambda: self._greet(self._turn))

    def _turn(self) -> None:
        if self.leave_by is not None and (not self.mail.unparted or self._clock() >= self.leave_by):
            self.stop("closed")
        elif self._arrived or self._abandon is not None or self._due():
            posted, self._arrived = self._arrived, []
            self._handle(posted)
        else:
            self._rest()

    def _due(self) -> bool:
        return any(self._clock() >= time for time in self._times())

    def _times(self) -> list[float]:
        times = [self._wake_at] if self._wake_at is not None else []
        return [*times, self._look(), self._greet_at] if self._interval else times

    def _look(self) -> float:
        loss = self.logic.next_loss(self.state)
        return self._look_at if loss is None else min(self._look_at, max(loss, self._looked + SHORTEST_LOOK))

    def _rest(self) -> None:
        self._resting = True
        if not self._receiving:
            self._receiving = True
            self._call("receive", then=self._received)
        times = self._times() + ([self.leave_by] if self.leave_by is not None else [])
        soonest = min(times, default=None)
        self._alarm += 1
        number = self._alarm
        if soonest is not None:
            alarm = self.process.moment(soonest)
            self.timeline.at(alarm, self.process, lambda: self._disturb() if self._alarm == number else None)

    def _received(self, entries: list[Posted]) -> None:
        self._receiving = False
        self._arrived += entries
        self._disturb()

    def _disturb(self) -> None:
        if self._resting and not self.over:
            self._resting = False
            self._alarm += 1
            self._turn()

    def _handle(self, posted: Sequence[Posted]) -> None:
        for entry in posted:
            letter: Any = entry.data
            self._step(Received(letter.seq, letter.report))
            if isinstance(letter.report, (Bye, Leave)):
                self.mail.part(letter.report.node)
        if self._abandon is not None:
            (why, leaver), self._abandon = self._abandon, None
            self._follow(self.logic.abandon(self.state, why))
            if leaver is not None:
                self.mail.part(leaver)
        now = self._clock()
        if self._wake_at is not None and now >= self._wake_at:
            self._step(Tick())

        def greet() -> None:
            if self._interval and now >= self._greet_at:
                self._greet(lambda: self._discard(posted))
            else:
                self._discard(posted)

        if self._interval and now >= self._look():
            self._listen_to_beats(lambda: self._commit(greet))
        else:
            self._commit(greet)

    def _discard(self, posted: Sequence[Posted]) -> None:
        if posted:
            self._call("discard", [entry.number for entry in posted], then=lambda _: self._turn())
        else:
            self._turn()

    def _listen_to_beats(self, then: Callable[[], None]) -> None:
        boxes = dict(self.logic.boxes(self.state))

        def found(beats: list[Beat | None]) -> None:
            counts = {}
            for (node, box), beat in zip(boxes.items(), beats, strict=True):
                if beat is not None:
                    counts[box] = beat.count
                    self.mail.note(box, beat.read)
                    self._look_for_letters(node, beat.said)
            self._step(_coordinator.Beats(counts))
            self.mail.remind(self._clock(), 2 * self._interval)
            self._looked = self._clock()
            self._look_at = self._looked + self.rules.heartbeat * LOOK
            then()

        self._call("read", [beat_key(box) for box in boxes.values()], then=found)

    def _look_for_letters(self, node: str, said: int) -> None:
        heard = self.state.heard.get(node, 0)
        if said <= heard:
            self._missing.pop(node, None)
            return
        number, since = self._missing.setdefault(node, (said, self._clock()))
        if number <= heard:
            del self._missing[node]
        elif self._clock() > since + self.rules.heartbeat:
            self._abandon = (f"letter {number} of node {node} was removed from the store before it was read", None)

    def _greet(self, then: Callable[[], None]) -> None:
        rules = self.rules
        terms = Terms(rules.min_nodes, rules.max_nodes, rules.max_restarts)
        self.pulses += 1
        self._greet_at = self._clock() + self._interval
        status = self.logic.status(self.state, self._clock())
        pulse = Pulse((self.epoch << 32) + self.pulses, status, len(self.state.waiting))
        hello = Hello("job", self.nonce, self.name, terms, rules.heartbeat)
        self._call("write", {HELLO: hello, PULSE: pulse}, then=lambda _: then())

    # What is decided.

    def _step(self, event: Any) -> None:
        self._wake_at = None
        self._follow(self.logic.step(self.state, event, self._clock()))

    def _follow(self, outcome: tuple[State, Sequence[Any]]) -> None:
        state, actions = outcome
        self._dirty = self._dirty or state != self.state
        self.state = state
        if self.term is None:
            self.decided(self.state)
        else:
            self._way.append(self.state)
        for action in actions:
            match action:
                case Send(box=box, node=node, notice=notice):
                    self.mail.add(box, node, self.mail.next_index(box), encode(notice), notice, self._clock())
                case WakeAt(when=when):
                    self._wake_at = when
                case ClearStore():
                    pass
                case _:
                    assert_never(action)

    def _commit(self, then: Callable[[], None]) -> None:
        due, dirty, self._dirty = self.mail.due(), self._dirty, False
        if self.term is not None and (due or dirty):
            self._save(lambda: self._write(due, then))
        else:
            self._write(due, then)

    def _write(self, due: Mapping[str, bytes], then: Callable[[], None]) -> None:
        if not due:
            then()
            return
        self.mail.written(keep=bool(self._interval))
        self._call("write", dict(due), then=lambda _: then())

    def _save(self, then: Callable[[], None]) -> None:
        state = self.state
        journal = Journal(self.nonce, self.epoch, state, self._clock(), _copy(self.mail.plain()), tuple(self._way))
        self._way = []

        def saved(held: bool) -> None:
            if held:
                then()
            else:
                self.stop("another node coordinates now")

        self._call("save", self.term, journal, then=saved)


def _copy(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, Mapping) else list(value) for name, value in plain.items()}


__all__ = ["Host", "Journal"]
