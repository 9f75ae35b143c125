"""
Who coordinates a job on etcd: the holder of one key, which goes when its holder falls silent.

Rules of this file: a thread performs what a `Candidacy` asks for and tells it what came of that; it decides nothing.
What a holder saves also needs the store's consent: a holder that was paused past its term, and knows nothing of it,
changes nothing. Whoever is told so ends the term, which others may not know to be over.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import zlib
from collections.abc import Callable
from typing import cast

from attrs import Factory, define, field
from typing_extensions import assert_never

from elasticlib._clock import Clock, monotonic
from elasticlib._programs import start_thread
from elasticlib.errors import RendezvousConnectionError, RendezvousError, RendezvousStateError
from elasticlib.rendezvous.protocol._exchange import ANNOUNCEMENT
from elasticlib.rendezvous.protocol._operations import Log
from elasticlib.rendezvous.stores import _candidacy as events
from elasticlib.rendezvous.stores._candidacy import PAUSE
from elasticlib.rendezvous.stores._compare_and_set import CompareAndSetExchange, key_path
from elasticlib.rendezvous.stores._keys import Hold, Keys
from elasticlib.rendezvous.stores._state_log import LeadershipLost, StateLog

_log = logging.getLogger(__name__)

_PACKED = b"zlib:"
_PACK_FROM = 64 * 1024
"""Bytes. Of 10,000 nodes with names of 70 characters the state has 3.4 MB, and 0.9 MB packed; etcd takes 1.5 MB."""
_UNPACK_TO = 256 * 1024 * 1024


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
class CompareAndSetStateLog(StateLog):
    """One key, written for as long as the term lasts."""

    _connect: Callable[[float], Keys]
    _keys: Keys
    _root: str
    _term: Term
    _version: int = 0

    def load(self) -> bytes | None:
        """What the last coordinator saved; written anew, so that its own version is out of date."""
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
        self._term.check()
        self._reconnect(self._term.left())  # the former server may be gone, where there are several
        return CompareAndSetExchange(self._keys.clone(), self._root, self._term.hold, self._term.check)

    def purge(self) -> None:
        self._term.check()
        self._check_hold()
        self._keys.clear(self._root, self._term.hold)
        self._term.last = True
        self._term.end("the job's keys were deleted")

    def lose(self, why: str) -> None:
        self._term.end(why)

    def close(self) -> None:
        self._keys.close()

    @property
    def _state(self) -> str:
        return f"{self._root}/state"

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


@define(eq=False)
class Candidate:
    """
    Stands for election in a thread of its own, again and again, until `close`.

    *on_elected* gets the `StateLog`; a `RendezvousError` of it ends the term, and others get their turn. *on_lost*
    gets the reason when the term ended in any other way than by `close` or the state log's `purge`. Both are called
    from that thread, and the key is renewed only between calls: they must be quick.
    """

    _connect: Callable[[float], Keys]
    """Makes a connection within so many seconds."""
    _root: str
    _name: str
    _ttl: float
    """Seconds until a silent holder is replaced."""
    _on_elected: Callable[[StateLog], None]
    _on_lost: Callable[[str], None]
    _clock: Clock = monotonic
    _lock: threading.Lock = field(init=False, factory=threading.Lock)
    _closing: threading.Event = field(init=False, factory=threading.Event)
    _keys: Keys | None = field(init=False, default=None)
    _term: Term | None = field(init=False, default=None)
    _candidacy: events.Candidacy = field(init=False)
    _thread: threading.Thread = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._candidacy, actions = events.Candidacy.begin(self._ttl, self._clock())
        self._thread = threading.Thread(target=self._work, args=(actions,), name="elasticlib-candidate", daemon=True)

    def start(self) -> None:
        """Begin; once."""
        start_thread(self._thread)

    def close(self, timeout: float = 2.0) -> None:
        """Stand no more; resign at once if in office. Returns when that is done, after *timeout* seconds at most."""
        for action in self._step(events.Close()):
            self._do(action)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _interrupt(self) -> None:
        with self._lock:
            self._closing.set()
            if self._term is not None:
                self._term.end("it resigned")
            elif self._keys is not None:
                self._keys.interrupt()

    def _work(self, actions: tuple[events.Action, ...]) -> None:
        try:
            while actions:
                actions = self._step(self._perform(actions))
        except Exception as error:
            _log.exception("the election failed")
            self._end_term(f"the election failed: {error!r}")
            if self._keys is not None and self._candidacy.hold is not None:
                with contextlib.suppress(RendezvousError):
                    self._keys.release(self._candidacy.hold)
            self._on_lost(f"the election failed: {error!r}")
        finally:
            with self._lock:
                keys, self._keys = self._keys, None
            if keys is not None:
                keys.close()

    def _step(self, event: events.Event) -> tuple[events.Action, ...]:
        with self._lock:
            self._candidacy, actions = self._candidacy.step(event, self._clock())
            if self._term is not None:
                self._term.until = self._candidacy.until
            return actions

    def _perform(self, actions: tuple[events.Action, ...]) -> events.Event:
        """Do it; what came of the last."""
        came: events.Event = events.Rested()
        try:
            for action in actions:
                came = self._do(action) or came
        except RendezvousError as error:
            return events.Broke(str(error))
        return came

    def _do(self, action: events.Action) -> events.Event | None:
        keys, leader = cast(Keys, self._keys), f"{self._root}/leader"  # what needs a connection comes after `Connected`
        match action:
            case events.Rest(seconds):
                return self._rest(seconds)
            case events.VoteOut(why, told):
                why = self._end_term(why)
                if told:
                    self._on_lost(why)
            case Log(level, text):
                _log.log(logging.getLevelName(level.upper()), text)
            case events.Interrupt():
                self._interrupt()
            case events.Stop():
                pass
            case events.Connect(limit):
                return self._reach(limit)
            case events.Look():
                (held,), version = keys.read([leader])
                return events.Found(version, held is not None)
            case events.Await(version, seconds):
                keys.changed(leader, version, seconds)
                return events.Changed()
            case events.Acquire(ttl):
                return events.Acquired(keys.seize(leader, self._name, ttl))
            case events.Elect(hold):
                return self._elect(keys, hold)
            case events.Renew(hold):
                return events.Renewed(keys.renew(hold))
            case events.Keep():
                keys.keep(self._root)
            case events.Release(hold):
                with contextlib.suppress(RendezvousConnectionError):
                    keys.release(hold)
            case _:
                assert_never(action)
        return None

    def _reach(self, limit: float) -> events.Event:
        keys = self._connect(limit)
        with self._lock:
            old, self._keys = self._keys, keys
            if self._closing.is_set() and self._term is None:
                keys.interrupt()
        if old is not None:
            old.close()
        return events.Connected()

    def _elect(self, keys: Keys, hold: Hold) -> events.Event:
        with self._lock:
            term = self._term = Term(hold, self._candidacy.until, self._clock)
            if self._closing.is_set():
                term.end("it resigned")
        try:
            if term.left() > 0:
                self._on_elected(CompareAndSetStateLog(self._connect, keys.clone(), self._root, term))
        except RendezvousError as error:
            self._end_term(str(error))
            return events.Declined(str(error))
        return events.Elected()

    def _rest(self, seconds: float) -> events.Event:
        term = self._term
        if term is None:
            self._closing.wait(seconds)
        elif term.wait(seconds):
            return events.Over(term.why, term.last)
        return events.Rested()

    def _end_term(self, why: str) -> str:
        """End it if there is one; why it ended, which may have come before."""
        with self._lock:
            term, self._term = self._term, None
        if term is None:
            return why
        term.end(why)
        return term.why


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
