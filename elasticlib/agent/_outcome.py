"""
Failures on their way to other nodes, and the job's outcome on its way to the caller.

Rules of this file: all agents report the same root cause, that of the coordinator; what failed here is
reported beside it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable

from elasticlib._untrusted import LONGEST_TIME
from elasticlib.agent._policy import Finish
from elasticlib.errors import (
    ElasticError,
    LaunchInterrupted,
    ProcessFailure,
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
    SignalException,
)
from elasticlib.rendezvous.protocol._messages import FailureNote, Final

_LONGEST = 20_000
"""Characters of a text that peers get to see."""


def notes(failures: Iterable[ProcessFailure]) -> tuple[FailureNote, ...]:
    """The failures as the coordinator gets them: by age, since clocks differ, and not too long."""
    now = time.time()
    return tuple(
        FailureNote(
            failure.rank,
            failure.local_rank,
            failure.pid,
            failure.exitcode,
            _shortened(failure.message),
            failure.exception_type,
            _shortened(failure.traceback),
            failure.hint,
            failure.secondary,
            min(max(0.0, now - failure.when()), LONGEST_TIME),  # a clock may be set to anything
            failure.fatal,
        )
        for failure in failures
    )


def _shortened(text: str) -> str:
    # The end of a traceback says most.
    return text if len(text) <= _LONGEST else f"...\n{text[-_LONGEST:]}"


def agreed(own: dict[int, ProcessFailure], final: Final | None, node: str) -> dict[int, ProcessFailure]:
    """*own* failures by rank, with the one that the coordinator of *node*'s job found to be the root cause."""
    if final is None or final.root is None:
        return own
    note, host = final.root, (final.root_node or "").rpartition("/")[0] or final.root_node
    found = own.get(note.rank) if final.root_node == node else None
    if found is not None:
        found.root = True
        return own
    root = ProcessFailure(
        note.local_rank,
        note.pid,
        note.exitcode,
        "",
        message=note.message,
        timestamp=time.time() - note.age,
        rank=note.rank,
        exception_type=note.exception_type,
        traceback=note.traceback,
        hint=note.hint,
        secondary=note.secondary,
        host=host or "",
        root=True,
        fatal=note.fatal,
    )
    return {**own, note.rank: root}


def error_of(end: Finish) -> ElasticError | None:
    """What the caller gets when the run ended badly, and not by workers that failed."""
    final = end.final
    if end.signum is not None:
        came = signal.Signals(end.signum)
        kind = LaunchInterrupted if came == signal.SIGINT else SignalException
        return kind(f"process {os.getpid()} got {came.name}: its workers were stopped", came)
    if end.succeeded or final is None:
        return None
    if final.succeeded:
        return RendezvousGracefulExitError(end.why)
    if final.root is not None or final.kind == "failed":
        return None
    if final.kind == "timeout":
        return RendezvousTimeoutError(final.why)
    if final.kind == "refused":
        return RendezvousClosedError(f"this node cannot join the job: {final.why}")
    return RendezvousClosedError(final.why)
