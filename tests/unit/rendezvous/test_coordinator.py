"""When a round starts and ends and why, and how the job ends."""

from __future__ import annotations

import pytest

from elasticlib.errors import ConfigError
from elasticlib.rendezvous._coordinator import Action, Received, Rules, Send, State, Tick, WakeAt, abandon, step
from elasticlib.rendezvous._messages import (
    Descriptor,
    Failed,
    FailureNote,
    Final,
    Join,
    Leave,
    Notice,
    Report,
    RoundEnd,
    Seat,
    Stopped,
    Succeeded,
)


class Desk:
    """A coordinator at work: hands in reports, keeps what each box was told."""

    def __init__(self, rules: Rules) -> None:
        self.state = State(rules)
        self.now = 0.0
        self.number = 0
        self.boxes: dict[int, list[Notice]] = {}
        self.actions: tuple[Action, ...] = ()
        self.tick()

    def tick(self, seconds: float = 0.0) -> Desk:
        self.now += seconds
        self._step(Tick())
        return self

    def hear(self, *reports: Report) -> int:
        """The number of the last report, which is the box of a Join."""
        for report in reports:
            self.number += 1
            self._step(Received(self.number, report))
        return self.number

    def join(self, *nodes: str) -> list[int]:
        return [self.hear(Join(node, offer())) for node in nodes]

    def sent(self) -> dict[str, Notice]:
        """What the last step told, by node."""
        return {action.node: action.notice for action in self.actions if isinstance(action, Send)}

    def _step(self, event: Received | Tick) -> None:
        self.state, self.actions = step(self.state, event, self.now)
        for action in self.actions:
            if isinstance(action, Send):
                self.boxes.setdefault(action.box, []).append(action.notice)


def offer(port: int = 1) -> Descriptor:
    return Descriptor(2, "trainer", ("10.0.0.1",), port)


def note(rank: int, *, age: float = 0.0, secondary: bool = False, message: str = "") -> FailureNote:
    return FailureNote(rank, rank, 100, 1, message, secondary=secondary, age=age)


def running(*nodes: str, spare_room: int = 0, max_restarts: int = 3, min_nodes: int | None = None) -> Desk:
    size = len(nodes)
    rules = Rules(min_nodes or size, size + spare_room, max_restarts, last_call=30.0, join_timeout=600.0)
    desk = Desk(rules)
    desk.join(*nodes)
    if spare_room:
        desk.tick(30.0)
    assert desk.state.round is not None
    return desk


def seat_of(notice: Notice) -> Seat:
    assert isinstance(notice, Seat)
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
        {"join_timeout": 0.0},
    ],
)
def test_rules_that_cannot_be_kept_are_refused(rules: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=list(rules)[-1]):
        Rules(**rules)  # type: ignore[arg-type]


def test_the_error_for_max_below_min_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="max_nodes=1 is below min_nodes=2"):
        Rules(2, 1)


# --- how a round starts


def test_one_node_is_seated_at_once() -> None:
    desk = Desk(Rules())

    desk.join("a")

    seat = seat_of(desk.sent()["a"])
    assert (0, 0, 1, 2) == (seat.round, seat.group_rank, seat.group_world_size, seat.world_size)
    assert seat.why == "all 1 nodes are there"


def test_max_nodes_are_seated_at_once() -> None:
    desk = Desk(Rules(1, 2))
    desk.join("b", "a")

    assert {"a": 0, "b": 1} == {node: seat_of(notice).group_rank for node, notice in desk.sent().items()}


def test_between_min_and_max_the_quiet_period_counts_from_the_last_join() -> None:
    desk = Desk(Rules(1, 3, last_call=30.0))
    desk.join("a")
    desk.tick(20.0).join("b")

    assert (WakeAt(50.0),) == desk.actions
    assert not desk.tick(29.0).sent()
    assert {"a", "b"} == desk.tick(1.0).sent().keys()


def test_too_few_nodes_end_the_job_after_the_join_time() -> None:
    desk = Desk(Rules(2, 2, join_timeout=600.0))
    (box,) = desk.join("a")

    assert (WakeAt(600.0),) == desk.actions
    desk.tick(600.0)
    assert [Final(False, "1 of at least 2 nodes came in 600 s (a)")] == desk.boxes[box]


def test_enough_nodes_are_seated_when_the_join_time_ends_before_the_quiet_period() -> None:
    desk = Desk(Rules(1, 2, last_call=1000.0, join_timeout=600.0))
    desk.join("a")

    assert "a" in desk.tick(600.0).sent()


def test_a_node_that_joins_twice_gets_its_seat_in_the_newer_box() -> None:
    desk = Desk(Rules(2, 2))
    old, new, _ = desk.join("a", "a", "b")

    assert old not in desk.boxes
    assert 0 == seat_of(desk.boxes[new][0]).group_rank


def test_nodes_beyond_max_wait_and_take_a_seat_that_becomes_free() -> None:
    desk = running("a", "b")
    desk.join("c")

    assert not desk.sent()
    desk.hear(Leave("a", "SIGTERM"))
    desk.join("b")
    assert {"b": 0, "c": 1} == {node: seat_of(notice).group_rank for node, notice in desk.sent().items()}


def test_a_spare_does_not_take_the_seat_of_a_node_that_is_coming_back() -> None:
    desk = running("a", "b")
    desk.join("c")
    desk.hear(Failed("a", 0, (note(0),)), Stopped("a", 0, ()), Stopped("b", 0, ()))
    desk.join("a")

    assert not desk.sent()
    desk.join("b")
    assert {"a", "b"} == desk.sent().keys()


def test_after_a_round_all_who_stayed_are_seated_without_a_quiet_period() -> None:
    desk = running("a", "b", spare_room=2)
    desk.hear(Failed("a", 0, (note(0),)))
    desk.join("b", "a")

    assert {"a", "b"} == desk.sent().keys()
    assert seat_of(desk.sent()["a"]).why == "all nodes that stayed after round 0 are back, 2 are there"


def test_a_node_that_is_coming_back_is_not_left_behind_by_a_short_quiet_period() -> None:
    desk = Desk(Rules(1, 3, last_call=0.0))
    desk.join("a", "b", "a")
    desk.hear(Stopped("a", 1, ()), Stopped("b", 1, ()))
    desk.join("a")

    assert not desk.tick(1.0).sent()
    desk.join("b")
    assert {"a", "b"} == desk.sent().keys()


def test_a_node_that_does_not_come_back_in_the_join_time_is_left_behind() -> None:
    desk = running("a", "b", min_nodes=1)
    desk.hear(Stopped("a", 0, ()), Stopped("b", 0, ()))
    desk.join("a")

    assert (WakeAt(600.0),) == desk.actions
    desk.tick(600.0)
    assert seat_of(desk.sent()["a"]).why == "1 nodes are there; b did not return in 600 s"


def test_members_that_stay_keep_their_order() -> None:
    desk = running("b", "c", spare_room=1)
    desk.join("a", "c", "b")

    assert {"b": 0, "c": 1, "a": 2} == {node: seat_of(notice).group_rank for node, notice in desk.sent().items()}


def test_nobody_is_seated_while_a_worker_of_the_last_round_may_run() -> None:
    desk = running("a", "b", min_nodes=1)
    desk.hear(Leave("b", "SIGTERM", round=0))
    desk.join("a")

    assert not desk.tick(10_000.0).sent()
    desk.hear(Stopped("b", 0, ()))
    assert {"a"} == desk.sent().keys()


def test_the_join_time_begins_when_the_last_worker_is_gone() -> None:
    desk = running("a", "b")
    desk.hear(Leave("b", "SIGTERM", round=0))
    desk.join("a")
    desk.tick(1000.0).hear(Stopped("b", 0, ()))

    assert (WakeAt(1600.0),) == desk.actions
    desk.tick(600.0)
    assert final_of(desk).why == "1 of at least 2 nodes came in 600 s (a)"


def test_nodes_that_did_not_come_back_are_named() -> None:
    desk = running("a", "b")
    desk.hear(Failed("a", 0, (note(0),)), Stopped("b", 0, ()))
    desk.join("a")
    desk.tick(600.0)

    assert final_of(desk).why == "1 of at least 2 nodes came in 600 s (a); missing of round 0: b"


# --- failures


def test_a_failure_ends_the_round_for_all_and_spends_one_restart() -> None:
    desk = running("a", "b", max_restarts=3)
    desk.hear(Failed("b", 0, (note(2, message="ValueError: bad\nmore"),)))

    why = "rank 2 on node b ended with exit status 1 (ValueError: bad); restart 1 of 3"
    assert {"a": RoundEnd(0, why, True), "b": RoundEnd(0, why, True)} == desk.sent()
    assert 1 == desk.state.restarts


def test_a_signal_is_named_as_such() -> None:
    desk = running("a")
    desk.hear(Failed("a", 0, (FailureNote(1, 1, 100, -9),)))

    assert end_of(desk.sent()["a"]).why == "rank 1 on node a was ended by signal 9; restart 1 of 3"


def test_a_failure_without_notes_is_a_failure() -> None:
    desk = running("a", max_restarts=0)
    desk.hear(Failed("a", 0, ()), Stopped("a", 0, ()))

    assert Final(False, "workers of node a failed; no restarts are allowed") == desk.sent()["a"]


def test_the_next_seats_carry_the_restarts_that_the_job_has_used() -> None:
    desk = running("a", max_restarts=3)
    desk.hear(Failed("a", 0, (note(0),)))
    desk.join("a")

    seat = seat_of(desk.sent()["a"])
    assert (1, 1, 3) == (seat.round, seat.restart_count, seat.max_restarts)


def test_further_failures_of_an_ended_round_spend_nothing() -> None:
    desk = running("a", "b", max_restarts=3)
    desk.hear(Failed("a", 0, (note(0),)), Failed("b", 0, (note(2),)), Stopped("b", 0, (note(2), note(3))))

    assert 1 == desk.state.restarts
    assert not desk.sent()


def test_stopped_with_failures_is_a_failure_too() -> None:
    desk = running("a", max_restarts=1)
    desk.hear(Stopped("a", 0, (note(0),)))

    assert end_of(desk.sent()["a"]).why == "rank 0 on node a ended with exit status 1; restart 1 of 1"


def test_workers_that_stopped_without_failing_end_the_round_for_free() -> None:
    desk = running("a")
    desk.hear(Stopped("a", 0, ()))

    assert {"a": RoundEnd(0, "node a stopped its workers", True)} == desk.sent()
    assert 0 == desk.state.restarts


def test_without_a_restart_left_the_end_waits_until_all_have_stopped() -> None:
    desk = running("a", "b", max_restarts=0)
    desk.hear(Failed("a", 0, (note(0),)))

    assert not end_of(desk.sent()["b"]).restart
    desk.hear(Stopped("a", 0, (note(0),)))
    assert not desk.sent()
    desk.hear(Stopped("b", 0, ()))
    why = "rank 0 on node a ended with exit status 1; no restarts are allowed"
    assert {"a": Final(False, why, "a", note(0)), "b": Final(False, why, "a", note(0))} == desk.sent()


@pytest.mark.parametrize("gone", [Succeeded("b", 0), Leave("b", "SIGTERM"), Stopped("b", 0, ())])
def test_the_end_does_not_wait_for_nodes_without_workers(gone: Report) -> None:
    desk = running("a", "b", max_restarts=0)
    desk.hear(Failed("a", 0, (note(0),)), Stopped("a", 0, ()), gone)

    assert "a" == final_of(desk).root_node


def test_a_failure_after_another_nodes_success_restarts_everybody() -> None:
    desk = running("a", "b")
    desk.hear(Succeeded("a", 0), Failed("b", 0, (note(2),)))

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
    desk.hear(first)
    desk.tick(0.5).hear(second, Stopped("a", 0, ()))

    assert root == final_of(desk).root_node


def test_a_later_note_of_a_failure_completes_it_and_keeps_its_time() -> None:
    desk = running("a", "b", max_restarts=0)
    desk.hear(Failed("a", 0, (note(0),)))
    desk.tick(1.0).hear(Failed("b", 0, (note(2, age=0.5),)), Stopped("b", 0, ()))
    desk.hear(Stopped("a", 0, (note(0, message="KeyError"),)))

    assert ("a", note(0, message="KeyError")) == (final_of(desk).root_node, final_of(desk).root)


# --- success


def test_the_job_succeeds_when_all_seated_nodes_have() -> None:
    desk = running("a", "b")
    desk.hear(Succeeded("b", 0))

    assert not desk.sent()
    desk.hear(Succeeded("a", 0))
    final = Final(True, "all 2 nodes succeeded in round 0")
    assert {"a": final, "b": final} == desk.sent()


def test_success_of_all_counts_though_an_arrival_had_ended_the_round() -> None:
    desk = running("a", "b", spare_room=1)
    desk.join("c")
    desk.hear(Succeeded("a", 0), Succeeded("b", 0))

    assert {"a", "b", "c"} == desk.sent().keys()
    assert final_of(desk).succeeded


def test_spares_are_told_that_the_job_succeeded() -> None:
    desk = running("a")
    desk.join("b")
    desk.hear(Succeeded("a", 0))

    assert {"a", "b"} == desk.sent().keys()


def test_who_joins_after_the_end_is_told_the_verdict() -> None:
    desk = running("a")
    desk.hear(Succeeded("a", 0))
    (box,) = desk.join("b")

    assert [final_of(desk)] == desk.boxes[box]


# --- who comes and goes


def test_an_arrival_ends_the_round_for_free_when_there_is_room() -> None:
    desk = running("a", spare_room=1)
    desk.join("b")

    assert {"a": RoundEnd(0, "node b joins", True)} == desk.sent()
    assert 0 == desk.state.restarts
    desk.join("a")
    assert {"a": 0, "b": 1} == {node: seat_of(notice).group_rank for node, notice in desk.sent().items()}


def test_an_arrival_does_not_undo_finished_work() -> None:
    desk = running("a", "b", spare_room=1)
    desk.hear(Succeeded("a", 0))
    desk.join("c")

    assert not desk.sent()
    desk.hear(Succeeded("b", 0))
    assert {"a", "b", "c"} == desk.sent().keys()


def test_a_member_that_comes_anew_ends_the_round_for_the_others() -> None:
    desk = running("a", "b")
    desk.hear(Succeeded("a", 0))
    desk.join("b")

    assert {"a": RoundEnd(0, "node b came anew", True)} == desk.sent()


def test_a_leave_ends_the_round_for_free_and_answers_the_leaver() -> None:
    desk = running("a", "b", min_nodes=1)
    desk.hear(Leave("a", "SIGTERM"))

    assert {"a": Final(False, "node a left: SIGTERM"), "b": RoundEnd(0, "node a left: SIGTERM", True)} == desk.sent()
    assert 0 == desk.state.restarts
    assert desk.state.final is None


@pytest.mark.parametrize("before", [(), (Stopped("a", 0, ()),), (Failed("a", 0, (note(0),)),)])
def test_a_job_that_everybody_left_is_over(before: tuple[Report, ...]) -> None:
    desk = running("a")
    desk.hear(*before)
    desk.hear(Leave("a", "SIGTERM"))

    assert {"a": Final(False, "node a left: SIGTERM")} == desk.sent()
    assert final_of(desk).why == "node a left: SIGTERM"


def test_a_node_that_leaves_before_it_was_seated_is_answered() -> None:
    desk = Desk(Rules(3, 3))
    box, _ = desk.join("a", "b")
    desk.hear(Leave("a", "SIGINT"))

    assert [Final(False, "node a left: SIGINT")] == desk.boxes[box]


def test_the_job_waits_for_others_when_one_of_two_leaves_before_the_start() -> None:
    desk = Desk(Rules(3, 3))
    desk.join("a", "b")
    desk.hear(Leave("a", "SIGINT"))

    assert desk.state.final is None
    desk.join("c", "d")
    assert {"b", "c", "d"} == desk.sent().keys()


def test_a_leave_after_success_does_not_end_the_round() -> None:
    desk = running("a", "b")
    desk.hear(Succeeded("a", 0), Leave("a", "done"))

    assert {"a"} == desk.sent().keys()
    desk.hear(Succeeded("b", 0))
    assert {"b"} == desk.sent().keys()
    assert final_of(desk).succeeded


def test_a_spare_leaves_unnoticed() -> None:
    desk = running("a")
    desk.join("b")
    desk.hear(Leave("b", "SIGTERM"))

    assert {"b"} == desk.sent().keys()
    assert desk.state.round is not None and desk.state.round.end is None


# --- what changes nothing


STALE: list[Report] = [
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
    desk.hear(Failed("a", 0, (note(0),)))
    desk.join("a")
    before = desk.state
    desk.hear(report)

    assert (before.round, before.restarts, before.waiting) == (
        desk.state.round,
        desk.state.restarts,
        desk.state.waiting,
    )
    assert not desk.actions


def test_a_report_that_comes_again_changes_nothing() -> None:
    desk = running("a", spare_room=1)
    before = desk.state
    after, actions = step(before, Received(1, Join("a", offer(2))), desk.now)

    assert (before, ()) == (after, actions)


def test_a_failure_report_of_a_node_that_succeeded_changes_nothing() -> None:
    desk = running("a", "b")
    desk.hear(Succeeded("a", 0), Failed("a", 0, (note(0),)))

    assert not desk.sent()
    assert 0 == desk.state.restarts


def test_nothing_happens_after_the_end() -> None:
    desk = running("a")
    desk.hear(Succeeded("a", 0))
    before = final_of(desk)
    desk.hear(Failed("a", 0, (note(0),)), Leave("a", "SIGTERM"), Stopped("a", 0, ()))
    desk.tick(10_000.0)

    assert before is final_of(desk)
    assert not desk.actions


def test_an_abandoned_job_tells_everybody_once() -> None:
    desk = running("a")
    desk.join("b")
    state, actions = abandon(desk.state, "the store is gone")

    assert {"a", "b"} == {action.node for action in actions if isinstance(action, Send)}
    assert (state, ()) == abandon(state, "again")
