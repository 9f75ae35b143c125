"""A node's share as a whole: who hosts, who leaves, and what is said in whose place."""

from __future__ import annotations

from typing import Any

import pytest

from elasticlib.rendezvous._job import Job
from elasticlib.rendezvous._station import Station


class Desk:
    """A member that notes what it is asked, and knows no end of the job."""

    round = 3

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def leave(self, why: str, round: int | None = None) -> None:
        self.asked.append((why, round))

    def is_over(self) -> bool:
        return False

    def close(self) -> None:
        pass


def station(**facts: Any) -> tuple[Station, Any]:
    made = Station(Job(run_id="job", node="n1/1-a", backend="c10d", endpoint="127.0.0.1:29400", **facts))
    made.member = member = Desk()  # type: ignore[assignment]
    return made, member


def test_a_dead_agent_is_spoken_for_once() -> None:
    """A second word, which knows of no workers, would have others take the ranks of those that still run."""
    made, member = station()
    made.witness("its agent died", False)

    made.close(0.0)

    assert [("its agent died", 3)] == member.asked


def test_an_agent_that_goes_without_a_word_is_spoken_for() -> None:
    made, member = station()

    made.close(0.0)

    assert [("its agent went without a word", None)] == member.asked


def test_a_store_host_that_goes_after_the_end_is_not_waited_for() -> None:
    said: list[str | None] = []

    class Over:
        def is_over(self) -> bool:
            return True

        def abandon(self, why: str, leaver: str | None) -> None:
            said.append(leaver)

    made, _ = station()
    made._host = Over()  # type: ignore[assignment]

    assert made._left("signal 15")
    assert ["n1/1-a"] == said


@pytest.mark.parametrize(("join_timeout", "patience"), [(0.0, 600.0), (50.0, 50.0)])
def test_a_host_name_has_time_to_be_found_though_no_replacement_is_waited_for(
    join_timeout: float, patience: float
) -> None:
    made, _ = station(join_timeout=join_timeout)
    deadlines: list[float] = []

    class Backend:
        def serve(self, deadline: float) -> bool:
            deadlines.append(deadline)
            raise ConnectionError

    made._backend = Backend()
    with pytest.raises(ConnectionError):
        made._dial_c10d(5.0)

    assert [pytest.approx(patience)] == [deadline - made._began for deadline in deadlines]
