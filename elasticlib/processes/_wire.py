"""
Frames between the launcher and its own children, with descriptors.

A frame is a JSON object and a list of descriptors, over a private Unix stream socket pair. One
kernel message holds a limited number of descriptors: one byte after the frame stands for each
further message.

Rules of this file: a frame is sent whole. A peer that is gone is an end of file, never an error,
and so is a peer that sends an invalid frame.
"""

from __future__ import annotations

import array
import contextlib
import errno
import math
import os
import resource
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from json import dumps
from typing import Any, Protocol, TypeAlias

from elasticlib._clock import monotonic
from elasticlib._untrusted import parse
from elasticlib.processes._descriptors import close_each

Message: TypeAlias = dict[str, Any]

SIGNAL_TICK = 1.0
"""
Seconds after which a waiting main thread wakes up, so that Python runs the handlers of signals.

Only the main thread runs them. The kernel does not wake it for a signal that arrives just before the wait
begins, or that it delivers to another thread. Without the tick, a SIGTERM could wait as long as the work.
"""
_LONGEST = (2**31 - 1) / 1000
"""Seconds that one poll can wait."""
_HEAD = struct.Struct("!II")
# SCM_MAX_FD, the kernel's limit for one message.
_MOST_DESCRIPTORS = 253
_MOST_OF_A_FRAME = 65536
_LARGEST = 2**30
"""Most bytes of a frame: large content goes through files in memory."""


class Waitable(Protocol):
    """An object that can be waited for."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""
        ...


def wait_readable(sources: Sequence[int | Waitable], timeout: float | None) -> set[int]:
    """
    Return the descriptors of *sources* that are readable within *timeout* seconds (None: no
    limit). Their number is not limited.

    In the main thread, a signal's handler runs within `SIGNAL_TICK` seconds, even if the signal did
    not interrupt the wait.
    """
    poll = select.poll()
    for source in sources:
        poll.register(source, select.POLLIN)

    until = _end_of(timeout)
    while True:
        ready = poll.poll(1000 * _next_wait(until))
        if ready or monotonic() >= until:
            return {number for number, _ in ready}


def wait_for_change(changed: threading.Condition, is_over: Callable[[], bool], timeout: float | None) -> bool:
    """
    Wait, for *timeout* seconds at most (None: no limit), until *is_over* returns True after a notification.

    Return its last value. The caller holds *changed*. Signals are handled as `wait_readable` says.
    """
    until = _end_of(timeout)
    while not changed.wait_for(is_over, _next_wait(until)):
        if monotonic() >= until:
            return False
    return True


def _end_of(timeout: float | None) -> float:
    return math.inf if timeout is None else monotonic() + timeout


def _next_wait(until: float) -> float:
    """Return the seconds that this thread may sleep before it looks again, at the latest at the time *until*."""
    is_main = threading.current_thread() is threading.main_thread()
    return max(0.0, min(until - monotonic(), SIGNAL_TICK if is_main else _LONGEST))


def encoded_message(message: Message) -> bytes:
    """Return the message as the body of a frame."""
    return dumps(message).encode()


def takes_more(link: Waitable) -> bool:
    """
    Return True if the channel accepts a short frame without waiting.

    The kernel reports that only while most of its buffer is free.
    """
    poll = select.poll()
    poll.register(link, select.POLLOUT)
    return any(event & select.POLLOUT for _, event in poll.poll(0))


class _Limit:
    """Soft limit of open files, and the number of its users that have raised it at the moment."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.former = (0, 0)

    def raise_it(self) -> None:
        with self.lock:
            if not self.users:
                self.former = resource.getrlimit(resource.RLIMIT_NOFILE)
                resource.setrlimit(resource.RLIMIT_NOFILE, (self.former[1], self.former[1]))
            self.users += 1

    def put_back(self) -> None:
        with self.lock:
            self.users -= 1
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            # A limit that the program has set meanwhile stays.
            if not self.users and soft == self.former[1]:
                # The program may have lowered the hard limit meanwhile.
                resource.setrlimit(resource.RLIMIT_NOFILE, (min(self.former[0], hard), hard))


_limit = _Limit()
os.register_at_fork(after_in_child=_limit.__init__)  # type: ignore[misc]


@contextlib.contextmanager
def room_for_descriptors(count: int) -> Iterator[None]:
    """
    Allow this program to open *count* descriptors in the block, even if its own files fill the
    soft limit.

    Only the hard limit applies there; the descriptors stay open afterwards.
    """
    tried: list[int] = []
    raised = False
    try:
        for _ in range(count):
            tried.append(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as error:
        if error.errno == errno.EMFILE:
            _limit.raise_it()
            raised = True
    finally:
        close_each(tried)

    try:
        yield
    finally:
        if raised:
            _limit.put_back()


def _rights(descriptors: Sequence[int]) -> list[tuple[int, int, array.array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]


class Channel:
    """One end of a socket pair that carries frames; not for use by two threads at once."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._is_lost = False
        """True after an invalid frame: the start of the next one is unknown."""

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return two connected ends, which executed programs do not inherit."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), cls(theirs)

    @classmethod
    def adopt(cls, descriptor: int) -> Channel:
        """Return the channel over a descriptor that this process received."""
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        """Return the descriptor; -1 once closed."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close this end; the peer sees an end of file."""
        self._sock.close()

    def limit(self, seconds: float) -> None:
        """
        Set the limit in seconds for one `send`, or for the rest of a frame that has begun.

        Beyond it they raise BlockingIOError.
        """
        span = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._sock.setsockopt(socket.SOL_SOCKET, option, span)

    def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> bool:
        """Send one frame; return False if the peer is gone."""
        return self.send_body(encoded_message(message), descriptors)

    def send_body(self, body: bytes, descriptors: tuple[int, ...]) -> bool:
        """Send a message that is `encoded_message` already, as `send` does."""
        if len(descriptors) > _MOST_OF_A_FRAME:
            raise ValueError(f"a frame can carry at most {_MOST_OF_A_FRAME} descriptors, not {len(descriptors)}")

        frame = memoryview(_HEAD.pack(len(body), len(descriptors)) + body)
        parts = [descriptors[at : at + _MOST_DESCRIPTORS] for at in range(0, len(descriptors), _MOST_DESCRIPTORS)]
        try:
            sent = self._sock.sendmsg([frame], _rights(parts[0]) if parts else [])
            # The kernel has sent the descriptors with the first byte.
            self._sock.sendall(frame[sent:])
            for part in parts[1:]:
                self._sock.sendmsg([b"\0"], _rights(part))
        except (BrokenPipeError, ConnectionError):
            return False

        return True

    def receive(self, *, whole: bool = True) -> tuple[Message, list[int]] | None:
        """
        Return the next frame and its descriptors (close-on-exec); None if the peer is gone.

        The soft limit of open files does not apply. If the hard limit leaves no room, raise
        OSError (EMFILE); if not *whole*, return the first descriptors alone.
        """
        if self._is_lost:
            return None
        try:
            with room_for_descriptors(self._announced()):
                return self._receive(whole)
        except ConnectionError:
            return None

    def _announced(self) -> int:
        """
        Return the number of descriptors of the next frame, without taking them; 0 if its head is
        incomplete.
        """
        # The kernel drops received descriptors that have no room: so look ahead.
        head = self._sock.recv(_HEAD.size, socket.MSG_PEEK)
        return min(_HEAD.unpack(head)[1], _MOST_OF_A_FRAME) if len(head) == _HEAD.size else 0

    def _receive(self, whole: bool) -> tuple[Message, list[int]]:
        descriptors: list[int] = []
        head = b""
        try:
            while len(head) < _HEAD.size:
                head += self._with_rights(_HEAD.size - len(head), descriptors)
            size, count = _HEAD.unpack(head)
            message = self._message(size)

            # One byte after the frame stands for each further message with descriptors.
            for _ in range(_MOST_DESCRIPTORS, min(count, _MOST_OF_A_FRAME), _MOST_DESCRIPTORS):
                self._with_rights(1, descriptors)
            if whole and len(descriptors) != count:
                # The kernel silently drops descriptors above the limit.
                raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)}: raise the limit (ulimit -n)")
        except OSError:
            close_each(descriptors)
            raise

        return message, descriptors

    def _with_rights(self, size: int, descriptors: list[int]) -> bytes:
        """
        Return up to *size* bytes, and add the descriptors that come with them to *descriptors*.
        """
        space = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
        data, rights, _, _ = self._sock.recvmsg(size, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, packed in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                # A message that was cut off may end within a number.
                numbers.frombytes(packed[: len(packed) - len(packed) % numbers.itemsize])
                descriptors += numbers

        if not data:
            raise ConnectionError

        return data

    def _message(self, size: int) -> Message:
        try:
            # A larger size is that of an invalid frame, for which no memory must be taken.
            message = parse(self._exactly(size), constants=True) if size <= _LARGEST else None
        except ValueError:
            message = None
        if not isinstance(message, dict):
            self._is_lost = True
            raise ConnectionError
        return message

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._sock.recv_into(view)
            if not count:
                raise ConnectionError
            view = view[count:]
        return bytes(data)
