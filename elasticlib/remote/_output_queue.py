"""
Output that waits for a stream, which may take none: a terminal that was stopped, a pager.

Rules of this file: one thread writes, and the stream may block it without limit. No other thread waits for it, except
in `OutputQueue.end`, until its caller loses patience.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence

from elasticlib._clock import monotonic
from elasticlib.processes import start_thread, wait_for_change

_PATIENCE = 0.2
"""Seconds between two questions whether the caller loses patience."""
_SEVERAL = 8
_MOST_WAITING = 1000
"""Pieces that wait for the stream; after `OutputQueue.hurry`, later ones are lost."""


class OutputQueue:
    """
    Pieces of output, which a thread gives to *write* in their order.

    With *gather* it writes at most once in so many seconds, and joins the pieces that have arrived meanwhile.
    """

    def __init__(self, write: Callable[[bytes], None], gather: float = 0.0) -> None:
        self._write, self._gather = write, gather
        self._changed = threading.Condition()
        self._pieces = deque[tuple[bytes, Callable[[], None] | None]]()
        self._due = -math.inf
        self._is_hurried = False
        self._has_ended = False
        self._thread: threading.Thread | None = None

    @property
    def is_long(self) -> bool:
        """True if several pieces wait for the stream."""
        return len(self._pieces) >= _SEVERAL

    def begin(self) -> None:
        """Start the thread. Raises `StartError`."""
        self._thread = start_thread(threading.Thread(target=self._run, name="elasticlib-output", daemon=True))

    def add(self, data: bytes, taken: Callable[[], None] | None = None) -> None:
        """Add a piece; *taken* is called once the stream has it, or at once after `hurry`."""
        with self._changed:
            if self._is_hurried and taken is not None:
                taken()
                taken = None
            if not self._is_hurried or len(self._pieces) < _MOST_WAITING:
                self._pieces.append((data, taken))
            self._changed.notify_all()

    def hurry(self) -> None:
        """Call *taken* of all pieces now, and of later ones at once: what follows output must not wait for a stream."""
        with self._changed:
            self._is_hurried = True
            pieces, self._pieces = self._pieces, deque((data, None) for data, _ in self._pieces)
            for _, taken in pieces:
                if taken is not None:
                    taken()
            self._changed.notify_all()

    def end(self, is_impatient: Callable[[], object]) -> bool:
        """Wait until the stream has all pieces, or until *is_impatient* returns True. Return True if it has them."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        thread = self._thread
        while thread is not None and thread.is_alive():
            thread.join(_PATIENCE)
            if thread.is_alive() and is_impatient():
                return False
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                wait_for_change(self._changed, lambda: bool(self._pieces) or self._has_ended, None)
                if not self._pieces:
                    return
                pieces = self._gathered()
            self._write_joined(pieces)
            self._due = monotonic() + self._gather

    def _write_joined(self, pieces: Sequence[tuple[bytes, Callable[[], None] | None]]) -> None:
        self._write(b"".join(data for data, _ in pieces))
        for _, taken in pieces:
            if taken is not None:
                taken()

    def _gathered(self) -> list[tuple[bytes, Callable[[], None] | None]]:
        """Return the first piece; with *gather* all pieces that have arrived by the time of the next write."""
        if not self._gather:
            return [self._pieces.popleft()]
        wait_for_change(self._changed, lambda: self._has_ended or self._is_hurried, max(0.0, self._due - monotonic()))
        pieces, self._pieces = list(self._pieces), deque()
        return pieces
