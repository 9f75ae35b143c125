"""
The parts of a session's memory: what is asked, the mailbox it reads, its wait for ranks. Pure.

Rules of this file: one operation at a time on each of a connection's lanes; an answer finds the question by its number.
Each request to join opens a new mailbox. What may be left in an old one is deleted once a notice came in the new one:
then nobody of this node looks into the old one, nor writes there. What was read is deleted once there are ranks, when
nobody is in a hurry, and counts as there until that is acknowledged. It is the lane that watches which does so: nothing
holds a heartbeat up. When people are told that a node still waits for its
ranks is data; what is said is made by whoever knows.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar

from attrs import Factory, evolve, fields, frozen
from typing_extensions import Self

from elasticlib.rendezvous.node._session_events import Describe, Lane
from elasticlib.rendezvous.protocol._exchange import COORDINATOR_HEARTBEAT, heartbeat_key, mailbox_key
from elasticlib.rendezvous.protocol._operations import Operation

SLICE = 60.0
"""Seconds that one wait for a notice lasts."""
GREETING = 1.0
"""Seconds of one wait for the coordinator's greeting."""
WAKE = b""
"""What a node writes for itself where its next notice would lie, to wait there no more."""
HEARD = (COORDINATOR_HEARTBEAT,)
"""What a node reads of its coordinator, again and again."""
_TELL_AFTER = (5.0, 15.0, 30.0)
"""Seconds of waiting after which it is told."""
_TELL_EVERY = 60.0
"""Seconds between two tellings afterwards."""


class Task(enum.Enum):
    """What an operation is for."""

    FIND = "wait for the greeting"
    GREET = "read the greeting"
    WAKE = "wake the lane that watches for what comes no more"
    DESCRIBE = "learn what this node brings"
    POST = "post a message"
    HEARTBEAT = "write a heartbeat, and read the coordinator's"
    LISTEN = "read that between two heartbeats, or while they rest"
    TAKE = "wait for the next notice and read it"
    CAUSE = "read the root cause whole"
    FORGET = "delete what was read"

    @property
    def lane(self) -> Lane:
        """The lane that it is asked of."""
        return Lane.WATCH if self in (Task.TAKE, Task.CAUSE, Task.FORGET) else Lane.SPEAK


@frozen
class PendingOperation:
    """An operation that is under way."""

    number: int
    task: Task
    sent: float
    key: str = ""
    seq: int = 0
    what: Operation | Describe | None = None


@frozen
class Lanes:
    """What was asked, and not answered yet."""

    count: int = 0
    """Number of the last operation."""
    _busy: Mapping[Lane, PendingOperation] = Factory(dict)

    def is_free(self, lane: Lane) -> bool:
        """Whether something can be asked."""
        return lane not in self._busy

    def ask(
        self, task: Task, sent: float, key: str = "", seq: int = 0, what: Operation | Describe | None = None
    ) -> Self:
        """Its lane is busy with that."""
        number = self.count + 1
        return evolve(
            self, count=number, busy={**self._busy, task.lane: PendingOperation(number, task, sent, key, seq, what)}
        )

    def answered(self, number: int) -> tuple[Self, PendingOperation | None]:
        """The lane of that operation is free; None when nobody waits for its answer."""
        # An answer may come after the lanes were cleared: nobody waits for it any more.
        for lane, asked in self._busy.items():
            if asked.number == number:
                return evolve(self, busy={each: it for each, it in self._busy.items() if each is not lane}), asked
        return self, None

    def cleared(self) -> Self:
        """No answer is waited for."""
        return evolve(self, busy={})


@frozen
class Mailbox:
    """By default there is none."""

    name: str = ""
    read: int = 0
    """Notices that were read."""
    awaited: str | None = None
    """The key that a lane watches."""
    done: tuple[str, ...] = ()
    """Keys that were read and, as far as is known, not deleted."""
    litter: tuple[str, ...] = ()
    """Keys of older mailboxes."""
    settled: bool = False
    """Whether the last that was read were ranks."""

    @property
    def next_key(self) -> str | None:
        """Where the next notice will lie."""
        return mailbox_key(self.name, self.read) if self.name else None

    def opened(self, name: str, epoch: int) -> Self:
        """A new one, under the coordinator of that epoch."""
        if not self.name:
            return evolve(self, name=name)
        # A coordinator that took over may have written again what was read before, and did not know of it.
        first = 0 if epoch else self.read
        left = (heartbeat_key(self.name), *(mailbox_key(self.name, index) for index in range(first, self.read + 1)))
        return evolve(self, name=name, read=0, litter=(*self.litter, *left))

    def awaits(self, key: str | None) -> Self:
        """That one is watched, or none."""
        return evolve(self, awaited=key)

    def woken(self, key: str) -> Self:
        """Whoever watched that one does so no more."""
        return self.awaits(None) if key == self.awaited else self

    def stale(self, key: str | None) -> str | None:
        """What is watched, where it is not *key*, at which the next notice will lie."""
        return self.awaited if self.awaited != key else None

    def taken(self, key: str, settles: bool) -> Self:
        """What lies there was read, be it a notice or not; *settles*: it was one of ranks."""
        return evolve(self, done=(*self.done, key), settled=settles)

    def further(self) -> Self:
        """After one more notice."""
        return evolve(self, read=self.read + 1)

    def deletable(self, key: str | None) -> tuple[str, ...]:
        """What is to be deleted before *key* is watched: all if that is None, or was read, or there are ranks."""
        if key is None or self.settled or key in self.done:
            return tuple(dict.fromkeys((*self.done, *(self.litter if self.read else ()))))
        return ()

    def cleared(self, keys: tuple[str, ...]) -> Self:
        """After these were deleted."""
        done, litter = ([key for key in each if key not in keys] for each in (self.done, self.litter))
        return evolve(self, done=tuple(done), litter=tuple(litter)) if keys else self


_T = TypeVar("_T")


def copied(one: _T) -> _T:
    """A shallow copy of an object of attrs, for a third of the time that `copy.copy` takes."""
    after = object.__new__(type(one))
    for each in fields(type(one)):  # type: ignore[arg-type]
        setattr(after, each.name, getattr(one, each.name))
    return after


def search(where: str, host: str, status: str) -> str:
    """Where a job is, as far as is known: the store's place, who coordinates, what else was heard."""
    status = f"coordinated by node {host}" if host else status
    return f" ({'; '.join(filter(None, (where, status)))})" if where or status else ""


@frozen
class Waiting:
    """Since when a node has waited, and how often that was told."""

    since: float
    told: int = 0

    def due_at(self) -> float:
        """When it is to be told next."""
        more = self.told - len(_TELL_AFTER)
        return self.since + (_TELL_AFTER[self.told] if more < 0 else _TELL_AFTER[-1] + _TELL_EVERY * (more + 1))

    def complain(self, node: str, job: str, why: str, now: float) -> tuple[Self, str]:
        """Tell it once more, and how: *why* may be empty."""
        why = why or "the job is found, but its coordinator has not reported its nodes yet"
        said = f"node {node} has waited {now - self.since:.0f} s for job {job!r}: {why}"
        return evolve(self, told=self.told + 1), said
