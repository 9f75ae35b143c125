"""
Sessions and coordinator mail in cases that random jobs seldom reach: their ends and refusals.

The simulated cluster itself checks the invariants at every step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from attrs import evolve

from elasticlib.errors import StartError
from elasticlib.rendezvous.node import _session_events as events
from elasticlib.rendezvous.protocol._codec import key_of
from elasticlib.rendezvous.protocol._exchange import CAUSE
from elasticlib.rendezvous.protocol._messages import Descriptor, Failed, FailureNote, Succeeded, encode
from elasticlib.testing import (
    Break,
    Cut,
    FailWorker,
    Fault,
    FaultPlan,
    Join,
    Kill,
    Leave,
    Slow,
    Stubborn,
    Suspend,
)
from tests.sim.adversaries import TOKEN
from tests.sim.checks import CheckedCluster
from tests.sim.promises import kinds
from tests.sim.simulator import Rules, SimulatedCluster, member
from tests.sim.simulator.host import Host
from tests.sim.simulator.member import NodeClient
from tests.sim.simulator.store import REFUSED, Store
from tests.sim.test_adversary import NOTHING

pytestmark = pytest.mark.sampled(1.0)

RULES = Rules(2, 3, 3, last_call=2.0, heartbeat=10.0)
BOTH = pytest.mark.parametrize("coordinator", ["fixed", "elected"])


def run(
    *faults: Fault, rules: Rules = RULES, nodes: int = 3, coordinator: str = "fixed", **more: Any
) -> SimulatedCluster:
    return CheckedCluster(rules, nodes, FaultPlan(faults), coordinator, **more).run()


# Who is refused, and is told why.


@contextmanager
def a_node_with(token: str, number: int = 2) -> Iterator[None]:
    """One node was given another token than the others."""
    start = NodeClient.start

    def begin(self: NodeClient) -> None:
        if self.name.startswith(f"n{number}/"):
            self.key = key_of(token) if token else None
        start(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NodeClient, "start", begin)
        yield


@BOTH
@pytest.mark.parametrize(
    ("theirs", "own", "why"),
    [
        (TOKEN, "another", "this node's token is not the job's"),
        (TOKEN, "", "the job runs with a token, and this node has none"),
        ("", "another", "this node has a token, and the job runs without one"),
    ],
)
def test_node_with_another_token_ends_within_seconds_and_reports_why(
    coordinator: str, theirs: str, own: str, why: str
) -> None:
    with a_node_with(own):
        cluster = run(coordinator=coordinator, token=theirs)

    ends = {node.number: node.outcome for node in cluster.members}
    assert {0: "succeeded", 1: "succeeded", 2: "lost"} == {number: end and end.kind for number, end in ends.items()}
    assert ends[2] is not None
    assert why in ends[2].why
    assert 3.0 < ends[2].at < 4.0


@contextmanager
def a_store_that_denies(what: Callable[[bytes], bool], *, too_large: bool = False) -> Iterator[None]:
    """Some messages, by what is in them, and some values, by where they are to lie: for their size, or otherwise."""
    post, write, handle = Store._post, Store._write, NodeClient.handle

    def posts(self: Store, connection: Any, data: bytes) -> Any:
        return REFUSED if what(data) else post(self, connection, data)

    def writes(self: Store, connection: Any, values: Any) -> Any:
        return REFUSED if any(what(key.encode()) for key in values) else write(self, connection, values)

    def handles(self: NodeClient, event: events.Event) -> None:
        is_denied = isinstance(event, events.Denied)
        handle(self, evolve(event, why="permission denied", too_large=too_large) if is_denied else event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "_post", posts)
        patch.setattr(Store, "_write", writes)
        patch.setattr(NodeClient, "handle", handles)
        yield


@BOTH
@pytest.mark.parametrize("too_large", [False, True])
def test_denied_message_of_a_node_ends_the_job_with_the_reason(coordinator: str, too_large: bool) -> None:
    with a_store_that_denies(lambda data: b'"node":"n1/' in data and b'"succeeded"' in data, too_large=too_large):
        cluster = run(coordinator=coordinator)

    assert ["closed", "lost", "closed"] == kinds(cluster)
    reasons = {node.number: node.outcome.why for node in cluster.members if node.outcome}
    assert "cannot continue: permission denied" in reasons[1]
    assert all("the store refused a message of node n1/" in reasons[number] for number in (0, 2))


@BOTH
def test_a_node_all_of_whose_messages_are_denied_ends_alone(coordinator: str) -> None:
    with a_store_that_denies(lambda data: b'"node":"n2/' in data and b'"join"' not in data):
        cluster = run(coordinator=coordinator)

    assert ["succeeded", "succeeded", "lost"] == kinds(cluster)


@BOTH
def test_a_node_whose_heartbeats_are_denied_ends_alone(coordinator: str) -> None:
    """Messages that the node sent earlier are in the store."""
    with a_store_that_denies(lambda data: data.startswith(b"beat/n2/")):
        cluster = run(coordinator=coordinator)

    assert ["succeeded", "succeeded", "lost"] == kinds(cluster)


@BOTH
def test_reports_refused_for_their_size_are_shortened_until_accepted(coordinator: str) -> None:
    fault = FailWorker(1, at=5.0, workers=8, text=20_000)
    with a_store_that_denies(lambda data: b'"failures":[{' in data and len(data) > 2_500, too_large=True):
        cluster = run(fault, rules=evolve(RULES, max_restarts=0), coordinator=coordinator)

    assert ["failed"] * 3 == kinds(cluster)


@BOTH
def test_failures_that_are_denied_however_short_end_the_job(coordinator: str) -> None:
    with a_store_that_denies(lambda data: b'"failures":[{' in data, too_large=True):
        cluster = run(FailWorker(1, at=5.0, text=20_000), coordinator=coordinator)

    assert ["closed", "lost", "closed"] == kinds(cluster)


# What breaks at the end, and who goes while others come.


@BOTH
@pytest.mark.parametrize("moment", range(0, 32, 4))
def test_job_succeeds_if_connections_break_while_its_end_is_announced(coordinator: str, moment: int) -> None:
    breaks = [Break(node, 60.05 + moment / 1000) for node in range(3)]

    assert ["succeeded"] * 3 == kinds(run(*breaks, coordinator=coordinator))


@pytest.mark.parametrize("moment", range(0, 40, 4))
def test_job_succeeds_if_its_coordinator_dies_while_end_is_announced(moment: int) -> None:
    slow = Slow(2, at=59.0, seconds=5.0, delay=0.01)
    cluster = run(slow, Kill(0, at=60.05 + moment / 1000), coordinator="elected")

    assert ["succeeded", "succeeded"] == kinds(cluster)[1:]


@pytest.mark.parametrize("at", [5.005, 5.05, 6.0, 9.0, 12.9, 13.1])
def test_successor_continues_after_a_takeover_while_a_node_is_leaving(at: float) -> None:
    """It has read more than is known of it, as it needs no notices any more."""
    cluster = run(Stubborn(2, 0.0, 8.0), Leave(2, 5.0), Kill(0, at), nodes=4, coordinator="elected")

    assert ["-", "succeeded", "left", "succeeded"] == kinds(cluster)


@BOTH
@pytest.mark.parametrize("cut", [(), (Cut(2, at=0.0, seconds=5.0),), (Cut(2, at=0.0, seconds=60.0),)])
def test_a_node_can_leave_at_any_moment_of_its_search(coordinator: str, cut: tuple[Fault, ...]) -> None:
    for at in (0.0485, 0.0545, 0.058, 5.5):
        cluster = run(Leave(2, at=at), *cut, coordinator=coordinator)

        assert ["succeeded", "succeeded", "left"] == kinds(cluster)


def test_job_ends_and_reports_why_when_no_node_can_become_leader() -> None:
    """Somebody holds it who does not coordinate."""
    cluster = CheckedCluster(RULES, coordinator="elected", work=600.0)
    assert cluster.store is not None
    cluster.timeline.at(5.0, None, functools.partial(cluster.store.steal_lease, 1000.0))
    cluster.run()

    whys = [node.outcome.why for node in cluster.members if node.outcome]
    assert ["lost"] * 3 == kinds(cluster)
    assert all("the store answers, but no node has coordinated the job for" in why for why in whys)
    assert cluster.now < 100.0


@BOTH
@pytest.mark.parametrize("at", [5.02, 5.0225, 0.0485, 5.015])
def test_request_counts_from_its_first_sending_despite_a_break(coordinator: str, at: float) -> None:
    cluster = run(Break(2, at=at), FailWorker(1, at=5.0), coordinator=coordinator)

    assert ["succeeded"] * 3 == kinds(cluster)


# What comes while an agent is slow to take what came before.


@contextmanager
def slow_agents(seconds: float) -> Iterator[None]:
    """Make each agent read a message only *seconds* after its arrival."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(member, "TAKEN", seconds)
        yield


@BOTH
def test_untaken_ranks_are_void_once_their_node_is_given_up(coordinator: str) -> None:
    """It slept from before the round to after its loss, and reads of both at once."""
    with slow_agents(0.05):
        cluster = run(Suspend(2, at=1.0, seconds=16.0), rules=evolve(RULES, max_nodes=4), coordinator=coordinator)

    assert ["succeeded"] * 3 == kinds(cluster)


@BOTH
@pytest.mark.parametrize("seconds", [4.2, 4.7, 3.8, 5.0])
def test_messages_for_ranks_that_an_agent_gave_up_are_not_delivered(coordinator: str, seconds: float) -> None:
    """It is cut off while others end its round, and asks anew when it comes back."""
    with slow_agents(0.3):
        cut = Cut(2, at=5.0, seconds=seconds)
        cluster = run(cut, FailWorker(1, at=6.0), Stubborn(2, 0.0, 1.0), coordinator=coordinator)

    assert ["succeeded"] * 3 == kinds(cluster)


# Hosts and greetings.


@BOTH
def test_node_that_cannot_describe_itself_ends_alone(coordinator: str) -> None:
    start = NodeClient.start

    def describe() -> Descriptor:
        raise StartError("no port is free")

    def begin(self: NodeClient) -> None:
        if self.name.startswith("n2/"):
            self.describe = describe
        start(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NodeClient, "start", begin)
        cluster = run(coordinator=coordinator)

    (end,) = [node.outcome for node in cluster.members if node.number == 2]
    assert ["succeeded", "succeeded", "lost"] == kinds(cluster)
    assert end is not None
    assert "no port is free" in end.why


def test_all_nodes_end_when_the_coordinator_breaks_but_its_store_lives() -> None:
    cluster = CheckedCluster(RULES, work=600.0)

    def stop() -> None:
        (host,) = cluster._hosts.values()
        assert isinstance(host, Host)
        host.stop("it broke")

    cluster.timeline.at(5.0, None, stop)
    cluster.run()

    assert ["lost"] * 3 == kinds(cluster)
    assert cluster.now < 100.0


@BOTH
@pytest.mark.parametrize("broken", [False, True])
def test_invalid_greeting_is_checked_for_three_seconds_of_a_connection(coordinator: str, broken: bool) -> None:
    """A coordinator renews its own: somebody destroys it again and again."""
    cluster = CheckedCluster(RULES, 2, FaultPlan([Join(2, at=10.03), *([Break(2, at=12.0)] * broken)]), coordinator)

    def destroy() -> None:
        if cluster.store is not None:
            cluster.store.values["hello"] = b"{}"

    for turn in range(10_000):
        cluster.timeline.at(9.0 + turn / 1000, None, destroy)
    cluster.run()

    (end,) = [node.outcome for node in cluster.members if node.number == 2]
    assert ["succeeded", "succeeded", "lost"] == kinds(cluster)
    assert end is not None
    assert (15.0 if broken else 13.0) < end.at < (15.3 if broken else 13.3)


@BOTH
@pytest.mark.parametrize("lies", [None, b"", b"{}", "a seat", "another"])
@pytest.mark.parametrize("token", [TOKEN, ""], ids=["signed", "open"])
def test_altered_root_cause_is_reported_in_brief(coordinator: str, lies: str | bytes | None, token: str) -> None:
    fault = FailWorker(1, at=5.0, text=20_000)
    cluster = CheckedCluster(evolve(RULES, max_restarts=0), 3, FaultPlan([fault, NOTHING]), coordinator, token=token)
    others = {
        "a seat": Succeeded("n0/1", 0),
        "another": Failed("n0/1", 0, (FailureNote(0, 0, 1, 1, "another"),)),
    }

    def lie() -> None:
        store = cluster.store
        if store is not None and CAUSE in store.values:
            if lies is None:
                del store.values[CAUSE]
            else:
                store.values[CAUSE] = lies if isinstance(lies, bytes) else encode(others[lies])

    for turn in range(5000):
        cluster.timeline.at(5.0 + turn / 10_000, None, lie)
    cluster.run()

    finals = [node.member.session.final for node in cluster.members]
    assert ["failed"] * 3 == kinds(cluster)
    assert all(final and final.root and 0 < len(final.root.traceback) < 1000 for final in finals)
