"""
Who coordinates a job on etcd: the holder of one key, which goes when its holder falls silent.

Rules of this file: a term of office ends for its holder no later than for everybody else, since the holder
counts from when it *sent* its last renewal. What a holder saves also needs the store's consent: a holder that
was paused past its term, and knows nothing of it, changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import zlib
from collections.abc import Callable

from elasticlib._clock import Clock, monotonic
from elasticlib._programs import start_thread
from elasticlib.errors import RendezvousConnectionError, RendezvousError, RendezvousStateError
from elasticlib.rendezvous._etcd_exchange import SLICE, EtcdExchange, key_path
from elasticlib.rendezvous._etcd_keys import KEEP, Hold, Keys
from elasticlib.rendezvous._exchange import HELLO
from elasticlib.rendezvous._journal import Journal, LeadershipLost

_log = logging.getLogger(__name__)

_PAUSE = 0.2
"""Seconds between two attempts to reach a store that is away."""
_PACKED = b"zlib:"
_PACK_FROM = 64 * 1024
_UNPACK_TO = 256 * 1024 * 1024


class Term:
    """One holder's time in office, as the holder itself sees it; for all of its threads."""

    def __init__(self, hold: Hold, sent: float, clock: Clock) -> None:
        self.hold = hold
        self.why = ""
        """What ended it."""
        self.last = False
        """Whether no other term of anybody is to follow: the job is over."""
        self._clock = clock
        self._until = sent + hold.ttl
        self._over = threading.Event()

    def renewed(self, sent: float) -> None:
        """The store granted a renewal that was sent then."""
        self._until = sent + self.hold.ttl

    def end(self, why: str) -> None:
        """It is over; the first reason counts."""
        if not self._over.is_set():
            self.why = why
            self._over.set()

    def wait(self, timeout: float) -> bool:
        """Whether it is over, after *timeout* seconds at most."""
        return self._over.wait(timeout)

    def left(self) -> float:
        """Seconds until it is over, unless renewed."""
        if not self._over.is_set() and self._clock() >= self._until:
            self.end(f"the lease was not renewed for {self.hold.ttl:.3g} s")
        return 0.0 if self._over.is_set() else self._until - self._clock()

    def check(self) -> None:
        """Raise `LeadershipLost` if it is over."""
        if self.left() <= 0:
            raise LeadershipLost(f"this node coordinates no more: {self.why}")


class EtcdJournal:
    """The contract is that of `Journal`."""

    def __init__(self, connect: Callable[[float], Keys], keys: Keys, root: str, term: Term) -> None:
        self._connect = connect
        self._keys = keys
        self._root = root
        self._state = f"{root}/state"
        self._term = term
        self._version = 0

    def load(self) -> bytes | None:
        """What the last coordinator saved; written anew, so that its own version is out of date."""
        while True:
            self._term.check()
            (item, hello), _ = self._keys.read([self._state, key_path(self._root, HELLO)])
            data = b"" if item is None else item.data
            version = self._keys.swap(self._state, data, 0 if item is None else item.version, self._term.hold)
            if version is not None:
                self._version = version
                if not data and hello is not None:
                    raise RendezvousStateError("the coordinator's state was deleted from the store by somebody else")
                return _unpack(data) if data else None
            if not self._keys.holds(self._term.hold):
                self._lose()

    def save(self, data: bytes) -> None:
        """Replace what was saved."""
        packed = _pack(data)
        self._term.check()
        try:
            version = self._keys.swap(self._state, packed, self._version, self._term.hold)
        except RendezvousConnectionError as error:
            version = self._settle(packed, error)
        if version is None:
            self._blame()
        else:
            self._version = version

    def exchange(self) -> EtcdExchange:
        """A new connection, for as long as the term lasts; the journal itself goes on with the same server."""
        self._term.check()
        keys = self._connect(self._term.left())  # the former server may be gone, where there are several
        self._keys.close()
        self._keys = keys
        return EtcdExchange(keys.clone(), self._root, self._term.hold, self._term.check)

    def purge(self) -> None:
        """Delete all keys of the job."""
        self._term.check()
        if not self._keys.holds(self._term.hold):
            self._lose()
        self._keys.clear(self._root, self._term.hold)
        self._term.last = True
        self._term.end("the job's keys were deleted")

    def close(self) -> None:
        """Give the connection up."""
        self._keys.close()

    def _settle(self, packed: bytes, error: RendezvousConnectionError) -> int | None:
        """Nobody knows whether the last write arrived: look, and write again, while the term lasts."""
        while (left := self._term.left()) > 0:
            try:
                keys = self._connect(left)
                self._keys.close()
                self._keys = keys
                (item,), _ = keys.read([self._state])
                # In this order: a successor has the key before it touches the state.
                if not keys.holds(self._term.hold):
                    return None
                if item is not None and item.version != self._version:
                    return item.version if item.data == packed else None
                return keys.swap(self._state, packed, self._version, self._term.hold)
            except RendezvousConnectionError as again:
                error = again
            self._term.wait(_PAUSE)
        raise LeadershipLost(f"this node coordinates no more: {error}") from error

    def _blame(self) -> None:
        """The state is not as we left it: a successor wrote it, or a stranger, after whom we can still write."""
        (item,), _ = self._keys.read([self._state])
        if not self._keys.holds(self._term.hold):
            self._lose()
        self._version = 0 if item is None else item.version
        raise RendezvousStateError("the coordinator's state in the store was changed by somebody else")

    def _lose(self) -> None:
        self._term.end("another node coordinates by now")
        self._term.check()


class Candidate:
    """
    Stands for election in a thread of its own, again and again, until `close`.

    *on_elected* gets the `Journal`; a `RendezvousError` of it ends the term, and others get their turn. *on_lost*
    gets the reason when the term ended in any other way than by `close` or the journal's `purge`. Both are called
    from that thread, and the key is renewed only between calls: they must be quick.
    """

    def __init__(
        self,
        connect: Callable[[float], Keys],
        root: str,
        name: str,
        ttl: float,
        on_elected: Callable[[Journal], None],
        on_lost: Callable[[str], None],
        clock: Clock = monotonic,
    ) -> None:
        """*connect* makes a connection within so many seconds; *ttl*: seconds until a silent holder is replaced."""
        self._connect = connect
        self._root = root
        self._name = name
        self._ttl = ttl
        self._on_elected = on_elected
        self._on_lost = on_lost
        self._clock = clock
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._keys: Keys | None = None
        self._term: Term | None = None
        self._thread = threading.Thread(target=self._work, name="elasticlib-candidate", daemon=True)

    def start(self) -> None:
        """Begin; once."""
        start_thread(self._thread)

    def close(self, timeout: float = 2.0) -> None:
        """Stand no more; resign at once if in office. Returns when that is done, after *timeout* seconds at most."""
        with self._lock:
            self._closing.set()
            if self._term is not None:
                self._term.end("it resigned")
            elif self._keys is not None:
                self._keys.interrupt()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _work(self) -> None:
        while not self._closing.is_set():
            try:
                self._stand(self._reach(self._ttl))
            except RendezvousError as error:
                _log.info("the election begins again: %s", error)
                self._closing.wait(_PAUSE)
            except Exception as error:
                _log.exception("the election broke")
                self._on_lost(f"the election broke: {error!r}")
                return
            finally:
                self._forget()

    def _reach(self, limit: float) -> Keys:
        keys = self._connect(limit)
        with self._lock:
            old, self._keys = self._keys, keys
            if self._closing.is_set() and self._term is None:
                keys.interrupt()
        if old is not None:
            old.close()
        return keys

    def _forget(self) -> None:
        with self._lock:
            keys, self._keys = self._keys, None
        if keys is not None:
            keys.close()

    def _stand(self, keys: Keys) -> None:
        leader = f"{self._root}/leader"
        while not self._closing.is_set():
            (held,), version = keys.read([leader])
            if held is not None:
                keys.changed(leader, version, SLICE)
                continue
            sent = self._clock()
            hold = keys.seize(leader, self._name, self._ttl)
            if hold is not None:
                self._govern(keys, Term(hold, sent, self._clock))
                return

    def _govern(self, keys: Keys, term: Term) -> None:
        with self._lock:
            self._term = term
            if self._closing.is_set():
                term.end("it resigned")
        try:
            if term.left() > 0:
                self._on_elected(EtcdJournal(self._connect, keys.clone(), self._root, term))
                self._hold_on(keys, term)
                if term.last:
                    self._closing.set()
                if not self._closing.is_set():
                    self._on_lost(term.why)
        finally:
            term.end("the candidate broke")
            with self._lock:
                self._term = None
            with contextlib.suppress(RendezvousConnectionError):
                (self._keys or keys).release(term.hold)

    def _hold_on(self, keys: Keys, term: Term) -> None:
        kept = -float("inf")
        pause = term.hold.ttl / 3
        while not term.wait(pause) and term.left() > 0:
            try:
                sent = self._clock()
                if not keys.renew(term.hold):
                    term.end("the store says that the lease is over")
                    return
                term.renewed(sent)
                pause = term.hold.ttl / 3
                if time.monotonic() - kept > KEEP / 3:
                    keys.keep(self._root)
                    kept = time.monotonic()
            except RendezvousConnectionError as error:
                _log.info("the lease could not be renewed yet: %s", error)
                pause = min(_PAUSE, term.hold.ttl / 10)
                with contextlib.suppress(RendezvousConnectionError):
                    keys = self._reach(max(term.left(), _PAUSE))


def _pack(data: bytes) -> bytes:
    return _PACKED + zlib.compress(data, 1) if len(data) > _PACK_FROM or data.startswith(_PACKED) else data


def _unpack(data: bytes) -> bytes:
    if not data.startswith(_PACKED):
        return data
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(data.removeprefix(_PACKED), _UNPACK_TO)
    except zlib.error as error:
        raise RendezvousStateError(f"the coordinator's state in the store was destroyed: {error}") from error
    if not unpacker.eof:
        raise RendezvousStateError("the coordinator's state in the store was destroyed: it has no end")
    return plain
