"""
A simulated member: what the threads of a node's rendezvous process do, as callbacks.

Rules of this file: it mirrors `rendezvous._line` and `rendezvous._member` call by call, one call at a time for
the connection that speaks and one for the connection that listens; whether there is contact is decided by the
real `rendezvous._contact`, on the node's own clock.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable

from attrs import Factory, define, field, frozen

from elasticlib.rendezvous import _contact
from elasticlib.rendezvous._contact import INTERVAL, NO_PULSE, Acknowledged, Broken, Greeted, Limits
from elasticlib.rendezvous._exchange import HELLO, PULSE, beat_key, box_key, box_name
from elasticlib.rendezvous._messages import (
    Beat,
    Bye,
    ContactLost,
    Descriptor,
    Final,
    Hello,
    Join,
    Letter,
    Notice,
    Pulse,
    Report,
    Seat,
    Terms,
    decode,
)
from elasticlib.testing._store import Connection, Link, Store
from elasticlib.testing._timeline import Process, Timeline

ATTEMPT = 5.0
SLICE = 60.0
WAKE = b""


@define(eq=False, repr=False)
class Line:
    """One attempt to connect and what becomes of it."""

    member: Member
    stale: bool = False
    ended: bool = False
    busy: bool = False
    greeted: bool = False
    awaited: str | None = None
    waits: int = 0
    beat_at: float = 0.0
    heartbeat: float = 0.0
    speak: Connection = field(init=False)
    listen: Connection | None = None

    def __attrs_post_init__(self) -> None:
        member = self.member
        self.speak = member.store().connect(member.process, member.link, self._opened, self._broke)
        member.after(ATTEMPT, self._expire)

    def abandon(self) -> None:
        """Give it up: what was asked may still be answered."""
        self.stale = True
        if not self.busy:
            self.end()

    def end(self) -> None:
        """Close both connections."""
        self.ended = True
        self.speak.close()
        if self.listen is not None:
            self.listen.close()

    def _expire(self) -> None:
        if not (self.greeted or self.busy or self.ended or self.stale):
            self.end()
            self.member.happened(self, Broken("the store did not answer: timed out"))

    def _broke(self, why: str) -> None:
        if not self.ended:
            self.end()
            self.member.happened(self, Broken(why, why == "connection refused"))

    # The connection that speaks.

    def _opened(self, connection: Connection) -> None:
        self.busy = True
        connection.call("wait", HELLO, then=lambda _: connection.call("read", [HELLO], then=self._greet))

    def _greet(self, found: list[Hello]) -> None:
        self.busy = False
        member, hello = self.member, found[0]
        if self.stale or member.closed:
            self.end()
            return
        if member.nonce and hello.nonce != member.nonce:
            self.end()
            member.fail(self, "the job has begun anew: our part of it is over")
            return
        member.nonce, self.heartbeat, self.greeted = hello.nonce, hello.heartbeat, True
        member.happened(self, Greeted(hello.heartbeat))
        if not self.ended:
            self.listen = member.store().connect(member.process, member.link, lambda _: self.go_on(), self._broke)
            self.say()

    def say(self) -> None:
        """Do the next thing, if there is one: wake the listener, send a letter, beat."""
        member = self.member
        if self.busy or self.ended or not self.greeted:
            return
        if self.stale:
            self.end()
        elif self.awaited is not None and (member.closed or self.awaited != member.next_key()):
            key, self.awaited = self.awaited, None
            self._call("write", {key: WAKE}, then=lambda _: None)
        elif member.letters:
            letter, sent = member.letters[0], member.clock()
            self._call("post", letter.make(), then=lambda _: self._said(letter.seq, sent))
        elif member.closed:
            self.end()
        elif self._beats() and member.clock() >= self.beat_at:
            self._beat()
        elif self._beats():
            member.at(self.beat_at, self.say)

    def _call(self, kind: str, argument: object, then: Callable[[object], None]) -> None:
        self.busy = True

        def done(result: object) -> None:
            self.busy = False
            then(result)
            self.say()

        self.speak.call(kind, argument, then=done)

    def _said(self, seq: int, sent: float) -> None:
        member = self.member
        if member.letters and member.letters[0].seq == seq:
            member.letters.popleft()
            member.said = seq
        if seq == member.joined:
            self.beat_at = sent
            member.happened(self, Acknowledged(sent))

    def _beats(self) -> bool:
        member = self.member
        if not (self.heartbeat and member.box) or member.held or member.closed:
            return False
        return member.said >= member.joined

    def _beat(self) -> None:
        member, sent = self.member, self.member.clock()
        self.beat_at = sent + INTERVAL * self.heartbeat
        member.beats += 1
        self.busy = True
        beat = Beat(member.beats, member.read, member.said)

        def read(_: object) -> None:
            self.speak.call("read", [PULSE], then=acknowledge)

        def acknowledge(found: list[Pulse | None]) -> None:
            self.busy = False
            pulse = found[0]
            member.happened(self, Acknowledged(sent, pulse.count if pulse else NO_PULSE))
            self.say()

        self.speak.call("write", {beat_key(member.box): beat}, then=read)

    # The connection that listens.

    def go_on(self) -> None:
        """Wait for the next notice."""
        key = self.member.next_key()
        if self.stale or self.ended or self.listen is None or self.awaited is not None or key is None:
            return
        self.awaited = key
        self._wait(key)

    def _wait(self, key: str) -> None:
        self.waits += 1
        number = self.waits

        def again() -> None:
            if self.waits == number and not self.ended and not self.stale:
                self._wait(key)

        assert self.listen is not None
        self.listen.call("wait", key, then=lambda _: self._read(key, number))
        self.member.after(SLICE, again)

    def _read(self, key: str, number: int) -> None:
        if self.listen is not None and number == self.waits:
            self.waits += 1
            self.listen.call("read", [key], then=lambda found: self._heard(key, found[0]))

    def _heard(self, key: str, data: bytes | None) -> None:
        if self.stale or self.ended or self.listen is None:
            return
        self.awaited = None
        notice = decode(data) if data else None
        self.listen.call("delete", [key], then=lambda _: None)
        if notice is not None and key == self.member.next_key():
            self.member.read += 1
            self.member.hear(notice)  # type: ignore[arg-type]
        self.go_on()


@frozen
class Written:
    """A letter on the desk: its report is made when it is first sent."""

    seq: int
    report: Callable[[], Report]

    def make(self) -> Letter:
        """The letter, the same one each time."""
        return Letter(self.seq, self.report())


@define(eq=False, repr=False)
class Member:
    """A node's membership. *tell* gets what its agent must know; *over* the error that ended its part."""

    name: str
    process: Process
    link: Link
    timeline: Timeline
    store: Callable[[], Store]
    limits: Limits
    terms: Terms
    describe: Callable[[], Descriptor]
    tell: Callable[[Notice | ContactLost], None]
    over: Callable[[str], None]
    letters: deque[Written] = Factory(deque)
    seq: int = 0
    said: int = 0
    box: str = ""
    joined: int = 0
    read: int = 0
    beats: int = 0
    held: bool = False
    wants: bool = False
    """Will ask for a seat as soon as there is contact."""
    closed: bool = False
    nonce: str = ""
    final: bool = False
    failed_with: str | None = None
    line: Line | None = None
    contact: _contact.Contact = field(init=False)
    _wakes_at: float | None = None

    def start(self) -> None:
        """Begin to seek the job."""
        self.contact, actions = _contact.begin(self.limits, self.clock())
        self._perform(actions)
        self._set_alarm()

    def clock(self) -> float:
        """Seconds, as this machine counts them."""
        return self.process.clock(self.timeline.now)

    def at(self, shown: float, do: Callable[[], None]) -> None:
        """Do it when this machine's clock shows that."""
        self.timeline.at(self.process.moment(shown), self.process, do)

    def after(self, delay: float, do: Callable[[], None]) -> None:
        """Do it after so many seconds of this machine."""
        self.at(self.clock() + delay, do)

    # Reports.

    def join(self) -> None:
        """Ask for a seat: once there is contact, for a seat without contact is no seat."""
        if self.contact.fenced:
            self.wants = True
            return
        self.wants = False
        self.joined = self._post(lambda: Join(self.name, self.describe(), self.terms))
        self.box, self.read = box_name(self.name, self.joined), 0
        self._turn()

    def report(self, report: Report) -> None:
        """Tell the coordinator."""
        self._post(lambda: report)
        self._turn()

    def hold(self, held: bool) -> None:
        """Let the beats rest, or go on."""
        self.held = held
        self._turn()

    def close(self) -> None:
        """Send what waits, then end."""
        self.closed = True
        self._turn()

    def _post(self, report: Callable[[], Report]) -> int:
        self.seq += 1
        self.letters.append(Written(self.seq, functools.cache(report)))
        return self.seq

    def _turn(self) -> None:
        if self.line is not None:
            self.line.say()
            if self.line.greeted and self.line.listen is not None:
                self.line.go_on()

    def next_key(self) -> str | None:
        """Where the next notice will lie."""
        return box_key(self.box, self.read) if self.box and not self.closed else None

    # What comes.

    def hear(self, notice: Notice) -> None:
        """A notice was read."""
        if isinstance(notice, Seat) and self.contact.fenced:
            return  # the agent knows, and asks anew
        if isinstance(notice, Final):
            self.final = True
            self.report(Bye(self.name))
        self.tell(notice)

    def fail(self, line: Line, why: str) -> None:
        """An error that no further attempt can mend."""
        if line is self.line and not self.final and self.failed_with is None:
            self.failed_with = why
            self.over(why)

    def happened(self, line: Line, event: _contact.Event) -> None:
        """A line tells of its contact."""
        if isinstance(event, Acknowledged) or line is self.line:
            self._step(event)

    def kill_at(self) -> float | None:
        """When this machine's clock shows that, workers that still run here must be killed."""
        return None if self.final else _contact.kill_at(self.contact)

    def _step(self, event: _contact.Event) -> None:
        if self.final or self.closed or self.failed_with is not None:
            return
        self.contact, actions = _contact.step(self.contact, event, self.clock())
        self._perform(actions)
        self._set_alarm()
        if self.wants and not self.contact.fenced:
            self.join()

    def _set_alarm(self) -> None:
        when = _contact.wake_at(self.contact)
        if when is not None and (self._wakes_at is None or when < self._wakes_at):
            self._wakes_at = when
            self.at(when, lambda: self._alarm(when))

    def _alarm(self, shown: float) -> None:
        if self._wakes_at == shown:
            self._wakes_at = None
        when = _contact.wake_at(self.contact)
        if when is not None and self.clock() >= when:
            self._step(_contact.Tick())
        elif not (self.closed or self.final):
            self._set_alarm()

    def _perform(self, actions: tuple[_contact.Action, ...]) -> None:
        for action in actions:
            match action:
                case _contact.Connect():
                    if self.line is not None:
                        self.line.abandon()
                    self.line = Line(self)
                case _contact.Fence(why, grace):
                    self.tell(ContactLost(why, grace))
                case _contact.GiveUp(why, _):
                    self.failed_with = why
                    self.over(why)
