"""
Jobs that are guests in the store of another one: how a guest is claimed and announced, and how its host sees it live.

Rules of this file: whatever stands in the store may be a stranger's, and costs nothing but a wait that is bounded. A
guest lives while its coordinator's pulse changes, whatever it says: that may be signed with another job's token.
"""

from __future__ import annotations

import json
import re
from typing import Any

from attrs import Factory, define, field, frozen

from elasticlib._clock import Clock, monotonic
from elasticlib.errors import RendezvousConnectionError
from elasticlib.rendezvous._exchange import CAUSE, HELLO, PULSE
from elasticlib.rendezvous._leader_exchange import LeaderExchange, count_of, greeting_of
from elasticlib.rendezvous._store_exchange import CLAIMANT, StoreExchange

SILENT = 2.0
"""Heartbeats without a sign of life after which a guest's coordinator is taken for dead."""
MOST = 1000
"""Guests that are looked at, the latest ones."""
_NOBODY = ""
"""What stands for a job's id in the keys of the store itself: no job has that one."""
_FOLDER = "guests"
_ANSWER = 1.0
"""Seconds that a coordinator which lives takes to answer at most, unless it is very busy: then it is asked again."""
_HALF = re.compile("[\ud800-\udfff]")
_LONGEST = 1e6
"""Seconds that a guest may call its heartbeat time at most."""


@define(eq=False)
class Claim:
    """How one node of job *run_id* comes to coordinate it in a store that serves another one."""

    run_id: str
    heartbeat: float
    word: bytes
    """Unlike that of any other node."""
    key: bytes | None = None
    """With which the job's coordinator signs."""
    clock: Clock = monotonic
    _number: int | None = field(default=None, init=False)
    """Under which the guest is announced."""
    _first: int = field(default=1, init=False)
    _silent: tuple[bytes, float] | None = field(default=None, init=False)
    """The claimant that was found silent first, and when."""
    _pulse: tuple[str, int] = field(default=("", -1), init=False)
    """The coordinator that greeted when it was looked for last, and how far its pulse had come."""

    def take(self, exchange: StoreExchange) -> bool:
        """Whether this node is the first one to claim the job."""
        [hello] = exchange.read([HELLO])
        if hello is not None or exchange.replace(CLAIMANT, b"", self.word) != self.word:
            return False
        self._announce(exchange)
        return True

    def take_over(self, exchange: StoreExchange) -> bool:
        """
        Whether the claimant was silent for two heartbeats, and this node has its place now; False while it lives.

        Raises `RendezvousConnectionError` while that is not known: try again.
        """
        if self._lives(exchange):
            self._silent = None
            return False
        [claimant] = exchange.read([CLAIMANT])
        now = self.clock()
        if self._silent is None or self._silent[0] != (claimant or b""):
            self._silent = (claimant or b"", now)
        left = self._silent[1] + SILENT * self.heartbeat - now
        if left > 0:
            why = "the node that coordinated it is silent: dead, or standing still"
            raise RendezvousConnectionError(
                f"job {self.run_id!r} is there, but {why}; in {left:.1f} s it can be begun anew"
            )
        first = exchange.count("inbox") + 1  # what was posted until now was for the one that is dead
        if exchange.replace(CLAIMANT, self._silent[0], self.word) != self.word:
            self._silent = None
            raise RendezvousConnectionError(f"another node has just begun job {self.run_id!r} anew")
        self._first = first
        self._announce(exchange)
        return True

    def coordinating(self, exchange: StoreExchange, *, hosts: bool = False) -> LeaderExchange:
        """A new connection for the coordinator, which can write as long as the job is this node's."""
        made = exchange.clone()
        facts = made.store, made._open, made._run_id, made.where, made.served_run
        return LeaderExchange(*facts, claim=self.word, key=self.key, hosts=hosts, first=self._first)

    def give_up(self, exchange: StoreExchange) -> None:
        """The job is over, and its id is free for the next one."""
        if self._number is not None:
            exchange.of(_NOBODY).delete([f"{_FOLDER}/{self._number}"])
        if exchange.read([CLAIMANT]) == [self.word]:  # else another node has begun it anew
            forget(exchange)

    def _lives(self, exchange: StoreExchange) -> bool:
        """
        Whether somebody coordinates the job. A greeting is written before the inbox is emptied, and anybody can do
        that: whoever finds one that is not for this node joins, and ends with the reason.
        """
        answers = exchange.answers(_ANSWER)
        data, pulse = exchange.read([HELLO, PULSE])
        if answers and data is not None:
            return True
        if (hello := greeting_of(data, self.run_id, self.key)) is None:
            return False
        (nonce, before), count = self._pulse, count_of(pulse, hello, self.key)
        self._pulse = hello.nonce, count
        return nonce == hello.nonce and count > before >= 0

    def _announce(self, exchange: StoreExchange) -> None:
        body = {"run_id": self.run_id, "heartbeat": self.heartbeat}
        self._number = exchange.of(_NOBODY).append(_FOLDER, json.dumps(body).encode("ascii"))


def forget(exchange: StoreExchange) -> None:
    """Delete what tells a job that is over from one that never was."""
    exchange.delete([HELLO, PULSE, CAUSE, "inbox", CLAIMANT])


@frozen
class _Guest:
    run_id: str
    heartbeat: float


@define(eq=False)
class Guests:
    """The other jobs in the store behind *exchange*, as its host sees them."""

    _exchange: StoreExchange
    _clock: Clock = monotonic
    _seen: dict[int, tuple[bytes | None, float]] = Factory(dict)
    """The last pulse of each guest, by its number, and since when it is that."""

    def living(self) -> list[str]:
        """The ids of those that live, or may: call it again and again, a pulse that stands still tells the dead."""
        store = self._exchange.of(_NOBODY)
        last = store.count(_FOLDER)
        numbers = range(max(1, last - MOST + 1), last + 1)
        found = store.read([f"{_FOLDER}/{number}" for number in numbers])
        living = set()
        for number, data in zip(numbers, found, strict=True):
            guest = _read(data)
            if guest is None:
                continue
            [pulse] = self._exchange.of(guest.run_id).read([PULSE])
            now = self._clock()
            if number not in self._seen or self._seen[number][0] != pulse:
                self._seen[number] = (pulse, now)
            if now < self._seen[number][1] + SILENT * guest.heartbeat:
                living.add(guest.run_id)
        return sorted(living)


def _read(data: bytes | None) -> _Guest | None:
    """The guest that announced itself so; None for what is no announcement."""
    try:
        body: Any = json.loads(data or b"")
        run_id, heartbeat = body["run_id"], body["heartbeat"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(run_id, str) or type(heartbeat) not in (int, float) or not 0 < heartbeat <= _LONGEST:
        return None
    # No id of a job holds half of a character, and no key could.
    return None if not run_id or _HALF.search(run_id) else _Guest(run_id, heartbeat)
