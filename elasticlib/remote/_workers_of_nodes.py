"""
The workers of all nodes of a call, as its client knows them by the reports and answers of their agents.

Rules of this file: any thread may ask. The thread of the call alone talks to agents: it finds a request in the job's
inbox.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from itertools import count

from attrs import define, evolve, field

from elasticlib.engines import Kind, frame
from elasticlib.errors import ConfigError
from elasticlib.job import JobCourse, RankStatus
from elasticlib.processes import wait_for_change
from elasticlib.remote._node_reports import LAST_OUTPUT, Answer, NodeReport, Question, course_of, ranks_of
from elasticlib.stacks import number_ranges
from elasticlib.workers import Inbox

_LOGS_SECONDS = 30.0
"""Seconds for the output of a worker."""


@define(eq=False)
class AgentRequest:
    """A question to the agents at some places, and their answers."""

    question: Question
    places: Collection[int] | None
    """None: all places."""
    answers: dict[int, Answer] = field(factory=dict)
    """By place."""
    missing: set[int] | None = None
    """Places without an answer; None until the question was sent."""

    @property
    def is_over(self) -> bool:
        """True once no answer is expected any more."""
        return self.missing is not None and not self.missing


class WorkersOfNodes:
    """The workers of all nodes; fulfils `elasticlib.job.WorkersElsewhere`."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._changed = threading.Condition()
        self._reports: dict[int, NodeReport] = {}
        """The last report of each node, by place."""
        self._last_output: dict[int, Answer] = {}
        """The end of the output of nodes that have ended, by place."""
        self._requests: dict[int, AgentRequest] = {}
        """Requests that wait for answers, by number."""
        self._numbers = count()
        self._has_ended = False

    # For the thread of the call.

    def end(self) -> None:
        """Note the end of the call: no agent answers any more."""
        with self._changed:
            self._has_ended = True
            self._reports = {place: report.after_the_end() for place, report in self._reports.items()}
            for request in self._requests.values():
                request.missing = set()
            self._changed.notify_all()

    def note_report(self, place: int, data: bytes) -> None:
        """Note a report of the agent at *place*. Raises ValueError, KeyError or TypeError."""
        report = NodeReport.unpacked(data)
        with self._changed:
            self._reports[place] = report
            # A new agent reports from there.
            self._last_output.pop(place, None)

    def note_answer(self, place: int, data: bytes) -> None:
        """Note an answer of the agent at *place*. Raises as `note_report`."""
        answer = Answer.unpacked(data)
        with self._changed:
            if answer.number == LAST_OUTPUT:
                self._last_output[place] = answer
            request = self._requests.get(answer.number)
            if request is not None and request.missing is not None:
                request.answers[place] = answer
                request.missing.discard(place)
                self._changed.notify_all()

    def note_loss(self, place: int, *, is_expected: bool) -> None:
        """Note that no agent is at *place* now; *is_expected*: its node had ended before."""
        with self._changed:
            if not is_expected:
                self._reports.pop(place, None)
            # No answer comes from this place any more.
            for request in self._requests.values():
                if request.missing is not None:
                    request.missing.discard(place)
            self._changed.notify_all()

    def send(self, request: AgentRequest, living: Iterable[int], send: Callable[[int, bytes], None]) -> None:
        """Send the question of *request* to those agents that are *living*."""
        places = [each for each in living if request.places is None or each in request.places]
        with self._changed:
            request.missing = set(places)
            self._changed.notify_all()
        for place in places:
            send(place, frame(Kind.ASK, request.question.packed()))

    # For any thread.

    def course(self) -> JobCourse:
        """Return the state of the job by the reports of its nodes."""
        return course_of(list(self._reports.values()))

    def ranks(self) -> tuple[RankStatus, ...]:
        """Return the status of the workers of all nodes, by rank."""
        return ranks_of(list(self._reports.values()))

    def stacks(self, timeout: float) -> dict[int, str]:
        """Return the stacks of all workers, by rank. Raises `TimeoutError` if no node answers in time."""
        request = self._await_answers("stacks", None, timeout)
        texts = {rank: text for answer in request.answers.values() for rank, text in answer.texts.items()}
        if not texts and not request.is_over:
            raise TimeoutError(f"no node has returned the stacks of its workers within {timeout:g} s")
        return texts

    def logs(self, rank: int) -> str:
        """Return the output of the worker of *rank*. Raises `ConfigError`, or `TimeoutError` without an answer."""
        if not self.ranks() and not self._has_ended:
            # The workers have not begun.
            return ""
        place = self._place_of(rank)
        ended = self._last_output.get(place)
        if ended is not None and rank in ended.texts:
            return ended.texts[rank]

        request = self._await_answers("logs", (place,), _LOGS_SECONDS, rank)
        answer = request.answers.get(place)
        if answer is None:
            raise TimeoutError(f"the node of rank {rank} has ended, or not answered within {_LOGS_SECONDS:g} s")
        if answer.error:
            raise ConfigError(answer.error)
        return answer.texts[rank]

    def _place_of(self, rank: int) -> int:
        for place, report in list(self._reports.items()):
            if any(each.rank == rank for each in report.ranks):
                return place
        known = number_ranges([each.rank for each in self.ranks()]) or "none"
        raise ConfigError(f"rank {rank} runs on no node now (ranks: {known})")

    def _await_answers(self, about: str, places: Collection[int] | None, timeout: float, rank: int = 0) -> AgentRequest:
        """Return a request after all answers, or after *timeout* seconds."""
        request = AgentRequest(Question(next(self._numbers), about, rank, timeout), places)
        with self._changed:
            if self._has_ended:
                raise ConfigError(f"the call has ended: ask for the {about} of its workers while it runs")
            self._requests[request.question.number] = request
            self._inbox.put(request, may_wait=True)
            wait_for_change(self._changed, lambda: request.is_over, timeout)
            del self._requests[request.question.number]
            # A late answer must not change what the caller reads.
            return evolve(request, answers=dict(request.answers))
