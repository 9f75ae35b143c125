"""
The agent's side of reports: the status of its node's workers, when it changes, and answers to questions.

Rules of this file: a client that reads slowly, or workers that answer slowly, hold threads of this file alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from elasticlib.errors import ConfigError, StartError
from elasticlib.job import Job
from elasticlib.logs import end_of_text
from elasticlib.processes import start_thread
from elasticlib.remote._node_reports import LAST_OUTPUT, Answer, NodeReport, Question, kept_bytes


class NodeReporter:
    """Reports on *job* by *send*, every so many *seconds* if there is news, until `last`."""

    def __init__(self, job: Job, send: Callable[[NodeReport], None], seconds: float) -> None:
        self._job, self._send, self._seconds = job, send, seconds
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
                self._send(report)

    def last(self) -> NodeReport:
        """End the reports, and return the last one, which the caller sends."""
        self._is_over.set()
        return NodeReport.of(self._job.status())


def answer_later(job: Job, data: bytes, send: Callable[[Answer], None]) -> None:
    """Answer a question by *send*, in another thread. Raises ValueError, KeyError or TypeError for other bytes."""
    question = Question.unpacked(data)
    with contextlib.suppress(StartError):
        start_thread(threading.Thread(target=lambda: send(_answer(job, question)), daemon=True))


def last_output(job: Job, world: int) -> Answer:
    """Return the end of the output of the workers of *job*, which has ended; *world*: ranks on all nodes."""
    most = kept_bytes(world)
    texts: dict[int, str] = {}
    for each in job.status().ranks:
        # Without files, or if they are removed meanwhile, the client has what it was shown.
        with contextlib.suppress(ConfigError, OSError):
            texts[each.rank] = "".join(end_of_text(file, most) for file in job.files(each.rank))[-most:]
    return Answer(LAST_OUTPUT, texts)


def _answer(job: Job, question: Question) -> Answer:
    try:
        return Answer(question.number, _texts(job, question))
    except Exception as error:
        return Answer(question.number, error=str(error) or type(error).__name__)


def _texts(job: Job, question: Question) -> dict[int, str]:
    if question.about == "logs":
        return {question.rank: job.logs(question.rank)}
    return dict(job.stacks(question.timeout))
