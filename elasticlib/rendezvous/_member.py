"""
One node's side of the rendezvous.

Rules of this file: the owner's calls only enqueue, so that no silent store can hold the owner up. Each
connection is a `Line`, whose threads enqueue what happened; what it means is decided by `_contact` when the
owner calls `take`. A line that is given up is abandoned with its threads: a call into a frozen store may not
return for minutes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Protocol

from typing_extensions import Self

from elasticlib._clock import Clock, monotonic
from elasticlib._wire import soonest
from elasticlib.errors import (
    ConfigError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousNotFoundError,
    StartError,
)
from elasticlib.rendezvous import _contact
from elasticlib.rendezvous._contact import Acknowledged, Broken, Connect, Fence, GiveUp, Greeted, Limits
from elasticlib.rendezvous._exchange import box_name
from elasticlib.rendezvous._line import ATTEMPT, Desk, Dial, Happening, Line
from elasticlib.rendezvous._membership import Word
from elasticlib.rendezvous._messages import (
    Bye,
    Close,
    ContactLost,
    Descriptor,
    Final,
    Join,
    Leave,
    Report,
    RoundEnd,
    Seat,
    Terms,
    decode,
    encode,
)
from elasticlib.rendezvous._reports import Reporter

_log = logging.getLogger("elasticlib")

_TELL_AFTER = (5.0, 15.0, 30.0)
_TELL_EVERY = 60.0
_PARTING = 1.0
"""Seconds that `close` waits for a store which does not answer."""


class Offer(Protocol):
    """What this node brings to a round."""

    def describe(self, slots: int, role: str) -> Descriptor:
        """Bind what a round needs; called in a thread of its own, once contact is there."""

    def listener(self) -> socket.socket | None:
        """What was bound for the last descriptor, now the caller's own; None when there is nothing."""


class Member(Reporter):
    """
    The node called *node*, as it speaks with the coordinator of job *run_id*; fulfils `Membership`.

    Nothing is contacted before `start`: *dial* is called in a thread, and may use whoever made the member.
    Each report raises `RendezvousClosedError` after `close`.
    """

    def __init__(
        self,
        dial: Dial,
        node: str,
        offer: Offer,
        *,
        run_id: str = "",
        terms: Terms | None = None,
        key: bytes | None = None,
        limits: Limits | None = None,
        clock: Clock = monotonic,
        on_leave: Callable[[str], bool] = lambda why: False,
        where: str = "",
    ) -> None:
        self.node = node
        self.round: int | None = None
        """The round of the last seat."""
        self.final: Final | None = None
        """How this node's part in the job ended, once `take` has told it."""
        self._dial = dial
        self._offer = offer
        self._terms = terms
        self._clock = clock
        self._on_leave = on_leave
        self._where = where
        self._desk = Desk(run_id, node, key)
        self._happenings: deque[tuple[Line | None, Happening]] = deque()
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._line: Line | None = None
        self._error: RendezvousError | ConfigError | StartError | None = None
        self._waits_since: float | None = None
        self._told = 0
        self._contact, self._first = _contact.begin(limits or Limits(), clock())

    def start(self) -> Self:
        """Begin to seek the job; once. Returns the member itself."""
        self._perform(self._first)
        return self

    # Reports.

    def join(self, slots: int, role: str) -> None:
        """Ask for a seat in the next round. No worker of this node may run any more."""

        @functools.cache  # sent again, it is the same letter
        def report() -> Report:
            return _checked(Join(self.node, self._offer.describe(slots, role), self._terms))

        desk = self._desk
        with desk.turned:
            self._open("a Join")
            desk.joined, desk.joined_sent = desk.post(report), None
            desk.box, desk.read = box_name(self.node, desk.joined), 0
            # What came before and was not taken speaks of a seat that this node does not want any more.
            stale = [each for each in self._happenings if isinstance(each[1], (Seat, RoundEnd))]
            for each in stale:
                self._happenings.remove(each)
        self._waits_since, self._told = self._clock(), 0

    def leave(self, why: str, round: int | None = None) -> None:
        """
        Say as soon as it is known that this node goes and starts no worker any more; `Final` answers.

        Give the *round* if workers of it still run, and say `stopped` when they are gone: until then
        nobody takes their place. A node that never joined is unknown and gets no answer.
        """
        if not self._on_leave(why):
            self._report(Leave(self.node, why, round))

    def end_job(self, why: str) -> None:
        """End the job for everybody; `Final` answers."""
        self._report(Close(self.node, why))

    def hold(self, held: bool) -> None:
        """Let this node's beats rest, so that the others think it lost, or take them up again."""
        with self._desk.turned:
            self._desk.held = held
            self._desk.turned.notify_all()

    def fail(self, error: RendezvousError) -> None:
        """Let `take` raise *error*: this node's part is over. From any thread."""
        self._happened(None, error)

    def guard(self, handle: int) -> None:
        """Nothing: in the agent's own process, nobody else could act when the agent cannot."""

    # What comes.

    def listener(self) -> socket.socket | None:
        """The bound socket for the worker store of a round in which this node has group rank 0."""
        return self._offer.listener()

    def waiting(self) -> int:
        """How many nodes wait for a seat while a round runs, as of the last beat."""
        return self._desk.waiting

    def is_over(self) -> bool:
        """Whether `Final` came."""
        return self.final is not None

    def fileno(self) -> int:
        """A descriptor that is readable when `take` has something; it is closed by `close`."""
        return self._ready

    def patience(self) -> float | None:
        """Seconds until `take` wants to be called though nothing is readable."""
        times = [_contact.wake_at(self._contact)] if self.final is None else []
        if self._waits_since is not None:
            times.append(self._waits_since + self._next_telling())
        due = soonest(*times)
        return None if due is None else max(0.0, due - self._clock())

    def kill_in(self) -> float | None:
        """Seconds until workers that still run here must be killed; None: no need that can be foreseen."""
        time = None if self.final is not None else _contact.kill_at(self._contact)
        return None if time is None else time - self._clock()

    def take(self) -> list[Word]:
        """
        What came, oldest first; never blocks.

        Raises `RendezvousNotFoundError` when the job was not found in time, `RendezvousConnectionError` when
        contact was lost for good, and `RendezvousStateError` or `RendezvousClosedError` when the job is not
        this node's, `ConfigError` when the store cannot be used in the way that was asked for.
        """
        if self._desk.closed:
            return []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._ready)
        words: list[Word] = []
        while self._happenings:
            words += self._hear(*self._happenings.popleft())
        words += self._step(_contact.Tick())
        if self._contact.fenced and self.final is None:
            # Its beats were not acknowledged for too long: others may have this seat by now.
            words = [self._too_late(word) if isinstance(word, Seat) else word for word in words]
        self._tell_of_waiting()
        if self._error is not None and self.final is None:
            if not words:
                raise self._error
            os.eventfd_write(self._ready, 1)
        return words

    def close(self) -> None:
        """Send what waits to be sent, end the watch, close `fileno`. Says nothing more to the others."""
        desk = self._desk
        with desk.turned:
            if desk.closed:
                return
            desk.closed = True
            desk.turned.notify_all()
        if self._line is not None:
            self._line.end(_PARTING)
        if (listener := self._offer.listener()) is not None:
            listener.close()
        with desk.turned:
            os.close(self._ready)
            self._ready = -1

    def _report(self, report: Report) -> None:
        _checked(report)
        with self._desk.turned:
            self._open(repr(report))
            self._desk.post(lambda: report)

    def _open(self, what: str) -> None:
        if self._desk.closed:
            raise RendezvousClosedError(f"node {self.node} has closed its rendezvous: {what:.60} comes too late")

    def _happened(self, line: Line | None, what: Happening) -> None:
        with self._desk.turned:
            self._happenings.append((line, what))
            if self._ready >= 0:
                os.eventfd_write(self._ready, 1)

    def _hear(self, line: Line | None, what: Happening) -> list[Word]:
        if isinstance(what, Acknowledged):
            return self._step(what)
        if isinstance(what, (Greeted, Broken)):
            if line is not self._line:
                return []
            self._desk.status = ""
            return self._step(what)
        if isinstance(what, (RendezvousError, ConfigError, StartError)):
            if line is None or line is self._line:
                self._error = what
            return []
        if isinstance(what, Seat):
            self._waits_since, self.round = None, what.round
        if isinstance(what, Final):
            self.final, self._waits_since = what, None
            self._report(Bye(self.node))
        return [what]

    def _step(self, event: _contact.Event) -> list[Word]:
        if self.final is not None or self._error is not None:
            return []
        self._contact, actions = _contact.step(self._contact, event, self._clock())
        return self._perform(actions)

    def _perform(self, actions: tuple[_contact.Action, ...]) -> list[Word]:
        words: list[Word] = []
        for action in actions:
            match action:
                case Connect():
                    with self._desk.turned:
                        if self._line is not None:
                            self._line.abandon()
                        self._line = Line(self._dial, self._desk, self._clock, self._happened, self._attempt())
                    self._line.start()
                case Fence(why, grace):
                    words.append(ContactLost(why, grace))
                case GiveUp(why, closed):
                    kind = RendezvousConnectionError if closed else RendezvousNotFoundError
                    self._error = kind(f"node {self.node}, job {self._desk.run_id!r}{self._place()}: {why}")
        return words

    def _attempt(self) -> float:
        """Seconds for one attempt to connect: after a loss of contact there are fewer to lose."""
        heartbeat = self._contact.limits.heartbeat
        return min(ATTEMPT, max(1.0, _contact.INTERVAL * heartbeat)) if heartbeat else ATTEMPT

    def _place(self) -> str:
        """Where the job is, as far as is known."""
        host, status = self._desk.host, self._desk.status
        if self._contact.met:
            status = f"coordinated by node {host}"
        return f" ({'; '.join(filter(None, (self._where, status)))})" if self._where or status else ""

    def _too_late(self, seat: Seat) -> ContactLost:
        grace = _contact.GRACE * self._contact.limits.heartbeat
        return ContactLost(f"the seat in round {seat.round} came while contact was lost", grace)

    def _next_telling(self) -> float:
        more = self._told - len(_TELL_AFTER)
        return _TELL_AFTER[self._told] if more < 0 else _TELL_AFTER[-1] + _TELL_EVERY * (more + 1)

    def _tell_of_waiting(self) -> None:
        if self._waits_since is None or (waited := self._clock() - self._waits_since) < self._next_telling():
            return
        self._told += 1
        end = _contact.search_ends_at(self._contact)
        left = "" if end is None else f"; {max(0.0, end - self._clock()):.0f} s left"
        reason = self._desk.status or (self._contact.trouble + left if left else "")
        said = reason or "the job is found, but its coordinator has not said yet who is there"
        _log.warning("node %s has waited %.0f s for job %r: %s", self.node, waited, self._desk.run_id, said)


def _checked(report: Report) -> Report:
    decode(encode(report))  # what this node may not say is its own error, here and now, and nobody else's
    return report
