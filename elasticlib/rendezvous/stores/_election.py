"""
A job over keys that its nodes share: the election of the coordinator, its log of state, and the
exchange. Any node may become the coordinator.

    <prefix>/job_<run id>/leader   the coordinator's name; ends with its holder's lease
                          state    the coordinator's state
                          inbox/*  messages, in the order of their creation
                          keys/*   everything else that an exchange writes

Rules of this file: the coordinator is the holder of one key, which disappears when its holder falls
silent. A thread performs the actions of a `Candidacy` and returns their outcomes; it decides
nothing. The state log keeps a holder's writes for its successor. Once there is a successor, the
holder can write nothing more. A save also needs the store's consent: a holder that was paused past
its term, without knowing that, changes nothing.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import math
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from attrs import Factory, define, evolve, field
from typing_extensions import assert_never

from elasticlib._clock import Clock, monotonic
from elasticlib.errors import RendezvousConnectionError, RendezvousError, RendezvousStateError
from elasticlib.processes import start_thread
from elasticlib.rendezvous.protocol._exchange import ANNOUNCEMENT, NOTHING, Exchange, Posted
from elasticlib.rendezvous.protocol._operations import Log
from elasticlib.rendezvous.stores import _candidacy as events
from elasticlib.rendezvous.stores._keys import KeyFound, Keys, RenewedKey, component

_log = logging.getLogger(__name__)
_PACKED = b"zlib:"
_PACK_FROM = 64 * 1024
"""
Bytes of a state from which on it is packed.

For 10,000 nodes with names of 70 characters a state has 3.4 MB, and 0.9 MB packed; etcd takes 1.5
MB.
"""
_UNPACK_TO = 256 * 1024 * 1024


class LeadershipLost(RendezvousError):  # noqa: N818 - an event of the cluster rather than a fault
    """Raised for a write as the coordinator when another node coordinates by now, or may soon."""


@define(eq=False)
class LeaderTerm:
    """One holder's term as the coordinator, from the holder's view; for all of its threads."""

    hold: RenewedKey
    until: float
    """End of the term, unless it is renewed."""
    _clock: Clock
    why: str = ""
    """The reason for its end."""
    last: bool = False
    """True if no other term of any node may follow: the job is over."""
    _over: threading.Event = Factory(threading.Event)

    def end(self, why: str) -> None:
        """End it; the first reason counts."""
        if not self._over.is_set():
            # In this order: a thread that sees the end reads the reason.
            self.why = why
            self._over.set()

    def wait(self, timeout: float) -> bool:
        """Return whether it is over, after *timeout* seconds at most."""
        return self._over.wait(timeout)

    def left(self) -> float:
        """Return the seconds until it is over, unless renewed."""
        if self._over.is_set():
            return 0.0
        left = self.until - self._clock()
        if left > 0:
            return left
        self.end(f"the lease was not renewed for {self.hold.ttl:.3g} s")
        return 0.0

    def check(self) -> None:
        """Raise `LeadershipLost` if it is over."""
        if self.left() <= 0:
            raise LeadershipLost(f"this node no longer coordinates: {self.why}")


@define(eq=False)
class StateLog:
    """The coordinator's memory in the store, for one term. For one thread."""

    _connect: Callable[[float], Keys]
    _keys: Keys
    _root: str
    _term: LeaderTerm
    _version: int = 0
    _state: str = Factory(lambda self: f"{self._root}/state", takes_self=True)

    def load(self) -> bytes | None:
        """
        Return the saved state of the last coordinator, None if there was none. Call it first.

        The state is written again, so that an earlier holder, whose version is out of date, can
        save nothing more. Raises `LeadershipLost`, and `RendezvousStateError` if strangers
        destroyed the state (`save` works all the same).
        """
        while True:
            self._term.check()
            (item, announcement), _ = self._keys.read([self._state, key_path(self._root, ANNOUNCEMENT)])
            data = b"" if item is None else item.data
            found_version = 0 if item is None else item.version
            version = self._keys.swap(self._state, data, found_version, self._term.hold)
            if version is not None:
                break
            # If the lease is still ours, an earlier holder saved in between: look again.
            self._check_hold()

        self._version = version
        if data:
            return _unpack(data)

        # A coordinator saves before it greets.
        if announcement is not None:
            raise RendezvousStateError("the coordinator's state was deleted from the store by another writer")

        return None

    def save(self, data: bytes) -> None:
        """
        Replace the saved data; it is in the store once this returned. Outlasts short outages of the
        store.

        Raises `LeadershipLost` if this term is over; then nothing was saved. Raises
        `RendezvousStateError` if a stranger changed the saved data; the next `save` overwrites
        that.
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
        """
        Return a new connection, whose writing and deleting raise `LeadershipLost` once the term is
        over.
        """
        self._term.check()
        # Of several servers the one used before may be gone.
        self._reconnect(self._term.left())
        return CompareAndSetExchange(self._keys.clone(), self._root, self._term.hold, self._term.check)

    def purge(self) -> None:
        """Delete everything that the job has in the store, so that its id can be used again."""
        self._term.check()
        self._check_hold()
        # The lease is checked again within the transaction: a successor's keys must not be deleted.
        self._keys.clear(self._root, self._term.hold)
        self._term.last = True
        self._term.end("the job's keys were deleted")

    def lose(self, why: str) -> None:
        """End the term, if it is not over: a write of its coordinator was refused."""
        self._term.end(why)

    def close(self) -> None:
        """Give the connection up; may be called twice. The term continues."""
        self._keys.close()

    def _reconnect(self, limit: float) -> None:
        keys = self._connect(limit)
        self._keys.close()
        self._keys = keys

    def _settle(self, packed: bytes, error: RendezvousConnectionError) -> int | None:
        """Find out whether the last write arrived, and write again if not, during the term."""
        while (left := self._term.left()) > 0:
            try:
                self._reconnect(left)
                return self._write_again(packed)
            except RendezvousConnectionError as again:
                error = again
            self._term.wait(events.PAUSE)
        raise LeadershipLost(f"this node no longer coordinates: {error}") from error

    def _write_again(self, packed: bytes) -> int | None:
        """Return the version of the state once it is *packed*; None if another writer changed it."""
        (item,), _ = self._keys.read([self._state])
        # In this order: a successor has the key before it touches the state.
        if not self._keys.holds(self._term.hold):
            return None
        if item is None or item.version == self._version:
            return self._keys.swap(self._state, packed, self._version, self._term.hold)
        has_arrived = item.data == packed
        return item.version if has_arrived else None

    def _blame(self) -> None:
        """Raise the error for a state that a successor or a stranger has changed."""
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
    Stands for election in a separate thread, repeatedly, until `close`.

    *on_elected* gets the `StateLog`; if it raises a `RendezvousError`, the term ends, and others
    get their turn. *on_lost* gets the reason when the term ended in any other way than by `close`
    or the state log's `purge`. Both are called from that thread, and the key is only renewed
    between calls: they must be quick.
    """

    _connect: Callable[[float], Keys]
    """Makes a connection within a time limit in seconds."""
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
    _term: LeaderTerm | None = field(init=False, default=None)
    _candidacy: events.Candidacy = field(init=False)
    _thread: threading.Thread = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._candidacy = events.Candidacy(self._ttl)
        self._thread = threading.Thread(target=self._work, name="elasticlib-candidate", daemon=True)

    def start(self) -> None:
        """Start the thread; once."""
        start_thread(self._thread)

    def close(self, timeout: float = 2.0) -> None:
        """
        Stand no more; resign at once if this node leads. Return when that is done, after at most
        *timeout* seconds.
        """
        with self._lock:
            self._candidacy = self._candidacy.close()
            self._closing.set()
            if self._term is not None:
                self._term.end("it resigned")
            # The thread may wait in the store for the end of another node's term.
            elif self._keys is not None:
                self._keys.interrupt()

        # Callbacks run in that thread, and may close: a thread cannot wait for itself.
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _work(self) -> None:
        try:
            actions = self._step(events.Done())
            while actions:
                actions = self._step(self._perform(actions))
        except Exception as error:
            _log.exception("the election failed")
            self._fail(f"the election failed: {error!r}")
        finally:
            with self._lock:
                keys, self._keys = self._keys, None
            if keys is not None:
                keys.close()

    def _fail(self, why: str) -> None:
        self._end_term(why)
        hold = self._candidacy.hold
        if self._keys is not None and hold is not None:
            with contextlib.suppress(RendezvousError):
                # Otherwise the other nodes would wait for the end of the lease.
                self._keys.release(hold)
        self._on_lost(why)

    def _step(self, event: events.Event) -> tuple[events.Action, ...]:
        with self._lock:
            self._candidacy, actions = self._candidacy.step(event, self._clock())
            if self._term is not None:
                self._term.until = self._candidacy.until
            return actions

    def _perform(self, actions: tuple[events.Action, ...]) -> events.Event:
        """Perform the actions in their order; return the outcome of the last."""
        outcome: events.Event = events.Done()
        try:
            for action in actions:
                outcome = self._do(action) or outcome
        except RendezvousError as error:
            return events.ConnectionBroke(str(error))
        return outcome

    def _do(self, action: events.Action) -> events.Event | None:
        match action:
            case events.ConnectToStore(limit):
                self._reach(limit)
            case events.Rest(seconds):
                return self._rest(seconds)
            case events.StepDown(why, is_news):
                self._step_down(why, is_news)
            case Log(level, text):
                _log.log(logging.getLevelName(level.upper()), text)
            case _:
                # All others come after `ConnectToStore`.
                return self._do_connected(action, cast(Keys, self._keys))

        return None

    def _do_connected(self, action: events.Connected, keys: Keys) -> events.Event | None:
        leader = f"{self._root}/leader"
        match action:
            case events.FindLeader():
                (leader_item,), version = keys.read([leader])
                return events.Found(version, leader_item is not None)
            case events.Await(version, seconds):
                keys.changed(leader, version, seconds)
            case events.Acquire(ttl):
                return events.Acquired(keys.seize(leader, self._name, ttl))
            case events.Lead(hold):
                return self._lead(keys, hold)
            case events.Renew(hold):
                return events.Renewed(keys.renew(hold))
            case events.Keep():
                keys.keep(self._root)
            case events.ReleaseLeadership(hold):
                with contextlib.suppress(RendezvousConnectionError):
                    # Out of reach, the store ends the lease in time.
                    keys.release(hold)
            case _:
                assert_never(action)

        return None

    def _step_down(self, why: str, is_news: bool) -> None:
        why = self._end_term(why)
        if is_news:
            self._on_lost(why)

    def _reach(self, limit: float) -> None:
        keys = self._connect(limit)
        with self._lock:
            old, self._keys = self._keys, keys
            # `close` interrupted the old connection; a leader keeps this one to release its lease.
            if self._closing.is_set() and self._term is None:
                keys.interrupt()
        if old is not None:
            old.close()

    def _lead(self, keys: Keys, hold: RenewedKey) -> events.Event:
        with self._lock:
            term = self._term = LeaderTerm(hold, self._candidacy.until, self._clock)
            # `close` may have come between the step and this term, which it did not know.
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
        """
        End the term if there is one; return the reason for its end, which may have come before.
        """
        with self._lock:
            term, self._term = self._term, None
        if term is None:
            return why
        term.end(why)
        return term.why


# The job's exchange over the same keys.


def key_path(root: str, key: str) -> str:
    """Return the path of an exchange's key."""
    return f"{root}/keys/{component(key)}"


@define(eq=False)
class CompareAndSetExchange(Exchange):
    """One connection; with a *hold*, writing and deleting need it, and *check* is called before."""

    _keys: Keys
    _root: str
    _hold: RenewedKey | None = None
    _check: Callable[[], None] = lambda: None
    _received: int = field(init=False, default=0)
    _found: tuple[str, bytes] | None = field(init=False, default=None)
    """The key and value that the last wait has found, until they are read."""
    _paths: dict[int, str] = field(init=False, factory=dict)

    def post(self, data: bytes, values: Mapping[str, bytes] = NOTHING) -> None:
        self._keys.append(f"{self._root}/inbox", data)
        if values:
            self.write(values)

    def receive(self, timeout: float | None) -> Sequence[Posted]:
        inbox = f"{self._root}/inbox"
        found = self._await(lambda: self._keys.entries(inbox, self._received), inbox, timeout, folder=True)
        for item in found:
            self._received = item.born
            self._paths[item.born] = item.path
        return [Posted(item.born, item.data) for item in found]

    def discard(self, entries: Sequence[Posted]) -> None:
        self._check()
        paths = [self._paths.pop(entry.number) for entry in entries if entry.number in self._paths]
        if paths:
            self._keys.delete(paths, self._hold)

    def write(self, values: Mapping[str, bytes]) -> None:
        self._check()
        self._found = None
        if values:
            self._keys.write({key_path(self._root, key): data for key, data in values.items()}, self._hold)

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        paths = [key_path(self._root, key) for key in keys]
        found, self._found = self._found, None
        # A waiting thread reads the key next: one request for both.
        if found is not None and paths == [found[0]]:
            return [found[1]]
        items, _ = self._keys.read(paths)
        return [None if item is None else item.data for item in items]

    def wait(self, key: str, timeout: float | None) -> bool:
        path = key_path(self._root, key)
        self._found = None
        found = self._await(lambda: self._keys.read([path]), path, timeout, folder=False)
        if not found:
            return False
        self._found = (path, found[0].data)
        return True

    def delete(self, keys: Sequence[str]) -> None:
        self._check()
        self._found = None
        if keys:
            self._keys.delete([key_path(self._root, key) for key in keys], self._hold)

    def clear_foreign(self) -> None:
        """Do nothing: workers never share etcd."""

    def clone(self) -> CompareAndSetExchange:
        return evolve(self, keys=self._keys.clone())

    def close(self) -> None:
        self._keys.close()

    def _await(
        self, look: Callable[[], tuple[Sequence[KeyFound | None], int]], path: str, timeout: float | None, folder: bool
    ) -> list[KeyFound]:
        deadline = math.inf if timeout is None else monotonic() + timeout
        while True:
            # Checked before each wait: a change in between is after *version*, and ends the wait.
            items, version = look()
            found = [item for item in items if item is not None]
            left = min(events.SLICE, deadline - monotonic())
            if found or left <= 0:
                return found
            self._keys.changed(path, version, left, folder)


class KeysBackend(abc.ABC):
    """Makes connections for one job, all of whose nodes may coordinate it."""

    def __init__(self, name: str, root: str, heartbeat: float) -> None:
        self.name = name
        self._root = root
        """Prefix of all keys."""
        self._heartbeat = heartbeat
        self._address: str | None = None

    def address(self) -> str | None:
        """
        Return the address at which peers reach this machine; None for loopback, and while it is
        unknown.
        """
        return self._address

    @abc.abstractmethod
    def connect(self, timeout: float) -> Keys:
        """Do the same as `dial`, for callers that need more than an exchange."""

    def dial(self, timeout: float) -> CompareAndSetExchange:
        """
        Try to reach the store once, within about *timeout* seconds.

        Raises `RendezvousConnectionError`, or `ConfigError` if another try would not help.
        """
        return CompareAndSetExchange(self.connect(timeout), self._root)

    def candidate(
        self,
        name: str,
        on_elected: Callable[[StateLog], None],
        on_lost: Callable[[str], None],
        ttl: float | None = None,
    ) -> Candidate:
        """
        Return a candidate for the coordination of the job; *ttl* is half the heartbeat time, and 2
        s at least.
        """
        seconds = max(2.0, self._heartbeat / 2) if ttl is None else ttl
        return Candidate(self.connect, self._root, name, seconds, on_elected, on_lost)

    def close(self) -> None:  # noqa: B027 - nothing more to do by default
        """Do nothing: connections are closed by their users, and a store by its owner."""


def _pack(data: bytes) -> bytes:
    # A state that looks packed by chance is packed, so that it is unpacked to itself.
    needs_packing = len(data) > _PACK_FROM or data.startswith(_PACKED)
    if not needs_packing:
        return data
    return _PACKED + zlib.compress(data, 1)


def _unpack(data: bytes) -> bytes:
    if not data.startswith(_PACKED):
        return data

    # With a bound: a few bytes of a stranger's may unpack to gigabytes.
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(data.removeprefix(_PACKED), _UNPACK_TO)
    except zlib.error as error:
        raise RendezvousStateError(f"the coordinator's state in the store is damaged: {error}") from error

    if not unpacker.eof:
        raise RendezvousStateError("the coordinator's state in the store is damaged: its end is missing")

    return plain
