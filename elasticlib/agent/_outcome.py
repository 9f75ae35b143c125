"""
Conversion of failures for other nodes, and of the job's outcome for the caller.

Rules of this file: all agents report the coordinator's root cause. This node's own failures are
reported beside it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from attrs import fields

from elasticlib._clock import wall_time
from elasticlib._untrusted import LONGEST_TIME
from elasticlib.agent._policy import Finish, StopRequested
from elasticlib.errors import (
    ElasticError,
    LaunchInterrupted,
    PreemptedError,
    ProcessFailure,
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
    SignalException,
    root_cause,
)
from elasticlib.rendezvous.protocol import FailureNote, Final

_LONGEST = 20_000
"""Maximum number of characters of a text for other nodes."""


def notes(failures: Iterable[ProcessFailure]) -> tuple[FailureNote, ...]:
    """Return the failures for the coordinator: with ages, as clocks differ, and shortened texts."""
    now = wall_time()
    return tuple(
        FailureNote(
            **_facts(failure) | {"message": _shortened(failure.message), "traceback": _shortened(failure.traceback)},
            # A clock may be set to anything.
            age=min(max(0.0, now - failure.when()), LONGEST_TIME),
        )
        for failure in failures
    )


def _facts(failure: ProcessFailure | FailureNote) -> dict[str, Any]:
    """Return the fields that a failure and its note share: all of a note but its age and `cut`."""
    return {each.name: getattr(failure, each.name) for each in fields(FailureNote) if each.name not in ("age", "cut")}


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    # The end of a traceback is the most useful part.
    return f"...\n{text[-_LONGEST:]}"


def agreed(own: dict[int, ProcessFailure], final: Final | None, node: str) -> dict[int, ProcessFailure]:
    """Return the *own* failures of *node* by rank, with the coordinator's root cause."""
    if final is None or final.root is None:
        return own

    note = final.root
    is_own = final.root_node == node and note.rank in own

    # This node knows more about its own failure than the note contains.
    if is_own:
        own[note.rank].root = True
        return own

    when = wall_time() - note.age
    host = _host_of(final.root_node or "")
    root = ProcessFailure(**_facts(note), error_file="", timestamp=when, host=host, root=True)
    return {**own, note.rank: root}


def _host_of(node: str) -> str:
    """Return the host in the name of *node*; the whole name if it has another form."""
    host, _, _ = node.rpartition("/")
    return host or node


def error_of(
    end: Finish,
    results: Mapping[int, Any] = MappingProxyType({}),
    failures: Mapping[int, ProcessFailure] = MappingProxyType({}),
) -> ElasticError | None:
    """
    Return the error for the caller if the run failed and no worker caused it; else None.

    *results* is {global rank: return value}, and *failures* are those of this node's workers by rank.
    """
    if end.stop is not None:
        is_preempted = end.saved and _is_preemption(end.stop)
        return _preempted(end, end.stop, results) if is_preempted else _error_of_stop(end.stop, failures)
    if end.succeeded or end.final is None:
        return None
    return _error_of_job(end, end.final, results)


def _is_preemption(stop: StopRequested) -> bool:
    """Return True unless a person or the program ended the job."""
    is_by_person = stop.signum == signal.SIGINT
    is_by_program = bool(stop.reason) and not stop.is_notice
    return not (is_by_person or is_by_program)


def _error_of_stop(stop: StopRequested, failures: Mapping[int, ProcessFailure]) -> ElasticError:
    received = signal.Signals(stop.signum)
    why = _text_of_stop(stop, received)
    if received == signal.SIGINT:
        # Its workers raise KeyboardInterrupt, which follows from it.
        return LaunchInterrupted(why, received)
    error = SignalException(why + _text_of_raised(failures), received)
    error.is_notice = stop.is_notice
    return error


def _text_of_stop(stop: StopRequested, received: signal.Signals) -> str:
    cause = _cause_of(stop, received)
    # A request of the program says all of it.
    is_whole = bool(stop.reason) and not stop.is_notice
    return cause if is_whole else f"{cause}: its workers were stopped"


def _cause_of(stop: StopRequested, received: signal.Signals) -> str:
    return stop.reason or f"process {os.getpid()} got {received.name}"


def _text_of_raised(failures: Mapping[int, ProcessFailure]) -> str:
    """Return the first exception of a worker, which may be the reason why it has not saved; empty without one."""
    # A connection to a worker that was stopped breaks: such exceptions follow from the stop.
    raised = {rank: each for rank, each in failures.items() if each.exception_type and not each.secondary}
    if not raised:
        return ""
    rank, first = root_cause(raised)
    return f"; rank {rank}: {first.summary()}"


def _preempted(end: Finish, stop: StopRequested, results: Mapping[int, Any]) -> ElasticError:
    received = signal.Signals(stop.signum)
    cause = _cause_of(stop, received)
    work = "no worker had started"
    if end.has_run:
        work = "its workers were asked to stop, and have returned"
    return PreemptedError(f"{cause}: {work}", received, dict(results))


def _preempted_elsewhere(why: str, results: Mapping[int, Any]) -> ElasticError:
    """Return the error of a node whose job ends with another node, which had to end: all work is saved here."""
    message = f"{why}: the workers of process {os.getpid()} were asked to stop, and have returned"
    return PreemptedError(message, signal.SIGTERM, dict(results))


def _error_of_job(end: Finish, final: Final, results: Mapping[int, Any]) -> ElasticError | None:
    if final.succeeded:
        return RendezvousGracefulExitError(end.why)
    has_failures = final.root is not None or final.kind == "failed"
    if has_failures:
        # They are a result, not an error of the run.
        return None
    if final.kind == "stopped":
        return SignalException(end.why, signal.SIGTERM)
    if end.saved:
        return _preempted_elsewhere(end.why, results)
    return _error_of_final(final)


_KINDS = {"timeout": RendezvousTimeoutError}
"""By kind of a job's end, its error; that of all others is `RendezvousClosedError`."""


def _error_of_final(final: Final) -> ElasticError:
    why = final.why
    if final.kind == "refused":
        why = f"this node cannot join the job: {why}"
    kind = _KINDS.get(final.kind, RendezvousClosedError)
    return kind(why)
