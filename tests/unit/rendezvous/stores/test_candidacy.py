"""Rules of the election, without a thread, a clock or a store."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import Factory, define
from hypothesis import given, strategies as st

from elasticlib.rendezvous.protocol._operations import Log
from elasticlib.rendezvous.stores._candidacy import (
    PAUSE,
    SLICE,
    Acquire,
    Acquired,
    Action,
    Await,
    Candidacy,
    ConnectionBroke,
    ConnectToStore,
    Declined,
    Done,
    Elected,
    Event,
    FindLeader,
    Found,
    Keep,
    Lead,
    Over,
    ReleaseLeadership,
    Renew,
    Renewed,
    Rest,
    StepDown,
)
from elasticlib.rendezvous.stores._keys import RenewedKey

TTL = 6.0
HOLD = RenewedKey("leader", "a/1", 7, 1, TTL)


@define
class Shell:
    """Passes on to a candidacy the results of its requests."""

    candidacy: Candidacy = Factory(lambda: Candidacy(TTL).step(Done(), 100.0)[0])
    now: float = 100.0
    done: list[Action] = Factory(list)

    def handle(self, *events: Event, after: float = 0.0) -> list[Action]:
        """Return the actions that follow the last of *events*, without logs."""
        self.now += after
        for event in events:
            self.candidacy, actions = self.candidacy.step(event, self.now)
            self.done += actions
        return [action for action in actions if not isinstance(action, Log)]

    def close(self) -> None:
        self.candidacy = self.candidacy.close()

    def leading(self) -> Shell:
        assert [Acquire(TTL)] == self.handle(Done(), Found(1, False))
        assert [Lead(HOLD)] == self.handle(Acquired(HOLD))
        assert [Rest(TTL / 3)] == self.handle(Elected())
        return self


def test_candidate_connects_first() -> None:
    assert (ConnectToStore(TTL),) == Candidacy(TTL).step(Done(), 0.0)[1]


def test_candidate_waits_for_a_change_and_looks_again_if_leader_exists() -> None:
    shell = Shell()

    assert [FindLeader()] == shell.handle(Done())
    assert [Await(3, SLICE)] == shell.handle(Found(3, True))
    assert [FindLeader()] == shell.handle(Done())


def test_candidate_looks_for_leader_again_if_lease_was_not_acquired() -> None:
    assert [FindLeader()] == Shell().handle(Done(), Found(1, False), Acquired(None))


def test_a_holder_renews_three_times_in_its_time_to_live() -> None:
    shell = Shell().leading()

    assert [Renew(HOLD)] == shell.handle(Done(), after=TTL / 3)
    assert [Keep(), Rest(TTL / 3)] == shell.handle(Renewed(True))
    assert [Renew(HOLD)] == shell.handle(Done(), after=TTL / 3)
    assert [Rest(TTL / 3)] == shell.handle(Renewed(True))


def test_a_term_counts_from_when_the_renewal_was_sent() -> None:
    shell = Shell().leading()
    shell.handle(Done(), after=2.0)
    shell.handle(Renewed(True), after=3.0)

    assert 100.0 + 2.0 + TTL == shell.candidacy.until


def test_a_seizure_that_took_longer_than_the_term_is_none() -> None:
    shell = Shell()
    shell.handle(Done(), Found(1, False))

    assert [ReleaseLeadership(HOLD), FindLeader()] == shell.handle(Acquired(HOLD), after=TTL)


@pytest.mark.parametrize(
    ("renews", "end", "after", "why"),
    [
        (True, Renewed(True), TTL, "the lease was not renewed for 6 s"),
        (True, Renewed(False), 0.0, "the store says that the lease is over"),
        (False, Over("turned down"), 0.5, "turned down"),
    ],
    ids=["not renewed in time", "the hold is gone", "refused"],
)
def test_a_term_that_ends_lets_its_holder_stand_again(renews: bool, end: Event, after: float, why: str) -> None:
    shell = Shell().leading()
    if renews:
        shell.handle(Done(), after=TTL / 3)

    assert [StepDown(why, True), ReleaseLeadership(HOLD), FindLeader()] == shell.handle(end, after=after)
    assert [Acquire(TTL)] == shell.handle(Found(9, False))


def test_nobody_stands_again_when_the_job_is_over() -> None:
    shell = Shell().leading()

    assert [StepDown("purged", False), ReleaseLeadership(HOLD)] == shell.handle(Over("purged", last=True))
    assert shell.candidacy.stopped
    assert [] == shell.handle(Done())


def test_candidate_unable_to_coordinate_releases_leadership_and_rests() -> None:
    shell = Shell()
    shell.handle(Done(), Found(1, False), Acquired(HOLD))

    assert [ReleaseLeadership(HOLD), Rest(PAUSE)] == shell.handle(Declined("it broke"))
    assert [FindLeader()] == shell.handle(Done())


def test_broken_connection_is_replaced_within_the_remaining_term() -> None:
    shell = Shell().leading()
    shell.handle(Done(), after=2.0)

    assert [Rest(PAUSE)] == shell.handle(ConnectionBroke("reset"))
    assert [ConnectToStore(TTL - 2.5)] == shell.handle(Done(), after=0.5)
    assert [Renew(HOLD)] == shell.handle(Done())
    assert [Keep(), Rest(TTL / 3)] == shell.handle(Renewed(True))


def test_without_a_connection_nothing_is_released_when_the_term_ends() -> None:
    shell = Shell().leading()
    shell.handle(Done(), after=2.0)
    shell.handle(ConnectionBroke("reset"))

    step_down = StepDown("the lease was not renewed for 6 s", True)
    assert [step_down, ConnectToStore(TTL)] == shell.handle(Done(), after=TTL)


@pytest.mark.parametrize("last", [Done(), Over("it resigned")])
def test_node_that_closes_while_it_leads_resigns(last: Event) -> None:
    shell = Shell().leading()

    shell.close()
    end = shell.handle(last)

    assert [False] == [action.is_news for action in end if isinstance(action, StepDown)]
    assert [ReleaseLeadership(HOLD)] == end[1:]
    assert shell.candidacy.stopped


@pytest.mark.parametrize(
    ("taken", "event", "done"),
    [(False, Acquired(HOLD), [ReleaseLeadership(HOLD)]), (True, Done(), [])],
    ids=["acquires", "waits"],
)
def test_a_node_that_closes_while_it(taken: bool, event: Event, done: list[Action]) -> None:
    shell = Shell()
    shell.handle(Done(), Found(1, taken))

    shell.close()

    assert done == shell.handle(event)
    assert shell.candidacy.stopped


@given(st.data())
def test_no_course_of_events_leads_past_the_term_or_to_idleness(data: Any) -> None:
    """For any answer at any time: one action is pending, and a term lies within its hold."""
    shell = Shell()
    pending: Action = ConnectToStore(TTL)
    leads = False
    for _ in range(data.draw(st.integers(1, 40))):
        if data.draw(st.integers(0, 30)) == 0:
            shell.close()
        event = data.draw(st.sampled_from(ANSWERS[type(pending)]))
        before = shell.candidacy
        out = shell.handle(event, after=data.draw(st.sampled_from((0.0, 0.1, 2.0, 7.0))))
        leads = leads or isinstance(event, Elected)
        for action in out:
            if isinstance(action, Lead):
                assert shell.now < shell.candidacy.until
            leads = leads and not isinstance(action, StepDown)
        if leads:
            assert shell.candidacy.hold is not None
            assert shell.now < shell.candidacy.until
        if shell.candidacy.stopped:
            assert shell.candidacy.hold is None
            assert not any(isinstance(action, tuple(ANSWERS)) for action in out)
            return
        pending = out[-1]
        assert isinstance(pending, tuple(ANSWERS))
        assert before.ttl == shell.candidacy.ttl


ANSWERS: dict[type, tuple[Event, ...]] = {
    ConnectToStore: (Done(), ConnectionBroke("refused")),
    FindLeader: (Found(1, True), Found(2, False), ConnectionBroke("reset")),
    Await: (Done(), ConnectionBroke("reset")),
    Acquire: (Acquired(HOLD), Acquired(None), ConnectionBroke("reset")),
    Lead: (Elected(), Declined("no")),
    Renew: (Renewed(True), Renewed(False), ConnectionBroke("reset")),
    Rest: (Done(), Over("turned down"), Over("purged", last=True)),
}
