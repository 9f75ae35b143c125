"""When a round starts and ends and why, and how the job ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import pytest
from attrs import evolve

from elasticlib.errors import ConfigError
from elasticlib.rendezvous.coordinator import _places
from elasticlib.rendezvous.coordinator._coordinator import abandon, given_up, mailboxes, next_loss, read, status, step
from elasticlib.rendezvous.coordinator._node_liveness import REMEMBERED
from elasticlib.rendezvous.coordinator._state import (
    Action,
    ClearStore,
    Event,
    Heartbeats,
    JobState,
    MessageReceived,
    Rules,
    Send,
    Tick,
    WakeAt,
)
from elasticlib.rendezvous.protocol._exchange import mailbox_name
from elasticlib.rendezvous.protocol._messages import (
    Acknowledgement,
    Close,
    Descriptor,
    Failed,
    FailureNote,
    Final,
    GivenUp,
    HeartbeatsRead,
    Join,
    Leave,
    Notice,
    RankAssignment,
    Report,
    RoundEnd,
    Stopped,
    Succeeded,
    Terms,
)


class Desk:
    """A coordinator at work: hands in messages and heartbeats, keeps what each mailbox was told."""

    def __init__(self, rules: Rules) -> None:
        self.state = JobState(rules)
        self.now = 0.0
        self.envelopes: Counter[str] = Counter()
        self.mailboxes: dict[str, list[Notice | GivenUp]] = {}
        self.actions: tuple[Action, ...] = ()
        self.heartbeats: Counter[str] = Counter()
        self.tick()

    def tick(self, seconds: float = 0.0) -> Desk:
        self.now += seconds
        self._step(Tick())
        return self

    def receive(self, *reports: Report) -> str:
        """The mailbox that the last report opens, if it is a Join."""
        mailbox = ""
        for report in reports:
            self.envelopes[report.node] += 1
            mailbox = mailbox_name(report.node, self.envelopes[report.node])
            self._step(MessageReceived(self.envelopes[report.node], report))
        return mailbox

    def join(self, *nodes: str) -> list[str]:
        return [self.receive(Join(node, offer())) for node in nodes]

    def node_heartbeat(self, *silent: str, seconds: float = 0.0, interval: float = 3.0) -> Desk:
        """
        Heartbeats are read each *interval* for *seconds*, and once more, or until somebody is told something.

        All nodes but the *silent* ones live.
        """
        for _ in range(1 + int(seconds / interval)):
            self.now += interval
            self.heartbeats.update(mailbox for node, mailbox in mailboxes(self.state).items() if node not in silent)
            self._step(Heartbeats(dict(self.heartbeats)))
            if self.sent():
                break
        return self

    def sent(self) -> dict[str, Notice | GivenUp]:
        """Return the notices of the last step, by node."""
        return {action.node: action.notice for action in self.actions if isinstance(action, Send)}

    def _step(self, event: Event) -> None:
        self.state, self.actions = step(self.state, event, self.now)
        for action in self.actions:
            if isinstance(action, Send):
                self.mailboxes.setdefault(action.mailbox, []).append(action.notice)


Step: TypeAlias = "Report | str | float | Callable[[Desk], object]"
"""A report, a node that joins, seconds that pass, or anything else that happens to a desk."""
Begin: TypeAlias = Callable[[], Desk]


def after(desk: Desk, *steps: Step) -> Desk:
    for each in steps:
        match each:
            case str():
                desk.join(each)
            case float():
                desk.tick(each)
            case _ if callable(each):
                each(desk)
            case _:
                desk.receive(each)
    return desk


def silent(*nodes: str, seconds: float = 12.0) -> Step:
    """Long enough for these nodes to be lost."""
    return lambda desk: desk.node_heartbeat(*nodes, seconds=seconds)


def gap(node: str, numbers: int = 1_000_000) -> Step:
    """The next message of the node has a number that is so much higher."""
    return lambda desk: desk.envelopes.update({node: numbers})


def offer(port: int = 1, index: int | None = None) -> Descriptor:
    return Descriptor(2, "trainer", ("10.0.0.1",), port, index)


def note(rank: int, *, age: float = 0.0, secondary: bool = False, message: str = "") -> FailureNote:
    return FailureNote(rank, rank, 100, 1, message, secondary=secondary, age=age)


def running(
    *nodes: str, spare_room: int = 0, max_restarts: int = 3, min_nodes: int | None = None, heartbeat: float = 0.0
) -> Desk:
    size = len(nodes)
    rules = Rules(
        min_nodes or size, size + spare_room, max_restarts, last_call=30.0, join_timeout=600.0, heartbeat=heartbeat
    )
    desk = Desk(rules)
    desk.join(*nodes)
    if spare_room:
        desk.tick(30.0)
    assert desk.state.round is not None
    return desk


def gang(*nodes: str) -> Desk:
    desk = Desk(Rules(len(nodes), len(nodes), join_timeout=0.0))
    desk.join(*nodes)
    assert desk.state.round is not None
    return desk


def watched(*nodes: str, min_nodes: int | None = None, max_restarts: int = 3) -> Desk:
    """All nodes run, and were seen at second 0."""
    desk = Desk(Rules(min_nodes or len(nodes), len(nodes), max_restarts, heartbeat=10.0))
    desk._step(Heartbeats({}))
    desk.join(*nodes)
    assert desk.state.round is not None
    return desk


def placed(*nodes: str) -> Desk:
    desk = Desk(Rules(len(nodes), len(nodes), fixed_places=True))
    for index, node in enumerate(nodes):
        desk.receive(Join(node, offer(index=index)))
    assert desk.state.round is not None
    return desk


def crash_loop(times: int, *, min_nodes: int = 2, lost: bool = True) -> Desk:
    """Agents of one host went *times* times, a new one came each time; the last one runs beside node a."""
    desk = Desk(Rules(min_nodes, 3, 1, heartbeat=10.0, wait_for="min"))
    desk.node_heartbeat()
    desk.join("a")
    for number in range(1, times + 2):
        desk.join(f"host/{number}")
        if min_nodes == 1:  # who came first runs already
            desk.join("a")
        if number <= times:
            desk.receive(Leave(f"host/{number}", "its agent died", lost=lost))
            desk.join("a")
    assert desk.state.round is not None and desk.state.round.end is None
    return desk


def seat_of(notice: Notice) -> RankAssignment:
    assert isinstance(notice, RankAssignment)
    return notice


def end_of(notice: Notice) -> RoundEnd:
    assert isinstance(notice, RoundEnd)
    return notice


def final_of(desk: Desk) -> Final:
    assert desk.state.final is not None
    return desk.state.final


# --- rules


@pytest.mark.parametrize(
    "rules",
    [
        {"min_nodes": 0},
        {"min_nodes": 3, "max_nodes": 2},
        {"max_restarts": -1},
        {"last_call": -1.0},
        {"join_timeout": -1.0},
        {"last_call": float("nan")},
        {"heartbeat": float("inf")},
        {"wait_for": "all"},
        {"min_nodes": 1, "max_nodes": 2, "fixed_places": True},
    ],
)
def test_rules_that_cannot_be_kept_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=list(rules)[-1]):
        Rules(**rules)


# --- how a round starts


def test_one_node_is_seated_at_once() -> None:
    desk = Desk(Rules())

    desk.join("a")

    assignment = seat_of(desk.sent()["a"])
    assert (0, 0, 1, 2) == (assignment.round, assignment.group_rank, assignment.group_world_size, assignment.world_size)
    assert assignment.why == "all 1 nodes have joined"


FAILED = (Failed("a", 0, (note(0),)), Stopped("a", 0, ()), Stopped("b", 0, ()))
DIED = Leave("b", "its agent died", lost=True)
KILLED_SIDECAR = Join("b", offer(), after="its sidecar was killed")
RANKS: dict[str, tuple[Begin, tuple[Step, ...], tuple[Step, ...], dict[str, int]]] = {
    "as many as there may be are there": (lambda: Desk(Rules(1, 2)), ("b",), ("a",), {"a": 0, "b": 1}),
    "a spare takes ranks that become free": (
        lambda: running("a", "b"),
        ("c",),
        (Leave("a", "SIGTERM"), "b"),
        {"b": 0, "c": 1},
    ),
    "a spare does so with a join time of 0, too": (
        lambda: gang("a", "b"),
        ("c",),
        (Leave("b", "SIGTERM"), "a"),
        {"a": 0, "c": 1},
    ),
    "a returning node goes before a spare": (lambda: running("a", "b"), ("c", *FAILED, "a"), ("b",), {"a": 0, "b": 1}),
    "no short quiet period leaves a returning node behind": (
        lambda: after(Desk(Rules(1, 3, last_call=0.0)), "a", "b", "a"),
        (Stopped("a", 1, ()), Stopped("b", 1, ()), "a", 1.0),
        ("b",),
        {"a": 0, "b": 1},
    ),
    "members keep their order": (lambda: running("b", "c", spare_room=1), ("a", "c"), ("b",), {"b": 0, "c": 1, "a": 2}),
    "a worker of the last round may run": (
        lambda: running("a", "b", min_nodes=1),
        (Leave("b", "SIGTERM", round=0), "a", 10_000.0),
        (Stopped("b", 0, ()),),
        {"a": 0},
    ),
    "the agent of a leaving node dies, and its workers with it": (
        lambda: running("a", "b", min_nodes=1),
        (Leave("b", "SIGTERM", round=0), "a"),
        (DIED,),
        {"a": 0},
    ),
    "the only agent died, and a new node comes": (lambda: running("b"), (), (DIED, "c"), {"c": 0}),
    "a node leaves before the start": (
        lambda: Desk(Rules(3, 3)),
        (),
        ("a", "b", Leave("a", "SIGINT"), "c", "d"),
        {"b": 0, "c": 1, "d": 2},
    ),
    "survivors of a loss": (lambda: watched("a", "b", "c", min_nodes=2), (silent("b"), "c"), ("a",), {"a": 0, "c": 1}),
    "a spare takes the ranks of a lost node at once": (
        lambda: watched("a", "b"),
        ("c", "d"),
        (silent("b"), "a"),
        {"a": 0, "c": 1},
    ),
    "a lost node that comes back has no claim before spares": (
        lambda: watched("a", "b"),
        ("c", silent("b"), "b"),
        ("a",),
        {"a": 0, "c": 1},
    ),
    "nodes that were all lost come back": (
        lambda: watched("a", "b"),
        (silent("a", "b"), "b"),
        ("a",),
        {"a": 0, "b": 1},
    ),
    "a lost node counts as stopped": (
        lambda: watched("a", "b", min_nodes=1),
        (FAILED[0], "a"),
        (silent("b"), silent("b")),
        {"a": 0},
    ),
    "a silent node that had succeeded is lost after the round": (
        lambda: watched("a", "b", min_nodes=1),
        (Succeeded("a", 0), silent("a", seconds=30.0), Stopped("b", 0, ()), "b"),
        (silent("a", seconds=0.0),),
        {"b": 0},
    ),
    "the place of a node that left is free": (
        lambda: placed("a", "b"),
        (),
        (Leave("a", "SIGTERM"), Join("b", offer(index=1)), Join("c", offer(index=0))),
        {"c": 0, "b": 1},
    ),
    "a node asks again for its own place": (
        lambda: Desk(Rules(2, 2, fixed_places=True)),
        (Join("a", offer(index=1)), Join("a", offer(index=1))),
        (Join("b", offer(index=0)),),
        {"b": 0, "a": 1},
    ),
}


@pytest.mark.parametrize(("begin", "before", "then", "ranks"), RANKS.values(), ids=RANKS)
def test_ranks_are_given_once_it_is_time(
    begin: Begin, before: tuple[Step, ...], then: tuple[Step, ...], ranks: dict[str, int]
) -> None:
    """After *before* no node is told anything; the last step of *then* gives the ranks."""
    desk = after(begin(), *before)
    assert not (before and desk.sent())

    after(desk, *then)

    assert desk.state.final is None
    assert ranks == {
        node: notice.group_rank for node, notice in desk.sent().items() if isinstance(notice, RankAssignment)
    }


@pytest.mark.parametrize(
    ("begin", "steps", "wakes", "why"),
    [
        (lambda: Desk(Rules(2, 2)), ("a",), 600.0, "joined in 600 s (a)"),
        (lambda: Desk(Rules(2, 2, join_timeout=0.0)), ("a",), 600.0, "joined in 600 s (a)"),
        (lambda: running("a", "b"), (*FAILED[::2], "a"), 1.0, "joined in 600 s (a); missing of round 0: b"),
    ],
    ids=["at the start", "at the start with a join time of 0", "after a failure"],
)
def test_too_few_nodes_end_the_job_after_the_join_time(
    begin: Begin, steps: tuple[Step, ...], wakes: float, why: str
) -> None:
    desk = after(begin(), *steps)
    assert [wakes] == [action.when for action in desk.actions if isinstance(action, WakeAt)]

    desk.tick(599.0)
    assert desk.state.final is None
    desk.tick(1.0)

    assert Final(False, f"1 of at least 2 nodes {why}", kind="timeout") == desk.sent()["a"]


def test_between_min_and_max_the_quiet_period_counts_from_the_last_join() -> None:
    desk = Desk(Rules(1, 3, last_call=30.0))
    desk.join("a")
    desk.tick(20.0).join("b")

    assert (WakeAt(50.0),) == desk.actions
    assert not desk.tick(29.0).sent()
    assert {"a", "b"} == desk.tick(1.0).sent().keys()


def test_node_of_another_job_with_the_same_id_is_refused() -> None:
    desk = running("a", spare_room=1)
    first = Descriptor(1, "trainer", ("10.0.0.1",), 1, work="train.py")
    desk.receive(Join("b", first))
    desk.receive(Join("a", first))
    assignments = {node: seat_of(notice) for node, notice in desk.sent().items()}
    mailbox = desk.receive(Join("c", Descriptor(1, "trainer", ("10.0.0.2",), 1, work="other.py")))
    reader = desk.receive(Join("d", Descriptor(1, "reader", ("10.0.0.3",), 1, work="reader.py")))

    (final,) = desk.mailboxes[mailbox]
    assert {"a", "b"} == assignments.keys()
    assert isinstance(final, Final)
    assert "refused" == final.kind
    assert "node c runs 'other.py', but node " in final.why
    assert "give each its own id (--rdzv-id)" in final.why
    assert reader not in desk.mailboxes


def test_enough_nodes_start_when_the_join_time_ends_first() -> None:
    desk = Desk(Rules(1, 2, last_call=1000.0, join_timeout=600.0))
    desk.join("a")

    assert "a" in desk.tick(600.0).sent()


def test_a_node_that_joins_twice_gets_its_ranks_in_the_newer_mailbox() -> None:
    desk = Desk(Rules(2, 2))
    old, new, _ = desk.join("a", "a", "b")

    assert old not in desk.mailboxes
    assert 0 == seat_of(desk.mailboxes[new][0]).group_rank


def test_after_a_round_all_who_stayed_are_seated_without_a_quiet_period() -> None:
    desk = running("a", "b", spare_room=2)
    desk.receive(Failed("a", 0, (note(0),)))
    desk.join("b", "a")

    assert {"a", "b"} == desk.sent().keys()
    assert seat_of(desk.sent()["a"]).why == "all remaining nodes of round 0 have returned, 2 have joined"


def test_node_that_does_not_return_in_the_join_time_is_left_behind() -> None:
    desk = running("a", "b", min_nodes=1)
    desk.receive(Stopped("a", 0, ()), Stopped("b", 0, ()))
    desk.join("a")

    assert (WakeAt(600.0),) == desk.actions
    desk.tick(600.0)
    assert seat_of(desk.sent()["a"]).why == "1 nodes have joined; b did not return in 600 s"


def test_join_time_begins_when_the_last_worker_has_ended() -> None:
    desk = running("a", "b")
    desk.receive(Leave("b", "SIGTERM", round=0))
    desk.join("a")
    desk.tick(1000.0).receive(Stopped("b", 0, ()))

    assert (WakeAt(1600.0),) == desk.actions
    desk.tick(600.0)
    assert final_of(desk).why == "1 of at least 2 nodes joined in 600 s (a); missing of round 0: b (left: SIGTERM)"


# --- failures


def test_a_failure_ends_the_round_for_all_and_spends_one_restart() -> None:
    desk = running("a", "b", max_restarts=3)
    desk.receive(Failed("b", 0, (note(2, message="ValueError: bad\nmore"),)))

    why = "rank 2 on node b ended with exit status 1 (ValueError: bad)"
    assert dict.fromkeys("ab", RoundEnd(0, why, True, decided=False, failed=True)) == desk.sent()
    desk.receive(Stopped("a", 0, ()), Stopped("b", 0, (note(2, message="ValueError: bad\nmore"),)))
    assert 1 == desk.state.restarts


OF_STORE = FailureNote(0, 0, 7, -9, "the process that hosts the store (pid 7) was ended by SIGKILL", process="store")


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (FailureNote(1, 1, 100, -9), "rank 1 on node a was ended by SIGKILL (signal 9)"),
        (FailureNote(1, 1, 100, -40), "rank 1 on node a was ended by signal 40"),
        (OF_STORE, f"{OF_STORE.message} on node a"),
    ],
    ids=["a signal", "a signal without a name", "a helper process"],
)
@pytest.mark.parametrize("kind", [Failed, Stopped])
def test_a_failure_is_named(kind: type[Failed] | type[Stopped], failure: FailureNote, why: str) -> None:
    desk = running("a")
    desk.receive(kind("a", 0, (failure,)))

    assert end_of(desk.sent()["a"]).why.startswith(why)
    assert end_of(desk.sent()["a"]).restart


def test_a_failure_without_notes_is_a_failure() -> None:
    desk = running("a", max_restarts=0)
    desk.receive(Failed("a", 0, ()), Stopped("a", 0, ()))

    assert Final(False, "workers of node a failed; no restarts are allowed") == desk.sent()["a"]


def test_the_next_seats_carry_the_restarts_that_the_job_has_used() -> None:
    desk = running("a", max_restarts=3)
    desk.receive(Failed("a", 0, (note(0),)))
    desk.join("a")

    assignment = seat_of(desk.sent()["a"])
    assert (1, 1, 3) == (assignment.round, assignment.restart_count, assignment.max_restarts)
    assert "rank 0 on node a ended with exit status 1; restart 1 of 3" == assignment.cause


def test_further_failures_of_an_ended_round_spend_nothing() -> None:
    desk = running("a", "b", max_restarts=3)
    desk.receive(Failed("a", 0, (note(0),)), Failed("b", 0, (note(2),)), Stopped("b", 0, (note(2), note(3))))
    assert not desk.sent()

    desk.receive(Stopped("a", 0, (note(0), note(1))))

    assert 1 == desk.state.restarts
    assert not desk.sent()


def test_without_a_restart_left_the_end_waits_until_all_have_stopped() -> None:
    desk = running("a", "b", max_restarts=0)
    desk.receive(Failed("a", 0, (note(0),)))

    assert not end_of(desk.sent()["b"]).restart
    desk.receive(Stopped("a", 0, (note(0),)))
    assert not desk.sent()
    desk.receive(Stopped("b", 0, ()))
    why = "rank 0 on node a ended with exit status 1; no restarts are allowed"
    assert {"a": Final(False, why, "a", note(0)), "b": Final(False, why, "a", note(0))} == desk.sent()


@pytest.mark.parametrize("report", [Succeeded("b", 0), Leave("b", "SIGTERM"), Stopped("b", 0, ())])
def test_the_end_does_not_wait_for_nodes_without_workers(report: Report) -> None:
    desk = running("a", "b", max_restarts=0)
    desk.receive(Failed("a", 0, (note(0),)), Stopped("a", 0, ()), report)

    assert "a" == final_of(desk).root_node


def test_a_failure_after_another_nodes_success_restarts_everybody() -> None:
    desk = running("a", "b")
    desk.receive(Succeeded("a", 0), Failed("b", 0, (note(2),)))

    assert {"a", "b"} == desk.sent().keys()
    assert end_of(desk.sent()["a"]).restart


@pytest.mark.parametrize(
    ("first", "second", "root"),
    [
        (Failed("a", 0, (note(0),)), Stopped("b", 0, (note(2, age=5.0),)), "b"),
        (Failed("a", 0, (note(0, age=5.0),)), Stopped("b", 0, (note(2),)), "a"),
        (Failed("a", 0, (note(0, age=5.0, secondary=True),)), Stopped("b", 0, (note(2),)), "b"),
        (Failed("a", 0, (note(0, secondary=True),)), Stopped("b", 0, (note(2, age=1.0, secondary=True),)), "b"),
        (Failed("a", 0, (note(0),)), Stopped("b", 0, (note(2),)), "a"),
    ],
)
def test_the_root_cause_is_the_earliest_primary_failure_anywhere(first: Report, second: Report, root: str) -> None:
    desk = running("a", "b", max_restarts=0)
    desk.receive(first)
    desk.tick(0.5).receive(second, Stopped("a", 0, ()))

    assert root == final_of(desk).root_node


def test_a_later_note_of_a_failure_completes_it_and_keeps_its_time() -> None:
    desk = running("a", "b", max_restarts=0)
    desk.receive(Failed("a", 0, (note(0),)))
    desk.tick(1.0).receive(Failed("b", 0, (note(2, age=0.5),)), Stopped("b", 0, ()))
    desk.receive(Stopped("a", 0, (note(0, message="KeyError"),)))

    assert ("a", note(0, message="KeyError")) == (final_of(desk).root_node, final_of(desk).root)


# --- success


SUCCESS: dict[str, tuple[Begin, tuple[Step, ...], tuple[Step, ...], str]] = {
    "of all nodes": (lambda: running("a", "b"), (Succeeded("b", 0),), (Succeeded("a", 0),), "ab"),
    "with a spare": (lambda: running("a"), ("b",), (Succeeded("a", 0),), "ab"),
    "though an arrival had ended the round": (
        lambda: running("a", "b", spare_room=1),
        (),
        ("c", Succeeded("a", 0), Succeeded("b", 0)),
        "abc",
    ),
    "for which an arrival waits": (
        lambda: running("a", "b", spare_room=1),
        (Succeeded("a", 0), "c"),
        (Succeeded("b", 0),),
        "abc",
    ),
    "of a node that has left since": (
        lambda: running("a", "b"),
        (),
        (Succeeded("a", 0), Leave("a", "done"), Succeeded("b", 0)),
        "b",
    ),
    "of a node that is lost since": (
        lambda: watched("a", "b", max_restarts=0),
        (),
        (Succeeded("a", 0), silent("b"), Succeeded("b", 0)),
        "a",
    ),
    "that a lost store does not undo": (
        lambda: running("a", "b"),
        (),
        (lambda desk: lost_store(desk), Succeeded("b", 0)),
        "ab",
    ),
}


@pytest.mark.parametrize(("begin", "before", "then", "nodes"), SUCCESS.values(), ids=SUCCESS)
def test_success_of_all_nodes_ends_the_job(
    begin: Begin, before: tuple[Step, ...], then: tuple[Step, ...], nodes: str
) -> None:
    desk = after(begin(), *before)
    assert not (before and desk.sent())
    size = len(desk.state.round.entries) if desk.state.round else 0

    after(desk, *then)

    final = Final(True, f"all {size} nodes succeeded in round 0", round=0)
    assert dict.fromkeys(nodes, final) == desk.sent()
    assert 0 == desk.state.restarts


@pytest.mark.parametrize(
    ("begin", "steps", "node", "is_late"),
    [
        (lambda: running("a", "b"), (Succeeded("a", 0), Succeeded("b", 0)), "b", False),
        (lambda: running("a"), ("b", Succeeded("a", 0)), "b", False),
        (lambda: running("a"), (Succeeded("a", 0),), "b", True),
        (lambda: running("a"), (Close("b", "enough"),), "b", True),
        (lambda: running("a"), (gap("b", 1),), "b", True),
    ],
    ids=["a member", "a spare", "a late node", "the stranger that closed it", "a node with a missing message"],
)
def test_node_that_requests_ranks_after_the_end_gets_the_outcome(
    begin: Begin, steps: tuple[Step, ...], node: str, is_late: bool
) -> None:
    desk = after(begin(), *steps)
    (mailbox,) = desk.join(node)

    final = final_of(desk)
    if is_late:
        final = Final(False, f"the job had ended: {final.why}", kind="closed")
    assert [final] == desk.mailboxes[mailbox]


# --- who comes and goes


LEFT = {
    "a": Final(False, "node a left: SIGTERM", kind="left"),
    "b": RoundEnd(0, "node a left: SIGTERM", True),
}
CLOSED = Final(False, "node b closed the job: enough", kind="closed")
MISSING = Final(False, "message 2 of node b is missing: 3 came next", kind="closed")
SIDECAR = {"a": RoundEnd(0, "node b joins again: its sidecar was killed", True)}
FREE: dict[str, tuple[Begin, tuple[Step, ...], dict[str, Notice]]] = {
    "a node joins": (lambda: running("a", spare_room=1), ("b",), {"a": RoundEnd(0, "node b joins", True)}),
    "a node joins with the same terms": (
        lambda: running("a", spare_room=1),
        (Join("b", offer(), Terms(1, 2, 3)),),
        {"a": RoundEnd(0, "node b joins", True)},
    ),
    "a lost node comes back": (
        lambda: watched("a", "b", min_nodes=1),
        (silent("b"), "a", "b"),
        {"a": RoundEnd(1, "node b joins", True)},
    ),
    "a member joins again": (
        lambda: running("a", "b"),
        (Succeeded("a", 0), "b"),
        {"a": RoundEnd(0, "node b joins again", True)},
    ),
    "a node that lost its sidecar joins again": (lambda: running("a", "b"), (gap("b"), KILLED_SIDECAR), SIDECAR),
    "success of another round, and of a stranger": (
        lambda: running("a", "b"),
        (Join("c", offer(), succeeded=0), evolve(KILLED_SIDECAR, succeeded=7)),
        SIDECAR,
    ),
    "workers stop without failing": (
        lambda: running("a"),
        (Stopped("a", 0, ()),),
        {"a": RoundEnd(0, "node a stopped its workers", True)},
    ),
    "a node leaves": (lambda: running("a", "b", min_nodes=1), (Leave("a", "SIGTERM"),), LEFT),
    "a node that lost its sidecar leaves": (
        lambda: running("a", "b", min_nodes=1),
        (gap("a"), Leave("a", "SIGTERM", 0)),
        LEFT,
    ),
    "a spare leaves": (lambda: running("b"), ("a", Leave("a", "SIGTERM")), {"a": LEFT["a"]}),
    "a node leaves before the start": (lambda: Desk(Rules(3, 3)), ("a", "b", Leave("a", "SIGTERM")), {"a": LEFT["a"]}),
    "a lost node leaves": (
        lambda: watched("a", "b", min_nodes=1),
        (silent("a"), Leave("a", "SIGTERM")),
        {"a": LEFT["a"]},
    ),
    "a node that has succeeded leaves": (
        lambda: running("a", "b"),
        (Succeeded("a", 0), Leave("a", "SIGTERM")),
        {"a": LEFT["a"]},
    ),
    "a failure of a node that has succeeded": (lambda: running("a", "b"), (Succeeded("a", 0), FAILED[0]), {}),
    "a spare that falls silent": (lambda: watched("a"), ("b", silent("b")), {"b": GivenUp("no heartbeat for 10 s")}),
    "silence without a heartbeat time": (lambda: running("a", "b"), (silent("a", "b", seconds=1000.0),), {}),
    "a node closes the job": (lambda: running("a", "b"), (Close("b", "enough"),), {"a": CLOSED, "b": CLOSED}),
    "a person stops the job on a node that leaves": (
        lambda: running("a", "b"),
        (Leave("b", "stopped by hand", 0, stops=True),),
        {"a": Final(False, "stopped by hand", kind="stopped"), "b": Final(False, "stopped by hand", kind="stopped")},
    ),
    "a person stops the job": (
        lambda: running("a", "b"),
        (Close("b", "stopped by hand", stops=True),),
        {"a": Final(False, "stopped by hand", kind="stopped"), "b": Final(False, "stopped by hand", kind="stopped")},
    ),
    "a stranger closes the job": (lambda: running("a"), (Close("b", "enough"),), {"a": CLOSED}),
    "a message is missing": (
        lambda: running("a", "b"),
        (gap("b", 1), Stopped("b", 0, ())),
        {"a": MISSING, "b": MISSING},
    ),
}


@pytest.mark.parametrize(("begin", "steps", "notices"), FREE.values(), ids=FREE)
def test_event_that_is_not_a_failure_spends_no_restart(
    begin: Begin, steps: tuple[Step, ...], notices: dict[str, Notice]
) -> None:
    desk = after(begin(), *steps)

    assert notices == desk.sent()
    assert 0 == desk.state.restarts


@pytest.mark.parametrize("before", [(), (Stopped("a", 0, ()),), (Failed("a", 0, (note(0),)),)])
def test_a_job_that_everybody_left_is_over(before: tuple[Report, ...]) -> None:
    desk = running("a")
    desk.receive(*before)
    desk.receive(Leave("a", "SIGTERM"))

    assert {"a": Final(False, "node a left: SIGTERM", kind="left")} == desk.sent()
    assert final_of(desk).why == "node a left: SIGTERM"


# --- what changes nothing


STALE: list[Report] = [
    Acknowledgement("a"),
    Acknowledgement("stranger"),
    Failed("a", 0, (note(0),)),
    Stopped("a", 0, (note(0),)),
    Succeeded("a", 0),
    Failed("a", 2, (note(0),)),
    Succeeded("stranger", 1),
    Leave("stranger", "SIGTERM"),
]


@pytest.mark.parametrize("report", STALE)
def test_reports_of_other_rounds_and_strangers_change_nothing(report: Report) -> None:
    desk = running("a")
    desk.receive(Failed("a", 0, (note(0),)))
    desk.join("a")
    before = desk.state
    desk.receive(report)

    assert (before.round, before.restarts, before.waiting) == (
        desk.state.round,
        desk.state.restarts,
        desk.state.waiting,
    )
    assert not desk.actions


def test_repeated_report_changes_nothing() -> None:
    desk = running("a", spare_room=1)
    before = desk.state
    after, actions = step(before, MessageReceived(1, Join("a", offer(2))), desk.now)

    assert (before, ()) == (after, actions)


def lost_store(desk: Desk) -> None:
    """Node a, which is done, tells that the store which b uses is gone."""
    of_store = evolve(note(0), message="the store is gone", process="worker store")
    desk.receive(Succeeded("a", 0), Failed("a", 0, (of_store,)))


def test_store_lost_by_a_node_that_succeeded_is_the_cause_of_what_follows() -> None:
    desk = running("a", "b", max_restarts=1)
    lost_store(desk)
    notices = desk.sent()
    desk.receive(Stopped("b", 0, (evolve(note(1), secondary=True),)))

    assert {"a", "b"} == notices.keys()
    assert "the store is gone" in desk.state.round.end.why
    assert 1 == desk.state.restarts


def test_nothing_happens_after_the_end() -> None:
    desk = running("a")
    desk.receive(Succeeded("a", 0))
    before = final_of(desk)
    desk.receive(Failed("a", 0, (note(0),)), Leave("a", "SIGTERM"), Stopped("a", 0, ()))
    desk.tick(10_000.0)

    assert before is final_of(desk)
    assert not desk.actions


def test_abandoned_job_notifies_every_node_once() -> None:
    desk = running("a")
    desk.join("b")
    state, actions = abandon(desk.state, "the store is gone")

    final = Final(False, "the store is gone", kind="closed")
    assert {"a": final, "b": final} == {action.node: action.notice for action in actions if isinstance(action, Send)}
    assert (state, ()) == abandon(state, "again")


# --- messages


@pytest.mark.parametrize("others", [(), ("a",)])
def test_success_that_a_node_reports_with_its_rank_request_counts(others: tuple[str, ...]) -> None:
    """The sidecar that it was told to is gone: the round goes on, and ends well with the other nodes."""
    desk = running("b", *others)
    desk.envelopes["b"] += 1_000_000
    desk.receive(Join("b", offer(), after="its sidecar was killed", succeeded=0))
    desk.receive(*(Succeeded(node, 0) for node in others))

    assert {"b", *others} == desk.sent().keys()
    assert (True, 0) == (final_of(desk).succeeded, final_of(desk).round)


def test_nodes_of_the_distant_past_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_places, "NAMES", 8)
    desk = running("a")
    for number in range(_places.NAMES + 100):
        desk.receive(Join(f"b{number}", offer()), Leave(f"b{number}", "SIGTERM"))

    assert desk.state.has_forgotten
    assert {"a", *(f"b{number}" for number in range(99, _places.NAMES + 100))} == desk.state.received.keys()


def test_a_node_that_is_forgotten_and_lives_is_taken_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on with the numbers of its messages, and none of those before was destroyed."""
    monkeypatch.setattr(_places, "NAMES", 8)
    desk = running("a")
    desk.receive(Join("old", offer()), Leave("old", "SIGTERM"))
    for number in range(40):
        desk.receive(Join(f"b{number}", offer()), Leave(f"b{number}", "SIGTERM"))
    assert "old" not in desk.state.received
    desk.join("old")

    assert desk.state.final is None
    assert 3 == desk.state.received["old"]


@pytest.mark.parametrize("terms", [None, Terms(9, 9, 9)], ids=["spares", "refused"])
def test_names_of_nodes_that_join_and_leave_in_one_round_are_bounded(
    terms: Terms | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_places, "NAMES", 8)
    desk = running("a")
    for number in range(40):
        desk.receive(Join(f"b{number}", offer(), terms), Leave(f"b{number}", "SIGTERM"), Acknowledgement(f"b{number}"))
        assert len(desk.state.received) <= 8 + 4

    assert desk.state.round is not None and desk.state.round.number == 0
    assert {"a", "b39"} <= desk.state.received.keys()


# --- for whom a round waits


def test_waiting_for_min_starts_with_the_least_number() -> None:
    desk = Desk(Rules(2, 4, wait_for="min"))
    desk.join("a", "b")

    assert seat_of(desk.sent()["a"]).why == "2 nodes have joined, 2 are enough"


def test_waiting_for_max_waits_for_the_whole_join_time() -> None:
    desk = Desk(Rules(1, 3, wait_for="max", last_call=1.0, join_timeout=600.0))
    desk.join("a", "b")

    assert (WakeAt(600.0),) == desk.actions
    assert not desk.tick(599.0).sent()
    assert seat_of(desk.tick(1.0).sent()["a"]).why == "2 of 3 nodes joined in 600 s"


@pytest.mark.parametrize("wait_for", ["quiet", "min", "max"])
def test_those_who_stayed_wait_for_nobody_else(wait_for: str) -> None:
    desk = Desk(Rules(2, 4, wait_for=wait_for, join_timeout=600.0))
    desk.join("a", "b", "c")
    desk.tick(600.0)
    if wait_for == "min":
        desk.join("a", "b")
    assert desk.state.round is not None
    desk.receive(Leave("c", "SIGTERM"))
    desk.join("a")

    assert not desk.sent()
    desk.join("b")
    assert {"a", "b"} == desk.sent().keys()


def test_with_a_join_time_of_0_the_job_ends_once_too_few_are_left() -> None:
    desk = gang("a", "b", "c")
    desk.receive(Leave("c", "SIGTERM"))
    desk.join("a", "b")

    why = (
        "2 of at least 3 nodes are left (a, b); missing of round 0: c (left: SIGTERM); "
        "with join_timeout=0 no node is replaced"
    )
    assert ("timeout", why) == (final_of(desk).kind, final_of(desk).why)


@pytest.mark.parametrize(("hosts", "ends"), [(("a", "b", "c", "d"), False), (("a", "b", "c"), True)])
def test_with_a_join_time_of_0_an_engines_first_nodes_are_waited_for(hosts: tuple[str, ...], ends: bool) -> None:
    desk = Desk(Rules(3, 4, join_timeout=0.0, wait_for="min", hosts=hosts))
    desk.join("a", "b", "c")
    desk.receive(Leave("c", "SIGTERM"))
    desk.join("a", "b")

    assert ends is (desk.state.final is not None)
    if not ends:
        desk.join("d")
        assert {"a", "b", "d"} == desk.sent().keys()


def test_returning_nodes_are_waited_for_with_a_join_time_of_0() -> None:
    desk = gang("a", "b")
    desk.receive(Failed("a", 0, (note(0),)), Stopped("a", 0, (note(0),)), Stopped("b", 0, ()))
    desk.join("a")
    desk.tick(1.0)

    assert WakeAt(600.0) in desk.actions
    desk.join("b")
    assert {"a", "b"} == desk.sent().keys()


# --- silence


def test_a_node_that_falls_silent_is_lost_after_the_heartbeat_time() -> None:
    desk = watched("a", "b", "c", min_nodes=2)
    desk.node_heartbeat().node_heartbeat("b", seconds=6.0)

    assert not desk.sent()
    desk.node_heartbeat("b")
    end = RoundEnd(0, "node b is lost: no heartbeat for 10 s", True)
    assert {"a": end, "b": GivenUp("no heartbeat for 10 s"), "c": end} == desk.sent()
    assert 0 == desk.state.restarts


def test_a_node_that_never_sent_a_heartbeat_is_silent_since_it_joined() -> None:
    desk = watched("a", "b", min_nodes=1)
    desk.node_heartbeat("b", seconds=6.0)

    assert not desk.sent()
    assert {"a", "b"} == desk.node_heartbeat("b").sent().keys()


def test_node_that_was_given_up_is_notified_once_after_a_heartbeat() -> None:
    desk = watched("a", "b", "c", min_nodes=2)
    desk.node_heartbeat().node_heartbeat("b", seconds=12.0)
    mailbox = given_up(desk.state)["b"]
    assert "b" not in mailboxes(desk.state)

    desk.node_heartbeat()
    assert {} == desk.sent()
    desk.heartbeats[mailbox] += 1
    desk.node_heartbeat()
    assert {"b": GivenUp("no heartbeat for 10 s")} == desk.sent()
    desk.heartbeats[mailbox] += 1
    desk.node_heartbeat()

    assert ({}, {}) == (desk.sent(), given_up(desk.state))


def test_spare_that_was_given_up_is_notified_after_a_heartbeat() -> None:
    desk = after(watched("a"), "b", silent(seconds=0.0), silent("b"))

    desk.heartbeats[given_up(desk.state)["b"]] += 1
    desk.node_heartbeat()

    assert {"b": GivenUp("no heartbeat for 10 s")} == desk.sent()


@pytest.mark.parametrize("steps", [(silent("b"), "b"), (Succeeded("b", 0), silent("b"))], ids=["asks", "succeeded"])
def test_a_node_is_not_given_up_that(steps: tuple[Step, ...]) -> None:
    desk = after(watched("a", "b", "c", min_nodes=2), silent(seconds=0.0), *steps)

    assert {} == given_up(desk.state)


def test_so_many_nodes_that_were_given_up_are_listened_to() -> None:
    names = [f"n{number}" for number in range(REMEMBERED + 10)]
    desk = watched("a", *names, min_nodes=1)

    desk.node_heartbeat(*names, seconds=12.0)

    assert names[10:] == list(given_up(desk.state))


def test_silence_after_success_does_not_end_the_round() -> None:
    desk = watched("a", "b")
    desk.receive(Succeeded("a", 0))
    desk.node_heartbeat("a", seconds=30.0)
    mailbox = desk.state.round.entries["a"].mailbox if desk.state.round else ""
    desk.receive(Succeeded("b", 0))

    assert [RankAssignment, Final] == [type(notice) for notice in desk.mailboxes[mailbox]]
    assert final_of(desk).succeeded


def test_the_end_of_the_job_does_not_wait_for_a_lost_node() -> None:
    desk = watched("a", "b", max_restarts=0)
    desk.receive(Failed("a", 0, (note(0),)), Stopped("a", 0, (note(0),)))
    desk.node_heartbeat("b").node_heartbeat("b", seconds=12.0)

    assert ("a", "failed") == (final_of(desk).root_node, final_of(desk).kind)


def test_node_that_leaves_is_watched_until_its_workers_have_ended() -> None:
    desk = watched("a", "b", min_nodes=1)
    desk.receive(Leave("b", "SIGTERM", round=0))
    desk.join("a")

    assert "b" in mailboxes(desk.state)
    assert {"a"} == desk.node_heartbeat("b", seconds=12.0).sent().keys()
    assert {"a"} == mailboxes(desk.state).keys()


def test_a_coordinator_that_was_paused_blames_nobody() -> None:
    desk = watched("a", "b")
    desk.node_heartbeat()
    desk.node_heartbeat("a", "b", interval=60.0)

    assert not desk.sent()
    assert not desk.node_heartbeat("a", "b", seconds=6.0).sent()
    assert desk.node_heartbeat("b").state.round is not None


def test_read_heartbeats_are_reported_by_group_rank() -> None:
    desk = watched("a", "b", "c", min_nodes=2)
    assert desk.state.round is not None
    assert ["a", "b", "c"] == list(desk.state.round.entries)
    desk.node_heartbeat()
    desk.node_heartbeat("b")

    assert HeartbeatsRead(0, "acabac") == read(desk.state)


def test_heartbeats_of_a_node_that_left_or_waits_do_not_count() -> None:
    desk = watched("a", "b", "c", min_nodes=2).node_heartbeat()
    desk.receive(Failed("a", 0, (note(0),)), Stopped("a", 0, ()), Join("a", offer()), Leave("c", "signal 15", 0))
    desk.receive(Stopped("c", 0, ()))
    desk.node_heartbeat()

    found = read(desk.state)

    assert found is not None
    assert ("..", "..") == (found.last[:2], found.last[4:])
    assert ".." != found.last[2:4]


def test_no_heartbeat_is_reported_as_read_before_the_first_round() -> None:
    desk = Desk(Rules(2, 2, heartbeat=10.0))
    desk.join("a")
    desk.node_heartbeat()

    assert read(desk.state) is None


def test_ranks_include_the_last_heartbeat_read_from_their_node() -> None:
    desk = Desk(Rules(2, 2, heartbeat=10.0))
    desk.join("a")
    desk.node_heartbeat().node_heartbeat()
    count = desk.heartbeats[mailboxes(desk.state)["a"]]

    desk.join("b")

    assert desk.state.round is not None
    assert [count, 0] == [assignment.heartbeat_count for assignment in desk.state.round.assignments]


def test_spare_with_missed_heartbeats_gets_no_ranks_before_another_one() -> None:
    """It may stand still, and would be lost as soon as it has some."""
    desk = watched("a", "b")
    desk.join("c", "d")
    desk.node_heartbeat().node_heartbeat("c").node_heartbeat("c")
    desk.receive(Leave("b", "signal 15"), Stopped("a", 0, ()), Join("a", offer()))

    assert desk.state.round is not None
    assert ["a", "d"] == sorted(desk.state.round.entries)


@pytest.mark.parametrize("returns", [True, False])
def test_no_round_starts_until_a_missed_node_returns_or_is_lost(returns: bool) -> None:
    desk = Desk(Rules(1, 2, last_call=30.0, heartbeat=10.0))
    desk.join("a")
    desk.node_heartbeat().node_heartbeat("a").node_heartbeat("a")
    desk.join("b")
    assert desk.state.round is None

    if returns:
        desk.node_heartbeat()
    else:
        desk.node_heartbeat("a").node_heartbeat("a").tick(30.0)

    assert desk.state.round is not None
    assert (["a", "b"] if returns else ["b"]) == sorted(desk.state.round.entries)


def test_the_time_of_the_next_loss_is_known() -> None:
    desk = watched("a", "b")
    desk.node_heartbeat().node_heartbeat("b")

    assert 3.0 + 10.0 == next_loss(desk.state)


@pytest.mark.parametrize(
    "steps", [(), ("a", "b", silent(seconds=0.0), *FAILED)], ids=["without a heartbeat time", "after the end"]
)
def test_no_loss_is_due_where_none_can_be(steps: tuple[Step, ...]) -> None:
    """Or the coordinator would look for it without a pause, for as long as it stays."""
    desk = after(Desk(Rules(2, 2, 0, heartbeat=10.0 if steps else 0.0)), *steps)

    assert bool(steps) == (desk.state.final is not None)
    assert next_loss(desk.state) is None


# --- hosts that are lost again and again


def test_a_host_lost_in_three_rounds_running_spends_a_restart() -> None:
    desk = crash_loop(2)
    desk.receive(Leave("host/3", "its agent died", lost=True))

    why = (
        "node host/3 is lost: its agent died; "
        "host host was lost in 3 rounds in a row before any worker succeeded; restart 1 of 1"
    )
    assert RoundEnd(2, why, True, failed=True) == desk.sent()["a"]


def test_host_that_is_lost_repeatedly_ends_the_job() -> None:
    desk = crash_loop(3)
    desk.receive(Leave("host/4", "its agent died", lost=True), Stopped("a", 3, ()))

    why = (
        "node host/4 is lost: its agent died; "
        "host host was lost in 4 rounds in a row before any worker succeeded; all 1 restarts are used"
    )
    assert (why, "failed", None) == (final_of(desk).why, final_of(desk).kind, final_of(desk).root_node)


def test_leaving_by_ones_own_will_spends_no_restart() -> None:
    desk = crash_loop(1, lost=False)

    assert 0 == desk.state.restarts
    assert {} == desk.state.losses


LOSS = Leave("host/3", "its agent died", lost=True)
CUT = (FailureNote(0, 0, 100, 1, secondary=True),)


@pytest.mark.parametrize(
    ("begin", "steps", "restarts"),
    [
        (lambda: crash_loop(2), (silent("host/3"),), 1),
        (lambda: crash_loop(2, min_nodes=1), (LOSS,), 1),
        (lambda: crash_loop(2), (Failed("a", 2, CUT), Stopped("a", 2, CUT), LOSS), 1),
        (lambda: crash_loop(2), ("a", "host/3", LOSS), 0),
        (lambda: crash_loop(2), (Succeeded("a", 2), LOSS), 0),
    ],
    ids=["silence", "a round without the host", "lost connections first", "a round that held", "a success"],
)
def test_the_third_loss_of_a_host_in_a_row_costs_a_restart(
    begin: Begin, steps: tuple[Step, ...], restarts: int
) -> None:
    assert restarts == after(begin(), *steps).state.restarts


# --- who is refused


def test_node_with_other_terms_is_refused_and_affects_no_other_node() -> None:
    desk = running("a", spare_room=1)
    mailbox = desk.receive(Join("b", offer(), Terms(1, 4, 3)))

    why = (
        "node b asks for 1 to 4 nodes and 3 restarts, but this job runs with 1 to 2 nodes and 3 restarts: "
        "give all nodes the same numbers, or each job its own id (--rdzv-id)"
    )
    assert [Final(False, why, kind="refused")] == desk.mailboxes[mailbox]
    assert {"b"} == desk.sent().keys()
    assert {} == desk.state.waiting


def test_member_that_joins_again_with_other_terms_ends_the_round() -> None:
    desk = running("a", "b", min_nodes=1)
    desk.receive(Join("b", offer(), Terms(9, 9, 9)))

    assert {"b": "refused"} == {n: its.kind for n, its in desk.sent().items() if isinstance(its, Final)}
    assert end_of(desk.sent()["a"]).restart


@pytest.mark.parametrize(
    ("index", "why"),
    [
        (None, "node b has no node rank, and each node of this job needs one: give --node-rank, from 0 to 2"),
        (3, "node rank 3 of node b is out of range: 3 nodes have the ranks 0 to 2"),
        (1, "node rank 1 was given twice: node a has it, and node b asks for it"),
    ],
)
def test_a_node_without_a_fixed_place_of_its_own_is_refused(index: int | None, why: str) -> None:
    desk = Desk(Rules(3, 3, fixed_places=True))
    desk.receive(Join("a", offer(index=1)))
    mailbox = desk.receive(Join("b", offer(index=index)))

    assert [Final(False, why, kind="refused")] == desk.mailboxes[mailbox]
    assert {"a"} == desk.state.waiting.keys()


def test_a_place_in_the_running_round_is_taken() -> None:
    desk = placed("a", "b")
    mailbox = desk.receive(Join("c", offer(index=0)))

    assert ["refused"] == [notice.kind for notice in desk.mailboxes[mailbox] if isinstance(notice, Final)]
    assert {"c"} == desk.sent().keys()


# --- the shared store


def test_a_shared_store_is_cleared_before_every_round_but_the_first() -> None:
    desk = Desk(Rules(1, 1, shared_store=True))
    desk.join("a")
    first = desk.actions
    desk.receive(Stopped("a", 0, ()))
    desk.join("a")

    assert [Send] == [type(action) for action in first]
    assert [ClearStore, Send] == [type(action) for action in desk.actions]


SPARE = "round 0 runs with its maximum of 2 nodes (a, b); this node is a spare: it replaces a node that "
STATUS: dict[str, tuple[Begin, tuple[Step, ...], str]] = {
    "too few nodes": (
        lambda: Desk(Rules(4, 4, join_timeout=600.0)),
        ("n10", "n3", 8.0),
        "2 of at least 4 nodes have joined (n3, n10); 592 s left",
    ),
    "too few nodes of an engine's": (
        lambda: Desk(Rules(4, 4, hosts=("n1", "n2", "n10", "n3"))),
        (Join("n1", offer(index=0)), Join("n3", offer(index=3))),
        "2 of at least 4 nodes have joined (n1, n3), and n2, n10 not yet: start the command there too, or give "
        "--engine none; 600 s left",
    ),
    "all nodes of an engine's": (
        lambda: Desk(Rules(1, 3, last_call=30.0, hosts=("n1",))),
        (Join("n1", offer(index=0)),),
        "1 of at most 3 nodes have joined (n1); they start in 30 s if no other node joins",
    ),
    "enough nodes": (
        lambda: Desk(Rules(1, 3, last_call=30.0)),
        ("a", 10.0),
        "1 of at most 3 nodes have joined (a); they start in 20 s if no other node joins",
    ),
    "a node will come back": (
        lambda: running("a", "b", min_nodes=1),
        (Stopped("a", 0, ()), Stopped("b", 0, ()), "a"),
        "1 nodes have joined (a); b will come back; 600 s left",
    ),
    "workers still stop": (
        lambda: running("a", "b"),
        (Stopped("a", 0, ()),),
        "round 0 has ended; its workers are still stopping on b",
    ),
    "a spare": (lambda: running("a", "b"), ("c",), f"{SPARE}leaves"),
    "an arrival beside finished work": (
        lambda: running("a", "b", spare_room=1),
        (Succeeded("a", 0), "c"),
        "round 0 is about to succeed on a, b; this node joins the next round, if one follows",
    ),
    "a round runs": (lambda: running("a"), (), ""),
    "the job has ended": (lambda: running("a"), (Succeeded("a", 0),), ""),
    "two nodes of one host": (
        lambda: Desk(Rules(9, 9)),
        ("h1/7-aa", "h2/8-bb", "h2/9-cc"),
        "3 of at least 9 nodes have joined (h1, h2/8-bb, h2/9-cc); 600 s left",
    ),
    "many nodes": (
        lambda: Desk(Rules(40, 40)),
        tuple(f"n{number}" for number in range(18)),
        f"18 of at least 40 nodes have joined ({', '.join(f'n{i}' for i in range(16))}, and 2 more); 600 s left",
    ),
}


@pytest.mark.parametrize(("begin", "steps", "text"), STATUS.values(), ids=STATUS)
def test_status_names_what_the_job_waits_for(begin: Begin, steps: tuple[Step, ...], text: str) -> None:
    desk = after(begin(), *steps)

    assert text == status(desk.state, desk.now)


# --- a failure that is fatal


@pytest.mark.parametrize("kind", [Failed, Stopped])
def test_a_failure_that_a_restart_would_only_meet_again_ends_the_job(kind: type[Failed] | type[Stopped]) -> None:
    desk = running("a", "b", max_restarts=3)
    stuck = evolve(note(1, message="in uninterruptible sleep"), fatal=True)

    desk.receive(kind("a", 0, (stuck,)))
    ends = desk.sent()
    desk.receive(Stopped("b", 0, ()), Stopped("a", 0, (stuck,)))

    why = "rank 1 on node a cannot continue (in uninterruptible sleep)"
    assert dict.fromkeys("ab", RoundEnd(0, why, False, decided=False, failed=True)) == ends
    why += "; a restart would fail again"
    assert Final(False, why, "a", stuck) == desk.state.final
    assert 0 == desk.state.restarts


# --- the cause of a failure is decided when the workers are gone

LOST = note(0, secondary=True, message="RuntimeError: Connection reset by peer")
KILLED = FailureNote(2, 0, 200, -9)


def test_cause_is_the_failure_seen_after_its_peers_lost_connection() -> None:
    """A worker's sockets close before its death can be seen."""
    desk = running("a", "b", max_restarts=3)
    desk.receive(Failed("a", 0, (LOST,)), Stopped("a", 0, (LOST,)), Stopped("b", 0, (KILLED,)))
    desk.join("a", "b")

    assert "rank 2 on node b was ended by SIGKILL (signal 9); restart 1 of 3" == seat_of(desk.sent()["a"]).cause


def test_cause_is_reported_after_a_second_while_a_node_still_stops() -> None:
    desk = running("a", "b", max_restarts=3)
    desk.receive(Failed("b", 0, (KILLED,)), Stopped("b", 0, (KILLED,)))
    mailbox = desk.join("b")[0]
    assert (WakeAt(1.0),) == desk.actions

    desk.tick(1.0)

    end = RoundEnd(0, "rank 2 on node b was ended by SIGKILL (signal 9); restart 1 of 3", True, failed=True)
    assert {"a": end, "b": end} == desk.sent()
    assert [end] == desk.mailboxes[mailbox]
    desk.receive(Stopped("a", 0, ()))
    desk.tick(1.0)
    assert (1, {}) == (desk.state.restarts, desk.sent())


def test_lost_connection_alone_is_not_a_cause_before_all_have_stopped() -> None:
    desk = running("a", "b", max_restarts=3)
    desk.receive(Failed("a", 0, (LOST,)), Stopped("a", 0, (LOST,)))

    desk.tick(20.0)
    assert (0, {}) == (desk.state.restarts, desk.sent())
    desk.receive(Stopped("b", 0, ()))

    assert 1 == desk.state.restarts
    assert "Connection reset" in end_of(desk.sent()["a"]).why


def test_fatal_failure_ends_the_job_though_it_is_seen_late() -> None:
    desk = running("a", "b", max_restarts=3)
    desk.receive(Failed("a", 0, (LOST,)), Stopped("a", 0, (LOST,)))
    desk.join("a")
    desk.receive(Stopped("b", 0, (evolve(KILLED, fatal=True),)))

    assert ("b", 0) == (final_of(desk).root_node, desk.state.restarts)
    assert {"a", "b"} == desk.sent().keys()


# --- a node's death cuts the connections of its peers, and these may be heard of first


@pytest.mark.parametrize("lost", [True, False])
def test_left_or_lost_node_spends_no_restart_after_lost_connections(lost: bool) -> None:
    desk = running("a", "b", min_nodes=1, max_restarts=3)
    desk.receive(Failed("a", 0, (LOST,)), Stopped("a", 0, (LOST,)))
    desk.join("a")
    desk.receive(Leave("b", "gone", lost=lost))

    desk.tick(30.0)

    assert desk.state.round is not None and {"a"} == desk.state.round.entries.keys()
    assert 0 == desk.state.restarts
    assert f"node b {'is lost' if lost else 'left'}: gone" == desk.state.round.assignments[0].cause


def test_sidecar_end_spends_no_restart_after_lost_connections() -> None:
    desk = running("a", "b", max_restarts=0)
    desk.receive(Failed("a", 0, (LOST,)), Stopped("a", 0, (LOST,)))
    desk.envelopes["b"] += 1_000_000

    desk.receive(Join("b", offer(), after="its sidecar was killed"))

    assert RoundEnd(0, "node b joins again: its sidecar was killed", True) == desk.sent()["a"]
    desk.join("a")
    assert (0, "node b joins again: its sidecar was killed") == (desk.state.restarts, seat_of(desk.sent()["a"]).cause)


@pytest.mark.parametrize("kind", [Failed, Stopped])
def test_connection_lost_before_its_nodes_death_is_known_ends_no_job(
    kind: type[Failed] | type[Stopped],
) -> None:
    desk = running("a", "b", min_nodes=1, max_restarts=0)
    cut = note(0, secondary=True, message="Connection closed by peer")

    desk.receive(kind("a", 0, (cut,)))
    assert not cast("RoundEnd", desk.sent()["a"]).restart
    desk.receive(Stopped("a", 0, (cut,)))
    assert desk.state.final is None
    desk.receive(Leave("b", "its agent died", lost=True))

    assert desk.state.final is None
    assert RoundEnd(0, "node b is lost: its agent died", True) == desk.sent()["a"]
    desk.join("a")
    desk.tick(30.0)
    assert desk.state.round is not None and {"a"} == desk.state.round.entries.keys()


def test_nor_before_its_node_is_silent_for_long() -> None:
    desk = watched("a", "b", min_nodes=1, max_restarts=0)
    cut = note(0, secondary=True)
    desk.receive(Failed("a", 0, (cut,)), Stopped("a", 0, (cut,)))

    desk.node_heartbeat("b", seconds=30.0)

    assert cast("RoundEnd", desk.sent()["a"]).restart
    assert desk.state.final is None


@pytest.mark.parametrize(
    ("failures", "last"),
    [((note(0, secondary=True), note(1)), DIED), ((note(0, secondary=True),), Stopped("b", 0, ()))],
    ids=["another kind of failure", "no node's death"],
)
def test_a_broken_connection_excuses_nothing_with(failures: tuple[FailureNote, ...], last: Report) -> None:
    desk = running("a", "b", min_nodes=1, max_restarts=0)
    desk.receive(Failed("a", 0, failures), Stopped("a", 0, failures[-1:]), last)

    assert desk.state.final is not None and not desk.state.final.succeeded
