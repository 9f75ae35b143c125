"""``elasticrun stop``: the job ends on all nodes, ranks that ask save, and the status says that a person stopped it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.process.launches import Commands, Program, free_port

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.5)]


@pytest.fixture
def start() -> Iterator[Commands]:
    with closing(Commands()) as found:
        yield found


def stop(*args: str) -> tuple[int, str]:
    """The status of ``elasticrun stop``, and its output."""
    done = subprocess.run(
        [sys.executable, "-m", "elasticlib.run", "stop", *args], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


def test_a_job_is_stopped_by_its_id(start: Commands) -> None:
    run_id = f"job-{uuid.uuid4()}"
    job = start("noticed.py", "--rdzv-id", run_id)
    job.wait_for_line("works", 2)

    status, output = stop(run_id)

    assert 0 == status and "has stopped" in output, output
    assert 1 == job.popen.wait(0.001 if job.popen.poll() is not None else 10)
    assert f"job '{run_id}' was stopped by elasticrun stop" in job.ends()[1]


def test_a_job_is_stopped_by_the_process_of_its_launcher(start: Commands) -> None:
    job = start("noticed.py")
    job.wait_for_line("works", 2)

    status, output = stop(str(job.popen.pid), "--no-wait")

    assert 0 == status and "is stopping" in output, output
    assert 1 == job.ends()[0]


def nodes(start: Commands, script: str, run_id: str) -> tuple[Program, Program]:
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", run_id)
    found = [start(script, "--nnodes", "2", *meeting) for _ in range(2)]
    for each in found:
        each.wait_for_line("works", 2)
    return found[0], found[1]


@pytest.mark.parametrize("script", ["noticed.py", "steps.py"])
@pytest.mark.parametrize("number", [0, 1])
def test_all_nodes_of_the_job_end(start: Commands, script: str, number: int) -> None:
    run_id = f"job-{uuid.uuid4()}"
    both = nodes(start, script, run_id)

    status, output = stop(str(both[number].popen.pid))
    ends = [each.ends() for each in both]

    assert 0 == status, output
    assert [1, 1] == [each for each, _ in ends], ends
    assert all(f"job '{run_id}' was stopped by elasticrun stop" in each for _, each in ends), ends
    saved = re.findall(r"stops at (\d+)", ends[0][1] + ends[1][1])
    assert (script == "noticed.py") == (not saved) and len(set(saved)) <= 1, ends


def test_a_job_is_stopped_while_one_of_its_nodes_is_preempted(start: Commands, tmp_path: Path) -> None:
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "job")
    options = ("--nnodes", "1:2", "--rdzv-conf", "wait_for=max", "--shutdown-timeout", "600", *meeting)
    stays = start("steps.py", *options)
    preempted = start("steps.py", *options, "--preempt-notice", str(tmp_path / "notice"), STUBBORN="all")
    for each in (stays, preempted):
        each.wait_for_line("works", 2)
    (tmp_path / "notice").touch()
    preempted.wait_for_line("stops at", 2)

    status, output = stop(str(preempted.popen.pid), "--grace", "1")
    ends = [each.ends() for each in (stays, preempted)]

    assert 0 == status and "has stopped" in output, output
    assert [1, 1] == [each for each, _ in ends], ends


def test_a_second_stop_may_leave_less_time(start: Commands) -> None:
    job = start("steps.py", "--shutdown-timeout", "600", STUBBORN="0")
    job.wait_for_line("works", 2)
    stop(str(job.popen.pid), "--no-wait")
    job.wait_for_line("stops at", 2)

    status, output = stop(str(job.popen.pid), "--grace", "1")

    assert 0 == status and "has stopped" in output, output
    assert 1 == job.ends()[0]


def test_one_node_alone_can_be_stopped(start: Commands) -> None:
    run_id = f"job-{uuid.uuid4()}"
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", run_id)
    host = start("noticed.py", "--nnodes", "1:2", "--rdzv-conf", "is_host=true,last_call_timeout=1", *meeting)
    host.wait_for_line("works", 2)
    other = start("noticed.py", "--nnodes", "1:2", "--rdzv-conf", "is_host=false,last_call_timeout=1", *meeting)
    other.wait_for_line("works", 2)

    status, output = stop(str(other.popen.pid), "--node")

    assert 0 == status, output
    assert 1 == other.ends()[0]
    host.wait_for_line("works", 6)
    host.popen.send_signal(signal.SIGINT)


def test_a_launch_that_is_paused_is_named_and_can_be_stopped_later(start: Commands) -> None:
    job = start("noticed.py", "--rdzv-id", run_id := f"job-{uuid.uuid4()}")
    job.wait_for_line("works", 2)

    job.popen.send_signal(signal.SIGSTOP)
    status, output = stop(run_id)
    job.popen.send_signal(signal.SIGCONT)
    later, more = stop(run_id)

    assert 1 == status and f"launch {job.popen.pid}" in output and "not answered: try again" in output, output
    assert 0 == later and "has stopped" in more, more


def test_a_job_that_does_not_run_is_an_error_that_names_those_that_do(start: Commands) -> None:
    job = start("noticed.py", "--rdzv-id", run_id := f"job-{uuid.uuid4()}")
    job.wait_for_line("works", 2)

    status, output = stop("nothing")

    assert (
        2 == status
        and "'nothing' does not run here" in output
        and f"{run_id} (noticed.py, process {job.popen.pid}" in output
    )
