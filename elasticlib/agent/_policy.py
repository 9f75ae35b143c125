"""
What one agent does about its group of workers. PURE: ``step(state, event) -> (state, actions)``.

Rules of this file: no clock, no I/O. Events are what happened, actions are what the shell must do now,
in order. The coordinator decides about rounds; this decides about the node's own workers:

    JOINING --ranks assigned--> RUNNING --failed / ended / signal / contact lost--> STOPPING
    STOPPING --gone--> JOINING or WAITING
    RUNNING --succeeded--> WAITING --final--> DONE
                           WAITING --ended / contact lost--> JOINING --final--> DONE

What has succeeded stays so. Results are those of the last round that began here, and count if the job's success is that
round's: whoever asked for ranks again meanwhile, and got none, still has them.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

from attrs import evolve, field, frozen
from typing_extensions import assert_never

from elasticlib.errors import InvalidTransitionError
from elasticlib.rendezvous import Word
from elasticlib.rendezvous.protocol import ContactLost, Final, RankAssignment, RoundEnd, StoreGone


class Phase(enum.Enum):
    """Where the agent stands."""

    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    WAITING = "waiting"
    """No worker runs; the coordinator's word is awaited."""
    DONE = "done"


NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.JOINING: frozenset({Phase.RUNNING, Phase.DONE}),
    Phase.RUNNING: frozenset({Phase.STOPPING, Phase.WAITING, Phase.DONE}),  # done: no coordinator is left to wait for
    Phase.STOPPING: frozenset({Phase.JOINING, Phase.WAITING, Phase.DONE}),
    Phase.WAITING: frozenset({Phase.JOINING, Phase.DONE}),
    Phase.DONE: frozenset(),
}
"""The picture above as a table: phase -> phases that may follow; `step` holds itself to it."""
_STORY = 20
"""Steps from phase to phase that are remembered."""


@frozen
class AgentState:
    """All that the agent must remember."""

    phase: Phase = Phase.JOINING
    round: int = -1
    stop: StopRequested | None = None
    """The operator's signal that ends this node's part."""
    end: RoundEnd | None = None
    """The coordinator's word on the present round."""
    final: Final | None = None
    lost: bool = False
    """Contact was lost while workers ran: their round goes on without this node."""
    succeeded: bool = False
    """The coordinator was told that all workers of `round` ended well, and no later round has begun here."""
    has_reported_store: bool = False
    """The coordinator was told that the workers' store was lost after they had ended well here."""
    gone: str = ""
    """Why nobody coordinates the job any more; empty where that is not known."""
    story: tuple[str, ...] = field(default=(), eq=False, repr=False)
    """The last steps from phase to phase, each with what caused it."""


# Events: what happened.


@frozen
class WorkersFailed:
    """A worker of this node failed, or the group is not well."""

    why: str


@frozen
class WorkersSucceeded:
    """All workers of this node ended well."""


@frozen
class WorkersGone:
    """The stop that was ordered is done."""

    succeeded: bool = False
    """Whether all workers had ended well before it reached any."""


@frozen
class WorkerStoreLost:
    """All workers of this node ended well, and those of other nodes have lost the store that it hosts for them."""


@frozen
class StopRequested:
    """A handled signal came, or the program itself wants its workers stopped as by such a one."""

    signum: int
    reason: str = ""
    """Why the program wants that; empty for a signal."""
    grace: float | None = None
    """Seconds until SIGKILL; None for what the launch was told."""

    @property
    def why(self) -> str:
        """What ends this node's part."""
        return self.reason or f"signal {self.signum}"


Event: TypeAlias = Word | WorkersFailed | WorkersSucceeded | WorkersGone | WorkerStoreLost | StopRequested


# Actions: what the shell must do now.


@frozen
class AskForRanks:
    """Ask for ranks in the next round."""


@frozen
class Start:
    """Start the workers of these ranks."""

    assignment: RankAssignment


@frozen
class StopWorkers:
    """Stop all workers; `WorkersGone` follows."""

    why: str
    signum: int | None = None
    """The signal to pass on; None for the ladder's own."""
    grace: float | None = None
    """Seconds until SIGKILL; None for what the launch was told."""


@frozen
class TellFailed:
    """Tell the coordinator at once that workers failed, or that the store is lost which those of other nodes use."""

    round: int


@frozen
class TellStopped:
    """Tell the coordinator that no worker of the round is left, and who had failed."""

    round: int


@frozen
class TellSucceeded:
    """Tell the coordinator that all workers ended well."""

    round: int


@frozen
class LeaveJob:
    """Tell the coordinator that this node goes."""

    why: str
    round: int | None = None
    """The round whose workers still run; `TellStopped` follows for it."""


@frozen
class Finish:
    """Return the result, or raise for the signal or for an end that no worker caused."""

    succeeded: bool
    """The job did, and no success was told here that does not count."""
    why: str
    stop: StopRequested | None = None
    final: Final | None = None
    """The coordinator's word, where it came; a success without one is that of this node's own workers."""
    results: bool = False
    """Whether what the workers of the last round here returned are results of the job."""


Action: TypeAlias = AskForRanks | Start | StopWorkers | TellFailed | TellStopped | TellSucceeded | LeaveJob | Finish
Step: TypeAlias = tuple[AgentState, tuple[Action, ...]]


def begin() -> Step:
    """The first state and what to do first."""
    return AgentState(), (AskForRanks(),)


def step(state: AgentState, event: Event) -> Step:
    """
    Return the next state, and the actions that *event* asks for.

    Raises `InvalidTransitionError` where `NEXT` lacks the step.
    """
    # An event that comes late changes nothing any more.
    if state.phase is Phase.DONE:
        return state, ()
    after, actions = _react(state, event)
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


def _react(state: AgentState, event: Event) -> Step:
    match event:
        case RankAssignment():
            return _assigned(state, event)
        case WorkersFailed():
            return _failed(state, event)
        case WorkersSucceeded():
            return _succeeded(state)
        case WorkersGone():
            return _gone(state, event)
        case RoundEnd():
            return _ended(state, event)
        case Final():
            return _final(state, event)
        case WorkerStoreLost():
            return _store_lost(state)
        case StoreGone():
            return _orphaned(evolve(state, gone=event.why))
        case ContactLost():
            return _out_of_contact(state, event)
        case StopRequested():
            return _signalled(state, event)
        case _:
            assert_never(event)


# What each event means, in the phases in which it may come.


def _assigned(state: AgentState, assignment: RankAssignment) -> Step:
    # It is of a round that a signal made us leave.
    if state.phase is not Phase.JOINING:
        return state, ()
    return AgentState(Phase.RUNNING, assignment.round, story=state.story), (Start(assignment),)


def _failed(state: AgentState, failed: WorkersFailed) -> Step:
    # Workers that end while they are stopped are no failure of their own.
    if state.phase is not Phase.RUNNING:
        return state, ()
    return evolve(state, phase=Phase.STOPPING), (TellFailed(state.round), StopWorkers(failed.why))


def _succeeded(state: AgentState) -> Step:
    # Where they are stopped already, `WorkersGone` says whether they were faster.
    if state.phase is not Phase.RUNNING:
        return state, ()
    return _orphaned(evolve(state, phase=Phase.WAITING, succeeded=True), TellSucceeded(state.round))


def _gone(state: AgentState, gone: WorkersGone) -> Step:
    if state.phase is not Phase.STOPPING:
        return state, ()
    is_last_round = state.stop is not None or state.final is not None
    if is_last_round:
        return _done(state, TellStopped(state.round))

    state = evolve(state, succeeded=gone.succeeded)
    report: Action = TellStopped(state.round)
    if gone.succeeded:
        report = TellSucceeded(state.round)
    # The round goes on without this node, or is repeated: either way there are new ranks to ask for.
    if state.lost or _is_repeated(state):
        return _orphaned(evolve(state, phase=Phase.JOINING), report, AskForRanks())
    return _orphaned(evolve(state, phase=Phase.WAITING), report)


def _is_repeated(state: AgentState) -> bool:
    return state.end is not None and state.end.restart


def _ended(state: AgentState, end: RoundEnd) -> Step:
    # Of a round that this node has left already.
    if end.round != state.round:
        return state, ()
    state = evolve(state, end=end)
    if state.phase is Phase.RUNNING:
        return evolve(state, phase=Phase.STOPPING), (StopWorkers(end.why),)
    # While the workers are stopped it is kept for `_gone`; a node that joins has answered it.
    if state.phase is not Phase.WAITING:
        return state, ()
    if end.restart:
        return evolve(state, phase=Phase.JOINING), (TellStopped(state.round), AskForRanks())
    return state, (TellStopped(state.round),)


def _store_lost(state: AgentState) -> Step:
    # Its loss matters as long as other nodes may still be at work with it.
    if not awaits_others(state):
        return state, ()
    return evolve(state, has_reported_store=True), (TellFailed(state.round),)


def awaits_others(state: AgentState) -> bool:
    """Return whether all workers here ended well, and it is still open how the round ends elsewhere."""
    if state.phase is Phase.DONE or state.has_reported_store:
        return False
    return state.succeeded and _is_open(state)


def _is_open(state: AgentState) -> bool:
    """Return whether the coordinator has said neither how the round ended nor how the job did."""
    return state.end is None and state.final is None


def _out_of_contact(state: AgentState, loss: ContactLost) -> Step:
    # Others may get the ranks of this node: no worker may go on here.
    if state.phase is Phase.RUNNING:
        return evolve(state, phase=Phase.STOPPING, lost=True), (StopWorkers(loss.why, grace=loss.grace),)
    if state.phase is Phase.STOPPING:
        return evolve(state, lost=True), ()
    state = evolve(state, phase=Phase.JOINING, has_reported_store=False)
    # Whoever took this node for dead has no word for it any more, but answers a new request to join. The sidecar that
    # was told of a success may be gone with it.
    if state.succeeded and state.end is None:
        return state, (TellSucceeded(state.round), AskForRanks())
    return state, (AskForRanks(),)


def _orphaned(state: AgentState, *first: Action) -> Step:
    """Finish where nobody is left who could repeat a round that ended well here; else do *first*."""
    if not state.gone:
        return state, first
    # A word of the coordinator that came in time counts more, and so does a signal to this node.
    is_undecided = _is_open(state) and state.stop is None
    if not state.succeeded or not is_undecided:
        return state, first

    why = f"round {state.round} succeeded on this node, and how it ended on other nodes is not known: {state.gone}"
    return evolve(state, phase=Phase.DONE), (Finish(True, why, results=True),)


def _final(state: AgentState, final: Final) -> Step:
    state = evolve(state, final=final)
    if state.phase is Phase.RUNNING:
        return evolve(state, phase=Phase.STOPPING), (StopWorkers(final.why),)
    # `_gone` goes on with it.
    if state.phase is Phase.STOPPING:
        return state, ()
    return _done(state)


def _signalled(state: AgentState, stop: StopRequested) -> Step:
    # The first one has begun this node's end.
    if state.stop is not None:
        return state, ()
    state = evolve(state, stop=stop)
    if state.phase is Phase.RUNNING:
        leave = LeaveJob(stop.why, state.round)
        return evolve(state, phase=Phase.STOPPING), (leave, StopWorkers(stop.why, stop.signum, stop.grace))
    # Their stop goes on, and `_gone` ends this node's part.
    if state.phase is Phase.STOPPING:
        return state, (LeaveJob(stop.why, state.round),)
    return _done(state, LeaveJob(stop.why))


def _done(state: AgentState, *first: Action) -> Step:
    finish = _finish(state)
    return evolve(state, phase=Phase.DONE), (*first, finish)


def _finish(state: AgentState) -> Finish:
    """Return how the job ended for this node: by its own signal, or by the coordinator's word."""
    stop, final = state.stop, state.final
    # A signal ends this node's part, and the coordinator has not said yet what becomes of the job.
    if final is None:
        why = "" if stop is None else stop.why
        return Finish(False, why, stop)
    is_failed = stop is not None or not final.succeeded
    if is_failed:
        return Finish(False, final.why, stop, final)

    # No worker of this node was in the last round, so there are no results that could count.
    if not state.succeeded:
        return Finish(True, final.why, stop, final)
    if final.round != state.round:
        # Neither the results of a round that was repeated nor none at all are what this node was asked for.
        why = f"the results of round {state.round} were discarded: {final.why} without this node"
        return Finish(False, why, stop, final)
    return Finish(True, final.why, stop, final, results=True)
