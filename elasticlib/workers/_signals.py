"""
Handled signals: as events where a loop can act on them, as exceptions where the program is in its own code.

Rules of this file: while our code runs, a handler only enqueues; handlers are installed in the main thread only
(Python allows no other), and the former ones come back whatever happens.
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

from typing_extensions import Self

from elasticlib.errors import ConfigError, LaunchInterrupted, SignalException

_log = logging.getLogger("elasticlib")

_Former: TypeAlias = dict[signal.Signals, Any]
_OF_TERMINALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


def parse(names: str) -> tuple[signal.Signals, ...]:
    """The signals of a comma list; unknown names are warned of, one that cannot be caught is refused."""
    found: dict[signal.Signals, None] = {}  # an ordered set: two names of one signal are one
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
        if signum in _OF_TERMINALS and signal.getsignal(signum) == signal.SIG_IGN:
            continue  # nohup, or a shell's background job: its user wants it to go on
        before = signal.signal(signum, handler)
        former[signum] = before if before is not None else signal.SIG_DFL
    return former


def _in_force(signum: signal.Signals, handler: Any) -> Any:
    """*handler*, or what was below it where it was removed meanwhile."""
    owner = getattr(handler, "__self__", None)
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


class Signals:
    """While entered, *signums* are collected instead of acted on; `fileno` is readable when one waits."""

    def __init__(self, signums: tuple[signal.Signals, ...]) -> None:
        self._signums = signums
        # A deque and no Queue: a handler may interrupt the very thread that holds a Queue's lock.
        self._came: deque[int] = deque()
        self._ready = -1
        self._former: _Former = {}

    def __enter__(self) -> Self:
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        if threading.current_thread() is threading.main_thread():
            self._former = _install(self._signums, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for signum, former in self._former.items():
            signal.signal(signum, former)
        self._former.clear()
        missed = self.drain() if kind is None else []
        os.close(self._ready)
        self._ready = -1
        for late in missed:
            signal.raise_signal(late)  # too late for the launch: it is the program's again

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._came.append(signum)
        with contextlib.suppress(OSError):
            os.eventfd_write(self._ready, 1)

    def fileno(self) -> int:
        """A descriptor that is readable while signals wait."""
        return self._ready

    def drain(self) -> list[int]:
        """The signals that came since the last call, oldest first."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._ready)
        came = []
        while self._came:
            came.append(self._came.popleft())
        return came
