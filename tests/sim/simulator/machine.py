"""
A simulated machine: its link, its clocks, the agents on it, and how it dies or stands still.

A node's agent and sidecar watch each other, and either ends the workers that the other cannot end any
more. Nobody does when both are frozen, or one is killed while the other is frozen, and the workers alone go on: no
program can fence itself then. So the second of two such blows hits the whole machine here.

Rules of this file: what a kill or a pause hits, nothing about what follows from it.
"""

from __future__ import annotations

from attrs import Factory, define

from tests.sim.simulator.group import END
from tests.sim.simulator.network import Link
from tests.sim.simulator.node import Node


@define(eq=False, repr=False)
class Machine:
    """A machine and the agents on it."""

    number: int
    link: Link
    skew: float = 0.0
    drift: float = 0.0
    resists: float = 0.0
    flaps_until: float = 0.0
    """Until then its agents leave as soon as they have workers, and others are started."""
    flaps_after: float = 0.0
    """Seconds from the end of one to the start of the next."""
    nodes: list[Node] = Factory(list)

    def present(self) -> list[Node]:
        """Agents that live and have not ended."""
        return [node for node in self.nodes if node.agent.alive and node.outcome is None]

    def flap(self, until: float, after: float) -> None:
        """Its agent cannot work until that moment, and is started again and again."""
        self.flaps_until, self.flaps_after = until, after
        for node in self.present():
            if node.working is not None:
                self.has_workers(node)

    def has_workers(self, node: Node) -> None:
        """An agent has started its workers: it goes again if it cannot work."""
        if node.timeline.now < self.flaps_until:
            node.timeline.after(END, node.agent, node.leave)

    def next_start(self, now: float) -> float | None:
        """When its scheduler starts an agent in place of the one that has ended now."""
        return now + self.flaps_after if now < self.flaps_until and self.link.alive else None

    def kill(self, what: str) -> None:
        """The machine is gone, or a process of its latest agent is."""
        if what == "machine":
            self.link.alive = False
            for node in self.nodes:
                self._kill_agent(node)
                node.rendezvous.alive = False
                if node.working is not None:
                    node.working.end("died")
            return
        for node in self.present()[-1:]:
            if what == "agent":
                self._kill_agent(node)
                node.agent_dies()
            elif what == "node":
                self._kill_all(node)
            elif what == "spawner":
                if node.working is not None:
                    node.working.kill()
            elif node.rendezvous.alive:
                node.cluster.end_process(node)
                self._reset(node)
                node.rendezvous_dies()
                self._settle(node)

    def _kill_all(self, node: Node) -> None:
        self._kill_agent(node)
        for group in node.groups:
            group.end("died")
        self._reset(node)
        node.cluster.end_process(node)

    def _reset(self, node: Node) -> None:
        for connection in list(self.link.connections):
            if connection.client is node.rendezvous:
                connection.reset("connection reset")

    def _kill_agent(self, node: Node) -> None:
        if node.agent.alive:
            node.agent.alive = False
            node.cluster.died(node)

    def suspend(self, seconds: float) -> None:
        """All stands still, clocks too: nobody here sees that time has passed."""
        for node in self.nodes:
            now = node.timeline.now
            for process in node.processes():
                asleep = max(0.0, process.thaws_at - now)
                process.missed += max(0.0, seconds - asleep)
                process.freeze(now + seconds)

    def _settle(self, node: Node) -> None:
        """Freeze the workers while all processes that could end them are frozen."""
        alive = [each for each in node.processes(of_workers=False) if each.alive]
        if node.working is not None and all(each.frozen for each in alive):
            thaws = [each.thaws_at for each in alive]
            node.working.process.freeze(min(thaws, default=node.timeline.now))

    def pause(self, what: str, seconds: float) -> None:
        """All processes of the machine stand still, or one of each agent."""
        for node in self.nodes:
            parts = {
                "machine": node.processes(),
                "agent": [node.agent],
                "rendezvous": [node.rendezvous],
                "spawner": [group.spawner for group in node.groups],
            }
            for process in parts[what]:
                process.freeze(node.timeline.now + seconds)
            self._settle(node)
            if what == "agent":
                node.agent_freezes(seconds)
            elif what == "rendezvous":
                node.rendezvous_freezes(seconds)
