"""The agent's loop with workers that are no processes: rounds, hooks, ranks, reports and signals."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from elasticlib import records
from elasticlib.agent import SimpleElasticAgent
from elasticlib.errors import (
    ConfigError,
    LaunchInterrupted,
    LogDirError,
    ProcessFailure,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
    SignalException,
    StartError,
    root_cause,
)
from elasticlib.processes._wire import Waitable
from elasticlib.rendezvous import (
    ContactLost,
    FailureNote,
    Final,
    MemoryExchange,
    RankAssignment,
    Rendezvous,
    RoundEnd,
    Rules,
    open_local,
)
from elasticlib.rendezvous._membership import MembershipEvent
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.handlers._coordinated import CoordinatedHandler
from elasticlib.rendezvous.net._node_info import BoundNodeInfo
from elasticlib.rendezvous.node._client import NodeClient
from elasticlib.rendezvous.node._coordinator_host import CoordinatorHost
from elasticlib.rendezvous.protocol._messages import Close, Failed, Leave, Stopped, WorkerReport
from elasticlib.spec import WorkerSpec
from elasticlib.state import RunResult, WorkerGroup, WorkerState

LIMIT = 30.0
HEALTHY = RunResult(WorkerState.HEALTHY)


def failure(rank: int, message: str = "a bad value", *, timestamp: float = 1.0, secondary: bool = False) -> Any:
    return ProcessFailure(rank, 100 + rank, 1, "", message=message, rank=rank, timestamp=timestamp, secondary=secondary)


def failed(*failures: ProcessFailure) -> RunResult:
    return RunResult(WorkerState.FAILED, {}, {each.rank: each for each in failures or (failure(1),)})


def succeeded() -> RunResult:
    return RunResult(WorkerState.SUCCEEDED, {0: "a", 1: "b"})


Look = RunResult | Callable[[], RunResult]


class Scripted(SimpleElasticAgent):
    """Its workers behave as *rounds* tell: for each round what one look after the other finds."""

    def __init__(self, spec: WorkerSpec, rounds: Sequence[Sequence[Look]], **options: Any) -> None:
        self.reported: list[records.Record] = []
        super().__init__(spec, shutdown_timeout=7.0, sink=self.reported.append, **options)
        self.rounds = [list(looks) for looks in rounds]
        self.calls: list[Any] = []
        self.at_start: Callable[[WorkerGroup], None] = lambda group: None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        self.calls.append("start")
        self.looks = self.rounds.pop(0)
        self.at_start(worker_group)
        return {worker.local_rank: 1000 + worker.global_rank for worker in worker_group.workers}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.calls.append("stop")

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        look = self.looks.pop(0)
        return look() if callable(look) else look

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        self.calls.append(("shutdown", death_sig, timeout))


END = ("shutdown", signal.SIGTERM, 7.0)


def for_people(agent: Scripted) -> list[records.Record]:
    """Return the records that a log at INFO shows."""
    return [record for record in agent.reported if record.level >= logging.INFO]


def run(agent: SimpleElasticAgent) -> RunResult:
    """`agent.run()` in a thread, which has a time limit; raises what it raises."""
    outcome: list[RunResult | BaseException] = []

    def work() -> None:
        try:
            outcome.append(agent.run())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert outcome, f"the run did not end within {LIMIT:g} s"
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


Make = Callable[..., Scripted]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes scripted agents, each with a rendezvous of its own that is closed in the end."""
    opened: list[Rendezvous] = []

    def new(*rounds: Sequence[Look], restarts: int = 0, workers: int = 2, **options: Any) -> Scripted:
        opened.append(open_local("job", Rules(max_restarts=restarts)))
        spec = WorkerSpec(
            "trainer", workers, opened[-1], entrypoint="train.py", max_restarts=restarts, monitor_interval=0.001
        )
        return Scripted(spec, rounds, **options)

    yield new
    for rendezvous in opened:
        rendezvous.close()


BAD = RunResult(WorkerState.UNHEALTHY)
UNKNOWN = RunResult(WorkerState.UNKNOWN)
COURSES: dict[str, tuple[Sequence[Sequence[Look]], list[Any], RunResult]] = {
    "success": ([[HEALTHY, HEALTHY, succeeded()]], ["start", END], succeeded()),
    "restart": ([[HEALTHY, failed()], [HEALTHY, succeeded()]], ["start", "stop", "start", END], succeeded()),
    "restart of unhealthy": ([[BAD], [succeeded()]], ["start", "stop", "start", END], succeeded()),
    "failure": ([[failed()], [failed(failure(0))]], ["start", "stop", "start", "stop", END], failed(failure(0))),
    "unhealthy": ([[HEALTHY, BAD]], ["start", "stop", END], RunResult(WorkerState.FAILED)),
    "unknown": ([[HEALTHY, UNKNOWN]], ["start", "stop", END], RunResult(WorkerState.FAILED)),
}
"""By name, what each look of each round finds; the hooks that are called; the result."""


@pytest.mark.parametrize("name", COURSES)
def test_hooks_are_called_round_by_round_and_the_last_decides(name: str, make: Make) -> None:
    rounds, calls, expected = COURSES[name]
    agent = make(*rounds, restarts=len(rounds) - 1)

    result = run(agent)

    assert calls == agent.calls
    assert (expected.state, expected.return_values, set(expected.failures)) == (
        result.state,
        result.return_values,
        set(result.failures),
    )
    assert agent.get_worker_group().state is expected.state


def test_agent_that_cannot_work_requests_no_ranks(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would stop their workers for it."""
    agent = make([succeeded()])
    joined: list[int] = []
    monkeypatch.setattr(agent._member, "join", lambda slots, role: joined.append(slots))

    def find_no_room() -> None:
        raise LogDirError("log_dir='/logs' cannot be used: No space left on device")

    agent._make_ready = find_no_room  # type: ignore[method-assign]

    with pytest.raises(LogDirError):
        run(agent)

    assert ([], [END]) == (joined, agent.calls)


def test_rounds_and_restarts_are_counted_in_the_group(make: Make) -> None:
    agent = make([failed()], [failed()], [succeeded()], restarts=3)
    counts: list[tuple[int, int]] = []
    agent.at_start = lambda group: counts.append((group.round, group.restart_count))

    run(agent)

    assert counts == [(0, 0), (1, 1), (2, 2)]


def test_workers_have_ranks_at_their_start_and_ids_after_it(make: Make) -> None:
    agent = make([succeeded()], workers=3)
    ranks: list[tuple[int, ...]] = []

    def note(group: WorkerGroup) -> None:
        assert (group.group_rank, group.group_world_size) == (0, 1)
        ranks.extend(
            (each.local_rank, each.global_rank, each.role_rank, each.world_size, each.role_world_size)
            for each in group.workers
        )

    agent.at_start = note
    run(agent)

    assert ranks == [(0, 0, 0, 3, 3), (1, 1, 1, 3, 3), (2, 2, 2, 3, 3)]
    assert [worker.id for worker in agent.get_worker_group().workers] == [1000, 1001, 1002]


def test_the_group_shows_where_it_stands(make: Make) -> None:
    agent = make([], [], restarts=1)
    states: list[WorkerState] = []

    def look(found: RunResult) -> Callable[[], RunResult]:
        def note() -> RunResult:
            states.append(agent.get_worker_group().state)
            return found

        return note

    agent.rounds = [[look(failed())], [look(succeeded())]]
    agent.at_start = lambda group: states.append(group.state)
    run(agent)

    states.append(agent.get_worker_group().state)
    assert states == [
        WorkerState.INIT,
        WorkerState.HEALTHY,
        WorkerState.STOPPED,
        WorkerState.HEALTHY,
        WorkerState.SUCCEEDED,
    ]


def test_each_round_has_a_store_socket_bound_on_loopback(make: Make) -> None:
    agent = make([failed()], [succeeded()], restarts=1)
    reached: list[tuple[str, int]] = []

    def connect(group: WorkerGroup) -> None:
        assert group.master_addr == "127.0.0.1" and group.master_port
        with socket.create_connection((group.master_addr, group.master_port), LIMIT) as peer:
            reached.append(peer.getpeername())

    agent.at_start = connect
    run(agent)

    assert len(reached) == 2


def test_the_agent_keeps_no_store_socket_once_its_workers_run(make: Make) -> None:
    agent = make([])
    refused: list[bool] = []

    def knock() -> RunResult:
        group = agent.get_worker_group()
        try:
            socket.create_connection((group.master_addr or "", group.master_port or 0), LIMIT).close()
        except ConnectionRefusedError:
            refused.append(True)
        return succeeded()

    agent.rounds = [[knock]]
    run(agent)

    assert refused == [True]


def test_failures_are_requested_again_when_all_workers_have_ended(make: Make) -> None:
    agent = make([failed(failure(1))])
    complete = {0: failure(0, "came to light later"), 1: failure(1)}
    agent._failures = lambda: complete if "stop" in agent.calls else {}  # type: ignore[method-assign]

    result = run(agent)

    assert result.failures == complete


@pytest.mark.parametrize("restarts", [0, 3])
@pytest.mark.parametrize("where", ["a look", "the start"])
def test_error_of_a_hook_is_posted_and_raised_after_the_shutdown(make: Make, where: str, restarts: int) -> None:
    def break_down(*_: object) -> RunResult:
        raise ConfigError("the timer file is bad")

    agent = make([break_down], restarts=restarts)
    if where == "the start":
        agent.at_start = break_down  # type: ignore[assignment]
    posted: list[Any] = []
    member: Any = agent._member
    post = member.post

    def noting(report: Leave | Stopped) -> None:
        agent.calls.append("left" if isinstance(report, Leave) else "gone")
        posted.append(report)
        post(report)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(member, "post", noting)
        with pytest.raises(ConfigError, match="the timer file is bad"):
            run(agent)

    assert posted == [Leave(member.node, "ConfigError: the timer file is bad", 0), Stopped(member.node, 0, ())]
    assert agent.calls == ["start", "left", END, "gone"]


def test_the_other_node_learns_at_once_what_broke_an_agent() -> None:
    exchange = MemoryExchange()
    host = CoordinatorHost(exchange.clone(), Rules(2, 2, join_timeout=0.0), run_id="job", name="a")
    host.start()
    members = [NodeClient(lambda _: exchange.clone(), name, BoundNodeInfo(), run_id="job").start() for name in "ab"]

    def refuse(group: WorkerGroup) -> None:
        raise ConfigError("TORCHELASTIC_TIMER_FILE='/nowhere' cannot be opened")

    bad, good = (
        Scripted(
            WorkerSpec("trainer", 1, Rendezvous("job", "c10d", each), entrypoint="train.py", monitor_interval=0.001),
            [[HEALTHY] * 10_000],
        )
        for each in members
    )
    bad.at_start = refuse
    raised: list[BaseException] = []

    def work() -> None:
        try:
            run(bad)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    with pytest.raises(RendezvousTimeoutError, match=r"a \(left: ConfigError: TORCHELASTIC_TIMER_FILE='/nowhere'"):
        run(good)
    thread.join(LIMIT)
    for member in members:
        member.close()
    host.close()
    assert [ConfigError] == [type(error) for error in raised]


def test_agent_whose_job_was_ended_sends_no_leave(make: Make) -> None:
    agent = make([RunResult(WorkerState.HEALTHY)] * 10_000)
    member: Any = agent._member
    leaves: list[Any] = []
    post = member.post
    agent.at_start = lambda group: post(Close(member.node, "an operator wants it"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(member, "post", lambda each: leaves.append(each) if isinstance(each, Leave) else post(each))
        with pytest.raises(RendezvousClosedError, match="an operator wants it"):
            run(agent)

    assert leaves == []


def test_agent_with_watched_descriptors_is_woken_and_does_not_poll(make: Make) -> None:
    agent = make([succeeded()])
    ready = os.eventfd(1, os.EFD_CLOEXEC)

    class Bell:
        def fileno(self) -> int:
            return ready

    bells: list[Waitable] = [Bell()]
    agent._watched = lambda: bells  # type: ignore[method-assign]
    agent._poll_timeout = lambda: None  # type: ignore[method-assign]
    try:
        result = run(agent)
    finally:
        os.close(ready)

    assert result == succeeded()


@pytest.mark.parametrize(
    ("signum", "kind"),
    [(signal.SIGUSR1, SignalException), (signal.SIGTERM, SignalException), (signal.SIGINT, LaunchInterrupted)],
)
def test_a_handled_signal_shuts_the_workers_down_with_it_and_is_raised(
    make: Make, signum: signal.Signals, kind: type[SignalException]
) -> None:
    def interrupt() -> RunResult:
        signal.raise_signal(signum)
        return HEALTHY

    agent = make([interrupt, HEALTHY], restarts=3, signals_to_handle="SIGUSR1,SIGTERM,SIGINT")

    with pytest.raises(SignalException) as caught:
        agent.run()
    assert type(caught.value) is kind
    assert caught.value.sigval is signum
    assert agent.calls == ["start", ("shutdown", signum, 7.0), END]


def test_the_handlers_are_as_before_the_run(make: Make) -> None:
    before = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)]

    make([succeeded()]).run()

    assert before == [
        signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    ]


def test_a_node_that_leaves_names_the_round_whose_workers_still_run(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> RunResult:
        signal.raise_signal(signal.SIGUSR1)
        return HEALTHY

    agent = make([failed()], [interrupt, HEALTHY], restarts=1, signals_to_handle="SIGUSR1")
    member = agent._member
    left: list[int | None] = []
    post = member.post
    monkeypatch.setattr(member, "post", lambda each: left.append(each.round) if isinstance(each, Leave) else post(each))

    with pytest.raises(SignalException):
        agent.run()
    assert left == [1]


def test_records_are_in_order_and_name_the_processes(make: Make) -> None:
    agent = make([failed()], [succeeded()], restarts=1)

    run(agent)

    started, *others = for_people(agent)
    assert isinstance(started, records.RoundStarted)
    assert (started.round, started.world_size, started.pids) == (0, 2, {0: 1000, 1: 1001})
    assert [type(record) for record in others] == [
        records.WorkersStopping,
        records.RoundEnded,
        records.RoundStarted,
    ]


def test_stop_names_the_earliest_failure_as_its_reason(make: Make) -> None:
    lost = failure(0, "Connection closed by peer", timestamp=2.0, secondary=True)
    agent = make([failed(lost, failure(1, "a bad value", timestamp=1.0))])

    run(agent)

    (stopping,) = (each for each in agent.reported if isinstance(each, records.WorkersStopping))
    assert stopping.why == "rank 1: a bad value"


def test_a_node_that_was_not_needed_shares_the_success(make: Make) -> None:
    agent = make([succeeded()])
    run(agent)
    spare = Scripted(agent.get_worker_group().spec, [])

    result = run(spare)

    assert result.state is WorkerState.SUCCEEDED
    assert [records.NotNeeded] == [type(record) for record in for_people(spare)]


# A membership as the test wants it.


class ScriptedMember:
    """A membership that returns one of the events it was given at each `drain` (None: nothing)."""

    def __init__(self, *events: MembershipEvent | Exception | None) -> None:
        self.node = "n1/1-a"
        self.events = deque(events)
        self.calls: list[tuple[Any, ...]] = []
        self.bound: socket.socket | None = None
        self.wait: float | None = None
        self.ready = os.eventfd(1, os.EFD_CLOEXEC)

    def join(self, slots: int, role: str) -> None:
        self.calls.append(("join", slots, role))

    def post(self, report: WorkerReport) -> None:
        failures = [[note.rank for note in report.failures]] if isinstance(report, Failed | Stopped) else []
        self.calls.append((type(report).__name__.lower(), report.round, *failures))

    def guard(self, handle: int) -> None:
        self.calls.append(("guard", handle))

    def listener(self) -> socket.socket | None:
        found, self.bound = self.bound, None
        return found

    def fileno(self) -> int:
        return self.ready

    def poll_timeout(self) -> float | None:
        return self.wait

    def drain(self) -> list[MembershipEvent]:
        event = self.events.popleft() if self.events else None
        if isinstance(event, Exception):
            raise event
        return [] if event is None else [event]

    def close(self) -> None:
        os.close(self.ready)


NODES = RankAssignment(0, 1, 2, 2, 4, 2, 4, 0, 3, ("127.0.0.1",), 29500, "all nodes are there")
LATER = RankAssignment(1, 1, 2, 2, 4, 2, 4, 0, 3, ("127.0.0.1",), 29500, "all nodes are there")
LOST = ContactLost("no answer for 6 s", 1.5)
WELL = Final(True, "all 2 nodes succeeded in round 0", round=0)
JOINED_AGAIN = [("join", 2, "trainer"), ("stopped", 0, []), ("join", 2, "trainer")]


@pytest.fixture
def assigned() -> Iterator[Callable[..., tuple[Scripted, ScriptedMember]]]:
    """Makes agents whose membership returns what it is given."""
    made: list[ScriptedMember] = []

    def new(
        events: Sequence[MembershipEvent | Exception | None], *rounds: Sequence[Look]
    ) -> tuple[Scripted, ScriptedMember]:
        member = ScriptedMember(*events)
        made.append(member)
        spec = WorkerSpec(
            "trainer", 2, Rendezvous("job", "c10d", member), entrypoint="train.py", monitor_interval=0.001
        )
        return Scripted(spec, rounds), member

    yield new
    for member in made:
        member.close()


Assigned = Callable[..., tuple[Scripted, ScriptedMember]]


def stopping_of(agent: Scripted) -> records.WorkersStopping:
    """Return the record of its first stop."""
    return next(each for each in agent.reported if isinstance(each, records.WorkersStopping))


def test_lost_contact_stops_the_workers_in_its_own_time_and_joins_again(assigned: Assigned) -> None:
    agent, member = assigned(
        [NODES, None, LOST, LATER, None, Final(True, "all succeeded")], [HEALTHY] * 9, [HEALTHY] * 9
    )

    run(agent)

    assert (stopping_of(agent).why, stopping_of(agent).grace) == (LOST.why, 1.5)
    assert member.calls[:3] == JOINED_AGAIN


def test_lost_contact_gives_no_more_time_than_the_launch_does(assigned: Assigned) -> None:
    long = ContactLost("no answer", 100.0)
    agent, _ = assigned([NODES, None, long, Final(False, "over", kind="closed")], [HEALTHY] * 9)

    with pytest.raises(RendezvousClosedError):
        run(agent)

    assert stopping_of(agent).grace == 7.0


def test_contact_lost_before_dead_workers_is_reported_first(assigned: Assigned) -> None:
    agent, member = assigned([NODES, None, LOST, Final(True, "all succeeded")], [failed()])

    run(agent)

    assert "failed" not in [call[0] for call in member.calls]


def test_contact_lost_during_a_stop_is_reported_first(assigned: Assigned) -> None:
    end = RoundEnd(0, "rank 3 failed", True)
    agent, _ = assigned([NODES, None, end, LOST, Final(True, "all succeeded")], [HEALTHY] * 9)
    known: list[bool] = []
    agent._failures = lambda: known.append(agent._state.lost) or {}  # type: ignore[method-assign, func-returns-value]

    run(agent)

    assert known == [True]


def test_ranks_received_together_with_lost_contact_start_no_workers(assigned: Assigned) -> None:
    """The agent stood still, and others may have the ranks by the time at which it wakes."""
    agent, member = assigned([NODES, LOST, None, Final(True, "all succeeded")])

    run(agent)

    assert (agent.calls, member.calls) == ([END], JOINED_AGAIN)


def test_ranks_received_before_the_next_join_start_no_workers(assigned: Assigned) -> None:
    """Lost contact was answered by another join: the coordinator takes these ranks's workers for gone by then."""
    agent, member = assigned([Final(True, "all succeeded")])
    together: deque[list[MembershipEvent]] = deque([[LOST, NODES]])
    drain = member.drain
    member.drain = lambda: together.popleft() if together else drain()  # type: ignore[method-assign]

    run(agent)

    assert agent.calls == [END]
    assert member.calls == [("join", 2, "trainer"), ("join", 2, "trainer")]


def no_start(group: WorkerGroup) -> None:
    raise StartError("no process can be started")


def test_start_that_fails_because_contact_was_lost_raises_no_error(assigned: Assigned) -> None:
    agent, member = assigned([NODES, None, LOST, None, Final(True, "all succeeded")], [])
    agent.at_start = no_start

    run(agent)

    assert member.calls == JOINED_AGAIN


def test_a_start_that_fails_by_itself_is_an_error(assigned: Assigned) -> None:
    agent, _ = assigned([NODES], [])
    agent.at_start = no_start

    with pytest.raises(StartError, match="no process can be started"):
        run(agent)


def test_an_error_of_the_rendezvous_reaches_the_caller_after_the_shutdown(assigned: Assigned) -> None:
    agent, _ = assigned([NODES, None, RendezvousConnectionError("the host of the job's store is gone")], [HEALTHY] * 9)

    with pytest.raises(RendezvousConnectionError, match="the host of the job's store is gone"):
        run(agent)
    assert agent.calls == ["start", END]


def test_a_signal_is_the_end_also_when_the_rendezvous_breaks_meanwhile(assigned: Assigned) -> None:
    def interrupt() -> RunResult:
        signal.raise_signal(signal.SIGTERM)
        return HEALTHY

    def drain() -> list[MembershipEvent]:
        if any(call[0] == "shutdown" for call in agent.calls):
            raise RendezvousConnectionError("gone")
        return ScriptedMember.drain(member)

    agent, member = assigned([NODES], [interrupt, HEALTHY])
    member.drain = drain  # type: ignore[method-assign]

    with pytest.raises(SignalException):
        agent.run()


def test_polled_rendezvous_is_read_although_no_descriptor_is_readable(assigned: Assigned) -> None:
    agent, member = assigned([NODES], [HEALTHY] * 9)
    agent._poll_timeout = lambda: None  # type: ignore[method-assign]
    os.eventfd_read(member.ready)
    member.wait = 0.001
    member.events.append(Final(False, "over", kind="timeout"))

    with pytest.raises(RendezvousTimeoutError):
        run(agent)


def test_all_nodes_report_the_root_cause_beside_own_failures(assigned: Assigned) -> None:
    note = FailureNote(0, 0, 77, 1, "the first to fail", "ValueError", "Traceback ...")
    end, final = RoundEnd(0, "rank 0 failed", False), Final(False, "rank 0 failed", "n0/9-b", note)
    agent, _ = assigned([NODES, None, end, final], [failed(failure(2, timestamp=1.0))])

    result = run(agent)

    rank, root = root_cause(result.failures)
    assert set(result.failures) == {0, 2}
    assert (rank, root.host, root.message, root.traceback) == (0, "n0", "the first to fail", "Traceback ...")


def test_failures_of_a_left_round_are_not_those_of_the_end(assigned: Assigned) -> None:
    note = FailureNote(0, 0, 77, 1, "the last straw")
    final = Final(False, "rank 0 failed", "n0/9-b", note)
    agent, _ = assigned([NODES, None, RoundEnd(0, "rank 2 failed", True), None, final], [failed(failure(2))])

    result = run(agent)

    assert set(result.failures) == {0}


@pytest.mark.parametrize("event", [RoundEnd(0, "rank 0 failed", True), LOST], ids=["ended", "contact lost"])
def test_results_of_a_round_repeated_elsewhere_are_an_error(event: MembershipEvent, assigned: Assigned) -> None:
    final = Final(True, "all 2 nodes succeeded in round 1", round=1)
    agent, _ = assigned([NODES, None, None, event, final], [succeeded()])

    with pytest.raises(
        RendezvousGracefulExitError, match="results of round 0 were discarded: all 2 nodes succeeded in"
    ):
        run(agent)


@pytest.mark.parametrize("times", [1, 2], ids=["lost before they were seen", "lost since"])
def test_results_are_kept_though_contact_was_lost(times: int, assigned: Assigned) -> None:
    """A success that was reported before is reported again: the sidecar that heard of it may be gone."""
    agent, member = assigned([NODES, *[None] * times, LOST, None, WELL], [succeeded()])

    result = run(agent)

    assert result == succeeded()
    assert [("join", 2, "trainer"), *[("succeeded", 0)] * times, ("join", 2, "trainer")] == member.calls


def test_success_without_this_node_is_reported_though_workers_ran(assigned: Assigned) -> None:
    agent, _ = assigned([NODES, None, Final(True, "all 2 nodes succeeded in round 1", round=1)], [HEALTHY] * 9)

    result = run(agent)

    assert result == RunResult(WorkerState.SUCCEEDED, {})
    assert records.NotNeeded in [type(record) for record in agent.reported]


HOST_LOST = "host n2 was lost in 3 rounds in a row before any worker succeeded; no restarts are allowed"


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([Final(False, HOST_LOST, kind="timeout")], RendezvousTimeoutError),
        ([Final(False, HOST_LOST, kind="closed")], RendezvousClosedError),
        ([Final(False, HOST_LOST, kind="refused")], RendezvousClosedError),
        ([Final(False, HOST_LOST)], RendezvousClosedError),
        ([NODES, None, RoundEnd(0, "host n2 was lost", True), None, Final(False, HOST_LOST)], RendezvousClosedError),
    ],
    ids=["timeout", "closed", "refused", "failed", "failed after a round"],
)
def test_an_end_that_no_worker_caused_is_raised(
    events: Sequence[MembershipEvent | None], expected: type[Exception], assigned: Assigned
) -> None:
    agent, _ = assigned(events, [HEALTHY] * 9)

    with pytest.raises(expected, match=HOST_LOST):
        run(agent)
    assert agent.get_worker_group().state is WorkerState.FAILED


@pytest.mark.parametrize("answers", [True, False])
def test_the_workers_store_is_the_first_address_that_answers_or_the_first(answers: bool, assigned: Assigned) -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        if not answers:
            store.close()
        places = ("127.0.0.2", "127.0.0.1", "127.0.0.3")
        assignment = RankAssignment(0, 1, 2, 2, 4, 2, 4, 0, 3, places, port, "all nodes are there")
        agent, _ = assigned([assignment, None, Final(True, "all succeeded")], [HEALTHY] * 9)

        run(agent)

    group = agent.get_worker_group()
    assert (places[1] if answers else places[0], port) == (group.master_addr, group.master_port)


AT_29555 = RankAssignment(0, 0, 1, 0, 2, 0, 2, 0, 3, ("127.0.0.1",), 29555, "all nodes are there")


@pytest.mark.parametrize(
    ("backend", "addr", "port", "is_warned", "used"),
    [
        ("c10d", "127.0.0.1", 29555, False, ("127.0.0.1", 29555)),
        ("c10d", None, None, False, ("127.0.0.1", 29555)),
        ("c10d", "127.0.0.9", None, True, ("127.0.0.1", 29555)),
        ("c10d", None, 29556, True, ("127.0.0.1", 29555)),
        ("etcd", "test_host", None, False, ("test_host", 29555)),
        ("etcd-v2", "test_host", None, False, ("test_host", 29555)),
        ("etcd-v3", "test_host", None, False, ("test_host", 29555)),
    ],
)
def test_master_of_the_specification_counts_on_etcd_and_warns_elsewhere(
    assigned: Assigned,
    caplog: pytest.LogCaptureFixture,
    backend: str,
    addr: str | None,
    port: int | None,
    is_warned: bool,
    used: tuple[str, int],
) -> None:
    agent, member = assigned([AT_29555, None, Final(True, "all succeeded")], [HEALTHY] * 9)
    spec = agent.get_worker_group().spec
    spec.rdzv_handler = Rendezvous("job", backend, member)
    spec.master_addr, spec.master_port = addr, port

    run(agent)

    group = agent.get_worker_group()
    assert used == (group.master_addr, group.master_port)
    assert is_warned == ("have no effect: the store of this round is at 127.0.0.1, port 29555" in caplog.text)


def test_a_store_socket_of_a_round_is_closed_once_its_workers_run(assigned: Assigned) -> None:
    bound = socket.create_server(("127.0.0.1", 0))
    assignment = RankAssignment(
        0, 0, 2, 0, 4, 0, 4, 0, 3, ("127.0.0.1",), bound.getsockname()[1], "all nodes are there"
    )
    agent, member = assigned([assignment, None, Final(True, "all succeeded")], [HEALTHY] * 9)
    member.bound = bound

    run(agent)

    assert bound.fileno() == -1


# Somebody else's handler.


class Handler:
    """A handler like torch's, whose job is over."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def get_run_id(self) -> str:
        return "theirs"

    def get_backend(self) -> str:
        return "mine"

    def next_rendezvous(self) -> object:
        self.calls.append("next_rendezvous")
        raise RendezvousClosedError("the job is over")

    def is_closed(self) -> bool:
        return True

    def set_closed(self) -> None:
        self.calls.append("set_closed")

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def test_somebody_elses_handler_is_taken_part_in_for_the_length_of_a_run() -> None:
    handler = Handler()
    agent = Scripted(WorkerSpec("trainer", 2, handler, entrypoint="train.py"), [])
    before = list(handler.calls)

    with pytest.raises(RendezvousClosedError, match="the job is over"):
        run(agent)
    assert (before, handler.calls[:1]) == ([], ["next_rendezvous"])
    assert agent._member.drain() == []


def test_our_own_handler_gives_an_agent_its_place_for_the_length_of_a_run() -> None:
    connected: list[tuple[NodeJob, float | None]] = []

    def connect(job: NodeJob, *, stall: float | None = None) -> NodeClient:
        connected.append((job, stall))
        exchange = MemoryExchange()
        host = CoordinatorHost(exchange.clone(), job.rules, run_id="job", name="a")
        host.start()
        host.abandon("the job is over")
        hosts.append(host)
        return NodeClient(
            lambda _: exchange.clone(), job.node, BoundNodeInfo(), run_id=job.run_id, terms=job.terms
        ).start()

    hosts: list[CoordinatorHost] = []
    # For two nodes: one that asks before the job is over must not get ranks.
    job = NodeJob(
        run_id="job", node="n1/1-a", backend="c10d", endpoint="n1:29400", min_nodes=2, max_nodes=2, heartbeat=0.0
    )
    handler = CoordinatedHandler(job, connect)
    agent = Scripted(WorkerSpec("trainer", 2, handler, entrypoint="train.py", max_restarts=7, local_addr="n2"), [])

    with pytest.raises(RendezvousClosedError, match="the job is over"):
        run(agent)

    [(taken, stall)] = connected
    assert ("n2", 7, None) == (taken.node.split("/")[0], taken.max_restarts, stall)
    assert (True, -1) == (handler.is_closed(), agent._member.fileno())
    hosts[0].close()


def test_handler_that_is_not_a_rendezvous_of_ours_is_refused() -> None:
    spec = WorkerSpec("trainer", 2, object(), entrypoint="train.py")

    with pytest.raises(ConfigError, match="rdzv_handler=<object object"):
        Scripted(spec, [])


def test_a_signal_that_cannot_be_handled_is_refused_when_the_agent_is_made(make: Make) -> None:
    with pytest.raises(ConfigError, match="SIGKILL"):
        make(signals_to_handle="SIGKILL")
