"""
Who coordinates a job on etcd: the holder of one key, which goes when its holder falls silent.

Rules of this file: a thread performs what a `Candidacy` asks for and tells it what came of that; it decides nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import cast

from attrs import define, field
from typing_extensions import assert_never

from elasticlib._clock import Clock, monotonic
from elasticlib._programs import start_thread
from elasticlib.errors import RendezvousConnectionError, RendezvousError
from elasticlib.rendezvous.protocol._operations import Log
from elasticlib.rendezvous.stores import _candidacy as events
from elasticlib.rendezvous.stores._keys import Hold, Keys
from elasticlib.rendezvous.stores._state_log import StateLog, Term

_log = logging.getLogger(__name__)


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
        self._candidacy = events.Candidacy(self._ttl)
        self._thread = threading.Thread(target=self._work, name="elasticlib-candidate", daemon=True)

    def start(self) -> None:
        """Begin; once."""
        start_thread(self._thread)

    def close(self, timeout: float = 2.0) -> None:
        """Stand no more; resign at once if in office. Returns when that is done, after *timeout* seconds at most."""
        with self._lock:
            self._candidacy = self._candidacy.close()
            self._closing.set()
            if self._term is not None:
                self._term.end("it resigned")
            elif self._keys is not None:
                self._keys.interrupt()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _work(self) -> None:
        try:
            actions = self._step(events.Done())
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
        came: events.Event = events.Done()
        try:
            for action in actions:
                came = self._do(action) or came
        except RendezvousError as error:
            return events.Broke(str(error))
        return came

    def _do(self, action: events.Action) -> events.Event | None:
        keys, leader = cast(Keys, self._keys), f"{self._root}/leader"  # what needs a connection comes after `Connect`
        match action:
            case events.Rest(seconds):
                return self._rest(seconds)
            case events.VoteOut(why, told):
                why = self._end_term(why)
                if told:
                    self._on_lost(why)
            case Log(level, text):
                _log.log(logging.getLevelName(level.upper()), text)
            case events.Connect(limit):
                self._reach(limit)
            case events.Look():
                (held,), version = keys.read([leader])
                return events.Found(version, held is not None)
            case events.Await(version, seconds):
                keys.changed(leader, version, seconds)
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

    def _reach(self, limit: float) -> None:
        keys = self._connect(limit)
        with self._lock:
            old, self._keys = self._keys, keys
            if self._closing.is_set() and self._term is None:
                keys.interrupt()
        if old is not None:
            old.close()

    def _elect(self, keys: Keys, hold: Hold) -> events.Event:
        with self._lock:
            term = self._term = Term(hold, self._candidacy.until, self._clock)
            if self._closing.is_set():
                term.end("it resigned")
        try:
            if term.left() > 0:
                self._on_elected(StateLog(self._connect, keys.clone(), self._root, term))
        except RendezvousError as error:
            self._end_term(str(error))
            return events.Declined(str(error))
        return events.Elected()

    def _rest(self, seconds: float) -> events.Event | None:
        term = self._term
        if term is None:
            self._closing.wait(seconds)
        elif term.wait(seconds):
            return events.Over(term.why, term.last)
        return None

    def _end_term(self, why: str) -> str:
        """End it if there is one; why it ended, which may have come before."""
        with self._lock:
            term, self._term = self._term, None
        if term is None:
            return why
        term.end(why)
        return term.why
