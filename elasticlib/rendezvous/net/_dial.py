"""
One attempt to reach an endpoint, and a text that says what came of it.

Rules of this file: nothing here blocks longer than it was allowed to, whatever the other side does: sockets of
our own find out who answers, and what cannot be interrupted runs in a thread that may be left behind.
"""

from __future__ import annotations

import atexit
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from attrs import Factory, define, frozen

from elasticlib._programs import start_thread
from elasticlib.errors import RendezvousConnectionError
from elasticlib.rendezvous.net._endpoint import is_loopback, spell
from elasticlib.rendezvous.net._resolver import Address

T = TypeVar("T")
LEFT_BEHIND = 8
"""Attempts that may hang at once; with so many, the last one is waited for instead of a new one."""

AT_EXIT = 1.0
"""Seconds that the end of the program may wait for attempts that hang."""


class RefusedError(RendezvousConnectionError):
    """You get it when the machine is there and nobody listens at the port, at any address of the host."""


@frozen
class Answer:
    """Who answered."""

    address: Address
    """Numeric address of the other side."""
    local: str
    """Address by which this machine reached it."""


def probe(host: str, port: int, addresses: Sequence[Address], timeout: float) -> Answer:
    """The first of the addresses that accepts a connection; raises `RendezvousConnectionError` saying why none."""
    deadline = time.monotonic() + timeout
    whys, refused = [], 0
    for index, address in enumerate(addresses):
        limit = max(deadline - time.monotonic(), 0.05) / (len(addresses) - index)
        code, local = _connect(address, port, limit)
        if code == 0:
            return Answer(address, local)
        refused += code == errno.ECONNREFUSED
        whys.append(f"{address.host}: {_explain(code, limit)}")
    if any(is_loopback(address.host) for address in addresses) and not is_loopback(host):
        whys.append(f"{host} resolves to this machine itself here: check its /etc/hosts")
    kind = RefusedError if refused == len(addresses) else RendezvousConnectionError
    raise kind(f"{spell(host, port)} cannot be reached ({'; '.join(whys)})")


@define(eq=False)
class Limited(Generic[T]):
    """Runs what cannot be interrupted; what did not end in time goes on, and is used when it ends well later."""

    _lock: threading.Lock = Factory(threading.Lock)
    _hanging: list[_Attempt[T]] = Factory(list)
    """Attempts that nobody waits for any more, oldest first."""

    def run(self, call: Callable[[], T], timeout: float) -> T:
        """What *call* returns or raises; raises `TimeoutError` when that takes more than *timeout* seconds."""
        with self._lock:
            self._hanging = [each for each in self._hanging if each.error is None]
            mine = self._hanging.pop() if len(self._hanging) >= LEFT_BEHIND else _Attempt(call)
        mine.done.wait(timeout)
        with self._lock:
            if not mine.done.is_set():
                self._hanging.append(mine)
                late = [each for each in self._hanging if each.done.is_set() and each.error is None]
                if not late:
                    raise TimeoutError
                mine = late[-1]
                self._hanging.remove(mine)
        if mine.error is not None:
            raise mine.error
        return mine.result.pop()


@define(eq=False)
class _Attempt(Generic[T]):
    call: Callable[[], T]
    done: threading.Event = Factory(threading.Event)
    error: BaseException | None = None
    result: list[T] = Factory(list)

    def __attrs_post_init__(self) -> None:
        _unfinished.add(self)
        start_thread(threading.Thread(target=self._run, name="elasticlib-dial", daemon=True))

    def _run(self) -> None:
        try:
            self.result.append(self.call())
        except BaseException as error:
            self.error = error
        self.done.set()
        _unfinished.discard(self)


_unfinished: set[_Attempt[Any]] = set()


@atexit.register
def _let_attempts_end() -> None:
    # A thread that comes back from C++ while the interpreter ends aborts the process. Most attempts end soon;
    # the others hang in the kernel, and will not come back in that moment.
    deadline = time.monotonic() + AT_EXIT
    for attempt in list(_unfinished):
        attempt.done.wait(max(0.0, deadline - time.monotonic()))


def _connect(address: Address, port: int, limit: float) -> tuple[int, str]:
    """(0, local address), or (errno, '')."""
    try:
        with socket.socket(address.family, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            code = sock.connect_ex(address.place(port))
            if code == errno.EINPROGRESS:
                poll = select.poll()
                poll.register(sock, select.POLLOUT)
                if not poll.poll(limit * 1000):
                    return errno.ETIMEDOUT, ""
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code == 0 and sock.getsockname() == sock.getpeername():
                return errno.ECONNREFUSED, ""  # the kernel connected a free port to itself
            return code, str(sock.getsockname()[0]) if code == 0 else ""
    except OSError as error:
        return error.errno or errno.EINVAL, ""


def _explain(code: int, limit: float) -> str:
    if code == errno.ECONNREFUSED:
        return "refused, no process listens there (yet)"
    if code == errno.ETIMEDOUT:
        return f"no answer within {limit:.1f} s, the machine is down or a firewall filters the port"
    if code in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN):
        return f"no route to it ({os.strerror(code).lower()})"
    return os.strerror(code).lower()
