"""
The parts of a session's memory: its open requests, its mailbox, its wait for ranks. Pure.

Rules of this file: one operation at a time on each of a connection's threads; an answer finds its
request by its number.

Each request to join opens a new mailbox. The rest of an old one is deleted once a notice came in
the new one: then no thread of this node reads or writes the old one. Notices that were read are
deleted once there are ranks, when time does not matter. They count as present until that is
acknowledged. The watching thread deletes, so that no heartbeat is delayed.

The times at which people learn that a node still waits for its ranks are data; the caller logs the
text.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar

from attrs import Factory, evolve, fields, frozen
from typing_extensions import Self

from elasticlib.rendezvous.node._session_events import ConnectionThread, Describe
from elasticlib.rendezvous.protocol._exchange import COORDINATOR_HEARTBEAT, heartbeat_key, mailbox_key
from elasticlib.rendezvous.protocol._operations import Operation

SLICE = 60.0
"""Seconds that one wait for a notice lasts."""
GREETING = 1.0
"""Seconds of one wait for the coordinator's greeting."""
WAKE = b""
"""The value that a node writes to the key of its own next notice, to end the wait for it."""
POLLED_KEYS = (COORDINATOR_HEARTBEAT,)
"""The coordinator's keys that a node reads regularly."""
_LOG_AFTER = (5.0, 15.0, 30.0)
"""Seconds of waiting after which the wait is logged."""
_LOG_EVERY = 60.0
"""Seconds between two of these log lines afterwards."""


class Task(enum.Enum):
    """The purpose of an operation."""

    FIND = "wait for the greeting"
    GREET = "read the greeting"
    WAKE = "end a wait for a notice that will not come"
    DESCRIBE = "describe this node for the next round"
    POST = "post a message"
    HEARTBEAT = "write a heartbeat, and read the coordinator's"
    LISTEN = "read that between two heartbeats, or while they rest"
    TAKE = "wait for the next notice and read it"
    CAUSE = "read the root cause whole"
    FORGET = "delete what was read"

    @property
    def thread(self) -> ConnectionThread:
        """The thread for this task."""
        return ConnectionThread.WATCH if self in (Task.TAKE, Task.CAUSE, Task.FORGET) else ConnectionThread.SPEAK


@frozen
class PendingOperation:
    """A running operation."""

    number: int
    task: Task
    sent: float
    key: str = ""
    seq: int = 0
    what: Operation | Describe | None = None


@frozen
class PendingOperations:
    """Requests without an answer yet."""

    count: int = 0
    """Number of the last operation."""
    _busy: Mapping[ConnectionThread, PendingOperation] = Factory(dict)

    def is_free(self, thread: ConnectionThread) -> bool:
        """Return whether the thread can take a request."""
        return thread not in self._busy

    def ask(
        self, task: Task, sent: float, key: str = "", seq: int = 0, what: Operation | Describe | None = None
    ) -> Self:
        """Return the requests and one more, which occupies its task's thread."""
        number = self.count + 1
        return evolve(
            self, count=number, busy={**self._busy, task.thread: PendingOperation(number, task, sent, key, seq, what)}
        )

    def answered(self, number: int) -> tuple[Self, PendingOperation | None]:
        """
        Return the requests without *number*, and that request; None if no request has this number.
        """
        # An answer may come after the requests were cleared: it is ignored.
        for thread, operation in self._busy.items():
            if operation.number == number:
                return evolve(self, busy={each: it for each, it in self._busy.items() if each is not thread}), operation
        return self, None

    def cleared(self) -> Self:
        """Return the same without any request."""
        return evolve(self, busy={})


@frozen
class Mailbox:
    """The mailbox of a node; by default there is none."""

    name: str = ""
    read: int = 0
    """Number of notices that were read."""
    awaited: str | None = None
    """The key that a thread watches."""
    done: tuple[str, ...] = ()
    """Keys that were read and, as far as is known, not deleted."""
    of_older: tuple[str, ...] = ()
    """Keys of older mailboxes."""
    settled: bool = False
    """True if the last notice that was read had ranks."""

    @property
    def next_key(self) -> str | None:
        """The key of the next notice; None without a mailbox."""
        return mailbox_key(self.name, self.read) if self.name else None

    def opened(self, name: str, epoch: int) -> Self:
        """
        Return the mailbox *name*, opened under the coordinator of *epoch*; the keys of the old one
        become `of_older`.
        """
        if not self.name:
            return evolve(self, name=name)
        # A coordinator that took over may have written a notice again, without knowing that it was
        # read.
        first = 0 if epoch else self.read
        left = (heartbeat_key(self.name), *(mailbox_key(self.name, index) for index in range(first, self.read + 1)))
        return evolve(self, name=name, read=0, of_older=(*self.of_older, *left))

    def awaits(self, key: str | None) -> Self:
        """Return the mailbox with *key* as the watched one; None: none."""
        return evolve(self, awaited=key)

    def woken(self, key: str) -> Self:
        """Return the mailbox after the watch of *key* ended."""
        return self.awaits(None) if key == self.awaited else self

    def stale(self, key: str | None) -> str | None:
        """Return the watched key if it is not *key*, the key of the next notice."""
        return self.awaited if self.awaited != key else None

    def taken(self, key: str, settles: bool) -> Self:
        """
        Return the mailbox after the value at *key* was read, even if it is not a notice; *settles*:
        it had ranks.
        """
        return evolve(self, done=(*self.done, key), settled=settles)

    def further(self) -> Self:
        """Return the mailbox after one more notice."""
        return evolve(self, read=self.read + 1)

    def deletable(self, key: str | None) -> tuple[str, ...]:
        """
        Return the keys to delete before *key* is watched: all if that is None, or was read, or
        there are ranks.
        """
        if key is None or self.settled or key in self.done:
            return tuple(dict.fromkeys((*self.done, *(self.of_older if self.read else ()))))
        return ()

    def cleared(self, keys: tuple[str, ...]) -> Self:
        """Return the mailbox after these keys were deleted."""
        done, of_older = ([key for key in each if key not in keys] for each in (self.done, self.of_older))
        return evolve(self, done=tuple(done), of_older=tuple(of_older)) if keys else self


_T = TypeVar("_T")


def copied(one: _T) -> _T:
    """Return a shallow copy of an attrs object, in a third of the time that `copy.copy` takes."""
    after = object.__new__(type(one))
    for each in fields(type(one)):  # type: ignore[arg-type]
        setattr(after, each.name, getattr(one, each.name))
    return after


def search(where: str, host: str, status: str) -> str:
    """
    Return the known facts about a job as a text: the store's place, the coordinator, its status.
    """
    status = f"coordinated by node {host}" if host else status
    return f" ({'; '.join(filter(None, (where, status)))})" if where or status else ""


@frozen
class Waiting:
    """The wait of a node for its ranks: its start, and the number of log lines about it."""

    since: float
    logged: int = 0

    def due_at(self) -> float:
        """Return the time of the next log line."""
        more = self.logged - len(_LOG_AFTER)
        return self.since + (_LOG_AFTER[self.logged] if more < 0 else _LOG_AFTER[-1] + _LOG_EVERY * (more + 1))

    def log_line(self, node: str, job: str, why: str, now: float) -> tuple[Self, str]:
        """Return the wait after one more log line, and that line; *why* may be empty."""
        why = why or "the job is found, but its coordinator has not reported its nodes yet"
        warning = f"node {node} has waited {now - self.since:.0f} s for job {job!r}: {why}"
        return evolve(self, logged=self.logged + 1), warning
