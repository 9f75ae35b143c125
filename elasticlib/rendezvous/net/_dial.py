"""
One attempt to reach an endpoint, with a text about its outcome.

Rules of this file: no call blocks longer than its limit, whatever the other side does. Our own
sockets find out who answers. A call that cannot be interrupted runs in a thread that may be left
behind.
"""

from __future__ import annotations

import atexit
import errno
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from attrs import Factory, define

from elasticlib._clock import monotonic
from elasticlib.errors import RendezvousConnectionError
from elasticlib.processes import start_thread
from elasticlib.rendezvous.net._endpoint import is_loopback, spell
from elasticlib.rendezvous.net._resolver import Address

T = TypeVar("T")
LEFT_BEHIND = 8
"""
Attempts that may hang at once; at this number, the last one is waited for instead of a new one.
"""

AT_EXIT = 1.0
"""Seconds that the end of the program may wait for attempts that hang."""


class RefusedError(RendezvousConnectionError):
    """
    Raised when the machine answers and nobody listens at the port, at any address of the host.
    """


def probe(host: str, port: int, addresses: Sequence[Address], timeout: float) -> tuple[Address, str]:
    """
    Return the first address that accepts a connection, and this machine's own address then.

    The error says why no address accepts one.
    """
    deadline = monotonic() + timeout
    whys, refused = [], 0
    for index, address in enumerate(addresses):
        # Each gets its share of the time that is left, so that a silent address leaves time for the
        # next ones.
        limit = max(deadline - monotonic(), 0.05) / (len(addresses) - index)
        try:
            return address, _connect(address, port, limit)
        except OSError as error:
            refused += isinstance(error, ConnectionRefusedError)
            whys.append(f"{address.host}: {_explain(error, limit)}")

    # A hosts file often leads a machine's own name to loopback: then each node looks for the store
    # on itself.
    leads_to_loopback = any(is_loopback(address.host) for address in addresses)
    if leads_to_loopback and not is_loopback(host):
        whys.append(f"{host} resolves to this machine here: check its /etc/hosts")
    # Only if every address refuses is it certain that nobody listens.
    kind = RefusedError if refused == len(addresses) else RendezvousConnectionError
    raise kind(f"{spell(host, port)} cannot be reached ({'; '.join(whys)})")


@define(eq=False)
class Limited(Generic[T]):
    """
    Runs calls that cannot be interrupted; a late call continues, and its result is used if it
    succeeds.
    """

    _lock: threading.Lock = Factory(threading.Lock)
    _hanging: list[Future[T]] = Factory(list)
    """Attempts that nothing waits for any more, oldest first."""

    def run(self, call: Callable[[], T], timeout: float, silence: str) -> T:
        """
        Return the result of *call*, or raise its exception.

        Raises a `RendezvousConnectionError` with the text *silence* after *timeout* seconds.
        """
        with self._lock:
            attempt = self._begin_or_resume(call)
        wait([attempt], timeout)
        with self._lock:
            if not attempt.done():
                self._hanging.append(attempt)
                # An earlier attempt may have come through while this one was waited for.
                attempt = self._take_late_success(silence)
        return attempt.result()

    def _begin_or_resume(self, call: Callable[[], T]) -> Future[T]:
        self._hanging = [each for each in self._hanging if not _has_failed(each)]
        if len(self._hanging) >= LEFT_BEHIND:
            # So a host that stays silent for hours costs a bounded number of threads.
            return self._hanging.pop()
        return _begin(call)

    def _take_late_success(self, silence: str) -> Future[T]:
        """
        Return the newest attempt that succeeded late; raise an error with *silence* if none did.
        """
        for each in reversed(self._hanging):
            if each.done() and not _has_failed(each):
                self._hanging.remove(each)
                return each
        raise RendezvousConnectionError(silence)


_unfinished: set[Future[Any]] = set()


def _has_failed(attempt: Future[Any]) -> bool:
    return attempt.done() and attempt.exception() is not None


def _begin(call: Callable[[], T]) -> Future[T]:
    attempt = Future[T]()

    def run() -> None:
        try:
            attempt.set_result(call())
        # The waiting thread must get any exception.
        except BaseException as error:
            attempt.set_exception(error)
        _unfinished.discard(attempt)

    _unfinished.add(attempt)
    start_thread(threading.Thread(target=run, name="elasticlib-dial", daemon=True))
    return attempt


@atexit.register
def _let_attempts_end() -> None:
    # A thread that returns from C++ while the interpreter ends aborts the process. Most attempts
    # end soon; the others hang in the kernel, and will not return in that moment.
    wait(list(_unfinished), AT_EXIT)


def _connect(address: Address, port: int, limit: float) -> str:
    """Return the local address of a connection, which is closed again."""
    with socket.socket(address.family, socket.SOCK_STREAM) as sock:
        sock.settimeout(limit)
        sock.connect(address.place(port))
        if sock.getsockname() == sock.getpeername():
            # The kernel may choose the very port of the endpoint as the local one, and connect the
            # socket to itself.
            raise ConnectionRefusedError
        return str(sock.getsockname()[0])


def _explain(error: OSError, limit: float) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "refused, no process listens there (yet)"
    if isinstance(error, TimeoutError):
        return f"no answer within {limit:.1f} s, the machine is down or a firewall filters the port"
    why = os.strerror(error.errno or errno.EINVAL).lower()
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN):
        return f"no route to it ({why})"
    return why
