"""The agent of real processes, as far as it goes without one: checks of the call, and what it makes of ends."""

from __future__ import annotations

import os
import pickle
import pty
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from elasticlib import processes, records
from elasticlib.agent import LocalElasticAgent, SimpleElasticAgent
from elasticlib.agent._local import silent_for
from elasticlib.errors import (
    ConfigError,
    EntrypointError,
    PicklingError,
    PreloadError,
    RendezvousConnectionError,
    StartError,
    root_cause,
)
from elasticlib.helpers import Helper
from elasticlib.logs import DefaultLogsSpecs
from elasticlib.processes._programs import HelperLostError, Process
from elasticlib.rendezvous import ContactLost, RoundEnd, Rules, open_local
from elasticlib.spec import WorkerSpec
from elasticlib.state import RunResult, WorkerState
from elasticlib.workers._launch_events import AllStopped, Event, Exit, SpawnerLost
from elasticlib.workers.child._report import Report, report_of_exception
from elasticlib.workers.child._result_pickles import pack_exception

Make = Callable[..., LocalElasticAgent]


@pytest.fixture
def reported() -> list[records.Record]:
    return []


@pytest.fixture
def make(reported: list[records.Record]) -> Iterator[Make]:
    """Makes agents of two workers that are never started."""
    with open_local("job", Rules()) as rendezvous:

        def new(entrypoint: Any = print, args: tuple[Any, ...] = (), **options: Any) -> LocalElasticAgent:
            spec = WorkerSpec("trainer", 2, rendezvous, entrypoint=entrypoint, args=args)
            agent = LocalElasticAgent(spec, DefaultLogsSpecs(), sink=reported.append, **options)
            for worker in agent.get_worker_group().workers:
                worker.global_rank = worker.local_rank
            return agent

        yield new


def ended(rank: int, exitcode: int = 0, report: Report | None = None, *, was_stopped: bool = False) -> Exit:
    return Exit(rank, 100 + rank, exitcode, was_stopped, report, "", "")


def note(agent: LocalElasticAgent, *ends: Exit, stopped: bool = False, lost: SpawnerLost | None = None) -> None:
    """Record in *agent* the facts that its spawner would have reported."""
    for end in ends:
        agent._processes.round.exits[end.local_rank] = end
        agent._processes.round.noticed[end.local_rank] = 1.0
    agent._processes.round.is_stopped, agent._processes.round.lost = stopped, lost


@pytest.mark.parametrize(
    ("entrypoint", "args", "options", "kind"),
    [
        (3, (), {}, EntrypointError),
        ("no_such_script.py", (), {}, EntrypointError),
        (print, (threading.Lock(),), {}, PicklingError),
        (print, (), {"start_method": "thread"}, ConfigError),
    ],
)
def test_a_call_that_cannot_work_is_refused_before_anything_is_started(
    make: Make, entrypoint: object, args: tuple[object, ...], options: dict[str, str], kind: type[ConfigError]
) -> None:
    with pytest.raises(kind):
        make(entrypoint, args, **options)


@pytest.mark.parametrize("chosen", [None, "5"])
def test_a_thread_count_is_recorded_unless_the_user_chose_it(
    make: Make, reported: list[records.Record], monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)

    make()

    counts = [
        (each.threads, max(1, int(each.cpus // 2))) for each in reported if isinstance(each, records.ThreadsChosen)
    ]
    assert (chosen is None) == (len(reported) == len(counts) == 1)
    assert all(threads == expected for threads, expected in counts)


def test_making_an_agent_changes_neither_environment_nor_folder(make: Make, tmp_path: Path) -> None:
    before = dict(os.environ), os.getcwd()

    make()

    assert (dict(os.environ), os.getcwd()) == before


LOSS = SpawnerLost("the fork server process ended unexpectedly", StartError("gone"))
BOTH = ended(0), ended(1)


@pytest.mark.parametrize(
    ("ends", "stopped", "lost", "state", "failed"),
    [
        ((ended(0),), False, None, WorkerState.HEALTHY, set()),
        (BOTH, False, None, WorkerState.HEALTHY, set()),
        (BOTH, True, None, WorkerState.SUCCEEDED, set()),
        ((ended(1, 3),), False, None, WorkerState.FAILED, {1}),
        ((), False, LOSS, WorkerState.FAILED, {0, 1}),
        (BOTH, True, LOSS, WorkerState.SUCCEEDED, set()),
    ],
    ids=["one runs", "ended, but not gone", "gone", "one failed, one runs", "spawner lost", "lost after a success"],
)
def test_state_of_the_group_follows_from_ends_and_losses(
    make: Make, ends: tuple[Exit, ...], stopped: bool, lost: SpawnerLost | None, state: WorkerState, failed: set[int]
) -> None:
    agent = make()
    note(agent, *ends, stopped=stopped, lost=lost)

    result = agent._monitor_workers(agent.get_worker_group())

    assert (state, failed) == (result.state, set(result.failures))
    if failed == {0, 1}:
        assert LOSS.why == root_cause(result.failures)[1].message


def test_return_values_are_keyed_by_global_rank_and_none_if_missing(make: Make) -> None:
    agent = make()
    note(agent, ended(0), ended(1, report=Report("result", pickle.dumps([1, 2]))), stopped=True)

    result = agent._monitor_workers(agent.get_worker_group())

    assert result.return_values == {0: None, 1: [1, 2]}


def cannot_be_rebuilt() -> object:
    raise ValueError("not here")


class Stubborn:
    def __reduce__(self) -> Any:
        return cannot_be_rebuilt, ()


def test_a_return_value_that_cannot_be_rebuilt_is_named_with_its_rank(make: Make) -> None:
    agent = make()
    note(agent, ended(0), ended(1, report=Report("result", pickle.dumps(Stubborn()))), stopped=True)

    with pytest.raises(PicklingError, match=r"return value of rank 1 .* ValueError: not here"):
        agent._monitor_workers(agent.get_worker_group())


def test_failures_are_called_by_global_rank(make: Make) -> None:
    agent = make()
    for worker in agent.get_worker_group().workers:
        worker.global_rank = 4 + worker.local_rank
    note(agent, ended(1, 3))

    (failure,) = agent._failures().values()

    assert set(agent._failures()) == {5}
    assert (failure.rank, failure.local_rank) == (5, 1)


@pytest.mark.parametrize("was_stopped", [False, True])
def test_stop_spares_succeeded_workers_and_returns_their_results(make: Make, was_stopped: bool) -> None:
    agent, spawner = make(), Ladder()
    agent._processes._supervisor.client = spawner  # type: ignore[assignment]
    note(agent, ended(0), ended(1, was_stopped=was_stopped), stopped=True)

    agent._stop_workers(agent.get_worker_group())

    spawner.close()
    agent._processes._supervisor.client = None
    assert ([], not was_stopped) == (spawner.stops, agent._result.state is WorkerState.SUCCEEDED)


def test_the_original_exception_is_the_workers_own(make: Make) -> None:
    agent = make()
    error = ValueError("a bad value")
    note(agent, ended(1, 1, report_of_exception(error, pack_exception(error, ()))))

    original = agent.original_exception(1)

    assert isinstance(original, ValueError) and str(original) == "a bad value"
    if sys.version_info >= (3, 11):
        assert "from the worker of local rank 1" in original.__notes__[0]


def test_without_a_spawner_there_is_nothing_to_watch(make: Make) -> None:
    agent = make()

    assert tuple(agent._watched()) == ()
    assert agent._poll_timeout() is None


def test_an_agent_may_be_shut_down_before_it_ran_and_twice(make: Make) -> None:
    agent = make()

    for _ in range(2):
        agent._shutdown()

    assert agent.get_worker_group().state is WorkerState.INIT


# A start that fails.

SPAWNER, HANDLE = 69, 99_999


class Starter:
    """Stands in for a spawner: its start fails with *error*, or says where the workers are."""

    board = None

    def __init__(self, error: Exception | None = None, *, used: bool = False) -> None:
        self.error, self.started = error, used
        self.closed = False
        self.events: list[Event] = []

    def is_outdated(self) -> bool:
        return False

    def start(self, *order: object) -> dict[int, int]:
        if self.error is not None:
            raise self.error
        self.started = True
        return {0: 70, 1: 71}

    def spawner(self, interrupt: int | None = None) -> Process | None:
        return Process(SPAWNER, processes.Handle(HANDLE))

    def fileno(self) -> int:
        return -1

    def drain(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def helpers(self) -> list[Helper]:
        return []

    def replace(self, helper: Helper, why: str) -> None:
        raise AssertionError("no helper stands still here")

    def close(self) -> None:
        self.closed = True


def start_with(agent: LocalElasticAgent, *spawners: Starter, present: Starter | None = None) -> dict[int, object]:
    """Start the workers; the agent has *present* already, and gets *spawners* one after the other."""
    spawning = iter(spawners)
    group = agent.get_worker_group()
    group.group_rank, group.group_world_size = 0, 1
    agent._processes._supervisor.client = present  # type: ignore[assignment]
    agent._processes._supervisor._start_client = lambda _: next(spawning)  # type: ignore[method-assign, assignment, return-value]
    with agent._signals:
        return agent._start_workers(group)


KILLED = HelperLostError("killed from outside")


def test_a_helper_that_was_killed_before_workers_ran_is_started_again(make: Make) -> None:
    killed, fresh = Starter(KILLED), Starter()

    pids = start_with(make(), killed, fresh)

    assert pids == {0: 70, 1: 71}
    assert killed.closed and not fresh.closed


def test_a_spawner_that_was_killed_between_two_rounds_is_replaced(make: Make) -> None:
    killed = Starter(KILLED, used=True)

    pids = start_with(make(), Starter(), present=killed)

    assert pids == {0: 70, 1: 71}
    assert killed.closed


@pytest.mark.parametrize(
    "spawners", [[Starter(StartError("not killed from outside"))], [Starter(KILLED) for _ in range(4)]]
)
def test_failure_at_imports_and_a_helper_killed_repeatedly_are_errors(make: Make, spawners: list[Starter]) -> None:
    with pytest.raises(StartError, match="killed from outside"):
        start_with(make(), *spawners)
    assert all(spawner.closed for spawner in spawners)


def test_a_module_that_cannot_be_preloaded_is_not_tried_twice(make: Make) -> None:
    refused, agent = Starter(PreloadError("module", "its import starts a Python thread")), make()
    processes = agent._processes
    assert processes._supervisor.job.fork_server is not None
    named = evolve(processes._supervisor.job.fork_server, preload=("module",), is_automatic=False)
    processes._supervisor.job = evolve(processes._supervisor.job, fork_server=named)

    with pytest.raises(PreloadError):
        start_with(agent, refused)
    assert refused.closed


def test_first_reason_of_a_lost_spawner_is_reported(make: Make) -> None:
    agent, spawner = make(), Starter()
    start_with(agent, spawner)
    first, later = StartError("no descriptor left"), StartError("ended from outside")
    spawner.events = [SpawnerLost(str(first), first), SpawnerLost(str(later), later)]

    result = agent._monitor_workers(agent.get_worker_group())

    assert root_cause(result.failures)[1].message == "no descriptor left"
    assert agent.original_exception(0) is first


# What the rendezvous gets to know.


def test_guard_process_of_workers_is_named_before_they_start(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, spawner = make(), Starter()
    named: list[tuple[int, bool]] = []
    monkeypatch.setattr(agent._member, "guard", lambda handle: named.append((handle, spawner.started)))

    start_with(agent, spawner)

    assert named == [(HANDLE, False)]


def test_a_signal_before_there_is_a_spawner_starts_nobody(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, spawner = make(), Starter()
    monkeypatch.setattr(spawner, "spawner", lambda interrupt: None)

    pids = start_with(agent, spawner)

    assert (pids, spawner.started) == ({}, False)


def test_workers_that_were_killed_because_contact_was_lost_have_not_failed(make: Make) -> None:
    agent = make()
    note(agent, lost=SpawnerLost("the fork server process ended unexpectedly", StartError("gone")))
    agent._state = evolve(agent._state, lost=True)

    assert agent._failures() == {}


def test_a_worker_of_another_node_has_no_exception_here(make: Make) -> None:
    agent = make()
    note(agent, lost=SpawnerLost("killed from outside", StartError("killed from outside")))

    assert agent.original_exception(7) is None


def stores(agent: LocalElasticAgent, monkeypatch: pytest.MonkeyPatch, listener: socket.socket | None) -> list[object]:
    """Per worker: whether the worker is told that its agent's side has the store; then: whether a socket came along."""
    seen: list[object] = []

    class Noting(Starter):
        def start(self, *order: Any) -> dict[int, int]:
            seen.extend(each.variables["TORCHELASTIC_USE_AGENT_STORE"] for each in order[1])
            seen.append(order[2] is not None)
            return super().start(*order)

    agent._listener = listener
    start_with(agent, Noting())
    agent._close_listener()
    return seen


@pytest.mark.parametrize(
    ("private", "bound", "expected"),
    [
        ("0", True, ["True", "True", True]),
        ("0", False, ["True", "True", False]),
        ("1", True, ["False", "False", False]),
        ("1", False, ["True", "True", False]),
    ],
)
def test_workers_host_their_store_only_if_requested_and_port_is_free(
    make: Make, monkeypatch: pytest.MonkeyPatch, private: str, bound: bool, expected: list[object]
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", private)
    agent = make()

    seen = stores(agent, monkeypatch, socket.create_server(("127.0.0.1", 0)) if bound else None)

    assert seen == expected


# Reasons to hurry.


class Ladder(Starter):
    """A spawner whose workers end when they are told to be quick."""

    def __init__(self) -> None:
        super().__init__(used=True)
        self.ready = os.eventfd(0, os.EFD_CLOEXEC)
        self.stops: list[tuple[int, float]] = []

    def fileno(self) -> int:
        return self.ready

    def ask_for_place(self) -> None:
        """No import of its workers takes long."""

    def stop(self, signum: int, grace: float, spare_failed: bool = False) -> bool:
        self.stops.append((signum, grace))
        if grace < 10.0:
            self.events.append(AllStopped())
            os.eventfd_write(self.ready, 1)
        return True

    def close(self) -> None:
        if not self.closed:
            os.close(self.ready)
        super().close()


def stop_while(agent: LocalElasticAgent, monkeypatch: pytest.MonkeyPatch, *events: Any) -> Ladder:
    """Stop the workers with 30 s of grace while the rendezvous sends *events*; raises what it left unsent."""
    left, spawner = list(events), Ladder()
    monkeypatch.setattr(agent._member, "drain", lambda: [left.pop(0)] if left else [])
    monkeypatch.setattr(agent._member, "poll_timeout", lambda: 0.0)
    agent._processes._supervisor.client = spawner  # type: ignore[assignment]
    with agent._signals:
        agent._stop_processes(signal.SIGTERM, 30.0)
    spawner.close()
    agent._processes._supervisor.client = None
    return spawner


def test_lost_contact_shortens_a_stop_and_never_prolongs_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, end = make(), RoundEnd(0, "rank 1 failed", True)
    long, short = ContactLost("no answer", 60.0), ContactLost("no answer", 1.5)

    spawner = stop_while(agent, monkeypatch, end, long, short)

    assert spawner.stops == [(signal.SIGTERM, 30.0), (signal.SIGTERM, 1.5)]
    assert list(agent._events) == [end, long, short]


class FullGpu:
    """Memory that nobody frees; each look is one more in *looks*."""

    def __init__(self) -> None:
        self.looks = 0
        self.ready = os.eventfd(0)

    def fileno(self) -> int:
        return self.ready

    def begin(self) -> None:
        pass

    def look(self) -> float | None:
        self.looks += 1
        return 1000.0


def waits_for_gpu(agent: LocalElasticAgent, monkeypatch: pytest.MonkeyPatch, *events: Any) -> int:
    """Return the number of looks at memory that stays in use while the rendezvous sends *events*."""
    left, memory = [[], *([event] for event in events)], FullGpu()
    monkeypatch.setattr(agent._member, "drain", lambda: left.pop(0))
    monkeypatch.setattr(agent._member, "poll_timeout", lambda: 0.0)
    agent._gpu_memory = memory  # type: ignore[assignment]
    try:
        with agent._signals:
            agent._await_gpu_memory()
    finally:
        monkeypatch.setattr(agent._member, "drain", list)
        os.close(memory.ready)
    return memory.looks


def test_the_end_of_a_round_ends_its_wait_for_gpu_memory(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, over = make(), RoundEnd(0, "rank 1 failed", True)

    assert 2 == waits_for_gpu(agent, monkeypatch, over)
    assert [over] == list(agent._events)


def test_contact_lost_in_the_wait_for_gpu_memory_starts_no_worker(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make()

    with pytest.raises(StartError, match="contact was lost"):
        waits_for_gpu(agent, monkeypatch, ContactLost("no answer", 1.5))

    assert agent._listen()  # by which the agent knows why, and that it is no error of the start


def test_rendezvous_that_breaks_during_a_stop_is_an_error(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, spawner = make(), Ladder()
    monkeypatch.setattr(spawner, "drain", lambda: [AllStopped()] if agent._broken else [])
    monkeypatch.setattr(agent._member, "drain", raising(RendezvousConnectionError("gone")))
    agent._processes._supervisor.client = spawner  # type: ignore[assignment]
    with agent._signals:
        os.eventfd_write(spawner.ready, 1)
        agent._stop_processes(signal.SIGTERM, 30.0)
    monkeypatch.setattr(agent._member, "drain", list)
    spawner.close()
    agent._processes._supervisor.client = None

    with pytest.raises(RendezvousConnectionError, match="gone"):
        agent._words()


def raising(error: Exception) -> Callable[[], Any]:
    def drain() -> Any:
        raise error

    return drain


@pytest.mark.parametrize(("state", "left"), [(WorkerState.SUCCEEDED, 0), (WorkerState.FAILED, 1)])
def test_temporary_logs_go_with_a_run_that_ended_well(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: WorkerState, left: int
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    agent = make()

    def runs(self: SimpleElasticAgent, role: str) -> RunResult:
        for _ in range(2):
            agent._logs.reify({0: {}, 1: {}})
        return RunResult(state)

    monkeypatch.setattr(SimpleElasticAgent, "run", runs)

    assert agent.run().state is state
    assert len(list(tmp_path.iterdir())) == left


# How long workers have written nothing.


@pytest.mark.parametrize(("began", "seconds"), [(0.0, 30.0), (980.0, 20.0), (2000.0, 0.0)])
def test_silence_counts_from_the_last_byte_or_from_the_start(began: float, seconds: float, tmp_path: Path) -> None:
    older, newer = tmp_path / "older", tmp_path / "newer"
    for path, moment in ((older, 900.0), (newer, 970.0)):
        path.touch()
        os.utime(path, (0.0, moment))

    assert seconds == silent_for(1000.0, began, [str(older), str(newer), str(tmp_path / "gone"), -1])


def test_bytes_that_go_through_a_pipe_are_seen() -> None:
    reading, writing = os.pipe()
    try:
        before = os.fstat(writing).st_mtime
        os.write(writing, b"line\n")

        assert 5.0 >= silent_for(before + 5.0, 0.0, [writing])
    finally:
        os.close(reading)
        os.close(writing)


def test_the_time_of_a_terminal_may_be_behind_by_eight_seconds() -> None:
    ours, terminal = pty.openpty()
    try:
        written = os.fstat(terminal).st_mtime

        assert 20.0 == pytest.approx(silent_for(written + 28.0, 0.0, [terminal]))
    finally:
        os.close(ours)
        os.close(terminal)
