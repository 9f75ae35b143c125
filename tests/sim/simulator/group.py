"""
A simulated node's workers of one round, and the process that starts and ends them.

Rules of this file: what signals and ends do; when they are due is decided by those who send them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import define, evolve, field

from elasticlib.agent._policy import WorkersFailed
from elasticlib.rendezvous.protocol._messages import FailureNote, RankAssignment
from elasticlib.testing import FailWorker
from tests.sim.simulator.history import WorkersEnded
from tests.sim.simulator.timeline import Process

if TYPE_CHECKING:
    from tests.sim.simulator.node import Node

WORKERS_FAILED = WorkersFailed("a worker failed")
CHANNEL = 0.0002
"""Seconds between two processes of a node."""
END = 0.01
"""Seconds that a process takes to end."""
ANSWER = 15.0
"""Seconds beyond the ladder in which the agent kills a spawner that does not answer."""


@define(eq=False, repr=False)
class Group:
    """A node's workers of one round."""

    node: Node
    assignment: RankAssignment
    process: Process = field(init=False)
    """The workers."""
    spawner: Process = field(init=False)
    """Process that signals the workers, and ends with them."""
    failed_at: float | None = None
    failure: FailWorker | None = None
    """Failure of the workers, if a fault prescribes it."""
    ended: bool = False
    succeeded: bool = False
    _then: Callable[[], None] | None = None
    """Callback that waits for the end of the workers."""

    def __attrs_post_init__(self) -> None:
        node = self.node
        self.process = Process(f"workers of {node.name}", node.timeline)
        self.spawner = Process(f"spawner of {node.name}", node.timeline)

    def end(self, how: str) -> None:
        """None of them runs any more."""
        if not self.ended:
            self.ended, self.succeeded, self.spawner.alive = True, how == "succeeded", False
            node = self.node
            node.cluster.history.append(WorkersEnded(node.timeline.now, node.name, self.assignment.round, how))
            if self._then is not None:
                self._then()
            node.cluster.note_end(node)

    def stop(self, grace: float, then: Callable[[], None]) -> None:
        """The agent has them ended, by force after *grace* seconds; it does *then* once they are gone."""
        node, timeline = self.node, self.node.timeline
        resists = node.machine.resists
        how = "killed" if resists >= grace else "stopped"
        self._then = lambda: timeline.after(CHANNEL, node.agent, then)
        self.end_in(min(resists, grace), how)
        timeline.after(grace + ANSWER, node.agent, self.kill)
        self.watch_lease(node.agent)

    def end_in(self, seconds: float, how: str) -> None:
        """The spawner has them gone by then, sooner if that was said before."""
        timeline = self.node.timeline
        act = lambda: timeline.after(seconds + END, self.process, lambda: self.end(how))  # noqa: E731
        timeline.after(0.0, self.spawner, act)

    def watch_lease(self, watcher: Process) -> None:
        """Make *watcher* end the workers when their lease is over: the node was without contact too long."""
        end = self.node.lease_end()
        if self.ended or end == math.inf:
            return
        rendezvous = self.node.rendezvous
        if rendezvous.clock() >= end:
            self.kill()
        else:
            self.node.timeline.at(rendezvous.moment(end), watcher, lambda: self.watch_lease(watcher))

    def kill(self) -> None:
        """SIGKILL to the spawner, from whoever may: all of them die with it."""
        self.node.timeline.after(END, None, self._die)

    def _die(self) -> None:
        if not self.ended:
            awaited = self._then is not None
            self.end("killed")
            if self.failed_at is None:
                self.failed_at = self.node.agent.clock()
            if not awaited:
                self.node.notify_agent(self, WORKERS_FAILED)

    def notes(self) -> tuple[FailureNote, ...]:
        """Return the known failures of the workers."""
        node = self.node
        if self.failed_at is None:
            return ()
        age = max(0.0, node.agent.clock() - self.failed_at)
        fault = self.failure or FailWorker(node.number, 0.0)
        text = random.Random(node.name).randbytes(fault.text // 2).hex()
        message = f"{node.name} failed in round {self.assignment.round}{text}"
        first = FailureNote(
            self.assignment.rank_base, 0, 1, 1, message, traceback=text, secondary=fault.secondary, age=age
        )
        if self.succeeded:
            return (evolve(first, secondary=False, process="worker store"),)
        others = range(1, fault.workers)
        return (first, *(evolve(first, rank=first.rank + index, local_rank=index) for index in others))
