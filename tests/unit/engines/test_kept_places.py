"""Agents that serve one call after another: what each call learns, and which agents are replaced."""

from __future__ import annotations

import pytest

from elasticlib.engines import AgentLost, AgentOutput, AgentResult, AgentUp, EngineEnds, EngineEvent
from elasticlib.engines._kept_places import AgentRenewal, KeptPlaces

UP, OUTPUT, RESULT, LOST = AgentUp(0, "h:1"), AgentOutput(0, b"\x01a"), AgentResult(0, b"r"), AgentLost(0, "gone")
IDLE_AGAIN = AgentLost(0, "it waits for the next call")
AGAIN = AgentRenewal(0)


@pytest.mark.parametrize(
    ("before", "event", "expected"),
    [
        ([], UP, [UP]),
        ([], OUTPUT, [OUTPUT]),
        ([], RESULT, [RESULT, IDLE_AGAIN]),
        ([], LOST, [AGAIN]),
        ([UP], OUTPUT, [OUTPUT]),
        ([UP], RESULT, [RESULT, IDLE_AGAIN]),
        ([UP], LOST, [LOST]),
        ([RESULT], OUTPUT, []),
        ([RESULT], RESULT, []),
        ([RESULT], LOST, []),
        ([LOST], UP, []),
    ],
    ids=str,
)
def test_events_of_a_call(before: list[EngineEvent], event: EngineEvent, expected: list[object]) -> None:
    places = KeptPlaces(1)
    assert [] == places.begin_call()
    for each in before:
        places.handle(each)

    assert expected == list(places.handle(event))


@pytest.mark.parametrize(
    ("events", "at_end", "at_next"),
    [
        ([UP, RESULT], [], []),
        ([UP], [AGAIN], []),
        ([], [AGAIN], []),
        ([UP, LOST], [AGAIN], []),
        ([UP, RESULT, LOST], [AGAIN], []),
    ],
    ids=str,
)
def test_agents_that_have_not_ended_a_call_are_replaced(
    events: list[EngineEvent], at_end: list[AgentRenewal], at_next: list[AgentRenewal]
) -> None:
    places = KeptPlaces(1)
    places.begin_call()
    for each in events:
        places.handle(each)

    assert at_end == places.end_call()
    assert at_next == places.begin_call()


def test_agent_lost_between_calls_is_replaced_at_the_next_one() -> None:
    places = KeptPlaces(2)
    places.begin_call()
    places.handle(RESULT)
    places.handle(AgentResult(1, b"r"))
    places.end_call()

    assert [] == places.handle(LOST)
    assert not places.are_all_lost()
    assert [AGAIN] == places.begin_call()
    # To the call, it is the first agent of this place; at the engine it is the second.
    assert [UP] == list(places.handle(AgentUp(0, "h:1", 1)))
    assert [LOST] == list(places.handle(AgentLost(0, "gone", 1)))


def test_call_learns_nothing_of_an_agent_lost_before_it() -> None:
    places = KeptPlaces(1)
    places.begin_call()
    assert [AGAIN] == list(places.handle(LOST))
    assert [UP] == list(places.handle(AgentUp(0, "h:1", 1)))

    assert [LOST] == list(places.handle(AgentLost(0, "gone", 1)))


def test_agent_that_is_placed_on_a_lost_machine_again_is_replaced_again() -> None:
    places = KeptPlaces(1)
    places.begin_call()

    renewals = [list(places.handle(AgentLost(0, "gone", number))) for number in range(3)]

    assert [[AGAIN], [AGAIN], [LOST]] == renewals
    assert [AGAIN] == places.end_call()


def test_end_of_the_engine_is_for_the_call() -> None:
    places = KeptPlaces(1)
    places.begin_call()

    assert [EngineEnds("over")] == list(places.handle(EngineEnds("over")))


def test_agents_of_each_call_are_counted_from_zero() -> None:
    places = KeptPlaces(1)
    places.begin_call()
    places.handle(UP)
    places.handle(LOST)
    places.replace(0)
    assert [AgentUp(0, "h:1", 1)] == list(places.handle(AgentUp(0, "h:1", 1)))
    assert places.is_at_call(0)
    places.handle(AgentResult(0, b"r", 1))
    assert not places.is_at_call(0)
    assert [] == places.end_call()

    places.begin_call()
    assert [UP] == list(places.handle(AgentUp(0, "h:1", 1)))
