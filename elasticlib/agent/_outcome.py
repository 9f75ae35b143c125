"""
Failures on their way to other nodes, and the job's outcome on its way to the caller.

Rules of this file: all agents report the same root cause, that of the coordinator; what failed here is
reported beside it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from typing import Any

from attrs import fields

from elasticlib._clock import wall_time
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
from elasticlib.rendezvous.protocol import FailureNote, Final

_LONGEST = 20_000
"""Characters of a text that peers get to see."""


def notes(failures: Iterable[ProcessFailure]) -> tuple[FailureNote, ...]:
    """The failures as the coordinator gets them: by age, since clocks differ, and not too long."""
    now = wall_time()
    return tuple(
        FailureNote(
            **_facts(failure) | {"message": _shortened(failure.message), "traceback": _shortened(failure.traceback)},
            age=min(max(0.0, now - failure.when()), LONGEST_TIME),  # a clock may be set to anything
        )
        for failure in failures
    )


def _facts(told: ProcessFailure | FailureNote) -> dict[str, Any]:
    """What a failure and its note call by the same names: all of a note but its age."""
    return {each.name: getattr(told, each.name) for each in fields(FailureNote) if each.name not in ("age", "cut")}


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
    when = wall_time() - note.age
    root = ProcessFailure(**_facts(note), error_file="", timestamp=when, host=host or "", root=True)
    return {**own, note.rank: root}


def error_of(end: Finish) -> ElasticError | None:
    """What the caller gets when the run ended badly, and not by workers that failed."""
    final = end.final
    if end.stop is not None:
        came = signal.Signals(end.stop.signum)
        kind = LaunchInterrupted if came == signal.SIGINT else SignalException
        if end.stop.asked:
            return kind(end.stop.asked, came)
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
