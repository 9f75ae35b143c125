"""
Handled signals as events: the handler only enqueues, the loop acts.

Rules of this file: handlers are installed in the main thread only (Python allows no other), for the
life of one launch, and the former ones come back whatever happens.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections import deque
from types import FrameType, TracebackType
from typing import Any

from typing_extensions import Self

from elasticlib.errors import ConfigError

_log = logging.getLogger("elasticlib")


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


class Signals:
    """While entered, *signums* are collected instead of acted on; `fileno` is readable when one waits."""

    def __init__(self, signums: tuple[signal.Signals, ...]) -> None:
        self._signums = signums
        # A deque and no Queue: a handler may interrupt the very thread that holds a Queue's lock.
        self._came: deque[int] = deque()
        self._ready = -1
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        if threading.current_thread() is threading.main_thread():
            for signum in self._signums:
                if signum in _OF_TERMINALS and signal.getsignal(signum) == signal.SIG_IGN:
                    continue  # nohup, or a shell's background job: its user wants it to go on
                former = signal.signal(signum, self._on_signal)
                self._former[signum] = former if former is not None else signal.SIG_DFL
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, former in self._former.items():
            signal.signal(signum, former)
        self._former.clear()
        missed = self.take() if kind is None else []
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

    def take(self) -> list[int]:
        """The signals that came since the last call, oldest first."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._ready)
        came = []
        while self._came:
            came.append(self._came.popleft())
        return came
