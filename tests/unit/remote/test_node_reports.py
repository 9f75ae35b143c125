"""Reports of an agent about its workers, and questions to it: frames, and the client's view of all nodes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import cast

import pytest

from elasticlib.engines import FrameReader, Kind
from elasticlib.errors import ConfigError
from elasticlib.job import Job, JobCourse, JobStatus, RankStatus
from elasticlib.remote._node_reporter import NodeReporter, answer_later, last_output
from elasticlib.remote._node_reports import LAST_OUTPUT, Answer, NodeReport, Question, seconds_between_reports
from elasticlib.remote._workers_of_nodes import AgentRequest, WorkersOfNodes
from elasticlib.workers import Inbox
from tests.waiting import wait_until


def rank_status(rank: int, *, step: int | None = None, age: float | None = None, loss: float = 0.5) -> RankStatus:
    return RankStatus(
        rank=rank,
        local_rank=0,
        node=rank,
        host=f"h{rank}",
        state="running",
        pid=100 + rank,
        exitcode=None,
        restarts=0,
        step=step,
        total=None,
        metrics={"loss": loss},
        age=age,
        last_line="a line",
    )


def report(
    rank: int, state: str = "running", *, round: int = 0, step: int | None = None, age: float = 1.0
) -> NodeReport:
    return NodeReport(state, "", round, round, 2, (rank_status(rank, step=step, age=age),))


@pytest.mark.parametrize("loss", [0.5, math.inf])
def test_a_report_arrives_as_it_was_sent(loss: float) -> None:
    status = JobStatus("train", "running", "", 3.0, 0, 1, 2, (rank_status(0, step=7, loss=loss),))

    assert NodeReport.of(status) == NodeReport.unpacked(NodeReport.of(status).packed())


@pytest.mark.parametrize(
    ("before", "after", "is_news"),
    [
        (None, report(0), True),
        (report(0, age=1.0), report(0, age=2.0), False),
        (report(0, step=1), report(0, step=2), True),
        (report(0), report(0, "stopping"), True),
    ],
)
def test_report_with_only_a_later_time_is_not_news(before: NodeReport | None, after: NodeReport, is_news: bool) -> None:
    assert is_news == after.is_news_after(before)


@pytest.mark.parametrize("data", [b"", b"[]", b'{"ranks": 1}', b'{"ranks": [{}]}', b'{"state": "running"}'])
def test_bytes_that_are_not_a_report_are_refused(data: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        NodeReport.unpacked(data)


def test_an_answer_keeps_the_ends_of_long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticlib.remote._node_reports._MOST_CHARACTERS", 8)

    assert {0: "cdef", 3: "x"} == Answer.unpacked(Answer(1, {0: "abcdef", 3: "x"}).packed()).texts


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    made = Inbox()
    yield made
    made.close()


@pytest.fixture
def workers(inbox: Inbox) -> WorkersOfNodes:
    return WorkersOfNodes(inbox)


def test_the_ranks_of_all_nodes_are_in_order(workers: WorkersOfNodes) -> None:
    workers.note_report(1, report(0).packed())
    workers.note_report(0, report(1).packed())

    assert [0, 1] == [each.rank for each in workers.ranks()]


@pytest.mark.parametrize(
    ("states", "state"),
    [
        ([], "starting"),
        (["running", "stopping"], "stopping"),
        (["starting", "running"], "running"),
        (["succeeded", "running"], "running"),
        (["succeeded", "succeeded"], "succeeded"),
    ],
)
def test_the_state_of_the_job_is_that_of_the_node_with_most_to_do(
    workers: WorkersOfNodes, states: list[str], state: str
) -> None:
    for place, each in enumerate(states):
        workers.note_report(place, report(place, each).packed())

    assert state == workers.course().state


def test_round_and_restarts_are_those_of_the_newest_report(workers: WorkersOfNodes) -> None:
    workers.note_report(0, report(0, round=1).packed())
    workers.note_report(1, report(1, round=2).packed())

    assert JobCourse("running", "", 2, 2, nodes=2) == workers.course()


@pytest.mark.parametrize(("is_expected", "ranks"), [(True, [0]), (False, [])])
def test_the_last_report_of_a_node_stays_after_its_end(
    workers: WorkersOfNodes, is_expected: bool, ranks: list[int]
) -> None:
    workers.note_report(0, report(0).packed())
    workers.note_loss(0, is_expected=is_expected)

    assert ranks == [each.rank for each in workers.ranks()]


def start_call(call: Callable[[], object]) -> Future[object]:
    """Make *call* in a thread of its own."""
    found: Future[object] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found


def sent(workers: WorkersOfNodes, inbox: Inbox, living: list[int]) -> dict[int, Question]:
    """Send the next request to those agents that are *living*, and return the questions by place."""
    requests: list[object] = []
    wait_until(lambda: bool(requests.extend(inbox.drain()) or requests), 10.0)
    [request] = requests
    assert isinstance(request, AgentRequest)
    questions: dict[int, Question] = {}

    def note(place: int, data: bytes) -> None:
        [(kind, content)] = FrameReader(greeted=False).feed(data)
        assert Kind.ASK is kind
        questions[place] = Question.unpacked(content)

    workers.send(request, living, note)
    return questions


def test_stacks_are_those_of_all_nodes(workers: WorkersOfNodes, inbox: Inbox) -> None:
    found = start_call(lambda: workers.stacks(10.0))
    questions = sent(workers, inbox, [0, 1])
    for place in questions:
        workers.note_answer(place, Answer(questions[place].number, {place: f"stack {place}"}).packed())

    assert {0: "stack 0", 1: "stack 1"} == found.result(10.0)
    assert {("stacks", 10.0)} == {(each.about, each.timeout) for each in questions.values()}


def test_a_lost_node_is_not_waited_for(workers: WorkersOfNodes, inbox: Inbox) -> None:
    found = start_call(lambda: workers.stacks(60.0))
    [question, _] = sent(workers, inbox, [0, 1]).values()
    workers.note_answer(0, Answer(question.number, {0: "stack 0"}).packed())
    workers.note_loss(1, is_expected=False)

    assert {0: "stack 0"} == found.result(10.0)


def test_the_end_of_the_call_ends_a_wait_and_later_questions(workers: WorkersOfNodes, inbox: Inbox) -> None:
    workers.note_report(0, report(0).packed())
    found = start_call(lambda: workers.stacks(60.0))
    sent(workers, inbox, [0])
    workers.end()

    assert {} == found.result(10.0)
    with pytest.raises(ConfigError, match="the call has ended: ask for the logs of its workers while it runs"):
        workers.logs(0)


def test_stacks_without_an_answer_are_a_timeout(workers: WorkersOfNodes) -> None:
    with pytest.raises(TimeoutError, match="no node has returned the stacks"):
        workers.stacks(0.01)


def test_output_is_requested_from_the_node_of_the_rank(workers: WorkersOfNodes, inbox: Inbox) -> None:
    workers.note_report(0, report(0).packed())
    workers.note_report(1, report(1).packed())
    found = start_call(lambda: workers.logs(1))
    questions = sent(workers, inbox, [0, 1])
    workers.note_answer(1, Answer(questions[1].number, {1: "its output\n"}).packed())

    assert ([1], "its output\n") == (list(questions), found.result(10.0))


def test_the_reason_of_a_node_without_output_is_raised(workers: WorkersOfNodes, inbox: Inbox) -> None:
    workers.note_report(0, report(0).packed())
    found = start_call(lambda: workers.logs(0))
    [question] = sent(workers, inbox, [0]).values()
    workers.note_answer(0, Answer(question.number, error="its output is not in a file").packed())

    with pytest.raises(ConfigError, match="not in a file"):
        found.result(10.0)


def test_the_output_of_an_unknown_rank_is_refused_with_the_known_ones(workers: WorkersOfNodes) -> None:
    workers.note_report(0, report(0).packed())

    with pytest.raises(ConfigError, match=r"rank 7 runs on no node now \(ranks: 0\)"):
        workers.logs(7)


def test_output_of_an_ended_node_is_kept_until_another_agent_reports(workers: WorkersOfNodes, inbox: Inbox) -> None:
    workers.note_report(0, report(0).packed())
    workers.note_answer(0, Answer(LAST_OUTPUT, {0: "its end\n"}).packed())
    workers.note_loss(0, is_expected=True)
    assert "its end\n" == workers.logs(0)

    workers.note_report(0, report(0).packed())
    found = start_call(lambda: workers.logs(0))
    [question] = sent(workers, inbox, [0]).values()
    workers.note_answer(0, Answer(question.number, {0: "another one\n"}).packed())
    assert "another one\n" == found.result(10.0)


def test_workers_that_have_not_begun_have_no_output(workers: WorkersOfNodes) -> None:
    assert "" == workers.logs(1)


def test_output_of_nodes_is_kept_after_the_call(workers: WorkersOfNodes) -> None:
    workers.note_report(0, report(0).packed())
    workers.note_answer(0, Answer(LAST_OUTPUT, {0: "its end\n"}).packed())
    workers.end()

    assert "its end\n" == workers.logs(0)
    assert ["stopped"] == [each.state for each in workers.ranks()]


class RunningJob:
    """A job whose status changes at each look, and whose output is known."""

    def __init__(self, *paths: str) -> None:
        self.looks, self.paths = 0, list(paths)

    def status(self) -> JobStatus:
        self.looks += 1
        return JobStatus("train", "running", "", 3.0, 0, 0, 1, (rank_status(0, step=self.looks),))

    def files(self, rank: int) -> list[str]:
        if rank:
            raise ConfigError("no file")
        return self.paths

    def logs(self, rank: int) -> str:
        if rank:
            raise ConfigError(f"rank {rank} is not on this node")
        return "its output\n"


def test_a_client_that_does_not_read_delays_no_last_report() -> None:
    is_sending, may_go_on = threading.Event(), threading.Event()

    def send(_: NodeReport) -> None:
        is_sending.set()
        may_go_on.wait(60.0)

    reporter = NodeReporter(cast(Job, RunningJob()), send, 0.001)
    try:
        assert is_sending.wait(60.0)
        assert "running" == reporter.last().state
    finally:
        may_go_on.set()


@pytest.mark.parametrize(
    ("rank", "answer"),
    [(0, Answer(4, {0: "its output\n"})), (1, Answer(4, error="rank 1 is not on this node"))],
)
def test_a_question_is_answered_with_texts_or_the_reason(rank: int, answer: Answer) -> None:
    arrived: Future[Answer] = Future()
    answer_later(cast(Job, RunningJob()), Question(4, "logs", rank).packed(), arrived.set_result)

    assert answer == arrived.result(60.0)


@pytest.mark.parametrize(("nodes", "seconds"), [(1, 2.0), (200, 2.0), (1000, 10.0)])
def test_many_nodes_report_less_often(nodes: int, seconds: float) -> None:
    assert seconds == seconds_between_reports(nodes, 2.0)


@pytest.mark.parametrize(("world", "kept"), [(8, 2**18), (1024, 2**16)])
def test_a_rank_of_many_leaves_less_output(tmp_path: Path, world: int, kept: int) -> None:
    paths = [str(tmp_path / "round-0"), str(tmp_path / "round-1"), str(tmp_path / "gone")]
    Path(paths[0]).write_text("first round\n" * 2**16)
    Path(paths[1]).write_text("second round\n")

    answer = last_output(cast(Job, RunningJob(*paths[:2])), world)
    without = last_output(cast(Job, RunningJob(*paths)), world)

    assert LAST_OUTPUT == answer.number
    assert kept == len(answer.texts[0])
    assert answer.texts[0].endswith("first round\nsecond round\n")
    assert {} == without.texts
