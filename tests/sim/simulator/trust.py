"""
Checks of life, loss and beginnings: an adversary writes into the store of a job with a token.

Rules of this file: it uses the nodes' own writes, and the coordinator's conclusions from what it
read. Only a node's own heartbeats show that it lives, and each counts once in a term. A node is not
lost if its heartbeats arrive and stay in the store as written. After all values were deleted, a
node that knows nothing may start the job again; the nodes of the earlier job then end.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from attrs import Factory, define

from elasticlib.rendezvous.coordinator._state import JobState
from elasticlib.rendezvous.protocol._exchange import heartbeat_key
from elasticlib.rendezvous.protocol._timing import KILL
from tests.sim.simulator.group import Group
from tests.sim.simulator.invariants import WAKING, Watcher

STEADY = 0.5
"""Share of the heartbeat time in which a heartbeat follows the last one, of a node that sends them steadily."""
LATE = 1.0
"""Seconds by which slow clocks and slow ways may put off the end of workers."""
SLOW = 10.0
"""Seconds that a coordinator may need, besides the heartbeat time, to read what lies in the store."""


@define
class _Steps:
    """A node's own heartbeats in one mailbox."""

    since: float
    """Since when they have come steadily."""
    last: float
    counts: set[int] = Factory(set)


@define(eq=False, repr=False)
class Trust(Watcher):
    """Checks, as it happens."""

    _steps: dict[str, _Steps] = Factory(dict)
    _groups: dict[str, list[Group]] = Factory(dict)
    """Workers that were started, by the beginning of the job whose they are."""

    def started(self, group: Group) -> None:
        """Workers run from now on."""
        nonce, name = group.node.member.nonce, group.node.name
        others = [each for other, groups in self._groups.items() if other != nonce for each in groups if not each.ended]
        again = any(each.node is group.node for each in others)
        self._demand(not again, f"{name} works in two beginnings of its job")
        if nonce not in self._groups:
            for other in others:
                self._must_end(other)
        self._groups.setdefault(nonce, []).append(group)

    def _must_end(self, group: Group) -> None:
        """Its job has begun anew without it: no later than when it would be cut off."""
        limit, timeline = KILL * self.cluster.rules.heartbeat + WAKING + LATE, self.cluster.timeline
        what = f"workers of {group.node.name} run though their job began anew {limit:g} s ago"

        def check() -> None:
            if not group.ended and group.process.thaws_at + limit > timeline.now:
                timeline.at(group.process.thaws_at + limit, None, check)
            else:
                # Who was told that its job has ended stops its workers as gently as its user asked for.
                self._demand(group.ended or group.node.policy.final is not None, what)

        timeline.after(limit, None, check)

    def wrote(self, key: str, data: bytes) -> None:
        """One of the job's own wrote that."""
        if not key.startswith("beat/"):
            return
        now, count = self.cluster.now, json.loads(data)["count"]
        steps = self._steps.setdefault(key, _Steps(now, now))
        if now - steps.last > STEADY * self.cluster.rules.heartbeat:
            steps.since = now
        steps.last = now
        steps.counts.add(count)

    def of_a_term(self) -> Callable[[JobState, JobState], None]:
        """Return the observer of one term: it checks counted heartbeats and lost nodes."""
        credited: dict[str, int] = {}

        def counted(before: JobState, after: JobState) -> None:
            for node, seen in after.watch.sightings.items():
                old = before.watch.sightings.get(node)
                if seen.count is None or (old is not None and old.mailbox == seen.mailbox and old.count == seen.count):
                    continue
                self._lives(node, seen.mailbox, seen.count, credited)
            for node, seen in after.watch.given_up.items():
                if node not in before.watch.given_up:
                    self._is_lost(node, seen.mailbox)

        return counted

    def _lives(self, node: str, mailbox: str, count: int, credited: dict[str, int]) -> None:
        steps = self._steps.get(heartbeat_key(mailbox))
        self._demand(steps is not None and count in steps.counts, f"node {node} lives by beat {count}, not its own")
        self._demand(count > credited.get(mailbox, -1), f"node {node} lives by beat {count}, which had counted before")
        credited[mailbox] = count

    def _is_lost(self, node: str, mailbox: str) -> None:
        key, now, heartbeat = heartbeat_key(mailbox), self.cluster.now, self.cluster.rules.heartbeat
        steps, store = self._steps.get(key), self.cluster.store
        if steps is None or now - steps.last > STEADY * heartbeat or now - steps.since < heartbeat + SLOW:
            return
        touched = None if store is None or store.adversary is None else store.adversary.touched.get(key)
        what = f"node {node} is lost, though it has beaten since {steps.since:.3f} s and nobody touched its beats"
        self._demand(touched is not None and now - touched < heartbeat + SLOW, what)
