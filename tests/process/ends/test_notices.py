"""Announcements of a node's end: a signal, a file, a function, the end of the scheduler's time."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import elasticlib
from elasticlib import LaunchConfig, PreemptedError, SignalException, elastic_launch
from elasticlib.errors import ConfigError
from tests.process.launches import Commands, free_port
from tests.process.scripts.steps import train
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.5)]

POLLS, HANDLES = "steps.py", "noticed.py"


@pytest.fixture
def command() -> Iterator[Commands]:
    with closing(Commands()) as found:
        yield found


def steps(output: str) -> set[str]:
    """The steps at which the two ranks stopped."""
    found = dict(re.findall(r"rank (\d+) stops at (\d+)", output))
    assert {"0", "1"} == found.keys(), output
    return set(found.values())


def test_a_signal_that_announces_the_end_stops_workers_that_ask(command: Commands) -> None:
    program = command(POLLS, "--preempt-signal", "USR1")
    program.wait_for_line("works", 2)

    program.popen.send_signal(signal.SIGUSR1)
    status, output = program.ends()

    assert 75 == status and 1 == len(steps(output)), output
    assert "got SIGUSR1: its workers were asked to stop, and have returned" in output


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_workers_that_handle_it_and_end_well_were_preempted(command: Commands, name: str) -> None:
    program = command(HANDLES, "--preempt-signal", name, HANDLES=name)
    program.wait_for_line("works", 2)

    program.popen.send_signal(signal.Signals[name])
    status, output = program.ends()

    assert 75 == status and 2 == output.count("saved by"), output


@pytest.mark.parametrize(("name", "expected"), [("SIGUSR1", 0), ("SIGTERM", 1)])
def test_a_signal_that_announces_nothing_is_as_before(command: Commands, name: str, expected: int) -> None:
    program = command(HANDLES, HANDLES=name)
    program.wait_for_line("works", 2)

    program.popen.send_signal(signal.Signals[name])
    status, output = program.ends()

    assert expected == status and 2 == output.count("saved by"), output


def test_a_worker_that_asks_keeps_the_handler_of_c_code(command: Commands) -> None:
    program = command(POLLS, STACKS="1")
    program.wait_for_line("works", 2)

    program.popen.send_signal(signal.SIGUSR1)
    program.wait_for_line("most recent call first")
    program.popen.send_signal(signal.SIGTERM)
    status, output = program.ends()

    assert 75 == status and 1 == len(steps(output)), output


def test_a_program_that_uses_the_signal_otherwise_succeeds(command: Commands) -> None:
    program = command(
        HANDLES, "--preempt-signal", "USR1", "--shutdown-timeout", "1", HANDLES="SIGUSR1", CONTINUES="1", LAST="300"
    )
    program.wait_for_line("works", 2)

    program.popen.send_signal(signal.SIGUSR1)
    status, output = program.ends()

    assert 0 == status and 2 == output.count("done by"), output


def test_a_signal_before_a_worker_asks_is_kept_until_one_does(command: Commands, tmp_path: Path) -> None:
    begins = tmp_path / "begins"
    program = command(POLLS, "--preempt-signal", "USR1", BEGINS=str(begins))
    program.wait_for_line("starts", 2)

    program.popen.send_signal(signal.SIGUSR1)
    begins.touch()
    status, output = program.ends()

    assert 75 == status and 1 == len(steps(output)), output


def test_a_signal_to_all_processes_of_the_node_ends_no_worker(command: Commands, tmp_path: Path) -> None:
    begins = tmp_path / "begins"
    program = command(POLLS, "--preempt-signal", "USR1", BEGINS=str(begins))
    program.wait_for_line("starts", 2)

    # As a scheduler does: workers have sessions of their own.
    for pid in [program.popen.pid, *(int(line.split()[-1]) for line in program.log if "starts" in line)]:
        os.kill(pid, signal.SIGUSR1)
    begins.touch()
    status, output = program.ends()

    assert 75 == status and 1 == len(steps(output)), output


def test_the_end_of_the_time_is_kept_for_workers_that_still_start(command: Commands, tmp_path: Path) -> None:
    begins, end = tmp_path / "begins", time.time() + 9
    ending = ("--end-time", f"{end:.0f}", "--shutdown-timeout", "6")
    program = command(POLLS, *ending, "--max-restarts", "1", BEGINS=str(begins), FAILS="1")
    program.wait_for_line("starts", 4)

    wait_until(lambda: time.time() > end - 4)  # it is announced 6 s before
    begins.touch()
    status, output = program.ends()

    assert 75 == status and 1 == len(steps(output)), output


def test_a_failure_on_another_node_ends_workers_that_handle_a_notice(command: Commands) -> None:
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "job")
    options = ("--nnodes", "2", "--max-restarts", "1", "--preempt-signal", "USR1", *meeting)
    # The signal is a request for a line to these programs. The second one's rank 2 fails by another signal.
    both = [command(HANDLES, *options, HANDLES="SIGUSR1", CONTINUES="1", LAST="600") for _ in range(2)]
    for node in both:
        node.wait_for_line("works", 2)
    for node in both:
        node.popen.send_signal(signal.SIGUSR1)
    for node in both:
        node.wait_for_line("noticed by", 2)

    os.kill(int(both[1].wait_for_line("rank").rpartition(" ")[2]), signal.SIGKILL)
    ends = [node.ends() for node in both]

    assert [0, 0] == [status for status, _ in ends], ends
    assert all(2 == output.count("done by") and "restart 1 of 1" in output for _, output in ends), ends


def test_a_file_announces_the_end_with_its_reason(command: Commands, tmp_path: Path) -> None:
    program = command(POLLS, "--preempt-notice", str(tmp_path / "notice"))
    program.wait_for_line("works", 2)

    (tmp_path / "notice").write_text("the machine is reclaimed")
    status, output = program.ends()

    assert 75 == status and 1 == len(steps(output)), output
    assert "the machine is reclaimed (0, 1)" in output
    assert "the machine is reclaimed: its workers were asked to stop, and have returned" in output


def test_a_file_stops_workers_that_do_not_ask(command: Commands, tmp_path: Path) -> None:
    program = command(HANDLES, "--preempt-notice", str(tmp_path / "notice"))
    program.wait_for_line("works", 2)

    (tmp_path / "notice").write_text("the machine is reclaimed")
    status, output = program.ends()

    assert 1 == status and "the machine is reclaimed" in output, output


def test_a_file_in_place_of_a_folder_announces_the_end(command: Commands, tmp_path: Path) -> None:
    program = command(POLLS, "--preempt-notice", str(tmp_path / "notice"))
    program.wait_for_line("works", 2)

    (tmp_path / "notice").mkdir()
    program.wait_for_line("a source of preemption notices failed")
    (tmp_path / "notice").rmdir()
    (tmp_path / "notice").write_text("the machine is reclaimed")
    status, output = program.ends()

    assert 75 == status and 1 == len(steps(output)) and 1 == output.count("notices failed"), output


def test_a_function_announces_the_end_to_a_program() -> None:
    answers = iter([None] * 2 + ["the machine is reclaimed"] * 100)
    config = LaunchConfig(nproc_per_node=2, preload=(), preempt_notice=lambda: next(answers))

    with pytest.raises(PreemptedError, match="the machine is reclaimed") as caught:
        elastic_launch(config, train)()

    assert {0, 1} == caught.value.results.keys() and 1 == len(set(caught.value.results.values()))


def test_a_job_that_is_stopped_before_its_notice_was_not_preempted(tmp_path: Path) -> None:
    config = LaunchConfig(nproc_per_node=2, preload=(), preempt_notice=tmp_path / "notice", end_time=4e9)
    job = elastic_launch(config, train).start()
    wait_until(lambda: "works" in job.logs(0) and "works" in job.logs(1))

    job.stop()

    with pytest.raises(SignalException) as raised:
        job.result()
    assert not isinstance(raised.value, PreemptedError)
    assert 1 == len(steps("".join(map(str, (job.logs(0), "\n", job.logs(1))))))
    assert "elasticlib-end" not in {thread.name for thread in threading.enumerate()}


def test_a_pool_takes_no_notices(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="preempt_notice"):
        elasticlib.pool(preempt_notice=str(tmp_path / "notice"))


@pytest.mark.parametrize("end", ["4000000000", "1e18", "inf"])
def test_an_end_of_the_time_in_the_far_future_changes_nothing(command: Commands, end: str) -> None:
    status, output = command(HANDLES, "--end-time", end, LAST="20").ends()

    assert 0 == status and 2 == output.count("done by") and "elasticrun:" not in output, output


def test_workers_that_ask_are_stopped_before_the_end_of_the_time(command: Commands) -> None:
    program = command(POLLS, "--end-time", f"{time.time() + 8:.0f}", "--shutdown-timeout", "5")

    status, output = program.ends()

    assert 75 == status and 1 == len(steps(output)), output
    assert "the job's time ends at" in output


def test_the_end_of_the_time_stops_no_others(command: Commands) -> None:
    program = command(HANDLES, "--end-time", f"{time.time() + 6:.0f}", "--shutdown-timeout", "5", LAST="400")

    status, output = program.ends()

    assert 0 == status and 2 == output.count("done by"), output


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--preempt-signal", "SIGWINCH"), ("--preempt-signal='SIGWINCH'", "SIGTERM")),
        (("--end-time", "1000"), ("--end-time=1000", "before the present time")),
        (("--preempt-notice", "/"), ("--preempt-notice='/'", "exists already")),
        (("--preempt-notice", f"/tmp/{'x' * 300}"), ("--preempt-notice='/tmp/xxx", "File name too long")),
    ],
)
def test_notices_that_cannot_be_are_refused(
    command: Commands, options: tuple[str, str], parts: tuple[str, ...]
) -> None:
    status, output = command(POLLS, *options).ends()

    assert 2 == status and all(part in output for part in parts), output
