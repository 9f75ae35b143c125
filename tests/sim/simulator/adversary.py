"""
An adversary at the simulated store: he reads whatever is written, and writes, swaps and deletes whatever he likes.

He has no token, so what he makes up is not signed with it; but what was signed he can keep, and put anywhere at any
time. He wakes whoever waits for a key, as every writer does.

Rules of this file: what he may do to bytes, nothing about what must follow from it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attrs import Factory, define, evolve

from elasticlib.rendezvous.protocol._exchange import ANNOUNCEMENT, COORDINATOR_HEARTBEAT, mailbox_key
from elasticlib.testing import Tamper
from tests.sim.simulator.forgery import changed, made_up, noise
from tests.sim.simulator.timeline import Timeline

if TYPE_CHECKING:
    from tests.sim.simulator.store import Store

REPLAY = 0.3
"""Seconds between two writings of one who plays old heartbeats again."""
INBOX = "inbox"
STATE = "state"
_MAILBOXES_AHEAD = 2
"""Notices of a mailbox that are not there yet, in whose place something may lie already."""

_KINDS = ("replay", "replay", "elsewhere", "changed", "changed", "made up", "noise", "cut", "empty")
"""Kinds of data that the adversary writes."""


@define(eq=False, repr=False)
class Adversary:
    """One who has seen all that was written to *store* since its start."""

    store: Store
    seen: dict[str, list[bytes]] = Factory(dict)
    """Values written at each key, oldest first; for the inbox, all entries."""
    documents: list[tuple[float, Any]] = Factory(list)
    """Documents that coordinators left to their successors, with their times."""
    touched: dict[str, float] = Factory(dict)
    """When he last wrote or deleted each key."""

    @property
    def _timeline(self) -> Timeline:
        return self.store.network.timeline

    def saw(self, key: str, data: bytes) -> None:
        """Somebody wrote that."""
        if data:
            self.seen.setdefault(key, []).append(data)

    def saw_document(self, document: Any) -> None:
        """A coordinator saved that."""
        self.saw(STATE, document.data)
        self.documents.append((self._timeline.now, document))

    # The simple ones.

    def replay(self, start: str, until: float, turn: int = 0) -> None:
        """Write the last two values of each key that starts so again and again, in turn, until then."""
        for key, values in self.seen.items():
            if key.startswith(start):
                copies = values[-2:]
                self.store.values[key] = copies[turn % len(copies)]
        if self._timeline.now < until:
            self._timeline.after(REPLAY, None, lambda: self.replay(start, until, turn + 1))

    def set_back(self, seconds: float) -> None:
        """Put an old document in the place of the present one."""
        old = [document for at, document in self.documents if at <= self._timeline.now - seconds]
        if old and self.store.document is not None:
            self.store.document, self.store.scribbled = old[-1], True

    # The one who does anything.

    def act(self, fault: Tamper, number: int) -> str:
        """Do what is the *number*th act of that fault; says what it was."""
        chance = random.Random(f"{fault.seed}/{number}")
        has_election = self.store.has_election
        places = [place for place in fault.where or _WEIGHTS if _WITH_ELECTION.get(place, has_election) == has_election]
        if not places:
            return ""
        place = chance.choices(places, [_WEIGHTS.get(place, 1) for place in places])[0]
        return f"{place}: {_DO[place](self, chance)}"

    def _bytes(self, chance: random.Random, key: str) -> tuple[str, bytes]:
        """Something to write there, and what it is."""
        own = self.seen.get(key, [])
        others = self.seen[chance.choice([*self.seen])] if self.seen else []
        kind = chance.choice(_KINDS)
        some = own if kind in ("replay", "cut") or (kind == "changed" and chance.random() < 0.7) else others
        some = some or own or others
        if kind == "empty":
            return kind, b""
        if kind == "made up":
            return kind, made_up(chance, chance.choice(self._nodes()), self._nonce())
        if kind == "noise" or not some:
            return "noise", noise(chance)
        # What is recent is of more use to him than what is old.
        data = chance.choice(some[-4:] if chance.random() < 0.7 else some)
        if kind == "changed":
            data = changed(chance, data)
        elif kind == "cut":
            data = data[: chance.randrange(len(data))]
        return kind, data

    def _nodes(self) -> list[str]:
        return [mailbox.rpartition("/")[0] for mailbox in self._mailboxes()] or ["n0/1"]

    def _mailboxes(self) -> list[str]:
        return [key.removeprefix("beat/") for key in self.seen if key.startswith("beat/")]

    def _nonce(self) -> str:
        return self.documents[-1][1].nonce if self.documents else "a guess"

    def _corrupt(self, chance: random.Random, key: str) -> str:
        self.touched[key] = self._timeline.now
        values = self.store.values
        kind = chance.random()
        if kind < 0.2:
            values.pop(key, None)
            return f"delete {key}"
        if kind < 0.3 and len(values) > 1:
            other = chance.choice(sorted(values))
            self.touched[other] = self._timeline.now
            mine, theirs = values.get(key), values[other]
            self.store.put(key, theirs)
            if mine is not None:
                self.store.put(other, mine)
            return f"swap {key} and {other}"
        what, data = self._bytes(chance, key)
        self.store.put(key, data)
        return f"write {key} ({what}) {data!r:.200}"

    def _corrupt_heartbeat(self, chance: random.Random) -> str:
        mailboxes = self._mailboxes()
        return self._corrupt(chance, f"beat/{chance.choice(mailboxes)}") if mailboxes else "nothing"

    def _corrupt_mailbox(self, chance: random.Random) -> str:
        mailboxes = self._mailboxes()
        if not mailboxes:
            return "nothing"
        mailbox = chance.choice(mailboxes[-6:])
        known = sum(key.startswith(f"box/{mailbox}/") for key in self.seen)
        return self._corrupt(chance, mailbox_key(mailbox, chance.randrange(known + _MAILBOXES_AHEAD)))

    def _corrupt_inbox(self, chance: random.Random) -> str:
        inbox, kind = self.store.inbox, chance.random()
        numbers = sorted(inbox)
        if kind < 0.2 and numbers:
            number = chance.choice(numbers)
            del inbox[number]
            return f"delete entry {number}"
        if kind < 0.3 and len(numbers) > 1:
            one, other = chance.sample(numbers, 2)
            inbox[one], inbox[other] = inbox[other], inbox[one]
            return f"swap entries {one} and {other}"
        what, data = self._bytes(chance, INBOX)
        if kind < 0.4 and numbers:
            number = chance.choice(numbers)
            inbox[number] = data
            return f"overwrite entry {number} ({what}) {data!r:.200}"
        self.store.append(data)
        return f"post ({what}) {data!r:.200}"

    def _corrupt_counter(self, chance: random.Random) -> str:
        step = chance.choice((1, 1, 2, 5, -1, -2, 1_000_000))
        self.store.posted = max(0, self.store.posted + step)
        return f"add {step}"

    def _corrupt_state(self, chance: random.Random) -> str:
        if not self.documents:
            return "nothing"
        kind = chance.random()
        self.store.scribbled = True
        if kind < 0.2:
            self.store.document = None
            return "delete"
        if kind < 0.5:
            self.store.document = chance.choice(self.documents)[1]
            return "put an old one back"
        what, data = self._bytes(chance, STATE)
        self.store.document = evolve(self.documents[-1][1], data=data, way=())
        return f"write ({what}) {data!r:.200}"

    def _corrupt_leader(self, chance: random.Random) -> str:
        if chance.random() < 0.5:
            self.store.delete_leader()
            return "delete"
        seconds = chance.choice((0.5, 3.0, 15.0, 60.0))
        self.store.steal_lease(seconds)
        return f"take the office for {seconds:g} s"

    def _delete_all(self, chance: random.Random) -> str:
        store, now = self.store, self._timeline.now
        self.touched.update(dict.fromkeys(store.values, now))
        store.values.clear()
        store.inbox.clear()
        if store.has_election:
            store.document, store.scribbled = None, True
            store.delete_leader()
        return "delete"


_DO: dict[str, Callable[[Adversary, random.Random], str]] = {
    "hello": lambda he, chance: he._corrupt(chance, ANNOUNCEMENT),
    "pulse": lambda he, chance: he._corrupt(chance, COORDINATOR_HEARTBEAT),
    "beat": Adversary._corrupt_heartbeat,
    "box": Adversary._corrupt_mailbox,
    "inbox": Adversary._corrupt_inbox,
    "counter": Adversary._corrupt_counter,
    "state": Adversary._corrupt_state,
    "leader": Adversary._corrupt_leader,
    "all": Adversary._delete_all,
}
_WITH_ELECTION = {"counter": False, "state": True, "leader": True}
"""Places that are there only with an election, or only without one."""
_WEIGHTS = {"hello": 2, "pulse": 2, "beat": 4, "box": 5, "inbox": 4, "counter": 0.2, "state": 0.7, "leader": 0.7}
"""Relative frequency of each place when the adversary may choose any place."""
