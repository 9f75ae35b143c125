"""
One node's side of the rendezvous.

Rules of this file: reports go straight into the inbox; notices are awaited by one thread, which only
enqueues them and makes `fileno` readable. The thread waits on a key that nobody else reads, so writing
to that key ends the wait: no polling, on no kind of exchange.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque

from elasticlib.errors import RendezvousClosedError, RendezvousError, RendezvousStateError
from elasticlib.rendezvous._exchange import Exchange, box_key, post
from elasticlib.rendezvous._messages import (
    Descriptor,
    Failed,
    FailureNote,
    Final,
    Join,
    Leave,
    Notice,
    Report,
    RoundEnd,
    Seat,
    Stopped,
    Succeeded,
    decode,
    encode,
)

_WAKE = b""


class Member:
    """
    The node called *node*, as it speaks with the coordinator. `close` it when done.

    Reports may come from any thread; each raises `RendezvousClosedError` after `close`.
    """

    def __init__(self, exchange: Exchange, node: str) -> None:
        self.node = node
        self._exchange = exchange
        self._notices: deque[Notice | RendezvousError] = deque()
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._turned = threading.Condition()
        self._closed = False
        self._box: int | None = None
        self._read = 0
        self._awaited: str | None = None
        self._thread = threading.Thread(target=self._watch, name="elasticlib-member", daemon=True)
        self._thread.start()

    def join(self, descriptor: Descriptor) -> None:
        """Ask for a seat in the next round. No worker of this node may run any more."""
        self._turn(self._report(Join(self.node, descriptor)))

    def failed(self, round: int, failures: tuple[FailureNote, ...]) -> None:
        """Say at once that workers failed; `stopped` follows when all are gone."""
        self._report(Failed(self.node, round, failures))

    def stopped(self, round: int, failures: tuple[FailureNote, ...] = ()) -> None:
        """Say that all workers are gone, with all that failed by themselves."""
        self._report(Stopped(self.node, round, failures))

    def succeeded(self, round: int) -> None:
        """Say that all workers ended well; `Final` or `RoundEnd` follows."""
        self._report(Succeeded(self.node, round))

    def leave(self, why: str, round: int | None = None) -> None:
        """
        Say as soon as it is known that this node goes and starts no worker any more; `Final` answers.

        Give the *round* if workers of it still run, and say `stopped` when they are gone: until then
        nobody takes their place. A node that never joined is unknown and gets no answer.
        """
        self._report(Leave(self.node, why, round))

    def fileno(self) -> int:
        """A descriptor that is readable while notices wait; it is closed by `close`."""
        return self._ready

    def take(self) -> list[Notice]:
        """All notices that wait, oldest first; never blocks. Raises what broke the watch, if anything did."""
        if self._closed:
            return []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._ready)
        taken: list[Notice] = []
        while self._notices:
            item = self._notices.popleft()
            if isinstance(item, RendezvousError):
                raise item
            taken.append(item)
        return taken

    def close(self) -> None:
        """End the watch and close `fileno`. Says nothing to the others."""
        with self._turned:
            if self._closed:
                return
            self._closed = True
        self._turn(None)
        self._thread.join()
        os.close(self._ready)

    def _report(self, report: Report) -> int:
        if self._closed:
            raise RendezvousClosedError(f"node {self.node} has closed its rendezvous: {report!r:.60} comes too late")
        data = encode(report)
        decode(data)  # what this node may not say is its own error, here and now, and nobody else's
        return post(self._exchange, data)

    def _turn(self, box: int | None) -> None:
        with self._turned:
            self._box, self._read = box, 0
            self._turned.notify()
            if self._awaited is not None:
                self._exchange.set(self._awaited, _WAKE)

    def _watch(self) -> None:
        try:
            while (key := self._next_key()) is not None:
                self._exchange.wait(key, None)
                self._accept(key)
        except RendezvousError as error:
            self._tell(error)

    def _next_key(self) -> str | None:
        with self._turned:
            while self._box is None and not self._closed:
                self._turned.wait()
            if self._box is None or self._closed:
                return None
            self._awaited = box_key(self._box, self._read)
            return self._awaited

    def _accept(self, key: str) -> None:
        with self._turned:
            data = self._exchange.get(key)
            self._exchange.delete(key)
            self._awaited = None
            # What lies in the box of an earlier Join speaks of a round that this node has done with.
            if data == _WAKE or self._box is None or key != box_key(self._box, self._read):
                return
            self._read += 1
        notice = decode(data or _WAKE)
        if not isinstance(notice, (Seat, RoundEnd, Final)):
            raise RendezvousStateError(f"{key} holds a {type(notice).__name__}, which no coordinator sends")
        self._tell(notice)

    def _tell(self, item: Notice | RendezvousError) -> None:
        self._notices.append(item)
        os.eventfd_write(self._ready, 1)
