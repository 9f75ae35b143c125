"""
A barrier for a test's ranks that needs no process group.

Rules of this file: a rank that has stopped otherwise releases the others. No rank waits for one
that cannot arrive.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Collection

from elasticlib.processes import Message
from elasticlib.workers.child import ask_caller

MEETING = ("meeting", "no meeting")
"""Messages of a rank that has arrived, and of one that has stopped before."""


class Meeting:
    """Barrier in the tests' own process: the ranks that have arrived."""

    def __init__(self) -> None:
        self.waiting: set[int] = set()
        self._pipe: tuple[int, int] | None = None
        self._is_open = False

    def arrive(self, rank: int, message: Message) -> tuple[Message, tuple[int, ...]]:
        """Return the answer to *rank*, with the descriptor to wait for; none if it may continue."""
        # The rank has stopped and will never arrive, so no rank must wait for it.
        if message.get("wants") != "meeting":
            self._open()
        if self._is_open:
            return {}, ()
        self.waiting.add(rank)
        if self._pipe is None:
            self._pipe = os.pipe()
        return {}, (self._pipe[0],)

    def look(self, size: int, ended: Collection[int], *, is_over: bool) -> None:
        """Release the ranks if all *size* ranks have arrived or *ended*, or the test *is over*."""
        if self.waiting and (is_over or len(self.waiting.union(ended)) >= size):
            self._open()

    def _open(self) -> None:
        self._is_open = True
        self.waiting.clear()
        if self._pipe is not None:
            os.close(self._pipe[1])
            os.close(self._pipe[0])
            self._pipe = None

    def close(self) -> None:
        self._open()
        self._is_open = False


def meet(*, has_stopped: bool) -> None:
    """Wait, in a rank, for the others; a rank that *has stopped* only releases them."""
    answer = ask_caller({"wants": "no meeting" if has_stopped else "meeting"})
    for descriptor in () if answer is None else answer[1]:
        with contextlib.closing(os.fdopen(descriptor, "rb", buffering=0)):
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            # This returns once the tests' process has closed the other end of the pipe.
            poll.poll()
