"""
A sidecar as its launcher sees it, from its start to its end: the process, the channel to it, and
the contact with it.

Rules of this file: only the wait for the end of the process blocks. A thread sends the messages that
cannot go at once, and regular signs of life of this launcher. It ends with the process at the other
end, or when the last message is sent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence

from attrs import define, field
from typing_extensions import Self

from elasticlib._clock import Clock, monotonic
from elasticlib.processes import (
    Channel,
    Lease,
    Link,
    Message,
    Process,
    Waitable,
    encoded_message,
    start_thread,
    takes_more,
    wait_readable,
)
from elasticlib.rendezvous._membership import PATIENCE, STAYS, Requests
from elasticlib.rendezvous.sidecar._contact import ContactLimits, SidecarContact

LIMIT = 5
"""Seconds that the thread waits for a process that was stopped."""
IMPORTING = "`import torch` takes so long here (a cold disk?), or the machine is busy; no other node was contacted yet"
"""Reason of a slow start."""
_ALIVE = encoded_message({"op": "alive"})
_SHORT = 16_000
"""Bytes of a frame that are sent from the caller's own thread."""


@define(eq=False)
class SidecarProcess:
    """
    One sidecar of a launcher: the process, the channel to it, and the contact with it. When it has
    ended, the next one is another object.
    """

    child: Process
    """The process as far as it is known: a forked one sends its number with its first message."""
    link: Link
    contact: SidecarContact
    lease: Lease
    """Time limit for the workers while contact lasts; it may outlive the process."""
    _sender: Sender
    _clock: Clock
    gone: bool = False
    """True once the process has closed its channel."""

    @classmethod
    def start(
        cls,
        begin: Callable[[Channel], Process],
        job: Message,
        kept: Sequence[int],
        *,
        limits: ContactLimits,
        interval: float | None,
        clock: Clock,
    ) -> Self:
        """
        Start a process and send it its *job* with the *kept* descriptors, then a sign of life each
        *interval* seconds. *begin* is called with the process's end of the channel.
        """
        ours, theirs = channel()
        with contextlib.ExitStack() as undo:
            link = Link(ours)
            undo.callback(link.close)
            with contextlib.closing(theirs):
                child = begin(theirs)
            # If a later step fails, no process must stay behind that waits for its job.
            undo.callback(child.wait, 0.0)
            now = clock()
            contact = SidecarContact(limits, born=now, answered_at=now)
            lease = Lease()
            undo.callback(lease.close)

            # Copies: the sender closes what it sent, and the next process gets the same objects again.
            given = (lease.fileno(), *kept)
            sender = Sender(link, interval, (encoded_message(job), tuple(map(os.dup, given))))
            undo.pop_all()

        return cls(child, link, contact, lease, sender, clock)

    def say(self, message: Message, *descriptors: int) -> None:
        """Send a message after all earlier ones; *descriptors* belong to this object from now on."""
        self._sender.say(encoded_message(message), descriptors)

    def receive(self) -> tuple[Message, list[int]] | None:
        """Return the next message of the process with its descriptors; None: no other will follow."""
        received = self.link.receive()
        if received is None:
            return None

        message, descriptors = received

        # A forked process sends its number before it knows its job.
        is_birth = message["op"] == "born"
        self.contact.note_answer(self._clock(), begins=not is_birth)
        if is_birth:
            # The host of this program's sidecars forked it: this message is the first sign of it.
            self.child = Process.sent(message["pid"], descriptors)

        return received

    def label(self) -> str:
        """Return a name of the process for people."""
        return f"sidecar (pid {self.child.pid})" if self.child.pid > 0 else "sidecar"

    def is_readable(self) -> bool:
        """Return whether a message, or the end of the channel, can be received at once."""
        return not self.gone and bool(wait_readable([self.link], 0))

    def is_overdue(self) -> bool:
        """Return whether the process should have answered by now."""
        deadline = None if self.gone else self.contact.deadline()
        return deadline is not None and self._clock() >= deadline

    def find_silent(self) -> None:
        """Note that no answer came in time."""
        self.contact.find_silent(self._clock())
        self.child.send(signal.SIGCONT)  # it may have been stopped, alone

    def report_of_birth(self, run_id: str) -> str | None:
        """Return the report on a process that still starts, if it is time for the next one."""
        waited = None if self.gone else self.contact.report_of_birth(self._clock())
        if waited is None:
            return None
        self.child.send(signal.SIGCONT)  # it may have been stopped, alone
        left = self.contact.limits.birth - waited
        return f"has waited {waited:.0f} s for job {run_id!r}: {IMPORTING}; {left:.0f} s left"

    def poll_timeout(self) -> float | None:
        """Return the seconds until the next check of the contact; None: no check is due."""
        # A process that is gone is not expected to answer.
        wake_at = None if self.gone else self.contact.wake_at()
        return None if wake_at is None else max(0.0, wake_at - self._clock())

    def lose(self) -> None:
        """Note that the process has closed its channel; kill it if it does not exit within a second."""
        self.gone = True
        self.child.wait(1.0)

    def disconnect(self) -> None:
        """Close the channel of a process that is gone."""
        self._sender.close()
        self.link.close()

    def is_listening(self) -> bool:
        """Return whether the process takes messages, and answers."""
        return self._sender.is_alive() and not self.contact.is_silent

    def end(
        self,
        handle: Callable[[Message, list[int]], object],
        requests: Requests | None,
        limit: float,
        grace: float,
        *,
        stays: bool = False,
    ) -> None:
        """
        Ask the process to end, and kill it if it has not ended after *limit* seconds.

        *handle* is called with its last messages. If it stays for other jobs in its store, it may
        take *grace* seconds beyond the time that it announced; one of *requests* ends that wait.
        With *stays*, it may also announce that it stays until the end of the whole job.
        """
        self._sender.close(encoded_message({"op": "close", "stays": stays}))
        end = _End(self, handle, requests, limit, grace)
        try:
            if not self.gone:
                end.wait()
                self.child.wait(0.0)
        except BaseException as error:  # the operator does not want to wait
            self.child.wait(0.0)
            ends_last_wait = end.stays and isinstance(error, KeyboardInterrupt)
            if not ends_last_wait:
                raise
        finally:
            self.gone = True
            self._sender.join()
            self.link.close()


@define(eq=False)
class _End:
    """
    The wait for the end of a sidecar that was asked to end.

    It sends messages until it closes its channel, and then it exits. While it stays for other jobs
    in its store, a request to end ends the wait.
    """

    process: SidecarProcess
    handle: Callable[[Message, list[int]], object]
    """Called with each message."""
    requests: Requests | None
    limit: float
    """Seconds that it may take."""
    grace: float
    """Seconds that it may take beyond the time that it announced."""
    stays: bool = field(init=False, default=False)
    """True if it stays for other jobs, though this one has ended."""
    _patience: float = field(init=False, default=0.0)
    """Seconds that it may still take after the first request to end."""
    _deadline: float = field(init=False, default=0.0)

    def wait(self) -> None:
        """
        Return when the process has ended, or the time for that is over; in the second case the
        caller must kill it.
        """
        # It may have been stopped, alone: then it could not end.
        self.process.child.send(signal.SIGCONT)
        self._deadline = monotonic() + self.limit
        is_speaking = True

        # It may close its channel a moment before it exits, and exit while its last lines lie in the channel.
        while is_speaking or not self.process.child.ends(0.0):
            left = max(0.0, self._deadline - monotonic())
            ready = wait_readable(self._sources(is_speaking), left)
            if not ready:
                return
            if self._takes_request(ready):
                return
            has_spoken = is_speaking and self.process.link.fileno() in ready
            if has_spoken:
                is_speaking = self._receive()
            elif self.process.child.fileno() in ready:
                return

    def _sources(self, is_speaking: bool) -> list[int | Waitable]:
        sources: list[int | Waitable] = []
        if is_speaking:
            sources.append(self.process.link)
        if self.process.child.fileno() >= 0:
            sources.append(self.process.child)
        if self.stays and self.requests is not None:
            sources.append(self.requests.hurry())
        return sources

    def _takes_request(self, ready: set[int]) -> bool:
        """Return whether a request to end has come while the process stays for other jobs."""
        if self.requests is None or not self.stays:
            return False
        if self.requests.hurry() not in ready:
            return False
        # Taken, so that the program does not end a second time for it.
        self.requests.drain()
        if not self._patience:
            return True
        # A second request ends the wait at once.
        self._deadline, self._patience = monotonic() + self._patience, 0.0
        return False

    def _receive(self) -> bool:
        """Handle one message; return False if no other will follow."""
        received = self.process.receive()
        if received is None:
            return False

        message, descriptors = received
        stays = message.get(STAYS)

        # Before the line is shown: people who read it may press Ctrl-C at once.
        if stays:
            self.stays = True
            self._deadline = monotonic() + stays + self.grace
            self._patience = message.get(PATIENCE, 0.0)

        self.handle(message, descriptors)
        return True


# The channel to a sidecar.


class Sender:
    """
    Sends frames through *link*, the *first* one at once, and a sign of life each *interval*
    seconds.
    """

    def __init__(self, link: Link, interval: float | None, first: tuple[bytes, tuple[int, ...]]) -> None:
        self._link = link
        self._interval = interval
        self._turned = threading.Condition()
        self._sending = True
        """True while the thread is sending: new messages must wait for their turn."""
        self._closed = False
        self._outgoing: deque[tuple[bytes, tuple[int, ...]]] = deque([first])
        """Frames with descriptors, which are closed once sent."""
        self._thread = threading.Thread(target=self._send_all, name="elasticlib-rendezvous", daemon=True)
        start_thread(self._thread)

    def say(self, body: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send a frame after all earlier ones; *descriptors* belong to this object from now on."""
        with self._turned:
            # Frames keep their order: none goes at once while the thread has an earlier one.
            has_turn = not self._sending and not self._outgoing
            if has_turn and len(body) <= _SHORT and takes_more(self._link):
                # At once: this launcher may be stopped before its thread runs again.
                self._send(body, descriptors)
                return
            self._outgoing.append((body, descriptors))
            self._turned.notify()

    def close(self, last: bytes | None = None) -> None:
        """Send the *last* frame, if given, and end."""
        with self._turned:
            if last is not None:
                self._outgoing.append((last, ()))
            self._closed = True
            self._turned.notify()

    def is_alive(self) -> bool:
        """Return whether anything can still be sent."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait until the last frame is sent, or cannot be."""
        self._thread.join(LIMIT + 1)

    def _send_all(self) -> None:
        while True:
            frame = self._next_frame()
            if frame is None:
                return
            try:
                is_open = self._send(*frame)
            except OSError:
                # The process was stopped for so long that the channel is full: its silence will be
                # noticed.
                return

            if not is_open:
                return

    def _next_frame(self) -> tuple[bytes, tuple[int, ...]] | None:
        """
        Return the next frame: a sign of life after an interval without one; None after the last.
        """
        with self._turned:
            # Under the lock: between this and the check of the queue no other thread may send.
            self._sending = False
            if not self._outgoing and not self._closed:
                self._turned.wait(self._interval)
            frame: tuple[bytes, tuple[int, ...]] = (_ALIVE, ())
            if self._outgoing:
                frame = self._outgoing.popleft()
            elif self._closed:
                return None

            self._sending = True
            return frame

    def _send(self, body: bytes, descriptors: tuple[int, ...]) -> bool:
        try:
            return self._link.send_body(body, descriptors)
        finally:
            # Sent or not, they belong to this object: those of a frame that failed must not stay
            # open.
            for descriptor in descriptors:
                os.close(descriptor)


def channel() -> tuple[Channel, Channel]:
    """
    Return a channel to a sidecar, ours and its; the sending thread does not wait forever for a
    stopped process.
    """
    ours, theirs = Channel.pair()
    # The option takes a C struct timeval: seconds and microseconds.
    ours._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", LIMIT, 0))
    return ours, theirs
