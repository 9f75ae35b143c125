"""Processes that a worker detached on purpose, in sessions of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process import duties
from tests.process.launches import free_port

ROOT = Path(__file__).parents[3]

SCRIPT = """
import os, signal, subprocess, sys, time
if sys.argv[2] == "saves":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
with open(f"{sys.argv[1]}/draft{os.environ['RANK']}", "w") as file:
    file.write(str(child.pid))
os.rename(file.name, f"{sys.argv[1]}/child{os.environ['RANK']}")
while not all(os.path.exists(f"{sys.argv[1]}/child{rank}") for rank in "01"):
    time.sleep(0.01)
if sys.argv[2] in ("saves", "waits"):
    time.sleep(600)
sys.exit(int(sys.argv[2]) if os.environ["RANK"] == "0" else 0)
"""

NODES = """
import os, subprocess, sys
from pathlib import Path
from tests.process import duties

folder, attempt = Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"]
file = folder / f"detached{attempt}"
succeeds = attempt == "1" and sys.argv[2] == "succeeds"
if os.environ["GROUP_RANK"] == "0":
    ends = f"while test -e /proc/{os.getpid()}; do sleep 0.1; done" if succeeds else "wait"
    command, quiet = ["sh", "-c", f"sleep 600 & echo $!; {ends}"], subprocess.DEVNULL
    shell = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=quiet)
    duties.write_whole(file, f"{os.getpid()} {shell.pid} {int(shell.stdout.readline())}")
    sys.exit()
duties.wait_until(file.exists)
worker, shell, _ = map(int, file.read_text().split())
duties.wait_until(lambda: not duties.lives(shell if succeeds else worker))
sys.exit(0 if succeeds else 1)
"""

FUNCTIONS = """
import os, subprocess, time
import elasticlib
from elasticlib import ChildFailedError, LaunchConfig, elastic_launch

def detach(fails=False):
    # A shell, which has a child.
    shell = ["sh", "-c", "sleep 600 & echo $!; wait"]
    child = subprocess.Popen(shell, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    pids = [child.pid, int(child.stdout.readline())]
    if fails:
        raise ValueError(*pids)
    return pids

if __name__ == "__main__":
    kept = elastic_launch(LaunchConfig(nproc_per_node=2, preload=()), detach)()
    forked = elastic_launch(LaunchConfig(nproc_per_node=1, start_method="fork"), detach)()
    os.kill(kept[1][0], 9)
    while os.path.exists(f"/proc/{kept[1][0]}"):  # as long as it is a zombie, too
        time.sleep(0.01)
    try:
        elastic_launch(LaunchConfig(nproc_per_node=1, max_restarts=0, preload=()), detach)(True)
    except ChildFailedError as error:
        failed = error.__cause__.args
    with elasticlib.pool(1, group=None, preload=()) as workers:
        of_pool = workers.run(detach)[0]
    print(*kept[0], kept[1][1], *forked[0], sep=",")
    print(*failed, *of_pool, sep=",")
"""

LAUNCHES = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from elasticlib import LaunchConfig, elastic_launch
from elasticlib.errors import ElasticError
from tests.process import duties

folder = Path(sys.argv[1])
quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)

def detach():
    return subprocess.Popen(["sleep", "600"], start_new_session=True, **quiet).pid

def work(folder, name):
    child = subprocess.Popen(["sleep", "600"], **quiet).pid if name == "killed" else 0
    duties.write_whole(folder / name, f"{os.getppid()} {child}")
    duties.wait_until((folder / f"end {name}").exists, 60.0)
    return detach()

def launch(function, *args):
    config = LaunchConfig(nproc_per_node=1, max_restarts=0, preload=())
    return elastic_launch(config, function)(*args)[0]

def run(name):
    try:
        pids.append(launch(work, folder, name))
    except ElasticError:
        pass

if __name__ == "__main__":
    pids, threads, spawners = [launch(detach)], {}, {}
    for name in ("last", "killed", "first"):
        threads[name] = threading.Thread(target=run, args=[name])
        threads[name].start()
        duties.wait_until((folder / name).exists, 60.0)
        spawners[name], child = map(int, (folder / name).read_text().split())
        pids += [child] if child else []
    fork_server = duties.parent_of(spawners["last"])
    os.kill(fork_server, signal.SIGKILL)
    duties.wait_until(lambda: duties.parent_of(spawners["last"]) != fork_server)
    (folder / "end first").touch()
    threads["first"].join()
    os.kill(spawners["killed"], signal.SIGKILL)
    threads["killed"].join()
    duties.wait_until(lambda: not duties.lives(pids[1]))
    (folder / "end last").touch()
    threads["last"].join()
    pids.append(launch(detach))
    chain = launch(duties.chain)
    os.kill(chain["reaper"], signal.SIGKILL)
    duties.wait_until(lambda: not duties.lives(chain["fork server"]))
    print(*pids)
"""

LIKE_TORCHS = """
import importlib, subprocess, sys

def detach():
    quiet = subprocess.DEVNULL
    return subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=quiet, stdout=quiet, stderr=quiet).pid

if __name__ == "__main__":
    api = importlib.import_module(sys.argv[1])
    where = dict(rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="detached")
    config = api.LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, start_method="spawn", **where)
    print("pid", *api.elastic_launch(config, detach)().values())
"""


class Job:
    """A job whose two workers detach a process each, and then do what is said."""

    def __init__(self, folder: Path, then: str, *options: str) -> None:
        (folder / "script.py").write_text(SCRIPT)
        command = [sys.executable, "-m", "elasticlib.run", "--nproc-per-node", "2", "--preload", "", *options]
        self.launcher = subprocess.Popen(
            [*command, str(folder / "script.py"), str(folder), then], stderr=subprocess.PIPE, text=True
        )
        self._files = [folder / "child0", folder / "child1"]

    def children(self) -> list[int]:
        duties.wait_until(lambda: all(file.exists() for file in self._files), 60.0)
        return [int(file.read_text()) for file in self._files]


OURS = (b"_reaper.py", b"_fork_server", b"program.py")


def belongs_to_nobody(pid: int) -> bool:
    """Return whether *pid* has ended, or elasticlib's process above it has."""
    try:
        command = Path(f"/proc/{duties.parent_of(pid)}/cmdline").read_bytes()
    except OSError:
        return not duties.lives(pid)
    return not any(part in command for part in OURS)


def outlive(pids: list[int]) -> list[bool]:
    """Which of *pids* live when nobody is left who could end them."""
    for pid in pids:
        duties.wait_until(lambda pid=pid: belongs_to_nobody(pid))  # type: ignore[misc]
    return [duties.lives(pid) for pid in pids]


@pytest.fixture
def end() -> Iterator[list[int]]:
    """Processes to end after the test."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_detached_processes_outlive_a_program_that_succeeds(method: str, end: list[int], tmp_path: Path) -> None:
    job = Job(tmp_path, "0", "--start-method", method)
    _, stderr = job.launcher.communicate()
    end += job.children()

    assert 0 == job.launcher.returncode, stderr
    assert [True, True] == outlive(end)
    assert "detached" not in stderr


def test_processes_detached_by_functions_outlive_success_and_program(end: list[int], tmp_path: Path) -> None:
    """The program goes on, with other launches: these end neither it nor what it has left behind."""
    (tmp_path / "program.py").write_text(FUNCTIONS)
    done = subprocess.run([sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True, timeout=120)
    assert 0 == done.returncode, done.stderr
    kept, ended = ([int(pid) for pid in line.split(",")] for line in done.stdout.splitlines())
    end += kept + ended

    assert [True] * 5 == outlive(kept)
    assert [False] * 4 == [duties.lives(pid) for pid in ended]
    assert f"process {ended[0]} (sh -c" in done.stderr


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("api", ["elasticlib", "torch.distributed.launcher.api"])
def test_process_detached_by_function_lives_on_as_with_torchs_launcher(
    api: str, end: list[int], tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(LIKE_TORCHS)
    command = [sys.executable, str(tmp_path / "program.py"), api]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert 0 == done.returncode, done.stderr
    end += [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("pid")]

    assert [True] == outlive(end)


def test_detached_processes_outlive_a_stop_with_success_of_all(end: list[int], tmp_path: Path) -> None:
    job = Job(tmp_path, "saves")
    end += job.children()
    job.launcher.terminate()
    _, stderr = job.launcher.communicate()

    assert [True, True] == outlive(end)
    assert "detached" not in stderr


def test_detached_processes_outlive_fork_server_and_reaper(end: list[int], tmp_path: Path) -> None:
    """Those of launches before and after it; what a killed spawner leaves behind is ended all the same."""
    (tmp_path / "program.py").write_text(LAUNCHES)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert 0 == done.returncode, done.stderr
    end += map(int, done.stdout.split())

    assert [True, False, True, True, True] == outlive(end)


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("succeeds", [False, True])
def test_detached_processes_live_as_long_as_all_nodes_succeed(succeeds: bool, end: list[int], tmp_path: Path) -> None:
    """Node 0 succeeds, node 1 fails then; or works until the shell that was detached has ended, not its command."""
    (tmp_path / "script.py").write_text(NODES)
    command = [sys.executable, "-m", "elasticlib.run", "--nnodes", "2", "--preload", "", "--max-restarts", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-id", "detached", "--rdzv-endpoint", f"localhost:{free_port()}"]
    command += [str(tmp_path / "script.py"), str(tmp_path), "succeeds" if succeeds else "fails"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    nodes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    stderr = "".join(node.communicate(timeout=120)[1] for node in nodes)
    shells, commands = [], []
    for file in sorted(tmp_path.glob("detached*")):
        _, shell, child = map(int, file.read_text().split())
        shells.append(shell)
        commands.append(child)
    end += shells + commands

    assert [0 if succeeds else 1] * 2 == [node.returncode for node in nodes], stderr
    assert [False, succeeds] == outlive(commands)
    assert all(f"process {pid} (sh -c" in stderr for pid in shells[: 1 if succeeds else 2]), stderr


def test_detached_processes_die_with_a_program_that_fails_and_are_named(end: list[int], tmp_path: Path) -> None:
    job = Job(tmp_path, "3")
    _, stderr = job.launcher.communicate()
    end += job.children()

    assert 1 == job.launcher.returncode
    assert [False, False] == [duties.lives(pid) for pid in end]
    assert all(f"process {pid} (sleep 600)" in stderr for pid in end), stderr


def test_detached_processes_die_with_a_launcher_that_is_killed(end: list[int], tmp_path: Path) -> None:
    job = Job(tmp_path, "waits")
    end += job.children()
    job.launcher.kill()
    job.launcher.communicate()

    duties.wait_until(lambda: not any(map(duties.lives, end)))
