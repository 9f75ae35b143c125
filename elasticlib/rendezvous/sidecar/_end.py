"""
How a launcher sees its sidecar end.

Rules of this file: the sidecar was told to end. It speaks until it closes its channel, and then it exits; whoever
waits kills it where it does not. While it stays for other jobs in its store, a request to end ends the wait.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from attrs import define, field

from elasticlib._clock import monotonic
from elasticlib.processes import Link, Message, Process, Waitable, wait_readable
from elasticlib.rendezvous._membership import STAYS, Requests


@define(eq=False)
class SidecarEnd:
    """The wait for the end of one sidecar."""

    link: Link
    child: Callable[[], Process]
    """The process as it is known by now: one that was forked may still be about to say which it is."""
    hear: Callable[[Message, list[int]], object]
    """Gets each message."""
    requests: Requests | None
    limit: float
    """Seconds that it may take."""
    grace: float
    """Seconds that it may take beyond the time for which it says that it stays."""
    stays: bool = field(init=False, default=False)
    """Whether it stays for other jobs, though this one has ended."""
    _deadline: float = field(init=False, default=0.0)

    def wait(self) -> None:
        """Return when the process has ended, or the time for it is over: then it is to be killed."""
        self.child().send(signal.SIGCONT)
        self._deadline = monotonic() + self.limit
        is_speaking = True
        while is_speaking or not self.child().ends(0.0):
            left = max(0.0, self._deadline - monotonic())
            ready = wait_readable(self._sources(is_speaking), left)
            if not ready:
                return
            if self._takes_request(ready):
                return
            has_spoken = is_speaking and self.link.fileno() in ready
            if has_spoken:
                is_speaking = self._receive()
            elif self.child().fileno() in ready:
                return

    def _sources(self, is_speaking: bool) -> list[int | Waitable]:
        sources: list[int | Waitable] = []
        if is_speaking:
            sources.append(self.link)
        if self.child().fileno() >= 0:
            sources.append(self.child())
        if self.stays and self.requests is not None:
            sources.append(self.requests.hurry())
        return sources

    def _takes_request(self, ready: set[int]) -> bool:
        """Return whether a request to end has come while the process stays for other jobs."""
        if self.requests is None or not self.stays:
            return False
        if self.requests.hurry() not in ready:
            return False
        self.requests.drain()  # heeded: the program has nothing to do for them afterwards
        return True

    def _receive(self) -> bool:
        """Take one message; return False where none will follow."""
        received = self.link.receive()
        if received is None:
            return False
        message, descriptors = received
        stays = message.get(STAYS)
        if stays:  # before people read of it, and press Ctrl-C
            self.stays = True
            self._deadline = monotonic() + stays + self.grace
        self.hear(message, descriptors)
        return True
