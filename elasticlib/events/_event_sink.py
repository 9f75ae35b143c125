"""
Conversion of records to events with torch's names.

Rules of this file: an event is made from records alone, and only for a destination that shows it.
The names and the keys of the metadata are torch's. Unlike torch's, events have a time, and values
are not packed into lists of one element.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from json import dumps

from attrs import evolve, frozen

from elasticlib import records
from elasticlib._clock import wall_time
from elasticlib.errors import ProcessFailure
from elasticlib.events._destinations import RENDEZVOUS, drops, get_logging_handler, logger_of
from elasticlib.events._event import Event, EventMetadataValue, EventSource, NodeState, RdzvEvent

PREFIX = "torchelastic.worker.status."
_NO_ERROR_FILE = {"message": "<NONE>"}


@frozen
class JobFacts:
    """Facts that are the same in all events of an agent."""

    run_id: str
    role: str
    backend: str
    """Name of the rendezvous' backend."""
    entry_point: str
    hostname: str


@frozen
class Standing:
    """Current place of an agent in its job."""

    group_rank: int | None = None
    group_world_size: int | None = None
    restart_count: int = 0
    total_run_time: int = 0
    """Duration of the run in whole seconds; 0 until it is over."""


def status_event(
    job: JobFacts,
    standing: Standing,
    state: str,
    source: EventSource = EventSource.AGENT,
    *,
    worker: records.WorkerPlace | None = None,
    failure: ProcessFailure | None = None,
    raw_error: str | None = None,
    duration: float | None = None,
    now: float = 0.0,
) -> Event:
    """
    Return the event ``torchelastic.worker.status.<state>``.

    *duration* is in seconds, *now* in Unix seconds. The metadata has torch's keys; the text under
    ``metadata`` is JSON with facts about the group and the worker.
    """
    more: dict[str, object] = {"group_world_size": standing.group_world_size, "entry_point": job.entry_point}
    if worker is not None:
        more |= _worker_facts(worker, state, failure)
    metadata = _metadata(job, standing, state, more)
    if worker is not None:
        metadata["global_rank"] = worker.global_rank
        metadata["worker_id"] = str(worker.id)

    metadata["raw_error"] = raw_error if failure is None else _raw(failure)
    metadata["duration_ms"] = None if duration is None else duration * 1000
    return Event(PREFIX + state, source, int(now * 1000), metadata)


def _worker_facts(worker: records.WorkerPlace, state: str, failure: ProcessFailure | None) -> dict[str, object]:
    facts: dict[str, object] = {
        "local_rank": worker.local_rank,
        "role_rank": worker.role_rank,
        "role_world_size": worker.role_world_size,
    }
    if failure is not None:
        return {**facts, "exit_code": failure.exitcode, "worker_pid": failure.pid}

    # A custom agent may identify its workers by anything.
    pid = worker.id if isinstance(worker.id, int) else None
    return {**facts, "exit_code": 0 if state == "SUCCEEDED" else None, "worker_pid": pid}


def watchdog_event(job: JobFacts, standing: Standing, record: records.WatchdogReported, now: float) -> Event:
    """Return the event for a record of the watchdog, with torch's name and the state RUNNING."""
    more: dict[str, object] = {"watchdog_event": record.event}
    if record.worker_pid is not None:
        more["worker_pid"] = str(record.worker_pid)
        more["scope_id"] = record.scope_id
        more["expiration_time"] = str(record.expiration_time)
        more["signal"] = str(record.signum)
    return Event(record.event, EventSource.AGENT, int(now * 1000), _metadata(job, standing, "RUNNING", more))


def _metadata(job: JobFacts, standing: Standing, state: str, more: dict[str, object]) -> dict[str, EventMetadataValue]:
    return {
        "run_id": job.run_id,
        "global_rank": None,
        "group_rank": standing.group_rank,
        "worker_id": None,
        "role": job.role,
        "hostname": job.hostname,
        "state": state,
        "total_run_time": standing.total_run_time,
        "rdzv_backend": job.backend,
        "raw_error": None,
        "metadata": dumps(more),
        "agent_restarts": standing.restart_count,
    }


def _raw(failure: ProcessFailure) -> str:
    # Without an error file this is a placeholder, and the message says more.
    data = failure.error_file_data
    return dumps({"message": failure.message} if data == _NO_ERROR_FILE else data, default=str)


class EventSink:
    """
    Sink that sends an agent's records to *destination*, as events.

    As in torch, ends of workers are sent once, at the end of the run, and only for the last round.
    So no restart followed after FAILED or TERMINATED. Raises `UnknownNameError` for an unknown
    destination.
    """

    def __init__(self, job: JobFacts, destination: str, now: Callable[[], float] = wall_time) -> None:
        get_logging_handler(destination)
        self._job = job
        self._destination = destination
        self._now = now
        self._standing = Standing()
        self._ended: list[Event] = []
        self._turn = threading.Lock()

    def __call__(self, record: records.Record) -> None:
        """Send the events of one record, if it has any; any thread may call it."""
        with self._turn:
            events = self._events(record)
        # Outside the lock, since a handler may be slow or record an event itself.
        for event in events:
            _show(event, self._destination)

    def _events(self, record: records.Record) -> list[Event]:
        if isinstance(record, records.RanksReceived):
            # A new round begins, and only the ends of the last round are reported.
            self._ended = []
            self._standing = Standing(record.group_rank, record.group_world_size, record.restart_count)

        now = self._now()
        event = partial(status_event, self._job, self._standing, now=now)
        match record:
            case records.RanksReceived() | records.RanksMissed():
                return [event("RENDEZVOUS", duration=record.duration)]
            case records.RanksAssigned():
                return [event("ASSIGN_WORKER_RANKS", duration=record.duration)]
            case records.StateTimed():
                return [event(record.state, duration=record.duration)]
            case records.WorkerStarted():
                return [event("START", EventSource.WORKER, worker=record.worker)]
            case records.WorkerEnded():
                self._ended.append(
                    event(record.state, EventSource.WORKER, worker=record.worker, failure=record.failure)
                )
                return []
            case records.RunEnded():
                return self._last(int(record.duration))
            case records.AgentSucceeded():
                return [event("SUCCEEDED")]
            case records.AgentFailed():
                return [event("FAILED", raw_error=record.trace)]
            case records.WatchdogReported():
                return [watchdog_event(self._job, self._standing, record, now)]
            case _:
                return []

    def _last(self, seconds: int) -> list[Event]:
        self._standing = evolve(self._standing, total_run_time=seconds)
        # Only now is the duration of the run known, which these events contain.
        ended, self._ended = self._ended, []
        for event in ended:
            event.metadata["total_run_time"] = seconds
        return ended


_RENDEZVOUS_STEPS: dict[type[records.Record], tuple[str, NodeState]] = {
    records.RanksAwaited: ("wait_for_ranks", NodeState.INIT),
    records.RanksReceived: ("get_ranks", NodeState.SUCCEEDED),
    records.RanksMissed: ("wait_for_ranks", NodeState.FAILED),
    records.RoundStarted: ("start_round", NodeState.RUNNING),
    records.RoundEnded: ("end_round", NodeState.RUNNING),
}
"""Step and state of the node, by the kind of record."""


class RendezvousSink:
    """Sink that sends an agent's records about rounds to ``dynamic_rendezvous``, as `RdzvEvent`."""

    def __init__(self, job: JobFacts) -> None:
        self._job = job
        self._rank: int | None = None
        self._master = ""

    def __call__(self, record: records.Record) -> None:
        """Send the event of one record, if it has one."""
        if type(record) not in _RENDEZVOUS_STEPS:
            return

        if isinstance(record, records.RanksAwaited):
            self._rank, self._master = None, ""
        elif isinstance(record, records.RanksReceived):
            self._rank, self._master = record.group_rank, record.master

        name, state = _RENDEZVOUS_STEPS[type(record)]
        event = RdzvEvent(
            name=f"agent:{name}",
            run_id=self._job.run_id,
            message=str(record),
            hostname=self._job.hostname,
            pid=os.getpid(),
            node_state=state,
            master_endpoint=self._master,
            rank=self._rank,
            error_trace=record.trace if isinstance(record, records.RanksMissed) else "",
        )
        _show(event, RENDEZVOUS)


def _show(event: Event | RdzvEvent, destination: str) -> None:
    text = event.serialize()
    logger_of(destination).info(text)
    if destination == RENDEZVOUS and drops(destination):
        # The user wants these events, but has set no handler for them.
        logger_of("console").info(text)


def sinks(job: Callable[[], JobFacts], destination: str) -> list[records.Sink]:
    """
    Return the sinks for an agent's records; none that would discard everything.

    Events of the rendezvous go only to ``dynamic_rendezvous``, if that is *destination* or has a
    handler. Raises `UnknownNameError` for an unknown destination.
    """
    wanted: list[records.Sink] = []
    if destination == RENDEZVOUS or not drops(destination):
        wanted.append(EventSink(job(), destination))
    if destination == RENDEZVOUS or not drops(RENDEZVOUS):
        wanted.append(RendezvousSink(job()))
    return wanted
