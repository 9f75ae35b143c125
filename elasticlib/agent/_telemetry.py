"""
Records and durations of an agent's own work.

Rules of this file: it measures and reports, and decides nothing. Steps have the names of torch's
methods. The end of each started worker is reported exactly once. So is the end of each round, when
its cause is decided or can no longer arrive.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from elasticlib import events, metrics, records
from elasticlib._clock import Clock, wall_time
from elasticlib.errors import ProcessFailure
from elasticlib.metrics import MEASURED_BY_PROF
from elasticlib.rendezvous import Rendezvous, host_name
from elasticlib.rendezvous.protocol import Final, RankAssignment, RoundEnd
from elasticlib.state import RunResult, Worker, WorkerGroup, WorkerState

_AGENT = "SimpleElasticAgent"


class Telemetry:
    """
    Reports about *group*, with durations by *clock*, to *sink* and as events and metrics.

    Metrics go to *metric_handler*, or to the handler that the program has set for agents by then.
    Raises `UnknownNameError` if the event log handler of the group's spec is unknown.
    """

    def __init__(
        self,
        group: WorkerGroup,
        run_id: str,
        sink: records.Sink,
        clock: Clock,
        metric_handler: metrics.MetricHandler | None = None,
    ) -> None:
        self._group = group
        self._run_id = run_id
        as_events = events.sinks(self._facts, group.spec.event_log_handler)
        self.sink = self._sink = records.fan_out(sink, *as_events, metrics.MetricSink(group.spec.role, metric_handler))
        """All sinks as one; any thread may use it, and it does not raise."""
        self._total = 0.0
        self._clock = clock
        self._seeking: float | None = None
        """Start of the wait for ranks; None if the agent does not wait."""
        self._beginning: float | None = None
        """Start of the way to running workers: the request to join."""
        self._again: float | None = None
        """Start of the replacement of earlier workers."""
        self._runs = False
        """True if the start of workers was reported, but not yet their end."""
        self._ended = -1
        """Last round whose end was reported."""
        self._open: RoundEnd | None = None
        """End of a round whose cause is not decided yet."""
        self.result: RunResult | None = None
        """Result of the run; None until it has one."""

    # The way to a round.

    def sought(self, node: str) -> None:
        """Report that this node has asked for ranks."""
        self._seeking = self._beginning = self._clock()
        # Workers that had all succeeded were not stopped: their replacement begins with the
        # request.
        if self._again is None and self._group.round >= 0:
            self._again = self._beginning
        self._sink(records.RanksAwaited(node))

    def assigned(self, assignment: RankAssignment) -> None:
        """Report that ranks have arrived, and the end of the last round if that was open."""
        self._end_round(assignment.cause)
        last = self._group.round

        # This node had no contact at the end of that round, and learns its cause only now.
        if assignment.cause and self._ended < last == assignment.round - 1:
            self._sink(records.RoundEnded(last, assignment.cause, True))
        waited, self._seeking = self._since(self._seeking), None
        sizes = (assignment.group_rank, assignment.group_world_size, assignment.world_size)
        master = f"{assignment.master_addresses[0]}:{assignment.master_port}"
        self._sink(
            records.RanksReceived(assignment.round, *sizes, assignment.restart_count, master, assignment.why, waited)
        )

    @contextlib.contextmanager
    def ranking(self) -> Iterator[None]:
        """Time the block, which turns the assignment into ranks of workers, and report these."""
        begun = self._clock()
        yield
        ranks = tuple(worker.global_rank for worker in self._group.workers)
        self._sink(records.RanksAssigned(self._group.round, ranks, self._since(begun)))

    def started(self, assignment: RankAssignment, pids: dict[int, int]) -> None:
        """Report that all workers have started."""
        group = self._group
        self._runs = True
        master = f"{group.master_addr}:{group.master_port}"
        sizes = (assignment.group_rank, assignment.group_world_size, assignment.world_size)
        counts = (assignment.restart_count, assignment.max_restarts)
        self._sink(records.RoundStarted(assignment.round, *sizes, *counts, master, pids, assignment.why))
        for worker in self._there():
            self._sink(records.WorkerStarted(_place(worker)))
        self._done(True)

    # During a round.

    @contextlib.contextmanager
    def measured(self, hook: Callable[..., Any]) -> Iterator[None]:
        """Time the block, which calls *hook*, unless `metrics.prof` does that already."""
        if getattr(hook, MEASURED_BY_PROF, False):
            yield
            return

        begun, succeeded = self._clock(), False
        try:
            yield
            succeeded = True
        finally:
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            self._sink(records.StepDone(name, self._since(begun), succeeded))

    @contextlib.contextmanager
    def timed(self, state: str) -> Iterator[None]:
        """Time the block and report its duration as *state*, however the block ends."""
        begun = self._clock()
        try:
            yield
        finally:
            self._sink(records.StateTimed(state, self._since(begun)))

    def seen(self, result: RunResult) -> None:
        """Report the state of the workers after a check."""
        spec = self._group.spec
        left = max(0, spec.max_restarts - self._group.restart_count)
        self._sink(records.WorkersSeen(result.state.value, left))
        if result.state is WorkerState.SUCCEEDED:
            self.stopped(None)

    def stopping(self) -> None:
        """Note that workers are about to be stopped."""
        self._again = self._clock()

    def stopped(self, failures: Mapping[int, ProcessFailure] | None) -> None:
        """
        Report that no worker is left.

        *failures*, by global rank, excludes workers that were stopped; None: all workers succeeded.
        """
        if not self._runs:
            return

        self._runs = False
        for worker in self._there():
            place, failure = _place(worker), (failures or {}).get(worker.global_rank)
            if failures is None:
                self._sink(records.WorkerEnded(place, "SUCCEEDED"))
            elif failure is None:
                self._sink(records.WorkerEnded(place, "TERMINATED"))
            else:
                self._sink(records.WorkerEnded(place, "FAILED", failure))

    def ended(self, end: RoundEnd | Final) -> None:
        """Report the coordinator's decision about the round or the job."""
        if isinstance(end, RoundEnd):
            self._open = end
            if end.decided:
                self._end_round(end.why)
        elif end.kind == "failed":
            self._end_round(end.why, ends_job=True)

    def _end_round(self, cause: str = "", *, ends_job: bool = False) -> None:
        """Report the end of the open round, if any; *cause* is empty if none was decided."""
        end, self._open = self._open, None
        if end is not None:
            self._ended = end.round
            self._sink(records.RoundEnded(end.round, cause or end.why, end.restart and not ends_job))

    # The end.

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Time a run in the block, and report its outcome after it."""
        begun = self._clock()
        self._total, self.result = 0.0, None
        try:
            yield
        except BaseException as error:
            self._run_ended(begun, error)
            raise
        self._run_ended(begun, None)

    def last_event(self, state: str, raw_error: str | None = None) -> events.Event:
        """Return the agent's event *state*, after its run."""
        group = self._group
        place = (group.group_rank, group.group_world_size, group.restart_count, int(self._total))
        return events.status_event(self._facts(), events.Standing(*place), state, raw_error=raw_error, now=wall_time())

    def _facts(self) -> events.JobFacts:
        spec = self._group.spec
        handler: Any = spec.rdzv_handler
        backend = handler.backend if isinstance(handler, Rendezvous) else str(handler.get_backend())
        return events.JobFacts(self._run_id, spec.role, backend, spec.get_entrypoint_name(), host_name(spec.local_addr))

    def _run_ended(self, begun: float, error: BaseException | None) -> None:
        # Workers whose end was not reported ended with the agent.
        self.stopped({})
        self._end_round()
        if self._seeking is not None:
            self._ranks_missed(self._seeking, error)
            self._seeking = None

        if self._beginning is not None:
            self._done(False)
        self._again = None
        self._total = self._since(begun)
        spec, group = self._group.spec, self._group
        self._sink(records.RunEnded(self._outcome(error), group.restart_count, spec.max_restarts, self._total))
        if error is None or isinstance(error, Exception):
            self._sink(records.StepDone(f"{_AGENT}.run", self._total, error is None))

    def _ranks_missed(self, since: float, error: BaseException | None) -> None:
        why, trace = "the job ended without this node", ""
        if error is not None:
            why, trace = str(error) or type(error).__name__, trace_of(error)
        self._sink(records.RanksMissed(why, self._since(since), trace))

    def _outcome(self, error: BaseException | None) -> Literal["SUCCEEDED", "FAILED", "RAISED"]:
        if error is not None or self.result is None:
            return "RAISED"
        return "FAILED" if self.result.is_failed() else "SUCCEEDED"

    def _done(self, succeeded: bool) -> None:
        """Report the durations until the start of workers, or until it is certain to fail."""
        self._sink(records.StepDone(f"{_AGENT}._initialize_workers", self._since(self._beginning), succeeded))
        if self._again is not None:
            self._sink(records.StepDone(f"{_AGENT}._restart_workers", self._since(self._again), succeeded))
        self._beginning = self._again = None

    def _there(self) -> list[Worker]:
        """Return the workers that were started; after an early signal there may be none."""
        return [worker for worker in self._group.workers if worker.id is not None]

    def _since(self, begun: float | None) -> float:
        return 0.0 if begun is None else self._clock() - begun


def _place(worker: Worker) -> records.WorkerPlace:
    return records.WorkerPlace(
        worker.local_rank, worker.global_rank, worker.role_rank, worker.role_world_size, worker.id
    )


def trace_of(error: BaseException) -> str:
    """
    Return the traceback of *error* as Python prints it, without the markers below a line.

    Python parses the line for these markers. In some versions this makes another thread that
    parses code at the same time fail, in the middle of the user's program (CPython issue 106905).
    """
    trace = traceback.TracebackException.from_exception(error)
    # Older versions print no markers.
    if sys.version_info >= (3, 11):
        every: list[Any] = [trace]
        for each in every:
            for frame in each.stack:
                frame.colno = frame.end_colno = None
            every += filter(None, (each.__cause__, each.__context__, *(getattr(each, "exceptions", None) or ())))
    return "".join(trace.format())
