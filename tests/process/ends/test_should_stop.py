"""Programs that ask `should_stop`: all ranks save at one step, and the launch says so."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticlib import LaunchConfig, LaunchInterrupted, PreemptedError, SignalException, elastic_launch
from tests.process.launches import Program, environment, free_port
from tests.process.scripts.steps import train
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.5)]

TOGETHER = str(Path(__file__).parents[1] / "scripts" / "steps_together.py")
SCRIPT = str(Path(__file__).parents[1] / "scripts" / "steps.py")


class Command:
    """``elasticrun`` on one node, or on one of several."""

    def __init__(self, *options: str, script: str = SCRIPT, **variables: str) -> None:
        line = ("-m", "elasticlib.run", "--nproc-per-node", "2", "--preload", "", *options, script)
        self.program = Program(*line, env=environment(**variables), start_new_session=True)

    def works(self, times: int = 2) -> None:
        """Return once its workers have made some steps."""
        self.program.wait_for_line("works", times)

    def send(self, signum: int) -> None:
        self.program.popen.send_signal(signum)

    def ends(self) -> tuple[int, str]:
        return self.program.ends()


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    started: list[Command] = []
    yield started
    for each in started:
        each.program.close()


def stops(output: str) -> dict[int, int]:
    """{rank: the step at which it stopped}."""
    return {int(rank): int(step) for rank, step in re.findall(r"rank (\d+) stops at (\d+)", output)}


def test_all_ranks_stop_at_one_step_and_the_command_reports_preemption(commands: list[Command]) -> None:
    commands.append(command := Command("--nproc-per-node", "4"))
    command.works(4)

    command.send(signal.SIGTERM)
    status, output = command.ends()

    assert 75 == status, output
    assert {0, 1, 2, 3} == stops(output).keys() and 1 == len(set(stops(output).values())), output
    assert "signal 15 (0, 1, 2, 3)" in output
    assert "got SIGTERM: its workers were asked to stop, and have returned" in output


def test_a_signal_to_every_process_waits_for_the_step_too(commands: list[Command]) -> None:
    """As Slurm sends it."""
    commands.append(command := Command())
    pids = [int(command.program.wait_for_line(f"rank {rank} works as").rpartition(" ")[2]) for rank in range(2)]

    for pid in (*pids, command.program.popen.pid):
        os.kill(pid, signal.SIGTERM)
    status, output = command.ends()

    assert 75 == status, output
    assert {0, 1} == stops(output).keys() and 1 == len(set(stops(output).values())), output


def test_a_restart_ends_ranks_that_ask(commands: list[Command]) -> None:
    commands.append(command := Command("--max-restarts", "1"))
    victim = int(command.program.wait_for_line("rank 1 works as").rpartition(" ")[2])
    command.program.wait_for_line("rank 0 works as")

    os.kill(victim, signal.SIGKILL)
    command.works(4)
    command.send(signal.SIGTERM)
    status, output = command.ends()

    assert 75 == status, output
    assert {0, 1} == stops(output).keys(), output


@pytest.mark.parametrize("number", [1, 2])
def test_ranks_that_wait_in_collectives_stop_at_one_step(commands: list[Command], number: int) -> None:
    """No rank may wait for another in `should_stop`, which may wait for it in a collective."""
    if number == 1:
        commands.append(Command("--nproc-per-node", "4", script=TOGETHER))
        commands[0].works(4)
    else:
        nodes(commands, 2, free_port(), "--nnodes", "2", script=TOGETHER)

    for each in commands:
        each.send(signal.SIGTERM)
    ends = [each.ends() for each in commands]
    found = {rank: step for _, output in ends for rank, step in stops(output).items()}

    assert {75} == {status for status, _ in ends}, ends
    assert {0, 1, 2, 3} == found.keys() and 1 == len(set(found.values())), ends


def test_the_exit_status_of_a_preemption_is_an_option(commands: list[Command]) -> None:
    commands.append(command := Command("--preempt-exit", "3"))
    command.works()

    command.send(signal.SIGTERM)

    assert 3 == command.ends()[0]


def test_ctrl_c_lets_the_ranks_save_and_does_not_count_as_preemption(commands: list[Command]) -> None:
    commands.append(command := Command())
    command.works()

    command.send(signal.SIGINT)
    status, output = command.ends()

    assert 1 == status
    assert {0, 1} == stops(output).keys() and "Traceback" not in output, output


def test_a_second_ctrl_c_waits_for_no_step(commands: list[Command]) -> None:
    commands.append(command := Command(STUBBORN="1"))
    command.works()
    command.send(signal.SIGINT)
    command.program.wait_for_line("rank 1 stops")

    command.send(signal.SIGINT)
    status, output = command.ends()

    assert 1 == status
    assert "KeyboardInterrupt" in output or "SIGINT" in output


def test_near_the_deadline_the_rest_gets_the_signal(commands: list[Command]) -> None:
    commands.append(command := Command("--shutdown-timeout", "2", STUBBORN="1"))
    command.works()

    command.send(signal.SIGTERM)
    began = time.monotonic()
    status, output = command.ends()

    assert 1 == status
    assert {0, 1} == stops(output).keys(), output
    assert time.monotonic() - began < 10


def test_a_rank_that_does_not_ask_gets_the_signal_at_once(commands: list[Command]) -> None:
    commands.append(command := Command(SILENT="1"))
    command.works()

    command.send(signal.SIGTERM)
    status, output = command.ends()

    assert "rank 1 handles 15" in output and {0} == stops(output).keys(), output
    assert 75 == status, output


def test_ranks_that_finish_before_their_stop_have_succeeded(commands: list[Command]) -> None:
    commands.append(command := Command(LAST="40"))
    command.works()
    command.program.wait_for_line("is done")

    command.send(signal.SIGTERM)
    status, output = command.ends()

    assert status in (0, 75) and "Traceback" not in output, output
    assert (status == 75) == bool(stops(output)), output


def test_a_rank_killed_while_others_wait_ends_the_job(commands: list[Command]) -> None:
    commands.append(command := Command("--max-restarts", "0"))
    command.works()
    victim = int(command.program.wait_for_line("rank 1 works as").rpartition(" ")[2])
    os.kill(victim, signal.SIGSTOP)  # it will not see the request

    command.send(signal.SIGTERM)
    command.program.wait_for_line("stop at the next step")
    os.kill(victim, signal.SIGKILL)
    status, output = command.ends()

    assert 1 == status, output
    assert {} == stops(output)


# Several nodes.


def nodes(commands: list[Command], count: int, port: int, *options: str, **variables: str) -> list[Command]:
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "job")
    more = ("--rdzv-conf", "last_call_timeout=1", *options)
    commands += [Command(*meeting, *more, **variables) for _ in range(count)]
    for each in commands:
        each.works()
    return commands


def test_ranks_of_several_nodes_stop_at_one_step(commands: list[Command]) -> None:
    for each in nodes(commands, 3, free_port(), "--nnodes", "3"):
        each.send(signal.SIGTERM)
    ends = [each.ends() for each in commands]
    found = {rank: step for _, output in ends for rank, step in stops(output).items()}

    assert [75, 75, 75] == [status for status, _ in ends], ends
    assert set(range(6)) == found.keys() and 1 == len(set(found.values())), ends


def test_a_drained_node_leaves_and_the_others_go_on(commands: list[Command]) -> None:
    port = free_port()
    both = nodes(commands, 2, port, "--nnodes", "1:2", "--max-restarts", "0")
    # Without the host of its store a job of c10d ends.
    stays, drained = sorted(both, key=lambda node: not hosts_store(node, port))

    drained.send(signal.SIGTERM)
    status, output = drained.ends()
    stays.works(4)
    stays.send(signal.SIGTERM)
    last, more = stays.ends()

    assert (75, 75) == (status, last), (output, more)
    first = {
        **stops(output),
        **{int(rank): int(step) for rank, step in re.findall(r"rank (\d+) stops at (\d+)", more)[:2]},
    }
    assert 4 == len(first) and 1 == len(set(first.values())), (output, more)
    assert "round 0 ended: node" in more


def test_all_nodes_are_preempted_with_the_host_of_the_store(commands: list[Command]) -> None:
    port = free_port()
    host, other = sorted(
        nodes(commands, 2, port, "--nnodes", "1:2"), key=lambda node: hosts_store(node, port), reverse=True
    )

    host.send(signal.SIGTERM)
    ends = [host.ends(), other.ends()]
    found = {rank: step for _, output in ends for rank, step in stops(output).items()}

    assert [75, 75] == [status for status, _ in ends], ends
    assert 4 == len(found) and 1 == len(set(found.values())), ends


def hosts_store(node: Command, port: int) -> bool:
    """Return whether the node's own rendezvous process listens at the endpoint."""
    pid = node.program.rendezvous_process()
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    listening = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")}
    return any(os.readlink(each) in listening for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink())


# In Python.


def config(**settings: int) -> LaunchConfig:
    return LaunchConfig(nproc_per_node=2, preload=(), max_restarts=0, **settings)


def preempted(signum: int, launch: elastic_launch) -> BaseException:
    """Return the error of a launch that receives *signum* while it runs."""
    job = launch.start()
    wait_until(lambda: "works" in job.logs(0) and "works" in job.logs(1))
    threading.Timer(0.1, os.kill, (os.getpid(), signum)).start()
    with pytest.raises(BaseException) as raised:
        job.result()
    return raised.value


def test_a_preempted_launch_has_the_results_of_its_ranks() -> None:
    error = preempted(signal.SIGTERM, elastic_launch(config(), train))

    assert isinstance(error, PreemptedError) and isinstance(error, SignalException)
    assert {0, 1} == error.results.keys() and 1 == len(set(error.results.values()))
    assert signal.SIGTERM == error.sigval


def test_a_job_that_the_program_stops_saves_too() -> None:
    job = elastic_launch(config(), train).start()
    wait_until(lambda: "works" in str(job.logs(0)))

    job.stop()

    assert "rank 0 stops at" in str(job.logs(0))
    with pytest.raises(SignalException) as raised:
        job.result()
    assert not isinstance(raised.value, (PreemptedError, LaunchInterrupted))
