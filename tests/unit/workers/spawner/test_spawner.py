"""The spawner's stop ladder and what it says, with nobody really killed."""

from __future__ import annotations

import math
import os
import selectors
import shutil
import signal
import struct
import time
from collections.abc import Collection, Container, Iterator

import pytest

from elasticlib import processes
from elasticlib.processes import _reaper
from elasticlib.processes._wire import Channel, Message, wait_readable
from elasticlib.workers.child import _report
from elasticlib.workers.child._announcing import ProgramOutcome
from elasticlib.workers.child._exiting import ExitCourse, Stage
from elasticlib.workers.child._start_spec import Handed, StartSpec
from elasticlib.workers.spawner import _kernel_facts, _worker_process
from elasticlib.workers.spawner._detached import Detached
from elasticlib.workers.spawner._spawner import Spawner
from elasticlib.workers.spawner._worker_process import Left, WorkerProcess
from tests.patching import replace_everywhere


class Yard:
    """A spawner, its launcher's end of the channel, and workers whom signals do not reach."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launcher, theirs = Channel.pair()
        self.theirs = theirs
        self.outliving = processes.SharedSessions.new()
        changed = {"SET": "by the wrapper", "RANK": "by an import"}
        self.spawner = Spawner(theirs, os.getppid(), frozenset(), Detached(self.outliving), changed)
        self.workers_left = self.spawner._workers
        self.workers_left.listen()
        self.started: list[tuple[StartSpec, Handed]] = []
        self.sent: list[tuple[int, int]] = []
        """To groups."""
        self.alone: list[tuple[int, int]] = []
        """To workers alone."""
        self.children: list[tuple[int, int]] = []
        """To what they started."""
        self.adopted: list[int] = []
        """Processes that workers have left behind in their groups."""
        self.workers: list[int] = []
        replace_everywhere(
            monkeypatch, _reaper, "signal_group", lambda leader, _, signum: self.sent.append((leader, signum))
        )
        replace_everywhere(
            monkeypatch,
            _reaper,
            "signal_process",
            lambda handle, signum: self.alone.append((self.pid_of(handle), signum)),
        )
        replace_everywhere(
            monkeypatch, _reaper, "signal_descendant", lambda root, pid, signum: self.children.append((pid, signum))
        )
        has_ended = _reaper.is_ending
        replace_everywhere(monkeypatch, _reaper, "is_ending", lambda pid: pid not in self.adopted and has_ended(pid))
        monkeypatch.setattr(_kernel_facts, "group", lambda root, leader: [leader, *self.adopted])
        self.kept: list[int] = []
        replace_everywhere(monkeypatch, _reaper, "kill_descendants", self.sweep)
        monkeypatch.setattr(_kernel_facts, "detached", lambda parent, sessions: self.detached)
        monkeypatch.setattr(_kernel_facts, "command", lambda pid: f"command {pid}")
        self.detached: list[int] = []

    def sweep(self, spare: Collection[int] = (), limit: float = 5.0, kept: Container[int] = ()) -> list[int]:
        self.kept = [pid for pid in self.detached if pid in kept]
        return []

    def process(self, spec: StartSpec | None = None, handed: Handed | None = None, *, setsid: bool = False) -> int:
        """A process that stands for a worker; it is noted with what it would be started."""
        sleep = shutil.which("sleep") or "sleep"
        pid = os.posix_spawn(sleep, ["sleep", "60"], {}, setsid=setsid)
        self.workers.append(pid)
        if spec is not None and handed is not None:
            self.started.append((spec, handed))
        return pid

    def worker(self, rank: int) -> WorkerProcess:
        pid = self.process()
        live = WorkerProcess(self.workers_left.round, rank, pid, processes.handle_of(pid), Left(), ExitCourse())
        self.workers_left.add(live)
        return live

    def pid_of(self, handle: processes.Handle) -> int:
        return next(live.pid for live in self.workers_left._live.values() if live.handle is handle)

    def kill(self, live: WorkerProcess) -> None:
        os.kill(live.pid, signal.SIGKILL)
        os.waitid(os.P_PID, live.pid, os.WEXITED | os.WNOWAIT)

    def end(self, live: WorkerProcess) -> None:
        self.kill(live)
        self.workers.remove(live.pid)
        self.workers_left._ended(live)

    def order(self, **message: object) -> None:
        more = {"spare": False} if message["op"] == "stop" else {}
        self.launcher.send({**more, **message}, (0, 1, 2) if message["op"] == "start" else ())
        self.spawner._handle_order()

    def out_of_time(self) -> None:
        """Let the deadlines of all workers pass."""
        for live in list(self.workers_left._live.values()):
            live.course.deadline = live.course._times.kill_at = 0.0
            self.workers_left._look_at(live)

    def received(self) -> list[Message]:
        """Return the messages of the spawner so far."""
        found = []
        while wait_readable([self.launcher], 0):
            received = self.launcher.receive()
            assert received is not None
            for descriptor in received[1]:
                os.close(descriptor)
            found.append(received[0])
        return found

    def close(self) -> None:
        for pid in self.workers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for live in self.workers_left._live.values():
            live.handle.close()
            live.left.close()
        for descriptor in self.workers_left.notices._ends:
            os.close(descriptor)
        self.spawner._selector.close()
        os.close(self.outliving.fileno())
        self.launcher.close()
        self.theirs.close()


@pytest.fixture
def yard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Yard]:
    yard = Yard(monkeypatch)
    yield yard
    yard.close()


def test_end_is_reported_with_its_status_and_its_group_is_killed(yard: Yard) -> None:
    live = yard.worker(0)
    yard.worker(1)

    yard.end(live)

    (message,) = yard.received()
    assert (message["op"], message["local_rank"], message["pid"]) == ("exited", 0, live.pid)
    assert (message["exitcode"], message["told"]) == (-signal.SIGKILL, False)
    assert (live.pid, signal.SIGKILL) in yard.sent


def test_the_last_end_ends_the_round(yard: Yard) -> None:
    first, last = yard.worker(0), yard.worker(1)

    yard.end(first)
    yard.end(last)

    assert [message["op"] for message in yard.received()] == ["exited", "exited", "stopped"]


@pytest.mark.parametrize(
    ("serves_caller", "code", "stop", "keeps"),
    [
        (False, 0, "", True),
        (True, 0, "", False),
        (False, 1, "", False),
        (False, 0, "signal", True),
        (False, 1, "signal", False),
        (False, 0, "restart", False),
        (False, 0, "restart once it has ended", False),
    ],
)
def test_detached_processes_are_kept_where_the_workers_succeeded(
    yard: Yard, serves_caller: bool, code: int, stop: str, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, yard.detached = yard.worker(0), [pid := yard.process(setsid=True)]
    yard.spawner._common = StartSpec(serves_caller=serves_caller)
    monkeypatch.setattr(live.course, "exitcode", lambda _: code)
    if stop in ("signal", "restart"):
        yard.order(op="stop", signal=int(signal.SIGTERM), grace=30.0, spare=stop == "restart")
    yard.end(live)
    if stop == "restart once it has ended":
        yard.order(op="stop", signal=int(signal.SIGTERM), grace=30.0, spare=True)

    *_, stopped = yard.received()

    assert (yard.kept, stopped["ended"]) == (([pid], {}) if keeps else ([], {str(pid): f"command {pid}"}))
    assert yard.outliving.numbers() == ({pid} if keeps else set()), "by the processes above, too"


def test_a_stop_signals_the_workers_alone_and_wakes_the_stopped_ones(yard: Yard) -> None:
    """Their children would die first, and the workers could not save."""
    first, second = yard.worker(0), yard.worker(1)

    yard.order(op="stop", signal=int(signal.SIGTERM), grace=30.0)

    assert yard.alone == [(pid, signal.SIGTERM) for pid in (first.pid, second.pid)]
    assert yard.sent == [(pid, signal.SIGCONT) for pid in (first.pid, second.pid)]


def test_stop_signals_the_whole_group_of_a_non_python_program(yard: Yard) -> None:
    live = yard.worker(0)
    live.course.for_group = True

    yard.order(op="stop", signal=int(signal.SIGTERM), grace=30.0)

    assert [(live.pid, signal.SIGTERM), (live.pid, signal.SIGCONT)] == yard.sent


def test_same_stop_signal_is_not_sent_twice_to_a_worker(yard: Yard) -> None:
    live = yard.worker(0)
    for grace in (30.0, 5.0):
        yard.order(op="stop", signal=int(signal.SIGTERM), grace=grace)

    assert [(live.pid, signal.SIGTERM)] == yard.alone


@pytest.mark.parametrize("is_writing", [False, True])
def test_a_group_gets_the_signal_at_half_time_unless_its_worker_writes(
    is_writing: bool, yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = yard.worker(0)
    yard.adopted = [77]
    monkeypatch.setattr(WorkerProcess, "is_writing", lambda _: is_writing)
    yard.order(op="stop", signal=int(signal.SIGTERM), grace=30.0)

    live.course.deadline = 0.0
    yard.workers_left._look_at(live)

    if is_writing:
        assert [] == yard.children
        assert 0.0 < live.course.deadline < live.course._times.kill_at
    else:
        assert [(77, signal.SIGTERM), (77, signal.SIGCONT)] == yard.children
        assert live.course.deadline == live.course._times.kill_at


def test_group_of_a_stopped_worker_has_the_rest_of_the_time(yard: Yard) -> None:
    live = yard.worker(0)
    yard.order(op="stop", signal=int(signal.SIGTERM), grace=30.0)
    yard.adopted = [77]
    yard.end(live)
    before = yard.received()

    yard.adopted = []
    live.course.deadline = 0.0
    yard.workers_left._look_at(live)

    assert ([], [(77, signal.SIGTERM), (77, signal.SIGCONT)]) == (before, yard.children)
    assert ["exited", "stopped"] == [message["op"] for message in yard.received()]


def test_group_member_that_outlives_the_stop_time_is_killed(yard: Yard) -> None:
    live = yard.worker(0)
    yard.order(op="stop", signal=int(signal.SIGTERM), grace=30.0)
    yard.adopted = [77]
    yard.end(live)

    yard.out_of_time()

    assert (live.pid, signal.SIGKILL) in yard.sent
    assert ["exited", "stopped"] == [message["op"] for message in yard.received()]


def test_one_worker_is_signalled_by_its_rank_as_long_as_its_round_runs(yard: Yard) -> None:
    """A signal by pid could hit another process that has the pid by then."""
    yard.workers_left.round = 2
    live, _ = yard.worker(0), yard.worker(1)

    for number, rank in ((2, 0), (1, 1), (2, 7)):
        yard.order(op="signal", round=number, local_rank=rank, signal=int(signal.SIGUSR1))

    assert yard.sent == [(live.pid, signal.SIGUSR1)]


def test_worker_ended_before_the_stop_signal_counts_as_not_signalled(yard: Yard) -> None:
    ended, other = yard.worker(0), yard.worker(1)
    yard.kill(ended)
    yard.order(op="stop", signal=int(signal.SIGTERM), grace=30.0)

    yard.end(ended)
    yard.end(other)

    was_stopped = {message["local_rank"]: message["told"] for message in yard.received() if message["op"] == "exited"}
    assert was_stopped == {0: False, 1: True}


def test_signalled_worker_stays_signalled_if_next_signal_finds_it_dead(yard: Yard) -> None:
    live = yard.worker(0)
    yard.order(op="stop", signal=int(signal.SIGTERM), grace=30.0)
    yard.kill(live)
    yard.order(op="stop", signal=int(signal.SIGINT), grace=30.0)

    yard.end(live)

    assert yard.received()[0]["told"] is True


def test_a_stop_without_workers_is_done_at_once(yard: Yard) -> None:
    yard.order(op="stop", signal=int(signal.SIGTERM), grace=30.0)

    assert [message["op"] for message in yard.received()] == ["stopped"]


def test_workers_out_of_time_are_killed_and_survivors_then_reported(yard: Yard) -> None:
    descriptors = os.listdir("/proc/self/fd")
    live = yard.worker(0)
    yard.order(op="stop", signal=int(signal.SIGTERM), grace=0.0)

    yard.out_of_time()
    after_kill = yard.received()
    yard.out_of_time()

    assert yard.sent[-1] == (live.pid, signal.SIGKILL)
    assert after_kill == []
    assert [(message["op"], message["survivors"]) for message in yard.received()] == [("stopped", [live.pid])]
    assert os.listdir("/proc/self/fd") == descriptors


def test_signal_after_the_kill_makes_no_survivor_of_a_dying_worker(yard: Yard) -> None:
    live = yard.worker(0)
    yard.order(op="stop", signal=int(signal.SIGINT), grace=30.0)
    yard.order(op="stop", signal=int(signal.SIGKILL), grace=0.0)
    yard.out_of_time()
    until_then = live.course.deadline

    yard.order(op="stop", signal=int(signal.SIGKILL), grace=0.0)

    assert live.course.deadline == until_then


def test_survivor_is_not_a_worker_of_a_later_round(yard: Yard) -> None:
    yard.workers_left.round = 0
    survivor = yard.worker(0)
    yard.order(op="stop", signal=int(signal.SIGTERM), grace=0.0)
    yard.out_of_time()
    yard.out_of_time()
    yard.received()

    yard.order(op="start", round=1, workers=[], more=[])
    yard.kill(survivor)
    readable = [key.fd for key, _ in yard.spawner._selector.select(0)]
    yard.order(op="stop", signal=int(signal.SIGTERM), grace=30.0)

    assert readable == []
    assert [(message["op"], message["round"]) for message in yard.received()] == [
        ("starting", 1),
        ("started", 1),
        ("stopped", 1),
    ]


def start(yard: Yard, *ranks: int) -> None:
    """Order a round of workers, of whom only what they are started with is looked at."""
    yard.spawner._common = StartSpec(env={"SET": "by the caller", "HOME": "/"}, exit_timeout=(30.0, False))
    workers = [{"local_rank": rank, "variables": {"RANK": str(rank)}} for rank in ranks]
    yard.order(op="start", round=3, workers=workers, more=[])


def test_the_spawner_names_itself_when_it_has_its_job(yard: Yard) -> None:
    yard.order(op="job", memories=[], common=StartSpec().plain())

    assert yard.received() == [{"op": "spawning", "spawner": os.getpid()}]


def test_round_is_reported_with_its_processes(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yard.spawner, "_fork", yard.process)

    start(yard, 0, 1)

    pids = {"0": yard.workers[0], "1": yard.workers[1]}
    assert yard.received() == [{"op": "starting", "round": 3}, {"op": "started", "round": 3, "pids": pids}]


def test_a_worker_gets_its_variables_and_a_way_to_find_its_report_again(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork server's additions beat the caller's variables, and not the worker's own."""
    monkeypatch.setattr(yard.spawner, "_fork", yard.process)

    start(yard, 1)

    ((_, handed),) = yard.started
    assert handed.environment == {"SET": "by the wrapper", "HOME": "/", "RANK": "1"}
    assert (handed.identity, handed.spawner) == (_report.identity(handed.report), os.getpid())


def test_a_start_that_fails_in_the_middle_is_broken_and_never_started(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork(spec: StartSpec, handed: Handed) -> int:
        if spec.local_rank == 1:
            raise BlockingIOError("no process left")
        return yard.process(spec, handed)

    monkeypatch.setattr(yard.spawner, "_fork", fork)

    start(yard, 0, 1)

    assert yard.received() == [
        {"op": "starting", "round": 3},
        {"op": "broken", "why": "a worker could not be started: no process left"},
    ]


def test_knock_that_arrives_with_the_last_end_starts_no_store(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = os.eventfd(1, os.EFD_CLOEXEC)
    yard.spawner._store.await_knock(listener)
    live = yard.worker(0)
    knock = yard.spawner._selector.get_key(listener)

    yard.end(live)
    begun: list[int] = []
    monkeypatch.setattr(os, "fork", lambda: begun.append(1) or 1)
    knock.data()

    assert begun == []


@pytest.mark.parametrize("grace", [1e10, math.inf])
def test_a_grace_may_be_longer_than_the_kernel_can_count(yard: Yard, grace: float) -> None:
    yard.worker(0)
    yard.order(op="stop", signal=int(signal.SIGTERM), grace=grace)
    yard.spawner._selector.register(yard.theirs, selectors.EVENT_READ)
    yard.launcher.send({"op": "quit"})

    ready = yard.spawner._selector.select(yard.spawner._left())

    assert [key.fileobj for key, _ in ready] == [yard.theirs]


def test_a_lease_that_may_be_shortened_is_looked_at_before_it_is_over(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(yard.spawner, "_lease_end", lambda: now + 8.0)
    waits = [yard.spawner._left()]
    monkeypatch.setattr(yard.spawner, "_lease_end", lambda: time.monotonic() + 0.005)
    waits.append(yard.spawner._left())

    assert waits[0] is not None and 3.0 < waits[0] <= 4.0
    assert waits[1] is not None and 0.0 <= waits[1] < 0.01


def announced(yard: Yard, live: WorkerProcess, outcome: ProgramOutcome, status: int) -> None:
    """Announce the outcome of the program of *live*, as its process would."""
    writing = yard.workers_left.notices._ends[1]
    os.write(writing, struct.pack("!iBi", live.pid, outcome, status))
    yard.workers_left.read_notices()


def test_failure_is_reported_as_soon_as_it_is_announced(yard: Yard) -> None:
    live = yard.worker(1)

    announced(yard, live, ProgramOutcome.RAISED, 1)

    assert yard.received() == [{"op": "failed", "round": -1, "local_rank": 1, "pid": live.pid, "exitcode": 1}]


def test_a_store_that_ends_is_needed_unless_all_programs_have_ended_well(yard: Yard) -> None:
    """Their status is final, whatever is left to do for their processes; those of other nodes may need it."""
    done, works = yard.worker(0), yard.worker(1)
    announced(yard, done, ProgramOutcome.ENDED, 0)
    yard.spawner._store_ended("killed", 7, -9)
    assert [("store", True)] == [(message["op"], message["needed"]) for message in yard.received()]

    os.write(yard.workers_left.notices._ends[1], struct.pack("!iBi", works.pid, ProgramOutcome.RETURNED, 0))
    yard.spawner._store_ended("killed", 7, -9)

    assert [("store", False)] == [(message["op"], message["needed"]) for message in yard.received()]


@pytest.mark.parametrize(("outcome", "was_stopped"), [(ProgramOutcome.ENDED, True), (ProgramOutcome.FINAL, False)])
def test_a_stop_does_not_end_whose_status_is_final(yard: Yard, outcome: ProgramOutcome, was_stopped: bool) -> None:
    live = yard.worker(0)
    announced(yard, live, outcome, 0)
    yard.order(op="stop", signal=int(signal.SIGTERM), grace=30.0)

    yard.end(live)

    assert [(0, was_stopped)] == [
        (each["exitcode"], each["told"]) for each in yard.received() if each["op"] == "exited"
    ]


def test_a_stop_after_a_failure_spares_who_has_failed(yard: Yard) -> None:
    failed, other = yard.worker(0), yard.worker(1)
    announced(yard, failed, ProgramOutcome.RAISED, 1)

    yard.order(op="stop", signal=int(signal.SIGTERM), grace=30.0, spare=True)

    assert {other.pid} == {pid for pid, _ in yard.sent}


def test_overdue_worker_is_reported_and_ends_with_its_program_status(yard: Yard) -> None:
    """Its threads' stacks are asked for, then it is stopped."""
    live = yard.worker(0)
    announced(yard, live, ProgramOutcome.CLOSING, 0)
    os.write(live.left.faults, b"stacks")

    while not yard.sent:
        yard.out_of_time()
    yard.end(live)

    lingers, exited, stopped = yard.received()
    assert ("lingers", True, 30.0) == (lingers["op"], lingers["ends"], lingers["seconds"])
    assert (0, 30.0, False) == (exited["exitcode"], exited["overdue"], exited["told"])
    assert "stopped" == stopped["op"]


def test_last_running_worker_is_reported_once_all_others_ended_well(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last, other = yard.worker(0), yard.worker(1), yard.worker(2)
    monkeypatch.setattr(ExitCourse, "exitcode", lambda *_: 0)
    yard.end(first)
    yard.out_of_time()
    assert last.course.stage is other.course.stage is Stage.RUNS
    yard.end(other)

    last.course._last_run.others_finished -= 60.0
    while last.course.deadline is not None:
        yard.out_of_time()
        os.write(last.left.faults, b"stacks")

    message = yard.received()[-1]
    assert ("last_runs", 1, None) == (message["op"], message["local_rank"], message["left"])


def test_functions_that_have_returned_are_released_when_all_have(yard: Yard) -> None:
    yard.workers_left.release.begin_round()
    released, _ = yard.workers_left.release.for_workers()
    first, last, other = yard.worker(0), yard.worker(1), yard.worker(2)

    for each in first, last:
        announced(yard, each, ProgramOutcome.RETURNED, 0)
    assert [first.course.waits(), last.course.waits(), wait_readable([released], 0)] == [True, True, set()]
    assert other.course.stage is Stage.LAST_RUNS
    yard.end(other)  # without a word

    assert [first.course.stage, last.course.stage, wait_readable([released], 0)] == [Stage.EXITS] * 2 + [{released}]


@pytest.mark.parametrize("handles", [False, True])
def test_stop_releases_returned_functions_and_signals_only_handlers(
    yard: Yard, handles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one the signal would cut off their exit handlers."""
    monkeypatch.setattr(_worker_process, "catches", lambda *_: handles)
    yard.workers_left.release.begin_round()
    released, _ = yard.workers_left.release.for_workers()
    returned, runs = yard.worker(0), yard.worker(1)
    announced(yard, returned, ProgramOutcome.RETURNED, 0)

    yard.order(op="stop", signal=int(signal.SIGTERM), grace=30.0)

    assert [pid for pid, _ in yard.alone] == ([returned.pid, runs.pid] if handles else [runs.pid])
    assert {released} == wait_readable([released], 0)


def test_sleeping_worker_is_not_signalled_for_its_place(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal would end the system call in which it sleeps."""
    monkeypatch.setattr(_worker_process, "catches", lambda *_: True)
    yard.worker(0)
    with open(f"/proc/{yard.workers[0]}/stat") as file:
        while file.read().split()[2] != "S":
            file.seek(0)

    yard.order(op="place")

    assert {} == yard.spawner._stacks.look(time.monotonic())
    assert [] == yard.alone


def test_worker_still_running_after_a_failure_is_not_reported(yard: Yard) -> None:
    """The round is stopped for that."""
    first, last = yard.worker(0), yard.worker(1)

    yard.end(first)  # by a signal

    assert last.course.stage is Stage.RUNS


def test_announcements_of_strangers_are_left_out(yard: Yard) -> None:
    yard.worker(0)
    os.write(yard.workers_left.notices._ends[1], struct.pack("!iBi", 1, ProgramOutcome.RAISED, 1) + b"and more")

    yard.workers_left.read_notices()

    assert yard.received() == []
