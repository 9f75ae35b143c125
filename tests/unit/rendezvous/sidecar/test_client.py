"""The launcher's handle of its sidecar; the other end of the channel is the test's own."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence

import pytest

from elasticlib.errors import (
    ConfigError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
    StartError,
)
from elasticlib.processes._programs import ChildProcess
from elasticlib.processes._wire import Channel, Message, wait_readable
from elasticlib.rendezvous import ContactLost, FailureNote, Final, RankAssignment, RoundEnd
from elasticlib.rendezvous._membership import MembershipEvent
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.protocol._messages import (
    Close,
    Failed,
    Leave,
    Notice,
    Stopped,
    StoreGone,
    Succeeded,
    from_plain,
    to_plain,
)
from elasticlib.rendezvous.sidecar import _sidecar_client
from elasticlib.rendezvous.sidecar._sidecar_client import SidecarClient

LIMIT = 30.0
HEARTBEAT = 1000.0
"""So long that no sign of life is sent in a test that does not want one."""
SEAT = RankAssignment(0, 0, 1, 0, 2, 0, 2, 0, 3, ("127.0.0.1",), 29500, "all nodes are there")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Process:
    """The sidecar as a test wants it: its end of the channel, and a pid that sleeps."""

    def __init__(self) -> None:
        self.pid = 0
        self.environment: dict[str, str] = {}
        self.channel = Channel(socket.socket(socket.AF_UNIX))

    def spawn(self, command: Sequence[str], environment: Mapping[str, str], descriptor: int) -> ChildProcess:
        self.channel.close()
        self.channel = Channel.adopt(os.dup(descriptor))
        self.environment = dict(environment)
        sleep = shutil.which("sleep") or "sleep"
        self.pid = os.posix_spawn(sleep, ["sleep", "60"], {})
        return ChildProcess(self.pid)

    def send(self, op: str, *descriptors: int, **facts: object) -> None:
        self.channel.send({"op": op, **facts}, descriptors)

    def notify(self, notice: Notice, *descriptors: int, generation: int = 0) -> None:
        self.send("notice", *descriptors, notice=to_plain(notice), generation=generation)

    def receive(self) -> Message:
        assert wait_readable([self.channel], LIMIT), "no message"
        received = self.channel.receive()
        assert received is not None
        return received[0]

    def end(self) -> None:
        if self.channel.fileno() >= 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.channel.close()


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    process = Process()
    monkeypatch.setattr(_sidecar_client, "spawn", process.spawn)
    yield process
    process.channel.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def job(heartbeat: float = HEARTBEAT, token: str | None = None, join_timeout: float = 50.0) -> NodeJob:
    return NodeJob(
        run_id="job",
        node="n1/1-a",
        backend="c10d",
        endpoint="n1:29400",
        heartbeat=heartbeat,
        token=token,
        join_timeout=join_timeout,
    )


@pytest.fixture
def member(process: Process, clock: Clock) -> Iterator[SidecarClient]:
    """A member whose process has begun and has its job."""
    member = SidecarClient(job(), clock=clock)
    assert process.receive()["op"] == "job"
    process.send("alive")
    assert taken(member) == []
    yield member
    process.end()
    member.close()


def taken(member: SidecarClient) -> list[MembershipEvent]:
    assert wait_readable([member], LIMIT), "nothing came"
    return member.drain()


def failing(member: SidecarClient) -> BaseException:
    with pytest.raises((RendezvousError, ConfigError)) as caught:
        taken(member)
    return caught.value


# What goes over.


def test_the_process_learns_its_job_first_and_no_secret_by_its_command(process: Process, clock: Clock) -> None:
    member = SidecarClient(job(token="h4sh-h4sh"), clock=clock)

    first = process.receive()

    assert NodeJob(**first["job"]) == job(token="h4sh-h4sh")
    assert "h4sh" not in "".join(process.environment.values())
    process.end()
    member.close()


def test_the_process_asks_no_name_server_for_the_names_of_peers(member: SidecarClient, process: Process) -> None:
    assert process.environment["RES_OPTIONS"] == "attempts:0"
    assert process.environment["PATH"] == os.environ["PATH"]


def test_reports_go_over_in_their_order(member: SidecarClient, process: Process) -> None:
    notes = (FailureNote(0, 0, 7, 1, "a bad value", traceback="Traceback\n  'é'"),)
    member.join(2, "trainer")
    member.guard(1)
    member.post(Failed(member.node, 0, notes))
    member.post(Stopped(member.node, 0, notes))
    member.post(Succeeded(member.node, 1))
    member.post(Leave(member.node, "signal 15", 1))
    member.post(Close(member.node, "done"))

    join, guard, *reports = [process.receive() for _ in range(7)]

    assert join == {"op": "join", "slots": 2, "role": "trainer", "generation": 1}
    assert guard == {"op": "guard"}
    assert [from_plain(each["report"]) for each in reports] == [
        Failed("n1/1-a", 0, notes),
        Stopped("n1/1-a", 0, notes),
        Succeeded("n1/1-a", 1),
        Leave("n1/1-a", "signal 15", 1),
        Close("n1/1-a", "done"),
    ]


def test_launcher_sends_signs_of_life_between_reports(process: Process) -> None:
    member = SidecarClient(job(heartbeat=0.05))

    ops = [process.receive()["op"] for _ in range(4)]

    assert ops == ["job", "alive", "alive", "alive"]
    process.end()
    member.close()


def test_no_report_waits_for_a_process_that_does_not_read(member: SidecarClient) -> None:
    long = tuple(FailureNote(rank, rank, 7, 1, traceback="x" * 20_000) for rank in range(64))

    for _ in range(10):
        member.post(Failed(member.node, 0, long))

    assert member.drain() == []


# What comes.


def test_notices_arrive_in_order(member: SidecarClient, process: Process) -> None:
    notices: list[Notice] = [SEAT, RoundEnd(0, "rank 1 failed", True), Final(True, "all succeeded")]
    for notice in notices:
        process.notify(notice)

    assert taken(member) == notices


def test_the_end_is_known_once_it_was_taken(member: SidecarClient, process: Process) -> None:
    before = member.final
    process.notify(Final(True, "all succeeded"))
    taken(member)

    assert (before, member.final) == (None, Final(True, "all succeeded"))


def test_waiting_count_is_the_last_one_that_the_process_sent(member: SidecarClient, process: Process) -> None:
    counts = [member.waiting()]
    for count in (2, 1):
        process.send("waiting", count=count)
        assert taken(member) == []
        counts.append(member.waiting())

    assert counts == [0, 2, 1]


def test_socket_of_the_workers_store_is_returned_once_with_ranks(member: SidecarClient, process: Process) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        process.notify(SEAT, bound.fileno())
        taken(member)
        found, again = member.listener(), member.listener()

        assert found is not None and again is None
        with found:
            assert found.getsockname() == bound.getsockname()


def test_unclaimed_socket_is_closed_when_the_next_one_arrives(member: SidecarClient, process: Process) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        process.notify(SEAT, first.fileno())
        taken(member)
        before = member._notices._listener
        process.notify(SEAT, second.fileno())
        taken(member)

        found = member.listener()
        assert before is not None and before.fileno() == -1
        assert found is not None and found.getsockname() == second.getsockname()
        found.close()


def test_an_answer_to_an_earlier_request_is_none_any_more(member: SidecarClient, process: Process) -> None:
    member.join(1, "trainer")
    member.join(1, "trainer")
    with socket.create_server(("127.0.0.1", 0)) as bound:
        process.notify(SEAT, bound.fileno(), generation=1)
    process.notify(SEAT, generation=2)

    assert [SEAT] == taken(member)
    assert member.listener() is None


def test_lost_contact_arrives_as_the_process_reports_it(member: SidecarClient, process: Process) -> None:
    process.send("lost", why="no answer for 6 s", grace=1.5)

    assert taken(member) == [ContactLost("no answer for 6 s", 1.5)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("RendezvousTimeoutError", RendezvousTimeoutError),
        ("RendezvousClosedError", RendezvousClosedError),
        ("ConfigError", ConfigError),
        ("", RendezvousError),
        ("ChildFailedError", RendezvousError),
        ("os", RendezvousError),
    ],
)
def test_an_error_over_there_is_raised_here_as_the_same_class(
    member: SidecarClient, process: Process, kind: str, expected: type[Exception]
) -> None:
    process.send("error", kind=kind, text="too few nodes came")

    error = failing(member)

    assert type(error) is expected
    assert str(error) == "too few nodes came"


def test_notices_before_an_error_are_returned_first(member: SidecarClient, process: Process) -> None:
    process.send("lost", why="nobody answers", grace=1.0)
    process.send("error", kind="RendezvousConnectionError", text="gone")

    first = taken(member)

    assert first == [ContactLost("nobody answers", 1.0)]
    assert member.poll_timeout() == 0.0
    with pytest.raises(RendezvousConnectionError, match="gone"):
        member.drain()


def test_log_records_of_the_process_are_logged_here(
    member: SidecarClient, process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    process.send("log", level=logging.WARNING, text="waiting for 2 of 4 nodes")

    with caplog.at_level(logging.INFO, logger="elasticlib"):
        assert taken(member) == []

    assert [(each.levelno, each.getMessage()) for each in caplog.records] == [
        (logging.WARNING, "waiting for 2 of 4 nodes")
    ]


# A process that dies or stands still.


def test_the_death_of_the_process_is_lost_contact_and_then_an_error(member: SidecarClient, process: Process) -> None:
    process.send("hosts")
    taken(member)
    process.end()

    lost, store_gone = taken(member)

    assert isinstance(lost, ContactLost) and isinstance(store_gone, StoreGone)
    assert lost.grace == pytest.approx(0.15 * HEARTBEAT)
    assert member.poll_timeout() == 0.0
    assert isinstance(failing(member), RendezvousConnectionError)


def test_a_process_that_dies_is_replaced_under_the_nodes_name(member: SidecarClient, process: Process) -> None:
    process.end()

    (lost,) = taken(member)
    member.join(2, "trainer")

    assert isinstance(lost, ContactLost)
    given = process.receive()["job"]
    assert ("n1/1-a", 1) == (given["node"], given["sidecars"])
    assert given["after"] in lost.why
    assert "join" == process.receive()["op"]


def test_a_process_that_dies_with_the_store_leaves_its_place_to_the_next(
    member: SidecarClient, process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    """The next one gets the coordinator's document and the listening socket, which stays open."""
    with socket.create_server(("127.0.0.1", 0)) as endpoint:
        place = endpoint.getsockname()
        process.send("hosts", endpoint.fileno())
    taken(member)
    process.end()
    (lost,) = taken(member)
    assert isinstance(lost, ContactLost)

    received = process.channel.receive()

    assert received is not None
    lease, document, listening = received[1]
    with socket.socket(fileno=listening) as endpoint, socket.create_connection(place):
        assert place == endpoint.getsockname()
    assert os.path.sameopenfile(document, member._succession.kept.descriptors()["document"])
    assert lost.why.partition(": ")[2] in caplog.text
    os.close(lease), os.close(document)
    process.end()
    member.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(place)


def test_a_dead_process_is_reaped(member: SidecarClient, process: Process) -> None:
    process.send("hosts")
    taken(member)
    process.end()
    taken(member)

    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_posting_to_a_dead_process_raises_nothing(member: SidecarClient, process: Process) -> None:
    process.send("hosts")
    taken(member)
    process.end()
    taken(member)

    member.post(Stopped(member.node, 0, ()))
    member.join(2, "trainer")

    assert isinstance(failing(member), RendezvousConnectionError)


def test_a_process_that_does_not_answer_is_lost_contact_once(member: SidecarClient, clock: Clock) -> None:
    clock.now += 0.45 * HEARTBEAT

    assert member.poll_timeout() == 0.0
    (lost,) = member.drain()
    assert isinstance(lost, ContactLost) and "does not answer" in lost.why
    assert (member.drain(), member.poll_timeout()) == ([], 60.0)


def test_a_process_that_stays_silent_is_given_up(member: SidecarClient, clock: Clock) -> None:
    clock.now += HEARTBEAT
    member.drain()
    clock.now += 59.9
    before = member.drain()

    clock.now += 0.1

    assert before == []
    with pytest.raises(RendezvousConnectionError, match="sidecar has not answered for 60 s more"):
        member.drain()


def test_a_process_that_answers_again_is_watched_again(member: SidecarClient, process: Process, clock: Clock) -> None:
    clock.now += HEARTBEAT
    member.drain()
    process.send("alive")

    assert taken(member) == []
    assert member.poll_timeout() == pytest.approx(0.45 * HEARTBEAT)
    clock.now += HEARTBEAT
    assert [type(event) for event in member.drain()] == [ContactLost]


def test_a_program_that_may_stand_still_gives_its_process_that_time_too(process: Process, clock: Clock) -> None:
    member = SidecarClient(job(), stall=1.0, clock=clock)
    message = process.receive()
    process.send("alive")
    taken(member)
    clock.now += 1.4 * HEARTBEAT
    before = member.drain()

    clock.now += 0.2 * HEARTBEAT

    assert (message["stillness"], before) == (1.0, [])
    assert [type(event) for event in member.drain()] == [ContactLost]
    process.end()
    member.close()


def test_answers_that_wait_count_before_silence(member: SidecarClient, process: Process, clock: Clock) -> None:
    process.send("alive")
    wait_readable([member], LIMIT)
    clock.now += 10 * HEARTBEAT

    assert member.drain() == []


def test_process_that_never_begins_is_awaited_for_the_join_timeout(process: Process, clock: Clock) -> None:
    member = SidecarClient(job(join_timeout=50.0), clock=clock)
    clock.now += 49.0
    before = member.drain()

    clock.now += 1.0

    assert before == []
    with pytest.raises(RendezvousTimeoutError, match="did not start within 50 s"):
        member.drain()
    process.end()
    member.close()


def test_wait_for_a_process_that_has_not_begun_is_logged(
    process: Process, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    member = SidecarClient(job(join_timeout=50.0), clock=clock)
    patience = [member.poll_timeout()]
    with caplog.at_level(logging.WARNING, "elasticlib"):
        for _ in range(12):
            clock.now += 4.0
            assert member.drain() == []
    patience.append(member.poll_timeout())
    process.send("alive")
    taken(member)
    clock.now += 40.0
    with caplog.at_level(logging.WARNING, "elasticlib"):
        member.drain()

    logged = [record.getMessage() for record in caplog.records]
    assert [line.partition(": ")[0] for line in logged] == [
        f"node n1/1-a has waited {seconds} s for job 'job'" for seconds in (8, 16, 32)
    ]
    assert all("`import torch` takes so long" in line for line in logged)
    assert logged[0].endswith("; 42 s left")
    assert patience == [5.0, 2.0]
    process.end()
    member.close()


def test_without_a_heartbeat_silence_means_nothing(process: Process, clock: Clock) -> None:
    member = SidecarClient(job(heartbeat=0.0), clock=clock)
    process.send("alive")
    taken(member)

    clock.now += 1e6

    assert (member.drain(), member.poll_timeout()) == ([], None)
    process.end()
    member.close()


def test_a_process_that_cannot_be_replaced_ends_the_nodes_part(
    member: SidecarClient, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> ChildProcess:
        raise StartError("no more processes")

    monkeypatch.setattr(_sidecar_client, "spawn", refuse)
    process.end()

    (lost,) = taken(member)

    assert isinstance(lost, ContactLost)
    with pytest.raises(StartError, match="no more processes"):
        member.drain()


# The end.


def test_closing_parts_from_the_process_and_waits_for_its_end(member: SidecarClient, process: Process) -> None:
    os.kill(process.pid, signal.SIGTERM)
    member.close()

    assert process.receive() == {"op": "close", "stays": False}
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_process_that_does_not_part_is_killed(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sidecar_client, "_ENDING", 0.0)
    member = SidecarClient(NodeJob(run_id="job", node="n", backend="c10d", endpoint="n", close_timeout=0.0))

    member.close()

    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_closed_client_returns_no_notices_and_refuses_reports(member: SidecarClient, process: Process) -> None:
    process.end()
    member.close()
    member.close()

    assert (member.drain(), member.fileno()) == ([], -1)
    with pytest.raises(RendezvousClosedError, match="has closed its rendezvous and cannot send 'join'"):
        member.join(2, "trainer")


def test_a_socket_that_nobody_fetched_is_closed_at_the_end(member: SidecarClient, process: Process) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        process.notify(SEAT, bound.fileno())
        taken(member)
    listener = member._notices._listener
    process.end()
    member.close()

    assert listener is not None and listener.fileno() == -1


def test_a_forked_child_ends_nothing_of_its_parents(member: SidecarClient, process: Process) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            member.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)

    process.send("alive")

    assert taken(member) == []
    os.kill(process.pid, 0)
