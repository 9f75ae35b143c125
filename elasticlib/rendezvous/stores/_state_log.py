"""
What the coordinator writes down before it acts, where another node may take the coordination over.

Rules of this file: whoever holds the state log coordinates; whatever it wrote is kept for its successor, and from the
moment that there is a successor it can write nothing more. What a holder saves also needs the store's consent: one that
was paused past its term, and knows nothing of it, changes nothing.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable

from attrs import Factory, define

from elasticlib._clock import Clock
from elasticlib.errors import RendezvousConnectionError, RendezvousError, RendezvousStateError
from elasticlib.rendezvous.protocol._exchange import ANNOUNCEMENT
from elasticlib.rendezvous.stores._candidacy import PAUSE
from elasticlib.rendezvous.stores._compare_and_set import CompareAndSetExchange, key_path
from elasticlib.rendezvous.stores._keys import Hold, Keys

_PACKED = b"zlib:"
_PACK_FROM = 64 * 1024
"""Bytes. Of 10,000 nodes with names of 70 characters the state has 3.4 MB, and 0.9 MB packed; etcd takes 1.5 MB."""
_UNPACK_TO = 256 * 1024 * 1024


class LeadershipLost(RendezvousError):  # noqa: N818 - an event of the cluster rather than a fault
    """You get it when you write as the coordinator, and another node coordinates by now, or may soon."""


@define(eq=False)
class Term:
    """One holder's time in office, as the holder itself sees it; for all of its threads."""

    hold: Hold
    until: float
    """When it ends, unless it is renewed."""
    _clock: Clock
    why: str = ""
    """What ended it."""
    last: bool = False
    """Whether no other term of anybody is to follow: the job is over."""
    _over: threading.Event = Factory(threading.Event)

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
        if not self._over.is_set() and self._clock() >= self.until:
            self.end(f"the lease was not renewed for {self.hold.ttl:.3g} s")
        return 0.0 if self._over.is_set() else self.until - self._clock()

    def check(self) -> None:
        """Raise `LeadershipLost` if it is over."""
        if self.left() <= 0:
            raise LeadershipLost(f"this node no longer coordinates: {self.why}")


@define(eq=False)
class StateLog:
    """The coordinator's memory in the store, for one term of office. For one thread."""

    _connect: Callable[[float], Keys]
    _keys: Keys
    _root: str
    _term: Term
    _version: int = 0
    _state: str = Factory(lambda self: f"{self._root}/state", takes_self=True)

    def load(self) -> bytes | None:
        """
        What the last coordinator saved, None if there was none. To be called first: it is written anew, so that an
        earlier holder, whose version is out of date, can save nothing more. Raises `LeadershipLost`, and
        `RendezvousStateError` if strangers destroyed what was there (`save` works all the same).
        """
        while True:
            self._term.check()
            (item, announcement), _ = self._keys.read([self._state, key_path(self._root, ANNOUNCEMENT)])
            data = b"" if item is None else item.data
            version = self._keys.swap(self._state, data, 0 if item is None else item.version, self._term.hold)
            if version is not None:
                self._version = version
                if not data and announcement is not None:
                    raise RendezvousStateError("the coordinator's state was deleted from the store by another writer")
                return _unpack(data) if data else None
            self._check_hold()

    def save(self, data: bytes) -> None:
        """
        Replace what was saved; it is there once this returned. Outlasts short outages of the store. Raises
        `LeadershipLost`: then nothing was saved, and this term is over. Raises `RendezvousStateError` if a
        stranger changed what was there; the next `save` overwrites that.
        """
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

    def exchange(self) -> CompareAndSetExchange:
        """A new connection, whose writing and deleting raise `LeadershipLost` once the term is over."""
        self._term.check()
        self._reconnect(self._term.left())  # the former server may be gone, where there are several
        return CompareAndSetExchange(self._keys.clone(), self._root, self._term.hold, self._term.check)

    def purge(self) -> None:
        """Delete everything that the job has in the store, so that its id can be used again."""
        self._term.check()
        self._check_hold()
        self._keys.clear(self._root, self._term.hold)
        self._term.last = True
        self._term.end("the job's keys were deleted")

    def lose(self, why: str) -> None:
        """Whoever coordinates by it was turned down: the term of office is over, if it was not known to be."""
        self._term.end(why)

    def close(self) -> None:
        """Give the connection up; may come twice. The term of office goes on."""
        self._keys.close()

    def _reconnect(self, limit: float) -> None:
        keys = self._connect(limit)
        self._keys.close()
        self._keys = keys

    def _settle(self, packed: bytes, error: RendezvousConnectionError) -> int | None:
        """Nobody knows whether the last write arrived: look, and write again, while the term lasts."""
        while (left := self._term.left()) > 0:
            try:
                self._reconnect(left)
                (item,), _ = self._keys.read([self._state])
                # In this order: a successor has the key before it touches the state.
                if not self._keys.holds(self._term.hold):
                    return None
                if item is not None and item.version != self._version:
                    return item.version if item.data == packed else None
                return self._keys.swap(self._state, packed, self._version, self._term.hold)
            except RendezvousConnectionError as again:
                error = again
            self._term.wait(PAUSE)
        raise LeadershipLost(f"this node no longer coordinates: {error}") from error

    def _blame(self) -> None:
        """The state is not as we left it: a successor wrote it, or a stranger, after whom we can still write."""
        (item,), _ = self._keys.read([self._state])
        self._check_hold()
        self._version = 0 if item is None else item.version
        raise RendezvousStateError("the coordinator's state in the store was changed by another writer")

    def _check_hold(self) -> None:
        if not self._keys.holds(self._term.hold):
            self.lose("another node coordinates now")
            self._term.check()


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
