"""Containers whose folders are all read-only: jobs run there unless files were asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.4)]

ROOT = Path(__file__).parents[3]
FOLDERS = "/ /tmp /var/tmp /usr/tmp"
NO_FOLDER = "error: a folder for temporary logs cannot be created"
JOB = """
import os, sys, tempfile

def work():
    try:
        return tempfile.gettempdir()
    except OSError:
        return os.environ["TORCHELASTIC_ERROR_FILE"]

def fail():
    raise ValueError("by design")

if __name__ == "__main__":
    from elasticlib import ElasticError, LaunchConfig, elastic_launch
    config = LaunchConfig(nproc_per_node=2, preload=(), max_restarts=0, **eval(sys.argv[2]))
    try:
        print(elastic_launch(config, globals()[sys.argv[1]])())
    except ElasticError as error:
        print(type(error).__name__, repr(error.__cause__))
"""


def run(*command: object, memory: bool, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with *command* where no folder can be written, but ``/dev/shm`` where *memory* is True."""
    folders = FOLDERS if memory else f"{FOLDERS} /dev/shm"
    close = "mount --bind $d $d && mount -o remount,ro,bind $d"
    script = f"""for d in {folders}; do [ ! -d $d ] || {{ {close}; }} || exit 77; done; cd / && exec "$@" """
    clean = {name: value for name, value in os.environ.items() if name not in ("TMPDIR", "TEMP", "TMP")}
    arguments = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, *map(str, command)]
    environment = clean | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("only root may mount folders, where the machine lets it")
    return done


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A program that launches the function that its first argument names."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount folders")
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


@pytest.mark.parametrize(
    ("method", "memory"), [("forkserver", True), ("forkserver", False), ("spawn", False), ("fork", False)]
)
def test_function_returns_where_no_folder_can_be_written(method: str, memory: bool, job: Path) -> None:
    done = run(job, "work", {"start_method": method}, memory=memory)

    assert (0, "{0: '', 1: ''}\n", "") == (done.returncode, done.stdout, done.stderr)


def test_exception_of_a_function_is_raised_without_an_error_file(job: Path) -> None:
    done = run(job, "fail", {}, memory=False)

    assert "ChildFailedError ValueError('by design')\n" == done.stdout


def test_script_runs_and_its_failure_is_explained(job: Path) -> None:
    failing = job.with_name("failing.py")
    failing.write_text("print('begun', flush=True)\nraise ValueError('by design')\n")

    done = run("-m", "elasticlib.run", "--preload", "", failing, memory=False)

    assert (1, "begun\n") == (done.returncode, done.stdout)
    assert "rank 0: ValueError: by design (failing.py:2)" in done.stderr
    assert "error_file: <N/A>" in done.stderr


def test_job_with_an_endpoint_runs(job: Path) -> None:
    done = run(job, "work", {"rdzv_endpoint": "127.0.0.1:0", "token": "secret"}, memory=False)

    assert (0, "{0: '', 1: ''}\n") == (done.returncode, done.stdout), done.stderr


@pytest.mark.parametrize("options", [("-r", "3"), ("-t", "3"), ("--log-dir", "/logs")])
def test_log_files_are_refused_before_anything_starts(options: tuple[str, ...], job: Path) -> None:
    done = run("-m", "elasticlib.run", *options, job, memory=True)

    assert (2, "") == (done.returncode, done.stdout)
    assert (NO_FOLDER if options[0] != "--log-dir" else "/ cannot be written; give another log_dir") in done.stderr
    assert 1 == len(done.stderr.splitlines())


def test_copies_of_lines_are_refused_before_anything_starts(job: Path) -> None:
    done = run(job, "work", {"duplicate_stdout_filters": ["loss"]}, memory=True)

    assert "ConfigError None\n" == done.stdout


def test_watchdog_keeps_its_pipe_in_shared_memory(job: Path) -> None:
    script = job.with_name("timed.py")
    script.write_text("import os; print(os.path.dirname(os.environ['TORCHELASTIC_TIMER_FILE'])[:9])")
    command = ("-m", "elasticlib.run", "--preload", "", script)

    done = run(*command, memory=True, TORCHELASTIC_ENABLE_FILE_TIMER="1")
    refused = run(*command, memory=False, TORCHELASTIC_ENABLE_FILE_TIMER="1")

    assert (0, "/dev/shm/\n") == (done.returncode, done.stdout)
    assert (2, "") == (refused.returncode, refused.stdout)
    assert "a folder for the timers of the watchdog cannot be created" in refused.stderr
