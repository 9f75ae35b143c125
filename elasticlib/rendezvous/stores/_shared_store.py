"""
Jobs in the store of another job: how they are claimed and announced, and how the host of the store
sees that they live.

Rules of this file: any value in the store may be a stranger's, and costs nothing but a bounded
wait. A job lives while its coordinator's heartbeat changes, whatever its content: that may be
signed with another job's token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from json import dumps
from typing import TypeVar

from attrs import Factory, define, field

from elasticlib import _untrusted
from elasticlib._clock import Clock, monotonic
from elasticlib.errors import RendezvousConnectionError, RendezvousStateError
from elasticlib.rendezvous.protocol._exchange import ANNOUNCEMENT, CAUSE, COORDINATOR_HEARTBEAT
from elasticlib.rendezvous.protocol._reading import LastHeartbeat, greeting_of
from elasticlib.rendezvous.stores._election import LeadershipLost
from elasticlib.rendezvous.stores._torch_store import CLAIMANT, SERVES, StoreExchange

SILENT = 2.0
"""Heartbeats without a sign of life after which a job's coordinator counts as dead."""
MOST = 1000
"""Jobs that are watched at one time."""
_NOBODY = ""
"""The id in the keys of the store itself: no job has it."""
_FOLDER = "guests"
_ANSWER = 1.0
"""
Seconds within which a living coordinator answers, unless it is very busy: then it is asked again.
"""
_LOOK = 0.25
"""Seconds between two looks at whether the other jobs still live."""
_LONGEST = 1e6
"""Upper limit in seconds for a job's heartbeat time."""

_Answer = TypeVar("_Answer")


@define(eq=False)
class LeaderExchange(StoreExchange):
    """
    The connection of a job's coordinator: `write` raises `LeadershipLost` once another node
    coordinates the job.

    The coordinator is the node that a greeting of this job names, signed where there is a token.
    Unsigned values are written again if they were overwritten. By a stranger, that only costs a
    wait; by another coordinator, it ends this one.
    """

    claim: Claim = field(kw_only=True)
    again: Mapping[str, bytes] = field(kw_only=True)
    """
    Other values about the coordinator, by their key in the store: written again with each greeting.
    """
    _greeted: bytes | None = field(init=False, default=None)
    """Our greeting, once it was written."""
    _rival: LastHeartbeat = field(init=False, factory=LastHeartbeat)
    """The last heartbeat of another coordinator of the job."""

    def write(self, values: Mapping[str, bytes]) -> None:
        announcement = values.get(ANNOUNCEMENT)
        if announcement is not None:
            self._look_for_rival()
        self._hold_claim()
        if announcement is not None:
            self._write_again()
        super().write(values)
        self._greeted = announcement or self._greeted

    def _write_again(self) -> None:
        with self._speaking() as store:
            for key, data in self.again.items():
                # Not awaited: the write that follows is acknowledged after it.
                store.set(key, data)

    def _hold_claim(self) -> None:
        """
        Raise `LeadershipLost` unless the claim is ours; write it again if a stranger overwrote it.
        """
        [claimant] = self.read([CLAIMANT])
        identity = self.claim.identity
        if claimant == identity:
            return

        may_claim = self._may_claim(claimant)
        if may_claim and self.replace(CLAIMANT, claimant or b"", identity) == identity:
            return

        raise LeadershipLost(
            f"another node restarted job {self._run_id!r}, because this coordinator stopped responding"
        )

    def _may_claim(self, claimant: bytes | None) -> bool:
        """Return whether a stranger took the claim away: a node that starts the job again greets at once."""
        if self._greeted is None:
            return claimant is None
        [announcement] = self.read([ANNOUNCEMENT])
        if announcement == self._greeted:
            return True
        # No node can have begun and ended the job without the node that hosts the store.
        hosts_store = SERVES in self.again
        return announcement is None and hosts_store

    def _look_for_rival(self) -> None:
        """
        Raise `LeadershipLost` if another node coordinates the job, too.

        Anybody may write an older greeting again, and that of a dead coordinator stays in the
        store. So only a heartbeat that grows counts. Of two coordinators the one that sees that
        first stops, before it writes again.
        """
        [data] = self.read([ANNOUNCEMENT])
        if data == self._greeted:
            return

        announcement = greeting_of(data, self._run_id, self.claim.key)
        if announcement is None:
            return

        [heartbeat] = self.read([COORDINATOR_HEARTBEAT])
        self._rival, lives = self._rival.then(announcement, heartbeat, self.claim.key)
        if lives:
            raise LeadershipLost(f"node {announcement.host} coordinates it as well")


@define(eq=False)
class Claim:
    """The claim of one node of job *run_id* to coordinate it in a store that serves another job."""

    run_id: str
    heartbeat: float
    identity: bytes
    """Value that differs from that of any other node."""
    key: bytes | None = None
    """Key with which the job's coordinator signs."""
    clock: Clock = monotonic
    _number: int | None = field(default=None, init=False)
    """Number of the job's announcement."""
    _first: int = field(default=1, init=False)
    _silent: tuple[bytes, float] | None = field(default=None, init=False)
    """The claimant that was found silent first, and when."""
    _heartbeat: LastHeartbeat = field(factory=LastHeartbeat, init=False)
    """The last heartbeat of the coordinator whose greeting was last found."""

    def take(self, exchange: StoreExchange) -> bool:
        """Claim the job; return whether this node is the first one to do so."""
        [announcement] = exchange.read([ANNOUNCEMENT])
        # The job runs, or did, even if a stranger deleted its claim: `take_over` finds out.
        if announcement is not None:
            return False
        if exchange.replace(CLAIMANT, b"", self.identity) != self.identity:
            return False
        self._announce(exchange)
        return True

    def take_over(self, exchange: StoreExchange) -> bool:
        """
        Take the place of a claimant that was silent for two heartbeats; return False while it lives.

        Raises `RendezvousConnectionError` while that is not known: try again.
        """
        if self._lives(exchange):
            self._silent = None
            return False

        claimant = self._silent_claimant(exchange)

        # Earlier entries were for the dead coordinator.
        first = exchange.count("inbox") + 1
        if exchange.replace(CLAIMANT, claimant, self.identity) != self.identity:
            self._silent = None
            raise RendezvousConnectionError(f"another node has just restarted job {self.run_id!r}")

        self._first = first

        # No node joins the dead one any more, and neither does this node, before its own
        # coordinator has greeted.
        exchange.delete([ANNOUNCEMENT, COORDINATOR_HEARTBEAT, CAUSE])
        self._announce(exchange)
        return True

    def _silent_claimant(self, exchange: StoreExchange) -> bytes:
        """Return the claimant, once it is the same and silent for long enough."""
        [found] = exchange.read([CLAIMANT])
        claimant = found or b""
        now = self.clock()
        if self._silent is None or self._silent[0] != claimant:
            self._silent = (claimant, now)
        _, since = self._silent
        left = since + SILENT * self.heartbeat - now
        if left > 0:
            why = "its coordinator sends no heartbeat (was it killed or suspended?)"
            raise RendezvousConnectionError(
                f"job {self.run_id!r} exists, but {why}; it can be restarted in {left:.1f} s"
            )

        return claimant

    def coordinating(self, exchange: StoreExchange, *, hosts: bool = False) -> LeaderExchange:
        """Return a new connection for the coordinator, which can write as long as the job is this node's."""
        made = exchange.clone()
        facts = made.store, made._open, made._run_id, made.where, made.served_run
        again = {SERVES: self.run_id.encode()} if hosts else {}
        if self._number is not None:
            again[exchange.of(_NOBODY).full_key(f"{_FOLDER}/{self._number}")] = self._announcement()
        return LeaderExchange(*facts, claim=self, again=again, first=self._first)

    def give_up(self, exchange: StoreExchange) -> bool:
        """Free the job's id for the next one, as the job is over; return False if another node has claimed it."""
        if self._number is not None:
            exchange.of(_NOBODY).delete([f"{_FOLDER}/{self._number}"])
        # Another node that has started the job again needs these keys.
        is_still_ours = exchange.read([CLAIMANT]) == [self.identity]
        if is_still_ours:
            forget(exchange)
        return is_still_ours

    def _lives(self, exchange: StoreExchange) -> bool:
        """
        Return whether a node coordinates the job.

        A coordinator writes its greeting before it empties the inbox, which anybody can do. So any
        greeting beside an emptied inbox counts. A node that cannot accept it joins, and ends with
        the reason.
        """
        answers = exchange.answers(_ANSWER)
        data, heartbeat = exchange.read([ANNOUNCEMENT, COORDINATOR_HEARTBEAT])
        if answers and data is not None:
            return True
        announcement = greeting_of(data, self.run_id, self.key)
        if announcement is None:
            return False
        self._heartbeat, lives = self._heartbeat.then(announcement, heartbeat, self.key)
        return lives

    def _announce(self, exchange: StoreExchange) -> None:
        self._number = exchange.of(_NOBODY).append(_FOLDER, self._announcement())

    def _announcement(self) -> bytes:
        return dumps({"run_id": self.run_id, "heartbeat": self.heartbeat}).encode("ascii")


def forget(exchange: StoreExchange) -> None:
    """Delete the keys that distinguish a job that is over from one that never was."""
    exchange.delete([ANNOUNCEMENT, COORDINATOR_HEARTBEAT, CAUSE, "inbox", CLAIMANT])


@define
class _OtherJob:
    run_id: str
    heartbeat: float
    """Seconds."""
    since: float
    """Time at which the coordinator's last heartbeat was found."""
    last: bytes | None = None
    """The coordinator's last heartbeat."""


@define(eq=False)
class OtherJobs:
    """
    The other jobs in the store behind *exchange*, as its host sees them.

    The store has the announcement of each known job, or had it: a job that ends removes it.
    """

    _exchange: StoreExchange
    _clock: Clock = monotonic
    _known: dict[int, _OtherJob] = Factory(dict)
    """Jobs that live, or may, by the number of their announcement."""

    def living(self) -> list[str]:
        """
        Return the ids of the jobs that live, or may.

        Call it regularly: a heartbeat that stands still reveals a dead job. Raises
        `RendezvousConnectionError` once the store itself is gone.
        """
        while True:
            announced, has_more = self._look()
            living = self._without_dead(announced)
            # Dead jobs have made room for those that did not fit: look again.
            if living or not has_more:
                return sorted(living)

    def _without_dead(self, announced: set[int]) -> set[str]:
        living = set()
        for number, job in sorted(self._known.items()):
            if self._lives(job, number in announced):
                living.add(job.run_id)
                continue
            del self._known[number]
            # A job that only stood still announces itself again.
            if number in announced:
                self._remove(number)

        return living

    def _look(self) -> tuple[set[int], bool]:
        """
        Read the announcements of new jobs.

        Return the numbers of known jobs that are still announced, and whether there are more jobs than
        fit.
        """
        numbers = self._ask(_NOBODY, _numbers)
        if numbers is None:
            return set(self._known), False

        announced = set(self._entries([number for number in numbers if number in self._known]))
        new = [number for number in numbers if number not in self._known]
        for start in range(0, len(new), MOST):
            for number, data in self._entries(new[start : start + MOST]).items():
                job = self._read_announcement(data)
                if job is None:
                    self._remove(number)
                    continue
                if len(self._known) == MOST:
                    return announced, True
                self._known[number] = job
                announced.add(number)

        return announced, False

    def _read_announcement(self, data: bytes) -> _OtherJob | None:
        """
        Return the job of an announcement; None if it is invalid, or names a job that the store
        cannot hold.
        """
        job = _read(data, self._clock())
        if job is None:
            return None
        if not self._exchange.of(job.run_id).takes(COORDINATOR_HEARTBEAT):
            return None
        return job

    def _entries(self, numbers: list[int]) -> dict[int, bytes]:
        keys = [f"{_FOLDER}/{number}" for number in numbers]
        found = self._ask(_NOBODY, lambda store: store.read(keys))
        # The store did not answer: known jobs count as announced.
        if found is None:
            return {number: b"" for number in numbers if number in self._known}
        return {number: data for number, data in zip(numbers, found, strict=True) if data is not None}

    def _remove(self, number: int) -> None:
        self._ask(_NOBODY, lambda store: store.delete([f"{_FOLDER}/{number}"]))

    def _lives(self, job: _OtherJob, announced: bool) -> bool:
        found = self._ask(job.run_id, lambda store: store.read([COORDINATOR_HEARTBEAT]))
        if found is not None:
            [heartbeat] = found
            has_ended = heartbeat is None and not announced
            if has_ended:
                return False
            # The value counts, not its age: clocks of two machines are not compared.
            if heartbeat != job.last:
                job.last = heartbeat
                job.since = self._clock()

        return self._clock() < job.since + SILENT * job.heartbeat

    def _ask(self, run_id: str, question: Callable[[StoreExchange], _Answer]) -> _Answer | None:
        """
        Return the answer to *question* about that job; None if the store ends the connection for
        it.
        """
        try:
            return question(self._exchange.of(run_id))
        except RendezvousConnectionError:
            self._exchange = self._exchange.clone()
            return None


def wait_for_jobs(
    jobs: OtherJobs, limit: float, report: Callable[[list[str]], None], gone: threading.Event, clock: Clock = monotonic
) -> None:
    """
    Wait until no other job lives, at most *limit* seconds.

    *report* gets their names before the wait, if there is any; *gone* ends the wait.
    """
    deadline = clock() + limit
    pause = 0.0
    while (living := jobs.living()) and clock() < deadline:
        if gone.wait(pause):
            return
        if not pause:
            report(living)
        pause = _LOOK


def _numbers(store: StoreExchange) -> list[int]:
    try:
        return store.numbers(_FOLDER)
    except RendezvousStateError:
        # A stranger's key that is not valid text keeps the store from listing its keys.
        pass

    last = 0
    with suppress(RendezvousStateError):
        last = store.count(_FOLDER)
    # The first ones and the last ones: a stranger can write any number to the counter.
    first_of_last = max(MOST, last - MOST) + 1
    return [*range(1, MOST + 1), *range(first_of_last, last + 1)]


def _read(data: bytes, now: float) -> _OtherJob | None:
    """Return the job of the announcement *data*; None if it is not a valid announcement."""
    try:
        body = _untrusted.parse(data)
        run_id = _untrusted.exactly(body["run_id"], str)
        # Half of a surrogate pair: no job's id holds one, and no key could.
        run_id.encode()
        heartbeat = _untrusted.seconds(body["heartbeat"], 0.0, _LONGEST)
    except (ValueError, KeyError, TypeError):
        return None

    if not run_id or not heartbeat:
        return None

    return _OtherJob(run_id, heartbeat, now)
