"""
What an agent tells of its own work: each step is measured here and becomes a record.

Rules of this file: it measures and tells, and decides nothing; steps have the names of torch's methods. A worker that
was started is told to have ended exactly once, and so is a round: when its cause is decided, or will not be heard.
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
    Tells *sink*, and whoever reads its events and metrics, what happens to *group*, with durations of *clock*.

    Metrics go to *metric_handler*, or to the handler that the program has for agents by then.
    Raises `UnknownNameError` for an event log handler of the group's spec that is not known.
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
        """All of them as one; any thread may use it, and none of them raises."""
        self._total = 0.0
        self._clock = clock
        self._seeking: float | None = None
        """Since when ranks are waited for."""
        self._beginning: float | None = None
        """Since when workers are to be started: since the request to join."""
        self._again: float | None = None
        """Since when workers that ran are to be replaced."""
        self._runs = False
        """Whether workers were told to have started, and not yet to have ended."""
        self._ended = -1
        """The last round whose end was told."""
        self._open: RoundEnd | None = None
        """How the round ended, while its cause is not decided."""
        self.result: RunResult | None = None
        """That of the run, once it has one."""

    # The way to a round.

    def sought(self, node: str) -> None:
        """Ranks were asked for."""
        self._seeking = self._beginning = self._clock()
        if self._again is None and self._group.round >= 0:
            self._again = self._beginning
        self._sink(records.RanksAwaited(node))

    def assigned(self, assignment: RankAssignment) -> None:
        """Ranks were received."""
        self._end_round(assignment.cause)
        last = self._group.round
        # This node was cut off at the end of that round, and only now learns its cause.
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
        """While entered, the rank assignment becomes the ranks of workers."""
        begun = self._clock()
        yield
        ranks = tuple(worker.global_rank for worker in self._group.workers)
        self._sink(records.RanksAssigned(self._group.round, ranks, self._since(begun)))

    def started(self, assignment: RankAssignment, pids: dict[int, int]) -> None:
        """All workers were started."""
        group = self._group
        self._runs = True
        master = f"{group.master_addr}:{group.master_port}"
        sizes = (assignment.group_rank, assignment.group_world_size, assignment.world_size)
        counts = (assignment.restart_count, assignment.max_restarts)
        self._sink(records.RoundStarted(assignment.round, *sizes, *counts, master, pids, assignment.why))
        for worker in self._there():
            self._sink(records.WorkerStarted(_place(worker)))
        self._done(True)

    # While it lasts.

    @contextlib.contextmanager
    def measured(self, hook: Callable[..., Any]) -> Iterator[None]:
        """While entered, *hook* runs; how long it took is told, unless it does so itself (`metrics.prof`)."""
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
        """While entered, the agent is in *state*; how long, is told, however the block ends."""
        begun = self._clock()
        try:
            yield
        finally:
            self._sink(records.StateTimed(state, self._since(begun)))

    def seen(self, result: RunResult) -> None:
        """The workers were looked at."""
        spec = self._group.spec
        left = max(0, spec.max_restarts - self._group.restart_count)
        self._sink(records.WorkersSeen(result.state.value, left))
        if result.state is WorkerState.SUCCEEDED:
            self.stopped(None)

    def stopping(self) -> None:
        """Workers are about to be stopped."""
        self._again = self._clock()

    def stopped(self, failures: Mapping[int, ProcessFailure] | None) -> None:
        """
        No worker is left; *failures*, by global rank, are those that failed by themselves.

        None: all workers succeeded.
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
        """The coordinator said how the round ended, or the job."""
        if isinstance(end, RoundEnd):
            self._open = end
            if end.decided:
                self._end_round(end.why)
        elif end.kind == "failed":
            self._end_round(end.why, ends_job=True)

    def _end_round(self, cause: str = "", *, ends_job: bool = False) -> None:
        """Tell how the round ended whose cause was open; *cause* is empty where none was decided."""
        end, self._open = self._open, None
        if end is not None:
            self._ended = end.round
            self._sink(records.RoundEnded(end.round, cause or end.why, end.restart and not ends_job))

    # The end.

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """For the length of a run: how it ended is told when nothing of it is left."""
        begun = self._clock()
        self._total, self.result = 0.0, None
        try:
            yield
        except BaseException as error:
            self._run_ended(begun, error)
            raise
        self._run_ended(begun, None)

    def last_event(self, state: str, raw_error: str | None = None) -> events.Event:
        """The agent's event *state*, after its run."""
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
        """Workers were started, or never will be."""
        self._sink(records.StepDone(f"{_AGENT}._initialize_workers", self._since(self._beginning), succeeded))
        if self._again is not None:
            self._sink(records.StepDone(f"{_AGENT}._restart_workers", self._since(self._again), succeeded))
        self._beginning = self._again = None

    def _there(self) -> list[Worker]:
        """Those that were started: a signal may have come before any was."""
        return [worker for worker in self._group.workers if worker.id is not None]

    def _since(self, begun: float | None) -> float:
        return 0.0 if begun is None else self._clock() - begun


def _place(worker: Worker) -> records.WorkerPlace:
    return records.WorkerPlace(
        worker.local_rank, worker.global_rank, worker.role_rank, worker.role_world_size, worker.id
    )


def trace_of(error: BaseException) -> str:
    """
    What Python prints of *error*, without the markers below a line.

    For those it parses the line, which some versions cannot do in a thread while another one parses code as well
    (CPython issue 106905): then that one fails, in the midst of a program of the user's.
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
