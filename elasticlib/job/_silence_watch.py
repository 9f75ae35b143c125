"""
Has a cell say that its job writes nothing: `Silence` with a clock.

Rules of this file: one thread for each stream that somebody waits for, which sleeps until there is something to say; it
ends with the job. Output and the word that there is none come in turn, so that the word never stays behind.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from elasticlib._clock import monotonic
from elasticlib._programs import start_thread
from elasticlib.job._silence import Silence


class SilenceWatch:
    """Calls *say* with the seconds of silence when these are to be said, and with None when that no longer holds."""

    def __init__(self, say: Callable[[float | None], None]) -> None:
        self._say = say
        self._silence = Silence()
        self._changed = threading.Condition()
        self._is_over = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Output is waited for."""
        with self._changed:
            self._silence.begin(monotonic())
            if self._thread is None and not self._is_over:
                thread = threading.Thread(target=self._run, name="elasticlib-silence", daemon=True)
                self._thread = start_thread(thread)
            self._changed.notify()

    def heard(self) -> None:
        """Output came, and is about to be shown."""
        with self._changed:
            if self._silence.heard(monotonic()):
                self._say(None)

    def end(self) -> None:
        """Output is not waited for any more, up to the next `begin`."""
        with self._changed:
            if self._silence.end():
                self._say(None)

    def close(self) -> None:
        """There will be no other `begin`."""
        self.end()
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the main thread's
        with self._changed:
            while not self._is_over:
                due = self._silence.due
                self._changed.wait(None if due is None else max(0.0, due - monotonic()))
                seconds = self._silence.tick(monotonic())
                if seconds is not None and not self._is_over:
                    self._say(seconds)
