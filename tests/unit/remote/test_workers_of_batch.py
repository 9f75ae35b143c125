"""The workers of a batch job, by files of its nodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from attrs import evolve

from elasticlib.errors import ConfigError
from elasticlib.job import RankStatus
from elasticlib.remote._batch_files import BatchFolder, SubmissionFacts, report_name
from elasticlib.remote._node_reports import NodeReport
from elasticlib.remote._workers_of_batch import WorkersOfBatch

NODES = 4


@pytest.fixture
def folder(tmp_path: Path) -> BatchFolder:
    return BatchFolder.made(str(tmp_path), "train", None, SubmissionFacts(NODES, "train", "rank", is_step=False))


def worker(rank: int) -> RankStatus:
    return RankStatus(rank, 0, rank, f"n{rank}", "running", 10 + rank, None, 0, 7, 9, {"loss": 0.5}, 0.1, "a line")


def report(node: int, state: str = "running", number: int = 0) -> NodeReport:
    return NodeReport(state, "", number, number, 2, (worker(node),))


def put(folder: BatchFolder, node: int, sent: NodeReport, restarts: int = 0) -> None:
    folder.write(report_name(restarts, node), sent.packed())


def begun(folder: BatchFolder) -> WorkersOfBatch:
    """The workers of a job that has nodes."""
    workers = WorkersOfBatch(folder, NODES, "read the file")
    workers.note_state(0, is_pending=False)
    return workers


def test_state_and_ranks_are_those_of_all_nodes(folder: BatchFolder) -> None:
    put(folder, 1, report(1))
    put(folder, 0, report(0, "starting"))
    workers = begun(folder)

    assert (worker(0), worker(1)) == workers.ranks()
    assert ("running", 0, 2) == (workers.course().state, workers.course().round, workers.course().nodes)


def test_job_without_reports_is_starting(folder: BatchFolder) -> None:
    assert ("starting", ()) == (begun(folder).course().state, begun(folder).ranks())


def test_job_in_the_queue_has_no_workers(folder: BatchFolder) -> None:
    put(folder, 0, report(0))
    workers = begun(folder)
    assert 1 == len(workers.ranks())

    workers.note_state(0, is_pending=True)

    assert ("starting", ()) == (workers.course().state, workers.ranks())


def test_reports_of_an_earlier_run_do_not_count(folder: BatchFolder) -> None:
    put(folder, 0, report(0))
    put(folder, 1, report(1), restarts=1)
    workers = begun(folder)
    assert (worker(0),) == workers.ranks()

    workers.note_state(1, is_pending=False)

    assert (worker(1),) == workers.ranks()


def test_report_whose_file_has_been_removed_counts_beside_another_one(folder: BatchFolder) -> None:
    put(folder, 0, report(0))
    put(folder, 1, report(1))
    workers = begun(folder)
    assert 2 == len(workers.ranks())

    os.unlink(folder.file(report_name(0, 0)))
    workers.end(is_over=False)

    assert (worker(0), worker(1)) == workers.ranks()


@pytest.mark.parametrize("state", ["failed", "stopped"])
def test_job_stops_once_a_node_has_ended_without_success(folder: BatchFolder, state: str) -> None:
    put(folder, 0, report(0, "starting"))
    put(folder, 1, evolve(report(1, state), why="contact was lost"))

    course = begun(folder).course()

    assert ("stopping", "contact was lost") == (course.state, course.why)


def test_last_report_of_a_node_that_was_lost_does_not_count(folder: BatchFolder) -> None:
    put(folder, 0, report(0, number=0))
    put(folder, 1, report(1, number=1))

    assert (worker(1),) == begun(folder).ranks()


@pytest.mark.parametrize("is_over", [False, True])
def test_reports_stay_after_the_folder_is_removed(folder: BatchFolder, is_over: bool) -> None:
    put(folder, 0, report(0))
    workers = begun(folder)
    workers.end(is_over=is_over)
    os.unlink(folder.file(report_name(0, 0)))
    workers.end(is_over=is_over)

    assert (evolve(worker(0), state="stopped" if is_over else "running"),) == workers.ranks()


@pytest.mark.parametrize("data", [b"", b"x" * 40, b"[]", b'{"ranks": []}', b'{"ranks": 3}', evolve(report(0)).packed()])
@pytest.mark.parametrize("has_code", [False, True])
def test_bytes_of_other_programs_are_ignored(folder: BatchFolder, data: bytes, has_code: bool) -> None:
    name = report_name(0, 0)
    folder.write_text(name, data.decode("latin-1"))
    if has_code and data != report(0).packed():
        folder.write(name, data)
    put(folder, 1, report(1))

    assert (worker(1),) == begun(folder).ranks()


def test_output_and_stacks_are_refused(folder: BatchFolder) -> None:
    workers = begun(folder)

    with pytest.raises(ConfigError, match="read the file"):
        workers.stacks(1.0)
    with pytest.raises(ConfigError, match="read the file"):
        workers.logs(0)
