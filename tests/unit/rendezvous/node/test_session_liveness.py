"""When a node heartbeats, fences itself, tries again and gives up: decided without a clock or a store."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from attrs import evolve

from elasticlib.rendezvous.node._session_liveness import (
    NO_HEARTBEAT,
    Acknowledged,
    Action,
    Assigned,
    Broken,
    Event,
    Fence,
    GiveUp,
    Greeted,
    HeartbeatRead,
    Limits,
    ReplaceConnection,
    SessionLiveness,
    TimePassed,
    begin,
    is_stale,
    kill_at,
    rejoin,
    search,
    step,
    wake_at,
)

LIMITS = Limits(join_timeout=100.0, reconnect_timeout=60.0)


def live(heartbeat: float = 10.0, now: float = 0.0, *, has_election: bool = False) -> SessionLiveness:
    contact, _ = begin(evolve(LIMITS, has_election=has_election), now)
    contact, _ = step(contact, Greeted(heartbeat), now)
    return contact


def assigned(heartbeat: float = 10.0, *, has_election: bool = False) -> SessionLiveness:
    """With ranks; what was sent at 0 was read before."""
    return step(live(heartbeat, has_election=has_election), Assigned(0.0), 0.0)[0]


def play(contact: SessionLiveness, *events: tuple[float, Event]) -> tuple[SessionLiveness, list[Action]]:
    done: list[Action] = []
    for now, event in events:
        contact, actions = step(contact, event, now)
        done += actions
    return contact, done


def test_a_node_connects_at_once() -> None:
    _, actions = begin(LIMITS, 5.0)

    assert (ReplaceConnection(),) == actions


def test_failed_attempts_are_repeated_after_growing_pauses() -> None:
    contact, _ = begin(LIMITS, 0.0)
    pauses = []
    now = 0.0
    for _ in range(8):
        contact, _ = step(contact, Broken("refused", gone=True), now)
        wake = wake_at(contact)
        assert wake is not None
        pauses.append(round(wake - now, 3))
        now = wake
        contact, actions = step(contact, TimePassed(), now)
        assert (ReplaceConnection(),) == actions

    assert [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0] == pauses


def test_refusals_before_the_first_contact_are_retried_until_the_timeout() -> None:
    contact, _ = begin(LIMITS, 0.0)
    contact, done = play(contact, *((float(second), Broken("refused", gone=True)) for second in range(100)))
    assert not [action for action in done if isinstance(action, GiveUp)]

    _, actions = step(contact, TimePassed(), 100.0)

    assert [GiveUp("the job was not found; gave up after 100 s: refused", closed=False)] == list(actions)


def test_heartbeats_that_are_acknowledged_keep_a_node_in() -> None:
    contact = live()

    contact, done = play(
        contact,
        *(
            (3.0 * node_heartbeat, HeartbeatRead(3.0 * node_heartbeat, node_heartbeat))
            for node_heartbeat in range(1, 50)
        ),
    )

    assert [] == done
    assert contact.live


def test_a_node_fences_itself_before_others_may_take_its_place() -> None:
    contact, _ = play(live(), (3.0, HeartbeatRead(3.0, 1)))
    wake = wake_at(contact)

    assert 10.5 == wake
    contact, actions = step(contact, TimePassed(), wake)

    fence, connect = actions
    assert isinstance(fence, Fence)
    assert ReplaceConnection() == connect
    assert wake + fence.grace < kill_at(contact) < 13.0  # type: ignore[operator]


def test_fence_counts_from_the_sending_of_the_heartbeat() -> None:
    contact, _ = play(live(), (8.0, HeartbeatRead(3.0, 1)))

    assert 10.5 == wake_at(contact)


def test_a_late_answer_on_the_old_connection_counts_no_less() -> None:
    contact, done = play(live(), (1.0, Broken("reset")), (1.5, HeartbeatRead(0.9, 1)))

    assert [ReplaceConnection()] == done
    assert 0.9 == contact.acknowledged


def test_node_is_fenced_only_once() -> None:
    _, done = play(live(), *((second, TimePassed()) for second in (7.5, 8.0, 8.5, 10.0)))

    assert 1 == len([action for action in done if isinstance(action, Fence)])


def test_restored_contact_is_watched_again() -> None:
    contact, _ = play(live(), (7.5, TimePassed()), (8.0, Greeted(10.0)), (8.1, HeartbeatRead(8.05, 3)))

    assert not contact.fenced
    _, actions = step(contact, TimePassed(), 15.6)
    assert [Fence] == [type(action) for action in actions if not isinstance(action, ReplaceConnection)]


def test_silent_connection_is_replaced_after_contact_was_restored() -> None:
    contact, _ = play(live(), (7.5, TimePassed()), (8.0, Greeted(10.0)))
    wake = wake_at(contact)

    assert wake == 15.5
    contact, actions = step(contact, TimePassed(), wake)
    assert (ReplaceConnection(),) == actions
    assert not contact.live


def test_a_broken_connection_is_renewed_at_once_and_fences_nobody() -> None:
    contact, done = play(live(), (2.0, Broken("reset", gone=True)), (2.1, Greeted(10.0)), (2.2, HeartbeatRead(2.1, 1)))

    assert [ReplaceConnection()] == done
    assert contact.live


def test_host_that_refuses_repeatedly_after_contact_counts_as_lost() -> None:
    contact = live()
    now = 1.0
    done: list[Action] = []
    for _ in range(4):
        contact, actions = step(contact, Broken("node1:29400 refused", gone=True), now)
        done += actions
        now += 1.0
        contact, actions = step(contact, TimePassed(), now)
        done += actions

    (end,) = (action for action in done if isinstance(action, GiveUp))
    assert ("the host of the job's store is gone: node1:29400 refused", True) == (end.why, end.gone)


def test_refusals_do_not_end_contact_if_coordination_can_move() -> None:
    contact, done = play(
        live(has_election=True), *((1.0 + n, Broken("refused", gone=True)) for n in range(20)), (22.0, Greeted(10.0))
    )

    assert not [action for action in done if isinstance(action, GiveUp)]
    assert contact.live


def test_a_silent_store_is_sought_for_the_reconnect_time() -> None:
    contact, _ = play(live(), (7.5, TimePassed()), (8.0, Broken("timed out")))
    early, _ = play(contact, (67.4, TimePassed()))
    assert not early.over

    contact, actions = step(contact, TimePassed(), 67.5)

    assert contact.over
    assert GiveUp("contact with the job was lost; gave up after 60 s: timed out", True) in actions


def heartbeats(until: float, **fields: Any) -> Iterator[tuple[float, Event]]:
    """All that a node sends is in the store; each heartbeat of the coordinator has *fields*."""
    for number in range(1, int(until / 3.0) + 1):
        yield 3.0 * number, HeartbeatRead(3.0 * number, fields.get("count", 6 * number), read=fields.get("read"))


def fences(done: list[Action]) -> list[str]:
    return [action.why for action in done if isinstance(action, Fence)]


def test_node_with_ranks_is_fenced_if_its_stored_heartbeats_are_unread() -> None:
    """Somebody may have removed it."""
    contact, done = play(assigned(), *heartbeats(6.0), (7.49, TimePassed()))
    assert [] == done
    assert contact.read is not None and (9.5, 7.5) == (kill_at(contact), wake_at(contact))

    _, done = play(contact, (7.5, TimePassed()))

    why = "contact with the job is lost: the job's coordinator has read none of this node's heartbeats in the store"
    assert [f"{why} for 7.5 s"] == fences(done)


@pytest.mark.parametrize(
    ("looks", "fenced_at"),
    [
        (((3.1, HeartbeatRead(3.0, 6, read=0.0)), (4.5, HeartbeatRead(3.0, 9, read=3.0))), 10.5),
        (((3.1, HeartbeatRead(3.0, 6, read=0.0)), (4.5, HeartbeatRead(3.0, 5, read=3.0))), 7.5),
        (((4.5, HeartbeatRead(3.0, 9, read=3.0)), (6.1, HeartbeatRead(6.0, 12, read=0.0))), 10.5),
    ],
    ids=["it was read", "an old heartbeat of the coordinator says so", "an earlier one is named later"],
)
def test_a_heartbeat_that_was_read_counts_from_its_sending(
    looks: tuple[tuple[float, Event], ...], fenced_at: float
) -> None:
    contact, _ = play(assigned(), *looks)

    assert (fenced_at, fenced_at + 2.0) == (wake_at(contact), kill_at(contact))


@pytest.mark.parametrize("has_election", [False, True])
def test_a_silent_coordinator_fences_where_no_other_takes_over(has_election: bool) -> None:
    """With an election, a new coordinator grants each node the full time again."""
    _, done = play(assigned(has_election=has_election), *heartbeats(60.0, count=1))

    assert (0 if has_election else 1) == len(fences(done))


def test_live_elected_coordinator_that_read_nothing_is_believed() -> None:
    contact, done = play(assigned(has_election=True), *heartbeats(6.0, count=1), (6.1, HeartbeatRead(6.0, 1)))
    assert 15.5 == kill_at(contact)

    contact, done = play(contact, (6.5, HeartbeatRead(6.0, 13)))

    assert [] == done
    assert (7.5, 9.5) == (wake_at(contact), kill_at(contact))


def test_ranks_are_given_back_with_what_was_known_of_contact() -> None:
    contact = rejoin(play(assigned(), (3.1, HeartbeatRead(-math.inf, 6, read=3.0)))[0])

    assert (None, 3.0) == (contact.read, contact.acknowledged)


@pytest.mark.parametrize(("heartbeat", "stale"), [(10.0, [False, True]), (0.0, [False, False])])
def test_ranks_are_stale_half_a_heartbeat_time_after_the_last_sign(heartbeat: float, stale: list[bool]) -> None:
    assert stale == [is_stale(live(heartbeat), 1.0, now) for now in (5.9, 6.0)]


@pytest.mark.parametrize("has_election", [False, True])
def test_a_coordinator_that_is_dead_though_its_store_answers_is_given_up(has_election: bool) -> None:
    """Each new connection finds the old greeting: only the coordinator's heartbeat tells that nobody is there."""
    contact, now = live(has_election=has_election), 3.0
    done: list[Action] = []
    while not contact.over and now < 200.0:
        for event in (Greeted(10.0), HeartbeatRead(now, 1), TimePassed()):
            contact, actions = step(contact, event, now)
            done += actions
        now += 3.0

    (end,) = (action for action in done if isinstance(action, GiveUp))
    assert end.closed
    assert "no node has coordinated the job for" in end.why
    assert 70.0 < now < 85.0


def test_a_coordinator_is_judged_by_its_heartbeat_alone() -> None:
    """A node that rested saw nothing, and a message's answer does not tell of the coordinator's heartbeat."""
    contact, _ = play(
        live(has_election=True),
        (3.0, HeartbeatRead(3.0, 1)),
        (6.0, HeartbeatRead(6.0, 2)),
        (200.0, TimePassed()),
        (201.0, Acknowledged(201.0)),
        (202.0, HeartbeatRead(202.0, 3)),
    )

    assert not contact.over


@pytest.mark.parametrize("skew", [-1e6, 0.0, 1e6])
def test_only_differences_of_time_count(skew: float) -> None:
    contact, done = play(live(now=skew), (skew + 3.0, HeartbeatRead(skew + 3.0, 1)), (skew + 10.5, TimePassed()))

    assert [Fence, ReplaceConnection] == [type(action) for action in done]
    assert skew + 12.5 == kill_at(contact)


def test_without_a_heartbeat_nothing_is_awaited() -> None:
    assert wake_at(live(heartbeat=0.0)) is None


def test_after_the_end_nothing_changes() -> None:
    contact, _ = begin(LIMITS, 0.0)
    contact, _ = step(contact, TimePassed(), 100.0)

    assert (contact, ()) == step(contact, Greeted(10.0), 101.0)
    assert wake_at(contact) is None


def test_a_search_has_an_end_and_contact_has_none() -> None:
    seeking, _ = begin(Limits(join_timeout=20.0), 100.0)

    assert search(seeking, 100.0).endswith("; 20 s left")
    assert search(live(), 100.0) == ""


@pytest.mark.parametrize("count", [NO_HEARTBEAT, (1 << 32) + 19])
def test_heartbeat_of_removed_or_older_coordinator_shows_no_sleep(count: int) -> None:
    """Somebody put it there: time goes on by heartbeats that grow."""
    looks = ((3.0, HeartbeatRead(3.0, (2 << 32) + 5)), (6.0, HeartbeatRead(6.0, count)))
    _, done = play(live(has_election=True), *looks)

    assert [] == done


@pytest.mark.parametrize("count", [NO_HEARTBEAT, 4])
@pytest.mark.parametrize("has_election", [False, True])
def test_a_heartbeat_beside_an_older_one_of_the_coordinator_does_not_count(count: int, has_election: bool) -> None:
    """An adversary that hides the one may delete the other: no node may run beside successors."""
    contact, _ = play(live(has_election=has_election), (3.0, HeartbeatRead(3.0, 5)))

    looks = tuple((at, HeartbeatRead(at, count)) for at in (4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 10.5))
    _, done = play(contact, *looks)

    assert [Fence] == [type(action) for action in done if not isinstance(action, ReplaceConnection)]


@pytest.mark.parametrize(("late", "grace"), [(0.0, 1.5), (0.4, 1.1), (1.6, 0.0)])
def test_workers_are_stopped_in_the_time_before_they_are_killed(late: float, grace: float) -> None:
    contact, done = play(assigned(), (7.5 + late, TimePassed()))

    [fence] = [action for action in done if isinstance(action, Fence)]
    assert pytest.approx(grace) == fence.grace
    assert pytest.approx(9.5) == kill_at(contact)
