"""Torch's vocabulary: parameters, store facts, and our handler over a coordinator in this program."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from attrs import evolve

from elasticlib.elastic.rendezvous.static_tcp_rendezvous import create_rdzv_handler
from elasticlib.errors import (
    ConfigError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from elasticlib.rendezvous import (
    MemoryExchange,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from elasticlib.rendezvous._membership import HandlerMembership, Membership, MembershipEvent
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.handlers import _round_store
from elasticlib.rendezvous.handlers._coordinated import CoordinatedHandler
from elasticlib.rendezvous.handlers._registry import StaticTCPRendezvous, create_handler
from elasticlib.rendezvous.net._node_info import BoundNodeInfo
from elasticlib.rendezvous.node._client import NodeClient
from elasticlib.rendezvous.node._coordinator_host import CoordinatorHost
from elasticlib.rendezvous.node._session_liveness import Limits
from elasticlib.rendezvous.protocol._messages import Final, Leave, RankAssignment, Stopped, Succeeded
from tests.waiting import wait_until

LIMIT = 30.0


class DictStore:
    """Store with the methods that `RendezvousStoreInfo.build` needs."""

    def __init__(self, **values: str) -> None:
        self.values = {key: value.encode() for key, value in values.items()}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]


def parameters(**options: Any) -> RendezvousParameters:
    return RendezvousParameters("c10d", "localhost:0", "job", 1, 2, **options)


# RendezvousParameters


def test_parameters_keep_what_they_were_given() -> None:
    params = RendezvousParameters("c10d", "node0:29400", "job", 1, 4, "10.0.0.1", timeout=3)

    assert ("c10d", "node0:29400", "job", 1, 4, "10.0.0.1", {"timeout": 3}) == (
        params.backend,
        params.endpoint,
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        params.config,
    )


@pytest.mark.parametrize(
    ("backend", "least", "most", "message"),
    [
        ("", 1, 1, "backend=''"),
        ("c10d", 0, 1, "min_nodes=0"),
        ("c10d", 3, 2, "max_nodes=2 is below min_nodes=3"),
        ("c10d", "1", 2, "min_nodes='1' must be a whole number"),
        ("c10d", True, 2, "min_nodes=True must be a whole number"),
        ("c10d", 1, None, "max_nodes=None must be a whole number"),
    ],
)
def test_parameters_that_break_a_rule_are_value_errors(backend: str, least: Any, most: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RendezvousParameters(backend, "", "job", least, most)


@pytest.mark.parametrize(
    ("values", "truth"),
    [((True, 1, "1", "true", "T", "yes", "Y", " True "), True), ((False, 0, "0", "false", "F", "no", "N"), False)],
    ids=["yes", "no"],
)
def test_yes_and_no_are_read_from_all_their_spellings(values: tuple[object, ...], truth: bool) -> None:
    assert {truth} == {parameters(is_host=value).get_as_bool("is_host", not truth) for value in values}


@pytest.mark.parametrize("value", [2, "", "on", "2", 1.0, [1]])
def test_value_other_than_yes_or_no_raises_value_error(value: object) -> None:
    with pytest.raises(ValueError, match=r"is_host=.* is neither yes nor no"):
        parameters(is_host=value).get_as_bool("is_host")


def test_missing_or_none_parameter_returns_the_default_or_none() -> None:
    params = parameters(given=None)

    assert (None, None, 7, None, True, "x") == (
        params.get_as_bool("given"),
        params.get_as_int("given"),
        params.get_as_int("absent", 7),
        params.get_as_int("absent"),
        params.get_as_bool("absent", True),
        params.get("absent", "x"),
    )


@pytest.mark.parametrize("value", [12, "12", " 12 "])
def test_whole_numbers_are_read_from_text(value: object) -> None:
    assert 12 == parameters(timeout=value).get_as_int("timeout")


@pytest.mark.parametrize("value", ["twelve", "1.5", "", [1], float("inf")])
def test_value_that_is_not_a_whole_number_raises_value_error(value: object) -> None:
    with pytest.raises(ValueError, match=r"timeout=.* must be a whole number"):
        parameters(timeout=value).get_as_int("timeout")


# RendezvousStoreInfo and RendezvousInfo


def test_rank_0_writes_the_store_address_and_every_rank_reads_it() -> None:
    store: Any = DictStore()

    first = RendezvousStoreInfo.build(0, store, "10.0.0.1", 29500)
    second = RendezvousStoreInfo.build(1, store, "10.0.0.2")

    assert RendezvousStoreInfo("10.0.0.1", 29500) == first == second
    assert {"MASTER_ADDR": b"10.0.0.1", "MASTER_PORT": b"29500"} == store.values


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", None])
def test_without_a_port_rank_0_takes_one_that_is_free(address: str | None) -> None:
    store: Any = DictStore()

    info = RendezvousStoreInfo.build(0, store, address)

    with socket.create_server(("", info.master_port)) as bound:
        assert info.master_port == bound.getsockname()[1]
    assert info.master_addr == (address or socket.getfqdn())


def test_a_store_that_holds_no_port_is_a_state_error() -> None:
    store: Any = DictStore(MASTER_ADDR="a", MASTER_PORT="b")

    with pytest.raises(RendezvousStateError, match="not a valid address and port"):
        RendezvousStoreInfo.build(1, store, None)


def test_a_place_in_a_round_cannot_be_changed() -> None:
    store: Any = DictStore()
    info = RendezvousInfo(store, 0, 1, RendezvousStoreInfo("a", 1))

    with pytest.raises(AttributeError):
        info.rank = 1  # type: ignore[misc]


def test_store_facts_cross_processes() -> None:
    info = RendezvousStoreInfo("a", 1)

    assert info == pickle.loads(pickle.dumps(info))


def test_the_options_of_a_handler_reach_its_job() -> None:
    handler = create_handler(parameters(join_timeout=7, last_call_timeout="2", heartbeat_timeout=3, is_host="no"))

    job = handler.job

    assert (7, 2, 3, False) == (job.join_timeout, job.last_call, job.heartbeat, job.is_host)


def test_a_handlers_node_has_the_place_that_its_scheduler_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "4")

    assert 3 == create_handler(parameters()).job.node_rank


def test_a_handlers_job_has_the_token_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICLIB_TOKEN", "h4sh-h4sh")

    assert "h4sh-h4sh" == create_handler(parameters()).job.token


@pytest.mark.parametrize(
    ("backend", "endpoint", "run_id", "options", "why"),
    [
        ("c10d", "localhost:99999", "job", {}, "99999"),
        ("c10d", "localhost:0", "job\udce9", {}, r"run_id='job\\udce9' must be a string that can be encoded in UTF-8"),
        ("c10d", "localhost:0", "", {}, "run_id=''"),
        *(("static", "localhost:29999", "job", rank, "rank") for rank in ({}, {"rank": 2}, {"rank": -1})),
        *(("static", place, "job", {"rank": 0}, "needs host:port") for place in ("", " ", "node0", "node0:0", "[::1]")),
    ],
)
def test_invalid_parameters_are_refused_when_the_handler_is_made(
    backend: str, endpoint: str, run_id: str, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        create_handler(RendezvousParameters(backend, endpoint, run_id, 2, 2, **options))


def test_two_handlers_are_two_nodes() -> None:
    assert create_handler(parameters()).job.node != create_handler(parameters()).job.node


def test_the_agents_store_is_shared_unless_the_variable_forbids(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = create_handler(parameters())
    shared = handler.use_agent_store
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")

    assert (True, False) == (shared, handler.use_agent_store)


# Our handler, with the real coordinator over an exchange in memory.


class Meeting:
    """Makes handlers of one job, and threads that wait for rounds."""

    def __init__(self, least: int = 1, most: int = 2, backend: str = "c10d", coordinated: bool = True) -> None:
        self.job = NodeJob(
            run_id="job",
            node="",
            backend=backend,
            endpoint="localhost:0",
            min_nodes=least,
            max_nodes=most,
            last_call=0.05,
            join_timeout=LIMIT,
            heartbeat=1.0,
            close_timeout=LIMIT if coordinated else 0.2,
        )
        self.exchange = MemoryExchange()
        rules = evolve(self.job.rules, fixed_places=False, shared_store=False, heartbeat=0.0)
        self.host = CoordinatorHost(self.exchange.clone(), rules, run_id="job", name="a")
        if coordinated:
            self.host.start()
        self.handlers: list[CoordinatedHandler] = []

    def node(self, name: str) -> CoordinatedHandler:
        self.handlers.append(CoordinatedHandler(evolve(self.job, node=name), self.connect))
        return self.handlers[-1]

    def connect(self, job: NodeJob, *, stall: float | None = None) -> NodeClient:
        return NodeClient(
            lambda _: self.exchange.clone(),
            job.node,
            BoundNodeInfo(),
            run_id=job.run_id,
            terms=job.terms,
            limits=Limits(job.join_timeout, 5.0),
        ).start()

    def close(self) -> None:
        for handler in self.handlers:
            handler.shutdown()
        self.host.close()


@pytest.fixture(autouse=True)
def stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace torch's stores by objects that need no torch."""

    def serve(listener: socket.socket, address: str, timeout: float) -> object:
        listener.close()
        return "served"

    monkeypatch.setattr(_round_store, "prepare", lambda: None)
    monkeypatch.setattr(_round_store, "serve", serve)
    monkeypatch.setattr(_round_store, "reach", lambda addresses, port, timeout: ("reached", addresses[0]))
    monkeypatch.setattr(_round_store, "apart", lambda store, run_id, round: (store, run_id, round))


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    meeting = Meeting(2, 2)
    yield meeting
    meeting.close()


def in_thread(call: Callable[[], Any]) -> Future[Any]:
    """The outcome of *call*, made in a thread of its own."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def talk(handler: CoordinatedHandler) -> HandlerMembership:
    assert handler._node.member is not None, "it has asked nothing yet"
    return handler._node.member


def together(*handlers: RendezvousHandler) -> list[RendezvousInfo]:
    """The next round of these nodes, in the order of their ranks."""
    waiting = [in_thread(handler.next_rendezvous) for handler in handlers]
    return sorted((each.result(LIMIT) for each in waiting), key=lambda info: info.rank)


def test_all_nodes_of_a_round_get_ranks_and_the_same_store_address(meeting: Meeting) -> None:
    first, second = together(meeting.node("a"), meeting.node("b"))

    assert [(0, 2), (1, 2)] == [(info.rank, info.world_size) for info in (first, second)]
    assert first.bootstrap_store_info == second.bootstrap_store_info
    stores: list[Any] = [first.store, second.store]
    assert [("served", "job", 0), ("reached", "job", 0)] == stores


def test_no_node_is_waiting_while_a_round_runs(meeting: Meeting) -> None:
    a, b = meeting.node("a"), meeting.node("b")
    together(a, b)

    assert (0, 0, False) == (a.num_nodes_waiting(), b.num_nodes_waiting(), a.is_closed())


def test_all_meet_again_once_a_node_asks_for_another_round(meeting: Meeting) -> None:
    a, b = meeting.node("a"), meeting.node("b")
    before = together(a, b)

    again = in_thread(a.next_rendezvous)
    wait_until(lambda: b.num_nodes_waiting() > 0)
    [first, second] = sorted([b.next_rendezvous(), again.result(LIMIT)], key=lambda info: info.rank)

    assert [0, 1] == [first.rank, second.rank]
    assert first.store != before[0].store
    assert 0 == b.num_nodes_waiting()


def test_a_newcomer_ends_the_round_when_there_is_room() -> None:
    meeting = Meeting(1, 2)
    a, b = meeting.node("a"), meeting.node("b")
    [alone] = together(a)
    late = in_thread(b.next_rendezvous)
    wait_until(lambda: a.num_nodes_waiting() > 0)

    infos = [a.next_rendezvous(), late.result(LIMIT)]

    assert 1 == alone.world_size
    assert [2, 2] == [info.world_size for info in infos]
    meeting.close()


def test_spare_leaves_by_the_graceful_error_when_the_job_succeeds(meeting: Meeting) -> None:
    a, b, spare = (meeting.node(name) for name in "abc")
    together(a, b)
    waits = in_thread(spare.next_rendezvous)
    wait_until(lambda: bool(meeting.host._server.state.waiting))
    seen = a.num_nodes_waiting()
    for handler in (a, b):
        talk(handler).post(Succeeded(talk(handler).node, 0))

    with pytest.raises(RendezvousGracefulExitError, match="succeeded without this node"):
        waits.result(LIMIT)
    assert 0 == seen


def test_closing_ends_the_job_for_all(meeting: Meeting) -> None:
    a, b = meeting.node("a"), meeting.node("b")
    together(a, b)

    a.set_closed()
    wait_until(b.is_closed)

    assert a.is_closed()
    for handler in (a, b, meeting.node("late")):
        with pytest.raises(RendezvousClosedError, match="node a closed it"):
            handler.next_rendezvous()


def test_a_node_that_was_never_in_a_round_can_close_the_job(meeting: Meeting) -> None:
    meeting.node("a").set_closed()

    with pytest.raises(RendezvousClosedError):
        meeting.node("b").next_rendezvous()


def test_closing_wakes_a_node_that_waits_for_a_round(meeting: Meeting) -> None:
    a = meeting.node("a")
    waits = in_thread(a.next_rendezvous)
    wait_until(lambda: a._node._seeks)

    meeting.node("b").set_closed()

    with pytest.raises(RendezvousClosedError):
        waits.result(LIMIT)


def test_shutting_down_closes_the_job_and_frees_everything(meeting: Meeting) -> None:
    a, b = meeting.node("a"), meeting.node("b")
    together(a, b)

    down = a.shutdown()
    wait_until(b.is_closed)

    assert (True, True, -1) == (down, a.is_closed(), talk(a).fileno())
    assert a.shutdown()
    with pytest.raises(RendezvousClosedError, match="was shut down"):
        a.next_rendezvous()


def test_shutdown_returns_false_without_a_coordinator(caplog: pytest.LogCaptureFixture) -> None:
    meeting = Meeting(2, 2, coordinated=False)
    a = meeting.node("a")

    down = a.shutdown()

    assert not down
    assert "closing the rendezvous failed: job 'job' could not be closed within 0.2 s" in caplog.text


def test_shutting_down_wakes_a_thread_that_waits_for_a_round() -> None:
    meeting = Meeting(2, 2, coordinated=False)
    a = meeting.node("a")
    waits = in_thread(a.next_rendezvous)
    wait_until(lambda: a._node._seeks)

    a.shutdown()

    with pytest.raises(RendezvousClosedError, match="was shut down"):
        waits.result(LIMIT)


def test_too_few_nodes_are_a_timeout() -> None:
    meeting = Meeting(2, 2, coordinated=False)
    rules = evolve(meeting.job.rules, join_timeout=0.2, heartbeat=0.0)
    meeting.host = CoordinatorHost(meeting.exchange.clone(), rules, run_id="job")
    meeting.host.start()

    with pytest.raises(RendezvousTimeoutError, match="at least 2"):
        meeting.node("a").next_rendezvous()
    meeting.close()


def test_other_terms_than_the_jobs_are_refused_with_both_named(meeting: Meeting) -> None:
    together(meeting.node("a"), meeting.node("b"))
    meeting.job = evolve(meeting.job, max_nodes=5)

    with pytest.raises(RendezvousClosedError, match="5"):
        meeting.node("c").next_rendezvous()


def test_a_lost_store_is_an_error_of_every_later_call(meeting: Meeting) -> None:
    a, b = meeting.node("a"), meeting.node("b")
    together(a, b)
    with a._turned:
        a._notes.error = RendezvousConnectionError("the store is gone")

    for call in (a.num_nodes_waiting, a.is_closed, a.next_rendezvous, a.set_closed):
        with pytest.raises(RendezvousConnectionError, match="the store is gone"):
            call()
    assert not a.shutdown()


def test_a_store_that_died_with_its_round_makes_the_node_ask_again(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = meeting.node("a"), meeting.node("b")
    reached: list[int] = []

    def reach(addresses: list[str], port: int, timeout: float) -> tuple[str, str]:
        reached.append(port)
        if len(reached) == 1:
            talk(a).post(Stopped(talk(a).node, 0, ()))  # as its successor would: rank 0 has no worker any more
            raise RendezvousConnectionError("refused")
        return "reached", addresses[0]

    monkeypatch.setattr(_round_store, "reach", reach)
    waits = in_thread(b.next_rendezvous)
    a.next_rendezvous()
    wait_until(lambda: a.num_nodes_waiting() > 0)

    a.next_rendezvous()

    assert (1, 2) == (waits.result(LIMIT).rank, len(reached))


def test_static_job_continues_after_the_shutdown_of_a_handler() -> None:
    meeting = Meeting(2, 2, backend="static")
    a, b = meeting.node("a"), meeting.node("b")
    together(a, b)
    a.set_closed()

    down = a.shutdown()

    assert (True, False, False, 0) == (down, a.is_closed(), b.is_closed(), b.num_nodes_waiting())
    meeting.close()


def test_the_static_rendezvous_can_be_made_directly() -> None:
    handler = StaticTCPRendezvous("node0", 29500, rank=1, world_size=2, run_id="job", timeout=5)

    job = handler.job
    assert ("static", "node0:29500", 1, 2, 2, 5, False) == (
        handler.get_backend(),
        job.endpoint,
        job.node_rank,
        job.min_nodes,
        job.max_nodes,
        job.join_timeout,
        job.is_host,
    )
    assert (0, False, True) == (handler.num_nodes_waiting(), handler.is_closed(), handler.shutdown())


def test_static_parameters_make_a_static_handler() -> None:
    handler = create_rdzv_handler(RendezvousParameters("static", "[::1]:29500", "job", 1, 2, rank="0"))

    assert (0, True, "[::1]:29500") == (handler.job.node_rank, handler.job.is_host, handler.job.endpoint)


# Our handler in an agent's hands.


def receive(member: Membership, kind: type[MembershipEvent]) -> Any:
    """Return the first event of that kind that *member* has."""
    found: list[MembershipEvent] = []

    def is_found() -> bool:
        found.extend(event for event in member.drain() if isinstance(event, kind))
        return bool(found)

    wait_until(is_found)
    return found[0]


def test_an_agent_gets_a_place_with_its_own_number_of_restarts() -> None:
    meeting = Meeting(1, 1)
    handler = meeting.node("a")

    with handler.open_membership(7) as member:
        member.join(2, "trainer")
        final = receive(member, Final)

    assert "refused" == final.kind
    assert "7 restarts" in final.why
    meeting.close()


def test_each_membership_is_another_node_and_knows_its_address(meeting: Meeting) -> None:
    handler = meeting.node("a")

    names = []
    for _ in range(2):
        with handler.open_membership(3, "10.0.0.1") as member:
            names.append(member.node)

    assert 3 == len({"a", *names})
    assert ["10.0.0.1"] * 2 == [name.split("/")[0] for name in names]


def test_how_the_job_of_an_agent_ended_its_handler_knows_at_once() -> None:
    meeting = Meeting(1, 1)
    handler = meeting.node("a")
    with handler.open_membership(3) as member:
        member.join(2, "trainer")
        member.post(Succeeded(member.node, receive(member, RankAssignment).round))
        receive(member, Final)

    assert (True, 0, True) == (handler.is_closed(), handler.num_nodes_waiting(), handler.shutdown())
    assert handler._node.member is None
    meeting.close()


def test_after_an_agent_that_left_a_handler_still_closes_the_job_for_all(meeting: Meeting) -> None:
    handler, other = meeting.node("a"), meeting.node("b")
    with handler.open_membership(3) as member:
        member.join(1, "default")
        waits = in_thread(other.next_rendezvous)
        round = receive(member, RankAssignment).round
        member.post(Leave(member.node, "a signal", round))
        member.post(Stopped(member.node, round, ()))
        waits.result(LIMIT)
        left = receive(member, Final)

    closed_before = handler.is_closed()
    handler.set_closed()
    wait_until(other.is_closed)

    assert ("left", False) == (left.kind, closed_before)


def test_closing_a_handler_notifies_the_agent_with_its_membership(meeting: Meeting) -> None:
    handler = meeting.node("a")
    with handler.open_membership(3) as member:
        member.join(1, "default")
        handler.set_closed()
        final = receive(member, Final)

    assert "closed" == final.kind
    assert handler.is_closed()


def test_a_handler_that_an_agent_has_the_place_of_seeks_no_round(meeting: Meeting) -> None:
    handler = meeting.node("a")

    with handler.open_membership(3), pytest.raises(ConfigError, match="in use by an agent"):
        handler.next_rendezvous()


def test_open_membership_is_refused_for_a_handler_in_use(meeting: Meeting) -> None:
    a, b = meeting.node("a"), meeting.node("b")
    together(a, b)

    with pytest.raises(ConfigError, match="in use"), a.open_membership(3):
        pass


def test_open_membership_is_refused_after_shutdown(meeting: Meeting) -> None:
    handler = meeting.node("a")
    handler.shutdown()

    with pytest.raises(RendezvousClosedError, match="was shut down"), handler.open_membership(3):
        pass
