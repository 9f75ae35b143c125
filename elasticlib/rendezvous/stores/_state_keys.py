"""
Keys of a job in a `RendezvousBackend`: any store of one state, with compare and set, can carry a
job.

(torch: ``torch.distributed.elastic.rendezvous.dynamic_rendezvous``)

Rules of this file: every change is one conditional write of the whole state, so that related values
change together. The backend is called by one thread at a time. It cannot report changes: a waiting
thread polls, with pauses that grow with the time waited, and one look serves all waiting threads.

A state with fewer changes than a known one is not believed: somebody put it back, or it was read
from a copy. A holder is gone when its renewals stand still for its time to live, by the reader's
clock.
"""

from __future__ import annotations

import abc
import random
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from attrs import define, field

from elasticlib._clock import Clock, monotonic
from elasticlib.errors import RendezvousConnectionError, RendezvousError
from elasticlib.rendezvous.stores._election import LeadershipLost
from elasticlib.rendezvous.stores._keys import KeyFound, Keys, RenewedKey
from elasticlib.rendezvous.stores._state_document import Document, KeyLease, decode_document

SHORTEST, LONGEST = 0.01, 1.0
"""Bounds, in seconds, of the pause between two looks of a waiting thread."""
_SHARED = 0.9
"""Share of its pause within which a waiting thread uses the look of another thread."""
_REMEMBERED = 64
"""Number of waits whose duration is remembered."""
_COLLISION = 0.005
"""
Seconds of the first pause at most, after another write came first; twice that after the next one.
"""
_COLLISIONS = 6

_T = TypeVar("_T")
Token: TypeAlias = Any
"""A version of the state."""


class RendezvousBackend(abc.ABC):
    """One state, for all nodes of the same job."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Return the name of the backend."""

    @abc.abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """
        Return the state and its token; None if nothing was written yet.

        Raises `RendezvousConnectionError` when the store fails, and `RendezvousStateError` when
        such a backend did not write its content.
        """

    @abc.abstractmethod
    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """
        Write *state* if the present one is that of *token*; without a token, if nothing was written
        yet.

        Return the state that is stored then, its token, and whether this call wrote it. Return None
        if nothing was written and nothing is stored. Raises as `get_state`.
        """


@define(eq=False)
class SharedState:
    """The state as all connections of this program see it; each call may block for as long as *backend* does."""

    backend: RendezvousBackend
    clock: Clock = monotonic
    longest: float = LONGEST
    """Longest pause in seconds between two looks, when nothing has come for long."""
    turned: threading.Condition = field(init=False, factory=threading.Condition)
    """Notified of every change that this program makes or sees."""
    _lock: threading.Lock = field(init=False, factory=threading.Lock)
    _data: bytes | None = field(init=False, default=None)
    _token: Token | None = field(init=False, default=None)
    _document: Document = field(init=False, factory=Document)
    _looked: float = field(init=False, default=-float("inf"))
    _sightings: dict[tuple[KeyFound, KeyLease], float] = field(init=False, factory=dict)
    """Held keys, and since when their renewals stand still."""
    _shown: tuple[bytes | None, frozenset[str]] = field(init=False, default=(None, frozenset()))
    _views: int = field(init=False, default=0)
    _still: dict[tuple[str, bool], tuple[object, float]] = field(init=False, factory=dict)

    def read(self, max_age: float = 0.0) -> tuple[Document, int]:
        """
        Return the state as it was at most *max_age* seconds ago, without keys whose holders are
        gone.

        Also return a number that grows when any of that changes: a holder may disappear without a
        write.
        """
        with self._lock:
            is_old = self.clock() - self._looked > max_age
            if is_old or not max_age:
                self._look()
            return self._present(), self._views

    def pause(self, path: str, folder: bool, part: object) -> float:
        """
        Return the seconds until a thread that waits for another *part* at *path* must look again.

        They are as many as the part has been the same. A wait that was cut short and resumed is one
        wait.
        """
        now = self.clock()
        with self._lock:
            before, since = self._still.pop((path, folder), (part, now))
            if before != part:
                since = now
            self._still[path, folder] = part, since
            if len(self._still) > _REMEMBERED:
                # Forget the oldest wait.
                del self._still[next(iter(self._still))]

        return min(max(now - since, SHORTEST), self.longest)

    def change(self, step: Callable[[Document], Document | None]) -> Document | None:
        """
        Write the document that *step* makes of the present one, and return it; None if *step*
        returns None.

        *step* is called again when another node was faster.
        """
        with self._lock:
            collisions = 0
            self._look()
            while True:
                before = self._present()
                after = step(before)
                if after is None or after is before:
                    # Nothing changed, so nothing is written.
                    return after
                if self._write(after):
                    return after
                # At random, or two nodes that collided would do so again.
                collisions = min(collisions + 1, _COLLISIONS)
                with self.turned:
                    self.turned.wait(random.uniform(0.0, _COLLISION * 2**collisions))

    def _look(self) -> None:
        began = self.clock()
        self._take(_answer_of(self.backend.get_state))
        self._looked = began

    def _write(self, document: Document) -> bool:
        data = document.encode()
        reply = _answer_of(lambda: self.backend.set_state(data, self._token))
        if reply is None:
            self._take(None)
            return False
        present, token, is_ours = reply
        self._take((present, token))
        return is_ours

    def _take(self, found: tuple[bytes, Token] | None) -> None:
        """Note the state that the backend has."""
        data, token = (None, None) if found is None else found
        if data is None or data != self._data:
            document = Document() if data is None else decode_document(data)
            self._check_revision(document)
            self._document, self._data = document, data
            with self.turned:
                self.turned.notify_all()

        self._token = token
        now = self.clock()
        sightings = {}
        for path, lease in self._document.leases.items():
            sighting = self._document.items[path], lease
            # Each renewal makes another lease, whose time begins now.
            sightings[sighting] = self._sightings.get(sighting, now)

        self._sightings = sightings

    def _check_revision(self, document: Document) -> None:
        # A copy that lags behind catches up; if somebody put an old state back, contact stays lost.
        if document.rev < self._document.rev:
            name = self.backend.name
            why = f"the state in {name} went back from revision {self._document.rev} to {document.rev}"
            raise RendezvousConnectionError(f"{why}: it is stale")

    def _present(self) -> Document:
        """Return the state without the keys whose holders were not seen for their time to live."""
        now = self.clock()
        gone = frozenset(item.path for (item, lease), since in self._sightings.items() if now - since > lease.ttl)
        if self._shown != (self._data, gone):
            self._shown = (self._data, gone)
            self._views += 1
        if not gone:
            return self._document
        return self._document.hiding(gone)


@define(eq=False)
class StateKeys(Keys):
    """`Keys` in a `SharedState`; a hold is always checked in the same write."""

    _all: SharedState
    _interrupted: bool = field(init=False, default=False)
    _closed: bool = field(init=False, default=False)

    @property
    def _state(self) -> SharedState:
        if self._closed:
            raise RendezvousConnectionError(
                f"the connection to the rendezvous backend {self._all.backend.name!r} is closed"
            )
        return self._all

    def read(self, paths: Sequence[str]) -> tuple[list[KeyFound | None], int]:
        document, view = self._state.read()
        return [document.items.get(path) for path in paths], view

    def write(self, values: Mapping[str, bytes], hold: RenewedKey | None = None) -> None:
        self._change(hold, lambda document: document.put(values))

    def append(self, folder: str, data: bytes) -> None:
        self.write({f"{folder}/{uuid.uuid4().hex}": data})

    def entries(self, folder: str, after: int) -> tuple[list[KeyFound], int]:
        document, view = self._state.read()
        found = [document.items[path] for path in document.below(folder)]
        return sorted((item for item in found if item.born > after), key=lambda item: item.born), view

    def swap(self, path: str, data: bytes, version: int, hold: RenewedKey | None = None) -> int | None:
        def step(document: Document) -> Document | None:
            item = document.items.get(path)
            present = 0 if item is None else item.version
            if present != version or not _is_ours(document, hold):
                return None
            return document.put({path: data})

        after = self._state.change(step)
        return None if after is None else after.rev

    def delete(self, paths: Sequence[str], hold: RenewedKey | None = None) -> None:
        self._change(hold, lambda document: document.without(set(paths)))

    def clear(self, folder: str, hold: RenewedKey | None = None) -> None:
        self._change(hold, lambda document: document.without(document.below(folder)))

    def changed(self, path: str, since: int, timeout: float, folder: bool = False) -> None:
        state = self._state
        deadline = state.clock() + timeout
        document, view = state.read(state.longest)
        if view != since:
            # Changes in between are unknown: the caller looks again.
            return

        before = _part(document, path, folder)
        while not self._interrupted and (left := deadline - state.clock()) > 0:
            pause = state.pause(path, folder, before)
            with state.turned:
                if not self._interrupted:
                    state.turned.wait(min(pause, left))
            document, _ = state.read(_SHARED * pause)
            if _part(document, path, folder) != before:
                return

    def seize(self, path: str, name: str, ttl: float) -> RenewedKey | None:
        token = f"{name}/{uuid.uuid4().hex[:8]}"

        def step(document: Document) -> Document | None:
            if path in document.items:
                return None
            return document.hold(path, token.encode(), ttl)

        after = self._state.change(step)
        if after is None:
            return None

        return RenewedKey(path, token, after.rev, 0, ttl)

    def renew(self, hold: RenewedKey) -> bool:
        return self._change_if_ours(hold, lambda document: document.renew(hold.path))

    def holds(self, hold: RenewedKey) -> bool:
        document, _ = self._state.read()
        return _is_ours(document, hold)

    def release(self, hold: RenewedKey) -> None:
        self._change_if_ours(hold, lambda document: document.without({hold.path}))

    def keep(self, folder: str) -> None:
        """Do nothing: the state stays for as long as its backend keeps it."""

    def clone(self) -> StateKeys:
        return StateKeys(self._all)

    def interrupt(self) -> None:
        self._interrupted = True
        with self._all.turned:
            self._all.turned.notify_all()

    def close(self) -> None:
        self._closed = True
        self.interrupt()

    def _change_if_ours(self, hold: RenewedKey | None, change: Callable[[Document], Document]) -> bool:

        def step(document: Document) -> Document | None:
            if not _is_ours(document, hold):
                return None
            return change(document)

        return self._state.change(step) is not None

    def _change(self, hold: RenewedKey | None, step: Callable[[Document], Document]) -> None:
        if not self._change_if_ours(hold, step):
            raise LeadershipLost("another node coordinates now")


def _part(document: Document, path: str, folder: bool) -> object:
    if folder:
        return {(each, document.items[each].version) for each in document.below(path)}
    item = document.items.get(path)
    if item is None:
        return None
    return item.version


def _is_ours(document: Document, hold: RenewedKey | None) -> bool:
    if hold is None:
        return True
    item = document.items.get(hold.path)
    return item is not None and item.data == hold.token.encode()


def _answer_of(call: Callable[[], _T]) -> _T:
    """
    Return the backend's answer; turn any exception of it into an error that a rendezvous knows.
    """
    try:
        return call()
    except RendezvousError:
        raise
    # The backend may be a user's code and raise anything.
    except Exception as error:
        raise RendezvousConnectionError(f"the backend failed: {type(error).__name__}: {error}") from error
