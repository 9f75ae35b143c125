"""
Faults of a simulated cluster, each with the code that causes it.

Rules of this file: it contains the direct effect of a fault, and none of the consequences.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from typing_extensions import assert_never

from elasticlib.testing import Fault, _faults as faults
from tests.sim.simulator.history import Tampered

if TYPE_CHECKING:
    from tests.sim.simulator.cluster import SimulatedCluster


def bring_about(fault: Fault, cluster: SimulatedCluster) -> None:
    """Let it happen now."""
    store = cluster.store
    if isinstance(fault, (faults.PauseStore, faults.SetBack, faults.DeleteLeader)):
        if store is not None and store.has_election:
            store.suffer(fault)
        return
    if isinstance(fault, faults.Tamper):
        _tamper(fault, cluster)
        return
    if isinstance(fault, faults.Replay):
        if store is not None and store.adversary is not None:
            store.adversary.replay(f"beat/n{fault.node}/", cluster.now + fault.seconds)
        return
    machine, timeline = cluster.machine(fault.node), cluster.timeline
    link = machine.link
    match fault:
        case faults.Kill(what=what):
            machine.kill(what)
        case faults.Pause(seconds=seconds, what=what):
            machine.pause(what, seconds)
        case faults.Suspend(seconds=seconds):
            machine.suspend(seconds)
        case faults.Cut(seconds=seconds):
            link.cut_until = max(link.cut_until, timeline.now + seconds)
        case faults.Break():
            for connection in list(link.connections):
                if connection.link is not connection.store.link:
                    connection.reset("connection reset by peer")
        case faults.Slow(seconds=seconds, delay=delay):
            link.slow_until, link.delay = timeline.now + seconds, delay
        case faults.FailWorker():
            for node in machine.present()[-1:]:
                node.fail_workers(fault)
        case faults.Stubborn(seconds=seconds):
            machine.resists = seconds
        case faults.Leave():
            for node in machine.present()[-1:]:
                timeline.at(timeline.now, node.agent, node.leave)
        case faults.Flap(seconds=seconds, after=after):
            machine.flap(timeline.now + seconds, after)
        case faults.Join():
            cluster.join(fault.node)
        case faults.Skew(seconds=seconds, drift=drift):
            machine.skew, machine.drift = seconds, drift
        case _:
            assert_never(fault)


def _tamper(fault: faults.Tamper, cluster: SimulatedCluster) -> None:
    """Schedule the acts of an adversary, one after the other."""

    def act(number: int) -> None:
        store = cluster.store
        if store is None or store.adversary is None or not (store.process.alive and store.link.alive):
            return
        if not store.process.frozen:
            what = f"act {number}: {store.adversary.act(fault, number)}"
            cluster.history.append(Tampered(cluster.now, what))

    began = cluster.now
    for number in fault.acts or range(int(fault.seconds / fault.every) + 1):
        if number * fault.every <= fault.seconds:
            cluster.timeline.at(began + number * fault.every, None, functools.partial(act, number))
