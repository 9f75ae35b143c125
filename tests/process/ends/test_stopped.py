"""Processes of the chain that are stopped (SIGSTOP), or held by a debugger: launches end, and nothing stays."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticlib.processes import _reaper
from tests.process import duties
from tests.process.conftest import command_line
from tests.process.ends.test_signals import ALL_AT_WORK, AT_ONCE, NEVER, ROOT, Job, job

__all__ = ["job"]

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

KILL_LIMIT = 12.0
"""Seconds beyond the shutdown time-out in which a spawner must have answered."""
WORKS = "note_signals(here)"
ENDS = "works_until(here / 'go', here)"
FORKS = """
import sys
from pathlib import Path
from elasticlib import LaunchConfig, elastic_launch
from tests.process import duties
here = Path(sys.argv[1])
config = LaunchConfig(nproc_per_node=2, max_restarts=0, start_method="fork")
elastic_launch(config, duties.works_until)(here / "go", here)
"""
_ATTACH, _ANY_CHILD = 16, 0x40000000


def chain(job: Job) -> dict[str, int]:
    """The pids from rank 0 up to the reaper."""
    return dict(zip(duties.CHAIN, map(int, (job.folder / "round0.rank0").read_text().split()), strict=True))


def stop(pid: int) -> None:
    """Stop a process as SIGSTOP does; return when it stands."""
    os.kill(pid, signal.SIGSTOP)
    duties.wait_until(lambda: Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T")


@contextlib.contextmanager
def traced(pid: int) -> Iterator[None]:
    """A process as a debugger holds it, whom SIGCONT does not wake."""
    libc, stands = ctypes.CDLL(None, use_errno=True), threading.Event()
    ended: list[int] = []

    def hold() -> None:
        if libc.ptrace(_ATTACH, pid, 0, 0) == 0:
            os.waitpid(pid, _ANY_CHILD)
            stands.set()
            ended.append(os.waitpid(pid, _ANY_CHILD)[1])

    thread = threading.Thread(target=hold)
    thread.start()
    if not stands.wait(AT_ONCE):
        thread.join()
        pytest.skip(f"no process may be held by another one here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        thread.join()


def nothing_is_left_of(pids: set[int]) -> bool:
    """Return whether all processes of *pids* end soon."""
    with contextlib.suppress(AssertionError):
        duties.wait_until(lambda: not any(duties.lives(pid) for pid in pids), AT_ONCE)
    return not any(duties.lives(pid) for pid in pids)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_launcher_whose_spawner_is_stopped_ends_by_a_signal(method: str, job: Job) -> None:
    """The spawner is woken, and passes the signal on."""
    job.start(WORKS, "--start-method", method, "--shutdown-timeout", NEVER)
    job.wait_for(*ALL_AT_WORK)
    stop(chain(job)["spawner"])

    job.send(signal.SIGTERM)

    status, stderr = job.end()
    assert 1 == status, stderr
    assert ["rank0.SIGTERM", "rank1.SIGTERM"] == job.noted()


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("grace", [0, 1])
def test_a_spawner_that_does_not_answer_is_killed_with_all_below_it(grace: int, job: Job) -> None:
    """Nobody waits longer than the shutdown time-out and what a kill takes."""
    job.start(WORKS, "--shutdown-timeout", str(grace))
    job.wait_for(*ALL_AT_WORK)

    with traced(chain(job)["spawner"]):
        job.send(signal.SIGTERM)
        status, stderr = job.end(grace + KILL_LIMIT + AT_ONCE)

    assert 1 == status, stderr
    assert "does not answer" in stderr


def test_a_second_signal_kills_a_spawner_that_does_not_answer(job: Job) -> None:
    job.start(WORKS, "--shutdown-timeout", NEVER, LOGLEVEL="INFO")
    job.wait_for(*ALL_AT_WORK)

    with traced(chain(job)["spawner"]):
        job.send(signal.SIGTERM)
        assert job.launcher is not None and job.launcher.stderr is not None
        assert any("stop" in line for line in job.launcher.stderr), "the first one has been heard"
        job.send(signal.SIGINT)
        status, stderr = job.end(KILL_LIMIT + AT_ONCE)

    assert 1 == status, stderr


@pytest.mark.parametrize("victim", ["reaper", "fork server"])
def test_a_launcher_ends_in_order_though_one_above_its_spawner_is_stopped(victim: str, job: Job) -> None:
    """It wakes whom it has to wait for."""
    job.start(ENDS)
    job.wait_for(*ALL_AT_WORK)
    stop(chain(job)[victim])
    begun = time.monotonic()

    duties.write_whole(job.folder / "go", "")

    status, stderr = job.end()
    took = time.monotonic() - begun
    assert 0 == status, stderr
    assert nothing_is_left_of(job.pids())
    assert took < 4, "nobody's time-out had to pass"


@pytest.mark.parametrize(
    "victims",
    [("reaper",), ("fork server",), ("spawner",), ("reaper", "fork server"), ("spawner", "fork server", "reaper")],
    ids="-".join,
)
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_nothing_is_left_of_a_killed_launcher_though_others_are_stopped(
    victims: tuple[str, ...], method: str, job: Job
) -> None:
    """The kernel wakes who was stopped when the one above it dies, and kills whoever has only to die."""
    job.start(WORKS, "--start-method", method)
    job.wait_for(*ALL_AT_WORK)
    for victim in victims:
        stop(chain(job)[victim])

    job.send(signal.SIGKILL)

    job.end()
    assert nothing_is_left_of(job.pids())


@pytest.mark.parametrize("killed", ["reaper", "fork server"])
def test_nothing_is_left_though_the_process_below_the_killed_is_stopped(killed: str, job: Job) -> None:
    job.start(WORKS, "--max-restarts", "0")
    job.wait_for(*ALL_AT_WORK)
    stop(chain(job)[{"reaper": "fork server", "fork server": "spawner"}[killed]])

    os.kill(chain(job)[killed], signal.SIGKILL)
    if killed == "fork server":  # its spawner goes on, under the reaper
        duties.wait_until(lambda: not duties.lives(chain(job)["fork server"]))
        job.send(signal.SIGKILL)

    assert 0 != job.end(KILL_LIMIT + AT_ONCE)[0]
    assert nothing_is_left_of(job.pids())


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_launcher_whose_rendezvous_process_is_stopped(end: signal.Signals, job: Job) -> None:
    """In order it is woken by the launcher, which parts from the job through it; else by the kernel."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    job.start(WORKS, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "stopped")
    job.wait_for(*ALL_AT_WORK)
    assert job.launcher is not None
    children = {pid for pid, parent, _ in _reaper.descendants(job.launcher.pid) if parent == job.launcher.pid}
    (process,) = {pid for pid in children if "rendezvous" in command_line(pid)}
    stop(process)

    job.send(end)

    job.end(KILL_LIMIT + AT_ONCE)
    assert nothing_is_left_of({process, *job.pids()})


@pytest.fixture
def forked(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Callable[[], dict[str, int]]]]:
    """A program that forked its workers, at work, and the pids from rank 0 up to that program."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = subprocess.Popen([sys.executable, "-c", FORKS, str(tmp_path)], env=environment, text=True)
    duties.wait_until(lambda: all((tmp_path / name).exists() for name in ALL_AT_WORK))
    pids = {name: tuple(map(int, (tmp_path / name).read_text().split())) for name in ALL_AT_WORK}
    yield program, lambda: dict(zip(("worker", "spawner", "reaper", "program"), pids["round0.rank0"], strict=True))
    for pid in {pid for found in pids.values() for pid in found[:3]}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    program.kill()
    program.wait()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("victim", ["reaper", "spawner"])
def test_nothing_is_left_of_forked_workers_below_a_stopped_process(
    victim: str,
    end: signal.Signals,
    forked: tuple[subprocess.Popen[str], Callable[[], dict[str, int]]],
) -> None:
    program, pids = forked
    found = pids()
    stop(found[victim])

    program.send_signal(end)
    program.wait(AT_ONCE)

    assert nothing_is_left_of({found[name] for name in ("worker", "spawner", "reaper")})


def test_a_stopped_fork_server_is_woken_by_the_next_launch(job: Job) -> None:
    """Such as one in a debugger's hands before: the call goes on as if nothing had been."""
    (job.folder / "twice.py").write_text(
        "import os, sys\nfrom elasticlib import LaunchConfig, elastic_launch\nfrom tests.process import duties\n"
        "from tests.process.ends.test_stopped import stop\n"
        "call = elastic_launch(LaunchConfig(nproc_per_node=1, preload=()), duties.chain)\n"
        "first = call()[0]\nstop(first['fork server'])\nassert call()[0]['fork server'] == first['fork server']\n"
        f"path = __import__('pathlib').Path({str(job.folder)!r}) / 'pids'\n"
        "duties.write_whole(path, ' '.join(map(str, first.values())))\n"
    )
    job.launcher = subprocess.Popen(
        [sys.executable, str(job.folder / "twice.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    status, stderr = job.end(2 * AT_ONCE)

    assert 0 == status, stderr
