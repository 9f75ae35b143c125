"""
State of a worker group while it runs.

Rules of this file: these classes hold data and do not act. `WorkerGroup` is a view for hooks and
readers. Only the agent's shell writes it, by the steps in the table `NEXT`.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Any

from attrs import Factory, define, field, fields

from elasticlib.errors import InvalidTransitionError, ProcessFailure
from elasticlib.spec import WorkerSpec
from elasticlib.utils import DataclassView


class WorkerState(str, enum.Enum):
    """State of a worker group in its life cycle; `NEXT` lists the possible steps."""

    UNKNOWN = "UNKNOWN"
    """The agent does not know the state of the group."""
    INIT = "INIT"
    """Not started yet."""
    HEALTHY = "HEALTHY"
    """Running."""
    UNHEALTHY = "UNHEALTHY"
    """Running with an error: counts as failed."""
    STOPPED = "STOPPED"
    """Stopped by the agent, to be started again."""
    SUCCEEDED = "SUCCEEDED"
    """All workers ended with exit status 0."""
    FAILED = "FAILED"
    """A worker failed. At the end of a run: and no restart was left."""

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Return True if the processes of a group in *state* are alive."""
        return state in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)


_S = WorkerState
NEXT: dict[WorkerState, frozenset[WorkerState]] = {
    _S.INIT: frozenset({_S.HEALTHY, _S.STOPPED, _S.SUCCEEDED, _S.FAILED}),  # a spare node's job ends without it
    _S.HEALTHY: frozenset({_S.UNHEALTHY, _S.STOPPED, _S.SUCCEEDED, _S.FAILED, _S.UNKNOWN}),
    _S.UNHEALTHY: frozenset({_S.STOPPED}),
    _S.UNKNOWN: frozenset({_S.STOPPED}),
    _S.STOPPED: frozenset({_S.HEALTHY, _S.SUCCEEDED, _S.FAILED}),
    _S.SUCCEEDED: frozenset({_S.HEALTHY, _S.STOPPED, _S.FAILED}),  # a peer node failed after our workers were done
    _S.FAILED: frozenset({_S.STOPPED}),
}
"""Table of the life cycle: state -> states that may follow. `WorkerGroup.step` enforces it."""
_STORY = 20
"""Number of latest steps that a group remembers."""


@define(eq=False, repr=False)
class Worker:
    """
    A worker with its ranks; `id` is its process id once it was started.

    (torch: ``torch.distributed.elastic.agent.server.Worker``)
    """

    local_rank: int
    global_rank: int = -1
    role_rank: int = -1
    world_size: int = -1
    role_world_size: int = -1
    id: Any = field(default=None, init=False)

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={getattr(self, name)!r}" for name in sorted(each.name for each in fields(Worker)))
        return f"Worker({facts})"


@define(eq=False)
class WorkerGroup:
    """The workers of one node in the present round. (torch: ``...agent.server.WorkerGroup``)"""

    spec: WorkerSpec
    workers: list[Worker] = field(
        default=Factory(lambda self: [Worker(rank) for rank in range(self.spec.local_world_size)], takes_self=True)
    )
    store: object | None = None
    group_rank: int | None = None
    group_world_size: int | None = None
    state: WorkerState = WorkerState.INIT
    master_addr: str | None = None
    master_port: int | None = None
    restart_count: int = field(default=0, kw_only=True)
    """Restarts that the whole job has used up so far."""
    round: int = field(default=-1, kw_only=True)
    """Number of the round, the same on all nodes."""
    _steps: deque[tuple[WorkerState, str]] = field(
        factory=lambda: deque([(WorkerState.INIT, "made")], _STORY), init=False, repr=False
    )
    """States that the agent has set, each with its reason. A hook that writes `state` does not change them."""

    def step(self, state: WorkerState, why: str) -> None:
        """Set the state of the group, with the reason. Raises `InvalidTransitionError` if `NEXT` lacks the step."""
        last, _ = self._steps[-1]
        # The same state again, such as HEALTHY at each check, does not count as a step.
        if state is not last:
            if state not in NEXT[last]:
                story = tuple(f"{each.value}: {reason}" for each, reason in self._steps)
                raise InvalidTransitionError(f"the worker group of round {self.round}", last.value, state.value, story)
            self._steps.append((state, why))
        self.state = state


@define
class RunResult(DataclassView):
    """
    Outcome of a worker group.

    `return_values` and `failures` are keyed by global rank and have no key in common. (torch:
    ``torch.distributed.elastic.agent.server.RunResult``)
    """

    state: WorkerState
    return_values: dict[int, Any] = Factory(dict)
    failures: dict[int, ProcessFailure] = Factory(dict)

    def is_failed(self) -> bool:
        """Return True if workers failed; a group that stayed UNHEALTHY counts as failed."""
        return self.state in (WorkerState.FAILED, WorkerState.UNHEALTHY)
