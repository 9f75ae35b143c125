"""The coordinator's part in a stop at a common step."""

from __future__ import annotations

import json

import pytest

from elasticlib.rendezvous.coordinator._coordinator import MessageReceived, step
from elasticlib.rendezvous.coordinator._handover import decode_state, encode_state
from elasticlib.rendezvous.coordinator._state import JobState, Rules, Send
from elasticlib.rendezvous.protocol._messages import (
    CallsCounted,
    Descriptor,
    Failed,
    Join,
    Leave,
    Report,
    RoundEnd,
    StopAgreed,
    StopAsked,
    Stopped,
    StopProposed,
    StopWanted,
    Succeeded,
)

WANTED = StopWanted("b", 0, "signal 15", 30.0)
COMMON_STOP = StopAsked(0, "signal 15", 30.0, 2, 3)


class Job:
    """A job whose nodes a, b and c run round 0, with 2, 3 and 4 workers."""

    def __init__(self) -> None:
        self.state = JobState(Rules(2, 3))
        self.sent: list[tuple[str, object]] = []
        self._seqs: dict[str, int] = {}
        for node, slots in {"a": 2, "b": 3, "c": 4}.items():
            self.receive(Join(node, Descriptor(slots, "trainer", ("10.0.0.1",), 1)))
        self.sent.clear()

    def receive(self, *reports: Report) -> list[tuple[str, object]]:
        """Return what is sent for the last report, by node."""
        for report in reports:
            self._seqs[report.node] = self._seqs.get(report.node, 0) + 1
            self.state, actions = step(self.state, MessageReceived(self._seqs[report.node], report), 1.0)
            self.sent = [(action.node, action.notice) for action in actions if isinstance(action, Send)]
        return self.sent


def calls(node: str, count: int, proposed: int = 0, rate: float = 0.0) -> CallsCounted:
    return CallsCounted(node, 0, count, rate, proposed)


def to_all(notice: object, nodes: str = "abc") -> list[tuple[str, object]]:
    return [(node, notice) for node in nodes]


def test_stop_request_to_all_nodes_names_the_ranks_that_must_end() -> None:
    assert to_all(COMMON_STOP) == Job().receive(WANTED)


def test_the_first_request_of_a_round_counts() -> None:
    assert [] == Job().receive(WANTED, StopWanted("c", 0, "signal 2", 3.0))


def test_a_call_that_no_worker_has_made_is_proposed() -> None:
    job = Job()

    assert [] == job.receive(WANTED, calls("a", 7), calls("c", 9))
    assert to_all(StopProposed(0, 10)) == job.receive(calls("b", 8))
    assert [] == job.receive(calls("b", 8))


def test_fast_workers_get_a_call_further_ahead() -> None:
    assert to_all(StopProposed(0, 41)) == Job().receive(
        WANTED, calls("a", 10, rate=100.0), calls("b", 10, rate=50.0), calls("c", 9)
    )


def test_stop_is_agreed_once_no_node_can_have_passed_the_step() -> None:
    job = Job()
    job.receive(WANTED, calls("a", 7), calls("b", 8), calls("c", 9))

    assert [] == job.receive(calls("a", 8, 10), calls("b", 9, 10))
    assert to_all(StopAgreed(0)) == job.receive(calls("c", 9, 10))
    assert [] == job.receive(calls("c", 9, 10))


def test_later_stop_step_is_proposed_if_a_node_has_passed_the_first() -> None:
    job = Job()
    job.receive(WANTED, calls("a", 7, rate=10.0), calls("b", 8), calls("c", 9))

    again = job.receive(calls("a", 8, 13), calls("b", 13, 13), calls("c", 9, 13))
    late = job.receive(calls("a", 8, 13))

    assert to_all(StopProposed(0, 20)) == again
    assert [] == late
    assert to_all(StopAgreed(0)) == job.receive(calls("a", 14, 20), calls("b", 14, 20), calls("c", 14, 20))


def test_a_node_that_has_succeeded_is_not_waited_for() -> None:
    job = Job()

    assert to_all(StopProposed(0, 8), "ab") == job.receive(WANTED, calls("a", 7), Succeeded("c", 0), calls("b", 6))


def test_a_success_may_be_what_was_waited_for() -> None:
    job = Job()

    assert to_all(StopProposed(0, 8), "ab") == job.receive(WANTED, calls("a", 7), calls("b", 6), Succeeded("c", 0))


@pytest.mark.parametrize("end", [Failed("c", 0, ()), Leave("c", "gone", 0), Leave("c", "its agent died", lost=True)])
def test_the_end_of_the_round_ends_the_agreement(end: Report) -> None:
    job = Job()
    job.receive(WANTED, calls("a", 7), calls("b", 7))

    ended = job.receive(end)
    late = job.receive(calls("a", 8))

    assert RoundEnd in {type(notice) for _, notice in ended}
    assert [] == late


def test_an_ended_round_has_nothing_to_agree_on() -> None:
    assert [] == Job().receive(Failed("c", 0, ()), WANTED)


@pytest.mark.parametrize("report", [StopWanted("b", 1, "", 1.0), CallsCounted("b", 0, 1), StopWanted("x", 0, "", 1.0)])
def test_reports_without_their_round_or_request_change_nothing(report: Report) -> None:
    assert [] == Job().receive(report)


def test_the_node_that_must_end_leaves_after_its_workers() -> None:
    job = Job()
    job.receive(WANTED, calls("a", 7), calls("b", 7), calls("c", 7))

    ended = job.receive(Leave("b", "signal 15", 0), Stopped("b", 0, ()))

    assert [] == ended
    assert job.state.round is not None and job.state.round.end is not None
    assert job.state.round.end.restart and 0 == job.state.restarts


COUNTED = tuple(map(calls, "abc", (1, 2, 3)))
AHEAD = tuple(map(calls, "abc", (1, 2, 3), (4, 4, 4)))


@pytest.mark.parametrize(
    "reports", [(), (WANTED,), (WANTED, COUNTED[0]), (WANTED, *COUNTED), (WANTED, *COUNTED, *AHEAD)]
)
def test_next_coordinator_continues_the_common_stop(reports: tuple[Report, ...]) -> None:
    job = Job()
    job.receive(*reports)

    taken_over = decode_state(encode_state(job.state, 5.0), 5.0)

    assert taken_over.round is not None and job.state.round is not None
    assert job.state.round.stop == taken_over.round.stop


def test_a_memory_of_an_earlier_version_has_no_agreement() -> None:
    body = json.loads(encode_state(Job().state, 5.0))
    del body["round"]["stop"]

    after = decode_state(json.dumps(body).encode(), 5.0)

    assert after.round is not None and after.round.stop is None
