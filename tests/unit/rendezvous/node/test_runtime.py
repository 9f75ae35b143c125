"""A node's share as a whole: who hosts, who leaves, and what is said in whose place."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from elasticlib.errors import RendezvousClosedError, RendezvousError
from elasticlib.processes._wire import wait_readable
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.handlers._dynamic import StateBackend
from elasticlib.rendezvous.net._dial import RefusedError
from elasticlib.rendezvous.node import _client, _coordinator_host, _coordinator_role, _runtime
from elasticlib.rendezvous.node._client import NodeClient
from elasticlib.rendezvous.node._coordinator_role import LeaderRole, StoreRole
from elasticlib.rendezvous.node._runtime import NodeRuntime
from elasticlib.rendezvous.protocol._messages import Leave
from elasticlib.rendezvous.stores._election import LeadershipLost, StateLog
from elasticlib.rendezvous.stores._state_keys import RendezvousBackend

LIMIT = 15.0


class Desk:
    """A member that records its reports, and knows no end of the job."""

    round = 3

    def __init__(self) -> None:
        self.posted: list[tuple[Any, ...]] = []

    def post(self, report: Leave) -> None:
        self.posted.append((report.why, report.round, report.lost))

    def is_over(self) -> bool:
        return False

    def close(self) -> None:
        pass


def runtime(**facts: Any) -> tuple[NodeRuntime, Any]:
    made = NodeRuntime(NodeJob(run_id="job", node="n1/1-a", backend="c10d", endpoint="127.0.0.1:29400", **facts))
    made.member = member = Desk()  # type: ignore[assignment]
    made._role.begin(member)  # type: ignore[arg-type]
    return made, member


def test_a_dead_agent_is_spoken_for_once() -> None:
    """A second report, which knows of no workers, would have others take the ranks of those that still run."""
    made, member = runtime()
    made.witness("its agent died", False)

    made.close(0.0)

    assert [("its agent died", 3, True)] == member.posted


def test_runtime_reports_an_agent_that_ends_without_leaving() -> None:
    made, member = runtime()

    made.close(0.0)

    assert [("its agent ended without leaving the job", None, True)] == member.posted


def test_store_host_that_leaves_after_the_end_is_not_waited_for() -> None:
    leavers: list[str | None] = []

    class Over:
        def is_over(self) -> bool:
            return True

        def abandon(self, why: str, leaver: str | None) -> None:
            leavers.append(leaver)

    made, _ = runtime()
    made._role._host = Over()  # type: ignore[assignment]

    assert made._left(Leave("n1/1-a", "signal 15"))
    assert ["n1/1-a"] == leavers


@pytest.mark.parametrize(
    ("facts", "address"),
    [
        ({"max_nodes": 1}, "127.0.0.1"),
        ({"max_nodes": 1, "local_addr": "node1"}, "node1"),
        ({"max_nodes": 2}, "192.0.2.7"),
        ({"max_nodes": 2, "local_addr": "node1"}, "node1"),
    ],
)
def test_the_workers_of_a_job_of_one_node_meet_on_loopback(facts: dict[str, Any], address: str) -> None:
    made, _ = runtime(**facts)

    class Backend:
        def address(self) -> str:
            return "192.0.2.7"

    made._backend = Backend()

    assert address == made._address()


@pytest.mark.parametrize(("join_timeout", "patience"), [(0.0, 600.0), (50.0, 50.0)])
def test_host_name_has_time_to_be_found_with_join_timeout_0(join_timeout: float, patience: float) -> None:
    made, _ = runtime(join_timeout=join_timeout)
    deadlines: list[float] = []

    class Backend:
        def serve(self, deadline: float) -> bool:
            deadlines.append(deadline)
            raise ConnectionError

    made._role._backend = Backend()
    with pytest.raises(ConnectionError):
        made._role.dial(5.0)

    assert isinstance(made._role, StoreRole)
    assert [pytest.approx(patience)] == [deadline - made._role._began for deadline in deadlines]


def test_node_reports_nothing_more_after_its_reason_to_leave() -> None:
    """The store's host would end the job with the second report, if the first one was not read yet."""
    made, member = runtime()
    made._left(Leave("n1/1-a", "ConfigError: 5 is no number"))

    made.close(0.0)

    assert [] == member.posted


class InMemory(RendezvousBackend):
    """A state in this program; hangs while *hold* is not set."""

    name = "mine"

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.state: tuple[bytes, int] | None = None
        self.hold = threading.Event()
        self.hold.set()
        self.requested = threading.Event()

    def get_state(self) -> tuple[bytes, Any] | None:
        self.requested.set()
        self.hold.wait()
        return self.state

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        self.hold.wait()
        with self.lock:
            if token != (None if self.state is None else self.state[1]):
                return None if self.state is None else (*self.state, False)
            self.state = state, 1 if self.state is None else self.state[1] + 1
            return *self.state, True


@pytest.fixture
def state() -> Iterator[InMemory]:
    state = InMemory()
    yield state
    state.hold.set()


def shared(state: InMemory, **facts: Any) -> NodeRuntime:
    job = NodeJob(run_id="job", node="n1/1-a", backend="mine", endpoint="state", last_call=0.01, **facts)
    return NodeRuntime(job, backend=StateBackend(state, 5.0))


def drain_events(member: NodeClient) -> list[Any]:
    """Return the next events; raises what `drain` raises."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        wait_readable([member], 0.05)
        if events := member.drain():
            return events
    raise AssertionError(f"no event within {LIMIT:g} s")


def test_election_is_won_even_if_the_role_knows_its_member_late(
    state: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    election_over = threading.Event()

    class Late(LeaderRole):
        """The thread that starts it stands still before it has the member, for as long as an election takes."""

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "member":
                election_over.wait(0.1)
            super().__setattr__(name, value)

        def _begin_leading(self, state_log: StateLog) -> None:
            try:
                super()._begin_leading(state_log)
            finally:
                election_over.set()

    monkeypatch.setattr(_runtime, "LeaderRole", Late)
    made = shared(state)
    made.start()
    made.member.join(1, "trainer")

    try:
        assert 0 == drain_events(made.member)[0].round
    finally:
        made.close(0.0)


@pytest.mark.parametrize("place", ["is_over", "_new_host"])
def test_node_whose_election_fails_ends_with_the_reason(
    state: InMemory, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def broken(*_: Any) -> Any:
        raise AttributeError("a defect")

    made = shared(state)
    monkeypatch.setattr(_client, "_PARTING", 0.05)
    owner: Any = NodeClient if place == "is_over" else made._role
    monkeypatch.setattr(owner, place, broken)
    made.start()
    made.member.join(1, "trainer")

    with pytest.raises(RendezvousError, match="n1/1-a could not coordinate job 'job': AttributeError: a defect"):
        drain_events(made.member)
    made.member.close()
    monkeypatch.undo()
    made.close(0.0)


def test_a_station_closes_though_its_back_end_hangs(state: InMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_client, "_PARTING", 0.02)
    monkeypatch.setattr(_coordinator_host, "_STOPPING", 0.02)
    monkeypatch.setattr(_coordinator_role, "_RESIGNING", 0.02)
    made = shared(state)
    made.start()
    made.member.join(1, "trainer")
    drain_events(made.member)
    state.hold.clear()
    state.requested.clear()
    assert state.requested.wait(LIMIT)
    closer = threading.Thread(target=made.close, args=(0.0,), daemon=True)
    closer.start()

    closer.join(LIMIT)

    assert not closer.is_alive()


def test_coordinators_document_in_a_shared_state_is_signed(state: InMemory) -> None:
    made = shared(state, token="secret")
    made.start()
    made.member.join(1, "trainer")
    drain_events(made.member)

    try:
        assert state.state is not None
        item = json.loads(state.state[0])["keys"]["/job/state"][0]
        text = item if isinstance(item, str) else base64.b64decode(item[0]).decode()
        assert text.startswith("signed:")
    finally:
        made.close(0.0)


LONGEST = 2000
"""Characters of a line that names a job, or some, whatever their ids."""


def test_a_node_whose_coordinator_finds_another_one_ends_and_names_it() -> None:
    class Second:
        def run(self) -> None:
            raise LeadershipLost("node n2 coordinates it as well")

    ended: list[RendezvousError] = []
    made, member = runtime()
    member.fail = ended.append

    assert isinstance(made._role, StoreRole)
    made._role._serve(Second())  # type: ignore[arg-type]

    assert ["node n1/1-a no longer coordinates job 'job': node n2 coordinates it as well"] == list(map(str, ended))
    assert isinstance(ended[0], RendezvousClosedError)


class SharedStore:
    """A backend whose store serves a job with the id *served*, and also *other_jobs*."""

    def __init__(self, served: str, other_jobs: Sequence[str] = ()) -> None:
        self.served, self.other_jobs = served, other_jobs

    def serve(self, deadline: float) -> bool:
        return False

    def dial(self, timeout: float) -> Any:
        if self.other_jobs:
            raise RefusedError("nobody listens there")
        return object()

    def served_run(self, exchange: Any) -> str:
        return self.served

    def word_of(self, exchange: Any) -> bytes:
        return b"word"

    def claim(self, exchange: Any) -> bool:
        return True

    def coordinating(self, exchange: Any) -> Any:
        return exchange


HUGE = ["x" * 1_000_000, "\0" * 100_000, "\U0001f600" * 100_000]


@pytest.mark.parametrize("served", HUGE)
def test_strangers_name_of_the_served_job_is_bounded(monkeypatch: pytest.MonkeyPatch, served: str) -> None:
    hints: list[str] = []
    made, _ = runtime()
    made._role._backend = store = SharedStore(served)
    monkeypatch.setattr(made._role, "_coordinate", lambda exchange, hint="": hints.append(hint))
    made._role.dial(5.0)
    store.other_jobs = ["lost"]

    with pytest.raises(RefusedError) as lost:
        made._role.dial(5.0)

    assert [True, True] == [0 < len(text) < LONGEST for text in (*hints, str(lost.value))]


@pytest.mark.parametrize("other_job", HUGE)
def test_long_ids_of_other_jobs_do_not_enlarge_the_log(caplog: pytest.LogCaptureFixture, other_job: str) -> None:
    made, member = runtime()
    member.final = None

    assert isinstance(made._role, StoreRole)
    made._role._log_stay(["short", other_job])

    assert [True] == [("'short'" in each.message and len(each.message) < LONGEST) for each in caplog.records]
