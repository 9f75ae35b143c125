"""Strangers who write and delete what says who coordinates a job in a store of torch, and which jobs live in it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from elasticlib.errors import RendezvousClosedError, RendezvousConnectionError
from elasticlib.processes._wire import wait_readable
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.net._resolver import QUIET_LOOKUPS
from elasticlib.rendezvous.node._coordinator_host import CoordinatorHost
from elasticlib.rendezvous.node._runtime import NodeRuntime
from elasticlib.rendezvous.protocol._codec import key_of
from elasticlib.rendezvous.protocol._exchange import ANNOUNCEMENT, COORDINATOR_HEARTBEAT, key_place
from elasticlib.rendezvous.protocol._messages import Announcement, CoordinatorHeartbeat, Terms, encode
from elasticlib.rendezvous.protocol._reading import greeting_of
from elasticlib.rendezvous.stores._c10d import C10dBackend
from elasticlib.rendezvous.stores._election import LeadershipLost
from elasticlib.rendezvous.stores._shared_store import Claim, LeaderExchange, OtherJobs
from elasticlib.rendezvous.stores._torch_store import StoreExchange
from tests.process.launches import free_port
from tests.process.stores.exchanges import answering
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.3)]
LONG = 30.0
HEARTBEAT = 2.0
JOINED_HEARTBEAT = 10.0
REGISTER = "elasticlib//guests"
TOKENS = [None, "secret"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RES_OPTIONS", QUIET_LOOKUPS)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")


Open = Callable[..., NodeRuntime]


@pytest.fixture
def node() -> Iterator[Open]:
    """Starts nodes that ask for ranks, on one endpoint; the first one hosts the store."""
    endpoint = f"127.0.0.1:{free_port()}"
    opened: list[NodeRuntime] = []

    def start(name: str, run_id: str = "job", **facts: Any) -> NodeRuntime:
        facts = {"max_nodes": 2, "last_call": 0.0, "heartbeat": HEARTBEAT} | facts
        opened.append(NodeRuntime(NodeJob(run_id=run_id, node=f"{name}/1", backend="c10d", endpoint=endpoint, **facts)))
        opened[-1].prepare()
        opened[-1].start()
        opened[-1].member.join(1, "w")
        return opened[-1]

    yield start
    for each in reversed(opened):
        each.close(0.0)


def nonce(runtime: NodeRuntime) -> str:
    """By which the node knows its coordinator."""
    wait_until(lambda: runtime.member.seen().nonce, LONG)
    return runtime.member.seen().nonce


def error_of(runtime: NodeRuntime) -> str:
    """Return the text of the error that ends the node's membership."""
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:
        wait_readable([runtime.member], 0.05)
        try:
            runtime.member.drain()
        except RendezvousClosedError as error:
            return str(error)
    raise AssertionError("nothing ended it")


def store_of(runtime: NodeRuntime) -> Any:
    """torch's own store, as any process that reaches the port may open it."""
    return runtime._backend.server


def scribble(store: Any, key: str, value: bytes | None) -> None:
    """Write or delete the key, and come back when that is done."""
    if value is None:
        store.delete_key(key)
    else:
        store.set(key, value)
    store.check([key])


LIES = pytest.mark.parametrize("lie", [b"another", None], ids=["write", "delete"])


@pytest.mark.parametrize("token", TOKENS)
@LIES
def test_scribble_on_the_served_jobs_name_makes_no_second_coordinator(
    node: Open, monkeypatch: pytest.MonkeyPatch, token: str | None, lie: bytes | None
) -> None:
    first = node("first", token=token)
    known = nonce(first)

    talk = C10dBackend._talk

    def after_the_stranger(self: C10dBackend, *args: Any) -> StoreExchange:
        scribble(store_of(first), "elasticlib/serves", lie)
        return talk(self, *args)

    monkeypatch.setattr(C10dBackend, "_talk", after_the_stranger)
    monkeypatch.setattr("elasticlib.rendezvous.stores._c10d.ANNOUNCED", 0.2)
    second = node("second", token=token)

    assert known == nonce(second)
    assert not second.hosts_store


@pytest.mark.parametrize("token", TOKENS)
def test_nodes_of_a_joined_job_that_start_at_once_have_one_coordinator(node: Open, token: str | None) -> None:
    nonce(node("host", run_id="another"))

    nodes = [node(name, token=token, max_nodes=4) for name in "abcd"]

    assert 1 == len({nonce(each) for each in nodes})
    assert 1 == sum(each.hosts_store for each in nodes)


@LIES
def test_store_host_writes_the_served_job_and_the_coordinator_again(node: Open, lie: bytes | None) -> None:
    first = node("first", token="secret")
    nonce(first)
    keys = ["elasticlib/serves", "elasticlib/job/claimant"]
    before = [store_of(first).get(key) for key in keys]

    for key in keys:
        scribble(store_of(first), key, lie)

    wait_until(lambda: store_of(first).check(keys) and before == [store_of(first).get(key) for key in keys], LONG)
    assert b"job" == before[0]


def test_of_two_coordinators_of_one_job_one_ends_and_names_the_other(node: Open) -> None:
    """Simulate a removal of all traces of a coordinator, after which the next node coordinates as well."""
    first = node("first", token="secret")
    wait_until(first.member.drain, LONG)  # else the other one may take the message of the node out of the inbox
    rival = CoordinatorHost(
        first._backend.dial(LONG), first.job.rules, run_id="job", name="rival/1", key=key_of("secret")
    )  # knows nothing of the first one, and hears nothing of what it should
    rival.start()

    try:
        assert "rival/1" in error_of(first)  # which its coordinator sees, or its member, whoever looks first
    finally:
        rival.close()


@pytest.fixture
def host() -> Iterator[C10dBackend]:
    """Hosts a store, and its job is over."""
    backend = C10dBackend(NodeJob(run_id="host", node="h", backend="c10d", endpoint="127.0.0.1:0", max_nodes=2))
    assert backend.serve(time.monotonic() + LONG)
    yield backend
    backend.close()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def connection(host: C10dBackend, run_id: str) -> StoreExchange:
    exchange = host.dial(LONG)
    assert isinstance(exchange, StoreExchange)
    return exchange.of(run_id)


def start_joined_job(host: C10dBackend, run_id: str) -> tuple[Claim, StoreExchange]:
    """Start a job that joins the store of *host*."""
    claim, exchange = Claim(run_id, JOINED_HEARTBEAT, run_id.encode()), connection(host, run_id)
    assert claim.take(exchange)
    exchange.write({COORDINATOR_HEARTBEAT: b"1"})
    return claim, exchange


def announce(host: C10dBackend, run_id: str, heartbeat: float = JOINED_HEARTBEAT) -> None:
    body = json.dumps({"run_id": run_id, "heartbeat": heartbeat}).encode()
    connection(host, "").append("guests", body)


class TestClaims:
    @pytest.fixture
    def connect(self, host: C10dBackend) -> Callable[[], StoreExchange]:
        """Opens connections of a joined job to a store that serves another one."""
        return partial(connection, host, "job")

    @pytest.fixture
    def emptied(self, connect: Callable[[], StoreExchange]) -> Iterator[None]:
        """Somebody empties the joined job's inbox, as a coordinator does."""
        with answering(connect()):
            yield

    def claim(self, claimant: str) -> Claim:
        return Claim("job", 10.0, claimant.encode(), key_of("secret"), clock=lambda: 0.0)

    def test_emptied_inbox_of_a_dead_coordinator_keeps_its_job_from_nobody(
        self, connect: Callable[[], StoreExchange], emptied: None
    ) -> None:
        exchange, heir = connect(), self.claim("heir")
        assert self.claim("dead").take(exchange)

        with pytest.raises(RendezvousConnectionError, match=r"it can be restarted in 20\.0 s"):
            heir.take_over(exchange)
        heir.clock = lambda: 21.0

        assert heir.take_over(exchange)

    def test_coordinator_lives_while_its_signed_heartbeat_continues(self, connect: Callable[[], StoreExchange]) -> None:
        exchange, heir, living = connect(), self.claim("heir"), self.claim("living")
        assert living.take(exchange)
        leader = living.coordinating(exchange)
        leader.write(greeting("living", 1))
        with pytest.raises(RendezvousConnectionError):
            heir.take_over(exchange)
        heir.clock = lambda: 21.0
        leader.write(greeting("living", 2))

        assert not heir.take_over(exchange)
        exchange.write(greeting("living", 3, token="stranger"))
        with pytest.raises(RendezvousConnectionError):  # from here it counts anew
            heir.take_over(exchange)
        heir.clock = lambda: 42.0
        assert heir.take_over(exchange)

    @pytest.mark.parametrize("lie", [b"another", b""])
    def test_a_claim_that_a_stranger_writes_over_is_written_again(
        self, connect: Callable[[], StoreExchange], lie: bytes
    ) -> None:
        exchange, mine = connect(), self.claim("mine")
        assert mine.take(exchange)
        leader = mine.coordinating(exchange)
        leader.write(greeting("mine", 1))

        exchange.write({"claimant": lie}) if lie else exchange.delete(["claimant"])
        leader.write({"box/n/1/0": b"notice"})

        assert [b"mine"] == exchange.read(["claimant"])

    def test_coordinator_whose_restarted_job_has_ended_writes_nothing(
        self, connect: Callable[[], StoreExchange]
    ) -> None:
        exchange, mine = connect(), self.claim("mine")
        assert mine.take(exchange)
        leader = mine.coordinating(exchange)
        leader.write(greeting("mine", 1))
        exchange.delete([ANNOUNCEMENT, COORDINATOR_HEARTBEAT, "claimant"])

        with pytest.raises(LeadershipLost, match="another node restarted job 'job'"):
            leader.write(greeting("mine", 2))

    def test_greeting_of_a_live_rival_ends_a_coordinator_and_an_old_one_not(
        self, connect: Callable[[], StoreExchange]
    ) -> None:
        exchange = connect()
        mine = self.claim("mine")
        assert mine.take(exchange)
        leader = mine.coordinating(exchange)
        assert isinstance(leader, LeaderExchange)
        for count in range(3):
            exchange.write(greeting("former", 7))
            leader.write(greeting("mine", count))
            exchange.write(greeting("forged", count, token="stranger"))
            leader.write(greeting("mine", count))

        exchange.write(greeting("former", 8))

        with pytest.raises(LeadershipLost, match=r"^node former coordinates it as well$"):
            leader.write(greeting("mine", 4))

    def test_the_name_of_another_coordinator_swells_no_error(self) -> None:
        name = "x" * 100_000

        announcement = greeting_of(greeting(name, 1)[ANNOUNCEMENT], "job", key_of("secret"))

        assert announcement is not None
        assert 0 < len(announcement.host) <= 1000


def greeting(name: str, count: int, token: str = "secret") -> dict[str, bytes]:
    """Return the entries that the coordinator called *name* writes repeatedly."""
    key, nonce = key_of(token), f"nonce-{name[:99]}"
    announcement, pulse = (
        Announcement("job", nonce, name, Terms(1, 2, 3), 10.0, True),
        CoordinatorHeartbeat(nonce, count),
    )
    return {
        ANNOUNCEMENT: encode(announcement, key, key_place("job", "", ANNOUNCEMENT)),
        COORDINATOR_HEARTBEAT: encode(pulse, key, key_place("job", nonce, COORDINATOR_HEARTBEAT)),
    }


def test_joined_job_too_large_for_a_store_hides_no_other(host: C10dBackend) -> None:
    start_joined_job(host, "good")
    announce(host, "x" * 9000)

    assert ["good"] == OtherJobs(connection(host, "host")).living()


def test_heartbeat_that_no_store_returns_hides_no_other_joined_job(
    host: C10dBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(host, "bad")
    _, good = start_joined_job(host, "good")
    read = StoreExchange.read

    def break_off(self: StoreExchange, keys: list[str]) -> list[bytes | None]:
        if self._run_id == "bad":
            raise RendezvousConnectionError("the connection was reset")
        return read(self, keys)

    monkeypatch.setattr(StoreExchange, "read", break_off)
    clock = Clock()
    other_jobs = OtherJobs(connection(host, "host"), clock)
    before = other_jobs.living()
    good.write({COORDINATOR_HEARTBEAT: b"2"})
    clock.now = 21.0

    assert [["bad", "good"], ["good"]] == [before, other_jobs.living()]


@pytest.mark.parametrize("lie", [b"junk", b"", b"-5", b"1010", b"9" * 30, b"9" * 5000, b"\xff", None])
def test_joined_jobs_are_found_and_kept_if_their_counter_is_changed(host: C10dBackend, lie: bytes | None) -> None:
    start_joined_job(host, "good")
    other_jobs = OtherJobs(connection(host, "host"))
    before = other_jobs.living()
    scribble(host.server, REGISTER, lie)

    assert [["good"]] * 3 == [before, other_jobs.living(), OtherJobs(connection(host, "host")).living()]


@pytest.mark.parametrize("lie", [b"junk", b"1010"])
def test_joined_jobs_are_kept_when_a_strangers_key_is_not_valid_text(host: C10dBackend, lie: bytes) -> None:
    """Then the store does not tell its keys."""
    start_joined_job(host, "good")
    other_jobs = OtherJobs(connection(host, "host"))
    other_jobs.living()
    scribble(host.server, REGISTER, lie)
    host.server.set(b"\xff\xfe", "1")

    assert [["good"]] * 2 == [other_jobs.living(), OtherJobs(connection(host, "host")).living()]


def test_crowd_of_announcements_hides_no_joined_job(host: C10dBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticlib.rendezvous.stores._shared_store.MOST", 3)
    for number in range(5):
        announce(host, f"a{number}", 0.001)
    start_joined_job(host, "good")
    for number in range(5):
        announce(host, f"b{number}", 0.001)
    clock = Clock()
    other_jobs = OtherJobs(connection(host, "host"), clock)
    seen = set()
    for _ in range(6):
        seen |= set(other_jobs.living())
        clock.now += 1.0

    assert ["good"] == other_jobs.living()
    assert len(seen) > 3


def test_announcement_of_a_dead_job_is_removed_and_of_a_live_one_kept(
    host: C10dBackend,
) -> None:
    clock = Clock()
    other_jobs = OtherJobs(connection(host, "host"), clock)
    start_joined_job(host, "dead")
    claim, exchange = start_joined_job(host, "living")
    leader = claim.coordinating(exchange)
    for count in range(3):
        leader.write({ANNOUNCEMENT: b"hello", COORDINATOR_HEARTBEAT: b"%d" % count})
        other_jobs.living()
        clock.now += 19.0
    left = [host.server.check([f"{REGISTER}/{number}"]) for number in (1, 2)]
    scribble(host.server, f"{REGISTER}/2", None)
    leader.write({ANNOUNCEMENT: b"hello", COORDINATOR_HEARTBEAT: b"4"})

    assert [False, True] == left
    assert host.server.check([f"{REGISTER}/2"])
    assert ["living"] == OtherJobs(connection(host, "host")).living()


def test_host_waits_for_a_joined_job_whatever_strangers_announce(host: C10dBackend) -> None:
    start_joined_job(host, "good")
    announce(host, "x" * 9000)
    scribble(host.server, REGISTER, b"junk")
    reported: list[list[str]] = []
    began = time.monotonic()

    host.stay(1.0, reported.append, threading.Event())

    assert [["good"]] == reported
    assert time.monotonic() - began >= 1.0
