"""The launcher's side of a foreman, who is played here by the other end of the channel."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator

import pytest

from elasticlib._wire import Channel, Message, wait_readable
from elasticlib.errors import StartError
from elasticlib.workers import _launch
from elasticlib.workers._launch import Crew, Exit, Lost, Stopped, StoreGone
from elasticlib.workers.child import _report


class Foreman:
    """What a foreman would say and hear."""

    def __init__(self) -> None:
        ours, self.channel = Channel.pair()
        self.crew = Crew({"common": {}}, {"function": b"pickled"})
        self.crew._hire(ours)

    def hear(self) -> Message:
        received = self.channel.receive()
        assert received is not None
        for descriptor in received[1]:
            os.close(descriptor)
        return received[0]

    def say(self, op: str, number: int = 0, **facts: object) -> None:
        self.channel.send({"op": op, "round": number, **facts})

    def exited(self, rank: int, exitcode: int = 0, number: int = 0, report: _report.Report | None = None) -> None:
        memories = os.memfd_create("report"), os.memfd_create("faults"), os.memfd_create("tail")
        if report is not None:
            _report.write(memories[0], report)
        os.write(memories[1], b"Fatal Python error" if exitcode == -11 else b"")
        os.write(memories[2], b"last words\n")
        message = {"op": "exited", "round": number, "local_rank": rank, "pid": 70 + rank}
        self.channel.send({**message, "exitcode": exitcode, "told": False, "overdue": None}, memories)
        for descriptor in memories:
            os.close(descriptor)

    def start(self, number: int = 0) -> dict[int, int]:
        self.say("started", number, pids={"0": 70, "1": 71})
        return self.crew.start(number, [], None)


@pytest.fixture
def foreman() -> Iterator[Foreman]:
    foreman = Foreman()
    yield foreman
    foreman.channel.close()
    foreman.crew.close()


class Hanging:
    """A template that takes no orders."""

    def ready(self) -> bool:
        return True

    def request(self, op: str) -> Channel:
        raise StartError("takes no orders")


def test_a_crew_that_cannot_be_employed_gives_its_template_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody would ever end that."""
    returned: list[tuple[object, bool]] = []
    monkeypatch.setattr(_launch.templates, "give_back", lambda template, unused: returned.append((template, unused)))
    template = Hanging()

    with pytest.raises(StartError, match="takes no orders"):
        Crew({"common": {}}, {}).employ(template)  # type: ignore[arg-type]

    assert [(template, True)] == returned


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_foreman_hears_first_what_all_rounds_have_in_common(foreman: Foreman) -> None:
    received = foreman.channel.receive()

    assert received is not None
    message, (memory,) = received
    try:
        assert message == {"op": "job", "common": {}, "memories": ["function"]}
        assert os.pread(memory, 100, 0) == b"pickled"
    finally:
        os.close(memory)


def test_a_start_sends_the_orders_and_returns_the_pids_by_rank(foreman: Foreman) -> None:
    foreman.hear()

    pids = foreman.start()

    assert pids == {0: 70, 1: 71}
    assert foreman.hear() == {"op": "start", "round": 0, "workers": [], "more": []}
    assert foreman.crew.started()


def test_the_foreman_says_which_process_it_is(foreman: Foreman) -> None:
    handle = os.pidfd_open(os.getpid())
    foreman.channel.send({"op": "hired", "foreman": os.getpid()}, (handle,))
    os.close(handle)

    first, second = foreman.crew.foreman(), foreman.crew.foreman()

    assert first is not None and first is second
    assert first.pid == os.getpid() and not first.ends(0.0)
    first.close()


def test_a_wait_for_the_foreman_can_be_interrupted(foreman: Foreman) -> None:
    interrupt = os.eventfd(1, os.EFD_CLOEXEC)
    try:
        assert foreman.crew.foreman(interrupt) is None
    finally:
        os.close(interrupt)


def test_a_foreman_that_cannot_come_says_why(foreman: Foreman) -> None:
    foreman.say("broken", why="no process can be started")

    with pytest.raises(StartError, match="no process can be started"):
        foreman.crew.foreman()


def test_a_start_that_is_interrupted_returns_nobody(foreman: Foreman) -> None:
    interrupt = os.eventfd(1, os.EFD_CLOEXEC)
    try:
        pids = foreman.crew.start(0, [], None, interrupt)
    finally:
        os.close(interrupt)

    assert pids == {}
    assert not foreman.crew.started()


def test_a_start_without_a_foreman_is_an_error(foreman: Foreman) -> None:
    foreman.channel.close()

    with pytest.raises(StartError, match="ended from outside"):
        foreman.crew.start(0, [], None)


def test_an_end_comes_with_what_the_worker_left(foreman: Foreman) -> None:
    foreman.start()
    report = _report.Report("result", b"payload")
    foreman.exited(1, -11, report=report)

    events = foreman.crew.take()

    assert events == [Exit(1, 71, -11, False, report, "Fatal Python error", "last words\n")]


def test_ends_are_taken_all_at_once_and_only_once(foreman: Foreman) -> None:
    foreman.start()
    foreman.exited(1)
    foreman.exited(0)
    foreman.say("stopped", survivors=[])

    first, second = foreman.crew.take(), foreman.crew.take()

    assert [type(event) for event in first] == [Exit, Exit, Stopped]
    assert second == []


def test_what_is_said_of_an_earlier_round_is_not_heard(foreman: Foreman) -> None:
    foreman.start(0)
    foreman.exited(1, -9, number=0)
    foreman.say("stopped", 0, survivors=[])
    foreman.start(1)
    foreman.say("stopped", 0, survivors=[])

    assert foreman.crew.take() == []


def test_an_end_is_told_though_no_descriptor_was_free_for_what_was_left(foreman: Foreman) -> None:
    foreman.start()
    said = {"op": "exited", "round": 0, "local_rank": 1, "pid": 71, "exitcode": 3, "told": False, "overdue": None}
    body = json.dumps(said).encode()
    foreman.channel._sock.sendall(struct.pack("!II", len(body), 3) + body)

    assert foreman.crew.take() == [Exit(1, 71, 3, False, None, "", unread=True)]


def test_the_end_of_the_store_is_told_with_its_process(foreman: Foreman) -> None:
    foreman.start()
    foreman.say("store", why="it was ended by SIGKILL", pid=77, exitcode=-9)

    assert foreman.crew.take() == [StoreGone("it was ended by SIGKILL", 77, -9)]


def hold(foreman: Foreman) -> int:
    """A process in the foreman's place, which the crew holds; its pid."""
    sleep = shutil.which("sleep") or "sleep"
    pid = os.posix_spawn(sleep, ["sleep", "60"], {})
    handle = os.pidfd_open(pid)
    foreman.channel.send({"op": "hired", "foreman": pid}, (handle,))
    os.close(handle)
    foreman.crew.foreman()
    return pid


def test_a_foreman_that_does_not_go_is_killed(foreman: Foreman) -> None:
    """Its channel has ended, and it has not."""
    pid = hold(foreman)
    foreman.start()
    foreman.channel.close()

    foreman.crew.close()

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_stopped_foreman_is_woken_to_stop_its_workers(foreman: Foreman) -> None:
    pid = hold(foreman)
    foreman.start()
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)

    foreman.crew.stop(15, 2.5)

    assert os.WIFCONTINUED(os.waitpid(pid, os.WCONTINUED)[1])
    foreman.crew.kill()
    os.waitpid(pid, 0)
    foreman.channel.close()


def test_survivors_are_named(foreman: Foreman) -> None:
    foreman.start()
    foreman.say("stopped", survivors=[71])

    assert foreman.crew.take() == [Stopped([71])]


def test_a_foreman_that_is_gone_has_lost_its_workers(foreman: Foreman) -> None:
    foreman.start()
    foreman.exited(0)
    foreman.channel.close()

    exited, lost = foreman.crew.take()

    assert isinstance(exited, Exit) and isinstance(lost, Lost)
    assert lost.why == "the process that starts the workers was ended from outside"
    assert foreman.crew.fileno() == -1


def test_a_start_that_broke_in_the_middle_is_an_error_at_once(foreman: Foreman) -> None:
    foreman.channel.send({"op": "broken", "why": "a worker could not be started: no memory"})

    with pytest.raises(StartError, match=r"^a worker could not be started: no memory$"):
        foreman.crew.start(0, [], None)
    assert not foreman.crew.started()


def test_a_foreman_that_broke_in_a_round_is_a_loss_with_its_reason(foreman: Foreman) -> None:
    foreman.start()
    foreman.channel.send({"op": "broken", "why": "the process that starts the workers failed"})
    ready = wait_readable([foreman.crew], 0)

    (lost,) = foreman.crew.take()

    assert ready == {foreman.crew.fileno()}
    assert isinstance(lost, Lost) and isinstance(lost.cause, StartError)
    assert lost.why == str(lost.cause) == "the process that starts the workers failed"


def test_a_stop_is_sent_with_signal_and_grace(foreman: Foreman) -> None:
    foreman.hear()

    sent = foreman.crew.stop(15, 2.5), foreman.crew.stop(15, 2.5, spare_failed=True)

    assert sent == (True, True)
    assert foreman.hear() == {"op": "stop", "signal": 15, "grace": 2.5, "spare": False}
    assert foreman.hear() == {"op": "stop", "signal": 15, "grace": 2.5, "spare": True}


def test_a_stop_without_a_foreman_says_so(foreman: Foreman) -> None:
    foreman.channel.close()

    assert not foreman.crew.stop(15, 2.5)


def test_closing_lets_the_foreman_go_and_waits_for_nobody_who_is_gone(foreman: Foreman) -> None:
    foreman.hear()
    foreman.start()
    foreman.hear()
    foreman.exited(0)
    theirs = Channel.adopt(os.dup(foreman.channel.fileno()))
    foreman.channel.close()
    theirs.close()

    foreman.crew.close()
    foreman.crew.close()

    assert foreman.crew.fileno() == -1
    assert not foreman.crew.stop(15, 0.0)


@pytest.fixture
def no_more_descriptors() -> Iterator[Callable[[], None]]:
    """When called, this process may open no further descriptor until the end of the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_closing_needs_no_descriptor(foreman: Foreman, no_more_descriptors: Callable[[], None]) -> None:
    foreman.start()
    foreman.exited(0)
    foreman.channel.close()
    no_more_descriptors()

    foreman.crew.close()

    assert foreman.crew.fileno() == -1


def test_rounds_leave_no_descriptor_open(foreman: Foreman) -> None:
    foreman.hear()
    before = open_descriptors()

    for number in range(3):
        foreman.start(number)
        foreman.hear()
        foreman.exited(0, number=number)
        foreman.exited(1, number=number - 1)
        foreman.crew.take()

    assert open_descriptors() == before
