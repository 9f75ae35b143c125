"""
What is: the state of a group of workers while it runs.

Rules of this file: these classes hold, they do not act; `WorkerGroup` is a view for hooks and readers
that only the agent's shell writes, by steps that are in the table `NEXT`.
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
    """Where a group of workers is in its life; `NEXT` lists the steps."""

    UNKNOWN = "UNKNOWN"
    """The agent lost sight of the group."""
    INIT = "INIT"
    """Not started yet."""
    HEALTHY = "HEALTHY"
    """Running."""
    UNHEALTHY = "UNHEALTHY"
    """Running, but not well: counts as failed."""
    STOPPED = "STOPPED"
    """Stopped by the agent, to be started again."""
    SUCCEEDED = "SUCCEEDED"
    """All workers ended well."""
    FAILED = "FAILED"
    """A worker failed; at the end of a run: and no restart was left."""

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Whether the processes of a group in *state* are alive."""
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
"""The life cycle as a table: state -> states that may follow. `WorkerGroup.step` holds the agent to it."""
_STORY = 20
"""Steps of a group that are remembered."""


@define(eq=False, repr=False)
class Worker:
    """
    One worker: its ranks, and in `id` its process id once it was started.

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
    """Where the agent took the group, and why: what a hook writes to `state` changes nothing here."""

    def step(self, state: WorkerState, why: str) -> None:
        """The group is in *state* now. Raises `InvalidTransitionError` where `NEXT` lacks that step."""
        last, _ = self._steps[-1]
        # The same state again, such as HEALTHY at each look, is no step.
        if state is not last:
            if state not in NEXT[last]:
                story = tuple(f"{each.value}: {reason}" for each, reason in self._steps)
                raise InvalidTransitionError(f"the worker group of round {self.round}", last.value, state.value, story)
            self._steps.append((state, why))
        self.state = state


@define
class RunResult(DataclassView):
    """
    How a group of workers ended.

    `return_values` and `failures` are keyed by global rank and have no key in common. (torch:
    ``torch.distributed.elastic.agent.server.RunResult``)
    """

    state: WorkerState
    return_values: dict[int, Any] = Factory(dict)
    failures: dict[int, ProcessFailure] = Factory(dict)

    def is_failed(self) -> bool:
        """Whether workers failed; a group left UNHEALTHY counts as failed."""
        return self.state in (WorkerState.FAILED, WorkerState.UNHEALTHY)
