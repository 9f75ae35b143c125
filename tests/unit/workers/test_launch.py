"""The launcher's side of a spawner, who is played here by the other end of the channel."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator

import pytest

from elasticlib.errors import StartError
from elasticlib.helpers import Helper
from elasticlib.processes._programs import HelperLostError
from elasticlib.processes._wire import Channel, Message, wait_readable
from elasticlib.workers import _launch
from elasticlib.workers._launch import SpawnerClient
from elasticlib.workers._launch_events import AllStopped, Exit, RoundStoreEnded, SpawnerLost
from elasticlib.workers.child import _report, _worker_progress
from elasticlib.workers.child._start_spec import StartSpec
from elasticlib.workers.child._worker_progress import attach, progress


class Spawner:
    """Spawner's end of the channel: it receives orders and sends reports."""

    def __init__(self) -> None:
        ours, self.channel = Channel.pair()
        self.spawner = SpawnerClient(StartSpec(argv=["train.py"]), {"function": b"pickled"})
        self.spawner._start_spawner(ours)

    def receive(self) -> Message:
        received = self.channel.receive()
        assert received is not None
        for descriptor in received[1]:
            os.close(descriptor)
        return received[0]

    def send(self, op: str, number: int = 0, **facts: object) -> None:
        self.channel.send({"op": op, "round": number, **facts})

    def exited(self, rank: int, exitcode: int = 0, number: int = 0, report: _report.Report | None = None) -> None:
        memories = os.memfd_create("report"), os.memfd_create("faults"), os.memfd_create("tail")
        if report is not None:
            _report.write_report(memories[0], report)
        os.write(memories[1], b"Fatal Python error" if exitcode == -11 else b"")
        os.write(memories[2], b"last words\n")
        message = {"op": "exited", "round": number, "local_rank": rank, "pid": 70 + rank}
        self.channel.send({**message, "exitcode": exitcode, "told": False, "overdue": None, "late": None}, memories)
        for descriptor in memories:
            os.close(descriptor)

    def start(self, number: int = 0) -> dict[int, int]:
        self.send("starting", number)
        self.send("started", number, pids={"0": 70, "1": 71})
        return self.spawner.start(number, [], None)


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    spawner = Spawner()
    yield spawner
    spawner.channel.close()
    spawner.spawner.close()


class FakeForkServer:
    """Stands in for a fork server that has forked a spawner."""

    def __init__(self, passed_on: list[tuple[int, int]]) -> None:
        self._passed_on = passed_on
        self.waits = False

    def signal_child(self, pid: int, signum: int) -> None:
        self._passed_on.append((pid, signum))

    def helpers(self, is_awaited: bool) -> list[Helper]:
        self.waits = is_awaited
        return []

    def failure(self, child: str, pid: int) -> Exception:
        return HelperLostError.of(child, pid)

    def ready(self) -> bool:
        return True


class Hanging:
    """A fork server that takes no orders."""

    def ready(self) -> bool:
        return True

    def request(self, op: str) -> Channel:
        raise StartError("does not respond")


def test_a_spawner_that_cannot_be_employed_gives_its_fork_server_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody would ever end that."""
    returned: list[tuple[object, bool]] = []
    monkeypatch.setattr(
        _launch.fork_servers, "give_back", lambda fork_server, unused: returned.append((fork_server, unused))
    )
    fork_server = Hanging()

    with pytest.raises(StartError, match="does not respond"):
        SpawnerClient(StartSpec(), {}).employ(fork_server)  # type: ignore[arg-type]

    assert [(fork_server, True)] == returned


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def raised_descriptor() -> Iterator[int]:
    """A descriptor that is readable."""
    descriptor = os.eventfd(1, os.EFD_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_spawner_first_receives_what_all_rounds_have_in_common(
    spawner: Spawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_worker_progress, "_slot", None)
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: None)
    received = spawner.channel.receive()

    assert received is not None
    message, descriptors = received
    try:
        assert ("job", ["function", "progress"]) == (message["op"], message["memories"])
        assert ["train.py"] == StartSpec.of(message["common"]).argv
        assert os.pread(descriptors[0], 100, 0) == b"pickled"
        attach(os.dup(descriptors[1]), 0)
        progress(7)
        reported = spawner.spawner.board.read(0) if spawner.spawner.board is not None else None
        assert reported is not None and reported.step == 7
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def test_start_sends_differences_and_returns_pids_by_rank(spawner: Spawner) -> None:
    spawner.receive()

    pids = spawner.start()

    assert pids == {0: 70, 1: 71}
    assert spawner.receive() == {"op": "start", "round": 0, "workers": [], "more": []}
    assert spawner.spawner.started


def test_spawner_reports_which_process_it_is(spawner: Spawner) -> None:
    handle = os.pidfd_open(os.getpid())
    spawner.channel.send({"op": "spawning", "spawner": os.getpid()}, (handle,))
    os.close(handle)

    first, second = spawner.spawner.spawner(), spawner.spawner.spawner()

    assert first is not None and first is second
    assert first.pid == os.getpid() and not first.ends(0.0)
    first.close()


def test_a_wait_for_the_spawner_ends_by_an_interrupt_or_its_reason(spawner: Spawner) -> None:
    with raised_descriptor() as interrupt:
        assert spawner.spawner.spawner(interrupt) is None
    spawner.send("broken", why="no process can be started")

    with pytest.raises(StartError, match="no process can be started"):
        spawner.spawner.spawner()


def test_a_start_without_a_spawner_is_an_error(spawner: Spawner) -> None:
    spawner.channel.close()

    with pytest.raises(HelperLostError, match="spawner process ended unexpectedly"):
        spawner.spawner.start(0, [], None)


def test_spawner_lost_after_the_first_worker_is_a_loss_of_the_round(spawner: Spawner) -> None:
    """A program may have run by then, and must not run twice in one round."""
    spawner.send("starting")
    spawner.channel.close()

    pids = spawner.spawner.start(0, [], None)

    (lost,) = spawner.spawner.drain()
    assert pids == {} and spawner.spawner.started
    assert isinstance(lost, SpawnerLost) and isinstance(lost.cause, HelperLostError)


def test_a_restart_in_which_not_all_workers_can_be_started_has_failed(spawner: Spawner) -> None:
    """It is not begun again under the same number: the first worker's program may have run."""
    spawner.start(0)
    spawner.send("starting", 1)
    spawner.send("broken", why="a worker could not be started: no process left")

    pids = spawner.spawner.start(1, [], None)

    (lost,) = spawner.spawner.drain()
    assert pids == {}
    assert isinstance(lost, SpawnerLost) and lost.why == "a worker could not be started: no process left"


@pytest.mark.parametrize("begins", [False, True])
def test_a_start_that_stands_still_can_be_interrupted(
    begins: bool, spawner: Spawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as at a log file on a file system that does not answer; workers that run can be asked to save."""
    monkeypatch.setattr(_launch, "_FORKS", 0.01)
    if begins:
        spawner.send("starting")
    with raised_descriptor() as interrupt:
        pids = spawner.spawner.start(0, [], None, interrupt)
    spawner.send("started", pids={"0": 70})

    assert pids == {} and spawner.spawner.drain() == []
    assert spawner.spawner.started is begins


def test_exit_event_contains_what_the_worker_left(spawner: Spawner) -> None:
    spawner.start()
    report = _report.Report("result", b"payload")
    spawner.exited(1, -11, report=report)

    events = spawner.spawner.drain()

    assert events == [Exit(1, 71, -11, False, report, "Fatal Python error", "last words\n")]


def test_ends_are_taken_all_at_once_and_only_once(spawner: Spawner) -> None:
    spawner.start()
    spawner.exited(1)
    spawner.exited(0)
    spawner.send("stopped", survivors=[], ended={})

    first, second = spawner.spawner.drain(), spawner.spawner.drain()

    assert [type(event) for event in first] == [Exit, Exit, AllStopped]
    assert second == []


def test_messages_of_an_earlier_round_are_ignored(spawner: Spawner) -> None:
    spawner.start(0)
    spawner.exited(1, -9, number=0)
    spawner.send("stopped", 0, survivors=[], ended={})
    spawner.start(1)
    spawner.send("stopped", 0, survivors=[], ended={})

    assert spawner.spawner.drain() == []


def test_end_is_reported_without_a_free_descriptor(spawner: Spawner) -> None:
    spawner.start()
    facts = {"local_rank": 1, "pid": 71, "exitcode": 3, "told": False, "overdue": None, "late": None}
    body = json.dumps({"op": "exited", "round": 0, **facts}).encode()
    spawner.channel._sock.sendall(struct.pack("!II", len(body), 3) + body)

    assert spawner.spawner.drain() == [Exit(1, 71, 3, False, None, "", unread=True)]


@pytest.mark.parametrize(
    ("op", "facts", "event"),
    [
        (
            "store",
            {"why": "it was ended by SIGKILL", "pid": 77, "exitcode": -9, "needed": False},
            RoundStoreEnded("it was ended by SIGKILL", 77, -9, was_needed=False),
        ),
        ("stopped", {"survivors": [71], "ended": {"72": "sleep"}}, AllStopped([71], {72: "sleep"})),
    ],
)
def test_messages_become_events_with_all_their_facts(
    op: str, facts: dict[str, object], event: object, spawner: Spawner
) -> None:
    spawner.start()
    spawner.send(op, **facts)

    assert [event] == spawner.spawner.drain()


def hold(spawner: Spawner) -> int:
    """A process in the spawner's place, which the spawner holds; its pid."""
    sleep = shutil.which("sleep") or "sleep"
    pid = os.posix_spawn(sleep, ["sleep", "60"], {})
    handle = os.pidfd_open(pid)
    spawner.channel.send({"op": "spawning", "spawner": pid}, (handle,))
    os.close(handle)
    spawner.spawner.spawner()
    return pid


def test_a_spawner_that_does_not_go_is_killed(spawner: Spawner) -> None:
    """Its channel has ended, and it has not."""
    pid = hold(spawner)
    spawner.start()
    spawner.channel.close()

    spawner.spawner.close()

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_stopped_spawner_is_woken_to_stop_its_workers(spawner: Spawner) -> None:
    pid = hold(spawner)
    spawner.start()
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)

    spawner.spawner.stop(15, 2.5)

    assert os.WIFCONTINUED(os.waitpid(pid, os.WCONTINUED)[1])
    spawner.spawner.kill()
    os.waitpid(pid, 0)
    spawner.channel.close()


def test_workers_are_lost_when_their_spawner_has_ended(spawner: Spawner) -> None:
    spawner.start()
    spawner.exited(0)
    spawner.channel.close()

    exited, lost = spawner.spawner.drain()

    assert isinstance(exited, Exit) and isinstance(lost, SpawnerLost)
    assert lost.why == "the spawner process ended unexpectedly (killed from outside, or out of memory)"
    assert spawner.spawner.fileno() == -1


def test_a_start_that_broke_in_the_middle_is_an_error_at_once(spawner: Spawner) -> None:
    spawner.channel.send({"op": "broken", "why": "a worker could not be started: no memory"})

    with pytest.raises(StartError, match=r"^a worker could not be started: no memory$"):
        spawner.spawner.start(0, [], None)
    assert not spawner.spawner.started


def test_a_spawner_that_broke_in_a_round_is_a_loss_with_its_reason(spawner: Spawner) -> None:
    spawner.start()
    spawner.channel.send({"op": "broken", "why": "the process that starts the workers failed"})
    ready = wait_readable([spawner.spawner], 0)

    (lost,) = spawner.spawner.drain()

    assert ready == {spawner.spawner.fileno()}
    assert isinstance(lost, SpawnerLost) and isinstance(lost.cause, StartError)
    assert lost.why == str(lost.cause) == "the process that starts the workers failed"


def test_a_stop_is_sent_with_signal_and_grace(spawner: Spawner) -> None:
    spawner.receive()

    sent = spawner.spawner.stop(15, 2.5), spawner.spawner.stop(15, 2.5, spare_failed=True)

    assert sent == (True, True)
    assert spawner.receive() == {"op": "stop", "signal": 15, "grace": 2.5, "spare": False}
    assert spawner.receive() == {"op": "stop", "signal": 15, "grace": 2.5, "spare": True}


def test_stop_without_a_spawner_returns_false(spawner: Spawner) -> None:
    spawner.channel.close()

    assert not spawner.spawner.stop(15, 2.5)


def test_close_releases_an_ended_spawner_without_waiting(spawner: Spawner) -> None:
    spawner.receive()
    spawner.start()
    spawner.receive()
    spawner.exited(0)
    theirs = Channel.adopt(os.dup(spawner.channel.fileno()))
    spawner.channel.close()
    theirs.close()

    spawner.spawner.close()
    spawner.spawner.close()

    assert spawner.spawner.fileno() == -1
    assert not spawner.spawner.stop(15, 0.0)


@pytest.fixture
def no_more_descriptors() -> Iterator[Callable[[], None]]:
    """When called, this process may open no further descriptor until the end of the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_closing_needs_no_descriptor(spawner: Spawner, no_more_descriptors: Callable[[], None]) -> None:
    spawner.start()
    spawner.exited(0)
    spawner.channel.close()
    no_more_descriptors()

    spawner.spawner.close()

    assert spawner.spawner.fileno() == -1


def test_rounds_leave_no_descriptor_open(spawner: Spawner) -> None:
    spawner.receive()
    before = open_descriptors()

    for number in range(3):
        spawner.start(number)
        spawner.receive()
        spawner.exited(0, number=number)
        spawner.exited(1, number=number - 1)
        spawner.spawner.drain()

    assert open_descriptors() == before


def test_a_spawner_that_has_not_begun_is_known_by_those_that_forked_it(
    spawner: Spawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at its fork it can say nothing; killed, it is lost by the name and reason that its launch gave."""
    passed_on: list[tuple[int, int]] = []
    monkeypatch.setattr(spawner.spawner._helpers, "fork_server", server := FakeForkServer(passed_on))
    spawner.send("forked", pid=77)
    spawner.channel.close()
    with pytest.raises(HelperLostError):
        spawner.spawner.spawner()
    (helper,) = spawner.spawner.helpers()

    helper.process.send(signal.SIGCONT)
    spawner.spawner.replace(helper, "it stood still")

    assert [(77, signal.SIGCONT), (77, signal.SIGKILL)] == passed_on
    assert "it stood still" == str(spawner.spawner._helpers.why_gone())
    assert server.waits, "until the spawner itself has said something"
