"""The end of a call on a batch system, from outcomes of nodes and the state of the job."""

from __future__ import annotations

import pytest

from elasticlib.engines import AgentEnded, OutcomeKind, RaiseError, ReturnResults
from elasticlib.remote._batch_decision import decide


def results(place: int, *ranks: int, world: int = 2) -> AgentEnded:
    return AgentEnded(place, OutcomeKind.SUCCEEDED, ranks=frozenset(ranks), world=world)


def ended(place: int, kind: OutcomeKind, *, has_cause: bool = False) -> AgentEnded:
    return AgentEnded(place, kind, has_cause=has_cause, why=kind.value)


FAILED, ERROR, CUT_OFF = OutcomeKind.FAILED, OutcomeKind.ERROR, OutcomeKind.CUT_OFF


@pytest.mark.parametrize(
    ("outcomes", "early", "late"),
    [
        ([], None, None),
        ([results(0, 0)], None, None),
        ([results(0, 0), results(1, 1)], ReturnResults(), ReturnResults()),
        ([results(0, 0, 1), ended(1, OutcomeKind.UNNEEDED)], ReturnResults(), ReturnResults()),
        ([results(0, 0, world=1), ended(1, CUT_OFF)], ReturnResults(), ReturnResults()),
        ([ended(0, FAILED)], None, RaiseError("failed", 0)),
        ([ended(0, FAILED), ended(1, FAILED, has_cause=True)], RaiseError("failed", 1), RaiseError("failed", 1)),
        ([results(0, 0), ended(1, FAILED)], RaiseError("failed", 1), RaiseError("failed", 1)),
        ([ended(0, CUT_OFF), ended(1, CUT_OFF)], None, RaiseError("cut off", 0)),
        ([ended(0, CUT_OFF), ended(1, FAILED)], RaiseError("failed", 1), RaiseError("failed", 1)),
        ([ended(1, ERROR)], RaiseError("error", 1), RaiseError("error", 1)),
        ([ended(0, OutcomeKind.UNNEEDED), ended(1, OutcomeKind.UNNEEDED)], None, None),
    ],
)
def test_decision(outcomes: list[AgentEnded], early: object, late: object) -> None:
    assert early == decide(outcomes, 2, is_over=False)
    assert late == decide(outcomes, 2, is_over=True)
