"""
Handled signals: as events where a loop can act on them, as exceptions where the program is in its own code.

Rules of this file: while our code runs, a handler only enqueues; handlers are installed in the main thread only
(Python allows no other), and the former ones come back whatever happens. What other threads of the program ask of a
launch lies in the same inbox, so that whatever waits for a signal hears them too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeAlias

from attrs import frozen
from typing_extensions import Self

from elasticlib._clock import monotonic
from elasticlib.errors import ConfigError, LaunchInterrupted, SignalException

_log = logging.getLogger("elasticlib")

_Former: TypeAlias = dict[signal.Signals, Any]
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals by which schedulers announce a time limit: they end nothing, and go to the workers that handle them."""
_REPEATED = 5.0
"""Seconds within which a second SIGQUIT stops what the first one only asked about."""


def parse_signals(names: str) -> tuple[signal.Signals, ...]:
    """The signals of a comma list; unknown names are warned of, one that cannot be caught is refused."""
    # An ordered set: two names of one signal are one.
    found: dict[signal.Signals, None] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        try:
            signum = signal.Signals[name]
        except KeyError:
            _log.warning("signals_to_handle: %r is no signal of this system and is left out", name)
            continue
        if signum in (signal.SIGKILL, signal.SIGSTOP):
            raise ConfigError(f"signals_to_handle: {name} cannot be caught by any process: leave it out")
        found[signum] = None
    return tuple(found)


def _install(signums: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], None]) -> _Former:
    """Set *handler* for *signums*; the former handlers."""
    former: _Former = {}
    for signum in signums:
        # A shell ignores SIGINT and SIGQUIT for every background job, which nobody asked for: `kill -INT` must work.
        if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
            # With nohup the user wants the program to go on.
            continue
        before = signal.signal(signum, handler)
        former[signum] = before if before is not None else signal.SIG_DFL
    return former


def _install_for_notices(
    without: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], None]
) -> _Former:
    """Set *handler* for `NOTICES` that would end this program; one that the program handles or ignores is its own."""
    deadly = (signal.SIG_DFL, _drop)
    return _install(
        tuple(each for each in NOTICES if each not in without and signal.getsignal(each) in deadly), handler
    )


def _drop(signum: int, frame: FrameType | None) -> None:
    """Handle a notice while no launch runs."""


def survive_notices() -> None:
    """In a program that only launches: have `NOTICES` not end it, before, between and after its launches."""
    if threading.current_thread() is threading.main_thread():
        _install_for_notices((), _drop)


def _in_force(signum: signal.Signals, handler: Any) -> Any:
    """*handler*, or what was below it where it was removed meanwhile."""
    owner = getattr(handler, "__self__", None)
    # Handlers may be removed in another order than they were installed.
    while isinstance(owner, Raising) and owner._removed:
        handler = owner._former[signum]
        owner = getattr(handler, "__self__", None)
    return handler


def interruption(signum: int, what: str) -> SignalException:
    """The exception that tells of a signal which came while this process did *what*."""
    came = signal.Signals(signum)
    kind = LaunchInterrupted if came == signal.SIGINT else SignalException
    return kind(f"process {os.getpid()} got {came.name} while {what}", came)


class Raising:
    """
    From `install` to `remove`, *signums* raise `interruption` in the main thread, wherever it is.

    An event loop of ours puts `Signals` on top of it for as long as it runs.
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

        What cannot be put back now, from another thread or below a handler that came later, is so as soon as
        such a signal comes.
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
    """The program wants its workers stopped."""

    why: str
    grace: float | None = None
    """Seconds until SIGKILL; None for what the launch was told."""


@frozen
class StacksRequest:
    """Somebody wants to know where the threads of the workers are; `why` is what the console says above them."""

    why: str = ""
    """Empty where the program itself gets them."""


@frozen
class NoticeReceived:
    """A signal came that is not for this program, but for its workers."""

    signum: int


class Inbox:
    """
    What one thread is to hear while it waits for anything; any thread or signal handler may `put` something in.

    Where *quit_shows_stacks*, SIGQUIT asks for the stacks of all workers, and stops nothing unless it is repeated.
    """

    def __init__(self, *, quit_shows_stacks: bool = False) -> None:
        self._quit_shows_stacks = quit_shows_stacks
        self._quit_at = -_REPEATED
        # A deque and no Queue: a handler may interrupt the very thread that holds a Queue's lock.
        self._items: deque[object] = deque()
        # Once closed, the descriptors' numbers may be another file's. A handler may interrupt the thread that has it.
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
        """Leave a signal's number, or what somebody wants; after `close` nobody will look."""
        self._items.append(item)
        with self._lock:
            for descriptor in (self._ready, *(() if may_wait else (self._hurry,))):
                if descriptor >= 0:
                    os.eventfd_write(descriptor, 1)

    def put_signal(self, signum: int) -> bool:
        """Leave a signal that came; whether it is to stop the work."""
        if signum == signal.SIGQUIT and self._quit_shows_stacks:
            now, before = monotonic(), self._quit_at
            self._quit_at = now
            if now - before >= _REPEATED:
                # Stacks may wait until the launch has time; a stop may not.
                again = f"the job goes on; another SIGQUIT within {_REPEATED:g} s stops it"
                self.put(StacksRequest(f"SIGQUIT came: where all ranks are ({again})"), may_wait=True)
                return False
        self.put(signum)
        return True

    def fileno(self) -> int:
        """A descriptor that is readable while something lies there; -1 once closed."""
        return self._ready

    def hurry(self) -> int:
        """A descriptor that is readable while something lies there that may not wait."""
        return self._hurry

    def drain(self) -> list[object]:
        """What came since the last call, oldest first."""
        for descriptor in (self._ready, self._hurry):
            if descriptor >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(descriptor)
        came = []
        while self._items:
            came.append(self._items.popleft())
        return came

    def close(self) -> None:
        """Let go of the descriptors; what is put in afterwards is there for `drain`."""
        with self._lock:
            descriptors, self._ready, self._hurry = (self._ready, self._hurry), -1, -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    __del__ = close


class HandledSignals:
    """
    While entered, *signums* are put into *inbox* instead of acted on, if this is the main thread.

    With *takes_notices* so are `NOTICES`, as `NoticeReceived`.
    """

    def __init__(self, signums: tuple[signal.Signals, ...], inbox: Inbox, *, takes_notices: bool = False) -> None:
        self._signums = signums
        self._inbox = inbox
        self._takes_notices = takes_notices
        self._former: _Former = {}
        self.came: list[signal.Signals] = []
        """Those that came to stop the work, oldest first."""

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

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._inbox.put_signal(signum):
            self.came.append(signal.Signals(signum))

    def _on_notice(self, signum: int, frame: FrameType | None) -> None:
        self._inbox.put(NoticeReceived(signum), may_wait=True)


class DeferredSignals:
    """
    While entered, an interrupt (SIGINT) waits, if this is the main thread; the program's handler gets it at the end.

    For what must be done whole, such as taking something and noting who has it. A second one does not wait.
    """

    def __init__(self) -> None:
        self._former: Any = None
        self._is_pending = False
        self.lifted = _Lifted(self)
        """While that is entered, within, interrupts come as if nobody put them off; one that waits comes at once."""

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    # One signal, so that each of the two is one step: between two signals an interrupt could leave half of them.

    def begin(self) -> None:
        """From now on."""
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._former = signal.signal(signal.SIGINT, self._on_signal)

    def end(self) -> None:
        """No more."""
        came, self._is_pending = self._is_pending, False
        if self._former is not None and signal.getsignal(signal.SIGINT) == self._on_signal:
            signal.signal(signal.SIGINT, self._former)
        if came:
            signal.raise_signal(signal.SIGINT)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._is_pending:
            self._former(signum, frame)
        self._is_pending = True


class _Lifted:
    # No generator: one that an interrupt leaves before its block begins ends at any time later.
    def __init__(self, put_off: DeferredSignals) -> None:
        self._put_off = put_off

    def __enter__(self) -> None:
        self._put_off.end()

    def __exit__(self, *_: object) -> None:
        self._put_off.begin()


class Signals:
    """
    While entered, *signums* are collected instead of acted on; `fileno` is readable when one waits.

    With an *inbox* of the caller's they lie there, beside what others put into it, and what nobody took stays there.
    *takes_notices* is that of `HandledSignals`.
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
        """A descriptor that is readable while signals wait."""
        return self.inbox.fileno()

    def hurry(self) -> int:
        """A descriptor that is readable while signals wait, or what others want at once."""
        return self.inbox.hurry()

    def drain(self) -> list[int]:
        """The signals that came since the last call, oldest first."""
        return [item for item in self.inbox.drain() if isinstance(item, int)]
