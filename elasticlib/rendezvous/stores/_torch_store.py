"""
An exchange over a store of torch: TCPStore, or FileStore on one machine.

Rules of this file: every call is one round trip or a few, and its writes are acknowledged when it
returns. torch's exceptions end here. Values that strangers write under our keys are returned as
bytes, or raise `RendezvousStateError`.

The inbox is a counter and numbered entries, as these stores have no queues: a poster takes the next
number from the counter, then writes the entry under it. A number without an entry means that its
poster is on its way, paused, or dead; other entries do not wait for it. A poster's own entries stay
in order, since it takes a number only after its last entry was written.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Protocol
from urllib.parse import quote

from attrs import Factory, define, evolve, field

from elasticlib._clock import Clock, monotonic
from elasticlib.errors import RendezvousConnectionError, RendezvousStateError
from elasticlib.rendezvous.protocol._exchange import NOTHING, Exchange, Posted, RequestRefusedError, parts
from elasticlib.rendezvous.stores._file_store import SOONEST, poll

ROOT = "elasticlib/"
"""Prefix of all our keys; workers that share the store use others."""
SERVES = f"{ROOT}serves"
"""Run id of the job whose node hosts the store."""
SERVER = f"{ROOT}server"
"""A random word that the hosting node made up."""
CLAIMANT = "claimant"
"""The coordinator of the job: a random word of its process."""
TOGETHER = 1000
"""Keys in one request."""
LATE = 60.0
"""
Seconds for which a number without an entry is looked for; a slower poster must not rely on its
entry.
"""
SHORTEST, LONGEST = 0.01, 1.0
"""Bounds, in seconds, of the pause between two looks at missing entries."""
MOST = 100_000
"""Numbers that may be new at once: posters cannot have used more."""
LONGEST_WAIT = 3600.0
_BYTES = 128 * 1024
"""
Bytes of values in one request that writes several: TCPStore's time for a request grows with the
square of its length.
"""
_LONGEST_VALUE, _LONGEST_KEY = 8 * 1024 * 1024, 8 * 1024 - 1
"""
Limits of TCPStore in bytes; it resets the connection of a client that sends more, which looks like
an outage.
"""

_DIGITS = 20
"""Digits of a counter at most: it has 64 bits."""
_NUMBER = re.compile("[1-9][0-9]{0,17}")
_NOTHING = secrets.token_bytes(16)
"""A value that means an absent key; nobody can write it on purpose."""


class Store(Protocol):
    """The methods of torch's stores that we use; values are bytes, whatever their stubs say."""

    def set(self, key: str, value: bytes) -> None: ...
    def add(self, key: str, value: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def get(self, key: str) -> bytes: ...
    def set_timeout(self, timeout: timedelta) -> None: ...
    def compare_set(self, key: str, expected_value: bytes, desired_value: bytes) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def multi_set(self, keys: list[str], values: list[bytes]) -> None: ...
    def list_keys(self) -> list[str]: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


@define
class _Arrivals:
    """
    The entries of the inbox that one connection has received, by number.

    Each number below the next one is in one of three states:

    * received
    * missing: its poster is on its way, paused or dead
    * given up, as it was missing for too long
    """

    next: int
    _missing: dict[int, float] = Factory(dict)
    """Numbers whose entries were missing, and since when."""

    def numbers(self, count: int) -> list[int]:
        """
        Return the numbers of entries to look for: the missing ones, and new ones up to *count*.

        Raises `RendezvousStateError` if *count* cannot be right.
        """
        is_possible = self.next - 1 <= count < self.next + MOST
        if not is_possible or len(self._missing) > MOST:
            raise RendezvousStateError(
                f"the store's inbox counter was overwritten: it went from {self.next - 1} to {count}"
            )
        numbers = [*self._missing, *range(self.next, count + 1)]
        self.next = count + 1
        return numbers

    def received(self, number: int) -> None:
        """Note that the entry was found."""
        self._missing.pop(number, None)

    def missed(self, number: int, now: float) -> None:
        """Note that the entry was missing."""
        if now - self._missing.setdefault(number, now) > LATE:
            del self._missing[number]

    @property
    def is_complete(self) -> bool:
        """True if no entry is missing."""
        return not self._missing

    def pause(self, left: float, now: float) -> float:
        """
        Return the seconds until the next look, *left* at most; they grow with the time that an
        entry is missing.
        """
        age = now - max(self._missing.values())
        pause = min(max(age, SHORTEST), LONGEST)
        return min(pause, left)


@define(eq=False)
class StoreExchange(Exchange):
    """One connection, for the keys of one job."""

    store: Store | None
    """The connection; None once it is closed or lost."""
    _open: Callable[[], Store]
    """Opens another connection, within a time limit; raises `RendezvousConnectionError`."""
    _run_id: str
    where: str
    served_run: str | None = None
    """Run id of the job whose node hosts the store; None if unknown."""
    _clock: Clock = field(default=monotonic, kw_only=True)
    first: int = field(default=1, kw_only=True)
    """Number of the first inbox entry to receive: earlier ones were for another coordinator."""
    _prefix: str = field(init=False, default=Factory(lambda self: _prefix_of(self._run_id), takes_self=True))
    _arrivals: _Arrivals = field(init=False, default=Factory(lambda self: _Arrivals(self.first), takes_self=True))
    _limit: float | None = field(init=False, default=None)
    """
    Seconds of the connection's present time limit, which `take` has set; None for the original one.
    """

    def post(self, data: bytes, values: Mapping[str, bytes] = NOTHING) -> None:
        self._check({"inbox": data, **values})
        began = self._clock()
        self.append("inbox", data, values)
        if self._clock() - began > LATE / 2:
            why = "took so long that the coordinator may not read this message any more"
            raise RendezvousConnectionError(f"the store at {self.where} {why}")

    def answers(self, limit: float) -> bool:
        """Return whether a coordinator receives and discards an inbox entry within *limit* seconds."""
        number = self.append("inbox", b"")
        return poll(lambda: self.read([f"inbox/{number}"]) == [None], limit, self._clock)

    def receive(self, timeout: float | None) -> Sequence[Posted]:
        deadline = math.inf if timeout is None else self._clock() + timeout
        while True:
            entries = self._gather()
            now = self._clock()
            left = deadline - now
            is_late = left <= 0
            if entries or is_late:
                return entries
            if self._arrivals.is_complete:
                limit = None if timeout is None else left
                if not self.wait(f"inbox/{self._arrivals.next}", limit):
                    return ()
            else:
                # The next entry may come, or a missing one.
                self.wait(f"inbox/{self._arrivals.next}", self._arrivals.pause(left, now))

    def _gather(self) -> list[Posted]:
        numbers = self._arrivals.numbers(self.count("inbox"))
        now = self._clock()
        entries = []
        found = self.read([f"inbox/{number}" for number in numbers])
        for number, data in zip(numbers, found, strict=True):
            if data is None:
                self._arrivals.missed(number, now)
                continue
            self._arrivals.received(number)
            entries.append(Posted(number, data))

        return entries

    def discard(self, entries: Sequence[Posted]) -> None:
        self.delete([f"inbox/{entry.number}" for entry in entries])

    def write(self, values: Mapping[str, bytes]) -> None:
        self._check(values)
        with self._speaking() as store:
            last = self._write(store, values)
            if last:
                # Requests of a connection are served in order: this answer acknowledges the writes.
                store.check([last])

    def _write(self, store: Store, values: Mapping[str, bytes]) -> str:
        """Send the values without waiting for an answer; return the last key that was sent."""
        last = ""
        for part in parts(values, TOGETHER, _BYTES):
            keys = [self.full_key(key) for key, _ in part]
            store.multi_set(keys, [data for _, data in part])
            last = keys[-1]
        return last

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        full = [self.full_key(key) for key in keys]
        with self._speaking() as store:
            parts = (_read(store, full[start : start + TOGETHER]) for start in range(0, len(full), TOGETHER))
            return [value for part in parts for value in part]

    def update(self, values: Mapping[str, bytes], keys: Sequence[str]) -> list[bytes | None]:
        if not keys:
            self.write(values)
            return []
        self._check(values)
        with self._speaking() as store:
            self._write(store, values)
        # Requests of a connection are served in order: the answer says that the writes were done.
        return self.read(keys)

    def take(self, key: str, timeout: float) -> bytes | None:
        from torch.distributed import DistStoreError

        with self._speaking() as store:
            if timeout != self._limit:
                # A timeout of 0 means forever to torch.
                store.set_timeout(timedelta(seconds=max(timeout, SOONEST)))
                self._limit = timeout
            with suppress(DistStoreError):
                # The value is empty if the key is deleted meanwhile.
                return store.get(self.full_key(key))

        return None

    def wait(self, key: str, timeout: float | None) -> bool:
        left = math.inf if timeout is None else timeout
        with self._speaking() as store:
            # So short a wait would be over before the store has answered.
            if left <= SOONEST:
                return store.check([self.full_key(key)])
            while left > 0:
                if _wait(store, self.full_key(key), min(left, LONGEST_WAIT)):
                    return True
                left -= LONGEST_WAIT

        return False

    def delete(self, keys: Sequence[str]) -> None:
        with self._speaking() as store:
            for key in keys:
                store.delete_key(self.full_key(key))

    def clear_foreign(self) -> None:
        with self._speaking() as store:
            for key in self._list(store):
                if not key.startswith(ROOT):
                    store.delete_key(key)

    def clear(self) -> None:
        """Delete all keys of this job."""
        with self._speaking() as store:
            for key in self._list(store):
                if key.startswith(self._prefix):
                    store.delete_key(key)

    def replace(self, key: str, old: bytes, new: bytes) -> bytes:
        """
        Write *new* if the present value is *old*, or is missing and *old* is empty; return the
        value afterwards.
        """
        with self._speaking() as store:
            return store.compare_set(self.full_key(key), old, new)

    def append(self, folder: str, data: bytes, values: Mapping[str, bytes] = NOTHING) -> int:
        """
        Append *data* as the next entry of *folder*, and write *values*; return the entry's number.
        """
        with self._speaking() as store:
            number = store.add(self.full_key(folder), 1)
            if number < 1:
                raise RendezvousStateError(f"the store's {folder} counter was overwritten: it holds {number}")
            entry = self.full_key(f"{folder}/{number}")
            if values:
                store.multi_set([entry, *map(self.full_key, values)], [data, *values.values()])
            else:
                store.set(entry, data)

            # The answer acknowledges the entry, whether it is still there or was received meanwhile.
            store.check([entry])
            return number

    def count(self, folder: str) -> int:
        """Return the number of the last entry of *folder*; 0 where there never was one."""
        # The counter is read as text: add(0) on a key that is not a number breaks the connection.
        [text] = self.read([folder])
        return _counted(folder, text or b"0")

    def numbers(self, folder: str) -> list[int]:
        """Return the numbers of all existing entries of *folder*, whatever its counter says."""
        prefix = self.full_key(f"{folder}/")
        with self._speaking() as store:
            found = (key[len(prefix) :] for key in self._list(store) if key.startswith(prefix))
            return sorted(int(text) for text in found if _NUMBER.fullmatch(text))

    def takes(self, key: str) -> bool:
        """
        Return whether the store accepts a key of this length: it ends the connection for a longer
        one.
        """
        return len(self.full_key(key).encode()) <= _LONGEST_KEY

    def of(self, run_id: str) -> StoreExchange:
        """Return this very connection, for the keys of another job."""
        return StoreExchange(self.store, self._open, run_id, self.where, self.served_run, clock=self._clock)

    def clone(self) -> StoreExchange:
        return evolve(self, store=self._open())

    def close(self) -> None:
        """Give the connection up; a thread that still waits in it keeps it until then."""
        self.store = None

    def root(self, key: str, timeout: float) -> bytes | None:
        """
        Return the value of a key that belongs to no job, and wait for it; None after *timeout*
        seconds.
        """
        with self._speaking() as store:
            if not _wait(store, key, timeout):
                return None
            return _read_one(store, key)

    def _check(self, values: Mapping[str, bytes]) -> None:
        for key, data in values.items():
            fits = len(data) <= _LONGEST_VALUE and self.takes(key)
            if not fits:
                request = f"{len(data):,} bytes at {key:.80}"
                most = f"{_LONGEST_VALUE:,} bytes for a value and {_LONGEST_KEY:,} bytes for a key"
                raise RequestRefusedError(
                    f"the store at {self.where} cannot store {request}: its limits are {most}", True
                )

    def _list(self, store: Store) -> list[str]:
        try:
            return store.list_keys()
        except UnicodeDecodeError as error:
            raise RendezvousStateError(
                f"another program wrote a key that is not text to the store at {self.where}"
            ) from error

    def full_key(self, key: str) -> str:
        """Return the full name of this job's key in the store."""
        return self._prefix + key

    @contextmanager
    def _speaking(self) -> Iterator[Store]:
        if self.store is None:
            raise RendezvousConnectionError(f"the connection to the store at {self.where} is closed")
        try:
            yield self.store
        except (RuntimeError, OSError, ValueError) as error:
            self.store = None
            # Torch writes the C++ stack behind its message.
            what = str(error).partition("\n")[0].partition("Exception raised from")[0]
            raise RendezvousConnectionError(f"lost the store at {self.where}: {what}") from error


def _read(store: Store, keys: list[str]) -> list[bytes | None]:
    """Return the values. Most requested keys exist: then two round trips are enough for all."""
    # One or two keys take no more round trips one by one.
    if len(keys) > 2 and store.check(keys):
        values = _read_present(store, keys)
        if values is not None:
            return values
    if len(keys) < 4:
        return [_read_one(store, key) for key in keys]
    # Some are absent, most often few: one half of the keys, or a quarter, is complete.
    middle = len(keys) // 2
    return [*_read(store, keys[:middle]), *_read(store, keys[middle:])]


def _read_present(store: Store, keys: list[str]) -> list[bytes | None] | None:
    """Return the values of keys that all existed just now; None if that has changed."""
    from torch.distributed import DistStoreError

    # A key that is deleted meanwhile reads as empty, which no message is, or makes multi_get
    # reach its limit.
    try:
        values = store.multi_get(keys)
        return [value or _read_one(store, key) for key, value in zip(keys, values, strict=True)]
    except DistStoreError:
        return None


def _read_one(store: Store, key: str) -> bytes | None:
    # Writes nothing: an absent key does not equal a text that is not empty. A plain get would block.
    value = store.compare_set(key, _NOTHING, _NOTHING)
    if value == _NOTHING:
        return None
    return value


def _wait(store: Store, key: str, timeout: float) -> bool:
    """Return whether the key exists within *timeout* seconds."""
    from torch.distributed import DistStoreError

    try:
        # A timeout of 0 means forever to torch.
        store.wait([key], timedelta(milliseconds=max(1, int(timeout * 1000))))
    except DistStoreError:
        return False
    return True


def _counted(folder: str, text: bytes) -> int:
    try:
        if len(text) > _DIGITS:
            raise ValueError("no counter has so many digits")
        return int(text)
    except ValueError as error:
        raise RendezvousStateError(f"the store's {folder} counter was overwritten: it holds {text!r:.80}") from error


def full_key(run_id: str, key: str) -> str:
    """Return the full name of a *key* of the job *run_id* in the store."""
    return _prefix_of(run_id) + key


def _prefix_of(run_id: str) -> str:
    return f"{ROOT}{quote(run_id, safe='')}/"
