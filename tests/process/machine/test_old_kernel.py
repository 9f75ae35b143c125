"""
Kernels, and containers' seccomp profiles, without pidfds and files in memory: launches do what they do elsewhere.

``python -m tests.matrix.old_kernel`` runs all tests of this folder so; these are the sample for every change.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.matrix import old_kernel
from tests.process.launches import LIMIT, free_port
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sampled,
    pytest.mark.skipif(platform.machine() not in old_kernel.CALLS, reason="the numbers of its calls are not listed"),
]
errors = pytest.mark.parametrize("error", ["ENOSYS", "EPERM"])

ROOT = Path(__file__).parents[3]
RUN = (sys.executable, "-m", "elasticlib.run")


def begun(error: str, command: Sequence[str]) -> subprocess.Popen[str]:
    """*command*, begun where the calls are answered so."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.matrix.old_kernel", "--error", error, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def ended_at_last(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def outcome(error: str, *command: str) -> tuple[int, str, str]:
    """Exit status, output and error output of *command*."""
    process = begun(error, command)
    with ended_at_last(process):
        out, err = process.communicate(timeout=LIMIT)
        return process.returncode, out, err


def program(folder: Path, code: str) -> str:
    path = folder / "train.py"
    path.write_text(code)
    return str(path)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


KILLED_ONCE = """
import os, signal, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
os.write(1, b"ran\\n")
"""


@errors
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_script_is_restarted_and_one_line_names_what_is_weaker(error: str, method: str, tmp_path: Path) -> None:
    script = program(tmp_path, KILLED_ONCE)
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--start-method", method, "--log-dir", str(tmp_path))

    status, out, err = outcome(error, *RUN, *options, script)

    assert (status, out.split()) == (0, ["ran"] * 2), err
    assert "restart 1 of 1" in err
    weaker = [line for line in err.splitlines() if "pidfds" in line]
    assert len(weaker) == 1
    assert os.strerror(getattr(errno, error)) in weaker[0]
    assert "memfd_create" in weaker[0]
    assert "seccomp profile" in weaker[0]


SAVES = """
import os, signal, sys
def save(*_):
    os.write(1, b"saved\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
os.write(1, b"%d\\n" % os.getpid())
while True:
    signal.pause()
"""


@errors
@pytest.mark.sampled(0.2)
def test_stop_reaches_each_worker(error: str, tmp_path: Path) -> None:
    process = begun(error, [*RUN, "--nproc-per-node", "2", program(tmp_path, SAVES)])
    with ended_at_last(process):
        pids = [int(line_of(process)) for _ in range(2)]

        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=LIMIT)

    assert out.split() == ["saved"] * 2
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


LEAVES = """
import os, subprocess, sys, signal
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
os.write(1, b"%d %d\\n" % (os.getpid(), child.pid))
signal.pause()
"""


@errors
@pytest.mark.sampled(0.2)
def test_killed_launcher_leaves_nothing(error: str, tmp_path: Path) -> None:
    process = begun(error, [*RUN, "--nproc-per-node", "2", program(tmp_path, LEAVES)])
    with ended_at_last(process):
        pids = [int(pid) for _ in range(2) for pid in line_of(process).split()]

        process.kill()

        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


FUNCTIONS = """
import os, signal, sys
from elasticlib import ChildFailedError, LaunchConfig, elastic_launch, pool

def double(values):
    return [2 * value for value in values]

def fail():
    raise ValueError("of the worker")

def die():
    os.kill(os.getpid(), signal.SIGKILL)

config = LaunchConfig(nproc_per_node=2, preload=())
print(elastic_launch(config, double)([1, 2]))
large = bytes(1 << 22)
print({rank: size for rank, size in elastic_launch(config, len)(large).items()})
try:
    elastic_launch(config, fail)()
except ChildFailedError as error:
    print(sorted({failure.message for failure in error.failures.values()}))
print(elastic_launch(LaunchConfig(nproc_per_node=2, start_method="fork"), double)([3]))
with pool(nproc_per_node=2, preload=(), group=None) as workers:
    print(workers.run(double, [4]), workers.map(abs, [-5, -6, -7]))
    try:
        workers.run(die)
    except ChildFailedError:
        print("died")
    print(workers.run(double, [8]))
"""


@errors
def test_functions_and_pools_return_and_raise(error: str, tmp_path: Path) -> None:
    status, out, err = outcome(error, sys.executable, program(tmp_path, FUNCTIONS))

    assert status == 0, err
    assert out.splitlines() == [
        "{0: [2, 4], 1: [2, 4]}",
        "{0: 4194304, 1: 4194304}",
        "['ValueError: of the worker']",
        "{0: [6], 1: [6]}",
        "{0: [8], 1: [8]} [5, 6, 7]",
        "died",
        "{0: [16], 1: [16]}",
    ]


@errors
@pytest.mark.sampled(0.2)
def test_two_nodes_run_and_a_killed_one_is_noticed(error: str, tmp_path: Path) -> None:
    command = [
        *(*RUN, "--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
        *("--rdzv-conf", "wait_for=min,last_call_timeout=1", "--max-restarts", "0", program(tmp_path, LEAVES)),
    ]
    first = begun(error, command)
    with ended_at_last(first):
        alone = line_of(first)
        second = begun(error, command)
        with ended_at_last(second):
            together = line_of(first), line_of(second)

            second.kill()
            again = line_of(first)

            pids = [int(pid) for line in (alone, *together, again) for pid in line.split()]
            first.send_signal(signal.SIGTERM)
            _, err = first.communicate(timeout=LIMIT)

    assert "is lost: its agent died" in err
    assert len(pids) == 8
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def test_tests_that_are_left_out_there_exist() -> None:
    for name in old_kernel.SILENT:
        file, _, test = name.partition("::")

        text = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
        function, _, variant = test.rstrip("]").partition("[")
        assert f"def {function}(" in text
        assert not variant or f'"{variant}"' in text
