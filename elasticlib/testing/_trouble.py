"""
What goes wrong in a simulated cluster: each fault, brought about.

Rules of this file: what a fault does, nothing about what follows from it.
"""

from __future__ import annotations

from typing import Protocol

from attrs import define
from typing_extensions import assert_never

from elasticlib.testing._faults import (
    Break,
    Cut,
    DeleteLeader,
    FailWorker,
    Fault,
    Flap,
    Join,
    Kill,
    Leave,
    Pause,
    PauseStore,
    Replay,
    SetBack,
    Skew,
    Slow,
    Stubborn,
    Suspend,
    Tamper,
)
from elasticlib.testing._machine import Machine, Owner as Mourner
from elasticlib.testing._store import Store
from elasticlib.testing._timeline import Timeline


class Owner(Mourner, Protocol):
    """The cluster, as a fault sees it."""

    timeline: Timeline
    store: Store | None

    def machine(self, number: int) -> Machine:
        """That machine, switched on or not."""

    def join(self, number: int) -> None:
        """Start another agent there."""

    def tampered(self, what: str) -> None:
        """The adversary did that."""


def bring_about(fault: Fault, owner: Owner) -> None:
    """Let it happen now."""
    store = owner.store
    match fault:
        case PauseStore() | SetBack() | DeleteLeader():
            if store is not None and store.elects:
                store.suffer(fault)
        case Replay(node=number, seconds=seconds):
            if store is not None and store.adversary is not None:
                store.adversary.replay(f"beat/n{number}/", owner.timeline.now + seconds)
        case Tamper():
            Tampering(fault, owner).begin()
        case _:
            _hit(fault, owner)


def _hit(
    fault: Kill | Pause | Suspend | Cut | Break | Slow | FailWorker | Stubborn | Leave | Join | Flap | Skew,
    owner: Owner,
) -> None:
    machine, timeline = owner.machine(fault.node), owner.timeline
    link = machine.link
    match fault:
        case Kill(what=what):
            machine.kill(what, owner)
        case Pause(seconds=seconds, what=what):
            machine.pause(what, seconds)
        case Suspend(seconds=seconds):
            machine.suspend(seconds)
        case Cut(seconds=seconds):
            link.cut_until = max(link.cut_until, timeline.now + seconds)
        case Break():
            for connection in list(link.connections):
                if connection.link is not connection.store.link:
                    connection.reset("connection reset by peer")
        case Slow(seconds=seconds, delay=delay):
            link.slow_until, link.delay = timeline.now + seconds, delay
        case FailWorker():
            for node in machine.present()[-1:]:
                node.fail_workers(fault)
        case Stubborn(seconds=seconds):
            machine.resists = seconds
        case Leave():
            for node in machine.present()[-1:]:
                timeline.at(timeline.now, node.agent, node.leave)
        case Flap(seconds=seconds, after=after):
            machine.flap(timeline.now + seconds, after)
        case Join():
            owner.join(fault.node)
        case Skew(seconds=seconds, drift=drift):
            machine.skew, machine.drift = seconds, drift
        case _:
            assert_never(fault)


@define(eq=False)
class Tampering:
    """The acts of an adversary, one after the other."""

    fault: Tamper
    owner: Owner

    def begin(self) -> None:
        """From now on."""
        began, every = self.owner.timeline.now, self.fault.every
        for number in self.fault.acts or range(int(self.fault.seconds / every) + 1):
            if number * every <= self.fault.seconds:
                self.owner.timeline.at(began + number * every, None, lambda number=number: self._act(number))  # type: ignore[misc]

    def _act(self, number: int) -> None:
        store = self.owner.store
        if store is None or store.adversary is None or not (store.process.alive and store.link.alive):
            return
        if store.process.thaws_at <= self.owner.timeline.now:
            self.owner.tampered(f"act {number}: {store.adversary.act(self.fault, number)}")
