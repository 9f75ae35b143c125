"""Messages that the sidecar carries between launcher and member, and its actions without both."""

from __future__ import annotations

import logging
import math
import os
import select
import shutil
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from attrs import evolve

from elasticlib.errors import RendezvousTimeoutError
from elasticlib.processes._lease import Lease
from elasticlib.processes._wire import Channel, Message, wait_readable
from elasticlib.rendezvous import ContactLost, FailureNote, Final, RankAssignment, RoundEnd
from elasticlib.rendezvous._membership import MembershipEvent
from elasticlib.rendezvous.protocol._messages import (
    Close,
    Failed,
    Leave,
    Report,
    Stopped,
    StoreGone,
    Succeeded,
    WorkerReport,
    from_plain,
    to_plain,
)
from elasticlib.rendezvous.sidecar._bridge import Bridge, LogLines, error_message
from elasticlib.rendezvous.sidecar._launcher_watch import SILENCE

LIMIT = 30.0
HEARTBEAT = 10.0
SEAT = RankAssignment(0, 0, 1, 0, 2, 0, 2, 0, 3, ("127.0.0.1",), 29500, "all nodes are there")
PEERS = RankAssignment(0, 1, 2, 2, 4, 2, 4, 0, 3, ("127.0.0.1",), 29500, "all nodes are there")
NOTE = FailureNote(0, 0, 7, 1, "a bad value")


class Member:
    """Records its requests, and returns the events that the test puts in."""

    def __init__(self) -> None:
        self.node = "n1/1-a"
        self.requests: list[Any] = []
        self.events: deque[MembershipEvent | Exception] = deque()
        self.ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.bound: socket.socket | None = None
        self.kill_after: float | None = None
        self.final: Final | None = None
        self.others = 0

    def join(self, slots: int, role: str) -> None:
        self.requests.append(("join", slots, role))

    def post(self, report: WorkerReport | Close) -> None:
        self.requests.append(report)

    def waiting(self) -> int:
        return self.others

    def hold(self, paused: bool) -> None:
        self.requests.append(("hold", paused))

    def guard(self, handle: int) -> None:
        raise AssertionError("the process itself guards")

    def listener(self) -> socket.socket | None:
        found, self.bound = self.bound, None
        return found

    def fileno(self) -> int:
        return self.ready

    def poll_timeout(self) -> float | None:
        return None

    def kill_in(self) -> float | None:
        return self.kill_after

    def drain(self) -> list[MembershipEvent]:
        drained: list[MembershipEvent] = []
        while self.events:
            event = self.events.popleft()
            if isinstance(event, Exception):
                raise event
            drained.append(event)
        return drained

    def close(self) -> None:
        raise AssertionError("the share closes it")


class Share:
    hosts_store = False

    def __init__(self) -> None:
        self.member = Member()

    def start(self) -> None:
        raise AssertionError("it is started")

    def witness(self, why: str, workers_gone: bool) -> None:
        raise AssertionError("nobody died")

    def close(self, linger: float) -> None:
        raise AssertionError("the pump closes nothing")


class WatchedChannel:
    """A channel on which it is seen that a notice is sent."""

    def __init__(self, channel: Channel, see: Callable[[], object]) -> None:
        self._channel, self._see = channel, see

    def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> bool:
        if message["op"] == "notice":
            self._see()
        return self._channel.send(message, descriptors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


class Desk:
    """A pump that works one step at a time, between the test's end of a channel and a member of the test's."""

    def __init__(self, heartbeat: float) -> None:
        self.now = 100.0
        # Started first: a program that is being executed holds its parent's descriptors for a moment.
        self.sleepers: list[int] = []
        self.spawner, launcher = self.start_sleeper(), self.start_sleeper()
        self.launcher, process = Channel.pair()
        self.share = Share()
        self.member = self.share.member
        self.lines = LogLines()
        handle = os.pidfd_open(launcher)
        self.lease = Lease()
        self.bridge = Bridge(process, self.share, heartbeat, self.lines, handle, self.lease, lambda: self.now)
        self.bridge.begin()

    def start_sleeper(self) -> int:
        self.sleepers.append(os.posix_spawn(shutil.which("sleep") or "sleep", ["sleep", "60"], {}))
        return self.sleepers[-1]

    def step(self, *, expected: bool | None = None) -> None:
        assert self.bridge.step(0.0) is expected

    def receive(self, op: str, **facts: object) -> None:
        """The launcher sends a message, and the pump handles it."""
        self.launcher.send({"op": op, **facts})
        self.step()

    def guard(self, pid: int) -> None:
        """The launcher gives what its workers will die with."""
        handle = os.pidfd_open(pid)
        self.launcher.send({"op": "guard"}, (handle,))
        os.close(handle)
        self.step()

    def report(self, report: Report) -> None:
        self.receive("report", report=to_plain(report))

    def notify(self, *events: MembershipEvent | Exception) -> None:
        """The member has *events*, and the pump sends them on."""
        self.member.events.extend(events)
        self.step()

    def sent(self) -> list[Message]:
        """Return the launcher's messages, without signs of life; close the received sockets."""
        found = []
        while wait_readable([self.launcher], 0):
            received = self.launcher.receive()
            assert received is not None
            for descriptor in received[1]:
                os.close(descriptor)
            if received[0]["op"] != "alive":
                found.append(received[0] | ({"sockets": len(received[1])} if received[1] else {}))
        return found

    def runs(self, pid: int) -> bool:
        """Return whether *pid* lives a moment later, when a sent signal has had its effect."""
        handle = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        try:
            return not poll.poll(200)
        finally:
            os.close(handle)

    def close(self) -> None:
        for pid in self.sleepers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if self.bridge.guarded is not None:
            self.bridge.guarded.close()
        for number in (self.bridge.launcher, self.member.ready, self.lines.fileno()):
            os.close(number)
        self.launcher.close()
        self.lease.close()
        self.bridge.channel.close()


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk(HEARTBEAT)
    yield desk
    desk.close()


# Messages.


def test_first_message_is_a_sign_of_life(desk: Desk) -> None:
    received = desk.launcher.receive()

    assert received is not None and received[0] == {"op": "alive"}


def test_reports_reach_the_member(desk: Desk) -> None:
    desk.receive("join", slots=2, role="trainer", generation=1)
    reports = [
        Failed("n1/1-a", 0, (NOTE,)),
        Stopped("n1/1-a", 0, (NOTE,)),
        Succeeded("n1/1-a", 1),
        Leave("n1/1-a", "signal 15", 1),
        Close("n1/1-a", "done"),
    ]
    for report in reports:
        desk.report(report)

    assert desk.member.requests == [
        ("join", 2, "trainer"),
        *reports,
    ]


def test_notices_reach_the_launcher_in_order(desk: Desk) -> None:
    end = RoundEnd(0, "rank 1 failed", True)
    desk.notify(PEERS, end, ContactLost("nobody answers", 1.5), StoreGone("refused"))

    assignment, ended, lost, store_gone = desk.sent()

    assert [from_plain(each["notice"]) for each in (assignment, ended)] == [PEERS, end]
    assert lost == {"op": "lost", "why": "nobody answers", "grace": 1.5}
    assert store_gone == {"op": "gone", "why": "refused"}


@pytest.mark.parametrize(("assignment", "sockets"), [(SEAT, 1), (PEERS, None)])
def test_group_rank_0_gets_the_socket_of_the_workers_store(
    desk: Desk, assignment: RankAssignment, sockets: int | None
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        desk.member.bound = bound
        desk.notify(assignment)

        (frame,) = desk.sent()

    assert frame.get("sockets") == sockets
    assert (desk.member.bound is None) is (sockets == 1)


def test_ranks_without_a_socket_are_passed_on_alone(desk: Desk) -> None:
    desk.notify(SEAT)

    assert [frame["op"] for frame in desk.sent()] == ["notice"]


def test_error_that_breaks_the_member_is_sent_once(desk: Desk) -> None:
    desk.notify(RendezvousTimeoutError("the job was not found"))
    desk.member.events.append(RendezvousTimeoutError("again"))
    desk.step()

    assert desk.sent() == [{"op": "error", "kind": "RendezvousTimeoutError", "text": "the job was not found"}]


def test_unexpected_error_is_reported_with_its_class() -> None:
    frame = error_message(ZeroDivisionError("division by zero"))

    assert frame["text"] == "the sidecar failed: ZeroDivisionError: division by zero"


@pytest.mark.parametrize("facts", [{}, {"stays": 60.0}], ids=["", "of a process that stays"])
def test_log_lines_reach_the_launcher(desk: Desk, facts: dict[str, float]) -> None:
    record = logging.LogRecord("elasticlib", logging.WARNING, "", 0, "waiting for %d nodes", (2,), None)
    vars(record).update(facts)
    desk.lines.handle(record)

    desk.step()

    assert desk.sent() == [{"op": "log", "level": logging.WARNING, "text": "waiting for 2 nodes", **facts}]


def test_number_of_waiting_nodes_is_sent_only_when_it_changes(desk: Desk) -> None:
    for desk.member.others in (0, 2, 2, 0):
        desk.step()

    assert desk.sent() == [{"op": "waiting", "count": 2}, {"op": "waiting", "count": 0}]


def test_how_many_wait_is_kept_for_a_launcher_that_stands_still(desk: Desk) -> None:
    desk.now += HEARTBEAT
    desk.member.others = 2
    desk.step()
    desk.step()
    unsent = desk.sent()

    desk.receive("alive")

    assert (unsent, desk.sent()) == ([], [{"op": "waiting", "count": 2}])


def test_signs_of_life_are_answered_now_and_then(desk: Desk) -> None:
    desk.launcher.receive()
    for _ in range(10):
        desk.now += 0.05 * HEARTBEAT
        desk.receive("alive")

    answers = 0
    while wait_readable([desk.launcher], 0):
        desk.launcher.receive()
        answers += 1
    assert 2 <= answers <= 4


# The end of the launcher.


def test_a_goodbye_ends_the_work(desk: Desk) -> None:
    desk.launcher.send({"op": "close", "stays": False})

    desk.step(expected=True)


def test_a_closed_channel_is_the_launchers_death(desk: Desk) -> None:
    desk.launcher.close()

    desk.step(expected=False)


def test_a_launcher_is_dead_though_a_child_holds_its_channel(desk: Desk) -> None:
    os.kill(desk.sleepers[1], signal.SIGKILL)
    wait_readable([desk.bridge.launcher], LIMIT)

    desk.step(expected=False)


def test_last_report_of_a_dead_launcher_is_processed(desk: Desk) -> None:
    desk.launcher.send({"op": "report", "report": to_plain(Stopped("n1/1-a", 0, ()))})
    desk.launcher.close()

    desk.step(expected=False)

    assert desk.member.requests == [Stopped("n1/1-a", 0, ())]


# A launcher that stands still.


def test_a_silent_launchers_node_stops_beating_until_it_speaks(desk: Desk) -> None:
    desk.now += SILENCE * HEARTBEAT
    desk.step()
    desk.step()
    silent = list(desk.member.requests)

    desk.receive("alive")

    assert silent == [("hold", True)]
    assert desk.member.requests == [("hold", True), ("hold", False)]


def test_waiting_message_of_the_launcher_counts_before_its_silence(desk: Desk) -> None:
    desk.now += 10 * HEARTBEAT

    desk.receive("alive")

    assert desk.member.requests == []


def test_a_launcher_that_may_stand_still_keeps_its_heartbeats_for_so_long(desk: Desk) -> None:
    desk.bridge.watch = evolve(desk.bridge.watch, stall=1.0)
    desk.now += 0.9 * HEARTBEAT
    desk.step()
    before = list(desk.member.requests)

    patience = desk.bridge.poll_timeout()
    desk.now += 0.1 * HEARTBEAT
    desk.step()

    assert (before, desk.member.requests) == ([], [("hold", True)])
    assert patience == pytest.approx(0.1 * HEARTBEAT)


def test_without_a_heartbeat_no_launcher_is_silent() -> None:
    desk = Desk(0.0)
    desk.now += 1e6

    desk.step()

    assert desk.member.requests == []
    desk.close()


def test_log_lines_for_a_launcher_that_stands_still_are_dropped(desk: Desk) -> None:
    desk.now += HEARTBEAT
    desk.step()
    desk.lines.handle(logging.LogRecord("elasticlib", logging.INFO, "", 0, "still waiting", (), None))

    desk.step()

    assert desk.sent() == []


# Workers that outlive the contact.


def run_workers(desk: Desk) -> None:
    desk.receive("join", slots=2, role="trainer", generation=1)
    desk.notify(PEERS)
    desk.guard(desk.spawner)
    desk.sent()


def test_workers_that_outlive_their_time_are_killed(desk: Desk) -> None:
    run_workers(desk)
    desk.member.kill_after = 0.0

    desk.step()

    assert not desk.runs(desk.spawner)


def test_launcher_gets_lost_contact_notice_before_workers_are_killed(desk: Desk) -> None:
    run_workers(desk)
    desk.member.kill_after = -1.0
    desk.notify(ContactLost("nobody answers", 1.5))

    assert [frame["op"] for frame in desk.sent()] == ["lost"]
    assert not desk.runs(desk.spawner)


def test_workers_that_have_time_left_live(desk: Desk) -> None:
    run_workers(desk)
    desk.member.kill_after = 0.1

    desk.step()

    assert desk.bridge.poll_timeout() == pytest.approx(0.1)
    assert desk.runs(desk.spawner)


def test_the_lease_of_the_workers_ends_when_they_must_be_dead(desk: Desk) -> None:
    run_workers(desk)
    without = desk.lease.ends_at()
    desk.member.kill_after = 5.0

    desk.step()
    known = desk.lease.ends_at()
    desk.now += 2.0
    desk.step()

    assert (math.inf, 105.0, 107.0) == (without, known, desk.lease.ends_at())


def test_lease_is_set_before_ranks_are_sent(desk: Desk) -> None:
    """The spawner reads the lease at once; the sidecar may be stopped before its next step."""
    desk.receive("join", slots=2, role="trainer", generation=1)
    desk.member.kill_after = 5.0
    desk.member.events.append(PEERS)
    seen: list[float] = []
    desk.bridge.channel = WatchedChannel(desk.bridge.channel, lambda: seen.append(desk.lease.ends_at()))  # type: ignore[assignment]

    desk.step()

    assert [105.0] == seen


def test_ended_lease_is_not_renewed_for_workers_that_must_be_dead(desk: Desk) -> None:
    run_workers(desk)
    desk.member.kill_after = -1.0
    desk.step()
    desk.member.kill_after = 5.0
    desk.step()
    over = desk.lease.ends_at()

    desk.receive("join", slots=2, role="trainer", generation=1)

    assert (99.0, math.inf) == (over, desk.lease.ends_at())


@pytest.mark.parametrize("report", [Stopped("n1/1-a", 0, ()), Succeeded("n1/1-a", 0), None])
def test_a_node_without_workers_loses_nobody(desk: Desk, report: Report | None) -> None:
    run_workers(desk)
    if report is None:
        desk.receive("join", slots=2, role="trainer", generation=1)
    else:
        desk.report(report)
    desk.member.kill_after = -1.0

    desk.step()

    assert desk.runs(desk.spawner)


@pytest.mark.parametrize("report", [Failed("n1/1-a", 0, (NOTE,)), Leave("n1/1-a", "signal 15", 0)])
def test_while_others_may_still_run_the_spawner_is_killed(desk: Desk, report: Report) -> None:
    run_workers(desk)
    desk.report(report)
    desk.member.kill_after = -1.0

    desk.step()

    assert not desk.runs(desk.spawner)


@pytest.mark.parametrize("then", [-1.0, 5.0], ids=["while it is lost", "after contact came back"])
def test_a_spawner_that_is_named_too_late_is_killed_at_once(desk: Desk, then: float) -> None:
    """Others have had the time to take the ranks of a launcher that stood still before it named its spawner."""
    desk.notify(PEERS)
    desk.member.kill_after = -1.0
    desk.step()
    desk.member.kill_after = then

    desk.guard(desk.spawner)

    assert not desk.runs(desk.spawner)


def test_a_spawner_that_took_the_place_of_a_killed_one_is_killed_too(desk: Desk) -> None:
    run_workers(desk)
    desk.member.kill_after = -1.0
    desk.step()
    second = desk.start_sleeper()

    desk.guard(second)

    assert not desk.runs(second)


def test_a_new_seat_has_its_own_time(desk: Desk) -> None:
    run_workers(desk)
    desk.member.kill_after = -1.0
    desk.step()
    desk.member.kill_after = 5.0
    desk.receive("join", slots=2, role="trainer", generation=1)
    desk.notify(PEERS)
    second = desk.start_sleeper()

    desk.guard(second)

    assert desk.runs(second)


def test_node_that_lost_contact_leaves_next_request_to_its_agent(desk: Desk) -> None:
    run_workers(desk)

    desk.notify(ContactLost("nobody answers", 1.5))

    assert desk.member.requests == [("join", 2, "trainer")]


def test_already_ended_spawner_is_not_an_error(desk: Desk) -> None:
    run_workers(desk)
    os.kill(desk.spawner, signal.SIGKILL)
    assert desk.bridge.guarded is not None
    wait_readable([desk.bridge.guarded], LIMIT)
    desk.member.kill_after = -1.0

    desk.step()

    assert desk.bridge.outlast(0.0)


def test_workers_count_as_dead_only_when_their_spawner_has_ended(desk: Desk) -> None:
    bridge = desk.bridge
    before = bridge.outlast(0.0)
    desk.notify(PEERS)
    assigned = bridge.outlast(0.0)
    desk.guard(desk.spawner)
    running = bridge.outlast(0.0)
    bridge.kill()

    assert (before, assigned, running, bridge.outlast(LIMIT)) == (True, False, False, True)
