"""
Records about the steps of an agent: rendezvous, ranks, workers and the end of its run.

Rules of this file: a record has facts, and its class makes the text from them. Durations are in
seconds of the agent's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from logging import DEBUG, WARNING
from typing import Literal

from attrs import frozen

from elasticlib.errors import ProcessFailure
from elasticlib.records._sinks import Record

FINE = 5
"""Level, below DEBUG, of records for sinks rather than for users."""


@frozen
class RanksAwaited(Record, level=DEBUG):
    """Request of this node for ranks in the next round."""

    node: str

    def __str__(self) -> str:
        return f"node {self.node} waits for its rank assignment"


@frozen
class RanksReceived(Record, level=DEBUG):
    """Ranks of this node in a round, before its workers start."""

    round: int
    group_rank: int
    group_world_size: int
    world_size: int
    restart_count: int
    master: str
    why: str
    duration: float
    """Seconds since the request to join."""

    def __str__(self) -> str:
        return (
            f"node rank {self.group_rank} of {self.group_world_size} in round {self.round} after "
            f"{self.duration:.3f} s: {self.why}"
        )


@frozen
class RanksMissed(Record, level=DEBUG):
    """End of this node's wait for ranks without any."""

    why: str
    duration: float
    trace: str = ""
    """Traceback of the error that ended the wait, if one did."""

    def __str__(self) -> str:
        return f"no rank assignment after {self.duration:.3f} s: {self.why}"


@frozen
class RanksAssigned(Record, level=DEBUG):
    """Ranks of this node's workers, once the store of the round was found."""

    round: int
    ranks: tuple[int, ...]
    """Global ranks, by local rank."""
    duration: float

    def __str__(self) -> str:
        return f"this node has the ranks {list(self.ranks)} in round {self.round} ({self.duration:.3f} s)"


@frozen
class WorkerPlace:
    """Worker that a record is about."""

    local_rank: int
    global_rank: int
    role_rank: int
    role_world_size: int
    id: object
    """Id from the agent's `_start_workers`; for a process, its process id."""


@frozen
class WorkerStarted(Record, level=FINE):
    """Start of one worker."""

    worker: WorkerPlace

    def __str__(self) -> str:
        return f"rank {self.worker.global_rank} started as {self.worker.id}"


@frozen
class WorkerEnded(Record, level=FINE):
    """End of one worker; TERMINATED: it did not fail, but its round was stopped."""

    worker: WorkerPlace
    state: Literal["SUCCEEDED", "FAILED", "TERMINATED"]
    failure: ProcessFailure | None = None

    def __str__(self) -> str:
        why = f": {self.failure.message}" if self.failure is not None else ""
        return f"rank {self.worker.global_rank} ended as {self.state}{why}"


@frozen
class WorkersSeen(Record, level=FINE):
    """Check of the workers by the agent."""

    state: str
    """Name of a `WorkerState`."""
    remaining_restarts: int

    def __str__(self) -> str:
        return f"workers are {self.state}, {self.remaining_restarts} restarts are left"


@frozen
class StacksShown(Record, level=FINE):
    """Request to show the workers' stacks on the console when they arrive."""

    why: str
    """Line above the stacks."""

    def __str__(self) -> str:
        return f"the console shows the stacks of the workers: {self.why}"


@frozen
class StacksReported(Record, level=FINE):
    """Stacks of the threads of this node's workers, after a request."""

    texts: Mapping[int, str]
    """Stacks by local rank, in the fault handler's format; or the reason for none, in brackets."""

    def __str__(self) -> str:
        return f"the stacks of {len(self.texts)} workers were recorded"


@frozen
class StepDone(Record, level=FINE):
    """Success or failure of a step of the agent's work."""

    step: str
    """Name of the step, ``Class.method``, as in torch."""
    duration: float
    succeeded: bool

    def __str__(self) -> str:
        return f"{self.step} {'took' if self.succeeded else 'failed after'} {self.duration:.3f} s"


@frozen
class StateTimed(Record, level=FINE):
    """Duration of a state of the agent that a caller has named and measured."""

    state: str
    duration: float

    def __str__(self) -> str:
        return f"{self.state} took {self.duration:.3f} s"


@frozen
class RunEnded(Record, level=DEBUG):
    """End of the agent's run, with all its processes."""

    outcome: Literal["SUCCEEDED", "FAILED", "RAISED"]
    """RAISED: the run ended with an exception, not with a result of workers."""
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
    """Regular end of the agent's work, whether or not workers failed."""

    def __str__(self) -> str:
        return "the agent has finished"


@frozen
class AgentFailed(Record, level=FINE):
    """Error that kept the agent from its work, such as a failed rendezvous or a signal."""

    trace: str

    def __str__(self) -> str:
        return f"the agent failed: {self.trace.strip().rpartition(chr(10))[2]}"


@frozen
class KernelLimited(Record, level=WARNING):
    """
    Weaker guarantees because the kernel refuses calls that a launch makes.

    The cause may be an old kernel or a container's seccomp profile.
    """

    pidfds: str
    """Reason for missing pidfds; empty if they work."""
    memfds: str
    """Reason for missing files in memory; empty if they work."""

    def __str__(self) -> str:
        parts = []
        if self.pidfds:
            parts.append(
                f"no pidfds ({self.pidfds}): processes are watched by threads and pipes, so that a worker of a pool "
                "that closes all descriptors counts as dead, and a helper may outlive its parent by half a second"
            )

        if self.memfds:
            parts.append(f"no memfds ({self.memfds}): arguments, results and reports take space in /dev/shm or TMPDIR")

        return f"{'; '.join(parts)}; allow these calls in the container's seccomp profile, or use a newer kernel"
