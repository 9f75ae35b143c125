"""
The decisions of one agent about its workers. PURE: ``step(state, event) -> (state, actions)``.

Rules of this file: no clock, no I/O. Events report what happened; the agent carries out the actions
in order. The coordinator decides about rounds; this file decides about the node's own workers:

    JOINING --ranks assigned--> RUNNING --failed / ended / signal / contact lost--> STOPPING
    STOPPING --gone--> JOINING or WAITING
    RUNNING --returned, as asked--> JOINING, WAITING or DONE
    RUNNING --succeeded--> WAITING --final--> DONE
                           WAITING --ended / contact lost--> JOINING --final--> DONE

A node keeps its success in a round until it starts the next one. Its results are those of the last
round that it started. They count if the job succeeded in that round, also for a node that has asked
for ranks again since.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from attrs import evolve, field, frozen

from elasticlib.errors import InvalidTransitionError
from elasticlib.rendezvous import MembershipEvent
from elasticlib.rendezvous.protocol import (
    ContactLost,
    Final,
    RankAssignment,
    RoundEnd,
    StopAgreed,
    StopAsked,
    StopProposed,
    StoreGone,
)


class Phase(enum.Enum):
    """Phase of an agent."""

    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    WAITING = "waiting"
    """No worker runs; the agent waits for the coordinator's decision."""
    DONE = "done"


NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.JOINING: frozenset({Phase.RUNNING, Phase.DONE}),
    # Joining: the workers returned because they were asked to. Done: besides that, no coordinator is left to wait for.
    Phase.RUNNING: frozenset({Phase.STOPPING, Phase.WAITING, Phase.JOINING, Phase.DONE}),
    Phase.STOPPING: frozenset({Phase.JOINING, Phase.WAITING, Phase.DONE}),
    Phase.WAITING: frozenset({Phase.JOINING, Phase.DONE}),
    Phase.DONE: frozenset(),
}
"""Phases that may follow each phase, as in the picture above; `step` checks it."""
_SIGINT = 2
_STORY = 20
"""Number of transitions to remember."""


@frozen
class AgentState:
    """State of an agent between two events."""

    phase: Phase = Phase.JOINING
    round: int = -1
    stop: StopRequested | None = None
    """Request to stop this node, by a signal or by the program."""
    noticed: StopRequested | None = None
    """Notice of this node's end that workers handle on their own, until the time for their return is over."""
    return_requested: bool = False
    """True if the workers were requested to return at a step of their own, and run until then."""
    agreed: bool = False
    """True if workers have time to return: all ranks of the job know that step, or workers handle a notice."""
    saved: bool = False
    """True if all workers have returned after that, and none has started since."""
    finished: bool = False
    """True if they had all succeeded before they knew of the stop."""
    end: RoundEnd | None = None
    """Coordinator's decision about the current round."""
    final: Final | None = None
    lost: bool = False
    """True if contact was lost while workers ran: the round goes on without this node."""
    succeeded: bool = False
    """True if the node has reported success for `round`, and has started no later round."""
    has_reported_store: bool = False
    """True if the node has reported the loss of the workers' store after its own success."""
    gone: str = ""
    """Reason why the job has no coordinator any more; empty if it may have one."""
    story: tuple[str, ...] = field(default=(), eq=False, repr=False)
    """Last transitions, each with its cause."""


# Events.


@frozen
class WorkersFailed:
    """Failure of a worker of this node, or an unhealthy group."""

    why: str


@frozen
class WorkersSucceeded:
    """Success of all workers of this node."""

    stopped: bool = False
    """True if one of them returned because it was asked to stop, or all did after a notice that they handle."""


@frozen
class WorkersGone:
    """End of a stop: no worker is left."""

    succeeded: bool = False
    """True if all workers had succeeded before the stop reached any of them."""
    saved: bool = False
    """True if all workers ended with success by their own handlers of a signal that announced this node's end."""


@frozen
class WorkerStoreLost:
    """Loss of the store that this node, whose workers have succeeded, hosts for other nodes."""


@frozen
class StopRequested:
    """Request to stop this node: a handled signal, or a call of the program."""

    signum: int
    reason: str = ""
    """Reason given by the program; empty for a signal."""
    grace: float | None = None
    """Seconds until SIGKILL; None: the launch's ``shutdown_timeout``."""
    is_polled: bool = False
    """True if the workers' program asks whether it should stop."""
    is_notice: bool = False
    """True if it announces the end of this node: workers that return with success have saved, and do not run on."""
    is_handled: bool = False
    """True if workers got the signal and handle it, so that nothing else must stop them yet."""
    ends_job: bool = False
    """True if the job must end on all nodes, and not only on this one."""
    worker_signum: int | None = None
    """Signal that ends the workers if they do not return; None: `signum`."""

    @property
    def why(self) -> str:
        """Reason of the stop, for messages."""
        return self.reason or f"signal {self.signum}"


@frozen
class StopDue:
    """Workers that were asked to stop have little time left."""

    grace: float | None
    """Seconds until SIGKILL; None: the launch's ``shutdown_timeout``."""


Event: TypeAlias = (
    MembershipEvent | WorkersFailed | WorkersSucceeded | WorkersGone | WorkerStoreLost | StopRequested | StopDue
)


# Actions.


@frozen
class AskForRanks:
    """Action: ask for ranks in the next round."""


@frozen
class Start:
    """Action: start the workers of these ranks."""

    assignment: RankAssignment


@frozen
class WantStop:
    """Action: report to the coordinator that this node must end; `StopAsked` answers."""

    stop: StopRequested


@frozen
class AwaitReturn:
    """Action: give workers this time at most to return, from now on; `StopDue` is its end."""

    grace: float | None = None
    """Seconds until SIGKILL; None: the launch's ``shutdown_timeout``."""


@frozen
class AskWorkers:
    """Action: ask the workers to return at a common step; `WorkersSucceeded` or `StopDue` follows."""

    request: StopAsked


@frozen
class Propose:
    """Action: let the workers wait in this call of ``should_stop``."""

    call: int


@frozen
class Agree:
    """Action: let the workers return in the proposed call."""


@frozen
class StopWorkers:
    """Action: stop all workers; `WorkersGone` follows."""

    why: str
    signum: int | None = None
    """Signal to pass on; None: SIGTERM."""
    grace: float | None = None
    """Seconds until SIGKILL; None: the launch's ``shutdown_timeout``."""
    spares: bool = False
    """True if workers that save may ignore the signal until SIGKILL."""


@frozen
class ReportFailed:
    """Action: report failed workers, or the loss of the store that other nodes use, at once."""

    round: int


@frozen
class ReportStopped:
    """Action: report to the coordinator that no worker of the round is left, and which failed."""

    round: int


@frozen
class ReportSucceeded:
    """Action: report to the coordinator that all workers succeeded."""

    round: int


@frozen
class LeaveJob:
    """Action: report to the coordinator that this node leaves."""

    why: str
    round: int | None = None
    """Round whose workers still run; `ReportStopped` follows for it."""
    ends_job: bool = False
    """True if the job must end on all nodes."""


@frozen
class CloseJob:
    """Action: report to the coordinator that the job must end on all nodes."""

    why: str


@frozen
class Finish:
    """Action: return the result, or raise if something else than a worker ended the run."""

    succeeded: bool
    """True if the job succeeded and this node's results were not discarded."""
    why: str
    stop: StopRequested | None = None
    final: Final | None = None
    """Coordinator's final message; None if none came, and a success is that of this node alone."""
    results: bool = False
    """True if the return values of this node's last round are results of the job."""
    saved: bool = False
    """True if no work is lost: all workers returned after they were asked to stop, or none had started."""
    has_run: bool = True
    """False if no worker had started."""


Action: TypeAlias = (
    AskForRanks
    | Start
    | WantStop
    | AwaitReturn
    | AskWorkers
    | Propose
    | Agree
    | StopWorkers
    | ReportFailed
    | ReportStopped
    | ReportSucceeded
    | LeaveJob
    | CloseJob
    | Finish
)
Step: TypeAlias = tuple[AgentState, tuple[Action, ...]]


def begin() -> Step:
    """Return the first state and the first actions."""
    return AgentState(), (AskForRanks(),)


def step(state: AgentState, event: Event) -> Step:
    """
    Return the next state, and the actions for *event*.

    Raises `InvalidTransitionError` if `NEXT` does not allow the transition.
    """
    # A late event changes nothing.
    if state.phase is Phase.DONE:
        return state, ()

    after, actions = _REACTIONS[type(event)](state, event)
    if after.phase is state.phase:
        return after, actions
    if after.phase not in NEXT[state.phase]:
        raise InvalidTransitionError(
            f"the agent in round {state.round}", state.phase.value, after.phase.value, (*state.story, _described(event))
        )

    story = (*state.story, f"{state.phase.value} to {after.phase.value}: {_described(event)}")[-_STORY:]
    return evolve(after, story=story), actions


def _described(event: Event) -> str:
    return f"{type(event).__name__} {getattr(event, 'why', '')}".strip()


# One function for each event, for all phases in which it may come.


def _assigned(state: AgentState, assignment: RankAssignment) -> Step:
    # It belongs to a round that this node has left after a signal.
    if state.phase is not Phase.JOINING:
        return state, ()
    return AgentState(Phase.RUNNING, assignment.round, story=state.story), (Start(assignment),)


def _failed(state: AgentState, failed: WorkersFailed) -> Step:
    # A worker that ends while it is being stopped has not failed.
    if state.phase is not Phase.RUNNING:
        return state, ()
    return evolve(state, phase=Phase.STOPPING), (
        ReportFailed(state.round),
        *_leave_if_stopped(state),
        StopWorkers(failed.why),
    )


def _leave_if_stopped(state: AgentState) -> tuple[Action, ...]:
    """Return the report that this node leaves, if it must end and waited for its workers to return."""
    return () if state.stop is None else (_leave(state.stop, state.round),)


def _succeeded(state: AgentState, success: WorkersSucceeded) -> Step:
    # If they are being stopped already, `WorkersGone` reports whether they ended before.
    if state.phase is not Phase.RUNNING:
        return state, ()
    if success.stopped:
        return _returned(state)
    state = evolve(state, finished=state.stop is not None)
    return _orphaned(evolve(state, phase=Phase.WAITING, succeeded=True), ReportSucceeded(state.round))


def _returned(state: AgentState) -> Step:
    """Go on after all workers have returned because they were asked to stop: their work is saved, but not done."""
    # Workers that handle a notice on their own have returned for it: this node ends, as if by a
    # request.
    state = evolve(state, saved=True, stop=state.stop or state.noticed)
    if state.stop is not None:
        return _done(state, _leave(state.stop, state.round), ReportStopped(state.round))
    if state.final is not None:
        return _done(state, ReportStopped(state.round))
    if _is_repeated(state):
        return evolve(state, phase=Phase.JOINING), (ReportStopped(state.round), AskForRanks())
    # The node that must end may have finished, and then never leaves: this one says itself that its work is not done.
    return evolve(state, phase=Phase.WAITING), (ReportStopped(state.round),)


def _gone(state: AgentState, gone: WorkersGone) -> Step:
    if state.phase is not Phase.STOPPING:
        return state, ()

    is_last_round = state.stop is not None or state.final is not None
    if is_last_round:
        return _done(evolve(state, saved=gone.saved), ReportStopped(state.round))

    state = evolve(state, succeeded=gone.succeeded)
    report: Action = ReportStopped(state.round)
    if gone.succeeded:
        report = ReportSucceeded(state.round)
    # The round goes on without this node, or is repeated: in both cases the node needs new ranks.
    if state.lost or _is_repeated(state):
        return _orphaned(evolve(state, phase=Phase.JOINING), report, AskForRanks())

    return _orphaned(evolve(state, phase=Phase.WAITING), report)


def _is_repeated(state: AgentState) -> bool:
    return state.end is not None and state.end.restart


def _ended(state: AgentState, end: RoundEnd) -> Step:
    # It belongs to a round that this node has left.
    if end.round != state.round:
        return state, ()

    state = evolve(state, end=end)
    if state.phase is Phase.RUNNING:
        return _stop_unless_saving(state, end.why, failed=end.failed)

    # `_gone` uses it after the workers' stop; a node that joins has reacted to it already.
    if state.phase is not Phase.WAITING:
        return state, ()
    # This node must end: it takes part in no further round.
    if state.stop is not None:
        return _done(state, _leave(state.stop), ReportStopped(state.round))
    if end.restart:
        return evolve(state, phase=Phase.JOINING), (ReportStopped(state.round), AskForRanks())

    return state, (ReportStopped(state.round),)


def _stop_unless_saving(state: AgentState, why: str, *, failed: bool = False) -> Step:
    """Stop running workers by a decision of the coordinator, unless they have time to save and return."""
    handle_notice = state.noticed is not None
    return_together = state.agreed and not handle_notice

    # All ranks return at the step on which they agreed, also after a failure on another node.
    if return_together:
        return state, ()

    # Their handler may save and let them return. Or the signal means something else to it, such as a request for
    # statistics: then they train on, and wait in vain for the other nodes. So their time is limited from now on.
    # After a failure elsewhere the other nodes stop at once, and so do they.
    if handle_notice and not failed:
        return state, (AwaitReturn(),)

    return evolve(state, phase=Phase.STOPPING), (*_leave_if_stopped(state), StopWorkers(why))


def _store_lost(state: AgentState, _: WorkerStoreLost) -> Step:
    # The loss matters only while other nodes may still use the store.
    if not awaits_others(state):
        return state, ()
    return evolve(state, has_reported_store=True), (ReportFailed(state.round),)


def awaits_others(state: AgentState) -> bool:
    """Return whether this node's workers have succeeded and other nodes may not have ended."""
    if state.phase is Phase.DONE or state.has_reported_store:
        return False
    return state.succeeded and _is_open(state)


def _is_open(state: AgentState) -> bool:
    """Return whether the coordinator has ended neither the round nor the job."""
    return state.end is None and state.final is None


def _out_of_contact(state: AgentState, loss: ContactLost) -> Step:
    # Others may get the ranks of this node, so its workers must stop.
    if state.phase is Phase.RUNNING:
        return evolve(state, phase=Phase.STOPPING, lost=True), (
            StopWorkers(loss.why, grace=loss.grace, spares=state.agreed),
        )
    if state.phase is Phase.STOPPING:
        return evolve(state, lost=True), ()

    if state.stop is not None:
        return _done(state, _leave(state.stop))
    state = evolve(state, phase=Phase.JOINING, has_reported_store=False)

    # A coordinator that has counted this node as dead sends it nothing more, but answers a new
    # request to join. The sidecar that got the report of a success may be gone, so it is repeated.
    if state.succeeded and state.end is None:
        return state, (ReportSucceeded(state.round), AskForRanks())

    return state, (AskForRanks(),)


def _store_gone(state: AgentState, gone: StoreGone) -> Step:
    return _orphaned(evolve(state, gone=gone.why))


def _orphaned(state: AgentState, *first: Action) -> Step:
    """Finish if this node succeeded and no coordinator can repeat the round; else do *first*."""
    if not state.gone:
        return state, first
    # An earlier decision of the coordinator takes precedence, and so does a signal to this node.
    is_undecided = _is_open(state) and state.stop is None
    if not state.succeeded or not is_undecided:
        return state, first

    why = f"round {state.round} succeeded on this node, but its outcome on other nodes is unknown: {state.gone}"
    return evolve(state, phase=Phase.DONE), (Finish(True, why, results=True),)


def _final(state: AgentState, final: Final) -> Step:
    state = evolve(state, final=final)
    if state.phase is Phase.RUNNING:
        return _stop_unless_saving(state, final.why)
    # `_gone` continues with it.
    if state.phase is Phase.STOPPING:
        return state, ()
    return _done(state)


def _signalled(state: AgentState, stop: StopRequested) -> Step:
    if state.stop is not None:
        return _signalled_again(state, stop)
    if stop.is_handled:
        return _noticed(state, stop)

    loses_nothing = stop.is_notice and not _has_run(state)
    state = evolve(state, stop=stop, saved=state.saved or loses_nothing)
    # Workers that ask return at a step on which all ranks agree; the others get the signal now.
    if state.phase is Phase.RUNNING:
        return (state, (WantStop(stop),)) if stop.is_polled else _stop_and_leave(state, stop, stop.grace)

    # The stop of the workers continues, and `_gone` then ends this node's run.
    if state.phase is Phase.STOPPING:
        return state, (_leave(stop, state.round),)

    return _done(state, _leave(stop))


def _has_run(state: AgentState) -> bool:
    """Return whether workers of this node have ever started."""
    return state.round >= 0


def _noticed(state: AgentState, stop: StopRequested) -> Step:
    """Let workers that handle a notice on their own go on: they return soon, or have other uses for the signal."""
    if state.phase is not Phase.RUNNING:
        return state, ()
    return evolve(state, noticed=stop, agreed=True), (AwaitReturn(stop.grace),)


def _signalled_again(state: AgentState, stop: StopRequested) -> Step:
    """Let a later request change the end of this node, which the first one has begun."""
    if stop.signum == _SIGINT and not stop.reason:
        # A user who repeats Ctrl-C waits for nothing.
        return _stop_due(state, StopDue(None))

    state, actions = _closed_by_a_person(state, stop)
    if stop.grace is not None and state.phase is Phase.RUNNING:
        return state, (*actions, AwaitReturn(stop.grace))
    return state, actions


def _closed_by_a_person(state: AgentState, stop: StopRequested) -> Step:
    """End the job if *stop* asks for that, where the first request only ends this node."""
    is_new = state.stop is not None and not state.stop.ends_job
    if not is_new or not stop.ends_job:
        return state, ()
    return evolve(state, stop=stop), (CloseJob(stop.why),)


def _leave(stop: StopRequested, round: int | None = None) -> LeaveJob:
    return LeaveJob(stop.why, round, stop.ends_job)


def _stop_and_leave(state: AgentState, stop: StopRequested, grace: float | None) -> Step:
    leave = _leave(stop, state.round)
    signum = stop.signum if stop.worker_signum is None else stop.worker_signum
    return evolve(state, phase=Phase.STOPPING), (leave, StopWorkers(stop.why, signum, grace))


def _stop_requested(state: AgentState, request: StopAsked) -> Step:
    # Only the first request of the running round counts.
    if state.phase is not Phase.RUNNING or request.round != state.round or state.return_requested:
        return state, ()
    return evolve(state, return_requested=True), (AskWorkers(request),)


def _stop_proposed(state: AgentState, proposed: StopProposed) -> Step:
    return state, (Propose(proposed.call),) if _return_is_requested(state, proposed.round) else ()


def _stop_agreed(state: AgentState, agreed: StopAgreed) -> Step:
    if not _return_is_requested(state, agreed.round):
        return state, ()
    return evolve(state, agreed=True), (Agree(),)


def _return_is_requested(state: AgentState, round: int) -> bool:
    """Return whether workers of this *round* run, and were asked to return."""
    return state.phase is Phase.RUNNING and round == state.round and state.return_requested


def _stop_due(state: AgentState, due: StopDue) -> Step:
    """Stop workers that were asked to return, and still run; leave if this node has waited long enough."""
    match state.phase:
        case Phase.WAITING if state.stop is not None:
            # Its workers have finished, and others go on: no scheduler waits for them.
            return _done(state, _leave(state.stop))
        case Phase.RUNNING if state.stop is not None:
            return _stop_and_leave(state, state.stop, due.grace)
        case Phase.RUNNING:
            return _end_time_to_return(state, due.grace)
        case _:
            return state, ()


def _end_time_to_return(state: AgentState, grace: float | None) -> Step:
    """Stop workers that have not returned in time, on a node that may continue, once the round or job has ended."""
    ended = state.final or state.end
    if ended is not None:
        return evolve(state, phase=Phase.STOPPING), (StopWorkers(ended.why, grace=grace),)

    # The round continues, and so do they. Nothing delays their stop at its end any more.
    return evolve(state, agreed=False, noticed=None), ()


def _done(state: AgentState, *first: Action) -> Step:
    finish = _finish(state)
    return evolve(state, phase=Phase.DONE), (*first, finish)


def _finish(state: AgentState) -> Finish:
    """Return how the job ended for this node: by its own signal or the coordinator's decision."""
    stop, final = state.stop, state.final

    # A signal ends this node's run, and the coordinator has not ended the job yet.
    if final is None:
        why = "" if stop is None else stop.why
        return Finish(False, why, stop, saved=state.saved, has_run=_has_run(state))

    is_stopped = stop is not None and not state.finished
    is_failed = is_stopped or not final.succeeded
    if is_failed:
        return Finish(False, final.why, stop, final, saved=state.saved)

    # No worker of this node was in the last round, so it has no results that could count.
    if not state.succeeded:
        return Finish(True, final.why, stop, final)

    if final.round != state.round:
        # The results belong to a round that was repeated, so the job succeeded without this node.
        why = f"the results of round {state.round} were discarded: {final.why} without this node"
        return Finish(False, why, stop, final)

    return Finish(True, final.why, stop, final, results=True)


_REACTIONS: Mapping[type[Event], Callable[[AgentState, Any], Step]] = {
    RankAssignment: _assigned,
    WorkersFailed: _failed,
    WorkersSucceeded: _succeeded,
    WorkersGone: _gone,
    RoundEnd: _ended,
    Final: _final,
    WorkerStoreLost: _store_lost,
    StoreGone: _store_gone,
    ContactLost: _out_of_contact,
    StopRequested: _signalled,
    StopAsked: _stop_requested,
    StopProposed: _stop_proposed,
    StopAgreed: _stop_agreed,
    StopDue: _stop_due,
}
"""The function for each event."""
