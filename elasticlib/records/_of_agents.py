"""
What an agent does for its workers, step by step: rendezvous, ranks, workers, and how its run ends.

Rules of this file: a record holds facts; its text is made from them, here. Durations are seconds of the agent's
clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from logging import DEBUG, WARNING
from typing import Literal

from attrs import frozen

from elasticlib.errors import ProcessFailure
from elasticlib.records._sinks import Record

FINE = 5
"""Level of what is for sinks rather than for people: below DEBUG."""


@frozen
class RanksAwaited(Record, level=DEBUG):
    """This node asked for ranks in the next round, and waits for it."""

    node: str

    def __str__(self) -> str:
        return f"node {self.node} waits for its rank assignment"


@frozen
class RanksReceived(Record, level=DEBUG):
    """This node has a place in a round; its workers are not started yet."""

    round: int
    group_rank: int
    group_world_size: int
    world_size: int
    restart_count: int
    master: str
    why: str
    duration: float
    """From the request to join until now."""

    def __str__(self) -> str:
        return (
            f"node rank {self.group_rank} of {self.group_world_size} in round {self.round} after "
            f"{self.duration:.3f} s: {self.why}"
        )


@frozen
class RanksMissed(Record, level=DEBUG):
    """This node asked for ranks and will not get any."""

    why: str
    duration: float
    trace: str = ""
    """Traceback of the error that ended the wait, if one did."""

    def __str__(self) -> str:
        return f"no rank assignment after {self.duration:.3f} s: {self.why}"


@frozen
class RanksAssigned(Record, level=DEBUG):
    """The workers of this node have their ranks, and the store of the round was found."""

    round: int
    ranks: tuple[int, ...]
    """Global ranks, by local rank."""
    duration: float

    def __str__(self) -> str:
        return f"this node has the ranks {list(self.ranks)} in round {self.round} ({self.duration:.3f} s)"


@frozen
class WorkerPlace:
    """Which worker a record is about."""

    local_rank: int
    global_rank: int
    role_rank: int
    role_world_size: int
    id: object
    """What the agent's `_start_workers` gave: a process id, for a process."""


@frozen
class WorkerStarted(Record, level=FINE):
    """One worker was started."""

    worker: WorkerPlace

    def __str__(self) -> str:
        return f"rank {self.worker.global_rank} started as {self.worker.id}"


@frozen
class WorkerEnded(Record, level=FINE):
    """One worker is gone, and how: TERMINATED did not fail, but its round was stopped."""

    worker: WorkerPlace
    state: Literal["SUCCEEDED", "FAILED", "TERMINATED"]
    failure: ProcessFailure | None = None

    def __str__(self) -> str:
        why = f": {self.failure.message}" if self.failure is not None else ""
        return f"rank {self.worker.global_rank} ended as {self.state}{why}"


@frozen
class WorkersSeen(Record, level=FINE):
    """The agent looked at its workers."""

    state: str
    """Name of a `WorkerState`."""
    remaining_restarts: int

    def __str__(self) -> str:
        return f"workers are {self.state}, {self.remaining_restarts} restarts are left"


@frozen
class StacksShown(Record, level=FINE):
    """The console will show where the workers are, as soon as they have told it."""

    why: str
    """The line above the stacks."""

    def __str__(self) -> str:
        return f"the console is to show the stacks of workers: {self.why}"


@frozen
class StacksTold(Record, level=FINE):
    """Where the threads of this node's workers are, as somebody asked for it."""

    texts: Mapping[int, str]
    """By local rank, as the fault handler writes them; in brackets why there is nothing."""

    def __str__(self) -> str:
        return f"the stacks of {len(self.texts)} workers were written down"


@frozen
class StepDone(Record, level=FINE):
    """The agent went through a step of its work, or failed in it."""

    step: str
    """``Class.method``, as torch calls it."""
    duration: float
    succeeded: bool

    def __str__(self) -> str:
        return f"{self.step} {'took' if self.succeeded else 'failed after'} {self.duration:.3f} s"


@frozen
class StateTimed(Record, level=FINE):
    """Somebody measured how long the agent was in a state of his own naming."""

    state: str
    duration: float

    def __str__(self) -> str:
        return f"{self.state} took {self.duration:.3f} s"


@frozen
class RunEnded(Record, level=DEBUG):
    """The agent's run is over, and nothing of it is left."""

    outcome: Literal["SUCCEEDED", "FAILED", "RAISED"]
    """RAISED: there is no result of workers, but an exception."""
    restart_count: int
    """Restarts of the job up to the last round of this node."""
    max_restarts: int
    duration: float

    def __str__(self) -> str:
        return (
            f"the agent's run {self.outcome} after {self.duration:.3f} s, {self.restart_count} of {self.max_restarts} "
            "restarts used"
        )


@frozen
class AgentSucceeded(Record, level=FINE):
    """The agent did its work to its end, whether or not workers failed."""

    def __str__(self) -> str:
        return "the agent has done its work"


@frozen
class AgentFailed(Record, level=FINE):
    """The agent could not do its work: the nodes did not meet, a signal came."""

    trace: str

    def __str__(self) -> str:
        return f"the agent could not do its work: {self.trace.strip().rpartition(chr(10))[2]}"


@frozen
class KernelLimited(Record, level=WARNING):
    """This kernel, or a container's seccomp profile, refuses calls that a launch makes: what is weaker without them."""

    pidfds: str
    """Why there are no pidfds; empty where there are."""
    memfds: str
    """Why there are no files in memory; empty where there are."""

    def __str__(self) -> str:
        parts = []
        if self.pidfds:
            parts.append(
                f"no pidfds ({self.pidfds}): processes are watched by threads and pipes, so that a worker of a pool "
                "that closes all descriptors counts as dead, and a helper may outlive its parent by half a second"
            )
        if self.memfds:
            parts.append(
                f"no files in memory ({self.memfds}): arguments, results and reports take room in /dev/shm or TMPDIR"
            )
        return f"{'; '.join(parts)}; allow these calls in the container's seccomp profile, or use a newer kernel"
