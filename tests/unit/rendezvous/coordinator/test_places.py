"""Costs of a node's exits and returns: pauses, then its place; for the others, a few starts."""

from __future__ import annotations

from collections import Counter

import pytest
from attrs import Factory, define
from hypothesis import given, strategies as st

from elasticlib.rendezvous.coordinator import _places
from elasticlib.rendezvous.coordinator._coordinator import status, step
from elasticlib.rendezvous.coordinator._handover import decode_state, encode_state
from elasticlib.rendezvous.coordinator._places import PAUSES, STEADY
from elasticlib.rendezvous.coordinator._state import (
    Action,
    Event,
    JobState,
    MessageReceived,
    Rules,
    Send,
    Tick,
    WakeAt,
)
from elasticlib.rendezvous.protocol._messages import (
    Descriptor,
    Final,
    Join,
    Leave,
    Notice,
    RankAssignment,
    Report,
    RoundEnd,
    Stopped,
    Succeeded,
)

HEARTBEAT = 10.0
FULL = "OSError: No space left on device"
MOST = len(PAUSES) + 1
"""Exits in a row that cost a place."""


@define
class Job:
    """A coordinator, and nodes that do what they are told at once: those that are well work on."""

    state: JobState
    now: float = 100.0
    envelopes: Counter[str] = Factory(Counter)
    notices: list[tuple[str, Notice]] = Factory(list)
    wakes: list[float] = Factory(list)
    starts: Counter[str] = Factory(Counter)
    offers: dict[str, Descriptor] = Factory(dict)

    def join(self, node: str, *, index: int | None = None, address: str = "10.0.0.1") -> list[Notice]:
        """Send the node's request to join; return the notices that it gets at once."""
        self.offers[node] = Descriptor(1, "trainer", (address,), 4000, index)
        return self.receive(Join(node, self.offers[node]))

    def leave(self, node: str, why: str = FULL, round: int | None = None, lost: bool = False) -> list[Notice]:
        return self.receive(Leave(node, why, round, lost))

    def receive(self, report: Report) -> list[Notice]:
        self.envelopes[report.node] += 1
        before = len(self.notices)
        self._go_on(MessageReceived(self.envelopes[report.node], report))
        return [notice for node, notice in self.notices[before:] if node == report.node]

    def wait(self, seconds: float) -> None:
        """Time passes, as it does for the coordinator: it wakes when it asked for that."""
        end = self.now + seconds
        while self.wakes and self.wakes[-1] <= end:
            self.now = max(self.now, self.wakes[-1])
            self._go_on(Tick())
        self.now = end
        self._go_on(Tick())

    def _go_on(self, event: Event) -> None:
        self.state, actions = step(self.state, event, self.now)
        self._see(actions)

    def _see(self, actions: tuple[Action, ...]) -> None:
        self.wakes = [action.when for action in actions if isinstance(action, WakeAt)][-1:]
        sent = [action for action in actions if isinstance(action, Send)]
        self.notices += [(action.node, action.notice) for action in sent]
        for action in sent:
            if isinstance(action.notice, RankAssignment):
                self.starts[action.node] += 1
            if isinstance(action.notice, RoundEnd):
                self.receive(Stopped(action.node, action.notice.round, ()))
                self.receive(Join(action.node, self.offers[action.node]))

    def join_and_leave(self, times: int = 1, host: str = "n2", **place: object) -> None:
        """The node of a host joins, leaves when it has its ranks, and is started again, so many times."""
        for _ in range(times):
            node = f"{host}/{100 + len(self.envelopes)}-aa"
            self.join(node, **place)  # type: ignore[arg-type]
            while node in self.state.waiting:
                assert self.wakes, status(self.state, self.now)
                self.wait(max(self.wakes[-1] - self.now, 0.0))
            self.leave(node)

    @property
    def round(self) -> int:
        assert self.state.round is not None and self.state.round.end is None
        return self.state.round.number

    def assigned(self) -> set[str]:
        assert self.state.round is not None
        return set(self.state.round.entries)


def job(least: int = 1, most: int = 2, *healthy: str, **facts: object) -> Job:
    """A job at work on its healthy nodes."""
    rules = Rules(least, most, 3, heartbeat=HEARTBEAT, wait_for="min", **facts)  # type: ignore[arg-type]
    made = Job(JobState(rules))
    for node in healthy or ("n1/1-a",):
        made.join(node, address="10.0.0.9")
    return made


def test_node_that_left_once_is_admitted_again_at_once() -> None:
    """A node that was started again by hand, or replaced."""
    made = job()
    made.join_and_leave()

    made.join("n2/2-b")

    assert {"n1/1-a", "n2/2-b"} == made.assigned()


@pytest.mark.parametrize(("exits", "pause"), [(2, 6.0), (3, 6.0), (4, 6.0)])
def test_node_that_joins_and_leaves_pauses_while_others_continue(exits: int, pause: float) -> None:
    made = job()
    made.join_and_leave(exits)
    number = made.round

    assert [] == made.join("n2/9-z")
    made.wait(pause * HEARTBEAT - 0.1)
    assert (number, {"n1/1-a"}) == (made.round, made.assigned())

    made.wait(0.2)
    assert (number + 1, {"n1/1-a", "n2/9-z"}) == (made.round, made.assigned())


def test_pause_counts_from_the_exit() -> None:
    made = job()
    made.join_and_leave(3)
    made.wait(PAUSES[2] * HEARTBEAT)

    made.join("n2/9-z")

    assert {"n1/1-a", "n2/9-z"} == made.assigned()


def test_status_shows_why_and_how_long_a_node_pauses() -> None:
    made = job()
    made.join_and_leave(3)
    made.join("n2/9-z")
    made.wait(5.0)

    why = "node n2/9-z pauses for 55 s more, since the node at n2 (10.0.0.1) joined and left 3 times"
    assert why == status(made.state, made.now)


def test_place_with_too_many_exits_is_refused_for_good() -> None:
    made = job()
    made.join_and_leave(MOST)
    number, starts = made.round, made.starts["n1/1-a"]

    [final] = made.join("n2/9-z")
    made.wait(2 * STEADY * HEARTBEAT)
    [again] = made.join("n2/10-z")

    assert isinstance(final, Final) and isinstance(again, Final)
    assert ("refused", "refused") == (final.kind, again.kind)
    assert final.why == (
        "node n2/9-z gets no ranks: the node at n2 (10.0.0.1) joined and left 5 times, each time after less than 600 s "
        f"(last: {FULL})"
    )
    assert (number, starts) == (made.round, made.starts["n1/1-a"])
    assert 0 == made.state.restarts


def test_a_node_that_is_started_again_and_again_ends_few_rounds() -> None:
    """They were 28 in 60 s, one for each coming and going."""
    made, began = job(), 100.0
    while made.now < began + 3600.0:
        made.join_and_leave()
        made.wait(2.0)

    assert made.round <= 2 * MOST
    assert made.starts["n1/1-a"] <= 2 * MOST + 1


def test_node_that_leaves_after_a_steady_time_starts_without_exits() -> None:
    made = job()
    made.join_and_leave(4)
    made.wait(PAUSES[-1] * HEARTBEAT)
    made.join("n2/9-z")
    made.wait(STEADY * HEARTBEAT)
    made.leave("n2/9-z")

    made.join("n2/10-z")

    assert {"n1/1-a", "n2/10-z"} == made.assigned()
    assert {} == made.state.exits


@pytest.mark.parametrize("exits", range(1, MOST))
def test_place_that_is_empty_for_a_steady_time_starts_without_exits(exits: int) -> None:
    made = job()
    made.join_and_leave(exits)
    made.wait(STEADY * HEARTBEAT + 1.0)

    made.join("n2/9-z")

    entry = made.state.round.entries["n2/9-z"] if made.state.round is not None else None
    assert entry is not None
    assert 0 == entry.exits
    assert {} == made.state.exits


def test_place_that_joins_once_a_day_is_never_refused() -> None:
    """A machine that its scheduler takes away after five minutes each time."""
    made = job()
    for _ in range(3 * MOST):
        made.join("n2/1-a")
        assert "n2/1-a" in made.assigned()
        made.wait(STEADY * HEARTBEAT / 2)
        made.leave("n2/1-a")
        made.wait(24 * 3600.0)


def test_restarts_that_others_cause_make_no_newcomer_of_a_node() -> None:
    made = job(1, 3)
    made.join("n2/2-b")
    for _ in range(20):
        made.wait(STEADY * HEARTBEAT / 20)
        made.join_and_leave(host="n3", address="10.0.0.3") if not made.state.exits else None
    made.leave("n2/2-b")

    assert ["n3 (10.0.0.3)"] == list(made.state.exits)


@pytest.mark.parametrize(
    "first, second",
    [
        ({"index": 3}, {"index": 4}),
        ({"address": "10.0.0.1"}, {"address": "10.0.0.2"}),
        ({"host": "n2", "address": "10.0.0.1"}, {"host": "n3", "address": "10.0.0.1"}),
    ],
    ids=["a scheduler's number", "an address", "a host"],
)
def test_different_places_are_distinguished(first: dict[str, object], second: dict[str, object]) -> None:
    made = job()
    made.join_and_leave(MOST, **first)  # type: ignore[arg-type]
    host = str(second.pop("host", "n2"))

    made.join(f"{host}/9-z", **second)  # type: ignore[arg-type]

    assert {"n1/1-a", f"{host}/9-z"} == made.assigned()


def test_scheduler_index_identifies_a_place_better_than_an_address() -> None:
    """A container gets another address at each start."""
    made = job()
    for number in range(MOST):
        made.join_and_leave(index=3, address=f"10.0.1.{number}")

    [final] = made.join("n2/9-z", index=3, address="10.0.2.1")

    assert isinstance(final, Final) and final.kind == "refused"


def test_an_agent_that_works_is_not_refused_for_another_one_of_its_place() -> None:
    """Started by hand, agents of one host have one place: those that are there keep their ranks."""
    made = job(1, 3)
    made.join("n2/2-b")
    made.join_and_leave(MOST)

    assert {"n1/1-a", "n2/2-b"} == made.assigned()


def test_exits_of_agents_that_share_a_place_are_not_added_up() -> None:
    """Many agents of one host, all of which are stopped once, and started again."""
    made = job(1, 9)
    agents = [f"n2/{number}-b" for number in range(6)]
    for node in agents:
        made.join(node)
    for node in agents:
        made.leave(node, "signal 15")

    for node in agents:
        made.join(f"{node}-again")

    assert {"n1/1-a", *(f"{node}-again" for node in agents)} == made.assigned()


def test_agents_that_alternate_at_one_place_lose_the_place() -> None:
    """Each exit of one lies between two of the other; none of them hides the other's."""
    made = job(1, 9)
    for number in range(2 * MOST):
        made.join(f"n2/{number}-b")
        made.wait(PAUSES[-1] * HEARTBEAT)
        if number:
            made.leave(f"n2/{number - 1}-b")

    [final] = made.join("n2/99-b")

    assert isinstance(final, Final) and final.kind == "refused"


def test_a_pause_that_is_not_waited_for_is_none_less_for_it() -> None:
    made = job()
    made.join_and_leave(3)
    for number in range(5):
        assert [] == made.join(f"n2/{number}-z")
        made.leave(f"n2/{number}-z")

    assert 3 == made.state.exits["n2 (10.0.0.1)"].times
    made.wait(PAUSES[2] * HEARTBEAT)
    made.join("n2/9-z")
    assert {"n1/1-a", "n2/9-z"} == made.assigned()


@pytest.mark.parametrize("pauses", [True, False])
def test_a_node_that_dies_in_between_makes_nothing_of_its_place_undone(pauses: bool) -> None:
    made = job()
    made.join_and_leave(3)
    made.join("n2/8-z")
    made.wait(0.0 if pauses else PAUSES[2] * HEARTBEAT)
    made.leave("n2/8-z", "its agent died", lost=True)

    assert 3 == made.state.exits["n2 (10.0.0.1)"].times


@pytest.mark.parametrize(
    ("most", "times", "succeeded", "lost"),
    [(2, 1, True, False), (1, 9, False, False), (2, 1, False, True)],
    ids=["beside a success", "of a spare", "of a dead agent"],
)
def test_an_exit_costs_its_place_nothing(most: int, times: int, succeeded: bool, lost: bool) -> None:
    made = job(1, most)
    for number in range(times):
        made.join(f"n2/{number}-b")
        if succeeded:
            made.receive(Succeeded("n1/1-a", made.round))
        made.leave(f"n2/{number}-b", lost=lost)

    assert ({}, {}) == (made.state.exits, made.state.waiting)
    assert most > 1 or 0 == made.round


def test_other_nodes_wait_out_the_pause_if_too_few_remain() -> None:
    made = job(2, 2)
    made.join_and_leave(3)
    made.join("n2/9-z")
    assert made.state.round is not None and made.state.round.end is not None

    made.wait(PAUSES[2] * HEARTBEAT)

    assert {"n1/1-a", "n2/9-z"} == made.assigned()
    assert made.state.round is not None and made.state.round.end is None


def test_no_pause_makes_a_job_fail_that_has_enough_nodes() -> None:
    made = job(2, 2, join_timeout=5.0)
    made.join_and_leave(2)
    made.join("n2/9-z")

    made.wait(5.0)

    assert made.state.final is None
    assert {"n1/1-a", "n2/9-z"} == made.assigned()
    assert made.state.round is not None and made.state.round.end is None


def test_an_end_for_want_of_nodes_names_the_places_that_were_refused() -> None:
    made = job(2, 2)
    made.join_and_leave(MOST)
    made.join("n2/9-z")

    made.wait(600.0)

    final = made.state.final
    assert final is not None and final.kind == "timeout"
    assert final.why.endswith("; no more ranks for n2 (10.0.0.1), which joined and left 5 times")


def test_a_pause_does_not_hold_up_other_newcomers() -> None:
    made = job(1, 3)
    made.join_and_leave(3)
    made.join("n2/9-z")

    made.join("n3/3-c", address="10.0.0.3")

    assert {"n1/1-a", "n3/3-c"} == made.assigned()
    made.wait(PAUSES[2] * HEARTBEAT)
    assert {"n1/1-a", "n3/3-c", "n2/9-z"} == made.assigned()


@pytest.mark.parametrize("most", [2, 3], ids=["where there is no room", "beside finished work"])
def test_a_pause_that_ends_disturbs_no_round(most: int) -> None:
    made = job(1, most)
    made.join_and_leave(3)
    made.join("n2/9-z")
    made.join("n3/3-c", address="10.0.0.3")
    if most == 3:
        made.receive(Succeeded("n1/1-a", made.round))
    number = made.round

    made.wait(PAUSES[2] * HEARTBEAT)

    assert number == made.round
    if most == 2:
        made.leave("n3/3-c")
        assert {"n1/1-a", "n2/9-z"} == made.assigned()


def test_next_coordinator_continues_pauses_and_refusals() -> None:
    made = job(1, 3)
    made.join_and_leave(MOST)
    made.join_and_leave(3, host="n3")
    made.join("n3/9-z")
    made.wait(5.0)
    heir = Job(decode_state(encode_state(made.state, made.now), 7.0), 7.0, made.envelopes, offers=made.offers)

    heir.wait(PAUSES[2] * HEARTBEAT - 5.0 - 0.1)
    before = heir.assigned()
    heir.wait(0.2)

    assert {"n1/1-a"} == before
    assert {"n1/1-a", "n3/9-z"} == heir.assigned()
    [final] = heir.join("n2/99-z")
    assert isinstance(final, Final) and final.kind == "refused"


def test_remembered_exits_of_places_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_places, "_PLACES", 8)
    made = job()
    for number in range(2, 14):
        made.join_and_leave(host=f"n{number}")
        made.wait(1.0)

    assert [f"n{number} (10.0.0.1)" for number in range(6, 14)] == list(made.state.exits)


@given(st.lists(st.floats(0.0, 30.0), min_size=1, max_size=40), st.integers(1, 2))
def test_however_it_times_its_comings_a_place_ends_few_rounds(pauses: list[float], least: int) -> None:
    """Two for each exit until it is refused: one when it comes, one when it goes."""
    made = job(least, 3, "n1/1-a", "n3/3-c")
    for pause in pauses:
        made.wait(pause)
        node = f"n2/{100 + len(made.envelopes)}-aa"
        made.join(node)
        made.wait(0.0)
        made.leave(node)
        assert made.state.final is None
        assert {"n1/1-a", "n3/3-c"} <= made.assigned()

    assert made.round <= 1 + 2 * MOST
