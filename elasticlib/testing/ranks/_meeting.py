"""
A point of a test at which its ranks wait for each other without a process group: none goes on before all are there.

Rules of this file: a rank that has stopped in another way opens the way for all; nobody waits for one that cannot come.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Collection

from elasticlib.processes import Message
from elasticlib.workers.child import ask_caller

MEETING = ("meeting", "no meeting")
"""What a rank says that has come, or that has stopped before."""


class Meeting:
    """In the tests' own process: who has come."""

    def __init__(self) -> None:
        self.waiting: set[int] = set()
        self._pipe: tuple[int, int] | None = None
        self._is_open = False

    def arrive(self, rank: int, message: Message) -> tuple[Message, tuple[int, ...]]:
        """What *rank* gets to hear, with what it is to wait for."""
        # The rank has stopped and never comes to this point, so nobody may wait for it.
        if message.get("wants") != "meeting":
            self._open()
        if self._is_open:
            return {}, ()
        self.waiting.add(rank)
        if self._pipe is None:
            self._pipe = os.pipe()
        return {}, (self._pipe[0],)

    def look(self, size: int, ended: Collection[int], *, is_over: bool) -> None:
        """Let them go on where all *size* ranks have come or *ended*, or where it *is over* with the test."""
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
    """In a rank: wait for the others; one that *has stopped* only lets them go on."""
    answer = ask_caller({"wants": "no meeting" if has_stopped else "meeting"})
    for descriptor in () if answer is None else answer[1]:
        with contextlib.closing(os.fdopen(descriptor, "rb", buffering=0)):
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll()
