"""
Output that waits for a stream, which may take none: a terminal that was stopped, a pager.

Rules of this file: one thread writes, and the stream may block it without limit. No other thread waits for it, except
in `OutputQueue.end`, until its caller loses patience.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from elasticlib.processes import start_thread, wait_for_change

_PATIENCE = 0.2
"""Seconds between two questions whether the caller loses patience."""
_SEVERAL = 8
_MOST_WAITING = 1000
"""Pieces that wait for the stream; after `OutputQueue.hurry`, later ones are lost."""


class OutputQueue:
    """Pieces of output, which a thread gives to *write* in their order."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._changed = threading.Condition()
        self._pieces = deque[tuple[bytes, Callable[[], None] | None]]()
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
                data, taken = self._pieces.popleft()
            self._write(data)
            if taken is not None:
                taken()
