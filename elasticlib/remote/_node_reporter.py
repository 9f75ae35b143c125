"""
The agent's side of reports: the status of its node's workers, when it changes, and answers to questions.

Rules of this file: a client that reads slowly, or workers that answer slowly, hold threads of this file alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from elasticlib.engines import Kind, frame
from elasticlib.errors import StartError
from elasticlib.job import Job
from elasticlib.processes import start_thread
from elasticlib.remote._node_reports import Answer, NodeReport, Question

_LEAST_SECONDS = 0.5
_NODES_A_SECOND = 100
"""Reports that a client takes: of a thousand nodes each one reports every ten seconds."""


class NodeReporter:
    """Reports on *job* by *send*, from its start to `last`."""

    def __init__(self, job: Job, send: Callable[[bytes], None], nodes: int) -> None:
        self._job, self._send = job, send
        self._seconds = max(_LEAST_SECONDS, nodes / _NODES_A_SECOND)
        self._is_over = threading.Event()
        # Without a thread the client knows less, and the job runs all the same.
        with contextlib.suppress(StartError):
            start_thread(threading.Thread(target=self._run, name="elasticlib-reports", daemon=True))

    def _run(self) -> None:
        last = None
        while not self._is_over.wait(self._seconds):
            report = NodeReport.of(self._job.status())
            if report.is_news_after(last):
                last = report
                self._send(_framed(report))

    def last(self) -> bytes:
        """End the reports, and return a frame with the last one, which the caller sends."""
        self._is_over.set()
        return _framed(NodeReport.of(self._job.status()))

    def answer(self, data: bytes) -> None:
        """Answer a question, later. Raises ValueError, KeyError or TypeError for bytes that are none."""
        question = Question.unpacked(data)
        with contextlib.suppress(StartError):
            start_thread(threading.Thread(target=self._answer, args=(question,), daemon=True))

    def _answer(self, question: Question) -> None:
        try:
            answer = Answer(question.number, self._texts(question))
        except Exception as error:
            answer = Answer(question.number, error=str(error) or type(error).__name__)
        self._send(frame(Kind.ANSWER, answer.packed()))

    def _texts(self, question: Question) -> dict[int, str]:
        if question.about == "logs":
            return {question.rank: self._job.logs(question.rank)}
        return dict(self._job.stacks(question.timeout))


def _framed(report: NodeReport) -> bytes:
    return frame(Kind.REPORT, report.packed())
