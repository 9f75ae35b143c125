"""
Sends a launcher's messages to its sidecar, and regular signs of life.

Rules of this file: no call blocks. A thread sends the messages that cannot go at once. It ends with
the process at the other end, or when the last message is sent.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections import deque

from elasticlib.processes import Channel, Link, encoded_message, start_thread, takes_more

LIMIT = 5
"""Seconds that the thread waits for a process that was stopped."""
_ALIVE = encoded_message({"op": "alive"})
_SHORT = 16_000
"""Bytes of a frame that are sent from the caller's own thread."""


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
    ours._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", LIMIT, 0))
    return ours, theirs
