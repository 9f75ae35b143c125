"""
The end of a launch for the scheduler: exit status, termination log, and whether the job is requeued. Pure.

Rules of this file: a decision depends on the error's class and fields, never on its text.
"""

from __future__ import annotations

from attrs import frozen

from elasticlib.engines import EngineContext
from elasticlib.errors import (
    PREEMPTED,
    ChildFailedError,
    ConfigError,
    ElasticError,
    PreemptedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousNotFoundError,
    SignalException,
)

FAILED = 1
_LONGEST = 4096
"""Bytes of a termination log that Kubernetes keeps."""


@frozen
class ExitSettings:
    """The options of the command for its end."""

    preempt_exit: int = PREEMPTED
    failure_exit: int = FAILED
    """Exit status of a failure that another try would repeat."""
    termination_log: str | None = None
    """File for the root cause; None: the default of Kubernetes, if it exists."""
    requeue: int = 0
    """Most times that the Slurm job is requeued."""
    engine: EngineContext | None = None
    """The engine that started this process."""


def exit_status(error: ElasticError, settings: ExitSettings) -> int:
    """Return the exit status of the command whose launch raised *error*."""
    match error:
        case PreemptedError():
            return settings.preempt_exit
        case ChildFailedError(may_pass=False):
            return settings.failure_exit
        case ConfigError():
            return 2
        case RendezvousGracefulExitError():
            # The job succeeded, and a script returns no results that could be missing.
            return 0
        case _:
            return FAILED


def termination_message(error: ElasticError) -> str:
    """Return the root cause in one line, with what a scheduler may do."""
    parts = [error.summary() if isinstance(error, ChildFailedError) else str(error) or type(error).__name__]
    if isinstance(error, ChildFailedError) and not error.may_pass:
        parts.append("another try would fail again")
    if error.lost_hosts:
        parts.append(f"lost hosts: {', '.join(error.lost_hosts)}")
    text = " ".join("; ".join(parts).split())
    # The cut may fall within a character, whose rest is left out.
    return text.encode(errors="replace")[:_LONGEST].decode(errors="ignore")


def may_be_requeued(error: ElasticError, settings: ExitSettings) -> bool:
    """Return True if the end of a Slurm job is a reason to requeue it again."""
    restarts = 0 if settings.engine is None else settings.engine.restart_count
    is_reason = _is_preemption(error) or has_lost_nodes(error)
    return is_reason and restarts < settings.requeue


def _is_preemption(error: ElasticError) -> bool:
    """Return True if the scheduler ended the launch, whether or not the workers have saved."""
    return isinstance(error, PreemptedError) or (isinstance(error, SignalException) and error.is_notice)


def has_lost_nodes(error: ElasticError) -> bool:
    """Return True if the launch ended because nodes of the job, or the one with its store, were lost."""
    # A store that was never reached was not lost.
    has_lost_store = isinstance(error, RendezvousConnectionError) and not isinstance(error, RendezvousNotFoundError)
    has_lost_members = isinstance(error, RendezvousError) and bool(error.lost_hosts)
    return has_lost_store or has_lost_members
