"""
Handled signals: events where a loop can act on them, exceptions while the program runs its own
code.

Rules of this file: while elasticlib's code runs, a handler only enqueues. Handlers are installed
in the main thread only, as Python requires, and the former ones are always restored. Requests of
the program's other threads to a launch are in the same inbox, so that each wait for a signal gets
them too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any, TypeAlias

from attrs import frozen
from typing_extensions import Self

from elasticlib._clock import monotonic
from elasticlib.errors import ConfigError, LaunchInterrupted, SignalException
from elasticlib.processes import has_default_action
from elasticlib.workers.child._should_stop import NOTICES as NOTICES

_log = logging.getLogger("elasticlib")

_Former: TypeAlias = dict[signal.Signals, Any]
_REPEATED = 5.0
"""Seconds within which a second SIGQUIT stops the job; the first one only asks for stacks."""


def parse_signals(names: str) -> tuple[signal.Signals, ...]:
    """
    Return the signals of a comma-separated list; log a warning for unknown names.

    Raises `ConfigError` for a signal that cannot be caught.
    """
    # An ordered set: two names of one signal are one.
    found: dict[signal.Signals, None] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        try:
            signum = signal.Signals[name]
        except KeyError:
            _log.warning("signals_to_handle: %r is not a signal of this system and is ignored", name)
            continue
        if signum in (signal.SIGKILL, signal.SIGSTOP):
            raise ConfigError(f"signals_to_handle: {name} cannot be caught by any process: leave it out")
        found[signum] = None

    return tuple(found)


def end_signals(names: str, handled: Collection[signal.Signals]) -> frozenset[int]:
    """
    Return the signals of a comma-separated list; names may lack ``SIG``.

    Raises `ConfigError` for an unknown name, for SIGINT, and for a signal that is not *handled*.
    """
    return frozenset(_end_signal(name, handled) for name in filter(None, map(str.strip, names.split(","))))


def _end_signal(name: str, handled: Collection[signal.Signals]) -> signal.Signals:
    try:
        found = signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
    except KeyError:
        raise _error(name, "is not a signal of this system", handled) from None
    if found == signal.SIGINT:
        raise _error(name, "ends a job on a person's request, and announces nothing", handled)
    if found not in handled:
        raise _error(name, "is not handled by the launcher", handled)
    return found


def _error(name: str, complaint: str, handled: Collection[signal.Signals]) -> ConfigError:
    known = ", ".join(sorted(each.name for each in handled if each != signal.SIGINT))
    return ConfigError.of_setting("preempt_signal", f"{name[:80]!r} {complaint}: give some of {known}")


def _install(signums: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], None]) -> _Former:
    """Set *handler* for *signums*, and return the former handlers."""
    former: _Former = {}
    for signum in signums:
        # Shells ignore SIGINT and SIGQUIT for every background job, unasked: `kill -INT` must
        # work.
        if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
            # With nohup the user wants the program to continue.
            continue
        before = signal.signal(signum, handler)
        former[signum] = before if before is not None else signal.SIG_DFL

    return former


def _install_for_notices(
    without: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], None]
) -> _Former:
    """
    Set *handler* for `NOTICES` that would end this program, unless the program handles or ignores
    them.
    """
    return _install(tuple(each for each in NOTICES if each not in without and _is_deadly(each)), handler)


def _is_deadly(notice: signal.Signals) -> bool:
    """Return True if *notice* would end this program while no launch runs, but for `_drop`."""
    return signal.getsignal(notice) is _drop or has_default_action(notice)


def _drop(signum: int, frame: FrameType | None) -> None:
    """Handle a notice while no launch runs."""


def survive_notices() -> None:
    """
    Keep `NOTICES` from ending a program that only launches, before, between and after its
    launches.
    """
    if threading.current_thread() is threading.main_thread():
        _install_for_notices((), _drop)


def _in_force(signum: signal.Signals, handler: Any) -> Any:
    """Return *handler*, or the one below it if it was removed meanwhile."""
    owner = getattr(handler, "__self__", None)
    # Handlers may be removed in another order than they were installed.
    while isinstance(owner, Raising) and owner._removed:
        handler = owner._former[signum]
        owner = getattr(handler, "__self__", None)
    return handler


def interruption(signum: int, what: str) -> SignalException:
    """Return the exception for a signal that arrived while this process did *what*."""
    received = signal.Signals(signum)
    kind = LaunchInterrupted if received == signal.SIGINT else SignalException
    return kind(f"process {os.getpid()} got {received.name} while {what}", received)


class Raising:
    """
    Handlers with which *signums* raise `interruption` in the main thread, from `install` to
    `remove`.

    An event loop of elasticlib puts `Signals` above it while it runs.
    """

    def __init__(self, signums: tuple[signal.Signals, ...], what: str) -> None:
        self.signums = signums
        self._what = what
        self._former: _Former = {}
        self._removed = False

    def install(self) -> None:
        """Set the handlers, if this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._former = _install(self.signums, self._on_signal)

    def remove(self) -> None:
        """
        Put the former handlers back; may be called again.

        A handler cannot be restored from another thread, or below a handler that was set later.
        It is restored when such a signal arrives.
        """
        self._removed = True
        if threading.current_thread() is threading.main_thread():
            for signum, former in list(self._former.items()):
                if signal.getsignal(signum) == self._on_signal:
                    signal.signal(signum, _in_force(signum, former))
                    del self._former[signum]

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if not self._removed:
            raise interruption(signum, self._what)
        signal.signal(signum, _in_force(signal.Signals(signum), self._on_signal))
        signal.raise_signal(signum)


@frozen
class StopRequest:
    """Request to stop the workers, of the program or of a source that announces this node's end."""

    why: str
    grace: float | None = None
    """Seconds until SIGKILL; None for the launch's own setting."""
    is_notice: bool = False
    """True if something announces the end of this node: workers that save and return were preempted."""
    ends_job: bool = False
    """True if the job must end on all nodes."""
    needs_listener: bool = False
    """True if it counts only for workers that call ``should_stop``."""


@frozen
class StacksRequest:
    """A request for the stacks of the workers' threads; `why` is the console's line above them."""

    why: str = ""
    """Empty if the program itself gets them."""


@frozen
class NoticeReceived:
    """Event of a signal that is meant for the workers, not for this program."""

    signum: int


class Inbox:
    """
    Messages to one waiting thread; any thread or signal handler may `put` one.

    With *quit_shows_stacks*, SIGQUIT asks for the stacks of all workers, and stops the job only
    if it is repeated.
    """

    def __init__(self, *, quit_shows_stacks: bool = False) -> None:
        self._quit_shows_stacks = quit_shows_stacks
        self._quit_at = -_REPEATED

        # A deque, not a Queue: a handler may interrupt the very thread that holds a Queue's lock.
        self._items: deque[object] = deque()

        # Once closed, the descriptors' numbers may be reused. A handler may interrupt the thread
        # that holds the lock.
        self._lock = threading.RLock()
        self._ready = self._hurry = -1
        made: list[int] = []
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
        try:
            # In one step: no interrupt falls between a descriptor and its note.
            made.extend(map(os.eventfd, (0, 0), (flags, flags)))
            self._ready, self._hurry = made
        except BaseException:
            for descriptor in made:
                os.close(descriptor)
            raise

    def put(self, item: object, *, may_wait: bool = False) -> None:
        """Add a signal's number, or a request; after `close` it is not read any more."""
        self._items.append(item)
        with self._lock:
            for descriptor in (self._ready, *(() if may_wait else (self._hurry,))):
                if descriptor >= 0:
                    os.eventfd_write(descriptor, 1)

    def put_signal(self, signum: int) -> bool:
        """Add a signal; return True if it stops the work."""
        if signum == signal.SIGQUIT and self._quit_shows_stacks:
            now, before = monotonic(), self._quit_at
            self._quit_at = now
            if now - before >= _REPEATED:
                # Stacks may wait until the launch has time; a stop may not.
                again = f"the job continues; another SIGQUIT within {_REPEATED:g} s stops it"
                self.put(StacksRequest(f"SIGQUIT received: stacks of all ranks ({again})"), may_wait=True)
                return False

        self.put(signum)
        return True

    def fileno(self) -> int:
        """Return a descriptor that is readable while a message waits; -1 once closed."""
        return self._ready

    def hurry(self) -> int:
        """Return a descriptor that is readable while an urgent message waits."""
        return self._hurry

    def drain(self) -> list[object]:
        """Return the messages since the last call, oldest first."""
        # The descriptors first: a message that comes meanwhile makes them readable again.
        for descriptor in (self._ready, self._hurry):
            if descriptor >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(descriptor)
        received = []
        while self._items:
            received.append(self._items.popleft())
        return received

    def close(self) -> None:
        """Close the descriptors; `drain` still returns later messages."""
        with self._lock:
            descriptors, self._ready, self._hurry = (self._ready, self._hurry), -1, -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    __del__ = close


class HandledSignals:
    """
    While entered, *signums* are put into *inbox* instead of handled by the program, if this is
    the main thread.

    With *takes_notices* so are `NOTICES`, as `NoticeReceived`.
    """

    def __init__(self, signums: tuple[signal.Signals, ...], inbox: Inbox, *, takes_notices: bool = False) -> None:
        self._signums = signums
        self._inbox = inbox
        self._takes_notices = takes_notices
        self._former: _Former = {}
        self._raised_from: tuple[int, str] | None = None
        """Number of signals from which on they are raised, too, and what this process does until then."""
        self.received: list[signal.Signals] = []
        """Signals that stop the work, oldest first."""

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._former = _install(self._signums, self._on_signal)
            if self._takes_notices:
                self._former |= _install_for_notices(self._signums, self._on_notice)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, former in self._former.items():
            signal.signal(signum, former)
        self._former.clear()

    @contextlib.contextmanager
    def raised(self, what: str, *, count: int = 1) -> Iterator[None]:
        """
        Raise `interruption` in the block, from its signal number *count* on; *what* is done there.

        The block has code of others, which may wait without limit.
        """
        try:
            self._raised_from = len(self.received) + count, what
            yield
        finally:
            self._raised_from = None

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if not self._inbox.put_signal(signum):
            return
        self.received.append(signal.Signals(signum))
        if self._raised_from is not None and len(self.received) >= self._raised_from[0]:
            raise interruption(signum, self._raised_from[1])

    def _on_notice(self, signum: int, frame: FrameType | None) -> None:
        self._inbox.put(NoticeReceived(signum), may_wait=True)


class DeferredSignals:
    """
    While entered, an interrupt (SIGINT) waits, if this is the main thread; the program's handler
    gets it at the end.

    It guards actions that must be done whole, such as taking an object and noting its owner. A
    second interrupt does not wait.
    """

    def __init__(self) -> None:
        self._former: Any = None
        self._is_pending = False
        self.lifted = _Lifted(self)
        """
        Context manager that ends the delay within the block; a waiting interrupt is raised at
        once.
        """

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    # One signal, so that each of the two is one step: between two signals an interrupt could
    # leave half of them.

    def begin(self) -> None:
        """Begin to delay interrupts."""
        # SIG_DFL and SIG_IGN run no handler, so that there is nothing to delay.
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._former = signal.signal(signal.SIGINT, self._on_signal)

    def end(self) -> None:
        """End the delay, and raise a waiting interrupt."""
        received, self._is_pending = self._is_pending, False
        if self._former is not None and signal.getsignal(signal.SIGINT) == self._on_signal:
            signal.signal(signal.SIGINT, self._former)
        if received:
            signal.raise_signal(signal.SIGINT)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._is_pending:
            self._former(signum, frame)
        self._is_pending = True


class _Lifted:
    # Not a generator: one that an interrupt leaves before its block begins ends at any time
    # later.
    def __init__(self, put_off: DeferredSignals) -> None:
        self._put_off = put_off

    def __enter__(self) -> None:
        self._put_off.end()

    def __exit__(self, *_: object) -> None:
        self._put_off.begin()


class Signals:
    """
    While entered, *signums* are collected instead of handled by the program; `fileno` is readable
    when one waits.

    With an *inbox* of the caller's they are put there, beside the messages of others, and unread
    ones stay there. *takes_notices* is that of `HandledSignals`.
    """

    def __init__(
        self, signums: tuple[signal.Signals, ...], inbox: Inbox | None = None, *, takes_notices: bool = False
    ) -> None:
        self._signums = signums
        self._given = inbox
        self._takes_notices = takes_notices

    def __enter__(self) -> Self:
        self.inbox = Inbox() if self._given is None else self._given
        self._handled = HandledSignals(self._signums, self.inbox, takes_notices=self._takes_notices).__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._handled.__exit__()
        if self._given is None:
            missed = self.drain() if kind is None else []
            self.inbox.close()
            for late in missed:
                # Too late for the launch: the signal belongs to the program again.
                signal.raise_signal(late)

    def fileno(self) -> int:
        """Return a descriptor that is readable while signals wait."""
        return self.inbox.fileno()

    def hurry(self) -> int:
        """Return a descriptor that is readable while signals or urgent requests wait."""
        return self.inbox.hurry()

    def drain(self) -> list[int]:
        """Return the signals that arrived since the last call, oldest first."""
        return [item for item in self.inbox.drain() if isinstance(item, int)]
